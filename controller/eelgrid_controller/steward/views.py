"""What the steward reads of one node: as the core has it, as telemetry has it, and what is drawn there beside.

Owns the reading. Must not know what it is for.
"""

from collections.abc import Container

from eelgrid_controller.boards import board_of
from eelgrid_controller.core import Core
from eelgrid_controller.ledger import NodeRecord
from eelgrid_controller.modes import enforces
from eelgrid_controller.steward.meters import GpuLook
from eelgrid_controller.steward.prices import NodeDraw
from eelgrid_controller.steward.world import NodeLook, NodeView
from eelgrid_controller.telemetry import Telemetry
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import Inventory, Reading

__all__ = ["draw_of", "free_of", "look_of", "node_of", "power_of"]


def node_of(record: NodeRecord) -> NodeView:
    """A node as the core has it."""
    return NodeView(record.inventory, record.is_ready, frozenset(record.lost_gpus))


def look_of(telemetry: Telemetry, inventory: Inventory, *, now_s: float, now_ns: int) -> NodeLook:
    """Fresh counters and limits of a node's GPUs; what is missing is left out."""
    name = inventory.node_name
    applied = telemetry.applied(name)
    tick = telemetry.fresh(name, now_s=now_s, now_ns=now_ns)
    if tick is None:
        return NodeLook({}, {}, applied, None)
    energies = tick.gpus.get(Reading.ENERGY_J, ())
    limits = tick.gpus.get(Reading.POWER_LIMIT_W, ())
    looks, limits_w = {}, {}
    for position, gpu in enumerate(inventory.gpus):
        limit_w = limits[position] if position < len(limits) else None
        energy_j = energies[position] if position < len(energies) else None
        if limit_w is not None:
            limits_w[gpu.uuid] = limit_w
            if energy_j is not None:
                looks[gpu.uuid] = GpuLook(tick.time_ns / 1e9, energy_j, limit_w)
    return NodeLook(looks, limits_w, applied, telemetry.age_s(name, now_s=now_s, now_ns=now_ns))


def draw_of(core: Core, name: str, unsteered: Container[str], catalogue: Catalogue) -> NodeDraw:
    """What the GPUs of a node may draw that no steered job holds."""
    state = core.state
    record = state.nodes[name]
    total_w = 0.0  # also of a node that is lost: what runs there runs on
    for gpu in record.inventory.gpus:
        board, product = board_of(gpu, catalogue), catalogue.products.get(gpu.catalogue_key)
        default_w = board.default_w if board is not None else gpu.power_limit_max_w or 0.0
        if gpu.lost or gpu.uuid in record.lost_gpus:
            continue
        holders = [state.workloads[key] for key in record.holders(gpu.uuid)]
        if any(one.spec.training is not None and one.workload_id not in unsteered for one in holders):
            continue
        if not holders:
            total_w += default_w if product is None else min(default_w, product.idle_w)
        else:
            limits = [one.power_limit_w for one in holders]
            total_w += max(default_w if limit_w is None else limit_w for limit_w in limits)
    return NodeDraw(record.inventory, total_w)


def power_of(telemetry: Telemetry, inventory: Inventory, *, now_s: float, now_ns: int) -> tuple[float, int]:
    """What the GPUs of a node were read to draw, and how many of them were not read."""
    tick = telemetry.fresh(inventory.node_name, now_s=now_s, now_ns=now_ns)
    found = () if tick is None else tick.gpus.get(Reading.POWER_W, ())
    read = [power_w for power_w in found[: len(inventory.gpus)] if power_w is not None]
    return sum(read), len(inventory.gpus) - len(read)


def free_of(core: Core, name: str) -> dict[str, int]:
    """GPUs of a node that nobody holds, by model; none of a node that is lost or may not be changed."""
    state = core.state
    record = state.nodes[name]
    found: dict[str, int] = {}
    if not record.is_ready or not enforces(state.policy, record.inventory.pool):
        return found
    taken = record.taken_by_others() | record.lost_gpus
    for gpu in record.inventory.gpus:
        usable = not (gpu.lost or gpu.cordon or gpu.mig_enabled or gpu.uuid in taken)
        if usable and gpu.uuid not in record.gpu_milli:
            found[gpu.model] = found.get(gpu.model, 0) + 1
    return found
