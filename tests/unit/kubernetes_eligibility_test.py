"""Which nodes will do for a pod: slots for traits, refused pins, and what is left to kube-scheduler."""

from dataclasses import replace

from tests.builders.kubernetes import build_node_model, build_pod_model

from eelgrid_controller.engines.kubernetes.model.selectors import parse_constraint
from eelgrid_controller.engines.kubernetes.pods.eligibility import MAX_PIN_REFUSALS, VOLUMES, EligibleNodes
from eelgrid_controller.engines.kubernetes.pods.external_usage import (
    MAX_TRAITS,
    MAX_TRAITS_PER_NAMESPACE,
    MAX_TRAITS_PER_USER,
    TraitSlots,
)

ODD = "0/2 nodes are available: 1 node(s) had something odd, 1 node(s) didn't match Pod's node affinity/selector."
ROOM = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's node affinity/selector."
SET = ("apps/v1", "ReplicaSet", "web-1", "rs-1")


def demands(index):
    return parse_constraint({"tolerations": [{"key": f"k{index}", "operator": "Exists"}]})


def test_one_user_and_one_namespace_have_a_share_of_the_slots():
    slots = TraitSlots()
    granted = [slots.acquire(demands(index), "a", "eve")[0] for index in range(300)]
    assert sum(map(bool, granted)) == MAX_TRAITS_PER_USER
    for user in range(20):
        for index in range(10):
            slots.acquire(demands(f"{user}-{index}"), "a", f"u{user}")
    assert len(slots) == MAX_TRAITS_PER_NAMESPACE
    assert slots.acquire(demands("innocent"), "b", "")[0]
    for space in range(30):
        for index in range(20):
            slots.acquire(demands(f"{space}/{index}"), f"n{space}", "")
    assert len(slots) == MAX_TRAITS


def test_a_slot_is_free_again_when_its_last_pod_has_gone():
    slots = TraitSlots()
    held = [slots.acquire(demands(index), "a", "eve")[0] for index in range(MAX_TRAITS_PER_USER)]
    assert slots.acquire(demands(0), "b", "bob") == (held[0], False), "the same demands share one"
    assert slots.acquire(demands("more"), "a", "eve") == ("", False)
    slots.release(held[0])
    assert slots.acquire(demands("more"), "a", "eve") == ("", False), "somebody else uses it still"
    slots.release(held[1])
    found, is_new = slots.acquire(demands("more"), "a", "eve")
    assert found
    assert is_new
    assert demands(1) not in slots.constraints


def rules(*names):
    found = EligibleNodes()
    for name in names:
        found.set_node(build_node_model(name))
    return found


def refused(message):
    return replace(build_pod_model(owner=SET), unscheduled_message=message)


def test_a_node_that_kube_scheduler_refused_twice_is_closed_to_pods_of_the_same_owner():
    found = rules("a", "b")
    for _ in range(MAX_PIN_REFUSALS):
        assert found.evaluate_pod(build_pod_model(owner=SET)).eligible == {"a", "b"}
        found.refusals.record_refusal(refused(ODD), "a")
    assert found.needs_evaluation(build_pod_model(owner=SET))
    assert found.evaluate_pod(build_pod_model(owner=SET)).eligible == {"b"}
    assert not found.permits_node(build_pod_model(owner=SET), "a")
    assert found.permits_node(build_pod_model(owner=(*SET[:3], "rs-2")), "a")
    assert found.permits_node(build_pod_model(), "a")


def test_where_every_node_was_refused_the_pod_is_left_to_kube_scheduler():
    found = rules("a")
    for _ in range(MAX_PIN_REFUSALS):
        found.refusals.record_refusal(refused(ODD), "a")
    assert "refused" in found.unsupported_reason([build_pod_model(owner=SET)])


def test_room_that_was_taken_closes_no_node():
    found = rules("a")
    for _ in range(5):
        found.refusals.record_refusal(refused(ROOM), "a")
    assert found.permits_node(build_pod_model(owner=SET), "a")


def test_volumes_are_waited_for_until_they_are_read_and_left_where_they_may_not_be():
    found = rules("a")
    asks = build_pod_model(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}])
    assert found.is_reading([asks])
    assert not found.unsupported_reason([asks])
    found.set_readable(VOLUMES, is_readable=False)
    assert "cannot be read" in found.unsupported_reason([asks])
    found.set_readable(VOLUMES, is_readable=True)
    assert not found.unsupported_reason([asks])
    assert found.evaluate_pod(asks).text == "persistentvolumeclaim data is not there"


def test_a_pod_without_rules_costs_no_question():
    found = rules("a")
    plain = build_pod_model(nodeSelector={"no": "node"})
    assert not found.needs_evaluation(plain)
    assert not found.permits_node(plain, "a")
    assert "node selector, affinity or taints" in found.evaluate_pod(plain).text
