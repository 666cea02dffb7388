"""Columns of the page's map on demand: readings, idle GPUs, who holds them; cached, and safe while the fleet changes."""

import json

import pytest
from bench.page_fleet import LOG, PageFleet, inventory
from tests.builders.overviews import busy_overview

from eelgrid_controller.server.http.live_columns import COLUMNS, GpuColumn
from eelgrid_controller.server.http.live_hub import LiveHub
from eelgrid_controller.state.events import NodeJoined


@pytest.fixture
def fleet():
    fleet = PageFleet(2)
    fleet.place("w-1", "node-0000", [0, 1], namespace="research", user="alice")
    fleet.place("w-2", "node-0000", [2], milli=300, namespace="serving", user="bob")
    fleet.place("w-3", "node-0000", [2], milli=500, namespace="research", user="alice")
    return fleet


async def column(hub, name):
    return json.loads(bytes(await hub.read_column(name)))


async def test_readings_are_whole_numbers_and_what_is_not_read_is_not_zero(fleet):
    hub = LiveHub(fleet, log=LOG)
    assert (await column(hub, "utilization"))["values"] == [-1] * 16
    fleet.report()
    hub = LiveHub(fleet, log=LOG)
    assert (await column(hub, "utilization"))["values"] == [50] * 16
    assert (await column(hub, "temperature"))["values"] == [61] * 16


async def test_a_shared_gpu_belongs_to_who_holds_most_of_it(fleet):
    hub = LiveHub(fleet, log=LOG)
    found = await column(hub, "namespace")
    assert found["names"] == ["research", "serving"], "who holds most is the first"
    assert found["values"] == [0, 0, 0] + [-1] * 13
    assert (await column(hub, "user"))["names"] == ["alice", "bob"]
    # For a consumer every GPU counts that it has a part of.
    assert (await hub.list_held_cells("serving", "bob"))["cells"] == [2]
    assert (await hub.list_held_cells("research", "alice"))["cells"] == [0, 1, 2]
    assert (await hub.list_held_cells("research", "bob"))["cells"] == []


async def test_idle_is_what_the_overview_counts_and_nothing_that_is_not_held(fleet):
    fleet.idle = frozenset({("node-0000", 1), ("node-0001", 0)})
    assert (await column(LiveHub(fleet, log=LOG), "idle"))["values"] == [1, 2, 1] + [0] * 13


async def test_a_column_is_computed_once_for_all_who_ask_within_a_frame(fleet):
    hub = LiveHub(fleet, log=LOG)
    assert await hub.read_column("user") is await hub.read_column("user")
    hub = LiveHub(fleet, log=LOG, every_s=0.0)
    assert await hub.read_column("user") is not await hub.read_column("user")


async def test_the_overview_is_encoded_once(fleet):
    hub = LiveHub(fleet, log=LOG)
    fleet.seen = busy_overview(fleet.now_ns(), workload_id="w-1", currency="")
    body = await hub.read_overview()
    assert body is await hub.read_overview()
    found = json.loads(bytes(body))
    assert [found["today"]["cost"], found["today"]["idle_cost"], found["consumers"][0]["cost"]] == [None, None, None]
    assert [item["severity"] for item in found["attention"]] == ["critical", "critical", "warning", "info"]
    assert found["attention"][1]["since_ms"] is None, "not known since when"
    fleet.seen = busy_overview(fleet.now_ns(), workload_id="w-1")
    assert json.loads(bytes(await hub.read_overview()))["today"]["cost"] == 20.5


def test_cells_that_are_numbered_anew_end_a_column(fleet):
    hub = LiveHub(fleet, log=LOG)
    hub.board.sync_nodes(fleet.state)
    asked = GpuColumn("namespace", hub.board.fleet)
    fleet.happen(NodeJoined(time_ns=1, inventory=inventory(7)))
    hub.board.sync_nodes(fleet.state)
    for record in fleet.state.nodes.values():
        asked.add_node(fleet.state, record, None)
    found = asked.finish()
    assert found["era"] != hub.board.fleet.era, "the page passes it over"
    assert len(found["values"]) == 16


def test_a_page_may_ask_for_few_columns():
    assert {"utilization", "temperature", "idle", "namespace", "user"} == COLUMNS
