"""A burst of pods onto an empty fleet, by Eelgrid's ways to place them and by kube-scheduler alone, in turns.

    alone      kube-scheduler
    gate       gated, placed by Eelgrid, bound by kube-scheduler
    scheduler  bound by Eelgrid
    admission  given their nodes by Eelgrid's webhook
    created    created with their nodes, by nobody: the rate of creations alone, a bound for all others

All create the same pods in the same way, and the clock runs from the first creation to the
last binding reported by a watch, including the creation. In between everything is deleted.
The CPU time of each process is reported together with the rate, because it is meaningful even on
a machine with other load.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.kubernetes.processes import cpu_s
from bench.kubernetes.rig import Rig, pod
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import ADMITTED_UID_PREFIX

__all__ = ["Burst", "burst"]


class Burst(NamedTuple):
    """One burst."""

    bound: int
    seconds: float
    created_s: float  # of these, for the creation of all
    late_s: float  # from the last creation to the last binding
    planned: int  # bound where the plan said
    admitted: int  # of these, at their admission
    overbooked: int  # nodes with more than they have
    cpu_ms: Mapping[str, float]  # of processor for a pod, by process; "bench" is this one, which creates and looks on

    @property
    def rate(self) -> float:
        """Pods bound in a second."""
        return self.bound / self.seconds


async def burst(
    rig: Rig, count: int, pids: Mapping[str, int], *, mode: str, nodes: Sequence[str] = (), gpus: int = 8
) -> Burst:
    """So many one-GPU pods at once; they are left as they are. `pids` are the processes to be looked at.

    In mode "created" they are spread over `nodes`.
    """
    pids = {**pids, "bench": os.getpid()}
    before_s = {name: cpu_s(pid) for name, pid in pids.items()}
    bound, seconds, created_s = await rig.rush(
        [
            pod(f"b{index:05d}", mode=mode, spec={"nodeName": nodes[index % len(nodes)]} if mode == "created" else {})
            for index in range(count)
        ]
    )
    cpu_ms = {name: 1000.0 * (cpu_s(pid) - before_s[name]) / count for name, pid in pids.items()}
    held: dict[str, int] = {}
    for one in bound:
        held[one.node] = held.get(one.node, 0) + 1
    planned = [one for one in bound if one.node == (one.pinned if mode == "gate" else one.node) == one.plan.get("node")]
    # A plan that came too late for the answer is written again by the binding, with the pod's own uid.
    admitted = sum(str(one.plan["uid"]).startswith(ADMITTED_UID_PREFIX) for one in planned)
    overbooked = sum(many > gpus for many in held.values())
    return Burst(len(bound), seconds, created_s, seconds - created_s, len(planned), admitted, overbooked, cpu_ms)
