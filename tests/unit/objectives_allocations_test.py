"""Divisions of watts beside the turns: budgets hold, answers come early, what fails is asked again."""

import asyncio
import contextlib

from tests.builders.objectives import build_powered_node, build_training_job, run_objectives
from tests.waiting import wait_until

from eelgrid_controller.objectives import control_loop
from eelgrid_controller.objectives.power.control_events import ControlSettings
from eelgrid_protos.messages import BudgetScope, PowerBudget

APART = ControlSettings(divided_inside=0)
TIGHT = (PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1000.0),)


async def ready(world, budgets=TIGHT):
    await world.join(build_powered_node("n1"))
    await world.enforce("p")
    for key in ("a", "b"):
        await world.loop.submit(build_training_job(key, gpus=2))
    await world.enforce("p", budgets=budgets)  # below what runs: begun under it, they would wait


def limits_w(world):
    return {
        key: world.limit_w(one.node_name, one.gpu_uuids[0])
        for key in ("a", "b")
        for one in world.workload(key).placements
    }


async def turns(world, count):
    for _ in range(count):
        world.now_s += 5.0
        world.samples("n1", power_w=1000.0)
        await world.cycle(0.0)
        if (working := world.control_loop._divisions._working) is not None:
            await working


async def test_a_division_that_is_made_apart_brings_jobs_below_their_budget():
    async with run_objectives(steering=APART) as world:
        await ready(world)
        await turns(world, 1)
        assert limits_w(world) == {"a": 400.0, "b": 400.0}  # asked in this turn, heard in the next
        await turns(world, 3)
        assert 2.0 * sum(limits_w(world).values()) <= 1000.0
        (found,) = world.control_loop.objectives_status.steering.budgets
        assert found.claim_w <= found.room_w
        world.control_loop._divisions.stop()


async def test_an_answer_begins_the_next_turn_at_once():
    async with run_objectives(steering=APART, cycle_s=60.0) as world:
        await ready(world)
        world.samples("n1", power_w=1000.0)
        running = asyncio.create_task(world.control_loop.run())
        await wait_until(lambda: sum(limits_w(world).values()) <= 500.0)
        assert world.control_loop.cycles == 2
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_a_division_that_fails_is_reported_and_asked_again(monkeypatch, caplog):
    solved, asked = control_loop.solve_allocation, []

    def fails_once(problem):
        asked.append(problem)
        if len(asked) == 1:
            raise RuntimeError("a fault")
        return solved(problem)

    monkeypatch.setattr(control_loop, "solve_allocation", fails_once)
    async with run_objectives(steering=APART) as world:
        await ready(world)
        await turns(world, 1)
        assert "division=failed number=1" in caplog.text
        await turns(world, 3)
        assert len(asked) >= 2
        assert 2.0 * sum(limits_w(world).values()) <= 1000.0
        world.control_loop._divisions.stop()
