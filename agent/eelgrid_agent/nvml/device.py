"""The device port over NVML: what is asked in which order, and what becomes of a device that does not answer.

NVML's milliwatts, millijoules, per cents, KiB and MiB become SI in the
collectors, and its errors become absences with a reason or a DeviceError. One
thread uses it, for NVML serialises calls anyway; one session and its handles
are kept.

A lost device ends a look at once, as does one that times out. What was seen
once stays listed by `gpus()`, which opens a new session when a device was
lost, since a session does not see a device come back. Devices are told apart
by UUID and never by index, which changes with resets and reboots.
"""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import pynvml

from eelgrid_agent.device import (
    FAST_READINGS,
    INSTANCE_READINGS,
    SLOW_READINGS,
    DeviceEvent,
    DriverUnavailable,
    GpuLink,
    GpuProcess,
    InstanceReadings,
    RawReadings,
    UnknownGpu,
    Value,
)
from eelgrid_agent.listing import with_silent
from eelgrid_agent.nvml.access import access_by_driver, rights_of_process
from eelgrid_agent.nvml.activity import Activity
from eelgrid_agent.nvml.events import Events
from eelgrid_agent.nvml.identity import identify
from eelgrid_agent.nvml.links import topology
from eelgrid_agent.nvml.mig import InstanceReader, mig_devices
from eelgrid_agent.nvml.processes import Processes
from eelgrid_agent.nvml.quick import quick_sources
from eelgrid_agent.nvml.session import MISSING, SESSION_GONE, SILENT, Session, ask, device_error, missing, reason_of
from eelgrid_agent.nvml.slow import slow_sources
from eelgrid_agent.nvml.ways import Ways, plausible
from eelgrid_protos.catalogue import load
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, AbsenceReason, AccessLevel, Gpu, GpuInstance, Reading

__all__ = ["NvmlDevice"]

_Answer = TypeVar("_Answer")
_QUICK = tuple(reading for reading in FAST_READINGS if reading is not Reading.ENERGY_J)
# Answers of a handle whose session has not seen the device come back.
_STALE = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNINITIALIZED})


class NvmlDevice:
    """The devices of this machine.

    `models` renames products, by the name that NVML prints, to what workloads
    ask for; by default that is the catalogue's name, or the product's own.
    `visit` is called with a device's index before a listing asks it, and passes
    it over by saying False: a device that hangs must not hang the others.
    `rights` is what the kernel would let this process do.
    """

    def __init__(
        self,
        models: Mapping[str, str] | None = None,
        *,
        visit: Callable[[int], bool] = lambda _index: True,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        rights: Callable[[], AccessLevel] = rights_of_process,
    ) -> None:
        self._visit = visit
        self._models = dict(models or {})
        self._rights = rights
        self._session = Session()
        self._seen: dict[str, Gpu] = {}
        self._lost = False
        self._quick = self._slow = Ways(())
        self._ways_of = 0
        self._instances = InstanceReader()
        self._activity = Activity(monotonic_ns)
        self._processes = Processes()
        self._events = Events()
        self._session.ending += [self._events.end, self._activity.forget, self._instances.forget]

    def driver_version(self) -> str:
        """The driver's version; raises DriverUnavailable."""
        self._begin()
        return self._session.version

    def access(self) -> AccessLevel:
        """What the kernel lets this process do and the driver does not deny; raises DriverUnavailable."""
        self._listed()
        sliced = [uuid for uuid, gpu in self._seen.items() if gpu.mig_enabled]
        handles = self._session.handles
        return access_by_driver(self._rights(), [handles[uuid] for uuid in sliced if uuid in handles])

    def gpus(self) -> tuple[Gpu, ...]:
        """Every device that answers or answered before, by index; raises DriverUnavailable."""
        if self._lost:
            self._end()
        self._begin()
        found: dict[str, Gpu] = {}
        handles = self._session.handles
        handles.clear()
        for index in range(self._count()):
            if not self._visit(index):
                continue
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpu = identify(handle, index, models=self._models, instances=self._instances)
            except pynvml.NVMLError as error:
                # What was seen of it before still stands.
                self._lost = self._lost or reason_of(error) is AbsenceReason.GPU_LOST
                continue
            found[gpu.uuid] = gpu
            handles[gpu.uuid] = handle
        self._seen = found = with_silent(found, self._seen)
        if self._events.listening:
            self._events.listen(handles)
        return tuple(sorted(found.values(), key=lambda gpu: gpu.index))

    def read(self, uuid: str) -> RawReadings:
        """One look at one device; raises UnknownGpu, and DriverUnavailable before it was ever seen."""

        def look(handle: Any) -> dict[Reading, Value]:
            # Which ways there are is known only once the session is open.
            return self._quick.read(handle)

        values = self._look(uuid, _QUICK, look)
        return RawReadings(energy_counter_j=values.pop(Reading.ENERGY_J, values[Reading.POWER_W]), values=values)

    def read_slow(self, uuid: str) -> Mapping[Reading, Value]:
        """What is dear, or seldom different."""

        def look(handle: Any) -> dict[Reading, Value]:
            values = {**self._slow.read(handle), **self._activity.read(handle, uuid, None)}
            values[Reading.PROCESSES] = self._process_count(handle)
            return values

        return MappingProxyType(self._look(uuid, SLOW_READINGS, look))

    def read_instances(self, uuid: str) -> tuple[InstanceReadings, ...]:
        """A look at each GPU instance, by id."""

        def look(handle: Any) -> tuple[InstanceReadings, ...]:
            if not _sliced(handle):
                self._activity.keep(uuid, frozenset())
                return ()
            product = load().find(self._seen[uuid].product, self._seen[uuid].memory_bytes or None)
            held = self._instances.read(handle, uuid, product)
            self._activity.keep(uuid, frozenset(instance.id for instance in held))
            devices = {instance_id: device for (instance_id, _), device in mig_devices(handle).items()}
            return tuple(self._instance(handle, uuid, instance, devices.get(instance.id)) for instance in held)

        return self._on(uuid, look)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who has a context on the device."""
        return self._on(uuid, lambda handle: self._processes.read(handle, uuid, shares=not _sliced(handle)))

    def topology(self) -> tuple[GpuLink, ...]:
        """Every pair of devices that answer, once."""
        return topology(self.gpus(), self._session.handles)

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """What was announced since the call before; the first call begins to listen."""
        self._listed()
        self._events.listen(self._session.handles)
        return self._events.take()

    def close(self) -> None:
        """Ends the session and forgets the devices."""
        self._end()
        self._events.forget()
        self._processes.forget()
        self._seen = {}

    # For whoever shares the session

    def handle(self, uuid: str) -> Any:
        """NVML's handle of a device; raises DriverUnavailable and NVMLError."""
        self._begin()
        return self._session.handle(uuid)

    def let_go(self) -> None:
        """Ends the session, since it makes this program a client of its devices; the next call opens another."""
        self._end()

    def _begin(self) -> None:
        self._session.begin()
        if self._ways_of != self._session.number:
            self._ways_of = self._session.number
            self._quick = Ways(quick_sources(self._session.branch))
            self._slow = Ways(slow_sources(self._session.branch))

    def _end(self) -> None:
        self._session.end()
        self._lost = False

    def _count(self) -> int:
        """How many devices the driver has; raises DeviceError where it went since the session was opened."""
        try:
            return min(int(pynvml.nvmlDeviceGetCount()), GPUS_PER_NODE_MOST)
        except pynvml.NVMLError as error:
            self._end()
            raise device_error("NVML", error) from None

    def _listed(self) -> None:
        """Sees that the driver is there and that devices were listed once; raises DriverUnavailable."""
        self._begin()
        if not self._seen:
            self.gpus()
        self._count()

    def _known(self, uuid: str) -> None:
        if uuid not in self._seen:
            self.gpus()
            if uuid not in self._seen:
                raise UnknownGpu(f"this machine has no GPU {uuid}; list its GPUs")

    def _look(
        self, uuid: str, readings: tuple[Reading, ...], look: Callable[[Any], dict[Reading, Value]]
    ) -> dict[Reading, Value]:
        """A look at one device; all of `readings` are Missing where it does not answer."""
        self._known(uuid)
        try:
            return look(self.handle(uuid))
        except DriverUnavailable:
            reason = AbsenceReason.GPU_LOST
        except pynvml.NVMLError as error:
            reason = self._silence(uuid, error)
        return dict.fromkeys(readings, MISSING[reason])

    def _on(self, uuid: str, act: Callable[[Any], _Answer]) -> _Answer:
        """What a device answers, or the port's error; a device that came back is found again, once."""
        self._known(uuid)
        try:
            try:
                return act(self.handle(uuid))
            except pynvml.NVMLError as error:
                if error.value not in _STALE:
                    raise
                self._silence(uuid, error)
            return act(self.handle(uuid))
        except pynvml.NVMLError as error:
            self._silence(uuid, error)
            raise device_error(uuid, error) from None

    def _silence(self, uuid: str, error: Any) -> AbsenceReason:
        """Takes note of a device that does not answer; why, as an absence."""
        reason = reason_of(error)
        if reason is not AbsenceReason.GPU_LOST:
            return reason if reason in SILENT else AbsenceReason.GPU_LOST
        self._session.handles.pop(uuid, None)
        self._lost = True
        if error.value in SESSION_GONE:
            self._end()
        return reason

    def _instance(self, handle: Any, uuid: str, held: GpuInstance, device: Any) -> InstanceReadings:
        used: Value = MISSING[AbsenceReason.NOT_SUPPORTED]
        if device is not None:
            # Without a compute instance there is no handle to ask; with several, each tells of the whole instance.
            info = ask(pynvml.nvmlDeviceGetMemoryInfo, device)
            used = used if info is None else plausible(Reading.MEMORY_USED_BYTES, float(info.used))
        activity = self._activity.read(handle, uuid, held.id)
        values = {reading: activity.get(reading, used) for reading in INSTANCE_READINGS}
        return InstanceReadings(gpu_instance_id=held.id, values=values)

    def _process_count(self, handle: Any) -> Value:
        try:
            return float(self._processes.count(handle))
        except pynvml.NVMLError as error:
            return missing(error)


def _sliced(handle: Any) -> bool:
    mode = ask(pynvml.nvmlDeviceGetMigMode, handle)
    return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
