"""The journal on PostgreSQL: entries, checkpoints and audit log in transactions that only the leader can commit.

Owns what is in each transaction, and what is known of one whose end was not learnt. Must not know what an event means.

Each write begins by holding the term (leadership.py), and the number of an entry is its primary key: two fences that
need no clock. Where a connection breaks within a write, nobody knows whether it was committed; then the term is locked
exclusively on a new connection, which waits for whatever the server still does for the old one, and the rows tell. As
long as even that cannot be done, the write has failed for its caller, and whatever became of it is removed by the next
transaction before anything else. So a method that raises has changed nothing, as the port demands.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from sqlalchemy import URL, Connection, Engine, delete, func, insert, select
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from eelgrid_controller.errors import (
    JournalCorrupt,
    JournalError,
    JournalFenced,
    JournalFull,
    JournalHeld,
    JournalMoved,
    JournalNotEmpty,
    JournalUnavailable,
    LostEntries,
)
from eelgrid_controller.runtime.audit_log import AuditFilter, AuditPage, AuditRow, AuditTable, build_audit_page
from eelgrid_controller.runtime.journal_rows import (
    compute_entry_crc,
    decode_checkpoint,
    describe_damaged_checkpoint,
    describe_damaged_entry,
    encode_body,
    encode_checkpoint,
)
from eelgrid_controller.runtime.postgresql.connections import (
    FaultKind,
    UnreplicatedCommit,
    begin_bounded,
    check_session,
    describe_fault,
    discard,
    is_lock_timeout,
    lengthen_statements,
    locate,
    make_engine,
    read_snapshot,
)
from eelgrid_controller.runtime.postgresql.leadership import (
    LeaseKeeper,
    LeaseTimes,
    Term,
    boottime_s,
    end_stalled,
    hold_term,
    read_term,
    take_term,
)
from eelgrid_controller.runtime.postgresql.schema import audit, checkpoints, journal, meta, upgrade_schema
from eelgrid_controller.state.journal import (
    Checkpoint,
    JournalCopy,
    JournalCounters,
    JournalEntry,
    JournalHistory,
)
from eelgrid_protos.messages import AuditEntry

# Rows that one round trip of a long read fetches.
_FETCHED_ONCE = 1000
# Rows of a copy that are sent as one.
_COPIED_ONCE = 5000
_PROBE_CHARACTERS = 256 * 1024
_TRY_AGAIN_S = 0.5
_ERRORS = (SQLAlchemyError, UnreplicatedCommit)


class _FateUnknown(JournalUnavailable):
    """The connection broke within a write, which may be committed or not."""


def raise_journal_error(location: str, error: BaseException) -> NoReturn:
    """Raises the journal's error for one of the database."""
    fault = describe_fault(error)
    if fault.kind is FaultKind.CONFLICT:
        raise JournalFenced(location, f"somebody else wrote to it ({fault.problem})", fault.remedy) from error
    kind = {FaultKind.FULL: JournalFull, FaultKind.CORRUPT: JournalCorrupt}.get(fault.kind, JournalUnavailable)
    raise kind(location, fault.problem, fault.remedy) from error


class PostgresAuditRows:
    """Implements `AuditRows` in the transaction that its journal is in."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def measure(self) -> tuple[int, int, int]:
        """See `AuditRows`."""
        columns = (func.coalesce(func.max(audit.c.number), 0), func.count(), func.sum(func.octet_length(audit.c.body)))
        last, rows, size = self.connection.execute(select(*columns)).one()
        return last, rows, int(size or 0)

    def insert(self, rows: Sequence[AuditRow]) -> None:
        """See `AuditRows`."""
        named = []
        for row in rows:
            columns = {**row._asdict(), "denied": int(row.denied)}
            # A text of PostgreSQL holds any character but this one.
            columns["user_name"] = columns.pop("user").replace("\0", "?")
            named.append(columns)
        self.connection.execute(insert(audit), named)

    def measure_oldest(self, most: int) -> Sequence[tuple[int, int]]:
        """See `AuditRows`."""
        columns = select(audit.c.number, func.octet_length(audit.c.body))
        return [
            (number, size) for number, size in self.connection.execute(columns.order_by(audit.c.number).limit(most))
        ]

    def delete_before(self, number: int) -> None:
        """See `AuditRows`."""
        self.connection.execute(delete(audit).where(audit.c.number < number))


class PostgresJournal:
    """Implements `AuditedJournal` for one term; made by `open_postgres_journal`."""

    is_remote = True

    def __init__(
        self,
        engine: Engine,
        mine: Term,
        keeper: LeaseKeeper,
        *,
        url: URL,
        location: str,
        new_cluster_id: str,
        retained: int,
    ) -> None:
        self.path = location
        # For others who write in this term.
        self.url = url
        self.term = mine
        # What to let go of with the connections.
        self.on_close: Callable[[], None] = lambda: None
        self.counters = JournalCounters()
        # Nothing beside the database could tell; a rewound one is found by agents that know more.
        self.lost: LostEntries | None = None
        self._engine = engine
        self._keeper = keeper
        self._retained = retained
        self._connection: Connection | None = None
        self._last = 0
        # Whether a write may have been committed of which nobody was told.
        self._is_unsettled = False
        try:
            self._begin(new_cluster_id)
        except BaseException:
            self.close()
            raise

    def _begin(self, new_cluster_id: str) -> None:
        """Reads what is there, and names the cluster if nothing is."""
        with self._writing() as connection, begin_bounded(connection):
            lengthen_statements(connection)
            hold_term(connection, self.term, location=self.path)
            connection.execute(upsert(meta).values(key="cluster_id", value=new_cluster_id).on_conflict_do_nothing())
            moved = connection.execute(select(meta.c.value).where(meta.c.key == "moved_to")).scalar()
            if moved is not None:
                raise JournalMoved(self.path, moved)
            self.cluster_id: str = connection.execute(
                select(meta.c.value).where(meta.c.key == "cluster_id")
            ).scalar_one()
            seqs = (select(func.coalesce(func.max(table.c.seq), 0)) for table in (journal, checkpoints))
            self._last = max(connection.execute(one).scalar_one() for one in seqs)
            self._audit_rows = PostgresAuditRows(connection)
            self.audit_table = AuditTable(self._audit_rows)

    @property
    def last_seq(self) -> int:
        """Number of the last entry."""
        return self._last

    @property
    def epoch(self) -> int:
        """That of this process's term."""
        return self.term.epoch

    @property
    def may_lead(self) -> bool:
        """Whether this process may decide now; see `LeaseKeeper`."""
        return self._keeper.may_lead

    def hold_own_term(self, connection: Connection, *, is_exclusive: bool = False) -> None:
        """Keeps this process's term within a transaction of another store; see `hold_term`."""
        hold_term(connection, self.term, location=self.path, is_exclusive=is_exclusive)

    # Writing

    def append(self, entries: Sequence[JournalEntry], audited: Sequence[AuditEntry] = ()) -> int:
        """Writes all entries, and those of the audit log, in one transaction that is on disk on return."""
        rows = [self._entry_row(seq, entry) for seq, entry in enumerate(entries, self._last + 1)]
        try:
            with self._transaction() as connection:
                if rows:
                    connection.execute(insert(journal), rows)
                if audited:
                    self.audit_table.insert(audited)
        except _FateUnknown:
            if not self._was_committed(len(rows), len(audited)):
                raise
        self._last += len(rows)
        if audited:
            self.audit_table.committed()
            self._prune_audit()
        self.counters.commits += 1
        self.counters.entries += len(rows)
        self.counters.bytes_written += sum(len(row["body"].encode()) for row in rows)
        return self._last

    def _entry_row(self, seq: int, entry: JournalEntry) -> dict[str, Any]:
        body = encode_body(entry.body)
        crc = compute_entry_crc(seq, entry.kind.encode(), body)
        return {"seq": seq, "epoch": self.term.epoch, "kind": entry.kind, "body": body.decode(), "crc32": crc}

    def _checkpoint_row(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return {**encode_checkpoint(checkpoint)._asdict(), "epoch": self.term.epoch}

    def restore(self, copy: JournalCopy) -> None:
        """See `AuditedJournal`."""
        with self._transaction() as connection:
            lengthen_statements(connection)
            if self._last or self.audit_table.last or copy.cluster_id != self.cluster_id:
                raise JournalNotEmpty(self.path)
            for checkpoint in copy.checkpoints:
                connection.execute(insert(checkpoints), self._checkpoint_row(checkpoint))
            for begin in range(0, len(copy.history.entries), _COPIED_ONCE):
                part = copy.history.entries[begin : begin + _COPIED_ONCE]
                connection.execute(insert(journal), [self._entry_row(*one) for one in part])
            if copy.audited:
                self.audit_table.insert(copy.audited)
        self.audit_table.committed()
        self._last = copy.last_seq

    def mark_moved(self, target: str) -> None:
        """See `AuditedJournal`."""
        with self._transaction() as connection:
            connection.execute(insert(meta).values(key="moved_to", value=target))

    def _was_committed(self, rows: int, audited: int) -> bool:
        """Finds out whether a write whose end was not learnt is on disk; False, and still in doubt, if nobody can tell."""
        with suppress(JournalError), self._writing() as connection, connection.begin():
            hold_term(connection, self.term, location=self.path, is_exclusive=True)
            last, number = self._last_rows(connection)
            self._is_unsettled = False
            return (last, number) == (self._last + rows, self.audit_table.last + audited)
        return False

    def _last_rows(self, connection: Connection) -> tuple[int, int]:
        """Numbers of the last entry and of the last of the audit log, counted from what is known where there is none."""
        last = connection.execute(select(func.max(journal.c.seq)).where(journal.c.seq > self._last)).scalar()
        known = self.audit_table.last
        number = connection.execute(select(func.max(audit.c.number)).where(audit.c.number > known)).scalar()
        return last or self._last, number or known

    def _prune_audit(self) -> None:
        """Keeps the audit log within its bounds; after an error it is tried again at the next commit."""
        if self.audit_table.is_full:
            with suppress(JournalError):
                with self._transaction():
                    gone = self.audit_table.prune()
                self.audit_table.pruned(*gone)

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Stores a checkpoint; deletes all but the newest before it, and the entries that both cover."""
        row = self._checkpoint_row(checkpoint)
        with self._transaction() as connection:
            lengthen_statements(connection)
            new = upsert(checkpoints).values(row)
            connection.execute(new.on_conflict_do_update(index_elements=["seq"], set_=row))
            kept = (
                connection.execute(select(checkpoints.c.seq).order_by(checkpoints.c.seq.desc()).limit(2))
                .scalars()
                .all()
            )
            connection.execute(delete(checkpoints).where(checkpoints.c.seq.not_in(kept)))
            if len(kept) == 2:
                connection.execute(delete(journal).where(journal.c.seq <= min(*kept, self._last - self._retained)))
        self.counters.checkpoints += 1
        self.counters.checkpoint_bytes = len(row["body"])

    def probe(self) -> None:
        """Checks that writing works, by writing and removing as many bytes as a large commit."""
        with self._transaction() as connection:
            # Random, or it would be stored compressed.
            text = os.urandom(_PROBE_CHARACTERS // 2).hex()
            row = upsert(meta).values(key="probe", value=text)
            connection.execute(row.on_conflict_do_update(index_elements=["key"], set_={"value": text}))
        with self._transaction() as connection:
            connection.execute(delete(meta).where(meta.c.key == "probe"))

    def check_files(self) -> None:
        """Raises JournalFenced once another leads, and JournalUnavailable while the lease cannot be renewed."""
        self._keeper.check()

    def close(self) -> None:
        """Closes the connections, then lets another controller lead at once."""
        if self._connection is not None:
            with suppress(SQLAlchemyError):
                self._connection.close()
            self._connection = None
        self._keeper.close()
        self._engine.dispose()
        self.on_close()

    # Reading

    def newest_checkpoint(self) -> Checkpoint | None:
        """Returns the newest checkpoint, its CRC checked."""
        with self._translate_errors(), read_snapshot(self._engine) as connection:
            newest = select(checkpoints).order_by(checkpoints.c.seq.desc()).limit(2)
            rows = connection.execute(newest).all()
        if not rows:
            return None
        if checkpoint := _decode_checkpoint(rows[0]):
            return checkpoint
        raise describe_damaged_checkpoint(self.path, rows[0].seq, rows[1].seq if len(rows) > 1 else None)

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """Yields entries in order; raises JournalCorrupt at the first that is damaged or missing."""
        upto = self._last
        with self._translate_errors(), read_snapshot(self._engine) as connection:
            last = yield from self._entries(connection, seq, upto)
        if last != upto:
            raise describe_damaged_entry(self.path, last + 1, seq, f"entries {last + 1} to {upto} are missing")

    def _entries(self, connection: Connection, seq: int, upto: int) -> Generator[tuple[int, JournalEntry], None, int]:
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
                return JournalHistory(None, tuple(self._entries(connection, 0, upto)))
            row = connection.execute(select(checkpoints).order_by(checkpoints.c.seq).limit(1)).first()
            checkpoint = None if row is None else _decode_checkpoint(row)
            if row is not None and checkpoint is None:
                raise describe_damaged_entry(self.path, row.seq, 0, f"the checkpoint at entry {row.seq} is damaged")
            begin = checkpoint.seq if checkpoint else 0
            return JournalHistory(checkpoint, tuple(self._entries(connection, begin, upto)))

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

    # Transactions

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A transaction that commits only in this process's own term. Raises JournalError and JournalFenced."""
        self._keeper.check()
        with self._writing() as connection:
            with begin_bounded(connection):
                hold_term(connection, self.term, location=self.path, is_exclusive=self._is_unsettled)
                if self._is_unsettled:
                    connection.execute(delete(journal).where(journal.c.seq > self._last))
                    connection.execute(delete(audit).where(audit.c.number > self.audit_table.last))
                self._audit_rows.connection = connection
                yield connection
            self._is_unsettled = False

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """The writer's connection, a new one after the last broke. Raises JournalError, _FateUnknown if it breaks now."""
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            yield self._connection
        except _ERRORS as error:
            fault = describe_fault(error)
            if isinstance(error, UnreplicatedCommit):
                self._is_unsettled = True
            if fault.kind is FaultKind.LOST and self._connection is not None:
                discard(self._connection)
                self._connection, self._is_unsettled = None, True
                raise _FateUnknown(self.path, fault.problem, fault.remedy) from error
            raise_journal_error(self.path, error)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise_journal_error(self.path, error)


def _decode_checkpoint(row: Any) -> Checkpoint | None:
    return decode_checkpoint(row.seq, row.body, row.digest.encode(), row.crc32)


def open_postgres_journal(
    url: URL,
    *,
    new_cluster_id: str,
    address: str = "",
    retained: int = 10_000,
    times: LeaseTimes | None = None,
    wait_s: float | None = None,
    above: int = 0,
) -> PostgresJournal:
    """Opens the journal of a database, makes its tables if they are missing, and begins a new term, with an epoch higher than `above`.

    While another controller leads, waits for `wait_s`, by default a little longer than the lease of one that crashed.
    Raises JournalHeld then, and JournalError.
    """
    times = times or LeaseTimes()
    location, engine = locate(url), make_engine(url)
    # A lease that a promoted standby does not have has run out there, which is right.
    renewing = make_engine(url, statement_s=times.statement_s, connections_most=1, is_local=True)
    holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    try:
        with engine.connect() as connection:
            check_session(connection)
        upgrade_schema(engine, location)
        patience_s = times.ttl_s + 2.0 * times.renew_s if wait_s is None else wait_s
        mine, began_s = _wait_for_term(
            engine, location, wait_s=patience_s, holder=holder, address=address, ttl_s=times.ttl_s, above=above
        )
    except _ERRORS as error:
        _dispose(engine, renewing)
        raise_journal_error(location, error)
    except BaseException:
        _dispose(engine, renewing)
        raise
    keeper = LeaseKeeper(renewing, mine, times=times, location=location, began_s=began_s)
    keeper.start()
    # Which closes all of it if it cannot begin.
    return PostgresJournal(
        engine, mine, keeper, url=url, location=location, new_cluster_id=new_cluster_id, retained=retained
    )


def _wait_for_term(engine: Engine, location: str, *, wait_s: float, **wanted: Any) -> tuple[Term, float]:
    """Begins a term as soon as nobody else leads; returns it, and when its taking was sent. Raises JournalHeld."""
    until_s = boottime_s() + wait_s
    while True:
        sent_s = boottime_s()
        try:
            with engine.connect() as connection, begin_bounded(connection):
                mine = take_term(connection, **wanted)
                other = read_term(connection) if mine is None else mine
        except OperationalError as error:
            if not is_lock_timeout(error) or boottime_s() >= until_s:
                raise
            # A leader that was stopped within a write holds the row.
            with engine.begin() as connection:
                end_stalled(connection)
            continue
        if mine is not None:
            return mine, sent_s
        if boottime_s() >= until_s:
            where = f" at {other.address}" if other.address else ""
            raise JournalHeld(
                location,
                f"another controller ({other.holder}{where}) leads with epoch {other.epoch}",
                "stop that one, or let this one be started again until it may lead",
            )
        time.sleep(_TRY_AGAIN_S)


def _dispose(*engines: Engine) -> None:
    for engine in engines:
        engine.dispose()
