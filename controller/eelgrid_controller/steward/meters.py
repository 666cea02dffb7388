"""Windows of a job: progress and energy of all its GPUs between two moments at one limit.

Owns when a window begins and ends, and what makes one void. Must not know where readings
come from, nor promises.

Theory. Progress is a counter seen at moments, energy a counter of each GPU seen at other
moments, on other nodes by other clocks. A window is the time between two moments at which
progress was seen to have moved, so that a step that is under way is not counted as
stillness; each GPU's mean power over the nearest interval of its own readings stands for
it:
    work = w1 - w0        energy = sum over GPUs (E1 - E0) / (t1 - t0) x time
A counter that fell, a GPU that is another, and a limit that changed make what was seen so
far void, and a window begins anew. All GPUs must show the same limit at both ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.power.evidence import Window
from eelgrid_controller.power.exploration import Unusable

__all__ = ["GpuLook", "Meter", "Progress"]

_SAME_W = 1.0  # drivers round limits


class GpuLook(NamedTuple):
    """A GPU's newest counters, by its node's clock."""

    time_s: float
    energy_j: float
    limit_w: float


class Progress(NamedTuple):
    """Units of work done since the job began, as told at a moment."""

    at_s: float
    work: float


@dataclass(frozen=True, slots=True)
class _Opening:
    progress: Progress
    gpus: Mapping[str, GpuLook]
    limit_w: float


def _limit_w(gpus: Mapping[str, GpuLook]) -> float | None:
    """The limit of all; None while they differ."""
    limits = [look.limit_w for look in gpus.values()]
    return max(limits) if limits and max(limits) - min(limits) <= _SAME_W else None


class Meter:
    """One job's windows; looks in, windows out."""

    def __init__(self, uuids: frozenset[str], begun_s: float, *, window_s: float, missed_s: float) -> None:
        """`uuids` are all GPUs of the job."""
        self.uuids = uuids
        self._window_s = window_s
        self._missed_s = missed_s
        self._since_s = begun_s  # of the last window, or of when one was missed
        self._last: Progress | None = None
        self._opening: _Opening | None = None

    @property
    def work(self) -> float | None:
        """The progress that was told last."""
        return None if self._last is None else self._last.work

    def restart(self) -> None:
        """What was seen so far belongs to another limit."""
        self._opening = None

    def look(self, now_s: float, progress: Progress | None, gpus: Mapping[str, GpuLook]) -> Window | Unusable | None:
        """A window that ends now, why one was missed, or nothing yet; `gpus` has those that are known."""
        moved = self._moved(progress)
        if moved is not None:
            if self._last is not None and moved.work < self._last.work:
                self._opening = None
            self._last = moved
        limit_w = _limit_w(gpus) if gpus.keys() == self.uuids else None
        if limit_w is None or self._is_void(limit_w, gpus):
            self._opening = None
        found: Window | None = None
        if limit_w is not None and moved is not None:
            found = self._closed(moved, gpus)
            if found is not None or self._opening is None:
                self._opening = _Opening(moved, dict(gpus), limit_w)
        if found is not None:
            self._since_s = now_s
            return found
        if now_s - self._since_s >= self._missed_s:
            self._since_s = now_s
            self._opening = None
            return Unusable.NO_POWER if gpus.keys() != self.uuids else Unusable.NO_PROGRESS
        return None

    def _moved(self, progress: Progress | None) -> Progress | None:
        """The progress if it is news."""
        last = self._last
        if progress is None or last is None:
            return progress
        return progress if progress.at_s > last.at_s and progress.work != last.work else None

    def _is_void(self, limit_w: float, gpus: Mapping[str, GpuLook]) -> bool:
        opening = self._opening
        return opening is not None and (
            abs(limit_w - opening.limit_w) > _SAME_W
            or any(
                look.energy_j < opening.gpus[uuid].energy_j or look.time_s < opening.gpus[uuid].time_s
                for uuid, look in gpus.items()
            )
        )

    def _closed(self, progress: Progress, gpus: Mapping[str, GpuLook]) -> Window | None:
        opening = self._opening
        if opening is None or progress.at_s - opening.progress.at_s < self._window_s:
            return None
        if any(look.time_s <= opening.gpus[uuid].time_s for uuid, look in gpus.items()):
            return None
        time_s = progress.at_s - opening.progress.at_s
        power_w = sum(
            (look.energy_j - opening.gpus[uuid].energy_j) / (look.time_s - opening.gpus[uuid].time_s)
            for uuid, look in gpus.items()
        )
        return Window(opening.limit_w, progress.work - opening.progress.work, time_s, power_w * time_s)
