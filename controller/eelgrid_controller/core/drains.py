"""Drains: which work leaves drained nodes and GPUs, and lost GPUs, next, where to, and what stays there and why.

`plan_departure` decides for one unit of work; `DrainRounds` carries out what is due, a bounded number of decisions per
step, and `preview_drain` tells what a drain would do. Must not know how events become durable, nor who asked.

Theory. What leaves together is one unit: a replica of a service or of a batch job, or all replicas of a gang that are
drained, since it stops as a whole. A unit that may move goes as soon as it fits elsewhere, by the placer's own
decision and the same checks as any move (`plan_migration`). Work that cannot move ends by itself; after the grace it
returns to the queue, except what is declared fixed or in MIG slices, unless the drain is forced. Processes cannot move:
they are told to stop, and their work returns to the queue when they have. Of a service that has replicas elsewhere only
those that are drained are released. Nothing leaves a node that cannot be told to stop it: there it may still run. Work
that an engine runs is left to the engine's own drain, which follows the cordons.

Processes on a lost node whose agent fences them are taken for ended once that has happened: the node was told to stop
them without contact to a controller, and its time for that, their grace and some more have passed since it was lost,
which was no sooner than the last contact. Then their end is recorded as if the agent had told it. A wall clock that
jumps ahead must not end them: so much time must have passed in small steps as well, since this core saw the loss.

Work on a GPU that is lost leaves by the same rules as from one that is drained with a grace: what is on it cannot go
on, but a process that notices ends sooner by itself.

Jobs that are charged to a spending limit which stops them leave as well once that is spent: processes of theirs that run
then, since nothing that spends starts meanwhile.

A drain is a fact of the state (`OperatorCordon.drain`), so it continues after a restart; a round is due whenever the
state has changed since the last complete one, or a grace has ended.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from typing import NamedTuple

from eelgrid_controller.core.attempt_reports import AttemptReports
from eelgrid_controller.core.job_control import stop_for_requeue
from eelgrid_controller.core.workloads import MoveRefused, plan_migration
from eelgrid_controller.placement.placer import AlteredNodes, WorkloadPlacer
from eelgrid_controller.queueing.reservations import list_closed_nodes
from eelgrid_controller.state.attempts import find_attempt
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms, OperatorCordon, describe_cause
from eelgrid_controller.state.events import (
    Event,
    PartitionsPlanned,
    SlicedService,
    WorkloadEvicted,
    WorkloadScaled,
)
from eelgrid_controller.state.node_allocations import NodeRecord, is_sliced, make_assignment
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.spending import SpendingKey, spending_reason
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import (
    DRAINED_WORKLOADS_MOST,
    Assignment,
    AttemptState,
    AttemptStatus,
    Candidate,
    DrainedWorkload,
    DrainOutcome,
    Mobility,
    Move,
    NodeState,
    Placement,
    ReplicaMove,
    Workload,
    WorkloadKind,
    WorkloadPhase,
)

# A decision takes 0.1 to 1 ms, so that a step stays well under a tenth of a second.
_DECISIONS_MOST = 32
# A driver that is loaded anew answers again within seconds; what ran on its GPUs has ended by then.
LOST_GPU_GRACE_S = 60.0
# The terms of work on GPUs that were lost for longer than the grace.
_AT_ONCE = DrainTerms(deadline_ns=1)
# A longer step of the time is a clock that jumps, or a process that was stopped.
_STEP_MOST_NS = 10 * 10**9
# How much longer a fence may take than it says: clocks that run apart, looks at the contact, KILL of what is left.
_FENCE_SLACK, _FENCE_SLACK_S = 0.1, 10.0
# Names that are compared with one that is unknown: some milliseconds.
_COMPARED_MOST = 2000


# By node: the GPUs of which work leaves since they are lost.
LostGpus = Mapping[str, Collection[str]]


class DrainUnit(NamedTuple):
    """Replicas of one workload that leave together, the terms by which they do, and why."""

    workload: Workload
    placements: tuple[Placement, ...]
    terms: DrainTerms
    reason: str
    # It cannot go on, since a GPU of it is lost.
    is_lost: bool

    @property
    def key(self) -> tuple[str, int]:
        """Where it is in the order of a round."""
        return self.workload.workload_id, self.placements[0].replica


class Departure(NamedTuple):
    """What becomes of a unit: the events to apply now, or what it waits for."""

    outcome: DrainOutcome
    reason: str = ""
    move: Move | None = None
    events: tuple[Event, ...] = ()


def find_node(state: ClusterState, node_name: str) -> NodeRecord:
    """Returns a node; raises NotFound, which names similar ones."""
    record = state.nodes.get(node_name)
    if record is not None:
        return record
    names = (name for name in state.nodes if len(state.nodes) <= _COMPARED_MOST or name[:2] == node_name[:2])
    near = get_close_matches(node_name, list(islice(names, _COMPARED_MOST)), n=3)
    remedy = f", did you mean {' or '.join(near)}?" if near else "; list nodes to see the names"
    raise NotFound(f"no node is called {node_name!r}{remedy}")


def resolve_gpus(record: NodeRecord, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the UUIDs of GPUs named by index or UUID, also of cordoned ones that are gone; raises NotFound."""
    by_name = {uuid: uuid for uuid in record.gpu_cordons}
    for gpu in record.inventory.gpus:
        by_name |= {gpu.uuid: gpu.uuid, str(gpu.index): gpu.uuid}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        node, indexes = record.inventory.node_name, sorted(gpu.index for gpu in record.inventory.gpus)
        near = get_close_matches(unknown[0], list(by_name), n=2)
        have = f"its GPUs are {', '.join(map(str, indexes))}" if indexes else "it has none"
        similar = f", did you mean {' or '.join(near)}?" if near else ""
        raise NotFound(f"node {node} has no GPU {unknown[0]!r}, {have}{similar}; name a GPU by its index or UUID")
    return tuple(dict.fromkeys(by_name[name] for name in names))


def list_drain_units(state: ClusterState, records: Mapping[str, NodeRecord], lost: LostGpus) -> list[DrainUnit]:
    """Lists the units that leave these nodes, by workload and replica."""
    found: dict[tuple[str, int], list[tuple[Placement, DrainTerms, str, bool]]] = {}
    places: dict[str, dict[int, Placement]] = {}
    for name, record in records.items():
        for (key, replica), assignment in record.assignments.items():
            leaving = _find_terms(record, assignment, lost.get(name, ()))
            if leaving is None:
                continue
            workload = state.workloads[key]
            if key not in places:
                places[key] = {place.replica: place for place in workload.placements}
            at = places[key][replica]
            is_gang = workload.spec.kind is WorkloadKind.TRAINING_JOB and len(workload.placements) > 1
            found.setdefault((key, -1 if is_gang else replica), []).append((at, *leaving))
    units = []
    for (key, _), items in found.items():
        items.sort(key=lambda item: item[0].replica)
        # Of a gang on several drained nodes, the terms of its first replica there.
        _, terms, reason, is_lost = items[0]
        units.append(DrainUnit(state.workloads[key], tuple(item[0] for item in items), terms, reason, is_lost))
    return sorted(units, key=lambda unit: unit.key)


def _find_terms(
    record: NodeRecord, assignment: Assignment, lost: Collection[str]
) -> tuple[DrainTerms, str, bool] | None:
    """Returns the terms by which an assignment leaves a node, why, and whether that is a loss; None if it may stay."""
    node = record.inventory.node_name
    if lost and not set(assignment.gpu_uuids).isdisjoint(lost):
        return _AT_ONCE, PendingConstraint.EVICTED.describe("gpu_lost", node=node), True
    drained = record.drain_terms(assignment)
    if drained is None:
        return None
    terms, cordon = drained
    cause = describe_cause(cordon.user, cordon.reason)
    return terms, PendingConstraint.EVICTED.describe(node=node, cause=cause), False


def plan_departure(
    state: ClusterState,
    placer: WorkloadPlacer,
    unit: DrainUnit,
    *,
    now_ns: int,
    altered: Mapping[str, NodeRecord] | None = None,
) -> Departure:
    """Decides what becomes of a unit now; `altered` are nodes as they would be, for a preview."""
    records = altered or {}
    unreachable = _find_unreachable(state, unit)
    if unreachable:
        return Departure(DrainOutcome.STAYS, unreachable)
    if unit.workload.spec.required_traits:
        return _plan_engine_departure(unit)
    if unit.workload.spec.process is not None:
        return _plan_requeue(unit, None if altered is not None else now_ns)
    bound = _find_bond(unit)
    reason = bound or "no other place has room for it"
    closed = list_closed_nodes(state, unit.workload, now_ns)
    move = None if bound else _find_move(state, placer, unit, records, closed)
    if move is not None:
        try:
            moved = (
                ()
                if altered is not None
                else plan_migration(state, placer.allowance, (move,), now_ns=now_ns, held=frozenset())
            )
            return Departure(DrainOutcome.MOVES, move=move, events=moved)
        except MoveRefused as refused:
            reason = str(refused)
    if bound and not unit.terms.force:
        return Departure(DrainOutcome.STAYS if unit.terms.deadline_ns else DrainOutcome.FINISHES, reason)
    if not unit.terms.deadline_ns:
        return Departure(DrainOutcome.FINISHES, reason)
    events = (_make_eviction(unit, now_ns),) if altered is None and unit.terms.is_over(now_ns) else ()
    return Departure(DrainOutcome.REQUEUED, reason, events=events)


def _plan_requeue(unit: DrainUnit, now_ns: int | None) -> Departure:
    """Decides what becomes of processes, which stop where they are, or run on; without a moment for a preview."""
    reason = "it runs a process, which cannot move"
    if not unit.terms.deadline_ns:
        return Departure(DrainOutcome.FINISHES, f"{reason}: eelctl requeue stops it")
    if not unit.workload.spec.may_run_again and not (unit.terms.force or unit.is_lost):
        return Departure(DrainOutcome.STAYS, "it was submitted with --no-requeue")
    is_due = now_ns is not None and unit.terms.is_over(now_ns) and not unit.workload.stopping_ns
    events = (stop_for_requeue(unit.workload, unit.reason, now_ns),) if is_due and now_ns is not None else ()
    return Departure(DrainOutcome.REQUEUED, reason, events=events)


def _plan_engine_departure(unit: DrainUnit) -> Departure:
    """Returns what an engine does with a unit that it runs: only that knows when it can move."""
    spec = unit.workload.spec
    is_bound = spec.mobility is Mobility.FIXED and not (unit.terms.force and spec.labels.get("owner"))
    if unit.terms.deadline_ns and not is_bound and not is_sliced(unit.workload):
        return Departure(DrainOutcome.REQUEUED, "Kubernetes moves it, or evicts it when the grace is over")
    return Departure(DrainOutcome.FINISHES, "Kubernetes runs it, and moves it by its own drain")


def _find_unreachable(state: ClusterState, unit: DrainUnit) -> str:
    """Returns why a node of the unit cannot be told to stop it; empty if all can."""
    for name in dict.fromkeys(place.node_name for place in unit.placements):
        record = state.nodes[name]
        if record.state is not NodeState.READY:
            return f"node {name} is lost, and it may still run there: bring the agent back, or eelctl node remove it"
        if record.ahead is not None or not record.is_reported:
            return f"what node {name} holds is not known yet: wait for its agent, or eelctl reconcile it"
    return ""


def _find_bond(unit: DrainUnit) -> str:
    """Returns why a unit may not move, whatever room there is; empty if it may."""
    if is_sliced(unit.workload):
        return "it runs in MIG slices, which the partition planner places: eelctl partition plan"
    if unit.workload.spec.mobility is Mobility.FIXED:
        return "it is declared fixed"
    return ""


def _find_move(
    state: ClusterState,
    placer: WorkloadPlacer,
    unit: DrainUnit,
    altered: Mapping[str, NodeRecord],
    closed: frozenset[str],
) -> Move | None:
    """Returns the move of a unit to where the placer would put it; None if it fits nowhere else."""
    workload, records = unit.workload, dict(altered)
    spec = replace(workload.spec, replicas=len(unit.placements))
    releases_first = workload.spec.mobility is Mobility.RESTARTABLE
    for place in unit.placements if releases_first else ():
        # What it frees on a cordoned node is of no use to it.
        if (records.get(place.node_name) or state.nodes[place.node_name]).cordon is None:
            records[place.node_name] = (records.get(place.node_name) or state.nodes[place.node_name]).copy()
            records[place.node_name].release(workload.workload_id, place.replica)
    if records:
        decision = placer.decide_on_altered(AlteredNodes(records), spec, workload.workload_id, closed)
    else:
        decision = placer.decide_placement(spec, workload_id=workload.workload_id, closed=closed)
    if not decision.placements:
        return None
    candidates: dict[int, tuple[Candidate, ...]] = {item.replica: item.candidates[:1] for item in decision.explanation}
    return Move(
        workload_id=workload.workload_id,
        name=workload.spec.name,
        replicas=tuple(
            ReplicaMove(
                source=source,
                target=replace(target, replica=source.replica),
                candidates=candidates.get(target.replica, ()),
            )
            for source, target in zip(unit.placements, decision.placements, strict=True)
        ),
        release_first=releases_first,
    )


def _make_eviction(unit: DrainUnit, now_ns: int) -> Event:
    """Returns the event after which a unit holds nothing on what is drained."""
    workload, key = unit.workload, unit.workload.workload_id
    gone = {place.replica for place in unit.placements}
    left = tuple(place for place in workload.placements if place.replica not in gone)
    if left and workload.spec.kind is WorkloadKind.INFERENCE_SERVICE:
        if is_sliced(workload):
            return PartitionsPlanned(time_ns=now_ns, services=(SlicedService(workload_id=key, placements=left),))
        return WorkloadScaled(time_ns=now_ns, workload_id=key, released=tuple(sorted(gone)))
    return WorkloadEvicted(time_ns=now_ns, workload_id=key, reason=unit.reason)


def preview_drain(
    state: ClusterState, placer: WorkloadPlacer, node_name: str, gpus: tuple[str, ...], cordon: OperatorCordon
) -> tuple[DrainedWorkload, ...]:
    """Returns what a drain of a node, or of GPUs by index or UUID, would do with the work there, as far as is known now.

    Changes nothing. Raises NotFound.
    """
    record = find_node(state, node_name).copy()
    record.set_cordon(resolve_gpus(record, gpus), cordon)
    altered, now_ns = {node_name: record}, cordon.since_ns
    found = []
    for unit in list_drain_units(state, {node_name: record}, {})[:DRAINED_WORKLOADS_MOST]:
        departure = plan_departure(state, placer, unit, now_ns=now_ns, altered=altered)
        for item in departure.move.replicas if departure.move is not None else ():
            for name in (item.source.node_name, item.target.node_name):
                altered.setdefault(name, state.nodes[name].copy())
            altered[item.source.node_name].release(unit.workload.workload_id, item.source.replica)
            altered[item.target.node_name].allocate_unchecked(make_assignment(unit.workload, item.target))
        found.append(_describe_departure(unit, departure))
    return tuple(found)


def _describe_departure(unit: DrainUnit, departure: Departure) -> DrainedWorkload:
    targets = departure.move.replicas if departure.move is not None else ()
    return DrainedWorkload(
        workload_id=unit.workload.workload_id,
        name=unit.workload.spec.name,
        user=unit.workload.spec.user,
        replicas=tuple(place.replica for place in unit.placements),
        outcome=departure.outcome,
        node_names=tuple(dict.fromkeys(item.target.node_name for item in targets)),
        reason=departure.reason,
    )


class DrainRounds:
    """Carries out the drains of one state in rounds, a bounded number of decisions per step."""

    def __init__(
        self,
        state: ClusterState,
        placer: WorkloadPlacer,
        reports: AttemptReports,
        *,
        lost_gpu_grace_s: float | None,
    ) -> None:
        """Work leaves a lost GPU after this grace, with None never."""
        self._state, self._placer, self._reports = state, placer, reports
        self._lost_gpu_grace_ns = None if lost_gpu_grace_s is None else round(lost_gpu_grace_s * 1e9)
        # The time that has passed in small steps, and what it was when a loss of a node was first seen that fences processes,
        # by node and time of the loss.
        self._now_ns, self._passed_ns = 0, 0
        self._fenced_ns: dict[tuple[str, int], int] = {}
        # The spent limits by which jobs were stopped, and the jobs that are still to be told.
        self._stopping, self._told_next = frozenset[SpendingKey](), list[str]()
        # Where the round continues; None between rounds.
        self._resume: tuple[str, int] | None = None
        # The revision after the last complete round, and the first grace that ended after it; a new core knows none.
        self._revision: int | None = None
        self._deadline_ns: int | None = None

    def is_due(self, now_ns: int) -> bool:
        """Returns whether work may leave now that could not before; asked every few seconds at least."""
        self._passed_ns += min(max(0, now_ns - self._now_ns), _STEP_MOST_NS)
        self._now_ns = now_ns
        if self._told_next or self._stopping != self._state.spending.stopping:
            return True
        if not self._state.draining:
            return False
        if self._resume is not None or (self._deadline_ns is not None and now_ns >= self._deadline_ns):
            return True
        if self._revision == self._state.revision:
            return False
        if any(_may_hold_units(self._state.nodes[name]) for name in self._state.draining):
            return True
        self._revision = self._state.revision
        return False

    def step(self, apply: Callable[[Event], frozenset[str]], now_ns: int) -> tuple[list[Event], frozenset[str]]:
        """Continues the round, up to the bound; returns the events, already applied, and their nodes."""
        events, nodes = list[Event](), frozenset[str]()
        for event in self._stop_spenders(now_ns):
            nodes |= apply(event)
            events.append(event)
        records = {name: self._state.nodes[name] for name in sorted(self._state.draining)}
        lost, ends_ns = self._find_lost(records, now_ns)
        losses = ((name, record.lost_ns) for name, record in records.items() if record.is_fenced)
        self._fenced_ns = {loss: self._fenced_ns.get(loss, self._passed_ns) for loss in losses}
        for name, record in records.items():
            ended, due_ns = self._find_fenced(record, now_ns)
            told, touched, _ = self._reports.record(name, ended[:_DECISIONS_MOST], apply, now_ns)
            events, nodes = [*events, *told], nodes | touched
            # What is beyond the bound is ended in the next step.
            ends_ns += [*due_ns, *([now_ns] if len(ended) > _DECISIONS_MOST else ())]
        units = list_drain_units(self._state, records, lost)
        begin = self._resume
        left = units if begin is None else [unit for unit in units if unit.key > begin]
        for unit in left[:_DECISIONS_MOST]:
            # An earlier unit of the same workload may have changed it.
            now = self._refresh_unit(unit)
            if now is None:
                continue
            departure = plan_departure(self._state, self._placer, now, now_ns=now_ns)
            for event in departure.events:
                nodes |= apply(event)
                events.append(event)
        self._resume = left[_DECISIONS_MOST - 1].key if len(left) > _DECISIONS_MOST else None
        if self._resume is None:
            self._revision = self._state.revision
            ends_ns += [unit.terms.deadline_ns for unit in units if unit.terms.deadline_ns > now_ns]
            self._deadline_ns = min(ends_ns, default=None)
        return events, nodes

    def _stop_spenders(self, now_ns: int) -> Iterator[Event]:
        """Yields the events that stop jobs whose spending limit is spent, each to be applied before the next."""
        spending, workloads = self._state.spending, self._state.workloads
        if self._stopping != spending.stopping:
            self._stopping = spending.stopping
            # All at once, and seldom: some tens of milliseconds for 100,000 workloads.
            self._told_next = [
                key
                for key, one in (workloads.items() if self._stopping else ())
                if one.phase is WorkloadPhase.PLACED
                and one.spec.process is not None
                and spending.find_stopping_limit(one.spec) is not None
            ]
        batch, self._told_next = self._told_next[:_DECISIONS_MOST], self._told_next[_DECISIONS_MOST:]
        for workload in filter(None, map(workloads.get, batch)):
            over = spending.find_stopping_limit(workload.spec)
            is_running = workload.phase is WorkloadPhase.PLACED and not workload.stopping_ns
            if over is not None and is_running and workload.spec.may_run_again:
                yield stop_for_requeue(workload, spending_reason(over), now_ns)

    def _find_fenced(self, record: NodeRecord, now_ns: int) -> tuple[list[AttemptStatus], list[int]]:
        """Returns how processes on a lost node have ended that it fences, and when others will have."""
        ended, due_ns = list[AttemptStatus](), list[int]()
        if not record.is_fenced or not record.lost_ns or self._state.losses.withholds_starts:
            return ended, due_ns
        name, fence_s = record.inventory.node_name, record.inventory.fence_after_s
        passed_ns = self._passed_ns - self._fenced_ns[name, record.lost_ns]
        for key, replica in record.assignments:
            workload = self._state.workloads[key]
            process, begun = workload.spec.process, find_attempt(workload, replica)
            if process is None or (begun is not None and begun.is_over):
                continue
            stop_s = process.grace_s + (process.warn_before_s if process.warn_signal else 0.0)
            span_ns = round((fence_s * (1.0 + _FENCE_SLACK) + stop_s + _FENCE_SLACK_S) * 1e9)
            end_ns = max(record.lost_ns + span_ns, now_ns + span_ns - passed_ns)
            if end_ns > now_ns:
                due_ns.append(end_ns)
                continue
            ended.append(
                AttemptStatus(
                    workload_id=key,
                    replica=replica,
                    attempt=workload.attempt,
                    state=AttemptState.LOST,
                    reason=f"node {name} was lost",
                    node_fault=f"node {name} was lost",
                    started_ns=0 if begun is None else begun.started_ns,
                    ended_ns=now_ns,
                )
            )
        return ended, due_ns

    def _find_lost(self, records: Mapping[str, NodeRecord], now_ns: int) -> tuple[LostGpus, list[int]]:
        """Returns the GPUs that are lost for longer than the grace, and when it ends for the others that hold work."""
        overdue, ends_ns = dict[str, list[str]](), list[int]()
        for name, record in records.items():
            for uuid in record.lost_gpus & record.gpu_milli.keys() if self._lost_gpu_grace_ns is not None else ():
                end_ns = record.gpus_lost_ns.get(uuid, 0) + (self._lost_gpu_grace_ns or 0)
                if end_ns <= now_ns:
                    overdue.setdefault(name, []).append(uuid)
                else:
                    ends_ns.append(end_ns)
        return overdue, ends_ns

    def _refresh_unit(self, unit: DrainUnit) -> DrainUnit | None:
        """Returns the unit with its workload as it is now; None if it has left."""
        workload = self._state.workloads.get(unit.workload.workload_id)
        if workload is None or not set(unit.placements) <= set(workload.placements):
            return None
        return unit._replace(workload=workload)


def _may_hold_units(record: NodeRecord) -> bool:
    """Returns whether anything is left on a node, or on GPUs of it, that are drained or lost; cheap."""
    if record.is_fenced or (record.cordon is not None and record.cordon.drain is not None):
        return bool(record.assignments)
    emptied = record.lost_gpus.union(uuid for uuid, one in record.gpu_cordons.items() if one.drain is not None)
    return not emptied.isdisjoint(record.gpu_milli)


def count_left(record: NodeRecord, gpu_uuid: str = "") -> int:
    """Returns how many workloads are still on a node, or on one GPU of it."""
    return len(
        {key for (key, _), assignment in record.assignments.items() if not gpu_uuid or gpu_uuid in assignment.gpu_uuids}
    )


def list_cordons(record: NodeRecord) -> Iterator[tuple[str, OperatorCordon]]:
    """Yields the cordons of a node: its own with an empty UUID, then those of its GPUs by UUID."""
    if record.cordon is not None:
        yield "", record.cordon
    for uuid in sorted(record.gpu_cordons):
        yield uuid, record.gpu_cordons[uuid]
