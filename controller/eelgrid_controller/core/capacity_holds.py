"""Capacity that is held back: freed capacity waits for work of a queue that has used less than its share.

Without it, work that needs several GPUs of one node starves beside work that needs one, whatever its queue is owed: a GPU
that becomes free is taken before there are two. `CapacityHolds` decides for whom nodes are held, on which, for how long,
and what may start there meanwhile. Must not know in which order work is tried, nor when it ends.

Theory. In a round, the first workload of a queue that waits for capacity alone gets a hold, if at some level of the tree
the queue has used less for its weight than a sibling, and still would have after running it for the time H
(queueing.past_use), or if it waits for longer than the age limit. Held are the nodes that lack the least to have room for
it if their jobs ended; so of the room that work behind it may not take, less than it needs is idle on each of these nodes for
want of something else to end. What is tried before it in the round, or has a higher priority, is not bound by the hold.

Bounds. H is the policy's (`capacity_hold_s`), a sixteenth of the half-life by default. A queue holds capacity for at most H
without a start, and then not for 4 H: so nobody waits for work that never ends, and at most a fifth of the time of the
held nodes is spent waiting. Holds are derived in each round, at most one in a tree, for the first 8 queues with such work,
on disjoint nodes; since when is an event, so that a restart prolongs none. Work with a reserved start (core.backfill) needs none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.placement.placer import NO_NODES, NO_RECORDS, AlteredNodes, WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.queueing.admission import QueueIndex
from eelgrid_controller.queueing.past_use import PastUse, UseExchange
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.demand import OpportunityPrices
from eelgrid_controller.state.events import CapacityHoldsChanged
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.pending_queue import BarredQueue, HeldQueue
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.queue_usage import count_charge
from eelgrid_protos.messages import Workload, WorkloadKind, WorkloadSpec

_NS = 10**9
_CONSIDERED_MOST = 8
_PARTS_OF_HALF_LIFE = 16.0
# After a hold in vain a queue gets none for so many times as long.
_BARRED_TIMES = 4
# Nodes that are thought empty for one hold, and searches for places on them.
_NODES_MOST = 1024
_SEARCHES_MOST = 4


@dataclass(frozen=True, slots=True)
class CapacityHold:
    """The nodes that are held for one workload, and since when its queue holds capacity without a start."""

    workload_id: str
    queue: str
    root: str
    priority: int
    since_ns: int
    node_names: frozenset[str]


class CapacityHolds:
    """The holds of one state's pending work."""

    def __init__(
        self, state: ClusterState, placer: WorkloadPlacer, queues: QueueIndex, backfill: BackfillPlanner
    ) -> None:
        self._state, self._placer, self._queues, self._backfill = state, placer, queues, backfill
        # Of the round under way, or of the last one; and of the one before, which hold until a round has made others. Which
        # nodes were held before a restart is not known: the round that follows finds them again.
        self._holds = [_restore_hold(held, state) for held in state.pending.held]
        self._before: list[CapacityHold] = []
        self._in_round = False
        # The queues that were asked for in this round: of each the first work that waits for capacity.
        self._considered = set[str]()
        # By queue: until when it gets no hold.
        self._barred_ns = {one.queue: one.until_ns for one in state.pending.barred}

    @property
    def _limit_s(self) -> float:
        policy = self._state.policy
        limit_s = policy.capacity_hold_s
        return policy.queue_half_life_s / _PARTS_OF_HALF_LIFE if limit_s is None else limit_s

    def _limit_ns(self) -> int:
        return int(self._limit_s * _NS)

    def begin_round(self, now_ns: int) -> None:
        """Begins a round over all pending work: holds are made anew."""
        limit_ns = self._limit_ns()
        self._barred_ns = {queue: until_ns for queue, until_ns in self._barred_ns.items() if until_ns > now_ns}
        for hold in self._list_pending(self._holds):
            if now_ns - hold.since_ns >= limit_ns:
                self._barred_ns[hold.queue] = now_ns + _BARRED_TIMES * limit_ns
        self._before, self._holds, self._in_round = self._holds, [], True
        self._considered.clear()

    def end_round(self, now_ns: int) -> Iterator[CapacityHoldsChanged]:
        """Ends a round; yields what it has changed, for the restart of another core."""
        self._in_round = False
        held = tuple(
            HeldQueue(queue=one.queue, workload_id=one.workload_id, since_ns=one.since_ns)
            for one in sorted(self._list_pending(self._holds), key=attrgetter("queue"))
        )
        barred = tuple(BarredQueue(queue=name, until_ns=self._barred_ns[name]) for name in sorted(self._barred_ns))
        if (held, barred) != (self._state.pending.held, self._state.pending.barred):
            yield CapacityHoldsChanged(time_ns=now_ns, held=held, barred=barred)

    def is_due(self, now_ns: int) -> bool:
        """Returns whether a round is due because a hold has lasted for as long as it may."""
        if self._in_round or not self._holds:
            return False
        limit_ns = self._limit_ns()
        return any(now_ns - hold.since_ns >= limit_ns for hold in self._list_pending(self._holds))

    def _list_pending(self, holds: list[CapacityHold]) -> Iterator[CapacityHold]:
        return (hold for hold in holds if hold.workload_id in self._state.pending)

    def list_binding(self, workload: Workload, *, is_round: bool) -> list[CapacityHold]:
        """Returns the holds of others that bind a workload; within a round those that were made before it was tried.

        None binds work whose start is promised: a promise moves only for a named cause.
        """
        if workload.promise is not None:
            return []
        found = self._holds
        if self._in_round and not is_round:
            found = [*found, *self._before]
        if not found:
            return found
        key, priority = workload.workload_id, workload.spec.priority
        return [hold for hold in self._list_pending(found) if hold.workload_id != key and hold.priority >= priority]

    def decide(
        self,
        workload: Workload,
        spec: WorkloadSpec,
        now_ns: int,
        quotes: OpportunityPrices | None = None,
        *,
        closed: frozenset[str] = NO_NODES,
        is_round: bool = False,
        altered: Mapping[str, NodeRecord] = NO_RECORDS,
    ) -> PlacementDecision:
        """Decides where a pending workload starts now, as `BackfillPlanner.decide`, on no node that is held for others.

        GPU models of which its queue has enough quota go before those of which it would have to borrow.
        """
        own = self._queues.prefer_own_models(spec, lambda: self._placer.snapshot().models)
        for some in (spec,) if own is None else (own, spec):
            decision = self._decide(workload, some, now_ns, quotes, closed=closed, is_round=is_round, altered=altered)
            if decision.placements:
                break
        return decision

    def _decide(
        self,
        workload: Workload,
        spec: WorkloadSpec,
        now_ns: int,
        quotes: OpportunityPrices | None,
        *,
        closed: frozenset[str],
        is_round: bool,
        altered: Mapping[str, NodeRecord],
    ) -> PlacementDecision:
        def decide(closed: frozenset[str]) -> PlacementDecision:
            return self._backfill.decide(
                workload, spec, now_ns, quotes, closed=closed, is_round=is_round, altered=altered
            )

        decision = decide(closed)
        binding = self.list_binding(workload, is_round=is_round) if decision.placements else []
        first = next((hold for hold in binding if _touches(decision, hold.node_names)), None)
        if first is None:
            return decision
        closed = closed.union(*(hold.node_names for hold in binding))
        key = workload.workload_id
        elsewhere = self._placer.decide_placement(
            spec, quotes, workload_id=key, closed=closed, altered=altered, is_start=True
        )
        if elsewhere.placements:
            return decide(closed)
        reason = PendingConstraint.FAIR_SHARE.describe(queue=first.queue)
        return PlacementDecision(placements=(), explanation=decision.explanation, room=decision.room, withheld=reason)

    def hold_for(self, workload: Workload, spec: WorkloadSpec, past: PastUse, now_ns: int) -> None:
        """Holds capacity for a workload that a round has found to wait for capacity alone, if it is owed some."""
        if not self._in_round or len(self._considered) >= _CONSIDERED_MOST:
            return
        queue = self._queues.find_leaf(workload.spec)
        if queue is None or queue in self._considered or not self._limit_s or workload.promise is not None:
            return
        root = self._queues.tree.list_path(queue)[-1].name
        if self._barred_ns.get(queue, 0) > now_ns or any(hold.root == root for hold in self._holds):
            return
        self._considered.add(queue)
        if not self._is_owed(workload, queue, past, now_ns):
            return
        names = self._find_nodes(workload, spec, now_ns)
        if names:
            since = (hold.since_ns for hold in self._list_pending(self._before) if hold.queue == queue)
            hold = CapacityHold(
                workload_id=workload.workload_id,
                queue=queue,
                root=root,
                priority=spec.priority,
                since_ns=next(since, now_ns),
                node_names=names,
            )
            self._holds.append(hold)

    def _is_owed(self, workload: Workload, queue: str, past: PastUse, now_ns: int) -> bool:
        """Returns whether a sibling at some level has used more, and would have after this has run for the limit."""
        policy, tree = self._state.policy, self._queues.tree
        if now_ns - workload.submitted_ns >= policy.queue_age_limit_s * _NS:
            return True
        exchange = UseExchange(past, half_life_s=policy.queue_half_life_s, horizon_s=self._limit_s)
        amounts = count_charge(policy, workload.spec)
        tree.add(queue, amounts)
        try:
            for one in tree.list_path(queue):
                number = tree.numbers[one.name]
                siblings = tree.list_siblings(number)
                if any(other != number and exchange.is_due(number, other) for other in siblings):
                    return True
        finally:
            tree.add(queue, amounts, -1)
        return False

    def _find_nodes(self, workload: Workload, spec: WorkloadSpec, now_ns: int) -> frozenset[str]:
        """Returns the nodes that lack the least to have room for a workload if the jobs there ended; empty if none do."""
        key, nodes = workload.workload_id, self._state.nodes
        held = frozenset[str]().union(*(hold.node_names for hold in self._holds))
        closed = held | self._backfill.list_closed_nodes(workload, now_ns)
        room = self._placer.begin_room_count(spec, key)
        records: dict[str, NodeRecord] = {}
        searches = 0
        self._placer.searches += 1
        for name in self._order_nodes(spec, closed)[:_NODES_MOST]:
            ending = {one for one, _ in nodes[name].assignments if self._ends(one)}
            records[name] = nodes[name].copy_without(ending)
            room.update_node(name, records[name])
            if room.count(closed) < spec.replicas or not room.has_room(name):
                continue
            if searches >= _SEARCHES_MOST:
                break
            searches += 1
            self._placer.searches += 1
            decision = self._placer.decide_on_altered(AlteredNodes(records), spec, key, closed)
            if decision.placements:
                return frozenset(place.node_name for place in decision.placements)
        return NO_NODES

    def _ends(self, workload_id: str) -> bool:
        """Returns whether running work is expected to end some time; what is not a workload here, no."""
        workload = self._state.workloads.get(workload_id)
        return workload is not None and workload.spec.kind is not WorkloadKind.INFERENCE_SERVICE

    def _order_nodes(self, spec: WorkloadSpec, closed: frozenset[str]) -> list[str]:
        """Returns the open nodes by how many of its GPUs, then of its CPUs one replica lacks there, then by name."""
        snapshot, request = self._placer.snapshot(), spec.request
        free = snapshot.nodes.gpu_free >= max(1, request.gpu_milli)
        gpus = np.maximum(0, request.gpu_count - free.sum(axis=1))
        cpus = np.maximum(0, request.cpu_milli - snapshot.nodes.cpu_free)
        found = [
            (int(gpus[row]), int(cpus[row]), name)
            for row, name in enumerate(snapshot.names)
            if snapshot.nodes.available[row] and name not in closed
        ]
        return [name for _, _, name in sorted(found)]


def _restore_hold(held: HeldQueue, state: ClusterState) -> CapacityHold:
    workload = state.workloads.get(held.workload_id)
    return CapacityHold(
        workload_id=held.workload_id,
        queue=held.queue,
        root="",
        priority=0 if workload is None else workload.spec.priority,
        since_ns=held.since_ns,
        node_names=NO_NODES,
    )


def _touches(decision: PlacementDecision, names: frozenset[str]) -> bool:
    return any(place.node_name in names for place in decision.placements)
