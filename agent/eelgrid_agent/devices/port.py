"""The device port: what the agent reads from GPUs, what it may change, and how that fails.

Adapters (nvml, amd, process, simulation) translate and never decide. Readings are in the unit of their name; a
reading that is not available is Missing with a reason, so that it cannot enter arithmetic. `DevicePort` only reads,
`ControlPort` changes a device; a change counts once it was read back. Also here: the listing that keeps silent
devices, and the latency histogram of port calls.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum, IntEnum
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, AbsenceReason, AccessLevel, Gpu, Reading
from eelgrid_protos.values import dataclass

# Cheap: a few microseconds each, read at every tick.
FAST_READINGS: tuple[Reading, ...] = (
    Reading.POWER_W,
    Reading.ENERGY_J,
    Reading.UTILIZATION_RATIO,
    Reading.MEMORY_USED_BYTES,
    Reading.SM_CLOCK_MHZ,
    Reading.MEMORY_CLOCK_MHZ,
    Reading.TEMPERATURE_C,
    Reading.POWER_LIMIT_W,
    Reading.EVENT_REASONS_MASK,
    Reading.POWER_AVERAGE_W,
    Reading.MEMORY_UTILIZATION_RATIO,
)
FAST_VALUE_READINGS: tuple[Reading, ...] = tuple(
    reading for reading in FAST_READINGS if reading is not Reading.ENERGY_J
)
# Dear, or seldom different: read every few seconds.
SLOW_READINGS: tuple[Reading, ...] = tuple(
    reading for reading in Reading if Reading.POWER_LIMIT_REQUESTED_W <= reading <= Reading.PROCESSES
)
# What a MIG GPU instance says for itself; there is no power of an instance.
INSTANCE_READINGS: tuple[Reading, ...] = (
    Reading.MEMORY_USED_BYTES,
    Reading.GRAPHICS_ACTIVITY_RATIO,
    Reading.SM_ACTIVITY_RATIO,
    Reading.SM_OCCUPANCY_RATIO,
    Reading.TENSOR_ACTIVITY_RATIO,
    Reading.MEMORY_ACTIVITY_RATIO,
)


# Called with a GPU's index before a listing asks the driver for it; false to leave it out.
VisitCallback = Callable[[int], bool]


class DeviceError(Exception):
    """The device or its driver is at fault; the message says what to do."""


class DriverUnavailable(DeviceError):
    """No driver, or it cannot be opened: the node has no GPUs for now."""


class GpuLostError(DeviceError):
    """The device answers nothing any more."""


class DeviceTimeout(DeviceError):
    """The call did not come back in time; the device may hang."""


class OutcomeUnknown(DeviceTimeout):
    """The answer to a change was lost: it may have taken hold, or may yet. Read back, never just repeat it."""


class UnknownGpu(DeviceError):
    """No device has this UUID."""


class UnknownInstance(DeviceError):
    """The device has no such GPU or compute instance."""


class NotSupported(DeviceError):
    """The part or its driver cannot do this."""


class NoPermission(DeviceError):
    """The driver refuses this user."""


class DeviceInUse(DeviceError):
    """A client or a process holds what was to be changed."""


class InsufficientResources(DeviceError):
    """The driver has no room for the instance; it never reports that a place is occupied."""


class OutOfRange(DeviceError):
    """The device does not take this value."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A reading that could not be had."""

    reason: AbsenceReason


ReadingValue = float | Missing


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReadings:
    """One quick look at one device.

    `energy_counter_j` is the device's own counter, which falls to zero with the
    driver; the sampler turns it into the reading ENERGY_J, which never falls.
    `values` always has all of FAST_VALUE_READINGS.
    """

    energy_counter_j: ReadingValue
    values: Mapping[Reading, ReadingValue]


def make_silent_readings(reason: AbsenceReason) -> RawReadings:
    """A quick look at a device that says nothing."""
    missing: ReadingValue = Missing(reason)
    return RawReadings(energy_counter_j=missing, values=MappingProxyType(dict.fromkeys(FAST_VALUE_READINGS, missing)))


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReadings:
    """One look at one GPU instance; `values` has all of INSTANCE_READINGS."""

    gpu_instance_id: int
    values: Mapping[Reading, ReadingValue]


class ProcessKind(Enum):
    """How a process uses a device."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process with a context on a device; ids are of the host's namespace.

    `sm_ratio` is its share of SM time over the last period, None where the driver does not report it (always under
    MIG).
    """

    pid: int
    kind: ProcessKind
    memory_bytes: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    sm_ratio: float | None = None


class FabricState(IntEnum):
    """How far the registration of a device with its NVSwitch fabric is, as NVML counts; FAILED is completed with an error."""

    NOT_STARTED = 1
    IN_PROGRESS = 2
    COMPLETED = 3
    FAILED = 4


class DeviceEventKind(Enum):
    """Events that the driver announces, and hangs that the supervisor detects."""

    XID = "xid"
    ECC_SINGLE_BIT = "ecc_single_bit"
    ECC_DOUBLE_BIT = "ecc_double_bit"
    MIG_CHANGED = "mig_changed"
    GPU_UNAVAILABLE = "gpu_unavailable"
    RECOVERY_ACTION = "recovery_action"
    # A call to the device did not come back: it is asked now and then only. And the end of that.
    HUNG = "hung"
    ANSWERS = "answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvent:
    """One announcement; `code` is the XID or the recovery action."""

    kind: DeviceEventKind
    gpu_uuid: str
    code: int = 0
    gpu_instance_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """How near two devices are: NVML's nearest common ancestor (0 board .. 50 system), and active NVLinks between."""

    one: str
    other: str
    ancestor: int
    nvlinks: int = 0


class DevicePort(Protocol):
    """A node's GPUs, read-only. Every method may raise DriverUnavailable, GpuLost and DeviceTimeout."""

    def driver_version(self) -> str:
        """The driver's version; raises DriverUnavailable."""

    def access(self) -> AccessLevel:
        """How much this user may do, found by asking for rights and changing nothing."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Identity, limits and MIG layout of every device, by index; raises DriverUnavailable."""

    def read(self, uuid: str) -> RawReadings:
        """One quick look at one device; raises UnknownGpu. A lost device reads Missing(GPU_LOST) throughout."""

    def read_slow(self, uuid: str) -> Mapping[Reading, ReadingValue]:
        """All of SLOW_READINGS of one device; raises UnknownGpu. Silent devices read Missing, as in `read`."""

    def read_instances(self, uuid: str) -> tuple[InstanceReadings, ...]:
        """A look at each GPU instance, by id; none with MIG off; raises UnknownGpu.

        Activity is of the time since the call before; the first call reads Missing(NOT_SAMPLED).
        """

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who has a context on the device, by pid and instance; raises UnknownGpu, NoPermission, NotSupported."""

    def topology(self) -> tuple[DeviceLink, ...]:
        """Every pair of devices, once; empty where the driver does not report links."""

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """What was announced since the call before, without waiting; none where the driver announces nothing."""

    def close(self) -> None:
        """Closes the driver session; the port can be used again afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSettings:
    """Settings as they are read back; None where the part does not report a value.

    Locked clocks cannot be read back through NVML: they show only in the clock under load, so the caller has to
    remember the pair that it requested.
    """

    requested_w: float | None
    enforced_w: float | None
    default_w: float | None
    min_w: float | None
    max_w: float | None
    sm_clock_mhz: int | None
    sm_clocks_mhz: tuple[int, ...] = ()
    power_profiles: tuple[int, ...] = ()
    power_profile: int | None = None


class ModeChange(Enum):
    """What became of a change of MIG mode."""

    DONE = "done"
    # The driver took it and waits for a reset of the device or for a reboot.
    PENDING = "pending"


class MigControlPort(Protocol):
    """Changes the MIG layout of devices. Errors are those of ControlPort."""

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """The profiles and placements that the driver offers on this device.

        Raises NotSupported on parts without MIG.
        """

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """Requests the mode; raises DeviceInUse while instances or clients hold the device.

        Closes the own session first.
        """

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """Makes an instance at exactly this place; returns its id; raises InsufficientResources."""

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """Removes an instance; raises UnknownInstance, and DeviceInUse while it has compute instances or clients."""

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """Makes a compute instance; returns its id; raises UnknownInstance, InsufficientResources."""

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance; raises UnknownInstance, and DeviceInUse while a process holds it."""


class ControlPort(MigControlPort, Protocol):
    """Changes devices.

    Every method raises UnknownGpu, GpuLostError, DeviceTimeout, NotSupported and NoPermission where they apply. A
    return means only that the driver reported success: the caller reads back. OutcomeUnknown means that no answer
    arrived.
    """

    def power_settings(self, uuid: str) -> PowerSettings:
        """Limits and clocks as they are now."""

    def set_power_limit(self, uuid: str, limit_w: float) -> None:
        """Asks for a limit; raises OutOfRange outside the device's constraints."""

    def lock_sm_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        """Keeps the SM clock inside; raises OutOfRange."""

    def unlock_sm_clocks(self, uuid: str) -> None:
        """Unlocks the SM clock, which the driver then chooses."""

    def set_power_profile(self, uuid: str, profile: int | None) -> None:
        """Asks for a workload power profile, or for none; raises OutOfRange for one that the part lacks."""


def include_silent_gpus(found: Mapping[str, Gpu], seen: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """Devices by UUID: those found as they are, then those seen before, each under an index of its own."""
    listed = dict(found)
    taken = {gpu.index for gpu in found.values()}
    for uuid, gpu in sorted(seen.items(), key=lambda item: item[1].index):
        if uuid in listed:
            continue
        index = next((place for place in (gpu.index, *range(GPUS_PER_NODE_MOST)) if place not in taken), None)
        if index is None:
            # More devices than a node can have: the driver gave new UUIDs to old ones.
            break
        taken.add(index)
        listed[uuid] = gpu if index == gpu.index else replace(gpu, index=index)
    return listed


# Cached fields take microseconds, sensors a millisecond, the first contact with a device seconds.
LATENCY_BUCKETS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_CALLS_MOST = 64


class CallLatencies:
    """Seconds spent in the driver."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def add_call(self, call: str, elapsed_s: float) -> None:
        """One call."""
        counts = self._counts.get(call)
        if counts is None:
            if len(self._counts) >= _CALLS_MOST:
                return
            # In this order, for the thread of a scrape reads both.
            self._sums_s[call] = 0.0
            counts = self._counts[call] = [0] * (len(LATENCY_BUCKETS_S) + 1)
        counts[bisect_left(LATENCY_BUCKETS_S, elapsed_s)] += 1
        self._sums_s[call] += elapsed_s

    def __iter__(self) -> Iterator[tuple[str, int, float, tuple[tuple[float, int], ...]]]:
        """(call, count, sum_s, ((upper bound, count at or below), ...)) by call; the last bound is infinity."""
        for call, counts in sorted(self._counts.items()):
            below = tuple(zip((*LATENCY_BUCKETS_S, float("inf")), accumulate(counts), strict=True))
            yield call, below[-1][1], self._sums_s[call], below
