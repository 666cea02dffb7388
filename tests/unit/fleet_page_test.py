"""What the page tells of pools, staleness, the model's error, waiting work, the plan and the ledger."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.builders.cluster import build_batch, build_node, build_request
from tests.builders.server import run_controller
from tests.waiting import wait_until

from eelgrid_controller.energy.ledger import OTHER_NAMESPACES, ChangedHours, Exporter
from eelgrid_controller.server.metric_collectors import LedgerMetrics, waiting_by_reason
from eelgrid_controller.server.metrics.catalogue import PENDING_REASONS, PLAN_CHANGES
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.messages import (
    AttributionConfidence,
    AttributionMethod,
    EnergyAcknowledgement,
    EnergyOwner,
    EnergyPart,
    EnergyWindow,
    OwnerKind,
    ReasonCount,
    Summary,
    WindowDevice,
    WindowShare,
)

SECOND = 1_000_000_000


def values(text, name):
    """By the values of its labels, in the order of their names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for one in text_string_to_metric_families(text)
        for sample in one.samples
        if sample.name == name
    }


async def page_of(rig):
    return (await rig.controller.metrics.render_page()).decode()


async def test_a_fleet_is_reported_by_pool_with_its_stale_nodes_and_the_models_error(tmp_path):
    async with run_controller(tmp_path) as rig:
        now_ns = rig.controller._clock.now_ns
        first = await rig.join(build_node("n1", pool="a"))
        second = await rig.join(build_node("n2", gpus=4, pool="b"))
        await rig.join(build_node("n3", pool="b"))
        text = await page_of(rig)
        assert values(text, "eelgrid_stale_nodes") == {(): 3.0}
        assert "eelgrid_oldest_sample_age_seconds " not in text, "nothing came yet"
        await first.say(build_batch(1, time_ns=now_ns()))
        await second.say(build_batch(1, gpus=4, time_ns=now_ns() - 10 * SECOND))
        telemetry = rig.controller.agents._telemetry
        await wait_until(lambda: telemetry.received == 2)
        await rig.operators.submit_workload(build_request("w1"))
        text = await page_of(rig)
        assert values(text, "eelgrid_pool_power_watts") == {("a",): 100.0, ("b",): 200.0}
        assert values(text, "eelgrid_stale_nodes") == {(): 1.0}
        assert 10.0 <= values(text, "eelgrid_oldest_sample_age_seconds")[()] < 20.0
        # One of the six measured boards (or of the two that are not) is held: all others idle.
        (place,) = rig.controller.loop.core.state.workloads["w1"].placements
        held = int(place.node_name != "n3")
        modelled_w = 6 * 30.0 + held * 120.0
        assert values(text, "eelgrid_model_power_error_ratio") == {("G2",): pytest.approx(300.0 / modelled_w - 1.0)}
        # What a limit of ours saves is no error of the model.
        await rig.controller.loop.set_limit("w1", 100.0)
        left = {"n1": 4, "n2": 2}.get(place.node_name, 6)
        text = await page_of(rig)
        assert values(text, "eelgrid_model_power_error_ratio") == {
            ("G2",): pytest.approx(left * 50.0 / (left * 30.0) - 1.0)
        }


async def test_what_waits_is_counted_by_constraint_and_the_plan_by_change(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        for key in ("w1", "w2", "w3", "w4"):
            await rig.operators.submit_workload(build_request(key))
        text = await page_of(rig)
        waiting = values(text, "eelgrid_pending_workloads")
        assert waiting["gpu_count",] == 2.0
        assert sum(waiting.values()) == 2.0
        assert {reason for (reason,) in waiting} == set(PENDING_REASONS)
        changes = values(text, "eelgrid_plan_changes_total")
        assert {change for (change,) in changes} == set(PLAN_CHANGES)
        assert (changes["placed",], changes["deferred",], changes["cancelled",]) == (2.0, 2.0, 0.0)
        assert "eelgrid_fragmentation_ratio " not in text, "no GPU is free"
        await rig.controller.loop.cancel("w1")
        await rig.controller.loop.cancel("w4")
        text = await page_of(rig)
        changes = values(text, "eelgrid_plan_changes_total")
        assert (changes["placed",], changes["cancelled",]) == (3.0, 2.0)


async def test_free_gpu_that_no_expected_task_can_use_is_fragmented(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        await rig.operators.submit_workload(build_request("half", milli=500))
        text = await page_of(rig)
        assert values(text, "eelgrid_fragmentation_ratio") == {(): 0.0}
        for number in range(9):
            await rig.operators.submit_workload(build_request(f"whole{number}"))
        # Of 500 milli that are left nine of ten expected tasks can use nothing.
        assert values(await page_of(rig), "eelgrid_fragmentation_ratio")[()] == pytest.approx(0.9, abs=0.05)


def test_reasons_are_a_bounded_set_that_adds_up_to_all_that_wait():
    listed = (
        ReasonCount(reason="cpu: nodes lack CPU", workloads=3),
        ReasonCount(reason="budget: waits for watts of node n1", workloads=2),
        ReasonCount(reason="budget: waits for watts of node n2", workloads=2),
        ReasonCount(reason="of a newer version: whatever", workloads=1),
    )
    found = waiting_by_reason(Summary(time_ns=1, pending=10, pending_reasons=listed))
    assert {reason: count for reason, count in found.items() if count} == {
        "cpu": 3.0,
        "budget": 4.0,
        OTHER_NAMESPACES: 3.0,
    }
    assert set(found) == set(PENDING_REASONS)


def test_every_node_is_read_with_its_age_and_its_fresh_power():
    telemetry = Telemetry(send_interval_s=5.0)
    for name in ("n1", "n2"):
        telemetry.open_stream(build_node(name), 1)
    telemetry.receive_batch("n1", build_batch(1, time_ns=SECOND), now_s=1.0)
    seen = telemetry.readings(now_s=3.0, now_ns=3 * SECOND)
    assert (seen.names, seen.models) == (["n1", "n2"], ["G2"])
    assert seen.age_s.tolist() == [2.0, pytest.approx(float("nan"), nan_ok=True)]
    assert (seen.row.tolist(), seen.model.tolist(), seen.power_w.tolist(), seen.gpus.tolist()) == (
        [0],
        [0],
        [100.0],
        [2],
    )
    seen = telemetry.readings(now_s=99.0, now_ns=99 * SECOND)
    assert (seen.age_s[0], len(seen.row)) == (98.0, 0)


async def test_a_command_that_waits_for_the_disk_has_an_age(tmp_path):
    async with run_controller(tmp_path) as rig:
        loop = rig.controller.loop
        assert loop.lag_s == 0.0
        waits = asyncio.create_task(loop.cancel("none"))
        await asyncio.sleep(0)
        assert loop.queued == 1
        await asyncio.sleep(0.0)
        assert loop.lag_s >= 0.0
        with pytest.raises(Exception, match="no workload"):
            await waits
        assert loop.lag_s == 0.0


async def test_what_an_agent_sent_is_reported_when_it_is_in_the_ledger(tmp_path):
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node("n1"))
        end_ns = rig.controller._clock.now_ns() - 5 * SECOND
        charged = {
            "device": 0,
            "part": EnergyPart.ACTIVE,
            "method": AttributionMethod.EXCLUSIVE,
            "confidence": AttributionConfidence.HIGH,
        }
        window = EnergyWindow(
            incarnation=1,
            number=1,
            begin_ns=end_ns - SECOND,
            end_ns=end_ns,
            devices=(WindowDevice(gpu_uuid="GPU-n1-0", total_mj=4000),),
            owners=(EnergyOwner(kind=OwnerKind.POD, namespace="ml", pod="p"), EnergyOwner(kind=OwnerKind.UNALLOCATED)),
            shares=(WindowShare(owner=0, energy_mj=3000, **charged), WindowShare(owner=1, energy_mj=1000, **charged)),
        )
        await wait_until(lambda: rig.controller.energy._desk._store is not None)
        await agent.say(window)
        await agent.hear(EnergyAcknowledgement)
        text = await page_of(rig)
        assert values(text, "eelgrid_ledger_energy_joules_total") == {("ml",): 3.0, ("(unallocated)",): 1.0}
        assert 5.0 <= values(text, "eelgrid_ledger_newest_window_age_seconds")[()] < 60.0
        others = dict.fromkeys([("again",), ("dropped",), ("refused",), ("unplaced",)], 0.0)
        assert values(text, "eelgrid_ledger_windows_total") == {("taken",): 1.0, **others}
        assert values(text, "eelgrid_ledger_damaged_parts") == {(): 0.0}
        assert values(text, "eelgrid_clock_jumps_total") == {(): 0.0}
        assert values(text, "eelgrid_ledger_failures_total") == {(): 0.0}


def told(page):
    return {
        one.name: {tuple(sample.labels.values()): sample.value for sample in one.samples} for one in page.families()
    }


def test_the_ledger_reports_windows_age_and_joules_by_namespace():
    marks = {"a": Exporter("a", 0, 30), "b": Exporter("b", 0, 69, ChangedHours(2, 0, 3600, 20))}
    counts = SimpleNamespace(
        windows=12,
        again=2,
        dropped=1,
        refused=2,
        unplaced=3,
        damaged_parts=6,
        failures=3,
        newest_ns=None,
        joules_by_namespace=dict,
        exporters={},
        forgotten={"age": 4, "size": 0},
        used_bytes=None,
        bytes_most=100,
    )
    page = LedgerMetrics(counts, now_ns=lambda: 70 * SECOND)
    assert not {"eelgrid_ledger_newest_window_age_seconds", "eelgrid_ledger_size_bytes"} & told(page).keys()
    assert told(page)["eelgrid_ledger_export_lag_seconds"] == {}
    counts.exporters, counts.used_bytes = marks, 42
    counts.newest_ns, counts.joules_by_namespace = 60 * SECOND, lambda: {"a": 2.0, "(none)": 0.25}
    families = told(page)
    others = {("again",): 2.0, ("dropped",): 1.0, ("refused",): 2.0, ("unplaced",): 3.0}
    assert families["eelgrid_ledger_windows"] == {("taken",): 4.0, **others}
    assert families["eelgrid_ledger_damaged_parts"] == {(): 6.0}
    assert families["eelgrid_ledger_failures"] == {(): 3.0}
    assert families["eelgrid_ledger_newest_window_age_seconds"] == {(): 10.0}
    assert families["eelgrid_ledger_energy_joules"] == {("a",): 2.0, ("(none)",): 0.25}
    assert families["eelgrid_ledger_export_lag_seconds"] == {("a",): 40.0, ("b",): 50.0}
    assert families["eelgrid_ledger_export_changes"] == {("a",): 0.0, ("b",): 2.0}
    assert families["eelgrid_ledger_forgotten_rows"] == {("age",): 4.0, ("size",): 0.0}
    assert families["eelgrid_ledger_size_bytes"] == {(): 42.0}
    assert families["eelgrid_ledger_size_limit_bytes"] == {(): 100.0}
