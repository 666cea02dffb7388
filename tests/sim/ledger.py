"""What an observer who sees every machine knows: promises made, events committed, plans sent and taken.

Owns the facts that invariants are checked against, none of which the code under
test can see. It raises Broken by itself where one fact contradicts another.
Ticks have a book of their own, ticks.py.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from eelgrid_agent.guard import Guard
from eelgrid_controller.events import (
    Event,
    WorkloadCancelled,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
    event_from_plain,
)
from eelgrid_controller.journal import Entry
from eelgrid_controller.state import ClusterState
from eelgrid_controller.telemetry import Receipt, Telemetry
from eelgrid_protos.messages import (
    Hello,
    NodePlan,
    Placement,
    Policy,
    SampleBatch,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from tests.sim.broken import demand
from tests.sim.clock import Clock
from tests.sim.ticks import TickBook

__all__ = ["Ledger", "as_begun"]


def as_begun(workload: Workload) -> WorkloadSpec:
    """The spec as it was submitted, whatever it was scaled to since."""
    return replace(workload.spec, replicas=workload.replicas_begun or workload.spec.replicas)


class Ledger:
    """See the module."""

    def __init__(self, ticks: TickBook) -> None:
        self.ticks = ticks
        # The state that the committed entries alone lead to.
        self.shadow = ClusterState()
        self.entries: list[tuple[str, str]] = []
        self.accepted: dict[str, Workload] = {}
        self.cancelled: set[str] = set()
        self.policy = Policy()
        self.placed: dict[str, tuple[Placement, ...]] = {}
        self.moves = 0
        self.scalings = 0
        self.plan_epochs: dict[str, int] = {}
        self._plans: dict[tuple[str, int], NodePlan] = {}

    # What the controller did

    def committed(self, entries: Sequence[Entry]) -> None:
        """Entries that are on disk, read back as a disk gives them."""
        for entry in entries:
            text = json.dumps(entry.body, allow_nan=False)
            self.entries.append((entry.kind, text))
            event = event_from_plain(entry.kind, json.loads(text))
            self._placement(event)
            self.shadow.apply(event)

    def _placement(self, event: Event) -> None:
        if isinstance(event, WorkloadPlaced):
            key = event.workload_id
            demand(2, key not in self.placed, f"{key} was placed twice: {self.placed.get(key)}, {event.placements}")
            self.placed[key] = event.placements
        elif isinstance(event, WorkloadMoved):
            key, moved = event.workload_id, {placement.replica: placement for placement in event.placements}
            before = self.placed.get(key, ())
            demand(2, moved.keys() <= {item.replica for item in before}, f"{key} was moved and is not placed")
            self.placed[key] = tuple(moved.get(item.replica, item) for item in before)
            self.moves += len(moved)
        elif isinstance(event, WorkloadScaled):
            key, before = event.workload_id, self.placed.get(event.workload_id, ())
            kept = [item for item in before if item.replica not in event.released]
            new = {item.replica for item in event.placements}
            demand(2, bool(before), f"{key} was scaled and is not placed")
            demand(2, len(before) - len(kept) == len(event.released), f"{key} gave up replicas that it has not")
            demand(2, new.isdisjoint(item.replica for item in kept), f"{key} has a replica twice")
            self.placed[key] = tuple(sorted([*kept, *event.placements], key=lambda item: item.replica))
            self.scalings += 1
        elif isinstance(event, WorkloadCancelled):
            self.placed.pop(event.workload_id, None)

    def recovered(self, state: ClusterState) -> None:
        """A state that came back is the one that was committed."""
        demand(
            3,
            state.revision == self.shadow.revision,
            f"recovered revision {state.revision}, but {self.shadow.revision} entries were committed",
        )
        demand(3, state.digest() == self.shadow.digest(), f"recovered state of revision {state.revision} differs")

    def replayed(self) -> ClusterState:
        """Every committed entry on a fresh state."""
        state = ClusterState()
        for kind, text in self.entries:
            state.apply(event_from_plain(kind, json.loads(text)))
        return state

    def receive(self, telemetry: Telemetry, hello: Hello, batch: SampleBatch, clock: Clock) -> Receipt:
        """Hands a batch to the telemetry and checks what became of it."""
        return self.ticks.receive(telemetry, hello, batch, clock)

    def plan_sent(self, plan: NodePlan) -> None:
        """An epoch stands for one content, for ever, and never falls."""
        before = self._plans.setdefault((plan.node_name, plan.epoch), plan)
        demand(4, before == plan, f"{plan.node_name}: epoch {plan.epoch} was sent with two contents")
        self.epoch_seen(plan.node_name, plan.epoch)

    def epoch_seen(self, node_name: str, epoch: int) -> None:
        """The controller's epoch of a node, at a moment when it was committed."""
        highest = self.plan_epochs.get(node_name, 0)
        demand(4, epoch >= highest, f"{node_name}: the plan's epoch fell from {highest} to {epoch}")
        self.plan_epochs[node_name] = epoch

    def plan_taken(self, node_name: str, before: int, guard: Guard) -> None:
        """A node put a plan in force: none older than before, with the content that the controller gave it."""
        demand(4, guard.epoch >= before, f"{node_name}: the agent went from epoch {before} back to {guard.epoch}")
        sent = self._plans.get((node_name, guard.epoch))
        demand(4, sent == guard.plan, f"{node_name}: plan {guard.epoch} is not the one that was sent")

    def accused(self, problem: str) -> None:
        """The controller says that an agent broke the contract."""
        demand(8, not self.ticks.is_fair, f"the controller ends a stream in order: {problem}")

    # What users were told

    def answered_submit(self, workload: Workload, spec: WorkloadSpec, wanted_id: str) -> None:
        """A workload was accepted, perhaps once more."""
        key = workload.workload_id
        demand(2, not wanted_id or key == wanted_id, f"asked for {wanted_id}, was given {key}")
        demand(2, as_begun(workload) == spec, f"{key} was accepted with another spec")
        before = self.accepted.setdefault(key, workload)
        demand(2, before.submitted_ns == workload.submitted_ns, f"{key} was accepted twice")

    def answered_cancel(self, workload: Workload) -> None:
        """A workload was cancelled."""
        demand(
            2, workload.phase is WorkloadPhase.CANCELLED, f"{workload.workload_id} answered as {workload.phase.name}"
        )
        self.cancelled.add(workload.workload_id)

    def answered_policy(self, policy: Policy) -> None:
        """A policy was accepted; answers may overtake each other."""
        if policy.revision > self.policy.revision:
            self.policy = policy
