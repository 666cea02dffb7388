"""A process's owner, read out of its cgroup paths.

Owns the paths that Kubernetes, Slurm, container engines and systemd make, of
cgroup v1 and v2, cgroupfs and systemd drivers. Must not know where the text
comes from; it reads no file.

Theory. /proc/PID/cgroup holds a line for each hierarchy, and a path may hold
several owners, one inside the other (a Slurm job in a pod of Slinky, a pod in
the container of a kind node). Along a path the innermost owner wins, and among
lines the most specific kind. Paths seen from another cgroup namespace start
with "..", which changes nothing: the owner's own segments are still there.
Slurm 26.05 names jobs by SLUID, which holds no job number; the SLUID stands in
for it until the environment tells.
"""

import re
from dataclasses import replace

from eelgrid_agent.attribution.owner import Owner, OwnerKind

__all__ = ["CGROUP_TEXT_MOST", "is_sluid", "owner_from_cgroup"]

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

_RANKS = {OwnerKind.SLURM: 4, OwnerKind.POD: 3, OwnerKind.CONTAINER: 2, OwnerKind.UNIT: 1, OwnerKind.USER: 1}


def is_sluid(job: str) -> bool:
    """Whether a job goes by its SLUID because its number is not known."""
    return _SLUID.match(job) is not None


def owner_from_cgroup(text: str) -> Owner | None:
    """The owner that the text of a /proc/PID/cgroup names; None where it names none."""
    best: Owner | None = None
    for line in text[:CGROUP_TEXT_MOST].split("\n", _LINES_MOST)[:_LINES_MOST]:
        # hierarchy:controllers:path, and a path may hold colons.
        path = line.split(":", 2)[-1]
        if not path.startswith("/") or len(path) > _PATH_MOST:
            continue
        found = _owner_of(path)
        if found is not None and (best is None or _RANKS[found.kind] > _RANKS[best.kind]):
            best = found
    return best


def _owner_of(path: str) -> Owner | None:
    segments = [segment for segment in path.split("/") if segment and segment != ".."]
    owner = _of_systemd(segments)
    slurm = engine = False
    for segment in segments:
        pod = _POD.search(segment)
        if pod is not None:
            owner = Owner(kind=OwnerKind.POD, pod_uid=pod[1].replace("_", "-"), container_id=pod[2] or "")
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


def _deeper_in_slurm(segment: str, owner: Owner | None) -> Owner | None:
    """A step daemon's own scope is no job: only a job's segment makes one."""
    job = _JOB.match(segment)
    if job is not None:
        return Owner(kind=OwnerKind.SLURM, job=job[1])
    if _SLUID.match(segment):
        return Owner(kind=OwnerKind.SLURM, job=segment)
    step = _STEP.match(segment)
    if step is not None and owner is not None and owner.kind is OwnerKind.SLURM:
        return replace(owner, step=step[1])
    return owner


def _in_container(owner: Owner | None, container_id: str, *, known: bool) -> Owner | None:
    """Sixty-four hexadecimal digits are a container within a pod, or where an engine's name stands by them."""
    if owner is not None and owner.kind is OwnerKind.POD:
        return owner if owner.container_id else replace(owner, container_id=container_id)
    return Owner(kind=OwnerKind.CONTAINER, container_id=container_id) if known else owner


def _of_systemd(segments: list[str]) -> Owner | None:
    """The user whose session it is, else the innermost unit that is no mere slice."""
    units = [segment for segment in segments if segment.endswith((".service", ".scope"))]
    for segment in segments:
        user = _USER_SLICE.match(segment)
        if user is not None:
            return Owner(kind=OwnerKind.USER, user=user[1], unit=units[-1] if units else "")
    if not units or units[-1] == "init.scope":
        return None
    return Owner(kind=OwnerKind.UNIT, unit=units[-1])
