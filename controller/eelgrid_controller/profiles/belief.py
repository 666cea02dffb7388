"""What is believed of one quantity of one workload: its own measurements beside the family's panel.

Owns the assembly of evidence and the way from scaled to log units. Must not know directions
of physics, limits of parts or intervals.

A belief is a function of one workload's sample and one surface alone, so that it stays good
while neither changes, whatever is told of other workloads; both are bounded, and so is the time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.profiles.axes import Place
from eelgrid_controller.profiles.covariance import Sites
from eelgrid_controller.profiles.learning import Sample, Surface, evidence, joined
from eelgrid_controller.profiles.posterior import Posterior
from eelgrid_kernels.arrays import Floats

__all__ = ["Belief", "Believed"]

_DIGITS = 6  # of a scaled coordinate, to which two places are one
_CHUNK = 1024  # places at a time


class Believed(NamedTuple):
    """M places, in log units less the prior's offset."""

    mean: Floats
    variance: Floats  # of the value itself, without a reading's noise
    measured: NDArray[np.bool_]  # read since the last drift


class Belief:
    """One quantity of one workload."""

    def __init__(self, surface: Surface, mine: Sample, reading_variance: float) -> None:
        self.surface = surface
        self.reading_variance = reading_variance
        own = evidence(surface.frame, surface.centre, surface.scale, [mine])
        code = surface.frame.sites([], [], [mine.workload]).workload
        others = surface.panel.take(surface.panel.sites.workload != code)
        self._traits, self._workload = mine.traits, mine.workload
        self.known = int((~own.stale).sum())
        self.own = len(own.values)
        self._rows = {key: row for row, key in enumerate(_keys(own.sites)) if not own.stale[row]}
        whole = joined(own, others)
        self.size = len(whole.values)
        self._posterior = Posterior(surface.covariance, whole, surface.scale)

    @property
    def numbers(self) -> int:
        """How many numbers it holds, nearly all of them in the inverse."""
        return self.size**2

    @property
    def scatter(self) -> float:
        """Variance of one reading of one configuration around what is smooth, log units squared."""
        return self.surface.scale**2 * self.surface.covariance.idiosyncrasy + self.reading_variance

    def at(self, places: Sequence[Place]) -> Believed:
        """What is believed there."""
        parts = [self._at(places[begin : begin + _CHUNK]) for begin in range(0, len(places), _CHUNK)]
        return Believed(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def apart(self, places: Sequence[Place], base: Place) -> tuple[Floats, Floats]:
        """(M,) mean and variance of the logarithm's difference to `base`, which is none of the places; less offsets."""
        surface = self.surface
        count = len(places)
        whole = surface.frame.sites([*places, base], [self._traits] * (count + 1), [self._workload] * (count + 1))
        measured = np.array([self._rows.get(key, -1) for key in _keys(whole)], dtype=np.int64)
        mean, variance = self._posterior.difference(whole, measured)
        return surface.scale * mean, surface.scale**2 * variance

    def _at(self, places: Sequence[Place]) -> Believed:
        surface = self.surface
        asked = surface.frame.sites(places, [self._traits] * len(places), [self._workload] * len(places))
        measured = np.array([self._rows.get(key, -1) for key in _keys(asked)], dtype=np.int64)
        mean, variance = self._posterior.at(asked, measured)
        return Believed(surface.centre + surface.scale * mean, surface.scale**2 * variance, measured >= 0)


def _keys(sites: Sites) -> list[bytes]:
    """What tells two places of one workload apart."""
    rounded = np.round(sites.numbers, _DIGITS) + 0.0  # no negative zero
    return [number.tobytes() + name.tobytes() for number, name in zip(rounded, sites.names, strict=True)]
