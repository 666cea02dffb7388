"""Both daemons' pages keep Prometheus' conventions, are documented, and have bounds; and the lint finds what breaks them."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from docs.metric_pages import count_agent_series_most, count_controller_series_most
from prometheus_client.parser import text_string_to_metric_families
from tests.builders.cluster import build_batch, build_node, build_request
from tests.builders.metrics import build_gpu_view, build_share, build_snapshot
from tests.builders.objectives import run_objectives
from tests.builders.server import run_controller
from tests.metrics_lint import NO_LABELS, documented, faults, run_promtool
from tests.unit.controller_metrics_test import Sources, Whole, lived, scraper
from tests.waiting import wait_until

from eelgrid_agent.metrics.exposition import MetricsRenderer
from eelgrid_controller.server.metrics.catalogue import BUCKETS_S, METRICS, POOLS_MOST
from eelgrid_protos.agent_metrics import CATALOGUE, MetricScope, attribute_metric
from eelgrid_protos.openmetrics import MetricDescription, MetricType

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"
OF_CONTROLLER = (DOCS / "controller-metrics.md").read_text()
OF_AGENT = (DOCS / "agent-metrics.md").read_text()
NAMING = {
    "workload",
    "budget",
    "limit",
}  # labels of the controller that may name what the cluster holds, some hundreds at most


async def controllers_page(tmp_path):
    """A page with nodes, samples, work that runs and waits, and promises."""
    async with run_controller(tmp_path) as rig, run_objectives() as world:
        await lived(world)
        for number in range(POOLS_MOST + 9):
            agent = await rig.join(build_node(f"host-{number}", gpus=1, pool=f"pool-{number}"))
            await agent.say(build_batch(1, gpus=1, time_ns=rig.controller._clock.now_ns()))
        for number in range(POOLS_MOST + 20):
            await rig.operators.submit_workload(build_request(f"task-{number}", namespace=f"team-{number}"))
        telemetry = rig.controller.agents._telemetry
        await wait_until(lambda: telemetry.received == POOLS_MOST + 9, within_s=60.0)
        own = rig.controller.metrics._sources
        rig.controller.metrics.attach(Whole(own, Sources(world, scraper())))
        return (await rig.controller.metrics.render_page()).decode()


def agents_page():
    shares = [build_share(namespace="a", pod=f"b-{number}") for number in range(30)]
    return (
        MetricsRenderer()
        .render_snapshot(build_snapshot(build_gpu_view(), build_gpu_view("GPU-2"), shares=shares))
        .prometheus()
        .decode()
    )


async def test_the_controllers_page_keeps_the_conventions_and_its_bounds(tmp_path):
    text = await controllers_page(tmp_path)
    assert list(faults(text, OF_CONTROLLER, lambda name: count_controller_series_most(METRICS[name]))) == []
    held = re.compile(r"(host|task|GPU-host|team)-\d+")
    told = {
        (sample.name, label)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for label, value in sample.labels.items()
        if label not in NAMING and held.search(value)
    }
    assert told == set(), "what comes and goes is in no other label"
    assert len(text.splitlines()) < 1500
    if shutil.which("promtool"):
        assert await asyncio.to_thread(run_promtool, text) == (0, "")


def test_the_agents_page_keeps_the_conventions():
    text = agents_page()
    most = {metric.name: count_agent_series_most(metric) for metric in CATALOGUE}
    assert list(faults(text, OF_AGENT, most.__getitem__)) == []
    if shutil.which("promtool"):
        assert run_promtool(text) == (0, "")


def test_every_metric_of_both_is_in_the_docs_and_has_help_and_no_name_is_used_twice():
    assert documented(OF_CONTROLLER) == set(METRICS)
    assert documented(OF_AGENT) == {metric.name for metric in CATALOGUE}
    shared = set(METRICS) & {metric.name for metric in CATALOGUE}
    assert {name for name in shared if not name.startswith("process_")} == set(), "a sum over both would be of nothing"


@pytest.mark.parametrize("one", METRICS.values(), ids=lambda one: one.name)
def test_a_metric_of_the_controller_has_a_bound_that_the_docs_state(one):
    most = count_controller_series_most(one)
    assert 1 <= most <= 10_000
    assert f"| `{one.name}` | {one.kind.value} |" in OF_CONTROLLER
    assert f" | {most:,} | {one.help} |" in OF_CONTROLLER
    assert (one.name in BUCKETS_S) is (one.kind is MetricType.HISTOGRAM)
    assert not NO_LABELS & set(one.labels)


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_metric_of_the_agent_has_a_bound_that_the_docs_state(metric):
    most = count_agent_series_most(metric)
    assert 1 <= most <= 10_000
    assert re.search(rf"^\| `{metric.name}` \| {metric.kind.value} \| [^|]* \| {most:,} \| ", OF_AGENT, re.MULTILINE)


def test_a_label_of_the_agent_without_a_bound_cannot_be_described():
    with pytest.raises(KeyError, match="pid"):
        count_agent_series_most(attribute_metric("eelgrid_gpu_processes", MetricScope.GPU, "pids", "Processes.", "pid"))


def test_a_label_without_a_bound_cannot_be_described():
    with pytest.raises(KeyError, match="pod"):
        count_controller_series_most(MetricDescription("eelgrid_pods", MetricType.GAUGE, "Pods", ("pod",)))


@pytest.mark.parametrize(
    ("line", "kind", "wrong"),
    [
        ("eelgrid_power_W 1", "gauge", "no base unit"),
        ("eelgrid_load_percent 1", "gauge", "no base unit"),
        ("eelgrid_load_pct 1", "gauge", "no base unit"),
        ("eelgrid_energy_mj_total 1", "counter", "no base unit"),
        ("eelgrid_delay_milliseconds 1", "gauge", "no base unit"),
        ("eelgrid_power 1", "gauge", "ends in no unit"),
        ("eelgrid_energy_joules_total 1", "gauge", "counters end in _total"),
        ('eelgrid_processes{pid="7"} 1', "gauge", "label pid"),
        ('eelgrid_processes{job="7"} 1', "gauge", "label job"),
        ('eelgrid_processes{instance="7"} 1', "gauge", "label instance"),
        ("node_load_ratio 1", "gauge", "begin with"),
        ('eelgrid_nodes{state="a"} 1\neelgrid_nodes{state="a"} 2', "gauge", "twice"),
        ('eelgrid_nodes{state="a"} 1\neelgrid_nodes{state="b"} 2', "gauge", "2 series, bound is 1"),
    ],
)
def test_the_lint_finds_it(line, kind, wrong):
    name = re.split(r"[{ ]", line)[0]
    page = f"# HELP {name} Help that helps\n# TYPE {name} {kind}\n{line}\n"
    assert any(wrong in fault for fault in faults(page, f"| `{name}` | gauge |\n", lambda _: 1)), wrong
    assert any("has no help" in fault for fault in faults(page.replace("Help that helps", ""), ""))
    assert any("not in the docs" in fault for fault in faults(page, ""))
