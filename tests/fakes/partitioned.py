"""The calls about partitions of the operators' service in memory: it answers what a test put there."""

from dataclasses import dataclass, field
from typing import Any

from eelgrid_protos import faults, messages

__all__ = ["FakePartitions"]


@dataclass
class FakePartitions:
    """Says what it was given, and keeps what was applied."""

    found: messages.PartitionRecommendation | None = None
    standing: list[messages.ListPartitionsResponse] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    horizons: list[float | None] = field(default_factory=list)

    async def recommend_partitions(self, request: Any, context: Any) -> messages.RecommendPartitionsResponse:
        self.horizons.append(request.horizon_s)
        if self.found is None:
            raise faults.FailedPrecondition("this controller partitions nothing")
        return messages.RecommendPartitionsResponse(recommendation=self.found)

    async def apply_partitions(self, request: Any, context: Any) -> messages.ApplyPartitionsResponse:
        if self.found is None or request.recommendation_id != self.found.recommendation_id:
            raise faults.NotFound(f"no recommendation {request.recommendation_id}")
        self.applied.append(request.recommendation_id)
        return messages.ApplyPartitionsResponse(revision=9, stages_left=self.found.stages - 1)

    async def list_partitions(self, request: Any, context: Any) -> messages.ListPartitionsResponse:
        return self.standing.pop(0) if len(self.standing) > 1 else self.standing[0]
