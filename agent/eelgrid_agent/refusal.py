"""Every name that `ApplyResult.rule` and the label `rule` of the agent's metrics can carry.

Owns the spelling (a hyphen between words) and which names belong to MIG layouts or pass by themselves.
Must not know who refuses, nor why. Alerts and dashboards may name no other (tests/unit/label_values_test.py).
"""

from enum import StrEnum

__all__ = ["LAYOUTS_ONLY", "PASSING", "Rule"]


class Rule(StrEnum):
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
LAYOUTS_ONLY = frozenset(
    (
        Rule.FOREIGN,
        Rule.GEOMETRY,
        Rule.MODE,
        Rule.PENDING,
        Rule.LOST,
        Rule.IN_USE,
        Rule.CAPACITY,
        Rule.SERIAL,
    )
)
# As it is meant, or over with the next cycles.
PASSING = frozenset((Rule.OBSERVE_ONLY, Rule.HYSTERESIS, Rule.SLEW))
