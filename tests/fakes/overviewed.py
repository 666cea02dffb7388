"""An operators' service in memory whose watch stays open and whose overview is what a test puts there."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from eelgrid_protos import messages
from tests.fakes.operators import FakeOperators

__all__ = ["WatchedOperators"]


@dataclass
class WatchedOperators(FakeOperators):
    """Sends a summary every few milliseconds, as long as somebody watches."""

    overview: messages.Overview = field(default_factory=lambda: messages.Overview(time_ns=1))

    @property
    def parts(self) -> tuple[object, ...]:
        """Who has the calls; the overview is this object's."""
        others = (part for part in super().parts if part is not self and not hasattr(part, "get_overview"))
        return self, *others

    async def get_overview(self, request: Any, context: Any) -> messages.GetOverviewResponse:
        self._begin("get_overview")
        return messages.GetOverviewResponse(overview=self.overview)

    async def watch_summary(self, request: Any, context: Any) -> AsyncIterator[messages.WatchSummaryResponse]:
        while True:
            yield messages.WatchSummaryResponse(summary=self.summary())
            await asyncio.sleep(0.05)
