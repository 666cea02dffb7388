"""eelctl topology: how the GPUs of one node are linked, as a matrix.

Owns the spelling of links, which is that of `nvidia-smi topo -m`; must not know
what a link is worth when work is placed.
"""

from collections.abc import Iterator

import click

from eelgrid_controller.cli.connection import operators, pages
from eelgrid_controller.cli.failure import Unknown
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, document, text_table
from eelgrid_protos.messages import Gpu, GpuLink, Inventory, ListNodesRequest, Node

__all__ = ["links_text", "topology"]

# NVML's nearest common ancestors.
_ANCESTORS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_LEGEND = (
    "NV2 two NVLinks, PSB one board, PIX one PCIe switch, PXB several switches, PHB a host bridge, NODE a processor, "
    "SYS between processors"
)


def _link_text(link: GpuLink | None) -> str:
    if link is None:
        return "-"
    return f"NV{link.nvlinks}" if link.nvlinks else _ANCESTORS.get(link.ancestor, str(link.ancestor))


def links_text(inventory: Inventory) -> str:
    """The links of a node in a word: of NVLinks the fewest and the most between two GPUs."""
    if not inventory.links:
        return ""
    lanes = [link.nvlinks for link in inventory.links]
    low, high = min(lanes), max(lanes)
    return "PCIe" if high == 0 else f"NV{high}" if low == high else f"NV{low}-{high}"


def _lines(inventory: Inventory) -> Iterator[str]:
    gpus = sorted(inventory.gpus, key=lambda gpu: gpu.index)
    told = {frozenset((link.one, link.other)): link for link in inventory.links}

    def to(other: Gpu) -> Column[Gpu]:
        def cell(gpu: Gpu) -> str:
            return "X" if gpu.index == other.index else _link_text(told.get(frozenset((gpu.index, other.index))))

        return Column(f"GPU{other.index}", cell)

    yield f"node {inventory.node_name} at {'/'.join(inventory.topology) or 'an unknown place (eelgrid-agent --topology)'}"
    if not gpus:
        yield "no GPU"
        return
    columns: list[Column[Gpu]] = [Column("", lambda gpu: f"GPU{gpu.index}"), *map(to, gpus)]
    columns += [
        Column("NUMA", lambda gpu: "" if gpu.numa_node is None else str(gpu.numa_node)),
        Column("PCI", lambda gpu: gpu.pci_bus_id),
    ]
    yield from text_table(columns, gpus)
    yield _LEGEND if told else "the driver tells no links; GPUs are taken in the order of their index"


@click.command()
@click.argument("node")
@printing
@click.pass_obj
def topology(settings: Settings, node: str) -> None:
    """Show how the GPUs of NODE are linked, and where it stands."""
    with operators(settings) as client:
        request = ListNodesRequest(name_contains=node)
        found = pages(client.list_nodes, request, "nodes", timeout_s=settings.timeout_s)
        exact: Node | None = next((one for one in found if one.inventory.node_name == node), None)
        if exact is None:
            raise Unknown(f"no node is called {node!r}", "list them with eelctl nodes")
        document(settings, exact.inventory, _lines(exact.inventory))
