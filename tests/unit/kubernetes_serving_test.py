"""Pods of a service: one elastic workload, whatever comes and goes."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.gate_rig import check
from tests.serving_rig import ServedApi, ServingSide, inference_service, play
from tests.state_invariants import check_invariants

from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_DRAIN, DELETION_COST, LABEL_POOL
from eelgrid_controller.engines.kubernetes.pods.migration import MoveMethod
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import status_event
from eelgrid_controller.engines.kubernetes.reconcilers.inference_services import LOWEST_DELETION_COST
from eelgrid_controller.engines.kubernetes.reconcilers.move_orders import MoveOrders
from eelgrid_protos.messages import EnforcementMode, Move, Placement, PoolMode, ReplicaMove


@pytest.fixture
def api():
    api = ServedApi()
    for name in ("a", "b", "c"):
        api.node(name)
    return api


def leader(api, found, epoch=1):
    side = ServingSide(api)
    side.serve(found, wanted=api.replicas, surge=api.surge)
    side.lead(epoch)
    return side


def agree(api, side):
    """The core's places are just where the pods are."""
    places = sorted(one.node_name for one in side.workload.placements)
    assert places == sorted(pod["spec"]["nodeName"] for pod in api.pods_of())
    check_invariants(side.core.state)
    check(api)


def test_pods_of_a_target_are_replicas_of_one_workload(api):
    found = inference_service()
    api.replicas = 3
    side = leader(api, found)
    play(api, [side], found, 0.0)
    assert side.workload.workload_id == "service-s"
    assert len(side.workload.placements) == 3
    assert side.workload.spec.service.profile == "chat-8b"
    agree(api, side)
    assert api.replicas == 3


def test_what_the_steering_asks_for_comes_and_what_it_releases_goes(api):
    found = inference_service()
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    side.steer(3)
    at_s = play(api, [side], found, at_s)
    assert api.replicas == 3
    agree(api, side)
    before = {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in api.pods_of()}
    slots = dict(side.unit.slots)
    side.steer(2)
    left = {slots[one.replica] for one in side.workload.placements}
    play(api, [side], found, at_s)
    assert api.replicas == 2
    assert {pod["metadata"]["uid"] for pod in api.pods_of()} == left < before.keys()
    agree(api, side)


def test_nothing_is_changed_where_nothing_may_be(api):
    found = inference_service(mode="Recommend")
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    side.steer(3)
    at_s = play(api, [side], found, at_s, rounds=100)
    assert api.replicas == 1
    assert "Recommend" in side.scaling.advice
    agree(api, side)
    api.scale(12)
    play(api, [side], found, at_s, rounds=100)
    assert len(side.workload.placements) == 12
    agree(api, side)


def test_others_are_heard_within_the_bounds(api):
    found = inference_service(replicas={"least": 2, "most": 4})
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    assert api.replicas == 2  # the least
    api.scale(3)
    at_s = play(api, [side], found, at_s)
    assert (api.replicas, side.scaling.advice_reason) == (3, "ScaledByOthers")
    agree(api, side)
    api.scale(9)
    at_s = play(api, [side], found, at_s)
    assert api.replicas == 4
    agree(api, side)
    api.scale(3)
    at_s = play(api, [side], found, at_s, rounds=100)
    assert api.replicas == 3
    agree(api, side)
    play(api, [side], found, at_s + 3_600.0)
    assert side.scaling.advice == ""


def test_a_target_at_zero_is_switched_off(api):
    found = inference_service()
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    api.scale(0)
    at_s = play(api, [side], found, at_s, rounds=100)
    assert api.replicas == 0
    assert side.workload is None
    api.scale(2)
    play(api, [side], found, at_s, rounds=60)
    agree(api, side)
    assert len(side.workload.placements) == 2


def test_a_target_is_rolled_over_at_its_most(api):
    found = inference_service(replicas={"least": 1, "most": 3})
    api.replicas = 3
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    api.roll()
    play(api, [side], found, at_s, rounds=60)
    assert len(api.pods_of(2)) == len(api.pods_of()) == 3
    assert api.replicas == 3
    agree(api, side)


def test_a_target_whose_pods_ask_for_more_begins_again_where_it_stands(api):
    found = inference_service(replicas={"least": 1, "most": 3})
    api.replicas = 3
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    api.roll(gpus=2)
    play(api, [side], found, at_s, rounds=90)
    assert len(api.pods_of(2)) == len(api.pods_of()) == 3
    assert side.workload.spec.request.gpu_count == 2
    agree(api, side)


def test_a_service_over_pods_that_run_takes_them_over(api):
    api.replicas = 4
    side = ServingSide(api)
    side.lead(1)
    for _ in range(5):
        api.control()
        side.hear()
        side.round(0.0)
        while side.under_way:
            side.write()
        api.schedule()
    before = {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in api.pods_of()}
    assert len(before) == 4
    found = inference_service()
    play(api, [side], found, 1.0)
    agree(api, side)
    assert {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in api.pods_of()} == before
    live = [one for one in side.core.state.workloads.values() if one.placements and one.phase.name == "PLACED"]
    assert [one.workload_id for one in live] == ["service-s"]


def test_pods_that_never_came_through_the_gate_are_replicas_too(api):
    api.is_gating = False
    api.replicas = 2
    found = inference_service()
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    agree(api, side)
    side.steer(4)
    play(api, [side], found, at_s, rounds=120)
    assert api.replicas == 4
    agree(api, side)


def test_another_leader_without_a_journal_goes_on(api):
    found = inference_service()
    first = leader(api, found)
    at_s = play(api, [first], found, 0.0)
    first.steer(3)
    at_s = play(api, [first], found, at_s)
    where = {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in api.pods_of()}
    api.watchers.remove(first)
    second = ServingSide(api)
    second.remembered = first.remembered
    second.begin()
    second.serve(found, wanted=api.replicas, surge=1)
    second.lead(2)
    at_s = play(api, [second], found, at_s)
    agree(api, second)
    assert {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in api.pods_of()} == where
    second.steer(1)
    play(api, [second], found, at_s)
    assert api.replicas == 1
    agree(api, second)


def test_a_restart_between_release_and_write_lowers_the_number(api):
    found = inference_service()
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    side.steer(3)
    at_s = play(api, [side], found, at_s)
    side.begin()
    side.serve(found, wanted=api.replicas, surge=1)
    at_s = play(api, [side], found, at_s)
    agree(api, side)
    assert api.replicas == 3


def test_the_pods_of_a_service_that_is_gone_stay_and_count_as_what_others_hold(api):
    found = inference_service()
    api.replicas = 2
    side = leader(api, found)
    play(api, [side], found, 0.0)
    side.serve(None)
    side.round(100.0)
    side.round(100.0)
    assert side.workload is None
    assert len(api.pods_of()) == 2
    held = sum(record.others.gpu_count for record in side.core.state.nodes.values())
    assert held == 2


def test_a_pod_that_is_to_stay_after_all_costs_what_it_did(api):
    found = inference_service()
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    pod = api.pods_of()[0]
    pod["metadata"]["annotations"][DELETION_COST] = LOWEST_DELETION_COST
    api.put("pod", pod)
    play(api, [side], found, at_s, rounds=3)
    assert DELETION_COST not in api.pods_of()[0]["metadata"]["annotations"]


def moved(side):
    """The core moves the only replica; to where."""
    (source,) = side.workload.placements
    to = next(name for name in ("a", "b", "c") if name != source.node_name)
    gpu = side.core.state.nodes[to].inventory.gpus[0]
    target = Placement(replica=source.replica, node_name=to, gpu_uuids=(gpu.uuid,), gpu_indexes=(gpu.index,))
    move = Move(workload_id=side.workload.workload_id, replicas=(ReplicaMove(source=source, target=target),))
    side.now_ns += 1
    side._heard(side.core.apply_moves((move,), now_ns=side.now_ns).events)
    side.events.append(status_event(side.workload))
    return to


def test_the_pod_that_comes_after_an_eviction_goes_to_the_place_that_the_core_moved(api):
    found = inference_service()
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    to = moved(side)
    at_s = play(api, [side], found, at_s, rounds=5)
    (old,) = api.pods_of()
    assert side.unit.elastic.moved == {old["metadata"]["uid"]}
    orders = MoveOrders(SimpleNamespace(gate=side.gate), logging.getLogger("test"))
    (order,) = orders.orders_from_services(side.core)
    assert (order.manner, order.workload, order.goes[0].uid) == (MoveMethod.EVICT, "", old["metadata"]["uid"])
    held = sum(record.others.gpu_count for record in side.core.state.nodes.values())
    assert held == 1, "until it goes it is what others hold"
    api.remove(old["metadata"]["name"])
    play(api, [side], found, at_s)
    (new,) = api.pods_of()
    assert new["spec"]["nodeName"] == to
    assert not side.unit.elastic.moved
    assert api.replicas == 1
    agree(api, side)


def test_a_place_that_the_core_moved_comes_back_to_a_pod_that_nobody_evicts(api):
    found = inference_service()
    side = leader(api, found)
    at_s = play(api, [side], found, 0.0)
    (before,) = api.pods_of()
    moved(side)
    play(api, [side], found, at_s, rounds=90)
    assert [pod["metadata"]["uid"] for pod in api.pods_of()] == [before["metadata"]["uid"]]
    assert not side.unit.elastic.moved
    agree(api, side)


@pytest.mark.parametrize(("mode", "manner"), [("Recommend", MoveMethod.SURGE), ("Enforce", MoveMethod.EVICT)])
def test_pods_of_a_service_are_moved_one_by_one_and_no_further_one_is_made_where_it_says_how_many(api, mode, manner):
    found = inference_service(mode=mode)
    api.replicas = 3
    for name in list(api.nodes):
        api.nodes[name]["metadata"]["labels"][LABEL_POOL] = "h100"
    side = leader(api, found)
    play(api, [side], found, 0.0)
    node = side.workload.placements[0].node_name
    drained = {"metadata": {"annotations": {ANNOTATION_DRAIN: "true"}}, "spec": {"unschedulable": True}}
    engine = SimpleNamespace(gate=side.gate, nodes=SimpleNamespace(objects={PodKey("", node): drained}))
    orders = MoveOrders(engine, logging.getLogger("test"))
    core = side.core
    pools = (PoolMode(pool=core.state.nodes[node].inventory.pool, mode=EnforcementMode.ENFORCE),)
    core.update_policy(replace(core.state.policy, pools=pools), now_ns=10**6)
    asked, status = orders.orders_from_drained_nodes(core, 10**6)
    here = [pod["metadata"]["uid"] for pod in api.pods_of() if pod["spec"]["nodeName"] == node]
    assert sorted(order.goes[0].uid for order in asked) == sorted(here)
    assert {(order.manner, len(order.goes), order.workload) for order in asked} == {(manner, 1, "")}
    assert len({order.name for order in asked}) == len(here)
    assert status[node].leaving == len(here)
