"""Node allocations: what one node has, what is allocated on it, and to which workloads.

Owns the rule that nothing is allocated twice: `allocate` checks before it books, and `reallocate_replicas` moves
a workload from some places to others or leaves everything as it was. Must not know why something was placed.
Changed by `ClusterState.apply` alone.

GPUs with a MIG layout, and those that can be partitioned on a partitioned node, belong to the partition
planner: nothing else is allocated there. A slice of a layout is held by one replica. A device that vanished,
from the inventory or by a fault, keeps its allocations, takes nothing new, and is whole again when the same
UUID returns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from eelgrid_controller.state.engine_reports import NO_EXTERNAL_USAGE, ExternalUsage
from eelgrid_controller.state.journal_encoding import JournalSanitizer
from eelgrid_controller.state.mig_layouts import find_layout_problem, find_slice_device, find_slices_problem
from eelgrid_controller.state.policy import get_node_budgets_w, is_pool_enforced, is_pool_partitioned
from eelgrid_protos.messages import Assignment, Gpu, GpuLayout, Inventory, NodeState, Placement, Policy, Slice, Workload
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# A node plan carries no more (plan.proto's bound).
ASSIGNMENTS_MOST = 4096


class ContradictoryEvent(ValueError):
    """An event that cannot follow the events before it: the journal was altered, or we have a fault."""


class InvariantBroken(AssertionError):
    """The state contradicts itself: a fault of ours."""


def make_assignment(workload: Workload, placement: Placement) -> Assignment:
    """What a replica of the workload holds there."""
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


def _lost_of(inventory: Inventory) -> set[str]:
    return {gpu.uuid for gpu in inventory.gpus if gpu.lost}


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadOfJournal:
    """What a node holds beyond the journal: by which plan, how much (None where unknown), and the first of whose it is."""

    plan_epoch: int
    assignments: int | None = None
    workload_ids: tuple[str, ...] = ()


def _ahead_to_plain(ahead: AheadOfJournal) -> dict[str, Any]:
    return {**asdict(ahead), "workload_ids": list(ahead.workload_ids)}


def _ahead_of(row: Mapping[str, Any] | None) -> AheadOfJournal | None:
    return None if row is None else AheadOfJournal(**{**row, "workload_ids": tuple(row["workload_ids"])})


@dataclass(slots=True, kw_only=True)
class NodeRecord:
    """One node; the amounts are sums over the assignments."""

    inventory: Inventory
    state: NodeState = NodeState.READY
    plan_epoch: int = 0
    allocated_cpu_milli: int = 0
    allocated_memory_bytes: int = 0
    # Milli-GPU held by UUID, also of devices that are gone; never 0.
    gpu_milli: dict[str, int] = field(default_factory=dict)
    lost_gpus: set[str] = field(default_factory=set)
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
    # The plan's epoch when a controller began, until the agent has spoken; then None. See plan_claims.py.
    doubted_epoch: int | None = None
    # Since when it is lost; 0 where it is not, or was lost before this was kept.
    lost_ns: int = 0

    def copy(self) -> Self:
        """A record that changes apart from this one."""
        return replace(
            self,
            gpu_milli=self.gpu_milli.copy(),
            lost_gpus=self.lost_gpus.copy(),
            assignments=self.assignments.copy(),
            shares_held=self.shares_held.copy(),
            layouts=self.layouts.copy(),
        )

    @property
    def allocated_gpu_milli(self) -> int:
        """Milli-GPU held on all devices, those that are gone too."""
        return sum(self.gpu_milli.values())

    @property
    def is_ready(self) -> bool:
        """Whether its agent is there."""
        return self.state is NodeState.READY

    @property
    def is_reported(self) -> bool:
        """Whether its agent has spoken since the controller began; until then nobody knows what it holds."""
        return self.doubted_epoch is None

    @property
    def is_schedulable(self) -> bool:
        """Whether something new may come, if there is room."""
        return self.is_ready and not self.others.closed and self.ahead is None and self.is_reported

    @property
    def cpu_left_milli(self) -> int:
        """What nobody holds; less than nothing where more is held than there is."""
        return self.inventory.cpu_milli - self.allocated_cpu_milli - self.others.cpu_milli

    @property
    def memory_left_bytes(self) -> int:
        """The same of memory."""
        return self.inventory.memory_bytes - self.allocated_memory_bytes - self.others.memory_bytes

    def externally_used_gpus(self) -> frozenset[str]:
        """The GPUs that others hold by name, and as many more of what is not held here, the highest indexes first."""
        if not self.others.gpu_count:
            return frozenset()
        taken = {gpu.index for gpu in self.inventory.gpus}.intersection(self.others.gpu_indexes)
        unnamed = self.others.gpu_count - len(taken)
        if unnamed > 0:
            free = sorted(gpu.index for gpu in self.inventory.gpus if gpu.uuid not in self.gpu_milli)
            taken.update([index for index in free if index not in taken][-unnamed:])
        return frozenset(gpu.uuid for gpu in self.inventory.gpus if gpu.index in taken)

    def gpu(self, uuid: str) -> Gpu | None:
        """The device in the inventory."""
        return next((gpu for gpu in self.inventory.gpus if gpu.uuid == uuid), None)

    def holders(self, uuid: str) -> Iterator[str]:
        """Ids of the workloads on a device, each once, in the order in which they were placed."""
        yield from dict.fromkeys(item.workload_id for item in self.assignments.values() if uuid in item.gpu_uuids)

    def is_partition_managed(self, gpu: Gpu) -> bool:
        """Whether a GPU is the partition planner's."""
        return gpu.uuid in self.layouts or (self.partitioned and gpu.mig_capable)

    def slices(self, uuid: str) -> list[Slice]:
        """What replicas hold of a GPU that the partition planner has."""
        return [
            item.gpu_instance
            for item in self.assignments.values()
            if item.gpu_instance is not None and uuid in item.gpu_uuids
        ]

    def slice_devices(self) -> dict[tuple[str, int], str]:
        """The device of each replica in a slice that stands, by its key."""
        gpus = {gpu.uuid: gpu for gpu in self.inventory.gpus}
        found = {}
        for key, item in self.assignments.items():
            if item.gpu_instance is not None and (gpu := gpus.get(item.gpu_uuids[0])) is not None:
                uuid = find_slice_device(gpu, item.gpu_instance)
                found.update({key: uuid} if uuid else {})
        return found

    def set_layout(self, layout: GpuLayout) -> None:
        """Wants a layout of a GPU; raises ContradictoryEvent, and then nothing has changed."""
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
        """Is the partition planner's from now on, or not; whether what is wanted of its GPUs changed."""
        self.partitioned = partitioned
        empty = [] if partitioned else [uuid for uuid in self.layouts if uuid not in self.gpu_milli]
        for uuid in empty:
            del self.layouts[uuid]
        return bool(empty)

    def matches_inventory(self, inventory: Inventory) -> bool:
        """Whether the node is ready, and is already known to be as the inventory says."""
        return (self.state, self.inventory) == (NodeState.READY, inventory) and self.lost_gpus == _lost_of(inventory)

    def mark_lost(self, time_ns: int) -> None:
        """Its agent is away from now on; what is held stays held."""
        if self.state is not NodeState.LOST:
            self.lost_ns = time_ns
        self.state = NodeState.LOST

    def update_inventory(self, inventory: Inventory) -> None:
        """Takes the node as it is now; what is held stays held."""
        self.inventory = inventory
        self.state = NodeState.READY
        self.lost_ns = 0
        self.lost_gpus = _lost_of(inventory)
        self.update_overcommitted()

    def find_unknown_assignments(self, held: Sequence[Assignment]) -> tuple[Assignment, ...]:
        """Of what its agent holds, what was not placed there by this journal."""
        return tuple(item for item in held if not self._knows(item))

    def _knows(self, item: Assignment) -> bool:
        mine = self.assignments.get((item.workload_id, item.replica))
        # What is in a slice names its device in a plan and the GPU here.
        return mine is not None and (mine.gpu_instance is not None or set(mine.gpu_uuids) == set(item.gpu_uuids))

    def update_overcommitted(self) -> None:
        """Notes whether what is held exceeds the node; only a node that shrank may."""
        self.overcommitted = (
            self.allocated_cpu_milli > self.inventory.cpu_milli
            or self.allocated_memory_bytes > self.inventory.memory_bytes
        )

    def allocate(self, assignment: Assignment) -> None:
        """Books an assignment; raises ContradictoryEvent, and then nothing has changed."""
        key = (assignment.workload_id, assignment.replica)
        problem = self._objection(assignment)
        if problem:
            raise ContradictoryEvent(f"replica {key[1]} of {key[0]} on {self.inventory.node_name}: {problem}")
        self.allocate_unchecked(assignment)

    def allocate_unchecked(self, assignment: Assignment) -> None:
        """Books what was held before, whatever became of the node since."""
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
        """Gives an assignment back."""
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

    def dump(self) -> dict[str, Any]:
        """What cannot be derived of the node, as plain values that JSON carries."""
        layouts = [to_plain(self.layouts[uuid], brief=True) for uuid in sorted(self.layouts)]
        return {
            "inventory": to_plain(self.inventory, brief=True),
            "state": self.state.name.lower(),
            "plan_epoch": self.plan_epoch,
            "lost_gpus": sorted(self.lost_gpus),
            **({"lost_ns": self.lost_ns} if self.lost_ns else {}),
            **({"layouts": layouts} if layouts else {}),
            **({"others": to_plain(self.others, brief=True)} if self.others != NO_EXTERNAL_USAGE else {}),
            **({"ahead": _ahead_to_plain(self.ahead)} if self.ahead is not None else {}),
            **({"doubted_epoch": self.doubted_epoch} if self.doubted_epoch is not None else {}),
        }

    @classmethod
    def load(cls, row: Mapping[str, Any], healer: JournalSanitizer) -> Self:
        """The node in a checkpoint, holding nothing yet."""
        inventory = healer.read(Inventory, row["inventory"])
        layouts = (healer.read(GpuLayout, plain) for plain in row.get("layouts", ()))
        return cls(
            inventory=inventory,
            state=NodeState[row["state"].upper()],
            plan_epoch=healer.epoch(inventory.node_name, row["plan_epoch"]),
            lost_gpus=set(map(healer.identifier, row["lost_gpus"])),
            others=healer.read(ExternalUsage, row.get("others", {})),
            layouts={layout.gpu_uuid: layout for layout in layouts},
            ahead=_ahead_of(row.get("ahead")),
            lost_ns=row.get("lost_ns", 0),
            doubted_epoch=row.get("doubted_epoch"),
        )

    def validate(self) -> None:
        """Whether the sums are those of the assignments; raises InvariantBroken."""
        name, held = self.inventory.node_name, list(self.assignments.values())
        by_gpu: dict[str, int] = {}
        for item in held:
            for uuid in item.gpu_uuids:
                by_gpu[uuid] = by_gpu.get(uuid, 0) + item.gpu_milli
        if by_gpu != self.gpu_milli or any(milli > GPU_MILLI_WHOLE for milli in by_gpu.values()):
            raise InvariantBroken(f"{name}: a GPU is held twice, or its sum is wrong")
        for uuid in {item.gpu_uuids[0] for item in held if item.gpu_instance is not None} | self.layouts.keys():
            gpu, layout = self.gpu(uuid), self.layouts.get(uuid)
            problem = find_slices_problem(layout, self.slices(uuid))
            if gpu is not None and layout is not None:
                problem = problem or find_layout_problem(gpu, layout)
            if problem:
                raise InvariantBroken(f"{name}: GPU {uuid}: {problem}")
            if any(uuid in item.gpu_uuids and item.gpu_instance is None for item in held):
                raise InvariantBroken(f"{name}: GPU {uuid} is cut, and held by what knows no slices")
        cpu_milli, memory_bytes = sum(item.cpu_milli for item in held), sum(item.memory_bytes for item in held)
        if (cpu_milli, memory_bytes) != (self.allocated_cpu_milli, self.allocated_memory_bytes):
            raise InvariantBroken(f"{name}: the sums of CPU or memory are wrong")
        beyond = cpu_milli > self.inventory.cpu_milli or memory_bytes > self.inventory.memory_bytes
        if beyond != self.overcommitted:
            raise InvariantBroken(f"{name}: holds more than it has though it did not shrink")


def reallocate_replicas(
    nodes: Mapping[str, NodeRecord], workload: Workload, before: Sequence[Placement], after: Sequence[Placement]
) -> None:
    """Releases some places of a workload and holds others; raises ContradictoryEvent, and then nothing has changed."""
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


def apply_policy(nodes: Mapping[str, NodeRecord], before: Policy, after: Policy) -> frozenset[str]:
    """Puts another policy in force on nodes; those for which something is other, with new plans where these are."""
    changed, old_w, new_w = set(), get_node_budgets_w(before), get_node_budgets_w(after)
    for name, record in nodes.items():
        pool = record.inventory.pool
        kept = is_pool_partitioned(after, pool)
        turns = kept != record.partitioned
        turned = turns and record.set_partitioned(partitioned=kept)
        renewed = before.lease_s != after.lease_s or is_pool_enforced(before, pool) != is_pool_enforced(after, pool)
        renewed = renewed or old_w.get(name) != new_w.get(name)
        record.plan_epoch += renewed or turned
        changed |= {name} if renewed or turns else set()
    return frozenset(changed)
