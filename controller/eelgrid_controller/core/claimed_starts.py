"""Claimed starts: work that a node's agent holds, of which the journal has lost the start.

Theory. While starts are withheld (state/journal_losses.py), what an agent holds and this journal does not have there was
started by entries that are lost. If the agent holds all of a workload by the attempt that would be its next, that start is
made up for, and the work runs on. The journal may have the work as waiting; or in its attempt before, which has ended if the
agents of its nodes hold it no more, as they say themselves: no node takes work that runs elsewhere, or at any other time.
Anything that is not as the next start would have made it is left to an operator. Must not know how claims arrive.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadEvicted, WorkloadPlaced
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord, is_sliced, make_assignment
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.messages import Assignment, Placement, Workload, WorkloadPhase


class ClaimedStarts(NamedTuple):
    """The starts that are made up for, each after the end of the attempt before, and what stays unknown of a claim."""

    events: tuple[WorkloadEvicted | WorkloadPlaced, ...]
    unknown: tuple[Assignment, ...]


def _find_unknown_runs(state: ClusterState, record: NodeRecord, held: Sequence[Assignment]) -> tuple[Assignment, ...]:
    """Returns those of an agent's assignments that are not in this journal, or by another attempt."""
    places = frozenset(map(id, record.find_unknown_assignments(held)))
    return tuple(item for item in held if id(item) in places or _is_other_attempt(state, item))


def _is_other_attempt(state: ClusterState, item: Assignment) -> bool:
    workload = state.workloads.get(item.workload_id)
    return workload is not None and workload.spec.process is not None and item.attempt != workload.attempt


def plan_claimed_starts(
    state: ClusterState,
    record: NodeRecord,
    held: Sequence[Assignment],
    is_unheld: Callable[[Workload], bool],
    *,
    now_ns: int,
) -> ClaimedStarts:
    """Returns the starts of work that the node's agent holds as a whole; `is_unheld` says whether the attempt before is over.

    `held` are all assignments of the agent.
    """
    unknown = _find_unknown_runs(state, record, held)
    by_workload: dict[str, list[Assignment]] = {}
    for item in unknown:
        by_workload.setdefault(item.workload_id, []).append(item)
    index_of = {gpu.uuid: gpu.index for gpu in record.inventory.gpus}
    node, events = record, list[WorkloadEvicted | WorkloadPlaced]()
    for key, items in by_workload.items():
        workload = state.workloads.get(key)
        items.sort(key=lambda item: item.replica)
        is_here = all(uuid in index_of for item in items for uuid in item.gpu_uuids)
        if workload is None or not is_here:
            continue
        if not (
            may_have_started(state, workload, record.inventory.node_name)
            or (_may_have_gone_on(workload) and is_unheld(workload))
        ):
            continue
        placements = tuple(
            Placement(
                replica=item.replica,
                node_name=record.inventory.node_name,
                gpu_uuids=item.gpu_uuids,
                gpu_indexes=tuple(index_of[uuid] for uuid in item.gpu_uuids),
            )
            for item in items
        )
        is_whole = [item.replica for item in items] == list(range(workload.spec.replicas))
        is_next = all(map(partial(_is_next_start, workload), placements, items))
        after = _allocate(node, workload, placements) if is_whole and is_next else None
        if after is None:
            continue
        node = after
        if workload.phase is WorkloadPhase.PLACED:
            reason = PendingConstraint.EVICTED.describe("gone_on", node=f"node {record.inventory.node_name}")
            events.append(WorkloadEvicted(time_ns=now_ns, workload_id=key, reason=reason))
        events.append(WorkloadPlaced(time_ns=now_ns, workload_id=key, placements=placements))
    begun = {one.workload_id for one in events}
    return ClaimedStarts(tuple(events), tuple(item for item in unknown if item.workload_id not in begun))


def may_have_started(state: ClusterState, workload: Workload, node_name: str = "") -> bool:
    """Returns whether entries that are lost may have started a workload as it is, on this node if one is named.

    It waits for capacity alone, or is known to run on that node; one that waits for another attempt met all other
    conditions before its first.
    """
    key = workload.workload_id
    if key not in state.pending or key in state.nominations or not _is_single(workload):
        return False
    runs_on = state.losses.nodes_ahead.get(key)
    if not state.pending.is_parked(key):
        return True
    is_tried = workload.attempt > 0 and workload.spec.array is None
    return not workload.held_by and (runs_on == (node_name,) if runs_on else is_tried)


def _may_have_gone_on(workload: Workload) -> bool:
    """Returns whether entries that are lost may have ended the attempt of a workload that is placed, and begun the next."""
    is_running = workload.phase is WorkloadPhase.PLACED and workload.spec.process is not None
    return is_running and not workload.stopping_ns and _is_single(workload)


def _is_single(workload: Workload) -> bool:
    """Returns whether entries that start a workload decide nothing but its places; not so of elastic jobs and gangs."""
    return workload.share is None and workload.spec.gang is None and not is_sliced(workload)


def _is_next_start(workload: Workload, placement: Placement, held: Assignment) -> bool:
    """Returns whether an agent's assignment is what the next start of a workload would give it at a place."""
    wanted = make_assignment(workload, placement)
    if workload.spec.process is not None:
        wanted = replace(wanted, attempt=workload.attempt + 1, replicas=workload.spec.replicas, run_as=workload.owner)
    if len(held.gpu_uuids) != workload.spec.request.gpu_count:
        return False
    # What it is told of checkpoints changes.
    return replace(held, process=None, checkpoint_interval_s=0.0, interrupted_every_s=0.0) == wanted


def _allocate(node: NodeRecord, workload: Workload, placements: Sequence[Placement]) -> NodeRecord | None:
    """Allocates a workload on a copy of a node, without what it holds there now; None if that is impossible."""
    twin = node.copy_without((workload.workload_id,))
    twin.ahead = None
    try:
        for placement in placements:
            twin.allocate(make_assignment(workload, placement))
    except ContradictoryEvent:
        return None
    return twin
