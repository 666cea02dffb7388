"""The write-ahead log of the journal is copied beside commits, not within them."""

import sqlite3
import threading

import pytest
from tests.waiting import wait_until

from eelgrid_controller.runtime import wal_checkpointer
from eelgrid_controller.runtime.sqlite_journal import FILE_NAME, open_journal
from eelgrid_controller.runtime.wal_checkpointer import WalCheckpointer
from eelgrid_controller.state.journal import JournalEntry

ENTRY = JournalEntry("Something", {"text": "x" * 10_000})


@pytest.fixture
def journal(tmp_path, monkeypatch):
    monkeypatch.setattr(wal_checkpointer, "LOG_BYTES_MOST", 100_000)
    with_log = open_journal(tmp_path, new_cluster_id="c")
    yield with_log
    with_log.close()


def count_copied(folder):
    """How many entries are in the file itself, whatever is in its log; -1 while pages are being copied into it."""
    uri = f"{(folder / FILE_NAME).as_uri()}?immutable=1"
    reader = sqlite3.connect(uri, uri=True)
    try:
        return reader.execute("SELECT count(*) FROM events").fetchone()[0]
    except sqlite3.DatabaseError:
        return -1
    finally:
        reader.close()


async def test_what_was_committed_is_copied_soon_and_by_no_commit(journal, tmp_path):
    for _ in range(9):
        journal.append([ENTRY])
    assert count_copied(tmp_path) == 0
    journal.append([ENTRY])
    await wait_until(lambda: count_copied(tmp_path) == 10)


async def test_the_log_stays_short_while_commits_go_on(journal, tmp_path):
    lengths = []
    for _ in range(30):
        done = journal._log.checkpoints
        for _ in range(10):
            journal.append([ENTRY])
        await wait_until(lambda done=done: journal._log.checkpoints > done)
        lengths.append((tmp_path / f"{FILE_NAME}-wal").stat().st_size)
    # 300 entries of 10 kB are 3 MB, and pages of the table are as much.
    assert max(lengths) < 600_000


def test_entries_survive_and_the_thread_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(wal_checkpointer, "LOG_BYTES_MOST", 1)
    journal = open_journal(tmp_path, new_cluster_id="c")
    for _ in range(50):
        journal.append([ENTRY])
    journal.close()
    assert "wal-checkpoint" not in {thread.name for thread in threading.enumerate()}
    again = open_journal(tmp_path, new_cluster_id="c")
    assert again.last_seq == 50
    again.close()


async def test_a_file_that_cannot_be_copied_stops_nothing(tmp_path, monkeypatch):
    path = tmp_path / "f"
    sqlite3.connect(path).close()
    monkeypatch.setattr(wal_checkpointer, "LOG_BYTES_MOST", 1)
    tried = WalCheckpointer(path)
    tried._connection.close()
    tried.note_commit(5)
    tried.note_commit(5)
    tried.close()
    assert tried.checkpoints == 0
