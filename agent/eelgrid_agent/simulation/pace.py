"""How fast a device goes: its power and clocks under a load, a limit, and locked clocks.

A device with a load of u for the time draws idle watts and u of its swing, at
the clock that limit and lock leave it (see curve). It owns the step from
shares to watts and megahertz; it keeps no state and knows no time.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from eelgrid_agent.simulation.curve import AWAKE, FLOOR, clock_share, power_share
from eelgrid_agent.simulation.spec import GpuLoad
from eelgrid_protos.catalogue import Product

__all__ = ["Pace", "clock_steps", "milli", "pace_of", "stepped"]

_CLOCK_STEP_MHZ = 15.0


@dataclass(frozen=True, slots=True)
class Pace:
    """True power; clock as a share of the highest, and as NVML shows it; whether the power limit holds it down."""

    power_mw: int
    clock: float
    sm_clock_mhz: int
    memory_clock_mhz: int
    capped: bool


def pace_of(
    product: Product,
    load: GpuLoad,
    *,
    idle_mw: int,
    limit_mw: int,
    locked_mhz: tuple[int, int] | None,
    awake: bool,
    spins: bool = False,
) -> Pace:
    """The pace; `awake` keeps the clocks up without a load, as MIG does. A load that spins draws what being awake does."""
    utilization, highest = load.utilization_ratio, product.sm_clock_max_mhz
    if utilization == 0.0 and not awake:
        memory_clock_mhz = product.memory_clock_idle_mhz or product.memory_clock_mhz
        return Pace(idle_mw, 0.0, product.sm_clock_min_mhz, memory_clock_mhz, capped=False)
    clock = 1.0 if locked_mhz is None else min(locked_mhz[1] / highest, 1.0)
    swing_mw = (milli(product.busy_w) - idle_mw) * utilization
    power_mw = idle_mw + round(swing_mw * (AWAKE if spins else power_share(clock)))
    capped = power_mw > max(limit_mw, idle_mw)
    if capped:
        fitting = clock_share((limit_mw - idle_mw) / swing_mw)
        clock = min(clock, max(fitting, FLOOR))
        # On the curve the limit is met to the milliwatt; on the floor it is not held.
        power_mw = limit_mw if clock == fitting else idle_mw + round(swing_mw * power_share(clock))
    return Pace(power_mw, clock, stepped(product, highest * clock), product.memory_clock_mhz, capped)


def stepped(product: Product, clock_mhz: float) -> int:
    """The highest clock step that is not above."""
    step_mhz = _step_mhz(product)
    steps = math.ceil((product.sm_clock_max_mhz - clock_mhz) / step_mhz - 1e-9)
    return max(product.sm_clock_min_mhz, int(product.sm_clock_max_mhz - steps * step_mhz))


def clock_steps(product: Product) -> tuple[int, ...]:
    """The steps of the SM clock, lowest first."""
    return _steps(product.sm_clock_min_mhz, product.sm_clock_max_mhz, _step_mhz(product))


@lru_cache(maxsize=64)  # settings are read back several times a second
def _steps(low: int, high: int, step_mhz: float) -> tuple[int, ...]:
    return tuple(int(high - step * step_mhz) for step in range(int((high - low) / step_mhz), -1, -1))


def _step_mhz(product: Product) -> float:
    return product.sm_clock_step_mhz or _CLOCK_STEP_MHZ


def milli(watts: float) -> int:
    """Milliwatts, as NVML counts."""
    return round(watts * 1000.0)
