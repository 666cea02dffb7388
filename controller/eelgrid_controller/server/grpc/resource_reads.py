"""ReadService: the operators' reads of a cluster's state, for a controller that leads and for one that follows.

Owns which elements a listing has and in which order. Must not know whose state it reads, nor how old that is.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc.aio

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.workloads import resolve_reported_models
from eelgrid_controller.server.grpc.authorization import ViewFor
from eelgrid_controller.server.grpc.pagination import build_page
from eelgrid_controller.server.grpc.resource_views import ResourceViews, free_milli, list_devices
from eelgrid_controller.state.attempts import describe_start_hold
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.node_changes import mark_lost_replicas
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import (
    PAGE_SIZE_MOST,
    SUMMARY_PAGE_SIZE_MOST,
    ExplainWorkloadRequest,
    ExplainWorkloadResponse,
    Explanation,
    GetPolicyRequest,
    GetPolicyResponse,
    GetSummaryRequest,
    GetSummaryResponse,
    GetWorkloadRequest,
    GetWorkloadResponse,
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
    Workload,
    WorkloadPhase,
    WorkloadSummary,
    WorkloadView,
    resolve_pool,
)
from eelgrid_protos.rpc import Encoded

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Result = TypeVar("_Result")


class ReadCore(Protocol):
    """How a view of the core is computed, as `ControllerLoop.read` does."""

    async def __call__(self, view: Callable[[Core], _Result], /) -> _Result:
        """Returns the result of `view`."""


class ReadService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`: the calls that `stale_reads` lists."""

    def __init__(
        self,
        read: ReadCore,
        views: ResourceViews,
        view_for: ViewFor,
        confirm: Callable[[Context], None] = lambda _context: None,
    ) -> None:
        """`view_for` says how the caller of a call may see workloads.

        `confirm` is asked before an answer is sent whether it may be, and raises Fault if not.
        """
        self._read = read
        self._views = views
        self._view_for = view_for
        self._confirm = confirm

    async def _answer(self, view: Callable[[Core], _Result], context: Context) -> _Result:
        found = await self._read(view)
        self._confirm(context)
        return found

    async def get_summary(self, _request: GetSummaryRequest, context: Context) -> GetSummaryResponse:
        """The cluster at a glance."""
        return GetSummaryResponse(summary=await self._answer(self._views.summary, context))

    async def list_nodes(self, request: ListNodesRequest, context: Context) -> Encoded:
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

        return await self._answer(view, context)

    async def list_gpus(self, request: ListGpusRequest, context: Context) -> Encoded:
        """A page of devices by node and index."""

        def view(core: Core) -> Encoded:
            model = _resolve_model(core, request.gpu_model)
            records = _by_name(core) if not request.node_name else iter([get_node(core, request.node_name)])
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

        return await self._answer(view, context)

    async def list_plans(self, request: ListPlansRequest, context: Context) -> Encoded:
        """A page of plans by node name."""

        def view(core: Core) -> Encoded:
            records = _by_name(core) if not request.node_name else iter([get_node(core, request.node_name)])
            return build_page(
                request,
                ListPlansResponse,
                records,
                place_of=_name,
                element_of=lambda record: ("plans", self._views.plan(core, record.inventory.node_name)),
            )

        return await self._answer(view, context)

    async def get_workload(self, request: GetWorkloadRequest, context: Context) -> GetWorkloadResponse:
        """One workload."""

        def view(core: Core) -> Workload:
            workload = core.state.find_workload(request.workload_id)
            if workload is None:
                raise NotFound(f"there is no workload {request.workload_id}; list them with ListWorkloads")
            return self._views.with_advice(core, self._views.workload(workload, core.state.nodes))

        show = self._view_for(context)
        return GetWorkloadResponse(workload=show(await self._answer(view, context)))

    async def list_workloads(self, request: ListWorkloadsRequest, context: Context) -> Encoded:
        """A page of workloads, or of their summaries, in the order of their submission."""
        is_summary, show = request.view is WorkloadView.SUMMARY, self._view_for(context)

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
                shown = show(self._views.workload(workload, core.state.nodes))
                return "workloads", replace(shown, queue_position=place) if place else shown

            return build_page(
                request,
                ListWorkloadsResponse,
                _join_arrays(core, matches) if request.whole_arrays else filter(matches, _by_submission(core)),
                place_of=_submission,
                element_of=element,
                most=SUMMARY_PAGE_SIZE_MOST if is_summary else PAGE_SIZE_MOST,
            )

        return await self._answer(view, context)

    async def explain_workload(self, request: ExplainWorkloadRequest, context: Context) -> ExplainWorkloadResponse:
        """Why a workload stands where it stands."""
        show = self._view_for(context)

        def view(core: Core) -> Explanation:
            explanation = core.explain_workload(request.workload_id)
            workload = mark_lost_replicas(explanation.workload, core.state.nodes)
            workload = self._views.with_advice(core, workload)
            hold = describe_start_hold(workload, core.state.nodes)
            workload = replace(workload, reason=workload.reason or hold)
            return replace(explanation, workload=show(workload))

        return ExplainWorkloadResponse(explanation=await self._answer(view, context))

    async def get_policy(self, _request: GetPolicyRequest, context: Context) -> GetPolicyResponse:
        """The policy in force."""
        return GetPolicyResponse(policy=await self._answer(lambda core: core.state.policy, context))

    async def list_queues(self, request: ListQueuesRequest, context: Context) -> Encoded:
        """A page of queues with what uses them, each after its parent."""

        def view(core: Core) -> Encoded:
            return build_page(
                request,
                ListQueuesResponse,
                self._views.queues(core),
                place_of=lambda item: (item[0],),
                element_of=lambda item: ("queues", item[1]()),
            )

        return await self._answer(view, context)


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


def get_node(core: Core, name: str) -> NodeRecord:
    """Returns the record of a node; raises NotFound."""
    try:
        return core.state.nodes[name]
    except KeyError:
        raise NotFound(f"there is no node {name}; list them with ListNodes") from None
