"""Owners as this kernel tells them: real processes in real cgroups, laid out as Slurm and the kubelet lay them out."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.builders.agent import build_slurm_owner

from eelgrid_agent.energy.accounts import UsageOwner, UsageOwnerKind
from eelgrid_agent.energy.process_owners import ProcessOwnerResolver

UID = "2c48913c-b29f-11e7-9350-020968147796"
ID = "ab" * 32


def mounts(kind, option=""):
    """Where the kernel shows cgroups of this kind."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in lines if fields[2] == kind and option in [*fields[3].split(","), ""]]


def roots():
    """The unified hierarchy, and one of version 1 that no controller's limits hold in; whichever there are."""
    yield from (("v2", root) for root in mounts("cgroup2")[:1])
    yield from (("v1", root) for root in mounts("cgroup", "freezer")[:1])


@contextmanager
def process_in(root, path):
    """A process that sleeps in the cgroup of this path, which is made and removed."""
    made = []
    folder = root / f"eelgrid-test-{os.getpid()}"
    process = subprocess.Popen(["sleep", "60"])
    try:
        try:
            for segment in ("", *path.split("/")):
                folder = folder / segment
                if not folder.is_dir():
                    folder.mkdir()
                    made.append(folder)
            (folder / "cgroup.procs").write_text(str(process.pid))
        except OSError as error:
            pytest.skip(f"this user may make no cgroups here: {error}")
        yield process.pid
    finally:
        process.kill()
        process.wait()
        for folder in reversed(made):
            folder.rmdir()


PATHS = {
    "slurm v2": ("system.slice/slurmstepd.scope/job_4711/step_0/user/task_0", build_slurm_owner("4711", step="0")),
    "slurm v1": ("slurm/uid_0/job_4712/step_batch/task_0", build_slurm_owner("4712", step="batch")),
    "cgroupfs": (
        f"kubepods/burstable/pod{UID}/{ID}",
        UsageOwner(kind=UsageOwnerKind.POD, pod_uid=UID, container_id=ID),
    ),
    "systemd": (
        f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{ID}.scope",
        UsageOwner(kind=UsageOwnerKind.POD, pod_uid=UID, container_id=ID),
    ),
}


@pytest.mark.parametrize("path", list(PATHS))
def test_the_owner_of_a_real_process_in_a_real_cgroup(path):
    hierarchies = list(roots())
    if not hierarchies:
        pytest.skip("this machine shows no cgroups")
    segments, owner = PATHS[path]
    for version, root in hierarchies:
        book = ProcessOwnerResolver()
        with process_in(root, segments) as pid:
            found = book.resolve([pid], now_ns=0)[pid]
            assert found.owner.account() == owner, version
            assert not found.hidden
        # Dead, its owner stands for a while.
        assert book.resolve([pid], now_ns=1)[pid] == found
