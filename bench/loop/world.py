"""A day of a cluster: physics in steps, and the events and instructions in between.

Owns time, delays, losses and noise. Must not know how a driver decides: it sends events
as steering expects them and carries out instructions, late, sometimes not at all, as agents,
engines and scrapers do. Every policy gets the same events.

    every step     replicas serve, jobs work, all GPUs draw watts, accounts are kept
    every SCRAPE_S of a service, a window of its metrics: 1 to 3 s late, 2 % half a minute late, 2 % never read
    every SCRAPE_S of a job, a window of its progress, 2 % without a measurement
    a command to set a limit takes effect after 2 to 6 s and is confirmed 0.5 to 2 s later; 2 % fail
    a replica serves 30 to 60 s after it was given a place
    a node that fails takes down what is on it at once, and is seen to be lost 20 s later
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.loop.accounts import Account, Outcome
from bench.loop.budgets import PRICES, budgets, is_service, limits, tariff
from bench.loop.cluster import Cluster, Place
from bench.loop.engines import Engines, Metrics
from bench.loop.scene import START_S, Failure, Job, Scene
from bench.loop.telemetry import promised_of, service_window
from bench.loop.training import Running, begun
from eelgrid_controller.objectives.power.bandit import MissedWindowReason
from eelgrid_controller.objectives.power.budgets import Holding
from eelgrid_controller.objectives.power.control_events import (
    BudgetsSet,
    ControlEvent,
    ControlInstruction,
    ControlTick,
    JobMeasured,
    JobMissed,
    JobPast,
    JobStarted,
    LimitConfirmed,
    LimitFailed,
    NodeReachable,
    NodeUnreachable,
    PricesSet,
    ScaleService,
    ServiceReady,
    ServiceStarted,
    ServiceWindow,
    SetPowerLimit,
    WorkloadEnded,
)

__all__ = ["SCRAPE_S", "Driver", "World"]

SCRAPE_S = 30.0
_TICK_S = 10.0
_SEEN_S = 20.0
_LOST, _LATE, _FAILS = 0.02, 0.02, 0.02
Floats = NDArray[np.float64]


class Driver(Protocol):
    """Who decides."""

    placement: str  # the Core's policy of placement
    objective: str  # and its weighting

    def on(self, event: ControlEvent) -> Sequence[ControlInstruction]:
        """What should be done after an event."""

    def opening_w(self, job: Job, holdings: Sequence[Holding]) -> float | None:
        """The limit at which a job may begin now; None if it may not."""

    def earned_s(self, job: str) -> float:
        """What a job has earned of its promise, as far as it is known."""


class World:
    """One scene under one driver."""

    def __init__(self, scene: Scene, driver: Driver) -> None:
        self.scene, self.driver = scene, driver
        self.rng = np.random.default_rng([scene.seed, 7])
        self.cluster = Cluster(scene, driver.placement, driver.objective)
        self.engines = Engines([service.engine for service in scene.services], scene.step_s)
        self.account = Account(scene, PRICES, limits(scene), is_service(scene))
        keys = [(node.name, node.key) for node in scene.nodes for _ in range(node.gpus)]
        self.idle_w = np.array([scene.catalogue.products[key].idle_w for _, key in keys])
        self.node_of = np.array([name for name, _ in keys])
        self.racks = {node.name: node.rack for node in scene.nodes}
        self.places: list[dict[str, Place]] = [{} for _ in scene.services]
        self.ready: list[set[str]] = [set() for _ in scene.services]
        self.jobs: dict[str, Running] = {}
        self.waiting: list[str] = []  # jobs without a place, or without watts to begin
        self.down: set[str] = set()
        self.wait_s = 0.0
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._job_w = np.zeros(len(keys))
        self._is_stale = True
        self._serving = np.zeros(len(scene.services))
        self._begun = np.zeros(len(scene.services))  # replicas that start
        self._loaded = self._starting = np.zeros(0, np.int64)
        self._loaded_of = self._starting_of = np.zeros(0, np.int64)
        self._each = np.array([float(service.gpus) for service in scene.services])

    def run(self) -> Outcome:
        """The whole day."""
        scene = self.scene
        asked = np.stack([service.asked_hz for service in scene.services], axis=1)
        self._begin()
        for step in range(scene.steps):
            self.now_s = step * scene.step_s
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
            self._step(asked[step])
        return self.account.outcome(self.jobs.values(), self.wait_s)

    def _at(self, at_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._number), what))

    def _later(self, low_s: float, high_s: float, what: Callable[[], None]) -> None:
        self._at(self.now_s + float(self.rng.uniform(low_s, high_s)), what)

    def _begin(self) -> None:
        scene = self.scene
        for at, service in enumerate(scene.services):
            self.cluster.begin(service, 0.0)
            self.places[at] = self.cluster.replicas(service.name)
            self.ready[at] = set(self.places[at])
            self._at(SCRAPE_S * (1.0 + at / len(scene.services)), lambda at=at: self._scrape(at))
        self.tell(BudgetsSet(0.0, budgets(scene)))
        self.tell(PricesSet(0.0, tariff()))
        for at, service in enumerate(scene.services):
            self.tell(ServiceStarted(0.0, service.name, promised_of(service), len(self.ready[at])))
        for job in scene.jobs:
            self._at(job.arrives_s, lambda job=job: self._arrive(job.name))
        self._known = {job.name: job for job in scene.jobs}
        for failure in scene.failures:
            self._at(failure.at_s, lambda failure=failure: self._fail(failure))
        service, at_s, slowness = scene.drift
        self._at(at_s, lambda: self.engines.become(service, slowness))
        self._at(_TICK_S, self._tick)

    # What the driver is told, and what it asks for.

    def tell(self, event: ControlEvent) -> None:
        """Tells the driver, and carries out what it asks for."""
        scaled = False
        for instruction in self.driver.on(event):
            if isinstance(instruction, ScaleService):
                self.cluster.scale(instruction.name, instruction.replicas, self.now_s)
                scaled = True
            else:
                self.cluster.limit(instruction.job, instruction.limit_w, self.now_s)
                self._command(instruction)
        if scaled:
            self._look()

    def _command(self, command: SetPowerLimit) -> None:
        self._later(2.0, 6.0, lambda: self._carry_out(command))

    def _carry_out(self, command: SetPowerLimit) -> None:
        """The node sets the limit, or fails to; an ended job's GPUs answer with what was asked."""
        if command.node in self.down:
            return
        running = self.jobs.get(command.job)
        luck = float(self.rng.uniform())
        has_w = running.limits_w.get(command.node) if running is not None else None
        if luck < _FAILS:
            if luck < _FAILS / 2.0:
                self._later(0.5, 2.0, lambda: self.tell(LimitFailed(self.now_s, command.number, has_w)))
                return
            self._later(5.0, 10.0, lambda: self.tell(LimitFailed(self.now_s, command.number, None)))
        else:
            self._later(0.5, 2.0, lambda: self._confirm(command))
        if running is not None:
            running.set_limit(command.node, command.limit_w)
            self._draw(running)

    def _confirm(self, command: SetPowerLimit) -> None:
        running = self.jobs.get(command.job)
        if running is not None:
            running.forget_window()
        self.tell(LimitConfirmed(self.now_s, command.number, command.limit_w))

    # Services.

    def _look(self) -> None:
        """New places of replicas begin to start; those that are gone serve no more."""
        for at, service in enumerate(self.scene.services):
            places = self.cluster.replicas(service.name)
            if places is self.places[at] or places.keys() == self.places[at].keys():
                continue
            for key in places.keys() - self.places[at].keys():
                self._later(*START_S, lambda at=at, key=key: self._serve(at, key))
            gone = self.ready[at] - places.keys()
            self.places[at] = places
            self.ready[at] -= gone
            self._is_stale = True
            if gone:
                self.tell(ServiceReady(self.now_s, service.name, len(self.ready[at])))

    def _serve(self, at: int, key: str) -> None:
        place = self.places[at].get(key)
        if place is not None and place.node not in self.down:
            self.ready[at].add(key)
            self._is_stale = True
            self.tell(ServiceReady(self.now_s, self.scene.services[at].name, len(self.ready[at])))

    def _scrape(self, at: int) -> None:
        self._at(self.now_s + SCRAPE_S, lambda: self._scrape(at))
        luck = float(self.rng.uniform())
        if luck < _LOST:
            return
        found: Metrics = self.engines.metrics(at)
        ended_s, name = self.now_s, self.scene.services[at].name
        window = service_window(found, self.rng)
        late = (25.0, 35.0) if luck < _LOST + _LATE else (1.0, 3.0)
        self._later(*late, lambda: self.tell(ServiceWindow(ended_s, name, window)))

    # Jobs.

    def _arrive(self, name: str) -> None:
        self.jobs[name] = begun(self._known[name])
        self.cluster.submit(self._known[name], self.now_s)
        self.waiting.append(name)
        self._start_jobs()

    def _start_jobs(self) -> None:
        for name in list(self.waiting):
            running = self.jobs[name]
            gpus = self.cluster.parts(running.job)
            if not gpus or self.down & gpus.keys():
                continue
            holdings = tuple(
                Holding(f"{name}/{node}", node, len(mine), (self.racks[node],)) for node, mine in gpus.items()
            )
            limit_w = self.driver.opening_w(running.job, holdings)
            if limit_w is None:
                continue
            self.waiting.remove(name)
            self._start(running, gpus, holdings, limit_w)

    def _start(
        self, running: Running, gpus: Mapping[str, list[int]], holdings: tuple[Holding, ...], limit_w: float
    ) -> None:
        name, job = running.job.name, running.job
        since_s = 0.0 if running.first_s is None else self.now_s - running.first_s
        running.put(dict(gpus), limit_w, self.now_s)
        self._at(running.from_s, lambda: self._draw(running))
        self._at(running.from_s + SCRAPE_S, lambda run=running.restarts: self._progress(running, run))
        past = JobPast(running.saved, since_s, self.driver.earned_s(name)) if since_s > 0.0 else JobPast()
        self.tell(
            JobStarted(
                self.now_s, name, job.promise, job.limits_w, holdings, held_w=(limit_w,) * len(holdings), past=past
            )
        )

    def _progress(self, running: Running, run: int) -> None:
        if running.ended_s is not None or running.restarts != run:
            return
        self._at(self.now_s + SCRAPE_S, lambda: self._progress(running, run))
        window = running.read_window(self.rng)
        if float(self.rng.uniform()) < _LOST:
            self.tell(JobMissed(self.now_s, running.job.name, MissedWindowReason.NO_PROGRESS))
        elif window is not None:
            self.tell(JobMeasured(self.now_s, running.job.name, window))

    def _draw(self, running: Running) -> None:
        """What the GPUs of a job draw from now on."""
        if self.now_s >= running.from_s and running.ended_s is None:
            for node, gpus in running.gpus.items():
                self._job_w[gpus] = running.gpu_w(node)

    def _release(self, running: Running) -> None:
        for gpus in running.gpus.values():
            self._job_w[gpus] = 0.0

    def _finish(self, running: Running) -> None:
        self._release(running)
        running.gpus, running.limits_w = {}, {}
        running.ended_s = self.now_s + self.scene.step_s
        self.cluster.end(running.job, self.now_s)
        self.tell(WorkloadEnded(self.now_s, running.job.name))
        self._start_jobs()

    # Nodes.

    def _fail(self, failure: Failure) -> None:
        self.down.add(failure.node)
        hit = []
        for at, places in enumerate(self.places):
            gone = {key for key in self.ready[at] if places[key].node == failure.node}
            if gone:
                hit.append(at)
            self.ready[at] -= gone
        self.account.failed(hit, self.now_s)
        self._is_stale = True
        stopped = [one for one in self.jobs.values() if failure.node in one.gpus]
        for running in stopped:
            self._release(running)
            running.lost()
        self._at(self.now_s + _SEEN_S, lambda: self._see(failure, hit, stopped))
        self._at(failure.back_s, lambda: self._return(failure))

    def _see(self, failure: Failure, hit: Sequence[int], stopped: Sequence[Running]) -> None:
        self.tell(NodeUnreachable(self.now_s, failure.node))
        for running in stopped:
            self.driver.earned_s(running.job.name)
            self.tell(WorkloadEnded(self.now_s, running.job.name))
        self.cluster.lose(failure.node, [running.job for running in stopped], self.now_s)
        for at in hit:
            self.tell(ServiceReady(self.now_s, self.scene.services[at].name, len(self.ready[at])))
        self._look()
        self.waiting += [running.job.name for running in stopped]
        self._start_jobs()

    def _return(self, failure: Failure) -> None:
        self.down.discard(failure.node)
        self.cluster.back(failure.node, self.now_s)
        self.tell(NodeReachable(self.now_s, failure.node, {}))
        self._look()
        self._start_jobs()

    # Time.

    def _tick(self) -> None:
        self._at(self.now_s + _TICK_S, self._tick)
        self.wait_s += _TICK_S * len(self.waiting)
        self.cluster.go_on(self.now_s)
        self._start_jobs()
        self.tell(ControlTick(self.now_s))
        self._look()

    def _step(self, asked_hz: Floats) -> None:
        scene = self.scene
        if self._is_stale:
            self._place()
        served = self.engines.step(asked_hz, self._serving)
        power_w = np.maximum(self.idle_w, self._job_w)
        power_w[self._loaded] = (served.power_w / self._each)[self._loaded_of]
        power_w[self._starting] = (self.engines.start_w / self._each)[self._starting_of]
        if self.down:
            power_w[np.isin(self.node_of, list(self.down))] = 0.0
        for running in list(self.jobs.values()):
            if running.gpus and running.step(self.now_s, scene.step_s):
                self._finish(running)
        share, replicas = self._limit_share(), float(self._serving.sum())
        self.account.power(self.now_s, scene.step_s, power_w, share, replicas)
        self.account.replicas(
            scene.step_s,
            served.power_w * self._serving + self.engines.start_w * self._begun,
            self._serving + self._begun,
        )
        self.account.tokens(self.now_s, scene.step_s, served.tokens, served.within, served.waiting)

    def _limit_share(self) -> float:
        at_work = [one for one in self.jobs.values() if one.gpus]
        if not at_work:
            return math.nan
        return sum(max(one.limits_w.values()) / one.job.limits_w[-1] for one in at_work) / len(at_work)

    def _place(self) -> None:
        """Which GPUs serve, and which start."""
        loaded, loaded_of, starting, starting_of = [], [], [], []
        for at, places in enumerate(self.places):
            for key, place in places.items():
                if place.node in self.down:
                    continue
                is_ready = key in self.ready[at]
                (loaded if is_ready else starting).extend(place.gpus)
                (loaded_of if is_ready else starting_of).extend([at] * len(place.gpus))
            self._serving[at] = float(len(self.ready[at]))
            self._begun[at] = float(sum(place.node not in self.down for place in places.values())) - self._serving[at]
        self._loaded, self._loaded_of = np.array(loaded, np.int64), np.array(loaded_of, np.int64)
        self._starting, self._starting_of = np.array(starting, np.int64), np.array(starting_of, np.int64)
        self._is_stale = False
