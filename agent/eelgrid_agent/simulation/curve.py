"""How power, SM clock and throughput of a busy device hang together: flat, knee, collapse, and a floor.

A busy device draws its idle watts and, above them, a share of its full swing:
the share `AWAKE` merely to be awake, the rest by its clock,
`1 - sqrt(1 - clock)`: the last few per cent of the clock are the dearest. A
job spends the share `memory_bound` of its time on memory, which does not slow
with the SM clock, so its throughput is `clock / ((1 - m) + m * clock)`. A
power cap takes the clock that fits under it, but none below `FLOOR`: there the
cap is not held and the device draws more than it is allowed.

Source: the power-cap traces of Zeus (NSDI 2023, ml-energy/zeus, 218 curves on
V100, A40, P100 and RTX 6000). Fitted to the 150 curves that rise 40 W or more
above the least power of any trace on the same part, which is taken for an
awake device, as throughput over power, both relative to the highest cap: with
one memory share for all jobs (0.2) the residual is 0.055 root mean square of
throughput; with a share for each job it is 0.036 (median 0.012), and nine in
ten of those shares lie in 0 to 0.6. The floor is where the A40 stays
under a cap of 100 W: 109 W and 0.32 of the throughput there, 108 W and 0.35
here. What the traces do not show, and so is assumed: newer parts, where only
the level is known.

Pure arithmetic on shares in [0, 1]; it knows no watts and no product.
"""

import math

__all__ = ["AWAKE", "FLOOR", "MEMORY_BOUND", "clock_share", "power_share", "throughput_share"]

AWAKE = 0.15
FLOOR = 0.3
# The median job of the traces.
MEMORY_BOUND = 0.2


def power_share(clock: float) -> float:
    """The share of the full swing that a device draws at this share of its highest clock."""
    return AWAKE + (1.0 - AWAKE) * (1.0 - math.sqrt(1.0 - clock))


def clock_share(power: float) -> float:
    """The clock at which a device draws this share of its full swing: the inverse of power_share, 0 when awake."""
    by_clock = min(max((power - AWAKE) / (1.0 - AWAKE), 0.0), 1.0)
    return 1.0 - (1.0 - by_clock) ** 2


def throughput_share(clock: float, memory_bound: float) -> float:
    """What is left of a job's throughput at this clock."""
    return clock / ((1.0 - memory_bound) + memory_bound * clock) if clock else 0.0
