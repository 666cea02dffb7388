"""What is told of when live work starts and ends: a broken promise, a start that moved, an elastic share, a run time.

Pure functions of a workload and an event. Must not know when either is decided.
"""

from collections.abc import Mapping
from dataclasses import replace

from eelgrid_controller.state.events import DeadlineBroken, MovedStart, PromisesMoved
from eelgrid_controller.state.measurement_events import RuntimeExpected, WorkloadShareChanged
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_protos.messages import DeadlineBreach, Workload, WorkloadPhase

DeadlineEvent = DeadlineBroken | WorkloadShareChanged | PromisesMoved | RuntimeExpected


def apply_deadline_event(workloads: Mapping[str, Workload], event: DeadlineEvent) -> list[Workload]:
    """Returns the workloads that the event changes, after it; raises ContradictoryEvent."""
    if isinstance(event, PromisesMoved):
        return [_move(workloads.get(one.workload_id), one) for one in event.starts]
    workload = workloads.get(event.workload_id)
    if workload is None or workload.phase.is_ended:
        raise ContradictoryEvent(f"workload {event.workload_id} is not there or has ended")
    if isinstance(event, RuntimeExpected):
        if workload.phase is not WorkloadPhase.PLACED:
            raise ContradictoryEvent(f"workload {event.workload_id} does not run")
        return [replace(workload, progress_runtime_s=event.runtime_s)]
    if isinstance(event, DeadlineBroken):
        if workload.deadline_breach is not None:
            raise ContradictoryEvent(f"workload {event.workload_id} has no deadline to break")
        return [replace(workload, deadline_breach=DeadlineBreach(time_ns=event.time_ns, cause=event.cause))]
    if workload.share is None:
        raise ContradictoryEvent(f"workload {event.workload_id} has no share")
    if workload.phase is WorkloadPhase.PLACED:
        return [replace(workload, share=event.share)]
    # What it has been promised was for another size.
    size = replace(workload.spec, replicas=event.share.replicas)
    return [replace(workload, share=event.share, spec=size, promise=None)]


def _move(workload: Workload | None, start: MovedStart) -> Workload:
    if workload is None or workload.phase is not WorkloadPhase.PENDING or workload.promise is None:
        raise ContradictoryEvent(f"workload {start.workload_id} does not wait for a promised start")
    return replace(workload, promise=start.promise)
