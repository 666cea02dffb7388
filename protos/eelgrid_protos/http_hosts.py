"""Which Host headers an HTTP endpoint answers.

Owns the rule. Must not know what is served.

Theory. A page that a browser shows may have its own name point to another address while it is open (DNS rebinding), and
then read what answers there as its own. The browser still sends the page's name as Host. Nobody else's name leads here
by right: an address as a number cannot be rebound, `localhost` and this machine's own name are no stranger's, and other
names under which it is scraped are the operator's to list. A request without a Host is no browser's.
"""

import ipaddress
import socket
from collections.abc import Iterable

# Names that an operator may list: a service has some aliases, not hundreds.
NAMES_MOST = 64


class HttpHosts:
    """The names of one endpoint: of the address that it listens on, of this machine, and those that are listed."""

    def __init__(self, listen: str, names: Iterable[str] = ()) -> None:
        own = _name_of(listen)
        known = {"localhost", socket.gethostname(), own, *names}
        self._names = frozenset(name.strip().rstrip(".").lower() for name in known) - {""}

    def allows(self, header: str) -> bool:
        """Whether a request with this Host header is answered; `header` is empty where there was none."""
        name = _name_of(header.strip()).rstrip(".").lower()
        return not header.strip() or name in self._names or _is_address(name)


def names_loopback(header: str) -> bool:
    """Whether a Host header is `localhost` or a loopback address: the rule of an endpoint for this machine alone."""
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
