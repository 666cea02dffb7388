"""Two controllers and a front between real processes: placed by price, at most once, whoever is killed or stopped."""

import contextlib
import functools
import json
import os
import signal
import ssl
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders.cluster import build_request
from tests.e2e.processes import Cluster, fleet_of, free_address, metric
from tests.metrics_lint import faults as faults_of_page

from eelgrid import Client
from eelgrid_protos import faults, rpc, transport
from eelgrid_protos.messages import (
    CancelWorkloadRequest,
    DependencyCondition,
    EnergyPrices,
    ExplainWorkloadRequest,
    GangPart,
    GetDispatchRequest,
    GetWorkloadRequest,
    JobDeadline,
    JobDependency,
    JobSchedule,
    ListClustersRequest,
    ListWorkloadsRequest,
    Mobility,
    PricePeriod,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = ("--allow-root",) if os.geteuid() == 0 else ()
NODE = {"cpu_milli": 16000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": 1}]}
JOB = ("submit", "--name", "job", "--gpus", "1", "--cpu", "1", "--memory", "1GiB")


class Site(Cluster):
    """One cluster: a controller with one simulated GPU."""

    def __init__(self, folder, name, price, **options):
        folder.mkdir()
        super().__init__(folder, **options)
        self.name, self.price = name, price

    def begin(self, *arguments, tls=None, agent_tls=None, agent_flags=()):
        """Starts it with its price of energy."""
        self.process = self.controller(*arguments, tls=tls)
        fleet = fleet_of(self.folder / "fleet.json", [{"name": f"{self.name}-1", **NODE}])
        self.agent(fleet, *agent_flags, tls=agent_tls)
        self.until_ready(1)
        period = PricePeriod(begins_minute=0, price_per_kwh=self.price, carbon_kg_per_kwh=self.price)
        self.set_policy(prices=EnergyPrices(periods=(period,)))

    def placed(self):
        """What runs here."""
        request = ListWorkloadsRequest(page_size=1000, phases=(WorkloadPhase.PLACED,))
        return {one.workload_id for one in self.operators.list_workloads(request, timeout=10.0).workloads}

    def all(self):
        """The phase of everything that this cluster knows, by id."""
        answer = self.operators.list_workloads(ListWorkloadsRequest(page_size=1000), timeout=10.0)
        return {one.workload_id: one.phase for one in answer.workloads}


class Front(Cluster):
    """The front of some clusters; its address is the one that eelctl asks."""

    def begin(self, sites, *arguments, tls=None):
        """Starts it, or starts it again on the same records."""
        clusters = (word for site in sites for word in ("--cluster", f"{site.name}={site.address}"))
        self.process = self.run(
            "front", "-m", "eelgrid_controller.federation", "--listen", self.address, "--data", str(self.data),
            "--call-timeout", "2", "--metrics", self.metrics, *clusters, *arguments, *self._tls_flags(tls or self.tls),
        )  # fmt: skip
        self.until(lambda: self.process.said("event=serving"), what="the front serves")

    @functools.cached_property
    def page(self):
        """Where its page is, if it serves one."""
        return free_address()

    @property
    def federation(self):
        """FederationService as blocking calls."""
        channel = self._channels.enter_context(transport.open_blocking_channel(self.address, tls=self.tls))
        return rpc.build_client(rpc.FEDERATION_SERVICE, channel)

    def dispatch(self, key):
        """Where a workload is."""
        return self.federation.get_dispatch(GetDispatchRequest(workload_id=key), timeout=10.0)

    def clusters(self):
        """The listing of clusters by name."""
        found = self.federation.list_clusters(ListClustersRequest(), timeout=15.0).clusters
        return {one.name: one for one in found}


@pytest.fixture
def world(tmp_path):
    """A cheap and a dear cluster, and a front of both that is not started yet."""
    with (
        Site(tmp_path / "cheap", "cheap", 0.1) as cheap,
        Site(tmp_path / "dear", "dear", 0.4) as dear,
    ):
        folder = tmp_path / "front"
        folder.mkdir()
        with Front(folder) as front:
            yield cheap, dear, front


def submit(front, key, *more):
    """Submits a job of one GPU by eelctl."""
    return json.loads(front.eelctl("-o", "json", *JOB, "--id", key, *more).stdout)


def build_after(key, parent):
    """A job that starts once another has ended in any way."""
    after = (JobDependency(workload_id=parent, condition=DependencyCondition.ENDED),)
    return build_request(key, schedule=JobSchedule(after=after))


def get(front, key):
    """A workload as the front shows it."""
    return front.operators.get_workload(GetWorkloadRequest(workload_id=key), timeout=10.0).workload


def test_work_goes_to_the_cheaper_cluster_and_then_to_the_other_and_every_command_works(world):
    cheap, dear, front = world
    cheap.begin()
    dear.begin()
    front.begin((cheap, dear))

    assert "cheap starts now" in front.eelctl(*JOB, "--dry-run").stdout
    submit(front, "first")
    front.until(lambda: cheap.placed() == {"first"}, what="it runs where energy is cheap")
    submit(front, "second")
    front.until(lambda: dear.placed() == {"second"}, what="the next starts where there is room")
    # Repeated with its id nothing changes, whoever asks.
    submit(front, "first")
    assert (cheap.placed(), dear.placed()) == ({"first"}, {"second"})
    # Each would start at once where it is, so no other cluster was asked to reserve it.
    assert (set(cheap.all()), set(dear.all())) == ({"first"}, {"second"})

    table = front.eelctl("clusters").stdout.splitlines()
    assert [line.split()[:3] for line in table[1:]] == [["cheap", "ready", "1"], ["dear", "ready", "1"]]
    shown = front.eelctl("clusters", "second").stdout
    assert "cluster    dear" in shown
    assert "copy       dear: released" in shown
    assert "In cluster dear" in front.eelctl("explain", "second").stdout
    assert "second" in front.eelctl("workloads").stdout
    assert get(front, "second").placements[0].node_name == "dear-1"

    assert json.loads(front.eelctl("-o", "json", "energy", "--since", "1h").stdout)["damaged"] == []

    # One cluster behind it, by its name.
    assert front.eelctl("--cluster", "dear", "nodes").stdout.splitlines()[1].startswith("dear-1")
    assert "name one of cheap, dear" in front.eelctl("--cluster", "west", "nodes", code=4).stderr
    assert "eelctl --cluster NAME" in front.eelctl("nodes", code=5).stderr

    # Held, it waits at the front, and is placed by what holds when it is released.
    request = build_request("held", gpus=0)
    held = front.operators.submit_workload(replace(request, hold=True), timeout=10.0).workload
    assert held.held_by
    assert "waits at the front" in held.reason
    assert "held" not in {*cheap.all(), *dear.all()}
    assert "held: released" in front.eelctl("release", "held").stdout
    front.until(lambda: "held" in {*cheap.placed(), *dear.placed()}, what="it runs once it is released")
    assert front.eelctl("release", "held").stdout, "repeated it changes nothing"
    assert "eelctl --cluster" in front.eelctl("hold", "held", code=5).stderr
    front.eelctl("cancel", "--yes", "held")
    by_night = build_request("late", deadline=JobDeadline(end_ns=time.time_ns() + 10**13), expected_runtime_s=60.0)
    with pytest.raises(faults.InvalidArgument, match="deadline"):
        front.operators.submit_workload(replace(by_night, hold=True), timeout=10.0)
    lone = front.eelctl("clusters", code=1, address=cheap.address).stderr
    assert "is no front of several clusters" in lone

    front.eelctl("cancel", "--yes", "first", "second")
    front.until(lambda: not cheap.placed() and not dear.placed(), what="both have ended")

    # A promised deadline is not promised to what is held, so one cluster alone gets it.
    submit(front, "by-night", "--deadline", "+6h", "--expect", "1h")
    front.until(lambda: cheap.placed() == {"by-night"}, what="it runs")
    assert [copy.cluster for copy in front.dispatch("by-night").copies] == ["cheap"]

    # The Python client, unchanged.
    with Client(front.address) as client:
        assert client.get_summary().gpus == 2
        assert client.get_workload("by-night").spec.name == "job"
        assert {one.workload_id for one in client.list_workloads()} == {"first", "second", "held", "by-night"}
        client.cancel_workload("by-night")
    front.until(lambda: not cheap.placed(), what="it has ended")


def test_a_cluster_that_is_stopped_or_killed_delays_nothing_and_runs_nothing_twice(world):
    cheap, dear, front = world
    cheap.begin()
    dear.begin()
    front.begin((cheap, dear))

    cheap.process.signal(signal.SIGSTOP)
    submit(front, "while-stopped")
    front.until(lambda: dear.placed() == {"while-stopped"}, what="the other cluster takes it")
    listed = front.clusters()
    assert listed["cheap"].problem
    assert listed["cheap"].summary is None
    assert listed["dear"].summary.placed == 1
    assert listed["cheap"].left_out >= 1
    assert "cheap is missing" in front.eelctl("energy", "--since", "1h").stdout
    cheap.process.process.send_signal(signal.SIGCONT)
    front.until(lambda: not front.clusters()["cheap"].problem, what="it is back")
    assert cheap.placed() == set()

    # What it has it keeps, and is told of the end once it is back.
    submit(front, "kept")
    front.until(lambda: cheap.placed() == {"kept"}, what="it runs in the cheap one")
    cheap.process.kill()
    front.until(lambda: "does not answer" in get(front, "kept").reason, what="the front says so")
    assert front.dispatch("kept").chosen == "cheap"
    answer = json.loads(front.eelctl("--timeout", "15", "-o", "json", "cancel", "--yes", "kept").stdout)
    assert "being cancelled in cheap" in json.dumps(answer)
    assert "kept" not in dear.placed()
    cheap.process = cheap.controller()
    cheap.reconnect()
    front.until(lambda: cheap.all()["kept"] is WorkloadPhase.CANCELLED, within_s=60.0, what="it ends there")


def test_work_that_waits_goes_to_where_it_would_start(world):
    cheap, dear, front = world
    cheap.begin()
    dear.begin()
    front.begin((cheap, dear), "--move-after", "1")
    for key in ("first", "second", "third"):
        submit(front, key)
    front.until(lambda: len(cheap.placed()) == len(dear.placed()) == 1, what="both GPUs are held")
    assert front.dispatch("third").chosen == "cheap"
    assert get(front, "third").phase is WorkloadPhase.PENDING

    front.eelctl("cancel", "--yes", "second")
    front.until(lambda: dear.placed() == {"third"}, what="it goes to the other cluster")
    assert cheap.all()["third"] is WorkloadPhase.CANCELLED
    assert not _ran(cheap, "third")
    front.until(lambda: get(front, "third").placements, what="the front shows where")
    assert front.dispatch("third").chosen == "dear"
    assert cheap.placed() == {"first"}


def test_arrays_gangs_and_what_starts_after_other_work_go_to_one_cluster_each(world):
    cheap, dear, front = world
    cheap.begin()
    dear.begin()
    front.begin((cheap, dear), "--page", front.page, "--page-of", "cheap=http://cheap.example/")
    submit(front, "array", "--array", "0-2")
    front.until(lambda: cheap.placed() == {"array_0"}, what="its first element runs where energy is cheap")
    front.until(lambda: dear.all().get("array_0", WorkloadPhase.CANCELLED).is_ended, what="no copy is left behind")
    assert get(front, "array").array.placed == 1
    assert "array" in front.eelctl("workloads").stdout

    # It goes to the cluster of what it starts after, though the other one has room.
    front.operators.submit_workload(build_after("child", "array"), timeout=10.0)
    front.until(lambda: "child" in cheap.all(), what="the cluster of the array has it")
    assert "child" not in dear.all()
    assert [copy.cluster for copy in front.dispatch("child").copies] == ["cheap"]
    with pytest.raises(faults.InvalidArgument, match="cannot know when"):
        front.operators.submit_workload(build_after("orphan", "nobody"), timeout=10.0)

    # Nothing of a gang is in any cluster before all of it is there.
    gang = GangPart(name="pair", parts=2)
    first = front.operators.submit_workload(build_request("part-0", gpus=0, gang=gang), timeout=10.0).workload
    assert "waits at the front for 1 more part" in first.reason
    assert "part-0" not in {*cheap.all(), *dear.all()}
    front.operators.submit_workload(build_request("part-1", gpus=0, gang=gang), timeout=10.0)
    parts = {"part-0", "part-1"}
    front.until(lambda: parts <= cheap.placed() or parts <= dear.placed(), what="both parts run in one cluster")
    assert not (parts & cheap.placed() and parts & dear.placed())

    for element in range(3):
        key = f"array_{element}"
        front.until(lambda key=key: key in cheap.placed(), what="the next element runs")
        cheap.operators.cancel_workload(CancelWorkloadRequest(workload_id=key), timeout=10.0)
    front.until(lambda: "child" in cheap.placed(), what="what starts after the array runs")
    front.until(lambda: get(front, "array").phase.is_ended, what="the front says that the array has ended")

    shown = urllib.request.urlopen(f"http://{front.page}/", timeout=10.0).read().decode()
    assert all(word in shown for word in ("cheap", "dear", "part-0", "array", "g/kWh", "http://cheap.example/"))

    assert metric(front.metrics, "eelgrid_front_cluster_up") == 2
    assert metric(front.metrics, "eelgrid_front_workloads") >= 1
    page = urllib.request.urlopen(f"http://{front.metrics}/metrics", timeout=10.0).read().decode()
    docs = (ROOT / "docs/reference/controller-metrics.md").read_text()
    assert [fault for fault in faults_of_page(page, docs) if "eelgrid_front" in fault] == []


def test_a_front_that_is_killed_goes_on_where_it_was(world):
    cheap, dear, front = world
    cheap.begin()
    dear.begin()
    front.begin((cheap, dear))
    for number, pause_s in enumerate((0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)):
        asking = threading.Thread(target=_submit_once, args=(front, f"burst-{number}"))
        asking.start()
        # Not a wait: the kill falls at another step of the submission each time.
        time.sleep(pause_s)
        front.process.kill()
        asking.join()
        front.begin((cheap, dear))
        front.reconnect()
    # Of the others none may have been recorded before its front was killed.
    for key in ("last-0", "last-1"):
        submit(front, key)
    front.until(
        lambda: len(cheap.placed()) == len(dear.placed()) == 1, within_s=60.0, what="both GPUs are held, once each"
    )
    assert not cheap.placed() & dear.placed()
    keys = {*cheap.all(), *dear.all()}
    ran = set()

    def end_all():
        shown = {key: get(front, key).phase for key in keys}
        for key in (key for key, phase in shown.items() if phase is WorkloadPhase.PLACED):
            ran.add(key)
            front.eelctl("cancel", "--yes", key)
        return all(phase.is_ended for phase in shown.values())

    front.until(end_all, within_s=60.0, what="all of them have run and ended")
    assert ran == keys
    both = [key for key in keys if _ran(cheap, key) and _ran(dear, key)]
    assert both == []


def _submit_once(front, key):
    """A submission that may be cut off."""
    with transport.open_blocking_channel(front.address, tls=None) as channel, contextlib.suppress(faults.Fault):
        rpc.build_client(rpc.OPERATOR_SERVICE, channel).submit_workload(build_request(key), timeout=10.0)


def _ran(site, key):
    try:
        return site.operators.get_workload(GetWorkloadRequest(workload_id=key), timeout=10.0).workload.placed_ns > 0
    except faults.NotFound:
        return False


def read_page(address, tls, *, authority=None):
    """Status and text of the page with a viewer's certificate, or without one."""
    context = ssl.create_default_context(cafile=(authority or tls).authority)
    if tls is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    try:
        with urllib.request.urlopen(f"https://{address}/", timeout=10.0, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_running_job_is_requeued_in_its_cluster(tmp_path):
    with Site(tmp_path / "cheap", "cheap", 0.1) as cheap, Front(tmp_path) as front:
        cheap.begin(agent_flags=("--run-processes", *PROCESSES, "--state", str(tmp_path / "agent")))
        front.begin((cheap,))
        process = ProcessSpec(argv=("sleep", "600"), working_directory="/")
        front.operators.submit_workload(build_request("long", process=process, mobility=Mobility.FIXED), timeout=10.0)
        front.operators.submit_workload(build_request("plain", gpus=0), timeout=10.0)

        def shown(key):
            return cheap.operators.get_workload(GetWorkloadRequest(workload_id=key), timeout=10.0).workload

        front.until(lambda: {"long", "plain"} == cheap.placed() and shown("long").attempts, what="it runs")
        assert "--cluster NAME requeue --hold" in front.eelctl("requeue", "--hold", "long", code=5).stderr
        assert "runs no process" in front.eelctl("requeue", "plain", code=5).stderr
        front.eelctl("requeue", "long", "--reason", "wrong data")
        front.until(lambda: shown("long").attempt == 2, what="it runs again")
        front.until(lambda: get(front, "long").attempt == 2, what="the front shows it")
        front.eelctl("cancel", "--yes", "long", "plain")


def test_a_caller_gets_no_more_than_both_his_certificate_and_the_fronts_allow(world, tmp_path):
    from tests.certificates_rig import Authority

    cheap, dear, front = world
    authority = Authority()

    def party(who, *subject, **options):
        return authority.write(tmp_path / who, *subject, **options)

    admin = party("admin", ("O", "eelgrid:admin"), ("CN", "root"))
    server = party("controller", ("CN", "controller"), names=("127.0.0.1",))
    agent = party("agent", ("O", "eelgrid:agent"), names=("127.0.0.1",))
    ours = party(
        "front", ("O", "eelgrid:submitter"), ("O", "eelgrid:impersonate:alice"), ("O", "eelgrid:namespace:research"),
        ("CN", "front"), names=("127.0.0.1",),
    )  # fmt: skip
    alice = party("alice", ("O", "eelgrid:submitter"), ("O", "eelgrid:namespace:*"), ("CN", "alice"))
    bob = party("bob", ("O", "eelgrid:submitter"), ("O", "eelgrid:namespace:research"), ("CN", "bob"))
    for site in (cheap, dear):
        site.tls = admin
        site.begin("--roles", "require", tls=server, agent_tls=agent)
    front.tls = admin
    front.begin((cheap, dear), "--page", front.page, tls=ours)

    front.eelctl(*JOB, "--id", "hers", "--namespace", "research", tls=alice)
    front.until(lambda: cheap.placed() == {"hers"}, what="it runs")
    found = cheap.operators.get_workload(GetWorkloadRequest(workload_id="hers"), timeout=10.0).workload
    assert (found.owner, found.spec.user, found.spec.namespace) == ("alice", "alice", "research")
    # She may use any namespace, and the front only this one.
    refused = front.eelctl(*JOB, "--namespace", "other", code=5, tls=alice).stderr
    assert "namespace" in refused
    # The clusters do not let the front act for him, and he states nobody else.
    assert "needs that user's certificate" in front.eelctl(*JOB, "--namespace", "research", code=5, tls=bob).stderr
    assert "bob" in front.eelctl(*JOB, "--user", "alice", "--namespace", "research", code=5, tls=bob).stderr
    for verb in (("cancel", "--yes"), ("requeue",)):
        assert "alice" in front.eelctl(*verb, "hers", code=5, tls=bob).stderr
    # In a cluster he has his own rights, by his own certificate.
    assert "alice" in front.eelctl("--cluster", "cheap", "cancel", "--yes", "hers", code=5, tls=bob).stderr
    # What she hands over in an environment is shown to her.
    process = ProcessSpec(argv=("train",), working_directory="/", environment={"TOKEN": "hunter2"})
    spec = WorkloadSpec(
        name="train",
        request=ResourceRequest(cpu_milli=100),
        namespace="research",
        process=process,
        mobility=Mobility.FIXED,
    )
    for files, value in ((alice, "hunter2"), (bob, "***"), (admin, "hunter2")):
        with transport.open_blocking_channel(front.address, tls=files) as channel:
            at_front = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
            if files is alice:
                at_front.submit_workload(SubmitWorkloadRequest(spec=spec, workload_id="held", hold=True), timeout=20.0)
            explained = at_front.explain_workload(ExplainWorkloadRequest(workload_id="held"), timeout=20.0)
            listed = at_front.list_workloads(ListWorkloadsRequest(), timeout=20.0).workloads
            got = at_front.get_workload(GetWorkloadRequest(workload_id="held"), timeout=20.0).workload
        found = [got, explained.explanation.workload, *(one for one in listed if one.workload_id == "held")]
        assert [one.spec.process.environment["TOKEN"] for one in found] == [value] * 3
    unroled = party("unroled", ("CN", "carol"))
    assert "role" in front.eelctl("workloads", code=5, tls=unroled).stderr
    # The page of all clusters is as closed as the calls.
    status, shown = read_page(front.page, admin)
    assert (status, "hers" in shown) == (200, True)
    status, shown = read_page(front.page, unroled)
    assert (status, "hers" in shown) == (403, False)
    for stranger in (None, Authority().write(tmp_path / "stranger", ("O", "eelgrid:admin"))):
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            read_page(front.page, stranger, authority=admin)
    front.eelctl("cancel", "--yes", "hers", tls=alice)
    front.until(lambda: not cheap.placed(), what="she ends it")
