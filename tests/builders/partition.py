"""Partition problems in a few numbers, and cores whose A100s are the partition planner's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.mig.plans import pool_of_product

from eelgrid_controller.core.core import Core
from eelgrid_controller.partition.problem import InferenceDemand, PartitionProblem
from eelgrid_controller.partition.recommendation import PartitionSearchResult, recommend_partitions
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.mig_layouts import find_mig_geometry, is_layout_complete
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos import catalogue
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import (
    ComputeInstance,
    EnforcementMode,
    Gpu,
    GpuInstance,
    GpuLayout,
    Inventory,
    LatencyMetric,
    LatencyObjective,
    MeasuredPoint,
    Policy,
    PoolMode,
    QuantileLatency,
    ResourceRequest,
    ServicePromise,
    SubmitWorkloadRequest,
    WorkloadKind,
    WorkloadSpec,
)
from tests.builders.cluster import build_catalogue_gpu
from tests.state_invariants import check_invariants

PRODUCTS = load_catalogue().products
A30, A100 = PRODUCTS["a30"], PRODUCTS["a100-sxm4-80gb"]
KEYS = {"a30": ("1g", "2g", "4g"), "a100-sxm4-80gb": ("1g", "2g", "3g", "4g", "7g")}
A100_40GB = catalogue.load_catalogue().products["a100-sxm4-40gb"]
GIB = 2**30
POOL = "mig"


def build_slice_point(workload, profile, throughput_hz, latency_s=0.01, product=A30, **how):
    """What a workload does in a slice of a part."""
    power_w = how.pop("power_w", None)
    configuration = Configuration(product.model, profile, **how)
    return Point(workload, configuration, float(throughput_hz), {0.5: latency_s}, power_w=power_w)


def build_demand(name, rate_hz, latency_s=0.02, **fields):
    """A service that the partition planner serves."""
    return InferenceDemand(
        name=name, workload=fields.pop("workload", name), rate_hz=float(rate_hz), latency_s=latency_s, **fields
    )


def build_problem(rates, throughputs, product=A30, **fields):
    """Services s0, s1 ... with a rate each and a throughput for each profile, in the order of KEYS; 0 for none."""
    points = [
        build_slice_point(f"s{number}", profile, hz, product=product)
        for number, row in enumerate(throughputs)
        for profile, hz in zip(KEYS[product.key], row, strict=True)
        if hz
    ]
    services = [build_demand(f"s{number}", rate) for number, rate in enumerate(rates)]
    pools = fields.pop("pools", (pool_of_product(product),))
    return PartitionProblem(services=tuple(services), points=tuple(points), pools=pools, **fields)


def build_mig_node(name: str, *, gpus: int = 2, pool: str = POOL, cpu: int = 64, **changes: Any) -> Inventory:
    """A node of A100s that can be cut."""
    devices = tuple(build_catalogue_gpu(A100_40GB.key, index, uuid=f"GPU-{name}-{index}") for index in range(gpus))
    fields = {"node_name": name, "cpu_milli": cpu * 1000, "memory_bytes": 256 * GIB, "gpus": devices, "pool": pool}
    return Inventory(**(fields | changes))


def build_slice_points(profile: str = "bert", *, scale: float = 1.0) -> list[MeasuredPoint]:
    """A request at a time: a slice of n sevenths answers 10 n a second and more, at 1/n of a tenth of a second."""
    return [
        MeasuredPoint(
            profile=profile,
            gpu_model=A100_40GB.model,
            mig_profile=name,
            throughput_hz=scale * 10.0 * size,
            latencies=(QuantileLatency(quantile=0.95, latency_s=0.1 / (scale * size)),),
        )
        for name, size in (("1g.5gb", 1), ("2g.10gb", 2), ("3g.20gb", 3), ("4g.20gb", 4), ("7g.40gb", 7))
    ]


def build_sliced_service(key: str, rate_hz: float, *, latency_s: float = 1.0, **changes: Any) -> SubmitWorkloadRequest:
    """A service with slices."""
    objective = LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=latency_s)
    promise = ServicePromise(
        profile="bert", objectives=(objective,), rate_hz=rate_hz, slices=True, start_s=0.0, replicas_most=100
    )
    wanted = ResourceRequest(cpu_milli=1000, memory_bytes=GIB, gpu_count=1, gpu_milli=1000)
    spec = WorkloadSpec(
        name=key, request=wanted, kind=WorkloadKind.INFERENCE_SERVICE, service=replace(promise, **changes)
    )
    return SubmitWorkloadRequest(spec=spec, workload_id=key)


def set_partition_policy(core: Core, *, partitioned: bool = True, now_ns: int = 2) -> None:
    """Gives the pool to the partition planner, or takes it back."""
    mode = PoolMode(pool=POOL, mode=EnforcementMode.ENFORCE, partitioned=partitioned)
    core.update_policy(replace(core.state.policy, pools=(mode,)), now_ns=now_ns)


def build_partitioned_core(*nodes: Inventory, partitioned: bool = True) -> Core:
    """A core with nodes and points."""
    core = Core(ClusterState(policy=Policy()), catalogue.load_catalogue())
    for one in nodes:
        core.register_node(one, now_ns=1)
    if partitioned:
        set_partition_policy(core)
    core.record_measurements(build_slice_points(), now_ns=3)
    return core


def apply_layout(gpu: Gpu, layout: GpuLayout) -> Gpu:
    """The GPU as its agent brings it to a layout."""
    geometry = find_mig_geometry(gpu)
    assert geometry is not None
    instances = []
    for number, one in enumerate(layout.instances):
        profile = geometry.profile(one.profile)
        assert profile is not None
        device = ComputeInstance(id=0, uuid=f"MIG-{gpu.uuid}-{one.profile}-{one.start}", size=profile.compute_slices)
        instances.append(
            GpuInstance(
                id=number,
                profile_id=profile.id,
                profile=one.profile,
                start=one.start,
                size=profile.size,
                compute_instances=(device,),
            )
        )
    return replace(gpu, mig_enabled=layout.mig_enabled, gpu_instances=tuple(instances))


def build_planned_node(core: Core, record: NodeRecord, may: Callable[[str], bool] = lambda _: True) -> Inventory:
    """What the node sends once its agent did what the plan says."""
    layouts = {layout.gpu_uuid: layout for layout in core.node_plan(record.inventory.node_name).gpu_layouts}
    gpus = tuple(
        apply_layout(gpu, layouts[gpu.uuid]) if gpu.uuid in layouts and may(gpu.uuid) else gpu
        for gpu in record.inventory.gpus
    )
    return replace(record.inventory, gpus=gpus)


def apply_plans(core: Core, *, now_ns: int) -> None:
    """Every agent brings its GPUs to what its plan says."""
    for record in list(core.state.nodes.values()):
        if record.is_ready:
            core.register_node(build_planned_node(core, record), now_ns=now_ns)


def search_partitions(core: Core) -> PartitionSearchResult:
    """The best change now."""
    return recommend_partitions(core.survey_partitions())


def carry_out_partitions(core: Core, *, now_ns: int = 10) -> PartitionSearchResult:
    """All stages of the best change, each when the one before stands."""
    change = search_partitions(core)
    for stage in change.stages:
        core.apply_partitions(stage, now_ns=now_ns)
        check_invariants(core.state)
        apply_plans(core, now_ns=now_ns)
        for record in core.state.nodes.values():
            for gpu in record.inventory.gpus:
                assert (
                    gpu.uuid not in record.layouts
                    or not record.is_ready
                    or is_layout_complete(gpu, record.layouts[gpu.uuid])
                )
    return change


def list_seats(core: Core, key: str) -> list[tuple[str, str, int]]:
    """GPU, profile and start of each replica, in order of place."""
    held = [(one.gpu_uuids[0], one.gpu_instance) for one in core.workload(key).placements]
    return sorted((uuid, where.profile, where.start) for uuid, where in held if where is not None)
