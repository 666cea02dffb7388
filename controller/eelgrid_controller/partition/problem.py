"""Input of the partition planner (services, jobs, GPU pools, objective), and the planner's errors.

Validates each value on its own. Does not know how a plan is found.

PartitionError               no plan; the message says what to do
├── InvalidProblem           a field with an impossible value; the caller must correct it
├── UnservableService        no measured point serves the service, however many GPUs there are
├── FleetTooSmall            the pools have too few GPUs
└── SearchExhausted          the search hit its limit before it had any plan
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.catalogue.products import MigGeometry, Product


class PartitionError(ControllerError):
    """There is no plan."""


class InvalidProblem(PartitionError):
    """A field that cannot be meant."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


class UnservableService(PartitionError):
    """No point serves this service; `tightest_s` is the least latency that was measured, None if none was."""

    def __init__(self, service: str, tightest_s: float | None, problem: str, remedy: str) -> None:
        self.service = service
        self.tightest_s = tightest_s
        super().__init__(f"service {service}: {problem}", remedy)


class FleetTooSmall(PartitionError):
    """The pools lack GPUs; `missing` says how many of which model would do, by model."""

    def __init__(self, missing: dict[str, int], remedy: str) -> None:
        self.missing = missing
        listed = ", ".join(f"{count} {model}" for model, count in missing.items())
        super().__init__(f"the pools lack {listed}", remedy)


class SearchExhausted(PartitionError):
    """The search was cut before it had any plan."""


DEMANDS_MOST = 100_000  # services and jobs of one plan
GPUS_MOST = 1_000_000  # of one pool
_ROUNDING = 1e-9


class PartitionObjective(StrEnum):
    """What is to be least. Then, at that, compute slices in use; with watts, the price of the GPUs."""

    GPUS = "gpus"
    WATTS = "watts"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceDemand:
    """An inference service. A configuration is admissible if its latency is below `safety` times the objective."""

    name: str
    workload: str  # whose points count
    rate_hz: float  # 0 for none
    latency_s: float  # the objective
    quantile: float = 0.5  # of which latency
    safety: float = 1.0  # in (0, 1]

    def __post_init__(self) -> None:
        """Raises BadProblem."""
        _positive(f"services[{self.name}].latency_s", self.latency_s)
        if not 0.0 <= self.rate_hz < math.inf:
            raise InvalidProblem(
                f"services[{self.name}].rate_hz", f"is {self.rate_hz}", "give 0 or more requests a second"
            )
        if not 0.0 < self.safety <= 1.0:
            raise InvalidProblem(
                f"services[{self.name}].safety", f"is {self.safety}", "give a share above 0, 1 at most"
            )

    @property
    def limit_s(self) -> float:
        """What a measured latency must stay below; equal but for rounding is not below."""
        return self.safety * self.latency_s * (1.0 - _ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDemand:
    """A training job on whole GPUs of one model; no model named means any. `power_w`: by model, of all its GPUs."""

    name: str
    gpus: int = 1
    models: tuple[str, ...] = ()
    power_w: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises BadProblem."""
        _check_count(f"jobs[{self.name}].gpus", self.gpus, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPool:
    """The GPUs of one model."""

    model: str  # as points spell it
    count: int | None = None  # None for as many as are needed
    geometry: MigGeometry | None = None  # None where it has no MIG
    cost: float = 1.0  # of one GPU, where prices differ
    held_w: float | None = None  # that a GPU in use draws beyond its replicas' watts and one not in use does not

    def __post_init__(self) -> None:
        """Raises BadProblem."""
        _positive(f"pools[{self.model}].cost", self.cost)
        _check_count(f"pools[{self.model}].count", self.count or 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """All that one plan is made from.

    Watts: a point of a whole GPU tells those of its GPUs, idle ones included; a point of a slice those that the slice
    adds, since no driver tells a slice's share of the idle ones.
    """

    services: tuple[InferenceDemand, ...]
    points: tuple[Point, ...]
    pools: tuple[PartitionPool, ...]
    jobs: tuple[TrainingDemand, ...] = ()
    objective: PartitionObjective = PartitionObjective.GPUS

    def __post_init__(self) -> None:
        """Raises BadProblem."""
        for name, items in (("services", self.services), ("jobs", self.jobs)):
            if len({item.name for item in items}) < len(items):
                raise InvalidProblem(name, "two have one name", "give each its own")
        if len({pool.model for pool in self.pools}) < len(self.pools):
            raise InvalidProblem("pools", "two have one model", "add their counts")
        if len(self.services) + len(self.jobs) > DEMANDS_MOST:
            raise InvalidProblem("services", f"with jobs over {DEMANDS_MOST}", "plan parts of the fleet apart")
        for pool in self.pools:
            if self.objective == PartitionObjective.WATTS and pool.held_w is None:
                raise InvalidProblem(f"pools[{pool.model}].held_w", "is unknown", "give it, or plan for least GPUs")


def pool_of_product(product: Product, count: int | None = None, *, cost: float = 1.0) -> PartitionPool:
    """The pool of a product of the catalogue; a GPU that is not in use counts as off, so it saves its idle watts."""
    idle_w = product.idle_w if product.idle_mig_w is None else product.idle_mig_w
    return PartitionPool(model=product.model, count=count, geometry=product.mig, cost=cost, held_w=idle_w)


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise InvalidProblem(name, f"is {value}", "give a number above 0")


def _check_count(name: str, value: float, least: int) -> None:
    if not least <= value <= GPUS_MOST:
        raise InvalidProblem(name, f"is {value}", f"give {least} to {GPUS_MOST}")
