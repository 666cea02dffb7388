"""NodeService over a real loopback server: which node is meant, and its answers."""

import logging
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from eelgrid_agent.engine import NoEngine
from eelgrid_agent.host import SimulatedHost
from eelgrid_agent.node import Identity, Node, survey, take_looks
from eelgrid_agent.node_api import NodeApi
from eelgrid_agent.simulation import GpuSpec, NodeSpec, SimulatedNode
from eelgrid_protos.faults import InvalidArgument, NotFound
from eelgrid_protos.messages import (
    ConnectResponse,
    GetInventoryRequest,
    GetNodePlanRequest,
    GetSamplesRequest,
    NodePlan,
    Reading,
)
from eelgrid_protos.rpc import NODE_SERVICE, client, handler
from eelgrid_protos.transport import channel, listen

SECOND = 1_000_000_000


class HandClock:
    now_ns = SECOND

    def monotonic_ns(self):
        return self.now_ns

    def wall_ns(self):
        return self.now_ns


def node_named(name, clock):
    spec = NodeSpec(node_name=name, cpu_milli=1000, memory_bytes=10**9, gpus=(GpuSpec(product="openb-g2"),))
    device = SimulatedNode(spec, monotonic_ns=clock.monotonic_ns, seed=1)
    engine = NoEngine()
    node = Node(
        Identity(node_name=name, agent_version="t", simulated=True),
        host=SimulatedHost(cpu_milli=1000, memory_bytes=10**9, load=engine.host_load), engine=engine, clock=clock,
        draw_incarnation=lambda: 1, ticks_most=10, first=survey(device),
    )  # fmt: skip
    return node, device


@asynccontextmanager
async def asked(nodes, clock):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(NODE_SERVICE, NodeApi({n.name: n for n in nodes}, clock)),))
    port = await listen(server, "127.0.0.1:0", tls=None, insecure=False, log=logging.getLogger("test"))
    await server.start()
    async with channel(f"127.0.0.1:{port}", tls=None) as opened:
        yield client(NODE_SERVICE, opened)
    await server.stop(0)


async def test_the_only_node_needs_no_name():
    clock = HandClock()
    node, device = node_named("n0", clock)
    async with asked([node], clock) as api:
        assert (await api.get_inventory(GetInventoryRequest(), timeout=5.0)).inventory == node.inventory
        assert (await api.get_samples(GetSamplesRequest(), timeout=5.0)).samples is None
        node.tick(take_looks(device, node.gpu_uuids), monotonic_ns=clock.now_ns)
        clock.now_ns += 2 * SECOND
        answer = await api.get_samples(GetSamplesRequest(node_name="n0"), timeout=5.0)
        assert answer.age_s == 2.0
        assert answer.samples.gpu_columns[0].reading is Reading.POWER_W


async def test_the_plan_in_force_and_its_lease():
    clock = HandClock()
    node, _ = node_named("n0", clock)
    async with asked([node], clock) as api:
        assert (await api.get_node_plan(GetNodePlanRequest(), timeout=5.0)).plan is None
        plan = NodePlan(node_name="n0", epoch=1, lease_s=60.0)
        node.receive(ConnectResponse(message=plan))
        clock.now_ns += 10 * SECOND
        answer = await api.get_node_plan(GetNodePlanRequest(), timeout=5.0)
        assert (answer.plan, answer.applied.epoch, answer.lease_left_s) == (plan, 1, 50.0)


async def test_a_fleet_needs_a_name_that_it_knows():
    clock = HandClock()
    nodes = [node_named(f"n{index}", clock)[0] for index in range(5)]
    async with asked(nodes, clock) as api:
        assert (await api.get_inventory(GetInventoryRequest(node_name="n3"), timeout=5.0)).inventory.node_name == "n3"
        with pytest.raises(InvalidArgument) as unclear:
            await api.get_inventory(GetInventoryRequest(), timeout=5.0)
        assert unclear.value.violations[0].field == "node_name"
        with pytest.raises(NotFound, match=r"n0, n1, n2, \.\.\."):
            await api.get_samples(GetSamplesRequest(node_name="other"), timeout=5.0)
