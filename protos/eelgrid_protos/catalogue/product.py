"""One GPU product: its names, memory, watts and clocks, and how its power sensor looks at them.

`idle_w` and `busy_w` are the planner's prior of what a board draws with no
work and with full work; `busy_w` is the default limit unless a paper says
otherwise. What is not known is None, never a guess; a guess by analogy says so
in `kinds`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eelgrid_protos.catalogue.mig import MigGeometry

__all__ = ["PowerSensor", "Product", "SensorClass", "model_name", "plain_name"]

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
