"""eelctl nodes, node, gpus, plan, topology and reconcile: the cluster's nodes, their GPUs, links and plans.

Links are written as `nvidia-smi topo -m` writes them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import click

from eelgrid_controller.cli.completion import complete_models, complete_nodes, complete_pools
from eelgrid_controller.cli.confirmation import confirm_change, list_names, yes_option
from eelgrid_controller.cli.connection import (
    SHARE,
    CliSettings,
    NameNotFound,
    RequestRefused,
    connect_operators,
    iterate_pages,
    output_option,
)
from eelgrid_controller.cli.drain import cordon_word
from eelgrid_controller.cli.output import (
    TableColumn,
    list_options,
    power_column,
    print_document,
    print_list,
    share_colour,
    share_of,
    text_table,
)
from eelgrid_controller.formatting import count_noun, format_cpu, format_gpu, format_memory, format_percent
from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.messages import (
    ApplyStatus,
    Gpu,
    GpuLink,
    GpuStatus,
    Inventory,
    ListGpusRequest,
    ListNodesRequest,
    ListPlansRequest,
    Node,
    NodeState,
    PlanStatus,
    ReconcileNodeRequest,
    RemoveNodeRequest,
    RemoveNodeResponse,
    resolve_pool,
)

# NVML's nearest common ancestors.
_ANCESTORS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_LEGEND = (
    "NV2 two NVLinks, PSB same board, PIX one PCIe switch, PXB several switches, PHB host bridge, NODE same processor, "
    "SYS across processors"
)


def _link_text(link: GpuLink | None) -> str:
    if link is None:
        return "-"
    return f"NV{link.nvlinks}" if link.nvlinks else _ANCESTORS.get(link.ancestor, str(link.ancestor))


def format_links(inventory: Inventory) -> str:
    """Formats the links of a node in one word: the fewest and the most NVLinks between two GPUs."""
    if not inventory.links:
        return ""
    lanes = [link.nvlinks for link in inventory.links]
    low, high = min(lanes), max(lanes)
    return "PCIe" if high == 0 else f"NV{high}" if low == high else f"NV{low}-{high}"


def _topology_lines(inventory: Inventory) -> Iterator[str]:
    gpus = sorted(inventory.gpus, key=lambda gpu: gpu.index)
    told = {frozenset((link.one, link.other)): link for link in inventory.links}

    def to(other: Gpu) -> TableColumn[Gpu]:
        def cell(gpu: Gpu) -> str:
            return "X" if gpu.index == other.index else _link_text(told.get(frozenset((gpu.index, other.index))))

        return TableColumn(f"GPU{other.index}", cell)

    yield f"node {inventory.node_name} at {'/'.join(inventory.topology) or 'an unknown location (set eelgrid-agent --topology)'}"
    if inventory.model_data:
        yield f"model data on disk: {', '.join(inventory.model_data)}"
    if not gpus:
        yield "no GPU"
        return
    columns: list[TableColumn[Gpu]] = [TableColumn("", lambda gpu: f"GPU{gpu.index}"), *map(to, gpus)]
    columns += [
        TableColumn("NUMA", lambda gpu: "" if gpu.numa_node is None else str(gpu.numa_node)),
        TableColumn("PCI", lambda gpu: gpu.pci_bus_id),
    ]
    yield from text_table(columns, gpus)
    yield _LEGEND if told else "the driver reports no links; GPUs are allocated in order of their index"


def find_node(client: Any, settings: CliSettings, name: str) -> Node:
    """Returns the node of this name; raises RequestRefused if no node can have it, NameNotFound if none has."""
    try:
        request = ListNodesRequest(name_contains=name)
        listed = list(iterate_pages(client.list_nodes, request, "nodes", timeout_s=settings.timeout_s))
    except InvalidMessage as error:
        violations = tuple(Violation("NODE", one.problem, one.remedy) for one in error.violations)
        raise RequestRefused("no node can have this name", "list nodes with `eelctl nodes`", violations) from None
    exact: Node | None = next((one for one in listed if one.inventory.node_name == name), None)
    if exact is None:
        raise NameNotFound(f"no node is called {name!r}", "list nodes with `eelctl nodes`")
    return exact


@click.command()
@click.argument("node", shell_complete=complete_nodes)
@output_option
@click.pass_obj
def topology(settings: CliSettings, node: str) -> None:
    """Show how the GPUs of NODE are linked, and where it is in the cluster topology."""
    with connect_operators(settings) as client:
        exact = find_node(client, settings, node)
        print_document(settings, exact.inventory, _topology_lines(exact.inventory))


limit_option = click.option("--limit", type=click.IntRange(1), help="Show at most this many; all by default.")


def _gpus_allocated(node: Node) -> str:
    every = len(node.inventory.gpus)
    return f"{format_gpu(node.allocated_gpu_milli)}/{every}" if every else "-"


def _age(age_s: float | None) -> str:
    return "-" if age_s is None else f"{age_s:.1f} s"


def _node_state(node: Node) -> str:
    """Formats the state of a node, with its cordon, lost GPUs and fence: `ready, draining 3 left, 1 GPU lost`."""
    lost = sum(gpu.lost for gpu in node.inventory.gpus) if node.state is NodeState.READY else 0
    ahead = "" if node.ahead_epoch is None else ", ahead of journal"
    own = cordon_word([one for one in node.cordons if not one.gpu_uuid])
    gpus = [one for one in node.cordons if one.gpu_uuid]
    parts = [own] if own else []
    parts += [f"{count_noun(len(gpus), 'GPU')} {cordon_word(gpus)}"] if gpus else []
    parts += [f"{count_noun(lost, 'GPU')} lost"] if lost else []
    is_fenced = node.state is NodeState.LOST and node.inventory.fence_after_s > 0.0
    parts += [f"fences jobs after {node.inventory.fence_after_s:g} s"] if is_fenced else []
    return ", ".join([node.state.name.lower() + ahead, *parts])


def _node_state_colour(node: Node) -> str:
    is_well = node.state is NodeState.READY and node.ahead_epoch is None
    is_well = is_well and not any(gpu.lost for gpu in node.inventory.gpus)
    return "red" if not is_well else "yellow" if node.cordons else "green"


def _gpu_state(status: GpuStatus) -> str:
    if status.node_state is not NodeState.READY:
        return f"node {status.node_state.name.lower()}"
    if status.gpu.lost:
        return "lost"
    return cordon_word(status.cordons) or ("cordoned" if status.gpu.cordon else "ready")


def _gpu_state_colour(status: GpuStatus) -> str:
    state = _gpu_state(status)
    is_cordoned = status.cordons or status.gpu.cordon
    return "green" if state == "ready" else "yellow" if is_cordoned and state != "lost" else "red"


def _gpu_memory(status: GpuStatus) -> str:
    used = "-" if status.memory_used_bytes is None else format_memory(status.memory_used_bytes)
    return f"{used}/{format_memory(status.gpu.memory_bytes)}"


def _allocated_share(node: Node) -> float | None:
    return share_of(node.allocated_gpu_milli, 1000 * len(node.inventory.gpus))


def _node_power_share(node: Node) -> float | None:
    """Returns the share of what the node's GPUs may draw by default; None where a default is unknown."""
    limits_w = [gpu.power_limit_default_w for gpu in node.inventory.gpus]
    known_w = [limit_w for limit_w in limits_w if limit_w is not None]
    return share_of(node.power_w, sum(known_w)) if len(known_w) == len(limits_w) else None


def _gpu_power_share(status: GpuStatus) -> float | None:
    return share_of(status.power_w, status.gpu.power_limit_default_w)


def _gpu_memory_share(status: GpuStatus) -> float | None:
    return share_of(status.memory_used_bytes, status.gpu.memory_bytes)


_NAMES_SHOWN = 3


def _join_names(names: Iterable[str]) -> str:
    """Joins different names, the first few in full: `train,serve,etl +2`."""
    every = list(dict.fromkeys(filter(None, names)))
    more = len(every) - _NAMES_SHOWN
    return ",".join(every[:_NAMES_SHOWN]) + (f" +{more}" if more > 0 else "")


def _mig(status: GpuStatus) -> str:
    if not status.gpu.mig_enabled:
        return "off" if status.gpu.mig_capable else "-"
    return ",".join(instance.profile for instance in status.gpu.gpu_instances) or "on"


def _tint(status: PlanStatus) -> str | None:
    bad = {ApplyStatus.REFUSED, ApplyStatus.FAILED}
    return None if status.applied is None else "red" if status.applied.status in bad else "green"


NODE_COLUMNS: tuple[TableColumn[Node], ...] = (
    TableColumn("NODE", lambda n: n.inventory.node_name),
    TableColumn(
        "STATE",
        _node_state,
        colour=_node_state_colour,
    ),
    TableColumn("POOL", lambda n: resolve_pool(n.inventory.pool)),
    TableColumn("MODEL", lambda n: ",".join(dict.fromkeys(gpu.model for gpu in n.inventory.gpus))),
    TableColumn("GPUS", _gpus_allocated, right=True, share=_allocated_share),
    TableColumn(
        "CPU", lambda n: f"{format_cpu(n.allocated_cpu_milli)}/{format_cpu(n.inventory.cpu_milli)}", right=True
    ),
    TableColumn(
        "MEMORY",
        lambda n: f"{format_memory(n.allocated_memory_bytes)}/{format_memory(n.inventory.memory_bytes)}",
        right=True,
    ),
    TableColumn("WORKLOADS", lambda n: str(n.workloads), right=True),
    replace(
        power_column("POWER", lambda n: n.power_w),
        colour=lambda n: share_colour(_node_power_share(n)),
        share=_node_power_share,
    ),
    TableColumn("AGE", lambda n: _age(n.sample_age_s), right=True),
    TableColumn("PLAN", lambda n: f"{n.applied_epoch}/{n.plan_epoch}", right=True, wide=True),
    TableColumn("SAMPLES", lambda n: str(n.samples_received), right=True, wide=True),
    TableColumn("LOST", lambda n: str(n.samples_lost), right=True, wide=True),
    TableColumn("DRIVER", lambda n: n.inventory.driver_version, wide=True),
    TableColumn("AGENT", lambda n: n.inventory.agent_version, wide=True),
    TableColumn("SIMULATED", lambda n: "yes" if n.inventory.simulated else "no", wide=True),
    TableColumn("TOPOLOGY", lambda n: "/".join(n.inventory.topology), wide=True),
    TableColumn("LINKS", lambda n: format_links(n.inventory), wide=True),
)

GPU_COLUMNS: tuple[TableColumn[GpuStatus], ...] = (
    TableColumn("NODE", lambda g: g.node_name),
    TableColumn("GPU", lambda g: str(g.gpu.index), right=True),
    TableColumn("STATE", _gpu_state, colour=_gpu_state_colour),
    TableColumn("MODEL", lambda g: g.gpu.model),
    TableColumn("ALLOCATED", lambda g: format_percent(g.allocated_milli, 1000), right=True),
    replace(
        power_column("POWER", lambda g: g.power_w),
        colour=lambda g: share_colour(_gpu_power_share(g)),
        share=_gpu_power_share,
    ),
    TableColumn(
        "BUSY",
        lambda g: "-" if g.utilization_ratio is None else format_percent(g.utilization_ratio, 1),
        right=True,
        share=lambda g: g.utilization_ratio,
    ),
    TableColumn(
        "MEMORY",
        _gpu_memory,
        right=True,
        colour=lambda g: share_colour(_gpu_memory_share(g)),
        share=_gpu_memory_share,
    ),
    TableColumn("TEMP", lambda g: "-" if g.temperature_c is None else f"{g.temperature_c:.0f} °C", right=True),
    TableColumn("WORKLOADS", lambda g: str(len(g.workload_ids)), right=True),
    TableColumn("NAME", lambda g: _join_names(one.name for one in g.holders)),
    TableColumn("USER", lambda g: _join_names(one.user for one in g.holders)),
    TableColumn("UUID", lambda g: g.gpu.uuid, wide=True),
    TableColumn("PRODUCT", lambda g: g.gpu.product, wide=True),
    power_column("LIMIT", lambda g: g.gpu.power_limit_default_w, wide=True),
    TableColumn(
        "ENERGY", lambda g: "-" if g.energy_j is None else f"{g.energy_j / 3.6e6:.3f} kWh", right=True, wide=True
    ),
    TableColumn("MIG", _mig, wide=True),
    TableColumn("NUMA", lambda g: "" if g.gpu.numa_node is None else str(g.gpu.numa_node), right=True, wide=True),
    TableColumn("PCI", lambda g: g.gpu.pci_bus_id, wide=True),
    TableColumn("AGE", lambda g: _age(g.sample_age_s), right=True, wide=True),
)


PLAN_COLUMNS: tuple[TableColumn[PlanStatus], ...] = (
    TableColumn("NODE", lambda p: p.plan.node_name),
    TableColumn("EPOCH", lambda p: str(p.plan.epoch), right=True),
    TableColumn("APPLIED", lambda p: str(p.applied.epoch) if p.applied else "-", right=True),
    TableColumn("STATUS", lambda p: p.applied.status.name.lower() if p.applied else "waiting", colour=_tint),
    TableColumn("MODE", lambda p: "enforce" if p.plan.enforce else "observe"),
    TableColumn("LEASE", lambda p: f"{p.plan.lease_s:g} s", right=True),
    TableColumn("ASSIGNMENTS", lambda p: str(len(p.plan.assignments)), right=True),
    TableColumn("SETTINGS", lambda p: str(len(p.plan.gpu_settings)), right=True),
    TableColumn(
        "GPUS", lambda p: format_gpu(sum(a.gpu_milli * len(a.gpu_uuids) for a in p.plan.assignments)), right=True
    ),
    TableColumn("CPU", lambda p: format_cpu(sum(a.cpu_milli for a in p.plan.assignments)), right=True, wide=True),
    TableColumn(
        "MEMORY", lambda p: format_memory(sum(a.memory_bytes for a in p.plan.assignments)), right=True, wide=True
    ),
    TableColumn("WORKLOADS", lambda p: ",".join(a.workload_id for a in p.plan.assignments), wide=True),
)


@click.command()
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(["ready", "lost"]),
    help="Only nodes in this state; repeatable.",
)
@click.option("--pool", default="", help="Only nodes in this pool.", shell_complete=complete_pools)
@click.option(
    "--gpu-model",
    default="",
    help="Only nodes with this GPU model, by any of its names.",
    shell_complete=complete_models,
)
@click.option(
    "--name",
    "name_contains",
    default="",
    help="Only nodes whose name contains this text.",
    shell_complete=complete_nodes,
)
@limit_option
@list_options(*NODE_COLUMNS)
@output_option
@click.pass_obj
def nodes(settings: CliSettings, /, states: tuple[str, ...], limit: int | None, **filters: Any) -> None:
    """List nodes with their allocations and power draw."""
    request = ListNodesRequest(states=tuple(NodeState[state.upper()] for state in states), **filters)
    with connect_operators(settings) as client:
        found = iterate_pages(
            client.list_nodes, request, "nodes", timeout_s=settings.timeout_s, limit=settings.fetch_limit(limit)
        )
        print_list(
            settings,
            NODE_COLUMNS,
            found,
            empty="no node matches; nodes join when eelgrid-agent runs on them",
            limit=limit,
        )


@click.command()
@click.option("--node", "node_name", default="", help="Only GPUs of this node.", shell_complete=complete_nodes)
@click.option(
    "--gpu-model", default="", help="Only GPUs of this model, by any of its names.", shell_complete=complete_models
)
@click.option("--free", "min_free_milli", type=SHARE, default=0, help="Only GPUs with at least this share free: 0.5.")
@limit_option
@list_options(*GPU_COLUMNS)
@output_option
@click.pass_obj
def gpus(settings: CliSettings, node_name: str, gpu_model: str, min_free_milli: int, limit: int | None) -> None:
    """List GPUs with their latest readings, and the names and users of the workloads that hold them."""
    request = ListGpusRequest(node_name=node_name, gpu_model=gpu_model, min_free_milli=min_free_milli)
    with connect_operators(settings) as client:
        found = iterate_pages(
            client.list_gpus, request, "gpus", timeout_s=settings.timeout_s, limit=settings.fetch_limit(limit)
        )
        print_list(settings, GPU_COLUMNS, found, empty="no GPU matches", limit=limit)


@click.command()
@click.argument("node", default="", shell_complete=complete_nodes)
@limit_option
@list_options(*PLAN_COLUMNS)
@output_option
@click.pass_obj
def plan(settings: CliSettings, node: str, limit: int | None) -> None:
    """Show the plans that the controller sends to its nodes, or to NODE only."""
    with connect_operators(settings) as client:
        request = ListPlansRequest(node_name=node)
        found = iterate_pages(
            client.list_plans, request, "plans", timeout_s=settings.timeout_s, limit=settings.fetch_limit(limit)
        )
        print_list(
            settings, PLAN_COLUMNS, found, empty="no plan yet; a node gets one with its first placement", limit=limit
        )


_SHOWN_MOST = 10


@click.group()
def node() -> None:
    """Remove a node that is gone for good; `eelctl nodes` lists them."""


@node.command()
@click.argument("name", shell_complete=complete_nodes)
@click.option(
    "--force", is_flag=True, help="Remove it even if it holds work, which then ends, or if its agent is connected."
)
@click.option("--dry-run", is_flag=True, help="Show what would happen to its work, and change nothing.")
@yes_option
@output_option
@click.pass_obj
def remove(settings: CliSettings, name: str, *, force: bool, dry_run: bool, yes: bool) -> None:
    """Remove a node; requires the role admin.

    Without --force, a node that holds work or whose agent is connected is not removed. With --force, services continue
    with their replicas on other nodes, and every other workload with a replica on the node ends. If the agent still
    runs, stop it first: it would register the node again, and its work would run on until the lease of its plan ends.
    Asks before it ends work.
    """
    request = RemoveNodeRequest(node_name=name, force=force, dry_run=dry_run)
    with connect_operators(settings) as client:
        if force and not (dry_run or yes):
            tried = client.remove_node(replace(request, dry_run=True), timeout=settings.timeout_s)
            if tried.ended or tried.shrunk:
                effects = tuple(_lines(name, tried, dry_run=True))[1:]
                confirm_change(f"Removing {name}", yes=yes, effects=effects)
        found = client.remove_node(request, timeout=settings.timeout_s)
    print_document(settings, found, _lines(name, found, dry_run=dry_run))


def _lines(name: str, found: RemoveNodeResponse, *, dry_run: bool) -> Iterator[str]:
    would = "would be" if dry_run else "is"
    yield f"{name} {would} removed"
    for keys, words in ((found.ended, "ended"), (found.shrunk, "reduced to their replicas on other nodes")):
        if keys:
            what = words if len(keys) > 1 else words.replace("their", "its")
            more = f" and {len(keys) - _SHOWN_MOST} more" if len(keys) > _SHOWN_MOST else ""
            were = "would be" if dry_run else "was" if len(keys) == 1 else "were"
            yield f"  {count_noun(len(keys), 'workload')} {were} {what}: {', '.join(keys[:_SHOWN_MOST])}{more}"
    if found.connected:
        yield "  its agent is connected: stop it, or the node registers again"


@click.command()
@click.argument("node", nargs=-1, required=True, shell_complete=complete_nodes)
@yes_option
@output_option
@click.pass_obj
def reconcile(settings: CliSettings, node: tuple[str, ...], *, yes: bool) -> None:
    """Release work that nodes hold but the journal has lost.

    The next plan of each NODE leaves that work out, and its GPUs become free. First check what runs there: `eelctl
    doctor` and `eelctl nodes -o json` (unknown_workload_ids) name it. Stop it, or submit it again afterwards. Refused
    until the node's agent has reported since the controller's start. Asks before it releases work, or several nodes.
    """
    named = tuple(dict.fromkeys(node))
    with connect_operators(settings) as client:
        if not yes:
            every = iterate_pages(client.list_nodes, ListNodesRequest(), "nodes", timeout_s=settings.timeout_s)
            lost = [key for one in every if one.inventory.node_name in named for key in one.unknown_workload_ids]
            if lost or len(named) > 1:
                what = f"Reconciling {count_noun(len(named), 'node')} ({list_names(named)})"
                effects = (f"{count_noun(len(lost), 'workload')} released: {list_names(lost)}",) if lost else ()
                confirm_change(what, yes=yes, effects=effects)
        for name in named:
            found = client.reconcile_node(ReconcileNodeRequest(node_name=name), timeout=settings.timeout_s).node
            print_document(settings, found, [f"{name}: holds only what the journal knows, plan {found.plan_epoch}"])
