"""Services under steering: what is said when, and what is not."""

import math
from dataclasses import replace

import pytest
from tests.builders.objectives import build_metrics_window

from eelgrid_controller.objectives.control_cycle import ObjectiveController
from eelgrid_controller.objectives.power.control_events import (
    ControlSettings,
    ControlTick,
    InvalidSetting,
    ScaleService,
    ServiceReady,
    ServiceStarted,
    ServiceWindow,
    WorkloadEnded,
)
from eelgrid_controller.objectives.services.autoscaler import (
    RESERVE_STEP,
    AutoscalerTarget,
    ScalerPhase,
    ScalingLimits,
)
from eelgrid_controller.objectives.services.service_metrics import LiveDistribution
from eelgrid_controller.objectives.services.service_model import RequestService
from eelgrid_controller.profiles.queueing_model import QuantileObjective, ServiceStation

REPLICA = ServiceStation(servers=2, service_s=0.1, service_cv2=0.25)
LIMITS = ScalingLimits(start_s=30.0, hold_s=120.0, cool_s=30.0, most=40)
PROMISED = AutoscalerTarget(RequestService(REPLICA, QuantileObjective(0.95, 0.6)), LIMITS)


def seen(rate_hz, *, waiting=0.0, growth=0.0, response=None):
    return build_metrics_window(rate_hz, waiting=waiting, growth=growth, response=response)


def steered(replicas=2, settings=None):
    steering = ObjectiveController(settings)
    assert steering.handle_event(ServiceStarted(0.0, "s", PROMISED, replicas)) == []
    return steering


def standing(steering):
    return steering.controller_status().services[0]


def test_a_rise_is_reported_once_and_a_fall_only_after_the_look_back():
    steering = steered()
    (scale,) = steering.handle_event(ServiceWindow(30.0, "s", seen(60.0)))
    assert scale.name == "s"
    assert scale.replicas > 2
    assert steering.handle_event(ServiceReady(40.0, "s", scale.replicas)) == []
    for k in range(2, 6):
        assert steering.handle_event(ServiceWindow(30.0 * k, "s", seen(60.0))) == []
    target, said = scale.replicas, []
    for k in range(6, 40):
        said += [one.replicas for one in steering.handle_event(ServiceWindow(30.0 * k, "s", seen(5.0)))]
    assert said
    assert said == sorted(said, reverse=True)
    assert said[-1] < target
    assert standing(steering).target == said[-1]


def test_what_may_have_been_lost_is_reported_again_until_it_comes():
    steering = steered(settings=ControlSettings(repeat_s=60.0))
    (scale,) = steering.handle_event(ServiceWindow(30.0, "s", seen(60.0)))
    assert steering.handle_event(ControlTick(60.0)) == []
    assert steering.handle_event(ControlTick(90.0)) == [scale]
    assert steering.handle_event(ControlTick(100.0)) == []
    steering.handle_event(ServiceReady(110.0, "s", scale.replicas))
    assert steering.handle_event(ControlTick(200.0)) == []


def test_silence_takes_nothing_away():
    steering = steered(8)
    steering.handle_event(ServiceWindow(30.0, "s", seen(1.0)))
    for at_s in range(60, 4000, 30):
        assert steering.handle_event(ControlTick(float(at_s))) == []
    assert standing(steering).phase is ScalerPhase.BLIND
    assert standing(steering).target == 8
    assert "blind" in standing(steering).reason


def test_a_service_that_is_taken_up_in_the_middle_of_life_keeps_what_it_has():
    steering = steered(12)
    for k in range(1, 5):  # the look-back of 120 s is not full
        assert steering.handle_event(ServiceWindow(30.0 * k, "s", seen(5.0))) == []
    assert standing(steering).target == 12


def test_a_service_outside_its_bounds_is_brought_into_them():
    steering = ObjectiveController()
    assert [one.replicas for one in steering.handle_event(ServiceStarted(0.0, "s", PROMISED, 0))] == [1]


def test_old_double_and_unknown_events_are_counted_and_change_nothing():
    steering = steered()
    steering.handle_event(ServiceReady(5.0, "s", 2))
    steering.handle_event(ServiceWindow(30.0, "s", seen(20.0)))
    before = standing(steering)
    for event in (
        ServiceStarted(31.0, "s", PROMISED, 9),
        ServiceWindow(30.0, "s", seen(500.0)),
        ServiceWindow(10.0, "s", seen(500.0)),
        ServiceWindow(60.0, "other", seen(500.0)),
        ServiceReady(1.0, "s", 7),
        ServiceReady(60.0, "s", -1),
        ServiceStarted(60.0, "t", PROMISED, -1),
        WorkloadEnded(60.0, "other"),
        ControlTick(math.nan),
    ):
        assert steering.handle_event(event) == []
    assert replace(standing(steering), factor_error=before.factor_error) == before
    assert sum(steering.controller_status().ignored.values()) == 9


def test_a_service_may_promise_something_else():
    steering = steered(10)
    lower = AutoscalerTarget(PROMISED.model, replace(LIMITS, most=4))
    assert [one.replicas for one in steering.handle_event(ServiceStarted(10.0, "s", lower, 10))] == [4]


def test_operators_see_the_reserve_of_a_broken_promise_and_a_new_profile_has_none():
    steering = steered()
    slow = LiveDistribution((0.6, 5.0, math.inf), (0.0, 1000.0, 1000.0))
    steering.handle_event(ServiceWindow(30.0, "s", seen(1.0, response=slow)))
    assert standing(steering).reserve == RESERVE_STEP
    assert "in reserve, as its promise was broken" in standing(steering).reason
    wider = replace(PROMISED, limits=replace(LIMITS, most=50))
    steering.handle_event(ServiceStarted(40.0, "s", wider, 2))
    assert standing(steering).reserve == pytest.approx(RESERVE_STEP, rel=1e-3)
    other = replace(wider, model=replace(PROMISED.model, replica=replace(REPLICA, service_s=0.2)))
    steering.handle_event(ServiceStarted(50.0, "s", other, 2))
    assert standing(steering).reserve == 0.0


def test_operators_see_the_live_quantile_beside_the_model():
    steering = steered(4)
    live = LiveDistribution((0.1, 0.2, 0.4, math.inf), (100.0, 1000.0, 2000.0, 2000.0))
    steering.handle_event(ServiceWindow(30.0, "s", seen(20.0, response=live)))
    view = standing(steering)
    assert 0.2 < view.live_s < 0.4
    assert view.model_s is not None
    assert view.model_s < view.live_s
    assert view.factor > 1.0
    assert view.serving == 4
    assert view.at_s == 30.0


def test_a_service_that_ended_is_forgotten():
    steering = steered()
    assert steering.handle_event(WorkloadEnded(1.0, "s")) == []
    assert steering.controller_status().services == ()
    assert steering.handle_event(ServiceWindow(30.0, "s", seen(60.0))) == []


def test_no_more_services_than_are_steered():
    steering = steered(settings=ControlSettings(services_most=1))
    assert steering.handle_event(ServiceStarted(0.0, "t", PROMISED, 0)) == []
    assert len(steering.controller_status().services) == 1


def test_the_same_events_give_the_same_instructions():
    def said():
        steering = steered()
        return [
            one
            for k in range(1, 40)
            for one in steering.handle_event(ServiceWindow(30.0 * k, "s", seen(20.0 + 30.0 * (k % 7))))
        ]

    assert said() == said()
    assert all(isinstance(one, ScaleService) for one in said())


@pytest.mark.parametrize(
    "wrong",
    [{"repeat_s": 0.0}, {"divide_every_s": -1.0}, {"reprice": math.nan}, {"jobs_most": 0}, {"horizon_s": math.inf}],
)
def test_settings_that_are_none_are_refused(wrong):
    with pytest.raises(InvalidSetting):
        ControlSettings(**wrong)
