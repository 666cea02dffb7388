"""Joules and how far they may be off: the bounds hold for what real sensors do to known power."""

import math
import random

import pytest

from eelgrid_agent.energy.metering import COUNTER_REFRESH_S, GAIN_ERROR, EnergyMeasurement, UncertaintyWindow
from eelgrid_protos.catalogue.products import PowerSensor

SECOND = 1_000_000_000
H100_INSTANT = PowerSensor(period_ms=100, window_ms=25, kind="paper")
H100_AVERAGE = PowerSensor(period_ms=100, window_ms=1000, kind="paper")


def window_of(looks, sensor=H100_INSTANT):
    window = UncertaintyWindow(sensor)
    for at_s, total_j, power_w, counted in looks:
        window.observe(at_ns=round(at_s * SECOND), total_j=total_j, power_w=power_w, counted=counted)
    return window.estimate()


def test_a_counter_is_off_by_its_gain_and_its_ends():
    found = window_of([(at_s, 300.0 * at_s, 300.0, True) for at_s in range(61)])
    assert (found.method, found.seconds, found.energy_j) == (EnergyMeasurement.COUNTER, 60.0, 18_000.0)
    assert found.uncertainty_j == pytest.approx(GAIN_ERROR * 18_000.0 + 2 * 300.0 * COUNTER_REFRESH_S)


def test_a_counter_that_comes_back_covers_the_time_without_it():
    looks = [(0, 0.0, 100.0, True), (1, 150.0, 200.0, False), (2, 400.0, 300.0, False), (3, 700.0, 300.0, True)]
    assert window_of(looks[:3]).method is EnergyMeasurement.INTEGRATED
    assert window_of(looks).method is EnergyMeasurement.COUNTER
    assert window_of(looks).uncertainty_j == pytest.approx(GAIN_ERROR * 700.0 + COUNTER_REFRESH_S * 400.0)


def test_a_reset_leaves_what_only_power_covers():
    window = UncertaintyWindow(H100_INSTANT)
    window.observe(at_ns=0, total_j=0.0, power_w=100.0, counted=True)
    window.observe(at_ns=SECOND, total_j=100.0, power_w=100.0, counted=True)
    window.observe(at_ns=2 * SECOND, total_j=300.0, power_w=300.0, counted=True, reset=True)
    window.observe(at_ns=3 * SECOND, total_j=600.0, power_w=300.0, counted=True)
    found = window.estimate(uncounted_s=7.0)
    assert (found.method, found.uncounted_s) == (EnergyMeasurement.MIXED, 7.0)
    # The step rose by 200 W, and 97.5 % of it went unseen.
    assert found.uncertainty_j == pytest.approx(GAIN_ERROR * 600.0 + COUNTER_REFRESH_S * 400.0 + 0.975 * 100.0)


def test_a_look_without_a_total_is_passed_over_and_another_meter_goes_on_from_it():
    found = window_of(
        [
            (0, 5.0, 10.0, True),
            (1, None, None, False),
            (2, 25.0, 10.0, True),
            (3, 1.0, 10.0, True),
            (4, 11.0, 10.0, True),
        ]
    )
    assert (found.energy_j, found.seconds) == (30.0, 3.0)
    assert UncertaintyWindow().estimate() is None


@pytest.mark.parametrize("sensor", [H100_INSTANT, H100_AVERAGE], ids=["instant", "average"])
@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_for_random_loads_seen_through_a_sensor_with_a_gain(sensor, seed):
    """Power that steps at random, read once a second through window and gain, against its true integral."""
    draw = random.Random(seed)
    gain = 1.0 + draw.uniform(-GAIN_ERROR, GAIN_ERROR)
    step_ms, seconds = 25, 120
    level, powers = 100.0, []
    for _ in range(seconds * 1000 // step_ms):
        if draw.random() < step_ms / draw.choice([400, 3000]):
            level = draw.uniform(70.0, 700.0)
        powers.append(level)
    window, total_j, last_w = UncertaintyWindow(sensor), 0.0, None
    seen = sensor.window_ms // step_ms
    for at_s in range(2, seconds):
        end = at_s * 1000 // step_ms
        reading_w = gain * math.fsum(powers[end - seen : end]) / seen
        total_j += 0.0 if last_w is None else (last_w + reading_w) / 2.0
        last_w = reading_w
        window.observe(at_ns=at_s * SECOND, total_j=total_j, power_w=reading_w, counted=False)
    truth_j = math.fsum(powers[2000 // step_ms : (seconds - 1) * 1000 // step_ms]) * step_ms / 1000.0
    found = window.estimate()
    assert found.method is EnergyMeasurement.INTEGRATED
    # Errors add in squares, so twice the random part covers nearly all seeds; the gain is a hard bound.
    random_j = found.uncertainty_j - GAIN_ERROR * found.energy_j
    lag_j = 700.0 * sensor.window_ms / 1e3
    assert abs(found.energy_j - truth_j) <= GAIN_ERROR * truth_j + 2.0 * random_j + lag_j
    # The bound says something: it is no larger than a fifth of what it bounds.
    assert found.uncertainty_j < 0.2 * found.energy_j
