"""Records and stores as plain values, for a journal: told again, they give the same store and the same answers.

Owns the plain form. Must not know files nor JSON.

A value is its kind and its fields; a table is its kind and pairs; an array is its kind, its shape and its
numbers. Floats survive JSON to the last bit. Reading is strict: a kind, a field or a type that this
release does not know is named, nothing is guessed and nothing is left out.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.profiles.calibration import Calibration, Scores
from eelgrid_controller.profiles.covariance import Covariance, Part, Sites
from eelgrid_controller.profiles.drift import Noise, Watch
from eelgrid_controller.profiles.errors import UnreadableRecord
from eelgrid_controller.profiles.family import Learned
from eelgrid_controller.profiles.frame import Column, Frame
from eelgrid_controller.profiles.learning import Surface
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.profiles.posterior import Evidence
from eelgrid_controller.profiles.store import Cell, Expected, Profile, Profiles, Reading, Recent, Tally, Workload

__all__ = ["FORMAT", "decode", "encode"]

FORMAT = 1
_KINDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        Calibration, Cell, Column, Configuration, Covariance, Evidence, Expected, Frame, Learned, Noise, Part, Point,
        Profile, Profiles, Reading, Recent, Scores, Sites, Surface, Tally, Watch, Workload,
    )
}  # fmt: skip
_TABLE, _ARRAY = "table", "array"
_DTYPES = {"float64", "int64", "bool"}
_DEEP = 24


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind)) if is_dataclass(kind) else tuple(kind._fields)


def encode(value: object) -> dict[str, Any]:
    """A record, a store or what was learned, as plain values; raises TypeError for anything else."""
    return {"format": FORMAT, "value": _plain(value)}


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value).__name__
    if _KINDS.get(kind) is type(value):
        return {"kind": kind, **{name: _plain(getattr(value, name)) for name in _names(type(value))}}
    if isinstance(value, Mapping):
        return {"kind": _TABLE, "pairs": [[_plain(key), _plain(held)] for key, held in value.items()]}
    if isinstance(value, np.ndarray):
        return {"kind": _ARRAY, "dtype": str(value.dtype), "shape": list(value.shape), "data": value.ravel().tolist()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    raise TypeError(f"{kind} is no part of a record")


def decode(plain: Mapping[str, Any]) -> Any:
    """The inverse of encode; raises UnreadableRecord, which names the place."""
    if plain.get("format") != FORMAT:
        raise UnreadableRecord("format", f"is {plain.get('format')!r}", f"this release reads format {FORMAT}")
    return _value(plain.get("value"), "value", 0)


class _At(NamedTuple):
    path: str

    def wrong(self, problem: str) -> UnreadableRecord:
        return UnreadableRecord(self.path, problem, "read it with the release that wrote it")


def _value(plain: Any, path: str, depth: int) -> Any:
    at = _At(path)
    if depth > _DEEP:
        raise at.wrong("is too deep")
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    if isinstance(plain, list):
        return tuple(_value(one, f"{path}[{index}]", depth + 1) for index, one in enumerate(plain))
    if not isinstance(plain, Mapping):
        raise at.wrong(f"is a {type(plain).__name__}")
    kind = plain.get("kind")
    if kind == _TABLE:
        return _table(plain, path, depth)
    if kind == _ARRAY:
        return _array(plain, at)
    known = _KINDS.get(str(kind))
    if known is None:
        raise at.wrong(f"is of the unknown kind {kind!r}")
    names = _names(known)
    if set(plain) != {"kind", *names}:
        raise at.wrong(f"has the fields {sorted(set(plain) - {'kind'})}, not {sorted(names)}")
    return known(**{name: _value(plain[name], f"{path}.{name}", depth + 1) for name in names})


def _table(plain: Mapping[str, Any], path: str, depth: int) -> dict[Any, Any]:
    pairs = plain.get("pairs")
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise _At(path).wrong("is no table of pairs")
    found = {}
    for index, (key, held) in enumerate(pairs):
        name = _value(key, f"{path}.key[{index}]", depth + 1)
        found[name] = _value(held, f"{path}[{name!r}]", depth + 1)
    return found


def _array(plain: Mapping[str, Any], at: _At) -> NDArray[Any]:
    dtype, shape, data = plain.get("dtype"), plain.get("shape"), plain.get("data")
    if dtype not in _DTYPES or not isinstance(shape, list) or not isinstance(data, list):
        raise at.wrong("is no array")
    try:
        return np.array(data, dtype=dtype).reshape(shape)
    except (TypeError, ValueError) as error:
        raise at.wrong(f"is no array: {error}") from None
