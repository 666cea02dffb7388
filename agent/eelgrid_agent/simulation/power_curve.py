"""Power, clock and throughput as shares of the maximum, and exact integrals of power and work.

A busy device draws its idle watts and, above them, a share of its full swing: the share `AWAKE_POWER_SHARE` for being
awake, the rest by its clock, `1 - sqrt(1 - clock)`: the last few per cent of the clock cost the most. A job spends the
share `memory_bound` of its time on memory, which does not slow down with the SM clock, so its throughput is
`clock / ((1 - m) + m * clock)`. A power cap selects the clock that fits under it, but none below `CLOCK_FLOOR`: there
the cap is not held and the device draws more than it is allowed.

Source: the power-cap traces of Zeus (NSDI 2023, ml-energy/zeus, 218 curves on V100, A40, P100 and RTX 6000). Fitted to
the 150 curves that rise 40 W or more above the least power of any trace on the same part, which is taken for an awake
device, as throughput over power, both relative to the highest cap: with one memory share for all jobs (0.2) the
residual is 0.055 root mean square of throughput; with a share for each job it is 0.036 (median 0.012), and nine in ten
of those shares lie in 0 to 0.6. The floor is where the A40 stays under a cap of 100 W: 109 W and 0.32 of the throughput
there, 108 W and 0.35 here. The traces do not cover newer parts; for these only the level is known and the shape is
assumed.

Pure arithmetic on shares in [0, 1].
"""

import math
from bisect import bisect_right

from eelgrid_protos.values import dataclass

AWAKE_POWER_SHARE = 0.15
CLOCK_FLOOR = 0.3
# The median job of the traces.
DEFAULT_MEMORY_BOUND_SHARE = 0.2


def power_share(clock: float) -> float:
    """The share of the full swing that a device draws at this share of its highest clock."""
    return AWAKE_POWER_SHARE + (1.0 - AWAKE_POWER_SHARE) * (1.0 - math.sqrt(1.0 - clock))


def clock_share(power: float) -> float:
    """The clock at which a device draws this share of its full swing: the inverse of power_share, 0 when awake."""
    by_clock = min(max((power - AWAKE_POWER_SHARE) / (1.0 - AWAKE_POWER_SHARE), 0.0), 1.0)
    return 1.0 - (1.0 - by_clock) ** 2


def throughput_share(clock: float, memory_bound: float) -> float:
    """The share of a job's throughput that remains at this clock."""
    return clock / ((1.0 - memory_bound) + memory_bound * clock) if clock else 0.0


PICOJOULES_PER_MILLIJOULE = 1_000_000_000

# The longest window is 1 s and the longest period 0.1 s; see the catalogue's sensors.
_KEPT_NS = 2_000_000_000
# Changes kept at most: one a millisecond. The energy so far survives what is dropped.
_SEGMENTS_MOST = 2048


class PowerSignal:
    """Power over time. Time never falls."""

    __slots__ = ("_energies_pj", "_starts_ns", "changed_ns", "level_mw")

    def __init__(self, level_mw: int, now_ns: int) -> None:
        self.level_mw = level_mw
        self.changed_ns = now_ns
        self._starts_ns = [now_ns]
        self._energies_pj = [0]

    def set_level(self, level_mw: int, now_ns: int) -> None:
        """The level from now on."""
        if level_mw == self.level_mw:
            return
        energy_pj = self.energy_pj(now_ns)
        self.level_mw = level_mw
        self.changed_ns = now_ns
        starts, energies = self._starts_ns, self._energies_pj
        if starts[-1] == now_ns:
            return
        starts.append(now_ns)
        energies.append(energy_pj)
        unseen = max(bisect_right(starts, now_ns - _KEPT_NS) - 1, len(starts) - _SEGMENTS_MOST)
        if unseen > 0:
            del starts[:unseen], energies[:unseen]

    def energy_pj(self, now_ns: int) -> int:
        """Energy since the beginning, up to a moment after the last change."""
        return self._energies_pj[-1] + self.level_mw * (now_ns - self._starts_ns[-1])

    def mean_mw(self, since_ns: int, until_ns: int) -> float:
        """Mean power over a window that ends after the last change or in the part that is kept."""
        if since_ns >= self.changed_ns:
            return self.level_mw
        return (self._energy_then_pj(until_ns) - self._energy_then_pj(since_ns)) / (until_ns - since_ns)

    def _energy_then_pj(self, then_ns: int) -> int:
        """Energy up to a kept moment; before the beginning, the first level is taken to have held."""
        starts, energies = self._starts_ns, self._energies_pj
        place = max(bisect_right(starts, then_ns) - 1, 0)
        if place == len(starts) - 1:
            level_mw = self.level_mw
        else:
            # Exact: that energy is this level times that span.
            level_mw = (energies[place + 1] - energies[place]) // (starts[place + 1] - starts[place])
        return energies[place] + level_mw * (then_ns - starts[place])


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Seconds since the beginning: with work there, of unthrottled work, and of busy memory."""

    active_s: float = 0.0
    work_s: float = 0.0
    memory_s: float = 0.0

    def subtract(self, before: "WorkDone") -> "WorkDone":
        """What came after `before`."""
        return WorkDone(self.active_s - before.active_s, self.work_s - before.work_s, self.memory_s - before.memory_s)


class WorkMeter:
    """The integrals. Time never falls."""

    __slots__ = ("_active", "_done", "_memory", "_since_ns", "_work")

    def __init__(self, now_ns: int) -> None:
        self._active = self._work = self._memory = 0.0
        self._done = WorkDone()
        self._since_ns = now_ns

    def set_rates(self, active: float, clock: float, memory_bound: float, now_ns: int) -> None:
        """The rates from now on, of a load that is there `active` of the time, at this share of the highest clock."""
        work = active * throughput_share(clock, memory_bound)
        memory = memory_bound * work
        if (active, work, memory) == (self._active, self._work, self._memory):
            return
        self._done, self._since_ns = self.read_work(now_ns), now_ns
        self._active, self._work, self._memory = active, work, memory

    @property
    def memory_share(self) -> float:
        """The share of time that the memory is busy now."""
        return self._memory

    def read_work(self, now_ns: int) -> WorkDone:
        """The integrals up to now."""
        seconds, done = (now_ns - self._since_ns) * 1e-9, self._done
        return WorkDone(
            done.active_s + self._active * seconds,
            done.work_s + self._work * seconds,
            done.memory_s + self._memory * seconds,
        )
