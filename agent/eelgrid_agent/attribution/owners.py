"""Processes become owners, through a tree that looks like /proc.

Owns how a process is looked up, which of its environment is read, and how long
an owner outlives its process. Must not know devices nor joules; the tree's
root and the time are arguments.

Theory. Process ids are the host's and are used again, so an owner is kept for
(pid, start time). A process that is gone is remembered for a while: what it
used since the look before is charged after its death. Environments hold
secrets: only the two programs that put their name nowhere else are looked up
there (Slurm's SLUID layout and Ray), and only by the names in this file. The
process title is read for Ray's prefix and for the MPS server and not kept.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from eelgrid_agent.attribution.cgroups import CGROUP_TEXT_MOST, is_sluid, owner_from_cgroup
from eelgrid_agent.attribution.owner import Owner, OwnerKind
from eelgrid_agent.attribution.pod_names import PodName

__all__ = ["OwnerBook", "ProcessOwner"]

# A process that died between two looks is charged at the next one.
DEAD_KEPT_S = 60.0
PROCESSES_MOST = 4096
_ENVIRON_MOST = 256 * 1024
_TITLE_MOST = 256
_STAT_MOST = 4096
_MPS_SERVER = "nvidia-cuda-mps"
_RAY_TITLE = "ray::"
# The field after the command in /proc/PID/stat is the third, and the start time the 22nd.
_START_FIELD = 19


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """Whose process it is; `mps_server` shares the device on behalf of others, `hidden` could not be looked at."""

    owner: Owner
    mps_server: bool = False
    hidden: bool = False


@dataclass(slots=True)
class _Known:
    start: int
    found: ProcessOwner
    seen_ns: int


class OwnerBook:
    """Owners by process id."""

    def __init__(
        self, root: Path = Path("/proc"), *, names: Callable[[str, int], PodName | None] | None = None
    ) -> None:
        self._root = root
        self._names = names
        self._known: dict[int, _Known] = {}

    def resolve(self, pids: Iterable[int], *, now_ns: int) -> Mapping[int, ProcessOwner]:
        """The owner of every process, those that died a moment ago included; of so many as are kept."""
        found = {}
        for pid in islice(pids, PROCESSES_MOST):
            found[pid] = self._resolve(pid, now_ns)
        self._forget(now_ns)
        return found

    def _resolve(self, pid: int, now_ns: int) -> ProcessOwner:
        known = self._known.get(pid)
        start = self._start_time(pid)
        if start is None:
            # Dead, or hidden from us.
            nobody = ProcessOwner(Owner(kind=OwnerKind.PROCESS, pid=pid), hidden=True)
            return nobody if known is None else known.found
        # Read anew each time: a process is moved into its job's cgroup after it has started.
        owner = owner_from_cgroup(self._read(pid, "cgroup", CGROUP_TEXT_MOST))
        title = self._read(pid, "cmdline", _TITLE_MOST).replace("\0", " ").strip() or self._read(pid, "comm", 64)
        owner = self._named(self._refined(pid, owner, title), now_ns)
        again = ProcessOwner(owner, mps_server=_MPS_SERVER in title.split(" ", 1)[0])
        if known is not None and known.start == start and owner.kind is OwnerKind.PROCESS:
            # It is ending and its files are empty; what they said before still holds.
            again = known.found
        self._known[pid] = _Known(start, again, now_ns)
        return again

    def _refined(self, pid: int, owner: Owner | None, title: str) -> Owner:
        ray_job = ""
        if title.startswith(_RAY_TITLE):
            ray_job = self._environment(pid, "RAY_JOB_ID").get("RAY_JOB_ID", "")
        if owner is not None and owner.kind is OwnerKind.SLURM and is_sluid(owner.job):
            told = self._environment(pid, "SLURM_JOB_ID", "SLURM_STEP_ID")
            owner = replace(
                owner, job=told.get("SLURM_JOB_ID", owner.job), step=owner.step or told.get("SLURM_STEP_ID", "")
            )
        if owner is None or owner.kind in (OwnerKind.UNIT, OwnerKind.USER):
            if ray_job:
                return Owner(kind=OwnerKind.RAY, ray_job=ray_job, pid=pid)
            owner = owner or Owner(kind=OwnerKind.PROCESS)
        return replace(owner, ray_job=ray_job, pid=pid)

    def _named(self, owner: Owner, now_ns: int) -> Owner:
        if owner.kind is not OwnerKind.POD or self._names is None or not owner.container_id:
            return owner
        name = self._names(owner.container_id, now_ns)
        if name is None:
            return owner
        return replace(owner, namespace=name.namespace, pod=name.pod, container=name.container)

    def _start_time(self, pid: int) -> int | None:
        # The command may hold spaces and parentheses, so fields are counted from its last one.
        fields = self._read(pid, "stat", _STAT_MOST).rpartition(")")[2].split()
        if len(fields) <= _START_FIELD or not fields[_START_FIELD].isdigit():
            return None
        return int(fields[_START_FIELD])

    def _environment(self, pid: int, *names: str) -> dict[str, str]:
        """These variables and no other, where the kernel lets us read them."""
        found = {}
        for entry in self._read(pid, "environ", _ENVIRON_MOST).split("\0"):
            name, _, value = entry.partition("=")
            if name in names and value.isalnum() and len(value) <= _TITLE_MOST:
                found[name] = value
        return found

    def _read(self, pid: int, name: str, most: int) -> str:
        """A file's beginning; empty where the process is gone or hidden."""
        try:
            with (self._root / str(pid) / name).open("rb", buffering=0) as file:
                chunks, left = [], most
                while left > 0 and (chunk := file.read(min(left, 65536))):
                    chunks.append(chunk)
                    left -= len(chunk)
        except OSError:
            return ""
        return os.fsdecode(b"".join(chunks))

    def _forget(self, now_ns: int) -> None:
        old = [pid for pid, known in self._known.items() if now_ns - known.seen_ns > DEAD_KEPT_S * 1e9]
        if len(self._known) - len(old) > PROCESSES_MOST:
            by_age = sorted(self._known, key=lambda pid: self._known[pid].seen_ns)
            old = by_age[: len(self._known) - PROCESSES_MOST]
        for pid in old:
            del self._known[pid]
