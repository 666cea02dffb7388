"""Pods with rules about other pods and volumes, at an API server in memory whose kube-scheduler enforces these rules."""

import asyncio
import json
from collections import Counter

from tests.builders.kubernetes import build_deployment, build_node, build_pod
from tests.builders.server import run_controller
from tests.e2e.kubernetes_gate_test import bound, config, until
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.kubelets import Kubelets
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.fakes.kubernetes.workloads import Workloads

from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    NAMESPACES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
)
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    ANNOTATION_PLAN,
    GATE,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node

# With a product the planner knows its watts: all go to the frugal boards, as long as any of these is free.
PRODUCT = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
FRUGAL = {"nvidia.com/gpu.product": "NVIDIA-A10", "nvidia.com/gpu.memory": "23028"}
HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def apart(app, key=HOST, **more):
    return {
        "podAntiAffinity": {REQUIRED: [{"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}, **more}]}
    }


def spread(app, key=ZONE, **more):
    selector = {"matchLabels": {"app": app}}
    return [{"topologyKey": key, "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": selector, **more}]


async def nodes(cluster, count, *, zones=4, frugal=()):
    for index in range(count):
        product = FRUGAL if f"g{index:03d}" in frugal else PRODUCT
        await cluster.create(NODES, build_node(f"g{index:03d}", labels={ZONE: f"z{index % zones}", **product}))


def zones_of(pods, zones=4):
    return Counter(int(one["spec"]["nodeName"][1:]) % zones for one in bound(pods))


def with_spec(found, **spec):
    found["spec"]["template"]["spec"] |= spec
    return found


def play(tmp_path, story, *, parts=(Scheduler, Workloads), **options):
    async def run():
        async with FakeCluster() as fake:
            for part in parts:
                await fake.add(part(fake))
            async with run_controller(tmp_path / "data", kubernetes=config(fake, tmp_path, **options)) as rig:
                await story(fake.client(), fake, rig)

    asyncio.run(run())


def test_a_deployment_with_anti_affinity_on_the_hostname_has_all_its_pods_bound_at_once(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 20, frugal=("g000",))
        wanted = with_spec(build_deployment("web", replicas=4, gates=(GATE,)), affinity=apart("web"))
        await cluster.create(DEPLOYMENTS, wanted)
        pods = await until(cluster, lambda pods: len(bound(pods)) == 4)
        assert len({one["spec"]["nodeName"] for one in pods}) == 4
        assert all(pinned_node(one) == one["spec"]["nodeName"] for one in pods)
        assert all(one["metadata"].get("deletionTimestamp") is None for one in pods)

    play(tmp_path, story)


def test_a_deployment_with_a_zone_spread_is_even_over_the_zones(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 20, frugal=("g000", "g004"))  # both in one zone
        wanted = with_spec(build_deployment("web", replicas=8, gates=(GATE,)), topologySpreadConstraints=spread("web"))
        await cluster.create(DEPLOYMENTS, wanted)
        pods = await until(cluster, lambda pods: len(bound(pods)) == 8)
        assert sorted(zones_of(pods).values()) == [2, 2, 2, 2]

    play(tmp_path, story)


def test_a_zone_spread_that_ignores_node_affinity_is_even_and_all_are_bound(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 20, frugal=("g000", "g004"))
        rules = spread("web", nodeAffinityPolicy="Ignore")
        await cluster.create(
            DEPLOYMENTS, with_spec(build_deployment("web", replicas=8, gates=(GATE,)), topologySpreadConstraints=rules)
        )
        pods = await until(cluster, lambda pods: len(bound(pods)) == 8)
        assert sorted(zones_of(pods).values()) == [2, 2, 2, 2]

    play(tmp_path, story)


def test_pods_that_nobody_manages_count_for_the_spread(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 8)
        for index in range(2):
            await cluster.create(PODS, build_pod(f"plain{index}", gates=(), labels={"app": "web"}, nodeName="g000"))
        for index in range(6):
            await cluster.create(
                PODS, build_pod(f"p{index}", labels={"app": "web"}, topologySpreadConstraints=spread("web"))
            )
        pods = await until(cluster, lambda pods: len(bound(pods)) == 8)
        assert sorted(zones_of(pods).values()) == [2, 2, 2, 2]

    play(tmp_path, story)


def test_a_pin_that_min_domains_makes_impossible_is_left_to_kube_scheduler(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 2, zones=1)
        # One node in one zone holds one already: with a pin to it, kube-scheduler counts one domain of two wanted.
        rules = spread("web", HOST, minDomains=2)
        for index in range(4):
            await cluster.create(PODS, build_pod(f"p{index}", labels={"app": "web"}, topologySpreadConstraints=rules))
        pods = await until(cluster, lambda pods: len(bound(pods)) == 4)
        assert sorted(Counter(one["spec"]["nodeName"] for one in pods).values()) == [2, 2]
        assert sum(not pinned_node(one) for one in pods) == 2

    play(tmp_path, story)


def test_a_pod_goes_where_its_volume_is(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 20)
        terms = [{"matchExpressions": [{"key": HOST, "operator": "In", "values": ["g013"]}]}]
        affinity = {"required": {"nodeSelectorTerms": terms}}
        await cluster.create(PERSISTENT_VOLUMES, {"metadata": {"name": "disk"}, "spec": {"nodeAffinity": affinity}})
        done = {"pv.kubernetes.io/bind-completed": "yes"}
        claim = {"metadata": {"name": "data", "annotations": done}, "spec": {"volumeName": "disk"}}
        volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
        # It waits for its claim first, and then goes.
        await cluster.create(PODS, build_pod("p", volumes=volumes))
        await until(
            cluster, lambda pods: said(pods[0])[1] == "WaitsForVolume" and "data is not there" in said(pods[0])[2]
        )
        await cluster.create(PERSISTENT_VOLUME_CLAIMS, claim, namespace="default")
        (found,) = await until(cluster, lambda pods: bool(bound(pods)))
        assert found["spec"]["nodeName"] == pinned_node(found) == "g013"

    play(tmp_path, story)


def test_pods_with_volumes_that_may_not_be_read_are_left_to_kube_scheduler(tmp_path):
    async def story(cluster, fake, _rig):
        await nodes(cluster, 2)
        fake.access.grant(
            "controller",
            [one for one in fake.access.users["controller"][1] if "persistentvolumes" not in one["resources"]],
        )
        done = {"pv.kubernetes.io/bind-completed": "yes"}
        await cluster.create(PERSISTENT_VOLUMES, {"metadata": {"name": "disk"}, "spec": {}})
        await cluster.create(
            PERSISTENT_VOLUME_CLAIMS,
            {"metadata": {"name": "data", "annotations": done}, "spec": {"volumeName": "disk"}},
            namespace="default",
        )
        await cluster.create(
            PODS, build_pod("p", volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}])
        )
        (found,) = await until(cluster, lambda pods: bool(bound(pods)) and said(pods[0])[1] == "LeftToKubeScheduler")
        assert not pinned_node(found)
        assert ANNOTATION_PLAN not in found["metadata"].get("annotations", {})

    play(tmp_path, story)


def test_a_pod_that_another_repels_goes_elsewhere(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 3)
        for name in ("g000", "g001"):
            await cluster.create(PODS, build_pod(f"lonely-{name}", gates=(), nodeName=name, affinity=apart("web")))
        for index in range(4):
            await cluster.create(PODS, build_pod(f"p{index}", labels={"app": "web"}))
        pods = await until(cluster, lambda pods: len(bound(pods)) == 6)
        repelled = [one for one in pods if one["metadata"]["name"].startswith("p")]
        assert {one["spec"]["nodeName"] for one in repelled} == {"g002"}

    play(tmp_path, story)


def test_a_group_with_affinity_to_itself_is_in_one_zone_that_holds_all_of_it(tmp_path):
    async def story(cluster, _fake, _rig):
        # Only zone z1 has room for both members of eight GPUs.
        for name, zone in (("a", "z0"), ("b", "z1"), ("c", "z1")):
            await cluster.create(NODES, build_node(name, labels={ZONE: zone, **PRODUCT}))
        near = {"podAffinity": {REQUIRED: [{"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "gang"}}}]}}
        for index in range(2):
            found = build_pod(f"m-{index}", gpus=8, labels={"app": "gang"}, affinity=near)
            found["metadata"]["annotations"] = {ANNOTATION_GROUP: "g", ANNOTATION_GROUP_SIZE: "2"}
            await cluster.create(PODS, found)
        pods = await until(cluster, lambda pods: len(bound(pods)) == 2)
        assert sorted(one["spec"]["nodeName"] for one in pods) == ["b", "c"]

    play(tmp_path, story)


def test_a_gang_with_anti_affinity_has_a_node_for_each_member(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 4)
        for index in range(4):
            found = build_pod(f"m-{index}", labels={"app": "gang"}, affinity=apart("gang"))
            found["metadata"]["annotations"] = {ANNOTATION_GROUP: "g", ANNOTATION_GROUP_SIZE: "4"}
            await cluster.create(PODS, found)
        pods = await until(cluster, lambda pods: len(bound(pods)) == 4)
        assert len({one["spec"]["nodeName"] for one in pods}) == 4

    play(tmp_path, story)


def test_namespace_selectors_are_judged_by_the_labels_of_namespaces(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 2)
        for name, team in (("red", "red"), ("blue", "blue")):
            await cluster.create(NAMESPACES, {"metadata": {"name": name, "labels": {"team": team}}})
        # On g000 stands one that is meant, on g001 one that is not.
        for name, at in (("red", "g000"), ("blue", "g001")):
            await cluster.create(PODS, build_pod("db", namespace=name, gates=(), labels={"app": "db"}, nodeName=at))
        rules = apart("db", namespaceSelector={"matchLabels": {"team": "red"}})
        for index in range(3):
            await cluster.create(PODS, build_pod(f"p{index}", affinity=rules))
        pods = await until(cluster, lambda pods: len(bound(pods)) == 5)
        placed = [one for one in pods if one["metadata"]["name"] != "db"]
        assert {one["spec"]["nodeName"] for one in placed} == {"g001"}

    play(tmp_path, story)


def test_what_waits_for_another_pod_to_go_is_placed_when_it_has(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 1)
        for name in ("p0", "p1"):
            await cluster.create(PODS, build_pod(name, labels={"app": "web"}, affinity=apart("web")))
        await until(
            cluster, lambda pods: len(bound(pods)) == 1 and any(said(one)[1] == "NoEligibleNode" for one in pods)
        )
        pods = (await cluster.list(PODS)).items
        (first,), (second,) = bound(pods), [one for one in pods if not one["spec"].get("nodeName")]
        assert "pod anti-affinity" in said(second)[2]
        await cluster.delete(PODS, first["metadata"]["name"], namespace="default", grace_s=0)
        (found,) = await until(cluster, lambda pods: len(pods) == len(bound(pods)) == 1)
        assert found["metadata"]["uid"] == second["metadata"]["uid"]

    play(tmp_path, story)


def test_three_hundred_sets_of_demands_of_one_user_make_nobody_wait(tmp_path):
    async def story(cluster, _fake, _rig):
        for index in range(8):
            await cluster.create(NODES, build_node(f"g{index:03d}", gpus=32, labels={ZONE: f"z{index % 4}", **PRODUCT}))
        for index in range(300):
            tolerations = [{"key": f"k{index}", "operator": "Exists"}]
            # Half of them can never be placed, and wait.
            selector = {"nobody": "has-it"} if index % 2 else {}
            await cluster.create(PODS, build_pod(f"a{index:03d}", tolerations=tolerations, nodeSelector=selector))
        await cluster.create(NAMESPACES, {"metadata": {"name": "innocent"}})
        selector = {ZONE: "z1"}
        for index in range(4):
            await cluster.create(PODS, build_pod(f"p{index}", namespace="innocent", nodeSelector=selector))
        pods = await until(cluster, lambda pods: len(bound(pods)) == 154, within_s=60.0)
        innocent = [one for one in pods if one["metadata"]["namespace"] == "innocent"]
        assert all(int(one["spec"]["nodeName"][1:]) % 4 == 1 for one in innocent)

    play(tmp_path, story)


def test_a_pin_that_kube_scheduler_refuses_twice_is_not_made_again(tmp_path):
    """By a rule that nobody foresaw: the fake's scheduler takes no pod of this label on one node."""

    class Stubborn(Scheduler):
        def _related(self, pod, names, terms):
            refused = super()._related(pod, names, terms)
            if pod["metadata"]["labels"].get("app") == "odd" and "a" in names:
                refused["a"] = "node(s) had something odd"
            return refused

    async def story(cluster, _fake, _rig):
        await cluster.create(NODES, build_node("a", labels=FRUGAL))
        await cluster.create(DEPLOYMENTS, build_deployment("odd", replicas=1, gates=(GATE,)))
        pins = Counter()

        def seen(pods):
            for one in pods:
                if pinned_node(one):
                    pins[one["metadata"]["uid"]] = pinned_node(one)
            return any(one["spec"].get("nodeName") for one in pods)

        await until(cluster, lambda pods: seen(pods) or len(pins) >= 1)
        await cluster.create(NODES, build_node("b", labels=PRODUCT))
        pods = await until(cluster, seen, within_s=60.0)
        (odd,) = bound(pods)
        assert odd["spec"]["nodeName"] == "b"
        assert sum(name == "a" for name in pins.values()) <= 2

    play(tmp_path, story, parts=(Stubborn, Workloads, Kubelets), unbound_s=1.0)


def test_a_running_pod_applied_again_holds_nothing_by_the_plan_of_the_other(tmp_path):
    async def story(cluster, _fake, rig):
        await nodes(cluster, 1)
        await cluster.create(PODS, build_pod("p", gpus=4))
        (first,) = await until(cluster, lambda pods: bool(bound(pods)))
        plan = first["metadata"]["annotations"][ANNOTATION_PLAN]
        assert json.loads(plan)["uid"] == first["metadata"]["uid"]
        again = {
            "metadata": {"name": "again", "namespace": "default", "annotations": {ANNOTATION_PLAN: plan}},
            "spec": {key: value for key, value in first["spec"].items() if key != "schedulingGates"},
        }
        await cluster.create(PODS, again)
        # Eight GPUs: four are the first's, four are another's now, whatever its annotation says.
        await cluster.create(PODS, build_pod("third"))
        await until(cluster, lambda pods: any(said(one)[1] == "NoRoom" for one in pods))
        state = rig.controller.loop.core.state
        assert state.nodes["g000"].others.gpu_count == 4
        await cluster.delete(PODS, "p", namespace="default", grace_s=0)
        await until(
            cluster,
            lambda pods: any(one["metadata"]["name"] == "third" and one["spec"].get("nodeName") for one in pods),
        )

    play(tmp_path, story)


def said(found):
    """Our condition: status, reason and message."""
    told = {one["type"]: one for one in found["status"].get("conditions") or ()}.get("eelgrid.io/Placement", {})
    return told.get("status", ""), told.get("reason", ""), told.get("message", "")


def test_a_pod_says_in_its_status_why_it_waits_and_that_it_is_placed(tmp_path):
    async def story(cluster, _fake, _rig):
        await nodes(cluster, 1)
        await cluster.create(PODS, build_pod("full", gates=(), gpus=8, nodeName="g000"))
        await cluster.create(PODS, build_pod("p"))
        bad = build_pod("bad")
        bad["metadata"]["annotations"] = {"eelgrid.io/priority": "very"}
        await cluster.create(PODS, bad)

        def of(pods, name):
            return next(said(one) for one in pods if one["metadata"]["name"] == name)

        pods = await until(
            cluster, lambda pods: of(pods, "p")[1] == "NoRoom" and of(pods, "bad")[1] == "InvalidAnnotation"
        )
        assert of(pods, "p")[0] == of(pods, "bad")[0] == "False"
        assert "eelgrid.io/priority" in of(pods, "bad")[2]
        assert "GPU" in of(pods, "p")[2]
        await cluster.delete(PODS, "full", namespace="default", grace_s=0)
        pods = await until(cluster, lambda pods: of(pods, "p")[:2] == ("True", "Placed"))
        assert "g000" in of(pods, "p")[2]

    play(tmp_path, story)
