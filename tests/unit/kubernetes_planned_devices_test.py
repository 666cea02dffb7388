"""What pods hold by their plans: who comes first, and what a text that anybody may write cannot claim."""

from bench.kubernetes.checker import judge
from tests.gate_rig import Api, Side, settle

from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.engines.kubernetes.pods.external_usage import PlannedDevices, PlannedPod
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan, format_plan, parse_plan


def plan(api, name):
    return parse_plan(api.pods[name]["metadata"]["annotations"]["eelgrid.io/plan"])


def standing(api, name, node, devices, *, epoch=1):
    """A pod that another leader placed: bound, with a plan."""
    found = api.pods[name]
    uid = found["metadata"]["uid"]
    text = format_plan(PodPlan(epoch, f"pod-{uid}", 0, node, devices))
    found["metadata"]["annotations"]["eelgrid.io/plan"] = text
    found["spec"] |= {"nodeName": node, "schedulingGates": []}
    api.bound[uid] = node
    api.put("pod", found)


def test_of_two_that_name_one_device_the_first_is_whom_the_core_holds_there_then_the_older_plan():
    devices = PlannedDevices()
    assert list(devices.put_pod("a", PlannedPod("n", 2, (0, 1), epoch=2))) == []
    assert list(devices.put_pod("b", PlannedPod("n", 1, (1,), epoch=1))) == ["a"]
    assert (devices.planned_devices_of("a"), devices.planned_devices_of("b")) == ((), (1,))
    assert list(devices.put_pod("a", PlannedPod("n", 2, (0, 1), epoch=2, is_held=True))) == ["b", "b"]
    assert (devices.planned_devices_of("a"), devices.planned_devices_of("b")) == ((0, 1), ())
    assert devices.count_gpus("n", without="a") == 1
    assert devices.find_rival("n", (1,), "b").gpu_count == 2
    assert list(devices.put_pod("a", None)) == ["b"]
    assert devices.planned_devices_of("b") == (1,)
    assert devices.find_rival("n", (1,), "b") is None


def test_two_pods_that_have_one_device_by_the_plans_of_before_get_one_each():
    api = Api()
    api.node("n")
    for name in (api.pod(), api.pod(), api.pod(gpus=2)):
        standing(api, name, "n", (0,) if name != "p003" else (3, 4))
    side = Side(api)
    side.lead(2)
    settle(api, [side], 0.0, rounds=12)
    found = judge(api.pods.values(), api.nodes.values())
    assert found.is_safe, found
    assert plan(api, "p001").devices == (0,)
    assert plan(api, "p003").devices == (3, 4)
    held = {plan(api, name).workload: plan(api, name).devices for name in api.pods}
    live = [one for one in side.core.state.workloads.values() if not one.ended_ns]
    assert {one.workload_id.partition("//")[0]: one.placements[0].gpu_indexes for one in live} == held


def test_a_plan_that_its_people_wrote_claims_no_more_than_kube_scheduler_counts():
    api = Api()
    api.node("n", gpus=4)
    greedy = api.pod()
    standing(api, greedy, "n", (0, 1, 2, 3))
    strange = api.pod()
    standing(api, strange, "n", (2, 2))
    side = Side(api)
    side.lead(2)
    waiting = [api.pod(), api.pod()]
    settle(api, [side], 0.0, rounds=12)
    assert all(api.pods[name]["spec"].get("nodeName") for name in waiting)
    taken = [device for name in waiting for device in plan(api, name).devices]
    assert len(set(taken)) == 2
    assert 0 not in taken


def test_a_pin_whose_answer_is_lost_keeps_its_device_until_it_is_known_what_became_of_it():
    api = Api()
    api.node("n", gpus=1)
    api.node("m", gpus=1)
    side = Side(api)
    side.lead(1)
    first = api.pod()
    side.hear()
    side.round(0.0)
    side.round(0.0)
    side.send()  # and nobody knows whether it arrives
    node = side.core.state.workloads["pod-u1"].placements[0].node_name
    api.node(node, cordoned=True)
    side.hear()
    side.round(1.0)
    api.node(node)
    api.pod()
    side.hear()
    for at_s in (2.0, 2.5):
        side.round(at_s)
    sent, api.in_flight = api.in_flight, []
    while side.under_way:
        side.write()
    api.in_flight = sent
    api.arrive()
    settle(api, [side], 3.0, rounds=12)
    assert plan(api, first).node_name == node
    assert judge(api.pods.values(), api.nodes.values()).is_safe
    assert all(pod["spec"].get("nodeName") for pod in api.pods.values())


def test_what_a_frozen_leader_sends_when_it_wakes_is_refused():
    api = Api()
    api.node("n", gpus=1)
    old, new = Side(api), Side(api)
    old.lead(1)
    late = api.pod()
    old.hear()
    old.round(0.0)
    old.round(0.0)
    old.send()  # it looked at its term, and was frozen
    new.take_over(2)
    api.pod(node="n")
    api.remove("p002")
    at_s = settle(api, [new], 1.0, rounds=3)
    seen = plan(api, late)
    assert seen.epoch == 2
    api.arrive()
    assert old.events[-1].failure.name == "CONFLICT"
    settle(api, [new], at_s, rounds=3)
    assert plan(api, late) == seen
    assert api.pods[late]["spec"]["nodeName"] == "n"


def test_nothing_is_decided_before_all_that_waited_are_fenced():
    api = Api()
    api.node("n")
    old, new = Side(api), Side(api)
    old.lead(1)
    for _ in range(3):
        api.pod()
    old.hear()
    old.round(0.0)
    old.round(0.0)
    old.write()
    old.lead(None)
    new.take_over(2)
    new.round(1.0)
    new.round(1.0)
    fences = [one for one in new.under_way if "eelgrid.io/fence" in getattr(one, "annotations", {})]
    assert len(fences) == len(new.under_way) == new.gate.unfenced == 2
    assert not new.core.state.workloads
    new.write()
    new.hear()
    new.round(1.2)
    assert not new.core.state.workloads
    new.write()
    new.hear()
    new.round(1.4)
    assert new.gate.unfenced == 0
    assert new.core.state.live_workloads == 2
    settle(api, [new], 2.0, rounds=4)
    assert judge(api.pods.values(), api.nodes.values()).is_safe


def test_a_device_that_was_corrected_is_written_into_the_plan_and_taken_over_from_there():
    api = Api()
    api.node("n", gpus=4)
    side = Side(api)
    side.agent("n", gpus=4)
    side.lead(1)
    name = api.pod()
    at_s = settle(api, [side], 0.0, rounds=4)
    assert plan(api, name).devices == (0,)
    side.corrected("n", ("pod-u1", 0), (3,))
    at_s = settle(api, [side], at_s, rounds=4)
    assert plan(api, name).devices == (3,)
    side.lead(None)
    other = Side(api)
    other.take_over(2)
    settle(api, [other], at_s, rounds=4)
    (workload,) = other.core.state.workloads.values()
    assert workload.placements[0].gpu_indexes == (3,)


def test_a_term_that_continues_its_own_fences_nothing_again_and_goes_on_with_what_was_begun():
    api = Api()
    api.node("n")
    old, new = Side(api), Side(api)
    old.lead(1)
    for _ in range(4):
        api.pod()
    old.hear()
    old.round(0.0)
    old.round(0.0)
    old.write()
    old.lead(None)
    new.take_over(2)
    new.round(1.0)
    new.write()
    new.hear()
    new.events += [told.LeadershipLost(), told.LeadershipAcquired(3, is_continued=True)]
    new.epoch = 3
    new.round(1.2)
    assert new.gate.unfenced == 2
    at_s = settle(api, [new], 2.0, rounds=1)
    name = api.pod()
    new.hear()
    new.events += [told.LeadershipLost(), told.LeadershipAcquired(4, is_continued=True)]
    new.epoch = 4
    new.round(at_s + 0.5)
    assert new.gate.unfenced == 0
    settle(api, [new], at_s + 1.0, rounds=4)
    assert "eelgrid.io/fence" not in api.pods[name]["metadata"]["annotations"]
    assert all(pod["spec"].get("nodeName") for pod in api.pods.values())
    assert judge(api.pods.values(), api.nodes.values()).is_safe
