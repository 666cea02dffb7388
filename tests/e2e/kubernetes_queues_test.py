"""Queues of pods by Kueue's labels: on a Job alone, and by LocalQueues, with a real controller and no Kueue."""

import asyncio
from dataclasses import replace

from tests.builders.kubernetes import build_job, build_node
from tests.builders.server import run_controller
from tests.e2e.kubernetes_gate_test import bound, config, until
from tests.fakes.kubernetes import kinds
from tests.fakes.kubernetes.admission import gate_injector
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.fakes.kubernetes.workloads import Workloads

from eelgrid_controller.engines.kubernetes.api.port import JOBS, LOCAL_QUEUES, NODES
from eelgrid_controller.engines.kubernetes.model.well_known import GATE, KUEUE_QUEUE, LABEL_MANAGED
from eelgrid_protos.messages import Queue, QueueQuota


def queue(name, gpus):
    return Queue(name=name, quotas=(QueueQuota(resource="gpu", nominal=1000 * gpus),))


def job(name, label):
    body = build_job(name, gpus=4, labels={LABEL_MANAGED: "true"})
    body["metadata"]["labels"] = {KUEUE_QUEUE: label}
    return body


def queues_of(loop):
    return sorted(
        (one.spec.labels["owner"], one.spec.queue, bool(one.placements)) for one in loop.core.state.workloads.values()
    )


def test_the_label_of_a_job_names_the_queue_and_a_local_queue_stands_for_its_cluster_queue(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            fake.api.catalogue.serve(kinds.of(LOCAL_QUEUES.at("v1beta2"), is_custom=True))
            cluster, local_queues = fake.client(), LOCAL_QUEUES.at("v1beta2")
            fake.api.mutators.append(gate_injector(LABEL_MANAGED, "true", GATE))
            await cluster.create(NODES, build_node("a", gpus=16))
            for part in (Scheduler(fake), Workloads(fake)):
                await fake.add(part)
            for name, stands_for in (("team", "research"), ("own", "research"), ("lost", "none")):
                meta = {"name": name, "namespace": "default"}
                await cluster.create(local_queues, {"metadata": meta, "spec": {"clusterQueue": stands_for}})
            async with run_controller(tmp_path / "data", kubernetes=config(fake, tmp_path)) as rig:
                loop = rig.controller.loop
                declared = (queue("research", 4), queue("default/own", 4), queue("plain", 4))
                await loop.update_policy(replace(loop.core.state.policy, queues=declared))
                async with asyncio.timeout(10.0):
                    while len(rig.controller.placing.engine.queue_labels.cluster_queues) != 1:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                for name in ("team", "own", "plain"):
                    await cluster.create(JOBS, job(name, name))
                await until(cluster, lambda pods: len(bound(pods)) == 3)
                assert queues_of(loop) == [
                    ("Job/own", "default/own", True),
                    ("Job/plain", "plain", True),
                    ("Job/team", "research", True),
                ]
                # The quota is used up, and a queue that is not declared takes nothing.
                await cluster.create(JOBS, job("more", "team"))
                await cluster.create(JOBS, job("lost", "lost"))
                told = ("queue research has too little gpu quota left", "is 'lost', and there is no such queue")
                pods = await until(
                    cluster, lambda pods: all(any(text in str(one["status"]) for one in pods) for text in told) and pods
                )
                assert len(bound(pods)) == 3

    asyncio.run(play())
