"""What an observer who sees every machine knows: promises made, events committed, plans sent and taken.

Owns the facts that invariants are checked against, none of which the code under
test can see. It raises Broken by itself where one fact contradicts another.
Ticks have a book of their own, ticks.py.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    Event,
    WorkloadCancelled,
    WorkloadEvicted,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadRetried,
    WorkloadScaled,
    event_from_plain,
)
from eelgrid_controller.state.journal import JournalEntry
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.takeover_events import NodeReconciled
from eelgrid_controller.state.telemetry import BatchReceipt, PackedTick, Telemetry
from eelgrid_protos.catalogue import resolve_gpu_models
from eelgrid_protos.messages import (
    Assignment,
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
from tests.sim.poison import ROGUE
from tests.sim.ticks import TickBook

__all__ = ["Held", "Ledger", "as_begun", "held_of"]

# Workload, replica and the GPUs that it is on.
Held = tuple[str, int, tuple[str, ...]]


def held_of(item: Assignment | Placement, workload_id: str = "") -> Held:
    """What names a replica where it is."""
    return getattr(item, "workload_id", workload_id), item.replica, tuple(sorted(item.gpu_uuids))


def as_begun(workload: Workload) -> WorkloadSpec:
    """The spec as it was submitted, whatever it was scaled to since."""
    return replace(workload.spec, replicas=workload.replicas_begun or workload.spec.replicas)


def names_models_as(kept: WorkloadSpec, stated: WorkloadSpec) -> bool:
    """Whether a kept spec is the stated one, its GPU models by the names that they were stated by or the catalogue's.

    A part of a name that fits several models there stands for the one that the cluster has.
    """
    if kept == stated:
        return True
    reported = kept.request.gpu_models
    names = resolve_gpu_models(stated.request.gpu_models, "gpu_models", reported=reported, keeps_unknown=True)
    stated = replace(stated, request=replace(stated.request, gpu_models=names))
    if kept.gpu_preference is not None and stated.gpu_preference is not None:
        reported, rather = kept.gpu_preference.models, stated.gpu_preference
        names = resolve_gpu_models(rather.models, "gpu_preference.models", reported=reported, keeps_unknown=True)
        stated = replace(stated, gpu_preference=replace(rather, models=names))
    return kept == stated


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
        # The last boot of each node.
        self.boots: dict[str, str] = {}
        self.evictions = 0
        self.plan_epochs: dict[str, int] = {}
        self._plans: dict[tuple[str, int], NodePlan] = {}
        # Plans of histories that were lost: they may still be under way.
        self._lost_plans: list[NodePlan] = []
        # How often the journal lost entries, and which entry was the last that was left.
        self.rollbacks = 0
        self.left = 0
        # Of whom users may conclude nothing any more.
        self.lost: set[str] = set()
        # Submissions that were lost, by name and time: one may be acknowledged after it was lost and its name given again.
        self._lost_submissions: set[tuple[str, int]] = set()
        # Number of the entry that placed a replica on these GPUs, of the history that counts now.
        self.history: dict[Held, int] = {}
        # What an operator gave up after a loss, though an agent may still hold it.
        self.given_up: set[Held] = set()
        # Nodes that an operator asked to reconcile.
        self.asked: set[str] = set()
        # What the agent of a node holds now.
        self.held_on: Callable[[str], tuple[Assignment, ...]] = lambda _: ()

    # What the controller did

    def committed(self, entries: Sequence[JournalEntry]) -> None:
        """Entries that are on disk, read back as a disk gives them."""
        for entry in entries:
            text = json.dumps(entry.body, allow_nan=False)
            self.entries.append((entry.kind, text))
            event = event_from_plain(entry.kind, json.loads(text))
            self._take(event)
            if isinstance(event, NodeReconciled) and event.node_name in self.asked:
                self.given_up.update(self.unknown(self.held_on(event.node_name)))

    def _take(self, event: Event) -> None:
        self._placement(event)
        self.shadow.apply(event)
        for placement in getattr(event, "placements", ()):
            self.history[held_of(placement, event.workload_id)] = self.shadow.revision

    def rolled_back(self, left: int) -> None:
        """Entries after this one are gone; whatever rested on them is no promise any more."""
        self.rollbacks += 1
        self.left = left
        del self.entries[left:]
        former = self.shadow.workloads.values()
        self.shadow, self.placed, self.history = ClusterState(), {}, {}
        for kind, text in self.entries:
            self._take(event_from_plain(kind, json.loads(text)))
        stands = self.shadow.workloads
        self._lost_submissions |= {
            (found.workload_id, found.submitted_ns)
            for found in former
            if found.workload_id not in stands or stands[found.workload_id].submitted_ns != found.submitted_ns
        }
        gone = {
            key
            for key, promised in self.accepted.items()
            if key not in stands or stands[key].submitted_ns != promised.submitted_ns
        }
        undone = {key for key in self.cancelled - gone if stands[key].phase is not WorkloadPhase.CANCELLED}
        self.lost |= gone | undone
        for key in gone:
            del self.accepted[key]
        self.cancelled -= self.lost
        if self.shadow.policy.revision < self.policy.revision:
            self.policy = self.shadow.policy
        self.plan_epochs.clear()
        self._lost_plans.extend(self._plans.values())
        self._plans.clear()

    def unknown(self, held: Iterable[Assignment]) -> list[Held]:
        """Of what an agent holds, what this history never placed and nobody gave up."""
        return [key for key in map(held_of, held) if key not in self.history and key not in self.given_up]

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
        elif isinstance(event, WorkloadEvicted):
            demand(2, event.workload_id in self.placed, f"{event.workload_id} was evicted and is not placed")
            del self.placed[event.workload_id]
            self.evictions += 1
        elif isinstance(event, WorkloadCancelled | WorkloadRetried):
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

    def receive(
        self, telemetry: Telemetry, hello: Hello, batch: SampleBatch, clock: Clock, *, tick: PackedTick | None = None
    ) -> BatchReceipt:
        """Hands a batch to the telemetry and checks what became of it."""
        return self.ticks.receive(telemetry, hello, batch, clock, tick=tick)

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
        demand(
            4,
            sent == guard.plan or guard.plan in self._lost_plans,
            f"{node_name}: plan {guard.epoch} is not the one that was sent",
        )

    def accused(self, problem: str) -> None:
        """The controller says that an agent broke the contract."""
        demand(8, not self.ticks.is_fair, f"the controller ends a stream in order: {problem}")

    def joined(self, hello: Hello, record: NodeRecord) -> None:
        """An agent was welcomed: a loss that it shows is seen."""
        name, boot = hello.inventory.node_name, hello.inventory.boot_id
        if name.startswith(ROGUE):
            return
        agent = self.ticks.running.get(name)
        if boot != self.boots.get(name, boot) or (agent is not None and hello.incarnation != agent.incarnation):
            # An opening of an earlier boot or agent that was late: what it tells of has ended with that.
            return
        unknown = self.unknown(hello.held.assignments if hello.held is not None else ())
        is_seen = record.ahead is not None or not unknown
        demand(9, is_seen, f"{name} holds {unknown}, which the journal lost, and nobody is told")

    # What users were told

    def answered_submit(self, workload: Workload, spec: WorkloadSpec, wanted_id: str) -> None:
        """A workload was accepted, perhaps once more."""
        key = workload.workload_id
        if key in self.lost or (key, workload.submitted_ns) in self._lost_submissions:
            return
        demand(2, not wanted_id or key == wanted_id, f"asked for {wanted_id}, was given {key}")
        # What names no queue is in the default one where there are queues.
        wanted = spec if spec.queue else replace(spec, queue=workload.spec.queue)
        demand(2, names_models_as(as_begun(workload), wanted), f"{key} was accepted with another spec")
        before = self.accepted.setdefault(key, workload)
        demand(2, before.submitted_ns == workload.submitted_ns, f"{key} was accepted twice")

    def answered_cancel(self, workload: Workload) -> None:
        """A workload was cancelled."""
        demand(
            2, workload.phase is WorkloadPhase.CANCELLED, f"{workload.workload_id} answered as {workload.phase.name}"
        )
        if workload.workload_id not in self.lost:
            self.cancelled.add(workload.workload_id)

    def answered_policy(self, policy: Policy) -> None:
        """A policy was accepted; answers may overtake each other."""
        if policy.revision > self.policy.revision:
            self.policy = policy
