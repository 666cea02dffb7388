"""History of changes to the fleet, newest last, so that a page can go back through them."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eelgrid_controller.state import events
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, event_from_plain
from eelgrid_controller.state.journal import JournalHistory
from eelgrid_controller.state.node_allocations import make_assignment
from eelgrid_protos.messages import Workload, WorkloadPhase

HeldMilli = Mapping[tuple[str, str], int]

_WORDS: Mapping[type[Any], str] = {
    events.WorkloadPlaced: "placed",
    events.WorkloadMoved: "moved",
    events.WorkloadScaled: "scaled",
    events.WorkloadLimited: "limited",
    events.WorkloadCancelled: "ended",
    events.WorkloadDeferred: "waits",
    events.PartitionsPlanned: "sliced",
    events.DevicesCorrected: "corrected",
    events.NodeJoined: "node joined",
    events.NodeLost: "node lost",
    events.NodesRemoved: "node removed",
    events.GpuLost: "GPU lost",
    events.GpuReturned: "GPU returned",
    events.PolicyChanged: "policy",
}


@dataclass(frozen=True, slots=True)
class FleetChange:
    """One decision, or one thing that happened to the fleet; `milli` is more (or less) held by (node, GPU).

    `number` is its event's, which several workloads may share; `commit` that of the last event of its commit.
    """

    number: int
    commit: int
    time_ns: int
    kind: str
    workload_id: str
    words: str
    milli: tuple[tuple[str, str, int], ...]


class ChangeHistory:
    """The last changes; at most `most` of them, and so many differences in all."""

    def __init__(self, *, most: int = 500, differences_most: int = 50_000) -> None:
        self.number = 0  # of the last event that was taken
        self._begun = 0
        self.is_cut = False  # whether rows were forgotten for want of room
        self.changes: deque[FleetChange] = deque()
        self._most, self._differences_most = most, differences_most
        self._differences = 0
        self._held: dict[str, HeldMilli] = {}

    def reset_history(self, workloads: Mapping[str, Workload], revision: int) -> None:
        """Where everything stands at a revision; what was before is forgotten."""
        self.changes.clear()
        self.number = self._begun = revision
        self.is_cut = False
        self._differences = 0
        self._held = {
            key: held for key, one in workloads.items() if one.phase is WorkloadPhase.PLACED and (held := _held(one))
        }

    @property
    def oldest(self) -> int:
        """The number from which on everything is here."""
        return self.changes[0].number if self.is_cut else self._begun + 1

    def on_commit(self, events: Sequence[Event], workloads: Mapping[str, Workload], revision: int) -> None:
        """The events of a commit, and all workloads as they are after it, which is at this revision."""
        first = revision - len(events) + 1
        rows = [(number, *row) for number, event in enumerate(events, first) for row in _rows(event)]
        last = {key: position for position, (_, _, _, key, _) in enumerate(rows) if key}
        for position, (number, time_ns, kind, key, words) in enumerate(rows):
            milli = self._difference(key, workloads.get(key)) if last.get(key) == position else ()
            name = workloads[key].spec.name if key in workloads else ""
            told = ": ".join(filter(None, (name, words)))
            self._add(FleetChange(number, revision, time_ns, kind, key, told, milli))
        self.number = revision

    def changes_after(self, number: int) -> list[FleetChange]:
        """Changes that came after this one."""
        return [change for change in self.changes if change.number > number]

    def _difference(self, key: str, workload: Workload | None) -> tuple[tuple[str, str, int], ...]:
        before = self._held.pop(key, {})
        now = _held(workload) if workload is not None and workload.phase is WorkloadPhase.PLACED else {}
        if now:
            self._held[key] = now
        found = {place: now.get(place, 0) - before.get(place, 0) for place in {**before, **now}}
        return tuple((*place, milli) for place, milli in found.items() if milli)

    def _add(self, change: FleetChange) -> None:
        changes = self.changes
        changes.append(change)
        self._differences += len(change.milli)
        while len(changes) > 1 and (len(changes) > self._most or self._differences > self._differences_most):
            self.is_cut = True
            gone = changes.popleft()
            self._differences -= len(gone.milli)
            while len(changes) > 1 and changes[0].commit == gone.commit:
                self._differences -= len(changes.popleft().milli)


def read_earlier_changes(
    past: JournalHistory, before: int, *, most: int = 2000, differences_most: int = 50_000
) -> tuple[list[FleetChange], bool]:
    """The last changes before the one with this number as the journal tells them, and whether it tells of more.

    Every entry since the older checkpoint is replayed: seconds with tens of thousands of them.
    """
    history = ChangeHistory(most=most, differences_most=differences_most)
    state = ClusterState.load(past.checkpoint.state) if past.checkpoint else ClusterState()
    history.reset_history(state.workloads, state.revision)
    for number, entry in past.entries:
        if number >= before:
            break
        event = event_from_plain(entry.kind, entry.body)
        state.apply(event)
        history.on_commit((event,), state.workloads, number)
    return list(history.changes), history.is_cut


def _held(workload: Workload) -> dict[tuple[str, str], int]:
    """Milli-GPUs by (node, GPU)."""
    found: dict[tuple[str, str], int] = {}
    for placement in workload.placements:
        item = make_assignment(workload, placement)
        for uuid in item.gpu_uuids:
            place = (placement.node_name, uuid)
            found[place] = found.get(place, 0) + item.gpu_milli
    return found


def _rows(event: Event) -> Iterator[tuple[int, str, str, str]]:
    """(time, kind, workload, words) of what an event says; nothing of one that changes no plan."""
    kind = _WORDS.get(type(event), "")
    match event:
        case events.PartitionsPlanned() | events.DevicesCorrected():
            for key in event.workload_ids:
                yield event.time_ns, kind, key, ""
        case events.WorkloadDeferred():
            # The constraint; the queue has the sentence.
            yield event.time_ns, kind, event.workload_id, event.reason.partition(":")[0]
        case events.WorkloadLimited():
            limit_w = event.power_limit_w
            words = "to the default" if limit_w is None else f"to {limit_w:.0f} W a GPU"
            yield event.time_ns, kind, event.workload_id, words
        case events.WorkloadPlaced() | events.WorkloadMoved() | events.WorkloadScaled() | events.WorkloadCancelled():
            yield event.time_ns, kind, event.workload_id, ""
        case events.NodeJoined():
            yield event.time_ns, kind, "", event.inventory.node_name
        case events.NodeLost():
            yield event.time_ns, kind, "", event.node_name
        case events.NodesRemoved():
            for name in event.node_names:
                yield event.time_ns, kind, "", name
        case events.GpuLost() | events.GpuReturned():
            yield event.time_ns, kind, "", f"{event.gpu_uuid} of {event.node_name}"
        case events.PolicyChanged():
            yield event.time_ns, kind, "", f"revision {event.policy.revision}"
        case _:
            return
