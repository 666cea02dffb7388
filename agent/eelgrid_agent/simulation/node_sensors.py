"""The dear half of a simulated node's reading side: what its sensors say, as the device port words it.

It answers as the NVML adapter does over the same devices: activity needs two
looks 100 ms apart and tells of the time between; a process's share of SM time
is known from the second look on. Whether a device answers at all is asked
before. It decides nothing and changes no device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eelgrid_agent.device import (
    INSTANCE_READINGS,
    SLOW_READINGS,
    GpuLink,
    GpuProcess,
    InstanceReadings,
    Missing,
    NoPermission,
    Value,
)
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.sensors import Activity, Sensors, activity_between
from eelgrid_agent.simulation.wiring import SWITCH, alike, ancestor, link_end
from eelgrid_agent.simulation.work import WorkDone
from eelgrid_protos.messages import AbsenceReason, AccessLevel, GpuInstance, Reading

__all__ = ["NodeSensors"]

_APART_LEAST_NS = 100_000_000
_MIB = float(2**20)
_NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)
_NOT_SAMPLED = Missing(AbsenceReason.NOT_SAMPLED)
_NO_PERMISSION = Missing(AbsenceReason.NO_PERMISSION)
_NOTHING: Mapping[Reading, Value] = dict.fromkeys(SLOW_READINGS, _NOT_SUPPORTED)

_OF_INSTANCES = frozenset(INSTANCE_READINGS)
_ACTIVITY: Mapping[Reading, Callable[[Activity], float]] = {
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


class NodeSensors:
    """One node's; `sensors` are made when a device is first asked, for a fleet never asks."""

    def __init__(self, devices: Sequence[SimGpu], *, branch: int) -> None:
        self._devices = devices
        self._branch = branch
        self._sensors: dict[str, Sensors] = {}
        self._looks: dict[tuple[str, int | None], _Look] = {}
        self._processes_seen_us: dict[str, int] = {}

    def of(self, gpu: SimGpu) -> Sensors:
        """The sensors of one device."""
        sensors = self._sensors.get(gpu.uuid)
        if sensors is None:
            sensors = Sensors(gpu, branch=self._branch, alike=len(alike(gpu, self._devices)))
            self._sensors[gpu.uuid] = sensors
        return sensors

    def forget(self) -> None:
        """The next looks are the first ones."""
        self._looks.clear()
        self._processes_seen_us.clear()

    def slow(self, gpu: SimGpu, now_ns: int, rights: AccessLevel) -> Mapping[Reading, Value]:
        """All of the slow readings of a device that answers."""
        sensors = self.of(gpu)
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
            **self._activity(gpu, None, gpu.work(now_ns), now_ns),
        }

    def instances(self, gpu: SimGpu, now_ns: int) -> tuple[InstanceReadings, ...]:
        """A look at each GPU instance of a device that answers."""
        held_now = {held.id for held in gpu.identity.gpu_instances}
        for key in [key for key in self._looks if key[0] == gpu.uuid and key[1] is not None]:
            if key[1] not in held_now:
                del self._looks[key]
        return tuple(self._instance(gpu, held, now_ns) for held in gpu.identity.gpu_instances)

    def _instance(self, gpu: SimGpu, held: GpuInstance, now_ns: int) -> InstanceReadings:
        # Without a compute instance there is no handle to ask for memory.
        used = float(self.of(gpu).instance_memory(held)[1]) if held.compute_instances else _NOT_SUPPORTED
        activity = self._activity(gpu, held.id, gpu.loads.done_on(held.id, now_ns), now_ns)
        values = {Reading.MEMORY_USED_BYTES: used, **activity}
        return InstanceReadings(
            gpu_instance_id=held.id,
            values={reading: value for reading, value in values.items() if reading in _OF_INSTANCES},
        )

    def processes(self, gpu: SimGpu, now_ns: int, rights: AccessLevel) -> tuple[GpuProcess, ...]:
        """Who has a context on a device that answers."""
        sliced, sensors = gpu.mig.enabled, self.of(gpu)
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

    def topology(self, answering: Sequence[SimGpu]) -> tuple[GpuLink, ...]:
        """Every pair of the devices that answer."""
        return tuple(
            GpuLink(one=one.uuid, other=other.uuid, ancestor=ancestor(one, other), nvlinks=self._between(one, other))
            for place, one in enumerate(answering)
            for other in answering[place + 1 :]
        )

    def _between(self, one: SimGpu, other: SimGpu) -> int:
        ends = [link_end(one, link, self._devices) for link in range(self.of(one).traits.links)]
        others = [link_end(other, link, self._devices) for link in range(self.of(other).traits.links)]
        return sum(end is other for end in ends) or min(ends.count(SWITCH), others.count(SWITCH))

    def _links(self, sensors: Sensors, now_ns: int) -> dict[Reading, int | None]:
        kib = [sensors.link_kib(link, now_ns) or 0 for link in range(sensors.traits.links)]
        moved = sum(kib) * 1024 if kib else None
        return {
            Reading.NVLINK_SENT_BYTES: moved,
            Reading.NVLINK_RECEIVED_BYTES: moved,
            Reading.NVLINK_ACTIVE_LINKS: len(kib) * sensors.links_up if kib else None,
            Reading.NVLINK_ERRORS: sensors.link_errors(),
        }

    def _activity(self, gpu: SimGpu, instance_id: int | None, done: WorkDone, now_ns: int) -> dict[Reading, Value]:
        """Activity since the look before, which stays where it is too near."""
        if not self.of(gpu).has_activity:
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
        activity = activity_between((before.now_ns, before.done), (now_ns, done))
        return {reading: told(activity) for reading, told in _ACTIVITY.items()}


def _shown(gpu: SimGpu, rights: AccessLevel) -> bool:
    """Whether a user with these rights is told the processes of the whole device."""
    return not gpu.mig.enabled or rights >= AccessLevel.MIG_MONITOR
