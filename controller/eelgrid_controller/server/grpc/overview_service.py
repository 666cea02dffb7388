"""OverviewService: the overview, computed at most once per second whoever calls.

Keeps `OverviewModel` up to date in slices, so that no call holds the event loop for long, and asks the energy ledger and
the spending limits beside the loop. What they said last is used while they answer.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.energy.ledger import LedgerAmount, LedgerAnswer, LedgerQuery
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.grpc.leader_terms import confirm_read
from eelgrid_controller.server.grpc.overview import LedgerFigures, OverviewInputs, OverviewModel
from eelgrid_controller.state.spending import day_bounds, utc_offset_minutes_of
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import (
    GetOverviewRequest,
    GetOverviewResponse,
    ListPromisesResponse,
    NodeEvent,
    Overview,
    Policy,
    SpendingStatus,
    TodayEnergy,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_NANO = 10**9
_KEPT_S = 1.0
# The ledger itself writes what agents send every few seconds.
_LEDGER_EVERY_S = 5.0
# The first caller waits for the ledger so long, later ones for its next answer so long.
_LEDGER_FIRST_S, _LEDGER_NEXT_S = 5.0, 0.1
_CONSUMERS_READ_MOST = 5000
# A slice of nodes takes some 4 ms, one of workloads 3 ms.
_NODES_SLICE, _WORKLOADS_SLICE = 50, 2000
_ROUNDS_MOST = 3


class OverviewService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(
        self,
        *,
        loop: ControllerLoop,
        telemetry: Telemetry,
        promises: Callable[[], ListPromisesResponse],
        faults: Mapping[tuple[str, str], tuple[float, NodeEvent]],
        ledger: LedgerWriter,
        spending: Callable[[], Any],
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self._loop, self._telemetry, self._promises, self._faults = loop, telemetry, promises, faults
        self._ledger, self._spending, self._clock, self._log = ledger, spending, clock, log
        self._model = OverviewModel()
        self._turn = asyncio.Lock()
        self._kept: tuple[float, Overview] | None = None
        self._figures: LedgerFigures | None = None
        self._statuses: tuple[SpendingStatus, ...] = ()
        self._ledger_problem = ""
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        loop.listeners.append(self._on_commit)

    def close(self) -> None:
        """Asks the ledger no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def get_overview(self, _request: GetOverviewRequest, context: Context) -> GetOverviewResponse:
        """The overview, at most a second old."""
        found = await self.overview()
        confirm_read(self._loop, context)
        return GetOverviewResponse(overview=found)

    async def overview(self) -> Overview:
        """Returns the overview, at most a second old."""
        async with self._turn:
            if self._kept is not None and 0.0 <= self._clock.monotonic_s() - self._kept[0] < _KEPT_S:
                return self._kept[1]
            await self._ask_ledger()
            await self._update_model()
            found = await self._loop.read(self._build)
            self._kept = self._clock.monotonic_s(), found
            return found

    async def idle_gpus(self) -> frozenset[tuple[str, int]]:
        """Returns node and index of each held GPU that counts as idle in the overview."""
        await self.overview()
        return frozenset((name, one.gpu_index) for name, one in self._model.list_idle_gpus(self._clock.now_ns()))

    def _on_commit(self, committed: CommitResult) -> None:
        self._model.note_workloads(
            [key for event in committed.events if (key := getattr(event, "workload_id", None)) is not None]
        )
        for event in committed.events:
            self._model.note_workloads(getattr(event, "workload_ids", ()))

    async def _update_model(self) -> None:
        """Counts what changed anew, in slices; the last few are left to the answer."""
        for _ in range(_ROUNDS_MOST):
            state = self._loop.core.state
            names = self._model.list_changed_nodes(state, self._telemetry, **self._now())
            for start in range(0, len(names), _NODES_SLICE):
                await asyncio.sleep(0)
                part = names[start : start + _NODES_SLICE]
                self._model.update_nodes(self._loop.core.state, part, self._telemetry, **self._now())
            if len(names) <= _NODES_SLICE:
                break
            await asyncio.sleep(0)
        is_left = True
        while is_left:
            is_left = self._model.update_waiting(self._loop.core.state, most=_WORKLOADS_SLICE) > 0
            await asyncio.sleep(0)

    def _now(self) -> dict[str, Any]:
        return {"now_s": self._clock.monotonic_s(), "now_ns": self._clock.now_ns()}

    def _build(self, core: Core) -> Overview:
        fault = self._loop.journal_fault
        inputs = OverviewInputs(
            **self._now(),
            promises=self._promises(),
            ledger=self._figures,
            spending=self._statuses,
            journal_problem="" if fault is None else f"The journal cannot be written: {fault.message}",
            ledger_problem=self._ledger_problem,
            faults=self._faults,
        )
        return self._model.build_overview(core.state, self._telemetry, inputs)

    # The ledger

    async def _ask_ledger(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._asking is None and now_s - self._asked_s >= _LEDGER_EVERY_S:
            self._asking = asyncio.create_task(self._read_ledger())
            self._asking.add_done_callback(self._on_asked)
        if self._asking is not None:
            is_first = self._figures is None and not self._ledger_problem
            await asyncio.wait((self._asking,), timeout=_LEDGER_FIRST_S if is_first else _LEDGER_NEXT_S)

    def _on_asked(self, task: asyncio.Task[None]) -> None:
        self._asking, self._asked_s = None, self._clock.monotonic_s()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ledger_problem = "The energy ledger cannot be read; the controller's log has the details."
            self._log.error("overview=incomplete part=ledger", exc_info=error)

    async def _read_ledger(self) -> None:
        policy, now_ns = self._loop.core.state.policy, self._clock.now_ns()
        bounds = day_bounds(now_ns, utc_offset_minutes_of(policy))
        queries = (
            LedgerQuery(begin_s=bounds.begin_s, end_s=bounds.end_s, group_by=("hour",)),
            LedgerQuery(
                begin_s=bounds.begin_s,
                end_s=bounds.end_s,
                group_by=("namespace", "user"),
                rows_most=_CONSUMERS_READ_MOST,
            ),
        )
        try:
            by_hour, by_consumer = await self._ledger.query(queries)
            self._statuses = await self._spending() if policy.spending else ()
        except Fault as error:
            self._ledger_problem = f"The energy ledger cannot be read: {error.message}"[:1000]
            return
        damaged = by_hour.damaged
        self._ledger_problem = f"Parts of the energy ledger are damaged: {damaged[0]}"[:1000] if damaged else ""
        self._figures = summarize_ledger(by_hour, by_consumer, policy, now_ns)


def summarize_ledger(by_hour: LedgerAnswer, by_consumer: LedgerAnswer, policy: Policy, now_ns: int) -> LedgerFigures:
    """Sums up two answers about today.

    The ledger has one price for all parts of an hour's energy, so the cost of the idle part is its share of each hour.
    """
    total, unallocated, owned = by_hour.total, by_hour.unallocated, by_hour.owned
    held_idle_j = (owned.bare_mj + owned.context_mj) / 1000.0
    idle_cost = unallocated.cost + sum(map(_idle_cost, (group.spent for group in by_hour.groups)))
    prices = policy.prices
    has_carbon = prices is not None and any(period.carbon_kg_per_kwh for period in prices.periods)
    today = TodayEnergy(
        begin_ns=by_hour.asked.begin_s * _NANO,
        end_ns=now_ns,
        energy_j=total.energy_mj / 1000.0,
        idle_j=unallocated.energy_mj / 1000.0 + held_idle_j,
        unallocated_j=unallocated.energy_mj / 1000.0,
        held_idle_j=held_idle_j,
        cost=total.cost if prices else None,
        idle_cost=idle_cost if prices else None,
        currency=prices.currency if prices else "",
        carbon_g=total.carbon_g if has_carbon else None,
    )
    consumers: dict[tuple[str, str], tuple[float, float]] = {}
    for group in by_consumer.groups:
        namespace, user = group.values
        consumers[namespace, user] = group.spent.energy_mj / 1000.0, group.spent.cost
    return LedgerFigures(today, consumers)


def _idle_cost(spent: LedgerAmount) -> float:
    idle_mj = spent.bare_mj + spent.context_mj
    return spent.cost * idle_mj / spent.energy_mj if spent.energy_mj else 0.0
