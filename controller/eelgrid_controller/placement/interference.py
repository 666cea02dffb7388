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
from eelgrid_protos.messages import GpuSharing, Workload, WorkloadSpec
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# Mixes that have a number, many of them of the past: beyond these and twice as many as there were, all are numbered anew.
_MIXES_LEAST = 4096
_ROWS_LEAST, _NAMES_LEAST = 64, 8
# Names of loads, how many there are of each, and the least of their limits.
_NamedMix = tuple[tuple[str, int, float], ...]


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


class Alteration(NamedTuple):
    """Nodes that differ from the state, and the workloads that are known then."""

    records: Mapping[str, NodeRecord]
    workloads: Mapping[str, Workload]


class MixTable:
    """Mixes under one policy by number, and the answers of its rule for all of them at once.

    Loads of the same name are slowed down alike, so that a mix is a number of each name, and the least limit of each; all names
    that no pair has are one. Arrays have a row for each of M mixes and a column for each of L names: users choose the names of
    their loads, but those of the policy are few.
    """

    def __init__(self, rules: InterferenceRules) -> None:
        self.rules = rules
        self.size = 1
        self._numbers: dict[_NamedMix, int] = {(): 0}
        self._names: dict[str, int] = {}
        # Loads of each name (M, L), and how much more they bear: infinite where there are none, or without limit.
        self._counts: NDArray[np.float64] = np.zeros((_ROWS_LEAST, _NAMES_LEAST))
        self._slack: NDArray[np.float64] = np.full((_ROWS_LEAST, _NAMES_LEAST), np.inf)
        self.has_limit: NDArray[np.bool_] = np.zeros(_ROWS_LEAST, np.bool_)

    def number(self, mix: LoadMix) -> int:
        """Returns the number of a mix."""
        key = self._name_loads(mix)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = self.size
            self._append(key)
        return found

    def _name_loads(self, mix: LoadMix) -> _NamedMix:
        found: dict[str, tuple[int, float]] = {}
        for one, count in mix:
            name, limit = self.rules.resolve_name(one.load), self.rules.find_limit(one)
            before, least = found.get(name, (0, math.inf))
            found[name] = before + count, least if limit is None else min(least, limit)
        return tuple(sorted((name, *values) for name, values in found.items()))

    def _append(self, mix: _NamedMix) -> None:
        row = self.size
        columns = [self._names.setdefault(name, len(self._names)) for name, _, _ in mix]
        rows, width = self._counts.shape
        if row >= rows or len(self._names) > width:
            # One mix may have many new names.
            shape = (2 * rows if row >= rows else rows, width if len(self._names) <= width else 2 * len(self._names))
            counts, slack, has_limit = np.zeros(shape), np.full(shape, np.inf), np.zeros(shape[0], np.bool_)
            counts[:rows, :width], slack[:rows, :width], has_limit[:rows] = self._counts, self._slack, self.has_limit
            self._counts, self._slack, self.has_limit = counts, slack, has_limit
        for column, (name, count, limit) in zip(columns, mix, strict=True):
            self._counts[row, column] = count
            if math.isfinite(limit):
                slowed = sum(
                    (others - (other == name)) * self.rules.find_slowdown(name, other)
                    for other, others, _ in mix
                    if others > (other == name)
                )
                self._slack[row, column] = limit - slowed
                self.has_limit[row] = True
        self.size += 1

    def _list_slowdowns(self, load: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns by how much a load slows down each name, and the reverse (L,); infinite if nobody measured it."""
        name, width = self.rules.resolve_name(load), self._counts.shape[1]
        theirs, mine = np.zeros(width), np.zeros(width)
        for other, column in self._names.items():
            theirs[column] = self.rules.find_slowdown(other, name)
            mine[column] = self.rules.find_slowdown(name, other)
        return theirs, mine

    def count_joining(self, newcomer: GpuSharing, most: int) -> Ints:
        """Counts how many replicas of a load may join each mix (M,), up to `most`."""
        theirs, mine = self._list_slowdowns(newcomer.load)
        counts, slack = self._counts[: self.size], self._slack[: self.size]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            bounds = np.where(theirs > 0.0, (slack + NEARLY) / theirs, np.inf)
        # Infinite by infinite: who has no limit bears what was not measured.
        bounds[np.isinf(slack) & (slack > 0.0)] = np.inf
        bounds[slack < -NEARLY] = 0.0
        found = bounds.min(axis=1, initial=float(most))
        limit = self.rules.find_limit(newcomer)
        if limit is not None and math.isfinite(limit):
            is_unknown = np.isinf(mine)
            left = limit - counts @ np.where(is_unknown, 0.0, mine)
            each = self.rules.find_slowdown(newcomer.load, newcomer.load)
            with np.errstate(over="ignore"):
                beside = np.floor((left + NEARLY) / each) if each > 0.0 else np.full(len(left), np.inf)
            found = np.minimum(found, 1.0 + beside)
            found[(left < -NEARLY) | (counts @ is_unknown.astype(np.float64) > 0.0)] = 0.0
        joining: Ints = np.floor(np.clip(found, 0.0, most)).astype(np.int64)
        return joining

    def sum_added(self, newcomer: GpuSharing) -> NDArray[np.float64]:
        """Sums by how much a newcomer and the loads of each mix (M,) would slow each other down."""
        both = sum(np.where(np.isinf(one), TAKING_TURNS, one) for one in self._list_slowdowns(newcomer.load))
        added: NDArray[np.float64] = self._counts[: self.size] @ both
        return added


class SharedGpus:
    """Which loads share each GPU of the cluster; call `refresh` after each change.

    Loads are listed when they are first asked for: as long as nobody has a limit, a change costs a look at what is new.
    """

    def __init__(self, state: ClusterState, mirror: SnapshotMirror) -> None:
        self._nodes, self._workloads, self._nominations = state.nodes, state.workloads, state.nominations
        self._mirror = mirror
        # Numbers of mixes by row and slot (N, G); 0 is that of none.
        self._codes: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._table = MixTable(InterferenceRules(state.policy))
        self._size_most = _MIXES_LEAST
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

    def is_limited(self, spec: WorkloadSpec, rules: InterferenceRules, altered: Alteration | None = None) -> bool:
        """Returns whether pairs or limits may matter for where a workload goes; `altered` are nodes that differ from the state.

        On these, work that does not run yet may have limits: what is nominated, and what is promised a start.
        """
        if not spec.request.is_share or (spec.service is not None and spec.service.slices):
            return False
        own = None if spec.gpu_sharing is None else spec.gpu_sharing.slowdown_most
        if self._limited or rules.has_pairs or own is not None or rules.default_most is not None:
            return True
        if altered is None or not altered.records:
            return False
        held = {key for record in altered.records.values() for key, _ in record.assignments}
        specs = (altered.workloads[key].spec for key in held if key in altered.workloads)
        loads = [one for found in self._nominations.list_loads(self._workloads).values() for one in found]
        stated = (spec.gpu_sharing for spec in specs)
        return any(one is not None and one.slowdown_most is not None for one in (*loads, *stated))

    def _read_codes(self, rules: InterferenceRules, altered: Alteration | None = None) -> NDArray[np.int32]:
        """Returns the numbers of mixes (N, G), with nodes as these records have them."""
        snapshot = self._mirror.snapshot()
        shape = snapshot.nodes.gpu_free.shape
        if self._codes.shape != shape:
            grown: NDArray[np.int32] = np.zeros(shape, np.int32)
            rows, slots = (min(pair) for pair in zip(shape, self._codes.shape, strict=True))
            grown[:rows, :slots] = self._codes[:rows, :slots]
            self._codes = grown
        if self._table.rules is not rules or self._table.size > self._size_most:
            self._table, self._stale = MixTable(rules), set(self._nodes)
        for name in self._stale:
            record = self._nodes[name]
            self._write_row(
                self._codes, snapshot, name, list_mixes(record, self._workloads) if has_shares(record) else {}
            )
        if self._stale:
            self._size_most = max(self._size_most, _MIXES_LEAST + 2 * len(np.unique(self._codes)))
        self._stale.clear()
        if altered is None or not altered.records:
            return self._codes
        codes, nominated = self._codes.copy(), self._nominations.list_loads(self._workloads)
        for name, record in altered.records.items():
            mixes = list_mixes(record, altered.workloads)
            for uuid in nominated.keys() & set(snapshot.devices[self._mirror.row(name)].uuids):
                mixes[uuid] = join_mix(mixes.get(uuid, ()), nominated[uuid])
            self._write_row(codes, snapshot, name, mixes)
        return codes

    def _write_row(self, codes: NDArray[np.int32], snapshot: Snapshot, name: str, mixes: Mapping[str, LoadMix]) -> None:
        row = self._mirror.row(name)
        codes[row] = 0
        if mixes:
            for slot, uuid in enumerate(snapshot.devices[row].uuids):
                codes[row, slot] = self._table.number(mixes.get(uuid, ()))

    def find_limited(self, rules: InterferenceRules) -> frozenset[str]:
        """Finds the GPUs on which a load has a limit, by UUID."""
        if not self._limited and rules.default_most is None:
            return frozenset()
        codes, devices = self._read_codes(rules), self._mirror.snapshot().devices
        limited = np.argwhere(self._table.has_limit[codes]).tolist()
        return frozenset(devices[row].uuids[slot] for row, slot in limited)

    def find_mix(self, node_name: str, uuid: str, altered: Alteration) -> LoadMix:
        """Returns the loads on a GPU, of which nodes are as these records have them."""
        record = altered.records[node_name] if node_name in altered.records else self._nodes[node_name]
        return list_mixes(record, altered.workloads).get(uuid, ())

    def limit_search(
        self,
        snapshot: Snapshot,
        spec: WorkloadSpec,
        rules: InterferenceRules,
        altered: Alteration,
        added_below: float = math.inf,
    ) -> LimitedSearch:
        """Returns what a search for places within limits is made on.

        `altered` are the nodes of the snapshot that differ from the state. GPUs are closed as well where a replica would add
        slowdowns of `added_below` or more.
        """
        wanted = enlarge_request(spec, rules)
        request, newcomer = spec.request, spec.shared_load or UNKNOWN_LOAD
        most = min(spec.replicas, GPU_MILLI_WHOLE // request.gpu_milli)
        codes, gpu_free = self._read_codes(rules, altered), snapshot.nodes.gpu_free
        joining = self._table.count_joining(newcomer, most)
        if math.isfinite(added_below):
            joining[self._table.sum_added(newcomer) >= added_below - NEARLY] = 0
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

    def list_with_room(
        self, snapshot: Snapshot, spec: WorkloadSpec, rules: InterferenceRules
    ) -> Iterator[tuple[str, str, LoadMix]]:
        """Yields node, UUID and loads of each shared GPU that has room for one replica but for limits, in the order of rows."""
        nodes, request, codes = snapshot.nodes, spec.request, self._read_codes(rules)
        has_rest = nodes.available & (nodes.cpu_free >= request.cpu_milli) & (nodes.memory_free >= request.memory_bytes)
        is_allowed = snapshot.allowed_models(request.gpu_models)[nodes.gpu_model] != 0
        usable = (nodes.gpu_state == GPU_PLACEABLE) & is_allowed
        usable &= (nodes.gpu_free >= request.gpu_milli) & (codes > 0) & has_rest[:, None]
        for row, slot in np.argwhere(usable).tolist():
            name, uuid = snapshot.names[row], snapshot.devices[row].uuids[slot]
            yield name, uuid, list_mixes(self._nodes[name], self._workloads).get(uuid, ())


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
