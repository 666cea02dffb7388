"""The frontier against every choice that there is, and what must hold of any."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.profiles.queueing_model import QuantileObjective
from eelgrid_controller.whatif.capacity import CapacityLoad, largest_factor, missing_gpus
from eelgrid_controller.whatif.frontier import (
    FrontierPool,
    FrontierService,
    FrontierTraining,
    RowCost,
    balanced_row,
    compute_frontier,
    efficient_rows,
)
from eelgrid_controller.whatif.instances import feasible_shapes
from eelgrid_controller.whatif.slice_layouts import SliceKind, build_slice_layouts, cover_slices
from eelgrid_protos.catalogue import load_catalogue

IDLE_W = {"a": 40.0, "b": 70.0}


@st.composite
def points(draw, workload):
    """A few shapes of two models, each with a few points, not all of them good for anything."""
    found = []
    for number in range(draw(st.integers(1, 2))):
        model, gpus = draw(st.sampled_from("ab")), draw(st.integers(1, 2))
        for batch in range(1, draw(st.integers(1, 3)) + 1):
            hz, hundredths, watts = draw(st.tuples(st.integers(5, 60), st.integers(1, 9), st.integers(1, 300)))
            shape = Configuration(model, gpus=gpus, batch=batch, label=str(number))
            point = Point(workload, shape, float(hz), {0.95: 0.01 * hundredths}, IDLE_W[model] * gpus + watts)
            found.append(point)
    return found


@st.composite
def cases(draw):
    services = [FrontierService(name, name, float(draw(st.integers(1, 90))), 0.95) for name in ("m", "n")]
    fleet = {model: FrontierPool(draw(st.integers(0, 3)), IDLE_W[model]) for model in "ab"}
    return [*draw(points("m")), *draw(points("n"))], services, fleet


def _watts(shapes, counts, rate_hz):
    """Least watts of given instances over their admissible points, by the definition; None if they give too little."""
    steps = [(at, point) for at, some in enumerate(shapes) for point in some]
    found = linprog(
        [point.power_w for _, point in steps],
        A_ub=[[-point.throughput_hz for _, point in steps]],
        b_ub=[-rate_hz],
        A_eq=np.array([[float(at == shape) for at, _ in steps] for shape in range(len(shapes))]),
        b_eq=counts,
        method="highs",
    )
    return found.fun if found.x is not None else None


def _choices(mine, latency_s, rate_hz, fleet):
    """GPUs by model, watts if the rate is given, and the factor, of each choice of whole instances of a service."""
    shapes = {}
    for point in mine:
        if point.latency_s[0.95] <= latency_s:
            shapes.setdefault(replace(point.configuration, batch=0), []).append(point)
    some = list(shapes.values())
    most = [fleet[shape[0].configuration.gpu_model].count // shape[0].configuration.gpus for shape in some]
    for counts in itertools.product(*(range(bound + 1) for bound in most)):
        used = dict.fromkeys(fleet, 0)
        for count, shape in zip(counts, some, strict=True):
            used[shape[0].configuration.gpu_model] += count * shape[0].configuration.gpus
        given_hz = sum(n * max(p.throughput_hz for p in shape) for n, shape in zip(counts, some, strict=True))
        watts = _watts(some, counts, rate_hz) if given_hz >= rate_hz else None
        yield used, watts, given_hz / rate_hz


@st.composite
def trainings(draw):
    """One or two kinds of jobs, each at a few limits on a few GPUs; some are one job that runs."""
    found, measured = [], []
    for name in ("t", "u")[: draw(st.integers(1, 2))]:
        own = []
        for model, gpus in draw(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 2)), min_size=1, max_size=2)):
            for limit_w in draw(st.lists(st.sampled_from([100.0, 150.0, 200.0]), min_size=1, max_size=2, unique=True)):
                hz, watts = draw(st.tuples(st.integers(5, 60), st.integers(1, 300)))
                shape = Configuration(model, gpus=gpus, power_limit_w=limit_w)
                own.append(Point(name, shape, float(hz), {}, IDLE_W[model] * gpus + watts))
        runs_on = draw(st.sampled_from([None, *((p.configuration.gpu_model, p.configuration.gpus) for p in own)]))
        alike = [p for p in own if runs_on in (None, (p.configuration.gpu_model, p.configuration.gpus))]
        most_hz = max(int(p.throughput_hz) for p in alike) if runs_on else 60
        found.append(FrontierTraining(name, name, float(draw(st.integers(1, most_hz))), runs_on))
        measured += own
    return measured, found


def _training_choices(measured, job, fleet):
    """As `_choices`, of training jobs: an instance may change its limit at any time, and be idle."""
    shapes = {}
    for point in measured:
        running = point.configuration
        if point.workload == job.workload and job.runs_on in (None, (running.gpu_model, running.gpus)):
            shapes.setdefault((running.gpu_model, running.gpus), []).append(point)
    some = [
        [*mine, Point(job.name, mine[0].configuration, 0.0, {}, IDLE_W[model] * gpus)]
        for (model, gpus), mine in shapes.items()
    ]
    most = [fleet[model].count // gpus for model, gpus in shapes]
    for counts in itertools.product(*(range((min(1, n) if job.runs_on else n) + 1) for n in most)):
        used = dict.fromkeys(fleet, 0)
        for count, (model, gpus) in zip(counts, shapes, strict=True):
            used[model] += count * gpus
        given_hz = sum(n * max(p.throughput_hz for p in shape) for n, shape in zip(counts, some, strict=True))
        watts = _watts(some, counts, job.rate_hz) if given_hz >= job.rate_hz else None
        yield used, watts, given_hz / job.rate_hz


@settings(deadline=None, max_examples=25)
@given(points("m"), st.integers(1, 40), st.tuples(st.integers(0, 4), st.integers(1, 4)), trainings())
def test_with_training_it_is_the_best_of_all(measured, rate_hz, gpus, trained):
    services = [FrontierService("m", "m", float(rate_hz), 0.95)]
    fleet = {model: FrontierPool(count, IDLE_W[model]) for model, count in zip("ab", gpus, strict=True)}
    own, training = trained
    found = compute_frontier([*measured, *own], services, fleet, training=training)
    jobs = [list(_training_choices(own, job, fleet)) for job in training]
    for row in found.rows:
        each = [list(_choices(measured, row.latency_s, float(rate_hz), fleet))]
        least_w, factor, training_factor = math.inf, 0.0, 0.0
        for choice in itertools.product(*each, *jobs):
            used = {model: sum(one[0][model] for one in choice) for model in fleet}
            if any(used[model] > gpus.count for model, gpus in fleet.items()):
                continue
            served, done = (min(one[2] for one in some) for some in (choice[: len(services)], choice[len(services) :]))
            factor = max(factor, served if done >= 1.0 else 0.0)
            training_factor = max(training_factor, done if served >= 1.0 else 0.0)
            if None not in (watts := [one[1] for one in choice]):
                idle_w = sum((gpus.count - used[model]) * gpus.idle_w for model, gpus in fleet.items())
                least_w = min(least_w, sum(watts) + idle_w)
        assert (row.plan is None) == (least_w == math.inf)
        assert row.factor == pytest.approx(factor, rel=1e-5)
        assert row.training_factor == pytest.approx(training_factor, rel=1e-5)
        if row.plan is not None:
            assert row.plan.power_w == pytest.approx(least_w, rel=3e-5)
    for row in found.rows:
        steps = [step for step in found.training if step.latency_s == row.latency_s]
        assert bool(steps) is bool(row.mark)
        assert [step.power_w for step in steps] == sorted(step.power_w for step in steps)
        assert [step.factor for step in steps] == sorted(step.factor for step in steps)
        # What is asked for lies between two steps, and so do its watts.
        if steps and row.plan is not None:
            assert steps[0].factor == 0.0
            below, above = ([s.power_w for s in steps if (s.factor <= 1.0) is low] for low in (True, False))
            assert max(below) <= row.plan.power_w * (1.0 + 1e-4)
            assert not above or min(above) >= row.plan.power_w * (1.0 - 1e-4)


def _by_force(measured, services, fleet, latency_s):
    """The least watts of the fleet, None if it carries too little, and the largest factor."""
    each = [
        list(_choices([p for p in measured if p.workload == s.workload], latency_s, s.rate_hz, fleet)) for s in services
    ]
    least_w, factor = math.inf, 0.0
    for choice in itertools.product(*each):
        used = {model: sum(one[0][model] for one in choice) for model in fleet}
        if any(used[model] > gpus.count for model, gpus in fleet.items()):
            continue
        factor = max(factor, min(one[2] for one in choice))
        if None not in (watts := [one[1] for one in choice]):
            idle_w = sum((gpus.count - used[model]) * gpus.idle_w for model, gpus in fleet.items())
            least_w = min(least_w, sum(watts) + idle_w)
    return (None if least_w == math.inf else least_w), factor


@settings(deadline=None, max_examples=25)
@given(cases())
def test_it_is_the_best_of_all(case):
    measured, services, fleet = case
    found = compute_frontier(measured, services, fleet)
    latencies = {point.latency_s[0.95] for point in measured}
    assert {row.latency_s for row in found.rows} <= latencies
    assert found.rows[0].latency_s == found.tightest[1]
    for latency_s in sorted(latencies):
        least_w, factor = _by_force(measured, services, fleet, latency_s)
        if latency_s < found.rows[0].latency_s:
            assert least_w is None  # a service has no point at all
            continue
        # An objective without a row is worth what the next tighter one is.
        row = [row for row in found.rows if row.latency_s <= latency_s][-1]
        assert (row.plan is None) == (least_w is None)
        assert row.factor == pytest.approx(factor, rel=1e-5)
        if row.plan is None:
            assert row.factor < 1.0
            assert sum(row.lacks.values()) > 0
        else:
            assert row.plan.power_w == pytest.approx(least_w, rel=3e-5)
            assert row.factor >= 1.0
            assert not row.lacks
            assert all(count <= fleet[model].count for model, count in row.plan.gpus.items())
            assert sum(p.instances * p.configuration.gpus for p in row.plan.placed) == sum(row.plan.gpus.values())
            assert {placed.service for placed in row.plan.placed} == {"m", "n"}


@settings(deadline=None, max_examples=25)
@given(cases())
def test_a_looser_objective_is_never_worse_and_marks_are_where_they_belong(case):
    found = compute_frontier(*case)
    feasible = [row for row in found.rows if row.plan is not None]
    assert [row.latency_s for row in found.rows] == sorted({row.latency_s for row in found.rows})
    assert found.rows[len(found.rows) - len(feasible) :] == tuple(feasible)
    for tight, loose in itertools.pairwise(found.rows):
        assert loose.factor >= tight.factor
        if tight.plan is not None:
            assert loose.plan.power_w <= tight.plan.power_w
    marks = [mark for row in found.rows for mark in row.mark.split(",") if mark]
    assert sorted(marks) == (["balanced", "energy", "performance"] if feasible else [])
    if feasible:
        assert "performance" in feasible[0].mark
        assert feasible[0].is_efficient
        (cheapest,) = (row for row in feasible if "energy" in row.mark)
        assert cheapest.plan.power_w == feasible[-1].plan.power_w
        assert all(row.is_efficient for row in feasible if row.mark)


@settings(deadline=None, max_examples=15)
@given(cases(), st.sampled_from([1e-3, 0.5, 8.0, 1e4]), st.sampled_from([0.25, 16.0]), st.sampled_from([0.5, 1e3]))
def test_units_do_not_matter(case, rates, watts, seconds):
    measured, services, fleet = case
    other = compute_frontier(
        [
            replace(
                point,
                throughput_hz=point.throughput_hz * rates,
                power_w=point.power_w * watts,
                latency_s={0.95: point.latency_s[0.95] * seconds},
            )
            for point in measured
        ],
        [replace(service, rate_hz=service.rate_hz * rates) for service in services],
        {model: FrontierPool(gpus.count, gpus.idle_w * watts) for model, gpus in fleet.items()},
    )
    for one, two in zip(compute_frontier(measured, services, fleet).rows, other.rows, strict=True):
        assert two.latency_s == pytest.approx(one.latency_s * seconds)
        assert two.factor == pytest.approx(one.factor, rel=1e-5)
        assert (two.plan is None) == (one.plan is None)
        assert two.lacks == one.lacks
        if one.plan is not None:
            assert two.plan.power_w == pytest.approx(one.plan.power_w * watts, rel=3e-5)
    assert other.rate_hz == pytest.approx(sum(service.rate_hz for service in services) * rates)


def build_loads(measured, services):
    """The shapes with which each service keeps a second."""
    return [
        CapacityLoad(
            service.rate_hz,
            feasible_shapes(
                [p for p in measured if p.workload == service.workload],
                QuantileObjective(0.95, 1.0),
                idle_w=IDLE_W,
                start_s=0.0,
            ),
        )
        for service in services
    ]


@settings(deadline=None, max_examples=15)
@given(cases())
def test_what_lacks_suffices_and_less_does_not(case):
    measured, services, fleet = case
    pool = {model: gpus.count for model, gpus in fleet.items()}
    loads = build_loads(measured, services)
    lacks = missing_gpus(loads, pool)
    assert largest_factor(loads, {m: pool[m] + lacks.get(m, 0) for m in pool}).factor >= 1.0 - 1e-9
    missing = sum(lacks.values())
    if missing:
        for a in range(missing):  # every way to add one less
            fewer = {"a": pool["a"] + a, "b": pool["b"] + missing - 1 - a}
            assert largest_factor(loads, fewer).factor < 1.0


# GPUs of "a" are four-slice parts, those of "b" seven-slice ones of which nothing small was measured.
GEOMETRIES = {"a": load_catalogue().products["a30"].mig, "b": load_catalogue().products["h100-sxm5-80gb"].mig}
PROFILES = {"a": ("1g.6gb", "2g.12gb", "4g.24gb"), "b": ("2g.20gb", "3g.40gb", "4g.40gb")}


@cache
def _layouts_of(model):
    """Every multiset of profiles that can stand on one GPU: each set of places, judged by the catalogue."""
    geometry = GEOMETRIES[model]
    places = [(geometry.profile(name), start) for name in PROFILES[model] for start in geometry.profile(name).starts]
    found = set()
    for size in range(len(places) + 1):
        for some in itertools.combinations(places, size):
            if geometry.conflict(some) is None:
                names = Counter(profile.name for profile, _ in some)
                found.add(tuple(names[name] for name in PROFILES[model]))
    return sorted(found)


@cache
def _fewest_gpus(model, wanted, most):
    """The fewest GPUs that have the slices, in the order of PROFILES; infinite above `most`."""
    for gpus in range(most + 1):
        for some in itertools.combinations_with_replacement(_layouts_of(model), gpus):
            if all(sum(layout[at] for layout in some) >= count for at, count in enumerate(wanted)):
                return gpus
    return math.inf


def _gpus_and_watts(choice, fleet):
    """GPUs by model of some shapes' instances, and what partitioned ones draw more than unused ones."""
    used, added_w = {}, 0.0
    for model, pool in fleet.items():
        wanted = tuple(choice[SliceKind(model, name)] for name in PROFILES[model])
        partitioned = _fewest_gpus(model, wanted, pool.count)
        used[model] = choice[model] + partitioned
        added_w += 0.0 if math.isinf(partitioned) else partitioned * (pool.partitioned_w - pool.idle_w)
    return used, added_w


def _slice_choices(shapes, rate_hz, fleet):
    """What each choice of whole instances takes, its watts above idle if the rate is given, and its factor."""
    most, kinds = [], []
    for shape in shapes:
        where = shape[0].configuration
        kind = SliceKind(where.gpu_model, where.mig_profile) if where.mig_profile else where.gpu_model
        in_one = (
            max(layout[PROFILES[kind[0]].index(kind[1])] for layout in _layouts_of(kind[0])) if where.mig_profile else 0
        )
        most.append(fleet[where.gpu_model].count * in_one if in_one else fleet[where.gpu_model].count // where.gpus)
        kinds.append((kind, 1 if where.mig_profile else where.gpus))
    for counts in itertools.product(*(range(bound + 1) for bound in most)):
        taken = Counter()
        for count, (kind, gpus) in zip(counts, kinds, strict=True):
            taken[kind] += count * gpus
        given_hz = sum(n * max(p.throughput_hz for p in shape) for n, shape in zip(counts, shapes, strict=True))
        if given_hz < rate_hz:
            yield taken, None, given_hz / rate_hz
            continue
        if all(len(shape) == 1 for shape in shapes):
            watts = sum(count * shape[0].power_w for count, shape in zip(counts, shapes, strict=True))
        else:
            watts = _watts(shapes, counts, rate_hz)
        idle_w = sum(count * IDLE_W[kind] for kind, count in taken.items() if kind in IDLE_W)
        yield taken, watts - idle_w, given_hz / rate_hz


@st.composite
def sliced_points(draw, workload, batches):
    """One to three shapes, most of them slices, with a few points each."""
    found = []
    for number in range(draw(st.sampled_from([1, 2, 2, 3]))):
        model = draw(st.sampled_from("ab"))
        profile = draw(st.sampled_from((*PROFILES[model], "")))
        gpus = draw(st.integers(1, 2)) if not profile else 1
        least_w = 0.0 if profile else IDLE_W[model] * gpus
        for batch in range(1, draw(st.integers(1, batches)) + 1):
            hz, hundredths, watts = draw(st.tuples(st.integers(10, 60), st.integers(1, 4), st.integers(1, 150)))
            shape = Configuration(model, profile, gpus=gpus, batch=batch, label=str(number))
            found.append(Point(workload, shape, float(hz), {0.95: 0.01 * hundredths}, least_w + watts))
    return found


@st.composite
def sliced_cases(draw):
    services = [FrontierService(name, name, float(draw(st.integers(1, 80))), 0.95) for name in ("m", "n")]
    fleet = {
        model: FrontierPool(
            draw(st.sampled_from([0, 1, 2, 2, 3])),
            IDLE_W[model],
            GEOMETRIES[model],
            IDLE_W[model] + draw(st.sampled_from([0.0, 20.0, 120.0])),
        )
        for model in "ab"
    }
    # Sometimes training that runs on a slice, too.
    trained = draw(st.integers(0, 2)) == 0
    services = services[:1] if trained else services
    training = [FrontierTraining("t", "t", float(draw(st.integers(1, 60))))] if trained else []
    own = [replace(point, latency_s={}) for point in draw(sliced_points("t", 1))] if trained else []
    return [*(p for s in services for p in draw(sliced_points(s.name, 2))), *own], services, fleet, training


def _shapes_within(measured, name, latency_s):
    shapes = {}
    for point in measured:
        if point.workload == name and point.latency_s[0.95] <= latency_s:
            shapes.setdefault(replace(point.configuration, batch=0), []).append(point)
    return list(shapes.values())


def _training_shapes(measured, name):
    """As those of services, with an instance that is idle for part of the time."""
    shapes = {}
    for point in measured:
        if point.workload == name:
            shapes.setdefault(replace(point.configuration, batch=0), []).append(point)
    for where, mine in shapes.items():
        idle_w = 0.0 if where.mig_profile else IDLE_W[where.gpu_model] * where.gpus
        mine.append(Point(name, where, 0.0, {}, idle_w))
    return list(shapes.values())


@settings(deadline=None, max_examples=40)
@given(sliced_cases())
def test_with_slices_it_is_the_best_of_all_layouts(case):
    measured, services, fleet, training = case
    found = compute_frontier(measured, services, fleet, training=training)
    jobs = [list(_slice_choices(_training_shapes(measured, job.name), job.rate_hz, fleet)) for job in training]
    idle_w = sum(pool.count * pool.idle_w for pool in fleet.values())
    for row in found.rows:
        each = [
            list(_slice_choices(_shapes_within(measured, service.name, row.latency_s), service.rate_hz, fleet))
            for service in services
        ]
        least_w, factor, training_factor = math.inf, 0.0, 0.0
        for choice in itertools.product(*each, *jobs):
            used, added_w = _gpus_and_watts(sum((one[0] for one in choice), Counter()), fleet)
            if any(used[model] > pool.count for model, pool in fleet.items()):
                continue
            served = min(one[2] for one in choice[: len(services)])
            done = min((one[2] for one in choice[len(services) :]), default=math.inf)
            factor = max(factor, served if done >= 1.0 else 0.0)
            training_factor = max(training_factor, done if served >= 1.0 else 0.0)
            if None not in (watts := [one[1] for one in choice]):
                least_w = min(least_w, idle_w + sum(watts) + added_w)
        assert (row.plan is None) == (least_w == math.inf)
        assert row.factor == pytest.approx(factor, rel=1e-5)
        if training:
            assert row.training_factor == pytest.approx(training_factor, rel=1e-5)
        if row.plan is not None:
            assert row.plan.power_w == pytest.approx(least_w, rel=3e-5)
            _check_plan(row.plan, fleet)


def _check_plan(plan, fleet):
    """Whether a plan's slices lie in its layouts, these are valid, and the fleet has the GPUs."""
    whole, asked, given_slices = Counter(), Counter(), Counter()
    for placed in plan.placed:
        where = placed.configuration
        if where.mig_profile:
            asked[where.gpu_model, where.mig_profile] += placed.instances
        else:
            whole[where.gpu_model] += placed.instances * where.gpus
    for one in plan.partitioned:
        assert tuple(one.slices.get(name, 0) for name in PROFILES[one.gpu_model]) in _layouts_of(one.gpu_model)
        whole[one.gpu_model] += one.gpus
        for name, count in one.slices.items():
            given_slices[one.gpu_model, name] += count * one.gpus
    assert asked <= given_slices
    assert whole == plan.gpus
    assert all(count <= fleet[model].count for model, count in plan.gpus.items())


@settings(deadline=None, max_examples=25)
@given(sliced_cases())
def test_what_lacks_beside_slices_suffices_and_less_does_not(case):
    measured, services, fleet, _ = case
    pool = {model: gpus.count for model, gpus in fleet.items()}
    layouts = {model: build_slice_layouts(GEOMETRIES[model], PROFILES[model], 0.0) for model in fleet}
    loads = build_loads(measured, services)
    lacks = missing_gpus(loads, pool, layouts)
    missing = sum(lacks.values())
    enough = {model: pool[model] + lacks.get(model, 0) for model in pool}
    assert largest_factor(loads, enough, layouts=layouts).factor >= 1.0 - 1e-9
    for a in range(missing):  # every way to add one less
        fewer = {"a": pool["a"] + a, "b": pool["b"] + missing - 1 - a}
        assert largest_factor(loads, fewer, layouts=layouts).factor < 1.0


@settings(deadline=None)
@given(st.sampled_from("ab"), st.tuples(*(st.integers(0, 6) for _ in range(3))))
def test_slices_are_covered_by_the_fewest_gpus(model, wanted):
    layouts = {model: build_slice_layouts(GEOMETRIES[model], PROFILES[model], 0.0)}
    asked = {SliceKind(model, name): count for name, count in zip(PROFILES[model], wanted, strict=True)}
    fewest = sum(one.gpus for one in cover_slices(layouts, asked))
    if fewest <= 3:
        assert fewest == _fewest_gpus(model, wanted, 3)
    else:
        assert math.isinf(_fewest_gpus(model, wanted, 3))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(1.01, 3.0), st.just(0.0) | st.floats(1e-3, 0.6)), max_size=12), st.floats(1e-3, 1e3)
)
def test_the_knee_is_below_the_line_and_no_scale_moves_it(course, unit):
    rows = [RowCost(0.1, 5000.0, 1.0)]
    for longer, saved in course:
        rows.append(RowCost(rows[-1].latency_s * longer, rows[-1].power_w * (1.0 - saved), 1.0))
    knee = balanced_row(rows)
    assert balanced_row([RowCost(row.latency_s * unit, row.power_w / unit, row.factor) for row in rows]) == knee
    assert efficient_rows(rows)[knee]
    last = next(place for place, row in enumerate(rows) if row.power_w == rows[-1].power_w)
    # Geometry, by the distance of a point from the line through the two ends.
    if last == 0:
        assert knee == 0
        return
    wide = math.log(rows[last].latency_s / rows[0].latency_s)
    high = math.log(rows[0].power_w / rows[last].power_w)
    spots = [
        (math.log(r.latency_s / rows[0].latency_s) / wide, math.log(r.power_w / rows[last].power_w) / high)
        for r in rows[: last + 1]
    ]
    below = [(1.0 - x - y) / math.sqrt(2.0) for x, y in spots]
    assert below[knee] == pytest.approx(max(0.0, *below), abs=1e-6)
