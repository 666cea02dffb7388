"""The controller's metrics page: what is listed is what is told, promises and watts are on it, and it stays bounded."""

import asyncio
import logging
import shutil
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.builders.cluster import build_request
from tests.builders.objectives import build_powered_node, build_service, build_training_job, run_objectives
from tests.builders.profiles import build_engine_points
from tests.builders.server import run_controller
from tests.metrics_lint import run_promtool
from tests.waiting import wait_until

from eelgrid_controller.objectives.status import refusal_rule
from eelgrid_controller.runtime.scraper import FetchError, FetchFailure, Scraper
from eelgrid_controller.server import metric_collectors
from eelgrid_controller.server.metric_collectors import ObjectiveMetrics
from eelgrid_controller.server.metrics.catalogue import METRICS, build_family
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Unavailable
from eelgrid_protos.messages import BudgetScope, Column, EnergyPrices, PowerBudget, PricePeriod, Reading, SampleBatch

BUDGET = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=2000.0)
PRICES = EnergyPrices(currency="CHF", periods=(PricePeriod(begins_minute=0, price_per_kwh=0.36),))


def test_a_name_that_is_not_listed_cannot_be_told():
    with pytest.raises(KeyError):
        build_family("eelgrid_of_the_moment", 1.0)


@pytest.mark.parametrize(
    ("error", "rule"),
    [(Unavailable("full"), "unavailable"), (ContractError("x", ()), "invalid_argument"), (KeyError("x"), "internal")],
)
def test_a_refusal_is_counted_by_its_rule(error, rule):
    assert refusal_rule(error) == rule


class Sources:
    """The metrics of objectives alone."""

    def __init__(self, world, pages):
        self.world, self.page = world, ObjectiveMetrics(world.control_loop, pages)

    def families(self):
        state = self.world.loop.core.state
        return {one.name: one for one in self.page.families(state.workloads, state.policy)}


def scraper():
    async def refused(_):
        raise FetchError("status 404", FetchFailure.STATUS)

    return Scraper(refused, every_s=15.0, monotonic_s=time.monotonic, log=logging.getLogger("test"))


def told(families, name):
    return {tuple(sample.labels.values()): sample.value for sample in families[name].samples}


async def lived(world, *, services=("s",), seconds=90):
    """Services under more load than they can serve at first, a job at its limit, a budget and a price."""
    await world.join(build_powered_node("n1", gpus=8), build_powered_node("n2", gpus=8))
    await world.enforce("p", budgets=(BUDGET,), prices=PRICES)
    await world.loop.record_measurements(build_engine_points())
    for request in (*(build_service(name, replicas_most=4) for name in services), build_training_job("j", gpus=2)):
        await world.loop.submit(request)
    await world.cycle()
    for turn in range(seconds // 15):
        for name in services:
            if ("s", 0) in world.servers and name == "s":
                world.servers["s", 0].served(900, inter_s=0.09)  # far above the objective of 50 ms
            world.serve(name, 90.0 if name == "s" else 5.0)
        world.samples("n1", "n2", power_w=300.0)
        world.control_loop.progress("j", 150.0 * (turn + 1), int(world.now_s * 1e9))
        await world.cycle(15.0)


async def test_how_promises_are_kept_is_reported_by_service_job_and_budget():
    async with run_objectives() as world:
        await lived(world)
        families = Sources(world, scraper()).families()
        seen = world.control_loop.objectives_status.steering
        windows = told(families, "eelgrid_service_windows")
        assert windows["s", "missed"] >= 1.0
        assert sum(windows.values()) == 5.0  # of six pages
        assert told(families, "eelgrid_promise_windows") == {
            (verdict,): count for (_, verdict), count in windows.items()
        }
        assert told(families, "eelgrid_service_latency_objective_seconds") == {("s",): 0.05}
        assert told(families, "eelgrid_service_latency_seconds")["s",] == seen.services[0].live_s
        assert told(families, "eelgrid_service_replicas") == {
            ("s", "wanted"): seen.services[0].target,
            ("s", "serving"): seen.services[0].serving,
        }
        assert told(families, "eelgrid_service_window_age_seconds") == {("s",): 0.0}
        assert told(families, "eelgrid_job_slowdown_promised_ratio") == {("j",): 0.1}
        assert told(families, "eelgrid_job_power_limit_watts") == {("j",): seen.jobs[0].limit_w}
        (budget,) = world.control_loop.promises().budgets
        assert told(families, "eelgrid_power_budget_limit_watts") == {("cluster",): 2000.0}
        assert told(families, "eelgrid_power_budget_claimed_watts") == {("cluster",): budget.claimed_w}
        assert 0.0 < told(families, "eelgrid_power_budget_others_watts")["cluster",] < budget.claimed_w
        room = told(families, "eelgrid_power_budget_room_watts")["cluster",]
        assert room + budget.claimed_w == pytest.approx(2000.0)
        assert told(families, "eelgrid_energy_price_per_joule") == {("CHF",): pytest.approx(1e-7)}
        assert told(families, "eelgrid_energy_price_ratio") == {(): pytest.approx(1.0)}
        assert told(families, "eelgrid_objectives_cycles") == {(): 7.0}
        assert told(families, "eelgrid_objectives_commands")["scale",] >= 1.0
        assert {key for (key,) in told(families, "eelgrid_scrape_failures")} == {kind.value for kind in FetchFailure}
        assert set(told(families, "eelgrid_promise_series_left_out").values()) == {0.0}


async def test_budgets_have_the_figures_of_eelctl_promises():
    async with run_objectives() as world:
        await lived(world, seconds=30)
        families = Sources(world, scraper()).families()
        # A missing reading is no number.
        assert told(families, "eelgrid_power_budget_drawn_watts") == {}
        assert told(families, "eelgrid_power_budget_over_watts") == {}
        assert told(families, "eelgrid_power_budget_unread_gpus") == {("cluster",): 16.0}
        column = Column(reading=Reading.POWER_W, values=(300.0,) * 8)
        world.now_s += 15.0
        sent = SampleBatch(
            sequence=100,
            inventory_generation=build_powered_node("n1").generation,
            time_ns=(int(world.now_s * 1e9),),
            gpu_columns=(column,),
        )
        world.telemetry.receive_batch("n1", sent, now_s=world.now_s)
        # At once, not with the next control cycle: as commands and the page show it.
        (budget,) = world.control_loop.promises().budgets
        families = Sources(world, scraper()).families()
        assert told(families, "eelgrid_power_budget_drawn_watts") == {("cluster",): budget.measured_w}
        assert told(families, "eelgrid_power_budget_over_watts") == {("cluster",): budget.over_w}
        assert told(families, "eelgrid_power_budget_claimed_watts") == {("cluster",): budget.claimed_w}
        assert told(families, "eelgrid_power_budget_shortfall_watts") == {("cluster",): budget.shortfall_w}
        assert (budget.measured_w, budget.over_w) == (2400.0, 400.0)
        assert told(families, "eelgrid_power_budget_unread_gpus") == {("cluster",): 8.0}


async def test_of_many_services_the_worst_have_series_and_the_rest_is_counted(monkeypatch):
    monkeypatch.setattr(metric_collectors, "SERIES_MOST", 1)
    async with run_objectives() as world:
        await lived(world, services=("a", "s"), seconds=60)
        families = Sources(world, scraper()).families()
        assert {key for key, _ in told(families, "eelgrid_service_windows")} == {"s"}
        assert told(families, "eelgrid_promise_series_left_out") == {("service",): 1.0, ("job",): 0.0, ("budget",): 0.0}
        assert sum(told(families, "eelgrid_promise_windows").values()) == 6.0
        assert sum(told(families, "eelgrid_services").values()) == 2.0
        await world.loop.cancel("s")
        await world.cycle()
        families = Sources(world, scraper()).families()
        assert {key for key, _ in told(families, "eelgrid_service_windows")} == {"a"}
        assert sum(told(families, "eelgrid_promise_windows").values()) == 6.0


async def test_services_that_cannot_be_watched_and_commands_that_are_refused_are_counted(monkeypatch):
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"))
        await world.enforce("p")
        await world.loop.submit(build_service("s", profile="unmeasured"))
        await world.cycle()
        families = Sources(world, scraper()).families()
        assert told(families, "eelgrid_services") == {("unsteered",): 1.0}
        assert "eelgrid_energy_price_ratio" not in families

        async def full(*_):
            raise Unavailable("the disk is full")

        monkeypatch.setattr(world.loop, "scale", full)
        await world.loop.record_measurements(build_engine_points("unmeasured"))
        await world.cycle()
        for _ in range(6):
            world.serve("s", 90.0)
            await world.cycle(15.0)
        families = Sources(world, scraper()).families()
        assert told(families, "eelgrid_objectives_refusals")["scale", "unavailable"] >= 1.0


async def test_the_whole_page_reports_what_is_listed(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.operators.submit_workload(build_request("w1"))
        await wait_until(lambda: rig.controller.savings.figures is not None, within_s=60.0)
        await wait_until(lambda: rig.controller.ledger.used_bytes is not None, within_s=60.0)
        collect = rig.controller.metrics.collect
        await wait_until(lambda: "eelgrid_energy_today_joules" in {one.name for one in collect()}, within_s=60.0)
        text = (await rig.controller.metrics.render_page()).decode()
    types = {
        one.name + {"counter": "_total", "info": "_info"}.get(one.type, ""): one
        for one in text_string_to_metric_families(text)
        if not one.name.endswith("_created")  # of histograms, by the client library
    }
    for name, one in types.items():
        about = METRICS[name]
        assert one.documentation == about.help
        labels = {label for sample in one.samples for label in sample.labels} - {"le"}
        assert labels <= set(about.labels), name
    without = {
        name
        for name in METRICS
        if name.startswith(
            (
                "eelgrid_energy_price",
                "eelgrid_energy_today_c",
                "eelgrid_following",
                "eelgrid_front_",
                "eelgrid_ingest_connected",
                "eelgrid_ingest_links",
                "eelgrid_ingest_batches",
                "eelgrid_ingest_agents_waiting",
                "eelgrid_ingest_kept_streams",
                "eelgrid_ingest_dropped_messages",
                "eelgrid_kubernetes",
            )
        )
    }
    without |= {"eelgrid_ledger_newest_window_age_seconds", "eelgrid_oldest_sample_age_seconds"}
    without |= {"eelgrid_fragmentation_ratio", "eelgrid_traces_open", "eelgrid_traces_total", "eelgrid_spans_total"}
    without |= {"eelgrid_calls_refused_total", "eelgrid_calls_without_role_total"}
    without |= {name for name in METRICS if name.startswith("eelgrid_remote_write_")}
    assert METRICS.keys() - types.keys() == without, (
        "without prices, a cluster, a node, another leader, traces, a receiver and TLS: no series"
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH (Debian: prometheus)")
async def test_promtool_has_nothing_to_say_of_a_page_with_promises(tmp_path):
    async with run_controller(tmp_path) as rig, run_objectives() as world:
        await lived(world)
        own = rig.controller.metrics._sources
        rig.controller.metrics.attach(Whole(own, Sources(world, scraper())))
        text = (await rig.controller.metrics.render_page()).decode()
    assert 'eelgrid_service_windows_total{verdict="missed",workload="s"}' in text
    assert await asyncio.to_thread(run_promtool, text) == (0, "")


class Whole:
    """A controller's own sources with another's control loop."""

    def __init__(self, own, parts):
        self.own, self.parts = own, parts
        self.settled, self.summary, self.shell = own.settled, own.summary, own.shell

    def objectives(self):
        return self.parts.families().values()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 200),
        ("localhost", 200),
        ("eelgrid-controller-metrics.eelgrid.svc:9464", 200),
        ("evil.example:9464", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
async def test_the_page_is_read_under_our_own_names_and_no_strangers(tmp_path, host, status):
    """DNS rebinding: a page of a stranger reads our metrics through a browser that can reach them."""
    async with run_controller(tmp_path, metrics_hosts=("eelgrid-controller-metrics.eelgrid.svc",)) as rig:
        address, _, port = rig.metrics.rpartition(":")
        for path in ("/metrics", "/livez"):
            reader, writer = await asyncio.open_connection(address, int(port))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert answer.startswith(f"HTTP/1.1 {status} ".encode())
            assert (b"eelgrid_state_revision" in answer) == (status == 200 and path == "/metrics")
