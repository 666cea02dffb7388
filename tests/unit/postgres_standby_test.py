"""A warm standby on a real PostgreSQL: it has the leader's state at any time, says who leads, and leads in the same process."""

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests import postgres_rig
from tests.builders.cluster import build_node, build_request
from tests.builders.server import LOG, run_controller
from tests.builders.stores import postgres_store
from tests.e2e.processes import free_port
from tests.waiting import poll_until, wait_until

from eelgrid_controller.clock import Clock
from eelgrid_controller.composition import Controller
from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.errors import JournalFenced
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.stores import follow_store
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import JournalEntry, digest_of
from eelgrid_protos import rpc, transport
from eelgrid_protos.faults import NotLeader
from eelgrid_protos.messages import ConnectRequest, GetSummaryRequest, Hello, ListWorkloadsRequest
from eelgrid_protos.openmetrics import render_prometheus

if not postgres_rig.find_missing():
    import psycopg

    from eelgrid_controller.runtime.postgresql.leadership import LeaseTimes, renew_lease

pytestmark = postgres_rig.needs_server
logging.getLogger("alembic").setLevel(logging.WARNING)


@pytest.fixture
def store():
    with postgres_store(None) as found:
        yield found


@contextlib.contextmanager
def follow(store, folder, **options):
    """A standby whose thread runs; the future of what it leads."""
    standby = follow_store(store.url, folder, fresh_state=ClusterState, new_cluster_id="x", **options)
    with ThreadPoolExecutor(1) as threads:
        try:
            yield standby, threads.submit(standby.lead, "standby:1")
        finally:
            standby.close()


def end_lease(store):
    store.run("UPDATE eelgrid.lease SET expires_at = '-infinity'")


def check_leads(standby, leading, *, within_s=60.0):
    """It leads, and its state is what the journal leads to."""
    journal = leading.result(within_s)
    with contextlib.closing(journal):
        recovered = standby.recover()
        expected = recover_state(journal, ClusterState)
        assert digest_of(recovered.state.dump()) == digest_of(expected.state.dump())
        assert recovered.state.revision == journal.last_seq
        return recovered, expected


async def test_it_follows_and_has_only_the_tail_to_read(store, tmp_path):
    async with run_controller(tmp_path / "one", database=store.url) as leader:
        await leader.join(build_node(gpus=8))
        with follow(store, tmp_path / "two") as (standby, leading):
            for number in range(5):
                await leader.controller.loop.submit(build_request(f"job-{number}"))
            revision = leader.controller.loop.core.state.revision
            await wait_until(lambda: standby.applied_seq == revision)
            # It has read the journal to its end once it has looked again, and found nothing.
            await wait_until(lambda: standby.age_s is not None and standby.age_s < 5.0)
            assert standby.leader == leader.address
            assert (standby.rebuilds, standby.fault, leading.done()) == (0, "", False)
            await leader.controller.stop()
            recovered, expected = await asyncio.to_thread(check_leads, standby, leading)
            assert standby.rebuilds == 0
            assert recovered.replayed == expected.replayed
            assert recovered.checkpoint_seq == expected.checkpoint_seq


async def test_entries_that_were_taken_back_are_noticed(store, tmp_path):
    async with run_controller(tmp_path / "one", database=store.url) as leader:
        loop = leader.controller.loop
        await loop.submit(build_request("job-a"))
        with follow(store, tmp_path / "two") as (standby, leading):
            await wait_until(lambda: standby.applied_seq == loop.core.state.revision)
            # As a leader does with a commit whose end it did not learn, or a promoted standby of the database.
            kept = loop.core.state.revision - 1
            store.run("DELETE FROM eelgrid.journal WHERE seq > %s", kept)
            await wait_until(lambda: standby.rebuilds == 1 and standby.applied_seq == kept)
            end_lease(store)
            await asyncio.to_thread(check_leads, standby, leading)


async def test_a_journal_that_begins_with_a_checkpoint_is_followed_from_there(store, tmp_path):
    options = {"checkpoint_events": 2, "checkpoint_idle_s": 0.0, "retained_events": 0}
    async with run_controller(tmp_path / "one", database=store.url, **options) as leader:
        loop = leader.controller.loop
        await leader.join(build_node(gpus=8))
        for number in range(3):
            before = loop.journal.counters.checkpoints
            for part in "abc":
                await loop.submit(build_request(f"job-{number}{part}"))
            await wait_until(lambda before=before: loop.journal.counters.checkpoints > before)
        assert store.run("SELECT min(seq) FROM eelgrid.journal")[0][0] != 1
        with follow(store, tmp_path / "two") as (standby, leading):
            await wait_until(lambda: standby.applied_seq == loop.core.state.revision)
            assert standby.rebuilds == 0
            await leader.controller.stop()
            await asyncio.to_thread(check_leads, standby, leading)


def test_a_leader_that_stopped_within_a_write_delays_the_next_by_less_than_a_second(store, tmp_path):
    """Roadmap: it was 5 to 10 s, PostgreSQL's limit for idle transactions and a wait for the lock."""
    times = LeaseTimes.of_ttl(10.0)
    with contextlib.closing(store.open(times=times)) as old, psycopg.connect(store.url) as stopped:
        # Exactly what a stopped leader leaves behind: its transaction, with the row of its term.
        stopped.execute("SET application_name = 'eelgrid-controller'")
        stopped.execute("SELECT 1 FROM eelgrid.term FOR SHARE")
        old._keeper._stop.set()
        old._keeper._thread.join()
        end_lease(store)
        began_s = time.monotonic()
        with follow(store, tmp_path) as (_, leading), contextlib.closing(leading.result(10.0)) as new:
            waited_s = time.monotonic() - began_s
            assert new.term.token > old.term.token
        with pytest.raises(psycopg.Error):
            stopped.execute("SELECT 1")
    print(f"leads {waited_s:.2f} s after the lease ended")
    assert waited_s < 4.0


def test_a_writer_of_somebody_else_is_not_ended(store, tmp_path):
    with contextlib.closing(store.open()) as old, psycopg.connect(store.url) as administrator:
        administrator.execute("SELECT 1 FROM eelgrid.term FOR SHARE")
        old._keeper._stop.set()
        old._keeper._thread.join()
        end_lease(store)
        with follow(store, tmp_path) as (standby, leading):
            poll_until(lambda: "lock" in standby.fault, "it says what it waits for")
            administrator.rollback()
            leading.result(15.0).close()


def test_a_renewal_holds_no_lock_between_its_statements(store):
    with contextlib.closing(store.open()) as journal:
        engine = journal._keeper._engine
        with engine.begin() as connection:
            assert renew_lease(connection, journal._term, ttl_s=10.0)
            with psycopg.connect(store.url) as other:
                other.execute("SELECT 1 FROM eelgrid.lease FOR UPDATE NOWAIT")


class Standby:
    """A second controller that waits to lead, in this process."""

    def __init__(self, data, url, **options):
        config = ControllerConfig(
            data=data, database=url, **({"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0"} | options)
        )
        self.controller = Controller(config, tls=None, insecure=False, clock=Clock(), log=LOG)
        self.starting = asyncio.ensure_future(self.controller.start())

    async def close(self):
        if not self.starting.done():
            self.starting.cancel()
            await asyncio.wait((self.starting,))
        else:
            await self.controller.stop()


async def test_a_second_controller_refuses_calls_with_the_leaders_address_and_leads_without_a_restart(store, tmp_path):
    port = free_port()
    async with run_controller(tmp_path / "one", database=store.url) as leader:
        await leader.controller.loop.submit(build_request("job-a"))
        second = Standby(tmp_path / "two", store.url, listen=f"127.0.0.1:{port}")
        try:
            await wait_until(lambda: second.controller.following and second.controller.following._standby.leader)
            async with transport.open_channel(f"127.0.0.1:{port}", tls=None) as channel:
                operators = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
                agents = rpc.build_client(rpc.AGENT_SERVICE, channel)

                async def hello():
                    yield ConnectRequest(message=Hello(incarnation=1, inventory=build_node()))

                for call in (
                    operators.get_summary(GetSummaryRequest(), timeout=5.0),
                    operators.submit_workload(build_request("job-b"), timeout=5.0),
                    anext(agents.connect(hello())),
                ):
                    with pytest.raises(NotLeader, match="leads with epoch 1") as caught:
                        await call
                    assert caught.value.leader == leader.address
                assert "\neelgrid_following 1.0" in render_prometheus(second.controller.following.families()).decode()
                began_s = time.monotonic()
                await leader.controller.stop()
                stopped_s = time.monotonic()
                line = await asyncio.wait_for(second.starting, 30.0)
                led_s = time.monotonic()
                print(f"clean stop took {stopped_s - began_s:.2f} s, then serving after {led_s - stopped_s:.2f} s")
                assert f"listen=127.0.0.1:{port}" in line
                await operators.submit_workload(build_request("job-b"), timeout=5.0)
                listed = (await operators.list_workloads(ListWorkloadsRequest(page_size=10))).workloads
                assert {one.workload_id for one in listed} == {"job-a", "job-b"}
                assert second.controller.loop.term.epoch == 2
                assert "\neelgrid_following 0.0" in render_prometheus(second.controller.following.families()).decode()
        finally:
            await second.close()


async def test_a_standby_that_is_stopped_gives_up_the_folder_and_leads_nothing(store, tmp_path):
    async with run_controller(tmp_path / "one", database=store.url) as leader:
        second = Standby(tmp_path / "two", store.url)
        await wait_until(lambda: second.controller.following and second.controller.following._standby.leader)
        await second.close()
        again = Standby(tmp_path / "two", store.url)
        await wait_until(lambda: again.controller.following and again.controller.following._standby.leader)
        await again.close()
        await leader.controller.loop.submit(build_request("job-a"))
    assert store.run("SELECT epoch FROM eelgrid.term") == [(1,)]


def test_a_leader_that_lost_the_connection_within_a_write_and_was_followed_knows_whether_it_was_done(store, tmp_path):
    with contextlib.closing(store.open()) as old:
        old.append([JournalEntry("node_lost", {"time_ns": 1, "node_name": "a"})])
        # The commit arrives and its answer does not: here, the rows are put there with the old epoch.
        row = old._entry_row(2, JournalEntry("node_lost", {"time_ns": 1, "node_name": "b"}))
        columns = "INSERT INTO eelgrid.journal VALUES (%s, %s, %s, %s, %s)"
        store.run(columns, row["seq"], row["epoch"], row["kind"], row["body"], row["crc32"])
        end_lease(store)
        with contextlib.closing(store.open()):
            old._connection.close()
            old._connection = None
            assert old._was_committed([row], 0, follows_failure=False)
            store.run("DELETE FROM eelgrid.journal WHERE seq = 2")
            with pytest.raises(JournalFenced) as caught:
                old._was_committed([row], 0, follows_failure=False)
            assert caught.value.is_certain
            with pytest.raises(JournalFenced) as caught:
                old._was_committed([], 1, follows_failure=False)
            assert not caught.value.is_certain


def test_a_leader_whose_new_connection_lacks_entries_ends_and_leaves_no_gap(store):
    """As on a standby that was promoted without the last transactions: its row of the term is ours there, too."""
    with contextlib.closing(store.open()) as old:
        old.append([JournalEntry("node_lost", {"time_ns": 1, "node_name": name}) for name in "ab"])
        store.run("DELETE FROM eelgrid.journal WHERE seq = 2")
        old._connection.close()
        old._connection = None
        for _ in range(2):
            with pytest.raises(JournalFenced, match="a standby has replaced the server"):
                old.append([JournalEntry("node_lost", {"time_ns": 1, "node_name": "c"})])
    assert store.run("SELECT seq FROM eelgrid.journal") == [(1,)]


def test_a_leader_notices_another_timeline_when_it_connects_anew(store):
    """As many entries as it knows may be there, and others: the last transaction may have removed what it wrote anew."""
    with contextlib.closing(store.open()) as old:
        old.append([JournalEntry("node_lost", {"time_ns": 1, "node_name": "a"})])
        old._keeper.renew()
        old._keeper._timeline -= 1
        old._connection.close()
        old._connection = None
        with pytest.raises(JournalFenced, match="a standby has replaced the server"):
            old.append([JournalEntry("node_lost", {"time_ns": 1, "node_name": "b"})])
    assert store.run("SELECT count(*) FROM eelgrid.journal") == [(1,)]


def test_a_leader_notices_another_timeline_at_its_next_renewal(store):
    with contextlib.closing(store.open()) as old:
        keeper = old._keeper
        keeper.renew()
        keeper._timeline -= 1
        keeper.renew()
        assert not old.may_lead
        with pytest.raises(JournalFenced, match="a standby has replaced the server"):
            old.check_files()
