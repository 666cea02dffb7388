"""The device survey of a node, the fast readings of all devices, the inventory built from them, and their health.

What jobs of another engine ask of devices is mapped here from the names that it uses to the inventory's.

Driver events and slow readings become node events, XID counts and cordons.
XIDs 13, 31, 43, 45, 68 and 109 are application faults and must not drain a node. Counters over the life of a part
matter by their change; the first observation only sets the baseline.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from types import MappingProxyType
from typing import Protocol

from eelgrid_agent.devices.host import Host
from eelgrid_agent.devices.port import (
    DeviceError,
    DeviceEvent,
    DeviceEventKind,
    DevicePort,
    DriverUnavailable,
    FabricState,
    GpuProcess,
    Missing,
    ProcessKind,
    RawReadings,
    ReadingValue,
    make_silent_readings,
)
from eelgrid_agent.devices.sampler import ExtendedReadings, read_extended_readings
from eelgrid_agent.energy.allocations import find_device, find_mapped_device
from eelgrid_agent.enforce.guard.events import JobHold
from eelgrid_agent.engine.slurm_jobs import HandedJob
from eelgrid_protos.messages import (
    AbsenceReason,
    AccessLevel,
    DeviceLease,
    Gpu,
    GpuLink,
    Inventory,
    NodeEvent,
    NodeEventKind,
    Reading,
)
from eelgrid_protos.values import dataclass

GpuReadings = tuple[tuple[str, RawReadings], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """The operator's description of a node."""

    node_name: str
    agent_version: str
    pool: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False
    topology: tuple[str, ...] = ()
    runs_processes: bool = False
    model_data: tuple[str, ...] = ()
    fence_after_s: float = 0.0
    sets_limits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSurvey:
    """The devices of a node; `problem` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str = ""
    access: AccessLevel = AccessLevel.UNSPECIFIED
    links: tuple[GpuLink, ...] = ()
    problem: str = ""


def survey_devices(device: DevicePort, before: DeviceSurvey | None = None) -> DeviceSurvey:
    """Asks the driver for its devices; may block, so a real driver is asked off the event loop.

    How the devices are wired is asked only when they are not those of the survey before.
    """
    try:
        gpus, version, access = device.gpus(), device.driver_version(), device.access()
        known = before is not None and [gpu.uuid for gpu in before.gpus] == [gpu.uuid for gpu in gpus]
        links = before.links if known and before is not None and before.links else _links(device, gpus)
    except DeviceError as error:
        return DeviceSurvey(problem=str(error))
    return DeviceSurvey(gpus=gpus, driver_version=version, access=access, links=links)


def _links(device: DevicePort, gpus: tuple[Gpu, ...]) -> tuple[GpuLink, ...]:
    index = {gpu.uuid: gpu.index for gpu in gpus}
    try:
        found = device.topology()
    except DriverUnavailable:
        raise
    except DeviceError:
        # One device that does not answer must not cost the others; it is asked again at the next survey.
        return ()
    return tuple(
        GpuLink(one=index[link.one], other=index[link.other], ancestor=link.ancestor, nvlinks=link.nvlinks)
        for link in found
        if link.one in index and link.other in index
    )


def build_inventory(
    identity: NodeIdentity,
    host: Host,
    found: DeviceSurvey,
    *,
    generation: int,
    lost: frozenset[str],
    cordons: Mapping[str, str] = MappingProxyType({}),
    leases: Mapping[str, tuple[DeviceLease, ...]] = MappingProxyType({}),
) -> Inventory:
    """Builds the inventory that the controller receives."""
    return Inventory(
        node_name=identity.node_name,
        generation=generation,
        agent_version=identity.agent_version,
        boot_id=host.boot_id,
        driver_version=found.driver_version,
        cpu_milli=host.cpu_milli,
        memory_bytes=host.memory_bytes,
        pool=identity.pool,
        labels=identity.labels,
        gpus=mark_gpu_health(found.gpus, lost, cordons, leases),
        simulated=identity.simulated,
        access=found.access,
        links=found.links,
        topology=identity.topology,
        runs_processes=identity.runs_processes,
        model_data=identity.model_data,
        fence_after_s=identity.fence_after_s,
        sets_limits=identity.sets_limits,
        limits_before_starts=identity.sets_limits and identity.runs_processes,
    )


def mark_gpu_health(
    gpus: tuple[Gpu, ...],
    lost: frozenset[str],
    cordons: Mapping[str, str],
    leases: Mapping[str, tuple[DeviceLease, ...]],
) -> tuple[Gpu, ...]:
    """The devices, each marked as lost or not, with the reason why it should take no new work, and what others hold."""
    marks = [(gpu, gpu.uuid in lost, cordons.get(gpu.uuid, ""), leases.get(gpu.uuid, ())) for gpu in gpus]
    return tuple(
        gpu
        if (gpu.lost, gpu.cordon, gpu.leases) == (is_lost, cordon, held)
        else replace(gpu, lost=is_lost, cordon=cordon, leases=held)
        for gpu, is_lost, cordon, held in marks
    )


def read_each_gpu(device: DevicePort, uuids: tuple[str, ...]) -> GpuReadings:
    """One look at each device; may block."""
    looks = []
    for uuid in uuids:
        try:
            looks.append((uuid, device.read(uuid)))
        except DeviceError:
            looks.append((uuid, make_silent_readings(AbsenceReason.GPU_LOST)))
    return tuple(looks)


def look_for_faults(device: DevicePort, uuids: tuple[str, ...]) -> tuple[GpuReadings, tuple[DeviceEvent, ...]]:
    """One look at each device, and what the driver announced since the last time; may block."""
    try:
        events = device.take_events()
    except DeviceError:
        events = ()
    return read_each_gpu(device, uuids), events


def is_lost(readings: RawReadings) -> bool:
    """Returns whether a look says that the device is lost."""
    values = readings.values.values()
    return any(isinstance(value, Missing) and value.reason is AbsenceReason.GPU_LOST for value in values)


class BatchReader(Protocol):
    """Looks at many devices at once: a driver in another process answers them in one round trip."""

    def read_gpus(self, uuids: Sequence[str]) -> GpuReadings:
        """A quick look at each device; may block."""

    def read_extended(self, uuids: Sequence[str]) -> ExtendedReadings:
        """Reads all expensive values of each device; may block."""


class SequentialReader:
    """Looks at one device after the other, in this process."""

    def __init__(self, device: DevicePort) -> None:
        self._device = device

    def read_gpus(self, uuids: Sequence[str]) -> GpuReadings:
        """A quick look at each device."""
        return read_each_gpu(self._device, tuple(uuids))

    def read_extended(self, uuids: Sequence[str]) -> ExtendedReadings:
        """Reads all expensive values of each device."""
        return read_extended_readings(self._device, uuids)


def missing_gpu_readings(uuids: tuple[str, ...], reason: AbsenceReason) -> GpuReadings:
    """What to record where no device could be asked."""
    return tuple((uuid, make_silent_readings(reason)) for uuid in uuids)


APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
# After which what runs on the GPU has ended, whatever program it was.
FATAL_XIDS = frozenset({48, 62, 64, 74, 79, 94, 95, 119, 120, 140})
MAX_XIDS = 512
_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain the node, then reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
# Rises that are errors, with what they count.
_COUNTS = {
    Reading.ECC_UNCORRECTED_VOLATILE: "uncorrectable memory errors",
    Reading.REMAPPED_ROWS_UNCORRECTABLE: "memory rows remapped after uncorrectable errors",
}
_HUNG = "a call to the device did not return; it is probed at intervals: reset it, or reboot the node, if that lasts"
# States that call for action while they last.
_STATES = {
    Reading.ROW_REMAP_PENDING: "memory rows wait to be remapped; reset the GPU when it is free",
    Reading.ROW_REMAP_FAILED: "remapping memory rows failed; replace the GPU",
}


_FABRIC = {
    FabricState.NOT_STARTED: "has not started",
    FabricState.IN_PROGRESS: "is in progress",
    FabricState.FAILED: "has failed",
}


class HealthMonitor:
    """The devices of one node.

    A device of an NVSwitch system cannot be used until it is registered with the fabric: CUDA fails with error 802, whatever
    the program, so that a job would fail there at once, and the next one. Where a process computes on such a device
    nevertheless, CUDA works without a fabric on this node, and its state counts for nothing.
    """

    def __init__(self) -> None:
        # Whether the state of the fabric counts; an operator may say that it does not.
        self.needs_fabric = True
        # Processes on devices without a fabric, and when their state was last seen so, wall clock.
        self._bare_pids: dict[str, frozenset[int]] = {}
        self._bare_last_ns: dict[str, int] = {}
        self._last: dict[tuple[str, Reading], float] = {}
        self._hung: set[str] = set()
        # How often each XID came, and when last, wall clock; by device and code.
        self.xids: dict[tuple[str, int], int] = {}
        self.xid_last_ns: dict[tuple[str, int], int] = {}

    def on_device_events(self, events: tuple[DeviceEvent, ...], *, wall_ns: int) -> tuple[NodeEvent, ...]:
        """What the driver announced, as events for the controller."""
        told = []
        for event in events:
            if event.kind is DeviceEventKind.XID:
                told.append(self._xid(event, wall_ns))
            elif event.kind in (DeviceEventKind.ECC_DOUBLE_BIT, DeviceEventKind.GPU_UNAVAILABLE):
                detail = event.kind.value.replace("_", " ")
                told.append(_event(NodeEventKind.HEALTH, event.gpu_uuid, f"the driver announced: {detail}", wall_ns))
            elif event.kind is DeviceEventKind.HUNG:
                self._hung.add(event.gpu_uuid)
                told.append(_event(NodeEventKind.GPU_HUNG, event.gpu_uuid, _HUNG, wall_ns))
            elif event.kind is DeviceEventKind.ANSWERS:
                self._hung.discard(event.gpu_uuid)
                told.append(_event(NodeEventKind.HEALTH, event.gpu_uuid, "over: the device answers again", wall_ns))
            elif event.kind is DeviceEventKind.MIG_CHANGED:
                detail = "the driver announced another MIG layout"
                told.append(_event(NodeEventKind.LAYOUT_CHANGED, event.gpu_uuid, detail, wall_ns))
        return tuple(told)

    def cordons(self) -> Mapping[str, str]:
        """Devices that should take no new work, and why.

        Those that hang, and what only a reset or a repair can mend.
        """
        found: dict[str, str] = dict.fromkeys(self._hung, _HUNG)
        for (uuid, reading), value in self._last.items():
            if value and reading is Reading.RECOVERY_ACTION:
                found[uuid] = _describe_change(reading, 0.0, value)
            elif value and reading is Reading.ROW_REMAP_FAILED:
                found.setdefault(uuid, _STATES[reading])
            elif reading is Reading.FABRIC_STATE and self.needs_fabric and value in _FABRIC:
                found.setdefault(uuid, _describe_fabric(value))
        return found

    @property
    def hung_gpus(self) -> frozenset[str]:
        """Devices that hang."""
        return frozenset(self._hung)

    def find_fault(self, uuid: str, *, since_ns: int) -> str:
        """Returns what ended the work on a device since a moment of the wall clock; empty if that was not the device."""
        if uuid in self._hung:
            return "a call to it did not return"
        is_bare = uuid in self._bare_pids or self._bare_last_ns.get(uuid, -1) >= since_ns
        if self.needs_fabric and is_bare:
            return "it was not registered with its NVSwitch fabric"
        codes = (code for (of, code), at_ns in self.xid_last_ns.items() if of == uuid and at_ns >= since_ns)
        fatal = min(FATAL_XIDS.intersection(codes), default=None)
        return "" if fatal is None else f"XID {fatal}"

    def _xid(self, event: DeviceEvent, wall_ns: int) -> NodeEvent:
        key = (event.gpu_uuid, event.code)
        if key in self.xids or len(self.xids) < MAX_XIDS:
            self.xids[key] = self.xids.get(key, 0) + 1
            self.xid_last_ns[key] = wall_ns
        fault = "an application's error" if event.code in APPLICATION_XIDS else "an error of device, driver or bus"
        where = "" if event.gpu_instance_id is None else f" in GPU instance {event.gpu_instance_id}"
        return _event(NodeEventKind.XID, event.gpu_uuid, f"XID {event.code}{where}: {fault}", wall_ns)

    def on_extended_readings(
        self,
        gpus: Mapping[str, Mapping[Reading, ReadingValue]],
        processes: Mapping[str, Collection[GpuProcess] | None] = MappingProxyType({}),
        *,
        wall_ns: int,
    ) -> tuple[NodeEvent, ...]:
        """What the slow readings, and the processes beside them, reveal against the look before."""
        told = []
        for uuid, values in gpus.items():
            self._observe_fabric(uuid, values.get(Reading.FABRIC_STATE), processes.get(uuid) or (), wall_ns)
            for reading in (*_COUNTS, *_STATES, Reading.RECOVERY_ACTION, Reading.FABRIC_STATE):
                value = values.get(reading)
                if value is None or isinstance(value, Missing):
                    continue
                before = self._last.get((uuid, reading))
                self._last[uuid, reading] = value
                detail = _describe_change(reading, before, value)
                if detail:
                    told.append(_event(NodeEventKind.HEALTH, uuid, detail, wall_ns))
        for key in [key for key in self._last if key[0] not in gpus]:
            del self._last[key]
        return tuple(told)

    def _observe_fabric(
        self, uuid: str, state: ReadingValue | None, processes: Iterable[GpuProcess], wall_ns: int
    ) -> None:
        if state not in _FABRIC:
            self._bare_pids.pop(uuid, None)
            return
        pids = frozenset(one.pid for one in processes if one.kind is ProcessKind.COMPUTE)
        before = self._bare_pids.get(uuid)
        self._bare_pids[uuid], self._bare_last_ns[uuid] = pids, wall_ns
        if before is not None and pids - before:
            self.needs_fabric = False


def _describe_fabric(state: float) -> str:
    return (
        f"its registration with the NVSwitch fabric {_FABRIC[FabricState(int(state))]}, and CUDA fails with error 802 until it "
        "is completed: see systemctl status nvidia-fabricmanager"
    )


def _describe_change(reading: Reading, before: float | None, value: float) -> str:
    """The sentence for this change, empty where there is nothing to tell."""
    if reading in _COUNTS:
        rise = 0.0 if before is None else value - before
        return f"{rise:.0f} new {_COUNTS[reading]}, {value:.0f} in all" if rise > 0 else ""
    if reading is Reading.FABRIC_STATE:
        if value in _FABRIC:
            return _describe_fabric(value) if value != before else ""
        return "over: it is registered with its NVSwitch fabric" if before in _FABRIC else ""
    if value == (before or 0.0):
        return ""
    if reading in _STATES:
        return _STATES[reading] if value else f"over: {_STATES[reading].partition(';')[0]}"
    if not value:
        return "the driver no longer requests recovery"
    action = _ACTIONS.get(int(value), f"recovery action {value:.0f}")
    return f"the driver requests: {action}" if int(value) in _ACTIONS else f"the driver requests {action}"


def _event(kind: NodeEventKind, uuid: str, detail: str, wall_ns: int) -> NodeEvent:
    return NodeEvent(kind=kind, time_ns=max(0, wall_ns), gpu_uuid=uuid, detail=detail)


def map_job_holds(jobs: Iterable[HandedJob], gpus: Iterable[Gpu]) -> dict[str, JobHold]:
    """Returns what Slurm's jobs ask of GPUs, by UUID.

    A limit is one of a whole GPU, so it counts only for a job that alone holds the GPU. Clocks are the job's already if one
    of the jobs on the GPU sets them. A device that this node does not have is passed over.
    """
    devices = tuple(gpus)
    holders: dict[str, list[tuple[HandedJob, bool]]] = {}
    for job in jobs:
        for name in job.devices:
            place = find_mapped_device(name, devices) or find_device(name, devices)
            if place is not None:
                holders.setdefault(place.gpu_uuid, []).append((job, place.gpu_instance_id is None))
    holds: dict[str, JobHold] = {}
    for uuid, found in holders.items():
        owner = next((job for job, _ in found if job.gpu_freq), None)
        (first, is_whole) = found[0]
        is_alone = len(found) == 1 and is_whole
        holds[uuid] = JobHold(
            job=(owner or first).job,
            workload=first.workload_id if is_alone else "",
            limit_w=first.power_limit_w if is_alone else None,
            owns_clocks=owner is not None,
        )
    return holds
