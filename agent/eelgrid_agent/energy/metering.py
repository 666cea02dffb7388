"""Energy metering between two attributions: totals, mean utilization and measurement uncertainty.

Attribution runs every few seconds and ticks come every second or tenth of one. Uncertainty grows with the steps over
which power was integrated, and a device that worked between two attributions was not idle, so both are taken from every
tick; an attribution uses the mean utilization since the one before.

Uncertainty follows arXiv 2312.02741. The gain of a sensor is off by up to 5 % from board to board, and a counter is fed
by the same sensor: that part is systematic and grows with the energy. A counter adds only its ends: it is renewed every
100 ms, so each end may lag by that much power. Integrated power also misses what the sensor does not cover: a reading
is the mean of the last `window_ms` (25 of every 100 ms on A100 and H100, 1 s for the averaged field), and real power
may leave the straight line between two readings. The rise of the step bounds that error; such errors are independent
and add in squares. Not bounded are a load that beats in time with the sensor, and seconds that nobody measured, which
are reported apart.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import Enum

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.devices.sampler import GPU_READINGS, TickObservation
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.catalogue.products import PowerSensor
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, READING_RANGES, Gpu, NodeEventKind, Reading
from eelgrid_protos.values import dataclass

GAIN_ERROR = 0.05
COUNTER_REFRESH_S = 0.1
# Where the part is not known: what Ampere and newer give for the plain power call.
_SENSOR = PowerSensor(period_ms=100, window_ms=25, kind="assumed")


class EnergyMeasurement(Enum):
    """How a window's energy was had."""

    COUNTER = "counter"
    INTEGRATED = "integrated"
    # The counter, with stretches that only power covers.
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainEnergy:
    """energy_j +- uncertainty_j over `seconds`; `uncounted_s` of them are in neither."""

    energy_j: float
    uncertainty_j: float
    method: EnergyMeasurement
    seconds: float
    uncounted_s: float = 0.0


class UncertaintyWindow:
    """One device's energy since the window was opened, out of a total that never falls."""

    __slots__ = (
        "_anchored",
        "_begin_j",
        "_begin_ns",
        "_begin_w",
        "_counted",
        "_last_j",
        "_last_ns",
        "_last_w",
        "_pending_j2",
        "_pending_s",
        "_sensor",
        "_settled_j2",
        "_settled_s",
    )

    def __init__(self, sensor: PowerSensor | None = None) -> None:
        self._sensor = sensor or _SENSOR
        self._begin_j: float | None = None
        self._begin_ns = self._last_ns = 0
        self._last_j = 0.0
        self._begin_w = self._last_w = 0.0
        # Whether the counter was there before, and whether it ever covered a step.
        self._anchored = self._counted = False
        # Seconds that only power covers and the squares of their errors: since the counter was there last, and before.
        self._pending_s = self._pending_j2 = 0.0
        self._settled_s = self._settled_j2 = 0.0

    def observe(
        self, *, at_ns: int, total_j: float | None, power_w: float | None, counted: bool, reset: bool = False
    ) -> None:
        """One look of the sampler's, every one; without a total it is passed over. `counted`: the counter was there."""
        if total_j is None:
            return
        if self._begin_j is None or total_j < self._last_j:
            # The first look, or another meter: what was counted so far stays.
            self._begin_j, self._begin_ns = total_j - self._so_far_j, at_ns - self._so_far_ns
            self._begin_w = power_w or 0.0
            self._anchored = counted
        elif counted and self._anchored and not reset:
            # The counter covers everything since it was there last, so no error of integration stays.
            self._pending_s = self._pending_j2 = 0.0
            self._counted = True
        else:
            self._integrate(max(0.0, (at_ns - self._last_ns) / 1e9), power_w)
            if counted:
                self._settled_s, self._pending_s = self._settled_s + self._pending_s, 0.0
                self._settled_j2, self._pending_j2 = self._settled_j2 + self._pending_j2, 0.0
                self._anchored = True
        self._last_j, self._last_ns = total_j, at_ns
        self._last_w = self._last_w if power_w is None else power_w

    def estimate(self, *, uncounted_s: float = 0.0) -> UncertainEnergy | None:
        """What the window holds, but for seconds that the total does not; None before the first total."""
        if self._begin_j is None:
            return None
        ends_j = COUNTER_REFRESH_S * (self._begin_w + self._last_w) if self._counted else 0.0
        method = EnergyMeasurement.COUNTER
        if self._settled_s + self._pending_s > 0.0 or not self._anchored:
            method = EnergyMeasurement.MIXED if self._counted else EnergyMeasurement.INTEGRATED
        return UncertainEnergy(
            energy_j=self._so_far_j,
            uncertainty_j=GAIN_ERROR * self._so_far_j + ends_j + math.sqrt(self._settled_j2 + self._pending_j2),
            method=method,
            seconds=self._so_far_ns / 1e9,
            uncounted_s=uncounted_s,
        )

    @property
    def _so_far_j(self) -> float:
        return 0.0 if self._begin_j is None else self._last_j - self._begin_j

    @property
    def _so_far_ns(self) -> int:
        return 0 if self._begin_j is None else self._last_ns - self._begin_ns

    def _integrate(self, seconds: float, power_w: float | None) -> None:
        if seconds <= 0.0:
            return
        rise_w = 0.0 if power_w is None else abs(power_w - self._last_w)
        unseen = 1.0 - min(1.0, self._sensor.window_ms / 1e3 / seconds)
        self._pending_s += seconds
        self._pending_j2 += (unseen * rise_w / 2.0 * seconds) ** 2


# Devices present and departed whose windows are kept, as the sampler keeps their meters.
_DEVICES_MOST = 2 * GPUS_PER_NODE_MOST
_ENERGY_ROW = GPU_READINGS.index(Reading.ENERGY_J)
_POWER_ROW = GPU_READINGS.index(Reading.POWER_W)
_UTILIZATION_ROW = GPU_READINGS.index(Reading.UTILIZATION_RATIO)
_LIMIT_ROW = GPU_READINGS.index(Reading.POWER_LIMIT_W)
_COUNTER_J_MOST = READING_RANGES[Reading.ENERGY_J].high


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnergies:
    """Energies of the devices of a node by UUID at its newest tick; a device without readings is left out."""

    monotonic_ns: int
    wall_ns: int
    total_j: Mapping[str, float] = field(default_factory=dict)
    # Since the energies before.
    utilization: Mapping[str, float] = field(default_factory=dict)
    estimates: Mapping[str, UncertainEnergy] = field(default_factory=dict)
    # The highest that was enforced since the energies before.
    limits_w: Mapping[str, float] = field(default_factory=dict)


class _Tally:
    """One device."""

    __slots__ = ("limit_w", "told", "total_j", "used", "window")

    def __init__(self, window: UncertaintyWindow) -> None:
        self.window = window
        self.total_j: float | None = None
        self.used, self.told = 0.0, 0
        self.limit_w: float | None = None


class EnergyMeter:
    """One node's devices."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._tallies: dict[str, _Tally] = {}
        self._monotonic_ns = self._wall_ns = 0

    def on_tick(
        self, gpus: Iterable[Gpu], looks: Iterable[tuple[str, RawReadings]], seen: TickObservation, *, monotonic_ns: int
    ) -> None:
        """What the sampler made of one look; `looks` in its order, `gpus` of the inventory."""
        tick = seen.tick
        resets = {event.gpu_uuid for event in seen.events if event.kind is NodeEventKind.COUNTER_RESET}
        absent = {position for position, _ in tick.gpu_absences}
        self._monotonic_ns, self._wall_ns = monotonic_ns, tick.time_ns
        for column, (uuid, raw) in enumerate(looks):
            tally = self._tallies.get(uuid)
            if tally is None:
                tally = self._tallies[uuid] = _Tally(self._window(uuid, gpus))
            energy, power, used, limit = (
                None if (cell := row * tick.gpus + column) in absent else tick.gpu_values[cell]
                for row in (_ENERGY_ROW, _POWER_ROW, _UTILIZATION_ROW, _LIMIT_ROW)
            )
            counter = raw.energy_counter_j
            tally.total_j = energy
            tally.window.observe(
                at_ns=monotonic_ns,
                total_j=energy,
                power_w=power,
                reset=uuid in resets,
                counted=not isinstance(counter, Missing) and 0.0 <= counter <= _COUNTER_J_MOST,
            )
            if used is not None:
                tally.used, tally.told = tally.used + used, tally.told + 1
            if limit is not None:
                tally.limit_w = max(limit, tally.limit_w or 0.0)

    def pop_energies(self, *, uncounted_s: Mapping[str, float]) -> DeviceEnergies:
        """Returns the energies and restarts the mean utilization.

        `uncounted_s` are seconds per device that no total covers.
        """
        totals, utilization, estimates, limits_w = {}, {}, {}, {}
        for uuid, tally in self._tallies.items():
            if tally.total_j is not None:
                totals[uuid] = tally.total_j
            if tally.told:
                utilization[uuid] = tally.used / tally.told
                tally.used, tally.told = 0.0, 0
            if tally.limit_w is not None:
                limits_w[uuid], tally.limit_w = tally.limit_w, None
            estimate = tally.window.estimate(uncounted_s=uncounted_s.get(uuid, 0.0))
            if estimate is not None:
                estimates[uuid] = estimate
        return DeviceEnergies(
            monotonic_ns=self._monotonic_ns,
            wall_ns=self._wall_ns,
            total_j=totals,
            utilization=utilization,
            estimates=estimates,
            limits_w=limits_w,
        )

    def _window(self, uuid: str, gpus: Iterable[Gpu]) -> UncertaintyWindow:
        for old in list(self._tallies)[: max(0, len(self._tallies) + 1 - _DEVICES_MOST)]:
            del self._tallies[old]
        key = next((gpu.catalogue_key for gpu in gpus if gpu.uuid == uuid), "")
        product = self._catalogue.products.get(key)
        # Power is the instant field where there is one; it sees the least, so the bound is the wider one.
        return UncertaintyWindow(None if product is None else product.sensor.instant)
