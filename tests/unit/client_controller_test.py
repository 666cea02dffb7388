"""The Python clients against a real controller: what every call answers, watches over a restart, waiting, TLS."""

import asyncio
import contextlib
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
import trustme
from tests.builders.cluster import build_node
from tests.builders.server import LOG, run_controller
from tests.client_rig import KINDS, QUICK, collect
from tests.e2e.processes import free_address
from tests.fakes.operators import FakeOperators

from eelgrid import (
    DrainNodes,
    EnergyGrouping,
    MeasuredPoint,
    NodeShape,
    PlaceAnew,
    PowerBudget,
    ResourceRequest,
    Retries,
    SetWeights,
    TlsFiles,
    TrainingPromise,
    WhatIfChange,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
    errors,
)
from eelgrid_protos import messages, rpc, transport

HOUR_NS = 3600 * 10**9


def spec(name="task", gpus=1, **changes):
    request = ResourceRequest(cpu_milli=1000, gpu_count=gpus, gpu_milli=1000 if gpus else 0)
    return WorkloadSpec(name=name, request=request, **changes)


@pytest.fixture(params=KINDS)
def connect(request):
    return lambda address, **settings: KINDS[request.param](address, **({"retries": QUICK} | settings))


@asynccontextmanager
async def cluster(tmp_path, connect, *nodes, **options):
    async with run_controller(tmp_path, **options) as rig, connect(rig.address) as client:
        await rig.join(*(nodes or (build_node("n1"), build_node("n2"))))
        # The first call of a kernel may compile it.
        yield client.with_timeout(300.0)


async def test_nobody_submits_work_under_the_id_of_a_job_of_an_engine(tmp_path, connect):
    """It would be taken for that job: a job of Slurm was cancelled with it, or placed where it was."""
    async with run_controller(tmp_path) as rig, connect(rig.address) as client:
        rig.controller.loop.outside.own_ids.add("slurm-")
        await rig.join(build_node("n1"))
        with pytest.raises(errors.InvalidArgumentError, match="begins with 'slurm-'"):
            await client.submit_workload(spec(), workload_id="slurm-1001")
        assert (await client.submit_workload(spec(), workload_id="slurmy-1")).workload_id == "slurmy-1"


async def test_work_from_submission_to_its_end(tmp_path, connect):
    async with cluster(tmp_path, connect) as client:
        job = spec("train", user="ada", kind=WorkloadKind.TRAINING_JOB, training=TrainingPromise(energy_weight=0.5))
        placed = await client.submit_workload(job)
        assert placed.phase is WorkloadPhase.PLACED
        assert await client.submit_workload(placed.spec, workload_id=placed.workload_id) == placed
        with pytest.raises(errors.AlreadyExistsError):
            await client.submit_workload(spec("other"), workload_id=placed.workload_id)
        assert await client.get_workload(placed.workload_id) == placed
        assert await collect(client.list_workloads(user="ada", phases=[WorkloadPhase.PLACED])) == [placed]
        assert await collect(client.list_workloads(user="bob")) == []
        (row,) = await collect(client.list_workload_summaries(user="ada", phases=[WorkloadPhase.PLACED]))
        assert (row.workload_id, row.name, row.phase) == (placed.workload_id, placed.spec.name, placed.phase)
        assert await collect(client.list_workload_summaries(user="bob")) == []
        assert (await client.explain_workload(placed.workload_id)).workload == placed
        assert json.loads(await client.export_decision(placed.workload_id))
        await client.report_progress(placed.workload_id, 3.0)
        service = await client.submit_workload(spec("chat", kind=WorkloadKind.INFERENCE_SERVICE))
        assert len((await client.scale_workload(service.workload_id, 2)).placements) == 2
        assert (await client.cancel_workload(placed.workload_id)).phase is WorkloadPhase.CANCELLED
        assert (await client.get_summary()).placed == 1
        with pytest.raises(errors.NotFoundError):
            await client.get_workload("nothing")


async def test_the_cluster_and_its_policy(tmp_path, connect):
    async with cluster(tmp_path, connect) as client:
        assert (await client.who_am_i()).subject == ""
        assert [node.inventory.node_name for node in await collect(client.list_nodes())] == ["n1", "n2"]
        assert [gpu.node_name for gpu in await collect(client.list_gpus(node_name="n2"))] == ["n2", "n2"]
        assert [status.plan.node_name for status in await collect(client.list_plans())] == ["n1", "n2"]
        assert (await client.reconcile_node("n1")).inventory.node_name == "n1"
        policy = await client.get_policy()
        changed = await client.update_policy(replace(policy, lease_s=90.0))
        assert (changed.lease_s, changed.revision) == (90.0, policy.revision + 1)
        with pytest.raises(errors.AbortedError):
            await client.update_policy(replace(policy, lease_s=30.0))
        drained = await client.drain_node("n2", gpus=["1"], reason="ecc", dry_run=True)
        assert (drained.node.cordons, drained.workloads) == ((), ())
        assert not (await client.cordon_node("n2", gpus=["1"], reason="ecc")).was_cordoned
        (cordon,) = (await client.drain_node("n2", gpus=["1"], grace_s=60.0, force=True)).node.cordons
        assert (cordon.draining, cordon.force, cordon.deadline_ns > 0) == (True, True, True)
        assert (await client.uncordon_node("n2", gpus=["1"])).was_cordoned
        with pytest.raises(errors.InvalidArgumentError, match="force"):
            await client.drain_node("n2", force=True)
        assert (await client.remove_node("n2", force=True, dry_run=True)).connected
        assert len(await collect(client.list_nodes())) == 2
        calls = [entry.call for entry in await collect(client.list_audit_entries())]
        assert "UpdatePolicy" in calls
        assert await collect(client.list_audit_entries(call="SubmitWorkload")) == []
        assert len(await collect(client.watch_summary(interval_s=0.1), 2)) == 2


async def test_proposals_measurements_and_energy(tmp_path, connect):
    async with cluster(tmp_path, connect) as client:
        await client.submit_workload(spec("train"))
        drained = await client.what_if([WhatIfChange(change=DrainNodes(node_names=("n1",)))])
        assert drained.after.nodes_ready == drained.before.nodes_ready - 1
        await client.what_if([WhatIfChange(change=PlaceAnew())], differences_most=5)
        assert (await client.plan_capacity(NodeShape(like_node="n1"))).nodes == 0
        assert (await client.start_shadow(SetWeights(objective="energy"))).objective == "energy"
        assert (await client.get_shadow()).objective == "energy"
        assert (await client.stop_shadow()).objective == "energy"
        await client.recommend_moves(moves_most=1)
        for call in (client.apply_moves("gone"), client.apply_partitions("gone")):
            with pytest.raises(errors.NotFoundError):
                await call
        assert (await client.list_partitions()).gpus == ()
        await client.recommend_partitions()
        point = MeasuredPoint(profile="llama", gpu_model="G2", throughput_hz=5.0)
        assert await client.record_points([point]) == 1
        assert await collect(client.list_points(profile="llama")) == [point]
        assert (await client.list_promises()).services == ()
        assert await collect(client.list_interference()) == []
        budget = PowerBudget(scope=messages.BudgetScope.CLUSTER, limit_w=5000.0)
        assert (await client.imagine_budgets([budget])).budgets[0].budget == budget
        assert (await client.list_spending()).limits == ()
        end_ns = time.time_ns()
        stretch = {"begin_ns": end_ns - 24 * HOUR_NS, "end_ns": end_ns}
        assert (await client.query_energy(**stretch, group_by=["user"])).groups == ()
        answers = await client.query_energy_report(**stretch, groupings=[EnergyGrouping(group_by=("user",))])
        assert len(answers) == 1
        exported = await client.list_energy_exporters()
        assert exported.exporters == ()
        begin_ns = exported.settled_ns // HOUR_NS * HOUR_NS - HOUR_NS
        mark = await client.confirm_energy_export("lake", begin_ns=begin_ns, end_ns=begin_ns + HOUR_NS)
        assert mark.name == "lake"
        await client.remove_energy_exporter("lake")


async def test_a_watch_survives_a_restart_of_the_controller(tmp_path, connect):
    address, changes = free_address(), asyncio.Queue()

    async def watch(client):
        async for workload in client.watch_workloads():
            changes.put_nowait((workload.spec.name, workload.revision))

    async def named(*names):
        seen = set()
        async with asyncio.timeout(30):
            while not set(names) <= {name for name, _ in seen}:
                one = await changes.get()
                assert one not in seen, "delivered twice"
                seen.add(one)
        return seen

    async with connect(address, retries=Retries(attempts=50, pause_first_s=0.01, pause_longest_s=0.1)) as client:
        async with run_controller(tmp_path, listen=address) as rig:
            await rig.join(build_node("n1"))
            watching = asyncio.create_task(watch(client))
            await client.submit_workload(spec("a"))
            await client.submit_workload(spec("b"))
            before = await named("a", "b")
        async with run_controller(tmp_path, listen=address) as rig:
            await rig.join(build_node("n1"))
            await client.submit_workload(spec("c"))
            assert not before & await named("c")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_wait(tmp_path, connect):
    async with cluster(tmp_path, connect, build_node("n1", gpus=1)) as client:
        first = await client.submit_workload(spec("first"))
        assert await client.wait(first.workload_id) == first
        second = await client.submit_workload(spec("second"))
        with pytest.raises(errors.WaitTimeoutError, match=rf"{second.workload_id} .*\(pending: ") as caught:
            await client.wait(second.workload_id, timeout_s=0.2)
        assert caught.value.workload.phase is WorkloadPhase.PENDING
        waiting = asyncio.create_task(awaited(client.wait(second.workload_id, timeout_s=30.0)))
        await client.cancel_workload(first.workload_id)
        assert (await waiting).phase is WorkloadPhase.PLACED
        assert (await client.wait(first.workload_id, until=WorkloadPhase.CANCELLED)).workload_id == first.workload_id
        with pytest.raises(errors.WorkloadEndedError) as caught:
            await client.wait(first.workload_id)
        assert caught.value.workload.workload_id == first.workload_id
        found = await client.wait(second.workload_id, until=lambda workload: bool(workload.placements))
        assert found.placements[0].node_name == "n1"


async def awaited(call):
    return await call


async def cancel_once_connected(client, workload_id):
    """gRPC pauses before it connects anew, for longer than a call is repeated where the machine is busy."""
    while True:
        with contextlib.suppress(errors.UnavailableError):
            return await client.cancel_workload(workload_id)
        await asyncio.sleep(0.05)


async def test_waiting_outlasts_a_restart_of_the_controller(tmp_path, connect):
    address = free_address()
    async with connect(address) as client:
        async with run_controller(tmp_path, listen=address) as rig:
            await rig.join(build_node("n1", gpus=1))
            await client.submit_workload(spec("first"), workload_id="first")
            await client.submit_workload(spec("second"), workload_id="second")
            waiting = asyncio.create_task(awaited(client.wait("second", timeout_s=60.0)))
            await asyncio.sleep(0.1)
        async with run_controller(tmp_path, listen=address) as rig:
            await rig.join(build_node("n1", gpus=1))
            await cancel_once_connected(client, "first")
            assert (await waiting).phase is WorkloadPhase.PLACED


def write_certificate(folder, authority, name):
    leaf = authority.issue_cert("localhost", "127.0.0.1", common_name=name)
    leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
    leaf.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    return TlsFiles(folder / "certificate.pem", folder / "key.pem", folder / "authority.pem")


async def test_mutual_tls_by_argument_and_by_environment(tmp_path, connect, monkeypatch):
    files = write_certificate(tmp_path, trustme.CA(), "ada")
    server = grpc.aio.server(options=transport.server_options())
    server.add_generic_rpc_handlers((rpc.build_handler(rpc.OPERATOR_SERVICE, *FakeOperators().parts),))
    port = await transport.listen_on_address(server, "127.0.0.1:0", tls=files, insecure=False, log=LOG)
    await server.start()
    try:
        async with connect(f"localhost:{port}", tls=files) as client:
            assert (await client.get_summary()).nodes_ready == 1
        for name, path in (("CERTIFICATE", "certificate"), ("KEY", "key"), ("AUTHORITY", "authority")):
            monkeypatch.setenv(f"EELGRID_TLS_{name}", str(tmp_path / f"{path}.pem"))
        async with connect(f"localhost:{port}") as client:
            assert (await client.get_summary()).nodes_ready == 1
        (tmp_path / "other").mkdir()
        stranger = write_certificate(tmp_path / "other", trustme.CA(), "eve")
        async with connect(f"localhost:{port}", tls=stranger) as client:
            with pytest.raises(errors.UnavailableError):
                await client.get_summary()
    finally:
        await server.stop(None)
