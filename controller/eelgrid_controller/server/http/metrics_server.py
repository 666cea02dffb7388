"""Metrics of the controller, and the HTTP server for scrapers and probes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import Metric

from eelgrid_controller.server.http.application import EndpointSettings, HttpEndpoint, check_exposure
from eelgrid_controller.server.metrics.catalogue import BUCKETS_S, METRICS, build_family
from eelgrid_protos import __version__
from eelgrid_protos.messages import Summary
from eelgrid_protos.openmetrics import (
    CONTENT_OPENMETRICS,
    CONTENT_PROMETHEUS,
    MetricFamily,
    prefers_openmetrics,
    render_openmetrics,
    render_prometheus,
)
from eelgrid_protos.sockets import HttpHosts

_LAG_EVERY_S = 0.25
_SETTLED_WITHIN_S = 2.0
# The format's bound on names and values of an exemplar's labels, in characters.
_EXEMPLAR_MOST = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """Where values come from when a scrape asks."""

    settled: Callable[[], Awaitable[object]]  # returns at a moment when all that can be read is on disk
    summary: Callable[[], Summary]  # the cluster at a glance
    shell: Callable[[], Iterable[MetricFamily]]  # the controller's own work
    objectives: Callable[[], Iterable[MetricFamily]]  # the objectives loop


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
        self.idle_gap = made["eelgrid_gpu_idle_gap_seconds"]
        self.lag = made["eelgrid_event_loop_lag_seconds"]
        self.turn = made["eelgrid_objectives_cycle_duration_seconds"]
        self.division = made["eelgrid_objectives_allocation_duration_seconds"]
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
            yield from self._sources.shell()
            if self._is_settled:
                yield from _cluster(self._sources.summary())
                yield from self._sources.objectives()
        for part, reads_state in self._parts:
            if self._is_settled or not reads_state:
                yield from part()

    async def render_page(self, *, opened: bool = False) -> bytes:
        """The page of all values, as Prometheus' text or, with exemplars, as OpenMetrics."""
        families = await self.read_families()
        # Values are read in one go, where they belong together; making the text of them takes longer and needs nobody.
        return await asyncio.to_thread(render_openmetrics if opened else render_prometheus, families)

    async def read_families(self) -> list[MetricFamily | Metric]:
        """Every value that belongs on a page, of one moment at which what can be read is on disk."""
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


_SETTINGS = EndpointSettings(
    flag="--metrics",
    name="metrics",
    example="127.0.0.1:9464",
    methods=frozenset({"GET"}),
    body_bytes_most=1024,
    line_bytes_most=8192,
    first_request_s=5.0,
    # Who says nothing does not keep out who does.
    silent_connections_most=32,
    keepalive_s=0.0,
    requests_at_once_most=32,
    send_s=5.0,
    exposed_remedy="listen on loopback and scrape through a proxy, or say --insecure",
)


class ControllerMetricsServer:
    """Serves scrapers and probes; `is_ready` tells /readyz."""

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
        self._metrics = metrics
        self._insecure = insecure
        self._is_ready = is_ready
        self._log = log
        self._endpoint: HttpEndpoint | None = None

    async def start(self, address: str) -> int:
        """Listens and returns the port; raises ControllerConfigError."""
        routes = (
            web.get("/metrics", self._send_metrics),
            web.get("/livez", self._send_liveness),
            web.get("/readyz", self._send_readiness),
            web.get("/{path:.*}", self._send_directions),
        )
        self._endpoint = HttpEndpoint(
            _SETTINGS,
            routes,
            allows_host=HttpHosts(address, self._host_names).allows,
            host_refusal="this Host is none of ours; name it with --metrics-host if it is",
        )
        check_exposure(_SETTINGS, address, insecure=self._insecure, log=self._log)
        return await self._endpoint.start(address)

    async def stop(self) -> None:
        """Closes the listening socket and connections."""
        if self._endpoint is not None:
            await self._endpoint.stop()

    async def _send_metrics(self, request: web.Request) -> web.Response:
        wanted = prefers_openmetrics(",".join(request.headers.getall("Accept", [])))
        try:
            page = await self._metrics.render_page(opened=wanted)
        except Exception:  # noqa: BLE001  # a fault in one number must not end the page for good
            self._log.exception("metrics=failed")
            return web.Response(status=500, text="see the controller's log\n")
        return web.Response(body=page, headers={"Content-Type": CONTENT_OPENMETRICS if wanted else CONTENT_PROMETHEUS})

    async def _send_liveness(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _send_readiness(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n") if self._is_ready() else web.Response(status=503, text="not serving\n")

    async def _send_directions(self, _request: web.Request) -> web.Response:
        return web.Response(status=404, text="try /metrics, /livez or /readyz\n")
