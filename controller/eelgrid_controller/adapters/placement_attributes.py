"""What a placement's trace says of it: its ids, what was asked for, what was decided.

Owns names and values of attributes, and where the ids of a trace come from. Must not know when a span begins or ends.
"""

import hashlib
from collections.abc import Sequence

from eelgrid_controller.adapters.spans import Values
from eelgrid_protos.messages import Placement, ReplicaExplanation, WorkloadSpec

__all__ = ["asked", "decision", "own_ids"]


def own_ids(cluster: str, workload_id: str) -> tuple[int, int]:
    """Ids of the trace (128 bits) and of its first span (64 bits), of a placement that no caller traces.

    They follow from what the journal keeps, the cluster's id and the workload's, so that whoever reads the journal after
    a restart goes on with the same trace.
    """
    drawn = hashlib.sha256(f"{cluster}\0{workload_id}".encode()).digest()
    # 0 is no id.
    return int.from_bytes(drawn[:16]) or 1, int.from_bytes(drawn[16:24]) or 1


def asked(spec: WorkloadSpec) -> Values:
    """What a submission asks for."""
    owners = {"namespace": spec.namespace, "user": spec.user, "queue": spec.queue}
    return {
        "eelgrid.workload.name": spec.name,
        "eelgrid.workload.kind": spec.kind.name.lower(),
        "eelgrid.workload.priority": spec.priority,
        "eelgrid.workload.replicas": spec.replicas,
        "eelgrid.workload.gpus": spec.replicas * spec.request.gpu_count * spec.request.gpu_milli / 1000.0,
        **{f"eelgrid.workload.{key}": value for key, value in owners.items() if value},
    }


def decision(placements: Sequence[Placement], why: Sequence[ReplicaExplanation], revision: int) -> Values:
    """What was decided: the first replica's place and the terms of its cost, and the event's number in the journal."""
    first = placements[0]
    said: dict[str, str | int | float] = {
        "eelgrid.decision.revision": revision,
        "eelgrid.node": first.node_name,
        "eelgrid.nodes": len({one.node_name for one in placements}),
    }
    explained = next((one for one in why if one.replica == first.replica), None)
    if explained is None:
        return said
    said["eelgrid.decision.feasible_nodes"] = explained.feasible_nodes
    for one in explained.candidates:
        if (one.node_name, one.gpu_indexes) == (first.node_name, first.gpu_indexes):
            said["eelgrid.cost_watts"] = one.cost_w
            said |= {f"eelgrid.cost_watts.{term.name}": term.cost_w for term in one.terms}
            break
    return said
