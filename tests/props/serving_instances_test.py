"""Instances of a pool against every choice that there is, and against HiGHS."""

import itertools
import math

import numpy as np
import pytest
from bench.llm.instances import LoadedInstances, retain_instances, serve_window, spread_load, without_power
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_controller.profiles.queueing_model import QuantileObjective
from eelgrid_controller.whatif.instances import (
    IDLE_POINT,
    PartLoad,
    ServiceDemand,
    choose_instances,
    dispatch_load,
    feasible_shapes,
    search_instances,
    solve_joint,
)

quiet = settings(deadline=None, max_examples=60)
IDLE_W = {"a": 50.0, "b": 100.0}
PROMISE = QuantileObjective(0.95, 0.05)


@st.composite
def points(draw):
    """A few shapes of two GPU models, each with a few points of more and more sequences."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        model, gpus = draw(st.sampled_from("ab")), draw(st.integers(1, 2))
        rate = 0.0
        for batch in range(1, draw(st.integers(1, 4)) + 1):
            rate += draw(st.integers(1, 30))
            found.append(
                Point(
                    "m",
                    Configuration(model, gpus=gpus, batch=batch, label=str(number)),
                    throughput_hz=rate,
                    latency_s={0.95: 0.01 * batch},
                    power_w=IDLE_W[model] * gpus + draw(st.integers(1, 400)),
                )
            )
    return found


PARTS = st.sampled_from(PartLoad)


def _shapes(some, part_load=PartLoad.MEASURED, start_s=10.0):
    return feasible_shapes(some, PROMISE, idle_w=IDLE_W, start_s=start_s, part_load=part_load)


def _by_linear_program(shapes, serving, demand_hz):
    """Least watts of given instances, by the definition."""
    steps = [(number, step) for number, shape in enumerate(shapes) for step in shape.steps]
    equal = np.array([[1.0 if number == at else 0.0 for number, _ in steps] for at in range(len(shapes))])
    given_hz = np.array([[-step.throughput_hz for _, step in steps]])
    found = linprog(
        [step.power_w for _, step in steps], A_ub=given_hz, b_ub=[-demand_hz], A_eq=equal, b_eq=serving, method="highs"
    )
    return found.fun if found.x is not None else None


# HiGHS keeps constraints to 1e-6 or so: a demand below that is none to it.
@quiet
@given(points(), PARTS, st.lists(st.integers(0, 4), min_size=3, max_size=3), st.just(0.0) | st.floats(1e-3, 300.0))
def test_the_walk_is_the_linear_program(some, part_load, counts, demand_hz):
    shapes = _shapes(some, part_load)
    serving = counts[: len(shapes)]
    running = dispatch_load(shapes, serving, demand_hz)
    for at, count in zip(running.instances, serving, strict=True):
        assert sum(at) == pytest.approx(count)
        assert min(at) >= -1e-9
    given_hz = sum(
        step.throughput_hz * part
        for shape, at in zip(shapes, running.instances, strict=True)
        for step, part in zip(shape.steps, at, strict=True)
    )
    assert running.throughput_hz == pytest.approx(given_hz)
    least_w = _by_linear_program(shapes, serving, demand_hz)
    if least_w is None:
        assert running.throughput_hz < demand_hz
    else:
        assert running.throughput_hz >= demand_hz * (1 - 1e-12)
        assert running.power_w == pytest.approx(least_w, rel=1e-6, abs=1e-6)
    even = spread_load(shapes, serving, demand_hz)
    assert even.throughput_hz >= min(demand_hz, running.throughput_hz) * (1 - 1e-9)
    assert even.power_w >= running.power_w * (1 - 1e-9)


@quiet
@given(points(), PARTS)
def test_a_hull_is_convex_and_below_every_admissible_point(some, part_load):
    for shape in _shapes(some, part_load):
        slopes = [
            (high.power_w - low.power_w) / (high.throughput_hz - low.throughput_hz)
            for low, high in itertools.pairwise(shape.steps)
        ]
        assert slopes == sorted(slopes)
        assert all(slope >= 0.0 for slope in slopes)
        assert (shape.steps[0].point == IDLE_POINT) == (part_load is PartLoad.PROPORTIONAL)
        mine = [p for p in some if p.configuration.label == shape.configuration.label and p.latency_s[0.95] <= 0.05]
        for point in mine:
            if point.throughput_hz <= shape.throughput_hz:
                assert dispatch_load((shape,), (1,), point.throughput_hz).power_w <= point.power_w * (1 + 1e-9)
        assert shape.throughput_hz == max(point.throughput_hz for point in mine)
        assert shape.start_j == pytest.approx(10.0 * min(point.power_w for point in mine))


def _cost(ask, serving, window_s, amortised):
    """The program's objective, by its definition; None where the demand is not met."""
    running = dispatch_load(ask.shapes, serving, ask.demand_hz)
    if running.throughput_hz < ask.demand_hz * (1 - 1e-9):
        return None
    idle_w = sum(shape.idle_w * count for shape, count in zip(ask.shapes, serving, strict=True))
    starts_w = sum(
        shape.start_j * max(0, count - loaded) / (amortised * window_s)
        for shape, count, loaded in zip(ask.shapes, serving, ask.loaded, strict=True)
    )
    return running.power_w - idle_w + starts_w


def _every(ask, most):
    return itertools.product(*(range(bound + 1) for bound in most))


def test_a_demand_that_is_over_an_instance_by_rounding_needs_no_second():
    shapes = _shapes(
        [
            Point("m", Configuration("a", label=label), throughput_hz=1.0, latency_s={0.95: 0.01}, power_w=51.0)
            for label in "01"
        ]
    )
    found = search_instances(shapes, math.nextafter(1.0, 2.0), loaded=[1, 0], start_w=[1.0, 1.0], most=[2, 2])
    assert found.serving == (1, 0)


@quiet
@given(points(), PARTS, st.floats(1.0, 200.0), st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_the_search_is_the_best_of_all(some, part_load, demand_hz, loaded):
    shapes = _shapes(some, part_load)
    ask = ServiceDemand(shapes, demand_hz, tuple(loaded[: len(shapes)]))
    most = [min(5, math.ceil(demand_hz / shape.throughput_hz) + 1) for shape in shapes]
    costs = [_cost(ask, serving, 60.0, 10) for serving in _every(ask, most)]
    possible = [cost for cost in costs if cost is not None]
    start_w = [shape.start_j / 600.0 for shape in shapes]
    found = search_instances(shapes, demand_hz, loaded=ask.loaded, start_w=start_w, most=most)
    if not possible:
        assert found is None
        return
    assert found.is_optimal
    assert all(count <= bound for count, bound in zip(found.serving, most, strict=True))
    assert found.cost_w == pytest.approx(min(possible), rel=1e-5, abs=1e-6)
    assert _cost(ask, found.serving, 60.0, 10) == pytest.approx(found.cost_w, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=20)
@given(
    points(), points(), st.floats(1.0, 60.0), st.just(0.0) | st.floats(1e-9, 60.0), st.integers(0, 4), st.integers(0, 4)
)
def test_two_services_share_a_short_pool_best(one, other, one_hz, other_hz, a, b):
    pool = {"a": a, "b": b}
    asks = [
        ServiceDemand(shapes, hz, (0,) * len(shapes))
        for shapes, hz in ((_shapes(one), one_hz), (_shapes(other), other_hz))
    ]
    most = [[pool[shape.configuration.gpu_model] // shape.gpus for shape in ask.shapes] for ask in asks]
    best = math.inf
    for first in _every(asks[0], most[0]):
        for second in _every(asks[1], most[1]):
            used = dict.fromkeys(pool, 0)
            for ask, counts in zip(asks, (first, second), strict=True):
                for shape, count in zip(ask.shapes, counts, strict=True):
                    used[shape.configuration.gpu_model] += shape.gpus * count
            costs = [_cost(ask, counts, 60.0, 10) for ask, counts in zip(asks, (first, second), strict=True)]
            if None not in costs and all(used[model] <= gpus for model, gpus in pool.items()):
                best = min(best, sum(costs))
    if best == math.inf:
        with pytest.raises(NoFeasibleConfiguration, match="pool"):
            choose_instances(asks, pool, window_s=60.0)
        return
    for found in (choose_instances(asks, pool, window_s=60.0), solve_joint(asks, pool, 60.0, 10)):
        total = sum(_cost(ask, counts, 60.0, 10) for ask, counts in zip(asks, found, strict=True))
        assert total == pytest.approx(best, rel=1e-4, abs=1e-3)


@settings(deadline=None, max_examples=25)
@given(
    points(),
    points(),
    st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 60.0)), min_size=2, max_size=6),
    st.integers(4, 10),
)
def test_a_course_keeps_demand_pool_and_what_served(one, other, course, gpus):
    pool = {"a": gpus, "b": gpus}
    shapes = (_shapes(one), _shapes(other))
    before = tuple(LoadedInstances((), (0,) * len(some)) for some in shapes)
    for demands in course:
        asks = [ServiceDemand(some, hz, held.instances) for some, hz, held in zip(shapes, demands, before, strict=True)]
        try:
            running, after = serve_window(asks, before, pool, window_s=60.0, hold=2)
        except NoFeasibleConfiguration:
            assume(False)
        used = dict.fromkeys(pool, 0)
        for ask, ran, held in zip(asks, running, after, strict=True):
            assert ran.throughput_hz >= ask.demand_hz * (1 - 1e-9)
            for shape, at, count in zip(ask.shapes, ran.instances, held.instances, strict=True):
                assert round(sum(at), 6) == round(sum(at))  # whole instances serve
                assert sum(at) <= count + 1e-9
                used[shape.configuration.gpu_model] += shape.gpus * count
        assert all(used[model] <= pool[model] for model in pool)
        before = after


def test_what_served_stays_loaded_for_a_while():
    held = LoadedInstances((), (0, 0))
    for serving, loaded in (((2, 0), (2, 0)), ((0, 1), (2, 1)), ((0, 0), (2, 1)), ((0, 0), (0, 1)), ((0, 0), (0, 0))):
        held = retain_instances(held, serving, hold=3)
        assert held.instances == loaded


def test_room_that_another_needs_is_given_up():
    big = feasible_shapes(
        [Point("m", Configuration("a", gpus=4, batch=1), 10.0, {0.95: 0.01}, 300.0)],
        PROMISE,
        idle_w=IDLE_W,
        start_s=1.0,
    )
    small = feasible_shapes(
        [Point("n", Configuration("a", gpus=1, batch=1), 10.0, {0.95: 0.01}, 90.0)], PROMISE, idle_w=IDLE_W, start_s=1.0
    )
    nothing = (LoadedInstances((), (0,)), LoadedInstances((), (0,)))
    _, first = serve_window(
        [ServiceDemand(big, 20.0, (0,)), ServiceDemand(small, 0.0, (0,))], nothing, {"a": 8}, window_s=60.0
    )
    assert [held.instances for held in first] == [(2,), (0,)]
    _, second = serve_window(
        [ServiceDemand(big, 10.0, (2,)), ServiceDemand(small, 30.0, (0,))], first, {"a": 8}, window_s=60.0
    )
    assert [held.instances for held in second] == [(1,), (3,)]
    _, third = serve_window(
        [ServiceDemand(big, 10.0, (1,)), ServiceDemand(small, 0.0, (3,))], second, {"a": 8}, window_s=60.0
    )
    assert [held.instances for held in third] == [(1,), (3,)]  # what was given up is not remembered


def test_nothing_can_be_started_for_a_window_that_is_here():
    shapes = feasible_shapes(
        [Point("m", Configuration("a", batch=1), 10.0, {0.95: 0.01}, 300.0)], PROMISE, idle_w=IDLE_W, start_s=1.0
    )
    assert choose_instances([ServiceDemand(shapes, 20.0, (3,), only_loaded=True)], {"a": 9}, window_s=60.0) == ((2,),)
    with pytest.raises(NoFeasibleConfiguration):
        choose_instances([ServiceDemand(shapes, 40.0, (3,), only_loaded=True)], {"a": 9}, window_s=60.0)


def test_the_blind_see_gpus():
    (shape,) = feasible_shapes(
        [Point("m", Configuration("a", gpus=2, batch=b), 10.0 * b, {0.95: 0.01 * b}, 300.0 + b) for b in (1, 2)],
        PROMISE,
        idle_w=IDLE_W,
        start_s=30.0,
    )
    seen = without_power(shape, 30.0)
    assert (seen.steps[0].power_w, seen.throughput_hz, seen.start_j, seen.idle_w) == (2.0, 20.0, 60.0, 0.0)


def test_what_is_refused():
    point = Point("m", Configuration("a", batch=1), 10.0, {0.95: 0.2}, 300.0)
    with pytest.raises(NoFeasibleConfiguration, match="relax the objective"):
        feasible_shapes([point], PROMISE, idle_w=IDLE_W, start_s=1.0)
    quick = Point("m", Configuration("c", batch=1), 10.0, {0.95: 0.01}, 300.0)
    with pytest.raises(InvalidServingValue, match="no idle watts of c"):
        feasible_shapes([quick], PROMISE, idle_w=IDLE_W, start_s=1.0)
    with pytest.raises(InvalidServingValue, match="start_s"):
        feasible_shapes([quick], PROMISE, idle_w=IDLE_W, start_s=-1.0)
    unpowered = Point("m", Configuration("a", batch=1), 10.0, {0.95: 0.01}, None)
    with pytest.raises(NoFeasibleConfiguration):
        feasible_shapes([unpowered], PROMISE, idle_w=IDLE_W, start_s=1.0)
    shapes = feasible_shapes([quick], PROMISE, idle_w={"c": 1.0}, start_s=1.0)
    with pytest.raises(InvalidServingValue, match="no c in it"):
        choose_instances([ServiceDemand(shapes, 1.0, (0,))], {"a": 1}, window_s=60.0)
