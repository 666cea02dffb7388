"""Turns measurement windows of jobs into profile points, and back into limit histories after a restart."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.objectives.observation import ClusterObservation, gpu_models_of
from eelgrid_controller.objectives.power.estimates import LimitArm, LimitHistory, MeasurementWindow, WindowScatter
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.state.profile_points import make_job_profile_name
from eelgrid_protos.messages import MeasuredPoint, Workload

HISTORY_INTERVAL_S = 600.0
JOBS_MOST = 4_000  # of 12 limits each: half of all points that are kept
_MORE = 4
_PROFILE_MOST = 253
_SOURCE = re.compile(r"own, ([0-9]{1,9}) windows, scatter ([0-9.]{1,12}) % and ([0-9.]{1,12}) %")
_NOISE_MOST = 64.0  # windows that a scatter of before is worth


class _RecordedHistory(NamedTuple):
    at_s: float
    limits_w: tuple[float, ...]
    windows: int


class JobHistories:
    """Remembers what was told of each job."""

    def __init__(self) -> None:
        self._told: dict[str, _RecordedHistory] = {}

    def collect_points(
        self, shown: Mapping[str, LimitHistory], jobs: Mapping[str, Workload], world: ClusterObservation
    ) -> tuple[MeasuredPoint, ...]:
        """Points of jobs of which there is enough that is new."""
        self._told = {name: told for name, told in self._told.items() if name in jobs}
        made: list[MeasuredPoint] = []
        for name, (arms, noise) in shown.items():
            workload = jobs.get(name)
            if workload is None or not self._is_due(name, arms, world.at_s):
                continue
            models = gpu_models_of(workload, world)
            if len(models) == 1 and len(make_job_profile_name(name)) <= _PROFILE_MOST:
                self._told[name] = _RecordedHistory(world.at_s, *_behind(arms))
                made += _points(workload, next(iter(models)), arms, noise)
        return tuple(made)

    def _is_due(self, name: str, arms: tuple[LimitArm, ...], at_s: float) -> bool:
        told, (limits_w, windows) = self._told.get(name), _behind(arms)
        if told is None:
            return bool(arms) and len(self._told) < JOBS_MOST
        is_news = limits_w != told.limits_w or windows >= _MORE * told.windows or windows < told.windows
        return is_news and at_s - told.at_s >= HISTORY_INTERVAL_S


def _behind(arms: Iterable[LimitArm]) -> tuple[tuple[float, ...], int]:
    known = list(arms)
    return tuple(arm.limit_w for arm in known), sum(arm.windows for arm in known)


def _gpus(workload: Workload) -> int:
    return sum(len(placement.gpu_uuids) for placement in workload.placements)


def _points(
    workload: Workload, gpu_model: str, arms: Iterable[LimitArm], noise: WindowScatter | None
) -> list[MeasuredPoint]:
    scatter = (0.0, 0.0) if noise is None else (100.0 * noise.time_share, 100.0 * noise.energy_share)
    return [
        MeasuredPoint(
            profile=make_job_profile_name(workload.workload_id),
            gpu_model=gpu_model,
            gpus=_gpus(workload),
            power_limit_w=arm.limit_w,
            throughput_hz=arm.work / arm.time_s,
            power_w=arm.power_w,
            source=f"own, {arm.windows} windows, scatter {scatter[0]:.4f} % and {scatter[1]:.4f} %",
        )
        for arm in arms
    ]


def limit_history(workload: Workload, gpu_model: str, points: Iterable[Point], window_s: float) -> LimitHistory:
    """What a job showed on so many GPUs of this model, as a search sums it; windows are taken to last `window_s`."""
    made, shares = list[LimitArm](), (0.0, 0.0)
    for point in points:
        running, found = point.configuration, _SOURCE.fullmatch(point.source)
        if running.gpu_model != gpu_model or running.gpus != _gpus(workload) or running.mig_profile or found is None:
            continue
        if running.power_limit_w is None or point.power_w is None or not point.power_w > 0.0:
            continue
        counted = max(1, int(found[1]))
        time_s = counted * window_s
        made.append(
            LimitArm(running.power_limit_w, counted, point.throughput_hz * time_s, time_s, point.power_w * time_s)
        )
        shares = max(shares[0], _number(found[2]) / 100.0), max(shares[1], _number(found[3]) / 100.0)
    if not made:
        return LimitHistory()
    windows = min(_NOISE_MOST, float(sum(arm.windows for arm in made)))
    return LimitHistory(tuple(made), WindowScatter.prior(*shares, windows) if min(shares) > 0.0 else None)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


FIRST_WINDOWS = 4
_GROWTH_FACTOR = 4
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


class ProfileUpdates:
    """Sums by profile, model, number of GPUs and limit; the oldest are forgotten when there are too many."""

    def __init__(self) -> None:
        self._sums: dict[_Key, _Sum] = {}
        self._heard: dict[_Key, _Sum] = {}  # those that a window came to since the last look

    def add_window(self, workload: Workload, world: ClusterObservation, window: MeasurementWindow) -> None:
        """A window of a job; one without a profile, or on several models, teaches nobody."""
        training, models = workload.spec.training, gpu_models_of(workload, world)
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

    def collect_points(self) -> tuple[MeasuredPoint, ...]:
        """Points that rest on enough; each is told once."""
        heard, self._heard = self._heard, {}
        return tuple(self._point_of(heard.items()))

    def _point_of(self, sums: Iterable[tuple[_Key, _Sum]]) -> Iterable[MeasuredPoint]:
        for key, known in sums:
            if known.windows < max(FIRST_WINDOWS, _GROWTH_FACTOR * known.told) or not (
                known.work > 0.0 and known.energy_j > 0.0
            ):
                continue
            known.told = known.windows
            yield MeasuredPoint(
                profile=key.profile,
                gpu_model=key.gpu_model,
                gpus=key.gpus,
                power_limit_w=key.limit_w,
                throughput_hz=known.work / known.time_s,
                power_w=known.energy_j / known.time_s,
                source=f"telemetry, {known.windows} windows",
            )
