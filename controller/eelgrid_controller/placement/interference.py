"""Interference: which work may share a GPU with which, by how much the loads on it slow each other down.

Owns the rule that says who may join whom (`InterferenceRules`), and which loads share each GPU of the cluster
(`SharedGpus`). Must not know how a place is chosen among those that are left, nor what slowdowns were measured with.

Theory. Loads that share a GPU contend for its multiprocessors, caches and memory bandwidth, whatever share each was
promised. s(a, b) is measured for pairs: a takes 1 + s(a, b) times as long beside b as alone on its share. Beside several
loads the slowdowns are added, which is exact where each of them takes its part of what a would use, and where measured
pairs are all that is known. A pair that nobody measured has no bound, so that it exceeds every limit. Slowdowns are not
negative: who joins never relieves those that are there, and the loads that may join are counted one by one.

Whoever states no limit bears everything, but also does not join those whose limit it would exceed.

Among GPUs within limits, work that is slowed down holds its share for longer: a slowdown s of a share that draws P watts
costs s P, of whoever joins and of those that are there; P is that of whoever joins, since shares of a GPU are of one order.
A pair that nobody measured counts there as taking turns, s = 1.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.placement.snapshot import Ints, Snapshot, count_room
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_kernels.arrays import Nodes, Task
from eelgrid_kernels.node_cost import GPU_PLACEABLE
from eelgrid_protos.messages import ANY_LOAD, GpuSharing, Placement, Policy, Workload, WorkloadSpec
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

_UNKNOWN = GpuSharing()
_NEARLY = 1e-9
_SEEN_LEAST = 16
# How much longer each of two loads takes that have a GPU in turns.
_TAKING_TURNS = 1.0


def list_sharing(
    record: NodeRecord, workloads: Mapping[str, Workload], coming: GpuSharing = _UNKNOWN
) -> dict[str, tuple[GpuSharing, ...]]:
    """Returns the loads on each GPU of a node that work has a share of, in one order, by UUID.

    `coming` is the load of what is not known as a workload yet.
    """
    found: dict[str, list[GpuSharing]] = {}
    if not _has_shares(record):
        return {}
    for assignment in record.assignments.values():
        if assignment.gpu_milli < GPU_MILLI_WHOLE and assignment.gpu_instance is None and assignment.gpu_uuids:
            workload = workloads.get(assignment.workload_id)
            found.setdefault(assignment.gpu_uuids[0], []).append(
                coming if workload is None else workload.spec.shared_load or _UNKNOWN
            )
    return {uuid: _in_order(loads) for uuid, loads in found.items()}


def _has_shares(record: NodeRecord) -> bool:
    return any(gpu_milli < GPU_MILLI_WHOLE for _, gpu_milli in record.shares_held)


def _in_order(loads: Iterable[GpuSharing]) -> tuple[GpuSharing, ...]:
    return tuple(sorted(loads, key=lambda one: (one.load, one.slowdown_most is not None, one.slowdown_most or 0.0)))


class LimitedGpu(NamedTuple):
    """A GPU that has room for a workload but for limits on interference."""

    node_name: str
    uuid: str
    # By how much the workload would be slowed down there; infinite if that is not known, or exceeds limits of others.
    slowdown: float
    # The pairs of loads that would have to be measured.
    unmeasured: tuple[tuple[str, str], ...]


class InterferenceRules:
    """Measured slowdowns and limits of a policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._slowdowns = {(one.load, one.beside): one.slowdown for one in policy.interference}
        self.default_most = policy.shared_slowdown_most

    def find_slowdown(self, load: str, beside: str) -> float:
        """Returns by how much one load is slowed down beside another, as a part of its time; infinite if nobody measured it."""
        keys = (load, beside), (load, ANY_LOAD), (ANY_LOAD, beside), (ANY_LOAD, ANY_LOAD)
        return next((self._slowdowns[key] for key in keys if key in self._slowdowns), math.inf)

    @property
    def has_pairs(self) -> bool:
        """Whether any pair was measured."""
        return bool(self._slowdowns)

    def sum_added(self, loads: Iterable[GpuSharing], newcomer: GpuSharing) -> float:
        """Sums by how much a newcomer and those on a GPU would slow each other down."""
        pairs = (pair for one in loads for pair in ((newcomer.load, one.load), (one.load, newcomer.load)))
        slowdowns = itertools.starmap(self.find_slowdown, pairs)
        return sum(slowdown if math.isfinite(slowdown) else _TAKING_TURNS for slowdown in slowdowns)

    def find_limit(self, one: GpuSharing) -> float | None:
        """Returns by how much a load may be slowed down; None for no limit."""
        return self.default_most if one.slowdown_most is None else one.slowdown_most

    def sum_slowdown(self, loads: Sequence[GpuSharing], number: int) -> float:
        """Returns by how much one of the loads on a GPU is slowed down by the others; infinite if a pair was not measured."""
        one = loads[number].load
        return sum(self.find_slowdown(one, other.load) for place, other in enumerate(loads) if place != number)

    def find_unmeasured(self, loads: Sequence[GpuSharing]) -> tuple[tuple[str, str], ...]:
        """Returns the pairs of loads with names that were not measured and matter to a limit, each once."""
        pairs = [
            (one.load, other.load)
            for number, one in enumerate(loads)
            for place, other in enumerate(loads)
            if place != number and self.find_limit(one) is not None and one.load and other.load
        ]
        return tuple(pair for pair in dict.fromkeys(pairs) if math.isinf(self.find_slowdown(*pair)))

    def are_within_limits(self, loads: Sequence[GpuSharing]) -> bool:
        """Returns whether all loads on one GPU bear each other."""
        for number, one in enumerate(loads):
            most = self.find_limit(one)
            # Sums of a few measured parts: equal to a limit is within it.
            if most is not None and self.sum_slowdown(loads, number) > most + _NEARLY:
                return False
        return True

    def find_obstacle(
        self, loads: Sequence[GpuSharing], newcomer: GpuSharing
    ) -> tuple[float, tuple[tuple[str, str], ...]]:
        """Returns how much a newcomer would have to bear on a GPU, infinite if others do not bear it, and what nobody measured."""
        together = (*loads, replace(newcomer, slowdown_most=math.inf))
        needed = self.sum_slowdown(together, len(loads)) if self.are_within_limits(together) else math.inf
        return needed, self.find_unmeasured((*loads, newcomer))

    def count_joining(self, loads: Sequence[GpuSharing], newcomer: GpuSharing, most: int) -> int:
        """Counts how many replicas of one load may join those on a GPU, up to `most`."""
        count = 0
        while count < most and self.are_within_limits((*loads, *(newcomer,) * (count + 1))):
            count += 1
        return count


class SharedGpus:
    """Which loads share each GPU of the cluster; call `refresh` after each change.

    Loads are listed when they are first asked for: as long as nobody has a limit, a change costs a look at what is new.
    """

    def __init__(self, nodes: Mapping[str, NodeRecord], workloads: Mapping[str, Workload]) -> None:
        self._nodes, self._workloads = nodes, workloads
        self._listed: dict[str, dict[str, tuple[GpuSharing, ...]]] = {}
        self._stale: set[str] = set()
        # By node, the replicas whose limits were looked at, some of the past among them.
        self._seen: dict[str, set[tuple[str, int]]] = {}
        self._has_limits = False
        self.refresh(nodes)

    def refresh(self, names: Iterable[str]) -> None:
        """Notes that what is on these nodes may have changed."""
        for name in names:
            self._stale.add(name)
            record = self._nodes.get(name)
            if record is not None and not self._has_limits and _has_shares(record):
                seen = self._seen.setdefault(name, set())
                if len(seen) > 2 * len(record.assignments) + _SEEN_LEAST:
                    seen.clear()
                new = record.assignments.keys() - seen
                seen |= new
                self._has_limits = any(map(self._has_limit, new))

    def _has_limit(self, key: tuple[str, int]) -> bool:
        workload = self._workloads.get(key[0])
        sharing = None if workload is None else workload.spec.gpu_sharing
        return sharing is not None and sharing.slowdown_most is not None

    def _list_by_node(self) -> dict[str, dict[str, tuple[GpuSharing, ...]]]:
        """Returns the loads on the shared GPUs of each node that has some, by UUID."""
        for name in self._stale:
            record = self._nodes.get(name)
            found = {} if record is None else list_sharing(record, self._workloads)
            if found:
                self._listed[name] = found
            else:
                self._listed.pop(name, None)
        self._stale.clear()
        return self._listed

    def is_limited(self, spec: WorkloadSpec, rules: InterferenceRules) -> bool:
        """Returns whether limits may matter for where a workload goes: its own, or those of what shares GPUs."""
        load = spec.shared_load
        if load is None or (spec.service is not None and spec.service.slices):
            return False
        return self._has_limits or rules.has_pairs or rules.find_limit(load) is not None

    def find_limited(self, rules: InterferenceRules) -> frozenset[str]:
        """Finds the GPUs on which a load has a limit, by UUID."""
        if not self._has_limits and rules.default_most is None:
            return frozenset()
        return frozenset(
            uuid
            for found in self._list_by_node().values()
            for uuid, loads in found.items()
            if any(rules.find_limit(one) is not None for one in loads)
        )

    def close_gpus(
        self,
        snapshot: Snapshot,
        spec: WorkloadSpec,
        rules: InterferenceRules,
        altered: Mapping[str, Mapping[str, tuple[GpuSharing, ...]]],
        added_below: float = math.inf,
    ) -> tuple[Snapshot, int]:
        """Returns a snapshot in which GPUs have no more room for a workload than limits allow, and how many nodes that closes.

        GPUs are closed as well where it would add up to slowdowns of `added_below` or more. `altered` are the loads on nodes that differ from the state. An idle GPU keeps its whole room, since it must look idle:
        of several replicas more may be placed there than bear each other.
        """
        request, newcomer = spec.request, spec.shared_load or _UNKNOWN
        most = min(spec.replicas, GPU_MILLI_WHOLE // request.gpu_milli)
        joining: dict[tuple[GpuSharing, ...], int] = {}
        gpu_free = snapshot.nodes.gpu_free.copy()
        listed = self._list_by_node()
        rows = {name: row for row, name in enumerate(snapshot.names)} if listed or altered else {}
        changed = []
        for name in listed.keys() | altered.keys():
            found = altered[name] if name in altered else listed[name]
            for slot, uuid in enumerate(snapshot.devices[rows[name]].uuids):
                loads = found.get(uuid)
                if loads is None:
                    continue
                if loads not in joining:
                    is_quiet = math.isinf(added_below) or rules.sum_added(loads, newcomer) < added_below - _NEARLY
                    joining[loads] = rules.count_joining(loads, newcomer, most) if is_quiet else 0
                room_milli = (joining[loads] + 1) * request.gpu_milli - 1
                if joining[loads] < most and gpu_free[rows[name], slot] > room_milli:
                    gpu_free[rows[name], slot] = room_milli
                    changed.append(rows[name])
        if not changed:
            return snapshot, 0
        nodes, among = snapshot.nodes._replace(gpu_free=gpu_free), np.unique(np.array(changed))
        is_closed = self._find_closed(snapshot, nodes, among, spec)
        closed = among[is_closed & nodes.available[among]]
        available = nodes.available.copy()
        available[closed] = False
        gpu_free.flags.writeable = available.flags.writeable = False
        return replace(snapshot, nodes=nodes._replace(available=available), changes=[]), len(closed)

    def on_gpus(
        self, places: Iterable[Placement], altered: Mapping[str, Mapping[str, tuple[GpuSharing, ...]]]
    ) -> dict[str, tuple[GpuSharing, ...]]:
        """Returns the loads on the nodes of these places, by UUID."""
        found: dict[str, tuple[GpuSharing, ...]] = {}
        for name in {place.node_name for place in places}:
            found.update(altered[name] if name in altered else self._list_by_node().get(name, {}))
        return found

    def list_with_room(
        self, snapshot: Snapshot, spec: WorkloadSpec
    ) -> Iterator[tuple[str, str, tuple[GpuSharing, ...]]]:
        """Yields node, UUID and loads of each shared GPU that has room for one replica but for limits, in the order of names."""
        allowed, nodes, request = snapshot.allowed_models(spec.request.gpu_models), snapshot.nodes, spec.request
        listed = self._list_by_node()
        for row, name in enumerate(snapshot.names):
            found = listed.get(name, {})
            has_rest = nodes.cpu_free[row] >= request.cpu_milli and nodes.memory_free[row] >= request.memory_bytes
            for slot, uuid in enumerate(
                snapshot.devices[row].uuids if found and nodes.available[row] and has_rest else ()
            ):
                is_usable = nodes.gpu_state[row, slot] == GPU_PLACEABLE and allowed[nodes.gpu_model[row, slot]]
                if uuid in found and is_usable and nodes.gpu_free[row, slot] >= request.gpu_milli:
                    yield name, uuid, found[uuid]

    @staticmethod
    def _find_closed(snapshot: Snapshot, nodes: Nodes, rows: Ints, spec: WorkloadSpec) -> NDArray[np.bool_]:
        """Returns which of these rows had room for one replica, and have none now."""
        request = spec.request
        task = Task(request.cpu_milli, request.memory_bytes, request.gpu_count, request.gpu_milli)
        allows = snapshot.allowed_models(request.gpu_models)
        before, after = (count_room(one, rows, task, allows, 1)[1] for one in (snapshot.nodes, nodes))
        found: NDArray[np.bool_] = (before > 0) & (after == 0)
        return found


def choose_bearable(
    places: Sequence[Placement],
    on_gpu: Mapping[str, tuple[GpuSharing, ...]],
    spec: WorkloadSpec,
    rules: InterferenceRules,
) -> list[Placement]:
    """Returns those of new places that bear each other and what is there (loads by UUID), as many as possible of each GPU."""
    newcomer = spec.shared_load or _UNKNOWN
    by_gpu: dict[str, list[Placement]] = {}
    for place in places:
        by_gpu.setdefault(place.gpu_uuids[0], []).append(place)
    kept = []
    for uuid, here in by_gpu.items():
        kept += here[: rules.count_joining(on_gpu.get(uuid, ()), newcomer, len(here))]
    return sorted(kept, key=lambda one: one.replica)
