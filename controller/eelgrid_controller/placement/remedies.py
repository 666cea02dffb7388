"""Remedies: what would place a pending workload: other work that ends, a smaller request, further models, more nodes.

Owns the structure of remedies and the search for them. Must not write sentences (`explanations`) nor change anything:
each remedy is tried on nodes as they would be, by the decision that the controller itself would take there.

Theory. What a node lacks is what it lacks for one more replica than it has room for: whole GPUs, a share of one, CPU
and memory. Since equal replicas pack in any order, the room of the cluster is the sum over its nodes, so a gang is
helped node by node until all of it fits. Nodes are tried by what they lack, in the order GPUs, CPU, memory, since GPUs
cost more than CPUs and CPUs more than memory; of equals, the first by name. On a node, workloads are chosen greedily
and then dropped again while the replica fits without: no proper subset of what is named is enough. The largest request
that fits is found by bisection, since room never grows with a request.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.placement.interference import LimitedGpu
from eelgrid_controller.placement.placer import NO_NODES, AlteredNodes, WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision, Planner, make_task
from eelgrid_controller.placement.power import ExceededBudget
from eelgrid_controller.placement.snapshot import Snapshot, count_room, limit_to_plan_size
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import CORDONED_BY_ENGINE
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_kernels.node_cost import GPU_PLACEABLE, replica_room
from eelgrid_protos.messages import (
    SLOWDOWN_MOST,
    Gpu,
    NodeState,
    Placement,
    ResourceRequest,
    WorkloadSpec,
    resolve_pool,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, MIB

# How many replicas of one workload are made room for, one after another.
_REPLICAS_HELPED_MOST = 32
_NODES_TRIED_MOST = 32
_ENDED_ON_NODE_MOST = 64
_ENDED_FOR_WATTS_MOST = 64
_MODELS_NAMED_MOST = 2
_PAIRS_NAMED_MOST = 3
# Below these a request is another one.
_CPU_LEAST_MILLI, _MEMORY_LEAST_BYTES, _SHARE_LEAST_MILLI = 100, 16 * MIB, 10
Ints = NDArray[np.int64]
Marks = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShortage:
    """What a node lacks for the replicas that are to go there; `gpus` are the GPUs to free, by index, and how much of each."""

    node_name: str
    gpus: tuple[tuple[int, int], ...] = ()
    cpu_milli: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWorkloads:
    """These workloads end, by themselves or cancelled; without shortages it is for their watts."""

    workload_ids: tuple[str, ...]
    shortages: tuple[NodeShortage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForLess:
    """The workload is submitted with this specification instead."""

    spec: WorkloadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowModels:
    """The request allows these GPU models as well; its first replica would go to the node."""

    models: tuple[str, ...]
    node_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchMigOff:
    """MIG is switched off on these GPUs, by node and index."""

    gpus: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenNodes:
    """Nodes accept work again; `obstacle` says why they do not: lost, closed, cordoned, unreported, withheld or ahead."""

    obstacle: str
    node_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UncordonGpus:
    """GPUs that an operator cordoned accept work again, by node and index."""

    gpus: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseBudgets:
    """Power budgets are raised to these watts, by key."""

    limits_w: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnforcePools:
    """The mode of these pools is enforce, so that the agents of these nodes keep their power budgets."""

    pools: tuple[str, ...]
    node_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionNodes:
    """So many nodes join, each with free what one replica asks for."""

    count: int
    request: ResourceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BearSlowdown:
    """The workload bears so much of the loads beside it on a GPU."""

    slowdown_most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLoads:
    """These pairs of loads, each the one that is slowed down first, are measured, and bear each other."""

    pairs: tuple[tuple[str, str], ...]


RemedyStep = (
    EndWorkloads
    | AskForLess
    | AllowModels
    | SwitchMigOff
    | OpenNodes
    | UncordonGpus
    | RaiseBudgets
    | EnforcePools
    | ProvisionNodes
    | BearSlowdown
    | MeasureLoads
)
# Steps that place the workload if all of them are taken.
Remedy = tuple[RemedyStep, ...]


class PendingCase(NamedTuple):
    """A pending workload, and what it is decided on."""

    workload_id: str
    spec: WorkloadSpec
    state: ClusterState
    placer: WorkloadPlacer
    closed: frozenset[str] = NO_NODES  # nodes that reservations close to it
    refused: frozenset[str] = frozenset()  # GPU models of which its queue has no quota left


class NodeGaps(NamedTuple):
    """What every node lacks for one more replica than it has room for; `usable` is (N, G), the others (N,)."""

    snapshot: Snapshot
    usable: Marks
    room: Ints
    gpus: Ints
    cpu_milli: Ints
    memory_bytes: Ints

    def list_nearest_rows(self, among: Marks) -> list[int]:
        """Returns the rows among these that lack least, of equals the first by name."""
        rows = np.flatnonzero(among)
        keys = (self.snapshot.nodes.rank, self.memory_bytes, self.cpu_milli, self.gpus)
        found: list[int] = rows[np.lexsort([key[rows] for key in keys])][:_NODES_TRIED_MOST].tolist()
        return found

    @property
    def is_open(self) -> Marks:
        """Whether a node accepts work and its plan can express one more replica."""
        left = self.snapshot.assignments_left
        return self.snapshot.nodes.available if left is None else self.snapshot.nodes.available & (left > self.room)


def measure_gaps(snapshot: Snapshot, spec: WorkloadSpec) -> NodeGaps:
    """Measures what every node lacks; of nodes that are not available, for the first replica."""
    nodes, request, task = snapshot.nodes, spec.request, make_task(spec.request)
    allows = snapshot.allowed_models(request.gpu_models)
    room = count_room(nodes, np.arange(len(nodes.rank)), task, allows, spec.replicas)[1]
    room = np.where(nodes.available, room, 0)
    if snapshot.assignments_left is not None:
        room = np.minimum(room, snapshot.assignments_left)
    usable = (nodes.gpu_state == GPU_PLACEABLE) & (allows[np.maximum(nodes.gpu_model, 0)] != 0)
    units = np.where(usable, nodes.gpu_free // max(1, request.gpu_milli), 0).sum(axis=1)
    wanted = room + 1
    return NodeGaps(
        snapshot,
        usable,
        room,
        np.maximum(0, wanted * request.gpu_count - units),
        np.maximum(0, wanted * request.cpu_milli - nodes.cpu_free),
        np.maximum(0, wanted * request.memory_bytes - nodes.memory_free),
    )


class _Lack(NamedTuple):
    """What one node lacks, exactly: GPUs or shares of the size asked for, CPU and memory."""

    gpus: int
    cpu_milli: int
    memory_bytes: int


class _NodeDemand(NamedTuple):
    """What a number of replicas needs of one node in all, and the GPUs that they may use, by UUID."""

    indexes: dict[str, int]
    gpus: int
    gpu_milli: int
    cpu_milli: int
    memory_bytes: int

    def free_milli(self, record: NodeRecord) -> dict[str, int]:
        """Returns what is free of each of these GPUs that no external work uses."""
        taken = record.externally_used_gpus()
        return {uuid: GPU_MILLI_WHOLE - record.gpu_milli.get(uuid, 0) for uuid in self.indexes if uuid not in taken}

    def lack(self, record: NodeRecord) -> _Lack:
        """Returns what the node lacks."""
        units = sum(free // self.gpu_milli for free in self.free_milli(record).values()) if self.gpus else 0
        cpu_milli, memory_bytes = record.cpu_left_milli, record.memory_left_bytes
        return _Lack(
            max(0, self.gpus - units),
            self.cpu_milli - cpu_milli if self.cpu_milli > max(0, cpu_milli) else 0,
            self.memory_bytes - memory_bytes if self.memory_bytes > max(0, memory_bytes) else 0,
        )

    def gpu_gaps(self, record: NodeRecord) -> list[tuple[int, str]]:
        """Returns by how much each GPU falls short of one more share, the least first, and its UUID."""
        milli = self.gpu_milli
        free = self.free_milli(record)
        found = [
            (milli - free[uuid] % milli, index, uuid)
            for uuid, index in self.indexes.items()
            if uuid in free and (free[uuid] // milli + 1) * milli <= GPU_MILLI_WHOLE
        ]
        return [(gap, uuid) for gap, _, uuid in sorted(found)]


def _merge_shortages(found: Iterable[NodeShortage]) -> tuple[NodeShortage, ...]:
    merged: dict[str, NodeShortage] = {}
    for one in found:
        known = merged.get(one.node_name, NodeShortage(node_name=one.node_name))
        milli = Counter(dict(known.gpus)) + Counter(dict(one.gpus))
        merged[one.node_name] = NodeShortage(
            node_name=one.node_name,
            gpus=tuple(sorted(milli.items())),
            cpu_milli=known.cpu_milli + one.cpu_milli,
            memory_bytes=known.memory_bytes + one.memory_bytes,
        )
    return tuple(merged.values())


def _obstacle(record: NodeRecord) -> str:
    """Returns the first reason for which a node accepts no work; empty if it does."""
    if not record.is_ready:
        return "lost"
    if record.ahead is not None:
        return "ahead"
    if not record.is_reported:
        return "unreported"
    if record.withheld:
        return "withheld"
    if record.cordon is not None:
        return "cordoned"
    return "closed" if record.others.closed else ""


def _open_node(record: NodeRecord, obstacle: str) -> NodeRecord:
    """Returns a copy of a record without an obstacle."""
    twin = record.copy()
    match obstacle:
        case "lost":
            twin.state = NodeState.READY
        case "ahead":
            twin.ahead = None
        case "unreported":
            twin.doubted_epoch = None
        case "withheld":
            twin.withheld = False
        case "cordoned":
            twin.cordon = None
            if twin.others.closed == CORDONED_BY_ENGINE:
                # An engine's cordon follows the operator's.
                twin.others = replace(twin.others, closed="")
        case _:
            twin.others = replace(twin.others, closed="")
    return twin


def _floor_digits(number: float, digits: int) -> float:
    """Rounds a positive number down to so many significant digits."""
    step = math.pow(10.0, math.floor(math.log10(number)) + 1 - digits)
    return math.floor(number / step + 1e-9) * step


def _floor_cpu(cpu_milli: int) -> int:
    """Rounds an amount down to what a sentence shows of it."""
    return int(_floor_digits(cpu_milli, 6)) if cpu_milli > 999_999 else cpu_milli


def _floor_memory(memory_bytes: int) -> int:
    """Rounds an amount down to what a sentence shows of it."""
    unit = 1 << 10 * min(4, int(math.log2(memory_bytes) // 10))
    return min(memory_bytes, round(_floor_digits(memory_bytes / unit, 4) * unit))


Altering = Callable[[NodeGaps, int, AlteredNodes], tuple[AlteredNodes, NodeShortage] | None]


class _RemedySearch:
    """The search for the remedies of one pending workload."""

    def __init__(self, case: PendingCase) -> None:
        self._id, self._spec, self._state, self._placer, self._closed, self._refused = case
        self._request = case.spec.request
        self._gaps = measure_gaps(self._permitted(AlteredNodes()), case.spec)
        self._room = int(self._gaps.room.sum())

    def list_for_capacity(self) -> Iterator[Remedy]:
        """Yields remedies for work that finds no room."""
        freed = self._alter(
            lambda gaps: gaps.is_open & (gaps.usable.sum(axis=1) >= self._request.gpu_count), self._end_on_node
        )
        if freed is not None:
            altered, shortages = freed
            end = EndWorkloads(workload_ids=tuple(sorted(altered.ended)), shortages=_merge_shortages(shortages))
            yield from self._verify(altered, end)
        for spec in self._smaller_specs():
            if self._decide(spec).placements:
                yield (AskForLess(spec=spec),)
        yield from self._further_models()
        cut = self._alter(lambda gaps: gaps.is_open & (gaps.gpus > 0), self._uncut_on_node)
        if cut is not None:
            altered, shortages = cut
            gpus = tuple((one.node_name, tuple(index for index, _ in one.gpus)) for one in _merge_shortages(shortages))
            yield from self._verify(altered, SwitchMigOff(gpus=gpus))
        uncordoned = self._alter(lambda gaps: gaps.is_open & (gaps.gpus > 0), self._uncordon_on_node)
        if uncordoned is not None:
            altered, shortages = uncordoned
            gpus = tuple((one.node_name, tuple(index for index, _ in one.gpus)) for one in _merge_shortages(shortages))
            yield from self._verify(altered, UncordonGpus(gpus=gpus))
        for obstacle in ("cordoned", "lost", "closed", "unreported", "withheld", "ahead"):
            opened = self._alter(self._is_closed_with_room, self._opening(obstacle))
            if opened is not None:
                names = tuple(one.node_name for one in opened[1])
                yield from self._verify(opened[0], OpenNodes(obstacle=obstacle, node_names=names))

    def list_for_watts(self) -> Iterator[Remedy]:
        """Yields remedies for work that only power budgets prevent."""
        placements = self._places_without_budgets(AlteredNodes())
        limits = self._limits_to_raise(placements, AlteredNodes())
        if limits.limits_w:
            yield (limits,)
        enforced = self._pools_to_enforce(placements)
        if enforced is not None:
            yield (enforced,)
        ended = self._end_for_watts(placements)
        if ended:
            yield from self._verify(self._without(AlteredNodes(), ended), EndWorkloads(workload_ids=ended))
        for spec in (self._fewer(replicas=True), self._fewer(replicas=False)):
            if spec is not None:
                yield (AskForLess(spec=spec),)

    def list_for_interference(self) -> Iterator[Remedy]:
        """Yields remedies for work that only limits on interference keep from shared GPUs."""
        limited = self._placer.list_limited_gpus(self._spec, self._id)
        gpus = list(islice((gpu for gpu in limited if gpu.node_name not in self._closed), _NODES_TRIED_MOST))
        for ended in sorted(self._list_sharing(gpus), key=lambda keys: [self._footprint(key) for key in keys]):
            found = tuple(self._verify(self._without(AlteredNodes(), ended), EndWorkloads(workload_ids=ended)))
            if found:
                yield from found
                break
        sharing, bearable = self._spec.shared_load, min((gpu.slowdown for gpu in gpus), default=math.inf)
        unmeasured = [gpu.unmeasured for gpu in gpus if gpu.unmeasured]
        if sharing is not None and self._spec.replicas > 1:
            # They slow each other down as well.
            own = self._placer.find_own_slowdown(self._spec)
            bearable = own if math.isinf(bearable) else max(bearable, own)
            unmeasured += [((sharing.load, sharing.load),)] if sharing.load and math.isinf(own) else []
        if sharing is not None and bearable <= SLOWDOWN_MOST:
            slowdown_most = math.ceil(100 * bearable - 1e-6) / 100
            spec = replace(self._spec, gpu_sharing=replace(sharing, slowdown_most=slowdown_most))
            if self._decide(spec).placements:
                yield (BearSlowdown(slowdown_most=slowdown_most),)
        if unmeasured:
            yield (MeasureLoads(pairs=min(unmeasured, key=len)[:_PAIRS_NAMED_MOST]),)

    def _list_sharing(self, gpus: Iterable[LimitedGpu]) -> Iterator[tuple[str, ...]]:
        """Yields the workloads on each GPU, one by one, and all of them together."""
        for gpu in gpus:
            held = self._state.nodes[gpu.node_name].assignments.values()
            keys = tuple(sorted({one.workload_id for one in held if gpu.uuid in one.gpu_uuids}))
            yield from ((key,) for key in keys)
            yield keys

    def nodes_to_add(self, room: int | None = None) -> ProvisionNodes | None:
        """Returns the nodes that would do; None if they would need traits, or watts, as well. `room` is known otherwise."""
        needs_watts = self._request.gpu_count and self._placer.allowance.has_budgets
        needs_traits = self._spec.required_traits or self._spec.process is not None
        if needs_watts or needs_traits or self._placer.uses_engine_rules(self._id):
            return None
        room = self._room if room is None else room
        return ProvisionNodes(count=max(1, self._spec.replicas - room), request=self._request)

    def _permitted(self, altered: AlteredNodes) -> Snapshot:
        return self._placer.list_permitted_nodes(altered, self._spec, self._id, self._closed)

    def _decide(self, spec: WorkloadSpec) -> PlacementDecision:
        return self._placer.decide_placement(spec, workload_id=self._id, closed=self._closed)

    def _record(self, name: str, altered: AlteredNodes) -> NodeRecord:
        return altered.records.get(name) or self._state.nodes[name]

    def _verify(self, altered: AlteredNodes, step: RemedyStep) -> Iterator[Remedy]:
        """Yields the step if it places the workload, with higher budgets if it needs their watts as well."""
        decision = self._placer.decide_on_altered(altered, self._spec, self._id, self._closed, is_start=True)
        if decision.placements:
            yield (step,)
        elif decision.lack is not None:
            yield step, self._limits_to_raise(self._places_without_budgets(altered), altered)

    def _alter(
        self, select: Callable[[NodeGaps], Marks], alter: Altering
    ) -> tuple[AlteredNodes, list[NodeShortage]] | None:
        """Alters node after node until all replicas have room; None if that fails or takes too many nodes."""
        altered, gaps, found = AlteredNodes(), self._gaps, list[NodeShortage]()
        while int(gaps.room.sum()) < self._spec.replicas:
            rows = gaps.list_nearest_rows(select(gaps)) if len(found) < _REPLICAS_HELPED_MOST else []
            step = next((step for row in rows if (step := alter(gaps, row, altered)) is not None), None)
            if step is None:
                return None
            altered = step[0]
            found.append(step[1])
            gaps = measure_gaps(self._permitted(altered), self._spec)
        return altered, found

    # Other work that ends.

    def _footprint(self, workload_id: str) -> tuple[int, int, int, str]:
        """Returns what is lost if a workload ends, for comparison."""
        spec = self._state.workloads[workload_id].spec
        gpu_milli = spec.request.gpu_count * spec.request.gpu_milli
        return spec.priority, spec.replicas * gpu_milli, spec.replicas * spec.request.cpu_milli, workload_id

    def _without(self, altered: AlteredNodes, ended: Iterable[str]) -> AlteredNodes:
        """Returns the nodes as they are once these workloads have ended everywhere."""
        gone = frozenset(ended)
        names = {placement.node_name for key in gone for placement in self._state.workloads[key].placements}
        records = dict(altered.records)
        records.update({name: self._record(name, altered).copy_without(gone) for name in names})
        return AlteredNodes(records, altered.ended | gone)

    def _end_on_node(self, gaps: NodeGaps, row: int, altered: AlteredNodes) -> tuple[AlteredNodes, NodeShortage] | None:
        name, devices, request = gaps.snapshot.names[row], gaps.snapshot.devices[row], self._request
        record, wanted = self._record(name, altered), int(gaps.room[row]) + 1
        demand = _NodeDemand(
            {devices.uuids[slot]: devices.indexes[slot] for slot in np.flatnonzero(gaps.usable[row])},
            wanted * request.gpu_count,
            max(1, request.gpu_milli),
            wanted * request.cpu_milli,
            wanted * request.memory_bytes,
        )
        lack = demand.lack(record)
        ended = self._choose_ended(demand, record)
        if not ended:
            return None
        before, after = demand.free_milli(record), demand.free_milli(record.copy_without(ended))
        is_whole = request.gpu_milli == GPU_MILLI_WHOLE
        freed = [
            (demand.indexes[uuid], GPU_MILLI_WHOLE if is_whole else gap)
            for gap, uuid in demand.gpu_gaps(record)
            if after.get(uuid, 0) - before[uuid] >= gap
        ]
        shortage = NodeShortage(
            node_name=name,
            gpus=tuple(sorted(freed[: lack.gpus])),
            cpu_milli=lack.cpu_milli,
            memory_bytes=lack.memory_bytes,
        )
        return self._without(altered, ended), shortage

    def _choose_ended(self, demand: _NodeDemand, record: NodeRecord) -> list[str]:
        """Returns workloads without which the demand fits on the node, none of them in vain; empty if none do."""
        chosen, left = list[str](), record
        while any(lack := demand.lack(left)):
            found = self._holder_of_gpu(demand, left) if lack.gpus else self._holder_of_rest(lack, left)
            if not found or len(chosen) == _ENDED_ON_NODE_MOST:
                return []
            chosen.append(found)
            left = left.copy_without((found,))
        for key in tuple(chosen):
            rest = [other for other in chosen if other != key]
            if not any(demand.lack(record.copy_without(rest))):
                chosen = rest
        return chosen

    def _holder_of_gpu(self, demand: _NodeDemand, record: NodeRecord) -> str:
        """Returns a workload on the GPU that falls least short: the least that holds enough, or else the largest."""
        for gap, uuid in demand.gpu_gaps(record):
            held = Counter[str]()
            for item in record.assignments.values():
                held[item.workload_id] += item.gpu_milli if uuid in item.gpu_uuids else 0
            enough = [key for key, milli in held.items() if milli >= gap]
            if enough:
                return min(enough, key=self._footprint)
            if any(held.values()):
                return max(held, key=lambda key: (held[key], key))
        return ""

    def _holder_of_rest(self, lack: _Lack, record: NodeRecord) -> str:
        """Returns the least workload that holds all the CPU and memory that lacks, or else the one that holds most of it."""
        cpu, memory = Counter[str](), Counter[str]()
        for item in record.assignments.values():
            cpu[item.workload_id] += item.cpu_milli
            memory[item.workload_id] += item.memory_bytes
        enough = [key for key in cpu if cpu[key] >= lack.cpu_milli and memory[key] >= lack.memory_bytes]
        if enough:
            return min(enough, key=self._footprint)

        def part(key: str) -> float:
            pairs = ((cpu[key], lack.cpu_milli), (memory[key], lack.memory_bytes))
            return sum(min(1.0, held / missing) for held, missing in pairs if missing)

        most = max(cpu, key=lambda key: (part(key), key), default="")
        return most if most and part(most) > 0.0 else ""

    # Other GPUs and nodes.

    def _uncut_on_node(
        self, gaps: NodeGaps, row: int, altered: AlteredNodes
    ) -> tuple[AlteredNodes, NodeShortage] | None:
        """Switches MIG off where that alone makes room; the partition planner's GPUs are not the operator's to switch."""
        if gaps.cpu_milli[row] or gaps.memory_bytes[row]:
            return None
        name, models = gaps.snapshot.names[row], self._request.gpu_models
        record = self._record(name, altered)
        taken = record.externally_used_gpus() | record.lost_gpus | record.gpu_milli.keys()
        cut = [
            gpu
            for gpu in sorted(record.inventory.gpus, key=lambda gpu: gpu.index)
            if (gpu.mig_enabled or gpu.mig_pending)
            and (not models or gpu.model in models)
            and not (record.cordon_reason(gpu) or gpu.uuid in taken or record.is_partition_managed(gpu))
        ]
        each = GPU_MILLI_WHOLE // self._request.gpu_milli
        cut = cut[: -(-int(gaps.gpus[row]) // each)]
        if not cut or len(cut) * each < gaps.gpus[row]:
            return None
        whole = {gpu.uuid: replace(gpu, mig_enabled=False, mig_pending=False) for gpu in cut}
        twin = record.copy()
        gpus = tuple(whole.get(gpu.uuid, gpu) for gpu in record.inventory.gpus)
        twin.inventory = replace(record.inventory, gpus=gpus)
        shortage = NodeShortage(node_name=name, gpus=tuple((gpu.index, GPU_MILLI_WHOLE) for gpu in cut))
        return altered._replace(records={**altered.records, name: twin}), shortage

    def _uncordon_on_node(
        self, gaps: NodeGaps, row: int, altered: AlteredNodes
    ) -> tuple[AlteredNodes, NodeShortage] | None:
        """Lifts operators' cordons of GPUs where that alone makes room for one more replica."""
        if gaps.cpu_milli[row] or gaps.memory_bytes[row]:
            return None
        name, request = gaps.snapshot.names[row], self._request
        record = self._record(name, altered)
        taken = record.externally_used_gpus() | record.lost_gpus
        free = {
            gpu: (GPU_MILLI_WHOLE - record.gpu_milli.get(gpu.uuid, 0)) // max(1, request.gpu_milli)
            for gpu in sorted(record.inventory.gpus, key=lambda gpu: gpu.index)
            if gpu.uuid in record.gpu_cordons
            and (not request.gpu_models or gpu.model in request.gpu_models)
            and not (gpu.cordon or gpu.uuid in taken or gpu.mig_enabled or record.is_partition_managed(gpu))
        }
        chosen, lack = list[Gpu](), int(gaps.gpus[row])
        for gpu, units in free.items():
            if units and lack > 0:
                chosen.append(gpu)
                lack -= units
        if lack > 0 or not chosen:
            return None
        twin = record.copy()
        for gpu in chosen:
            del twin.gpu_cordons[gpu.uuid]
        shortage = NodeShortage(node_name=name, gpus=tuple((gpu.index, GPU_MILLI_WHOLE) for gpu in chosen))
        return altered._replace(records={**altered.records, name: twin}), shortage

    @staticmethod
    def _is_closed_with_room(gaps: NodeGaps) -> Marks:
        fits = (gaps.gpus == 0) & (gaps.cpu_milli == 0) & (gaps.memory_bytes == 0)
        found: Marks = ~gaps.snapshot.nodes.available & fits
        return found

    def _opening(self, obstacle: str) -> Altering:
        """Returns what opens a node that has this obstacle and no other."""

        def open_node(gaps: NodeGaps, row: int, altered: AlteredNodes) -> tuple[AlteredNodes, NodeShortage] | None:
            name = gaps.snapshot.names[row]
            record = self._state.nodes[name]
            if name in altered.records or name in self._closed or _obstacle(record) != obstacle:
                return None
            twin = _open_node(record, obstacle)
            if _obstacle(twin):
                return None
            return altered._replace(records={**altered.records, name: twin}), NodeShortage(node_name=name)

        return open_node

    # Another request.

    def _fits(self, request: ResourceRequest) -> bool:
        """Returns whether all replicas of such a request have room, whatever the budgets."""
        snapshot, replicas = self._gaps.snapshot, self._spec.replicas
        nodes, task = snapshot.nodes, make_task(request)
        if snapshot.assignments_left is not None:
            nodes, task = limit_to_plan_size(nodes, task, snapshot.assignments_left)
        allows = snapshot.allowed_models(request.gpu_models)
        return int(replica_room(nodes, task, allows, replicas)) >= replicas

    def _largest(self, least: int, asked: int, make: Callable[[int], ResourceRequest]) -> int | None:
        """Returns the largest amount of at least `least` and less than asked for that fits."""
        if least >= asked or not self._fits(make(least)):
            return None
        beyond = asked
        while beyond - least > 1:
            middle = (least + beyond) // 2
            least, beyond = (middle, beyond) if self._fits(make(middle)) else (least, middle)
        return least

    def _smaller_requests(self) -> Iterator[ResourceRequest]:
        """Yields requests of less that fit: each amount alone, CPU and memory together if neither alone is enough."""
        request = self._request
        cpu = self._largest(_CPU_LEAST_MILLI, request.cpu_milli, lambda amount: replace(request, cpu_milli=amount))
        memory = self._largest(
            _MEMORY_LEAST_BYTES, request.memory_bytes, lambda amount: replace(request, memory_bytes=amount)
        )
        gpus = self._largest(1, request.gpu_count, lambda amount: replace(request, gpu_count=amount))
        if cpu is not None:
            yield replace(request, cpu_milli=_floor_cpu(cpu))
        if memory is not None:
            yield replace(request, memory_bytes=_floor_memory(memory))
        if cpu is None and memory is None:
            yield from self._smaller_on_one_node()
        if gpus is not None:
            yield replace(request, gpu_count=gpus)
        if request.gpu_milli < GPU_MILLI_WHOLE:
            milli = self._largest(
                _SHARE_LEAST_MILLI, request.gpu_milli, lambda amount: replace(request, gpu_milli=amount)
            )
            if milli is not None:
                yield replace(request, gpu_milli=milli)

    def _smaller_on_one_node(self) -> Iterator[ResourceRequest]:
        """Yields what the nearest node has of CPU and memory, where one replica lacks both."""
        gaps, nodes = self._gaps, self._gaps.snapshot.nodes
        both = gaps.is_open & (gaps.gpus == 0) & (gaps.cpu_milli > 0) & (gaps.memory_bytes > 0)
        enough = (nodes.cpu_free >= _CPU_LEAST_MILLI) & (nodes.memory_free >= _MEMORY_LEAST_BYTES)
        for row in gaps.list_nearest_rows(both & enough)[:1] if self._spec.replicas == 1 else []:
            yield replace(
                self._request,
                cpu_milli=_floor_cpu(int(nodes.cpu_free[row])),
                memory_bytes=_floor_memory(int(nodes.memory_free[row])),
            )

    def _smaller_specs(self) -> Iterator[WorkloadSpec]:
        """Yields valid specifications of less."""
        specs = [replace(self._spec, request=request) for request in self._smaller_requests()]
        if self._room:
            specs.append(replace(self._spec, replicas=self._room))
        for spec in specs:
            if not any(spec.request.violations()) and not any(spec.violations()):
                yield spec

    def _further_models(self) -> Iterator[Remedy]:
        """Yields models that are enough alone, or all those that are used if every model is allowed."""
        request, models = self._request, self._request.gpu_models
        others = sorted(set(self._gaps.snapshot.models).difference(models, self._refused)) if models else []
        found = 0
        for model in others:
            wider = replace(request, gpu_models=(*models, model))
            decision = self._decide(replace(self._spec, request=wider)) if self._fits(wider) else None
            if decision is not None and decision.placements:
                yield (AllowModels(models=(model,), node_name=decision.placements[0].node_name),)
                found += 1
            if found == _MODELS_NAMED_MOST:
                return
        every = replace(request, gpu_models=(*models, *others))
        if others and not found and self._fits(every):
            placements = self._decide(replace(self._spec, request=every)).placements
            used = {self._state.nodes[at.node_name].gpu(uuid) for at in placements for uuid in at.gpu_uuids}
            names = sorted({gpu.model for gpu in used if gpu is not None}.difference(models))
            if names:
                yield (AllowModels(models=tuple(names), node_name=placements[0].node_name),)

    # Watts.

    def _places_without_budgets(self, altered: AlteredNodes) -> tuple[Placement, ...]:
        policy = self._state.policy
        permitted = self._permitted(altered)
        return Planner().decide_placement(permitted, self._spec, policy.weights, policy.placement).placements

    def _limits_to_raise(self, placements: Sequence[Placement], altered: AlteredNodes) -> RaiseBudgets:
        """Returns the budgets that would do where the workload would go without any."""
        lacks = self._placer.allowance.list_exceeded_budgets(placements, altered.records)
        return RaiseBudgets(
            limits_w=tuple((lack.budget, float(math.ceil(lack.limit_w - lack.left_w + lack.more_w))) for lack in lacks)
        )

    def _pools_to_enforce(self, placements: Sequence[Placement]) -> EnforcePools | None:
        """Returns the pools whose agents would keep the budgets in the way, where the workload would go without any."""
        names = tuple(dict.fromkeys(placement.node_name for placement in placements))
        pools = {resolve_pool(self._state.nodes[name].inventory.pool) for name in names}
        pools = {pool for pool in pools if not is_pool_enforced(self._state.policy, pool)}
        if not pools or self._placer.list_start_lacks(self._spec, placements, enforced=pools):
            return None
        return EnforcePools(pools=tuple(sorted(pools)), node_names=names)

    def _end_for_watts(self, placements: Sequence[Placement]) -> tuple[str, ...]:
        """Returns workloads whose end leaves the watts, none of them in vain; empty if none do."""
        allowance = self._placer.allowance

        def lacks(ended: Iterable[str]) -> list[ExceededBudget]:
            return self._placer.list_start_lacks(self._spec, placements, self._without(AlteredNodes(), ended).records)

        exceeded = {lack.budget for lack in lacks(())}
        holders = {
            item.workload_id
            for name, record in self._state.nodes.items()
            if not exceeded.isdisjoint(allowance.budgets_above(name))
            for item in record.assignments.values()
            if item.gpu_uuids
        }
        ranked = sorted(holders, key=self._footprint)[:_ENDED_FOR_WATTS_MOST]
        for key in ranked:
            if not lacks((key,)):
                return (key,)
        chosen = list(ranked)
        if lacks(chosen):
            return ()
        for key in reversed(ranked):
            rest = [other for other in chosen if other != key]
            if not lacks(rest):
                chosen = rest
        return tuple(sorted(chosen))

    def _fewer(self, *, replicas: bool) -> WorkloadSpec | None:
        """Returns the largest specification of fewer replicas, or of fewer GPUs, for which there are watts."""
        request = self._request

        def make(amount: int) -> WorkloadSpec:
            if replicas:
                return replace(self._spec, replicas=amount)
            return replace(self._spec, request=replace(request, gpu_count=amount))

        least, beyond = 0, self._spec.replicas if replicas else request.gpu_count
        while beyond - least > 1:
            middle = (least + beyond) // 2
            least, beyond = (middle, beyond) if self._decide(make(middle)).placements else (least, middle)
        return make(least) if least and not any(make(least).violations()) else None


def list_remedies(case: PendingCase, decision: PlacementDecision) -> tuple[Remedy, ...]:
    """Returns ways to place a workload that was decided to wait, each of which is enough; empty if none is known."""
    search = _RemedySearch(case)
    if decision.lack is not None:
        return tuple(search.list_for_watts())
    by_interference = any(removal.constraint == "interference" for removal in decision.removals)
    found = tuple(search.list_for_interference() if by_interference else search.list_for_capacity())
    nodes = None if found else search.nodes_to_add(decision.room if by_interference else None)
    return found if nodes is None else ((nodes,),)
