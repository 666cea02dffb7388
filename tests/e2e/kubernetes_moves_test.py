"""Ability `moves` whole: a real controller moves running pods at an API server in memory with owners, kubelets and budgets."""

import asyncio
import contextlib
import json
import time
from dataclasses import replace

import pytest
from tests.builders.kubernetes import build_deployment, build_job, build_node
from tests.builders.server import run_controller
from tests.e2e.kubernetes_gate_test import bound, config, until
from tests.fakes.kubernetes.admission import gate_injector
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.kubelets import Kubelets
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.fakes.kubernetes.workloads import Budgets, Workloads, is_ready

from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
)
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_CHECKPOINT_GRACE,
    ANNOTATION_DRAIN,
    ANNOTATION_DRAINED,
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    ANNOTATION_MOVE,
    ANNOTATION_MOVED_AT,
    ANNOTATION_PLAN,
    GATE,
    LABEL_MANAGED,
    LABEL_POOL,
    TAINT_REPARTITION,
)
from eelgrid_controller.engines.kubernetes.pods.migration import MoveTimeouts
from eelgrid_controller.engines.kubernetes.reconcilers import moves
from eelgrid_controller.placement.migration_planner import build_migration_problem
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_kernels.move_search import OVERLAPS
from eelgrid_protos.messages import (
    DrainOutcome,
    EnforcementMode,
    Move,
    Placement,
    PoolMode,
    RecommendMovesRequest,
    ReplicaMove,
)

_OURS = {LABEL_MANAGED: "true"}


@contextlib.asynccontextmanager
async def a_fake(*, start_s=0.2):
    """A fake with everything that moves pods beside us, and a client of it."""
    async with FakeCluster() as fake:
        cluster = fake.client()
        fake.api.mutators.append(gate_injector(LABEL_MANAGED, "true", GATE))
        for name in ("a", "b", "c"):
            await cluster.create(NODES, build_node(name, labels={LABEL_POOL: "p"}))
        for part in (Scheduler(fake), Workloads(fake), Kubelets(fake, start_s=start_s), Budgets(fake)):
            await fake.add(part)
        yield fake, cluster


@contextlib.asynccontextmanager
async def mover(fake, tmp_path, *, enforced=True, **options):
    """A controller that moves."""
    chosen = config(fake, tmp_path, abilities=frozenset({"moves", "taints"}), **options)
    async with run_controller(tmp_path / "data", kubernetes=chosen) as rig:
        loop = rig.controller.loop
        if enforced:
            modes = (PoolMode(pool="p", mode=EnforcementMode.ENFORCE),)
            await loop.update_policy(replace(loop.core.state.policy, pools=modes))
        yield loop


@contextlib.asynccontextmanager
async def cluster_of(tmp_path, *, enforced=True):
    """A fake, a client of it, and a controller that moves."""
    async with a_fake() as (fake, cluster), mover(fake, tmp_path, enforced=enforced) as loop:
        yield fake, cluster, loop


def plan_of(pod):
    return json.loads(pod["metadata"]["annotations"][ANNOTATION_PLAN])


async def order(loop, pod, to):
    """What an operator's `eelctl moves apply` comes to."""
    plan = plan_of(pod)
    workload = loop.core.state.workloads[plan["workload"]]
    source = next(one for one in workload.placements if one.replica == plan["replica"])
    record = loop.core.state.nodes[to]
    free = [one for one in record.inventory.gpus if not record.gpu_milli.get(one.uuid)]
    gpus = free[: len(source.gpu_uuids)]
    target = Placement(
        replica=source.replica,
        node_name=to,
        gpu_uuids=tuple(one.uuid for one in gpus),
        gpu_indexes=tuple(one.index for one in gpus),
    )
    await loop.apply_moves((Move(workload_id=plan["workload"], replicas=(ReplicaMove(source=source, target=target),)),))
    return plan["workload"]


def ready(pods):
    return [one for one in pods if is_ready(one) and not one["metadata"].get("deletionTimestamp")]


async def told(cluster):
    return [one["note"] for one in (await cluster.list(EVENTS)).items]


def elsewhere(pod):
    """A node that a pod is not on."""
    return next(name for name in ("a", "b", "c") if name != pod["spec"]["nodeName"])


def test_a_pod_of_a_deployment_goes_when_another_is_ready(tmp_path):
    async def play():
        async with cluster_of(tmp_path) as (fake, cluster, loop):
            await cluster.create(DEPLOYMENTS, build_deployment("d", replicas=3, labels=_OURS))
            pods = await until(cluster, lambda pods: len(ready(pods)) == 3)
            fewest, most = [3], [3]

            def watch(kind, event):
                if kind.plural == "pods":
                    here = [one.object for one in fake.store.of(kind).values()]
                    fewest.append(len(ready(here)))
                    most.append(len(here))

            fake.store.heard.append(watch)
            old = pods[0]
            to = elsewhere(old)
            workload = await order(loop, old, to)

            def is_moved(pods):
                new = [one for one in bound(pods) if plan_of(one)["workload"] == workload]
                return (
                    len(new) == len(ready(pods)) - 2 == 1
                    and len(pods) == 3
                    and new[0]["spec"]["nodeName"] == to
                    and new[0]["metadata"]["uid"] != old["metadata"]["uid"]
                    and ANNOTATION_MOVED_AT in new[0]["metadata"]["annotations"]
                )

            await until(cluster, is_moved)
            found = await cluster.get(DEPLOYMENTS, "d", namespace="default")
            assert found["spec"]["replicas"] == 3
            assert ANNOTATION_MOVE not in (found["metadata"].get("annotations") or {})
            assert (min(fewest), max(most)) == (3, 4)
            assert loop.core.state.workloads[workload].placements[0].node_name == to
            assert any("moved" in one for one in await told(cluster))

    asyncio.run(play())


def test_a_pod_that_does_not_become_ready_is_taken_back_and_the_place_too(tmp_path, monkeypatch):
    async def play():
        async with cluster_of(tmp_path) as (fake, cluster, loop):
            await cluster.create(DEPLOYMENTS, build_deployment("d", replicas=2, labels=_OURS))
            pods = await until(cluster, lambda pods: len(ready(pods)) == 2)
            old = pods[0]
            fake._parts[2].start_s = 60.0
            workload = await order(loop, old, elsewhere(old))
            await until(cluster, lambda pods: len(bound(pods)) == 3)

            def is_undone(pods):
                return len(pods) == len(ready(pods)) == 2 and all(
                    ANNOTATION_MOVE not in one["metadata"]["annotations"] for one in pods
                )

            pods = await until(cluster, is_undone)
            assert old["metadata"]["uid"] in {one["metadata"]["uid"] for one in pods}
            async with asyncio.timeout(5.0):
                while loop.core.state.workloads[workload].placements[0].node_name != old["spec"]["nodeName"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert (await cluster.get(DEPLOYMENTS, "d", namespace="default"))["spec"]["replicas"] == 2
            assert any("not moved" in one and "ready" in one for one in await told(cluster))

    monkeypatch.setattr(moves, "_PACE", MoveTimeouts(ready_s=3.0))
    asyncio.run(play())


def test_a_job_is_reported_and_evicted_after_its_grace_and_comes_to_the_kept_place(tmp_path):
    async def play():
        async with cluster_of(tmp_path) as (_, cluster, loop):
            body = build_job("j", labels=_OURS)
            body["spec"]["template"]["metadata"]["annotations"] = {ANNOTATION_CHECKPOINT_GRACE: "2s"}
            await cluster.create(JOBS, body)
            (old,) = await until(cluster, lambda pods: len(ready(pods)) == 1)
            to = elsewhere(old)
            begin_s = asyncio.get_running_loop().time()
            workload = await order(loop, old, to)
            pods = await until(
                cluster, lambda pods: [one for one in ready(pods) if one["metadata"]["uid"] != old["metadata"]["uid"]]
            )
            assert asyncio.get_running_loop().time() - begin_s >= 2.0
            (new,) = ready(pods)
            assert (new["spec"]["nodeName"], plan_of(new)["workload"]) == (to, workload)
            assert any("evicted in" in one for one in await told(cluster))

    asyncio.run(play())


def test_what_a_budget_forbids_stays_until_it_allows_it(tmp_path):
    async def play():
        async with cluster_of(tmp_path) as (_, cluster, loop):
            body = build_job("j", labels={**_OURS, "app": "j"})
            body["spec"]["template"]["metadata"]["annotations"] = {ANNOTATION_CHECKPOINT_GRACE: "1s"}
            await cluster.create(JOBS, body)
            budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "j"}}}
            await cluster.create(
                POD_DISRUPTION_BUDGETS, {"metadata": {"name": "b", "namespace": "default"}, "spec": budget}
            )
            (old,) = await until(cluster, lambda pods: len(ready(pods)) == 1)
            await order(loop, old, elsewhere(old))
            async with asyncio.timeout(20.0):
                while not any("not evicted yet" in one for one in await told(cluster)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            (still,) = await until(cluster, lambda pods: len(ready(pods)) == 1)
            assert still["metadata"]["uid"] == old["metadata"]["uid"]

    asyncio.run(play())


def test_a_gang_is_evicted_as_a_whole_or_not_at_all(tmp_path):
    async def play():
        async with cluster_of(tmp_path) as (_, cluster, loop):
            body = build_job("g", parallelism=2, gpus=8, labels={**_OURS, "app": "g"})
            body["spec"]["template"]["metadata"]["annotations"] = {
                ANNOTATION_CHECKPOINT_GRACE: "1s",
                ANNOTATION_GROUP: "g",
                ANNOTATION_GROUP_SIZE: "2",
            }
            await cluster.create(JOBS, body)
            budget = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "g"}}}
            meta = {"name": "b", "namespace": "default"}
            await cluster.create(POD_DISRUPTION_BUDGETS, {"metadata": meta, "spec": budget})
            olds = await until(cluster, lambda pods: len(ready(pods)) == 2 and pods)
            uids = {one["metadata"]["uid"] for one in olds}
            free = ({"a", "b", "c"} - {one["spec"]["nodeName"] for one in olds}).pop()
            stays = olds[1]["spec"]["nodeName"]
            await order(loop, olds[0], free)
            async with asyncio.timeout(20.0):
                while not any("allows 1 disruptions now, and 2 are needed" in one for one in await told(cluster)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            pods = await until(cluster, lambda pods: len(ready(pods)) == 2 and pods)
            assert {one["metadata"]["uid"] for one in pods} == uids, "none went while one might not"
            await cluster.delete(POD_DISRUPTION_BUDGETS, "b", namespace="default")
            pods = await until(
                cluster,
                lambda pods: [one for one in ready(pods) if one["metadata"]["uid"] not in uids][1:] and pods,
                within_s=40.0,
            )
            assert {one["spec"]["nodeName"] for one in ready(pods)} == {free, stays}

    asyncio.run(play())


def test_in_a_pool_that_is_only_observed_nothing_moves(tmp_path):
    async def play():
        async with cluster_of(tmp_path, enforced=False) as (_, cluster, loop):
            await cluster.create(DEPLOYMENTS, build_deployment("d", replicas=1, labels=_OURS))
            (old,) = await until(cluster, lambda pods: len(ready(pods)) == 1)
            workload = await order(loop, old, elsewhere(old))
            async with asyncio.timeout(20.0):
                while loop.core.state.workloads[workload].placements[0].node_name != old["spec"]["nodeName"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert any("would be moved" in one for one in await told(cluster))
            assert (await cluster.get(DEPLOYMENTS, "d", namespace="default"))["spec"]["replicas"] == 1

    asyncio.run(play())


def test_a_drained_node_is_emptied_and_says_so(tmp_path):
    async def play():
        async with cluster_of(tmp_path) as (_, cluster, _loop):
            await cluster.create(DEPLOYMENTS, build_deployment("d", replicas=2, labels=_OURS))
            pods = await until(cluster, lambda pods: len(ready(pods)) == 2)
            name = pods[0]["spec"]["nodeName"]
            body = {"metadata": {"annotations": {ANNOTATION_DRAIN: "true"}}, "spec": {"unschedulable": True}}
            await cluster.patch(NODES, name, body)
            await until(
                cluster,
                lambda pods: len(ready(pods)) == 2 and all(one["spec"]["nodeName"] != name for one in ready(pods)),
                within_s=40.0,
            )
            async with asyncio.timeout(20.0):
                while True:
                    found = await cluster.get(NODES, name)
                    if "empty" in found["metadata"]["annotations"].get(ANNOTATION_DRAINED, ""):
                        break
                    await asyncio.sleep(0.2)

    asyncio.run(play())


@pytest.mark.parametrize("is_fixed", [True, False])
def test_what_has_nowhere_to_go_is_evicted_when_the_grace_of_a_drain_is_over_and_what_is_fixed_if_forced(
    tmp_path, is_fixed
):
    async def play():
        async with cluster_of(tmp_path) as (_, cluster, loop):
            for name in ("b", "c"):
                await cluster.delete(NODES, name)
            body = build_job("j", labels=_OURS)
            if not is_fixed:
                body["spec"]["template"]["metadata"]["annotations"] = {ANNOTATION_CHECKPOINT_GRACE: "1s"}
            await cluster.create(JOBS, body)
            (old,) = await until(cluster, lambda pods: len(ready(pods)) == 1 and pods)

            def terms(*, force):
                return DrainTerms(deadline_ns=time.time_ns() + 3_000_000_000, force=force)

            preview = await loop.read(lambda core: core.preview_drain("a", (), terms(force=is_fixed), now_ns=1))
            assert [one.outcome for one in preview] == [DrainOutcome.REQUEUED]
            if is_fixed:
                await loop.cordon_node("a", drain=replace(terms(force=False), deadline_ns=1))
                async with asyncio.timeout(30.0):
                    while "(fixed)" not in str((await cluster.get(NODES, "a"))["metadata"].get("annotations")):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                assert (await cluster.list(PODS)).items[0]["metadata"]["uid"] == old["metadata"]["uid"]
            begin_s = time.monotonic()
            await loop.cordon_node("a", drain=terms(force=is_fixed))

            def is_requeued(pods):
                return len(pods) == 1 and pods[0]["metadata"]["uid"] != old["metadata"]["uid"] and not bound(pods)

            await until(cluster, is_requeued, within_s=40.0)
            assert time.monotonic() - begin_s >= 3.0
            await loop.uncordon_node("a")
            await until(cluster, lambda pods: len(ready(pods)) == 1, within_s=40.0)

    asyncio.run(play())


def test_a_drain_by_eelctl_is_kubernetes_own_and_uncordon_takes_it_away_also_after_a_change_of_leader(tmp_path):
    async def reaches(cluster, name, condition):
        async with asyncio.timeout(40.0):
            while True:
                found = await cluster.get(NODES, name)
                if condition(found):
                    return found
                await asyncio.sleep(0.2)

    def is_open(node):
        return not node["spec"].get("unschedulable") and ANNOTATION_DRAIN not in node["metadata"]["annotations"]

    async def play():
        async with a_fake(start_s=0.3) as (fake, cluster):
            async with mover(fake, tmp_path) as loop:
                await cluster.create(DEPLOYMENTS, build_deployment("d", replicas=2, labels=_OURS))
                pods = await until(cluster, lambda pods: len(ready(pods)) == 2 and pods)
                name = pods[0]["spec"]["nodeName"]
                await loop.cordon_node(name, reason="new kernel", drain=DrainTerms())
                await until(
                    cluster,
                    lambda pods: len(ready(pods)) == 2 and all(one["spec"]["nodeName"] != name for one in ready(pods)),
                    within_s=40.0,
                )
                node = await reaches(cluster, name, lambda node: ANNOTATION_DRAINED in node["metadata"]["annotations"])
                assert node["spec"]["unschedulable"] is True
                async with asyncio.timeout(20.0):
                    while loop.core.state.nodes[name].assignments:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
            without_journal = tmp_path / "another"
            without_journal.mkdir()
            async with mover(fake, without_journal) as loop:
                async with asyncio.timeout(20.0):
                    while name not in loop.core.state.draining:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                await loop.uncordon_node(name)
                await reaches(cluster, name, is_open)

    asyncio.run(play())


def test_a_controller_that_dies_in_the_middle_is_followed_by_one_that_goes_on(tmp_path):
    async def play():
        async with a_fake(start_s=1.5) as (fake, cluster):
            async with mover(fake, tmp_path) as loop:
                await cluster.create(DEPLOYMENTS, build_deployment("d", replicas=2, labels=_OURS))
                (old, _) = await until(cluster, lambda pods: len(ready(pods)) == 2 and pods)
                await order(loop, old, elsewhere(old))
                await until(cluster, lambda pods: len(pods) == 3)
            found = await cluster.get(DEPLOYMENTS, "d", namespace="default")
            assert found["spec"]["replicas"] == 3
            assert ANNOTATION_MOVE in found["metadata"]["annotations"]
            async with mover(fake, tmp_path) as loop:
                pods = await until(
                    cluster,
                    lambda pods: (
                        len(pods) == len(ready(pods)) == 2
                        and old["metadata"]["uid"] not in {one["metadata"]["uid"] for one in pods}
                    ),
                )
                async with asyncio.timeout(10.0):
                    while ANNOTATION_MOVE in (found["metadata"].get("annotations") or {}):
                        found = await cluster.get(DEPLOYMENTS, "d", namespace="default")
                        await asyncio.sleep(0.1)
                assert found["spec"]["replicas"] == 2
                assert not any(ANNOTATION_MOVE in one["metadata"]["annotations"] for one in pods)

    asyncio.run(play())


def test_a_taint_that_another_process_left_behind_is_removed(tmp_path):
    async def play():
        async with cluster_of(tmp_path) as (_, cluster, _loop):
            taints = [{"key": "other", "effect": "NoSchedule"}, {"key": TAINT_REPARTITION, "effect": "NoSchedule"}]
            await cluster.patch(NODES, "a", {"spec": {"taints": taints}})
            async with asyncio.timeout(20.0):
                while (await cluster.get(NODES, "a"))["spec"]["taints"] != taints[:1]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    asyncio.run(play())


def test_running_pods_are_recommended_to_move_and_are_moved(tmp_path):
    async def play():
        async with cluster_of(tmp_path) as (_, cluster, loop):
            for name, gpus in (("big", 6), ("small", 2), ("other", 6)):
                await cluster.create(DEPLOYMENTS, build_deployment(name, gpus=gpus, labels=_OURS))
                await until(
                    cluster, lambda pods, name=name: any(name in one["metadata"]["name"] for one in ready(pods))
                )
            core = loop.core
            problem = build_migration_problem(core.survey_moves(RecommendMovesRequest()))
            assert problem.running == 3
            assert {unit.manner for unit in problem.units} == {OVERLAPS}, "each may move"

    asyncio.run(play())


async def lose_gpu(loop, held):
    await loop.mark_gpu_lost(held.node_name, held.gpu_uuids[0])


async def drain_gpu(loop, held):
    await loop.cordon_node(held.node_name, held.gpu_uuids, reason="row remapping", drain=DrainTerms())


@pytest.mark.parametrize("leave", [lose_gpu, drain_gpu])
def test_what_runs_on_a_gpu_that_is_lost_or_drained_goes_to_another(tmp_path, leave):
    async def play():
        async with cluster_of(tmp_path) as (_, cluster, loop):
            await cluster.create(DEPLOYMENTS, build_deployment("d", labels=_OURS))
            (old,) = await until(cluster, lambda pods: len(ready(pods)) == 1 and pods)
            (held,) = loop.core.state.workloads[plan_of(old)["workload"]].placements
            await leave(loop, held)

            def is_elsewhere(pods):
                here = ready(pods)
                return len(pods) == len(here) == 1 and here[0]["metadata"]["uid"] != old["metadata"]["uid"] and here

            (new,) = ready(await until(cluster, is_elsewhere))
            (now,) = loop.core.state.workloads[plan_of(new)["workload"]].placements
            assert now.gpu_uuids != held.gpu_uuids

    asyncio.run(play())
