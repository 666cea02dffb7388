"""A follower answers reads whose callers allow stale ones, and says how old each answer is; everything else is the leader's."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from tests import postgres_rig
from tests.builders.cluster import build_node, build_request
from tests.builders.server import run_controller
from tests.builders.stores import postgres_store
from tests.e2e.processes import free_port
from tests.unit.postgres_standby_test import Standby, end_lease
from tests.waiting import wait_until

from eelgrid.async_client import AsyncClient
from eelgrid.client import Client
from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import digest_of
from eelgrid_protos import rpc, transport
from eelgrid_protos.faults import NotLeader
from eelgrid_protos.leader_calls import connect_leader
from eelgrid_protos.messages import (
    CancelWorkloadRequest,
    ListNodesRequest,
    ListWorkloadsRequest,
    WatchSummaryRequest,
    WorkloadPhase,
)
from eelgrid_protos.stale_reads import Staleness, allows_stale, parse_staleness


def test_what_is_sent_behind_an_answer_is_read_back():
    sent = Staleness(age_s=1.25, revision=12, timeline=3, epoch=4)
    assert parse_staleness((("x", "y"), *sent.to_metadata())) == sent


@pytest.mark.parametrize("metadata", [None, (), (("eelgrid-stale-age-ms", "1"),)])
def test_an_answer_without_all_of_it_is_of_the_leader(metadata):
    assert parse_staleness(metadata) is None


def test_an_answer_whose_age_is_no_number_is_not_believed():
    sent = dict(Staleness(age_s=1.0, revision=1, timeline=1, epoch=1).to_metadata())
    assert parse_staleness((sent | {"eelgrid-stale-age-ms": "young"}).items()) is None


@pytest.mark.parametrize("value", ["", "default", "consistent"])
def test_only_the_word_allows_it(value):
    assert not allows_stale((("eelgrid-consistency", value),))
    assert allows_stale((("a", b"b"), ("eelgrid-consistency", "stale")))


needs_server = postgres_rig.needs_server


@pytest.fixture
def store():
    with postgres_store(None) as found:
        yield found


@contextlib.asynccontextmanager
async def follower(store, folder):
    """A controller that leads, with a node and a job, and one that has followed all of it; the address of the second."""
    port = free_port()
    async with run_controller(folder / "one", database=store.url) as leader:
        await leader.join(build_node(gpus=8))
        await leader.controller.loop.submit(build_request("job-a"))
        second = Standby(folder / "two", store.url, listen=f"127.0.0.1:{port}")
        try:
            await wait_until(lambda: second.controller.following is not None)
            standby = second.controller.following._standby
            await wait_until(lambda: standby.applied_seq == leader.controller.loop.core.state.revision)
            await wait_until(lambda: standby.age_s is not None)
            yield leader, second, f"127.0.0.1:{port}"
        finally:
            await second.close()


@needs_server
async def test_a_follower_answers_what_allows_it_and_names_the_leader_for_the_rest(store, tmp_path):
    async with (
        follower(store, tmp_path) as (leader, second, address),
        transport.open_channel(address, tls=None) as channel,
    ):
        operators, found = rpc.build_client(rpc.OPERATOR_SERVICE, channel), []
        request = ListWorkloadsRequest(page_size=10)
        answer = await operators.list_workloads(request, on_staleness=found.append)
        assert [one.workload_id for one in answer.workloads] == ["job-a"]
        live = await leader.operators.list_workloads(request)
        assert answer.workloads == live.workloads
        (staleness,) = found
        assert 0.0 <= staleness.age_s < 30.0
        assert (staleness.revision, staleness.epoch) == (leader.controller.loop.core.state.revision, 1)
        for call in (
            operators.list_workloads(request),
            operators.cancel_workload(CancelWorkloadRequest(workload_id="job-a"), on_staleness=found.append),
            anext(operators.watch_summary(WatchSummaryRequest())),
        ):
            with pytest.raises(NotLeader) as caught:
                await call
            assert caught.value.leader == leader.address
        assert len(found) == 1
        assert second.controller.following._reads.answers == 1
        nodes = await operators.list_nodes(ListNodesRequest(), on_staleness=found.append)
        assert [one.inventory.node_name for one in nodes.nodes] == list(leader.controller.loop.core.state.nodes)


@needs_server
async def test_each_read_that_may_be_stale_is_answered(store, tmp_path):
    async with follower(store, tmp_path) as (leader, _, address), AsyncClient(address) as client:
        stale = client.allow_stale()
        assert (await stale.get_summary()).placed == 1
        assert (await stale.who_am_i()).controller_version
        assert (await stale.get_policy()) == leader.controller.loop.core.state.policy
        assert (await stale.get_workload("job-a")).workload_id == "job-a"
        assert (await stale.explain_workload("job-a")).workload.workload_id == "job-a"
        assert len([one async for one in stale.list_gpus()]) == 8
        assert [one.plan.node_name async for one in stale.list_plans()] == list(leader.controller.loop.core.state.nodes)
        assert [one async for one in stale.list_queues()] == []
        assert stale.staleness.age_s < 30.0
        # A change goes on to the leader.
        await stale.cancel_workload("job-a")
        assert leader.controller.loop.core.state.workloads["job-a"].phase.is_ended
        assert client.staleness is None


@needs_server
async def test_the_age_grows_while_the_database_is_away_and_reads_go_on(store, tmp_path):
    async with follower(store, tmp_path) as (_, second, address), AsyncClient(address) as client:
        stale, standby = client.allow_stale(), second.controller.following._standby
        standby._follow = lambda: None
        await asyncio.sleep(0.5)
        await stale.get_summary()
        first = stale.staleness
        await wait_until(lambda: standby.age_s > first.age_s + 0.5)
        await stale.get_summary()
        assert stale.staleness.age_s > first.age_s
        assert stale.staleness.revision == first.revision


@needs_server
async def test_a_stale_client_reads_where_nobody_is_at_the_first_address(store, tmp_path):
    gone = free_port()
    async with follower(store, tmp_path) as (_, _, address):

        def read():
            with Client(f"127.0.0.1:{gone},{address}", timeout_s=5.0) as client:
                stale = client.allow_stale()
                return [one.workload_id for one in stale.list_workloads()], stale.staleness, client.address

        jobs, staleness, preferred = await asyncio.to_thread(read)
        assert jobs == ["job-a"]
        assert staleness.epoch == 1
        assert preferred == f"127.0.0.1:{gone}"


@needs_server
async def test_eelctl_goes_to_any_controller_for_reads_and_to_the_leader_for_changes(store, tmp_path):
    async with follower(store, tmp_path) as (leader, _, address):
        found = []

        def call():
            client = connect_leader((address,), tls=None, on_staleness=found.append)
            with contextlib.closing(client):
                jobs = client.list_workloads(ListWorkloadsRequest(page_size=10), timeout=5.0).workloads
                client.cancel_workload(CancelWorkloadRequest(workload_id="job-a"), timeout=5.0)
                return [one.workload_id for one in jobs]

        assert await asyncio.to_thread(call) == ["job-a"]
        assert leader.controller.loop.core.state.workloads["job-a"].phase.is_ended
        assert len(found) == 1


@needs_server
async def test_reads_leave_no_mark_on_the_state_that_the_next_leader_has(store, tmp_path):
    """A core parks work that may not start; the work that was released since must be tried by the next leader."""
    async with follower(store, tmp_path) as (leader, second, address), AsyncClient(address) as client:
        loop, stale = leader.controller.loop, client.allow_stale()
        await loop.submit(replace(build_request("job-b"), hold=True))
        standby = second.controller.following._standby
        await wait_until(lambda: standby.applied_seq == loop.core.state.revision)
        await asyncio.sleep(0.3)
        assert (await stale.get_workload("job-b")).phase is WorkloadPhase.PENDING
        assert loop.core.state.pending.is_parked("job-b")
        assert not standby._state.pending.is_parked("job-b")
        await loop.release("job-b")
        await leader.controller.stop()
        await asyncio.wait_for(second.starting, 30.0)
        second_loop = second.controller.loop
        expected = await asyncio.to_thread(recover_state, second_loop.journal, ClusterState)
        assert digest_of(second_loop.core.state.dump()) == digest_of(expected.state.dump())
        assert not second_loop.core.state.pending.is_parked("job-b")
        assert second_loop.core.state.revision >= expected.state.revision


@needs_server
async def test_a_copy_is_made_only_of_what_has_changed(store, tmp_path):
    async with follower(store, tmp_path) as (leader, second, _):
        standby = second.controller.following._standby
        first = standby.copy_state()
        await wait_until(lambda: standby.copy_state(first).looked_s > first.looked_s)
        assert standby.copy_state(first).state is first.state
        await leader.controller.loop.submit(build_request("job-c"))
        await wait_until(lambda: standby.copy_state(first).state is not first.state)
        assert "job-c" in standby.copy_state(first).state.workloads


@needs_server
async def test_a_state_that_is_built_anew_is_shown_to_nobody(store, tmp_path):
    async with follower(store, tmp_path) as (_, second, _):
        standby = second.controller.following._standby
        assert standby.copy_state() is not None
        standby._follow = lambda: None
        await asyncio.sleep(0.3)
        standby._rebuild_at_s = 0.0
        standby._rebuild()
        assert standby.copy_state() is None
        end_lease(store)
        await asyncio.wait_for(second.starting, 30.0)
        assert standby.copy_state() is None
