"""Metrics of the controller, and the HTTP server for scrapers and probes."""

import asyncio
import contextlib
import http
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import Metric

from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.server.metrics.catalogue import BUCKETS_S, METRICS, MetricFamily, build_family
from eelgrid_controller.server.metrics.openmetrics import (
    CONTENT_OPENMETRICS,
    CONTENT_PROMETHEUS,
    render_openmetrics,
    render_prometheus,
)
from eelgrid_controller.state.journal import JournalCounters
from eelgrid_protos import __version__
from eelgrid_protos.http_hosts import HttpHosts
from eelgrid_protos.messages import Summary
from eelgrid_protos.probes import PendingConnections
from eelgrid_protos.transport import is_loopback

_LAG_EVERY_S = 0.25
_REQUEST_BYTES_MOST = 8192
_REQUEST_WITHIN_S = 5.0
_CONNECTIONS_MOST = 32
_SETTLED_WITHIN_S = 2.0
# Of a request's header; a scraper lists four.
_CHOICES_MOST = 32
# The format's bound on names and values of an exemplar's labels, in characters.
_EXEMPLAR_MOST = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellGauges:
    """What a Summary does not hold."""

    agents_connected: int
    commands_queued: int
    plans_sent: int
    batches_refused: int
    duplicates: int
    lag_s: float
    is_accepting: bool
    agent_events: Mapping[str, int]
    delayed_events: int
    over_limit: Mapping[str, int]
    ended_connections: Mapping[str, int]
    journal: JournalCounters
    rollbacks: int
    nodes_ahead: int


class MetricSources(Protocol):
    """Where values come from when a scrape asks."""

    async def settled(self) -> None:
        """Return at a moment when all that can be read is on disk."""

    def summary(self) -> Summary:
        """The cluster at a glance."""

    def gauges(self) -> ShellGauges:
        """The shell at a glance."""

    def steward(self) -> Iterable[MetricFamily]:
        """What the steward tells."""


class ControllerMetrics:
    """Everything on the controller's page; durations and the process are the client library's to keep."""

    def __init__(self) -> None:
        self._kept = CollectorRegistry()
        self._sources: MetricSources | None = None
        self._parts: list[tuple[Callable[[], Iterable[MetricFamily]], bool]] = []
        self._is_settled = True
        made = {
            name: Histogram(name, METRICS[name].help, buckets=bounds, registry=self._kept)
            for name, bounds in BUCKETS_S.items()
        }
        self.decision = made["eelgrid_decision_duration_seconds"]
        self.commit = made["eelgrid_journal_commit_duration_seconds"]
        self.lag = made["eelgrid_event_loop_lag_seconds"]
        self.turn = made["eelgrid_steward_turn_duration_seconds"]
        self.division = made["eelgrid_steward_division_duration_seconds"]
        ProcessCollector(registry=self._kept)

    def attach(self, sources: MetricSources) -> None:
        """Ask these from now on; before, only durations are told."""
        self._sources = sources

    def add(self, part: Callable[[], Iterable[MetricFamily]], *, reads_state: bool = False) -> None:
        """Ask this one, too; a part that reads the state is not asked while that is ahead of the disk."""
        self._parts.append((part, reads_state))

    def on_decision(self, duration_s: float, workload_id: str, trace_id: str = "") -> None:
        """A submission was decided on; the exemplar leads to its explanation and its trace. Empty ids for one without."""
        self.decision.observe(duration_s, _exemplar(workload_id, trace_id))

    def collect(self) -> Iterator[MetricFamily | Metric]:
        """Every value, as of now."""
        for one in self._kept.collect():
            # When each histogram began, by the client library: five more series that nobody asked for.
            one.samples = [sample for sample in one.samples if not sample.name.endswith("_created")]
            yield one
        yield build_family("eelgrid_controller_info", {__version__: 1.0})
        if self._sources is not None:
            yield from _shell(self._sources.gauges())
            if self._is_settled:
                yield from _cluster(self._sources.summary())
                yield from self._sources.steward()
        for part, reads_state in self._parts:
            if self._is_settled or not reads_state:
                yield from part()

    async def render_page(self, *, opened: bool = False) -> bytes:
        """The page of all values, as Prometheus' text or, with exemplars, as OpenMetrics."""
        families = await self._read()
        # Values are read in one go, where they belong together; making the text of them takes longer and needs nobody.
        return await asyncio.to_thread(render_openmetrics if opened else render_prometheus, families)

    async def _read(self) -> list[MetricFamily | Metric]:
        try:
            async with asyncio.timeout(_SETTLED_WITHIN_S):
                if self._sources is not None:
                    await self._sources.settled()
            self._is_settled = True
        except TimeoutError:
            self._is_settled = False
        return list(self.collect())

    async def measure_loop_lag(self) -> None:
        """Measure how late the loop is, until cancelled."""
        while True:
            start_s = time.perf_counter()
            await asyncio.sleep(_LAG_EVERY_S)
            self.lag.observe(max(0.0, time.perf_counter() - start_s - _LAG_EVERY_S))


def _exemplar(workload_id: str, trace_id: str) -> dict[str, str] | None:
    """What leads on from an observation; the trace alone where there is no room for both, for it names the workload."""
    both = {key: value for key, value in (("trace_id", trace_id), ("workload", workload_id)) if value}
    for labels in (both, {"trace_id": trace_id} if trace_id else {}):
        if labels and sum(len(key) + len(value) for key, value in labels.items()) <= _EXEMPLAR_MOST:
            return labels
    return None


def _cluster(summary: Summary) -> Iterator[MetricFamily]:
    whole = 1000.0 * summary.gpus
    yield build_family("eelgrid_nodes", {"ready": summary.nodes_ready, "lost": summary.nodes_lost})
    yield build_family(
        "eelgrid_workloads", {"pending": summary.pending, "placed": summary.placed, "cancelled": summary.cancelled}
    )
    yield build_family("eelgrid_gpus", {model.model: model.gpus for model in summary.models})
    yield build_family("eelgrid_gpus_allocated_ratio", summary.allocated_gpu_milli / whole if whole else 0.0)
    yield build_family(
        "eelgrid_cpus_allocated_ratio", summary.allocated_cpu_milli / summary.cpu_milli if summary.cpu_milli else 0.0
    )
    yield build_family(
        "eelgrid_measured_power_watts", {model.model: model.measured_power_w for model in summary.models}
    )
    yield build_family("eelgrid_measured_gpus", summary.measured_gpus)
    yield build_family("eelgrid_modelled_power_watts", summary.modelled_power_w)
    yield build_family("eelgrid_workloads_refused_total", summary.refused)
    yield build_family("eelgrid_samples_received_total", summary.samples_received)
    yield build_family("eelgrid_samples_lost_total", summary.samples_lost)
    yield build_family("eelgrid_state_revision", summary.revision)


def _shell(gauges: ShellGauges) -> Iterator[MetricFamily]:
    yield build_family("eelgrid_agents_connected", gauges.agents_connected)
    yield build_family("eelgrid_commands_queued", gauges.commands_queued)
    yield build_family("eelgrid_journal_writable", float(gauges.is_accepting))
    yield build_family("eelgrid_journal_lag_seconds", gauges.lag_s)
    yield build_family("eelgrid_plans_sent_total", gauges.plans_sent)
    yield build_family("eelgrid_batches_refused_total", gauges.batches_refused)
    yield build_family("eelgrid_batches_duplicate_total", gauges.duplicates)
    yield build_family("eelgrid_agent_events_total", dict(gauges.agent_events))
    yield build_family("eelgrid_delayed_agent_events_total", gauges.delayed_events)
    yield build_family("eelgrid_excess_calls_total", dict(gauges.over_limit))
    yield build_family("eelgrid_ended_connections_total", dict(gauges.ended_connections))
    journal = gauges.journal
    yield build_family("eelgrid_journal_commits_total", journal.commits)
    yield build_family("eelgrid_journal_entries_total", journal.entries)
    yield build_family("eelgrid_journal_written_bytes_total", journal.bytes_written)
    yield build_family("eelgrid_journal_checkpoints_total", journal.checkpoints)
    yield build_family("eelgrid_journal_checkpoint_bytes", journal.checkpoint_bytes)
    yield build_family("eelgrid_journal_rollbacks_total", gauges.rollbacks)
    yield build_family("eelgrid_ahead_nodes", gauges.nodes_ahead)


class ControllerMetricsServer:
    """HTTP for scrapers and probes; `is_ready` tells /readyz."""

    def __init__(
        self,
        metrics: ControllerMetrics,
        *,
        is_ready: Callable[[], bool],
        insecure: bool,
        log: logging.Logger,
        host_names: Sequence[str] = (),
    ) -> None:
        self._host_names = host_names
        self._hosts = HttpHosts("", host_names)
        self._metrics = metrics
        self._insecure = insecure
        self._is_ready = is_ready
        self._log = log
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._silent = PendingConnections(_CONNECTIONS_MOST)

    async def start(self, address: str) -> int:
        """Listen and return the port; raises ConfigError."""
        self._hosts = HttpHosts(address, self._host_names)
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit() or int(port) > 65_535:
            raise ControllerConfigError(
                f"--metrics {address!r} is no address", "write HOST:PORT, for example 127.0.0.1:9464"
            )
        if not is_loopback(address):
            if not self._insecure:
                raise ControllerConfigError(
                    f"--metrics {address} can be reached from other machines and has no TLS",
                    "listen on loopback and scrape through a proxy, or say --insecure",
                )
            self._log.warning("metrics=%s tls=off warning=whoever reaches this address can read it", address)
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]") or None, int(port), limit=_REQUEST_BYTES_MOST
            )
        except OSError as error:
            raise ControllerConfigError(
                f"cannot serve metrics on {address} ({error.strerror or error})",
                "choose another with --metrics, or end the program that has it",
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Close the door; connections end by themselves within seconds."""
        self._silent.end_all()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Who says nothing does not keep out who does: of those the oldest goes.
        self._silent.add_connection(writer.transport)
        is_counted = False
        try:
            async with asyncio.timeout(_REQUEST_WITHIN_S):
                head = await reader.readuntil(b"\r\n\r\n")
            self._silent.discard_connection(writer.transport)
            self._connections += 1
            is_counted = True
            if self._connections > _CONNECTIONS_MOST:
                status, kind, body = http.HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"too many connections\n"
            else:
                request, *fields = head.decode("latin-1").split("\r\n")
                status, kind, body = await self._answer_request(request.split(" "), fields)
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
            self._connections -= is_counted
            self._silent.discard_connection(writer.transport)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer_request(self, request: list[str], fields: Sequence[str]) -> tuple[http.HTTPStatus, str, bytes]:
        if not all(map(self._hosts.allows, _values(fields, "host"))):
            said = b"this Host is none of ours; name it with --metrics-host if it is\n"
            return http.HTTPStatus.MISDIRECTED_REQUEST, "text/plain", said
        if len(request) != 3 or request[0] != "GET":
            return http.HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET is answered\n"
        match request[1].partition("?")[0]:
            case "/metrics":
                wanted = prefers_openmetrics(",".join(_values(fields, "accept")))
                kind = CONTENT_OPENMETRICS if wanted else CONTENT_PROMETHEUS
                try:
                    return http.HTTPStatus.OK, kind, await self._metrics.render_page(opened=wanted)
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


def _values(fields: Sequence[str], wanted: str) -> list[str]:
    """Every value of a header field of a request."""
    found = (line.partition(":") for line in fields)
    return [value for name, _, value in found if name.strip().lower() == wanted]


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept field likes OpenMetrics 1.0 at least as well as plain text."""
    liked = plain = 0.0
    for choice in accept.split(",")[:_CHOICES_MOST]:
        name, *rest = (part.strip().lower() for part in choice.split(";"))
        parameters = {key.strip(): value.strip(' "') for key, _, value in (part.partition("=") for part in rest)}
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            continue
        if name == "application/openmetrics-text" and parameters.get("version", "1.0.0") in ("1.0.0", "0.0.1"):
            liked = max(liked, quality)
        elif name == "text/plain":
            plain = max(plain, quality)
    return liked > 0.0 and liked >= plain
