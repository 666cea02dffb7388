"""The operators' calls that planners answer: objectives, MIG partitions, energy and spending.

`ObjectiveService` scales, records measured points and progress, and lists objectives and measured interference. `PartitionService` recommends,
applies and lists MIG layouts; the stages of an applied change follow one after the other. `EnergyService` queries the
energy ledger and lists spending limits.
"""

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.energy.ledger import (
    Exporter,
    GroupWork,
    LedgerAmount,
    LedgerAnswer,
    parse_export,
    parse_queries,
    parse_query,
)
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.control_loop import ControlLoop
from eelgrid_controller.partition.recommendation import (
    PartitionSearchResult,
    PartitionStage,
    recommend_partitions,
    unfinished_gpus,
)
from eelgrid_controller.partition.survey import SurveyedGpu, apply_problem, partition_statuses
from eelgrid_controller.runtime.audit_log import AuditedCall
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.energy_monitors import SpendingMonitor
from eelgrid_controller.server.grpc.authorization import DescribeCall
from eelgrid_controller.server.grpc.pagination import build_page
from eelgrid_controller.server.grpc.searches import search_to_end
from eelgrid_controller.state.measurements import make_point_key
from eelgrid_controller.state.spending import utc_offset_minutes_of
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.faults import FailedPrecondition, Fault, NotFound, ResourceExhausted
from eelgrid_protos.messages import (
    ApplyPartitionsRequest,
    ApplyPartitionsResponse,
    ConfirmEnergyExportRequest,
    ConfirmEnergyExportResponse,
    EnergyExporter,
    EnergyGroup,
    EnergySpent,
    EnergyWork,
    ImagineBudgetsRequest,
    ImagineBudgetsResponse,
    ListEnergyExportersRequest,
    ListEnergyExportersResponse,
    ListInterferenceRequest,
    ListInterferenceResponse,
    ListPartitionsRequest,
    ListPartitionsResponse,
    ListPointsRequest,
    ListPointsResponse,
    ListPromisesRequest,
    ListPromisesResponse,
    ListSpendingRequest,
    ListSpendingResponse,
    QueryEnergyReportRequest,
    QueryEnergyReportResponse,
    QueryEnergyRequest,
    QueryEnergyResponse,
    RecommendPartitionsRequest,
    RecommendPartitionsResponse,
    RecordPointsRequest,
    RecordPointsResponse,
    RemoveEnergyExporterRequest,
    RemoveEnergyExporterResponse,
    ReportProgressRequest,
    ReportProgressResponse,
    ScaleWorkloadRequest,
    ScaleWorkloadResponse,
    WorkloadPhase,
)
from eelgrid_protos.quantities import SENTENCE_LETTERS_MOST
from eelgrid_protos.rpc import Encoded

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# The list and the element, and its place among all.
_Promised: TypeAlias = tuple[tuple[str, Any], tuple[int | str, ...]]


class ObjectiveService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, loop: ControllerLoop, steers: ControlLoop, call_of: DescribeCall) -> None:
        self._loop = loop
        self._call_of = call_of
        self._steers = steers

    async def scale_workload(self, request: ScaleWorkloadRequest, context: Context) -> ScaleWorkloadResponse:
        """As many replicas as asked, or as there is room for."""
        call = self._call_of("ScaleWorkload", request, context)
        return ScaleWorkloadResponse(workload=await self._loop.scale(request.workload_id, request.replicas, call=call))

    async def record_points(self, request: RecordPointsRequest, context: Context) -> RecordPointsResponse:
        """Keep measured points."""
        call = self._call_of("RecordPoints", request, context)
        return RecordPointsResponse(recorded=await self._loop.record_measurements(request.points, call=call))

    async def list_points(self, request: ListPointsRequest, _context: Context) -> Encoded:
        """A page of points by profile and configuration."""

        def view(core: Core) -> Encoded:
            return build_page(
                request,
                ListPointsResponse,
                core.state.points.list_points(request.profile),
                place_of=lambda point: (point.profile, *make_point_key(point)),
                element_of=lambda point: ("points", point),
            )

        return await self._loop.read(view)

    async def list_interference(self, request: ListInterferenceRequest, _context: Context) -> Encoded:
        """A page of pairs of loads that running jobs have measured."""

        def view(core: Core) -> Encoded:
            return build_page(
                request,
                ListInterferenceResponse,
                core.list_interference(),
                place_of=lambda pair: (pair.load, pair.beside),
                element_of=lambda pair: ("pairs", pair),
            )

        return await self._loop.read(view)

    async def report_progress(self, request: ReportProgressRequest, context: Context) -> ReportProgressResponse:
        """Note how far a job of the caller's own is."""
        call = self._call_of("ReportProgress", request, context)

        def check(core: Core) -> None:
            self._loop.check_owner(core, request.workload_id, call)
            workload = core.workload(request.workload_id)
            if workload.phase is not WorkloadPhase.PLACED or workload.spec.training is None:
                raise FailedPrecondition(
                    f"workload {request.workload_id} is no training job that runs and was promised anything; "
                    "give its spec a training promise, and report once it is placed"
                )

        await self._loop.read(check)
        self._steers.progress(request.workload_id, request.work_done)
        return ReportProgressResponse()

    async def list_promises(self, request: ListPromisesRequest, _context: Context) -> Encoded:
        """A page of how promises are kept: services, then jobs, then budgets."""
        found, by_id = self._steers.promises(), attrgetter("workload_id")
        items: list[_Promised] = [
            *((("services", one), (0, one.workload_id)) for one in sorted(found.services, key=by_id)),
            *((("jobs", one), (1, one.workload_id)) for one in sorted(found.jobs, key=by_id)),
            *((("budgets", one), (2, number)) for number, one in enumerate(found.budgets)),
        ]
        return build_page(
            request,
            ListPromisesResponse,
            items,
            place_of=lambda item: item[1],
            element_of=lambda item: item[0],
            default=len(items) + 1,
            price_ratio=found.price_ratio,
        )

    async def imagine_budgets(self, request: ImagineBudgetsRequest, _context: Context) -> ImagineBudgetsResponse:
        """What jobs would lose under other power budgets."""
        return await self._steers.imagine(request.budgets)


KEPT_MOST = 8
POLL_S = 0.25
ASK_FIRST_S, ASK_MOST_S = 2.0, 60.0
# An instance takes a second, a reset for MIG mode a minute; a drain takes what it takes.
STAGE_S = 1800.0


class PartitionService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(
        self,
        *,
        loop: ControllerLoop,
        telemetry: Telemetry,
        monotonic_s: Callable[[], float],
        log: logging.Logger,
        call_of: DescribeCall,
    ) -> None:
        self._loop = loop
        self._call_of = call_of
        self._telemetry = telemetry
        self._monotonic_s = monotonic_s
        self._log = log
        self._kept: OrderedDict[str, PartitionSearchResult] = OrderedDict()
        self._is_searching = False
        self._left = 0
        self._word = ""
        self._course: asyncio.Task[None] | None = None

    def close(self) -> None:
        """No further stage begins."""
        if self._course is not None:
            self._course.cancel()

    async def recommend_partitions(
        self, request: RecommendPartitionsRequest, _context: Context
    ) -> RecommendPartitionsResponse:
        """The best change; nothing changes."""
        if self._is_searching:
            raise ResourceExhausted("another search for partitions is under way; ask again in a few seconds")
        self._is_searching = True
        try:
            survey = await self._loop.read(Core.survey_partitions)
            found = await search_to_end(lambda: recommend_partitions(survey, request.horizon_s))
        except ControllerError as error:
            raise FailedPrecondition(f"there is no partition plan: {error}") from error
        finally:
            self._is_searching = False
        key = found.recommendation.recommendation_id
        self._kept[key] = found
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_MOST:
            self._kept.popitem(last=False)
        return RecommendPartitionsResponse(recommendation=found.recommendation)

    async def apply_partitions(self, request: ApplyPartitionsRequest, context: Context) -> ApplyPartitionsResponse:
        """The first stage of a recommendation that is kept; the others follow by themselves."""
        found = self._kept.get(request.recommendation_id)
        if found is None:
            raise NotFound(
                f"no recommendation {request.recommendation_id!r} is kept; the newest {KEPT_MOST} since the "
                "controller's start are. Ask for a new plan"
            )
        if self._course is not None and not self._course.done():
            raise FailedPrecondition(
                f"a change is under way ({self._word or 'its last stage'}); see `eelctl partition show`, and apply when it is done"
            )
        if found.stages:
            call = self._call_of("ApplyPartitions", request, context)
            # The other stages follow one that is on disk, whether anybody waits for the answer or not.
            await asyncio.shield(self._begin_course(found.stages, call))
        self._kept.pop(request.recommendation_id, None)
        self._log.info("partitions=applied id=%s stages=%d", request.recommendation_id, len(found.stages))
        revision = await self._loop.read(lambda core: core.state.revision)
        return ApplyPartitionsResponse(revision=revision, stages_left=self._left)

    async def list_partitions(self, request: ListPartitionsRequest, _context: Context) -> Encoded:
        """A page of partitioned GPUs as they are wanted and as they stand."""
        gpus = await self._loop.read(lambda core: tuple(partition_statuses(core.state, self._telemetry)))
        return build_page(
            request,
            ListPartitionsResponse,
            gpus,
            place_of=lambda gpu: (gpu.node_name, gpu.gpu_index),
            element_of=lambda gpu: ("gpus", gpu),
            default=len(gpus) + 1,
            stages_left=self._left,
            waits_for=self._word[:SENTENCE_LETTERS_MOST],
        )

    # The change under way

    async def _begin_course(self, stages: Sequence[PartitionStage], call: AuditedCall) -> None:
        await self._loop.apply_partitions(stages[0], call=call)
        self._left, self._word = len(stages) - 1, ""
        self._course = asyncio.create_task(self._follow(stages))

    async def _follow(self, stages: Sequence[PartitionStage]) -> None:
        """Applies each stage but the first when the one before stands."""
        for number, stage in enumerate(stages):
            following = stages[number + 1] if number + 1 < len(stages) else None
            seats = tuple(turn.seat for turn in stage.turns)
            if not await self._wait_applied(seats):
                self._log.warning("partitions=ended left=%d reason=%s", self._left, self._word)
                return
            if following is None:
                break
            if following.drains and stage.start_s:
                self._word = f"the replicas of stage {number + 1} have {stage.start_s:g} s to start"
                await asyncio.sleep(stage.start_s)
            try:
                await self._loop.apply_partitions(following)
            except Fault as error:
                self._word = f"ended at stage {number + 2} of {len(stages)}: {error}"
                self._log.warning("partitions=ended left=%d reason=%s", self._left, error)
                return
            self._left -= 1
        self._word = ""
        self._log.info("partitions=done stages=%d", len(stages))

    async def _wait_applied(self, seats: tuple[SurveyedGpu, ...]) -> bool:
        """Waits until GPUs stand as they are wanted, and asks again where an agent refused."""
        began_s = asked_s = self._monotonic_s()
        pause_s = ASK_FIRST_S
        while True:
            missing = await self._loop.read(lambda core: unfinished_gpus(core.state, seats))
            if not missing:
                return True
            now_s = self._monotonic_s()
            refused = [(seat, said) for seat in missing if (said := apply_problem(self._telemetry, seat))]
            first, why = refused[0] if refused else (missing[0], "its agent has not told that it is done")
            self._word = f"GPU {first.index} of node {first.node_name}: {why}"
            if now_s - began_s > STAGE_S:
                self._word = f"ended, not in {STAGE_S:g} s: {self._word}"
                return False
            if refused and now_s - asked_s >= pause_s:
                asked_s, pause_s = now_s, min(ASK_MOST_S, 2.0 * pause_s)
                # What came to stand meanwhile is seen in the next round.
                with contextlib.suppress(Fault):
                    await self._loop.apply_partitions(tuple(seat for seat, _ in refused))
            await asyncio.sleep(POLL_S)


_ROWS = 1000
_NANO = 10**9
# The contract's bounds (eelgrid_protos/messages/ledger.py).
_WHOLE_MOST = 2**64 - 1
_SUM_MOST = 1e15
_AMOUNT_MOST = 1e300


class EnergyService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, loop: ControllerLoop, desk: LedgerWriter, spending: SpendingMonitor, clock: Clock) -> None:
        self._loop = loop
        self._desk = desk
        self._spending = spending
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

    async def list_spending(self, _request: ListSpendingRequest, _context: Context) -> ListSpendingResponse:
        """What is spent of the policy's spending limits."""
        limits = await self._spending.statuses()
        policy = self._loop.core.state.policy
        return ListSpendingResponse(
            limits=limits,
            currency="" if policy.prices is None else policy.prices.currency,
            utc_offset_minutes=utc_offset_minutes_of(policy),
        )

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
