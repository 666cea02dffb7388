"""Recommended moves, from the question to the operator's word.

Owns the newest few recommendations and the turn in which searches run. Must not
know how moves are found or executed. What is kept is a convenience: it is in no
journal, a restart forgets it, and asking again costs a few seconds.

Theory: a search takes seconds where a decision takes a millisecond. So the loop
only lends the copy that a search needs; the search runs in a thread whose kernels
give up the interpreter's lock, one at a time, and the loop goes on placing.
"""

import asyncio
import logging
from collections import OrderedDict

from eelgrid_controller.audit import Call
from eelgrid_controller.core import Core
from eelgrid_controller.loop import ControllerLoop
from eelgrid_controller.moves import recommend
from eelgrid_protos.faults import NotFound, ResourceExhausted
from eelgrid_protos.messages import (
    ApplyMovesRequest,
    ApplyMovesResponse,
    Recommendation,
    RecommendMovesRequest,
    RecommendMovesResponse,
)

__all__ = ["KEPT_MOST", "Advice"]

KEPT_MOST = 8


class Advice:
    """Recommends, keeps, and executes when told to."""

    def __init__(self, *, loop: ControllerLoop, log: logging.Logger) -> None:
        self._loop = loop
        self._log = log
        self._kept: OrderedDict[str, Recommendation] = OrderedDict()
        self._is_searching = False

    async def recommend(self, request: RecommendMovesRequest) -> RecommendMovesResponse:
        """Moves within a budget; nothing changes."""
        if self._is_searching:
            raise ResourceExhausted("another search for moves is under way; ask again in a few seconds")
        self._is_searching = True
        try:
            problem = await self._loop.read(lambda core: core.survey_moves(request))
            found = await asyncio.to_thread(recommend, problem)
        finally:
            self._is_searching = False
        self._kept[found.recommendation_id] = found
        self._kept.move_to_end(found.recommendation_id)
        while len(self._kept) > KEPT_MOST:
            self._kept.popitem(last=False)
        return RecommendMovesResponse(recommendation=found)

    async def apply(self, request: ApplyMovesRequest, *, call: Call | None = None) -> ApplyMovesResponse:
        """Executes a recommendation that is kept, all of it or nothing."""
        found = self._kept.get(request.recommendation_id)
        if found is None:
            raise NotFound(
                f"no recommendation {request.recommendation_id!r} is kept; the newest {KEPT_MOST} since the "
                "controller's start are. Ask for new moves"
            )
        moved = await self._loop.apply_moves(found.moves, call=call)
        self._kept.pop(request.recommendation_id, None)
        self._log.info("moves=applied id=%s replicas=%d", request.recommendation_id, moved)

        def answer(core: Core) -> ApplyMovesResponse:
            return ApplyMovesResponse(
                moved=moved, revision=core.state.revision, modelled_power_w=core.modelled_power_w()
            )

        return await self._loop.read(answer)
