"""An energy ledger that is moved with the journal, or after it: all of it or nothing, and it goes on in one place only."""

import contextlib
import json
import uuid
from contextlib import closing

import pytest
from click.testing import CliRunner
from tests import postgres_rig
from tests.builders.ledger import BEGIN_S, QUESTIONS, asked, book, book_all, figures
from tests.builders.stores import SqliteLedger, postgres_ledger, postgres_store, sqlite_ledger

from eelgrid_controller.cli.__main__ import cli
from eelgrid_controller.energy.ledger import ExportClaim
from eelgrid_controller.energy.store import ledger_migration
from eelgrid_controller.energy.store.ledger_migration import copy_ledger
from eelgrid_controller.energy.store.ledger_store import open_ledger, open_ledger_with
from eelgrid_controller.errors import LedgerError
from eelgrid_controller.runtime.sqlite_journal import open_journal


def migrate(*arguments, code=0):
    result = CliRunner().invoke(cli, ["admin", "migrate", *map(str, arguments)], prog_name="eelctl")
    assert result.exit_code == code, result.output + str(result.exception)
    return result


def answers(store):
    """All that a ledger says."""
    return (
        [(figures(one), one.damaged) for one in store.query_all([asked(*by) for by in QUESTIONS])],
        store.revision,
        store.last_windows(),
        store.last_window_ends(),
        store.last_work_ends(),
        store.recent_holders(100),
        store.namespaces.counters_mj(),
        dict(store.marks.exporters),
    )


def fill(store):
    book_all(store)
    store.confirm(ExportClaim("archive", BEGIN_S, BEGIN_S + 3600, store.revision), now_s=BEGIN_S + 90 * 3600)
    book(store, 0)
    return answers(store)


@pytest.fixture
def site(tmp_path):
    """A folder with a journal and a ledger, and what that says."""
    folder = tmp_path / "data"
    with closing(open_journal(folder, new_cluster_id=str(uuid.uuid4()))), closing(open_ledger(folder)) as store:
        return folder, fill(store)


@contextlib.contextmanager
def opened(store, folder):
    """The ledger of a database."""
    folder.mkdir(exist_ok=True)
    with closing(store.open()) as journal, closing(open_ledger_with(journal, store.url, folder)) as ledger:
        yield ledger


@postgres_rig.needs_server
def test_there_and_back_again(site, tmp_path):
    folder, before = site
    with postgres_store(None) as store:
        moved = json.loads(migrate(f"sqlite:///{folder}", store.url, "--yes", "-o", "json").stdout)
        assert moved["ledger"]["revision"] == before[1]
        with opened(store, tmp_path / "other") as ledger:
            assert answers(ledger) == before
            book(ledger, 1)
            later = answers(ledger)
        with pytest.raises(LedgerError, match="it was moved to postgresql://"):
            open_ledger(folder)
        printed = migrate(store.url, f"sqlite:///{tmp_path}/back", "--yes").stdout
        assert printed.count("the same on both sides") == 2
        with closing(open_ledger(tmp_path / "back")) as back:
            assert answers(back) == later
            book(back, 2)
            assert back.query(asked()).damaged == ()
        assert store.run("SELECT moved FROM eelgrid.ledger") == [(f"{tmp_path}/back/energy.sqlite3",)]


@postgres_rig.needs_server
def test_a_ledger_follows_a_journal_that_was_moved_before(site, tmp_path):
    folder, before = site
    (folder / "energy.sqlite3").rename(tmp_path / "kept")
    with postgres_store(None) as store:
        assert json.loads(migrate(f"sqlite:///{folder}", store.url, "--yes", "-o", "json").stdout)["ledger"] is None
        (tmp_path / "kept").rename(folder / "energy.sqlite3")
        assert "add --yes" in migrate("--ledger-only", f"sqlite:///{folder}", store.url, code=5).stderr
        migrate("--ledger-only", f"sqlite:///{folder}", store.url, "--yes")
        with opened(store, tmp_path / "other") as ledger:
            assert answers(ledger) == before
        assert "it was moved to" in migrate("--ledger-only", f"sqlite:///{folder}", store.url, "--yes", code=1).stderr
        assert (
            "no energy ledger" in migrate("--ledger-only", f"sqlite:///{tmp_path}", store.url, "--yes", code=4).stderr
        )


def test_between_folders(site, tmp_path):
    folder, before = site
    migrate(f"sqlite:///{folder}", f"sqlite:///{tmp_path}/new", "--yes")
    with closing(open_ledger(tmp_path / "new")) as store:
        assert answers(store) == before


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(sqlite_ledger, id="sqlite"),
        pytest.param(postgres_ledger, id="postgresql", marks=postgres_rig.needs_server),
    ],
)
class TestCopy:
    """Into each database."""

    @pytest.fixture
    def source(self, site):
        folder, _ = site
        return SqliteLedger(folder)

    @pytest.fixture
    def target(self, made, tmp_path):
        place = tmp_path / "target"
        place.mkdir()
        with made(place) as found:
            yield found

    def test_what_is_damaged_stays_found(self, source, target):
        source.run("UPDATE daily SET active = active + 1 WHERE place = 1 AND holder = 1")
        source.run("DELETE FROM hourly WHERE place = 2 AND holder = 3")
        source.run("UPDATE hourly SET active = 'no number' WHERE place = 3 AND holder = 3")
        source.run("UPDATE holders SET namespace = 'team-9' WHERE id = 5")
        with closing(source.open()) as old, closing(target.open()) as new:
            moved = copy_ledger(old, new)
            assert moved.names_damaged == 1
            for by in ((), ("hour",), ("title", "node")):
                was, now = old.query(asked(*by)), new.query(asked(*by))
                assert (figures(was), was.damaged) == (figures(now), now.damaged)
                assert now.damaged
            book(new, 3)
            assert new.query(asked("hour")).damaged == old.query(asked("hour")).damaged

    def test_a_copy_that_breaks_off_leaves_nothing_and_is_done_again(self, source, target, monkeypatch):
        real, many = ledger_migration._write, []

        def write(transaction, table, rows):
            many.append(table)
            if table == "daily_check":
                raise LedgerError("there", "no space left", "make room")
            real(transaction, table, rows)

        with closing(source.open()) as old, closing(target.open()) as new:
            monkeypatch.setattr(ledger_migration, "_write", write)
            with pytest.raises(LedgerError, match="no space left"):
                copy_ledger(old, new)
            assert "hourly" in many
            assert (new.revision, new._read("SELECT count(*) FROM hourly")) == (0, [(0,)])
            monkeypatch.setattr(ledger_migration, "_write", real)
            first = copy_ledger(old, new)
            assert copy_ledger(old, new) == first
            book(old, 5)
            with pytest.raises(LedgerError, match="it holds a ledger already"):
                copy_ledger(old, new)

    def test_a_copy_with_other_rows_is_not_kept(self, source, target, monkeypatch):
        real = ledger_migration._write

        def write(transaction, table, rows):
            real(transaction, table, rows[:-1] if table == "hourly" else rows)

        monkeypatch.setattr(ledger_migration, "_write", write)
        with closing(source.open()) as old, closing(target.open()) as new:
            with pytest.raises(LedgerError, match=r"the copy has other rows .* nothing was changed"):
                copy_ledger(old, new)
            assert (new.revision, new._read("SELECT count(*) FROM daily")) == (0, [(0,)])
