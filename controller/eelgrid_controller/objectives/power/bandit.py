"""Searches the power limit of a job whose power curve is unknown: a constrained bandit.

Each window updates the estimates; the next limit is the one with the lowest confidence bound of cost among
those that keep the promise with errors counted against it. Drift restarts the search.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from eelgrid_controller.objectives.power.estimates import (
    LimitArm,
    LimitEstimate,
    LimitHistory,
    LimitPrior,
    MeasurementWindow,
    WindowDrift,
    WindowScatter,
    estimate_limits,
    prior_from_estimates,
    prior_from_relatives,
)
from eelgrid_controller.objectives.power.power_model import (
    LIMITS_MOST,
    BestEffort,
    Deadline,
    InvalidCurve,
    MaxSlowdown,
    PowerCurve,
    TrainingPromise,
    is_higher_limit,
    is_same_limit,
)

_HOLDS_BACK = 0.9  # of a limit drawn: it binds
_ROUNDING = 1e-9
_GROWS = 2.0  # power of the ratio of two limits with which time may grow; Zeus's steepest steps are near it
_STEP_UP = 1.05  # and what an untried limit may cost beyond that


@dataclass(frozen=True, slots=True)
class BanditSettings:
    """How exploration goes about; one setting for all jobs."""

    first_windows: int = 3  # at the reference, before anything else
    confidence: float = 2.0  # z_0: errors that a promise is kept with
    optimism: float = 0.0  # o_0: errors that a limit's energy may turn out lower
    compare: float = 1.0  # windows of the reference, and of a limit likely too slow, per square root of all windows
    worth: float = 0.0025  # a smaller saving is not worth another change of limit
    time_scatter: float = 0.02  # of one window, believed at first
    energy_scatter: float = 0.0225
    scatter_windows: float = 6.0  # that this belief is worth
    drift_allowed: float = 1.0  # scatters a window
    drift_alarm: float = 10.0  # scatters in sum
    missing_most: int = 5  # windows in a row without a measurement
    alternate: bool = False  # run two limits in turn where one alone leaves some of the promise unused


class PickReason(Enum):
    """Why a limit was picked."""

    REFERENCE = "the largest limit, which slowdowns are relative to, is not measured yet"
    UNTRIED = "the next lower limit was never measured"
    HOPE = "it may be the cheapest that keeps the promise"
    COMPARE = "the reference has to be measured better to tell whether the cheapest limit keeps the promise"
    REPAY = "lost time has to be made up first"
    KEEP = "nothing else could save enough to be worth trying"
    ALTERNATE = "two limits in turn use the promise up"
    BLIND = "measurements are missing: nothing is held back until they return"


class PromiseAccount(NamedTuple):
    """What the job has used of its promise."""

    work: float = 0.0  # of this phase
    time_s: float = 0.0  # of this phase, outliers pulled in
    carried_s: float = 0.0  # earned, or owed if negative, before this phase
    all_work: float = 0.0  # since the job began
    all_time_s: float = 0.0  # since the job began, on the clock

    def with_gap(self, time_s: float, work: float) -> "PromiseAccount":
        """The account after time in which nothing was measured, and the work that was likely done in it."""
        return PromiseAccount(
            self.work + work, self.time_s + time_s, self.carried_s, self.all_work + work, self.all_time_s + time_s
        )


class LimitPick(NamedTuple):
    """A limit by its place, why, and whether the search is over."""

    place: int
    why: PickReason
    settled: bool


class _BanditProblem(NamedTuple):
    """All that one decision looks at."""

    promise: TrainingPromise
    manner: BanditSettings
    ledger: PromiseAccount
    found: tuple[LimitEstimate | None, ...]
    limits_w: Sequence[float]
    reference: int
    first: int  # the largest limit that is allowed now
    windows: int  # of this phase
    gpus: int
    z: float
    o: float

    @property
    def base(self) -> LimitEstimate:
        base = self.found[self.reference]
        assert base is not None, "the reference was measured"
        return base

    def pace(self, one: LimitEstimate) -> tuple[float, float]:
        """Time over what the promise allows, and its relative error."""
        if isinstance(self.promise, MaxSlowdown):
            return one.ratio / (1.0 + self.promise.share), one.ratio_error
        if isinstance(self.promise, Deadline):
            left = self.promise.time_s - self.ledger.all_time_s
            work = self.promise.work - self.ledger.all_work
            if work <= 0.0:
                return 0.0, 0.0
            return (one.time_s * work / left if left > 0.0 else math.inf), one.time_error
        return 0.0, 0.0

    def permits(self, time_s: float, ahead: int = 1) -> bool:
        """Whether windows that take so long a unit of work leave the promise kept."""
        ledger, base = self.ledger, self.base
        window_s = ahead * ledger.time_s / self.windows
        work = window_s / time_s
        if isinstance(self.promise, MaxSlowdown):
            allowed = (1.0 + self.promise.share) * base.time_s * (1.0 - self.z * base.time_error)
            return ledger.time_s + window_s <= allowed * (ledger.work + work) + ledger.carried_s
        if isinstance(self.promise, Deadline):
            rest = max(0.0, self.promise.work - ledger.all_work - work)
            fast = base.time_s * (1.0 + self.z * base.time_error)
            return ledger.all_time_s + window_s + fast * rest <= self.promise.time_s
        return True

    def careful_s(self, one: LimitEstimate) -> float:
        return one.time_s * (1.0 + self.z * one.time_error)

    def cost(self, one: LimitEstimate) -> tuple[float, float]:
        """What is minimised, relative to the reference, and its relative error."""
        base = self.base
        weight = self.promise.energy_weight if isinstance(self.promise, BestEffort) else 1.0
        energy, time = weight * one.energy_j / base.energy_j, (1.0 - weight) * one.time_s / base.time_s
        error = math.hypot(energy * one.energy_error, time * one.time_error) / (energy + time)
        return energy + time, error


def _binds(one: LimitEstimate, limit_w: float, gpus: int) -> bool:
    """Whether a limit would hold back GPUs that draw what they do at this one."""
    return one.power_w >= _HOLDS_BACK * limit_w * gpus * (1.0 - _ROUNDING)


def _floor(case: _BanditProblem) -> int:
    """The first limit below which nothing is tried: it binds and is surely too slow."""
    for index, one in enumerate(case.found):
        if index <= case.reference or one is None or not one.windows:
            continue
        over, error = case.pace(one)
        if _binds(one, one.limit_w, case.gpus) and over * (1.0 - case.z * error) > 1.0:
            return index
    return len(case.found)


def _sure(one: LimitEstimate | None) -> LimitEstimate:
    assert one is not None, "something is known of it"
    return one


def _next_untried_limit(case: _BanditProblem, floor: int) -> int | None:
    """The next limit down, if one is left that was never tried and that no prior speaks for; first those between.

    Limits between others are left out where a job ran low before it could run high: under a ceiling that was lifted.
    """
    low = max(index for index, one in enumerate(case.found) if one is not None and one.windows)
    between = range(max(case.reference, case.first) + 1, min(low, floor))
    gap = next((index for index in between if case.found[index] is None), None)
    if gap is not None:
        return gap
    if low + 1 >= floor or case.found[low + 1] is not None:
        return None
    if isinstance(case.promise, BestEffort) and case.promise.energy_weight == 0.0:
        return None  # nothing below can be better
    return low + 1


def _affords(case: _BanditProblem, untried: int) -> bool:
    """Whether a window at a limit that was never tried leaves the promise kept, if its neighbour's time all grew."""
    above, limits_w = _sure(case.found[untried - 1]), case.limits_w
    binds = _binds(above, limits_w[untried], case.gpus)
    grown = (limits_w[untried - 1] / limits_w[untried]) ** _GROWS if binds else 1.0
    return case.permits(above.time_s * _STEP_UP * grown)


class _Candidate(NamedTuple):
    """A limit that may keep the promise."""

    bound: float  # cost that it may turn out to have
    place: int
    cost: float
    sure: bool  # that it keeps the promise


def _candidates(case: _BanditProblem, floor: int) -> list[_Candidate]:
    """Limits that may keep the promise, the one that may be cheapest first."""
    quota = case.manner.first_windows + case.manner.compare * math.sqrt(case.windows)
    kept = []
    for index, one in enumerate(case.found):
        if one is None or index < case.first or index >= floor:
            continue
        over, error = case.pace(one)
        likely_slow = over * (1.0 - error) > 1.0 and one.windows > quota
        if index != case.reference and (likely_slow or over * (1.0 - case.z * error) > 1.0):
            continue
        cost, doubt = case.cost(one)
        sure = index == case.reference or over * (1.0 + case.z * error) <= 1.0
        kept.append(_Candidate(cost * (1.0 - case.o * doubt), index, cost, sure))
    return sorted(kept)


def _settles(case: _BanditProblem, lead: _Candidate, hopeful: Sequence[_Candidate]) -> bool:
    """Whether no other limit may still be cheaper by what a change is worth."""
    enough = lead.cost * (1.0 - case.manner.worth)
    return all(other.place == lead.place or other.bound >= enough for other in hopeful)


def _alternate(case: _BanditProblem, fastest: int) -> LimitPick:
    """The slower limit of the best pair if the promise has room for it, else the faster."""
    usable = [(index, one) for index, one in enumerate(case.found) if one is not None and index >= case.first]
    hoped = {index: one.energy_j * (1.0 - case.o * one.energy_error) for index, one in usable}
    over = {index: case.pace(one)[0] for index, one in usable}
    quick = [index for index, _ in usable if over[index] <= 1.0 or index == fastest]
    best, slow, quick_one = min((hoped[index], index, index) for index in quick)
    for index, _ in usable:
        for other in quick:
            if over[index] > 1.0 >= over[other]:
                share = (1.0 - over[other]) / (over[index] - over[other])
                mixed = share * hoped[index] + (1.0 - share) * hoped[other]
                if mixed < best:
                    best, slow, quick_one = mixed, index, other
    base, quota = _sure(case.found[fastest]), case.manner.compare * math.sqrt(case.windows)
    if slow != quick_one and base.windows < min(_sure(case.found[slow]).windows, quota):
        # The promise is used up: its measure has to be good.
        return LimitPick(fastest, PickReason.COMPARE, settled=True)
    for index in (slow, quick_one):
        if case.permits(case.careful_s(_sure(case.found[index]))):
            return LimitPick(index, PickReason.ALTERNATE, settled=True)
    return LimitPick(fastest, PickReason.REPAY, settled=True)


def _pick_place(case: _BanditProblem, kept: int | None) -> LimitPick:
    """The limit of the next window; `kept` is one settled on. A window at the reference has been measured."""
    manner, found, first = case.manner, case.found, case.first
    fastest = max(case.reference, first)
    base = found[fastest]
    if base is None or base.windows < manner.first_windows:
        return LimitPick(fastest, PickReason.REFERENCE, settled=False)
    floor = _floor(case)
    untried = _next_untried_limit(case, floor)
    if untried is not None and untried >= first and _affords(case, untried):
        return LimitPick(untried, PickReason.UNTRIED, settled=False)
    hopeful = _candidates(case, floor)
    lead = next((one for one in hopeful if one.place == kept), None)
    if lead is not None and _settles(case, lead, hopeful):
        if case.permits(case.careful_s(_sure(found[lead.place]))):
            return LimitPick(lead.place, PickReason.KEEP, settled=True)
        return LimitPick(fastest, PickReason.REPAY, settled=True)
    if manner.alternate and untried is None and not isinstance(case.promise, BestEffort):
        return _alternate(case, fastest)
    quota = manner.first_windows + manner.compare * math.sqrt(case.windows)
    for rank, one in enumerate(hopeful):
        standing = _sure(found[one.place])
        if not one.sure and base.windows <= quota and base.windows < standing.windows:
            return LimitPick(fastest, PickReason.COMPARE, settled=False)
        if case.permits(case.careful_s(standing)):
            settled = rank == 0 and one.sure and untried is None and _settles(case, one, hopeful)
            return LimitPick(one.place, PickReason.KEEP if settled else PickReason.HOPE, settled)
    return LimitPick(fastest, PickReason.REPAY, settled=False)


_CHANGED = 0.05  # by which a limit's ratios may change with the job
_LONE_WINDOW = 0.03  # error of a limit's only window beside its scatter; of more, their share of it
_FIRST_PHASE = 16  # windows
HISTORY_LIMITS_MOST = 64  # windows of a limit that are believed of before
_OPENING = PromiseAccount()
_LEVEL = WindowDrift()
_NOTHING_SHOWN = LimitHistory()


class MissedWindowReason(Enum):
    """Why a window says nothing."""

    NO_POWER = "power was not measured"
    NO_PROGRESS = "the job reported no progress"
    IMPOSSIBLE = "a number is missing, negative or not finite"
    OTHER_LIMIT = "it ran at a limit that is not one of the job's"


class WindowMissed(NamedTuple):
    """A window without a measurement."""

    reason: MissedWindowReason


class CeilingSet(NamedTuple):
    """The largest limit that budgets allow each GPU from now on; None for no ceiling."""

    limit_w: float | None


class PriorSet(NamedTuple):
    """What a model says of the job's curve, in place of relatives; None takes back what was said before."""

    prior: LimitPrior | None


SearchEvent = MeasurementWindow | WindowMissed | CeilingSet | PriorSet


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """The limit of the next window, the same on all GPUs of the job."""

    limit_w: float
    why: PickReason
    settled: bool  # the search is over until the job changes
    refused: MissedWindowReason | None = None  # what the last event could not be used for


@dataclass(frozen=True, slots=True)
class LimitSearch:
    """All that is known of one job; values, so that a step makes another."""

    promise: TrainingPromise
    manner: BanditSettings
    gpus: int
    arms: tuple[LimitArm, ...]  # limits fall
    noise: WindowScatter
    ledger: PromiseAccount = _OPENING
    drift: WindowDrift = _LEVEL
    relatives: tuple[PowerCurve, ...] = ()
    foreseen: LimitPrior | None = None  # begins to count once the largest limit is measured, as relatives do
    prior: LimitPrior | None = None
    kept: int | None = None  # the limit settled on
    first: int = 0  # the largest limit that is allowed now
    windows: int = 0  # of this phase
    phase: int = 0
    missed: int = 0  # in a row

    @property
    def limits_w(self) -> tuple[float, ...]:
        """The limits, falling."""
        return tuple(arm.limit_w for arm in self.arms)

    @property
    def reference(self) -> int | None:
        """The largest limit that was measured in this phase; None before there is one."""
        return next((index for index, arm in enumerate(self.arms) if arm.windows), None)


def start_search(
    limits_w: Sequence[float],
    promise: TrainingPromise,
    *,
    gpus: int = 1,
    manner: BanditSettings | None = None,
    relatives: Sequence[PowerCurve] = (),
    shown: LimitHistory = _NOTHING_SHOWN,
) -> tuple[LimitSearch, LimitDecision]:
    """A job whose curve is unknown, and its first limit, the largest; or one that goes on from what it has `shown`.

    `relatives` are curves of other jobs on the same GPU model; without them the job starts cold. What was shown at a
    limit that is none of these is left out, and each counts as HISTORY_LIMITS_MOST windows at most: it may be of long ago.
    Raises InvalidCurve for no limits, too many, or one that is not a positive number of watts.
    """
    falling = sorted(set(limits_w), reverse=True)
    if not falling or len(falling) > LIMITS_MOST:
        raise InvalidCurve("limits_w", f"{len(falling)} limits", f"give 1 to {LIMITS_MOST} that may be set")
    if not all(limit > 0.0 and math.isfinite(limit) for limit in falling) or gpus < 1:
        raise InvalidCurve("limits_w", f"{falling} on {gpus} GPUs", "limits are positive watts of at least one GPU")
    manner = manner or BanditSettings()
    noise = WindowScatter.prior(manner.time_scatter, manner.energy_scatter, manner.scatter_windows)
    state = LimitSearch(
        promise,
        manner,
        gpus,
        tuple(_history_at(limit, shown.arms) for limit in falling),
        shown.noise or noise,
        relatives=tuple(relatives),
    )
    windows = sum(arm.windows for arm in state.arms)
    if not windows:
        return state, LimitDecision(falling[0], PickReason.REFERENCE, settled=len(falling) == 1)
    ledger = PromiseAccount(sum(arm.work for arm in state.arms), sum(arm.time_s for arm in state.arms))
    state, picked = _pick_limit(replace(state, windows=windows, ledger=ledger))
    return state, LimitDecision(state.arms[picked.place].limit_w, picked.why, picked.settled)


def _history_at(limit_w: float, shown: Sequence[LimitArm]) -> LimitArm:
    found = next((arm for arm in shown if is_same_limit(arm.limit_w, limit_w) and arm.windows), None)
    if found is None:
        return LimitArm(limit_w)
    share = min(1.0, HISTORY_LIMITS_MOST / found.windows)
    counted = min(HISTORY_LIMITS_MOST, found.windows)
    return LimitArm(limit_w, counted, share * found.work, share * found.time_s, share * found.energy_j)


def step_search(state: LimitSearch, event: SearchEvent) -> tuple[LimitSearch, LimitDecision]:
    """What is known after an event, and the next limit. Deterministic: same state and event, same answer."""
    refused = None
    if isinstance(event, CeilingSet):
        state = _under(state, event.limit_w)
    elif isinstance(event, PriorSet):
        state = _with_prior(state, event.prior)
    elif isinstance(event, WindowMissed):
        refused = event.reason
        state = replace(state, missed=state.missed + 1)
    else:
        index = find_window_arm(state, event)
        if isinstance(index, MissedWindowReason):
            refused = index
            state = replace(state, missed=state.missed + 1)
        else:
            state = _with_window(state, index, event)
    state, picked = _pick_limit(state)
    return state, LimitDecision(state.arms[picked.place].limit_w, picked.why, picked.settled, refused)


def limit_estimates(state: LimitSearch) -> tuple[LimitEstimate | None, ...]:
    """How each limit stands, limits falling; None where nothing is known of it."""
    reference = state.reference
    if reference is None:
        return (None,) * len(state.arms)
    return estimate_limits(state.arms, reference, state.noise, state.prior)


def measured_estimates(state: LimitSearch) -> tuple[LimitEstimate | None, ...]:
    """What this run and former ones measured at each limit, without what models or other jobs say; None where nothing.

    Nothing before the largest limit has its first windows. A limit of few windows in its only run may be further off
    than scatter says, since an outlier is told from the rest by these alone.
    """
    if state.arms[0].windows < state.manner.first_windows:
        return (None,) * len(state.arms)
    former = state.prior if state.prior is not None and state.prior.is_measured else None
    return tuple(
        _doubt_few_windows(one) if one is not None and place and (former is None or former.time[place] is None) else one
        for place, one in enumerate(estimate_limits(state.arms, 0, state.noise, former))
    )


def _doubt_few_windows(one: LimitEstimate) -> LimitEstimate:
    more = _LONE_WINDOW / one.windows
    return one._replace(ratio_error=math.hypot(one.ratio_error, more), energy_error=math.hypot(one.energy_error, more))


def can_afford(state: LimitSearch, limit_w: float, windows: int = 1) -> bool:
    """Whether so many windows at a known limit leave the promise kept, whenever the job may end after them."""
    place = next((index for index, arm in enumerate(state.arms) if is_same_limit(arm.limit_w, limit_w)), None)
    reference = state.reference
    if place is None or reference is None or state.windows < 1:
        return False
    case = _build_problem(state, reference)
    one = case.found[place]
    return one is not None and case.permits(case.careful_s(one), windows)


def _build_problem(state: LimitSearch, reference: int) -> _BanditProblem:
    """The decision that is due in a search whose reference was measured."""
    manner, grown = state.manner, 0.5 * math.log1p(state.windows)
    return _BanditProblem(
        promise=state.promise,
        manner=manner,
        ledger=state.ledger,
        found=estimate_limits(state.arms, reference, state.noise, state.prior),
        limits_w=state.limits_w,
        reference=reference,
        first=state.first,
        windows=state.windows,
        gpus=state.gpus,
        z=math.sqrt(manner.confidence**2 + grown),
        o=math.sqrt(manner.optimism**2 + grown),
    )


def _under(state: LimitSearch, limit_w: float | None) -> LimitSearch:
    """The largest allowed limit; the least one where even that is above the ceiling, which the budget then refuses."""
    if limit_w is None:
        return replace(state, first=0)
    last = len(state.arms) - 1
    first = next((i for i, arm in enumerate(state.arms) if not is_higher_limit(arm.limit_w, limit_w)), last)
    kept = state.kept if state.kept is None or state.kept >= first else None
    return replace(state, first=first, kept=kept)


def _with_prior(state: LimitSearch, prior: LimitPrior | None) -> LimitSearch:
    """Replaces the model's prediction; what counted only because of the last one counts no longer."""
    if prior is not None and not len(prior.time) == len(prior.energy) == len(state.arms):
        return state
    counted = state.prior is not None and state.prior == state.foreseen
    return replace(state, foreseen=prior, prior=None if counted else state.prior)


def find_window_arm(state: LimitSearch, window: MeasurementWindow) -> int | MissedWindowReason:
    """The place of the limit that a window is of, or why the window cannot be used."""
    if not (window.work > 0.0 and math.isfinite(window.work)):
        return MissedWindowReason.NO_PROGRESS
    if not (window.energy_j > 0.0 and math.isfinite(window.energy_j)):
        return MissedWindowReason.NO_POWER
    if not (window.time_s > 0.0 and math.isfinite(window.time_s)):
        return MissedWindowReason.IMPOSSIBLE
    for index, arm in enumerate(state.arms):
        if is_same_limit(arm.limit_w, window.limit_w):
            return index
    return MissedWindowReason.OTHER_LIMIT


def _with_window(state: LimitSearch, index: int, window: MeasurementWindow) -> LimitSearch:
    """One more window: sums, ledger, drift; a new phase where the job has changed."""
    arm, noise, drift = state.arms[index], state.noise, state.drift
    off = arm.deviations(window)
    tamed = arm.clip_outlier(window, noise)
    if off is not None:
        fair = math.sqrt(1.0 + 1.0 / arm.windows)
        drift = drift.with_deviation(
            off[0] / (noise.time_share * fair), off[1] / (noise.energy_share * fair), state.manner.drift_allowed
        )
        counted = arm.deviations(tamed)
        assert counted is not None, "the limit has windows"
        noise = noise.with_deviation(*counted, arm.windows)
    ledger = state.ledger
    ledger = PromiseAccount(
        ledger.work + tamed.work,
        ledger.time_s + tamed.time_s,
        ledger.carried_s,
        ledger.all_work + window.work,
        ledger.all_time_s + window.time_s,
    )
    arms = (*state.arms[:index], arm.with_window(tamed), *state.arms[index + 1 :])
    windows = state.windows + 1
    state = replace(state, arms=arms, noise=noise, drift=drift, ledger=ledger, windows=windows, missed=0)
    changed = max(drift) > state.manner.drift_alarm and windows >= _FIRST_PHASE << min(state.phase, 40)
    if changed:
        return _next_phase(state, window, index)
    if state.prior is not None or state.arms[0].windows < state.manner.first_windows:
        return state
    if state.foreseen is not None:
        return replace(state, prior=state.foreseen)
    if state.relatives:
        power_w = state.arms[0].power_w / state.gpus
        return replace(state, prior=prior_from_relatives(state.relatives, state.limits_w, power_w))
    return state


def _next_phase(state: LimitSearch, window: MeasurementWindow, index: int) -> LimitSearch:
    """Starts a new phase of a job that has changed: arms are empty, what was known becomes the prior, accounts go on."""
    found = limit_estimates(state)
    reference = state.reference
    assert reference is not None, "a window came"
    base = found[reference]
    assert base is not None, "the reference was measured"
    carried = 0.0
    if isinstance(state.promise, MaxSlowdown):
        ledger = state.ledger
        carried = ledger.carried_s + (1.0 + state.promise.share) * base.time_s * ledger.work - ledger.time_s

    arms = [LimitArm(arm.limit_w) for arm in state.arms]
    arms[index] = arms[index].with_window(window)  # the first of the new phase that is sure to be of it
    return replace(
        state,
        arms=tuple(arms),
        drift=_LEVEL,
        prior=prior_from_estimates(found, reference, _CHANGED) if reference == 0 else None,
        kept=None,
        windows=1,
        phase=state.phase + 1,
        ledger=state.ledger._replace(work=window.work, time_s=window.time_s, carried_s=carried),
    )


def _pick_limit(state: LimitSearch) -> tuple[LimitSearch, LimitPick]:
    """The next limit; what was settled on is remembered."""
    if state.missed >= state.manner.missing_most:
        return replace(state, kept=None), LimitPick(state.first, PickReason.BLIND, settled=False)
    reference = state.reference
    if reference is None or reference > state.first:  # a ceiling was lifted: slowdowns are relative to what it hid
        return state, LimitPick(state.first, PickReason.REFERENCE, settled=False)
    picked = _pick_place(_build_problem(state, reference), state.kept)
    if picked.why is PickReason.KEEP and picked.place != state.kept:
        state = replace(state, kept=picked.place)
    elif not picked.settled and state.kept is not None:
        state = replace(state, kept=None)
    return state, picked
