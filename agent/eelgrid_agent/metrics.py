"""The Prometheus endpoint: /metrics, /livez and /readyz over HTTP.

Owns metric names, units (base units) and the server's threads. Must not change
a node: it reads attributes that the event loop replaces whole, so that no lock
is shared with it. The text is rendered in the thread of the scrape, at most
once for each tick; labels name a GPU by its UUID, which outlives an index. One
node shows its GPUs; a fleet shows the agent's own metrics only, since 1,213
nodes would be 60,000 series.

MetricsError                 the endpoint cannot be served; says what to do
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from eelgrid_agent.node import Node
from eelgrid_agent.sampler import GPU_READINGS, HOST_READINGS
from eelgrid_protos import __version__
from eelgrid_protos.messages import Gpu, Reading
from eelgrid_protos.transport import TlsFiles, is_loopback

if TYPE_CHECKING:
    import ssl

__all__ = ["AgentCollector", "MetricsError", "MetricsServer", "Page"]

SCRAPES_MOST = 8
REQUEST_S_MOST = 10.0
# The event loop is taken for dead when nothing was sampled for this long and four intervals.
SILENCE_S_MOST = 60.0
SILENCE_INTERVALS = 4.0

_HERTZ = 1e6
_GPU_GAUGES = (
    ("eelgrid_gpu_power_watts", "Board power.", Reading.POWER_W, 1.0),
    (
        "eelgrid_gpu_utilization_ratio",
        "Share of the last period in which a kernel ran.",
        Reading.UTILIZATION_RATIO,
        1.0,
    ),
    ("eelgrid_gpu_memory_used_bytes", "Memory in use.", Reading.MEMORY_USED_BYTES, 1.0),
    ("eelgrid_gpu_sm_clock_hertz", "Clock of the multiprocessors.", Reading.SM_CLOCK_MHZ, _HERTZ),
    ("eelgrid_gpu_memory_clock_hertz", "Clock of the memory.", Reading.MEMORY_CLOCK_MHZ, _HERTZ),
    ("eelgrid_gpu_temperature_celsius", "Temperature of the device.", Reading.TEMPERATURE_C, 1.0),
    ("eelgrid_gpu_power_limit_watts", "Power limit that the device enforces.", Reading.POWER_LIMIT_W, 1.0),
)
_HOST_GAUGES = (
    ("eelgrid_host_cpu_utilization_ratio", "Share of the host's CPUs in use.", Reading.HOST_CPU_UTILIZATION_RATIO),
    ("eelgrid_host_memory_used_bytes", "Memory of the host in use.", Reading.HOST_MEMORY_USED_BYTES),
)


class MetricsError(Exception):
    """The endpoint cannot be served; the message says what to do."""


class AgentCollector:
    """The agent's metrics, read from its nodes at the moment of the scrape."""

    def __init__(
        self, nodes: Sequence[Node], *, connections: Callable[[], int], monotonic_ns: Callable[[], int]
    ) -> None:
        self._nodes = nodes
        self._connections = connections
        self._monotonic_ns = monotonic_ns

    def collect(self) -> Iterator[Metric]:
        """Every metric, in base units."""
        yield from self._agent()
        if len(self._nodes) == 1:
            yield from _gpus(self._nodes[0])

    def oldest_s(self) -> float | None:
        """Age of the oldest newest tick; None before every node has one."""
        newest = [node.last_tick_ns for node in self._nodes if node.last_tick is not None]
        if len(newest) < len(self._nodes):
            return None
        return max(0.0, (self._monotonic_ns() - min(newest, default=self._monotonic_ns())) / 1e9)

    def slowest_interval_s(self) -> float:
        """The longest sample interval of any node."""
        return max((node.cadence.sample_interval_s for node in self._nodes), default=1.0)

    def _agent(self) -> Iterator[Metric]:
        nodes = self._nodes
        yield InfoMetricFamily("eelgrid_agent", "This agent.", value={"version": __version__})
        totals = (
            ("eelgrid_agent_samples", "Ticks sampled.", sum(node.ticks_total for node in nodes)),
            ("eelgrid_agent_batches", "Batches sent, resends too.", sum(node.batches_total for node in nodes)),
            (
                "eelgrid_agent_dropped_samples",
                "Ticks dropped from a full spool.",
                sum(node.spool.dropped_total for node in nodes),
            ),
            ("eelgrid_agent_connections", "Connections that the controller welcomed.", self._connections()),
            (
                "eelgrid_agent_uncounted_seconds",
                "Device-seconds whose energy is in no total.",
                sum(node.uncounted_s for node in nodes),
            ),
        )
        for name, text, total in totals:
            yield CounterMetricFamily(name, text, value=total)
        gauges = (
            ("eelgrid_agent_nodes", "Nodes of this process.", len(nodes)),
            ("eelgrid_agent_connected_nodes", "Nodes with a stream.", sum(node.connected for node in nodes)),
            ("eelgrid_agent_spool_ticks", "Ticks not sent yet.", sum(node.spool.waiting_ticks for node in nodes)),
            ("eelgrid_agent_batches_under_way", "Not acknowledged.", sum(node.spool.under_way for node in nodes)),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        oldest_s = self.oldest_s()
        if oldest_s is not None:
            yield GaugeMetricFamily(
                "eelgrid_agent_sample_age_seconds", "Age of the oldest newest tick.", value=oldest_s
            )


def _gpus(node: Node) -> Iterator[Metric]:
    """One node's devices; what is absent has no series, never a number that means absent."""
    tick, inventory = node.last_tick, node.inventory
    info = InfoMetricFamily("eelgrid_gpu", "Identity of a device.", labels=["node", "gpu"])
    for gpu in inventory.gpus:
        info.add_metric([node.name, gpu.uuid], _identity(gpu))
    yield info
    if tick is None or tick.generation != inventory.generation:
        return
    absent = {position for position, _ in tick.gpu_absences}

    def cells(reading: Reading) -> Iterator[tuple[list[str], float]]:
        row = GPU_READINGS.index(reading) * tick.gpus
        for index, gpu in enumerate(inventory.gpus):
            if row + index not in absent:
                yield [node.name, gpu.uuid], tick.gpu_values[row + index]

    for name, text, reading, scale in _GPU_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["node", "gpu"])
        for labels, value in cells(reading):
            gauge.add_metric(labels, value * scale)
        yield gauge
    energy = CounterMetricFamily("eelgrid_gpu_energy_joules", "Since the agent began.", labels=["node", "gpu"])
    for labels, value in cells(Reading.ENERGY_J):
        energy.add_metric(labels, value)
    yield energy
    host_absent = {position for position, _ in tick.host_absences}
    for name, text, reading in _HOST_GAUGES:
        row = HOST_READINGS.index(reading)
        if row not in host_absent:
            gauge = GaugeMetricFamily(name, text, labels=["node"])
            gauge.add_metric([node.name], tick.host_values[row])
            yield gauge


def _identity(gpu: Gpu) -> dict[str, str]:
    return {"index": str(gpu.index), "product": gpu.product, "model": gpu.model, "pci_bus_id": gpu.pci_bus_id}


class Page:
    """The rendered text, made at most once for each tick and second."""

    def __init__(self, collector: AgentCollector, *, ticks: Callable[[], int], monotonic_ns: Callable[[], int]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._collector = collector
        self._ticks = ticks
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._key: tuple[int, int] | None = None
        self._text = b""
        self.renders_total = 0

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        match path.partition("?")[0]:
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, self._metrics()
            case "/livez":
                return self._live()
            case "/readyz":
                ready = self._collector.oldest_s() is not None
                return _plain(200, "ready") if ready else _plain(503, "not every node has been sampled yet")
            case _:
                return _plain(404, "ask for /metrics, /livez or /readyz")

    def _live(self) -> tuple[int, str, bytes]:
        age_s = self._collector.oldest_s()
        bound_s = max(SILENCE_S_MOST, SILENCE_INTERVALS * self._collector.slowest_interval_s())
        if age_s is not None and age_s > bound_s:
            return _plain(503, f"nothing was sampled for {age_s:.0f} s")
        return _plain(200, "alive")

    def _metrics(self) -> bytes:
        with self._lock:
            key = (self._ticks(), self._monotonic_ns() // 1_000_000_000)
            if key != self._key:
                self._text = generate_latest(self._registry)
                self._key = key
                self.renders_total += 1
            return self._text


def _plain(status: int, text: str) -> tuple[int, str, bytes]:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


class MetricsServer:
    """The HTTP server: a thread that accepts, and at most SCRAPES_MOST that answer."""

    def __init__(self, address: str, page: Page, *, tls: TlsFiles | None, insecure: bool) -> None:
        secured = tls if tls is not None and not is_loopback(address) else None
        if secured is None and not is_loopback(address) and not insecure:
            raise MetricsError(
                f"--metrics {address} can be reached from other machines; give --tls-certificate, --tls-key and "
                "--tls-authority, or say --insecure"
            )
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server((host.strip("[]"), int(port)), page, secured)
        except OSError as error:
            reason = error.strerror or str(error)
            remedy = "choose another with --metrics, or end the program that has it"
            raise MetricsError(f"cannot serve metrics on {address}: {reason}; {remedy}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.25), name="metrics", daemon=True
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

    def __init__(self, address: tuple[str, int], page: Page, tls: TlsFiles | None) -> None:
        self.page = page
        self._tls = tls
        self._stamp: object = None
        self._context: ssl.SSLContext | None = None
        self._slots = threading.BoundedSemaphore(SCRAPES_MOST)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A scrape beyond the bound is turned away rather than queued."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """TLS is shaken hands on here, so that a slow client holds up its own thread only."""
        try:
            super().process_request_thread(self._secure(request), client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is its own business."""

    def _secure(self, request: socket) -> socket:
        request.settimeout(REQUEST_S_MOST)
        if self._tls is None:
            return request
        import ssl

        stamp = self._tls.stamp()
        if self._context is None or stamp != self._stamp:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self._tls.authority))
            context.load_cert_chain(self._tls.certificate, self._tls.key)
            context.verify_mode = ssl.CERT_REQUIRED
            self._context, self._stamp = context, stamp
        return self._context.wrap_socket(request, server_side=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.0"
    timeout = REQUEST_S_MOST
    server_version = f"eelgrid-agent/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:  # the name that http.server asks for
        status, content_type, body = self.server.page.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name in http.server
        """Scrapes are not logged."""
