"""Nodes, submissions and a core with them; and the same cluster as the naive twins see it."""

from collections.abc import Iterable
from typing import Any

from eelgrid_controller.core.core import Core
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, PricesQuoted
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    Column,
    EnforcementMode,
    Gpu,
    Inventory,
    NodeState,
    Reading,
    ResourceRequest,
    SampleBatch,
    SpendingLimit,
    SpendingPeriod,
    SpendingQuantity,
    SpendingScope,
    SubmitWorkloadRequest,
    WorkloadSpec,
)
from tests import naive

GIB = 2**30


def build_gpu(index: int = 0, *, model: str = "G2", **changes: Any) -> Gpu:
    """A GPU of a model; its product is named as the model is."""
    fields: dict[str, Any] = {"uuid": f"GPU-{index}", "index": index, "product": model, "model": model}
    return Gpu(**(fields | changes))


def build_catalogue_gpu(key: str, index: int = 0, **changes: Any) -> Gpu:
    """A GPU as the catalogue describes its product."""
    product = catalogue.load_catalogue().products[key]
    known: dict[str, Any] = {
        "model": product.model,
        "product": product.nvml_names[0],
        "catalogue_key": key,
        "memory_bytes": product.memory_bytes,
    }
    return build_gpu(index, **(known | {"mig_capable": product.mig is not None} | changes))


def build_node(
    name: str = "n1", *, gpus: int = 2, model: str = "G2", cpu: int = 96, memory_gib: int = 384, **changes: Any
) -> Inventory:
    """A node of openb's shape."""
    key = f"openb-{model.lower()}"
    devices = tuple(
        build_gpu(index, uuid=f"GPU-{name}-{index}", model=model, catalogue_key=key) for index in range(gpus)
    )
    fields: dict[str, Any] = {
        "node_name": name,
        "cpu_milli": cpu * 1000,
        "memory_bytes": memory_gib * GIB,
        "gpus": devices,
    }
    return Inventory(**(fields | changes))


def build_request(
    key: str = "",
    *,
    name: str = "task",
    cpu: float = 1,
    memory_gib: int = 1,
    gpus: int = 1,
    milli: int | None = None,
    models: tuple[str, ...] = (),
    dry_run: bool = False,
    **spec: Any,
) -> SubmitWorkloadRequest:
    """The submission of a workload; whole GPUs unless `milli` says otherwise."""
    share = (1000 if gpus else 0) if milli is None else milli
    request = ResourceRequest(
        cpu_milli=int(cpu * 1000), memory_bytes=memory_gib * GIB, gpu_count=gpus, gpu_milli=share, gpu_models=models
    )
    return SubmitWorkloadRequest(
        spec=WorkloadSpec(name=name, request=request, **spec), workload_id=key, dry_run=dry_run
    )


def build_spending_limit(
    gpu_hours: float = 10.0, name: str = "research", period: SpendingPeriod = SpendingPeriod.DAY, **changes: Any
) -> SpendingLimit:
    """A limit on the GPU-hours of a namespace, enforced."""
    fields: dict[str, Any] = {
        "scope": SpendingScope.NAMESPACE,
        "name": name,
        "quantity": SpendingQuantity.GPU_TIME,
        "most": 3600.0 * gpu_hours,
        "period": period,
        "mode": EnforcementMode.ENFORCE,
    }
    return SpendingLimit(**(fields | changes))


def build_batch(sequence: int, *, gpus: int = 2, ticks: int = 1, generation: int = 1, time_ns: int = 0) -> SampleBatch:
    """Power readings of 50 W."""
    return SampleBatch(
        sequence=sequence,
        inventory_generation=generation,
        time_ns=tuple(time_ns + tick for tick in range(ticks)),
        gpu_columns=(Column(reading=Reading.POWER_W, values=(50.0,) * (gpus * ticks)),),
    )


def build_core(*inventories: Inventory, state: ClusterState | None = None, **limits: Any) -> Core:
    """A core whose nodes have joined."""
    core = Core(state or ClusterState(), catalogue.load_catalogue(), **limits)
    for inventory in inventories:
        core.register_node(inventory, now_ns=1)
    return core


def drop_quotes(events: Iterable[Event]) -> list[Event]:
    """Events without quotes, which come when they are due."""
    return [event for event in events if not isinstance(event, PricesQuoted)]


def build_naive_cluster(core: Core) -> tuple[list[naive.Node], list[naive.Class], dict[str, int]]:
    """The core's state, read without any of its arrays: nodes in order of joining, mix, and codes of the models."""
    power = PriorPowerModel(catalogue.load_catalogue())
    models: dict[str, int] = {}
    nodes = []
    for record in core.state.nodes.values():
        gpus = []
        for gpu in sorted(record.inventory.gpus, key=lambda gpu: gpu.index):
            code = models.setdefault(gpu.model, len(models))
            watts = power.gpu(gpu)
            free = 1000 - record.gpu_milli.get(gpu.uuid, 0)
            device = naive.Gpu(code, free, watts.idle_w, watts.busy_w, gpu.mig_enabled or gpu.mig_pending)
            gpus.append(None if gpu.uuid in record.lost_gpus else device)
        inventory = record.inventory
        nodes.append(
            naive.Node(
                inventory.cpu_milli,
                max(0, inventory.cpu_milli - record.allocated_cpu_milli),
                max(0, inventory.memory_bytes - record.allocated_memory_bytes),
                gpus,
                record.state is NodeState.READY,
            )
        )
    mix = [
        naive.Class(
            naive.Task(
                entry.cpu_milli,
                0,
                entry.gpu_count,
                entry.gpu_milli,
                {models[model] for model in entry.gpu_models if model in models} if entry.gpu_models else None,
            ),
            weight,
        )
        for entry, weight in core.state.demand.mix
    ]
    return nodes, mix, models


def build_naive_task(wanted: ResourceRequest, models: dict[str, int]) -> naive.Task:
    """A request as the naive twins see it."""
    allowed = {models[model] for model in wanted.gpu_models if model in models} if wanted.gpu_models else None
    return naive.Task(wanted.cpu_milli, wanted.memory_bytes, wanted.gpu_count, wanted.gpu_milli, allowed)
