"""How fast the pods of one owner follow each other, at an API server in memory with kubelets whose pods end."""

import asyncio

from tests.builders.kubernetes import build_job, build_node, build_pod
from tests.builders.server import run_controller
from tests.e2e.kubernetes_gate_test import config, until
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.kubelets import Kubelets
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.fakes.kubernetes.workloads import Workloads

from eelgrid_controller.engines.kubernetes.api.port import JOBS, NODES, PODS
from eelgrid_controller.engines.kubernetes.model.well_known import GATE
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node


def wanted():
    found = build_job("j", parallelism=10, gates=(GATE,))
    found["spec"]["completions"] = 30
    found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 0
    return found


def succeeded(pods):
    return sum(one["status"].get("phase") == "Succeeded" for one in pods)


def test_thirty_completions_of_two_seconds_by_tens_end_within_a_minute(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            for index in range(20):
                await cluster.create(NODES, build_node(f"n{index:02d}"))
            for part in (Scheduler(fake), Workloads(fake), Kubelets(fake, run_s=2.0)):
                await fake.add(part)
            async with run_controller(tmp_path / "data", kubernetes=config(fake, tmp_path)):
                await cluster.create(JOBS, wanted())
                await until(cluster, lambda pods: succeeded(pods) == 30, within_s=60.0)

    asyncio.run(play())


def test_a_job_whose_places_were_all_stolen_at_once_ends_in_time(tmp_path):
    """Ten pods lose their places together: each alone would wait twice as long as the one before, the last 17 minutes."""

    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            for index in range(20):
                await cluster.create(NODES, build_node(f"n{index:02d}", gpus=1))
            await fake.add(Workloads(fake))
            async with run_controller(tmp_path / "data", kubernetes=config(fake, tmp_path, unbound_s=2.0)):
                await cluster.create(JOBS, wanted())
                pods = await until(cluster, lambda pods: len([one for one in pods if pinned_node(one)]) == 10)
                for one in pods:
                    name = pinned_node(one)
                    await cluster.create(PODS, build_pod(f"thief-{name}", gates=(), nodeName=name))
                for part in (Scheduler(fake), Kubelets(fake, run_s=1.0)):
                    await fake.add(part)
                await until(
                    cluster,
                    lambda pods: succeeded(one for one in pods if one["metadata"]["name"].startswith("j-")) == 30,
                    within_s=60.0,
                )

    asyncio.run(play())
