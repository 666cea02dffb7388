"""Eelgrid's own trace format: nodes.csv, tasks.csv, and where wanted failures and tariffs (docs/reference/trace-format.md).

Owns the columns of these files and what their cells may hold. Must not know who
takes the rows. Watts of a GPU stand in nodes.csv, or the catalogue knows its
model by name or key; what neither says is left to the openb power model.

Theory: a column that the format does not have is an error here, unlike in a
published trace, since it is most likely a misspelt one of ours. A GPU model goes by any of its names; one with its own
watts keeps the name that it has.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from eelgrid_controller.replay.csv_reader import CsvLine, TraceMalformed, read_lines, require_unique
from eelgrid_controller.replay.openb import (
    CPU_MILLI_MOST,
    GPU_WATTS,
    GPUS_MOST,
    MEMORY_MIB_MOST,
    NODES_MOST,
    SECONDS_MOST,
    TASKS_MOST,
    TraceNode,
    TraceTask,
)
from eelgrid_protos.catalogue import Catalogue, GpuNameError, resolve_gpu_models, resolve_product
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, MIB

NODES, TASKS = "nodes.csv", "tasks.csv"
FAILURES_MOST, TARIFFS_MOST = 1_000_000, 1_000_000
_NODE_COLUMNS = ("name", "cpu_milli", "memory_mib", "gpus", "gpu_model")
_NODE_OTHERS = ("gpu_idle_w", "gpu_full_w")
_TASK_COLUMNS = ("name", "arrival_s", "cpu_milli", "memory_mib", "gpus")
_TASK_OTHERS = ("duration_s", "gpu_share", "gpu_models", "priority")
_FAILURE_COLUMNS = ("node", "down_s", "up_s")
_TARIFF_COLUMNS = ("from_s", "price_per_kwh", "carbon_g_per_kwh")
_GPU_W_MOST = 10_000.0
_PRIORITY_MOST = 1_000_000
_PRICE_MOST, _CARBON_G_MOST = 10_000.0, 10_000.0


class FailureRow(NamedTuple):
    """A node is away from down_s on, until up_s or for good."""

    node: str
    down_s: float
    up_s: float | None


class TariffRow(NamedTuple):
    """What energy costs from a moment on."""

    from_s: float
    price_per_kwh: float
    carbon_g_per_kwh: float


def read_nodes(path: Path, catalogue: Catalogue) -> tuple[TraceNode, ...]:
    """The nodes, in the order of the file."""
    records = require_unique(read_lines(path, _NODE_COLUMNS, NODES_MOST, others=_NODE_OTHERS), "name")
    return tuple(_node(line, catalogue) for line in records)


def read_tasks(path: Path) -> tuple[TraceTask, ...]:
    """The tasks, in the order of the file."""
    return tuple(map(_task, require_unique(read_lines(path, _TASK_COLUMNS, TASKS_MOST, others=_TASK_OTHERS), "name")))


class _GpuWatts(NamedTuple):
    """A model by the name that tasks are matched with, and its idle and full watts."""

    model: str
    idle_w: float | None = None
    full_w: float | None = None


def _watts(line: CsvLine, model: str, catalogue: Catalogue) -> _GpuWatts:
    """A GPU by the catalogue's name, or its own with its own watts; None where the openb power model knows them."""
    if line.text("gpu_idle_w") or line.text("gpu_full_w"):
        idle_w, full_w = (line.decimal(column, _GPU_W_MOST) for column in _NODE_OTHERS)
        if idle_w > full_w:
            raise line.cell_error("gpu_idle_w", f"is {idle_w:g}, more than gpu_full_w", "swap the two")
        return _GpuWatts(model, idle_w, full_w)
    try:
        product = resolve_product(model, "gpu_model", catalogue=catalogue)
    except GpuNameError as error:
        if model in GPU_WATTS:
            return _GpuWatts(model)
        remedy = f"{error.remedy}. Or add the columns gpu_idle_w and gpu_full_w"
        raise line.cell_error("gpu_model", f"{error.problem}, so its watts are not known", remedy) from None
    return _GpuWatts(product.model, product.idle_w, product.busy_w)


def _node(line: CsvLine, catalogue: Catalogue) -> TraceNode:
    gpus, model = line.whole("gpus", GPUS_MOST), line.text("gpu_model")
    if bool(gpus) != bool(model):
        raise line.cell_error(
            "gpu_model", f"is {model!r} with {gpus} GPUs", "name a model exactly where there are GPUs"
        )
    gpu = _watts(line, model, catalogue) if gpus else _GpuWatts(model)
    return TraceNode(
        name=line.name("name"),
        cpu_milli=line.whole("cpu_milli", CPU_MILLI_MOST),
        memory_bytes=line.whole("memory_mib", MEMORY_MIB_MOST) * MIB,
        gpu_count=gpus,
        gpu_model=gpu.model,
        gpu_idle_w=gpu.idle_w,
        gpu_full_w=gpu.full_w,
    )


def resolve_task_models(tasks: Iterable[TraceTask], nodes: Iterable[TraceNode], path: Path) -> tuple[TraceTask, ...]:
    """The tasks with the names that their GPU models have in the nodes; raises TraceMalformed where one fits several."""
    reported = tuple(dict.fromkeys(node.gpu_model for node in nodes if node.gpu_model))
    resolved: dict[tuple[str, ...], tuple[str, ...]] = {}
    found = []
    for task in tasks:
        try:
            if task.gpu_models not in resolved:
                resolved[task.gpu_models] = resolve_gpu_models(
                    task.gpu_models, "gpu_models", reported=reported, keeps_unknown=True
                )
        except GpuNameError as error:
            raise TraceMalformed(f"{path}, task {task.name}, column gpu_models", error.problem, error.remedy) from None
        models = resolved[task.gpu_models]
        found.append(task if models == task.gpu_models else replace(task, gpu_models=models))
    return tuple(found)


def _gpu_share_milli(line: CsvLine, gpus: int) -> int:
    """Thousandths of each GPU."""
    if not line.text("gpu_share"):
        return GPU_MILLI_WHOLE if gpus else 0
    share = round(line.decimal("gpu_share", 1.0) * GPU_MILLI_WHOLE)
    if bool(gpus) != bool(share):
        raise line.cell_error(
            "gpu_share", f"is {share / GPU_MILLI_WHOLE:g} with {gpus} GPUs", "make both 0, or both more"
        )
    if gpus > 1 and share != GPU_MILLI_WHOLE:
        raise line.cell_error("gpu_share", f"is less than 1 for each of {gpus} GPUs", "several GPUs are whole: write 1")
    return share


def _task(line: CsvLine) -> TraceTask:
    gpus = line.whole("gpus", GPUS_MOST)
    cpu_milli, memory_mib = line.whole("cpu_milli", CPU_MILLI_MOST), line.whole("memory_mib", MEMORY_MIB_MOST)
    if not (cpu_milli or memory_mib or gpus):
        raise line.cell_error("cpu_milli", "is 0, and so is all else: the task asks for nothing", "remove the line")
    models = [model.strip() for model in line.text("gpu_models").split("|") if model.strip()]
    if models and not gpus:
        raise line.cell_error("gpu_models", f"names {models[0]} for a task without GPU", "empty it or set gpus")
    return TraceTask(
        name=line.name("name"),
        cpu_milli=cpu_milli,
        memory_bytes=memory_mib * MIB,
        gpu_count=gpus,
        gpu_milli=_gpu_share_milli(line, gpus),
        gpu_models=tuple(dict.fromkeys(models)),
        arrival_s=line.decimal("arrival_s", SECONDS_MOST),
        duration_s=line.decimal("duration_s", SECONDS_MOST) if line.text("duration_s") else None,
        priority=line.whole("priority", _PRIORITY_MOST) if line.text("priority") else 0,
    )


def read_failures(path: Path, nodes: Iterable[TraceNode]) -> tuple[FailureRow, ...]:
    """The failures by time; two of one node may not overlap."""
    known = {node.name for node in nodes}
    rows: list[tuple[FailureRow, CsvLine]] = []
    for line in read_lines(path, _FAILURE_COLUMNS, FAILURES_MOST, others=()):
        name = line.name("node")
        if name not in known:
            raise line.cell_error("node", f"names {name!r}, which is no node of the trace", "write a node's name")
        down_s = line.decimal("down_s", SECONDS_MOST)
        up_s = line.decimal("up_s", SECONDS_MOST) if line.text("up_s") else None
        if up_s is not None and up_s <= down_s:
            raise line.cell_error("up_s", "is not after down_s", "write the later moment, or nothing if it stays down")
        rows.append((FailureRow(name, down_s, up_s), line))
    rows.sort(key=lambda row: (row[0].down_s, row[0].node))
    back: dict[str, float] = {}
    for row, line in rows:
        if row.down_s < back.get(row.node, 0.0):
            raise line.cell_error("down_s", f"falls into another failure of {row.node}", "make one failure of the two")
        back[row.node] = float("inf") if row.up_s is None else row.up_s
    return tuple(row for row, _ in rows)


def read_tariffs(path: Path, begin_s: float | None) -> tuple[TariffRow, ...]:
    """What energy costs, step by step; it must be there from begin_s on, unless that is None."""
    rows: list[TariffRow] = []
    for line in read_lines(path, _TARIFF_COLUMNS, TARIFFS_MOST, others=()):
        from_s = line.decimal("from_s", SECONDS_MOST)
        if not rows and begin_s is not None and from_s > begin_s:
            remedy = f"begin at the trace's first arrival, {begin_s:g}, or before"
            raise line.cell_error("from_s", f"is {from_s:g} in the first row", remedy)
        if rows and from_s <= rows[-1].from_s:
            raise line.cell_error("from_s", "is not after the row before", "sort the rows by from_s")
        price, carbon = line.decimal("price_per_kwh", _PRICE_MOST), line.decimal("carbon_g_per_kwh", _CARBON_G_MOST)
        rows.append(TariffRow(from_s, price, carbon))
    if not rows:
        raise TraceMalformed(str(path), "has no row", "write at least one")
    return tuple(rows)
