"""What is true of every state: nodes and workloads say the same, and nothing is held twice.

Owns the check. Must not change anything, nor be needed by anything but tests and tools.
"""

from collections.abc import Collection, Mapping

from eelgrid_controller.ledger import InvariantBroken, NodeRecord, assignment_of
from eelgrid_protos.messages import Assignment, Workload, WorkloadPhase

__all__ = ["check"]


def check(
    nodes: Mapping[str, NodeRecord],
    workloads: Mapping[str, Workload],
    *,
    waiting: Collection[str],
    ended: Collection[str],
    ended_most: int,
) -> None:
    """Raises InvariantBroken."""
    expected: dict[str, dict[tuple[str, int], Assignment]] = {name: {} for name in nodes}
    for key, workload in workloads.items():
        if (key in waiting) != (workload.phase is WorkloadPhase.PENDING):
            raise InvariantBroken(f"{key} is {workload.phase.name} and in the queue or not at once")
        if workload.phase is WorkloadPhase.PLACED:
            for placement in workload.placements:
                expected[placement.node_name][key, placement.replica] = assignment_of(workload, placement)
    for name, record in nodes.items():
        if record.assignments != expected[name]:
            raise InvariantBroken(f"{name} does not hold what the workloads say")
        record.validate()
    gone = {key for key, item in workloads.items() if item.phase is WorkloadPhase.CANCELLED}
    if gone != set(ended) or len(ended) > ended_most:
        raise InvariantBroken("the list of ended workloads is not that of the workloads")
