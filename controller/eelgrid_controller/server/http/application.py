"""HTTP endpoints of the controller: one way to build an application of routes, to listen, and to bound connections.

Metrics and probes, the live page and the admission webhook are routes; each has an `HttpEndpoint` of its own, with its
own address, because who may reach them differs. All run in the event loop of the controller; the probes that must be
answered while that loop is busy are `eelgrid_protos.probes`.

A connection that asks nothing costs others nothing: it ends after `first_request_s`, and of more than
`silent_connections_most` the oldest ends when another comes. What is slower than that has asked: its handler bounds it.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from eelgrid_controller.errors import ControllerConfigError
from eelgrid_protos.probes import PendingConnections
from eelgrid_protos.sockets import split_address
from eelgrid_protos.transport import is_loopback

_BACKLOG = 128
_SHUTDOWN_S = 1.0
# Connections count only once TLS is established.
_HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """What differs between endpoints; `flag` and `name` are for error texts, `example` is a usual address."""

    flag: str
    name: str
    example: str
    # None where each route has its own.
    methods: frozenset[str] | None
    body_bytes_most: int
    # Of the request line and of each header, in bytes.
    line_bytes_most: int = 8190
    # From the connection to the end of its first request's head; TLS has as long before, 10 s at most.
    first_request_s: float
    silent_connections_most: int
    # How long a connection stays open between requests; 0 closes it after each answer.
    keepalive_s: float
    # Beyond them requests are answered 503.
    requests_at_once_most: int = 10_000
    # What to do where others can reach the address and there is no TLS.
    exposed_remedy: str = ""
    # How long a client may take to read an answer; 0 for as long as it likes, as of streams.
    send_s: float = 0.0


class HttpEndpoint:
    """Serves one application on one address."""

    def __init__(
        self,
        settings: EndpointSettings,
        routes: Iterable[web.RouteDef],
        *,
        allows_host: Callable[[str], bool] | None = None,
        host_refusal: str = "",
        refuse: Callable[[int, str], web.Response] | None = None,
        middleware: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`allows_host` judges each Host header, "" where there is none, and `host_refusal` answers one that is refused.

        `refuse` makes the answer of a status and a text where that is not to be plain text.
        `middleware` is aiohttp's and comes after these checks; `headers` are added to answers that have none such.
        """
        self.port = 0
        self._settings = settings
        self._allows_host = allows_host
        self._host_refusal = host_refusal
        self._refuse = refuse or _refuse_in_words
        self._headers = headers or {}
        self._pending = PendingConnections(settings.silent_connections_most)
        self._sweep: asyncio.TimerHandle | None = None
        self._at_once = 0
        self._application = web.Application(
            client_max_size=settings.body_bytes_most,
            middlewares=[self._admit_request, *([middleware] if middleware else [])],
        )
        self._application.on_response_prepare.append(self._add_headers)
        self._application.router.add_routes(routes)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    @property
    def server(self) -> web.Server:
        """The connections of aiohttp; only between `start` and `stop`."""
        assert self._runner is not None
        assert self._runner.server is not None
        return self._runner.server

    async def start(self, address: str, tls: ssl.SSLContext | None = None) -> int:
        """Listens on HOST:PORT and returns the port; raises ControllerConfigError."""
        settings = self._settings
        host, port = _split_address(settings, address)
        self._runner = web.AppRunner(
            self._application,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=settings.keepalive_s,
            shutdown_timeout=_SHUTDOWN_S,
            max_line_size=settings.line_bytes_most,
            max_field_size=settings.line_bytes_most,
        )
        await self._runner.setup()
        handshake_s = None if tls is None else min(_HANDSHAKE_S, settings.first_request_s)
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._open_connection,
                host or None,
                port,
                ssl=tls,
                backlog=_BACKLOG,
                ssl_handshake_timeout=handshake_s,
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ControllerConfigError(
                f"cannot serve {settings.name} on {address} ({error.strerror or error})",
                f"choose another with {settings.flag}, or end the program that has it",
            ) from error
        self.port = self._listener.sockets[0].getsockname()[1]
        return self.port

    async def stop(self) -> None:
        """Frees the port and ends connections; requests under way have a second."""
        if self._listener is not None:
            self._listener.close()
        self._pending.end_all()
        if self._sweep is not None:
            self._sweep.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    # Connections

    def _open_connection(self) -> asyncio.Protocol:
        return _Arrival(self.server(), self._await_request)

    def _await_request(self, transport: asyncio.BaseTransport) -> None:
        self._pending.add_connection(transport)
        if self._sweep is None:
            self._sweep_later(self._settings.first_request_s)

    def _sweep_later(self, seconds: float) -> None:
        self._sweep = asyncio.get_running_loop().call_later(seconds, self._end_silent)

    def _end_silent(self) -> None:
        self._sweep = None
        left_s = self._pending.end_older(self._settings.first_request_s)
        if left_s is not None:
            self._sweep_later(left_s)

    # Requests

    @web.middleware
    async def _admit_request(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.transport is not None:
            self._pending.discard_connection(request.transport)
        self._at_once += 1
        try:
            response: web.StreamResponse = self._refuse_request(request) or await handler(request)
            if not self._settings.keepalive_s:
                response.force_close()
            if self._settings.send_s:
                await self._send_response(response, request)
        finally:
            self._at_once -= 1
        return response

    def _refuse_request(self, request: web.Request) -> web.Response | None:
        settings = self._settings
        if self._at_once > settings.requests_at_once_most:
            return self._refuse(503, "too many connections")
        if self._allows_host is not None and not all(map(self._allows_host, request.headers.getall("Host", [""]))):
            return self._refuse(421, self._host_refusal)
        if settings.methods is not None and request.method not in settings.methods:
            wanted = " and ".join(sorted(settings.methods - {"HEAD"}))
            response = self._refuse(405, f"only {wanted} is answered")
            response.headers["Allow"] = ", ".join(sorted(settings.methods))
            return response
        return None

    async def _send_response(self, response: web.StreamResponse, request: web.Request) -> None:
        """Sends the answer while its request still counts; aborts the connection of a client that does not read it."""
        try:
            async with asyncio.timeout(self._settings.send_s):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()

    async def _add_headers(self, _request: web.Request, response: web.StreamResponse) -> None:
        # Without it aiohttp tells strangers the versions of itself and Python.
        response.headers["Server"] = "eelgrid-controller"
        for name, value in self._headers.items():
            response.headers.setdefault(name, value)


def _refuse_in_words(status: int, words: str) -> web.Response:
    return web.Response(status=status, text=f"{words}\n")


def check_exposure(settings: EndpointSettings, address: str, *, insecure: bool, log: logging.Logger) -> bool:
    """Whether only this machine can reach an address without TLS; raises ControllerConfigError unless `insecure`."""
    _split_address(settings, address)
    if is_loopback(address):
        return True
    if not insecure:
        raise ControllerConfigError(
            f"{settings.flag} {address} can be reached from other machines and has no TLS", settings.exposed_remedy
        )
    name = settings.flag.strip("-")
    log.warning("%s=%s tls=off warning=whoever reaches this address can read it", name, address)
    return False


def _split_address(settings: EndpointSettings, address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except ValueError:
        raise ControllerConfigError(
            f"{settings.flag} {address!r} is no address", f"write HOST:PORT, for example {settings.example}"
        ) from None


class _Arrival(asyncio.Protocol):
    """Tells of a connection once it is there (after TLS), and leaves it to the protocol that serves it."""

    def __init__(self, serving: asyncio.Protocol, on_arrival: Callable[[asyncio.BaseTransport], None]) -> None:
        self._serving = serving
        self._on_arrival = on_arrival

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._on_arrival(transport)
        transport.set_protocol(self._serving)
        self._serving.connection_made(transport)
