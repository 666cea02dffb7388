"""The databases that hold a controller's stores, for suites that run over each of them.

Each is made for one test; `damage_entry` and the like change what is stored, behind the back of the program.
"""

import contextlib
import sqlite3

from eelgrid_controller.runtime import sqlite_journal


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


JOURNAL_STORES = (sqlite_store,)
