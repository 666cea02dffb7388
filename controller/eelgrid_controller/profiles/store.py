"""The profile store as a value: measured configurations of each workload, their provenance, and drifts.

That a workload has changed is detected by a two-sided CUSUM test on recursive residuals (Page 1954, Hawkins 1987).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from eelgrid_controller.profiles.points import Configuration, Point, log_quantities

CELLS_MOST = 512  # configurations of a workload; published sweeps have up to 384
WORKLOADS_MOST = 4096
_SOURCES_MOST = 16  # by name for one configuration; more are counted together
_OTHERS = "others"
_RECENT_MOST = 64  # readings kept for the next epoch
_ERRORS_MOST = 64  # of the latest configurations that were predicted before they were measured
DEFAULT_FAMILY = "default"

CUSUM_SLACK = 0.5
CUSUM_THRESHOLD = 8.0
RESIDUAL_CLIP = 3.0
PRIOR_NOISE = 0.005  # log units: half a per cent between readings that are means over some seconds
PRIOR_READINGS = 4.0
WARM_UP = 16


class ReadingNoise(NamedTuple):
    """The spread of readings of one configuration around their mean, log units."""

    squares: float = 0.0  # sum of squared residuals, each as a single reading's
    readings: float = 0.0  # behind it

    @property
    def variance(self) -> float:
        """Of one reading."""
        return (PRIOR_NOISE**2 * PRIOR_READINGS + self.squares) / (PRIOR_READINGS + self.readings)

    def with_residual(self, score: float) -> "ReadingNoise":
        """With one more residual, standardised."""
        square = score * score if self.readings < WARM_UP else min(score * score, RESIDUAL_CLIP * RESIDUAL_CLIP)
        return ReadingNoise(self.squares + self.variance * square, self.readings + 1.0)


class DriftTest(NamedTuple):
    """The two sums, and how many readings ago each was zero."""

    up: float = 0.0
    up_run: int = 0
    down: float = 0.0
    down_run: int = 0

    @property
    def changed(self) -> bool:
        """Whether the level has changed."""
        return max(self.up, self.down) > CUSUM_THRESHOLD

    @property
    def change_length(self) -> int:
        """How many readings, the last included, speak for the change."""
        return self.up_run if self.up >= self.down else self.down_run


def recursive_residual(value: float, mean: float, count: int, variance: float) -> float:
    """The standardised residual of a reading after `count` others of the same configuration."""
    return (value - mean) / math.sqrt(variance * (1.0 + 1.0 / count))


def since_change(scores: Sequence[float]) -> int:
    """How many of the last of these residuals, none or more of them from before the change, are from after it.

    The most probable number for a shift of unknown size: the largest (sum of the last k)^2 / k. At least 1.
    """
    best, found, total = -1.0, 1, 0.0
    for count, score in enumerate(reversed(scores), 1):
        total += max(-RESIDUAL_CLIP, min(RESIDUAL_CLIP, score))
        if total * total / count > best:
            best, found = total * total / count, count
    return found


def update_drift_test(watch: DriftTest, score: float) -> DriftTest:
    """After one more residual."""
    bounded = max(-RESIDUAL_CLIP, min(RESIDUAL_CLIP, score))
    up = max(0.0, watch.up + bounded - CUSUM_SLACK)
    down = max(0.0, watch.down - bounded - CUSUM_SLACK)
    return DriftTest(up, watch.up_run + 1 if up else 0, down, watch.down_run + 1 if down else 0)


class ExpectedReading(NamedTuple):
    """What the model believed of a quantity before it was read: mean and deviation of its logarithm."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True)
class ProfiledWorkload:
    """A workload class is introduced: the family that it learns with, and facts about it, as logarithms or 0/1."""

    workload: str
    family: str = DEFAULT_FAMILY
    traits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProfileReading:
    """One measurement is told; the journal keeps it as it stands."""

    point: Point
    at_s: float  # since the epoch of the journal's clock
    expected: Mapping[str, ExpectedReading] = field(
        default_factory=dict
    )  # by quantity, of a configuration never read before
    noise: Mapping[str, float] = field(default_factory=dict)  # stated deviation of a reading's logarithm, if larger


class ReadingTally(NamedTuple):
    """Readings of one quantity in one configuration."""

    readings: int
    mean: float  # of the logarithm
    stated: float = 0.0  # largest stated deviation of one reading


@dataclass(frozen=True, slots=True)
class ProfileCell:
    """One configuration of a workload."""

    configuration: Configuration
    tallies: Mapping[str, ReadingTally]
    sources: Mapping[str, int]  # readings by source
    epoch: int
    last_s: float
    runs: bool = True  # False: it was tried and did not run


class RecentReading(NamedTuple):
    """A reading that may speak for a change, and its standardised residuals by quantity."""

    reading: ProfileReading
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WorkloadProfile:
    """One workload."""

    workload: ProfiledWorkload
    cells: Mapping[Configuration, ProfileCell] = field(default_factory=dict)
    epoch: int = 0
    noise: Mapping[str, ReadingNoise] = field(default_factory=dict)
    watches: Mapping[str, DriftTest] = field(default_factory=dict)
    recent: tuple[RecentReading, ...] = ()
    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # |log error|, oldest first
    readings: int = 0
    drifts: tuple[tuple[float, str], ...] = ()  # when, and by which quantity

    def is_stale(self, cell: ProfileCell) -> bool:
        """Whether the cell was read before the last drift."""
        return cell.epoch < self.epoch


def reading_variance(profile: WorkloadProfile, quantity: str, stated: float = 0.0) -> float:
    """Variance of one reading's logarithm; stated: deviation that the source of the reading gives."""
    return max(profile.noise.get(quantity, ReadingNoise()).variance, stated * stated)


def _add_reading(profile: WorkloadProfile, reading: ProfileReading, values: Mapping[str, float]) -> ProfileCell:
    """The cell with one more reading; an old epoch's cell begins anew.

    Once the noise is known, a reading moves the mean as if it were at most CLIP deviations off: otherwise one wild
    reading would make all later ones look like a change.
    """
    before, epoch = profile.cells.get(reading.point.configuration), profile.epoch
    fresh = before is not None and before.epoch == epoch
    tallies = dict(before.tallies) if fresh and before is not None else {}
    for name, value in values.items():
        held = tallies.get(name, ReadingTally(0, 0.0))
        count = held.readings + 1
        stated = max(held.stated, reading.noise.get(name, 0.0))
        off = value - held.mean
        if held.readings and profile.noise.get(name, ReadingNoise()).readings >= WARM_UP:
            reach = RESIDUAL_CLIP * math.sqrt(reading_variance(profile, name, stated) * (1.0 + 1.0 / held.readings))
            off = max(-reach, min(reach, off))
        tallies[name] = ReadingTally(count, held.mean + off / count, stated)
    sources = dict(before.sources) if fresh and before is not None else {}
    source = reading.point.source
    source = source if source in sources or len(sources) < _SOURCES_MOST else _OTHERS
    sources[source] = sources.get(source, 0) + 1
    return ProfileCell(reading.point.configuration, tallies, sources, epoch, reading.at_s, runs=bool(values))


def _scores(
    profile: WorkloadProfile, cell: ProfileCell | None, reading: ProfileReading, values: Mapping[str, float]
) -> dict[str, float]:
    """Standardised residuals of a reading, by quantity, where something was expected."""
    found = {}
    for name, value in values.items():
        held = None if cell is None or profile.is_stale(cell) else cell.tallies.get(name)
        if held is not None:
            variance = reading_variance(profile, name, max(held.stated, reading.noise.get(name, 0.0)))
            found[name] = recursive_residual(value, held.mean, held.readings, variance)
        elif name in reading.expected:
            found[name] = (value - reading.expected[name].mean) / reading.expected[name].deviation
    return found


def _kept(
    cells: Mapping[Configuration, ProfileCell], cell: ProfileCell, epoch: int
) -> dict[Configuration, ProfileCell]:
    """The cells with this one; one of the others goes if there are too many."""
    found = dict(cells)
    found[cell.configuration] = cell
    if len(found) > CELLS_MOST:
        others = (one for one in found.values() if one is not cell)
        del found[min(others, key=lambda one: (one.epoch >= epoch, one.last_s)).configuration]
    return found


def _plain(profile: WorkloadProfile, reading: ProfileReading) -> WorkloadProfile:
    """The reading without the drift test."""
    cell = _add_reading(profile, reading, log_quantities(reading.point))
    return replace(profile, cells=_kept(profile.cells, cell, profile.epoch), readings=profile.readings + 1)


def _with_readings(profile: WorkloadProfile, reading: ProfileReading) -> WorkloadProfile:
    """The reading with the drift test."""
    cell = profile.cells.get(reading.point.configuration)
    values = log_quantities(reading.point)
    scores = _scores(profile, cell, reading, values)
    noise, watches, errors = dict(profile.noise), dict(profile.watches), dict(profile.errors)
    for name, score in scores.items():
        if name in reading.expected and (cell is None or name not in cell.tallies):
            error = abs(values[name] - reading.expected[name].mean)
            errors[name] = (*errors.get(name, ()), error)[-_ERRORS_MOST:]
            watches[name] = update_drift_test(watches.get(name, DriftTest()), score)
            continue
        if noise.get(name, ReadingNoise()).readings >= WARM_UP:
            watches[name] = update_drift_test(watches.get(name, DriftTest()), score)
        noise[name] = noise.get(name, ReadingNoise()).with_residual(score)
    profile = replace(profile, noise=noise, watches=watches, errors=errors)
    changed = [name for name, watch in watches.items() if watch.changed]
    if not changed:
        run = max((max(watch.up_run, watch.down_run) for watch in watches.values()), default=0)
        recent = (*profile.recent, RecentReading(reading, scores))[-min(run, _RECENT_MOST) :] if run else ()
        return replace(_plain(profile, reading), recent=recent)
    recent = (*profile.recent, RecentReading(reading, scores))
    longest = max(
        since_change([one.scores.get(name, 0.0) for one in recent[-watches[name].change_length :]]) for name in changed
    )
    again = [one.reading for one in recent[-longest:]]
    drifts = (*profile.drifts, (reading.at_s, ",".join(sorted(changed))))
    profile = replace(profile, epoch=profile.epoch + 1, watches={}, recent=(), drifts=drifts[-_RECENT_MOST:])
    readings = profile.readings + 1
    for one in again:
        profile = _plain(profile, one)
    return replace(profile, readings=readings)


@dataclass(frozen=True, slots=True)
class ProfileStore:
    """All workloads; a value: what changes it returns another."""

    profiles: Mapping[str, WorkloadProfile] = field(default_factory=dict)
    revision: int = 0

    def with_workload(self, workload: ProfiledWorkload) -> "ProfileStore":
        """With a workload, or with other facts about a known one."""
        known = self.profiles.get(workload.workload)
        profile = WorkloadProfile(workload) if known is None else replace(known, workload=workload)
        return self._with_profile(profile)

    def with_reading(self, reading: ProfileReading) -> "ProfileStore":
        """With one more reading, of a workload that is introduced by it if need be; raises ImpossibleReading."""
        name = reading.point.workload
        profile = self.profiles.get(name) or WorkloadProfile(ProfiledWorkload(name))
        return self._with_profile(_with_readings(profile, reading))

    def _with_profile(self, profile: WorkloadProfile) -> "ProfileStore":
        """With this workload as the last; the first goes if there are too many."""
        found = dict(self.profiles)
        found.pop(profile.workload.workload, None)
        if len(found) >= WORKLOADS_MOST:
            del found[next(iter(found))]
        found[profile.workload.workload] = profile
        return ProfileStore(found, self.revision + 1)

    def family_profiles(self, family: str) -> tuple[WorkloadProfile, ...]:
        """The workloads of a family, by name."""
        found = (one for one in self.profiles.values() if one.workload.family == family)
        return tuple(sorted(found, key=lambda one: one.workload.workload))
