"""The call about energy of the operators' service in memory: it says what a test put there."""

from dataclasses import dataclass, field, replace
from typing import Any

from eelgrid_protos import messages
from eelgrid_protos.messages import EnergySpent

__all__ = ["NOTHING_SPENT", "FakeEnergy"]

NOTHING_SPENT = messages.QueryEnergyResponse(
    begin_ns=0, end_ns=0, left_out=EnergySpent(), unallocated=EnergySpent(), unattributed=EnergySpent()
)


@dataclass
class FakeEnergy:
    """Has what was asked for, too; a failure is raised instead of an answer."""

    answer: messages.QueryEnergyResponse = NOTHING_SPENT
    asked: list[messages.QueryEnergyRequest] = field(default_factory=list)
    failure: Exception | None = None

    async def query_energy(self, request: Any, context: Any) -> messages.QueryEnergyResponse:
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure
        return replace(self.answer, begin_ns=request.begin_ns, end_ns=request.end_ns)
