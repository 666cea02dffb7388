"""Mode dra whole: a real controller over HTTP at an API server in memory, which makes claims and binds."""

import asyncio
import json

from tests.builders.kubernetes import (
    build_claim_template,
    build_claiming_pod,
    build_device_class,
    build_node,
    build_slices,
    find_overdrawn,
)
from tests.builders.kubernetes import build_pod as plain
from tests.builders.server import run_controller
from tests.e2e.kubernetes_gate_test import bound, config, until
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.resources import RESOURCE_CLAIM_TEMPLATES
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.fakes.kubernetes.workloads import Claims

from eelgrid_controller.engines.kubernetes.api.port import DEVICE_CLASSES, NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node

ABILITIES = frozenset({"claims"})


async def fleet(fake, cluster, names, *, gpus=2):
    """Nodes with slices; what they publish."""
    every = []
    for name in names:
        await cluster.create(NODES, build_node(name, gpus=0))
        every += [await cluster.create(RESOURCE_SLICES, piece) for piece in build_slices(name, gpus)]
    await cluster.create(DEVICE_CLASSES, build_device_class())
    for name, profile in (("one", "1g.10gb"), ("three", "3g.40gb"), ("whole", "")):
        await cluster.create(RESOURCE_CLAIM_TEMPLATES, build_claim_template(name, profile), namespace="default")
    await fake.add(Claims(fake))
    await fake.add(Scheduler(fake))
    return every


async def claims_of(cluster):
    return (await cluster.list(RESOURCE_CLAIMS)).items


def test_pods_get_their_slices_and_each_is_bound_where_its_claim_is(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            every = await fleet(fake, cluster, ("a", "b", "c"))
            settings = config(fake, tmp_path, abilities=ABILITIES)
            async with run_controller(tmp_path / "data", kubernetes=settings):
                for index in range(40):
                    await cluster.create(PODS, build_claiming_pod(f"p{index:02d}", "one"))
                pods = await until(cluster, lambda pods: len(bound(pods)) == 40)
                claims = await claims_of(cluster)
                assert find_overdrawn(every, claims) == []
                for one in pods:
                    (name,) = [made["resourceClaimName"] for made in one["status"]["resourceClaimStatuses"]]
                    (claim,) = [found for found in claims if found["metadata"]["name"] == name]
                    (result,) = claim["status"]["allocation"]["devices"]["results"]
                    plan = json.loads(one["metadata"]["annotations"][ANNOTATION_PLAN])
                    assert one["spec"]["nodeName"] == result["pool"] == plan["node"]
                    assert plan["profile"] == result["device"]
                    assert not pinned_node(one)
                    assert claim["status"]["reservedFor"][0]["uid"] == one["metadata"]["uid"]
                # A whole GPU waits until one is free, and takes it then.
                held = {(one["spec"]["nodeName"]) for one in pods}
                assert len(held) == 3
                await cluster.create(PODS, build_claiming_pod("big", "whole"))
                await asyncio.sleep(0.5)
                assert len(bound((await cluster.list(PODS)).items)) == 40
                gone = [one for one in pods if one["spec"]["nodeName"] == "a"][:14]
                for one in gone:
                    await cluster.delete(PODS, one["metadata"]["name"], namespace="default", grace_s=0)
                pods = await until(cluster, lambda pods: len(bound(pods)) == 41 - len(gone))
                assert find_overdrawn(every, await claims_of(cluster)) == []

    asyncio.run(play())


def test_whole_gpus_of_nodes_that_publish_slices_are_not_given_by_mode_gate(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            await fleet(fake, cluster, ("a",))
            await cluster.create(NODES, build_node("b", gpus=8))
            settings = config(fake, tmp_path, abilities=ABILITIES)
            async with run_controller(tmp_path / "data", kubernetes=settings) as rig:
                for index in range(4):
                    await cluster.create(PODS, plain(f"g{index}", gpus=2))
                    await cluster.create(PODS, build_claiming_pod(f"p{index}", "three"))
                pods = await until(cluster, lambda pods: len(bound(pods)) == 8)
                where = {one["metadata"]["name"]: one["spec"]["nodeName"] for one in pods}
                assert {where[f"g{index}"] for index in range(4)} == {"b"}
                assert {where[f"p{index}"] for index in range(4)} == {"a"}
                assert rig.controller.loop.core.state.nodes["b"] is not None

    asyncio.run(play())


def test_lost_answers_dropped_watches_and_restarts_give_nothing_twice(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            every = await fleet(fake, cluster, ("a", "b", "c", "d"))
            settings = config(fake, tmp_path, abilities=ABILITIES)
            async with run_controller(tmp_path / "data", kubernetes=settings):
                fake.knobs.add("lose", times=6, verbs=("update",), part="/resourceclaims/")
                fake.knobs.add("lose", times=4, verbs=("patch",), part="/pods/")
                fake.knobs.add("hang", times=2, verbs=("update",), part="/resourceclaims/")
                for index in range(25):
                    await cluster.create(PODS, build_claiming_pod(f"p{index:02d}", "one"))
                fake.drop_watches()
                for index in range(25, 50):
                    await cluster.create(PODS, build_claiming_pod(f"p{index:02d}", "one"))
                await fake.restart()
                await until(cluster, lambda pods: len(bound(pods)) == 50, within_s=60.0)
                assert find_overdrawn(every, await claims_of(cluster)) == []

    asyncio.run(play())
