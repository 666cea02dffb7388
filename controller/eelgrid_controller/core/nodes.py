"""Changes to a node as events: removal, device correction, and comparison of an agent's claim with the journal.

Each `plan_*` function checks a request against the node allocations and returns the event or events; the core applies
them. Must not know agents' streams or engines.

Removal. A node that is lost may come back, and its work may still run; so it is kept, and its replicas stay placed.
Only an operator can know that it never returns, and says so by force: services continue with the replicas that they
have elsewhere, and any other workload with a replica there ends, since a gang without a member does not run. A lost
node that holds nothing and is not cordoned is removed after a while, and where the number of nodes is exhausted the one that has been
lost for longest makes room.

Device correction. On a node whose devices a kubelet assigns, a plan is only a request. The devices that a replica
really holds count: for its power limit, its energy and for what may be placed next. So a report is accepted as a
whole, since two replicas may have swapped devices; it is refused only where it contradicts other allocations. A node
that was described by its engine alone has device names made up from their indexes; when its agent joins, replicas are
renamed to the real devices at the same indexes in the same step: in between, the real ones would appear free.

Comparison of a claim. After a controller's start each node is doubted: its agent may hold work that the journal lost, and
an epoch tells only as long as nothing else was placed there. So a doubted node takes nothing and gets no plan until its
agent has spoken, and an opening alone is no such word: one that has waited in a stopped process says what the agent held
then. As in TCP's handshake, where an old SYN may arrive late, only an answer to what this controller said (Welcome) shows
that the other side is there and has said this. What an opening claims about a doubted node is therefore compared when
the agent has answered (`may_be_old`, `confirm_claim` of the core).

Where a loss is known of, starts that entries must have had which are lost are made up for first (core/claimed_starts.py).
Anything else that is unknown keeps the node ahead of the journal, and what is named there from starting elsewhere
(queueing.job_conditions).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from eelgrid_controller.core.claimed_starts import ClaimedStarts
from eelgrid_controller.errors import LostEntries
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import UNREPORTED_USAGE
from eelgrid_controller.state.events import (
    REMOVED_MOST,
    CorrectedReplica,
    DevicesCorrected,
    Event,
    NodeJoined,
    NodeOccupied,
    NodesRemoved,
    PartitionsPlanned,
    SlicedService,
    WorkloadCancelled,
    WorkloadScaled,
)
from eelgrid_controller.state.node_allocations import (
    AheadOfJournal,
    ContradictoryEvent,
    NodeRecord,
    apply_device_correction,
    is_sliced,
)
from eelgrid_controller.state.takeover_events import (
    ControllerStarted,
    JournalRolledBack,
    NodeAhead,
    NodeHeard,
    NodeReconciled,
    StartsResumed,
)
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, ResourceExhausted
from eelgrid_protos.messages import (
    UNKNOWN_WORKLOADS_MOST,
    Assignment,
    Inventory,
    NodeState,
    Placement,
    Workload,
    WorkloadKind,
)

_SHOWN_MOST = 3

# A thousand plans a second for nine thousand years: an agent cannot hold a higher epoch than this from any controller.
REPORTED_EPOCH_MOST = 2**48


class NodeRemoval(NamedTuple):
    """Result of removing a node: the events in order, the workloads that end, and those that continue elsewhere."""

    events: tuple[Event, ...]
    ended: tuple[str, ...] = ()
    shrunk: tuple[str, ...] = ()


def plan_node_removal(
    state: ClusterState, record: NodeRecord, *, force: bool, is_connected: bool, now_ns: int
) -> NodeRemoval:
    """Returns the events that remove a node; raises FailedPrecondition if it is in use, unless forced."""
    name = record.inventory.node_name
    if is_connected and not force:
        raise FailedPrecondition(
            f"the agent of node {name} is connected; stop it first, or force it, and the node comes back with its agent"
        )
    keys = tuple(dict.fromkeys(key for key, _ in record.assignments))
    if keys and not force:
        shown = ", ".join(keys[:_SHOWN_MOST]) + (", ..." if len(keys) > _SHOWN_MOST else "")
        raise FailedPrecondition(
            f"node {name} holds {len(keys)} workload{'' if len(keys) == 1 else 's'} ({shown}); cancel or move them, or force it: services then go on "
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
    """Returns the event after which a workload holds nothing on a node."""
    key = workload.workload_id
    left = tuple(item for item in workload.placements if item.node_name != node_name)
    if not left or workload.spec.kind is not WorkloadKind.INFERENCE_SERVICE:
        return WorkloadCancelled(time_ns=now_ns, workload_id=key)
    if is_sliced(workload):
        return PartitionsPlanned(time_ns=now_ns, services=(SlicedService(workload_id=key, placements=left),))
    gone = tuple(item.replica for item in workload.placements if item.node_name == node_name)
    return WorkloadScaled(time_ns=now_ns, workload_id=key, released=gone)


def _is_forgettable(record: NodeRecord) -> bool:
    """Returns whether a lost node may be removed on its own: a cordon must be there when the node returns."""
    is_cordoned = record.cordon is not None or record.gpu_cordons
    return record.state is NodeState.LOST and not record.assignments and not is_cordoned


def select_forgettable_nodes(state: ClusterState, names: Iterable[str]) -> tuple[str, ...]:
    """Selects the names of lost nodes that hold nothing, at most REMOVED_MOST."""
    found = (name for name in names if (record := state.nodes.get(name)) is not None and _is_forgettable(record))
    return tuple(islice(found, REMOVED_MOST))


def select_longest_lost_nodes(state: ClusterState, count: int = REMOVED_MOST) -> tuple[tuple[int, str], ...]:
    """Selects `count` lost nodes that hold nothing, each with the time when it was lost (0 if unknown), oldest first."""
    found = ((record.lost_ns, name) for name, record in state.nodes.items() if _is_forgettable(record))
    return tuple(nsmallest(min(count, REMOVED_MOST), found))


class WithdrawnPlans:
    """Remembers the highest plan epoch of writes that failed for their callers, until the journal has it.

    Such a write may have been stored, and is removed by the next one. If its epochs were given again, with other
    content, and then a standby was promoted that still has the removed write, an agent's epoch would not tell which of
    the two plans it holds. So the next write begins with an event after which all epochs are higher.
    """

    def __init__(self) -> None:
        self.plan_epoch = 0

    def record_failure(self, failed: ClusterState, recovered: ClusterState) -> None:
        """Records the epochs of a state that was given up for the one before the write."""
        known = recovered.nodes
        raised = (
            record.plan_epoch
            for name, record in failed.nodes.items()
            if name not in known or record.plan_epoch > known[name].plan_epoch
        )
        self.plan_epoch = max(self.plan_epoch, *raised, 0)

    def record_commit(self, plan_epoch: int) -> None:
        """Records that the journal has the event for epochs up to this one."""
        if plan_epoch >= self.plan_epoch:
            self.plan_epoch = 0


def plan_controller_start(
    state: ClusterState, lost: LostEntries | None, *, timeline: int, asks_agents: bool, now_ns: int
) -> tuple[Event, ...]:
    """Returns the events of a controller's start; `lost` are entries that an operator accepted as gone.

    An empty journal has lost nothing, whatever `timeline` of its database it began on.
    """
    events: list[Event] = []
    if lost is not None:
        events.append(JournalRolledBack(time_ns=now_ns, first=lost.first, last=lost.last))
    has_lost = lost is not None or (state.revision > 0 and state.losses.is_replaced_by(timeline))
    has_agents = any(record.inventory.agent_version for record in state.nodes.values())
    if asks_agents and (has_agents or has_lost or timeline > state.losses.timeline):
        events.append(ControllerStarted(time_ns=now_ns, timeline=timeline, withholds_starts=has_lost))
    return tuple(events)


def plan_starts_resumption(state: ClusterState, *, awaits_agents: bool, now_ns: int) -> tuple[Event, ...]:
    """Returns the event after which withheld work starts; none while one of a ready node was not heard if it `awaits_agents`."""
    if not state.losses.withholds_starts or (awaits_agents and state.awaits_known_agents):
        return ()
    return (StartsResumed(time_ns=now_ns),)


def plan_unreported_usage(state: ClusterState, *, now_ns: int) -> tuple[Event, ...]:
    """Returns the events that close every node until its engine has reported again what runs there."""
    return tuple(
        NodeOccupied(time_ns=now_ns, node_name=name, others=replace(record.others, closed=UNREPORTED_USAGE.closed))
        for name, record in state.nodes.items()
        if record.others.closed != UNREPORTED_USAGE.closed
    )


class CorrectionRefused(FailedPrecondition):
    """The reported devices contradict other allocations."""


def plan_device_correction(
    state: ClusterState, record: NodeRecord, held: Mapping[tuple[str, int], tuple[str, ...]], *, now_ns: int
) -> DevicesCorrected | None:
    """Returns the event that gives replicas the GPUs that they really hold, None if the journal has them already.

    `held` has GPU UUIDs by workload and replica. Raises CorrectionRefused.
    """
    node_name = record.inventory.node_name
    index_of = {gpu.uuid: gpu.index for gpu in record.inventory.gpus}
    found = []
    for (workload_id, replica), uuids in sorted(held.items()):
        assignment = record.assignments.get((workload_id, replica))
        if assignment is None:
            raise CorrectionRefused(f"replica {replica} of {workload_id} is not on {node_name}; look again")
        strange = [uuid for uuid in uuids if uuid not in index_of]
        if strange:
            raise CorrectionRefused(f"{node_name} has no GPU {strange[0]}; wait for its inventory")
        if set(uuids) == set(assignment.gpu_uuids):
            continue
        found.append((assignment, sorted((index_of[uuid], uuid) for uuid in uuids)))
    try:
        return _correct_replicas(state, record, found, now_ns)
    except ContradictoryEvent as error:
        raise CorrectionRefused(f"{error}; nothing was corrected") from error


def _correct_replicas(
    state: ClusterState, record: NodeRecord, found: Sequence[tuple[Assignment, list[tuple[int, str]]]], now_ns: int
) -> DevicesCorrected | None:
    """Returns the event that gives replicas other GPUs, by index and UUID, tried on a copy; raises ContradictoryEvent."""
    if not found:
        return None
    name = record.inventory.node_name
    replicas = tuple(
        CorrectedReplica(
            workload_id=assignment.workload_id,
            placement=Placement(
                replica=assignment.replica,
                node_name=name,
                gpu_uuids=tuple(uuid for _, uuid in gpus),
                gpu_indexes=tuple(index for index, _ in gpus),
            ),
        )
        for assignment, gpus in found
    )
    event = DevicesCorrected(time_ns=now_ns, node_name=name, replicas=replicas)
    apply_device_correction(state.workloads, record.copy(), event)
    return event


def plan_device_renaming(
    state: ClusterState, record: NodeRecord, before: Inventory, *, now_ns: int
) -> tuple[DevicesCorrected, ...]:
    """Returns the event that renames made-up devices to the real ones at the same indexes, if there are any.

    `record` has the agent's inventory already. A replica whose devices are not all present keeps what it held.
    """
    inventory = record.inventory
    if before.agent_version or not inventory.agent_version:
        return ()
    index_of = {gpu.uuid: gpu.index for gpu in before.gpus}
    uuid_at = {gpu.index: gpu.uuid for gpu in inventory.gpus if not gpu.mig_enabled and gpu.uuid not in record.layouts}
    found = []
    for _, assignment in sorted(record.assignments.items()):
        indexes = [index_of.get(uuid) for uuid in assignment.gpu_uuids]
        gpus = [(index, uuid_at[index]) for index in indexes if index in uuid_at]
        if assignment.gpu_instance is None and gpus and len(gpus) == len(indexes):
            found.append((assignment, gpus))
    try:
        renamed = _correct_replicas(state, record, found, now_ns)
    except ContradictoryEvent:
        return ()
    return () if renamed is None else (renamed,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanClaim:
    """The epoch of the plan that an agent holds, and the assignments under it, None if unknown."""

    epoch: int
    held: tuple[Assignment, ...] | None


def plan_registration(
    state: ClusterState,
    inventory: Inventory,
    plan_epoch: int,
    claim: PlanClaim | None,
    *,
    is_doubted: bool,
    now_ns: int,
) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Returns the event with which a node joins, if it is new, changed or back, and those of the comparison of its claim.

    A new one is doubted if `is_doubted`, and its agent makes a claim.
    """
    record = state.nodes.get(inventory.node_name)
    doubts_new = record is None and is_doubted and claim is not None
    is_due = doubts_new or may_be_old(record, claim)
    joined = NodeJoined(time_ns=now_ns, inventory=inventory, plan_epoch=plan_epoch, is_doubted=doubts_new)
    compared = () if is_due else compare_claim(state, inventory.node_name, claim, now_ns=now_ns)
    if record is None or (plan_epoch > record.plan_epoch and not is_due):
        return (joined,), compared
    if record.matches_inventory(inventory):
        return (), compared
    return (replace(joined, plan_epoch=0) if is_due else joined,), compared


def may_be_old(record: NodeRecord | None, claim: PlanClaim | None) -> bool:
    """Returns whether a claim is to be compared only when its agent has answered Welcome; see the module."""
    return claim is not None and record is not None and not record.is_reported


def compare_claim(
    state: ClusterState,
    node_name: str,
    claim: PlanClaim | None,
    starts: ClaimedStarts | None = None,
    *,
    now_ns: int,
) -> tuple[Event, ...]:
    """Compares an agent's claim with the journal, which may not know the node; returns the events that follow.

    Without a claim an engine lists what runs there, and nothing is compared. `starts` are those that lost entries must have
    had, where a loss is known of.
    """
    record = state.nodes.get(node_name)
    ahead = None if record is None else record.ahead
    is_doubted = record is not None and not record.is_reported
    heard = (NodeHeard(time_ns=now_ns, node_name=node_name),) if is_doubted else ()
    if claim is None:
        return heard
    is_of_journal = claim.epoch <= known_epoch(record) and (ahead is None or claim.epoch < ahead.plan_epoch)
    # An older plan may well have what has ended since; of two under one epoch, one was given on a database that has been replaced.
    if is_of_journal and (record is None or claim.epoch != record.plan_epoch):
        return heard
    begun: tuple[Event, ...] = ()
    unknown = claim.held
    if starts is not None:
        begun, unknown = starts
    elif record is not None and claim.held is not None:
        unknown = record.find_unknown_assignments(claim.held)
    if is_of_journal and not (unknown or begun):
        return heard
    reconciled = NodeReconciled(time_ns=now_ns, node_name=node_name, plan_epoch=claim.epoch)
    if unknown is not None and not unknown:
        return () if record is None else (reconciled, *begun)
    count = None if unknown is None else len(unknown)
    ids = tuple(dict.fromkeys(item.workload_id for item in unknown or ()))[:UNKNOWN_WORKLOADS_MOST]
    if ahead == AheadOfJournal(plan_epoch=claim.epoch, assignments=count, workload_ids=ids) and not begun:
        return heard
    found = NodeAhead(time_ns=now_ns, node_name=node_name, plan_epoch=claim.epoch, assignments=count, workload_ids=ids)
    # Nothing starts on a node that is ahead.
    return (reconciled, *begun, found) if begun and ahead is not None else (*begun, found)


def plan_reconciliation(record: NodeRecord, *, now_ns: int) -> NodeReconciled:
    """Returns the event that releases what a node holds beyond the journal.

    Raises FailedPrecondition while the node is doubted: its agent may hold more by now than an operator has seen; and while
    starts are withheld, since what it holds may be taken over yet.
    """
    assert record.ahead is not None
    name = record.inventory.node_name
    if record.withheld:
        raise FailedPrecondition(
            f"agents still tell what has ended, by which {name} may be found to run what it should; wait until work starts "
            "again (eelgrid_starts_withheld is 0), and look then"
        )
    if not record.is_reported:
        raise FailedPrecondition(
            f"the agent of {name} has not reported since the controller started, and may hold more than what is shown; "
            f"wait until it is back (`eelctl nodes`), or remove the node with `eelctl node remove {name} --force`"
        )
    return NodeReconciled(time_ns=now_ns, node_name=name, plan_epoch=record.ahead.plan_epoch)


def known_epoch(record: NodeRecord | None) -> int:
    """Returns the highest plan epoch that this journal can have sent to the node."""
    if record is None:
        return 0
    return record.plan_epoch if record.doubted_epoch is None else record.doubted_epoch


def plan_room_for_node(state: ClusterState, nodes_most: int, *, now_ns: int) -> tuple[Event, ...]:
    """Returns the event that removes the longest lost, empty nodes if so many are registered; raises ResourceExhausted."""
    if len(state.nodes) < nodes_most:
        return ()
    names = tuple(name for _, name in select_longest_lost_nodes(state, max(1, nodes_most // 100)))
    if not names:
        raise ResourceExhausted(
            f"{nodes_most} nodes are registered, which is the limit of one controller, and none of them is "
            "lost and empty; remove some with `eelctl node remove`"
        )
    return (NodesRemoved(time_ns=now_ns, node_names=names, reason="made room for nodes that are there"),)


def check_plan_epoch(state: ClusterState, node_name: str, plan_epoch: int) -> None:
    """Checks a plan epoch; raises InvalidArgument for one that no controller can have sent."""
    record = state.nodes.get(node_name)
    most = max(REPORTED_EPOCH_MOST, record.plan_epoch if record else 0)
    if plan_epoch > most:
        remedy = "remove the plan that the agent keeps in its state directory, and start it again"
        violation = Violation("hello.plan_epoch", f"is {plan_epoch}, and plans went no further than {most}", remedy)
        raise InvalidArgument(f"node {node_name} says that it holds a plan that nobody made", (violation,))
