"""The tab Now of a controller that runs: its figures are those of eelctl and of the ledger at the same moment."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.builders.cluster import build_request
from tests.chromium_rig import CHROMIUM, browser
from tests.e2e.page_controller_test import answer
from tests.e2e.processes import POLL_S, fleet_of
from tests.page_rig import LIVE
from tests.waiting import wait_for

from eelgrid_protos.messages import BudgetScope, EnergyPrices, PowerBudget, PricePeriod, QueryEnergyRequest

NODES = [
    {
        "name": f"gpu-{index}",
        "cpu_milli": 64_000,
        "memory_bytes": 2**37,
        "gpus": [{"product": "h100-sxm5-80gb", "count": 2}],
    }
    for index in range(2)
]
HOUR_NS = 3600 * 10**9


def energy_mj(spent):
    return spent.bare_idle_mj + spent.context_idle_mj + spent.active_mj


def check_same_moment(cluster, page):
    """The page and eelctl say the same."""

    def same_moment():
        # The page is asked all the while: an overview is kept for a second, and eelctl may take longer than that.
        with ThreadPoolExecutor(1) as beside:
            running = beside.submit(cluster.eelctl, "overview", "-o", "json")
            answers = {}
            while not running.done() or not answers:
                seen = answer(page, "overview")
                answers[seen["at_ms"]] = seen
                time.sleep(POLL_S)
        told = json.loads(running.result().stdout)
        told = told.get("overview", told)
        shown = answers.get(int(told["time_ns"]) // 10**6)
        if shown is None:
            return None
        # There is no energy while the ledger is being opened.
        energy_j = shown["today"] and shown["today"]["energy_j"]
        is_complete = shown["power"]["measured_w"] and energy_j and shown["capacity"]["gpus_lost"]
        return (shown, told) if is_complete else None

    shown, told = cluster.until(same_moment, what="both answer with the overview of one moment")
    assert told["power"]["budget_w"] == shown["power"]["budget_w"] == 9_000.0
    for part in ("power", "today", "capacity", "promises"):
        values = {name: value for name, value in shown[part].items() if not name.endswith("_ms")}
        assert {name: told[part].get(name) for name in values} == values, part
    assert (
        [(row["reason"], row["workloads"]) for row in shown["waiting"]]
        == [(row["reason"], row["workloads"]) for row in told["waiting"]]
        == [("gpu_count", 1)]
    )
    assert [(row["kind"], row["subject"], row["command"]) for row in shown["attention"]] == [
        (row["kind"].lower(), row["subject"], row["command"]) for row in told["attention"]
    ]
    assert ("lost_gpu", "gpu-1/1") in [(row["kind"], row["subject"]) for row in shown["attention"]]
    assert [(row["user"], row["milli"], row["power_w"]) for row in shown["consumers"]] == [
        (row["user"], row["held_milli"], row["power_w"]) for row in told["consumers"]
    ]


def check_ledger(cluster, page):
    """What the page says was spent is what the ledger has."""

    def same_joules():
        seen = answer(page, "overview")
        # The same day: the page's begins anew at midnight.
        begin_ns = seen["today"]["begin_ms"] * 10**6
        request = QueryEnergyRequest(begin_ns=begin_ns, end_ns=begin_ns + 24 * HOUR_NS, group_by=("user",))
        found = cluster.operators.query_energy(request, timeout=10.0)
        users = {group.values[0]: energy_mj(group.spent) / 1000.0 for group in found.groups}
        of_users = {row["user"]: row["energy_j"] for row in seen["consumers"] if row["energy_j"]}
        return seen if of_users == pytest.approx({key: value for key, value in users.items() if value}) else None

    seen = cluster.until(same_joules, what="the page has what the ledger has")
    assert set(seen["consumers"][0]) >= {"namespace", "user", "cost"}
    cost = 0.4 * seen["today"]["energy_j"] / 3.6e6
    assert seen["today"]["cost"] == pytest.approx(cost, rel=1e-6)


async def check_browser(page, tmp_path):
    """What stands on the page."""
    async with browser(tmp_path) as tab:
        await tab.size(1400, 860)
        await tab.open(f"http://{page}/")
        await tab.until(LIVE)
        await tab.until("document.querySelectorAll('#headlines .figure').length === 6")

        async def drawn():
            """The figures, once the energy is that of the page's data: windows that were under way are written later."""
            seen = await asyncio.to_thread(answer, page, "overview")
            figures = {
                title: notes
                for title, *notes in await tab.run(
                    "[...document.querySelectorAll('#headlines .figure')].map((one) => one.innerText.split(/\\n+/))"
                )
            }
            return figures if figures["Today"][0] == f"{seen['today']['energy_j'] / 3.6e6:.3f} kWh" else None

        figures = await wait_for(drawn)
        assert figures["Waiting"][:2] == ["1", "1: no node has enough whole GPUs free"]
        assert "1 lost" in figures["GPUs failing"]
        users = "[...document.querySelectorAll('[data-table=consumers] tbody tr')].map((row) => row.cells[1].innerText)"
        assert set(await tab.run(users)) >= {"alice", "bob"}
        assert tab.complaints == []


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium")
async def test_the_page_eelctl_and_the_ledger_agree(cluster, tmp_path):
    controller = cluster.controller("--page", "127.0.0.1:0")
    page = controller.said("serving listen=")["page"]
    prices = EnergyPrices(currency="EUR", periods=(PricePeriod(begins_minute=0, price_per_kwh=0.4),))
    budgets = (PowerBudget(scope=BudgetScope.CLUSTER, limit_w=9_000.0),)
    cluster.set_policy(sample_interval_s=0.5, send_interval_s=0.5, prices=prices, budgets=budgets)
    faults = tmp_path / "faults"
    faults.write_text("")
    agent = cluster.agent(fleet_of(tmp_path / "fleet.json", NODES), "--energy-window", "1", "--faults", str(faults))
    cluster.until_ready(2)
    for name, gpus, user in (("alpha", 2, "alice"), ("beta", 1, "bob"), ("gamma", 2, "carol")):
        spec = build_request(name, name=name, gpus=gpus, user=user, namespace="research")
        cluster.operators.submit_workload(spec, timeout=10.0)
    with faults.open("a") as out:
        out.write(json.dumps({"fault": "lose", "node": "gpu-1", "gpu": 1}) + "\n")

    check_same_moment(cluster, page)
    # Nothing is spent any more; the last windows are on their way to the disk.
    assert agent.stop() == 0
    check_ledger(cluster, page)
    await check_browser(page, tmp_path)
    assert controller.stop() == 0
