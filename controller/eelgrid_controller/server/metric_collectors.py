"""Collectors of the controller's metrics: its own work, the fleet, the energy ledger and the objectives.

Agents, commands and the journal; pools, staleness, error of the power model, waiting work and power limits; windows,
failures, size, exporters and joules by namespace; service levels, budgets, prices, control cycles and scraped pages.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.energy.ledger import OTHER_NAMESPACES
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_controller.objectives.control_loop import ControlLoop
from eelgrid_controller.objectives.power.control_events import (
    JobControlStatus,
    ServiceControlStatus,
)
from eelgrid_controller.objectives.status import AttainmentVerdict, objective_latency_s
from eelgrid_controller.placement.snapshot import Snapshot
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.runtime.scraper import Scraper
from eelgrid_controller.server.grpc.agent_service import AgentService
from eelgrid_controller.server.metrics.catalogue import (
    MODELS_MOST,
    PENDING_REASONS,
    PLAN_CHANGES,
    POOLS_MOST,
    SERIES_MOST,
    build_family,
)
from eelgrid_controller.state.events import (
    AttemptEnded,
    AttemptStarted,
    DevicesCorrected,
    Event,
    NodeCordoned,
    PartitionsPlanned,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadDeferred,
    WorkloadEvicted,
    WorkloadLimited,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadRetried,
    WorkloadScaled,
)
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.policy import make_budget_key
from eelgrid_controller.state.telemetry import PowerReadings, Telemetry
from eelgrid_kernels.node_cost import GPU_ABSENT, GPU_PLACEABLE, GPU_WHOLE_MILLI
from eelgrid_protos.connection_limits import PeerGuard
from eelgrid_protos.messages import BudgetScope, BudgetStatus, NodeState, Policy, Summary, Workload, WorkloadPhase
from eelgrid_protos.openmetrics import MetricFamily


class IdleGaps:
    """Measures how long whole GPUs were idle between the processes of two workloads while the second waited.

    A gap begins when the GPU's last process has ended and the next workload was submitted, and ends when that starts,
    by the node's clock: so what nobody wanted is no gap.
    """

    def __init__(self, core: Callable[[], Core], observe: Callable[[float], object]) -> None:
        self._core = core
        self._observe = observe
        # By GPU: when its last process ended.
        self._ended_ns: dict[str, int] = {}
        self._started: set[tuple[str, int, int]] = set()

    def on_commit(self, committed: CommitResult) -> None:
        """Observes the processes that started, and notes those that ended."""
        for event in committed.events:
            if not isinstance(event, AttemptStarted | AttemptEnded):
                continue
            status = event.status
            workload = self._core().state.workloads.get(event.workload_id)
            if workload is None or workload.spec.request.gpu_milli != GPU_WHOLE_MILLI:
                continue
            key = event.workload_id, status.replica, status.attempt
            places = [place for place in workload.placements if place.replica == status.replica]
            uuids = [uuid for place in places for uuid in place.gpu_uuids]
            # One that ended soon is reported once, by its end.
            if key not in self._started and status.started_ns:
                self._started.add(key)
                for uuid in uuids:
                    ended_ns = self._ended_ns.pop(uuid, None)
                    if ended_ns is not None:
                        self._observe(max(0, status.started_ns - max(ended_ns, workload.submitted_ns)) / 1e9)
            if isinstance(event, AttemptEnded):
                self._started.discard(key)
                self._ended_ns |= dict.fromkeys(uuids, status.ended_ns)


class PowerLimitedNodes:
    """Follows one controller's commits; asked at moments when all that was applied is committed."""

    def __init__(self) -> None:
        self._core: Core | None = None
        self._ids: set[str] = set()

    def on_commit(self, events: Iterable[Event]) -> None:
        """Takes in what one commit made true."""
        for event in events:
            match event:
                case WorkloadLimited(power_limit_w=limit_w) | WorkloadPlaced(power_limit_w=limit_w) if (
                    limit_w is not None
                ):
                    self._ids.add(event.workload_id)
                case (
                    WorkloadLimited(workload_id=key)
                    | WorkloadCancelled(workload_id=key)
                    | WorkloadEvicted(workload_id=key)
                    | WorkloadRetried(workload_id=key)
                    | WorkloadCompleted(workload_id=key)
                ):
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
    WorkloadEvicted: "evicted",
    WorkloadRetried: "retried",
    WorkloadCompleted: "ended",
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
            if isinstance(event, WorkloadEvicted | WorkloadCancelled) and self._is_preemption(event):
                change = "preempted"
            elif isinstance(event, WorkloadEvicted) and event.is_node_fault:
                change = "node_fault"
            elif isinstance(event, NodeCordoned) and event.is_quarantine:
                change = "quarantined"
            if change is not None:
                self._changes[change] += 1

    def _is_preemption(self, event: WorkloadEvicted | WorkloadCancelled) -> bool:
        """Whether a workload made room for another: one that an engine evicts ends with that."""
        if isinstance(event, WorkloadEvicted):
            return bool(event.preempted_for)
        ended = self._core().state.workloads.get(event.workload_id)
        by = f"{PendingConstraint.PREEMPTED.value}:"
        return ended is not None and ended.spec.evicted_by_engine and ended.reason.startswith(by)

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
    return float(snapshot.measure_fragments()[nodes.available].sum() / (mix.total * free_milli))


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


class ShellMetrics:
    """Families of a controller's own work: streams of agents, commands, calls and the journal."""

    def __init__(self, loop: ControllerLoop, agents: AgentService, telemetry: Telemetry, guard: PeerGuard) -> None:
        self._loop, self._agents, self._telemetry, self._guard = loop, agents, telemetry, guard

    def families(self) -> Iterator[MetricFamily]:
        """All of them, as of now."""
        loop, agents, state = self._loop, self._agents, self._loop.core.state
        events = {kind.name.lower(): count for kind, count in agents.events.items()}
        yield build_family("eelgrid_agents_connected", agents.connected)
        yield build_family("eelgrid_commands_queued", loop.queued)
        yield build_family("eelgrid_journal_writable", float(loop.journal_fault is None))
        yield build_family("eelgrid_journal_lag_seconds", loop.lag_s)
        yield build_family("eelgrid_plans_sent_total", agents.plans_sent)
        yield build_family("eelgrid_leader_epoch", self._loop.term.epoch)
        yield build_family("eelgrid_leader_timeline", self._loop.term.timeline)
        yield build_family("eelgrid_leader_refusals_total", agents.claims.refusals)
        yield build_family("eelgrid_leader_epoch_raises_total", agents.claims.raises)
        yield build_family("eelgrid_batches_refused_total", agents.refused_batches)
        yield build_family("eelgrid_attempt_reports_refused_total", agents.stale_attempts)
        yield build_family("eelgrid_batches_duplicate_total", self._telemetry.duplicates)
        yield build_family("eelgrid_agent_events_total", events)
        yield build_family("eelgrid_delayed_agent_events_total", agents.delayed_events)
        yield build_family("eelgrid_excess_calls_total", dict(self._guard.refused))
        yield build_family("eelgrid_ended_connections_total", dict(self._guard.ended))
        journal = loop.journal.counters
        yield build_family("eelgrid_journal_commits_total", journal.commits)
        yield build_family("eelgrid_journal_entries_total", journal.entries)
        yield build_family("eelgrid_journal_written_bytes_total", journal.bytes_written)
        yield build_family("eelgrid_journal_checkpoints_total", journal.checkpoints)
        yield build_family("eelgrid_journal_checkpoint_bytes", journal.checkpoint_bytes)
        yield build_family("eelgrid_journal_rollbacks_total", state.losses.rollbacks)
        yield build_family("eelgrid_ahead_nodes", sum(one.ahead is not None for one in state.nodes.values()))
        yield build_family("eelgrid_unreported_nodes", len(state.doubted))
        yield build_family("eelgrid_starts_withheld", float(state.losses.withholds_starts))
        yield build_family("eelgrid_gpu_turnover_ratio", state.market.turnover_permille / 1000.0)


class LedgerMetrics:
    """Families of one desk."""

    def __init__(self, counts: LedgerWriter, *, now_ns: Callable[[], int]) -> None:
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


_One = TypeVar("_One")
_UNSTEERED = "unsteered"


def _worst(found: Sequence[_One], key: Callable[[_One], tuple[float, ...]]) -> list[_One]:
    return list(found) if len(found) <= SERIES_MOST else heapq.nsmallest(SERIES_MOST, found, key)


class ObjectiveMetrics:
    """Families of the control loop and its scraper; asked on the event loop."""

    def __init__(self, loop: ControlLoop, pages: Scraper) -> None:
        self._loop, self._pages = loop, pages

    def families(self, workloads: Mapping[str, Workload], policy: Policy) -> Iterator[MetricFamily]:
        """All of them, as of the last turn."""
        standing = self._loop.objectives_status
        steering = standing.steering
        budgets = self._loop.budgets()
        left_out = {"service": len(steering.services), "job": len(steering.jobs), "budget": len(budgets)}
        yield from self._turns(steering.ignored)
        yield from _phases(steering.services, steering.jobs, standing.unsteered, workloads)
        yield from self._services(steering.services, workloads, steering.at_s)
        yield from _jobs(
            _worst(steering.jobs, lambda one: (math.inf if one.earned_s is None else one.earned_s,)), workloads
        )
        yield from _budgets(_worst(budgets, _fill_key), {one.name: one.other_w for one in steering.budgets})
        yield build_family(
            "eelgrid_promise_series_left_out", {kind: max(0, count - SERIES_MOST) for kind, count in left_out.items()}
        )
        if policy.prices is not None and steering.price_per_j is not None:
            yield build_family("eelgrid_energy_price_per_joule", {policy.prices.currency: steering.price_per_j})
            yield build_family("eelgrid_energy_price_ratio", steering.price_weight)

    def _turns(self, ignored: Mapping[str, int]) -> Iterator[MetricFamily]:
        loop, counts, pages = self._loop, self._loop.counts, self._pages
        yield build_family("eelgrid_objectives_cycles_total", loop.cycles)
        yield build_family("eelgrid_objectives_failures_total", loop.failures)
        yield build_family("eelgrid_objectives_faults_total", counts.faults)
        yield build_family(
            "eelgrid_objectives_commands_total", {name: counts.done[name] for name in ("limit", "record", "scale")}
        )
        yield build_family("eelgrid_objectives_refusals_total", dict(counts.refused))
        yield build_family(
            "eelgrid_objectives_limits_answered_total",
            {name: counts.answered[name] for name in ("confirmed", "failed")},
        )
        yield build_family("eelgrid_objectives_ignored_events_total", dict(ignored))
        yield build_family("eelgrid_scrape_pages", pages.target_count)
        yield build_family("eelgrid_scrape_pages_read_total", pages.pages)
        yield build_family(
            "eelgrid_scrape_failures_total", {kind.value: count for kind, count in pages.failures.items()}
        )
        total = counts.attainment.total
        yield build_family("eelgrid_promise_windows_total", {one.value: total[one] for one in AttainmentVerdict})

    def _services(
        self, found: Sequence[ServiceControlStatus], workloads: Mapping[str, Workload], now_s: float
    ) -> Iterator[MetricFamily]:
        attainment = self._loop.counts.attainment

        def kept(one: ServiceControlStatus) -> tuple[float, ...]:
            seen = attainment.window_counts(one.name)
            judged = seen.get(AttainmentVerdict.KEPT, 0) + seen.get(AttainmentVerdict.MISSED, 0)
            return (seen.get(AttainmentVerdict.KEPT, 0) / judged if judged else 2.0, -(one.at_s or 0.0))

        shown = _worst(found, kept)
        windows = {
            (one.name, verdict.value): float(attainment.window_counts(one.name).get(verdict, 0))
            for one in shown
            for verdict in AttainmentVerdict
        }
        objectives = {
            one.name: objective_latency_s(workload.spec.service)
            for one in shown
            if (workload := workloads.get(one.name)) is not None
        }
        replicas = {
            (one.name, state): float(count)
            for one in shown
            for state, count in (("wanted", one.target), ("serving", one.serving))
        }
        ages = {one.name: max(0.0, now_s - one.at_s) for one in shown if one.at_s is not None}
        yield build_family("eelgrid_service_windows_total", windows)
        yield build_family("eelgrid_service_latency_seconds", _known({one.name: one.live_s for one in shown}))
        yield build_family(
            "eelgrid_service_latency_objective_seconds", {key: at_s for key, at_s in objectives.items() if at_s}
        )
        yield build_family("eelgrid_service_window_age_seconds", ages)
        yield build_family("eelgrid_service_replicas", replicas)
        yield build_family("eelgrid_service_slowness_ratio", _known({one.name: one.factor for one in shown}))
        yield build_family("eelgrid_service_reserve_ratio", {one.name: one.reserve for one in shown})


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    """What is not known has no series."""
    return {key: value for key, value in values.items() if value is not None and math.isfinite(value)}


_LEVELS = {BudgetScope.CLUSTER: 0.0, BudgetScope.RACK: 1.0, BudgetScope.NODE: 2.0}


def _fill_key(one: BudgetStatus) -> tuple[float, ...]:
    limit_w = one.budget.limit_w
    return _LEVELS.get(one.budget.scope, 3.0), -one.claimed_w / limit_w if limit_w > 0.0 else -math.inf


def _phases(
    services: Sequence[ServiceControlStatus],
    jobs: Sequence[JobControlStatus],
    unsteered: Mapping[str, str],
    workloads: Mapping[str, Workload],
) -> Iterator[MetricFamily]:
    of_services = Counter(one.phase.value for one in services)
    of_jobs = Counter(one.phase.value for one in jobs)
    for name in unsteered:
        workload = workloads.get(name)
        if workload is not None:
            (of_jobs if workload.spec.service is None else of_services)[_UNSTEERED] += 1
    yield build_family("eelgrid_services", {key: float(count) for key, count in sorted(of_services.items())})
    yield build_family("eelgrid_jobs", {key: float(count) for key, count in sorted(of_jobs.items())})


def _jobs(shown: Sequence[JobControlStatus], workloads: Mapping[str, Workload]) -> Iterator[MetricFamily]:
    promised = {
        one.name: training.slowdown_most
        for one in shown
        if (workload := workloads.get(one.name)) is not None and (training := workload.spec.training) is not None
    }
    yield build_family("eelgrid_job_slowdown_ratio", _known({one.name: one.slowdown for one in shown}))
    yield build_family("eelgrid_job_slowdown_promised_ratio", _known(promised))
    yield build_family("eelgrid_job_energy_saved_ratio", _known({one.name: one.saving for one in shown}))
    yield build_family("eelgrid_job_power_limit_watts", _known({one.name: one.limit_w for one in shown}))
    yield build_family("eelgrid_job_power_limit_wanted_watts", _known({one.name: one.target_w for one in shown}))


def _budgets(shown: Sequence[BudgetStatus], others_w: Mapping[str, float]) -> Iterator[MetricFamily]:
    """Budgets as `eelctl promises` shows them; `others_w` is the part of each claim that no job holds, by budget."""
    found = {make_budget_key(one.budget.scope, one.budget.name): one for one in shown}
    watts: dict[str, dict[str, float | None]] = {
        "limit": {key: one.budget.limit_w for key, one in found.items()},
        "claimed": {key: one.claimed_w for key, one in found.items()},
        "others": {key: others_w[key] for key in found if key in others_w},
        "room": {key: one.budget.limit_w - one.claimed_w for key, one in found.items()},
        "shortfall": {key: one.shortfall_w for key, one in found.items()},
        "drawn": {key: one.measured_w for key, one in found.items()},
        "over": {key: None if one.measured_w is None else one.over_w for key, one in found.items()},
    }
    for what, values in watts.items():
        yield build_family(f"eelgrid_power_budget_{what}_watts", _known(values))
    unread = {key: float(one.gpus - one.measured_gpus) for key, one in found.items()}
    yield build_family("eelgrid_power_budget_unread_gpus", unread)
