"""One simulated device: load in, readings out, in the whole units that NVML counts in.

The true power runs from the idle watts to the busy watts with utilization and
is clamped by the power limit, which the SM clock then follows by a cube root
(dynamic power goes with the cube of the clock). Energy is the exact integral
of the true power; the power reading is what a sensor with a period and a
window makes of it; temperature follows power with a first-order lag. What a
product does not answer is None here, and an absence with a reason above.

It knows neither NVML's calls nor the device port.
"""

import math
from enum import Enum
from uuid import UUID, uuid5

from eelgrid_agent.simulation.signal import PICOJOULES_PER_MILLIJOULE, PowerSignal
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, SpecError, layout_of
from eelgrid_protos.catalogue import PowerSensor, Product
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance

__all__ = ["Health", "SimGpu"]

_IDLE = GpuLoad()
_REASON_IDLE = 0x1
_REASON_POWER_CAP = 0x4
_NS_PER_MS = 1_000_000
_CLOCK_STEP_MHZ = 15.0
# An H100 reserves 480 MiB of 80 GiB.
_RESERVED_SHARE = 170
# A board in a cooled room: 28 °C unpowered, 45 K more at busy watts, most of it within a minute.
_AMBIENT_C = 28.0
_RISE_C = 45.0
_LAG_NS = 20e9


class Health(Enum):
    """Whether the device answers."""

    OK = "ok"
    LOST = "lost"
    HUNG = "hung"


class SimGpu:
    """The core. Moments are monotonic nanoseconds and never fall."""

    __slots__ = (
        "_capped", "_counter_base_pj", "_gain", "_heat_ns", "_idle_mw", "_layout", "_load", "_offset_mw", "_phase_ns",
        "_signal", "_step_mhz", "_temperature_c", "generation", "health", "identity", "limit_mw", "memory_clock_mhz",
        "mig_enabled", "product", "sm_clock_mhz",
    )  # fmt: skip

    def __init__(self, spec: GpuSpec, product: Product, *, uuid: UUID, index: int, now_ns: int) -> None:
        self.product = product
        self.mig_enabled = spec.mig is not None
        self.identity = _identity(spec, product, uuid, index)
        self.health = Health.OK
        # Counts the times that the device went away, since handles from before stay invalid.
        self.generation = 0
        self.limit_mw = _milli(product.power_default_w)
        self._gain = spec.sensor_gain
        self._offset_mw = spec.sensor_offset_w * 1000.0
        # Sensors of a node do not tick together.
        self._phase_ns = uuid.int % (100 * _NS_PER_MS)
        self._step_mhz = product.sm_clock_step_mhz or _CLOCK_STEP_MHZ
        # With MIG on, clocks do not drop: some parts draw more when idle.
        self._idle_mw = _milli(product.idle_mig_w if self.mig_enabled and product.idle_mig_w else product.idle_w)
        self._signal = PowerSignal(self._idle_mw, now_ns)
        self._counter_base_pj = 0
        self._temperature_c = self._settled_c(self._idle_mw)
        self._heat_ns = now_ns
        self._load = _IDLE
        self._capped = False
        self.sm_clock_mhz = 0
        self.memory_clock_mhz = 0
        self._follow(now_ns)

    # What is done to it

    def set_load(self, load: GpuLoad, now_ns: int) -> None:
        """The load from now on. Nothing runs on a device that is not there."""
        self._load = _IDLE if self.health is Health.LOST else load
        self._follow(now_ns)

    def limit_power(self, limit_w: float | None, now_ns: int) -> None:
        """The power limit from now on; None is the default limit. Raises SpecError outside the part's limits."""
        product = self.product
        limit_w = product.power_default_w if limit_w is None else limit_w
        low, high = product.power_min_w or 0.0, product.power_max_w or product.power_default_w
        if not low <= limit_w <= high:
            raise SpecError("limit_w", f"{limit_w:g} W is not in [{low:g}, {high:g}] W")
        self.limit_mw = _milli(limit_w)
        self._follow(now_ns)

    def lose(self, now_ns: int) -> None:
        """The device falls off the bus, and what ran on it dies."""
        if self.health is not Health.LOST:
            self.generation += 1
        self.health = Health.LOST
        self._load = _IDLE
        self._follow(now_ns)

    def restore(self, now_ns: int) -> None:
        """The device answers again: after a loss as after a reset, after a hang as if nothing had been."""
        if self.health is Health.LOST:
            self.reset_counter(now_ns)
        self.health = Health.OK

    def hang(self) -> None:
        """Calls to the device come to nothing from now on; its work goes on."""
        if self.health is Health.OK:
            self.health = Health.HUNG

    def reset_counter(self, now_ns: int) -> None:
        """The energy counter starts from zero, as when the driver is loaded anew."""
        self._counter_base_pj = self._signal.energy_pj(now_ns)

    # What it says

    @property
    def power_mw(self) -> int:
        """The true power."""
        return self._signal.level_mw

    def energy_pj(self, now_ns: int) -> int:
        """The true energy since the simulation began."""
        return self._signal.energy_pj(now_ns)

    def power_instant_mw(self, now_ns: int) -> int:
        """The instant power field."""
        return self._sense(self.product.sensor.instant, now_ns)

    def power_usage_mw(self, now_ns: int) -> int:
        """The plain power call, which on newer parts is an average."""
        return self._sense(self.product.sensor.usage, now_ns)

    def energy_mj(self, now_ns: int) -> int | None:
        """The energy counter."""
        if not self.product.has_energy_counter:
            return None
        return (self._signal.energy_pj(now_ns) - self._counter_base_pj) // PICOJOULES_PER_MILLIJOULE

    @property
    def utilization_percent(self) -> int | None:
        """Share of time with work on the SMs; not there while MIG is on."""
        return None if self.mig_enabled else round(100.0 * self._load.utilization_ratio)

    @property
    def memory_used_bytes(self) -> int:
        """Memory that work holds."""
        return min(self._load.memory_bytes, self.product.memory_bytes)

    @property
    def memory_reserved_bytes(self) -> int:
        """Memory that the driver keeps for itself."""
        return self.product.memory_bytes // _RESERVED_SHARE

    @property
    def memory_held_bytes(self) -> int:
        """Memory that is not free."""
        return min(self.memory_used_bytes + self.memory_reserved_bytes, self.product.memory_bytes)

    def temperature_c(self, now_ns: int) -> int:
        """Temperature of the chip."""
        return round(self._heat(now_ns))

    @property
    def event_reasons(self) -> int:
        """Why the clock is not higher, as NVML's bits."""
        if self._load.utilization_ratio == 0.0:
            return _REASON_IDLE
        return _REASON_POWER_CAP if self._capped else 0

    # How it gets there

    def _follow(self, now_ns: int) -> None:
        """Power and clocks follow the load and the limit."""
        product, utilization = self.product, self._load.utilization_ratio
        wanted_mw = self._idle_mw + round((_milli(product.busy_w) - self._idle_mw) * utilization)
        level_mw = max(self._idle_mw, min(wanted_mw, self.limit_mw))
        self._capped = level_mw < wanted_mw
        if utilization == 0.0 and not self.mig_enabled:
            self.sm_clock_mhz = product.sm_clock_min_mhz
            self.memory_clock_mhz = product.memory_clock_idle_mhz or product.memory_clock_mhz
        else:
            share = (level_mw - self._idle_mw) / (wanted_mw - self._idle_mw) if self._capped else 1.0
            self.sm_clock_mhz = self._stepped(product.sm_clock_max_mhz * math.cbrt(share))
            self.memory_clock_mhz = product.memory_clock_mhz
        if level_mw != self._signal.level_mw:
            self._temperature_c, self._heat_ns = self._heat(now_ns), now_ns
            self._signal.set(level_mw, now_ns)

    def _stepped(self, clock_mhz: float) -> int:
        """The highest clock step that is not above."""
        product = self.product
        steps = math.ceil((product.sm_clock_max_mhz - clock_mhz) / self._step_mhz)
        return max(product.sm_clock_min_mhz, int(product.sm_clock_max_mhz - steps * self._step_mhz))

    def _sense(self, sensor: PowerSensor, now_ns: int) -> int:
        period_ns = sensor.period_ms * _NS_PER_MS
        sampled_ns = now_ns - (now_ns - self._phase_ns) % period_ns
        since_ns = sampled_ns - sensor.window_ms * _NS_PER_MS
        power_mw = self._signal.mean_mw(since_ns, sampled_ns)
        return max(0, round(power_mw * self._gain + self._offset_mw))

    def _settled_c(self, level_mw: int) -> float:
        return _AMBIENT_C + _RISE_C * level_mw / (1000.0 * self.product.busy_w)

    def _heat(self, now_ns: int) -> float:
        settled_c = self._settled_c(self._signal.level_mw)
        return settled_c + (self._temperature_c - settled_c) * math.exp((self._heat_ns - now_ns) / _LAG_NS)


def _milli(watts: float) -> int:
    return round(watts * 1000.0)


def _identity(spec: GpuSpec, product: Product, uuid: UUID, index: int) -> Gpu:
    known = product.power_min_w is not None and product.power_max_w is not None
    return Gpu(
        uuid=f"GPU-{uuid}",
        index=index,
        product=product.nvml_names[0],
        model=spec.model or product.model,
        pci_bus_id=f"00000000:{0x10 + index:02X}:00.0",
        catalogue_key=product.key,
        memory_bytes=product.memory_bytes,
        power_limit_default_w=product.power_default_w,
        # NVML tells both ends in one call, or neither.
        power_limit_min_w=product.power_min_w if known else None,
        power_limit_max_w=product.power_max_w if known else None,
        mig_capable=product.mig is not None,
        mig_enabled=spec.mig is not None,
        gpu_instances=_instances(spec, product, uuid),
    )


def _instances(spec: GpuSpec, product: Product, uuid: UUID) -> tuple[GpuInstance, ...]:
    """The layout as the driver numbers it.

    A MIG device's UUID is a function of the device, the instance's id and the
    first engine, so the same span always comes back under the same UUID.
    """
    instances = []
    for profile, placed in layout_of(spec, product):
        geometry = product.mig
        assert geometry is not None  # layout_of gives a layout only where there is a geometry
        number = geometry.gi_id(placed.start, profile.size)
        parts = (profile.compute_slices,) if placed.compute_slices is None else placed.compute_slices
        by_size = {ci.compute_slices: ci.id for ci in profile.compute_instances}
        compute, engine = [], 0
        for part, slices in enumerate(parts):
            mig_uuid = f"MIG-{uuid5(uuid, f'{number}/{engine}')}"
            compute.append(ComputeInstance(id=part, profile_id=by_size[slices], uuid=mig_uuid))
            engine += slices
        instances.append(
            GpuInstance(
                id=number, profile_id=profile.id, profile=profile.name, start=placed.start, size=profile.size,
                compute_instances=tuple(compute),
            )
        )  # fmt: skip
    return tuple(sorted(instances, key=lambda instance: instance.id))
