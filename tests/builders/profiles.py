"""A made-up family of workloads on A100s that follow laws, measured with little noise, and learned once.

Owns the laws and the points. Must not know how anything is predicted.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np

from eelgrid_controller.profiles.learning import LearnedFamily, learn_family
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.profiles.store import ProfiledWorkload, ProfileReading, ProfileStore
from eelgrid_protos.catalogue.loader import Catalogue, load_catalogue
from eelgrid_protos.messages import MeasuredPoint, QuantileLatency

A100, FAMILY, STRANGER = "a100-sxm4-80gb", "made-up", "stranger"
SIZES = {"small": 1.0, "middle": 2.5, "large": 6.0}  # work of one sample
LIMITS_W = (200.0, 280.0, 400.0)
SLICES = {"1g": 1 / 7, "2g": 2 / 7, "3g": 3 / 7, "7g": 1.0}
BATCHES = (1, 4, 16, 64)


@functools.cache
def read_catalogue() -> Catalogue:
    """The catalogue, read once."""
    return load_catalogue()


def apply_law(size: float, share: float, batch: int, limit_w: float) -> tuple[float, float]:
    """Samples a second and watts: rises with share and limit, saturates with the batch, a knee in the limit."""
    knee = min(1.0, 0.6 + limit_w / 1000.0)
    rate_hz = 2000.0 / size * share**0.9 * batch / (batch + 8.0 * share) * knee
    return rate_hz, min(80.0 + 250.0 * batch / (batch + 4.0), 0.98 * limit_w)


def build_lawful_point(workload: str, how: Configuration, off: float = 0.0) -> Point:
    """By the laws, `off` by so many log units."""
    share = SLICES[how.mig_profile or "7g"]
    rate_hz, watts = apply_law(SIZES.get(workload, 4.0), share, how.batch, how.power_limit_w or 400.0)
    latency_s = how.batch / rate_hz
    return Point(
        workload,
        how,
        rate_hz * math.exp(off),
        {0.5: latency_s, 0.99: 1.3 * latency_s},
        None if how.mig_profile else watts * math.exp(off),
        source="made up",
    )


def list_configurations() -> Iterator[Configuration]:
    """Slices at the default limit, the whole GPU at every limit, each at every batch."""
    for batch in BATCHES:
        for mig_profile in ("1g", "2g", "3g"):
            yield Configuration(A100, mig_profile, batch=batch)
        for limit_w in LIMITS_W:
            yield Configuration(A100, batch=batch, power_limit_w=limit_w)


@functools.cache
def measure_store() -> ProfileStore:
    """Every workload in every configuration, but for a stranger that nobody measured."""
    rng = np.random.default_rng(11)
    found = ProfileStore()
    for name in (*SIZES, STRANGER):
        found = found.with_workload(ProfiledWorkload(name, FAMILY))
    for name in SIZES:
        for second, how in enumerate(list_configurations()):
            found = found.with_reading(
                ProfileReading(build_lawful_point(name, how, float(rng.normal(0.0, 0.004))), float(second))
            )
    return found


@functools.cache
def learn_laws() -> LearnedFamily:
    """What the family teaches."""
    return learn_family(measure_store(), FAMILY, read_catalogue())


def build_engine_points(profile="llm", model="G2"):
    """An engine that gives 1000 tokens a second for each sequence, up to four, within 40 ms."""
    return [
        MeasuredPoint(
            profile=profile,
            gpu_model=model,
            throughput_hz=1000.0 * batch,
            batch=batch,
            latencies=(QuantileLatency(quantile=0.95, latency_s=0.01 * batch),),
        )
        for batch in (1, 2, 4)
    ]
