"""The grid of slices and power limits on which predictions are made monotone by isotonic regression."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.features import FeaturePoint, SliceShare, find_product, list_slices
from eelgrid_controller.profiles.points import POWER, THROUGHPUT, latency_quantile_of
from eelgrid_kernels.arrays import Floats
from eelgrid_protos.catalogue.loader import Catalogue

_EVEN = 9
_LIMITS_MOST = 64
_DIGITS = 9


class PredictionGrid(NamedTuple):
    """S slices by L limits; places in rows of slices."""

    slices: tuple[SliceShare, ...]
    limits: tuple[float, ...]  # log2 of limit over default, ascending
    places: tuple[FeaturePoint, ...]  # S * L

    def locate(self, place: FeaturePoint) -> tuple[int, int, float]:
        """Row of its slice, the limit below it, and how far it lies towards the next one (0..1)."""
        compute, memory = place.numbers["compute"], place.numbers["memory"]
        row = min(
            range(len(self.slices)),
            key=lambda one: (
                abs(np.log2(self.slices[one].compute) - compute) + abs(np.log2(self.slices[one].memory) - memory)
            ),
        )
        limit = min(max(place.numbers["limit"], self.limits[0]), self.limits[-1])
        below = min(max(int(np.searchsorted(self.limits, limit + 1e-9)) - 1, 0), max(len(self.limits) - 2, 0))
        if len(self.limits) == 1:
            return row, 0, 0.0
        return row, below, (limit - self.limits[below]) / (self.limits[below + 1] - self.limits[below])


def grid_key(place: FeaturePoint) -> tuple[object, ...]:
    """What places of one lattice have in common."""
    kept = (item for item in place.numbers.items() if item[0] not in ("compute", "memory", "load", "limit"))
    return tuple(sorted(kept)), tuple(sorted(place.names.items()))


def _limits(place: FeaturePoint, measured: Sequence[float], catalogue: Catalogue) -> tuple[float, ...]:
    product = find_product(place.names["gpu_model"], catalogue)
    found = {0.0, *measured}
    if product is not None:
        least = product.power_min_w or product.power_default_w
        most = product.power_max_w or product.power_default_w
        found.update(np.log2(np.linspace(least, most, _EVEN) / product.power_default_w).tolist())
    elif measured:
        found.update(np.linspace(min(found), max(found), _EVEN).tolist())
    rounded = sorted({round(one, _DIGITS) for one in found})
    return tuple(rounded[:: -(-len(rounded) // _LIMITS_MOST)])


def build_grid(
    example: FeaturePoint, measured: Sequence[float], varied: frozenset[str], catalogue: Catalogue
) -> PredictionGrid:
    """The lattice around a place.

    measured: limits that the family was measured at on this GPU model.
    varied: coordinates that measurements vary; an axis that is not among them has one place.
    """
    own = SliceShare("", 2.0 ** example.numbers["compute"], 2.0 ** example.numbers["memory"])
    sliced = varied & {"compute", "memory"}
    slices = list_slices(example.names["gpu_model"], catalogue) if sliced else (own,)
    if not any(_same(one, own) for one in slices):
        slices = (own,)
    limits = _limits(example, measured, catalogue) if "limit" in varied else (example.numbers["limit"],)
    places = tuple(_move_point(example, one, limit) for one in slices for limit in limits)
    return PredictionGrid(slices, limits, places)


def _same(one: SliceShare, other: SliceShare) -> bool:
    return abs(one.compute - other.compute) < 1e-6 and abs(one.memory - other.memory) < 1e-6


def _move_point(example: FeaturePoint, to: SliceShare, limit: float) -> FeaturePoint:
    numbers = dict(example.numbers)
    numbers.update(compute=float(np.log2(to.compute)), memory=float(np.log2(to.memory)), limit=limit)
    numbers["load"] = numbers["batch"] + numbers["processes"] - numbers["gpus"] - numbers["compute"]
    return FeaturePoint(numbers, example.names)


def monotone_direction(quantity: str) -> int:
    """1 if it never falls with a larger slice or limit, -1 if it never rises, 0 if nothing is known."""
    if quantity in (POWER, THROUGHPUT):
        return 1
    return 0 if latency_quantile_of(quantity) is None else -1


def interpolate_grid(lattice: PredictionGrid, values: Floats, place: FeaturePoint) -> float:
    """The value at a place; values: (S, L)."""
    row, below, part = lattice.locate(place)
    if part <= 1e-9:
        return float(values[row, below])
    return float((1.0 - part) * values[row, below] + part * values[row, below + 1])


def isotonic_regression(values: Floats, weights: Floats) -> Floats:
    """The nearest sequence that never decreases; (K,) values, (K,) positive weights."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while pools and pools[-1][0] > mean:
            below, other, count = pools.pop()
            mean = (mean * total + below * other) / (total + other)
            total, length = total + other, length + count
        pools.append((mean, total, length))
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])


def monotone_surface(values: Floats, weights: Floats, direction: int) -> Floats:
    """(S, L) values that never go against `direction` along either axis: 1 rises, -1 falls.

    weights: (S, L), positive.
    """
    rising = direction * values
    along = np.stack([isotonic_regression(row, weight) for row, weight in zip(rising, weights, strict=True)])
    slice_weights = weights.mean(axis=1)
    across = np.stack([isotonic_regression(column, slice_weights) for column in along.T], axis=1)
    return np.asarray(direction * across)
