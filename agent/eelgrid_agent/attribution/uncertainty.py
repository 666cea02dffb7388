"""Joules and how far they may be off.

Owns the errors of power sensors and energy counters. Must not know how energy
is counted (the sampler does), nor any clock.

Theory (arXiv 2312.02741). A sensor's gain is off by up to 5 % from board to
board, and a counter is fed by the same sensor: that part is systematic and
grows with the energy. A counter adds only its ends: it is renewed every
100 ms, so each end may lag by that much power. Integrated power also misses
what the sensor does not look at: a reading is the mean of the last `window_ms`
(25 of every 100 ms on A100 and H100, 1 s for the averaged field), and the rest
of each step between two readings is a straight line that real power may leave.
The step's rise is taken for how far; such errors are independent and add in
squares. What is not bounded: a load that beats in time with the sensor, and
what nobody measured, whose seconds are told apart.
"""

import math
from dataclasses import dataclass
from enum import Enum

from eelgrid_protos.catalogue import PowerSensor

__all__ = ["COUNTER_REFRESH_S", "GAIN_ERROR", "EnergyEstimate", "EnergyMethod", "EnergyWindow"]

GAIN_ERROR = 0.05
COUNTER_REFRESH_S = 0.1
# Where the part is not known: what Ampere and newer give for the plain power call.
_SENSOR = PowerSensor(period_ms=100, window_ms=25, kind="assumed")


class EnergyMethod(Enum):
    """How a window's energy was had."""

    COUNTER = "counter"
    INTEGRATED = "integrated"
    # The counter, with stretches that only power covers.
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyEstimate:
    """energy_j +- uncertainty_j over `seconds`; `uncounted_s` of them are in neither."""

    energy_j: float
    uncertainty_j: float
    method: EnergyMethod
    seconds: float
    uncounted_s: float = 0.0


class EnergyWindow:
    """One device's energy since the window was opened, out of a total that never falls."""

    __slots__ = (
        "_anchored", "_begin_j", "_begin_ns", "_begin_w", "_counted", "_last_j", "_last_ns", "_last_w",
        "_pending_j2", "_pending_s", "_sensor", "_settled_j2", "_settled_s",
    )  # fmt: skip

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

    def estimate(self, *, uncounted_s: float = 0.0) -> EnergyEstimate | None:
        """What the window holds, but for seconds that the total does not; None before the first total."""
        if self._begin_j is None:
            return None
        ends_j = COUNTER_REFRESH_S * (self._begin_w + self._last_w) if self._counted else 0.0
        method = EnergyMethod.COUNTER
        if self._settled_s + self._pending_s > 0.0 or not self._anchored:
            method = EnergyMethod.MIXED if self._counted else EnergyMethod.INTEGRATED
        return EnergyEstimate(
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
