"""A simulated node behind the device port, and the faults that can be injected into it.

It answers as the NVML adapter does; one contract suite checks both. One thread uses it.
"""

from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from uuid import UUID

from eelgrid_agent.devices.port import (
    SLOW_READINGS,
    DeviceEvent,
    DeviceEventKind,
    DeviceLink,
    DeviceTimeout,
    DriverUnavailable,
    FabricState,
    GpuLostError,
    GpuProcess,
    InstanceReadings,
    Missing,
    RawReadings,
    ReadingValue,
    UnknownGpu,
    include_silent_gpus,
    make_silent_readings,
)
from eelgrid_agent.simulation.gpu import LoadBehavior, SimGpu, SimHealth
from eelgrid_agent.simulation.mig import DriverRefusal, DriverRefused, make_uuid
from eelgrid_agent.simulation.operations import DeviceOperations, DriverAnnouncement, OperationKind, SimulatedControl
from eelgrid_agent.simulation.sensors import (
    POWER_FIELDS_SINCE,
    RESERVED_SINCE,
    DeviceSensors,
    SimulatedNodeReadings,
    list_announced_events,
)
from eelgrid_agent.simulation.spec import GpuLoad, NodeSpec, SpecError, find_product
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Gpu, Reading

_CLIENT = "nvidia-persistenced"
# The recovery action that asks for a reset of the device.
_RECOVER_BY_RESET = 1


class FaultInjector:
    """One node's."""

    def __init__(self, node: "SimulatedNode") -> None:
        self._node = node

    # The device and its counters

    def lose_gpu(self, uuid: str) -> None:
        """The device falls off the bus."""
        self._node.get_device(uuid).lose(self._now_ns)

    def restore_gpu(self, uuid: str) -> None:
        """A lost or hung device answers again."""
        self._node.get_device(uuid).restore(self._now_ns)

    def hang_gpu(self, uuid: str) -> None:
        """Calls to the device come to nothing."""
        self._node.get_device(uuid).hang()

    def reset_counter(self, uuid: str) -> None:
        """The energy counter starts from zero."""
        self._node.get_device(uuid).reset_counter(self._now_ns)

    def reset_gpu(self, uuid: str) -> None:
        """Resets the device: its clients and processes are gone, and a pending MIG mode applies."""
        gpu = self._node.get_device(uuid)
        gpu.mig.clients.clear()
        gpu.restore(self._now_ns)
        gpu.reset(self._now_ns)

    def announce_xid(self, uuid: str, code: int, instance_id: int | None = None) -> None:
        """Announces an XID to all listeners."""
        self._node.operations.announce_event(DeviceEventKind.XID, self._node.get_device(uuid), code, instance_id)

    def announce(self, uuid: str, kind: DeviceEventKind, code: int = _RECOVER_BY_RESET) -> None:
        """Announces another event to all listeners."""
        self._node.operations.announce_event(kind, self._node.get_device(uuid), code)

    def fail_memory(self, uuid: str, *, failed: bool = True) -> None:
        """Remapping a row of memory fails, which only another part mends; False is that part."""
        self._node.get_device(uuid).wear.remap_failed = failed

    def set_fabric_state(self, uuid: str, state: int) -> None:
        """The state of the device's registration with its NVSwitch fabric, as `FabricState` counts them."""
        if not FabricState.NOT_STARTED <= state <= FabricState.FAILED:
            raise SpecError("state", f"{state} is not in [1, 4]; give 3 for completed")
        self._node.get_device(uuid).wear.fabric_state = state

    def set_behavior(self, uuid: str, conduct: LoadBehavior) -> None:
        """What the work on the device does with it: computes, holds it idle, or spins for a rank that does not come."""
        self._node.get_device(uuid).set_behavior(conduct, self._now_ns)

    def skew_power_sensor(self, uuid: str, gain: float) -> None:
        """The power sensor reads this many times the truth."""
        if not 0.1 <= gain <= 10.0:
            raise SpecError("gain", f"{gain:g} is not in [0.1, 10]; give 1 for a true sensor")
        self._node.get_device(uuid).skew_power_sensor(gain, self._now_ns)

    def request_mode(self, uuid: str, *, enabled: bool) -> None:
        """Requests a MIG mode as nvidia-smi -mig does; where a reset is needed, it stays pending."""
        self._node.operations.set_mode(self._node.get_device(uuid), enabled=enabled)

    def cap_power(self, uuid: str, cap_w: float | None) -> None:
        """Lowers the enforced limit out of band; None removes the cap."""
        if cap_w is not None and cap_w <= 0.0:
            raise SpecError("cap_w", f"{cap_w:g} W is not a cap; give more than 0 W, or None for none")
        self._node.get_device(uuid).cap_power(cap_w, self._now_ns)

    def limit_power(self, uuid: str, limit_w: float | None) -> None:
        """Sets the limit as another program does (nvidia-smi -pl); None is the default."""
        self._node.limit_power(uuid, limit_w)

    # The driver and the machine

    def unload_driver(self) -> None:
        """Unloads the driver, which ends everything that runs."""
        self._node.driver_loaded = False
        for gpu in self._node.devices:
            gpu.mig.clients.clear()
            gpu.mig.holds.clear()
            gpu.set_load(GpuLoad(), self._now_ns)

    def load_driver(self) -> None:
        """The driver comes back: counters from zero, settings as at first, instances and some MIG modes lost."""
        if self._node.driver_loaded:
            return
        self._node.driver_loaded = True
        for gpu in self._node.devices:
            gpu.reload(self._now_ns)

    def reload_driver(self) -> None:
        """Unloads and loads the driver."""
        self.unload_driver()
        self.load_driver()

    def reboot_node(self) -> None:
        """Reboots the machine; lost devices return with it."""
        self.unload_driver()
        self._node.driver_loaded = True
        for gpu in self._node.devices:
            gpu.restore(self._now_ns)
            gpu.reload(self._now_ns, reboot=True)
        self._node.operations.announcements.clear()

    def renumber_gpus(self) -> None:
        """The driver counts the devices the other way round, as it may after a reset or a reboot."""
        for index, gpu in enumerate(sorted(self._node.devices, key=lambda gpu: -gpu.identity.index)):
            gpu.set_index(index)

    # The rights and the calls

    def set_rights(self, level: AccessLevel) -> None:
        """The caller may do this much from now on; ROOT gives everything back."""
        self._node.operations.rights = level

    def slow_calls(self, pause: Callable[[str], None] | None) -> None:
        """Every call to a device runs `pause` first (a wait, or a clock moved on) with its name; None ends it."""
        self._node.operations.pause = pause

    def refuse_next(self, uuid: str, act: OperationKind, why: DriverRefusal, times: int = 1) -> None:
        """The next such acts are refused for no reason that can be seen."""
        self._node.operations.refuse_next(self._gpu(uuid).identity.uuid, act, why, times)

    def refuse_instance_once(self, uuid: str) -> None:
        """The next GPU instance finds INSUFFICIENT_RESOURCES, though there is room."""
        self.refuse_next(uuid, OperationKind.CREATE_INSTANCE, DriverRefusal.NO_ROOM)

    def fail_compute_once(self, uuid: str) -> None:
        """The next GPU instance is made, and its compute instance is not."""
        self.refuse_next(uuid, OperationKind.CREATE_COMPUTE, DriverRefusal.NO_ROOM)

    # Others on the device

    def add_foreign_client(self, uuid: str, name: str = _CLIENT) -> None:
        """Another program holds the device, which blocks a change of MIG mode."""
        self._gpu(uuid).mig.clients.add(name)

    def remove_foreign_client(self, uuid: str, name: str = _CLIENT) -> None:
        """Makes that program release the device."""
        self._gpu(uuid).mig.clients.discard(name)

    def start_process(self, uuid: str, pid: int, instance_id: int | None = None, compute_id: int | None = None) -> None:
        """A process runs on the device, or on an instance of it."""
        self._gpu(uuid).mig.holds[pid] = (instance_id, compute_id)

    def end_process(self, uuid: str, pid: int) -> None:
        """That process ends."""
        self._gpu(uuid).mig.holds.pop(pid, None)

    def allow_mode_reset(self, uuid: str, *, works: bool) -> None:
        """Whether a change of MIG mode resets the device by itself where it needs one.

        In a virtual machine it cannot.
        """
        self._gpu(uuid).mig.resets_itself = works

    def create_foreign_instance(self, uuid: str, profile_id: int, start: int, *, compute: bool = True) -> int:
        """Creates a GPU instance with one compute instance over all of it, as another program does; returns its id."""
        gpu = self._gpu(uuid)
        try:
            instance = gpu.mig.create_instance(profile_id, start)
        except DriverRefused as refused:
            problem = f"profile {profile_id} at {start} does not fit ({refused}); choose another"
            raise SpecError("start", problem) from None
        if compute:
            gpu.mig.create_compute(instance.id, instance.profile.whole.id)
        gpu.apply_mig_change(self._now_ns)
        self._node.operations.announce_event(DeviceEventKind.MIG_CHANGED, gpu, gi=instance.id)
        return instance.id

    def destroy_foreign_instance(self, uuid: str, instance_id: int) -> None:
        """Removes a GPU instance with its contents, as another program does; the processes that held it die."""
        gpu = self._gpu(uuid)
        held = [pid for pid, (instance, _) in gpu.mig.holds.items() if instance == instance_id]
        for pid in held:
            del gpu.mig.holds[pid]
        try:
            for number in list(gpu.mig.get_instance(instance_id).compute):
                gpu.mig.destroy_compute(instance_id, number)
            gpu.mig.destroy_instance(instance_id)
        except DriverRefused:
            raise SpecError("instance_id", f"there is no GPU instance {instance_id}; list them") from None
        gpu.apply_mig_change(self._now_ns)
        self._node.operations.announce_event(DeviceEventKind.MIG_CHANGED, gpu, gi=instance_id)

    @property
    def _now_ns(self) -> int:
        return self._node.monotonic_ns()

    def _gpu(self, uuid: str) -> SimGpu:
        return self._node.get_device(uuid)


_SPACE = UUID("5d9ce3a4-8e0f-5c36-9f0a-0a6bd1f6a3a5")
_NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)


_LOST = make_silent_readings(AbsenceReason.GPU_LOST)
_TIMED_OUT = make_silent_readings(AbsenceReason.TIMED_OUT)
_SLOW_LOST: Mapping[Reading, ReadingValue] = MappingProxyType(
    dict.fromkeys(SLOW_READINGS, Missing(AbsenceReason.GPU_LOST))
)
_SLOW_TIMED_OUT: Mapping[Reading, ReadingValue] = MappingProxyType(
    dict.fromkeys(SLOW_READINGS, Missing(AbsenceReason.TIMED_OUT))
)


class SimulatedNode(SimulatedControl):
    """A node's simulated devices.

    `stall` is what a call to a hung device does before it times out: nothing
    here, and a wait where a test wants to see a caller's deadline.
    """

    def __init__(
        self, spec: NodeSpec, *, monotonic_ns: Callable[[], int], seed: int, stall: Callable[[], None] = lambda: None
    ) -> None:
        catalogue = load_catalogue()
        spec.check(catalogue)
        self.spec = spec
        self.monotonic_ns = monotonic_ns
        self.stall = stall
        self.driver_loaded = True
        now_ns = monotonic_ns()
        self.devices: tuple[SimGpu, ...] = tuple(
            SimGpu(
                gpu,
                find_product(gpu, catalogue),
                uuid=make_uuid(_SPACE, f"{seed}/{spec.node_name}/{index}"),
                index=index,
                now_ns=now_ns,
                branch=spec.driver_branch,
            )
            for index, gpu in enumerate(spec.gpus)
        )
        self.operations = DeviceOperations(monotonic_ns, branch=spec.driver_branch)
        self.faults = FaultInjector(self)
        self._by_uuid = {gpu.uuid: gpu for gpu in self.devices}
        self._sensors = SimulatedNodeReadings(self.devices, branch=spec.driver_branch)
        self._listening = False
        self._fields = spec.driver_branch >= POWER_FIELDS_SINCE
        self._reserved_apart = spec.driver_branch >= RESERVED_SINCE
        self._seen: dict[str, Gpu] = {}

    def get_device(self, uuid: str) -> SimGpu:
        """The core of one device, seen or not; raises UnknownGpu."""
        try:
            return self._by_uuid[uuid]
        except KeyError:
            raise UnknownGpu(f"{self.spec.node_name} has no GPU {uuid}; list its GPUs") from None

    @property
    def announcements(self) -> deque[DriverAnnouncement]:
        """Announced events that were not fetched yet, oldest first."""
        return self.operations.announcements

    def set_load(self, gpu_uuid: str, load: GpuLoad) -> None:
        """What runs on a device from now on."""
        self.get_device(gpu_uuid).set_load(load, self.monotonic_ns())

    def set_instance_load(self, gpu_uuid: str, instance_id: int, load: GpuLoad) -> None:
        """What runs on a GPU instance from now on; raises SpecError."""
        self.get_device(gpu_uuid).set_instance_load(instance_id, load, self.monotonic_ns())

    def start_process(self, gpu_uuid: str, process: GpuProcess) -> None:
        """Opens the device or an instance for a process.

        Reported values are shown, the rest is its part of the load.
        """
        gpu = self.get_device(gpu_uuid)
        gpu.mig.holds[process.pid] = (process.gpu_instance_id, process.compute_instance_id)
        self.get_sensors(gpu).details[process.pid] = process

    def end_process(self, gpu_uuid: str, pid: int) -> None:
        """That process ends."""
        gpu = self.get_device(gpu_uuid)
        gpu.mig.holds.pop(pid, None)
        self.get_sensors(gpu).details.pop(pid, None)

    def get_sensors(self, gpu: SimGpu) -> DeviceSensors:
        """The slower sensors of one device."""
        return self._sensors.get_sensors(gpu)

    def limit_power(self, gpu_uuid: str, limit_w: float | None) -> None:
        """The device's power limit from now on; None is its default."""
        self.get_device(gpu_uuid).limit_power(limit_w, self.monotonic_ns())

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
            self._delay_call("gpus")
            if gpu.health is SimHealth.OK:
                found[gpu.uuid] = gpu.identity
            elif gpu.health is SimHealth.HUNG:
                self.stall()
        self._seen = include_silent_gpus(found, self._seen)
        return tuple(sorted(self._seen.values(), key=lambda gpu: gpu.index))

    def access(self) -> AccessLevel:
        """The rights that the simulation gives."""
        self._require_listing()
        return self.operations.rights

    def read(self, uuid: str) -> RawReadings:
        """One look at one device."""
        gpu = self._by_uuid[uuid] if uuid in self._seen else self._found(uuid)
        if self.operations.pause is not None:
            self.operations.pause("read")
        if gpu.health is not SimHealth.OK or not self.driver_loaded:
            return _TIMED_OUT if self._is_hung(gpu) else _LOST
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

    def read_slow(self, uuid: str) -> Mapping[Reading, ReadingValue]:
        """Reads what is expensive or changes seldom."""
        gpu = self._found(uuid)
        self._delay_call("read_slow")
        if gpu.health is not SimHealth.OK or not self.driver_loaded:
            return _SLOW_TIMED_OUT if self._is_hung(gpu) else _SLOW_LOST
        return self._sensors.read_slow(gpu, self.monotonic_ns(), self.operations.rights)

    def read_instances(self, uuid: str) -> tuple[InstanceReadings, ...]:
        """A look at each GPU instance, by id."""
        return self._sensors.read_instances(self._answering(uuid, "read_instances"), self.monotonic_ns())

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who has a context on the device."""
        gpu = self._answering(uuid, "processes")
        return self._sensors.read_processes(gpu, self.monotonic_ns(), self.operations.rights)

    def topology(self) -> tuple[DeviceLink, ...]:
        """Every pair of the devices that answer."""
        listed = [self._by_uuid[gpu.uuid] for gpu in self.gpus()]
        return self._sensors.read_topology([gpu for gpu in listed if gpu.health is SimHealth.OK])

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """Returns the events since the call before; the first call starts listening."""
        self._require_listing()
        if not self._listening:
            self._listening = True
            self.announcements.clear()
        events = []
        while self.announcements:
            told = self.announcements.popleft()
            if told.kind in list_announced_events(self.spec.driver_branch):
                events.append(DeviceEvent(kind=told.kind, gpu_uuid=told.uuid, code=told.code, gpu_instance_id=told.gi))
        return tuple(events)

    def close(self) -> None:
        """Forgets which devices were seen, and listens no more."""
        self._seen.clear()
        self._sensors.reset()
        self._listening = False

    def _require_listing(self) -> None:
        """Sees that the driver is there and that devices were listed once."""
        self.driver_version()
        if not self._seen:
            self.gpus()

    def _delay_call(self, call: str) -> None:
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

    def _is_hung(self, gpu: SimGpu) -> bool:
        """Whether a silent device is hung rather than lost; its caller waits."""
        if gpu.health is not SimHealth.HUNG or not self.driver_loaded:
            return False
        self.stall()
        return True

    def _answering(self, uuid: str, call: str) -> SimGpu:
        """A device that answers."""
        gpu = self._found(uuid)
        self._delay_call(call)
        self.driver_version()
        if gpu.health is not SimHealth.OK:
            if self._is_hung(gpu):
                raise DeviceTimeout(f"{uuid} did not answer in time; wait, or reset it")
            raise GpuLostError(f"{uuid} answers nothing any more; reset it or reboot the node")
        return gpu
