"""Mode gate whole: a real controller with a real journal, over HTTP, at an API server in memory that binds.

The controller has the rights that deploy/ gives it and no others.
"""

import asyncio
import json
import re
from pathlib import Path

import yaml
from tests.builders.kubernetes import build_node, build_pod, build_template
from tests.builders.server import run_controller
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.fakes.kubernetes.workloads import Workloads

from eelgrid_controller.engines.kubernetes.api.port import EVENTS, NODES, PODS, REPLICA_SETS
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    ANNOTATION_PLAN,
    GATE,
    SCHEDULER,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node
from eelgrid_controller.runtime.config import KubernetesConfig

BASE = Path(__file__).resolve().parents[2] / "deploy" / "kustomize" / "base"
_KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}"}}}}]
users: [{{name: u, user: {{token: controller}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""


def rules(abilities=frozenset(), mode="gate"):
    """Of the controller's account with these abilities: as the chart's template has them, and as the base has its Role."""
    of_mode = '{{- if eq .Values.controller.kubernetes.mode "scheduler" }}'
    lines, conditions = [], []
    text = (BASE.parents[1] / "helm/eelgrid/templates/rbac.yaml").read_text()
    for line in text.partition("rules:\n")[2].partition("\n---")[0].splitlines():
        if line.startswith("{{- if "):
            named = set(re.findall(r'has "(\w+)" \$abilities', line))
            assert named or line in (of_mode, "{{- if .Values.controller.kubernetes.enabled }}"), line
            is_wanted = mode == "scheduler" if line == of_mode else not named or bool(named & abilities)
            conditions.append(is_wanted)
        elif line == "{{- else }}":
            conditions[-1] = not conditions[-1]
        elif line == "{{- end }}":
            conditions.pop()
        elif all(conditions):
            lines.append(line)
    assert not conditions
    (own,) = yaml.safe_load_all((BASE / "role.yaml").read_text())
    return [*yaml.safe_load("\n".join(lines)), *own["rules"]]


def test_the_rules_of_the_template_are_those_of_the_base():
    roles = yaml.safe_load_all((BASE / "clusterrole.yaml").read_text())
    (base,) = (role["rules"] for role in roles if role["metadata"]["name"] == "eelgrid-controller")
    assert rules(frozenset({"policies", "services"}))[: len(base)] == base


def config(fake, folder, **options):
    fake.access.grant("controller", rules(options.get("abilities", frozenset()), options.get("mode", "gate")))
    path = folder / "kubeconfig"
    path.write_text(_KUBECONFIG.format(server=fake.url))
    return KubernetesConfig(kubeconfig=str(path), lease_s=3.0, **options)


async def until(cluster, check, *, within_s=30.0):
    """The pods, when they are as wanted."""
    async with asyncio.timeout(within_s):
        while True:
            pods = (await cluster.list(PODS)).items
            if check(pods):
                return pods
            await asyncio.sleep(0.1)


def bound(pods):
    return [one for one in pods if one["spec"].get("nodeName")]


def test_two_hundred_pods_come_where_they_were_planned(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            for index in range(50):
                await cluster.create(NODES, build_node(f"n{index:02d}"))
            await fake.add(Scheduler(fake))
            async with run_controller(tmp_path / "data", kubernetes=config(fake, tmp_path)) as rig:
                for index in range(200):
                    await cluster.create(PODS, build_pod(f"p{index:03d}"))
                pods = await until(cluster, lambda pods: len(bound(pods)) == 200)
                state = rig.controller.loop.core.state
                held = {}
                for one in pods:
                    plan = json.loads(one["metadata"]["annotations"][ANNOTATION_PLAN])
                    assert one["spec"]["nodeName"] == pinned_node(one) == plan["node"]
                    (placement,) = state.workloads[plan["workload"]].placements
                    assert (placement.node_name, list(placement.gpu_indexes)) == (plan["node"], plan["devices"])
                    held.setdefault(plan["node"], []).extend(plan["devices"])
                assert all(len(set(devices)) == len(devices) <= 8 for devices in held.values())
                for one in pods[:20]:
                    await cluster.delete(PODS, one["metadata"]["name"], namespace="default", grace_s=0)
                async with asyncio.timeout(10.0):
                    while state.live_workloads > 180:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)

    asyncio.run(play())


def test_in_mode_scheduler_pods_are_bound_where_they_were_planned_beside_gated_ones(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            for index in range(5):  # of 8 GPUs: just enough
                await cluster.create(NODES, build_node(f"n{index}"))
            await fake.add(Scheduler(fake))
            async with run_controller(tmp_path / "data", kubernetes=config(fake, tmp_path, mode="scheduler")):
                for index in range(20):
                    await cluster.create(PODS, build_pod(f"own{index:02d}", gates=(), schedulerName=SCHEDULER))
                    await cluster.create(PODS, build_pod(f"gated{index:02d}"))
                pods = await until(cluster, lambda pods: len(bound(pods)) == 40)
                held = {}
                for one in pods:
                    plan = json.loads(one["metadata"]["annotations"][ANNOTATION_PLAN])
                    assert one["spec"]["nodeName"] == plan["node"]
                    assert bool(pinned_node(one)) is one["metadata"]["name"].startswith("gated")
                    held.setdefault(plan["node"], []).extend(plan["devices"])
                assert all(len(set(devices)) == len(devices) <= 8 for devices in held.values())
                claimed = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
                await cluster.create(PODS, build_pod("late", gates=(), schedulerName=SCHEDULER))
                await cluster.create(PODS, build_pod("disk", gates=(), volumes=claimed, schedulerName=SCHEDULER))

                def said(pods):
                    told = {
                        one["metadata"]["name"]: condition
                        for one in pods
                        for condition in one["status"].get("conditions", ())
                        if condition["type"] == "PodScheduled" and condition["status"] == "False"
                    }
                    return told if {"late", "disk"} <= told.keys() else None

                told = said(await until(cluster, said))
                assert told["late"]["reason"] == "Unschedulable"
                assert told["disk"]["reason"] != "Unschedulable"
                assert "spec.volumes[v].persistentVolumeClaim" in told["disk"]["message"]
                async with asyncio.timeout(30.0):
                    while True:
                        events = (await cluster.list(EVENTS, namespace="default")).items
                        told = {(one["regarding"]["name"], one["reason"], one["type"]) for one in events}
                        done = {(f"own{index:02d}", "Scheduled", "Normal") for index in range(20)}
                        if ("disk", "FailedScheduling", "Warning") in told and told >= done:
                            break
                        await asyncio.sleep(0.1)

    asyncio.run(play())


def test_a_gang_goes_together_and_a_stolen_place_is_found_again(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            for name in ("a", "b", "c"):
                await cluster.create(NODES, build_node(name))
            await fake.add(Workloads(fake))
            async with run_controller(tmp_path / "data", kubernetes=config(fake, tmp_path, unbound_s=1.0)):
                notes = {ANNOTATION_GROUP: "g", ANNOTATION_GROUP_SIZE: "2"}
                spec = build_template(gpus=8, gates=(GATE,), labels={"app": "g"})
                spec["metadata"]["annotations"] = notes
                spec["spec"]["terminationGracePeriodSeconds"] = 0
                body = {"replicas": 2, "selector": {"matchLabels": {"app": "g"}}, "template": spec}
                await cluster.create(REPLICA_SETS, {"metadata": {"name": "g", "namespace": "default"}, "spec": body})
                pods = await until(cluster, lambda pods: len([one for one in pods if pinned_node(one)]) == 2)
                first = {one["metadata"]["uid"] for one in pods}
                stolen = pinned_node(pods[0])
                thief = build_pod("thief", gates=(), nodeName=stolen)
                await cluster.create(PODS, thief)
                await fake.add(Scheduler(fake))

                def whole(pods):
                    ours = [one for one in bound(pods) if one["metadata"]["name"] != "thief"]
                    return len(ours) == 2 and not first & {one["metadata"]["uid"] for one in ours}

                pods = await until(cluster, whole)
                ours = [one for one in pods if one["metadata"]["name"] != "thief"]
                assert sorted(one["spec"]["nodeName"] for one in ours) == sorted({"a", "b", "c"} - {stolen})
                told = [one["note"] for one in (await cluster.list(EVENTS)).items]
                assert any("recreated" in note for note in told)

    asyncio.run(play())


def test_what_an_api_server_does_in_its_worst_hour_places_nothing_twice(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            for index in range(10):
                await cluster.create(NODES, build_node(f"n{index}"))
            await fake.add(Scheduler(fake))
            async with run_controller(tmp_path / "data", kubernetes=config(fake, tmp_path)):
                for index in range(30):
                    await cluster.create(PODS, build_pod(f"p{index:02d}"))
                fake.knobs.add("lose", times=5, verbs=("patch",), part="/pods/")
                fake.knobs.add("hang", times=3, verbs=("patch",), part="/pods/")
                fake.drop_watches()
                for index in range(30, 60):
                    await cluster.create(PODS, build_pod(f"p{index:02d}"))
                await fake.restart()
                pods = await until(cluster, lambda pods: len(bound(pods)) == 60, within_s=60.0)
                assert all(one["spec"]["nodeName"] == pinned_node(one) for one in pods)

    asyncio.run(play())
