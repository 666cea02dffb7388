"""Every panel of every dashboard has data from a real Prometheus that scrapes a small living fleet, or says why not."""

import asyncio
import json
import shutil
import time

import pytest
from deploy.dashboards.reading import FOLDER, ask, filled, names, panels
from tests.dashboards_rig import scene

from eelgrid_agent.metrics.catalogue import CATALOGUE
from eelgrid_controller.server.metrics.catalogue import METRICS

SECONDS = 20.0
# A busy machine may take this long for what a quiet one has at once.
PATIENCE_S, PAUSE_S = 180.0, 3.0
# Why this scene has no data for a query; one that has some must leave the list.
NOTHING_FAILS = "nothing is refused, put back or lost in this scene"
NO_KUBERNETES = "there is no Kubernetes in this scene"
NO_XID = "simulated devices of a fleet file report no XID"
EMPTY = {
    ("budget", "Put back, refused", "put back {{setting}}"): NOTHING_FAILS,
    ("budget", "Put back, refused", "refused {{rule}}"): NOTHING_FAILS,
    ("engine", "Refusals by rule", "{{command}}: {{rule}}"): NOTHING_FAILS,
    ("engine", "Turn, 99 %", "division"): "so small a fleet is divided within the turn",
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
PERHAPS = {("engine", "Refusals by rule", "{{command}}: {{rule}}"), ("engine", "Turn, 99 %", "division")}
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
