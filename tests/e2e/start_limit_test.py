"""A job larger than its rack's budget starts once its GPUs have the limits that the budget holds, and never above them.

The controller, the agent and the job's process are real, and the GPUs simulated: their draw follows the load of what
runs and the limits that the agent sets.
"""

import os
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
    CancelWorkloadRequest,
    EnforcementMode,
    GetPolicyRequest,
    GetSamplesRequest,
    GetWorkloadRequest,
    MetricsServer,
    MetricsSource,
    Mobility,
    PoolMode,
    PowerBudget,
    ProcessSpec,
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
    "topology": "r1",
    "gpus": [{"product": "h100-sxm5-80gb", "count": GPUS}],
}
# Four of these draw 2,800 W at their default limits and 800 W at their lowest.
BUDGET_W = 1500.0
QUICK = {"steer_s": 0.5, "scrape_s": 1.0, "job_window_s": 2.0}
ROOT = ("--allow-root",) if os.geteuid() == 0 else ()


async def read_tick(listen):
    """What the sensors of the node said last: when, and the power and the limit of each GPU; None before they have."""
    async with transport.open_channel(listen, tls=None) as channel:
        node = rpc.build_client(rpc.NODE_SERVICE, channel)
        samples = (await node.get_samples(GetSamplesRequest(node_name="n1"))).samples
    if samples is None:
        return None
    columns = {column.reading: column.values[-GPUS:] for column in samples.gpu_columns}
    return samples.time_ns[-1], columns[Reading.POWER_W], columns[Reading.POWER_LIMIT_W]


@pytest.mark.parametrize("is_promised", [False, True])
async def test_a_job_starts_at_the_limits_that_its_racks_budget_holds(tmp_path, is_promised):
    steps = 0.0

    def reply(_path):
        nonlocal steps
        steps += 100.0
        return (answer(f"steps_total {steps}\n".encode()),)

    node = fleet_of(tmp_path / "fleet.json", (NODE,))
    flags = ("--run-processes", *ROOT, "--state", str(tmp_path / "agent"))
    with Listener(reply) as listener:
        async with (
            run_controller(tmp_path / "data", **QUICK) as rig,
            agent_process(rig.address, node, tmp_path / "agent.log", *flags) as told,
        ):
            await wait_until(lambda: rig.controller.agents.connected == 1, within_s=30.0)
            policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
            budget = PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=BUDGET_W)
            pools = (PoolMode(pool="g", mode=EnforcementMode.ENFORCE),)
            bound = replace(policy, pools=pools, budgets=(budget,), send_interval_s=0.5, sample_interval_s=0.5)
            await rig.operators.update_policy(UpdatePolicyRequest(policy=bound))
            url = listener.url.removesuffix("/metrics") + "/job/metrics"
            counter = MetricsSource(server=MetricsServer.GENERIC, url=url, work_counter="steps_total")
            promise = TrainingPromise(slowdown_most=0.2, metrics=counter) if is_promised else None
            process = ProcessSpec(argv=("sleep", "600"), working_directory=str(tmp_path))
            kind = WorkloadKind.TRAINING_JOB
            job = build_request(
                "train", gpus=GPUS, kind=kind, training=promise, process=process, mobility=Mobility.FIXED
            )
            placed = (await rig.operators.submit_workload(job)).workload
            assert (placed.phase, placed.limit_before_start) == (WorkloadPhase.PLACED, True)
            # 375 W for each of four, in steps of 50 W from 700 W.
            assert placed.power_limit_w == 350.0

            async def read():
                return (await rig.operators.get_workload(GetWorkloadRequest(workload_id="train"))).workload

            ticks = []

            async def works():
                """It runs, and the sensors have seen it."""
                tick = await read_tick(told["listen"])
                if tick is not None and tick not in ticks:
                    ticks.append(tick)
                return bool(ticks) and min(ticks[-1][1]) > 150.0 and (await read()).attempts

            (attempt,) = await wait_for(works, within_s=60.0)

            async def is_seen_for_a_while():
                await works()
                return sum(time_ns >= attempt.started_ns for time_ns, _, _ in ticks) >= 6

            await wait_for(is_seen_for_a_while, within_s=60.0)
            # Power control may have changed the limits by now, within the budget.
            assert all(max(limits) <= 350.0 for time_ns, _, limits in ticks if time_ns >= attempt.started_ns)
            assert all(sum(powers) <= BUDGET_W for _, powers, _ in ticks)
            assert rig.controller.objectives.failures == 0
            await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="train"))

            async def has_ended():
                return (await read()).phase is WorkloadPhase.CANCELLED

            await wait_for(has_ended, within_s=60.0)
