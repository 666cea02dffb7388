"""A power signal that is constant between changes, in whole milliwatts and nanoseconds.

Energy is therefore exact: an integer number of milliwatt-nanoseconds
(picojoules), and the mean over any window is the difference of two of them.
Only what a sensor's window can still see is kept.
"""

from bisect import bisect_right

__all__ = ["PICOJOULES_PER_MILLIJOULE", "PowerSignal"]

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

    def set(self, level_mw: int, now_ns: int) -> None:
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
