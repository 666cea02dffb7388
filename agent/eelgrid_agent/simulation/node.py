"""A simulated node behind the device port: the fleet's way to its devices, without NVML in between.

It answers exactly as the NVML adapter does over the same devices, which one
contract suite holds both to: a device that was never seen answering is not
listed, one that was stays listed while it is lost. One thread uses it.
"""

from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from uuid import UUID, uuid5

from eelgrid_agent.device import (
    FAST_READINGS,
    SLOW_READINGS,
    DeviceEvent,
    DeviceTimeout,
    DriverUnavailable,
    GpuLink,
    GpuLost,
    GpuProcess,
    InstanceReadings,
    Missing,
    RawReadings,
    UnknownGpu,
    Value,
)
from eelgrid_agent.listing import with_silent
from eelgrid_agent.simulation.faults import Faults
from eelgrid_agent.simulation.gpu import Health, SimGpu
from eelgrid_agent.simulation.node_control import NodeControl
from eelgrid_agent.simulation.node_sensors import NodeSensors
from eelgrid_agent.simulation.operations import Announcement, Operations
from eelgrid_agent.simulation.sensors import POWER_FIELDS_SINCE, RESERVED_SINCE, Sensors, announced_by
from eelgrid_agent.simulation.spec import GpuLoad, NodeSpec, product_of
from eelgrid_protos.catalogue import load
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Gpu, Reading

__all__ = ["SimulatedNode"]

_SPACE = UUID("5d9ce3a4-8e0f-5c36-9f0a-0a6bd1f6a3a5")
_NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)


def _silent(reason: AbsenceReason) -> RawReadings:
    missing = Missing(reason)
    values: dict[Reading, Value] = dict.fromkeys(FAST_READINGS, missing)
    del values[Reading.ENERGY_J]
    return RawReadings(energy_counter_j=missing, values=MappingProxyType(values))


_LOST = _silent(AbsenceReason.GPU_LOST)
_TIMED_OUT = _silent(AbsenceReason.TIMED_OUT)
_SLOW_LOST: Mapping[Reading, Value] = MappingProxyType(dict.fromkeys(SLOW_READINGS, Missing(AbsenceReason.GPU_LOST)))
_SLOW_TIMED_OUT: Mapping[Reading, Value] = MappingProxyType(
    dict.fromkeys(SLOW_READINGS, Missing(AbsenceReason.TIMED_OUT))
)


class SimulatedNode(NodeControl):
    """A node's simulated devices.

    `stall` is what a call to a hung device does before it times out: nothing
    here, and a wait where a test wants to see a caller's deadline.
    """

    def __init__(
        self,
        spec: NodeSpec,
        *,
        monotonic_ns: Callable[[], int],
        seed: int,
        stall: Callable[[], None] = lambda: None,
    ) -> None:
        catalogue = load()
        spec.check(catalogue)
        self.spec = spec
        self.monotonic_ns = monotonic_ns
        self.stall = stall
        self.driver_loaded = True
        now_ns = monotonic_ns()
        self.devices: tuple[SimGpu, ...] = tuple(
            SimGpu(
                gpu,
                product_of(gpu, catalogue),
                uuid=uuid5(_SPACE, f"{seed}/{spec.node_name}/{index}"),
                index=index,
                now_ns=now_ns,
                branch=spec.driver_branch,
            )
            for index, gpu in enumerate(spec.gpus)
        )
        self.operations = Operations(monotonic_ns, branch=spec.driver_branch)
        self.faults = Faults(self)
        self._by_uuid = {gpu.uuid: gpu for gpu in self.devices}
        self._sensors = NodeSensors(self.devices, branch=spec.driver_branch)
        self._listening = False
        self._fields = spec.driver_branch >= POWER_FIELDS_SINCE
        self._reserved_apart = spec.driver_branch >= RESERVED_SINCE
        self._seen: dict[str, Gpu] = {}

    def device(self, uuid: str) -> SimGpu:
        """The core of one device, seen or not; raises UnknownGpu."""
        try:
            return self._by_uuid[uuid]
        except KeyError:
            raise UnknownGpu(f"{self.spec.node_name} has no GPU {uuid}; list its GPUs") from None

    @property
    def announcements(self) -> deque[Announcement]:
        """What the driver told and nobody fetched yet, oldest first."""
        return self.operations.announcements

    def set_load(self, gpu_uuid: str, load: GpuLoad) -> None:
        """What runs on a device from now on."""
        self.device(gpu_uuid).set_load(load, self.monotonic_ns())

    def set_instance_load(self, gpu_uuid: str, instance_id: int, load: GpuLoad) -> None:
        """What runs on a GPU instance from now on; raises SpecError."""
        self.device(gpu_uuid).set_instance_load(instance_id, load, self.monotonic_ns())

    def start_process(self, gpu_uuid: str, process: GpuProcess) -> None:
        """A process opens the device or an instance; what it says of itself is shown, the rest is its part of the load."""
        gpu = self.device(gpu_uuid)
        gpu.mig.holds[process.pid] = (process.gpu_instance_id, process.compute_instance_id)
        self.sensors(gpu).details[process.pid] = process

    def end_process(self, gpu_uuid: str, pid: int) -> None:
        """That process ends."""
        gpu = self.device(gpu_uuid)
        gpu.mig.holds.pop(pid, None)
        self.sensors(gpu).details.pop(pid, None)

    def sensors(self, gpu: SimGpu) -> Sensors:
        """The slower sensors of one device."""
        return self._sensors.of(gpu)

    def limit_power(self, gpu_uuid: str, limit_w: float | None) -> None:
        """The device's power limit from now on; None is its default."""
        self.device(gpu_uuid).limit_power(limit_w, self.monotonic_ns())

    # The device port

    def driver_version(self) -> str:
        """The driver's version; raises DriverUnavailable."""
        if not self.driver_loaded:
            raise DriverUnavailable(f"{self.spec.node_name}: the simulated driver is not loaded; load it")
        return self.spec.driver_version

    def gpus(self) -> tuple[Gpu, ...]:
        """Every device that answers or answered before, by index; raises DriverUnavailable."""
        self.driver_version()
        found: dict[str, Gpu] = {}
        for gpu in self.devices:
            self._take_time("gpus")
            if gpu.health is Health.OK:
                found[gpu.uuid] = gpu.identity
            elif gpu.health is Health.HUNG:
                self.stall()
        self._seen = with_silent(found, self._seen)
        return tuple(sorted(self._seen.values(), key=lambda gpu: gpu.index))

    def access(self) -> AccessLevel:
        """The rights that the simulation gives."""
        self._listed()
        return self.operations.rights

    def read(self, uuid: str) -> RawReadings:
        """One look at one device."""
        gpu = self._by_uuid[uuid] if uuid in self._seen else self._found(uuid)
        if self.operations.pause is not None:
            self.operations.pause("read")
        if gpu.health is not Health.OK or not self.driver_loaded:
            return _TIMED_OUT if self._stalled(gpu) else _LOST
        now_ns = self.monotonic_ns()
        instant_mw = gpu.power_instant_mw(now_ns) if self._fields else None
        usage_mw = gpu.power_usage_mw(now_ns) if instant_mw is None or gpu.product.sensor.averaged else None
        energy_mj, percents = gpu.energy_mj(now_ns), gpu.percents
        return RawReadings(
            energy_counter_j=_NOT_SUPPORTED if energy_mj is None else energy_mj / 1000.0,
            values={
                Reading.POWER_W: (usage_mw or 0) / 1000.0 if instant_mw is None else instant_mw / 1000.0,
                Reading.UTILIZATION_RATIO: _NOT_SUPPORTED if percents is None else percents[0] / 100.0,
                Reading.MEMORY_USED_BYTES: float(
                    gpu.memory_used_bytes if self._reserved_apart else gpu.memory_held_bytes
                ),
                Reading.SM_CLOCK_MHZ: float(gpu.sm_clock_mhz),
                Reading.MEMORY_CLOCK_MHZ: float(gpu.memory_clock_mhz),
                Reading.TEMPERATURE_C: float(gpu.temperature_c(now_ns)),
                Reading.POWER_LIMIT_W: gpu.enforced_mw / 1000.0,
                Reading.EVENT_REASONS_MASK: float(gpu.event_reasons),
                Reading.POWER_AVERAGE_W: _NOT_SUPPORTED
                if instant_mw is None or usage_mw is None
                else usage_mw / 1000.0,
                Reading.MEMORY_UTILIZATION_RATIO: _NOT_SUPPORTED if percents is None else percents[1] / 100.0,
            },
        )

    def read_slow(self, uuid: str) -> Mapping[Reading, Value]:
        """What is dear, or seldom different."""
        gpu = self._found(uuid)
        self._take_time("read_slow")
        if gpu.health is not Health.OK or not self.driver_loaded:
            return _SLOW_TIMED_OUT if self._stalled(gpu) else _SLOW_LOST
        return self._sensors.slow(gpu, self.monotonic_ns(), self.operations.rights)

    def read_instances(self, uuid: str) -> tuple[InstanceReadings, ...]:
        """A look at each GPU instance, by id."""
        return self._sensors.instances(self._answering(uuid, "read_instances"), self.monotonic_ns())

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who has a context on the device."""
        gpu = self._answering(uuid, "processes")
        return self._sensors.processes(gpu, self.monotonic_ns(), self.operations.rights)

    def topology(self) -> tuple[GpuLink, ...]:
        """Every pair of the devices that answer."""
        listed = [self._by_uuid[gpu.uuid] for gpu in self.gpus()]
        return self._sensors.topology([gpu for gpu in listed if gpu.health is Health.OK])

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """What was announced since the call before; the first call begins to listen."""
        self._listed()
        if not self._listening:
            self._listening = True
            self.announcements.clear()
        events = []
        while self.announcements:
            told = self.announcements.popleft()
            if told.kind in announced_by(self.spec.driver_branch):
                events.append(DeviceEvent(kind=told.kind, gpu_uuid=told.uuid, code=told.code, gpu_instance_id=told.gi))
        return tuple(events)

    def close(self) -> None:
        """Forgets which devices were seen, and listens no more."""
        self._seen.clear()
        self._sensors.forget()
        self._listening = False

    def _listed(self) -> None:
        """Sees that the driver is there and that devices were listed once."""
        self.driver_version()
        if not self._seen:
            self.gpus()

    def _take_time(self, call: str) -> None:
        """What a call to the driver takes, where somebody made it slow."""
        if self.operations.pause is not None:
            self.operations.pause(call)

    def _found(self, uuid: str) -> SimGpu:
        """A device that was seen answering; raises UnknownGpu."""
        if uuid not in self._seen:
            self.gpus()
            if uuid not in self._seen:
                raise UnknownGpu(f"{self.spec.node_name} has no GPU {uuid}; list its GPUs")
        return self._by_uuid[uuid]

    def _stalled(self, gpu: SimGpu) -> bool:
        """Whether a silent device is hung rather than lost; its caller waits."""
        if gpu.health is not Health.HUNG or not self.driver_loaded:
            return False
        self.stall()
        return True

    def _answering(self, uuid: str, call: str) -> SimGpu:
        """A device that answers."""
        gpu = self._found(uuid)
        self._take_time(call)
        self.driver_version()
        if gpu.health is not Health.OK:
            if self._stalled(gpu):
                raise DeviceTimeout(f"{uuid} did not answer in time; wait, or reset it")
            raise GpuLost(f"{uuid} answers nothing any more; reset it or reboot the node")
        return gpu
