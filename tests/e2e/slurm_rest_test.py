"""A real Slurm with a real slurmrestd: the same view as by commands, jobs steered by it, and commands where it is away.

Needs Debian's slurm-wlm, slurmrestd and munge, and root (`make test-slurm` installs them).
"""

import asyncio
import contextlib
import subprocess
import tempfile
from pathlib import Path

import pytest
from tests.e2e.processes import Cluster
from tests.e2e.slurm_test import OPTIONS, is_leased, wait_running, workload
from tests.slurm_rig import SlurmCluster, find_missing
from tests.waiting import poll_until

from eelgrid_controller.engines.slurm.answers import parse_jobs, parse_nodes
from eelgrid_controller.engines.slurm.commands import SlurmCommandLine
from eelgrid_controller.engines.slurm.rest import SlurmRest

SLURMRESTD = Path("/usr/sbin/slurmrestd")
MISSING = find_missing() or ("" if SLURMRESTD.exists() else "slurmrestd")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}")


@contextlib.contextmanager
def serving(slurm, socket):
    """A slurmrestd on a socket; with root's Slurm it has to be root's, too."""
    environment = {**slurm.environment, "SLURMRESTD_SECURITY": "disable_user_check"}
    words = [SLURMRESTD, "-f", slurm.conf, "-a", "rest_auth/local", "-s", "openapi/v0.0.38", f"unix:{socket}"]
    # Its output is not read, so that it never waits for that.
    child = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        poll_until(socket.exists, "slurmrestd serves")
        yield child
    finally:
        child.kill()
        child.wait()
        socket.unlink(missing_ok=True)


@pytest.fixture
def socket():
    # A path of more than 107 bytes is no socket, and pytest's own folders are too long for that.
    with tempfile.TemporaryDirectory(prefix="rest-", dir="/tmp") as folder:
        yield Path(folder) / "slurmrestd.sock"


def test_jobs_and_nodes_are_the_same_as_by_commands(socket):
    with SlurmCluster() as slurm, serving(slurm, socket):
        running = slurm.submit("sleep 600", "--gres=gpu:a100:2", "--exclusive", steered=False)
        slurm.submit("sleep 600", "--array=2-4%1", "--gres=gpu:1", "--constraint=a100|h100", steered=False)
        slurm.submit("true", "--nodes=2", f"--dependency=afterok:{running}", "--comment=a b, c", steered=False)
        slurm.submit("true", "--hold", "--gpus=2", "--mem=100", "--no-requeue", steered=False)
        ended = [slurm.submit(script, steered=False) for script in ("exit 3", "kill -9 $$", "true")]
        requeued = slurm.submit("sleep 600", steered=False)
        wait_running(slurm, running, requeued)
        slurm.run("scontrol", "requeuehold", requeued)
        slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=broken fan")
        poll_until(lambda: slurm.state(requeued) == "PENDING", "it is requeued", within_s=60.0)
        poll_until(lambda: all(slurm.state(job) in ("COMPLETED", "FAILED") for job in ended), "they have ended")
        poll_until(lambda: "COMPLETING" not in slurm.run("sinfo", "-h", "-o", "%T").upper(), "nothing is on its way")

        async def read():
            commands, rest = SlurmCommandLine(environment={"SLURM_CONF": str(slurm.conf)}), SlurmRest(f"unix:{socket}")
            try:
                jobs, nodes = await rest.read("jobs"), await rest.read("nodes")
                return jobs, await commands.read_jobs(), nodes, await commands.read_nodes()
            finally:
                await rest.close()

        def compare():
            by_rest, by_command, nodes_by_rest, nodes_by_command = asyncio.run(read())
            jobs = parse_jobs(by_rest)
            assert (len(jobs.jobs), jobs.unreadable) == (10, ())
            return jobs == parse_jobs(by_command) and parse_nodes(nodes_by_rest) == parse_nodes(nodes_by_command)

        # Between two answers a job may have begun or an expected start have moved.
        poll_until(compare, "both say the same", within_s=60.0)


def test_jobs_are_steered_by_it_and_by_commands_while_it_is_away(socket, tmp_path):
    with SlurmCluster() as slurm, Cluster(tmp_path) as cluster:
        with serving(slurm, socket):
            options = ("--slurm-conf", str(slurm.conf), "--slurm-lease", str(slurm.lease), *OPTIONS)
            controller = cluster.controller("--slurm", "--slurm-rest", f"unix:{socket}", *options)
            poll_until(lambda: is_leased(slurm), "the controller holds the lease")
            job = slurm.submit("sleep 600", "--gres=gpu:a100:2")
            wait_running(slurm, job)
            poll_until(lambda: (found := workload(cluster, job)) and found.attempts, "the core knows that it runs")
            assert "slurm=rest read=no" not in controller.text()
        after = slurm.submit("sleep 600", "--gres=gpu:a100:1")
        wait_running(slurm, after)
        poll_until(lambda: "slurm=rest read=no" in controller.text(), "the reason is told")
        assert "is not reached" in controller.text()
        assert slurm.jobs()[after]["admin_comment"].startswith("eelgrid:placed:")
        held = slurm.devices()
        assert {jobs[0] for jobs in held.values()} == {job, after}
        assert all(len(jobs) == 1 for jobs in held.values())
