"""The steward: every few seconds it looks at all that was promised, and does what the steering says.

Owns the cycle: what is read from the core and from telemetry, the thread in which the desk
turns, and the commands that come of it. Must not know what is decided, or how pages come.

Theory. The core and telemetry are read on the event loop, in slices of a few hundred
workloads or nodes with a rest between them; a turn of the desk, in which models are solved,
runs in one thread beside it and touches frozen values alone. The next turn begins when the
one before is done, its commands included, so nothing piles up. Nothing here is journaled
but the commands themselves: after a restart the desk is made anew from the core's state and
from what agents and servers tell. A cycle that fails is told and the next one tries again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from eelgrid_controller.clock import Clock
from eelgrid_controller.core import Core
from eelgrid_controller.energy_ledger.working import Worked
from eelgrid_controller.errors import ControllerError
from eelgrid_controller.events import WorkloadCancelled, WorkloadSubmitted
from eelgrid_controller.loop import Committed
from eelgrid_controller.measured import OWN, own_profile
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.steering.events import LimitConfirmed, Scale
from eelgrid_controller.steward.counts import Counts, rule_of
from eelgrid_controller.steward.desk import Desk, LimitJob, StewardStanding, Turn
from eelgrid_controller.steward.divisions import Divisions
from eelgrid_controller.steward.forecasts import Learner
from eelgrid_controller.steward.meters import Progress
from eelgrid_controller.steward.ports import Commands, Durations, Pages
from eelgrid_controller.steward.read_limits import read_limits
from eelgrid_controller.steward.settings import StewardSettings
from eelgrid_controller.steward.statuses import objective_s, promises_of
from eelgrid_controller.steward.sums import Sums, slices
from eelgrid_controller.steward.telling import Telling
from eelgrid_controller.steward.views import look_of, node_of
from eelgrid_controller.steward.world import NodeLook, NodeView, World
from eelgrid_controller.telemetry import Telemetry
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.errors import ContractError, Violation
from eelgrid_protos.faults import Fault, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    POINTS_A_CALL_MOST,
    ImagineBudgetsResponse,
    ListPromisesResponse,
    MeasuredPoint,
    PowerBudget,
    Workload,
    WorkloadPhase,
)

__all__ = ["SteadyUnix", "Steward"]

_PROFILES_MOST = 256  # whose points a new job may learn from
_BEHIND_S = 5.0


class SteadyUnix:
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

    def ahead_s(self) -> float:
        """Seconds by which the wall clock was set back since, 0 where it goes along."""
        found_s = self.now_s() - self._clock.now_ns() / 1e9
        return found_s if found_s > _BEHIND_S else 0.0


class Steward:
    """Runs a desk over a controller's loop; used from one event loop."""

    def __init__(
        self,
        *,
        loop: Commands,
        telemetry: Telemetry,
        pages: Pages,
        catalogue: Catalogue,
        settings: StewardSettings,
        clock: Clock,
        log: logging.Logger,
        durations: Durations | None = None,
        learner: Learner | None = None,
        worked: Callable[[Sequence[Worked]], None] = lambda _: None,
    ) -> None:
        """`worked` hears what workloads have done since the turn before."""
        self.settings = settings
        self.counts = Counts()
        self._durations = durations or Durations()
        self.cycles = 0
        self.failures = 0
        self.turn_s = 0.0  # how long the last turn took in its thread
        self._loop = loop
        self._telemetry = telemetry
        self._pages = pages
        self._clock = clock
        self._log = log
        self._steady = SteadyUnix(clock)
        self._telling = Telling(loop, catalogue, learner=learner, clock=clock, log=log)
        self.foresees = self._telling.ask
        self._desk = Desk(settings, catalogue, foreseen=self._telling.foreseen)
        self._standing = StewardStanding(self._desk.steering.standing())
        self._promised: dict[str, None] = {}  # ids, in the order of their coming
        self._progress: dict[str, Progress] = {}
        self._unsteered: dict[str, str] = {}  # as logged
        self._read_w: dict[str, float] = {}  # limits above the journal's, as told last
        self._left_out = 0  # promised workloads that are too many
        self._worked = worked
        self._sums = Sums(loop, telemetry, catalogue, every_s=settings.others_s, clock=clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steering")
        self._early = asyncio.Event()  # the next turn need not wait: there is an answer to hear
        self._divisions = Divisions(
            answered=self._early, seconds=self._durations.division, perf_s=clock.perf_s, log=log
        )  # fmt: skip
        for workload in loop.core.state.workloads.values():
            self._note(workload.workload_id, workload)
        loop.listeners.append(self._on_commit)

    @property
    def scaled(self) -> int:
        """Services and jobs that were given other replicas, so far."""
        return self.counts.done["scale"]

    @property
    def limited(self) -> int:
        """Jobs that were given another limit, so far."""
        return self.counts.done["limit"]

    @property
    def standing(self) -> StewardStanding:
        """How everything stood after the last cycle."""
        return self._standing

    def promises(self) -> ListPromisesResponse:
        """How promises are kept, for operators."""
        state = self._loop.core.state
        return promises_of(self._standing, state.workloads, state.policy)

    async def imagine(self, budgets: Sequence[PowerBudget]) -> ImagineBudgetsResponse:
        """What jobs would have under other budgets; changes nothing. Raises InvalidArgument."""
        policy = replace(await self._loop.read(lambda core: core.state.policy), budgets=tuple(budgets))
        draws, workloads = await self._sums.all(self._unsteered), dict(self._loop.core.state.workloads)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._desk.imagined(policy, draws, workloads)
            )
        except ControllerError as error:
            raise InvalidArgument(
                "the budgets make no tree", (Violation("budgets", error.problem, error.remedy),)
            ) from None

    def progress(self, workload_id: str, work_done: float, at_ns: int | None = None) -> None:
        """A job tells how far it was at a time, by default now.

        Raises NotFound for none with a promise, InvalidArgument for a time that is yet to come.
        """
        workload = self._loop.core.state.workloads.get(workload_id)
        if workload is None or workload.spec.training is None:
            raise NotFound(f"no training job {workload_id} with a promise; submit it with one, then report progress")
        now_s = self._steady.now_s()
        at_s = now_s if at_ns is None else at_ns / 1e9 + self._steady.ahead_s()
        if at_s > now_s + _BEHIND_S:
            found = Violation("at_ns", f"is {at_s - now_s:.0f} s ahead", "leave it out, or set the clock")
            raise InvalidArgument("progress is of the future", (found,))
        last = self._progress.get(workload_id)
        if last is None or at_s > last.at_s:
            self._progress[workload_id] = Progress(min(at_s, now_s), work_done)

    async def run(self) -> None:
        """Look and act until cancelled."""
        asking = asyncio.create_task(self._pages.run())
        try:
            while True:
                start_s = self._clock.monotonic_s()
                await self.cycle()
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

    async def cycle(self) -> None:
        """One look and what comes of it; never raises."""
        self.cycles += 1
        self._early.clear()
        try:
            world = await self._world()
            turn = await asyncio.get_running_loop().run_in_executor(self._thread, self._turned, world)
            self._standing = turn.standing
            self._count(turn, world)
            ahead_s = self._steady.ahead_s()
            self._worked(
                [one._replace(begin_s=one.begin_s - ahead_s, end_s=one.end_s - ahead_s) for one in turn.worked]
            )
            self._told(turn)
            await self._tell_limits(world)
            await self._carry_out(turn)
        except Exception:  # noqa: BLE001  # the next cycle tries again
            self.failures += 1
            self._log.exception("steward=failed cycle=%d", self.cycles)

    # Reading

    def _note(self, workload_id: str, workload: Workload) -> None:
        spec = workload.spec
        is_promised = spec.service is not None or spec.training is not None
        if is_promised and workload.phase is not WorkloadPhase.CANCELLED:
            self._promised[workload_id] = None

    def _on_commit(self, committed: Committed) -> None:
        for event in committed.events:
            if isinstance(event, WorkloadSubmitted):
                if event.spec.service is not None or event.spec.training is not None:
                    self._promised[event.workload_id] = None
            elif isinstance(event, WorkloadCancelled):
                self._promised.pop(event.workload_id, None)
                self._progress.pop(event.workload_id, None)

    async def _world(self) -> World:
        """Everything that a turn needs."""
        workloads: dict[str, Workload] = {}
        nodes: dict[str, NodeView] = {}
        points: dict[str, tuple[Point, ...]] = {}
        most, promised = self.settings.workloads_most, list(self._promised)
        if len(promised) > most and self._left_out != len(promised) - most:
            self._log.warning("promised=%d steered=%d reason=too_many", len(promised), most)
        self._left_out = max(0, len(promised) - most)
        for ids in slices(promised[:most]):
            await self._loop.read(lambda core, ids=ids: _gather(core, ids, workloads, nodes, points))  # type: ignore[misc]
            await asyncio.sleep(0)
        await self._telling.look(points)
        if self._desk.learns:
            await self._loop.read(lambda core: _learnable(core, points))
        job_nodes = {
            placement.node_name
            for workload in workloads.values()
            if workload.spec.training is not None
            for placement in workload.placements
        }
        looks: dict[str, NodeLook] = {}
        for names in slices(sorted(job_nodes)):
            now_s, now_ns = self._clock.monotonic_s(), self._clock.now_ns()
            for name in names:
                looks[name] = look_of(self._telemetry, nodes[name].inventory, now_s=now_s, now_ns=now_ns)
            await asyncio.sleep(0)
        policy, outside = await self._loop.read(lambda core: core.state.policy), self._loop.outside
        draws = await self._sums.draws(policy, self._unsteered)
        free = await self._sums.free(workloads.values())
        return World(
            at_s=self._steady.now_s(), policy=policy, workloads=workloads, nodes=nodes, points=points, looks=looks,
            rounds=self._pages.take(), progress=dict(self._progress), draws=draws, free=free,
            divided=self._divisions.take(), advised=frozenset(outside.advised), bounds=dict(outside.bounds),
            pages=dict(outside.pages), grown=dict(outside.grown),
        )  # fmt: skip

    # Acting

    def _turned(self, world: World) -> Turn:
        start_s = self._clock.perf_s()
        turn = self._desk.turn(world)
        self._telling.forecasts.turned()
        self.turn_s = self._clock.perf_s() - start_s
        self._durations.turn(self.turn_s)
        return turn

    def _count(self, turn: Turn, world: World) -> None:
        counts = self.counts
        counts.faults += len(turn.faults)
        counts.answered.update("confirmed" if isinstance(one, LimitConfirmed) else "failed" for one in turn.answers)
        objectives_s = {name: objective_s(one.spec.service) for name, one in world.workloads.items()}
        counts.attainment.look(turn.standing.steering.services, objectives_s)

    def _told(self, turn: Turn) -> None:
        """The log hears what changed."""
        for name, error in turn.faults:
            self._log.error("workload=%s steering=failed error=%r", name, error)
        for name, words in turn.said:
            self._log.warning("workload=%s %s", name, words)
        for name, reason in turn.standing.unsteered.items():
            if self._unsteered.get(name) != reason:
                self._log.warning("workload=%s steered=no reason=%s", name, reason)
        self._unsteered = dict(turn.standing.unsteered)
        for name in self._pages.ask(turn.asked):
            self._log.warning("workload=%s scraped=no reason=too_many_pages", name)

    async def _carry_out(self, turn: Turn) -> None:
        for scale in turn.scales:
            await self._scale(scale)
        for limit in turn.limits:
            await self._limit(limit)
        if turn.division is not None:
            self._divisions.ask(turn.division)
        if turn.points:
            await self._record(turn.points)

    async def _tell_limits(self, world: World) -> None:
        """Before the commands: what this turn lowers, the core counts as it was until the next."""
        if world.policy.budgets or self._read_w:
            jobs = self._standing.steering.jobs
            self._read_w = read_limits(world, jobs) if world.policy.budgets else {}
            await self._loop.told_limits(self._read_w)

    async def _record(self, points: Sequence[MeasuredPoint]) -> None:
        try:
            recorded = await self._loop.record_points(points[:POINTS_A_CALL_MOST])
        except Exception as error:  # noqa: BLE001  # what was not learned is learned again
            self._refused("record", "points=%s recorded=%d refused=%s", str(len(points)), 0, error)
            return
        self.counts.done["record"] += 1
        self._log.info("points=%d recorded=%d source=telemetry", len(points), recorded)

    async def _scale(self, scale: Scale) -> None:
        try:
            workload = await self._loop.scale(scale.name, scale.replicas)
        except Exception as error:  # noqa: BLE001  # one command's fault stops no other
            self._refused("scale", "workload=%s scale=%d refused=%s", scale.name, scale.replicas, error)
            return
        self.counts.done["scale"] += 1
        self._log.info(
            "workload=%s scale=%d replicas=%d reason=%s",
            scale.name,
            scale.replicas,
            workload.spec.replicas,
            scale.reason,
        )

    async def _limit(self, limit: LimitJob) -> None:
        at_s = self._steady.now_s()
        nodes = {node for _, node, _ in limit.numbers}
        try:
            await self._loop.set_limit(limit.name, limit.limit_w)
            epochs = await self._loop.read(
                lambda core: {name: core.state.nodes[name].plan_epoch for name in nodes if name in core.state.nodes}
            )
        except Exception as error:  # noqa: BLE001
            self._refused("limit", "workload=%s limit_w=%g refused=%s", limit.name, limit.limit_w, error)
            self._desk.was_refused(limit, at_s)
            return
        self.counts.done["limit"] += 1
        self._log.info("workload=%s limit_w=%g reason=%s", limit.name, limit.limit_w, limit.reason)
        self._desk.was_asked(limit, epochs, at_s)

    def _refused(self, command: str, words: str, name: str, value: float, error: Exception) -> None:
        """A refusal is told, a fault of ours with its trace."""
        self.counts.refused[command, rule_of(error)] += 1
        is_refusal = isinstance(error, Fault | ContractError)
        self._log.warning(words, name, value, error, exc_info=None if is_refusal else error)


def _gather(
    core: Core,
    ids: Sequence[str],
    workloads: dict[str, Workload],
    nodes: dict[str, NodeView],
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
                nodes[placement.node_name] = node_of(state.nodes[placement.node_name])
        own = own_profile(key)
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
        if profile.startswith(OWN):
            continue
        points.setdefault(profile, core.state.points[profile])
