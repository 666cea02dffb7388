"""Settings of the objective controller, the events that it handles, the instructions that it returns, and its status.

Every event carries `at_s`, seconds of a clock that does not go back. Old, unknown or repeated events
change nothing and are counted. A status value that is not known is None.

A new power limit is called, on its way from decision to confirmation:

    SetPowerLimit     of one holding, from the limit rollout
    LimitChange       of all holdings of a job, from the control cycle to the core
    WorkloadLimited   the core's event in the journal, from which the plans of nodes are made
    PendingLimit      until the node's agent has applied the plan (ApplyResult) or its limits are read
    LimitConfirmed or LimitFailed, back to the limit rollout

Limits that are read back count as those that were set where they differ by less than
`power_model.SAME_LIMIT_W`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.power.bandit import BanditSettings, MissedWindowReason
from eelgrid_controller.objectives.power.budget_allocation import AllocationTask, BudgetAllocation
from eelgrid_controller.objectives.power.budgets import BudgetTree, Holding
from eelgrid_controller.objectives.power.estimates import LimitHistory, LimitPrior, MeasurementWindow
from eelgrid_controller.objectives.power.limit_allocation import AllocationGoal
from eelgrid_controller.objectives.power.power_model import PowerCurve, TrainingPromise
from eelgrid_controller.objectives.power.tariffs import EnergyTariff
from eelgrid_controller.objectives.services.autoscaler import AutoscalerTarget, ScalerPhase
from eelgrid_controller.objectives.services.service_metrics import MetricsWindow
from eelgrid_protos.messages import PlanApplied


class InvalidSetting(ControllerError):
    """A setting with an impossible value; `field` names it."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Thresholds of the objective controller, for services and jobs."""

    manner: BanditSettings = field(default_factory=BanditSettings)  # of every search for a limit
    # What an allocation maximizes where the limits that jobs should have do not fit.
    want: AllocationGoal = AllocationGoal.THROUGHPUT
    # A ScaleService whose replicas do not come is repeated: placing and starting takes as long.
    repeat_s: float = 60.0
    # Without a window a job counts one as missed: windows last 10 to 60 s, and one may fail.
    stale_after_s: float = 180.0
    # Between allocations of ALLOCATION_JOBS jobs, which take a second or two; in proportion less with fewer.
    divide_every_s: float = 30.0
    # An allocation of more jobs is not made in the call that finds it due, but asked for: it takes a millisecond a job.
    divided_inside: int = 100_000
    divided_within_s: float = 600.0  # an answer that does not come by then is asked for again
    retry_after_s: float = 300.0  # a holding that refused a limit is tried again: a driver reload takes minutes
    reprice: float = 0.02  # change of a price's weight from which jobs are decided again: less moves no limit
    horizon_s: float = 86_400.0  # of prices: a day, over which they repeat
    services_most: int = 10_000
    jobs_most: int = 100_000

    def __post_init__(self) -> None:
        for name in ("repeat_s", "stale_after_s", "retry_after_s", "divided_within_s", "horizon_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InvalidSetting(name, f"{getattr(self, name)}", "give seconds above 0")
        if not 0.0 <= self.divide_every_s < math.inf or not 0.0 <= self.reprice < math.inf:
            raise InvalidSetting("divide_every_s", "a negative number", "give 0 or more")
        if self.services_most < 1 or self.jobs_most < 1 or self.divided_inside < 0:
            raise InvalidSetting("jobs_most", "less than 1", "give how many there may be at most")


class ServiceStarted(NamedTuple):
    """A service that promised something, with the replicas that it has been given; again to change what it promised."""

    at_s: float
    name: str
    promised: AutoscalerTarget
    replicas: int


class ServiceWindow(NamedTuple):
    """What the service did in a window that ends at `at_s`."""

    at_s: float
    name: str
    window: MetricsWindow


class ServiceReady(NamedTuple):
    """The number of replicas that serve now."""

    at_s: float
    name: str
    replicas: int


class JobPast(NamedTuple):
    """What a job had done before it was managed; all 0 for one that has just begun."""

    work: float = 0.0  # units
    time_s: float = 0.0
    earned_s: float = 0.0  # of its promised slowdown; negative if owed


@dataclass(frozen=True, slots=True)
class JobStarted:
    """A training job whose power limit is to be found; also one that has long been running.

    `held_w` is what was read back of each GPU, in the order of the holdings; empty for the largest of `limits_w`.
    `planned_w` is what its nodes' plans set, or the default that agents restore: it may come into force at any moment.
    """

    at_s: float
    name: str
    promise: TrainingPromise
    limits_w: tuple[float, ...]  # that may be set on each GPU
    holdings: tuple[Holding, ...]  # named job/node
    relatives: tuple[PowerCurve, ...] = ()
    weight: float = 1.0
    held_w: tuple[float, ...] = ()
    planned_w: float | None = None
    past: JobPast = field(default_factory=JobPast)
    shown: LimitHistory = field(
        default_factory=LimitHistory
    )  # what it did itself at each limit, before steering knew of it


class JobMeasured(NamedTuple):
    """A window of a job that ends at `at_s`; it began after its limit had taken effect."""

    at_s: float
    name: str
    window: MeasurementWindow


class JobPredicted(NamedTuple):
    """A model's prediction for a job's limits, the largest first; None withdraws the last prediction."""

    at_s: float
    name: str
    prior: LimitPrior | None


class JobMissed(NamedTuple):
    """A window without a measurement."""

    at_s: float
    name: str
    reason: MissedWindowReason


class WorkloadEnded(NamedTuple):
    """A service or a job has ended."""

    at_s: float
    name: str


class BudgetsSet(NamedTuple):
    """The budgets that hold from now on; an empty tree for none."""

    at_s: float
    budgets: BudgetTree


class UncountedSet(NamedTuple):
    """What work below each budget may draw that is in no claim yet and not in what others draw, in watts by budget."""

    at_s: float
    watts: Mapping[str, float]


class PricesSet(NamedTuple):
    """The prices from now on; None for the same price at all times."""

    at_s: float
    tariff: EnergyTariff | None


class LimitConfirmed(NamedTuple):
    """What was read back of all GPUs of a holding after instruction `number`."""

    at_s: float
    number: int
    limit_w: float


class LimitFailed(NamedTuple):
    """Instruction `number` came to nothing; what the GPUs have now, None where it could not be read."""

    at_s: float
    number: int
    limit_w: float | None


class NodeUnreachable(NamedTuple):
    """Nothing is known of the node from now on; its GPUs keep their limits until its lease expires."""

    at_s: float
    node: str


class NodeLeaseExpired(NamedTuple):
    """An unreachable node's lease has expired: its agent has put back the limits that it found."""

    at_s: float
    node: str


class NodeReachable(NamedTuple):
    """The node is there again; limits of each GPU by name of the holding, as read back."""

    at_s: float
    node: str
    limits_w: Mapping[str, float]


LimitEvent = LimitConfirmed | LimitFailed | NodeUnreachable | NodeLeaseExpired | NodeReachable


class AllocationSolved(NamedTuple):
    """The answer to the `SolveAllocation` of this number; None where none could be found."""

    at_s: float
    number: int
    shared: BudgetAllocation | None


class ControlTick(NamedTuple):
    """Time passed; sent every few seconds."""

    at_s: float


ControlEvent = (
    ServiceStarted
    | ServiceWindow
    | ServiceReady
    | JobStarted
    | JobPredicted
    | JobMeasured
    | JobMissed
    | WorkloadEnded
    | BudgetsSet
    | UncountedSet
    | PricesSet
    | LimitEvent
    | AllocationSolved
    | ControlTick
)


class ScaleService(NamedTuple):
    """The service should have so many replicas."""

    name: str
    replicas: int
    reason: str


class SetPowerLimit(NamedTuple):
    """Set this limit on all GPUs of a holding, read it back, and answer with the number.

    The limit rollout knows neither job nor reason; the power cap controller adds them.
    """

    holding: str
    node: str
    limit_w: float
    number: int
    job: str = ""
    reason: str = ""


class LimitChange(NamedTuple):
    """One limit on all GPUs of a job: what the journal records as `WorkloadLimited`."""

    name: str
    limit_w: float
    reason: str
    numbers: tuple[tuple[int, str, tuple[str, ...]], ...]  # to be answered, each with its node and GPUs


class PendingLimit(NamedTuple):
    """One instruction that the journal has and that its node has not answered yet."""

    number: int
    node: str
    uuids: tuple[str, ...]
    limit_w: float
    epoch: int  # of the node's plan that has it
    at_s: float


class NodeLimitReport(NamedTuple):
    """The newest report of a node's agent: what it applied of its plan, and each GPU's limit."""

    applied: PlanApplied | None
    limits_w: Mapping[str, float]  # as read back, by UUID
    age_s: float | None  # of that reading


class SolveAllocation(NamedTuple):
    """Compute `solve_allocation(problem)` in any thread, and answer with the number; a later one makes it void."""

    number: int
    problem: AllocationTask


ControlInstruction = ScaleService | SetPowerLimit | SolveAllocation


class LimitPhase(Enum):
    """What a job's limit is at."""

    SEARCHING = "searching"
    SETTLED = "settled"
    BLIND = "blind"  # measurements stay away: nothing is held back
    STUCK = "stuck"  # a node refuses the limit that is wanted
    LOST = "lost"  # a node of it is away


@dataclass(frozen=True, slots=True)
class ServiceControlStatus:
    """A service: what it did last, what the model says, and what should be."""

    name: str
    at_s: float | None  # end of the last window
    live_s: float | None  # the promised quantile as served
    model_s: float | None  # by the profile alone
    factor: float  # how much slower than its profile it is taken to be
    factor_error: float
    is_profile_wrong: bool  # the factor is at its bound: measure the service anew
    phase: ScalerPhase
    serving: int
    target: int
    reason: str
    reserve: float = 0.0  # share of the forecast rate that is planned for on top, as the promise was broken


@dataclass(frozen=True, slots=True)
class JobControlStatus:
    """A job: its limit, where the search is, and what that costs and saves."""

    name: str
    phase: LimitPhase
    limit_w: float | None  # of each GPU, as read back; None while they differ
    target_w: float  # what is wanted of each GPU
    ceiling_w: float | None  # what budgets allow each GPU; None for no bound
    slowdown: float | None  # so far: time over that at the largest limit measured, less one
    earned_s: float | None  # of the promise, negative if owed; None where no slowdown was promised or nothing is known
    saving: float | None  # energy of the same work at this limit, as a share of the largest measured one's
    reason: str
    back_w: float = 0.0  # of each GPU beyond its target, that the promise may yet ask back


@dataclass(frozen=True, slots=True)
class BudgetControlStatus:
    """A budget: watts that may be drawn, that are claimed, and that are missing."""

    name: str
    room_w: float
    claim_w: float
    shortfall_w: float  # of what promises and lost nodes need; 0 if all fits
    reason: str  # of the shortfall; empty without one
    other_w: float = 0.0  # of the budget, for what is not steered: not in the room


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """All of it at one moment; in order of names."""

    at_s: float
    services: tuple[ServiceControlStatus, ...]
    jobs: tuple[JobControlStatus, ...]
    budgets: tuple[BudgetControlStatus, ...]
    price_per_j: float | None  # with carbon and PUE; None without prices
    price_weight: float  # relative to the mean of the horizon
    ignored: Mapping[str, int]  # events that changed nothing, by reason


class PreviewedJob(NamedTuple):
    """A job under budgets that are only imagined."""

    name: str
    limit_w: float  # of each GPU
    slowdown: float | None  # at that limit, against the largest measured one; None while its curve is unknown
    saving: float | None  # energy of the same work


class BudgetPreview(NamedTuple):
    """All jobs under other budgets; shortfalls in watts with their reasons, by budget."""

    jobs: tuple[PreviewedJob, ...]
    shortfalls: Mapping[str, tuple[float, str]]
