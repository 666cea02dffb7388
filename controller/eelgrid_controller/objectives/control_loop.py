"""Runs the control cycle every few seconds and applies its instructions to the controller.

Reads the core and telemetry on the event loop in small batches, runs the cycle in a thread, sends the
resulting commands, solves budget allocations in a worker thread and feeds new profile points to the forecasts.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.control_cycle import ControlCycle, CycleResult, ObjectivesStatus
from eelgrid_controller.objectives.forecasts import (
    STORED_POINTS_MOST,
    FamilyLearner,
    ForecastQuestion,
    ForecastService,
    LearningProcess,
    ProfileForecast,
)
from eelgrid_controller.objectives.observation import (
    ClusterObservation,
    ClusterSums,
    CoreReader,
    NodeObservation,
    ObjectiveSettings,
    ObservedNode,
    ProgressReading,
    holds_model_data,
    iter_batches,
    node_readings,
    observe_node,
    read_back_limits,
)
from eelgrid_controller.objectives.power.budget_allocation import BudgetAllocation, solve_allocation
from eelgrid_controller.objectives.power.control_events import (
    LimitChange,
    LimitConfirmed,
    ScaleService,
    SolveAllocation,
)
from eelgrid_controller.objectives.power.power_model import is_higher_limit
from eelgrid_controller.objectives.predicted_plans import PredictedPlans
from eelgrid_controller.objectives.service_observer import RoomTimes
from eelgrid_controller.objectives.services.service_metrics import ScrapeRound, ScrapeTarget
from eelgrid_controller.objectives.start_times import is_divided
from eelgrid_controller.objectives.status import (
    ControlCounts,
    budget_statuses,
    objective_latency_s,
    promise_statuses,
    refusal_rule,
)
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.state.budget_power import BudgetMeter, BudgetPower
from eelgrid_controller.state.engine_reports import EngineOverrides
from eelgrid_controller.state.events import (
    ArraySubmitted,
    PolicyChanged,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadPlaced,
    WorkloadSubmitted,
)
from eelgrid_controller.state.measurements import JOB_PROFILE_PREFIX, MeasuredStart, WorkInterval, make_job_profile_name
from eelgrid_controller.state.policy import make_budget_key
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.errors import ContractError, Violation
from eelgrid_protos.faults import Fault, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    POINTS_A_CALL_MOST,
    BudgetStatus,
    ImagineBudgetsResponse,
    ListPromisesResponse,
    MeasuredPoint,
    Policy,
    PowerBudget,
    SubmitWorkloadRequest,
    Workload,
    WorkloadPhase,
)
from eelgrid_protos.schema import is_valid_message


class AllocationWorker:
    """Solves budget allocations in a thread, the newest first; used from one event loop."""

    def __init__(
        self,
        *,
        answered: asyncio.Event,
        seconds: Callable[[float], None],
        perf_s: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        """`answered` is set with each answer, `seconds` hears how long it took."""
        self._answered, self._seconds, self._perf_s, self._log = answered, seconds, perf_s, log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dividing")
        self._next: SolveAllocation | None = None
        self._working: asyncio.Task[None] | None = None
        self._found: list[tuple[int, BudgetAllocation | None]] = []

    def submit(self, division: SolveAllocation) -> None:
        """Work this out next."""
        self._next = division
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    def collect_answers(self) -> tuple[tuple[int, BudgetAllocation | None], ...]:
        """The answers since the last time, by number."""
        taken, self._found = tuple(self._found), []
        return taken

    def stop(self) -> None:
        """Hear of nothing more."""
        if self._working is not None:
            self._working.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        while (division := self._next) is not None:
            self._next = None
            shared: BudgetAllocation | None = None
            start_s = self._perf_s()
            try:
                shared = await asyncio.get_running_loop().run_in_executor(
                    self._thread, solve_allocation, division.problem
                )
            except Exception:  # noqa: BLE001  # watts stay shared as they are until the next
                self._log.exception("division=failed number=%d", division.number)
            self._seconds(self._perf_s() - start_s)
            self._found.append((division.number, shared))
            self._answered.set()


_Result = TypeVar("_Result")


class ControllerCommands(Protocol):
    """What the control loop needs of the controller's command loop."""

    listeners: list[Callable[[CommitResult], None]]
    outside: EngineOverrides

    async def read(self, view: Callable[[Core], _Result]) -> _Result:
        """What `view` makes of the core."""

    @property
    def core(self) -> Core:
        """The core at this moment."""

    async def submit(self, request: SubmitWorkloadRequest) -> Workload:
        """What would become of a workload; only dry runs."""

    async def scale(self, workload_id: str, replicas: int) -> Workload:
        """So many replicas, or as near as there is room for."""

    async def set_limit(self, workload_id: str, power_limit_w: float | None) -> Workload:
        """A limit on each GPU of a workload."""

    async def report_limits(self, highest_w: Mapping[str, float]) -> None:
        """The highest limits that GPUs were read to have, by workload, where above the journal's."""

    async def record_progress(self, workload_id: str, work_done: float, at_ns: int) -> None:
        """How much a job with an elastic deadline had done at a time."""

    async def record_measurements(self, points: Sequence[MeasuredPoint], starts: Sequence[MeasuredStart] = ()) -> int:
        """Points and starts that were measured; how many are new."""


class PageScraper(Protocol):
    """What the control loop needs of the scraper."""

    def set_targets(self, asked: dict[str, ScrapeTarget]) -> frozenset[str]:
        """From now on these; those that are too many."""

    def collect_rounds(self) -> dict[str, ScrapeRound]:
        """Rounds since the last time."""

    async def run(self) -> None:
        """Ask until cancelled."""


class DurationObservers(NamedTuple):
    """Callbacks that get how many seconds a cycle and an allocation took."""

    turn: Callable[[float], None] = lambda _: None
    division: Callable[[float], None] = lambda _: None


_CHANGED_PROFILES_MOST = 1024
_WANTED_MOST = 64  # profiles that others than promised workloads ask for


class ForecastFeed:
    """Feeds new profile points to the forecasts; used from the event loop."""

    def __init__(
        self,
        loop: CoreReader,
        catalogue: Catalogue,
        *,
        learner: FamilyLearner | None,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self.forecasts = ForecastService(
            catalogue, learner=learner or LearningProcess(), monotonic_s=clock.monotonic_s, log=log
        )
        self.foreseen = PredictedPlans(self.forecasts)
        self._loop = loop
        self._seen: tuple[int, frozenset[str]] | None = None
        self._wanted: dict[str, None] = {}

    def request_forecast(self, question: ForecastQuestion) -> ProfileForecast | None:
        """A prediction for a caller outside the control cycle, who asks again until there is one; withdraws no plan."""
        self._wanted.pop(question.profile, None)
        self._wanted[question.profile] = None
        if len(self._wanted) > _WANTED_MOST:
            self._wanted.pop(next(iter(self._wanted)))
        return self.forecasts.request_forecast(question)

    async def read_changed_points(self, promised: Iterable[str]) -> None:
        """Reads what changed since the last time; profiles of promised workloads first, POINTS_MOST points at most."""
        first = frozenset((*promised, *self._wanted))
        if not first:
            return
        revision, names = await self._loop.read(
            lambda core: (core.state.points.revision, _shared_points(core.state.points))
        )
        if (revision, first) == self._seen:
            return
        found: dict[str, tuple[Point, ...]] = {}
        left = STORED_POINTS_MOST
        for name in (*sorted(first.intersection(names)), *(one for one in names if one not in first)):
            of = await self._loop.read(lambda core, name=name: core.state.points.get(name, ()))  # type: ignore[misc]
            if len(of) <= left:
                found[name] = of
                left -= len(of)
            if left <= 0 or len(found) >= _CHANGED_PROFILES_MOST:
                break
            await asyncio.sleep(0)
        self.forecasts.update_points(found)
        self._seen = revision, first


def _shared_points(profiles: Iterable[str]) -> list[str]:
    """Without those of single jobs, which their profiles' points say as well."""
    return [name for name in profiles if not name.startswith(JOB_PROFILE_PREFIX)]


_PROFILES_MOST = 256  # whose points a new job may learn from
_BEHIND_S = 5.0
_ASKED_MOST = 32  # services of which it is asked in one cycle where their next replica would go


class MonotonicUnixClock:
    """Unix time that never goes back: a monotonic clock, set forward when the wall clock is far ahead of it.

    For the steering, which knows durations alone. What leaves it for others, or comes from them, is by the wall clock:
    `ahead_s` is how far this is ahead of it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = clock.now_ns() / 1e9 - clock.monotonic_s()

    def now_s(self) -> float:
        """Seconds since 1970."""
        now_s, wall_s = self._clock.monotonic_s() + self._offset_s, self._clock.now_ns() / 1e9
        if wall_s - now_s > _BEHIND_S:
            self._offset_s += wall_s - now_s
            return wall_s
        return now_s

    def lead_s(self) -> float:
        """Seconds by which the wall clock was set back since, 0 where it goes along."""
        found_s = self.now_s() - self._clock.now_ns() / 1e9
        return found_s if found_s > _BEHIND_S else 0.0


class ControlLoop:
    """Runs the control cycle on the controller's command loop; used from one event loop."""

    def __init__(
        self,
        *,
        loop: ControllerCommands,
        telemetry: Telemetry,
        pages: PageScraper,
        catalogue: Catalogue,
        settings: ObjectiveSettings,
        clock: Clock,
        log: logging.Logger,
        durations: DurationObservers | None = None,
        learner: FamilyLearner | None = None,
        worked: Callable[[Sequence[WorkInterval]], None] = lambda _: None,
    ) -> None:
        """`worked` hears what workloads have done since the turn before."""
        self.settings = settings
        self.counts = ControlCounts()
        self._durations = durations or DurationObservers()
        self.cycles = 0
        self.failures = 0
        self.turn_s = 0.0  # how long the last turn took in its thread
        self._loop = loop
        self._telemetry = telemetry
        self._pages = pages
        self._clock = clock
        self._log = log
        self._steady = MonotonicUnixClock(clock)
        self._telling = ForecastFeed(loop, catalogue, learner=learner, clock=clock, log=log)
        self.foresees = self._telling.request_forecast
        self._desk = ControlCycle(settings, catalogue, foreseen=self._telling.foreseen)
        self._standing = ObjectivesStatus(self._desk.steering.controller_status())
        self._promised: dict[str, None] = {}  # ids, in the order of their coming
        self._limited: dict[str, None] = {}  # ids of what was placed at limits before its start
        self._progress: dict[str, ProgressReading] = {}
        self._room = RoomTimes()
        self._unsteered: dict[str, str] = {}  # as logged
        self._read_w: dict[str, float] = {}  # limits above the journal's, as told last
        self._untold_starts: tuple[MeasuredStart, ...] = ()  # which the core has refused
        self._left_out = 0  # promised workloads that are too many
        self._worked = worked
        self._meter = BudgetMeter()
        self._sums = ClusterSums(loop, catalogue, every_s=settings.others_s, monotonic_s=clock.monotonic_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steering")
        self._early = asyncio.Event()  # the next turn need not wait: there is an answer to hear
        self._divisions = AllocationWorker(
            answered=self._early, seconds=self._durations.division, perf_s=clock.perf_s, log=log
        )
        for workload in loop.core.state.workloads.values():
            self._track_workload(workload.workload_id, workload)
        loop.listeners.append(self._on_commit)

    @property
    def objectives_status(self) -> ObjectivesStatus:
        """How everything stood after the last cycle."""
        return self._standing

    def promises(self) -> ListPromisesResponse:
        """How promises are kept, for operators."""
        state = self._loop.core.state
        return promise_statuses(self._standing, state.workloads, state.policy, self.budget_power())

    def budgets(self) -> tuple[BudgetStatus, ...]:
        """How the power budgets stand, as in `promises`."""
        return budget_statuses(self._standing.steering, self._loop.core.state.policy, self.budget_power())

    def budget_power(self) -> dict[str, BudgetPower]:
        """What the GPUs below each budget of the policy draw now, by the budget's key."""
        return self._measure_budgets(self._loop.core.state.policy, self._meter)

    def _measure_budgets(self, policy: Policy, meter: BudgetMeter) -> dict[str, BudgetPower]:
        now_s, now_ns = self._clock.monotonic_s(), self._clock.now_ns()
        readings = self._telemetry.readings(now_s=now_s, now_ns=now_ns)
        return meter.measure(policy, self._loop.core.state.nodes, readings)

    async def imagine(self, budgets: Sequence[PowerBudget]) -> ImagineBudgetsResponse:
        """What jobs would have under other budgets; changes nothing. Raises InvalidArgument."""
        policy = replace(await self._loop.read(lambda core: core.state.policy), budgets=tuple(budgets))
        draws = await self._sums.node_draws(self._unsteered, self._read_w)
        workloads = dict(self._loop.core.state.workloads)
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._desk.evaluate_policy(policy, draws, workloads)
            )
        except ControllerError as error:
            raise InvalidArgument(
                "the budgets do not form a tree", (Violation("budgets", error.problem, error.remedy),)
            ) from None
        measured = self._measure_budgets(policy, BudgetMeter())
        keys = (make_budget_key(one.budget.scope, one.budget.name) for one in found.budgets)
        of = zip(found.budgets, keys, strict=True)
        return replace(found, budgets=tuple(replace(one, **measured[key]._asdict()) for one, key in of))

    def progress(self, workload_id: str, work_done: float, at_ns: int | None = None) -> None:
        """A job tells how far it was at a time, by default now.

        Raises NotFound for none with a promise, InvalidArgument for a time that is yet to come.
        """
        workload = self._loop.core.state.workloads.get(workload_id)
        if workload is None or workload.spec.training is None:
            raise NotFound(f"no training job {workload_id} with a promise; submit it with one, then report progress")
        now_s = self._steady.now_s()
        at_s = now_s if at_ns is None else at_ns / 1e9 + self._steady.lead_s()
        if at_s > now_s + _BEHIND_S:
            found = Violation("at_ns", f"is {at_s - now_s:.0f} s ahead", "leave it out, or set the clock")
            raise InvalidArgument("progress lies in the future", (found,))
        last = self._progress.get(workload_id)
        if last is None or at_s > last.at_s:
            self._progress[workload_id] = ProgressReading(min(at_s, now_s), work_done)

    async def run(self) -> None:
        """Look and act until cancelled."""
        asking = asyncio.create_task(self._pages.run())
        try:
            while True:
                start_s = self._clock.monotonic_s()
                await self.run_cycle()
                spent_s = self._clock.monotonic_s() - start_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.05, self.settings.cycle_s - spent_s)):
                        await self._early.wait()
                if asking.done():
                    self._log.error("scraper=ended error=%r action=begin_again", asking.exception())
                    asking = asyncio.create_task(self._pages.run())
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            self._divisions.stop()
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._telling.forecasts.close()

    async def run_cycle(self) -> None:
        """One look and what comes of it; never raises."""
        self.cycles += 1
        self._early.clear()
        try:
            world = await self._world()
            turn = await asyncio.get_running_loop().run_in_executor(self._thread, self._run_cycle, world)
            self._standing = turn.standing
            self._count(turn, world)
            ahead_s = self._steady.lead_s()
            self._worked(
                [one._replace(begin_s=one.begin_s - ahead_s, end_s=one.end_s - ahead_s) for one in turn.worked]
            )
            self._log_changes(turn)
            raises = [one for one in turn.limits if _is_raise(one, world.workloads)]
            # First: what is reported next, or scaled, may start work on the watts that they use.
            for limit in raises:
                await self._limit(limit)
            await self._report_limits(world)
            await self._carry_out(turn._replace(limits=tuple(one for one in turn.limits if one not in raises)))
        except Exception:  # noqa: BLE001  # the next cycle tries again
            self.failures += 1
            self._log.exception("objectives=failed cycle=%d", self.cycles)

    # Reading

    def _track_workload(self, workload_id: str, workload: Workload) -> None:
        spec = workload.spec
        is_promised = spec.service is not None or spec.training is not None
        if is_promised and not workload.phase.is_ended:
            self._promised[workload_id] = None
        if workload.limit_before_start:
            self._limited[workload_id] = None

    def _on_commit(self, committed: CommitResult) -> None:
        self._sums.note_changes(committed.nodes)
        for event in committed.events:
            self._room.observe(event)
            if isinstance(event, WorkloadSubmitted | ArraySubmitted):
                if event.spec.service is not None or event.spec.training is not None:
                    ids = event.workload_ids if isinstance(event, ArraySubmitted) else (event.workload_id,)
                    self._promised.update(dict.fromkeys(ids))
            elif isinstance(event, WorkloadPlaced) and event.power_limit_w is not None:
                self._limited[event.workload_id] = None
            elif isinstance(event, WorkloadCancelled | WorkloadCompleted):
                self._promised.pop(event.workload_id, None)
                self._progress.pop(event.workload_id, None)
            elif isinstance(event, PolicyChanged):
                # Until a turn has seen new budgets, nothing is known to be claimed of them.
                self._early.set()

    async def _world(self) -> ClusterObservation:
        """Everything that a turn needs."""
        workloads: dict[str, Workload] = {}
        nodes: dict[str, ObservedNode] = {}
        points: dict[str, tuple[Point, ...]] = {}
        most, promised = self.settings.workloads_most, list(self._promised)
        if len(promised) > most and self._left_out != len(promised) - most:
            self._log.warning("promised=%d steered=%d reason=too_many", len(promised), most)
        self._left_out = max(0, len(promised) - most)
        for ids in iter_batches(promised[:most]):
            await self._loop.read(lambda core, ids=ids: _gather_workloads(core, ids, workloads, nodes, points))  # type: ignore[misc]
            await asyncio.sleep(0)
        await self._telling.read_changed_points(points)
        if self._desk.needs_related_points:
            await self._loop.read(lambda core: _learnable(core, points))
        limited, seen = dict[str, Workload](), dict(nodes)
        for ids in iter_batches(list(self._limited)):
            await self._loop.read(lambda core, ids=ids: self._gather_limited(core, ids, limited, seen))  # type: ignore[misc]
            await asyncio.sleep(0)
        jobs = [workload for workload in workloads.values() if workload.spec.training is not None]
        seen_nodes = {
            placement.node_name for workload in (*jobs, *limited.values()) for placement in workload.placements
        }
        looks: dict[str, NodeObservation] = {}
        for names in iter_batches(sorted(seen_nodes)):
            now_s, now_ns = self._clock.monotonic_s(), self._clock.now_ns()
            for name in names:
                looks[name] = node_readings(self._telemetry, seen[name].inventory, now_s=now_s, now_ns=now_ns)
            await asyncio.sleep(0)
        policy, outside = await self._loop.read(lambda core: core.state.policy), self._loop.outside
        risen = await self._sums.risen_draws(self._unsteered, self._read_w)
        draws = await self._sums.node_draws_if_due(policy, self._unsteered, self._read_w)
        free = await self._sums.free_gpus_if_due(workloads.values())
        starts = await self._loop.read(lambda core: core.state.starts.select(workloads))
        return ClusterObservation(
            at_s=self._steady.now_s(),
            policy=policy,
            workloads=workloads,
            limited=limited,
            nodes=nodes,
            points=points,
            looks=looks,
            rounds=self._pages.collect_rounds(),
            progress=dict(self._progress),
            draws=draws,
            risen=risen,
            free=free,
            divided=self._divisions.collect_answers(),
            advised=frozenset(outside.advised),
            bounds=dict(outside.bounds),
            pages=dict(outside.pages),
            grown=dict(outside.grown),
            serving=dict(outside.serving),
            room_s=self._room.list_times_s(),
            starts=starts,
            near=await self._find_near(workloads, [name for name, some in starts.items() if is_divided(some)]),
        )

    async def _find_near(self, workloads: Mapping[str, Workload], names: Sequence[str]) -> dict[str, bool]:
        """Returns whether the next replica of each service would have its model data."""
        found: dict[str, bool] = {}
        for name in names[:_ASKED_MOST]:
            spec = workloads[name].spec
            with contextlib.suppress(Fault, ContractError):
                tried = SubmitWorkloadRequest(spec=replace(spec, replicas=1), dry_run=True)
                places = (await self._loop.submit(tried)).placements
                nodes = [self._loop.core.state.nodes.get(place.node_name) for place in places]
                found[name] = bool(nodes) and all(
                    record is not None and holds_model_data(spec, record.inventory) for record in nodes
                )
        return found

    # Acting

    def _run_cycle(self, world: ClusterObservation) -> CycleResult:
        start_s = self._clock.perf_s()
        turn = self._desk.run_cycle(world)
        self._telling.forecasts.end_cycle()
        self.turn_s = self._clock.perf_s() - start_s
        self._durations.turn(self.turn_s)
        return turn

    def _count(self, turn: CycleResult, world: ClusterObservation) -> None:
        counts = self.counts
        counts.faults += len(turn.faults)
        counts.answered.update("confirmed" if isinstance(one, LimitConfirmed) else "failed" for one in turn.answers)
        objectives_s = {name: objective_latency_s(one.spec.service) for name, one in world.workloads.items()}
        counts.attainment.count_windows(turn.standing.steering.services, objectives_s)

    def _gather_limited(
        self, core: Core, ids: Sequence[str], limited: dict[str, Workload], nodes: dict[str, ObservedNode]
    ) -> None:
        """Those of some workloads that stand at limits that were set before their starts, with their nodes."""
        state = core.state
        for key in ids:
            workload = state.workloads.get(key)
            if workload is None or workload.phase is not WorkloadPhase.PLACED or not workload.limit_before_start:
                self._limited.pop(key, None)
                continue
            limited[key] = workload
            for placement in workload.placements:
                if placement.node_name not in nodes:
                    nodes[placement.node_name] = observe_node(state.nodes[placement.node_name])

    def _log_changes(self, turn: CycleResult) -> None:
        """Logs what changed in a cycle."""
        for name, error in turn.faults:
            self._log.error("workload=%s steering=failed error=%r", name, error)
        for name, words in turn.said:
            self._log.warning("workload=%s %s", name, words)
        for name, reason in turn.standing.unsteered.items():
            if self._unsteered.get(name) != reason:
                self._log.warning("workload=%s steered=no reason=%s", name, reason)
        self._unsteered = dict(turn.standing.unsteered)
        for name in self._pages.set_targets(turn.asked):
            self._log.warning("workload=%s scraped=no reason=too_many_pages", name)

    async def _carry_out(self, turn: CycleResult) -> None:
        for name, progress in turn.progress.items():
            await self._record_progress(name, progress)
        for scale in turn.scales:
            await self._scale(scale)
        for limit in turn.limits:
            await self._limit(limit)
        if turn.division is not None:
            self._divisions.submit(turn.division)
        await self._record(turn.points, turn.starts)

    async def _report_limits(self, world: ClusterObservation) -> None:
        """Before limits are lowered: what this turn lowers, the core counts as it was until the next."""
        if world.policy.budgets or self._read_w:
            jobs = self._standing.steering.jobs
            self._read_w = read_back_limits(world, jobs) if world.policy.budgets else {}
            await self._loop.report_limits(self._read_w)

    async def _record(self, points: Sequence[MeasuredPoint], starts: Sequence[MeasuredStart] = ()) -> None:
        most, told = POINTS_A_CALL_MOST, len(points)
        # What a job tells of itself may be any number; it keeps nothing of others from being recorded.
        points = [point for point in points if is_valid_message(point)]
        if len(points) < told:
            self._log.warning("points=%d recorded=0 reason=impossible", told - len(points))
        for first in range(0, len(points), most):
            # What was not learned is learned again.
            await self._record_some(points[first : first + most], ())
        # A start is measured once: what is refused is told again in the next turn.
        self._untold_starts = (*self._untold_starts, *starts)[-most:]
        if self._untold_starts and await self._record_some((), self._untold_starts):
            self._untold_starts = ()

    async def _record_some(self, points: Sequence[MeasuredPoint], starts: Sequence[MeasuredStart]) -> bool:
        """Returns whether the core took them."""
        try:
            recorded = await self._loop.record_measurements(points, starts)
        except Exception as error:  # noqa: BLE001  # one command's fault stops no other
            self._log_refusal("record", "points=%s recorded=%d refused=%s", str(len(points)), 0, error)
            return False
        self.counts.done["record"] += 1
        self._log.info("points=%d starts=%d recorded=%d source=telemetry", len(points), len(starts), recorded)
        return True

    async def _record_progress(self, name: str, progress: ProgressReading) -> None:
        """Tells the core how far a job with an elastic deadline is."""
        at_ns = int((progress.at_s - self._steady.lead_s()) * 1e9)
        try:
            await self._loop.record_progress(name, progress.work, at_ns)
        except Exception as error:  # noqa: BLE001  # it is told again
            self._log_refusal("progress", "workload=%s progress=%g refused=%s", name, progress.work, error)

    async def _scale(self, scale: ScaleService) -> None:
        try:
            workload = await self._loop.scale(scale.name, scale.replicas)
        except Exception as error:  # noqa: BLE001  # one command's fault stops no other
            self._log_refusal("scale", "workload=%s scale=%d refused=%s", scale.name, scale.replicas, error)
            return
        self.counts.done["scale"] += 1
        self._log.info(
            "workload=%s scale=%d replicas=%d reason=%s",
            scale.name,
            scale.replicas,
            workload.spec.replicas,
            scale.reason,
        )

    async def _limit(self, limit: LimitChange) -> None:
        at_s = self._steady.now_s()
        nodes = {node for _, node, _ in limit.numbers}
        try:
            await self._loop.set_limit(limit.name, limit.limit_w)
            epochs = await self._loop.read(
                lambda core: {name: core.state.nodes[name].plan_epoch for name in nodes if name in core.state.nodes}
            )
        except Exception as error:  # noqa: BLE001
            self._log_refusal("limit", "workload=%s limit_w=%g refused=%s", limit.name, limit.limit_w, error)
            self._desk.record_refusal(limit, at_s)
            return
        self.counts.done["limit"] += 1
        self._log.info("workload=%s limit_w=%g reason=%s", limit.name, limit.limit_w, limit.reason)
        self._desk.record_request(limit, epochs, at_s)

    def _log_refusal(self, command: str, words: str, name: str, value: float, error: Exception) -> None:
        """Counts and logs a refusal; an error of our own is logged with its trace."""
        self.counts.refused[command, refusal_rule(error)] += 1
        is_refusal = isinstance(error, Fault | ContractError)
        self._log.warning(words, name, value, error, exc_info=None if is_refusal else error)


def _is_raise(limit: LimitChange, workloads: Mapping[str, Workload]) -> bool:
    """Whether a limit is above the journal's."""
    workload = workloads.get(limit.name)
    limit_w = None if workload is None else workload.power_limit_w
    return limit_w is not None and is_higher_limit(limit.limit_w, limit_w)


def _gather_workloads(
    core: Core,
    ids: Sequence[str],
    workloads: dict[str, Workload],
    nodes: dict[str, ObservedNode],
    points: dict[str, tuple[Point, ...]],
) -> None:
    """Some promised workloads that are placed, with their nodes and the points of their profiles."""
    state = core.state
    for key in ids:
        workload = state.workloads.get(key)
        if workload is None or workload.phase is not WorkloadPhase.PLACED:
            continue
        workloads[key] = workload
        for placement in workload.placements:
            if placement.node_name not in nodes:
                nodes[placement.node_name] = observe_node(state.nodes[placement.node_name])
        own = make_job_profile_name(key)
        if own in state.points:
            points[own] = state.points[own]
        promise = workload.spec.service or workload.spec.training
        profile = "" if promise is None else promise.profile
        if profile and profile not in points:
            points[profile] = state.points.get(profile, ())


def _learnable(core: Core, points: dict[str, tuple[Point, ...]]) -> None:
    """Points of other profiles too, for jobs that begin."""
    for profile in core.state.points:
        if len(points) >= _PROFILES_MOST:
            return
        if profile.startswith(JOB_PROFILE_PREFIX):
            continue
        points.setdefault(profile, core.state.points[profile])
