"""Services and jobs that nobody measured where they run, through the whole control loop: planned, told, withdrawn, replaced."""

import asyncio
from dataclasses import replace

import pytest
from tests.builders.objectives import build_powered_node, build_service, build_training_job, run_objectives
from tests.builders.profiles import build_engine_points
from tests.fakes.learners import LearnsHere, family, served, trained
from tests.unit.objectives_jobs_test import Training
from tests.waiting import wait_until

from eelgrid_controller.objectives.power.control_events import LimitPhase


async def settled(world):
    await wait_until(lambda: not world.control_loop._telling.forecasts._mail.is_running, within_s=60.0)


async def begun(world, known, *requests):
    await world.join(build_powered_node("n1"), build_powered_node("n2"))
    await world.enforce("p")
    await world.loop.record_measurements(known)
    for request in requests:
        await world.loop.submit(request)
    await world.cycle()
    await settled(world)
    await world.cycle()


async def rounds(world, count, rate_hz):
    for _ in range(count):
        world.serve("s", rate_hz)
        await world.cycle(15.0)
        await settled(world)


def said(world):
    found = world.control_loop.promises()
    [one] = [*found.services, *found.jobs]
    return one


async def test_a_service_that_was_never_measured_on_its_gpu_is_planned_from_the_prediction_and_says_so():
    async with run_objectives(learner=LearnsHere()) as world:
        await begun(world, family(), build_service("s", replicas_most=8))
        assert world.control_loop.objectives_status.unsteered == {}
        assert "predicted for G2 from 21 points" in said(world).reason
        assert "90 % within" in said(world).reason
        [plan] = world.control_loop._desk._services.service_plans().values()
        mine = {one.configuration.batch: one for one in plan.points if one.configuration.gpu_model == "G2"}
        truth = {one.batch: one for one in served("llm", "G2")}
        assert mine.keys() == truth.keys() == {1, 2, 4}
        for batch, point in mine.items():  # on the safe side of what is true, and not far from it
            assert 0.8 * truth[batch].throughput_hz < point.throughput_hz < 1.02 * truth[batch].throughput_hz
            assert 0.98 < point.latency_s[0.95] / truth[batch].latencies[0].latency_s < 1.2
        await rounds(world, 6, 90.0)
        assert world.replicas("s") >= 3
        await rounds(world, 14, 90.0)
        assert world.replicas("s") >= 3
        assert said(world).phase == "steady"
        assert "predicted for G2" in said(world).reason  # what was served never left the interval
        assert world.control_loop._telling.forecasts.learnings == 1


async def test_without_anything_to_predict_from_the_reason_says_so():
    async with run_objectives(learner=LearnsHere()) as world:
        await begun(world, served("llm", "G3"), build_service("s"))
        assert "no model of its kind of profile is learned yet" in said(world).reason
        assert "run eelctl profile import" in said(world).reason
        more = [point for name in ("a", "b", "c") for point in served(name, "G3")]
        await world.loop.record_measurements(more)
        for _ in range(3):
            await world.cycle()
            await settled(world)
        assert "no profile of its kind was measured on G2" in said(world).reason


async def test_a_prediction_that_is_seen_to_be_wrong_is_withdrawn_and_measured_points_replace_it(caplog):
    flattering = [point for name in ("a", "b", "c") for point in served(name, "G2", slower=0.5)]
    others = [point for name in ("a", "b", "c", "llm") for point in served(name, "G3")]
    async with run_objectives(learner=LearnsHere()) as world:
        await begun(world, [*flattering, *others], build_service("s", replicas=4, replicas_most=8))
        assert "predicted for G2" in said(world).reason
        await rounds(world, 20, 90.0)
        assert "its prediction for G2 is withdrawn" in said(world).reason
        assert "prediction=withdrawn" in caplog.text
        assert caplog.text.count("prediction=withdrawn") == 1
        assert world.replicas("s") >= 3  # what was served is planned with, and not the prediction
        await rounds(world, 25, 90.0)
        assert world.replicas("s") >= 3
        await world.loop.record_measurements(build_engine_points())
        await world.cycle()
        assert said(world).reason.endswith("measured on G2")


async def test_a_learner_that_fails_is_reported_once_and_the_service_waits_for_points(caplog):
    async with run_objectives() as world:
        await begun(world, family(), build_service("s"))
        for _ in range(5):
            await world.cycle()
            await settled(world)
        assert "no model of its kind" in said(world).reason
        assert caplog.text.count("learned=no") == 1
        assert world.control_loop.failures == 0


def jobs_known():
    return [point for name in ("a", "b", "c") for model in ("G2", "G3") for point in trained(name, model)]


async def test_a_job_begins_its_search_with_the_predicted_curve():
    promised = build_training_job("j")
    training = replace(promised.spec.training, profile="llm")
    promised = replace(promised, spec=replace(promised.spec, training=training))
    async with run_objectives(learner=LearnsHere()) as world:
        await begun(world, [*jobs_known(), *trained("llm", "G3")], promised)
        run = Training(world)
        await run.run(2)
        await settled(world)
        await run.run(2)
        search = world.control_loop._desk.steering._jobs.jobs["j"].search
        assert search.foreseen is not None
        assert "predicted from" in said(world).reason
        assert "150 W" not in said(world).reason  # 100 W is the least here
        times = [one.mean for one in search.foreseen.time]
        assert times[0] == 0.0
        assert times == sorted(times)
        law = {400.0: 0.0, 300.0: 0.0, 200.0: 0.182}
        for limit_w, expected in law.items():
            place = search.limits_w.index(limit_w)
            assert times[place] == pytest.approx(expected, abs=0.06)
        await run.run(40)
        assert world.control_loop._desk.steering._jobs.jobs["j"].search.prior == search.foreseen
        await run.run(160)
        standing = world.control_loop.objectives_status.steering.jobs[0]
        assert standing.phase is LimitPhase.SETTLED
        assert standing.slowdown <= 0.1
        assert standing.saving > 0.15


async def test_the_control_loop_ends_its_learner():
    learner = LearnsHere()
    async with run_objectives(learner=learner) as world:
        running = asyncio.create_task(world.control_loop.run())
        await wait_until(lambda: world.control_loop.cycles > 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert learner.closed
