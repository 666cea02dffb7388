"""Limits that GPUs have as read, where the journal has lower ones: what admission under budgets must still count.

Owns the reading. Must not know budgets.

Theory. A limit that was lowered takes seconds to be set; one that a node put back, or that
nobody can read, may be the default. So a job whose limits are not all read counts with its
defaults, which infinity stands for: who counts bounds it.
"""

import math

from eelgrid_controller.steward.world import World

__all__ = ["read_limits"]

_SAME_W = 0.5


def read_limits(world: World) -> dict[str, float]:
    """The highest limit of a workload's GPUs where it is above the journal's, by workload."""
    found: dict[str, float] = {}
    for name, workload in world.workloads.items():
        limit_w = workload.power_limit_w
        if limit_w is None:
            continue
        highest_w = 0.0
        for placement in workload.placements:
            look = world.looks.get(placement.node_name)
            known = {} if look is None else look.limits_w
            highest_w = max([highest_w, *(known.get(uuid, math.inf) for uuid in placement.gpu_uuids)])
        if highest_w > limit_w + _SAME_W:
            found[name] = highest_w
    return found
