"""Node allocations: what one node has, what is allocated on it and to which workloads, and how events change that.

`NodeRecord` owns the rule that nothing is allocated twice: `allocate` checks before it books, and
`reallocate_replicas` moves a workload from some places to others or leaves everything as it was. The `apply_*`
functions return a placed workload as it is after a move, a scaling, a device correction or a partition plan, and
raise ContradictoryEvent for what such an event may not do. Neither knows why something was placed; only
`ClusterState.apply` changes state with them.

GPUs with a MIG layout, and those that can be partitioned on a partitioned node, belong to the partition
planner: nothing else is allocated there. A slice of a layout is held by one replica. A device that vanished,
from the inventory or by a fault, keeps its allocations, takes nothing new, and is whole again when the same
UUID returns.

An operator's cordon is no contradiction: an engine may report work that it runs on a cordoned node, and undo a move
from one. So `allocate` does not refuse it; those who choose places do, by `cordon_reason`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple, Self

from eelgrid_controller.state.cordons import DrainTerms, OperatorCordon, dump_cordon, load_cordons
from eelgrid_controller.state.engine_reports import NO_EXTERNAL_USAGE, ExternalUsage
from eelgrid_controller.state.events import (
    DevicesCorrected,
    Event,
    NodeCordoned,
    NodeJoined,
    NodeUncordoned,
    PartitionsPlanned,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadEvicted,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadRetried,
    WorkloadScaled,
)
from eelgrid_controller.state.journal import JournalSanitizer
from eelgrid_controller.state.measurement_events import RuntimeExpected, WorkloadShareChanged
from eelgrid_controller.state.mig_layouts import find_layout_problem, find_slice_device, find_slices_problem
from eelgrid_controller.state.policy import get_node_budgets_w, is_pool_enforced, is_pool_partitioned
from eelgrid_controller.state.takeover_events import NodeAhead, NodeReconciled
from eelgrid_protos.messages import (
    Assignment,
    Gpu,
    GpuLayout,
    Inventory,
    NodeState,
    Placement,
    Policy,
    Slice,
    Workload,
    WorkloadPhase,
)
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# A node plan carries no more (plan.proto's bound).
ASSIGNMENTS_MOST = 4096


class ContradictoryEvent(ValueError):
    """An event that cannot follow the events before it: the journal was altered, or there is a bug."""


def make_assignment(workload: Workload, placement: Placement) -> Assignment:
    """Builds the assignment of one placed replica."""
    request, part = workload.spec.request, placement.gpu_instance
    milli = request.gpu_milli if part is None else part.gpu_milli
    return Assignment(
        workload_id=workload.workload_id,
        replica=placement.replica,
        gpu_uuids=placement.gpu_uuids,
        gpu_milli=milli if placement.gpu_uuids else 0,
        cpu_milli=request.cpu_milli,
        memory_bytes=request.memory_bytes,
        gpu_instance=part,
    )


class DurableNode(NamedTuple):
    """What a checkpoint holds of a node, all of it immutable; the rest follows from the placements."""

    inventory: Inventory
    state: NodeState
    plan_epoch: int
    lost_gpus: tuple[str, ...]
    gpus_lost_ns: tuple[tuple[str, int], ...]
    lost_ns: int
    layouts: tuple[GpuLayout, ...]
    others: ExternalUsage
    ahead: "AheadOfJournal | None"
    doubted_epoch: int | None
    cordon: OperatorCordon | None
    gpu_cordons: tuple[tuple[str, OperatorCordon], ...]

    def dump(self) -> dict[str, Any]:
        """Returns it as plain JSON values."""
        layouts = [to_plain(layout, brief=True) for layout in self.layouts]
        ahead = None if self.ahead is None else {**asdict(self.ahead), "workload_ids": list(self.ahead.workload_ids)}
        cordons = [] if self.cordon is None else [dump_cordon(self.cordon)]
        cordons += [dump_cordon(cordon, uuid) for uuid, cordon in self.gpu_cordons]
        return {
            "inventory": to_plain(self.inventory, brief=True),
            "state": self.state.name.lower(),
            "plan_epoch": self.plan_epoch,
            "lost_gpus": list(self.lost_gpus),
            **({"gpus_lost_ns": dict(self.gpus_lost_ns)} if self.gpus_lost_ns else {}),
            **({"lost_ns": self.lost_ns} if self.lost_ns else {}),
            **({"layouts": layouts} if layouts else {}),
            **({"others": to_plain(self.others, brief=True)} if self.others != NO_EXTERNAL_USAGE else {}),
            **({"ahead": ahead} if ahead is not None else {}),
            **({"doubted_epoch": self.doubted_epoch} if self.doubted_epoch is not None else {}),
            **({"cordons": cordons} if cordons else {}),
        }


def _lost_of(inventory: Inventory) -> set[str]:
    return {gpu.uuid for gpu in inventory.gpus if gpu.lost}


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadOfJournal:
    """What a node holds beyond the journal: the plan epoch, how many assignments (None if unknown), and the first workload ids."""

    plan_epoch: int
    assignments: int | None = None
    workload_ids: tuple[str, ...] = ()


def make_data_trait(name: str) -> str:
    """Returns the trait of nodes that have model data; a space is in no trait of an engine."""
    return f"model data {name}"


@dataclass(slots=True, kw_only=True)
class NodeRecord:
    """One node and its allocations; the amounts are sums over the assignments."""

    inventory: Inventory
    state: NodeState = NodeState.READY
    plan_epoch: int = 0
    allocated_cpu_milli: int = 0
    allocated_memory_bytes: int = 0
    # Milli-GPU held by UUID, also of devices that are gone; never 0.
    gpu_milli: dict[str, int] = field(default_factory=dict)
    lost_gpus: set[str] = field(default_factory=set)
    # Since when they are lost, by UUID; without those that were before this was kept.
    gpus_lost_ns: dict[str, int] = field(default_factory=dict)
    assignments: dict[tuple[str, int], Assignment] = field(default_factory=dict)
    # How many assignments outside of slices hold so many GPUs at such a share; never 0.
    shares_held: dict[tuple[int, int], int] = field(default_factory=dict)
    # The node came back smaller than what runs on it.
    overcommitted: bool = False
    # The pool's GPUs that can be cut are the partition planner's.
    partitioned: bool = False
    # What runs there beside what was placed here.
    others: ExternalUsage = NO_EXTERNAL_USAGE
    # What the partition planner wants of a GPU, by UUID.
    layouts: dict[str, GpuLayout] = field(default_factory=dict)
    # It takes nothing new, and gets no plan, until that is reconciled.
    ahead: AheadOfJournal | None = None
    # The plan's epoch when a controller began, until the agent has spoken; then None. See core/nodes.py.
    doubted_epoch: int | None = None
    # Entries of the journal may be lost: nothing new starts until all agents were heard. See state/journal_losses.py.
    withheld: bool = False
    # Since when it is lost; 0 where it is not, or was lost before this was kept.
    lost_ns: int = 0
    # The operator's cordon of the node, and those of single GPUs by UUID, also of GPUs that are gone.
    cordon: OperatorCordon | None = None
    gpu_cordons: dict[str, OperatorCordon] = field(default_factory=dict)

    def copy(self) -> Self:
        """Returns an independent copy."""
        return replace(
            self,
            gpu_milli=self.gpu_milli.copy(),
            lost_gpus=self.lost_gpus.copy(),
            gpus_lost_ns=self.gpus_lost_ns.copy(),
            assignments=self.assignments.copy(),
            shares_held=self.shares_held.copy(),
            layouts=self.layouts.copy(),
            gpu_cordons=self.gpu_cordons.copy(),
        )

    def copy_without(self, workload_ids: Collection[str]) -> Self:
        """Returns an independent copy that these workloads have left."""
        twin = self.copy()
        for workload_id, replica in self.assignments:
            if workload_id in workload_ids:
                twin.release(workload_id, replica)
        return twin

    @property
    def traits(self) -> tuple[str, ...]:
        """What work may ask of it: the traits that an engine gave it, and the model data on its disks."""
        data = self.inventory.model_data
        return (*self.others.traits, *map(make_data_trait, data)) if data else self.others.traits

    @property
    def allocated_gpu_milli(self) -> int:
        """Allocated thousandths of GPUs on all devices, including lost ones."""
        return sum(self.gpu_milli.values())

    @property
    def is_ready(self) -> bool:
        """Whether the node is ready."""
        return self.state is NodeState.READY

    @property
    def is_reported(self) -> bool:
        """Whether its agent has reported since the controller started; until then it is unknown what the node holds."""
        return self.doubted_epoch is None

    @property
    def unknown_runs(self) -> tuple[str, ...]:
        """The first workloads that the node holds beyond the journal."""
        return () if self.ahead is None else self.ahead.workload_ids

    @property
    def is_schedulable(self) -> bool:
        """Whether the node accepts new work, capacity permitting."""
        is_open = not self.others.closed and self.cordon is None
        return self.is_ready and is_open and self.ahead is None and self.is_reported and not self.withheld

    def cordon_reason(self, gpu: Gpu | None = None) -> str:
        """Returns why the node, or a GPU of it, is cordoned; empty if it is not. Lost ones are no cordons."""
        if self.cordon is not None:
            return self.cordon.describe()
        return "" if gpu is None else self.gpu_cordon_reason(gpu)

    def gpu_cordon_reason(self, gpu: Gpu) -> str:
        """Returns why a GPU is cordoned by itself, by its agent or an operator, whatever holds for the node."""
        own = self.gpu_cordons.get(gpu.uuid)
        return gpu.cordon or ("" if own is None else own.describe())

    def advance_plan(self, above: int = 0) -> None:
        """Makes the epoch of the node's plan higher than it is, and than `above`."""
        self.plan_epoch = max(self.plan_epoch, above) + 1

    def doubt_plan(self) -> None:
        """Takes the plan's epoch for the highest known until the agent reports again."""
        if self.doubted_epoch is None:
            self.doubted_epoch = self.plan_epoch

    def reconcile(self, event: NodeAhead | NodeReconciled, *, above: int = 0) -> None:
        """Records what the agent holds beyond the journal, if anything; later plans have higher epochs than its own."""
        self.advance_plan(max(event.plan_epoch, above))
        self.ahead = (
            AheadOfJournal(plan_epoch=event.plan_epoch, assignments=event.assignments, workload_ids=event.workload_ids)
            if isinstance(event, NodeAhead)
            else None
        )

    def apply_cordon(self, event: NodeCordoned | NodeUncordoned) -> None:
        """Closes what was closed to new work, or opens it."""
        cordon = None
        if isinstance(event, NodeCordoned):
            cordon = OperatorCordon(
                since_ns=event.time_ns,
                reason=event.reason,
                user=event.user,
                drain=event.drain,
                is_quarantine=event.is_quarantine,
            )
        self.set_cordon(event.gpu_uuids, cordon)

    def set_cordon(self, gpu_uuids: Collection[str], cordon: OperatorCordon | None) -> None:
        """Sets or lifts the operator's cordon of some GPUs, of the node if none are named; it begins when it first did."""
        for uuid in gpu_uuids or ("",):
            before = self.gpu_cordons.get(uuid) if uuid else self.cordon
            new = cordon if cordon is None or before is None else replace(cordon, since_ns=before.since_ns)
            if not uuid:
                self.cordon = new
            elif new is None:
                self.gpu_cordons.pop(uuid, None)
            else:
                self.gpu_cordons[uuid] = new

    @property
    def is_fenced(self) -> bool:
        """Whether the node is lost, and ends its processes by itself meanwhile."""
        return self.state is NodeState.LOST and self.inventory.fence_after_s > 0.0

    @property
    def is_draining(self) -> bool:
        """Whether the controller empties the node or GPUs of it: an operator drains them, or they are lost."""
        own = self.cordon is not None and self.cordon.drain is not None
        return (
            own
            or self.is_fenced
            or bool(self.lost_gpus)
            or any(one.drain is not None for one in self.gpu_cordons.values())
        )

    def drain_terms(self, assignment: Assignment) -> tuple[DrainTerms, OperatorCordon] | None:
        """Returns the terms by which an assignment is drained, and their cordon; None if it may stay.

        Where the node and a GPU are drained, those of the node apply.
        """
        cordons = (self.cordon, *(self.gpu_cordons.get(uuid) for uuid in assignment.gpu_uuids))
        found = (one for one in cordons if one is not None and one.drain is not None)
        return next(((one.drain, one) for one in found if one.drain is not None), None)

    @property
    def cpu_left_milli(self) -> int:
        """Free CPU in thousandths; negative if more is held than the node has."""
        return self.inventory.cpu_milli - self.allocated_cpu_milli - self.others.cpu_milli

    @property
    def memory_left_bytes(self) -> int:
        """Free memory in bytes; negative if more is held than the node has."""
        return self.inventory.memory_bytes - self.allocated_memory_bytes - self.others.memory_bytes

    def externally_used_gpus(self) -> frozenset[str]:
        """GPUs in external use: those named or leased, and as many more unallocated ones as are counted.

        Of those the highest indexes first; a lease explains one that is counted without a name.
        """
        leased = self.externally_leased_gpus()
        if not self.others.gpu_count and not leased:
            return frozenset()
        taken = {gpu.index for gpu in self.inventory.gpus}.intersection(self.others.gpu_indexes)
        taken.update(leased)
        unnamed = self.others.gpu_count - len(taken)
        if unnamed > 0:
            free = sorted(gpu.index for gpu in self.inventory.gpus if gpu.uuid not in self.gpu_milli)
            taken.update([index for index in free if index not in taken][-unnamed:])
        return frozenset(gpu.uuid for gpu in self.inventory.gpus if gpu.index in taken)

    def externally_leased_gpus(self) -> frozenset[int]:
        """Indexes of the GPUs of which the agent has leased anything to an engine for work that was not placed here."""
        leased = [gpu for gpu in self.inventory.gpus if gpu.leases]
        if not leased:
            return frozenset()
        own = self.gpu_milli.keys() | set(self.slice_devices().values())
        sliced = {item.gpu_uuids[0] for item in self.assignments.values() if item.gpu_instance is not None}
        # A GPU in slices is in gpu_milli, too, and the lease of another slice of it is not for what is here.
        own -= sliced
        return frozenset(gpu.index for gpu in leased if any(one.device_uuid not in own for one in gpu.leases))

    def gpu(self, uuid: str) -> Gpu | None:
        """Returns a device of the inventory, None if it is absent."""
        return next((gpu for gpu in self.inventory.gpus if gpu.uuid == uuid), None)

    def holders(self, uuid: str) -> Iterator[str]:
        """Yields the ids of the workloads on a device, each once, in order of placement."""
        yield from dict.fromkeys(item.workload_id for item in self.assignments.values() if uuid in item.gpu_uuids)

    def is_partition_managed(self, gpu: Gpu) -> bool:
        """Returns whether the partition planner manages a GPU."""
        return gpu.uuid in self.layouts or (self.partitioned and gpu.mig_capable)

    def slices(self, uuid: str) -> list[Slice]:
        """Returns the slices of a GPU that replicas hold."""
        return [
            item.gpu_instance
            for item in self.assignments.values()
            if item.gpu_instance is not None and uuid in item.gpu_uuids
        ]

    def slice_devices(self) -> dict[tuple[str, int], str]:
        """Returns the device of each replica in a slice that exists, by its key."""
        gpus = {gpu.uuid: gpu for gpu in self.inventory.gpus}
        found = {}
        for key, item in self.assignments.items():
            if item.gpu_instance is not None and (gpu := gpus.get(item.gpu_uuids[0])) is not None:
                uuid = find_slice_device(gpu, item.gpu_instance)
                found.update({key: uuid} if uuid else {})
        return found

    def set_layout(self, layout: GpuLayout) -> None:
        """Sets the planned layout of a GPU; raises ContradictoryEvent, and then nothing has changed."""
        uuid = layout.gpu_uuid
        gpu = self.gpu(uuid)
        others = [item for item in self.assignments.values() if uuid in item.gpu_uuids and item.gpu_instance is None]
        problem = (
            f"GPU {uuid} is gone"
            if gpu is None
            else f"GPU {uuid} is not the partition planner's"
            if not self.is_partition_managed(gpu)
            else f"GPU {uuid} is held by {others[0].workload_id}"
            if others
            else find_layout_problem(gpu, layout) or find_slices_problem(layout, self.slices(uuid))
        )
        if problem:
            raise ContradictoryEvent(f"layout on {self.inventory.node_name}: {problem}")
        self.layouts[uuid] = layout

    def set_partitioned(self, *, partitioned: bool) -> bool:
        """Gives the node to the partition planner or takes it away; returns whether planned layouts changed."""
        self.partitioned = partitioned
        empty = [] if partitioned else [uuid for uuid in self.layouts if uuid not in self.gpu_milli]
        for uuid in empty:
            del self.layouts[uuid]
        return bool(empty)

    def matches_inventory(self, inventory: Inventory) -> bool:
        """Whether the node is ready, and is already known to be as the inventory says."""
        return (self.state, self.inventory) == (NodeState.READY, inventory) and self.lost_gpus == _lost_of(inventory)

    def mark_lost(self, time_ns: int) -> None:
        """Marks the node as lost; it keeps what it holds."""
        if self.state is not NodeState.LOST:
            self.lost_ns = time_ns
        self.state = NodeState.LOST

    def mark_gpu_lost(self, uuid: str, time_ns: int) -> None:
        """Marks a device as lost; raises ContradictoryEvent if the node has none of this name."""
        if self.gpu(uuid) is None:
            raise ContradictoryEvent(f"node {self.inventory.node_name} has no GPU {uuid}")
        self.lost_gpus.add(uuid)
        self.gpus_lost_ns[uuid] = time_ns

    def mark_gpu_returned(self, uuid: str) -> None:
        """Marks a device as there again."""
        self.lost_gpus.discard(uuid)
        self.gpus_lost_ns.pop(uuid, None)

    def update_inventory(self, inventory: Inventory, time_ns: int) -> None:
        """Updates the node's inventory; it keeps what it holds."""
        self.inventory = inventory
        self.state = NodeState.READY
        self.lost_ns = 0
        before, self.lost_gpus = self.lost_gpus, _lost_of(inventory)
        since_ns = {uuid: self.gpus_lost_ns.get(uuid, 0) if uuid in before else time_ns for uuid in self.lost_gpus}
        self.gpus_lost_ns = {uuid: lost_ns for uuid, lost_ns in since_ns.items() if lost_ns}
        self.update_overcommitted()

    def find_unknown_assignments(self, held: Sequence[Assignment]) -> tuple[Assignment, ...]:
        """Returns those of the agent's assignments that are not in this journal."""
        return tuple(item for item in held if not self._knows(item))

    def _knows(self, item: Assignment) -> bool:
        mine = self.assignments.get((item.workload_id, item.replica))
        # What is in a slice names its device in a plan and the GPU here.
        return mine is not None and (mine.gpu_instance is not None or set(mine.gpu_uuids) == set(item.gpu_uuids))

    def update_overcommitted(self) -> None:
        """Records whether allocations exceed the node, which only a node that shrank may have."""
        self.overcommitted = (
            self.allocated_cpu_milli > self.inventory.cpu_milli
            or self.allocated_memory_bytes > self.inventory.memory_bytes
        )

    def allocate(self, assignment: Assignment) -> None:
        """Allocates an assignment; raises ContradictoryEvent, and then nothing has changed."""
        key = (assignment.workload_id, assignment.replica)
        problem = self._objection(assignment)
        if problem:
            raise ContradictoryEvent(f"replica {key[1]} of {key[0]} on {self.inventory.node_name}: {problem}")
        self.allocate_unchecked(assignment)

    def allocate_unchecked(self, assignment: Assignment) -> None:
        """Allocates an assignment without checks, for one that was held before."""
        self.assignments[assignment.workload_id, assignment.replica] = assignment
        self._count_share(assignment, 1)
        self.allocated_cpu_milli += assignment.cpu_milli
        self.allocated_memory_bytes += assignment.memory_bytes
        for uuid in assignment.gpu_uuids:
            self.gpu_milli[uuid] = self.gpu_milli.get(uuid, 0) + assignment.gpu_milli

    def _count_share(self, assignment: Assignment, change: int) -> None:
        if assignment.gpu_instance is None and assignment.gpu_uuids:
            share = len(assignment.gpu_uuids), assignment.gpu_milli
            count = self.shares_held.get(share, 0) + change
            if count:
                self.shares_held[share] = count
            else:
                del self.shares_held[share]

    def _objection(self, assignment: Assignment) -> str:
        if self.state is not NodeState.READY:
            return "the node is lost"
        if self.ahead is not None:
            return "the node holds more than the journal knows"
        if (assignment.workload_id, assignment.replica) in self.assignments:
            return "is there already"
        if len(self.assignments) >= ASSIGNMENTS_MOST:
            return f"the node holds {ASSIGNMENTS_MOST} assignments"
        if self.others.closed:
            return f"the node is closed: {self.others.closed}"
        if assignment.cpu_milli > max(0, self.cpu_left_milli):
            return "exceeds the CPU"
        if assignment.memory_bytes > max(0, self.memory_left_bytes):
            return "exceeds the memory"
        if len(set(assignment.gpu_uuids)) < len(assignment.gpu_uuids):
            return "names a GPU twice"
        part, others = assignment.gpu_instance, self.externally_used_gpus()
        if part is not None and len(assignment.gpu_uuids) != 1:
            return "a slice is of one GPU"
        for uuid in assignment.gpu_uuids:
            gpu = self.gpu(uuid)
            if uuid in others:
                return f"GPU {uuid} is held by others"
            if gpu is None or uuid in self.lost_gpus or gpu.cordon or (gpu.mig_enabled and part is None):
                return f"GPU {uuid} is gone, lost or partitioned"
            if part is None and self.is_partition_managed(gpu):
                return f"GPU {uuid} is the partition planner's"
            problem = "" if part is None else find_slices_problem(self.layouts.get(uuid), [*self.slices(uuid), part])
            if problem:
                return f"GPU {uuid}: {problem}"
            if self.gpu_milli.get(uuid, 0) + assignment.gpu_milli > GPU_MILLI_WHOLE:
                return f"GPU {uuid} is held already"
        return ""

    def release(self, workload_id: str, replica: int) -> None:
        """Releases an assignment."""
        assignment = self.assignments.pop((workload_id, replica))
        self._count_share(assignment, -1)
        self.allocated_cpu_milli -= assignment.cpu_milli
        self.allocated_memory_bytes -= assignment.memory_bytes
        for uuid in assignment.gpu_uuids:
            left = self.gpu_milli[uuid] - assignment.gpu_milli
            if left:
                self.gpu_milli[uuid] = left
            else:
                del self.gpu_milli[uuid]
                if not self.partitioned:
                    self.layouts.pop(uuid, None)
        self.update_overcommitted()

    def take_durable(self) -> "DurableNode":
        """Returns what cannot be derived, as it is now."""
        return DurableNode(
            self.inventory,
            self.state,
            self.plan_epoch,
            tuple(sorted(self.lost_gpus)) if self.lost_gpus else (),
            tuple(sorted(self.gpus_lost_ns.items())) if self.gpus_lost_ns else (),
            self.lost_ns,
            tuple(self.layouts[uuid] for uuid in sorted(self.layouts)) if self.layouts else (),
            self.others,
            self.ahead,
            self.doubted_epoch,
            self.cordon,
            tuple(sorted(self.gpu_cordons.items(), key=itemgetter(0))) if self.gpu_cordons else (),
        )

    @classmethod
    def load(cls, row: Mapping[str, Any], healer: JournalSanitizer) -> Self:
        """Loads a node from a checkpoint, without its assignments."""
        inventory = healer.read(Inventory, row["inventory"])
        layouts = (healer.read(GpuLayout, plain) for plain in row.get("layouts", ()))
        ahead = row.get("ahead")
        cordon, gpu_cordons = load_cordons(row.get("cordons", ()), healer)
        return cls(
            inventory=inventory,
            state=NodeState[row["state"].upper()],
            plan_epoch=healer.epoch(inventory.node_name, row["plan_epoch"]),
            lost_gpus=set(map(healer.identifier, row["lost_gpus"])),
            gpus_lost_ns={healer.identifier(uuid): ns for uuid, ns in row.get("gpus_lost_ns", {}).items()},
            others=healer.read(ExternalUsage, row.get("others", {})),
            layouts={layout.gpu_uuid: layout for layout in layouts},
            ahead=ahead and AheadOfJournal(**{**ahead, "workload_ids": tuple(ahead["workload_ids"])}),
            lost_ns=row.get("lost_ns", 0),
            doubted_epoch=row.get("doubted_epoch"),
            cordon=cordon,
            gpu_cordons=gpu_cordons,
        )


def reallocate_replicas(
    nodes: Mapping[str, NodeRecord], workload: Workload, before: Sequence[Placement], after: Sequence[Placement]
) -> None:
    """Releases some placements of a workload and allocates others; raises ContradictoryEvent, and then nothing has changed."""
    key, held = workload.workload_id, list[Placement]()
    strange = [placement.node_name for placement in after if placement.node_name not in nodes]
    if strange:
        raise ContradictoryEvent(f"node {strange[0]} never joined")
    for placement in before:
        nodes[placement.node_name].release(key, placement.replica)
    try:
        for placement in after:
            nodes[placement.node_name].allocate(make_assignment(workload, placement))
            held.append(placement)
    except ContradictoryEvent:
        for placement in held:
            nodes[placement.node_name].release(key, placement.replica)
        for placement in before:
            nodes[placement.node_name].allocate_unchecked(make_assignment(workload, placement))
            nodes[placement.node_name].update_overcommitted()
        raise


def apply_policy(nodes: Mapping[str, NodeRecord], before: Policy, after: Policy, *, above: int = 0) -> frozenset[str]:
    """Puts a policy in force on nodes; returns those that it affects, whose plans get epochs higher than `above`."""
    changed, old_w, new_w = set(), get_node_budgets_w(before), get_node_budgets_w(after)
    for name, record in nodes.items():
        pool = record.inventory.pool
        kept = is_pool_partitioned(after, pool)
        turns = kept != record.partitioned
        turned = turns and record.set_partitioned(partitioned=kept)
        renewed = before.lease_s != after.lease_s or is_pool_enforced(before, pool) != is_pool_enforced(after, pool)
        renewed = renewed or old_w.get(name) != new_w.get(name)
        if renewed or turned:
            record.advance_plan(above)
        changed |= {name} if renewed or turns else set()
    return frozenset(changed)


def list_affected_workloads(event: Event) -> tuple[str, ...]:
    """Lists the workloads whose allocations an event may change."""
    match event:
        case (
            WorkloadPlaced()
            | WorkloadScaled()
            | WorkloadCancelled()
            | WorkloadEvicted()
            | WorkloadCompleted()
            | WorkloadRetried()
            | WorkloadShareChanged()
            | RuntimeExpected()
        ):
            return (event.workload_id,)
        case PartitionsPlanned():
            return event.workload_ids
        case _:
            return ()


def list_rechargeable_workloads(event: Event, nodes: Mapping[str, NodeRecord]) -> Iterable[str]:
    """Lists the workloads of which an event may change the allocations, or the models of their GPUs."""
    match event:
        case WorkloadMoved():
            return (event.workload_id,)
        case DevicesCorrected():
            return event.workload_ids
        case NodeJoined():
            return dict.fromkeys(key for key, _ in nodes[event.inventory.node_name].assignments)
        case _:
            return list_affected_workloads(event)


def apply_move(workload: Workload | None, event: WorkloadMoved) -> tuple[Workload, list[Placement]]:
    """Returns the workload after the event, and the placements that it leaves; raises ContradictoryEvent."""
    moving = {placement.replica for placement in event.placements}
    before = [item for item in workload.placements if item.replica in moving] if workload else []
    if workload is None or not moving or len(before) != len(event.placements):
        raise ContradictoryEvent(f"workload {event.workload_id} has no such replicas placed")
    return _at(workload, before, event.placements), before


def apply_scaling(workload: Workload | None, event: WorkloadScaled) -> tuple[Workload, list[Placement]]:
    """Returns the workload after the event, and the placements that it leaves; raises ContradictoryEvent."""
    if workload is None or workload.phase is not WorkloadPhase.PLACED:
        raise ContradictoryEvent(f"workload {event.workload_id} does not run")
    there, gone = {item.replica for item in workload.placements}, set(event.released)
    new = {item.replica for item in event.placements}
    if not there >= gone or there & new or len(gone) < len(event.released) or len(new) < len(event.placements):
        raise ContradictoryEvent(f"workload {event.workload_id} has other replicas than are taken or added")
    replicas = len(there) - len(gone) + len(new)
    if replicas < 1:
        raise ContradictoryEvent(f"workload {event.workload_id} would be left without replicas")
    before = [item for item in workload.placements if item.replica in gone]
    begun = workload.replicas_begun or workload.spec.replicas
    size, share = replace(workload.spec, replicas=replicas), event.share or workload.share
    counted = replace(workload, spec=size, replicas_begun=begun, share=share)
    return _at(counted, before, event.placements), before


def apply_device_correction(
    workloads: Mapping[str, Workload], record: NodeRecord, event: DevicesCorrected
) -> dict[str, Workload]:
    """Corrects the node's record and returns the corrected workloads; raises ContradictoryEvent before any change.

    What the engine says is so: a cordon, a lost device or what others are taken to hold is no objection.
    """
    after: dict[str, Workload] = {}
    seen: set[tuple[str, int]] = set()
    ledger = record.copy()
    for one in event.replicas:
        key, replica = one.workload_id, one.placement.replica
        workload = after.get(key) or workloads.get(key)
        before = None if workload is None else workload.find_place(replica)
        if workload is None or before is None or before.gpu_instance is not None or (key, replica) in seen:
            raise ContradictoryEvent(f"replica {replica} of {key} holds no GPUs, or is corrected twice")
        if before.node_name != event.node_name or len(before.gpu_uuids) != len(one.placement.gpu_uuids):
            raise ContradictoryEvent(f"replica {replica} of {key} is on another node, or of another size")
        seen.add((key, replica))
        after[key] = _at(workload, [before], (one.placement,))
        ledger.release(key, replica)
    for one in event.replicas:
        assignment = make_assignment(after[one.workload_id], one.placement)
        for uuid in assignment.gpu_uuids:
            gpu = ledger.gpu(uuid)
            if gpu is None or gpu.mig_enabled or uuid in ledger.layouts:
                raise ContradictoryEvent(f"GPU {uuid} of {event.node_name} is gone or partitioned")
            if ledger.gpu_milli.get(uuid, 0) + assignment.gpu_milli > GPU_MILLI_WHOLE:
                raise ContradictoryEvent(f"GPU {uuid} of {event.node_name} is held by {next(ledger.holders(uuid), '')}")
        ledger.allocate_unchecked(assignment)
    for key, replica in seen:
        record.release(key, replica)
    for one in event.replicas:
        record.allocate_unchecked(make_assignment(after[one.workload_id], one.placement))
    record.update_overcommitted()
    return after


def is_sliced(workload: Workload) -> bool:
    """Returns whether the partition planner places the replicas of a workload."""
    return workload.spec.service is not None and workload.spec.service.slices


def apply_partition_plan(workloads: Mapping[str, Workload], event: PartitionsPlanned) -> dict[str, Workload]:
    """Returns the services after a partition plan; raises ContradictoryEvent."""
    found = {}
    for service in event.services:
        workload = workloads.get(service.workload_id)
        replicas = [item.replica for item in service.placements]
        if workload is None or workload.phase.is_ended or not is_sliced(workload):
            raise ContradictoryEvent(f"workload {service.workload_id} is not there, or takes no slices")
        if not replicas or replicas != sorted(set(replicas)) or service.workload_id in found:
            raise ContradictoryEvent(f"workload {service.workload_id}: the placements are not one for each replica")
        if any(item.gpu_instance is None for item in service.placements):
            raise ContradictoryEvent(f"workload {service.workload_id}: a placement names no slice")
        begun = workload.replicas_begun or workload.spec.replicas
        found[service.workload_id] = replace(
            workload,
            spec=replace(workload.spec, replicas=len(replicas)),
            replicas_begun=begun,
            phase=WorkloadPhase.PLACED,
            reason="",
            placements=service.placements,
            placed_ns=workload.placed_ns or event.time_ns,
        )
    return found


def list_involved_nodes(
    before: Mapping[str, Workload], after: Mapping[str, Workload], event: PartitionsPlanned
) -> set[str]:
    """Lists the nodes of all layouts and of all placements of the services."""
    found = {item.node_name for item in event.layouts}
    return found.union(item.node_name for key in after for item in (*before[key].placements, *after[key].placements))


def reallocate_slices(
    nodes: Mapping[str, NodeRecord],
    before: Mapping[str, Workload],
    after: Mapping[str, Workload],
    event: PartitionsPlanned,
) -> frozenset[str]:
    """Takes services from slices to slices and wants layouts, on records that may be half changed where it raises.

    Returns the nodes that something changed on; raises ContradictoryEvent.
    """
    touched = {planned.node_name for planned in event.layouts}
    for key, workload in after.items():
        stay = set(workload.placements).intersection(before[key].placements)
        for placement in before[key].placements:
            if placement not in stay:
                nodes[placement.node_name].release(key, placement.replica)
                touched.add(placement.node_name)
    for planned in event.layouts:
        nodes[planned.node_name].set_layout(planned.layout)
    for key, workload in after.items():
        stay = set(before[key].placements).intersection(workload.placements)
        for placement in workload.placements:
            if placement not in stay:
                nodes[placement.node_name].allocate(make_assignment(workload, placement))
                touched.add(placement.node_name)
    return frozenset(touched)


def _at(workload: Workload, before: list[Placement], after: tuple[Placement, ...]) -> Workload:
    gone = {item.replica for item in before}
    stay = [item for item in workload.placements if item.replica not in gone]
    return replace(workload, placements=tuple(sorted([*stay, *after], key=lambda item: item.replica)))
