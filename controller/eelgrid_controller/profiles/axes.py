"""Where a configuration lies: coordinates in which physics is smooth.

Owns the coordinates. Must not know what was measured nor any model.

Coordinates are logarithms to base 2, zero for a whole GPU at its default limit and clock:
    compute    compute slices over those of the part
    memory     memory slices over those of the part: it scales bandwidth and cache too
    gpus, batch, processes
    load       batch * processes / (gpus * compute share): the work that one unit of silicon has at once,
               along which throughput saturates whatever made it large
    limit      power limit over the default; clock: locked clock over the largest
    label keys the words of a label, between blanks or commas: "tp8" and "tensor=8" are coordinates,
               "optimizer=adam" and "eager" are names
Names are what has no distance: the GPU model and what labels say in words.

Source of slices, limits and clocks: eelgrid_protos.catalogue.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from eelgrid_controller.profiles.errors import ImpossibleReading, UnknownSlice
from eelgrid_controller.profiles.points import Configuration
from eelgrid_protos.catalogue import Catalogue, MigGeometry, Product

__all__ = ["LOAD_PARTS", "UNKNOWN_LIMIT_W", "Place", "Slice", "limit_w", "place", "product_of", "slices_of"]

LOAD_PARTS = ("batch", "processes", "gpus", "compute")
_LEADING = re.compile(r"(\d+)g\b")
_PARTS = 7  # compute slices of every part that a name alone may speak of
_MEMORY_OF = {1: 1 / 8, 2: 2 / 8, 3: 4 / 8, 4: 4 / 8, 7: 1.0}  # share of memory by compute slices, A100 and later
_BETWEEN = re.compile(r"[\s,]+")
_COUNTED = re.compile(r"([A-Za-z_]+)(\d+)")
_WORDS_MOST = 16
UNKNOWN_LIMIT_W = 300.0  # a limit of a GPU model that the catalogue lacks counts from here


class Place(NamedTuple):
    """A configuration as coordinates and names."""

    numbers: Mapping[str, float]
    names: Mapping[str, str]


class Slice(NamedTuple):
    """A MIG profile as shares of the part; "" is the whole part."""

    profile: str
    compute: float
    memory: float


def product_of(model: str, catalogue: Catalogue) -> Product | None:
    """The product with this key, or that workloads call by this name; None if there is none."""
    keyed = catalogue.products.get(model)
    return keyed or next((product for product in catalogue.products.values() if product.model == model), None)


def _shares(name: str, geometry: MigGeometry | None, model: str) -> tuple[float, float]:
    """Compute and memory of a MIG profile as shares of the part."""
    known = geometry.profile(name) if geometry else None
    if known is not None and geometry is not None:
        return known.compute_slices / geometry.compute_slices, known.size / geometry.memory_slices
    leading = _LEADING.match(name)
    if geometry is None and leading and int(leading[1]) in _MEMORY_OF:
        return int(leading[1]) / _PARTS, _MEMORY_OF[int(leading[1])]
    raise UnknownSlice(
        "mig_profile", f"{model} has no profile {name!r}", "write it as the catalogue does, e.g. 1g.10gb"
    )


def slices_of(model: str, catalogue: Catalogue) -> tuple[Slice, ...]:
    """The slices of a GPU model from the smallest to the whole part; the whole alone if it has no MIG.

    Of profiles with equal shares the first stands for all.
    """
    product = product_of(model, catalogue)
    found = {(1.0, 1.0): Slice("", 1.0, 1.0)}
    if product is not None and product.mig is not None:
        for profile in product.mig.profiles.values():
            shares = (profile.compute_slices / product.mig.compute_slices, profile.size / product.mig.memory_slices)
            found.setdefault(shares, Slice(profile.name, *shares))
    return tuple(sorted(found.values(), key=lambda one: (one.compute, one.memory)))


def limit_w(configuration: Configuration, catalogue: Catalogue) -> float | None:
    """The power limit of each GPU, its default where none is set; None where neither is known."""
    product = product_of(configuration.gpu_model, catalogue)
    default = None if product is None else product.power_default_w
    return default if configuration.power_limit_w is None else configuration.power_limit_w


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ImpossibleReading(name, f"{value} is not positive", "correct the configuration")
    return math.log2(value)


def _label(label: str, numbers: dict[str, float], names: dict[str, str]) -> None:
    plain = []
    for word in _BETWEEN.split(label, _WORDS_MOST):
        key, equals, text = word.partition("=")
        counted = None if equals else _COUNTED.fullmatch(word)
        if counted is not None:
            key, text = counted.groups()
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if math.isfinite(value) and value > 0.0:
            numbers[f"label.{key}"] = math.log2(value)
        elif equals:
            names[f"label.{key}"] = text
        elif word:
            plain.append(word)
    if plain:
        names["label"] = " ".join(plain)


def place(configuration: Configuration, catalogue: Catalogue) -> Place:
    """Where it lies; raises UnknownSlice and ImpossibleReading, which name the field."""
    product = product_of(configuration.gpu_model, catalogue)
    compute, memory = 1.0, 1.0
    if configuration.mig_profile:
        geometry = None if product is None else product.mig
        compute, memory = _shares(configuration.mig_profile, geometry, configuration.gpu_model)
    numbers = {
        "compute": math.log2(compute),
        "memory": math.log2(memory),
        "gpus": _positive("gpus", configuration.gpus),
        "batch": _positive("batch", configuration.batch),
        "processes": _positive("processes", configuration.processes),
        "limit": 0.0,
        "clock": 0.0,
    }
    numbers["load"] = numbers["batch"] + numbers["processes"] - numbers["gpus"] - numbers["compute"]
    if configuration.power_limit_w is not None:
        default = UNKNOWN_LIMIT_W if product is None else product.power_default_w
        numbers["limit"] = _positive("power_limit_w", configuration.power_limit_w) - math.log2(default)
    if configuration.clock_mhz is not None:
        fastest = configuration.clock_mhz if product is None else product.sm_clock_max_mhz
        numbers["clock"] = _positive("clock_mhz", configuration.clock_mhz) - math.log2(fastest)
    names = {"gpu_model": configuration.gpu_model}
    _label(configuration.label, numbers, names)
    return Place(numbers, names)
