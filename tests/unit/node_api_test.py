"""NodeService over a real loopback server: which node is meant, and its answers."""

from contextlib import asynccontextmanager

import pytest
from tests.energy_rig import SECOND, EnergyNode, HandClock, serving, working

from eelgrid_agent.engine import NoEngine
from eelgrid_agent.host import SimulatedHost
from eelgrid_agent.node import Node
from eelgrid_agent.simulation import GpuSpec, NodeSpec, SimulatedNode
from eelgrid_agent.survey import Identity, survey, take_looks
from eelgrid_protos.faults import InvalidArgument, NotFound
from eelgrid_protos.messages import (
    AnomalyKind,
    AttributionConfidence,
    AttributionMethod,
    ConnectResponse,
    EnergyMethod,
    EnergyPart,
    EnergyStatus,
    GetInventoryRequest,
    GetNodeEnergyRequest,
    GetNodeEnergyResponse,
    GetNodePlanRequest,
    GetSamplesRequest,
    NodePlan,
    OwnerKind,
    Reading,
    UnownedReason,
)
from eelgrid_protos.rpc import NODE_SERVICE, client
from eelgrid_protos.transport import channel


def node_named(name, clock):
    spec = NodeSpec(node_name=name, cpu_milli=1000, memory_bytes=10**9, gpus=(GpuSpec(product="openb-g2"),))
    device = SimulatedNode(spec, monotonic_ns=clock.monotonic_ns, seed=1)
    engine = NoEngine()
    node = Node(
        Identity(node_name=name, agent_version="t", simulated=True),
        host=SimulatedHost(cpu_milli=1000, memory_bytes=10**9, load=engine.host_load, monotonic_ns=clock.monotonic_ns), engine=engine, clock=clock,
        draw_incarnation=lambda: 1, ticks_most=10, first=survey(device),
    )  # fmt: skip
    return node, device


@asynccontextmanager
async def asked(nodes, clock):
    async with serving(nodes, clock) as port, channel(f"127.0.0.1:{port}", tls=None) as opened:
        yield client(NODE_SERVICE, opened)


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


async def test_there_is_a_word_for_why_nothing_is_known_of_joules(tmp_path):
    site = EnergyNode(tmp_path)
    silent, _ = node_named("n1", site.clock)
    async with asked([site.node, silent], site.clock) as api:
        for name, status in (("n0", EnergyStatus.NOT_YET), ("n1", EnergyStatus.NOT_KEPT)):
            answer = await api.get_node_energy(GetNodeEnergyRequest(node_name=name), timeout=5.0)
            assert answer == GetNodeEnergyResponse(status=status)
        # A tick alone says what was spent and not by whom.
        site.run(1)
        assert (
            await api.get_node_energy(GetNodeEnergyRequest(node_name="n0"), timeout=5.0)
        ).status is EnergyStatus.NOT_YET
        site.run(4)
        assert (
            await api.get_node_energy(GetNodeEnergyRequest(node_name="n0"), timeout=5.0)
        ).status is EnergyStatus.KNOWN


async def test_the_parts_of_a_device_add_up_to_what_its_samples_say(tmp_path):
    """Over the wire, to the millijoule, at looks while jobs begin and end."""
    site = EnergyNode(tmp_path)
    async with asked([site.node], site.clock) as api:
        for look in range(40):
            if look == 3:
                site.job(0, 11, job=1)
                site.load(0, 0.7)
            if look == 9:
                site.job(0, 12, job=2)
            if look == 20:
                site.device.end_process(site.uuid(0), 11)
            if look == 30:
                site.device.faults.reset_counter(site.uuid(1))
            site.run(5)
            answer = await api.get_node_energy(GetNodeEnergyRequest(), timeout=5.0)
            column = (await api.get_samples(GetSamplesRequest(), timeout=5.0)).samples.gpu_columns[1]
            assert column.reading is Reading.ENERGY_J
            for device, energy_j in zip(answer.devices, column.values, strict=True):
                owned_mj = sum(row.energy_mj for row in answer.owners if row.gpu_uuid == device.gpu_uuid)
                unowned_mj = sum(one.energy_mj for one in device.unowned)
                assert device.total_mj == owned_mj + unowned_mj == round(1000 * energy_j)
    assert {row.owner.job for row in answer.owners} == {"1", "2"}
    assert all(row.energy_mj > 10_000 for row in answer.owners if row.part is EnergyPart.ACTIVE)


async def test_whose_the_joules_are_how_that_is_known_and_what_is_wrong(tmp_path):
    site = working(tmp_path)
    async with asked([site.node], site.clock) as api:
        answer = await api.get_node_energy(GetNodeEnergyRequest(), timeout=5.0)
    shared, sliced, old = answer.devices
    assert [one.gpu_uuid for one in answer.devices] == list(site.node.gpu_uuids)
    assert (shared.estimate.method, old.estimate.method) == (EnergyMethod.COUNTER, EnergyMethod.INTEGRATED)
    assert shared.estimate.uncertainty_j == pytest.approx(0.05 * shared.estimate.energy_j, rel=0.1)
    assert shared.estimate.seconds == 599.0
    assert {one.reason for one in shared.unowned} == {UnownedReason.UNALLOCATED, UnownedReason.UNATTRIBUTED}
    found = {
        (row.owner.kind, row.owner.job or row.owner.workload, row.gpu_instance_id, row.method, row.confidence)
        for row in answer.owners
        if row.energy_mj > 50_000_000 or row.owner.workload
    }
    busy = site.node.inventory.gpus[1].gpu_instances[0].id
    method, confidence = AttributionMethod, AttributionConfidence
    assert found == {
        (OwnerKind.SLURM, "1", None, method.PROCESS_SM, confidence.MEDIUM),
        (OwnerKind.SLURM, "2", None, method.PROCESS_SM, confidence.MEDIUM),
        (OwnerKind.SLURM, "3", busy, method.MIG_ACTIVITY, confidence.MEDIUM),
        (OwnerKind.WORKLOAD, "train", None, method.EXCLUSIVE, confidence.MEDIUM),
    }
    # Processes are told of the last interval only, with their ids; everything of it adds up to the mean power.
    assert {row.owner.pid for row in answer.recent if row.owner.kind is OwnerKind.SLURM} == {11, 12, 21}
    assert not any(row.owner.pid for row in answer.owners)
    recent_mj = sum(row.energy_mj for row in answer.recent if row.gpu_uuid == shared.gpu_uuid)
    drawn_w = site.device.devices[0].power_mw / 1000
    assert recent_mj / 1000 / shared.recent_s == pytest.approx(drawn_w, rel=0.01)
    (held,) = (one for one in answer.anomalies if one.kind is AnomalyKind.HELD_IDLE)
    assert (held.gpu_uuid, held.owner.workload) == (old.gpu_uuid, "train")
    assert (held.lasted_s, held.since_ns) == (535.0, site.clock.now_ns - 535 * SECOND)
    assert 0 < held.wasted_mj < old.total_mj
    assert sliced.total_mj > 0
