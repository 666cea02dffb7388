"""The calls about queues of the operators' service in memory: statuses that a test put there, and moves that it sees."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eelgrid_protos import messages

__all__ = ["FakeQueues"]


@dataclass
class FakeQueues:
    """Has statuses in one page; moves workloads without asking whether they wait."""

    find: Callable[[str], messages.Workload]
    statuses: list[messages.QueueStatus] = field(default_factory=list)

    async def list_queues(self, request: Any, context: Any) -> messages.ListQueuesResponse:
        return messages.ListQueuesResponse(queues=tuple(self.statuses), total=len(self.statuses))

    async def hold_workload(self, request: messages.HoldWorkloadRequest, context: Any) -> messages.HoldWorkloadResponse:
        held = replace(self.find(request.workload_id), held_by="ana", reason="held: by ana")
        return messages.HoldWorkloadResponse(workload=held)

    async def release_workload(
        self, request: messages.ReleaseWorkloadRequest, context: Any
    ) -> messages.ReleaseWorkloadResponse:
        return messages.ReleaseWorkloadResponse(workload=self.find(request.workload_id))

    async def requeue_workload(
        self, request: messages.RequeueWorkloadRequest, context: Any
    ) -> messages.RequeueWorkloadResponse:
        return messages.RequeueWorkloadResponse(workload=replace(self.find(request.workload_id), requeuing=True))

    async def move_to_queue(self, request: messages.MoveToQueueRequest, context: Any) -> messages.MoveToQueueResponse:
        found = self.find(request.workload_id)
        return messages.MoveToQueueResponse(
            workload=replace(found, spec=replace(found.spec, queue=request.queue), reason="quota: too little")
        )
