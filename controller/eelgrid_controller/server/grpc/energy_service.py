"""The operators' calls about energy and spending: queries, exports and the state of spending limits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.energy.ledger import (
    ExportClaim,
    Exporter,
    GroupWork,
    LedgerAmount,
    LedgerAnswer,
    LedgerQuery,
    parse_export,
    parse_queries,
    parse_query,
)
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.state.spending import utc_offset_minutes_of
from eelgrid_protos.messages import (
    ConfirmEnergyExportRequest,
    ConfirmEnergyExportResponse,
    EnergyExporter,
    EnergyGroup,
    EnergySpent,
    EnergyWork,
    ListEnergyExportersRequest,
    ListEnergyExportersResponse,
    ListSpendingRequest,
    ListSpendingResponse,
    QueryEnergyReportRequest,
    QueryEnergyReportResponse,
    QueryEnergyRequest,
    QueryEnergyResponse,
    RemoveEnergyExporterRequest,
    RemoveEnergyExporterResponse,
    SpendingStatus,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_ROWS = 1000
_NANO = 10**9
# The contract's bounds (eelgrid_protos/messages/energy.py).
_WHOLE_MOST = 2**64 - 1
_SUM_MOST = 1e15
_AMOUNT_MOST = 1e300


class LedgerQueries(Protocol):
    """Who has the ledger."""

    @property
    def exporters(self) -> Mapping[str, Exporter]:
        """Marks by name."""

    async def query(self, asked: Sequence[LedgerQuery]) -> list[LedgerAnswer]:
        """Answers to questions of one stretch; raises Unavailable."""

    async def settled_s(self) -> int:
        """Until when hours are settled; raises Unavailable."""

    async def confirm(self, export: ExportClaim) -> Exporter:
        """The mark as it is then; raises FailedPrecondition, ResourceExhausted and Unavailable."""

    async def remove_exporter(self, name: str) -> None:
        """Forgets a mark; raises NotFound and Unavailable."""


class EnergyService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, loop: ControllerLoop, desk: LedgerQueries, clock: Clock) -> None:
        self._loop = loop
        self._desk = desk
        self._clock = clock

    async def query_energy(self, request: QueryEnergyRequest, _context: Context) -> QueryEnergyResponse:
        """Who spent how many joules; raises InvalidArgument and Unavailable."""
        asked = parse_query(
            begin_ns=request.begin_ns,
            end_ns=request.end_ns,
            group_by=request.group_by,
            filters=dict(request.filters),
            rows_most=request.rows_most or _ROWS,
            with_nobody=request.with_nobody,
        )
        (answer,) = await self._desk.query((asked,))
        return self._build_response(answer)

    async def query_energy_report(
        self, request: QueryEnergyReportRequest, _context: Context
    ) -> QueryEnergyReportResponse:
        """The same for several groupings of one stretch; raises InvalidArgument and Unavailable."""
        asked = parse_queries(
            begin_ns=request.begin_ns,
            end_ns=request.end_ns,
            filters=dict(request.filters),
            groupings=[(one.group_by, one.rows_most or _ROWS) for one in request.groupings],
        )
        return QueryEnergyReportResponse(answers=tuple(map(self._build_response, await self._desk.query(asked))))

    async def confirm_energy_export(
        self, request: ConfirmEnergyExportRequest, _context: Context
    ) -> ConfirmEnergyExportResponse:
        """Moves a mark; raises InvalidArgument, FailedPrecondition, ResourceExhausted and Unavailable."""
        export = parse_export(
            name=request.name, begin_ns=request.begin_ns, end_ns=request.end_ns, revision=request.revision
        )
        return ConfirmEnergyExportResponse(exporter=self._exporter(await self._desk.confirm(export)))

    async def list_energy_exporters(
        self, _request: ListEnergyExportersRequest, _context: Context
    ) -> ListEnergyExportersResponse:
        """Marks by name; raises Unavailable."""
        settled_s = await self._desk.settled_s()
        exporters = self._desk.exporters
        return ListEnergyExportersResponse(
            exporters=tuple(self._exporter(exporters[name]) for name in sorted(exporters)),
            settled_ns=max(0, settled_s) * _NANO,
        )

    async def remove_energy_exporter(
        self, request: RemoveEnergyExporterRequest, _context: Context
    ) -> RemoveEnergyExporterResponse:
        """Forgets a mark; raises NotFound and Unavailable."""
        await self._desk.remove_exporter(request.name)
        return RemoveEnergyExporterResponse()

    def _build_response(self, answer: LedgerAnswer) -> QueryEnergyResponse:
        prices = self._loop.core.state.policy.prices
        return QueryEnergyResponse(
            begin_ns=answer.asked.begin_s * _NANO,
            end_ns=answer.asked.end_s * _NANO,
            currency="" if prices is None else prices.currency,
            # Where a group breaks the contract's bounds, it is at them: one of many must not cost the others their answer.
            groups=tuple(
                EnergyGroup(values=group.values, spent=_spent(group.spent), work=tuple(map(_work, group.done)))
                for group in answer.groups
            ),
            left_out=_spent(answer.left_out),
            left_out_groups=answer.left_out_rows,
            unallocated=_spent(answer.unallocated),
            unattributed=_spent(answer.unattributed),
            measured_mj=_whole(answer.measured_mj),
            uncertainty_mj=_whole(answer.uncertainty_mj),
            uncounted_s=_within(answer.uncounted_s, 0.0, _SUM_MOST),
            revision=answer.revision,
            damaged=answer.damaged,
        )

    def _exporter(self, one: Exporter) -> EnergyExporter:
        changed = one.changed
        return EnergyExporter(
            name=one.name,
            since_ns=one.since_s * _NANO,
            until_ns=one.until_s * _NANO,
            changed_hours=changed.hours if changed else 0,
            changed_first_ns=changed.first_s * _NANO if changed else 0,
            changed_last_ns=changed.last_s * _NANO if changed else 0,
            lag_s=one.lag_s(self._clock.now_ns() / _NANO),
        )


def _whole(value: int) -> int:
    return min(max(value, 0), _WHOLE_MOST)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high) if not math.isnan(value) else 0.0


def _spent(spent: LedgerAmount) -> EnergySpent:
    return EnergySpent(
        bare_idle_mj=_whole(spent.bare_mj),
        context_idle_mj=_whole(spent.context_mj),
        active_mj=_whole(spent.active_mj),
        cost=_within(spent.cost, -_SUM_MOST, _SUM_MOST),
        carbon_g=_within(spent.carbon_g, -_SUM_MOST, _SUM_MOST),
    )


def _work(done: GroupWork) -> EnergyWork:
    each_j = done.energy_mj / 1000.0 / done.amount if done.amount > 0.0 else None
    return EnergyWork(
        unit=done.unit,
        amount=_within(done.amount, 0.0, _AMOUNT_MOST),
        counted_s=_within(done.counted_s, 0.0, _SUM_MOST),
        missed_s=_within(done.missed_s, 0.0, _SUM_MOST),
        energy_per_unit_j=None if each_j is None else _within(each_j, 0.0, _AMOUNT_MOST),
    )


class SpendingSource(Protocol):
    """Who looks at spending."""

    async def statuses(self) -> tuple[SpendingStatus, ...]:
        """Every limit as it stands now."""


class SpendingService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, loop: ControllerLoop, desk: SpendingSource) -> None:
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
