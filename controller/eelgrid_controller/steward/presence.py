"""Nodes of jobs that go, run out of their lease, and come back; as the steering is told of it.

Owns what was told of which node. Must not know limits or budgets.

Theory. A lost node keeps what it was set to until its lease runs out, then its guard puts
back what it found. The lease began to run out when the agent was heard last, which was at
least the grace before the loss was noticed: the earlier end is told, since what is put
back may draw more. A node is back when it is ready and its readings are of after that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eelgrid_controller.steering.events import NodeBack, NodeLeaseEnded, NodeLost

__all__ = ["NodeSeen", "Watched"]


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node at a moment: whether its agent is there, and each holding's limit as read just now, where all is known."""

    is_ready: bool
    limits_w: Mapping[str, float] | None = None


@dataclass(slots=True)
class _Away:
    since_s: float
    is_ended: bool = False


class Watched:
    """The nodes of all steered jobs."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._away: dict[str, _Away] = {}

    def is_away(self, node: str) -> bool:
        """Whether the steering was told that it is lost and not yet that it is back."""
        return node in self._away

    def look(
        self, seen: Mapping[str, NodeSeen], at_s: float, *, lease_s: float
    ) -> list[NodeLost | NodeLeaseEnded | NodeBack]:
        """What is to be told; nodes that are no longer looked at are forgotten."""
        self._away = {name: away for name, away in self._away.items() if name in seen}
        made: list[NodeLost | NodeLeaseEnded | NodeBack] = []
        for name in sorted(seen):
            node, away = seen[name], self._away.get(name)
            if not node.is_ready:
                if away is None:
                    away = self._away[name] = _Away(at_s)
                    made.append(NodeLost(at_s, name))
                if not away.is_ended and at_s - away.since_s >= max(0.0, lease_s - self._grace_s):
                    away.is_ended = True
                    made.append(NodeLeaseEnded(at_s, name))
            elif away is not None and node.limits_w is not None:
                del self._away[name]
                made.append(NodeBack(at_s, name, dict(node.limits_w)))
        return made
