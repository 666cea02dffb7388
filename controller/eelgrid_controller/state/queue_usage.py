"""What queues use: the resources that each running workload is charged with, and the past use of queues and users.

Changed by events only. A workload is charged to the queue that it names if that is declared, else to the queue `default`;
without either it is charged to none. A replica on whole GPUs or a share is charged with them in thousandths, one in a MIG
slice with the larger of the slice's shares of the GPU's compute and memory slices; GPUs count under `gpu` and under
`gpu/MODEL`. A share whose limit on interference closes its GPU to all others is charged with the whole GPU. Of power it is
charged with the default limits of its GPUs, in milliwatts, of a share its part: what they may draw whatever limit is set
later, so that a charge depends on nothing but the placement and the policy, and what is released is what was charged. What
an engine or the partition planner started counts as everything else, whatever the quota.

Theory of the past use. With the half-life h, use at the rate r from a to b weighs at the time t

    r h / ln 2 (2^(-(t - b)/h) - 2^(-(t - a)/h)),

in resource-seconds, so that a sum is advanced in closed form whenever its rate changes: reading it more often changes
nothing, and a restart neither. An admission is charged with its first minute at once, so that work that is shorter than
the time between two decisions is not free: the r h / ln 2 (1 - 2^(-60/h)) of a minute's run that has just ended.
"""

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from eelgrid_controller.state.interference import count_held_milli, list_limit_settings
from eelgrid_controller.state.mig_layouts import compute_share_milli, find_mig_geometry
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import cache_by_identity
from eelgrid_controller.state.spending import SpendingDimension, subject_name
from eelgrid_protos.messages import (
    DEFAULT_QUEUE,
    MODEL_PREFIX,
    POWER_RESOURCE,
    QUEUE_RESOURCES,
    Gpu,
    Placement,
    Policy,
    Queue,
    SpendingScope,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

ADMISSION_CHARGE_S = 60.0
_NS = 1e9
_LN2 = math.log(2.0)
# Of a GPU that reports no limit: a V100, the middle of the data-centre boards.
_UNKNOWN_LIMIT_W = 300.0
# Past use is kept for each user of a queue. From here on, at each power of two, negligible entries are dropped.
_PRUNED_FROM = 1 << 17
_NEGLIGIBLE = 1.0
_USER = SpendingDimension(SpendingScope.USER)

# By the order of QUEUE_RESOURCES.
ResourceVector = tuple[float, ...]
_NOTHING: ResourceVector = (0,) * len(QUEUE_RESOURCES)


@cache_by_identity
def list_leaf_queues(queues: tuple[Queue, ...]) -> Mapping[str, Queue]:
    """Returns the queues that hold work, by name: those without others below them."""
    parents = {queue.parent for queue in queues}
    return {queue.name: queue for queue in queues if queue.name not in parents}


@cache_by_identity
def _names(queues: tuple[Queue, ...]) -> frozenset[str]:
    return frozenset(queue.name for queue in queues)


def resolve_queue(queues: tuple[Queue, ...], name: str) -> str | None:
    """Returns the queue that work of a queue's name belongs to; None if there is none."""
    names = _names(queues)
    return name if name in names else DEFAULT_QUEUE if DEFAULT_QUEUE in names else None


def qualify_queue(queues: tuple[Queue, ...], name: str, namespace: str) -> str:
    """Returns the queue NAMESPACE/NAME where it holds work, else the name: queues of Kueue have names by namespace."""
    own = f"{namespace}/{name}"
    return own if namespace and name and own in list_leaf_queues(queues) else name


def resolve_user(workload: Workload) -> str:
    """Returns the user that a workload is charged to: that of the certificate, else the one that it names."""
    return workload.owner or subject_name(workload.spec, _USER)


def count_request(spec: WorkloadSpec) -> dict[str, int]:
    """Returns what all replicas of a request ask for, GPUs of any model."""
    return _count_replicas(spec, spec.request.gpu_milli)


def count_charge(policy: Policy, spec: WorkloadSpec) -> dict[str, int]:
    """Returns what all replicas of a request are charged with, GPUs of any model."""
    return _count_replicas(spec, count_held_milli(policy, spec))


def _count_replicas(spec: WorkloadSpec, milli: int) -> dict[str, int]:
    request = spec.request
    amounts = (request.gpu_count * milli, request.cpu_milli, request.memory_bytes)
    return {
        resource: spec.replicas * amount for resource, amount in zip(QUEUE_RESOURCES, amounts, strict=True) if amount
    }


def count_milliwatts(gpu: Gpu) -> int:
    """Returns what a whole GPU is charged with: its default limit, else its largest, rounded up."""
    return math.ceil(1000.0 * (gpu.power_limit_default_w or gpu.power_limit_max_w or _UNKNOWN_LIMIT_W))


def scale_milliwatts(milliwatts: int, milli: int) -> int:
    """Returns what thousandths of a GPU are charged with, rounded up."""
    return -(-milliwatts * milli // GPU_MILLI_WHOLE)


def _slice_milli(gpu: Gpu, placement: Placement) -> int:
    """The larger of a slice's shares of compute and memory slices, rounded up, in thousandths."""
    held = placement.gpu_instance
    geometry = find_mig_geometry(gpu)
    if held is None or geometry is None or not held.profile:
        return GPU_MILLI_WHOLE
    profile = geometry.profile(held.profile)
    if profile is None:
        return held.gpu_milli
    memory_milli = -(-GPU_MILLI_WHOLE * profile.size // geometry.memory_slices)
    return max(compute_share_milli(geometry, profile), memory_milli)


def count_placed(policy: Policy, workload: Workload, nodes: Mapping[str, NodeRecord]) -> dict[str, int]:
    """Returns what a placed workload is charged with, by resource."""
    request, found = workload.spec.request, dict[str, int]()
    held_milli = count_held_milli(policy, workload.spec)

    def add(resource: str, amount: int) -> None:
        if amount:
            found[resource] = found.get(resource, 0) + amount

    for placement in workload.placements:
        add("cpu", request.cpu_milli)
        add("memory", request.memory_bytes)
        record = nodes.get(placement.node_name)
        for uuid in placement.gpu_uuids:
            gpu = None if record is None else record.gpu(uuid)
            is_whole = placement.gpu_instance is None
            milli = held_milli if is_whole else GPU_MILLI_WHOLE if gpu is None else _slice_milli(gpu, placement)
            add("gpu", milli)
            if gpu is not None:
                add(MODEL_PREFIX + gpu.model, milli)
                add(POWER_RESOURCE, scale_milliwatts(count_milliwatts(gpu), milli))
    return found


def count_spent_milli(policy: Policy, workload: Workload) -> int:
    """Returns the thousandths of GPUs whose time a workload is charged with, or was when it ended."""
    if workload.phase is WorkloadPhase.PENDING:
        return 0
    own = workload.spec.request.gpu_count * count_held_milli(policy, workload.spec)
    return sum(own if item.gpu_instance is None else item.gpu_instance.gpu_milli for item in workload.placements)


class QueueCharge(NamedTuple):
    """What a running workload is charged with, and to whom."""

    queue: str
    user: str
    amounts: Mapping[str, int]

    @property
    def rates(self) -> ResourceVector:
        """The amounts of the resources of which past use is kept."""
        return tuple(self.amounts.get(resource, 0) for resource in QUEUE_RESOURCES)


@dataclass(frozen=True, slots=True)
class DecayedUsage:
    """Use over time, each second of it halved by every half-life that has passed since; in resource-seconds."""

    at_ns: int
    total: ResourceVector = _NOTHING
    rate: ResourceVector = _NOTHING

    def compute_left(self, now_ns: int, half_life_s: float) -> float:
        """Returns which part of the use until the last change is left at a moment."""
        return float(2.0 ** (-max(0, now_ns - self.at_ns) / _NS / half_life_s))

    def at(self, now_ns: int, half_life_s: float) -> ResourceVector:
        """Returns the use as of a moment; a moment before the last change counts as that one."""
        left = self.compute_left(now_ns, half_life_s)
        whole = half_life_s / _LN2 * (1.0 - left)
        return tuple(total * left + rate * whole for total, rate in zip(self.total, self.rate, strict=True))

    def change(self, now_ns: int, half_life_s: float, more: ResourceVector, *, charges: bool) -> "DecayedUsage":
        """Returns the use with a rate that changes by `more` now; `charges` those that rise for their first minute."""
        charge = half_life_s / _LN2 * (1.0 - 2.0 ** (-ADMISSION_CHARGE_S / half_life_s)) if charges else 0.0
        total = self.at(now_ns, half_life_s)
        return DecayedUsage(
            max(now_ns, self.at_ns),
            tuple(one + charge * max(0.0, rise) for one, rise in zip(total, more, strict=True)),
            tuple(one + rise for one, rise in zip(self.rate, more, strict=True)),
        )


class QueueUsageState:
    """The part of the state that tracks what queues use; empty while the policy declares none."""

    def __init__(self) -> None:
        self.charges: dict[str, QueueCharge] = {}
        # By queue and user.
        self.history: dict[tuple[str, str], DecayedUsage] = {}

    def update_charges(
        self,
        policy: Policy,
        workload_ids: Iterable[str],
        workloads: Mapping[str, Workload],
        nodes: Mapping[str, NodeRecord],
        now_ns: int,
    ) -> None:
        """Updates what these workloads are charged with after an event."""
        for workload_id in workload_ids if policy.queues else ():
            workload = workloads.get(workload_id)
            charge = None if workload is None else _charge_workload(policy, workload, nodes)
            self._set_charge(policy, workload_id, charge, now_ns, charges=True)

    def _set_charge(
        self, policy: Policy, workload_id: str, charge: QueueCharge | None, now_ns: int, *, charges: bool
    ) -> None:
        before = self.charges.pop(workload_id, None)
        if charge is not None:
            self.charges[workload_id] = charge
        changes: dict[tuple[str, str], ResourceVector] = {}
        for one, sign in ((before, -1), (charge, 1)):
            if one is not None:
                known = changes.get((one.queue, one.user), _NOTHING)
                changes[one.queue, one.user] = tuple(a + sign * b for a, b in zip(known, one.rates, strict=True))
        for key, more in changes.items():
            if any(more):
                history = self.history.get(key) or DecayedUsage(now_ns)
                self.history[key] = history.change(now_ns, policy.queue_half_life_s, more, charges=charges)
                self._prune(policy, now_ns)

    def _prune(self, policy: Policy, now_ns: int) -> None:
        count = len(self.history)
        if count < _PRUNED_FROM or count & (count - 1):
            return
        self.history = {
            key: one
            for key, one in self.history.items()
            if any(one.rate) or max(one.at(now_ns, policy.queue_half_life_s)) > _NEGLIGIBLE
        }

    def set_policy(
        self,
        before: Policy,
        policy: Policy,
        workloads: Mapping[str, Workload],
        nodes: Mapping[str, NodeRecord],
        now_ns: int,
    ) -> None:
        """Puts other queues, another half-life or other limits on interference in force; no first minute is charged again."""
        if _list_settings(policy) == _list_settings(before):
            return
        names = _names(policy.queues)
        self.history = {
            key: one.change(now_ns, before.queue_half_life_s, _NOTHING, charges=False)
            for key, one in self.history.items()
            if key[0] in names
        }
        self.charges = {key: one for key, one in self.charges.items() if one.queue in names}
        for workload_id, workload in workloads.items() if policy.queues else ():
            if workload.phase is WorkloadPhase.PLACED:
                charge = _charge_workload(policy, workload, nodes)
                self._set_charge(policy, workload_id, charge, now_ns, charges=False)

    def copy(self) -> Self:
        """Returns an independent copy; charges and sums are values."""
        twin: Self = copy(self)
        twin.charges, twin.history = self.charges.copy(), self.history.copy()
        return twin

    def dump(self) -> list[Any]:
        """Dumps the past use for a checkpoint; charges and rates follow from the placements."""
        return [[*key, one.at_ns, *one.total] for key, one in sorted(self.history.items())]

    @classmethod
    def load(
        cls, plain: Iterable[Any], policy: Policy, workloads: Mapping[str, Workload], nodes: Mapping[str, NodeRecord]
    ) -> Self:
        """Loads this part from a checkpoint."""
        found = cls()
        for queue, user, at_ns, *total in plain:
            found.history[queue, user] = DecayedUsage(at_ns, tuple(total))
        for workload_id, workload in workloads.items() if policy.queues else ():
            charge = _charge_workload(policy, workload, nodes)
            if charge is None:
                continue
            found.charges[workload_id] = charge
            key = charge.queue, charge.user
            history = found.history.get(key) or DecayedUsage(workload.placed_ns)
            rate = tuple(a + b for a, b in zip(history.rate, charge.rates, strict=True))
            found.history[key] = replace(history, rate=rate)
        return found


def _list_settings(policy: Policy) -> tuple[object, ...]:
    """Returns the settings from which charges and past use follow."""
    return policy.queues, policy.queue_half_life_s, *list_limit_settings(policy)


def _charge_workload(policy: Policy, workload: Workload, nodes: Mapping[str, NodeRecord]) -> QueueCharge | None:
    """Returns the charge of a workload; None if it does not run, or belongs to no queue."""
    queue = resolve_queue(policy.queues, workload.spec.queue)
    if workload.phase is not WorkloadPhase.PLACED or queue is None:
        return None
    return QueueCharge(queue, resolve_user(workload), count_placed(policy, workload, nodes))
