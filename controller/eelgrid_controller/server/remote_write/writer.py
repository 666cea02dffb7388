"""Remote writer: sends series to a receiver of Prometheus remote write, from a thread of its own.

Owns the buffer, requests, retries and what is counted of them. Must not know what series mean (series.py) nor how they
are encoded (wire.py).

The event loop hands over batches, windows and pages as they are, which costs it an append each; the thread encodes what
has come each second, keeps it compressed, and sends the oldest first, one request at a time: a receiver takes the
samples of a series in order only. What it cannot take now (5xx, 429, no connection) waits, at most `buffer_bytes`, of
which the oldest go; what it never takes (other 4xx) goes. A request that is refused because of its samples is halved until the
part that is at fault is alone, so that a node with a wrong clock costs no other node its samples.
"""

import asyncio
import http.client
import logging
import ssl
import threading
import urllib.parse
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.runtime.config import RemoteWriteConfig
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_controller.server.remote_write.series import NodeSeries, OwnerCounters, PageSeries
from eelgrid_controller.server.remote_write.wire import EncodedSamples, build_request
from eelgrid_protos import __version__
from eelgrid_protos.messages import EnergyWindow, Inventory, SampleBatch
from eelgrid_protos.openmetrics import MetricFamily

if TYPE_CHECKING:
    from prometheus_client.core import Metric as ClientFamily

# How often the thread looks for what has come: a request has the samples of a second, or more.
_LOOK_S = 1.0
# As Prometheus sends; a part is never cut, so one of a large node may have more.
_REQUEST_SAMPLES_MOST = 2_000
_REQUEST_S = 10.0
_BACKOFF_S, _BACKOFF_S_MOST = 0.5, 30.0
# What the loop has handed over and the thread has not taken: more than ten thousand nodes send in a request's time.
_WAITING_MOST = 50_000
# How often one that was refused is halved: seven parts that are at fault among hundreds are found.
_DIVISIONS_MOST = 64
# Who follows us waits for this.
_STOP_S = 1.0
# A node that was not heard of for so long may be gone; its series are made again if it is not.
_NODE_MS_MOST = 3600 * 1000
_ANSWER_BYTES_MOST = 64 * 1024
_LOGGED_S = 60.0
_HEADERS_BYTES_MOST = 64 * 1024
_TOO_MANY, _TOO_LARGE = 429, 413
# Samples of a request are at fault, perhaps not all.
_DIVIDED = frozenset((400, 409, _TOO_LARGE, 422))
_OWN_HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": f"eelgrid-controller/{__version__}",
}


class _Verdict(Enum):
    WRITTEN = "written"
    RETRIED = "retried"
    REFUSED = "refused"
    DIVIDED = "divided"


class _Answer(NamedTuple):
    """What became of a request; `wait_s` is how long the receiver wants to be left alone."""

    verdict: _Verdict
    reason: str = ""
    wait_s: float = 0.0


class _Page(NamedTuple):
    families: "list[MetricFamily | ClientFamily]"
    time_ms: int


def read_headers(config: RemoteWriteConfig) -> dict[str, str]:
    """Headers of every request, from the file that says who we are; raises OSError and ValueError."""
    if config.headers_file is None:
        return dict(_OWN_HEADERS)
    found = {}
    with config.headers_file.open(encoding="latin-1") as lines:
        for line in lines.read(_HEADERS_BYTES_MOST).splitlines():
            if line.strip() and not line.startswith("#"):
                name, colon, value = line.partition(":")
                if not colon or not name.strip() or not (name.strip() + value).isprintable():
                    raise ValueError(f"a line of {config.headers_file} is not NAME: VALUE")
                found[name.strip()] = value.strip()
    return {**found, **_OWN_HEADERS}


class _Receiver:
    """One connection to the receiver, opened when it is needed."""

    def __init__(self, config: RemoteWriteConfig) -> None:
        self._config = config
        parts = urllib.parse.urlsplit(config.url)
        self._is_tls = parts.scheme == "https"
        self._address = parts.hostname or "", parts.port
        self._target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._connection: http.client.HTTPConnection | None = None

    def post(self, body: bytes) -> _Answer:
        """Sends one request and judges the answer."""
        try:
            headers = read_headers(self._config)
            if self._connection is None:
                self._connection = self._connect()
            self._connection.request("POST", self._target, body, headers)
            with self._connection.getresponse() as answer:
                text = answer.read(_ANSWER_BYTES_MOST)
                if answer.will_close or len(text) == _ANSWER_BYTES_MOST:
                    self.close()
                status, wait = answer.status, answer.getheader("Retry-After", "")
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.close()
            return _Answer(_Verdict.RETRIED, f"{type(error).__name__}: {error}")
        if 200 <= status < 300:
            return _Answer(_Verdict.WRITTEN)
        said = " ".join(text[:300].decode("utf-8", "replace").split())
        reason = f"HTTP {status}: {said}"
        if status == _TOO_MANY or status >= 500:
            return _Answer(_Verdict.RETRIED, reason, float(wait) if wait.isdecimal() else 0.0)
        return _Answer(_Verdict.DIVIDED if status in _DIVIDED else _Verdict.REFUSED, reason)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._address
        if self._is_tls:
            return http.client.HTTPSConnection(host, port, timeout=_REQUEST_S, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=_REQUEST_S)

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Buffer:
    """Parts that are not written yet, oldest first; beyond its bytes the oldest go."""

    def __init__(self, bytes_most: int) -> None:
        self._parts: deque[EncodedSamples] = deque()
        self._bytes_most = bytes_most
        self.bytes = self.samples = 0

    def add(self, part: EncodedSamples) -> int:
        """Adds a part; returns how many samples had to go for it."""
        self._parts.append(part)
        self.bytes += len(part.elements)
        self.samples += part.samples
        gone = 0
        while self.bytes > self._bytes_most:
            gone += self.pop().samples
        return gone

    def pop(self) -> EncodedSamples:
        """Takes the oldest out."""
        part = self._parts.popleft()
        self.bytes -= len(part.elements)
        self.samples -= part.samples
        return part

    def peek(self, samples_most: int) -> list[EncodedSamples]:
        """The oldest parts, at least one where there is one, with so many samples at most."""
        found: list[EncodedSamples] = []
        many = 0
        for part in self._parts:
            many += part.samples
            if found and many > samples_most:
                break
            found.append(part)
        return found


class RemoteWriter:
    """Writes what it is given to one receiver until it is stopped; made and called on the event loop."""

    def __init__(
        self,
        config: RemoteWriteConfig,
        *,
        instance: str,
        is_leading: Callable[[], bool],
        clock: Clock,
        log: logging.Logger,
        starts: bool = True,
    ) -> None:
        """`instance` names this controller, whose thread runs unless `starts` says not; raises ControllerConfigError for headers that cannot be read."""
        try:
            read_headers(config)
        except (OSError, ValueError) as error:
            raise ControllerConfigError(f"--remote-write-headers: {error}", "write lines of NAME: VALUE") from error
        self._config = config
        self._is_leading = is_leading
        self._clock = clock
        self._log = log
        self._interval_ms = int(config.interval_s * 1000)
        self._waiting: deque[tuple[Inventory, SampleBatch | EnergyWindow] | _Page] = deque()
        self._overruns = 0  # by the loop; all else is counted by the thread
        self._failures = 0
        self._samples: Counter[str] = Counter(written=0, refused=0, dropped=0, skipped=0)
        self._requests: Counter[str] = Counter(dict.fromkeys((one.value for one in _Verdict), 0))
        self._newest_ms = 0
        self._nodes: dict[str, NodeSeries] = {}
        self._owners = OwnerCounters(config.labels)
        self._page = PageSeries(config.labels, instance)
        self._buffer = _Buffer(config.buffer_bytes)
        self._receiver = _Receiver(config)
        self._backoff_s = 0.0
        self._not_before_s = 0.0
        self._is_failing = False
        self._logged_s = float("-inf")
        self._stopping = threading.Event()
        self._deadline_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="remote-write", daemon=True)
        if starts:
            self._thread.start()
        log.info("remote_write=%s interval_s=%g", config.url, config.interval_s)

    # On the event loop

    def on_batch(self, inventory: Inventory, batch: SampleBatch) -> None:
        """A node's batch came for the first time."""
        self._hand_over((inventory, batch))

    def on_window(self, inventory: Inventory, window: EnergyWindow) -> None:
        """A node's energy window is in the ledger."""
        self._hand_over((inventory, window))

    def on_page(self, families: "Iterable[MetricFamily | ClientFamily]") -> None:
        """What this controller's page has now."""
        self._hand_over(_Page(list(families), self._clock.now_ns() // 1_000_000))

    def _hand_over(self, one: tuple[Inventory, SampleBatch | EnergyWindow] | _Page) -> None:
        if not self._is_leading():
            return
        if len(self._waiting) >= _WAITING_MOST:
            self._overruns += 1
            return
        self._waiting.append(one)

    async def read_pages(self, read: "Callable[[], Awaitable[list[MetricFamily | ClientFamily]]]") -> None:
        """Hands over this controller's page once an interval, until cancelled."""
        while True:
            await asyncio.sleep(self._config.interval_s)
            try:
                if self._is_leading():
                    self.on_page(await read())
            except Exception:  # noqa: BLE001  # a fault in one number must not end all later pages
                self._failures += 1
                self._log.exception("remote_write=failed what=page")

    def families(self) -> Iterator[MetricFamily]:
        """What became of samples and requests."""
        yield build_family("eelgrid_remote_write_samples_total", dict(self._samples))
        yield build_family("eelgrid_remote_write_requests_total", dict(self._requests))
        yield build_family("eelgrid_remote_write_failures_total", self._failures)
        yield build_family("eelgrid_remote_write_overruns_total", self._overruns)
        yield build_family("eelgrid_remote_write_buffered_samples", self._buffer.samples)
        yield build_family("eelgrid_remote_write_buffered_bytes", self._buffer.bytes)
        if self._newest_ms:
            yield build_family("eelgrid_remote_write_newest_timestamp_seconds", self._newest_ms / 1000.0)

    def stop(self) -> None:
        """Sends what can be sent in a second, and ends the thread, or leaves it behind in a request; blocks."""
        self._deadline_s = self._clock.monotonic_s() + _STOP_S
        self._stopping.set()
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join(_STOP_S)
        if self._buffer.samples or self._thread.is_alive():
            self._log.warning("remote_write=stopped samples_not_written=%d", self._buffer.samples)

    # In the thread

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.wait(_LOOK_S)
            self.look()
        self._receiver.close()

    def look(self) -> None:
        """Encodes what has come, and sends what is due; only the thread calls it, or whoever stands for it."""
        self._encode()
        if self._stopping.is_set() or self._clock.monotonic_s() >= self._not_before_s:
            self._send()

    def _encode(self) -> None:
        """Encodes what has come into the buffer."""
        for _ in range(len(self._waiting)):
            one = self._waiting.popleft()
            try:
                parts, skipped = self._encode_one(one)
            except Exception:  # noqa: BLE001  # one bad element is left out and counted
                self._failures += 1
                self._log.exception("remote_write=failed what=%s", type(one[1]).__name__)
                continue
            self._samples["skipped"] += skipped
            for part in parts:
                self._samples["dropped"] += self._buffer.add(part)

    def _encode_one(
        self, one: tuple[Inventory, SampleBatch | EnergyWindow] | _Page
    ) -> tuple[list[EncodedSamples], int]:
        if isinstance(one, _Page):
            return self._page.encode_page(*one), 0
        inventory, message = one
        if isinstance(message, EnergyWindow):
            return self._owners.encode_window(inventory.node_name, message)
        now_ms = self._clock.now_ns() // 1_000_000
        node = self._nodes.pop(inventory.node_name, None)
        if node is None or node.inventory is not inventory:
            node = NodeSeries(inventory, self._config.labels, node)
        node.heard_ms = now_ms
        self._nodes[inventory.node_name] = node
        # The one that was heard of longest ago is first.
        if (oldest := next(iter(self._nodes.values()))).heard_ms < now_ms - _NODE_MS_MOST:
            del self._nodes[oldest.inventory.node_name]
        return node.encode_batch(message, interval_ms=self._interval_ms, now_ms=now_ms)

    def _send(self) -> None:
        """Sends what is buffered, oldest first, until it is empty or the receiver wants to be left alone."""
        while self._clock.monotonic_s() < self._deadline_s and (parts := self._buffer.peek(_REQUEST_SAMPLES_MOST)):
            if not self._write(parts):
                self._backoff_s = min(_BACKOFF_S_MOST, max(_BACKOFF_S, 2.0 * self._backoff_s))
                return
            self._backoff_s = 0.0
            # What comes while a long buffer is sent must not wait until its end.
            self._encode()

    def _write(self, parts: list[EncodedSamples]) -> bool:
        """Writes the oldest parts, divided as the receiver takes them; False where it wants the rest later."""
        rest, divisions = [parts], 0
        while rest:
            group = rest.pop(0)
            answer = self._receiver.post(build_request(group))
            self._requests[answer.verdict.value] += 1
            if answer.verdict is _Verdict.RETRIED:
                self._on_failure(answer)
                return False
            if answer.verdict is _Verdict.DIVIDED and len(group) > 1 and divisions < _DIVISIONS_MOST:
                divisions += 1
                half = len(group) // 2
                rest[:0] = [group[:half], group[half:]]
                continue
            is_written = answer.verdict is _Verdict.WRITTEN
            for _ in group:
                part = self._buffer.pop()
                self._samples["written" if is_written else "refused"] += part.samples
                if is_written:
                    self._newest_ms = max(self._newest_ms, part.newest_ms)
            if is_written:
                self._on_success()
            else:
                self._log_some(
                    "remote_write=refused samples=%d reason=%s", sum(one.samples for one in group), answer.reason
                )
        return True

    def _on_failure(self, answer: _Answer) -> None:
        wait_s = min(_BACKOFF_S_MOST, max(_BACKOFF_S, 2.0 * self._backoff_s, answer.wait_s))
        self._not_before_s = self._clock.monotonic_s() + wait_s
        if not self._is_failing:
            self._is_failing = True
            self._log.warning("remote_write=waiting reason=%s", answer.reason)

    def _on_success(self) -> None:
        if self._is_failing:
            self._is_failing = False
            self._log.info("remote_write=resumed buffered_samples=%d", self._buffer.samples)

    def _log_some(self, text: str, *given: object) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._logged_s >= _LOGGED_S:
            self._logged_s = now_s
            self._log.error(text, *given)
