"""Spans on their way to a collector: a bounded queue and a thread that empties it.

Owns the queue and the thread. Must not know what spans mean.

Theory: whoever ends a span only appends to the queue; where that is full, the span is dropped and
counted, since a collector that is slow or away must never hold up a placement. The SDK's own batch
processor does the same but tells nobody how many it dropped. Batches are small because the thread
that writes one holds Python's lock in turns with the loop.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client.core import Metric

from eelgrid_controller.adapters.described import family

__all__ = ["SpanSender"]

# Twenty seconds of a hundred placements a second; 1 kB each.
_QUEUE_MOST = 16_384
_BATCH_MOST = 128
_SEND_EVERY_S = 1.0
_STOP_S = 1.0


class SpanSender(SpanProcessor):
    """Gives an exporter what ends, in batches, from a thread of its own."""

    def __init__(
        self, exporter: SpanExporter, *, log: logging.Logger, queue_most: int = _QUEUE_MOST, every_s: float = _SEND_EVERY_S
    ) -> None:  # fmt: skip
        self.exported = self.dropped = self.failed = 0
        self._exporter = exporter
        self._log = log
        self._most = queue_most
        self._every_s = every_s
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is known of it yet."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue it, or drop it where there are too many."""
        context = span.context
        if context is None or not context.trace_flags.sampled:
            return
        if self._is_stopping or len(self._queue) >= self._most:
            self.dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= _BATCH_MOST and not self._wake.is_set():
            self._wake.set()

    def shutdown(self) -> None:
        """Send what is queued, for a second; blocks for two at most."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join(_STOP_S)
        # Ends an attempt that is under way, and with it the thread.
        self._exporter.shutdown()
        self._thread.join(_STOP_S)
        if left := len(self._queue):
            self.dropped += left
            self._log.warning("spans=dropped count=%d reason=the_collector_took_nothing_before_the_stop", left)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002  # the SDK's signature
        """Ask the thread to go now."""
        self._wake.set()
        return True

    def families(self) -> Iterator[Metric]:
        """What became of spans."""
        yield family("eelgrid_spans_total", {"exported": self.exported, "failed": self.failed, "dropped": self.dropped})

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
            is_sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001  # a fault of one batch must not end the thread
            self._log.exception("spans=failed count=%d", len(batch))
            is_sent = False
        if is_sent:
            self.exported += len(batch)
        else:
            self.failed += len(batch)
        return is_sent
