"""One job that is steered: its exploration, its curve once known, and the limit that it should have.

Owns what a window means for a job and which limit follows, prices with it. Must not know
other jobs, how watts are shared or a command's way.

Theory. The exploration says the next limit. Once it has settled the curve is known, and a
tariff may say another: a larger limit earns, as the ledger counts it, a smaller one is run
only while the ledger affords it, whenever the job may end. To begin with a smaller one it
has to afford `_RUN` windows, so that limits do not change at every window.
"""

from dataclasses import dataclass, replace

from eelgrid_controller.power.changes import Setting
from eelgrid_controller.power.curves import AtLimit, Curve
from eelgrid_controller.power.exploration import (
    Ceiling,
    Decision,
    Exploration,
    Foreseen,
    Missed,
    Unusable,
    Window,
    affords,
    begin,
    known,
    step,
)  # fmt: skip
from eelgrid_controller.power.picking import Manner, Why
from eelgrid_controller.power.priors import Prior
from eelgrid_controller.power.promise import BestEffort, Deadline, MaxSlowdown, Promise
from eelgrid_controller.power.tariff import Schedule
from eelgrid_controller.steering.events import JobBegan, JobMeasured
from eelgrid_controller.steering.pricing import Prices, weighed

__all__ = ["Aim", "Job", "begun", "same_w"]

_SAME_W = 0.5
_HAIR_S = 1.0  # by which clocks of a node and of the controller may differ
_RUN = 8  # windows
_OVER = 1.03  # of its limit: more is an overshoot of the board, less the scatter of windows
_OVER_WINDOWS = 3


def same_w(one_w: float, other_w: float) -> bool:
    """Whether two limits are one."""
    return abs(one_w - other_w) <= _SAME_W


@dataclass(frozen=True, slots=True)
class Aim:
    """The limit that a job should have, and why."""

    limit_w: float
    reason: str


@dataclass(slots=True)
class Job:
    """All that is remembered of a job."""

    began: JobBegan
    search: Exploration
    decision: Decision
    heard_s: float  # when it was last measured, or that was last counted as missed
    since_s: float  # when its limit last changed
    target_w: float
    reason: str = ""
    window_s: float | None = None  # end of the last window
    ceiling_w: float | None = None
    curve: Curve | None = None  # of this phase, once it was settled
    curve_of: tuple[int, ...] = ()  # what the curve was made of, roughly
    plan: Schedule | None = None
    plan_until_s: float = 0.0
    priced: float = 1.0  # weight of the price that the promise was weighed with
    pinned_w: float | None = None  # what a holding that refuses another limit has
    pinned_until_s: float = 0.0

    @property
    def gpus(self) -> int:
        """GPUs of the whole gang."""
        return sum(holding.gpus for holding in self.began.holdings)

    @property
    def signature(self) -> tuple[object, ...]:
        """What matters to others that share watts with it."""
        charge_w = round(self.charge_w(self.target_w), 1)
        return self.curve is None, self.search.phase, self.decision.why is Why.REPAY, charge_w

    def charge_w(self, limit_w: float) -> float:
        """Watts that each GPU is charged with at a limit: the limit, or what was measured clearly above it."""
        arm = next((arm for arm in self.search.arms if same_w(arm.limit_w, limit_w)), None)
        if arm is None or arm.windows < _OVER_WINDOWS:
            return limit_w
        drawn_w = arm.power_w / self.gpus
        return drawn_w if drawn_w > _OVER * limit_w else limit_w

    def settings(self, limit_w: float) -> dict[str, Setting]:
        """The same limit on every holding."""
        charge_w = self.charge_w(limit_w)
        return {one.name: Setting(limit_w, one.gpus * charge_w) for one in self.began.holdings}

    def misread(self, event: JobMeasured) -> str | None:
        """Why a window cannot be used; None if it can."""
        if self.window_s is not None and event.at_s <= self.window_s:
            return "a window that is old or came twice"
        if event.at_s - event.window.time_s < self.since_s - _HAIR_S:
            return "a window across a change of its limit"
        return None

    def measured(self, event: JobMeasured) -> None:
        """One more window."""
        self.window_s = self.heard_s = event.at_s
        self._step(event.window)

    def foreseen(self, prior: Prior | None) -> None:
        """What a model says of its limits."""
        self._step(Foreseen(prior))

    def missed(self, at_s: float, reason: Unusable) -> None:
        """A window without a measurement."""
        self.heard_s = at_s
        self._step(Missed(reason))

    def under(self, ceiling_w: float | None) -> None:
        """What budgets allow from now on."""
        if ceiling_w != self.ceiling_w:
            self.ceiling_w, self.plan = ceiling_w, None
            self._step(Ceiling(ceiling_w))

    def priced_at(self, weight: float) -> None:
        """Energy weighs so much more than in the mean from now on."""
        self.priced = weight
        self.search = replace(self.search, promise=weighed(self.began.promise, weight))
        self._step(Ceiling(self.ceiling_w))

    def promised(self, event: JobBegan) -> None:
        """The job promises something else; what was measured stays."""
        self.began, self.plan = event, None
        self.priced_at(self.priced)

    def aim(self, prices: Prices, at_s: float, *, free: bool = False) -> Aim:
        """The limit of now; `free` for what it would be without budgets."""
        decision = step(self.search, Ceiling(None))[1] if free and self.ceiling_w is not None else self.decision
        aim = Aim(decision.limit_w, decision.why.value)
        dear = self._turned(prices, at_s) if decision.settled else None
        if dear is None or same_w(dear.limit_w, aim.limit_w):
            return aim
        if dear.limit_w > aim.limit_w:
            return Aim(dear.limit_w, "energy is cheap now: time is earned for when it is dear")
        ahead = 1 if self.target_w <= dear.limit_w + _SAME_W else _RUN
        if affords(self.search, dear.limit_w, ahead):
            return Aim(dear.limit_w, "energy is dear now: time that was earned is spent")
        return aim

    def slowdown(self) -> float | None:
        """Time so far over that at the largest limit measured, less one; None before anything is known."""
        base_s, ledger, promise = self._base_s(), self.search.ledger, self.began.promise
        if base_s is None or ledger.all_work <= 0.0:
            return None
        if isinstance(promise, MaxSlowdown):  # what an earlier phase earned or owes is in the ledger
            return promise.share - (self.earned_s() or 0.0) / (base_s * ledger.all_work)
        return ledger.all_time_s / (base_s * ledger.all_work) - 1.0

    def earned_s(self) -> float | None:
        """Seconds that the promise leaves, negative if owed; None where none of time was made, or nothing is known."""
        promise, base_s, ledger = self.began.promise, self._base_s(), self.search.ledger
        if isinstance(promise, MaxSlowdown):
            if base_s is None:
                return ledger.carried_s or None
            return ledger.carried_s + (1.0 + promise.share) * base_s * ledger.work - ledger.time_s
        if isinstance(promise, Deadline) and base_s is not None:
            work, time_s = self.left()
            return time_s - base_s * work
        return None

    def saving(self) -> float | None:
        """Energy of the same work that the limit saves against the largest measured."""
        found, reference = known(self.search), self.search.reference
        base = None if reference is None else found[reference]
        now = next((one for one in found if one is not None and same_w(one.limit_w, self.target_w)), None)
        return None if base is None or now is None else 1.0 - now.energy_j / base.energy_j

    def left(self) -> tuple[float, float]:
        """Work and seconds until the deadline; 0 without one."""
        promise, ledger = self.began.promise, self.search.ledger
        if not isinstance(promise, Deadline):
            return 0.0, 0.0
        return max(0.0, promise.work - ledger.all_work), max(0.0, promise.time_s - ledger.all_time_s)

    def rest(self) -> Promise:
        """The promise for what is left of the job."""
        promise = self.search.promise
        if isinstance(promise, Deadline):
            work, time_s = self.left()
            return Deadline(work, time_s) if min(work, time_s) > 0.0 else BestEffort(0.0)
        return promise

    def _step(self, event: Window | Missed | Ceiling | Foreseen) -> None:
        phase = self.search.phase
        self.search, self.decision = step(self.search, event)
        if self.search.phase != phase:
            self.curve = self.plan = None
        if self.curve is not None or self.decision.settled:
            self._learned()

    def _learned(self) -> None:
        """The curve from what was measured; made anew when the windows of a limit have doubled."""
        made_of = tuple(arm.windows.bit_length() for arm in self.search.arms)
        if self.curve is not None and made_of == self.curve_of:
            return
        points = tuple(
            AtLimit(arm.limit_w, arm.time_per_work, arm.power_w) for arm in reversed(self.search.arms) if arm.windows
        )
        if points:
            self.curve, self.curve_of, self.plan = Curve(self.began.name, "", self.gpus, points), made_of, None

    def _base_s(self) -> float | None:
        reference = self.search.reference
        return None if reference is None else self.search.arms[reference].time_per_work

    def _turned(self, prices: Prices, at_s: float) -> AtLimit | None:
        """What the tariff says of now; None where it says nothing."""
        base_s = self._base_s()
        if prices.tariff is None or self.curve is None or base_s is None or isinstance(self.began.promise, BestEffort):
            return None
        if self.plan is None or at_s >= self.plan_until_s:
            most_w = self.search.limits_w[0] if self.ceiling_w is None else self.ceiling_w
            points = tuple(at for at in self.curve.points if at.limit_w <= most_w + _SAME_W)
            self.plan = prices.plan(
                self.began.promise, points, at_s, base_s=base_s, earned_s=self.earned_s() or 0.0, left=self.left()
            )
            first = None if self.plan is None else self.plan.turns[0].slice
            self.plan_until_s = at_s + prices.horizon_s if first is None else first.begin_s + first.seconds
        return None if self.plan is None else self.plan.at(at_s)


def begun(event: JobBegan, manner: Manner, prices: Prices) -> Job:
    """A job from its first event. Raises PowerRefused for limits or holdings that are none."""
    weight = prices.weight(event.at_s)
    search, decision = begin(
        event.limits_w, weighed(event.promise, weight), gpus=max(1, sum(one.gpus for one in event.holdings)),
        manner=manner, relatives=event.relatives,
    )  # fmt: skip
    past = event.past
    ledger = search.ledger._replace(carried_s=past.earned_s, all_work=past.work, all_time_s=past.time_s)
    job = Job(
        event, replace(search, ledger=ledger), decision, event.at_s, event.at_s, decision.limit_w, priced=weight
    )  # fmt: skip
    job.reason = decision.why.value
    return job
