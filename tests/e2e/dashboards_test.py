"""Every panel of every dashboard has data from a real Prometheus that scrapes a small living fleet, or says why not."""

import asyncio
import contextlib
import json
import re
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from deploy.dashboards.reading import FOLDER, ask, filled, names, panels
from tests.agent_process import agent_process
from tests.builders.cluster import build_request
from tests.builders.server import run_controller
from tests.dashboards_rig import WINDOW_S, prometheus, scene
from tests.fork_server import run_program
from tests.waiting import wait_until

from eelgrid_controller.server.metrics.catalogue import METRICS
from eelgrid_protos.agent_metrics import CATALOGUE
from eelgrid_protos.messages import EnergyPrices, GetPolicyRequest, PricePeriod, UpdatePolicyRequest

SECONDS = 20.0
# A busy machine may take this long for what a quiet one has at once.
PATIENCE_S, PAUSE_S = 180.0, 3.0
# Why this scene has no data for a query; one that has some must leave the list.
NOTHING_FAILS = "nothing is refused, put back or lost in this scene"
NO_KUBERNETES = "there is no Kubernetes in this scene"
NO_FRONT = "there is one cluster in this scene, and no front; tests/e2e/several_clusters_test.py reads its metrics"
NO_XID = "simulated devices of a fleet file report no XID"
EMPTY = {
    ("budget", "Put back, refused", "put back {{setting}}"): NOTHING_FAILS,
    ("budget", "Put back, refused", "refused {{rule}}"): NOTHING_FAILS,
    ("engine", "Clusters of a front", "{{cluster}}"): NO_FRONT,
    ("engine", "Left out of decisions", "{{cluster}}"): NO_FRONT,
    ("engine", "Refusals by rule", "{{command}}: {{rule}}"): NOTHING_FAILS,
    ("engine", "Waiting and stuck at the front", "stuck in {{cluster}}"): NO_FRONT,
    ("engine", "Waiting and stuck at the front", "waiting"): NO_FRONT,
    ("engine", "Workloads by cluster", "{{cluster}}"): NO_FRONT,
    ("engine", "Cycle, 99 %", "allocation"): "so small a fleet is divided within the cycle",
    ("fleet", "Events of agents", "{{kind}}"): NOTHING_FAILS,
    ("node", "Held and idle since", "idle since"): "nothing is held and idle for five minutes in this scene",
    ("node", "Power charged to each slice", "{{device}} gi {{gpu_instance}}"): "nobody holds a slice here",
    ("node", "Settings put back, plans refused", "put back {{setting}}"): NOTHING_FAILS,
    ("node", "Settings put back, plans refused", "refused {{rule}}"): NOTHING_FAILS,
    ("node", "XIDs", "last"): NO_XID,
    ("node", "XIDs of 24 h", "XID {{xid}}"): NO_XID,
    ("workloads", "Gated pods by reason", "{{reason}}"): NO_KUBERNETES,
}
# What may or may not come in a minute.
PERHAPS = {("engine", "Refusals by rule", "{{command}}: {{rule}}"), ("engine", "Cycle, 99 %", "allocation")}
# A scrape has a second here; where other processes hold both processors for that long, one may come late.
FAILED_MOST = 0.1
DAEMONS = {*METRICS, *(one.name for one in CATALOGUE)}


def failed(values):
    """The share of scrapes that failed."""
    return sum(value != 1.0 for value in values) / len(values)


def is_told(expression):
    """Whether daemons of these sources tell every metric that is asked for."""
    asked = {name for name in names(expression) if name.startswith("eelgrid_")}
    return all({name, name.rsplit("_", 1)[0]} & DAEMONS for name in asked)


async def without_data(address, began_s):
    """Queries that have none, by dashboard, panel and legend; and how many were asked."""
    found, count = set(), 0
    for path in sorted(FOLDER.glob("*.json")):
        document = json.loads(path.read_text())
        for one in panels(document, path.stem):
            for expression, legend in one.queries:
                query = filled(expression, document, rate_interval="5s")
                series = await asyncio.to_thread(ask, address, query, begin_s=began_s, end_s=time.time(), step_s=2.0)
                count += 1
                if not series and is_told(expression):
                    found.add((one.dashboard, one.title, legend))
    return found, count


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus; Debian has a package of that name")
async def test_every_panel_shows_data_or_says_why_not(tmp_path):
    wanted = set(EMPTY) - PERHAPS
    async with scene(tmp_path, seconds=SECONDS) as (address, began_s):
        until_s = time.monotonic() + PATIENCE_S
        empty, count = await without_data(address, began_s)
        while empty - PERHAPS - wanted and time.monotonic() < until_s:
            await asyncio.sleep(PAUSE_S)
            empty, count = await without_data(address, began_s)
        (*up,) = await asyncio.to_thread(ask, address, "up", begin_s=began_s + 5.0, end_s=time.time(), step_s=1.0)
    assert count > 150
    assert len(up) == 4
    assert all(failed(one.values) <= FAILED_MOST for one in up), "scrapes failed"
    assert empty - PERHAPS == wanted


# An agent that simulates a whole fleet has no series of its GPUs; the one beside it, of one node, has.
FLEETS = {
    "many": [{"name": "many-{index}", "count": 3, "gpus": [{"product": "a100-sxm4-80gb", "count": 4}]}],
    "one": [{"name": "one", "gpus": [{"product": "a100-sxm4-80gb", "count": 2}]}],
}
LIVED_S = 30.0
# The energy of a GPU is in the ledger once its window is over and written, and a reading is half a minute fresh.
LATE_S = 2 * WINDOW_S + 4.0
PRICES = EnergyPrices(currency="EUR", periods=(PricePeriod(begins_minute=0, price_per_kwh=0.3),), pue=1.0)


class Panels:
    """The values of panels now, from a Prometheus."""

    def __init__(self, address):
        self._address = address

    async def read(self, dashboard, title, *, query=0, at_s=None):
        """The sum of the series of one query of a panel, the first of this title; None without any."""
        document = json.loads((FOLDER / f"{dashboard}.json").read_text())
        one = next(one for one in panels(document, dashboard) if one.title == title)
        expression = filled(one.queries[query][0], document, rate_interval="10s")
        return await self.evaluate(f"sum({expression})", at_s)

    async def evaluate(self, expression, at_s=None):
        at_s = time.time() if at_s is None else at_s
        series = await asyncio.to_thread(ask, self._address, expression, begin_s=at_s, end_s=at_s, step_s=1.0)
        return series[0].values[-1] if series else None


async def eelctl(address, *words):
    words = ("--controller", address, *map(str, words))
    done = await asyncio.to_thread(run_program, "eelgrid_controller.cli", words, timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def eelctl_json(address, *words):
    return json.loads(await eelctl(address, *words, "-o", "json"))


class Site:
    """A controller, a fleet that may end before it, and panels over a Prometheus that scrapes them."""

    def __init__(self, rig, fleet, shown):
        self.rig, self.fleet, self.shown = rig, fleet, shown

    async def power(self):
        return await self.shown.read("fleet", "Power of GPUs")

    async def live(self):
        """Since when Prometheus has seen power, once that is so long ago."""
        await wait_until(lambda: self.rig.controller.agents.connected == 4, within_s=60.0)
        until_s = time.monotonic() + PATIENCE_S
        while True:
            with suppress(OSError):  # Prometheus does not listen yet
                if await self.power():
                    break
            assert time.monotonic() < until_s, "Prometheus sees no power"
            await asyncio.sleep(0.5)
        began_s = time.time()
        await asyncio.sleep(LIVED_S)
        return began_s

    async def settled(self):
        """Energy of today by eelctl and as the dashboard shows it, once they are the same."""
        until_s = time.monotonic() + 60.0
        while time.monotonic() < until_s:
            before = await eelctl_json(self.rig.address, "energy", "--since", "today", "--by", "namespace")
            shown_kwh = await self.shown.read("fleet", "Energy today")
            after = await eelctl_json(self.rig.address, "energy", "--since", "today", "--by", "namespace")
            known_j = pytest.approx(after["total"]["energy_j"], rel=1e-6)
            if before["total"] == after["total"] and shown_kwh is not None and shown_kwh * 3.6e6 == known_j:
                return after, shown_kwh
        pytest.fail("the dashboard does not show the ledger's energy")


@contextlib.asynccontextmanager
async def priced_site(folder):
    async with contextlib.AsyncExitStack() as held:
        rig = await held.enter_async_context(run_controller(folder / "data", spend_s=1.0))
        policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
        changed = replace(policy, prices=PRICES, send_interval_s=0.5, sample_interval_s=0.5)
        await rig.operators.update_policy(UpdatePolicyRequest(policy=changed))
        fleet, pages = await held.enter_async_context(contextlib.AsyncExitStack()), []
        for name, listed in FLEETS.items():
            nodes = [{"cpu_milli": 64_000, "memory_bytes": 2**38, "pool": name, **node} for node in listed]
            path = folder / f"{name}.json"
            path.write_text(json.dumps({"nodes": nodes}))
            window = ("--energy-window", str(WINDOW_S))
            process = agent_process(rig.address, path, folder / f"{name}.log", *window)
            pages.append((await fleet.enter_async_context(process))["metrics"])
        address = held.enter_context(prometheus(folder, rig.metrics, pages, rig.metrics))
        for number in range(5):
            await rig.operators.submit_workload(build_request(f"w-{number}", gpus=1, namespace=f"team-{number % 2}"))
        yield Site(rig, fleet, Panels(address))


async def check_power(site):
    """Readings of the same moment: from the controller, its pools and its nodes."""
    summary, nodes = await asyncio.gather(
        eelctl_json(site.rig.address, "top", "--once"), eelctl_json(site.rig.address, "nodes")
    )
    shown, total_w = site.shown, await site.power()
    assert total_w > 14 * 30.0  # of all 14 GPUs, not of the two that have series
    for title in ("Power by GPU model", "Power by pool", "Measured and modelled power"):
        assert await shown.read("fleet", title) == pytest.approx(total_w, rel=0.1), title
    assert await shown.read("engine", "Power: measured and modelled") == pytest.approx(total_w, rel=0.1)
    assert summary["measured_power_w"] == pytest.approx(total_w, rel=0.1)
    assert sum(node["power_w"] for node in nodes) == pytest.approx(total_w, rel=0.1)
    # What has series of its own is a part, and the dashboard says of how many.
    assert await shown.read("node", "GPUs with series") == pytest.approx(2 / 14)
    assert 0.0 < await shown.read("node", "Power of these GPUs") < total_w / 2


async def check_energy(shown, document, shown_kwh):
    """The parts of today's energy, and its cost."""
    total = document["total"]
    assert await shown.read("fleet", "Energy today by namespace") == pytest.approx(shown_kwh)
    # Boards without work draw idle power, which the ledger has, too.
    nobody_j = document["unallocated"]["energy_j"] + document["unattributed"]["energy_j"]
    assert nobody_j > 0.0
    assert await shown.read("workloads", "Energy today without an owner") * 3.6e6 == pytest.approx(nobody_j)
    assert await shown.read("workloads", "Energy without an owner") == pytest.approx(nobody_j / total["energy_j"])
    assert total["cost"] == pytest.approx(shown_kwh * 0.3, rel=1e-6)
    assert await shown.read("fleet", "Cost today") == pytest.approx(total["cost"])


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus; Debian has a package of that name")
async def test_power_energy_cost_and_savings_agree_with_each_other_and_with_eelctl(tmp_path):
    async with priced_site(tmp_path) as site:
        shown, began_s = site.shown, await site.live()
        await check_power(site)
        power, saved = "sum(eelgrid_measured_power_watts)", 'sum(eelgrid_saved_power_watts{part="placement"})'
        mean_w, saved_w, most_w = [
            await shown.evaluate(f"{over}_over_time(({shape})[{LIVED_S:.0f}s:1s])")
            for over, shape in (("avg", power), ("avg", saved), ("max", f"abs({saved})"))
        ]
        # From here on nothing is added, so that all may be asked after each other.
        await site.fleet.aclose()
        ended_s, saved_kwh = time.time(), await shown.read("fleet", "Saved today")
        power_w = await shown.evaluate(power, ended_s)
        hourly = await shown.read("fleet", "Cost per hour", at_s=ended_s)
        assert hourly == pytest.approx(0.3 * power_w / 1000.0, rel=0.01)
        # The same window elsewhere: the report of this month, whose ledger began today. Last windows may come while it is made.
        month, page = datetime.now(UTC).strftime("%Y-%m"), tmp_path / "report.html"
        document, shown_kwh = await site.settled()
        for _ in range(5):
            await eelctl(site.rig.address, "report", "--month", month, "--out", page)
            before_kwh, (document, shown_kwh) = shown_kwh, await site.settled()
            if shown_kwh == before_kwh:
                break
        energy_j, seconds = document["total"]["energy_j"], ended_s - began_s
        # Energy is power over time, but for a window at each end and the time between agents and Prometheus.
        assert abs(energy_j - mean_w * seconds) <= mean_w * LATE_S
        # What was saved while the fleet came, before Prometheus saw power, is in the sum and not in the mean.
        grown_kwh = saved_kwh - (await shown.read("fleet", "Saved today", at_s=began_s) or 0.0)
        assert abs(grown_kwh * 3.6e6 - saved_w * seconds) <= most_w * LATE_S + 1.0
        await check_energy(shown, document, shown_kwh)
        reported = float(re.search(r"<b>([\d.]+) kWh</b>energy of the GPUs", page.read_text())[1])
        assert reported == pytest.approx(shown_kwh, abs=0.0006)
        seen = re.search(r"energy today\s+([\d.,]+) (k?J|kWh)", await eelctl(site.rig.address, "top", "--once"))
        size = {"J": 1.0, "kJ": 1e3, "kWh": 3.6e6}[seen[2]]
        # Last windows may have come before it was asked.
        later_j = (await site.settled())[0]["total"]["energy_j"]
        assert 0.94 * energy_j <= float(seen[1].replace(",", "")) * size <= 1.06 * later_j
