"""The planner: chooses nodes and GPUs for the replicas of one workload on one snapshot.

Owns the sequence of one decision: capacity for all replicas or none, then the cheapest place for each in turn on a
copy; on the chosen node, which GPUs to use if their links differ; and the division of a gang among nodes, with the
`topology` term of the cost. Must not know events or sentences: it returns a `PlacementDecision`. The arithmetic is in
eelgrid_kernels.

Theory: replicas are equal, so how many fit does not depend on the order or on the cost; the count is exact, and a
workload that is begun can be finished. Nodes in the same state are one candidate, and what a kind of task costs in
each is cached; only rows that changed since are evaluated again. A planner without that cache decides the same.

Gangs. Zones, switches, racks and nodes form a tree. Packing costs locality_w for each place used beyond the first,
at every level. Spreading costs locality_w for each pair of replicas that share a place, at every level. Both are sums
over the tree of a function, in watts, of the number of replicas in a place, since what replicas cost on one node does
not depend on other nodes. The cheapest division is therefore found exactly (eelgrid_kernels.gang), and it exists
whenever all replicas fit. Beyond WORK_MOST, packing considers only the most promising racks, and spreading, or
packing what these racks cannot hold, places replicas one by one on the node that is cheapest with the term;
docs/explanation/topology.md measures both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.placement.power import ExceededBudget
from eelgrid_controller.placement.snapshot import Snapshot, count_room, limit_to_plan_size
from eelgrid_controller.queueing.admission import QueueHold
from eelgrid_controller.state.demand import OpportunityPrices, PriceMarket, TaskClass
from eelgrid_controller.state.events import EXPLAINED_REPLICAS_MOST
from eelgrid_controller.state.node_allocations import ASSIGNMENTS_MOST
from eelgrid_controller.state.spending import OverspentLimit
from eelgrid_kernels.arrays import Mix, Nodes, Task
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.candidates import CandidateIndex, NodeCandidate, QuotedPrices
from eelgrid_kernels.cost_terms import TERMS, UNUSED_SHARE
from eelgrid_kernels.gang import divide_replicas, exchange_gpus
from eelgrid_kernels.node_cost import CANDIDATES_MOST, CONSTRAINTS, FITS, GPU_WHOLE_MILLI, count_verdicts, replica_room
from eelgrid_protos.messages import (
    Candidate,
    CostTerm,
    Locality,
    Placement,
    Removal,
    ReplicaExplanation,
    ResourceRequest,
    Weights,
    WorkloadSpec,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
DEFAULT_PLACEMENT_POLICY = "eelgrid"
# Above this share of stale rows, building the index again is as cheap; never for a few of them.
_STALE_SHARE, _STALE_FEW = 2, 4
_MOMENTS = 2**31
# To which tasks that would fit are counted.
_TASKS_MOST = 1_000_000
# Steps of the division, 0.3 ns each: a gang of 64 on 1,213 empty nodes of 8 GPUs takes 4 million.
WORK_MOST = 50_000_000
# Also counted: a cell of the table of divisions, of 8 bytes; and one replica evaluated in a state, 1 to 2 us.
_STEPS_OF_A_CELL = 5
_STEPS_OF_A_REPLICA = 5_000


def has_locality_preference(spec: WorkloadSpec, weights: Weights) -> bool:
    """Returns whether the relative places of the replicas matter."""
    return spec.replicas > 1 and spec.locality is not Locality.UNSPECIFIED and weights.locality_w > 0.0


def _boundaries(locality: Locality, replicas: int) -> Floats:
    """Returns what 0 to R replicas in one place count for (R + 1,): the place itself, or the pairs that share it."""
    held = np.arange(replicas + 1, dtype=np.float64)
    return np.minimum(held, 1.0) if locality is Locality.PACK else held * (held - 1.0) / 2.0


class GangProblem(NamedTuple):
    """The workload, the nodes to divide it among, and the price of a further boundary."""

    snapshot: Snapshot
    spec: WorkloadSpec
    task: Task
    allows: Ints
    locality_w: float
    work_most: int


def _firsts(values: Ints) -> NDArray[np.bool_]:
    """Returns whether each value is the first of its kind."""
    firsts = np.zeros(len(values), np.bool_)
    firsts[np.unique(values, return_index=True)[1]] = True
    return firsts


def _divisible(case: GangProblem, candidates: CandidateIndex, costs: Floats, groups: Ints) -> Ints:
    """Returns the rows to divide a gang among within the bound of work; none if the bound is too low.

    Returns all rows that fit, or, to pack, those of whole racks: first the racks that can hold most of the gang, of
    equals the cheapest.
    """
    rows = np.flatnonzero(np.isfinite(costs))
    replicas, levels, states = case.spec.replicas, groups.shape[1] + 1, candidates.state_numbers(rows)
    weighed, room = count_room(case.snapshot.nodes, rows, case.task, case.allows, replicas)
    dividing = levels * (room * replicas + _STEPS_OF_A_CELL * (replicas + 1))
    weighing = _STEPS_OF_A_REPLICA * weighed
    if dividing.sum() + weighing[_firsts(states)].sum() <= case.work_most:
        return rows
    if case.spec.locality is Locality.SPREAD:
        return rows[:0]
    rank, first_w = case.snapshot.nodes.rank[rows], costs[rows]
    rack = groups[rows, -1] if levels > 1 else rank
    order = np.lexsort([rank, first_w, rack])
    begins = np.flatnonzero(np.diff(rack[order], prepend=-1))
    sizes = np.diff(begins, append=len(order))
    # How the gang would fill each rack alone, its cheapest nodes first, at the price of their first replica.
    before = np.cumsum(room[order]) - room[order]
    before -= np.repeat(before[begins], sizes)
    filled = np.minimum(room[order], np.maximum(0, replicas - before))
    held = np.add.reduceat(filled, begins)
    cost_w = np.add.reduceat(filled * first_w[order], begins)
    names = rack[order][begins]
    racks = np.lexsort([names, cost_w, -held])
    # Nodes in the same state are evaluated once, which counts for the first rack that has one.
    in_turn = np.concatenate([order[begins[one] : begins[one] + sizes[one]] for one in racks])
    work = (dividing + weighing)[in_turn] - np.where(_firsts(states[in_turn]), 0, weighing[in_turn])
    ends = np.cumsum(sizes[racks]) - 1
    kept = np.isin(rack, names[racks[np.cumsum(work)[ends] <= case.work_most]])
    return rows[kept] if int(room[kept].sum()) >= replicas else rows[:0]


class Gang:
    """One workload during placement: replicas that each node is still to receive, and the cost of the next one."""

    def __init__(self, case: GangProblem, candidates: CandidateIndex, kind: int) -> None:
        """Prepares the division; expects `candidates` up to date, and that all replicas are known to fit."""
        snapshot = case.snapshot
        self._case, self._candidates, self._kind = case, candidates, kind
        self._rank = snapshot.nodes.rank
        self._counted = _boundaries(case.spec.locality, case.spec.replicas)
        self._groups = snapshot.places.codes()
        # Each level of the network, with the nodes themselves as the innermost.
        self._levels = [*self._groups.T, np.arange(len(snapshot.names))]
        self._tallies = [np.zeros(int(level.max()) + 1, np.int64) for level in self._levels]
        self._left = self._division()
        # The first replica opens a place at every level, wherever it goes, and shares none.
        self._opened = False

    def _division(self) -> Ints | None:
        """Returns replicas by row; None if dividing even among part of the nodes would take too long."""
        costs = self._candidates.node_costs(self._kind)
        rows = _divisible(self._case, self._candidates, costs, self._groups)
        if not len(rows):
            return None
        # By place and then by name, so that the nodes of a place are adjacent and ties are resolved alike.
        rows = rows[np.lexsort([self._rank[rows], *self._groups[rows].T[::-1]])]
        counts = np.zeros(len(rows), np.int64)
        table = self._candidates.replica_costs(self._kind, rows, self._case.spec.replicas)
        divide_replicas(table, self._groups[rows], self._case.locality_w * self._counted, counts)
        left = np.zeros(len(self._rank), np.int64)
        left[rows] = counts
        return left

    def _added_boundaries(self) -> Floats:
        """Returns the boundaries that the next replica adds on each node (N,)."""
        added = np.zeros(len(self._rank))
        if self._opened:
            steps = np.diff(self._counted)
            for level, tally in zip(self._levels, self._tallies, strict=True):
                added += steps[tally[level]]
        return added

    def _cheapest(self, costs: Floats, most: int) -> list[int]:
        """Returns the `most` rows of least finite cost; of equals, the lowest rank first."""
        rows = np.flatnonzero(np.isfinite(costs))
        if len(rows) > most:
            rows = rows[costs[rows] <= np.partition(costs[rows], most - 1)[most - 1]]
        found: list[int] = rows[np.lexsort([self._rank[rows], costs[rows]])][:most].tolist()
        return found

    def place_next(self, most: int) -> list[NodeCandidate]:
        """Places the next replica; returns its candidate, then the cheapest others, each with the term as its last."""
        added = self._added_boundaries()
        costs = self._candidates.node_costs(self._kind) + self._case.locality_w * added
        chosen = self._cheapest(costs if self._left is None else np.where(self._left > 0, costs, np.inf), 1)[0]
        others = [row for row in self._cheapest(costs, most) if row != chosen]
        rows = np.array([chosen, *others][:most], np.int64)
        self._place_replica(chosen)
        found = zip(self._candidates.candidates_on(self._kind, rows), added[rows].tolist(), strict=True)
        return [one._replace(terms=(*one.terms, boundaries)) for one, boundaries in found]

    def _place_replica(self, row: int) -> None:
        """Records that the next replica is placed on a row."""
        self._opened = True
        if self._left is not None:
            self._left[row] -= 1
        for level, tally in zip(self._levels, self._tallies, strict=True):
            tally[level[row]] += 1


def select_best_linked_gpus(snapshot: Snapshot, task: Task, row: int, slots: Sequence[int]) -> Sequence[int]:
    """Returns these GPUs of a node, or as many equivalent ones with better links; the cost does not change."""
    links = snapshot.devices[row].links
    if links is None or not slots or task.gpu_milli != GPU_WHOLE_MILLI:
        return slots
    found = np.array(slots, np.int64)
    exchange_gpus(snapshot.nodes, row, links, found)
    linked: list[int] = found.tolist()
    return linked


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The outcome for one workload: a place for every replica, or none and the reason."""

    placements: tuple[Placement, ...]
    explanation: tuple[ReplicaExplanation, ...]
    # How many replicas fit, counted up to the requested number.
    room: int
    # Nodes by first failing constraint, for the replica that did not fit; empty if placed.
    removals: tuple[Removal, ...] = ()
    # The exceeded power budget, if nothing else prevents the placement.
    lack: ExceededBudget | None = None
    # The exceeded spending limit for which the workload waits, whatever the capacity.
    hold: OverspentLimit | None = None
    # Why the workload's queue lets nothing of it start, whatever the capacity.
    queue_hold: QueueHold | None = None
    # Why it waits though there is room: a reservation, or work that goes before it.
    withheld: str = ""
    # Budgets below which no node was considered, since too few watts were left there.
    closed: frozenset[str] = frozenset()
    # Nodes that were not considered, since nothing starts there at a lower limit.
    closed_nodes: frozenset[str] = frozenset()
    # The limit that its GPUs have to have before it starts, where a budget never holds their default limits.
    power_limit_w: float | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether it waits for capacity, not for a quota, spending or watts."""
        is_held = self.hold is not None or self.queue_hold is not None or self.lack is not None
        return not self.placements and not is_held


class _Call(NamedTuple):
    """Arguments that are the same for all replicas of a decision."""

    task: Task
    allows: Ints
    prices: tuple[float, ...]
    policy: str
    terms: tuple[str, ...] = TERMS


def _index_setting(placement: str, prices: tuple[float, ...]) -> tuple[str, tuple[float, ...]]:
    """What an index is built for: prices count under the default policy alone."""
    return placement, prices if placement == DEFAULT_PLACEMENT_POLICY else ()


@dataclass(slots=True)
class _Memory:
    """The candidate index, and how far it has processed which list of changes."""

    candidates: CandidateIndex
    changes: Sequence[int]
    era: int
    setting: tuple[str, tuple[float, ...]]
    read: int
    mix: Mix
    quotes: OpportunityPrices


def make_prices(weights: Weights) -> tuple[float, ...]:
    """Returns the weights in the order of TERMS, and last that of stranding in a full fleet."""
    full_w, unused = max(weights.stranding_w, weights.stranding_full_w), UNUSED_SHARE * weights.lookahead
    terms = (weights.power, weights.fragmentation_w, weights.stranding_w, weights.lookahead, weights.scarcity_w, unused)
    return (*terms, full_w)


def make_task(request: ResourceRequest) -> Task:
    """Returns one replica as the kernels represent it."""
    return Task(request.cpu_milli, request.memory_bytes, request.gpu_count, request.gpu_milli)


def count_fitting_tasks(nodes: Nodes, models: Mapping[str, int], task: TaskClass, most: int = _TASKS_MOST) -> int:
    """Returns how many tasks of one class fit at once, counted up to `most`, if nothing else arrives."""
    allowed = [not task.gpu_models or model in task.gpu_models for model in models] or [True]
    wanted = Task(task.cpu_milli, 0, task.gpu_count, task.gpu_milli)
    return int(replica_room(nodes, wanted, np.array(allowed, np.int64), most))


def _removals(counts: Sequence[int]) -> tuple[Removal, ...]:
    named = zip(CONSTRAINTS, counts[FITS + 1 :], strict=True)
    return tuple(Removal(constraint=name, nodes=count) for name, count in named if count)


def _put(candidates: CandidateIndex, snapshot: Snapshot) -> None:
    quotes = snapshot.quotes
    scarce = sum(1 << snapshot.models[name] for name in quotes.scarce_models if name in snapshot.models)
    turnover, stockouts = quotes.turnover_permille, quotes.stockout_permille
    candidates.apply_prices(QuotedPrices(quotes.offers_w, scarce, quotes.load_permille, turnover, stockouts))


def derive_random_seed(snapshot: Snapshot) -> int:
    """Returns the seed of the RANDOM policy: it is derived from the free capacity, so that a replay draws the same."""
    nodes = snapshot.nodes
    return int(nodes.cpu_free.sum() + 7 * nodes.memory_free.sum() + 11 * nodes.gpu_free.sum()) % _MOMENTS


class Planner:
    """Decides placements; its index is a cache and changes no decision."""

    def __init__(self, *, gang_work_most: int = WORK_MOST) -> None:
        self._gang_work_most = gang_work_most
        # Decisions for which the index was rebuilt: each takes as long as many others.
        self.rebuilt = 0
        self._memory: _Memory | None = None

    def decide_placement(
        self, snapshot: Snapshot, spec: WorkloadSpec, weights: Weights, placement: str = DEFAULT_PLACEMENT_POLICY
    ) -> PlacementDecision:
        """Places all replicas or none by the named policy, and no more on a node than its plan can express."""
        task = make_task(spec.request)
        allows = snapshot.allowed_models(spec.request.gpu_models)
        if spec.replicas == 1 or not snapshot.is_plan_limited(task, allows, spec.replicas):
            return self._place_replicas(snapshot, task, spec, weights, placement)
        # Rare; uses a planner of its own, since the index of this one covers other nodes.
        self.rebuilt += 1
        assert snapshot.assignments_left is not None
        nodes, task = limit_to_plan_size(snapshot.nodes, task, snapshot.assignments_left)
        limited = replace(snapshot, nodes=nodes, changes=[])
        return Planner(gang_work_most=self._gang_work_most)._place_replicas(limited, task, spec, weights, placement)  # noqa: SLF001

    def _place_replicas(
        self, snapshot: Snapshot, task: Task, spec: WorkloadSpec, weights: Weights, placement: str
    ) -> PlacementDecision:
        prices = make_prices(weights)
        candidates = self._candidates(snapshot, placement, prices)
        in_force = candidates.weights if placement == DEFAULT_PLACEMENT_POLICY else prices[: len(TERMS)]
        call = _Call(task, snapshot.allowed_models(spec.request.gpu_models), in_force, placement)
        found, counts = self._find_candidates(candidates, snapshot, call)
        room = min(1, counts[FITS])
        if spec.replicas > 1 and found:
            room = int(replica_room(snapshot.nodes, task, call.allows, spec.replicas))
        if room < spec.replicas:
            explained = self._explain_replica(snapshot, call, 0, found, counts)
            return PlacementDecision(placements=(), explanation=(explained,), room=room, removals=explained.removals)
        gang = None
        if placement == DEFAULT_PLACEMENT_POLICY and has_locality_preference(spec, weights):
            call = call._replace(prices=(*call.prices, weights.locality_w), terms=(*TERMS, "topology"))
            case = GangProblem(snapshot, spec, task, call.allows, weights.locality_w, self._gang_work_most)
            gang = Gang(case, candidates, candidates.register_kind(task, call.allows))
            found, counts = self._find_candidates(candidates, snapshot, call, gang)
        placements = [self._placement(snapshot, found[0], 0)]
        explanation = [self._explain_replica(snapshot, call, 0, found, counts)]
        if spec.replicas > 1:
            trial = snapshot.copy()
            for replica in range(1, spec.replicas):
                trial.place_task(found[0].node, found[0].slots, task)
                self._update(candidates, trial.snapshot, [found[0].node])
                found, counts = self._find_candidates(candidates, trial.snapshot, call, gang)
                assert found, "replica_room is exact"
                placements.append(self._placement(trial.snapshot, found[0], replica))
                if replica < EXPLAINED_REPLICAS_MOST:
                    explanation.append(self._explain_replica(trial.snapshot, call, replica, found, counts))
            # The index has every replica but the last; their rows are restored from the snapshot.
            self._update(candidates, snapshot, sorted(set(trial.snapshot.changes)))
        return PlacementDecision(placements=tuple(placements), explanation=tuple(explanation), room=room)

    def rank_places(
        self, snapshot: Snapshot, request: ResourceRequest, placement: str, most: int
    ) -> list[NodeCandidate]:
        """Returns the best nodes for one replica by a published policy except RANDOM, best first, without cost terms."""
        candidates = self._candidates(snapshot, placement, ())
        return candidates.best_candidates(
            candidates.register_kind(make_task(request), snapshot.allowed_models(request.gpu_models)), 0, most
        )

    def quote_prices(
        self,
        snapshot: Snapshot,
        weights: Weights,
        placement: str,
        market: PriceMarket,
        request: ResourceRequest | None = None,
    ) -> OpportunityPrices | None:
        """Returns new quotes if the policy uses any and they are due after what started and ended; else None.

        For a request that no node has room for they wait, since they
        choose among nodes that have.
        """
        if placement != DEFAULT_PLACEMENT_POLICY or not snapshot.names:
            return None
        candidates = self._candidates(snapshot, placement, make_prices(weights))
        if not candidates.is_due(market.shifts):
            return None
        if request is not None:
            allows = snapshot.allowed_models(request.gpu_models)
            if not candidates.count_verdicts(snapshot.nodes, make_task(request), allows)[FITS]:
                return None
        prices = candidates.compute_prices(market.turnover_permille)
        # The code of a removed model remains; a controller that starts now would not know it.
        there = set(np.unique(snapshot.nodes.gpu_model).tolist())
        models = sorted(name for name, code in snapshot.models.items() if prices.scarce >> code & 1 and code in there)
        return OpportunityPrices(
            offers_w=tuple(prices.offers_w),
            scarce_models=tuple(models),
            load_permille=prices.load,
            turnover_permille=prices.turnover,
            stockout_permille=tuple(prices.stockouts) if prices.turnover else (),  # else they count for nothing
        )

    def work_ahead(self, snapshot: Snapshot, weights: Weights, placement: str) -> bool:
        """Idle work, bounded: one kind of task catches up with what changed; false if none has anything left.

        It changes no decision, only how long the next one takes. An index that must be rebuilt waits for a decision: more
        nodes may join before.
        """
        prices = make_prices(weights)
        if self._find_memory(snapshot, _index_setting(placement, prices)) is None:
            return False
        return self._candidates(snapshot, placement, prices).work_ahead()

    def count_room_when_empty(
        self, nodes: Nodes, snapshot: Snapshot, spec: WorkloadSpec
    ) -> tuple[int, tuple[Removal, ...]]:
        """Returns how many replicas `nodes`, an emptied cluster, could hold, and what removes the others."""
        task, allows = make_task(spec.request), snapshot.allowed_models(spec.request.gpu_models)
        if spec.replicas > ASSIGNMENTS_MOST:
            nodes, task = limit_to_plan_size(nodes, task, ASSIGNMENTS_MOST)
        counts = np.zeros(1 + len(CONSTRAINTS), np.int64)
        count_verdicts(nodes, task, allows, counts)
        return int(replica_room(nodes, task, allows, spec.replicas)), _removals(counts.tolist())

    @staticmethod
    def _update(candidates: CandidateIndex, snapshot: Snapshot, rows: Sequence[int]) -> bool:
        return candidates.update_nodes(snapshot.nodes, rows, snapshot.sorts)

    def _find_memory(self, snapshot: Snapshot, setting: tuple[str, tuple[float, ...]]) -> "_Memory | None":
        """Returns what is known of this fleet under this setting; None where an index has to be built."""
        memory = self._memory
        if memory and memory.changes is snapshot.changes and (memory.era, memory.setting) == (snapshot.era, setting):
            return memory
        return None

    def _candidates(self, snapshot: Snapshot, placement: str, prices: tuple[float, ...]) -> CandidateIndex:
        """Returns the candidate index, brought up to date with the snapshot."""
        setting = _index_setting(placement, prices)
        memory = self._find_memory(snapshot, setting)
        if memory is not None:
            stale = snapshot.changes[memory.read :]
            memory.read += len(stale)
            rows = sorted(set(stale))
            is_repriced = memory.quotes != snapshot.quotes
            if memory.mix is not snapshot.mix:
                memory.mix, is_repriced = snapshot.mix, True
                memory.candidates.adopt_mix(snapshot.nodes, snapshot.mix, snapshot.sorts)
            few = len(rows) <= max(_STALE_FEW, len(snapshot.names) // _STALE_SHARE)
            if not rows or (few and self._update(memory.candidates, snapshot, rows)):
                if is_repriced:
                    memory.quotes = snapshot.quotes
                    _put(memory.candidates, snapshot)
                return memory.candidates
        chosen = find_policy(placement)
        if placement == DEFAULT_PLACEMENT_POLICY:
            chosen = chosen._replace(weights=np.array(prices))
        candidates = CandidateIndex(snapshot.nodes, snapshot.mix, snapshot.sorts, chosen)
        _put(candidates, snapshot)
        changes = snapshot.changes
        read, mix = len(changes), snapshot.mix
        self._memory = _Memory(candidates, changes, snapshot.era, setting, read, mix, snapshot.quotes)
        return candidates

    @staticmethod
    def _find_candidates(
        candidates: CandidateIndex, snapshot: Snapshot, call: _Call, gang: Gang | None = None
    ) -> tuple[list[NodeCandidate], list[int]]:
        """Returns the best candidates, the gang's if there is one, and all nodes by verdict."""
        if gang:
            found = gang.place_next(CANDIDATES_MOST)
        else:
            kind = candidates.register_kind(call.task, call.allows)
            found = candidates.best_candidates(
                kind, derive_random_seed(snapshot) if call.policy == "random" else 0, CANDIDATES_MOST
            )
        if call.policy == DEFAULT_PLACEMENT_POLICY:
            linked = [tuple(select_best_linked_gpus(snapshot, call.task, one.node, one.slots)) for one in found]
            found = [one._replace(slots=slots) for one, slots in zip(found, linked, strict=True)]
        return found, candidates.count_verdicts(snapshot.nodes, call.task, call.allows)

    @staticmethod
    def _placement(snapshot: Snapshot, found: NodeCandidate, replica: int) -> Placement:
        devices = snapshot.devices[found.node]
        return Placement(
            replica=replica,
            node_name=snapshot.names[found.node],
            gpu_uuids=tuple(devices.uuids[slot] for slot in found.slots),
            gpu_indexes=tuple(devices.indexes[slot] for slot in found.slots),
        )

    @staticmethod
    def _explain_replica(
        snapshot: Snapshot, call: _Call, replica: int, found: Sequence[NodeCandidate], counts: Sequence[int]
    ) -> ReplicaExplanation:
        candidates = []
        for choice in found:
            terms_w = [price * term for price, term in zip(call.prices, choice.terms, strict=True)]
            indexes = snapshot.devices[choice.node].indexes
            candidates.append(
                Candidate(
                    node_name=snapshot.names[choice.node],
                    gpu_indexes=tuple(indexes[slot] for slot in choice.slots),
                    cost_w=sum(terms_w),
                    terms=tuple(
                        CostTerm(name=name, cost_w=term) for name, term in zip(call.terms, terms_w, strict=True)
                    ),
                )
            )
        return ReplicaExplanation(
            replica=replica,
            candidates=tuple(candidates),
            feasible_nodes=counts[FITS],
            removals=_removals(counts),
        )
