"""Which nodes have room for pods that are placed by their claims: rules, CPU, memory, and how many pods.

Owns what every pod of the cluster holds, by node. Must not know devices.

Theory. A node's room is its allocatable amounts less what pods hold that are bound to it or can
only go there, and less what was promised here and is not to be seen yet. Most pods are on nodes
that nobody asks about: a pod's amounts are read when its node is first looked at.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes.amounts import Amounts, pod_amounts
from eelgrid_controller.kubernetes.claims import Bundle
from eelgrid_controller.kubernetes.constraints import satisfies
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.nodes import closed_reason
from eelgrid_controller.kubernetes.views import KubeNode, Pod

__all__ = ["Burden", "NodeRoom"]


class Burden(NamedTuple):
    """Pods that go to one node, and the nodes that are not to be tried."""

    pods: tuple[Pod, ...]
    avoid: frozenset[str] = frozenset()


class _Sum(NamedTuple):
    cpu_milli: int = 0
    memory_bytes: int = 0
    pods: int = 0

    def plus(self, amounts: Amounts) -> "_Sum":
        return _Sum(self.cpu_milli + amounts.cpu_milli, self.memory_bytes + amounts.memory_bytes, self.pods + 1)


@dataclass(slots=True)
class _On:
    pods: dict[str, Mapping[str, Any] | Amounts] = field(default_factory=dict)
    total: _Sum | None = None


class NodeRoom:
    """All nodes; as `Room` it judges bundles whose burden was told."""

    def __init__(self) -> None:
        self.nodes: dict[str, KubeNode] = {}
        self.burdens: dict[str, Burden] = {}  # by the bundle's token
        self._on: dict[str, _On] = {}
        self._where: dict[str, str] = {}  # uid -> node
        self._promised: dict[str, str] = {}  # uid -> node

    def put(self, uid: str, found: Mapping[str, Any], node_name: str) -> None:
        """A pod is on a node, or can only go there; nowhere where that is empty."""
        if node_name:
            self._promised.pop(uid, None)
        elif uid in self._promised:
            return
        self._put(uid, found, node_name)

    def promise(self, pod: Pod, node_name: str) -> None:
        """A pod is sent to a node; with an empty name, no more."""
        if node_name:
            self._promised[pod.uid] = node_name
        elif self._promised.pop(pod.uid, None) is None:
            return
        self._put(pod.uid, pod.requested, node_name)

    def remove(self, uid: str) -> None:
        """A pod that is no more."""
        self._promised.pop(uid, None)
        self._put(uid, {}, "")

    def _put(self, uid: str, found: Mapping[str, Any] | Amounts, node_name: str) -> None:
        before = self._where.pop(uid, "")
        if before:
            on = self._on[before]
            if before == node_name and on.pods[uid] is found:
                self._where[uid] = before
                return
            del on.pods[uid]
            on.total = None
        if node_name:
            self._where[uid] = node_name
            on = self._on.setdefault(node_name, _On())
            on.pods[uid] = found
            on.total = None

    def closed(self, node_name: str) -> str:
        """Why nothing may go to a node; empty where it may."""
        node = self.nodes.get(node_name)
        return f"there is no node {node_name}" if node is None else closed_reason(node)

    # As `claims.Room`

    def is_right(self, bundle: Bundle, node_name: str) -> bool:
        """Whether all pods of a bundle may go to a node and have room there."""
        node = self.nodes.get(node_name)
        burden = self.burdens[bundle.token]
        if node is None or node_name in burden.avoid or closed_reason(node):
            return False
        held = self._total(node_name)
        for pod in burden.pods:
            if not satisfies(pod.constraint, node):
                return False
            if self._where.get(pod.uid) != node_name:
                held = held.plus(pod.requested)
        return (
            held.cpu_milli <= node.allocatable.cpu_milli
            and held.memory_bytes <= node.allocatable.memory_bytes
            and (node.pods_most is None or held.pods <= node.pods_most)
        )

    def take(self, bundle: Bundle, node_name: str, sign: int) -> None:
        """A bundle's pods go to a node, or do not."""
        for pod in self.burdens[bundle.token].pods:
            if not pod.node_name:
                self.promise(pod, node_name if sign > 0 else "")

    def _total(self, node_name: str) -> _Sum:
        on = self._on.get(node_name)
        if on is None:
            return _Sum()
        if on.total is None:
            total = _Sum()
            for uid, found in on.pods.items():
                amounts = found if isinstance(found, Amounts) else _amounts(found)
                on.pods[uid] = amounts
                total = total.plus(amounts)
            on.total = total
        return on.total


def _amounts(found: Mapping[str, Any]) -> Amounts:
    try:
        return pod_amounts(found.get("spec") or {}, found.get("status") or {})
    except KubernetesUnreadable:
        # The API server would not have taken it.
        return Amounts()
