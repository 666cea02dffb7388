"""Changes to a workload that goes on to wait: its reason, its queue, its promised start, and a hold.

Must not know the order in which work waits.
"""

from dataclasses import replace
from typing import assert_never

from eelgrid_controller.state.events import (
    WorkloadDeferred,
    WorkloadHeld,
    WorkloadPromised,
    WorkloadQueueChanged,
    WorkloadReleased,
)
from eelgrid_protos.messages import Workload

WaitingEvent = WorkloadDeferred | WorkloadQueueChanged | WorkloadPromised | WorkloadHeld | WorkloadReleased


def apply_waiting_event(workload: Workload, event: WaitingEvent) -> Workload:
    """Returns the workload after an event."""
    match event:
        case WorkloadDeferred():
            return replace(workload, reason=event.reason)
        case WorkloadQueueChanged():
            return replace(workload, spec=replace(workload.spec, queue=event.queue))
        case WorkloadPromised():
            return replace(workload, promise=event.promise)
        case WorkloadHeld():
            return replace(workload, held_by=event.user)
        case WorkloadReleased():
            return replace(workload, held_by="")
        case _:
            assert_never(event)
