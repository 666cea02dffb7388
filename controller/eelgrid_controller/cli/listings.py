"""eelctl nodes, gpus and plan: what there is and what is wanted of it.

Owns these listings' options and columns; must not know how they are printed.
"""

from typing import Any

import click

from eelgrid_controller.cli.amounts import SHARE
from eelgrid_controller.cli.connection import operators, pages
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, listing
from eelgrid_controller.cli.topology import links_text
from eelgrid_controller.spelling import cpu_text, gpu_text, memory_text, percent_text, watts_text
from eelgrid_protos.messages import (
    ApplyStatus,
    GpuStatus,
    ListGpusRequest,
    ListNodesRequest,
    ListPlansRequest,
    Node,
    NodeState,
    PlanStatus,
)

__all__ = ["NODE_COLUMNS", "gpus", "limit_option", "nodes", "plan"]

limit_option = click.option("--limit", type=click.IntRange(1), help="Stop after this many; without it, all pages.")


def _models(node: Node) -> str:
    return ",".join(dict.fromkeys(gpu.model for gpu in node.inventory.gpus))


def _gpus_allocated(node: Node) -> str:
    every = len(node.inventory.gpus)
    return f"{gpu_text(node.allocated_gpu_milli)}/{every}" if every else "-"


def _of(part: str, whole: str) -> str:
    return f"{part}/{whole}"


def _age(age_s: float | None) -> str:
    return "-" if age_s is None else f"{age_s:.1f} s"


def _state_colour(state: NodeState) -> str | None:
    return {NodeState.READY: "green", NodeState.LOST: "red"}.get(state)


def _gpu_memory(status: GpuStatus) -> str:
    used = "-" if status.memory_used_bytes is None else memory_text(status.memory_used_bytes)
    return _of(used, memory_text(status.gpu.memory_bytes))


def _mig(status: GpuStatus) -> str:
    if not status.gpu.mig_enabled:
        return "off" if status.gpu.mig_capable else "-"
    return ",".join(instance.profile for instance in status.gpu.gpu_instances) or "on"


def _tint(status: PlanStatus) -> str | None:
    bad = {ApplyStatus.REFUSED, ApplyStatus.FAILED}
    return None if status.applied is None else "red" if status.applied.status in bad else "green"


NODE_COLUMNS: tuple[Column[Node], ...] = (
    Column("NODE", lambda n: n.inventory.node_name),
    Column(
        "STATE",
        lambda n: n.state.name.lower() + ("" if n.ahead_epoch is None else ", ahead of journal"),
        colour=lambda n: _state_colour(n.state) if n.ahead_epoch is None else "red",
    ),
    Column("POOL", lambda n: n.inventory.pool),
    Column("MODEL", _models),
    Column("GPUS", _gpus_allocated, right=True),
    Column("CPU", lambda n: _of(cpu_text(n.allocated_cpu_milli), cpu_text(n.inventory.cpu_milli)), right=True),
    Column(
        "MEMORY",
        lambda n: _of(memory_text(n.allocated_memory_bytes), memory_text(n.inventory.memory_bytes)),
        right=True,
    ),
    Column("WORKLOADS", lambda n: str(n.workloads), right=True),
    Column("POWER", lambda n: watts_text(n.power_w), right=True),
    Column("AGE", lambda n: _age(n.sample_age_s), right=True),
    Column("PLAN", lambda n: _of(str(n.applied_epoch), str(n.plan_epoch)), right=True, wide=True),
    Column("SAMPLES", lambda n: str(n.samples_received), right=True, wide=True),
    Column("LOST", lambda n: str(n.samples_lost), right=True, wide=True),
    Column("DRIVER", lambda n: n.inventory.driver_version, wide=True),
    Column("AGENT", lambda n: n.inventory.agent_version, wide=True),
    Column("SIMULATED", lambda n: "yes" if n.inventory.simulated else "no", wide=True),
    Column("TOPOLOGY", lambda n: "/".join(n.inventory.topology), wide=True),
    Column("LINKS", lambda n: links_text(n.inventory), wide=True),
)

_GPU_COLUMNS: tuple[Column[GpuStatus], ...] = (
    Column("NODE", lambda g: g.node_name),
    Column("GPU", lambda g: str(g.gpu.index), right=True),
    Column("MODEL", lambda g: g.gpu.model),
    Column("ALLOCATED", lambda g: percent_text(g.allocated_milli, 1000), right=True),
    Column("POWER", lambda g: watts_text(g.power_w), right=True),
    Column("BUSY", lambda g: "-" if g.utilization_ratio is None else percent_text(g.utilization_ratio, 1), right=True),
    Column("MEMORY", _gpu_memory, right=True),
    Column("TEMP", lambda g: "-" if g.temperature_c is None else f"{g.temperature_c:.0f} °C", right=True),
    Column("WORKLOADS", lambda g: str(len(g.workload_ids)), right=True),
    Column("STATE", lambda g: g.node_state.name.lower(), wide=True, colour=lambda g: _state_colour(g.node_state)),
    Column("UUID", lambda g: g.gpu.uuid, wide=True),
    Column("PRODUCT", lambda g: g.gpu.product, wide=True),
    Column("LIMIT", lambda g: watts_text(g.gpu.power_limit_default_w), right=True, wide=True),
    Column("ENERGY", lambda g: "-" if g.energy_j is None else f"{g.energy_j / 3.6e6:.3f} kWh", right=True, wide=True),
    Column("MIG", _mig, wide=True),
    Column("NUMA", lambda g: "" if g.gpu.numa_node is None else str(g.gpu.numa_node), right=True, wide=True),
    Column("PCI", lambda g: g.gpu.pci_bus_id, wide=True),
    Column("AGE", lambda g: _age(g.sample_age_s), right=True, wide=True),
)


_PLAN_COLUMNS: tuple[Column[PlanStatus], ...] = (
    Column("NODE", lambda p: p.plan.node_name),
    Column("EPOCH", lambda p: str(p.plan.epoch), right=True),
    Column("APPLIED", lambda p: str(p.applied.epoch) if p.applied else "-", right=True),
    Column("STATUS", lambda p: p.applied.status.name.lower() if p.applied else "waiting", colour=_tint),
    Column("MODE", lambda p: "enforce" if p.plan.enforce else "observe"),
    Column("LEASE", lambda p: f"{p.plan.lease_s:g} s", right=True),
    Column("ASSIGNMENTS", lambda p: str(len(p.plan.assignments)), right=True),
    Column("SETTINGS", lambda p: str(len(p.plan.gpu_settings)), right=True),
    Column("GPUS", lambda p: gpu_text(sum(a.gpu_milli * len(a.gpu_uuids) for a in p.plan.assignments)), right=True),
    Column("CPU", lambda p: cpu_text(sum(a.cpu_milli for a in p.plan.assignments)), right=True, wide=True),
    Column("MEMORY", lambda p: memory_text(sum(a.memory_bytes for a in p.plan.assignments)), right=True, wide=True),
    Column("WORKLOADS", lambda p: ",".join(a.workload_id for a in p.plan.assignments), wide=True),
)


@click.command()
@click.option("--state", "states", multiple=True, type=click.Choice(["ready", "lost"]), help="Only these; repeatable.")
@click.option("--pool", default="", help="Only this pool.")
@click.option("--gpu-model", default="", help="Only nodes with this GPU model.")
@click.option("--name", "name_contains", default="", help="Only names that contain this.")
@limit_option
@printing
@click.pass_obj
def nodes(settings: Settings, /, states: tuple[str, ...], limit: int | None, **filters: Any) -> None:
    """List nodes, what is allocated on them and what they draw."""
    request = ListNodesRequest(states=tuple(NodeState[state.upper()] for state in states), **filters)
    with operators(settings) as client:
        found = pages(client.list_nodes, request, "nodes", timeout_s=settings.timeout_s, limit=limit)
        listing(settings, NODE_COLUMNS, found, empty="no node matches; start an agent with eelgrid-agent")


@click.command()
@click.option("--node", "node_name", default="", help="Only this node.")
@click.option("--gpu-model", default="", help="Only this model.")
@click.option("--free", "min_free_milli", type=SHARE, default=0, help="Only GPUs with at least this share free: 0.5.")
@limit_option
@printing
@click.pass_obj
def gpus(settings: Settings, node_name: str, gpu_model: str, min_free_milli: int, limit: int | None) -> None:
    """List GPUs with their newest readings."""
    request = ListGpusRequest(node_name=node_name, gpu_model=gpu_model, min_free_milli=min_free_milli)
    with operators(settings) as client:
        found = pages(client.list_gpus, request, "gpus", timeout_s=settings.timeout_s, limit=limit)
        listing(settings, _GPU_COLUMNS, found, empty="no GPU matches")


@click.command()
@click.argument("node", default="")
@limit_option
@printing
@click.pass_obj
def plan(settings: Settings, node: str, limit: int | None) -> None:
    """Show what the controller wants of its nodes, or of NODE alone."""
    with operators(settings) as client:
        request = ListPlansRequest(node_name=node)
        found = pages(client.list_plans, request, "plans", timeout_s=settings.timeout_s, limit=limit)
        listing(settings, _PLAN_COLUMNS, found, empty="no plan yet; plans follow placements")
