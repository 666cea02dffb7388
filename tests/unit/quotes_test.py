"""Quotes: facts of the journal, made when they are due and by nobody else; a replay has them as they were."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import naive_lookahead
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.demand import NO_OPPORTUNITY_PRICES, OpportunityPrices, PriceMarket
from eelgrid_controller.state.events import PricesQuoted, WorkloadPlaced, event_from_plain, event_to_plain
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.opportunity_prices import measure_turnover
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import OBJECTIVES, Policy, Weights

SOME = OpportunityPrices(
    offers_w=(105, 0, 240),
    scarce_models=("G3",),
    load_permille=412,
    turnover_permille=750,
    stockout_permille=(0, 850, 0),
)
PAIR = build_request(gpus=2).spec.request


def in_force(shifts=0):
    market = PriceMarket()
    market.set_prices(SOME)
    market.count_task_changes(PAIR, shifts, 0)
    return market


def seen(market):
    return market.quotes, market.shifts


def flow(market):
    return market.came_milli, market.left_milli


def test_a_market_begins_void_and_counts_nothing_before_its_first_quotes():
    market = PriceMarket()
    market.count_task_changes(PAIR, 2, 1)
    assert (seen(market), flow(market)) == ((NO_OPPORTUNITY_PRICES, -1), (4000, 2000))
    market.set_prices(SOME)
    assert seen(market) == (SOME, 0)


def test_tasks_are_counted_from_the_last_quotes_on():
    market = in_force(3)
    market.count_task_changes(PAIR, 0, 2)
    assert (seen(market), flow(market)) == ((SOME, 5), (6000, 4000))
    market.set_prices(NO_OPPORTUNITY_PRICES)
    assert seen(market) == (NO_OPPORTUNITY_PRICES, 0)
    assert flow(market) == (6000 - 46, 4000 - 31)  # a 128th is forgotten


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_turnover_is_what_the_kernels_measure(came, left):
    market = PriceMarket()
    market.came_milli, market.left_milli = came, left
    assert market.turnover_permille == measure_turnover(came, left)
    assert market.turnover_permille == naive_lookahead.turnover(came, left)


@pytest.mark.parametrize(
    ("came", "left", "expected"),
    [
        (0, 0, 0),
        (1000, 0, 0),
        (1000, 124, 0),
        (1000, 125, 250),
        (1000, 500, 500),
        (1000, 874, 750),
        (1000, 875, 1000),
        (1000, 5000, 1000),
        (0, 1000, 1000),
    ],
)
def test_the_turnover_is_told_in_quarters(came, left, expected):
    market = PriceMarket()
    market.came_milli, market.left_milli = came, left
    assert market.turnover_permille == expected


def test_old_quotes_stay_in_force_and_void_ones_do_not():
    aged, void = in_force(2), in_force(2)
    aged.request_refresh()
    void.invalidate()
    assert seen(aged) == (SOME, -1)
    assert seen(void) == (NO_OPPORTUNITY_PRICES, -1)
    assert flow(aged) == flow(void) == (4000, 0)


def test_a_copy_goes_its_own_way():
    market = in_force(1)
    twin = market.copy()
    assert seen(twin) == seen(market)
    twin.count_task_changes(PAIR, 4, 1)
    assert (seen(market), flow(market)) == ((SOME, 1), (2000, 0))
    twin.invalidate()
    assert (seen(market), flow(market)) == ((SOME, 1), (2000, 0))


@pytest.mark.parametrize("market", [PriceMarket(), in_force(), in_force(7)])
def test_a_market_comes_back_from_its_dump(market):
    again = PriceMarket.load(json.loads(json.dumps(market.dump())))
    assert (seen(again), flow(again)) == (seen(market), flow(market))


def test_a_market_of_a_version_without_turnover_is_read():
    plain = in_force(7).dump()
    for newer in ("turnover_permille", "stockout_permille", "came_milli", "left_milli"):
        del plain[newer]
    again = PriceMarket.load(plain)
    assert (seen(again), flow(again)) == ((replace(SOME, turnover_permille=0, stockout_permille=()), 7), (0, 0))


# The core


def small(**changes):
    """Two nodes and a mix that is learned beforehand and stays."""
    state = ClusterState(**changes)
    for wanted in (build_request(gpus=1, milli=100, cpu=2), build_request(gpus=0, cpu=4)):
        state.demand.observe(wanted.spec.request, 50)
    state.demand.refresh_at = 10**9
    return build_core(*(build_node(f"n{n}", gpus=8, model="G2" if n % 2 else "T4") for n in range(6)), state=state)


def is_quoted(step):
    return [isinstance(event, PricesQuoted) for event in step.events]


def test_quotes_are_journalled_before_the_decision_that_uses_them_and_then_stand():
    core = small()
    first = core.submit(build_request(gpus=1, milli=100), now_ns=5)
    assert is_quoted(first) == [True, False, False]
    (quotes, _, _) = first.events
    assert quotes.time_ns == 5
    assert len(quotes.offers_w) == len(core.state.demand.mix) == 2
    assert seen(core.state.market) == (quotes.quotes, 1)
    # A horizon of 58 tasks: quotes are due after five, and a task that leaves counts as one that comes.
    found = [is_quoted(core.submit(build_request(gpus=1, milli=100), now_ns=6))[0] for _ in range(3)]
    core.cancel("w-1", now_ns=6)
    assert core.state.market.shifts == 5
    later = core.submit(build_request(gpus=1, milli=100), now_ns=7)
    assert [*found, is_quoted(later)[0]] == [False, False, False, True]
    # One of the four that came has left again.
    assert (quotes.turnover_permille, later.events[0].turnover_permille) == (0, 250)
    assert (quotes.stockout_permille, later.events[0].stockout_permille) == ((), (0, 0))


def test_turnover_and_stockouts_are_written_where_there_are_any():
    """Without them older versions read the event."""
    still = PricesQuoted(time_ns=1, offers_w=(1,), scarce_models=(), load_permille=800)
    moving = replace(still, turnover_permille=750, stockout_permille=(50,))
    assert not event_to_plain(still)[1].keys() & {"turnover_permille", "stockout_permille"}
    assert event_to_plain(moving)[1]["turnover_permille"] == 750
    assert event_to_plain(moving)[1]["stockout_permille"] == [50]
    assert [event_from_plain(*event_to_plain(event)) for event in (still, moving)] == [still, moving]


def test_a_decision_heeds_the_quotes_that_are_journalled_with_it():
    core = small()
    step = core.submit(build_request(gpus=1, milli=100), now_ns=1)
    placed = step.events[-1]
    assert isinstance(placed, WorkloadPlaced)
    best = placed.explanation[0].candidates[0]
    terms = {term.name: term.cost_w for term in best.terms}
    assert terms["lookahead"] != 0.0


@pytest.mark.parametrize(
    "wanted", [build_request(gpus=1, dry_run=True), build_request(gpus=9), build_request(gpus=9, dry_run=True)]
)
def test_neither_a_dry_run_nor_a_refusal_quotes(wanted):
    core = small()
    before = core.state.digest()
    if wanted.spec.request.gpu_count > 8:
        with pytest.raises(InvalidArgument):
            core.submit(wanted, now_ns=1)
    else:
        assert core.submit(wanted, now_ns=1).events == ()
    assert core.state.digest() == before
    assert seen(core.state.market) == (NO_OPPORTUNITY_PRICES, -1)
    # And what they looked at in passing does not decide later.
    fresh = small()
    assert core.submit(build_request(gpus=1), now_ns=2) == fresh.submit(build_request(gpus=1), now_ns=2)


@pytest.mark.parametrize("name", ["fgd", "pwr", "bestfit", "random"])
def test_other_policies_journal_no_quotes(name):
    core = small(policy=Policy(placement=name))
    for _ in range(12):
        assert is_quoted(core.submit(build_request(gpus=1), now_ns=1)) == [False, False]


def test_weights_that_heed_no_quotes_journal_none():
    core = small(policy=Policy(objective="custom", weights=Weights(power=1.0, fragmentation_w=80.0, stranding_w=200.0)))
    for _ in range(12):
        assert is_quoted(core.submit(build_request(gpus=1), now_ns=1)) == [False, False]


def test_a_new_mix_voids_and_a_node_that_joins_ages():
    core = small()
    core.submit(build_request(gpus=1, milli=100), now_ns=1)
    quotes = core.state.market.quotes
    core.register_node(build_node("late"), now_ns=2)
    assert seen(core.state.market) == (quotes, -1)
    core.submit(build_request(gpus=1, milli=100), now_ns=3)
    core.state.demand.refresh_at = 0
    core.submit(build_request(gpus=1, milli=300), now_ns=4)
    assert core.state.market.quotes is NO_OPPORTUNITY_PRICES


def test_quotes_for_another_mix_are_no_quotes():
    core = small()
    with pytest.raises(ContradictoryEvent, match="3 offers for a mix of 2"):
        core.state.apply(PricesQuoted(time_ns=1, offers_w=(1, 2, 3), scarce_models=(), load_permille=0))


def test_a_copied_state_has_a_market_of_its_own():
    core = small()
    core.submit(build_request(gpus=1, milli=100), now_ns=1)
    before = core.state.digest(), seen(core.state.market)
    other = Core(core.state.copy(), catalogue.load_catalogue())
    for number in range(9):
        other.submit(build_request(gpus=1, milli=100), now_ns=number)
    assert (core.state.digest(), seen(core.state.market)) == before


def test_a_checkpoint_of_before_there_were_quotes_loads():
    core = small()
    core.submit(build_request(gpus=1, milli=100), now_ns=1)
    plain = json.loads(json.dumps(core.state.dump()))
    del plain["market"]
    loaded = ClusterState.load(plain)
    assert seen(loaded.market) == (NO_OPPORTUNITY_PRICES, -1)
    assert is_quoted(Core(loaded, catalogue.load_catalogue()).submit(build_request(gpus=1), now_ns=2))[0]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from([100, 400, 1000]), st.sampled_from([(), ("G2",), ("G2", "T4")])),
        st.tuples(st.just("pair"), st.integers(0, 30), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 40), st.none()),
        st.tuples(st.just("lose"), st.integers(0, 3), st.integers(0, 1)),
        st.tuples(st.just("return"), st.integers(0, 3), st.integers(0, 1)),
        st.tuples(st.just("weights"), st.sampled_from(sorted(OBJECTIVES)), st.none()),
        st.tuples(st.just("policy"), st.sampled_from(["eelgrid", "fgd"]), st.none()),
    ),
    max_size=30,
)


def act(core, verb, one, two, now_ns):
    in_force = core.state.policy
    match verb:
        case "submit":
            return core.submit(build_request(gpus=1, milli=one, models=two, cpu=3), now_ns=now_ns)
        case "pair":
            return core.submit(build_request(gpus=2, cpu=one, replicas=two), now_ns=now_ns)
        case "cancel":
            keys = sorted(core.state.workloads)
            return core.cancel(keys[one % len(keys)], now_ns=now_ns) if keys else None
        case "lose":
            return core.mark_gpu_lost(f"n{one}", f"GPU-n{one}-{two}", now_ns=now_ns)
        case "return":
            return core.mark_gpu_returned(f"n{one}", f"GPU-n{one}-{two}", now_ns=now_ns)
        case "weights":
            changed = Policy(revision=in_force.revision, objective=one, weights=OBJECTIVES[one])
        case _:
            changed = Policy(revision=in_force.revision, placement=one)
    return core.update_policy(changed, now_ns=now_ns)


@settings(deadline=None, max_examples=60)
@given(ACTIONS)
def test_a_core_without_memory_quotes_and_decides_the_same_at_any_moment(history):
    """Each step is done by a core that remembers and by one built anew; the journal gives the state back."""
    core = build_core(*(build_node(f"n{n}", gpus=4, model="G2" if n % 2 else "T4", cpu=32) for n in range(4)))
    assert find_policy(core.state.policy.placement).name == "eelgrid"
    replayed = ClusterState.load(core.state.dump())
    for now_ns, (verb, one, two) in enumerate(history):
        fresh = Core(ClusterState.load(json.loads(json.dumps(core.state.dump()))), catalogue.load_catalogue())
        step, again = act(core, verb, one, two, now_ns), act(fresh, verb, one, two, now_ns)
        assert step == again
        for event in step.events if step else ():
            kind, body = event_to_plain(event)
            replayed.apply(event_from_plain(kind, json.loads(json.dumps(body))))
        assert replayed.digest() == core.state.digest() == fresh.state.digest()
