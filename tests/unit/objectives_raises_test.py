"""Raises of power limits beside work that the control loop has not counted yet: they wait until it has."""

from tests.builders.cluster import build_request
from tests.builders.objectives import build_powered_node, build_training_job, run_objectives
from tests.builders.server import MemoryJournal

from eelgrid_protos.messages import BudgetScope, PowerBudget


def cluster_budget(limit_w):
    return PowerBudget(scope=BudgetScope.CLUSTER, limit_w=limit_w)


def drawn_w(world):
    """What all GPUs may draw: held ones by the plans, others 30 W."""
    nodes = world.loop.core.state.nodes
    return sum(
        world.limit_w(name, gpu.uuid) if gpu.uuid in record.gpu_milli else 30.0
        for name, record in nodes.items()
        for gpu in record.inventory.gpus
    )


async def cycle(world, *names, **samples):
    world.now_s += 5.0
    world.samples(*names, power_w=1000.0, **samples)
    await world.cycle(0.0)


async def test_after_a_restart_nothing_is_raised_by_watts_of_jobs_whose_nodes_have_not_reported_yet():
    journal = MemoryJournal()
    async with run_objectives(journal) as world:
        await world.join(build_powered_node("n1"), build_powered_node("n2"))
        await world.enforce("p")
        for key in ("a", "b"):
            await world.loop.submit(build_training_job(key, gpus=4))
        await world.loop.set_limit("b", 200.0)
        await world.enforce("p", budgets=(cluster_budget(2400.0),))
        last, first = (world.workload(key).placements[0].node_name for key in ("a", "b"))
    async with run_objectives(journal, start_s=world.now_s + 60.0) as again:
        for names in (*[(first,)] * 3, *[(first, last)] * 3):
            await cycle(again, *names)
            assert drawn_w(again) <= 2400.0


async def test_nothing_is_raised_by_watts_of_work_that_has_started_since_others_were_summed():
    names = ("n1", "n2", "n3")
    async with run_objectives() as world:
        await world.join(*map(build_powered_node, names))
        await world.enforce("p")
        for key in ("a", "b"):
            await world.loop.submit(build_training_job(key, gpus=4, energy_weight=0.01))
        await world.enforce("p", budgets=(cluster_budget(2500.0),))
        for _ in range(8):
            await cycle(world, *names)
        before_w = world.workload("a").power_limit_w
        await world.loop.cancel("b")
        await world.loop.submit(build_request("c", gpus=2))
        assert world.workload("c").placements
        for _ in range(6):
            await cycle(world, *names)
            assert drawn_w(world) <= 2500.0
        # Once they are summed, the rest is its.
        assert world.workload("a").power_limit_w > before_w


async def test_watts_that_are_read_as_free_are_used_once():
    """By the limit that waited for them, and not by work as well that the same reading lets start."""
    names = ("n1", "n2", "n3", "n4")
    async with run_objectives() as world:
        await world.join(*map(build_powered_node, names))
        await world.enforce("p")
        await world.loop.submit(build_training_job("a", gpus=4, energy_weight=0.01))
        await world.loop.submit(build_training_job("b", gpus=4, energy_weight=0.9))
        await world.loop.set_limit("a", 100.0)
        await world.enforce("p", budgets=(cluster_budget(2200.0),))
        await world.loop.submit(build_request("c", gpus=2))
        assert world.workload("c").reason == "budget: waits for watts of the cluster"
        for _ in range(8):
            await cycle(world, *names)
            assert drawn_w(world) <= 2200.0


async def test_what_starts_on_nodes_that_joined_after_the_budgets_were_set_is_counted_at_once():
    async with run_objectives() as world:
        await world.enforce("p", budgets=(cluster_budget(2500.0),))
        await world.cycle()
        await world.join(build_powered_node("n1"))
        await world.loop.submit(build_request("a", gpus=4))
        risen = await world.control_loop._sums.risen_draws({}, {})
        assert [one.other_w for one in risen] == [1600.0]
