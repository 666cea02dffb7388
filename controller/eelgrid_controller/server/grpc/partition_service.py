"""The operators' calls about MIG partitions: recommend, apply and list.

The stages of an applied change follow one after the other.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.core.core import Core
from eelgrid_controller.errors import ControllerError
from eelgrid_controller.partition.execution import unfinished_gpus
from eelgrid_controller.partition.recommendation import PartitionSearchResult, PartitionStage, recommend_partitions
from eelgrid_controller.partition.survey import SurveyedGpu, apply_problem, partition_statuses
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.authorization import DescribeCall, describe_no_call
from eelgrid_controller.server.grpc.pagination import build_page
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.faults import FailedPrecondition, Fault, NotFound, ResourceExhausted
from eelgrid_protos.messages import (
    ApplyPartitionsRequest,
    ApplyPartitionsResponse,
    ListPartitionsRequest,
    ListPartitionsResponse,
    RecommendPartitionsRequest,
    RecommendPartitionsResponse,
)
from eelgrid_protos.quantities import SENTENCE_LETTERS_MOST
from eelgrid_protos.rpc import Encoded

KEPT_MOST = 8
POLL_S = 0.25
ASK_FIRST_S, ASK_MOST_S = 2.0, 60.0
# An instance takes a second, a reset for MIG mode a minute; a drain takes what it takes.
STAGE_S = 1800.0
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class PartitionService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(
        self,
        *,
        loop: ControllerLoop,
        telemetry: Telemetry,
        monotonic_s: Callable[[], float],
        log: logging.Logger,
        call_of: DescribeCall = describe_no_call,
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
            found = await asyncio.to_thread(recommend_partitions, survey, request.horizon_s)
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
            await self._loop.apply_partitions(found.stages[0], call=call)
            self._left, self._word = len(found.stages) - 1, ""
            self._course = asyncio.create_task(self._follow(found.stages))
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
