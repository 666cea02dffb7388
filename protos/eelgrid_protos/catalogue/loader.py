"""Catalogue loader: parses and validates the JSON files of products and MIG geometry.

`parse_catalogue` is pure and takes the two documents; `load_catalogue` finds the packaged files.
It owns the file format and nothing else.
"""

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from eelgrid_protos.catalogue.products import (
    CiProfile,
    GiProfile,
    MigGeometry,
    PowerSensor,
    Product,
    SensorClass,
    model_name,
    plain_name,
)
from eelgrid_protos.quantities import MIB
from eelgrid_protos.values import dataclass


class CatalogueError(ValueError):
    """A catalogue file breaks a rule; the message names the place and the remedy."""


_Item = TypeVar("_Item", Product, MigGeometry)

_FORMAT = 1
# A driver reports up to some per cent less than the board has (ECC, reserved memory).
_MEMORY_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All products and all MIG geometries, each by its key."""

    products: Mapping[str, Product]
    geometries: Mapping[str, MigGeometry]

    def find_product(self, nvml_name: str, memory_bytes: int | None) -> Product | None:
        """The product that prints this name, unless its memory says that it is another part."""
        name = plain_name(nvml_name)
        for product in self.products.values():
            if any(plain_name(known) == name for known in product.nvml_names) and (
                memory_bytes is None
                or abs(memory_bytes - product.memory_bytes) <= _MEMORY_TOLERANCE * product.memory_bytes
            ):
                return product
        return None


@cache
def load_catalogue() -> Catalogue:
    """The packaged catalogue."""
    files = Path(__file__).parent
    products, mig = (json.loads(files.joinpath(name).read_text("utf-8")) for name in ("products.json", "mig.json"))
    return parse_catalogue(products, mig)


def parse_catalogue(products: Mapping[str, Any], mig: Mapping[str, Any]) -> Catalogue:
    """The catalogue in these documents; raises CatalogueError."""
    for name, document in (("products", products), ("mig", mig)):
        if document.get("format") != _FORMAT:
            raise CatalogueError(f"{name}: format is {document.get('format')!r}; this release reads format {_FORMAT}")
    parts = (_geometry(part, mig["shapes"], set(mig["kinds"])) for part in mig["parts"])
    geometries = _index_by_key("mig.parts", parts)
    sensors = {key: _sensor(f"products.sensors.{key}", value) for key, value in products["sensors"].items()}
    kinds = set(products["kinds"])
    found = _index_by_key("products", (_product(row, sensors, geometries, kinds) for row in products["products"]))
    names = [(plain_name(name), product.memory_bytes) for product in found.values() for name in product.nvml_names]
    if len(set(names)) < len(names):
        raise CatalogueError("products: two products print one name with one memory size; merge them")
    aliases = [alias.lower() for product in found.values() for alias in product.aliases]
    if len(set(aliases)) < len(aliases):
        raise CatalogueError("products: two products have one alias; leave it with the one that is meant by it")
    return Catalogue(products=found, geometries=geometries)


class _Record:
    """An object of a file, taken apart field by field; what is left over at the end is an error."""

    def __init__(self, path: str, fields: Mapping[str, Any]) -> None:
        self.path = path
        self._fields = dict(fields)

    def take_field(self, name: str, *types: type, default: Any = ...) -> Any:
        value = self._fields.pop(name, default)
        if value is ...:
            raise CatalogueError(f"{self.path}.{name}: is missing; add it")
        # bool is an int to Python and never a number here.
        if value is not default and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise CatalogueError(f"{self.path}.{name}: {value!r} is not of type {types[0].__name__}")
        return value

    def measured(self, name: str, kinds: set[str], *, optional: bool = False) -> tuple[Any, str]:
        """A value that carries the kind of its source."""
        pair = self.take_field(name, list, default=None if optional else ...)
        if pair is None:
            return None, ""
        if len(pair) != 2 or isinstance(pair[0], bool) or not isinstance(pair[0], int | float):
            raise CatalogueError(f"{self.path}.{name}: {pair!r} is not [number, kind]")
        if pair[1] not in kinds:
            raise CatalogueError(f"{self.path}.{name}: kind {pair[1]!r} is unknown; use one of {sorted(kinds)}")
        if not math.isfinite(pair[0]) or pair[0] <= 0:
            raise CatalogueError(f"{self.path}.{name}: {pair[0]} is not positive; leave it out if it is unknown")
        return pair[0], pair[1]

    def finish(self) -> None:
        if self._fields:
            raise CatalogueError(f"{self.path}: {sorted(self._fields)} are no fields; correct the spelling")


def _index_by_key(path: str, items: Iterable[_Item]) -> Mapping[str, _Item]:
    found: dict[str, _Item] = {}
    for item in items:
        if item.key in found:
            raise CatalogueError(f"{path}: {item.key} is there twice; remove one")
        found[item.key] = item
    return MappingProxyType(found)


def _sensor(path: str, fields: Mapping[str, Any]) -> SensorClass:
    record = _Record(path, fields)
    looks = {}
    for name in ("instant", "usage"):
        look = _Record(f"{path}.{name}", record.take_field(name, dict))
        period, window = look.take_field("period_ms", int), look.take_field("window_ms", int)
        if period <= 0 or window <= 0:
            raise CatalogueError(f"{path}.{name}: period_ms and window_ms are positive")
        looks[name] = PowerSensor(period_ms=period, window_ms=window, kind=look.take_field("kind", str))
        look.finish()
    averaged = record.take_field("averaged", bool)
    record.finish()
    return SensorClass(instant=looks["instant"], usage=looks["usage"], averaged=averaged)


def _product(
    fields: Mapping[str, Any],
    sensors: Mapping[str, SensorClass],
    geometries: Mapping[str, MigGeometry],
    kinds: set[str],
) -> Product:
    record = _Record(f"products.{fields.get('key', '?')}", fields)
    numbers: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, optional in _MEASURED.items():
        value, kind = record.measured(name, kinds, optional=optional)
        # Megahertz and counts are whole; a clock step may alternate between two sizes.
        whole = name.endswith("_count") or (name.endswith("_mhz") and name != "sm_clock_step_mhz")
        numbers[name] = value if value is None else int(value) if whole else float(value)
        if kind:
            sources["memory_bytes" if name == "memory_mib" else name] = kind
    memory_mib = numbers.pop("memory_mib")
    names = tuple(record.take_field("nvml_names", list))
    sensor, geometry = record.take_field("sensor", str), record.take_field("mig", str, default=None)
    if sensor not in sensors:
        raise CatalogueError(f"{record.path}.sensor: {sensor!r} is no sensor class; use one of {sorted(sensors)}")
    if geometry is not None and geometry not in geometries:
        raise CatalogueError(f"{record.path}.mig: {geometry!r} is no part of mig.json; use one of {sorted(geometries)}")
    if not names:
        raise CatalogueError(f"{record.path}.nvml_names: is empty; give the name that NVML prints")
    product = Product(
        key=record.take_field("key", str),
        nvml_names=names,
        model=record.take_field("model", str, default=model_name(names[0])),
        architecture=record.take_field("architecture", str),
        compute_capability=record.take_field("compute_capability", str),
        form_factor=record.take_field("form_factor", str),
        memory_bytes=int(memory_mib) * MIB,
        sensor=sensors[sensor],
        mig=None if geometry is None else geometries[geometry],
        kinds=MappingProxyType(sources),
        aliases=tuple(record.take_field("aliases", list, default=())),
        note=record.take_field("note", str, default=""),
        **numbers,
    )
    record.finish()
    _check_order(record.path, product)
    return product


# What a product measures, and whether it may be unknown.
_MEASURED = {
    "memory_mib": False,
    "idle_w": False,
    "busy_w": False,
    "power_default_w": False,
    "power_min_w": True,
    "power_max_w": True,
    "idle_mig_w": True,
    "sm_clock_min_mhz": False,
    "sm_clock_max_mhz": False,
    "sm_clock_step_mhz": True,
    "memory_clock_mhz": False,
    "memory_clock_idle_mhz": True,
    "memory_bandwidth_gb_s": True,
    "sm_count": True,
}


def _check_order(path: str, product: Product) -> None:
    """Quantities that must rise in this order; unknown ones are passed over."""
    for names in (
        ("idle_w", "busy_w"),
        ("idle_mig_w", "busy_w"),
        ("power_min_w", "power_default_w", "power_max_w"),
        ("sm_clock_min_mhz", "sm_clock_max_mhz"),
        ("memory_clock_idle_mhz", "memory_clock_mhz"),
    ):
        values = [value for name in names if (value := getattr(product, name)) is not None]
        if values != sorted(values):
            raise CatalogueError(f"{path}: {' <= '.join(names)} does not hold; correct the numbers")


def _geometry(fields: Mapping[str, Any], shapes: Mapping[str, Any], kinds: set[str]) -> MigGeometry:
    record = _Record(f"mig.{fields.get('key', '?')}", fields)
    shape_name = record.take_field("shape", str)
    if shape_name not in shapes:
        raise CatalogueError(f"{record.path}.shape: {shape_name!r} is no shape; use one of {sorted(shapes)}")
    shape = _Record(f"mig.shapes.{shape_name}", shapes[shape_name])
    slices, forms = shape.take_field("memory_slices", int), shape.take_field("profiles", dict)
    profiles = record.take_field("profiles", dict)
    if profiles.keys() != forms.keys():
        raise CatalogueError(f"{record.path}.profiles: are {sorted(profiles)}; the shape has {sorted(forms)}")
    per_slice = record.take_field("sm_per_slice", int, default=None)
    record.take_field("memory_mib", int, default=None)
    geometry = MigGeometry(
        key=record.take_field("key", str),
        nvml_names=tuple(record.take_field("nvml_names", list)),
        architecture=record.take_field("architecture", str),
        memory_slices=slices,
        compute_slices=shape.take_field("compute_slices", int),
        most=shape.take_field("most", int),
        reset_to_change_mode=record.take_field("reset_to_change_mode", bool),
        mode_survives_reboot=record.take_field("mode_survives_reboot", bool),
        sm_total=record.take_field("sm_total", int, default=None),
        driver_least=record.take_field("driver_least", str, default=None),
        profiles=MappingProxyType(
            {
                key: _gi_profile(record.path, {"key": key, **forms[key]}, profiles[key], per_slice, kinds)
                for key in forms
            }
        ),
        note=record.take_field("note", str, default=""),
    )
    record.finish()
    shape.finish()
    _check_geometry(record.path, geometry)
    return geometry


def _gi_profile(
    path: str, form: Mapping[str, Any], part: Mapping[str, Any], per_slice: int | None, kinds: set[str]
) -> GiProfile:
    path = f"{path}.{form['key']}"
    shape, record = _Record(path, form), _Record(path, part)
    memory, memory_kind = record.measured("memory_mib", kinds, optional=True)
    sm_count, sm_kind = record.measured("sm", kinds, optional=True)
    compute = shape.take_field("compute_slices", int)
    inner = []
    for fields in shape.take_field("compute_instances", list):
        ci = _Record(f"{path}.compute_instances", fields)
        taken = ci.take_field("slices", int)
        # A compute instance over the whole GPU instance has all its SMs, which may exceed the slices' sum.
        share = None if per_slice is None else per_slice * taken
        inner.append(
            CiProfile(
                id=ci.take_field("id", int),
                compute_slices=taken,
                starts=tuple(ci.take_field("starts", list)),
                most=ci.take_field("most", int),
                sm_count=sm_count if taken == compute else share,
            )
        )
        ci.finish()
    engines = record.take_field("engines", list, default=None)
    profile = GiProfile(
        key=shape.take_field("key", str),
        id=shape.take_field("id", int),
        enum=shape.take_field("enum", int),
        name=record.take_field("name", str),
        compute_slices=compute,
        size=shape.take_field("size", int),
        starts=tuple(shape.take_field("starts", list)),
        most=shape.take_field("most", int),
        media=shape.take_field("media", bool, default=False),
        graphics=shape.take_field("graphics", bool, default=False),
        memory_bytes=None if memory is None else int(memory) * MIB,
        sm_count=sm_count,
        engines=None if engines is None else (engines[0], engines[1], engines[2], engines[3], engines[4]),
        compute_instances=tuple(inner),
        kinds=MappingProxyType({n: k for n, k in (("memory_bytes", memory_kind), ("sm_count", sm_kind)) if k}),
    )
    shape.finish()
    record.finish()
    return profile


def _check_geometry(path: str, geometry: MigGeometry) -> None:
    profiles = geometry.profiles.values()
    for attribute in ("id", "enum", "name"):
        if len({getattr(profile, attribute) for profile in profiles}) < len(profiles):
            raise CatalogueError(f"{path}.profiles: two share one {attribute}; each has its own")
    for profile in profiles:
        whole = [ci for ci in profile.compute_instances if ci.compute_slices == profile.compute_slices]
        if len(whole) != 1:
            raise CatalogueError(f"{path}.{profile.key}: needs one compute instance over all its slices")
        if geometry.memory_slices % profile.size or profile.size & (profile.size - 1):
            raise CatalogueError(f"{path}.{profile.key}: size {profile.size} does not halve the part evenly")
        for start in profile.starts:
            if start % profile.size or start + profile.size > geometry.memory_slices:
                raise CatalogueError(f"{path}.{profile.key}: start {start} is off the part or not aligned to its size")
