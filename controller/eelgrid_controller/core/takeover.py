"""Takeover: what becomes of work, while entries may be lost, by what agents hold of it and hold no more.

Theory. A process that the journal has on a node and its agent does not hold is unheld. Either the agent never got the plan
that names it; or it has ended, which the agent tells again; or lost entries have stopped it, so that the work may run
elsewhere by a later attempt. A plan would start it a second time. So a node with unheld work gets no plan while starts
are withheld (state/journal_losses.py). When they are resumed, work that a node elsewhere is known to run, or to have run by
a later attempt, returns to the queue; all other is started.

What a node holds beyond the journal may stand where the journal has work that has ended since (core/claimed_starts.py). So
its claim is compared again with each end that is told, and at last when starts are resumed. What it told of attempts before
their start was known is heard then. Must not know how claims and reports arrive.
"""

from functools import partial

from eelgrid_controller.core.attempt_reports import AttemptReports
from eelgrid_controller.core.claimed_starts import plan_claimed_starts
from eelgrid_controller.core.nodes import PlanClaim, compare_claim
from eelgrid_controller.core.preemptions import ApplyEvent
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, WorkloadEvicted
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.messages import Workload, WorkloadPhase


class Takeover:
    """What agents have said since they came back, as long as starts are withheld."""

    def __init__(self, state: ClusterState, reports: AttemptReports) -> None:
        self._state, self._reports = state, reports
        # By node: what its agent holds, and the workloads and replicas that it should and does not.
        self._claims: dict[str, PlanClaim] = {}
        self._unheld: dict[str, frozenset[tuple[str, int]]] = {}

    def compare_claim(
        self, node_name: str, claim: PlanClaim, apply: ApplyEvent, now_ns: int
    ) -> tuple[tuple[Event, ...], frozenset[str]]:
        """Compares what a doubted node holds with the journal; returns the events, already applied, and their nodes."""
        starts, record = None, self._state.nodes.get(node_name)
        if self._state.losses.withholds_starts and record is not None and claim.held is not None:
            is_unheld = partial(self.is_unheld, beside=node_name)
            starts = plan_claimed_starts(self._state, record, claim.held, is_unheld, now_ns=now_ns)
        events = compare_claim(self._state, node_name, claim, starts, now_ns=now_ns)
        nodes = frozenset[str]().union(*map(apply, events))
        self._record_unheld(node_name, claim)
        return events, nodes

    def _record_unheld(self, node_name: str, claim: PlanClaim) -> None:
        record = self._state.nodes.get(node_name)
        if not self._state.losses.withholds_starts or record is None or claim.held is None:
            return
        self._claims[node_name] = claim
        held = {(item.workload_id, item.replica): item.attempt for item in claim.held}
        workloads = self._state.workloads
        self._unheld[node_name] = frozenset(
            key
            for key in record.assignments
            if workloads[key[0]].spec.process is not None and held.get(key) != workloads[key[0]].attempt
        )

    def is_unheld(self, workload: Workload, *, beside: str = "") -> bool:
        """Returns whether the agents of all its nodes have said that they hold nothing of a workload, `beside` one of them."""
        return all(
            place.node_name == beside or (workload.workload_id, place.replica) in self._unheld.get(place.node_name, ())
            for place in workload.placements
        )

    def blocks_plan(self, node_name: str) -> bool:
        """Returns whether a plan could start a process on the node that runs elsewhere, or has ended."""
        unheld = self._unheld.get(node_name)
        if not unheld:
            return False
        return not unheld.isdisjoint(self._state.nodes[node_name].assignments)

    def take_over(self, node_name: str, apply: ApplyEvent, now_ns: int) -> tuple[list[Event], frozenset[str]]:
        """Takes over what a node that is ahead holds, as far as that is possible by now; returns as `compare_claim` does."""
        record, claim = self._state.nodes.get(node_name), self._claims.get(node_name)
        if record is None or record.ahead is None or claim is None:
            return [], frozenset()
        taken, nodes = self.compare_claim(node_name, claim, apply, now_ns)
        early = self._reports.pop_early(node_name) if taken else []
        events, touched, _ = self._reports.record(node_name, early, apply, now_ns)
        return [*taken, *events], nodes | touched

    def settle(self, apply: ApplyEvent, now_ns: int) -> tuple[list[Event], frozenset[str]]:
        """Settles what all agents have said, before starts are resumed; returns as `compare_claim` does."""
        events, nodes = list[Event](), frozenset[str]()
        for plan in (self._plan_evictions, self._reports.recovered.plan_ends):
            for event in plan(now_ns):
                nodes |= apply(event)
                events.append(event)
        for node_name in tuple(self._claims):
            taken, touched = self.take_over(node_name, apply, now_ns)
            events, nodes = [*events, *taken], nodes | touched
        self._claims.clear()
        self._unheld.clear()
        self._reports.forget_told()
        return events, nodes

    def _plan_evictions(self, now_ns: int) -> list[WorkloadEvicted]:
        """Returns the events that return unheld work to the queue that has gone on elsewhere."""
        found = []
        for key in sorted({key for unheld in self._unheld.values() for key, _ in unheld}):
            workload = self._state.workloads.get(key)
            if workload is None or workload.phase is not WorkloadPhase.PLACED or not self.is_unheld(workload):
                continue
            elsewhere = self._state.losses.nodes_ahead.get(key)
            if elsewhere or self._reports.recovered.has_later(workload):
                node = f"node {elsewhere[0]}" if elsewhere else "another node"
                reason = PendingConstraint.EVICTED.describe("gone_on", node=node)
                found.append(WorkloadEvicted(time_ns=now_ns, workload_id=key, reason=reason))
        return found
