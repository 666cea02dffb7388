"""Keeps what training jobs measured at each power limit as profile points, and reads it back.

`JobHistories` keeps what each job did itself, from which `limit_history` resumes its search after a restart of the
controller. `ProfileUpdates` keeps what the runs of a profile measured together, from which `former_curve` tells the
next run what each limit costs. A run hands on what it inherited together with its own windows, so that the ratios of a
curve are always those within runs: two runs may differ in pace and still agree on them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from eelgrid_controller.objectives.forecasts import JobQuestion
from eelgrid_controller.objectives.observation import ClusterObservation, gpu_models_of
from eelgrid_controller.objectives.power.estimates import (
    LimitArm,
    LimitEstimate,
    LimitHistory,
    LimitPrior,
    LimitRatio,
    WindowScatter,
)
from eelgrid_controller.objectives.power.power_model import is_same_limit
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.state.measurements import make_job_profile_name
from eelgrid_protos.messages import MeasuredPoint, Workload

HISTORY_INTERVAL_S = 600.0  # between records of a job
RUN_INTERVAL_S = 60.0  # between records of a run for its profile
JOBS_MOST = 4_000  # of 12 limits each: half of all points that are kept
_MORE = 4
_PROFILE_MOST = 253


class _RecordedWindows(NamedTuple):
    """What the last points rested on, and when it was last looked at."""

    at_s: float
    limits_w: tuple[float, ...]
    windows: int

    def has_news(self, limits_w: tuple[float, ...], windows: int) -> bool:
        """Whether so many windows of these limits say enough that is new."""
        return limits_w != self.limits_w or windows >= _MORE * self.windows or windows < self.windows


def _gpus(workload: Workload) -> int:
    return sum(len(placement.gpu_uuids) for placement in workload.placements)


class JobHistories:
    """Decides when a job's measurements at each limit are recorded again as profile points."""

    def __init__(self) -> None:
        self._told: dict[str, _RecordedWindows] = {}

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
                self._told[name] = _RecordedWindows(world.at_s, *_behind(arms))
                made += _own_points(workload, next(iter(models)), arms, noise)
        return tuple(made)

    def _is_due(self, name: str, arms: tuple[LimitArm, ...], at_s: float) -> bool:
        told = self._told.get(name)
        if told is None:
            return bool(arms) and len(self._told) < JOBS_MOST
        return told.has_news(*_behind(arms)) and at_s - told.at_s >= HISTORY_INTERVAL_S


def _behind(arms: Iterable[LimitArm | LimitEstimate]) -> tuple[tuple[float, ...], int]:
    known = list(arms)
    return tuple(arm.limit_w for arm in known), sum(arm.windows for arm in known)


def _own_points(
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


_OWN_SOURCE = re.compile(r"own, ([0-9]{1,9}) windows, scatter ([0-9.]{1,12}) % and ([0-9.]{1,12}) %")
_NOISE_MOST = 64.0  # windows that a scatter of before is worth


def limit_history(workload: Workload, gpu_model: str, points: Iterable[Point], window_s: float) -> LimitHistory:
    """What a job showed on so many GPUs of this model, as a search sums it; windows are taken to last `window_s`."""
    made, shares = list[LimitArm](), (0.0, 0.0)
    for point in points:
        running, found = point.configuration, _OWN_SOURCE.fullmatch(point.source)
        if running.gpu_model != gpu_model or running.gpus != _gpus(workload) or running.mig_profile or found is None:
            continue
        if running.power_limit_w is None or point.power_w is None or not point.power_w > 0.0:
            continue
        counted = max(1, int(found[1]))
        time_s = counted * window_s
        made.append(
            LimitArm(running.power_limit_w, counted, point.throughput_hz * time_s, time_s, point.power_w * time_s)
        )
        shares = max(shares[0], _share(found[2])), max(shares[1], _share(found[3]))
    if not made:
        return LimitHistory()
    windows = min(_NOISE_MOST, float(sum(arm.windows for arm in made)))
    return LimitHistory(tuple(made), WindowScatter.prior(*shares, windows) if min(shares) > 0.0 else None)


def _share(percent: str) -> float:
    """From a percentage; 0 for what is no number."""
    try:
        return float(percent) / 100.0
    except ValueError:
        return 0.0


class _ProfiledRun(NamedTuple):
    """What the points of a job's runs are filed under."""

    profile: str
    gpu_model: str
    gpus: int


RunEstimates = Callable[[str], Sequence[LimitEstimate]]


class ProfileUpdates:
    """Decides when what a job and the runs before it measured is recorded as points of its profile.

    That is while it runs, when there is enough that is new, and at its end. All limits are recorded together, and carry
    the same time, so that a curve is never put together from two runs.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _ProfiledRun] = {}
        self._told: dict[str, _RecordedWindows] = {}
        self._ended: dict[_ProfiledRun, tuple[float, Sequence[LimitEstimate]]] = {}

    def end_runs(self, names: Iterable[str], at_s: float, measured: RunEstimates) -> None:
        """Keeps what these jobs measured until points are collected; to be called while it is still known."""
        for name in names:
            run, told = self._runs.pop(name, None), self._told.pop(name, None)
            found = measured(name)
            is_news = told is None or _behind(found) != (told.limits_w, told.windows)
            if run is not None and found and is_news:
                self._ended[run] = at_s, found

    def collect_points(
        self, jobs: Mapping[str, Workload], world: ClusterObservation, measured: RunEstimates
    ) -> tuple[MeasuredPoint, ...]:
        """Points of runs of which there is enough that is new; one without a profile, or on several models, is left out."""
        due, self._ended = self._ended, {}
        self._runs = {name: run for name, run in self._runs.items() if name in jobs}
        self._told = {name: told for name, told in self._told.items() if name in jobs}
        for name, workload in jobs.items():
            told = self._told.get(name)
            if told is not None and world.at_s - told.at_s < RUN_INTERVAL_S:
                continue
            training, models = workload.spec.training, gpu_models_of(workload, world)
            if training is None or not training.profile or len(models) != 1:
                continue
            found = measured(name)
            if not found:
                continue
            behind = _behind(found)
            run = self._runs[name] = _ProfiledRun(training.profile, next(iter(models)), _gpus(workload))
            if told is not None and not told.has_news(*behind):
                self._told[name] = told._replace(at_s=world.at_s)
            elif run not in due:
                self._told[name] = _RecordedWindows(world.at_s, *behind)
                due[run] = world.at_s, found
        return tuple(point for run, (at_s, found) in due.items() for point in _profile_points(run, at_s, found))


def _profile_points(run: _ProfiledRun, at_s: float, found: Iterable[LimitEstimate]) -> Iterable[MeasuredPoint]:
    when = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for one in found:
        errors = f"{100.0 * one.ratio_error:.4f} % and {100.0 * one.energy_error:.4f} %"
        yield MeasuredPoint(
            profile=run.profile,
            gpu_model=run.gpu_model,
            gpus=run.gpus,
            power_limit_w=one.limit_w,
            throughput_hz=1.0 / one.time_s,
            power_w=one.power_w,
            source=f"telemetry of {when}, {one.windows} windows, errors {errors}",
        )


_RUN_SOURCE = re.compile(
    r"telemetry of ([0-9T:Z-]{1,24}), [0-9]{1,9} windows, errors ([0-9.]{1,12}) % and ([0-9.]{1,12}) %"
)


class _RunPoint(NamedTuple):
    """A point of a run, read back."""

    when: str
    point: Point
    power_w: float
    time_error: float
    energy_error: float


def _read_run_point(point: Point) -> _RunPoint | None:
    found = _RUN_SOURCE.fullmatch(point.source)
    if found is None or point.power_w is None or not (point.power_w > 0.0 and point.throughput_hz > 0.0):
        return None
    return _RunPoint(found[1], point, point.power_w, _share(found[2]), _share(found[3]))


def former_curve(points: Iterable[Point], question: JobQuestion) -> LimitPrior | None:
    """What former runs of the profile measured on so many GPUs of this model; None without two of the limits.

    Limits that were not recorded together with the largest one are left out. Scatters are the errors of measurement alone.
    """
    runs: dict[int, _RunPoint] = {}
    for point in points:
        running = point.configuration
        if (running.gpu_model, running.gpus, running.mig_profile) != (question.gpu_model, question.gpus, ""):
            continue
        limit_w, run = running.power_limit_w, _read_run_point(point)
        if limit_w is None or run is None:
            continue
        place = next((place for place, each in enumerate(question.limits_w) if is_same_limit(each, limit_w)), None)
        if place is not None:
            runs[place] = run
    largest = runs.get(0)
    if largest is None:
        return None
    runs = {place: run for place, run in runs.items() if run.when == largest.when}
    if len(runs) < 2:
        return None
    known = [runs.get(place) for place in range(len(question.limits_w))]
    return LimitPrior(
        tuple(None if run is None else _time_ratio(run, largest) for run in known),
        tuple(None if run is None else _energy_ratio(run, largest) for run in known),
        is_measured=True,
    )


def _time_ratio(run: _RunPoint, largest: _RunPoint) -> LimitRatio:
    return LimitRatio(math.log(largest.point.throughput_hz / run.point.throughput_hz), run.time_error)


def _energy_ratio(run: _RunPoint, largest: _RunPoint) -> LimitRatio:
    if run is largest:
        return LimitRatio(0.0, 0.0)
    mean = _time_ratio(run, largest).mean + math.log(run.power_w / largest.power_w)
    return LimitRatio(mean, math.hypot(run.energy_error, largest.energy_error))
