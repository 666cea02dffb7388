"""The controller's event loop: single owner of the cluster state and the only way to change it.

`ControllerLoop` applies commands in order, commits their events to the journal in batches, and answers a caller when
its events are on disk. Must not know how decisions are made (`core`), how calls arrive, or where a commit runs
(`journal_writer`).
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from eelgrid_controller.clock import Clock, RecentLatencies
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.nodes import NodeRemoval, PlanClaim, select_longest_lost_nodes
from eelgrid_controller.core.recovery import RecoveredState, recover_state
from eelgrid_controller.core.steps import CommandOrigin, CommitResult, CoreStep
from eelgrid_controller.errors import ControllerError, JournalError, JournalFenced, JournalUnavailable
from eelgrid_controller.partition.recommendation import PartitionStage
from eelgrid_controller.partition.survey import SurveyedGpu
from eelgrid_controller.runtime.access_control import bind_spec, check_owner, owner_of
from eelgrid_controller.runtime.audit_log import AuditedCall
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.core_command import CoreCommand, PrecedingChanges, change_nothing, describe_end
from eelgrid_controller.runtime.journal_writer import STEP_PAUSE_S, CheckpointWriter, JournalWriter, journal_fault
from eelgrid_controller.runtime.kernel_compilation import KernelReadiness
from eelgrid_controller.runtime.term_claims import TermClaims
from eelgrid_controller.runtime.withheld_starts import WithheldStarts
from eelgrid_controller.state.agent_liveness import AgentLiveness, LostNodeExpiry
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.engine_reports import Adoption, Eligibility, EngineOverrides, ExternalUsage
from eelgrid_controller.state.events import DeadlineBroken, Event, UnreadableEvent
from eelgrid_controller.state.journal import Journal
from eelgrid_controller.state.measurements import MeasuredStart
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, Internal, NotLeader, ResourceExhausted, Unavailable
from eelgrid_protos.messages import (
    AttemptStatus,
    AuditEntry,
    Inventory,
    LeaderTerm,
    MeasuredPoint,
    Move,
    NodeState,
    Policy,
    SubmitWorkloadRequest,
    Workload,
)

_Result = TypeVar("_Result")
_PROBE_EVERY_S = 1.0
_RETRY_EVERY_S = 0.25
_TICK_S = 0.25
# How soon a deleted data directory is detected while nothing is written.
_FILES_EVERY_S = 2.0
_STOPPING = "the controller is stopping; repeat the call when it is back"
_UNREADABLE = "this would write what could not be read back, so nothing was done; see the log"
# Lost nodes are removed after days, so a scan of all nodes once a minute is enough.
_EXPIRY_EVERY_S = 60.0


class ControllerLoop:
    """Runs a core over a journal. Used from one event loop; its public methods are the commands of callers."""

    def __init__(
        self,
        *,
        journal: Journal,
        fresh_state: Callable[[], ClusterState],
        make_core: Callable[[ClusterState], Core],
        config: ControllerConfig,
        clock: Clock,
        log: logging.Logger,
        observe_decision: Callable[
            [float, str, CommandOrigin | None], None
        ] = lambda _duration_s, _workload_id, _origin: None,
        observe_commit: Callable[[float], None] = lambda _: None,
        kernels: KernelReadiness | None = None,
    ) -> None:
        self.journal = journal
        self.config = config
        self.clock = clock
        self.presence = AgentLiveness()
        self.outside = EngineOverrides()
        self.eligibility = Eligibility()
        self.decisions = RecentLatencies(config.decisions_most)
        self.listeners: list[Callable[[CommitResult], None]] = []
        # Resolved with the error after which this process cannot continue.
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._fresh_state = fresh_state
        self.make_core = make_core
        self._log = log
        self._observe_decision = observe_decision
        self._observe_commit = observe_commit
        self._writer = JournalWriter(journal, clock)
        self._core: Core | None = None
        self._queue: deque[CoreCommand] = deque()
        self._wake = asyncio.Event()
        self._kernels = kernels or KernelReadiness()
        self._kernels.add_listener(self._wake.set)
        self._settled = asyncio.Event()
        self._settled.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._journal_fault: Fault | None = None
        self._under_way_s: float | None = None
        self._probe_at_s = 0.0
        self._checkpoints = CheckpointWriter(journal, self._writer, config=config, clock=clock, log=log)
        self._last_command_s = self._retry_at_s = self._files_at_s = 0.0
        self._preceding = PrecedingChanges(journal, asks_agents=config.kubernetes is None)
        self._lost = LostNodeExpiry(config.lost_node_ttl_s)
        self._expiry_s = clock.monotonic_s()
        self._is_drain_queued = self._is_round_queued = False
        self._withheld = WithheldStarts(log)
        # The address of the leader that followed this process, once that is known.
        self._leader = ""
        self._claims = TermClaims(journal, self._writer)

    # Life cycle

    async def start(self, recover: Callable[[], RecoveredState] | None = None) -> RecoveredState:
        """Recovers the state, by `recover` if somebody has followed the journal, and starts the loop; raises JournalError."""
        recovered = await self._writer.run_in_thread(
            recover or (lambda: recover_state(self.journal, self._fresh_state))
        )
        self._go_on_from(recovered)
        now_s = self.clock.monotonic_s()
        for name, node in recovered.state.nodes.items():
            if node.state is NodeState.READY:
                self.presence.mark_disconnected(name, deadline_s=now_s + self.config.restart_grace_s)
        self._last_command_s = now_s
        self._withheld.begin(now_s + self.config.restart_grace_s)
        self._preceding.begin(recovered.state)
        if not self._preceding.is_begun:
            # Starts the first batch at once; nobody waits for it, since a full disk may refuse it.
            self._queue_own(change_nothing)
        self._tasks = [asyncio.create_task(self._guard(part)) for part in (self._run, self._tick)]
        return recovered

    async def stop(self) -> None:
        """Finishes queued commands, writes a checkpoint and stops; the journal stays open for its owner to close.

        No checkpoint of a journal that others follow: they have the state, and nobody leads meanwhile.
        """
        self._stopping = True
        self._wake.set()
        if self._tasks:
            run, tick = self._tasks
            tick.cancel()
            await asyncio.gather(run, tick, return_exceptions=True)
            if self._checkpoints.events and not self.journal.is_remote and not self.failed.done():
                # Whoever has followed this process meanwhile writes one of its own.
                with contextlib.suppress(JournalFenced):
                    await self._checkpoints.write(self.core.state)
        self._writer.close()

    @property
    def queued(self) -> int:
        """Number of commands in the queue."""
        return len(self._queue)

    @property
    def lag_s(self) -> float:
        """Seconds that the oldest command not yet on disk has waited; 0 if none waits."""
        since_s = (
            self._under_way_s if self._under_way_s is not None else self._queue[0].asked_s if self._queue else None
        )
        return 0.0 if since_s is None else max(0.0, self.clock.monotonic_s() - since_s)

    @property
    def journal_fault(self) -> Fault | None:
        """The fault with which commands are currently refused; None if they are accepted."""
        return self._journal_fault

    @property
    def term(self) -> LeaderTerm:
        """The term of this process, by which agents know it from earlier leaders."""
        return self.journal.term

    @property
    def may_lead(self) -> bool:
        """Whether decisions may be taken and told now, as far as this process knows."""
        return self.journal.may_lead and not self.failed.done()

    async def raise_term(self, above: LeaderTerm) -> LeaderTerm:
        """Makes the term higher than one that somebody has met, unless it is; returns it. Raises Fault.

        Where the journal says that another leads, this process ends.
        """
        if self._stopping or self.failed.done():
            raise NotLeader("the controller is stopping; connect again", leader=self._leader)
        answer = self._claims.add_claim(above)
        self._wake.set()
        return await answer

    # Reads

    async def read(self, view: Callable[[Core], _Result]) -> _Result:
        """Returns the result of `view` on the core, at a moment when everything that it can see is on disk."""
        while not self._settled.is_set():
            await self._settled.wait()
        return view(self.core)

    @property
    def core(self) -> Core:
        """The core as it is now; use `read` for anything that leaves this process."""
        assert self._core is not None, "start() comes first"
        return self._core

    # Commands

    async def submit(
        self, request: SubmitWorkloadRequest, origin: CommandOrigin | None = None, *, call: AuditedCall | None = None
    ) -> Workload:
        """Accepts a workload and places it if possible; raises RoleRefused for names that the caller may not use."""
        caller = None if call is None else call.caller

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            spec = bind_spec(caller, request.spec, core.state.policy, self.config.roles)
            own = request if spec is request.spec else replace(request, spec=spec)
            return core.submit(own, now_ns=now_ns, owner=owner_of(caller, spec.user))

        return await self.command(apply, is_decision=True, origin=origin, call=None if request.dry_run else call)

    async def submit_all(self, requests: Sequence[SubmitWorkloadRequest]) -> list[Workload | Fault | ContractError]:
        """Accepts workloads of an engine in their order and in one commit; returns in place of one why it was refused."""

        def apply(core: Core, now_ns: int) -> CoreStep[list[Workload | Fault | ContractError]]:
            results, events, nodes = list[Workload | Fault | ContractError](), list[Event](), frozenset[str]()
            for request in requests:
                revision = core.state.revision
                try:
                    step = core.submit(request, now_ns=now_ns)
                except (Fault, ContractError) as error:
                    results.append(error)
                except UnreadableEvent as error:
                    if core.state.revision != revision:
                        raise
                    self._log.error("journal=refused what=%r", str(error)[:500])  # no trace
                    results.append(Internal(_UNREADABLE))
                else:
                    results.append(step.result)
                    events += step.events
                    nodes |= step.nodes
            return CoreStep(tuple(events), results, nodes)

        return await self.command(apply)

    async def adopt(self, request: SubmitWorkloadRequest, adoption: Adoption) -> Workload:
        """Takes over replicas that an engine runs, and releases those that it no longer runs."""
        return await self.command(lambda core, now_ns: core.adopt(request, adoption, now_ns=now_ns))

    def check_owner(self, core: Core, workload_id: str, call: AuditedCall | None) -> None:
        """Checks that the caller may change the workload; raises RoleRefused and NotFound."""
        if call is not None:
            check_owner(call.caller, core.workload_or_array(workload_id), call.method, self.config.roles)

    async def cancel(self, workload_id: str, *, reason: str = "", call: AuditedCall | None = None) -> Workload:
        """Cancels a workload, for an engine's reason if there is one; raises RoleRefused if it is not the caller's."""

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            self.check_owner(core, workload_id, call)
            return core.cancel(workload_id, now_ns=now_ns, reason=reason)

        return await self.command(apply, call=call)

    async def move_to_queue(self, workload_id: str, queue: str, *, call: AuditedCall | None = None) -> Workload:
        """Moves pending work to another queue; raises RoleRefused as `cancel` and as `submit` do."""
        caller = None if call is None else call.caller

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            self.check_owner(core, workload_id, call)
            moved = replace(core.workload(workload_id).spec, queue=queue)
            bind_spec(caller, moved, core.state.policy, self.config.roles)
            return core.move_to_queue(workload_id, queue, now_ns=now_ns)

        return await self.command(apply, is_decision=True, call=call)

    async def hold(self, workload_id: str, *, call: AuditedCall | None = None) -> Workload:
        """Keeps pending work from starting until it is released; raises RoleRefused as `cancel` does."""
        caller = None if call is None else call.caller

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            self.check_owner(core, workload_id, call)
            return core.hold(workload_id, user="" if caller is None else caller.user, now_ns=now_ns)

        return await self.command(apply, call=call)

    async def release(self, workload_id: str, *, call: AuditedCall | None = None) -> Workload:
        """Lets held work start; raises RoleRefused as `cancel` does."""

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            self.check_owner(core, workload_id, call)
            return core.release(workload_id, now_ns=now_ns)

        return await self.command(apply, is_decision=True, call=call)

    async def requeue(self, workload_id: str, cause: str, held_by: str, *, call: AuditedCall | None) -> Workload:
        """Stops a running job, which then waits again; raises RoleRefused as `cancel` does."""

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            self.check_owner(core, workload_id, call)
            return core.requeue(workload_id, cause, held_by=held_by, now_ns=now_ns)

        return await self.command(apply, call=call)

    def queue_attempts(self, node_name: str, statuses: Sequence[AttemptStatus]) -> asyncio.Future[int]:
        """Queues what an agent reports of processes; the result is how many reports are about earlier attempts."""
        return self._enqueue(lambda core, now_ns: core.record_attempts(node_name, statuses, now_ns=now_ns))

    async def record_engine_attempts(self, statuses: Sequence[AttemptStatus], *, more_follow: bool = False) -> int:
        """Records what an engine reports of work that it runs; returns how many reports are about earlier attempts."""
        return await self.command(
            lambda core, now_ns: core.record_attempts(None, statuses, now_ns=now_ns, more_follow=more_follow)
        )

    async def update_policy(self, policy: Policy, *, call: AuditedCall | None = None) -> Policy:
        """Puts a policy in force."""
        return await self.command(lambda core, now_ns: core.update_policy(policy, now_ns=now_ns), call=call)

    async def apply_moves(
        self, moves: Sequence[Move], *, is_back: bool = False, call: AuditedCall | None = None
    ) -> int:
        """Moves running work, all or nothing."""
        return await self.command(
            lambda core, now_ns: core.apply_moves(moves, now_ns=now_ns, is_back=is_back), call=call
        )

    async def scale(self, workload_id: str, replicas: int, *, call: AuditedCall | None = None) -> Workload:
        """Scales running work to `replicas`, or as close as capacity allows; raises RoleRefused as `cancel` does."""

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            self.check_owner(core, workload_id, call)
            return core.scale(workload_id, replicas, now_ns=now_ns)

        return await self.command(apply, call=call)

    async def set_limit(self, workload_id: str, power_limit_w: float | None) -> Workload:
        """Sets the power limit of each GPU of running work, None for the default."""
        return await self.command(lambda core, now_ns: core.set_limit(workload_id, power_limit_w, now_ns=now_ns))

    async def report_limits(self, highest_w: Mapping[str, float]) -> None:
        """Sets the highest power limits read back from GPUs, in watts by workload, where they exceed the journal's."""
        await self.command(lambda core, now_ns: core.report_limits(highest_w, now_ns=now_ns))

    async def record_progress(self, workload_id: str, work_done: float, at_ns: int) -> None:
        """Records how much a job with an elastic deadline had done at a time."""
        await self.command(
            lambda core, now_ns: core.record_progress(workload_id, work_done, at_ns=min(at_ns, now_ns), now_ns=now_ns)
        )

    async def apply_partitions(
        self, change: PartitionStage | Sequence[SurveyedGpu], *, call: AuditedCall | None = None
    ) -> None:
        """Changes MIG layouts and moves services to other slices, all or nothing."""
        await self.command(lambda core, now_ns: core.apply_partitions(change, now_ns=now_ns), call=call)

    async def record_measurements(
        self, points: Sequence[MeasuredPoint], starts: Sequence[MeasuredStart] = (), *, call: AuditedCall | None = None
    ) -> int:
        """Stores measured points, and starts of live services; returns how many are new or changed."""
        return await self.command(
            lambda core, now_ns: core.record_measurements(points, starts, now_ns=now_ns), call=call
        )

    async def audit(self, entries: Sequence[AuditEntry]) -> None:
        """Writes audit entries of calls that changed nothing in the journal; returns when on disk. Raises Fault."""
        await self.command(change_nothing, entries=tuple(entries))

    async def register_node(self, inventory: Inventory, *, plan_epoch: int = 0, claim: PlanClaim | None = None) -> None:
        """Registers a node with its inventory, and the plan that its agent claims to hold."""
        await self.command(
            lambda core, now_ns: core.register_node(inventory, now_ns=now_ns, plan_epoch=plan_epoch, claim=claim)
        )

    def queue_confirmation(self, node_name: str, claim: PlanClaim) -> asyncio.Future[None]:
        """Queues the comparison of what an agent holds that has answered Welcome; before whatever it says next."""
        return self._enqueue(lambda core, now_ns: core.confirm_claim(node_name, claim, now_ns=now_ns))

    async def reconcile_node(self, node_name: str, *, call: AuditedCall | None = None) -> NodeRecord:
        """Releases the assignments that a node holds beyond the journal."""
        return await self.command(lambda core, now_ns: core.reconcile_node(node_name, now_ns=now_ns), call=call)

    async def remove_node(
        self, node_name: str, *, force: bool, is_connected: Callable[[str], bool], call: AuditedCall | None = None
    ) -> NodeRemoval:
        """Removes a node; one in use only with `force`, which ends the work on it."""

        def apply(core: Core, now_ns: int) -> CoreStep[NodeRemoval]:
            here = is_connected(node_name)
            return core.remove_node(node_name, force=force, is_connected=here, now_ns=now_ns)

        return await self.command(apply, call=call)

    async def cordon_node(
        self,
        node_name: str,
        gpus: tuple[str, ...] = (),
        *,
        reason: str = "",
        drain: DrainTerms | None = None,
        call: AuditedCall | None = None,
    ) -> NodeRecord:
        """Closes a node, or GPUs of it by index or UUID, to new work; with `drain`, they are emptied from now on."""
        user = owner_of(None if call is None else call.caller)
        return await self.command(
            lambda core, now_ns: core.cordon_node(
                node_name, gpus, reason=reason, user=user, drain=drain, now_ns=now_ns
            ),
            call=call,
        )

    async def uncordon_node(
        self, node_name: str, gpus: tuple[str, ...] = (), *, call: AuditedCall | None = None
    ) -> NodeRecord:
        """Opens a node, or GPUs of it, to new work."""
        user = owner_of(None if call is None else call.caller)
        return await self.command(
            lambda core, now_ns: core.uncordon_node(node_name, gpus, user=user, now_ns=now_ns), call=call
        )

    async def update_external_usage(self, node_name: str, others: ExternalUsage) -> None:
        """Sets the external usage of a node, as its engine reports it."""
        await self.command(lambda core, now_ns: core.update_external_usage(node_name, others, now_ns=now_ns))

    async def expect_reports(self) -> None:
        """Blocks placement on every node until its engine has reported again what runs there."""
        await self.command(lambda core, now_ns: core.expect_reports(now_ns=now_ns))

    async def reconsider(self) -> None:
        """Tries pending work again, since the rules of an engine may have changed."""
        await self.command(lambda core, now_ns: core.retry_waiting(now_ns=now_ns))

    async def refuse_preemption(self, workload_id: str, reason: str, *, again_s: float) -> None:
        """Lets a victim run on that its engine does not stop; it is none again for `again_s` seconds."""
        await self.command(
            lambda core, now_ns: core.refuse_preemption(workload_id, reason, again_s=again_s, now_ns=now_ns)
        )

    async def correct_devices(self, node_name: str, held: Mapping[tuple[str, int], tuple[str, ...]]) -> None:
        """Records which GPUs replicas hold on a node, as its engine reports it."""
        await self.command(lambda core, now_ns: core.correct_devices(node_name, held, now_ns=now_ns))

    async def mark_gpu_lost(self, node_name: str, gpu_uuid: str) -> None:
        """Marks a device as lost."""
        await self.command(lambda core, now_ns: core.mark_gpu_lost(node_name, gpu_uuid, now_ns=now_ns))

    async def mark_gpu_returned(self, node_name: str, gpu_uuid: str) -> None:
        """Marks a lost device as restored."""
        await self.command(lambda core, now_ns: core.mark_gpu_returned(node_name, gpu_uuid, now_ns=now_ns))

    async def command(
        self,
        apply: Callable[[Core, int], CoreStep[_Result]],
        *,
        is_decision: bool = False,
        origin: CommandOrigin | None = None,
        call: AuditedCall | None = None,
        entries: tuple[AuditEntry, ...] = (),
    ) -> _Result:
        """Queues a change of the core, and returns its result once that is on disk. Raises Fault."""
        result: _Result = await self._enqueue(apply, is_decision=is_decision, origin=origin, call=call, entries=entries)
        return result

    def _enqueue(self, apply: Callable[[Core, int], CoreStep[Any]], **described: Any) -> asyncio.Future[Any]:
        """Queues a change of the core behind those before it; raises Fault."""
        if self._stopping or self.failed.done():
            raise NotLeader(_STOPPING, leader=self._leader)
        if len(self._queue) >= self.config.queue_most:
            raise ResourceExhausted(f"{len(self._queue)} commands wait already; slow down and repeat the call")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append(CoreCommand(apply, answer, asked_s=self.clock.monotonic_s(), **described))
        self._wake.set()
        return answer

    def _queue_own(
        self,
        apply: Callable[[Core, int], CoreStep[Any]],
        on_answer: Callable[[asyncio.Future[Any]], object] = asyncio.Future.exception,
    ) -> None:
        """Queues a command of the loop itself; by default its answer is ignored."""
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(on_answer)
        self._queue.append(CoreCommand(apply, answer, asked_s=self.clock.monotonic_s()))
        self._wake.set()

    # The owner

    async def _guard(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a part of the loop; if it fails, sets `failed`, since a process with half a loop must not continue."""
        try:
            await part()
        except Exception as error:  # noqa: BLE001  # reported to the owner of the process, which ends it
            self._log.critical("loop=ended error=%s", error, exc_info=not isinstance(error, ControllerError))
            if not self.failed.done():
                self.failed.set_result(error)
            self._leader = getattr(error, "leader", "")
            self._refuse_all(NotLeader(_STOPPING, leader=self._leader))

    async def _run(self) -> None:
        while self._queue or not self._stopping:
            if self._is_checkpoint_due():
                await self._checkpoints.advance(self.core.state)
            if self._claims:
                await self._claims.settle()
            self._go_on_with_backlog()
            awaits_kernels = not self._kernels.may_decide(len(self.core.state.nodes))
            if awaits_kernels and self._stopping:
                self._refuse_all(NotLeader(_STOPPING, leader=self._leader))
            if not self._queue or awaits_kernels:
                if not (self._stopping or self._kernels.is_interpreted) and self.core.work_ahead():
                    await asyncio.sleep(0)  # a part of the next decisions' work is done; a command may have come
                    continue
                self._wake.clear()
                # A stop that was asked for while a checkpoint was written must not be slept through.
                if not self._stopping:
                    await self._rest()
            elif self._journal_fault is None or await self._can_write():
                await self._batch()
            else:
                self._refuse_all(self._journal_fault)

    async def _rest(self) -> None:
        """Waits until woken, for a checkpoint's next step, or for a probe by which a failed journal recovers without a call."""
        pause_s = None if self._journal_fault is None else _PROBE_EVERY_S
        try:
            async with asyncio.timeout(STEP_PAUSE_S if self._checkpoints.is_under_way else pause_s):
                await self._wake.wait()
        except TimeoutError:
            if self._journal_fault is not None:
                await self._can_write()

    def _go_on_with_backlog(self) -> None:
        """Queues the rest of a retry round over pending work: when no command waits, and at intervals when some do."""
        now_s = self.clock.monotonic_s()
        is_turn = not self._queue or now_s >= self._retry_at_s
        if self.core.has_backlog and is_turn and self._journal_fault is None and not self._stopping:
            self._retry_at_s = now_s + _RETRY_EVERY_S
            self._queue_own(lambda core, now_ns: core.retry(now_ns=now_ns))

    async def _batch(self) -> None:
        if (first := self._preceding.make_command(self.clock.monotonic_s())) is not None:
            self._queue.appendleft(first)
        self._settled.clear()
        self._under_way_s = self._queue[0].asked_s
        batch, broken = self._apply_batch()
        events = tuple(event for command in batch if command.fault is None for event in command.outcome.events)
        entries = tuple(entry for command in batch for entry in command.audit_entries(self.core.state.revision))
        fault: Fault | None = None
        lapsed: Fault | None = None
        try:
            if broken:
                fault = Unavailable("a fault in the controller undid this together with another call; repeat the call")
            elif events or entries:
                fault = await self._commit(events, entries)
            elif self.journal.is_remote:
                lapsed = self._check_lease()
            if fault is not None:
                failed = self.core.state
                self._go_on_from(await self._recover(batch, fault))
                if not broken:
                    self._preceding.record_failure(failed, self.core.state)
        except Exception as error:
            # This process ends: what it would recover from now on is another leader's, or nobody knows what is on disk.
            reason = fault or describe_end(error)
            # What was refused for another reason was refused on a state that another leader may have changed.
            is_old = isinstance(error, JournalFenced)
            for command in batch:
                command.resolve(fault=reason if is_old else command.fault or reason)
            raise
        self._under_way_s = None
        self._settled.set()
        nodes: frozenset[str] = frozenset()
        for command in batch:
            if command.fault is None and fault is None and lapsed is None:
                nodes |= command.outcome.nodes
                command.resolve(command.outcome.result)
            else:
                command.resolve(fault=lapsed or command.fault or fault)
        if fault is None and (events or nodes):
            committed = CommitResult(events, nodes, self.core.state.revision)
            for listener in self.listeners:
                listener(committed)
        # Lets readers and answered callers run before the state changes again.
        await asyncio.sleep(0)

    def _check_lease(self) -> Fault | None:
        """Returns why nothing may be answered; raises JournalFenced.

        A batch that writes nothing meets no fence: a leader that was stopped, and followed by another, would answer that there
        is no workload which the other has accepted.
        """
        try:
            self.journal.check_files()
        except JournalError as error:
            return journal_fault(error)
        return None

    async def _recover(self, batch: Sequence[CoreCommand], fault: Fault) -> RecoveredState:
        """Returns the state of the journal; while a database cannot be read, commands are refused and reads wait.

        A leader that was stopped has no lease when it goes on: it recovers nothing before it knows that none follows it,
        since that takes long where the processors are busy, and it would not end meanwhile. Raises JournalFenced.
        """
        while True:
            try:
                if self.journal.is_remote:
                    self.journal.check_files()
                return await self._writer.run_in_thread(lambda: recover_state(self.journal, self._fresh_state))
            except JournalUnavailable:
                if self._stopping or not self.journal.is_remote:
                    raise
            for command in batch:
                command.resolve(fault=command.fault or fault)
            self._refuse_all(fault)
            await asyncio.sleep(_PROBE_EVERY_S)

    def _apply_batch(self) -> tuple[list[CoreCommand], bool]:
        """Applies queued commands up to the bounds; True if the core failed and its state cannot be trusted."""
        core = self.core
        perf_s = self.clock.perf_s
        batch: list[CoreCommand] = []
        began_s = start_s = perf_s()
        while self._queue and len(batch) < self.config.batch_most and start_s - began_s < self.config.batch_budget_s:
            command = self._queue.popleft()
            if command.answer.cancelled():
                continue
            batch.append(command)
            revision = core.state.revision
            # Read for each command: a wall clock may be set back, and order is given by revisions alone.
            now_ns = max(0, self.clock.now_ns())
            command.turn_ns = now_ns
            try:
                command.outcome = command.apply(core, now_ns)
            except (Fault, ContractError) as error:
                command.fault = error
            except UnreadableEvent as error:
                self._log.error("journal=refused what=%r", str(error)[:500])  # no trace
                command.fault = Internal(_UNREADABLE)
                if core.state.revision != revision:
                    return batch, True
            except Exception:  # noqa: BLE001  # whatever it was, the state is suspect now
                self._log.exception("core=broken action=restart_from_journal")
                command.fault = Internal("a fault in the controller; its log has the details")
                return batch, True
            end_s = perf_s()
            if command.is_decision and command.fault is None:
                self.decisions.add(end_s - start_s)
                # A dry run has no explanation to store.
                key = command.outcome.result.workload_id if command.outcome.events else ""
                self._observe_decision(end_s - start_s, key, command.origin)
            start_s = end_s
        self._kernels.observe_batch(start_s - began_s)
        self._last_command_s = self.clock.monotonic_s()
        return batch, False

    async def _commit(self, events: tuple[Event, ...], entries: tuple[AuditEntry, ...]) -> Fault | None:
        """Writes the events and the audit log's entries to disk, all or none; returns the fault if that failed."""
        try:
            last, taken_s = await self._writer.append(events, entries)
        except JournalError as error:
            self._log.error("journal=failed events=%d error=%s", len(events), error)  # no trace
            self._probe_at_s = self.clock.monotonic_s() + _PROBE_EVERY_S
            self._journal_fault = journal_fault(error)
            return self._journal_fault
        self._observe_commit(taken_s)
        assert last == self.core.state.revision, "journal and state count the same events"
        for event in events:
            if isinstance(event, DeadlineBroken):
                self._log.warning("deadline=broken workload=%s cause=%r", event.workload_id, event.cause)
        self._checkpoints.events += len(events)
        return None

    async def _can_write(self) -> bool:
        if self.clock.monotonic_s() < self._probe_at_s:
            return False
        self._probe_at_s = self.clock.monotonic_s() + _PROBE_EVERY_S
        try:
            await self._writer.run_in_thread(self.journal.probe)
        except JournalError as error:
            self._journal_fault = journal_fault(error)
            return False
        self._log.warning("journal=writable again")
        self._journal_fault = None
        return True

    def _refuse_all(self, fault: Fault | None) -> None:
        while self._queue:
            self._queue.popleft().resolve(fault=fault)

    def _go_on_from(self, recovered: RecoveredState) -> None:
        for line in recovered.healed:
            self._log.warning("journal=healed what=%r", line)
        if recovered.healed_count:
            self._log.warning(
                "journal=healed count=%d reason='an older version let in what answers cannot carry' "
                "remedy='look at these names with eelctl; cancel what is not wanted'",
                recovered.healed_count,
            )
        self._core = self.make_core(recovered.state)
        self._core.set_eligibility(self.eligibility)
        self._checkpoints.events = recovered.replayed

    def _is_checkpoint_due(self) -> bool:
        idle_s = -1.0 if self._queue else self.clock.monotonic_s() - self._last_command_s
        return self._checkpoints.is_due(idle_s=idle_s)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = self.clock.monotonic_s()
            for name in self.presence.pop_expired(now_s=now_s):
                self._lose(name)
            self._forget_lost(now_s)
            if (
                self._core is not None
                and self._journal_fault is None
                and self._withheld.is_resumption_due(self.core.state, now_s)
            ):
                self._queue_own(lambda core, now_ns: core.resume_starts(now_ns=now_ns), self._withheld.on_resumed)
            self._continue_drains()
            self._retry_by_time()
            if self._is_checkpoint_due():
                self._wake.set()
            if now_s >= self._files_at_s and (self._journal_fault is None or self.journal.is_remote):
                # Of a database it is only asked whether this process still leads.
                self._files_at_s = now_s + (0.0 if self.journal.is_remote else _FILES_EVERY_S)
                self._watch_files()

    def _watch_files(self) -> None:
        """Refuses further commands once the journal's files are gone, even while no call arrives; raises JournalFenced."""
        try:
            self.journal.check_files()
        except JournalError as error:
            if self._journal_fault is not None:
                return
            self._log.critical("journal=gone error=%s", error)
            self._journal_fault = journal_fault(error)
            self._wake.set()

    def _forget_lost(self, now_s: float) -> None:
        """Queues the removal of empty nodes that are lost for too long; a refused one is tried at the next scan."""
        ttl_s = self.config.lost_node_ttl_s
        if not ttl_s or now_s - self._expiry_s < min(_EXPIRY_EVERY_S, ttl_s / 2.0) or self._core is None:
            return
        self._expiry_s = now_s
        names = self._lost.select_expired(
            select_longest_lost_nodes(self.core.state), now_ns=self.clock.now_ns(), now_s=now_s
        )
        if names:
            self._queue_own(lambda core, now_ns: core.forget_lost_nodes(names, now_ns=now_ns), self._forgot)

    def _continue_drains(self) -> None:
        """Queues the next step of drains, if one is due and none is queued."""
        if self._is_drain_queued or self._journal_fault is not None or self._core is None:
            return
        if self.core.is_drain_due(self.clock.now_ns()):
            self._is_drain_queued = True
            self._queue_own(lambda core, now_ns: core.continue_drains(now_ns=now_ns), self._drained)

    def _retry_by_time(self) -> None:
        """Queues a round over pending work if a reservation has begun or ended, a promised start has passed, or work may begin."""
        if self._is_round_queued or self._journal_fault is not None or self._core is None:
            return
        if self.core.is_round_due(self.clock.now_ns()):
            self._is_round_queued = True
            self._queue_own(lambda core, now_ns: core.retry_waiting(now_ns=now_ns), self._retried)

    def _retried(self, answer: asyncio.Future[Any]) -> None:
        self._is_round_queued = False
        if not answer.cancelled():
            answer.exception()

    def _drained(self, answer: asyncio.Future[Any]) -> None:
        self._is_drain_queued = False
        if not answer.cancelled():
            answer.exception()

    def _forgot(self, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None and answer.result():
            names = answer.result()
            self._log.info("nodes=forgotten count=%d first=%s reason=lost", len(names), names[0])

    def _lose(self, node_name: str) -> None:
        """Queues the loss of a node; retried later if it cannot be accepted now."""
        if node_name not in self.core.state.nodes:
            # Its agent disconnected before its first inventory was accepted.
            return

        def check(answer: asyncio.Future[Any]) -> None:
            if answer.exception() is not None:
                self._log.debug("node=%s lost=later reason=%s", node_name, answer.exception())
                self.presence.schedule_recheck(node_name, deadline_s=self.clock.monotonic_s() + _PROBE_EVERY_S)

        self._queue_own(lambda core, now_ns: core.mark_node_lost(node_name, now_ns=now_ns), check)
