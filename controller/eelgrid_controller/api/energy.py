"""The operators' call about energy. Owns the translation between the contract and the ledger's question and answer."""

from typing import Any, Protocol, TypeAlias

import grpc.aio

from eelgrid_controller.energy_ledger.asking import Answer, Asked, Done, Spent, asked_of
from eelgrid_controller.loop import ControllerLoop
from eelgrid_protos.messages import EnergyGroup, EnergySpent, EnergyWork, QueryEnergyRequest, QueryEnergyResponse

__all__ = ["EnergyCalls"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_ROWS = 1000


class Asks(Protocol):
    """Who has the ledger."""

    async def ask(self, asked: Asked) -> Answer:
        """The answer; raises Unavailable."""


class EnergyCalls:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, loop: ControllerLoop, desk: Asks) -> None:
        self._loop = loop
        self._desk = desk

    async def query_energy(self, request: QueryEnergyRequest, _context: Context) -> QueryEnergyResponse:
        """Who spent how many joules; raises InvalidArgument and Unavailable."""
        asked = asked_of(
            begin_ns=request.begin_ns, end_ns=request.end_ns, group_by=request.group_by,
            filters=dict(request.filters), rows_most=request.rows_most or _ROWS,
        )  # fmt: skip
        answer = await self._desk.ask(asked)
        prices = self._loop.core.state.policy.prices
        return QueryEnergyResponse(
            begin_ns=asked.begin_s * 10**9,
            end_ns=asked.end_s * 10**9,
            currency="" if prices is None else prices.currency,
            groups=tuple(
                EnergyGroup(values=group.values, spent=_spent(group.spent), work=tuple(map(_work, group.done)))
                for group in answer.groups
            ),
            left_out=_spent(answer.left_out),
            left_out_groups=answer.left_out_rows,
            unallocated=_spent(answer.unallocated),
            unattributed=_spent(answer.unattributed),
            measured_mj=answer.measured_mj,
            uncertainty_mj=answer.uncertainty_mj,
            uncounted_s=answer.uncounted_s,
        )


def _spent(spent: Spent) -> EnergySpent:
    return EnergySpent(
        bare_idle_mj=spent.bare_mj, context_idle_mj=spent.context_mj, active_mj=spent.active_mj, cost=spent.cost,
        carbon_g=spent.carbon_g,
    )  # fmt: skip


def _work(done: Done) -> EnergyWork:
    return EnergyWork(
        unit=done.unit, amount=done.amount, counted_s=done.counted_s, missed_s=done.missed_s,
        energy_per_unit_j=done.energy_mj / 1000.0 / done.amount if done.amount > 0.0 else None,
    )  # fmt: skip
