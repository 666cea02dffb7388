"""A collector of traces over real gRPC on the loopback: OTLP's TraceService, which keeps what it gets.

Owns the server and the spans. `gate`, once cleared, makes it answer nothing until it is set.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

__all__ = ["Collected", "FakeCollector", "collecting"]


@dataclass(frozen=True)
class Collected:
    """One span as it came over the wire."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]


@dataclass
class FakeCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span; `metadata` is of the last call."""

    spans: list[Collected] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  # the service's name for it
        """Takes a batch."""
        self.calls += 1
        self.gate.wait(60.0)
        self.metadata = dict(context.invocation_metadata())
        for resource in request.resource_spans:
            self.resource = _plain(resource.resource.attributes)
            self.spans += [_collected(span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self, workload: str) -> list[list[Collected]]:
        """The spans of each trace of a workload whose root has come, by start."""
        roots = [one for one in self.spans if one.attributes.get("eelgrid.workload.id") == workload]
        wanted = [one.trace for one in roots if one.name == "placement"]
        return [
            sorted((s for s in self.spans if s.trace == trace), key=lambda s: (s.start_ns, -s.end_ns))
            for trace in wanted
        ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def _collected(span: Any) -> Collected:
    return Collected(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind,
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes=_plain(span.attributes),
        events=tuple((one.name, _plain(one.attributes)) for one in span.events),
    )


@contextmanager
def collecting() -> Iterator[FakeCollector]:
    """A collector on a free port."""
    collector = FakeCollector()
    collector.gate.set()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        collector.gate.set()
        server.stop(0).wait()
