"""Traits of parts and driver branches beyond the catalogue: sensors, links, MIG profiles, PCI device ids.

From nvidia-smi captures, NVML's notes on minimum architectures and NVIDIA's list of supported products.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from eelgrid_protos.catalogue.products import MigGeometry, Product

# PCI device ids by catalogue key; the vendor is always NVIDIA, 0x10DE.
PCI_DEVICE_IDS: Mapping[str, int] = {
    "t4": 0x1EB8,
    "p100-pcie-16gb": 0x15F8,
    "a10": 0x2236,
    "a10g": 0x2237,
    "a30": 0x20B7,
    "a40": 0x2235,
    "a100-sxm4-40gb": 0x20B0,
    "a100-pcie-40gb": 0x20F1,
    "a100-sxm4-80gb": 0x20B2,
    "a100-pcie-80gb": 0x20B5,
    "l4": 0x27B8,
    "l40": 0x26B5,
    "l40s": 0x26B9,
    "h100-pcie-80gb": 0x2331,
    "h100-sxm5-80gb": 0x2330,
    "h100-nvl-94gb": 0x2321,
    "h200-sxm-141gb": 0x2335,
    "h200-nvl-141gb": 0x233B,
    "gh200-96gb": 0x2342,
    "gh200-144gb": 0x2348,
    "b200": 0x2901,
    "b300": 0x3182,
    "gb200": 0x2941,
    "gb300": 0x31C2,
    "rtx-pro-6000-blackwell-max-q": 0x2BB4,
    "rtx-pro-6000-blackwell-server": 0x2BB5,
}


# First branch, and one past the last number of a GPU instance profile.
_ENDS = ((0, 6), (470, 8), (525, 10), (570, 13), (575, 17), (615, 18))
# Drivers print names from here on; before, whoever shows one has it from elsewhere.
_NAMED_SINCE = 510
# Part: the branch that brought today's names, and those before it.
_RENAMED: Mapping[str, tuple[int, Mapping[str, str]]] = {
    "gb200-186gb": (
        580,
        {"1g": "1g.24gb", "1g+me": "1g.24gb+me", "3g": "3g.95gb", "4g": "4g.95gb", "7g": "7g.189gb"},
    ),
}


def get_profile_id_end(branch: int) -> int:
    """One past the highest number that a driver of this branch takes for a GPU instance profile."""
    return _ENDS[bisect_right(_ENDS, branch, key=lambda row: row[0]) - 1][1]


def adapt_geometry(geometry: MigGeometry, branch: int) -> MigGeometry:
    """A part's geometry as a driver of this branch has it; the very same where it lacks and renames nothing."""
    end = get_profile_id_end(branch)
    until, before = _RENAMED.get(geometry.key, (0, {}))
    names = before if _NAMED_SINCE <= branch < until else {}
    profiles = {
        key: replace(profile, name=names[key]) if key in names else profile
        for key, profile in geometry.profiles.items()
        if profile.enum < end
    }
    return geometry if profiles == geometry.profiles else replace(geometry, profiles=profiles)


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
class PartTraits:
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

    def is_switched(self, devices: int) -> bool:
        """Whether so many of these hang on NVLink switches."""
        return self.links > 0 and devices >= _LARGE_FROM and not self.is_meshed(devices)

    def is_meshed(self, devices: int) -> bool:
        """Whether so many of these form a cube mesh."""
        return self.mesh and _LARGE_FROM <= devices <= _MESHED_MOST


def get_part_traits(product: Product) -> PartTraits:
    """The traits of a product."""
    rank = _ORDER.index(product.architecture) if product.architecture in _ORDER else 0
    family = product.key.partition("-")[0]
    stacked = (product.memory_bandwidth_gb_s or 0.0) >= 880.0
    blackwell, hopper = product.architecture == "blackwell", product.architecture == "hopper"
    links = _LINKS.get(product.form_factor, 0)
    return PartTraits(
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
