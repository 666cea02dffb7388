"""The overview: what is going on at one moment and what needs attention, from the state, the telemetry and the ledger.

`OverviewModel` keeps what each node and each pending workload adds to the sums, and counts only those anew that changed;
`build_overview` makes the answer. Figures are those of the other calls: GPUs as ListGpus, budgets and promises as
ListPromises, energy as the ledger. Must not know how it is asked, nor wait for anything.

Power is summed in whole milliwatts, so that a node can be taken out of a sum without an error that grows.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eelgrid_controller.formatting import format_age, format_power, format_time
from eelgrid_controller.server.grpc.resource_views import free_milli
from eelgrid_controller.state.attention import (
    BudgetProblem,
    GpuProblem,
    find_budget_problem,
    find_gpu_problems,
    find_plan_problems,
    is_late,
    is_uncontrolled,
    stale_after_s,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.pending_reasons import describe_hint
from eelgrid_controller.state.spending import (
    SpendingDimension,
    describe_subject,
    describe_unit,
    format_amount,
    subject_name,
    warn_ratio_of,
)
from eelgrid_controller.state.telemetry import NodeTick, Telemetry
from eelgrid_protos.messages import (
    ATTENTION_MOST,
    CONSUMERS_MOST,
    WAITING_REASONS_MOST,
    AttentionItem,
    AttentionKind,
    AttentionSeverity,
    BudgetScope,
    BudgetStatus,
    CapacityOverview,
    Consumer,
    JobStatus,
    ListPromisesResponse,
    NodeEvent,
    NodeState,
    Overview,
    PowerOverview,
    PromiseOverview,
    Reading,
    ServiceStatus,
    SpendingScope,
    SpendingStatus,
    TodayEnergy,
    WaitingReason,
    Workload,
    WorkloadPhase,
)
from eelgrid_protos.quantities import SENTENCE_LETTERS_MOST

_S = 10**9
# A held GPU counts as idle after these minutes, and needs attention after those.
IDLE_NS = 300 * _S
_IDLE_ATTENTION_NS = 1800 * _S
_LONG_WAIT_NS, _VERY_LONG_WAIT_NS = 3600 * _S, 24 * 3600 * _S
# How long a reported device fault is shown.
FAULT_SHOWN_S = 3600.0
_NAMED_MOST = 5
# NVML's clocks event reasons by their bits; a power cap is not among them, since budgets cause it.
_SLOWED: Mapping[int, str] = {
    0x08: "the hardware slows it down",
    0x20: "it is slowed down by heat",
    0x40: "the hardware slows it down by heat",
    0x80: "an external power brake slows it down",
}
# What only a reset or a technician changes.
_ROTTEN: Mapping[Reading, str] = {
    Reading.ROW_REMAP_FAILED: "a memory row could not be remapped",
    Reading.RECOVERY_ACTION: "its driver recommends a reset, a reboot or a drain",
}
_USER = SpendingDimension(SpendingScope.USER)
_CRITICAL, _WARNING, _INFO = AttentionSeverity.CRITICAL, AttentionSeverity.WARNING, AttentionSeverity.INFO

ConsumerKey = tuple[str, str]


class LedgerFigures(NamedTuple):
    """What the ledger says of today: the sums, and (joules, money) by namespace and user."""

    today: TodayEnergy
    by_consumer: Mapping[ConsumerKey, tuple[float, float]]


class HeldShare(NamedTuple):
    """A part of a GPU that a workload holds; the power is None where the GPU was not read."""

    workload_id: str
    key: ConsumerKey
    milli: int
    power_mw: int | None


class IdleGpu(NamedTuple):
    """A held GPU without utilization, and what holds it."""

    gpu_index: int
    since_ns: int
    workload_ids: tuple[str, ...]
    keys: tuple[ConsumerKey, ...]


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What one node adds to the overview; `seen` changes when any of it may have."""

    seen: tuple[object, ...]
    counts: Mapping[str, int]
    replicas: tuple[tuple[str, ConsumerKey], ...]
    shares: tuple[HeldShare, ...]
    idle: tuple[IdleGpu, ...]
    items: tuple[AttentionItem, ...]


@dataclass(slots=True)
class ConsumerUsage:
    """What the workloads of one user in one namespace hold."""

    workloads: int = 0
    replicas: int = 0
    held_milli: int = 0
    power_mw: int = 0
    # Shares with a reading.
    measured: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewInputs:
    """All that an overview is made of besides the state and the telemetry."""

    now_ns: int
    now_s: float
    promises: ListPromisesResponse
    ledger: LedgerFigures | None = None
    spending: Sequence[SpendingStatus] = ()
    journal_problem: str = ""
    ledger_problem: str = ""
    faults: Mapping[tuple[str, str], tuple[float, NodeEvent]] = field(default_factory=dict)


def consumer_key(workload: Workload) -> ConsumerKey:
    """Returns the namespace and the user that a workload is charged to, as the ledger charges it."""
    return workload.spec.namespace, subject_name(workload.spec, _USER)


class OverviewModel:
    """Sums over nodes and pending workloads, updated for those that changed."""

    def __init__(self) -> None:
        self._state: ClusterState | None = None
        self._reset(None)

    def _reset(self, state: ClusterState | None) -> None:
        self._state = state
        self._nodes: dict[str, NodeFigures] = {}
        self._counts: Counter[str] = Counter()
        self._usage: dict[ConsumerKey, ConsumerUsage] = {}
        self._replicas: Counter[str] = Counter()
        # Of nodes that have any.
        self._items: dict[str, tuple[AttentionItem, ...]] = {}
        self._idle: dict[str, tuple[IdleGpu, ...]] = {}
        # By constraint, the amount and submission time of each workload that waits for it.
        self._waiting: dict[str, dict[str, tuple[int, int]]] = {}
        self._constraints: dict[str, str] = {}
        self._changed: set[str] = set() if state is None else set(state.pending)

    def note_workloads(self, workload_ids: Iterable[str]) -> None:
        """Notes that these workloads may have begun or ceased to wait, or wait for something else."""
        self._changed.update(workload_ids)

    # What changed

    def list_changed_nodes(self, state: ClusterState, telemetry: Telemetry, *, now_s: float, now_ns: int) -> list[str]:
        """Returns the nodes whose figures are no longer right; forgets those that are gone."""
        if state is not self._state:
            self._reset(state)
        readings = telemetry.readings(now_s=now_s, now_ns=now_ns)
        fresh = {
            name
            for name, is_fresh in zip(readings.names, (readings.age_s <= telemetry.fresh_s).tolist(), strict=False)
            if is_fresh
        }
        if len(self._nodes) > len(state.nodes) or not self._nodes.keys() <= state.nodes.keys():
            for name in [name for name in self._nodes if name not in state.nodes]:
                self._add(name, self._nodes.pop(name), -1)
        changed, known = [], self._nodes
        for name, record in state.nodes.items():
            figures = known.get(name)
            if figures is None or figures.seen != _seen(record, telemetry, is_fresh=name in fresh):
                changed.append(name)
        return changed

    def update_nodes(
        self, state: ClusterState, names: Iterable[str], telemetry: Telemetry, *, now_s: float, now_ns: int
    ) -> None:
        """Counts these nodes anew."""
        for name in names:
            record = state.nodes.get(name)
            if record is None or state is not self._state:
                continue
            tick = telemetry.fresh_tick(name, now_s=now_s, now_ns=now_ns)
            if (before := self._nodes.get(name)) is not None:
                self._add(name, before, -1)
            self._nodes[name] = figures = _figures(record, tick, telemetry, state.workloads)
            self._add(name, figures, 1)

    def update_waiting(self, state: ClusterState, *, most: int) -> int:
        """Counts at most so many changed workloads anew; returns how many are left."""
        if state is not self._state:
            self._reset(state)
        if not self._changed and len(self._constraints) != len(state.pending):
            self._changed = set(state.pending) | set(self._constraints)
        for _ in range(min(most, len(self._changed))):
            key = self._changed.pop()
            if (constraint := self._constraints.pop(key, None)) is not None:
                rows = self._waiting[constraint]
                del rows[key]
                if not rows:
                    del self._waiting[constraint]
            if key in state.pending:
                workload = state.workloads[key]
                constraint = workload.reason.partition(":")[0]
                spec, request = workload.spec, workload.spec.request
                milli = spec.replicas * request.gpu_count * request.gpu_milli
                self._waiting.setdefault(constraint, {})[key] = milli, workload.submitted_ns
                self._constraints[key] = constraint
        return len(self._changed)

    def _add(self, name: str, one: NodeFigures, sign: int) -> None:
        for count, number in one.counts.items():
            self._counts[count] += sign * number
        for workload_id, key in one.replicas:
            usage = self._usage.setdefault(key, ConsumerUsage())
            usage.replicas += sign
            before = self._replicas[workload_id]
            after = self._replicas[workload_id] = before + sign
            usage.workloads += (after > 0) - (before > 0)
            if not after:
                del self._replicas[workload_id]
        for share in one.shares:
            usage = self._usage.setdefault(share.key, ConsumerUsage())
            usage.held_milli += sign * share.milli
            if share.power_mw is not None:
                usage.power_mw += sign * share.power_mw
                usage.measured += sign
        for key in {key for _, key in one.replicas}:
            if not self._usage[key].replicas:
                del self._usage[key]
        self._items.pop(name, None)
        self._idle.pop(name, None)
        if sign > 0 and one.items:
            self._items[name] = one.items
        if sign > 0 and one.idle:
            self._idle[name] = one.idle

    # The answer

    def build_overview(self, state: ClusterState, telemetry: Telemetry, inputs: OverviewInputs) -> Overview:
        """Builds the overview of this moment."""
        now_s, now_ns = inputs.now_s, inputs.now_ns
        self.update_nodes(
            state,
            self.list_changed_nodes(state, telemetry, now_s=now_s, now_ns=now_ns),
            telemetry,
            now_s=now_s,
            now_ns=now_ns,
        )
        while self.update_waiting(state, most=1_000_000):
            pass
        idle = self.list_idle_gpus(now_ns)
        waiting = self._waiting_reasons(state)
        idle_items, idle_total = _idle_items(state, idle, now_ns)
        stale_items, stale_total = _stale_items(state, telemetry, now_s=now_s, now_ns=now_ns)
        left_out = idle_total - len(idle_items) + stale_total - len(stale_items)
        items = [
            *(item for found in self._items.values() for item in found),
            *_fault_items(state, inputs),
            *stale_items,
            *idle_items,
            *_wait_items(waiting, now_ns),
            *_budget_items(inputs.promises.budgets),
            *_promise_items(inputs.promises, state),
            *_deadline_items(state),
            *_spending_items(inputs.spending, state),
            *_disk_items(inputs),
        ]
        items.sort(key=lambda item: (item.severity, item.since_ns or now_ns, item.kind, item.subject))
        consumers = self._consumers(idle, inputs.ledger)
        counts = self._counts
        return Overview(
            time_ns=now_ns,
            revision=state.revision,
            power=self._power(telemetry, inputs),
            today=None if inputs.ledger is None else inputs.ledger.today,
            capacity=CapacityOverview(
                gpus=counts["gpus"],
                held_milli=counts["held_milli"],
                free_milli=counts["free_milli"],
                gpus_idle=len(idle),
                gpus_lost=counts["gpus_lost"],
                gpus_cordoned=counts["gpus_cordoned"],
                nodes=len(state.nodes),
                nodes_lost=counts["nodes_lost"],
                nodes_cordoned=counts["nodes_cordoned"],
                gpus_unreachable=counts["gpus_unreachable"],
            ),
            waiting=tuple(waiting[:WAITING_REASONS_MOST]),
            promises=count_promises(inputs.promises, state),
            attention=tuple(items[:ATTENTION_MOST]),
            attention_total=len(items) + left_out,
            consumers=tuple(consumers[:CONSUMERS_MOST]),
            consumers_total=len(consumers),
            consumers_left_out_milli=sum(one.held_milli for one in consumers[CONSUMERS_MOST:]),
            workloads_waiting=len(state.pending),
            workloads_placed=state.phases[WorkloadPhase.PLACED],
        )

    def list_idle_gpus(self, now_ns: int) -> list[tuple[str, IdleGpu]]:
        """Lists the held GPUs that have been idle for long enough to count, each with its node."""
        return [(name, one) for name, gpus in self._idle.items() for one in gpus if now_ns - one.since_ns >= IDLE_NS]

    def _power(self, telemetry: Telemetry, inputs: OverviewInputs) -> PowerOverview:
        found = telemetry.readings(now_s=inputs.now_s, now_ns=inputs.now_ns)
        power = telemetry.fresh_power(now_s=inputs.now_s, now_ns=inputs.now_ns)
        rows = np.unique(found.row)
        budgets = inputs.promises.budgets
        whole = next((one for one in budgets if one.budget.scope is BudgetScope.CLUSTER), None)
        return PowerOverview(
            measured_w=power.power_w if power.gpus else None,
            measured_gpus=power.gpus,
            gpus=self._counts["gpus"],
            nodes_reporting=len(rows),
            nodes=self._counts["gpu_nodes"],
            sample_age_s=float(found.age_s[rows].max()) if len(rows) else None,
            budget_w=whole.budget.limit_w if whole else None,
            claimed_w=whole.claimed_w if whole else None,
            shortfall_w=whole.shortfall_w if whole else None,
            over_w=whole.over_w if whole else None,
            budgets=budgets,
        )

    def _waiting_reasons(self, state: ClusterState) -> list[WaitingReason]:
        firsts: dict[str, str] = {}
        for key in state.pending:
            firsts.setdefault(self._constraints[key], key)
            if len(firsts) == len(self._waiting):
                break
        found = [
            WaitingReason(
                reason=constraint,
                workloads=len(rows),
                gpu_milli=sum(milli for milli, _ in rows.values()),
                oldest_since_ns=min(since_ns for _, since_ns in rows.values()),
                example_workload_id=firsts[constraint],
                example_reason=state.workloads[firsts[constraint]].reason,
                remedy=f"{describe_hint(constraint)}; `eelctl explain {firsts[constraint]}` tries what would help",
            )
            for constraint, rows in self._waiting.items()
        ]
        return sorted(found, key=lambda one: (-one.workloads, one.reason))

    def _consumers(self, idle: Iterable[tuple[str, IdleGpu]], ledger: LedgerFigures | None) -> list[Consumer]:
        idle_gpus: Counter[ConsumerKey] = Counter()
        for _, gpu in idle:
            for key in gpu.keys:
                idle_gpus[key] += 1
        spent = {} if ledger is None else ledger.by_consumer
        is_priced = ledger is not None and ledger.today.cost is not None
        none, found = ConsumerUsage(), []
        for key in self._usage.keys() | spent.keys():
            usage = self._usage.get(key, none)
            energy_j, cost = spent.get(key, (0.0, 0.0))
            found.append(
                Consumer(
                    namespace=key[0],
                    user=key[1],
                    workloads=usage.workloads,
                    held_milli=usage.held_milli,
                    power_w=usage.power_mw / 1000.0 if usage.measured else None,
                    energy_j=energy_j,
                    cost=cost if is_priced else None,
                    gpus_idle=idle_gpus[key],
                )
            )
        found.sort(key=lambda one: (-(one.power_w or 0.0), -one.held_milli, -one.energy_j, one.namespace, one.user))
        return found


def _seen(record: NodeRecord, telemetry: Telemetry, *, is_fresh: bool) -> tuple[object, ...]:
    """What the figures of a node depend on: its plan changes with everything that it holds."""
    name = record.inventory.node_name
    return (
        record.plan_epoch,
        record.state,
        tuple(record.lost_gpus),
        record.ahead,
        record.others.closed,
        record.cordon,
        tuple(record.gpu_cordons.items()),
        record.inventory,
        telemetry.tick_counts(name)[0],
        is_fresh,
        telemetry.plan_applied(name),
    )


def _figures(
    record: NodeRecord, tick: NodeTick | None, telemetry: Telemetry, workloads: Mapping[str, Workload]
) -> NodeFigures:
    """Counts one node."""
    name, gpus = record.inventory.node_name, record.inventory.gpus
    is_lost = record.state is NodeState.LOST
    power = tick.gpus.get(Reading.POWER_W, ()) if tick else ()
    power_w = {gpu.uuid: watts for gpu, watts in zip(gpus, power, strict=False) if watts is not None}
    keys = {workload_id: consumer_key(workloads[workload_id]) for workload_id, _ in record.assignments}
    present = {gpu.uuid for gpu in gpus}
    shares, holders = [], dict[str, dict[str, None]]()
    for item in record.assignments.values():
        for uuid in item.gpu_uuids:
            if uuid not in present:
                continue
            watts = power_w.get(uuid)
            power_mw = None if watts is None else round(1000.0 * watts * item.gpu_milli / record.gpu_milli[uuid])
            shares.append(HeldShare(item.workload_id, keys[item.workload_id], item.gpu_milli, power_mw))
            holders.setdefault(uuid, {})[item.workload_id] = None
    idle = []
    if tick is not None and not is_lost:
        for gpu, since_ns in zip(gpus, telemetry.idle_since_ns(name), strict=False):
            if since_ns is not None and (on_it := holders.get(gpu.uuid)):
                begun_ns = max(since_ns, *(workloads[key].placed_ns for key in on_it))
                consumers = tuple(dict.fromkeys(keys[key] for key in on_it))
                idle.append(IdleGpu(gpu.index, begun_ns, tuple(on_it), consumers))
    lost = sum(gpu.uuid in record.lost_gpus for gpu in gpus)
    return NodeFigures(
        seen=_seen(record, telemetry, is_fresh=tick is not None),
        counts={
            "gpus": len(gpus),
            "gpu_nodes": bool(gpus),
            "held_milli": sum(share.milli for share in shares),
            "free_milli": sum(free_milli(record, gpu) for gpu in gpus) if record.is_schedulable else 0,
            "gpus_lost": 0 if is_lost else lost,
            "gpus_cordoned": sum(
                bool(record.gpu_cordon_reason(gpu)) and gpu.uuid not in record.lost_gpus for gpu in gpus
            ),
            "gpus_unreachable": len(gpus) if is_lost else 0,
            "nodes_lost": is_lost,
            "nodes_cordoned": not is_lost and bool(record.others.closed or record.cordon),
        },
        replicas=tuple((workload_id, keys[workload_id]) for workload_id, _ in record.assignments),
        shares=tuple(shares),
        idle=tuple(idle),
        items=tuple(_node_items(record, tick, telemetry)),
    )


# What needs attention


def _item(
    severity: AttentionSeverity,
    kind: AttentionKind,
    subject: str,
    message: str,
    command: str,
    *,
    since_ns: int = 0,
) -> AttentionItem:
    return AttentionItem(
        severity=severity,
        kind=kind,
        subject=subject,
        message=message[:SENTENCE_LETTERS_MOST],
        since_ns=max(0, since_ns),
        command=command,
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _node_items(record: NodeRecord, tick: NodeTick | None, telemetry: Telemetry) -> Iterator[AttentionItem]:
    name = record.inventory.node_name
    describe = f"eelctl describe node {name}"
    if record.ahead is not None:
        yield _item(
            _CRITICAL,
            AttentionKind.AHEAD_OF_JOURNAL,
            name,
            "It holds a plan that the journal does not know, so no new work is placed there: check what runs there.",
            f"eelctl reconcile {name}",
        )
    if record.state is NodeState.LOST:
        held = len({workload_id for workload_id, _ in record.assignments})
        yield _item(
            _CRITICAL if held else _WARNING,
            AttentionKind.LOST_NODE,
            name,
            f"Its agent is away, with {_count(held, 'workload')} on it." if held else "Its agent is away.",
            describe,
            since_ns=record.lost_ns,
        )
        return
    if record.others.closed or record.cordon is not None:
        why = record.others.closed if record.cordon is None else record.cordon.describe()
        since_ns = 0 if record.cordon is None else record.cordon.since_ns
        severity = _WARNING if record.cordon is not None and record.cordon.is_quarantine else _INFO
        yield _item(
            severity, AttentionKind.CORDONED_NODE, name, f"It takes no new work: {why}.", describe, since_ns=since_ns
        )
    problems = find_plan_problems(telemetry.plan_applied(name))
    if problems.has_failed or problems.has_refused:
        what = "It failed to apply its plan." if problems.has_failed else "It refused a part of its plan."
        yield _item(_WARNING, AttentionKind.PLAN_NOT_APPLIED, name, what, f"eelctl plan {name}")
    for position, gpu in enumerate(record.inventory.gpus):
        subject = f"{name}/{gpu.index}"
        look = f"eelctl describe gpu {subject}"
        found = find_gpu_problems(gpu, record.state, is_lost=gpu.uuid in record.lost_gpus)
        if GpuProblem.LOST in found:
            holders = len(tuple(record.holders(gpu.uuid)))
            what = f"It does not respond; {_count(holders, 'workload')} held it." if holders else "It does not respond."
            yield _item(_CRITICAL, AttentionKind.LOST_GPU, subject, what, look)
            continue
        if GpuProblem.CORDONED in found:
            yield _item(_WARNING, AttentionKind.CORDONED_GPU, subject, f"It takes no new work: {gpu.cordon}.", look)
        elif (own := record.gpu_cordons.get(gpu.uuid)) is not None:
            what = f"It takes no new work: {own.describe()}."
            severity = _WARNING if own.is_quarantine else _INFO
            yield _item(severity, AttentionKind.CORDONED_GPU, subject, what, look, since_ns=own.since_ns)
        if GpuProblem.MIG_PENDING in found:
            what = "A change of its MIG mode waits for a reset: drain the node, and reset the GPU."
            yield _item(_WARNING, AttentionKind.STUCK_LAYOUT, subject, what, look)
        if tick is not None and (why := _find_fault(tick, position)):
            yield _item(_WARNING, AttentionKind.FAILING_GPU, subject, f"{why[0].upper()}{why[1:]}.", look)


def _find_fault(tick: NodeTick, position: int) -> str:
    """Returns why a device that responds is failing, by its newest readings; empty if it is not."""

    def value(reading: Reading) -> float:
        values = tick.gpus.get(reading, ())
        return (values[position] or 0.0) if position < len(values) else 0.0

    for reading, why in _ROTTEN.items():
        if value(reading) > 0.0:
            return why
    mask = int(value(Reading.EVENT_REASONS_MASK))
    return next((why for bit, why in _SLOWED.items() if mask & bit), "")


def _fault_items(state: ClusterState, inputs: OverviewInputs) -> Iterator[AttentionItem]:
    for (name, uuid), (at_s, event) in inputs.faults.items():
        record = state.nodes.get(name)
        gpu = record.gpu(uuid) if record else None
        if record is None or gpu is None or uuid in record.lost_gpus or inputs.now_s - at_s > FAULT_SHOWN_S:
            continue
        what = event.kind.name.lower().replace("_", " ")
        detail = f": {event.detail[:500].rstrip('.')}" if event.detail else ""
        yield _item(
            _WARNING,
            AttentionKind.FAILING_GPU,
            f"{name}/{gpu.index}",
            f"Its driver reported {what}{detail}.",
            f"eelctl describe gpu {name}/{gpu.index}",
            since_ns=event.time_ns,
        )


def _stale_items(
    state: ClusterState, telemetry: Telemetry, *, now_s: float, now_ns: int
) -> tuple[list[AttentionItem], int]:
    """The same nodes as the doctor's check of telemetry, the oldest only; and how many there are."""
    most_s = stale_after_s(state.policy.send_interval_s)
    found = telemetry.readings(now_s=now_s, now_ns=now_ns)
    young = {name for name, is_young in zip(found.names, (found.age_s <= most_s).tolist(), strict=False) if is_young}
    stale = []
    for name, record in state.nodes.items():
        if name not in young and record.state is NodeState.READY and record.inventory.gpus:
            age_s = telemetry.age_s(name, now_s=now_s, now_ns=now_ns)
            stale.append((0.0 if age_s is None else -age_s, name, age_s))
    items = []
    for _, name, age_s in heapq.nsmallest(ATTENTION_MOST, stale, key=lambda one: one[:2]):
        what = "It has sent no sample yet." if age_s is None else f"Its newest sample is {format_age(age_s)} old."
        since_ns = 0 if age_s is None else now_ns - int(age_s * _S)
        items.append(
            _item(
                _CRITICAL, AttentionKind.STALE_READINGS, name, what, f"eelctl describe node {name}", since_ns=since_ns
            )
        )
    return items, len(stale)


def _idle_items(
    state: ClusterState, idle: Iterable[tuple[str, IdleGpu]], now_ns: int
) -> tuple[list[AttentionItem], int]:
    """One item for each workload that holds GPUs without using them, the oldest only; and how many there are."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name, gpu in idle:
        if now_ns - gpu.since_ns >= _IDLE_ATTENTION_NS:
            for workload_id in gpu.workload_ids:
                found.setdefault(workload_id, []).append((gpu.since_ns, f"{name}/{gpu.gpu_index}"))
    oldest = heapq.nsmallest(ATTENTION_MOST, ((min(gpus)[0], workload_id) for workload_id, gpus in found.items()))
    return [_idle_item(state, workload_id, found[workload_id], now_ns) for _, workload_id in oldest], len(found)


def _idle_item(state: ClusterState, workload_id: str, gpus: Sequence[tuple[int, str]], now_ns: int) -> AttentionItem:
    since_ns = min(gpus)[0]
    named = ", ".join(sorted(place for _, place in gpus)[:_NAMED_MOST])
    more = f" and {len(gpus) - _NAMED_MOST} more" if len(gpus) > _NAMED_MOST else ""
    title = state.workloads[workload_id].spec.name or workload_id
    age = format_age((now_ns - since_ns) / _S)
    return _item(
        _WARNING,
        AttentionKind.HELD_BUT_IDLE,
        workload_id,
        f"{title} holds {_count(len(gpus), 'GPU')} idle for {age}: {named}{more}.",
        f"eelctl describe workload {workload_id}",
        since_ns=since_ns,
    )


def _wait_items(waiting: Iterable[WaitingReason], now_ns: int) -> Iterator[AttentionItem]:
    for one in waiting:
        age_ns = now_ns - one.oldest_since_ns
        if age_ns >= _LONG_WAIT_NS:
            yield _item(
                _WARNING if age_ns >= _VERY_LONG_WAIT_NS else _INFO,
                AttentionKind.LONG_WAIT,
                one.reason or "pending",
                f"{_count(one.workloads, 'workload')} wait{'s' if one.workloads == 1 else ''} for {one.reason}, "
                f"the longest for {format_age(age_ns / _S)}.",
                f"eelctl queue --reason {one.reason}" if one.reason else "eelctl queue",
                since_ns=one.oldest_since_ns,
            )


def _deadline_items(state: ClusterState) -> Iterator[AttentionItem]:
    for key in state.broken_deadlines:
        workload = state.workloads[key]
        if workload.spec.deadline is not None and workload.deadline_breach is not None:
            what = f"Its deadline {format_time(workload.spec.deadline.end_ns)} is not kept: {workload.deadline_breach.cause}."
            since_ns = workload.deadline_breach.time_ns
            yield _item(_WARNING, AttentionKind.BROKEN_PROMISE, key, what, f"eelctl explain {key}", since_ns=since_ns)


_BUDGET_ITEMS: Mapping[BudgetProblem, tuple[AttentionSeverity, AttentionKind]] = {
    BudgetProblem.OVER: (_CRITICAL, AttentionKind.BUDGET_OVER),
    BudgetProblem.SHORT: (_WARNING, AttentionKind.BUDGET_SHORT),
    BudgetProblem.NEARLY_CLAIMED: (_INFO, AttentionKind.BUDGET_SHORT),
    BudgetProblem.NEARLY_DRAWN: (_INFO, AttentionKind.BUDGET_SHORT),
}


def _budget_items(budgets: Iterable[BudgetStatus]) -> Iterator[AttentionItem]:
    for one in budgets:
        problem = find_budget_problem(one)
        if problem is None:
            continue
        limit = format_power(one.budget.limit_w)
        what = {
            BudgetProblem.OVER: f"{format_power(one.measured_w or 0.0)} is measured of {limit}: {format_power(one.over_w)} over.",
            BudgetProblem.SHORT: f"{format_power(one.shortfall_w)} more than {limit} is needed for objectives and lost nodes.",
            BudgetProblem.NEARLY_CLAIMED: f"{format_power(one.claimed_w)} of {limit} is claimed: new work will wait for power.",
            BudgetProblem.NEARLY_DRAWN: f"{format_power(one.measured_w or 0.0)} of {limit} is measured.",
        }[problem]
        severity, kind = _BUDGET_ITEMS[problem]
        subject = f"{one.budget.scope.name.lower()} {one.budget.name}".strip()
        yield _item(severity, kind, f"budget of {subject}", what, "eelctl promises")


def _is_broken(one: ServiceStatus | JobStatus, state: ClusterState) -> bool:
    if isinstance(one, ServiceStatus):
        return is_late(one)
    workload = state.workloads.get(one.workload_id)
    promise = workload.spec.training if workload else None
    most = promise.slowdown_most if promise else None
    return most is not None and one.slowdown is not None and one.slowdown > most


def count_promises(found: ListPromisesResponse, state: ClusterState) -> PromiseOverview:
    """Counts how services and jobs keep their objectives."""
    counts: Counter[str] = Counter()
    every: list[ServiceStatus | JobStatus] = [*found.services, *found.jobs]
    for one in every:
        if _is_broken(one, state):
            counts["broken"] += 1
        elif is_uncontrolled(one):
            counts["at_risk"] += 1
        elif isinstance(one, ServiceStatus) and one.load_target is not None:
            continue
        elif (one.live_s if isinstance(one, ServiceStatus) else one.slowdown) is None:
            counts["unknown"] += 1
        else:
            counts["kept"] += 1
    return PromiseOverview(**counts)


def _promise_items(found: ListPromisesResponse, state: ClusterState) -> Iterator[AttentionItem]:
    every: list[ServiceStatus | JobStatus] = [*found.services, *found.jobs]
    for one in every:
        title = one.name or one.workload_id
        if _is_broken(one, state):
            what = (
                f"{title} answers in {one.live_s or 0.0:.3g} s, and its objective is {one.objective_s:.3g} s."
                if isinstance(one, ServiceStatus)
                else f"{title} is slowed down by {100.0 * (one.slowdown or 0.0):.1f} %, more than promised."
            )
            yield _item(_CRITICAL, AttentionKind.BROKEN_PROMISE, one.workload_id, what, "eelctl promises")
        elif is_uncontrolled(one):
            what = f"{title} is not controlled: {one.reason.partition(';')[0]}."
            yield _item(_WARNING, AttentionKind.UNCONTROLLED_PROMISE, one.workload_id, what, "eelctl promises")


def _spending_items(found: Iterable[SpendingStatus], state: ClusterState) -> Iterator[AttentionItem]:
    currency = state.policy.prices.currency if state.policy.prices else ""
    for one in found:
        limit = one.limit
        if one.spent is None or limit.most <= 0.0:
            continue
        is_over = one.over_since_ns > 0 or one.spent >= limit.most
        if not is_over and one.spent < warn_ratio_of(limit) * limit.most:
            continue
        amount = f"{format_amount(limit.quantity, one.spent)} of {format_amount(limit.quantity, limit.most)}"
        waits = f"; {_count(one.waiting, 'workload')} wait for it" if one.waiting else ""
        yield _item(
            _WARNING if is_over else _INFO,
            AttentionKind.SPENDING_OVER if is_over else AttentionKind.SPENDING_NEAR,
            describe_subject(limit),
            f"{amount} {describe_unit(limit.quantity, currency)} per {limit.period.name.lower()} is spent{waits}.",
            "eelctl spending",
            since_ns=one.over_since_ns,
        )


def _disk_items(inputs: OverviewInputs) -> Iterator[AttentionItem]:
    if inputs.journal_problem:
        yield _item(_CRITICAL, AttentionKind.JOURNAL, "journal", inputs.journal_problem, "eelctl doctor")
    if inputs.ledger_problem:
        yield _item(_WARNING, AttentionKind.LEDGER, "energy ledger", inputs.ledger_problem, "eelctl doctor")
