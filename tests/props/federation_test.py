"""Ranking of clusters and the record of a workload: what must hold for any offers and any answers."""

import itertools
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.builders.cluster import build_request

from eelgrid_controller.federation.dispatch import (
    RESERVED_MOST,
    ClusterCall,
    CopyPhase,
    Dispatch,
    Verb,
    add_clusters,
    choose_cluster,
    hold_dispatch,
    plan_calls,
    record_answer,
    record_failure,
    release_dispatch,
    request_cancel,
    request_move,
)
from eelgrid_controller.federation.ranking import ClusterOffer, RankingWeights, estimate_power_w, price_now, rank_offers
from eelgrid_controller.federation.record_store import decode_state, encode_state
from eelgrid_protos.faults import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from eelgrid_protos.messages import EnergyPrices, JobDeadline, PricePeriod, Workload, WorkloadPhase

NOW_NS = 1_700_000_000_000_000_000
BUSY_W = {"A100": 400.0, "H100": 700.0}
SPEC = build_request("w-x", gpus=2).spec
WEIGHTS = RankingWeights()
PRICES = st.builds(
    lambda price, carbon, currency: EnergyPrices(
        periods=(PricePeriod(begins_minute=0, price_per_kwh=price, carbon_kg_per_kwh=carbon),),
        currency=currency,
        pue=1.2,
        carbon_price_per_kg=0.08,
    ),
    st.floats(-0.1, 2.0),
    st.floats(0.0, 1.0),
    st.sampled_from(["EUR", "EUR", "USD"]),
)


@st.composite
def offers(draw):
    count = draw(st.integers(1, 6))
    return [
        ClusterOffer(
            cluster=f"c{number}",
            start_ns=draw(st.none() | st.integers(NOW_NS - 10**12, NOW_NS + 10**15)),
            pending=draw(st.integers(0, 1000)),
            models=draw(st.dictionaries(st.sampled_from(["A100", "H100", "unknown"]), st.integers(0, 100))),
            prices=draw(st.none() | PRICES),
        )
        for number in range(count)
    ]


def rank(found, spec=SPEC, weights=WEIGHTS):
    return rank_offers(spec, found, busy_w=BUSY_W, weights=weights, now_ns=NOW_NS)


def names(ranked):
    return [one.offer.cluster for one in ranked]


@given(offers(), st.randoms(use_true_random=False))
def test_every_offer_is_ranked_once_in_whatever_order_answers_come(found, chance):
    ranked = rank(found)
    assert sorted(names(ranked)) == sorted(one.cluster for one in found)
    mixed = list(found)
    chance.shuffle(mixed)
    assert rank(mixed) == ranked
    assert all(math.isfinite(one.cost) and one.wait >= 0 and one.describe() for one in ranked)
    assert all(low.cost <= high.cost for low, high in itertools.pairwise(ranked))


def one_price(price, *, carbon=0.0, currency="EUR"):
    period = PricePeriod(begins_minute=0, price_per_kwh=price, carbon_kg_per_kwh=carbon)
    return EnergyPrices(periods=(period,), currency=currency, carbon_price_per_kg=0.1)


def offer(name, *, wait_s=0.0, price=0.2, carbon=0.0, models=None, **more):
    start_ns = None if wait_s is None else NOW_NS + int(wait_s * 1e9)
    fields = {"models": models or {"H100": 8}, "prices": one_price(price, carbon=carbon)}
    return ClusterOffer(cluster=name, start_ns=start_ns, **(fields | more))


@given(st.floats(0.0, 1.0), st.floats(0.001, 1.0))
def test_of_two_that_differ_in_price_the_cheaper_is_first(price, more):
    assert names(rank([offer("a", price=price + more), offer("b", price=price)])) == ["b", "a"]


@given(st.floats(0.0, 1.0), st.floats(0.001, 1.0))
def test_of_two_that_differ_in_carbon_the_cleaner_is_first(carbon, more):
    assert names(rank([offer("a", carbon=carbon + more), offer("b", carbon=carbon)])) == ["b", "a"]


@given(st.floats(0.0, 86_400.0), st.floats(1.0, 86_400.0))
def test_of_two_that_differ_in_the_wait_the_sooner_is_first(wait_s, more_s):
    assert names(rank([offer("a", wait_s=wait_s + more_s), offer("b", wait_s=wait_s)])) == ["b", "a"]


def test_a_cheap_cluster_is_worth_a_short_wait_and_not_a_long_one():
    dear = offer("dear", price=0.4)
    assert names(rank([dear, offer("cheap", price=0.2, wait_s=60.0)])) == ["cheap", "dear"]
    assert names(rank([dear, offer("cheap", price=0.2, wait_s=7200.0)])) == ["dear", "cheap"]


def test_a_promise_counts_for_more_than_an_unknown_wait_and_a_short_queue_for_more_than_a_long_one():
    promised, unknown = offer("promised", wait_s=1800.0), offer("unknown", wait_s=None, pending=3)
    assert names(rank([unknown, promised])) == ["promised", "unknown"]
    assert names(rank([unknown, offer("longer", wait_s=None, pending=300)])) == ["unknown", "longer"]


def test_a_cluster_without_prices_counts_as_the_dearest_and_says_so():
    silent = offer("a", prices=None)
    ranked = rank([silent, offer("b", price=0.1), offer("c", price=0.5)])
    assert names(ranked)[0] == "b"
    (found,) = [one for one in ranked if one.offer is silent]
    assert found.is_assumed
    assert found.energy == max(one.energy for one in ranked)
    assert "without prices" in found.describe()


def test_prices_in_another_currency_are_not_compared():
    foreign = offer("a", prices=one_price(0.0001, currency="JPY"))
    ranked = rank([foreign, offer("b", price=0.2), offer("c", price=0.3)])
    assert names(ranked)[0] == "b"
    assert [one.is_assumed for one in ranked if one.offer is foreign] == [True]


def test_power_is_that_of_the_models_that_the_workload_may_have():
    assert estimate_power_w(SPEC, {"A100": 1, "H100": 3, "unknown": 5}, BUSY_W) == 2 * (400.0 + 3 * 700.0) / 4
    named = build_request("w-x", gpus=1, models=("A100",)).spec
    assert estimate_power_w(named, {"A100": 1, "H100": 3}, BUSY_W) == 400.0
    assert estimate_power_w(named, {"H100": 3}, BUSY_W) is None
    assert estimate_power_w(build_request("w-x", gpus=0).spec, {}, BUSY_W) == 0.0


def test_the_cost_of_a_run_is_its_watts_times_the_price_of_its_hour():
    (found,) = rank([offer("a", price=0.3, carbon=0.5)])
    assert math.isclose(found.energy, 1.4 * 0.3)
    assert math.isclose(found.carbon, 1.4 * 0.5 * 0.1)
    price, carbon = price_now(one_price(0.3, carbon=0.5), NOW_NS)
    assert math.isclose(price, 0.3)
    assert math.isclose(carbon, 0.5)


# The record

CLUSTERS = ("a", "b", "c")
DEADLINE = {"deadline": JobDeadline(end_ns=10**18), "expected_runtime_s": 60.0}


def answer(phase=WorkloadPhase.PENDING, *, held="", placed_ns=0, **more):
    return Workload(
        workload_id="w-x", spec=SPEC, phase=phase, submitted_ns=1, held_by=held, placed_ns=placed_ns, **more
    )


ANSWERS = st.sampled_from(
    [
        answer(held="alice"),
        answer(),
        answer(preemptions=1),
        answer(WorkloadPhase.PLACED, placed_ns=5),
        answer(WorkloadPhase.CANCELLED),
        answer(WorkloadPhase.SUCCEEDED, placed_ns=5),
        Unavailable("cut off"),
        DeadlineExceeded("no answer"),
        NotFound("no such workload"),
        AlreadyExists("with another spec"),
        PermissionDenied("no"),
        FailedPrecondition("it runs"),
    ]
)


def build_dispatch(**spec):
    return add_clusters(Dispatch(workload_id="w-x", request=build_request(**spec)), CLUSTERS[:2], ("why",))


@st.composite
def histories(draw):
    """A record after any answers to calls that it permitted."""
    found = [build_dispatch(**draw(st.sampled_from([{}, DEADLINE])))]
    for _ in range(draw(st.integers(0, 25))):
        now, calls = found[-1], plan_calls(found[-1])
        kind = draw(st.sampled_from(["call", "call", "call", "choose", "cancel", "move", "more"]))
        if kind == "call" and calls:
            call, said = draw(st.sampled_from(calls)), draw(ANSWERS)
            if isinstance(said, Workload):
                now = record_answer(now, call.cluster, call.verb, said)
            else:
                now = record_failure(now, call.cluster, call.verb, said)
        elif kind == "choose":
            now = choose_cluster(now)
        elif kind == "cancel" and draw(st.integers(0, 9)) == 0:
            now = request_cancel(now)
        elif kind == "move":
            now = request_move(now, draw(st.sampled_from(CLUSTERS)))
        elif kind == "more":
            now = add_clusters(now, CLUSTERS, ("again",))
        found.append(now)
    return found


@given(histories())
def test_only_the_chosen_cluster_is_released(history):
    for now in history:
        for call in plan_calls(now):
            assert call.verb is not Verb.RELEASE or call.cluster == now.chosen


@given(histories())
def test_the_choice_changes_only_after_the_chosen_one_ended_without_a_start(history):
    for before, after in itertools.pairwise(history):
        if before.chosen and after.chosen != before.chosen:
            copy = after.find_copy(before.chosen)
            assert copy.phase is CopyPhase.ENDED
            assert not copy.started


@given(histories())
def test_at_most_two_are_reserved_and_what_ended_stays_so(history):
    for before, after in itertools.pairwise(history):
        assert sum(copy.is_reserved for copy in after.copies if copy.cluster != after.chosen) <= RESERVED_MOST
        assert len({copy.cluster for copy in after.copies}) == len(after.copies)
        for copy in before.copies:
            if copy.phase is CopyPhase.ENDED:
                assert after.find_copy(copy.cluster).phase is CopyPhase.ENDED


@given(histories())
def test_what_permits_to_stop_or_cancel_the_chosen_copy_is_written_before(history):
    for before, after in itertools.pairwise(history):
        ours = {ClusterCall(after.chosen, verb) for verb in (Verb.HOLD, Verb.CANCEL)}
        if not after.is_cancelled and ours & (set(plan_calls(after)) - set(plan_calls(before))):
            assert before.durable_progress != after.durable_progress


@given(histories())
def test_what_is_held_at_the_front_goes_nowhere_before_it_is_released(history):
    first = history[0]
    held = hold_dispatch(replace(first, copies=(), chosen=""), "alice")
    assert (held.needs_clusters, add_clusters(held, CLUSTERS, ("why",)), plan_calls(held)) == (0, held, ())
    assert not held.is_settled
    assert release_dispatch(held).needs_clusters
    assert request_cancel(held).is_settled
    for now in history[1:]:
        if now.copies:
            assert hold_dispatch(now, "alice") == now


@given(histories())
def test_a_settled_record_asks_for_nothing_and_any_record_reads_back(history):
    for now in history:
        assert not (now.is_settled and plan_calls(now))
        assert decode_state(now.workload_id, now.request, encode_state(now)) == now


def test_work_with_a_promised_deadline_is_sent_to_one_cluster_at_a_time():
    request = build_request("w-x", **DEADLINE)
    now = add_clusters(Dispatch(workload_id="w-x", request=request), CLUSTERS, ("why",))
    assert (now.chosen, plan_calls(now)) == ("a", (ClusterCall("a", Verb.SUBMIT),))
    assert now.needs_clusters == 0
    # Silence is no refusal.
    now = record_failure(now, "a", Verb.SUBMIT, DeadlineExceeded("no answer"))
    assert (now.chosen, plan_calls(now)) == ("a", (ClusterCall("a", Verb.SUBMIT),))
    now = record_failure(now, "a", Verb.SUBMIT, FailedPrecondition("too late"))
    assert plan_calls(now) == (ClusterCall("a", Verb.WITHDRAW),)
    # A cluster of an earlier version, which marks nothing.
    unmarked = record_failure(now, "a", Verb.WITHDRAW, FailedPrecondition("too late"))
    assert (unmarked.chosen, unmarked.needs_clusters, unmarked.has_failed, unmarked.is_settled) == ("a", 0, True, True)
    # Once its id is marked there, another one may have it.
    for marked in (
        record_answer(now, "a", Verb.WITHDRAW, answer(WorkloadPhase.CANCELLED)),
        record_failure(now, "a", Verb.WITHDRAW, AlreadyExists("with another spec")),
    ):
        assert (marked.chosen, marked.needs_clusters, marked.has_failed) == ("", 1, False)
        again = add_clusters(marked, CLUSTERS, ("why",))
        assert (again.chosen, plan_calls(again)) == ("b", (ClusterCall("b", Verb.SUBMIT),))


@given(histories())
def test_a_cluster_that_refused_is_asked_to_mark_the_id_until_it_has_answered(history):
    for now in history:
        refused = [copy.cluster for copy in now.copies if copy.phase is CopyPhase.REFUSED]
        assert {ClusterCall(name, Verb.WITHDRAW) for name in refused} <= set(plan_calls(now))
        assert not (refused and now.is_settled)


def test_a_standby_stays_reserved_until_the_workload_has_started_elsewhere():
    now = build_dispatch()
    for name in ("a", "b"):
        now = record_answer(now, name, Verb.SUBMIT, answer(held="alice"))
    now = choose_cluster(now)
    assert now.chosen == "a"
    assert plan_calls(now) == (ClusterCall("a", Verb.RELEASE), ClusterCall("b", Verb.LOOK))
    now = record_answer(now, "a", Verb.RELEASE, answer())
    assert plan_calls(now) == (ClusterCall("a", Verb.LOOK), ClusterCall("b", Verb.LOOK))
    now = record_answer(now, "a", Verb.LOOK, answer(WorkloadPhase.PLACED, placed_ns=9))
    assert plan_calls(now) == (ClusterCall("a", Verb.LOOK), ClusterCall("b", Verb.CANCEL))


def test_what_its_owner_holds_in_the_chosen_cluster_is_not_released():
    now = choose_cluster(record_answer(build_dispatch(), "a", Verb.SUBMIT, answer(held="alice")))
    now = record_answer(now, "a", Verb.RELEASE, answer())
    now = record_answer(now, "a", Verb.LOOK, answer(held="alice"))
    assert ClusterCall("a", Verb.RELEASE) not in plan_calls(now)


def test_one_that_was_preempted_does_not_leave():
    now = choose_cluster(record_answer(build_dispatch(), "a", Verb.SUBMIT, answer(held="alice")))
    now = record_answer(now, "b", Verb.SUBMIT, answer(held="alice"))
    now = record_answer(now, "a", Verb.RELEASE, answer(preemptions=1))
    assert request_move(now, "b") == now
