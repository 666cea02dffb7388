"""What anybody may read of the journal on PostgreSQL: the leader, a standby that follows it, and who copies it.

Owns the order and the verification of what is read, each read as of one moment. Must not know who leads, or write.
"""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from eelgrid_controller.errors import JournalCorrupt, JournalFenced, JournalFull, JournalUnavailable
from eelgrid_controller.runtime.audit_log import AuditFilter, AuditPage, build_audit_page
from eelgrid_controller.runtime.journal_rows import (
    compute_entry_crc,
    decode_checkpoint,
    describe_damaged_checkpoint,
    describe_damaged_entry,
)
from eelgrid_controller.runtime.postgresql.connections import FaultKind, describe_fault, read_snapshot
from eelgrid_controller.runtime.postgresql.schema import audit, checkpoints, journal
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, JournalHistory

# Rows that one round trip of a long read fetches.
_FETCHED_ONCE = 1000


def raise_journal_error(location: str, error: BaseException) -> NoReturn:
    """Raises the journal's error for one of the database."""
    fault = describe_fault(error)
    if fault.kind is FaultKind.CONFLICT:
        raise JournalFenced(location, f"somebody else wrote to it ({fault.problem})", fault.remedy) from error
    kind = {FaultKind.FULL: JournalFull, FaultKind.CORRUPT: JournalCorrupt}.get(fault.kind, JournalUnavailable)
    raise kind(location, fault.problem, fault.remedy) from error


class JournalReader:
    """Reads the journal up to the last entry that it knows."""

    def __init__(self, engine: Engine, location: str, *, last_seq: int = 0) -> None:
        self.path = location
        self._engine = engine
        self._last = last_seq

    @property
    def last_seq(self) -> int:
        """Number of the last entry."""
        return self._last

    def newest_checkpoint(self) -> Checkpoint | None:
        """Returns the newest checkpoint, its CRC checked."""
        with self._translate_errors(), read_snapshot(self._engine) as connection:
            newest = select(checkpoints).order_by(checkpoints.c.seq.desc()).limit(2)
            rows = connection.execute(newest).all()
        if not rows:
            return None
        if checkpoint := decode_row(rows[0]):
            return checkpoint
        raise describe_damaged_checkpoint(self.path, rows[0].seq, rows[1].seq if len(rows) > 1 else None)

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """Yields entries in order; raises JournalCorrupt at the first that is damaged or missing."""
        upto = self._last
        with self._translate_errors(), read_snapshot(self._engine) as connection:
            last = yield from self.read_entries(connection, seq, upto)
        if last != upto:
            raise describe_damaged_entry(self.path, last + 1, seq, f"entries {last + 1} to {upto} are missing")

    def read_entries(
        self, connection: Connection, seq: int, upto: int
    ) -> Generator[tuple[int, JournalEntry], None, int]:
        """Yields the acknowledged entries after `seq`, verified; returns the number of the last."""
        expected = seq + 1
        found = select(journal).where(journal.c.seq.between(expected, upto)).order_by(journal.c.seq)
        with connection.execute(found.execution_options(yield_per=_FETCHED_ONCE)) as rows:
            for row in rows:
                if row.seq != expected:
                    raise describe_damaged_entry(
                        self.path, expected, seq, f"entries {expected} to {row.seq - 1} are missing"
                    )
                if compute_entry_crc(row.seq, row.kind.encode(), row.body.encode()) != row.crc32:
                    raise describe_damaged_entry(self.path, row.seq, seq, f"entry {row.seq} is damaged")
                yield row.seq, JournalEntry(row.kind, json.loads(row.body))
                expected += 1
        return expected - 1

    def read_history(self) -> JournalHistory:
        """Reads everything that is stored, as of one moment.

        Returns all entries if the first is still stored, otherwise the oldest checkpoint and the entries since.
        """
        upto = self._last
        with self._translate_errors(), read_snapshot(self._engine) as connection:
            if connection.execute(select(func.min(journal.c.seq))).scalar() == 1:
                return JournalHistory(None, tuple(self.read_entries(connection, 0, upto)))
            row = connection.execute(select(checkpoints).order_by(checkpoints.c.seq).limit(1)).first()
            checkpoint = None if row is None else decode_row(row)
            if row is not None and checkpoint is None:
                raise describe_damaged_entry(self.path, row.seq, 0, f"the checkpoint at entry {row.seq} is damaged")
            begin = checkpoint.seq if checkpoint else 0
            return JournalHistory(checkpoint, tuple(self.read_entries(connection, begin, upto)))

    def read_audit_page(self, wanted: AuditFilter, *, size: int, before: int | None = None) -> AuditPage:
        """Reads a page of the audit log; any thread may call it at any time."""
        matching = [audit.c.time_ns >= wanted.since_ns, audit.c.denied >= int(wanted.denied)]
        if wanted.user:
            matching.append(audit.c.user_name == wanted.user)
        if wanted.call:
            matching.append(audit.c.call == wanted.call)
        page = select(audit.c.number, audit.c.body, audit.c.crc32).where(*matching).order_by(audit.c.number.desc())
        if before is not None:
            page = page.where(audit.c.number < before)
        with self._translate_errors(), read_snapshot(self._engine) as connection:
            total = connection.execute(select(func.count()).select_from(audit).where(*matching)).scalar_one()
            rows = connection.execute(page.limit(size + 1)).all()
        return build_audit_page([(number, body.encode(), crc) for number, body, crc in rows], size=size, total=total)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise_journal_error(self.path, error)


def decode_row(row: Any) -> Checkpoint | None:
    """Decodes a checkpoint's row; None if it is damaged."""
    return decode_checkpoint(row.seq, row.body, row.digest.encode(), row.crc32)
