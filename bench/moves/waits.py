"""How long a search for moves makes the controller's loop wait: its longest pause, by the wall.

Owns that measurement. An event loop with the daemon's settings of the interpreter wakes every millisecond while a search
runs, and the longest delay of a wake-up counts. Three kinds take turns: with the problem built in the loop, as it was
until November 2026; as the controller does it, with a copy of one moment in the loop and all else in a thread; and
nothing, which is what the machine itself makes it wait.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from eelgrid_controller.core.core import Core
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.runtime.interpreter import settle_interpreter
from eelgrid_protos.messages import RecommendMovesRequest

_TICK_S = 0.001
_IDLE_S = 0.5


async def _build_in_loop(core: Core, asked: RecommendMovesRequest) -> None:
    problem = build_migration_problem(core.survey_moves(asked))
    await asyncio.to_thread(recommend_moves, problem)


async def _build_in_thread(core: Core, asked: RecommendMovesRequest) -> None:
    survey = core.survey_moves(asked)
    await asyncio.to_thread(lambda: recommend_moves(build_migration_problem(survey)))


async def _do_nothing(_core: Core, _asked: RecommendMovesRequest) -> None:
    await asyncio.sleep(_IDLE_S)


_KINDS: dict[str, Callable[[Core, RecommendMovesRequest], Awaitable[None]]] = {
    "built in the loop": _build_in_loop,
    "built in a thread": _build_in_thread,
    "no search": _do_nothing,
}


async def _longest_wait_s(work: Awaitable[None]) -> float:
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        while True:
            begun_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            longest_s = max(longest_s, time.perf_counter() - begun_s - _TICK_S)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(10 * _TICK_S)
    await work
    await asyncio.sleep(2 * _TICK_S)
    ticking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticking
    return longest_s


def measure_waits(core: Core, asked: RecommendMovesRequest, rounds: int) -> dict[str, list[float]]:
    """The longest wait of each round in milliseconds, by kind. Freezes what is loaded, as the daemon does at its start."""
    settle_interpreter()
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(rounds):
        kinds = list(_KINDS.items())
        for kind, work in kinds if number % 2 == 0 else reversed(kinds):
            found[kind].append(1e3 * asyncio.run(_longest_wait_s(work(core, asked))))
    return found
