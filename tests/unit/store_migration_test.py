"""A journal that is moved from one database to another: all of it or nothing, and it goes on in one place only."""

import contextlib
import json
import shutil
import uuid

import pytest
from click.testing import CliRunner
from tests import postgres_rig
from tests.builders.cluster import build_request
from tests.builders.server import run_controller
from tests.builders.stores import postgres_store

from eelgrid_controller.cli.__main__ import cli
from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.errors import JournalCorrupt, JournalMoved, JournalNotEmpty
from eelgrid_controller.runtime.audit_log import AuditedCall, AuditFilter
from eelgrid_controller.runtime.sqlite_journal import SqliteJournal, open_journal
from eelgrid_controller.runtime.store_migration import copy_journal, move_journal
from eelgrid_controller.runtime.stores import open_store
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, JournalHistory, digest_of


def migrate(*arguments, code=0):
    result = CliRunner().invoke(cli, ["admin", "migrate", *map(str, arguments)], prog_name="eelctl")
    assert result.exit_code == code, result.output + str(result.exception)
    return result


def digest(url, data):
    with contextlib.closing(open_store(url, data, new_cluster_id="x", wait_s=0.0)) as journal:
        return digest_of(recover_state(journal, ClusterState).state.dump())


async def fill(data, **options):
    """Work that waits, was cancelled and was asked for by somebody; a checkpoint in the middle, and entries since."""
    async with run_controller(data, checkpoint_events=2, checkpoint_idle_s=0.0, **options) as rig:
        loop = rig.controller.loop
        for number in range(6):
            name = f"job-{uuid.uuid4().hex[:8]}"
            await loop.submit(build_request(name), call=AuditedCall("SubmitWorkload", None, "here", f"{number}"))
            if number % 3 == 0:
                await loop.cancel(name)
        return digest_of(loop.core.state.dump()), loop.journal.last_seq


@pytest.fixture
def store():
    with postgres_store(None) as found:
        yield found


@postgres_rig.needs_server
async def test_there_and_back_again(store, tmp_path):
    before, last = await fill(tmp_path / "data")
    result = migrate(f"sqlite:///{tmp_path}/data", store.url, "--yes", "-o", "json")
    moved = json.loads(result.stdout)
    assert (moved["digest"], moved["last_seq"], moved["audit_entries"]) == (before, last, 6)
    # One writer has led so far, in a file; agents that have met it obey this one.
    assert moved["epoch"] == 2
    assert digest(store.url, tmp_path / "scratch") == before
    # The old one is no second cluster, nor is it moved twice.
    with pytest.raises(JournalMoved, match="it was moved to postgresql://"):
        open_journal(tmp_path / "data", new_cluster_id="x")
    assert "it was moved to" in migrate(f"sqlite:///{tmp_path}/data", store.url, "--yes", code=1).stderr

    after, _ = await fill(tmp_path / "data", database=store.url)
    assert after != before
    epoch = store.run("SELECT epoch FROM eelgrid.term")[0][0]
    result = migrate(store.url, f"sqlite:///{tmp_path}/back", "--yes")
    assert f"digest   {after}, the same on both sides" in result.stdout
    with contextlib.closing(open_journal(tmp_path / "back", new_cluster_id="x")) as journal:
        assert journal.cluster_id == moved["cluster_id"]
        assert journal.term.epoch > epoch
        assert journal.read_audit_page(AuditFilter(), size=100).total == 12
    assert digest("", tmp_path / "back") == after
    with pytest.raises(JournalMoved, match="back"):
        store.open()
    # A third leader's epoch is above all before it.
    with postgres_store(None) as other:
        migrate(f"sqlite:///{tmp_path}/back", other.url, "--yes")
        assert other.run("SELECT epoch FROM eelgrid.term")[0][0] > epoch + 1


@postgres_rig.needs_server
async def test_a_copy_that_breaks_off_leaves_the_source_in_force(store, tmp_path):
    before, last = await fill(tmp_path / "data")
    store.open(new_cluster_id=cluster_of(tmp_path / "data")).close()
    store.run(
        "CREATE FUNCTION eelgrid.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN IF NEW.seq = "
        f"{last} THEN RAISE EXCEPTION ''no space left'' USING ERRCODE = ''53100''; END IF; RETURN NEW; END'"
    )
    store.run("CREATE TRIGGER refuse BEFORE INSERT ON eelgrid.journal FOR EACH ROW EXECUTE FUNCTION eelgrid.refuse()")
    assert "no space left" in migrate(f"sqlite:///{tmp_path}/data", store.url, "--yes", code=1).stderr
    assert store.run("SELECT count(*) FROM eelgrid.journal, eelgrid.checkpoints, eelgrid.audit") == [(0,)]
    assert digest("", tmp_path / "data") == before
    store.run("DROP TRIGGER refuse ON eelgrid.journal")
    migrate(f"sqlite:///{tmp_path}/data", store.url, "--yes")


def cluster_of(folder):
    with contextlib.closing(open_journal(folder, new_cluster_id="x")) as journal:
        return journal.cluster_id


@postgres_rig.needs_server
async def test_what_runs_or_is_filled_is_refused(store, tmp_path):
    await fill(tmp_path / "other")
    async with run_controller(tmp_path / "data"):
        assert "has it open" in migrate(f"sqlite:///{tmp_path}/data", store.url, "--yes", code=1).stderr
    async with run_controller(tmp_path / "second", database=store.url) as rig:
        await rig.controller.loop.submit(build_request("job-a"))
        assert "leads with epoch" in migrate(f"sqlite:///{tmp_path}/other", store.url, "--yes", code=1).stderr
    assert "holds a journal already" in migrate(f"sqlite:///{tmp_path}/other", store.url, "--yes", code=1).stderr
    with contextlib.closing(open_journal(tmp_path / "other", new_cluster_id="x")) as journal:
        assert journal.last_seq > 0


async def test_between_folders_nothing_is_done_without_a_yes(tmp_path):
    before, _ = await fill(tmp_path / "data")
    source, target = f"sqlite:///{tmp_path}/data", f"sqlite:///{tmp_path}/new"
    assert "add --yes" in migrate(source, target, code=5).stderr
    assert not (tmp_path / "new").exists()
    migrate(source, target, "--yes")
    assert digest("", tmp_path / "new") == before


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [("sqlite:///nothing/there", 4, "there is no journal"), ("here", 2, "FROM is no URL of a database")],
)
def test_a_source_that_is_none_is_refused(source, code, words, tmp_path):
    assert words in migrate(source, f"sqlite:///{tmp_path}/new", "--yes", code=code).stderr
    assert not (tmp_path / "new").exists()


class _ForgetfulJournal:
    """Restores all but the last entry."""

    def __init__(self, inner: SqliteJournal):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def restore(self, copy):
        entries = copy.history.entries[:-1]
        self._inner.restore(type(copy)(copy.cluster_id, copy.epoch, JournalHistory(None, entries), None, copy.audited))


async def test_a_copy_that_leads_to_another_state_is_never_used(tmp_path):
    await fill(tmp_path / "data")
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(open_journal(tmp_path / "data", new_cluster_id="x")))
        copy, damaged = copy_journal(source)
        opened = open_journal(tmp_path / "new", new_cluster_id=source.cluster_id)
        target = stack.enter_context(contextlib.closing(_ForgetfulJournal(opened)))
        with pytest.raises(JournalCorrupt, match="leads to another state"):
            move_journal(source, target, copy, damaged=damaged)
    with pytest.raises(JournalMoved, match="nowhere"):
        open_journal(tmp_path / "new", new_cluster_id="x")
    open_journal(tmp_path / "data", new_cluster_id="x").close()


def test_a_pruned_journal_is_copied_with_its_numbers_and_its_mark(tmp_path):
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(
            contextlib.closing(open_journal(tmp_path / "data", new_cluster_id="c", retained=0))
        )
        for seq in range(1, 8):
            source.append([JournalEntry("node_lost", {"time_ns": seq, "node_name": "n"})])
            if seq in (3, 5):
                source.write_checkpoint(Checkpoint(seq, {"at": seq}, f"digest-{seq}"))
        copy, _ = copy_journal(source)
        target = stack.enter_context(contextlib.closing(open_journal(tmp_path / "new", new_cluster_id="c")))
        target.restore(copy)
        with pytest.raises(JournalNotEmpty):
            target.restore(copy)
        assert target.last_seq == 7
        assert target.read_history() == source.read_history()
        assert target.append([JournalEntry("node_lost", {"time_ns": 8, "node_name": "n"})]) == 8
    # A copy without its log, as it is lost with a disk, is noticed as for any journal.
    with contextlib.closing(open_journal(tmp_path / "new", new_cluster_id="c")) as journal:
        assert [seq for seq, _ in journal.entries_after(5)] == [6, 7, 8]
        assert journal.newest_checkpoint() == Checkpoint(5, {"at": 5}, "digest-5")
    shutil.rmtree(tmp_path / "data")
