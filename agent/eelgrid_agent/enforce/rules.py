"""Names of the rules that refuse or shape a setting, and the thresholds of the guard.

`RefusalRule` holds every value of `ApplyResult.rule` and of the label `rule`; alerts and dashboards use no other.
`GuardLimits` gives each threshold with its reason; `LocalPolicy` is the operator's.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLimits:
    """The numbers; the defaults are what a node runs with.

    `tolerance_w`: drivers round a limit to a tenth of a watt or to a watt, so
    what is nearer than this is the same limit. `hysteresis_w`: half a percent
    of a 700 W part, far under the +-5 % of its sensor; a planner that wavers by
    less must not cost a write to the device and to the disk.

    `repairs_most` in `repair_window_s`: one repair mends an operator's slip and
    two a script that ran twice; whoever undoes a third means it.

    `losses_most` in `loss_window_s`: a reset is one loss and a driver upgrade
    may be two. Quarantine begins at `quarantine_s` and doubles with each within
    `quarantine_memory_s`, up to `quarantine_s_most`.
    """

    tolerance_w: float = 1.0
    hysteresis_w: float = 3.0
    slew_w: float = 100.0
    clock_step_mhz: int = 15
    clock_looks: int = 3
    repairs_most: int = 3
    repair_window_s: float = 600.0
    losses_most: int = 3
    loss_window_s: float = 600.0
    quarantine_s: float = 300.0
    quarantine_s_most: float = 21_600.0
    quarantine_memory_s: float = 86_400.0
    attempts_most: int = 6
    retry_s: float = 1.0
    retry_s_most: float = 60.0
    # Of the budget: where lowered limits aim, up to where they are released, and under what release begins.
    budget_aim: float = 0.98
    budget_raise: float = 0.97
    budget_calm: float = 0.95
    budget_window_s: float = 1.0
    budget_hold_s: float = 3.0
    # Longest sensor window (1 s) and period (0.1 s), and some: what was set is in the readings by then.
    budget_settle_s: float = 1.5

    def speed_up(self, times: float) -> "GuardLimits":
        """The same patience in a life that is so many times faster: of repairs, losses and quarantine."""
        return replace(
            self,
            repair_window_s=self.repair_window_s / times,
            loss_window_s=self.loss_window_s / times,
            quarantine_s=self.quarantine_s / times,
            quarantine_s_most=self.quarantine_s_most / times,
            quarantine_memory_s=self.quarantine_memory_s / times,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPolicy:
    """What the operator of this node wants whatever the controller says.

    With `enforce` the local budget is kept even where the pool observes, since
    it was switched on here by hand; without it the node tells and does no more.
    """

    power_budget_w: float | None = None
    enforce: bool = False


class RefusalRule(StrEnum):
    """Why an item of a plan, or a layout asked for by hand, was refused, failed or shaped."""

    # Of plans as a whole.
    EPOCH = "epoch"
    NODE_NAME = "node-name"
    OBSERVE_ONLY = "observe-only"
    LEASE = "lease"
    # Of assignments and settings.
    UNKNOWN_DEVICE = "unknown-device"
    NO_PERMISSION = "no-permission"
    NOT_SUPPORTED = "not-supported"
    CONSTRAINTS = "constraints"
    DUPLICATE = "duplicate"
    SHARES = "shares"
    SLEW = "slew"
    HYSTERESIS = "hysteresis"
    GANG = "gang"
    NODE_BUDGET = "node-budget"
    QUARANTINE = "quarantine"
    # Of MIG layouts.
    FOREIGN = "foreign"
    GEOMETRY = "geometry"
    MODE = "mode"
    PENDING = "pending"
    LOST = "lost"
    IN_USE = "in-use"
    CAPACITY = "capacity"
    SERIAL = "serial"
    # Of both.
    BUSY = "busy"
    DRIFT = "drift"
    JOURNAL = "journal"
    DEVICE = "device"


# A layout that waits has an alert of its own (EelgridMigPlanStuck).
LAYOUT_ONLY_RULES = frozenset(
    (
        RefusalRule.FOREIGN,
        RefusalRule.GEOMETRY,
        RefusalRule.MODE,
        RefusalRule.PENDING,
        RefusalRule.LOST,
        RefusalRule.IN_USE,
        RefusalRule.CAPACITY,
        RefusalRule.SERIAL,
    )
)
# As it is meant, or over with the next cycles.
TRANSIENT_RULES = frozenset((RefusalRule.OBSERVE_ONLY, RefusalRule.HYSTERESIS, RefusalRule.SLEW))
