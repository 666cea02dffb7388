"""What jobs would lose under other budgets: asked of the control loop, and nothing changes."""

import pytest
from tests.builders.objectives import build_powered_node, build_training_job, run_objectives
from tests.unit.objectives_jobs_test import Training, ready

from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import BudgetScope, PowerBudget


def cluster(limit_w: float) -> tuple[PowerBudget, ...]:
    return (PowerBudget(scope=BudgetScope.CLUSTER, limit_w=limit_w),)


async def test_a_tighter_budget_costs_speed_and_nothing_changes():
    async with run_objectives() as world:
        # Between what two limits cost, so that the search is sure of both.
        await ready(world, build_training_job("j", slowdown_most=0.15))
        training = Training(world)
        await training.run(400)
        limits, revision = training.limits_w(), world.loop.core.state.revision
        free = await world.control_loop.imagine(())
        (wide,) = free.jobs
        assert (wide.power_limit_w, free.budgets) == (limits[0], ())
        tight = await world.control_loop.imagine(cluster(250.0))
        (narrow,) = tight.jobs
        assert narrow.power_limit_w < wide.power_limit_w
        assert narrow.slowdown > wide.slowdown
        (budget,) = tight.budgets
        # Three idle GPUs of 30 W beside the job's.
        assert budget.claimed_w == pytest.approx(90.0 + narrow.power_limit_w)
        assert budget.claimed_w <= 250.0
        assert (training.limits_w(), world.loop.core.state.revision) == (limits, revision)


async def test_what_cannot_be_kept_is_reported():
    async with run_objectives() as world:
        await ready(world, build_training_job("j", slowdown_most=0.2))
        await Training(world).run(20)
        (budget,) = (await world.control_loop.imagine(cluster(150.0))).budgets
        # 90 W idle and 100 W, the least limit of a board.
        assert budget.shortfall_w == pytest.approx(40.0)


async def test_budgets_of_places_that_jobs_stand_below():
    async with run_objectives() as world:
        await ready(world, build_training_job("j", slowdown_most=0.5), nodes=("n1", "n2"))
        await Training(world).run(20, nodes=("n1", "n2"))
        (place,) = world.workload("j").placements
        other = {"n1": "n2", "n2": "n1"}[place.node_name]
        asked = tuple(
            PowerBudget(scope=BudgetScope.NODE, name=name, limit_w=250.0) for name in (place.node_name, other)
        )
        found = await world.control_loop.imagine(asked)
        assert found.jobs[0].power_limit_w <= 250.0 - 90.0
        claims = {one.budget.name: one.claimed_w for one in found.budgets}
        assert claims[other] == pytest.approx(120.0)
        assert claims[place.node_name] == pytest.approx(90.0 + found.jobs[0].power_limit_w)


async def test_budgets_that_cannot_be():
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"))
        negative = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1.0)
        object.__setattr__(negative, "limit_w", float("nan"))
        with pytest.raises(InvalidArgument, match="do not form a tree"):
            await world.control_loop.imagine((negative,))
