"""Engines as one suite drives them: a controller, an engine under it, and its jobs, all by the same few calls.

Owns how a job that waits for a word of ours is submitted to each engine, what the engine itself says of it, and what an engine
does not promise, with the reason. Must not know what is expected. Each engine is there as a program of our own, which is always
there, and where it is found as a real one. The local engine is ours: its jobs are always real processes.
"""

import os
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from eelgrid_controller.engines.flux.resource_sets import format_job_id, parse_resource_set
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import (
    GetWorkloadRequest,
    ListNodesRequest,
    ListWorkloadsRequest,
    Mobility,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)
from tests.contracts import flux_contract_test
from tests.e2e import processes
from tests.e2e.processes import Cluster, fleet_of
from tests.fakes.ray_dashboard import FakeRay
from tests.fakes.slurm_commands import FakeSlurm, is_leased
from tests.flux_rig import HOSTS, build_jobspec, find_flux
from tests.ray_rig import MISSING as RAY_MISSING
from tests.ray_rig import RayCluster
from tests.slurm_rig import SlurmCluster, find_missing
from tests.waiting import poll_until

# Of each node.
GPUS = 4
ROOT = ("--allow-root",) if os.geteuid() == 0 else ()


def list_engines():
    """Engines by name, with why one cannot be tried here, or nothing."""
    slurm = find_missing()
    flux = "" if find_flux() else "no flux with flux.scheduler and grpc here"
    return {
        "local": "", "slurm-fake": "", "slurm": slurm and f"no Slurm here: {slurm}", "ray-fake": "", "ray": RAY_MISSING,
        "flux-fake": "", "flux": flux,
    }  # fmt: skip


class EngineWorld:
    """A controller and an engine. A job is what `submit` returns; devices are pairs of a node and an index."""

    names = ("n0", "n1")
    options = ()
    # How long a promise may take to be seen.
    within_s = 90.0
    # What the engine does not promise, by the name of the promise, with the reason.
    lacks = MappingProxyType({})

    def __init__(self, folder):
        self.folder, self.cluster = folder, Cluster(folder)
        # By job, the GPUs that it asked for.
        self.jobs = {}
        self.open()
        self.start_controller()

    def open(self):
        """Starts the engine."""

    def start_controller(self):
        """Starts a controller; returns when it knows the engine's nodes."""
        self.controller = self.cluster.controller(*self.options)
        self.cluster.until_ready(len(self.names))

    def kill_controller(self, *, loses_journal=False):
        """Kills the controller, and its journal with it."""
        self.controller.kill()
        if loses_journal:
            self.cluster.data.rename(self.cluster.data.with_name(f"lost-{len(self.cluster.children)}"))

    def close(self):
        """Nothing runs when this returns."""
        self.cluster.close()

    def clear(self):
        """Ends all jobs of a test, and waits until the core holds nothing."""
        for job in self.jobs:
            self.cancel(job)
        self.jobs.clear()
        poll_until(lambda: not self.list_placed(), "the core holds nothing", within_s=60.0)
        poll_until(lambda: not self.devices(), "the engine holds nothing", within_s=60.0)

    def start(self, gpus=1):
        """Submits a job, which is cleared after the test."""
        job = self.submit(gpus)
        self.jobs[job] = gpus
        return job

    def start_ending(self, code):
        """Submits a job that ends with a code once `end` says so."""
        return self.start()

    def workload(self, job):
        """What the core has of a job; None if it knows nothing of it."""
        with suppress(NotFound):
            request = GetWorkloadRequest(workload_id=self.key(job))
            return self.cluster.operators.get_workload(request, timeout=10.0).workload
        return None

    def phase(self, job):
        """Its phase; None if the core knows nothing of it."""
        found = self.workload(job)
        return None if found is None else found.phase

    def list_placed(self):
        """All workloads that the core has placed."""
        request = ListWorkloadsRequest(phases=(WorkloadPhase.PLACED,), page_size=1000)
        # A controller that is busy, or has just been started anew, is asked again.
        return self.cluster.until(lambda: (self.cluster.operators.list_workloads(request, timeout=10.0),))[0].workloads

    def known_devices(self):
        """The devices that the core says are held, each with the keys of its holders."""
        held = {}
        for workload in self.list_placed():
            for place in workload.placements:
                for index in place.gpu_indexes:
                    held.setdefault((place.node_name, index), []).append(workload.workload_id)
        return held

    def holds_all(self, job):
        """Whether the engine says of as many devices as a job asked for that it holds them."""
        return sum(job in jobs for jobs in self.devices().values()) == self.jobs[job]

    def held_by_engine(self):
        """The same by the engine, with the keys of the core."""
        return {device: [self.key(job) for job in jobs] for device, jobs in self.devices().items()}


class LocalWorld(EngineWorld):
    """Eelgrid's own engine: an agent that runs processes on simulated GPUs."""

    names = ("box",)
    lacks = MappingProxyType(
        {"adopts without a journal": "processes of an agent are named as unknown, for `eelctl reconcile`"}
    )

    def open(self):
        node = {"name": "box", "cpu_milli": 16_000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": GPUS}]}
        fleet = fleet_of(self.folder / "fleet.json", [node])
        self.cluster.agent(fleet, "--run-processes", *ROOT, "--state", str(self.folder / "agent"))
        self._numbers, self._uuids = {}, {}

    def start_controller(self):
        super().start_controller()
        answer = self.cluster.operators.list_nodes(ListNodesRequest(page_size=10), timeout=10.0)
        self._uuids = {gpu.uuid: ("box", gpu.index) for node in answer.nodes for gpu in node.inventory.gpus}

    def key(self, job):
        return job

    def submit(self, gpus):
        number = len(self._numbers)
        script = f"echo $$ $CUDA_VISIBLE_DEVICES >> starts-{number}; {wait_for_word(self.folder, number)}"
        spec = WorkloadSpec(
            name=f"job-{number}",
            request=ResourceRequest(gpu_count=gpus, gpu_milli=1000),
            mobility=Mobility.FIXED,
            process=ProcessSpec(argv=("sh", "-c", script), working_directory=str(self.folder)),
        )
        request = SubmitWorkloadRequest(spec=spec)
        job = self.cluster.operators.submit_workload(request, timeout=10.0).workload.workload_id
        self._numbers[job] = number
        return job

    def end(self, job, code):
        (self.folder / f"go-{self._numbers[job]}").write_text(str(code))

    def cancel(self, job):
        if not self.phase(job).is_ended:
            self.cluster.eelctl("cancel", "--yes", job)

    def _starts(self, job):
        return [line.split() for line in read_lines(self.folder / f"starts-{self._numbers[job]}")]

    def starts(self, job):
        return len(self._starts(job))

    def is_over(self, job):
        return not any(is_alive(pid) for pid, _ in self._starts(job))

    def devices(self):
        """Those of processes that live, by what they were given."""
        held = {}
        for job in self._numbers:
            for pid, devices in self._starts(job):
                for uuid in devices.split(",") if is_alive(pid) else ():
                    held.setdefault(self._uuids[uuid], []).append(job)
        return held


class SlurmWorld(EngineWorld):
    """Slurm, steered; what is there in both kinds."""

    def key(self, job):
        return f"slurm-{job}"

    def start_controller(self):
        super().start_controller()
        # Without a lease that holds, jobs are Slurm's alone.
        poll_until(lambda: is_leased(self._lease), "the controller holds the lease", within_s=60.0)

    def set_options(self, lease, *more):
        self._lease = lease
        self.options = ("--slurm", "--slurm-poll", "0.2", "--slurm-lease", str(lease), *more)


class FakeSlurmWorld(SlurmWorld):
    """The commands of a Slurm that is a file."""

    def open(self):
        folder, lease = self.folder / "slurm", self.folder / "lease"
        folder.mkdir()
        self.slurm = FakeSlurm(folder, nodes=self.names, lease=lease)
        self.set_options(lease)
        self._path = processes._ENVIRONMENT["PATH"]
        processes._ENVIRONMENT["PATH"] = f"{self.slurm.install()}{os.pathsep}{self._path}"

    def close(self):
        processes._ENVIRONMENT["PATH"] = self._path
        super().close()

    def submit(self, gpus):
        return self.slurm.submit(gpus)

    def end(self, job, code):
        self.slurm.end(job, code)

    def cancel(self, job):
        self.slurm.cancel(job)

    def starts(self, job):
        return self.slurm.job(job)["starts"]

    def is_over(self, job):
        return self.slurm.job(job)["state"] not in ("PENDING", "RUNNING")

    def devices(self):
        return self.slurm.devices()


class RealSlurmWorld(SlurmWorld):
    """slurmctld and two slurmds on this machine."""

    def open(self):
        self.slurm = SlurmCluster(types=("a100", "a100"))
        self.slurm.start()
        self.set_options(self.slurm.lease, "--slurm-conf", str(self.slurm.conf))

    def close(self):
        super().close()
        self.slurm.__exit__()

    def submit(self, gpus):
        # The number of a job is known when it runs.
        script = f"echo begun >> starts-$SLURM_JOB_ID; {wait_for_word(self.slurm.folder, '$SLURM_JOB_ID')}"
        return self.slurm.submit(script, f"--gres=gpu:a100:{gpus}")

    def end(self, job, code):
        (self.slurm.folder / f"go-{job}").write_text(str(code))

    def cancel(self, job):
        self.slurm.run("scancel", job)

    def starts(self, job):
        return len(read_lines(self.slurm.folder / f"starts-{job}"))

    def is_over(self, job):
        return self.slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING")

    def devices(self):
        return self.slurm.devices()


class FakeRayWorld(EngineWorld):
    """A dashboard of Ray that is a server of the test's."""

    def open(self):
        self.ray = FakeRay(self.names)
        self.options = ("--ray", self.ray.url, "--ray-poll", "0.2", "--ray-patience", "3")

    def close(self):
        super().close()
        self.ray.close()

    def key(self, job):
        return f"ray-{job}"

    def submit(self, gpus):
        return self.ray.submit(gpus)

    def end(self, job, code):
        self.ray.end(job, "FAILED" if code else "SUCCEEDED", code)

    def cancel(self, job):
        self.ray.end(job, "STOPPED")

    def starts(self, job):
        return self.ray.jobs[job]["starts"]

    def is_over(self, job):
        return self.ray.jobs[job]["status"] != "RUNNING"

    def devices(self):
        return self.ray.devices()


_RAY_JOB = """
import os, sys, time, ray
folder, number, gpus = sys.argv[1:]
ray.init()
@ray.remote(num_gpus=1, num_cpus=0)
class Holder:
    def ready(self):
        return True
held = [Holder.remote() for _ in range(int(gpus))]
ray.get([one.ready.remote() for one in held])
with open(f"{folder}/starts-{number}", "a") as file:
    file.write("begun\\n")
while not os.path.exists(f"{folder}/go-{number}"):
    time.sleep(0.1)
sys.exit(int(open(f"{folder}/go-{number}").read()))
"""


class RealRayWorld(FakeRayWorld):
    """A Ray with two raylets on this machine, and a head without GPUs."""

    names = ("head", "n0", "n1")
    # A driver and its workers import Ray anew, on a busy machine for a minute and more.
    within_s = 240.0

    def open(self):
        self.ray = RayCluster()
        self.ray.__enter__()
        self.options = ("--ray", self.ray.url, "--ray-poll", "0.2", "--ray-patience", "3")
        self._program, self._numbers = self.ray.write("contract_job.py", _RAY_JOB), {}

    def submit(self, gpus):
        number = len(self._numbers)
        job = self.ray.submit(f"python {self._program} {self.ray.folder} {number} {gpus}")
        self._numbers[job] = number
        return job

    def end(self, job, code):
        (self.ray.folder / f"go-{self._numbers[job]}").write_text(str(code))

    def cancel(self, job):
        if not self.is_over(job):
            self.ray.stop(job)

    def starts(self, job):
        return len(read_lines(self.ray.folder / f"starts-{self._numbers[job]}"))

    def is_over(self, job):
        return self.ray.job(job)["status"] not in ("PENDING", "RUNNING")

    def devices(self):
        """By the raylets' statistics, which do not say whose they are: a job is named by what it holds here alone."""
        held = {}
        jobs = {one["job_id"]: one["submission_id"] for one in self.ray.request("/api/jobs/")[1] if one["job_id"]}
        for node in self.ray.list("nodes"):
            if node["state"] == "ALIVE":
                detail = self.ray.request(f"/nodes/{node['node_id']}")[1]["data"]["detail"]
                for stats in (stats for worker in detail.get("workers") or () for stats in worker["coreWorkerStats"]):
                    for used in (used for name, used in stats["usedResources"].items() if name.startswith("GPU")):
                        for slot in used["resourceSlots"]:
                            device = node["labels"]["eelgrid.io/node"], int(slot["slot"])
                            held.setdefault(device, []).append(jobs[stats["jobId"]])
        return held


class FluxWorld(EngineWorld):
    """Flux with our scheduler; the rig of its own contract has both kinds."""

    names = HOSTS
    kind = "real"

    def __init__(self, folder):
        self.jobs = {}
        self._inner = flux_contract_test.World(self.kind, folder)
        self.folder, self.cluster, self.controller = folder, self._inner.cluster, self._inner.controller
        self._inner.load()

    def start_controller(self):
        self.controller = self.cluster.controller("--flux")
        self.cluster.until_ready(len(self.names))

    def close(self):
        self._inner.close()

    def key(self, job):
        return f"flux-{format_job_id(job)}"

    def submit(self, gpus):
        return self._inner.flux.submit(build_jobspec(nodes=1, gpus=gpus))

    def start_ending(self, code):
        """Flux's own mock of execution ends it by itself, with a code that it knows from the beginning."""
        jobspec = build_jobspec(nodes=1, gpus=1)
        jobspec["attributes"]["system"]["exec"] = {"test": {"run_duration": "5s", "wait_status": code << 8}}
        job = self._inner.flux.submit(jobspec)
        self.jobs[job] = 1
        return job

    def end(self, job, code):
        pass

    def cancel(self, job):
        if not self.is_over(job) and not self._inner.flux.get_exception(job):
            self._inner.flux.cancel(job)

    def starts(self, job):
        return self._inner.flux.list_events(job).count("alloc")

    def is_over(self, job):
        return "clean" in self._inner.flux.list_events(job)

    def devices(self):
        held = {}
        for job in self.jobs:
            if self.starts(job) and not self.is_over(job):
                for one in parse_resource_set(self._inner.flux.get_resources(job)).ranks.values():
                    for index in one.gpus:
                        held.setdefault((one.hostname, index), []).append(job)
        return held


class FakeFluxWorld(FluxWorld):
    """A broker in memory."""

    kind = "memory"

    def end(self, job, code):
        self._inner.flux.finish(job, code << 8)


WORLDS = {
    "local": LocalWorld, "slurm-fake": FakeSlurmWorld, "slurm": RealSlurmWorld, "ray-fake": FakeRayWorld,
    "ray": RealRayWorld, "flux-fake": FakeFluxWorld, "flux": FluxWorld,
}  # fmt: skip


def wait_for_word(folder, number):
    """A script that exits with the code that is written into a file."""
    return f"while [ ! -s {folder}/go-{number} ]; do sleep 0.1; done; exit $(cat {folder}/go-{number})"


def read_lines(path):
    """The lines of a file that may not be there yet."""
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def is_alive(pid):
    """Whether a process lives; a zombie does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
