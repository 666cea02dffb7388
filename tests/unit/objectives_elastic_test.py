"""Elastic jobs and what jobs teach, through the whole control loop; clocks and agents by hand."""

from tests.builders.objectives import build_powered_node, build_training_job, run_objectives
from tests.unit.objectives_jobs_test import Training, ready

from eelgrid_controller.objectives.promises import related_curves
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.state.measurements import make_job_profile_name
from eelgrid_protos.messages import MeasuredPoint


def scales(profile="p", rates=((1, 10.0), (2, 19.0), (4, 35.0))):
    """Throughput by GPUs."""
    return [MeasuredPoint(profile=profile, gpu_model="G2", gpus=gpus, throughput_hz=rate) for gpus, rate in rates]


def elastic(key, replicas=1, **promise):
    fields = {"energy_weight": 0.0, "profile": "p", "replicas_least": 1, "replicas_most": 4, "restart_s": 30.0}
    return build_training_job(key, replicas=replicas, **(fields | promise))


async def test_a_job_grows_into_free_gpus_once_it_pays_and_shrinks_for_nobody_who_gains_less():
    async with run_objectives(elastic_s=60.0, others_s=5.0) as world:
        await world.loop.record_measurements(scales())
        await ready(world, elastic("a", restart_s=5.0))
        await world.cycle(30.0)
        assert world.replicas("a") == 1, "it has not run for long enough"
        await world.cycle(40.0)
        assert world.replicas("a") == 4
        await world.cycle(10.0)
        assert world.replicas("a") == 4


async def test_a_restart_that_costs_more_than_it_brings_is_left_alone():
    async with run_objectives(elastic_s=60.0, others_s=5.0) as world:
        await world.loop.record_measurements(scales(rates=((1, 10.0), (2, 12.0))))
        await ready(world, elastic("a", restart_s=30.0))
        for _ in range(5):
            await world.cycle(60.0)
        assert world.replicas("a") == 1


async def test_nobody_grows_while_work_waits_or_where_pools_are_observed():
    async with run_objectives(elastic_s=60.0, others_s=5.0) as world:
        await world.loop.record_measurements(scales())
        await ready(world, elastic("a", restart_s=5.0), build_training_job("wide", replicas=1, gpus=4))
        await world.cycle(70.0)
        assert world.replicas("a") == 1
        await world.loop.cancel("wide")
        await world.enforce()
        await world.cycle(70.0)
        assert world.replicas("a") == 1
        await world.enforce("p")
        await world.cycle(70.0)
        assert world.replicas("a") == 4


async def test_what_a_job_did_at_each_limit_is_kept_for_the_next_of_its_profile():
    async with run_objectives() as world:
        await ready(world, build_training_job("j", slowdown_most=0.2, profile="p"))
        training = Training(world)
        await training.run(120)
        points = world.loop.core.state.points["p"]
        limits = {point.configuration.power_limit_w for point in points}
        assert len(limits) >= 2
        for point in points:
            assert point.source.startswith("telemetry")
            speed = min(1.0, 1.0 - 0.5 * (300.0 - point.configuration.power_limit_w) / 300.0)
            assert abs(point.throughput_hz / (10.0 * speed) - 1.0) < 0.02
        assert related_curves(points, "G2"), "they make a curve"
        events = world.loop.core.state.revision
        await training.run(12)
        assert world.loop.core.state.revision - events <= 2, "points are told seldom"


async def test_a_job_without_a_profile_teaches_nobody():
    async with run_objectives() as world:
        await ready(world, build_training_job("j", slowdown_most=0.2))
        await Training(world).run(60)
        assert set(world.loop.core.state.points) <= {make_job_profile_name("j")}


def test_points_that_were_told_are_those_that_curves_are_made_of():
    at = [
        Point("p", Configuration("G2", gpus=1, power_limit_w=w), r, power_w=w) for w, r in ((400.0, 10.0), (200.0, 8.0))
    ]
    (curve,) = related_curves(at, "G2")
    assert curve.limits_w == (200.0, 400.0)


async def test_a_node_that_may_not_be_changed_offers_nothing():
    async with run_objectives(elastic_s=60.0, others_s=5.0) as world:
        await world.loop.record_measurements(scales())
        await world.join(build_powered_node("other", pool="q", gpus=4))
        await ready(world, elastic("a", restart_s=5.0), build_training_job("b", gpus=1), nodes=("n1",))
        await world.cycle(70.0)
        here = {placement.node_name for placement in world.workload("a").placements}
        assert world.replicas("a") == 2, "three GPUs are left in the pool, and three were never measured"
        assert here <= {"n1", "other"}
