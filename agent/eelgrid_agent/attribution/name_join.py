"""Pods that only a UID names get the name that only an allocation knows, where just one fits.

Owns the inference. Must not know where UIDs and names come from.

Theory. It is for nodes whose log folder is not mounted. A pod that is known by
its UID has contexts on some places; the kubelet gave each place to some pods.
Where one pod, and no other, was given all of these places, and no other UID
fits it, the two are one. Two pods that share one device stay nameless rather
than be guessed. What was inferred is dropped as soon as it no longer fits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from eelgrid_agent.attribution.owner import Owner, OwnerKind
from eelgrid_agent.attribution.split import Glance

__all__ = ["NameJoin"]

UIDS_MOST = 1024

_Pod = tuple[str, str]


class NameJoin:
    """Names by pod UID."""

    def __init__(self) -> None:
        self._names: dict[str, _Pod] = {}
        self._containers: dict[str, str] = {}

    def observe(self, glances: Mapping[str, Glance]) -> None:
        """Looks at all devices of one moment."""
        fitting: dict[str, set[_Pod]] = {}
        containers: dict[str, set[str]] = {}
        for glance in glances.values():
            for holder in glance.holders or ():
                owner = holder.owner
                if owner.kind is not OwnerKind.POD or owner.pod or not owner.pod_uid:
                    continue
                here = [one.owner for one in glance.claims if one.gpu_instance_id in (None, holder.gpu_instance_id)]
                pods = {(one.namespace, one.pod) for one in here if one.pod}
                fitting[owner.pod_uid] = fitting.get(owner.pod_uid, pods) & pods
                if owner.container_id:
                    containers.setdefault(owner.container_id, set()).update(one.container for one in here if one.pod)
        self._judge(fitting)
        for container_id, names in containers.items():
            if len(names) == 1:
                self._containers[container_id] = names.pop()
            else:
                self._containers.pop(container_id, None)
        for kept in (self._names, self._containers):
            for old in list(kept)[: max(0, len(kept) - UIDS_MOST)]:
                del kept[old]

    def named(self, owner: Owner) -> Owner:
        """The owner with its name, where that is known."""
        name = self._names.get(owner.pod_uid) if owner.kind is OwnerKind.POD and not owner.pod else None
        if name is None:
            return owner
        container = self._containers.get(owner.container_id, "")
        return replace(owner, namespace=name[0], pod=name[1], container=container)

    def _judge(self, fitting: Mapping[str, set[_Pod]]) -> None:
        for uid, pods in fitting.items():
            known = self._names.get(uid)
            if known is not None and known not in pods:
                # It holds a place that the pod was not given, or the place was given to another.
                del self._names[uid]
            if len(pods) == 1 and _alone(uid, pods, fitting):
                (pod,) = pods
                # A pod that was made anew under its name takes it over.
                self._names = {other: name for other, name in self._names.items() if name != pod}
                self._names[uid] = pod


def _alone(uid: str, pods: Iterable[_Pod], fitting: Mapping[str, set[_Pod]]) -> bool:
    (pod,) = pods
    return not any(pod in others for other, others in fitting.items() if other != uid)
