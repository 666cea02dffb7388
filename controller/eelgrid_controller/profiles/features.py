"""Features of a configuration: coordinates in which physics is smooth, and their scaling into arrays.

Coordinates are logarithms to base 2, zero for a whole GPU at its default limit and clock. A feature that no
measurement varies is dropped, and questions that vary it are reported as unknown.
"""

import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.gaussian_process import CONFIGURATION, COORDINATES, WORKLOAD
from eelgrid_controller.profiles.points import Configuration, ImpossibleReading, UnknownSlice
from eelgrid_kernels.arrays import Floats
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.catalogue.products import MigGeometry, Product

LOAD_PARTS = ("batch", "processes", "gpus", "compute")
_LEADING = re.compile(r"(\d+)g\b")
_PARTS = 7  # compute slices of every part that a name alone may speak of
_MEMORY_OF = {1: 1 / 8, 2: 2 / 8, 3: 4 / 8, 4: 4 / 8, 7: 1.0}  # share of memory by compute slices, A100 and later
_BETWEEN = re.compile(r"[\s,]+")
_COUNTED = re.compile(r"([A-Za-z_]+)(\d+)")
_WORDS_MOST = 16
UNKNOWN_LIMIT_W = 300.0  # a limit of a GPU model that the catalogue lacks counts from here


class FeaturePoint(NamedTuple):
    """A configuration as coordinates and names."""

    numbers: Mapping[str, float]
    names: Mapping[str, str]


class SliceShare(NamedTuple):
    """A MIG profile as shares of the part; "" is the whole part."""

    profile: str
    compute: float
    memory: float


def find_product(model: str, catalogue: Catalogue) -> Product | None:
    """The product with this key, or that workloads call by this name; None if there is none."""
    keyed = catalogue.products.get(model)
    return keyed or next((product for product in catalogue.products.values() if product.model == model), None)


def _slice_shares(name: str, geometry: MigGeometry | None, model: str) -> tuple[float, float]:
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


def list_slices(model: str, catalogue: Catalogue) -> tuple[SliceShare, ...]:
    """The slices of a GPU model from the smallest to the whole part; the whole alone if it has no MIG.

    Of profiles with equal shares the first stands for all.
    """
    product = find_product(model, catalogue)
    found = {(1.0, 1.0): SliceShare("", 1.0, 1.0)}
    if product is not None and product.mig is not None:
        for profile in product.mig.profiles.values():
            shares = (profile.compute_slices / product.mig.compute_slices, profile.size / product.mig.memory_slices)
            found.setdefault(shares, SliceShare(profile.name, *shares))
    return tuple(sorted(found.values(), key=lambda one: (one.compute, one.memory)))


def effective_limit_w(configuration: Configuration, catalogue: Catalogue) -> float | None:
    """The power limit of each GPU, its default where none is set; None where neither is known."""
    product = find_product(configuration.gpu_model, catalogue)
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


def locate_configuration(configuration: Configuration, catalogue: Catalogue) -> FeaturePoint:
    """Where it lies; raises UnknownSlice and ImpossibleReading, which name the field."""
    product = find_product(configuration.gpu_model, catalogue)
    compute, memory = 1.0, 1.0
    if configuration.mig_profile:
        geometry = None if product is None else product.mig
        compute, memory = _slice_shares(configuration.mig_profile, geometry, configuration.gpu_model)
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
    return FeaturePoint(numbers, names)


_SAME = 1e-9
_DIGITS = 6  # of a scaled coordinate, to which two places are one
COLUMNS_MOST = 24


class FeatureColumn(NamedTuple):
    """A coordinate or a trait; scaled it is (value - centre) / spread."""

    name: str
    centre: float
    spread: float


class FeatureFrame(NamedTuple):
    """What the arrays of a family hold."""

    numbers: tuple[FeatureColumn, ...]
    names: tuple[str, ...]
    traits: tuple[FeatureColumn, ...]
    fixed: tuple[tuple[str, float], ...]  # coordinates that all measured configurations share, and their value

    def unknown_features(self, place: FeaturePoint) -> tuple[str, ...]:
        """Coordinates that the question varies and no measurement did."""
        fixed = dict(self.fixed)
        known = {column.name for column in self.numbers} | {"load"}
        return tuple(
            sorted(
                name
                for name, value in place.numbers.items()
                if name not in known and abs(value - fixed.get(name, 0.0)) > _SAME
            )
        )

    def build_sites(
        self, places: Sequence[FeaturePoint], traits: Sequence[Mapping[str, float]], workloads: Sequence[str]
    ) -> Floats:
        """(N, 3 + Q + T + C) places of workloads as gaussian_process.py lays sites out, none of them stale.

        Two places of a workload have one code of configuration if they differ by no more than rounding. A trait that is
        not known is at its centre.
        """
        count = len(places)
        found = np.zeros((count, COORDINATES + len(self.numbers) + len(self.traits) + len(self.names)))
        numbers = _scale_rows(self.numbers, [one.numbers for one in places], dict(self.fixed))
        codes = np.array(
            [[name_code(one.names.get(name, "")) for name in self.names] for one in places], dtype=np.float64
        )
        codes = codes.reshape(count, len(self.names))
        found[:, WORKLOAD] = [name_code(name) for name in workloads]
        keyed = np.hstack((found[:, :1], np.round(numbers, _DIGITS) + 0.0, codes))  # 0.0: no negative zero
        found[:, CONFIGURATION] = [_digest(row.tobytes()) for row in keyed]
        facts = _scale_rows(self.traits, traits, {column.name: column.centre for column in self.traits})
        found[:, COORDINATES:] = np.hstack((numbers, facts, codes))
        return found


def name_code(text: str) -> int:
    """The code of a name, or of a workload, in a matrix of sites."""
    return zlib.crc32(text.encode())


def _digest(content: bytes) -> int:
    """A code of 40 bits, which a double holds exactly beside 12 of a fraction."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=5).digest(), "big")


def _scale_rows(
    columns: Sequence[FeatureColumn], rows: Sequence[Mapping[str, float]], absent: Mapping[str, float]
) -> Floats:
    found = [
        [(row.get(name, absent.get(name, 0.0)) - centre) / spread for name, centre, spread in columns] for row in rows
    ]
    return np.array(found, dtype=np.float64).reshape(len(rows), len(columns))


def _columns(rows: Sequence[Mapping[str, float]]) -> tuple[dict[str, FeatureColumn], dict[str, float]]:
    """Columns that vary, and the value of those that do not."""
    varied, fixed = {}, {}
    for name in sorted({name for row in rows for name in row}):
        values = np.array([row.get(name, 0.0) for row in rows])
        if np.ptp(values) > _SAME:
            varied[name] = FeatureColumn(name, float(values.mean()), float(values.std()))
        else:
            fixed[name] = float(values[0])
    return varied, fixed


def fit_frame(places: Sequence[FeaturePoint], traits: Sequence[Mapping[str, float]]) -> FeatureFrame:
    """The frame of these measured places; at least one."""
    varied, fixed = _columns([one.numbers for one in places])
    if sum(name in varied for name in LOAD_PARTS) < 2:
        varied.pop("load", None)  # it would repeat the one that varies
    fixed.pop("load", None)
    uses = Counter(name for one in places for name in one.numbers)
    often = set(sorted(varied, key=lambda name: (-uses[name], name))[:COLUMNS_MOST])
    varied = {name: column for name, column in varied.items() if name in often}
    known, _ = _columns(traits)
    known = dict(list(known.items())[:COLUMNS_MOST])
    used = Counter(name for one in places for name in one.names)
    names = sorted(sorted(used, key=lambda name: (-used[name], name))[:COLUMNS_MOST])
    told = tuple(name for name in names if len({one.names.get(name, "") for one in places}) > 1)
    return FeatureFrame(tuple(varied.values()), told, tuple(known.values()), tuple(sorted(fixed.items())))
