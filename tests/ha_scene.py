"""Controllers on one PostgreSQL, an agent that runs processes, and a client: a scene for fail-over, and its judge.

Owns the processes and their logs. Controllers that end are started again, as systemd does. The client submits jobs of one
GPU under ids of its own as fast as it may, and notes each answer when it has it; each job notes in a file when it begins
and ends, and on which device. The judge reads these two logs and nothing else: an acknowledged job ran exactly once, and
no device had two at a time.
"""

import contextlib
import itertools
import signal
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field, replace

from eelgrid.client import Client
from eelgrid.errors import EelgridError
from eelgrid_protos.messages import JobSchedule, Mobility, ProcessSpec, ResourceRequest, WorkloadSpec
from tests.e2e.processes import Child, fleet_of, free_port, metric
from tests.waiting import poll_until

JOB = 'echo "$(date +%s%N) {word} $EELGRID_WORKLOAD_ID $EELGRID_ATTEMPT $CUDA_VISIBLE_DEVICES" >> {log}'


@dataclass(frozen=True, slots=True)
class FailOver:
    """One fail-over: what was done, and the seconds until another was ready, all agents there, and a client served."""

    deed: str
    ready_s: float
    agents_s: float
    served_s: float


@dataclass(slots=True)
class Verdict:
    """What the two logs say."""

    acknowledged: int = 0
    refused: int = 0
    lost: list = field(default_factory=list)
    doubled: list = field(default_factory=list)
    overlapping: list = field(default_factory=list)


class HaScene:
    """Starts all of it, and ends it with the context."""

    def __init__(
        self,
        folder,
        url,
        *,
        lease_s,
        nodes=2,
        gpus=4,
        pause_s=0.2,
        names="ab",
        ingests=0,
        agent_waits=False,
        restart_grace_s=60,
    ):
        """Agents are behind as many ingest processes, or connect to the controllers, at once or when they are started."""
        self.folder = folder
        self.ran = folder / "ran.log"
        self.answers = folder / "answers.log"
        self.paused = set()
        # Changes of leaders that nobody asked for.
        self.unplanned = 0
        self.children = []
        self._lease_s, self._pause_s = lease_s, pause_s
        self._url = url
        self._numbers = itertools.count()
        self._ports = {name: (free_port(), free_port()) for name in names}
        self._controllers = {}
        self.addresses = ",".join(f"127.0.0.1:{port}" for port, _ in self._ports.values())
        # By address: the process and the address of its metrics.
        self.ingests = dict.fromkeys(f"127.0.0.1:{free_port()}" for _ in range(ingests))
        self._stop = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._submitter = threading.Thread(target=self._submit, daemon=True)
        self._nodes, self._gpus, self._agent_waits = nodes, gpus, agent_waits
        self._restart_grace_s = restart_grace_s
        self.ran.touch()
        self.answers.touch()

    def __enter__(self):
        for name in self._ports:
            self._begin(name)
        self._supervisor.start()
        self.leader = poll_until(self.find_leader, "one leads", within_s=120.0)
        for address in self.ingests:
            self.begin_ingest(address)
        if not self._agent_waits:
            self.start_agent()
        self._submitter.start()
        return self

    def start_agent(self):
        """Starts the agent of all nodes, and waits until they are connected."""
        node = {"cpu_milli": 64_000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": self._gpus}]}
        fleet = fleet_of(self.folder / "fleet.json", [{"name": f"n{n}", **node} for n in range(self._nodes)])
        flags = ("--listen", f"127.0.0.1:{free_port()}", "--metrics", f"127.0.0.1:{free_port()}", "--allow-root")
        self.agent_metrics = flags[3]
        self.agent = self._child(
            "agent", "-m", "eelgrid_agent", "--simulate", fleet, "--run-processes", "--state", self.folder / "agent",
            "--controller", ",".join(self.ingests) or self.addresses, *flags,
        )  # fmt: skip
        self.wait_for_agents(self.leader)

    def __exit__(self, *reason):
        self._stop.set()
        for thread in (self._supervisor, self._submitter):
            if thread.ident is not None:
                thread.join(20.0)
        for child in reversed(self.children):
            with contextlib.suppress(ProcessLookupError):
                if child.process.poll() is None:
                    child.signal(signal.SIGCONT)
                    child.kill()

    def _child(self, name, *arguments):
        child = Child(name, [str(word) for word in arguments], self.folder)
        self.children.append(child)
        return child

    # Controllers

    def _begin(self, name):
        port, metrics = self._ports[name]
        self._controllers[name] = self._child(
            f"{name}{next(self._numbers)}", "-m", "eelgrid_controller", "--listen", f"127.0.0.1:{port}",
            "--metrics", f"127.0.0.1:{metrics}", "--data", self.folder / name, "--database", self._url,
            "--lease", self._lease_s, "--restart-grace", self._restart_grace_s, "--no-savings",
        )  # fmt: skip

    def begin_ingest(self, address):
        """Starts the ingest process at an address."""
        metrics = f"127.0.0.1:{free_port()}"
        child = self._child(
            f"ingest{next(self._numbers)}", "-m", "eelgrid_controller", "--ingest", self.addresses, "--listen", address,
            "--metrics", metrics,
        )  # fmt: skip
        self.ingests[address] = child, metrics

    def _supervise(self):
        while not self._stop.wait(0.1):
            for name, child in list(self._controllers.items()):
                if child.process.poll() is not None and not self._stop.is_set():
                    self._begin(name)

    def find_metrics(self, name):
        """Where a controller's metrics are."""
        return f"127.0.0.1:{self._ports[name][1]}"

    def process(self, name):
        """The process of a controller as it is now."""
        return self._controllers[name]

    def find_leader(self, former=None):
        """Who serves, but not in the former leader's process; None if nobody does."""
        for name, (_, metrics) in self._ports.items():
            if self._controllers[name] is former or name in self.paused:
                continue
            asked = f"http://127.0.0.1:{metrics}/readyz"
            with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(asked, timeout=1.0):
                return name
        return None

    def wait_until_all_stand(self):
        """Each controller leads or follows, so that the next fail-over meets warm ones.

        Another may lead by now than the last fail-over left: a machine that stands still for a lease lets go of it.
        """

        leader = poll_until(self.find_leader, "one leads", within_s=120.0)
        if leader != self.leader:
            self.leader, self.unplanned = leader, self.unplanned + 1

        def stands(name):
            if name == self.find_leader():
                self.leader = name
            with contextlib.suppress(urllib.error.URLError, OSError, KeyError):
                metrics = f"127.0.0.1:{self._ports[name][1]}"
                age = metric(metrics, "eelgrid_following_age_seconds") if name != self.leader else 0.0
                return age < 2.0
            return False

        poll_until(lambda: all(map(stands, self._ports)), "all controllers stand", within_s=120.0)

    def wait_for_metric(self, metrics, name, value):
        """A process's metric has this value."""

        def is_there():
            with contextlib.suppress(urllib.error.URLError, OSError, KeyError):
                return metric(metrics, name) == value
            return False

        poll_until(is_there, f"{name} {value} at {metrics}", within_s=120.0)

    def wait_for_agents(self, name):
        """All nodes are connected to this controller."""
        metrics = f"127.0.0.1:{self._ports[name][1]}"

        self.wait_for_metric(metrics, "eelgrid_agents_connected", self._nodes)

    def fail_over(self, deed, number, *, stop_s=0.0, also=()):
        """Sends the leader a signal, and at once some other processes; returns how long another leader took.

        Stopped ones go on after `stop_s`, by when the former leader has to end.
        """
        self.wait_until_all_stand()
        old, former, began_s = self.leader, self.process(self.leader), time.monotonic()
        at_ns = time.time_ns()
        for child in (former, *also):
            child.signal(number)
        if number == signal.SIGSTOP:
            self.paused.add(old)
        # The one that was started again in its place may be the first when the lease ends.
        self.leader = poll_until(lambda: self.find_leader(former), f"another than {former.name} leads", within_s=120.0)
        ready_s = time.monotonic() - began_s
        self.wait_for_agents(self.leader)
        agents_s = time.monotonic() - began_s
        served_ns = poll_until(lambda: self._first_answer(at_ns + int(ready_s * 1e9)), "a client is served")
        if number == signal.SIGSTOP:
            self._stop.wait(max(0.0, began_s + stop_s - time.monotonic()))
            for child in (former, *also):
                child.signal(signal.SIGCONT)
            self.paused.discard(old)
            assert former.ended(30.0) == 1, former.tail()
        return FailOver(deed, ready_s, agents_s, (served_ns - at_ns) / 1e9)

    def _first_answer(self, since_ns):
        for line in self.answers.read_text().splitlines():
            word, _, at_ns, *_ = line.split()
            if word == "ok" and int(at_ns) > since_ns:
                return int(at_ns)
        return None

    # The client

    def _note(self, word):
        return JOB.format(word=word, log=self.ran)

    def _spec(self, work="sleep 0.2"):
        script = f"{self._note('begin')}; {work}; {self._note('end')}"
        return WorkloadSpec(
            name="job",
            request=ResourceRequest(gpu_count=1, gpu_milli=1000),
            mobility=Mobility.FIXED,
            process=ProcessSpec(argv=("/bin/sh", "-c", script), working_directory=str(self.folder)),
        )

    def submit_retried(self, key, *, first_s, second_s):
        """Submits a job that fails after some seconds in its first attempt, and runs longer in its second."""
        first = f"if [ $EELGRID_ATTEMPT = 1 ]; then sleep {first_s}; {self._note('end')}; exit 1; fi"
        spec = replace(self._spec(f"{first}; sleep {second_s}"), schedule=JobSchedule(retries_most=2))
        with Client(self.addresses, timeout_s=20.0) as client:
            client.submit_workload(spec, workload_id=key)

    def count_begins(self, key):
        """How often each attempt of a job has begun."""
        counts = {}
        for (name, attempt, _), run in self._runs().items():
            if name == key:
                counts[int(attempt)] = counts.get(int(attempt), 0) + len(run["begin"])
        return counts

    def _submit(self):
        spec = self._spec()
        with self.answers.open("a") as log, Client(self.addresses, timeout_s=4.0) as client:
            for number in itertools.count():
                if self._stop.is_set() or self.is_submitting.is_set():
                    return
                key = f"w-{number}"
                try:
                    client.submit_workload(spec, workload_id=key)
                    print("ok", key, time.time_ns(), file=log, flush=True)
                except EelgridError as error:
                    print("no", key, time.time_ns(), repr(str(error)), file=log, flush=True)
                self._stop.wait(self._pause_s)

    @property
    def is_submitting(self):
        """Set when the client is to submit no more."""
        return self.__dict__.setdefault("_enough", threading.Event())

    # The judge

    def list_ended(self):
        """The jobs that have run to their end."""
        return {key for (key, _, _), run in self._runs().items() if run["end"]}

    def _runs(self):
        """Of each job and attempt, its device, begin and end, by the jobs' own log."""
        runs = {}
        for line in self.ran.read_text().splitlines():
            at_ns, word, key, attempt, device = line.split()
            run = runs.setdefault((key, attempt, device), {"begin": [], "end": []})
            run[word].append(int(at_ns))
        return runs

    def judge(self, *, within_s=120.0):
        """Waits until all that was acknowledged has run, and says what the logs show."""
        self.is_submitting.set()
        self._submitter.join(30.0)
        verdict, acknowledged = Verdict(), set()
        for line in self.answers.read_text().splitlines():
            word, key, *_ = line.split()
            if word == "ok":
                acknowledged.add(key)
            else:
                verdict.refused += 1
        verdict.acknowledged = len(acknowledged)

        def have_run():
            return acknowledged <= self.list_ended()

        with contextlib.suppress(AssertionError):
            poll_until(have_run, "all that was acknowledged has run", within_s=within_s)
        runs = self._runs()
        begins = [(key, begin) for (key, _, _), run in runs.items() for begin in run["begin"]]
        counts = {key: 0 for key, _ in begins}
        for key, _ in begins:
            counts[key] += 1
        verdict.lost = sorted(acknowledged - {key for (key, _, _), run in runs.items() if run["end"]})
        verdict.doubled = sorted(key for key, count in counts.items() if count > 1)
        by_device = {}
        for (key, _, device), run in runs.items():
            for begin, end in zip(run["begin"], run["end"], strict=False):
                by_device.setdefault(device, []).append((begin, end, key))
        for device, spans in by_device.items():
            spans.sort()
            for (_, end, key), (begin, _, other) in itertools.pairwise(spans):
                if begin < end:
                    verdict.overlapping.append((device, key, other))
        return verdict
