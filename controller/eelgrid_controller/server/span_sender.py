"""Export of spans to an OpenTelemetry collector: a bounded queue and a thread."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from eelgrid_controller.server.metrics.catalogue import MetricFamily, build_family
from eelgrid_controller.server.placement_traces import Span, TraceRoot

# Twenty seconds of a hundred placements a second; 1 kB each.
_QUEUE_MOST = 16_384
_BATCH_MOST = 128
_SEND_EVERY_S = 1.0
_STOP_S = 1.0
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Resource(Resource):
    """A resource that makes its hash once: the exporter asks with each span, and the SDK makes JSON for each answer."""

    def __init__(self, found: Resource) -> None:
        super().__init__(found.attributes, found.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class SpanSender:
    """Gives an exporter what ends, in batches, from a thread of its own."""

    def __init__(
        self,
        exporter: SpanExporter,
        provider: TracerProvider,
        *,
        scope: str,
        log: logging.Logger,
        queue_most: int = _QUEUE_MOST,
        every_s: float = _SEND_EVERY_S,
    ) -> None:
        """The provider is asked for its sampler, its ids and its resource; `scope` names who makes the spans."""
        self.exported = self.dropped = self.failed = 0
        self._exporter = exporter
        self._provider = provider
        self._resource = _Resource(provider.resource)
        self._scope = InstrumentationScope(scope)
        self._propagator = TraceContextTextMapPropagator()
        self._log = log
        self._most = queue_most
        self._every_s = every_s
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    # From the loop's thread

    def start_trace(self, name: str, headers: Mapping[str, str], trace_id: int) -> TraceRoot | None:
        """The beginning of a trace, within the caller's where its headers say so; None for one that is not sampled."""
        context = self._propagator.extract(headers, context=Context()) if headers else Context()
        caller = get_current_span(context).get_span_context()
        trace_id = caller.trace_id if caller.is_valid else trace_id
        if self._provider.sampler.should_sample(context, trace_id, name).decision is not Decision.RECORD_AND_SAMPLE:
            return None
        if not caller.is_valid:
            return TraceRoot(trace_id)
        return TraceRoot(trace_id, caller.span_id, caller.trace_state.to_header())

    def new_span_id(self) -> int:
        """An id for a span."""
        return self._provider.id_generator.generate_span_id()

    def export_span(self, span: Span) -> None:
        """Queue it, or drop it where there are too many."""
        if self._is_stopping or len(self._queue) >= self._most:
            self.dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= _BATCH_MOST and not self._wake.is_set():
            self._wake.set()

    def families(self) -> Iterator[MetricFamily]:
        """What became of spans."""
        yield build_family(
            "eelgrid_spans_total", {"exported": self.exported, "failed": self.failed, "dropped": self.dropped}
        )

    def stop(self) -> None:
        """Send what is queued, for a second; blocks for two at most."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join(_STOP_S)
        # Ends an attempt that is under way, and with it the thread.
        self._exporter.shutdown()
        self._thread.join(_STOP_S)
        if left := len(self._queue):
            self.dropped += left
            self._queue.clear()
            self._log.warning("spans=dropped count=%d reason=the_collector_took_nothing_before_the_stop", left)

    # In its own thread

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(self._every_s)
            self._wake.clear()
            while self._queue and self._send():
                pass
        while self._queue and self._send():
            pass

    def _send(self) -> bool:
        """Whether a batch went out."""
        batch = [self._queue.popleft() for _ in range(min(_BATCH_MOST, len(self._queue)))]
        try:
            is_sent = self._exporter.export([self._made(one) for one in batch]) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001  # a fault of one batch must not end the thread
            self._log.exception("spans=failed count=%d", len(batch))
            is_sent = False
        if is_sent:
            self.exported += len(batch)
        else:
            self.failed += len(batch)
        return is_sent

    def _made(self, span: Span) -> ReadableSpan:
        """A span as exporters know it."""
        root = span.root
        state = TraceState.from_header([root.state]) if root.state else None
        is_first = span.parent_id == root.parent_id
        parent = SpanContext(root.trace_id, span.parent_id, is_first, _SAMPLED, state) if span.parent_id else None
        return ReadableSpan(
            span.name,
            context=SpanContext(root.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED, trace_state=state),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, dict(values), time_ns) for time_ns, name, values in span.events],
            kind=SpanKind[span.kind.value],
            status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )
