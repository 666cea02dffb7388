"""One node's energy, attributed: looks in, shares, totals and anomalies out.

Owns the intervals of every device and what is carried from one to the next.
Must not know how anything was read, nor any clock.

Theory. A device's energy is the sampler's total, which never falls, in whole
millijoules. An interval runs from one look with a total to the next; looks
without one only add what they saw. What was counted before the first look is
nobody's that could be named. So, at every look and of every device, everything
in the ledger is the device's total, to the millijoule: over processes and
layouts that come and go, missing readings and meters that begin anew.

A process that may not be looked at (no host's process ids, or it died before
anybody looked) is taken to be of the only owner whom its place is allocated to.
A workload of our plan is a second name of whoever holds or uses its place.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from eelgrid_agent.attribution.allocation import Allocation, AllocationSource, believed
from eelgrid_agent.attribution.anomalies import ACTIVE_RATIO, Anomaly, AnomalyWatch
from eelgrid_agent.attribution.idle import IdleModel
from eelgrid_agent.attribution.ledger import Account, Ledger
from eelgrid_agent.attribution.name_join import NameJoin
from eelgrid_agent.attribution.owner import UNATTRIBUTED, Owner, OwnerKind
from eelgrid_agent.attribution.owners import ProcessOwner
from eelgrid_agent.attribution.shares import Confidence, Method, Part, Share
from eelgrid_agent.attribution.split import Claim, Glance, Holder, Slice, split
from eelgrid_agent.attribution.uncertainty import EnergyEstimate
from eelgrid_agent.device import GpuProcess, InstanceReadings, Missing
from eelgrid_protos.catalogue import Catalogue, Product
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, Gpu, Reading

__all__ = ["Attribution", "AttributionLook", "Attributor", "DeviceLook"]

# Looks of one interval; beyond, the oldest in between goes.
GLANCES_MOST = 64
# Devices present and departed whose totals are kept, as the sampler keeps them.
DEVICES_MOST = 2 * GPUS_PER_NODE_MOST
PROCESSES_MOST = 1024
# No sampler's total goes beyond; see READING_RANGES.
_ENERGY_J_MOST = 1e14


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLook:
    """One device: its total by the sampler, its utilization since the look before, and what a slow look said.

    None is what could not be had.
    """

    gpu: Gpu
    energy_j: float | None
    utilization: float | None = None
    estimate: EnergyEstimate | None = None
    # The highest that was enforced since the look before.
    limit_w: float | None = None
    instances: tuple[InstanceReadings, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionLook:
    """Everything about one moment; `allocations` is None where no source of them could be asked."""

    monotonic_ns: int
    wall_ns: int
    devices: tuple[DeviceLook, ...]
    owners: Mapping[int, ProcessOwner] = field(default_factory=dict)
    allocations: tuple[Allocation, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Who used what.

    `shares` are of the interval that ended with this look, by device. `accounts` hold, in millijoules since the agent
    began to count, what belongs to owners, and `nobody` what does not: by device, the node's own idle power
    (unallocated), what could not be named (unattributed), what owners that are kept no more were charged (ended) and
    what owners beyond the bound were (other). The two add up to the device. `elapsed_s` is how long those intervals
    were.
    """

    shares: Mapping[str, tuple[Share, ...]]
    accounts: Mapping[Account, int]
    nobody: Mapping[str, Mapping[str, int]]
    estimates: Mapping[str, EnergyEstimate]
    anomalies: tuple[Anomaly, ...]
    elapsed_s: Mapping[str, float] = field(default_factory=dict)


class _Meter:
    """One device between looks."""

    __slots__ = ("elapsed_s", "energy_mj", "glances", "idle", "seen")

    def __init__(self) -> None:
        self.energy_mj = 0
        self.glances: list[Glance] = []
        self.idle = IdleModel()
        self.seen = False
        # Of the interval that was closed last.
        self.elapsed_s = 0.0


class Attributor:
    """One node."""

    def __init__(self, catalogue: Catalogue, *, watch: AnomalyWatch | None = None) -> None:
        self._catalogue = catalogue
        self._watch = watch or AnomalyWatch()
        self._ledger = Ledger()
        self._join = NameJoin()
        self._meters: dict[str, _Meter] = {}

    def total_mj(self, gpu_uuid: str) -> int:
        """Everything that was attributed of one device, to owners and to nobody."""
        return self._ledger.total_mj(gpu_uuid)

    def observe(self, look: AttributionLook) -> Attribution:
        """Closes an interval of every device whose energy is known, and tells where all of it went so far."""
        claims = believed(look.allocations or ())
        glances = {one.gpu.uuid: self._glance(one, look, claims) for one in look.devices}
        self._join.observe(glances)
        for uuid, glance in glances.items():
            self._meters.setdefault(uuid, _Meter()).glances.append(_named(glance, self._join))
        self._forget(frozenset(glances))
        self._ledger.settle(self._chargeable(), now_ns=look.monotonic_ns)
        shares = {}
        for device in look.devices:
            uuid = device.gpu.uuid
            shares[uuid] = self._settle(device, look)
            self._ledger.add(uuid, shares[uuid])
        accounts, nobody = self._sorted_accounts()
        return Attribution(
            shares=shares,
            accounts=accounts,
            nobody=nobody,
            estimates={one.gpu.uuid: one.estimate for one in look.devices if one.estimate is not None},
            anomalies=self._watch.lasting(),
            elapsed_s={uuid: self._meters[uuid].elapsed_s for uuid in glances},
        )

    def _chargeable(self) -> Iterator[Owner]:
        """Everyone whom an interval that is not closed yet may charge."""
        for meter in self._meters.values():
            for glance in meter.glances:
                yield from (claim.owner for claim in glance.claims)
                yield from (holder.owner for holder in glance.holders or ())

    def _settle(self, device: DeviceLook, look: AttributionLook) -> tuple[Share, ...]:
        """Closes the device's interval with its newest glance, if its total is known."""
        gpu, product = device.gpu, self._catalogue.products.get(device.gpu.catalogue_key)
        meter = self._meters[gpu.uuid]
        meter.elapsed_s = 0.0
        energy_j = device.energy_j
        if energy_j is None or not 0.0 <= energy_j <= _ENERGY_J_MOST:
            if len(meter.glances) > GLANCES_MOST:
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
                    power_w=mean_w, seconds=seconds, contexts=_contexts(glances), busy=_busy(glances),
                    mig_enabled=gpu.mig_enabled,
                )  # fmt: skip
            shares = split(spent_mj, glances, meter.idle.idle(product, mig_enabled=gpu.mig_enabled))
        self._watch.observe(
            gpu.uuid, glance, shares=shares, allocations_known=look.allocations is not None, wall_ns=look.wall_ns,
            mean_power_w=mean_w, busy_w=_busy_w(device, product),
            idle=meter.idle.idle(product, mig_enabled=gpu.mig_enabled),
        )  # fmt: skip
        return shares

    def _glance(self, device: DeviceLook, look: AttributionLook, allocations: Iterable[Allocation]) -> Glance:
        gpu = device.gpu
        workloads = _workloads(gpu.uuid, look.allocations or ())
        claims = tuple(
            Claim(
                owner=_of_workload(one.owner, one.place.gpu_instance_id, workloads),
                gpu_instance_id=one.place.gpu_instance_id, shares=max(1, one.shares),
            )
            for one in allocations
            if one.place.gpu_uuid == gpu.uuid
        )  # fmt: skip
        holders = None
        if device.processes is not None:
            holders = tuple(
                _holder(process, look.owners, claims, workloads) for process in device.processes[:PROCESSES_MOST]
            )
        return Glance(
            monotonic_ns=look.monotonic_ns,
            slices=self._slices(device),
            holders=holders,
            claims=claims,
            utilization=_ratio(device.utilization),
        )

    def _slices(self, device: DeviceLook) -> tuple[Slice, ...]:
        """The whole device, or its GPU instances by their share of the SMs."""
        gpu = device.gpu
        if not gpu.mig_enabled:
            return (Slice(),)
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
            found.append(Slice(gpu_instance_id=instance.id, sm_fraction=min(1.0, fraction), activity=told))
        return tuple(found)

    def _sorted_accounts(self) -> tuple[Mapping[Account, int], Mapping[str, Mapping[str, int]]]:
        owned: dict[Account, int] = {}
        nobody: dict[str, dict[str, int]] = {uuid: {} for uuid in self._meters}
        for account, energy_mj in self._ledger.rows().items():
            if account.owner.kind is OwnerKind.UNALLOCATED:
                name = "unallocated"
            elif account.owner.kind is OwnerKind.UNATTRIBUTED:
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

    def _forget(self, present: frozenset[str]) -> None:
        """A device that left keeps its meter within a bound; what was attributed of it stays in the ledger."""
        self._watch.forget(present)
        gone = [uuid for uuid in self._meters if uuid not in present]
        for uuid in gone[: max(0, len(self._meters) - DEVICES_MOST)]:
            del self._meters[uuid]


def _workloads(gpu_uuid: str, allocations: Iterable[Allocation]) -> Mapping[int | None, str]:
    """By place, the only workload that the plan puts there, whoever else speaks of the device."""
    found: dict[int | None, set[str]] = {}
    for one in allocations:
        if one.source is AllocationSource.PLAN and one.place.gpu_uuid == gpu_uuid:
            found.setdefault(one.place.gpu_instance_id, set()).add(one.owner.workload)
    return {place: min(names) for place, names in found.items() if len(names) == 1}


def _of_workload(owner: Owner, place: int | None, workloads: Mapping[int | None, str]) -> Owner:
    workload = workloads.get(place, workloads.get(None, ""))
    return owner if owner.workload or not workload else replace(owner, workload=workload)


def _holder(
    process: GpuProcess, owners: Mapping[int, ProcessOwner], claims: Iterable[Claim],
    workloads: Mapping[int | None, str],
) -> Holder:  # fmt: skip
    place = process.gpu_instance_id
    nobody = Owner(kind=OwnerKind.PROCESS, pid=process.pid)
    found = owners.get(process.pid) or ProcessOwner(nobody, hidden=True)
    owner, inferred = found.owner, False
    if found.hidden:
        claimants = {claim.owner for claim in claims if claim.gpu_instance_id in (None, place)}
        if len(claimants) == 1:
            owner, inferred = replace(claimants.pop(), pid=process.pid), True
    return Holder(
        owner=_of_workload(owner, place, workloads), pid=process.pid, gpu_instance_id=place,
        sm_ratio=_ratio(process.sm_ratio), mps_server=found.mps_server, inferred=inferred,
    )  # fmt: skip


def _named(glance: Glance, join: NameJoin) -> Glance:
    if glance.holders is None:
        return glance
    return replace(glance, holders=tuple(replace(one, owner=join.named(one.owner)) for one in glance.holders))


def _ratio(value: float | None) -> float | None:
    """Inside [0, 1], or nothing; a NaN is in no range."""
    return value if value is not None and 0.0 <= value <= 1.0 else None


def _contexts(glances: Iterable[Glance]) -> bool | None:
    """Whether contexts were open throughout (True), never (False), or neither is known."""
    seen = {None if one.holders is None else bool(one.holders) for one in glances}
    return seen.pop() if len(seen) == 1 else None


def _busy(glances: Iterable[Glance]) -> bool | None:
    """Whether anything worked; None where nothing tells."""
    told = [
        value
        for one in glances
        for value in (one.utilization, *(each.activity for each in one.slices), *_ratios(one))
        if value is not None
    ]
    return any(value > ACTIVE_RATIO for value in told) if told else None


def _ratios(glance: Glance) -> Iterable[float | None]:
    return (one.sm_ratio for one in glance.holders or ())


def _unseen(energy_mj: int) -> tuple[Share, ...]:
    """What was spent before anybody looked."""
    if energy_mj == 0:
        return ()
    return (
        Share(
            owner=UNATTRIBUTED, part=Part.ACTIVE, energy_mj=energy_mj, method=Method.UNATTRIBUTED,
            confidence=Confidence.LOW,
        ),
    )  # fmt: skip


def _busy_w(device: DeviceLook, product: Product | None) -> float | None:
    """What it draws at full power under the limit that is enforced: work that is held down by a limit is no stall."""
    full_w = device.gpu.power_limit_default_w or (product.busy_w if product else None)
    return full_w if device.limit_w is None or full_w is None else min(full_w, device.limit_w)
