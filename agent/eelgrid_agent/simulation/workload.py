"""Workloads on a device and its GPU instances, and the operating point (power, clocks) they lead to."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from eelgrid_agent.simulation.mig import SimInstance
from eelgrid_agent.simulation.power_curve import (
    AWAKE_POWER_SHARE,
    CLOCK_FLOOR,
    WorkDone,
    WorkMeter,
    clock_share,
    power_share,
)
from eelgrid_agent.simulation.spec import GpuLoad
from eelgrid_protos.catalogue.products import Product

IDLE_LOAD = GpuLoad()


class DeviceLoads:
    """The loads of one device, and their integrals."""

    __slots__ = ("_meter", "_meters", "_parts", "total")

    def __init__(self, now_ns: int) -> None:
        self.total = IDLE_LOAD
        self._parts: dict[int, GpuLoad] = {}
        self._meter = WorkMeter(now_ns)
        self._meters: dict[int, WorkMeter] = {}

    def set_load(self, load: GpuLoad) -> None:
        """One load for the whole device."""
        self.total = load
        self._parts.clear()

    def set_instance_load(self, instance_id: int, load: GpuLoad) -> None:
        """A load for one instance; what ran on the whole device ends."""
        self._parts[instance_id] = load

    def sum_loads(self, instances: Mapping[int, SimInstance], compute_slices: int) -> None:
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
            memory_bound_ratio=bound / whole if whole else IDLE_LOAD.memory_bound_ratio,
        )

    def get_instance_load(self, instance_id: int, instances: Mapping[int, SimInstance]) -> GpuLoad:
        """The load of one instance."""
        if self._parts:
            return self._parts.get(instance_id, IDLE_LOAD)
        size = sum(held.profile.size for held in instances.values())
        return GpuLoad(
            utilization_ratio=self.total.utilization_ratio,
            memory_bytes=self.total.memory_bytes * instances[instance_id].profile.size // size,
            memory_bound_ratio=self.total.memory_bound_ratio,
        )

    def set_clock(self, clock: float, instances: Mapping[int, SimInstance], now_ns: int) -> None:
        """Everything runs at this share of the highest clock from now on."""
        self._meter.set_rates(self.total.utilization_ratio, clock, self.total.memory_bound_ratio, now_ns)
        if self._meters or instances:
            self._meters = {number: self._meters.get(number) or WorkMeter(now_ns) for number in instances}
            for number, meter in self._meters.items():
                load = self.get_instance_load(number, instances)
                meter.set_rates(load.utilization_ratio, clock, load.memory_bound_ratio, now_ns)

    def work_done(self, now_ns: int) -> WorkDone:
        """What the device got done."""
        return self._meter.read_work(now_ns)

    def instance_work_done(self, instance_id: int, now_ns: int) -> WorkDone:
        """What an instance got done; nothing yet since it was made."""
        meter = self._meters.get(instance_id)
        return WorkDone() if meter is None else meter.read_work(now_ns)

    @property
    def work_share(self) -> float:
        """Work a second now."""
        return self._meter.work_share

    @property
    def memory_share(self) -> float:
        """Share of time that the memory is busy now."""
        return self._meter.memory_share


_CLOCK_STEP_MHZ = 15.0


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """True power; clock as a share of the highest, and as NVML shows it; whether the power limit holds it down."""

    power_mw: int
    clock: float
    sm_clock_mhz: int
    memory_clock_mhz: int
    capped: bool


def compute_operating_point(
    product: Product,
    load: GpuLoad,
    *,
    idle_mw: int,
    limit_mw: int,
    locked_mhz: tuple[int, int] | None,
    awake: bool,
    spins: bool = False,
) -> OperatingPoint:
    """The pace; `awake` keeps the clocks up without a load, as MIG does. A load that spins draws what being awake does."""
    utilization, highest = load.utilization_ratio, product.sm_clock_max_mhz
    if utilization == 0.0 and not awake:
        memory_clock_mhz = product.memory_clock_idle_mhz or product.memory_clock_mhz
        return OperatingPoint(idle_mw, 0.0, product.sm_clock_min_mhz, memory_clock_mhz, capped=False)
    clock = 1.0 if locked_mhz is None else min(locked_mhz[1] / highest, 1.0)
    swing_mw = (to_milliwatts(product.busy_w) - idle_mw) * utilization
    power_mw = idle_mw + round(swing_mw * (AWAKE_POWER_SHARE if spins else power_share(clock)))
    capped = power_mw > max(limit_mw, idle_mw)
    if capped:
        fitting = clock_share((limit_mw - idle_mw) / swing_mw)
        clock = min(clock, max(fitting, CLOCK_FLOOR))
        # On the curve the limit is met to the milliwatt; on the floor it is not held.
        power_mw = limit_mw if clock == fitting else idle_mw + round(swing_mw * power_share(clock))
    return OperatingPoint(power_mw, clock, floor_clock_step(product, highest * clock), product.memory_clock_mhz, capped)


def floor_clock_step(product: Product, clock_mhz: float) -> int:
    """The highest clock step that is not above."""
    step_mhz = _step_mhz(product)
    steps = math.ceil((product.sm_clock_max_mhz - clock_mhz) / step_mhz - 1e-9)
    return max(product.sm_clock_min_mhz, int(product.sm_clock_max_mhz - steps * step_mhz))


def list_clock_steps(product: Product) -> tuple[int, ...]:
    """The steps of the SM clock, lowest first."""
    return _steps(product.sm_clock_min_mhz, product.sm_clock_max_mhz, _step_mhz(product))


@lru_cache(maxsize=64)  # settings are read back several times a second
def _steps(low: int, high: int, step_mhz: float) -> tuple[int, ...]:
    return tuple(int(high - step * step_mhz) for step in range(int((high - low) / step_mhz), -1, -1))


def _step_mhz(product: Product) -> float:
    return product.sm_clock_step_mhz or _CLOCK_STEP_MHZ


def to_milliwatts(watts: float) -> int:
    """Milliwatts, as NVML counts."""
    return round(watts * 1000.0)
