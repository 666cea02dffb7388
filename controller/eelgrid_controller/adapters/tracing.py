"""Tracing as one part of a controller: whether it is wanted, where spans go, started and stopped together.

Owns what of the environment counts, and what is made. Must not know what is traced. OpenTelemetry is
an extra, so it is imported when it is wanted and not before.

The option `--traces` is a wish and fails where it cannot be kept. The standard environment variable
alone is often put into every container of a cluster: then a controller without OpenTelemetry says
so in its log and goes on.
"""

import asyncio
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio

from eelgrid_controller.adapters.described import Family
from eelgrid_controller.adapters.prometheus import Metrics
from eelgrid_controller.command import Origin
from eelgrid_controller.errors import ConfigError
from eelgrid_controller.kubernetes.gate_events import Ungate
from eelgrid_controller.kubernetes.plans import plan_of
from eelgrid_protos import __version__
from eelgrid_protos.transport import is_loopback

__all__ = ["Endpoint", "Tracing", "Watches", "endpoint_of", "headers_of", "wanted_endpoint"]

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ADDRESS = re.compile(r"(?:(https?)://)?((?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}))/?")
_HEADERS = ("traceparent", "tracestate")
# The specification's own bounds: 55 characters, and 512 that must be passed on.
_HEADER_MOST = 512
_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")
_INSTALL = "install it: pip install 'eelgrid[controller,tracing]'"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where spans go: HOST:PORT, with TLS or without."""

    address: str
    tls: bool


def endpoint_of(text: str) -> Endpoint:
    """The endpoint that was written; raises ConfigError. Without a scheme it has TLS unless it is this machine."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[3]) <= 65_535:
        raise ConfigError(
            f"--traces {text!r} is no address", "write HOST:PORT, http://HOST:PORT (no TLS) or https://HOST:PORT"
        )
    scheme, address = found[1], found[2]
    return Endpoint(address, tls=scheme == "https" if scheme else not is_loopback(address))


def _is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) for name in _NEEDED)
    except ModuleNotFoundError:
        # Of a package that lies above.
        return False


def wanted_endpoint(option: str, environ: Mapping[str, str], log: logging.Logger) -> Endpoint | None:
    """Where spans are to go; None for nowhere. Raises ConfigError where the option asks for what cannot be."""
    if option:
        if not _is_installed():
            raise ConfigError(
                f"--traces {option} needs OpenTelemetry, which is not here", f"{_INSTALL}, or leave --traces out"
            )
        return endpoint_of(option)
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
    return endpoint_of(environ[name])


def headers_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """A caller's trace context from a call's metadata, as W3C's headers; what is too long is none."""
    found = {key: value for key, value in metadata or () if key in _HEADERS}
    return {key: value for key, value in found.items() if isinstance(value, str) and len(value) <= _HEADER_MOST}


class Watches:
    """What the loop tells while it works, for the metrics and, where placements are traced, for their traces."""

    def __init__(self, metrics: Metrics) -> None:
        self.tracing: Tracing | None = None
        self._metrics = metrics

    def origin(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Origin | None:
        """Where a call comes from that arrives now; None where nobody asks."""
        if self.tracing is None:
            return None
        return Origin(self.tracing.now_ns(), headers_of(context.invocation_metadata()))

    def decided(self, duration_s: float, workload_id: str, origin: Origin | None) -> None:
        """A submission was decided on; an empty id for what has no explanation."""
        trace_id = self.tracing.traces.decided(duration_s, workload_id, origin) if self.tracing else ""
        self._metrics.decided(duration_s, workload_id, trace_id)

    def wrote(self, taken_s: float) -> None:
        """A batch of events was put on disk."""
        self._metrics.commit.observe(taken_s)
        if self.tracing is not None:
            self.tracing.traces.wrote(taken_s)


class Tracing:
    """Follows placements and sends their spans, from now until the stop."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        instance: str,
        now_ns: Callable[[], int],
        has_agent: Callable[[str], bool],
        log: logging.Logger,
    ) -> None:
        """`instance` tells this cluster's controller from others; raises ConfigError for what the exporter refuses."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        from eelgrid_controller.adapters.placement_traces import PlacementTraces
        from eelgrid_controller.adapters.span_sender import SpanSender

        scheme = "https" if endpoint.tls else "http"
        try:
            # Headers, certificates, compression and the timeout of a call are the standard environment's.
            exporter = OTLPSpanExporter(endpoint=f"{scheme}://{endpoint.address}", insecure=not endpoint.tls)
        except Exception as error:
            raise ConfigError(f"the OTEL_EXPORTER_OTLP variables cannot be used ({error})", "correct them") from error
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

    def follow_pods(self, patches: list[Callable[[Ungate, int], None]], is_pod: Callable[[str], bool]) -> None:
        """Hear of patches of pods, too; `is_pod` says which workloads have some."""

        def patched(asked: Ungate, start_ns: int) -> None:
            plan = plan_of(asked.plan)
            if plan is not None:
                self.traces.patched(plan.workload, plan.replica, plan.node_name, start_ns)

        self.traces.has_pod = is_pod
        patches.append(patched)

    def families(self) -> Iterable[Family]:
        """What became of traces and spans."""
        yield from self.traces.families()
        yield from self.sender.families()

    async def stop(self) -> None:
        """End what is open and send what can be sent within seconds."""
        self._running.cancel()
        self.traces.close()
        await asyncio.to_thread(self.sender.stop)
