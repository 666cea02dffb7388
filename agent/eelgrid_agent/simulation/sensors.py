"""Simulated slow sensors, processes, GPM activity and NVLink wiring, and their translation to the device port.

None stands for what part, mode or driver does not report. Devices of one product are linked to each other; from five
on, SXM2 boards form a hybrid cube mesh (NVIDIA DGX-1 white paper) and later ones use switches.
"""

from collections.abc import Callable, Mapping, Sequence

from eelgrid_agent.devices.port import (
    INSTANCE_READINGS,
    SLOW_READINGS,
    DeviceEventKind,
    DeviceLink,
    GpuProcess,
    InstanceReadings,
    Missing,
    NoPermission,
    ProcessKind,
    ReadingValue,
)
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.power_curve import WorkDone
from eelgrid_agent.simulation.spec import PartTraits, get_part_traits
from eelgrid_protos.messages import AbsenceReason, AccessLevel, GpuInstance, Reading
from eelgrid_protos.values import dataclass

# First driver branch of each: memory without what the driver keeps; power fields and GPM; limit fields; NVLink
# fabric and the fields that count link errors of newer parts; the recovery action. By the binding's release of it.
RESERVED_SINCE = 510
POWER_FIELDS_SINCE = 525
GPM_SINCE = 525
LIMIT_FIELDS_SINCE = 535
FABRIC_SINCE = NEW_LINK_ERRORS_SINCE = 550
RECOVERY_SINCE = 570
# What the driver announces, and from which branch on (taken for the last two: they came with the field).
_ANNOUNCED_SINCE = {
    DeviceEventKind.XID: 0,
    DeviceEventKind.ECC_SINGLE_BIT: 0,
    DeviceEventKind.ECC_DOUBLE_BIT: 0,
    DeviceEventKind.MIG_CHANGED: 450,
    DeviceEventKind.GPU_UNAVAILABLE: RECOVERY_SINCE,
    DeviceEventKind.RECOVERY_ACTION: RECOVERY_SINCE,
}

_ASLEEP = 8
_WARMER_C = 6
_MEMORY_POWER_SHARE = 0.18
_CPU_MW = 67_000
_PCIE_MIB_PER_WORK_S = 1500.0
_LINK_LOAD = 0.1
_NS_PER_S = 1_000_000_000
# An idle instance shows 11 to 64 MiB in use, by its size.
_INSTANCE_OWN_BYTES = 11 * 2**20
# The driver looks at processes six times a second.
_PROCESS_PERIOD_NS = _NS_PER_S // 6
# Above every process id that Linux gives (PID_MAX_LIMIT), so that it is nobody's on this machine.
_UNNAMED_PID = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class GpmActivity:
    """Per cent of the time between two moments, and PCIe traffic in MiB a second, as the driver counts."""

    graphics: float
    sm: float
    occupancy: float
    tensor: float
    memory: float
    fp16: float
    fp32: float
    fp64: float
    pcie_sent: float
    pcie_received: float


def compute_activity(first: tuple[int, WorkDone], second: tuple[int, WorkDone]) -> GpmActivity:
    """What hardware counters make of two looks (nanoseconds, work done); the second is the later."""
    seconds = (second[0] - first[0]) / _NS_PER_S
    done = second[1].subtract(first[1])
    active = min(100.0 * done.active_s / seconds, 100.0)
    memory = min(100.0 * done.memory_s / seconds, 100.0)
    pipes, traffic = max(active - memory, 0.0), done.work_s / seconds * _PCIE_MIB_PER_WORK_S
    return GpmActivity(
        graphics=active,
        sm=active,
        occupancy=0.5 * active,
        tensor=0.6 * pipes,
        memory=memory,
        fp16=0.1 * pipes,
        fp32=0.25 * pipes,
        fp64=0.0,
        pcie_sent=0.25 * traffic,
        pcie_received=traffic,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimClient:
    """A process on a device; its share of SM time is `sm_percent`."""

    pid: int
    kind: ProcessKind
    memory_bytes: int
    gpu_instance_id: int | None
    compute_instance_id: int | None
    sm_percent: int


def list_announced_events(branch: int) -> frozenset[DeviceEventKind]:
    """What a driver of this branch announces."""
    return frozenset(kind for kind, since in _ANNOUNCED_SINCE.items() if since <= branch)


class DeviceSensors:
    """The slower sensors of one device under one driver branch; `links_up` says whether its NVLinks have peers."""

    __slots__ = ("_branch", "_gpu", "details", "links_up", "switched", "traits")

    def __init__(self, gpu: SimGpu, *, branch: int, alike: int) -> None:
        self._gpu = gpu
        self._branch = branch
        self.details: dict[int, GpuProcess] = {}
        self.traits: PartTraits = get_part_traits(gpu.product)
        self.links_up = self.traits.links > 0 and alike > 1
        self.switched = self.traits.is_switched(alike)

    # Power, memory, state

    def power_average_mw(self, now_ns: int) -> int | None:
        """The average field, which GA100 and older parts lack."""
        gpu = self._gpu
        if self._branch < POWER_FIELDS_SINCE or not gpu.product.sensor.averaged:
            return None
        return gpu.power_usage_mw(now_ns)

    def memory_power_mw(self, now_ns: int) -> int | None:
        """Power of the memory alone."""
        if self._branch < POWER_FIELDS_SINCE or not self.traits.memory_power:
            return None
        return round(self._gpu.power_instant_mw(now_ns) * _MEMORY_POWER_SHARE)

    def module_power_mw(self, now_ns: int) -> int | None:
        """Power of the module: two GPUs, taken as alike, and the CPU beside them."""
        if self._branch < POWER_FIELDS_SINCE or not self.traits.module_power:
            return None
        return 2 * self._gpu.power_instant_mw(now_ns) + _CPU_MW

    def memory_temperature_c(self, now_ns: int) -> int | None:
        """Temperature of stacked memory."""
        return self._gpu.temperature_c(now_ns) + _WARMER_C if self.traits.memory_temperature else None

    def memory_reserved_bytes(self) -> int | None:
        """Memory that the driver reserves, where it reports that separately."""
        return self._gpu.memory_reserved_bytes if self._branch >= RESERVED_SINCE else None

    def performance_state(self) -> int:
        """0 at work; 8 when idle on parts whose memory clock falls."""
        return _ASLEEP if self._asleep else 0

    @property
    def _asleep(self) -> bool:
        gpu = self._gpu
        return self.traits.sleeps and not gpu.mig.enabled and gpu.loads.total.utilization_ratio == 0.0

    # Health

    @property
    def _has_instances(self) -> bool:
        mig = self._gpu.mig
        return mig.enabled and bool(mig.instances)

    def ecc_volatile(self, *, corrected: bool) -> int | None:
        """Errors since the driver was loaded; not reported for the whole device while it has instances."""
        wear = self._gpu.wear
        return None if self._has_instances else wear.ecc_corrected if corrected else wear.ecc_uncorrected

    def ecc_aggregate(self, *, corrected: bool) -> int:
        """Errors over the life of the part."""
        wear = self._gpu.wear
        return wear.ecc_corrected_total if corrected else wear.ecc_uncorrected_total

    def remapped_rows(self) -> tuple[int, int, int, int] | None:
        """Correctable, uncorrectable, pending, failed; from Ampere on, and not while there are instances."""
        wear = self._gpu.wear
        if not self.traits.row_remapping or self._has_instances:
            return None
        return wear.remapped_correctable, wear.remapped_uncorrectable, int(wear.remap_pending), int(wear.remap_failed)

    def recovery_action(self) -> int | None:
        """What the driver advises."""
        return self._gpu.wear.recovery_action if self._branch >= RECOVERY_SINCE else None

    # Links

    def pcie_generation(self) -> int:
        """The generation that the link runs at: the first one while asleep."""
        return 1 if self._asleep else self.traits.pcie_generation

    def pcie_width(self) -> int:
        """Lanes."""
        return 16

    def pcie_replays(self) -> int:
        """Replays since the driver was loaded."""
        return self._gpu.wear.pcie_replays

    def fabric_state(self) -> int | None:
        """The state of the device in the NVSwitch fabric, if it is attached to one."""
        if self._branch < FABRIC_SINCE or not self.traits.fabric or not self.switched:
            return None
        return self._gpu.wear.fabric_state

    def link_up(self, link: int) -> bool | None:
        """Whether a link is up, or None past the last one."""
        return self.links_up if 0 <= link < self.traits.links else None

    def link_kib(self, link: int, now_ns: int) -> int | None:
        """KiB over one link in one direction since the driver was loaded; both directions are alike."""
        if not 0 <= link < self.traits.links:
            return None
        if not self.links_up:
            return 0
        return int(self._gpu.traffic_done(now_ns).work_s * self.traits.link_bytes_per_s * _LINK_LOAD) // 1024

    def link_errors(self) -> int | None:
        """Errors of all links since the driver was loaded; an older driver cannot count those of newer parts."""
        untold = self.traits.new_link_errors and self._branch < NEW_LINK_ERRORS_SINCE
        return None if untold or not self.traits.links else self._gpu.wear.nvlink_errors

    # Instances and processes

    @property
    def has_activity(self) -> bool:
        """Whether hardware counters can be sampled."""
        return self.traits.gpm and self._branch >= GPM_SINCE

    def instance_memory(self, instance: GpuInstance) -> tuple[int, int]:
        """Total and used memory of one GPU instance."""
        gpu = self._gpu
        slices = gpu.mig.geometry.memory_slices if gpu.mig.geometry else instance.size
        known = gpu.mig.instances[instance.id].profile.memory_bytes
        total = gpu.product.memory_bytes * instance.size // slices if known is None else known
        load = gpu.loads.get_instance_load(instance.id, gpu.mig.instances)
        return total, min(_INSTANCE_OWN_BYTES * instance.size + load.memory_bytes, total)

    def clients(self) -> tuple[SimClient, ...]:
        """The processes with a context, by pid; a load without a holder shows as one process of the device."""
        gpu, load = self._gpu, self._gpu.loads.total
        held = sorted(gpu.mig.holds.items())
        if not held and not gpu.mig.enabled and (load.utilization_ratio or load.memory_bytes):
            held = [(_UNNAMED_PID + gpu.slot, (None, None))]
        places = [place for _, place in held]
        return tuple(self._client(pid, place, places.count(place)) for pid, place in held)

    def _client(self, pid: int, place: tuple[int | None, int | None], sharers: int) -> SimClient:
        """A process as it said of itself, and else with an equal part of what runs in its place."""
        gpu, instance = self._gpu, place[0]
        load = gpu.loads.total
        if instance is not None and instance in gpu.mig.instances:
            load = gpu.loads.get_instance_load(instance, gpu.mig.instances)
        said = self.details.get(pid)
        memory_bytes = None if said is None else said.memory_bytes
        ratio = None if said is None else said.sm_ratio
        return SimClient(
            pid=pid,
            kind=ProcessKind.COMPUTE if said is None else said.kind,
            memory_bytes=load.memory_bytes // sharers if memory_bytes is None else memory_bytes,
            gpu_instance_id=instance,
            compute_instance_id=place[1],
            sm_percent=round(100.0 * (load.utilization_ratio / sharers if ratio is None else ratio)),
        )

    def processes_sampled_us(self, now_ns: int) -> int:
        """When the driver last looked at the processes, in microseconds."""
        return (now_ns - now_ns % _PROCESS_PERIOD_NS) // 1000


# NVML's levels: one PCIe switch, one processor, the whole machine.
_SINGLE, _NODE, _SYSTEM = 10, 40, 50
_ON_A_SWITCH = 2
SWITCH = "switch"
# Where the links of a device end on a cube mesh, by its place on the board; links of the same two devices pair up.
_MESH_V100 = (
    (1, 2, 3, 3, 4, 4), (0, 2, 2, 3, 5, 5), (0, 1, 1, 3, 3, 6), (0, 0, 1, 2, 2, 7),
    (0, 0, 5, 6, 7, 7), (1, 1, 4, 6, 6, 7), (2, 4, 5, 5, 7, 7), (3, 4, 4, 5, 6, 6),
)  # fmt: skip
_MESH_P100 = tuple(
    tuple(sorted({*range(half, half + 4), place ^ 4} - {place})) for half in (0, 4) for place in range(half, half + 4)
)
_MESHES = {6: _MESH_V100, 4: _MESH_P100}


def list_same_product(gpu: SimGpu, devices: Sequence[SimGpu]) -> list[SimGpu]:
    """The devices of the same product, itself among them."""
    return [other for other in devices if other.product.key == gpu.product.key]


def find_common_ancestor(one: SimGpu, other: SimGpu) -> int:
    """NVML's nearest common ancestor of two devices."""
    first, second = one.slot, other.slot
    if first // _ON_A_SWITCH == second // _ON_A_SWITCH:
        return _SINGLE
    return _NODE if one.identity.numa_node == other.identity.numa_node else _SYSTEM


def find_link_end(gpu: SimGpu, link: int, devices: Sequence[SimGpu]) -> SimGpu | str | None:
    """Where an NVLink ends: a device, a switch, or nowhere."""
    traits, board = get_part_traits(gpu.product), list_same_product(gpu, devices)
    peers = [other for other in board if other is not gpu]
    if not peers or not 0 <= link < traits.links:
        return None
    if traits.is_switched(len(board)):
        return SWITCH
    if not traits.is_meshed(len(board)):
        return peers[link % len(peers)]
    end = _MESHES[traits.links][board.index(gpu)][link]
    return board[end] if end < len(board) else None


_APART_LEAST_NS = 100_000_000
_MIB = float(2**20)
_NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)
_NOT_SAMPLED = Missing(AbsenceReason.NOT_SAMPLED)
_NO_PERMISSION = Missing(AbsenceReason.NO_PERMISSION)
_NOTHING: Mapping[Reading, ReadingValue] = dict.fromkeys(SLOW_READINGS, _NOT_SUPPORTED)

_OF_INSTANCES = frozenset(INSTANCE_READINGS)
_ACTIVITY: Mapping[Reading, Callable[[GpmActivity], float]] = {
    Reading.GRAPHICS_ACTIVITY_RATIO: lambda seen: seen.graphics / 100.0,
    Reading.SM_ACTIVITY_RATIO: lambda seen: seen.sm / 100.0,
    Reading.SM_OCCUPANCY_RATIO: lambda seen: seen.occupancy / 100.0,
    Reading.TENSOR_ACTIVITY_RATIO: lambda seen: seen.tensor / 100.0,
    Reading.MEMORY_ACTIVITY_RATIO: lambda seen: seen.memory / 100.0,
    Reading.FP16_ACTIVITY_RATIO: lambda seen: seen.fp16 / 100.0,
    Reading.FP32_ACTIVITY_RATIO: lambda seen: seen.fp32 / 100.0,
    Reading.FP64_ACTIVITY_RATIO: lambda seen: seen.fp64 / 100.0,
    Reading.PCIE_SENT_BYTES_PER_S: lambda seen: seen.pcie_sent * _MIB,
    Reading.PCIE_RECEIVED_BYTES_PER_S: lambda seen: seen.pcie_received * _MIB,
}


@dataclass(frozen=True, slots=True)
class _Look:
    """One look of the hardware counters, in one life of the device or of an instance of it."""

    life: object
    now_ns: int
    done: WorkDone


class SimulatedNodeReadings:
    """One node's; `sensors` are made when a device is first asked, for a fleet never asks."""

    def __init__(self, devices: Sequence[SimGpu], *, branch: int) -> None:
        self._devices = devices
        self._branch = branch
        self._sensors: dict[str, DeviceSensors] = {}
        self._looks: dict[tuple[str, int | None], _Look] = {}
        self._processes_seen_us: dict[str, int] = {}

    def get_sensors(self, gpu: SimGpu) -> DeviceSensors:
        """The sensors of one device."""
        sensors = self._sensors.get(gpu.uuid)
        if sensors is None:
            sensors = DeviceSensors(gpu, branch=self._branch, alike=len(list_same_product(gpu, self._devices)))
            self._sensors[gpu.uuid] = sensors
        return sensors

    def reset(self) -> None:
        """The next looks are the first ones."""
        self._looks.clear()
        self._processes_seen_us.clear()

    def read_slow(self, gpu: SimGpu, now_ns: int, rights: AccessLevel) -> Mapping[Reading, ReadingValue]:
        """All of the slow readings of a device that answers."""
        sensors = self.get_sensors(gpu)
        rows = sensors.remapped_rows() or (None, None, None, None)
        read: dict[Reading, int | None] = {
            Reading.MEMORY_TEMPERATURE_C: sensors.memory_temperature_c(now_ns),
            Reading.MEMORY_RESERVED_BYTES: sensors.memory_reserved_bytes(),
            Reading.ECC_CORRECTED_VOLATILE: sensors.ecc_volatile(corrected=True),
            Reading.ECC_UNCORRECTED_VOLATILE: sensors.ecc_volatile(corrected=False),
            Reading.ECC_CORRECTED_AGGREGATE: sensors.ecc_aggregate(corrected=True),
            Reading.ECC_UNCORRECTED_AGGREGATE: sensors.ecc_aggregate(corrected=False),
            Reading.REMAPPED_ROWS_CORRECTABLE: rows[0],
            Reading.REMAPPED_ROWS_UNCORRECTABLE: rows[1],
            Reading.ROW_REMAP_PENDING: rows[2],
            Reading.ROW_REMAP_FAILED: rows[3],
            Reading.RECOVERY_ACTION: sensors.recovery_action(),
            Reading.PCIE_LINK_GENERATION: sensors.pcie_generation(),
            Reading.PCIE_LINK_WIDTH: sensors.pcie_width(),
            Reading.PCIE_REPLAYS: sensors.pcie_replays(),
            Reading.FABRIC_STATE: sensors.fabric_state(),
            Reading.PERFORMANCE_STATE: sensors.performance_state(),
            **self._links(sensors, now_ns),
        }
        milliwatts = {
            Reading.POWER_LIMIT_REQUESTED_W: gpu.limit_mw,
            Reading.MEMORY_POWER_W: sensors.memory_power_mw(now_ns),
            Reading.MODULE_POWER_W: sensors.module_power_mw(now_ns),
        }
        return {
            **_NOTHING,
            **{reading: _NOT_SUPPORTED if value is None else float(value) for reading, value in read.items()},
            **{reading: _NOT_SUPPORTED if value is None else value / 1000.0 for reading, value in milliwatts.items()},
            Reading.PROCESSES: float(len(sensors.clients())) if _shown(gpu, rights) else _NO_PERMISSION,
            **self._activity(gpu, None, gpu.work_done(now_ns), now_ns),
        }

    def read_instances(self, gpu: SimGpu, now_ns: int) -> tuple[InstanceReadings, ...]:
        """A look at each GPU instance of a device that answers."""
        held_now = {held.id for held in gpu.identity.gpu_instances}
        for key in [key for key in self._looks if key[0] == gpu.uuid and key[1] is not None]:
            if key[1] not in held_now:
                del self._looks[key]
        return tuple(self._instance(gpu, held, now_ns) for held in gpu.identity.gpu_instances)

    def _instance(self, gpu: SimGpu, held: GpuInstance, now_ns: int) -> InstanceReadings:
        # Without a compute instance there is no handle to ask for memory.
        used = float(self.get_sensors(gpu).instance_memory(held)[1]) if held.compute_instances else _NOT_SUPPORTED
        activity = self._activity(gpu, held.id, gpu.loads.instance_work_done(held.id, now_ns), now_ns)
        values = {Reading.MEMORY_USED_BYTES: used, **activity}
        return InstanceReadings(
            gpu_instance_id=held.id,
            values={reading: value for reading, value in values.items() if reading in _OF_INSTANCES},
        )

    def read_processes(self, gpu: SimGpu, now_ns: int, rights: AccessLevel) -> tuple[GpuProcess, ...]:
        """Who has a context on a device that answers."""
        sliced, sensors = gpu.mig.enabled, self.get_sensors(gpu)
        if not _shown(gpu, rights):
            raise NoPermission(f"{gpu.uuid}: the simulated driver shows this user no processes of instances")
        clients = sensors.clients()
        seen_us, sampled_us = self._processes_seen_us.get(gpu.uuid), sensors.processes_sampled_us(now_ns)
        fresh = clients and not sliced and seen_us is not None and sampled_us > seen_us
        if clients and not sliced:
            self._processes_seen_us[gpu.uuid] = sampled_us
        return tuple(
            GpuProcess(
                pid=client.pid,
                kind=client.kind,
                memory_bytes=client.memory_bytes,
                gpu_instance_id=client.gpu_instance_id,
                compute_instance_id=client.compute_instance_id,
                sm_ratio=client.sm_percent / 100.0 if fresh else None,
            )
            for client in clients
        )

    def read_topology(self, answering: Sequence[SimGpu]) -> tuple[DeviceLink, ...]:
        """Every pair of the devices that answer."""
        return tuple(
            DeviceLink(
                one=one.uuid,
                other=other.uuid,
                ancestor=find_common_ancestor(one, other),
                nvlinks=self._between(one, other),
            )
            for place, one in enumerate(answering)
            for other in answering[place + 1 :]
        )

    def _between(self, one: SimGpu, other: SimGpu) -> int:
        ends = [find_link_end(one, link, self._devices) for link in range(self.get_sensors(one).traits.links)]
        others = [find_link_end(other, link, self._devices) for link in range(self.get_sensors(other).traits.links)]
        return sum(end is other for end in ends) or min(ends.count(SWITCH), others.count(SWITCH))

    def _links(self, sensors: DeviceSensors, now_ns: int) -> dict[Reading, int | None]:
        kib = [sensors.link_kib(link, now_ns) or 0 for link in range(sensors.traits.links)]
        moved = sum(kib) * 1024 if kib else None
        return {
            Reading.NVLINK_SENT_BYTES: moved,
            Reading.NVLINK_RECEIVED_BYTES: moved,
            Reading.NVLINK_ACTIVE_LINKS: len(kib) * sensors.links_up if kib else None,
            Reading.NVLINK_ERRORS: sensors.link_errors(),
        }

    def _activity(
        self, gpu: SimGpu, instance_id: int | None, done: WorkDone, now_ns: int
    ) -> dict[Reading, ReadingValue]:
        """Activity since the look before, which stays where it is too near."""
        if not self.get_sensors(gpu).has_activity:
            return dict.fromkeys(_ACTIVITY, _NOT_SUPPORTED)
        # An instance that was made anew is another object, whatever its id.
        life = gpu.generation if instance_id is None else gpu.mig.instances[instance_id]
        key, look = (gpu.uuid, instance_id), _Look(life, now_ns, done)
        before = self._looks.get(key)
        if before is None or before.life != look.life:
            self._looks[key] = look
            return dict.fromkeys(_ACTIVITY, _NOT_SAMPLED)
        if now_ns - before.now_ns < _APART_LEAST_NS:
            return dict.fromkeys(_ACTIVITY, _NOT_SAMPLED)
        self._looks[key] = look
        activity = compute_activity((before.now_ns, before.done), (now_ns, done))
        return {reading: told(activity) for reading, told in _ACTIVITY.items()}


def _shown(gpu: SimGpu, rights: AccessLevel) -> bool:
    """Whether a user with these rights is told the processes of the whole device."""
    return not gpu.mig.enabled or rights >= AccessLevel.MIG_MONITOR
