r"""The cluster as the events made it: nodes, workloads, policy and learned demand.

Owns every durable fact and the one function that changes them, `apply`. Must
not know how decisions are made: it takes outcomes and refuses only what
contradicts what stands (ContradictoryEvent). No numpy here, no time: the arrays
of the planner are derived from this (snapshot.py).

Theory: revision n is the state after n events. `dump` holds what cannot be
derived; what is held on each node follows from the placements, so the two can
never disagree after `load`. Equal event sequences give equal digests.

    PENDING --WorkloadPlaced, PartitionsPlanned--> PLACED --WorkloadCancelled--> CANCELLED
       \________________WorkloadCancelled_____________________/
    PLACED --WorkloadMoved, WorkloadScaled, WorkloadLimited, PartitionsPlanned, DevicesCorrected--> PLACED, else than before
"""

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self, assert_never

from eelgrid_controller.demand import Demand
from eelgrid_controller.events import (
    ControllerStarted,
    DevicesCorrected,
    Event,
    GpuLost,
    GpuReturned,
    JournalRolledBack,
    NodeAhead,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeOccupied,
    NodeReconciled,
    NodesRemoved,
    PartitionsPlanned,
    PointsMeasured,
    PolicyChanged,
    PricesQuoted,
    SpendingJudged,
    WorkloadCancelled,
    WorkloadDeferred,
    WorkloadLimited,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
    WorkloadSubmitted,
)
from eelgrid_controller.explanations import Explanations
from eelgrid_controller.healing import Healer
from eelgrid_controller.invariants import check
from eelgrid_controller.ledger import (
    AheadOfJournal,
    ContradictoryEvent,
    InvariantBroken,
    NodeRecord,
    assignment_of,
    rehold,
    repoliced,
)
from eelgrid_controller.measured import Points, own_profile
from eelgrid_controller.modes import enforces, partitions
from eelgrid_controller.pending import PendingOrder
from eelgrid_controller.quotes import Market
from eelgrid_controller.replicas import corrected, involved, moved, partition, reheld, replanned, scaled, sliced
from eelgrid_controller.spending.standing import Spending
from eelgrid_protos.messages import Placement, Policy, Workload, WorkloadPhase
from eelgrid_protos.plain import to_plain

__all__ = ["ENDED_MOST", "ClusterState", "ContradictoryEvent", "InvariantBroken", "NodeRecord"]

# Ended workloads kept for people who look; the first to end is the first to go.
ENDED_MOST = 100_000
_FORMAT = 1
# Entries that a lost tail is taken to have had where nobody can tell.
_LOST_MOST = 1_000_000
_NUMBER_MOST = 2**62


class ClusterState:
    """Everything that the controller knows for good; read it freely, change it through `apply` alone."""

    def __init__(self, *, policy: Policy | None = None, ended_most: int = ENDED_MOST) -> None:
        self.revision = 0
        self.policy = policy or Policy()
        self.nodes: dict[str, NodeRecord] = {}
        self.workloads: dict[str, Workload] = {}
        self.explanations = Explanations()
        self.pending = PendingOrder()
        self.demand = Demand()
        self.market = Market()
        self.points = Points()
        self.spending = Spending()
        # Number of submissions so far; the next drawn id is w-<next_number>.
        self.submissions = 0
        self.next_number = 1
        # How often the loss of acknowledged entries was accepted.
        self.rollbacks = 0
        self._ended: deque[str] = deque()
        self._ended_most = ended_most

    def copy(self, records: Mapping[str, NodeRecord] = MappingProxyType({})) -> Self:
        """A state that goes on apart from this one, with these copies of records; what never changes is shared."""
        twin: Self = copy(self)
        twin.nodes = {name: records.get(name) or record.copy() for name, record in self.nodes.items()}
        twin.workloads, twin.explanations = self.workloads.copy(), self.explanations.copy()
        twin.pending, twin.demand, twin._ended = self.pending.copy(), self.demand.copy(), self._ended.copy()
        twin.market, twin.points, twin.spending = self.market.copy(), self.points.copy(), self.spending.copy()
        return twin

    def wait_again(self, workload_id: str, *, number: int) -> None:
        """Puts live work among what waits, at a place of its own: for a copy, since no event of the journal says it."""
        workload = self.workloads[workload_id]
        for placement in workload.placements:
            self.nodes[placement.node_name].release(workload_id, placement.replica)
        self.explanations.drop(workload_id)
        self.workloads[workload_id] = replace(workload, phase=WorkloadPhase.PENDING, placements=(), placed_ns=0)
        self.pending.discard(workload_id)
        self.pending.add(workload_id, priority=workload.spec.priority, number=number)

    @property
    def live(self) -> int:
        """Workloads that wait or run."""
        return len(self.workloads) - len(self._ended)

    @property
    def phases(self) -> dict[WorkloadPhase, int]:
        """Workloads by phase."""
        waiting, ended = len(self.pending), len(self._ended)
        return {
            WorkloadPhase.PENDING: waiting,
            WorkloadPhase.PLACED: len(self.workloads) - waiting - ended,
            WorkloadPhase.CANCELLED: ended,
        }

    def apply(self, event: Event) -> frozenset[str]:
        """Takes an event in; returns the nodes on which something changed. Raises ContradictoryEvent."""
        match event:
            case WorkloadSubmitted():
                touched = self._submitted(event)
            case WorkloadPlaced():
                touched = self._placed(event)
            case WorkloadMoved():
                touched = self._moved(event)
            case WorkloadDeferred():
                touched = self._deferred(event)
            case WorkloadCancelled():
                touched = self._cancelled(event)
            case NodeJoined():
                touched = self._joined(event)
            case NodeLost():
                self._node(event.node_name).lose(event.time_ns)
                touched = frozenset((event.node_name,))
            case NodesRemoved():
                touched = self._removed(event)
            case NodeOccupied():
                self._node(event.node_name).others = event.others
                touched = frozenset((event.node_name,))
            case GpuLost() | GpuReturned():
                touched = self._gpu_turned(event)
            case PolicyChanged():
                touched = self._policy_changed(event)
            case PricesQuoted():
                touched = self._priced(event)
            case WorkloadScaled():
                touched = self._scaled(event)
            case WorkloadLimited():
                touched = self._limited(event)
            case PointsMeasured():
                self.points.learn(event.points)
                touched = frozenset()
            case PartitionsPlanned():
                touched = self._partitioned(event)
            case DevicesCorrected():
                touched = self._corrected(event)
            case SpendingJudged():
                self.spending.judged(event.over)
                touched = frozenset()
            case NodeAhead() | NodeReconciled():
                touched = self._reconciled(event)
            case NodeHeard():
                self._node(event.node_name).doubted_epoch = None
                touched = frozenset((event.node_name,))
            case ControllerStarted():
                touched = self._doubted()
            case JournalRolledBack():
                self.rollbacks += 1
                # Ids that were drawn in what is lost may still be in use: each entry drew one at the most.
                lost = _LOST_MOST if event.last is None else event.last - event.first + 1
                self.next_number += max(0, min(lost, _LOST_MOST))
                touched = frozenset()
            case _:
                assert_never(event)
        self.revision += 1
        self.spending.changed(reheld(event), self.workloads, event.time_ns)
        return touched

    def _node(self, name: str) -> NodeRecord:
        record = self.nodes.get(name)
        if record is None:
            raise ContradictoryEvent(f"node {name} never joined")
        return record

    def _waiting(self, workload_id: str) -> Workload:
        if workload_id not in self.pending:
            raise ContradictoryEvent(f"workload {workload_id} does not wait")
        return self.workloads[workload_id]

    def _submitted(self, event: WorkloadSubmitted) -> frozenset[str]:
        key = event.workload_id
        if key in self.workloads:
            raise ContradictoryEvent(f"workload {key} is there already")
        self.workloads[key] = Workload(
            workload_id=key,
            spec=event.spec,
            phase=WorkloadPhase.PENDING,
            submitted_ns=event.time_ns,
            revision=self.revision + 1,
            owner=event.owner,
        )
        self.submissions += 1
        self.pending.add(key, priority=event.spec.priority, number=self.submissions)
        mix = self.demand.mix
        if not sliced(self.workloads[key]):  # what the partition planner places is no demand on the others' room
            self.demand.observe(event.spec.request, event.spec.replicas)
        if self.demand.mix is not mix:
            self.market.void()
        digits = key.removeprefix("w-")
        if digits != key and digits.isascii() and digits.isdigit() and len(digits) <= 18:
            self.next_number = max(self.next_number, int(digits) + 1)
        return frozenset()

    def _deferred(self, event: WorkloadDeferred) -> frozenset[str]:
        workload = self._waiting(event.workload_id)
        self.workloads[event.workload_id] = replace(workload, reason=event.reason, revision=self.revision + 1)
        return frozenset()

    def _placed(self, event: WorkloadPlaced) -> frozenset[str]:
        key = event.workload_id
        workload = self._waiting(key)
        if [placement.replica for placement in event.placements] != list(range(workload.spec.replicas)):
            raise ContradictoryEvent(f"workload {key}: the placements are not one for each replica")
        rehold(self.nodes, workload, (), event.placements)
        self.pending.discard(key)
        self.explanations.put(key, event.explanation)
        self.workloads[key] = replace(
            workload,
            phase=WorkloadPhase.PLACED,
            reason="",
            placements=event.placements,
            placed_ns=event.time_ns,
            revision=self.revision + 1,
        )
        return self._replanned(event.placements)

    def _moved(self, event: WorkloadMoved) -> frozenset[str]:
        return self._restood(*moved(self.workloads.get(event.workload_id), event), event)

    def _scaled(self, event: WorkloadScaled) -> frozenset[str]:
        return self._restood(*scaled(self.workloads.get(event.workload_id), event), event)

    def _restood(
        self, after: Workload, before: Sequence[Placement], event: WorkloadMoved | WorkloadScaled
    ) -> frozenset[str]:
        """Some replicas leave their places, some have new ones; all others stand where they stood."""
        rehold(self.nodes, after, before, event.placements)
        self.explanations.put(after.workload_id, event.explanation, (item.replica for item in before))
        self.workloads[after.workload_id] = replace(after, revision=self.revision + 1)
        return self._replanned((*before, *event.placements))

    def _partitioned(self, event: PartitionsPlanned) -> frozenset[str]:
        after = replanned(self.workloads, event)
        # On copies first, so that an event that cannot be changes nothing.
        copies = {name: self._node(name).copy() for name in involved(self.workloads, after, event)}
        partition(copies, self.workloads, after, event)
        touched = partition(self.nodes, self.workloads, after, event)
        for key, workload in after.items():
            self.pending.discard(key)
            self.workloads[key] = replace(workload, revision=self.revision + 1)
        for name in touched:
            self.nodes[name].plan_epoch += 1
        return touched

    def _corrected(self, event: DevicesCorrected) -> frozenset[str]:
        for key, workload in corrected(self.workloads, self._node(event.node_name), event).items():
            self.workloads[key] = replace(workload, revision=self.revision + 1)
        return self._replanned(tuple(one.placement for one in event.replicas))

    def _limited(self, event: WorkloadLimited) -> frozenset[str]:
        workload = self.workloads.get(event.workload_id)
        if workload is None or workload.phase is not WorkloadPhase.PLACED:
            raise ContradictoryEvent(f"workload {event.workload_id} does not run")
        self.workloads[event.workload_id] = replace(
            workload, power_limit_w=event.power_limit_w, revision=self.revision + 1
        )
        names = frozenset(placement.node_name for placement in workload.placements)
        for name in names:
            self.nodes[name].plan_epoch += 1
        return names

    def _replanned(self, placements: tuple[Placement, ...]) -> frozenset[str]:
        self.market.moved(len(placements))
        names = frozenset(placement.node_name for placement in placements)
        for name in names:
            self.nodes[name].plan_epoch += 1
        return names

    def _cancelled(self, event: WorkloadCancelled) -> frozenset[str]:
        key = event.workload_id
        workload = self.workloads.get(key)
        if workload is None or workload.phase is WorkloadPhase.CANCELLED:
            raise ContradictoryEvent(f"workload {key} is not there or has ended")
        self.pending.discard(key)
        self.explanations.drop(key)
        self.points.forget(own_profile(key))
        for placement in workload.placements:
            self.nodes[placement.node_name].release(key, placement.replica)
        self.workloads[key] = replace(
            workload, phase=WorkloadPhase.CANCELLED, reason="", ended_ns=event.time_ns, revision=self.revision + 1
        )
        self._ended.append(key)
        while len(self._ended) > self._ended_most:
            del self.workloads[self._ended.popleft()]
        return self._replanned(workload.placements)

    def _joined(self, event: NodeJoined) -> frozenset[str]:
        name = event.inventory.node_name
        self.market.age()
        record = self.nodes.get(name)
        if record is None:
            epoch = event.plan_epoch + 1 if event.plan_epoch else 0
            record = self.nodes[name] = NodeRecord(inventory=event.inventory, plan_epoch=epoch)
            record.has(event.inventory)
            record.turn(partitioned=partitions(self.policy, event.inventory.pool))
            return frozenset((name,))
        before = enforces(self.policy, record.inventory.pool), record.opened()
        record.has(event.inventory)
        turned = record.turn(partitioned=partitions(self.policy, event.inventory.pool))
        if turned or (enforces(self.policy, event.inventory.pool), record.opened()) != before:
            record.plan_epoch += 1
        if event.plan_epoch > record.plan_epoch:
            record.plan_epoch = event.plan_epoch + 1
        return frozenset((name,))

    def _doubted(self) -> frozenset[str]:
        """Of each node that an agent describes, what was known when the agent last spoke is what it can hold."""
        names = frozenset(name for name, record in self.nodes.items() if record.inventory.agent_version)
        for record in (self.nodes[name] for name in names):
            if record.doubted_epoch is None:
                record.doubted_epoch = record.plan_epoch
        return names

    def _reconciled(self, event: NodeAhead | NodeReconciled) -> frozenset[str]:
        record = self._node(event.node_name)
        record.plan_epoch = max(record.plan_epoch, event.plan_epoch) + 1
        record.doubted_epoch = None
        record.ahead = (
            AheadOfJournal(plan_epoch=event.plan_epoch, assignments=event.assignments, workload_ids=event.workload_ids)
            if isinstance(event, NodeAhead)
            else None
        )
        return frozenset((event.node_name,))

    def _removed(self, event: NodesRemoved) -> frozenset[str]:
        for name in event.node_names:
            if self._node(name).assignments:
                raise ContradictoryEvent(f"node {name} holds work and cannot be removed")
        for name in event.node_names:
            self.nodes.pop(name, None)
        self.market.age()
        return frozenset(event.node_names)

    def _gpu_turned(self, event: GpuLost | GpuReturned) -> frozenset[str]:
        record = self._node(event.node_name)
        if isinstance(event, GpuLost):
            if record.gpu(event.gpu_uuid) is None:
                raise ContradictoryEvent(f"node {event.node_name} has no GPU {event.gpu_uuid}")
            record.lost_gpus.add(event.gpu_uuid)
        else:
            record.lost_gpus.discard(event.gpu_uuid)
        return frozenset((event.node_name,))

    def _policy_changed(self, event: PolicyChanged) -> frozenset[str]:
        before, self.policy = self.policy, event.policy
        self.spending.limited(event.policy, self.workloads, event.time_ns)
        return repoliced(self.nodes, before, event.policy)

    def _priced(self, event: PricesQuoted) -> frozenset[str]:
        if len(event.offers_w) != len(self.demand.mix):
            raise ContradictoryEvent(f"{len(event.offers_w)} offers for a mix of {len(self.demand.mix)} classes")
        self.market.quoted(event.quotes)
        return frozenset()

    def dump(self) -> dict[str, Any]:
        """Everything that `load` needs, as plain values that JSON carries."""
        return {
            "format": _FORMAT,
            "revision": self.revision,
            "policy": to_plain(self.policy),
            "submissions": self.submissions,
            "next_number": self.next_number,
            "ended_most": self._ended_most,
            "ended": list(self._ended),
            "demand": self.demand.dump(),
            "market": self.market.dump(),
            "nodes": [record.dump() for record in self.nodes.values()],
            "workloads": [to_plain(workload, brief=True) for workload in self.workloads.values()],
            "explanations": self.explanations.dump(),
            "points": self.points.dump(),
            "spending": self.spending.dump(),
            **({"rollbacks": self.rollbacks} if self.rollbacks else {}),
        }

    @classmethod
    def load(cls, plain: Mapping[str, Any], healer: Healer | None = None) -> Self:
        """The state in a checkpoint; raises ValueError or KeyError if it is none of ours."""
        healer = healer or Healer()
        if plain.get("format") != _FORMAT:
            raise ValueError(f"checkpoint format {plain.get('format')!r}; this version reads format {_FORMAT}")
        state = cls(policy=healer.read(Policy, plain["policy"]), ended_most=plain["ended_most"])
        state.revision, state.submissions = plain["revision"], plain["submissions"]
        state.next_number = plain["next_number"]
        state.rollbacks = plain.get("rollbacks", 0)
        state._ended.extend(map(healer.identifier, plain["ended"]))
        state.demand = Demand.load(plain["demand"])
        if "market" in plain:  # checkpoints of before had none
            state.market = Market.load(plain["market"])
        state.points = Points.load(plain.get("points", ()))
        for record in (NodeRecord.load(row, healer) for row in plain["nodes"]):
            record.partitioned = partitions(state.policy, record.inventory.pool)
            state.nodes[record.inventory.node_name] = record
        state._load_workloads(plain, healer)
        state.spending = Spending.load(plain.get("spending", {}), state.policy, state.workloads)
        return state

    def _load_workloads(self, plain: Mapping[str, Any], healer: Healer) -> None:
        # Numbers of submission are only compared, so counting anew from the first that is kept is as good.
        first = self.submissions - len(plain["workloads"])
        for number, row in enumerate(plain["workloads"], first + 1):
            workload = healer.read(Workload, row)
            self.workloads[workload.workload_id] = workload
            if workload.phase is WorkloadPhase.PENDING:
                self.pending.add(workload.workload_id, priority=workload.spec.priority, number=number)
            elif workload.phase is WorkloadPhase.PLACED:
                for placement in workload.placements:
                    record = self._node(placement.node_name)
                    record.book(assignment_of(workload, placement))
        self.explanations = Explanations({healer.identifier(key): text for key, text in plain["explanations"].items()})
        for record in self.nodes.values():
            record.weigh_commitment()

    def digest(self, dumped: Mapping[str, Any] | None = None) -> str:
        """A hash of the whole state: equal histories, equal digests. `dumped` is a dump at hand of just now."""
        text = json.dumps(dumped or self.dump(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def validate(self) -> None:
        """Every invariant; raises InvariantBroken."""
        check(self.nodes, self.workloads, waiting=self.pending, ended=self._ended, ended_most=self._ended_most)
