"""What runs on a device and on each of its GPU instances, and what it got done.

A load is set for the whole device, and then every instance has its part of it,
or for single instances, and then the device has their sum by compute slices.
It knows neither power nor time beyond the moments it is given.
"""

from collections.abc import Mapping

from eelgrid_agent.simulation.mig import SimInstance
from eelgrid_agent.simulation.spec import GpuLoad
from eelgrid_agent.simulation.work import WorkDone, WorkMeter

__all__ = ["IDLE", "Loads"]

IDLE = GpuLoad()


class Loads:
    """The loads of one device, and their integrals."""

    __slots__ = ("_meter", "_meters", "_parts", "total")

    def __init__(self, now_ns: int) -> None:
        self.total = IDLE
        self._parts: dict[int, GpuLoad] = {}
        self._meter = WorkMeter(now_ns)
        self._meters: dict[int, WorkMeter] = {}

    def set(self, load: GpuLoad) -> None:
        """One load for the whole device."""
        self.total = load
        self._parts.clear()

    def set_part(self, instance_id: int, load: GpuLoad) -> None:
        """A load for one instance; what ran on the whole device ends."""
        self._parts[instance_id] = load

    def gather(self, instances: Mapping[int, SimInstance], compute_slices: int) -> None:
        """Forgets the loads of instances that are gone, and sums up the others."""
        if not self._parts:
            return
        self._parts = {number: load for number, load in self._parts.items() if number in instances}
        shares = {
            number: load.utilization_ratio * instances[number].profile.compute_slices / compute_slices
            for number, load in self._parts.items()
        }
        whole = sum(shares.values())
        bound = sum(shares[number] * load.memory_bound_ratio for number, load in self._parts.items())
        self.total = GpuLoad(
            utilization_ratio=min(whole, 1.0),
            memory_bytes=sum(load.memory_bytes for load in self._parts.values()),
            memory_bound_ratio=bound / whole if whole else IDLE.memory_bound_ratio,
        )

    def on_instance(self, instance_id: int, instances: Mapping[int, SimInstance]) -> GpuLoad:
        """The load of one instance."""
        if self._parts:
            return self._parts.get(instance_id, IDLE)
        size = sum(held.profile.size for held in instances.values())
        return GpuLoad(
            utilization_ratio=self.total.utilization_ratio,
            memory_bytes=self.total.memory_bytes * instances[instance_id].profile.size // size,
            memory_bound_ratio=self.total.memory_bound_ratio,
        )

    def run(self, clock: float, instances: Mapping[int, SimInstance], now_ns: int) -> None:
        """Everything runs at this share of the highest clock from now on."""
        self._meter.set(self.total.utilization_ratio, clock, self.total.memory_bound_ratio, now_ns)
        if self._meters or instances:
            self._meters = {number: self._meters.get(number) or WorkMeter(now_ns) for number in instances}
            for number, meter in self._meters.items():
                load = self.on_instance(number, instances)
                meter.set(load.utilization_ratio, clock, load.memory_bound_ratio, now_ns)

    def done(self, now_ns: int) -> WorkDone:
        """What the device got done."""
        return self._meter.read(now_ns)

    def done_on(self, instance_id: int, now_ns: int) -> WorkDone:
        """What an instance got done; nothing yet since it was made."""
        meter = self._meters.get(instance_id)
        return WorkDone() if meter is None else meter.read(now_ns)

    @property
    def work_share(self) -> float:
        """Work a second now."""
        return self._meter.work_share

    @property
    def memory_share(self) -> float:
        """Share of time that the memory is busy now."""
        return self._meter.memory_share
