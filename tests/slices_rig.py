"""A cluster whose A100s are the partition planner's, services with slices, and agents that do what plans say."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from eelgrid_controller.core.core import Core
from eelgrid_controller.partition.recommendation import PartitionSearchResult, recommend_partitions
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.mig_layouts import find_mig_geometry, is_layout_complete
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos import catalogue
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
from tests.state_invariants import check_invariants

A100 = catalogue.load_catalogue().products["a100-sxm4-40gb"]
GIB = 2**30
POOL = "mig"


def node(name: str, *, gpus: int = 2, pool: str = POOL, cpu: int = 64, **changes: Any) -> Inventory:
    """A node of A100s that can be cut."""
    devices = tuple(
        Gpu(
            uuid=f"GPU-{name}-{index}",
            index=index,
            product=A100.nvml_names[0],
            model=A100.model,
            catalogue_key=A100.key,
            memory_bytes=A100.memory_bytes,
            mig_capable=True,
        )
        for index in range(gpus)
    )
    fields = {"node_name": name, "cpu_milli": cpu * 1000, "memory_bytes": 256 * GIB, "gpus": devices, "pool": pool}
    return Inventory(**(fields | changes))


def points(profile: str = "bert", *, scale: float = 1.0) -> list[MeasuredPoint]:
    """A request at a time: a slice of n sevenths answers 10 n a second and more, at 1/n of a tenth of a second."""
    return [
        MeasuredPoint(
            profile=profile,
            gpu_model=A100.model,
            mig_profile=name,
            throughput_hz=scale * 10.0 * size,
            latencies=(QuantileLatency(quantile=0.95, latency_s=0.1 / (scale * size)),),
        )
        for name, size in (("1g.5gb", 1), ("2g.10gb", 2), ("3g.20gb", 3), ("4g.20gb", 4), ("7g.40gb", 7))
    ]


def service(key: str, rate_hz: float, *, latency_s: float = 1.0, **changes: Any) -> SubmitWorkloadRequest:
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


def policy(core: Core, *, partitioned: bool = True, now_ns: int = 2) -> None:
    """Gives the pool to the partition planner, or takes it back."""
    mode = PoolMode(pool=POOL, mode=EnforcementMode.ENFORCE, partitioned=partitioned)
    core.update_policy(replace(core.state.policy, pools=(mode,)), now_ns=now_ns)


def core_with(*nodes: Inventory, partitioned: bool = True) -> Core:
    """A core with nodes and points."""
    core = Core(ClusterState(policy=Policy()), catalogue.load_catalogue())
    for one in nodes:
        core.register_node(one, now_ns=1)
    if partitioned:
        policy(core)
    core.record_points(points(), now_ns=3)
    return core


def laid_out(gpu: Gpu, layout: GpuLayout) -> Gpu:
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


def as_planned(core: Core, record: NodeRecord, may: Callable[[str], bool] = lambda _: True) -> Inventory:
    """What the node sends once its agent did what the plan says."""
    layouts = {layout.gpu_uuid: layout for layout in core.node_plan(record.inventory.node_name).gpu_layouts}
    gpus = tuple(
        laid_out(gpu, layouts[gpu.uuid]) if gpu.uuid in layouts and may(gpu.uuid) else gpu
        for gpu in record.inventory.gpus
    )
    return replace(record.inventory, gpus=gpus)


def agents_act(core: Core, *, now_ns: int) -> None:
    """Every agent brings its GPUs to what its plan says."""
    for record in list(core.state.nodes.values()):
        if record.is_ready:
            core.register_node(as_planned(core, record), now_ns=now_ns)


def found(core: Core) -> PartitionSearchResult:
    """The best change now."""
    return recommend_partitions(core.survey_partitions())


def carried_out(core: Core, *, now_ns: int = 10) -> PartitionSearchResult:
    """All stages of the best change, each when the one before stands."""
    change = found(core)
    for stage in change.stages:
        core.apply_partitions(stage, now_ns=now_ns)
        check_invariants(core.state)
        agents_act(core, now_ns=now_ns)
        for record in core.state.nodes.values():
            for gpu in record.inventory.gpus:
                assert (
                    gpu.uuid not in record.layouts
                    or not record.is_ready
                    or is_layout_complete(gpu, record.layouts[gpu.uuid])
                )
    return change


def seats(core: Core, key: str) -> list[tuple[str, str, int]]:
    """GPU, profile and start of each replica, in order of place."""
    held = [(one.gpu_uuids[0], one.gpu_instance) for one in core.workload(key).placements]
    return sorted((uuid, where.profile, where.start) for uuid, where in held if where is not None)
