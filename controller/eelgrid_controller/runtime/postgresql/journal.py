"""The journal on PostgreSQL: entries, checkpoints and audit log in transactions that only the leader can commit.

Owns what is in each transaction, and what is known of one whose end was not learnt. Must not know what an event means.

Each write begins by holding the term (leadership.py), and the number of an entry is its primary key: two fences that
need no clock. Where a connection breaks within a write, nobody knows whether it was committed; then the term is locked
exclusively on a new connection, which waits for whatever the server still does for the old one, and the rows tell. As
long as even that cannot be done, the write has failed for its caller, and whatever became of it is removed by the next
append before anything else, in the transaction that has what follows it. So a method that raises has changed nothing, as
the port demands.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, Connection, Engine, delete, func, insert, select
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import SQLAlchemyError

from eelgrid_controller.errors import (
    JournalError,
    JournalFenced,
    JournalHeld,
    JournalMoved,
    JournalNotEmpty,
    JournalUnavailable,
    LostEntries,
)
from eelgrid_controller.runtime.audit_log import AuditRow, AuditTable
from eelgrid_controller.runtime.journal_rows import (
    compute_entry_crc,
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
    lengthen_statements,
    locate,
    make_engine,
)
from eelgrid_controller.runtime.postgresql.leadership import (
    BlockerWatch,
    LeaseKeeper,
    LeaseTimes,
    LeaseWatch,
    Term,
    boottime_s,
    describe_replaced,
    hold_term,
    raise_term,
    read_term,
    take_term,
)
from eelgrid_controller.runtime.postgresql.reading import JournalReader, raise_journal_error
from eelgrid_controller.runtime.postgresql.schema import audit, checkpoints, journal, meta, upgrade_schema
from eelgrid_controller.state.journal import (
    Checkpoint,
    CheckpointRow,
    JournalCopy,
    JournalCounters,
    JournalEntry,
)
from eelgrid_protos.messages import AuditEntry, LeaderTerm

# Rows of a copy that are sent as one.
_COPIED_ONCE = 5000
_PROBE_CHARACTERS = 256 * 1024
_TRY_AGAIN_S = 0.5
# What a statement raises.
ERRORS = (SQLAlchemyError, UnreplicatedCommit)


class _FateUnknown(JournalUnavailable):
    """The connection broke within a write, which may be committed or not."""


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


class PostgresJournal(JournalReader):
    """Implements `AuditedJournal` for one term; made by `open_postgres_journal`."""

    is_remote = True

    def __init__(
        self,
        engine: Engine,
        mine: Term,
        keeper: LeaseKeeper,
        *,
        location: str,
        new_cluster_id: str,
        retained: int,
    ) -> None:
        super().__init__(engine, location)
        self._term = mine
        # For others who write in this term.
        self.url = engine.url
        # What to let go of with the connections.
        self.on_close: Callable[[], None] = lambda: None
        self.counters = JournalCounters()
        # Nothing beside the database could tell; a rewound one is found by agents that know more.
        self.lost: LostEntries | None = None
        self._keeper = keeper
        self._retained = retained
        self._connection: Connection | None = None
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
            hold_term(connection, self._term, location=self.path)
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
    def term(self) -> LeaderTerm:
        """That of this process."""
        term = self._term
        return LeaderTerm(timeline=term.timeline, epoch=term.epoch, holder=term.holder, cluster=self.cluster_id)

    @property
    def may_lead(self) -> bool:
        """Whether this process may decide now; see `LeaseKeeper`."""
        return self._keeper.may_lead

    @property
    def lease_age_s(self) -> float:
        """See `Journal`."""
        return self._keeper.age_s

    def hold_own_term(self, connection: Connection, *, is_exclusive: bool = False) -> None:
        """Keeps this process's term within a transaction of another store; see `hold_term`."""
        hold_term(connection, self._term, location=self.path, is_exclusive=is_exclusive)

    # Writing

    def append(self, entries: Sequence[JournalEntry], audited: Sequence[AuditEntry] = ()) -> int:
        """Writes all entries, and those of the audit log, in one transaction that is on disk on return."""
        rows = [self._entry_row(seq, entry) for seq, entry in enumerate(entries, self._last + 1)]
        follows_failure = self._is_unsettled
        try:
            with self._transaction(settles=True) as connection:
                if rows:
                    connection.execute(insert(journal), rows)
                if audited:
                    self.audit_table.insert(audited)
        except _FateUnknown:
            if not self._was_committed(rows, len(audited), follows_failure=follows_failure):
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
        return {"seq": seq, "epoch": self._term.epoch, "kind": entry.kind, "body": body.decode(), "crc32": crc}

    def _checkpoint_row(self, checkpoint: Checkpoint | CheckpointRow) -> dict[str, Any]:
        return {**encode_checkpoint(checkpoint)._asdict(), "epoch": self._term.epoch}

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
        if self._term.timeline < copy.timeline:
            # Agents of the other journal have seen that one.
            self.raise_term(LeaderTerm(timeline=copy.timeline, epoch=copy.epoch))

    def raise_term(self, above: LeaderTerm) -> LeaderTerm:
        """See `Journal`."""
        with self._keeper.change_term() as change:
            with self._transaction() as connection:
                hold_term(connection, self._term, location=self.path, is_exclusive=True)
                raised = raise_term(connection, self._term, above)
            change(raised)
        self._term = raised
        return self.term

    def mark_moved(self, target: str) -> None:
        """See `AuditedJournal`."""
        with self._transaction() as connection:
            connection.execute(insert(meta).values(key="moved_to", value=target))

    def _was_committed(self, rows: Sequence[Mapping[str, Any]], audited: int, *, follows_failure: bool) -> bool:
        """Finds out whether a write whose end was not learnt is on disk; False, and still in doubt, if nobody can tell.

        What an earlier write has left, which this one was to remove, may have as many rows. Raises JournalFenced where
        it is not on disk, and another leads.
        """
        with suppress(JournalError), self._writing() as connection, connection.begin():
            try:
                hold_term(connection, self._term, location=self.path, is_exclusive=True)
            except JournalFenced as error:
                return self._was_left(connection, rows, error)
            ends = self._last_rows(connection)
            is_done = ends == (self._last + len(rows), self.audit_table.last + audited)
            if follows_failure:
                is_done = is_done and bool(rows) and self._find_entry(connection, rows[-1]) == _content_of(rows[-1])
            self._is_unsettled = not is_done and ends != (self._last, self.audit_table.last)
            return is_done
        return False

    def _find_entry(self, connection: Connection, row: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Returns what is stored under the number of a row; None if nothing is."""
        columns = select(journal.c.epoch, journal.c.kind, journal.c.body)
        found = connection.execute(columns.where(journal.c.seq == row["seq"])).first()
        return None if found is None else tuple(found)

    def _was_left(self, connection: Connection, rows: Sequence[Mapping[str, Any]], fenced: JournalFenced) -> bool:
        """As `_was_committed`, after another took over: it waited for the write, so its last entry is there or is not.

        The epoch alone does not tell whose it is: a promoted standby that lacks the last terms counts them again.
        """
        if not rows:
            fenced.is_certain = False
            raise fenced
        found = self._find_entry(connection, rows[-1])
        if found != _content_of(rows[-1]):
            # Whoever leads may have removed it with older entries by now; then nobody can tell.
            fenced.is_certain = found is not None or self._is_end(connection)
            raise fenced
        return True

    def _is_end(self, connection: Connection) -> bool:
        """Whether the journal still ends with the last entry that this process knows."""
        last = connection.execute(select(func.max(journal.c.seq))).scalar()
        return last is None or last <= self._last

    def _last_rows(self, connection: Connection) -> tuple[int, int]:
        """Numbers of the last entry and of the last of the audit log, counted from what is known where there is none."""
        last = connection.execute(select(func.max(journal.c.seq)).where(journal.c.seq > self._last)).scalar()
        known = self.audit_table.last
        number = connection.execute(select(func.max(audit.c.number)).where(audit.c.number > known)).scalar()
        return last or self._last, number or known

    def _prune_audit(self) -> None:
        """Keeps the audit log within its bounds; after an error it is tried again at the next commit."""
        if self.audit_table.is_full:
            # The next write tells whether another leads.
            with suppress(JournalError, JournalFenced):
                with self._transaction():
                    gone = self.audit_table.prune()
                self.audit_table.pruned(*gone)

    def write_checkpoint(self, checkpoint: Checkpoint | CheckpointRow) -> None:
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

    # Transactions

    @contextmanager
    def _transaction(self, *, settles: bool = False) -> Iterator[Connection]:
        """A transaction that commits only in this process's own term. Raises JournalError and JournalFenced.

        One that settles removes first what a failed write may have left.
        """
        self._keeper.check()
        with self._writing() as connection:
            settles = settles and self._is_unsettled
            with begin_bounded(connection):
                hold_term(connection, self._term, location=self.path, is_exclusive=settles)
                if settles:
                    connection.execute(delete(journal).where(journal.c.seq > self._last))
                    connection.execute(delete(audit).where(audit.c.number > self.audit_table.last))
                self._audit_rows.connection = connection
                yield connection
            if settles:
                self._is_unsettled = False

    def _connect_checked(self) -> Connection:
        """Connects anew. Raises JournalFenced on a promoted standby, and where entries are missing.

        What follows would leave a gap for good. The number of entries alone does not tell: the last transaction may have
        removed as many as it wrote.
        """
        connection = self._engine.connect()
        try:
            with connection.begin():
                ends = (select(func.coalesce(func.max(table.c.seq), 0)) for table in (journal, checkpoints))
                last = max(connection.execute(one).scalar_one() for one in ends)
                self._keeper.check_server(connection)
        except BaseException:
            discard(connection)
            raise
        if last < self._last:
            discard(connection)
            raise describe_replaced(self.path)
        return connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """The writer's connection, a new one after the last broke. Raises JournalError, _FateUnknown if it breaks now."""
        try:
            if self._connection is None:
                self._connection = self._connect_checked()
            yield self._connection
        except ERRORS as error:
            fault = describe_fault(error)
            if isinstance(error, UnreplicatedCommit):
                self._is_unsettled = True
            if fault.kind is FaultKind.LOST and self._connection is not None:
                discard(self._connection)
                self._connection, self._is_unsettled = None, True
                raise _FateUnknown(self.path, fault.problem, fault.remedy) from error
            raise_journal_error(self.path, error)


def _content_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what two rows of one number may differ in."""
    return row["epoch"], row["kind"], row["body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderCandidate:
    """A process that would lead, and how its leadership is made; raises SQLAlchemyError where that fails."""

    engine: Engine
    location: str
    times: LeaseTimes
    watch: LeaseWatch
    # Renewals have a connection of their own, and wait for no standby: a lease that a promoted one does not have has
    # run out there, which is right.
    renewing: Engine
    holder: str
    address: str
    new_cluster_id: str
    retained: int
    above: int

    def try_to_lead(self) -> PostgresJournal | Term:
        """Begins a term if nobody leads, and opens its journal; returns the term of who leads otherwise."""
        sent_s = boottime_s()
        with self.engine.connect() as connection, begin_bounded(connection):
            mine = take_term(
                connection,
                holder=self.holder,
                address=self.address,
                ttl_s=self.times.ttl_s,
                above=self.above,
                watch=self.watch,
                blockers=BlockerWatch(self.renewing, stall_s=self.times.stall_s),
            )
            if mine is None:
                return read_term(connection)
        keeper = LeaseKeeper(self.renewing, mine, times=self.times, location=self.location, began_s=sent_s)
        keeper.start()
        # Which closes all of it if it cannot begin.
        return PostgresJournal(
            self.engine,
            mine,
            keeper,
            location=self.location,
            new_cluster_id=self.new_cluster_id,
            retained=self.retained,
        )

    def close(self) -> None:
        """Closes the connections of one that does not lead."""
        self.engine.dispose()
        self.renewing.dispose()


def prepare_candidate(
    url: URL,
    *,
    new_cluster_id: str,
    address: str = "",
    retained: int = 10_000,
    times: LeaseTimes | None = None,
    above: int = 0,
) -> LeaderCandidate:
    """Connects, and makes the tables if they are missing. Raises JournalError and ControllerConfigError."""
    times = times or LeaseTimes()
    candidate = LeaderCandidate(
        engine=make_engine(url),
        location=locate(url),
        times=times,
        watch=LeaseWatch(times),
        renewing=make_engine(url, statement_s=times.statement_s, connections_most=1, is_local=True, is_autocommit=True),
        holder=f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}",
        address=address,
        new_cluster_id=new_cluster_id,
        retained=retained,
        above=above,
    )
    try:
        with candidate.engine.connect() as connection:
            check_session(connection)
        upgrade_schema(candidate.engine, candidate.location)
    except ERRORS as error:
        candidate.close()
        raise_journal_error(candidate.location, error)
    except BaseException:
        candidate.close()
        raise
    return candidate


def open_postgres_journal(url: URL, *, wait_s: float | None = None, **wanted: Any) -> PostgresJournal:
    """Opens the journal of a database and begins a new term; the rest is as of `prepare_candidate`.

    While another controller leads, waits for `wait_s`, by default a little longer than the lease of one that crashed.
    Raises JournalHeld then, and JournalError.
    """
    candidate = prepare_candidate(url, **wanted)
    patience_s = candidate.times.ttl_s + 2.0 * candidate.times.renew_s if wait_s is None else wait_s
    until_s = boottime_s() + patience_s
    try:
        while isinstance(found := candidate.try_to_lead(), Term) and boottime_s() < until_s:
            time.sleep(_TRY_AGAIN_S)
    except ERRORS as error:
        candidate.close()
        raise_journal_error(candidate.location, error)
    except BaseException:
        candidate.close()
        raise
    if isinstance(found, Term):
        candidate.close()
        raise describe_other_leader(candidate.location, found)
    return found


def describe_other_leader(location: str, other: Term) -> JournalHeld:
    """Returns the error of a process that may not lead."""
    where = f" at {other.address}" if other.address else ""
    return JournalHeld(
        location,
        f"another controller ({other.holder}{where}) leads with epoch {other.epoch}",
        "stop that one, or let this one be started again until it may lead",
    )
