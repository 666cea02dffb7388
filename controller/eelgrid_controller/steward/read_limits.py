"""Limits that GPUs have as read, where the journal has lower ones: what admission under budgets must still count.

Owns the reading. Must not know budgets.

Theory. A limit that was lowered takes seconds to be set; one that a node put back, or that
nobody can read, may be the default. So a job whose limits are not all read counts with its
defaults, which infinity stands for: who counts bounds it. So does a job that searches or owes
time under a promise: what it gave back it may need again, and others that began with it
would be in its way (in the closed loop 1 of 51 slowdowns and 1 of 16 deadlines broke so).
"""

import math
from collections.abc import Iterable

from eelgrid_controller.steering.standing import JobStanding
from eelgrid_controller.steward.world import World

__all__ = ["read_limits"]

_SAME_W = 0.5


def read_limits(world: World, jobs: Iterable[JobStanding] = ()) -> dict[str, float]:
    """The highest limit that a workload's GPUs have, or may yet ask back, where it is above the journal's."""
    found: dict[str, float] = {job.name: math.inf for job in jobs if job.back_w > 0.0 and job.name in world.workloads}
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
            found[name] = max(highest_w, found.get(name, 0.0))
    return found
