"""How a node's devices are wired: who is near whom over PCIe, and where each NVLink ends.

Alike devices on one board are wired to each other, each link to the next peer
in turn; from five devices on, SXM2 boards form a hybrid cube mesh, as in DGX-1,
and later ones hang on switches (DGX A100, DGX H100). PCIe is as in common
servers: two devices on a switch, some on a processor (simulation/gpu.py says
how many). It knows no driver.

The mesh: a cube whose twelve edges and the diagonals of two faces are links,
six to each V100, some edges doubled (NVIDIA DGX-1 white paper; the matrix that
`nvidia-smi topo -m` prints there); P100 has four links, all single.
"""

from collections.abc import Sequence

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.parts import traits_of

__all__ = ["SWITCH", "alike", "ancestor", "link_end"]

# NVML's levels: one PCIe switch, one processor, the whole machine.
_SINGLE, _NODE, _SYSTEM = 10, 40, 50
_ON_A_SWITCH = 2
SWITCH = "switch"
# Where the links of a device end on a cube mesh, by its place on the board; links of the same two devices pair up.
_MESH_V100 = (
    (1, 2, 3, 3, 4, 4), (0, 2, 2, 3, 5, 5), (0, 1, 1, 3, 3, 6), (0, 0, 1, 2, 2, 7),
    (0, 0, 5, 6, 7, 7), (1, 1, 4, 6, 6, 7), (2, 4, 5, 5, 7, 7), (3, 4, 4, 5, 6, 6),
)  # fmt: skip
_MESH_P100 = tuple(
    tuple(sorted({*range(half, half + 4), place ^ 4} - {place})) for half in (0, 4) for place in range(half, half + 4)
)
_MESHES = {6: _MESH_V100, 4: _MESH_P100}


def alike(gpu: SimGpu, devices: Sequence[SimGpu]) -> list[SimGpu]:
    """The devices of the same product, itself among them."""
    return [other for other in devices if other.product.key == gpu.product.key]


def ancestor(one: SimGpu, other: SimGpu) -> int:
    """NVML's nearest common ancestor of two devices."""
    first, second = one.slot, other.slot
    if first // _ON_A_SWITCH == second // _ON_A_SWITCH:
        return _SINGLE
    return _NODE if one.identity.numa_node == other.identity.numa_node else _SYSTEM


def link_end(gpu: SimGpu, link: int, devices: Sequence[SimGpu]) -> SimGpu | str | None:
    """Where an NVLink ends: a device, a switch, or nowhere."""
    traits, board = traits_of(gpu.product), alike(gpu, devices)
    peers = [other for other in board if other is not gpu]
    if not peers or not 0 <= link < traits.links:
        return None
    if traits.switched(len(board)):
        return SWITCH
    if not traits.meshed(len(board)):
        return peers[link % len(peers)]
    end = _MESHES[traits.links][board.index(gpu)][link]
    return board[end] if end < len(board) else None
