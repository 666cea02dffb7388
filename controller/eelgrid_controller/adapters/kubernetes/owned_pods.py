"""Pods by uid and by owner, beside the informer that holds them by name.

Owns the index. Must not know what it is good for. It begins anew with each informer.
"""

from collections.abc import Iterator, Sequence

from eelgrid_controller.adapters.kubernetes.held import Delta
from eelgrid_controller.adapters.kubernetes.informer import Informer
from eelgrid_controller.adapters.kubernetes.port import Key, Object
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.names import ANNOTATION_MOVE
from eelgrid_controller.kubernetes.views import Pod, owner_of, pod_of

__all__ = ["OwnedPods"]


class OwnedPods:
    """The index."""

    def __init__(self) -> None:
        self.noted: dict[str, Key] = {}  # pods that carry the note of a move, by uid
        self._informer: Informer | None = None
        self._keys: dict[str, Key] = {}
        self._owned: dict[str, dict[str, Key]] = {}

    def take(self, informer: Informer, deltas: Sequence[Delta]) -> None:
        """What changed among the pods that an informer holds."""
        if informer is not self._informer:
            self._informer = informer
            for kept in (self.noted, self._keys, self._owned):
                kept.clear()
        for delta in deltas:
            if delta.old is not None and (delta.new is None or _uid(delta.new) != _uid(delta.old)):
                self._drop(delta.old)
            if delta.new is not None:
                self._put(delta.key, delta.new)

    def _put(self, key: Key, found: Object) -> None:
        uid, owner = _uid(found), owner_of(found)
        self._keys[uid] = key
        if owner is not None:
            self._owned.setdefault(owner.uid, {})[uid] = key
        if ANNOTATION_MOVE in (found["metadata"].get("annotations") or {}):
            self.noted[uid] = key
        else:
            self.noted.pop(uid, None)

    def _drop(self, found: Object) -> None:
        uid, owner = _uid(found), owner_of(found)
        self._keys.pop(uid, None)
        self.noted.pop(uid, None)
        if owner is not None and (owned := self._owned.get(owner.uid)) is not None:
            owned.pop(uid, None)
            if not owned:
                del self._owned[owner.uid]

    def pod(self, uid: str) -> Pod | None:
        """A pod as it is held; None where it is gone."""
        key = self._keys.get(uid)
        found = self._informer.objects.get(key) if key is not None and self._informer is not None else None
        if found is None or _uid(found) != uid:
            return None
        try:
            return pod_of(found)
        except KubernetesUnreadable:
            return None

    def of(self, owner_uid: str) -> Iterator[Pod]:
        """The pods of an owner."""
        for uid in list(self._owned.get(owner_uid, ())):
            found = self.pod(uid)
            if found is not None:
                yield found


def _uid(found: Object) -> str:
    return str(found["metadata"]["uid"])
