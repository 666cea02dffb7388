"""What a decision means for a workload: the event that tells it, or the workload as it would be.

Owns the words. Must not know how a decision was made.
"""

from eelgrid_controller.events import WorkloadDeferred, WorkloadPlaced
from eelgrid_controller.explain import reason
from eelgrid_controller.planner import Decision
from eelgrid_protos.messages import Workload, WorkloadPhase, WorkloadSpec

__all__ = ["imagined", "outcome"]


def outcome(workload_id: str, decision: Decision, now_ns: int) -> WorkloadPlaced | WorkloadDeferred:
    """The event of a workload that was tried."""
    if not decision.placements:
        return WorkloadDeferred(time_ns=now_ns, workload_id=workload_id, reason=reason(decision))
    return WorkloadPlaced(
        time_ns=now_ns,
        workload_id=workload_id,
        placements=decision.placements,
        explanation=decision.explanation,
    )


def imagined(workload_id: str, spec: WorkloadSpec, decision: Decision, now_ns: int) -> Workload:
    """The workload as it would be accepted now."""
    placed = bool(decision.placements)
    return Workload(
        workload_id=workload_id,
        spec=spec,
        phase=WorkloadPhase.PLACED if placed else WorkloadPhase.PENDING,
        reason="" if placed else reason(decision),
        placements=decision.placements,
        submitted_ns=now_ns,
        placed_ns=now_ns if placed else 0,
    )
