"""The placement kernels equal their naive twins, whatever the cluster; and they keep to their symmetries.

Run with NUMBA_DISABLE_JIT=1 as well: the same code, interpreted.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests import naive

from eelgrid_kernels.arrays import Mix, Nodes, Task
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.candidates import CandidateIndex
from eelgrid_kernels.node_cost import (
    CONSTRAINTS,
    GPU_ABSENT,
    GPU_PARTITIONED,
    GPU_PLACEABLE,
    cluster_power,
    count_verdicts,
    node_fragmentation,
    node_power,
    refresh_fragmentation,
    replica_room,
)
from eelgrid_kernels.warmup import warm_kernels

# A first call may compile; how long an example takes says nothing here.
quiet = settings(deadline=None)

MODELS = 3
SORTS = np.zeros(9, np.int64)
SORTS.flags.writeable = False
# Watts in whole numbers and prices in powers of two: every cost is exact, so that ties are ties on both sides.
WATTS = st.sampled_from([(10.0, 70.0), (30.0, 150.0), (30.0, 300.0), (50.0, 400.0)])
PRICES = st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 64.0, 256.0])] * 3)
CPU = st.sampled_from([0, 500, 1000, 3000, 4000, 8000, 12_000, 32_000, 64_000, 96_000])
MILLI = st.sampled_from([1, 100, 250, 460, 500, 750, 1000])


@st.composite
def gpus(draw):
    idle_w, busy_w = draw(WATTS)
    return naive.Gpu(
        model=draw(st.integers(0, MODELS - 1)),
        free=draw(st.sampled_from([0, 100, 250, 500, 540, 900, 1000, 1000])),
        idle_w=idle_w,
        busy_w=busy_w,
        partitioned=draw(st.booleans()) and draw(st.booleans()),
    )


@st.composite
def nodes(draw):
    capacity = draw(st.sampled_from([8000, 31_000, 64_000, 96_000, 128_000]))
    return naive.Node(
        cpu_capacity=capacity,
        cpu_free=draw(st.integers(0, capacity // 500)) * 500,
        memory_free=draw(st.integers(0, 64)) * 2**30,
        gpus=draw(st.lists(st.none() | gpus(), min_size=4, max_size=4)),
        available=draw(st.integers(0, 9)) > 0,
        rank=draw(st.integers(0, 3)),
    )


@st.composite
def tasks(draw):
    count = draw(st.integers(0, 4))
    milli = 0 if count == 0 else 1000 if count > 1 else draw(MILLI)
    models = draw(st.none() | st.sets(st.integers(0, MODELS - 1), min_size=1)) if count else None
    memory = draw(st.integers(0, 16)) * 2**30
    return naive.Task(draw(CPU), memory, count, milli, models)


CLUSTERS = st.lists(nodes(), min_size=1, max_size=9)
MIXES = st.lists(st.builds(naive.Class, tasks(), st.integers(1, 1000)), max_size=12)


def frozen(values, dtype):
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array


def arrays(cluster):
    def each(get, empty, dtype):
        return frozen([[get(gpu) if gpu else empty for gpu in node.gpus] for node in cluster], dtype)

    return Nodes(
        available=frozen([node.available for node in cluster], np.bool_),
        cpu_capacity=frozen([node.cpu_capacity for node in cluster], np.int64),
        cpu_free=frozen([node.cpu_free for node in cluster], np.int64),
        memory_free=frozen([node.memory_free for node in cluster], np.int64),
        gpu_state=each(lambda gpu: GPU_PARTITIONED if gpu.partitioned else GPU_PLACEABLE, GPU_ABSENT, np.uint8),
        gpu_model=each(lambda gpu: gpu.model, -1, np.int64),
        gpu_free=each(lambda gpu: gpu.free, 0, np.int64),
        gpu_idle_w=each(lambda gpu: gpu.idle_w, 0.0, np.float64),
        gpu_busy_w=each(lambda gpu: gpu.busy_w, 0.0, np.float64),
        rank=frozen([node.rank for node in cluster], np.int64),
    )


def mix_arrays(mix):
    allows = [[entry.task.models is None or model in entry.task.models for entry in mix] for model in range(MODELS)]
    return Mix(
        cpu_milli=frozen([entry.task.cpu_milli for entry in mix], np.int64),
        gpu_count=frozen([entry.task.gpu_count for entry in mix], np.int64),
        gpu_milli=frozen([entry.task.gpu_milli for entry in mix], np.int64),
        allows=frozen(allows, np.int64),
        weight=frozen([entry.weight for entry in mix], np.int64),
        total=max(1, sum(entry.weight for entry in mix)),
    )


def allowed(task):
    return frozen([task.models is None or model in task.models for model in range(MODELS)], np.int64)


def kernel_task(task):
    return Task(task.cpu_milli, task.memory_bytes, task.gpu_count, task.gpu_milli)


def fragments_of(cluster, mix):
    fragments = np.zeros(len(cluster), np.int64)
    refresh_fragmentation(arrays(cluster), mix_arrays(mix), np.arange(len(cluster)), fragments)
    return fragments


def candidates_of(cluster, mix, prices):
    policy = find_policy("eelgrid")._replace(weights=np.array(prices))
    return CandidateIndex(arrays(cluster), mix_arrays(mix), SORTS, policy)


def weigh(cluster, mix, task, prices, *, candidates=None):
    candidates = candidates or candidates_of(cluster, mix, prices)
    found = [
        naive.Found(choice.node, list(choice.slots), sum(terms_w), terms_w)
        for choice in candidates.best_candidates(candidates.register_kind(kernel_task(task), allowed(task)), 0, 4)
        for terms_w in [tuple(price * term for price, term in zip(prices, choice.terms[:3], strict=True))]
    ]
    feasible, *removed = candidates.count_verdicts(arrays(cluster), kernel_task(task), allowed(task))
    counts = np.zeros(1 + len(CONSTRAINTS), np.int64)
    count_verdicts(arrays(cluster), kernel_task(task), allowed(task), counts)
    assert counts.tolist() == [feasible, *removed]
    return naive.Result(found, feasible, {name: n for name, n in zip(CONSTRAINTS, removed, strict=True) if n})


def close(left, right):
    """Equal but for the last bits of a sum: the same places at the same costs."""
    assert (left.feasible, left.removed) == (right.feasible, right.removed)
    for ours, theirs in zip(left.candidates, right.candidates, strict=True):
        assert ours.cost_w == pytest.approx(theirs.cost_w, abs=1e-9)
        assert ours.terms_w == pytest.approx(theirs.terms_w, abs=1e-9)
    return True


@quiet
@given(CLUSTERS, MIXES, tasks(), PRICES)
def test_best_candidates_equal_the_naive_twin(cluster, mix, task, prices):
    ours, theirs = weigh(cluster, mix, task, prices), naive.best_candidates(cluster, task, mix, prices)
    close(ours, theirs)
    costs = [found.cost_w for found in theirs.candidates]
    if all(abs(a - b) > 1e-6 for a, b in pairwise(costs)):
        assert [found.node for found in ours.candidates] == [found.node for found in theirs.candidates]
    for found in ours.candidates:
        # Whatever was chosen costs what it says, and no other choice on the node is cheaper.
        node = cluster[found.node]
        assert naive.cost(node, found.slots, task, mix, prices)[0] == pytest.approx(found.cost_w, abs=1e-9)
        cheapest = min(naive.cost(node, slots, task, mix, prices)[0] for slots in naive.choices(node, task))
        assert found.cost_w == pytest.approx(cheapest, abs=1e-9)


@quiet
@given(CLUSTERS, MIXES)
def test_fragmentation_and_power_equal_the_naive_twins(cluster, mix):
    nodes_, mix_ = arrays(cluster), mix_arrays(mix)
    for index, node in enumerate(cluster):
        assert node_fragmentation(nodes_, mix_, index) == naive.fragmentation(node, mix)
        assert node_power(nodes_, index) == pytest.approx(naive.node_power(node))
    assert list(fragments_of(cluster, mix)) == [naive.fragmentation(node, mix) for node in cluster]
    assert cluster_power(nodes_) == pytest.approx(sum(map(naive.node_power, cluster)))


@quiet
@given(CLUSTERS, tasks(), st.integers(1, 40))
def test_replica_room_equals_placing_one_after_another(cluster, task, most):
    assume(task.cpu_milli or task.memory_bytes or task.gpu_count)
    room = replica_room(arrays(cluster), kernel_task(task), allowed(task), most)
    assert room == naive.replica_room(cluster, task, most)


@quiet
@given(CLUSTERS, MIXES, tasks(), PRICES, st.randoms(use_true_random=False))
def test_permuted_nodes_give_the_same_costs(cluster, mix, task, prices, random):
    order = list(range(len(cluster)))
    random.shuffle(order)
    straight = weigh(cluster, mix, task, prices)
    permuted = weigh([cluster[index] for index in order], mix, task, prices)
    assert [found.cost_w for found in straight.candidates] == [found.cost_w for found in permuted.candidates]
    assert (straight.feasible, straight.removed) == (permuted.feasible, permuted.removed)


@quiet
@given(CLUSTERS, MIXES, tasks(), PRICES, st.randoms(use_true_random=False))
def test_permuted_classes_change_nothing(cluster, mix, task, prices, random):
    shuffled = random.sample(mix, len(mix))
    assert weigh(cluster, mix, task, prices) == weigh(cluster, shuffled, task, prices)


@quiet
@given(nodes(), MIXES, st.sampled_from([1, 100, 250]), PRICES)
def test_ties_go_to_the_lowest_node_and_gpu(node, mix, milli, prices):
    roomy = replace(
        node, available=True, cpu_free=node.cpu_capacity, gpus=[*node.gpus[:3], naive.Gpu(0, 1000, 10.0, 70.0)]
    )
    found = weigh([roomy] * 6, mix, naive.Task(1000, 0, 1, milli), prices).candidates
    assert [entry.node for entry in found] == [0, 1, 2, 3]
    (slot,) = found[0].slots
    assert all(roomy.gpus[lower] != roomy.gpus[slot] for lower in range(slot))


@quiet
@given(CLUSTERS, MIXES, tasks(), PRICES, st.data())
def test_an_engine_told_of_a_changed_node_is_one_built_again(cluster, mix, task, prices, data):
    candidates = candidates_of(cluster, mix, prices)
    weigh(cluster, mix, task, prices, candidates=candidates)
    changed = data.draw(st.integers(0, len(cluster) - 1))
    now = data.draw(nodes() | st.sampled_from(cluster))
    other = replace(cluster[changed], gpus=now.gpus) if data.draw(st.booleans()) else cluster[changed]
    cluster = [*cluster[:changed], replace(now, gpus=other.gpus, rank=other.rank), *cluster[changed + 1 :]]
    if candidates.update_nodes(arrays(cluster), [changed], SORTS):
        assert weigh(cluster, mix, task, prices, candidates=candidates) == weigh(cluster, mix, task, prices)


@st.composite
def small_tasks(draw):
    """Of which a node mostly holds several."""
    count = draw(st.sampled_from([0, 1, 1, 1, 2]))
    milli = 0 if count == 0 else 1000 if count > 1 else draw(st.sampled_from([100, 250, 500, 1000]))
    return naive.Task(draw(st.sampled_from([0, 500, 4000])), draw(st.integers(0, 8)) * 2**30, count, milli, None)


@quiet
@given(CLUSTERS, MIXES, small_tasks(), PRICES, st.integers(1, 5))
def test_several_tasks_on_a_node_cost_what_they_cost_one_after_another(cluster, mix, task, prices, most):
    candidates = candidates_of(cluster, mix, prices)
    kind = candidates.register_kind(kernel_task(task), allowed(task))
    table = candidates.replica_costs(kind, np.arange(len(cluster)), most)
    held = []
    for one, costs, first in zip(cluster, table, candidates.node_costs(kind), strict=True):
        node, theirs = one, [0.0]
        while len(theirs) <= most and (found := weigh([node], mix, task, prices).candidates):
            least = min(naive.cost(node, slots, task, mix, prices)[0] for slots in naive.choices(node, task))
            theirs.append(theirs[-1] + least)
            node = naive.placed(node, found[0].slots, task)
        held.append(len(theirs) - 1)
        theirs += [np.inf] * (most + 1 - len(theirs))
        assert costs == pytest.approx(theirs[: len(costs)], abs=1e-9)
        assert first == pytest.approx(theirs[1], abs=1e-9)
    # Memory alone may leave more columns than any node needs.
    assert max(held) < table.shape[1] <= most + 1


def test_warming_names_every_kernel():
    assert set(warm_kernels()) == {
        "adopt_nodes",
        "apply_prices",
        "are_prices_due",
        "choose_gpus",
        "choose_linked_gpus",
        "choose_nodes",
        "cluster_power",
        "compute_all_costs",
        "compute_prices",
        "compute_replica_costs",
        "count_candidates",
        "count_verdicts",
        "divide_replicas",
        "exchange_gpus",
        "is_scaled",
        "list_cheap_covers",
        "node_fragmentation",
        "node_power",
        "node_terms",
        "place_tasks",
        "refresh_fragmentation",
        "replica_room",
        "search_moves",
        "simulate_queue",
        "sum_terms",
        "work_ahead",
        "write_terms",
    }


def test_the_packages_of_the_paper():
    # 96 vCPU are 48 cores, 3 packages; taking 1 vCPU of a free node works one core, so one package turns active.
    empty = naive.Node(96_000, 96_000, 0, [None] * 4)
    assert node_power(arrays([empty]), 0) == 3 * 15.0
    one = naive.Node(96_000, 95_000, 0, [None] * 4)
    assert node_power(arrays([one]), 0) == 120.0 + 2 * 15.0
    full = naive.Node(96_000, 0, 0, [None] * 4)
    assert node_power(arrays([full]), 0) == 3 * 120.0
