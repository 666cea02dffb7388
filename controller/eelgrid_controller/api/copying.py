"""A copy of the whole state, taken in slices, so that a large fleet does not hold up its own cluster.

Owns the slices and what changed between them. Must not know what copies are for.

Theory: records of nodes are most of the work (15 µs each, measured; 0.4 s at
20,000 nodes), and few of them change while the copy is taken. So they are copied
a few hundred at a time, everybody else having a turn in between, while the
commits tell which nodes changed; in one last moment those are copied again and
the rest, which is shared values in a few dictionaries, is taken with them. The
copy is of that moment, in which everything in it is on disk.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.core import Core
from eelgrid_controller.loop import Committed, ControllerLoop
from eelgrid_controller.state import ClusterState, NodeRecord
from eelgrid_protos.faults import Unavailable

__all__ = ["with_a_copy"]

_Result = TypeVar("_Result")
# A slice takes some 3 ms, no longer than a batch of commands (config.py).
_SLICE = 200
# The state is put back when a commit fails; a disk that fails again and again is no time for a copy.
_ATTEMPTS_MOST = 3


async def with_a_copy(
    loop: ControllerLoop, clock: Clock, finish: Callable[[Core, ClusterState], _Result]
) -> tuple[_Result, float]:
    """What `finish` makes of the core and its copy at one moment, and the longest time that the loop was held."""
    changed: set[str] = set()

    def on_commit(committed: Committed) -> None:
        changed.update(committed.nodes)
        changed.update(name for event in committed.events if (name := getattr(event, "node_name", "")))

    loop.listeners.append(on_commit)
    try:
        for _ in range(_ATTEMPTS_MOST):
            state = await loop.read(lambda core: core.state)
            changed.clear()
            records, held_s = await _records(loop, clock, state)
            start_s = clock.perf_s()
            core = await loop.read(lambda core: core)
            if core.state is state:
                for name in changed:
                    records.pop(name, None)
                result = finish(core, state.copy(records))
                return result, max(held_s, clock.perf_s() - start_s)
    finally:
        loop.listeners.remove(on_commit)
    raise Unavailable("the journal cannot be written, and the state is put back again and again; ask again later")


async def _records(loop: ControllerLoop, clock: Clock, state: ClusterState) -> tuple[dict[str, NodeRecord], float]:
    """Copies of the nodes' records, of different moments, and the longest time of a slice."""
    names, records, longest_s = list(state.nodes), dict[str, NodeRecord](), 0.0
    for start in range(0, len(names), _SLICE):
        await loop.read(lambda _: None)
        start_s = clock.perf_s()
        # Some may be gone since.
        records.update(
            (name, state.nodes[name].copy()) for name in names[start : start + _SLICE] if name in state.nodes
        )
        longest_s = max(longest_s, clock.perf_s() - start_s)
        await asyncio.sleep(0)
    return records, longest_s
