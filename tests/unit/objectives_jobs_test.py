"""Training jobs through the whole control loop: limits are tried, set, read back and settled; clocks and agents by hand."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_request
from tests.builders.objectives import build_powered_node, build_training_job, run_objectives
from tests.builders.server import MemoryJournal

from eelgrid_controller.objectives import control_loop
from eelgrid_controller.objectives.power.control_events import LimitPhase
from eelgrid_controller.objectives.services.service_metrics import ScrapeRound
from eelgrid_controller.runtime.scraper import parse_samples
from eelgrid_protos.faults import Unavailable
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    BudgetScope,
    EnergyPrices,
    MeasuredPoint,
    MetricsServer,
    MetricsSource,
    Mobility,
    PowerBudget,
    PricePeriod,
    ProcessSpec,
    WorkloadKind,
)

HZ = 10.0  # units of work a second at the default limit


def standing(world, key="j"):
    return {one.name: one for one in world.control_loop.objectives_status.steering.jobs}[key]


async def ready(world, *requests, nodes=("n1",), **policy):
    await world.join(*(build_powered_node(name) for name in nodes))
    await world.enforce("p", **policy)
    for request in requests:
        await world.loop.submit(request)


class Training:
    """A job that slows by half of what its limit falls below 300 W, and draws what it may."""

    def __init__(self, world, key="j", *, told=True):
        self.world, self.key, self.told = world, key, told
        self.work = 0.0

    def uuids(self):
        return [(one.node_name, uuid) for one in self.world.workload(self.key).placements for uuid in one.gpu_uuids]

    def limits_w(self):
        return [self.world.limit_w(*one) for one in self.uuids()]

    def speed(self):
        lowest = min(self.limits_w())
        return HZ * min(1.0, 1.0 - 0.5 * (300.0 - lowest) / 300.0)

    async def run(self, cycles, *, nodes=("n1",), **samples):
        for _ in range(cycles):
            self.work += 5.0 * self.speed()
            self.world.now_s += 5.0
            self.world.samples(*nodes, power_w=1000.0, **samples)
            if self.told:
                self.world.control_loop.progress(self.key, self.work, int(self.world.now_s * 1e9))
            await self.world.cycle(0.0)


async def test_a_limit_is_searched_set_on_the_gpus_of_the_job_and_settled_on():
    async with run_objectives() as world:
        await ready(world, build_training_job("j"))
        training = Training(world)
        await training.run(2)
        assert standing(world).phase is LimitPhase.SEARCHING
        assert standing(world).limit_w == 400.0
        await training.run(400)
        found = standing(world)
        assert found.phase is LimitPhase.SETTLED
        # A tenth slower is allowed: down to 240 W by the job's own law, and 300 W cost nothing.
        assert 225.0 <= found.limit_w <= 310.0
        assert found.saving > 0.15
        assert found.slowdown <= 0.1
        assert set(training.limits_w()) == {found.limit_w}
        plan = world.loop.core.node_plan("n1")
        assert {one.gpu_uuid for one in plan.gpu_settings} == {uuid for _, uuid in training.uuids()}
        assert world.workload("j").power_limit_w == found.limit_w


async def test_all_gpus_of_a_gang_on_two_nodes_get_the_same_limit():
    async with run_objectives() as world:
        await ready(world, build_training_job("j", replicas=2, gpus=4), nodes=("n1", "n2"))
        training = Training(world)
        await training.run(60, nodes=("n1", "n2"))
        assert {name for name, _ in training.uuids()} == {"n1", "n2"}
        assert world.control_loop.counts.done["limit"] >= 1
        assert len(set(training.limits_w())) == 1
        assert standing(world).limit_w == training.limits_w()[0]


async def test_an_observed_pool_gets_advice_that_waits_until_it_may_be_carried_out():
    async with run_objectives() as world:
        await ready(world, build_training_job("j"))
        await world.enforce()
        training = Training(world)
        await training.run(60)
        assert world.workload("j").power_limit_w is None
        assert world.control_loop.objectives_status.advice == {"j"}
        assert standing(world).target_w < 400.0
        assert standing(world).limit_w == 400.0
        await world.enforce("p")
        await training.run(3)
        assert world.workload("j").power_limit_w < 400.0
        assert standing(world).limit_w == world.workload("j").power_limit_w


async def test_a_pool_that_is_no_longer_enforced_makes_the_job_begin_again_at_what_is_read():
    async with run_objectives() as world:
        await ready(world, build_training_job("j"))
        training = Training(world)
        await training.run(150)
        assert standing(world).limit_w < 400.0
        await world.enforce()
        await training.run(3)
        assert training.limits_w() == [400.0]
        assert standing(world).limit_w == 400.0
        assert world.control_loop.objectives_status.advice == {"j"}


async def test_a_limit_that_the_core_refuses_has_failed_and_is_tried_again(monkeypatch, caplog):
    async with run_objectives() as world:
        await ready(world, build_training_job("j"))
        training, refusals = Training(world), []
        set_limit = world.loop.set_limit

        async def refusing(key, limit_w):
            if len(refusals) < 2:
                refusals.append(limit_w)
                raise Unavailable("the disk is full; try again")
            return await set_limit(key, limit_w)

        monkeypatch.setattr(world.loop, "set_limit", refusing)
        await training.run(150)
        assert len(refusals) == 2
        assert "refused=the disk is full" in caplog.text
        assert world.workload("j").power_limit_w < 400.0


async def test_a_job_without_progress_keeps_its_default_limit():
    async with run_objectives() as world:
        await ready(world, build_training_job("j"))
        await Training(world, told=False).run(150)
        assert standing(world).target_w == 400.0
        assert world.workload("j").power_limit_w in {None, 400.0}


async def test_progress_is_read_from_the_jobs_own_page():
    source = MetricsSource(server=MetricsServer.GENERIC, url="http://{node}:9000/m", work_counter="steps")
    async with run_objectives() as world:
        await ready(world, build_training_job("j", slowdown_most=0.1, metrics=source))
        training = Training(world, told=False)
        for _ in range(80):
            await training.run(1)
            asked = world.pages.asked["j"]
            assert list(asked.urls.values()) == ["http://n1:9000/m"]
            page = parse_samples(f"steps_total {training.work}\n".encode(), asked.names, world.now_s)
            world.pages.rounds["j"] = ScrapeRound(world.now_s, {(0, "http://n1:9000/m"): page})
        assert standing(world).limit_w < 400.0


async def test_a_node_that_refuses_makes_it_stuck_and_not_silent():
    async with run_objectives(confirm_s=20.0) as world:
        await ready(world, build_training_job("j"))
        training, phases = Training(world), set()
        for _ in range(100):
            await training.run(1, limits=400.0, answer=False)
            phases.add(standing(world).phase)
            assert standing(world).limit_w == 400.0
        assert LimitPhase.STUCK in phases


async def test_a_lost_node_and_its_return_are_reported():
    async with run_objectives() as world:
        await ready(world, build_training_job("j"))
        training = Training(world)
        await training.run(150)
        settled_w = standing(world).limit_w
        assert settled_w < 400.0
        await world.loop.command(lambda core, now_ns: core.mark_node_lost("n1", now_ns=now_ns))
        for _ in range(20):
            await world.cycle()
        assert standing(world).phase is LimitPhase.LOST
        await world.join(build_powered_node("n1"))
        world._sequences.clear()
        world.telemetry.open_stream(build_powered_node("n1"), 2)
        await training.run(3)
        assert standing(world).limit_w == settled_w


async def test_a_restart_begins_with_what_is_set_and_what_was_done():
    journal = MemoryJournal()
    async with run_objectives(journal) as world:
        await ready(world, build_training_job("j"))
        training = Training(world)
        await training.run(150)
        settled_w, work, now_s = standing(world).limit_w, training.work, world.now_s
    async with run_objectives(journal, start_s=now_s + 100.0) as again:
        await again.cycle()
        assert again.control_loop.objectives_status.steering.jobs == ()  # nothing was read yet
        training = Training(again)
        training.work = work
        await training.run(1)
        assert standing(again).limit_w == settled_w
        await training.run(400)
        assert standing(again).phase is LimitPhase.SETTLED
        assert standing(again).limit_w <= 310.0
    async with run_objectives(journal, start_s=now_s + 5000.0) as mute:
        held_w = mute.workload("j").power_limit_w
        for _ in range(8):
            await mute.cycle()
        # Agents stay silent: the journal's limit counts as held.
        assert standing(mute).limit_w == held_w


@pytest.mark.parametrize(("read_w", "planned_w"), [(400.0, 200.0), (200.0, 400.0)])
async def test_a_restart_before_a_limit_came_into_force_knows_that_it_will(read_w, planned_w):
    journal = MemoryJournal()
    budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=2400.0)
    async with run_objectives(journal) as world:
        await ready(world, build_training_job("j", gpus=4), budgets=(budget,))
        await world.loop.set_limit("j", planned_w)
    async with run_objectives(journal, start_s=world.now_s + 60.0) as again:
        again.now_s += 5.0
        again.samples("n1", power_w=1000.0, limits=read_w, answer=False)
        await again.cycle(0.0)
        (found,) = again.control_loop.objectives_status.steering.budgets
        assert found.claim_w == 4 * 400.0
        training = Training(again)
        await training.run(3)
        # What it is thought to have is what its GPUs have.
        assert training.limits_w() == [standing(again).limit_w] * 4 == [standing(again).target_w] * 4


async def test_a_job_on_gpus_that_still_have_the_limit_of_another_counts_with_the_default_that_is_restored():
    budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=2400.0)
    async with run_objectives() as world:
        await ready(world, build_training_job("j", gpus=4), budgets=(budget,))
        world.now_s += 5.0
        world.samples("n1", power_w=1000.0, limits=200.0, answer=False)
        await world.cycle(0.0)
        (found,) = world.control_loop.objectives_status.steering.budgets
        assert found.claim_w == 4 * 400.0
        training = Training(world)
        await training.run(3)
        assert training.limits_w() == [standing(world).limit_w] * 4 == [standing(world).target_w] * 4


async def test_a_job_that_moves_begins_again_and_one_that_ends_is_forgotten():
    async with run_objectives() as world:
        await ready(world, build_training_job("j"))
        await Training(world).run(40)
        desk = world.control_loop._desk
        began = desk._jobs._jobs["j"].meter
        await world.loop.mark_gpu_lost("n1", world.workload("j").placements[0].gpu_uuids[0])
        await world.cycle()
        assert desk._jobs._jobs["j"].meter is began
        await world.loop.cancel("j")
        await world.cycle()
        assert world.control_loop.objectives_status.steering.jobs == ()
        assert world.control_loop._progress == {}


async def test_boards_whose_limits_nobody_knows_are_a_reason():
    async with run_objectives() as world:
        boards = build_powered_node("n1", least_w=None, default_w=None)
        strange = tuple(replace(gpu, catalogue_key="") for gpu in boards.gpus)
        await world.join(replace(boards, gpus=strange))
        await world.enforce("p")
        await world.loop.submit(build_training_job("j"))
        await world.cycle()
        assert "add it to the catalogue" in world.control_loop.objectives_status.unsteered["j"]
        (told,) = world.control_loop.promises().jobs
        assert told.phase == "unsteered"


async def test_budgets_are_never_exceeded_and_prices_are_reported():
    budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1000.0)
    prices = EnergyPrices(periods=(PricePeriod(begins_minute=0, price_per_kwh=0.36),))
    async with run_objectives() as world:
        await ready(world, build_training_job("a", gpus=2), build_training_job("b", gpus=2))
        await world.enforce("p", budgets=(budget,), prices=prices)
        one, other = Training(world, "a"), Training(world, "b")
        for _ in range(120):
            one.work += 5.0 * one.speed()
            world.control_loop.progress("a", one.work, int((world.now_s + 4.0) * 1e9))
            await other.run(1)
        (found,) = world.control_loop.objectives_status.steering.budgets
        assert found.name == "cluster"
        assert found.claim_w <= found.room_w
        assert found.shortfall_w == 0.0
        assert 2.0 * sum(limits[0] for limits in (one.limits_w(), other.limits_w())) <= 1000.0
        assert world.control_loop.objectives_status.steering.price_per_j == pytest.approx(1e-7)
        assert world.control_loop._desk._budgets[0].other_w == 0.0
        (told,) = world.control_loop.promises().budgets
        assert (told.budget, told.claimed_w) == (budget, found.claim_w)
        assert {one.workload_id for one in world.control_loop.promises().jobs} == {"a", "b"}


async def test_a_job_waits_for_the_watts_that_another_frees_and_begins_when_its_lower_limit_is_read():
    async with run_objectives() as world:
        await ready(world, build_training_job("a", gpus=2))
        budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1500.0)
        await world.enforce("p", budgets=(budget,))
        await world.loop.submit(build_training_job("c", gpus=2))
        assert world.workload("c").reason == "budget: waits for watts of the cluster"
        training = Training(world, "a")
        for _ in range(300):
            before_w = sum(training.limits_w())
            await training.run(1)
            if world.workload("c").placements:
                break
        assert before_w + 2 * 400.0 <= 1500.0
        assert sum(training.limits_w()) + 2 * 400.0 <= 1500.0
        assert world.workload("c").placements


async def test_all_that_was_measured_in_a_cycle_is_recorded_however_much_it_is(monkeypatch):
    monkeypatch.setattr(control_loop, "POINTS_A_CALL_MOST", 2)
    async with run_objectives() as world:
        points = [
            MeasuredPoint(profile="p", gpu_model="G2", throughput_hz=1.0, power_limit_w=float(limit_w))
            for limit_w in range(100, 105)
        ]
        await world.control_loop._record(points)
        assert len(world.loop.core.state.points["p"]) == len(points)
        assert world.control_loop.counts.done["record"] == 3


async def test_a_job_that_tells_impossible_progress_keeps_nothing_of_others_from_being_recorded():
    async with run_objectives() as world:
        await ready(world, build_training_job("j", profile="own", slowdown_most=0.1), nodes=("n1", "n2"))
        await world.loop.submit(build_training_job("k", profile="other", slowdown_most=0.1))
        training, absurd = Training(world), Training(world, "k", told=False)
        for _ in range(400):
            absurd.work += 1e15 * training.speed()
            world.control_loop.progress("k", absurd.work, int((world.now_s + 5.0) * 1e9))
            await training.run(1, nodes=("n1", "n2"))
        assert world.loop.core.state.points.get("own")
        assert not world.loop.core.state.points.get("other")


async def test_a_job_that_starts_at_a_limit_counts_with_it_before_its_gpus_have_it():
    """Its GPUs still have 400 W while no process runs there; 800 W leave 200 W for each of four."""
    node = replace(build_powered_node("n1"), runs_processes=True, sets_limits=True, limits_before_starts=True)
    job = build_training_job("j", gpus=4)
    process = ProcessSpec(argv=("train",), working_directory="/")
    job = replace(job, spec=replace(job.spec, process=process, mobility=Mobility.FIXED))
    async with run_objectives() as world:
        await world.join(node)
        await world.enforce("p", budgets=(PowerBudget(scope=BudgetScope.CLUSTER, limit_w=800.0),))
        await world.loop.submit(job)
        assert (world.workload("j").power_limit_w, world.workload("j").limit_before_start) == (200.0, True)
        for _ in range(3):
            world.now_s += 5.0
            world.samples("n1", power_w=40.0, limits=400.0)
            await world.cycle(0.0)
        found = standing(world)
        assert (found.limit_w, found.ceiling_w) == (200.0, 200.0)
        (budget,) = world.control_loop.objectives_status.steering.budgets
        assert (budget.claim_w, budget.shortfall_w) == (800.0, 0.0)
        assert standing(world).phase is not LimitPhase.LOST
        # They have started, and the limit was read back.
        status = AttemptStatus(workload_id="j", attempt=1, replica=0, state=AttemptState.RUNNING, started_ns=9)
        await world.loop.command(lambda core, now_ns: core.record_attempts("n1", (status,), now_ns=now_ns))
        training = Training(world)
        await training.run(60)
        assert standing(world).limit_w <= 200.0
        assert standing(world).phase is not LimitPhase.BLIND


async def test_limits_before_starts_are_read_back_of_work_without_a_promise_too():
    """Whoever sets them back, as an agent does that stops: they count as they are in force, and a start waits for that."""
    node = replace(build_powered_node("n1"), runs_processes=True, sets_limits=True, limits_before_starts=True)
    async with run_objectives() as world:
        await world.join(node, build_powered_node("n2"))
        await world.enforce("p", budgets=(PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1500.0),))
        process = ProcessSpec(argv=("train",), working_directory="/")
        spec = {"kind": WorkloadKind.TRAINING_JOB, "process": process, "mobility": Mobility.FIXED}
        await world.loop.submit(build_request("j", gpus=4, **spec))
        limit_w = world.workload("j").power_limit_w
        assert world.workload("j").limit_before_start
        allowance = world.loop.core._chooser.allowance

        async def read(limits):
            world.now_s += 5.0
            world.samples("n1", "n2", power_w=40.0, limits=limits)
            await world.cycle(0.0)
            return allowance.left_w("cluster")

        left_w = await read(400.0)
        status = AttemptStatus(workload_id="j", attempt=1, replica=0, state=AttemptState.RUNNING, started_ns=9)
        await world.loop.command(lambda core, now_ns: core.record_attempts("n1", (status,), now_ns=now_ns))
        assert await read(limit_w) == left_w
        assert await read(400.0) == left_w - 4 * (400.0 - limit_w)
        draws = await world.control_loop._sums.node_draws({}, world.control_loop._read_w)
        assert sum(one.other_w for one in draws) == 1500.0 - allowance.left_w("cluster")
        assert await read(limit_w) == left_w
        world.now_s += 600.0
        await world.cycle(0.0)
        # Nobody reads them any more: nothing starts for these watts, and the limits of other jobs stay.
        assert allowance.left_w("cluster") == left_w - 4 * (400.0 - limit_w)
        draws = await world.control_loop._sums.node_draws({}, world.control_loop._read_w)
        assert sum(one.other_w for one in draws) == 1500.0 - left_w
        await world.loop.command(lambda core, now_ns: core.mark_node_lost("n1", now_ns=now_ns))
        draws = await world.control_loop._sums.node_draws({}, world.control_loop._read_w)
        assert sum(one.other_w for one in draws) == 1500.0 - allowance.left_w("cluster")


async def test_a_gang_counts_with_its_limit_while_only_some_of_its_processes_have_started():
    nodes = [
        replace(build_powered_node(name), runs_processes=True, sets_limits=True, limits_before_starts=True)
        for name in ("n1", "n2")
    ]
    async with run_objectives() as world:
        await world.join(*nodes)
        await world.enforce("p", budgets=(PowerBudget(scope=BudgetScope.CLUSTER, limit_w=2000.0),))
        process = ProcessSpec(argv=("train",), working_directory="/")
        spec = {"kind": WorkloadKind.TRAINING_JOB, "process": process, "mobility": Mobility.FIXED}
        await world.loop.submit(build_request("j", gpus=4, replicas=2, **spec))
        found, allowance = world.workload("j"), world.loop.core._chooser.allowance
        left_w = allowance.left_w("cluster")
        first, second = found.placements
        status = AttemptStatus(workload_id="j", attempt=1, replica=0, state=AttemptState.RUNNING, started_ns=9)
        await world.loop.command(lambda core, now_ns: core.record_attempts(first.node_name, (status,), now_ns=now_ns))
        world.now_s += 5.0
        world.samples(first.node_name, power_w=40.0, limits=found.power_limit_w)
        world.samples(second.node_name, power_w=40.0, limits=400.0)
        await world.cycle(0.0)
        assert allowance.left_w("cluster") == left_w
