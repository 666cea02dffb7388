"""The planner: chooses nodes and GPUs for the replicas of one workload on one snapshot.

Owns the sequence of one decision: room for all replicas or none, then the cheapest place for each in turn on a
copy; and, on the chosen node, which GPUs to take where their links differ. Must not know events or sentences:
it returns a `PlacementDecision`. The arithmetic is in eelgrid_kernels.

Theory: replicas are equal, so how many fit does not depend on the order or on the cost; the count is exact,
and a workload that is begun can be finished. Nodes in the same state are one candidate, and what a kind of
task costs in each is cached; only rows that changed since are evaluated again. A planner without that cache
decides the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.placement.gang import WORK_MOST, Gang, GangProblem, has_locality_preference
from eelgrid_controller.placement.power_admission import ExceededBudget
from eelgrid_controller.placement.snapshot import Snapshot, limit_to_plan_size
from eelgrid_controller.state.demand import OpportunityPrices
from eelgrid_controller.state.events import EXPLAINED_REPLICAS_MOST
from eelgrid_controller.state.node_allocations import ASSIGNMENTS_MOST
from eelgrid_controller.state.spending import OverspentLimit
from eelgrid_kernels.arrays import Nodes, Task
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.candidates import CandidateIndex, NodeCandidate
from eelgrid_kernels.cost_terms import TERMS
from eelgrid_kernels.gpu_links import exchange_gpus
from eelgrid_kernels.node_cost import CANDIDATES_MOST, CONSTRAINTS, FITS, GPU_WHOLE_MILLI, count_verdicts, replica_room
from eelgrid_protos.messages import (
    Candidate,
    CostTerm,
    Placement,
    Removal,
    ReplicaExplanation,
    ResourceRequest,
    Weights,
    WorkloadSpec,
)


def select_best_linked_gpus(snapshot: Snapshot, task: Task, row: int, slots: Sequence[int]) -> Sequence[int]:
    """These GPUs of a node, or as many alike ones that are better linked; no cost changes."""
    links = snapshot.devices[row].links
    if links is None or not slots or task.gpu_milli != GPU_WHOLE_MILLI:
        return slots
    found = np.array(slots, np.int64)
    exchange_gpus(snapshot.nodes, row, links, found)
    linked: list[int] = found.tolist()
    return linked


Ints = NDArray[np.int64]
DEFAULT_PLACEMENT_POLICY = "eelgrid"
# Past this share of stale rows it is as cheap to build anew.
_STALE_SHARE = 2
_MOMENTS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The outcome for one workload: a place for every replica, or none and what stood in the way."""

    placements: tuple[Placement, ...]
    explanation: tuple[ReplicaExplanation, ...]
    # How many replicas there is room for, counted no further than asked.
    room: int
    # Nodes by first failing constraint, for the replica that found no place; empty when placed.
    removals: tuple[Removal, ...] = ()
    # The budget whose watts are waited for, where nothing else is in the way.
    lack: ExceededBudget | None = None
    # The spent limit that is waited for, whatever room there is.
    hold: OverspentLimit | None = None
    # Budgets below which no node was looked at, since too few watts were left there.
    closed: frozenset[str] = frozenset()


class _Call(NamedTuple):
    """What stays the same for all replicas of a decision."""

    task: Task
    allows: Ints
    prices: tuple[float, ...]
    policy: str
    terms: tuple[str, ...] = TERMS


@dataclass(slots=True)
class _Memory:
    """The engine, and how far it has read which list of changes."""

    candidates: CandidateIndex
    changes: Sequence[int]
    era: int
    setting: tuple[str, tuple[float, ...]]
    read: int
    quotes: OpportunityPrices


def make_prices(weights: Weights) -> tuple[float, ...]:
    """The weights in the order of TERMS, and last that of stranding in a full fleet."""
    full_w = max(weights.stranding_w, weights.stranding_full_w)
    return (weights.power, weights.fragmentation_w, weights.stranding_w, weights.lookahead, weights.scarcity_w, full_w)


def make_task(request: ResourceRequest) -> Task:
    """One replica as the kernels see it."""
    return Task(request.cpu_milli, request.memory_bytes, request.gpu_count, request.gpu_milli)


def _removals(counts: Sequence[int]) -> tuple[Removal, ...]:
    named = zip(CONSTRAINTS, counts[FITS + 1 :], strict=True)
    return tuple(Removal(constraint=name, nodes=count) for name, count in named if count)


def _put(candidates: CandidateIndex, snapshot: Snapshot) -> None:
    quotes = snapshot.quotes
    scarce = sum(1 << snapshot.models[name] for name in quotes.scarce_models if name in snapshot.models)
    candidates.apply_prices(quotes.offers_w, scarce, quotes.load_permille)


def derive_random_seed(snapshot: Snapshot) -> int:
    """What RANDOM draws by: a number that follows from what is free, so that a replay draws the same."""
    nodes = snapshot.nodes
    return int(nodes.cpu_free.sum() + 7 * nodes.memory_free.sum() + 11 * nodes.gpu_free.sum()) % _MOMENTS


class Planner:
    """Decides; its memory is a cache and changes no decision."""

    def __init__(self, *, gang_work_most: int = WORK_MOST) -> None:
        self._gang_work_most = gang_work_most
        # Decisions for which an engine was made anew: each takes as long as many others.
        self.rebuilt = 0
        self._memory: _Memory | None = None

    def decide_placement(
        self, snapshot: Snapshot, spec: WorkloadSpec, weights: Weights, placement: str = DEFAULT_PLACEMENT_POLICY
    ) -> PlacementDecision:
        """All replicas or none, by the placement policy of that name, and on no node more than its plan carries."""
        task = make_task(spec.request)
        allows = snapshot.allowed_models(spec.request.gpu_models)
        if spec.replicas == 1 or not snapshot.is_plan_limited(task, allows, spec.replicas):
            return self._place_replicas(snapshot, task, spec, weights, placement)
        # Rare; by an engine of its own, since what this one remembers is of other nodes.
        self.rebuilt += 1
        limited, task = snapshot.limit_to_plan_size(task)
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
                rows = trial.place_task(found[0].node, found[0].slots, task)
                self._update(candidates, trial.snapshot, rows.tolist())
                found, counts = self._find_candidates(candidates, trial.snapshot, call, gang)
                assert found, "replica_room is exact"
                placements.append(self._placement(trial.snapshot, found[0], replica))
                if replica < EXPLAINED_REPLICAS_MOST:
                    explanation.append(self._explain_replica(trial.snapshot, call, replica, found, counts))
            # The last replica was not taken; the others are given back.
            self._update(candidates, snapshot, sorted(set(trial.snapshot.changes)))
        return PlacementDecision(placements=tuple(placements), explanation=tuple(explanation), room=room)

    def rank_places(
        self, snapshot: Snapshot, request: ResourceRequest, placement: str, most: int
    ) -> list[NodeCandidate]:
        """The best places for one replica by a published policy but RANDOM, on different nodes, best first; unexplained."""
        candidates = self._candidates(snapshot, placement, ())
        return candidates.best_candidates(
            candidates.register_kind(make_task(request), snapshot.allowed_models(request.gpu_models)), 0, most
        )

    def quote_prices(
        self, snapshot: Snapshot, weights: Weights, placement: str, shifts: int
    ) -> OpportunityPrices | None:
        """New quotes where the policy heeds any and so many tasks came or left since the last, or -1; else None."""
        if placement != DEFAULT_PLACEMENT_POLICY or not snapshot.names:
            return None
        candidates = self._candidates(snapshot, placement, make_prices(weights))
        if not candidates.is_due(shifts):
            return None
        offers, scarce, load = candidates.compute_prices()
        # A model that was there once has a code still; a controller that starts now would not know it.
        there = set(np.unique(snapshot.nodes.gpu_model).tolist())
        models = sorted(name for name, code in snapshot.models.items() if scarce >> code & 1 and code in there)
        return OpportunityPrices(offers_w=tuple(offers), scarce_models=tuple(models), load_permille=load)

    def count_room_when_empty(
        self, nodes: Nodes, snapshot: Snapshot, spec: WorkloadSpec
    ) -> tuple[int, tuple[Removal, ...]]:
        """How many replicas `nodes`, an emptied cluster, could hold, and what removes the others."""
        task, allows = make_task(spec.request), snapshot.allowed_models(spec.request.gpu_models)
        if spec.replicas > ASSIGNMENTS_MOST:
            nodes, task = limit_to_plan_size(nodes, task, ASSIGNMENTS_MOST)
        counts = np.zeros(1 + len(CONSTRAINTS), np.int64)
        count_verdicts(nodes, task, allows, counts)
        return int(replica_room(nodes, task, allows, spec.replicas)), _removals(counts.tolist())

    @staticmethod
    def _update(candidates: CandidateIndex, snapshot: Snapshot, rows: Sequence[int]) -> bool:
        return candidates.update_nodes(snapshot.nodes, rows, snapshot.sorts)

    def _candidates(self, snapshot: Snapshot, placement: str, prices: tuple[float, ...]) -> CandidateIndex:
        """The engine, brought up to date with the snapshot."""
        setting = (placement, prices if placement == DEFAULT_PLACEMENT_POLICY else ())
        memory = self._memory
        if memory and memory.changes is snapshot.changes and (memory.era, memory.setting) == (snapshot.era, setting):
            stale = snapshot.changes[memory.read :]
            memory.read += len(stale)
            rows = sorted(set(stale))
            few = len(rows) * _STALE_SHARE <= len(snapshot.names)
            if not rows or (few and self._update(memory.candidates, snapshot, rows)):
                if memory.quotes != snapshot.quotes:
                    memory.quotes = snapshot.quotes
                    _put(memory.candidates, snapshot)
                return memory.candidates
        chosen = find_policy(placement)
        weights = np.array(prices) if placement == DEFAULT_PLACEMENT_POLICY else chosen.weights
        candidates = CandidateIndex(snapshot.nodes, snapshot.mix, snapshot.sorts, chosen.code, weights)
        _put(candidates, snapshot)
        changes = snapshot.changes
        self._memory = _Memory(candidates, changes, snapshot.era, setting, len(changes), snapshot.quotes)
        return candidates

    @staticmethod
    def _find_candidates(
        candidates: CandidateIndex, snapshot: Snapshot, call: _Call, gang: Gang | None = None
    ) -> tuple[list[NodeCandidate], list[int]]:
        """The best candidates, the gang's if there is one, and all nodes by verdict."""
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
