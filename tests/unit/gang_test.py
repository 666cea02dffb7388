"""Gangs that ask to be packed or spread: as cheap as brute force, always placed where there is room, explained."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import naive, naive_lookahead, naive_openb, naive_topology
from tests.builders.cluster import build_core, build_naive_cluster, build_naive_task, build_node, build_request

from eelgrid_controller.placement.planner import Planner, make_prices
from eelgrid_kernels.cost_terms import TERMS
from eelgrid_protos.messages import OBJECTIVES, Locality

BALANCED = OBJECTIVES["balanced"]
PACK, SPREAD = Locality.PACK, Locality.SPREAD
RACKS = [("z", "s1", "r1"), ("z", "s1", "r2"), ("z", "s2", "r3"), ("z", "s2", "r4")]


def nodes_used(decision):
    return Counter(spot.node_name for spot in decision.placements)


def decide(core, wanted, *, locality_w=100.0, planner=None):
    return (planner or Planner()).decide_placement(
        core.snapshot(), wanted.spec, replace(BALANCED, locality_w=locality_w)
    )


def taken(there, task, slots):
    """The node after the task."""
    after = deepcopy(there)
    after.cpu_free -= task.cpu_milli
    after.memory_free -= task.memory_bytes
    for slot in slots:
        after.gpus[slot].free -= task.gpu_milli
    return after


def market_of(core, cluster, mix, models):
    """The quotes in force, as the naive twin has them."""
    market, quotes = naive_lookahead.Market(make_prices(BALANCED), mix, len(models)), core.state.market.quotes
    market.offers, market.shifts, market.load = list(quotes.offers_w) or [0] * len(mix), 0, quotes.load_permille
    market.turnover = quotes.turnover_permille
    market.stockouts = list(quotes.stockout_permille) or [0] * len(mix)
    market.scarce = {models[name] for name in quotes.scarce_models}
    market.weigh_blocks(cluster)
    return market


def costs_on(there, task, mix, most, market):
    """What 0 to `most` replicas cost on one node by the naive twin, as far as there is room."""
    costs = [0.0]
    while len(costs) <= most and naive.verdict(there, task) is None:
        found = [(naive_openb.cost_w(there, slots, task, mix, market), slots) for slots in naive.choices(there, task)]
        cost_w, slots = min(found)
        costs.append(costs[-1] + cost_w)
        there = taken(there, task, slots)
    return costs


def price_of(locality, replicas, locality_w):
    if locality is PACK:
        return [0.0] + [locality_w] * replicas
    return [locality_w * held * (held - 1) / 2 for held in range(replicas + 1)]


def total(core, wanted, decision, locality_w):
    """What a decision costs by the naive twins, and what the best division costs."""
    cluster, mix, models = build_naive_cluster(core)
    task = build_naive_task(wanted.spec.request, models)
    replicas = wanted.spec.replicas
    market = market_of(core, cluster, mix, models)
    costs = [costs_on(there, task, mix, replicas, market) for there in cluster]
    paths = [record.inventory.topology for record in core.state.nodes.values()]
    price = price_of(wanted.spec.locality, replicas, locality_w)
    used = nodes_used(decision)
    counts = [used[name] for name in core.state.nodes]
    watts = sum(row[count] for row, count in zip(costs, counts, strict=True))
    mine = watts + sum(price[held] for held in naive_topology.places(paths, counts))
    return mine, naive_topology.least_division(costs, paths, price)[0]


@st.composite
def cases(draw):
    """A loaded cluster of up to five nodes in two switches of two racks, and a gang."""
    inventories = [
        build_node(
            f"n{number}",
            gpus=draw(st.integers(0, 4)),
            model=draw(st.sampled_from(["G2", "T4", "G3"])),
            cpu=draw(st.sampled_from([32, 64, 96])),
            topology=draw(st.sampled_from([*RACKS, ()])),
        )
        for number in range(draw(st.integers(1, 5)))
    ]
    core = build_core(*inventories)
    for _ in range(draw(st.integers(0, 6))):
        gpus, milli = draw(st.sampled_from([(0, None), (1, 400), (1, 1000), (2, 1000)]))
        wanted = build_request(gpus=gpus, milli=milli, cpu=draw(st.integers(1, 12)))
        if Planner().decide_placement(core.snapshot(), wanted.spec, BALANCED).placements:
            core.submit(wanted, now_ns=1)
    gpus, milli = draw(st.sampled_from([(0, None), (1, 500), (1, 1000), (2, 1000)]))
    gang = build_request(
        gpus=gpus,
        milli=milli,
        cpu=draw(st.integers(1, 20)),
        replicas=draw(st.integers(2, 4)),
        locality=draw(st.sampled_from([PACK, SPREAD])),
    )
    return core, gang, draw(st.sampled_from([1.0, 25.0, 100.0, 1000.0]))


@settings(deadline=None, max_examples=150)
@given(cases())
def test_a_gang_costs_what_the_best_of_all_divisions_costs(case):
    core, gang, locality_w = case
    decision = decide(core, gang, locality_w=locality_w)
    assert bool(decision.placements) == (decision.room == gang.spec.replicas)
    if decision.placements:
        mine, best = total(core, gang, decision, locality_w)
        assert mine == pytest.approx(best, abs=1e-6)
        explained = sum(one.candidates[0].cost_w for one in decision.explanation)
        # The explanation leaves out that the first replica opens one place at each level.
        depth = max(len(record.inventory.topology) for record in core.state.nodes.values()) + 1
        assert explained == pytest.approx(mine - (locality_w * depth if gang.spec.locality is PACK else 0.0), abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_a_gang_too_large_to_divide_is_placed_all_the_same(case):
    core, gang, locality_w = case
    exact = decide(core, gang, locality_w=locality_w)
    greedy = decide(core, gang, locality_w=locality_w, planner=Planner(gang_work_most=0))
    assert (len(greedy.placements), greedy.room) == (len(exact.placements), exact.room)
    if greedy.placements:
        mine, best = total(core, gang, greedy, locality_w)
        assert mine >= best - 1e-6


@settings(deadline=None, max_examples=100)
@given(cases(), st.sampled_from([16_000, 30_000, 45_000]))
def test_a_gang_divided_among_some_racks_is_placed_and_no_cheaper_than_the_best(case, work_most):
    core, gang, locality_w = case
    exact = decide(core, gang, locality_w=locality_w)
    narrowed = decide(core, gang, locality_w=locality_w, planner=Planner(gang_work_most=work_most))
    assert (len(narrowed.placements), narrowed.room) == (len(exact.placements), exact.room)
    if narrowed.placements:
        mine, best = total(core, gang, narrowed, locality_w)
        assert mine >= best - 1e-6


@pytest.mark.parametrize("locality", [PACK, SPREAD])
def test_of_many_racks_the_cheapest_that_hold_the_gang_are_weighed(locality):
    """Sixty racks, every other of them holds eight replicas: work for a few racks finds the best all the same."""
    core = build_core(
        *(build_node(f"r{n // 4:02}-{n % 4}", gpus=1 + n % 8 // 4, topology=(f"r{n // 4:02}",)) for n in range(240))
    )
    gang = build_request(gpus=1, replicas=8 if locality is PACK else 4, locality=locality)
    exact, narrowed = (decide(core, gang, planner=Planner(gang_work_most=most)) for most in (10**9, 17_000))
    assert narrowed.placements == exact.placements
    racks = {name[:3] for name in nodes_used(narrowed)}
    assert len(racks) == (1 if locality is PACK else 4)


def test_the_division_is_kept_where_the_next_replica_alone_would_leave_it():
    """Two replicas fill a CPU package: the third is cheaper beside them than far away, but then wakes a package more."""
    core = build_core(
        build_node("a", gpus=3, model="T4", cpu=64, topology=RACKS[0]),
        build_node("b", gpus=3, model="T4", topology=RACKS[3]),
    )
    assert nodes_used(decide(core, build_request(gpus=1, cpu=16, replicas=4, locality=PACK))) == {"a": 2, "b": 2}


@pytest.mark.parametrize("work_most", [6_000, 12_000, 41_000])
@pytest.mark.parametrize("cpu", [4, 48, 96])
def test_what_the_racks_within_bounds_cannot_hold_is_placed_all_the_same(cpu, work_most):
    """Each rack is a node of eight GPUs, whose CPU may hold two replicas or one; the smallest bound is one for too few."""
    core = build_core(*(build_node(f"r{n:02}", gpus=8, topology=(f"r{n:02}",)) for n in range(40)))
    gang = build_request(gpus=1, cpu=cpu, replicas=12, locality=PACK)
    decision = decide(core, gang, planner=Planner(gang_work_most=work_most))
    assert len(decision.placements) == 12


def grid(gpus=2, nodes=2):
    return build_core(
        *(build_node(f"{rack[-1]}-{n}", gpus=gpus, topology=rack) for rack in RACKS for n in range(nodes))
    )


@pytest.mark.parametrize(
    ("locality", "replicas", "racks", "switches"),
    [(PACK, 4, 1, 1), (PACK, 8, 2, 1), (PACK, 12, 3, 2), (SPREAD, 4, 4, 2), (SPREAD, 2, 2, 2)],
)
def test_packing_fills_racks_then_switches_and_spreading_uses_all(locality, replicas, racks, switches):
    core = grid()
    # The second rack is dear to leave whole: one of its GPUs is awake already, which alone would draw work there.
    core.submit(build_request(gpus=1, cpu=4, milli=500), now_ns=1)
    used = nodes_used(decide(core, build_request(gpus=1, replicas=replicas, locality=locality)))
    paths = {core.state.nodes[name].inventory.topology for name in used}
    assert (len(paths), len({path[:2] for path in paths})) == (racks, switches)


def test_a_gang_goes_past_the_cheapest_node_to_one_rack_that_holds_it():
    """Power alone would take the T4 of three racks; one rack of G2 is dearer in watts and nearer."""
    core = build_core(
        *(build_node(f"t{n}", gpus=1, model="T4", topology=RACKS[n]) for n in range(3)),
        *(build_node(f"g{n}", gpus=2, model="G2", topology=RACKS[3]) for n in range(2)),
    )
    gang = build_request(gpus=1, replicas=3, locality=PACK)
    assert set(nodes_used(decide(core, gang, locality_w=0.0))) == {"t0", "t1", "t2"}
    assert set(nodes_used(decide(core, gang, locality_w=1000.0))) == {"g0", "g1"}


def test_without_a_wish_a_weight_or_a_second_replica_nothing_changes():
    plain = decide(grid(), build_request(gpus=1, replicas=3))
    for locality, locality_w in ((Locality.UNSPECIFIED, 500.0), (PACK, 0.0), (SPREAD, 0.0)):
        assert decide(grid(), build_request(gpus=1, replicas=3, locality=locality), locality_w=locality_w) == plain
    one = decide(grid(), build_request(gpus=1))
    assert decide(grid(), build_request(gpus=1, locality=SPREAD)) == one
    assert [term.name for term in one.explanation[0].candidates[0].terms] == list(TERMS)


@pytest.mark.parametrize("placement", ["fgd", "pwr200", "bestfit", "random"])
def test_a_published_policy_knows_no_wish(placement):
    placed = []
    for locality in Locality:
        wanted = build_request(gpus=1, replicas=5, locality=locality)
        placed.append(Planner().decide_placement(grid().snapshot(), wanted.spec, BALANCED, placement))
    assert len(placed[0].placements) == 5
    assert all(decision == placed[0] for decision in placed)
    ours = {
        decide(grid(), build_request(gpus=1, replicas=5, locality=locality)).placements for locality in (PACK, SPREAD)
    }
    assert len(ours) == 2


def test_the_term_is_explained_and_the_chosen_place_comes_first():
    core = grid()
    step = core.submit(build_request(gpus=1, replicas=4, locality=SPREAD), now_ns=1)
    explained = core.explain_workload(step.result.workload_id).replicas
    for one, spot in zip(explained, step.result.placements, strict=True):
        best = one.candidates[0]
        assert (best.node_name, best.gpu_indexes) == (spot.node_name, spot.gpu_indexes)
        assert best.terms[-1].name == "topology"
        for candidate in one.candidates:
            assert candidate.cost_w == pytest.approx(sum(term.cost_w for term in candidate.terms))
    # The second shares the zone with the first; the third also a switch.
    assert [one.candidates[0].terms[-1].cost_w for one in explained] == [0.0, 100.0, 300.0, 400.0]


def test_the_order_in_which_nodes_join_decides_nothing():
    inventories = [build_node(f"{rack[-1]}-{n}", gpus=2, topology=rack) for rack in RACKS for n in range(2)]
    gang = build_request(gpus=1, replicas=5, locality=PACK)
    found = [decide(build_core(*order), gang).placements for order in (inventories, inventories[::-1])]
    assert found[0] == found[1]
