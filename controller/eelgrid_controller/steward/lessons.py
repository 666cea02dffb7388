"""What steered jobs taught: their windows become points of their profiles, so that the next job begins with them.

Owns when a mean of windows is worth telling. Must not know how points are kept.

A point is told when it rests on FIRST windows, and again each time that these are four
times as many: a curve is there soon, and a job of a month writes a handful of points. It
is of the whole job at a limit that was read back, exploration and all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.power.evidence import Window
from eelgrid_controller.steward.world import World, models_of
from eelgrid_protos.messages import MeasuredPoint, Workload

__all__ = ["FIRST", "Lessons"]

FIRST = 4
_AGAIN = 4
_KEPT_MOST = 50_000


class _Key(NamedTuple):
    profile: str
    gpu_model: str
    gpus: int
    limit_w: float


@dataclass(slots=True)
class _Sum:
    windows: int = 0
    told: int = 0  # windows that the last point rested on
    work: float = 0.0
    time_s: float = 0.0
    energy_j: float = 0.0


class Lessons:
    """Sums by profile, model, number of GPUs and limit; the oldest are forgotten when there are too many."""

    def __init__(self) -> None:
        self._sums: dict[_Key, _Sum] = {}
        self._heard: dict[_Key, _Sum] = {}  # those that a window came to since the last look

    def heard(self, workload: Workload, world: World, window: Window) -> None:
        """A window of a job; one without a profile, or on several models, teaches nobody."""
        training, models = workload.spec.training, models_of(workload, world)
        if training is None or not training.profile or len(models) != 1 or not window.time_s > 0.0:
            return
        gpus = sum(len(placement.gpu_uuids) for placement in workload.placements)
        key = _Key(training.profile, next(iter(models)), gpus, round(window.limit_w, 1))
        if key not in self._sums and len(self._sums) >= _KEPT_MOST:
            del self._sums[next(iter(self._sums))]
        known = self._heard[key] = self._sums.setdefault(key, _Sum())
        known.windows += 1
        known.work += window.work
        known.time_s += window.time_s
        known.energy_j += window.energy_j

    def due(self) -> tuple[MeasuredPoint, ...]:
        """Points that rest on enough; each is told once."""
        heard, self._heard = self._heard, {}
        return tuple(self._told(heard.items()))

    def _told(self, sums: Iterable[tuple[_Key, _Sum]]) -> Iterable[MeasuredPoint]:
        for key, known in sums:
            if known.windows < max(FIRST, _AGAIN * known.told) or not (known.work > 0.0 and known.energy_j > 0.0):
                continue
            known.told = known.windows
            yield MeasuredPoint(
                profile=key.profile, gpu_model=key.gpu_model, gpus=key.gpus, power_limit_w=key.limit_w,
                throughput_hz=known.work / known.time_s, power_w=known.energy_j / known.time_s,
                source=f"telemetry, {known.windows} windows",
            )  # fmt: skip
