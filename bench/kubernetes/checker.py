"""What pods hold, read from pods, nodes and bindings alone: the judge of takeovers, here and in the tests.

Owns no opinion on how anything was planned. A pod that is bound, or whose gate is gone and that can go to
one node only, holds the devices that its plan names; a node has as many GPUs as are allocatable.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.api.port import Object
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN, RESOURCE_GPU
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node

__all__ = ["Findings", "gpus_of", "judge"]


class Findings(NamedTuple):
    """What is wrong, each as a line of text."""

    twice: list[str]  # devices that two live pods have
    beyond: list[str]  # nodes with more pods bound or pinned than they have GPUs for
    astray: list[str]  # pods that are bound elsewhere than planned
    unbound: list[str]  # pods that are not bound, with or without a pin

    @property
    def is_safe(self) -> bool:
        """Whether nothing is given twice, whatever is not there yet."""
        return not (self.twice or self.beyond or self.astray)


def gpus_of(pod: Object) -> int:
    """How many GPUs a pod asks for."""
    containers = pod["spec"]["containers"]
    return sum(int((one.get("resources") or {}).get("requests", {}).get(RESOURCE_GPU, 0)) for one in containers)


def judge(pods: Iterable[Object], nodes: Iterable[Object]) -> Findings:
    """All findings of one moment."""
    given: dict[tuple[str, int], list[str]] = {}
    placed: Counter[str] = Counter()
    astray, unbound = [], []
    for pod in pods:
        spec, name = pod["spec"], pod["metadata"]["name"]
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        bound = spec.get("nodeName") or ""
        if not bound:
            unbound.append(f"{name} {'waits' if spec.get('schedulingGates') else f'pinned to {pinned_node(pod)}'}")
        node = bound or ("" if spec.get("schedulingGates") else pinned_node(pod))
        if not node:
            continue
        placed[node] += gpus_of(pod)
        plan = json.loads((pod["metadata"].get("annotations") or {}).get(ANNOTATION_PLAN) or "null")
        if plan is None:
            continue
        if plan["node"] != node:
            astray.append(f"{name} is planned on {plan['node']} and is on {node}")
        for device in plan["devices"]:
            given.setdefault((plan["node"], device), []).append(name)
    room = {node["metadata"]["name"]: int(node["status"]["allocatable"].get(RESOURCE_GPU, 0)) for node in nodes}
    return Findings(
        twice=[f"{node} GPU {device}: {', '.join(names)}" for (node, device), names in given.items() if len(names) > 1],
        beyond=[
            f"{node} has {room.get(node, 0)} GPUs and {many} are planned"
            for node, many in placed.items()
            if many > room.get(node, 0)
        ],
        astray=astray,
        unbound=unbound,
    )
