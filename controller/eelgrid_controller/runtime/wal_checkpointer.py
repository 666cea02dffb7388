"""Checkpoints of SQLite's write-ahead log in a thread of their own, so that no commit waits for one.

Must not know what is in the file. (A checkpoint of the journal is something else: a copy of the state.)

Theory. A commit appends to the log, and when that is long enough SQLite copies it into the file within the next commit:
16 MB and two flushes, tens of milliseconds in which the controller does nothing else. A passive checkpoint by another
connection waits for nobody and holds up no writer; what was committed meanwhile is copied in a second, short pass. Once
all of it is copied the next commit begins the log anew. SQLite's own remains as the bound for a disk that is too slow.

Source: sqlite.org/wal.html, sqlite.org/c3ref/wal_checkpoint_v2.html.
"""

import contextlib
import sqlite3
import threading
from pathlib import Path

# Of what was committed, between checkpoints; pages and indexes come to about twice as much.
LOG_BYTES_MOST = 2 * 2**20
_PASSES_MOST = 3


class WalCheckpointer:
    """Keeps the write-ahead log of one file short. `note_commit` and `close` are called by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Opens the file as it is now, since later another may be in its place; raises sqlite3.Error."""
        self.checkpoints = 0
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.0)
        try:
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        except BaseException:
            self._connection.close()
            raise
        self._bytes = 0
        self._due = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def note_commit(self, size: int) -> None:
        """Counts bytes that were committed; returns at once."""
        self._bytes += size
        if self._bytes < LOG_BYTES_MOST:
            return
        self._bytes = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="wal-checkpoint", daemon=True)
            self._thread.start()
        self._due.set()

    def close(self) -> None:
        """Waits for a checkpoint that is under way, and closes the file."""
        self._is_closing = True
        self._due.set()
        if self._thread is not None:
            self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._is_closing:
                return
            # What a disk refuses here it refuses in the next commit, which tells.
            with contextlib.suppress(sqlite3.Error):
                self._copy_log()

    def _copy_log(self) -> None:
        for _ in range(_PASSES_MOST):
            ((is_busy, frames, copied),) = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            if is_busy or frames == copied:
                break
        self.checkpoints += 1
