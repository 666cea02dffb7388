"""Owners of energy, the shares charged to them, and monotonic accounts of joules since the agent started.

An owner holds what is known and leaves the rest empty, because two sources name their subject differently: an
allocation (the kubelet names pod and container, Slurm a job, the plan a workload) and a use (a process, through its
cgroup, names a pod UID or a job step). `account` keeps only what outlives a process or a restart of a container, since
the joules of an account must never fall. Process ids and names are kept out of accounts: they are sensitive, and each
would be a series of its own.

The accounts and remainders of one device add up, to the millijoule, to everything that was ever added for it. An owner
that ended is shown at least once more, so that readers receive the joules of its last interval. Owners of at least 10 J
are then kept for some minutes, at most 500 of them; the smallest leave first, and sooner when there are many accounts.
An owner that leaves is drained: its joules move to the device's remainder "ended", which is shown apart because readers
of rates have counted them already. At least one scrape lies between the removal of an owner and its return, so that no
reader takes the new account for the old one. An owner that finds no room gets no account; its joules go to the
remainder "other", which readers of rates have not counted yet. Time is an argument.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, IntEnum

from eelgrid_protos.values import dataclass


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

    `ray_job` is a second name: a Ray worker in a pod, a job or a workload belongs to that. So is `workload`, except for
    an owner that only the plan knows.
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
        """Whether an allocation to this owner accounts for a use by the other; unknown fields match anything."""
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
        # What is allocated is allocated whole, whichever Ray job runs inside.
        return kept.workload == used.workload and kept.unit == used.unit and kept.ray_job in ("", used.ray_job)

    def title(self) -> str:
        """Its account in a few words for people."""
        kept = {
            name.removeprefix("slurm_"): value for name, value in self.labels().items() if value and name != "owner"
        }
        return " ".join([self.kind.value, *[f"{name}={value}" for name, value in kept.items()]])

    def labels(self) -> dict[str, str]:
        """Its account as metric labels: the same label names for every owner, different values for every account.

        Where the name of a pod or a container is unknown, its UID or the start of its id is used. No label is called
        `job`, which scrapers use for their own targets.
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
        """The value of the metric label."""
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


ENDED_MOST = 500
ENDED_MJ_LEAST = 10_000
# Several scrapes, however slow.
ENDED_KEPT_S = 600.0
# Accounts of owners in all, as many as are shown; 8 GPUs in 56 slices with two methods and three parts have some 350.
ACCOUNTS_MOST = 2000
# With more accounts than this the dead are kept no longer than they must be.
CROWDED = ACCOUNTS_MOST // 2

_NOBODY = frozenset({UNALLOCATED, UNATTRIBUTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyAccount:
    """The key of one account; all accounts of one owner end together."""

    owner: UsageOwner
    gpu_uuid: str
    part: EnergyUse
    method: ShareMethod
    confidence: ShareConfidence
    gpu_instance_id: int | None = None


class EnergyAccounts:
    """One node's joules."""

    def __init__(self) -> None:
        self._accounts: dict[UsageOwner, dict[EnergyAccount, int]] = {}
        # Accounts of owners; what is nobody's does not count.
        self._size = 0
        # When an owner was first missed, and whether it was shown since.
        self._ended: dict[UsageOwner, tuple[int, bool]] = {}
        self._drained_mj: dict[str, int] = {}
        self._other_mj: dict[str, int] = {}

    def add(self, gpu_uuid: str, shares: Iterable[EnergyShare]) -> None:
        """Charges what one device spent."""
        for share in shares:
            owner = share.owner.account()
            account = EnergyAccount(
                owner=owner,
                gpu_uuid=gpu_uuid,
                part=share.part,
                method=share.method,
                confidence=share.confidence,
                gpu_instance_id=share.gpu_instance_id,
            )
            accounts = self._accounts.get(owner, {})
            if account not in accounts and owner not in _NOBODY:
                if self._size >= ACCOUNTS_MOST:
                    self._other_mj[gpu_uuid] = self._other_mj.get(gpu_uuid, 0) + share.energy_mj
                    continue
                self._size += 1
            self._accounts.setdefault(owner, accounts)
            accounts[account] = accounts.get(account, 0) + share.energy_mj

    def rows(self) -> Mapping[EnergyAccount, int]:
        """Every account in millijoules, owner by owner as they were first seen."""
        return {account: energy_mj for accounts in self._accounts.values() for account, energy_mj in accounts.items()}

    @property
    def drained_mj(self) -> Mapping[str, int]:
        """Of each device, what owners that are kept no more were charged."""
        return dict(self._drained_mj)

    @property
    def other_mj(self) -> Mapping[str, int]:
        """Of each device, what owners without an account were charged."""
        return dict(self._other_mj)

    def drain_ended(self, present: Iterable[UsageOwner], *, now_ns: int) -> None:
        """Drains owners that ended; call it before anything is added.

        `present` are all owners that may still be charged.
        """
        here = {owner.account() for owner in present} | _NOBODY
        for owner in self._accounts:
            if owner in here:
                self._ended.pop(owner, None)
            else:
                since_ns, shown = self._ended.get(owner, (now_ns, False))
                # The rows that were shown since it was missed held all that it will ever be charged.
                self._ended[owner] = (since_ns, shown or since_ns < now_ns)
        worth = {owner: sum(self._accounts[owner].values()) for owner in self._ended}
        left = len(worth)
        for owner in sorted(worth, key=lambda owner: worth[owner]):
            since_ns, shown = self._ended[owner]
            old = now_ns - since_ns > ENDED_KEPT_S * 1e9
            many = left > ENDED_MOST or self._size > CROWDED
            if shown and (old or many or worth[owner] < ENDED_MJ_LEAST):
                self._drain(owner)
                left -= 1

    def total_mj(self, gpu_uuid: str) -> int:
        """Everything of one device."""
        kept = sum(energy_mj for account, energy_mj in self.rows().items() if account.gpu_uuid == gpu_uuid)
        return kept + self._drained_mj.get(gpu_uuid, 0) + self._other_mj.get(gpu_uuid, 0)

    def _drain(self, owner: UsageOwner) -> None:
        accounts = self._accounts.pop(owner)
        del self._ended[owner]
        self._size -= len(accounts)
        for account, energy_mj in accounts.items():
            self._drained_mj[account.gpu_uuid] = self._drained_mj.get(account.gpu_uuid, 0) + energy_mj
