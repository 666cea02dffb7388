"""Process owners: maps process ids to containers, jobs and units by cgroup, environment and log links.

An owner is kept for (pid, start time), since process ids are used again. A process that ended is remembered for a
while, because what it used since the last sample is charged after its death. Environments hold secrets: only the three
programs that name themselves nowhere else (Slurm's SLUID layout, Ray, and the agent's own launcher) are looked up
there, and only under the variable names in this file. A process may write anything there: the attributor believes a
workload's id only where the plan gives that workload the device. The process title is read for Ray's prefix and for
the MPS server and is not kept. Ray writes titles over the arguments alone: its raylet starts workers with SPT_NOENV, so that
their environments stay.

/proc/PID/cgroup holds a line for each hierarchy, and a path may hold several owners, one inside the other (a Slurm job
in a pod of Slinky, a pod in the container of a kind node). Along a path the innermost owner wins, and among lines the
most specific kind. Paths seen from another cgroup namespace start with "..", and still contain the owner's own
segments. Slurm 26.05 names jobs by SLUID, which holds no job number; the SLUID stands in for it until the environment
gives the number.

PodResources names pods without UIDs; a cgroup holds the UID and the container's id without names. The kubelet joins the
two on the node: for every container it keeps a link <pod>_<namespace>_<container>-<id>.log, whatever the runtime, so
the API server is not needed. Only names of links are read, never a log. Where the folder is not mounted, the join is
left to the attributor.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from eelgrid_agent.energy.accounts import UsageOwner, UsageOwnerKind

# The kernel's own bound is a page a line.
CGROUP_TEXT_MOST = 64 * 1024
_LINES_MOST = 64
_PATH_MOST = 4096

_POD_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"
# pod<uid> (cgroupfs), kubepods-burstable-pod<uid>.slice (systemd), and the two joined with the container by colons,
# as containerd makes them when its driver and the kubelet's differ.
_POD = re.compile(rf"(?:^|-)pod({_POD_UID})(?:\.slice)?(?::[a-z-]+:([0-9a-f]{{64}}))?$")
_CONTAINER = re.compile(r"^(?:[a-z]+(?:-[a-z]+)*-)?([0-9a-f]{64})(?:\.scope)?$")
_SLURM_V1 = re.compile(r"^slurm(?:_[\w.-]+)?$")
_SLURM_V2 = re.compile(r"^(?:[\w.-]+_)?slurmstepd\.scope$")
_JOB = re.compile(r"^job_(\d+)$")
_STEP = re.compile(r"^step_(\w+(?:[.+-]\w+)*)$")
_SLUID = re.compile(r"^s[0-9A-HJKMNP-TV-Z]{13}$")
_USER_SLICE = re.compile(r"^user-(\d+)\.slice$")
_ENGINES = frozenset({"docker", "libpod", "lxc", "buildkit"})

_RANKS = {
    UsageOwnerKind.SLURM: 4,
    UsageOwnerKind.POD: 3,
    UsageOwnerKind.CONTAINER: 2,
    UsageOwnerKind.UNIT: 1,
    UsageOwnerKind.USER: 1,
}


def is_sluid(job: str) -> bool:
    """Whether a job is named by its SLUID because its number is unknown."""
    return _SLUID.match(job) is not None


def owner_from_cgroup(text: str) -> UsageOwner | None:
    """The owner that the text of a /proc/PID/cgroup names; None where it names none."""
    best: UsageOwner | None = None
    for line in text[:CGROUP_TEXT_MOST].split("\n", _LINES_MOST)[:_LINES_MOST]:
        # hierarchy:controllers:path, and a path may hold colons.
        path = line.split(":", 2)[-1]
        if not path.startswith("/") or len(path) > _PATH_MOST:
            continue
        found = _owner_of(path)
        if found is not None and (best is None or _RANKS[found.kind] > _RANKS[best.kind]):
            best = found
    return best


def _owner_of(path: str) -> UsageOwner | None:
    segments = [segment for segment in path.split("/") if segment and segment != ".."]
    owner = _of_systemd(segments)
    slurm = engine = False
    for segment in segments:
        pod = _POD.search(segment)
        if pod is not None:
            owner = UsageOwner(kind=UsageOwnerKind.POD, pod_uid=pod[1].replace("_", "-"), container_id=pod[2] or "")
            continue
        if _SLURM_V1.match(segment) or _SLURM_V2.match(segment):
            slurm = True
            continue
        if slurm:
            owner = _deeper_in_slurm(segment, owner)
            continue
        container = _CONTAINER.match(segment)
        if container is not None:
            owner = _in_container(owner, container[1], known=engine or segment != container[1])
        engine = segment in _ENGINES
    return owner


def _deeper_in_slurm(segment: str, owner: UsageOwner | None) -> UsageOwner | None:
    """A step daemon's own scope is no job: only a job's segment makes one."""
    job = _JOB.match(segment)
    if job is not None:
        return UsageOwner(kind=UsageOwnerKind.SLURM, job=job[1])
    if _SLUID.match(segment):
        return UsageOwner(kind=UsageOwnerKind.SLURM, job=segment)
    step = _STEP.match(segment)
    if step is not None and owner is not None and owner.kind is UsageOwnerKind.SLURM:
        return replace(owner, step=step[1])
    return owner


def _in_container(owner: UsageOwner | None, container_id: str, *, known: bool) -> UsageOwner | None:
    """Sixty-four hexadecimal digits are a container within a pod, or where an engine's name stands by them."""
    if owner is not None and owner.kind is UsageOwnerKind.POD:
        return owner if owner.container_id else replace(owner, container_id=container_id)
    return UsageOwner(kind=UsageOwnerKind.CONTAINER, container_id=container_id) if known else owner


def _of_systemd(segments: list[str]) -> UsageOwner | None:
    """The user whose session it is, else the innermost unit that is no mere slice."""
    units = [segment for segment in segments if segment.endswith((".service", ".scope"))]
    for segment in segments:
        user = _USER_SLICE.match(segment)
        if user is not None:
            return UsageOwner(kind=UsageOwnerKind.USER, user=user[1], unit=units[-1] if units else "")
    if not units or units[-1] == "init.scope":
        return None
    return UsageOwner(kind=UsageOwnerKind.UNIT, unit=units[-1])


# A node runs some hundreds of containers and keeps a few dead ones of each.
ENTRIES_MOST = 16_384
# An unknown container makes us look again, and not more often than this.
REFRESH_S = 5.0

# Neither a namespace nor a pod can hold an underscore.
_LOG_NAME = re.compile(r"^([a-z0-9.-]+)_([a-z0-9-]+)_([a-z0-9-]+)-([0-9a-f]{64})\.log$")


@dataclass(frozen=True, slots=True)
class ContainerName:
    """What a container is called."""

    namespace: str
    pod: str
    container: str


def parse_log_name(name: str) -> tuple[str, ContainerName] | None:
    """The container id and its name in the name of a link; None for any other file."""
    found = _LOG_NAME.match(name)
    if found is None:
        return None
    return found[4], ContainerName(namespace=found[2], pod=found[1], container=found[3])


class ContainerNameIndex:
    """Names by container id."""

    def __init__(self, folder: Path = Path("/var/log/containers")) -> None:
        self._folder = folder
        self._names: dict[str, ContainerName] = {}
        self._read_ns: int | None = None

    def find_container(self, container_id: str, now_ns: int) -> ContainerName | None:
        """The container's name, looked for again where it is new."""
        if container_id not in self._names and (self._read_ns is None or now_ns - self._read_ns > REFRESH_S * 1e9):
            self._read_ns = now_ns
            self._names = self._listing()
        return self._names.get(container_id)

    def _listing(self) -> dict[str, ContainerName]:
        names: dict[str, ContainerName] = {}
        try:
            with os.scandir(self._folder) as entries:
                for count, entry in enumerate(entries):
                    if count == ENTRIES_MOST:
                        break
                    parsed = parse_log_name(entry.name)
                    if parsed is not None:
                        names[parsed[0]] = parsed[1]
        except OSError:
            # Not a node of Kubernetes, or not mounted; the names we had are as good as any.
            return self._names
        return names


# A process that died between two looks is charged at the next one.
DEAD_KEPT_S = 60.0
PROCESSES_MOST = 4096
_ENVIRON_MOST = 256 * 1024
_TITLE_MOST = 256
_STAT_MOST = 4096
_MPS_SERVER = "nvidia-cuda-mps"
_RAY_TITLE = "ray::"
_WORKLOAD = "EELGRID_WORKLOAD_ID"
# What a cgroup cannot tell from the jobs that the agent runs; a Ray job may hold several workloads of the client library.
_UNNAMED = (UsageOwnerKind.PROCESS, UsageOwnerKind.UNIT, UsageOwnerKind.USER, UsageOwnerKind.RAY)
# The field after the command in /proc/PID/stat is the third, and the start time the 22nd.
_START_FIELD = 19


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """The owner of a process.

    `mps_server` marks a server that shares the device for others, `hidden` one that could not be read. `workload` is
    the id that the launcher of the agent's jobs, or the client library for Ray, gave it, as the process states it.
    """

    owner: UsageOwner
    mps_server: bool = False
    hidden: bool = False
    workload: str = ""


@dataclass(slots=True)
class _Known:
    start: int
    found: ProcessOwner
    seen_ns: int


class ProcessOwnerResolver:
    """Owners by process id."""

    def __init__(
        self, root: Path = Path("/proc"), *, names: Callable[[str, int], ContainerName | None] | None = None
    ) -> None:
        self._root = root
        self._names = names
        self._known: dict[int, _Known] = {}

    def resolve(self, pids: Iterable[int], *, now_ns: int) -> Mapping[int, ProcessOwner]:
        """The owner of every process, those that died a moment ago included; of so many as are kept."""
        found = {}
        for pid in islice(pids, PROCESSES_MOST):
            found[pid] = self._resolve(pid, now_ns)
        self._expire_processes(now_ns)
        return found

    def _resolve(self, pid: int, now_ns: int) -> ProcessOwner:
        known = self._known.get(pid)
        start = self._start_time(pid)
        if start is None:
            # Dead, or hidden from us.
            nobody = ProcessOwner(UsageOwner(kind=UsageOwnerKind.PROCESS, pid=pid), hidden=True)
            return nobody if known is None else known.found
        # Read anew each time: a process is moved into its job's cgroup after it has started.
        owner = owner_from_cgroup(self._read(pid, "cgroup", CGROUP_TEXT_MOST))
        title = self._read(pid, "cmdline", _TITLE_MOST).replace("\0", " ").strip() or self._read(pid, "comm", 64)
        owner = self._name_owner(self._refine_owner(pid, owner, title), now_ns)
        again = ProcessOwner(
            owner,
            mps_server=_MPS_SERVER in title.split(" ", 1)[0],
            workload=self._environment(pid, _WORKLOAD).get(_WORKLOAD, "") if owner.kind in _UNNAMED else "",
        )
        if known is not None and known.start == start and owner.kind is UsageOwnerKind.PROCESS:
            # It is ending and its files are empty; what they said before still holds.
            again = known.found
        self._known[pid] = _Known(start, again, now_ns)
        return again

    def _refine_owner(self, pid: int, owner: UsageOwner | None, title: str) -> UsageOwner:
        ray_job = ""
        if title.startswith(_RAY_TITLE):
            ray_job = self._environment(pid, "RAY_JOB_ID").get("RAY_JOB_ID", "")
        if owner is not None and owner.kind is UsageOwnerKind.SLURM and is_sluid(owner.job):
            told = self._environment(pid, "SLURM_JOB_ID", "SLURM_STEP_ID")
            owner = replace(
                owner, job=told.get("SLURM_JOB_ID", owner.job), step=owner.step or told.get("SLURM_STEP_ID", "")
            )
        if owner is None or owner.kind in (UsageOwnerKind.UNIT, UsageOwnerKind.USER):
            if ray_job:
                return UsageOwner(kind=UsageOwnerKind.RAY, ray_job=ray_job, pid=pid)
            owner = owner or UsageOwner(kind=UsageOwnerKind.PROCESS)
        return replace(owner, ray_job=ray_job, pid=pid)

    def _name_owner(self, owner: UsageOwner, now_ns: int) -> UsageOwner:
        if owner.kind is not UsageOwnerKind.POD or self._names is None or not owner.container_id:
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
            is_plain = value.isalnum() or name == _WORKLOAD
            if name in names and is_plain and 0 < len(value) <= _TITLE_MOST:
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

    def _expire_processes(self, now_ns: int) -> None:
        old = [pid for pid, known in self._known.items() if now_ns - known.seen_ns > DEAD_KEPT_S * 1e9]
        if len(self._known) - len(old) > PROCESSES_MOST:
            by_age = sorted(self._known, key=lambda pid: self._known[pid].seen_ns)
            old = by_age[: len(self._known) - PROCESSES_MOST]
        for pid in old:
            del self._known[pid]
