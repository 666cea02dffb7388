"""Clusters in the controller's own core, filled from an openb trace.

Owns how a trace becomes inventories and submissions. Must not know moves or what is measured.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from eelgrid_controller.core.core import Core
from eelgrid_controller.replay.openb import openb_product_key
from eelgrid_controller.replay.openb_protocol import TraceArrays, arrival_order
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    Gpu,
    Inventory,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.quantities import MIB


def _inventories(trace: TraceArrays) -> Iterator[Inventory]:
    fleet = trace.fleet
    products = catalogue.load_catalogue().products
    for number, count in enumerate(fleet.gpu_count.tolist()):
        model = trace.models[fleet.model[number]] if count else ""
        key = openb_product_key(model, products) if count else ""
        gpus = (
            Gpu(uuid=f"GPU-{number}-{i}", index=i, product=key, model=model, catalogue_key=key) for i in range(count)
        )
        yield Inventory(
            node_name=f"node-{number:04d}",
            cpu_milli=int(fleet.cpu_milli[number]),
            memory_bytes=int(fleet.memory_mib[number]) * MIB,
            gpus=tuple(gpus),
        )


def request_of(trace: TraceArrays, kind: int) -> ResourceRequest:
    """What one task of a kind asks for."""
    specs = trace.specs
    allowed = tuple(model for model, yes in zip(trace.models, specs.allows[kind], strict=True) if yes)
    count = int(specs.gpu_count[kind])
    return ResourceRequest(
        cpu_milli=int(specs.cpu_milli[kind]),
        memory_bytes=int(specs.memory_mib[kind]) * MIB,
        gpu_count=count,
        gpu_milli=int(specs.gpu_milli[kind]),
        gpu_models=() if not count or len(allowed) == len(trace.models) else allowed,
    )


def _submission(trace: TraceArrays, kind: int) -> SubmitWorkloadRequest:
    return SubmitWorkloadRequest(spec=WorkloadSpec(name="task", request=request_of(trace, kind)))


def fill_cluster(trace: TraceArrays, seed: int, loads: Sequence[float]) -> Iterator[tuple[float, Core]]:
    """The same cluster when tasks have arrived up to each of the loads; what was refused is gone."""
    core = Core(ClusterState(ended_most=0), catalogue.load_catalogue())
    for inventory in _inventories(trace):
        core.register_node(inventory, now_ns=1)
    order = arrival_order(trace, seed).tolist()
    milli, capacity = trace.task_milli.tolist(), trace.fleet.gpu_milli
    arrived, done = 0, 0
    for load_ in loads:
        while done < len(order) and arrived + milli[order[done]] <= load_ * capacity:
            try:
                workload = core.submit(_submission(trace, order[done]), now_ns=done + 2).result
            except InvalidArgument:
                pass  # not even an empty node holds it
            else:
                if workload.phase is WorkloadPhase.PENDING:  # refused, in the protocol's words
                    core.cancel(workload.workload_id, now_ns=done + 2)
            arrived += milli[order[done]]
            done += 1
        yield load_, core


def copy_fleet(trace: TraceArrays, copies: int) -> TraceArrays:
    """The fleet of a trace and its tasks, so many times side by side."""
    fleet = trace.fleet._replace(**{name: np.tile(array, copies) for name, array in trace.fleet._asdict().items()})
    return trace._replace(fleet=fleet, task_spec=np.tile(trace.task_spec, copies))
