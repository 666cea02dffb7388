"""Quotes and gains equal their naive twins on any nodes, and depend on nothing but what the fleet is.

Run with NUMBA_DISABLE_JIT=1 as well: the same code, interpreted.
"""

import os
import subprocess
import sys
from dataclasses import replace
from math import erfc, sqrt

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from tests import naive, naive_lookahead, naive_openb
from tests.props.fleet_test import fleet_of
from tests.props.peers_test import generated, scenes
from tests.props.placement_test import (
    CLUSTERS,
    MIXES,
    MODELS,
    SORTS,
    allowed,
    arrays,
    kernel_task,
    mix_arrays,
    nodes,
    tasks,
)

from eelgrid_kernels.arrays import (
    ENOUGH_BLOCKS,
    LOOKAHEAD,
    NO_SPARE_BLOCKS,
    SCARCE_BLOCKS,
    SHAPE,
    STRANDING_WHEN_FULL,
)
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.candidates import CandidateIndex, QuotedPrices
from eelgrid_kernels.cost_terms import package_slack
from eelgrid_kernels.engine_setup import build_expected_mix, rate_block_scarcity
from eelgrid_kernels.opportunity_prices import are_prices_due, compute_prices

quiet = settings(deadline=None)

OURS = find_policy("eelgrid")
# Small tasks, so that a horizon is long and each class takes several nodes.
SMALL = st.builds(
    lambda task, cpu: replace(task, cpu_milli=cpu, gpu_milli=max(1, task.gpu_milli // 25) if task.gpu_count else 0),
    tasks(),
    st.sampled_from([100, 500, 4000, 33_000]),
)
ANY_MIX = MIXES | st.lists(st.builds(naive.Class, SMALL, st.integers(1, 1000)), max_size=6)
SCARCE = st.sets(st.integers(0, MODELS - 1))
TURNOVER = st.sampled_from([0, 250, 500, 750, 1000])
STOCKOUT = st.sampled_from([0, 50, 500, 1000])
# Watts that make some gains and no others, so that classes differ.
WATTS = st.integers(0, 900)


def engine(cluster, mix, weights=OURS.weights):
    sorts = np.zeros(len(cluster), np.int64)
    return CandidateIndex(arrays(cluster), mix_arrays(mix), sorts, OURS._replace(weights=np.array(weights, np.float64)))


def bits(models):
    return sum(1 << model for model in models)


def quoted(cluster, mix, turnover):
    """What the twin says."""
    scarce = bits(naive_lookahead.scarce(cluster, mix, MODELS, turnover))
    offers = naive_lookahead.offers(
        cluster, mix, part=OURS.weights[LOOKAHEAD], refused_w=OURS.weights[STRANDING_WHEN_FULL]
    )
    stockouts = naive_lookahead.stockouts(cluster, mix, MODELS)
    return QuotedPrices(offers, scarce, naive_lookahead.load_permille(cluster), turnover, stockouts)


@given(st.integers(1, 200_000), st.integers(0, 200_000), st.integers(1, 200_000))
def test_slack_is_what_can_be_taken_before_another_package_wakes(capacity, taken, more):
    free = capacity - min(taken, capacity)
    room = package_slack(capacity, free)
    assert 0 <= room <= free
    asleep = naive.package_power(capacity, free)
    assert naive.package_power(capacity, free - room) == asleep
    if room < free:
        assert naive.package_power(capacity, free - room - 1) == asleep + 105.0
    assert (min(more, free) <= room) == (naive.package_power(capacity, free - min(more, free)) == asleep)


@quiet
@given(CLUSTERS, ANY_MIX, st.integers(1, 12), TURNOVER)
def test_quotes_equal_the_naive_twins(cluster, mix, copies, turnover):
    cluster = cluster * copies
    assert engine(cluster, mix).compute_prices(turnover) == quoted(cluster, mix, turnover)


@quiet
@given(CLUSTERS, ANY_MIX, st.randoms(use_true_random=False))
def test_the_order_of_nodes_and_of_classes_changes_no_quote(cluster, mix, random):
    before = engine(cluster, mix).compute_prices()
    order = random.sample(range(len(mix)), len(mix))
    turned = engine(random.sample(cluster, len(cluster)), [mix[at] for at in order])
    offers, stockouts = ([values[at] for at in order] for values in (before.offers_w, before.stockouts))
    assert turned.compute_prices() == before._replace(offers_w=offers, stockouts=stockouts)


@quiet
@given(CLUSTERS, MIXES, tasks(), SCARCE, st.integers(0, 1000), TURNOVER, st.data())
def test_with_quotes_in_force_terms_are_the_naive_twins(cluster, mix, task, scarce, load, turnover, data):
    offers = data.draw(st.lists(WATTS, min_size=len(mix), max_size=len(mix)))
    stockouts = data.draw(st.lists(STOCKOUT, min_size=len(mix), max_size=len(mix)))
    candidates = engine(cluster, mix)
    kind = candidates.register_kind(kernel_task(task), allowed(task))
    if data.draw(st.booleans()):  # what is known of costs must not outlive the quotes
        candidates.best_candidates(kind, 0, len(cluster))
    candidates.apply_prices(QuotedPrices(offers, bits(scarce), load, turnover, stockouts))
    market = naive_lookahead.Market(OURS.weights.tolist(), mix, MODELS)
    market.offers, market.scarce, market.load, market.shifts = offers, scarce, load, 0
    market.turnover, market.stockouts = turnover, stockouts
    market.weigh_blocks(cluster)
    assert candidates.weights == market.weights()
    fitting = [node for node in cluster if naive.verdict(node, task) is None]
    found = candidates.best_candidates(kind, 0, len(cluster))
    assert len(found) == len(fitting)
    total, costs = max(1, sum(entry.weight for entry in mix)), []
    for choice in found:
        node, slots = cluster[choice.node], list(choice.slots)
        taken = sum(task.gpu_milli for slot in slots if node.gpus[slot].model in scarce)
        lost = naive_lookahead.lost(node, slots, task, mix, offers)
        unused_w = naive_lookahead.unused_w(naive.placed(node, slots, task))
        assert choice.terms[3:] == (lost / total, taken / 1000, unused_w)
        cheapest = min(cost_w(node, other, task, mix, market) for other in naive.choices(node, task))
        costs.append(cost_w(node, slots, task, mix, market))
        assert costs[-1] == cheapest
        weighed = sum(weight * term for weight, term in zip(candidates.weights, choice.terms, strict=True))
        assert weighed == pytest.approx(costs[-1], abs=1e-9)
    assert costs == sorted(costs)


def cost_w(node, slots, task, mix, market):
    there = replace(node, gpus=[gpu if gpu and not gpu.partitioned else None for gpu in node.gpus])
    return naive_openb.cost_w(there, slots, task, mix, market)


@quiet
@given(CLUSTERS, MIXES, tasks(), st.integers(0, 1000), st.data())
def test_quotes_for_another_mix_count_as_none(cluster, mix, task, load, data):
    wrong = data.draw(st.lists(WATTS, min_size=len(mix) + 1, max_size=len(mix) + 3))
    told, untold = engine(cluster, mix), engine(cluster, mix)
    told.apply_prices(QuotedPrices(wrong, load=load, stockouts=wrong))
    untold.apply_prices(QuotedPrices(load=load))
    kind = told.register_kind(kernel_task(task), allowed(task)), untold.register_kind(kernel_task(task), allowed(task))
    assert told.best_candidates(kind[0], 0, 4) == untold.best_candidates(kind[1], 0, 4)


QUOTES = st.builds(
    QuotedPrices,
    st.lists(WATTS, min_size=12, max_size=12),
    SCARCE.map(bits),
    st.integers(0, 1000),
    TURNOVER,
    st.lists(STOCKOUT, min_size=12, max_size=12),
)
# What comes to an index: a node with other free amounts, another mix, quotes, or a task that asks for a place.
HISTORIES = st.lists(
    st.tuples(st.just("node"), st.integers(0, 8), nodes())
    | st.tuples(st.just("mix"), ANY_MIX)
    | st.tuples(st.just("quotes"), QUOTES)
    | st.tuples(st.just("task"), tasks()),
    max_size=20,
)


def with_free_amounts_of(node, other):
    gpus = [
        replace(mine, free=theirs.free) if mine and theirs else mine
        for mine, theirs in zip(node.gpus, other.gpus, strict=True)
    ]
    cpu_free = min(node.cpu_capacity, other.cpu_free)
    return replace(node, cpu_free=cpu_free, memory_free=other.memory_free, available=other.available, gpus=gpus)


@quiet
@given(CLUSTERS, ANY_MIX, HISTORIES, st.sampled_from(["eelgrid", "fgd", "pwr", "pwr500", "bestfit"]))
def test_an_index_that_takes_over_mixes_answers_as_one_built_anew(cluster, mix, history, name):
    cluster, sorts, quotes = list(cluster), np.zeros(len(cluster), np.int64), QuotedPrices()

    def build():
        index = CandidateIndex(arrays(cluster), mix_arrays(mix), sorts, find_policy(name))
        index.apply_prices(quotes)
        return index

    kept = build()
    for what, *values in history:
        if what == "node":
            row = values[0] % len(cluster)
            cluster[row] = with_free_amounts_of(cluster[row], values[1])
            assert kept.update_nodes(arrays(cluster), [row], sorts)
        elif what == "mix":
            mix, quotes = values[0], QuotedPrices()
            kept.adopt_mix(arrays(cluster), mix_arrays(mix), sorts)
            kept.apply_prices(quotes)
        elif what == "quotes":
            offers, stockouts = values[0].offers_w[: len(mix)], values[0].stockouts[: len(mix)]
            quotes = values[0]._replace(offers_w=offers, stockouts=stockouts)
            kept.apply_prices(quotes)
        else:
            fresh = build()
            task, allows = kernel_task(values[0]), allowed(values[0])
            found = [one.best_candidates(one.register_kind(task, allows), 0, len(cluster)) for one in (kept, fresh)]
            assert found[0] == found[1]
            assert kept.weights == fresh.weights
            assert kept.is_due(-1) == fresh.is_due(-1)
            assert kept.compute_prices() == fresh.compute_prices()
            verdicts = [one.count_verdicts(arrays(cluster), task, allows) for one in (kept, fresh)]
            assert verdicts[0] == verdicts[1]


@quiet
@given(CLUSTERS, ANY_MIX)
def test_blocks_are_as_scarce_as_the_naive_twin_says(cluster, mix):
    assert block_scarcity(cluster, mix) == naive_lookahead.block_scarcity(cluster, mix)


def block_scarcity(cluster, mix):
    shapes = np.zeros(len(cluster), SHAPE)
    shapes["cpu_capacity"] = [node.cpu_capacity for node in cluster]
    shapes["width"] = [len(naive.placeable(node)) for node in cluster]
    counts = np.ones(len(cluster), np.int64)
    return rate_block_scarcity(shapes, counts, build_expected_mix(mix_arrays(mix), (0,)).blocks)


def scarcities(cluster, mix):
    return naive_lookahead.block_scarcity(cluster, mix), naive_lookahead.is_cpu_scarce(cluster, mix)


@pytest.mark.parametrize(
    ("pairs", "cpu_milli", "expected"),
    [
        (0, 1000, ENOUGH_BLOCKS),
        (47, 1000, ENOUGH_BLOCKS),
        (50, 1000, ENOUGH_BLOCKS),
        (51, 1000, NO_SPARE_BLOCKS),
        (100, 1000, NO_SPARE_BLOCKS),
        (25, 5000, ENOUGH_BLOCKS),
        (26, 5000, SCARCE_BLOCKS),
        (47, 5000, SCARCE_BLOCKS),
        (48, 5000, NO_SPARE_BLOCKS),
    ],
)
def test_blocks_are_scarce_where_the_mix_asks_for_more_than_the_nodes_are(pairs, cpu_milli, expected):
    """Half of the GPUs are in a node with four; a full fleet of the mix has `pairs` hundredths of them in tasks with two."""
    gpu = naive.Gpu(0, 1000, 10.0, 70.0)
    cluster = [naive.Node(8000, 8000, 0, [gpu, None, None, None])] * 4 + [naive.Node(8000, 8000, 0, [gpu] * 4)]
    mix = [
        naive.Class(naive.Task(cpu_milli, 0, 2, 1000), pairs),
        naive.Class(naive.Task(1000, 0, 1, 500), 4 * (100 - pairs)),
    ]
    mix = [entry for entry in mix if entry.weight]
    assert block_scarcity(cluster, mix) == expected


@pytest.mark.parametrize(
    ("pairs", "load", "chosen"),
    [(0, 0, 1), (0, 1000, 1), (26, 0, 1), (26, 700, 1), (26, 1000, 0), (48, 0, 0), (48, 1000, 0)],
)
def test_a_place_counts_in_a_full_fleet_and_from_the_first_task_where_none_is_to_spare(pairs, load, chosen):
    """A task with one GPU opens the dearer GPU of a node whose CPU is for it alone; the cheaper one of a place for two if that counts nothing."""
    cheap, dear = naive.Gpu(0, 1000, 10.0, 70.0), naive.Gpu(0, 1000, 10.0, 130.0)
    cluster = [naive.Node(8000, 8000, 0, [dear, None, None, None])] * 4 + [naive.Node(8000, 8000, 0, [cheap] * 4)]
    pair, one = naive.Task(5000, 0, 2, 1000), naive.Task(4000, 0, 1, 1000)
    mix = [naive.Class(pair, pairs), naive.Class(one, 2 * (100 - pairs))]
    candidates = engine(cluster, [entry for entry in mix if entry.weight])
    kind = candidates.register_kind(kernel_task(one), allowed(one))
    candidates.apply_prices(QuotedPrices(load=load))
    assert (candidates.best_candidates(kind, 0, 1)[0].node == 4) == bool(chosen)


@pytest.mark.parametrize("load", [0, 1000])
def test_a_block_is_left_for_tasks_with_several_gpus_where_blocks_are_scarce(load):
    """A task with one GPU opens the dearer GPU of a node whose other one is taken; the cheaper one if no block is short."""
    cheap, dear = naive.Gpu(0, 1000, 10.0, 70.0), naive.Gpu(0, 1000, 10.0, 75.0)
    held = replace(dear, free=0)
    cluster = [naive.Node(64_000, 64_000, 0, gpus) for gpus in ([cheap, cheap], [held, dear], [held, None])]
    pair, one = naive.Task(1000, 0, 2, 1000), naive.Task(0, 0, 1, 1000)
    for singles, best in ((0, 1), (20, 0)):
        mix = [naive.Class(pair, 1), naive.Class(one, singles)]
        assert block_scarcity(cluster, mix) == (NO_SPARE_BLOCKS if best == 1 else ENOUGH_BLOCKS)
        candidates = engine(cluster, mix)
        kind = candidates.register_kind(kernel_task(one), allowed(one))
        candidates.apply_prices(QuotedPrices(load=load))
        assert candidates.best_candidates(kind, 0, 1)[0].node == best


@quiet
@given(CLUSTERS, ANY_MIX, st.data())
def test_an_engine_told_of_changes_quotes_like_one_built_again(cluster, mix, data):
    """Nodes take the shape of others, as when GPUs are lost and come back."""
    kept = engine(cluster, mix)
    offers = data.draw(st.lists(WATTS, min_size=len(mix), max_size=len(mix)))
    kept.apply_prices(QuotedPrices(offers))
    for _ in range(3):
        changed = data.draw(st.integers(0, len(cluster) - 1))
        now = data.draw(st.sampled_from(cluster))
        now = replace(now, available=data.draw(st.booleans()), cpu_free=data.draw(st.integers(0, now.cpu_capacity)))
        before, cluster = scarcities(cluster, mix), [*cluster[:changed], now, *cluster[changed + 1 :]]
        if not kept.update_nodes(arrays(cluster), [changed], SORTS):
            assert before != scarcities(cluster, mix)
            kept = engine(cluster, mix)
            kept.apply_prices(QuotedPrices(offers))
        anew = engine(cluster, mix)
        anew.apply_prices(QuotedPrices(offers))  # those in force may stay
        assert kept.compute_prices() == anew.compute_prices()
        for shifts in (-1, 0, 1, 3, 10):
            assert kept.is_due(shifts) == engine(cluster, mix).is_due(shifts)


@quiet
@given(
    CLUSTERS,
    ANY_MIX,
    st.integers(-1, 100),
    st.integers(1, 20),
    st.tuples(*[st.sampled_from([0.0, 0.0, 1.0, 50.0])] * 7) | st.tuples(*[st.sampled_from([0.0, 50.0])] * 3),
)
def test_quotes_are_due_when_the_naive_twins_are(cluster, mix, shifts, copies, weights):
    cluster = cluster * copies
    market = naive_lookahead.Market(weights, mix, MODELS)
    market.shifts = shifts
    candidates = engine(cluster, mix, weights)
    assert candidates.is_due(shifts) == market.is_due(cluster)
    part = max(1, naive_lookahead.horizon(cluster, mix) // 10)
    for market.shifts in (part - 1, part, part + 1):
        assert candidates.is_due(market.shifts) == market.is_due(cluster)


@quiet
@given(st.lists(nodes(), min_size=1, max_size=6), MIXES)
def test_the_scarce_models_are_the_dual_prices_of_the_allocation(cluster, mix):
    """The most of the expected demand that the free GPUs can serve falls short by just what the scarce set is short."""
    free, asked = naive_lookahead.free_by_model(cluster, MODELS), naive_lookahead.demand_by_set(mix, MODELS)
    assume(asked and sum(free))
    total, sets = float(sum(free)), sorted(asked, key=sorted)
    demand = [asked[each] / sum(asked.values()) * total for each in sets]
    width = len(sets) * MODELS
    by_set, by_model = np.zeros((len(sets), width)), np.zeros((MODELS, width))
    for at in range(len(sets)):
        for model in range(MODELS):
            by_set[at, at * MODELS + model] = by_model[model, at * MODELS + model] = 1.0
    usable = [(0.0, None if model in models else 0.0) for models in sets for model in range(MODELS)]
    solved = linprog(-np.ones(width), A_ub=np.vstack([by_set, by_model]), b_ub=[*demand, *free], bounds=usable)
    every = [frozenset(model for model in range(MODELS) if mask >> model & 1) for mask in range(2**MODELS)]
    short = {models: naive_lookahead.shortage(models, free, asked, float(sum(free))) for models in every}
    worst = max(short.values())
    assert -solved.fun == pytest.approx(total - worst, rel=1e-6)
    scarce = engine(cluster, mix).compute_prices().scarce
    chosen = frozenset(model for model in range(MODELS) if scarce >> model & 1)
    assert bool(scarce) == (worst > 0.02 * total)
    if scarce:
        assert short[chosen] == worst
        others = max(value for models, value in short.items() if models != chosen)
        if worst - others > 1e-3 * total:  # one vertex alone is best
            prices = -solved.ineqlin.marginals[len(sets) :]
            assert prices == pytest.approx([float(model in chosen) for model in range(MODELS)], abs=1e-6)


@pytest.mark.parametrize(
    ("load", "turnover", "expected"),
    [
        (0, 0, 100.0),
        (700, 0, 100.0),
        (850, 0, 1050.0),
        (1000, 0, 2000.0),
        (700, 1000, 100.0),
        (850, 1000, 100.0),
        (1000, 1000, 100.0),
        (1000, 500, 1050.0),
    ],
)
def test_stranding_weighs_more_as_the_fleet_fills_and_less_where_tasks_end(load, turnover, expected):
    candidates = engine([naive.Node(8000, 8000, 0, [None] * 4)], [])
    candidates.apply_prices(QuotedPrices(load=load, turnover=turnover))
    assert candidates.weights == pytest.approx((1.0, 0.0, expected, 1.0, 500.0, 0.05))


@pytest.mark.parametrize(
    ("cpu_milli", "load", "turnover", "expected"),
    [
        (2857, 0, 0, (0.0, 100.0)),
        (2857, 1000, 0, (0.0, 2000.0)),
        (2858, 0, 0, (200.0, 0.0)),
        (2858, 700, 0, (200.0, 0.0)),
        (2858, 850, 0, (200.0, 100.0)),
        (2858, 1000, 0, (200.0, 200.0)),
        (2858, 0, 500, (100.0, 50.0)),
        (2858, 1000, 1000, (0.0, 100.0)),
    ],
)
def test_fragmentation_counts_instead_of_stranding_where_cpu_runs_out_first(cpu_milli, load, turnover, expected):
    """Four GPUs and 8 vCPU: tasks of one GPU and 2,857 milli have used 70 % of the GPUs when the CPU is gone."""
    gpu = naive.Gpu(0, 1000, 10.0, 70.0)
    cluster = [naive.Node(8000, 8000, 0, [gpu] * 4)]
    candidates = engine(cluster, [naive.Class(naive.Task(cpu_milli, 0, 1, 1000), 1)])
    candidates.apply_prices(QuotedPrices(load=load, turnover=turnover))
    _, fragmentation, stranding, *others = candidates.weights
    assert (fragmentation, stranding) == pytest.approx(expected)
    assert others == pytest.approx([1.0, 500.0, 0.05])


def test_a_policy_with_more_fragmentation_keeps_it_where_cpu_is_scarce():
    cluster = [naive.Node(8000, 8000, 0, [naive.Gpu(0, 1000, 10.0, 70.0)] * 4)]
    weights = (1.0, 300.0, 100.0, 1.0, 500.0, 0.05, 2000.0)
    candidates = engine(cluster, [naive.Class(naive.Task(4000, 0, 1, 1000), 1)], weights)
    candidates.apply_prices(QuotedPrices())
    assert candidates.weights[1] == 300.0


@pytest.mark.parametrize(
    ("load", "turnover", "stockout", "chosen"),
    [(1000, 0, 1000, 0), (1000, 1000, 0, 1), (700, 1000, 1000, 1)],
)
def test_where_tasks_end_a_block_is_left_even_if_the_mix_asks_for_few(load, turnover, stockout, chosen):
    """A task with one GPU takes the dearer GPU beside one in use, not the cheaper one of an empty pair."""
    cheap, dear = naive.Gpu(0, 1000, 10.0, 70.0), naive.Gpu(0, 1000, 10.0, 75.0)
    gpus = ([cheap, cheap], [replace(dear, free=0), dear], [dear, dear], [dear, dear], [dear, None])
    cluster = [naive.Node(64_000, 64_000, 0, list(pair)) for pair in gpus]
    pair, one = naive.Task(1000, 0, 2, 1000), naive.Task(0, 0, 1, 1000)
    mix = [naive.Class(pair, 1), naive.Class(one, 4)]
    assert block_scarcity(cluster, mix) == ENOUGH_BLOCKS
    candidates = engine(cluster, mix)
    kind = candidates.register_kind(kernel_task(one), allowed(one))
    candidates.apply_prices(QuotedPrices(load=load, turnover=turnover, stockouts=[stockout, 0]))
    assert candidates.best_candidates(kind, 0, 1)[0].node == chosen


@pytest.mark.parametrize(("stockout", "chosen"), [(0, 0), (1000, 1)])
def test_where_places_run_out_small_work_joins_the_node_that_is_fuller(stockout, chosen):
    """Both nodes have lost their place for eight; the one that misses one GPU has it back sooner than the one that misses four."""
    dear, cheap = naive.Gpu(0, 1000, 10.0, 130.0), naive.Gpu(0, 1000, 10.0, 70.0)
    emptier = naive.Node(64_000, 64_000, 0, [replace(cheap, free=0), *[cheap] * 7])
    fuller = naive.Node(64_000, 64_000, 0, [replace(dear, free=0)] * 4 + [dear] * 4)
    eight, one = naive.Task(0, 0, 8, 1000), naive.Task(0, 0, 1, 1000)
    candidates = engine([emptier, fuller], [naive.Class(eight, 1), naive.Class(one, 4)])
    kind = candidates.register_kind(kernel_task(one), allowed(one))
    candidates.apply_prices(QuotedPrices(load=700, turnover=1000, stockouts=[stockout, 0]))
    assert candidates.best_candidates(kind, 0, 1)[0].node == chosen


@pytest.mark.parametrize(("left", "expected"), [(0, 1000), (1, 850), (4, 500), (8, 100), (16, 0)])
def test_fewer_places_run_out_sooner(left, expected):
    """Twenty nodes with two GPUs each; all but those that are left hold a pair."""
    gpu, pair = naive.Gpu(0, 1000, 10.0, 70.0), naive.Task(0, 0, 2, 1000)
    cluster = [naive.Node(8000, 8000, 0, [replace(gpu, free=1000 if i < left else 0)] * 2) for i in range(20)]
    found = engine(cluster, [naive.Class(pair, 1)]).compute_prices().stockouts
    running = 20 - left
    assert found == [expected]
    assert expected == int(1000 * erfc(left / (2 * sqrt(running))) + 25) // 50 * 50


def test_what_is_known_of_costs_ends_with_the_quotes_that_it_was_for():
    """The first node has the smaller GPU, 60 W; it is dearer while its model is scarce or others would save there."""
    cards = [naive.Gpu(0, 1000, 10.0, 70.0), naive.Gpu(1, 1000, 10.0, 110.0)]
    cluster = [naive.Node(8000, 8000, 0, [gpu, None, None, None]) for gpu in cards]
    task = naive.Task(1000, 0, 1, 1000)
    candidates = engine(cluster, [naive.Class(naive.Task(0, 0, 1, 1000, {0}), 1)])
    kind = candidates.register_kind(kernel_task(task), allowed(task))
    for offer, scarce, best in ((0, 0, 0), (0, 1, 1), (0, 0, 0), (300, 0, 1), (100, 0, 0), (300, 3, 1), (0, 0, 0)):
        candidates.apply_prices(QuotedPrices([offer], scarce))
        assert [found.node for found in candidates.best_candidates(kind, 0, 2)] == [best, 1 - best]


@pytest.mark.parametrize(("captive", "expected"), [(20, 0), (22, 0), (23, 1), (60, 1)])
def test_a_model_is_scarce_when_it_is_short_by_more_than_two_hundredths(captive, expected):
    """A fifth of what is free is of the model that `captive` hundredths of the demand are bound to."""
    few, many = naive.Gpu(0, 1000, 10.0, 70.0), naive.Gpu(1, 1000, 10.0, 70.0)
    cluster = [naive.Node(8000, 8000, 0, [gpu] * 4) for gpu in (few, *[many] * 4)]
    held = [naive.Node(8000, 0, 0, [naive.Gpu(1, 0, 10.0, 70.0)] * 4)] * 5
    bound, free = naive.Task(0, 0, 1, 1000, {0}), naive.Task(0, 0, 1, 1000)
    mix = [naive.Class(bound, captive), naive.Class(free, 100 - captive)]
    candidates = engine(cluster + held, mix)
    prices = candidates.compute_prices()
    assert (prices.scarce, prices.load) == (expected, 500)
    # Where tasks end it is enough to be short at all, of as much as is held now.
    scarce = candidates.compute_prices(1000).scarce
    assert scarce == (captive > 20)
    assert engine(cluster, mix).compute_prices(1000).scarce == 0


@pytest.mark.parametrize(
    ("mine", "expected"),
    # The second of two kinds of idle GPU costs 90 or 350 W, of which its other share brings back half; a share beside
    # another costs nothing.
    [((1000, 1000), 45), ((400, 1000), 0), ((1000, 0), 45), ((0, 0), 175)],
)
def test_an_offer_takes_the_cheapest_way_in(mine, expected):
    gpus = [naive.Gpu(0, free, 10.0, 100.0) for free in mine] + [naive.Gpu(1, 1000, 50.0, 400.0), None]
    node = naive.Node(96_000, 90_000, 0, gpus)
    offers = engine([node], [naive.Class(naive.Task(1000, 0, 1, 300), 1)]).compute_prices().offers_w
    assert offers == [expected]


@quiet
@given(scenes(), st.lists(st.integers(0, 5), max_size=10))
def test_a_copied_fleet_quotes_alike(scene, more):
    fleet = fleet_of(scene, "lookahead")
    for number in scene.order:
        fleet.place_task(number)
    other = fleet.copy()
    for number in more:
        assert fleet.place_task(number % len(scene.tasks)) == other.place_task(number % len(scene.tasks))
        assert (fleet.engine.classes.offers == other.engine.classes.offers).all()
        assert (fleet.engine.scalars == other.engine.scalars).all()
    mine, theirs = (np.zeros((2, len(scene.mix)), np.int64) for _ in range(2))
    assert compute_prices(fleet.engine, mine, 0) == compute_prices(other.engine, theirs, 0)
    assert mine.tolist() == theirs.tolist()
    # Apart: what comes to one ages the quotes of that one alone.
    if more and (placed := other.place_task(more[0] % len(scene.tasks)))[0] >= 0:
        before = fleet.engine.scalars[0].shifts
        other.release_task(placed[0], more[0] % len(scene.tasks), placed[1])
        assert fleet.engine.scalars[0].shifts == before
        assert are_prices_due(fleet.engine) == (before >= max(1, fleet.engine.scalars[0].horizon // 10))


PRINTED = """
from tests.props.lookahead_test import generated, fleet_of
scene = generated()
fleet = fleet_of(scene, "lookahead")
print([fleet.place_task(number) for number in scene.order[:120]], fleet.engine.classes.offers.tolist(), fleet.engine.scalars[0])
"""


def test_every_process_quotes_alike():
    def printed(seed):
        done = subprocess.run(
            [sys.executable, "-c", PRINTED],
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return done.stdout

    scene = generated()
    fleet = fleet_of(scene, "lookahead")
    here = [fleet.place_task(number) for number in scene.order[:120]]
    assert any(fleet.engine.classes.offers)
    expected = f"{here} {fleet.engine.classes.offers.tolist()} {fleet.engine.scalars[0]}\n"
    assert printed("1") == printed("2") == expected
