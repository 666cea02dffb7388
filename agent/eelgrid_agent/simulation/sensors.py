"""What a simulated device's slower sensors say, in NVML's whole units; None is what part, mode or driver does not say.

The direct way and the simulated library both read here, so that they differ in
nothing but translation. Sensors look at the truth that the core keeps (power,
work, wear, who holds the device); they keep nothing but what processes said of
themselves.

Activity is a difference of work between two moments, as hardware counters see
it: the SMs are busy while a kernel is there, the memory for its share of that
time, and the pipes for what is left, in fixed parts (taken: a mixed-precision
training job).
"""

from dataclasses import dataclass

from eelgrid_agent.device import DeviceEventKind, GpuProcess, ProcessKind
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.parts import Traits, traits_of
from eelgrid_agent.simulation.work import WorkDone
from eelgrid_protos.messages import GpuInstance

__all__ = [
    "FABRIC_SINCE", "GPM_SINCE", "LIMIT_FIELDS_SINCE", "NEW_LINK_ERRORS_SINCE", "POWER_FIELDS_SINCE",
    "RECOVERY_SINCE", "RESERVED_SINCE", "Activity", "Client", "Sensors", "activity_between",
    "announced_by",
]  # fmt: skip

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
    DeviceEventKind.XID: 0, DeviceEventKind.ECC_SINGLE_BIT: 0, DeviceEventKind.ECC_DOUBLE_BIT: 0,
    DeviceEventKind.MIG_CHANGED: 450, DeviceEventKind.GPU_UNAVAILABLE: RECOVERY_SINCE,
    DeviceEventKind.RECOVERY_ACTION: RECOVERY_SINCE,
}  # fmt: skip

_FABRIC_COMPLETED = 3
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
_UNNAMED_PID = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
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


def activity_between(first: tuple[int, WorkDone], second: tuple[int, WorkDone]) -> Activity:
    """What hardware counters make of two looks (nanoseconds, work done); the second is the later."""
    seconds = (second[0] - first[0]) / _NS_PER_S
    done = second[1].since(first[1])
    active = min(100.0 * done.active_s / seconds, 100.0)
    memory = min(100.0 * done.memory_s / seconds, 100.0)
    pipes, traffic = max(active - memory, 0.0), done.work_s / seconds * _PCIE_MIB_PER_WORK_S
    return Activity(
        graphics=active, sm=active, occupancy=0.5 * active, tensor=0.6 * pipes, memory=memory, fp16=0.1 * pipes,
        fp32=0.25 * pipes, fp64=0.0, pcie_sent=0.25 * traffic, pcie_received=traffic,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A process on a device; its share of SM time is `sm_percent`."""

    pid: int
    kind: ProcessKind
    memory_bytes: int
    gpu_instance_id: int | None
    compute_instance_id: int | None
    sm_percent: int


def announced_by(branch: int) -> frozenset[DeviceEventKind]:
    """What a driver of this branch announces."""
    return frozenset(kind for kind, since in _ANNOUNCED_SINCE.items() if since <= branch)


class Sensors:
    """The slower sensors of one device under one driver branch; `links_up` tells whether its NVLinks have peers."""

    __slots__ = ("_branch", "_gpu", "details", "links_up", "switched", "traits")

    def __init__(self, gpu: SimGpu, *, branch: int, alike: int) -> None:
        self._gpu = gpu
        self._branch = branch
        self.details: dict[int, GpuProcess] = {}
        self.traits: Traits = traits_of(gpu.product)
        self.links_up = self.traits.links > 0 and alike > 1
        self.switched = self.traits.switched(alike)

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
        """What the driver keeps for itself, where it tells it apart."""
        return self._gpu.memory_reserved_bytes if self._branch >= RESERVED_SINCE else None

    def performance_state(self) -> int:
        """0 at work; parts whose memory clock falls when idle fall to 8."""
        return _ASLEEP if self._asleep else 0

    @property
    def _asleep(self) -> bool:
        gpu = self._gpu
        return self.traits.sleeps and not gpu.mig.enabled and gpu.loads.total.utilization_ratio == 0.0

    # Health

    @property
    def _sliced(self) -> bool:
        mig = self._gpu.mig
        return mig.enabled and bool(mig.instances)

    def ecc_volatile(self, *, corrected: bool) -> int | None:
        """Errors since the driver was loaded; not told of the whole while it has instances."""
        wear = self._gpu.wear
        return None if self._sliced else wear.ecc_corrected if corrected else wear.ecc_uncorrected

    def ecc_aggregate(self, *, corrected: bool) -> int:
        """Errors over the life of the part."""
        wear = self._gpu.wear
        return wear.ecc_corrected_ever if corrected else wear.ecc_uncorrected_ever

    def remapped_rows(self) -> tuple[int, int, int, int] | None:
        """Correctable, uncorrectable, pending, failed; from Ampere on, and not while there are instances."""
        wear = self._gpu.wear
        if not self.traits.row_remapping or self._sliced:
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
        """Where the device stands with the switches' fabric, if it hangs on one."""
        if self._branch < FABRIC_SINCE or not self.traits.fabric or not self.switched:
            return None
        return _FABRIC_COMPLETED

    def link_up(self, link: int) -> bool | None:
        """Whether a link is up, or None past the last one."""
        return self.links_up if 0 <= link < self.traits.links else None

    def link_kib(self, link: int, now_ns: int) -> int | None:
        """KiB over one link in one direction since the driver was loaded; both directions are alike."""
        if not 0 <= link < self.traits.links:
            return None
        if not self.links_up:
            return 0
        return int(self._gpu.traffic(now_ns).work_s * self.traits.link_bytes_per_s * _LINK_LOAD) // 1024

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
        load = gpu.loads.on_instance(instance.id, gpu.mig.instances)
        return total, min(_INSTANCE_OWN_BYTES * instance.size + load.memory_bytes, total)

    def clients(self) -> tuple[Client, ...]:
        """The processes with a context, by pid; a load that nobody holds shows as one process of the device."""
        gpu, load = self._gpu, self._gpu.loads.total
        held = sorted(gpu.mig.holds.items())
        if not held and not gpu.mig.enabled and (load.utilization_ratio or load.memory_bytes):
            held = [(_UNNAMED_PID + gpu.slot, (None, None))]
        places = [place for _, place in held]
        return tuple(self._client(pid, place, places.count(place)) for pid, place in held)

    def _client(self, pid: int, place: tuple[int | None, int | None], sharers: int) -> Client:
        """A process as it said of itself, and else with an equal part of what runs in its place."""
        gpu, instance = self._gpu, place[0]
        load = gpu.loads.total
        if instance is not None and instance in gpu.mig.instances:
            load = gpu.loads.on_instance(instance, gpu.mig.instances)
        said = self.details.get(pid)
        memory_bytes = None if said is None else said.memory_bytes
        ratio = None if said is None else said.sm_ratio
        return Client(
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
