"""Energy accounts: joules by owner since the agent started, monotonic, with ended owners drained.

Owns the accounts, how many there are and which of the dead are kept. Must not
know how shares were found. Time is an argument.

Theory. The accounts of one device and what it has besides add up to everything
that was ever added for it, to the millijoule. An owner that is gone is shown at
least once more, so that the joules of its last interval are not lost on whoever
reads; then, if it is worth it (10 J), it is kept for a while, at most 500 of
them, the smallest leave first, and sooner when accounts grow many. Whoever
leaves is drained: its joules move into one remainder of each device, "ended",
which is shown apart, since a reader of rates has counted them already. There is
at least one showing between an owner's leaving and its coming back, so that no
reader takes the new account for the old one. An owner that comes when there is
no room has no account: its joules are in the remainder "other", which a reader
of rates has not counted yet.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eelgrid_agent.energy.shares import (
    UNALLOCATED,
    UNATTRIBUTED,
    EnergyShare,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
)

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
    """What is kept apart; two accounts of one owner end together."""

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
        """Lets the dead go; to be called before anything is added. `present` is everyone who may still be charged."""
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
