"""A real Ray whose nodes are jobs in the controller's queue: they come with demand, make room with notice, and go when idle.

Needs a Ray in an environment of its own (`make test-ray` installs one).
"""

import json
import os

import pytest
from tests.e2e.processes import Cluster, fleet_of
from tests.ray_rig import MISSING, PYTHON, RayCluster
from tests.waiting import poll_until

from eelgrid_protos.messages import (
    ListNodesRequest,
    ListWorkloadsRequest,
    Mobility,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
ROOT = ("--allow-root",) if os.geteuid() == 0 else ()
NODE = {"name": "box", "cpu_milli": 64_000, "memory_bytes": 2**37, "gpus": [{"product": "a100-sxm4-80gb", "count": 2}]}
QUEUES = """
queues:
  - {name: root}
  - {name: urgent, parent: root, quota: {gpu: 2}, preemption: {reclaim: nominal}}
  - {name: ray, parent: root, quota: {gpu: 0}, preemption: {victims: jobs, min_runtime: 0s}}
"""
# On one machine all raylets share its ports and its memory.
OPTIONS = [
    "--node-ip-address", "127.0.0.1", "--min-worker-port", "0", "--max-worker-port", "0",
    "--object-store-memory", "80000000", "--disable-usage-stats",
]  # fmt: skip
DRIVER = """
import json
@ray.remote(num_gpus=1, num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Holder:
    def look(self):
        return [ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")]
held = Holder.remote()
for line in sys.stdin:
    print(json.dumps(ray.get(held.look.remote())), flush=True)
"""


@pytest.fixture
def rig(tmp_path):
    """A Ray that has a head only, a controller that follows it with an agent that runs jobs, and the autoscaler."""
    with RayCluster(nodes=0) as ray, Cluster(tmp_path) as cluster:
        cluster.controller("--ray", ray.url, "--ray-poll", "0.2")
        fleet = fleet_of(tmp_path / "fleet.json", [NODE])
        options = ("--state", str(tmp_path / "agent"), "--energy-window", "1", "--faults", str(tmp_path / "faults"))
        cluster.agent(fleet, "--run-processes", *ROOT, *options)
        cluster.until_ready(2)
        (tmp_path / "queues.yaml").write_text(QUEUES)
        cluster.eelctl("queue", "apply", "-f", tmp_path / "queues.yaml", "--yes")
        jobs = {name: ray.environment[name] for name in ("PATH", "PYTHONPATH", "RAY_AUTH_MODE")}
        settings = {
            "queue": "ray", "idle_s": 6.0, "drain_s": 15.0, "poll_s": 1.0, "python": PYTHON,
            "environment": {**jobs, "RAY_TMPDIR": str(ray.folder)},
            "nodes": {"gpu": {"gpus": 1, "cpus": 2, "most": 2, "options": OPTIONS}},
        }  # fmt: skip
        process = ray.autoscale(settings, EELGRID_CONTROLLER=cluster.address)
        try:
            yield ray, cluster
        finally:
            print((ray.folder / "autoscale.log").read_text()[-6000:])
            for job in list_jobs(cluster):
                print(job.workload_id, job.phase, job.reason, cluster.eelctl("logs", job.workload_id).stdout[-1500:])
            process.terminate()
            process.wait(30.0)
            for job in list_jobs(cluster, WorkloadPhase.PENDING, WorkloadPhase.PLACED):
                cluster.eelctl("cancel", job.workload_id)
            poll_until(lambda: not list_jobs(cluster, WorkloadPhase.PLACED), "no job runs", within_s=60.0)


def list_jobs(cluster, *phases):
    found = cluster.operators.list_workloads(ListWorkloadsRequest(phases=phases, page_size=1000), timeout=10.0)
    return [one for one in found.workloads if one.spec.labels.get("ray/capacity")]


def list_raylets(ray):
    """Instances of raylets that are alive, the head's too, by their ids in Ray."""
    return {one["node_id"]: one["labels"] for one in ray.list("nodes") if one["state"] == "ALIVE"}


def test_a_node_comes_with_demand_makes_room_with_notice_comes_back_and_goes_when_idle(rig):
    ray, cluster = rig
    program = ray.program(DRIVER)
    program.tell()
    first, devices = program.read()
    (job,) = list_jobs(cluster, WorkloadPhase.PLACED)
    assert (job.spec.queue, job.placements[0].node_name) == ("ray", "box")
    assert devices == job.placements[0].gpu_uuids[0]
    # What runs inside is within what the job was given: its raylet is no node of its own.
    nodes = cluster.operators.list_nodes(ListNodesRequest(page_size=1000), timeout=10.0).nodes
    assert sorted(node.inventory.node_name for node in nodes) == ["box", "head"]

    urgent = WorkloadSpec(
        name="urgent", request=ResourceRequest(gpu_count=2, gpu_milli=1000), mobility=Mobility.FIXED, queue="urgent",
        process=ProcessSpec(argv=("sleep", "600"), working_directory="/"),
    )  # fmt: skip
    cluster.operators.submit_workload(SubmitWorkloadRequest(spec=urgent, workload_id="urgent"), timeout=10.0)
    log = ray.folder / "autoscale.log"
    poll_until(lambda: "RAY_RUNNING->RAY_STOPPING" in log.read_text(), "Ray drains its raylet", within_s=60.0)
    # Until the deadline what runs there may end by itself.
    assert list_jobs(cluster, WorkloadPhase.PLACED)
    poll_until(lambda: list_jobs(cluster, WorkloadPhase.PENDING), "it makes room", within_s=60.0)
    assert "drained_within_s=10" in cluster.eelctl("logs", job.workload_id).stdout
    poll_until(lambda: first not in list_raylets(ray), "Ray has seen it leave")
    assert [one.workload_id for one in list_jobs(cluster, WorkloadPhase.PENDING)] == [job.workload_id]

    cluster.eelctl("cancel", "urgent")
    program.tell()
    again, devices = program.read()
    assert again != first
    (back,) = list_jobs(cluster, WorkloadPhase.PLACED)
    assert (back.workload_id, back.placements[0].gpu_uuids[0]) == (job.workload_id, devices)
    assert back.attempt > job.attempt

    program.end()
    poll_until(lambda: not list_jobs(cluster, WorkloadPhase.PENDING, WorkloadPhase.PLACED), "it goes", within_s=120.0)
    poll_until(lambda: len(list_raylets(ray)) == 1, "the head is alone", within_s=60.0)


SHARING_DRIVER = """
import json
@ray.remote(num_gpus=0.5, num_cpus=1)
class Holder:
    def look(self):
        return [ray.get_runtime_context().get_job_id(), os.getpid()]
held = Holder.remote()
print(json.dumps(ray.get(held.look.remote())), flush=True)
sys.stdin.readline()
"""


def read_energy(cluster, *keys):
    """The rows of `eelctl energy` by their values of these keys."""
    answer = json.loads(cluster.eelctl("energy", "--since", "1h", "--by", ",".join(keys), "-o", "json").stdout)
    return {tuple(row[key] for key in keys): row for row in answer["groups"]}


def test_energy_inside_a_node_from_the_queue_is_of_the_jobs_of_ray_that_used_its_gpu(rig, tmp_path):
    ray, cluster = rig
    programs = [ray.program(SHARING_DRIVER) for _ in range(2)]
    (first, pid), (second, other_pid) = (program.read() for program in programs)
    assert first != second
    (job,) = list_jobs(cluster, WorkloadPhase.PLACED)
    (index,) = job.placements[0].gpu_indexes
    # What a driver of NVIDIA tells by itself: these workers have a context on the GPU.
    with (tmp_path / "faults").open("a") as faults:
        faults.writelines(json.dumps({"fault": "hold", "gpu": index, "pid": one}) + "\n" for one in (pid, other_pid))

    def find_rows():
        rows = read_energy(cluster, "workload", "queue", "label:ray/job")
        mine = {values[2]: row for values, row in rows.items() if values[:2] == (job.workload_id, "ray")}
        return mine if all(mine.get(one, {}).get("active_j", 0.0) > 0.0 for one in (first, second)) else None

    rows = poll_until(find_rows, "each job of Ray has its energy", within_s=60.0)
    # The board itself is the node's, whoever works on it, and nobody else is there.
    assert rows.keys() == {"", first, second}
    assert rows[""]["idle_j"] > 0.0
    for program in programs:
        program.end()
    poll_until(lambda: not list_jobs(cluster, WorkloadPhase.PENDING, WorkloadPhase.PLACED), "it goes", within_s=120.0)

    def is_charged_once():
        """The queue has the sum of all parts; there are two answers, and a last window may come between them."""
        jobs, queues = read_energy(cluster, "queue", "label:ray/job"), read_energy(cluster, "queue")
        parts = [row["energy_j"] for (queue, _), row in jobs.items() if queue == "ray"]
        return len(parts) == 3 and sum(parts) == pytest.approx(queues["ray",]["energy_j"], abs=1e-6)

    poll_until(is_charged_once, "the queue is charged once for all of it")
