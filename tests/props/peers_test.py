"""The policies of the openb comparison equal their naive twin, arrival by arrival, and know nothing of the future.

Run with NUMBA_DISABLE_JIT=1 as well: the same code, interpreted.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import naive, naive_lookahead, naive_openb

from eelgrid_kernels import argmin_index, baselines, node_states
from eelgrid_kernels import simulation as courses
from eelgrid_kernels.baselines import PlacementPolicy, find_policy

# A first call may compile; how long an example takes says nothing here.
quiet = settings(deadline=None, max_examples=60)

MODELS = 3
# Idle and busy watts of each model.
WATTS = [(10.0, 70.0), (30.0, 150.0), (50.0, 400.0)]
POLICIES = {
    "dotprod": ("dotprod", baselines.DOT_PROD, ()),
    "gpupacking": ("gpupacking", baselines.GPU_PACKING, ()),
    "gpuclustering": ("gpuclustering", baselines.GPU_CLUSTERING, ()),
    "bestfit": ("bestfit", baselines.BEST_FIT, ()),
    "fgd": ("mix", baselines.MIX, (0, 1000)),
    "pwr": ("mix", baselines.MIX, (1000, 0)),
    "pwr200": ("mix", baselines.MIX, (200, 800)),
    "pwr50": ("mix", baselines.MIX, (50, 950)),
    "eelgrid": ("eelgrid", baselines.EELGRID, (1.0, 80.0, 200.0)),
    "lookahead": ("eelgrid", baselines.EELGRID, tuple(find_policy("eelgrid").weights.tolist())),
}
ALL = {**POLICIES, "random": ("random", baselines.RANDOM, ())}


@dataclass
class Scene:
    machines: list
    tasks: list  # what can arrive
    mix: list  # (task number, weight)
    order: list  # task numbers


def machine(cpu_milli, memory, gpus, model, rank):
    idle_w, busy_w = WATTS[model]
    cards = [naive.Gpu(model, 1000, idle_w, busy_w) for _ in range(gpus)]
    return naive_openb.Machine(naive.Node(cpu_milli, cpu_milli, memory, cards), rank)


@st.composite
def tasks(draw):
    count = draw(st.sampled_from([0, 1, 1, 1, 1, 2, 4]))
    milli = 0 if count == 0 else 1000 if count > 1 else draw(st.sampled_from([100, 250, 460, 500, 810, 1000]))
    models = draw(st.none() | st.sets(st.integers(0, MODELS - 1), min_size=1)) if count else None
    cpu_milli = draw(st.sampled_from([0, 500, 3000, 4000, 8000, 12_000, 32_000]))
    return naive.Task(cpu_milli, draw(st.integers(0, 3)), count, milli, models)


@st.composite
def scenes(draw):
    count = draw(st.integers(1, 7))
    ranks = draw(st.permutations(range(count)))
    shape = st.tuples(
        st.sampled_from([8000, 31_000, 64_000, 96_000]),
        st.integers(2, 40),
        st.integers(0, 4),
        st.integers(0, MODELS - 1),
    )
    # Few shapes, so that nodes share states.
    shapes = draw(st.lists(shape, min_size=1, max_size=3))
    machines = [machine(*draw(st.sampled_from(shapes)), rank) for rank in ranks]
    kinds = draw(st.lists(tasks(), min_size=1, max_size=6))
    numbers = st.integers(0, len(kinds) - 1)
    mix = draw(st.lists(st.tuples(numbers, st.integers(1, 1000)), max_size=5))
    return Scene(machines, kinds, mix, draw(st.lists(numbers, max_size=30)))


def columns(scene):
    nodes = [entry.node for entry in scene.machines]
    first = [node.gpus[0] if node.gpus else naive.Gpu(-1, 0, 0.0, 0.0) for node in nodes]
    fleet = SimpleNamespace(
        cpu_milli=np.array([node.cpu_capacity for node in nodes]),
        memory_mib=np.array([node.memory_free for node in nodes]),
        gpu_count=np.array([len(node.gpus) for node in nodes]),
        model=np.array([gpu.model for gpu in first]),
        idle_w=np.array([gpu.idle_w for gpu in first]),
        busy_w=np.array([gpu.busy_w for gpu in first]),
    )
    allows = [[task.models is None or model in task.models for model in range(MODELS)] for task in scene.tasks]
    specs = SimpleNamespace(
        cpu_milli=np.array([task.cpu_milli for task in scene.tasks]),
        memory_mib=np.array([task.memory_bytes for task in scene.tasks]),
        gpu_count=np.array([task.gpu_count for task in scene.tasks]),
        gpu_milli=np.array([task.gpu_milli for task in scene.tasks]),
        allows=np.array(allows, np.int64),
    )
    mix = np.array(scene.mix, np.int64).reshape(-1, 2)
    return fleet, specs, (mix[:, 0], mix[:, 1])


def policy_of(name):
    _, code, weights = ALL[name]
    return PlacementPolicy(name, code, np.array(weights, np.float64))


def prepared(scene, name):
    ranks = np.array([entry.rank for entry in scene.machines])
    return courses.build_empty_engine(*columns(scene), ranks, policy_of(name))


def run(scene, name, order=None):
    order = np.array(scene.order if order is None else order, np.int64)
    return courses.simulate_arrivals(prepared(scene, name), order)


@pytest.mark.parametrize("name", POLICIES)
@quiet
@given(scene=scenes())
def test_every_policy_equals_its_naive_twin(name, scene):
    course = run(scene, name)
    twin, _, weights = POLICIES[name]
    mix = [naive.Class(scene.tasks[number], weight) for number, weight in scene.mix]
    arrivals = [scene.tasks[number] for number in scene.order]
    expected = naive_openb.run(deepcopy(scene.machines), arrivals, mix, twin, weights)
    assert course.node.tolist() == expected.nodes
    assert course.placed.tolist() == [node >= 0 for node in expected.nodes]
    assert course.power_w.tolist() == expected.power_w
    assert course.arrived_milli.tolist() == expected.arrived
    assert course.allocated_milli.tolist() == expected.allocated


def test_quotes_stand_between_times_on_a_larger_fleet():
    """Small tasks on 40 nodes: some 30 come between quotes, and offers are not those of the cheapest node alone."""
    scene = generated()
    scene.tasks = [
        replace(task, cpu_milli=task.cpu_milli // 4, gpu_milli=max(1, task.gpu_milli // 20))
        if task.gpu_count == 1
        else replace(task, cpu_milli=task.cpu_milli // 4)
        for task in scene.tasks
    ]
    scene.mix = [(number, weight * (1 if scene.tasks[number].gpu_count < 2 else 0) + 1) for number, weight in scene.mix]
    _, _, weights = POLICIES["lookahead"]
    mix = [naive.Class(scene.tasks[number], weight) for number, weight in scene.mix]
    arrivals = [scene.tasks[number] for number in scene.order[:150]]
    twin = naive_openb.run(deepcopy(scene.machines), arrivals, mix, "eelgrid", weights)
    assert naive_lookahead.horizon([machine.node for machine in scene.machines], mix) // 10 > 2
    assert run(scene, "lookahead", scene.order[:150]).node.tolist() == twin.nodes


@quiet
@given(scenes())
def test_random_places_whatever_fits_and_only_where_it_fits(scene):
    course = run(scene, "random")
    slots = prepared(scene, "random")
    nodes = [entry.node for entry in scene.machines]
    for moment, number in enumerate(scene.order):
        task = scene.tasks[number]
        chosen = argmin_index.place_task(slots, number, moment)
        assert chosen == course.node[moment]
        fitting = [index for index, node in enumerate(nodes) if naive.verdict(node, task) is None]
        assert chosen in fitting or (chosen == -1 and not fitting)
        if chosen < 0:
            continue
        left = gpus(slots, chosen)
        reachable = [naive.placed(nodes[chosen], choice, task) for choice in naive.choices(nodes[chosen], task)]
        width = len(nodes[chosen].gpus)
        (nodes[chosen],) = [
            node
            for i, node in enumerate(reachable)
            if [gpu.free for gpu in node.gpus] == left[:width] and node not in reachable[:i]
        ]
    assert course.power_w.tolist()[-1:] == [sum(map(naive.node_power, nodes))][: len(scene.order)]


def test_random_goes_everywhere_about_equally():
    """400 tasks on 4 nodes, half of one state: no node and no GPU is favoured."""
    machines = [machine(96_000, 1000, 4, 0, rank) for rank in range(4)]
    machines[2].node.cpu_capacity = machines[2].node.cpu_free = 64_000
    scene = Scene(machines, [naive.Task(100, 1, 1, 10)], [(0, 1)], [0] * 400)
    counts = np.bincount(run(scene, "random").node)
    assert counts.sum() == 400
    assert counts.min() > 65  # 100 each but for four standard deviations


@pytest.mark.parametrize("name", ALL)
@quiet
@given(scene=scenes(), random=st.randoms(use_true_random=False), split=st.integers(0, 30))
def test_no_policy_knows_the_future(name, scene, random, split):
    split = min(split, len(scene.order))
    future = random.sample(scene.order[split:], len(scene.order) - split)
    straight, other = run(scene, name), run(scene, name, scene.order[:split] + future)
    assert straight.node[:split].tolist() == other.node[:split].tolist()
    assert straight.power_w[:split].tolist() == other.power_w[:split].tolist()


@pytest.mark.parametrize("name", POLICIES)
@quiet
@given(scene=scenes(), random=st.randoms(use_true_random=False))
def test_the_order_of_the_fleet_decides_nothing(name, scene, random):
    order = list(range(len(scene.machines)))
    random.shuffle(order)
    turned = Scene([scene.machines[index] for index in order], scene.tasks, scene.mix, scene.order)
    found = [order[node] if node >= 0 else -1 for node in run(turned, name).node]
    assert run(scene, name).node.tolist() == found


@quiet
@given(scenes(), st.sampled_from(sorted(ALL)), st.integers(0, 30))
def test_a_course_in_two_pieces_is_the_course(scene, name, split):
    split = min(split, len(scene.order))
    slots, order, pieces = (
        prepared(scene, name),
        np.array(scene.order, np.int64),
        courses.build_empty_outcomes(len(scene.order)),
    )
    argmin_index.place_arrivals(slots, order, pieces, 0, split)
    argmin_index.place_arrivals(slots, order, pieces, split, len(order))
    assert all((ours == theirs).all() for ours, theirs in zip(pieces, run(scene, name), strict=True))


@quiet
@given(scenes(), st.sampled_from(sorted(ALL)))
def test_nodes_share_a_state_exactly_when_they_are_alike(scene, name):
    slots = prepared(scene, name)
    for moment, number in enumerate(scene.order):
        argmin_index.place_task(slots, number, moment)
    table, members = slots.states, slots.nodes
    listed = {}
    for row in np.flatnonzero(table["root"] >= 0):
        state = table[row]
        found = in_order(members, state.root)
        for node in found:
            assert members[node].state == row
            listed[node] = (members[node].shape_row, state.cpu_free, state.tags, *gpus(slots, node))
        ranks = members["rank"][found].tolist()
        assert ranks == sorted(ranks)
        assert members[state.root].most_memory == max(members["memory"][found])
    assert len(listed) == len(scene.machines)
    assert len(set(listed.values())) == (table["root"] >= 0).sum()


def gpus(run, node):
    """What is free on its GPUs."""
    return run.gpu_free[run.nodes[node].state].tolist()


def in_order(members, root):
    """The nodes of a tree."""
    if root < 0:
        return []
    return [*in_order(members, members[root].left), root, *in_order(members, members[root].right)]


def in_one_bucket(scene, name):
    """The empty fleet with all states in one bucket of the table."""
    one = prepared(scene, name)
    one.nodes["state"] = -1
    one.states["root"] = -1
    for count in ("rows", "spare_rows", "log_entries"):
        one.scalars[count] = 0
    one = one._replace(bucket=np.full(1, -1, np.int64))
    node_states.settle_nodes(one, np.arange(len(scene.machines)))
    return one


@quiet
@given(scenes(), st.sampled_from(sorted(ALL)))
def test_one_bucket_gives_the_same_course(scene, name):
    course, order = courses.build_empty_outcomes(len(scene.order)), np.array(scene.order, np.int64)
    argmin_index.place_arrivals(in_one_bucket(scene, name), order, course, 0, len(order))
    assert course.node.tolist() == run(scene, name).node.tolist()


def test_states_in_one_bucket_are_told_apart_by_model_and_by_what_they_hold():
    machines = [machine(96_000, 100, 4, model, rank) for rank, model in enumerate([0, 0, 1, 1])]
    scene = Scene(machines, [naive.Task(0, 0, 1, 1000, {0}), naive.Task(0, 0, 2, 1000)], [(0, 1)], [])
    one = in_one_bucket(scene, "gpuclustering")
    first, second, third, fourth = one.nodes["state"].tolist()
    assert first == second != third == fourth
    # Two single GPUs on the first; a pair on the next that is idle: as much is free, but of another kind.
    assert [argmin_index.place_task(one, number, 0) for number in (0, 0, 1)] == [0, 0, 1]
    assert gpus(one, 0) == gpus(one, 1)
    assert one.nodes[0].state != one.nodes[1].state


def test_clustering_prefers_its_own_kind_then_a_mixed_node_then_an_idle_one():
    machines = [machine(96_000, 100, gpus, model, rank) for rank, (gpus, model) in enumerate([(1, 1), (8, 0), (8, 2)])]
    share, pair = naive.Task(0, 0, 1, 100), naive.Task(0, 0, 2, 1000)
    only = [naive.Task(0, 0, 1, 100, {0}), naive.Task(0, 0, 2, 1000, {0}), naive.Task(0, 0, 2, 1000, {2})]
    scene = Scene(machines, [share, pair, *only], [(0, 1)], [2, 3, 0, 4, 1])
    # A share and a pair on the second node; a share joins that mix, 50 + 6, not the idle first, 25 + 21;
    # a pair on the third; then a pair goes where there are only pairs, 75 + 6, not to the mix, 50 + 6.
    assert run(scene, "gpuclustering").node.tolist() == [1, 1, 1, 2, 2]


def test_a_small_difference_counts_after_scaling():
    """Best fit: scores two apart become 100 and 0, so that the fuller node wins against the lower rank."""
    machines = [machine(cpu_milli, 100, 1, 0, rank) for rank, cpu_milli in enumerate([96_000, 92_000])]
    scene = Scene(machines, [naive.Task(1000, 0, 0, 0)], [(0, 1)], [0])
    assert run(scene, "bestfit").node.tolist() == [1]


def generated():
    """40 nodes and 400 tasks of 12 kinds, from a generator written out here, so that it stays what it is."""
    word = 1

    def draw(most):
        nonlocal word
        word = (word * 6364136223846793005 + 1442695040888963407) % 2**64
        return (word >> 33) % most

    shapes = [(96_000, 512, 4, 0), (64_000, 512, 2, 1), (128_000, 768, 8, 2), (31_000, 128, 1, 2)]
    machines = [machine(*shapes[draw(4)], rank) for rank in range(40)]
    kinds = []
    for _ in range(12):
        count = (0, 1, 1, 1, 1, 2, 4)[draw(7)]
        milli = 0 if count == 0 else 1000 if count > 1 else (100, 250, 460, 500, 810, 1000)[draw(6)]
        models = {draw(3), draw(3)} if count and draw(3) == 0 else None
        kinds.append(naive.Task(1000 * draw(17), 4 * draw(9), count, milli, models))
    mix = [(number, 1 + draw(50)) for number in range(10)]
    return Scene(machines, kinds, mix, [draw(12) for _ in range(400)])


GOLDEN = {
    # (placed, milli-GPU, watts at the end, checksum of the nodes)
    "dotprod": (303, 182_660, 72080.0, 1371723014),
    "gpupacking": (297, 155_750, 61580.0, 831195306),
    "gpuclustering": (287, 144_040, 58100.0, 4160053118),
    "bestfit": (302, 185_940, 72490.0, 2509629049),
    "fgd": (305, 169_230, 70780.0, 3709311051),
    "pwr": (299, 169_930, 66890.0, 2606627444),
    "pwr200": (301, 174_590, 68640.0, 3815341624),
    "pwr50": (301, 174_790, 69340.0, 526948275),
    "eelgrid": (303, 185_140, 72490.0, 2433750061),
    "lookahead": (302, 181_300, 71320.0, 393553217),
    "random": (303, 169_010, 71140.0, 3301665250),
}


@pytest.mark.parametrize("name", ALL)
def test_the_golden_run(name):
    """What each policy did when it was checked against the published results; a change must be meant."""
    course = run(generated(), name)
    placed, allocated = int(course.placed.sum()), int(course.allocated_milli[-1])
    assert (placed, allocated, course.power_w[-1], crc32(course.node.tobytes())) == GOLDEN[name]
