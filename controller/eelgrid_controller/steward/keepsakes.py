"""What a job itself showed at each limit, kept as points of its own so that a restart need not try it all again.

Owns when that is worth an event of the journal, and the way to points and back. Must not
know how limits are searched.

A job is told of when its search has settled, all its limits at once: the first time, when
the limits that it knows are others, and when the windows behind them are four times as
many; never more often than every AGAIN_S. So a job of a month writes a handful of events.
The points carry a profile that no other job reads (`own_profile`); the state forgets it
when the job ends. Sums are of the search's present phase: what a job did before it changed
is not among them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from eelgrid_controller.measured import own_profile
from eelgrid_controller.power.evidence import Arm, Noise, Shown
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.steward.world import World, models_of
from eelgrid_protos.messages import MeasuredPoint, Workload

__all__ = ["JOBS_MOST", "Keepsakes", "shown_by"]

AGAIN_S = 600.0
JOBS_MOST = 4_000  # of 12 limits each: half of all points that are kept
_MORE = 4
_PROFILE_MOST = 253
_SOURCE = re.compile(r"own, ([0-9]{1,9}) windows, scatter ([0-9.]{1,12}) % and ([0-9.]{1,12}) %")
_NOISE_MOST = 64.0  # windows that a scatter of before is worth


class _Told(NamedTuple):
    at_s: float
    limits_w: tuple[float, ...]
    windows: int


class Keepsakes:
    """Remembers what was told of each job."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def due(self, shown: Mapping[str, Shown], jobs: Mapping[str, Workload], world: World) -> tuple[MeasuredPoint, ...]:
        """Points of jobs of which there is enough that is new."""
        self._told = {name: told for name, told in self._told.items() if name in jobs}
        made: list[MeasuredPoint] = []
        for name, (arms, noise) in shown.items():
            workload = jobs.get(name)
            if workload is None or not self._is_due(name, arms, world.at_s):
                continue
            models = models_of(workload, world)
            if len(models) == 1 and len(own_profile(name)) <= _PROFILE_MOST:
                self._told[name] = _Told(world.at_s, *_behind(arms))
                made += _points(workload, next(iter(models)), arms, noise)
        return tuple(made)

    def _is_due(self, name: str, arms: tuple[Arm, ...], at_s: float) -> bool:
        told, (limits_w, windows) = self._told.get(name), _behind(arms)
        if told is None:
            return bool(arms) and len(self._told) < JOBS_MOST
        is_news = limits_w != told.limits_w or windows >= _MORE * told.windows or windows < told.windows
        return is_news and at_s - told.at_s >= AGAIN_S


def _behind(arms: Iterable[Arm]) -> tuple[tuple[float, ...], int]:
    known = list(arms)
    return tuple(arm.limit_w for arm in known), sum(arm.windows for arm in known)


def _gpus(workload: Workload) -> int:
    return sum(len(placement.gpu_uuids) for placement in workload.placements)


def _points(
    workload: Workload, gpu_model: str, arms: Iterable[Arm], noise: Noise | None
) -> list[MeasuredPoint]:  # fmt: skip
    scatter = (0.0, 0.0) if noise is None else (100.0 * noise.time_share, 100.0 * noise.energy_share)
    return [
        MeasuredPoint(
            profile=own_profile(workload.workload_id), gpu_model=gpu_model, gpus=_gpus(workload),
            power_limit_w=arm.limit_w, throughput_hz=arm.work / arm.time_s, power_w=arm.power_w,
            source=f"own, {arm.windows} windows, scatter {scatter[0]:.4f} % and {scatter[1]:.4f} %",
        )
        for arm in arms
    ]  # fmt: skip


def shown_by(workload: Workload, gpu_model: str, points: Iterable[Point], window_s: float) -> Shown:
    """What a job showed on so many GPUs of this model, as a search sums it; windows are taken to last `window_s`."""
    made, shares = list[Arm](), (0.0, 0.0)
    for point in points:
        running, found = point.configuration, _SOURCE.fullmatch(point.source)
        if running.gpu_model != gpu_model or running.gpus != _gpus(workload) or running.mig_profile or found is None:
            continue
        if running.power_limit_w is None or point.power_w is None or not point.power_w > 0.0:
            continue
        counted = max(1, int(found[1]))
        time_s = counted * window_s
        made.append(Arm(running.power_limit_w, counted, point.throughput_hz * time_s, time_s, point.power_w * time_s))
        shares = max(shares[0], _number(found[2]) / 100.0), max(shares[1], _number(found[3]) / 100.0)
    if not made:
        return Shown()
    windows = min(_NOISE_MOST, float(sum(arm.windows for arm in made)))
    return Shown(tuple(made), Noise.prior(*shares, windows) if min(shares) > 0.0 else None)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
