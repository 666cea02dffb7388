"""The databases that hold a controller's stores, for suites that run over each of them.

Each is made for one test; `damage_entry` and the like change what is stored, behind the back of the program.
"""

import contextlib
import sqlite3

import pytest

from eelgrid_controller.energy.store import sqlite_database
from eelgrid_controller.energy.store.ledger_store import open_ledger, open_ledger_with
from eelgrid_controller.runtime import sqlite_journal
from tests import postgres_rig


class SqliteStore:
    """A folder with a journal in SQLite."""

    entries_table = "events"

    def __init__(self, folder):
        self.folder = folder

    def open(self, new_cluster_id="cluster-1", **options):
        """Opens the journal."""
        return sqlite_journal.open_journal(self.folder, new_cluster_id=new_cluster_id, **options)

    def _edit(self, statement, seq):
        with contextlib.closing(
            sqlite3.connect(self.folder / sqlite_journal.FILE_NAME, isolation_level=None)
        ) as connection:
            assert connection.execute(statement, (seq,)).rowcount == 1

    def damage_entry(self, seq):
        """Changes a letter."""
        self._edit("UPDATE events SET body = replace(body, 'node_name', 'nod3_name') WHERE seq = ?", seq)

    def delete_entry(self, seq):
        """Takes one away."""
        self._edit("DELETE FROM events WHERE seq = ?", seq)

    def damage_checkpoint(self, seq):
        """Overwrites it."""
        self._edit("UPDATE checkpoints SET body = zeroblob(length(body)) WHERE seq = ?", seq)


@contextlib.contextmanager
def sqlite_store(folder):
    """A journal in a folder."""
    yield SqliteStore(folder)


class PostgresStore:
    """A database of a server that is the tests' own."""

    entries_table = "eelgrid.journal"

    def __init__(self, url):
        self.url = url

    def open(self, new_cluster_id="cluster-1", **options):
        """Opens the journal, at once or not at all."""
        from eelgrid_controller.runtime.postgresql.connections import parse_url
        from eelgrid_controller.runtime.postgresql.journal import open_postgres_journal

        options = {"wait_s": 0.0, **options}
        return open_postgres_journal(parse_url(self.url), new_cluster_id=new_cluster_id, **options)

    def run(self, statement, *values):
        """Runs a statement by itself; returns its rows, or how many it changed."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            done = connection.execute(statement, values)
            return done.fetchall() if done.description else done.rowcount

    def damage_entry(self, seq):
        """Changes a letter."""
        assert (
            self.run("UPDATE eelgrid.journal SET body = replace(body, 'node_name', 'nod3_name') WHERE seq = %s", seq)
            == 1
        )

    def delete_entry(self, seq):
        """Takes one away."""
        assert self.run("DELETE FROM eelgrid.journal WHERE seq = %s", seq) == 1

    def damage_checkpoint(self, seq):
        """Overwrites it."""
        assert self.run("UPDATE eelgrid.checkpoints SET body = 'x' WHERE seq = %s", seq) == 1


@contextlib.contextmanager
def postgres_store(_folder):
    """A new database on the server of this process."""
    yield PostgresStore(postgres_rig.shared_server().create_database())


JOURNAL_STORES = (
    pytest.param(sqlite_store, id="sqlite"),
    pytest.param(postgres_store, id="postgresql", marks=postgres_rig.needs_server),
)


class SqliteLedger:
    """A folder with an energy ledger in SQLite."""

    def __init__(self, folder):
        self.folder = folder

    def open(self):
        """Opens the ledger."""
        return open_ledger(self.folder)

    def run(self, statement):
        """Changes what is stored, as a disk or a person does it; returns how many rows."""
        path = self.folder / sqlite_database.FILE_NAME
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            return connection.execute(statement).rowcount


@contextlib.contextmanager
def sqlite_ledger(folder):
    """An energy ledger in a folder."""
    yield SqliteLedger(folder)


class PostgresLedger:
    """An energy ledger in a database, and the controller that leads there."""

    def __init__(self, store, folder):
        self.store = store
        self.folder = folder
        self.journal = store.open()

    def open(self):
        """Opens the ledger in the term that runs."""
        return open_ledger_with(self.journal, self.store.url, self.folder)

    def run(self, statement):
        """Changes what is stored, as a disk or a person does it; returns how many rows."""
        import psycopg

        options = "-c search_path=eelgrid"
        with psycopg.connect(self.store.url, autocommit=True, options=options) as connection:
            return connection.execute(statement).rowcount


@contextlib.contextmanager
def postgres_ledger(folder):
    """An energy ledger in a new database on the server of this process."""
    with postgres_store(folder) as store:
        ledger = PostgresLedger(store, folder)
        yield ledger
        ledger.journal.close()


LEDGER_STORES = (
    pytest.param(sqlite_ledger, id="sqlite"),
    pytest.param(postgres_ledger, id="postgresql", marks=postgres_rig.needs_server),
)
