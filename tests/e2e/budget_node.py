"""A simulated node of four GPUs below a power budget, its sensors, and the counter of a job on it."""

import contextlib
from dataclasses import replace
from typing import NamedTuple

from tests.agent_process import agent_process
from tests.builders.server import run_controller
from tests.e2e.processes import fleet_of
from tests.fakes.metrics_servers import Listener, answer
from tests.waiting import wait_until

from eelgrid_protos import rpc, transport
from eelgrid_protos.messages import (
    EnforcementMode,
    GetPolicyRequest,
    GetSamplesRequest,
    GetWorkloadRequest,
    MetricsServer,
    MetricsSource,
    PoolMode,
    Reading,
    UpdatePolicyRequest,
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
_QUICK = {"steer_s": 0.5, "scrape_s": 1.0, "job_window_s": 2.0}


class Tick(NamedTuple):
    """What the sensors said at one moment, by GPU."""

    time_ns: int
    power_w: tuple[float, ...]
    limit_w: tuple[float, ...]


async def read_newest(listen):
    """The newest tick of the node; zeros before its first sample."""
    async with transport.open_channel(listen, tls=None) as channel:
        node = rpc.build_client(rpc.NODE_SERVICE, channel)
        samples = (await node.get_samples(GetSamplesRequest(node_name="n1"))).samples
    if samples is None:
        return Tick(0, (0.0,) * GPUS, (0.0,) * GPUS)
    columns = {column.reading: column.values[-GPUS:] for column in samples.gpu_columns}
    return Tick(samples.time_ns[-1], columns[Reading.POWER_W], columns[Reading.POWER_LIMIT_W])


@contextlib.asynccontextmanager
async def run_below_budget(folder, budget, *flags):
    """A controller and the node's agent under a budget, in an enforced pool.

    Gives the controller's rig, where the agent listens, and the counter of a job, which makes a hundred steps a look.
    """
    steps = 0.0

    def reply(_path):
        nonlocal steps
        steps += 100.0
        return (answer(f"steps_total {steps}\n".encode()),)

    node = fleet_of(folder / "fleet.json", (NODE,))
    with Listener(reply) as listener:
        async with (
            run_controller(folder / "data", **_QUICK) as rig,
            agent_process(rig.address, node, folder / "agent.log", *flags) as told,
        ):
            await wait_until(lambda: rig.controller.agents.connected == 1, within_s=30.0)
            policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
            pools = (PoolMode(pool="g", mode=EnforcementMode.ENFORCE),)
            bound = replace(policy, pools=pools, budgets=(budget,), send_interval_s=0.5, sample_interval_s=0.5)
            await rig.operators.update_policy(UpdatePolicyRequest(policy=bound))
            url = listener.url.removesuffix("/metrics") + "/job/metrics"
            counter = MetricsSource(server=MetricsServer.GENERIC, url=url, work_counter="steps_total")
            yield rig, told["listen"], counter


async def read_workload(rig, key):
    """The workload as the controller has it."""
    return (await rig.operators.get_workload(GetWorkloadRequest(workload_id=key))).workload
