"""A controller whose journal is lost, whole: what stands is held where it stands, what objects order is in force."""

import asyncio
import json
from pathlib import Path

import yaml
from tests.builders.kubernetes import build_node, build_pod
from tests.builders.server import run_controller
from tests.e2e.kubernetes_gate_test import bound, config, until
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.resources import CUSTOM_RESOURCE_DEFINITIONS
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.waiting import wait_for

from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS, POWER_POLICIES
from eelgrid_controller.engines.kubernetes.model.status_reporting import ConditionSet
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    ANNOTATION_PLAN,
)

CRD = Path(__file__).parents[2] / "deploy/helm/eelgrid/files/crds/powerpolicies.yaml"


def standing(state):
    return {
        workload.workload_id: [(one.node_name, list(one.gpu_indexes)) for one in workload.placements]
        for workload in state.workloads.values()
        if workload.placements and not workload.ended_ns
    }


def test_a_controller_without_its_journal_takes_over_what_stands(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            await cluster.create(CUSTOM_RESOURCE_DEFINITIONS, yaml.safe_load(CRD.read_text()))
            for index in range(5):
                await cluster.create(NODES, build_node(f"n{index}"))
            budget = {"scope": "Cluster", "limitWatts": 100_000}
            order = {"metadata": {"name": "site"}, "spec": {"objective": "energy", "budgets": [budget]}}
            await cluster.create(POWER_POLICIES, order)
            await fake.add(Scheduler(fake))
            how = config(fake, tmp_path, abilities=frozenset({"policies"}))
            async with run_controller(tmp_path / "first", kubernetes=how) as rig:
                for index in range(24):
                    await cluster.create(PODS, build_pod(f"p{index:02d}"))
                for index in range(4):
                    one = build_pod(f"g{index}", gpus=2)
                    one["metadata"]["annotations"] = {ANNOTATION_GROUP: "train", ANNOTATION_GROUP_SIZE: "4"}
                    await cluster.create(PODS, one)
                pods = await until(cluster, lambda pods: len(bound(pods)) == 28)
                before = standing(rig.controller.loop.core.state)
                assert len(before) == 25
            async with run_controller(tmp_path / "second", kubernetes=how) as rig:
                state = rig.controller.loop.core.state

                async def look():
                    others = sum(record.others.gpu_count for record in state.nodes.values())
                    return standing(state) == before and not others

                await wait_for(look)
                plans = [json.loads(one["metadata"]["annotations"][ANNOTATION_PLAN]) for one in pods]
                assert all((plan["node"], plan["devices"]) in before[plan["workload"]] for plan in plans)

                async def ordered():
                    found = await cluster.get(POWER_POLICIES, "site")
                    conditions = ConditionSet.from_json(found.get("status", {}).get("conditions"))
                    return state.policy.objective == "energy" and conditions.is_true("InForce")

                await wait_for(ordered)
                await cluster.delete(PODS, "p00", namespace="default", grace_s=0)

                async def gone():
                    return len(standing(state)) == 24

                await wait_for(gone)

    asyncio.run(play())
