"""What generations of parts have and lack beside their catalogue numbers: which sensors, links and counters answer.

From nvidia-smi captures and NVML's notes on minimum architectures, where the
catalogue has no row for it; "taken" marks what was not read anywhere.
"""

from dataclasses import dataclass

from eelgrid_protos.catalogue import Product

__all__ = ["Traits", "traits_of"]

_ORDER = ("pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell")
_PCIE_GENERATIONS = {"pascal": 3, "volta": 3, "turing": 3, "ampere": 4, "ada": 4, "hopper": 5, "blackwell": 5}
# NVLinks by form factor, and by generation where that is not enough.
_LINKS = {"sxm2": 6, "sxm4": 12, "sxm5": 18, "sxm6": 18, "superchip": 18}
_LINKS_PASCAL = 4
_LINK_BYTES_PER_S = 25_000_000_000
_LINK_BYTES_PER_S_BLACKWELL = 50_000_000_000
# Boards on which each device cannot be linked to every other; smaller ones are wired directly.
_LARGE_FROM = 5
_MESHED_MOST = 8
# Memory power: read on these alone.
_MEMORY_POWER = frozenset({"h100", "b200", "gb200"})
# Power of the module around them: of these alone.
_MODULE_POWER = frozenset({"gb200", "gb300"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a part answers."""

    row_remapping: bool
    memory_temperature: bool
    memory_power: bool
    module_power: bool
    gpm: bool
    fabric: bool
    pcie_generation: int
    sleeps: bool
    links: int
    # Made before there were switches.
    mesh: bool
    link_bytes_per_s: int
    # From Blackwell on, link errors are counted by other fields.
    new_link_errors: bool

    def switched(self, devices: int) -> bool:
        """Whether so many of these hang on NVLink switches."""
        return self.links > 0 and devices >= _LARGE_FROM and not self.meshed(devices)

    def meshed(self, devices: int) -> bool:
        """Whether so many of these form a cube mesh."""
        return self.mesh and _LARGE_FROM <= devices <= _MESHED_MOST


def traits_of(product: Product) -> Traits:
    """The traits of a product."""
    rank = _ORDER.index(product.architecture) if product.architecture in _ORDER else 0
    family = product.key.partition("-")[0]
    stacked = (product.memory_bandwidth_gb_s or 0.0) >= 880.0
    blackwell, hopper = product.architecture == "blackwell", product.architecture == "hopper"
    links = _LINKS.get(product.form_factor, 0)
    return Traits(
        row_remapping=rank >= _ORDER.index("ampere"),
        # Stacked memory has a sensor from Volta on; GDDR boards of data centres print N/A.
        memory_temperature=stacked and rank >= _ORDER.index("volta") and product.form_factor != "unknown",
        memory_power=family in _MEMORY_POWER,
        module_power=family in _MODULE_POWER,
        gpm=hopper or blackwell,
        fabric=(hopper or blackwell) and links > 0,
        pcie_generation=_PCIE_GENERATIONS.get(product.architecture, 3),
        sleeps=product.memory_clock_idle_mhz is not None,
        links=_LINKS_PASCAL if links and product.architecture == "pascal" else links,
        mesh=product.form_factor == "sxm2",
        link_bytes_per_s=_LINK_BYTES_PER_S_BLACKWELL if blackwell else _LINK_BYTES_PER_S,
        new_link_errors=blackwell,
    )
