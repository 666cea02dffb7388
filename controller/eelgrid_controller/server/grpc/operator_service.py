"""OperatorService: workloads, nodes, plans, policy, moves and watches.

Also holds recommended moves until they are applied, and recent changes of workloads for watches.
"""

import asyncio
import logging
import operator
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.drains import find_node, resolve_gpus
from eelgrid_controller.core.job_arrays import ElementChange
from eelgrid_controller.core.nodes import NodeRemoval
from eelgrid_controller.core.steps import CommandOrigin, CommitResult
from eelgrid_controller.core.workloads import resolve_reported_models
from eelgrid_controller.placement.migration_planner import recommend_moves
from eelgrid_controller.runtime.array_changes import change_array, is_array
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.grpc.agent_service import AgentService
from eelgrid_controller.server.grpc.authorization import DescribeCall
from eelgrid_controller.server.grpc.pagination import build_page
from eelgrid_controller.server.grpc.resource_views import ResourceViews, free_milli, list_devices
from eelgrid_controller.state.attempts import describe_start_hold
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.node_changes import mark_lost_replicas
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
    PAGE_SIZE_MOST,
    SUMMARY_PAGE_SIZE_MOST,
    ApplyMovesRequest,
    ApplyMovesResponse,
    CancelWorkloadRequest,
    CancelWorkloadResponse,
    CordonNodeRequest,
    CordonNodeResponse,
    DrainNodeRequest,
    DrainNodeResponse,
    ExplainWorkloadRequest,
    ExplainWorkloadResponse,
    Explanation,
    GetPolicyRequest,
    GetPolicyResponse,
    GetSummaryRequest,
    GetSummaryResponse,
    GetWorkloadRequest,
    GetWorkloadResponse,
    HoldWorkloadRequest,
    HoldWorkloadResponse,
    ListGpusRequest,
    ListGpusResponse,
    ListNodesRequest,
    ListNodesResponse,
    ListPlansRequest,
    ListPlansResponse,
    ListQueuesRequest,
    ListQueuesResponse,
    ListWorkloadsRequest,
    ListWorkloadsResponse,
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
    WorkloadPhase,
    WorkloadSummary,
    WorkloadView,
    resolve_pool,
)
from eelgrid_protos.rpc import Encoded

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
    ) -> None:
        self._loop = loop
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

    async def get_summary(self, _request: GetSummaryRequest, _context: Context) -> GetSummaryResponse:
        """The cluster at a glance."""
        return GetSummaryResponse(summary=await self._loop.read(self._views.summary))

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

    async def list_nodes(self, request: ListNodesRequest, _context: Context) -> Encoded:
        """A page of nodes by name."""

        def matches(record: NodeRecord, model: str) -> bool:
            inventory = record.inventory
            return (
                (not request.states or record.state in request.states)
                and (not request.pool or resolve_pool(inventory.pool) == request.pool)
                and request.name_contains in inventory.node_name
                and (not model or any(gpu.model == model for gpu in inventory.gpus))
            )

        def view(core: Core) -> Encoded:
            model = _resolve_model(core, request.gpu_model)
            return build_page(
                request,
                ListNodesResponse,
                (record for record in _by_name(core) if matches(record, model)),
                place_of=_name,
                element_of=lambda record: ("nodes", self._views.node(record)),
            )

        return await self._loop.read(view)

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
                lambda core: DrainNodeResponse(node=self._views.node(_node(core, name)), workloads=found)
            )
        record = await self._loop.cordon_node(
            name,
            request.gpus,
            reason=request.reason,
            drain=drain,
            call=self._call_of("DrainNode", request, context),
        )
        return DrainNodeResponse(node=self._views.node(record), workloads=found)

    async def list_gpus(self, request: ListGpusRequest, _context: Context) -> Encoded:
        """A page of devices by node and index."""

        def view(core: Core) -> Encoded:
            model = _resolve_model(core, request.gpu_model)
            records = _by_name(core) if not request.node_name else iter([_node(core, request.node_name)])
            return build_page(
                request,
                ListGpusResponse,
                (
                    (record, gpu)
                    for record, gpu in list_devices(records)
                    if (not model or gpu.model == model)
                    and (not request.min_free_milli or free_milli(record, gpu) >= request.min_free_milli)
                ),
                place_of=lambda item: (item[0].inventory.node_name, item[1].index),
                element_of=lambda item: ("gpus", self._views.gpu(*item, core.state.workloads)),
            )

        return await self._loop.read(view)

    async def list_plans(self, request: ListPlansRequest, _context: Context) -> Encoded:
        """A page of plans by node name."""

        def view(core: Core) -> Encoded:
            records = _by_name(core) if not request.node_name else iter([_node(core, request.node_name)])
            return build_page(
                request,
                ListPlansResponse,
                records,
                place_of=_name,
                element_of=lambda record: ("plans", self._views.plan(core, record.inventory.node_name)),
            )

        return await self._loop.read(view)

    # Workloads

    async def submit_workload(self, request: SubmitWorkloadRequest, context: Context) -> SubmitWorkloadResponse:
        """Accept a workload; answered once it is on disk and placed or known to wait."""
        try:
            call = self._call_of("SubmitWorkload", request, context)
            workload = await self._loop.submit(request, self._origin_of(context), call=call)
        except Unavailable:
            # Not refused: nobody decided.
            raise
        except (Fault, ContractError):
            self._views.refused += 1
            raise
        return SubmitWorkloadResponse(workload=workload)

    async def get_workload(self, request: GetWorkloadRequest, _context: Context) -> GetWorkloadResponse:
        """One workload."""

        def view(core: Core) -> Workload:
            workload = core.state.find_workload(request.workload_id)
            if workload is None:
                raise NotFound(f"there is no workload {request.workload_id}; list them with ListWorkloads")
            return self._views.with_advice(core, self._views.workload(workload, core.state.nodes))

        return GetWorkloadResponse(workload=await self._loop.read(view))

    async def list_workloads(self, request: ListWorkloadsRequest, _context: Context) -> Encoded:
        """A page of workloads, or of their summaries, in the order of their submission."""
        is_summary = request.view is WorkloadView.SUMMARY

        def matches(workload: Workload) -> bool:
            spec = workload.spec
            return (
                (not request.phases or workload.phase in request.phases)
                and (not request.namespace or spec.namespace == request.namespace)
                and (not request.user or spec.user == request.user)
                and (not request.queue or spec.queue == request.queue)
                and request.name_contains in spec.name
                and (not request.array_id or (spec.array is not None and spec.array.array_id == request.array_id))
                and (not request.node_name or any(at.node_name == request.node_name for at in workload.placements))
            )

        def view(core: Core) -> Encoded:
            places = self._views.queue_positions(core) if request.queue_positions else {}

            def element(workload: Workload) -> tuple[str, Workload | WorkloadSummary | bytes]:
                place = places.get(workload.workload_id, 0) if workload.phase is WorkloadPhase.PENDING else 0
                if is_summary:
                    return "summaries", self._views.workload_summary(workload, place)
                shown = self._views.workload(workload, core.state.nodes)
                return "workloads", replace(shown, queue_position=place) if place else shown

            return build_page(
                request,
                ListWorkloadsResponse,
                _join_arrays(core, matches) if request.whole_arrays else filter(matches, _by_submission(core)),
                place_of=_submission,
                element_of=element,
                most=SUMMARY_PAGE_SIZE_MOST if is_summary else PAGE_SIZE_MOST,
            )

        return await self._loop.read(view)

    async def watch_workloads(
        self, request: WatchWorkloadsRequest, _context: Context
    ) -> AsyncIterator[WatchWorkloadsResponse]:
        """Every workload changed after a revision as it stands, then every change as it comes."""
        after = request.after_revision
        self._enter()
        try:
            revision, workloads = await self._loop.read(lambda core: _changed_after(core, after))
            for workload in workloads:
                yield WatchWorkloadsResponse(workload=workload)
            while True:
                for workload in self.changes.changes_after(revision):
                    yield WatchWorkloadsResponse(workload=workload)
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

    async def explain_workload(self, request: ExplainWorkloadRequest, _context: Context) -> ExplainWorkloadResponse:
        """Why a workload stands where it stands."""

        def view(core: Core) -> Explanation:
            explanation = core.explain_workload(request.workload_id)
            workload = mark_lost_replicas(explanation.workload, core.state.nodes)
            workload = self._views.with_advice(core, workload)
            hold = describe_start_hold(workload, core.state.nodes)
            return replace(explanation, workload=replace(workload, reason=workload.reason or hold))

        return ExplainWorkloadResponse(explanation=await self._loop.read(view))

    # Policy

    async def get_policy(self, _request: GetPolicyRequest, _context: Context) -> GetPolicyResponse:
        """The policy in force."""
        return GetPolicyResponse(policy=await self._loop.read(lambda core: core.state.policy))

    async def update_policy(self, request: UpdatePolicyRequest, context: Context) -> UpdatePolicyResponse:
        """Put a policy in force."""
        call = self._call_of("UpdatePolicy", request, context)
        policy = await self._loop.update_policy(request.policy, call=call)
        self._log.info("policy=updated revision=%d objective=%s", policy.revision, policy.objective)
        return UpdatePolicyResponse(policy=policy)

    # Queues

    async def list_queues(self, request: ListQueuesRequest, _context: Context) -> Encoded:
        """A page of queues with what uses them, each after its parent."""

        def view(core: Core) -> Encoded:
            return build_page(
                request,
                ListQueuesResponse,
                self._views.queues(core),
                place_of=lambda item: (item[0],),
                element_of=lambda item: ("queues", item[1]()),
            )

        return await self._loop.read(view)

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

    # Moves

    async def recommend_moves(self, request: RecommendMovesRequest, _context: Context) -> RecommendMovesResponse:
        """Moves within a budget that would lower the cost of the whole cluster; nothing changes."""
        if self._is_searching:
            raise ResourceExhausted("another search for moves is under way; ask again in a few seconds")
        self._is_searching = True
        try:
            problem = await self._loop.read(lambda core: core.survey_moves(request))
            found = await asyncio.to_thread(recommend_moves, problem)
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


def _by_name(core: Core) -> Iterator[NodeRecord]:
    nodes = core.state.nodes
    return (nodes[name] for name in sorted(nodes))


def _resolve_model(core: Core, name: str) -> str:
    """The catalogue's name of a GPU model that people ask for, empty for any; raises InvalidArgument."""
    reported = core.snapshot().models if name else ()
    return next(iter(resolve_reported_models((name,) if name else (), "gpu_model", reported)), "")


def _name(record: NodeRecord) -> tuple[str]:
    return (record.inventory.node_name,)


def _by_submission(core: Core) -> Iterable[Workload]:
    """Workloads by the time of their submission; they are kept in its order, which is another where a clock was set back."""
    workloads = list(core.state.workloads.values())
    times = [workload.submitted_ns for workload in workloads]
    return workloads if all(map(operator.lt, times, times[1:])) else sorted(workloads, key=_submission)


def _join_arrays(core: Core, matches: Callable[[Workload], bool]) -> Iterator[Workload]:
    """Yields the workloads that match, and arrays of which an element does as a whole, in the place of their first one."""
    ordered = list(_by_submission(core))
    wanted = {one.spec.array.array_id for one in ordered if one.spec.array is not None and matches(one)}
    for workload in ordered:
        element = workload.spec.array
        if element is None:
            if matches(workload):
                yield workload
        elif element.array_id in wanted:
            wanted.discard(element.array_id)
            yield core.workload_or_array(element.array_id)


def _submission(workload: Workload) -> tuple[int, str]:
    return (workload.submitted_ns, workload.workload_id)


def _node(core: Core, name: str) -> NodeRecord:
    try:
        return core.state.nodes[name]
    except KeyError:
        raise NotFound(f"there is no node {name}; list them with ListNodes") from None


def _is_cordoned(core: Core, node_name: str, gpus: tuple[str, ...]) -> bool:
    """Whether an operator cordoned the node, or one of these GPUs of it; raises NotFound."""
    record = find_node(core.state, node_name)
    uuids = resolve_gpus(record, gpus)
    return record.cordon is not None if not uuids else any(uuid in record.gpu_cordons for uuid in uuids)


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
