"""Whether a submission is accepted: what repeats another, contradicts itself, or could never run.

Owns these refusals. Must not know where work goes.
"""

from dataclasses import replace

from eelgrid_controller.choosing import Chooser
from eelgrid_controller.explain import refusal
from eelgrid_controller.state import ClusterState
from eelgrid_protos.faults import AlreadyExists, InvalidArgument
from eelgrid_protos.messages import SubmitWorkloadRequest, Workload, WorkloadSpec

__all__ = ["known", "refuse_impossible", "refuse_nonsense"]


def known(state: ClusterState, request: SubmitWorkloadRequest) -> Workload | None:
    """The workload that this request submitted before; raises AlreadyExists if another has its id."""
    found = state.workloads.get(request.workload_id)
    if found is None or replace(found.spec, replicas=found.replicas_begun or found.spec.replicas) == request.spec:
        return found
    raise AlreadyExists(
        f"workload {found.workload_id} exists with another spec; choose another id, leave the id empty to "
        "have one drawn, or cancel it first"
    )


def refuse_nonsense(spec: WorkloadSpec) -> None:
    """Raises InvalidArgument for a request that contradicts itself."""
    broken = tuple(found.under("spec.request") for found in spec.request.violations())
    if broken:
        raise InvalidArgument("the request contradicts itself", broken)


def refuse_impossible(state: ClusterState, chooser: Chooser, spec: WorkloadSpec) -> None:
    """Raises InvalidArgument for work that these nodes could not hold with nothing else on them."""
    if not state.nodes:
        return
    snapshot = chooser.snapshot()
    emptied = snapshot.emptied(chooser.mirror.memory_bytes)
    room, removals = chooser.planner.room_when_empty(emptied, snapshot, spec)
    if room < spec.replicas:
        inventories = (record.inventory for record in state.nodes.values())
        violation = refusal(spec, inventories, removals, room)
        raise InvalidArgument("no registered node could ever hold this, even with nothing else on it", (violation,))
