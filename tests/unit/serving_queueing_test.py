"""Queueing against what is known exactly, against the simulation, and what it refuses."""

import math
import pickle

import numpy as np
import pytest
from bench.llm.queue_simulation import Queue, simulate, times
from bench.llm.queues import QUANTILES, grid, missed

from eelgrid_controller.profiles.points import (
    Configuration,
    InvalidServingValue,
    NoFeasibleConfiguration,
    Point,
    ServingError,
)
from eelgrid_controller.profiles.queueing_model import (
    MODEL_ERROR,
    ArrivalProcess,
    QuantileObjective,
    ServiceStation,
    SlownessFactor,
    _waiting_time,
    erlang_c,
    keeps_objective,
    largest_rate_hz,
    latency_quantile,
    least_replicas,
    response_tail,
    station_from_point,
)
from eelgrid_kernels.simulation import BatchServers, simulate_queue


def _sum_erlang_c(servers, load):
    """The formula as it is written in books."""
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


def mean_wait_s(station, arrivals):
    """Mean wait before service, batches of one; infinite at and past saturation."""
    wait = _waiting_time(station, arrivals)
    return math.inf if wait is None else wait.share / wait.decay_hz


@pytest.mark.parametrize(("servers", "load"), [(1, 0.3), (2, 1.9), (8, 4.0), (40, 35.0)])
def test_erlang_by_recursion_is_erlang_by_its_sum(servers, load):
    assert erlang_c(servers, load) == pytest.approx(_sum_erlang_c(servers, load), rel=1e-12)


def test_erlang_of_many_servers_does_not_overflow():
    assert 0.0 < erlang_c(5000, 4950.0) < 1.0
    assert erlang_c(3, 3.0) == erlang_c(3, 9.0) == 1.0
    assert erlang_c(3, 0.0) == 0.0


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95, 0.99])
def test_one_exponential_server_is_exact(quantile):
    """M/M/1: the response time is exponential with rate mu - lambda."""
    station = ServiceStation(servers=1, service_s=0.2, service_cv2=1.0)
    found = latency_quantile(station, ArrivalProcess(3.0), quantile)
    assert found.value_s == pytest.approx(-math.log(1.0 - quantile) / (5.0 - 3.0), rel=1e-9)
    assert found.error == MODEL_ERROR.exact == 0.0
    assert found.upper_s == found.value_s


def test_several_exponential_servers_are_exact():
    """M/M/c: the tail of W + S, by the sum of its parts over a fine grid."""
    station, rate = ServiceStation(servers=3, service_s=1.0, service_cv2=1.0), 2.4
    share, theta = erlang_c(3, rate), 3.0 - rate
    at = np.linspace(0.0, 60.0, 600_001)
    step = at[1]
    for time_s in (0.5, 2.0, 6.0):
        service = np.exp(-at[at <= time_s])
        waits = share * np.exp(-theta * (time_s - at[at <= time_s]))
        numeric = math.exp(-time_s) + np.trapezoid(service * waits, dx=step)
        assert response_tail(station, ArrivalProcess(rate), time_s) == pytest.approx(float(numeric), rel=1e-5)


def test_where_both_rates_meet_the_formula_has_no_hole():
    """c mu - lambda = mu: the general form divides by zero there."""
    station = ServiceStation(servers=2, service_s=1.0, service_cv2=1.0)
    near = latency_quantile(station, ArrivalProcess(1.0 + 1e-7), 0.95).value_s
    assert latency_quantile(station, ArrivalProcess(1.0), 0.95).value_s == pytest.approx(near, rel=1e-6)


def test_the_mean_wait_is_that_of_kingman_and_of_allen_and_cunneen():
    one = ServiceStation(servers=1, service_s=0.5, service_cv2=0.25)
    rho = 1.6 * 0.5
    assert mean_wait_s(one, ArrivalProcess(1.6)) == pytest.approx(
        rho / (1 - rho) * (1 + 0.25) / 2 * 0.5
    )  # M/G/1, exact
    many = ServiceStation(servers=4, service_s=0.5, service_cv2=0.25)
    waits = erlang_c(4, 3.2) * 0.5 / (4 * (1 - 0.8)) * (1 + 0.25) / 2
    assert mean_wait_s(many, ArrivalProcess(6.4)) == pytest.approx(waits)


def test_nothing_varies_so_nothing_waits():
    station = ServiceStation(servers=2, service_s=1.0)
    assert latency_quantile(station, ArrivalProcess(1.9, cv2=0.0), 0.99).value_s == pytest.approx(1.0)
    assert latency_quantile(station, ArrivalProcess(0.0), 0.99).value_s == pytest.approx(1.0)


def test_a_queue_that_grows_has_no_quantile():
    station = ServiceStation(servers=2, service_s=1.0, batch=3)
    for rate in (6.0, 7.0):
        assert latency_quantile(station, ArrivalProcess(rate), 0.5).value_s == math.inf
        assert response_tail(station, ArrivalProcess(rate), 1e9) == 1.0
    assert mean_wait_s(ServiceStation(servers=2, service_s=1.0), ArrivalProcess(2.0)) == math.inf


@pytest.mark.parametrize("kind", ["simple", "batched"])
def test_the_stated_error_holds_on_a_part_of_the_grid(kind):
    """The whole grid is bench.llm.queues; here every ninth point, and a shorter simulation."""
    stated = getattr(MODEL_ERROR, kind)
    some = list(grid(kind))[::9]
    rows = np.abs([missed(queue, 30_000, 5, "lognormal") for queue in some])
    assert rows.shape == (len(some), len(QUANTILES))
    assert np.mean(rows <= stated + 0.05) >= 0.9  # 0.05: what so short a simulation misses itself


@pytest.mark.parametrize(("servers", "batch", "alone"), [(1, 1, 1.0), (3, 1, 1.0), (1, 4, 0.3), (5, 7, 0.6)])
def test_the_played_queue_is_its_twin(servers, batch, alone):
    queue = Queue(0.9 * servers * batch, 2.0, servers, 1.0, 0.5, batch, alone)
    rng = np.random.default_rng(3)
    arrived = np.cumsum(times(rng, 1.0 / queue.rate_hz, queue.arrival_cv2, 4400, "gamma"))
    works = times(rng, 1.0, queue.service_cv2, 4400, "gamma")
    took = np.empty(4400)
    simulate_queue(arrived, works, BatchServers(servers, batch, alone), took)
    np.testing.assert_allclose(took[400:], simulate(queue, 4000, 3), rtol=1e-12)


def test_measured_quantiles_shape_the_service():
    """Without a queue the response is what was measured, scaled to the mean."""
    measured = ((0.5, 1.0), (0.9, 1.5), (0.99, 3.0))
    station = ServiceStation(servers=4, service_s=1.2, quantiles_s=measured)
    alone = [latency_quantile(station, ArrivalProcess(0.0), level).value_s for level, _ in measured]
    assert alone[1] / alone[0] == pytest.approx(1.5, rel=0.02)
    assert alone[2] / alone[0] == pytest.approx(3.0, rel=0.02)


def test_a_point_becomes_a_station():
    point = Point(
        "x", Configuration("a100", batch=8, processes=2), throughput_hz=160.0, latency_s={0.5: 0.1, 0.95: 0.2}
    )
    station = station_from_point(point)
    assert (station.servers, station.batch) == (2, 8)
    assert station.service_s == pytest.approx(0.1)
    assert station.capacity_hz == pytest.approx(160.0)
    sigma = math.log(2.0) / 1.6448536269514722
    assert station.service_cv2 == pytest.approx(math.expm1(sigma * sigma))
    assert station_from_point(point, service_cv2=0.5).service_cv2 == 0.5
    assert station_from_point(Point("x", Configuration("a100"), throughput_hz=2.0)).service_cv2 == 0.0


def test_a_partly_filled_batch_takes_less():
    station = ServiceStation(servers=1, service_s=1.0, batch=5, alone_s=0.2)
    assert [station.batch_s(size) for size in (0.5, 1, 3, 5, 9)] == pytest.approx([0.2, 0.2, 0.6, 1.0, 1.0])
    assert latency_quantile(station, ArrivalProcess(0.001), 0.5).value_s == pytest.approx(0.2, rel=0.01)


def test_least_replicas_is_the_least():
    replica, arrivals, promise = (
        ServiceStation(servers=1, service_s=0.1, service_cv2=0.5),
        ArrivalProcess(200.0, 2.0),
        QuantileObjective(0.95, 0.6),
    )
    enough = least_replicas(replica, arrivals, promise, most=100)
    assert keeps_objective(replica.replicated(enough), arrivals, promise)
    assert not keeps_objective(replica.replicated(enough - 1), arrivals, promise)
    more = least_replicas(replica, arrivals, promise, most=100, factor=SlownessFactor(1.3, 0.2))
    assert more >= enough


def test_the_largest_rate_is_kept_and_no_more_is():
    station, promise = ServiceStation(servers=3, service_s=0.1, service_cv2=1.0), QuantileObjective(0.99, 1.0)
    rate = largest_rate_hz(station, promise)
    assert keeps_objective(station, ArrivalProcess(rate), promise)
    assert not keeps_objective(station, ArrivalProcess(rate * 1.001), promise)
    assert largest_rate_hz(station, QuantileObjective(0.99, 0.05)) == 0.0


def test_refusals_name_the_field_and_what_to_do():
    slow = ServiceStation(servers=1, service_s=2.0)
    with pytest.raises(NoFeasibleConfiguration, match="faster configuration"):
        least_replicas(slow, ArrivalProcess(1.0), QuantileObjective(0.95, 1.0), most=8)
    with pytest.raises(NoFeasibleConfiguration, match="allow more replicas"):
        least_replicas(slow, ArrivalProcess(100.0), QuantileObjective(0.95, 10.0), most=8)
    for broken in (
        lambda: ServiceStation(servers=0, service_s=1.0),
        lambda: ServiceStation(servers=1, service_s=0.0),
        lambda: ServiceStation(servers=1, service_s=1.0, batch=0),
        lambda: ServiceStation(servers=1, service_s=1.0, alone_s=2.0),
        lambda: ServiceStation(servers=1, service_s=1.0, service_cv2=-1.0),
        lambda: QuantileObjective(1.0, 1.0),
        lambda: QuantileObjective(0.5, 0.0),
        lambda: latency_quantile(slow, ArrivalProcess(-1.0), 0.5),
        lambda: latency_quantile(slow, ArrivalProcess(0.1, cv2=math.nan), 0.5),
        lambda: latency_quantile(slow, ArrivalProcess(0.1), 1.0),
        lambda: station_from_point(Point("x", Configuration("a100"), throughput_hz=0.0)),
    ):
        with pytest.raises(InvalidServingValue) as refused:
            broken()
        assert refused.value.field in str(refused.value)
        assert refused.value.remedy


def test_a_refusal_crosses_processes():
    refused = NoFeasibleConfiguration("pool", "empty", "add GPUs")
    again = pickle.loads(pickle.dumps(refused))
    assert isinstance(again, ServingError)
    assert (str(again), again.field, again.remedy) == (str(refused), "pool", "add GPUs")
