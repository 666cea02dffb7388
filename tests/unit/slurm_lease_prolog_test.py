"""Slurm's lease prolog against programs of our own in place of the agent, scontrol and scancel, and a record as slurmd keeps it.

What real Slurm makes of its exit codes is in tests/e2e/two_engines_test.py.
"""

import struct
import subprocess
from pathlib import Path

import pytest

PROLOG = Path(__file__).parent.parent.parent / "deploy" / "slurm" / "lease-prolog"
JOB, NOW_S = 70_001, 1_800_000_000
REFUSED = "GPU GPU-0 is leased to local w-1/0/1"


def record(*jobs, tail=b"\x00\x00\x00\x00"):
    """What slurmd 22.05 writes of jobs and of when it was told to end them, then of credentials."""
    packed = b"".join(struct.pack(">IQQQ", number, told_s, NOW_S, 2**31 - 1) for number, told_s in jobs)
    return struct.pack(">I", len(jobs)) + packed + tail


class Node:
    """Runs the prolog; the programs write down that they were called."""

    def __init__(self, folder, *, refusal=3, requeue=0, before=b"", after=None):
        self.folder, self.spool = folder, folder / "spool.n1"
        self.spool.mkdir()
        (self.spool / "cred_state").write_bytes(before)
        (folder / "after").write_bytes(before if after is None else after)
        # slurmctld has told slurmd as soon as the job was sent away.
        tell = f"cp {folder}/after {self.spool}/cred_state"
        self.write("eelgrid-agent", f'echo "{REFUSED}" >&2; exit {refusal}')
        self.write(
            "scontrol",
            f"""case $1 in
  show) echo "SlurmdSpoolDir          = {folder}/spool.%n" ;;
  requeue) [ {requeue} -eq 0 ] || exit 1; {tell} ;;
esac""",
        )
        self.write("scancel", tell)
        self.write("sleep", "")
        self.write("logger", "")

    def write(self, name, text):
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.folder}/calls\n{text}\n')
        path.chmod(0o755)

    def run(self, context="prolog_slurmd", gpus="0,1"):
        environment = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "SLURM_SCRIPT_CONTEXT": context,
            "SLURM_JOB_ID": str(JOB),
            "SLURM_JOB_GPUS": gpus,
            "SLURMD_NODENAME": "n1",
        }
        return subprocess.run([PROLOG], env=environment, check=False, capture_output=True, text=True, timeout=60)

    def calls(self, but=("sleep", "logger")):
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not line.startswith(but)]


TAKE = f"eelgrid-agent lease take --engine slurm --owner {JOB} --gpu 0,1"
ASK = "scontrol show config"


def test_a_job_with_its_leases_starts_and_one_without_gpus_asks_nobody(tmp_path):
    node = Node(tmp_path, refusal=0)
    assert node.run(gpus="").returncode == 0
    assert node.calls() == []
    assert node.run().returncode == 0
    assert node.calls() == [TAKE]


def test_a_refused_job_is_requeued_and_the_prolog_ends_well_once_slurmd_knows(tmp_path):
    node = Node(tmp_path, before=record((8, 0)), after=record((8, 0), (JOB, NOW_S)))
    done = node.run()
    assert done.returncode == 0
    assert node.calls() == [TAKE, ASK, f"scontrol requeue {JOB}"]
    assert f"job {JOB} does not start here: {REFUSED}" in done.stderr


def test_a_refused_job_that_slurm_does_not_requeue_is_told_why_and_cancelled(tmp_path):
    node = Node(tmp_path, requeue=1, after=record((JOB, NOW_S)))
    assert node.run().returncode == 0
    notice, cancel = node.calls()[-2:]
    assert notice == f"scontrol notify {JOB} does not start on n1: {REFUSED}"
    assert cancel == f"scancel {JOB}"


OLD = record((JOB, NOW_S - 100))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (record((JOB, 0)), record((JOB, 0))),  # slurmctld has not told it
        (OLD, OLD),  # it was told of an earlier start of the job
        (record((8, NOW_S)), record((8, NOW_S))),  # of another job
        (b"", b""),  # no record
        (b"", b"\xff\xff\xff\xff" + b"\x01" * 50),  # a record of another version
        (record((8, 0)), record((8, 0), tail=record((JOB, NOW_S))[4:])),  # not among the jobs
    ],
)
def test_without_a_proof_that_slurmd_lets_go_of_the_job_the_prolog_fails(tmp_path, before, after):
    node = Node(tmp_path, before=before, after=after)
    done = node.run()
    assert done.returncode == 1
    assert "the prolog fails and Slurm drains the node" in done.stderr
    assert len(node.calls(but=("scontrol", "eelgrid", "logger"))) >= 100


@pytest.mark.parametrize(("agent", "scontrol"), [(1, 0), (2, 0), (3, 1)])
def test_a_fault_of_the_agent_or_of_slurm_fails_the_prolog(tmp_path, agent, scontrol):
    node = Node(tmp_path, refusal=agent, requeue=scontrol)
    node.write("scancel", "exit 1")
    assert node.run().returncode == 1
    assert (f"scancel {JOB}" in node.calls()) == (agent == 3)


def test_an_epilog_never_fails(tmp_path):
    done = Node(tmp_path, refusal=1).run("epilog_slurmd")
    assert (done.returncode, "stays for now" in done.stderr) == (0, True)
