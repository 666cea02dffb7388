"""Devices held against devices planned: what is put right, what cannot be, and who waits for whom."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gate_rig import Api, Side

from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.engines.kubernetes.pods.device_consistency import ReplicaDevices, plan_repair
from eelgrid_controller.engines.kubernetes.pods.inflight import DeviceLane, InflightPods

A, B, C, D = DEVICES = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def standing(planned, held=None, *, is_given=True):
    return ReplicaDevices(frozenset(planned), None if held is None else frozenset(held), is_given)


def test_what_is_as_planned_needs_nothing():
    found = plan_repair({("x", 0): standing([A], [A]), ("y", 0): standing([B])}, [C], DEVICES)
    assert found == ({}, {})


def test_a_pod_on_another_free_device_is_pointed_at_it():
    assert plan_repair({("x", 0): standing([A], [B])}, [], DEVICES) == ({("x", 0): (B,)}, {})


def test_two_with_each_others_devices_swap():
    crossed = {("x", 0): standing([A, B], [C, D]), ("y", 0): standing([C, D], [A, B])}
    assert plan_repair(crossed, [], DEVICES) == ({("x", 0): (C, D), ("y", 0): (A, B)}, {})


def test_who_has_no_devices_yet_makes_room():
    found = plan_repair({("x", 0): standing([A], [B]), ("y", 0): standing([B]), ("z", 0): standing([C])}, [D], DEVICES)
    assert found == ({("x", 0): (B,), ("y", 0): (A,)}, {})
    assert plan_repair({("y", 0): standing([B])}, [B], DEVICES) == ({("y", 0): (A,)}, {})


@pytest.mark.parametrize(
    ("others", "strangers", "words"),
    [
        ({("w", 0): standing([B], is_given=False)}, [], "planned on and keeps"),
        ({("w", 0): standing([B, C], [B])}, [], "is said"),
        ({("w", 0): standing([B])}, [A, C, D], "can have no others"),
    ],
)
def test_what_cannot_be_put_right_is_reported(others, strangers, words):
    found = plan_repair({("x", 0): standing([A], [B]), **others}, strangers, DEVICES)
    assert not found.pointed
    if words == "is said":
        # Two that are said to hold one device: a word out of date.
        assert found.hopeless == {}
    else:
        assert words in found.hopeless["x", 0]


def test_another_number_of_devices_is_reported():
    found = plan_repair({("x", 0): standing([A], [A, B])}, [], DEVICES)
    assert found == ({}, {("x", 0): "it holds 2 devices and was planned on 1"})


STANDINGS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["as planned", "others", "unseen", "fixed"])), max_size=5
)


@given(wanted=STANDINGS, planned=st.permutations(range(8)), actual=st.permutations(range(8)), strange=st.integers(0, 2))
def test_whatever_the_kubelet_gave_is_what_the_plan_says_afterwards(wanted, planned, actual, strange):
    devices = [f"GPU-{number}" for number in range(8)]
    planned, actual = [[devices[one] for one in some] for some in (planned, actual)]
    there, given_away, taken = {}, {}, set()
    for number, (size, way) in enumerate(wanted):
        mine, planned = planned[:size], planned[size:]
        if len(mine) == size:
            there[f"w{number}", 0] = (mine, way)
    # A kubelet gives each device once, and none of those that somebody has without it.
    for key, (mine, way) in sorted(there.items(), key=lambda one: one[1][1] != "fixed"):
        if way in ("as planned", "fixed") and not taken & set(mine):
            given_away[key] = mine
            taken |= set(mine)
    for key, (mine, way) in there.items():
        free = [one for one in actual if one not in taken]
        if way == "others" and len(free) >= len(mine):
            given_away[key] = free[: len(mine)]
            taken |= set(given_away[key])
    strangers = [one for one in actual if one not in taken][:strange]
    case = {
        key: standing(mine, given_away.get(key) if way in ("as planned", "others") else None, is_given=way != "fixed")
        for key, (mine, way) in there.items()
    }
    found = plan_repair(case, strangers, devices)
    after = {key: set(found.pointed.get(key, one.planned)) for key, one in case.items()}
    for key, one in case.items():
        assert len(after[key]) == len(one.planned)
        assert not any(after[key] & after[other] for other in after if other != key), "a device is planned twice"
        if one.held is not None:
            assert after[key] == one.held or key in found.hopeless
        if not one.is_given:
            assert after[key] == one.planned
    if len(set().union(*after.values())) + len(strangers) <= 8 and all(one.is_given for one in case.values()):
        assert not found.hopeless, "there was room for everybody"


def lane(node, resource="nvidia.com/gpu"):
    return DeviceLane(node, resource)


def test_the_next_unit_goes_when_the_pod_before_was_seen_with_its_devices():
    flights = InflightPods(most_s=15.0)
    assert list(flights.set_steered("n", is_so=True)) == []
    assert flights.can_start("x", [lane("n")])
    flights.record_start("x", "u1", ("s", "p1"), lane("n"), 0.0)
    assert not flights.can_start("y", [lane("n")])
    assert flights.can_start("y", [lane("n", "nvidia.com/mig-1g.10gb"), lane("m")])
    assert flights.can_start("x", [lane("n")])
    assert list(flights.on_devices_reported("n", {("s", "p2"): ()})) == []
    assert list(flights.on_devices_reported("n", {("s", "p1"): ()})) == ["y"]
    assert flights.can_start("y", [lane("n")])
    assert len(flights) == 0


@pytest.mark.parametrize("end", ["gone", "late", "unsteered"])
def test_a_flight_ends_however_it_ends(end):
    flights = InflightPods(most_s=15.0)
    list(flights.set_steered("n", is_so=True))
    flights.record_start("x", "u1", ("s", "p1"), lane("n"), 1.0)
    assert not flights.can_start("y", [lane("n")])
    assert list(flights.expire_overdue(15.9)) == []
    ways = {
        "gone": lambda: flights.record_end("u1"),
        "late": lambda: flights.expire_overdue(16.0),
        "unsteered": lambda: flights.set_steered("n", is_so=False),
    }
    assert list(ways[end]()) == ["y"]
    assert flights.can_start("y", [lane("n")])
    assert list(flights.record_end("u1")) == []


def test_where_somebody_else_gives_devices_away_nobody_waits():
    flights = InflightPods(most_s=15.0)
    flights.record_start("x", "u1", ("s", "p1"), lane("n"), 0.0)
    assert flights.can_start("y", [lane("n")])


def test_units_over_several_nodes_take_all_lanes_or_none():
    for order in permutations(["n1", "n2"]):
        flights = InflightPods(most_s=15.0)
        for name in order:
            list(flights.set_steered(name, is_so=True))
        flights.record_start("x", "u1", ("s", "p1"), lane("n1"), 0.0)
        assert not flights.can_start("gang", [lane("n1"), lane("n2")])
        assert flights.can_start("y", [lane("n2")]), "nobody holds a lane while it waits for another"


def test_the_gate_lets_one_pod_at_a_time_go_to_a_node_whose_devices_follow_the_plan():
    api = Api()
    api.node("n0")
    side = Side(api)
    side.lead(1)
    side.hear_devices(["n0"])
    names = [api.pod() for _ in range(3)]
    side.hear()

    def turns(at_s):
        """Everything but the kubelet's word, until nothing changes."""
        for _ in range(5):
            side.round(at_s)
            while side.under_way:
                side.write()
            api.schedule()
            side.hear()
        return [name for name in names if api.pods[name]["spec"].get("nodeName")]

    assert turns(0.0) == names[:1]
    side.hear_devices(["n0"])
    assert turns(1.0) == names[:2]
    side.events.append(told.GateTicked())
    assert turns(15.0) == names[:2]
    side.events.append(told.GateTicked())
    assert turns(16.5) == names, "a node that says nothing is not waited for for ever"


def test_members_of_a_gang_go_to_one_node_together():
    api = Api()
    api.node("n0")
    side = Side(api)
    side.lead(1)
    side.hear_devices(["n0"])
    for _ in range(3):
        api.pod(group="g", size=3, owner="g")
    alone = api.pod()
    side.hear()
    for _ in range(5):
        side.round(0.0)
        while side.under_way:
            side.write()
        api.schedule()
        side.hear()
    bound = {name for name, pod in api.pods.items() if pod["spec"].get("nodeName")}
    assert bound in ({alone}, set(api.pods) - {alone})
