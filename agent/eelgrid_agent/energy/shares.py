"""Usage owners (containers, jobs, units, nobody) and the energy shares charged to them.

Theory (owners). Two facts about a device come from different places and name their
subject differently: an allocation (the kubelet names pod and container, Slurm a
job, our own plan a workload) and a use (a process, through its cgroup, names a
pod UID or a job step). An owner therefore holds what is known and leaves the
rest empty, and `account` keeps of it only what outlives a process or a restart
of a container, because an account's joules must never fall. Process ids and
names are kept out of accounts: they are sensitive, and each would be a series.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum


class UsageOwnerKind(Enum):
    """What an owner is."""

    POD = "pod"
    SLURM = "slurm"
    WORKLOAD = "workload"
    CONTAINER = "container"
    RAY = "ray"
    UNIT = "unit"
    USER = "user"
    PROCESS = "process"
    # Allocated to nobody: the node's own.
    UNALLOCATED = "unallocated"
    # Used by somebody who cannot be named.
    UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOwner:
    """One owner; what is unknown, or does not apply to its kind, is empty.

    `ray_job` is a second name: a Ray worker in a pod or a job is the pod's or the job's. So is `workload`, but for an
    owner of whom only the plan knows.
    """

    kind: UsageOwnerKind
    namespace: str = ""
    pod: str = ""
    container: str = ""
    pod_uid: str = ""
    container_id: str = ""
    job: str = ""
    step: str = ""
    workload: str = ""
    user: str = ""
    unit: str = ""
    ray_job: str = ""
    pid: int = 0

    def account(self) -> "UsageOwner":
        """What its joules are kept under."""
        if self.kind is UsageOwnerKind.POD and self.pod:
            return replace(self, pod_uid="", container_id="", pid=0)
        if self.kind is UsageOwnerKind.USER:
            # Sessions come and go, and the user stays.
            return replace(self, unit=f"user-{self.user}.slice", pid=0)
        return replace(self, pid=0) if self.pid else self

    def covers(self, other: "UsageOwner") -> bool:
        """Whether an allocation to this owner accounts for a use by the other; what is unknown agrees with anything."""
        if self.kind is not other.kind:
            return False
        mine = (self.namespace, self.pod, self.container, self.pod_uid, self.container_id, self.job, self.step)
        theirs = (other.namespace, other.pod, other.container, other.pod_uid, other.container_id, other.job, other.step)
        if any(one and two and one != two for one, two in zip(mine, theirs, strict=True)):
            return False
        if self.kind in (UsageOwnerKind.POD, UsageOwnerKind.SLURM):
            # Something that both know must have agreed.
            return any(one and one == two for one, two in zip(mine, theirs, strict=True))
        kept, used = self.account(), other.account()
        return kept.workload == used.workload and kept.unit == used.unit and kept.ray_job == used.ray_job

    def title(self) -> str:
        """Its account in a few words for people."""
        kept = {
            name.removeprefix("slurm_"): value for name, value in self.labels().items() if value and name != "owner"
        }
        return " ".join([self.kind.value, *[f"{name}={value}" for name, value in kept.items()]])

    def labels(self) -> dict[str, str]:
        """Its account as metric labels, the same ones for every owner and different ones for every account.

        Where a pod or a container has no name here, its UID or the beginning of its id stands in. None is called `job`:
        that is a scraper's word for what it scrapes.
        """
        kept = self.account()
        return {
            "owner": kept.kind.value,
            "namespace": kept.namespace,
            "pod": kept.pod or kept.pod_uid,
            "container": kept.container or kept.container_id[:12],
            "slurm_job": kept.job,
            "step": kept.step,
            "workload": kept.workload,
            "unit": kept.unit,
            "ray_job": kept.ray_job,
        }


UNALLOCATED = UsageOwner(kind=UsageOwnerKind.UNALLOCATED)
UNATTRIBUTED = UsageOwner(kind=UsageOwnerKind.UNATTRIBUTED)


# Weights are counted in this fraction of the largest, so that all that follows is exact integer arithmetic.
_WEIGHT_UNITS = 1 << 40


class EnergyUse(Enum):
    """What the joules were spent on."""

    # The board as it draws with no context open.
    BARE_IDLE = "bare_idle"
    # What open contexts draw above that, doing nothing.
    CONTEXT_IDLE = "context_idle"
    ACTIVE = "active"


class ShareMethod(Enum):
    """How a share was found."""

    EXCLUSIVE = "exclusive"
    MIG_ACTIVITY = "mig_activity"
    MIG_SLICE = "mig_slice"
    PROCESS_SM = "process_sm"
    EQUAL_SHARE = "equal_share"
    UNATTRIBUTED = "unattributed"


class ShareConfidence(IntEnum):
    """How far a share may be trusted; see docs of the method."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3

    @property
    def label(self) -> str:
        """As it is shown."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyShare:
    """What one owner is charged for one interval of one device."""

    owner: UsageOwner
    part: EnergyUse
    energy_mj: int
    method: ShareMethod
    confidence: ShareConfidence
    gpu_instance_id: int | None = None


def apportion_total(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in parts by weight that add up to it exactly: each is rounded down, the largest remainders get the rest.

    Weights are finite and not negative, and one of them is above zero.
    """
    most = max(weights)
    assert most > 0.0, "some weight must be above zero"
    assert min(weights) >= 0.0, "no weight may be below zero"
    units = [int(weight / most * _WEIGHT_UNITS) for weight in weights]
    whole = sum(units)
    parts, remainders = [], []
    for index, unit in enumerate(units):
        part, remainder = divmod(total * unit, whole)
        parts.append(part)
        remainders.append((-remainder, index))
    for _, index in sorted(remainders)[: total - sum(parts)]:
        parts[index] += 1
    return parts
