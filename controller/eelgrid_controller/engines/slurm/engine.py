"""Slurm engine: looks at a cluster, has Steering decide, and carries out what it says, in the core and in Slurm.

Owns the interval of looks, the lease by which our job_submit plugin knows that somebody decides, and what is counted. Must
not decide anything about a job.

Theory. Level-triggered: a look reads all jobs and nodes, so nothing depends on what an earlier one did or failed to do. The
lease is renewed only after a look in which both could be read: when Slurm or this controller does not answer, new jobs are
not held, and the watchdog (deploy/slurm/release-held) lets go what is held. Instructions to the core run in order; changes of
jobs in Slurm run a few at a time, and one that fails is repeated by the next look.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.engines.node_reports import CorrectDevices, RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.engines.slurm.answers import SlurmUnreadable, parse_jobs, parse_nodes
from eelgrid_controller.engines.slurm.commands import SlurmCommands, SlurmFailed
from eelgrid_controller.engines.slurm.steering import (
    MARK_LEFT,
    MARK_PLACED,
    WORKLOAD_PREFIX,
    AdoptJob,
    CancelJob,
    DistinctNodes,
    EndJob,
    LetJobGo,
    PlaceJob,
    SlurmInstruction,
    Steering,
    SteeringSettings,
    SubmitJob,
    shorten_reason,
)
from eelgrid_controller.state.events import WorkloadCancelled, WorkloadPlaced
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, NotFound
from eelgrid_protos.messages import Workload

_LOG_SHOWN_MOST = 5
_BACKOFF_MOST_S = 30.0


def _view(core: Core) -> tuple[dict[str, Workload], dict[str, dict[int, str]]]:
    """Returns the jobs that the core holds, and by node its GPUs by index."""
    state = core.state
    jobs = {key: one for key, one in state.workloads.items() if key.startswith(WORKLOAD_PREFIX)}
    names = {place.node_name for one in jobs.values() for place in one.placements if place.gpu_uuids}
    records = ((name, state.nodes.get(name)) for name in names)
    return jobs, {name: {gpu.index: gpu.uuid for gpu in one.inventory.gpus} for name, one in records if one is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """Settings of the engine; the lease is good for `lease_s` after each look."""

    poll_s: float = 1.0
    lease: Path | None = None
    lease_s: float = 30.0
    max_concurrent_writes: int = 8
    steering: SteeringSettings = field(default_factory=SteeringSettings)


@dataclass(slots=True)
class SlurmCounts:
    """What the engine has done since its start."""

    looks: int = 0
    failures: int = 0
    unreadable: int = 0
    placed: int = 0
    left: int = 0
    refused: int = 0


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
        loop.eligibility.rules = self._distinct
        self._writes = asyncio.Semaphore(settings.max_concurrent_writes)
        # Something was placed or ended: the next look is due at once.
        self._is_due = asyncio.Event()
        self._is_unreadable_told = False
        loop.listeners.append(self._on_commit)

    def _on_commit(self, committed: CommitResult) -> None:
        for event in committed.events:
            if isinstance(event, WorkloadPlaced | WorkloadCancelled) and event.workload_id.startswith(WORKLOAD_PREFIX):
                self._is_due.set()
                return

    async def run(self) -> None:
        """Looks until it is cancelled; what fails is logged, counted and tried again."""
        pause_s = self._settings.poll_s
        while True:
            try:
                await self.look()
                pause_s = self._settings.poll_s
            except (SlurmFailed, SlurmUnreadable) as error:
                self.counts.failures += 1
                pause_s = min(2.0 * pause_s, _BACKOFF_MOST_S)
                self._log.warning("slurm=unread error=%s again_s=%.1f", error, pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_due.wait()

    async def look(self) -> None:
        """Reads the cluster and does what is to be done; raises SlurmFailed and SlurmUnreadable if it cannot be read."""
        self._is_due.clear()
        answers = await asyncio.gather(self._commands.read_jobs(), self._commands.read_nodes())
        jobs, nodes = await asyncio.to_thread(lambda: (parse_jobs(answers[0]), parse_nodes(answers[1])))
        self._count_unreadable((*jobs.unreadable, *nodes.unreadable))
        self._distinct.update(jobs.jobs, nodes.nodes)
        has_agent = frozenset(node.name for node in nodes.nodes if self._has_agent(node.name))
        workloads, gpus = await self._loop.read(_view)
        now_s = self._clock.now_ns() / 1e9
        found = self._steering.decide(jobs.jobs, nodes.nodes, workloads, has_agent=has_agent, gpus=gpus, now_s=now_s)
        writes = []
        for one in found:
            if isinstance(one, PlaceJob | LetJobGo | CancelJob):
                writes.append(self._write(one))
            else:
                await self._command(one)
        await asyncio.gather(*writes)
        self.counts.looks += 1
        self._renew_lease(now_s)

    def _count_unreadable(self, unreadable: tuple[str, ...]) -> None:
        self.counts.unreadable += len(unreadable)
        if unreadable and not self._is_unreadable_told:
            self._log.warning(
                "slurm=partly_read left_out=%d first=%s", len(unreadable), "; ".join(unreadable[:_LOG_SHOWN_MOST])
            )
        self._is_unreadable_told = bool(unreadable)

    async def _command(self, one: SlurmInstruction) -> None:
        """Carries out an instruction in the core; one that is refused is decided anew by the next look."""
        try:
            match one:
                case RegisterNode(inventory):
                    self._loop.presence.mark_connected(inventory.node_name)
                    await self._loop.register_node(inventory)
                case RemoveNode(name):
                    self._loop.presence.mark_disconnected(name, deadline_s=self._clock.monotonic_s())
                case ReportUsage(name, others):
                    await self._loop.update_external_usage(name, others)
                case SubmitJob(request):
                    await self._loop.submit(request)
                case AdoptJob(request, adoption):
                    await self._loop.adopt(request, adoption)
                case CorrectDevices(name, held):
                    await self._loop.correct_devices(name, held)
                case EndJob(workload_id, reason):
                    self._log.info("workload=%s ended reason=%s", workload_id, reason)
                    await self._loop.cancel(workload_id)
        except (Fault, ContractError) as error:
            await self._on_refusal(one, error)

    async def _on_refusal(self, one: SlurmInstruction, error: Exception) -> None:
        if isinstance(one, RegisterNode):
            self._steering.forget_report(one.inventory.node_name)
        elif isinstance(one, ReportUsage):
            self._steering.forget_report(one.node_name)
        if isinstance(error, NotFound):
            # It has ended or left meanwhile, which the next look tells.
            return
        self.counts.refused += 1
        if isinstance(one, SubmitJob):
            # The core could never place it, or holds too much: Slurm decides.
            job_id = one.request.spec.labels["slurm/job"]
            await self._write(LetJobGo(job_id, f"refused: {error}"))
            return
        self._log.warning("slurm=%s refused=%s", type(one).__name__, error)

    async def _write(self, one: PlaceJob | LetJobGo | CancelJob) -> None:
        """Changes a job in Slurm."""
        async with self._writes:
            try:
                match one:
                    case PlaceJob():
                        await self._place(one)
                    case LetJobGo(job_id, reason):
                        await self._leave(job_id, reason)
                    case CancelJob(job_id):
                        await self._commands.cancel_job(job_id)
            except SlurmFailed as error:
                self.counts.failures += 1
                self._log.warning("slurm=%s error=%s", type(one).__name__, error)

    async def _place(self, one: PlaceJob) -> None:
        job, names = one.job, ",".join(one.nodes)
        problem = await self._commands.check_placement(job, one.nodes)
        is_over = self._steering.note_answer(job, is_refused=bool(problem), now_s=self._clock.now_ns() / 1e9)
        if is_over:
            self._log.warning("job=%s nodes=%s refused_by=slurm again=no error=%s", job.job_id, names, problem)
            await self._leave(job.job_id, problem)
        elif problem:
            self._log.info("job=%s nodes=%s refused_by=slurm again=yes error=%s", job.job_id, names, problem)
        else:
            await self._commands.place_job(job.job_id, one.nodes, f"{MARK_PLACED} {names[:200]}")
            self.counts.placed += 1

    async def _leave(self, job_id: str, reason: str) -> None:
        """Leaves a job to Slurm's own scheduler, and says why."""
        words = shorten_reason(reason)
        await self._commands.leave_job(job_id, f"{MARK_LEFT} {words}")
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
