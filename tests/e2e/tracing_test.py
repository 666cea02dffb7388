"""Traces of placements from real processes: submit to applied, over OTLP, in the caller's trace, named by the exemplar."""

import asyncio
import urllib.request

import grpc
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.builders.cluster import build_request
from tests.builders.kubernetes import build_node, build_pod
from tests.builders.server import run_controller
from tests.e2e.kubernetes_gate_test import config
from tests.e2e.processes import Cluster, fleet_of, metric
from tests.fakes.collector import collecting
from tests.fakes.kubernetes.cluster import FakeCluster

from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS
from eelgrid_protos import rpc, transport
from eelgrid_protos.messages import CancelWorkloadRequest, ExplainWorkloadRequest

NODE = {
    "name": "box",
    "cpu_milli": 16_000,
    "memory_bytes": 2**36,
    "pool": "t4",
    "gpus": [{"product": "openb-t4", "model": "T4", "count": 2}],
}
CALLER = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SERVER = 2
DIRECT = [
    ("placement", None),
    ("submit", "placement"),
    ("decide", "submit"),
    ("journal", "submit"),
    ("plan", "placement"),
    ("apply", "placement"),
]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A controller that sends its traces, and an agent of one node with two GPUs."""
    with collecting() as collector, Cluster(tmp_path_factory.mktemp("tracing")) as cluster:
        cluster.controller("--traces", collector.address)
        cluster.agent(fleet_of(cluster.folder / "fleet.json", (NODE,)))
        cluster.until_ready(1)
        yield cluster, collector


class Caller(grpc.UnaryUnaryClientInterceptor):
    """A client that traces what it does, and says so with each call."""

    def intercept_unary_unary(self, continuation, client_call_details, request):
        details = client_call_details._replace(metadata=(("traceparent", f"00-{CALLER}-{PARENT}-01"),))
        return continuation(details, request)


def submit(operators, name, gpus):
    request = build_request(name, name=name, gpus=gpus, namespace="ml")
    return operators.submit_workload(request, timeout=30.0).workload


def trace_of(live, name):
    """The spans of the one trace of a workload, once it has ended."""
    cluster, collector = live
    cluster.until(lambda: collector.traces(name), within_s=60.0, what=f"the trace of {name} came")
    (spans,) = collector.traces(name)
    return spans


def tree(spans):
    names = {one.id: one.name for one in spans}
    return [(one.name, names.get(one.parent)) for one in spans]


def test_a_placement_is_one_trace_from_the_call_to_the_agents_answer(live):
    cluster, collector = live
    with transport.open_blocking_channel(cluster.address, tls=None) as channel:
        submit(rpc.build_client(rpc.OPERATOR_SERVICE, grpc.intercept_channel(channel, Caller())), "first", 2)
    spans = trace_of(live, "first")
    assert tree(spans) == DIRECT
    root, call, decide, journal, plan, apply = spans
    assert (root.trace, root.parent) == (CALLER, PARENT), "the caller's trace goes on"
    assert call.kind == SERVER
    assert root.start_ns == call.start_ns <= decide.start_ns <= decide.end_ns <= journal.start_ns
    assert journal.end_ns == call.end_ns <= plan.end_ns == apply.start_ns <= apply.end_ns == root.end_ns
    explained = cluster.operators.explain_workload(
        ExplainWorkloadRequest(workload_id="first"), timeout=10.0
    ).explanation
    chosen = explained.replicas[0].candidates[0]
    said = root.attributes
    assert (said["eelgrid.result"], said["eelgrid.node"], said["eelgrid.workload.namespace"]) == (
        "finished",
        "box",
        "ml",
    )
    assert said["eelgrid.cost_watts"] == pytest.approx(chosen.cost_w)
    assert {term.name: said[f"eelgrid.cost_watts.{term.name}"] for term in chosen.terms} == pytest.approx(
        {term.name: term.cost_w for term in chosen.terms}
    )
    assert said["eelgrid.decision.revision"] == explained.workload.revision
    assert apply.attributes["eelgrid.apply.status"] == "applied"
    assert collector.resource["service.name"] == "eelgrid-controller"

    submit(cluster.operators, "second", 1)
    assert cluster.operators.cancel_workload(CancelWorkloadRequest(workload_id="first"), timeout=30.0)
    spans = trace_of(live, "second")
    assert tree(spans) == [
        *DIRECT[:4],
        ("queue", "placement"),
        ("decide", "placement"),
        ("journal", "placement"),
        *DIRECT[4:],
    ]
    assert (spans[0].parent, spans[0].trace == CALLER) == ("", False)
    queue, decide = spans[4:6]
    assert queue.events[0][1]["eelgrid.reason"].startswith("gpu_count: ")
    assert queue.end_ns == decide.start_ns
    assert decide.attributes["eelgrid.node"] == "box"


def test_a_metric_leads_to_the_trace_and_the_page_counts_what_was_sent(live):
    cluster, _ = live
    submit(cluster.operators, "third", 0)
    spans = trace_of(live, "third")
    accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
    request = urllib.request.Request(f"http://{cluster.metrics}/metrics", headers=accept)
    with urllib.request.urlopen(request, timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    exemplars = [one.exemplar.labels for family in families for one in family.samples if one.exemplar]
    assert {"trace_id": spans[0].trace, "workload": "third"} in exemplars
    cluster.until(lambda: metric(cluster.metrics, "eelgrid_spans_total") >= len(spans), within_s=60.0, what="counted")
    assert metric(cluster.metrics, "eelgrid_traces_total") >= 1


def test_a_placement_that_waited_over_a_kill_of_the_controller_is_one_trace(tmp_path):
    with collecting() as collector, Cluster(tmp_path) as cluster:
        controller = cluster.controller("--traces", collector.address)
        cluster.agent(fleet_of(cluster.folder / "fleet.json", (NODE,)))
        cluster.until_ready(1)
        submit(cluster.operators, "first", 2)
        submit(cluster.operators, "second", 1)
        cluster.until(
            lambda: [one.name for one in collector.spans].count("submit") == 2, within_s=60.0, what="both came"
        )
        controller.kill()
        cluster.controller("--traces", collector.address)
        cluster.until_ready(1)
        cluster.operators.cancel_workload(CancelWorkloadRequest(workload_id="first"), timeout=30.0)
        spans = trace_of((cluster, collector), "second")
    waited = [("queue", "placement"), ("decide", "placement"), ("journal", "placement")]
    assert sorted(tree(spans), key=str) == sorted([*DIRECT, *waited], key=str)
    assert next(one for one in spans if one.name == "placement").attributes["eelgrid.result"] == "finished"


def test_a_pods_trace_ends_with_the_patch_that_sends_it_to_its_node(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            await cluster.create(NODES, build_node("n1"))
            kubernetes = config(fake, tmp_path)
            async with run_controller(tmp_path / "data", kubernetes=kubernetes, traces=collector.address) as rig:
                await cluster.create(PODS, build_pod("p1", gpus=1))
                async with asyncio.timeout(60.0):
                    while not rig.controller.watches.tracing.traces.results["finished"]:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)

    with collecting() as collector:
        asyncio.run(play())
        (root,) = [one for one in collector.spans if one.name == "placement"]
        (spans,) = collector.traces(root.attributes["eelgrid.workload.id"])
    assert tree(spans) == [*DIRECT[:4], ("patch", "placement")], "no agent is there to apply anything"
    patch = spans[-1]
    assert (patch.attributes["eelgrid.node"], patch.end_ns) == ("n1", root.end_ns)
    assert root.attributes["eelgrid.result"] == "finished"
