"""The energy ledger's part of the metrics page: windows, failures, age, and joules by namespace.

Owns which namespaces have series of their own. Must not know how the ledger is kept.

Theory. Counters never fall, so who has a series keeps what was counted under its name, and
whoever has none is counted under `other`, from then on and never again. A namespace takes
the place of the one that spent least when it has spent twice as much: places change some
dozen times over the orders of magnitude in between, not at each flush. So rates add up to
everything that is booked; totals do not hold what places that were given up had counted.
The ledger itself (`eelctl energy`) is exact, and survives a restart, which these do not.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from eelgrid_controller.adapters.described import NAMESPACES_MOST, OTHER, Family, family
from eelgrid_controller.energy_ledger.entries import Entry

__all__ = ["LedgerPage", "NamespaceEnergy"]

_NAMESPACES_KNOWN_MOST = 10_000
_NONE = "none"
_NS_S = 1e-9


class Counts(Protocol):
    """What a desk counts of itself; windows are all that came."""

    windows: int
    again: int
    dropped: int
    failures: int


class NamespaceEnergy:
    """Joules by namespace, with a bound on names; in whole millijoules, so that they add up."""

    def __init__(self, most: int = NAMESPACES_MOST) -> None:
        self.shown_mj: Counter[str] = Counter()
        self._most = most
        self._spent_mj: Counter[str] = Counter()
        # Counters of those that gave their place up, for when they come back.
        self._kept_mj: dict[str, int] = {}

    def add(self, namespace: str, energy_mj: int) -> None:
        """Counts under the namespace's own name or under OTHER."""
        if namespace in self._spent_mj or len(self._spent_mj) < _NAMESPACES_KNOWN_MOST:
            self._spent_mj[namespace] += energy_mj
        if namespace == OTHER or namespace in self.shown_mj or self._takes_place(namespace):
            self.shown_mj[namespace] += energy_mj
        else:
            self.shown_mj[OTHER] += energy_mj

    def _takes_place(self, namespace: str) -> bool:
        own = [name for name in self.shown_mj if name != OTHER]
        if len(own) >= self._most:
            least = min(own, key=self._spent_mj.__getitem__)
            if self._spent_mj[namespace] < 2 * max(1, self._spent_mj[least]):
                return False
            self._kept_mj[least] = self.shown_mj.pop(least)
        self.shown_mj[namespace] = self._kept_mj.pop(namespace, 0)
        return True


class LedgerPage:
    """Families of one desk; `booked` hears of what is on disk."""

    def __init__(self, counts: Counts, *, now_ns: Callable[[], int]) -> None:
        self._counts, self._now_ns = counts, now_ns
        self._energy = NamespaceEnergy()
        self._end_ns = 0

    def booked(self, entries: Sequence[Entry], end_ns: int) -> None:
        """Entries that are on disk now, and the end of their newest window."""
        self._end_ns = max(self._end_ns, end_ns)
        sums: Counter[str] = Counter()
        for entry in entries:
            holder = entry.holder
            sums[holder.kind if holder.is_nobody else holder.namespace or _NONE] += entry.booked.energy_mj
        for namespace, energy_mj in sums.items():
            self._energy.add(namespace, energy_mj)

    def families(self) -> Iterator[Family]:
        """All of them, as of now."""
        counts = self._counts
        taken = counts.windows - counts.again - counts.dropped
        yield family("eelgrid_ledger_windows_total", {"taken": taken, "again": counts.again, "dropped": counts.dropped})
        yield family("eelgrid_ledger_failures_total", counts.failures)
        if self._end_ns:
            age_s = max(0.0, (self._now_ns() - self._end_ns) * _NS_S)
            yield family("eelgrid_ledger_newest_window_age_seconds", age_s)
        yield family(
            "eelgrid_ledger_energy_joules_total", {name: mj / 1000.0 for name, mj in self._energy.shown_mj.items()}
        )
