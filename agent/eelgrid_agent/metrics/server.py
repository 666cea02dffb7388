"""The HTTP server of the page: a thread that accepts, and a bounded number that answer.

Owns the socket, the protocol and the bounds on a request: how many at once, how
long, how large. Must not know what is on the page nor what is in a file. The
probes /livez and /readyz ask for no password: they tell nothing, and a kubelet
has none.

Theory. A scrape is one request on one connection, some milliseconds long. What
is neither is bounded whole: a connection ends REQUEST_S_MOST after it was
taken, however busy its client keeps it, for a client that sends a byte now and
then never runs into a timeout of the socket.
"""

import base64
import binascii
import contextlib
import http.client
import logging
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import Any

from eelgrid_agent.metrics.credentials import Verdict
from eelgrid_agent.metrics.door import Door, MetricsError, WebConfigUnusable
from eelgrid_agent.metrics.page import Answer, Page
from eelgrid_agent.metrics.web_config import WebConfig
from eelgrid_protos import __version__
from eelgrid_protos.transport import TlsFiles, is_loopback

__all__ = ["MetricsError", "MetricsServer", "WebConfigUnusable"]

SCRAPES_MOST = 8
REQUEST_S_MOST = 10.0
# Request line and headers together; Prometheus sends some 400 bytes.
HEAD_BYTES_MOST = 16 * 1024
# How late the end of a connection may be noticed.
_TEND_S = 0.25

_PROBES = ("/livez", "/readyz")
_SAN_KINDS = ("DNS", "IP Address", "email", "URI")


class MetricsServer:
    """The endpoint; `web_config` names a web configuration file."""

    def __init__(
        self, address: str, page: Page, *, tls: TlsFiles | None, insecure: bool, web_config: Path | None = None,
        log: logging.Logger | None = None, request_s_most: float = REQUEST_S_MOST,
    ) -> None:  # fmt: skip
        remote = not is_loopback(address)
        log = logging.getLogger("eelgrid.agent") if log is None else log
        door = Door(web_config, tls if remote and web_config is None else None, log)
        if remote and not door.is_encrypted and not insecure:
            remedy = (
                "give --tls-certificate, --tls-key and --tls-authority"
                if web_config is None
                else f"add tls_server_config to {web_config}"
            )
            raise MetricsError(f"--metrics {address} can be reached from other machines; {remedy}, or say --insecure")
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server((host.strip("[]"), int(port)), page, door, request_s_most)
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

    def __init__(self, address: tuple[str, int], page: Page, door: Door, request_s_most: float) -> None:
        self.page = page
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
            self.door.refresh()
            connection = self._secure(request, until_s)
            super().process_request_thread(connection, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._open.pop(threading.get_ident(), None)
            self._asked.discard(threading.get_ident())
            self._slots.release()

    def asked(self) -> None:
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

    def _secure(self, request: socket, until_s: float) -> socket:
        """The connection, encrypted where it should be; raises OSError, as SSLError is."""
        context, tls = self.door.context, self.door.config.tls
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


def _names(connection: ssl.SSLSocket) -> frozenset[str]:
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
        self.server.asked()
        config = self.server.door.config
        refusal = self._refusal(config)
        answer = refusal or self.server.page.answer(
            self.path,
            accept=self.headers.get("Accept", ""),
            accept_encoding=self.headers.get("Accept-Encoding", ""),
        )
        self._send(answer, config.headers)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no HTTP that we speak, in plain words and without an echo of it."""
        del message, explain
        # To http.server a method without a function is 501, not implemented.
        self.request_version = "HTTP/1.0"  # it may not be known yet, and the answer has headers all the same
        answer = _said(405, "ask with GET or HEAD") if code == 501 else _said(code, self.responses[code][0])
        self._send(answer, ())
        self.close_connection = True

    def _send(self, answer: Answer, headers: tuple[tuple[str, str], ...]) -> None:
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

    def _refusal(self, config: WebConfig) -> Answer | None:
        """Why the page is not given; None where it is."""
        if not config.users or self.path.partition("?")[0] in _PROBES:
            return None
        name, password = _basic(self.headers.get("Authorization", ""))
        if password is None:
            return _said(401, "give a user and a password")
        match self.server.door.credentials.check(config.users, name, password):
            case Verdict.RIGHT:
                return None
            case Verdict.TOO_MANY:
                return _said(429, "too many passwords were tried; try again in a second")
            case Verdict.WRONG:
                return _said(401, "the user or the password is wrong")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name in http.server
        """Scrapes are not logged."""


# Headers that a status asks for.
_MORE = {
    401: (("WWW-Authenticate", 'Basic realm="eelgrid-agent", charset="UTF-8"'),),
    405: (("Allow", "GET, HEAD"),),
    429: (("Retry-After", "1"),),
}


def _said(status: int, text: str) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{text}\n".encode())


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
