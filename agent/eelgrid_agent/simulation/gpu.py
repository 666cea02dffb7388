"""One simulated device: loads in, readings out, in NVML's whole units, with its error counters.

The loads of the device and of its GPU instances lead to an operating point of power and clocks. True power runs from
idle to busy watts with utilization, limits and locked clocks. Energy and work are exact integrals; the power reading
models a sensor with period, window, gain and phase; temperature has a first-order lag.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from uuid import UUID

from eelgrid_agent.devices.port import FabricState
from eelgrid_agent.simulation.mig import DriverRefused, SimInstance, SimMig
from eelgrid_agent.simulation.power_curve import (
    AWAKE_POWER_SHARE,
    CLOCK_FLOOR,
    PICOJOULES_PER_MILLIJOULE,
    PowerSignal,
    WorkDone,
    WorkMeter,
    clock_share,
    power_share,
)
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, SpecError, adapt_geometry, resolve_mig_layout
from eelgrid_protos.catalogue.products import PowerSensor, Product
from eelgrid_protos.messages import Gpu

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
    """The pace; `awake` keeps the clocks up without a load, as MIG does.

    A load that spins draws what being awake does.
    """
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


@dataclass(slots=True, kw_only=True)
class DeviceWear:
    """One device's counters; `recovery_action` is NVML's number, 0 for none, `fabric_state` a FabricState."""

    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    ecc_corrected_before: int = 0
    ecc_uncorrected_before: int = 0
    remapped_correctable: int = 0
    remapped_uncorrectable: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    recovery_action: int = 0
    fabric_state: int = FabricState.COMPLETED
    pcie_replays: int = 0
    nvlink_errors: int = 0

    @property
    def ecc_corrected_total(self) -> int:
        """Over the life of the part."""
        return self.ecc_corrected_before + self.ecc_corrected

    @property
    def ecc_uncorrected_total(self) -> int:
        """Over the life of the part."""
        return self.ecc_uncorrected_before + self.ecc_uncorrected

    def reset_volatile(self) -> None:
        """A reset or a new driver: volatile counters go to zero, pending rows are remapped, advice is taken."""
        self.ecc_corrected_before, self.ecc_corrected = self.ecc_corrected_total, 0
        self.ecc_uncorrected_before, self.ecc_uncorrected = self.ecc_uncorrected_total, 0
        self.pcie_replays = self.nvlink_errors = self.recovery_action = 0
        if self.remap_pending:
            self.remap_pending = False
            self.remapped_uncorrectable += 1


_BRANCH = 580
_REASON_IDLE = 0x1
_REASON_POWER_CAP = 0x4
_NS_PER_MS = 1_000_000
# An H100 reserves 480 MiB of 80 GiB.
_RESERVED_SHARE = 170
# A board in a cooled room: 28 °C unpowered, 45 K more at busy watts, most of it within a minute.
_AMBIENT_C = 28.0
_RISE_C = 45.0
_LAG_NS = 20e9
# Slots that hang on one processor, and so on one NUMA node.
_ON_A_PROCESSOR = 4


class SimHealth(Enum):
    """Whether the device answers."""

    OK = "ok"
    LOST = "lost"
    HUNG = "hung"


class LoadBehavior(Enum):
    """What the work on a device does with it."""

    BUSY = "busy"
    # It holds the device and computes nothing.
    IDLE = "idle"
    # A collective waits for a rank that does not come: fully utilised, next to no power, and no work done.
    SPINNING = "spinning"


class SimGpu:
    """The core. Moments are monotonic nanoseconds and never fall."""

    __slots__ = (
        "_capped",
        "_conduct",
        "_counter_base_pj",
        "_gain",
        "_heat_ns",
        "_identity",
        "_offset_mw",
        "_phase_ns",
        "_seen",
        "_signal",
        "_steady_mw",
        "_temperature_c",
        "_wanted",
        "begun",
        "cap_mw",
        "generation",
        "health",
        "limit_mw",
        "loads",
        "locked_mhz",
        "memory_clock_mhz",
        "mig",
        "percents",
        "product",
        "profiles",
        "slot",
        "sm_clock_mhz",
        "uuid",
        "wear",
    )

    def __init__(
        self, spec: GpuSpec, product: Product, *, uuid: UUID, index: int, now_ns: int, branch: int = _BRANCH
    ) -> None:
        self.product = product
        self.mig = _mig(spec, product, uuid, branch)
        self._identity = _identity(spec, product, uuid, index)
        self.uuid = self._identity.uuid
        # Where it sits on the board; the driver's index may change.
        self.slot = index
        self._seen = -1
        self.health = SimHealth.OK
        # Counts the times that the device went away, since handles from before stay invalid.
        self.generation = 0
        # What was asked for; what something out of band allows; None is no such thing.
        self.limit_mw = to_milliwatts(product.power_default_w)
        self.cap_mw: int | None = None
        self.locked_mhz: tuple[int, int] | None = None
        # Workload power profiles that were asked for.
        self.profiles: frozenset[int] = frozenset()
        self._gain = spec.sensor_gain
        self._offset_mw = spec.sensor_offset_w * 1000.0
        # Sensors of a node do not tick together.
        self._phase_ns = uuid.int % (100 * _NS_PER_MS)
        self._signal = PowerSignal(self._idle_mw, now_ns)
        self._counter_base_pj = 0
        self._temperature_c = self._settled_c(self._idle_mw)
        self._heat_ns = now_ns
        self.loads = DeviceLoads(now_ns)
        # The load that was asked for, and what the work makes of it.
        self._wanted, self._conduct = IDLE_LOAD, LoadBehavior.BUSY
        self.wear = DeviceWear()
        # The work done when counters of traffic last were zero.
        self.begun = WorkDone()
        self._capped = False
        # Shares of time with work on the SMs and in the memory; not there while MIG is on.
        self.percents: tuple[int, int] | None = None
        self._steady_mw = self._shown_mw(self._idle_mw)
        self.sm_clock_mhz = 0
        self.memory_clock_mhz = 0
        self._follow(now_ns)

    # What is done to it

    def set_load(self, load: GpuLoad, now_ns: int) -> None:
        """The load from now on. Nothing runs on a device that is not there."""
        self._wanted = IDLE_LOAD if self.health is SimHealth.LOST else load
        self._load(now_ns)

    def set_behavior(self, conduct: LoadBehavior, now_ns: int) -> None:
        """Sets what the work on the whole device does, whatever its load."""
        self._conduct = conduct
        self._load(now_ns)

    def skew_power_sensor(self, gain: float, now_ns: int) -> None:
        """The power sensor reads this many times the truth from now on; the energy counter stays true."""
        self._gain = gain
        self._steady_mw = self._shown_mw(self._signal.level_mw)
        self._follow(now_ns)

    def _load(self, now_ns: int) -> None:
        load = self._wanted
        self.loads.set_load(replace(load, utilization_ratio=0.0) if self._conduct is LoadBehavior.IDLE else load)
        self._follow(now_ns)

    def set_instance_load(self, instance_id: int, load: GpuLoad, now_ns: int) -> None:
        """The load of one GPU instance from now on; what ran on the whole device ends. Raises SpecError."""
        if instance_id not in self.mig.instances:
            raise SpecError("instance_id", f"there is no GPU instance {instance_id}; list them")
        if self.health is not SimHealth.LOST:
            self.loads.set_instance_load(instance_id, load)
        self._follow(now_ns)

    def limit_power(self, limit_w: float | None, now_ns: int) -> None:
        """The power limit from now on; None is the default limit. Raises SpecError outside the part's limits."""
        limit_w = self.product.power_default_w if limit_w is None else limit_w
        low, high = self.limits_w
        if not low <= limit_w <= high:
            raise SpecError("limit_w", f"{limit_w:g} W is not in [{low:g}, {high:g}] W")
        self.limit_mw = to_milliwatts(limit_w)
        self._follow(now_ns)

    def cap_power(self, cap_w: float | None, now_ns: int) -> None:
        """Caps power below the limit, as hardware out of band does; None removes the cap."""
        self.cap_mw = None if cap_w is None else to_milliwatts(cap_w)
        self._follow(now_ns)

    def lock_clocks(self, clocks_mhz: tuple[int, int] | None, now_ns: int) -> None:
        """Keeps the SM clock between two clocks; None unlocks it."""
        self.locked_mhz = clocks_mhz
        self._follow(now_ns)

    def set_index(self, index: int) -> None:
        """The driver counts it under another index; where it sits stays."""
        self._identity = replace(self._identity, index=index)

    def apply_mig_change(self, now_ns: int) -> None:
        """Power and clocks follow a change of MIG mode."""
        self._follow(now_ns)

    def reset(self, now_ns: int) -> None:
        """Restarts the device: its processes and handles are gone, and settings and counters are as at first."""
        self.generation += 1
        self.mig.reset()
        self._reset_settings(now_ns)

    def reload(self, now_ns: int, *, reboot: bool = False) -> None:
        """The driver, or with `reboot` the machine, came back."""
        self.generation += 1
        if reboot:
            self.mig.reboot()
        else:
            self.mig.reload()
        self._reset_settings(now_ns)

    def _reset_settings(self, now_ns: int) -> None:
        self.limit_mw = to_milliwatts(self.product.power_default_w)
        self.locked_mhz = None
        self.profiles = frozenset()
        self._wanted = IDLE_LOAD
        self.loads.set_load(IDLE_LOAD)
        self.wear.reset_volatile()
        self.begun = self.loads.work_done(now_ns)
        self.reset_counter(now_ns)
        self._follow(now_ns)

    def lose(self, now_ns: int) -> None:
        """The device falls off the bus, and what ran on it dies."""
        if self.health is not SimHealth.LOST:
            self.generation += 1
        self.health = SimHealth.LOST
        self._wanted = IDLE_LOAD
        self.loads.set_load(IDLE_LOAD)
        self._follow(now_ns)

    def restore(self, now_ns: int) -> None:
        """The device answers again: after a loss as after a reset, after a hang as if nothing had been."""
        if self.health is SimHealth.LOST:
            self.reset(now_ns)
        self.health = SimHealth.OK

    def hang(self) -> None:
        """Makes calls to the device hang; its work continues."""
        if self.health is SimHealth.OK:
            self.health = SimHealth.HUNG

    def reset_counter(self, now_ns: int) -> None:
        """Restarts the energy counter from zero, as a driver reload does."""
        self._counter_base_pj = self._signal.energy_pj(now_ns)

    # What it says

    @property
    def identity(self) -> Gpu:
        """The device with its current MIG layout."""
        mig = self.mig
        if self._seen != mig.changes:
            self._seen = mig.changes
            self._identity = replace(
                self._identity,
                mig_enabled=mig.enabled,
                mig_pending=mig.enabled != mig.pending,
                gpu_instances=mig.values,
            )
        return self._identity

    @property
    def mig_enabled(self) -> bool:
        """Whether MIG is on now, whatever mode is pending."""
        return self.mig.enabled

    @property
    def limits_w(self) -> tuple[float, float]:
        """The least and the greatest power limit."""
        product = self.product
        return product.power_min_w or 0.0, product.power_max_w or product.power_default_w

    @property
    def sm_clocks_mhz(self) -> tuple[int, ...]:
        """The steps of the SM clock, lowest first."""
        return list_clock_steps(self.product)

    @property
    def enforced_mw(self) -> int:
        """The limit that holds, which something out of band may have lowered."""
        return self.limit_mw if self.cap_mw is None else min(self.limit_mw, self.cap_mw)

    @property
    def _idle_mw(self) -> int:
        # With MIG on, clocks do not drop: some parts draw more when idle.
        product = self.product
        return to_milliwatts(product.idle_mig_w if self.mig.enabled and product.idle_mig_w else product.idle_w)

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

    def work_done(self, now_ns: int) -> WorkDone:
        """What the device truly got done since the simulation began."""
        return self.loads.work_done(now_ns)

    def traffic_done(self, now_ns: int) -> WorkDone:
        """What the device got done since its counters of traffic began, with the driver or a reset."""
        return self.loads.work_done(now_ns).subtract(self.begun)

    @property
    def memory_used_bytes(self) -> int:
        """Memory that work holds."""
        return min(self.loads.total.memory_bytes, self.product.memory_bytes)

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
        if self.loads.total.utilization_ratio == 0.0:
            return _REASON_IDLE
        return _REASON_POWER_CAP if self._capped else 0

    # How it gets there

    def _follow(self, now_ns: int) -> None:
        """Power, clocks and work follow the load, the limit and the locked clocks."""
        loads, mig, product = self.loads, self.mig, self.product
        loads.sum_loads(mig.instances, mig.geometry.compute_slices if mig.geometry else 1)
        is_spinning = self._conduct is LoadBehavior.SPINNING
        pace = compute_operating_point(
            product,
            loads.total,
            idle_mw=self._idle_mw,
            limit_mw=self.enforced_mw,
            locked_mhz=self.locked_mhz,
            awake=mig.enabled,
            spins=is_spinning,
        )
        self._capped = pace.capped
        self.sm_clock_mhz, self.memory_clock_mhz = pace.sm_clock_mhz, pace.memory_clock_mhz
        loads.set_clock(0.0 if is_spinning else pace.clock, mig.instances, now_ns)
        ratio = loads.total.utilization_ratio
        self.percents = None if mig.enabled else (round(100.0 * ratio), round(100.0 * loads.memory_share))
        if pace.power_mw != self._signal.level_mw:
            self._temperature_c, self._heat_ns = self._heat(now_ns), now_ns
            self._signal.set_level(pace.power_mw, now_ns)
            self._steady_mw = self._shown_mw(pace.power_mw)

    def _sense(self, sensor: PowerSensor, now_ns: int) -> int:
        signal = self._signal
        period_ns, window_ns = sensor.period_ms * _NS_PER_MS, sensor.window_ms * _NS_PER_MS
        if now_ns - signal.changed_ns >= period_ns + window_ns:
            # No window can reach back to another level.
            return self._steady_mw
        sampled_ns = now_ns - (now_ns - self._phase_ns) % period_ns
        return self._shown_mw(signal.mean_mw(sampled_ns - window_ns, sampled_ns))

    def _shown_mw(self, power_mw: float) -> int:
        return max(0, round(power_mw * self._gain + self._offset_mw))

    def _settled_c(self, level_mw: int) -> float:
        return _AMBIENT_C + _RISE_C * level_mw / (1000.0 * self.product.busy_w)

    def _heat(self, now_ns: int) -> float:
        settled_c = self._settled_c(self._signal.level_mw)
        return settled_c + (self._temperature_c - settled_c) * math.exp((self._heat_ns - now_ns) / _LAG_NS)


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
        numa_node=index // _ON_A_PROCESSOR,
    )


def _mig(spec: GpuSpec, product: Product, uuid: UUID, branch: int) -> SimMig:
    geometry = None if product.mig is None else adapt_geometry(product.mig, branch)
    mig = SimMig(geometry, uuid, branch=branch)
    if spec.mig is not None:
        layout = [
            (profile, placed.start, placed.compute_slices) for profile, placed in resolve_mig_layout(spec, product)
        ]
        try:
            mig.apply_layout(layout)
        except DriverRefused as refused:
            raise SpecError("mig", f"driver branch {branch} does not make this layout ({refused})") from None
    return mig
