"""The overview of the cluster (overview.proto): what is going on at one moment, and what needs attention."""

from typing import Annotated

from eelgrid_protos.messages.workload import BudgetStatus
from eelgrid_protos.quantities import (
    ClusterWatts,
    Joules,
    Label,
    Many,
    Milli,
    Nanoseconds,
    OpenEnum,
    OptionalIdentifier,
    Range,
    Seconds,
    Sentence,
    Text,
    Uint32,
    Uint64,
)
from eelgrid_protos.values import dataclass

# Of each list: what a person reads at once. Totals count the rest.
ATTENTION_MOST = 100
CONSUMERS_MOST = 100
# More constraints than there are, with their combinations.
WAITING_REASONS_MOST = 64
_COMMAND_LETTERS_MOST = 600
_Money = Annotated[float, Range(-1e15, 1e15)]
_Grams = Annotated[float, Range(-1e15, 1e15, "g")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOverview:
    """Power of the cluster's GPUs against its budgets; None where nothing is read, or there is no cluster budget."""

    measured_w: ClusterWatts | None = None
    measured_gpus: Uint32 = 0
    gpus: Uint32 = 0
    nodes_reporting: Uint32 = 0
    nodes: Uint32 = 0
    sample_age_s: Seconds | None = None
    budget_w: ClusterWatts | None = None
    claimed_w: ClusterWatts | None = None
    shortfall_w: ClusterWatts | None = None
    budgets: Annotated[tuple[BudgetStatus, ...], Many(100_000)] = ()
    over_w: ClusterWatts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TodayEnergy:
    """Energy since midnight by the ledger; `idle_j` is `unallocated_j` and `held_idle_j`. None without prices."""

    begin_ns: Uint64
    end_ns: Uint64
    energy_j: Joules = 0.0
    idle_j: Joules = 0.0
    unallocated_j: Joules = 0.0
    held_idle_j: Joules = 0.0
    cost: _Money | None = None
    idle_cost: _Money | None = None
    currency: Annotated[str, Text(8)] = ""
    carbon_g: _Grams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOverview:
    """Counts of GPUs and nodes; shares and slices of GPUs count as fractions."""

    gpus: Uint32 = 0
    held_milli: Milli = 0
    free_milli: Milli = 0
    gpus_idle: Uint32 = 0
    gpus_lost: Uint32 = 0
    gpus_cordoned: Uint32 = 0
    nodes: Uint32 = 0
    nodes_lost: Uint32 = 0
    nodes_cordoned: Uint32 = 0
    gpus_unreachable: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingReason:
    """The pending workloads that wait for one constraint, and what would help the first of them."""

    reason: Label
    workloads: Uint32
    gpu_milli: Milli = 0
    oldest_since_ns: Nanoseconds = 0
    example_workload_id: OptionalIdentifier = ""
    example_reason: Sentence = ""
    remedy: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseOverview:
    """How many services and jobs keep their objectives; the four add up to all that have one.

    Services that follow a load have none, and count only while they are not controlled.
    """

    kept: Uint32 = 0
    at_risk: Uint32 = 0
    broken: Uint32 = 0
    unknown: Uint32 = 0


class AttentionSeverity(OpenEnum):
    """How urgent an item is; the most urgent first."""

    UNSPECIFIED = 0
    CRITICAL = 1
    WARNING = 2
    INFO = 3


class AttentionKind(OpenEnum):
    """What needs attention."""

    UNSPECIFIED = 0
    LOST_NODE = 1
    LOST_GPU = 2
    CORDONED_GPU = 3
    FAILING_GPU = 4
    BROKEN_PROMISE = 5
    BUDGET_OVER = 6
    SPENDING_OVER = 7
    STUCK_LAYOUT = 8
    AHEAD_OF_JOURNAL = 9
    STALE_READINGS = 10
    LONG_WAIT = 11
    HELD_BUT_IDLE = 12
    JOURNAL = 13
    BUDGET_SHORT = 14
    SPENDING_NEAR = 15
    UNCONTROLLED_PROMISE = 16
    PLAN_NOT_APPLIED = 17
    LEDGER = 18
    CORDONED_NODE = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionItem:
    """Something that a person should look at, with the command that shows more or helps; `since_ns` 0 is unknown."""

    severity: AttentionSeverity
    kind: AttentionKind
    subject: Annotated[str, Text(600)]
    message: Sentence
    since_ns: Nanoseconds = 0
    command: Annotated[str, Text(_COMMAND_LETTERS_MOST)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """What the workloads of one user in one namespace hold and use; None where nothing is measured or priced."""

    namespace: Label = ""
    user: Label = ""
    workloads: Uint32 = 0
    held_milli: Milli = 0
    power_w: ClusterWatts | None = None
    energy_j: Joules = 0.0
    cost: _Money | None = None
    gpus_idle: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The cluster at one moment; `today` is None while the ledger has not answered."""

    time_ns: Nanoseconds
    revision: Uint64 = 0
    power: PowerOverview = PowerOverview()
    today: TodayEnergy | None = None
    capacity: CapacityOverview = CapacityOverview()
    waiting: Annotated[tuple[WaitingReason, ...], Many(WAITING_REASONS_MOST)] = ()
    promises: PromiseOverview = PromiseOverview()
    attention: Annotated[tuple[AttentionItem, ...], Many(ATTENTION_MOST)] = ()
    attention_total: Uint32 = 0
    consumers: Annotated[tuple[Consumer, ...], Many(CONSUMERS_MOST)] = ()
    consumers_total: Uint32 = 0
    consumers_left_out_milli: Milli = 0
    workloads_waiting: Uint32 = 0
    workloads_placed: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetOverviewRequest:
    """Asks for the overview."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetOverviewResponse:
    """The overview, at most a second old."""

    overview: Overview
