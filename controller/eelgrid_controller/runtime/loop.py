"""The controller's event loop: single owner of the cluster state and the only way to change it.

Commands are applied in order, their events are committed to the journal in batches, and a caller is answered
when its events are on disk.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from eelgrid_controller.access_control import bind_spec, check_owner, owner_of
from eelgrid_controller.clock import Clock
from eelgrid_controller.core.command import CommandOrigin, CommitResult, CoreCommand
from eelgrid_controller.core.core import Core, CoreStep
from eelgrid_controller.core.node_removal import NodeRemoval, select_longest_lost_nodes
from eelgrid_controller.core.plan_claims import PlanClaim
from eelgrid_controller.core.recovery import RecoveredState, recover_state
from eelgrid_controller.errors import JournalError
from eelgrid_controller.latency import RecentLatencies
from eelgrid_controller.partition.recommendation import PartitionStage
from eelgrid_controller.partition.survey import SurveyedGpu
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.journal_writer import CheckpointWriter, JournalWriter, journal_fault
from eelgrid_controller.state.agent_liveness import AgentLiveness, LostNodeExpiry
from eelgrid_controller.state.audit_entries import AuditedCall
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import Adoption, Eligibility, EngineOverrides, ExternalUsage
from eelgrid_controller.state.events import Event, UnreadableEvent
from eelgrid_controller.state.journal import Journal
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, Internal, ResourceExhausted, Unavailable
from eelgrid_protos.messages import (
    AuditEntry,
    Inventory,
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
# How soon a deleted data directory is noticed where nothing is written.
_FILES_EVERY_S = 2.0
# Lost nodes are forgotten after days, so a look over all nodes once a minute is soon enough.
_EXPIRY_EVERY_S = 60.0


class ControllerLoop:
    """Runs a core over a journal; see the module's theory. Used from one event loop."""

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
    ) -> None:
        self.journal = journal
        self.config = config
        self.clock = clock
        self.presence = AgentLiveness()
        self.outside = EngineOverrides()
        self.eligibility = Eligibility()
        self.decisions = RecentLatencies(config.decisions_most)
        self.listeners: list[Callable[[CommitResult], None]] = []
        # Resolved with the error that this process cannot go on after.
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
        self._settled = asyncio.Event()
        self._settled.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._journal_fault: Fault | None = None
        self._under_way_s: float | None = None
        self._probe_at_s = 0.0
        self._checkpoints = CheckpointWriter(journal, self._writer, config=config, clock=clock, log=log)
        self._last_command_s = self._retry_at_s = self._files_at_s = 0.0
        self._is_begun = False
        self._lost = LostNodeExpiry(config.lost_node_ttl_s)
        self._expiry_s = clock.monotonic_s()

    # Life

    async def start(self) -> RecoveredState:
        """Bring the state back and begin; raises JournalError."""
        recovered = await self._writer.run_in_thread(lambda: recover_state(self.journal, self._fresh_state))
        self._go_on_from(recovered)
        now_s = self.clock.monotonic_s()
        for name, node in recovered.state.nodes.items():
            if node.state is NodeState.READY:
                self.presence.mark_disconnected(name, deadline_s=now_s + self.config.restart_grace_s)
        self._last_command_s = now_s
        nodes = recovered.state.nodes.values()
        asked = self.config.kubernetes is None and any(node.inventory.agent_version for node in nodes)
        self._is_begun = self.journal.lost is None and not asked
        if not self._is_begun:
            # So that the first batch comes at once; nobody waits for it, since a full disk may refuse.
            nothing = asyncio.get_running_loop().create_future()
            nothing.add_done_callback(asyncio.Future.exception)
            self._queue.append(
                CoreCommand(lambda _core, _now_ns: CoreStep((), None, frozenset()), nothing, asked_s=now_s)
            )
            self._wake.set()
        self._tasks = [asyncio.create_task(self._guard(part)) for part in (self._run, self._tick)]
        return recovered

    async def stop(self) -> None:
        """Finish what was queued, checkpoint and stop; the journal stays open for its owner to close."""
        self._stopping = True
        self._wake.set()
        if self._tasks:
            run, tick = self._tasks
            tick.cancel()
            await asyncio.gather(run, tick, return_exceptions=True)
            if self._checkpoints.events and not self.failed.done():
                await self._checkpoints.write(self.core.state)
        self._writer.close()

    @property
    def queued(self) -> int:
        """Commands that wait."""
        return len(self._queue)

    @property
    def lag_s(self) -> float:
        """How long the oldest command has waited that is not on disk yet; 0 if none waits."""
        since_s = (
            self._under_way_s if self._under_way_s is not None else self._queue[0].asked_s if self._queue else None
        )
        return 0.0 if since_s is None else max(0.0, self.clock.monotonic_s() - since_s)

    @property
    def journal_fault(self) -> Fault | None:
        """Why nothing is accepted now; None when all is well."""
        return self._journal_fault

    # Reading

    async def read(self, view: Callable[[Core], _Result]) -> _Result:
        """What `view` makes of the core at a moment when all that it shows is on disk."""
        while not self._settled.is_set():
            await self._settled.wait()
        return view(self.core)

    @property
    def core(self) -> Core:
        """The core as it is at this moment; use `read` for anything that leaves this process."""
        assert self._core is not None, "start() comes first"
        return self._core

    # Commands

    async def submit(
        self, request: SubmitWorkloadRequest, origin: CommandOrigin | None = None, *, call: AuditedCall | None = None
    ) -> Workload:
        """Accept a workload and place it if it can be placed now; raises RoleRefused for what the caller may not name."""
        caller = None if call is None else call.caller

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            spec = bind_spec(caller, request.spec, core.state.policy, self.config.roles)
            own = request if spec is request.spec else replace(request, spec=spec)
            return core.submit(own, now_ns=now_ns, owner=owner_of(caller))

        return await self.command(apply, is_decision=True, origin=origin, call=None if request.dry_run else call)

    async def adopt(self, request: SubmitWorkloadRequest, adoption: Adoption) -> Workload:
        """Take over work at the places where it stands, and let go those where it stands no more."""
        return await self.command(lambda core, now_ns: core.adopt(request, adoption, now_ns=now_ns))

    def check_owner(self, core: Core, workload_id: str, call: AuditedCall | None) -> None:
        """Whether the caller may change the workload; raises RoleRefused and NotFound."""
        if call is not None:
            check_owner(call.caller, core.workload(workload_id), call.method, self.config.roles)

    async def cancel(self, workload_id: str, *, call: AuditedCall | None = None) -> Workload:
        """End a workload; raises RoleRefused where it is not the caller's."""

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            self.check_owner(core, workload_id, call)
            return core.cancel(workload_id, now_ns=now_ns)

        return await self.command(apply, call=call)

    async def update_policy(self, policy: Policy, *, call: AuditedCall | None = None) -> Policy:
        """Put a policy in force."""
        return await self.command(lambda core, now_ns: core.update_policy(policy, now_ns=now_ns), call=call)

    async def apply_moves(
        self, moves: Sequence[Move], *, is_back: bool = False, call: AuditedCall | None = None
    ) -> int:
        """Move running work, all or nothing."""
        return await self.command(
            lambda core, now_ns: core.apply_moves(moves, now_ns=now_ns, is_back=is_back), call=call
        )

    async def scale(self, workload_id: str, replicas: int, *, call: AuditedCall | None = None) -> Workload:
        """Bring running work to so many replicas, or as near as there is room; raises RoleRefused as `cancel` does."""

        def apply(core: Core, now_ns: int) -> CoreStep[Workload]:
            self.check_owner(core, workload_id, call)
            return core.scale(workload_id, replicas, now_ns=now_ns)

        return await self.command(apply, call=call)

    async def set_limit(self, workload_id: str, power_limit_w: float | None) -> Workload:
        """Ask each GPU of running work to keep a limit, or its default."""
        return await self.command(lambda core, now_ns: core.set_limit(workload_id, power_limit_w, now_ns=now_ns))

    async def report_limits(self, highest_w: Mapping[str, float]) -> None:
        """The highest limits that GPUs were read to have, by workload, where above the journal's."""
        await self.command(lambda core, now_ns: core.report_limits(highest_w, now_ns=now_ns))

    async def apply_partitions(
        self, change: PartitionStage | Sequence[SurveyedGpu], *, call: AuditedCall | None = None
    ) -> None:
        """Want other layouts and take services to other slices, all or nothing."""
        await self.command(lambda core, now_ns: core.apply_partitions(change, now_ns=now_ns), call=call)

    async def record_points(self, points: Sequence[MeasuredPoint], *, call: AuditedCall | None = None) -> int:
        """Keep measured points; how many are new or changed."""
        return await self.command(lambda core, now_ns: core.record_points(points, now_ns=now_ns), call=call)

    async def audit(self, entries: Sequence[AuditEntry]) -> None:
        """Keep entries of calls that changed nothing in the journal; returns when they are on disk. Raises Fault."""

        def apply(_core: Core, _now_ns: int) -> CoreStep[None]:
            return CoreStep((), None, frozenset())

        await self.command(apply, entries=tuple(entries))

    async def register_node(self, inventory: Inventory, *, plan_epoch: int = 0, claim: PlanClaim | None = None) -> None:
        """A node is here, as it describes itself; its agent holds the plan of this epoch, and what it claims by it."""
        await self.command(
            lambda core, now_ns: core.register_node(inventory, now_ns=now_ns, plan_epoch=plan_epoch, claim=claim)
        )

    async def reconcile_node(self, node_name: str, *, call: AuditedCall | None = None) -> NodeRecord:
        """Give up what a node holds beyond the journal."""
        return await self.command(lambda core, now_ns: core.reconcile_node(node_name, now_ns=now_ns), call=call)

    async def remove_node(
        self, node_name: str, *, force: bool, is_connected: Callable[[str], bool], call: AuditedCall | None = None
    ) -> NodeRemoval:
        """Forget a node; where it is in use, only by force, and what it holds ends."""

        def apply(core: Core, now_ns: int) -> CoreStep[NodeRemoval]:
            here = is_connected(node_name)
            return core.remove_node(node_name, force=force, is_connected=here, now_ns=now_ns)

        return await self.command(apply, call=call)

    async def update_external_usage(self, node_name: str, others: ExternalUsage) -> None:
        """What others hold on a node, as its engine tells."""
        await self.command(lambda core, now_ns: core.update_external_usage(node_name, others, now_ns=now_ns))

    async def expect_reports(self) -> None:
        """Place nothing on any node before its engine has reported anew what stands there."""
        await self.command(lambda core, now_ns: core.expect_reports(now_ns=now_ns))

    async def reconsider(self) -> None:
        """Try what waits again, since an engine's rules may answer otherwise by now."""
        await self.command(lambda core, now_ns: core.retry_waiting(now_ns=now_ns))

    async def correct_devices(self, node_name: str, held: Mapping[tuple[str, int], tuple[str, ...]]) -> None:
        """Replicas hold these GPUs of their node, as its engine tells."""
        await self.command(lambda core, now_ns: core.correct_devices(node_name, held, now_ns=now_ns))

    async def mark_gpu_lost(self, node_name: str, gpu_uuid: str) -> None:
        """A device answers nothing any more."""
        await self.command(lambda core, now_ns: core.mark_gpu_lost(node_name, gpu_uuid, now_ns=now_ns))

    async def mark_gpu_returned(self, node_name: str, gpu_uuid: str) -> None:
        """A device answers again."""
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
        """Change the core in turn with everybody else; returns when that is on disk. Raises Fault."""
        if self._stopping or self.failed.done():
            raise Unavailable("the controller is stopping; repeat the call when it is back")
        if len(self._queue) >= self.config.queue_most:
            raise ResourceExhausted(f"{len(self._queue)} commands wait already; slow down and repeat the call")
        answer = asyncio.get_running_loop().create_future()
        command = CoreCommand(
            apply, answer, is_decision, asked_s=self.clock.monotonic_s(), origin=origin, call=call, entries=entries
        )
        self._queue.append(command)
        self._wake.set()
        result: _Result = await command.answer
        return result

    # The owner

    async def _guard(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a part of the loop; a process with half a loop must not go on as if nothing were."""
        try:
            await part()
        except Exception as error:  # noqa: BLE001  # whoever owns the process hears of it and ends it
            self._log.critical("loop=ended error=%s", error, exc_info=not isinstance(error, JournalError))
            if not self.failed.done():
                self.failed.set_result(error)
            self._refuse_all(Unavailable("the controller is stopping; repeat the call when it is back"))

    async def _run(self) -> None:
        while self._queue or not self._stopping:
            if self._is_checkpoint_due():
                await self._checkpoints.write(self.core.state)
            self._go_on_with_backlog()
            if not self._queue:
                self._wake.clear()
                await self._rest()
            elif self._journal_fault is None or await self._can_write():
                await self._batch()
            else:
                self._refuse_all(self._journal_fault)

    async def _rest(self) -> None:
        """Until somebody wakes us; a journal that failed is tried meanwhile, for those who watch it but ask nothing."""
        try:
            async with asyncio.timeout(None if self._journal_fault is None else _PROBE_EVERY_S):
                await self._wake.wait()
        except TimeoutError:
            await self._can_write()

    def _go_on_with_backlog(self) -> None:
        """Queue the rest of a round over waiting work: when nobody waits, and now and then when somebody does."""
        now_s = self.clock.monotonic_s()
        is_turn = not self._queue or now_s >= self._retry_at_s
        if self.core.has_backlog and is_turn and self._journal_fault is None and not self._stopping:
            self._retry_at_s = now_s + _RETRY_EVERY_S
            answer = asyncio.get_running_loop().create_future()
            answer.add_done_callback(asyncio.Future.exception)
            self._queue.append(CoreCommand(lambda core, now_ns: core.retry(now_ns=now_ns), answer, asked_s=now_s))

    def _beginning(self) -> CoreCommand:
        """What comes before every other change: what an agent holds may be more than this journal knows.

        If that was rolled back, only the agent can tell. An engine that lists what runs tells by itself.
        """
        lost, asks_agents = self.journal.lost, self.config.kubernetes is None
        answer = asyncio.get_running_loop().create_future()

        def begun(answer: asyncio.Future[Any]) -> None:
            self._is_begun = self._is_begun or answer.exception() is None

        answer.add_done_callback(begun)
        return CoreCommand(
            lambda core, now_ns: core.record_controller_start(now_ns=now_ns, lost=lost, asks_agents=asks_agents),
            answer,
            asked_s=self.clock.monotonic_s(),
        )

    async def _batch(self) -> None:
        if not self._is_begun:
            self._queue.appendleft(self._beginning())
        self._settled.clear()
        self._under_way_s = self._queue[0].asked_s
        batch, broken = self._apply_batch()
        events = tuple(event for command in batch if command.fault is None for event in command.outcome.events)
        entries = tuple(entry for command in batch for entry in command.audit_entries(self.core.state.revision))
        fault: Fault | None = None
        if broken:
            fault = Unavailable("a fault in the controller undid this together with another call; repeat the call")
        elif events or entries:
            fault = await self._commit(events, entries)
        if fault is not None:
            self._go_on_from(await self._writer.run_in_thread(lambda: recover_state(self.journal, self._fresh_state)))
        self._under_way_s = None
        self._settled.set()
        nodes: frozenset[str] = frozenset()
        for command in batch:
            if command.fault is None and fault is None:
                nodes |= command.outcome.nodes
                command.resolve(command.outcome.result)
            else:
                command.resolve(fault=command.fault or fault)
        if fault is None and (events or nodes):
            committed = CommitResult(events, nodes, self.core.state.revision)
            for listener in self.listeners:
                listener(committed)
        # Readers and answered callers run now, before the state moves on.
        await asyncio.sleep(0)

    def _apply_batch(self) -> tuple[list[CoreCommand], bool]:
        """Apply queued commands up to the bounds; True when the core broke and its state cannot be trusted."""
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
            # Read anew for each: a clock may be set back, and what came first is told by revisions alone.
            now_ns = max(0, self.clock.now_ns())
            command.turn_ns = now_ns
            try:
                command.outcome = command.apply(core, now_ns)
            except (Fault, ContractError) as error:
                command.fault = error
            except UnreadableEvent as error:
                self._log.error("journal=refused what=%r", str(error)[:500])  # no trace
                command.fault = Internal(
                    "this would write what could not be read back, so nothing was done; see the log"
                )
                if core.state.revision != revision:
                    return batch, True
            except Exception:  # noqa: BLE001  # whatever it was, the state is suspect now
                self._log.exception("core=broken action=restart_from_journal")
                command.fault = Internal("a fault in the controller; its log has the details")
                return batch, True
            end_s = perf_s()
            if command.is_decision and command.fault is None:
                self.decisions.add(end_s - start_s)
                # What is only imagined has no explanation that one could ask for.
                key = command.outcome.result.workload_id if command.outcome.events else ""
                self._observe_decision(end_s - start_s, key, command.origin)
            start_s = end_s
        self._last_command_s = self.clock.monotonic_s()
        return batch, False

    async def _commit(self, events: tuple[Event, ...], entries: tuple[AuditEntry, ...]) -> Fault | None:
        """Put events and the audit log's entries on disk, all or none; a fault when that failed."""
        try:
            last, taken_s = await self._writer.append(events, entries)
        except JournalError as error:
            self._log.error("journal=failed events=%d error=%s", len(events), error)  # no trace
            self._probe_at_s = self.clock.monotonic_s() + _PROBE_EVERY_S
            self._journal_fault = journal_fault(error)
            return self._journal_fault
        self._observe_commit(taken_s)
        assert last == self.core.state.revision, "journal and state count the same events"
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
            if self._is_checkpoint_due():
                self._wake.set()
            if now_s >= self._files_at_s and self._journal_fault is None:
                self._files_at_s = now_s + _FILES_EVERY_S
                self._watch_files()

    def _watch_files(self) -> None:
        """Accept nothing more once the journal's files are gone, also where nobody asks for anything."""
        try:
            self.journal.check_files()
        except JournalError as error:
            self._log.critical("journal=gone error=%s", error)
            self._journal_fault = journal_fault(error)
            self._wake.set()

    def _forget_lost(self, now_s: float) -> None:
        """Queue that empty nodes which are lost for too long are forgotten; who cannot be now is at the next look."""
        ttl_s = self.config.lost_node_ttl_s
        if not ttl_s or now_s - self._expiry_s < min(_EXPIRY_EVERY_S, ttl_s / 2.0) or self._core is None:
            return
        self._expiry_s = now_s
        names = self._lost.select_expired(
            select_longest_lost_nodes(self.core.state), now_ns=self.clock.now_ns(), now_s=now_s
        )
        if names:
            answer = asyncio.get_running_loop().create_future()
            answer.add_done_callback(self._forgot)
            self._queue.append(
                CoreCommand(lambda core, now_ns: core.forget_lost_nodes(names, now_ns=now_ns), answer, asked_s=now_s)
            )
            self._wake.set()

    def _forgot(self, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None and answer.result():
            names = answer.result()
            self._log.info("nodes=forgotten count=%d first=%s reason=lost", len(names), names[0])

    def _lose(self, node_name: str) -> None:
        """Queue the loss of a node; it is tried again when it cannot be accepted now."""
        if node_name not in self.core.state.nodes:
            # Its agent went before its first inventory was accepted.
            return
        command = CoreCommand(
            lambda core, now_ns: core.mark_node_lost(node_name, now_ns=now_ns),
            asyncio.get_running_loop().create_future(),
            asked_s=self.clock.monotonic_s(),
        )

        def check(answer: asyncio.Future[Any]) -> None:
            if answer.exception() is not None:
                self._log.debug("node=%s lost=later reason=%s", node_name, answer.exception())
                self.presence.schedule_recheck(node_name, deadline_s=self.clock.monotonic_s() + _PROBE_EVERY_S)

        command.answer.add_done_callback(check)
        self._queue.append(command)
        self._wake.set()
