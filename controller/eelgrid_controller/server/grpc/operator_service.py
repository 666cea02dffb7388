"""OperatorService: workloads, nodes, plans, policy, moves and watches.

Also holds recommended moves until they are applied, and recent changes of workloads for watches.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.drains import find_node, resolve_gpus
from eelgrid_controller.core.job_arrays import ElementChange
from eelgrid_controller.core.job_control import UNNAMED_USER
from eelgrid_controller.core.nodes import NodeRemoval
from eelgrid_controller.core.steps import CommandOrigin, CommitResult
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.runtime.access_control import owner_of
from eelgrid_controller.runtime.array_changes import change_array, is_array
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.grpc.agent_service import AgentService
from eelgrid_controller.server.grpc.authorization import DescribeCall, ViewFor
from eelgrid_controller.server.grpc.resource_reads import get_node
from eelgrid_controller.server.grpc.resource_views import ResourceViews
from eelgrid_controller.server.grpc.searches import search_to_end
from eelgrid_controller.state.cordons import DrainTerms, describe_cause
from eelgrid_protos.errors import ContractError, Violation
from eelgrid_protos.faults import (
    Aborted,
    Fault,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from eelgrid_protos.messages import (
    ApplyMovesRequest,
    ApplyMovesResponse,
    CancelWorkloadRequest,
    CancelWorkloadResponse,
    CordonNodeRequest,
    CordonNodeResponse,
    DrainNodeRequest,
    DrainNodeResponse,
    HoldWorkloadRequest,
    HoldWorkloadResponse,
    MoveToQueueRequest,
    MoveToQueueResponse,
    Recommendation,
    RecommendMovesRequest,
    RecommendMovesResponse,
    ReconcileNodeRequest,
    ReconcileNodeResponse,
    ReleaseWorkloadRequest,
    ReleaseWorkloadResponse,
    RemoveNodeRequest,
    RemoveNodeResponse,
    RequeueWorkloadRequest,
    RequeueWorkloadResponse,
    SubmitWorkloadRequest,
    SubmitWorkloadResponse,
    UncordonNodeRequest,
    UncordonNodeResponse,
    UpdatePolicyRequest,
    UpdatePolicyResponse,
    WatchSummaryRequest,
    WatchSummaryResponse,
    WatchWorkloadsRequest,
    WatchWorkloadsResponse,
    Workload,
)

KEPT_MOST = 8


class WorkloadChanges:
    """The last `most` changes, in order of revision."""

    def __init__(self, most: int, *, revision: int) -> None:
        self._most = most
        self._changes: deque[Workload] = deque()
        # Every change after this revision is in the memory.
        self._complete_after = revision
        self._more = asyncio.Event()
        self._closed = False

    def publish(self, workloads: Iterable[Workload]) -> None:
        """Take committed changes and wake whoever waits."""
        self._changes.extend(sorted(workloads, key=lambda workload: workload.revision))
        while len(self._changes) > self._most:
            self._complete_after = self._changes.popleft().revision
        self._wake()

    def changes_after(self, revision: int) -> list[Workload]:
        """Changes after the revision; raises Aborted when some are forgotten, Unavailable when closed."""
        if self._closed:
            raise Unavailable("the controller is stopping; watch again from the last revision seen")
        if revision < self._complete_after:
            raise Aborted(
                f"changes after revision {revision} are no longer at hand, those after {self._complete_after} are; "
                "list the workloads and watch from the highest revision in that listing"
            )
        found: list[Workload] = []
        for workload in reversed(self._changes):
            if workload.revision <= revision:
                break
            found.append(workload)
        found.reverse()
        return found

    async def wait_change(self) -> None:
        """Return after the next publication."""
        if not self._closed:
            await self._more.wait()

    def close(self) -> None:
        """End all watching."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # A fresh event for the next wait; whoever holds the old one goes on.
        self._more.set()
        self._more = asyncio.Event()


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# A node holds no more, see ledger.ASSIGNMENTS_MOST.
_NAMED_MOST = 4096


_WATCHERS_MOST = 1000
_INTERVAL_LEAST_S = 0.1


class OperatorService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(
        self,
        *,
        loop: ControllerLoop,
        views: ResourceViews,
        agents: AgentService,
        log: logging.Logger,
        origin_of: Callable[[Context], CommandOrigin | None] = lambda _: None,
        call_of: DescribeCall,
        view_for: ViewFor,
    ) -> None:
        """`view_for` says how the caller of a call may see workloads."""
        self._loop = loop
        self._view_for = view_for
        self._call_of = call_of
        self._origin_of = origin_of
        self._agents = agents
        self._views = views
        # Recommended moves by id, until they are applied.
        self._recommended: OrderedDict[str, Recommendation] = OrderedDict()
        self._is_searching = False
        self._log = log
        self._watchers = 0
        self._closing = asyncio.Event()
        self.changes = WorkloadChanges(loop.config.changes_most, revision=loop.core.state.revision)
        loop.listeners.append(self._on_commit)

    def close(self) -> None:
        """End every watch, so that the server can stop at once."""
        self._closing.set()
        self.changes.close()

    def _on_commit(self, committed: CommitResult) -> None:
        names = {getattr(event, "workload_id", None) for event in committed.events} - {None}
        names.update(key for event in committed.events for key in getattr(event, "workload_ids", ()))
        workloads = self._loop.core.state.workloads
        # One that ended long ago may already be forgotten.
        self.changes.publish([workloads[name] for name in names if name in workloads])

    # The cluster

    async def watch_summary(
        self, request: WatchSummaryRequest, _context: Context
    ) -> AsyncIterator[WatchSummaryResponse]:
        """The cluster at a glance, again and again."""
        interval_s = request.interval_s or 1.0
        if interval_s < _INTERVAL_LEAST_S:
            raise InvalidArgument(
                "the interval is too short",
                (Violation("interval_s", f"is {interval_s:g}", f"give at least {_INTERVAL_LEAST_S:g}, or 0 for 1"),),
            )
        self._enter()
        try:
            while True:
                yield WatchSummaryResponse(summary=await self._loop.read(self._views.recent_summary))
                try:
                    async with asyncio.timeout(interval_s):
                        await self._closing.wait()
                except TimeoutError:
                    continue
                raise Unavailable("the controller is stopping; watch again when it is back")
        finally:
            self._watchers -= 1

    async def reconcile_node(self, request: ReconcileNodeRequest, context: Context) -> ReconcileNodeResponse:
        """Give up what a node holds beyond the journal; harmless where there is nothing."""
        call = self._call_of("ReconcileNode", request, context)
        record = await self._loop.reconcile_node(request.node_name, call=call)
        self._log.warning("node=%s ahead_of_journal=no reason=operator", request.node_name)
        return ReconcileNodeResponse(node=self._views.node(record))

    async def remove_node(self, request: RemoveNodeRequest, context: Context) -> RemoveNodeResponse:
        """Forget a node; raises NotFound, and FailedPrecondition where it is in use and that is not forced."""
        name, force = request.node_name, request.force
        connected = self._agents.is_connected(name)
        if request.dry_run:

            def would(core: Core) -> NodeRemoval:
                return core.preview_node_removal(
                    name, force=force, is_connected=connected, now_ns=self._loop.clock.now_ns()
                )

            removal = await self._loop.read(would)
        else:
            removal = await self._loop.remove_node(
                name,
                force=force,
                is_connected=self._agents.is_connected,
                call=self._call_of("RemoveNode", request, context),
            )
        return RemoveNodeResponse(
            ended=removal.ended[:_NAMED_MOST], shrunk=removal.shrunk[:_NAMED_MOST], connected=connected
        )

    async def cordon_node(self, request: CordonNodeRequest, context: Context) -> CordonNodeResponse:
        """Close a node, or GPUs of it, to new work; raises NotFound."""
        was_cordoned = await self._loop.read(lambda core: _is_cordoned(core, request.node_name, request.gpus))
        record = await self._loop.cordon_node(
            request.node_name,
            request.gpus,
            reason=request.reason,
            call=self._call_of("CordonNode", request, context),
        )
        return CordonNodeResponse(node=self._views.node(record), was_cordoned=was_cordoned)

    async def uncordon_node(self, request: UncordonNodeRequest, context: Context) -> UncordonNodeResponse:
        """Open a node, or GPUs of it, to new work; harmless where no operator cordoned them. Raises NotFound."""
        was_cordoned = await self._loop.read(lambda core: _is_cordoned(core, request.node_name, request.gpus))
        record = await self._loop.uncordon_node(
            request.node_name, request.gpus, call=self._call_of("UncordonNode", request, context)
        )
        return UncordonNodeResponse(node=self._views.node(record), was_cordoned=was_cordoned)

    async def drain_node(self, request: DrainNodeRequest, context: Context) -> DrainNodeResponse:
        """Close a node, or GPUs of it, to new work and empty it; raises NotFound."""
        name, grace_s = request.node_name, request.grace_s
        now_ns = max(0, self._loop.clock.now_ns())
        # A grace of nothing ends at once: 0 means that there is none.
        deadline_ns = 0 if grace_s is None else max(1, now_ns + round(grace_s * 1e9))
        drain = DrainTerms(deadline_ns=deadline_ns, force=request.force)
        found = await self._loop.read(lambda core: core.preview_drain(name, request.gpus, drain, now_ns=now_ns))
        if request.dry_run:
            return await self._loop.read(
                lambda core: DrainNodeResponse(node=self._views.node(get_node(core, name)), workloads=found)
            )
        record = await self._loop.cordon_node(
            name,
            request.gpus,
            reason=request.reason,
            drain=drain,
            call=self._call_of("DrainNode", request, context),
        )
        return DrainNodeResponse(node=self._views.node(record), workloads=found)

    # Workloads

    async def submit_workload(self, request: SubmitWorkloadRequest, context: Context) -> SubmitWorkloadResponse:
        """Accept a workload; answered once it is on disk and placed or known to wait."""
        try:
            call = self._call_of("SubmitWorkload", request, context)
            _check_id(request.workload_id, self._loop.outside.own_ids)
            workload = await self._loop.submit(request, self._origin_of(context), call=call)
        except Unavailable:
            # Not refused: nobody decided.
            raise
        except (Fault, ContractError):
            self._views.refused += 1
            raise
        return SubmitWorkloadResponse(workload=workload)

    async def watch_workloads(
        self, request: WatchWorkloadsRequest, context: Context
    ) -> AsyncIterator[WatchWorkloadsResponse]:
        """Every workload changed after a revision as it stands, then every change as it comes."""
        after, show = request.after_revision, self._view_for(context)
        self._enter()
        try:
            revision, workloads = await self._loop.read(lambda core: _changed_after(core, after))
            for workload in workloads:
                yield WatchWorkloadsResponse(workload=show(workload))
            while True:
                for workload in self.changes.changes_after(revision):
                    yield WatchWorkloadsResponse(workload=show(workload))
                    revision = workload.revision
                if not self.changes.changes_after(revision):
                    await self.changes.wait_change()
        finally:
            self._watchers -= 1

    async def cancel_workload(self, request: CancelWorkloadRequest, context: Context) -> CancelWorkloadResponse:
        """End a workload, or an array, of the caller's own."""
        call = self._call_of("CancelWorkload", request, context)
        if is_array(self._loop, request.workload_id):
            whole = await change_array(self._loop, ElementChange.CANCEL, request.workload_id, call=call)
            return CancelWorkloadResponse(workload=whole)
        return CancelWorkloadResponse(workload=await self._loop.cancel(request.workload_id, call=call))

    # Policy

    async def update_policy(self, request: UpdatePolicyRequest, context: Context) -> UpdatePolicyResponse:
        """Put a policy in force."""
        call = self._call_of("UpdatePolicy", request, context)
        policy = await self._loop.update_policy(request.policy, call=call)
        self._log.info("policy=updated revision=%d objective=%s", policy.revision, policy.objective)
        return UpdatePolicyResponse(policy=policy)

    # Queues

    async def move_to_queue(self, request: MoveToQueueRequest, context: Context) -> MoveToQueueResponse:
        """Move a pending workload of the caller's own to another queue."""
        call = self._call_of("MoveToQueue", request, context)
        if is_array(self._loop, request.workload_id):
            whole = await change_array(self._loop, ElementChange.MOVE, request.workload_id, request.queue, call=call)
            return MoveToQueueResponse(workload=whole)
        workload = await self._loop.move_to_queue(request.workload_id, request.queue, call=call)
        return MoveToQueueResponse(workload=workload)

    # What keeps work from starting

    async def hold_workload(self, request: HoldWorkloadRequest, context: Context) -> HoldWorkloadResponse:
        """Keep a pending workload of the caller's own from starting."""
        call = self._call_of("HoldWorkload", request, context)
        if is_array(self._loop, request.workload_id):
            user = "" if call is None or call.caller is None else call.caller.user
            whole = await change_array(self._loop, ElementChange.HOLD, request.workload_id, user, call=call)
            return HoldWorkloadResponse(workload=whole)
        return HoldWorkloadResponse(workload=await self._loop.hold(request.workload_id, call=call))

    async def release_workload(self, request: ReleaseWorkloadRequest, context: Context) -> ReleaseWorkloadResponse:
        """Let a held workload of the caller's own start."""
        call = self._call_of("ReleaseWorkload", request, context)
        if is_array(self._loop, request.workload_id):
            whole = await change_array(self._loop, ElementChange.RELEASE, request.workload_id, call=call)
            return ReleaseWorkloadResponse(workload=whole)
        return ReleaseWorkloadResponse(workload=await self._loop.release(request.workload_id, call=call))

    async def requeue_workload(self, request: RequeueWorkloadRequest, context: Context) -> RequeueWorkloadResponse:
        """Stop a running job of the caller's own, or each of an array; it then waits again."""
        key, call = request.workload_id, self._call_of("RequeueWorkload", request, context)
        user = owner_of(None if call is None else call.caller)
        cause, held_by = describe_cause(user, request.reason), (user or UNNAMED_USER) if request.hold else ""
        if is_array(self._loop, key):
            whole = await change_array(self._loop, ElementChange.REQUEUE, key, cause, held_by=held_by, call=call)
            return RequeueWorkloadResponse(workload=whole)
        return RequeueWorkloadResponse(workload=await self._loop.requeue(key, cause, held_by, call=call))

    # Moves

    async def recommend_moves(self, request: RecommendMovesRequest, _context: Context) -> RecommendMovesResponse:
        """Moves within a budget that would lower the cost of the whole cluster; nothing changes."""
        if self._is_searching:
            raise ResourceExhausted("another search for moves is under way; ask again in a few seconds")
        self._is_searching = True
        try:
            survey = await self._loop.read(lambda core: core.survey_moves(request))
            found = await search_to_end(lambda: recommend_moves(build_migration_problem(survey)))
        finally:
            self._is_searching = False
        self._recommended[found.recommendation_id] = found
        self._recommended.move_to_end(found.recommendation_id)
        while len(self._recommended) > KEPT_MOST:
            self._recommended.popitem(last=False)
        return RecommendMovesResponse(recommendation=found)

    async def apply_moves(self, request: ApplyMovesRequest, context: Context) -> ApplyMovesResponse:
        """Executes a recommendation that is kept, all of it or nothing."""
        call = self._call_of("ApplyMoves", request, context)
        found = self._recommended.get(request.recommendation_id)
        if found is None:
            raise NotFound(
                f"no recommendation {request.recommendation_id!r} is kept; the newest {KEPT_MOST} since the "
                "controller's start are. Ask for new moves"
            )
        moved = await self._loop.apply_moves(found.moves, call=call)
        self._recommended.pop(request.recommendation_id, None)
        self._log.info("moves=applied id=%s replicas=%d", request.recommendation_id, moved)

        def answer(core: Core) -> ApplyMovesResponse:
            return ApplyMovesResponse(
                moved=moved, revision=core.state.revision, modelled_power_w=core.modelled_power_w()
            )

        return await self._loop.read(answer)

    def _enter(self) -> None:
        """Count one watcher in; the caller counts it out."""
        if self._watchers >= _WATCHERS_MOST:
            raise ResourceExhausted(f"{_WATCHERS_MOST} watches are open; end some, or list instead")
        self._watchers += 1


def _is_cordoned(core: Core, node_name: str, gpus: tuple[str, ...]) -> bool:
    """Whether an operator cordoned the node, or one of these GPUs of it; raises NotFound."""
    record = find_node(core.state, node_name)
    uuids = resolve_gpus(record, gpus)
    return record.cordon is not None if not uuids else any(uuid in record.gpu_cordons for uuid in uuids)


def _check_id(workload_id: str, own_ids: Collection[str]) -> None:
    """Raises InvalidArgument for an id under which an engine would take the work for a job of its own."""
    for prefix in own_ids:
        if workload_id.startswith(prefix):
            raise InvalidArgument(
                "the id is one of an engine's own",
                (Violation("workload_id", f"begins with {prefix!r}", "choose another one, or none"),),
            )


def _changed_after(core: Core, revision: int) -> tuple[int, list[Workload]]:
    """The revision of now, and what changed since the given one, oldest change first."""
    state = core.state
    if revision > state.revision:
        raise InvalidArgument(
            "the revision is not one of this cluster",
            (Violation("after_revision", f"is {revision}, now is {state.revision}", "begin again with a listing"),),
        )
    changed = [workload for workload in state.workloads.values() if workload.revision > revision]
    return state.revision, sorted(changed, key=lambda workload: workload.revision)
