"""The audit log on disk: a table in the journal's SQLite file, written in the same transactions.

Owns the rows, their checksums and the bounds of the table. Must not know which calls are audited.
"""

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eelgrid_controller.state.audit_entries import AuditFilter, AuditPage, is_denied
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import AuditEntry
from eelgrid_protos.plain_messages import from_plain, to_plain

# A quarter of a million calls: two months of a cluster with three calls a minute, a day of a busy one.
AUDIT_ROWS_MOST = 250_000
# Rows have some 400 bytes; this bounds those with long arguments.
AUDIT_BYTES_MOST = 256 * 2**20
_SPARE = 64
_CREATE = (
    "CREATE TABLE IF NOT EXISTS audit (number INTEGER PRIMARY KEY, time_ns INTEGER NOT NULL, user TEXT NOT NULL, "
    "call TEXT NOT NULL, denied INTEGER NOT NULL, body TEXT NOT NULL, crc32 INTEGER NOT NULL)"
)


_MATCHING = "FROM audit WHERE time_ns >= ? AND (? = '' OR user = ?) AND (? = '' OR call = ?) AND denied >= ?"


def _crc(number: int, body: bytes) -> int:
    return zlib.crc32(b"%d\n%b" % (number, body))


class AuditTable:
    """Writes the audit log; `insert` is called inside the owner's transaction, and `committed` after it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.rows_most = AUDIT_ROWS_MOST
        self.bytes_most = AUDIT_BYTES_MOST
        self._connection = connection
        self._last = self._rows = self._bytes = 0
        self._new = (0, 0)
        self._is_there = _has_table(connection)
        if self._is_there:
            self._last, self._rows, self._bytes = connection.execute(
                "SELECT coalesce(max(number), 0), count(*), coalesce(sum(length(CAST(body AS BLOB))), 0) FROM audit"
            ).fetchone()

    @property
    def rows(self) -> int:
        """Number of stored rows."""
        return self._rows

    def insert(self, entries: Sequence[AuditEntry]) -> None:
        """Writes entries in order."""
        if not self._is_there:
            self._connection.execute(_CREATE)
        rows, size = [], 0
        for number, entry in enumerate(entries, self._last + 1):
            plain = to_plain(entry, brief=True)
            plain.pop("number", None)
            body = json.dumps(plain, separators=(",", ":")).encode()
            size += len(body)
            rows.append(
                (
                    number,
                    entry.time_ns,
                    entry.user,
                    entry.call,
                    is_denied(entry.code),
                    body.decode(),
                    _crc(number, body),
                )
            )
        self._connection.executemany("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        self._new = len(rows), size

    def committed(self) -> None:
        """Confirms that the inserted rows are on disk."""
        rows, size = self._new
        self._is_there = True
        self._new = (0, 0)
        self._last, self._rows, self._bytes = self._last + rows, self._rows + rows, self._bytes + size

    @property
    def is_full(self) -> bool:
        """Returns whether the oldest rows must be deleted before more are written."""
        return self._rows >= self.rows_most or self._bytes >= self.bytes_most

    def prune(self) -> tuple[int, int]:
        """Deletes the oldest rows until there is space, in the owner's transaction; returns how many rows and bytes."""
        rows_left = self.rows_most - self.rows_most // _SPARE - 1
        bytes_left = self.bytes_most - self.bytes_most // _SPARE - 1
        first = self._last - self._rows + 1
        rows = self._connection.execute(
            "SELECT number, length(CAST(body AS BLOB)) FROM audit ORDER BY number LIMIT ?",
            (max(self._rows - rows_left, self._rows // _SPARE + 1),),
        ).fetchall()
        gone, freed = 0, 0
        for number, size in rows:
            if self._rows - gone <= rows_left and self._bytes - freed <= bytes_left:
                break
            gone, freed, first = gone + 1, freed + size, number + 1
        self._connection.execute("DELETE FROM audit WHERE number < ?", (first,))
        return gone, freed

    def pruned(self, rows: int, size: int) -> None:
        """Confirms that the deleted rows are gone from disk."""
        self._rows, self._bytes = self._rows - rows, self._bytes - size


def _has_table(connection: sqlite3.Connection) -> bool:
    found = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'audit'").fetchone()
    return bool(found[0])


def read_audit_page(path: Path, wanted: AuditFilter, *, size: int, before: int | None) -> AuditPage:
    """Reads a page of the entries numbered below `before`, or of all if None; raises sqlite3.Error."""
    values = (wanted.since_ns, wanted.user, wanted.user, wanted.call, wanted.call, int(wanted.denied))
    with contextlib.closing(
        sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    ) as reader:
        reader.text_factory = bytes
        reader.execute("BEGIN")
        if not _has_table(reader):
            return AuditPage()
        (total,) = reader.execute(f"SELECT count(*) {_MATCHING}", values).fetchone()  # a constant
        rows = reader.execute(
            f"SELECT number, body, crc32 {_MATCHING} AND number < ? ORDER BY number DESC LIMIT ?",
            (*values, 2**62 if before is None else before, size + 1),
        ).fetchall()
    entries = [_entry(*row) for row in rows[:size]]
    found = tuple(entry for entry in entries if entry is not None)
    more = rows[size - 1][0] if len(rows) > size else 0
    return AuditPage(found, total, more, len(entries) - len(found))


def _entry(number: int, body: object, crc: int) -> AuditEntry | None:
    """Decodes the entry in a row; None if it is damaged."""
    if not isinstance(body, bytes) or _crc(number, body) != crc:
        return None
    try:
        return replace(from_plain(AuditEntry, json.loads(body), trusted=True), number=number)
    except (ContractError, ValueError, TypeError):
        # A newer version wrote fields that this one does not know.
        return None
