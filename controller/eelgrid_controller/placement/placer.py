"""The placer: decides where a workload goes on the current state, within node traits and power budgets.

Owns the snapshot that decisions use, the planners by required traits, and the search within budgets. Must not know
events, or what follows from a decision.

Theory. What an engine demands of nodes comes as traits; workloads that require the same traits share a planner that
considers only the nodes with these traits, and its cache. A search does not consider watts; its result is checked. If
a budget would be exceeded, all nodes below it are closed, with those below budgets that could not even hold the
smallest draw, and the search runs again, a few times. So work may wait for watts although a gang spread across two
racks in another way would fit.

Limits on interference (placement.interference) take room from GPUs before a search. Among those within limits it is made a few
times, each where loads slow each other down less than in the place found before, and the least sum of cost and slowdown wins.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.placement.interference import Alteration, LimitedGpu, SharedGpus, enlarge_request
from eelgrid_controller.placement.planner import DEFAULT_PLACEMENT_POLICY, PlacementDecision, Planner, make_task
from eelgrid_controller.placement.power import ExceededBudget, GpuPowerPrior, PowerAdmission, PriorPowerModel
from eelgrid_controller.placement.snapshot import Ints, RoomCount, Snapshot, SnapshotMirror
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.demand import OpportunityPrices
from eelgrid_controller.state.engine_reports import Eligibility, EligibilityRules
from eelgrid_controller.state.events import EXPLAINED_REPLICAS_MOST
from eelgrid_controller.state.interference import UNKNOWN_LOAD, InterferenceRules, is_shared
from eelgrid_controller.state.node_allocations import NodeRecord, make_data_trait
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import (
    Assignment,
    Gpu,
    GpuSharing,
    Placement,
    Removal,
    ReplicaExplanation,
    ResourceRequest,
    Workload,
    WorkloadSpec,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

NO_NODES: frozenset[str] = frozenset()
NO_RECORDS: Mapping[str, NodeRecord] = MappingProxyType({})
_SEARCHES_MOST = 8
# For gangs under engine rules: how many first places are tried before the gang waits.
_FIRST_PLACES_MOST = 8
# How often a place is sought where loads slow each other down less.
_QUIETER_TRIES = 3
_VIEWS_MOST = 64  # each holds a candidate index: some megabytes in a fleet of thousands of nodes


# Of nodes whose agents run processes; a name that no engine gives to a trait.
_RUNS_PROCESSES = "\x00processes"


def _required_traits(spec: WorkloadSpec) -> tuple[str, ...]:
    return spec.required_traits if spec.process is None else (*spec.required_traits, _RUNS_PROCESSES)


def _node_traits(record: NodeRecord) -> tuple[str, ...]:
    return (*record.traits, _RUNS_PROCESSES) if record.inventory.runs_processes else record.traits


class _View(NamedTuple):
    """The nodes that have some traits, and a planner that caches them."""

    is_open: NDArray[np.bool_]
    planner: Planner


def restrict_to_preferred(spec: WorkloadSpec) -> WorkloadSpec | None:
    """Returns a specification that allows only those of its models that it prefers; None if it prefers none of them to others."""
    allowed = spec.request.gpu_models
    models = () if spec.gpu_preference is None else spec.gpu_preference.models
    some = tuple(model for model in models if not allowed or model in allowed)
    if not some or set(some) == set(allowed):
        return None
    return replace(spec, request=replace(spec.request, gpu_models=some))


def restrict_to_data(spec: WorkloadSpec) -> WorkloadSpec | None:
    """Returns a specification that allows only nodes that have the model data it loads; None if it loads none."""
    if spec.model_data is None:
        return None
    return replace(spec, required_traits=(*spec.required_traits, *map(make_data_trait, spec.model_data.data_names)))


def _prefer(
    rather: PlacementDecision, worth_w: float | None, decide_freely: Callable[[], PlacementDecision]
) -> PlacementDecision:
    """Returns a preferred decision; that without the preference if it has no room, or costs more than it is worth."""
    if rather.placements and worth_w is None:
        return rather
    other = decide_freely()
    if not rather.placements or worth_w is None:
        return other
    is_dearer = bool(other.placements) and _mean_cost_w(rather) - worth_w > _mean_cost_w(other)
    return other if is_dearer else rather


def _mean_cost_w(decision: PlacementDecision) -> float:
    """Returns the modelled cost of a replica in its place, of those that are explained."""
    costs = [one.candidates[0].cost_w for one in decision.explanation if one.candidates]
    return sum(costs) / len(costs) if costs else 0.0


class AlteredNodes(NamedTuple):
    """Nodes as they would be: their records, the workloads that would have ended, and those there that are being submitted."""

    records: Mapping[str, NodeRecord] = NO_RECORDS
    ended: frozenset[str] = frozenset()
    coming: tuple[Workload, ...] = ()


class _Ground(NamedTuple):
    """What one decision is made on."""

    snapshot: Snapshot
    workloads: Mapping[str, Workload]
    # Nodes that differ from the state.
    altered: Mapping[str, NodeRecord] = NO_RECORDS
    # Whether work may start at limits that its agents set before, where budgets never hold its default limits.
    may_limit: bool = False

    @property
    def alteration(self) -> Alteration:
        return Alteration(self.altered, self.workloads)


class WorkloadPlacer:
    """Decides placements on the current state; call `refresh` after each change."""

    def __init__(
        self, state: ClusterState, catalogue: Catalogue, *, watts: Callable[[Gpu], GpuPowerPrior] | None = None
    ) -> None:
        """`watts` says what a GPU draws, if not the catalogue."""
        self.allowance = PowerAdmission(state, catalogue)
        self.searches = 0  # total of those with closed nodes or plan limits
        self.eligibility = Eligibility()
        self._state = state
        self._watts = watts or PriorPowerModel(catalogue).gpu
        self._read_all()

    def _read_all(self) -> None:
        """Derives everything from the state again; needed after a removal, since the arrays can only add rows."""
        self.planner, self._within = Planner(), Planner()
        self.mirror = SnapshotMirror(self._state, self._watts)
        self._limits = InterferenceRules(self._state.policy)
        self._sharing = SharedGpus(self._state, self.mirror)
        self._traits = {name: _node_traits(record) for name, record in self._state.nodes.items()}
        # By required traits and closed nodes.
        self._views: dict[tuple[tuple[str, ...], frozenset[str]], _View | None] = {}

    def snapshot(self) -> Snapshot:
        """Returns the cluster as arrays, read-only, valid until the next change."""
        return self.mirror.snapshot()

    def refresh(self, touched: frozenset[str]) -> None:
        """Updates what is derived after these nodes, or the policy, have changed."""
        self.allowance.refresh(touched)
        if self._limits.policy is not self._state.policy:
            self._limits = InterferenceRules(self._state.policy)
        if not touched <= self._state.nodes.keys():
            self._read_all()
            return
        self.mirror.refresh(touched)
        self._sharing.refresh(touched)
        for name in touched:
            traits = _node_traits(self._state.nodes[name])
            if self._traits.get(name) != traits:
                self._traits[name] = traits
                self._set_node_traits(name, set(traits))

    def quote_prices(self, request: ResourceRequest | None = None) -> OpportunityPrices | None:
        """Returns new quotes if they are due, else None; for a request, only if a node has room for it."""
        policy, market = self._state.policy, self._state.market
        return self.planner.quote_prices(self.snapshot(), policy.weights, policy.placement, market, request)

    def work_ahead(self) -> bool:
        """Does a bounded part of what the next decisions would have to; false if nothing is left. It changes none."""
        policy = self._state.policy
        return self.planner.work_ahead(self.snapshot(), policy.weights, policy.placement)

    def decide_placement(
        self,
        spec: WorkloadSpec,
        quotes: OpportunityPrices | None = None,
        *,
        workload_id: str = "",
        closed: frozenset[str] = NO_NODES,
        altered: Mapping[str, NodeRecord] = NO_RECORDS,
        is_start: bool = False,
    ) -> PlacementDecision:
        """Decides where a workload goes, within all budgets and on none of the closed nodes.

        `quotes` are prices that are not yet in force. Places for which others are nominated are not free; `altered` are the
        records of nodes with those, and with what starts in the same step. Whole work that starts may do so at a lower
        power limit where budgets never hold its default ones.
        """
        nominations = self._state.nominations
        if not altered and len(nominations):
            altered = nominations.hold_on(self._state.nodes, self._state.workloads)
        snapshot = self.mirror.altered_snapshot(altered) if altered else self.snapshot()
        if quotes is not None:
            snapshot = replace(snapshot, quotes=quotes)
        ground = _Ground(snapshot, self._state.workloads, altered)
        planner = self._within if altered else self.planner
        decision = self._decide(ground, planner, spec, workload_id, closed)
        return self._limit_start(decision, ground, spec, workload_id, closed) if is_start else decision

    def _limit_start(
        self, decision: PlacementDecision, ground: _Ground, spec: WorkloadSpec, workload_id: str, closed: frozenset[str]
    ) -> PlacementDecision:
        """Returns where work starts at a lower limit if only watts are missing and it may have one, else the decision."""
        if decision.lack is None or not may_start_limited(spec):
            return decision
        return self._decide_limited(ground, spec, workload_id, closed) or decision

    def _decide_limited(
        self, ground: _Ground, spec: WorkloadSpec, workload_id: str, closed: frozenset[str]
    ) -> PlacementDecision | None:
        """Decides where work starts below its default limits, which no budget holds now; None if it does so nowhere."""
        allowance, snapshot = self.allowance, ground.snapshot
        is_open = _mask(snapshot, frozenset(allowance.list_limiting_nodes(spec.request, spec.replicas, ground.altered)))
        if not (is_open & snapshot.nodes.available).any():
            return None
        self.searches += 1
        there = ground._replace(snapshot=snapshot.with_open(is_open), may_limit=True)
        found = self._decide(there, self._within, spec, workload_id, closed)
        if not found.placements:
            return None
        lacks = allowance.list_exceeded_budgets(found.placements, ground.altered)
        limit_w = allowance.find_start_limit(found.placements, lacks, ground.altered).limit_w if lacks else None
        shut = frozenset(itertools.compress(snapshot.names, ~is_open))
        return replace(found, power_limit_w=limit_w, closed_nodes=shut)

    def decide_on_altered(
        self,
        altered: AlteredNodes,
        spec: WorkloadSpec,
        workload_id: str,
        closed: frozenset[str] = NO_NODES,
        *,
        is_start: bool = False,
    ) -> PlacementDecision:
        """Decides where a workload would go if nodes were so altered, on none of the closed nodes."""
        snapshot = self.mirror.altered_snapshot(altered.records)
        left: Mapping[str, Workload] = self._state.workloads
        if altered.ended:
            left = {key: found for key, found in left.items() if key not in altered.ended}
        if altered.coming:
            left = {**left, **{one.workload_id: one for one in altered.coming}}
        ground = _Ground(snapshot, left, altered.records)
        decision = self._decide(ground, self._within, spec, workload_id, closed)
        return self._limit_start(decision, ground, spec, workload_id, closed) if is_start else decision

    def decide_on_open(self, spec: WorkloadSpec, *, closed: frozenset[str]) -> PlacementDecision:
        """Decides as if the closed nodes had no room, for a reason that is told elsewhere."""
        snapshot = _close(self.snapshot(), closed)
        return self._decide_among(_Ground(snapshot, self._state.workloads), self._within, spec, "", NO_NODES)

    def begin_room_count(self, spec: WorkloadSpec, workload_id: str) -> RoomCount:
        """Counts how many replicas fit on the nodes that traits, engine rules and limits permit, to go on with altered nodes."""
        permitted = self.list_permitted_nodes(AlteredNodes(), spec, workload_id)
        if not self.is_limited_by_interference(spec):
            return RoomCount(permitted, self.mirror.row, make_task(spec.request), spec)
        limits, wanted = self._limits, enlarge_request(spec, self._limits)
        here = self._sharing.limit_search(
            permitted, spec, limits, Alteration(NO_RECORDS, self._state.workloads)
        ).snapshot
        # A node that is closed now may be joined once others have left it.
        here = replace(here, nodes=here.nodes._replace(available=permitted.nodes.available))

        def limit_row(row: Ints, uuids: Iterable[str], record: NodeRecord) -> None:
            self._sharing.limit_row(row, uuids, record, spec, limits)

        return RoomCount(here, self.mirror.row, make_task(wanted.request), spec, limit_row)

    def list_permitted_nodes(
        self, altered: AlteredNodes, spec: WorkloadSpec, workload_id: str, closed: frozenset[str] = NO_NODES
    ) -> Snapshot:
        """Returns the cluster, so altered, with only those open nodes available that traits and engine rules permit."""
        snapshot = self.mirror.altered_snapshot(altered.records) if altered.records else self.snapshot()
        snapshot = _close(snapshot, closed)
        rules = self.eligibility.rules
        if rules is not None and self.uses_engine_rules(workload_id):
            eligible = rules.list_eligible_nodes(workload_id, {}, self._state.workloads)
            return snapshot.with_open(_mask(snapshot, eligible))
        required = _required_traits(spec)
        view = self._view(required) if required else None
        return snapshot if view is None else snapshot.with_open(view.is_open)

    def _decide(
        self,
        ground: _Ground,
        planner: Planner,
        spec: WorkloadSpec,
        workload_id: str,
        closed: frozenset[str] = NO_NODES,
    ) -> PlacementDecision:
        """Decides among the models that a workload prefers first, and elsewhere if that is not to be had."""

        def decide(one: WorkloadSpec) -> PlacementDecision:
            return self._decide_near_data(ground, planner, one, workload_id, closed)

        preferred = restrict_to_preferred(spec)
        if preferred is None or spec.gpu_preference is None:
            return decide(spec)
        return _prefer(decide(preferred), spec.gpu_preference.worth_w, lambda: decide(spec))

    def _decide_near_data(
        self, ground: _Ground, planner: Planner, spec: WorkloadSpec, workload_id: str, closed: frozenset[str]
    ) -> PlacementDecision:
        """Decides among the nodes that have a workload's model data first, and elsewhere if that is not to be had.

        An engine's rules name the nodes of a workload one by one, and are followed as they are.
        """

        def decide(one: WorkloadSpec) -> PlacementDecision:
            return self._decide_among(ground, planner, one, workload_id, closed)

        near = None if self.uses_engine_rules(workload_id) else restrict_to_data(spec)
        if near is None or spec.model_data is None:
            return decide(spec)
        far = self.count_nodes_without_data(spec, near, closed)
        rather = PlacementDecision(placements=(), explanation=(), room=0) if far is None else decide(near)
        return _prefer(count_apart(rather, far or 0, "model_data"), spec.model_data.worth_w, lambda: decide(spec))

    def count_nodes_without_data(
        self, spec: WorkloadSpec, near: WorkloadSpec, closed: frozenset[str] = NO_NODES
    ) -> int | None:
        """Counts the nodes that would do but for the model data that `near` requires; None if no node has these."""
        view, wider = (self._view(_required_traits(one), closed) for one in (near, spec))
        if view is None:
            return 0
        if not view.is_open.any():
            return None
        is_far = self.snapshot().nodes.available & ~view.is_open
        return int((is_far if wider is None else is_far & wider.is_open).sum())

    def _decide_among(
        self, ground: _Ground, planner: Planner, spec: WorkloadSpec, workload_id: str, closed: frozenset[str]
    ) -> PlacementDecision:
        """Decides within limits on interference, where there are any."""
        if self._sharing.is_limited(spec, self._limits, ground.alteration):
            return self._decide_within_limits(ground, planner, spec, workload_id, closed)
        return self._decide_on_nodes(ground, planner, spec, workload_id, closed)

    def is_limited_by_interference(self, spec: WorkloadSpec) -> bool:
        """Returns whether limits say with whom a workload may share a GPU: its own, or those of work that shares GPUs now."""
        return self._sharing.is_limited(spec, self._limits)

    def list_gpus_with_limits(self) -> frozenset[str]:
        """Lists the GPUs shared by work that may be slowed down so far only, by UUID."""
        return self._sharing.find_limited(self._limits)

    def list_limited_gpus(self, spec: WorkloadSpec, workload_id: str) -> Iterator[LimitedGpu]:
        """Yields the shared GPUs that have room for one replica of a workload but for limits on interference."""
        newcomer = spec.shared_load
        if newcomer is not None:
            permitted = self.list_permitted_nodes(AlteredNodes(), spec, workload_id)
            for name, uuid, mix in self._sharing.list_with_room(permitted, spec, self._limits):
                needed = self._limits.find_needed(mix, newcomer)
                unmeasured = self._limits.find_unmeasured((*mix, (newcomer, 1)))
                yield LimitedGpu(name, uuid, needed, unmeasured)

    def find_own_slowdown(self, spec: WorkloadSpec) -> float:
        """Returns by how much one replica of a workload slows another one down on the same GPU; infinite if nobody measured it."""
        load = (spec.shared_load or UNKNOWN_LOAD).load
        return self._limits.find_slowdown(load, load)

    def describe_unbearable(
        self, record: NodeRecord, coming: Sequence[Assignment], load: GpuSharing | None = None
    ) -> str:
        """Names a GPU of a node on which what comes, which the record holds, exceeds a limit on interference; empty if none.

        `load` is that of work that is being submitted.
        """
        if not any(map(is_shared, coming)):
            return ""
        workloads = self._state.workloads
        nominated = self._state.nominations.list_loads(workloads, coming[0].workload_id)
        return self._limits.describe_unbearable(record, coming, workloads, load=load, more=nominated)

    def _decide_within_limits(
        self, ground: _Ground, planner: Planner, spec: WorkloadSpec, workload_id: str, closed: frozenset[str]
    ) -> PlacementDecision:
        here = self._sharing.limit_search(ground.snapshot, spec, self._limits, ground.alteration)
        is_changed = here.snapshot is not ground.snapshot
        self.searches += is_changed
        # Where nothing is closed, the index of the cluster as it is will do.
        found = self._decide_on_nodes(
            ground._replace(snapshot=here.snapshot),
            self._within if is_changed else planner,
            here.spec,
            workload_id,
            closed,
        )
        if found.placements:
            return self._choose_quieter(found, ground, spec, workload_id, closed) if spec.replicas == 1 else found
        free = self._decide_on_nodes(ground, planner, spec, workload_id, closed)
        if not free.placements:
            return replace(free, room=min(free.room, found.room))
        nodes = here.closed or len({place.node_name for place in free.placements})
        removals = (Removal(constraint="interference", nodes=nodes),)
        explanation = tuple(replace(one, candidates=(), removals=removals) for one in found.explanation)
        return replace(found, removals=removals, explanation=explanation, lack=None)

    def _choose_quieter(
        self, found: PlacementDecision, ground: _Ground, spec: WorkloadSpec, workload_id: str, closed: frozenset[str]
    ) -> PlacementDecision:
        """Returns a decision of less cost if loads slow each other down less elsewhere, counted in watts."""
        limits, newcomer = self._limits, spec.shared_load or UNKNOWN_LOAD
        if not limits.has_pairs or self._state.policy.placement != DEFAULT_PLACEMENT_POLICY:
            return found

        def measure(decision: PlacementDecision) -> tuple[float, float]:
            """Returns the slowdowns that it adds, and its cost with them."""
            (place,) = decision.placements
            (uuid,) = place.gpu_uuids
            gpu = self._state.nodes[place.node_name].gpu(uuid)
            added = limits.sum_added(self._sharing.find_mix(place.node_name, uuid, ground.alteration), newcomer)
            held_w = 0.0 if gpu is None else self._watts(gpu)[1] * spec.request.gpu_milli / GPU_MILLI_WHOLE
            return added, _mean_cost_w(decision) + added * held_w

        best, (added, least_w) = found, measure(found)
        for _ in range(_QUIETER_TRIES):
            if not added:
                break
            here = self._sharing.limit_search(ground.snapshot, spec, limits, ground.alteration, added)
            self.searches += 1
            quieter = ground._replace(snapshot=here.snapshot)
            other = self._decide_on_nodes(quieter, self._within, spec, workload_id, closed)
            # What is left costs more and more.
            if not other.placements or _mean_cost_w(other) >= least_w:
                break
            added, cost_w = measure(other)
            if cost_w < least_w:
                best, least_w = other, cost_w
        return best

    def _decide_on_nodes(
        self, ground: _Ground, planner: Planner, spec: WorkloadSpec, workload_id: str, closed: frozenset[str]
    ) -> PlacementDecision:
        rules = self.eligibility.rules
        if rules is not None and self.uses_engine_rules(workload_id):
            ground = ground._replace(snapshot=_close(ground.snapshot, closed))
            return self._decide_by_rules(ground, spec, workload_id, rules)
        required = _required_traits(spec)
        view = self._view(required, closed) if required or closed else None
        if view is not None:
            is_lasting = planner is self.planner
            planner, there = view.planner if is_lasting else planner, ground.snapshot.nodes.available
            ground = ground._replace(snapshot=ground.snapshot.with_open(view.is_open, is_lasting=is_lasting))
        policy = self._state.policy
        rebuilt = planner.rebuilt
        decision = planner.decide_placement(ground.snapshot, spec, policy.weights, policy.placement)
        self.searches += planner.rebuilt - rebuilt
        if view is not None and not decision.placements:
            constraint = "reservation" if closed else "traits" if spec.process is None else "processes"
            return count_apart(decision, int((there & ~view.is_open).sum()), constraint)
        lacks = self._exceeded_budgets(ground, spec, decision)
        return self._elsewhere(ground, spec, decision, lacks) if lacks else decision

    def _exceeded_budgets(
        self, ground: _Ground, spec: WorkloadSpec, decision: PlacementDecision
    ) -> list[ExceededBudget]:
        is_bound = decision.placements and self.allowance.has_budgets and spec.request.gpu_count
        return self._list_lacks(ground, decision.placements) if is_bound else []

    def _list_lacks(self, ground: _Ground, placements: tuple[Placement, ...]) -> list[ExceededBudget]:
        """Returns the budgets that placements would exceed, at the limits at which they may start."""
        allowance, altered = self.allowance, ground.altered
        lacks = allowance.list_exceeded_budgets(placements, altered)
        may_limit = lacks and ground.may_limit
        return allowance.find_start_limit(placements, lacks, altered).blocking if may_limit else lacks

    def list_start_lacks(
        self,
        spec: WorkloadSpec,
        placements: Sequence[Placement],
        altered: Mapping[str, NodeRecord] = NO_RECORDS,
        enforced: Collection[str] = (),
    ) -> list[ExceededBudget]:
        """Returns the budgets in the way of a start at these places, at lower limits if it may have them.

        `altered` are records that nodes would have by then, and `enforced` pools that would be enforced.
        """
        lacks = self.allowance.list_exceeded_budgets(placements, altered, enforced)
        if not lacks or not may_start_limited(spec):
            return lacks
        return self.allowance.find_start_limit(placements, lacks, altered, enforced).blocking

    def decide_start(
        self, spec: WorkloadSpec, quotes: OpportunityPrices | None = None, *, workload_id: str = ""
    ) -> PlacementDecision:
        """Like `decide_placement` of a start, but new work is held while a spending limit that applies to it is exceeded."""
        hold = self._state.spending.blocking_limit(spec)
        if hold is not None:
            return PlacementDecision(placements=(), explanation=(), room=0, hold=hold)
        return self.decide_placement(spec, quotes, workload_id=workload_id, is_start=True)

    def uses_engine_rules(self, workload_id: str) -> bool:
        """Returns whether an engine's rules say where a workload may go."""
        return self.eligibility.rules is not None and self.eligibility.rules.has_rules_for(workload_id)

    def is_open_to(self, spec: WorkloadSpec, workload_id: str, placements: Iterable[Placement]) -> bool:
        """Returns whether places are on nodes and GPUs that take a workload as they are now, whatever room they have."""
        rules, models = self.eligibility.rules, spec.request.gpu_models
        has_rules = rules is not None and self.uses_engine_rules(workload_id)
        eligible = rules.list_eligible_nodes(workload_id, {}, self._state.workloads) if rules and has_rules else None
        for place in placements:
            name = place.node_name
            record = self._state.nodes.get(name)
            is_permitted = self.has_required_traits(spec, name) if eligible is None else name in eligible
            if record is None or not (record.is_schedulable and is_permitted):
                return False
            for gpu in map(record.gpu, place.gpu_uuids):
                if gpu is None or record.cordon_reason(gpu) or (models and gpu.model not in models):
                    return False
        return True

    def has_required_traits(self, spec: WorkloadSpec, node_name: str) -> bool:
        """Returns whether a node has every trait that a workload requires."""
        return set(_required_traits(spec)) <= set(self._traits.get(node_name, ()))

    def _view(self, required: tuple[str, ...], closed: frozenset[str] = NO_NODES) -> _View | None:
        """Returns the nodes with these traits that are not closed, and a planner that caches them; None if all are."""
        key = required, closed
        if key not in self._views:
            wanted = set(required)
            names = self.snapshot().names
            is_open = np.array(
                [name not in closed and wanted <= set(self._traits.get(name, ())) for name in names], np.bool_
            )
            if len(self._views) >= _VIEWS_MOST:
                del self._views[next(iter(self._views))]
            self._views[key] = None if is_open.all() else _View(is_open, Planner())
            # Its index is built by the first decision.
            self.searches += bool(closed)
        return self._views[key]

    def _set_node_traits(self, name: str, traits: set[str]) -> None:
        """Sets the traits of a node; its row is added to the changes, so that planners evaluate it again."""
        row = self.mirror.row(name)
        for (required, closed), view in list(self._views.items()):
            has = name not in closed and traits.issuperset(required)
            if view is not None and row < len(view.is_open):
                view.is_open[row] = has
            elif view is not None or not has:
                del self._views[required, closed]

    def _decide_by_rules(
        self, ground: _Ground, spec: WorkloadSpec, workload_id: str, rules: EligibilityRules
    ) -> PlacementDecision:
        """Decides a placement by an engine's eligibility rules."""
        closed: frozenset[str] = frozenset()
        for _ in range(_FIRST_PLACES_MOST):
            decision = self._one_by_one(ground, spec, workload_id, rules, closed)
            first = decision.explanation[0].candidates if decision.explanation else ()
            if decision.placements or spec.replicas == 1 or not decision.room or not first:
                break
            # The first place restricts those of the others: another first place may fit all.
            closed |= rules.list_equivalent_nodes(workload_id, first[0].node_name) | {first[0].node_name}
        lacks = self._exceeded_budgets(ground, spec, decision)
        if not lacks:
            return decision
        if spec.replicas > 1:
            return replace(decision, placements=(), room=_room(spec.replicas, lacks), lack=lacks[0])
        eligible = rules.list_eligible_nodes(workload_id, {}, ground.workloads)
        is_open = _mask(ground.snapshot, eligible)
        return self._elsewhere(ground._replace(snapshot=ground.snapshot.with_open(is_open)), spec, decision, lacks)

    def _one_by_one(
        self,
        ground: _Ground,
        spec: WorkloadSpec,
        workload_id: str,
        rules: EligibilityRules,
        closed: frozenset[str],
    ) -> PlacementDecision:
        """Places each replica in turn; the first on none of the closed nodes."""
        policy, task = self._state.policy, make_task(spec.request)
        one, snapshot = replace(spec, replicas=1), ground.snapshot
        rows = {name: row for row, name in enumerate(snapshot.names)}
        trial = snapshot.copy() if spec.replicas > 1 else None
        placements, explanation, placed = list[Placement](), list[ReplicaExplanation](), dict[int, str]()
        for replica in range(spec.replicas):
            here = snapshot if trial is None else trial.snapshot
            eligible = rules.list_eligible_nodes(workload_id, placed, ground.workloads)
            is_open = _mask(here, eligible if placed else eligible - closed)
            self.searches += 1
            found = self._within.decide_placement(here.with_open(is_open), one, policy.weights, policy.placement)
            if not found.placements:
                found = count_apart(found, int((here.nodes.available & ~is_open).sum()))
                return replace(found, room=replica, explanation=(*explanation[:1], *found.explanation))
            (place,) = found.placements
            placements.append(replace(place, replica=replica))
            explanation += [
                replace(item, replica=replica) for item in found.explanation if replica < EXPLAINED_REPLICAS_MOST
            ]
            placed[replica] = place.node_name
            if trial is not None:
                uuids = here.devices[rows[place.node_name]].uuids
                trial.place_task(rows[place.node_name], [uuids.index(uuid) for uuid in place.gpu_uuids], task)
        return PlacementDecision(placements=tuple(placements), explanation=tuple(explanation), room=spec.replicas)

    def _elsewhere(
        self, ground: _Ground, spec: WorkloadSpec, decision: PlacementDecision, lacks: list[ExceededBudget]
    ) -> PlacementDecision:
        """Searches again with the nodes below exhausted budgets closed; returns a pending decision if nothing fits."""
        request, first, snapshot = spec.request, lacks[0], ground.snapshot
        is_whole = request.gpu_milli == GPU_MILLI_WHOLE
        closed = set[str]()
        if is_whole and not ground.may_limit:
            closed = self.allowance.list_exhausted_budgets(request.gpu_count, request.gpu_models)
        room = _room(spec.replicas, lacks)
        policy = self._state.policy
        count = 0
        for _ in range(_SEARCHES_MOST):
            closed |= {lack.budget for lack in lacks}
            is_open = np.array(
                [closed.isdisjoint(self.allowance.budgets_above(name)) for name in snapshot.names], np.bool_
            )
            count = int((snapshot.nodes.available & ~is_open).sum())
            if not is_open.any():
                break
            self.searches += 1
            found = self._within.decide_placement(snapshot.with_open(is_open), spec, policy.weights, policy.placement)
            if not found.placements:
                break
            lacks = self._list_lacks(ground, found.placements)
            if not lacks:
                return replace(found, closed=frozenset(closed))
        removals = (Removal(constraint="budget", nodes=count),)
        return replace(decision, placements=(), room=room, lack=first, removals=removals, closed=frozenset(closed))


def may_start_limited(spec: WorkloadSpec) -> bool:
    """Returns whether a workload runs on whole GPUs, and agents start its processes."""
    return spec.process is not None and spec.request.gpu_count > 0 and spec.request.gpu_milli == GPU_MILLI_WHOLE


def _close(snapshot: Snapshot, names: frozenset[str]) -> Snapshot:
    """Returns the cluster with these nodes unavailable."""
    return snapshot.with_open(~_mask(snapshot, names)) if names else snapshot


def _mask(snapshot: Snapshot, names: frozenset[str]) -> NDArray[np.bool_]:
    """Returns which rows these nodes have, as a mask (N,)."""
    return np.fromiter((name in names for name in snapshot.names), np.bool_, len(snapshot.names))


def count_apart(decision: PlacementDecision, count: int, constraint: str = "traits") -> PlacementDecision:
    """Returns the decision with so many of its unavailable nodes counted under another constraint, which closed them."""
    if not count:
        return decision

    def divide(removals: tuple[Removal, ...]) -> tuple[Removal, ...]:
        left = (
            replace(item, nodes=item.nodes - count) if item.constraint == "unavailable" else item for item in removals
        )
        return (*(item for item in left if item.nodes > 0), Removal(constraint=constraint, nodes=count))

    explained = tuple(replace(item, removals=divide(item.removals)) for item in decision.explanation)
    return replace(decision, removals=divide(decision.removals), explanation=explained)


def _room(replicas: int, lacks: list[ExceededBudget]) -> int:
    """Estimates how many replicas the budgets allow at the places found; fewer than requested."""
    over = max(lack.replicas - int(max(0.0, lack.left_w) // (lack.more_w / lack.replicas)) for lack in lacks)
    return max(0, replicas - max(1, over))
