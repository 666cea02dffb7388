"""The energy ledger's part of the metrics page: windows, failures, age, size, exporters, and joules by namespace.

Owns the names of its metrics. Must not know how the ledger is kept, nor which namespaces have a counter of their own:
that is `energy_ledger/namespaces.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from eelgrid_controller.adapters.described import Family, family
from eelgrid_controller.energy_ledger.exporting import Exporter

__all__ = ["LedgerPage"]

_NS_S = 1e-9


class Counts(Protocol):
    """What a desk counts of itself; windows are all that came."""

    windows: int
    again: int
    dropped: int
    refused: int
    unplaced: int
    failures: int
    newest_ns: int | None  # the latest end of a window that is on disk
    forgotten: Mapping[str, int]  # rows by why they had to go
    used_bytes: int | None
    bytes_most: int

    @property
    def damaged_parts(self) -> int:
        """Hours and days of nodes, and names, that are left out of answers."""

    @property
    def exporters(self) -> Mapping[str, Exporter]:
        """Marks by name; as many as `exporting.py` allows."""

    def by_namespace(self) -> Mapping[str, float]:
        """Joules of what is on disk, since the ledger began."""


class LedgerPage:
    """Families of one desk."""

    def __init__(self, counts: Counts, *, now_ns: Callable[[], int]) -> None:
        self._counts, self._now_ns = counts, now_ns

    def families(self) -> Iterator[Family]:
        """All of them, as of now."""
        counts = self._counts
        others = {
            "again": counts.again, "dropped": counts.dropped, "refused": counts.refused, "unplaced": counts.unplaced,
        }  # fmt: skip
        yield family("eelgrid_ledger_windows_total", {"taken": counts.windows - sum(others.values()), **others})
        yield family("eelgrid_ledger_failures_total", counts.failures)
        yield family("eelgrid_ledger_damaged_parts", counts.damaged_parts)
        if counts.newest_ns is not None:
            age_s = max(0.0, (self._now_ns() - counts.newest_ns) * _NS_S)
            yield family("eelgrid_ledger_newest_window_age_seconds", age_s)
        if counts.used_bytes is not None:
            yield family("eelgrid_ledger_size_bytes", counts.used_bytes)
        yield family("eelgrid_ledger_size_limit_bytes", counts.bytes_most)
        yield family("eelgrid_ledger_forgotten_rows_total", counts.forgotten)
        exporters, now_s = counts.exporters.values(), self._now_ns() * _NS_S
        yield family("eelgrid_ledger_export_lag_seconds", {one.name: one.lag_s(now_s) for one in exporters})
        changed = {one.name: one.changed.hours if one.changed else 0 for one in exporters}
        yield family("eelgrid_ledger_export_changes", changed)
        yield family("eelgrid_ledger_energy_joules_total", counts.by_namespace())
