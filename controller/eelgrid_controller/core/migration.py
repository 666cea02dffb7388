"""Migration: checks recommended moves against the current state and turns them into events.

Owns the check and the order of the events. Must not know how moves were found (placement.migration_planner), and
applies nothing: the core does.

Theory: a recommendation is made from one revision and executed at a later one. So every move is tried, in order, on
copies of the allocations of the nodes that it touches, with both places held where the workload asks for that. The
first move that is no longer possible refuses all of them, by number and name, and nothing has changed. Each move
becomes one event, so that wherever a journal ends, every replica has one place. Replicas that an engine runs leave
their old place only when that engine moves them; until it reports so, what they use there counts as external usage,
from the same step as the move. If the engine could not make a move, it is undone (`is_back`): that count is
subtracted first.
"""

from collections.abc import Sequence
from dataclasses import replace

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import EXPLAINED_REPLICAS_MOST, NodeOccupied, WorkloadMoved
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord, make_assignment
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import Mobility, Move, ReplicaExplanation, WorkloadPhase


class MoveRefused(FailedPrecondition):
    """A recommended move is no longer possible; `number` counts from 1, `move` is the move."""

    def __init__(self, number: int, moves: Sequence[Move], problem: str) -> None:
        self.number = number
        self.move = moves[number - 1]
        first = self.move.replicas[0]
        super().__init__(
            f"move {number} of {len(moves)} ({self.move.workload_id} from {first.source.node_name} to "
            f"{first.target.node_name}) no longer holds: {problem}; nothing was moved, ask for new moves"
        )


def plan_migration(
    state: ClusterState, moves: Sequence[Move], *, now_ns: int, is_back: bool = False
) -> tuple[NodeOccupied | WorkloadMoved, ...]:
    """Returns the events of all moves in order; changes nothing. Raises MoveRefused."""
    ledgers: dict[str, NodeRecord] = {}
    before, events = _lingering(state, moves, now_ns, is_back=is_back), []
    if is_back:
        for event in before:
            ledgers[event.node_name] = state.nodes[event.node_name].copy()
            ledgers[event.node_name].others = event.others
    seen: set[tuple[str, int]] = set()
    for number, move in enumerate(moves, start=1):
        problem = _standing_problem(state, move, seen) or _room_problem(state, ledgers, move)
        if problem:
            raise MoveRefused(number, moves, problem)
        seen |= {(move.workload_id, item.source.replica) for item in move.replicas}
        events.append(
            WorkloadMoved(
                time_ns=now_ns,
                workload_id=move.workload_id,
                placements=tuple(item.target for item in move.replicas),
                explanation=tuple(
                    ReplicaExplanation(
                        replica=item.target.replica, candidates=item.candidates, feasible_nodes=1, removals=()
                    )
                    for item in move.replicas[:EXPLAINED_REPLICAS_MOST]
                ),
            )
        )
    return (*before, *events) if is_back else (*events, *before)


def _lingering(state: ClusterState, moves: Sequence[Move], now_ns: int, *, is_back: bool) -> list[NodeOccupied]:
    """Returns the external usage of each node on which an engine still runs replicas whose places have moved."""
    found: dict[str, ExternalUsage] = {}
    for move in moves:
        workload = state.workloads.get(move.workload_id)
        if workload is None or not workload.spec.required_traits:
            continue
        for item in move.replicas:
            name = (item.target if is_back else item.source).node_name
            record = state.nodes.get(name)
            if record is not None and item.source.node_name != item.target.node_name:
                others = found.get(name, record.others)
                found[name] = (others.subtract if is_back else others.add)(workload.spec.request)
    return [NodeOccupied(time_ns=now_ns, node_name=name, others=others) for name, others in found.items()]


def _standing_problem(state: ClusterState, move: Move, seen: set[tuple[str, int]]) -> str:
    """Returns why the replicas cannot be moved from their recorded places; empty if they can."""
    workload = state.workloads.get(move.workload_id)
    if workload is None or workload.phase is not WorkloadPhase.PLACED:
        return "the workload does not run"
    if workload.spec.mobility is Mobility.FIXED:
        return "the workload is fixed"
    places = {placement.replica: placement for placement in workload.placements}
    for item in move.replicas:
        replica = item.source.replica
        if item.target.replica != replica or (move.workload_id, replica) in seen:
            return f"replica {replica} is moved twice"
        if places.get(replica) != item.source:
            return f"replica {replica} stands elsewhere"
        if len(item.target.gpu_uuids) != len(item.source.gpu_uuids):
            return f"replica {replica} is given another number of GPUs"
    return ""


def _room_problem(state: ClusterState, ledgers: dict[str, NodeRecord], move: Move) -> str:
    """Tries the move on the copies in `ledgers` and updates them; returns why it is impossible, empty if it is not."""
    workload = state.workloads[move.workload_id]
    is_released_first = workload.spec.mobility is Mobility.RESTARTABLE
    names = {place.node_name for item in move.replicas for place in (item.source, item.target)}
    for name in names - ledgers.keys():
        record = state.nodes.get(name)
        if record is None:
            return f"node {name} is gone"
        ledgers[name] = record.copy()

    def release() -> None:
        for item in move.replicas:
            ledgers[item.source.node_name].release(move.workload_id, item.source.replica)

    # Under a temporary key, since both places of a replica may be on one node.
    beside = [
        (item.target.node_name, replace(make_assignment(workload, item.target), workload_id=f" {move.workload_id}"))
        for item in move.replicas
    ]
    try:
        if is_released_first:
            release()
        for name, assignment in beside:
            ledgers[name].allocate(assignment)
    except ContradictoryEvent as error:
        return str(error).partition(": ")[2]
    if not is_released_first:
        release()
    for name, assignment in beside:
        ledgers[name].release(assignment.workload_id, assignment.replica)
        ledgers[name].allocate_unchecked(replace(assignment, workload_id=move.workload_id))
    return ""
