"""The call about spending limits of the operators' service in memory: it says what a test put there."""

from dataclasses import dataclass, field
from typing import Any

from eelgrid_protos import messages

__all__ = ["FakeSpending"]


@dataclass
class FakeSpending:
    """Has one answer."""

    answer: messages.ListSpendingResponse = field(default_factory=messages.ListSpendingResponse)

    async def list_spending(self, request: Any, context: Any) -> messages.ListSpendingResponse:
        return self.answer
