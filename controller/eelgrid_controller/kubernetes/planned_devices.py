"""Which GPUs of each node pods hold or are on their way to, by the API server's pods alone.

Owns what plans name, per node, and who comes first where two name the same device. Must not
know units, the core, or why a pod was planned where it is.

Theory. A pod that is bound, or that can only go to one node, holds as many GPUs there as it
requests; its plan says which, by index. The plan is text on an object that people may write to,
so it names no more devices than kube-scheduler counts for the pod, and none on another node. Of
two pods that name one device the first is the one whose place the core holds there, then the one
of the older term; the other holds as many GPUs as before, and nobody knows which. A pin that was
sent and may have arrived counts like one that was seen. So what is asked here is true whichever
leader wrote a plan, and whatever the core believes.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["PlannedDevices", "PlannedPod"]


class PlannedPod(NamedTuple):
    """One pod on a node; `devices` are those that its plan names there."""

    node_name: str
    gpu_count: int
    devices: tuple[int, ...] = ()
    epoch: int = 0  # of its plan
    is_held: bool = False  # by the core, at these devices
    is_moving: bool = False  # the core holds others for it: its plan, or the core, is about to change


class PlannedDevices:
    """All nodes."""

    def __init__(self) -> None:
        self._on: dict[str, dict[str, PlannedPod]] = {}  # by node and uid
        self._where: dict[str, str] = {}  # uid -> node

    def put(self, uid: str, pod: PlannedPod | None) -> Iterator[str]:
        """A pod is there now, or nowhere; the uids of others that name devices which it names, or named before."""
        where = self._where.get(uid)
        before = None if where is None else self._on[where].get(uid)
        if before == pod:
            return
        if where is not None:
            del self._on[where][uid]
            del self._where[uid]
        if pod is not None and pod.node_name:
            self._on.setdefault(pod.node_name, {})[uid] = pod
            self._where[uid] = pod.node_name
        for one in (before, pod):
            if one is not None:
                yield from [other for other, _ in self._sharing(one.node_name, one.devices, uid)]

    def named(self, uid: str) -> tuple[int, ...]:
        """The devices that a pod's plan names, in order, if no pod that comes before it names one of them."""
        found = self._on.get(self._where.get(uid, ""), {}).get(uid)
        if found is None or not found.devices:
            return ()
        rank = _rank(uid, found)
        is_first = all(rank < _rank(other, one) for other, one in self._sharing(found.node_name, found.devices, uid))
        return tuple(sorted(found.devices)) if is_first else ()

    def rival(self, node_name: str, devices: Iterable[int], uid: str) -> PlannedPod | None:
        """Another pod whose plan names one of these devices."""
        return next((one for _, one in self._sharing(node_name, devices, uid)), None)

    def gpus(self, node_name: str, *, without: str) -> int:
        """How many GPUs pods hold on a node, or will, beside this one."""
        return sum(one.gpu_count for uid, one in self._on.get(node_name, {}).items() if uid != without)

    def _sharing(self, node_name: str, devices: Iterable[int], uid: str) -> Iterator[tuple[str, PlannedPod]]:
        wanted = set(devices)
        if wanted:
            for other, one in self._on.get(node_name, {}).items():
                if other != uid and not wanted.isdisjoint(one.devices):
                    yield other, one


def _rank(uid: str, pod: PlannedPod) -> tuple[bool, int, str]:
    return (not pod.is_held, pod.epoch, uid)
