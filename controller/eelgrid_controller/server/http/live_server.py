"""The live page's HTTP server: read-only, for browsers; it also serves the page's static files."""

import asyncio
import base64
import contextlib
import gzip
import hashlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web

from eelgrid_controller.errors import ControllerConfigError, JournalError
from eelgrid_controller.server.http.live_connections import (
    FIRST_REQUEST_WITHIN_S,
    VIEWER_S_MOST,
    TlsContexts,
    ViewerSlots,
    supervise_connections,
    viewer_account,
)
from eelgrid_controller.server.http.live_hub import PACKED_HEAD, EventBytes, LiveHub, LiveSource, ViewerBehind
from eelgrid_controller.server.http.live_model.details import (
    gpu_details,
    list_objectives,
    list_points,
    search_workloads,
    workload_details,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos.faults import PermissionDenied
from eelgrid_protos.transport import TlsFiles, is_loopback

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
    found["index.html"] = _file(_KINDS[".html"], index.replace(_STYLE_LINK, b"<style>%b</style>\n" % _style()))
    return found


def style_csp_source() -> str:
    """What a content security policy says to let in the style sheet that stands in index.html, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(_style()).digest()).decode()}'"


def _style() -> bytes:
    return (resources.files("eelgrid_controller.server.http") / "files" / "page.css").read_bytes()


def _file(kind: str, plain: bytes) -> StaticFile:
    return StaticFile(kind, plain, gzip.compress(plain, 9, mtime=0), f'"{hashlib.sha256(plain).hexdigest()[:24]}"')


_ANSWERS_AT_ONCE_MOST = 8
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
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'self'; style-src {style_csp_source()}; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer:
    """Serves one hub."""

    def __init__(
        self,
        hub: LiveHub,
        source: LiveSource,
        *,
        tls: TlsFiles | None,
        insecure: bool,
        log: logging.Logger,
        admit: Callable[[bytes | None], None] | None = None,
    ) -> None:
        # With TLS: asked before each answer, by the viewer's certificate in DER; raises PermissionDenied.
        self._admit = admit
        self.port = 0
        self._hub = hub
        self._source = source
        self._tls = tls
        self._insecure = insecure
        self._log = log
        self._only_local = False
        self._at_once = 0
        self._runner: web.AppRunner | None = None
        self._beating: asyncio.Task[None] | None = None
        self._listening: asyncio.Server | None = None
        self._tending: asyncio.Task[None] | None = None
        self._contexts: TlsContexts | None = None
        self._seats = ViewerSlots()
        self._files = load_static_files()

    async def start(self, address: str) -> int:
        """Listen and return the port; raises ConfigError."""
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit() or int(port) > 65_535:
            raise ControllerConfigError(
                f"--page {address!r} is no address", "write HOST:PORT, for example 127.0.0.1:8443"
            )
        context = self._tls_context(address)
        application = web.Application(client_max_size=1024)
        application.on_response_prepare.append(_with_headers)
        application.middlewares.append(self._guard)
        application.router.add_get("/", self._file)
        application.router.add_get("/events", self._events)
        application.router.add_get("/data/{what}", self._answer_query)
        application.router.add_get("/{name}", self._file)
        self._runner = web.AppRunner(
            application, access_log=None, handle_signals=False, shutdown_timeout=1.0, keepalive_timeout=_KEPT_S
        )
        await self._runner.setup()
        assert self._runner.server is not None
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                self._runner.server,
                host.strip("[]") or None,
                int(port),
                ssl=context,
                backlog=128,
                ssl_handshake_timeout=None if context is None else FIRST_REQUEST_WITHIN_S,
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ControllerConfigError(
                f"cannot serve the page on {address} ({error.strerror or error})",
                "choose another with --page, or end the program that has it",
            ) from error
        self.port = self._listening.sockets[0].getsockname()[1]
        self._beating = asyncio.create_task(self._hub.run())
        self._tending = asyncio.create_task(
            supervise_connections(
                self._runner.server, self._contexts, now_s=lambda: self._source.now_ns() / 1e9, log=self._log
            )
        )
        self._log.info("page=open address=%s:%d tls=%s", host, self.port, "on" if context else "off")
        return self.port

    async def stop(self) -> None:
        """Let viewers go and close the door."""
        self._hub.close()
        if self._listening is not None:
            self._listening.close()
        for task in filter(None, (self._beating, self._tending)):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._runner is not None:
            await self._runner.cleanup()

    # Who may come in

    def _tls_context(self, address: str) -> ssl.SSLContext | None:
        if self._tls is None:
            self._only_local = is_loopback(address)
            if not self._only_local and not self._insecure:
                raise ControllerConfigError(
                    f"--page {address} can be reached from other machines and has no TLS",
                    "listen on loopback and look through `ssh -L`, give certificates, or say --insecure",
                )
            if not self._only_local:
                self._log.warning("page=%s tls=off warning=whoever reaches this address can read it", address)
            return None
        try:
            self._contexts = TlsContexts(self._tls, self._log)
        except OSError as error:
            raise ControllerConfigError(
                f"the page's certificate cannot be used ({error.strerror or error})",
                "name PEM files by --tls-certificate, --tls-key and --tls-authority",
            ) from error
        return self._contexts.listening

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._only_local and not _names_this_machine(request.host):
            return web.Response(status=421, text="ask by the address of this machine, such as 127.0.0.1\n")
        if request.method not in {"GET", "HEAD"}:
            return web.Response(status=405, text="only GET is answered\n")
        if self._admit is not None:
            secured = request.get_extra_info("ssl_object")
            try:
                self._admit(None if secured is None else secured.getpeercert(binary_form=True))
            except PermissionDenied as refusal:
                return web.Response(status=403, text=f"{refusal}\n")
        response: web.StreamResponse = await handler(request)
        return response

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
        seat = self._seats.acquire_slot(viewer_account(request), now_s(), is_alone=self._only_local)
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


async def _with_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")


def _takes_gzip(request: web.Request) -> bool:
    """Whether the header Accept-Encoding names gzip, other than to refuse it (RFC 9110, 12.5.3)."""
    for part in request.headers.get("Accept-Encoding", "").lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "").rstrip("0.") != "q="
    return False


def _names_this_machine(host: str) -> bool:
    """Whether a Host header is of the loopback: a name that leads here could be anybody's."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
    name = name.strip("[]")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
