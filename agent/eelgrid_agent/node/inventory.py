"""The device survey of a node, the fast readings of all devices, and the inventory built from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from eelgrid_agent.devices.extended_readings import ExtendedReadings, read_extended_readings
from eelgrid_agent.devices.host import Host
from eelgrid_agent.devices.port import (
    FAST_READINGS,
    DeviceError,
    DevicePort,
    DriverUnavailable,
    Missing,
    RawReadings,
    ReadingValue,
)
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Gpu, GpuLink, Inventory, Reading

GpuReadings = tuple[tuple[str, RawReadings], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """What the operator says about a node."""

    node_name: str
    agent_version: str
    pool: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False
    topology: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSurvey:
    """Which devices there are; `problem` says why there are none."""

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
) -> Inventory:
    """The node as the controller is told of it."""
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
        gpus=mark_gpu_health(found.gpus, lost, cordons),
        simulated=identity.simulated,
        access=found.access,
        links=found.links,
        topology=identity.topology,
    )


def mark_gpu_health(gpus: tuple[Gpu, ...], lost: frozenset[str], cordons: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The devices, each marked as lost or not, and with the reason why it should take no new work."""
    marks = [(gpu, gpu.uuid in lost, cordons.get(gpu.uuid, "")) for gpu in gpus]
    return tuple(
        gpu if (gpu.lost, gpu.cordon) == (is_lost, cordon) else replace(gpu, lost=is_lost, cordon=cordon)
        for gpu, is_lost, cordon in marks
    )


def read_each_gpu(device: DevicePort, uuids: tuple[str, ...]) -> GpuReadings:
    """One look at each device; may block."""
    looks = []
    for uuid in uuids:
        try:
            looks.append((uuid, device.read(uuid)))
        except DeviceError:
            looks.append((uuid, _all_missing(AbsenceReason.GPU_LOST)))
    return tuple(looks)


class BatchReader(Protocol):
    """Looks at many devices at once: a driver in another process answers them in one round trip."""

    def read_gpus(self, uuids: Sequence[str]) -> GpuReadings:
        """A quick look at each device; may block."""

    def read_extended(self, uuids: Sequence[str]) -> ExtendedReadings:
        """Everything that is dear, of each device; may block."""


class SequentialReader:
    """Looks at one device after the other, in this process."""

    def __init__(self, device: DevicePort) -> None:
        self._device = device

    def read_gpus(self, uuids: Sequence[str]) -> GpuReadings:
        """A quick look at each device."""
        return read_each_gpu(self._device, tuple(uuids))

    def read_extended(self, uuids: Sequence[str]) -> ExtendedReadings:
        """Everything that is dear, of each device."""
        return read_extended_readings(self._device, uuids)


def missing_gpu_readings(uuids: tuple[str, ...], reason: AbsenceReason) -> GpuReadings:
    """What to record where no device could be asked."""
    return tuple((uuid, _all_missing(reason)) for uuid in uuids)


def _all_missing(reason: AbsenceReason) -> RawReadings:
    missing: ReadingValue = Missing(reason)
    values: dict[Reading, ReadingValue] = {
        reading: missing for reading in FAST_READINGS if reading is not Reading.ENERGY_J
    }
    return RawReadings(energy_counter_j=missing, values=MappingProxyType(values))
