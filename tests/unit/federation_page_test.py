"""The page of a front: what it says of clusters and workloads, that it escapes it, and that a browser and axe-core accept it."""

import logging

import pytest
from tests.builders.cluster import build_request
from tests.chromium_rig import CHROMIUM, browser

from eelgrid_controller.clock import Clock
from eelgrid_controller.federation.dispatch import Copy, CopyPhase, Dispatch
from eelgrid_controller.federation.front_page import HEADERS, FrontPage, render_page
from eelgrid_controller.server.http.live_server import PAGE_SETTINGS, ViewerEndpoint
from eelgrid_protos.messages import ClusterStatus, Summary, Workload, WorkloadPhase

NOW_NS = 1_700_000_000_000_000_000
HOSTILE = '<script>alert("x")</script>'


def statuses():
    """A cluster with everything, one that says little, and one that is silent."""
    summary = Summary(
        time_ns=NOW_NS, nodes_ready=12, nodes_lost=1, gpus=96, allocated_gpu_milli=72_500, pending=14, placed=40,
        measured_power_w=41_200.0, oldest_pending_ns=NOW_NS - 5400 * 10**9,
    )  # fmt: skip
    return [
        ClusterStatus(
            name="north", summary=summary, currency="EUR", price_per_kwh=0.184, carbon_kg_per_kwh=0.031,
            power_budget_w=48_000.0, page_url="https://north.example:8443/", workloads=9,
        ),
        ClusterStatus(name="south", summary=Summary(time_ns=NOW_NS, nodes_ready=2, gpus=16)),
        ClusterStatus(name="west", problem=f"no answer in time {HOSTILE}"),
    ]  # fmt: skip


def rows():
    decision = ("north starts now, 1.40 kW: energy 0.258 + carbon 0.003 + wait 0 = 0.261 EUR", "west did not answer")
    copies = (
        Copy(cluster="north", phase=CopyPhase.RELEASED),
        Copy(cluster="south", phase=CopyPhase.ENDED, problem="no"),
    )
    request = build_request(name="train", user="alice", gpus=2)
    found = []
    for number, phase in enumerate((WorkloadPhase.PLACED, WorkloadPhase.PENDING, WorkloadPhase.SUCCEEDED)):
        key = f"train-{number}"
        dispatch = Dispatch(workload_id=key, request=request, copies=copies, chosen="north", decision=decision)
        workload = Workload(
            workload_id=key, spec=request.spec, phase=phase, submitted_ns=NOW_NS - number * 60 * 10**9, reason=HOSTILE
        )
        found.append((workload, dispatch))
    return found


def test_the_page_says_of_each_cluster_what_an_operator_looks_for():
    text = render_page(statuses(), rows(), now_ns=NOW_NS)
    for words in (
        "72.5 of 96", "41.20 of 48.00 kW", "1 lost", "0.184 EUR/kWh", "31 g/kWh", 'href="https://north.example:8443/"',
        "silent: no answer in time", "1 silent", "train-0", "alice", "west did not answer", "copy in south: ended (no)",
    ):  # fmt: skip
        assert words in text, words


def test_nothing_that_was_said_by_others_is_read_as_html():
    assert "<script>alert" not in render_page(statuses(), rows(), now_ns=NOW_NS)


class Service:
    """What a front knows, made up."""

    async def read_clusters(self):
        return statuses()

    def list_shown(self):
        return [workload for workload, _ in rows()]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
async def test_a_browser_draws_it_without_complaint_and_axe_finds_nothing(tmp_path):
    found = {workload.workload_id: dispatch for workload, dispatch in rows()}
    page = FrontPage(Service(), found.get, Clock(now_ns=lambda: NOW_NS))
    log = logging.getLogger("test")
    endpoint = ViewerEndpoint(PAGE_SETTINGS, tls=None, insecure=False, now_ns=lambda: NOW_NS, log=log)
    port = await endpoint.start("127.0.0.1:0", page.routes, HEADERS)
    try:
        async with browser(tmp_path) as tab:
            await tab.size(1280, 700)
            await tab.open(f"http://127.0.0.1:{port}/")
            await tab.until("document.querySelectorAll('tbody tr').length === 6")
            assert await tab.violations() == []
            assert tab.complaints == []
            await tab.picture(tmp_path / "page.png")
    finally:
        await endpoint.stop()
