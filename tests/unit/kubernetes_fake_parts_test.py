"""The opt-in parts of the fake: they act as Kubernetes' own do, where Eelgrid depends on it."""

import pytest
from tests.builders import kubernetes
from tests.builders.kubernetes import build_deployment, build_job, build_node, build_pod, build_ungating_patch
from tests.fakes.kubernetes.admission import gate_injector, webhook_away
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.kubelets import Kubelets
from tests.fakes.kubernetes.resources import RESOURCE_CLAIM_TEMPLATES
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.fakes.kubernetes.workloads import Budgets, Claims, Workloads
from tests.waiting import wait_for

from eelgrid_controller.engines.kubernetes.api import errors
from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    JOBS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    POD_GROUPS,
    PODS,
    RESOURCE_CLAIMS,
)


@pytest.fixture
async def fake():
    async with FakeCluster(with_pod_groups=True) as made:
        yield made


async def pods(cluster, **how):
    return (await cluster.list(PODS, namespace="default", **how)).items


def places(found):
    return {one["metadata"]["name"]: one["spec"].get("nodeName") for one in found}


async def all_bound(cluster, count):
    async def look():
        found = [one for one in await pods(cluster) if one["spec"].get("nodeName")]
        return found if len(found) == count else None

    return places(await wait_for(look))


async def test_the_scheduler_binds_pinned_pods_to_their_nodes_and_no_gated_ones(fake):
    await fake.add(Scheduler(fake))
    cluster = fake.client()
    for name in ("n1", "n2"):
        await cluster.create(NODES, build_node(name))
    for name in ("a", "b", "c"):
        await cluster.create(PODS, build_pod(name))
    await cluster.patch(PODS, "a", build_ungating_patch("n2"), namespace="default")
    await cluster.patch(PODS, "b", build_ungating_patch("n1"), namespace="default")
    assert await all_bound(cluster, 2) == {"a": "n2", "b": "n1"}
    assert places(await pods(cluster))["c"] is None


async def test_a_pod_whose_node_is_full_waits_and_is_bound_when_there_is_room(fake):
    await fake.add(Scheduler(fake))
    await fake.add(Kubelets(fake))
    cluster = fake.client()
    await cluster.create(NODES, build_node("n1", gpus=1))
    for name in "ab":
        await cluster.create(PODS, build_pod(name))
        await cluster.patch(PODS, name, build_ungating_patch("n1"), namespace="default")

    async def is_unschedulable():
        (told,) = await pods(cluster, fields="spec.nodeName=")
        return told["status"]["conditions"][0]["reason"] == "Unschedulable" and told["metadata"]["name"]

    waiting = await wait_for(is_unschedulable)
    await cluster.delete(PODS, "ab".replace(waiting, ""), namespace="default")
    assert await all_bound(cluster, 1) == {waiting: "n1"}


async def test_taints_and_cordons_keep_pods_away(fake):
    await fake.add(Scheduler(fake))
    cluster = fake.client()
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    await cluster.create(NODES, build_node("tainted", taints=[taint]))
    await cluster.create(NODES, build_node("cordoned", unschedulable=True))
    await cluster.create(PODS, build_pod("a", gates=()))
    own = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    await cluster.create(PODS, build_pod("b", gates=(), tolerations=own))
    assert await all_bound(cluster, 1) == {"b": "tainted"}
    await cluster.patch(NODES, "cordoned", {"spec": {"unschedulable": None}})
    assert await all_bound(cluster, 2) == {"a": "cordoned", "b": "tainted"}


async def test_a_gang_is_bound_whole_or_not_at_all(fake):
    await fake.add(Scheduler(fake))
    cluster = fake.client()
    for name in ("n1", "n2"):
        await cluster.create(NODES, build_node(name, gpus=8))
    group = {"metadata": {"name": "g"}, "spec": {"schedulingPolicy": {"gang": {"minCount": 2}}}}
    await cluster.create(POD_GROUPS, group, namespace="default")
    await cluster.create(PODS, build_pod("thief", gates=(), gpus=8))
    await all_bound(cluster, 1)
    for name, at in (("a", "n1"), ("b", "n2")):
        await cluster.create(PODS, build_pod(name, gpus=8, schedulingGroup={"podGroupName": "g"}))
        await cluster.patch(PODS, name, build_ungating_patch(at), namespace="default")
    assert len(await all_bound(cluster, 1)) == 1
    await cluster.delete(PODS, "thief", namespace="default", grace_s=0)
    assert await all_bound(cluster, 2) == {"a": "n1", "b": "n2"}


async def test_a_deployment_makes_its_pods_gated_and_recreates_them(fake):
    fake.api.mutators.append(gate_injector())
    for part in (Workloads(fake), Scheduler(fake), Kubelets(fake), Budgets(fake)):
        await fake.add(part)
    cluster = fake.client()
    await cluster.create(NODES, build_node("n1"))
    managed = {"eelgrid.io/managed": "true"}
    await cluster.create(DEPLOYMENTS, build_deployment("d", replicas=2, labels=managed))
    found = await wait_for(lambda: _count(cluster, 2))
    assert all(one["spec"]["schedulingGates"] == [{"name": kubernetes.GATE}] for one in found)
    for one in found:
        await cluster.patch(PODS, one["metadata"]["name"], build_ungating_patch("n1"), namespace="default")

    async def is_ready():
        return (await cluster.get(DEPLOYMENTS, "d", namespace="default")).get("status", {}).get("readyReplicas") == 2

    await wait_for(is_ready)
    budget = {"metadata": {"name": "b"}, "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "d"}}}}
    await cluster.create(POD_DISRUPTION_BUDGETS, budget, namespace="default")
    name = found[0]["metadata"]["name"]

    async def is_judged():
        told = await cluster.get(POD_DISRUPTION_BUDGETS, "b", namespace="default")
        return told["status"].get("currentHealthy") == 2

    await wait_for(is_judged)
    with pytest.raises(errors.BudgetForbids):
        await cluster.evict(name, namespace="default")
    await cluster.delete(POD_DISRUPTION_BUDGETS, "b", namespace="default")
    await cluster.evict(name, namespace="default")
    again = await wait_for(lambda: _count(cluster, 2, without=name))
    assert sorted(bool(one["spec"].get("schedulingGates")) for one in again) == [False, True]
    costly = next(one for one in again if not one["spec"].get("schedulingGates"))["metadata"]["name"]
    await cluster.patch(DEPLOYMENTS, "d", {"spec": {"replicas": 1}}, namespace="default")
    (left,) = await wait_for(lambda: _count(cluster, 1))
    assert left["metadata"]["name"] == costly, "the one that is not bound goes first"
    await cluster.delete(DEPLOYMENTS, "d", namespace="default")
    await wait_for(lambda: _none(cluster))


async def _count(cluster, count, without=""):
    found = [one for one in await pods(cluster) if not one["metadata"].get("deletionTimestamp")]
    return found if len(found) == count and all(one["metadata"]["name"] != without for one in found) else None


async def _none(cluster):
    return not await pods(cluster)


async def test_pods_that_did_not_opt_in_are_untouched_also_while_the_webhook_is_away(fake):
    fake.api.mutators.append(webhook_away())
    cluster = fake.client()
    assert (await cluster.create(PODS, build_pod("a", gates=())))["spec"].get("schedulingGates") is None
    with pytest.raises(errors.AdmissionDenied):
        await cluster.create(PODS, build_pod("b", gates=(), labels={"eelgrid.io/managed": "true"}))


async def test_a_suspended_job_has_no_pods_until_it_is_resumed(fake):
    await fake.add(Workloads(fake))
    kubelets = await fake.add(Kubelets(fake))
    await fake.add(Scheduler(fake))
    cluster = fake.client()
    await cluster.create(NODES, build_node("n1"))
    await cluster.create(JOBS, build_job("j", parallelism=2, suspend=True))

    async def condition(name):
        told = (await cluster.get(JOBS, "j", namespace="default")).get("status", {}).get("conditions", ())
        return any(one["type"] == name and one["status"] == "True" for one in told)

    await wait_for(lambda: condition("Suspended"))
    assert await pods(cluster) == []
    await cluster.patch(JOBS, "j", {"spec": {"suspend": False}}, namespace="default")
    for name in await all_bound(cluster, 2):
        kubelets.finish("default", name)
    await wait_for(lambda: condition("Complete"))


def claim_template():
    exactly = {"deviceClassName": "gpu.eelgrid.io", "count": 1}
    return {
        "metadata": {"name": "t"},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    }


@pytest.mark.parametrize("has_timestamp", [True, False])
async def test_a_claim_is_made_for_a_gated_pod_and_bound_where_it_is_allocated(fake, has_timestamp):
    for part in (Claims(fake), Scheduler(fake)):
        await fake.add(part)
    cluster = fake.client()
    for name in ("n1", "n2"):
        await cluster.create(NODES, build_node(name))
    await cluster.create(RESOURCE_CLAIM_TEMPLATES, claim_template(), namespace="default")
    claims = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
    await cluster.create(PODS, build_pod("a", gpus=0, resourceClaims=claims))

    async def made():
        return (await cluster.list(RESOURCE_CLAIMS, namespace="default")).items

    (claim,) = await wait_for(made)
    field = {"key": "metadata.name", "operator": "In", "values": ["n2"]}
    allocation = {
        "devices": {"results": [{"request": "gpu", "driver": "gpu.eelgrid.io", "pool": "n2", "device": "gpu-0"}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }
    if has_timestamp:
        allocation["allocationTimestamp"] = "2026-11-01T00:00:00Z"
    name = claim["metadata"]["name"]
    await cluster.patch(
        RESOURCE_CLAIMS, name, {"status": {"allocation": allocation}}, namespace="default", subresource="status"
    )
    await cluster.patch(PODS, "a", {"spec": {"schedulingGates": None}}, namespace="default")
    if not has_timestamp:

        async def waits():
            (told,) = await pods(cluster)
            return any(one.get("reason") == "Unschedulable" for one in told["status"]["conditions"])

        await wait_for(waits)
        return
    assert await all_bound(cluster, 1) == {"a": "n2"}
    reserved = (await cluster.get(RESOURCE_CLAIMS, name, namespace="default"))["status"]["reservedFor"]
    assert [one["name"] for one in reserved] == ["a"]
    await cluster.delete(PODS, "a", namespace="default", grace_s=0)
    assert await made() == [], "the claim goes with its pod"
