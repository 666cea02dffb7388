"""The operators' calls about service-level objectives: scale, measured points, progress and objective status."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import grpc.aio

from eelgrid_controller.core.core import Core
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.authorization import DescribeCall, describe_no_call
from eelgrid_controller.server.grpc.pagination import build_page
from eelgrid_controller.state.measurements import make_point_key
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import (
    ImagineBudgetsRequest,
    ImagineBudgetsResponse,
    JobStatus,
    ListPointsRequest,
    ListPointsResponse,
    ListPromisesRequest,
    ListPromisesResponse,
    MeasuredPoint,
    PowerBudget,
    RecordPointsRequest,
    RecordPointsResponse,
    ReportProgressRequest,
    ReportProgressResponse,
    ScaleWorkloadRequest,
    ScaleWorkloadResponse,
    ServiceStatus,
    WorkloadPhase,
)
from eelgrid_protos.rpc import Encoded

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# The list and the element, and its place among all.
_Promised: TypeAlias = tuple[tuple[str, Any], tuple[int | str, ...]]


class ObjectiveSource(Protocol):
    """What keeps the promises."""

    def progress(self, workload_id: str, work_done: float) -> None:
        """A job tells how far it is."""

    def promises(self) -> ListPromisesResponse:
        """How promises are kept now."""

    async def imagine(self, budgets: Sequence[PowerBudget]) -> ImagineBudgetsResponse:
        """What jobs would have under other power budgets."""


class ObjectiveService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(
        self, *, loop: ControllerLoop, steers: ObjectiveSource, call_of: DescribeCall = describe_no_call
    ) -> None:
        self._loop = loop
        self._call_of = call_of
        self._steers = steers

    async def scale_workload(self, request: ScaleWorkloadRequest, context: Context) -> ScaleWorkloadResponse:
        """As many replicas as asked, or as there is room for."""
        call = self._call_of("ScaleWorkload", request, context)
        return ScaleWorkloadResponse(workload=await self._loop.scale(request.workload_id, request.replicas, call=call))

    async def record_points(self, request: RecordPointsRequest, context: Context) -> RecordPointsResponse:
        """Keep measured points."""
        call = self._call_of("RecordPoints", request, context)
        return RecordPointsResponse(recorded=await self._loop.record_points(request.points, call=call))

    async def list_points(self, request: ListPointsRequest, _context: Context) -> Encoded:
        """A page of points by profile and configuration."""

        def view(core: Core) -> Encoded:
            return build_page(
                request,
                ListPointsResponse,
                core.state.points.list_points(request.profile),
                place_of=_point_key,
                element_of=lambda point: ("points", point),
            )

        return await self._loop.read(view)

    async def report_progress(self, request: ReportProgressRequest, context: Context) -> ReportProgressResponse:
        """Note how far a job of the caller's own is."""
        call = self._call_of("ReportProgress", request, context)

        def check(core: Core) -> None:
            self._loop.check_owner(core, request.workload_id, call)
            workload = core.workload(request.workload_id)
            if workload.phase is not WorkloadPhase.PLACED or workload.spec.training is None:
                raise FailedPrecondition(
                    f"workload {request.workload_id} is no training job that runs and was promised anything; "
                    "give its spec a training promise, and report once it is placed"
                )

        await self._loop.read(check)
        self._steers.progress(request.workload_id, request.work_done)
        return ReportProgressResponse()

    async def list_promises(self, request: ListPromisesRequest, _context: Context) -> Encoded:
        """A page of how promises are kept: services, then jobs, then budgets."""
        found = self._steers.promises()
        items: list[_Promised] = [
            *((("services", one), (0, one.workload_id)) for one in sorted(found.services, key=_id)),
            *((("jobs", one), (1, one.workload_id)) for one in sorted(found.jobs, key=_id)),
            *((("budgets", one), (2, number)) for number, one in enumerate(found.budgets)),
        ]
        return build_page(
            request,
            ListPromisesResponse,
            items,
            place_of=lambda item: item[1],
            element_of=lambda item: item[0],
            default=len(items) + 1,
            price_ratio=found.price_ratio,
        )

    async def imagine_budgets(self, request: ImagineBudgetsRequest, _context: Context) -> ImagineBudgetsResponse:
        """What jobs would lose under other power budgets."""
        return await self._steers.imagine(request.budgets)


def _id(status: ServiceStatus | JobStatus) -> str:
    return status.workload_id


def _point_key(point: MeasuredPoint) -> tuple[int | str, ...]:
    return (point.profile, *make_point_key(point))
