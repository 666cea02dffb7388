"""Partitions over the wire: stages that follow each other, agents that refuse and are asked again, plans that are stale."""

import asyncio
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.builders.cluster import build_core
from tests.builders.partition import apply_layout, build_mig_node, build_slice_points, build_sliced_service
from tests.builders.server import run_controller
from tests.waiting import wait_until

from eelgrid_controller.server.grpc import planner_services
from eelgrid_protos.faults import FailedPrecondition, NotFound
from eelgrid_protos.messages import (
    ApplyPartitionsRequest,
    ApplyResult,
    ApplyStatus,
    CancelWorkloadRequest,
    EnforcementMode,
    GetPolicyRequest,
    Inventory,
    ListPartitionsRequest,
    NodePlan,
    PlanApplied,
    PoolMode,
    RecommendPartitionsRequest,
    RecordPointsRequest,
    UpdatePolicyRequest,
)


async def hand_over(rig) -> None:
    policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
    mode = PoolMode(pool="mig", mode=EnforcementMode.ENFORCE, partitioned=True)
    await rig.operators.update_policy(UpdatePolicyRequest(policy=replace(policy, pools=(mode,))))
    await rig.operators.record_points(RecordPointsRequest(points=tuple(build_slice_points())))


async def recommended(rig):
    return (await rig.operators.recommend_partitions(RecommendPartitionsRequest())).recommendation


async def listed(rig):
    return await rig.operators.list_partitions(ListPartitionsRequest())


def done(inventory: Inventory, plan: NodePlan, generation: int) -> Inventory:
    """The node once its agent did what the plan says."""
    layouts = {layout.gpu_uuid: layout for layout in plan.gpu_layouts}
    gpus = tuple(apply_layout(gpu, layouts[gpu.uuid]) if gpu.uuid in layouts else gpu for gpu in inventory.gpus)
    return replace(inventory, gpus=gpus, generation=generation)


async def plan_with(agent, wanted) -> NodePlan:
    """The next plan of which this is so."""
    while True:
        plan = await agent.hear(NodePlan)
        if wanted(plan):
            return plan


async def test_a_refusal_is_reported_and_asked_again_until_the_layout_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(planner_services, "ASK_FIRST_S", 0.05)
    monkeypatch.setattr(planner_services, "POLL_S", 0.02)
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_mig_node("a", gpus=1))
        await hand_over(rig)
        await rig.operators.submit_workload(build_sliced_service("s", 20.0))
        found = await recommended(rig)
        assert (found.stages, len(found.gpus)) == (1, 1)
        answer = await rig.operators.apply_partitions(ApplyPartitionsRequest(recommendation_id=found.recommendation_id))
        assert answer.stages_left == 0
        plan = await plan_with(agent, lambda plan: plan.gpu_layouts)
        assert (plan.enforce, plan.assignments) == (True, ())
        busy = ApplyResult(subject="GPU-a-0", status=ApplyStatus.REFUSED, rule="busy", detail="3g is in use; drain it")
        await agent.say(PlanApplied(epoch=plan.epoch, status=ApplyStatus.REFUSED, results=(busy,)))
        again = await plan_with(agent, lambda later: later.epoch > plan.epoch)
        assert again.gpu_layouts == plan.gpu_layouts
        shown = await listed(rig)
        assert [(gpu.stands, gpu.problem) for gpu in shown.gpus] == [(False, "busy: 3g is in use; drain it")]
        assert shown.waits_for == "GPU 0 of node a: busy: 3g is in use; drain it"
        with pytest.raises(NotFound, match="Ask for a new plan"):
            await rig.operators.apply_partitions(ApplyPartitionsRequest(recommendation_id=found.recommendation_id))
        other = await recommended(rig)
        with pytest.raises(FailedPrecondition, match="under way"):
            await rig.operators.apply_partitions(ApplyPartitionsRequest(recommendation_id=other.recommendation_id))
        await agent.say(done(build_mig_node("a", gpus=1), plan, 2))
        served = await plan_with(agent, lambda later: later.assignments)
        assert all(item.gpu_uuids[0].startswith("MIG-GPU-a-0") for item in served.assignments)
        # The stage stood, so the change is over: nothing is waited for.
        for _ in range(200):
            if not (await listed(rig)).waits_for:
                break
            await asyncio.sleep(0.02)
        shown = await listed(rig)
        assert (shown.waits_for, shown.stages_left, [gpu.stands for gpu in shown.gpus]) == ("", 0, [True])


async def test_stages_follow_each_other_and_end_where_one_no_longer_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(planner_services, "POLL_S", 0.02)
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_mig_node("a"))
        await hand_over(rig)
        for key, rate_hz in (("s", 20.0), ("t", 5.0), ("u", 5.0)):
            await rig.operators.submit_workload(build_sliced_service(key, rate_hz))
        found = await recommended(rig)
        await rig.operators.apply_partitions(ApplyPartitionsRequest(recommendation_id=found.recommendation_id))
        plan = await plan_with(agent, lambda plan: plan.gpu_layouts)
        standing = done(build_mig_node("a"), plan, 2)
        await agent.say(standing)
        await plan_with(agent, lambda later: later.assignments)
        course = rig.controller.partitions
        await wait_until(course._course.done)
        # Half as quick: more slices are made first, then those that no longer do are left.
        await rig.operators.record_points(RecordPointsRequest(points=tuple(build_slice_points(scale=0.5))))
        found = await recommended(rig)
        assert found.stages == 2
        answer = await rig.operators.apply_partitions(ApplyPartitionsRequest(recommendation_id=found.recommendation_id))
        assert answer.stages_left == 1
        first = await plan_with(agent, lambda later: later.gpu_layouts != plan.gpu_layouts)
        for one in found.services:
            await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id=one.workload_id))
        await agent.say(done(standing, first, 3))
        await wait_until(course._course.done)
        shown = await listed(rig)
        assert shown.stages_left == 1
        assert shown.waits_for.startswith("ended at stage 2 of 2: the partition plan no longer holds")


async def test_what_cannot_be_planned_is_reported_in_words(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_mig_node("a", gpus=1))
        await rig.operators.submit_workload(build_sliced_service("s", 20.0))
        with pytest.raises(FailedPrecondition, match="switch a pool"):
            await recommended(rig)
        assert (await listed(rig)).gpus == ()
        await hand_over(rig)
        await rig.operators.submit_workload(build_sliced_service("large", 5000.0))
        with pytest.raises(FailedPrecondition, match="the pools lack"):
            await recommended(rig)


async def test_the_stages_that_remain_follow_where_whoever_applies_them_goes_away(monkeypatch):
    core, applied, may_commit = build_core(), [], asyncio.Event()

    async def read(view):
        return view(core)

    async def apply(stage, call=None):
        await may_commit.wait()
        applied.append(stage)

    service = planner_services.PartitionService(
        loop=SimpleNamespace(read=read, apply_partitions=apply),
        telemetry=None,
        monotonic_s=time.monotonic,
        log=logging.getLogger("partitions"),
        call_of=lambda *_: None,
    )
    stages = [SimpleNamespace(turns=(), start_s=0.0, drains=(), number=number) for number in range(2)]
    found = SimpleNamespace(recommendation=SimpleNamespace(recommendation_id="r"), stages=stages)
    monkeypatch.setattr(planner_services, "recommend_partitions", lambda *_: found)
    await service.recommend_partitions(RecommendPartitionsRequest(), None)
    applying = asyncio.create_task(service.apply_partitions(ApplyPartitionsRequest(recommendation_id="r"), None))
    await asyncio.sleep(0)
    applying.cancel()
    await asyncio.gather(applying, return_exceptions=True)
    may_commit.set()
    await wait_until(lambda: applied == stages)
