"""Which devices a driver's listing leaves out and the agent keeps: those that answered once and are silent now.

Owns how the two are put together, for every adapter that reads a driver's own
numbering. Must not know a driver.

Theory. A device is its UUID; its index is only where the driver counts it now,
and changes with resets and reboots. Who answers has the driver's index, since
operators and Slurm count by it. A silent device stays listed, so that its loss
is seen, and makes room where another has its index by now.
"""

from collections.abc import Mapping
from dataclasses import replace

from eelgrid_protos.messages import GPUS_PER_NODE_MOST, Gpu

__all__ = ["with_silent"]


def with_silent(found: Mapping[str, Gpu], seen: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """Devices by UUID: those found as they are, then those seen before, each under an index of its own."""
    listed = dict(found)
    taken = {gpu.index for gpu in found.values()}
    for uuid, gpu in sorted(seen.items(), key=lambda item: item[1].index):
        if uuid in listed:
            continue
        index = next((place for place in (gpu.index, *range(GPUS_PER_NODE_MOST)) if place not in taken), None)
        if index is None:
            # More devices than a node can have: the driver gave new UUIDs to old ones.
            break
        taken.add(index)
        listed[uuid] = gpu if index == gpu.index else replace(gpu, index=index)
    return listed
