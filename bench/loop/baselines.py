"""Common policies of today, tuned in their favour: static replicas, Kubernetes' autoscaler, fixed caps, Zeus per job.

Owns the baseline drivers. Must not know steering beyond its events and instructions.

`Hpa` is the HorizontalPodAutoscaler with its documented algorithm and defaults: desired =
ceil(load / (capacity x target)), nothing within a tenth of the target, replicas that do not
serve yet counted at no load when it rises, no stabilisation up, at most 4 more or twice as
many in 15 s, and down the most that was desired in the last 300 s. Its metric is sequences
in flight over those that the objective allows, waiting ones too, so that overload is seen;
and what the objective allows is that of the real engine, which nobody knows beforehand.
`Static` knows the day: the least constant replicas with which no window of it is violated.
`cap` gives every training job the largest of its limits up to a share of the largest one.
`zeus` profiles each limit of a job for PROFILED windows, the largest first, and then takes
the cheapest that seems to be within the promised slowdown (You et al., NSDI 2023); a
deadline's job is given the same slowdown, a job without a promise Zeus's cost. A limit
that could not be set is set again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.loop.engines import Engines
from bench.loop.scene import SLOWDOWN, Job, Scene, Service
from eelgrid_controller.objectives.power.budgets import Holding
from eelgrid_controller.objectives.power.control_events import (
    ControlEvent,
    ControlInstruction,
    JobMeasured,
    JobStarted,
    LimitFailed,
    ScaleService,
    ServiceReady,
    ServiceStarted,
    ServiceWindow,
    SetPowerLimit,
    WorkloadEnded,
)
from eelgrid_controller.objectives.power.power_model import BestEffort, MaxSlowdown

__all__ = ["TARGET", "Baseline", "Hpa", "Peak", "Zeus", "best_cap", "least_static", "under_cap"]

TARGET = 0.7
_TOLERANCE, _STABLE_S, _PODS, _PERIOD_S = 0.1, 300.0, 4, 15.0
PROFILED = 3  # windows a limit: of 1 to 6, the most saved with promises kept nearly as often
_SAME_W = 0.5


class Peak:
    """Replicas that stay."""

    def __init__(self, replicas: Mapping[str, int]) -> None:
        self._replicas = replicas

    def on(self, event: ControlEvent) -> list[ControlInstruction]:
        """All of them at the beginning."""
        if isinstance(event, ServiceStarted) and event.replicas != self._replicas[event.name]:
            return [ScaleService(event.name, self._replicas[event.name], "the peak")]
        return []


@dataclass
class _Pods:
    """One service as the autoscaler sees it."""

    each: float  # sequences in flight that the objective allows a replica
    least: int
    most: int
    target: float  # share of `each` that is aimed at
    wanted: int
    serving: int
    asked: list[tuple[float, int]] = field(default_factory=list)  # what was desired, and when
    risen: list[tuple[float, int]] = field(default_factory=list)  # replicas before each rise of the last period


class Hpa:
    """The autoscaler for all services."""

    def __init__(self, scene: Scene, target: float | Mapping[str, float] = TARGET) -> None:
        """`target` is one for all services, or one for each by name."""
        engines = Engines([service.engine for service in scene.services], scene.step_s)
        self._each = {one.name: engines.largest_within(at)[0] for at, one in enumerate(scene.services)}
        self._target = target
        self._pods: dict[str, _Pods] = {}

    def on(self, event: ControlEvent) -> list[ControlInstruction]:
        """A Scale where the desired replicas are others."""
        if isinstance(event, ServiceStarted):
            limits = event.promised.limits
            self._pods[event.name] = _Pods(
                self._each[event.name],
                limits.least,
                limits.most,
                self._target if isinstance(self._target, float) else self._target.get(event.name, TARGET),
                event.replicas,
                event.replicas,
            )
        elif isinstance(event, ServiceReady):
            self._pods[event.name].serving = event.replicas
        elif isinstance(event, ServiceWindow):
            return self._looked(event, self._pods[event.name])
        return []

    def _looked(self, event: ServiceWindow, pods: _Pods) -> list[ControlInstruction]:
        load = ((event.window.running or 0.0) + (event.window.waiting or 0.0)) / pods.each
        desired = self._desired(load, pods)
        pods.asked = [one for one in pods.asked if event.at_s - one[0] < _STABLE_S] + [(event.at_s, desired)]
        before = pods.wanted
        if desired > before:
            pods.risen = [one for one in pods.risen if event.at_s - one[0] < _PERIOD_S]
            origin = min([replicas for _, replicas in pods.risen], default=before)
            desired = min(desired, max(origin + _PODS, 2 * origin))
            pods.risen.append((event.at_s, before))
        else:
            desired = min(before, max(most for _, most in pods.asked))
        pods.wanted = min(pods.most, max(pods.least, desired))
        return [ScaleService(event.name, pods.wanted, "utilisation")] if pods.wanted != before else []

    def _desired(self, load: float, pods: _Pods) -> int:
        serving = max(1, min(pods.serving, pods.wanted))
        ratio = load / serving / pods.target
        if abs(ratio - 1.0) <= _TOLERANCE:
            return pods.wanted
        if ratio > 1.0 and serving < pods.wanted:
            # Replicas that do not serve yet count as idle; if that turns the answer round, nothing is done.
            ratio = load / pods.wanted / pods.target
            if ratio <= 1.0 + _TOLERANCE:
                return pods.wanted
        return math.ceil(ratio * pods.wanted - 1e-9)


class Zeus:
    """Each job alone: every limit for some windows, then the best."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Profiled] = {}
        self._asked: list[tuple[str, Holding]] = []  # by number

    def on(self, event: ControlEvent) -> list[ControlInstruction]:
        """The next limit."""
        if isinstance(event, JobStarted):
            self._jobs[event.name] = _Profiled(event, max(event.limits_w))
        elif isinstance(event, WorkloadEnded):
            self._jobs.pop(event.name, None)
        elif isinstance(event, LimitFailed):
            name, holding = self._asked[event.number]
            if name in self._jobs:
                return [self._set(name, self._jobs[name], holding)]
        elif isinstance(event, JobMeasured) and event.name in self._jobs:
            job = self._jobs[event.name]
            wanted_w = job.next_w(event)
            if abs(wanted_w - job.limit_w) > _SAME_W:
                job.limit_w = wanted_w
                return [self._set(event.name, job, holding) for holding in job.began.holdings]
        return []

    def _set(self, name: str, job: "_Profiled", holding: Holding) -> SetPowerLimit:
        number = len(self._asked)
        self._asked.append((name, holding))
        return SetPowerLimit(holding.name, holding.node, job.limit_w, number, name, "Zeus")


@dataclass
class _Profiled:
    """One job under Zeus."""

    began: JobStarted
    limit_w: float
    seen: dict[float, list[tuple[float, float]]] = field(default_factory=dict)  # seconds and joules a unit, by limit
    chosen_w: float | None = None

    def next_w(self, event: JobMeasured) -> float:
        if self.chosen_w is not None:
            return self.chosen_w
        window = event.window
        self.seen.setdefault(window.limit_w, []).append((window.time_s / window.work, window.energy_j / window.work))
        for limit_w in sorted(self.began.limits_w, reverse=True):
            if len(self.seen.get(limit_w, ())) < PROFILED:
                return limit_w
        means = {limit_w: tuple(np.mean(rows, axis=0).tolist()) for limit_w, rows in self.seen.items()}
        base_s, base_j = means[max(means)]
        promise = self.began.promise
        if isinstance(promise, BestEffort):
            weight = promise.energy_weight
            cost = {at: weight * j / base_j + (1.0 - weight) * s / base_s for at, (s, j) in means.items()}
        else:
            share = promise.share if isinstance(promise, MaxSlowdown) else SLOWDOWN
            cost = {at: j for at, (s, j) in means.items() if s <= (1.0 + share) * base_s}
        self.chosen_w = min(cost, key=lambda at: cost[at])
        return self.chosen_w


Opening = Callable[[Sequence[float]], float]


def under_cap(share: float) -> Opening:
    """The largest limit up to a share of the largest."""

    def opening(limits_w: Sequence[float]) -> float:
        most_w = share * max(limits_w) + _SAME_W
        return max((limit_w for limit_w in limits_w if limit_w <= most_w), default=min(limits_w))

    return opening


class Baseline:
    """Parts that look after services and jobs, and a limit that jobs begin with."""

    placement, objective = "bestfit", "balanced"

    def __init__(self, *parts: Peak | Hpa | Zeus, opening: Opening = max) -> None:
        self._parts, self._opening = parts, opening

    def on(self, event: ControlEvent) -> list[ControlInstruction]:
        """What the parts ask for."""
        return [one for part in self._parts for one in part.on(event)]

    def opening_w(self, job: Job, holdings: Sequence[Holding]) -> float | None:
        """The same for all, whatever else runs."""
        del holdings
        return self._opening(job.limits_w)

    def earned_s(self, job: str) -> float:
        """They keep no books."""
        del job
        return 0.0


def best_cap(scene: Scene) -> float:
    """The least share, in steps of 0.05, at which the tables say that every promised slowdown and deadline is kept."""
    share = 1.0
    while share > 0.3:
        opening = under_cap(share - 0.05)
        for job in scene.jobs:
            slower = job.curve.interpolate(opening(job.limits_w)).time_s / job.curve.largest.time_s
            if not isinstance(job.promise, BestEffort) and slower > 1.0 + SLOWDOWN:
                return share
        share -= 0.05
    return share


def _violations(services: Sequence[Service], replicas: Sequence[int], scene: Scene) -> np.ndarray:
    """(S,) windows violated with constant replicas, the drift of the day in it."""
    engines = Engines([service.engine for service in services], scene.step_s)
    asked = np.stack([service.asked_hz for service in services], axis=1)
    serving = np.array([float(count) for count in replicas])
    drifting, at_s, slowness = scene.drift
    each = round(60.0 / scene.step_s)
    tokens, within, broken = np.zeros(len(services)), np.zeros(len(services)), np.zeros(len(services), int)
    for step in range(scene.steps):
        if step == round(at_s / scene.step_s):
            engines.become(drifting, slowness)
        served = engines.step(asked[step], serving)
        tokens += served.tokens
        within += served.within
        if (step + 1) % each == 0:
            broken += within < 0.95 * tokens
            tokens[:], within[:] = 0.0, 0.0
    return broken


def least_static(scene: Scene) -> dict[str, int]:
    """The least constant replicas of each service without a violated window, or its most; by bisection on the day itself."""
    services = scene.services
    low, high = [0] * len(services), [service.most for service in services]
    while any(top - bottom > 1 for bottom, top in zip(low, high, strict=True)):
        tried = [max(1, (bottom + top) // 2) for bottom, top in zip(low, high, strict=True)]
        broken = _violations(services, tried, scene)
        for at, count in enumerate(tried):
            if high[at] - low[at] > 1:
                low[at], high[at] = (count, high[at]) if broken[at] else (low[at], count)
    return {service.name: count for service, count in zip(services, high, strict=True)}
