"""One workload file on the local engine, on Slurm and on Ray: the same answer, the same end, and rows of energy that compare.

The file is eelctl's own (`eelctl submit -f`). The local engine takes it as it is; for Slurm its request becomes options of sbatch,
for Ray resources of a task. Each runs under a controller of its own with agents on equal simulated GPUs. A real Slurm and a
real Ray are needed, else a comparison is skipped and says so. On Kubernetes the file is not run: without a control plane and a
kubelet no process computes an answer, so its adapter is shown to place the same request by an API server's recorded events.
"""

import json
import shlex
from typing import NamedTuple

import pytest
from tests.e2e.processes import Cluster, fleet_of
from tests.engine_worlds import GPUS, ROOT, list_engines
from tests.gate_rig import Api, Side, settle
from tests.ray_rig import RayCluster
from tests.slurm_rig import SlurmCluster

from eelgrid_controller.cli.workloads import read_workloads
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


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return run_locally(tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=name, marks=pytest.mark.skipif(bool(MISSING[name]), reason=MISSING[name] or "it is there"))
        for name, run in (("slurm", run_on_slurm), ("ray", run_on_ray))
    ],
)
def test_one_workload_file_gives_the_same_answer_and_comparable_energy_on_every_engine(run, local, tmp_path):
    other = run(tmp_path)
    print("local", local.row, "other", other.row, sep="\n")
    for ended in (local, other):
        assert ANSWER in ended.said.splitlines()
        assert (ended.workload.phase, ended.workload.exit_code) == (WorkloadPhase.SUCCEEDED, 0)
        assert (ended.workload.spec.name, ended.workload.spec.request.gpu_count) == ("squares", 1)
        assert ended.row.keys() >= COLUMNS
        assert ended.row["energy_j"] == pytest.approx(ended.row["idle_j"] + ended.row["active_j"])
    assert local.row.keys() == other.row.keys()
    # On equal GPUs for equal work; what an engine adds is the time that it takes to start a job and to clean up behind it.
    for column in ("energy_j", "idle_j"):
        assert 1 / 3 < other.row[column] / local.row[column] < 3.0, column


def test_without_a_control_plane_the_adapter_of_kubernetes_places_the_same_request():
    spec, api = read_file(), Api()
    for name in NAMES:
        api.node(name)
    side = Side(api)
    side.lead(1)
    api.pod(gpus=spec.request.gpu_count)
    settle(api, [side], 0.0, rounds=3)
    (workload,) = side.core.state.workloads.values()
    assert (workload.phase, workload.spec.request.gpu_count) == (WorkloadPhase.PLACED, spec.request.gpu_count)
    assert list(api.bound.values()) == [place.node_name for place in workload.placements]
