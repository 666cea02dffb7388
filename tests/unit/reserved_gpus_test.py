"""Reservations of a number of GPUs: which nodes are chosen, what they must not break, and when they are refused."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backfill_rig import S, Simulation
from tests.builders.cluster import build_node

from eelgrid_controller.queueing.reservations import NodeOffer, choose_nodes
from eelgrid_controller.state.events import event_from_plain, event_to_plain
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import JobDeadline, Reservation

HOUR = 3600
OFFERS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=7)


def build_reservation(gpus, name="r", start_s=HOUR, hours=4, **more):
    return Reservation(name=name, gpus=gpus, start_ns=start_s * S, end_ns=(start_s + hours * HOUR) * S, **more)


def reserve(found, *wanted):
    policy = replace(found.core.state.policy, reservations=(*found.core.state.policy.reservations, *wanted))
    step = found.apply(found.core.update_policy(policy, now_ns=found.now_s * S))
    return [one.node_names for one in step.result.reservations[-len(wanted) :]]


@given(offers=OFFERS, gpus=st.integers(1, 12))
@settings(deadline=None)
def test_the_chosen_have_enough_and_none_could_be_left_out(offers, gpus):
    offers = [NodeOffer(f"n{i}", free, free + more) for i, (free, more) in enumerate(offers)]
    chosen = choose_nodes(offers, gpus)
    free = {one.node_name: one.free for one in offers}
    fits = [names for size in range(1, len(offers) + 1) for names in combinations(free, size)]
    assert bool(chosen) == any(sum(free[name] for name in names) >= gpus for names in fits)
    if chosen:
        assert sum(free[name] for name in chosen) >= gpus
        assert all(sum(free[other] for other in chosen if other != name) < gpus for name in chosen)


@pytest.mark.parametrize(
    ("gpus", "chosen"), [(2, ("two",)), (4, ("four",)), (5, ("four", "one")), (8, ("eight",)), (9, ("eight", "one"))]
)
def test_nodes_are_chosen_that_close_no_more_than_is_needed(gpus, chosen):
    sizes = {"eight": 8, "four": 4, "two": 2, "one": 1}
    assert choose_nodes([NodeOffer(name, count, count) for name, count in sizes.items()], gpus) == chosen


def test_what_is_held_by_the_start_does_not_count_and_what_has_ended_by_then_does():
    found = Simulation(build_node("a", gpus=2), build_node("b", gpus=2), build_node("c", gpus=2))
    for key, run_s in (("short", HOUR // 2), ("long", 9 * HOUR)):
        found.submit(key, 2, run_s)
    found.submit("endless", 2, HOUR, expected_runtime_s=None)
    (short,) = found.core.workload("short").placements
    with pytest.raises(InvalidArgument) as refused:
        reserve(found, build_reservation(3))
    (violation,) = refused.value.violations
    assert violation.field == "policy.reservations[0].gpus"
    assert violation.problem.startswith("is 3, and 2 can be had then")
    assert reserve(found, build_reservation(2)) == [(short.node_name,)]


def test_models_count_and_unknown_ones_are_refused():
    found = Simulation(build_node("a", gpus=2, model="A10"), build_node("b", gpus=2, model="T4"))
    assert reserve(found, build_reservation(1, gpu_models=("t4",))) == [("b",)]
    with pytest.raises(InvalidArgument) as refused:
        reserve(found, build_reservation(1, "x", gpu_models=("ghost",)))
    assert refused.value.violations[0].field.startswith("policy.reservations[1].gpu_models")


def test_two_reservations_of_one_change_hold_different_nodes():
    found = Simulation(build_node("a", gpus=2), build_node("b", gpus=2))
    assert reserve(found, build_reservation(2), build_reservation(2, "s")) == [("a",), ("b",)]
    with pytest.raises(InvalidArgument):
        reserve(found, build_reservation(1, "t"))
    assert reserve(found, build_reservation(4, "later", start_s=5 * HOUR)) == [("a", "b")]


def test_promised_starts_keep_their_nodes():
    found = Simulation(build_node("a", gpus=2), build_node("b", gpus=2))
    found.submit("first", 2, HOUR)
    found.submit("second", 2, HOUR)
    due = found.submit("due", 2, HOUR, deadline=JobDeadline(end_ns=(2 * HOUR + 1) * S))
    assert due.promise.start_ns == (HOUR + 1) * S
    (names,) = reserve(found, build_reservation(2, start_s=HOUR + 1))
    assert set(names).isdisjoint(one.node_name for one in due.promise.placements)
    with pytest.raises(InvalidArgument):
        reserve(found, build_reservation(2, "x", start_s=HOUR + 1))


def test_work_that_would_run_into_it_goes_elsewhere_and_its_users_work_starts_within_it():
    found = Simulation(build_node("a", gpus=2), build_node("b", gpus=2))
    ((name,),) = reserve(found, build_reservation(2, users=("ada",)))
    found.submit("long", 2, 9 * HOUR)
    assert found.core.workload("long").placements[0].node_name != name
    found.submit("ada", 2, HOUR, user="ada")
    found.submit("bob", 2, HOUR, user="bob")
    found.advance(HOUR)
    found.finish()
    assert found.starts["ada"] == HOUR
    assert found.starts["bob"] >= 5 * HOUR
    state = found.replay()
    assert state.digest() == found.core.state.digest()


def test_without_a_number_of_gpus_the_journal_is_as_older_versions_read_it():
    found = Simulation(build_node("a", gpus=2))
    named = Reservation(name="n", node_names=("a",), start_ns=HOUR * S, end_ns=2 * HOUR * S)
    policy = replace(found.core.state.policy, reservations=(named,))
    (event,) = found.core.update_policy(policy, now_ns=S).events
    kind, body = event_to_plain(event)
    assert not {"gpus", "gpu_models"} & set(body["policy"]["reservations"][0])
    assert event_from_plain(kind, body) == event


# Chosen again


def find_reservation(found, name="r"):
    return next(one for one in found.core.state.policy.reservations if one.name == name)


def lose(found, name):
    found.apply(found.core.mark_node_lost(name, now_ns=found.now_s * S))


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("how", ["lost", "cordoned", "removed"])
def test_for_a_node_that_is_gone_another_is_taken_and_the_change_is_told(how, within):
    found = Simulation(*(build_node(name, gpus=2) for name in "abc"))
    assert reserve(found, build_reservation(4)) == [("a", "b")]
    revision = found.core.state.policy.revision
    if within:
        found.advance(2 * HOUR)
    now_ns = found.now_s * S
    if how == "removed":
        found.apply(found.core.remove_node("a", force=True, is_connected=False, now_ns=now_ns))
    elif how == "cordoned":
        found.apply(found.core.cordon_node("a", now_ns=now_ns))
    else:
        lose(found, "a")
    one = find_reservation(found)
    word = "cordoned" if how == "cordoned" else "lost"
    assert (one.node_names, one.lacking_gpus, one.change_cause) == (("b", "c"), 0, f"node: a is {word}")
    assert found.core.state.policy.revision == revision + 1
    assert found.replay().digest() == found.core.state.digest()
    # Others may have the node when it is open again, and not the one that was taken.
    if how == "cordoned":
        found.apply(found.core.uncordon_node("a", now_ns=now_ns))
        assert {place.node_name for place in found.submit("other", 2, 8 * HOUR).placements} == {"a"}


def test_a_reservation_that_finds_no_other_gpus_says_what_it_lacks_and_takes_what_becomes_free():
    found = Simulation(build_node("a", gpus=4, model="G1"), build_node("b", gpus=2, model="T4"))
    found.submit("long", 2, 9 * HOUR, models=("T4",))
    assert reserve(found, build_reservation(4)) == [("a",)]
    lose(found, "a")
    one = find_reservation(found)
    assert (one.node_names, one.lacking_gpus, one.change_cause) == (("a",), 4, "node: a is lost")
    found.apply(found.core.cancel("long", now_ns=found.now_s * S))
    one = find_reservation(found)
    assert (one.node_names, one.lacking_gpus) == (("a", "b"), 2)
    found.apply(found.core.register_node(build_node("a", gpus=4, model="G1"), now_ns=found.now_s * S))
    assert find_reservation(found).lacking_gpus == 0
    assert found.replay().digest() == found.core.state.digest()


def test_promised_starts_and_other_reservations_keep_their_nodes_when_one_is_chosen_again():
    found = Simulation(*(build_node(name, gpus=2) for name in "abc"))
    reserve(found, build_reservation(2), build_reservation(2, "s"))
    found.submit("first", 2, 2 * HOUR)
    found.submit("due", 2, HOUR, deadline=JobDeadline(end_ns=(4 * HOUR) * S))
    lose(found, "a")
    assert find_reservation(found).lacking_gpus == 2
    assert find_reservation(found, "s").node_names == ("b",)
    assert found.core.workload("due").deadline_breach is None


def test_work_of_a_reservation_that_runs_in_it_is_no_reason_to_take_more():
    found = Simulation(*(build_node(name, gpus=2) for name in "abc"))
    assert reserve(found, build_reservation(4, users=("ada",))) == [("a", "b")]
    found.advance(HOUR)
    found.submit("ada", 2, 2 * HOUR, user="ada")
    found.submit("more", 2, 2 * HOUR, user="ada")
    lose(found, "a" if found.core.workload("ada").placements[0].node_name == "b" else "b")
    one = find_reservation(found)
    assert len(one.node_names) == 2
    assert one.lacking_gpus == 0


@given(
    nodes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    wanted=st.integers(1, 10),
    changes=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["lose", "join", "cordon", "uncordon"])), max_size=8),
)
@settings(deadline=None, max_examples=60)
def test_a_reservation_lacks_gpus_only_if_all_nodes_that_are_up_have_too_few(nodes, wanted, changes):
    inventories = [build_node(f"n{i}", gpus=gpus) for i, gpus in enumerate(nodes)]
    found = Simulation(*inventories)
    if wanted > sum(nodes):
        with pytest.raises(InvalidArgument):
            reserve(found, build_reservation(wanted))
        return
    reserve(found, build_reservation(wanted))
    lost, cordoned = set(), set()
    for index, change in changes:
        number = index % len(nodes)
        name, now_ns = f"n{number}", found.now_s * S
        if change == "lose":
            lose(found, name)
            lost.add(name)
        elif change == "join":
            found.apply(found.core.register_node(inventories[number], now_ns=now_ns))
            lost.discard(name)
        elif change == "cordon":
            found.apply(found.core.cordon_node(name, now_ns=now_ns))
            cordoned.add(name)
        else:
            found.apply(found.core.uncordon_node(name, now_ns=now_ns))
            cordoned.discard(name)
        up = {f"n{i}": gpus for i, gpus in enumerate(nodes) if f"n{i}" not in lost | cordoned}
        one = find_reservation(found)
        assert one.lacking_gpus == max(0, wanted - sum(up.values()))
        assert sum(up.get(each, 0) for each in one.node_names) >= wanted - one.lacking_gpus
        if not one.lacking_gpus:
            assert set(one.node_names) <= set(up)
    assert found.replay().digest() == found.core.state.digest()
