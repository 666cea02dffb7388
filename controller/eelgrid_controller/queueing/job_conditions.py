"""Job conditions: why pending work may not start yet, whatever the capacity: a hold, a dependency, a time, a back-off, a run.

`find_unmet_condition` is the rule, a function of the workload, the state and the time; `JobConditionIndex` applies it to all
pending work of a state as events and time go by, so that work that may not start costs rounds nothing: it is parked in the
pending queue. Owns the sentences about conditions. Must not know of queues, capacity or places.

Theory. Of several conditions the first unmet is named, in the order unknown run, hold, dependency, begin time, retry, gang,
array. An unknown run is one on a node that is ahead of the journal, until the node is reconciled. How a workload ended
is final, so a dependency that is met stays met, and one that failed can never be met: the workload is cancelled, and so is what
depends on it in turn. A workload is looked at again when an event names it, when something that it depends on has ended, and at
the time that its first unmet condition names; nothing else can change the answer. After the nth failed attempt the next one
waits 10 s times 2^(n - 1), at most six minutes (the back-off of Kubernetes Jobs). A part of a gang that has not started waits
until all parts are submitted and none of those that must start together has an unmet condition; so a change of one part is a
change of all. Last, an element of an array with a limit
waits for a slot of its array (queueing.array_slots).
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from eelgrid_controller.formatting import count_noun, format_time
from eelgrid_controller.queueing.array_slots import ArraySlots, get_limited_element
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    ArraySubmitted,
    Event,
    NodesRemoved,
    PreemptionRefused,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadEvicted,
    WorkloadHeld,
    WorkloadReleased,
    WorkloadRetried,
    WorkloadSubmitted,
)
from eelgrid_controller.state.gangs import GangKey, get_gang_key
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.takeover_events import NodeAhead, NodeReconciled
from eelgrid_protos.messages import DependencyCondition, JobDependency, Workload, WorkloadPhase

_BACKOFF_NS = 10 * 10**9
_BACKOFF_MOST_NS = 360 * 10**9
# Stale wake-up times are removed once there are so many more than work that waits for a time.
_STALE_MOST = 1024


@dataclass(frozen=True, slots=True)
class UnmetCondition:
    """A condition that keeps a workload from starting: its name, why in a sentence, and when it is met if time meets it."""

    constraint: str
    reason: str
    until_ns: int | None = None


_ARRAY_IS_FULL = UnmetCondition("array", PendingConstraint.ARRAY.describe())


def find_unmet_condition(workload: Workload, state: ClusterState, now_ns: int) -> UnmetCondition | None:
    """Returns the first condition that keeps a pending workload from starting now; None if it may start."""
    runs_on = state.losses.nodes_ahead.get(workload.workload_id)
    if runs_on is not None:
        return UnmetCondition("unknown_run", PendingConstraint.UNKNOWN_RUN.describe(node=runs_on[0]))
    if workload.held_by:
        return UnmetCondition("held", PendingConstraint.HELD.describe(user=workload.held_by))
    schedule = workload.spec.schedule
    if schedule is not None:
        left = [one for one in schedule.after if not _is_met(one, state)]
        if left:
            more = f" and {count_noun(len(left) - 1, 'other')}" if len(left) > 1 else ""
            parents = f"{left[0].workload_id}{more}"
            return UnmetCondition("dependency", PendingConstraint.DEPENDENCY.describe(parents=parents))
        if schedule.begin_ns > now_ns:
            reason = PendingConstraint.BEGIN_TIME.describe(time=format_time(schedule.begin_ns))
            return UnmetCondition("begin_time", reason, schedule.begin_ns)
    if workload.not_before_ns > now_ns:
        failed = count_noun(workload.failures, "attempt has", "attempts have")
        reason = PendingConstraint.RETRY.describe(failures=failed, time=format_time(workload.not_before_ns))
        return UnmetCondition("retry", reason, workload.not_before_ns)
    return None


def find_gang_condition(workload: Workload, state: ClusterState, now_ns: int) -> UnmetCondition | None:
    """Returns why a part of a gang may not start with the others; None if it may, or starts on its own.

    One that is being submitted waits in any case, as the gang is tried once it is complete.
    """
    spec, key = workload.spec.gang, workload.workload_id
    if spec is None:
        return None
    is_new = key not in state.workloads
    gang = state.gangs.find(workload)
    missing = spec.parts - is_new if gang is None else gang.missing - is_new
    if gang is not None and not gang.is_bound(state.workloads):
        return None
    if missing > 0:
        parts = count_noun(missing, "more part", "more parts")
        return UnmetCondition("gang", PendingConstraint.GANG.describe(parts=parts, gang=spec.name))
    if is_new or gang is None:
        return UnmetCondition("gang", PendingConstraint.GANG.describe("turn", gang=spec.name))
    for part in gang.list_required():
        other = state.workloads[part]
        unmet = find_unmet_condition(other, state, now_ns)
        if part != key and (unmet is not None or part not in state.pending):
            reason = PendingConstraint.GANG.describe("part", part=part, gang=spec.name)
            return UnmetCondition("gang", reason, None if unmet is None else unmet.until_ns)
    return None


def _is_met(one: JobDependency, state: ClusterState) -> bool:
    phase = find_phase(one.workload_id, state)
    # The state keeps what live work depends on. In a copy without it, what is gone has ended.
    if phase is None:
        return True
    return is_condition_met(one.condition, phase)


def is_condition_met(condition: DependencyCondition, phase: WorkloadPhase) -> bool:
    """Returns whether a workload in a phase meets a dependency on it."""
    match condition:
        case DependencyCondition.SUCCEEDED:
            return phase is WorkloadPhase.SUCCEEDED
        case DependencyCondition.NOT_SUCCEEDED:
            return phase in (WorkloadPhase.FAILED, WorkloadPhase.CANCELLED)
        case _:
            return phase.is_ended


def find_phase(workload_id: str, state: ClusterState) -> WorkloadPhase | None:
    """Returns the phase of a workload, or how an array has ended and PENDING while it has not; None if neither is known."""
    workload = state.workloads.get(workload_id)
    return state.arrays.find_phase(workload_id) if workload is None else workload.phase


def find_failed_dependency(workload: Workload, state: ClusterState) -> str | None:
    """Returns why a workload can never start: something that it depends on ended in another way; None if it still may."""
    for one in workload.spec.schedule.after if workload.spec.schedule is not None else ():
        phase = find_phase(one.workload_id, state)
        if phase is not None and phase.is_ended and (problem := describe_failed_dependency(one, phase)):
            return problem
    return None


def describe_failed_dependency(one: JobDependency, phase: WorkloadPhase) -> str | None:
    """Returns why a dependency is not met, and never will be, by a workload that has ended so; None if it is met."""
    if is_condition_met(one.condition, phase):
        return None
    succeeds = "succeeds" if one.condition is DependencyCondition.SUCCEEDED else "does not succeed"
    ended = "was cancelled" if phase is WorkloadPhase.CANCELLED else phase.name.lower()
    return f"dependency_failed: {one.workload_id} {ended}, and this starts only if it {succeeds}"


def compute_backoff_ns(failures: int) -> int:
    """Returns how long the next attempt waits after so many failed ones."""
    return min(_BACKOFF_MOST_NS, _BACKOFF_NS << min(max(0, failures - 1), 16))


def describe_condition_remedy(workload: Workload, unmet: UnmetCondition) -> str:
    """Describes what would let a workload start."""
    key = workload.workload_id
    sentence = unmet.reason.partition(": ")[2]
    match unmet.constraint:
        case "unknown_run":
            return f"It {sentence}. To help: look at what runs there, then eelctl reconcile the node, which stops that run."
        case "held":
            return f"It is held {sentence}. To help: eelctl release {key}."
        case "dependency":
            return f"It {sentence}. To help: wait, or cancel it and submit it without --after."
        case "begin_time":
            return f"It starts {sentence}. To help: wait, or cancel it and submit it without --begin."
        case "gang" if "more part" in sentence:
            return f"It {sentence}. To help: submit the missing parts, with the same gang and number of parts, or cancel it."
        case "gang":
            return f"It {sentence}. To help: see with eelctl explain what that part waits for."
        case "array":
            return "Its array runs as many elements at once as its limit says. To help: wait for one of them to end."
        case _:
            said = workload.reason.partition(": ")[2] if workload.reason.startswith("retry: ") else ""
            failed = f"{said[:1].upper()}{said[1:]}. " if said and workload.reason != unmet.reason else ""
            return f"{failed}So far {sentence}. To help: wait, or cancel it."


class JobConditionIndex:
    """The pending work of one state that may not start, which it parks, and when it must be looked at again."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        # The latest time of an event or a step: what was met by then stays met, if a clock is set back.
        self._now_ns = 0
        # Wake-up times with their workloads; an entry counts if `_wakes` has the same.
        self._times: list[tuple[int, str]] = []
        self._wakes: dict[str, int] = {}
        # Work to look at in the next step, in order.
        self._due: dict[str, None] = {}
        self._slots = ArraySlots()
        # By node that is ahead of the journal, the work that it runs.
        self._unknown_runs: dict[str, tuple[str, ...]] = {}
        # The gangs of live parts, whose other parts are looked at when one changes.
        self._gang_keys: dict[str, GangKey] = {}
        # Slots are first of what runs, and of that for which others make room.
        nominated = (state.workloads[event.workload_id] for event in state.nominations)
        live = [state.workloads[key] for key in state.live_ids]
        for workload in (*filter(lambda one: one.phase is WorkloadPhase.PLACED, live), *nominated):
            self._slots.claim(workload)
        for workload in live:
            self._note_gang(workload)
        for key in tuple(state.pending):
            workload = state.workloads[key]
            is_limited = get_limited_element(workload) is not None or workload.spec.gang is not None
            if workload.held_by or workload.not_before_ns or workload.spec.schedule is not None or is_limited:
                self.classify(key)
                self._due[key] = None
        self._follow_unknown_runs(state.nodes)

    def refresh(self, event: Event) -> None:
        """Follows an event that was applied."""
        self._now_ns = max(self._now_ns, event.time_ns)
        match event:
            case WorkloadSubmitted() | WorkloadHeld() | WorkloadEvicted() | WorkloadRetried():
                self._note_gang(self._state.workloads[event.workload_id])
                if self.classify(event.workload_id) is not None:
                    self._due[event.workload_id] = None
                self._mark_gang(event.workload_id)
            case ArraySubmitted():
                self._classify_array(event)
            case WorkloadReleased() | PreemptionRefused():
                self._mark_due(event.workload_id)
            case WorkloadCancelled() | WorkloadCompleted():
                self._on_end(event)
            case NodeAhead() | NodeReconciled():
                self._follow_unknown_runs((event.node_name,))
            case NodesRemoved():
                self._follow_unknown_runs(event.node_names)
            case _:
                return

    def _follow_unknown_runs(self, node_names: Iterable[str]) -> None:
        """Parks the work that these nodes run beyond the journal; what they run no more is looked at again."""
        for name in node_names:
            record = self._state.nodes.get(name)
            now = () if record is None else record.unknown_runs
            for key in dict.fromkeys((*self._unknown_runs.pop(name, ()), *now)):
                if key in self._state.pending:
                    self.classify(key)
                    self._mark_due(key)
            if now:
                self._unknown_runs[name] = now

    def _note_gang(self, workload: Workload) -> None:
        key = get_gang_key(workload)
        if key is not None and not workload.phase.is_ended:
            self._gang_keys[workload.workload_id] = key

    def _mark_due(self, workload_id: str) -> None:
        """Has a workload looked at in the next step, and the other parts of its gang."""
        self._due[workload_id] = None
        self._mark_gang(workload_id)

    def _mark_gang(self, workload_id: str) -> None:
        key = self._gang_keys.get(workload_id)
        gang = None if key is None else self._state.gangs.get(key)
        if gang is not None:
            self._due.update(dict.fromkeys(one for one in gang.live if one != workload_id))

    def _classify_array(self, event: ArraySubmitted) -> None:
        """Parks the elements that may not start; those that were submitted with their reason are not looked at again."""
        for key in event.workload_ids:
            unmet = self.classify(key)
            if unmet is None:
                continue
            if unmet.reason != event.reason or find_failed_dependency(self._state.workloads[key], self._state):
                self._due[key] = None

    def _on_end(self, event: WorkloadCancelled | WorkloadCompleted) -> None:
        key = event.workload_id
        self._wakes.pop(key, None)
        self._release_slot(key)
        self._mark_gang(key)
        self._gang_keys.pop(key, None)
        for child in self._state.dependents.list_children(key):
            self._mark_due(child)
        ended = self._state.workloads.get(key)
        if ended is not None and ended.spec.array is not None:
            array_id = ended.spec.array.array_id
            if not self._state.arrays.is_live(array_id):
                self._due.update(dict.fromkeys(self._state.dependents.list_children(array_id)))

    def _release_slot(self, workload_id: str) -> None:
        next_id = self._slots.release(workload_id)
        if next_id is not None:
            self._due[next_id] = None

    def find_unmet(self, workload: Workload, now_ns: int) -> UnmetCondition | None:
        """Returns the first condition that keeps a workload from starting now, submitted or not."""
        self._now_ns = max(self._now_ns, now_ns)
        unmet = self._find_unmet(workload)
        return unmet if unmet is not None or self._slots.has_slot(workload) else _ARRAY_IS_FULL

    def _find_unmet(self, workload: Workload) -> UnmetCondition | None:
        unmet = find_unmet_condition(workload, self._state, self._now_ns)
        return find_gang_condition(workload, self._state, self._now_ns) if unmet is None else unmet

    def classify(self, workload_id: str) -> UnmetCondition | None:
        """Parks a pending workload, or unparks it, by the condition that it returns; None if it may start."""
        workload = self._state.workloads[workload_id]
        unmet = self._find_unmet(workload)
        if unmet is not None:
            self._release_slot(workload_id)
        elif not self._slots.claim(workload):
            unmet = _ARRAY_IS_FULL
        if unmet is None:
            self._state.pending.unpark(workload_id)
        else:
            self._state.pending.park(workload_id)
        if unmet is None or unmet.until_ns is None:
            self._wakes.pop(workload_id, None)
        elif self._wakes.get(workload_id) != unmet.until_ns:
            self._wakes[workload_id] = unmet.until_ns
            heapq.heappush(self._times, (unmet.until_ns, workload_id))
            if len(self._times) > 2 * len(self._wakes) + _STALE_MOST:
                self._times = sorted((until_ns, key) for key, until_ns in self._wakes.items())
        return unmet

    @property
    def latest_ns(self) -> int:
        """The latest time of an event or a step."""
        return self._now_ns

    @property
    def has_due(self) -> bool:
        """Whether work must be looked at, at whatever time."""
        return bool(self._due)

    def is_due(self, now_ns: int) -> bool:
        """Returns whether work must be looked at now."""
        return self.has_due or bool(self._times and self._times[0][0] <= now_ns)

    def iterate_due(self, now_ns: int, most: int) -> Iterator[str]:
        """Yields at most so many pending workloads that must be looked at now, also what falls due meanwhile."""
        self._now_ns = max(self._now_ns, now_ns)
        for _ in range(most):
            while self._times and self._times[0][0] <= self._now_ns:
                time_ns, key = heapq.heappop(self._times)
                if self._wakes.get(key) == time_ns:
                    del self._wakes[key]
                    self._mark_due(key)
            if not self._due:
                return
            key = next(iter(self._due))
            del self._due[key]
            if key in self._state.pending:
                yield key
