"""The calls about promises of the operators' service in memory: it keeps points and says what a test put there."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eelgrid_protos import messages
from eelgrid_protos.messages import MeasuredPoint, Placement, Workload

__all__ = ["FakePromises"]


@dataclass
class FakePromises:
    """Shares the workloads of the fake that it belongs to."""

    find: Callable[[str], Workload]
    keep: Callable[[Workload], None]
    room: int = 100
    points: dict[tuple, MeasuredPoint] = field(default_factory=dict)
    answer: messages.ListPromisesResponse = field(default_factory=messages.ListPromisesResponse)
    # What running jobs have measured.
    interference: list[messages.MeasuredInterference] = field(default_factory=list)
    # What the GPUs below any budget draw.
    drawn_w: float | None = None
    progress: list[tuple[str, float]] = field(default_factory=list)

    async def scale_workload(self, request: Any, context: Any) -> messages.ScaleWorkloadResponse:
        found = self.find(request.workload_id)
        count = min(self.room, request.replicas)
        places = tuple(Placement(replica=number, node_name="node-0") for number in range(count))
        scaled = replace(found, placements=places, spec=replace(found.spec, replicas=count))
        self.keep(scaled)
        return messages.ScaleWorkloadResponse(workload=scaled)

    async def record_points(self, request: Any, context: Any) -> messages.RecordPointsResponse:
        news = [point for point in request.points if self.points.get(_key(point)) != point]
        self.points.update({_key(point): point for point in news})
        return messages.RecordPointsResponse(recorded=len(news))

    async def list_points(self, request: Any, context: Any) -> messages.ListPointsResponse:
        rows = [point for point in self.points.values() if request.profile in {"", point.profile}]
        return messages.ListPointsResponse(points=tuple(rows), total=len(rows))

    async def list_interference(self, request: Any, context: Any) -> messages.ListInterferenceResponse:
        return messages.ListInterferenceResponse(pairs=tuple(self.interference), total=len(self.interference))

    async def report_progress(self, request: Any, context: Any) -> messages.ReportProgressResponse:
        self.find(request.workload_id)
        self.progress.append((request.workload_id, request.work_done))
        return messages.ReportProgressResponse()

    async def imagine_budgets(self, request: Any, context: Any) -> messages.ImagineBudgetsResponse:
        statuses = tuple(
            messages.BudgetStatus(budget=budget, claimed_w=0.9 * budget.limit_w, measured_w=self.drawn_w)
            for budget in request.budgets
        )
        return messages.ImagineBudgetsResponse(jobs=self.answer.jobs, budgets=statuses)

    async def list_promises(self, request: Any, context: Any) -> messages.ListPromisesResponse:
        return self.answer


def _key(point: MeasuredPoint) -> tuple:
    return (point.profile, point.gpu_model, point.mig_profile, point.gpus, point.batch, point.power_limit_w)
