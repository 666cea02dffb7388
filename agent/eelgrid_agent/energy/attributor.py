"""Energy attribution of one node: observations in; shares, account totals and anomalies out. Pure.

A device's energy is the sampler's total, which never falls, in whole millijoules. An interval runs from one
observation with a total to the next; observations without a total only add what they saw. What was counted before the
first observation is unattributed. At every observation and for every device, all accounts add up to the device's total
to the millijoule: over processes and layouts that come and go, missing readings and meters that restart.

A process that cannot be inspected (no host process ids, or it died before it was seen) is attributed to those whom its
device is allocated to: to the only one, or to each of several by its shares, as bare idle power is. It stays theirs while
it runs after they have ended, until the device is allocated anew. A workload of the plan is a second name of whoever
holds or uses its device. A Ray worker inside a workload (a raylet that is a job of the queue) is the workload's, and
keeps the name of its Ray job.

Bare idle power is the lowest mean power over an interval in which no context was open and nothing was busy. It is never
learnt under load, nor in the first seconds of quiet while clocks fall; until then the catalogue's value is used, with
MIG on or off. The context step is the lowest mean power with contexts open and nothing busy, less bare idle. Its prior
is the middle of the values measured on HBM parts (26 to 50 W on A100 and H100) and 66 W on the L40S (arXiv 2605.23918);
for other parts nothing is published, so context idle is zero until it was measured. A minimum is kept for each MIG
mode, since MIG alone changes what an empty board draws.

Where the kubelet's log folder is not mounted, pod UIDs are joined to pod names by their devices: where exactly one pod
was given all devices on which a UID has contexts, and no other UID fits that pod, the two are one. Two pods that share
one device stay nameless. An inferred name is dropped as soon as it no longer fits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain, islice

from eelgrid_agent.devices.port import GpuProcess, InstanceReadings, Missing
from eelgrid_agent.energy.accounts import (
    UNATTRIBUTED,
    EnergyAccount,
    EnergyAccounts,
    EnergyShare,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    UsageOwnerKind,
)
from eelgrid_agent.energy.allocations import AllocationSource, DeviceAllocation, select_innermost
from eelgrid_agent.energy.anomalies import ACTIVE_RATIO, AnomalyDetector, OngoingAnomaly
from eelgrid_agent.energy.metering import UncertainEnergy
from eelgrid_agent.energy.process_owners import ProcessOwner
from eelgrid_agent.energy.split import (
    ContextHolder,
    DeviceClaim,
    DeviceObservation,
    IdlePower,
    SliceActivity,
    split_energy,
)
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.catalogue.products import Product
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, Gpu, Reading
from eelgrid_protos.values import dataclass

# Quiet before this is the fall of clocks and the sensor's memory of work.
SETTLED_S = 10.0
# A shorter interval holds too few counter refreshes.
INTERVAL_S_LEAST = 1.0
# Above what any part was seen to add: more than this is work that no reading shows.
CONTEXT_STEP_W_MOST = 150.0
# No board with its memory on draws less.
BARE_W_LEAST = 1.0

_HBM_CAPABILITIES = frozenset({"8.0", "9.0", "10.0", "10.3"})
_HBM_STEP_W = 38.0
_STEPS_W = {"l40s": 66.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mode:
    """What was learnt in one MIG mode."""

    bare_w: float | None = None
    parked_w: float | None = None


def build_idle_prior(product: Product | None, *, mig_enabled: bool) -> IdlePower:
    """Returns the idle power that is assumed for a part before it was seen idle."""
    if product is None:
        return IdlePower(bare_w=0.0, context_w=0.0, confidence=ShareConfidence.LOW)
    bare_w = product.idle_w
    if mig_enabled and product.idle_mig_w is not None:
        bare_w = product.idle_mig_w
    step_w = _STEPS_W.get(product.key, _HBM_STEP_W if product.compute_capability in _HBM_CAPABILITIES else 0.0)
    return IdlePower(
        bare_w=bare_w, context_w=step_w, confidence=ShareConfidence.MEDIUM if step_w else ShareConfidence.LOW
    )


class IdlePowerModel:
    """One device."""

    __slots__ = ("_modes", "_parked_s", "_quiet_s")

    def __init__(self) -> None:
        self._modes = {False: _Mode(), True: _Mode()}
        self._quiet_s = 0.0
        self._parked_s = 0.0

    def observe(
        self, *, power_w: float, seconds: float, contexts: bool | None, busy: bool | None, mig_enabled: bool
    ) -> None:
        """Learns from the mean power of an interval; `contexts` and `busy` are None where they are unknown."""
        self._quiet_s = self._quiet_s + seconds if contexts is False and busy is False else 0.0
        self._parked_s = self._parked_s + seconds if contexts is True and busy is False else 0.0
        if seconds < INTERVAL_S_LEAST or power_w < BARE_W_LEAST:
            return
        mode = self._modes[mig_enabled]
        # What the interval itself lasted does not count: it may have begun with the fall.
        if self._quiet_s - seconds >= SETTLED_S:
            lowest = power_w if mode.bare_w is None else min(mode.bare_w, power_w)
            self._modes[mig_enabled] = replace(mode, bare_w=lowest)
        elif self._parked_s - seconds >= SETTLED_S:
            lowest = power_w if mode.parked_w is None else min(mode.parked_w, power_w)
            self._modes[mig_enabled] = replace(mode, parked_w=lowest)

    def estimate_idle(self, product: Product | None, *, mig_enabled: bool) -> IdlePower:
        """The learnt idle power, else the assumed one."""
        prior = build_idle_prior(product, mig_enabled=mig_enabled)
        mode = self._modes[mig_enabled]
        bare_w = prior.bare_w if mode.bare_w is None else mode.bare_w
        context_w, confidence = prior.context_w, prior.confidence
        if mode.parked_w is not None and bare_w > 0.0:
            context_w = min(max(0.0, mode.parked_w - bare_w), CONTEXT_STEP_W_MOST)
            confidence = ShareConfidence.HIGH if mode.bare_w is not None else ShareConfidence.MEDIUM
        elif mode.bare_w is not None:
            confidence = ShareConfidence.MEDIUM
        return IdlePower(bare_w=bare_w, context_w=context_w, confidence=confidence)


UIDS_MOST = 1024

_Pod = tuple[str, str]


class PodNameJoin:
    """Names by pod UID."""

    def __init__(self) -> None:
        self._names: dict[str, _Pod] = {}
        self._containers: dict[str, str] = {}

    def observe(self, glances: Mapping[str, DeviceObservation]) -> None:
        """Looks at all devices of one moment."""
        fitting: dict[str, set[_Pod]] = {}
        containers: dict[str, set[str]] = {}
        for glance in glances.values():
            for holder in glance.holders or ():
                owner = holder.owner
                if owner.kind is not UsageOwnerKind.POD or owner.pod or not owner.pod_uid:
                    continue
                here = [one.owner for one in glance.claims if one.gpu_instance_id in (None, holder.gpu_instance_id)]
                pods = {(one.namespace, one.pod) for one in here if one.pod}
                fitting[owner.pod_uid] = fitting.get(owner.pod_uid, pods) & pods
                if owner.container_id:
                    containers.setdefault(owner.container_id, set()).update(one.container for one in here if one.pod)
        self._assign_names(fitting)
        for container_id, names in containers.items():
            if len(names) == 1:
                self._containers[container_id] = names.pop()
            else:
                self._containers.pop(container_id, None)
        for kept in (self._names, self._containers):
            for old in list(kept)[: max(0, len(kept) - UIDS_MOST)]:
                del kept[old]

    def resolve_name(self, owner: UsageOwner) -> UsageOwner:
        """The owner with its name, where that is known."""
        name = self._names.get(owner.pod_uid) if owner.kind is UsageOwnerKind.POD and not owner.pod else None
        if name is None:
            return owner
        container = self._containers.get(owner.container_id, "")
        return replace(owner, namespace=name[0], pod=name[1], container=container)

    def _assign_names(self, fitting: Mapping[str, set[_Pod]]) -> None:
        for uid, pods in fitting.items():
            known = self._names.get(uid)
            if known is not None and known not in pods:
                # It holds a place that the pod was not given, or the place was given to another.
                del self._names[uid]
            if len(pods) == 1 and _alone(uid, pods, fitting):
                (pod,) = pods
                # A pod that was made anew under its name takes it over.
                self._names = {other: name for other, name in self._names.items() if name != pod}
                self._names[uid] = pod


def _alone(uid: str, pods: Iterable[_Pod], fitting: Mapping[str, set[_Pod]]) -> bool:
    (pod,) = pods
    return not any(pod in others for other, others in fitting.items() if other != uid)


# Looks of one interval; beyond, the oldest in between goes.
OBSERVATIONS_MOST = 64
# Devices present and departed whose totals are kept, as the sampler keeps them.
DEVICES_MOST = 2 * GPUS_PER_NODE_MOST
PROCESSES_MOST = 1024
# Contexts of one device, where each that cannot be inspected counts once for everyone who shares the device.
_HOLDERS_MOST = 4 * PROCESSES_MOST
# No sampler's total goes beyond; see READING_RANGES.
_ENERGY_J_MOST = 1e14


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInput:
    """One device: the sampler's total, its mean utilization since the last observation, and its extended readings.

    None stands for an unavailable value.
    """

    gpu: Gpu
    energy_j: float | None
    utilization: float | None = None
    estimate: UncertainEnergy | None = None
    # The highest that was enforced since the look before.
    limit_w: float | None = None
    instances: tuple[InstanceReadings, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionInput:
    """All inputs of one moment; `allocations` is None where no source of them could be read."""

    monotonic_ns: int
    wall_ns: int
    devices: tuple[DeviceInput, ...]
    owners: Mapping[int, ProcessOwner] = field(default_factory=dict)
    allocations: tuple[DeviceAllocation, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Energy by owner.

    `shares` are of the interval that ended with this observation, by device. `accounts` hold, in millijoules since the
    agent started to count, what belongs to owners, and `nobody` the rest: by device, the node's own idle power
    (unallocated), what could not be named (unattributed), what drained owners were charged (ended) and what owners
    beyond the bound were charged (other). The two add up to the device. `elapsed_s` is the length of those intervals.
    """

    shares: Mapping[str, tuple[EnergyShare, ...]]
    accounts: Mapping[EnergyAccount, int]
    nobody: Mapping[str, Mapping[str, int]]
    estimates: Mapping[str, UncertainEnergy]
    anomalies: tuple[OngoingAnomaly, ...]
    elapsed_s: Mapping[str, float] = field(default_factory=dict)


class _Meter:
    """One device between looks."""

    __slots__ = ("elapsed_s", "energy_mj", "glances", "idle", "seen")

    def __init__(self) -> None:
        self.energy_mj = 0
        self.glances: list[DeviceObservation] = []
        self.idle = IdlePowerModel()
        self.seen = False
        # Of the interval that was closed last.
        self.elapsed_s = 0.0


class Attributor:
    """One node."""

    def __init__(self, catalogue: Catalogue, *, watch: AnomalyDetector | None = None) -> None:
        self._catalogue = catalogue
        self._watch = watch or AnomalyDetector()
        self._ledger = EnergyAccounts()
        self._join = PodNameJoin()
        self._meters: dict[str, _Meter] = {}

    def total_mj(self, gpu_uuid: str) -> int:
        """Everything that was attributed of one device, with and without an owner."""
        return self._ledger.total_mj(gpu_uuid)

    def observe(self, look: AttributionInput) -> Attribution:
        """Closes an interval of every device whose energy is known, and returns all shares and totals."""
        claims = select_innermost(look.allocations or ())
        glances = {one.gpu.uuid: self._observation(one, look, claims) for one in look.devices}
        self._join.observe(glances)
        for uuid, glance in glances.items():
            self._meters.setdefault(uuid, _Meter()).glances.append(_name_holders(glance, self._join))
        self._expire_meters(frozenset(glances))
        self._ledger.drain_ended(self._chargeable(), now_ns=look.monotonic_ns)
        shares = {}
        for device in look.devices:
            uuid = device.gpu.uuid
            shares[uuid] = self._close_interval(device, look)
            self._ledger.add(uuid, shares[uuid])
        accounts, nobody = self._sorted_accounts()
        return Attribution(
            shares=shares,
            accounts=accounts,
            nobody=nobody,
            estimates={one.gpu.uuid: one.estimate for one in look.devices if one.estimate is not None},
            anomalies=self._watch.list_anomalies(),
            elapsed_s={uuid: self._meters[uuid].elapsed_s for uuid in glances},
        )

    def _chargeable(self) -> Iterator[UsageOwner]:
        """Everyone whom an interval that is not closed yet may charge."""
        for meter in self._meters.values():
            for glance in meter.glances:
                yield from (claim.owner for claim in glance.claims)
                yield from (holder.owner for holder in glance.holders or ())

    def _close_interval(self, device: DeviceInput, look: AttributionInput) -> tuple[EnergyShare, ...]:
        """Closes the device's interval with its newest glance, if its total is known."""
        gpu, product = device.gpu, self._catalogue.products.get(device.gpu.catalogue_key)
        meter = self._meters[gpu.uuid]
        meter.elapsed_s = 0.0
        energy_j = device.energy_j
        if energy_j is None or not 0.0 <= energy_j <= _ENERGY_J_MOST:
            if len(meter.glances) > OBSERVATIONS_MOST:
                del meter.glances[1]
            return ()
        energy_mj = round(1000.0 * energy_j)
        # A total below the last is another meter's, which began at zero.
        fresh = not meter.seen or energy_mj < meter.energy_mj
        spent_mj = energy_mj - (0 if fresh else meter.energy_mj)
        glances, meter.glances = meter.glances, meter.glances[-1:]
        meter.energy_mj, meter.seen = energy_mj, True
        glance = glances[-1]
        mean_w = None
        if fresh or len(glances) < 2:
            shares = _unseen(spent_mj)
        else:
            seconds = meter.elapsed_s = (glance.monotonic_ns - glances[0].monotonic_ns) / 1e9
            if seconds > 0.0:
                mean_w = spent_mj / 1000.0 / seconds
                meter.idle.observe(
                    power_w=mean_w,
                    seconds=seconds,
                    contexts=_contexts(glances),
                    busy=_busy(glances),
                    mig_enabled=gpu.mig_enabled,
                )
            shares = split_energy(spent_mj, glances, meter.idle.estimate_idle(product, mig_enabled=gpu.mig_enabled))
        self._watch.observe(
            gpu.uuid,
            glance,
            shares=shares,
            allocations_known=look.allocations is not None,
            wall_ns=look.wall_ns,
            mean_power_w=mean_w,
            busy_w=_busy_w(device, product),
            idle=meter.idle.estimate_idle(product, mig_enabled=gpu.mig_enabled),
        )
        return shares

    def _observation(
        self, device: DeviceInput, look: AttributionInput, allocations: Iterable[DeviceAllocation]
    ) -> DeviceObservation:
        gpu = device.gpu
        planned = _list_planned(gpu.uuid, look.allocations or ())
        workloads = {place: min(names) for place, names in planned.items() if len(names) == 1}
        claims = tuple(
            DeviceClaim(
                owner=_of_workload(one.owner, one.place.gpu_instance_id, workloads),
                gpu_instance_id=one.place.gpu_instance_id,
                shares=max(1, one.shares),
            )
            for one in allocations
            if one.place.gpu_uuid == gpu.uuid
        )
        holders = None
        if device.processes is not None:
            meter = self._meters.get(gpu.uuid)
            earlier = meter.glances[-1].holders or () if meter is not None and meter.glances else ()
            found = (
                _holders(process, look.owners, claims, workloads, planned, earlier=earlier)
                for process in device.processes[:PROCESSES_MOST]
            )
            holders = tuple(islice(chain.from_iterable(found), _HOLDERS_MOST))
        return DeviceObservation(
            monotonic_ns=look.monotonic_ns,
            slices=self._slices(device),
            holders=holders,
            claims=claims,
            utilization=_ratio(device.utilization),
        )

    def _slices(self, device: DeviceInput) -> tuple[SliceActivity, ...]:
        """The whole device, or its GPU instances by their share of the SMs."""
        gpu = device.gpu
        if not gpu.mig_enabled:
            return (SliceActivity(),)
        product = self._catalogue.products.get(gpu.catalogue_key)
        geometry = None if product is None else product.mig
        readings = {one.gpu_instance_id: one.values for one in device.instances}
        found = []
        for instance in gpu.gpu_instances:
            # Where nobody has counted the SMs, memory slices stand in for them; all MIG parts but the smallest have 8.
            fraction = instance.size / (geometry.memory_slices if geometry else 8)
            profile = None if geometry is None else geometry.profile_by_id(instance.profile_id)
            if geometry is not None and profile is not None:
                fraction = profile.compute_slices / geometry.compute_slices
                if profile.sm_count and geometry.sm_total:
                    fraction = profile.sm_count / geometry.sm_total
            values = readings.get(instance.id, {})
            activity = values.get(Reading.SM_ACTIVITY_RATIO)
            if activity is None or isinstance(activity, Missing):
                activity = values.get(Reading.GRAPHICS_ACTIVITY_RATIO)
            told = None if activity is None or isinstance(activity, Missing) else _ratio(activity)
            found.append(SliceActivity(gpu_instance_id=instance.id, sm_fraction=min(1.0, fraction), activity=told))
        return tuple(found)

    def _sorted_accounts(self) -> tuple[Mapping[EnergyAccount, int], Mapping[str, Mapping[str, int]]]:
        owned: dict[EnergyAccount, int] = {}
        nobody: dict[str, dict[str, int]] = {uuid: {} for uuid in self._meters}
        for account, energy_mj in self._ledger.rows().items():
            if account.owner.kind is UsageOwnerKind.UNALLOCATED:
                name = "unallocated"
            elif account.owner.kind is UsageOwnerKind.UNATTRIBUTED:
                name = "unattributed"
            else:
                owned[account] = energy_mj
                continue
            parts = nobody.setdefault(account.gpu_uuid, {})
            parts[name] = parts.get(name, 0) + energy_mj
        for name, remainders in (("ended", self._ledger.drained_mj), ("other", self._ledger.other_mj)):
            for uuid, energy_mj in remainders.items():
                nobody.setdefault(uuid, {})[name] = energy_mj
        return owned, nobody

    def _expire_meters(self, present: frozenset[str]) -> None:
        """A device that left keeps its meter within a bound; what was attributed of it stays in the ledger."""
        self._watch.forget_gpus(present)
        gone = [uuid for uuid in self._meters if uuid not in present]
        for uuid in gone[: max(0, len(self._meters) - DEVICES_MOST)]:
            del self._meters[uuid]


def _list_planned(gpu_uuid: str, allocations: Iterable[DeviceAllocation]) -> Mapping[int | None, set[str]]:
    """By place, the workloads that the plan puts there, whoever else speaks of the device."""
    found: dict[int | None, set[str]] = {}
    for one in allocations:
        if one.source is AllocationSource.PLAN and one.place.gpu_uuid == gpu_uuid:
            found.setdefault(one.place.gpu_instance_id, set()).add(one.owner.workload)
    return found


def _of_workload(owner: UsageOwner, place: int | None, workloads: Mapping[int | None, str]) -> UsageOwner:
    workload = workloads.get(place, workloads.get(None, ""))
    return owner if owner.workload or not workload else replace(owner, workload=workload)


def _holders(
    process: GpuProcess,
    owners: Mapping[int, ProcessOwner],
    claims: Iterable[DeviceClaim],
    workloads: Mapping[int | None, str],
    planned: Mapping[int | None, set[str]],
    *,
    earlier: Iterable[ContextHolder],
) -> Iterable[ContextHolder]:
    """The context of a process: one holder, or one for each who shares the device where the process is hidden.

    `earlier` are the holders of the look before.
    """
    place = process.gpu_instance_id
    nobody = UsageOwner(kind=UsageOwnerKind.PROCESS, pid=process.pid)
    found = owners.get(process.pid) or ProcessOwner(nobody, hidden=True)
    owner = found.owner
    if not found.hidden and found.workload in planned.get(place, planned.get(None, ())):
        owner = UsageOwner(
            kind=UsageOwnerKind.WORKLOAD, workload=found.workload, ray_job=owner.ray_job, pid=process.pid
        )
    holder = ContextHolder(
        owner=_of_workload(owner, place, workloads),
        pid=process.pid,
        gpu_instance_id=place,
        sm_ratio=_ratio(process.sm_ratio),
        mps_server=found.mps_server,
    )
    return (_infer_holders(holder, claims, workloads, earlier) if found.hidden else ()) or (holder,)


def _infer_holders(
    holder: ContextHolder,
    claims: Iterable[DeviceClaim],
    workloads: Mapping[int | None, str],
    earlier: Iterable[ContextHolder],
) -> Sequence[ContextHolder]:
    """A hidden process by whom its device is allocated to, else by whose it was; empty where neither is known."""
    place = holder.gpu_instance_id
    shares: dict[UsageOwner, int] = {}
    for claim in claims:
        if claim.gpu_instance_id in (None, place):
            owner = _of_workload(claim.owner, place, workloads)
            shares[owner] = shares.get(owner, 0) + claim.shares
    whole = sum(shares.values())
    portions = [(replace(owner, pid=holder.pid), many / whole) for owner, many in shares.items()] or [
        (one.owner, one.portion)
        for one in earlier
        if one.inferred and (one.pid, one.gpu_instance_id) == (holder.pid, place)
    ]
    return [replace(holder, owner=owner, inferred=True, portion=portion) for owner, portion in portions]


def _name_holders(glance: DeviceObservation, join: PodNameJoin) -> DeviceObservation:
    if glance.holders is None:
        return glance
    return replace(glance, holders=tuple(replace(one, owner=join.resolve_name(one.owner)) for one in glance.holders))


def _ratio(value: float | None) -> float | None:
    """Inside [0, 1], or nothing; a NaN is in no range."""
    return value if value is not None and 0.0 <= value <= 1.0 else None


def _contexts(glances: Iterable[DeviceObservation]) -> bool | None:
    """Whether contexts were open throughout (True), never (False), or neither is known."""
    seen = {None if one.holders is None else bool(one.holders) for one in glances}
    return seen.pop() if len(seen) == 1 else None


def _busy(glances: Iterable[DeviceObservation]) -> bool | None:
    """Whether anything worked; None where nothing tells."""
    told = [
        value
        for one in glances
        for value in (
            one.utilization,
            *(each.activity for each in one.slices),
            *(each.sm_ratio for each in one.holders or ()),
        )
        if value is not None
    ]
    return any(value > ACTIVE_RATIO for value in told) if told else None


def _unseen(energy_mj: int) -> tuple[EnergyShare, ...]:
    """What was spent before anybody looked."""
    if energy_mj == 0:
        return ()
    return (
        EnergyShare(
            owner=UNATTRIBUTED,
            part=EnergyUse.ACTIVE,
            energy_mj=energy_mj,
            method=ShareMethod.UNATTRIBUTED,
            confidence=ShareConfidence.LOW,
        ),
    )


def _busy_w(device: DeviceInput, product: Product | None) -> float | None:
    """What it draws at full power under the limit that is enforced: work that is held down by a limit is no stall."""
    full_w = device.gpu.power_limit_default_w or (product.busy_w if product else None)
    return full_w if device.limit_w is None or full_w is None else min(full_w, device.limit_w)
