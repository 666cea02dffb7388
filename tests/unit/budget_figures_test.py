"""What is measured, claimed, over and short of a budget is the same wherever it is shown; a controller in the process."""

from dataclasses import replace

import pytest
from rich.console import Console
from tests.builders.objectives import build_powered_node, run_objectives

from eelgrid_controller.cli.doctor_cluster import check_budgets
from eelgrid_controller.cli.doctor_machine import FindingStatus
from eelgrid_controller.cli.terminal_rendering import TopSnapshot, render_top
from eelgrid_controller.clock import RecentLatencies
from eelgrid_controller.server.grpc.resource_views import ResourceViews
from eelgrid_controller.server.http.live_model import budget_rows
from eelgrid_controller.state.budget_power import BudgetMeter
from eelgrid_protos.messages import Absence, AbsenceReason, BudgetScope, Column, PowerBudget, Reading, SampleBatch

RACK = PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=400.0)
CLUSTER = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=5000.0)


def racked(name, rack, **changes):
    return replace(build_powered_node(name, gpus=2, **changes), topology=("z1", rack))


def report(world, name, *power_w, sequence=1):
    """A node's agent has read its GPUs; None for one that does not answer."""
    absent = tuple(place for place, watts in enumerate(power_w) if watts is None)
    column = Column(
        reading=Reading.POWER_W,
        values=tuple(watts or 0.0 for watts in power_w),
        **({"absences": (Absence(reason=AbsenceReason.NOT_SAMPLED, cells=absent),)} if absent else {}),
    )
    generation = world.loop.core.state.nodes[name].inventory.generation
    batch = SampleBatch(
        sequence=sequence,
        inventory_generation=generation,
        time_ns=(int(world.now_s * 1e9),),
        gpu_columns=(column,),
    )
    world.telemetry.receive_batch(name, batch, now_s=world.now_s)


async def overdrawn(world):
    """A rack of 400 W whose two GPUs, which nobody steers, draw 600 W."""
    await world.join(racked("n1", "r1"), racked("n2", "r2"))
    await world.enforce("p", budgets=(CLUSTER, RACK))
    report(world, "n1", 300.0, 300.0)
    report(world, "n2", 50.0, 60.0)
    await world.cycle(1.0)


async def test_what_nobody_steers_counts_in_what_is_measured_claimed_and_over():
    async with run_objectives() as world:
        await overdrawn(world)
        cluster, rack = world.control_loop.promises().budgets
        assert (rack.budget, rack.measured_w, rack.over_w) == (RACK, 600.0, 200.0)
        assert (rack.measured_gpus, rack.gpus) == (2, 2)
        steered = {one.name: one for one in world.control_loop.objectives_status.steering.budgets}
        assert rack.claimed_w == steered["rack/r1"].claim_w + steered["rack/r1"].other_w > 0.0
        assert (cluster.measured_w, cluster.over_w, cluster.gpus) == (710.0, 0.0, 4)


async def test_top_page_checks_and_summary_show_the_figures_of_promises():
    async with run_objectives() as world:
        await overdrawn(world)
        promised = world.control_loop.promises()
        cluster, rack = promised.budgets
        assert world.control_loop.budgets() == promised.budgets
        views = ResourceViews(
            telemetry=world.telemetry,
            decisions=RecentLatencies(10),
            now_ns=world.clock.now_ns,
            monotonic_s=world.clock.monotonic_s,
        )
        summary = views.summary(world.loop.core)
        assert (summary.measured_power_w, summary.measured_gpus) == (cluster.measured_w, cluster.measured_gpus)
        assert budget_rows(promised.budgets) == [
            ["cluster", 5000.0, 710, 4, 4, round(cluster.claimed_w)],
            ["rack/r1", 400.0, 600, 2, 2, round(rack.claimed_w)],
        ]
        (finding,) = check_budgets(promised.budgets)
        assert finding.status is FindingStatus.FAIL
        assert "600.0 W measured of 400.0 W: 200.0 W over" in finding.what
        console = Console(width=100, no_color=True)
        with console.capture() as drawn:
            seen = TopSnapshot(summary=summary, nodes=(), promises=promised)
            console.print(render_top(seen, "Eelgrid", nodes_most=3, width=100, height=30))
        assert "150 % of 400.0 W, rack r1" in drawn.get()


async def test_a_budget_of_which_nothing_is_read_has_no_sum_and_one_partly_read_says_so():
    async with run_objectives() as world:
        await world.join(racked("n1", "r1"), racked("n2", "r2"))
        await world.enforce("p", budgets=(CLUSTER, RACK))
        (cluster, rack) = world.control_loop.promises().budgets
        assert (rack.measured_w, rack.measured_gpus, rack.gpus, rack.over_w) == (None, 0, 2, 0.0)
        report(world, "n1", 100.0, None)
        (cluster, rack) = world.control_loop.promises().budgets
        assert (rack.measured_w, rack.measured_gpus, rack.gpus) == (100.0, 1, 2)
        assert (cluster.measured_w, cluster.measured_gpus, cluster.gpus) == (100.0, 1, 4)
        world.now_s += 60.0  # a reading of a minute ago is none of now
        assert world.control_loop.promises().budgets[1].measured_w is None


async def test_imagined_budgets_are_measured_too():
    async with run_objectives() as world:
        await overdrawn(world)
        node = PowerBudget(scope=BudgetScope.NODE, name="n1", limit_w=500.0)
        (found,) = (await world.control_loop.imagine((node,))).budgets
        assert (found.measured_w, found.over_w, found.gpus) == (600.0, 100.0, 2)
        assert world.control_loop.promises().budgets[1].measured_w == 600.0


async def test_the_meter_follows_nodes_that_come_go_and_take_anothers_row():
    async with run_objectives() as world:
        meter = BudgetMeter()

        def measured():
            seen = world.telemetry.readings(now_s=world.now_s, now_ns=world.clock.now_ns())
            return meter.measure(world.loop.core.state.policy, world.loop.core.state.nodes, seen)

        assert measured() == {}
        await overdrawn(world)
        assert measured()["rack/r1"] == (600.0, 2, 2)
        await world.loop.remove_node("n1", force=True, is_connected=lambda _: False)
        world.telemetry.forget_node("n1")
        await world.join(racked("n3", "r2"))
        report(world, "n3", 70.0, 80.0)
        assert measured()["rack/r1"] == (None, 0, 0)
        assert measured()["cluster"] == (pytest.approx(260.0), 4, 4)


async def test_a_new_budget_is_claimed_from_in_the_turn_that_it_starts_at_once():
    async with run_objectives() as world:
        await world.join(racked("n1", "r1"))
        await world.cycle()
        assert not world.control_loop._early.is_set()
        await world.enforce("p", budgets=(RACK,))
        assert world.control_loop._early.is_set()
