"""Slices on offer: the fullest GPU first, none woken without need, the rule of the agent's plugin; pods come and go."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.kubernetes import build_node_model, build_pod_model

from eelgrid_agent.kubelet.device_plugins import NodeDevices, choose_devices
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    RecordEvent,
    RecreatePod,
    RemoveGate,
    UngatePod,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.pods.intent import parse_slice_intent, requests_slices
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import parse_plan
from eelgrid_controller.engines.kubernetes.reconcilers.mig_slices import (
    OfferedMigSlice,
    SliceOffer,
    SlicePlacement,
    SlicePod,
    SlicePodScheduler,
    choose_slices,
    select_fullest,
)
from eelgrid_protos.kubelet_api import PreferredAllocationRequest

SMALL, LARGE = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
GIB = 1024**3
LAYOUTS = st.lists(st.lists(st.sampled_from([1, 1, 2, 4]), max_size=4), min_size=1, max_size=4)


def gpus(layouts):
    """Slices by GPU and start; all of one resource, whatever their size."""
    found = []
    for index, sizes in enumerate(layouts):
        start = 0
        for size in sizes:
            found.append(OfferedMigSlice(f"MIG-{index}-{start}", index, start, size))
            start += size
    return found


def used_by(held):
    used = {}
    for one in held:
        used[one.gpu_index] = used.get(one.gpu_index, 0) + one.size
    return used


@given(layouts=LAYOUTS, data=st.data())
def test_no_choice_wakes_fewer_gpus_and_the_agent_chooses_the_same(layouts, data):
    there = gpus(layouts)
    held = data.draw(st.lists(st.sampled_from(there), unique=True)) if there else []
    free = [one for one in there if one not in held]
    count = data.draw(st.integers(0, min(4, len(free))))
    used = used_by(held)
    chosen = select_fullest(data.draw(st.permutations(free)), used, count)
    assert len(set(chosen)) == count
    woken = {one.gpu_index for one in chosen} - used.keys()
    assert len(woken) == min(len({one.gpu_index for one in some} - used.keys()) for some in combinations(free, count))
    if count:
        looked_at = NodeDevices(
            index_of={one.uuid: one.gpu_index for one in there},
            held=frozenset(one.uuid for one in held),
            slices={one.uuid: one.size for one in there},
        )
        asked = PreferredAllocationRequest(
            available=tuple(one.uuid for one in data.draw(st.permutations(free))), must=(), size=count
        )
        assert set(choose_devices(asked, looked_at)) == {one.uuid for one in chosen}


def offer(name, *, small=(), used=None, cpu=64_000, left=None, **more):
    slices = {SMALL: tuple(small)}
    counts = {SMALL: len(small)} if left is None else {SMALL: left}
    return SliceOffer(name, cpu, 512 * GIB, counts, slices, used or {}, **more)


def test_a_gpu_in_use_goes_before_one_that_sleeps_and_a_full_one_before_an_empty_one():
    one, two = (OfferedMigSlice("a", 0, 0, 1), OfferedMigSlice("b", 1, 0, 1))
    asleep, nearly_empty = (
        offer("n1", small=[one]),
        offer("n2", small=[one, two, OfferedMigSlice("c", 1, 1, 1)], used={1: 1}),
    )
    full = offer("n3", small=[two], used={1: 6})
    assert choose_slices([(SMALL, 1)], 1000, GIB, [asleep, nearly_empty, full]) == SlicePlacement("n3", (two,))
    assert choose_slices([(SMALL, 2)], 1000, GIB, [asleep, nearly_empty, full]).node_name == "n2"
    assert choose_slices([(SMALL, 1)], 1000, GIB, [asleep]) == SlicePlacement("n1", (one,))


@pytest.mark.parametrize(
    "short",
    [
        offer("n", small=[OfferedMigSlice("a", 0, 0, 1)], cpu=500),
        offer("n", small=[], left=1),
        offer("n", small=[OfferedMigSlice("a", 0, 0, 1)], left=0),
    ],
)
def test_a_node_that_lacks_anything_is_passed_over(short):
    assert choose_slices([(SMALL, 1)], 1000, GIB, [short]) is None


def test_where_slices_are_only_counted_a_node_in_use_is_fuller():
    counted = [SliceOffer(name, 64_000, GIB, {SMALL: 3}, is_awake=name == "n2") for name in ("n1", "n2")]
    assert choose_slices([(SMALL, 1)], 0, 0, counted) == SlicePlacement("n2")


def slice_pod(name="p-0", *, count=1, waits=True, **more):
    found = build_pod_model(gpus=0, requests={SMALL: str(count)}, name=name, **more)
    return SlicePod(found, intent=parse_slice_intent(found, {}) if waits else None)


def steered(*names, machine=None):
    machine = machine or SlicePodScheduler(unbound_s=30.0, flight_s=15.0)
    for name in names:
        machine.on_devices_reported(name, {}, steers=True)
    return machine


NODES = {"n1": build_node_model("n1", allocatable={SMALL: "7"})}


def by_uid(*pods):
    return {one.pod.uid: one for one in pods}


def stands(one, *, node_name="n1"):
    return replace(one, found=one.pod.__class__(**{**_fields(one.pod), "gates": (), "node_name": node_name}))


def _fields(value):
    return {name: getattr(value, name) for name in value.__slots__}


def test_a_pod_is_let_go_to_the_slice_and_the_next_when_that_one_was_seen():
    machine = steered("n1")
    first, second = slice_pod("p-1"), slice_pod("p-2")
    on = [offer("n1", small=[OfferedMigSlice("a", 0, 0, 1), OfferedMigSlice("b", 0, 1, 1)])]
    (told,) = machine.schedule_pods(by_uid(first, second), NODES, on, 7, 0.0)
    assert isinstance(told, UngatePod)
    assert (told.key.name, told.node_name, told.epoch) == ("p-1", "n1", 7)
    plan = parse_plan(told.plan)
    assert (plan.workload, plan.devices, plan.profile) == (f"slice-{first.pod.uid}", (0,), "1g.10gb")
    assert machine.schedule_pods(by_uid(first, second), NODES, on, 7, 1.0) == []
    there = stands(first)
    left = [offer("n1", small=[OfferedMigSlice("a", 0, 0, 1), OfferedMigSlice("b", 0, 1, 1)], left=1)]
    assert machine.schedule_pods(by_uid(there, second), NODES, left, 7, 2.0) == []
    machine.on_devices_reported("n1", {PodKey("ml", "p-1"): ("a",)}, steers=True)
    (told,) = machine.schedule_pods(
        by_uid(there, second), NODES, [offer("n1", small=[OfferedMigSlice("b", 0, 1, 1)], used={0: 1})], 7, 3.0
    )
    assert told.key.name == "p-2"


def test_a_node_that_never_says_what_its_pods_hold_is_not_waited_for_for_ever():
    machine = steered("n1")
    first, second = slice_pod("p-1"), slice_pod("p-2")
    on = [offer("n1", small=[OfferedMigSlice("a", 0, 0, 1), OfferedMigSlice("b", 0, 1, 1)])]
    machine.schedule_pods(by_uid(first, second), NODES, on, 7, 0.0)
    (told,) = machine.schedule_pods(by_uid(stands(first), second), NODES, on, 7, 16.0)
    assert told.key.name == "p-2"


def test_a_place_is_given_once_even_where_nobody_steers():
    machine = SlicePodScheduler(unbound_s=30.0, flight_s=15.0)
    pods = by_uid(*(slice_pod(f"p-{number}") for number in range(5)))
    on = [offer("n1", small=[OfferedMigSlice(f"s{number}", 0, number, 1) for number in range(3)])]
    told = machine.schedule_pods(pods, NODES, on, 7, 0.0)
    assert [type(one) for one in told].count(UngatePod) == 3
    assert "waits: no node" in next(one.text for one in told if isinstance(one, RecordEvent))
    assert not [one for one in machine.schedule_pods(pods, NODES, on, 7, 1.0) if isinstance(one, UngatePod)]


def test_room_for_cpu_is_not_given_twice():
    machine = SlicePodScheduler(unbound_s=30.0, flight_s=15.0)
    pods = by_uid(slice_pod("p-1"), slice_pod("p-2"))
    told = machine.schedule_pods(pods, NODES, [offer("n1", small=gpus([[1, 1, 1]]), cpu=7_999)], 7, 0.0)
    assert [type(one) for one in told].count(UngatePod) == 1


def test_a_patch_that_failed_is_made_again_later():
    machine = steered("n1")
    one = slice_pod()
    on = [offer("n1", small=[OfferedMigSlice("a", 0, 0, 1)])]
    assert machine.schedule_pods(by_uid(one), NODES, on, 7, 0.0)
    machine.on_failure(one.pod.uid, WriteFailure.BUSY, 0.5)
    assert machine.schedule_pods(by_uid(one), NODES, on, 7, 5.0) == []
    assert machine.schedule_pods(by_uid(one), NODES, on, 7, 6.0)


def test_a_pinned_pod_that_cannot_be_scheduled_is_made_again_by_its_owner():
    machine = SlicePodScheduler(unbound_s=30.0, flight_s=15.0)
    owned = slice_pod(owner=("apps/v1", "ReplicaSet", "web", "r1"))
    changed = {**_fields(owned.pod), "gates": (), "unscheduled": "Unschedulable", "unscheduled_message": "0/1 nodes"}
    stuck = by_uid(SlicePod(owned.pod.__class__(**changed), "n1"))
    assert machine.schedule_pods(stuck, {}, [], 7, 0.0) == []
    told = machine.schedule_pods(stuck, {}, [], 7, 31.0)
    assert [type(one) for one in told] == [RecordEvent, RecreatePod]
    assert "n1 does not take it: 0/1 nodes" in told[0].text
    nobodys = by_uid(SlicePod(owned.pod.__class__(**{**changed, "owner": None}), "n1"))
    machine = SlicePodScheduler(unbound_s=30.0, flight_s=15.0)
    machine.schedule_pods(nobodys, {}, [], 7, 0.0)
    (told,) = machine.schedule_pods(nobodys, {}, [], 7, 31.0)
    assert "delete it" in told.text


def test_what_cannot_be_read_is_reported_or_let_go_as_its_people_want():
    machine = SlicePodScheduler(unbound_s=30.0, flight_s=15.0)
    gang = {"eelgrid.io/group": "g", "eelgrid.io/group-size": "3"}
    (told,) = machine.schedule_pods(by_uid(slice_pod(annotations=gang)), NODES, [], 7, 0.0)
    assert "placed pod by pod" in told.text
    released = {"eelgrid.io/priority": "x", "eelgrid.io/on-error": "schedule"}
    (told,) = machine.schedule_pods(by_uid(slice_pod("p-2", annotations=released)), NODES, [], 7, 0.0)
    assert isinstance(told, RemoveGate)


def test_a_node_that_the_pod_may_not_go_to_is_passed_over():
    machine = SlicePodScheduler(unbound_s=30.0, flight_s=15.0)
    cordoned = {"n1": build_node_model("n1", allocatable={SMALL: "7"}, unschedulable=True)}
    on = [offer("n1", small=[OfferedMigSlice("a", 0, 0, 1)])]
    assert [type(one) for one in machine.schedule_pods(by_uid(slice_pod()), cordoned, on, 7, 0.0)] == [RecordEvent]
    elsewhere = slice_pod("p-2", nodeSelector={"zone": "b"})
    assert [type(one) for one in machine.schedule_pods(by_uid(elsewhere), NODES, on, 7, 0.0)] == [RecordEvent]


def test_slices_and_whole_gpus_together_have_no_owner():
    assert requests_slices(build_pod_model(gpus=0, requests={SMALL: "1", LARGE: "1"}))
    assert not requests_slices(build_pod_model(gpus=1, requests={SMALL: "1"}))
    assert not requests_slices(build_pod_model(gpus=1))
