"""Limits on interference over a whole cluster: which GPUs have how much room for a load, beside what shares them.

Owns the mixes of loads on the GPUs of the cluster as an array of numbers, and turns limits into room that a search for places
sees. Must not know the rule itself (state.interference).

Theory. Of each mix the rule says how many replicas of a load may join it, which holds for all GPUs with that mix. A GPU that may
be joined by k of them is shown with room for k. An idle GPU must look idle, as its watts count: so that no more than t
replicas go there, t being how many bear each other, each asks for a little more than 1 / (t + 1) of a GPU in the search, and
shared GPUs are shown with room for k of that size.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.placement.planner import make_task
from eelgrid_controller.placement.snapshot import Ints, Snapshot, SnapshotMirror, count_room
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.interference import (
    NEARLY,
    TAKING_TURNS,
    UNKNOWN_LOAD,
    InterferenceRules,
    LoadMix,
    has_shares,
    join_mix,
    list_mixes,
)
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_kernels.node_cost import GPU_PLACEABLE
from eelgrid_protos.messages import GpuSharing, WorkloadSpec
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# Mixes that have a number, many of them of the past; beyond these all GPUs are numbered anew.
_MIXES_MOST = 16_384


class LimitedGpu(NamedTuple):
    """A GPU that has room for a workload but for limits on interference."""

    node_name: str
    uuid: str
    # By how much the workload would be slowed down there; infinite if that is not known, or exceeds limits of others.
    slowdown: float
    # The pairs of loads that would have to be measured.
    unmeasured: tuple[tuple[str, str], ...]


class LimitedSearch(NamedTuple):
    """What a search for places is made on, and for: GPUs with room within limits, and how many nodes they close."""

    snapshot: Snapshot
    spec: WorkloadSpec
    closed: int


class MixTable:
    """Mixes by number, and the answers of the rule for all of them at once (state.interference has it for one).

    Arrays have a row for each of M mixes and a column for each of L loads. Slowdowns that nobody measured are counted apart, as
    infinity times 0 is none.
    """

    def __init__(self) -> None:
        self.mixes: list[LoadMix] = [()]
        self._numbers: dict[LoadMix, int] = {(): 0}
        self._loads: dict[GpuSharing, int] = {}
        self._counts: NDArray[np.float64] = np.zeros((1, 0))
        self._known: _Slowdowns | None = None
        # How much more each load of each mix bears (M, L); infinite where it is not there or has no limit.
        self._slack: NDArray[np.float64] = np.zeros((1, 0))

    def number(self, mix: LoadMix) -> int:
        """Returns the number of a mix."""
        found = self._numbers.get(mix)
        if found is None:
            found = self._numbers[mix] = len(self.mixes)
            self.mixes.append(mix)
            for load, _ in mix:
                self._loads.setdefault(load, len(self._loads))
        return found

    def _refresh(self, rules: InterferenceRules, newcomer: GpuSharing) -> "_Slowdowns":
        self._loads.setdefault(newcomer, len(self._loads))
        known, shape = self._known, (len(self.mixes), len(self._loads))
        is_same = self._counts.shape == shape
        if known is not None and known.rules is rules and is_same:
            return known
        counts = np.zeros(shape)
        rows, columns = self._counts.shape
        counts[:rows, :columns] = self._counts
        for row in range(rows, shape[0]):
            for load, count in self.mixes[row]:
                counts[row, self._loads[load]] = count
        self._counts = counts
        if known is None or known.rules is not rules or len(known.limits) != shape[1]:
            known = _read_slowdowns(rules, list(self._loads))
        self._known = known
        slowed = counts @ known.slowdowns.T - np.diag(known.slowdowns)
        unknown = counts @ known.unknown.T - np.diag(known.unknown)
        self._slack = np.where((counts > 0) & np.isfinite(known.limits), known.limits - slowed, np.inf)
        self._slack[(counts > 0) & np.isfinite(known.limits) & (unknown > 0.5)] = -np.inf
        return known

    def count_joining(self, rules: InterferenceRules, newcomer: GpuSharing, most: int) -> Ints:
        """Counts how many replicas of a load may join each mix (M,), up to `most`."""
        known = self._refresh(rules, newcomer)
        mine = self._loads[newcomer]
        each, is_unknown, slack = known.slowdowns[:, mine], known.unknown[:, mine] > 0, self._slack
        with np.errstate(divide="ignore", invalid="ignore"):
            bounds = np.where(each > 0.0, (slack + NEARLY) / each, np.inf)
        bounds[(slack < -NEARLY) | (is_unknown & np.isfinite(slack))] = 0.0
        found = bounds.min(axis=1, initial=float(most))
        if np.isfinite(known.limits[mine]):
            left = known.limits[mine] - self._counts @ known.slowdowns[mine]
            beside = 0.0 if known.unknown[mine, mine] else np.inf
            if known.slowdowns[mine, mine] > 0.0:
                beside = (left + NEARLY) / known.slowdowns[mine, mine]
            is_refused = (left < -NEARLY) | (self._counts @ known.unknown[mine] > 0.5)
            found = np.minimum(found, np.where(is_refused, 0.0, 1.0 + np.floor(beside)))
        joining: Ints = np.floor(np.clip(found, 0.0, most)).astype(np.int64)
        return joining

    def sum_added(self, rules: InterferenceRules, newcomer: GpuSharing) -> NDArray[np.float64]:
        """Sums by how much a newcomer and the loads of each mix (M,) would slow each other down."""
        known = self._refresh(rules, newcomer)
        mine, taken = self._loads[newcomer], known.slowdowns + TAKING_TURNS * known.unknown
        added: NDArray[np.float64] = self._counts @ (taken[mine] + taken[:, mine])
        return added


class _Slowdowns(NamedTuple):
    """Of L loads: limits (L,), slowdowns (L, L) of the first beside the second, and 1 where nobody measured them (L, L)."""

    rules: InterferenceRules
    limits: NDArray[np.float64]
    slowdowns: NDArray[np.float64]
    unknown: NDArray[np.float64]


def _read_slowdowns(rules: InterferenceRules, loads: list[GpuSharing]) -> _Slowdowns:
    limits = [rules.find_limit(one) for one in loads]
    found = np.array([[rules.find_slowdown(one.load, other.load) for other in loads] for one in loads]).reshape(
        len(loads), len(loads)
    )
    return _Slowdowns(
        rules,
        np.array([np.inf if most is None else most for most in limits]),
        np.where(np.isinf(found), 0.0, found),
        np.isinf(found).astype(np.float64),
    )


class SharedGpus:
    """Which loads share each GPU of the cluster; call `refresh` after each change.

    Loads are listed when they are first asked for: as long as nobody has a limit, a change costs a look at what is new.
    """

    def __init__(self, state: ClusterState, mirror: SnapshotMirror) -> None:
        self._nodes, self._workloads, self._nominations = state.nodes, state.workloads, state.nominations
        self._mirror = mirror
        # Numbers of mixes by row and slot (N, G); 0 is that of none.
        self._codes: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._table = MixTable()
        self._stale: set[str] = set()
        # By node, the replicas whose limits were looked at; and those that have one.
        self._seen: dict[str, set[tuple[str, int]]] = {}
        self._limited: set[tuple[str, tuple[str, int]]] = set()
        self.refresh(state.nodes)

    def refresh(self, names: Iterable[str]) -> None:
        """Notes that what is on these nodes may have changed."""
        for name in names:
            self._stale.add(name)
            record, seen = self._nodes[name], self._seen.get(name)
            if seen is None and not has_shares(record):
                continue
            seen = set() if seen is None else seen
            for key in record.assignments.keys() - seen:
                if self._has_limit(key):
                    self._limited.add((name, key))
            for key in seen - record.assignments.keys():
                self._limited.discard((name, key))
            self._seen[name] = set(record.assignments)

    def _has_limit(self, key: tuple[str, int]) -> bool:
        workload = self._workloads.get(key[0])
        sharing = None if workload is None else workload.spec.gpu_sharing
        return sharing is not None and sharing.slowdown_most is not None

    def is_limited(
        self, spec: WorkloadSpec, rules: InterferenceRules, altered: Mapping[str, NodeRecord] | None = None
    ) -> bool:
        """Returns whether pairs or limits may matter for where a workload goes; `altered` are nodes that differ from the state.

        On these, work that does not run yet may have limits: what is nominated, and what is promised a start.
        """
        if not spec.request.is_share or (spec.service is not None and spec.service.slices):
            return False
        own = None if spec.gpu_sharing is None else spec.gpu_sharing.slowdown_most
        if self._limited or rules.has_pairs or own is not None or rules.default_most is not None:
            return True
        held = (key for record in (altered or {}).values() for key in record.assignments)
        nominated = self._nominations.list_loads(self._workloads).values() if altered else ()
        is_nominated = any(one.slowdown_most is not None for loads in nominated for one in loads)
        return is_nominated or any(map(self._has_limit, held))

    def _read_codes(self, altered: Mapping[str, NodeRecord] | None = None) -> NDArray[np.int32]:
        """Returns the numbers of mixes (N, G), with nodes as these records have them."""
        snapshot = self._mirror.snapshot()
        shape = snapshot.nodes.gpu_free.shape
        if self._codes.shape != shape:
            grown: NDArray[np.int32] = np.zeros(shape, np.int32)
            rows, slots = (min(pair) for pair in zip(shape, self._codes.shape, strict=True))
            grown[:rows, :slots] = self._codes[:rows, :slots]
            self._codes = grown
        if len(self._table.mixes) > _MIXES_MOST:
            self._table, self._stale = MixTable(), set(self._nodes)
        for name in self._stale:
            record = self._nodes[name]
            self._write_row(self._codes, snapshot, name, record if has_shares(record) else None)
        self._stale.clear()
        if not altered:
            return self._codes
        codes, nominated = self._codes.copy(), self._nominations.list_loads(self._workloads)
        for name, record in altered.items():
            self._write_row(codes, snapshot, name, record)
            for slot, uuid in enumerate(snapshot.devices[self._mirror.row(name)].uuids if nominated else ()):
                if uuid in nominated:
                    place = self._mirror.row(name), slot
                    codes[place] = self._table.number(join_mix(self._table.mixes[codes[place]], nominated[uuid]))
        return codes

    def _write_row(self, codes: NDArray[np.int32], snapshot: Snapshot, name: str, record: NodeRecord | None) -> None:
        row = self._mirror.row(name)
        mixes = {} if record is None else list_mixes(record, self._workloads)
        codes[row] = 0
        if mixes:
            for slot, uuid in enumerate(snapshot.devices[row].uuids):
                codes[row, slot] = self._table.number(mixes.get(uuid, ()))

    def find_limited(self, rules: InterferenceRules) -> frozenset[str]:
        """Finds the GPUs on which a load has a limit, by UUID."""
        if not self._limited and rules.default_most is None:
            return frozenset()
        codes, devices = self._read_codes(), self._mirror.snapshot().devices
        limited = [any(rules.find_limit(one) is not None for one, _ in mix) for mix in self._table.mixes]
        has_limit = np.array(limited, np.bool_)
        return frozenset(devices[row].uuids[slot] for row, slot in np.argwhere(has_limit[codes]).tolist())

    def find_mix(self, node_name: str, uuid: str, altered: Mapping[str, NodeRecord]) -> LoadMix:
        """Returns the loads on a GPU, of which nodes are as these records have them."""
        record = altered[node_name] if node_name in altered else self._nodes[node_name]
        return list_mixes(record, self._workloads).get(uuid, ())

    def limit_search(
        self,
        snapshot: Snapshot,
        spec: WorkloadSpec,
        rules: InterferenceRules,
        altered: Mapping[str, NodeRecord],
        added_below: float = math.inf,
    ) -> LimitedSearch:
        """Returns what a search for places within limits is made on.

        `altered` are the nodes of the snapshot that differ from the state. GPUs are closed as well where a replica would add
        slowdowns of `added_below` or more.
        """
        wanted = enlarge_request(spec, rules)
        request, newcomer = spec.request, spec.shared_load or UNKNOWN_LOAD
        most = min(spec.replicas, GPU_MILLI_WHOLE // request.gpu_milli)
        codes, gpu_free = self._read_codes(altered), snapshot.nodes.gpu_free
        joining = self._table.count_joining(rules, newcomer, most)
        if math.isfinite(added_below):
            joining[self._table.sum_added(rules, newcomer) >= added_below - NEARLY] = 0
        joining[0] = most
        sizes = _Sizes(request.gpu_milli, wanted.request.gpu_milli, most)
        room = _show_room(gpu_free, joining[codes], codes > 0, sizes)
        rows = np.flatnonzero((room != gpu_free).any(axis=1))
        if not len(rows):
            return LimitedSearch(snapshot, wanted, 0)
        nodes = snapshot.nodes._replace(gpu_free=room)
        allows = snapshot.allowed_models(request.gpu_models)
        before = count_room(snapshot.nodes, rows, make_task(request), allows, 1)[1]
        after = count_room(nodes, rows, make_task(wanted.request), allows, 1)[1]
        closed = rows[(before > 0) & (after == 0) & nodes.available[rows]]
        available = nodes.available.copy()
        available[closed] = False
        room.flags.writeable = available.flags.writeable = False
        here = replace(snapshot, nodes=nodes._replace(available=available), changes=[])
        return LimitedSearch(here, wanted, len(closed))

    def limit_row(
        self, row: Ints, uuids: Iterable[str], record: NodeRecord, spec: WorkloadSpec, rules: InterferenceRules
    ) -> None:
        """Leaves of the free shares (G,) of a node's GPUs what limits permit, in the terms of `enlarge_request`."""
        request, newcomer = spec.request, spec.shared_load or UNKNOWN_LOAD
        most = min(spec.replicas, GPU_MILLI_WHOLE // request.gpu_milli)
        mixes = list_mixes(record, self._workloads)
        found = [mixes.get(uuid, ()) for uuid in uuids]
        joining = np.array([rules.count_joining(mix, newcomer, most) if mix else most for mix in found], np.int64)
        is_held = np.array([bool(mix) for mix in found], np.bool_)
        sizes = _Sizes(request.gpu_milli, enlarge_request(spec, rules).request.gpu_milli, most)
        row[: len(found)] = _show_room(row[: len(found)], joining, is_held, sizes)

    def list_with_room(self, snapshot: Snapshot, spec: WorkloadSpec) -> Iterator[tuple[str, str, LoadMix]]:
        """Yields node, UUID and loads of each shared GPU that has room for one replica but for limits, in the order of rows."""
        nodes, request, codes = snapshot.nodes, spec.request, self._read_codes()
        has_rest = nodes.available & (nodes.cpu_free >= request.cpu_milli) & (nodes.memory_free >= request.memory_bytes)
        usable = (nodes.gpu_state == GPU_PLACEABLE) & (
            snapshot.allowed_models(request.gpu_models)[nodes.gpu_model] != 0
        )
        usable &= (nodes.gpu_free >= request.gpu_milli) & (codes > 0) & has_rest[:, None]
        for row, slot in np.argwhere(usable).tolist():
            yield snapshot.names[row], snapshot.devices[row].uuids[slot], self._table.mixes[codes[row, slot]]


def enlarge_request(spec: WorkloadSpec, rules: InterferenceRules) -> WorkloadSpec:
    """Returns a specification of so large a share that no more replicas of it fit on an idle GPU than bear each other."""
    request, newcomer = spec.request, spec.shared_load or UNKNOWN_LOAD
    most = min(spec.replicas, GPU_MILLI_WHOLE // request.gpu_milli)
    bearable = rules.count_joining((), newcomer, most)
    if bearable >= most:
        return spec
    milli = max(request.gpu_milli, GPU_MILLI_WHOLE // (bearable + 1) + 1)
    return replace(spec, request=replace(request, gpu_milli=milli))


class _Sizes(NamedTuple):
    """Thousandths of a GPU that a replica asks for, that it asks for in the search, and how many there may be on a GPU."""

    milli: int
    shown_milli: int
    most: int


def _show_room(gpu_free: Ints, joining: Ints, is_held: NDArray[np.bool_], sizes: _Sizes) -> Ints:
    """Returns the free shares that let so many replicas join each GPU that is held, in shares of the size that is searched."""
    milli, shown_milli, most = sizes
    if shown_milli == milli:
        return np.where(is_held & (joining < most), np.minimum(gpu_free, (joining + 1) * milli - 1), gpu_free)
    # Less than a whole one, or it would look idle.
    fit = np.minimum(np.minimum(joining, gpu_free // milli), (GPU_MILLI_WHOLE - 1) // shown_milli)
    return np.where(is_held, fit * shown_milli, gpu_free)
