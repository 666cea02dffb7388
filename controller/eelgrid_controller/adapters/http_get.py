"""One page over HTTP: a GET that ends in time, in bounds, with the bytes or with a reason.

Owns the bounds and the little of HTTP/1.1 that a page of metrics needs. Must not know
metrics, services or when to ask.

Theory. Whoever may submit work may name an address, so the client does the least: GET of
http and https alone, no redirect, no credentials, no proxy, one connection for each page,
nothing sent to an address of link scope (where clouds keep their credentials) and nothing
of an answer repeated in a reason. A page that came in part is no page: a length that is
not reached, a chunk that breaks off and a gzip stream without its end are refused. Bytes
are counted twice, as they come and as they unpack, so that a small answer cannot become a
large one.

Source: RFC 9110 and RFC 9112.
"""

import asyncio
import ipaddress
import re
import ssl
import zlib
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from urllib.parse import urlsplit

__all__ = ["Address", "Bounds", "Failure", "Getter", "PageRefused", "address_of"]

_HEAD_BYTES_MOST = 32 * 1024
_URL_MOST = 2048
_PIECE = 64 * 1024
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: .*)?\Z", re.DOTALL)
_OUTSIDE = re.compile(r"[^\x21-\x7e]")  # what no URL on the wire has: spaces, line ends, other letters
_PORTS = {"http": 80, "https": 443}


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
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme == "https", parts.hostname, port or _PORTS[parts.scheme], target)


class Getter:
    """Gets pages within its bounds."""

    def __init__(self, bounds: Bounds | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        """`tls` says whom to trust; what the system trusts without it."""
        self._bounds = bounds or Bounds()
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
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=self._tls if address.is_secure else None, limit=_HEAD_BYTES_MOST
                )
        except TimeoutError:
            raise PageRefused(f"no connection in {connect_s:g} s", Failure.TIMEOUT) from None
        try:
            _check_peer(writer.get_extra_info("peername")[0])
            writer.write(_request(address))
            await writer.drain()
            return await _answer(reader, self._bounds.bytes_most)
        finally:
            # Nothing more is wanted of the peer, not even its good-bye.
            writer.transport.abort()


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


def _check_peer(host: str) -> None:
    """Nothing is sent to an address of link scope or to many at once."""
    peer = ipaddress.ip_address(host.partition("%")[0])
    if peer.is_link_local or peer.is_multicast:
        raise PageRefused("the address is of link scope or multicast", Failure.ADDRESS)


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
