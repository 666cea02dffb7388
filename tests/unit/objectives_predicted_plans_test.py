"""When a prediction is planned with, and when it is withdrawn; forecasts by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.builders.objectives import build_service, build_training_job
from tests.builders.profiles import build_engine_points

from eelgrid_controller.objectives.forecasts import (
    ConservativePoint,
    JobQuestion,
    LimitCurve,
    ProfileForecast,
    ServiceQuestion,
)
from eelgrid_controller.objectives.job_history import former_curve
from eelgrid_controller.objectives.power.control_events import ServiceControlStatus
from eelgrid_controller.objectives.power.estimates import RUNS_DIFFER, MeasurementWindow
from eelgrid_controller.objectives.predicted_plans import CURVE_POINTS, OUTSIDE_WINDOWS, PredictedPlans
from eelgrid_controller.objectives.services.autoscaler import ScalerPhase
from eelgrid_controller.profiles.points import Configuration, EstimateBasis, LogRatio, Point, ProfileEstimate
from eelgrid_controller.state.measurements import make_profile_point
from eelgrid_protos.messages import LatencyMetric, LatencyObjective, Workload, WorkloadPhase

ELSEWHERE = tuple(make_profile_point(one) for one in build_engine_points(model="G3"))
HERE = tuple(make_profile_point(one) for one in build_engine_points())
LIMITS_W = (400.0, 300.0, 200.0)


def spread(median, factor=1.25):
    return ProfileEstimate(median, median / factor, median * factor, EstimateBasis.INTERPOLATED)


def safe(batch, hz=1000.0, factor=1.25):
    how = Configuration("G2", batch=batch)
    rate, latency = spread(hz * batch, factor), spread(0.01 * batch, factor)
    return ConservativePoint(
        Point("llm", how, rate.lower, {0.95: latency.upper}, source="predicted"), rate, {0.95: latency}
    )


class Answers:
    """Forecasts that a test sets."""

    def __init__(self, answer=None):
        self.answer = answer
        self.asked = []

    def request_forecast(self, question):
        self.asked.append(question)
        return self.answer


def workload(request, **changes):
    return replace(Workload(workload_id="s", spec=request.spec, phase=WorkloadPhase.PLACED), **changes)


def of_service(answer, known=ELSEWHERE, **changes):
    foreseen = PredictedPlans(Answers(answer))
    return foreseen, foreseen.plan_service("s", workload(build_service("s"), **changes), ["G2"], known)


WHOLE = ProfileForecast((safe(1), safe(2), safe(4)), learned_from=40)


def test_points_that_are_there_are_planned_with_and_nothing_is_asked():
    foreseen, plan = of_service(WHOLE, HERE)
    assert (plan.points, plan.basis, plan.in_use) == (HERE, "measured on G2", None)
    assert foreseen.forecasts.asked == []


def test_a_curve_of_few_points_is_filled_up_and_says_both():
    foreseen, plan = of_service(ProfileForecast((safe(2), safe(4)), learned_from=40), HERE[:1])
    assert plan.points == (*HERE[:1], safe(2).point, safe(4).point)
    assert plan.basis.startswith(
        "measured on G2, and predicted for G2 from 40 points: 4,000/s, 90 % within 3,200 to 5,000"
    )
    assert plan.in_use == ServiceQuestion("llm", "G2", 1, None)
    assert CURVE_POINTS == 3
    assert foreseen.forecasts.asked == [plan.in_use]


def test_a_promise_on_responses_needs_one_point():
    request = build_service("s")
    objective = LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=0.05)
    promise = replace(request.spec.service, objectives=(objective,))
    foreseen = PredictedPlans(Answers(WHOLE))
    asked = workload(request, spec=replace(request.spec, service=promise))
    assert foreseen.plan_service("s", asked, ["G2"], HERE[:1]).basis == "measured on G2"
    assert foreseen.plan_service("s", asked, ["G2"], ELSEWHERE).in_use is not None


@pytest.mark.parametrize(
    ("answer", "words"), [(None, "is being made"), (ProfileForecast(why_none="nobody was there"), "nobody was there")]
)
def test_without_an_answer_there_is_the_reason(answer, words):
    _, plan = of_service(answer)
    assert words in plan.why_none
    assert (plan.points, plan.basis, plan.in_use) == (ELSEWHERE, "", None)


def test_a_profile_without_points_and_a_share_of_a_gpu_are_not_predicted():
    foreseen, plan = of_service(WHOLE, ())
    assert plan.points == ()
    part = build_service("s")
    part = workload(part, spec=replace(part.spec, request=replace(part.spec.request, gpu_milli=500)))
    assert foreseen.plan_service("s", part, ["G2"], ELSEWHERE).points == ELSEWHERE
    assert foreseen.forecasts.asked == []


def test_the_limit_that_it_runs_at_is_asked_for():
    foreseen, _ = of_service(WHOLE, power_limit_w=250.0)
    assert foreseen.forecasts.asked == [ServiceQuestion("llm", "G2", 1, 250.0)]


def standing(at_s, factor, error=0.05):
    return ServiceControlStatus("s", at_s, None, None, factor, error, False, ScalerPhase.STEADY, 1, 1, "")


@given(st.lists(st.sampled_from([0.3, 0.8, 1.0, 1.04, 1.5]), max_size=40))
@example([0.3] * 8)
def test_withdrawn_exactly_when_enough_windows_in_a_row_lie_outside(factors):
    """The interval is a factor of 1.25 either way, so that slowness may be 0.64 to 1 of the safe side."""
    foreseen, plan = of_service(WHOLE)
    assert plan.fastest == pytest.approx(0.64)
    run, first = 0, None
    for at, factor in enumerate(factors):
        run = run + 1 if factor in (0.3, 1.5) else 0
        first = at if first is None and run == OUTSIDE_WINDOWS else first
        said = foreseen.check_services([standing(float(at), factor)], {"s": plan})
        assert bool(said) == (first == at)
        if said:
            again = foreseen.plan_service("s", workload(build_service("s")), ["G2"], ELSEWHERE)
            assert again.in_use is None
            assert "is withdrawn" in again.basis
            scaled = [one for one in again.points if one.configuration.gpu_model == "G2"]
            assert [one.throughput_hz for one in scaled] == pytest.approx(
                [one.point.throughput_hz / factor for one in WHOLE.points]
            )
            assert [one.latency_s[0.95] for one in scaled] == pytest.approx(
                [one.point.latency_s[0.95] * factor for one in WHOLE.points]
            )


def test_one_window_counts_once_and_one_inside_begins_the_count_again():
    foreseen, plan = of_service(WHOLE)
    for _ in range(3 * OUTSIDE_WINDOWS):
        assert foreseen.check_services([standing(1.0, 2.0)], {"s": plan}) == []
    for at in range(2, 5 * OUTSIDE_WINDOWS):
        assert foreseen.check_services([standing(float(at), 2.0 if at % OUTSIDE_WINDOWS else 0.9)], {"s": plan}) == []


def test_a_factor_that_is_unsure_is_no_witness():
    foreseen, plan = of_service(WHOLE)
    for at in range(3 * OUTSIDE_WINDOWS):
        assert foreseen.check_services([standing(float(at), 1.4, error=0.4)], {"s": plan}) == []


QUESTION = JobQuestion("llm", "G2", 1, LIMITS_W)
BEND = ProfileForecast(
    bend=LimitCurve(
        (LogRatio(0.0, 0.0), LogRatio(0.02, 0.03), LogRatio(0.2, 0.05)),
        (LogRatio(0.0, 0.0), LogRatio(-0.1, 0.03), LogRatio(-0.3, 0.05)),
    ),
    learned_from=30,
)


def window(limit_w, slower=1.0):
    return MeasurementWindow(limit_w, 10.0, 30.0 * slower, 1000.0)


def test_a_job_gets_its_prior_once_and_again_when_it_begins_again():
    foreseen = PredictedPlans(Answers(BEND))
    prior = foreseen.predict_job("j", QUESTION, ())
    assert prior.time[2].mean == 0.2
    assert prior.time[2].scatter == pytest.approx(0.0363, abs=1e-3)  # half over 1.645, and 2 % of any two runs
    assert foreseen.predict_job("j", QUESTION, ()) is None
    assert "200 W costs +22.1 % of time, 90 % within +16.2 % to +28.4 %" in foreseen.job_bases()["j"]
    assert foreseen.predict_job("j", QUESTION, (), is_new=True) is not None
    foreseen.retain((), ())
    assert foreseen.job_bases() == {}


def test_a_job_whose_curve_was_measured_is_told_nothing():
    own = [Point("llm", Configuration("G2", power_limit_w=limit_w), 1.0, power_w=100.0) for limit_w in LIMITS_W]
    foreseen = PredictedPlans(Answers(BEND))
    assert foreseen.predict_job("j", QUESTION, own) is None
    assert foreseen.job_bases() == {"j": "its curve was measured before"}
    assert build_training_job("j").spec.training.profile == ""
    assert foreseen.predict_job("k", QUESTION._replace(profile=""), ()) is None


def run_points(*throughputs_hz, when="2026-11-29T01:00:00Z", power_w=200.0):
    """Points of a run, the largest limit first; None for a limit that was not measured."""
    return [
        Point(
            "llm",
            Configuration("G2", power_limit_w=limit_w),
            hz,
            power_w=power_w,
            source=f"telemetry of {when}, 9 windows, errors {0.0 if limit_w == LIMITS_W[0] else 0.5} % and 0.4 %",
        )
        for limit_w, hz in zip(LIMITS_W, throughputs_hz, strict=True)
        if hz is not None
    ]


def test_a_job_begins_with_what_former_runs_of_its_profile_measured():
    foreseen = PredictedPlans(Answers(BEND))
    prior = foreseen.predict_job("j", QUESTION, run_points(10.0, 9.9, 8.0))
    assert prior.is_measured
    assert [one.mean for one in prior.time] == pytest.approx([0.0, math.log(10.0 / 9.9), math.log(10.0 / 8.0)])
    assert prior.time[2].scatter == pytest.approx(math.hypot(0.005, RUNS_DIFFER))
    assert prior.energy[2].scatter == pytest.approx(math.hypot(0.004, 0.004, RUNS_DIFFER))
    assert foreseen.forecasts.asked == []
    assert foreseen.job_bases() == {
        "j": "measured on former runs: 200 W costs +25.0 % of time, 90 % within +24.0 % to +26.0 %"
    }
    assert foreseen.predict_job("j", QUESTION, run_points(10.0, 9.9, 8.0)) is None, "its own windows are among them"
    assert foreseen.predict_job("j", QUESTION, run_points(10.0, 9.9, 8.0), is_new=True).is_measured


def test_a_job_that_goes_on_is_told_nothing_that_its_own_windows_have_told_already():
    foreseen = PredictedPlans(Answers(BEND))
    assert foreseen.predict_job("j", QUESTION, run_points(10.0, 9.9, 8.0), is_new=True, is_resumed=True) is None
    assert "goes on" in foreseen.job_bases()["j"]


def test_a_job_that_differs_from_former_runs_is_reported_so():
    foreseen = PredictedPlans(Answers(BEND))
    prior = foreseen.predict_job("j", QUESTION, run_points(10.0, None, 8.0))
    assert prior.time[1] is None
    assert foreseen.check_job_window("j", window(400.0)) is None
    assert all(foreseen.check_job_window("j", window(300.0, 2.0)) is None for _ in range(20)), "nothing was measured"
    assert all(foreseen.check_job_window("j", window(200.0, 1.27)) is None for _ in range(20))
    said = [foreseen.check_job_window("j", window(200.0, 1.4)) for _ in range(OUTSIDE_WINDOWS)]
    assert said[-1] == "prediction=withdrawn limit_w=200"
    assert said[:-1] == [None] * (OUTSIDE_WINDOWS - 1)


def test_points_of_two_runs_make_no_curve():
    older, newer = run_points(10.0, 9.9, 8.0), run_points(12.0, 11.9, None, when="2026-11-29T02:00:00Z")
    curve = former_curve([*newer, older[2]], QUESTION)
    assert [one is not None for one in curve.time] == [True, True, False]
    assert former_curve([newer[0], *older[1:]], QUESTION) is None
    assert former_curve(older[1:], QUESTION) is None, "the largest limit is missing"
    for strange in (QUESTION._replace(gpus=2), QUESTION._replace(gpu_model="G3"), QUESTION._replace(limits_w=(1.0,))):
        assert former_curve(older, strange) is None
    by_hand = [replace(one, source="telemetry, 9 windows") for one in older]
    assert former_curve(by_hand, QUESTION) is None
    assert former_curve([replace(one, power_w=None) for one in older], QUESTION) is None


def test_a_job_that_leaves_its_interval_again_and_again_is_reported_so_once():
    foreseen = PredictedPlans(Answers(BEND))
    foreseen.predict_job("j", QUESTION, ())
    assert foreseen.check_job_window("j", window(200.0, 2.0)) is None  # the largest limit was not measured yet
    assert foreseen.check_job_window("j", window(400.0)) is None
    for _ in range(20):
        assert foreseen.check_job_window("j", window(200.0, 1.22)) is None
    said = [foreseen.check_job_window("j", window(200.0, 1.5)) for _ in range(20)]
    assert [one is not None for one in said].index(True) == OUTSIDE_WINDOWS - 1
    assert sum(one is not None for one in said) == 1
    assert "is withdrawn" in foreseen.job_bases()["j"]
    assert foreseen.predict_job("j", QUESTION, (), is_new=True) is None
