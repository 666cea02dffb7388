"""Array slots: which elements of an array of which at most N may run at once are to be tried.

`ArraySlots` is derived from a state, as the index of job conditions is, of which it is a part. Must not know what else keeps
work from starting, nor of capacity.

Theory. An array with the limit N has N slots. An element takes one when nothing else keeps it from starting, and has it until
it ends, or waits for something else again: a hold, a back-off. What has no slot is parked in the pending queue. So rounds meet
at most N elements of an array, however many wait, and at most N run, whatever a round does in one step. A slot that is given
up is at once that of the lowest index that waits for one, so that while one waits none is free. It is never taken away from an
element that could start meanwhile, such as one for which others make room.
"""

import heapq
from dataclasses import dataclass, field

from eelgrid_protos.messages import ArrayElement, Workload

# Stale entries of a heap are removed once there are so many more than elements that wait.
_STALE_MOST = 1024


@dataclass(slots=True)
class _Slots:
    """Who has a slot of one array, and who waits for one; an entry of the heap counts if `waiting` has it."""

    holders: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    heap: list[tuple[int, str]] = field(default_factory=list)


class ArraySlots:
    """The slots of the arrays of one state that have a limit."""

    def __init__(self) -> None:
        self._arrays: dict[str, _Slots] = {}
        # The array of each holder and of each element that waits.
        self._array_ids: dict[str, str] = {}

    def claim(self, workload: Workload) -> bool:
        """Returns whether a workload may start as far as its array is concerned; if so it has a slot, else it waits for one."""
        element = get_limited_element(workload)
        if element is None:
            return True
        key, slots = workload.workload_id, self._arrays.setdefault(element.array_id, _Slots())
        self._array_ids[key] = element.array_id
        if key in slots.holders or len(slots.holders) < element.running_most:
            slots.holders.add(key)
            return True
        if key not in slots.waiting:
            slots.waiting.add(key)
            heapq.heappush(slots.heap, (element.index, key))
            if len(slots.heap) > 2 * len(slots.waiting) + _STALE_MOST:
                slots.heap = sorted({entry for entry in slots.heap if entry[1] in slots.waiting})
        return False

    def has_slot(self, workload: Workload) -> bool:
        """Returns whether a workload has a slot of its array, or needs none, or one is free."""
        element = get_limited_element(workload)
        slots = None if element is None else self._arrays.get(element.array_id)
        if element is None or slots is None:
            return True
        return workload.workload_id in slots.holders or len(slots.holders) < element.running_most

    def release(self, workload_id: str) -> str | None:
        """Ends the claim of a workload that may not start any more; returns the workload that has its slot now, if any."""
        array_id = self._array_ids.pop(workload_id, None)
        if array_id is None:
            return None
        slots = self._arrays[array_id]
        slots.waiting.discard(workload_id)
        if workload_id in slots.holders:
            slots.holders.discard(workload_id)
            while slots.heap:
                key = heapq.heappop(slots.heap)[1]
                if key in slots.waiting:
                    slots.waiting.discard(key)
                    slots.holders.add(key)
                    return key
        if not slots.holders:
            del self._arrays[array_id]
        return None


def get_limited_element(workload: Workload) -> ArrayElement | None:
    """Returns which element of which array a workload is, if the array has a limit."""
    element = workload.spec.array
    return element if element is not None and element.running_most else None
