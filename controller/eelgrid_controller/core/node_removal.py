"""Node removal: what happens to the work on a node that is gone for good, and which lost nodes to forget.

Owns both as events and names. Must not know agents or clocks, and applies nothing: the core does.

Theory. A node that is lost may come back, and its work may still run; so it is kept, and its replicas stay
placed. Only an operator can know that it never returns, and says so by force: services go on with the
replicas that they have elsewhere, and any other workload with a replica there ends, since a gang without a
member does not run. A lost node that holds nothing is forgotten after a while, and where the number of nodes
is exhausted the one that is lost for longest makes room.
"""

from collections.abc import Iterable, Iterator
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    REMOVED_MOST,
    Event,
    NodesRemoved,
    PartitionsPlanned,
    SlicedService,
    WorkloadCancelled,
    WorkloadScaled,
)
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.replica_changes import is_sliced
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import NodeState, Workload, WorkloadKind

_SHOWN_MOST = 3


class NodeRemoval(NamedTuple):
    """What removing a node does: the events in order, the workloads that end, and those that go on elsewhere."""

    events: tuple[Event, ...]
    ended: tuple[str, ...] = ()
    shrunk: tuple[str, ...] = ()


def plan_node_removal(
    state: ClusterState, record: NodeRecord, *, force: bool, is_connected: bool, now_ns: int
) -> NodeRemoval:
    """The events after which a node is forgotten; raises FailedPrecondition where it is in use, unless forced."""
    name = record.inventory.node_name
    if is_connected and not force:
        raise FailedPrecondition(
            f"the agent of node {name} is connected; stop it first, or force it, and the node comes back with its agent"
        )
    keys = tuple(dict.fromkeys(key for key, _ in record.assignments))
    if keys and not force:
        shown = ", ".join(keys[:_SHOWN_MOST]) + (", ..." if len(keys) > _SHOWN_MOST else "")
        raise FailedPrecondition(
            f"node {name} holds {len(keys)} workloads ({shown}); cancel or move them, or force it: services then go on "
            "elsewhere and everything else on it ends"
        )
    events: list[Event] = []
    ended: list[str] = []
    shrunk: list[str] = []
    for key in keys:
        event = _without(state.workloads[key], name, now_ns)
        events.append(event)
        (ended if isinstance(event, WorkloadCancelled) else shrunk).append(key)
    removed = NodesRemoved(time_ns=now_ns, node_names=(name,), reason="forced by an operator" if keys else "operator")
    return NodeRemoval((*events, removed), tuple(ended), tuple(shrunk))


def _without(workload: Workload, node_name: str, now_ns: int) -> Event:
    """The event after which a workload has nothing on a node."""
    key = workload.workload_id
    left = tuple(item for item in workload.placements if item.node_name != node_name)
    if not left or workload.spec.kind is not WorkloadKind.INFERENCE_SERVICE:
        return WorkloadCancelled(time_ns=now_ns, workload_id=key)
    if is_sliced(workload):
        return PartitionsPlanned(time_ns=now_ns, services=(SlicedService(workload_id=key, placements=left),))
    gone = tuple(item.replica for item in workload.placements if item.node_name == node_name)
    return WorkloadScaled(time_ns=now_ns, workload_id=key, released=gone)


def _empty_lost(state: ClusterState) -> Iterator[tuple[int, str]]:
    """Lost nodes that hold nothing, with the time since when they are lost; 0 where that is not known."""
    for name, record in state.nodes.items():
        if _is_forgettable(record):
            yield record.lost_ns, name


def _is_forgettable(record: NodeRecord) -> bool:
    return record.state is NodeState.LOST and not record.assignments


def select_forgettable_nodes(state: ClusterState, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names that are lost nodes that hold nothing, REMOVED_MOST at most."""
    found = (name for name in names if (record := state.nodes.get(name)) is not None and _is_forgettable(record))
    return tuple(islice(found, REMOVED_MOST))


def select_longest_lost_nodes(state: ClusterState, count: int = REMOVED_MOST) -> tuple[tuple[int, str], ...]:
    """So many lost nodes that hold nothing, each with the time since when; those lost for longest first."""
    return tuple(nsmallest(min(count, REMOVED_MOST), _empty_lost(state)))
