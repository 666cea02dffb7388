"""Whose pods are, by their annotation or label eelgrid.io/user: also of pods that nobody submitted to Eelgrid.

Owns what is remembered of them. Must not know who asks.

Theory. Joules of a pod come a minute later, when it may have ended; so users are remembered after their pods are gone,
until others need the room.
"""

from collections import OrderedDict
from collections.abc import Sequence

from eelgrid_controller.adapters.kubernetes.held import Delta
from eelgrid_controller.adapters.kubernetes.port import Key
from eelgrid_controller.kubernetes.annotations import user_of

__all__ = ["PodUsers"]

_PODS_MOST = 50_000
_LONGEST = 253


class PodUsers:
    """Of one cluster; `heard` is told of every change of its pods."""

    def __init__(self, *, most: int = _PODS_MOST) -> None:
        self._most = most
        self._users: OrderedDict[Key, str] = OrderedDict()

    def heard(self, deltas: Sequence[Delta]) -> None:
        """Take what pods say now; a pod that is gone stays known."""
        for delta in deltas:
            if delta.new is None:
                continue
            metadata = delta.new["metadata"]
            user = user_of(metadata.get("annotations") or {}, metadata.get("labels") or {})
            # What a label of the ledger could not be is nobody's name.
            if user and len(user) <= _LONGEST and user.isprintable():
                self._users[delta.key] = user
                self._users.move_to_end(delta.key)
                if len(self._users) > self._most:
                    self._users.popitem(last=False)
            else:
                self._users.pop(delta.key, None)

    def of(self, namespace: str, pod: str) -> str:
        """The user of a pod; empty where it says none, or is not known."""
        return self._users.get(Key(namespace, pod), "")
