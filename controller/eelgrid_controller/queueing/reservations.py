"""Reservations of nodes by operators: which nodes are closed to a workload because of them, and when they change.

Pure functions of the policy, the nodes and a workload. Must not know how places are searched, nor the reservations in time
that the queue makes for work that waits (backfill.py).

A node is closed to a workload if a reservation of it overlaps the time for which the workload is expected to run, unless
the reservation is for its user or its queue and has begun: those whom it is for start within it. Work of which nothing is
known starts on no node that is reserved within the lead, a day: it may run on into the reservation if it started
before. What runs there already stays.

A reservation of a number of GPUs is one of whole nodes that `choose_nodes` finds: those of which the fewest GPUs are closed
beyond that number. Only GPUs that are free by its start count, by the expected ends of running work, on nodes that neither
another reservation nor a kept start needs within its span.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from eelgrid_controller.queueing.backfill import EstimatedEnds, ReservedStart, project_record
from eelgrid_controller.queueing.runtime_estimates import estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.queue_usage import resolve_queue, resolve_user
from eelgrid_protos.messages import Gpu, Reservation, Workload, resolve_pool

# From so long before a reservation on, work of which nothing is known is not placed on its nodes.
RESERVATION_LEAD_NS = 24 * 3600 * 1_000_000_000
OPEN: frozenset[str] = frozenset()


def list_reserved_nodes(reservation: Reservation, nodes: Mapping[str, NodeRecord]) -> frozenset[str]:
    """Returns the nodes that a reservation holds, of those that have joined."""
    if reservation.pool:
        pool = resolve_pool(reservation.pool)
        return frozenset(name for name, one in nodes.items() if resolve_pool(one.inventory.pool) == pool)
    return frozenset(name for name in reservation.node_names if name in nodes)


def is_reserved_for(state: ClusterState, reservation: Reservation, workload: Workload) -> bool:
    """Returns whether a workload may start within a reservation."""
    if reservation.maintenance:
        return False
    if reservation.users and resolve_user(workload) not in reservation.users:
        return False
    queue = resolve_queue(state.policy.queues, workload.spec.queue) or workload.spec.queue
    return not reservation.queue or queue == reservation.queue


def list_closing_reservations(state: ClusterState, workload: Workload, start_ns: int) -> Iterator[Reservation]:
    """Yields the reservations that a workload may not start among at a time; those that it may start in are not."""
    reservations = state.policy.reservations
    if not reservations:
        return
    estimate = estimate_runtime(workload, state)
    end_ns = start_ns + (RESERVATION_LEAD_NS if estimate is None else int(estimate.expected_s * 1e9))
    for one in reservations:
        if one.end_ns <= start_ns or one.start_ns >= end_ns:
            continue
        if one.start_ns <= start_ns and is_reserved_for(state, one, workload):
            continue
        yield one


def list_closed_nodes(state: ClusterState, workload: Workload, start_ns: int) -> frozenset[str]:
    """Returns the nodes on which reservations let a workload not start at a time."""
    if not state.policy.reservations:
        return OPEN
    found = (list_reserved_nodes(one, state.nodes) for one in list_closing_reservations(state, workload, start_ns))
    return frozenset(chain.from_iterable(found))


def list_held_nodes(state: ClusterState, now_ns: int) -> frozenset[str]:
    """Returns the nodes onto which no running work is to be moved: a reservation of them has begun, or begins within the lead."""
    soon = (one for one in state.policy.reservations if one.start_ns < now_ns + RESERVATION_LEAD_NS)
    return OPEN.union(*(list_reserved_nodes(one, state.nodes) for one in soon if one.end_ns > now_ns))


def list_boundaries(reservations: tuple[Reservation, ...]) -> list[int]:
    """Returns the times at which reservations begin or end, in order."""
    return sorted({time_ns for one in reservations for time_ns in (one.start_ns, one.end_ns)})


class NodeOffer(NamedTuple):
    """How many GPUs a node has for a reservation, and how many it closes to other work."""

    node_name: str
    free: int
    closed: int


def list_offers(
    state: ClusterState,
    ends: EstimatedEnds,
    kept: Sequence[ReservedStart],
    wanted: Reservation,
    *,
    others: Sequence[Reservation],
    now_ns: int,
) -> list[NodeOffer]:
    """Lists the nodes that have GPUs for a reservation of a number of them, beside kept starts and other reservations."""
    taken = {
        name
        for one in others
        if one.start_ns < wanted.end_ns and one.end_ns > max(now_ns, wanted.start_ns)
        for name in list_reserved_nodes(one, state.nodes)
    }
    taken |= {
        name for one in kept if one.start_ns < wanted.end_ns and one.end_ns > wanted.start_ns for name in one.places
    }
    found = []
    for name, node in state.nodes.items():
        if name in taken or not node.is_schedulable:
            continue
        record = project_record(node, ends, max(now_ns, wanted.start_ns), now_ns)
        free = _list_free_gpus(record, wanted, record.gpu_milli.keys())
        if free:
            found.append(NodeOffer(name, len(free), len(record.inventory.gpus)))
    return found


def _list_free_gpus(record: NodeRecord, wanted: Reservation, held: Collection[str]) -> list[Gpu]:
    """Lists the GPUs of a node that a reservation could have, without those that work holds."""
    gone = record.externally_used_gpus() | record.lost_gpus
    return [
        gpu
        for gpu in record.inventory.gpus
        if gpu.uuid not in held
        and gpu.uuid not in gone
        and (not wanted.gpu_models or gpu.model in wanted.gpu_models)
        and not (record.gpu_cordon_reason(gpu) or gpu.mig_enabled or record.is_partition_managed(gpu))
    ]


def count_usable_gpus(
    state: ClusterState, ends: EstimatedEnds, reservation: Reservation, node_name: str, *, now_ns: int
) -> int:
    """Returns how many GPUs of a node a reservation has from its start on: those count that work holds which it is for."""
    record = project_record(state.nodes[node_name], ends, max(now_ns, reservation.start_ns), now_ns)
    held = {
        uuid
        for (key, _), assignment in record.assignments.items()
        if not is_reserved_for(state, reservation, state.workloads[key])
        for uuid in assignment.gpu_uuids
    }
    return len(_list_free_gpus(record, reservation, held))


def choose_nodes(offers: Sequence[NodeOffer], gpus: int) -> tuple[str, ...]:
    """Chooses nodes that have so many GPUs together and close few beyond them; empty if all have too few.

    None of the chosen could be left out. The last is the one that closes the fewest GPUs of those that would do.
    """
    if sum(one.free for one in offers) < gpus:
        return ()
    ordered = sorted(offers, key=lambda one: (one.closed - one.free, -one.free, one.node_name))
    chosen: list[NodeOffer] = []
    left = gpus
    while left > 0:
        whole = next((one for one in ordered if one.free <= left), None)
        # Of what is more than needed, the smallest; of what is not, the one that wastes least.
        enough = min(
            (one for one in ordered if one.free >= left), key=lambda one: (one.closed, one.node_name), default=None
        )
        one = enough if whole is None or (enough is not None and enough.closed <= left) else whole
        assert one is not None
        chosen.append(one)
        ordered.remove(one)
        left -= one.free
    for one in sorted(chosen, key=lambda found: (-found.closed, found.node_name)):
        if sum(other.free for other in chosen) - one.free >= gpus:
            chosen.remove(one)
    return tuple(sorted(one.node_name for one in chosen))
