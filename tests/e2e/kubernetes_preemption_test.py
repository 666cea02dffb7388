"""Pods as victims, and as those for which others make room: a real controller at an API server in memory with owners."""

import asyncio
import contextlib
from dataclasses import replace

from tests.builders.kubernetes import build_job, build_pod
from tests.e2e.kubernetes_gate_test import until
from tests.e2e.kubernetes_moves_test import a_fake, mover, plan_of, ready, told

from eelgrid_controller.engines.kubernetes.api.port import JOBS, NODES, POD_DISRUPTION_BUDGETS, PODS
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_CHECKPOINT_GRACE,
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    ANNOTATION_PREEMPTIBLE,
    KUEUE_QUEUE,
    LABEL_MANAGED,
)
from eelgrid_controller.engines.kubernetes.pods.migration import MoveTimeouts
from eelgrid_controller.engines.kubernetes.reconcilers import moves
from eelgrid_controller.state.events import PreemptionStarted
from eelgrid_protos.messages import (
    PreemptionReclaim,
    PreemptionWithin,
    Queue,
    QueuePreemption,
    QueueQuota,
    WorkloadPhase,
)

_RULES = QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY, reclaim=PreemptionReclaim.NOMINAL)


def queues(**nominal):
    own = (
        Queue(name=name, parent="root", quotas=(QueueQuota(resource="gpu", nominal=1000 * gpus),), preemption=_RULES)
        for name, gpus in nominal.items()
    )
    return (Queue(name="root"), *own)


@contextlib.asynccontextmanager
async def cluster_of(tmp_path, **nominal):
    """A fake with one node of eight GPUs, and a controller with these queues that may evict."""
    async with a_fake(start_s=0.1) as (fake, cluster):
        for name in ("b", "c"):
            await cluster.delete(NODES, name)
        async with mover(fake, tmp_path) as loop:
            await loop.update_policy(replace(loop.core.state.policy, queues=queues(**nominal)))
            begun = []
            loop.listeners.append(
                lambda done: begun.extend(one for one in done.events if isinstance(one, PreemptionStarted))
            )
            yield cluster, loop, begun


def job(name, queue, *, gpus=8, priority=0, parallelism=1, annotations=None):
    body = build_job(name, parallelism=parallelism, gpus=gpus, labels={LABEL_MANAGED: "true", KUEUE_QUEUE: queue})
    template = body["spec"]["template"]
    template["metadata"]["annotations"] = annotations or {}
    template["spec"]["priority"] = priority
    return body


def of(pods, name):
    return [one for one in pods if one["metadata"]["name"].startswith(f"{name}-") or one["metadata"]["name"] == name]


def test_a_queue_gets_its_quota_back_from_pods_that_come_again(tmp_path):
    async def play():
        async with cluster_of(tmp_path, x=8, y=0) as (cluster, loop, begun):
            await cluster.create(JOBS, job("y", "y"))
            (old,) = await until(cluster, lambda pods: len(ready(pods)) == 1 and pods)
            victim = plan_of(old)["workload"]
            await cluster.create(JOBS, job("x", "x"))
            pods = await until(cluster, lambda pods: len(ready(of(pods, "x"))) == 1 and of(pods, "y"))
            (start,) = begun
            assert start.victims == (victim,)
            (again,) = [one for one in of(pods, "y") if one["metadata"]["uid"] != old["metadata"]["uid"]]
            assert not again["spec"].get("nodeName")
            assert loop.core.state.workloads[victim].phase is WorkloadPhase.CANCELLED
            assert not len(loop.core.state.nominations)
            assert any("it makes room for" in one for one in await told(cluster))
            # When the other has ended, it runs again.
            await cluster.delete(JOBS, "x", namespace="default")
            await until(cluster, lambda pods: len(ready(of(pods, "y"))) == 1)

    asyncio.run(play())


def test_a_gang_goes_as_a_whole_after_its_grace_and_none_of_it_comes_back_beside(tmp_path):
    async def play():
        async with cluster_of(tmp_path, x=8, y=0) as (cluster, _loop, begun):
            gang = {ANNOTATION_GROUP: "g", ANNOTATION_GROUP_SIZE: "2", ANNOTATION_CHECKPOINT_GRACE: "1s"}
            await cluster.create(JOBS, job("y", "y", gpus=4, parallelism=2, annotations=gang))
            olds = await until(cluster, lambda pods: len(ready(pods)) == 2 and pods)
            begin_s = asyncio.get_running_loop().time()
            await cluster.create(JOBS, job("x", "x"))
            pods = await until(cluster, lambda pods: len(ready(of(pods, "x"))) == 1 and pods)
            assert asyncio.get_running_loop().time() - begin_s >= 1.0
            assert not {one["metadata"]["uid"] for one in olds} & {one["metadata"]["uid"] for one in pods}
            pods = await until(cluster, lambda pods: len(of(pods, "y")) == 2 and pods)
            assert not ready(of(pods, "y"))
            assert len(begun) == 1
            await cluster.delete(JOBS, "x", namespace="default")
            await until(cluster, lambda pods: len(ready(of(pods, "y"))) == 2)

    asyncio.run(play())


def test_what_a_budget_protects_runs_on_while_it_does(tmp_path, monkeypatch):
    async def play():
        async with cluster_of(tmp_path, x=8, y=0) as (cluster, loop, begun):
            body = job("y", "y")
            body["spec"]["template"]["metadata"]["labels"]["app"] = "y"
            await cluster.create(JOBS, body)
            budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "y"}}}
            meta = {"name": "b", "namespace": "default"}
            await cluster.create(POD_DISRUPTION_BUDGETS, {"metadata": meta, "spec": budget})
            (old,) = await until(cluster, lambda pods: len(ready(pods)) == 1 and pods)
            victim = plan_of(old)["workload"]
            await cluster.create(JOBS, job("x", "x"))
            async with asyncio.timeout(20.0):
                while not any("not moved:" in one for one in await told(cluster)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            async with asyncio.timeout(10.0):
                while loop.core.state.workloads[victim].preempted_for:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            pods = (await cluster.list(PODS)).items
            assert [one["metadata"]["uid"] for one in ready(pods)] == [old["metadata"]["uid"]]
            assert len(begun) == 1, "what could not be evicted is no victim again at once"
            assert not len(loop.core.state.nominations)

    monkeypatch.setattr(moves, "_PACE", MoveTimeouts(retry_s=0.3, budget_s=1.0))
    asyncio.run(play())


def test_priorities_of_pods_count_and_pods_that_never_preempt_or_come_back_are_left_out(tmp_path):
    async def play():
        async with cluster_of(tmp_path, x=8) as (cluster, _loop, begun):
            # One without a controller, and one whose people said no, are never victims.
            bare = build_pod("bare", gpus=4, labels={LABEL_MANAGED: "true", KUEUE_QUEUE: "x"})
            await cluster.create(PODS, bare)
            await cluster.create(JOBS, job("kept", "x", gpus=2, annotations={ANNOTATION_PREEMPTIBLE: "false"}))
            await cluster.create(JOBS, job("low", "x", gpus=2))
            await until(cluster, lambda pods: len([one for one in pods if one["spec"].get("nodeName")]) == 3)
            patient = job("patient", "x", gpus=2, priority=100)
            patient["spec"]["template"]["spec"]["preemptionPolicy"] = "Never"
            await cluster.create(JOBS, patient)
            await until(cluster, lambda pods: len(of(pods, "patient")) == 1)
            await cluster.create(JOBS, job("large", "x", gpus=4, priority=100))
            await cluster.create(JOBS, job("urgent", "x", gpus=2, priority=50))
            pods = await until(cluster, lambda pods: len(ready(of(pods, "urgent"))) == 1 and pods)
            assert [one["spec"].get("nodeName") for one in of(pods, "patient")] == [None]
            assert [one["spec"].get("nodeName") for one in of(pods, "large")] == [None]
            assert all(one["spec"].get("nodeName") for one in [*of(pods, "kept"), *of(pods, "bare")])
            assert not any(one["spec"].get("nodeName") for one in of(pods, "low"))
            assert len(begun) == 1

    asyncio.run(play())


def test_an_eviction_that_was_begun_is_finished_by_the_next_leader(tmp_path):
    async def play():
        async with a_fake(start_s=0.1) as (fake, cluster):
            for name in ("b", "c"):
                await cluster.delete(NODES, name)
            async with mover(fake, tmp_path) as loop:
                await loop.update_policy(replace(loop.core.state.policy, queues=queues(x=8, y=0)))
                await cluster.create(JOBS, job("y", "y", annotations={ANNOTATION_CHECKPOINT_GRACE: "3s"}))
                await until(cluster, lambda pods: len(ready(pods)) == 1)
                await cluster.create(JOBS, job("x", "x"))
                async with asyncio.timeout(10.0):
                    while not len(loop.core.state.nominations):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
            async with mover(fake, tmp_path) as loop:
                await until(cluster, lambda pods: len(ready(of(pods, "x"))) == 1, within_s=60.0)
                assert not len(loop.core.state.nominations)

    asyncio.run(play())
