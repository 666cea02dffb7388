"""The lattice on which a prediction is made to agree with physics: every slice at every limit.

Owns which places are looked at besides those that were asked for. Must not know models.

A question is a place; all questions that differ in slice and limit alone share a lattice.
Slices are those of the GPU model. Limits are those that the family was measured at on this model
and nine more, evenly spaced from the lowest to the highest that the catalogue allows, so that
answers do not depend on what else is asked. Between two limits the answer is a straight
line in logarithms, which keeps the order of its ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.axes import Place, Slice, product_of, slices_of
from eelgrid_controller.profiles.quantities import POWER, THROUGHPUT, quantile_of
from eelgrid_kernels.arrays import Floats
from eelgrid_protos.catalogue import Catalogue

__all__ = ["Lattice", "direction", "lattice_of", "read_off", "shared_by"]

_EVEN = 9
_LIMITS_MOST = 64
_DIGITS = 9


class Lattice(NamedTuple):
    """S slices by L limits; places in rows of slices."""

    slices: tuple[Slice, ...]
    limits: tuple[float, ...]  # log2 of limit over default, ascending
    places: tuple[Place, ...]  # S * L

    def find(self, place: Place) -> tuple[int, int, float]:
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


def shared_by(place: Place) -> tuple[object, ...]:
    """What places of one lattice have in common."""
    kept = (item for item in place.numbers.items() if item[0] not in ("compute", "memory", "load", "limit"))
    return tuple(sorted(kept)), tuple(sorted(place.names.items()))


def _limits(place: Place, measured: Sequence[float], catalogue: Catalogue) -> tuple[float, ...]:
    product = product_of(place.names["gpu_model"], catalogue)
    found = {0.0, *measured}
    if product is not None:
        least = product.power_min_w or product.power_default_w
        most = product.power_max_w or product.power_default_w
        found.update(np.log2(np.linspace(least, most, _EVEN) / product.power_default_w).tolist())
    elif measured:
        found.update(np.linspace(min(found), max(found), _EVEN).tolist())
    rounded = sorted({round(one, _DIGITS) for one in found})
    return tuple(rounded[:: -(-len(rounded) // _LIMITS_MOST)])


def lattice_of(example: Place, measured: Sequence[float], varied: frozenset[str], catalogue: Catalogue) -> Lattice:
    """The lattice around a place.

    measured: limits that the family was measured at on this GPU model.
    varied: coordinates that measurements vary; an axis that is not among them has one place.
    """
    own = Slice("", 2.0 ** example.numbers["compute"], 2.0 ** example.numbers["memory"])
    sliced = varied & {"compute", "memory"}
    slices = slices_of(example.names["gpu_model"], catalogue) if sliced else (own,)
    if not any(_same(one, own) for one in slices):
        slices = (own,)
    limits = _limits(example, measured, catalogue) if "limit" in varied else (example.numbers["limit"],)
    places = tuple(_moved(example, one, limit) for one in slices for limit in limits)
    return Lattice(slices, limits, places)


def _same(one: Slice, other: Slice) -> bool:
    return abs(one.compute - other.compute) < 1e-6 and abs(one.memory - other.memory) < 1e-6


def _moved(example: Place, to: Slice, limit: float) -> Place:
    numbers = dict(example.numbers)
    numbers.update(compute=float(np.log2(to.compute)), memory=float(np.log2(to.memory)), limit=limit)
    numbers["load"] = numbers["batch"] + numbers["processes"] - numbers["gpus"] - numbers["compute"]
    return Place(numbers, example.names)


def direction(quantity: str) -> int:
    """1 if it never falls with a larger slice or limit, -1 if it never rises, 0 if nothing is known."""
    if quantity in (POWER, THROUGHPUT):
        return 1
    return 0 if quantile_of(quantity) is None else -1


def read_off(lattice: Lattice, values: Floats, place: Place) -> float:
    """The value at a place; values: (S, L)."""
    row, below, part = lattice.find(place)
    if part <= 1e-9:
        return float(values[row, below])
    return float((1.0 - part) * values[row, below] + part * values[row, below + 1])
