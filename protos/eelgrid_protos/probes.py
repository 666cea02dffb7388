"""Probes of a daemon: /livez and /readyz on an address, in a thread and within limits of their own.

Owns a small HTTP server for them. Must not know what makes a daemon live or ready: it calls functions for that.

Theory. A kubelet that gets no answer from /livez for a while restarts the daemon. A client that can block a daemon's
other ports, by a slow page or by idle connections, must not be able to cause that. So probes have a listener that
serves nothing else, a thread that waits for nobody else, and when there are too many connections without a request
the oldest is closed: a probe sends its request at once. An event loop that hangs is a reason to end a daemon, one
that is slow is not: `Heartbeat` distinguishes them by a minute.
"""

import asyncio
import contextlib
import http
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from eelgrid_protos.sockets import split_address

# Kubelet has two or three open; the rest are for other clients.
CONNECTIONS_MOST = 64
REQUEST_WITHIN_S = 2.0
HEAD_BYTES_MOST = 4096
# Recovering a large journal blocks the loop for some seconds, a scan of 10,000 nodes for some more.
SILENCE_S_MOST = 60.0
_BEAT_S = 1.0
_STOP_WITHIN_S = 2.0


class Heartbeat:
    """Detects from another thread whether an event loop still runs."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._beat_s = monotonic_s()

    async def run(self) -> None:
        """Runs in the watched loop, until cancelled."""
        while True:
            self._beat_s = self._monotonic_s()
            await asyncio.sleep(_BEAT_S)

    def fault(self) -> str:
        """Returns why the daemon is not live; empty if it is."""
        silent_s = self._monotonic_s() - self._beat_s
        return f"the event loop has not turned for {silent_s:.0f} s" if silent_s > SILENCE_S_MOST else ""


class PendingConnections:
    """Connections that have not sent their request yet: the oldest is closed if there are too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        # When each connected, by its loop's clock; the oldest first.
        self._waiting: dict[asyncio.BaseTransport, float] = {}

    def add_connection(self, transport: asyncio.BaseTransport) -> None:
        """Adds a connection, and closes the oldest if there are too many."""
        self._waiting[transport] = asyncio.get_running_loop().time()
        if len(self._waiting) > self._most:
            self._end_oldest()

    def end_older(self, seconds: float) -> float | None:
        """Closes connections older than `seconds`; returns the seconds until the next is due, None if there is none."""
        now_s = asyncio.get_running_loop().time()
        while self._waiting:
            left_s = next(iter(self._waiting.values())) + seconds - now_s
            if left_s > 0.0:
                return left_s
            self._end_oldest()
        return None

    def end_all(self) -> None:
        """Closes all connections."""
        while self._waiting:
            self._end_oldest()

    def _end_oldest(self) -> None:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        if isinstance(oldest, asyncio.WriteTransport):
            oldest.abort()

    def discard_connection(self, transport: asyncio.BaseTransport) -> None:
        """Removes a connection that sent its request or was closed."""
        self._waiting.pop(transport, None)


class _Connection(asyncio.Protocol):
    def __init__(self, waiting: PendingConnections, answer: Callable[[str], tuple[http.HTTPStatus, str]]) -> None:
        self._waiting = waiting
        self._answer = answer
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_WITHIN_S, transport.abort)
        self._waiting.add_connection(transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._head += data
        if len(self._head) > HEAD_BYTES_MOST:
            self._transport.abort()
        elif b"\r\n\r\n" in self._head or b"\n\n" in self._head:
            self._waiting.discard_connection(self._transport)
            method, _, rest = self._head.partition(b"\n")[0].decode("latin-1").strip().partition(" ")
            status, text = http.HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered"
            if method in {"GET", "HEAD"}:
                status, text = self._answer(rest.partition(" ")[0].partition("?")[0])
            body = b"" if method == "HEAD" else f"{text}\n".encode()
            self._transport.write(
                f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._waiting.discard_connection(self._transport)


class ProbeServer:
    """Serves the probes from `start` to `close`; `fault` and `unready` return the reason of a failure, or an empty text."""

    def __init__(self, *, fault: Callable[[], str], unready: Callable[[], str], log: logging.Logger) -> None:
        self._fault = fault
        self._unready = unready
        self._log = log
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="probes", daemon=True)
        self._server: asyncio.Server | None = None
        self._waiting = PendingConnections(CONNECTIONS_MOST)

    def start(self, address: str) -> int:
        """Listens on HOST:PORT and returns the port; raises OSError, and ValueError for an invalid address."""
        host, port = split_address(address)
        make = partial(_Connection, self._waiting, self._answer_path)
        self._thread.start()
        try:
            listening = asyncio.run_coroutine_threadsafe(
                self._loop.create_server(make, host or None, port, backlog=CONNECTIONS_MOST), self._loop
            )
            self._server = listening.result()
        except OSError:
            self.close()
            raise
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        """Stops the server and frees the port."""
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_STOP_WITHIN_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_WITHIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        self._waiting.end_all()
        # The loop closes connections in its next iteration.
        await asyncio.sleep(0)

    def _answer_path(self, path: str) -> tuple[http.HTTPStatus, str]:
        ask = {"/livez": self._fault, "/readyz": self._unready}.get(path)
        if ask is None:
            return http.HTTPStatus.NOT_FOUND, "ask for /livez or /readyz"
        try:
            reason = ask()
        except Exception:  # noqa: BLE001  # a failing check is no reason to end the daemon
            self._log.exception("probe=failed path=%s", path)
            reason = ""
        return (http.HTTPStatus.SERVICE_UNAVAILABLE, reason) if reason else (http.HTTPStatus.OK, "ok")
