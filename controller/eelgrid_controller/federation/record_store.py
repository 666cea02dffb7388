"""The front's records on disk: one row for each workload, in a SQLite file that one process holds.

Owns the file, its rows and their age: of settled records the newest are kept. A write is on disk when it returns: the
journal mode is WAL with synchronous=FULL. What comes while one commit is under way is the next one; a record that cannot be
written costs the others of its commit nothing. Reads and writes run in one thread of their own. Must not know what a record means.
"""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.federation.dispatch import Copy, CopyPhase, Dispatch, StoredRecord
from eelgrid_protos import codec
from eelgrid_protos.messages import SubmitWorkloadRequest, Workload

_Result = TypeVar("_Result")
# Of settled workloads; a row has some kilobytes.
SETTLED_MOST = 10_000
_PRUNE_EVERY = 100
_COMMIT_MOST = 512
# Id, whether it is settled, state, what its cluster last said, and of a new record the request, which never changes.
_Row: TypeAlias = tuple[str, bool, str, bytes | None, bytes | None]
_VERSION = 1
_FILE_NAME = "front.db"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS dispatch (
    workload_id TEXT PRIMARY KEY,
    is_settled INTEGER NOT NULL,
    changed INTEGER NOT NULL,
    state TEXT NOT NULL,
    request BLOB NOT NULL,
    latest BLOB
) STRICT;
CREATE INDEX IF NOT EXISTS by_age ON dispatch (is_settled, changed);
"""
_INSERT = """
INSERT INTO dispatch (workload_id, is_settled, changed, state, latest, request)
VALUES (?1, ?2, (SELECT 1 + coalesce(max(changed), 0) FROM dispatch WHERE is_settled = ?2), ?3, ?4, ?5)
ON CONFLICT (workload_id) DO UPDATE SET
    is_settled = excluded.is_settled, changed = excluded.changed, state = excluded.state, latest = excluded.latest
"""
_UPDATE = """
UPDATE dispatch
SET is_settled = ?2, changed = (SELECT 1 + coalesce(max(changed), 0) FROM dispatch WHERE is_settled = ?2), state = ?3, latest = ?4
WHERE workload_id = ?1
"""


class StoreFault(Exception):
    """A record cannot be written or read; nothing of the write remains."""


def encode_state(dispatch: Dispatch) -> str:
    """Encodes everything but the request as JSON."""
    return json.dumps(
        {
            "owner": dispatch.owner,
            "submitted_ns": dispatch.submitted_ns,
            "chosen": dispatch.chosen,
            "is_cancelled": dispatch.is_cancelled,
            "moving_to": dispatch.moving_to,
            "may_hold": dispatch.may_hold,
            "has_failed": dispatch.has_failed,
            "decision": dispatch.decision,
            "pinned_to": dispatch.pinned_to,
            "held_by": dispatch.held_by,
            "met": dispatch.met,
            "copies": [
                {"cluster": one.cluster, "phase": one.phase.value, "started": one.started, "problem": one.problem}
                for one in dispatch.copies
            ],
        },
        separators=(",", ":"),
    )


def decode_state(workload_id: str, request: SubmitWorkloadRequest, text: str) -> Dispatch:
    """Decodes what `encode_state` made."""
    state: dict[str, Any] = json.loads(text)
    copies = tuple(Copy(**{**one, "phase": CopyPhase(one["phase"])}) for one in state.pop("copies"))
    # Records of an older version do not say what they are pinned to, what is met and who holds it.
    decision, met = tuple(state.pop("decision")), tuple(state.pop("met", ()))
    return Dispatch(workload_id=workload_id, request=request, copies=copies, decision=decision, met=met, **state)


class RecordStore:
    """The file, from `open` until `close`."""

    def __init__(self, folder: Path, *, settled_most: int = SETTLED_MOST) -> None:
        self.path = folder / _FILE_NAME
        self._settled_most = settled_most
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="front-records")
        self._connection: sqlite3.Connection | None = None
        self._writes = 0
        # Ids of unsettled records that this process has written.
        self._known: set[str] = set()
        self._waiting: list[tuple[_Row, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def open(self) -> list[StoredRecord]:
        """Opens the file, which no other process may have, and returns all records; raises ControllerConfigError."""
        try:
            return await self._run(self._open)
        except (sqlite3.Error, OSError, ValueError) as error:
            await self.close()
            raise ControllerConfigError(
                f"data {self.path}: {error}", "end the other front that has it open, or name another folder with --data"
            ) from error

    async def write(self, dispatch: Dispatch, latest: Workload | None) -> None:
        """Writes one record; raises StoreFault."""
        key = dispatch.workload_id
        row = (
            key,
            dispatch.is_settled,
            encode_state(dispatch),
            None if latest is None else codec.encode_message(latest),
            None if key in self._known else codec.encode_message(dispatch.request),
        )
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, answer))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_waiting())
        await answer
        if dispatch.is_settled:
            self._known.discard(key)
        else:
            self._known.add(key)

    async def _write_waiting(self) -> None:
        """Writes what waits, commit by commit, until nothing does."""
        while self._waiting:
            batch, self._waiting = self._waiting[:_COMMIT_MOST], self._waiting[_COMMIT_MOST:]
            rows = [row for row, _ in batch]
            try:
                errors = await self._run(lambda rows=rows: self._write(rows))  # type: ignore[misc]
            except sqlite3.Error as error:
                errors = [error] * len(batch)
            for (_, answer), problem in zip(batch, errors, strict=True):
                if answer.done():
                    continue
                if problem is None:
                    answer.set_result(None)
                else:
                    answer.set_exception(StoreFault(f"{self.path}: {problem}"))

    async def close(self) -> None:
        """Closes the file after what is being written."""
        if self._writing is not None:
            await self._writing
        if self._connection is not None:
            await self._run(self._connection.close)
            self._connection = None
        self._thread.shutdown()

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self) -> list[StoredRecord]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
        self._connection = connection
        # Held for good from the first write on: a second front on the same records would choose for itself.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in {0, _VERSION}:
            raise ValueError(f"a newer version of Eelgrid wrote it (format {version})")
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
        with closing(
            connection.execute("SELECT workload_id, state, request, latest FROM dispatch ORDER BY changed")
        ) as rows:
            return [_decode_row(*row) for row in rows]

    def _write(self, rows: list[_Row]) -> list[sqlite3.Error | None]:
        """Writes rows in one commit; returns for each why it could not be written."""
        connection = self._connection
        assert connection is not None, "open() comes first"
        errors: list[sqlite3.Error | None] = []
        connection.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                try:
                    if row[-1] is None:
                        connection.execute(_UPDATE, row[:-1])
                    else:
                        connection.execute(_INSERT, row)
                    errors.append(None)
                except (sqlite3.IntegrityError, sqlite3.DataError) as error:
                    errors.append(error)
            self._prune(connection, len(rows))
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return errors

    def _prune(self, connection: sqlite3.Connection, written: int) -> None:
        before, self._writes = self._writes, self._writes + written
        if self._writes // _PRUNE_EVERY > before // _PRUNE_EVERY:
            connection.execute(
                "DELETE FROM dispatch WHERE is_settled = 1 AND workload_id NOT IN "
                "(SELECT workload_id FROM dispatch WHERE is_settled = 1 ORDER BY changed DESC LIMIT ?)",
                (self._settled_most,),
            )


def _decode_row(workload_id: str, state: str, request: bytes, latest: bytes | None) -> StoredRecord:
    dispatch = decode_state(workload_id, codec.decode_message(SubmitWorkloadRequest, request), state)
    return StoredRecord(dispatch, None if latest is None else codec.decode_message(Workload, latest))
