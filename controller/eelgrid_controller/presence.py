"""Which agents are here, and since when the others are away.

Owns the grace: a node whose agent is away counts as lost only when its grace
has run out, so a quick reconnect is no event and moves nothing. Must not know
streams, clocks or the state of the cluster; times are arguments, monotonic.

After a restart of the controller every node of the journal is away with a
longer grace. Until it ends the node keeps the state that the journal gave it:
marking a thousand nodes lost and ready again within seconds would be two
thousand entries that say nothing. New work may be placed on such a node for
those seconds; its agent gets the plan when it comes, and if it does not come
in time the node is lost and offered nothing more.
"""

__all__ = ["Presence"]


class Presence:
    """Agents here, and deadlines of those away."""

    def __init__(self) -> None:
        self._here: set[str] = set()
        self._deadlines: dict[str, float] = {}

    @property
    def connected(self) -> int:
        """How many agents are here."""
        return len(self._here)

    def arrived(self, node_name: str) -> None:
        """The node's agent is here."""
        self._here.add(node_name)
        self._deadlines.pop(node_name, None)

    def left(self, node_name: str, *, deadline_s: float) -> None:
        """The node's agent is away, and counts as lost from the deadline on."""
        self._here.discard(node_name)
        self._deadlines[node_name] = deadline_s

    def retry(self, node_name: str, *, deadline_s: float) -> None:
        """Name the node again at the deadline, unless its agent came in between."""
        if node_name not in self._here:
            self._deadlines[node_name] = deadline_s

    def expired(self, *, now_s: float) -> tuple[str, ...]:
        """Nodes whose grace has run out; each is named once."""
        names = tuple(name for name, deadline_s in self._deadlines.items() if deadline_s <= now_s)
        for name in names:
            del self._deadlines[name]
        return names
