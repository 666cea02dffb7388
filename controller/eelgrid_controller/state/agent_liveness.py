"""Agent liveness: which agents are connected, when disconnected nodes count as lost, and limits on new nodes.

Owns the grace period: a node whose agent is disconnected counts as lost only when its grace has run out, so a quick
reconnect is no event and moves nothing. Must not know streams, clocks or the state of the cluster; times are
arguments, monotonic.

After a restart of the controller every node of the journal is disconnected with a longer grace. Until it ends the
node keeps the state that the journal gave it: marking a thousand nodes lost and ready again within seconds would
write two thousand entries without information. New work may be placed on such a node meanwhile; its agent receives
the plan when it connects.
"""

from collections import OrderedDict
from collections.abc import Iterable

from eelgrid_protos.faults import ResourceExhausted

# A wall clock that jumps ahead must not expire every lost node at once: a node must be found expired twice, this far
# apart.
EXPIRY_CONFIRM_S = 600.0
# Window of the limits on new node names.
REGISTRATION_WINDOW_S = 3600.0
# Certificates or addresses with a counter of their own; the least recently seen is removed first.
_PEERS_MOST = 4096


class AgentLiveness:
    """Tracks connected agents, and the deadlines of disconnected ones."""

    def __init__(self) -> None:
        self._here: set[str] = set()
        self._deadlines: dict[str, float] = {}

    @property
    def connected(self) -> int:
        """Number of connected agents."""
        return len(self._here)

    def mark_connected(self, node_name: str) -> None:
        """Records that the node's agent has connected."""
        self._here.add(node_name)
        self._deadlines.pop(node_name, None)

    def mark_disconnected(self, node_name: str, *, deadline_s: float) -> None:
        """Records that the node's agent has disconnected; the node counts as lost from the deadline."""
        self._here.discard(node_name)
        self._deadlines[node_name] = deadline_s

    def schedule_recheck(self, node_name: str, *, deadline_s: float) -> None:
        """Reports the node again at the deadline, unless its agent connects before."""
        if node_name not in self._here:
            self._deadlines[node_name] = deadline_s

    def pop_expired(self, *, now_s: float) -> tuple[str, ...]:
        """Returns nodes whose grace period has expired, each once, and stops tracking them."""
        names = tuple(name for name, deadline_s in self._deadlines.items() if deadline_s <= now_s)
        for name in names:
            del self._deadlines[name]
        return names


class LostNodeExpiry:
    """Decides which lost nodes to remove; none if `keep_s` is 0."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        # A node without a known time of loss counts as lost from the first check.
        self._began_ns: int | None = None
        self._seen: dict[str, float] = {}

    def select_expired(self, lost: Iterable[tuple[int, str]], *, now_ns: int, now_s: float) -> tuple[str, ...]:
        """Returns those of (lost_ns, name) that have expired by the wall clock and, for long enough, by the monotonic clock."""
        if not self._keep_s:
            return ()
        if self._began_ns is None:
            self._began_ns = now_ns
        until_ns = now_ns - int(self._keep_s * 1e9)
        due = [name for lost_ns, name in lost if (lost_ns or self._began_ns) <= until_ns]
        self._seen = {name: self._seen.get(name, now_s) for name in due}
        confirm_s = min(EXPIRY_CONFIRM_S, self._keep_s)
        return tuple(name for name, seen_s in self._seen.items() if now_s - seen_s >= confirm_s)


class RegistrationRefused(ResourceExhausted):
    """Too many new nodes registered; `limit` is `peer` or `all`."""

    def __init__(self, limit: str, message: str) -> None:
        self.limit = limit
        super().__init__(message)


class _Bucket:
    """Token bucket: allows a number of registrations per window, in a burst or one by one."""

    def __init__(self, most: int, now_s: float) -> None:
        self._most = most
        self._left = float(most)
        self._at_s = now_s

    def available(self, now_s: float) -> float:
        """Returns how many registrations are allowed now."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._most / REGISTRATION_WINDOW_S)
        self._at_s = now_s
        return self._left

    def consume(self) -> None:
        """Counts one registration."""
        self._left -= 1.0


class RegistrationLimiter:
    """Limits how many new nodes may register per hour: from one certificate or address, and in total."""

    def __init__(self, peer_most: int, *, now_s: float) -> None:
        self._peer_most = peer_most
        # Leaves as many again for all other peers when one has exhausted its limit.
        self._all_most = 2 * peer_most
        self._all = _Bucket(self._all_most, now_s)
        self._peers: OrderedDict[str, _Bucket] = OrderedDict()

    def register_node(self, node_name: str, peer: str, *, now_s: float) -> None:
        """Counts the registration of a new node; raises RegistrationRefused."""
        bucket = self._peers.setdefault(peer, _Bucket(self._peer_most, now_s))
        self._peers.move_to_end(peer)
        while len(self._peers) > _PEERS_MOST:
            self._peers.popitem(last=False)
        if bucket.available(now_s) < 1.0:
            raise RegistrationRefused(
                "peer",
                f"node {node_name} is new, and {peer} has registered {self._peer_most} new nodes within an hour, which "
                "is the limit (--registrations); give each agent a certificate of its own node, or wait",
            )
        if self._all.available(now_s) < 1.0:
            raise RegistrationRefused(
                "all",
                f"node {node_name} is new, and {self._all_most} new nodes were registered within an hour, which is "
                "twice the limit of one certificate (--registrations); wait, or raise it",
            )
        bucket.consume()
        self._all.consume()
