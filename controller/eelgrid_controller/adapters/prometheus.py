"""Prometheus: what the controller tells of itself, and the page that tells it.

Owns metric names (a contract: they only grow), their units (base units, in the
name) and a small HTTP server for /metrics, /livez and /readyz. Must not know
how numbers come about; it asks for a Summary and a few gauges when scraped.

Theory: values are read when somebody asks, on the loop's own thread, so they
are consistent and cost nothing in between; only durations are observed as they
happen. The server runs on the loop because a scrape takes 2 ms; it answers GET
and nothing else, within bounds on size, time and connections.
"""

import asyncio
import contextlib
import http
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from eelgrid_controller.errors import ConfigError
from eelgrid_controller.journal import JournalCounters
from eelgrid_protos import __version__
from eelgrid_protos.messages import Summary
from eelgrid_protos.transport import is_loopback

__all__ = ["Gauges", "Metrics", "MetricsServer", "Sources"]

_LATENCY_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_LAG_EVERY_S = 0.25
_REQUEST_BYTES_MOST = 8192
_REQUEST_WITHIN_S = 5.0
_CONNECTIONS_MOST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What a Summary does not hold."""

    agents_connected: int
    commands_queued: int
    plans_sent: int
    batches_refused: int
    duplicates: int
    is_accepting: bool
    agent_events: Mapping[str, int]
    journal: JournalCounters


class Sources(Protocol):
    """Where values come from when a scrape asks."""

    async def settled(self) -> None:
        """Return at a moment when all that can be read is on disk."""

    def summary(self) -> Summary:
        """The cluster at a glance."""

    def gauges(self) -> Gauges:
        """The shell at a glance."""


class Metrics:
    """The controller's own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._sources: Sources | None = None
        self.decision = self._histogram("eelgrid_decision_duration_seconds", "Time to decide on one submission")
        self.commit = self._histogram("eelgrid_journal_commit_duration_seconds", "Time to put one batch on disk")
        self.lag = self._histogram("eelgrid_event_loop_lag_seconds", "How late the event loop wakes a sleeper")
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def _histogram(self, name: str, documentation: str) -> Histogram:
        return Histogram(name, documentation, buckets=_LATENCY_BUCKETS_S, registry=self.registry)

    def attach(self, sources: Sources) -> None:
        """Ask these from now on; before, only durations are told."""
        self._sources = sources

    def describe(self) -> list[Metric]:
        """No names in advance: collecting at registration would ask sources that are not there yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every value, as of now."""
        yield InfoMetricFamily("eelgrid_controller", "The program", value={"version": __version__})
        if self._sources is not None:
            yield from _cluster(self._sources.summary())
            yield from _shell(self._sources.gauges())

    async def page(self) -> bytes:
        """The page of all values."""
        if self._sources is not None:
            await self._sources.settled()
        return generate_latest(self.registry)

    async def watch_lag(self) -> None:
        """Measure how late the loop is, until cancelled."""
        while True:
            start_s = time.perf_counter()
            await asyncio.sleep(_LAG_EVERY_S)
            self.lag.observe(max(0.0, time.perf_counter() - start_s - _LAG_EVERY_S))


def _labelled(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _cluster(summary: Summary) -> Iterator[Metric]:
    yield _labelled(
        "eelgrid_nodes", "Nodes by state", "state", {"ready": summary.nodes_ready, "lost": summary.nodes_lost}
    )
    yield _labelled(
        "eelgrid_workloads", "Workloads by phase", "phase",
        {"pending": summary.pending, "placed": summary.placed, "cancelled": summary.cancelled},
    )  # fmt: skip
    yield _labelled("eelgrid_gpus", "GPUs by model", "model", {model.model: model.gpus for model in summary.models})
    whole = 1000.0 * summary.gpus
    yield GaugeMetricFamily(
        "eelgrid_gpus_allocated_ratio", "Allocated share of all GPUs",
        value=summary.allocated_gpu_milli / whole if whole else 0.0,
    )  # fmt: skip
    yield GaugeMetricFamily(
        "eelgrid_cpus_allocated_ratio", "Allocated share of all CPUs",
        value=summary.allocated_cpu_milli / summary.cpu_milli if summary.cpu_milli else 0.0,
    )  # fmt: skip
    yield _labelled(
        "eelgrid_measured_power_watts", "Sum of fresh power readings by GPU model", "model",
        {model.model: model.measured_power_w for model in summary.models},
    )  # fmt: skip
    yield GaugeMetricFamily("eelgrid_measured_gpus", "GPUs with a fresh power reading", value=summary.measured_gpus)
    yield GaugeMetricFamily(
        "eelgrid_modelled_power_watts", "Power that the model gives for the present placement",
        value=summary.modelled_power_w,
    )  # fmt: skip
    yield CounterMetricFamily("eelgrid_workloads_refused", "Submissions refused", value=summary.refused)
    yield CounterMetricFamily("eelgrid_samples_received", "Ticks of nodes that came", value=summary.samples_received)
    yield CounterMetricFamily("eelgrid_samples_lost", "Ticks of nodes that never came", value=summary.samples_lost)
    yield GaugeMetricFamily("eelgrid_state_revision", "Events applied since the beginning", value=summary.revision)


def _shell(gauges: Gauges) -> Iterator[Metric]:
    yield GaugeMetricFamily("eelgrid_agents_connected", "Agents with an open stream", value=gauges.agents_connected)
    yield GaugeMetricFamily("eelgrid_commands_queued", "Commands that wait", value=gauges.commands_queued)
    yield GaugeMetricFamily(
        "eelgrid_journal_writable", "0 while a full or failing disk stops acceptance", value=float(gauges.is_accepting)
    )
    yield CounterMetricFamily("eelgrid_plans_sent", "Node plans sent to agents", value=gauges.plans_sent)
    yield CounterMetricFamily("eelgrid_batches_refused", "Batches that contradict", value=gauges.batches_refused)
    yield CounterMetricFamily("eelgrid_batches_duplicate", "Batches that came again", value=gauges.duplicates)
    events = CounterMetricFamily("eelgrid_agent_events", "Events that agents reported", labels=["kind"])
    for kind, count in gauges.agent_events.items():
        events.add_metric([kind], count)
    yield events
    journal = gauges.journal
    yield CounterMetricFamily("eelgrid_journal_commits", "Batches put on disk", value=journal.commits)
    yield CounterMetricFamily("eelgrid_journal_entries", "Events put on disk", value=journal.entries)
    yield CounterMetricFamily("eelgrid_journal_written_bytes", "Bytes of events", value=journal.bytes_written)
    yield CounterMetricFamily("eelgrid_journal_checkpoints", "Checkpoints written", value=journal.checkpoints)
    yield GaugeMetricFamily(
        "eelgrid_journal_checkpoint_bytes", "Size of the last checkpoint", value=journal.checkpoint_bytes
    )


class MetricsServer:
    """HTTP for scrapers and probes; `is_ready` tells /readyz."""

    def __init__(self, metrics: Metrics, *, is_ready: Callable[[], bool], insecure: bool, log: logging.Logger) -> None:
        self._metrics = metrics
        self._insecure = insecure
        self._is_ready = is_ready
        self._log = log
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self, address: str) -> int:
        """Listen and return the port; raises ConfigError."""
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit() or int(port) > 65_535:
            raise ConfigError(f"--metrics {address!r} is no address", "write HOST:PORT, for example 127.0.0.1:9464")
        if not is_loopback(address):
            if not self._insecure:
                raise ConfigError(
                    f"--metrics {address} can be reached from other machines and has no TLS",
                    "listen on loopback and scrape through a proxy, or say --insecure",
                )
            self._log.warning("metrics=%s tls=off warning=whoever reaches this address can read it", address)
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]") or None, int(port), limit=_REQUEST_BYTES_MOST
            )
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {address} ({error.strerror or error})",
                "choose another with --metrics, or end the program that has it",
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Close the door; connections end by themselves within seconds."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > _CONNECTIONS_MOST:
                status, kind, body = http.HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"too many connections\n"
            else:
                async with asyncio.timeout(_REQUEST_WITHIN_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = await self._answer(head.split(b"\r\n", 1)[0].decode("latin-1").split(" "))
            writer.write(
                f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            async with asyncio.timeout(_REQUEST_WITHIN_S):
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # A peer that says nothing, too much, or goes: there is nobody to tell.
            pass
        finally:
            self._connections -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, request: list[str]) -> tuple[http.HTTPStatus, str, bytes]:
        if len(request) != 3 or request[0] != "GET":
            return http.HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET is answered\n"
        match request[1].partition("?")[0]:
            case "/metrics":
                try:
                    return http.HTTPStatus.OK, CONTENT_TYPE_LATEST, await self._metrics.page()
                except Exception:  # noqa: BLE001  # a fault in one number must not end the page for good
                    self._log.exception("metrics=failed")
                    return http.HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"see the controller's log\n"
            case "/livez":
                return http.HTTPStatus.OK, "text/plain", b"ok\n"
            case "/readyz" if self._is_ready():
                return http.HTTPStatus.OK, "text/plain", b"ok\n"
            case "/readyz":
                return http.HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"not serving\n"
        return http.HTTPStatus.NOT_FOUND, "text/plain", b"try /metrics, /livez or /readyz\n"
