"""What to simulate: nodes, their devices, and the load on a device.

It owns the rules of a simulated machine; it knows nothing of files or of NVML.

SpecError                    there is no such machine: the one who described it is at fault
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from eelgrid_agent.simulation.curve import MEMORY_BOUND
from eelgrid_agent.simulation.mig import arrange_compute
from eelgrid_protos.catalogue import Catalogue, GiProfile, MigGeometry, Product
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, TOPOLOGY_PARTS_MOST
from eelgrid_protos.quantities import Name

__all__ = ["GpuLoad", "GpuSpec", "MigSlice", "NodeSpec", "SpecError", "layout_of", "product_of"]

_DRIVER_VERSION = "580.95.05"


class SpecError(ValueError):
    """There is no such machine; `field` says where in the description, the message what to do."""

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
    memory_bound_ratio: float = MEMORY_BOUND

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
        if len(self.gpus) > GPUS_PER_NODE_MOST:
            raise SpecError("gpus", f"{len(self.gpus)} devices; a node has {GPUS_PER_NODE_MOST} at most")
        if not self.driver_version.split(".", maxsplit=1)[0].isdigit():
            raise SpecError("driver_version", f"{self.driver_version!r} does not begin with a number such as 580")
        for number, gpu in enumerate(self.gpus):
            try:
                if gpu.model:
                    _check_name("model", gpu.model)
                layout_of(gpu, product_of(gpu, catalogue))
            except SpecError as error:
                raise SpecError(f"gpus[{number}].{error.field}", error.problem) from None


def _check_name(path: str, name: str) -> None:
    """The contract's rule of names, told before a message breaks it."""
    rule = get_args(Name)[1]
    if len(name) > rule.longest or not rule.pattern.fullmatch(name):
        raise SpecError(path, f"{name!r} is not a name: up to {rule.longest} {rule.shape}; choose another")


def product_of(gpu: GpuSpec, catalogue: Catalogue) -> Product:
    """The catalogue's product; raises SpecError."""
    product = catalogue.products.get(gpu.product)
    if product is None:
        raise SpecError("product", f"{gpu.product!r} is not in the catalogue; use one of {sorted(catalogue.products)}")
    return product


def layout_of(gpu: GpuSpec, product: Product) -> tuple[tuple[GiProfile, MigSlice], ...]:
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
    if arrange_compute(profile, parts) is None:
        raise SpecError("mig", f"compute instances {parts} do not fit in {profile.name}; its sizes are {sorted(sizes)}")


def _check_layout(geometry: MigGeometry, layout: list[tuple[GiProfile, MigSlice]]) -> None:
    conflict = geometry.conflict((profile, instance.start) for profile, instance in layout)
    if conflict is not None:
        raise SpecError("mig", conflict)
