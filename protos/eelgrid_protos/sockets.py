"""Addresses and sockets: HOST:PORT, the Host names that an endpoint answers to, open files, and accepted connections.

gRPC has no call that ends one connection of a server, so `end_accepted` ends it beneath gRPC, as if the other side had
gone. `/dev/fd` lists our descriptors. Each is duplicated before it is looked at, and a duplicate stays the same
socket whatever happens to the number it came from; so nothing is ended but what was looked at. shutdown(2) acts on
the connection, not on the descriptor, which stays its owner's to close: the owner reads an end and clears up.

`HttpHosts` guards against DNS rebinding: a page that a browser shows may have its own name point to another address
while it is open, and then read what answers there as its own. The browser still sends the page's name as Host. A
numeric address cannot be rebound, `localhost` and this machine's own name belong to no stranger, and other names under
which an endpoint is scraped are the operator's to list. A request without a Host does not come from a browser.
"""

import contextlib
import ipaddress
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

# Host and port of the other side.
PeerAddress = tuple[str, int]
_FOLDER = Path("/dev/fd")
_MAPPED = "::ffff:"
# A million, as systemd's default for its own: each costs a kernel's kilobyte only when it is used.
_DESCRIPTORS_MOST = 1 << 20
# Of all descriptors, those that no gRPC connection takes: journal, ledger, metrics, probes and what they write to.
_KEPT_RATIO = 0.2


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT, with or without brackets; raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{address!r} is not an address; write HOST:PORT, for example 127.0.0.1:9466")
    return host.strip("[]"), int(port)


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files to the hard one, and returns it; shells and units set it to 1,024 for select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_MOST if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def count_connections_most() -> int:
    """Returns how many connections one gRPC server may have, leaving descriptors for the rest of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS_MOST if soft == resource.RLIM_INFINITY else min(soft, _DESCRIPTORS_MOST)
    return int(most * (1.0 - _KEPT_RATIO))


def parse_peer(text: str) -> PeerAddress:
    """Parses a peer as gRPC writes it: `ipv4:127.0.0.1:50000`, `ipv6:%5B::1%5D:50000`; ("", 0) if it has no port."""
    kind, _, rest = text.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in {"ipv4", "ipv6"} or not port.isdecimal():
        return "", 0
    return host.strip("[]").removeprefix(_MAPPED).partition("%")[0], int(port)


def count_descriptors() -> int:
    """Counts the descriptors of this process: the folder's size says how many since Linux 6.2, in a microsecond."""
    return _FOLDER.stat().st_size or sum(1 for _ in os.scandir(_FOLDER))


def _connections(port: int) -> Iterator[tuple[PeerAddress, socket.socket]]:
    """Established connections to our port; the caller uses each before it takes the next."""
    for name in [one.name for one in os.scandir(_FOLDER)]:
        try:
            copy = os.dup(int(name))
        except (OSError, ValueError):
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=copy) as one:
            if one.family not in {socket.AF_INET, socket.AF_INET6} or one.type != socket.SOCK_STREAM:
                continue
            if one.getsockname()[1] != port:
                continue
            # Raises for the listener itself, which has no other side.
            host, other, *_ = one.getpeername()
            yield (host.removeprefix(_MAPPED).partition("%")[0], other), one


def list_accepted(port: int) -> list[PeerAddress]:
    """Lists the peers that are connected to our port."""
    return [peer for peer, _ in _connections(port)]


def end_accepted(port: int, chosen: Callable[[PeerAddress], bool]) -> int:
    """Ends the chosen connections to our port and returns how many; may run in any thread."""
    ended = 0
    for peer, one in _connections(port):
        if chosen(peer):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


# Names that an operator may list: a service has some aliases, not hundreds.
NAMES_MOST = 64


class HttpHosts:
    """The Host names that an endpoint answers to: of its address, of this machine, and those that are listed."""

    def __init__(self, listen: str, names: Iterable[str] = ()) -> None:
        own = _name_of(listen)
        known = {"localhost", socket.gethostname(), own, *names}
        self._names = frozenset(name.strip().rstrip(".").lower() for name in known) - {""}

    def allows(self, header: str) -> bool:
        """Returns whether a request with this Host header is answered; `header` is empty if there is none."""
        name = _name_of(header.strip()).rstrip(".").lower()
        return not header.strip() or name in self._names or _is_address(name)


def names_loopback(header: str) -> bool:
    """Returns whether a Host header is `localhost` or a loopback address: the rule of an endpoint for this machine alone."""
    name = _name_of(header.strip()).lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name_of(host: str) -> str:
    """The name or address without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdecimal() or not port) and ":" not in name else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
