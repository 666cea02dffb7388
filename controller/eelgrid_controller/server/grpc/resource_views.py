"""API resources made from the state and the telemetry of one moment: nodes, GPUs, plans and the summary.

`ClusterTotals` keeps sums over all nodes, updated node by node.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from eelgrid_controller.clock import RecentLatencies
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.drains import count_left, list_cordons
from eelgrid_controller.state.cordons import OperatorCordon
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.node_changes import count_lost_gpus, mark_lost_gpu, mark_lost_gpus, mark_lost_replicas
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.codec import encode_element
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import (
    CORDONS_MOST,
    CordonStatus,
    Gpu,
    GpuHolder,
    GpuStatus,
    Inventory,
    JobProgress,
    ListWorkloadsResponse,
    ModelSummary,
    Node,
    NodeState,
    PlanStatus,
    QueueStatus,
    ReasonCount,
    Summary,
    Workload,
    WorkloadPhase,
    WorkloadSummary,
    resolve_pool,
    summarize_workload,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE


class _Part(NamedTuple):
    """What one node adds; (model, GPUs, milli-GPU held) for each of its models."""

    is_lost: bool
    gpus_lost: int
    cpu_milli: int
    allocated_cpu_milli: int
    models: tuple[tuple[str, int, int], ...]


class ClusterTotals:
    """Sums of one controller's nodes as they are now; `follow` before they are read again."""

    def __init__(self, core: Core) -> None:
        snapshot, nodes = core.snapshot(), core.state.nodes
        self.lost = self.gpus_lost = self.cpu_milli = self.allocated_cpu_milli = 0
        # By model; one of which no GPU is left is not there.
        self.gpus: Counter[str] = Counter()
        self.held_milli: Counter[str] = Counter()
        self._changes, self._read = snapshot.changes, len(snapshot.changes)
        self._parts = [_part(nodes[name]) for name in snapshot.names]
        for part in self._parts:
            self._add(part, 1)

    def update(self, core: Core) -> bool:
        """Counts the nodes anew that changed since the last time; False where that cannot be told: begin anew."""
        snapshot, nodes = core.snapshot(), core.state.nodes
        if self._changes is not snapshot.changes:
            return False
        for row in set(snapshot.changes[self._read :]):
            self._add(self._parts[row], -1)
            self._parts[row] = _part(nodes[snapshot.names[row]])
            self._add(self._parts[row], 1)
        self._read = len(snapshot.changes)
        return True

    def _add(self, part: _Part, sign: int) -> None:
        self.lost += sign * part.is_lost
        self.gpus_lost += sign * part.gpus_lost
        self.cpu_milli += sign * part.cpu_milli
        self.allocated_cpu_milli += sign * part.allocated_cpu_milli
        for model, gpus, held_milli in part.models:
            self.gpus[model] += sign * gpus
            self.held_milli[model] += sign * held_milli
            if not self.gpus[model]:
                del self.gpus[model], self.held_milli[model]


def _part(record: NodeRecord) -> _Part:
    inventory, held = record.inventory, record.gpu_milli
    models: dict[str, tuple[int, int]] = {}
    for gpu in inventory.gpus:
        gpus, held_milli = models.get(gpu.model, (0, 0))
        models[gpu.model] = gpus + 1, held_milli + held.get(gpu.uuid, 0)
    return _Part(
        record.state is NodeState.LOST,
        count_lost_gpus(record),
        inventory.cpu_milli,
        record.allocated_cpu_milli,
        tuple((model, gpus, held_milli) for model, (gpus, held_milli) in models.items()),
    )


_REASONS_MOST = 64
_HOLDERS_MOST = 4096
# A summary passes every node's newest reading; a thousand watchers must not make it a thousand walks.
_SUMMARY_FOR_S = 0.2
# Of the order of pending work: a place costs 20 to 40 µs, and the pages of a list should agree.
_POSITIONS_MOST = 1024
_POSITIONS_FOR_S = 1.0
# Some 300 bytes each.
_SUMMARIES_MOST = 50_000


class SummaryCache:
    """Summaries of workloads as a listing has them on the wire, each kept until what it is made of changes.

    Lists are read again and again while few jobs change: of 10,000 that wait, encoding took half of the time.
    """

    def __init__(self) -> None:
        # By workload: what the summary was made of, and its bytes. Workloads never change: another one is put in place.
        self._kept: dict[str, tuple[Workload, JobProgress | None, int, bytes]] = {}

    def encode(self, workload: Workload, progress: JobProgress | None, queue_position: int) -> WorkloadSummary | bytes:
        """Returns the encoded summary; a summary that breaks the contract is returned as it is."""
        kept = self._kept.get(workload.workload_id)
        if kept is not None and kept[0] is workload and kept[1] is progress and kept[2] == queue_position:
            return kept[3]
        summary = summarize_workload(workload, progress=progress, queue_position=queue_position)
        try:
            data = encode_element(ListWorkloadsResponse, "summaries", summary)
        except ContractError:
            return summary
        if len(self._kept) >= _SUMMARIES_MOST:
            self._kept.clear()
        self._kept[workload.workload_id] = workload, progress, queue_position, data
        return data


@dataclass(slots=True)
class _Kept:
    summary: Summary
    at_s: float


class ResourceViews:
    """Makes what operators see."""

    def __init__(
        self,
        *,
        telemetry: Telemetry,
        decisions: RecentLatencies,
        now_ns: Callable[[], int],
        monotonic_s: Callable[[], float],
    ) -> None:
        # Submissions that were refused; they leave no trace in the state.
        self.refused = 0
        self._telemetry = telemetry
        self._decisions = decisions
        self._now_ns = now_ns
        self._monotonic_s = monotonic_s
        self._kept: _Kept | None = None
        self._summaries = SummaryCache()
        # When the order of pending work was computed, and the places.
        self._positions: tuple[float, Mapping[str, int]] | None = None
        self._tally: ClusterTotals | None = None

    def queues(self, core: Core) -> Iterable[tuple[int, Callable[[], QueueStatus]]]:
        """The queues by position, each made when it is shown."""
        return core.queues.list_statuses(self._now_ns())

    def node(self, record: NodeRecord) -> Node:
        """One node."""
        name = record.inventory.node_name
        now_s, now_ns = self._monotonic_s(), self._now_ns()
        age_s = self._telemetry.age_s(name, now_s=now_s, now_ns=now_ns)
        tick = self._telemetry.fresh_tick(name, now_s=now_s, now_ns=now_ns)
        applied = self._telemetry.plan_applied(name)
        received, lost = self._telemetry.tick_counts(name)
        return Node(
            inventory=_named_pool(mark_lost_gpus(record)),
            state=record.state,
            allocated_cpu_milli=record.allocated_cpu_milli,
            allocated_memory_bytes=record.allocated_memory_bytes,
            allocated_gpu_milli=record.allocated_gpu_milli,
            workloads=len({workload_id for workload_id, _ in record.assignments}),
            power_w=tick.power_w if tick else None,
            sample_age_s=_bound_age(age_s),
            plan_epoch=record.plan_epoch,
            applied_epoch=applied.epoch if applied else 0,
            samples_received=received,
            samples_lost=lost,
            ahead_epoch=record.ahead.plan_epoch if record.ahead else None,
            unknown_workload_ids=record.ahead.workload_ids if record.ahead else (),
            cordons=tuple(_cordon(record, *one) for one in islice(list_cordons(record), CORDONS_MOST)),
        )

    def gpu(self, record: NodeRecord, gpu: Gpu, workloads: Mapping[str, Workload]) -> GpuStatus:
        """One device; `workloads` are all of the state, of which some hold it."""
        name = record.inventory.node_name
        now_s, now_ns = self._monotonic_s(), self._now_ns()
        readings = self._telemetry.gpu(name, gpu.uuid, now_s=now_s, now_ns=now_ns)
        holders = tuple(record.holders(gpu.uuid))[:_HOLDERS_MOST]
        return GpuStatus(
            node_name=name,
            gpu=mark_lost_gpu(record, gpu),
            node_state=record.state,
            allocated_milli=record.gpu_milli.get(gpu.uuid, 0),
            workload_ids=holders,
            power_w=readings.power_w,
            energy_j=readings.energy_j,
            utilization_ratio=readings.utilization_ratio,
            memory_used_bytes=readings.memory_used_bytes,
            temperature_c=readings.temperature_c,
            sample_age_s=_bound_age(self._telemetry.age_s(name, now_s=now_s, now_ns=now_ns)),
            holders=tuple(_holder(key, workloads.get(key)) for key in holders),
            cordons=tuple(_cordon(record, *one) for one in list_cordons(record) if one[0] in {"", gpu.uuid}),
        )

    def queue_positions(self, core: Core) -> Mapping[str, int]:
        """The places of pending workloads in the order in which they are tried, of the first of them; empty without queues."""
        now_s = self._monotonic_s()
        if not core.queues.is_active:
            return {}
        if self._positions is None or now_s - self._positions[0] > _POSITIONS_FOR_S:
            order = core.queues.list_order(self._now_ns(), _POSITIONS_MOST)
            self._positions = now_s, {workload_id: place for place, workload_id in enumerate(order, 1)}
        return self._positions[1]

    def workload(self, workload: Workload, nodes: Mapping[str, NodeRecord]) -> Workload:
        """One workload, with what is known of its GPUs now: which are lost, and what they draw."""
        marked, power_w = mark_lost_replicas(workload, nodes), self._power_w(workload, nodes)
        progress = self._telemetry.progress.get(workload.workload_id) if workload.spec.process is not None else None
        is_unknown = power_w is None and progress is None
        return marked if is_unknown else replace(marked, power_w=power_w, progress=progress)

    def workload_summary(self, workload: Workload, queue_position: int) -> WorkloadSummary | bytes:
        """The summary of one workload, with what its processes last reported; encoded unless it breaks the contract."""
        progress = self._telemetry.progress.get(workload.workload_id) if workload.spec.process is not None else None
        return self._summaries.encode(workload, progress, queue_position)

    def with_advice(self, core: Core, workload: Workload) -> Workload:
        """One workload, with how often it should save."""
        return core.checkpoints.add_advice(workload, self._now_ns())

    def _power_w(self, workload: Workload, nodes: Mapping[str, NodeRecord]) -> float | None:
        """The measured power of a workload's GPUs by its shares of what is held; None without a reading of each."""
        now_s, now_ns = self._monotonic_s(), self._now_ns()
        parts: list[float] = []
        for at in workload.placements:
            record = nodes.get(at.node_name)
            item = record.assignments.get((workload.workload_id, at.replica)) if record else None
            if record is None or item is None:
                return None
            for uuid in item.gpu_uuids:
                power_w = self._telemetry.gpu(at.node_name, uuid, now_s=now_s, now_ns=now_ns).power_w
                if power_w is None:
                    return None
                parts.append(power_w * item.gpu_milli / record.gpu_milli[uuid])
        return sum(parts) if parts else None

    def plan(self, core: Core, node_name: str) -> PlanStatus:
        """One plan and the node's word on it."""
        return PlanStatus(
            plan=core.node_plan(node_name).mask_environments(), applied=self._telemetry.plan_applied(node_name)
        )

    def summary(self, core: Core) -> Summary:
        """The cluster, with every change up to now."""
        kept = self._kept
        if kept and (kept.summary.revision, kept.summary.refused) == (core.state.revision, self.refused):
            return self.recent_summary(core)
        return self._sum_up(core)

    def recent_summary(self, core: Core) -> Summary:
        """The cluster up to a fifth of a second ago, for those who ask again and again."""
        if self._kept is None or not 0.0 <= self._monotonic_s() - self._kept.at_s < _SUMMARY_FOR_S:
            return self._sum_up(core)
        return self._kept.summary

    def _sum_up(self, core: Core) -> Summary:
        state, now_s, now_ns = core.state, self._monotonic_s(), self._now_ns()
        power = self._telemetry.fresh_power(now_s=now_s, now_ns=now_ns)
        if self._tally is None or not self._tally.update(core):
            self._tally = ClusterTotals(core)
        tally = self._tally
        phases = state.phases
        waiting = [state.workloads[workload_id] for workload_id in state.pending]
        reasons = Counter(one.reason for one in waiting)
        summary = Summary(
            time_ns=now_ns,
            nodes_ready=len(state.nodes) - tally.lost,
            nodes_lost=tally.lost,
            gpus=tally.gpus.total(),
            allocated_gpu_milli=tally.held_milli.total(),
            cpu_milli=tally.cpu_milli,
            allocated_cpu_milli=tally.allocated_cpu_milli,
            pending=phases[WorkloadPhase.PENDING],
            placed=phases[WorkloadPhase.PLACED],
            cancelled=phases[WorkloadPhase.CANCELLED],
            refused=self.refused,
            pending_reasons=tuple(
                ReasonCount(reason=reason, workloads=count) for reason, count in reasons.most_common(_REASONS_MOST)
            ),
            modelled_power_w=core.modelled_power_w(),
            measured_power_w=power.power_w,
            measured_gpus=power.gpus,
            samples_received=self._telemetry.received,
            samples_lost=self._telemetry.lost,
            decision_p50_s=self._decisions.quantile(0.5),
            decision_p99_s=self._decisions.quantile(0.99),
            decisions=self._decisions.count,
            models=tuple(
                ModelSummary(
                    model=model,
                    gpus=count,
                    allocated_gpu_milli=tally.held_milli[model],
                    measured_power_w=power.by_model.get(model, 0.0),
                )
                for model, count in sorted(tally.gpus.items())[:1000]
            ),
            revision=state.revision,
            gpus_lost=tally.gpus_lost,
            oldest_pending_ns=min((one.submitted_ns for one in waiting), default=0),
        )
        self._kept = _Kept(summary, now_s)
        return summary


def _cordon(record: NodeRecord, gpu_uuid: str, cordon: OperatorCordon) -> CordonStatus:
    drain = cordon.drain
    return CordonStatus(
        gpu_uuid=gpu_uuid,
        reason=cordon.reason,
        user=cordon.user,
        since_ns=cordon.since_ns,
        workloads=count_left(record, gpu_uuid),
        draining=drain is not None,
        deadline_ns=0 if drain is None else drain.deadline_ns,
        force=drain is not None and drain.force,
    )


def _holder(workload_id: str, workload: Workload | None) -> GpuHolder:
    if workload is None:
        return GpuHolder(workload_id=workload_id)
    return GpuHolder(workload_id=workload_id, name=workload.spec.name, user=workload.spec.user)


def free_milli(record: NodeRecord, gpu: Gpu) -> int:
    """What new work could still get of the device: nothing of one that is lost, cordoned, cut or to be cut."""
    gone = gpu.uuid in record.lost_gpus or gpu.mig_enabled or record.is_partition_managed(gpu)
    if record.state is not NodeState.READY or record.cordon_reason(gpu) or gone:
        return 0
    return GPU_MILLI_WHOLE - record.gpu_milli.get(gpu.uuid, 0)


def list_devices(records: Iterator[NodeRecord]) -> Iterator[tuple[NodeRecord, Gpu]]:
    """Every device, by index within its node."""
    for record in records:
        for gpu in sorted(record.inventory.gpus, key=lambda gpu: gpu.index):
            yield record, gpu


def _named_pool(inventory: Inventory) -> Inventory:
    """The inventory with the name of its pool, also where the agent named none."""
    return inventory if inventory.pool else replace(inventory, pool=resolve_pool(inventory.pool))


def _bound_age(age_s: float | None) -> float | None:
    """A clock that was never set may put a sample decades back; the contract ends at 1e9 s."""
    return None if age_s is None else min(age_s, 1e9)
