"""Set-up of a search for moves: allocates its arrays from nodes, the expected task mix, requests and units.

Owns how large each array is. Must not know what a workload is.
"""

import numpy as np

from eelgrid_kernels.arrays import (
    CHAIN,
    CLOCK,
    FRAME,
    MOVE_GPU,
    MOVE_NODE,
    PROGRESS,
    TRAIL,
    BudgetArrays,
    ChurnLimits,
    Ints,
    Mix,
    MoveNodes,
    MoveSearch,
    Nodes,
    Records,
    TermPrices,
)
from eelgrid_kernels.engine_setup import build_expected_mix
from eelgrid_kernels.move_costs import BOARD_BLOCK
from eelgrid_kernels.node_cost import GPU_PLACEABLE


def copy_mix(mix: Mix) -> Mix:
    """Returns a copy of the mix in one array type, whoever created it."""
    return Mix._make([*(np.array(array, np.int64, order="C") for array in mix[:-1]), mix.total])


def no_budgets(count: int, width: int) -> BudgetArrays:
    """Returns the power budgets of `count` nodes of `width` GPUs that have none."""
    return BudgetArrays(
        np.zeros(0, np.int64),
        np.zeros((count, 0), np.int64),
        np.zeros((count, width), np.int64),
        np.zeros((count, width), np.int64),
    )


def build_search_ground(
    nodes: Nodes,
    mix: Mix,
    prices: TermPrices,
    requests: Records,
    *,
    replicas: int = 0,
    budgets: BudgetArrays | None = None,
) -> MoveNodes:
    """Returns working arrays for a search on nodes in the order of rank, in which `replicas` replicas may move."""
    count, width = nodes.gpu_state.shape
    power = no_budgets(count, width) if budgets is None else budgets
    placeable = nodes.gpu_state == GPU_PLACEABLE
    bits = np.bitwise_or.reduce(np.where(placeable, 1 << np.maximum(nodes.gpu_model, 0), 0), axis=1, initial=0)
    families, family = np.unique(bits, return_inverse=True)
    expected = build_expected_mix(copy_mix(mix), families.tolist() or [0])
    own, gpus = np.zeros(count, MOVE_NODE), np.zeros((count, width), MOVE_GPU)
    own["cpu_capacity"], own["cpu_free"], own["memory_free"] = nodes.cpu_capacity, nodes.cpu_free, nodes.memory_free
    own["family"], own["available"] = family, nodes.available
    for field in ("state", "model", "free", "idle_w", "busy_w"):
        gpus[field] = getattr(nodes, f"gpu_{field}")
    gpus["rise_mw"], gpus["fall_mw"] = power.rise_mw, power.fall_mw
    own["rise_mw"] = np.where(placeable, power.rise_mw, 0).max(axis=1, initial=0)
    most = int(max(1, width, *requests["gpu_count"].tolist()))
    return MoveNodes(
        nodes=own,
        gpus=gpus,
        requests=requests,
        prices=TermPrices(*(float(price) for price in prices)),
        groups=expected.groups,
        feed=expected.feed,
        mix_weight=int(mix.weight.sum()),
        fragmentation_scale=expected.fragmentation_scale,
        board_w=np.zeros((len(requests), count)),
        least_w=np.zeros((len(requests), -(-count // BOARD_BLOCK))),
        awake_w=np.zeros((len(requests), count if power.above.shape[1] else 0)),
        budgets=np.array(power.above, np.int64, order="C"),
        left_mw=np.array(power.left_mw, np.int64),
        clock=np.zeros(1, CLOCK),
        trail=np.zeros(4 * replicas + 4, TRAIL),
        marked=np.zeros(count, np.int64),
        slots=np.zeros((2, most), np.int64),
    )


def order_by_rank(nodes: Nodes) -> Ints:
    """Returns the rows of the nodes in the order of rank, in which a search takes them."""
    return np.argsort(nodes.rank, kind="stable")


def build_move_search(ground: MoveNodes, limits: ChurnLimits, units: Records, slots: Ints) -> MoveSearch:
    """Returns a search that has not begun for units (U,) whose replicas hold slots (I, W) of their homes."""
    listed = np.argsort(units["home"], kind="stable").astype(np.int64)
    at = np.searchsorted(units["home"][listed], np.arange(len(ground.nodes) + 1))
    chains = np.zeros(len(ground.nodes), CHAIN)
    chains["first"], chains["end"] = at[:-1], at[1:]
    longest = max(1, int(np.diff(at).max(initial=1)))
    return MoveSearch(
        units=units,
        limits=limits,
        chains=chains,
        listed=listed,
        progress=np.zeros(1, PROGRESS),
        slots=slots,
        to_node=np.zeros(len(slots), np.int64),
        to_slots=np.zeros_like(slots),
        queue=np.zeros((2, longest), np.int64),
        seen=np.zeros(ground.gpus.shape[1] + longest, np.int64),
        touched=np.zeros(len(ground.nodes), np.int64),
        log=np.zeros(len(units), np.int64),
        frames=np.zeros(len(slots) + 1, FRAME),
        best=np.full((len(slots), 2 + slots.shape[1]), -1, np.int64),
    )
