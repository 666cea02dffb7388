"""Controls the power limit of one job: its limit search, its curve, its promise and the price of energy."""

from dataclasses import dataclass, replace

from eelgrid_controller.objectives.power.bandit import (
    BanditSettings,
    CeilingSet,
    LimitDecision,
    LimitSearch,
    MissedWindowReason,
    PickReason,
    PriorSet,
    WindowMissed,
    find_window_arm,
    limit_estimates,
    start_search,
    step_search,
)
from eelgrid_controller.objectives.power.budget_allocation import (
    DesiredLimit,
    LimitTarget,
    choose_target,
)
from eelgrid_controller.objectives.power.budgets import LimitSetting
from eelgrid_controller.objectives.power.control_events import JobMeasured, JobStarted
from eelgrid_controller.objectives.power.estimates import LimitPrior, MeasurementWindow
from eelgrid_controller.objectives.power.power_model import (
    BestEffort,
    Deadline,
    LimitPoint,
    MaxSlowdown,
    PowerCurve,
    TrainingPromise,
    is_higher_limit,
    is_same_limit,
    weighted_promise,
)
from eelgrid_controller.objectives.power.tariffs import LimitSchedule, PriceHorizon

_HAIR_S = 1.0  # by which clocks of a node and of the controller may differ
_OVER = 1.03  # of its limit: more is an overshoot of the board, less the scatter of windows
_OVER_WINDOWS = 3


@dataclass(slots=True)
class JobController:
    """One job's search, ceiling, price and target limit."""

    began: JobStarted
    search: LimitSearch
    decision: LimitDecision
    heard_s: float  # when it was last measured, or that was last counted as missed
    since_s: float  # when its limit last changed
    target_w: float
    reason: str = ""
    window_s: float | None = None  # end of the last window
    charged_s: float | None = None  # until when the promise account is kept
    charged_w: float = 0.0  # the limit of its last window
    started_s: float = 0.0  # from its beginning to its first window
    ceiling_w: float | None = None
    curve: PowerCurve | None = None  # of this phase, once it was settled
    curve_of: tuple[int, ...] = ()  # what the curve was made of, roughly
    plan: LimitSchedule | None = None
    plan_until_s: float = 0.0
    priced: float = 1.0  # weight of the price that the promise was weighed with
    pinned_w: float | None = None  # what a holding that refuses another limit has
    pinned_until_s: float = 0.0

    @property
    def gpus(self) -> int:
        """GPUs of the whole gang."""
        return sum(holding.gpus for holding in self.began.holdings)

    @property
    def allocation_signature(self) -> tuple[object, ...]:
        """What matters to others that share watts with it."""
        charge_w = round(self.charge_w(self.target_w), 1)
        return self.curve is None, self.search.phase, self.decision.why is PickReason.REPAY, charge_w

    def charge_w(self, limit_w: float) -> float:
        """Watts that each GPU is charged with at a limit: the limit, or what was measured clearly above it."""
        arm = next((arm for arm in self.search.arms if is_same_limit(arm.limit_w, limit_w)), None)
        if arm is None or arm.windows < _OVER_WINDOWS:
            return limit_w
        drawn_w = arm.power_w / self.gpus
        return drawn_w if drawn_w > _OVER * limit_w else limit_w

    def reclaimable_w(self) -> float:
        """Watts of each GPU beyond its target that a promise may yet ask back: while it searches, or owes time."""
        if isinstance(self.began.promise, BestEffort):
            return 0.0
        if self.curve is not None and self.decision.settled and self.decision.why is not PickReason.REPAY:
            return 0.0
        return max(0.0, self.charge_w(max(self.began.limits_w)) - self.charge_w(self.target_w))

    def holding_settings(self, limit_w: float) -> dict[str, LimitSetting]:
        """The same limit on every holding."""
        charge_w = self.charge_w(limit_w)
        return {one.name: LimitSetting(limit_w, one.gpus * charge_w) for one in self.began.holdings}

    def window_problem(self, event: JobMeasured) -> str | None:
        """Why a window cannot be used; None if it can."""
        if self.window_s is not None and event.at_s <= self.window_s:
            return "a window that is old or came twice"
        if event.at_s - event.window.time_s < self.since_s - _HAIR_S:
            return "a window across a change of its limit"
        return None

    def add_window(self, event: JobMeasured) -> None:
        """One more window."""
        if self.window_s is None:
            # What a start took is on the clock of a deadline; no window tells it.
            self.started_s = max(0.0, event.at_s - event.window.time_s - self.began.at_s)
            ledger = self.search.ledger
            self.search = replace(self.search, ledger=ledger._replace(all_time_s=ledger.all_time_s + self.started_s))
        self.window_s = self.heard_s = event.at_s
        if not isinstance(find_window_arm(self.search, event.window), MissedWindowReason):
            self._charge_gap(event)
        self._step_search(event.window)

    def _charge_gap(self, event: JobMeasured) -> None:
        """The promise is kept over all time, also that between two windows: a change of the limit takes more than one.

        Until the change, work went on as it does at the limit before, and then as in the window that has come.
        """
        window = event.window
        begin_s = event.at_s - window.time_s
        if self.charged_s is not None:
            changed_s = min(max(self.since_s, self.charged_s), begin_s)
            for gap_s, limit_w in ((changed_s - self.charged_s, self.charged_w), (begin_s - changed_s, window.limit_w)):
                arm = next((arm for arm in self.search.arms if is_same_limit(arm.limit_w, limit_w)), None)
                unit_s = arm.time_per_work if arm is not None and arm.windows else window.time_s / window.work
                if gap_s > 0.0:
                    self.search = replace(self.search, ledger=self.search.ledger.with_gap(gap_s, gap_s / unit_s))
        self.charged_s, self.charged_w = event.at_s, window.limit_w

    def set_prior(self, prior: LimitPrior | None) -> None:
        """What a model says of its limits."""
        self._step_search(PriorSet(prior))

    def add_missed_window(self, at_s: float, reason: MissedWindowReason) -> None:
        """A window without a measurement."""
        self.heard_s = at_s
        self._step_search(WindowMissed(reason))

    def set_ceiling(self, ceiling_w: float | None) -> None:
        """What budgets allow from now on."""
        if ceiling_w != self.ceiling_w:
            self.ceiling_w, self.plan = ceiling_w, None
            self._step_search(CeilingSet(ceiling_w))

    def set_price_weight(self, weight: float) -> None:
        """Energy weighs so much more than in the mean from now on."""
        self.priced = weight
        self.search = replace(self.search, promise=weighted_promise(self.began.promise, weight))
        self._step_search(CeilingSet(self.ceiling_w))

    def update_promise(self, event: JobStarted) -> None:
        """The job promises something else; what was measured stays."""
        self.began, self.plan = event, None
        self.set_price_weight(self.priced)

    def target_limit(self, prices: PriceHorizon, at_s: float) -> LimitTarget:
        """The limit of now."""
        dear = self._scheduled_limit(prices, at_s) if self.decision.settled else None
        return choose_target(self.search, self.decision, dear, self.target_w)

    def desired_limit(self, prices: PriceHorizon, at_s: float) -> DesiredLimit:
        """What the limit of now would be without budgets."""
        hidden = self.ceiling_w is not None
        return DesiredLimit(
            self.search, None if hidden else self.decision, self._scheduled_limit(prices, at_s), self.target_w
        )

    def slowdown(self) -> float | None:
        """Time so far over that at the largest limit measured, less one; None before anything is known."""
        base_s, ledger, promise = self._base_s(), self.search.ledger, self.began.promise
        if base_s is None or ledger.all_work <= 0.0:
            return None
        if isinstance(promise, MaxSlowdown):  # what an earlier phase earned or owes is in the ledger
            return promise.share - (self.earned_s() or 0.0) / (base_s * ledger.all_work)
        return (ledger.all_time_s - self.started_s) / (base_s * ledger.all_work) - 1.0

    def earned_s(self) -> float | None:
        """Seconds that the promise leaves, negative if owed; None where none of time was made, or nothing is known."""
        promise, base_s, ledger = self.began.promise, self._base_s(), self.search.ledger
        if isinstance(promise, MaxSlowdown):
            if base_s is None:
                return ledger.carried_s or None
            return ledger.carried_s + (1.0 + promise.share) * base_s * ledger.work - ledger.time_s
        if isinstance(promise, Deadline) and base_s is not None:
            work, time_s = self.remaining()
            return time_s - base_s * work
        return None

    def saving(self) -> float | None:
        """Energy of the same work that the limit saves against the largest measured."""
        found, reference = limit_estimates(self.search), self.search.reference
        base = None if reference is None else found[reference]
        now = next((one for one in found if one is not None and is_same_limit(one.limit_w, self.target_w)), None)
        return None if base is None or now is None else 1.0 - now.energy_j / base.energy_j

    def remaining(self) -> tuple[float, float]:
        """Work and seconds until the deadline; 0 without one."""
        promise, ledger = self.began.promise, self.search.ledger
        if not isinstance(promise, Deadline):
            return 0.0, 0.0
        return max(0.0, promise.work - ledger.all_work), max(0.0, promise.time_s - ledger.all_time_s)

    def remaining_promise(self) -> TrainingPromise:
        """The promise for what is left of the job."""
        promise = self.search.promise
        if isinstance(promise, Deadline):
            work, time_s = self.remaining()
            return Deadline(work, time_s) if min(work, time_s) > 0.0 else BestEffort(0.0)
        return promise

    def _step_search(self, event: MeasurementWindow | WindowMissed | CeilingSet | PriorSet) -> None:
        phase = self.search.phase
        self.search, self.decision = step_search(self.search, event)
        if self.search.phase != phase:
            self.curve = self.plan = None
        if self.curve is not None or self.decision.settled:
            self._update_curve()

    def _update_curve(self) -> None:
        """Fits the curve to what was measured, again when the windows of a limit have doubled."""
        made_of = tuple(arm.windows.bit_length() for arm in self.search.arms)
        if self.curve is not None and made_of == self.curve_of:
            return
        points = tuple(
            LimitPoint(arm.limit_w, arm.time_per_work, arm.power_w) for arm in reversed(self.search.arms) if arm.windows
        )
        if points:
            self.curve, self.curve_of, self.plan = PowerCurve(self.began.name, "", self.gpus, points), made_of, None

    def _base_s(self) -> float | None:
        reference = self.search.reference
        return None if reference is None else self.search.arms[reference].time_per_work

    def _scheduled_limit(self, prices: PriceHorizon, at_s: float) -> LimitPoint | None:
        """What the tariff says of now; None where it says nothing."""
        base_s = self._base_s()
        if prices.tariff is None or self.curve is None or base_s is None or isinstance(self.began.promise, BestEffort):
            return None
        if self.plan is None or at_s >= self.plan_until_s:
            most_w = self.search.limits_w[0] if self.ceiling_w is None else self.ceiling_w
            points = tuple(at for at in self.curve.points if not is_higher_limit(at.limit_w, most_w))
            self.plan = prices.schedule_limits(
                self.began.promise, points, at_s, base_s=base_s, earned_s=self.earned_s() or 0.0, left=self.remaining()
            )
            first = None if self.plan is None else self.plan.turns[0].slice
            self.plan_until_s = at_s + prices.horizon_s if first is None else first.begin_s + first.seconds
        return None if self.plan is None else self.plan.point_at(at_s)


def start_job(event: JobStarted, manner: BanditSettings, prices: PriceHorizon) -> JobController:
    """A job from its first event. Raises PowerPlanError for invalid limits or holdings."""
    weight = prices.price_weight(event.at_s)
    search, decision = start_search(
        event.limits_w,
        weighted_promise(event.promise, weight),
        gpus=max(1, sum(one.gpus for one in event.holdings)),
        manner=manner,
        relatives=event.relatives,
        shown=event.shown,
    )
    past, ledger = event.past, search.ledger
    carried_s = past.earned_s
    if isinstance(event.promise, MaxSlowdown) and search.reference is not None and carried_s:
        # What was shown is in the ledger's sums, and what it earned or owes is in the past, too: it counts once.
        # Without a past, after a restart, these windows are all that is known of the promise.
        base_s = search.arms[search.reference].time_per_work
        carried_s -= (1.0 + event.promise.share) * base_s * ledger.work - ledger.time_s
    ledger = ledger._replace(carried_s=carried_s, all_work=past.work, all_time_s=past.time_s)
    job = JobController(
        event, replace(search, ledger=ledger), decision, event.at_s, event.at_s, decision.limit_w, priced=weight
    )
    job.reason = decision.why.value
    return job
