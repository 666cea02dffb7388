"""The audit log: who requested which change and how the call ended, in a table beside the journal's entries.

Owns which calls are audited, the summary of a request, and the rows on disk with their checksums and bounds. Rows are
written in the transactions of the journal, whose owner calls `AuditTable`; each database implements `AuditRows`.
"""

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from eelgrid_controller.state.journal import Journal, JournalCopy
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import AUDIT_ARGUMENTS_MOST, AUDIT_REASON_MOST, AuditEntry
from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.roles import Caller

# Of one request, so that a policy or a thousand moves cost no more than what is kept of them.
_ITEMS_SHOWN = 8
_TEXT_MOST = 120
_DEPTH_MOST = 4

# Calls that change what the journal holds: their entries are in the commit of their events.
JOURNALLED = frozenset(
    {
        "SubmitWorkload",
        "CancelWorkload",
        "ScaleWorkload",
        "MoveToQueue",
        "HoldWorkload",
        "ReleaseWorkload",
        "RequeueWorkload",
        "UpdatePolicy",
        "ApplyMoves",
        "ApplyPartitions",
        "RecordPoints",
        "RemoveNode",
        "CordonNode",
        "UncordonNode",
        "DrainNode",
        "ReconcileNode",
    }
)
# Calls that only tell something, often: those alike are one entry a minute.
REPORTS = frozenset({"ReportProgress", "ConfirmEnergyExport"})
# Every call that changes something; the others change what is in no journal.
AUDITED = JOURNALLED | REPORTS | {"Attach", "StartShadow", "StopShadow", "RemoveEnergyExporter"}


@dataclass(frozen=True, slots=True)
class AuditedCall:
    """An operator's call: method, caller, peer and a summary of its request; without TLS the caller is None."""

    method: str
    caller: Caller | None
    peer: str
    arguments: str = ""

    def entry(self, *, time_ns: int, code: str, reason: str = "", calls: int = 1, revision: int = 0) -> AuditEntry:
        """Builds the audit entry of the call, or of several identical ones."""
        caller = self.caller
        return AuditEntry(
            time_ns=time_ns,
            subject="" if caller is None else caller.subject,
            user="" if caller is None else caller.user,
            role="" if caller is None else caller.greatest_role,
            peer=escape_line_breaks(self.peer),
            call=self.method,
            arguments=self.arguments,
            code=code,
            reason=escape_line_breaks(reason)[:AUDIT_REASON_MOST],
            calls=calls,
            revision=revision,
        )


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Filter of a query for entries."""

    since_ns: int = 0
    user: str = ""
    call: str = ""
    denied: bool = False


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries, the newest first; how many match in all, whether there are more, and how many are damaged."""

    entries: tuple[AuditEntry, ...] = ()
    total: int = 0
    next_before: int = 0
    damaged: int = 0


def is_denied(code: str) -> bool:
    """Returns whether the status code says that the caller lacked the right."""
    return code in {"PERMISSION_DENIED", "UNAUTHENTICATED"}


def escape_line_breaks(text: str) -> str:
    """Replaces every character that would start a line or move a cursor."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _submission(request: Any) -> dict[str, Any]:
    spec = request.spec
    asked = {
        "workload_id": request.workload_id,
        "name": spec.name,
        "kind": spec.kind.name.lower(),
        "namespace": spec.namespace,
        "user": spec.user,
        "queue": spec.queue,
        "replicas": spec.replicas,
        "gpu_count": spec.request.gpu_count,
        "gpu_milli": spec.request.gpu_milli,
        "priority": spec.priority,
    }
    kept = {name: value for name, value in asked.items() if value}
    return kept | ({"labels": _bound_plain(spec.labels)} if spec.labels else {})


def _recorded_points(request: Any) -> dict[str, Any]:
    """Returns how many points a request has, and the first few."""
    shown = [_bound_plain(to_plain(point, brief=True)) for point in request.points[:_ITEMS_SHOWN]]
    return {"count": len(request.points), "points": shown}


_ESSENCES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "SubmitWorkload": _submission,
    "RecordPoints": _recorded_points,
}


def summarize_request(method: str, request: Any) -> str:
    """Summarizes a request as JSON of at most AUDIT_ARGUMENTS_MOST characters; longer ones are truncated."""
    essence = _ESSENCES.get(method)
    plain = essence(request) if essence is not None else _bound_plain(to_plain(request, brief=True))
    text = json.dumps(plain, ensure_ascii=True, separators=(",", ":"))
    return text if len(text) <= AUDIT_ARGUMENTS_MOST else f"{text[: AUDIT_ARGUMENTS_MOST - 3]}..."


def _bound_plain(plain: Any, depth: int = 0) -> Any:
    """Plain values with the first few items of each collection, and the beginning of each text."""
    if isinstance(plain, str):
        return plain if len(plain) <= _TEXT_MOST else f"{plain[:_TEXT_MOST]}..."
    if isinstance(plain, Mapping | list | tuple):
        if depth >= _DEPTH_MOST:
            return f"({len(plain)} items)"
        if isinstance(plain, Mapping):
            kept: Any = {
                key[:_TEXT_MOST]: _bound_plain(value, depth + 1) for key, value in list(plain.items())[:_ITEMS_SHOWN]
            }
            return kept | ({"...": len(plain) - _ITEMS_SHOWN} if len(plain) > _ITEMS_SHOWN else {})
        more = [f"... {len(plain) - _ITEMS_SHOWN} more"] if len(plain) > _ITEMS_SHOWN else []
        return [*(_bound_plain(item, depth + 1) for item in plain[:_ITEMS_SHOWN]), *more]
    return plain


# A quarter of a million calls: two months of a cluster with three calls a minute, a day of a busy one.
AUDIT_ROWS_MOST = 250_000
# Rows have some 400 bytes; this bounds those with long arguments.
AUDIT_BYTES_MOST = 256 * 2**20
_SPARE = 64


class AuditRow(NamedTuple):
    """An entry as it is stored."""

    number: int
    time_ns: int
    user: str
    call: str
    denied: int
    body: str
    crc32: int


class AuditRows(Protocol):
    """The rows of one database; what writes is called inside the transaction of their journal."""

    def measure(self) -> tuple[int, int, int]:
        """Returns the last number, how many rows there are, and how many bytes their bodies have."""

    def insert(self, rows: Sequence[AuditRow]) -> None:
        """Writes rows."""

    def measure_oldest(self, most: int) -> Sequence[tuple[int, int]]:
        """Returns number and bytes of the oldest rows, in order."""

    def delete_before(self, number: int) -> None:
        """Deletes the rows with lower numbers."""


class AuditTable:
    """Writes the audit log; `insert` is called inside the owner's transaction, and `committed` after it."""

    def __init__(self, rows: AuditRows) -> None:
        self.rows_most = AUDIT_ROWS_MOST
        self.bytes_most = AUDIT_BYTES_MOST
        self._stored = rows
        self._last, self._rows, self._bytes = rows.measure()
        self._new = (0, 0)

    @property
    def last(self) -> int:
        """Number of the last entry that is on disk."""
        return self._last

    def insert(self, entries: Sequence[AuditEntry]) -> None:
        """Writes entries in order."""
        rows, size = [], 0
        for number, entry in enumerate(entries, self._last + 1):
            plain = to_plain(entry, brief=True)
            plain.pop("number", None)
            body = json.dumps(plain, separators=(",", ":")).encode()
            size += len(body)
            denied, text = is_denied(entry.code), body.decode()
            rows.append(AuditRow(number, entry.time_ns, entry.user, entry.call, denied, text, _crc(number, body)))
        self._stored.insert(rows)
        self._new = len(rows), size

    def committed(self) -> None:
        """Confirms that the inserted rows are on disk."""
        rows, size = self._new
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
        gone, freed = 0, 0
        for number, size in self._stored.measure_oldest(max(self._rows - rows_left, self._rows // _SPARE + 1)):
            if self._rows - gone <= rows_left and self._bytes - freed <= bytes_left:
                break
            gone, freed, first = gone + 1, freed + size, number + 1
        self._stored.delete_before(first)
        return gone, freed

    def pruned(self, rows: int, size: int) -> None:
        """Confirms that the deleted rows are gone from disk."""
        self._rows, self._bytes = self._rows - rows, self._bytes - size


class AuditedJournal(Journal, Protocol):
    """A journal whose transactions also hold the audit log."""

    @property
    def cluster_id(self) -> str:
        """The name that this cluster was given when its journal was created."""

    @property
    def audit_table(self) -> AuditTable:
        """The audit log's bounds."""

    def read_audit_page(self, wanted: AuditFilter, *, size: int, before: int | None = None) -> AuditPage:
        """Reads a page of the audit log; any thread may call it at any time. Raises JournalError."""

    def restore(self, copy: JournalCopy) -> None:
        """Takes over all of another journal, or nothing; raises JournalNotEmpty unless it is empty."""

    def mark_moved(self, target: str) -> None:
        """Makes every later opening raise JournalMoved."""


_CREATE = (
    "CREATE TABLE IF NOT EXISTS audit (number INTEGER PRIMARY KEY, time_ns INTEGER NOT NULL, user TEXT NOT NULL, "
    "call TEXT NOT NULL, denied INTEGER NOT NULL, body TEXT NOT NULL, crc32 INTEGER NOT NULL)"
)
_MATCHING = "FROM audit WHERE time_ns >= ? AND (? = '' OR user = ?) AND (? = '' OR call = ?) AND denied >= ?"


class SqliteAuditRows:
    """Implements `AuditRows`: a table that is made with the first entry."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        # Whether the table is on disk; one that this transaction makes may not come to be.
        self._is_there = False

    def measure(self) -> tuple[int, int, int]:
        """See `AuditRows`."""
        if not _has_table(self._connection):
            return 0, 0, 0
        last, rows, size = self._connection.execute(
            "SELECT coalesce(max(number), 0), count(*), coalesce(sum(length(CAST(body AS BLOB))), 0) FROM audit"
        ).fetchone()
        return last, rows, size

    def insert(self, rows: Sequence[AuditRow]) -> None:
        """See `AuditRows`."""
        if not self._is_there:
            self._is_there = _has_table(self._connection)
            self._connection.execute(_CREATE)
        self._connection.executemany("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def measure_oldest(self, most: int) -> Sequence[tuple[int, int]]:
        """See `AuditRows`."""
        return self._connection.execute(
            "SELECT number, length(CAST(body AS BLOB)) FROM audit ORDER BY number LIMIT ?", (most,)
        ).fetchall()

    def delete_before(self, number: int) -> None:
        """See `AuditRows`."""
        self._connection.execute("DELETE FROM audit WHERE number < ?", (number,))


def _crc(number: int, body: bytes) -> int:
    return zlib.crc32(b"%d\n%b" % (number, body))


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
    return build_audit_page(rows, size=size, total=total)


def build_audit_page(rows: Sequence[tuple[int, object, int]], *, size: int, total: int) -> AuditPage:
    """Builds a page of `size` from number, body and CRC of the newest rows; one row more says that there are more."""
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
