"""The watchdog: pods that were sent to a node and do not come to be bound there.

Owns since when each waits, and when that is too long. Must not know units or patches.

Theory. A pin cannot be taken back: a place that was stolen in between leaves a pod that
waits for ever. If kube-scheduler says that it cannot be scheduled, and goes on saying so for
`unbound_s`, the pod is to be made anew by its owner. A pod that kube-scheduler has not
looked at yet is none of that kind, however long its queue is. One owner's pods are made anew
after twice as long in each further round, up to `most_s`, so that what can never be scheduled,
for a reason that Eelgrid does not see, does not go round and round. All of its pods that waited
already when a round began are of that round: twenty that were pinned to full nodes at once are
made anew together, and not the last of them after a thousand times as long.
"""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Watchdog"]

_OWNERS_MOST = 10_000


@dataclass(slots=True)
class _Owner:
    times: int  # rounds so far
    round_s: float  # when the last one began
    last_s: float  # when one of its pods was last made anew


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

    def may_recreate(self, owner: str, waited_s: float, at_s: float) -> bool:
        """Whether a pod of the owner has waited long enough, seen how often its pods were made anew."""
        found = self._owners.get(owner)
        if found is None:
            return True
        rounds = found.times - 1 if _is_of(found, at_s - waited_s) else found.times
        return waited_s >= min(self.most_s, self.unbound_s * 2.0**rounds)

    def recreated(self, owner: str, waited_s: float, at_s: float) -> None:
        """A pod of the owner is made anew now, after it waited so long."""
        found = self._owners.pop(owner, None)
        if found is not None and _is_of(found, at_s - waited_s):
            found.last_s = at_s
            self._owners[owner] = found
            return
        times = 0 if found is None or at_s - found.last_s > 2.0 * self.most_s else found.times
        if len(self._owners) >= _OWNERS_MOST:
            del self._owners[next(iter(self._owners))]
        self._owners[owner] = _Owner(min(times + 1, 20), at_s, at_s)


def _is_of(owner: _Owner, since_s: float) -> bool:
    """Whether what waits since then is of the owner's last round: whoever is stuck later is of the next."""
    return since_s < owner.round_s
