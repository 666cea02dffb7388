"""Tasks that wait in a simulation, in the order in which they are tried: priority first, then arrival.

Owns the order. Must not know whether anything fits. Theory: a round of tries
walks the queue and passes over a class of tasks once one of it has failed, as
the controller's core does; room only shrinks in a round, so that all others of
the class would fail too. With a heap for each class the walk is a choice among
the heads, and its cost does not grow with the length of the queue.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

__all__ = ["Waiting"]


class Waiting:
    """The queue."""

    __slots__ = ("_by_spec", "_count")

    def __init__(self) -> None:
        self._by_spec: dict[int, list[tuple[int, int]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def specs(self) -> tuple[int, ...]:
        """The classes of what waits."""
        return tuple(self._by_spec)

    def add(self, task: int, *, spec: int, priority: int) -> None:
        """Begins to wait; a lower number came earlier."""
        heappush(self._by_spec.setdefault(spec, []), (-priority, task))
        self._count += 1

    def first(self, specs: Iterable[int]) -> tuple[int, int] | None:
        """The class and the task that is next among these classes."""
        heads = ((self._by_spec[spec][0], spec) for spec in specs if spec in self._by_spec)
        best = min(heads, default=None)
        return None if best is None else (best[1], best[0][1])

    def take(self, spec: int) -> None:
        """The first of the class waits no more."""
        heappop(self._by_spec[spec])
        if not self._by_spec[spec]:
            del self._by_spec[spec]
        self._count -= 1

    def tasks(self) -> tuple[int, ...]:
        """All that wait, in the order of arrival."""
        return tuple(sorted(task for heap in self._by_spec.values() for _, task in heap))
