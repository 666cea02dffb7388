"""Agents that name no pool are in the pool `default`: it is enforced, partitioned, listed and shown by that name."""

import pytest
from tests.builders.objectives import build_powered_node, run_objectives

from eelgrid_controller.clock import RecentLatencies
from eelgrid_controller.server.grpc.resource_views import ResourceViews
from eelgrid_controller.server.http.live_model import FleetCells, gpu_details
from eelgrid_controller.state.policy import is_pool_enforced, is_pool_partitioned
from eelgrid_controller.state.telemetry import GpuReadings
from eelgrid_protos.messages import EnforcementMode, Policy, PoolMode


def policy(name, mode=EnforcementMode.ENFORCE):
    return Policy(pools=(PoolMode(pool=name, mode=mode, partitioned=True),))


@pytest.mark.parametrize(("pool", "is_it"), [("", True), ("default", True), ("a", False)])
def test_a_policy_names_it(pool, is_it):
    assert is_pool_enforced(policy("default"), pool) is is_it
    assert is_pool_partitioned(policy("default"), pool) is is_it
    assert not is_pool_enforced(policy("default", EnforcementMode.OBSERVE), pool)


async def test_its_nodes_are_changed_once_it_is_enforced():
    async with run_objectives() as world:
        await world.join(build_powered_node("n1", pool=""))
        await world.enforce("p")
        assert not world.loop.core.node_plan("n1").enforce
        await world.enforce("default")
        assert world.loop.core.node_plan("n1").enforce


async def test_it_is_shown_by_its_name():
    async with run_objectives() as world:
        await world.join(build_powered_node("n1", pool=""), build_powered_node("n2", pool="a"))
        views = ResourceViews(
            telemetry=world.telemetry,
            decisions=RecentLatencies(10),
            now_ns=world.clock.now_ns,
            monotonic_s=world.clock.monotonic_s,
        )
        state = world.loop.core.state
        assert [views.node(record).inventory.pool for record in state.nodes.values()] == ["default", "a"]
        cells = FleetCells()
        cells.build(state.nodes)
        assert cells.full_columns()["nodes"]["pool"] == ["default", "a"]
        record = state.nodes["n1"]
        assert gpu_details(state, record, record.inventory.gpus[0], GpuReadings(), None)["pool"] == "default"
        assert record.inventory.pool == ""  # as its agent said: the journal and metrics keep that
