"""The watchdog: pods that were sent to a node and do not come to be bound there.

Owns since when each waits, and when that is too long. Must not know units or patches.

Theory. A pin cannot be taken back: a place that was stolen in between leaves a pod that
waits for ever. If kube-scheduler says that it cannot be scheduled, and goes on saying so for
`unbound_s`, the pod is to be made anew by its owner. A pod that kube-scheduler has not
looked at yet is none of that kind, however long its queue is. One owner's pods are made anew
after twice as long each time, up to `most_s`, so that what can never be scheduled, for a
reason that Eelgrid does not see, does not go round and round. Pods that waited already when their
owner's were last made anew are of that same time: twenty that were pinned to full nodes at once
are made anew at once, and not one after the other after twice as long each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Watchdog"]

_OWNERS_MOST = 10_000


@dataclass(slots=True)
class _Owner:
    times: int
    first_s: float  # of the last time
    last_s: float


class Watchdog:
    """Who waits, since when."""

    def __init__(self, *, unbound_s: float, most_s: float = 3600.0) -> None:
        self.unbound_s = unbound_s
        self.most_s = most_s
        self._since_s: dict[str, float] = {}  # uid -> first said to be unschedulable
        self._owners: dict[str, _Owner] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._since_s)

    def watch(self, uid: str, at_s: float) -> None:
        """A pinned pod cannot be scheduled."""
        self._since_s.setdefault(uid, at_s)

    def forget(self, uid: str) -> None:
        """It is bound, gone, or may be scheduled again."""
        self._since_s.pop(uid, None)

    def again(self, uid: str, at_s: float) -> None:
        """What was done about it has not helped; it is overdue after another wait."""
        if uid in self._since_s:
            self._since_s[uid] = at_s

    def overdue(self, at_s: float) -> Iterator[tuple[str, float]]:
        """Pods that have waited for `unbound_s`, and for how long."""
        for uid, since_s in list(self._since_s.items()):
            if at_s - since_s >= self.unbound_s:
                yield uid, at_s - since_s

    def may_recreate(self, owner: str, waited_s: float, since_s: float = math.inf) -> bool:
        """Whether the owner's pods, which wait since then, have waited long enough, seen how often they were made anew."""
        found = self._owners.get(owner)
        times = 0 if found is None else found.times - _is_of_last(found, since_s)
        return waited_s >= min(self.most_s, self.unbound_s * 2.0**times)

    def recreated(self, owner: str, at_s: float, since_s: float = math.inf) -> None:
        """The owner's pods are made anew now."""
        found = self._owners.pop(owner, None)
        if found is not None and _is_of_last(found, since_s):
            self._owners[owner] = _Owner(found.times, found.first_s, at_s)
            return
        times = 0 if found is None or at_s - found.last_s > 2.0 * self.most_s else found.times
        if len(self._owners) >= _OWNERS_MOST:
            del self._owners[next(iter(self._owners))]
        self._owners[owner] = _Owner(min(times + 1, 20), at_s, at_s)


def _is_of_last(owner: _Owner, since_s: float) -> bool:
    """Whether what waits since then did so already when the owner's pods were last made anew."""
    return since_s <= owner.first_s
