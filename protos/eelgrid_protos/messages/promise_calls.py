"""Messages of service-level objectives: scaling, measured points, progress and status."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.policy import PowerBudget
from eelgrid_protos.messages.workload import Workload
from eelgrid_protos.quantities import (
    Bytes,
    ClusterWatts,
    Count,
    Identifier,
    Label,
    Many,
    Megahertz,
    PageToken,
    Range,
    RequiredLabel,
    Seconds,
    Sentence,
    Uint32,
    Watts,
)

POINTS_A_CALL_MOST = 1000

Whole = Annotated[int, Range(1, 100_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileLatency:
    """One quantile of a measured latency."""

    quantile: Annotated[float, Range(0.0, 1.0)]
    latency_s: Annotated[float, Range(0.0, 1e6, "s")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """One workload in one configuration; None for quantities that were not measured."""

    profile: RequiredLabel
    gpu_model: RequiredLabel
    throughput_hz: Annotated[float, Range(0.0, 1e12, "Hz")]
    mig_profile: Label = ""
    gpus: Whole = 1
    batch: Whole = 1
    processes: Whole = 1
    power_limit_w: Watts | None = None
    clock_mhz: Megahertz | None = None
    label: Label = ""
    latencies: Annotated[tuple[QuantileLatency, ...], Many(16)] = ()
    power_w: Watts | None = None
    memory_bytes: Bytes | None = None
    source: Label = ""

    def violations(self) -> Iterator[Violation]:
        """Checks that latencies rise with their quantile."""
        if self.throughput_hz <= 0.0:
            yield Violation("throughput_hz", "is 0", "leave out points that did not run")
        ordered = sorted(self.latencies, key=lambda one: one.quantile)
        pairs = list(itertools.pairwise(ordered))
        if any(low.quantile == high.quantile for low, high in pairs):
            yield Violation("latencies", "name one quantile twice", "give each quantile once")
        if any(low.latency_s > high.latency_s for low, high in pairs):
            yield Violation("latencies", "fall with the quantile", "a higher quantile is no lower latency")


RateHz = Annotated[float, Range(0.0, 1e12, "Hz")]
Share = Annotated[float, Range(-1e6, 1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWorkloadRequest:
    """Scales a workload to `replicas`, or as close as capacity allows."""

    workload_id: Identifier
    replicas: Annotated[int, Range(1, 10_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWorkloadResponse:
    """The workload after scaling."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPointsRequest:
    """Points to store; a later point of the same configuration replaces the earlier one."""

    points: Annotated[tuple[MeasuredPoint, ...], Many(POINTS_A_CALL_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPointsResponse:
    """How many points are new or changed."""

    recorded: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPointsRequest:
    """Asks for a page of points by profile and configuration; an empty profile means all."""

    profile: Label = ""
    page_size: Uint32 = 0
    page_token: PageToken = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPointsResponse:
    """A page of points."""

    points: Annotated[tuple[MeasuredPoint, ...], Many(POINTS_A_CALL_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportProgressRequest:
    """Units of work done since the job started."""

    workload_id: Identifier
    work_done: Annotated[float, Range(0.0, 1e18)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportProgressResponse:
    """The progress was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPromisesRequest:
    """Asks for a page of services by id, then of jobs by id, then of budgets; a page size of 0 means as many as fit."""

    page_size: Uint32 = 0
    page_token: PageToken = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """How a service meets its latency objectives."""

    workload_id: Identifier
    name: Label
    replicas_serving: Count = 0
    replicas_wanted: Count = 0
    phase: Label = ""
    arrived_hz: RateHz | None = None
    objective_s: Seconds = 0.0
    live_s: Seconds | None = None
    modelled_s: Seconds | None = None
    slowness: Annotated[float, Range(0.0, 1e6)] = 1.0
    slowness_error: Annotated[float, Range(0.0, 1e6)] = 0.0
    reason: Sentence = ""
    is_advice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """How a job meets its speed objective."""

    workload_id: Identifier
    name: Label
    phase: Label = ""
    power_limit_w: Watts | None = None
    slowdown: Share | None = None
    saving: Share | None = None
    reason: Sentence = ""
    is_advice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStatus:
    """A power budget and the claims on it."""

    budget: PowerBudget
    claimed_w: ClusterWatts = 0.0
    shortfall_w: ClusterWatts = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPromisesResponse:
    """Whether services and jobs meet their objectives, and the claims on budgets."""

    services: Annotated[tuple[ServiceStatus, ...], Many(100_000)] = ()
    jobs: Annotated[tuple[JobStatus, ...], Many(100_000)] = ()
    budgets: Annotated[tuple[BudgetStatus, ...], Many(100_000)] = ()
    price_ratio: Annotated[float, Range(0.0, 1e9)] = 1.0
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagineBudgetsRequest:
    """Budgets to try in place of those in force."""

    budgets: Annotated[tuple[PowerBudget, ...], Many(100_000)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagineBudgetsResponse:
    """What jobs would get under the budgets."""

    jobs: Annotated[tuple[JobStatus, ...], Many(100_000)] = ()
    budgets: Annotated[tuple[BudgetStatus, ...], Many(100_000)] = ()
