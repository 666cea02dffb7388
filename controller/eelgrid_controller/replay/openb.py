"""The openb trace format: rows of nodes and tasks, their submission, and the simulated fleet file.

Sizes are bounded and every error names file, line and column. In a fleet file each node is one entry with the
trace's name; products are the catalogue's `openb-*` entries, whose watts are those of the published power model, and
the model name stays as the tasks request it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eelgrid_controller.replay.csv_reader import (
    CsvLine,
    TraceMalformed,
    read_lines,
    require_unique,
)
from eelgrid_protos.messages import ResourceRequest, SubmitWorkloadRequest, WorkloadKind, WorkloadSpec
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, MIB

NODES_MOST = 100_000
TASKS_MOST = 1_000_000
SECONDS_MOST = 10_000_000_000
CPU_MILLI_MOST = 10_000_000
MEMORY_MIB_MOST = 2**30
GPUS_MOST = 64
NODE_LIST = "openb_node_list_gpu_node.csv"
# Idle and full watts of a GPU in the power model of the comparison, not of the catalogue.
GPU_WATTS = {
    "T4": (10.0, 70.0), "A10": (30.0, 150.0), "G2": (30.0, 150.0), "P100": (25.0, 250.0), "V100M16": (30.0, 300.0),
    "V100M32": (30.0, 300.0), "A100": (50.0, 400.0), "G3": (50.0, 400.0),
}  # fmt: skip
_NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_TASK_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
# What the trace calls latency-sensitive is measured by latency here too.
_LATENCY_SENSITIVE = "LS"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """One node of the trace; all its GPUs are of one model."""

    name: str
    cpu_milli: int
    memory_bytes: int
    gpu_count: int
    gpu_model: str
    gpu_idle_w: float | None = None  # of each GPU, where the trace says it
    gpu_full_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTask:
    """One task of the trace; several GPUs are whole ones, and no model means any."""

    name: str
    cpu_milli: int
    memory_bytes: int
    gpu_count: int
    gpu_milli: int
    gpu_models: tuple[str, ...] = ()
    qos: str = ""
    arrival_s: float | None = None  # from the trace's own zero
    duration_s: float | None = None  # None runs for ever, or the trace does not say
    priority: int = 0  # the higher is tried first when tasks wait


def task_list_name(name: str) -> str:
    """The file name of a task list such as `default` or `gpushare40`."""
    return f"openb_pod_list_{name}.csv"


def read_nodes(path: Path) -> tuple[TraceNode, ...]:
    """The nodes of a node list, in its order."""
    return tuple(map(_node, require_unique(read_lines(path, _NODE_COLUMNS, NODES_MOST), "sn")))


def read_tasks(path: Path) -> tuple[TraceTask, ...]:
    """The tasks of a task list, in its order."""
    return tuple(map(_task, require_unique(read_lines(path, _TASK_COLUMNS, TASKS_MOST), "name")))


def _node(line: CsvLine) -> TraceNode:
    gpus, model = line.whole("gpu", GPUS_MOST), line.text("model")
    if bool(gpus) != bool(model):
        raise line.cell_error("model", f"is {model!r} with {gpus} GPUs", "name a model exactly where there are GPUs")
    return TraceNode(
        name=line.name("sn"),
        cpu_milli=line.whole("cpu_milli", CPU_MILLI_MOST),
        memory_bytes=line.whole("memory_mib", MEMORY_MIB_MOST) * MIB,
        gpu_count=gpus,
        gpu_model=model,
    )


def _task(line: CsvLine) -> TraceTask:
    gpus, share = line.whole("num_gpu", GPUS_MOST), line.whole("gpu_milli", GPU_MILLI_WHOLE)
    if bool(gpus) != bool(share):
        raise line.cell_error("gpu_milli", f"is {share} with num_gpu {gpus}", "make both 0, or both more than 0")
    if gpus > 1 and share != GPU_MILLI_WHOLE:
        raise line.cell_error("gpu_milli", f"is {share} for each of {gpus} GPUs", "several GPUs are whole: write 1000")
    cpu_milli, memory_mib = line.whole("cpu_milli", CPU_MILLI_MOST), line.whole("memory_mib", MEMORY_MIB_MOST)
    if not (cpu_milli or memory_mib or gpus):
        raise line.cell_error("cpu_milli", "is 0, and so is all else: the task asks for nothing", "remove the line")
    models = [model.strip() for model in line.text("gpu_spec").split("|") if model.strip()]
    if models and not gpus:
        raise line.cell_error("gpu_spec", f"names {models[0]} for a task without GPU", "empty it or set num_gpu")
    arrival_s, duration_s = _moments(line)
    return TraceTask(
        name=line.name("name"),
        cpu_milli=cpu_milli,
        memory_bytes=memory_mib * MIB,
        gpu_count=gpus,
        gpu_milli=share,
        gpu_models=tuple(dict.fromkeys(models)),  # the published lists name some models twice
        qos=line.text("qos"),
        arrival_s=arrival_s,
        duration_s=duration_s,
    )


def _moments(line: CsvLine) -> tuple[float | None, float | None]:
    """When the task came and how long it was there, as far as the list says."""
    if not line.text("creation_time"):
        return None, None
    arrival_s = line.whole("creation_time", SECONDS_MOST)
    if not line.text("deletion_time"):
        return float(arrival_s), None
    duration_s = line.whole("deletion_time", SECONDS_MOST) - arrival_s
    if duration_s < 0:
        raise line.cell_error("deletion_time", "is before creation_time", "write both in seconds from one zero")
    return float(arrival_s), float(duration_s)


def submission_of_task(task: TraceTask, *, prefix: str = "", queue: str | None = None) -> SubmitWorkloadRequest:
    """The request that places a task; its id is the task's name, so that repeating it is harmless.

    Its queue is the task's quality of service unless one is given.
    """
    return SubmitWorkloadRequest(
        workload_id=f"{prefix}{task.name}",
        spec=WorkloadSpec(
            name=task.name,
            kind=WorkloadKind.INFERENCE_SERVICE if task.qos == _LATENCY_SENSITIVE else WorkloadKind.BATCH_JOB,
            namespace="openb",
            queue=task.qos.lower() if queue is None else queue,
            request=ResourceRequest(
                cpu_milli=task.cpu_milli,
                memory_bytes=task.memory_bytes,
                gpu_count=task.gpu_count,
                gpu_milli=task.gpu_milli,
                gpu_models=task.gpu_models,
            ),
        ),
    )


def openb_product_key(model: str, products: Iterable[str]) -> str:
    """The catalogue's key of a model of the trace."""
    key = f"openb-{model.lower()}"
    known = sorted(product.removeprefix("openb-").upper() for product in products if product.startswith("openb-"))
    if key.removeprefix("openb-").upper() not in known:
        raise TraceMalformed(
            f"model {model!r}", "has no watts in the catalogue", f"use one of {', '.join(known)}, or add a product"
        )
    return key


def fleet_document(nodes: Iterable[TraceNode], products: Iterable[str]) -> Mapping[str, Any]:
    """The fleet file's content; raises TraceMalformed for a model that the catalogue lacks."""
    rows = tuple(nodes)
    keys = {model: openb_product_key(model, products) for model in sorted({row.gpu_model for row in rows} - {""})}
    return {"nodes": [_entry(row, keys) for row in rows]}


def _entry(row: TraceNode, keys: Mapping[str, str]) -> Mapping[str, Any]:
    gpus = [{"product": keys[row.gpu_model], "model": row.gpu_model, "count": row.gpu_count}] if row.gpu_count else []
    return {
        "name": row.name,
        "count": 1,
        "cpu_milli": row.cpu_milli,
        "memory_bytes": row.memory_bytes,
        "pool": row.gpu_model.lower() or "cpu",
        "labels": {"trace": "openb"},
        "gpus": gpus,
    }


def write_fleet_file(path: Path, nodes: Iterable[TraceNode], products: Iterable[str]) -> None:
    """The fleet file at `path`."""
    path.write_text(
        json.dumps(fleet_document(nodes, products), indent=None, separators=(",", ":")) + "\n", encoding="utf-8"
    )
