"""What jobs have done, from the totals that they tell to increments.

Owns the last total of each. Must not know promises, nor where totals come from.

Theory. A total counts from wherever the job began, which may be a checkpoint of another run: so
the first total is where counting begins, and what was done before it is not known. A total that
fell is of a job that went back to a checkpoint: what it did in between is not known either, and
counting begins anew.
"""

from eelgrid_controller.energy_ledger.working import WORK, Worked
from eelgrid_controller.steward.meters import Progress

__all__ = ["JobWork"]


class JobWork:
    """All jobs'; totals in, increments out."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._last: dict[str, Progress] = {}

    def keep(self, names: set[str], at_s: float) -> None:
        """Who else is forgotten."""
        if self._began_s is None:
            self._began_s = at_s
        self._last = {name: last for name, last in self._last.items() if name in names}

    def look(self, name: str, unit: str, told: Progress | None, placed_s: float) -> Worked | None:
        """What is new since the last total, in the job's own unit, which may not be known; None for nothing."""
        unit = unit or WORK
        if told is None:
            return None
        last = self._last.get(name)
        if last is not None and told.at_s <= last.at_s:
            return None
        self._last[name] = told
        if last is None:
            was_seen = self._began_s is not None and self._began_s <= placed_s <= told.at_s
            return Worked(name, unit, 0.0, placed_s, told.at_s, is_whole=False) if was_seen else None
        if told.work < last.work:
            return Worked(name, unit, 0.0, last.at_s, told.at_s, is_whole=False)
        return Worked(name, unit, told.work - last.work, last.at_s, told.at_s)
