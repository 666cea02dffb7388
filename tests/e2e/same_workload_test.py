"""One workload file on the local engine, on Slurm, on Ray and on Kubernetes: the same answer, and rows of energy that compare.

The file is eelctl's own (`eelctl submit -f`). The local engine takes it as it is; for Slurm its request becomes options of sbatch,
for Ray resources of a task, for Kubernetes a pod. Each runs under a controller of its own with agents on equal simulated GPUs. A
real Slurm and a real Ray are needed, else a comparison is skipped and says so. Kubernetes is an API server in memory, and a real
control plane where EELGRID_KUBECONFIG names one; no kubelet runs, so the test plays its part: it starts the command of the
container that was bound, and reports the pod's status as a kubelet does.
"""

import asyncio
import json
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.builders.kubernetes import build_node
from tests.e2e.processes import Cluster, fleet_of
from tests.engine_worlds import GPUS, ROOT, list_engines
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.kubernetes_api_rig import KUBECONFIG, open_rig
from tests.ray_rig import RayCluster
from tests.slurm_rig import SlurmCluster
from tests.waiting import wait_for

from eelgrid_controller.cli.workloads import read_workloads
from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS
from eelgrid_controller.engines.kubernetes.model.well_known import GATE, LABEL_MANAGED, SCHEDULER
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import GetWorkloadRequest, WorkloadPhase

# Twelve seconds and more, so that whoever looks at intervals sees it run for most of them.
FILE = """
spec:
  name: squares
  kind: batch_job
  mobility: fixed
  request: {gpu_count: 1, gpu_milli: 1000, cpu_milli: 1000, memory_bytes: 104857600}
  process:
    argv: [sh, -c, "n=0; for i in $(seq 120); do n=$((n + i * i)); sleep 0.1; done; echo answer $n; exit 0"]
    working_directory: /tmp
"""
ANSWER = f"answer {sum(number * number for number in range(1, 121))}"
NAMES = ("n0", "n1")
KUBERNETES_NAMES = ("same-workload-a", "same-workload-b")  # of a cluster that may have others
_KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}"}}}}]
users: [{{name: u, user: {{token: admin}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
COLUMNS = {"energy_j", "idle_j", "active_j", "cost", "carbon_g"}
MISSING = list_engines()
# Runs a command where Ray has given it GPUs, and ends as it has ended.
RAY_DRIVER = """
import subprocess, sys, ray
ray.init()
@ray.remote(num_gpus=float(sys.argv[1]), num_cpus=float(sys.argv[2]))
class Runner:
    def run(self, argv):
        done = subprocess.run(argv, capture_output=True, text=True)
        return done.stdout, done.returncode
runner = Runner.remote()
said, code = ray.get(runner.run.remote(sys.argv[3:]))
print(said, end="")
sys.exit(code)
"""


class Ended(NamedTuple):
    """How the workload has ended: what it said, its record in the core, and its row of energy."""

    said: str
    workload: object
    row: dict


def read_file():
    (request,) = read_workloads(FILE, "work.yaml")
    return request.spec


def start_agents(cluster, *options, names=NAMES):
    gpus = [{"product": "a100-sxm4-80gb", "count": GPUS}]
    nodes = [{"name": name, "cpu_milli": 16_000, "memory_bytes": 2**36, "gpus": gpus} for name in names]
    return cluster.agent(fleet_of(cluster.folder / "fleet.json", nodes), "--energy-window", "1", *options)


def wait_ended(cluster, key):
    """The workload once it has ended."""

    def find():
        try:
            found = cluster.operators.get_workload(GetWorkloadRequest(workload_id=key), timeout=10.0).workload
        except NotFound:
            return None
        return found if found.phase.is_ended else None

    return cluster.until(find, within_s=90.0, what=f"{key} has ended")


def read_row(cluster, key):
    """What the ledger has of it, once it has all windows."""

    def find():
        answer = cluster.eelctl("energy", "--since", "1h", "--by", "workload", "-o", "json")
        return next((row for row in json.loads(answer.stdout)["groups"] if row["workload"] == key), None)

    last = [0.0]

    def settled():
        row = find()
        before, last[0] = last[0], 0.0 if row is None else row["energy_j"]
        return row if row is not None and row["energy_j"] == before > 0.0 else None

    return cluster.until(settled, within_s=60.0, what=f"the energy of {key} is known")


def run_locally(folder):
    with Cluster(folder) as cluster:
        cluster.controller()
        start_agents(cluster, "--run-processes", *ROOT, "--state", str(folder / "agent"), names=("n0",))
        cluster.until_ready(1)
        (folder / "work.yaml").write_text(FILE)
        key = json.loads(cluster.eelctl("submit", "-f", folder / "work.yaml", "-o", "json").stdout)["workload_id"]
        found = wait_ended(cluster, key)
        return Ended(cluster.eelctl("logs", key).stdout, found, read_row(cluster, key))


def run_on_slurm(folder):
    spec = read_file()
    with SlurmCluster(types=("a100", "a100")) as slurm, Cluster(folder) as cluster:
        cluster.controller(
            "--slurm", "--slurm-conf", str(slurm.conf), "--slurm-lease", str(slurm.lease), "--slurm-poll", "0.2"
        )
        start_agents(cluster)
        cluster.until_ready(len(NAMES))
        cluster.until(slurm.lease.exists, what="the controller holds the lease")
        job = slurm.submit(
            shlex.join(spec.process.argv), f"--job-name={spec.name}", f"--gres=gpu:{spec.request.gpu_count}",
            f"--cpus-per-task={spec.request.cpu_milli // 1000}", f"--mem={spec.request.memory_bytes >> 20}M",
        )  # fmt: skip
        found = wait_ended(cluster, f"slurm-{job}")
        return Ended(slurm.output(job), found, read_row(cluster, f"slurm-{job}"))


def run_on_ray(folder):
    spec = read_file()
    with RayCluster() as ray, Cluster(folder) as cluster:
        cluster.controller("--ray", ray.url, "--ray-poll", "0.2")
        start_agents(cluster)
        cluster.until_ready(1 + len(NAMES))
        asked = (str(spec.request.gpu_count), str(spec.request.cpu_milli / 1000))
        program = ray.write("run.py", RAY_DRIVER)
        job = ray.submit(
            shlex.join(["python", str(program), *asked, *spec.process.argv]), metadata={"job_name": spec.name}
        )
        cluster.until(
            lambda: ray.job(job)["status"] in ("SUCCEEDED", "FAILED"), within_s=180.0, what="it has ended in Ray"
        )
        said = ray.request(f"/api/jobs/{job}/logs")[1]["logs"]
        assert ANSWER in said, said
        found = wait_ended(cluster, f"ray-{job}")
        return Ended(said, found, read_row(cluster, f"ray-{job}"))


def build_pod(spec, mode):
    """The pod of a workload's request, as the chart's policy or webhook leaves it in this mode."""
    amounts = {
        "cpu": f"{spec.request.cpu_milli}m",
        "memory": str(spec.request.memory_bytes),
        "nvidia.com/gpu": str(spec.request.gpu_count),
    }
    container = {
        "name": "main",
        "image": "none",
        "command": list(spec.process.argv),
        "workingDir": spec.process.working_directory,
        "resources": {"requests": amounts, "limits": amounts},
    }
    waits = {"schedulerName": SCHEDULER} if mode == "scheduler" else {"schedulingGates": [{"name": GATE}]}
    metadata = {"name": spec.name, "labels": {LABEL_MANAGED: "true"}}
    return {"metadata": metadata, "spec": {"containers": [container], "restartPolicy": "Never", **waits}}


async def play_kubelet(rig, pod):
    """Runs the command of a bound pod's container and reports its status; returns what it has written."""
    (container,) = pod["spec"]["containers"]

    async def report(phase, state):
        told = {
            "name": container["name"],
            "image": "none",
            "imageID": "",
            "ready": phase == "Running",
            "restartCount": 0,
        }
        status = {"phase": phase, "containerStatuses": [{**told, "state": state}]}
        await rig.cluster.patch(
            PODS, pod["metadata"]["name"], {"status": status}, namespace=rig.space, subresource="status"
        )

    await report("Running", {"running": {}})
    process = await asyncio.create_subprocess_exec(
        *container["command"], cwd=container["workingDir"], stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    await report("Failed" if process.returncode else "Succeeded", {"terminated": {"exitCode": process.returncode}})
    return said.decode()


async def _run_on_kubernetes(folder, way, mode):
    async with open_rig(way) as rig:
        kubeconfig = Path(KUBECONFIG)
        if rig.fake is not None:
            await rig.fake.add(Scheduler(rig.fake))
            kubeconfig = folder / "kubeconfig"
            kubeconfig.write_text(_KUBECONFIG.format(server=rig.fake.url))
        for name in KUBERNETES_NAMES:
            await rig.add(NODES, build_node(name, gpus=GPUS))
        with Cluster(folder) as cluster:

            def begin():
                options = ("--kubeconfig", str(kubeconfig), "--kubernetes-namespace", rig.space)
                cluster.controller("--kubernetes", *options, "--kubernetes-mode", mode)
                start_agents(cluster, names=KUBERNETES_NAMES)
                cluster.until(lambda: cluster.summary().nodes_ready >= len(KUBERNETES_NAMES), what="agents are there")

            await asyncio.to_thread(begin)
            pod = await rig.add(PODS, build_pod(read_file(), mode))

            async def find_bound():
                found = await rig.cluster.get(PODS, pod["metadata"]["name"], namespace=rig.space)
                return found if found["spec"].get("nodeName") else None

            bound = await wait_for(find_bound, within_s=90.0)
            assert bound["spec"]["nodeName"] in KUBERNETES_NAMES
            said = await play_kubelet(rig, bound)
            key = f"pod-{pod['metadata']['uid']}"
            return await asyncio.to_thread(lambda: Ended(said, wait_ended(cluster, key), read_row(cluster, key)))


def run_on_kubernetes(way, mode):
    return lambda folder: asyncio.run(_run_on_kubernetes(folder, way, mode))


def list_runs():
    """How the file is run on each other engine, by the name of the test."""
    runs = {"slurm": run_on_slurm, "ray": run_on_ray}
    missing = {name: MISSING[name] for name in runs}
    for way, mode in (("fake", "gate"), ("real", "gate"), ("real", "scheduler")):
        name = f"kubernetes-{way}-{mode}"
        runs[name] = run_on_kubernetes(way, mode)
        missing[name] = "" if way == "fake" or KUBECONFIG else "EELGRID_KUBECONFIG names no cluster"
    return [
        pytest.param(run, id=name, marks=pytest.mark.skipif(bool(missing[name]), reason=missing[name] or "it is there"))
        for name, run in runs.items()
    ]


def has_succeeded(workload):
    """Of pods the controller holds places alone: their workload is let go with how they ended, and has no exit code."""
    if workload.workload_id.startswith("pod-"):
        return (workload.phase, workload.reason) == (WorkloadPhase.CANCELLED, "all pods succeeded")
    return (workload.phase, workload.exit_code) == (WorkloadPhase.SUCCEEDED, 0)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return run_locally(tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("run", list_runs())
def test_one_workload_file_gives_the_same_answer_and_comparable_energy_on_every_engine(run, local, tmp_path):
    other = run(tmp_path)
    print("local", local.row, "other", other.row, sep="\n")
    for ended in (local, other):
        assert ANSWER in ended.said.splitlines()
        assert has_succeeded(ended.workload)
        assert (ended.workload.spec.name, ended.workload.spec.request.gpu_count) == ("squares", 1)
        assert ended.row.keys() >= COLUMNS
        assert ended.row["energy_j"] == pytest.approx(ended.row["idle_j"] + ended.row["active_j"])
    assert local.row.keys() == other.row.keys()
    # On equal GPUs for equal work; what an engine adds is the time that it takes to start a job and to clean up behind it.
    for column in ("energy_j", "idle_j"):
        assert 1 / 3 < other.row[column] / local.row[column] < 3.0, column
