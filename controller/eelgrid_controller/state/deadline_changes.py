"""What is told of work with a promised deadline while it lives: that the promise is broken, and how an elastic job's share changed.

Pure functions of a workload and an event. Must not know when either is decided.
"""

from dataclasses import replace

from eelgrid_controller.state.events import DeadlineBroken, WorkloadShareChanged
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_protos.messages import DeadlineBreach, Workload, WorkloadPhase


def apply_deadline_event(workload: Workload | None, event: DeadlineBroken | WorkloadShareChanged) -> Workload:
    """Returns the workload after the event; raises ContradictoryEvent."""
    if workload is None or workload.phase.is_ended:
        raise ContradictoryEvent(f"workload {event.workload_id} is not there or has ended")
    if isinstance(event, DeadlineBroken):
        if workload.deadline_breach is not None:
            raise ContradictoryEvent(f"workload {event.workload_id} has no deadline to break")
        return replace(workload, deadline_breach=DeadlineBreach(time_ns=event.time_ns, cause=event.cause))
    if workload.share is None:
        raise ContradictoryEvent(f"workload {event.workload_id} has no share")
    if workload.phase is WorkloadPhase.PLACED:
        return replace(workload, share=event.share)
    # What it has been promised was for another size.
    size = replace(workload.spec, replicas=event.share.replicas)
    return replace(workload, share=event.share, spec=size, promise=None)
