"""Array elements: which workloads belong to which array, how many of them ended how, and an array shown as one workload.

`ArrayElements` follows from the workloads, so that no checkpoint holds it; `list_submitted` makes the workloads of a
submission, of which those of an array differ in index, command and variables alone. Must not know when an element may start
(queueing.array_slots), nor how arrays are written down (queueing.job_arrays).

Theory. An element is a workload like any other, with an id of its own; the array is what its elements have in common. While
one of them is live, or live work depends on the array, the state keeps those that ended, so that their phases sum to the
array. Elements are submitted a nanosecond apart, so that lists by time have them in order.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from eelgrid_controller.state.attempts import has_started
from eelgrid_controller.state.events import ArraySubmitted, WorkloadSubmitted, make_element_id
from eelgrid_protos.messages import (
    ARRAY_VARIABLE_PREFIX,
    INDEX_VARIABLE,
    ArrayElement,
    ArrayStatus,
    JobSchedule,
    Workload,
    WorkloadPhase,
)


@dataclass(slots=True)
class _Record:
    """The known elements of one array, by rising index, and those of them that ended."""

    elements: dict[str, None] = field(default_factory=dict)
    ended: Counter[WorkloadPhase] = field(default_factory=Counter)


class ArrayElements:
    """The known elements of each array."""

    def __init__(self, records: dict[str, _Record] | None = None) -> None:
        self._records = records or {}

    def __contains__(self, array_id: object) -> bool:
        return array_id in self._records

    def add(self, workload: Workload) -> None:
        """Adds a workload, if it is an element; those of one array by rising index."""
        if workload.spec.array is not None:
            record = self._records.setdefault(workload.spec.array.array_id, _Record())
            record.elements[workload.workload_id] = None
            if workload.phase.is_ended:
                record.ended[workload.phase] += 1

    def note_end(self, workload: Workload, phase: WorkloadPhase) -> None:
        """Counts an element that ends."""
        if workload.spec.array is not None:
            self._records[workload.spec.array.array_id].ended[phase] += 1

    def forget(self, workload: Workload) -> None:
        """Removes a workload that has ended, if it is an element."""
        if workload.spec.array is None:
            return
        record = self._records[workload.spec.array.array_id]
        record.ended[workload.phase] -= 1
        del record.elements[workload.workload_id]
        if not record.elements:
            del self._records[workload.spec.array.array_id]

    def list_elements(self, array_id: str) -> tuple[str, ...]:
        """Lists the known elements of an array by rising index; none of what is no array."""
        record = self._records.get(array_id)
        return () if record is None else tuple(record.elements)

    def is_live(self, array_id: str) -> bool:
        """Returns whether an element of the array waits or runs."""
        record = self._records.get(array_id)
        return record is not None and record.ended.total() < len(record.elements)

    def find_phase(self, array_id: str) -> WorkloadPhase | None:
        """Returns how an array has ended, PENDING while it has not, None if it is unknown."""
        record = self._records.get(array_id)
        if record is None:
            return None
        return WorkloadPhase.PENDING if self.is_live(array_id) else _find_worst(record.ended)

    def summarize(self, array_id: str, workloads: Mapping[str, Workload]) -> Workload | None:
        """Returns an array as one workload; None if it is unknown."""
        record = self._records.get(array_id)
        return None if record is None else _summarize([workloads[key] for key in record.elements])

    def pick_element(self, array_id: str, workloads: Mapping[str, Workload]) -> str:
        """Returns the first element of an array that waits, or else the first; the id itself if it is no array."""
        elements = self.list_elements(array_id)
        waiting = (key for key in elements if workloads[key].phase is WorkloadPhase.PENDING)
        return next(waiting, elements[0] if elements else array_id)

    def copy(self) -> Self:
        """Returns an independent copy."""
        return type(self)({key: _Record(one.elements.copy(), one.ended.copy()) for key, one in self._records.items()})


def preview_array(event: ArraySubmitted) -> Workload:
    """Returns an array as a whole as it would begin to wait."""
    return _summarize(list(list_submitted(event)))


def _find_worst(ended: Mapping[WorkloadPhase, int]) -> WorkloadPhase:
    return next(
        (phase for phase in (WorkloadPhase.FAILED, WorkloadPhase.CANCELLED) if ended.get(phase)),
        WorkloadPhase.SUCCEEDED,
    )


def _summarize(elements: list[Workload]) -> Workload:
    """Returns the elements as one workload, with the processes of the one whose exit code is the highest, or of the first."""
    counts = Counter(one.phase for one in elements)
    pending, placed = counts[WorkloadPhase.PENDING], counts[WorkloadPhase.PLACED]
    first, element = elements[0], elements[0].spec.array
    assert element is not None
    status = ArrayStatus(
        size=element.size,
        pending=pending,
        placed=placed,
        succeeded=counts[WorkloadPhase.SUCCEEDED],
        failed=counts[WorkloadPhase.FAILED],
        cancelled=counts[WorkloadPhase.CANCELLED],
        running_most=element.running_most,
        # Of those that are kept no more nobody knows.
        started=element.size - len(elements) + sum(map(has_started, elements)),
    )
    if placed or pending:
        phase = WorkloadPhase.PLACED if placed else WorkloadPhase.PENDING
        waiting = [one for one in elements if one.phase is WorkloadPhase.PENDING]
        shown = next((one for one in elements if one.phase is WorkloadPhase.PLACED and one.attempts), first)
        reason = waiting[0].reason if waiting else ""
        held_by = waiting[0].held_by if waiting and all(one.held_by for one in waiting) else ""
    else:
        phase, held_by = _find_worst(counts), ""
        worst = [one for one in elements if one.phase is phase]
        shown = max(worst, key=lambda one: one.exit_code or 0)
        is_bad = phase is not WorkloadPhase.SUCCEEDED
        reason = f"{counts[phase]} of {len(elements)} elements, such as {shown.workload_id}" if is_bad else ""
    return replace(
        first,
        workload_id=element.array_id,
        phase=phase,
        reason=reason,
        placements=(),
        placed_ns=min((one.placed_ns for one in elements if one.placed_ns), default=0),
        ended_ns=0 if placed or pending else max(one.ended_ns for one in elements),
        revision=max(one.revision for one in elements),
        power_limit_w=None,
        limit_before_start=False,
        progress_runtime_s=None,
        attempt=shown.attempt,
        attempts=shown.attempts,
        # It is being stopped if nothing of it waits or runs on.
        stopping_ns=0 if pending else min((one.stopping_ns for one in elements if not one.phase.is_ended), default=0),
        preempted_for="",
        promise=None,
        held_by=held_by,
        failures=0,
        not_before_ns=0,
        deadline_breach=next((one.deadline_breach for one in elements if one.deadline_breach), None),
        array=status,
    )


def list_submitted(event: WorkloadSubmitted | ArraySubmitted) -> Iterator[Workload]:
    """Yields the workloads of a submission as they begin to wait, those of an array by rising index."""
    if isinstance(event, WorkloadSubmitted):
        yield Workload(
            workload_id=event.workload_id,
            spec=event.spec,
            phase=WorkloadPhase.PENDING,
            submitted_ns=event.time_ns,
            owner=event.owner,
            share=event.share,
        )
        return
    spec, array_id = event.spec, event.array_id
    for position, element in enumerate(event.elements):
        process = spec.process
        if process is not None:
            variables = {
                f"{ARRAY_VARIABLE_PREFIX}ID": array_id,
                INDEX_VARIABLE: str(element.index),
                f"{ARRAY_VARIABLE_PREFIX}COUNT": str(len(event.elements)),
            }
            process = replace(
                process, argv=element.argv or process.argv, element_variables={**variables, **element.variables}
            )
        yield Workload(
            workload_id=make_element_id(array_id, element.index),
            spec=replace(
                spec,
                process=process,
                schedule=pair_dependencies(spec.schedule, element.index),
                array=ArrayElement(
                    array_id=array_id,
                    index=element.index,
                    size=len(event.elements),
                    running_most=event.running_most,
                ),
            ),
            phase=WorkloadPhase.PENDING,
            reason=event.reason,
            submitted_ns=event.time_ns + position,
            owner=event.owner,
            held_by=event.held_by,
        )


def pair_dependencies(schedule: JobSchedule | None, index: int) -> JobSchedule | None:
    """Returns the schedule of the element of an index, which waits for single elements of the arrays that it says so of."""
    if schedule is None or not any(one.each for one in schedule.after):
        return schedule
    after = (
        replace(one, workload_id=make_element_id(one.workload_id, index), each=False) if one.each else one
        for one in schedule.after
    )
    return replace(schedule, after=tuple(after))
