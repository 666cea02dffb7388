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

    async def move_to_queue(self, request: messages.MoveToQueueRequest, context: Any) -> messages.MoveToQueueResponse:
        found = self.find(request.workload_id)
        return messages.MoveToQueueResponse(
            workload=replace(found, spec=replace(found.spec, queue=request.queue), reason="quota: too little")
        )
