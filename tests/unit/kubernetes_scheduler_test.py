"""Mode scheduler's part of the gate's machine: pods that name our scheduler, against a small cluster."""

from dataclasses import replace

import pytest
from tests.gate_rig import Api, Side, check, settle

from eelgrid_controller.engines.kubernetes.model.objects import parse_pod
from eelgrid_controller.engines.kubernetes.model.scheduler_support import UNSUPPORTED_FIELD
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_FENCE
from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.engines.kubernetes.pods.intent import IntentRefusal, parse_intent
from eelgrid_controller.engines.kubernetes.pods.placement_unit import GateSettings
from eelgrid_controller.engines.kubernetes.reconcilers.related_objects import prune_pod

SETTINGS = GateSettings(unbound_s=10.0, retry_s=5.0, busy_s=1.0, conflict_s=1.0, binds=True)


@pytest.fixture
def api():
    api = Api()
    for name in ("a", "b"):
        api.node(name)
    return api


def leader(api, epoch=1):
    side = Side(api, SETTINGS)
    side.lead(epoch)
    return side


def nodes_of(api):
    return {name: pod["spec"].get("nodeName", "") for name, pod in api.pods.items()}


def test_a_pod_is_bound_with_its_plan_in_one_write(api):
    side = leader(api)
    name = api.pod(own=True)
    settle(api, [side], 0.0, rounds=3)
    assert (
        nodes_of(api)[name]
        == side.core.state.workloads[f"pod-{api.pods[name]['metadata']['uid']}"].placements[0].node_name
    )
    assert len(api.patches) == 1
    check(api)


def test_a_full_cluster_keeps_pods_waiting_until_there_is_room(api):
    side = leader(api)
    first = [api.pod(own=True, gpus=8) for _ in range(2)]
    at_s = settle(api, [side], 0.0, rounds=3)
    late = api.pod(own=True)
    at_s = settle(api, [side], at_s, rounds=3)
    assert nodes_of(api)[late] == ""
    assert side.reports[api.pods[late]["metadata"]["uid"]].reason == "NoRoom"
    api.end(first[0])
    settle(api, [side], at_s, rounds=20)
    assert nodes_of(api)[late]
    check(api)


def test_a_former_leaders_binding_is_refused_once_the_term_is_fenced(api):
    one, two = leader(api), Side(api, SETTINGS)
    two.lead(None)
    api.pod(own=True)
    for _ in range(3):
        one.hear()
        one.round(1.0)
    assert isinstance(one.under_way[0], told.BindPod)
    one.send()  # it is on its way for long
    two.take_over(2)
    settle(api, [two], 2.0, rounds=6)
    assert [epoch for _, epoch, _, _ in api.patches] == [2]
    api.arrive()
    assert len(api.patches) == 1
    check(api)


def test_a_binding_whose_answer_was_lost_is_not_repeated_elsewhere(api):
    side = leader(api)
    name = api.pod(own=True)
    for _ in range(3):
        side.hear()
        side.round(1.0)
    side.write(fault="lost")
    node = nodes_of(api)[name]
    settle(api, [side], 2.0, rounds=10)
    assert nodes_of(api)[name] == node
    assert len(api.patches) == 1


def test_a_nominated_pods_place_is_left_to_it(api):
    side = leader(api)
    other = api.pod(gpus=8, node="a")
    api.pods[other]["spec"].pop("nodeName")
    api.pods[other]["status"]["nominatedNodeName"] = "a"
    api.put("pod", api.pods[other])
    mine = [api.pod(own=True, gpus=8) for _ in range(2)]
    side.hear()
    for at_s in range(1, 6):
        side.round(float(at_s))
        while side.under_way:
            side.write()
        side.hear()
    assert sorted(nodes_of(api)[name] for name in mine) == ["", "b"]


def test_pods_are_not_bound_beyond_what_the_kubelet_allows_of_a_machine(api):
    for name in ("a", "b"):
        api.nodes[name]["status"]["allocatable"] = {**api.nodes[name]["status"]["allocatable"], "cpu": "2"}
        api.put("node", api.nodes[name])
    side = leader(api)
    for name in ("a", "b"):
        side.agent(name)  # whose inventory is the whole machine
    for _ in range(6):
        api.pod(own=True)
    settle(api, [side], 0.0, rounds=10)
    bound = [node for node in nodes_of(api).values() if node]
    assert sorted(bound) == ["a", "a", "b", "b"]


def test_a_node_takes_no_more_pods_than_its_kubelet_does(api):
    for name in ("a", "b"):
        api.nodes[name]["status"]["allocatable"] = {**api.nodes[name]["status"]["allocatable"], "pods": "2"}
        api.put("node", api.nodes[name])
    side = leader(api)
    for _ in range(6):
        api.pod(own=True)
    settle(api, [side], 0.0, rounds=10)
    assert sorted(node for node in nodes_of(api).values() if node) == ["a", "a", "b", "b"]


def refusal(**spec):
    found = {
        "metadata": {"name": "p", "namespace": "x", "uid": "u"},
        "spec": {"containers": [{"name": "main"}], "schedulerName": "eelgrid", **spec},
    }
    return parse_intent(parse_pod(prune_pod(found)), {})


def test_a_pod_that_names_us_and_needs_more_is_refused_with_the_field_and_the_remedy():
    said = refusal(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}])
    assert isinstance(said, IntentRefusal)
    assert "spec.volumes[v].persistentVolumeClaim" in str(said)
    assert "leave schedulerName out" in str(said)


def test_a_pod_that_names_us_beside_our_gate_is_refused():
    assert isinstance(refusal(schedulingGates=[{"name": "eelgrid.io/placement"}]), IntentRefusal)


def test_nothing_is_kept_of_pods_of_other_schedulers():
    found = {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [], "schedulerName": "x", "tomorrow": 1}}
    assert UNSUPPORTED_FIELD not in prune_pod(found)["spec"]


def test_without_a_leader_gates_open_and_bindings_wait(api):
    side = Side(api, replace(SETTINGS, open_s=5.0))
    side.events.append(told.LeadershipLost(is_led=False))
    name = api.pod(own=True)
    for at_s in (1.0, 20.0):
        side.hear()
        side.events.append(told.GateTicked())
        side.round(at_s)
    assert not side.under_way
    assert nodes_of(api)[name] == ""


@pytest.mark.parametrize("own", [True, False])
def test_a_gang_that_fills_a_node_is_not_kept_from_it_by_its_own_pods(api, own):
    api.node("b", cordoned=True)
    api.nodes["a"]["status"]["allocatable"] = {**api.nodes["a"]["status"]["allocatable"], "pods": "2"}
    api.put("node", api.nodes["a"])
    side = leader(api)
    gang = [api.pod(own=own, group="g", size=2) for _ in range(2)]
    for at_s in range(1, 6):
        side.hear()
        side.round(float(at_s))
        if side.under_way:
            break
    assert len(side.under_way) == 2
    side.write()
    side.write(fault="busy")  # and the node is full by what is bound, and what may be
    settle(api, [side], 6.0, rounds=10)
    assert {nodes_of(api)[name] for name in gang} == {"a"}
    assert len(api.patches) == 2
    assert not any(ANNOTATION_FENCE in api.pods[name]["metadata"]["annotations"] for name in gang)
    check(api)
