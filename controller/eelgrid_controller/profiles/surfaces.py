"""What is learned of a family, and the measurements that it is learned from, as the controller reads them.

A LearnedFamily comes from the process that learns (learning.py). Together with the samples of a workload it is all
that a prediction needs, and none of it needs scikit-learn.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.conformal import ConformalCalibration
from eelgrid_controller.profiles.features import FeatureFrame, FeaturePoint, locate_configuration
from eelgrid_controller.profiles.gaussian_process import CONFIGURATION, STALE, STALE_NOISE, GpCovariance, GpEvidence
from eelgrid_controller.profiles.prior import log_offset
from eelgrid_controller.profiles.store import CELLS_MOST, ProfileCell, WorkloadProfile, reading_variance
from eelgrid_kernels.arrays import Floats
from eelgrid_protos.catalogue.loader import Catalogue

CONFIGURATIONS_LEAST = 6  # measured configurations, below which nothing is learned


class WorkloadSample(NamedTuple):
    """What was measured of one workload, N configurations."""

    workload: str
    traits: Mapping[str, float]
    places: tuple[FeaturePoint, ...]
    values: Floats  # (N,) natural logarithm, less what was known before
    noise: Floats  # (N,) variance of the value as it stands, log units squared
    stale: tuple[bool, ...] = ()  # measured before the last drift; () for none


class LearnedSurface(NamedTuple):
    """What was learned of one quantity of a family."""

    frame: FeatureFrame
    centre: float  # log units
    scale: float  # log units
    covariance: GpCovariance  # in scaled units
    calibration: ConformalCalibration
    panel: GpEvidence  # measurements that stand for the family, evenly of its workloads
    learned_from: int  # configurations
    workloads: int


class LearnedFamily(NamedTuple):
    """What was learned of a family, to be journalled; reproducible from the store at `revision`."""

    family: str
    revision: int
    seed: int
    surfaces: Mapping[str, LearnedSurface]  # by quantity
    limits: Mapping[str, tuple[float, ...]]  # measured, log2 over the default, by GPU model


def build_evidence(
    surface_frame: FeatureFrame, centre: float, scale: float, samples: Sequence[WorkloadSample]
) -> GpEvidence:
    """The samples as arrays, one after the other.

    A question has the code of the last fresh measurement in its place. Others there, and stale ones, have codes of
    their own: what is particular to them says nothing of a reading now.
    """
    sites = surface_frame.build_sites(
        [place for one in samples for place in one.places],
        [one.traits for one in samples for _ in one.places],
        [one.workload for one in samples for _ in one.places],
    )
    values = np.concatenate([one.values for one in samples]) if samples else np.zeros(0)
    noise = np.concatenate([one.noise for one in samples]) if samples else np.zeros(0)
    sites[:, STALE] = [old for one in samples for old in (one.stale or (False,) * len(one.places))]
    last = {code: row for row, code in enumerate(sites[:, CONFIGURATION].tolist()) if not sites[row, STALE]}
    others = np.setdiff1d(np.arange(len(sites)), np.fromiter(last.values(), dtype=np.int64))
    within = np.array([index for one in samples for index in range(len(one.places))], dtype=np.int64)
    sites[others, CONFIGURATION] += (1.0 + within[others]) / (2.0 * CELLS_MOST)
    return GpEvidence(sites, (values - centre) / scale, (noise + STALE_NOISE**2 * sites[:, STALE]) / scale**2)


def workload_sample(
    profile: WorkloadProfile, quantity: str, catalogue: Catalogue
) -> tuple[WorkloadSample, tuple[ProfileCell, ...]]:
    """What was measured of one quantity of a workload, and the cells that it is from."""
    cells = tuple(cell for cell in profile.cells.values() if quantity in cell.tallies)
    values, noise = [], []
    places = tuple(locate_configuration(cell.configuration, catalogue) for cell in cells)
    for cell, where in zip(cells, places, strict=True):
        tally = cell.tallies[quantity]
        values.append(tally.mean - log_offset(quantity, where, catalogue))
        noise.append(reading_variance(profile, quantity, tally.stated) / tally.readings)
    found = WorkloadSample(
        profile.workload.workload,
        profile.workload.traits,
        places,
        np.array(values, dtype=np.float64),
        np.array(noise, dtype=np.float64),
        tuple(profile.is_stale(cell) for cell in cells),
    )
    return found, cells


def read_quantities(profiles: Sequence[WorkloadProfile]) -> tuple[str, ...]:
    """Every quantity that was read of any of them."""
    return tuple(sorted({name for profile in profiles for cell in profile.cells.values() for name in cell.tallies}))
