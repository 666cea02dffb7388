"""What Eelgrid relies on in a Kubernetes API: objects, writes, lists, watches. Through the port, one rule a test."""

from dataclasses import replace

import pytest
from tests.builders.kubernetes import build_config_map, build_deployment, build_node, build_pod
from tests.fakes.kubernetes.resources import CONFIG_MAPS, CUSTOM_RESOURCE_DEFINITIONS, MUTATING_ADMISSION_POLICIES
from tests.kubernetes_api_rig import WAYS, bind, open_rig
from tests.waiting import wait_for

from eelgrid_controller.engines.kubernetes.api import errors
from eelgrid_controller.engines.kubernetes.api.client import HttpClusterClient
from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    LEASES,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    PatchKind,
    PropagationPolicy,
    Resource,
    version_of,
)

THINGS = Resource("things.eelgrid.io", "v1", "things", "Thing")


@pytest.fixture(params=WAYS)
async def rig(request):
    async with open_rig(request.param) as made:
        yield made


async def test_a_new_object_has_a_uid_a_version_and_a_time(rig):
    made = await rig.add(PODS, build_pod("a"))
    assert made["metadata"].keys() >= {"uid", "resourceVersion", "creationTimestamp"}
    assert made["metadata"]["generation"] == 1
    assert await rig.cluster.get(PODS, "a", namespace=rig.space) == made


async def test_a_generated_name_is_new_each_time(rig):
    body = {"metadata": {"generateName": "a-"}, "data": {}}
    names = {(await rig.add(CONFIG_MAPS, body))["metadata"]["name"] for _ in range(5)}
    assert len(names) == 5
    assert all(name.startswith("a-") and len(name) == 7 for name in names)


async def test_a_name_is_taken_once(rig):
    await rig.add(CONFIG_MAPS, build_config_map("a"))
    with pytest.raises(errors.ObjectAlreadyExists):
        await rig.add(CONFIG_MAPS, build_config_map("a"))


async def test_what_is_not_there_is_not_found_and_what_is_not_served_is_told_apart(rig):
    with pytest.raises(errors.ObjectNotFound) as absent:
        await rig.cluster.get(PODS, "a", namespace=rig.space)
    assert not isinstance(absent.value, errors.NotServed)
    with pytest.raises(errors.NotServed):
        await rig.cluster.get(THINGS.at("v9"), "a", namespace=rig.space)
    with pytest.raises(errors.ObjectNotFound):
        await rig.cluster.create(CONFIG_MAPS, build_config_map("a"), namespace="t-none")


async def test_a_write_against_an_old_version_is_a_conflict(rig):
    old = await rig.add(CONFIG_MAPS, build_config_map("a", x="1"))
    new = await rig.cluster.replace(CONFIG_MAPS, {**old, "data": {"x": "2"}})
    assert version_of(new) != version_of(old)
    with pytest.raises(errors.Conflict):
        await rig.cluster.replace(CONFIG_MAPS, {**old, "data": {"x": "3"}})
    stale = {"metadata": {"resourceVersion": version_of(old)}, "data": {"x": "3"}}
    with pytest.raises(errors.Conflict):
        await rig.cluster.patch(CONFIG_MAPS, "a", stale, namespace=rig.space)
    fresh = {"metadata": {"resourceVersion": version_of(new)}, "data": {"x": "3"}}
    assert (await rig.cluster.patch(CONFIG_MAPS, "a", fresh, namespace=rig.space))["data"] == {"x": "3"}


async def test_a_write_for_another_uid_is_refused(rig):
    old = await rig.add(CONFIG_MAPS, build_config_map("a"))
    other = {"metadata": {"uid": "00000000-0000-4000-8000-000000000000"}, "data": {"x": "1"}}
    with pytest.raises((errors.Conflict, errors.Invalid)):
        await rig.cluster.patch(CONFIG_MAPS, "a", other, namespace=rig.space)
    with pytest.raises(errors.Conflict):
        await rig.cluster.replace(CONFIG_MAPS, {**old, "metadata": {**old["metadata"], **other["metadata"]}})


async def test_a_write_that_changes_nothing_leaves_the_version(rig):
    old = await rig.add(CONFIG_MAPS, build_config_map("a", x="1"))
    same = await rig.cluster.patch(CONFIG_MAPS, "a", {"data": {"x": "1"}}, namespace=rig.space)
    assert version_of(same) == version_of(old)


async def test_a_lease_is_replaced_against_a_version_only(rig):
    made = await rig.add(
        LEASES, {"metadata": {"name": "a"}, "spec": {"holderIdentity": "x", "leaseDurationSeconds": 15}}
    )
    del made["metadata"]["resourceVersion"]
    with pytest.raises(errors.Invalid):
        await rig.cluster.replace(LEASES, made)
    free = await rig.cluster.patch(LEASES, "a", {"spec": {"holderIdentity": None}}, namespace=rig.space)
    assert "holderIdentity" not in free["spec"]
    with pytest.raises(errors.ObjectNotFound):
        await rig.cluster.patch(LEASES, "b", {"spec": {"holderIdentity": "x"}}, namespace=rig.space)


async def test_merge_patches_delete_by_null_and_replace_lists(rig):
    await rig.add(PODS, build_pod("a", gates=("x.io/1", "x.io/2")))
    patched = await rig.cluster.patch(
        PODS,
        "a",
        {"metadata": {"annotations": {"k": "v"}}, "spec": {"schedulingGates": [{"name": "x.io/2"}]}},
        namespace=rig.space,
    )
    assert patched["spec"]["schedulingGates"] == [{"name": "x.io/2"}]
    bare = await rig.cluster.patch(PODS, "a", {"metadata": {"annotations": {"k": None}}}, namespace=rig.space)
    assert "annotations" not in bare["metadata"]


async def test_json_patches_happen_whole_or_not_at_all(rig):
    await rig.add(CONFIG_MAPS, build_config_map("a", x="1"))
    test = {"op": "test", "path": "/data/x", "value": "2"}
    change = {"op": "replace", "path": "/data/x", "value": "3"}
    with pytest.raises(errors.Invalid):
        await rig.cluster.patch(CONFIG_MAPS, "a", [change, test], PatchKind.JSON, namespace=rig.space)
    test["value"] = "1"
    add = {"op": "add", "path": "/data/y", "value": "4"}
    found = await rig.cluster.patch(CONFIG_MAPS, "a", [test, change, add], PatchKind.JSON, namespace=rig.space)
    assert found["data"] == {"x": "3", "y": "4"}


async def test_strategic_patches_merge_lists_by_their_key(rig):
    await rig.add(NODES, build_node(f"{rig.space}-n"))
    condition = {"type": "EelgridReady", "status": "True", "reason": "x"}
    body = {"status": {"conditions": [condition]}}
    found = await rig.cluster.patch(NODES, f"{rig.space}-n", body, PatchKind.STRATEGIC, subresource="status")
    assert {one["type"] for one in found["status"]["conditions"]} == {"Ready", "EelgridReady"}
    await rig.add(PODS, build_pod("a", gates=("x.io/1", "x.io/2")))
    gone = {"spec": {"schedulingGates": [{"$patch": "delete", "name": "x.io/1"}]}}
    found = await rig.cluster.patch(PODS, "a", gone, PatchKind.STRATEGIC, namespace=rig.space)
    assert found["spec"]["schedulingGates"] == [{"name": "x.io/2"}]


async def test_applies_own_their_fields(rig):
    async def apply(manager, is_forced=False, **data):
        return await rig.cluster.patch(
            CONFIG_MAPS,
            "a",
            {"data": data},
            PatchKind.APPLY,
            namespace=rig.space,
            manager=manager,
            is_forced=is_forced,
        )

    made = await apply("one", x="1", y="1")
    assert made["data"] == {"x": "1", "y": "1"}
    assert (await apply("one", x="2"))["data"] == {"x": "2"}, "what one owned and does not say any more goes"
    with pytest.raises(errors.Conflict):
        await apply("two", x="3")
    assert (await apply("two", z="1"))["data"] == {"x": "2", "z": "1"}
    assert (await apply("two", is_forced=True, x="3", z="1"))["data"] == {"x": "3", "z": "1"}
    assert (await apply("one", w="1"))["data"] == {"w": "1", "x": "3", "z": "1"}, "x is not one's any more"


async def test_a_deletion_means_one_object_and_no_other(rig):
    made = await rig.add(CONFIG_MAPS, build_config_map("a"))
    with pytest.raises(errors.Conflict):
        await rig.cluster.delete(CONFIG_MAPS, "a", namespace=rig.space, uid="00000000-0000-4000-8000-000000000000")
    with pytest.raises(errors.Conflict):
        await rig.cluster.delete(CONFIG_MAPS, "a", namespace=rig.space, resource_version="1")
    await rig.cluster.delete(CONFIG_MAPS, "a", namespace=rig.space, uid=made["metadata"]["uid"])
    with pytest.raises(errors.ObjectNotFound):
        await rig.cluster.delete(CONFIG_MAPS, "a", namespace=rig.space)


async def test_finalizers_hold_an_object_that_is_deleted(rig):
    await rig.add(CONFIG_MAPS, {"metadata": {"name": "a", "finalizers": ["eelgrid.io/x"]}})
    await rig.cluster.delete(CONFIG_MAPS, "a", namespace=rig.space)
    assert (await rig.cluster.get(CONFIG_MAPS, "a", namespace=rig.space))["metadata"]["deletionTimestamp"]
    await rig.cluster.patch(CONFIG_MAPS, "a", {"metadata": {"finalizers": None}}, namespace=rig.space)
    with pytest.raises(errors.ObjectNotFound):
        await rig.cluster.get(CONFIG_MAPS, "a", namespace=rig.space)


async def test_status_is_written_apart(rig):
    await rig.add(PODS, build_pod("a"))
    both = {"metadata": {"labels": {"x": "1"}}, "status": {"phase": "Running"}}
    found = await rig.cluster.patch(PODS, "a", both, namespace=rig.space)
    assert (found["metadata"]["labels"], found["status"]["phase"]) == ({"x": "1"}, "Pending")
    both = {"spec": {"schedulingGates": []}, "status": {"phase": "Running"}}
    found = await rig.cluster.patch(PODS, "a", both, namespace=rig.space, subresource="status")
    assert (len(found["spec"]["schedulingGates"]), found["status"]["phase"]) == (1, "Running")
    assert found["metadata"]["generation"] == 1


async def test_the_generation_counts_changes_of_the_spec(rig):
    await rig.add(PODS, build_pod("a"))
    found = await rig.cluster.patch(PODS, "a", {"metadata": {"labels": {"x": "1"}}}, namespace=rig.space)
    assert found["metadata"]["generation"] == 1
    found = await rig.cluster.patch(PODS, "a", {"spec": {"schedulingGates": []}}, namespace=rig.space)
    assert found["metadata"]["generation"] == 2


async def test_a_permission_that_lacks_is_named(rig):
    reads = {"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods"]}
    someone = await rig.limited([reads])
    await rig.add(PODS, build_pod("a", gates=()))
    assert (await someone.get(PODS, "a", namespace=rig.space))["metadata"]["name"] == "a"
    with pytest.raises(errors.Forbidden) as denied:
        await bind(someone, "a", namespace=rig.space, node="n")
    assert denied.value.permission == f"create pods/binding in namespace {rig.space}"
    with pytest.raises(errors.Forbidden) as denied:
        await someone.patch(RESOURCE_CLAIMS, "a", {}, namespace=rig.space, subresource="status")
    assert denied.value.permission == f"patch resourceclaims/status.resource.k8s.io in namespace {rig.space}"
    with pytest.raises(errors.Forbidden) as denied:
        await someone.list(NODES)
    assert denied.value.permission == "list nodes"


async def test_unknown_credentials_are_refused(rig):
    async with HttpClusterClient(replace(rig.access, token="nobody", certificate_pem=None)) as nobody:
        with pytest.raises(errors.Unauthenticated):
            await nobody.list(PODS)


async def test_a_list_is_read_page_by_page_as_it_was_at_its_first_page(rig):
    for name in "abcde":
        await rig.add(CONFIG_MAPS, build_config_map(name, {"page": "yes"}))
    first = await rig.cluster.list(CONFIG_MAPS, namespace=rig.space, labels="page=yes", limit=2)
    await rig.add(CONFIG_MAPS, build_config_map("f", {"page": "yes"}))
    await rig.cluster.delete(CONFIG_MAPS, "e", namespace=rig.space)
    second = await rig.cluster.list(CONFIG_MAPS, namespace=rig.space, labels="page=yes", limit=2, after=first.after)
    third = await rig.cluster.list(CONFIG_MAPS, namespace=rig.space, labels="page=yes", limit=2, after=second.after)
    names = [one["metadata"]["name"] for page in (first, second, third) for one in page.items]
    assert names == list("abcde")
    assert (third.after, third.resource_version) == ("", first.resource_version)
    whole = await rig.cluster.list(CONFIG_MAPS, namespace=rig.space, labels="page=yes")
    assert [one["metadata"]["name"] for one in whole.items] == list("abcdf")
    assert "kind" not in whole.items[0]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ("tier=gpu", "a"),
        ("tier!=gpu", "bc"),
        ("tier in (gpu, cpu),x", "a"),
        ("tier notin (gpu)", "bc"),
        ("!tier", "c"),
        ("tier", "ab"),
    ],
)
async def test_label_selectors(rig, labels, names):
    for name, its in (("a", {"tier": "gpu", "x": "1"}), ("b", {"tier": "cpu"}), ("c", {})):
        await rig.add(PODS, build_pod(name, labels={"of": "labels", **its}))
    found = await rig.cluster.list(PODS, namespace=rig.space, labels=f"of=labels,{labels}")
    assert "".join(one["metadata"]["name"] for one in found.items) == names


async def test_field_selectors(rig):
    for name in "ab":
        await rig.add(PODS, build_pod(name, gates=(), schedulerName="nobody"))
    await bind(rig.cluster, "a", namespace=rig.space, node="n1")
    for fields, names in (
        ("metadata.name=b", "b"),
        ("spec.nodeName=n1", "a"),
        ("spec.nodeName=", "b"),
        ("spec.nodeName!=n1", "b"),
        ("status.phase=Pending,spec.schedulerName=nobody", "ab"),
        ("status.phase=Running", ""),
    ):
        found = await rig.cluster.list(PODS, namespace=rig.space, fields=fields)
        assert "".join(one["metadata"]["name"] for one in found.items) == names, fields
    with pytest.raises(errors.Invalid):
        await rig.cluster.list(PODS, namespace=rig.space, fields="spec.priority=0")


async def test_what_loses_its_owner_goes_unless_it_is_orphaned(rig):
    if not rig.has_controllers:
        pytest.skip("needs Kubernetes' own controllers")
    for name in "ab":
        owner = await rig.add(CONFIG_MAPS, build_config_map(f"owner-{name}"))
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": f"owner-{name}", "uid": owner["metadata"]["uid"]}
        await rig.add(CONFIG_MAPS, {"metadata": {"name": name, "ownerReferences": [reference]}})
    await rig.cluster.delete(CONFIG_MAPS, "owner-a", namespace=rig.space)
    await rig.cluster.delete(CONFIG_MAPS, "owner-b", namespace=rig.space, propagation=PropagationPolicy.ORPHAN)

    async def names():
        found = await rig.cluster.list(CONFIG_MAPS, namespace=rig.space)
        left = {one["metadata"]["name"]: one["metadata"] for one in found.items}
        return "a" not in left and "owner-b" not in left and left

    left = await wait_for(names, within_s=30.0)
    assert "ownerReferences" not in left["b"]


async def test_discovery_reports_version_kinds_and_their_parts(rig):
    served = await rig.cluster.discover()
    assert (served.major, served.minor >= 30) == (1, True)
    assert served.has(PODS)
    assert served.has(PODS, "eviction")
    assert served.has(PODS, "binding")
    assert served.has(RESOURCE_CLAIMS, "status")
    assert not served.has(THINGS)
    assert served.find_served(MUTATING_ADMISSION_POLICIES, ("v1", "v1beta1", "v1alpha1")) is not None
    assert served.find_served(THINGS, ("v1", "v2")) is None


async def test_kinds_of_our_own(rig):
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    names = {"plural": "things", "singular": "thing", "kind": "Thing"}
    spec = {"group": THINGS.group, "names": names, "scope": "Namespaced", "versions": [version]}
    await rig.add(CUSTOM_RESOURCE_DEFINITIONS, {"metadata": {"name": f"things.{THINGS.group}"}, "spec": spec})

    async def is_served():
        return (await rig.cluster.discover()).has(THINGS)

    await wait_for(is_served, within_s=30.0)
    made = await wait_for(
        lambda: rig.add(THINGS, {"metadata": {"name": "a"}, "spec": {"x": [1]}, "status": {"y": 1}}), within_s=30.0
    )
    assert "status" not in made
    assert made["metadata"]["generation"] == 1
    found = await rig.cluster.patch(THINGS, "a", {"spec": {"x": [2]}}, namespace=rig.space)
    assert found["metadata"]["generation"] == 2
    found = await rig.cluster.patch(THINGS, "a", {"status": {"y": 2}}, namespace=rig.space, subresource="status")
    assert (found["metadata"]["generation"], found["spec"], found["status"]) == (2, {"x": [2]}, {"y": 2})
    with pytest.raises(errors.Invalid):
        await rig.cluster.patch(THINGS, "a", {"spec": {"x": [3]}}, PatchKind.STRATEGIC, namespace=rig.space)
    del found["metadata"]["resourceVersion"]
    with pytest.raises(errors.Invalid):
        await rig.cluster.replace(THINGS, found)


async def test_a_workload_keeps_its_selector(rig):
    made = await rig.add(DEPLOYMENTS, build_deployment("a", replicas=0))
    made["spec"]["selector"] = {"matchLabels": {"app": "b"}}
    del made["metadata"]["resourceVersion"]  # its controller writes meanwhile
    with pytest.raises(errors.Invalid):
        await rig.cluster.replace(DEPLOYMENTS, made)
    found = await rig.cluster.patch(
        DEPLOYMENTS, "a", {"spec": {"replicas": 2}}, namespace=rig.space, subresource="scale"
    )
    assert (found["kind"], found["spec"]["replicas"]) == ("Scale", 2)
    assert (await rig.cluster.get(DEPLOYMENTS, "a", namespace=rig.space))["spec"]["replicas"] == 2
