"""One page over HTTP: a GET that ends in time, in bounds, with the bytes or with a reason.

Owns the bounds and the little of HTTP/1.1 that a page of metrics needs. Must not know
metrics, services or when to ask.

Theory. Whoever may submit work may name an address, so the client does the least: GET of
http and https alone, no redirect, no credentials, no proxy, one connection for each page,
and nothing of an answer repeated in a reason. A name is resolved once, what it resolves to
is judged, and just that is connected to, so that no second answer of a name server comes
between. Judged is the IPv4 address inside of an IPv6 address, too, where there is one:
nothing goes to where clouds keep their credentials, however it is written. A page that came in part is no page: a length that is
not reached, a chunk that breaks off and a gzip stream without its end are refused. Bytes
are counted twice, as they come and as they unpack, so that a small answer cannot become a
large one.

Source: RFC 9110 and RFC 9112; RFC 6890 for addresses, RFC 6052, 3056 and 4380 for those inside of others.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from urllib.parse import urlsplit

__all__ = ["Address", "Bounds", "Failure", "Getter", "PageRefused", "address_of", "refusal_of"]

_HEAD_BYTES_MOST = 32 * 1024
_URL_MOST = 2048
_PIECE = 64 * 1024
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: .*)?\Z", re.DOTALL)
_OUTSIDE = re.compile(r"[^\x21-\x7e]")  # what no URL on the wire has: spaces, line ends, other letters
_PORTS = {"http": 80, "https": 443}
Resolve = Callable[[str, int], Awaitable[list[str]]]

# Beside 169.254.0.0/16, which is of link scope: AWS by IPv6, Alibaba, Azure's wire server, Oracle's classic cloud.
_METADATA = tuple(
    map(ipaddress.ip_network, ("fd00:ec2::/32", "fd20:ce::/32", "100.100.100.200", "168.63.129.16", "192.0.0.0/24"))
)
# Of NAT64: an IPv4 address in the last 32 bits, for the well-known and the local-use prefix.
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48")))
# By name, since what they resolve to is each cloud's to change.
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "metadata.azure.internal", "instance-data"})
_METADATA_ENDS = (".metadata.google.internal", ".metadata.azure.internal", "instance-data.ec2.internal")


class Failure(Enum):
    """What kind of thing stood between us and a page, for those who count."""

    ADDRESS = "address"
    CONNECTION = "connection"
    TLS = "tls"
    TIMEOUT = "timeout"
    STATUS = "status"
    ANSWER = "answer"  # no HTTP, or not whole
    SIZE = "size"
    CONTENT = "content"  # no page of metrics


class PageRefused(Exception):
    """Why a page could not be had, in a few words that repeat nothing of an answer."""

    def __init__(self, reason: str, kind: Failure = Failure.ANSWER) -> None:
        self.kind = kind
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one GET may cost."""

    connect_s: float = 2.0
    whole_s: float = 5.0  # connecting included
    # A page of vLLM has 0.1 MB with one model, one of Ray Serve 1 MB with a hundred deployments.
    bytes_most: int = 4 * 1024 * 1024


class Address(NamedTuple):
    """Where a page is."""

    is_secure: bool
    host: str
    port: int
    target: str  # path and query

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_secure else "http"] else f"{host}:{self.port}"


def address_of(url: str) -> Address:
    """The address in a URL; PageRefused says what is wrong with it."""
    if len(url) > _URL_MOST or _OUTSIDE.search(url):
        raise PageRefused(
            f"the address is longer than {_URL_MOST}, or has a space or a letter beyond ASCII", Failure.ADDRESS
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise PageRefused("the address has a host or a port that is none", Failure.ADDRESS) from None
    if parts.scheme not in _PORTS:
        raise PageRefused("the address is not one of http:// or https://", Failure.ADDRESS)
    if not parts.hostname or parts.username is not None or parts.password is not None:
        raise PageRefused("the address names no host, or a user: write http://host:port/metrics", Failure.ADDRESS)
    name = parts.hostname.rstrip(".")
    if name in _METADATA_NAMES or name.endswith(_METADATA_ENDS):
        raise PageRefused("the address is one where clouds keep credentials", Failure.ADDRESS)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme == "https", parts.hostname, port or _PORTS[parts.scheme], target)


class Getter:
    """Gets pages within its bounds."""

    def __init__(
        self, bounds: Bounds | None = None, *, tls: ssl.SSLContext | None = None, allows_loopback: bool = False,
        resolve: Resolve | None = None,
    ) -> None:  # fmt: skip
        """`tls` says whom to trust; what the system trusts without it. `resolve` gives a name's addresses."""
        self._bounds = bounds or Bounds()
        self._allows_loopback = allows_loopback
        self._resolve = resolve or _resolve
        self._tls = tls

    async def get(self, url: str) -> bytes:
        """The page at a URL, unpacked; PageRefused where it cannot be had whole."""
        address = address_of(url)
        whole_s = self._bounds.whole_s
        try:
            async with asyncio.timeout(whole_s):
                return await self._get(address)
        except TimeoutError:
            raise PageRefused(f"no whole answer in {whole_s:g} s", Failure.TIMEOUT) from None
        except asyncio.IncompleteReadError:
            raise PageRefused("the answer broke off") from None
        except ssl.SSLError as error:
            raise PageRefused(f"no TLS: {error.reason or 'the handshake failed'}", Failure.TLS) from None
        except (asyncio.LimitOverrunError, ValueError):
            raise PageRefused("the answer is no HTTP") from None
        except OSError as error:
            raise PageRefused(f"no connection: {error.strerror or type(error).__name__}", Failure.CONNECTION) from None

    async def _get(self, address: Address) -> bytes:
        if address.is_secure and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)  # reads the system's authorities: 20 ms
        connect_s = self._bounds.connect_s
        try:
            async with asyncio.timeout(connect_s):
                reader, writer = await self._connect(address)
        except TimeoutError:
            raise PageRefused(f"no connection in {connect_s:g} s", Failure.TIMEOUT) from None
        try:
            writer.write(_request(address))
            await writer.drain()
            return await _answer(reader, self._bounds.bytes_most)
        finally:
            # Nothing more is wanted of the peer, not even its good-bye.
            writer.transport.abort()

    async def _connect(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to one of the addresses of the host that pages may be asked of."""
        refusal = failure = None
        for host in await self._resolve(address.host, address.port):
            refusal = refusal_of(host, allows_loopback=self._allows_loopback)
            if refusal is not None:
                continue
            try:
                return await asyncio.open_connection(
                    host, address.port, limit=_HEAD_BYTES_MOST, ssl=self._tls if address.is_secure else None,
                    server_hostname=address.host if address.is_secure else None,
                )  # fmt: skip
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        raise PageRefused(f"the address is {refusal or 'none'}", Failure.ADDRESS)


def _request(address: Address) -> bytes:
    lines = (
        f"GET {address.target} HTTP/1.1",
        f"Host: {address.authority}",
        "User-Agent: eelgrid",
        "Accept: text/plain;version=0.0.4, */*;q=0.1",
        "Accept-Encoding: gzip",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode("ascii")


async def _resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, each once, in the resolver's order; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _inside(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that an IPv6 address stands for."""
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address.sixtofour]
    if address.teredo is not None:
        return list(address.teredo)
    if any(address in network for network in _TRANSLATED) or 1 < int(address) < 1 << 32:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return []


def refusal_of(host: str, *, allows_loopback: bool) -> str | None:
    """What an address is that no page is asked of; None for others."""
    address = ipaddress.ip_address(host.partition("%")[0])
    inner = _inside(address) if isinstance(address, ipaddress.IPv6Address) else []
    for one in (address, *inner):
        if any(one in network for network in _METADATA if network.version == one.version):
            return "one where clouds keep credentials"
        if one.is_link_local or one.is_multicast:
            return "of link scope or multicast"
        if one.is_unspecified or (one.version == 4 and (int(one) >> 24 == 0 or one.is_reserved)):
            return "of no host"
        if one.is_loopback and not allows_loopback:
            return "this machine's own (see --scrape-loopback)"
    return None


async def _answer(reader: asyncio.StreamReader, bytes_most: int) -> bytes:
    head, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    status = _STATUS.match(head)
    if status is None:
        raise PageRefused("the answer is no HTTP/1.1")
    if status[1] != b"200":
        code = status[1].decode()
        hint = "; give the address that it leads to" if code.startswith("3") else ""
        raise PageRefused(f"status {code}{hint}", Failure.STATUS)
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    body = _Body(reader, bytes_most, fields.get(b"content-encoding", b"identity").lower())
    if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
        return await body.chunked()
    length = fields.get(b"content-length")
    return await (body.to_the_end() if length is None else body.of_length(length))


class _Body:
    """Takes the body in pieces, counts and unpacks."""

    def __init__(self, reader: asyncio.StreamReader, bytes_most: int, coding: bytes) -> None:
        if coding not in {b"identity", b"gzip", b"x-gzip", b""}:
            raise PageRefused("a coding that was not asked for")
        self._reader = reader
        self._most = bytes_most
        self._came = 0
        self._unpack = zlib.decompressobj(wbits=31) if b"gzip" in coding else None
        self._pieces: list[bytes] = []
        self._unpacked = 0

    def _too_much(self) -> PageRefused:
        return PageRefused(f"more than {self._most} bytes", Failure.SIZE)

    def _take(self, piece: bytes) -> None:
        self._came += len(piece)
        if self._unpack is not None:
            try:
                piece = self._unpack.decompress(piece, self._most + 1 - self._unpacked)
            except zlib.error:
                raise PageRefused("its gzip is broken") from None
        self._unpacked += len(piece)
        if self._came > self._most or self._unpacked > self._most:
            raise self._too_much()
        self._pieces.append(piece)

    def _whole(self) -> bytes:
        if self._unpack is not None and (not self._unpack.eof or self._unpack.unused_data):
            raise PageRefused("its gzip broke off, or is of several parts")
        return b"".join(self._pieces)

    async def _exactly(self, size: int) -> None:
        if size > self._most - self._came:
            raise self._too_much()
        while size:
            piece = await self._reader.readexactly(min(size, _PIECE))
            size -= len(piece)
            self._take(piece)

    async def of_length(self, length: bytes) -> bytes:
        """A body whose length was told."""
        if not length.isdigit() or len(length) > 12:
            raise PageRefused("the answer is no HTTP: a length that is none")
        await self._exactly(int(length))
        return self._whole()

    async def chunked(self) -> bytes:
        """A body in chunks; trailers are not read."""
        while True:
            line = (await self._reader.readuntil(b"\r\n"))[:-2].partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", line):
                raise PageRefused("the answer is no HTTP: a chunk without its size")
            size = int(line, 16)
            if size == 0:
                return self._whole()
            await self._exactly(size)
            if await self._reader.readexactly(2) != b"\r\n":
                raise PageRefused("the answer is no HTTP: a chunk without its end")

    async def to_the_end(self) -> bytes:
        """A body that ends with the connection."""
        while piece := await self._reader.read(_PIECE):
            self._take(piece)
        return self._whole()
