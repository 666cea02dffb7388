"""A whole controller over a real PostgreSQL: work survives it, one leads, and an outage of the database passes."""

import asyncio
import contextlib
import logging

import pytest
from tests import postgres_rig
from tests.builders.cluster import build_request
from tests.builders.server import run_controller
from tests.builders.stores import postgres_store
from tests.postgres_rig import CuttingProxy
from tests.waiting import wait_until

from eelgrid_controller.errors import ControllerConfigError, JournalFenced, JournalHeld
from eelgrid_controller.runtime import loop as loop_module
from eelgrid_controller.runtime.stores import open_store
from eelgrid_protos.faults import Unavailable

pytestmark = postgres_rig.needs_server
logging.getLogger("alembic").setLevel(logging.WARNING)


@pytest.fixture
def store():
    with postgres_store(None) as found:
        yield found


async def test_work_is_there_after_a_restart_on_another_machine(store, tmp_path):
    async with run_controller(tmp_path / "one", database=store.url) as first:
        await first.controller.loop.submit(build_request("job-a"))
        cluster = first.controller.loop.journal.cluster_id
    async with run_controller(tmp_path / "two", database=store.url) as second:
        loop = second.controller.loop
        assert "job-a" in loop.core.state.workloads
        assert loop.journal.cluster_id == cluster
        assert loop.journal.term.epoch == 2
        # No journal is beside it.
        assert not list((tmp_path / "two").glob("journal*"))


async def test_a_second_controller_is_told_where_the_first_one_is(store, tmp_path):
    async with run_controller(tmp_path / "one", database=store.url) as first:
        store.run("UPDATE eelgrid.lease SET expires_at = now() + interval '1 day'")
        with pytest.raises(JournalHeld, match="leads with epoch 1"):
            await asyncio.to_thread(lambda: store.open(wait_s=0.0))
        # The same folder is refused before the database is asked.
        with pytest.raises(JournalHeld, match="stop that one"):
            async with run_controller(tmp_path / "one", database=store.url):
                pass
        await first.controller.loop.submit(build_request("job-a"))


async def test_a_leader_that_was_followed_answers_its_callers_and_ends(store, tmp_path):
    async with run_controller(tmp_path / "one", database=store.url) as first:
        loop = first.controller.loop
        await loop.submit(build_request("job-a"))
        store.run("UPDATE eelgrid.lease SET expires_at = '-infinity'")
        successor = await asyncio.to_thread(store.open)
        with contextlib.closing(successor):
            with pytest.raises(Unavailable, match="leads with epoch 2"):
                await loop.submit(build_request("job-b"))
            assert isinstance(await asyncio.wait_for(loop.failed, 5.0), JournalFenced)
            with pytest.raises(Unavailable, match="stopping"):
                await loop.submit(build_request("job-c"))
            events = [entry.body for _, entry in successor.entries_after(0)]
            assert "job-a" in str(events)
            assert "job-b" not in str(events)


async def test_an_idle_leader_that_was_followed_ends_as_well(store, tmp_path):
    async with run_controller(tmp_path / "one", database=store.url) as first:
        store.run("UPDATE eelgrid.lease SET expires_at = '-infinity'")
        with contextlib.closing(await asyncio.to_thread(store.open)):
            assert isinstance(await asyncio.wait_for(first.controller.loop.failed, 15.0), JournalFenced)


async def test_a_leader_that_was_stopped_ends_before_it_recovers_what_another_has_followed(
    store, tmp_path, monkeypatch
):
    """Its first write after the pause fails since the lease has run out; only the next renewal says that another leads."""
    async with run_controller(tmp_path / "one", database=store.url) as first:
        loop = first.controller.loop
        await loop.submit(build_request("job-a"))
        await wait_until(lambda: first.controller.ledger.used_bytes is not None)
        keeper = loop.journal._keeper
        # As one that is stopped: it renews nothing, and its lease is over by its own clock.
        await asyncio.to_thread(keeper._renewing.acquire)
        monkeypatch.setattr(loop_module, "recover_state", lambda *_: pytest.fail("there is nothing to go on from"))
        keeper._until_s = 0.0
        store.run("UPDATE eelgrid.lease SET expires_at = '-infinity'")
        with contextlib.closing(await asyncio.to_thread(store.open)):
            with pytest.raises(Unavailable, match="lease could not be renewed"):
                await loop.submit(build_request("job-b"))
            assert not loop.failed.done()
            keeper._renewing.release()
            assert isinstance(await asyncio.wait_for(loop.failed, 15.0), JournalFenced)


async def test_an_outage_refuses_with_the_reason_and_passes_by_itself(store, tmp_path):
    port = postgres_rig.shared_server().port
    with CuttingProxy(port) as proxy:
        url = store.url.replace(f":{port}/", f":{proxy.port}/")
        async with run_controller(tmp_path, database=url) as rig:
            loop = rig.controller.loop
            await loop.submit(build_request("job-a"))
            # Its ledger has no more to say.
            await wait_until(lambda: rig.controller.ledger.used_bytes is not None)
            proxy.cut_next(b"COMMIT", is_forwarded=False, is_shut=True)
            for name in ("job-b", "job-c"):
                with pytest.raises(Unavailable, match="work resumes by itself"):
                    await loop.submit(build_request(name))
            assert not loop.failed.done()
            proxy.open()
            await wait_until(lambda: loop.journal_fault is None)
            await loop.submit(build_request("job-d"))
            assert set(loop.core.state.workloads) == {"job-a", "job-d"}


@pytest.mark.parametrize("url", ["mysql://somebody:secret@host/db", "postgresql:/typo", "sqlite:///", "folder"])
def test_a_url_of_nothing_that_we_know_is_refused_without_its_password(url, tmp_path):
    with pytest.raises(ControllerConfigError, match="--database") as caught:
        open_store(url, tmp_path, new_cluster_id="c")
    assert "secret" not in str(caught.value)


def test_a_folder_may_be_named_by_a_url(tmp_path):
    with contextlib.closing(open_store(f"sqlite:///{tmp_path}/other", tmp_path / "data", new_cluster_id="c")):
        assert (tmp_path / "other" / "journal.sqlite3").exists()
        assert not (tmp_path / "data").exists()
