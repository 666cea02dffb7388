"""Slurm engine: looks at a cluster, has Steering decide, and carries out what it says, in the core and in Slurm.

Owns when it looks, the lease by which our job_submit plugin knows that somebody decides, and what is counted. Must
not decide anything about a job.

Theory. Level-triggered: a look reads all jobs and nodes, so nothing depends on what an earlier one did or failed to do. The
lease is renewed only after a look in which both could be read: when Slurm or this controller does not answer, new jobs are
not held, and the watchdog (deploy/slurm/release-held) lets go what is held. Instructions to the core are given in order; what
it decides by them is carried out by the same look, without asking Slurm again. Before it decides, the core learns
what has ended in Slurm, and what Slurm has begun there ahead of its decision. Changes of jobs in Slurm run a few at a time,
placements in one command, and one that fails is repeated by the next look.

Cost. A look costs processor time of this machine and of slurmctld, which jobs of a second would have to share. So while jobs
come and go, looks take at most half of the time, and no slot waits for one where jobs are released ahead (release_ahead.py). Between full
answers about jobs only columns are read (job_table.py), jobs that ended a while ago are not looked at, an equal request is not checked again on the same nodes for some
seconds, and nodes are read once in an interval. Our plugin says that a job was submitted by a file beside the lease.
"""

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.engines.core_port import CoreCommandPort, call_in_batches
from eelgrid_controller.engines.element_lists import UnreadableLog
from eelgrid_controller.engines.node_reports import (
    CorrectDevices,
    RegisterNode,
    RemoveNode,
    ReportUsage,
    carry_out_report,
    map_gpus_by_index,
)
from eelgrid_controller.engines.slurm.advice import (
    has_opted_in,
    parse_priorities,
    plan_factors,
    plan_order,
    plan_weights,
    select_kinds,
    select_ordered,
)
from eelgrid_controller.engines.slurm.answers import SlurmJob, SlurmNodes, SlurmUnreadable, parse_jobs, parse_nodes
from eelgrid_controller.engines.slurm.commands import JobPlacement, SlurmCommands, SlurmFailed
from eelgrid_controller.engines.slurm.dependencies import Dependencies
from eelgrid_controller.engines.slurm.job_table import JobTable
from eelgrid_controller.engines.slurm.marks import (
    MARK_LEFT,
    MARK_REQUEUED,
    WORKLOAD_PREFIX,
    find_run_suffix,
    list_job_ids,
    mark_placement,
    mark_requeue,
    name_workload,
    shorten_reason,
)
from eelgrid_controller.engines.slurm.power_saving import PowerSavingSettings, SetNodesPower, SlurmPowerSaving
from eelgrid_controller.engines.slurm.release_ahead import ENDS_REMEMBERED_S, expect_ends, judge_ahead, plan_releases
from eelgrid_controller.engines.slurm.shrinking import KeepNodes, ShrinkJob, classify_refusal
from eelgrid_controller.engines.slurm.slice_demand import SliceDemand
from eelgrid_controller.engines.slurm.steering import (
    AdoptJob,
    CancelJob,
    DistinctNodes,
    EndJob,
    HoldJob,
    LetJobGo,
    PlaceJob,
    ReportAttempt,
    RequeueJob,
    SlurmInstruction,
    Steering,
    SteeringSettings,
    SubmitJob,
    build_request,
)
from eelgrid_controller.partition.survey import survey_gpus
from eelgrid_controller.state.events import PreemptionStarted, WorkloadCancelled, WorkloadPlaced
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, NotFound
from eelgrid_protos.messages import AttemptStatus, Workload, WorkloadPhase

_NAMES_SHOWN_MOST = 500
_BACKOFF_MOST_S = 30.0
# For so long a job that Slurm did not requeue is asked no more to make room.
_REQUEUED_AGAIN_S = 600.0
# While something happens, the next look comes after so many times as long as the last one took, or this.
_PAUSE_TIMES, _PAUSE_LEAST_S = 1.0, 0.05
# What our plugin's file has behind the lease's name, and how often it is looked for between looks.
_SUBMITTED, _NEWS_EVERY_S = ".submitted", 0.05
# Decisions of one look on the same answers, the first included: an end, a placement by it, and its consequences.
_ROUNDS_MOST = 4
# Of jobs that were released ahead so many may have run in one place since the last look.
_TURNS_MOST = 20
# Seconds between full answers about jobs; and how many times as long as reading one they are apart at least.
_FULL_EVERY_S, _FULL_TIMES = 10.0, 5.0
# The same where only the indexes of GPUs are to be learned.
_INDEXES_TIMES = 20.0
# Jobs are released ahead for so many times as long as looks are apart, within these bounds.
_AHEAD_TIMES, _AHEAD_LEAST_S, _AHEAD_MOST_S = 3.0, 0.5, 8.0
# For how long Slurm's yes to a request on some nodes is good for equal ones, and how many are remembered.
_ACCEPTED_S = 10.0
_ACCEPTED_MOST = 10_000
# Jobs that are submitted to the core in one commit, and for how long one decision goes on with that.
_SUBMITTED_AT_ONCE, _SUBMITTING_MOST_S = 16, 0.25
# Placements of one command, each two calls of slurmctld of some milliseconds.
_PLACED_AT_ONCE_LEAST, _PLACED_AT_ONCE_MOST = 8, 200


JobChange: TypeAlias = LetJobGo | CancelJob | RequeueJob | ShrinkJob


class _View(NamedTuple):
    """The jobs that matter, what the core holds of them, by node its GPUs by index, and the policy's classes."""

    jobs: list[SlurmJob]
    workloads: dict[str, Workload]
    gpus: dict[str, dict[int, str]]
    priority_classes: frozenset[str]


def _view(core: Core, table: JobTable, now_s: float) -> _View:
    """Looks at what is live in Slurm or in the core, and at what has just ended; the rest costs nothing."""
    state = core.state
    found = {key: state.workloads[key] for key in state.live_ids if key.startswith(WORKLOAD_PREFIX)}
    jobs = table.select_jobs(ended_since_s=now_s - ENDS_REMEMBERED_S)
    names = set(map(name_workload, jobs))
    # Those that have ended in Slurm, or run there as another restart.
    there = {job.job_id for job in jobs}
    jobs += table.list_jobs(sorted(set(list_job_ids(found.keys() - names)) - there))
    for key in names - found.keys():
        if (ended := state.workloads.get(key)) is not None:
            found[key] = ended
    gpus = map_gpus_by_index(state, found.values())
    return _View(jobs, found, gpus, frozenset(one.name for one in state.policy.priority_classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """Settings of the engine; the lease is good for `lease_s` after each look."""

    poll_s: float = 1.0
    lease: Path | None = None
    lease_s: float = 30.0
    max_concurrent_writes: int = 8
    # Nothing is held: by the weights of nodes Slurm is told what the core prefers, at most once in so many seconds.
    advises: bool = False
    advice_s: float = 10.0
    steering: SteeringSettings = field(default_factory=SteeringSettings)
    # None: nodes never sleep by us.
    power_saving: PowerSavingSettings | None = None
    # Idle nodes are cut into the MIG slices that jobs wait for.
    cuts_slices: bool = False


@dataclass(slots=True)
class SlurmCounts:
    """What the engine has done since its start."""

    looks: int = 0
    failures: int = 0
    unreadable: int = 0
    placed: int = 0
    # Of these, ahead of capacity; and how many of them were held again.
    ahead: int = 0
    held_again: int = 0
    left: int = 0
    refused: int = 0
    # Running jobs that gave nodes back, and those that were to and kept them.
    shrunk: int = 0
    kept: int = 0
    weighed: int = 0
    ranked: int = 0
    powered_down: int = 0
    powered_up: int = 0
    # Layouts of nodes that were changed for jobs that wait.
    cut: int = 0


class SlurmEngine:
    """Steers the jobs of one Slurm cluster by one core."""

    def __init__(
        self,
        commands: SlurmCommands,
        *,
        loop: CoreCommandPort,
        has_agent: Callable[[str], bool],
        settings: SlurmSettings,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        """`has_agent` says of a node whether an agent speaks for it."""
        self.counts = SlurmCounts()
        self._commands, self._loop, self._has_agent = commands, loop, has_agent
        self._settings, self._clock, self._log = settings, clock, log
        self._steering, self._distinct = Steering(settings.steering), DistinctNodes()
        self._saving = None if settings.power_saving is None else SlurmPowerSaving(settings.power_saving)
        self._slices = SliceDemand() if settings.cuts_slices else None
        loop.eligibility.rules = self._distinct
        loop.outside.own_ids.add(WORKLOAD_PREFIX)
        self._writes = asyncio.Semaphore(settings.max_concurrent_writes)
        # Something was placed or ended: the next look is due.
        self._is_due = asyncio.Event()
        self._unreadable_log = UnreadableLog("slurm", log)
        self._is_busy, self._submitted_ns = False, 0
        # When a full answer about jobs was last read, and how long that took.
        self._table, self._full_s, self._full_takes_s = JobTable(), -math.inf, 0.0
        self._looked_s, self._apart_s = -math.inf, settings.poll_s
        self._nodes, self._nodes_read_s = SlurmNodes(nodes=()), -math.inf
        self._advised_s = self._ordered_s = -math.inf
        self._accepted: dict[tuple[object, ...], float] = {}
        loop.listeners.append(self._on_commit)

    def _on_commit(self, committed: CommitResult) -> None:
        for event in committed.events:
            if isinstance(event, PreemptionStarted):
                self._is_due.set()
            if isinstance(event, WorkloadPlaced | WorkloadCancelled) and event.workload_id.startswith(WORKLOAD_PREFIX):
                self._is_due.set()
                return

    async def run(self) -> None:
        """Looks until it is cancelled; what fails is logged, counted and tried again."""
        pause_s = self._settings.poll_s
        while True:
            begun_s = self._clock.monotonic_s()
            try:
                await self.look()
                took_s = self._clock.monotonic_s() - begun_s
                rest_s = min(self._settings.poll_s, max(_PAUSE_LEAST_S, _PAUSE_TIMES * took_s))
                pause_s = rest_s if self._is_busy else self._settings.poll_s
                await asyncio.sleep(rest_s)
                await self._wait_for_news(pause_s - rest_s)
            except (SlurmFailed, SlurmUnreadable) as error:
                self.counts.failures += 1
                pause_s = min(2.0 * pause_s, _BACKOFF_MOST_S)
                self._log.warning("slurm=unread error=%s again_s=%.1f", error, pause_s)
                await asyncio.sleep(pause_s)

    async def _wait_for_news(self, most_s: float) -> None:
        """Waits for a decision of the core or a word of our plugin that a job was submitted, for so long at the most."""
        until_s = self._clock.monotonic_s() + most_s
        while not self._is_due.is_set() and (left_s := until_s - self._clock.monotonic_s()) > 0.0:
            if self._read_submitted_ns() != self._submitted_ns:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _NEWS_EVERY_S)):
                    await self._is_due.wait()

    def _read_submitted_ns(self) -> int:
        """Returns when our plugin has last held a job, by the file that it writes beside the lease; 0 if it never has."""
        lease = self._settings.lease
        try:
            return 0 if lease is None else lease.with_name(lease.name + _SUBMITTED).stat().st_mtime_ns
        except OSError:
            return 0

    async def look(self) -> None:
        """Reads the cluster and does what is to be done; raises SlurmFailed and SlurmUnreadable if it cannot be read."""
        self._is_due.clear()
        self._submitted_ns = self._read_submitted_ns()
        begun_s = self._clock.monotonic_s()
        self._looked_s, self._apart_s = begun_s, min(_AHEAD_MOST_S, begun_s - self._looked_s)
        await asyncio.gather(self._read_jobs(), self._read_nodes())
        nodes = self._nodes
        unreadable = (*self._table.unreadable, *nodes.unreadable)
        self.counts.unreadable += len(unreadable)
        self._unreadable_log.note(unreadable)
        now_s = self._clock.now_ns() / 1e9
        jobs = (await self._read_view(now_s)).jobs
        self._distinct.update(jobs, nodes.nodes)
        self._is_busy, written = False, set[str]()
        await self._follow_slurm(now_s)
        await self._decide(now_s, written)
        if not self._settings.advises:
            await self._release_ahead(now_s, written)
        if self._saving is not None:
            # By a clock that never falls: a step of the wall clock is no idle time.
            orders = self._saving.decide(jobs, nodes.nodes, now_s=self._clock.monotonic_s())
            await asyncio.gather(*map(self._set_power, orders))
        if self._slices is not None:
            await self._cut_nodes(self._slices, jobs, now_s)
        self.counts.looks += 1
        if self._settings.advises:
            await self._advise(self._table.jobs)
            await self._advise_order(self._table.jobs)
        else:
            self._renew_lease(now_s)

    async def _cut_nodes(self, demand: SliceDemand, jobs: Sequence[SlurmJob], now_s: float) -> None:
        """Has idle nodes cut into the slices that jobs wait for; what no longer holds is decided anew by the next look."""
        waiting = demand.select_jobs(jobs, now_s)
        if not waiting:
            return
        survey = await self._loop.read(lambda core: survey_gpus(core.state))
        for stage in demand.plan(survey, waiting, self._nodes.nodes, now_s):
            node = stage.turns[0].seat.node_name
            try:
                await self._loop.apply_partitions(stage)
            except Fault as error:
                self._log.info("slurm=cut node=%s refused=%s", node, error)
                continue
            self.counts.cut += 1
            self._log.info("slurm=cut node=%s gpus=%d waiting=%d", node, len(stage.turns), len(waiting))

    async def _read_view(self, now_s: float) -> _View:
        return await self._loop.read(lambda core: _view(core, self._table, now_s))

    async def _follow_slurm(self, now_s: float) -> None:
        """Reports how placed jobs have ended, and what Slurm has begun ahead in their places; then the core fills what is left.

        Several jobs may have run in one place since the last look, so that this is done in turn, as long as anything is new.
        Those that wait in Slurm where there is room now begin there before anything else could.
        """
        has_news = False
        for _ in range(_TURNS_MOST):
            view = await self._read_view(now_s)
            ends = self._steering.list_ends(view.jobs, view.workloads)
            if ends:
                await self._loop.record_engine_attempts(ends, more_follow=True)
            begun = self._steering.list_begun(view.jobs, view.workloads)
            adopted = await asyncio.gather(*map(self._adopt_begun, begun))
            if not ends and not any(adopted):
                break
            has_news = True
        if not has_news:
            return
        self._is_busy = True
        for waiting in self._steering.list_next(view.jobs, view.workloads):
            for one in waiting:
                if not await self._adopt_begun(one):
                    break
        await self._loop.reconsider()

    async def _adopt_begun(self, one: AdoptJob) -> bool:
        """Has the core place a job where Slurm has begun it; returns whether it could."""
        try:
            await self._loop.adopt(one.request, one.adoption)
        except (Fault, ContractError) as error:
            # Until its place is free here, too, it counts as external usage.
            self._log.info("slurm=begun refused=%s", error)
            return False
        return True

    async def _decide(self, now_s: float, written: set[str]) -> None:
        """Decides and carries out, until nothing follows from what was done; notes the jobs that were changed in Slurm."""
        nodes = self._nodes.nodes
        has_agent = frozenset(node.name for node in nodes if self._has_agent(node.name))
        for _ in range(_ROUNDS_MOST):
            self._is_due.clear()
            view = await self._read_view(now_s)
            found = self._steering.decide(
                view.jobs,
                nodes,
                view.workloads,
                has_agent=has_agent,
                gpus=view.gpus,
                now_s=now_s,
                dependencies=Dependencies(self._table.find_jobs),
                priority_classes=view.priority_classes,
            )
            # What was just changed in Slurm is not what these answers say of it.
            found = [one for one in found if _find_job_id(one) not in written]
            await self._carry_out(found, written)
            if not self._is_due.is_set():
                break

    async def _release_ahead(self, now_s: float, written: set[str]) -> None:
        """Releases jobs that Slurm can start before the next look where others end, and holds those again that it cannot."""
        view = await self._read_view(now_s)
        jobs = view.jobs
        horizon_s = min(_AHEAD_MOST_S, max(_AHEAD_LEAST_S, _AHEAD_TIMES * self._apart_s))
        ends = expect_ends(jobs, view.workloads, now_s=now_s, horizon_s=horizon_s)
        ahead = judge_ahead(jobs, view.workloads, ends)
        surplus = [HoldJob(job) for job in ahead.surplus if job.job_id not in written]
        places = list[PlaceJob]()
        if ahead.ends and any(one.phase is WorkloadPhase.PENDING for one in view.workloads.values()):
            copied = await self._loop.read(lambda core: core.state.copy())
            now_ns = self._clock.now_ns()

            def plan() -> list[PlaceJob]:
                return plan_releases(self._loop.make_core(copied), jobs, ahead, now_ns=now_ns)

            places = [one for one in await asyncio.to_thread(plan) if one.job.job_id not in written]
        if places or surplus:
            self._log.info(
                "slurm=ahead released=%d held_again=%d waiting=%d", len(places), len(surplus), len(ahead.waiting)
            )
        self.counts.ahead += len(places)
        self._is_busy |= bool(places)
        await asyncio.gather(self._place(places), self._hold(surplus))

    async def _hold(self, surplus: Sequence[HoldJob]) -> None:
        """Holds jobs again that were released ahead; one that has begun meanwhile runs on."""
        if not surplus:
            return
        async with self._writes:
            try:
                await self._commands.hold_jobs([one.job.job_id for one in surplus])
                self.counts.held_again += len(surplus)
            except SlurmFailed as error:
                self.counts.failures += 1
                self._log.warning("slurm=HoldJob jobs=%d error=%s", len(surplus), error)

    async def _advise(self, jobs: Sequence[SlurmJob]) -> None:
        """Has Slurm prefer the nodes on which the core would place the kinds of jobs that came last."""
        now_s = self._clock.monotonic_s()
        if now_s - self._advised_s < self._settings.advice_s:
            return
        preferred = set[str]()
        for job in select_kinds(jobs):
            asked = replace(build_request(job, self._settings.steering), workload_id="", dry_run=True)
            # Without its queue's quota, which is for Slurm to keep here; what the core would refuse is no kind to prepare for.
            asked = replace(asked, spec=replace(asked.spec, queue=""))
            with contextlib.suppress(Fault, ContractError):
                found = await self._loop.submit(asked)
                preferred.update(place.node_name for place in found.placements)
        if await self._weigh(preferred):
            self._advised_s = now_s

    async def _advise_order(self, jobs: Sequence[SlurmJob]) -> None:
        """Has Slurm try the jobs that opted in by the order of their queues, where there are any."""
        now_ns, now_s = self._clock.now_ns(), self._clock.monotonic_s()
        waiting, running = select_ordered(jobs, now_ns / 1e9)
        if not waiting or now_s - self._ordered_s < self._settings.advice_s:
            return
        self._ordered_s = now_s
        priorities = parse_priorities(await self._commands.read_priorities())
        copied = await self._loop.read(lambda core: core.state.copy() if priorities and core.queues.is_active else None)
        order = list[str]()
        if copied is not None:
            standing = [self._steering.adopt_job(job, None) for job in running]
            requests = [build_request(job, self._settings.steering) for job in waiting]

            def plan() -> list[str]:
                return plan_order(self._loop.make_core(copied), standing, requests, now_ns=now_ns)

            order = [*list_job_ids(await asyncio.to_thread(plan))]
        await self._rank(plan_factors(order, [job.job_id for job in waiting], priorities))

    async def _rank(self, factors: Mapping[str, int]) -> None:
        """Writes site factors."""
        if factors:
            await self._commands.rank_jobs(factors)
            self.counts.ranked += len(factors)
            self._log.info("slurm=ranked jobs=%d", len(factors))

    async def _weigh(self, preferred: Collection[str]) -> bool:
        """Writes the weights that differ; returns whether any did."""
        changes = plan_weights(self._nodes.nodes, preferred)
        for weight, names in changes.items():
            await self._commands.weigh_nodes(weight, names)
            self.counts.weighed += len(names)
        if changes:
            self._log.info(
                "slurm=weighed nodes=%d preferred=%s", sum(map(len, changes.values())), sorted(preferred)[:5]
            )
            # What was read of them is not true any more.
            self._nodes_read_s = -math.inf
        return bool(changes)

    async def take_back_advice(self) -> None:
        """Gives nodes the weights that they have without us; what Slurm does not take is logged."""
        try:
            if self._settings.advises:
                self._nodes = await asyncio.to_thread(parse_nodes, await self._commands.read_nodes())
                await self._weigh(())
                jobs = (await asyncio.to_thread(parse_jobs, await self._commands.read_jobs())).jobs
                waiting = [job.job_id for job in jobs if job.is_pending and has_opted_in(job)]
                priorities = parse_priorities(await self._commands.read_priorities()) if waiting else {}
                await self._rank(plan_factors((), waiting, priorities))
        except (SlurmFailed, SlurmUnreadable) as error:
            self._log.warning("slurm=advice taken_back=no error=%s: start and stop again", error)

    async def _read_jobs(self) -> None:
        """Brings the jobs up to date: by columns, and by a full answer where these do not tell all, or after an interval.

        Full answers take at most one part of the time in so many; after an interval one is due in any case.
        """
        waited_s = self._clock.monotonic_s() - self._full_s
        is_due = waited_s >= _FULL_EVERY_S
        if not is_due:
            columns = await self._commands.read_columns()
            try:
                await asyncio.to_thread(self._table.update, columns)
            except SlurmUnreadable as error:
                self._log.info("slurm=columns error=%s", error)
                is_due = True
            times = _FULL_TIMES if self._table.incomplete else _INDEXES_TIMES if self._table.unindexed else math.inf
            is_due |= waited_s >= times * max(_PAUSE_LEAST_S, self._full_takes_s)
        if is_due:
            begun_s = self._clock.monotonic_s()
            self._table.fill(await asyncio.to_thread(parse_jobs, await self._commands.read_jobs()))
            self._full_s = self._clock.monotonic_s()
            self._full_takes_s = self._full_s - begun_s

    async def _read_nodes(self) -> None:
        """Reads the nodes, at most once in an interval."""
        now_s = self._clock.monotonic_s()
        if now_s - self._nodes_read_s >= self._settings.poll_s:
            text = await self._commands.read_nodes()
            self._nodes, self._nodes_read_s = await asyncio.to_thread(parse_nodes, text), now_s

    async def _carry_out(self, found: Sequence[SlurmInstruction], written: set[str]) -> None:
        """Carries out instructions, and notes the jobs that they change in Slurm."""
        places, changes = list[PlaceJob](), list[JobChange]()
        commands, submissions = list[SlurmInstruction](), list[SubmitJob]()
        statuses = list[AttemptStatus]()
        for one in found:
            match one:
                case PlaceJob():
                    places.append(one)
                case LetJobGo() | CancelJob() | RequeueJob() | ShrinkJob():
                    changes.append(one)
                case KeepNodes():
                    self.counts.kept += 1
                    self._log.info("job=%s shrinks=no rule=%s reason=%s", one.job_id, one.rule, one.reason)
                case ReportAttempt(status):
                    statuses.append(status)
                case SubmitJob():
                    submissions.append(one)
                case _:
                    commands.append(one)
            self._is_busy |= not isinstance(one, RegisterNode | RemoveNode | ReportUsage)
        written.update(filter(None, map(_find_job_id, (*places, *changes))))
        # Each begins before the next, so that the core has them in order; those that wait together are one commit.
        refusals = asyncio.gather(*map(self._command, commands))
        ended = [self._loop.record_engine_attempts(statuses)] if statuses else []
        await asyncio.gather(refusals, *ended)
        left = [one for one in (*refusals.result(), *await self._submit(submissions)) if one is not None]
        changes += left
        written.update(one.job_id for one in left)
        await asyncio.gather(self._place(places), *map(self._write, changes))

    async def _submit(self, submissions: Sequence[SubmitJob]) -> list[LetJobGo | None]:
        """Submits jobs to the core, some at a time; after a while the rest is left to the next look, for others have ended."""

        async def submit(batch: Sequence[SubmitJob]) -> list[LetJobGo | None]:
            return await asyncio.gather(*map(self._command, batch))

        return await call_in_batches(
            submit, submissions, size=_SUBMITTED_AT_ONCE, most_s=_SUBMITTING_MOST_S, clock=self._clock
        )

    async def _command(self, one: SlurmInstruction) -> LetJobGo | None:
        """Carries out an instruction in the core; one that is refused is decided anew by the next look.

        Returns the job that is to be left to Slurm, since the core does not take it.
        """
        try:
            match one:
                case RegisterNode() | RemoveNode() | ReportUsage() | CorrectDevices():
                    await carry_out_report(one, self._loop, now_s=self._clock.monotonic_s())
                case SubmitJob(request):
                    await self._loop.submit(request)
                case AdoptJob(request, adoption):
                    await self._loop.adopt(request, adoption)
                case EndJob(workload_id, reason):
                    self._log.info("workload=%s ended reason=%s", workload_id, reason)
                    await self._loop.cancel(workload_id, reason=reason)
        except (Fault, ContractError) as error:
            return self._on_refusal(one, error)
        return None

    def _on_refusal(self, one: SlurmInstruction, error: Exception) -> LetJobGo | None:
        self._steering.reports.forget_refused(one)
        if isinstance(error, NotFound):
            # It has ended or left meanwhile, which the next look tells.
            return None
        self.counts.refused += 1
        if isinstance(one, SubmitJob):
            # The core could never place it, or holds too much: Slurm decides.
            return LetJobGo(one.request.spec.labels["slurm/job"], f"refused: {error}")
        self._log.warning("slurm=%s refused=%s", type(one).__name__, error)
        return None

    async def _write(self, one: JobChange) -> None:
        """Changes a job in Slurm."""
        async with self._writes:
            try:
                match one:
                    case LetJobGo(job_id, reason, run):
                        await self._leave(job_id, reason, run)
                    case RequeueJob():
                        await self._requeue(one)
                    case ShrinkJob():
                        await self._shrink(one)
                    case CancelJob(job_id):
                        await self._commands.cancel_job(job_id)
            except SlurmFailed as error:
                self.counts.failures += 1
                self._log.warning("slurm=%s error=%s", type(one).__name__, error)

    async def _set_power(self, order: SetNodesPower) -> None:
        """Has Slurm carry out what was decided of sleep; what fails is ordered again later."""
        names, power = ",".join(order.names)[:_NAMES_SHOWN_MOST], "on" if order.on else "off"
        async with self._writes:
            try:
                await self._commands.set_nodes_power(order.names, on=order.on)
            except SlurmFailed as error:
                self.counts.failures += 1
                self._log.warning("nodes=%s power=%s error=%s", names, power, error)
                return
        self._log.info("nodes=%s power=%s", names, power)
        if order.on:
            self.counts.powered_up += len(order.names)
        else:
            self.counts.powered_down += len(order.names)

    async def _place(self, places: Sequence[PlaceJob]) -> None:
        """Checks placements, equal ones once, and carries out those that Slurm takes, in batches."""
        now_s = self._clock.monotonic_s()
        for key in [key for key, until_s in self._accepted.items() if until_s <= now_s]:
            del self._accepted[key]
        equal: dict[tuple[object, ...], list[PlaceJob]] = {}
        for one in places:
            equal.setdefault(_describe_request(one), []).append(one)
        checks = await asyncio.gather(*(self._check(key, group) for key, group in equal.items()))
        accepted = [one for is_taken, group in zip(checks, equal.values(), strict=True) if is_taken for one in group]
        size = min(
            _PLACED_AT_ONCE_MOST, max(_PLACED_AT_ONCE_LEAST, len(accepted) // self._settings.max_concurrent_writes)
        )
        batches = (accepted[first : first + size] for first in range(0, len(accepted), size))
        await asyncio.gather(*map(self._place_batch, batches))

    async def _place_batch(self, batch: Sequence[PlaceJob]) -> None:
        placements = [
            JobPlacement(
                one.job.job_id,
                one.nodes,
                mark_placement(one.job, one.nodes),
                begins_now=one.job.admin_comment.startswith(MARK_REQUEUED),
                is_held=one.job.is_held,
            )
            for one in batch
        ]
        async with self._writes:
            try:
                await self._commands.place_jobs(placements)
                self.counts.placed += len(batch)
            except SlurmFailed as error:
                # Some of them may be placed, and some may have ended: the next look tells.
                self.counts.failures += 1
                self._log.warning("slurm=PlaceJob jobs=%d error=%s", len(batch), error)

    async def _check(self, key: tuple[object, ...], group: Sequence[PlaceJob]) -> bool:
        """Returns whether Slurm takes equal placements; those that it refuses for long are left to it."""
        if key in self._accepted:
            return True
        job, names = group[0].job, ",".join(group[0].nodes)
        async with self._writes:
            problem = await self._commands.check_placement(job, group[0].nodes)
        now_s = self._clock.now_ns() / 1e9
        over = [one for one in group if self._steering.note_answer(one.job, is_refused=bool(problem), now_s=now_s)]
        if problem:
            self._log.info("job=%s equal=%d nodes=%s refused_by=slurm error=%s", job.job_id, len(group), names, problem)
        elif len(self._accepted) < _ACCEPTED_MOST:
            self._accepted[key] = self._clock.monotonic_s() + _ACCEPTED_S
        await asyncio.gather(
            *(self._write(LetJobGo(one.job.job_id, problem, find_run_suffix(one.job))) for one in over)
        )
        return not problem

    async def _requeue(self, one: RequeueJob) -> None:
        """Has a job make room; one that Slurm does not requeue for long runs on, and is not asked again for a while."""
        job, problem = one.job, ""
        try:
            await self._commands.requeue_job(job, mark_requeue(job))
        except SlurmFailed as error:
            self.counts.failures += 1
            problem = str(error)
        now_s = self._clock.now_ns() / 1e9
        is_over = self._steering.note_answer(job, is_refused=bool(problem), now_s=now_s)
        self._log.info("job=%s makes_room=%s error=%s", job.job_id, not problem, problem)
        if is_over:
            reason = f"Slurm does not requeue it: {shorten_reason(problem)}"
            with contextlib.suppress(Fault):
                await self._loop.refuse_preemption(one.workload_id, reason, again_s=_REQUEUED_AGAIN_S)

    async def _shrink(self, one: ShrinkJob) -> None:
        """Tells a job which nodes it keeps, and takes the others once it has left them, or should have; what is refused is given up."""
        job_id, kept = one.job.job_id, ",".join(one.nodes)[:_NAMES_SHOWN_MOST]
        try:
            if not one.is_told:
                await self._commands.announce_shrink(job_id, mark_placement(one.job, one.nodes))
                self._log.info("job=%s shrinks=told keeps=%s", job_id, kept)
                return
            if not one.is_due and not one.leaving.isdisjoint(await self._commands.list_step_nodes(job_id)):
                return
            await self._commands.shrink_job(job_id, one.nodes)
        except SlurmFailed as error:
            rule = classify_refusal(str(error))
            self.counts.failures += 1
            self.counts.kept += 1
            self._steering.shrinking.keep(one.workload_id, self._clock.now_ns() / 1e9)
            self._log.warning("job=%s shrinks=no rule=%s error=%s", job_id, rule, error)
            return
        self.counts.shrunk += 1
        self._log.info("job=%s shrinks=yes keeps=%s overdue=%s", job_id, kept, one.is_due)

    async def _leave(self, job_id: str, reason: str, run: str) -> None:
        """Leaves a job to Slurm's own scheduler, and says why."""
        words = shorten_reason(reason)
        await self._commands.leave_job(job_id, f"{MARK_LEFT}{run} {words}")
        self.counts.left += 1
        self._log.info("job=%s left_to=slurm reason=%s", job_id, words)

    def _renew_lease(self, now_s: float) -> None:
        lease = self._settings.lease
        if lease is None:
            return
        until_s = int(now_s + self._settings.lease_s)
        try:
            lease.parent.mkdir(parents=True, exist_ok=True)
            # Renamed into place, so that the plugin never reads half a number.
            new = lease.with_name(f".{lease.name}.{os.getpid()}")
            new.write_text(f"{until_s}\n", encoding="ascii")
            new.replace(lease)
        except OSError as error:
            self._log.warning("lease=%s written=no error=%s: new jobs are not held", lease, error)

    def end_lease(self) -> None:
        """Says that nobody decides here any more."""
        if self._settings.lease is not None:
            with contextlib.suppress(OSError):
                self._settings.lease.unlink(missing_ok=True)


def _find_job_id(one: SlurmInstruction) -> str:
    """Returns which job an instruction changes in Slurm, or would; empty for one that is about the core alone."""
    match one:
        case PlaceJob(job) | RequeueJob(job) | ShrinkJob(job):
            return job.job_id
        case LetJobGo(job_id) | CancelJob(job_id):
            return job_id
        case SubmitJob(request):
            return request.spec.labels["slurm/job"]
    return ""


def _describe_request(one: PlaceJob) -> tuple[object, ...]:
    """Returns what Slurm is asked about a placement: equal ones get equal answers."""
    job = one.job
    return one.nodes, job.node_count, job.cpus, job.partition, job.features, job.memory_bytes, job.gpus
