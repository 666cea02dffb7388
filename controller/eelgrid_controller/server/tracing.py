"""Tracing of placements: endpoint of the collector, start and stop of the exporter."""

import asyncio
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio

from eelgrid_controller.core.steps import CommandOrigin
from eelgrid_controller.engines.kubernetes.pods.gate_events import BindPod, UngatePod
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import parse_plan
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.server.http.metrics_server import ControllerMetrics
from eelgrid_protos import __version__
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.transport import is_loopback

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ADDRESS = re.compile(r"(?:(https?)://)?((?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}))/?")
_HEADERS = ("traceparent", "tracestate")
# The specification's own bounds: 55 characters, and 512 that must be passed on.
_HEADER_MOST = 512
_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")
_INSTALL = "install it: pip install 'eelgrid[controller,tracing]'"


@dataclass(frozen=True, slots=True)
class CollectorEndpoint:
    """Where spans go: HOST:PORT, with TLS or without."""

    address: str
    tls: bool


def parse_endpoint(text: str) -> CollectorEndpoint:
    """The endpoint that was written; raises ControllerConfigError. Without a scheme it has TLS unless it is this machine."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[3]) <= 65_535:
        raise ControllerConfigError(
            f"--traces {text!r} is no address", "write HOST:PORT, http://HOST:PORT (no TLS) or https://HOST:PORT"
        )
    scheme, address = found[1], found[2]
    return CollectorEndpoint(address, tls=scheme == "https" if scheme else not is_loopback(address))


def _is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) for name in _NEEDED)
    except ModuleNotFoundError:
        # Of a package that lies above.
        return False


def resolve_endpoint(option: str, environ: Mapping[str, str], log: logging.Logger) -> CollectorEndpoint | None:
    """Where spans are to go; None for nowhere. Raises ControllerConfigError where the option asks for what cannot be."""
    if option:
        if not _is_installed():
            raise ControllerConfigError(
                f"--traces {option} needs OpenTelemetry, which is not here", f"{_INSTALL}, or leave --traces out"
            )
        return parse_endpoint(option)
    name = next((name for name in _VARIABLES if environ.get(name)), None)
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if name is None or off:
        return None
    protocol = next((environ[key] for key in _PROTOCOLS if environ.get(key)), "grpc")
    if protocol != "grpc":
        log.warning("traces=off reason=%s remedy=give an endpoint for grpc with --traces", f"protocol_is_{protocol}")
        return None
    if not _is_installed():
        log.warning("traces=off reason=opentelemetry_is_not_here remedy=%s, or unset %s", _INSTALL, name)
        return None
    return parse_endpoint(environ[name])


def extract_trace_headers(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """A caller's trace context from a call's metadata, as W3C's headers; what is too long is none."""
    found = {key: value for key, value in metadata or () if key in _HEADERS}
    return {key: value for key, value in found.items() if isinstance(value, str) and len(value) <= _HEADER_MOST}


class LoopInstrumentation:
    """What the loop tells while it works, for the metrics and, where placements are traced, for their traces."""

    def __init__(self, metrics: ControllerMetrics) -> None:
        self.tracing: Tracing | None = None
        self._metrics = metrics

    def origin(self, context: "grpc.aio.ServicerContext[Any, Any]") -> CommandOrigin | None:
        """Where a call comes from that arrives now; None where nobody asks."""
        if self.tracing is None:
            return None
        return CommandOrigin(self.tracing.now_ns(), extract_trace_headers(context.invocation_metadata()))

    def on_decision(self, duration_s: float, workload_id: str, origin: CommandOrigin | None) -> None:
        """A submission was decided on; an empty id for what has no explanation."""
        trace_id = self.tracing.traces.on_decision(duration_s, workload_id, origin) if self.tracing else ""
        self._metrics.on_decision(duration_s, workload_id, trace_id)

    def on_write(self, taken_s: float) -> None:
        """A batch of events was put on disk."""
        self._metrics.commit.observe(taken_s)
        if self.tracing is not None:
            self.tracing.traces.on_write(taken_s)


class Tracing:
    """Follows placements and sends their spans, from now until the stop."""

    def __init__(
        self,
        endpoint: CollectorEndpoint,
        *,
        instance: str,
        now_ns: Callable[[], int],
        has_agent: Callable[[str], bool],
        log: logging.Logger,
    ) -> None:
        """`instance` tells this cluster's controller from others; raises ControllerConfigError for what the exporter refuses."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        from eelgrid_controller.server.placement_traces import PlacementTraces, SpanSender

        scheme = "https" if endpoint.tls else "http"
        try:
            # Headers, certificates, compression and the timeout of a call are the standard environment's.
            exporter = OTLPSpanExporter(endpoint=f"{scheme}://{endpoint.address}", insecure=not endpoint.tls)
        except Exception as error:
            raise ControllerConfigError(
                f"the OTEL_EXPORTER_OTLP variables cannot be used ({error})", "correct them"
            ) from error
        about = {"service.name": "eelgrid-controller", "service.version": __version__, "service.instance.id": instance}
        named = Resource.create()
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win where they say something.
        said = {key: value for key, value in named.attributes.items() if not str(value).startswith("unknown_service")}
        # Asked for what the environment says of sampling; it makes no span itself.
        provider = TracerProvider(resource=Resource({**about, **said}), shutdown_on_exit=False)
        self.sender = SpanSender(exporter, provider, scope="eelgrid.placement", log=log)
        self.traces = PlacementTraces(self.sender, cluster=instance, now_ns=now_ns, has_agent=has_agent)
        self.now_ns = now_ns
        self._running = asyncio.create_task(self.traces.run())
        log.info("traces=%s tls=%s", endpoint.address, "on" if endpoint.tls else "off")

    def follow_pods(
        self, patches: list[Callable[[UngatePod | BindPod, int], None]], is_pod: Callable[[str], bool]
    ) -> None:
        """Hear of patches of pods, too; `is_pod` says which workloads have some."""

        def patched(asked: UngatePod | BindPod, start_ns: int) -> None:
            plan = parse_plan(asked.plan)
            if plan is not None:
                self.traces.on_pod_patched(plan.workload, plan.replica, plan.node_name, start_ns)

        self.traces.has_pod = is_pod
        patches.append(patched)

    def families(self) -> Iterable[MetricFamily]:
        """What became of traces and spans."""
        yield from self.traces.families()
        yield from self.sender.families()

    async def stop(self) -> None:
        """End what is open and send what can be sent within seconds."""
        self._running.cancel()
        self.traces.close()
        await asyncio.to_thread(self.sender.stop)
