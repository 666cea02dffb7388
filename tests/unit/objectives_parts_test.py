"""The small parts around the control loop: its clock, its numbers, what it reads of a node."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_node, build_request
from tests.builders.objectives import build_powered_node, build_training_job, run_objectives

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.objectives.control_loop import MonotonicUnixClock
from eelgrid_controller.objectives.observation import ObjectiveSettings, node_readings, unmanaged_draw
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos import catalogue
from eelgrid_protos.messages import BudgetScope, PowerBudget


def test_unix_time_never_goes_back_and_follows_a_clock_that_was_set_right():
    wall_s, mono_s = [1000.0], [50.0]
    steady = MonotonicUnixClock(Clock(lambda: int(wall_s[0] * 1e9), lambda: mono_s[0]))
    assert steady.now_s() == 1000.0
    wall_s[0], mono_s[0] = 400.0, 60.0
    assert steady.now_s() == 1010.0
    wall_s[0], mono_s[0] = 5000.0, 70.0
    assert steady.now_s() == 5000.0
    wall_s[0], mono_s[0] = 4990.0, 80.0
    assert steady.now_s() == 5010.0


@pytest.mark.parametrize(
    "changes", [{"cycle_s": 0.0}, {"scrape_s": -1.0}, {"window_s": 1e9}, {"cool_s": -1.0}, {"stale_rounds": 0}]
)
def test_numbers_that_no_control_loop_can_run_with_are_refused(changes):
    with pytest.raises(ControllerConfigError):
        ObjectiveSettings(**changes)


async def test_what_others_may_draw_is_their_limit_and_idle_gpus_their_idle_watts():
    known = catalogue.load_catalogue()
    idle_w = known.products["openb-g2"].idle_w
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"))
        assert unmanaged_draw(world.loop.core, "n1", {}, known).other_w == pytest.approx(4 * idle_w)
        await world.loop.submit(build_training_job("steered"))
        await world.loop.submit(build_request("other", gpus=1))
        assert unmanaged_draw(world.loop.core, "n1", {}, known).other_w == pytest.approx(2 * idle_w + 400.0)
        assert unmanaged_draw(world.loop.core, "n1", {"steered": "why"}, known).other_w == pytest.approx(
            2 * idle_w + 800.0
        )
        await world.loop.set_limit("other", 250.0)
        assert unmanaged_draw(world.loop.core, "n1", {}, known).other_w == pytest.approx(2 * idle_w + 250.0)
        idle = next(
            gpu.uuid
            for gpu in build_powered_node("n1").gpus
            if not list(world.loop.core.state.nodes["n1"].holders(gpu.uuid))
        )
        await world.loop.mark_gpu_lost("n1", idle)
        assert unmanaged_draw(world.loop.core, "n1", {}, known).other_w == pytest.approx(idle_w + 250.0)


async def test_where_nothing_is_steered_budgets_claim_what_they_admit():
    """One sum of what GPUs may draw: held, under a limit, used by work outside, idle, and unknown to the catalogue."""
    known = catalogue.load_catalogue()
    unknown = build_node("n2", gpus=2)
    gpus = tuple(replace(gpu, product="Nobody", model="X", catalogue_key="") for gpu in unknown.gpus)
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"), replace(unknown, gpus=gpus))
        await world.enforce("p", budgets=(PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1e5),))
        await world.loop.submit(build_request("held", gpus=1, models=("G2",)))
        await world.loop.submit(build_request("other", gpus=1, models=("X",)))
        used = next(
            gpu.index
            for gpu in build_powered_node("n1").gpus
            if not list(world.loop.core.state.nodes["n1"].holders(gpu.uuid))
        )
        await world.loop.update_external_usage("n1", ExternalUsage(gpu_count=1, gpu_indexes=(used,)))
        for name in ("n1", "n2"):
            admitted = world.loop.core._chooser.allowance.find_share(name).milliwatts
            assert unmanaged_draw(world.loop.core, name, {}, known).other_w == admitted / 1000.0
        assert world.loop.core._chooser.allowance.find_share("n1").milliwatts > 800_000


async def test_a_look_holds_what_is_fresh_and_nothing_else():
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"))
        inventory = world.loop.core.state.nodes["n1"].inventory

        def look(later_s=0.0):
            now_s = world.now_s + later_s
            return node_readings(world.telemetry, inventory, now_s=now_s, now_ns=int(now_s * 1e9))

        assert look() == ({}, {}, None, None)
        world.samples("n1")
        seen = look(1.0)
        assert set(seen.gpus) == set(seen.limits_w) == {gpu.uuid for gpu in inventory.gpus}
        assert seen.age_s == pytest.approx(1.0)
        assert next(iter(seen.gpus.values())) == (pytest.approx(world.now_s), 1000.0, 400.0)
        old = look(100.0)
        assert (old.gpus, old.limits_w, old.age_s) == ({}, {}, None)
        assert old.applied is not None
