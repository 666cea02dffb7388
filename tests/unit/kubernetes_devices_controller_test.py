"""Device plugin, closed end to end at a fake API server: one under way at a time, the ledger is what the kubelet gave."""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.builders import kubernetes
from tests.builders.cluster import build_node, build_request
from tests.devices_rig import Station, controlled, part, planned
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.kubelets import Kubelets
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.state_invariants import check_invariants
from tests.waiting import wait_for, wait_until

from eelgrid_controller.engines.kubernetes.api.errors import ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.port import EVENTS, NODES, PODS
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_WRONG_DEVICES
from eelgrid_controller.engines.kubernetes.reconcilers import held_devices
from eelgrid_protos.messages import ComputeInstance, GpuInstance

SMALL = "nvidia.com/mig-1g.10gb"


@pytest.fixture
async def fake():
    async with FakeCluster() as fake:
        await fake.add(Scheduler(fake))
        await fake.add(Kubelets(fake))
        yield fake


async def pods_of(cluster):
    found = await cluster.list(PODS, namespace="default")
    return {one["metadata"]["name"]: one for one in found.items}


async def test_whatever_the_kubelet_gives_the_ledger_follows_and_pods_come_one_at_a_time(fake, tmp_path):
    cluster = fake.client()
    await cluster.create(NODES, kubernetes.build_node("n1"))
    async with (
        controlled(tmp_path, fake.client_access()) as rig,
        Station(rig, fake, build_node("n1", gpus=8, agent_version="1"), obeys=lambda pod: False, seed=3) as station,
    ):
        for number in range(6):
            await cluster.create(PODS, kubernetes.build_pod(f"p{number}", gpus=1 + number % 2))
        await wait_until(lambda: len(station.held) == 5 and station.agrees(), within_s=30.0)
        assert station.unseen_most == 1
        assert part(rig, "devices").corrected > 0
        rng = random.Random(5)
        for step in range(24):
            alive = sorted(station.held)
            if alive and rng.random() < 0.5:
                with suppress(ObjectNotFound):  # it goes already
                    await cluster.delete(PODS, station.held[rng.choice(alive)][0], namespace="default", grace_s=0)
            else:
                await cluster.create(PODS, kubernetes.build_pod(f"q{step}", gpus=rng.choice((1, 2, 3))))
            if step % 6 == 5:
                await wait_until(lambda: len(planned(rig)) == len(station.held) and station.agrees(), within_s=30.0)
        await wait_until(station.agrees, within_s=30.0)
        check_invariants(rig.controller.loop.core.state)
        assert station.unseen_most == 1


async def test_a_plugin_that_obeys_needs_no_correction(fake, tmp_path):
    cluster = fake.client()
    await cluster.create(NODES, kubernetes.build_node("n1"))
    async with (
        controlled(tmp_path, fake.client_access()) as rig,
        Station(rig, fake, build_node("n1", gpus=8, agent_version="1")) as station,
    ):
        for number in range(4):
            await cluster.create(PODS, kubernetes.build_pod(f"p{number}", gpus=2))
        await wait_until(lambda: len(station.held) == 4 and station.agrees(), within_s=30.0)
        assert part(rig, "devices").wrong == 0


@pytest.mark.parametrize("wish", ["", "recreate"])
async def test_what_cannot_be_put_right_is_reported_and_made_again_only_where_its_people_want_that(
    fake, tmp_path, monkeypatch, wish
):
    monkeypatch.setattr(held_devices, "_SETTLE_S", 0.3)
    monkeypatch.setattr(held_devices, "_ALL_AGAIN_S", 0.2)
    cluster = fake.client()
    await cluster.create(NODES, kubernetes.build_node("n1", gpus=2))
    async with (
        controlled(tmp_path, fake.client_access()) as rig,
        Station(rig, fake, build_node("n1", gpus=2, agent_version="1"), obeys=lambda pod: False) as station,
    ):
        # Work that no kubelet knows, and a kubelet that gives its GPU away.
        await wait_until(lambda: not rig.controller.loop.core.state.nodes["n1"].others.closed, within_s=20.0)
        await rig.operators.submit_workload(build_request("by-hand"))
        taken = planned(rig)["by-hand", 0]
        station.rng.shuffle = lambda free: free.sort(key=lambda uuid: uuid not in taken)
        pod = kubernetes.build_pod("p", gpus=1)
        pod["metadata"]["annotations"] = {ANNOTATION_WRONG_DEVICES: wish} if wish else {}
        pod["metadata"]["ownerReferences"] = [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "r1", "controller": True}
        ]
        await cluster.create(PODS, pod)
        devices = part(rig, "devices")
        await wait_until(lambda: station.held and devices.wrong == 1, within_s=20.0)
        assert not station.agrees()
        (uid,) = station.held

        async def told():
            notes = [one["note"] for one in (await cluster.list(EVENTS, namespace="default")).items]
            return [note for note in notes if "cannot have its planned devices: it holds" in note and "keeps" in note]

        assert len(await wait_for(told)) == 1
        if wish:
            await wait_until(lambda: uid not in station.held)
            assert devices.recreated == 1
        else:
            await asyncio.sleep(0.5)
            assert (devices.recreated, list(station.held)) == (0, [uid])
        assert planned(rig)["by-hand", 0] == taken


def cut(name, starts):
    """An inventory whose GPUs are cut into slices of one kind, and these by resource."""
    found = build_node(name, gpus=len(starts), agent_version="1")
    gpus, slices = [], {}
    for gpu, places in zip(found.gpus, starts, strict=True):
        instances = []
        for number, start in enumerate(places):
            uuid = f"MIG-{name}-{gpu.index}-{start}"
            slices[uuid] = gpu.index, 1
            instances.append(
                GpuInstance(
                    id=number,
                    profile_id=19,
                    profile="1g.10gb",
                    start=start,
                    size=1,
                    compute_instances=(ComputeInstance(id=0, uuid=uuid, start=0, size=1),),
                )
            )
        gpus.append(replace(gpu, mig_capable=True, mig_enabled=True, gpu_instances=tuple(instances)))
    return replace(found, gpus=tuple(gpus)), {SMALL: slices}


async def test_slices_are_given_gpu_by_gpu_and_the_one_that_was_planned(fake, tmp_path):
    cluster = fake.client()
    await cluster.create(NODES, kubernetes.build_node("n1", gpus=0, **{SMALL: "6"}))
    found, slices = cut("n1", [(0, 1, 2), (0, 1, 2)])
    async with controlled(tmp_path, fake.client_access()) as rig, Station(rig, fake, found, slices=slices) as station:
        for number in range(4):
            await cluster.create(PODS, kubernetes.build_pod(f"s{number}", resource=SMALL))
        await wait_until(lambda: len(station.held) == 4, within_s=30.0)
        on = [slices[SMALL][uuid][0] for _, devices in station.held.values() for uuid in devices]
        assert sorted(on) == [0, 0, 0, 1], "one GPU is filled before another is woken"
        assert station.unseen_most == 1
        assert planned(rig) == {}
        await cluster.create(PODS, kubernetes.build_pod("large", gpus=3, resource=SMALL))
        await wait_until(lambda: part(rig, "slices").machine._told)
        assert "large" not in {name for name, _ in station.held.values()}
        for name in ("s0", "s1"):
            await cluster.delete(PODS, name, namespace="default", grace_s=0)
        await wait_until(lambda: "large" in {name for name, _ in station.held.values()}, within_s=20.0)
        pods = await pods_of(cluster)
        assert all(pod["spec"]["nodeName"] == "n1" for pod in pods.values())
