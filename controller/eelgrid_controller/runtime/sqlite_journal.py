"""The journal in one SQLite file: entries, checkpoints, and integrity checks on all of them.

Owns the files of a data directory, their locks and modes. Must not know what an event means. The last acknowledged entry
is also noted outside of the database (journal_mark.py).
"""

import contextlib
import errno
import fcntl
import json
import os
import sqlite3
import stat
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eelgrid_controller.errors import (
    ControllerConfigError,
    JournalCorrupt,
    JournalError,
    JournalForeign,
    JournalFull,
    JournalGone,
    JournalHeld,
    JournalLost,
    JournalMoved,
    JournalNotEmpty,
    JournalTooNew,
    JournalUnavailable,
    LostEntries,
)
from eelgrid_controller.runtime.audit_log import (
    AuditFilter,
    AuditPage,
    AuditTable,
    SqliteAuditRows,
    read_audit_page,
)
from eelgrid_controller.runtime.journal_mark import CHAIN_START, MARK_NAME, HighWaterMark, JournalMark, extend_chain
from eelgrid_controller.runtime.journal_rows import (
    compute_entry_crc,
    decode_checkpoint,
    describe_damaged_checkpoint,
    describe_damaged_entry,
    encode_body,
    encode_checkpoint,
)
from eelgrid_controller.runtime.wal_checkpointer import WalCheckpointer
from eelgrid_controller.state.journal import (
    Checkpoint,
    CheckpointRow,
    JournalCopy,
    JournalCounters,
    JournalEntry,
    JournalHistory,
)
from eelgrid_protos.messages import AuditEntry, LeaderTerm

FILE_NAME = "journal.sqlite3"
LOCK_NAME = "controller.lock"
# Names of workloads, users and nodes are in these files: their owner writes them, its group may read them.
_FILE_MODE = 0o640
_DIRECTORY_MODE = 0o750
# Name prefixes of our files in a data directory; no other file there is touched.
_OURS = ("journal.", "energy.", "controller.lock", "power-policies.json")
# "Eelg"; stored in the SQLite file header so that file(1) can identify it.
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


@dataclass(frozen=True, slots=True)
class _Examined:
    """Contents of a journal file before anything is written."""

    last: int  # highest number ever assigned, even if the entries themselves are pruned
    base: JournalMark | None  # where the chain of checksums begins; None in a file without a mark
    chain: bytes | None  # at the last entry; None if it cannot be computed from the base
    lost: LostEntries | None  # acknowledged according to the mark, but missing


class SqliteJournal:
    """Implements `AuditedJournal`; made by `open_journal`."""

    is_remote = False
    # Whoever holds the directory leads.
    may_lead = True
    lease_age_s = 0.0

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        found: _Examined,
        mark: HighWaterMark | None,
        *,
        retained: int,
        held: contextlib.ExitStack,
    ) -> None:
        self.path = path
        self.counters = JournalCounters()
        # Lost entries whose loss was accepted; the next append makes that final.
        self.lost = found.lost
        self._connection = connection
        self._mark = mark
        # Owns the locks and all open files.
        self._held = held
        self._retained = retained
        self._last = found.last
        self._chain = CHAIN_START if found.chain is None else found.chain
        # Whether entries after `_last` were committed but could not be marked: no caller was told of them.
        self._has_unmarked = False
        self._identities: dict[Path, tuple[int, int] | None] = {}
        with self._translate_errors():
            self._log = WalCheckpointer(path)
        held.callback(self._log.close)
        with self._translate_errors():
            named = {name.decode(): value for name, value in connection.execute("SELECT key, value FROM meta")}
            self.audit_table = AuditTable(SqliteAuditRows(connection))
        if "moved_to" in named:
            raise JournalMoved(path, named["moved_to"].decode(errors="replace"))
        self.cluster_id: str = named.get("cluster_id", b"").decode(errors="replace")
        # The lock of the directory stands for a lease, so each process that has it goes on with the same term.
        self.term = LeaderTerm(
            timeline=int(named.get("timeline", 0)),
            epoch=max(1, int(named.get("epoch", 0))),
            holder=self.cluster_id,
            cluster=self.cluster_id,
        )
        if found.lost is None and (mark is None or mark.newest != JournalMark(self._last, self._chain)):
            self._write_mark(JournalMark(self._last, self._chain))
        if found.base is None or found.chain is None:
            with self._transaction():
                self._keep_chain()
        self._remember_files()

    @property
    def last_seq(self) -> int:
        """Number of the last entry."""
        return self._last

    def append(self, entries: Sequence[JournalEntry], audited: Sequence[AuditEntry] = ()) -> int:
        """Writes all entries, and those of the audit log, in one transaction that is on disk on return."""
        rows: list[tuple[int, str, str, int]] = []
        size = 0
        for seq, entry in enumerate(entries, self._last + 1):
            body = encode_body(entry.body)
            size += len(body)
            rows.append((seq, entry.kind, body.decode(), compute_entry_crc(seq, entry.kind.encode(), body)))
        self.check_files()
        self._remove_unmarked()
        with self._transaction():
            self._connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", rows)
            if audited:
                self.audit_table.insert(audited)
        if rows:
            self._acknowledge(self._last + len(rows), extend_chain(self._chain, ((row[0], row[3]) for row in rows)))
        if audited:
            self.audit_table.committed()
            self._prune_audit()
        self._log.note_commit(size)
        self.counters.commits += 1
        self.counters.entries += len(rows)
        self.counters.bytes_written += size
        return self._last

    def restore(self, copy: JournalCopy) -> None:
        """See `AuditedJournal`."""
        links, events = [], []
        for seq, entry in copy.history.entries:
            body = encode_body(entry.body)
            links.append((seq, compute_entry_crc(seq, entry.kind.encode(), body)))
            events.append((seq, entry.kind, body.decode(), links[-1][1]))
        execute = self._connection.execute
        with self._transaction():
            if self._last or copy.cluster_id != self.cluster_id:
                raise JournalNotEmpty(self.path)
            for checkpoint in copy.checkpoints:
                execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?)", encode_checkpoint(checkpoint))
            self._connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", events)
            if copy.audited:
                self.audit_table.insert(copy.audited)
            chain = extend_chain(CHAIN_START, links)
            values = {"chain": f"{copy.last_seq} {chain.hex()}"}
            self._connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
            # Agents obey this one from now on, and not the writer of the other journal.
            term = self._store_term(LeaderTerm(timeline=copy.timeline, epoch=copy.epoch))
        self.audit_table.committed()
        self.term = term
        self._acknowledge(copy.last_seq, chain)

    def raise_term(self, above: LeaderTerm) -> LeaderTerm:
        """Makes the term higher than that, on disk, and returns it."""
        self.check_files()
        with self._transaction():
            term = self._store_term(above)
        self.term = term
        return term

    def _store_term(self, above: LeaderTerm) -> LeaderTerm:
        term = replace(
            self.term,
            timeline=max(self.term.timeline, above.timeline),
            epoch=max(self.term.epoch, above.epoch) + 1,
        )
        rows = (("epoch", term.epoch), ("timeline", term.timeline))
        self._connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
        return term

    def mark_moved(self, target: str) -> None:
        """See `AuditedJournal`."""
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('moved_to', ?)", (target,))

    def _prune_audit(self) -> None:
        """Keeps the audit log within its bounds; after a disk error it is tried again at the next commit."""
        if self.audit_table.is_full:
            with contextlib.suppress(JournalError):
                with self._transaction():
                    gone = self.audit_table.prune()
                self.audit_table.pruned(*gone)

    def read_audit_page(self, wanted: AuditFilter, *, size: int, before: int | None = None) -> AuditPage:
        """Reads a page of the audit log; any thread may call it at any time."""
        with self._translate_errors():
            return read_audit_page(self.path, wanted, size=size, before=before)

    def newest_checkpoint(self) -> Checkpoint | None:
        """Returns the newest checkpoint, its CRC checked."""
        with self._translate_errors():
            rows = self._connection.execute(
                "SELECT seq, body, digest, crc32 FROM checkpoints ORDER BY seq DESC LIMIT 2"
            ).fetchall()
        if not rows:
            return None
        if checkpoint := decode_checkpoint(*rows[0]):
            return checkpoint
        raise describe_damaged_checkpoint(self.path, rows[0][0], rows[1][0] if len(rows) > 1 else None)

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """Yields entries in order; raises JournalCorrupt at the first that is damaged or missing."""
        with self._translate_errors():
            last = yield from self._entries(self._connection, seq)
        if last != self._last:
            raise self._corrupt(last + 1, seq, f"entries {last + 1} to {self._last} are missing")

    def _entries(self, connection: sqlite3.Connection, seq: int) -> Generator[tuple[int, JournalEntry], None, int]:
        """Yields the acknowledged entries after `seq`, verified; returns the number of the last."""
        expected = seq + 1
        cursor = connection.execute(
            "SELECT seq, kind, body, crc32 FROM events WHERE seq BETWEEN ? AND ? ORDER BY seq", (expected, self._last)
        )
        for found, kind, body, crc in cursor:
            if found != expected:
                raise self._corrupt(expected, seq, f"entries {expected} to {found - 1} are missing")
            if (
                not isinstance(kind, bytes)
                or not isinstance(body, bytes)
                or compute_entry_crc(found, kind, body) != crc
            ):
                raise self._corrupt(found, seq, f"entry {found} is damaged")
            yield found, JournalEntry(kind.decode(), json.loads(body))
            expected += 1
        return expected - 1

    def read_history(self) -> JournalHistory:
        """Reads everything that is stored, in one transaction of a connection of its own.

        Returns all entries if the first is still stored, otherwise the oldest checkpoint and the entries since.
        """
        with (
            self._translate_errors(),
            contextlib.closing(_read_only(self.path)) as reader,
        ):
            reader.text_factory = bytes
            reader.execute("BEGIN")
            if reader.execute("SELECT min(seq) FROM events").fetchone() == (1,):
                return JournalHistory(None, tuple(self._entries(reader, 0)))
            rows = reader.execute("SELECT seq, body, digest, crc32 FROM checkpoints ORDER BY seq LIMIT 1").fetchall()
            checkpoint = decode_checkpoint(*rows[0]) if rows else None
            if rows and checkpoint is None:
                raise self._corrupt(rows[0][0], 0, f"the checkpoint at entry {rows[0][0]} is damaged")
            return JournalHistory(checkpoint, tuple(self._entries(reader, checkpoint.seq if checkpoint else 0)))

    def write_checkpoint(self, checkpoint: Checkpoint | CheckpointRow) -> None:
        """Stores a checkpoint; deletes all but the newest before it, and the entries that both cover."""
        row = encode_checkpoint(checkpoint)
        self.check_files()
        self._remove_unmarked()
        with self._transaction():
            self._keep_chain()
            execute = self._connection.execute
            execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", row)
            execute("DELETE FROM checkpoints WHERE seq NOT IN (SELECT seq FROM checkpoints ORDER BY seq DESC LIMIT 2)")
            ((older, count),) = execute("SELECT min(seq), count(*) FROM checkpoints").fetchall()
            if count == 2:
                execute("DELETE FROM events WHERE seq <= ?", (min(older, self._last - self._retained),))
        self.counters.checkpoints += 1
        self.counters.checkpoint_bytes = len(row[1])
        # Moves the write-ahead log into the file now, at a quiet moment, rather than during a commit.
        with self._translate_errors():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def probe(self) -> None:
        """Checks that writing works, by writing and removing as many bytes as a large commit."""
        self.check_files()
        self._remove_unmarked()
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('probe', zeroblob(?))", (_PROBE_BYTES,))
        with self._transaction():
            self._connection.execute("DELETE FROM meta WHERE key = 'probe'")

    def close(self) -> None:
        """Closes the file, then releases the lock."""
        self._log.close()
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        self._held.close()

    # Files and the high-water mark

    def check_files(self) -> None:
        """Raises JournalGone if a file of the journal is no longer the one in use."""
        for path, identity in self._identities.items():
            if identity is not None and _identity(path) != identity:
                raise JournalGone(
                    self.path,
                    f"{path.name} was removed or replaced while it is in use",
                    "put it back, and work resumes by itself; where it is gone, save what is still open under "
                    f"/proc/{os.getpid()}/fd before you stop this controller",
                )

    def _remember_files(self) -> None:
        """Records the identity of the files; the log exists from the first write, a mark from the first append."""
        data, log = self.path.parent, self.path.with_name(f"{FILE_NAME}-wal")
        for path in (data / LOCK_NAME, data / MARK_NAME, self.path, log):
            if self._identities.get(path) is None:
                self._identities[path] = _identity(path)

    def _acknowledge(self, seq: int, chain: bytes) -> None:
        """Writes the mark for committed entries; if that fails, removes the entries again."""
        try:
            self._write_mark(JournalMark(seq, chain))
        except JournalError:
            self._has_unmarked = True
            with contextlib.suppress(JournalError):
                self._remove_unmarked()
            raise
        self._last, self._chain, self.lost = seq, chain, None
        if None in self._identities.values():
            self._remember_files()

    def _write_mark(self, mark: JournalMark) -> None:
        try:
            if self._mark is None:
                self._mark = HighWaterMark.create(self.path.parent, mark)
                self._held.callback(self._mark.close)
            else:
                self._mark.write(mark)
        except OSError as error:
            raise _refused_mark(self.path, error) from error

    def _remove_unmarked(self) -> None:
        if self._has_unmarked:
            with self._transaction():
                self._connection.execute("DELETE FROM events WHERE seq > ?", (self._last,))
            self._has_unmarked = False

    def _keep_chain(self) -> None:
        """Sets the base of the checksum chain to the last entry, within the caller's transaction."""
        row = f"{self._last} {self._chain.hex()}"
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('chain', ?)", (row,))

    def _corrupt(self, seq: int, good: int, problem: str) -> JournalCorrupt:
        return describe_damaged_entry(self.path, seq, good, problem, then=" and start once with --accept-journal-loss")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translate_errors():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
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
    # Our statements are fixed, so one that SQLite cannot parse indicates a damaged schema.
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
    data: Path,
    *,
    new_cluster_id: str,
    retained: int = 10_000,
    bytes_most: int = BYTES_MOST,
    accepts_loss: bool = False,
) -> SqliteJournal:
    """Opens the journal of a data directory, creates it if missing, and locks it for this process until it is closed.

    Raises JournalLost where acknowledged entries are gone, unless the caller `accepts_loss`.
    """
    path = data / FILE_NAME
    held = contextlib.ExitStack()
    try:
        hold_directory(data, held)
        mark = _mark_of(path, held)
        marked = None if mark is None else mark.newest
        if not path.exists():
            if marked is not None and marked.seq:
                _refuse_loss(path, LostEntries(1, marked.seq), last=0, accepts_loss=accepts_loss)
            _create(path, new_cluster_id)
        found = _examine(path, marked)
        if found.lost is not None:
            _refuse_loss(path, found.lost, last=found.last, accepts_loss=accepts_loss)
        connection = _connect(path, bytes_most)
        held.callback(connection.close)
        return SqliteJournal(path, connection, found, mark, retained=retained, held=held)
    except BaseException:
        held.close()
        raise


def hold_directory(data: Path, held: contextlib.ExitStack) -> None:
    """Creates the directory and locks it for this process; the kernel releases the lock however the process ends.

    Raises ControllerConfigError and JournalHeld.

    The lock is on the directory itself and on a file in it. The file names the holder, and is what earlier versions
    lock; but it can be removed and created again, and then two processes would each hold one.
    """
    try:
        data.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        directory = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, directory)
        lock = os.open(data / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)
        held.callback(os.close, lock)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link_error(data, LOCK_NAME) from error
        raise ControllerConfigError(
            f"data directory {data} cannot be used ({error.strerror})", "name a writable directory with --data"
        ) from error
    for descriptor in (directory, lock):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            raise JournalHeld(
                data / FILE_NAME,
                f"another controller{f' (process {holder})' if holder else ''} has it open",
                "stop that one, or name another --data directory",
            ) from error
        except OSError:
            # Some network file systems can lock files but not directories.
            if descriptor == lock:
                raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    _refuse_links(data)
    _tighten(data)


def _refuse_links(data: Path) -> None:
    """Refuses symbolic links: through one we would write, and change the mode of, a file that somebody else chose."""
    for path in data.iterdir():
        if path.is_symlink():
            raise _link_error(data, path.name)


def _link_error(data: Path, name: str) -> ControllerConfigError:
    return ControllerConfigError(
        f"data directory {data} holds a symbolic link, {name}",
        "replace it by the file itself; to keep data elsewhere, name that directory with --data",
    )


def _tighten(data: Path) -> None:
    """Removes the permissions that earlier versions granted to others."""
    for path in data.iterdir():
        found = path.lstat()
        is_wide = stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) & ~_FILE_MODE
        if is_wide and path.name.startswith(_OURS) and found.st_uid == os.geteuid():
            path.chmod(stat.S_IMODE(found.st_mode) & _FILE_MODE)


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns device and inode of a path; None if it does not exist."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# Checks of a journal against its mark


def _examine(path: Path, mark: JournalMark | None) -> _Examined:
    """Compares what the file contains with what the mark says that it should contain; writes nothing."""
    if path.stat().st_size == 0:
        raise JournalCorrupt(path, "the file is empty", "restore it from a backup, or remove it to begin anew")
    try:
        with contextlib.closing(_read_only(path)) as reader:
            reader.text_factory = bytes
            _check_header(path, reader)
            reader.execute("BEGIN")
            last, checkpointed = reader.execute(
                "SELECT max(coalesce((SELECT max(seq) FROM events), 0), coalesce((SELECT max(seq) FROM checkpoints), 0)),"
                " coalesce((SELECT max(seq) FROM checkpoints), 0)"
            ).fetchone()
            base = _chain_base(reader.execute("SELECT value FROM meta WHERE key = 'chain'").fetchone())
            if base is None or checkpointed > base.seq or last < base.seq:
                # There is no mark yet, or an earlier version wrote since: only the number can be compared.
                return _Examined(last, base, None, _missing(last, base, mark))
            lost = _missing(last, base, mark)
            links = [(seq, crc) for seq, crc in _rows(reader, "seq, crc32", base.seq) if isinstance(crc, int)]
            if [seq for seq, _ in links] != list(range(base.seq + 1, last + 1)):
                # Entries in between are missing: reading them reports which.
                return _Examined(last, base, base.chain, lost)
            upto = max(0, mark.seq - base.seq) if mark is not None else 0
            at_mark = extend_chain(base.chain, links[:upto])
            if lost is None and mark is not None and mark.seq >= base.seq and at_mark != mark.chain:
                sound = all(
                    isinstance(kind, bytes) and isinstance(body, bytes) and compute_entry_crc(seq, kind, body) == crc
                    for seq, kind, body, crc in _rows(reader, "seq, kind, body, crc32", base.seq)
                )
                # Reading reports damaged entries by number.
                lost = LostEntries(base.seq + 1, mark.seq) if sound else None
            return _Examined(last, base, extend_chain(at_mark, links[upto:]), lost)
    except _SQLITE_ERRORS as error:
        raise _translate(path, error) from error


def _missing(last: int, base: JournalMark | None, mark: JournalMark | None) -> LostEntries | None:
    """Returns the entries that are missing according to the numbers alone."""
    if mark is not None:
        return LostEntries(last + 1, mark.seq) if last < mark.seq else None
    # The mark is missing or damaged; before the first entry it may not have been created yet.
    return LostEntries(last + 1, None) if base is not None and last else None


def _rows(reader: sqlite3.Connection, columns: str, after: int) -> Iterator[Any]:
    return iter(reader.execute(f"SELECT {columns} FROM events WHERE seq > ? ORDER BY seq", (after,)))  # noqa: S608


def _chain_base(row: tuple[Any] | None) -> JournalMark | None:
    """Reads the base from a row of `meta`; None if it cannot be read."""
    try:
        seq, _, chain = row[0].decode().partition(" ") if row else ("", "", "")
        base = JournalMark(int(seq), bytes.fromhex(chain))
    except (ValueError, AttributeError):
        return None
    return base if len(base.chain) == len(CHAIN_START) else None


def _mark_of(path: Path, held: contextlib.ExitStack) -> HighWaterMark | None:
    try:
        mark = HighWaterMark.open(path.parent)
    except OSError as error:
        raise _refused_mark(path, error) from error
    if mark is not None:
        held.callback(mark.close)
    return mark


def _refuse_loss(path: Path, lost: LostEntries, *, last: int, accepts_loss: bool) -> None:
    if accepts_loss:
        return
    files = f"{path.name}, {path.name}-wal and {MARK_NAME}"
    problem = (
        f"{MARK_NAME} is missing or damaged, so nobody can tell whether entries after {last} were acknowledged"
        if lost.last is None
        else f"entries {lost.first} to {lost.last} were acknowledged and are gone: it ends at entry {last}"
        if last < lost.last
        else f"entries {lost.first} to {lost.last} are not those that were acknowledged: it is another journal's file"
    )
    raise JournalLost(
        path,
        problem,
        f"restore {files} as they were, together; or start once with --accept-journal-loss, which goes on from what is "
        "here, records the loss, and places nothing on a node that holds more than this journal knows",
        lost=lost,
    )


def _refused_mark(path: Path, error: OSError) -> JournalError:
    if error.errno == errno.ELOOP:
        return JournalUnavailable(path, f"{MARK_NAME} beside it is a symbolic link", "replace it by the file itself")
    kind = JournalFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else JournalUnavailable
    return kind(
        path,
        f"{MARK_NAME} beside it was refused ({error.strerror or error})",
        f"check the disk and the permissions of {path.parent}",
    )


def _create(path: Path, cluster_id: str) -> None:
    """Creates the file under a temporary name, so that the real name never refers to an incomplete file."""
    draft = path.with_suffix(".new")
    for leftover in (draft, draft.with_name(f"{draft.name}-journal")):
        leftover.unlink(missing_ok=True)
    try:
        # Files that SQLite creates beside it get the same mode.
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _FILE_MODE))
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.executescript(
                f"PRAGMA page_size={PAGE_BYTES}; PRAGMA synchronous=FULL; BEGIN; {_SCHEMA}"
                f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={FORMAT_VERSION}; COMMIT;"
            )
            connection.execute(
                "INSERT INTO meta VALUES ('cluster_id', ?), ('chain', ?)", (cluster_id, f"0 {CHAIN_START.hex()}")
            )
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


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=1.0)


def _connect(path: Path, bytes_most: int) -> sqlite3.Connection:
    # The single owner calls from the loop's thread at start and stop and from one worker thread in between.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
    # Damaged text is detected by its CRC, so it must be read as raw bytes.
    connection.text_factory = bytes
    try:
        _check_header(path, connection)
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA max_page_count={max(1, bytes_most // PAGE_BYTES)}").fetchall()
        # 16 MB of write-ahead log between checkpoints by SQLite; those in a thread of their own usually come first.
        connection.execute("PRAGMA wal_autocheckpoint=4096").fetchall()
        connection.execute(f"PRAGMA journal_size_limit={64 * 2**20}").fetchall()
    except BaseException as error:
        connection.close()
        if isinstance(error, _SQLITE_ERRORS):
            raise _translate(path, error) from error
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
