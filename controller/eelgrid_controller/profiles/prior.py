"""Priors for configurations of which nothing was measured, from the GPU catalogue and published sweeps."""

import math
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.features import UNKNOWN_LIMIT_W, FeaturePoint, effective_limit_w, find_product
from eelgrid_controller.profiles.points import POWER, THROUGHPUT, Configuration, latency_quantile_of
from eelgrid_protos.catalogue.loader import Catalogue

_SHARE = (0.06, 0.72, 0.98)  # of the watts between idle and limit
# Limit over default, then 5th, 50th and 95th percentile of the ratio to the default.
_LIMITS = (0.34, 0.41, 0.50, 0.60, 0.70, 0.80, 0.90, 1.00)
_LIMIT_THROUGHPUT = (
    (0.245, 0.382, 0.605, 0.778, 0.879, 0.927, 0.944, 1.0),
    (0.354, 0.670, 0.878, 0.940, 0.960, 0.984, 0.992, 1.0),
    (1.101, 1.055, 1.067, 1.054, 1.066, 1.058, 1.060, 1.0),
)
_LIMIT_POWER = (
    (0.380, 0.416, 0.517, 0.612, 0.700, 0.790, 0.882, 1.0),
    (0.538, 0.538, 0.686, 0.782, 0.876, 0.936, 0.979, 1.0),
    (1.005, 1.007, 1.007, 1.015, 1.012, 1.021, 1.023, 1.0),
)
_SLICES = (1 / 7, 2 / 7, 3 / 7, 4 / 7, 1.0)
_SLICE_THROUGHPUT = (
    (0.146, 0.294, 0.482, 0.583, 1.0),
    (0.309, 0.487, 0.618, 0.711, 1.0),
    (1.002, 1.023, 1.032, 1.034, 1.0),
)


class PriorBand(NamedTuple):
    """A middle and the ends of a 90 % interval."""

    median: float
    lower: float
    upper: float


def _reference_speed(model: str, catalogue: Catalogue) -> float:
    """Geometric mean of GB/s and SM GHz; that of a part between A100 and V100 where the catalogue lacks one."""
    product = find_product(model, catalogue)
    if product is None or product.memory_bandwidth_gb_s is None or product.sm_count is None:
        return 400.0
    return math.sqrt(product.memory_bandwidth_gb_s * product.sm_count * product.sm_clock_max_mhz / 1e3)


def log_offset(quantity: str, place: FeaturePoint, catalogue: Catalogue) -> float:
    """What to take from the logarithm of the quantity before anything is learned."""
    model, gpus = place.names["gpu_model"], 2.0 ** place.numbers["gpus"]
    if quantity == POWER:
        product = find_product(model, catalogue)
        share = 2.0 ** place.numbers["limit"]
        return math.log(
            gpus * (UNKNOWN_LIMIT_W * share if product is None else product.power_default_w * min(share, 1))
        )
    if quantity == THROUGHPUT:
        return math.log(gpus * _reference_speed(model, catalogue))
    if latency_quantile_of(quantity) is not None:
        return -math.log(_reference_speed(model, catalogue))
    return 0.0


def prior_power_w(configuration: Configuration, catalogue: Catalogue) -> PriorBand | None:
    """Watts of work of which nothing is known; None for a GPU model that the catalogue lacks, or a slice."""
    product = find_product(configuration.gpu_model, catalogue)
    if product is None or configuration.mig_profile:
        return None
    limit = min(
        effective_limit_w(configuration, catalogue) or product.busy_w, product.power_max_w or product.power_default_w
    )
    room = max(limit - product.idle_w, 0.0)
    low, middle, high = (configuration.gpus * (product.idle_w + share * room) for share in _SHARE)
    return PriorBand(middle, low, high)


def _ratio(at: float, known: tuple[float, ...], bands: tuple[tuple[float, ...], ...]) -> PriorBand:
    low, middle, high = (float(np.interp(at, known, values)) for values in bands)
    return PriorBand(middle, low, high)


def limit_ratio(quantity: str, share: float) -> PriorBand | None:
    """The quantity at a limit over the quantity at the default; share is limit over default.

    None for what has no such rule. Below the lowest measured share the ratio stays what it is there.
    """
    at = min(share, 1.0)
    if quantity == POWER:
        return _ratio(at, _LIMITS, _LIMIT_POWER)
    if quantity == THROUGHPUT:
        return _ratio(at, _LIMITS, _LIMIT_THROUGHPUT)
    if latency_quantile_of(quantity) is not None:
        return _inverse(_ratio(at, _LIMITS, _LIMIT_THROUGHPUT))
    return None


def slice_ratio(quantity: str, compute: float) -> PriorBand | None:
    """The quantity on a slice over the quantity on the whole part; compute is the share of slices.

    None for power, since no sensor measures a slice, and for memory.
    """
    if quantity == THROUGHPUT:
        return _ratio(compute, _SLICES, _SLICE_THROUGHPUT)
    if latency_quantile_of(quantity) is not None:
        return _inverse(_ratio(compute, _SLICES, _SLICE_THROUGHPUT))
    return None


def _inverse(band: PriorBand) -> PriorBand:
    return PriorBand(1.0 / band.median, 1.0 / band.upper, 1.0 / band.lower)
