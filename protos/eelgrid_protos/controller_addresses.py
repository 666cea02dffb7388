"""Several addresses of controllers, one of which leads: which to try next, and why the others did not do.

Theory. Of several controllers one leads; any other answers "not the leader" and names who is, as far as it knows. Whoever
calls tries the one that led last, then whom a follower named, then the others in their order; after all have been tried
it pauses, longer each round, at random between half and all of it, so that many callers do not come at once. A call moves
on only where nothing can have been done: it was refused by a follower, or nobody took the connection. A call that was cut
off may have been carried out, and is its caller's to repeat. Agents, eelctl and the Python client have this one rule.

Ingest processes are equals: any of them takes any agent. So each agent has an order of its own, by rendezvous hashing
(Thaler and Ravishankar, 1998) of its node's name with each address: agents spread evenly, those of a lost process spread
over all others, and an address that is added or moved in the list changes the first address of its share alone. Where one
leads, the order only says which is asked first who that is.

Does no I/O and knows no clock; each caller waits by itself.
"""

import random
from collections.abc import Callable, Iterable

from eelgrid_protos.faults import DeadlineExceeded, Fault, NoLeader, NotLeader, Unavailable
from eelgrid_protos.sockets import split_address

try:
    # The same function, without the OpenSSL that `hashlib` loads (4 MB of an agent): `random` does so, too.
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

_PAUSE_FIRST_S = 0.2
_PAUSE_MOST_S = 2.0
_REASON_SHOWN = 200
# gRPC's words where no connection came about, so that nothing was sent.
_NOT_CONNECTED = "failed to connect to all addresses"
_EVERYWHERE = frozenset(("", "0.0.0.0", "::", "*"))  # noqa: S104  # nothing is bound


def is_reachable_name(address: str) -> bool:
    """Whether others can call an address by which a controller listens: one that stands for all of them is none."""
    try:
        host, port = split_address(address)
    except ValueError:
        return False
    return host not in _EVERYWHERE and port > 0


def order_addresses(addresses: Iterable[str], node_name: str) -> tuple[str, ...]:
    """Returns the addresses in the order in which the agent of a node tries them; see the module's theory."""

    def weigh(address: str) -> bytes:
        return blake2b(f"{address} {node_name}".encode(), digest_size=8).digest()

    return tuple(sorted(addresses, key=weigh))


class ControllerAddresses:
    """The controllers that somebody knows, and the one that led last; for any thread."""

    def __init__(self, addresses: Iterable[str], *, may_follow: Callable[[str], bool] = lambda _: True) -> None:
        """`may_follow` is asked before an address is called that only a follower named."""
        self.all = tuple(addresses)
        self.preferred = self.all[0]
        self.may_follow = may_follow
        # A follower answered: these are controllers of which one leads, not ingest processes that are equals.
        self.has_follower = False

    def __str__(self) -> str:
        return ",".join(self.all)

    def skip(self, address: str) -> None:
        """Asks another one first the next time: this one takes connections and does not answer, as a stopped process does."""
        if self.preferred == address and address in self.all:
            self.preferred = self.all[(self.all.index(address) + 1) % len(self.all)]

    def order_for(self, node_name: str) -> "ControllerAddresses":
        """Returns them in the order of one node's agent."""
        return ControllerAddresses(order_addresses(self.all, node_name), may_follow=self.may_follow)

    def begin_search(self) -> "LeaderSearch":
        """Begins a call, or a stream."""
        return LeaderSearch(self)

    def seek_first(self) -> "LeaderSearch | None":
        """Begins a stream to the first address, where another equal one is in use; None if it is the first, or leads."""
        if self.has_follower or self.preferred == self.all[0]:
            return None
        search = LeaderSearch(self)
        search.address = self.all[0]
        return search


class LeaderSearch:
    """The addresses that one call tries, in turn: call `address`, then `succeed`, or move on."""

    def __init__(self, known: ControllerAddresses) -> None:
        self.address = known.preferred
        self.rounds = 0
        self._known = known
        self._tried: set[str] = set()
        # Of each address, why it did not do the last time.
        self._reasons: dict[str, str] = {}

    @property
    def is_choice(self) -> bool:
        """Whether there is more than one address."""
        return len(self._known.all) > 1

    def succeed(self) -> None:
        """The controller at `address` leads."""
        self._known.preferred = self.address
        self._tried.clear()
        self._reasons.clear()
        self.rounds = 0

    def note(self, reason: str) -> str:
        """Takes note of why the present address does not do; returns that, or of several addresses why none of them did."""
        self._reasons[self.address] = " ".join(reason.split())[:_REASON_SHOWN]
        return reason if len(self._reasons) == 1 else self._describe()

    def _describe(self) -> str:
        tried = "; ".join(f"{address}: {why}" for address, why in self._reasons.items())
        return f"no controller leads of those that were tried ({tried})"

    def move_on(self, reason: str, leader: str = "", *, jitter: Callable[[], float] = random.random) -> float | None:
        """Goes on to the next address; returns how long to pause before, in seconds, and None if there is no other.

        `leader` is whom the present one named.
        """
        self.note(reason)
        self._tried.add(self.address)
        everybody = self._known.all
        if leader and leader not in self._tried and (leader in everybody or self._may_follow(leader)):
            self.address = leader
            return 0.0
        at = everybody.index(self.address) if self.address in everybody else -1
        following = everybody[at + 1 :] + everybody[: at + 1]
        for address in following:
            if address not in self._tried:
                self.address = address
                return 0.0
        self._tried.clear()
        if not self.is_choice:
            self.address = everybody[0]
            return None
        self.address = following[0]
        self.rounds += 1
        longest_s = min(_PAUSE_MOST_S, _PAUSE_FIRST_S * 2.0 ** min(self.rounds - 1, 30))
        return longest_s * (1.0 - 0.5 * jitter())

    def _may_follow(self, address: str) -> bool:
        return is_reachable_name(address) and self._known.may_follow(address)

    def after_call(self, fault: Exception, *, jitter: Callable[[], float] = random.random) -> float | None:
        """As `move_on`, for a call that failed; None also where it may have been carried out."""
        if isinstance(fault, DeadlineExceeded):
            self._known.skip(self.address)
        if isinstance(fault, NotLeader):
            return self.move_on(fault.message, fault.leader, jitter=jitter)
        if isinstance(fault, Unavailable) and _NOT_CONNECTED in fault.message and self.is_choice:
            return self.move_on(fault.message.rpartition(": ")[2], jitter=jitter)
        return None

    def describe_failure(self, fault: Fault) -> Fault:
        """Returns the error for a call that ends with this fault: of several addresses, why none did."""
        if (
            not self._reasons
            or not isinstance(fault, Unavailable | DeadlineExceeded)
            or not (self.is_choice or len(self._reasons) > 1)
        ):
            return fault
        return NoLeader(self._describe())
