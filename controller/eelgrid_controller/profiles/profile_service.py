"""The profile service: records readings, answers predictions, adopts learned families, saves and restores itself.

Contains the strict plain-value (JSON) form of the store and of learned families.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.profiles.features import FeatureColumn, FeatureFrame
from eelgrid_controller.profiles.gaussian_process import GpCovariance, GpEvidence, SurfaceCovariance
from eelgrid_controller.profiles.points import Configuration, Point, ProfilePrediction, UnreadableRecord
from eelgrid_controller.profiles.prediction import ProfilePredictor
from eelgrid_controller.profiles.store import (
    DriftTest,
    ExpectedReading,
    ProfileCell,
    ProfiledWorkload,
    ProfileReading,
    ProfileStore,
    ReadingNoise,
    ReadingTally,
    RecentReading,
    WorkloadProfile,
)
from eelgrid_controller.profiles.surfaces import (
    CONFIGURATIONS_LEAST,
    ConformalCalibration,
    ConformityScores,
    LearnedFamily,
    LearnedSurface,
)
from eelgrid_protos.catalogue.loader import Catalogue

RECORD_FORMAT = 1
_KINDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        ConformalCalibration,
        ProfileCell,
        FeatureColumn,
        Configuration,
        GpCovariance,
        GpEvidence,
        ExpectedReading,
        FeatureFrame,
        LearnedFamily,
        ReadingNoise,
        SurfaceCovariance,
        Point,
        WorkloadProfile,
        ProfileStore,
        ProfileReading,
        RecentReading,
        ConformityScores,
        LearnedSurface,
        ReadingTally,
        DriftTest,
        ProfiledWorkload,
    )
}
_TABLE, _ARRAY = "table", "array"
_DTYPES = {"float64", "int64", "bool"}
_DEEP = 24


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind)) if is_dataclass(kind) else tuple(kind._fields)


def encode_record(value: object) -> dict[str, Any]:
    """A record, a store or what was learned, as plain values; raises TypeError for anything else."""
    return {"format": RECORD_FORMAT, "value": _plain(value)}


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


def decode_record(plain: Mapping[str, Any]) -> Any:
    """The inverse of encode; raises UnreadableRecord, which names the place."""
    if plain.get("format") != RECORD_FORMAT:
        raise UnreadableRecord("format", f"is {plain.get('format')!r}", f"this release reads format {RECORD_FORMAT}")
    return _value(plain.get("value"), "value", 0)


class _RecordPath(NamedTuple):
    path: str

    def error(self, problem: str) -> UnreadableRecord:
        return UnreadableRecord(self.path, problem, "read it with the release that wrote it")


def _value(plain: Any, path: str, depth: int) -> Any:
    at = _RecordPath(path)
    if depth > _DEEP:
        raise at.error("is too deep")
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    if isinstance(plain, list):
        return tuple(_value(one, f"{path}[{index}]", depth + 1) for index, one in enumerate(plain))
    if not isinstance(plain, Mapping):
        raise at.error(f"is a {type(plain).__name__}")
    kind = plain.get("kind")
    if kind == _TABLE:
        return _table(plain, path, depth)
    if kind == _ARRAY:
        return _array(plain, at)
    known = _KINDS.get(str(kind))
    if known is None:
        raise at.error(f"is of the unknown kind {kind!r}")
    names = _names(known)
    if set(plain) != {"kind", *names}:
        raise at.error(f"has the fields {sorted(set(plain) - {'kind'})}, not {sorted(names)}")
    return known(**{name: _value(plain[name], f"{path}.{name}", depth + 1) for name in names})


def _table(plain: Mapping[str, Any], path: str, depth: int) -> dict[Any, Any]:
    pairs = plain.get("pairs")
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise _RecordPath(path).error("is no table of pairs")
    found = {}
    for index, (key, held) in enumerate(pairs):
        name = _value(key, f"{path}.key[{index}]", depth + 1)
        found[name] = _value(held, f"{path}[{name!r}]", depth + 1)
    return found


def _array(plain: Mapping[str, Any], at: _RecordPath) -> NDArray[Any]:
    dtype, shape, data = plain.get("dtype"), plain.get("shape"), plain.get("data")
    if dtype not in _DTYPES or not isinstance(shape, list) or not isinstance(data, list):
        raise at.error("is no array")
    try:
        return np.array(data, dtype=dtype).reshape(shape)
    except (TypeError, ValueError) as error:
        raise at.error(f"is no array: {error}") from None


RELEARN_GROWTH = 1.25  # a family is learned again when it has so many times the configurations that it was learned from


class ProfileService:
    """One store, what was learned of its families, and the answers from both."""

    def __init__(
        self,
        catalogue: Catalogue,
        profiles: ProfileStore | None = None,
        learned: Mapping[str, LearnedFamily] | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._profiles = profiles or ProfileStore()
        self._learned = dict(learned or {})
        self._predictor = ProfilePredictor(self._profiles, self._learned, catalogue)
        self._counts: dict[str, tuple[WorkloadProfile, Counter[str]]] = {}

    def add_workload(self, workload: ProfiledWorkload) -> None:
        """A workload's family and facts; without it a workload is of the family "default"."""
        self._set(self._profiles.with_workload(workload))

    def observe(self, point: Point, at_s: float, noise: Mapping[str, float] | None = None) -> ProfileReading:
        """One measurement; raises ImpossibleReading or UnknownSlice, which name the field, and is then unchanged.

        noise: stated deviation of a reading's logarithm, by quantity, where the source says so.
        """
        reading = self._predictor.build_reading(point, at_s, noise)
        self._set(self._profiles.with_reading(reading))
        return reading

    def predict(self, workload: str, configuration: Configuration) -> ProfilePrediction:
        """What one configuration is believed to do; raises ImpossibleReading or UnknownSlice."""
        return self.predict_all(workload, [configuration])[0]

    def predict_all(self, workload: str, configurations: Sequence[Configuration]) -> tuple[ProfilePrediction, ...]:
        """One answer a configuration; cheaper than one after the other."""
        return self._predictor.predict(workload, configurations)

    def families_due(self) -> tuple[str, ...]:
        """Families never learned that could be, or with a quantity that has grown by GROWTH since; by name."""
        held = self._profiles.profiles
        self._counts = {name: self._count_configurations(name, profile) for name, profile in held.items()}
        families: dict[str, Counter[str]] = {}
        for name, (_, counts) in self._counts.items():
            families.setdefault(held[name].workload.family, Counter()).update(counts)
        return tuple(family for family in sorted(families) if self._grown(family, families[family]))

    def _count_configurations(self, name: str, profile: WorkloadProfile) -> tuple[WorkloadProfile, Counter[str]]:
        """Configurations by quantity that levels can be learned from; counted again only where something changed."""
        before = self._counts.get(name)
        if before is not None and before[0] is profile:
            return before
        fresh = (cell for cell in profile.cells.values() if not profile.is_stale(cell))
        return profile, Counter(quantity for cell in fresh for quantity in cell.tallies)

    def _grown(self, family: str, counts: Mapping[str, int]) -> bool:
        learned = self._learned.get(family)
        surfaces = {} if learned is None else learned.surfaces
        return any(
            count >= (RELEARN_GROWTH * surfaces[name].learned_from if name in surfaces else CONFIGURATIONS_LEAST)
            for name, count in counts.items()
        )

    def snapshot(self) -> ProfileStore:
        """The store as it is now."""
        return self._profiles

    def adopt_family(self, learned: LearnedFamily) -> None:
        """What was learned of a family, in place of what was before."""
        self._learned = {**self._learned, learned.family: learned}
        self._predictor = ProfilePredictor(self._profiles, self._learned, self._catalogue)

    def dump(self) -> dict[str, Any]:
        """Plain values, JSON as they stand."""
        return {
            "profiles": encode_record(self._profiles),
            "learned": [encode_record(one) for one in self._learned.values()],
        }

    @classmethod
    def restore(cls, plain: Mapping[str, Any], catalogue: Catalogue) -> "ProfileService":
        """The inverse of dump; raises UnreadableRecord."""
        profiles = decode_record(_part(plain, "profiles"))
        if not isinstance(profiles, ProfileStore):
            raise UnreadableRecord("profiles", "is no store", "give what dump gave")
        learned = [decode_record(one) for one in plain.get("learned", ())]
        if not all(isinstance(one, LearnedFamily) for one in learned):
            raise UnreadableRecord("learned", "holds what was not learned", "give what dump gave")
        return cls(catalogue, profiles, {one.family: one for one in learned})

    def _set(self, profiles: ProfileStore) -> None:
        self._profiles = profiles
        self._predictor = self._predictor.with_profiles(profiles)


def _part(plain: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = plain.get(name)
    if not isinstance(found, Mapping):
        raise UnreadableRecord(name, "is missing", "give what dump gave")
    return found
