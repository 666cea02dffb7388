"""Scraper of services and jobs: fetches their metrics pages at a fixed interval, each at its own offset.

Owns the HTTP client, which is bounded in time and bytes and refuses forbidden addresses, and the schedule of rounds.
Must not know what the samples mean.
"""

import asyncio
import ipaddress
import logging
import re
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from eelgrid_controller.objectives.services.service_metrics import (
    ExpositionPage,
    ScrapeRound,
    ScrapeTarget,
    parse_exposition,
)
from eelgrid_controller.profiles.points import MetricsUnreadable

_HEAD_BYTES_MOST = 32 * 1024
_URL_MOST = 2048
_PIECE = 64 * 1024
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: .*)?\Z", re.DOTALL)
_OUTSIDE = re.compile(r"[^\x21-\x7e]")  # not allowed in a URL on the wire: spaces, line ends, non-ASCII letters
_PORTS = {"http": 80, "https": 443}
ResolveHost = Callable[[str, int], Awaitable[list[str]]]

# In addition to 169.254.0.0/16, which is link-local: AWS over IPv6, Alibaba, Azure's wire server, Oracle's classic
# cloud.
_METADATA = tuple(
    map(ipaddress.ip_network, ("fd00:ec2::/32", "fd20:ce::/32", "100.100.100.200", "168.63.129.16", "192.0.0.0/24"))
)
# NAT64: an IPv4 address in the last 32 bits, for the well-known and the local-use prefix.
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48")))
# By name, since each cloud may change the addresses that they resolve to.
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "metadata.azure.internal", "instance-data"})
_METADATA_ENDS = (".metadata.google.internal", ".metadata.azure.internal", "instance-data.ec2.internal")


class FetchFailure(Enum):
    """Kind of failure of a fetch, for metrics."""

    ADDRESS = "address"
    CONNECTION = "connection"
    TLS = "tls"
    TIMEOUT = "timeout"
    STATUS = "status"
    ANSWER = "answer"  # not HTTP, or incomplete
    SIZE = "size"
    CONTENT = "content"  # not a metrics page


class FetchError(Exception):
    """A page could not be fetched; the reason is short and quotes nothing of the answer."""

    def __init__(self, reason: str, kind: FetchFailure = FetchFailure.ANSWER) -> None:
        self.kind = kind
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Bounds of one GET."""

    connect_s: float = 2.0
    whole_s: float = 5.0  # includes connecting
    # A page of vLLM has 0.1 MB with one model, one of Ray Serve 1 MB with a hundred deployments.
    bytes_most: int = 4 * 1024 * 1024


class HttpAddress(NamedTuple):
    """Scheme, host, port and target of a URL."""

    is_secure: bool
    host: str
    port: int
    target: str  # path and query

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_secure else "http"] else f"{host}:{self.port}"


def parse_address(url: str) -> HttpAddress:
    """Parses a URL; raises FetchError that says what is wrong with it."""
    if len(url) > _URL_MOST or _OUTSIDE.search(url):
        raise FetchError(
            f"the address is longer than {_URL_MOST}, or has a space or a letter beyond ASCII", FetchFailure.ADDRESS
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise FetchError("the address has a host or a port that is none", FetchFailure.ADDRESS) from None
    if parts.scheme not in _PORTS:
        raise FetchError("the address is not one of http:// or https://", FetchFailure.ADDRESS)
    if not parts.hostname or parts.username is not None or parts.password is not None:
        raise FetchError("the address names no host, or a user: write http://host:port/metrics", FetchFailure.ADDRESS)
    name = parts.hostname.rstrip(".")
    if name in _METADATA_NAMES or name.endswith(_METADATA_ENDS):
        raise FetchError("the address is one where clouds keep credentials", FetchFailure.ADDRESS)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return HttpAddress(parts.scheme == "https", parts.hostname, port or _PORTS[parts.scheme], target)


class HttpFetcher:
    """Fetches pages within the bounds of `FetchLimits`."""

    def __init__(
        self,
        bounds: FetchLimits | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        allows_loopback: bool = False,
        resolve: ResolveHost | None = None,
    ) -> None:
        """Creates a fetcher; `tls` says whom to trust (default: the system's authorities), `resolve` looks up names."""
        self._bounds = bounds or FetchLimits()
        self._allows_loopback = allows_loopback
        self._resolve = resolve or _resolve
        self._tls = tls

    async def get(self, url: str) -> bytes:
        """Returns the page at a URL, decompressed; raises FetchError if it cannot be fetched completely."""
        address = parse_address(url)
        whole_s = self._bounds.whole_s
        try:
            async with asyncio.timeout(whole_s):
                return await self._get(address)
        except TimeoutError:
            raise FetchError(f"no whole answer in {whole_s:g} s", FetchFailure.TIMEOUT) from None
        except asyncio.IncompleteReadError:
            raise FetchError("the answer broke off") from None
        except ssl.SSLError as error:
            raise FetchError(f"no TLS: {error.reason or 'the handshake failed'}", FetchFailure.TLS) from None
        except (asyncio.LimitOverrunError, ValueError):
            raise FetchError("the answer is no HTTP") from None
        except OSError as error:
            raise FetchError(
                f"no connection: {error.strerror or type(error).__name__}", FetchFailure.CONNECTION
            ) from None

    async def _get(self, address: HttpAddress) -> bytes:
        if address.is_secure and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)  # reads the system's authorities: 20 ms
        connect_s = self._bounds.connect_s
        try:
            async with asyncio.timeout(connect_s):
                reader, writer = await self._connect(address)
        except TimeoutError:
            raise FetchError(f"no connection in {connect_s:g} s", FetchFailure.TIMEOUT) from None
        try:
            writer.write(_request(address))
            await writer.drain()
            return await _read_answer(reader, self._bounds.bytes_most)
        finally:
            # Nothing more is expected from the peer, not even its close.
            writer.transport.abort()

    async def _connect(self, address: HttpAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to one of the host's addresses that may be fetched; raises FetchError."""
        refusal = failure = None
        for host in await self._resolve(address.host, address.port):
            refusal = find_address_refusal(host, allows_loopback=self._allows_loopback)
            if refusal is not None:
                continue
            try:
                return await asyncio.open_connection(
                    host,
                    address.port,
                    limit=_HEAD_BYTES_MOST,
                    ssl=self._tls if address.is_secure else None,
                    server_hostname=address.host if address.is_secure else None,
                )
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        raise FetchError(f"the address is {refusal or 'none'}", FetchFailure.ADDRESS)


def _request(address: HttpAddress) -> bytes:
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
    """Resolves a name to its addresses, each once, in the resolver's order; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _inside(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Returns the IPv4 addresses embedded in an IPv6 address (mapped, 6to4, Teredo, NAT64, compatible)."""
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address.sixtofour]
    if address.teredo is not None:
        return list(address.teredo)
    if any(address in network for network in _TRANSLATED) or 1 < int(address) < 1 << 32:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return []


def find_address_refusal(host: str, *, allows_loopback: bool) -> str | None:
    """Returns why no page may be fetched from an address, as the end of a phrase; None if it may."""
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


async def _read_answer(reader: asyncio.StreamReader, bytes_most: int) -> bytes:
    head, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    status = _STATUS.match(head)
    if status is None:
        raise FetchError("the answer is no HTTP/1.1")
    if status[1] != b"200":
        code = status[1].decode()
        hint = "; give the address that it leads to" if code.startswith("3") else ""
        raise FetchError(f"status {code}{hint}", FetchFailure.STATUS)
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    body = _Body(reader, bytes_most, fields.get(b"content-encoding", b"identity").lower())
    if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
        return await body.chunked()
    length = fields.get(b"content-length")
    return await (body.to_the_end() if length is None else body.of_length(length))


class _Body:
    """Reads a body in pieces, bounded in bytes, and decompresses it."""

    def __init__(self, reader: asyncio.StreamReader, bytes_most: int, coding: bytes) -> None:
        if coding not in {b"identity", b"gzip", b"x-gzip", b""}:
            raise FetchError("a coding that was not asked for")
        self._reader = reader
        self._most = bytes_most
        self._came = 0
        self._unpack = zlib.decompressobj(wbits=31) if b"gzip" in coding else None
        self._pieces: list[bytes] = []
        self._unpacked = 0

    def _too_much(self) -> FetchError:
        return FetchError(f"more than {self._most} bytes", FetchFailure.SIZE)

    def _feed(self, piece: bytes) -> None:
        self._came += len(piece)
        if self._unpack is not None:
            try:
                piece = self._unpack.decompress(piece, self._most + 1 - self._unpacked)
            except zlib.error:
                raise FetchError("its gzip is broken") from None
        self._unpacked += len(piece)
        if self._came > self._most or self._unpacked > self._most:
            raise self._too_much()
        self._pieces.append(piece)

    def _whole(self) -> bytes:
        if self._unpack is not None and (not self._unpack.eof or self._unpack.unused_data):
            raise FetchError("its gzip broke off, or is of several parts")
        return b"".join(self._pieces)

    async def _exactly(self, size: int) -> None:
        if size > self._most - self._came:
            raise self._too_much()
        while size:
            piece = await self._reader.readexactly(min(size, _PIECE))
            size -= len(piece)
            self._feed(piece)

    async def of_length(self, length: bytes) -> bytes:
        """Reads a body with a Content-Length."""
        if not length.isdigit() or len(length) > 12:
            raise FetchError("the answer is no HTTP: a length that is none")
        await self._exactly(int(length))
        return self._whole()

    async def chunked(self) -> bytes:
        """Reads a chunked body; trailers are not read."""
        while True:
            line = (await self._reader.readuntil(b"\r\n"))[:-2].partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", line):
                raise FetchError("the answer is no HTTP: a chunk without its size")
            size = int(line, 16)
            if size == 0:
                return self._whole()
            await self._exactly(size)
            if await self._reader.readexactly(2) != b"\r\n":
                raise FetchError("the answer is no HTTP: a chunk without its end")

    async def to_the_end(self) -> bytes:
        """Reads a body that ends with the connection."""
        while piece := await self._reader.read(_PIECE):
            self._feed(piece)
        return self._whole()


# Pages fetched per interval: 1.2 ms each to parse and to turn into windows (measured, 940 lines), so that this many
# take a third of a core at 15 s.
PAGES_MOST = 4_000
_AT_ONCE = 64
_IDLE_S = 60.0
_FAILURES = 3
_SELDOM = 4


def next_due_s(name: str, now_s: float, every_s: float) -> float:
    """Returns when a name is due next after `now_s`: once per interval, at an offset hashed from the name."""
    offset_s = zlib.crc32(name.encode()) / 2**32 * every_s
    return ((now_s - offset_s) // every_s + 1.0) * every_s + offset_s


def parse_samples(page: bytes, names: frozenset[str], at_s: float) -> ExpositionPage:
    """Parses the wanted samples of a page; raises FetchError if it is invalid or cut off."""
    try:
        text = page.decode()
    except UnicodeDecodeError:
        raise FetchError("the page is no text", FetchFailure.CONTENT) from None
    if text and not text.endswith("\n"):
        raise FetchError("the page breaks off in a line")
    prefixes = tuple(names)
    lines = [line for line in text.split("\n") if line.startswith(prefixes)]
    try:
        found = parse_exposition("\n".join(lines) if lines else text, at_s)
    except MetricsUnreadable as error:
        # The line itself is not quoted: reasons go to operators and logs, and the page belongs to a user.
        raise FetchError(f"{error.field} is not in Prometheus' text format", FetchFailure.CONTENT) from None
    return ExpositionPage(
        at_s, MappingProxyType({name: found.samples[name] for name in found.samples if name in names})
    )


class Scraper:
    """Fetches the pages of all targets until it is stopped; `set_targets` changes the targets."""

    def __init__(
        self,
        get: Callable[[str], Awaitable[bytes]],
        *,
        every_s: float,
        monotonic_s: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        """Creates a scraper; `get` returns a page or raises FetchError, within a time bounded by itself."""
        self.every_s = every_s
        self.pages = 0  # fetched since the start
        self.failures = dict.fromkeys(FetchFailure, 0)
        self._get = get
        self._monotonic_s = monotonic_s
        self._log = log
        self._asked: dict[str, ScrapeTarget] = {}
        self._due_s: dict[str, float] = {}
        self._rounds: dict[str, ScrapeRound] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, tuple[int, str]] = {}  # by URL: consecutive failures, and the reason
        self._changed = asyncio.Event()
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="pages")

    @property
    def target_count(self) -> int:
        """Number of pages that are fetched per interval."""
        return sum(len(one.urls) for one in self._asked.values())

    def set_targets(self, asked: Mapping[str, ScrapeTarget]) -> frozenset[str]:
        """Replaces the targets, by name; returns the names that exceed the limit and are not scraped."""
        now_s, pages = self._monotonic_s(), 0
        kept: dict[str, ScrapeTarget] = {}
        for name, one in asked.items():
            if pages + len(one.urls) <= PAGES_MOST:
                pages += len(one.urls)
                kept[name] = one
        for name in self._asked.keys() - kept.keys():
            del self._due_s[name]
            self._rounds.pop(name, None)
            if name in self._under_way:
                self._under_way[name].cancel()
        for name in kept.keys() - self._asked.keys():
            self._due_s[name] = next_due_s(name, now_s, self.every_s)
            self._changed.set()
        self._asked = kept
        if self._failed:
            urls = {url for one in kept.values() for url in one.urls.values()}
            self._failed = {url: failed for url, failed in self._failed.items() if url in urls}
        return frozenset(asked.keys() - kept.keys())

    def collect_rounds(self) -> dict[str, ScrapeRound]:
        """Returns the rounds completed since the previous call, by name."""
        taken, self._rounds = self._rounds, {}
        return taken

    async def run(self) -> None:
        """Scrapes until cancelled."""
        try:
            while True:
                self._changed.clear()
                now_s = self._monotonic_s()
                for name in [name for name, due_s in self._due_s.items() if due_s <= now_s]:
                    self._due_s[name] = next_due_s(name, now_s, self.every_s)
                    if name not in self._under_way:
                        self._start_round(name, now_s)
                wait_s = min(self._due_s.values(), default=now_s + _IDLE_S) - self._monotonic_s()
                try:
                    async with asyncio.timeout(max(0.0, wait_s)):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            rounds = list(self._under_way.values())
            for task in rounds:
                task.cancel()
            await asyncio.gather(*rounds, return_exceptions=True)
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _start_round(self, name: str, now_s: float) -> None:
        task = asyncio.create_task(self._round(name, self._asked[name], now_s))
        self._under_way[name] = task
        task.add_done_callback(lambda done: self._on_round_end(name, done))

    def _on_round_end(self, name: str, done: asyncio.Task[None]) -> None:
        if self._under_way.get(name) is done:
            del self._under_way[name]
        if not done.cancelled() and (error := done.exception()) is not None:
            self._log.error("workload=%s scrape=broken error=%r", name, error)

    async def _round(self, name: str, asked: ScrapeTarget, now_s: float) -> None:
        keys = list(asked.urls.items())
        pages = await asyncio.gather(*(self._page(url, asked.names) for _, url in keys))
        if self._asked.get(name) is not None:
            self._rounds[name] = ScrapeRound(now_s, dict(zip(keys, pages, strict=True)))

    async def _page(self, url: str, names: frozenset[str]) -> ExpositionPage | str:
        """Returns one parsed page, or why there is none."""
        failures, why = self._failed.get(url, (0, ""))
        if failures >= _FAILURES and (failures - _FAILURES + 1) % _SELDOM:
            self._failed[url] = (failures + 1, why)
            return why
        try:
            async with self._at_once:
                at_s = self._monotonic_s()
                page = await self._get(url)
            found = await asyncio.get_running_loop().run_in_executor(self._reader, parse_samples, page, names, at_s)
        except FetchError as error:
            self.failures[error.kind] += 1
            self._failed[url] = (failures + 1, str(error))
            return str(error)
        self.pages += 1
        self._failed.pop(url, None)
        return found
