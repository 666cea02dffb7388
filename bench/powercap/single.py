"""One training run under a policy of power limits, to its target, exploration counted.

Owns the simulated run and the policies. Must not know files or how results are
shown.

How a run is made from the tables: an epoch at limit l takes the measured t(l)
seconds at the measured P(l) watts, and that is what is counted. A policy sees
windows only: a tenth of an epoch, at least 2 s and at most 10 s, whose time per
work is off by normal noise with a relative scatter of 2 % (1 % for power), each
window's its own. That is what Zeus's own sweeps show: with windows of 1.7 to 33 s
they are off a monotone curve by a median of 1.9 % in time and under 1 % in power,
without a trend over the length. `white` lets windows below 10 s scatter more, with
the root of their length. Every policy that measures sees the same noise.

What is claimed: work at a limit that alone would break the promise is claimed at
no less than the oracle's energy, although it drew less: no single limit within the
promise could have had it. `drawn` is what was really drawn. The bound that holds
for any use of limits in turn is the two-limit mixture (mixture.py).
"""

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bench.powercap.mixture import choose_mixture
from bench.powercap.zeus import Run
from eelgrid_controller.objectives.power.bandit import (
    BanditSettings,
    LimitSearch,
    PickReason,
    PriorSet,
    measured_estimates,
    start_search,
    step_search,
)
from eelgrid_controller.objectives.power.estimates import (
    RUNS_DIFFER,
    LimitPrior,
    MeasurementWindow,
    prior_from_estimates,
)
from eelgrid_controller.objectives.power.power_model import LimitPoint, MaxSlowdown, PowerCurve, choose_limit

__all__ = [
    "NOISE",
    "POLICIES",
    "SLOWDOWN",
    "FormerRuns",
    "Noise",
    "Outcome",
    "carried_out",
    "ceiling",
    "search_limit",
    "search_losses",
    "window_count",
    "window_scatter",
]

SLOWDOWN = 0.05
_WINDOW_S = (2.0, 10.0)
_EPOCH_WINDOWS = 10
_ROUNDING = 1e-9


class Noise(NamedTuple):
    """Relative scatter of one window."""

    time: float = 0.02
    power: float = 0.01
    white: bool = False


NOISE = Noise()


class Outcome(NamedTuple):
    """What a run came to, relative to the largest limit throughout."""

    slowdown: float
    claimed: float  # energy saved, as it is claimed
    drawn: float  # energy saved, as it was drawn
    shares: Mapping[float, float]  # of the work, by limit

    @property
    def kept(self) -> bool:
        """Whether the whole run stayed within the slowdown."""
        return self.slowdown <= SLOWDOWN + _ROUNDING

    @property
    def main_limit_w(self) -> float:
        """The limit of most work."""
        return max(self.shares, key=lambda limit: self.shares[limit])


def _window_s(run: Run) -> float:
    """Seconds of a window."""
    return min(_WINDOW_S[1], max(_WINDOW_S[0], run.curve.largest.time_s / _EPOCH_WINDOWS))


def window_count(run: Run) -> float:
    """Windows of a run at the largest limit."""
    return run.epochs * run.curve.largest.time_s / _window_s(run)


def window_scatter(run: Run, noise: Noise) -> tuple[float, float]:
    """Relative scatter of one window's time and power."""
    root = (_WINDOW_S[1] / _window_s(run)) ** 0.5 if noise.white else 1.0
    return root * noise.time, root * noise.power


class _Course:
    """A run under way."""

    def __init__(self, run: Run, seed: int, noise: Noise, window_s: float | None = None, number: int = 0) -> None:
        self._given = run, seed, noise, window_s
        entropy = [seed, zlib.crc32(f"{run.model}/{run.key}".encode())]
        self.rng = np.random.default_rng([*entropy, number] if number else entropy)
        self.curve: PowerCurve = run.curve
        self.epochs = run.epochs
        self.oracle = choose_limit(self.curve, MaxSlowdown(SLOWDOWN)).at
        self.window_s = window_s or _window_s(run)
        self.scatter = window_scatter(run, noise) if window_s is None else (noise.time, noise.power)
        self.done = self.time_s = self.drawn_j = self.claimed_j = 0.0
        self.shares: Counter[float] = Counter()

    def start_former(self, number: int, differ: float) -> "_Course":
        """A former run of the same job, with noise of its own; its time at each limit differs by a relative scatter."""
        course = _Course(*self._given, number)
        course.curve = _vary_curve(course.curve, course.rng, differ)
        return course

    @property
    def over(self) -> bool:
        return self.done >= self.epochs - _ROUNDING

    def spend(self, at: LimitPoint, work: float) -> None:
        """So much work at a limit, at most what is left."""
        work = min(work, self.epochs - self.done)
        self.done += work
        self.time_s += work * at.time_s
        self.drawn_j += work * at.energy_j
        alone = at.time_s <= (1.0 + SLOWDOWN) * self.curve.largest.time_s * (1.0 + _ROUNDING)
        self.claimed_j += work * (at.energy_j if alone else max(at.energy_j, self.oracle.energy_j))
        self.shares[at.limit_w] += work

    def window(self, limit_w: float) -> MeasurementWindow:
        """One window at a limit, as it is measured."""
        at = self.curve.interpolate(limit_w)
        work = min(self.window_s / at.time_s, self.epochs - self.done)
        self.spend(at, work)
        time, power = np.maximum(0.05, 1.0 + self.rng.standard_normal(2) * self.scatter).tolist()
        time_s = work * at.time_s * time
        return MeasurementWindow(limit_w, work, time_s, time_s * at.power_w * power)

    def outcome(self) -> Outcome:
        base = self.curve.largest
        shares = {limit: work / self.epochs for limit, work in sorted(self.shares.items())}
        return Outcome(
            self.time_s / (base.time_s * self.epochs) - 1.0,
            1.0 - self.claimed_j / (base.energy_j * self.epochs),
            1.0 - self.drawn_j / (base.energy_j * self.epochs),
            shares,
        )


def _vary_curve(curve: PowerCurve, rng: np.random.Generator, differ: float) -> PowerCurve:
    """The job on another day: the time at each limit below the largest is off by a relative scatter, power is not."""
    if not differ:
        return curve
    factors = [*np.maximum(0.5, 1.0 + differ * rng.standard_normal(len(curve.points) - 1)).tolist(), 1.0]
    points = (replace(at, time_s=at.time_s * factor) for at, factor in zip(curve.points, factors, strict=True))
    return replace(curve, points=tuple(points))


Policy = Callable[[_Course, tuple[PowerCurve, ...]], object]


def _explored(
    course: _Course, relatives: tuple[PowerCurve, ...], manner: BanditSettings, prior: LimitPrior | None = None
) -> LimitSearch:
    """Ours: nothing of the job's curve is known at the start but what former runs measured, if there were any."""
    state, decision = start_search(course.curve.limits_w, MaxSlowdown(SLOWDOWN), manner=manner, relatives=relatives)
    if prior is not None:
        state, decision = step_search(state, PriorSet(prior))
    while not course.over:
        state, decision = step_search(state, course.window(decision.limit_w))
    return state


class FormerRuns(NamedTuple):
    """Runs of the same job before the one that counts."""

    count: int = 0
    differ: float = 0.0  # relative scatter of their time at each limit


def _explored_again(course: _Course, former: FormerRuns) -> None:
    """Ours after former runs, each with what the ones before it measured."""
    prior = None
    for number in range(1, former.count + 1):
        found = measured_estimates(_explored(course.start_former(number, former.differ), (), BanditSettings(), prior))
        if found[0] is not None:
            prior = prior_from_estimates(found, 0, RUNS_DIFFER, is_measured=True)
    _explored(course, (), BanditSettings(), prior)


def _profiled(course: _Course, windows: int) -> None:
    """Every limit from the largest down for so many windows, then the cheapest that seems to keep the promise."""
    seen: dict[float, tuple[float, float]] = {}
    for limit_w in sorted(course.curve.limits_w, reverse=True):
        time = energy = work = 0.0
        for _ in range(windows):
            if not course.over:
                one = course.window(limit_w)
                time, energy, work = time + one.time_s, energy + one.energy_j, work + one.work
        if work:
            seen[limit_w] = (time / work, energy / work)
    slowest = (1.0 + SLOWDOWN) * seen[max(seen)][0]
    best = min((energy, limit) for limit, (time, energy) in seen.items() if time <= slowest)[1]
    course.spend(course.curve.interpolate(best), course.epochs - course.done)


def _fixed(course: _Course, share: float) -> None:
    """The largest measured limit up to a share of the largest."""
    most = share * course.curve.largest.limit_w + _ROUNDING
    limit = max((limit for limit in course.curve.limits_w if limit <= most), default=min(course.curve.limits_w))
    course.spend(course.curve.interpolate(limit), course.epochs)


def _epoch(course: _Course) -> None:
    limits = len(course.curve.points)
    _profiled(course, max(1, int(course.curve.largest.time_s / course.window_s / limits)))


POLICIES: Mapping[str, Policy] = {
    "max": lambda course, _: _fixed(course, 1.0),
    "cap80": lambda course, _: _fixed(course, 0.8),
    "cap70": lambda course, _: _fixed(course, 0.7),
    "zeus_epoch": lambda course, _: _epoch(course),
    "zeus_jit": lambda course, _: _profiled(course, 1),
    "eelgrid": lambda course, _: _explored_again(course, FormerRuns()),
    "eelgrid_second_run": lambda course, _: _explored_again(course, FormerRuns(1)),
    "eelgrid_fifth_run": lambda course, _: _explored_again(course, FormerRuns(4)),
    "eelgrid_relatives": lambda course, relatives: _explored(course, relatives, BanditSettings()),
    "eelgrid_in_turn": lambda course, _: _explored(course, (), BanditSettings(alternate=True)),
}


def carried_out(run: Run, policy: str, seed: int, relatives: tuple[PowerCurve, ...], noise: Noise = NOISE) -> Outcome:
    """One run to its target under a policy."""
    course = _Course(run, seed, noise)
    POLICIES[policy](course, relatives)
    return course.outcome()


def search_limit(run: Run, seed: int, noise: Noise, window_s: float, former: FormerRuns) -> Outcome:
    """One run to its target under a search that sees windows of this length, each off by the noise."""
    course = _Course(run, seed, noise, window_s)
    _explored_again(course, former)
    return course.outcome()


def search_losses(run: Run, seed: int, noise: Noise) -> tuple[Outcome, dict[PickReason, float]]:
    """One cold search, and what its windows saved less than at the oracle's limit, by why their limit was picked."""
    course, lost = _Course(run, seed, noise), dict.fromkeys(PickReason, 0.0)
    best, all_j = ceiling(run.curve).oracle, run.curve.largest.energy_j * run.epochs
    state, decision = start_search(run.curve.limits_w, MaxSlowdown(SLOWDOWN))
    while not course.over:
        done, claimed_j, why = course.done, course.claimed_j, decision.why
        state, decision = step_search(state, course.window(decision.limit_w))
        share = (course.done - done) / run.epochs
        lost[why] += best * share - (share - (course.claimed_j - claimed_j) / all_j)
    return course.outcome(), lost


class Ceiling(NamedTuple):
    """What cannot be passed within the slowdown, relative to the largest limit throughout."""

    oracle: float  # saving of the best single limit
    oracle_limit_w: float
    in_turn: float  # saving of the best two limits in turn


def ceiling(curve: PowerCurve) -> Ceiling:
    """The oracle of a curve and the bound on any limits in turn."""
    promise = MaxSlowdown(SLOWDOWN)
    choice = choose_limit(curve, promise)
    mixed = choose_mixture(curve, promise)
    return Ceiling(choice.saving, choice.at.limit_w, 1.0 - mixed.energy_j / curve.largest.energy_j)
