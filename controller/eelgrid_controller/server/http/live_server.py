"""The live page's HTTP server: read-only, for browsers; it serves the page's files, events and data.

Who may view, and for how long: viewers share a bounded number of slots by the certificate or address that they come
from. A connection ends when the certificate that it was opened with expires, when an authority leaves the file of
those that are trusted, or when there are too many connections.
"""

import asyncio
import base64
import contextlib
import gzip
import hashlib
import logging
import socket
import ssl
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web

from eelgrid_controller.errors import ControllerConfigError, JournalError
from eelgrid_controller.server.http.application import EndpointSettings, HttpEndpoint, check_exposure
from eelgrid_controller.server.http.live_columns import COLUMNS
from eelgrid_controller.server.http.live_hub import PACKED_HEAD, EventBytes, LiveHub, LoopSource, ViewerBehind
from eelgrid_controller.server.http.live_model import (
    gpu_details,
    list_objectives,
    list_points,
    search_workloads,
    workload_details,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos.certificate import CertificateUnreadable, read_certificate
from eelgrid_protos.faults import PermissionDenied
from eelgrid_protos.file_reloader import build_listening_context, load_key_pair
from eelgrid_protos.openmetrics import accepts_gzip
from eelgrid_protos.sockets import names_loopback
from eelgrid_protos.transport import CertificateUnusable, MutualTlsReloader, TlsContents, TlsFiles

_KINDS = {".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_STYLE_LINK = b'<link rel="stylesheet" href="page.css">\n'


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file: as it is, packed by gzip, and a tag of its content."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str


def load_static_files() -> Mapping[str, StaticFile]:
    """The files by name; index.html holds the style sheet."""
    folder = resources.files("eelgrid_controller.server.http") / "files"
    found = {
        item.name: _file(kind, item.read_bytes())
        for item in folder.iterdir()
        if (kind := _KINDS.get(f".{item.name.rpartition('.')[2]}"))
    }
    index = found["index.html"].plain
    assert index.count(_STYLE_LINK) == 1, "the style sheet goes in where its link stands"
    found["index.html"] = _file(_KINDS[".html"], index.replace(_STYLE_LINK, b"<style>%b</style>\n" % read_style()))
    return found


def style_csp_source() -> str:
    """What a content security policy says to let in the style sheet that stands in index.html, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(read_style()).digest()).decode()}'"


def read_style() -> bytes:
    """Reads the style sheet of the live page."""
    return (resources.files("eelgrid_controller.server.http") / "files" / "page.css").read_bytes()


def _file(kind: str, plain: bytes) -> StaticFile:
    return StaticFile(kind, plain, gzip.compress(plain, 9, mtime=0), f'"{hashlib.sha256(plain).hexdigest()[:24]}"')


# Viewers and connections

ViewerAccount = bytes | str

VIEWERS_MOST = 64
# A person has some tabs; whoever shows the page on a wall has some screens.
VIEWERS_EACH_MOST = 16
# A stream ends after an hour and the browser comes again: a seat that was forgotten by both sides is free then.
VIEWER_S_MOST = 3600.0
# Of all, whatever they ask: browsers open six each.
CONNECTIONS_MOST = 512
_LOOK_S = 1.0
_DATES_KEPT = 256


def viewer_account(request: web.Request) -> ViewerAccount:
    """Whose a request is: the certificate's, or the address's without one."""
    secured = request.get_extra_info("ssl_object")
    certificate: bytes | None = None if secured is None else secured.getpeercert(binary_form=True)
    return certificate or str(request.remote)


@dataclass(eq=False)
class ViewerSlot:
    """One viewer's; `end` is set when another was given it."""

    account: ViewerAccount
    taken_s: float
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class ViewerSlots:
    """Who views."""

    def __init__(self, *, most: int = VIEWERS_MOST, each_most: int = VIEWERS_EACH_MOST) -> None:
        self._most = most
        self._each_most = each_most
        self._taken: dict[ViewerSlot, None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def acquire_slot(self, account: ViewerAccount, now_s: float, *, is_alone: bool = False) -> ViewerSlot | str:
        """A seat, or why there is none; `is_alone` where all viewers have one account and nothing is to be shared."""
        counts = Counter(seat.account for seat in self._taken)
        if not is_alone and counts[account] >= self._each_most:
            return f"{self._each_most} viewers of yours are here already"
        if len(self._taken) >= self._most:
            (greediest, most), *_ = counts.most_common(1)
            if most <= counts[account] + 1:
                return f"{self._most} viewers are here already"
            oldest = next(seat for seat in self._taken if seat.account == greediest)
            oldest.is_over.set()
            self.release_slot(oldest)
        seat = ViewerSlot(account, now_s)
        self._taken[seat] = None
        return seat

    def release_slot(self, seat: ViewerSlot) -> None:
        """It is free; once is enough."""
        self._taken.pop(seat, None)


class TlsContexts:
    """TLS contexts of the newest files, and under which of them each connection came in."""

    def __init__(self, files: TlsFiles, log: logging.Logger, *, name: str = "page") -> None:
        """Raises CertificateUnusable, and OSError (ssl.SSLError too); `name` is of the endpoint, for the log."""
        self._reloader = MutualTlsReloader(files, _build_context, name=f"{name}_tls", log=log)
        # How often a certificate had left the authority's file when the connection came.
        self._opened: weakref.WeakKeyDictionary[ssl.SSLObject, int] = weakref.WeakKeyDictionary()
        self._dates: OrderedDict[bytes, float] = OrderedDict()
        self.listening = build_listening_context(lambda: _build_context(files), self._choose_context)

    def _choose_context(self, held: ssl.SSLObject) -> ssl.SSLContext:
        context = self._reloader.refresh_configuration()
        self._opened[held] = self._reloader.authority_losses
        return context

    def refresh(self) -> None:
        """Loads files that changed."""
        self._reloader.refresh()

    def closing_reason(self, held: ssl.SSLObject, now_s: float) -> str:
        """Why a connection may not go on, by seconds since 1970; empty where it may."""
        losses = self._reloader.authority_losses
        if self._opened.get(held, losses) < losses:
            return "authority"
        certificate = held.getpeercert(binary_form=True)
        return "expired" if certificate and self._ends_s(certificate) <= now_s else ""

    def _ends_s(self, certificate: bytes) -> float:
        known = self._dates.get(certificate)
        if known is None:
            try:
                known = read_certificate(certificate).ends_s
            except CertificateUnreadable:
                # TLS has looked at its dates; what it is for is asked at each request.
                known = float("inf")
            self._dates[certificate] = known
            if len(self._dates) > _DATES_KEPT:
                self._dates.popitem(last=False)
        return known


def _build_context(files: TlsFiles, _contents: TlsContents | None = None) -> ssl.SSLContext:
    """For a server that takes only clients of the authority; raises OSError (ssl.SSLError too)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.authority))
    # Before 1.3 a session may be resumed by its number, too, which cannot be turned off here.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    load_key_pair(context, files.certificate, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def build_tls_contexts(files: TlsFiles, log: logging.Logger, *, name: str) -> TlsContexts:
    """The TLS contexts of an endpoint by its name; raises ControllerConfigError."""
    try:
        return TlsContexts(files, log, name=name)
    except (OSError, CertificateUnusable) as error:
        raise ControllerConfigError(
            f"the {name}'s certificate cannot be used ({error})",
            "name PEM files by --tls-certificate, --tls-key and --tls-authority",
        ) from error


async def supervise_connections(
    server: web.Server,
    contexts: TlsContexts | None,
    *,
    now_s: Callable[[], float],
    log: logging.Logger,
    name: str = "page",
) -> None:
    """Ends connections of a server that may not go on, until cancelled; `now_s` gives seconds since 1970."""
    since_s: dict[Any, float] = {}
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            if contexts is not None:
                await asyncio.to_thread(contexts.refresh)
            here: list[Any] = [one for one in server.connections if one.transport is not None]
            monotonic_s = time.monotonic()
            since_s = {one: since_s.get(one, monotonic_s) for one in here}
            for one in here:
                held = one.transport.get_extra_info("ssl_object")
                reason = "" if contexts is None or held is None else contexts.closing_reason(held, now_s())
                if reason:
                    log.info("%s_connection=ended reason=%s", name, reason)
                    one.transport.abort()
            for one in _crowding(since_s):
                one.transport.abort()
        except Exception:  # connections are looked at again in a second
            log.exception("%s_connections=failed", name)


def _crowding(since_s: dict[Any, float]) -> list[Any]:
    """Those that go where too many are here: of the hosts that have most, what asks nothing first, then the oldest."""
    excess = len(since_s) - CONNECTIONS_MOST
    if excess <= 0:
        return []
    hosts = {one: (one.transport.get_extra_info("peername") or ("",))[0] for one in since_s}
    counts = Counter(hosts.values())
    ordered = sorted(since_s, key=lambda one: (-counts[hosts[one]], one._current_request is not None, since_s[one]))  # noqa: SLF001  # aiohttp tells nobody
    return ordered[:excess]


# The server

_ANSWERS_AT_ONCE_MOST = 8
# From the connection to the end of its first request's head; TLS has as long before.
FIRST_REQUEST_WITHIN_S = 10.0
_TEXT_MOST = 300
_SEND_WITHIN_S = 10.0
# Shorter than the usual minute of proxies; the page counts on something every second anyway.
_QUIET_MOST_S = 15.0
# A browser comes again at once for what it shows; proxies keep a connection for a minute.
_KEPT_S = 75.0
# What a viewer has not taken off its connection: beyond, sending waits, and then the viewer goes. The kernel's own
# default is megabytes, with which who reads nothing would keep a seat for hours.
_UNREAD_BYTES_MOST = 256 * 1024
_UNACKNOWLEDGED_MS_MOST = 30_000
# Shorter answers are one segment anyway.
_PACKED_FROM_BYTES = 1400
_NOTHING_NEW = EventBytes(b": nothing new\n\n")


def build_security_policy(style_source: str) -> str:
    """Builds the Content-Security-Policy of a page whose scripts, images and data are its own, and its styles from one source."""
    return (
        f"default-src 'none'; script-src 'self'; style-src {style_source}; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


PAGE_HEADERS = {
    "Content-Security-Policy": build_security_policy(style_csp_source()),
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}
PAGE_SETTINGS = EndpointSettings(
    flag="--page",
    name="the page",
    example="127.0.0.1:8443",
    methods=frozenset({"GET", "HEAD"}),
    body_bytes_most=1024,
    first_request_s=FIRST_REQUEST_WITHIN_S,
    silent_connections_most=CONNECTIONS_MOST,
    keepalive_s=_KEPT_S,
    exposed_remedy="listen on loopback and look through `ssh -L`, give certificates, or say --insecure",
)


class ViewerEndpoint:
    """An HTTP endpoint for viewers: on loopback, or by their certificates, which are read anew when they change."""

    def __init__(
        self,
        settings: EndpointSettings,
        *,
        tls: TlsFiles | None,
        insecure: bool,
        now_ns: Callable[[], int],
        log: logging.Logger,
        admit: Callable[[bytes | None], None] | None = None,
    ) -> None:
        """With TLS `admit` is asked before each answer, by the viewer's certificate in DER; it raises PermissionDenied."""
        self.port = 0
        self.only_local = False
        self._settings, self._admit, self._now_ns = settings, admit, now_ns
        self._tls, self._insecure, self._log = tls, insecure, log
        self._endpoint: HttpEndpoint | None = None
        self._tending: asyncio.Task[None] | None = None
        self._contexts: TlsContexts | None = None

    async def start(self, address: str, routes: Iterable[web.RouteDef], headers: Mapping[str, str]) -> int:
        """Listens and returns the port; raises ControllerConfigError."""
        context = self._build_context(address)
        self._endpoint = HttpEndpoint(
            self._settings,
            routes,
            # With TLS the certificate says that the name is ours.
            allows_host=names_loopback if self.only_local else None,
            host_refusal="ask by the address of this machine, such as 127.0.0.1",
            middleware=self._check_viewer,
            headers=headers,
        )
        self.port = await self._endpoint.start(address, context)
        self._tending = asyncio.create_task(
            supervise_connections(
                self._endpoint.server, self._contexts, now_s=lambda: self._now_ns() / 1e9, log=self._log
            )
        )
        host = address.rpartition(":")[0]
        self._log.info("page=open address=%s:%d tls=%s", host, self.port, "on" if context else "off")
        return self.port

    async def stop(self) -> None:
        """Closes the listening socket and all connections."""
        if self._tending is not None:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
        if self._endpoint is not None:
            await self._endpoint.stop()

    def _build_context(self, address: str) -> ssl.SSLContext | None:
        if self._tls is None:
            self.only_local = check_exposure(self._settings, address, insecure=self._insecure, log=self._log)
            return None
        self._contexts = build_tls_contexts(self._tls, self._log, name="page")
        return self._contexts.listening

    @web.middleware
    async def _check_viewer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._admit is not None:
            secured = request.get_extra_info("ssl_object")
            try:
                self._admit(None if secured is None else secured.getpeercert(binary_form=True))
            except PermissionDenied as refusal:
                return web.Response(status=403, text=f"{refusal}\n")
        response: web.StreamResponse = await handler(request)
        return response


class LiveServer:
    """Serves one hub."""

    def __init__(
        self,
        hub: LiveHub,
        source: LoopSource,
        *,
        tls: TlsFiles | None,
        insecure: bool,
        log: logging.Logger,
        admit: Callable[[bytes | None], None] | None = None,
    ) -> None:
        self.port = 0
        self._hub = hub
        self._source = source
        self._log = log
        settings = replace(PAGE_SETTINGS, first_request_s=FIRST_REQUEST_WITHIN_S)
        self._endpoint = ViewerEndpoint(
            settings, tls=tls, insecure=insecure, now_ns=source.now_ns, log=log, admit=admit
        )
        self._at_once = 0
        self._beating: asyncio.Task[None] | None = None
        self._seats = ViewerSlots()
        self._files = load_static_files()

    async def start(self, address: str) -> int:
        """Listens and returns the port; raises ControllerConfigError."""
        routes = (
            web.get("/", self._file),
            web.get("/events", self._events),
            web.get("/data/{what}", self._answer_query),
            web.get("/{name}", self._file),
        )
        self.port = await self._endpoint.start(address, routes, PAGE_HEADERS)
        self._beating = asyncio.create_task(self._hub.run())
        return self.port

    async def stop(self) -> None:
        """Lets viewers go and closes the listening socket."""
        self._hub.close()
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        await self._endpoint.stop()

    # What is answered

    async def _file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info.get("name") or "index.html")
        if found is None:
            return web.Response(status=404, text="try /\n")
        headers = {"ETag": found.tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == found.tag:
            return web.Response(status=304, headers=headers)
        is_packed = _takes_gzip(request)
        if is_packed:
            headers["Content-Encoding"] = "gzip"
        body = found.packed if is_packed else found.plain
        return web.Response(body=body, content_type=found.kind, charset="utf-8", headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        hub, now_s = self._hub, self._source.now_s
        # Everybody on this machine has one address, and shares as people on one machine do.
        seat = self._seats.acquire_slot(viewer_account(request), now_s(), is_alone=self._endpoint.only_local)
        if isinstance(seat, str):
            return web.Response(status=503, text=f"{seat}\n")
        is_packed = _takes_gzip(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if is_packed:
            response.headers["Content-Encoding"] = "gzip"
        hub.viewers += 1
        try:
            await response.prepare(request)
            if is_packed:
                await response.write(PACKED_HEAD)
            frame, whole = await hub.full_frame()
            bodies: Iterable[EventBytes] = (whole,)
            _read_or_leave(request)
            while now_s() - seat.taken_s < VIEWER_S_MOST and not seat.is_over.is_set():
                async with asyncio.timeout(_SEND_WITHIN_S):
                    await response.write(b"".join(body.packed if is_packed else body.plain for body in bodies))
                try:
                    async with asyncio.timeout(_QUIET_MOST_S):
                        frame, bodies = await hub.frames_after(frame)
                except TimeoutError:
                    bodies = (_NOTHING_NEW,)
        except (ViewerBehind, TimeoutError, ConnectionError):
            # A viewer that goes, reads nothing, or is to come again: it knows what to do.
            pass
        finally:
            hub.viewers -= 1
            self._seats.release_slot(seat)
        return response

    async def _answer_query(self, request: web.Request) -> web.Response:
        if self._at_once >= _ANSWERS_AT_ONCE_MOST:
            return web.Response(status=503, text="too many questions at once; ask again\n")
        given = {key: value[:_TEXT_MOST] for key, value in request.query.items()}
        self._at_once += 1
        try:
            found = await self._found(request.match_info["what"], given)
        except JournalError as error:
            return web.Response(status=503, text=f"{error}\n")
        finally:
            self._at_once -= 1
        if found is None:
            return web.json_response({"error": "not there (any more)"}, status=404)
        response = web.Response(body=msgspec.json.encode(found), content_type="application/json")
        if _takes_gzip(request) and (response.content_length or 0) > _PACKED_FROM_BYTES:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def _found(self, what: str, given: dict[str, str]) -> Any:
        source = self._source
        match what:
            case "gpu":
                return await source.read(lambda state: self._gpu(state, given.get("node", ""), given.get("index", "")))
            case "workload":
                explanation = await source.explain_workload(given.get("id", ""))
                return None if explanation is None else workload_details(explanation, self._hub.board.fleet)
            case "search":
                return await source.read(lambda state: search_workloads(state, given.get("text", "")))
            case "points":
                profile, model = given.get("profile", ""), given.get("model", "")
                return await source.read(lambda state: list_points(state.points, profile, model))
            case "promises":
                return list_objectives(source.promises())
            case "overview":
                return await self._hub.read_overview()
            case "column":
                name = given.get("name", "")
                return await self._hub.read_column(name) if name in COLUMNS else None
            case "held":
                return await self._hub.list_held_cells(given.get("namespace", ""), given.get("user", ""))
            case "past":
                before = given.get("before", "")
                return (
                    await self._hub.read_earlier_changes(int(before))
                    if before.isdecimal() and len(before) < 20
                    else None
                )
        return None

    def _gpu(self, state: ClusterState, node_name: str, index: str) -> Any:
        record = state.nodes.get(node_name)
        if record is None or not index.isdecimal():
            return None
        gpu = next((gpu for gpu in record.inventory.gpus if gpu.index == int(index)), None)
        if gpu is None:
            return None
        now_s, now_ns = self._source.now_s(), self._source.now_ns()
        telemetry = self._source.telemetry
        readings = telemetry.gpu(node_name, gpu.uuid, now_s=now_s, now_ns=now_ns)
        return gpu_details(state, record, gpu, readings, telemetry.age_s(node_name, now_s=now_s, now_ns=now_ns))


def _read_or_leave(request: web.Request) -> None:
    """Bounds what waits in buffers for a viewer that does not read, and the time of one whose machine is gone."""
    transport = request.transport
    held = None if transport is None else transport.get_extra_info("socket")
    if transport is None or held is None:
        return
    held.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES_MOST)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS_MOST)


def _takes_gzip(request: web.Request) -> bool:
    return accepts_gzip(request.headers.get("Accept-Encoding", ""))
