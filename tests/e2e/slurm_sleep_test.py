"""A real Slurm whose idle nodes sleep: decided by the controller, carried out by Slurm, our programs and simulated BMCs.

Each node's slurmd ends when its BMC, which speaks Redfish, is told to shut down, and starts when it is told to start. Needs
Debian's slurm-wlm and munge, and root (`make test-slurm` installs them).
"""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from tests.e2e.processes import Cluster
from tests.fakes.bmc import PASSWORD, USER, SimulatedBmc, serve_redfish
from tests.slurm_rig import GPUS, SlurmCluster, find_missing
from tests.waiting import poll_until

MISSING = find_missing()
SCRIPTS = Path(__file__).parent.parent.parent / "deploy" / "slurm"
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}")
# A break-even of 3 s, and one idle node always awake in each of the two racks.
OPTIONS = (
    *("--slurm-power-save", "--slurm-idle-watts", "1000", "--slurm-sleep-watts", "0", "--slurm-transition-joules", "3000"),
    *("--slurm-wake-seconds", "2", "--slurm-warm-nodes", "1", "--slurm-poll", "0.2", "--slurm-lease-seconds", "5"),
)  # fmt: skip
WITHIN_S = 90.0


class SleepingSlurm:
    """A Slurm with power saving, and the BMCs of its nodes."""

    def __init__(self, folder, stack):
        lines = [
            *("SuspendTime=31536000", "SuspendTimeout=5", "ResumeTimeout=60", "SuspendRate=0", "ResumeRate=0"),
            *self._write_programs(folder),
        ]
        self.slurm = SlurmCluster(types=("a100",) * 4, extra="\n".join(lines))
        self.bmcs = {}
        entries = [f'[defaults]\nkind = "redfish"\nuser = "{USER}"\npassword_file = "{folder}/secret"\n']
        for name in self.slurm.names:
            bmc = SimulatedBmc(boot=lambda name=name: self.boot(name), shut_down=lambda name=name: self.shut_down(name))
            self.bmcs[name] = bmc
            address = stack.enter_context(serve_redfish(bmc))
            entries.append(f'[nodes.{name}]\naddress = "{address}"\n')
        (folder / "bmcs.toml").write_text("".join(entries))
        (folder / "secret").write_text(PASSWORD)
        (folder / "secret").chmod(0o600)
        stack.enter_context(self.slurm)

    def _write_programs(self, folder):
        """Yields the settings of Slurm's programs, which are ours with this test's files and Python."""
        settings = {
            "EELGRID_POWER_LOG": folder / "power.log",
            "EELGRID_PYTHON": sys.executable,
            "EELGRID_BMCS": folder / "bmcs.toml",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        given = " ".join(f"{name}='{value}'" for name, value in settings.items())
        for name in ("suspend", "resume"):
            path = folder / name
            path.write_text(f'#!/bin/sh\n{given} exec {SCRIPTS / name} "$@"\n')
            path.chmod(0o755)
            yield f"{name.title()}Program={path}"

    def boot(self, name):
        self.slurm.start_node(name, "-b")

    def shut_down(self, name):
        self.slurm.kill(f"slurmd.{name}", 15)

    def asleep(self):
        """The nodes that sleep by Slurm's own word, whose BMC is off."""
        found = self.slurm.run("sinfo", "-h", "-N", "-t", "powered_down", "-o", "%N").split()
        return [name for name in found if self.bmcs[name].power == "Off"]

    def wait_asleep(self, count):
        poll_until(lambda: len(self.asleep()) == count, f"{count} nodes sleep", within_s=WITHIN_S)

    def wait_state(self, job, state):
        poll_until(lambda: self.slurm.state(job) == state, f"{job} is {state}", within_s=WITHIN_S)


@pytest.fixture
def sleeping(tmp_path):
    with contextlib.ExitStack() as stack:
        found = SleepingSlurm(tmp_path, stack)
        cluster = stack.enter_context(Cluster(tmp_path))
        yield found, cluster
        print((tmp_path / "power.log").read_text() if (tmp_path / "power.log").exists() else "no program has run")


def test_idle_nodes_sleep_jobs_wake_them_and_no_job_needs_the_controller_for_that(sleeping):
    found, cluster = sleeping
    slurm = found.slurm
    controller = cluster.controller(
        "--slurm", "--slurm-conf", str(slurm.conf), "--slurm-lease", str(slurm.lease), *OPTIONS
    )
    found.wait_asleep(2)
    # A job of Slurm's own takes three nodes: two are warm, one wakes, and the last is woken to be warm.
    job = slurm.submit("sleep 600", "--nodes=3", f"--gres=gpu:a100:{GPUS}", steered=False)
    found.wait_state(job, "RUNNING")
    poll_until(lambda: not found.asleep(), "another node is warm", within_s=WITHIN_S)
    assert all(found.bmcs[name].power == "On" for name in slurm.names)
    slurm.run("scancel", job)
    found.wait_asleep(2)
    # A job that is steered is placed on nodes that sleep, too.
    job = slurm.submit("sleep 600", "--nodes=4", f"--gres=gpu:a100:{GPUS}")
    found.wait_state(job, "RUNNING")
    assert slurm.jobs()[job]["admin_comment"].startswith("eelgrid:placed")
    slurm.run("scancel", job)
    found.wait_asleep(2)
    # Without the controller nothing more falls asleep, and what sleeps is woken by who needs it.
    controller.kill()
    job = slurm.submit("true", "--nodes=4", f"--gres=gpu:a100:{GPUS}", steered=False)
    poll_until(lambda: slurm.state(job) in ("COMPLETING", "COMPLETED"), "it has run", within_s=WITHIN_S)
    for name in slurm.names:
        assert "DOWN" not in slurm.run("sinfo", "-h", "-n", name, "-o", "%T").upper()
