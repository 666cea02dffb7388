"""A burst of pods onto an empty fleet: gated and placed by Eelgrid, and kube-scheduler alone, in turns.

Both create the same pods in the same way, and the clock runs from the first creation to the
last binding that a watch tells; creating is part of it. Between them everything is deleted.
"""

import time
from typing import NamedTuple

from bench.kubernetes.rig import Rig, pod

__all__ = ["Burst", "burst"]

_WITHIN_S = 300.0


class Burst(NamedTuple):
    """One burst."""

    bound: int
    seconds: float
    created_s: float  # of these, for the creation of all
    planned: int  # bound where the plan said
    overbooked: int  # nodes with more than they have

    @property
    def rate(self) -> float:
        """Pods bound in a second."""
        return self.bound / self.seconds


async def burst(rig: Rig, count: int, *, is_gated: bool, gpus: int = 8) -> Burst:
    """So many one-GPU pods at once; they are left as they are."""
    start_s = time.monotonic()
    await rig.make(pod(f"b{index:05d}", is_gated=is_gated) for index in range(count))
    created_s = time.monotonic() - start_s
    await rig.until(lambda: sum(one.bound_s is not None for one in rig.alive()) >= count, within_s=_WITHIN_S)
    bound = [one for one in rig.alive() if one.bound_s is not None]
    last_s = max((one.bound_s or 0.0 for one in bound), default=start_s)
    held: dict[str, int] = {}
    for one in bound:
        held[one.node] = held.get(one.node, 0) + 1
    planned = sum(one.node == one.pinned == one.plan.get("node") for one in bound)
    return Burst(len(bound), last_s - start_s, created_s, planned, sum(many > gpus for many in held.values()))
