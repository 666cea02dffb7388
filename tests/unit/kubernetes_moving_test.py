"""The parts of a move: orders and their bounds, evictions, budgets, drained nodes, taints, and the gate's kept places."""

from dataclasses import replace

import pytest
from tests.gate_rig import SETTINGS, Api, Side, check, settle

from eelgrid_controller.engines.kubernetes.model.objects import OwnerReference, Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.model.selectors import parse_constraint, remove_pin_terms
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_DRAIN,
    ANNOTATION_MOVE,
    ANNOTATION_MOVED_AT,
    GATE,
    TAINT_REPARTITION,
)
from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.engines.kubernetes.pods.migration import (
    CordonMarks,
    DrainProgress,
    EvictPods,
    MarkPod,
    MoveEnded,
    MoveLimits,
    MoveMethod,
    MoveOrder,
    MoveQueue,
    MoveTimeouts,
    MovingPod,
    TaintTimers,
    WaitStep,
    cordon_patch,
    drain_status,
    find_blocking_budget,
    is_drain_requested,
    is_tainted,
    mobility_of,
    move_method_of,
    next_eviction_step,
    survives_evictions,
    taint_patch,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import MoveNote, format_move_note, parse_move_note
from eelgrid_protos.messages import Mobility, Move, Placement, ReplicaMove

PACE = MoveTimeouts(budget_s=100.0, arrive_s=50.0)


def pod(uid, *, owner="rs", kind="ReplicaSet", name="", gated=False, **how):
    return Pod(
        uid=uid,
        namespace="x",
        name=name or f"p-{uid}",
        labels={},
        annotations=how.pop("annotations", {}),
        owner=OwnerReference("apps/v1", kind, "o", owner) if owner else None,
        gates=(GATE,) if gated else (),
        **how,
    )


def order(uid, *, owner="rs", workload="w", kind="ReplicaSet", manner=MoveMethod.SURGE, name=""):
    going = MovingPod(uid, PodKey("x", name or f"p-{uid}"), 0, "a", "b")
    return MoveOrder(f"unit-{uid}", workload, manner, (going,), kind, "o", owner)


# Notes


def test_a_note_is_read_as_it_was_written():
    note = MoveNote(uid="u", pod="p", workload="w", to="n", replicas=3, since_s=12.5, step="surge", cost="7")
    assert parse_move_note({ANNOTATION_MOVE: format_move_note(note)}) == note


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "[]", "{}", '{"uid":""}', '{"uid":"u","replicas":"many"}', "x" * 10_000,
        '{"uid":"u","evict_s":1e300}', '{"uid":"u","since_s":"nan"}', '{"uid":"u","step_s":-1}',
    ],
)  # fmt: skip
def test_what_is_no_note_is_none(text):
    assert parse_move_note({ANNOTATION_MOVE: text}) is None


# Orders


def test_moves_begin_in_turn_within_their_bounds():
    mover = MoveQueue(MoveLimits(at_once=2, per_hour=3))
    orders = [order(f"u{index}", owner=f"rs{index // 2}") for index in range(8)]
    assert all(mover.request_move(one, 0.0) for one in orders)
    assert not mover.request_move(orders[0], 0.0)
    begun = list(mover.start_due_orders(lambda _: None, 0.0))
    assert [one.goes[0].uid for one in begun] == ["u0", "u2"], "one of an owner at a time, two at once"
    mover.finish_order(begun[0], is_done=True)
    assert [one.goes[0].uid for one in mover.start_due_orders(lambda _: None, 1.0)] == ["u1"]
    mover.finish_order(begun[1], is_done=False)
    assert not list(mover.start_due_orders(lambda _: None, 2.0)), "three an hour"
    assert list(mover.start_due_orders(lambda _: None, 3600.0))
    assert (mover.done, mover.failed) == (1, 1)


def test_what_came_by_a_move_stays_for_a_while():
    mover = MoveQueue(MoveLimits(again_s=600.0))
    came = {"u": pod("u", annotations={ANNOTATION_MOVED_AT: "1000"})}
    mover.request_move(order("u"), 0.0)
    assert not list(mover.start_due_orders(came.get, 1500.0))
    assert list(mover.start_due_orders(came.get, 1600.0))


def test_a_new_pod_of_the_same_owner_claims_the_kept_place_once():
    mover = MoveQueue(MoveLimits())
    one = order("old")
    mover.mark_started(one)
    assert mover.claim_place(pod("n1", owner="other", gated=True)) == ""
    assert mover.claim_place(pod("n1")) == "", "it does not wait"
    assert mover.claim_place(pod("n1", gated=True)) == "unit-old"
    assert mover.claim_place(pod("n2", gated=True)) == ""
    mover.release_claim("n1")
    assert mover.claim_place(pod("n2", gated=True)) == "unit-old"
    mover.finish_order(one, is_done=True)
    assert mover.claim_place(pod("n3", gated=True)) == ""


def test_of_a_stateful_set_the_pod_of_the_same_name_claims():
    mover = MoveQueue(MoveLimits())
    mover.mark_started(order("old", kind="StatefulSet", manner=MoveMethod.EVICT, name="s-1"))
    assert mover.claim_place(pod("n0", kind="StatefulSet", name="s-0", gated=True)) == ""
    assert mover.claim_place(pod("n1", kind="StatefulSet", name="s-1", gated=True)) == "unit-old"


def test_what_is_fixed_or_has_no_owner_is_never_moved():
    assert move_method_of(Mobility.FIXED, "Job") is None
    assert move_method_of(Mobility.RESTARTABLE, "") is None
    assert move_method_of(Mobility.RESTARTABLE, "Job") is MoveMethod.EVICT
    assert move_method_of(Mobility.MOVABLE, "ReplicaSet") is MoveMethod.SURGE
    assert mobility_of(pod("u", kind="Job")) is Mobility.FIXED
    assert mobility_of(pod("u", kind="StatefulSet")) is Mobility.RESTARTABLE


def test_what_waits_too_long_for_its_turn_is_late():
    mover = MoveQueue(MoveLimits(at_once=1, wait_s=100.0))
    mover.request_move(order("a", owner="1"), 0.0)
    mover.request_move(order("b", owner="2"), 50.0)
    mover.request_move(order("c", owner="3"), 50.0)
    assert [one.goes[0].uid for one in mover.start_due_orders(lambda _: None, 60.0)] == ["a"]
    assert mover.overdue_orders(150.0) == []
    assert [one.goes[0].uid for one in mover.overdue_orders(151.0)] == ["b", "c"]


# Evictions


def gang(*uids, **how):
    notes = tuple(MoveNote(uid=uid, since_s=0.0, evict_s=10.0) for uid in uids)
    return notes, {uid: pod(uid, node_name="a", **how) for uid in uids}


def marked(notes, pods):
    return {
        note.uid: replace(pods[note.uid], annotations={ANNOTATION_MOVE: format_move_note(replace(note, step="told"))})
        for note in notes
    }


def test_pods_are_reported_before_they_are_evicted_all_at_once():
    notes, pods = gang("a", "b")
    first = next_eviction_step(notes, pods, PACE, 0.0, arrived=False)
    assert isinstance(first, MarkPod)
    assert (first.pod.uid, first.evict_s) == ("a", 10.0)
    pods = marked(notes, pods)
    assert isinstance(next_eviction_step(notes, pods, PACE, 9.0, arrived=False), WaitStep)
    found = next_eviction_step(notes, pods, PACE, 10.0, arrived=False)
    assert isinstance(found, EvictPods)
    assert {one.uid for one in found.pods} == {"a", "b"}


def test_what_is_forbidden_for_too_long_ends_with_the_reason():
    notes, pods = gang("a")
    over = next_eviction_step(notes, marked(notes, pods), PACE, 111.0, arrived=False, last="the budget b forbids it")
    assert isinstance(over, MoveEnded)
    assert not over.is_done
    assert "the budget b forbids it" in over.why


def test_what_has_gone_in_part_is_tried_for_longer_and_nobody_is_informed_again():
    notes, pods = gang("a", "b")
    del pods["a"]
    assert isinstance(next_eviction_step(notes, pods, PACE, 111.0, arrived=False), EvictPods)


def test_a_place_is_kept_until_the_pod_has_come():
    notes, _ = gang("a")
    assert isinstance(next_eviction_step(notes, {}, PACE, 20.0, arrived=False), WaitStep)
    assert next_eviction_step(notes, {}, PACE, 20.0, arrived=True) == MoveEnded(is_done=True, why="evicted")
    assert next_eviction_step(notes, {}, PACE, 200.0, arrived=False) == MoveEnded(is_done=True, why="evicted")


def test_a_job_that_would_fail_is_not_evicted():
    assert survives_evictions({"spec": {"backoffLimit": 1}}, 1)
    assert not survives_evictions({"spec": {"backoffLimit": 0}}, 1)
    assert not survives_evictions({"spec": {"backoffLimit": 3}, "status": {"failed": 2}}, 2)
    met = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert survives_evictions(
        {"spec": {"backoffLimit": 0, "podFailurePolicy": {"rules": [{"action": "Ignore", **met}]}}}, 4
    )
    assert not survives_evictions({"spec": {"podFailurePolicy": {"rules": [{"action": "FailJob", **met}]}}}, 1)


def test_budgets_count_all_of_a_gang():
    budget = {
        "metadata": {"name": "b"},
        "spec": {"selector": {"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "t", "operator": "Exists"}]}},
        "status": {"disruptionsAllowed": 1},
    }
    ours = {"a": "1", "t": "x"}
    assert find_blocking_budget([budget], [ours]) == ""
    assert "allows 1 disruptions now, and 2 are needed" in find_blocking_budget([budget], [ours, ours])
    assert find_blocking_budget([budget], [ours, {"a": "1"}, {"a": "2", "t": ""}]) == ""


# Nodes


def kube_node(taints=None, *, cordoned=False, version="7", **annotations):
    spec = {**({"taints": taints} if taints else {}), **({"unschedulable": True} if cordoned else {})}
    return {"metadata": {"name": "n", "resourceVersion": version, "annotations": annotations}, "spec": spec}


def test_a_node_is_drained_where_it_is_cordoned_and_annotated():
    assert is_drain_requested(kube_node(cordoned=True, **{ANNOTATION_DRAIN: "true"}))
    assert not is_drain_requested(kube_node(**{ANNOTATION_DRAIN: "true"}))
    assert not is_drain_requested(kube_node(cordoned=True))


def merged(node, patch):
    """The node after a merge patch."""
    annotations = {**node["metadata"]["annotations"], **patch.get("metadata", {}).get("annotations", {})}
    spec = {**node["spec"], **patch.get("spec", {})}
    kept = {key: value for key, value in annotations.items() if value is not None}
    return {
        "metadata": {**node["metadata"], "annotations": kept},
        "spec": {key: value for key, value in spec.items() if value is not None},
    }


def test_an_operators_cordon_and_drain_go_onto_the_node_and_off_again():
    begin = kube_node()
    drained = merged(begin, cordon_patch(begin, CordonMarks(cordon=True, drain=True)))
    assert is_drain_requested(drained)
    assert cordon_patch(drained, CordonMarks(cordon=True, drain=True)) == {}
    cordoned = merged(drained, cordon_patch(drained, CordonMarks(cordon=True)))
    assert (cordoned["spec"], is_drain_requested(cordoned)) == ({"unschedulable": True}, False)
    assert merged(cordoned, cordon_patch(cordoned, CordonMarks())) == begin


@pytest.mark.parametrize("annotations", [{}, {ANNOTATION_DRAIN: "true"}])
def test_a_cordon_and_a_drain_of_the_nodes_people_stay(annotations):
    theirs = kube_node(cordoned=True, **annotations)
    assert cordon_patch(theirs, CordonMarks()) == {}
    drained = merged(theirs, cordon_patch(theirs, CordonMarks(cordon=True, drain=True)))
    assert is_drain_requested(drained)
    assert merged(drained, cordon_patch(drained, CordonMarks())) == theirs


def test_a_cordon_that_somebody_else_lifted_is_put_back():
    begin = kube_node()
    lifted = merged(begin, cordon_patch(begin, CordonMarks(cordon=True)))
    del lifted["spec"]["unschedulable"]
    assert merged(lifted, cordon_patch(lifted, CordonMarks(cordon=True)))["spec"] == {"unschedulable": True}
    assert merged(lifted, cordon_patch(lifted, CordonMarks())) == begin


def test_how_far_a_drain_is():
    assert drain_status(DrainProgress()) == "empty of managed pods"
    assert "hold 3 GPUs" in drain_status(DrainProgress(foreign_gpus=3))
    assert drain_status(DrainProgress(2, ("x/a (fixed)",))) == "2 to move; 1 stay: x/a (fixed)"


def test_our_taint_goes_on_and_off_and_those_of_others_stay():
    other = {"key": "other", "effect": "NoSchedule", "timeAdded": "t"}
    ours = {"key": TAINT_REPARTITION, "effect": "NoSchedule"}
    assert taint_patch(kube_node([other]), wanted=True) == [
        {"op": "test", "path": "/spec/taints", "value": [other]},
        {"op": "replace", "path": "/spec/taints", "value": [other, ours]},
    ]
    assert taint_patch(kube_node(), wanted=True)[0] == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    assert taint_patch(kube_node([ours]), wanted=False)[1] == {"op": "remove", "path": "/spec/taints"}
    assert taint_patch(kube_node([ours, other]), wanted=False)[1]["value"] == [other]
    assert not taint_patch(kube_node([ours]), wanted=True)
    assert is_tainted(kube_node([other, ours]))


def test_a_taint_that_nothing_wants_is_removed_whoever_put_it_there():
    taints = TaintTimers(most_s=100.0)
    assert taints.taint_changes({"a"}, {"b"}, 0.0) == {"a": True, "b": False}
    assert taints.taint_changes({"a"}, {"a"}, 50.0) == {}
    assert taints.taint_changes({"a"}, {"a"}, 101.0) == {"a": False}
    assert taints.is_timed_out("a", 101.0)
    assert taints.taint_changes({"a"}, (), 102.0) == {}
    assert taints.taint_changes((), (), 103.0) == {}
    assert taints.taint_changes({"a"}, (), 104.0) == {"a": True}


def test_what_a_pod_asked_for_before_it_was_pinned():
    pin = {"key": "metadata.name", "operator": "In", "values": ["n"]}
    wish = {"key": "zone", "operator": "In", "values": ["a"]}

    def spec(*terms):
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
        return {"affinity": {"nodeAffinity": required}, "tolerations": [{"operator": "Exists"}]}

    pinned = parse_constraint(spec({"matchExpressions": [wish], "matchFields": [pin]}))
    assert remove_pin_terms(pinned) == parse_constraint(spec({"matchExpressions": [wish]}))
    assert remove_pin_terms(parse_constraint(spec({"matchFields": [pin]}))) == parse_constraint(
        {"tolerations": [{"operator": "Exists"}]}
    )


# The gate


def moving_side():
    api = Api()
    for name in ("a", "b", "c"):
        api.node(name)
    side = Side(api, replace(SETTINGS, moves=True))
    side.lead(1)
    return api, side


def moved(side, to):
    """The core moves the only workload."""
    (workload,) = side.core.state.workloads.values()
    (source,) = workload.placements
    gpu = side.core.state.nodes[to].inventory.gpus[0]
    target = Placement(replica=0, node_name=to, gpu_uuids=(gpu.uuid,), gpu_indexes=(0,))
    move = Move(workload_id=workload.workload_id, replicas=(ReplicaMove(source=source, target=target),))
    before = {name: record.others.gpu_count for name, record in side.core.state.nodes.items()}
    step = side.core.apply_moves((move,), now_ns=99)
    assert side.core.state.nodes[source.node_name].others.gpu_count == before[source.node_name] + 1
    side._heard(step.events)
    return workload.workload_id, source.node_name, move


def movable(api):
    api.pod(owner="rs-1")
    (found,) = api.pods.values()
    return found["metadata"]["name"], found["metadata"]["uid"]


def test_a_place_that_the_core_moved_is_kept_for_the_pod_to_come():
    api, side = moving_side()
    _, uid = movable(api)
    settle(api, [side], 0.0, rounds=3)
    here = api.bound[uid]
    to = next(name for name in ("a", "b", "c") if name != here)
    # A Deployment's pod, so that it may move.
    workload, _, _ = moved(side, to)
    settle(api, [side], 10.0, rounds=3)
    unit = side.gate.units[workload]
    assert unit.moving == {0: uid}
    assert side.core.state.nodes[here].others.gpu_count == 1, "the old pod is what others hold"
    name = api.pod(owner="rs-1")
    new = api.pods[name]["metadata"]["uid"]
    side.hear()
    side.events.insert(0, told.ReplacementStarted(new, unit.name))
    settle(api, [side], 20.0, rounds=3)
    assert api.bound[new] == to
    assert list(side.core.state.workloads) == [workload], "it has no place of its own"
    api.pods = {key: one for key, one in api.pods.items() if one["metadata"]["uid"] != uid}
    side.events += [told.PodDeleted(uid), told.MoveFinished(unit.name, uid)]
    settle(api, [side], 30.0, rounds=3)
    assert side.core.state.nodes[here].others.gpu_count == 0
    assert side.gate.units[workload].moving == {}
    check(api)


def test_a_kept_place_to_which_nobody_comes_is_let_go():
    api, side = moving_side()
    _, uid = movable(api)
    settle(api, [side], 0.0, rounds=3)
    here = api.bound[uid]
    workload, _, _ = moved(side, next(name for name in ("a", "b", "c") if name != here))
    settle(api, [side], 10.0, rounds=3)
    side.events.append(told.MoveFinished(workload, uid))
    settle(api, [side], 20.0, rounds=3)
    assert side.core.state.workloads[workload].phase.name == "CANCELLED"
    assert api.bound[uid] == here
    # The pod is taken over where it stands, as another workload, and so is not what others hold.
    (again,) = (one for one in side.core.state.workloads.values() if one.phase.name == "PLACED")
    assert [place.node_name for place in again.placements] == [here]
    assert side.core.state.nodes[here].others.gpu_count == 0


def test_a_move_that_is_taken_back_is_as_if_it_had_not_been():
    api, side = moving_side()
    _, uid = movable(api)
    settle(api, [side], 0.0, rounds=3)
    here = api.bound[uid]
    workload, _, move = moved(side, next(name for name in ("a", "b", "c") if name != here))
    settle(api, [side], 10.0, rounds=3)
    (item,) = move.replicas
    back = replace(move, replicas=(ReplicaMove(source=item.target, target=item.source),))
    side._heard(side.core.apply_moves((back,), now_ns=100, is_back=True).events)
    side.events.append(told.MoveFinished(workload, uid))
    settle(api, [side], 20.0, rounds=3)
    unit = side.gate.units[workload]
    assert unit.slots == {0: uid}
    assert side.core.state.workloads[workload].placements == (item.source,)
    assert side.core.state.nodes[here].others.gpu_count == 0


def test_without_the_ability_a_place_that_was_moved_is_let_go_as_before():
    api = Api()
    for name in ("a", "b"):
        api.node(name)
    side = Side(api)
    side.lead(1)
    _, uid = movable(api)
    settle(api, [side], 0.0, rounds=3)
    workload, _, _ = moved(side, "b" if api.bound[uid] == "a" else "a")
    settle(api, [side], 10.0, rounds=3)
    assert side.core.state.workloads[workload].phase.name == "CANCELLED"


def test_a_pod_that_ends_while_its_place_is_moved_holds_nothing_anywhere():
    api, side = moving_side()
    name, uid = movable(api)
    settle(api, [side], 0.0, rounds=3)
    here = api.bound[uid]
    _, _, _ = moved(side, next(name for name in ("a", "b", "c") if name != here))
    api.end(name)
    settle(api, [side], 10.0, rounds=3)
    side.events.append(told.MoveFinished(next(iter(side.gate.units), "")))
    settle(api, [side], 20.0, rounds=3)
    assert {record.others.gpu_count for record in side.core.state.nodes.values()} == {0}
    assert not any(record.assignments for record in side.core.state.nodes.values())
