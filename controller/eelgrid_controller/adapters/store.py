"""The journal in one SQLite file: entries, checkpoints, and checks on all of them.

Owns the file's format, its exclusive use and its errors. Must not know what an
entry means; `eelgrid_controller.journal` does.

Theory: the write-ahead log with synchronous=FULL makes one transaction durable
with one fsync, so the loop commits many events at once. Every row carries a
CRC of its own number and content: a flipped bit, a swapped or a missing row is
found on reading. A new file is made complete under another name and renamed,
so a short or empty file under the real name is damage and never a beginning.
Two checkpoints are kept, and all entries since the older, so that one damaged
checkpoint loses nothing. Calls come from one thread at a time.
"""

import contextlib
import fcntl
import json
import os
import sqlite3
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from eelgrid_controller.adapters.audit_table import AuditTable, read_audit_page
from eelgrid_controller.audit import AuditFilter, AuditPage
from eelgrid_controller.errors import (
    ConfigError,
    JournalCorrupt,
    JournalError,
    JournalForeign,
    JournalFull,
    JournalHeld,
    JournalTooNew,
    JournalUnavailable,
)
from eelgrid_controller.journal import Checkpoint, Entry, JournalCounters, Past, forget_checkpoint, forget_entries
from eelgrid_protos.messages import AuditEntry

__all__ = ["FILE_NAME", "SqliteJournal", "open_journal"]

FILE_NAME = "journal.sqlite3"
LOCK_NAME = "controller.lock"
# "Eelg"; SQLite keeps it in the file's header for the sake of file(1).
APPLICATION_ID = 0x45656C67
FORMAT_VERSION = 1
PAGE_BYTES = 4096
BYTES_MOST = 64 * 2**30
_PROBE_BYTES = 256 * 1024
# SQLite quotes damaged names in its messages, which Python then cannot decode.
_SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE events (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, crc32 INTEGER NOT NULL);
CREATE TABLE checkpoints (
  seq INTEGER PRIMARY KEY, body BLOB NOT NULL, digest TEXT NOT NULL, crc32 INTEGER NOT NULL
);
"""


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _entry_crc(seq: int, kind: bytes, body: bytes) -> int:
    return zlib.crc32(b"%d\n%b\n%b" % (seq, kind, body))


def _checkpoint_crc(seq: int, digest: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(b"%d\n%b\n" % (seq, digest)))


def _checked(seq: int, body: object, digest: object, crc: int) -> Checkpoint | None:
    """The checkpoint in a row; None for one that is damaged."""
    if isinstance(body, bytes) and isinstance(digest, bytes) and _checkpoint_crc(seq, digest, body) == crc:
        return Checkpoint(seq, json.loads(zlib.decompress(body)), digest.decode())
    return None


class SqliteJournal:
    """Implements `Journal`; made by `open_journal`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int, *, retained: int) -> None:
        self.path = path
        self.counters = JournalCounters()
        self._connection = connection
        self._lock = lock
        self._retained = retained
        self._last: int
        with self._translated():
            # The last number ever given, also where the entries themselves are pruned.
            (self._last,) = connection.execute(
                "SELECT max(coalesce((SELECT max(seq) FROM events), 0), coalesce((SELECT max(seq) FROM checkpoints), 0))"
            ).fetchone()
            name = connection.execute("SELECT value FROM meta WHERE key = 'cluster_id'").fetchone()
            self.audit_table = AuditTable(connection)
        self.cluster_id: str = name[0].decode(errors="replace") if name else ""

    @property
    def last_seq(self) -> int:
        """The number of the last entry."""
        return self._last

    def append(self, entries: Sequence[Entry], audited: Sequence[AuditEntry] = ()) -> int:
        """Write all entries, and those of the audit log, in one transaction, on disk when this returns."""
        rows: list[tuple[int, str, str, int]] = []
        size = 0
        for seq, entry in enumerate(entries, self._last + 1):
            body = _dumps(entry.body)
            size += len(body)
            rows.append((seq, entry.kind, body.decode(), _entry_crc(seq, entry.kind.encode(), body)))
        with self._transaction():
            self._connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", rows)
            if audited:
                self.audit_table.insert(audited)
        if audited:
            self.audit_table.committed()
            self._prune_audit()
        self._last += len(rows)
        self.counters.commits += 1
        self.counters.entries += len(rows)
        self.counters.bytes_written += size
        return self._last

    def _prune_audit(self) -> None:
        """Keeps the audit log within its bounds; a disk that refuses is tried again at the next commit."""
        if self.audit_table.is_full:
            with contextlib.suppress(JournalError):
                with self._transaction():
                    gone = self.audit_table.prune()
                self.audit_table.pruned(*gone)

    def audit_page(self, wanted: AuditFilter, *, size: int, before: int | None = None) -> AuditPage:
        """A page of the audit log, read apart from the writing, so that any thread may ask at any time."""
        with self._translated():
            return read_audit_page(self.path, wanted, size=size, before=before)

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint, its CRC checked."""
        with self._translated():
            rows = self._connection.execute(
                "SELECT seq, body, digest, crc32 FROM checkpoints ORDER BY seq DESC LIMIT 2"
            ).fetchall()
        if not rows:
            return None
        if checkpoint := _checked(*rows[0]):
            return checkpoint
        seq = rows[0][0]
        before = f"the checkpoint at entry {rows[1][0]}" if len(rows) > 1 else "the beginning"
        raise JournalCorrupt(
            self.path,
            f"the checkpoint at entry {seq} is damaged",
            f"{before} and the entries since then lead to the same state, so nothing is lost by removing it: "
            f"{forget_checkpoint(self.path, seq)}",
            seq=seq,
        )

    def entries_after(self, seq: int) -> Iterator[tuple[int, Entry]]:
        """Entries in order; stops with JournalCorrupt at the first that is damaged or missing."""
        with self._translated():
            last = yield from self._entries(self._connection, seq)
        if last != self._last:
            raise self._corrupt(last + 1, seq, f"entries {last + 1} to {self._last} are missing")

    def _entries(self, connection: sqlite3.Connection, seq: int) -> Generator[tuple[int, Entry], None, int]:
        """Entries after `seq`, checked; returns the number of the last."""
        expected = seq + 1
        cursor = connection.execute("SELECT seq, kind, body, crc32 FROM events WHERE seq > ? ORDER BY seq", (seq,))
        for found, kind, body, crc in cursor:
            if found != expected:
                raise self._corrupt(expected, seq, f"entries {expected} to {found - 1} are missing")
            if not isinstance(kind, bytes) or not isinstance(body, bytes) or _entry_crc(found, kind, body) != crc:
                raise self._corrupt(found, seq, f"entry {found} is damaged")
            yield found, Entry(kind.decode(), json.loads(body))
            expected += 1
        return expected - 1

    def past(self) -> Past:
        """All that is kept, in one transaction of a connection of its own.

        From the first entry, where that is still kept; else the oldest checkpoint and the entries since.
        """
        with (
            self._translated(),
            contextlib.closing(
                sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            ) as reader,
        ):
            reader.text_factory = bytes
            reader.execute("BEGIN")
            if reader.execute("SELECT min(seq) FROM events").fetchone() == (1,):
                return Past(None, tuple(self._entries(reader, 0)))
            rows = reader.execute("SELECT seq, body, digest, crc32 FROM checkpoints ORDER BY seq LIMIT 1").fetchall()
            checkpoint = _checked(*rows[0]) if rows else None
            if rows and checkpoint is None:
                raise self._corrupt(rows[0][0], 0, f"the checkpoint at entry {rows[0][0]} is damaged")
            return Past(checkpoint, tuple(self._entries(reader, checkpoint.seq if checkpoint else 0)))

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep this and the newest before it; drop older ones and the entries that both cover."""
        body = zlib.compress(_dumps(checkpoint.state), 3)
        crc = _checkpoint_crc(checkpoint.seq, checkpoint.digest.encode(), body)
        row = (checkpoint.seq, body, checkpoint.digest, crc)
        with self._transaction():
            execute = self._connection.execute
            execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", row)
            execute("DELETE FROM checkpoints WHERE seq NOT IN (SELECT seq FROM checkpoints ORDER BY seq DESC LIMIT 2)")
            ((older, count),) = execute("SELECT min(seq), count(*) FROM checkpoints").fetchall()
            if count == 2:
                execute("DELETE FROM events WHERE seq <= ?", (min(older, self._last - self._retained),))
        self.counters.checkpoints += 1
        self.counters.checkpoint_bytes = len(body)
        # Moves the log into the file now, at a quiet moment, rather than inside somebody's commit.
        with self._translated():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def probe(self) -> None:
        """Write and remove as much as a large commit would take."""
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('probe', zeroblob(?))", (_PROBE_BYTES,))
        with self._transaction():
            self._connection.execute("DELETE FROM meta WHERE key = 'probe'")

    def close(self) -> None:
        """Give up the file, then the lock."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        os.close(self._lock)

    def _corrupt(self, seq: int, good: int, problem: str) -> JournalCorrupt:
        start = f"the checkpoint at entry {good}" if good else "the beginning"
        return JournalCorrupt(
            self.path,
            problem,
            f"{start} and the entries up to {seq - 1} are good: restore a backup, or give up the rest with: "
            f"{forget_entries(self.path, seq)}",
            seq=seq,
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translated():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except _SQLITE_ERRORS as error:
            raise _translate(self.path, error) from error


def _translate(path: Path, error: Exception) -> JournalError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return JournalFull(path, "the disk is full", f"free space in {path.parent}; work resumes by itself")
    if code == sqlite3.SQLITE_NOTADB:
        return JournalForeign(
            path, "this is no SQLite file", "name another --data directory, or restore the file from a backup"
        )
    # Our statements are fixed, so one that SQLite cannot understand meets a damaged schema.
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR) or isinstance(error, UnicodeDecodeError):
        return JournalCorrupt(
            path,
            f"SQLite finds the file damaged ({error})",
            f"stop and restore a backup, or save what can be read: sqlite3 {path} .recover",
        )
    return JournalUnavailable(
        path, f"the disk refused ({error})", f"check the disk and the permissions of {path.parent}"
    )


def open_journal(
    data: Path, *, new_cluster_id: str, retained: int = 10_000, bytes_most: int = BYTES_MOST
) -> SqliteJournal:
    """The journal of a data directory, made if there is none; this process alone may use it until it is closed."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        lock = os.open(data / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"data directory {data} cannot be used ({error.strerror})", "name a writable directory with --data"
        ) from error
    path = data / FILE_NAME
    try:
        _hold(path, lock)
        if not path.exists():
            _create(path, new_cluster_id)
        connection = _connect(path, bytes_most)
        try:
            return SqliteJournal(path, connection, lock, retained=retained)
        except BaseException:
            connection.close()
            raise
    except BaseException:
        os.close(lock)
        raise


def _hold(path: Path, lock: int) -> None:
    """Take the lock, which the kernel releases however this process ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        raise JournalHeld(
            path,
            f"another controller{f' (process {holder})' if holder else ''} has it open",
            "stop that one, or name another --data directory",
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _create(path: Path, cluster_id: str) -> None:
    """Make the file under another name, so that the real name never holds a half."""
    draft = path.with_suffix(".new")
    for leftover in (draft, draft.with_name(f"{draft.name}-journal")):
        leftover.unlink(missing_ok=True)
    try:
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.executescript(
                f"PRAGMA page_size={PAGE_BYTES}; PRAGMA synchronous=FULL; BEGIN; {_SCHEMA}"
                f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={FORMAT_VERSION}; COMMIT;"
            )
            connection.execute("INSERT INTO meta VALUES ('cluster_id', ?)", (cluster_id,))
        draft.rename(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except sqlite3.Error as error:
        raise _translate(path, error) from error
    except OSError as error:
        raise JournalUnavailable(path, str(error), "check the disk and the directory's permissions") from error


def _connect(path: Path, bytes_most: int) -> sqlite3.Connection:
    if path.stat().st_size == 0:
        raise JournalCorrupt(path, "the file is empty", "restore it from a backup, or remove it to begin anew")
    # The one owner calls from the loop's thread at the start and the end and from one worker in between.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
    # Damaged text is found by its CRC, so it must arrive as it is.
    connection.text_factory = bytes
    try:
        _check_header(path, connection)
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA max_page_count={max(1, bytes_most // PAGE_BYTES)}").fetchall()
        # 16 MB of log between the pauses for moving it into the file; the quiet checkpoint usually comes first.
        connection.execute("PRAGMA wal_autocheckpoint=4096").fetchall()
        connection.execute(f"PRAGMA journal_size_limit={64 * 2**20}").fetchall()
    except _SQLITE_ERRORS as error:
        connection.close()
        raise _translate(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check_header(path: Path, connection: sqlite3.Connection) -> None:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application_id != APPLICATION_ID:
        raise JournalForeign(
            path, "another program made this SQLite file", "name another --data directory, or move the file away"
        )
    if version > FORMAT_VERSION:
        raise JournalTooNew(
            path,
            f"its format is version {version}, this controller reads up to {FORMAT_VERSION}",
            "run the version that wrote it, or a newer one",
        )
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {b"meta", b"events", b"checkpoints"} <= tables:
        raise JournalCorrupt(path, "tables are missing", "restore the file from a backup")
