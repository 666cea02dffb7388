"""Mode gate's machine against a small cluster, event by event."""

from dataclasses import replace

import pytest
from tests.gate_rig import Api, Side, check, settle

from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_MODEL_DATA, ANNOTATION_PLAN
from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.engines.kubernetes.pods.placement_unit import GateSettings
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan, format_plan
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import status_event
from eelgrid_protos.messages import Queue, QueueQuota, WorkloadPhase


@pytest.fixture
def api():
    api = Api()
    for name in ("a", "b", "c"):
        api.node(name)
    return api


def leader(api, epoch=1, **settings):
    side = Side(api, GateSettings(**settings)) if settings else Side(api)
    side.lead(epoch)
    return side


def gated(api):
    return [pod for pod in api.pods.values() if pod["spec"].get("schedulingGates")]


def test_a_pod_is_pinned_and_bound_where_the_core_has_put_it(api):
    side = leader(api)
    api.pod()
    settle(api, [side], 0.0, rounds=3)
    (workload,) = side.core.state.workloads.values()
    (node,) = api.bound.values()
    assert workload.placements[0].node_name == node
    check(api)


@pytest.mark.parametrize("near", ["a", "b", "c"])
def test_a_pod_goes_where_an_agent_has_the_model_data_that_it_loads(api, near):
    side = leader(api)
    for name in api.nodes:
        side.agent(name, model_data=("llama",) if name == near else ())
    pod = api.pods[api.pod()]
    pod["metadata"]["annotations"][ANNOTATION_MODEL_DATA] = "llama"
    api.put("pod", pod)
    settle(api, [side], 0.0, rounds=3)
    assert [found[0] for found in api.bound.values()] == [near]


@pytest.mark.parametrize(
    ("phase", "said"), [("Succeeded", "all pods succeeded"), ("Failed", "1 of 2 pods did not succeed")]
)
def test_a_workload_that_is_let_go_says_how_its_pods_have_ended(api, phase, said):
    side = leader(api)
    first, last = (api.pod(group="g", size=2) for _ in range(2))
    at_s = settle(api, [side], 0.0, rounds=3)
    api.end(first)
    api.pods[last]["status"] = {"phase": phase}
    api.put("pod", api.pods[last])
    settle(api, [side], at_s, rounds=3)
    (workload,) = side.core.state.workloads.values()
    assert (workload.phase, workload.reason) == (WorkloadPhase.CANCELLED, said)


def put_planned(api, workload, *, devices=(0,), **more):
    """A pod that runs, with a plan that its own people have written."""
    plan = PodPlan(1, workload, 0, "a", devices, uid="u0")
    metadata = {"name": "p0", "namespace": "other", "uid": "u0", "annotations": {ANNOTATION_PLAN: format_plan(plan)}}
    asked = {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1", **more}
    spec = {"nodeName": "a", "containers": [{"name": "main", "resources": {"requests": asked}}]}
    api.put("pod", {"metadata": metadata, "spec": spec, "status": {"phase": "Running"}})


def test_a_plan_that_names_the_gang_of_another_namespace_makes_no_member_of_it(api):
    side = leader(api)
    put_planned(api, "gang-x/train")
    for _ in range(3):
        api.pod(group="train", size=4)
    at_s = settle(api, [side], 0.0, rounds=3)
    assert len(gated(api)) == 3, "one is missing"
    api.pod(group="train", size=4)
    settle(api, [side], at_s, rounds=3)
    assert not gated(api)
    check(api)


@pytest.mark.parametrize(
    "workload", ["slurm-7", "w-1", "pod-u0//²", "pod-u0//" + "9" * 5000, "gang-\ud800", "gang-other/a b"]
)
def test_a_plan_that_names_what_is_no_unit_stops_nobody_and_takes_no_name_of_other_engines(api, workload):
    side = leader(api)
    put_planned(api, workload)
    api.pod()
    settle(api, [side], 0.0, rounds=5)
    assert list(api.bound) == ["u1"]
    assert list(side.core.state.workloads) == ["pod-u1"]
    assert side.core.state.nodes["a"].others.gpu_count == 1, "the pod runs all the same"


@pytest.mark.parametrize(
    ("devices", "asked"),
    [
        ((10**30,), {}),
        ((64,), {}),
        ((), {"memory": "8Ei"}),
        ((), {"cpu": "9e15"}),
        ((), {"nvidia.com/gpu": str(10**18)}),
    ],
)
def test_no_pod_keeps_what_else_is_on_its_node_from_the_core(api, devices, asked):
    side = leader(api)
    at_s = settle(api, [side], 0.0, rounds=3)
    put_planned(api, "w-1", devices=devices, **asked)
    api.node("a", cordoned=True)
    settle(api, [side], at_s, rounds=3)
    others = side.core.state.nodes["a"].others
    assert others.closed
    assert others.gpu_count >= 1
    assert others.gpu_indexes == ()


def test_nothing_is_asked_or_written_while_another_leads(api):
    side = Side(api)
    side.lead(None)
    api.pod()
    settle(api, [side], 0.0, rounds=3)
    assert not side.core.state.workloads
    assert gated(api)
    side.lead(2)
    settle(api, [side], 10.0, rounds=3)
    assert not gated(api)
    assert api.patches[0][1] == 2


def test_a_gang_is_ungated_when_all_are_there_and_placed(api):
    side = leader(api)
    for _ in range(3):
        api.pod(gpus=8, group="g", size=4)
    settle(api, [side], 0.0, rounds=3)
    assert len(gated(api)) == 3
    assert "3 of 4" in side.tells[-1].text
    api.pod(gpus=8, group="g", size=4)
    settle(api, [side], 10.0, rounds=3)
    assert len(gated(api)) == 4  # three nodes are too few
    api.node("d")
    settle(api, [side], 20.0, rounds=10)
    assert sorted(api.bound.values()) == ["a", "b", "c", "d"]
    check(api)


@pytest.mark.parametrize("label", ["kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/local-queue-name"])
def test_pods_with_the_label_of_kueue_wait_for_the_quota_of_their_queue(api, label):
    side = leader(api)
    quota = QueueQuota(resource="gpu", nominal=8000)
    queues = (Queue(name="x/team", quotas=(quota,)), Queue(name="team"), Queue(name="default"))
    side.core.update_policy(replace(side.core.state.policy, queues=queues), now_ns=2)
    first = api.pod(gpus=8, labels={label: "team"})
    settle(api, [side], 0.0, rounds=3)
    api.pod(gpus=4, labels={label: "team"})
    api.pod(gpus=8)
    settle(api, [side], 10.0, rounds=3)
    states = {one.spec.queue: [] for one in side.core.state.workloads.values()}
    for one in side.core.state.workloads.values():
        states[one.spec.queue].append(one.phase)
    assert states == {
        "x/team": [WorkloadPhase.PLACED, WorkloadPhase.PENDING],
        "default": [WorkloadPhase.PLACED],
    }
    assert len(gated(api)) == 1
    assert any("queue x/team has too little gpu quota left" in tell.text for tell in side.tells)
    api.remove(first)
    settle(api, [side], 20.0, rounds=5)
    assert not gated(api)


def test_a_pod_that_names_a_queue_that_is_not_declared_stays_gated_and_says_so(api):
    side = leader(api)
    side.core.update_policy(replace(side.core.state.policy, queues=(Queue(name="team"),)), now_ns=2)
    api.pod(labels={"kueue.x-k8s.io/queue-name": "taem"})
    settle(api, [side], 0.0, rounds=3)
    assert len(gated(api)) == 1
    assert any("did you mean team?" in tell.text or "queue is not known" in tell.text for tell in side.tells)


def test_work_of_others_leaves_less(api):
    side = leader(api)
    for node in "abc":
        for _ in range(8):
            api.pod(node=node)
    name = api.pod()
    settle(api, [side], 0.0, rounds=5)
    assert len(gated(api)) == 1
    assert side.tells
    api.remove(next(pod for pod in api.pods if pod != name))
    settle(api, [side], 10.0, rounds=5)
    assert not gated(api)


def test_a_stolen_place_is_given_up_through_the_owner(api):
    side = leader(api)
    api.pod(gpus=8, owner="rs")
    side.hear()
    side.round(0.0)
    side.round(0.0)
    side.write()
    (pinned,) = [patch[2] for patch in api.patches]
    api.pod(gpus=1, node=pinned)
    settle(api, [side], 0.0, rounds=30)
    (uid,) = [pod["metadata"]["uid"] for pod in api.pods.values() if pod["metadata"].get("ownerReferences")]
    assert api.bound[uid] != pinned
    assert uid != api.patches[0][0]
    check(api)


def test_a_stolen_place_without_an_owner_is_reported_and_the_pod_kept(api):
    side = leader(api)
    name = api.pod(gpus=8)
    side.hear()
    side.round(0.0)
    side.round(0.0)
    side.write()
    api.pod(gpus=1, node=api.patches[0][2])
    settle(api, [side], 0.0, rounds=30)
    assert name in api.pods
    assert any(tell.is_warning and "create it again" in tell.text for tell in side.tells)


def test_a_node_that_closes_before_the_patch_is_left(api):
    side = leader(api)
    api.pod()
    side.hear()
    side.round(0.0)
    (workload,) = side.core.state.workloads.values()
    node = workload.placements[0].node_name
    api.node(node, cordoned=True)
    side.hear()
    settle(api, [side], 0.0, rounds=4)
    assert api.patches[0][2] != node
    check(api)


def test_after_a_restart_nothing_is_placed_twice(api):
    side = leader(api)
    for _ in range(6):
        api.pod()
    side.hear()
    side.round(0.0)
    side.round(0.0)
    for _ in range(3):
        side.write()
    submitted = len(side.core.state.workloads)
    side.begin()
    settle(api, [side], 1.0, rounds=3)
    assert len(side.core.state.workloads) == submitted == len(api.bound) == 6
    check(api)


def test_a_standby_without_a_journal_counts_what_is_pinned(api):
    first, second = leader(api), Side(api)
    for _ in range(20):
        api.pod()
    first.hear()
    first.round(0.0)
    first.round(0.0)
    for _ in range(10):
        first.write()
    api.watchers.remove(first)
    second.begin()
    second.lead(2)
    for _ in range(4):
        api.pod()
    settle(api, [second], 1.0, rounds=4)
    assert len(api.bound) == 24
    assert not [pod for pod in api.pods.values() if pod["status"].get("conditions")]
    check(api)


def test_a_pod_that_ends_gives_its_place_back(api):
    side = leader(api)
    names = [api.pod(gpus=8) for _ in range(4)]
    settle(api, [side], 0.0, rounds=3)
    assert len(gated(api)) == 1
    done = next(name for name in names if api.pods[name]["spec"].get("nodeName"))
    api.end(done)
    settle(api, [side], 10.0, rounds=4)
    assert not gated(api)


def test_a_refused_patch_is_reported_once_and_not_sent_again(api):
    side = leader(api)
    api.pod()
    side.hear()
    side.round(0.0)
    side.round(0.0)
    one = side.under_way.pop()
    side.events.append(told.PatchFailed(one.uid, told.WriteFailure.INVALID, "no additions allowed"))
    settle(api, [side], 0.0, rounds=10)
    assert len(gated(api)) == 1
    assert [tell.text for tell in side.tells if tell.is_warning] == ["cannot be pinned: no additions allowed"]
    assert all(workload.phase is WorkloadPhase.CANCELLED for workload in side.core.state.workloads.values())


def test_our_gate_stays_until_those_of_others_are_gone(api):
    side = leader(api)
    name = api.pod()
    other = {"name": "example.com/other"}
    api.pods[name]["spec"]["schedulingGates"].append(other)
    api.put("pod", api.pods[name])
    settle(api, [side], 0.0, rounds=4)
    assert len(gated(api)) == 1
    assert "example.com/other" in side.tells[-1].text
    api.pods[name]["spec"]["schedulingGates"].remove(other)
    api.put("pod", api.pods[name])
    settle(api, [side], 10.0, rounds=4)
    assert not gated(api)


def test_without_a_leader_gates_go_where_that_was_asked_for(api):
    side = Side(api, GateSettings(open_s=60.0))
    api.pod()
    side.events.append(told.LeadershipLost(is_led=False))
    settle(api, [side], 0.0, rounds=50)
    assert len(gated(api)) == 1
    settle(api, [side], 50.0, rounds=20)
    assert not gated(api)
    assert api.patches[0][1] is None


def test_a_gang_whose_place_was_stolen_is_planned_again_as_a_whole(api):
    side = leader(api)
    for _ in range(2):
        api.pod(gpus=8, group="g", size=2, owner="job")
    side.hear()
    side.round(0.0)
    side.round(0.0)
    side.write()
    side.write()
    stolen = api.patches[0][2]
    api.pod(node=stolen)
    settle(api, [side], 0.0, rounds=40)
    gang = [pod for pod in api.pods.values() if pod["metadata"].get("ownerReferences")]
    assert sorted(pod["spec"]["nodeName"] for pod in gang) == sorted({"a", "b", "c"} - {stolen})
    assert not {pod["metadata"]["uid"] for pod in gang} & {patch[0] for patch in api.patches[:2]}
    check(api)


def test_a_gang_that_was_half_written_goes_on_after_a_restart(api):
    side = leader(api)
    for _ in range(3):
        api.pod(gpus=8, group="g", size=3)
    side.hear()
    side.round(0.0)
    side.round(0.0)
    side.write(2)
    places = {place.replica: place.node_name for place in side.core.state.workloads["gang-x/g"].placements}
    side.begin()
    settle(api, [side], 1.0, rounds=4)
    assert list(side.core.state.workloads) == ["gang-x/g"]
    assert [patch[2] for patch in api.patches] == [places[2], places[0], places[1]]
    assert len(api.bound) == 3


def test_a_member_that_is_going_holds_the_others_back(api):
    side = leader(api)
    names = [api.pod(gpus=8, group="g", size=2) for _ in range(2)]
    side.hear()
    side.round(0.0)
    side.round(0.0)
    side.write(0)
    going = api.pods[names[0]]
    going["spec"]["nodeName"] = api.patches[0][2]
    going["metadata"]["deletionTimestamp"] = "2026-11-22T05:00:00Z"
    api.put("pod", going)
    side.under_way.clear()
    side.events.append(told.LeadershipLost())
    side.lead(2)
    side.hear()
    side.round(1.0)
    side.round(1.0)
    assert not [one for one in side.under_way if isinstance(one, told.UngatePod)]


def test_the_rest_of_a_gang_that_another_leader_began_is_placed(api):
    first, second = leader(api), Side(api)
    for _ in range(3):
        api.pod(gpus=1, group="g", size=3)
    first.hear()
    first.round(0.0)
    first.round(0.0)
    first.write(1)
    first.lead(None)
    second.hear()
    second.lead(2)
    settle(api, [second], 1.0, rounds=6)
    assert len(api.bound) == 3
    check(api)


def preempt_gang(api):
    side = leader(api)
    names = [api.pod(gpus=8, group="g", size=2) for _ in range(2)]
    settle(api, [side], 0.0, rounds=5)
    ((key, workload),) = side.core.state.workloads.items()
    assert len(api.bound) == 2
    side.events.append(told.UnitPreempted(key))
    return side, names, key, workload


def test_nobody_takes_the_place_of_a_pod_that_made_room_and_the_last_one_ends_the_work(api):
    side, names, key, workload = preempt_gang(api)
    settle(api, [side], 10.0, rounds=3)
    assert side.core.state.workloads[key].phase is WorkloadPhase.PLACED
    for left in (1, 0):
        api.remove(names[left])
        api.pod(gpus=8, group="g", size=2)
        settle(api, [side], 20.0, rounds=5)
        # What the core answers to another command says the same.
        preempted = replace(workload, preempted_for="x")
        side.events.append(status_event(preempted if left else side.core.state.workloads[key]))
        settle(api, [side], 30.0, rounds=5)
        is_held = side.core.state.workloads[key].phase is WorkloadPhase.PLACED
        assert (is_held, len(gated(api))) == ((True, 1) if left else (False, 0))
    assert [one.phase for one in side.core.state.workloads.values()] == [WorkloadPhase.CANCELLED, WorkloadPhase.PLACED]
    check(api)


def test_a_victim_that_runs_on_is_as_before(api):
    side, names, key, _workload = preempt_gang(api)
    side.events.append(status_event(side.core.state.workloads[key]))
    api.remove(names[0])
    api.pod(gpus=8, group="g", size=2)
    settle(api, [side], 10.0, rounds=5)
    assert not gated(api)
    assert side.core.state.workloads[key].phase is WorkloadPhase.PLACED


def test_a_victim_none_of_whose_pods_was_sent_anywhere_is_let_go_at_once(api):
    side = leader(api)
    api.pod(gpus=8)
    side.hear()
    side.round(0.0)
    ((key, workload),) = side.core.state.workloads.items()
    assert workload.phase is WorkloadPhase.PLACED
    side.events.append(told.UnitPreempted(key))
    settle(api, [side], 1.0, rounds=5)
    assert side.core.state.workloads[key].phase is WorkloadPhase.CANCELLED
    assert len(api.bound) == 1, "and it is placed as new work"
