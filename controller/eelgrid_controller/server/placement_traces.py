"""Traces of placements: each submission from its call until every node holds it, as spans, and their export.

`PlacementTraces` makes spans as plain values, with their attributes; `SpanSender` gives them to an OpenTelemetry
exporter from a bounded queue and a thread. Needs the OpenTelemetry SDK; tracing.py imports this module on demand.
"""

import asyncio
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from eelgrid_controller.core.core import CommitResult
from eelgrid_controller.runtime.loop import CommandOrigin
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_controller.state.events import (
    PartitionsPlanned,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadDeferred,
    WorkloadEvicted,
    WorkloadPlaced,
    WorkloadRetried,
    WorkloadSubmitted,
)
from eelgrid_protos.messages import (
    ApplyStatus,
    NodePlan,
    Placement,
    PlanApplied,
    ReplicaExplanation,
    Workload,
    WorkloadSpec,
)
from eelgrid_protos.openmetrics import MetricFamily

AttributeValues = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class TraceRoot:
    """What a trace goes on from: its id, the caller's span (0 for none) and the caller's tracestate."""

    trace_id: int
    parent_id: int = 0
    state: str = ""


@dataclass(slots=True)
class Span:
    """One span; `end_ns` is 0 while it is open, `error` says why it is one."""

    name: str
    root: TraceRoot
    span_id: int
    parent_id: int
    start_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    events: list[tuple[int, str, AttributeValues]] = field(default_factory=list)
    error: str | None = None
    end_ns: int = 0


def derive_trace_ids(cluster: str, workload_id: str) -> tuple[int, int]:
    """Ids of the trace (128 bits) and of its first span (64 bits), of a placement that no caller traces.

    They follow from what the journal keeps, the cluster's id and the workload's, so that whoever reads the journal after
    a restart goes on with the same trace.
    """
    drawn = hashlib.sha256(f"{cluster}\0{workload_id}".encode()).digest()
    # 0 is no id.
    return int.from_bytes(drawn[:16]) or 1, int.from_bytes(drawn[16:24]) or 1


def request_attributes(spec: WorkloadSpec) -> AttributeValues:
    """What a submission asks for."""
    owners = {"namespace": spec.namespace, "user": spec.user, "queue": spec.queue}
    return {
        "eelgrid.workload.name": spec.name,
        "eelgrid.workload.kind": spec.kind.name.lower(),
        "eelgrid.workload.priority": spec.priority,
        "eelgrid.workload.replicas": spec.replicas,
        "eelgrid.workload.gpus": spec.replicas * spec.request.gpu_count * spec.request.gpu_milli / 1000.0,
        **{f"eelgrid.workload.{key}": value for key, value in owners.items() if value},
    }


def decision_attributes(
    placements: Sequence[Placement], why: Sequence[ReplicaExplanation], revision: int
) -> AttributeValues:
    """What was decided: the first replica's place and the terms of its cost, and the event's number in the journal."""
    first = placements[0]
    said: dict[str, str | int | float] = {
        "eelgrid.decision.revision": revision,
        "eelgrid.node": first.node_name,
        "eelgrid.nodes": len({one.node_name for one in placements}),
    }
    explained = next((one for one in why if one.replica == first.replica), None)
    if explained is None:
        return said
    said["eelgrid.decision.feasible_nodes"] = explained.feasible_nodes
    for one in explained.candidates:
        if (one.node_name, one.gpu_indexes) == (first.node_name, first.gpu_indexes):
            said["eelgrid.cost_watts"] = one.cost_w
            said |= {f"eelgrid.cost_watts.{term.name}": term.cost_w for term in one.terms}
            break
    return said


_LOOK_EVERY_S = 5.0
_DETAIL_MOST = 256
_RPC: Mapping[str, str] = {
    "rpc.system": "grpc",
    "rpc.service": "eelgrid.v1.OperatorService",
    "rpc.method": "SubmitWorkload",
}
_BAD = frozenset({ApplyStatus.REFUSED, ApplyStatus.FAILED})

# What a placement waits for: a node by name, or a pod by its replica.
_Awaited: TypeAlias = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimits:
    """How much is followed."""

    # At some 2 kB each, 8 MB.
    placements_most: int = 4096
    # Nodes and pods of one placement that have spans of their own: a gang's first ones tell the story.
    places_most: int = 16
    reasons_most: int = 32
    # An agent answers within a second; one that comes back after a break within half a minute.
    answer_s: float = 300.0


@dataclass(slots=True)
class _Decided:
    """A submission that was decided on and is not on disk yet."""

    root: Span
    start_ns: int
    end_ns: int
    is_call: bool


@dataclass(slots=True)
class _Followed:
    """One placement that is on disk and not in force everywhere."""

    root: Span
    queue: Span | None = None
    reasons: int = 0
    placed_ns: int = 0
    # What of it has not answered; a node whose plan went out with the plan's epoch and its span.
    awaited: set[_Awaited] = field(default_factory=set)
    sent: dict[str, tuple[int, Span]] = field(default_factory=dict)


class PlacementTraces:
    """Follows placements; all calls are from the loop's thread and take microseconds."""

    def __init__(
        self,
        spans: "SpanSender",
        *,
        cluster: str,
        now_ns: Callable[[], int],
        has_agent: Callable[[str], bool],
        bounds: TraceLimits | None = None,
    ) -> None:
        """`cluster` is the journal's name of the cluster; `has_agent` says whether a node's agent will answer plans."""
        # Whether a workload is pods, which are to be patched.
        self.has_pod: Callable[[str], bool] = lambda _: False
        self.results = dict.fromkeys(("finished", "cancelled", "given_up"), 0)
        self._spans = spans
        self._cluster = cluster
        self._now_ns = now_ns
        self._has_agent = has_agent
        self._bounds = bounds or TraceLimits()
        self._decided: dict[str, _Decided] = {}
        self._commit_s = 0.0
        # In the order of their submission, by workload; and who waits for what is told of a node.
        self._followed: dict[str, _Followed] = {}
        self._waiting: dict[str, dict[str, None]] = {}

    # What is told

    def on_decision(self, duration_s: float, workload_id: str, origin: CommandOrigin | None) -> str:
        """A submission was decided on just now; the id of its trace, empty for none."""
        if not workload_id:
            return ""
        end_ns = self._now_ns()
        start_ns = end_ns - int(1e9 * duration_s)
        arrived_ns = min(origin.arrived_ns, start_ns) if origin else start_ns
        first = self._first(workload_id, origin.headers if origin else {}, arrived_ns)
        if first is None:
            return ""
        if len(self._decided) >= self._bounds.placements_most:
            self._decided.clear()
        self._decided[workload_id] = _Decided(first, start_ns, end_ns, origin is not None)
        return f"{first.root.trace_id:032x}"

    def _first(self, workload_id: str, headers: Mapping[str, str], start_ns: int) -> Span | None:
        """The span over all of a placement; None for one that nobody wants."""
        trace_id, span_id = derive_trace_ids(self._cluster, workload_id)
        root = self._spans.start_trace("placement", headers, trace_id)
        if root is None:
            return None
        span_id = self._spans.new_span_id() if root.parent_id else span_id
        said: AttributeValues = {"eelgrid.workload.id": workload_id}
        return Span("placement", root, span_id, root.parent_id, start_ns, attributes=dict(said))

    def resume_traces(self, waiting: Iterable[Workload]) -> None:
        """What waited when the process before ended: its traces go on, but for callers', whose ids nobody kept."""
        now_ns = self._now_ns()
        for workload in waiting:
            if len(self._followed) >= self._bounds.placements_most:
                return
            first = self._first(workload.workload_id, {}, workload.submitted_ns)
            if first is not None:
                first.attributes |= request_attributes(workload.spec)
                said: AttributeValues = {"eelgrid.reason": workload.reason}
                queue = self._open("queue", first, workload.submitted_ns, said)
                queue.events.append((now_ns, "another process goes on", said))
                self._followed[workload.workload_id] = _Followed(first, queue=queue, reasons=1)

    def on_write(self, taken_s: float) -> None:
        """The commit that is about to be told took so long."""
        self._commit_s = taken_s

    def on_commit(self, committed: CommitResult) -> None:
        """Events are on disk."""
        now_ns = self._now_ns()
        commit_ns = now_ns - int(1e9 * self._commit_s)
        first = committed.revision - len(committed.events) + 1
        for revision, event in enumerate(committed.events, first):
            match event:
                case WorkloadSubmitted() if event.workload_id in self._decided:
                    self._start_trace(event, commit_ns, now_ns)
                case WorkloadDeferred() if event.workload_id in self._followed:
                    self._defer(event, now_ns)
                case WorkloadPlaced() if event.workload_id in self._followed:
                    said = decision_attributes(event.placements, event.explanation, revision)
                    pods = self.has_pod(event.workload_id)
                    self._on_placed(
                        event.workload_id, event.placements, said, (event.time_ns, commit_ns, now_ns), pods=pods
                    )
                case PartitionsPlanned():
                    for one in event.services:
                        if one.workload_id in self._followed and one.placements:
                            said = decision_attributes(one.placements, (), revision)
                            self._on_placed(one.workload_id, one.placements, said, (event.time_ns, commit_ns, now_ns))
                case WorkloadCancelled() if event.workload_id in self._followed:
                    self._end(event.workload_id, "cancelled", now_ns)
                case WorkloadCompleted() if event.workload_id in self._followed:
                    self._end(event.workload_id, event.phase.name.lower(), now_ns)
                case WorkloadEvicted() if event.workload_id in self._followed:
                    self._end(event.workload_id, "evicted", now_ns)
                case WorkloadRetried() if event.workload_id in self._followed:
                    self._end(event.workload_id, "failed", now_ns)
                case _:
                    pass
        # What is left was undone together with its batch.
        self._decided.clear()

    def on_plan_message(self, node_name: str, message: NodePlan | PlanApplied) -> None:
        """A plan goes out to a node's agent, or its agent says what became of one."""
        waiting = self._waiting.get(node_name)
        if not waiting:
            return
        now_ns = self._now_ns()
        if isinstance(message, NodePlan):
            for workload_id in waiting.keys() & {one.workload_id for one in message.assignments}:
                self._sent(self._followed[workload_id], message, now_ns)
        else:
            for workload_id in list(waiting):
                self._on_applied(workload_id, node_name, message, now_ns)

    def on_pod_patched(self, workload_id: str, replica: int, node_name: str, start_ns: int) -> None:
        """The pod of a replica was pinned to its node, by a patch that began then."""
        followed = self._followed.get(workload_id)
        if followed is None or replica not in followed.awaited:
            return
        now_ns = self._now_ns()
        said: AttributeValues = {"eelgrid.node": node_name, "eelgrid.replica": replica}
        self._span("patch", followed.root, (start_ns, now_ns), said, kind=SpanKind.CLIENT)
        self._on_arrival(workload_id, replica, now_ns)

    # Spans

    def _start_trace(self, event: WorkloadSubmitted, commit_ns: int, now_ns: int) -> None:
        decided = self._decided.pop(event.workload_id)
        if len(self._followed) >= self._bounds.placements_most:
            self._end(next(iter(self._followed)), "given_up", now_ns)
        root = decided.root
        root.attributes |= request_attributes(event.spec)
        self._followed[event.workload_id] = _Followed(root)
        kind, values = (SpanKind.SERVER, _RPC) if decided.is_call else (SpanKind.INTERNAL, {})
        submit = self._open("submit", root, root.start_ns, values, kind=kind)
        self._span("decide", submit, (decided.start_ns, decided.end_ns), {"eelgrid.workload.id": event.workload_id})
        self._span("journal", submit, (max(commit_ns, decided.end_ns), now_ns))
        self._close(submit, now_ns)

    def _defer(self, event: WorkloadDeferred, now_ns: int) -> None:
        followed = self._followed[event.workload_id]
        if followed.queue is None:
            followed.queue = self._open("queue", followed.root, now_ns, {"eelgrid.reason": event.reason})
        followed.reasons += 1
        if followed.reasons <= self._bounds.reasons_most:
            followed.queue.events.append((now_ns, "waits", {"eelgrid.reason": event.reason}))

    def _on_placed(
        self,
        workload_id: str,
        placements: Sequence[Placement],
        said: AttributeValues,
        times_ns: tuple[int, int, int],
        *,
        pods: bool = False,
    ) -> None:
        """Everything has its place; `times_ns` are when its turn, its commit and this moment began."""
        followed = self._followed[workload_id]
        turn_ns, commit_ns, now_ns = times_ns
        followed.root.attributes |= said
        if followed.queue is not None:
            self._close(followed.queue, turn_ns)
            followed.queue = None
            self._span("decide", followed.root, (turn_ns, max(turn_ns, commit_ns)), said)
            self._span("journal", followed.root, (max(turn_ns, commit_ns), now_ns))
        # A service whose slices were planned anew before it was in force.
        self._await_nothing(workload_id, now_ns)
        followed.placed_ns = now_ns
        most = self._bounds.places_most
        nodes = list(dict.fromkeys(one.node_name for one in placements))
        for name in filter(self._has_agent, nodes[:most]):
            followed.awaited.add(name)
            self._waiting.setdefault(name, {})[workload_id] = None
        if pods:
            followed.awaited.update(one.replica for one in placements[:most])
        if not followed.awaited:
            self._end(workload_id, "finished", now_ns)

    def _sent(self, followed: _Followed, plan: NodePlan, now_ns: int) -> None:
        if plan.node_name in followed.sent:
            return
        said: AttributeValues = {
            "eelgrid.node": plan.node_name,
            "eelgrid.plan.epoch": plan.epoch,
            "eelgrid.plan.enforce": plan.enforce,
        }
        self._span("plan", followed.root, (followed.placed_ns, now_ns), said)
        span = self._open("apply", followed.root, now_ns, said, kind=SpanKind.CLIENT)
        followed.sent[plan.node_name] = plan.epoch, span

    def _on_applied(self, workload_id: str, node_name: str, applied: PlanApplied, now_ns: int) -> None:
        sent = self._followed[workload_id].sent
        epoch, span = sent.get(node_name, (0, None))
        if span is None or applied.epoch < epoch:
            return
        del sent[node_name]
        own = next((one for one in applied.results if one.subject == workload_id), None)
        status = own.status if own else applied.status
        span.attributes["eelgrid.apply.status"] = status.name.lower()
        if own and own.status in _BAD:
            span.error = own.detail[:_DETAIL_MOST]
        self._close(span, now_ns)
        self._on_arrival(workload_id, node_name, now_ns)

    def _on_arrival(self, workload_id: str, where: _Awaited, now_ns: int) -> None:
        followed = self._followed[workload_id]
        followed.awaited.discard(where)
        if isinstance(where, str):
            self._forget_waiting(where, workload_id)
        if not followed.awaited:
            self._end(workload_id, "finished", now_ns)

    def _end(self, workload_id: str, result: str, now_ns: int) -> None:
        self._await_nothing(workload_id, now_ns)
        followed = self._followed.pop(workload_id)
        self.results[result] += 1
        if followed.queue is not None:
            self._close(followed.queue, now_ns)
        followed.root.attributes["eelgrid.result"] = result
        self._close(followed.root, now_ns)

    def _await_nothing(self, workload_id: str, now_ns: int) -> None:
        followed = self._followed[workload_id]
        for name in followed.awaited:
            if isinstance(name, str):
                self._forget_waiting(name, workload_id)
        followed.awaited.clear()
        for _, span in followed.sent.values():
            self._close(span, now_ns)
        followed.sent.clear()

    def _forget_waiting(self, node_name: str, workload_id: str) -> None:
        waiting = self._waiting[node_name]
        del waiting[workload_id]
        if not waiting:
            del self._waiting[node_name]

    def _open(
        self,
        name: str,
        parent: Span,
        start_ns: int,
        values: AttributeValues,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        return Span(name, parent.root, self._spans.new_span_id(), parent.span_id, start_ns, kind, dict(values))

    def _close(self, span: Span, end_ns: int) -> None:
        # A clock that is set back must not make a span that ends before it begins.
        span.end_ns = max(span.start_ns, end_ns)
        self._spans.export_span(span)

    def _span(
        self,
        name: str,
        parent: Span,
        times_ns: tuple[int, int],
        values: AttributeValues | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        """A span that is over; `times_ns` are its start and its end."""
        self._close(self._open(name, parent, times_ns[0], values or {}, kind=kind), times_ns[1])

    # Bounds

    def expire_traces(self) -> None:
        """End what was placed long ago and is not in force everywhere."""
        now_ns = self._now_ns()
        before_ns = now_ns - int(1e9 * self._bounds.answer_s)
        for name in [name for name, one in self._followed.items() if 0 < one.placed_ns < before_ns]:
            self._end(name, "given_up", now_ns)

    async def run(self) -> None:
        """Give up what is old, now and then, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.expire_traces()

    def close(self) -> None:
        """End everything, but for what waits: whoever comes next goes on with it, where its ids are our own."""
        for name, one in list(self._followed.items()):
            if one.queue is None or one.root.parent_id:
                self._end(name, "given_up", self._now_ns())
        self._followed.clear()

    def families(self) -> Iterator[MetricFamily]:
        """How many are followed, and what came of the others."""
        yield build_family("eelgrid_traces_open", len(self._followed))
        yield build_family("eelgrid_traces_total", self.results)


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
        """The beginning of a trace, of this id unless it is within a caller's; None for one that is not sampled."""
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
            kind=span.kind,
            status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )
