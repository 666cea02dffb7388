"""The running fleet as `eelctl frontier` wants it: points, services and GPUs, asked of the controller.

Owns what counts: services that run with a promise, GPUs that they or nobody hold. Must
not know what is computed.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from eelgrid_controller.cli.connection import fetch_whole, iterate_pages
from eelgrid_controller.cli.errors import RequestRefused
from eelgrid_controller.placement.gpu_power import PriorPowerModel
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.state.profile_points import make_profile_point
from eelgrid_controller.whatif.frontier.sweep import FrontierPool, FrontierService
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import (
    GpuStatus,
    LatencyMetric,
    ListGpusRequest,
    ListPointsRequest,
    ListPromisesRequest,
    ListWorkloadsRequest,
    NodeState,
    Workload,
    WorkloadPhase,
)


def _service(workload: Workload, arrived_hz: float | None, factor: float) -> FrontierService | None:
    promise = workload.spec.service
    if promise is None:
        return None
    is_tokens = promise.objectives[0].metric is not LatencyMetric.RESPONSE
    rate_hz = factor * (arrived_hz or promise.rate_hz) * (promise.output_tokens if is_tokens else 1.0)
    if rate_hz <= 0.0:
        return None
    return FrontierService(workload.workload_id, promise.profile, rate_hz, promise.objectives[0].quantile)


def _fleet(gpus: list[GpuStatus], services: set[str]) -> Mapping[str, FrontierPool]:
    """GPUs that are there and held by services or by nobody, by model."""
    power, counts, idle_w = PriorPowerModel(load_catalogue()), Counter[str](), dict[str, float]()
    for one in gpus:
        if one.node_state is NodeState.READY and not one.gpu.lost and set(one.workload_ids) <= services:
            counts[one.gpu.model] += 1
            idle_w[one.gpu.model] = power.gpu(one.gpu).idle_w
    return {model: FrontierPool(count, idle_w[model]) for model, count in counts.items()}


def read_running_fleet(
    client: Any, *, timeout_s: float, factor: float = 1.0
) -> tuple[tuple[Point, ...], tuple[FrontierService, ...], Mapping[str, FrontierPool]]:
    """Points, services at `factor` times their present rates, and the GPUs that are theirs or free; raises Refused."""
    told = iterate_pages(client.list_points, ListPointsRequest(), "points", timeout_s=timeout_s)
    points = tuple(map(make_profile_point, told))
    if not points:
        raise RequestRefused("the controller knows no point", "tell what was measured with eelctl profile import FILE")
    request = ListWorkloadsRequest(phases=(WorkloadPhase.PLACED,))
    workloads = list(iterate_pages(client.list_workloads, request, "workloads", timeout_s=timeout_s))
    known = fetch_whole(client.list_promises, ListPromisesRequest(), timeout_s=timeout_s)
    arrived_hz = {one.workload_id: one.arrived_hz for one in known.services}
    found = [_service(one, arrived_hz.get(one.workload_id), factor) for one in workloads]
    services = tuple(one for one in found if one is not None)
    if not services:
        raise RequestRefused(
            "no service runs with a promise and a rate",
            "submit one with objectives and rate_hz: docs/how-to/promises.md",
        )
    gpus = list(iterate_pages(client.list_gpus, ListGpusRequest(), "gpus", timeout_s=timeout_s))
    return points, services, _fleet(gpus, {one.name for one in services})
