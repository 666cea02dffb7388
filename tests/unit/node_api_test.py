"""NodeService over a real loopback server: which node is meant, and its answers."""

import datetime as dt
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.builders.agent import SECOND, ManualClock, build_agent_node, build_devices
from tests.builders.energy import EnergyNode, run_jobs, serve_nodes
from tests.certificates_rig import Authority

from eelgrid_agent.node.inventory import read_each_gpu
from eelgrid_agent.node.node_service import NodeAuthorizer
from eelgrid_protos.faults import InvalidArgument, NotFound, PermissionDenied
from eelgrid_protos.messages import (
    AnomalyKind,
    Assignment,
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
    ProcessSpec,
    Reading,
    UnownedReason,
)
from eelgrid_protos.roles import RoleRules, parse_grants
from eelgrid_protos.rpc import NODE_SERVICE, build_client
from eelgrid_protos.transport import open_channel

SILENT = logging.getLogger("test.node_api")


def node_named(name, clock):
    device = build_devices(clock, name)
    return build_agent_node(device, clock, name), device


@asynccontextmanager
async def asked(nodes, clock):
    async with serve_nodes(nodes, clock) as port, open_channel(f"127.0.0.1:{port}", tls=None) as opened:
        yield build_client(NODE_SERVICE, opened)


async def test_the_only_node_needs_no_name():
    clock = ManualClock()
    node, device = node_named("n0", clock)
    async with asked([node], clock) as api:
        assert (await api.get_inventory(GetInventoryRequest(), timeout=5.0)).inventory == node.inventory
        assert (await api.get_samples(GetSamplesRequest(), timeout=5.0)).samples is None
        node.record_tick(read_each_gpu(device, node.gpu_uuids), monotonic_ns=clock.now_ns)
        clock.now_ns += 2 * SECOND
        answer = await api.get_samples(GetSamplesRequest(node_name="n0"), timeout=5.0)
        assert answer.age_s == 2.0
        assert answer.samples.gpu_columns[0].reading is Reading.POWER_W


async def test_the_plan_in_force_and_its_lease():
    clock = ManualClock()
    node, _ = node_named("n0", clock)
    async with asked([node], clock) as api:
        assert (await api.get_node_plan(GetNodePlanRequest(), timeout=5.0)).plan is None
        plan = NodePlan(node_name="n0", epoch=1, lease_s=60.0)
        node.on_message(ConnectResponse(message=plan))
        clock.now_ns += 10 * SECOND
        answer = await api.get_node_plan(GetNodePlanRequest(), timeout=5.0)
        assert (answer.plan, answer.applied.epoch, answer.lease_left_s) == (plan, 1, 50.0)


async def test_a_plan_shows_no_values_of_environments():
    clock = ManualClock()
    node, _ = node_named("n0", clock)
    process = ProcessSpec(argv=("train",), working_directory="/", environment={"TOKEN": "secret"})
    held = Assignment(workload_id="w", replica=0, process=process, attempt=1, replicas=1)
    async with asked([node], clock) as api:
        node.on_message(ConnectResponse(message=NodePlan(node_name="n0", epoch=1, lease_s=60.0, assignments=(held,))))
        (shown,) = (await api.get_node_plan(GetNodePlanRequest(), timeout=5.0)).plan.assignments
        assert shown == replace(held, process=replace(process, environment={"TOKEN": "***"}))


async def test_a_fleet_needs_a_name_that_it_knows():
    clock = ManualClock()
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
    site = run_jobs(tmp_path)
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


def door_of(rules, *, log=SILENT):
    return NodeAuthorizer(rules, ["n0"], now_s=time.time, monotonic_s=time.monotonic, log=log)


async def status_of(port, files):
    """How a read of the node's inventory ends for the holder of a certificate."""
    async with open_channel(f"127.0.0.1:{port}", tls=files, options=[("grpc.use_local_subchannel_pool", 1)]) as opened:
        try:
            await build_client(NODE_SERVICE, opened).get_inventory(GetInventoryRequest(), timeout=10.0)
        except PermissionDenied as fault:
            return fault
    return "answered"


@pytest.mark.parametrize(
    ("subject", "demanded", "is_answered"),
    [
        ([("O", "eelgrid:viewer"), ("CN", "alice")], True, True),
        ([("O", "eelgrid:submitter"), ("CN", "alice")], True, True),
        ([("O", "eelgrid:admin"), ("CN", "root")], True, True),
        # What `eelgrid-agent energy` has at hand on the node: the agent's own certificate, or one of all nodes.
        ([("CN", "eelgrid:node:n0")], True, True),
        ([("O", "eelgrid:agent")], True, True),
        ([("CN", "eelgrid:node:other")], True, False),
        ([("CN", "eelgrid:node:other")], False, False),
        ([("O", "eelgrid:veiwer")], False, False),
        ([("CN", "old")], True, False),
        ([("CN", "old")], False, True),
    ],
)
async def test_node_api_answers_by_the_role_of_the_certificate(tmp_path, subject, demanded, is_answered):
    clock, authority = ManualClock(), Authority()
    node, _ = node_named("n0", clock)
    door = door_of(RoleRules(demanded=demanded))
    server = authority.write(tmp_path / "agent", ("CN", "agent"), names=("127.0.0.1",))
    async with serve_nodes([node], clock, tls=server, admit=door.admit) as port:
        ended = await status_of(port, authority.write(tmp_path / "caller", *subject))
    assert (ended == "answered") is is_answered
    assert door.refused_total == (0 if is_answered else 1)
    if not is_answered:
        assert "GetInventory needs the role viewer" in ended.message


async def test_node_api_grants_a_role_to_a_certificate_that_names_none(tmp_path):
    clock, authority = ManualClock(), Authority()
    node, _ = node_named("n0", clock)
    door = door_of(RoleRules(demanded=True, grants=parse_grants(["viewer=CN:grafana"])))
    server = authority.write(tmp_path / "agent", ("CN", "agent"), names=("127.0.0.1",))
    async with serve_nodes([node], clock, tls=server, admit=door.admit) as port:
        assert await status_of(port, authority.write(tmp_path / "caller", ("CN", "grafana"))) == "answered"


async def test_node_api_refuses_on_an_open_connection_whose_certificate_has_ended(tmp_path):
    clock, authority, now_s = ManualClock(), Authority(), [time.time()]
    node, _ = node_named("n0", clock)
    door = NodeAuthorizer(
        RoleRules(demanded=True), ["n0"], now_s=lambda: now_s[0], monotonic_s=time.monotonic, log=SILENT
    )
    server = authority.write(tmp_path / "agent", ("CN", "agent"), names=("127.0.0.1",))
    caller = authority.write(tmp_path / "caller", ("O", "eelgrid:viewer"), lasts=dt.timedelta(hours=1))
    async with (
        serve_nodes([node], clock, tls=server, admit=door.admit) as port,
        open_channel(f"127.0.0.1:{port}", tls=caller) as opened,
    ):
        api = build_client(NODE_SERVICE, opened)
        assert (await api.get_inventory(GetInventoryRequest(), timeout=10.0)).inventory.node_name == "n0"
        now_s[0] += 2 * 3600.0
        with pytest.raises(PermissionDenied, match="needs a certificate in date"):
            await api.get_inventory(GetInventoryRequest(), timeout=10.0)


async def test_a_call_that_the_node_table_forgot_is_for_administrators_alone(tmp_path):
    clock, authority = ManualClock(), Authority()
    node, _ = node_named("n0", clock)
    door = door_of(RoleRules(demanded=True))
    forgotten = f"/{NODE_SERVICE.name}/SetNodePower"

    def admit(_path, context):
        door.admit(forgotten, context)

    server = authority.write(tmp_path / "agent", ("CN", "agent"), names=("127.0.0.1",))
    async with serve_nodes([node], clock, tls=server, admit=admit) as port:
        for role, ended in (("admin", "answered"), ("submitter", "refused"), ("agent", "refused")):
            found = await status_of(port, authority.write(tmp_path / f"caller-{role}", ("O", f"eelgrid:{role}")))
            assert (found == "answered") is (ended == "answered")


async def test_refusals_of_the_node_api_do_not_fill_the_log(tmp_path, caplog):
    clock, authority = ManualClock(), Authority()
    node, _ = node_named("n0", clock)
    door = door_of(RoleRules(demanded=True), log=logging.getLogger("test.node_api.quiet"))
    server = authority.write(tmp_path / "agent", ("CN", "agent"), names=("127.0.0.1",))
    knocking = authority.write(tmp_path / "old", ("CN", "old"))
    async with serve_nodes([node], clock, tls=server, admit=door.admit) as port:
        with caplog.at_level(logging.WARNING, "test.node_api.quiet"):
            async with open_channel(f"127.0.0.1:{port}", tls=knocking) as opened:
                for _ in range(5):
                    with pytest.raises(PermissionDenied):
                        await build_client(NODE_SERVICE, opened).get_inventory(GetInventoryRequest(), timeout=10.0)
    lines = [record.getMessage() for record in caplog.records if record.name == "test.node_api.quiet"]
    assert door.refused_total == 5
    assert len(lines) == 1
    assert "certificate='CN=old'" in lines[0]
