"""Who joules belong to: containers, jobs, units and the two names for nobody.

Owns identity: which owners are one account, and which allocation covers which
process. Must not know where an owner was found nor what it used.

Theory. Two facts about a device come from different places and name their
subject differently: an allocation (the kubelet names pod and container, Slurm a
job, our own plan a workload) and a use (a process, through its cgroup, names a
pod UID or a job step). An owner therefore holds what is known and leaves the
rest empty, and `account` keeps of it only what outlives a process or a restart
of a container, because an account's joules must never fall. Process ids and
names are kept out of accounts: they are sensitive, and each would be a series.
"""

from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["UNALLOCATED", "UNATTRIBUTED", "Owner", "OwnerKind"]


class OwnerKind(Enum):
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
class Owner:
    """One owner; what is unknown, or does not apply to its kind, is empty.

    `ray_job` is a second name: a Ray worker in a pod or a job is the pod's or the job's. So is `workload`, but for an
    owner of whom only the plan knows.
    """

    kind: OwnerKind
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

    def account(self) -> "Owner":
        """What its joules are kept under."""
        if self.kind is OwnerKind.POD and self.pod:
            return replace(self, pod_uid="", container_id="", pid=0)
        if self.kind is OwnerKind.USER:
            # Sessions come and go, and the user stays.
            return replace(self, unit=f"user-{self.user}.slice", pid=0)
        return replace(self, pid=0) if self.pid else self

    def covers(self, other: "Owner") -> bool:
        """Whether an allocation to this owner accounts for a use by the other; what is unknown agrees with anything."""
        if self.kind is not other.kind:
            return False
        mine = (self.namespace, self.pod, self.container, self.pod_uid, self.container_id, self.job, self.step)
        theirs = (other.namespace, other.pod, other.container, other.pod_uid, other.container_id, other.job, other.step)
        if any(one and two and one != two for one, two in zip(mine, theirs, strict=True)):
            return False
        if self.kind in (OwnerKind.POD, OwnerKind.SLURM):
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
            "owner": kept.kind.value, "namespace": kept.namespace, "pod": kept.pod or kept.pod_uid,
            "container": kept.container or kept.container_id[:12], "slurm_job": kept.job, "step": kept.step,
            "workload": kept.workload, "unit": kept.unit, "ray_job": kept.ray_job,
        }  # fmt: skip


UNALLOCATED = Owner(kind=OwnerKind.UNALLOCATED)
UNATTRIBUTED = Owner(kind=OwnerKind.UNATTRIBUTED)
