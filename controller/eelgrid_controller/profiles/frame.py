"""From places to arrays: which coordinates a family varies, and their scale.

Owns the choice and scaling of columns. Must not know quantities or models.

A coordinate that no measured configuration varies teaches nothing and is left out; a
question that varies it cannot be answered from measurements, and `unknown` says so. So it is with the
rarest of more than `COLUMNS_MOST` coordinates, since labels may bring any number of them.
Names become checksums, so that arrays made at different times agree.
"""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.axes import LOAD_PARTS, Place
from eelgrid_controller.profiles.covariance import Sites
from eelgrid_kernels.arrays import Floats

__all__ = ["Column", "Frame", "fit"]

_SAME = 1e-9
COLUMNS_MOST = 24


class Column(NamedTuple):
    """A coordinate or a trait; scaled it is (value - centre) / spread."""

    name: str
    centre: float
    spread: float


class Frame(NamedTuple):
    """What the arrays of a family hold."""

    numbers: tuple[Column, ...]
    names: tuple[str, ...]
    traits: tuple[Column, ...]
    fixed: tuple[tuple[str, float], ...]  # coordinates that all measured configurations share, and their value

    def unknown(self, place: Place) -> tuple[str, ...]:
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

    def sites(self, places: Sequence[Place], traits: Sequence[Mapping[str, float]], workloads: Sequence[str]) -> Sites:
        """Places of workloads as arrays; a trait that is not known is at its centre."""
        return Sites(
            _scaled(self.numbers, [one.numbers for one in places], dict(self.fixed)),
            np.array(
                [[_code(one.names.get(name, "")) for name in self.names] for one in places], dtype=np.int64
            ).reshape(len(places), len(self.names)),
            _scaled(self.traits, traits, {column.name: column.centre for column in self.traits}),
            np.array([_code(name) for name in workloads], dtype=np.int64),
        )


def _code(text: str) -> int:
    return zlib.crc32(text.encode())


def _scaled(columns: Sequence[Column], rows: Sequence[Mapping[str, float]], absent: Mapping[str, float]) -> Floats:
    found = [
        [(row.get(name, absent.get(name, 0.0)) - centre) / spread for name, centre, spread in columns] for row in rows
    ]
    return np.array(found, dtype=np.float64).reshape(len(rows), len(columns))


def _columns(rows: Sequence[Mapping[str, float]]) -> tuple[dict[str, Column], dict[str, float]]:
    """Columns that vary, and the value of those that do not."""
    varied, fixed = {}, {}
    for name in sorted({name for row in rows for name in row}):
        values = np.array([row.get(name, 0.0) for row in rows])
        if np.ptp(values) > _SAME:
            varied[name] = Column(name, float(values.mean()), float(values.std()))
        else:
            fixed[name] = float(values[0])
    return varied, fixed


def fit(places: Sequence[Place], traits: Sequence[Mapping[str, float]]) -> Frame:
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
    return Frame(tuple(varied.values()), told, tuple(known.values()), tuple(sorted(fixed.items())))
