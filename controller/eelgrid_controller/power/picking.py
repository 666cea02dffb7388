"""Which limit the next window runs at: hopeful about energy, careful about the promise.

Owns the rule. Must not know how windows are summed or a phase ends.

Theory: a bandit with a constraint. Of the limits that may keep the promise the
one whose cost could be lowest (estimate less o errors) is run, so a limit is
tried as long as it might be best and no longer (confidence bounds of Lai and
Robbins, 1985); o grows with the windows seen, o^2 = o_0^2 + ln(1 + n) / 2.

The promise is kept by a ledger, not by hope: a window runs only if, with the
limit's time taken z errors longer and the reference's z errors shorter, the job
as a whole would still be within it; z^2 = z_0^2 + ln(1 + n) / 2, so that over a
long job it is not luck that decides. Windows at large limits earn what windows
at small ones spend; while too little is earned or known the reference runs.

Limits that were never tried come in falling order, each once the ledger could
pay for a window whose time grows with the square of the limits' ratio, where its
neighbour binds. A window is a stretch of time, so that a limit which turns out
far slower costs no more than that stretch. Below a limit that holds the job back
and is surely too slow, nothing is tried.

A promise binds the whole job, so two limits in turn may use up what one alone
leaves (`promise.mixture`). If that is wanted, the pair of least mixed energy is
run: the slower whenever the ledger permits it, the faster until it does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from eelgrid_controller.power.promise import BestEffort, Deadline, MaxSlowdown, Promise
from eelgrid_controller.power.standing import Standing

__all__ = ["Ledger", "Manner", "Pick", "Why", "permitted", "pick"]

_HOLDS_BACK = 0.9  # of a limit drawn: it binds
_GROWS = 2.0  # power of the ratio of two limits with which time may grow; Zeus's steepest steps are near it
_STEP_UP = 1.05  # and what an untried limit may cost beyond that


@dataclass(frozen=True, slots=True)
class Manner:
    """How exploration goes about; one setting for all jobs."""

    first_windows: int = 3  # at the reference, before anything else
    confidence: float = 1.28  # z_0: errors that a promise is kept with
    optimism: float = 1.0  # o_0: errors that a limit's energy may turn out lower
    compare: float = 1.0  # windows of the reference, and of a limit likely too slow, per square root of all windows
    worth: float = 0.0025  # a smaller saving is not worth another change of limit
    time_scatter: float = 0.02  # of one window, believed at first
    energy_scatter: float = 0.0225
    scatter_windows: float = 6.0  # that this belief is worth
    drift_allowed: float = 1.0  # scatters a window
    drift_alarm: float = 10.0  # scatters in sum
    missing_most: int = 5  # windows in a row without a measurement
    alternate: bool = False  # run two limits in turn where one alone leaves some of the promise unused


class Why(Enum):
    """Why a limit was picked."""

    REFERENCE = "what slowdowns are relative to is not known yet"
    UNTRIED = "the next limit down was never measured"
    HOPE = "it may be the cheapest that keeps the promise"
    COMPARE = "whether the cheapest keeps the promise cannot be told without knowing the reference better"
    REPAY = "time has to be made up first"
    KEEP = "nothing else could save enough to be worth trying"
    ALTERNATE = "two limits in turn use the promise up"
    BLIND = "measurements stay away: nothing is held back until they return"


class Ledger(NamedTuple):
    """What the job has used of its promise."""

    work: float = 0.0  # of this phase
    time_s: float = 0.0  # of this phase, outliers pulled in
    carried_s: float = 0.0  # earned, or owed if negative, before this phase
    all_work: float = 0.0  # since the job began
    all_time_s: float = 0.0  # since the job began, on the clock


class Pick(NamedTuple):
    """A limit by its place, why, and whether the search is over."""

    place: int
    why: Why
    settled: bool


class _Case(NamedTuple):
    """All that one decision looks at."""

    promise: Promise
    manner: Manner
    ledger: Ledger
    found: tuple[Standing | None, ...]
    limits_w: Sequence[float]
    reference: int
    first: int  # the largest limit that is allowed now
    windows: int  # of this phase
    gpus: int
    z: float
    o: float

    @property
    def base(self) -> Standing:
        base = self.found[self.reference]
        assert base is not None, "the reference was measured"
        return base

    def pace(self, one: Standing) -> tuple[float, float]:
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

    def careful_s(self, one: Standing) -> float:
        return one.time_s * (1.0 + self.z * one.time_error)

    def cost(self, one: Standing) -> tuple[float, float]:
        """What is minimised, relative to the reference, and its relative error."""
        base = self.base
        weight = self.promise.energy_weight if isinstance(self.promise, BestEffort) else 1.0
        energy, time = weight * one.energy_j / base.energy_j, (1.0 - weight) * one.time_s / base.time_s
        error = math.hypot(energy * one.energy_error, time * one.time_error) / (energy + time)
        return energy + time, error


def _floor(case: _Case) -> int:
    """The first limit below which nothing is tried: it binds and is surely too slow."""
    for index, one in enumerate(case.found):
        if index <= case.reference or one is None or not one.windows:
            continue
        over, error = case.pace(one)
        binds = one.power_w >= _HOLDS_BACK * one.limit_w * case.gpus
        if binds and over * (1.0 - case.z * error) > 1.0:
            return index
    return len(case.found)


def _sure(one: Standing | None) -> Standing:
    assert one is not None, "something is known of it"
    return one


def _untried(case: _Case, floor: int) -> int | None:
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


def _affords(case: _Case, untried: int) -> bool:
    """Whether a window at a limit that was never tried leaves the promise kept, if its neighbour's time all grew."""
    above, limits_w = _sure(case.found[untried - 1]), case.limits_w
    holds = above.power_w >= _HOLDS_BACK * limits_w[untried] * case.gpus
    grown = (limits_w[untried - 1] / limits_w[untried]) ** _GROWS if holds else 1.0
    return case.permits(above.time_s * _STEP_UP * grown)


class _Hopeful(NamedTuple):
    """A limit that may keep the promise."""

    bound: float  # cost that it may turn out to have
    place: int
    cost: float
    sure: bool  # that it keeps the promise


def _hopeful(case: _Case, floor: int) -> list[_Hopeful]:
    """Limits that may keep the promise, the one that may be cheapest first."""
    quota = case.manner.first_windows + case.manner.compare * math.sqrt(case.windows)
    kept = []
    for index, one in enumerate(case.found):
        if one is None or index < case.first or index >= floor:
            continue
        over, error = case.pace(one)
        if index != case.reference and (over * (1.0 - case.z * error) > 1.0 or (over > 1.0 and one.windows > quota)):
            continue
        cost, doubt = case.cost(one)
        sure = index == case.reference or over * (1.0 + case.z * error) <= 1.0
        kept.append(_Hopeful(cost * (1.0 - case.o * doubt), index, cost, sure))
    return sorted(kept)


def _settles(case: _Case, lead: _Hopeful, hopeful: Sequence[_Hopeful]) -> bool:
    """Whether no other limit may still be cheaper by what a change is worth."""
    enough = lead.cost * (1.0 - case.manner.worth)
    return all(other.place == lead.place or other.bound >= enough for other in hopeful)


def _alternate(case: _Case, fastest: int) -> Pick:
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
        return Pick(fastest, Why.COMPARE, settled=True)  # the promise is used up: its measure has to be good
    for index in (slow, quick_one):
        if case.permits(case.careful_s(_sure(case.found[index]))):
            return Pick(index, Why.ALTERNATE, settled=True)
    return Pick(fastest, Why.REPAY, settled=True)


def _errors(manner: Manner, windows: int) -> tuple[float, float]:
    """Z and o after so many windows."""
    grown = 0.5 * math.log1p(windows)
    return math.sqrt(manner.confidence**2 + grown), math.sqrt(manner.optimism**2 + grown)


def permitted(
    promise: Promise,
    manner: Manner,
    ledger: Ledger,
    found: tuple[Standing | None, ...],
    limits_w: Sequence[float],
    *,
    reference: int,
    windows: int,
    gpus: int,
    place: int,
    ahead: int,
) -> bool:
    """Whether `ahead` windows at a limit that is known leave the promise kept, with errors counted against it."""
    one = found[place]
    if one is None:
        return False
    case = _Case(promise, manner, ledger, found, limits_w, reference, 0, windows, gpus, *_errors(manner, windows))
    return case.permits(case.careful_s(one), ahead)


def pick(
    promise: Promise,
    manner: Manner,
    ledger: Ledger,
    found: tuple[Standing | None, ...],
    limits_w: Sequence[float],
    *,
    reference: int,
    first: int,
    windows: int,
    gpus: int,
    kept: int | None,
) -> Pick:
    """The limit of the next window; limits fall, `first` is the largest that is allowed, `kept` one settled on.

    `windows` counts those of this phase, at least one of them at the reference.
    """  # fmt: skip
    case = _Case(promise, manner, ledger, found, limits_w, reference, first, windows, gpus, *_errors(manner, windows))
    fastest = max(reference, first)
    base = found[fastest]
    if base is None or base.windows < manner.first_windows:
        return Pick(fastest, Why.REFERENCE, settled=False)
    floor = _floor(case)
    untried = _untried(case, floor)
    if untried is not None and untried >= first and _affords(case, untried):
        return Pick(untried, Why.UNTRIED, settled=False)
    hopeful = _hopeful(case, floor)
    lead = next((one for one in hopeful if one.place == kept), None)
    if lead is not None and _settles(case, lead, hopeful):
        fits = case.permits(case.careful_s(_sure(found[lead.place])))
        return Pick(lead.place, Why.KEEP, settled=True) if fits else Pick(fastest, Why.REPAY, settled=True)
    if manner.alternate and untried is None and not isinstance(promise, BestEffort):
        return _alternate(case, fastest)
    quota = manner.first_windows + manner.compare * math.sqrt(windows)
    for rank, one in enumerate(hopeful):
        standing = _sure(found[one.place])
        if not one.sure and base.windows <= quota and base.windows < standing.windows:
            return Pick(fastest, Why.COMPARE, settled=False)
        if case.permits(case.careful_s(standing)):
            settled = rank == 0 and one.sure and untried is None and _settles(case, one, hopeful)
            return Pick(one.place, Why.KEEP if settled else Why.HOPE, settled)
    return Pick(fastest, Why.REPAY, settled=False)
