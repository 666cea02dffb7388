"""GPU products: memory, power, clocks, power sensors and MIG geometry.

`idle_w` and `busy_w` are the planner's prior of what a board draws with no
work and with full work; `busy_w` is the default limit unless a paper says
otherwise. What is not known is None, never a guess; a guess by analogy says so
in `kinds`.

A part has memory slices in a row. A GPU instance lies on slices
[start, start + size), begins only where its profile may begin, and takes
compute slices out of fewer than there are memory slices (7 of 8 on the large
parts), so spans that do not overlap may still be too much together. The
driver's id of an instance is a function of its span alone: number the whole
part 0, its halves 1 and 2, its quarters 3 to 6, its eighths 7 to 14.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import field

from eelgrid_protos.quantities import MIB
from eelgrid_protos.values import dataclass


def gi_id(start: int, size: int, memory_slices: int) -> int:
    """The driver's id of the GPU instance on [start, start + size)."""
    return memory_slices // size - 1 + start // size


def gi_span(instance_id: int, memory_slices: int) -> tuple[int, int]:
    """Start and size of the GPU instance with this id: the inverse of gi_id."""
    parts = 1 << ((instance_id + 1).bit_length() - 1)
    size = memory_slices // parts
    return (instance_id + 1 - parts) * size, size


@dataclass(frozen=True, slots=True, kw_only=True)
class CiProfile:
    """A compute instance that a GPU instance can hold; sm_count is None where nobody has read it."""

    id: int
    compute_slices: int
    starts: tuple[int, ...]
    most: int
    sm_count: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GiProfile:
    """A GPU instance that a part can hold; `enum` is NVML's other numbering of profiles.

    `engines` counts copy, decode, encode, JPEG and optical-flow engines.
    """

    key: str
    id: int
    enum: int
    name: str
    compute_slices: int
    size: int
    starts: tuple[int, ...]
    most: int
    media: bool
    graphics: bool
    memory_bytes: int | None
    sm_count: int | None
    engines: tuple[int, int, int, int, int] | None
    compute_instances: tuple[CiProfile, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory_mib(self) -> int | None:
        """Memory as NVML counts it for instances."""
        return None if self.memory_bytes is None else self.memory_bytes // MIB

    @property
    def whole(self) -> CiProfile:
        """The compute instance that takes the whole GPU instance."""
        return next(ci for ci in self.compute_instances if ci.compute_slices == self.compute_slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigGeometry:
    """One part's MIG geometry; profiles by their key ("1g", "1g.2x", "3g", ...)."""

    key: str
    nvml_names: tuple[str, ...]
    architecture: str
    memory_slices: int
    compute_slices: int
    most: int
    reset_to_change_mode: bool
    mode_survives_reboot: bool
    sm_total: int | None
    driver_least: str | None
    profiles: Mapping[str, GiProfile]
    note: str = ""

    def profile(self, name: str) -> GiProfile | None:
        """The profile with this key, or with this printed name."""
        found = self.profiles.get(name)
        return found or next((profile for profile in self.profiles.values() if profile.name == name), None)

    def profile_by_id(self, profile_id: int) -> GiProfile | None:
        """The profile with NVML's profile id."""
        return next((profile for profile in self.profiles.values() if profile.id == profile_id), None)

    def gi_id(self, start: int, size: int) -> int:
        """The driver's id of the GPU instance on [start, start + size)."""
        return gi_id(start, size, self.memory_slices)

    def conflict(self, instances: Iterable[tuple[GiProfile, int]]) -> str | None:
        """Why these (profile, start) cannot stand together, or None if they can."""
        taken = [False] * self.memory_slices
        counts: dict[int, int] = {}
        compute = 0
        for profile, start in instances:
            if start not in profile.starts:
                return f"{profile.name} cannot start at {start}; it starts at {', '.join(map(str, profile.starts))}"
            span = slice(start, start + profile.size)
            if any(taken[span]):
                return f"{profile.name} at {start} overlaps another instance"
            taken[span] = [True] * profile.size
            compute += profile.compute_slices
            counts[profile.id] = counts.get(profile.id, 0) + 1
            if counts[profile.id] > profile.most:
                return f"{profile.name} can stand {profile.most} times at most"
        if compute > self.compute_slices:
            return f"{compute} compute slices are asked for and there are {self.compute_slices}"
        if sum(counts.values()) > self.most:
            return f"there can be {self.most} instances at most"
        return None


_BRANDS = ("NVIDIA ", "Tesla ", "GRID ")
_NAME_LONGEST = 253


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSensor:
    """A reading is the mean power over the last `window_ms`, renewed every `period_ms`."""

    period_ms: int
    window_ms: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorClass:
    """The sensors of like products: the instant field, the plain power call, and whether an averaged field answers."""

    instant: PowerSensor
    usage: PowerSensor
    averaged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One GPU product."""

    key: str
    nvml_names: tuple[str, ...]
    model: str
    architecture: str
    compute_capability: str
    form_factor: str
    memory_bytes: int
    idle_w: float
    busy_w: float
    power_default_w: float
    power_min_w: float | None
    power_max_w: float | None
    idle_mig_w: float | None
    sm_clock_min_mhz: int
    sm_clock_max_mhz: int
    sm_clock_step_mhz: float | None
    memory_clock_mhz: int
    memory_clock_idle_mhz: int | None
    memory_bandwidth_gb_s: float | None
    sm_count: int | None
    sensor: SensorClass
    mig: MigGeometry | None
    kinds: Mapping[str, str]
    note: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def has_energy_counter(self) -> bool:
        """Volta and newer count energy."""
        return self.architecture != "pascal"


def plain_name(nvml_name: str) -> str:
    """The product name without the brand, which drivers print or leave out."""
    for brand in _BRANDS:
        nvml_name = nvml_name.removeprefix(brand)
    return nvml_name


def model_name(nvml_name: str) -> str:
    """What workloads call a product: "NVIDIA H100 80GB HBM3" is H100-80GB-HBM3."""
    name = re.sub(r"[^A-Za-z0-9._/-]+", "-", plain_name(nvml_name))[:_NAME_LONGEST]
    return name.strip("._/-") or "unknown"
