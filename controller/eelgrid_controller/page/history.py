"""What decisions changed on the fleet, newest last, so that a page can go back through them.

Owns where each workload's replicas stood when last told, and the difference that each
decision made: milli-GPUs by GPU. Must not know why; explanations are asked for by workload.

Theory. A commit may hold several events of one workload, and the state is only seen after all
of them. The difference of the whole commit goes to the last of these; sums are right at every
row, so that "now, less all that came later" is the fleet as it was after a row.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eelgrid_controller import events as happened
from eelgrid_controller.events import Event
from eelgrid_controller.ledger import assignment_of
from eelgrid_protos.messages import Workload, WorkloadPhase

__all__ = ["Change", "History"]

Held = Mapping[tuple[str, str], int]

_WORDS: Mapping[type[Any], str] = {
    happened.WorkloadPlaced: "placed",
    happened.WorkloadMoved: "moved",
    happened.WorkloadScaled: "scaled",
    happened.WorkloadLimited: "limited",
    happened.WorkloadCancelled: "ended",
    happened.WorkloadDeferred: "waits",
    happened.PartitionsPlanned: "sliced",
    happened.DevicesCorrected: "corrected",
    happened.NodeJoined: "node joined",
    happened.NodeLost: "node lost",
    happened.GpuLost: "GPU lost",
    happened.GpuReturned: "GPU returned",
    happened.PolicyChanged: "policy",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One decision, or one thing that happened to the fleet; `milli` is more (or less) held by (node, GPU)."""

    number: int
    time_ns: int
    kind: str
    workload_id: str
    words: str
    milli: tuple[tuple[str, str, int], ...]


class History:
    """The last changes; at most `most` of them, and so many differences in all."""

    def __init__(self, *, most: int = 500, differences_most: int = 50_000) -> None:
        self.number = 0
        self.changes: deque[Change] = deque()
        self._most, self._differences_most = most, differences_most
        self._differences = 0
        self._held: dict[str, Held] = {}

    def begin(self, workloads: Mapping[str, Workload]) -> None:
        """Where everything stands now; what was before is forgotten."""
        self.changes.clear()
        self._differences = 0
        self._held = {
            key: held for key, one in workloads.items() if one.phase is WorkloadPhase.PLACED and (held := _held(one))
        }

    def take(self, events: Iterable[Event], workloads: Mapping[str, Workload]) -> None:
        """The events of a commit, and all workloads as they are after it."""
        rows = [row for event in events for row in _rows(event)]
        last = {key: position for position, (_, _, key, _) in enumerate(rows) if key}
        for position, (time_ns, kind, key, words) in enumerate(rows):
            milli = self._difference(key, workloads.get(key)) if last.get(key) == position else ()
            name = workloads[key].spec.name if key in workloads else ""
            told = ": ".join(filter(None, (name, words)))
            self._add(Change(self.number + 1, time_ns, kind, key, told, milli))

    def after(self, number: int) -> list[Change]:
        """Changes that came after this one."""
        return [change for change in self.changes if change.number > number]

    def _difference(self, key: str, workload: Workload | None) -> tuple[tuple[str, str, int], ...]:
        before = self._held.pop(key, {})
        now = _held(workload) if workload is not None and workload.phase is WorkloadPhase.PLACED else {}
        if now:
            self._held[key] = now
        found = {place: now.get(place, 0) - before.get(place, 0) for place in {**before, **now}}
        return tuple((*place, milli) for place, milli in found.items() if milli)

    def _add(self, change: Change) -> None:
        self.number = change.number
        self.changes.append(change)
        self._differences += len(change.milli)
        while len(self.changes) > 1 and (len(self.changes) > self._most or self._differences > self._differences_most):
            self._differences -= len(self.changes.popleft().milli)


def _held(workload: Workload) -> dict[tuple[str, str], int]:
    """Milli-GPUs by (node, GPU)."""
    found: dict[tuple[str, str], int] = {}
    for placement in workload.placements:
        item = assignment_of(workload, placement)
        for uuid in item.gpu_uuids:
            place = (placement.node_name, uuid)
            found[place] = found.get(place, 0) + item.gpu_milli
    return found


def _rows(event: Event) -> Iterator[tuple[int, str, str, str]]:
    """(time, kind, workload, words) of what an event says; nothing of one that changes no plan."""
    kind = _WORDS.get(type(event), "")
    match event:
        case happened.PartitionsPlanned() | happened.DevicesCorrected():
            for key in event.workload_ids:
                yield event.time_ns, kind, key, ""
        case happened.WorkloadDeferred():
            # The constraint; the queue has the sentence.
            yield event.time_ns, kind, event.workload_id, event.reason.partition(":")[0]
        case happened.WorkloadLimited():
            limit_w = event.power_limit_w
            words = "to the default" if limit_w is None else f"to {limit_w:.0f} W a GPU"
            yield event.time_ns, kind, event.workload_id, words
        case (
            happened.WorkloadPlaced()
            | happened.WorkloadMoved()
            | happened.WorkloadScaled()
            | happened.WorkloadCancelled()
        ):
            yield event.time_ns, kind, event.workload_id, ""
        case happened.NodeJoined():
            yield event.time_ns, kind, "", event.inventory.node_name
        case happened.NodeLost():
            yield event.time_ns, kind, "", event.node_name
        case happened.GpuLost() | happened.GpuReturned():
            yield event.time_ns, kind, "", f"{event.gpu_uuid} of {event.node_name}"
        case happened.PolicyChanged():
            yield event.time_ns, kind, "", f"revision {event.policy.revision}"
        case _:
            return
