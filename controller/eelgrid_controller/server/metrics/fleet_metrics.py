"""Metrics of the fleet and of the energy ledger.

Pools, staleness, error of the power model, waiting work and power limits; windows, failures, size, exporters and
joules by namespace.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.core.core import CommitResult, Core
from eelgrid_controller.energy.ledger import OTHER_NAMESPACES, Exporter
from eelgrid_controller.placement.snapshot import Snapshot
from eelgrid_controller.server.metrics.catalogue import (
    MODELS_MOST,
    PENDING_REASONS,
    PLAN_CHANGES,
    POOLS_MOST,
    build_family,
)
from eelgrid_controller.state.events import (
    DevicesCorrected,
    Event,
    PartitionsPlanned,
    WorkloadCancelled,
    WorkloadDeferred,
    WorkloadLimited,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
)
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.telemetry import PowerReadings, Telemetry
from eelgrid_kernels.node_cost import GPU_ABSENT, GPU_PLACEABLE, GPU_WHOLE_MILLI
from eelgrid_protos.messages import NodeState, Summary, WorkloadPhase
from eelgrid_protos.openmetrics import MetricFamily


class PowerLimitedNodes:
    """Follows one controller's commits; asked at moments when all that was applied is committed."""

    def __init__(self) -> None:
        self._core: Core | None = None
        self._ids: set[str] = set()

    def on_commit(self, events: Iterable[Event]) -> None:
        """Takes in what one commit made true."""
        for event in events:
            match event:
                case WorkloadLimited(workload_id=key, power_limit_w=limit_w) if limit_w is not None:
                    self._ids.add(key)
                case WorkloadLimited(workload_id=key) | WorkloadCancelled(workload_id=key):
                    self._ids.discard(key)
                case _:
                    pass

    def nodes(self, core: Core) -> frozenset[str]:
        """The names of nodes on which any work is under a limit."""
        workloads = core.state.workloads
        if core is not self._core:
            self._core = core
            self._ids = {
                key
                for key, one in workloads.items()
                if one.power_limit_w is not None and one.phase is WorkloadPhase.PLACED
            }
        return frozenset(place.node_name for key in self._ids for place in workloads[key].placements)


_CHANGES: Mapping[type[Event], str] = {
    WorkloadPlaced: "placed",
    WorkloadMoved: "moved",
    WorkloadScaled: "scaled",
    WorkloadLimited: "limited",
    WorkloadCancelled: "cancelled",
    WorkloadDeferred: "deferred",
    DevicesCorrected: "corrected",
    PartitionsPlanned: "partitioned",
}
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
# Watts measured and modelled, of the same devices.
Watts = tuple[float, float]


class FleetMetrics:
    """Families of one controller's fleet; asked on the event loop, at a moment when all is on disk."""

    def __init__(
        self,
        *,
        core: Callable[[], Core],
        summary: Callable[[], Summary],
        telemetry: Telemetry,
        monotonic_s: Callable[[], float],
        now_ns: Callable[[], int],
    ) -> None:
        self._core, self._summary, self._telemetry = core, summary, telemetry
        self._monotonic_s, self._now_ns = monotonic_s, now_ns
        self._changes = Counter(dict.fromkeys(PLAN_CHANGES, 0))
        self._limited = PowerLimitedNodes()

    def on_commit(self, committed: CommitResult) -> None:
        """Counts what one commit made true."""
        self._limited.on_commit(committed.events)
        for event in committed.events:
            change = _CHANGES.get(type(event))
            if change is not None:
                self._changes[change] += 1

    def families(self) -> Iterator[MetricFamily]:
        """All of them, as of now."""
        core, now_s, now_ns = self._core(), self._monotonic_s(), self._now_ns()
        snapshot, seen = core.snapshot(), self._telemetry.readings(now_s=now_s, now_ns=now_ns)
        records = [core.state.nodes.get(name) for name in seen.names]
        is_ready = np.array([record is not None and record.state is NodeState.READY for record in records], np.bool_)
        ages_s = seen.age_s[is_ready]
        stale = int(np.count_nonzero(~(ages_s <= self._telemetry.fresh_s)))
        yield build_family("eelgrid_pool_power_watts", _most(pool_watts(records, seen, is_ready), POOLS_MOST))
        yield build_family("eelgrid_stale_nodes", stale)
        if not np.isnan(ages_s).all():
            yield build_family("eelgrid_oldest_sample_age_seconds", float(np.nanmax(ages_s)))
        limited = self._limited.nodes(core)
        free = np.array([name not in limited for name in seen.names], np.bool_)
        watts = dict(sorted(model_watts(snapshot, seen, is_ready & free).items())[:MODELS_MOST])
        yield build_family(
            "eelgrid_model_power_error_ratio",
            {
                name: measured_w / modelled_w - 1.0
                for name, (measured_w, modelled_w) in watts.items()
                if modelled_w > 0.0
            },
        )
        ratio = fragmentation_ratio(snapshot)
        if ratio is not None:
            yield build_family("eelgrid_fragmentation_ratio", ratio)
        yield build_family("eelgrid_pending_workloads", waiting_by_reason(self._summary()))
        yield build_family("eelgrid_plan_changes_total", dict(self._changes))


def _most(values: Mapping[str, float], most: int) -> dict[str, float]:
    """The largest, and the rest as one."""
    kept = dict(sorted(values.items(), key=lambda item: -item[1])[:most])
    if len(values) > most:
        kept[OTHER_NAMESPACES] = kept.get(OTHER_NAMESPACES, 0.0) + sum(
            value for key, value in values.items() if key not in kept
        )
    return kept


def waiting_by_reason(summary: Summary) -> dict[str, float]:
    """Workloads that wait by constraint, each of PENDING_REASONS, 0 too; they add up to all that wait."""
    found = Counter(dict.fromkeys(PENDING_REASONS, 0))
    for one in summary.pending_reasons:
        constraint = one.reason.partition(":")[0]
        found[constraint if constraint in PENDING_REASONS else OTHER_NAMESPACES] += one.workloads
    # The summary lists the most frequent sentences alone.
    found[OTHER_NAMESPACES] += max(0, summary.pending - sum(one.workloads for one in summary.pending_reasons))
    return {reason: float(count) for reason, count in found.items()}


def fragmentation_ratio(snapshot: Snapshot) -> float | None:
    """F over the free GPU, of available nodes; None where none is free or no task is expected."""
    nodes, mix = snapshot.nodes, snapshot.mix
    placeable = (nodes.gpu_state == GPU_PLACEABLE) & nodes.available[:, None]
    free_milli = int(nodes.gpu_free[placeable].sum())
    if not free_milli or not len(mix.weight):
        return None
    return float(snapshot.fragments[nodes.available].sum() / (mix.total * free_milli))


def pool_watts(records: Sequence[NodeRecord | None], seen: PowerReadings, is_ready: Bools) -> dict[str, float]:
    """Fresh watts by pool, of the nodes that are ready (N,)."""
    ids: dict[str, int] = {}
    pools = np.array([-1 if one is None else ids.setdefault(one.inventory.pool, len(ids)) for one in records], np.int64)
    pool, power_w = pools[seen.row][is_ready[seen.row]], seen.power_w[is_ready[seen.row]]
    sums, there = np.bincount(pool, power_w, len(ids)).tolist(), set(pool.tolist())
    return {name: sums[at] for name, at in ids.items() if at in there}


def model_watts(snapshot: Snapshot, seen: PowerReadings, is_ready: Bools) -> dict[str, Watts]:
    """By GPU model, watts measured and modelled of the same devices; see the module's theory."""
    rows = {name: row for row, name in enumerate(snapshot.names)}
    placed = np.array([rows.get(name, -1) for name in seen.names], np.int64)
    columns = np.array([snapshot.models.get(model, -1) for model in seen.models], np.int64)
    row, column = placed[seen.row], columns[seen.model]
    modelled_w, devices, are_whole = _model_power(snapshot)
    is_known = is_ready[seen.row] & (row >= 0) & (column >= 0)
    same = is_known & are_whole[row, column] & (devices[row, column] == seen.gpus)
    row, column, size = row[same], column[same], len(snapshot.models)
    measured = np.bincount(column, seen.power_w[same], size).tolist()
    expected = np.bincount(column, modelled_w[row, column], size).tolist()
    there = set(column.tolist())
    return {model: (measured[at], expected[at]) for model, at in snapshot.models.items() if at in there}


def _model_power(snapshot: Snapshot) -> tuple[Floats, NDArray[np.integer[Any]], NDArray[np.bool_]]:
    """Watts, devices and whether none of them is cut, by node and model (N, M)."""
    nodes, models = snapshot.nodes, max(1, len(snapshot.models))
    there = (nodes.gpu_state != GPU_ABSENT) & (nodes.gpu_model >= 0)
    row, slot = np.nonzero(there)
    cell, size = row * models + nodes.gpu_model[row, slot], len(snapshot.names) * models
    is_held = nodes.gpu_free[row, slot] < GPU_WHOLE_MILLI
    power_w = np.where(is_held, nodes.gpu_busy_w[row, slot], nodes.gpu_idle_w[row, slot])
    cut = nodes.gpu_state[row, slot] != GPU_PLACEABLE
    shape = (len(snapshot.names), models)
    return (
        np.bincount(cell, power_w, size).astype(np.float64).reshape(shape),
        np.bincount(cell, minlength=size).reshape(shape),
        np.equal(np.bincount(cell, cut, size), 0).reshape(shape),
    )


_NS_S = 1e-9


class LedgerCounters(Protocol):
    """What a desk counts of itself; windows are all that came."""

    windows: int
    again: int
    dropped: int
    refused: int
    unplaced: int
    failures: int
    newest_ns: int | None  # the latest end of a window that is on disk
    forgotten: Mapping[str, int]  # rows by why they had to go
    used_bytes: int | None
    bytes_most: int

    @property
    def damaged_parts(self) -> int:
        """Hours and days of nodes, and names, that are left out of answers."""

    @property
    def exporters(self) -> Mapping[str, Exporter]:
        """Marks by name; `ledger.EXPORTERS_MOST` at most."""

    def joules_by_namespace(self) -> Mapping[str, float]:
        """Joules of what is on disk, since the ledger began."""


class LedgerMetrics:
    """Families of one desk."""

    def __init__(self, counts: LedgerCounters, *, now_ns: Callable[[], int]) -> None:
        self._counts, self._now_ns = counts, now_ns

    def families(self) -> Iterator[MetricFamily]:
        """All of them, as of now."""
        counts = self._counts
        others = {
            "again": counts.again,
            "dropped": counts.dropped,
            "refused": counts.refused,
            "unplaced": counts.unplaced,
        }
        yield build_family("eelgrid_ledger_windows_total", {"taken": counts.windows - sum(others.values()), **others})
        yield build_family("eelgrid_ledger_failures_total", counts.failures)
        yield build_family("eelgrid_ledger_damaged_parts", counts.damaged_parts)
        if counts.newest_ns is not None:
            age_s = max(0.0, (self._now_ns() - counts.newest_ns) * _NS_S)
            yield build_family("eelgrid_ledger_newest_window_age_seconds", age_s)
        if counts.used_bytes is not None:
            yield build_family("eelgrid_ledger_size_bytes", counts.used_bytes)
        yield build_family("eelgrid_ledger_size_limit_bytes", counts.bytes_most)
        yield build_family("eelgrid_ledger_forgotten_rows_total", counts.forgotten)
        exporters, now_s = counts.exporters.values(), self._now_ns() * _NS_S
        yield build_family("eelgrid_ledger_export_lag_seconds", {one.name: one.lag_s(now_s) for one in exporters})
        changed = {one.name: one.changed.hours if one.changed else 0 for one in exporters}
        yield build_family("eelgrid_ledger_export_changes", changed)
        yield build_family("eelgrid_ledger_energy_joules_total", counts.joules_by_namespace())
