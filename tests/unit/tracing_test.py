"""Where spans go: what options and environment mean, a queue that never blocks, a collector that is real, slow or away."""

import asyncio
import logging
import subprocess
import sys
import threading

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from tests.builders.cluster import build_node, build_request
from tests.builders.server import run_controller
from tests.fakes.collector import collecting
from tests.waiting import wait_until

from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.server.http.metrics_server import ControllerMetrics
from eelgrid_controller.server.placement_traces import Span, SpanSender, TraceRoot
from eelgrid_controller.server.tracing import CollectorEndpoint, extract_trace_headers, parse_endpoint, resolve_endpoint
from eelgrid_protos.messages import ApplyStatus, NodePlan, PlanApplied

LOG = logging.getLogger("test.tracing")
PATIENT_S = 60.0


@pytest.mark.parametrize(
    ("text", "address", "tls"),
    [
        ("127.0.0.1:4317", "127.0.0.1:4317", False),
        ("localhost:4317", "localhost:4317", False),
        ("collector:4317", "collector:4317", True),
        ("http://collector.tracing.svc:4317/", "collector.tracing.svc:4317", False),
        ("https://127.0.0.1:4317", "127.0.0.1:4317", True),
        ("[::1]:4317", "[::1]:4317", False),
    ],
)
def test_an_endpoint_has_tls_unless_it_is_here_or_says_otherwise(text, address, tls):
    assert parse_endpoint(text) == CollectorEndpoint(address, tls)


@pytest.mark.parametrize("text", ["collector", "collector:0", "collector:99999", "ftp://a:1", "a:1/v1/traces", "a b:1"])
def test_what_is_no_address_is_reported_with_the_option_and_the_remedy(text):
    with pytest.raises(ControllerConfigError, match=r"--traces .* is no address; write HOST:PORT"):
        parse_endpoint(text)


def test_the_environment_counts_where_the_option_is_silent(caplog):
    here = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://all:4317"}
    assert resolve_endpoint("", {}, LOG) is None
    assert resolve_endpoint("", here, LOG) == CollectorEndpoint("all:4317", tls=False)
    own = here | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://traces:4317"}
    assert resolve_endpoint("", own, LOG) == CollectorEndpoint("traces:4317", tls=True)
    assert resolve_endpoint("a:1", own, LOG) == CollectorEndpoint("a:1", tls=True)
    for off in ({"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}):
        assert resolve_endpoint("", here | off, LOG) is None
    assert not caplog.records
    assert resolve_endpoint("", here | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, LOG) is None
    assert "reason=protocol_is_http/protobuf" in caplog.text


WITHOUT = """
import logging, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
logging.basicConfig()
from eelgrid_controller.server.tracing import resolve_endpoint
print(resolve_endpoint("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://all:4317"}, logging.getLogger()))
from eelgrid_controller.__main__ import main
main(["--traces", "127.0.0.1:4317", "--data", "data", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"])
"""


def test_without_the_extra_the_option_fails_with_what_to_install_and_the_environment_alone_is_passed_over(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=PATIENT_S, check=False, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "eelgrid-controller: --traces 127.0.0.1:4317 needs OpenTelemetry, which is not here; install it: "
        "pip install 'eelgrid[controller,tracing]', or leave --traces out"
    )
    assert done.stdout == "None\n"
    assert "traces=off reason=opentelemetry_is_not_here" in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_only_w3cs_headers_are_taken_and_none_that_are_too_long():
    assert extract_trace_headers(None) == {}
    metadata = (("traceparent", "00-a"), ("tracestate", "x" * 513), ("authorization", "secret"), ("grpc-bin", b"\x00"))
    assert extract_trace_headers(metadata) == {"traceparent": "00-a"}


def test_an_exemplar_names_both_or_what_there_is_room_for():
    trace = "0af7651916cd43dd8448eb211c80319c"
    found = []
    for workload in ("w", "w" * 90, "", "w" * 128):
        metrics = ControllerMetrics()
        metrics.on_decision(0.001, workload, trace if workload != "w" * 128 else "")
        found += [
            one.exemplar.labels if one.exemplar else None
            for family in metrics.collect()
            if isinstance(family, Metric)
            for one in family.samples
            if one.name == "eelgrid_decision_duration_seconds_bucket" and one.labels["le"] == "0.001"
        ]
    assert found == [{"trace_id": trace, "workload": "w"}, {"trace_id": trace}, {"trace_id": trace}, None]


class Held(SpanExporter):
    """An exporter that does nothing until it is let go."""

    def __init__(self, result=SpanExportResult.SUCCESS):
        self.gate = threading.Event()
        self.result = result
        self.batches = []

    def export(self, spans):
        self.gate.wait(PATIENT_S)
        if self.result is None:
            raise OSError("no")
        self.batches.append([one.name for one in spans])
        return self.result

    def shutdown(self):
        self.gate.set()


def sending(exporter, sampler=None, **options):
    return SpanSender(
        exporter, TracerProvider(sampler, shutdown_on_exit=False), scope="s", log=LOG, every_s=0.02, **options
    )


def ended(sender, count):
    for number in range(count):
        sender.export_span(Span(f"s{number}", TraceRoot(1), sender.new_span_id(), 0, start_ns=1, end_ns=2))


def counted(sender):
    return {one.labels["result"]: one.value for family in sender.families() for one in family.samples}


async def test_a_collector_that_hangs_costs_spans_and_nothing_else():
    exporter = Held()
    sender = sending(exporter, queue_most=200)
    ended(sender, 150)
    await wait_until(lambda: len(sender._queue) < 150, within_s=PATIENT_S)
    ended(sender, 1000)
    under_way = 1150 - sender.dropped - 200
    assert sender.dropped > 700
    assert len(sender._queue) == 200
    exporter.gate.set()
    await wait_until(lambda: sender.exported == 200 + under_way, within_s=PATIENT_S)
    assert max(map(len, exporter.batches)) <= 128
    assert counted(sender) == {"exported": 200.0 + under_way, "failed": 0.0, "dropped": float(sender.dropped)}
    await asyncio.to_thread(sender.stop)


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, None])
async def test_batches_that_the_collector_refuses_are_counted_and_the_thread_goes_on(result):
    exporter = Held(result)
    exporter.gate.set()
    sender = sending(exporter)
    ended(sender, 3)
    await wait_until(lambda: sender.failed == 3, within_s=PATIENT_S)
    exporter.result = SpanExportResult.SUCCESS
    ended(sender, 2)
    await wait_until(lambda: sender.exported == 2, within_s=PATIENT_S)
    await asyncio.to_thread(sender.stop)


async def test_what_is_left_at_the_stop_is_counted():
    sender = sending(Held(SpanExportResult.FAILURE))
    ended(sender, 300)
    await asyncio.to_thread(sender.stop)
    assert sender.exported + sender.failed + sender.dropped == 300
    ended(sender, 1)
    assert sender.exported + sender.failed + sender.dropped == 301


async def test_a_caller_says_which_trace_and_whether_it_is_sampled():
    caller = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    exporter = Held()
    exporter.gate.set()
    sender = sending(exporter)
    root = sender.start_trace("placement", caller, 3)
    assert root == TraceRoot(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, "a=b")
    assert sender.start_trace("placement", {"traceparent": "00-0-0-01"}, 3) == TraceRoot(3)
    assert sender.start_trace("placement", {}, 4) == TraceRoot(4)
    assert sender.start_trace("placement", caller | {"traceparent": caller["traceparent"][:-1] + "0"}, 3) is None
    never = sending(Held(), ParentBased(ALWAYS_OFF))
    assert never.start_trace("placement", {}, 3) is None
    assert never.start_trace("placement", caller, 3) == root
    span = Span("x", root, 5, root.parent_id, 1, SpanKind.CLIENT, {"k": 1.5}, [(2, "waits", {"r": "s"})], "why", 3)
    made = sender._made(span)
    assert (made.context.trace_id, made.context.span_id, made.parent.span_id) == (root.trace_id, 5, root.parent_id)
    assert (made.parent.is_remote, made.context.trace_state.get("a"), made.kind) == (True, "b", SpanKind.CLIENT)
    assert (made.status.status_code, made.status.description) == (StatusCode.ERROR, "why")
    assert (made.start_time, made.end_time, dict(made.attributes)) == (1, 3, {"k": 1.5})
    assert [(event.name, event.timestamp) for event in made.events] == [("waits", 2)]
    for one in (sender, never):
        await asyncio.to_thread(one.stop)


async def test_a_controller_sends_to_a_collector_and_its_exemplar_names_the_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ml")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.cluster.name=west")
    with collecting() as collector:
        async with run_controller(tmp_path, traces=f"http://{collector.address}") as rig:
            agent = await rig.join(build_node("n1"))
            await rig.operators.submit_workload(build_request("w"))
            plan = await agent.hear(NodePlan, within_s=PATIENT_S)
            await agent.say(PlanApplied(epoch=plan.epoch, status=ApplyStatus.APPLIED))
            await wait_until(lambda: collector.traces("w"), within_s=PATIENT_S)
            (trace,) = collector.traces("w")
            page = (await rig.controller.metrics.render_page(opened=True)).decode()
            tracing = rig.controller.watches.tracing
        assert not tracing.sender._thread.is_alive()
    samples = [sample for family in parse_openmetrics(page) for sample in family.samples]
    exemplars = [one.exemplar.labels for one in samples if one.exemplar]
    assert exemplars == [{"trace_id": trace[0].trace, "workload": "w"}]
    assert collector.metadata["x-tenant"] == "ml"
    assert collector.resource["service.name"] == "eelgrid-controller"
    assert collector.resource["k8s.cluster.name"] == "west"
    assert {one.name for one in samples} > {"eelgrid_traces_open", "eelgrid_traces_total", "eelgrid_spans_total"}


async def test_a_collector_that_answers_nothing_holds_up_no_submission_and_no_stop(tmp_path):
    with collecting() as collector:
        collector.gate.clear()
        async with run_controller(tmp_path, traces=f"http://{collector.address}") as rig:
            await rig.join(build_node("n1", gpus=8))
            await rig.operators.submit_workload(build_request("first", gpus=0))
            await wait_until(lambda: collector.calls, within_s=PATIENT_S)
            for number in range(50):
                await rig.operators.submit_workload(build_request(f"w{number}", gpus=0))
            assert not collector.spans
            async with asyncio.timeout(PATIENT_S):
                await rig.controller.watches.tracing.stop()
