"""Two engines on one node, with real processes: an agent that runs jobs, and Slurm or another engine that asks it for GPUs."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.e2e import processes
from tests.e2e.processes import Cluster, fleet_of
from tests.slurm_rig import SlurmCluster, find_missing
from tests.waiting import poll_until

from eelgrid_agent.node.lease_socket import LeaseSocketError, ask_agent
from eelgrid_protos.messages import (
    GetWorkloadRequest,
    Mobility,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)

ROOT = ("--allow-root",) if os.geteuid() == 0 else ()
PROLOG = Path(__file__).parent.parent.parent / "deploy" / "slurm" / "lease-prolog"
MISSING = find_missing()


class Node:
    """A controller and an agent that runs jobs on so many simulated GPUs, with the socket for other engines."""

    def __init__(self, cluster, folder, gpus):
        self.cluster, self.socket = cluster, folder / "lease.sock"
        node = {"name": "n0", "cpu_milli": 64_000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": gpus}]}
        self.fleet = fleet_of(cluster.folder / "fleet.json", [node])
        cluster.controller()
        self.start_agent()
        cluster.until_ready(1)

    def start_agent(self):
        self.agent = self.cluster.agent(
            self.fleet, "--run-processes", *ROOT, "--state", str(self.cluster.folder / "agent"),
            "--lease-socket", str(self.socket),
        )  # fmt: skip
        poll_until(lambda: self.leases(0.3) is not None, "the agent answers on its lease socket")

    def leases(self, timeout_s=10.0):
        """By UUID, who has it; None while no agent answers."""
        try:
            answer = ask_agent(self.socket, {"op": "list"}, timeout_s=timeout_s)
        except LeaseSocketError:
            return None
        return {one["device_uuid"]: (one["engine"], one["owner"]) for one in answer["leases"]}

    def lease(self, *words, code=0):
        """One run of `eelgrid-agent lease`, as an engine makes it."""
        command = [sys.executable, "-m", "eelgrid_agent", "lease", *words, "--socket", str(self.socket)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout + done.stderr

    def submit(self, script="sleep 600"):
        spec = WorkloadSpec(
            name="job",
            request=ResourceRequest(gpu_count=1, gpu_milli=1000),
            mobility=Mobility.FIXED,
            process=ProcessSpec(argv=("sh", "-c", script), working_directory=str(self.cluster.folder)),
        )
        request = SubmitWorkloadRequest(spec=spec)
        return self.cluster.operators.submit_workload(request, timeout=10.0).workload.workload_id

    def workload(self, key):
        return self.cluster.operators.get_workload(GetWorkloadRequest(workload_id=key), timeout=5.0).workload

    def until_running(self, key):
        self.cluster.until(lambda: self.workload(key).attempts, what=f"{key} runs")
        (place,) = self.workload(key).placements
        return place.gpu_uuids[0]

    def waits(self, key):
        return self.workload(key).phase is WorkloadPhase.PENDING


@pytest.fixture
def short():
    """A folder with a name that is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="lease-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


def test_a_second_engine_gets_what_is_free_and_is_told_who_has_the_rest(cluster, short):
    node = Node(cluster, short, gpus=2)
    assert node.leases() == {}
    node.lease("take", "--engine", "ray", "--owner", "head", "--gpu", "0", "--pid", str(os.getpid()))
    first, second = node.submit(), node.submit()
    used = node.until_running(first)
    assert sorted(node.leases().values()) == [("local", f"{first}/0/1"), ("ray", "head")]
    assert node.leases()[used] == ("local", f"{first}/0/1")
    # The controller knows of the lease: the other job waits, and is not tried there.
    assert node.waits(second)
    told = cluster.eelctl("describe", "gpu", "n0/0").stdout
    assert "leased to ray head since" in told
    refused = node.lease("take", "--engine", "slurm", "--owner", "12", "--gpu", "1", code=3)
    assert f"is leased to local {first}/0/1 since" in refused
    assert f"wait until that ends, or run `eelctl cancel {first}`" in refused
    node.agent.kill()
    assert node.leases(0.3) is None
    node.start_agent()
    assert node.leases()[used] == ("local", f"{first}/0/1")
    assert "ray" in node.lease("list")
    node.lease("release", "--engine", "ray", "--owner", "head")
    assert node.until_running(second) != used
    cluster.eelctl("cancel", "--yes", first, second)
    poll_until(lambda: node.leases() == {}, "all leases have ended")
    assert "released 0" in node.lease("release", "--engine", "slurm", "--owner", "12")


def test_a_job_waits_while_another_engine_has_the_gpu_and_runs_when_it_is_given_back(cluster, short):
    node = Node(cluster, short, gpus=1)
    node.lease("take", "--engine", "slurm", "--owner", "12", "--gpu", "0")
    key = node.submit("exit 0")
    cluster.until(lambda: node.waits(key), what="the job waits")
    node.lease("release", "--engine", "slurm", "--owner", "12")
    cluster.until(lambda: node.workload(key).phase is WorkloadPhase.SUCCEEDED, what="the job runs then")


def write_scripts(folder, socket):
    """A prolog and epilog for the rig: ours, with the agent of this tree, at this socket."""
    agent = folder / "agent-lease"
    path = os.pathsep.join(part for part in sys.path if part)
    # The command's options follow the subcommand, so the socket may come last.
    agent.write_text(
        f'#!/bin/sh\nexec env PYTHONPATH={path} {sys.executable} -m eelgrid_agent "$@" --socket {socket}\n'
    )
    script = folder / "lease-prolog"
    script.write_text(f"#!/bin/sh\nEELGRID_AGENT={agent}\nexport EELGRID_AGENT\nexec {PROLOG}\n")
    for one in (agent, script):
        one.chmod(0o755)
    return script


@pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}")
@pytest.mark.parametrize("flags", ["", "PrologFlags=Alloc"], ids=["at launch", "at allocation"])
def test_slurm_and_the_local_engine_share_a_node_and_never_a_gpu(cluster, short, monkeypatch, flags):
    script = write_scripts(short, short / "lease.sock")
    extra = f"Prolog={script}\nEpilog={script}\n{flags}"
    with SlurmCluster(types=("a10",), extra=extra) as slurm:
        # So that the agent may ask slurmctld about jobs.
        monkeypatch.setitem(processes._ENVIRONMENT, "SLURM_CONF", str(slurm.conf))
        node = Node(cluster, short, gpus=4)
        job = slurm.submit("sleep 600", "--gres=gpu:a10:2", steered=False)
        poll_until(lambda: list(node.leases().values()).count(("slurm", job)) == 2, "Slurm's job has its leases")
        poll_until(lambda: slurm.state(job) == "RUNNING", "Slurm's job runs")
        keys = [node.submit() for _ in range(3)]
        own = {node.until_running(key) for key in keys[:2]}
        assert node.waits(keys[2])
        held = node.leases()
        assert {uuid for uuid, holder in held.items() if holder[0] == "local"} == own
        assert len(held) == 4
        # Slurm knows nothing of the local jobs; its second job is kept from their GPUs by its prolog.
        other = slurm.submit("echo begun; sleep 600", "--gres=gpu:a10:2", steered=False)
        poll_until(lambda: slurm.jobs()[other]["restart_cnt"] == 1, "the job is sent away")
        assert f"event=lease_refused engine=slurm owner={other} reason='GPU" in node.agent.text()
        assert "is leased to local" in node.agent.text()
        # One that Slurm may not requeue is cancelled; neither has begun, and the node is in service.
        lost = slurm.submit("echo begun", "--gres=gpu:a10:2", "--no-requeue", steered=False)
        poll_until(lambda: slurm.state(lost) == "CANCELLED", "a job that is not requeued is cancelled")
        poll_until(lambda: slurm.state(other) == "PENDING", "the other is back in the queue")
        assert slurm.output(other) == slurm.output(lost) == ""
        poll_until(lambda: slurm.run("sinfo", "-h", "-o", "%T").split() == ["mixed"], "the node is in service")
        assert not slurm.jobs()[other]["state_reason"].startswith("JobHeld")
        assert node.leases() == held
        # Without a proof that slurmd lets go of a job its prolog fails, and Slurm drains the node; nor does this job begin.
        whole = script.read_text()
        script.write_text(whole.replace("export", "EELGRID_SLURMD_SPOOL=/nowhere\nexport EELGRID_SLURMD_SPOOL"))
        third = slurm.submit("echo begun", "--gres=gpu:a10:2", steered=False)
        poll_until(lambda: "drain" in slurm.run("sinfo", "-h", "-o", "%T"), "Slurm has seen it fail", within_s=60.0)
        script.write_text(whole)
        slurm.run("scancel", third)
        assert "begun" not in slurm.output(third)  # Slurm itself writes of the prolog
        assert node.leases() == held
        # The one that waits first: it would start on the GPU of another, and keep Slurm's job from it for a minute more.
        cluster.eelctl("cancel", "--yes", *reversed(keys))
        poll_until(lambda: len(node.leases()) == 2, "the local jobs have given back their GPUs")
        slurm.run("scontrol", "update", "NodeName=n0", "State=RESUME")

        # slurmd may start a job that was sent back without a prolog (it does where it takes the new credential for the old one).
        # Nothing asks for a lease then, and the agent leases what it finds the job to have.
        script.write_text("#!/bin/sh\nexit 0\n")
        slurm.run("scontrol", "update", f"JobId={other}", "StartTime=now")
        poll_until(lambda: slurm.state(other) == "RUNNING", "the second job of Slurm runs", within_s=180.0)
        both = {("slurm", job), ("slurm", other)}
        poll_until(
            lambda: set(node.leases().values()) == both and len(node.leases()) == 4,
            "each has its two GPUs",
            within_s=120.0,
        )
        assert f"event=lease_adopted engine=slurm owner={other}" in node.agent.text()
        script.write_text(whole)
        slurm.run("scancel", job)
        poll_until(lambda: set(node.leases().values()) == {("slurm", other)}, "the epilog has given back the GPUs")
        # One whose epilog is lost: slurmctld says that the job has ended.
        script.write_text("#!/bin/sh\nexit 0\n")
        slurm.run("scancel", other)
        poll_until(lambda: node.leases() == {}, "the lease of a job that is gone is reclaimed", within_s=60.0)
        address = cluster.agents[node.agent]["metrics"]
        assert processes.metric(address, "eelgrid_agent_reclaimed_devices_total") == 2
        assert json.loads(node.lease("list", "-o", "json"))["leases"] == []
