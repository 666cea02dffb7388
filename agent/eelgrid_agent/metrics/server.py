"""HTTP server of the metrics endpoint: /metrics, /livez and /readyz, with bounded connections.

Theory (connections). A scrape is one request on one connection, some milliseconds long. What
is neither is bounded whole: a connection ends REQUEST_S_MOST after it was
taken, however busy its client keeps it, for a client that sends a byte now and
then never runs into a timeout of the socket.
"""

import base64
import binascii
import contextlib
import gzip
import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import TYPE_CHECKING, Any

from eelgrid_agent.metrics.access import AccessRules, MetricsError, PasswordVerdict, ScrapeAccess
from eelgrid_agent.metrics.collector import AgentCollector
from eelgrid_agent.metrics.exposition import MetricsRenderer, RenderedMetrics
from eelgrid_agent.metrics.web_config import WebConfig
from eelgrid_protos import __version__
from eelgrid_protos.openmetrics import CONTENT_OPENMETRICS, CONTENT_PROMETHEUS, accepts_gzip, prefers_openmetrics
from eelgrid_protos.sockets import HttpHosts, split_address
from eelgrid_protos.transport import TlsFiles, is_loopback
from eelgrid_protos.values import dataclass

if TYPE_CHECKING:
    # Who has no TLS does without OpenSSL.
    from ssl import SSLSocket

# The event loop is taken for dead when nothing was sampled for this long and four intervals.
SILENCE_S_MOST = 60.0
SILENCE_INTERVALS = 4.0

# Labels repeat: the first level makes 20 kB of 500, and the higher ones little less for a lot more.
_GZIP_LEVEL = 1


@dataclass(frozen=True, slots=True)
class ScrapeResponse:
    """An HTTP answer without its transport; `encoding` is empty for plain bytes."""

    status: int
    content_type: str
    body: bytes
    encoding: str = ""


class ScrapeHandler:
    """The rendered page, in each form that was asked for."""

    def __init__(self, frames: AgentCollector, *, ticks: Callable[[], int], monotonic_ns: Callable[[], int]) -> None:
        self._frames = frames
        self._ticks = ticks
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._renderer = MetricsRenderer()
        self._key: tuple[int, int] | None = None
        self._rendered = RenderedMetrics(())
        self._forms: dict[tuple[bool, bool], bytes] = {}
        self.renders_total = 0

    def build_response(self, path: str, *, accept: str = "", accept_encoding: str = "") -> ScrapeResponse:
        """The answer to a GET with these headers."""
        match path.partition("?")[0]:
            case "/metrics":
                openmetrics, gzipped = prefers_openmetrics(accept), accepts_gzip(accept_encoding)
                body = self._metrics(openmetrics=openmetrics, gzipped=gzipped)
                return ScrapeResponse(
                    200, CONTENT_OPENMETRICS if openmetrics else CONTENT_PROMETHEUS, body, "gzip" if gzipped else ""
                )
            case "/livez":
                return self._live()
            case "/readyz":
                ready = self._frames.oldest_s() is not None
                return (
                    _text_response(200, "ready")
                    if ready
                    else _text_response(503, "not every node has been sampled yet")
                )
            case _:
                return _text_response(404, "ask for /metrics, /livez or /readyz")

    def _live(self) -> ScrapeResponse:
        age_s = self._frames.oldest_s()
        bound_s = max(SILENCE_S_MOST, SILENCE_INTERVALS * self._frames.slowest_interval_s())
        if age_s is not None and age_s > bound_s:
            return _text_response(503, f"nothing was sampled for {age_s:.0f} s")
        return _text_response(200, "alive")

    def _metrics(self, *, openmetrics: bool, gzipped: bool) -> bytes:
        with self._lock:
            key = (self._ticks(), self._monotonic_ns() // 1_000_000_000)
            if key != self._key:
                self._rendered = self._renderer.render_snapshot(self._frames.build_snapshot())
                self._forms.clear()
                self._key = key
                self.renders_total += 1
            return self._form(openmetrics=openmetrics, gzipped=gzipped)

    def _form(self, *, openmetrics: bool, gzipped: bool) -> bytes:
        form = (openmetrics, gzipped)
        body = self._forms.get(form)
        if body is None:
            if gzipped:
                body = gzip.compress(self._form(openmetrics=openmetrics, gzipped=False), _GZIP_LEVEL, mtime=0)
            else:
                body = self._rendered.openmetrics() if openmetrics else self._rendered.prometheus()
            self._forms[form] = body
        return body


SCRAPES_MOST = 8
REQUEST_S_MOST = 10.0
# Request line and headers together; Prometheus sends some 400 bytes.
HEAD_BYTES_MOST = 16 * 1024
# How late the end of a connection may be noticed.
_TEND_S = 0.25

_PROBES = ("/livez", "/readyz")
_SAN_KINDS = ("DNS", "IP Address", "email", "URI")


class MetricsEndpoint:
    """The endpoint; `web_config` names a web configuration file."""

    def __init__(
        self,
        address: str,
        page: ScrapeHandler,
        *,
        tls: TlsFiles | None,
        insecure: bool,
        web_config: Path | None = None,
        log: logging.Logger | None = None,
        request_s_most: float = REQUEST_S_MOST,
        host_names: Iterable[str] = (),
    ) -> None:
        remote = not is_loopback(address)
        log = logging.getLogger("eelgrid.agent") if log is None else log
        door = ScrapeAccess(web_config, tls if remote and web_config is None else None, log)
        if remote and not door.is_encrypted and not insecure:
            remedy = (
                "give --tls-certificate, --tls-key and --tls-authority"
                if web_config is None
                else f"add tls_server_config to {web_config}"
            )
            raise MetricsError(f"--metrics {address} can be reached from other machines; {remedy}, or say --insecure")
        host, port = split_address(address)
        try:
            hosts = HttpHosts(address, host_names)
            self._server = _Server((host, port), page, door, hosts, request_s_most)
        except OSError as error:
            reason = error.strerror or str(error)
            remedy = "choose another with --metrics, or end the program that has it"
            raise MetricsError(f"cannot serve metrics on {address}: {reason}; {remedy}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=_TEND_S), name="metrics", daemon=True
        )

    def start(self) -> None:
        """Serves from now on."""
        self._thread.start()

    def close(self) -> None:
        """Frees the port; a scrape under way is left to its own deadline."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=1.0)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(
        self, address: tuple[str, int], page: ScrapeHandler, door: ScrapeAccess, hosts: HttpHosts, request_s_most: float
    ) -> None:
        self.page = page
        self.hosts = hosts
        self.door = door
        self.request_s_most = request_s_most
        self._slots = threading.BoundedSemaphore(SCRAPES_MOST)
        # By the thread that answers: its connection, and when that ends.
        self._open: dict[int, tuple[socket, float]] = {}
        self._asked: set[int] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A scrape beyond the bound takes the place of a connection that has asked nothing yet, or is turned away."""
        if not self._slots.acquire(blocking=False) and not (
            self._end_silent() and self._slots.acquire(timeout=_TEND_S)
        ):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can be started: the machine is out of something, and the next scrape may find more.
            self._slots.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """TLS is shaken hands on here, so that a slow client holds up its own thread only."""
        until_s = time.monotonic() + self.request_s_most
        try:
            request.settimeout(self.request_s_most)
            connection = self._secure(request, until_s, self.door.refresh())
            super().process_request_thread(connection, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._open.pop(threading.get_ident(), None)
            self._asked.discard(threading.get_ident())
            self._slots.release()

    def on_request_read(self) -> None:
        """The connection of this thread has said what it wants."""
        self._asked.add(threading.get_ident())

    def _end_silent(self) -> bool:
        """Ends the oldest connection that has asked nothing."""
        silent = [entry for ident, entry in list(self._open.items()) if ident not in self._asked]
        if not silent:
            return False
        connection, _ = min(silent, key=lambda entry: entry[1])
        with contextlib.suppress(OSError):
            socket.shutdown(connection, SHUT_RDWR)
        return True

    def service_actions(self) -> None:
        """Ends what has lasted too long; the thread that waits for it then sees it closed."""
        now_s = time.monotonic()
        for connection, until_s in list(self._open.values()):
            if now_s >= until_s:
                try:
                    # Not the method of an SSLSocket, which would drop its state while another thread reads through it.
                    socket.shutdown(connection, SHUT_RDWR)
                except OSError:
                    # It has ended by itself.
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is its own business."""

    def _secure(self, request: socket, until_s: float, rules: AccessRules) -> socket:
        """The connection, encrypted where it should be; raises OSError, as SSLError is."""
        context, tls = rules.context, rules.config.tls
        if context is None:
            self._open[threading.get_ident()] = request, until_s
            return request
        secured = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        self._open[threading.get_ident()] = secured, until_s
        try:
            secured.do_handshake()
            if tls is not None and tls.client_sans and not tls.client_sans & _names(secured):
                raise ConnectionRefusedError("no name of the client's certificate is in client_allowed_sans")
        except OSError:
            secured.close()
            raise
        return secured


def _names(connection: "SSLSocket") -> frozenset[str]:
    """The names that the client's certificate is for."""
    found: Any = connection.getpeercert() or {}
    return frozenset(name for kind, name in found.get("subjectAltName", ()) if kind in _SAN_KINDS)


class _Head:
    """What a request is read from: lines, within the bytes that a head may have."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = HEAD_BYTES_MOST

    def readline(self, size: int = -1) -> bytes:
        """A line, or as much of it as was asked for; raises LineTooLong beyond the bound of the head."""
        line = self._file.readline(min(self._left + 1, size) if size >= 0 else self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("head")
        return line

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.0"
    server_version = f"eelgrid-agent/{__version__}"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]  # all that http.server asks of it

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except http.client.LineTooLong:
            # The request line itself: headers that are too long are told by the class above.
            self.requestline, self.command = "", ""
            self.send_error(414)

    def do_GET(self) -> None:  # the name that http.server asks for
        self.server.on_request_read()
        config = self.server.door.config
        refusal = self._refusal(config)
        answer = refusal or self.server.page.build_response(
            self.path, accept=self.headers.get("Accept", ""), accept_encoding=self.headers.get("Accept-Encoding", "")
        )
        self._send(answer, config.headers)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no HTTP that we speak, in plain words and without an echo of it."""
        del message, explain
        # To http.server a method without a function is 501, not implemented.
        self.request_version = "HTTP/1.0"  # it may not be known yet, and the answer has headers all the same
        answer = (
            _text_response(405, "ask with GET or HEAD")
            if code == 501
            else _text_response(code, self.responses[code][0])
        )
        self._send(answer, ())
        self.close_connection = True

    def _send(self, answer: ScrapeResponse, headers: tuple[tuple[str, str], ...]) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Vary", "Accept, Accept-Encoding")
        if answer.encoding:
            self.send_header("Content-Encoding", answer.encoding)
        for name, value in (*_MORE.get(answer.status, ()), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _refusal(self, config: WebConfig) -> ScrapeResponse | None:
        """Why the page is not given; None where it is."""
        if not self.server.hosts.allows(self.headers.get("Host", "")):
            return _text_response(421, "this Host is none of ours; name it with --metrics-host if it is")
        if not config.users or self.path.partition("?")[0] in _PROBES:
            return None
        name, password = _basic(self.headers.get("Authorization", ""))
        if password is None:
            return _text_response(401, "give a user and a password")
        match self.server.door.credentials.check_password(config.users, name, password):
            case PasswordVerdict.RIGHT:
                return None
            case PasswordVerdict.TOO_MANY:
                return _text_response(429, "too many passwords were tried; try again in a second")
            case PasswordVerdict.WRONG:
                return _text_response(401, "the user or the password is wrong")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name in http.server
        """Scrapes are not logged."""


# Headers that a status asks for.
_MORE = {
    401: (("WWW-Authenticate", 'Basic realm="eelgrid-agent", charset="UTF-8"'),),
    405: (("Allow", "GET, HEAD"),),
    429: (("Retry-After", "1"),),
}


def _text_response(status: int, text: str) -> ScrapeResponse:
    return ScrapeResponse(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def _basic(header: str) -> tuple[str, bytes | None]:
    """User and password of an Authorization header; no password where it holds none."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return "", None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return name.decode("utf-8"), password if colon else None
    except (binascii.Error, ValueError):
        return "", None
