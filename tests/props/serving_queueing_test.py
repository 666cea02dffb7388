"""What must hold of every queue: more load is slower, more servers are faster, units do not matter."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eelgrid_controller.profiles.queueing_model import (
    ArrivalProcess,
    QuantileObjective,
    ServiceStation,
    keeps_objective,
    largest_rate_hz,
    latency_quantile,
    least_replicas,
    response_tail,
)

quiet = settings(deadline=None)
LOADS = st.floats(0.01, 0.97)
VARIATIONS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 6.0])
QUANTILES = st.sampled_from([0.5, 0.9, 0.95, 0.99])


@st.composite
def stations(draw, batches=(1,)):
    batch = draw(st.sampled_from(batches))
    service_s = draw(st.floats(1e-3, 20.0))
    alone_s = draw(st.none() | st.floats(0.1, 1.0).map(lambda share: share * service_s))
    return ServiceStation(
        servers=draw(st.integers(1, 40)),
        service_s=service_s,
        service_cv2=draw(VARIATIONS),
        batch=batch,
        alone_s=alone_s if batch > 1 else None,
    )


@quiet
@given(stations(), LOADS, LOADS, VARIATIONS, QUANTILES)
def test_more_load_is_never_faster(station, one, other, cv2, quantile):
    low, high = sorted((one, other))
    assume(low < high)
    slow = latency_quantile(station, ArrivalProcess(high * station.capacity_hz, cv2), quantile).value_s
    fast = latency_quantile(station, ArrivalProcess(low * station.capacity_hz, cv2), quantile).value_s
    if cv2 >= 1.0:  # the share that waits, by Kraemer and Langenbach-Belz, is monotone for no less
        assert fast <= slow * (1.0 + 1e-9)
    assert slow >= latency_quantile(station, ArrivalProcess(0.0, cv2), quantile).value_s * (1.0 - 1e-9)


@quiet
@given(stations(), LOADS, VARIATIONS, QUANTILES)
def test_a_replica_more_is_never_slower(station, load, cv2, quantile):
    arrivals = ArrivalProcess(load * station.capacity_hz, cv2)
    few = latency_quantile(station, arrivals, quantile).value_s
    assert latency_quantile(station.replicated(2), arrivals, quantile).value_s <= few * (1.0 + 1e-9)


@quiet
@given(stations(), LOADS, VARIATIONS)
def test_a_higher_quantile_is_never_less(station, load, cv2):
    arrivals = ArrivalProcess(load * station.capacity_hz, cv2)
    rising = [latency_quantile(station, arrivals, level).value_s for level in (0.5, 0.9, 0.95, 0.99)]
    assert rising == sorted(rising)


@settings(deadline=None, max_examples=25)
@given(stations(batches=(1, 4, 16)), LOADS, VARIATIONS, QUANTILES, st.floats(0.01, 100.0))
def test_units_do_not_matter(station, load, cv2, quantile, scale):
    assume(cv2 > 0.0 or station.batch == 1)  # a metronome may come in the very moment that a batch starts
    scaled = ServiceStation(
        servers=station.servers,
        service_s=station.service_s * scale,
        service_cv2=station.service_cv2,
        batch=station.batch,
        alone_s=None if station.alone_s is None else station.alone_s * scale,
    )
    rate = load * station.capacity_hz
    found = latency_quantile(station, ArrivalProcess(rate, cv2), quantile).value_s
    assert latency_quantile(scaled, ArrivalProcess(rate / scale, cv2), quantile).value_s == pytest.approx(
        found * scale,
        rel=1e-6 if station.batch == 1 else 1e-3,
    )


@quiet
@given(stations(), LOADS, VARIATIONS, QUANTILES)
def test_the_quantile_is_where_the_tail_says(station, load, cv2, quantile):
    arrivals = ArrivalProcess(load * station.capacity_hz, cv2)
    value_s = latency_quantile(station, arrivals, quantile).value_s
    assert response_tail(station, arrivals, value_s) <= 1.0 - quantile + 1e-12
    assert response_tail(station, arrivals, value_s * (1.0 - 1e-6)) >= 1.0 - quantile - 1e-12


@settings(deadline=None, max_examples=20)
@given(stations(batches=(4, 16)), LOADS, VARIATIONS, QUANTILES)
def test_no_answer_is_faster_than_its_batch(station, load, cv2, quantile):
    found = latency_quantile(station, ArrivalProcess(load * station.capacity_hz, cv2), quantile).value_s
    if station.service_cv2 == 0.0:
        assert found >= station.batch_s(1) * (1.0 - 1e-9)
    assert math.isfinite(found)


@settings(deadline=None, max_examples=30)
@given(stations(), st.floats(1.1, 20.0), st.floats(0.1, 30.0))
def test_both_inversions_agree(station, slack, demand):
    """As many replicas as a rate needs keep that rate; one fewer do not."""
    promise = QuantileObjective(0.95, slack * latency_quantile(station, ArrivalProcess(0.0), 0.95).upper_s)
    rate = demand * station.capacity_hz
    enough = least_replicas(station, ArrivalProcess(rate), promise, most=1000)
    assert keeps_objective(station.replicated(enough), ArrivalProcess(rate), promise)
    assert largest_rate_hz(station.replicated(enough), promise) >= rate * (1.0 - 1e-6)
    if enough > 1:
        assert largest_rate_hz(station.replicated(enough - 1), promise) <= rate * (1.0 + 1e-6)
