"""Work that a node's budget never holds at default limits runs on it, and the node draws no more than the budget.

The controller and the agent are real, and the GPUs simulated: their draw follows the load of what is assigned and the
limits that the agent sets.
"""

from dataclasses import replace

import pytest
from tests.agent_process import agent_process
from tests.builders.cluster import build_request
from tests.builders.server import run_controller
from tests.e2e.processes import fleet_of
from tests.fakes.metrics_servers import Listener, answer
from tests.waiting import wait_for, wait_until

from eelgrid_protos import rpc, transport
from eelgrid_protos.messages import (
    BudgetScope,
    EnforcementMode,
    GetPolicyRequest,
    GetSamplesRequest,
    GetWorkloadRequest,
    MetricsServer,
    MetricsSource,
    PoolMode,
    PowerBudget,
    Reading,
    TrainingPromise,
    UpdatePolicyRequest,
    WorkloadKind,
    WorkloadPhase,
)

GPUS = 4
NODE = {
    "name": "n1",
    "cpu_milli": 64_000,
    "memory_bytes": 2**38,
    "pool": "g",
    "gpus": [{"product": "h100-sxm5-80gb", "count": GPUS}],
}
# Four of these draw 2,800 W at their default limits and 800 W at their lowest.
BUDGET_W = 1500.0
QUICK = {"steer_s": 0.5, "scrape_s": 1.0, "job_window_s": 2.0}


async def newest(listen, reading):
    """What the sensors of the node say, by GPU; zeros before their first sample."""
    async with transport.open_channel(listen, tls=None) as channel:
        node = rpc.build_client(rpc.NODE_SERVICE, channel)
        samples = (await node.get_samples(GetSamplesRequest(node_name="n1"))).samples
    if samples is None:
        return (0.0,) * GPUS
    (column,) = [one for one in samples.gpu_columns if one.reading is reading]
    return column.values[-GPUS:]


@pytest.mark.parametrize("is_promised", [False, True])
async def test_a_job_of_all_gpus_runs_within_the_budget_of_its_node(tmp_path, is_promised):
    steps = 0.0

    def reply(_path):
        nonlocal steps
        steps += 100.0
        return (answer(f"steps_total {steps}\n".encode()),)

    node = fleet_of(tmp_path / "fleet.json", (NODE,))
    with Listener(reply) as listener:
        async with (
            run_controller(tmp_path / "data", **QUICK) as rig,
            agent_process(rig.address, node, tmp_path / "agent.log") as told,
        ):
            await wait_until(lambda: rig.controller.agents.connected == 1, within_s=30.0)
            policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
            budget = PowerBudget(scope=BudgetScope.NODE, name="n1", limit_w=BUDGET_W)
            pools = (PoolMode(pool="g", mode=EnforcementMode.ENFORCE),)
            bound = replace(policy, pools=pools, budgets=(budget,), send_interval_s=0.5, sample_interval_s=0.5)
            await rig.operators.update_policy(UpdatePolicyRequest(policy=bound))
            counter = MetricsSource(
                server=MetricsServer.GENERIC,
                url=listener.url.removesuffix("/metrics") + "/job/metrics",
                work_counter="steps_total",
            )
            promise = TrainingPromise(slowdown_most=0.2, metrics=counter) if is_promised else None
            job = build_request("train", gpus=GPUS, kind=WorkloadKind.TRAINING_JOB, training=promise)
            await rig.operators.submit_workload(job)

            async def read():
                return (await rig.operators.get_workload(GetWorkloadRequest(workload_id="train"))).workload

            assert (await read()).phase is WorkloadPhase.PLACED

            async def is_kept():
                power_w = await newest(told["listen"], Reading.POWER_W)
                # It works, at no more than the budget.
                return min(power_w) > 150.0 and sum(power_w) <= BUDGET_W

            await wait_for(is_kept, within_s=60.0)

            async def is_shared():
                """The plan has the job's share of the budget on each of its GPUs."""
                limits_w = await newest(told["listen"], Reading.POWER_LIMIT_W)
                wanted_w = (await read()).power_limit_w or 700.0
                return wanted_w <= BUDGET_W / GPUS and max(limits_w) <= wanted_w + 1.0

            if is_promised:
                await wait_for(is_shared, within_s=60.0)
            assert await is_kept()
            assert rig.controller.objectives.failures == 0
