"""Requests and answers: one bounded pool of connections to one API server.

Owns connections, turns, timeouts and sizes. Must not know verbs or objects, nor try
anything twice (`retry.py` does, where the caller wants it); only refused credentials are
renewed and the request sent once more, and aiohttp sends a GET, PUT or DELETE once more that
met a kept connection which the server had closed.

Theory. At most so many requests are under way at once; the time limit of one begins with
its turn, and an Unreachable that says `is_sent=False` was certainly not carried out.
Watches have turns of their own, so that they never use up those of requests. A connection
whose other end has silently gone is found by TCP keep-alive within half a minute. Answers
are asked for without compression: beside the API server the network is cheaper than its
processor and ours. Every answer, and every event of a watch, is bounded in bytes. After each
piece of a watch nothing is read for `pause_s`: what comes alone comes at once, and in a burst
one look at the connection brings many events, which costs half as much as one look each.

aiohttp and msgspec carry it: a patch costs 0.35 ms of processor here, five times less than
with the HTTP library below lightkube (measured), so that 250 pods in a second take a tenth
of a core and not a half.
"""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from eelgrid_controller.adapters.kubernetes.credentials import Credentials
from eelgrid_controller.adapters.kubernetes.errors import AnswerUnreadable, ClusterError, Unreachable, error_of
from eelgrid_controller.adapters.kubernetes.kubeconfig import Access
from eelgrid_controller.adapters.kubernetes.port import Body

__all__ = ["Asked", "Bounds", "Exchange", "object_of"]

_JSON = "application/json"
_NOTHING: Mapping[str, str] = {}
_GRACE_S = 15.0  # for a watch to be ended by its server after the time that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What calls may cost."""

    request_s: float = 10.0  # whole, from its turn to the last byte; a page of 500 pods needs 0.1 s
    connect_s: float = 3.0
    at_once: int = 32
    watches: int = 64
    answer_bytes: int = 64 * 1024 * 1024
    event_bytes: int = 8 * 1024 * 1024  # etcd's limit is 1.5 MB for an object
    pause_s: float = 0.02  # between two looks at a watch


class Asked(NamedTuple):
    """One request; empty values of the query are left out."""

    method: str
    path: str
    query: Mapping[str, str] = _NOTHING
    body: Body | Sequence[Body] | None = None
    content_type: str = _JSON
    accept: str = _JSON

    @property
    def what(self) -> str:
        """How messages name it."""
        return f"{'watch' if 'watch' in self.query else self.method.lower()} {self.path}"


class Exchange:
    """Asks one API server; made inside a running event loop."""

    def __init__(self, access: Access, bounds: Bounds, agent: str) -> None:
        """`agent` is how the API server's audit log names us."""
        self.bounds = bounds
        self.requests = 0  # since the start
        self._server = access.server
        self._server_name = access.server_name
        self._credentials = Credentials(access, monotonic_s=time.monotonic, now_s=time.time)
        self._turns = asyncio.Semaphore(bounds.at_once)
        self._watches = asyncio.Semaphore(bounds.watches)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=bounds.connect_s)
        self._session = aiohttp.ClientSession(
            # Turns bound the connections.
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket, keepalive_timeout=60.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": agent, "Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Let go of all connections."""
        await self._session.close()

    async def call(self, asked: Asked) -> dict[str, Any]:
        """One request and its answer, which must be an object; the error that the answer is, if it is one."""
        try:
            async with self._turns, asyncio.timeout(self.bounds.request_s), await self._answer(asked) as answer:
                told = await self._bytes(answer, asked)
                if answer.status >= 400:
                    raise _refused(answer, told, asked)
        except TimeoutError as error:
            raise _unreachable(error, asked) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(error, asked) from None
        return object_of(told, asked.what)

    async def lines(self, asked: Asked, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """The lines of an answer as they come, until the server ends it, or a little after the timeout."""
        clock = asyncio.get_running_loop()
        until_s = clock.time() + timeout_s + _GRACE_S
        try:
            async with self._watches:
                async with asyncio.timeout(self.bounds.request_s):
                    answer = await self._answer(asked)
                try:
                    if answer.status >= 400:
                        raise _refused(answer, await self._bytes(answer, asked), asked)
                    rest = b""
                    while True:
                        # The time limit stands around each read and never around the caller, who runs at `yield`.
                        async with asyncio.timeout_at(until_s):
                            piece = await answer.content.readany()
                        if not piece:  # a line that breaks off at the end is dropped
                            return
                        *whole, rest = (rest + piece).split(b"\n")
                        for line in whole:
                            if line:
                                yield line
                        if len(rest) > self.bounds.event_bytes:
                            raise _too_large(asked, self.bounds.event_bytes)
                        await self._pause(answer)
                finally:
                    answer.close()
        except TimeoutError as error:
            if clock.time() < until_s:
                raise _unreachable(error, asked) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(error, asked) from None

    async def _answer(self, asked: Asked) -> aiohttp.ClientResponse:
        """The head of an answer, its body unread; refused credentials are renewed once."""
        if self._session.closed:
            raise Unreachable(f"{asked.what}: the client is closed", is_sent=False)
        data = None if asked.body is None else msgspec.json.encode(asked.body)
        url = URL(self._server + asked.path, encoded=True)
        if query := {name: value for name, value in asked.query.items() if value}:
            url = url.with_query(query)
        for attempt in (1, 2):
            headers, tls = await self._credentials.current()
            headers["Accept"] = asked.accept
            if data is not None:
                headers["Content-Type"] = asked.content_type
            self.requests += 1
            answer = await self._session.request(
                asked.method,
                url,
                data=data,
                headers=headers,
                ssl=True if tls is None else tls,
                server_hostname=self._server_name,
                allow_redirects=False,
                timeout=self._timeout,
            )
            if answer.status != 401 or attempt == 2 or not self._credentials.renew():
                break
            answer.release()
        return answer

    async def _pause(self, answer: aiohttp.ClientResponse) -> None:
        """Leave what comes to the kernel for a moment."""
        transport = None if answer.connection is None else answer.connection.transport
        if transport is None or transport.is_closing():  # all of it has come
            return
        transport.pause_reading()
        await asyncio.sleep(self.bounds.pause_s)
        if not transport.is_closing():
            transport.resume_reading()

    async def _bytes(self, answer: aiohttp.ClientResponse, asked: Asked) -> bytes:
        """The body of an answer, in bounds."""
        most = self.bounds.answer_bytes
        pieces, size = [], 0
        async for piece in answer.content.iter_any():
            size += len(piece)
            if size > most:
                answer.close()
                raise _too_large(asked, most)
            pieces.append(piece)
        return b"".join(pieces)


def _socket(info: Any) -> socket.socket:
    """A socket that finds out within half a minute that its other end has gone."""
    made = socket.socket(info[0], info[1], info[2])
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:  # not everywhere
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def object_of(told: bytes, what: str) -> dict[str, Any]:
    """The JSON object that these bytes are; AnswerUnreadable."""
    try:
        found = msgspec.json.decode(told)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        raise AnswerUnreadable(f"{what}: the answer is no JSON object", "see whether the address is an API server's")
    return found


def _unreachable(error: Exception, asked: Asked) -> Unreachable:
    """No answer; it was certainly not sent where there was no connection."""
    why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    is_sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return Unreachable(f"{asked.what}: {why}", is_sent=is_sent)


def _refused(answer: aiohttp.ClientResponse, told: bytes, asked: Asked) -> ClusterError:
    """The error that an answer is; its body need not be a Status."""
    try:
        status = object_of(told, asked.what)
    except AnswerUnreadable:
        status = {}
    return error_of(answer.status, status, asked.what, answer.headers.get("Retry-After"))


def _too_large(asked: Asked, most: int) -> AnswerUnreadable:
    return AnswerUnreadable(f"{asked.what}: over {most} bytes", "ask for fewer objects with a limit or a selector")
