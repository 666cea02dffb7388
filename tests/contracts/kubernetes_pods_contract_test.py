"""What Eelgrid relies on for pods: gates, pins, binding, eviction, Jobs that wait. Through the port, one rule a test."""

import contextlib

import pytest
from tests.builders.kubernetes import GATE, build_job, build_node, build_pin, build_pod, build_ungating_patch
from tests.fakes.kubernetes.resources import MUTATING_ADMISSION_POLICIES
from tests.kubernetes_api_rig import WAYS, bind, open_rig
from tests.waiting import wait_for

from eelgrid_controller.engines.kubernetes.api import errors
from eelgrid_controller.engines.kubernetes.api.port import JOBS, NODES, POD_DISRUPTION_BUDGETS, PODS, PatchKind

OTHER_UID = "00000000-0000-4000-8000-000000000000"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
ZONE = {"key": "zone", "operator": "In", "values": ["a"]}
DISK = {"key": "disk", "operator": "In", "values": ["ssd"]}


def terms(*found, **more):
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(found)}, **more}}


@pytest.fixture(params=WAYS)
async def rig(request):
    async with open_rig(request.param) as made:
        yield made


async def patch(rig, body, name="a", **how):
    return await rig.cluster.patch(PODS, name, body, namespace=rig.space, **how)


def conditions(found):
    return {one["type"]: one for one in found["status"].get("conditions", ())}


async def test_a_gated_pod_says_so(rig):
    made = await rig.add(PODS, build_pod("a"))
    assert made["spec"]["schedulingGates"] == [{"name": GATE}]
    told = conditions(made)["PodScheduled"]
    assert (told["status"], told["reason"]) == ("False", "SchedulingGated")


async def test_a_condition_of_our_own_joins_those_of_others_and_is_refused_for_another_pod_of_the_name(rig):
    made = await rig.add(PODS, build_pod("a"))

    def ours(reason, uid=made["metadata"]["uid"]):
        one = {
            "type": "eelgrid.io/Placement",
            "status": "False",
            "reason": reason,
            "message": "no room",
            "lastTransitionTime": "2026-11-22T04:00:00Z",
        }
        return {"metadata": {"uid": uid}, "status": {"conditions": [one]}}

    for reason in ("NoRoom", "NoEligibleNode"):
        await patch(rig, ours(reason), kind=PatchKind.STRATEGIC, subresource="status", is_brief=True)
        told = conditions(await rig.cluster.get(PODS, "a", namespace=rig.space))
        assert told["PodScheduled"]["reason"] == "SchedulingGated"
        assert (told["eelgrid.io/Placement"]["status"], told["eelgrid.io/Placement"]["reason"]) == ("False", reason)
    # What the writer counts as dropped, whichever error it is.
    with pytest.raises(errors.Invalid, match="uid"):
        await patch(rig, ours("NoRoom", OTHER_UID), kind=PatchKind.STRATEGIC, subresource="status", is_brief=True)


async def test_a_brief_answer_to_a_patch_has_its_metadata_at_least(rig):
    made = await rig.add(PODS, build_pod("a"))
    told = await patch(rig, {"metadata": {"annotations": {"x": "1"}}}, is_brief=True)
    assert told["metadata"]["uid"] == made["metadata"]["uid"]
    assert told["metadata"]["annotations"] == {"x": "1"}
    assert int(told["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}}
    with pytest.raises(errors.Conflict):
        await patch(rig, stale, is_brief=True)


async def test_a_policy_gates_the_pods_that_opted_in_and_no_others(rig):
    if not (await rig.cluster.discover()).has(MUTATING_ADMISSION_POLICIES):
        pytest.skip("MutatingAdmissionPolicy v1 is served from 1.36 on")
    await rig.inject_gates(GATE, "eelgrid.io/managed")
    managed = {"eelgrid.io/managed": "true"}
    numbers = iter(range(1_000))

    async def is_in_force():
        made = await rig.add(PODS, build_pod(f"try-{next(numbers)}", gates=(), labels=managed, schedulerName="nobody"))
        return made["spec"].get("schedulingGates")

    assert await wait_for(is_in_force, within_s=30.0) == [{"name": GATE}]
    twice = await rig.add(PODS, build_pod("twice", gates=(GATE, "x.io/other"), labels=managed))
    assert sorted(one["name"] for one in twice["spec"]["schedulingGates"]) == [GATE, "x.io/other"]
    free = await rig.add(PODS, build_pod("free", gates=(), schedulerName="nobody"))
    assert "schedulingGates" not in free["spec"]


async def test_one_patch_pins_a_pod_and_lets_it_go(rig):
    made = await rig.add(PODS, build_pod("a"))
    body = build_ungating_patch("n1", {"eelgrid.io/plan": "x"})
    body["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
    found = await patch(rig, body)
    assert "schedulingGates" not in found["spec"]
    assert found["spec"]["affinity"] == build_pin("n1")
    assert found["metadata"]["annotations"]["eelgrid.io/plan"] == "x"
    with pytest.raises(errors.Conflict):
        await patch(rig, body)


ALLOWED = {
    "a node selector": {"nodeSelector": {"old": "1", "zone": "a"}},
    "another term's expression": {"affinity": terms({"matchExpressions": [ZONE, DISK]})},
    "a field beside expressions": {
        "affinity": terms(
            {"matchExpressions": [ZONE], **build_pin("n")["nodeAffinity"][REQUIRED]["nodeSelectorTerms"][0]}
        )
    },
    "a preference": {
        "affinity": terms(
            {"matchExpressions": [ZONE]},
            preferredDuringSchedulingIgnoredDuringExecution=[
                {"weight": 100, "preference": {"matchExpressions": [DISK]}}
            ],
        )
    },
    "an image": {"containers": [{"name": "main", "image": "registry.k8s.io/pause:3.9"}]},
    "no gates": {"schedulingGates": None},
}
DENIED = {
    "a changed selector": ({"nodeSelector": {"old": "2"}}, "spec.nodeSelector"),
    "a removed selector": ({"nodeSelector": None}, "spec.nodeSelector"),
    "another alternative": (
        {"affinity": terms({"matchExpressions": [ZONE]}, {"matchExpressions": [DISK]})},
        f"spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms",
    ),
    "a changed term": (
        {"affinity": terms({"matchExpressions": [DISK]})},
        f"spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0]",
    ),
    "pod affinity": ({"affinity": {"podAffinity": {REQUIRED: [{"topologyKey": "x", "labelSelector": {}}]}}}, "spec"),
    "resources": (
        {"containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
        "spec",
    ),
    "an environment": ({"containers": [{"name": "main", "image": "x", "env": [{"name": "A", "value": "1"}]}]}, "spec"),
    "another scheduler": ({"schedulerName": "mine"}, "spec"),
    "a node": ({"nodeName": "n1"}, "spec"),
    "a priority": ({"priority": 7}, "spec"),
    "another gate": ({"schedulingGates": [{"name": GATE}, {"name": "x.io/new"}]}, "spec.schedulingGates"),
}


def narrowed(name):
    """A gated pod that has a selector and a required term already."""
    return build_pod(name, nodeSelector={"old": "1"}, affinity=terms({"matchExpressions": [ZONE]}))


def strategic(spec):
    """Containers are merged by name; all else is replaced."""
    return PatchKind.STRATEGIC if "containers" in spec else PatchKind.MERGE


@pytest.mark.parametrize("what", ALLOWED)
async def test_a_gated_pod_may_be_narrowed(rig, what):
    await rig.add(PODS, narrowed("a"))
    found = await patch(rig, {"spec": ALLOWED[what]}, kind=strategic(ALLOWED[what]))
    assert found["metadata"]["generation"] == 2


@pytest.mark.parametrize("what", DENIED)
async def test_nothing_else_of_a_gated_pod_may_change(rig, what):
    await rig.add(PODS, narrowed("a"))
    spec, field = DENIED[what]
    with pytest.raises(errors.Invalid) as denied:
        await patch(rig, {"spec": spec}, kind=strategic(spec))
    assert denied.value.status == 422
    assert any(cause.field.startswith(field) for cause in denied.value.causes), denied.value.causes


async def test_tolerations_may_be_added_to_any_pod_and_taken_from_none(rig):
    own = {"key": "x.io/own", "operator": "Exists", "effect": "NoSchedule"}
    more = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    for name, gates in (("a", (GATE,)), ("b", ())):
        made = await rig.add(PODS, build_pod(name, gates=gates, schedulerName="nobody", tolerations=[own]))
        tolerations = [*made["spec"]["tolerations"], more]
        found = await patch(rig, {"spec": {"tolerations": tolerations}}, name=name)
        assert more in found["spec"]["tolerations"]
        with pytest.raises(errors.Invalid):
            await patch(rig, {"spec": {"tolerations": [more]}}, name=name)
        # What every pod tolerates for a while comes back by itself.
        found = await patch(rig, {"spec": {"tolerations": [own, more]}}, name=name)
        assert {one["key"] for one in found["spec"]["tolerations"]} > {"x.io/own", "nvidia.com/gpu"}


async def test_a_pin_is_for_ever(rig):
    await rig.add(PODS, build_pod("a", schedulerName="nobody"))
    await patch(rig, build_ungating_patch("n1"))
    for spec in ({"affinity": build_pin("n2")}, {"affinity": None}, {"schedulingGates": [{"name": GATE}]}):
        with pytest.raises(errors.Invalid):
            await patch(rig, {"spec": spec})
    await patch(rig, {"metadata": {"labels": {"x": "1"}, "annotations": {"y": "2"}}})


async def test_a_gate_is_there_from_the_beginning_or_never(rig):
    await rig.add(PODS, build_pod("a", gates=(), schedulerName="nobody"))
    with pytest.raises(errors.Invalid):
        await patch(rig, {"spec": {"schedulingGates": [{"name": GATE}]}})
    with pytest.raises(errors.Invalid):
        await rig.add(PODS, build_pod("b", nodeName="n1"))


async def test_a_gated_pod_is_not_bound(rig):
    made = await rig.add(PODS, build_pod("a", schedulerName="nobody"))
    with pytest.raises(errors.Conflict):
        await bind(rig.cluster, "a", namespace=rig.space, node="n1")
    await patch(rig, {"spec": {"schedulingGates": None}})
    with pytest.raises(errors.Conflict):
        await bind(rig.cluster, "a", namespace=rig.space, node="n1", uid=OTHER_UID)
    await bind(rig.cluster, "a", namespace=rig.space, node="n1", uid=made["metadata"]["uid"])
    found = await rig.cluster.get(PODS, "a", namespace=rig.space)
    assert found["spec"]["nodeName"] == "n1"
    assert conditions(found)["PodScheduled"]["status"] == "True"
    with pytest.raises(errors.Conflict):
        await bind(rig.cluster, "a", namespace=rig.space, node="n2")
    with pytest.raises(errors.ObjectNotFound):
        await bind(rig.cluster, "b", namespace=rig.space, node="n2")


async def _bind(rig, made, *, node="n1", **other):
    metadata = made["metadata"] | other
    await rig.cluster.bind(
        "a",
        namespace=rig.space,
        node_name=node,
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        annotations={"eelgrid.io/plan": "x"},
    )


async def test_a_binding_writes_node_and_annotations_of_this_version_of_this_pod_once(rig):
    made = await rig.add(PODS, build_pod("a", gates=(), schedulerName="eelgrid"))
    for other in ({"uid": OTHER_UID}, {"resourceVersion": "1"}):
        with pytest.raises(errors.Conflict):
            await _bind(rig, made, **other)
    changed = await patch(rig, {"metadata": {"annotations": {"eelgrid.io/fence": "2/1"}}})
    with pytest.raises(errors.Conflict):  # what a fence is for
        await _bind(rig, made)
    await _bind(rig, changed)
    found = await rig.cluster.get(PODS, "a", namespace=rig.space)
    assert found["spec"]["nodeName"] == "n1"
    assert found["metadata"]["annotations"]["eelgrid.io/plan"] == "x"
    assert conditions(found)["PodScheduled"]["status"] == "True"
    with pytest.raises(errors.Conflict):
        await _bind(rig, found, node="n2")


async def test_a_binding_is_refused_while_a_gate_is_there(rig):
    made = await rig.add(PODS, build_pod("a", gates=("x.io/other",), schedulerName="eelgrid"))
    with pytest.raises(errors.Conflict):
        await _bind(rig, made)


async def test_whose_scheduler_a_pod_names_may_say_why_it_is_not_scheduled_for_this_version_alone(rig):
    made = await rig.add(PODS, build_pod("a", gates=(), schedulerName="eelgrid"))
    one = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "no room",
        "lastTransitionTime": "2026-11-22T04:00:00Z",
    }
    head = {"uid": made["metadata"]["uid"], "resourceVersion": made["metadata"]["resourceVersion"]}
    body = {"metadata": head, "status": {"conditions": [one]}}
    how = {"kind": PatchKind.STRATEGIC, "subresource": "status", "is_brief": True}
    await patch(rig, body, **how)
    found = await rig.cluster.get(PODS, "a", namespace=rig.space)
    assert conditions(found)["PodScheduled"]["reason"] == "Unschedulable"
    with pytest.raises(errors.Conflict):
        await patch(rig, body, **how)


async def test_binding_checks_no_room(rig):
    """Two pods that ask for the only device of a node are both bound: whoever binds must count."""
    await rig.add(NODES, build_node(f"{rig.space}-n", gpus=1))
    for name in "ab":
        await rig.add(PODS, build_pod(name, gates=(), schedulerName="nobody"))
        await bind(rig.cluster, name, namespace=rig.space, node=f"{rig.space}-n")


async def test_a_bound_pod_goes_when_its_grace_is_over_and_an_unbound_one_at_once(rig):
    for name in "ab":
        await rig.add(PODS, build_pod(name, gates=(), schedulerName="nobody"))
    await bind(rig.cluster, "a", namespace=rig.space, node="n1")
    for name in "ab":
        await rig.cluster.delete(PODS, name, namespace=rig.space)
    found = await rig.cluster.get(PODS, "a", namespace=rig.space)
    assert found["metadata"]["deletionGracePeriodSeconds"] == 30
    assert found["metadata"]["deletionTimestamp"]
    with pytest.raises(errors.ObjectNotFound):
        await rig.cluster.get(PODS, "b", namespace=rig.space)
    await rig.cluster.delete(PODS, "a", namespace=rig.space, grace_s=0)
    with pytest.raises(errors.ObjectNotFound):
        await rig.cluster.get(PODS, "a", namespace=rig.space)


async def running(rig, name, labels):
    """A pod that is bound, running and ready, on a node that is there: pods of no node are collected."""
    at = f"{rig.space}-n"
    with contextlib.suppress(errors.ObjectAlreadyExists):
        await rig.add(NODES, build_node(at))
    await rig.add(PODS, build_pod(name, gates=(), schedulerName="nobody", labels=labels))
    await bind(rig.cluster, name, namespace=rig.space, node=at)
    ready = {"type": "Ready", "status": "True"}
    status = {"phase": "Running", "conditions": [ready], "podIP": "10.0.0.1"}
    return await patch(rig, {"status": status}, name=name, subresource="status")


async def budget(rig, allowed, healthy, least):
    """A budget as the disruption controller has judged it, itself or by us."""
    made = await rig.add(
        POD_DISRUPTION_BUDGETS,
        {"metadata": {"name": "b"}, "spec": {"minAvailable": least, "selector": {"matchLabels": {"app": "a"}}}},
    )
    status = {
        "observedGeneration": made["metadata"]["generation"],
        "disruptionsAllowed": allowed,
        "currentHealthy": healthy,
        "desiredHealthy": least,
        "expectedPods": healthy,
    }
    if rig.fake is not None or not rig.has_controllers:
        await rig.cluster.patch(
            POD_DISRUPTION_BUDGETS, "b", {"status": status}, namespace=rig.space, subresource="status"
        )

    async def is_judged():
        found = (await rig.cluster.get(POD_DISRUPTION_BUDGETS, "b", namespace=rig.space)).get("status", {})
        return found.get("disruptionsAllowed") == allowed and found.get("currentHealthy") == healthy

    await wait_for(is_judged, within_s=30.0)


async def test_a_budget_keeps_its_pods(rig):
    made = await running(rig, "a", {"app": "a"})
    await budget(rig, 0, 1, 1)
    with pytest.raises(errors.BudgetForbids):
        await rig.cluster.evict("a", namespace=rig.space)
    await rig.add(PODS, build_pod("pending", labels={"app": "a"}))
    await rig.cluster.evict("pending", namespace=rig.space)
    assert (await rig.cluster.get(PODS, "a", namespace=rig.space))["metadata"]["uid"] == made["metadata"]["uid"]


async def test_a_budget_that_allows_one_allows_one(rig):
    for name in "ab":
        await running(rig, name, {"app": "a"})
    await budget(rig, 1, 2, 1)
    await rig.cluster.evict("a", namespace=rig.space)
    assert (await rig.cluster.get(PODS, "a", namespace=rig.space))["metadata"]["deletionTimestamp"]
    with pytest.raises(errors.BudgetForbids):
        await rig.cluster.evict("b", namespace=rig.space)


async def test_a_dry_eviction_says_whether_it_might_and_spends_nothing(rig):
    for name in "ab":
        await running(rig, name, {"app": "a"})
    await budget(rig, 1, 2, 1)
    for name in "ab":
        await rig.cluster.evict(name, namespace=rig.space, is_dry=True)
    assert "deletionTimestamp" not in (await rig.cluster.get(PODS, "a", namespace=rig.space))["metadata"]
    await rig.cluster.evict("a", namespace=rig.space)
    with pytest.raises(errors.BudgetForbids):
        await rig.cluster.evict("b", namespace=rig.space, is_dry=True)


async def test_an_eviction_that_meets_another_pod_has_spent_the_budget_nevertheless(rig):
    for name in "ab":
        await running(rig, name, {"app": "a"})
    await budget(rig, 1, 2, 1)
    with pytest.raises(errors.Conflict):
        await rig.cluster.evict("a", namespace=rig.space, uid=OTHER_UID)
    with pytest.raises(errors.BudgetForbids):
        await rig.cluster.evict("b", namespace=rig.space)


async def test_an_eviction_of_nobody(rig):
    with pytest.raises(errors.ObjectNotFound):
        await rig.cluster.evict("a", namespace=rig.space)
    await rig.add(PODS, build_pod("free"))
    await rig.cluster.evict("free", namespace=rig.space, grace_s=0)
    with pytest.raises(errors.ObjectNotFound):
        await rig.cluster.get(PODS, "free", namespace=rig.space)


RIGHT_SIZED = {
    "containers": [
        {
            "name": "main",
            "image": "registry.k8s.io/pause:3.10",
            "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}},
        }
    ]
}


async def test_a_suspended_job_is_right_sized_and_a_running_one_is_not(rig):
    if (await rig.cluster.discover()).minor < 36:
        pytest.skip("resources of suspended Jobs are mutable from 1.36 on")
    await rig.add(JOBS, build_job("a", suspend=True))
    body = {
        "spec": {"template": {"spec": {**RIGHT_SIZED, "schedulingGates": [{"name": GATE}], "nodeSelector": {"x": "1"}}}}
    }
    found = await rig.cluster.patch(JOBS, "a", body, namespace=rig.space)
    container = found["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/mig-1g.10gb": "1"}
    command = {"containers": [{**RIGHT_SIZED["containers"][0], "command": ["x"]}]}
    with pytest.raises(errors.Invalid):
        await rig.cluster.patch(JOBS, "a", {"spec": {"template": {"spec": command}}}, namespace=rig.space)
    await rig.add(JOBS, build_job("b", gates=(GATE,)))
    with pytest.raises(errors.Invalid):
        await rig.cluster.patch(JOBS, "b", {"spec": {"template": {"spec": RIGHT_SIZED}}}, namespace=rig.space)
