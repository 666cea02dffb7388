"""Elastic jobs of a fleet: which points count, whose GPUs are shared, and what comes first."""

from dataclasses import replace

from eelgrid_controller.objectives.elastic import ElasticJob, ElasticResize, plan_resizes, scaling_curve
from eelgrid_controller.profiles.points import Configuration, Point


def point(gpus: int, rate_hz: float, model: str = "A100", **changes) -> Point:
    return Point("p", Configuration(gpu_model=model, gpus=gpus, **changes), rate_hz, power_w=300.0 * gpus)


SCALES = (point(2, 10.0), point(4, 19.0), point(8, 34.0), point(16, 50.0))
JOB = ElasticJob("a", "A100", gpus=2, replicas=1, least=1, most=8, points=SCALES)


def test_points_of_whole_replicas_on_its_model_at_the_default_limit():
    strange = (
        point(6, 99.0, model="H100"),
        point(3, 99.0),
        point(6, 99.0, power_limit_w=200.0),
        point(32, 99.0),
        point(4, 12.0),
        point(6, 99.0, mig_profile="1g"),
    )
    rates, watts = scaling_curve(replace(JOB, points=(*SCALES, *strange)))
    assert rates == {1: 10.0, 2: 19.0, 4: 34.0, 8: 50.0}
    assert watts == {1: 600.0, 2: 1200.0, 4: 2400.0, 8: 4800.0}


def test_free_gpus_are_used_by_whom_they_help_most():
    flat = ElasticJob("b", "A100", gpus=2, replicas=1, least=1, most=8, points=(point(2, 10.0), point(8, 11.0)))
    assert plan_resizes([JOB, flat], {"A100": 6}) == (ElasticResize("a", 4, "+240 % throughput on 4 replicas"),)


def test_what_shrinks_comes_first():
    big = replace(JOB, name="z", replicas=8, weight=0.1)
    assert [(one.name, one.replicas) for one in plan_resizes([JOB, big], {})] == [("z", 1), ("a", 8)]


def test_stocks_of_models_are_apart():
    other = replace(
        JOB, name="b", gpu_model="H100", points=tuple(point(g, r, "H100") for g, r in ((2, 9.0), (4, 18.0)))
    )
    assert [one.name for one in plan_resizes([JOB, other], {"H100": 2})] == ["b"]


def test_a_job_whose_present_count_was_never_measured_is_left_alone():
    assert plan_resizes([replace(JOB, replicas=3)], {"A100": 64}) == ()
    assert plan_resizes([replace(JOB, points=SCALES[:1])], {"A100": 64}) == ()


def test_a_restart_must_pay():
    assert plan_resizes([replace(JOB, replicas=4, restart_s=1200.0)], {"A100": 8}, horizon_s=3600.0) == (
        ElasticResize("a", 8, "+47 % throughput on 8 replicas"),
    )
    assert plan_resizes([replace(JOB, replicas=4, restart_s=1800.0)], {"A100": 8}, horizon_s=3600.0) == ()
