"""An attribution becomes what is told of owners: joules of each, and since when what they hold idles.

Owns the order of labels, which owners look alike, and the bound on series. Must not know how a
series is written.

Theory. Labels of an account never change, and making them takes longer than anything else on
the page: they are made once for each account and kept while it is there. An account is known by
its identity, because to hash it would cost as much as to make its labels; what is kept holds it,
so no other object can have its identity.

Prometheus refuses a page whole for one series that comes twice, so what looks alike is one:
joules are added up, and of two times the earlier stands.
"""

from eelgrid_agent.attribution.anomalies import AnomalyKind, Subject
from eelgrid_agent.attribution.attributor import Attribution
from eelgrid_agent.attribution.ledger import Account
from eelgrid_agent.metrics.frame import OWNER_LABELS, SHARES_MOST, OwnersView

__all__ = ["OwnerNames"]

_Labels = tuple[str, ...]
_Kept = dict[int, tuple[Account | Subject, _Labels]]


class OwnerNames:
    """The labels of those who were there the last time."""

    def __init__(self) -> None:
        self._kept: _Kept = {}

    def view(self, owned: Attribution) -> OwnersView:
        """What is told of one attribution."""
        used: _Kept = {}
        energy_j: dict[_Labels, float] = {}
        left_out = 0
        for account, energy_mj in owned.accounts.items():
            labels = self._labels(account, used)
            before_j = energy_j.get(labels)
            if before_j is None and len(energy_j) >= SHARES_MOST:
                left_out += 1
            else:
                energy_j[labels] = (before_j or 0.0) + energy_mj / 1000.0
        idle_since_s: dict[_Labels, float] = {}
        for anomaly in owned.anomalies:
            if anomaly.subject.kind is AnomalyKind.HELD_IDLE:
                labels, since_s = self._labels(anomaly.subject, used), anomaly.since_wall_ns / 1e9
                idle_since_s[labels] = min(since_s, idle_since_s.get(labels, since_s))
        self._kept = used
        return OwnersView(energy_j=energy_j, idle_since_s=idle_since_s, left_out=left_out)

    def _labels(self, whose: Account | Subject, used: _Kept) -> _Labels:
        kept = self._kept.get(id(whose))
        if kept is None:
            kept = whose, _labels(whose)
        used[id(whose)] = kept
        return kept[1]


def _labels(whose: Account | Subject) -> _Labels:
    owner = whose.owner.labels()
    owner["gpu_instance"] = "" if whose.gpu_instance_id is None else str(whose.gpu_instance_id)
    holder = (whose.gpu_uuid, *[owner[label] for label in OWNER_LABELS])
    if isinstance(whose, Subject):
        return holder
    return (*holder, whose.part.value, whose.method.value, whose.confidence.label)
