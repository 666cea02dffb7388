"""A job larger than its rack's budget starts once its GPUs have the limits that the budget holds, and never above them.

The controller, the agent and the job's process are real, and the GPUs simulated: their draw follows the load of what
runs and the limits that the agent sets.
"""

import os

import pytest
from tests.builders.cluster import build_request
from tests.e2e.budget_node import BUDGET_W, GPUS, read_newest, read_workload, run_below_budget
from tests.waiting import wait_for

from eelgrid_protos.messages import (
    BudgetScope,
    CancelWorkloadRequest,
    Mobility,
    PowerBudget,
    ProcessSpec,
    TrainingPromise,
    WorkloadKind,
    WorkloadPhase,
)

ROOT = ("--allow-root",) if os.geteuid() == 0 else ()


@pytest.mark.parametrize("is_promised", [False, True])
async def test_a_job_starts_at_the_limits_that_its_racks_budget_holds(tmp_path, is_promised):
    budget = PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=BUDGET_W)
    flags = ("--run-processes", *ROOT, "--state", str(tmp_path / "agent"))
    async with run_below_budget(tmp_path, budget, *flags) as (rig, listen, counter):
        promise = TrainingPromise(slowdown_most=0.2, metrics=counter) if is_promised else None
        process = ProcessSpec(argv=("sleep", "600"), working_directory=str(tmp_path))
        kind = WorkloadKind.TRAINING_JOB
        job = build_request("train", gpus=GPUS, kind=kind, training=promise, process=process, mobility=Mobility.FIXED)
        placed = (await rig.operators.submit_workload(job)).workload
        assert (placed.phase, placed.limit_before_start) == (WorkloadPhase.PLACED, True)
        # 375 W for each of four, in steps of 50 W from 700 W.
        assert placed.power_limit_w == 350.0
        ticks = []

        async def works():
            """It runs, and the sensors have seen it."""
            tick = await read_newest(listen)
            if tick not in ticks:
                ticks.append(tick)
            return min(tick.power_w) > 150.0 and (await read_workload(rig, "train")).attempts

        (attempt,) = await wait_for(works, within_s=60.0)

        async def is_seen_for_a_while():
            await works()
            return sum(tick.time_ns >= attempt.started_ns for tick in ticks) >= 6

        await wait_for(is_seen_for_a_while, within_s=60.0)
        # Power control may have changed the limits by now, within the budget.
        assert all(max(tick.limit_w) <= 350.0 for tick in ticks if tick.time_ns >= attempt.started_ns)
        assert all(sum(tick.power_w) <= BUDGET_W for tick in ticks)
        assert rig.controller.objectives.failures == 0
        await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="train"))

        async def has_ended():
            return (await read_workload(rig, "train")).phase is WorkloadPhase.CANCELLED

        await wait_for(has_ended, within_s=60.0)
