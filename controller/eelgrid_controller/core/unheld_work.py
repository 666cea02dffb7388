"""Unheld work: processes that the journal has on a node and its agent does not hold, while entries may be lost.

Theory. Either the agent never got the plan that names such a process; or it has ended, which the agent tells again; or
lost entries have stopped it, so that the work may run elsewhere by a later attempt. A plan would start it a second time.
So a node with unheld work gets no plan while starts are withheld (state/journal_losses.py). When they are resumed, work
that a node elsewhere is known to run, or to have run by a later attempt, returns to the queue; all other is started.
Must not know what agents tell of ended attempts.
"""

from collections.abc import Callable

from eelgrid_controller.core.nodes import PlanClaim
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadEvicted
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.messages import Workload, WorkloadPhase


class UnheldWork:
    """What each node does not hold, as its agent said when it came back; forgotten once starts are resumed."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        # By node: workloads and replicas.
        self._by_node: dict[str, frozenset[tuple[str, int]]] = {}

    def record_claim(self, node_name: str, claim: PlanClaim) -> None:
        """Compares what is placed on a node with what its agent holds."""
        record = self._state.nodes.get(node_name)
        if not self._state.losses.withholds_starts or record is None or claim.held is None:
            return
        held = {(item.workload_id, item.replica): item.attempt for item in claim.held}
        workloads = self._state.workloads
        self._by_node[node_name] = frozenset(
            key
            for key in record.assignments
            if workloads[key[0]].spec.process is not None and held.get(key) != workloads[key[0]].attempt
        )

    def is_unheld(self, workload: Workload, *, beside: str = "") -> bool:
        """Returns whether the agents of all its nodes have said that they hold nothing of a workload, `beside` one of them."""
        return all(
            place.node_name == beside or (workload.workload_id, place.replica) in self._by_node.get(place.node_name, ())
            for place in workload.placements
        )

    def blocks_plan(self, node_name: str) -> bool:
        """Returns whether a plan could start a process on the node that runs elsewhere, or has ended."""
        unheld = self._by_node.get(node_name)
        if not unheld or not self._state.losses.withholds_starts:
            return False
        return not unheld.isdisjoint(self._state.nodes[node_name].assignments)

    def plan_evictions(self, runs_later: Callable[[Workload], bool], *, now_ns: int) -> tuple[WorkloadEvicted, ...]:
        """Returns the events that return work to the queue of which no agent holds a process, and that went on elsewhere.

        `runs_later` says whether a later attempt of a workload has ended somewhere.
        """
        found = []
        for key in sorted({key for unheld in self._by_node.values() for key, _ in unheld}):
            workload = self._state.workloads.get(key)
            if workload is None or workload.phase is not WorkloadPhase.PLACED:
                continue
            elsewhere = self._state.losses.nodes_ahead.get(key)
            if self.is_unheld(workload) and (elsewhere is not None or runs_later(workload)):
                reason = PendingConstraint.EVICTED.describe(
                    "gone_on", node=f"node {elsewhere}" if elsewhere else "another node"
                )
                found.append(WorkloadEvicted(time_ns=now_ns, workload_id=key, reason=reason))
        return tuple(found)
