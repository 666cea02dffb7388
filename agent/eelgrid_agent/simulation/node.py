"""A simulated node behind the device port: the fleet's way to its devices, without NVML in between.

It answers exactly as the NVML adapter does over the same devices, which one
contract suite holds both to: a device that was never seen answering is not
listed, one that was stays listed while it is lost. One thread uses it.
"""

from collections.abc import Callable
from types import MappingProxyType
from uuid import UUID, uuid5

from eelgrid_agent.device import DriverUnavailable, Missing, RawReadings, UnknownGpu, Value
from eelgrid_agent.simulation.gpu import Health, SimGpu
from eelgrid_agent.simulation.spec import GpuLoad, NodeSpec, product_of
from eelgrid_protos.catalogue import load
from eelgrid_protos.messages import AbsenceReason, Gpu, Reading

__all__ = ["Faults", "SimulatedNode"]

_SPACE = UUID("5d9ce3a4-8e0f-5c36-9f0a-0a6bd1f6a3a5")
# Drivers from this branch on have the instant power field.
_INSTANT_SINCE = 525
# Drivers before this branch count the memory that they reserve as used.
_RESERVED_APART_SINCE = 510

_NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)


def _silent(reason: AbsenceReason) -> RawReadings:
    missing = Missing(reason)
    readings = [reading for reading in Reading if Reading.POWER_W <= reading <= Reading.EVENT_REASONS_MASK]
    values: dict[Reading, Value] = dict.fromkeys(readings, missing)
    del values[Reading.ENERGY_J]
    return RawReadings(energy_counter_j=missing, values=MappingProxyType(values))


_LOST = _silent(AbsenceReason.GPU_LOST)
_TIMED_OUT = _silent(AbsenceReason.TIMED_OUT)


class SimulatedNode:
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
            )
            for index, gpu in enumerate(spec.gpus)
        )
        self.faults = Faults(self)
        self._by_uuid = {gpu.identity.uuid: gpu for gpu in self.devices}
        self._instant = spec.driver_branch >= _INSTANT_SINCE
        self._reserved_apart = spec.driver_branch >= _RESERVED_APART_SINCE
        self._seen: dict[str, Gpu] = {}

    def device(self, uuid: str) -> SimGpu:
        """The core of one device, seen or not; raises UnknownGpu."""
        try:
            return self._by_uuid[uuid]
        except KeyError:
            raise UnknownGpu(f"{self.spec.node_name} has no GPU {uuid}; list its GPUs") from None

    def set_load(self, gpu_uuid: str, load: GpuLoad) -> None:
        """What runs on a device from now on."""
        self.device(gpu_uuid).set_load(load, self.monotonic_ns())

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
        for gpu in self.devices:
            if gpu.health is Health.OK:
                self._seen[gpu.identity.uuid] = gpu.identity
            elif gpu.health is Health.HUNG:
                self.stall()
        return tuple(sorted(self._seen.values(), key=lambda gpu: gpu.index))

    def read(self, uuid: str) -> RawReadings:
        """One look at one device."""
        if uuid not in self._seen:
            self.gpus()
            if uuid not in self._seen:
                raise UnknownGpu(f"{self.spec.node_name} has no GPU {uuid}; list its GPUs")
        gpu = self._by_uuid[uuid]
        if gpu.health is not Health.OK or not self.driver_loaded:
            if gpu.health is Health.HUNG and self.driver_loaded:
                self.stall()
                return _TIMED_OUT
            return _LOST
        now_ns = self.monotonic_ns()
        power_mw = gpu.power_instant_mw(now_ns) if self._instant else gpu.power_usage_mw(now_ns)
        energy_mj, percent = gpu.energy_mj(now_ns), gpu.utilization_percent
        values: dict[Reading, Value] = {
            Reading.POWER_W: power_mw / 1000.0,
            Reading.UTILIZATION_RATIO: _NOT_SUPPORTED if percent is None else percent / 100.0,
            Reading.MEMORY_USED_BYTES: float(gpu.memory_used_bytes if self._reserved_apart else gpu.memory_held_bytes),
            Reading.SM_CLOCK_MHZ: float(gpu.sm_clock_mhz),
            Reading.MEMORY_CLOCK_MHZ: float(gpu.memory_clock_mhz),
            Reading.TEMPERATURE_C: float(gpu.temperature_c(now_ns)),
            Reading.POWER_LIMIT_W: gpu.limit_mw / 1000.0,
            Reading.EVENT_REASONS_MASK: float(gpu.event_reasons),
        }
        return RawReadings(
            energy_counter_j=_NOT_SUPPORTED if energy_mj is None else energy_mj / 1000.0,
            values=values,
        )

    def close(self) -> None:
        """Forgets which devices were seen."""
        self._seen.clear()


class Faults:
    """What goes wrong with a node's devices, on demand."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def lose(self, uuid: str) -> None:
        """The device falls off the bus."""
        self._node.device(uuid).lose(self._node.monotonic_ns())

    def restore(self, uuid: str) -> None:
        """A lost or hung device answers again."""
        self._node.device(uuid).restore(self._node.monotonic_ns())

    def hang(self, uuid: str) -> None:
        """Calls to the device come to nothing."""
        self._node.device(uuid).hang()

    def reset_counter(self, uuid: str) -> None:
        """The energy counter starts from zero."""
        self._node.device(uuid).reset_counter(self._node.monotonic_ns())

    def unload_driver(self) -> None:
        """The driver goes, and with it everything that runs and every counter."""
        self._node.driver_loaded = False
        for gpu in self._node.devices:
            gpu.set_load(GpuLoad(), self._node.monotonic_ns())

    def load_driver(self) -> None:
        """The driver comes back; its counters start from zero."""
        self._node.driver_loaded = True
        for gpu in self._node.devices:
            gpu.reset_counter(self._node.monotonic_ns())
