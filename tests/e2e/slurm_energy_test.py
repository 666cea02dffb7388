"""A real Slurm with cgroups and a real agent: the joules of a GPU go to the job and the step whose processes use it.

Needs Debian's slurm-wlm and munge, and root (`make test-slurm` installs them).
"""

import json
import os

import pytest
from tests.e2e.processes import Cluster, fleet_of, scrape
from tests.slurm_rig import GPUS, SlurmCluster, find_cgroups, find_missing, write_handover
from tests.waiting import poll_until

ROOT = ("--allow-root",) if os.geteuid() == 0 else ()
MISSING = find_missing()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}"),
    pytest.mark.skipif(find_cgroups() is None, reason="no cgroups of version 1 that this user may make"),
]
NODE = {"name": "n0", "cpu_milli": 16_000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": GPUS}]}
# Two steps beside each other, each of which notes its process.
STEPS = "".join(
    "srun --ntasks=1 --overlap sh -c 'echo $SLURM_STEP_ID $$ >> {folder}/steps; exec sleep 600' & " for _ in range(2)
)


@pytest.fixture
def handed(tmp_path):
    """A Slurm whose prolog hands jobs over in a folder."""
    folder, lines = write_handover(tmp_path)
    with (
        SlurmCluster(types=("a10",), extra=lines, cgroups=find_cgroups()) as slurm,
        Cluster(tmp_path) as cluster,
    ):
        yield slurm, cluster, folder


def read_joules(address, job):
    """The agent's joules of a job by step; of what is no step's by an empty one."""
    found = {}
    family = scrape(address).get("eelgrid_workload_gpu_energy_joules")
    for sample in () if family is None else family.samples:
        labels = sample.labels
        if sample.name.endswith("_total") and labels["slurm_job"] == job:
            found[labels["step"]] = found.get(labels["step"], 0.0) + sample.value
    return found


def test_the_joules_of_two_steps_beside_each_other_are_told_apart_and_their_jobs_row_has_both(handed, tmp_path):
    slurm, cluster, folder = handed
    fleet = fleet_of(tmp_path / "fleet.json", [NODE])
    # Steered, so that the controller tells the agent of the job and the simulated GPU works for it.
    options = ("--slurm", "--slurm-conf", str(slurm.conf), "--slurm-lease", str(slurm.lease), "--slurm-poll", "0.2")
    cluster.controller(*options, "--slurm-lease-seconds", "5")
    faults = tmp_path / "faults"
    # One that runs processes, whose ids are this machine's: of others on simulated GPUs no owner is looked up.
    options = ("--run-processes", *ROOT, "--state", str(tmp_path / "agent"), "--slurm-folder", str(folder))
    agent = cluster.agent(fleet, *options, "--energy-window", "1", "--faults", str(faults))
    cluster.until_ready(1)
    poll_until(slurm.lease.exists, "the controller holds the lease")
    job = slurm.submit(STEPS.format(folder=tmp_path) + "wait", "--gres=gpu:a10:1", "--ntasks=2")
    steps = tmp_path / "steps"
    poll_until(lambda: steps.exists() and len(steps.read_text().splitlines()) == 2, "both steps run", within_s=120.0)
    pids = dict(line.split() for line in steps.read_text().splitlines())
    assert pids.keys() == {"0", "1"}
    ((_, index),) = slurm.devices()
    # What a driver tells by itself: the processes have a context on the GPU.
    with faults.open("a") as file:
        file.writelines(json.dumps({"fault": "hold", "gpu": index, "pid": int(pid)}) + "\n" for pid in pids.values())
    address = cluster.agents[agent]["metrics"]

    def read_steps():
        joules = read_joules(address, job)
        return joules if min(joules.get("0", 0.0), joules.get("1", 0.0)) > 10.0 else None

    joules = poll_until(read_steps, "each step has joules", within_s=120.0)
    # Equal work; the batch script uses no GPU, and the board's own idle power is the job's.
    assert joules.keys() == {"", "0", "1"}
    assert 0.5 < joules["0"] / joules["1"] < 2.0

    def read_row():
        answer = json.loads(cluster.eelctl("energy", "--since", "1h", "--by", "kind,name", "-o", "json").stdout)
        rows = {(row["kind"], row["name"]): row for row in answer["groups"]}
        return rows.get(("slurm", job))

    # The ledger's row is of the job, whose parts the steps are.
    least_j = sum(joules.values())
    poll_until(
        lambda: (row := read_row()) and row["active_j"] + row["idle_j"] >= least_j, "the job has its row", within_s=60.0
    )
