"""The specification of simulated nodes, the fleet file (JSON or TOML) that describes them, and traits of real parts.

    {"nodes": [{"name": "node-{index}", "count": 3, "cpu_milli": 96000, "memory_bytes": 412316860416,
                "pool": "a", "labels": {"owner": "x"}, "topology": "zone-a/spine-2/rack-7", "driver_version": "580.95.05",
                "hurry": 60,
                "gpus": [{"product": "openb-g2", "model": "G2", "count": 8},
                         {"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g.5gb@0"], "sensor_gain": 0.954}]}]}

"{index}" in a name stands for 0 to count - 1. `mig` lists profile@start and turns MIG on even when it is empty. A power
sensor reads `sensor_gain` times the true power plus `sensor_offset_w`. `topology` is the position of a node, outermost
part first. `hurry` shortens the agent's own waits by that factor (how long an anomaly must last, how long a quarantine
lasts and within which time losses and repairs count), for rehearsals of faults; 1 is real time.

Traits beyond the catalogue (sensors, links, MIG profiles, PCI device ids, by part and driver branch) come from
nvidia-smi captures, NVML's notes on minimum architectures and NVIDIA's list of supported products.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from eelgrid_agent.simulation.mig import arrange_compute_instances
from eelgrid_agent.simulation.power_curve import DEFAULT_MEMORY_BOUND_SHARE
from eelgrid_protos.catalogue import GpuNameError, resolve_product
from eelgrid_protos.catalogue.loader import Catalogue, load_catalogue
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry, Product
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, MODEL_DATA_MOST, TOPOLOGY_PARTS_MOST
from eelgrid_protos.quantities import Name, RequiredLabel

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
    "gb200-186gb": (580, {"1g": "1g.24gb", "1g+me": "1g.24gb+me", "3g": "3g.95gb", "4g": "4g.95gb", "7g": "7g.189gb"})
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
_LABEL_MOST = get_args(RequiredLabel)[1].longest
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


_DRIVER_VERSION = "580.95.05"


class SpecError(ValueError):
    """The description is not of a possible machine; `field` is the place in it, the message says what to do."""

    def __init__(self, path: str, problem: str) -> None:
        self.field = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """What runs on a device: the share of time that it computes, and the memory that it holds.

    `memory_bound_ratio` is the share of that time which waits for memory, and so does not slow with the SM clock.
    """

    utilization_ratio: float = 0.0
    memory_bytes: int = 0
    memory_bound_ratio: float = DEFAULT_MEMORY_BOUND_SHARE

    def __post_init__(self) -> None:
        if not 0.0 <= self.utilization_ratio <= 1.0:
            raise SpecError("utilization_ratio", f"{self.utilization_ratio} is not in [0, 1]")
        if self.memory_bytes < 0:
            raise SpecError("memory_bytes", f"{self.memory_bytes} is negative")
        if not 0.0 <= self.memory_bound_ratio <= 1.0:
            raise SpecError("memory_bound_ratio", f"{self.memory_bound_ratio} is not in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSlice:
    """One GPU instance and the compute slices of each of its compute instances; None is one over all of it."""

    profile: str
    start: int
    compute_slices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One device: its catalogue key, the name that workloads ask for, its MIG layout (None: MIG is off).

    The power sensor reads `sensor_gain` times the truth plus `sensor_offset_w`;
    real ones are off by up to 5 %.
    """

    product: str
    model: str = ""
    mig: tuple[MigSlice, ...] | None = None
    sensor_gain: float = 1.0
    sensor_offset_w: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node."""

    node_name: str
    cpu_milli: int
    memory_bytes: int
    pool: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[GpuSpec, ...] = ()
    driver_version: str = _DRIVER_VERSION
    # Outermost first.
    topology: tuple[str, ...] = ()
    model_data: tuple[str, ...] = ()
    # How many times shorter the agent's own waits are (anomalies, quarantine, repairs), so that faults can be rehearsed.
    hurry: float = 1.0

    @property
    def driver_branch(self) -> int:
        """The driver's release branch, which decides what it answers."""
        return int(self.driver_version.split(".", maxsplit=1)[0])

    def check(self, catalogue: Catalogue) -> None:
        """Every rule that needs no file and no clock; raises SpecError."""
        _check_name("name", self.node_name)
        if len(self.topology) > TOPOLOGY_PARTS_MOST:
            raise SpecError("topology", f"has {len(self.topology)} parts; give {TOPOLOGY_PARTS_MOST} at most")
        for part in self.topology:
            _check_name("topology", part)
        if len(self.model_data) > MODEL_DATA_MOST:
            raise SpecError("model_data", f"names {len(self.model_data)}; give {MODEL_DATA_MOST} at most")
        for name in self.model_data:
            if not isinstance(name, str) or not 0 < len(name) <= _LABEL_MOST or not name.isprintable():
                raise SpecError("model_data", f"has {name!r}; write 1 to {_LABEL_MOST} printable characters")
        if len(self.gpus) > GPUS_PER_NODE_MOST:
            raise SpecError("gpus", f"{len(self.gpus)} devices; a node has {GPUS_PER_NODE_MOST} at most")
        if not self.driver_version.split(".", maxsplit=1)[0].isdigit():
            raise SpecError("driver_version", f"{self.driver_version!r} does not start with a number such as 580")
        for number, gpu in enumerate(self.gpus):
            try:
                if gpu.model:
                    _check_name("model", gpu.model)
                resolve_mig_layout(gpu, find_product(gpu, catalogue))
            except SpecError as error:
                raise SpecError(f"gpus[{number}].{error.field}", error.problem) from None


def _check_name(path: str, name: str) -> None:
    """The contract's rule of names, told before a message breaks it."""
    rule = get_args(Name)[1]
    if len(name) > rule.longest or not rule.pattern.fullmatch(name):
        raise SpecError(path, f"{name!r} is not a name: up to {rule.longest} {rule.shape}; choose another")


def find_product(gpu: GpuSpec, catalogue: Catalogue) -> Product:
    """The catalogue's product, by its key or any other name of it; raises SpecError."""
    known = catalogue.products.get(gpu.product)
    if known is not None:
        return known
    try:
        return resolve_product(gpu.product, "product", catalogue=catalogue)
    except GpuNameError as error:
        raise SpecError(error.field, f"{error.problem}; {error.remedy}") from None


def resolve_mig_layout(gpu: GpuSpec, product: Product) -> tuple[tuple[GiProfile, MigSlice], ...]:
    """The MIG layout with its profiles looked up and checked against the part's geometry; raises SpecError."""
    if gpu.mig is None:
        return ()
    if product.mig is None:
        raise SpecError("mig", f"{product.key} has no MIG; leave it out")
    layout = []
    for instance in gpu.mig:
        profile = product.mig.profile(instance.profile)
        if profile is None:
            names = sorted(known.name for known in product.mig.profiles.values())
            raise SpecError("mig", f"{product.key} has no profile {instance.profile!r}; use one of {names}")
        _check_compute(instance, profile)
        layout.append((profile, instance))
    _check_layout(product.mig, layout)
    return tuple(layout)


def _check_compute(instance: MigSlice, profile: GiProfile) -> None:
    parts = instance.compute_slices or ()
    sizes = {ci.compute_slices for ci in profile.compute_instances}
    if arrange_compute_instances(profile, parts) is None:
        raise SpecError("mig", f"compute instances {parts} do not fit in {profile.name}; its sizes are {sorted(sizes)}")


def _check_layout(geometry: MigGeometry, layout: list[tuple[GiProfile, MigSlice]]) -> None:
    conflict = geometry.conflict((profile, instance.start) for profile, instance in layout)
    if conflict is not None:
        raise SpecError("mig", conflict)


# A file is read whole, and a simulated node costs some 10 kB.
_BYTES_MOST = 16 * 1024 * 1024
_NODES_MOST = 20_000


class FleetFileError(ValueError):
    """The file is missing, unreadable or breaks a rule; the message names the file, the field and the remedy."""


def load_fleet(path: Path | str) -> tuple[NodeSpec, ...]:
    """The nodes of the file, in its order; raises FleetFileError."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MOST + 1)
    except OSError as error:
        raise FleetFileError(f"{path}: cannot be read ({error.strerror}); give a fleet file") from None
    if len(content) > _BYTES_MOST:
        raise FleetFileError(f"{path}: is larger than {_BYTES_MOST} bytes; use `count` for like nodes")
    try:
        text = content.decode("utf-8")
        document = _load_toml(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise FleetFileError(f"{path}: is not {kind} ({error}); correct it there") from None
    try:
        return tuple(_nodes(document, load_catalogue()))
    except SpecError as error:
        raise FleetFileError(f"{path}: {error.field}: {error.problem}") from None


def _load_toml(text: str) -> Any:
    import tomllib  # not of a fleet in JSON

    return tomllib.loads(text)


def _nodes(document: Any, catalogue: Catalogue) -> Iterator[NodeSpec]:
    top = _Fields("", document)
    rows = top.take_field("nodes", list)
    top.finish()
    names: set[str] = set()
    for number, row in enumerate(rows):
        for node in _like_nodes(f"nodes[{number}]", row, catalogue):
            if node.node_name in names:
                problem = f"{node.node_name!r} appears twice; put {{index}} in the name or choose another"
                raise SpecError(f"nodes[{number}].name", problem)
            names.add(node.node_name)
            if len(names) > _NODES_MOST:
                raise SpecError("nodes", f"are more than {_NODES_MOST}; split the fleet over several agents")
            yield node


def _like_nodes(path: str, row: Any, catalogue: Catalogue) -> Iterator[NodeSpec]:
    fields = _Fields(path, row)
    name, count = fields.take_field("name", str), fields.whole("count", 1, _NODES_MOST, default=1)
    gpus: list[GpuSpec] = []
    for number, gpu in enumerate(fields.take_field("gpus", list, default=[])):
        gpus += _like_gpus(f"{path}.gpus[{number}]", gpu)
    node = NodeSpec(
        node_name=name,
        cpu_milli=fields.whole("cpu_milli", 0, 10_000_000),
        memory_bytes=fields.whole("memory_bytes", 0, 2**50),
        pool=fields.take_field("pool", str, default=""),
        labels=fields.texts("labels"),
        gpus=tuple(gpus),
        driver_version=fields.take_field(
            "driver_version", str, default=NodeSpec.__dataclass_fields__["driver_version"].default
        ),
        hurry=fields.number("hurry", 1.0, 3600.0, default=1.0),
    )
    where = fields.take_field("topology", str, default="")
    data = fields.take_field("model_data", list, default=[])
    node = replace(node, topology=tuple(where.split("/")) if where else (), model_data=tuple(data))
    fields.finish()
    nodes = [replace(node, node_name=name.replace("{index}", str(index))) for index in range(count)]
    try:
        # They differ in their name alone, and the last has the longest.
        nodes[-1].check(catalogue)
    except SpecError as error:
        raise SpecError(f"{path}.{error.field}", error.problem) from None
    yield from nodes


def _like_gpus(path: str, row: Any) -> list[GpuSpec]:
    fields = _Fields(path, row)
    count = fields.whole("count", 1, GPUS_PER_NODE_MOST, default=1)
    layout = fields.take_field("mig", list, default=None)
    gpu = GpuSpec(
        product=fields.take_field("product", str),
        model=fields.take_field("model", str, default=""),
        mig=None if layout is None else tuple(_slice(f"{path}.mig[{n}]", item) for n, item in enumerate(layout)),
        sensor_gain=fields.number("sensor_gain", 0.5, 2.0, default=1.0),
        sensor_offset_w=fields.number("sensor_offset_w", -50.0, 50.0, default=0.0),
    )
    fields.finish()
    return [gpu] * count


def _slice(path: str, item: Any) -> MigSlice:
    profile, _, start = item.rpartition("@") if isinstance(item, str) else ("", "", "")
    if not profile or not (start.isascii() and start.isdigit()):
        raise SpecError(path, f"{item!r} is not profile@start; write for example 3g@4")
    return MigSlice(profile=profile, start=int(start))


class _Fields:
    """An object of the file, taken apart field by field; what is left over is an error."""

    def __init__(self, path: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise SpecError(path or "the file", f"is {_kind(value)}; write an object")
        self._path = path
        self._left = dict(value)

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take_field(self, name: str, kind: type, default: Any = ...) -> Any:
        value = self._left.pop(name, default)
        if value is ...:
            raise SpecError(self._name(name), "is missing; add it")
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
            raise SpecError(self._name(name), f"is {_kind(value)}; write {_KINDS[kind]}")
        return value

    def whole(self, name: str, low: int, high: int, default: Any = ...) -> int:
        value: int = self.take_field(name, int, default)
        if not low <= value <= high:
            raise SpecError(self._name(name), f"{value} is not in [{low}, {high}]; correct it")
        return value

    def number(self, name: str, low: float, high: float, *, default: float) -> float:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SpecError(self._name(name), f"is {_kind(value)}; write a number")
        if not low <= value <= high:
            raise SpecError(self._name(name), f"{value} is not in [{low:g}, {high:g}]; correct it")
        return float(value)

    def texts(self, name: str) -> Mapping[str, str]:
        value: dict[str, str] = self.take_field(name, dict, default={})
        if not all(isinstance(text, str) for text in value.values()):
            raise SpecError(self._name(name), "contains something other than text; put values in quotes")
        return value

    def finish(self) -> None:
        if self._left:
            raise SpecError(self._name(min(self._left)), "is not a field; correct the spelling or remove it")


_KINDS = {str: "text", int: "a whole number", list: "a list", dict: "an object", bool: "true or false"}


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")
