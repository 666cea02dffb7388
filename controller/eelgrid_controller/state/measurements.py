"""Measurements of workloads: points of their profiles, how long replicas took to serve, and how much work was done.

Owns which point of a profile counts, the newest of each configuration, as the journal keeps them, and which starts of a
service do, the last of each kind; and how work
(tokens, requests, steps) is joined and spread over hours, by which the energy ledger divides joules. Must not know
the models that are fitted to the points (eelgrid_controller.profiles), nor who measures.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_protos.messages import MeasuredPoint
from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.quantities import Identifier, Seconds

# 0.5 kB each, and a checkpoint writes them all: at most 50 MB.
POINTS_MOST = 100_000
JOB_PROFILE_PREFIX = "job/"  # prefix of the profiles of single jobs


# GPU model, MIG profile, GPUs, batch, processes, power limit in mW (0 for the default), clock in MHz (0 if not locked)
# and label.
PointKey = tuple[str, str, int, int, int, int, int, str]


def make_job_profile_name(workload_id: str) -> str:
    """Returns the name of the profile that is measured on one running job; it is removed with the job."""
    return f"{JOB_PROFILE_PREFIX}{workload_id}"


def make_point_key(point: MeasuredPoint) -> PointKey:
    """Returns the key of a point within its profile; sortable."""
    return (
        point.gpu_model,
        point.mig_profile,
        point.gpus,
        point.batch,
        point.processes,
        round(1000.0 * (point.power_limit_w or 0.0)),
        point.clock_mhz or 0,
        point.label,
    )


def make_profile_point(point: MeasuredPoint) -> Point:
    """Converts a measured point into the planners' value."""
    return Point(
        workload=point.profile,
        configuration=Configuration(
            gpu_model=point.gpu_model,
            mig_profile=point.mig_profile,
            gpus=point.gpus,
            batch=point.batch,
            processes=point.processes,
            power_limit_w=point.power_limit_w,
            clock_mhz=point.clock_mhz,
            label=point.label,
        ),
        throughput_hz=point.throughput_hz,
        latency_s={one.quantile: one.latency_s for one in point.latencies},
        power_w=point.power_w,
        memory_bytes=point.memory_bytes,
        source=point.source,
    )


class MeasuredPoints(Mapping[str, tuple[Point, ...]]):
    """Measured points by profile, as planners use them; `list_points` yields the original messages."""

    def __init__(self, points: Iterable[MeasuredPoint] = (), *, most: int = POINTS_MOST) -> None:
        self.most = most
        self.revision = 0  # rises with every change
        self._told: dict[str, dict[PointKey, MeasuredPoint]] = {}
        self._count = 0
        # Built on demand: planners read often, points are added rarely.
        self._made: dict[str, tuple[Point, ...]] = {}
        self.add_points(points)

    def __getitem__(self, profile: str) -> tuple[Point, ...]:
        if profile not in self._made:
            told = self._told[profile]
            self._made[profile] = tuple(make_profile_point(told[key]) for key in sorted(told))
        return self._made[profile]

    def __iter__(self) -> Iterator[str]:
        return iter(self._told)

    def __len__(self) -> int:
        return len(self._told)

    def select_changed(self, points: Iterable[MeasuredPoint]) -> tuple[MeasuredPoint, ...]:
        """Returns the points that would change something, the last of each configuration."""
        last = {(point.profile, make_point_key(point)): point for point in points}
        return tuple(point for (profile, key), point in last.items() if self._told.get(profile, {}).get(key) != point)

    def has_room_for(self, points: Iterable[MeasuredPoint]) -> bool:
        """Returns whether there is space for the points."""
        more = sum(make_point_key(point) not in self._told.get(point.profile, {}) for point in points)
        return self._count + more <= self.most

    def add_points(self, points: Iterable[MeasuredPoint]) -> None:
        """Adds points; each replaces the earlier one of its configuration."""
        for point in points:
            self.revision += 1
            told = self._told.setdefault(point.profile, {})
            self._count += make_point_key(point) not in told
            told[make_point_key(point)] = point
            self._made.pop(point.profile, None)

    def forget_profile(self, profile: str) -> None:
        """Removes a profile."""
        self._count -= len(self._told.pop(profile, ()))
        self._made.pop(profile, None)

    def list_points(self, profile: str = "") -> Iterator[MeasuredPoint]:
        """Yields the points of a profile, or of all, ordered by profile and configuration."""
        for name in [profile] if profile else sorted(self._told):
            told = self._told.get(name, {})
            yield from (told[key] for key in sorted(told))

    def copy(self) -> Self:
        """Returns an independent copy."""
        twin: Self = copy(self)
        twin._told = {profile: dict(told) for profile, told in self._told.items()}
        twin._made = dict(self._made)
        return twin

    def dump(self) -> list[dict[str, Any]]:
        """Dumps everything that `load` needs, as plain values."""
        return [to_plain(point, brief=True) for point in self.list_points()]

    @classmethod
    def load(cls, plain: Iterable[Mapping[str, Any]]) -> Self:
        """Loads points from a checkpoint."""
        return cls(from_plain(MeasuredPoint, row, trusted=True) for row in plain)


# Of a service, with its model data and without.
STARTS_KEPT_MOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStart:
    """How long a replica of a service took until it served, between these bounds, on a node with or without its data."""

    workload_id: Identifier
    had_model_data: bool
    least_s: Seconds
    most_s: Seconds


class ReplicaStarts:
    """The last measured starts of live services, of each kind STARTS_KEPT_MOST."""

    def __init__(self, starts: Iterable[MeasuredStart] = ()) -> None:
        self._starts: dict[str, tuple[MeasuredStart, ...]] = {}
        self.add_starts(starts)

    def get(self, workload_id: str) -> tuple[MeasuredStart, ...]:
        """Returns the measured starts of a service, oldest first."""
        return self._starts.get(workload_id, ())

    def select(self, workload_ids: Container[str]) -> dict[str, tuple[MeasuredStart, ...]]:
        """Returns the measured starts of these services, of those that have any."""
        return {key: starts for key, starts in self._starts.items() if key in workload_ids}

    def add_starts(self, starts: Iterable[MeasuredStart]) -> None:
        """Adds starts, in the order in which they ended."""
        for start in starts:
            known = (*self.get(start.workload_id), start)
            alike = [one for one in known if one.had_model_data is start.had_model_data]
            first = alike[0] if len(alike) > STARTS_KEPT_MOST else None
            self._starts[start.workload_id] = tuple(one for one in known if one is not first)

    def forget(self, workload_id: str) -> None:
        """Forgets a service that has ended."""
        self._starts.pop(workload_id, None)

    def copy(self) -> Self:
        """Returns an independent copy."""
        twin: Self = copy(self)
        twin._starts = self._starts.copy()
        return twin

    def dump(self) -> list[dict[str, Any]]:
        """Dumps everything that `load` needs, as plain values."""
        return [to_plain(start) for key in sorted(self._starts) for start in self._starts[key]]

    @classmethod
    def load(cls, plain: Iterable[Mapping[str, Any]]) -> Self:
        """Loads starts from a checkpoint."""
        return cls(from_plain(MeasuredStart, row, trusted=True) for row in plain)


_HOUR_S = 3600

REQUEST, TOKEN, WORK = "request", "token", "work"
# Scrapes and cycles of the objectives loop use different clocks.
_SNAP_S = 20.0
_GAP_S_MOST = 400 * 24 * 3600.0
# Entries of one interval: two days by the hour; a longer interval has entries of several hours, each counted in its
# first.
_HOURS_MOST = 48


class WorkInterval(NamedTuple):
    """Units of work done between two moments, in seconds of Unix time."""

    workload: str
    unit: str
    amount: float
    begin_s: float
    end_s: float
    is_whole: bool = True  # False: `amount` is a lower bound


class WorkEntry(NamedTuple):
    """Work to add to one hour of a workload; `until_s` is the end of the interval from which it came."""

    hour_s: int
    workload: str
    unit: str
    amount: float
    counted_s: float
    missed_s: float
    until_s: float


def join_increment(worked: WorkInterval, until_s: float | None) -> WorkInterval:
    """Moves the begin of an interval to the end of the previous one if they differ by no more than clock skew."""
    begin_s = min(worked.begin_s, worked.end_s)
    if until_s is not None and abs(begin_s - until_s) <= _SNAP_S:
        begin_s = until_s
    return worked._replace(begin_s=max(begin_s, until_s or begin_s), end_s=max(worked.end_s, until_s or begin_s))


def spread_work(worked: WorkInterval, until_s: float | None) -> list[WorkEntry]:
    """Spreads an interval over hours; `until_s` is the end of the previous one of this workload and unit, None if none.

    The time between the two was missed. An end after this interval comes from a clock that was set back since, so
    that nothing is known about the time between. A non-finite amount counts as zero.
    """
    if not all(map(math.isfinite, (worked.amount, worked.begin_s, worked.end_s))):
        return []
    if until_s is not None and until_s > worked.end_s + _SNAP_S:
        until_s = None
    worked = join_increment(worked, until_s)
    found = []
    if until_s is not None and worked.begin_s > until_s:
        begin_s = max(until_s, worked.begin_s - _GAP_S_MOST)
        found += [_entry(worked, hour_s, 0.0, 0.0, seconds) for hour_s, seconds in _hours(begin_s, worked.begin_s)]
    length_s = worked.end_s - worked.begin_s
    for hour_s, seconds in _hours(worked.begin_s, worked.end_s):
        amount = worked.amount * (seconds / length_s if length_s else 1.0)
        counted_s, missed_s = (seconds, 0.0) if worked.is_whole else (0.0, seconds)
        found.append(_entry(worked, hour_s, amount, counted_s, missed_s))
    return found


def _entry(worked: WorkInterval, hour_s: int, amount: float, counted_s: float, missed_s: float) -> WorkEntry:
    return WorkEntry(hour_s, worked.workload, worked.unit, amount, counted_s, missed_s, worked.end_s)


def _hours(begin_s: float, end_s: float) -> Iterable[tuple[int, float]]:
    """Yields the hours of an interval with the seconds in each; an empty interval is in one hour."""
    hour_s = int(begin_s // _HOUR_S) * _HOUR_S
    step_s = _HOUR_S * max(1, math.ceil((end_s - hour_s) / (_HOUR_S * _HOURS_MOST)))
    yield hour_s, min(end_s, hour_s + step_s) - begin_s
    while (hour_s := hour_s + step_s) < end_s:
        yield hour_s, min(end_s, hour_s + step_s) - hour_s
