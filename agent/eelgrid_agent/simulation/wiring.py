"""How a node's devices are wired: who is near whom over PCIe, and where each NVLink ends.

Alike devices on one board are wired to each other, each link to the next peer
in turn, or from five devices on to switches. PCIe is as in common servers: two
devices on a switch, four on a processor. It knows no driver.
"""

from collections.abc import Sequence

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.parts import traits_of

__all__ = ["SWITCH", "alike", "ancestor", "link_end"]

# NVML's levels: one PCIe switch, one processor, the whole machine.
_SINGLE, _NODE, _SYSTEM = 10, 40, 50
_ON_A_SWITCH, _ON_A_PROCESSOR = 2, 4
SWITCH = "switch"


def alike(gpu: SimGpu, devices: Sequence[SimGpu]) -> list[SimGpu]:
    """The devices of the same product, itself among them."""
    return [other for other in devices if other.product.key == gpu.product.key]


def ancestor(one: SimGpu, other: SimGpu) -> int:
    """NVML's nearest common ancestor of two devices."""
    first, second = one.slot, other.slot
    if first // _ON_A_SWITCH == second // _ON_A_SWITCH:
        return _SINGLE
    return _NODE if first // _ON_A_PROCESSOR == second // _ON_A_PROCESSOR else _SYSTEM


def link_end(gpu: SimGpu, link: int, devices: Sequence[SimGpu]) -> SimGpu | str | None:
    """Where an NVLink ends: a device, a switch, or nowhere."""
    traits, board = traits_of(gpu.product), alike(gpu, devices)
    peers = [other for other in board if other is not gpu]
    if not peers or not 0 <= link < traits.links:
        return None
    return SWITCH if traits.switched(len(board)) else peers[link % len(peers)]
