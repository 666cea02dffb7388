"""The limit that a job should have: what its search says, or what prices do.

Owns the choice between the two. Must not know budgets, other jobs or how a search goes.

Theory. Once a search has settled the curve is known, and a tariff may say another limit: a
larger one earns, as the ledger counts it, a smaller one is run only while the ledger
affords it, whenever the job may end. To begin with a smaller one it has to afford `_RUN`
windows, so that limits do not change at every window.
"""

from dataclasses import dataclass

from eelgrid_controller.power.curves import AtLimit
from eelgrid_controller.power.exploration import Ceiling, Decision, Exploration, affords, step

__all__ = ["SAME_W", "Aim", "Wish", "aimed", "same_w"]

SAME_W = 0.5
_RUN = 8  # windows


def same_w(one_w: float, other_w: float) -> bool:
    """Whether two limits are one."""
    return abs(one_w - other_w) <= SAME_W


@dataclass(frozen=True, slots=True)
class Aim:
    """The limit that a job should have, and why."""

    limit_w: float
    reason: str


def aimed(search: Exploration, decision: Decision, dear: AtLimit | None, target_w: float) -> Aim:
    """The search's limit, or once it has settled that of the prices."""
    aim = Aim(decision.limit_w, decision.why.value)
    if dear is None or not decision.settled or same_w(dear.limit_w, aim.limit_w):
        return aim
    if dear.limit_w > aim.limit_w:
        return Aim(dear.limit_w, "energy is cheap now: time is earned for when it is dear")
    ahead = 1 if target_w <= dear.limit_w + SAME_W else _RUN
    if affords(search, dear.limit_w, ahead):
        return Aim(dear.limit_w, "energy is dear now: time that was earned is spent")
    return aim


@dataclass(frozen=True, slots=True)
class Wish:
    """What a job would run at without budgets, to be worked out anywhere: all of it is frozen."""

    search: Exploration
    decision: Decision | None  # None where a ceiling hides it
    dear: AtLimit | None  # what prices ask for now
    target_w: float

    def limit_w(self) -> float:
        """The limit of each GPU."""
        decision = self.decision or step(self.search, Ceiling(None))[1]
        return aimed(self.search, decision, self.dear, self.target_w).limit_w
