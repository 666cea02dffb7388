"""A leader with an empty core: whatever happened before, it holds every planned pod where it stands, and nothing twice."""

import copy
import random
from collections import Counter

import pytest
from tests.builders.kubernetes import count_gpus
from tests.gate_rig import Api, Side, check, settle
from tests.props.kubernetes_gate_test import Story
from tests.state_invariants import check_invariants

from eelgrid_controller.engines.kubernetes.model.node_affinity import trait_name
from eelgrid_controller.engines.kubernetes.model.pod_group import unit_of
from eelgrid_controller.engines.kubernetes.model.selectors import parse_constraint
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_GROUP_SIZE, ANNOTATION_PLAN
from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import parse_plan, ungating_patch
from eelgrid_controller.engines.kubernetes.pods.reconcile_unit import remove_node_pin


def running(api):
    return [pod for pod in api.pods.values() if pod["spec"].get("nodeName") and pod["status"]["phase"] != "Succeeded"]


def units(api):
    """The nodes of every unit that stands whole, by its name, each with its pod's GPUs."""
    found = {}
    for pod in running(api):
        text = pod["metadata"]["annotations"].get(ANNOTATION_PLAN)
        if text:
            size = int(pod["metadata"]["annotations"].get(ANNOTATION_GROUP_SIZE, 1))
            places = found.setdefault(unit_of(parse_plan(text).workload), (size, []))[1]
            places.append((pod["spec"]["nodeName"], count_gpus(pod)))
    return {name: sorted(places) for name, (size, places) in found.items() if len(places) == size}


def is_held_where_it_stands(api, side):
    core = side.core
    check_invariants(core.state)
    wanted = units(api)
    live = [one for one in core.state.workloads.values() if one.placements and not one.ended_ns]
    held = {
        unit_of(one.workload_id): sorted((place.node_name, len(place.gpu_indexes)) for place in one.placements)
        for one in live
    }
    assert len(held) == len(live), "no unit twice"
    assert held.keys() == wanted.keys()
    # Of a gang in parts, whose rest was placed beside members that stood, the rest alone is held.
    in_parts = {unit_of(one.workload_id) for one in live if one.workload_id not in side.adopted}
    for name, places in held.items():
        is_whole = name.startswith("pod-") or name not in in_parts
        assert places == wanted[name] if is_whole else not Counter(places) - Counter(wanted[name]), name
    for name, record in core.state.nodes.items():
        stand = sum(count_gpus(pod) for pod in running(api) if pod["spec"]["nodeName"] == name)
        ours = sum(gpus for places in held.values() for node, gpus in places if node == name)
        assert len(record.gpu_milli) == ours, name
        assert record.others.gpu_count == stand - ours, name


@pytest.mark.parametrize("seed", range(10))
def test_a_leader_with_an_empty_core_holds_all_that_stands(seed):
    rng = random.Random(seed)
    story = Story(has_thieves=seed % 2 == 1)
    for _ in range(rng.randint(30, 150)):
        story.step(rng.getrandbits(32))
    api = story.api
    fresh = Side(api)  # of an empty journal; it begins in the midst of it all
    story.sides.append(fresh)
    story.elect(2)
    for name in api.nodes:
        api.node(name)
    at_s = settle(api, story.sides, story.at_s + 1.0, rounds=90)
    check(api)
    is_held_where_it_stands(api, fresh)
    adopted = set(fresh.adopted)
    # And again by a process that reads its own journal, and by one whose journal is gone.
    fresh.begin()
    at_s = settle(api, story.sides, at_s, rounds=25)
    is_held_where_it_stands(api, fresh)
    assert fresh.adopted == adopted, "what the journal knows is not taken over again"
    last = Side(api)
    story.sides.append(last)
    story.elect(3)
    settle(api, story.sides, at_s, rounds=25)
    check(api)
    is_held_where_it_stands(api, last)


@pytest.mark.parametrize("seed", range(6))
def test_journals_may_be_lost_at_any_time(seed):
    rng = random.Random(seed)
    story = Story(has_thieves=False)
    for number in range(80):
        story.step(rng.getrandbits(32))
        if number % 15 == 14:
            lost = rng.randrange(2)
            story.api.watchers.remove(story.sides[lost])
            story.sides[lost] = Side(story.api)
            story.elect(lost)
    for name in story.api.nodes:
        story.api.node(name)
    story.elect(0)
    settle(story.api, story.sides, story.at_s + 1.0, rounds=60)
    check(story.api)
    is_held_where_it_stands(story.api, story.sides[0])


def test_a_standby_that_saw_the_pods_wait_asks_for_nothing_again():
    api = Api()
    api.node("n0")
    leader, standby = Side(api), Side(api)
    leader.lead(1)
    name = api.pod()
    at_s = settle(api, [leader, standby], 0.0, rounds=5)
    assert api.pods[name]["spec"]["nodeName"] == "n0"
    leader.lead(None)
    standby.lead(2)
    asked = []
    command = standby._command
    standby._command = lambda one: (asked.append(type(one)), command(one))
    settle(api, [standby], at_s, rounds=5)
    assert told.RereadPod not in asked
    assert asked.count(told.AdoptUnit) == 1
    is_held_where_it_stands(api, standby)


def test_adopted_pods_hold_the_devices_of_their_plans_and_go_with_them():
    api = Api()
    api.node("n0")
    leader = Side(api)
    leader.lead(1)
    names = [api.pod(gpus=2) for _ in range(3)]
    at_s = settle(api, [leader], 0.0, rounds=5)
    plans = {parse_plan(api.pods[name]["metadata"]["annotations"][ANNOTATION_PLAN]) for name in names}
    leader.lead(None)
    api.watchers.clear()
    other = Side(api)
    other.lead(2)
    at_s = settle(api, [other], at_s, rounds=5)
    held = {
        (place.node_name, place.gpu_indexes)
        for workload in other.core.state.workloads.values()
        for place in workload.placements
    }
    assert held == {(plan.node_name, plan.devices) for plan in plans}
    api.remove(names[0])
    settle(api, [other], at_s, rounds=5)
    assert len(other.core.state.nodes["n0"].gpu_milli) == 4


def test_what_the_core_refuses_stays_counted_and_is_asked_for_again():
    api = Api()
    api.node("n0")
    leader = Side(api)
    leader.lead(1)
    api.pod(gpus=4)
    at_s = settle(api, [leader], 0.0, rounds=5)
    leader.lead(None)
    api.watchers.clear()
    api.node("n0", gpus=2)  # two fell out since
    other = Side(api)
    other.lead(2)
    at_s = settle(api, [other], at_s, rounds=5)
    record = other.core.state.nodes["n0"]
    assert (other.core.state.live_workloads, record.others.gpu_count) == (0, 4)
    api.node("n0")
    settle(api, [other], at_s, rounds=40)
    is_held_where_it_stands(api, other)
    assert len(other.adopted) == 1


def test_a_pin_is_no_demand():
    for spec in (
        {},
        {"nodeSelector": {"a": "b"}},
        {"tolerations": [{"operator": "Exists"}]},
        {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]},
                            {"matchExpressions": [{"key": "c", "operator": "Exists"}]},
                        ]
                    }
                }
            }
        },
    ):
        gates = [{"name": "eelgrid.io/placement"}]
        found = {
            "metadata": {"uid": "u", "resourceVersion": "1"},
            "spec": {**copy.deepcopy(spec), "schedulingGates": gates},
        }
        pinned = {**found["spec"], **ungating_patch(found, "n1", "{}")["spec"]}
        assert parse_constraint(pinned) != parse_constraint(spec)
        assert trait_name(remove_node_pin(parse_constraint(pinned))) == trait_name(parse_constraint(spec))


def test_a_pod_like_the_one_that_was_taken_over_is_told_of_though_nothing_seems_to_have_changed():
    api = Api()
    api.node("n0")
    leader = Side(api)
    leader.lead(1)
    api.pod()
    at_s = settle(api, [leader], 0.0, rounds=5)
    leader.lead(None)
    api.watchers.clear()
    other = Side(api)
    other.lead(2)
    while not other.adopted:
        at_s += 1.0
        other.hear()
        other.round(at_s)
    api.pod(node="n0")  # heard in the same round as the core's answer: one pod goes from others' book, one comes
    other.hear()
    other.round(at_s + 1.0)
    other.round(at_s + 2.0)
    assert other.core.state.nodes["n0"].others.gpu_count == 1
