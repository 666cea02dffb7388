"""The operators' call about spending limits. Owns the call; whoever looks at spending has the answer."""

from typing import Any, Protocol, TypeAlias

import grpc.aio

from eelgrid_controller.loop import ControllerLoop
from eelgrid_controller.spending.standing import utc_offset_minutes_of
from eelgrid_protos.messages import ListSpendingRequest, ListSpendingResponse, SpendingStatus

__all__ = ["SpendingCalls"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Looks(Protocol):
    """Who looks at spending."""

    async def statuses(self) -> tuple[SpendingStatus, ...]:
        """Every limit as it stands now."""


class SpendingCalls:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, loop: ControllerLoop, desk: Looks) -> None:
        self._loop = loop
        self._desk = desk

    async def list_spending(self, _request: ListSpendingRequest, _context: Context) -> ListSpendingResponse:
        """What is spent of the policy's spending limits."""
        limits = await self._desk.statuses()
        policy = self._loop.core.state.policy
        return ListSpendingResponse(
            limits=limits,
            currency="" if policy.prices is None else policy.prices.currency,
            utc_offset_minutes=utc_offset_minutes_of(policy),
        )
