"""Metrics collector: builds a snapshot of the agent and its nodes, with device call latencies and owner labels.

The labels of an account never change, and building them takes longer than anything else on the page, so they are built
once per account and kept while it exists. The cache is keyed by identity, because hashing an account would cost as much
as building its labels; the cache holds the account, so no other object can have its identity.

Prometheus refuses a whole page for one series that appears twice, so rows with equal labels are merged: joules are
added, and of two times the earlier is kept.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import psutil

from eelgrid_agent.devices.port import CallLatencies, DevicePort, Missing, ReadingValue
from eelgrid_agent.devices.process.remote_device import RemoteDevice
from eelgrid_agent.devices.sampler import GPU_READINGS, HOST_READINGS, ExtendedReadings, SampleTick
from eelgrid_agent.energy.accounts import EnergyAccount
from eelgrid_agent.energy.anomalies import AnomalySubject, EnergyAnomalyKind
from eelgrid_agent.energy.attributor import Attribution
from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_agent.metrics.snapshot import (
    SHARES_MOST,
    AgentSnapshot,
    AgentView,
    GpuView,
    GuardView,
    HostView,
    LatencyDistribution,
    NodeMetricsView,
    OwnersView,
    ProcessView,
    TimedValues,
    WorkerView,
)
from eelgrid_agent.node.node import AgentNode
from eelgrid_protos import __version__
from eelgrid_protos.agent_metrics import OWNER_LABELS
from eelgrid_protos.messages import AbsenceReason, Gpu, Reading

_Labels = tuple[str, ...]
_Kept = dict[int, tuple[EnergyAccount | AnomalySubject, _Labels]]


class OwnerLabelCache:
    """The labels of those who were there the last time."""

    def __init__(self) -> None:
        self._kept: _Kept = {}

    def build_view(self, owned: Attribution) -> OwnersView:
        """Returns the view of one attribution."""
        used: _Kept = {}
        energy_j: dict[_Labels, float] = {}
        left_out = 0
        for account, energy_mj in owned.accounts.items():
            labels = self._labels(account, used)
            before_j = energy_j.get(labels)
            if before_j is None and len(energy_j) >= SHARES_MOST:
                left_out += 1
            else:
                energy_j[labels] = (before_j or 0.0) + energy_mj / 1000.0
        idle_since_s: dict[_Labels, float] = {}
        for anomaly in owned.anomalies:
            if anomaly.subject.kind is EnergyAnomalyKind.HELD_IDLE:
                labels, since_s = self._labels(anomaly.subject, used), anomaly.since_wall_ns / 1e9
                idle_since_s[labels] = min(since_s, idle_since_s.get(labels, since_s))
        self._kept = used
        return OwnersView(energy_j=energy_j, idle_since_s=idle_since_s, left_out=left_out)

    def _labels(self, whose: EnergyAccount | AnomalySubject, used: _Kept) -> _Labels:
        kept = self._kept.get(id(whose))
        if kept is None:
            kept = whose, _labels(whose)
        used[id(whose)] = kept
        return kept[1]


def _labels(whose: EnergyAccount | AnomalySubject) -> _Labels:
    owner = whose.owner.labels()
    owner["gpu_instance"] = "" if whose.gpu_instance_id is None else str(whose.gpu_instance_id)
    holder = (whose.gpu_uuid, *[owner[label] for label in OWNER_LABELS])
    if isinstance(whose, AnomalySubject):
        return holder
    return (*holder, whose.part.value, whose.method.value, whose.confidence.label)


def summarize_latencies(times: CallLatencies) -> Mapping[str, LatencyDistribution]:
    """What was counted so far, by call."""
    return {
        call: LatencyDistribution(below=tuple(count for _, count in below), sum_s=sum_s)
        for call, _, sum_s, below in times
    }


_TIMED_CALLS = (
    "driver_version", "access", "gpus", "read", "read_slow", "read_instances", "processes", "topology", "take_events",
)  # fmt: skip


def time_calls(device: DevicePort, times: CallLatencies, *, monotonic_ns: Callable[[], int]) -> DevicePort:
    """The same port, which counts how long each of its calls takes, failed ones too."""

    def timed(name: str) -> Callable[..., Any]:
        call = getattr(device, name)

        def timed_call(*arguments: Any) -> Any:
            begun_ns = monotonic_ns()
            try:
                return call(*arguments)
            finally:
                times.add_call(name, (monotonic_ns() - begun_ns) / 1e9)

        return timed_call

    return cast("DevicePort", SimpleNamespace(close=device.close, **{name: timed(name) for name in _TIMED_CALLS}))


_LOST = Missing(AbsenceReason.GPU_LOST)
# What the ledger calls the joules of owners that it keeps no more.
_ENDED = "ended"
_ANOMALIES = tuple((kind, kind.value) for kind in EnergyAnomalyKind)
_NO_ANOMALIES = {name: False for _, name in _ANOMALIES}


class AgentCollector:
    """The agent's frames.

    `attribution` gives the newest of the one node, `calls` is how long calls took, `collection_s` gives how long the
    newest look of each kind did, and `worker` is what holds the driver where that is another process.
    """

    def __init__(
        self,
        nodes: Sequence[AgentNode],
        *,
        connections: Callable[[], int],
        monotonic_ns: Callable[[], int],
        calls: CallLatencies | None = None,
        attribution: Callable[[], Attribution | None] = lambda: None,
        collection_s: Callable[[], Mapping[str, float]] = dict,
        worker: RemoteDevice | None = None,
        refused_calls: Callable[[], int] = lambda: 0,
        leases: Sequence[DeviceLeases] = (),
    ) -> None:
        self._nodes = nodes
        self._refused_calls = refused_calls
        self._leases = leases
        self._connections = connections
        self._monotonic_ns = monotonic_ns
        self._calls = calls
        self._attribution = attribution
        self._collection_s = collection_s
        self._worker = worker
        self._process = psutil.Process()
        self._started_s = self._process.create_time()
        self._owners = OwnerLabelCache()

    def build_snapshot(self) -> AgentSnapshot:
        """Returns the current snapshot."""
        return AgentSnapshot(agent=self._agent(), node=self._node(self._nodes[0]) if len(self._nodes) == 1 else None)

    def oldest_s(self) -> float | None:
        """Age of the oldest newest tick; None before every node has one."""
        newest = [node.last_tick_ns for node in self._nodes if node.last_tick is not None]
        if len(newest) < len(self._nodes):
            return None
        return max(0.0, (self._monotonic_ns() - min(newest, default=self._monotonic_ns())) / 1e9)

    def slowest_interval_s(self) -> float:
        """The longest sample interval of any node."""
        return max((node.cadence.sample_interval_s for node in self._nodes), default=1.0)

    def _agent(self) -> AgentView:
        nodes = self._nodes
        return AgentView(
            version=__version__,
            nodes=len(nodes),
            connected_nodes=sum(node.connected for node in nodes),
            samples=sum(node.ticks_total for node in nodes),
            batches=sum(node.batches_total for node in nodes),
            dropped_samples=sum(node.spool.dropped_total for node in nodes),
            connections=self._connections(),
            refused_calls=self._refused_calls(),
            # The nodes of an agent share one record.
            term_refusals=sum(one.refusals_total for one in {id(node.terms): node.terms for node in nodes}.values()),
            uncounted_s=sum(node.uncounted_s for node in nodes),
            spool_ticks=sum(node.spool.waiting_ticks for node in nodes),
            batches_under_way=sum(node.spool.in_flight for node in nodes),
            sample_age_s=self.oldest_s(),
            collection_s=self._collection_s(),
            calls={} if self._calls is None else summarize_latencies(self._calls),
            process=self._cost(),
            worker=None if self._worker is None else _worker_view(self._worker),
            **self._lease_counts(),
        )

    def _lease_counts(self) -> dict[str, Any]:
        held, refused = Counter[tuple[str, str]](), Counter[str]()
        for leases in self._leases:
            refused.update(leases.refused_total)
            # Engines name themselves; those that are counted are bounded.
            for lease in leases.table.leases:
                engine = leases.name_counted_engine(lease.holder.engine)
                held[engine, "unknown" if lease.serial in leases.unverified else "held"] += 1
        return {
            "leases": held,
            "lease_refusals": refused,
            "lease_reclaims": sum(one.reclaimed_total for one in self._leases),
            "lease_disputes": sum(len(one.disputes) for one in self._leases),
        }

    def _cost(self) -> ProcessView:
        return ProcessView(
            # One call; psutil opens a file for each of the others.
            cpu_s=time.process_time(),
            resident_bytes=self._process.memory_info().rss,
            started_s=self._started_s,
            threads=self._process.num_threads(),
        )

    def _node(self, node: AgentNode) -> NodeMetricsView:
        now_ns = self._monotonic_ns()
        inventory, tick, slow = node.inventory, node.last_tick, node.slow
        if tick is not None and tick.generation != inventory.generation:
            # Its columns are of the devices before: those of the next tick fit.
            tick = None
        age_s = max(0.0, (now_ns - node.last_tick_ns) / 1e9)
        raw, owned = dict(node.quick), self._attribution()
        gpus = []
        for index, gpu in enumerate(inventory.gpus):
            quick = None
            if tick is not None:
                looked = raw[gpu.uuid].values if gpu.uuid in raw else {}
                quick = TimedValues(values={**looked, **_cells(tick, index)}, age_s=age_s)
            attributed = {} if owned is None else _attributed_fields(gpu.uuid, owned)
            gpus.append(_gpu_view(gpu, quick, slow, node, now_ns, attributed=attributed))
        return NodeMetricsView(
            name=inventory.node_name,
            pool=inventory.pool,
            driver_version=inventory.driver_version,
            boot_id=inventory.boot_id,
            simulated=inventory.simulated,
            access=inventory.access.name.lower(),
            host=HostView(
                cpu_milli=inventory.cpu_milli,
                memory_bytes=inventory.memory_bytes,
                values={**({} if tick is None else _host_cells(tick)), **slow.host},
            ),
            gpus=tuple(gpus),
            guard=_guard_view(node.guard, now_ns),
            owners=OwnersView() if owned is None else self._owners.build_view(owned),
        )


def _worker_view(worker: RemoteDevice) -> WorkerView:
    cpu_s, resident_bytes = 0.0, 0.0
    for pid in worker.children:
        try:
            process = psutil.Process(pid)
            times, memory = process.cpu_times(), process.memory_info()
        except psutil.Error:
            # It ended between two of these lines.
            continue
        cpu_s += times.user + times.system
        resident_bytes += memory.rss
    return WorkerView(
        starts=worker.starts_total,
        hangs=worker.hangs_total,
        left_behind=worker.unkillable_count,
        hung_gpus=len(worker.hung_gpus),
        cpu_s=cpu_s,
        resident_bytes=resident_bytes,
    )


def _gpu_view(
    gpu: Gpu,
    quick: TimedValues | None,
    slow: ExtendedReadings,
    node: AgentNode,
    now_ns: int,
    *,
    attributed: Mapping[str, Any],
) -> GpuView:
    """One device; a lost one has no slow readings, whatever was read before."""
    slow_age_s = max(0.0, (now_ns - slow.monotonic_ns) / 1e9)
    values = slow.gpus.get(gpu.uuid)
    looked = None if values is None else TimedValues(values=values, age_s=slow_age_s)
    if gpu.lost and looked is not None:
        looked = TimedValues(values=dict.fromkeys(looked.values, _LOST), age_s=slow_age_s)
    instances = () if gpu.lost else slow.instances.get(gpu.uuid, ())
    # The loop adds codes to these: a copy is whole, for it is made without giving the interpreter away.
    xids, last_ns = node.health.xids.copy(), node.health.xid_last_ns.copy()
    device = node.guard.state.devices.get(gpu.uuid)
    return GpuView(
        gpu=gpu,
        quick=quick,
        slow=looked,
        instances=instances,
        instances_age_s=slow_age_s if instances else None,
        xids={str(code): count for (uuid, code), count in xids.items() if uuid == gpu.uuid},
        xid_last_s={str(code): time_ns / 1e9 for (uuid, code), time_ns in last_ns.items() if uuid == gpu.uuid},
        quarantined=device is not None and device.is_quarantined(now_ns),
        enforcement_suspended=device is not None and bool(device.suspended),
        layout_unmet=gpu.uuid in node.guard.unmet_layouts if gpu.mig_capable else None,
        **attributed,
    )


def _attributed_fields(uuid: str, owned: Attribution) -> Mapping[str, Any]:
    """Those fields of a device's view that come from its owners."""
    nobody = owned.nobody.get(uuid, {})
    found = {anomaly.subject.kind for anomaly in owned.anomalies if anomaly.subject.gpu_uuid == uuid}
    estimate = owned.estimates.get(uuid)
    return {
        "unattributed_j": {reason: energy_mj / 1000.0 for reason, energy_mj in nobody.items() if reason != _ENDED},
        "ended_j": nobody.get(_ENDED, 0) / 1000.0,
        "anomalies": {name: kind in found for kind, name in _ANOMALIES} if found else _NO_ANOMALIES,
        "energy_uncertainty_j": None if estimate is None else estimate.uncertainty_j,
    }


def _guard_view(guard: Guard, now_ns: int) -> GuardView:
    """The plan in force; its counts are copied, for the loop adds to them."""
    budget_w, is_kept = guard.state.current_budget()
    return GuardView(
        plan_epoch=guard.epoch,
        enforcing=guard.is_enforcing,
        lease_left_s=None if guard.plan is None else guard.lease_left_s(now_ns),
        budget_w=budget_w,
        budget_fixed=guard.state.budget.fixed if is_kept else None,
        drift_repairs=dict(guard.repairs_total),
        refusals=dict(guard.refusals_total),
    )


def _cells(tick: SampleTick, gpu: int) -> Mapping[Reading, ReadingValue]:
    """One device's part of a tick."""
    values: dict[Reading, ReadingValue] = dict(zip(GPU_READINGS, tick.gpu_values[gpu :: tick.gpus], strict=True))
    for position, reason in tick.gpu_absences:
        row, column = divmod(position, tick.gpus)
        if column == gpu:
            values[GPU_READINGS[row]] = Missing(reason)
    return values


def _host_cells(tick: SampleTick) -> Mapping[Reading, ReadingValue]:
    values: dict[Reading, ReadingValue] = dict(zip(HOST_READINGS, tick.host_values, strict=True))
    for row, reason in tick.host_absences:
        values[HOST_READINGS[row]] = Missing(reason)
    return values
