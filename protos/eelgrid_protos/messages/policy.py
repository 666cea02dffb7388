"""Policy: objectives, modes of pools, power budgets, prices, spending limits, queues; mirrored by policy.proto."""

import itertools
from collections.abc import Iterator
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.queue import QUEUES_MOST, RESERVATIONS_MOST, BackfillMode, Queue, Reservation
from eelgrid_protos.quantities import Label, Many, Name, OpenEnum, Range, Ratio, RequiredLabel, Text, Uint32, Uint64
from eelgrid_protos.values import dataclass

SPENDING_LIMITS_MOST = 256
PRIORITY_CLASSES_MOST = 100
DEFAULT_POOL = "default"  # the pool of agents that name none

Priority = Annotated[int, Range(-1_000_000, 1_000_000)]
Weight = Annotated[float, Range(0.0, 1e6)]
LeaseSeconds = Annotated[float, Range(5.0, 86_400.0, "s")]
RuntimeSeconds = Annotated[float, Range(1.0, 3e8, "s")]
IntervalSeconds = Annotated[float, Range(0.1, 3_600.0, "s")]


class EnforcementMode(OpenEnum):
    """What the agents of a pool may change."""

    UNSPECIFIED = 0
    OBSERVE = 1
    ENFORCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights that convert the terms of the cost into watts; see docs/explanation/placement.md."""

    power: Weight
    fragmentation_w: Weight
    stranding_w: Weight
    lookahead: Weight = 0.0
    scarcity_w: Weight = 0.0
    # Stranding in a full fleet where no work ends; a value below stranding_w has no effect.
    stranding_full_w: Weight = 0.0
    # About the cost of waking a CPU package (105 W); applies only to workloads with a locality preference.
    locality_w: Weight = 100.0


# Measured on the openb traces: docs/explanation/placement.md has the table.
OBJECTIVES = {
    "energy": Weights(power=1.0, fragmentation_w=0.0, stranding_w=50.0, lookahead=1.0, stranding_full_w=500.0),
    "balanced": Weights(
        power=1.0, fragmentation_w=0.0, stranding_w=100.0, lookahead=1.0, scarcity_w=500.0, stranding_full_w=2000.0
    ),
    "performance": Weights(
        power=0.1, fragmentation_w=100.0, stranding_w=200.0, scarcity_w=500.0, stranding_full_w=1000.0
    ),
}


def resolve_pool(pool: str) -> str:
    """Returns the name of a node's pool as its inventory has it; of none, the default pool's."""
    return pool or DEFAULT_POOL


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMode:
    """The enforcement mode of one pool."""

    pool: Name
    mode: EnforcementMode
    partitioned: bool = False

    def violations(self) -> Iterator[Violation]:
        """Checks that the mode is set explicitly."""
        if self.mode is EnforcementMode.UNSPECIFIED:
            yield Violation("mode", "is not set or not known here", "choose observe or enforce")


class BudgetScope(OpenEnum):
    """What a power budget bounds."""

    UNSPECIFIED = 0
    CLUSTER = 1
    RACK = 2
    NODE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerBudget:
    """Maximum total draw of the GPUs below it."""

    scope: BudgetScope
    limit_w: Annotated[float, Range(0.0, 1e10, "W")]
    name: Label = ""

    def violations(self) -> Iterator[Violation]:
        """Checks that a rack or a node is named, and the cluster is not."""
        if self.scope is BudgetScope.UNSPECIFIED:
            yield Violation("scope", "is not set or not known here", "choose cluster, rack or node")
        elif (self.scope is BudgetScope.CLUSTER) == bool(self.name):
            yield Violation("name", f"is {self.name!r} for a {self.scope.name.lower()}", "name racks and nodes alone")


MINUTES_A_WEEK = 7 * 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PricePeriod:
    """Begins at a minute of the week, 0 being Monday 00:00, and lasts until the next period."""

    begins_minute: Annotated[int, Range(0, MINUTES_A_WEEK - 1, "minutes")]
    price_per_kwh: Annotated[float, Range(0.0, 1e6)]
    carbon_kg_per_kwh: Annotated[float, Range(0.0, 100.0, "kg")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyPrices:
    """Energy prices by time; the last period of a week continues into the next week."""

    periods: Annotated[tuple[PricePeriod, ...], Many(1000)]
    currency: Annotated[str, Text(8)] = "EUR"
    pue: Annotated[float, Range(1.0, 10.0)] = 1.0
    carbon_price_per_kg: Annotated[float, Range(0.0, 1e4)] = 0.0
    utc_offset_minutes: Annotated[int, Range(-24 * 60, 24 * 60, "minutes")] = 0

    def violations(self) -> Iterator[Violation]:
        """Checks that periods rise."""
        begins = [period.begins_minute for period in self.periods]
        if not begins:
            yield Violation("periods", "are empty", "give at least one, beginning at minute 0")
        if any(low >= high for low, high in itertools.pairwise(begins)):
            yield Violation("periods", "do not rise", "put them in the order of begins_minute, each minute once")


class SpendingScope(OpenEnum):
    """Whose spending is limited."""

    UNSPECIFIED = 0
    NAMESPACE = 1
    USER = 2
    QUEUE = 3
    LABEL = 4


class SpendingQuantity(OpenEnum):
    """The quantity that is limited."""

    UNSPECIFIED = 0
    GPU_TIME = 1
    ENERGY = 2
    MONEY = 3
    CARBON = 4


class SpendingPeriod(OpenEnum):
    """The period after which counting restarts, by the local time of the prices."""

    UNSPECIFIED = 0
    DAY = 1
    WEEK = 2
    MONTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingLimit:
    """Maximum spending of a namespace, user, queue or label; `most` is in GPU-seconds, joules, money or grams."""

    scope: SpendingScope
    name: Label
    label: Label = ""
    quantity: SpendingQuantity
    most: Annotated[float, Range(0.0, 1e18)]
    period: SpendingPeriod
    # Share at which it counts as nearly spent; None means 0.8.
    warn_ratio: Ratio | None = None
    mode: EnforcementMode
    # Jobs that run are stopped as well, and wait until it is not spent any more.
    stops: bool = False

    def violations(self) -> Iterator[Violation]:
        """Checks that all fields are set, a label has its key, and the limit is positive."""
        for field, value in (("scope", self.scope), ("quantity", self.quantity), ("period", self.period)):
            if not value:
                known = ", ".join(one.name.lower() for one in type(value) if one)
                yield Violation(field, "is not set or not known here", f"choose one of {known}")
        if self.mode is EnforcementMode.UNSPECIFIED:
            yield Violation("mode", "is not set or not known here", "choose observe or enforce")
        if self.stops and self.mode is EnforcementMode.OBSERVE:
            yield Violation("stops", "is set of a limit that is only observed", "leave one of the two out")
        if not self.name:
            yield Violation("name", "is empty", "name the namespace, user or queue, or the label's value")
        if (self.scope is SpendingScope.LABEL) != bool(self.label):
            yield Violation(
                "label", f"is {self.label!r} for a {self.scope.name.lower()}", "name the key of labels alone"
            )
        if self.most <= 0.0:
            yield Violation("most", f"is {self.most:g}", "give more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityClass:
    """A name for a priority; its work may promise to preempt nobody."""

    name: Name
    priority: Priority = 0
    never_preempts: bool = False


# How much longer something takes, as a part of its time: 0.2 is a fifth.
SLOWDOWN_MOST = 100.0
Slowdown = Annotated[float, Range(0.0, SLOWDOWN_MOST)]
INTERFERENCE_MOST = 10_000
ANY_LOAD = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """By how much a load is slowed down by another one beside it on a GPU; `*` is any load that is not named."""

    load: RequiredLabel
    beside: RequiredLabel
    slowdown: Slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredInterference:
    """By how much running jobs of a load were slowed down beside another one on a GPU: median, least and largest of them."""

    load: RequiredLabel
    beside: RequiredLabel
    slowdown: Slowdown
    slowdown_least: Slowdown
    slowdown_largest: Slowdown
    jobs: Uint32


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operator's policy; the defaults change nothing on any node."""

    revision: Uint64 = 0
    objective: Label = "balanced"
    weights: Weights = OBJECTIVES["balanced"]
    pools: Annotated[tuple[PoolMode, ...], Many(1000)] = ()
    lease_s: LeaseSeconds = 60.0
    send_interval_s: IntervalSeconds = 5.0
    sample_interval_s: IntervalSeconds = 1.0
    # Name of the placement policy: ours or a published one; only ours uses the weights.
    placement: Label = "eelgrid"
    budgets: Annotated[tuple[PowerBudget, ...], Many(100_000)] = ()
    prices: EnergyPrices | None = None
    spending: Annotated[tuple[SpendingLimit, ...], Many(SPENDING_LIMITS_MOST)] = ()
    # Without any, all work waits in one order and has no quota.
    queues: Annotated[tuple[Queue, ...], Many(QUEUES_MOST)] = ()
    # A week, as Slurm's PriorityDecayHalfLife.
    queue_half_life_s: Annotated[float, Range(1.0, 3e8, "s")] = 604_800.0
    queue_age_limit_s: Annotated[float, Range(0.0, 3e8, "s")] = 86_400.0
    backfill: BackfillMode = BackfillMode.UNSPECIFIED
    # How long work is expected to run of which nothing is known; None is for ever.
    default_runtime_s: RuntimeSeconds | None = None
    reservations: Annotated[tuple[Reservation, ...], Many(RESERVATIONS_MOST)] = ()
    priority_classes: Annotated[tuple[PriorityClass, ...], Many(PRIORITY_CLASSES_MOST)] = ()
    # For so long freed capacity is held for a queue that has used less than its share; None is a 16th of the half-life.
    capacity_hold_s: Annotated[float, Range(0.0, 3e7, "s")] | None = None
    # How loads that share a GPU slow each other down, and the limit for those that state none.
    interference: Annotated[tuple[Interference, ...], Many(INTERFERENCE_MOST)] = ()
    shared_slowdown_most: Slowdown | None = None
