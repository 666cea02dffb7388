"""Work that a node's budget never holds at default limits runs on it, and the node draws no more than the budget.

The controller and the agent are real, and the GPUs simulated: their draw follows the load of what is assigned and the
limits that the agent sets.
"""

import pytest
from tests.builders.cluster import build_request
from tests.e2e.budget_node import BUDGET_W, GPUS, read_newest, read_workload, run_below_budget
from tests.waiting import wait_for

from eelgrid_protos.messages import BudgetScope, PowerBudget, TrainingPromise, WorkloadKind, WorkloadPhase


@pytest.mark.parametrize("is_promised", [False, True])
async def test_a_job_of_all_gpus_runs_within_the_budget_of_its_node(tmp_path, is_promised):
    budget = PowerBudget(scope=BudgetScope.NODE, name="n1", limit_w=BUDGET_W)
    async with run_below_budget(tmp_path, budget) as (rig, listen, counter):
        promise = TrainingPromise(slowdown_most=0.2, metrics=counter) if is_promised else None
        job = build_request("train", gpus=GPUS, kind=WorkloadKind.TRAINING_JOB, training=promise)
        await rig.operators.submit_workload(job)
        assert (await read_workload(rig, "train")).phase is WorkloadPhase.PLACED

        async def is_kept():
            power_w = (await read_newest(listen)).power_w
            # It works, at no more than the budget.
            return min(power_w) > 150.0 and sum(power_w) <= BUDGET_W

        await wait_for(is_kept, within_s=60.0)

        async def is_shared():
            """The plan has the job's share of the budget on each of its GPUs."""
            limits_w = (await read_newest(listen)).limit_w
            wanted_w = (await read_workload(rig, "train")).power_limit_w or 700.0
            return wanted_w <= BUDGET_W / GPUS and max(limits_w) <= wanted_w + 1.0

        if is_promised:
            await wait_for(is_shared, within_s=60.0)
        assert await is_kept()
        assert rig.controller.objectives.failures == 0
