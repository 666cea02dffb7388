"""Results of a day: joules, money, tokens, objectives, budgets.

Owns the counting. Must not know policies, planners or steering: its inputs are the watts of
every GPU, the tokens of every service, the ends of jobs, and the scene that they belong to.

A window of a service is WINDOW_S long. It is violated if less than 95 % of its tokens
came within the objective, or if none came while requests waited. Windows that end within
SHADOW_S after a node failed that held replicas of the service are counted apart, too:
until the loss is seen and a replica has started no policy without a spare can keep them.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.loop.scene import Scene
from bench.loop.training import Running
from eelgrid_controller.objectives.power.power_model import Deadline, MaxSlowdown

__all__ = ["JOULES_PER_KWH", "WINDOW_S", "Account", "Limit", "Outcome", "Prices", "Trace"]

WINDOW_S = 60.0
SHADOW_S = 180.0
LEVEL = 0.95
JOULES_PER_KWH = 3.6e6
_HAIR = 1e-9
_LATE = 1e-3  # of a promised time: less than a step of the world in the shortest job
_TRACE_S = 300.0
Floats = NDArray[np.float64]


class Prices(NamedTuple):
    """The tariff as the meter has it, by hour of the day."""

    per_kwh: tuple[float, ...]  # currency at the meter
    carbon_g_per_kwh: tuple[float, ...]
    pue: tuple[float, ...]


class Limit(NamedTuple):
    """A budget: the most watts of some GPUs together."""

    name: str
    limit_w: float
    members: NDArray[np.bool_]  # (G,)


class Trace(NamedTuple):
    """What is drawn, a value for every five minutes."""

    at_h: Floats
    services_w: Floats
    training_w: Floats
    replicas: Floats
    limit_share: Floats  # of training GPUs at work, in the mean


class ServiceOutcome(NamedTuple):
    """One service of a run."""

    name: str
    drawn_j: float  # of the GPUs of its replicas, serving or starting
    idle_j: float  # what those GPUs would have drawn without it
    replica_s: float
    windows: int
    violated: int
    shadowed: int


class Outcome(NamedTuple):
    """One policy on one seed."""

    energy_j: float
    services_j: float  # of the GPUs for services
    training_j: float
    money: float
    carbon_g: float
    tokens: float
    waiting: float  # sequences at the end
    windows: int
    violated: int
    shadowed: int  # of these, in the shadow of a failure
    worst_share: float  # of windows violated, of the worst service
    replica_hours: float
    jobs: int
    unfinished: int
    slowed: int  # promises of a slowdown, broken
    slowed_of: int
    late: int  # deadlines missed
    late_of: int
    worst_slowdown: float  # of those promised
    mean_slowdown: float  # of all jobs
    job_hours: float  # that jobs were at work
    wait_hours: float  # that they waited for a place
    budget_s: float  # seconds above any budget
    budget_worst_w: float  # most watts above one
    trace: Trace
    services: tuple[ServiceOutcome, ...] = ()


class Account:
    """Counts one day."""

    def __init__(self, scene: Scene, prices: Prices, limits: Iterable[Limit], is_service: NDArray[np.bool_]) -> None:
        self._scene, self._prices, self._limits = scene, prices, tuple(limits)
        self._members = np.stack([limit.members for limit in self._limits]).astype(np.float64)
        self._most_w = np.array([limit.limit_w for limit in self._limits])
        self._is_service = is_service
        count = len(scene.services)
        self._joules = np.zeros(len(is_service))
        self._money = self._carbon_g = self._tokens = 0.0
        self._window_tokens, self._window_within = np.zeros(count), np.zeros(count)
        self._window_s = 0.0
        self._windows = 0
        self._violated = np.zeros(count, np.int64)
        self._shadowed = np.zeros(count, np.int64)
        self._drawn_j, self._served_s = np.zeros(count), np.zeros(count)
        self._shadow_s = np.full(count, -np.inf)
        self._above_s = self._above_w = 0.0
        self._replica_s = 0.0
        self._since_s = 0.0
        self._sums = np.zeros(4)
        self._rows: list[tuple[float, ...]] = []
        self._waiting = np.zeros(count)

    def failed(self, services: Iterable[int], at_s: float) -> None:
        """A node with replicas of these services failed."""
        for service in services:
            self._shadow_s[service] = at_s

    def power(self, at_s: float, step_s: float, power_w: Floats, limit_share: float, replicas: float) -> None:
        """A step in which every GPU drew so many watts, (G,)."""
        joules = power_w * step_s
        self._joules += joules
        hour = int(at_s / 3600.0) % 24
        at_meter_kwh = float(joules.sum()) * self._prices.pue[hour] / JOULES_PER_KWH
        self._money += at_meter_kwh * self._prices.per_kwh[hour]
        self._carbon_g += at_meter_kwh * self._prices.carbon_g_per_kwh[hour]
        above = self._members @ power_w - self._most_w
        worst_w = float(above.max(initial=-np.inf))
        if worst_w > _HAIR * float(self._most_w.max(initial=1.0)):
            self._above_s += step_s
            self._above_w = max(self._above_w, worst_w)
        self._replica_s += replicas * step_s
        services_w = float(power_w[self._is_service].sum())
        self._sums += step_s * np.array([services_w, float(power_w.sum()) - services_w, replicas, limit_share])
        self._since_s += step_s
        if self._since_s >= _TRACE_S:
            self._rows.append(((at_s + step_s) / 3600.0, *(self._sums / self._since_s)))
            self._sums[:] = 0.0
            self._since_s = 0.0

    def replicas(self, step_s: float, drawn_w: Floats, replicas: Floats) -> None:
        """A step in which the replicas of every service, (S,), drew so many watts."""
        self._drawn_j += drawn_w * step_s
        self._served_s += replicas * step_s

    def tokens(self, at_s: float, step_s: float, tokens: Floats, within: Floats, waiting: Floats) -> None:
        """A step in which every service gave so many tokens, (S,), of them so many within its objective."""
        self._tokens += float(tokens.sum())
        self._window_tokens += tokens
        self._window_within += within
        self._waiting = waiting
        self._window_s += step_s
        if self._window_s >= WINDOW_S - _HAIR:
            short = self._window_within < LEVEL * self._window_tokens * (1.0 - _HAIR)
            broken = np.where(self._window_tokens > 0.0, short, waiting > 0.0)
            self._windows += len(broken)
            self._violated += broken
            self._shadowed += broken & (at_s + step_s - self._shadow_s <= SHADOW_S)
            self._window_tokens[:] = self._window_within[:] = 0.0
            self._window_s = 0.0

    def outcome(self, jobs: Iterable[Running], wait_s: float) -> Outcome:
        """The sums, at the end of the day."""
        listed = list(jobs)
        slowed = [_slowdown(one) for one in listed if isinstance(one.job.promise, MaxSlowdown) and one.working_s > 0.0]
        promised = [one for one in listed if isinstance(one.job.promise, Deadline)]
        allowed = next((one.job.promise.share for one in listed if isinstance(one.job.promise, MaxSlowdown)), 0.0)
        late = sum(1 for one in promised if not _in_time(one, one.job.promise))
        services_j = float(self._joules[self._is_service].sum())
        rows = np.array(self._rows).reshape(-1, 5).T
        return Outcome(
            energy_j=float(self._joules.sum()),
            services_j=services_j,
            training_j=float(self._joules.sum()) - services_j,
            money=self._money,
            carbon_g=self._carbon_g,
            tokens=self._tokens,
            waiting=float(self._waiting.sum()),
            windows=self._windows,
            violated=int(self._violated.sum()),
            shadowed=int(self._shadowed.sum()),
            worst_share=float(self._violated.max(initial=0)) * len(self._violated) / max(1, self._windows),
            replica_hours=self._replica_s / 3600.0,
            jobs=len(listed),
            unfinished=sum(1 for one in listed if one.ended_s is None),
            slowed=sum(1 for one in slowed if one > allowed + _LATE),
            slowed_of=len(slowed),
            late=late,
            late_of=len(promised),
            worst_slowdown=max(slowed, default=0.0),
            mean_slowdown=float(np.mean([_slowdown(one) for one in listed if one.working_s > 0.0] or [0.0])),
            job_hours=sum(one.working_s for one in listed) / 3600.0,
            wait_hours=wait_s / 3600.0,
            budget_s=self._above_s,
            budget_worst_w=self._above_w,
            trace=Trace(*rows),
            services=tuple(
                ServiceOutcome(
                    service.name,
                    float(self._drawn_j[at]),
                    service.engine.idle_w * float(self._served_s[at]),
                    float(self._served_s[at]),
                    self._windows // len(self._violated),
                    int(self._violated[at]),
                    int(self._shadowed[at]),
                )
                for at, service in enumerate(self._scene.services)
            ),
        )


def _slowdown(one: Running) -> float:
    """Time at work over that of the same work, repeated work too, at the largest limit, less one."""
    return one.working_s / ((one.done + one.redone) * one.job.curve.largest.time_s) - 1.0


def _in_time(one: Running, promise: object) -> bool:
    assert isinstance(promise, Deadline)
    if one.ended_s is None or one.first_s is None:
        return False
    return one.ended_s - one.first_s <= promise.time_s * (1.0 + _LATE)
