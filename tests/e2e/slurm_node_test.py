"""A real Slurm and real agents on simulated GPUs: the prolog hands jobs over; energy and limits follow, whoever dies.

Needs Debian's slurm-wlm and munge, and root (`make test-slurm` installs them).
"""

import json

import pytest
from tests.e2e.processes import Cluster, fleet_of, scrape
from tests.slurm_rig import GPUS, SlurmCluster, find_missing, write_handover
from tests.waiting import poll_until

from eelgrid_protos.messages import GetInventoryRequest

MISSING = find_missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}")
# An H100 as it comes, in watts.
FOUND_W = 700.0
NODE = {
    "name": "n0",
    "cpu_milli": 16_000,
    "memory_bytes": 2**36,
    "gpus": [{"product": "h100-sxm5-80gb", "count": GPUS}],
}


class HandedNode:
    """One node of Slurm with our prolog and epilog, and its agent."""

    def __init__(self, slurm, cluster, folder):
        self.slurm, self.cluster, self.folder = slurm, cluster, folder
        self.fleet = fleet_of(cluster.folder / "fleet.json", [NODE])
        self.controller, self.agent = cluster.controller(), None

    def start_agent(self):
        """A new run of the agent; its simulated GPUs are as they come, since they end with it."""
        self.agent = self.cluster.agent(self.fleet, "--slurm-folder", str(self.folder), "--energy-window", "1")
        self.cluster.until_ready(1)
        gpus = self.cluster.node_api(self.agent).get_inventory(GetInventoryRequest(), timeout=10.0).inventory.gpus
        self.uuids = [gpu.uuid for gpu in sorted(gpus, key=lambda gpu: gpu.index)]
        poll_until(self.limits_w, "the agent has looked once")

    def metrics(self):
        return scrape(self.cluster.agents[self.agent]["metrics"])

    def limits_w(self):
        """The limits in force, by the index of the GPU."""
        family = self.metrics().get("eelgrid_gpu_power_limit_watts")
        # Nothing before the first sample.
        samples = () if family is None else family.samples
        return [sample.value for sample in sorted(samples, key=lambda one: self.uuids.index(one.labels["gpu"]))]

    def energy_j(self, job):
        """What the agent's metrics have of a job."""
        family = self.metrics().get("eelgrid_workload_gpu_energy_joules")
        samples = () if family is None else family.samples
        return sum(sample.value for sample in samples if sample.labels["slurm_job"] == job)

    def wait_limits(self, expected_w, what):
        poll_until(lambda: self.limits_w() == expected_w, what, within_s=60.0)

    def submit(self, *options):
        return self.slurm.submit("sleep 600", *options, steered=False)

    def wait_state(self, job, state):
        poll_until(lambda: self.slurm.state(job) == state, f"{job} is {state}", within_s=60.0)

    def end(self, job):
        self.slurm.run("scancel", job)
        poll_until(lambda: not (self.folder / f"job-{job}").exists(), "the epilog has run", within_s=60.0)

    def expect(self, *gpus, limit_w):
        return [limit_w if gpu in gpus else FOUND_W for gpu in range(GPUS)]


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("handed")
    folder, lines = write_handover(tmp_path)
    with SlurmCluster(types=("h100",), extra=lines) as slurm, Cluster(tmp_path) as cluster:
        node = HandedNode(slurm, cluster, folder)
        node.start_agent()
        yield node


def test_a_job_s_energy_is_the_job_s_and_its_limit_is_set_and_put_back(node):
    job = node.submit("--gres=gpu:h100:2", "--comment=eelgrid-power=250")
    node.wait_state(job, "RUNNING")
    held = [index for (_, index), jobs in node.slurm.devices().items() if jobs == [job]]
    assert len(held) == 2
    node.wait_limits(node.expect(*held, limit_w=250.0), "the limit of the job's GPUs, and of no others")
    answer = node.folder / f"answer-{job}"
    poll_until(answer.exists, "the job is answered")
    assert answer.read_text().count("power limit 250 W") == 2
    poll_until(lambda: node.energy_j(job) > 50.0, "the agent counts the job's energy", within_s=60.0)

    def ledger_j():
        rows = json.loads(node.cluster.eelctl("energy", "--since", "1h", "--by", "kind,name", "-o", "json").stdout)
        return {(row["kind"], row["name"]): row["energy_j"] for row in rows["groups"]}

    poll_until(lambda: ledger_j().get(("slurm", job), 0.0) > 50.0, "eelctl energy has the job", within_s=90.0)
    node.end(job)
    node.wait_limits([FOUND_W] * GPUS, "the limit is put back")
    poll_until(lambda: not answer.exists(), "nothing of the job is left in the folder")


def test_jobs_start_and_end_without_the_agent_and_the_next_agent_knows(node):
    before = node.submit("--gres=gpu:h100:1", "--comment=eelgrid-power=300")
    node.wait_state(before, "RUNNING")
    poll_until(lambda: 300.0 in node.limits_w(), "the limit is set", within_s=60.0)
    node.agent.kill()
    # While nobody is there: one ends, one starts, and neither waits for the agent.
    node.end(before)
    during = node.submit("--gres=gpu:h100:1", "--comment=eelgrid-power=275")
    node.wait_state(during, "RUNNING")
    node.start_agent()
    (index,) = (index for (_, index), jobs in node.slurm.devices().items() if jobs == [during])
    node.wait_limits(node.expect(index, limit_w=275.0), "the job that began meanwhile has its limit, and no other")
    node.end(during)
    node.wait_limits([FOUND_W] * GPUS, "the limit is put back")
    assert "DRAIN" not in node.slurm.run("scontrol", "show", "node", "n0")


def test_a_job_with_gpu_freq_begins_once_its_gpu_is_left_to_it(node):
    job = node.submit("--gres=gpu:h100:1", "--gpu-freq=medium", "--comment=eelgrid-power=200")
    node.wait_state(job, "RUNNING")
    answer = node.folder / f"answer-{job}"
    poll_until(answer.exists, "the job is answered")
    assert "clocks-owned" in answer.read_text()
    assert "gpu_freq=medium" in (node.folder / f"job-{job}").read_text()
    said = f"job {job} sets the clocks of this GPU itself"
    poll_until(lambda: said in node.controller.text(), "the controller's log says whose the clocks are")
    assert node.limits_w() == [FOUND_W] * GPUS
    node.end(job)
