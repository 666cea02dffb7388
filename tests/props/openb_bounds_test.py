"""The bounds against every placement that there is on fleets small enough to try them all."""

import math
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from bench.openb.bounds import Held, Relaxation, bounds_of, shapes_of
from bench.openb.cutting_stock import PRICE_STEP, SharePrices, dearest_pattern
from bench.openb.traces import load_trace
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import naive

from eelgrid_controller.replay.openb_protocol import TaskSpecs, TraceFleet

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "openb"
# What HiGHS may miss a constraint by, in watts or milli-GPU of fleets this small.
SLACK = 1e-3
quiet = settings(deadline=None)

MODELS = 2
WATTS = [(10.0, 70.0), (30.0, 300.0)]


@st.composite
def nodes(draw):
    cpu_milli = draw(st.sampled_from([8000, 16_000, 31_000, 64_000, 82_000]))
    memory = draw(st.sampled_from([64, 100, 1000]))
    model = draw(st.integers(0, MODELS - 1))
    gpus = [naive.Gpu(model, 1000, *WATTS[model]) for _ in range(draw(st.integers(0, 2)))]
    return naive.Node(cpu_milli, cpu_milli, memory, [*gpus, *[None] * (2 - len(gpus))])


@st.composite
def tasks(draw):
    count = draw(st.sampled_from([0, 1, 1, 1, 1, 2]))
    milli = 0 if count == 0 else 1000 if count > 1 else draw(st.sampled_from([140, 300, 340, 460, 510, 600, 1000]))
    models = draw(st.none() | st.none() | st.sets(st.integers(0, MODELS - 1), min_size=1)) if count else None
    cpu_milli = draw(st.sampled_from([0, 1000, 5000, 9000, 16_000, 33_000]))
    return naive.Task(cpu_milli, draw(st.sampled_from([1, 20, 40, 51])), count, milli, models)


FLEETS = st.lists(nodes(), min_size=1, max_size=3)
WORK = st.lists(tasks(), min_size=1, max_size=5)


SHARE, WHOLE = naive.Task(5000, 1, 1, 500, None), naive.Task(5000, 1, 1, 1000, None)
ANY, FRUGAL = naive.Task(1000, 1, 1, 1000, None), naive.Task(1000, 1, 1, 1000, {0})


def one_node_of_each_kind():
    """A GPU of 60 W over idle, and one of 270."""
    return [naive.Node(32_000, 32_000, 100, [naive.Gpu(m, 1000, *WATTS[m]), None]) for m in range(MODELS)]


def relaxation(fleet, work, **options):
    """The bounds' view of the same fleet, and a spec for each task."""
    first = [next(iter([gpu for gpu in node.gpus if gpu]), None) for node in fleet]
    arrays = TraceFleet(
        cpu_milli=np.array([node.cpu_capacity for node in fleet]),
        memory_mib=np.array([node.memory_free for node in fleet]),
        gpu_count=np.array([sum(gpu is not None for gpu in node.gpus) for node in fleet]),
        model=np.array([gpu.model if gpu else -1 for gpu in first]),
        idle_w=np.array([gpu.idle_w if gpu else 0.0 for gpu in first]),
        busy_w=np.array([gpu.busy_w if gpu else 0.0 for gpu in first]),
    )
    specs = TaskSpecs(
        cpu_milli=np.array([task.cpu_milli for task in work]),
        memory_mib=np.array([task.memory_bytes for task in work]),
        gpu_count=np.array([task.gpu_count for task in work]),
        gpu_milli=np.array([task.gpu_milli for task in work]),
        allows=np.array([[task.models is None or model in task.models for model in range(MODELS)] for task in work]),
    )
    return Relaxation(shapes_of(arrays), specs, **options)


def outcomes(fleet, work):
    """(watts, milli-GPU allocated, whether all are placed) of every way to place or refuse the tasks."""
    states = [(fleet, 0, True)]
    for task in work:
        seen = {}
        for cluster, held, complete in states:
            seen[repr(cluster), held, False] = (cluster, held, False)
            for index, node in enumerate(cluster):
                if naive.verdict(node, task) is None:
                    for slots in naive.choices(node, task):
                        after = [*cluster[:index], naive.placed(node, slots, task), *cluster[index + 1 :]]
                        more = held + task.gpu_count * task.gpu_milli
                        seen[repr(after), more, complete] = (after, more, complete)
        states = list(seen.values())
    return [(sum(map(naive.node_power, cluster)), held, complete) for cluster, held, complete in states]


def courses(fleet, arrivals):
    """(watts, GPU and CPU of tasks without GPU held) after each step, for every way to place or refuse without moves."""
    states = [(fleet, 0, 0, ())]
    for batch in arrivals:
        for task in batch:
            seen = {}
            for cluster, gpu, cpu, told in states:
                seen[repr(cluster), gpu, cpu, told] = (cluster, gpu, cpu, told)
                for index, node in enumerate(cluster):
                    if naive.verdict(node, task) is None:
                        for slots in naive.choices(node, task):
                            after = [*cluster[:index], naive.placed(node, slots, task), *cluster[index + 1 :]]
                            more = gpu + task.gpu_count * task.gpu_milli
                            cores = cpu + (0 if task.gpu_count else task.cpu_milli)
                            seen[repr(after), more, cores, told] = (after, more, cores, told)
            states = list(seen.values())
        states = [
            (cluster, gpu, cpu, (*told, (sum(map(naive.node_power, cluster)), Held(gpu, cpu))))
            for cluster, gpu, cpu, told in states
        ]
    return [told for _, _, _, told in states]


@quiet
@example((one_node_of_each_kind(), [[SHARE], [SHARE, WHOLE]]))
@given(
    st.tuples(
        st.lists(nodes(), min_size=1, max_size=2), st.lists(st.lists(tasks(), max_size=2), min_size=2, max_size=2)
    )
)
def test_no_course_without_migration_passes_the_joint_bound(case):
    fleet, arrivals = case
    work = [task for batch in arrivals for task in batch]
    if not work:
        return
    found = courses(fleet, arrivals)
    first = len(arrivals[0])
    counts = np.array([[1] * first + [0] * (len(work) - first), [1] * len(work)])
    bounds, weights = relaxation(fleet, work), np.array([0.75, 0.25])
    for held in {tuple(held for _, held in told) for told in found}:
        least_w = min(
            weights @ [watts for watts, _ in told]
            for told in found
            if all(
                h.gpu_milli >= g.gpu_milli and h.cpu_milli >= g.cpu_milli for (_, h), g in zip(told, held, strict=True)
            )
        )
        assert bounds.course_power_w(counts, held, weights) <= least_w + SLACK
        alone = sum(w * bounds.power_w(c, h.gpu_milli) for w, c, h in zip(weights, counts, held, strict=True))
        assert bounds.course_power_w(counts, held, weights) >= alone - SLACK


def test_what_saves_at_first_is_paid_for_later_without_migration():
    """The frugal model is the only one that the second task may use: it must stay free, or be moved."""
    fleet = one_node_of_each_kind()
    bounds, counts = relaxation(fleet, [ANY, FRUGAL]), np.array([[1, 0], [1, 1]])
    held, weights = (Held(1000, 0), Held(2000, 0)), np.array([1.0, 1.0])
    least_w = min(sum(w for w, _ in told) for told in courses(fleet, [[ANY], [FRUGAL]]) if told[1][1].gpu_milli == 2000)
    assert bounds.course_power_w(counts, held, weights) == pytest.approx(least_w)
    # Each load alone would have the first task on the frugal GPU, and move it: 210 W less at the first load.
    alone = sum(bounds.power_w(count, hold.gpu_milli) for count, hold in zip(counts, held, strict=True))
    assert least_w - alone == pytest.approx(210.0)


def one_gpu(share):
    node = naive.Node(64_000, 64_000, 1000, [naive.Gpu(0, 1000, 10.0, 70.0), naive.Gpu(0, 1000, 10.0, 70.0)])
    return [node, node], [naive.Task(1000, 1, 1, share)] * 3


@quiet
@example(one_gpu(600))
@example(one_gpu(500))
@given(st.tuples(FLEETS, WORK))
def test_no_placement_passes_the_bounds(case):
    fleet, work = case
    found = outcomes(fleet, work)
    bounds, ones = relaxation(fleet, work), np.ones(len(work), np.int64)
    power_w = bounds.power_w(ones)
    assert power_w <= min((watts for watts, _, complete in found if complete), default=math.inf) + SLACK
    most = max(held for _, held, _ in found)
    assert most - SLACK <= bounds.allocated_milli(ones, whole=True) <= bounds.allocated_milli(ones) + SLACK
    for level in {held for _, held, _ in found}:
        least_w = min(watts for watts, held, _ in found if held >= level)
        assert bounds.power_w(ones, level) <= least_w + SLACK
    assert bounds.idle_w <= sum(map(naive.node_power, fleet)) + SLACK


@quiet
@given(FLEETS, WORK)
def test_prices_bound_no_looser_than_volume(fleet, work):
    ones = np.ones(len(work), np.int64)
    volume, prices = relaxation(fleet, work, cutting=False), relaxation(fleet, work)
    assert prices.power_w(ones) >= volume.power_w(ones) - SLACK
    assert prices.allocated_milli(ones) <= volume.allocated_milli(ones) + SLACK


@quiet
@given(FLEETS, WORK, st.data())
def test_more_work_never_lowers_a_bound(fleet, work, data):
    bounds = relaxation(fleet, work)
    counts = np.zeros(len(work), np.int64)
    power_w, allocated = bounds.power_w(counts), bounds.allocated_milli(counts)
    assert (power_w, allocated) == (pytest.approx(bounds.idle_w), pytest.approx(0.0))
    for _ in range(4):
        before = counts.copy()
        counts += np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(work), max_size=len(work))))
        more_w, more = bounds.power_w(counts), bounds.allocated_milli(counts)
        assert more_w >= power_w - SLACK
        # By the cuts of both: a bound that was found with fewer may have been looser.
        assert more >= bounds.allocated_milli(before) - SLACK
        power_w = more_w


def test_three_shares_of_600_need_three_gpus():
    fleet, work = one_gpu(600)
    ones = np.ones(3, np.int64)
    busy_w, package_w = 60.0, 105.0 * 3000 / 32_000
    node_w = 105.0 * 3 / 2  # three GPUs are of a node and a half, and a node at work has a package at work
    volume, prices = relaxation(fleet, work, cutting=False), relaxation(fleet, work)
    assert prices.idle_w == sum(map(naive.node_power, fleet))
    assert volume.power_w(ones) == pytest.approx(volume.idle_w + 1.8 * busy_w + package_w)
    assert prices.power_w(ones) == pytest.approx(prices.idle_w + 3 * busy_w + node_w)
    # Four GPUs hold four of them, though five are less than four GPUs of volume.
    assert volume.allocated_milli(ones * 2) == pytest.approx(3600)
    assert prices.allocated_milli(ones * 2) == pytest.approx(2400)


def test_what_does_not_fit_has_no_least_power():
    fleet, work = one_gpu(1000)
    assert math.isinf(relaxation(fleet, work).power_w(np.full(3, 2)))
    assert relaxation(fleet, work).allocated_milli(np.full(3, 2)) == pytest.approx(4000)


def patterns(sizes):
    """Every multiset of sizes that fits one GPU."""
    return [counts for counts in product(*[range(1000 // size + 1) for size in sizes]) if np.dot(counts, sizes) <= 1000]


SIZES = st.lists(
    st.sampled_from([125, 200, 270, 330, 350, 460, 500, 501, 810, 1000]), min_size=1, max_size=4, unique=True
)


@quiet
@given(SIZES, st.data())
def test_the_dearest_pattern_is_the_dearest_of_all(sizes, data):
    values = np.array(data.draw(st.lists(st.integers(0, 100), min_size=len(sizes), max_size=len(sizes))), np.float64)
    worth, pattern = dearest_pattern(np.array(sizes), values)
    assert worth == pytest.approx(max(np.dot(counts, values) for counts in patterns(sizes)))
    assert np.dot(pattern, values) == pytest.approx(worth)
    assert np.dot(pattern, sizes) <= 1000


@quiet
@given(SIZES, st.data())
def test_prices_never_make_a_gpu_worth_more_than_itself_and_ask_for_what_packing_needs(sizes, data):
    market = SharePrices(np.array(sizes))
    for _ in range(2):  # the second with the patterns of the first
        counts = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
        prices = market.best(np.array(counts, np.float64))
        assert (prices >= 0.0).all()
        assert max(np.dot(pattern, prices) for pattern in patterns(sizes)) <= 1.0 + 1e-9
        needed = float(prices @ counts)
        rounded = PRICE_STEP * sum(counts)  # each price is rounded down
        assert needed >= np.dot(sizes, counts) / 1000 - 1e-6 - rounded
        assert needed <= first_fit(sizes, counts) + 1e-6


def first_fit(sizes, counts):
    """GPUs that a simple packing uses: more than any bound may ask for."""
    free = []
    for size, count in sorted(zip(sizes, counts, strict=True), reverse=True):
        for _ in range(count):
            place = next((index for index, room in enumerate(free) if room >= size), None)
            if place is None:
                free.append(1000 - size)
            else:
                free[place] -= size
    return len(free)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no openb trace in {DATA}; set EELGRID_DATA")
def test_the_default_trace_is_bounded_as_computed_independently():
    """Watts and allocation of the default list worked out by another LP, of other shuffles: one per cent apart."""
    trace = load_trace(DATA, "default")
    bounds = bounds_of(trace, [42], [0.1, 0.4, 0.8])
    assert bounds.power_w / 1e3 == pytest.approx([301.4, 609.2, 1035.3], rel=0.01)
    assert bounds.allocated_1 == pytest.approx(0.969, abs=0.002)
    assert bounds.x.tolist() == [0.1, 0.4, 0.8]
