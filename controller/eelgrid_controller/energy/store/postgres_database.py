"""The energy ledger's database on PostgreSQL: transactions that only the leader can commit, snapshots, and faults.

Each transaction begins by holding the leader's term, as the journal's do (runtime/postgresql/leadership.py), so a
controller that was followed writes nothing; the number of each transaction in `ledger` is a second fence. Where a
connection breaks within a transaction nobody knows whether it was committed (`LedgerInDoubt`): the next one locks the term
exclusively, which waits for whatever the server still does for the old connection, and then sees what is there. Must not
know what rows mean.

Names may be longer than an index takes, so they are found by a hash of them.
"""

import functools
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b, md5
from pathlib import Path
from typing import Any

from psycopg.adapt import Loader
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from eelgrid_controller.energy.store.database import (
    VALUE_ERRORS,
    LedgerDialect,
    LedgerInDoubt,
    LedgerPartRefused,
    LedgerReader,
    LedgerTransaction,
    NameTable,
    RevisionMark,
    StoredNames,
)
from eelgrid_controller.errors import JournalError, JournalFenced, LedgerError, LedgerRefused, StoreLocation
from eelgrid_controller.runtime.postgresql.connections import (
    LONG_STATEMENT_S,
    SCHEMA,
    FaultKind,
    UnreplicatedCommit,
    begin_bounded,
    describe_fault,
    discard,
    lengthen_statements,
    make_engine,
    read_snapshot,
)
from eelgrid_controller.runtime.postgresql.journal import PostgresJournal

MARK_NAME = "energy.postgresql.revision"
_CONNECTIONS_MOST = 3
# What a row, and an owner with its names, needs with indexes: 156 and 450 bytes after a copy, some more as pages age.
_ROW_BYTES = 170
_HOLDER_BYTES = 450
_ERRORS = (SQLAlchemyError, UnreplicatedCommit)
# Data that cannot be stored, rows that contradict others, and what exceeds a limit of the server: SQLSTATE's classes.
_OF_PART = ("22", "23", "54")
_INTEGER_MOST = 2**63 - 1


class _WholeLoader(Loader):
    """Sums of whole numbers, which PostgreSQL has as numeric: integers of Python."""

    def load(self, data: Any) -> int:
        """The number."""
        return int(bytes(data))


class PostgresDialect:
    """Implements `LedgerDialect`."""

    # Its indexes are compared by none but the server's own amcheck.
    checks_indexes = False

    def truncate(self, number: str) -> str:
        """See `LedgerDialect`."""
        return (
            f"CASE WHEN {number} >= {_INTEGER_MOST} THEN {_INTEGER_MOST} "
            f"WHEN {number} <= -{_INTEGER_MOST} THEN -{_INTEGER_MOST} - 1 ELSE trunc({number})::bigint END"
        )

    def join_lines(self, column: str) -> str:
        """See `LedgerDialect`."""
        return f"string_agg({column}, chr(10))"

    def label(self, key: str) -> tuple[str, str]:
        """See `LedgerDialect`."""
        return "coalesce(CAST(h.labels AS json) ->> CAST(? AS text), '')", key

    def name_crc(self, columns: Sequence[str]) -> str:
        """See `LedgerDialect`."""
        return f"('x' || substr(md5(concat_ws(chr(31), {', '.join(columns)})), 1, 8))::bit(32)::bigint"

    def compute_name_crc(self, number: int, names: StoredNames) -> int:
        """See `LedgerDialect`."""
        text = "\x1f".join((str(number), *names))
        return int(md5(text.encode(), usedforsecurity=False).hexdigest()[:8], 16)


POSTGRESQL = PostgresDialect()


@functools.lru_cache(maxsize=1000)
def _translate(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s")


def _name_key(names: StoredNames) -> str:
    return blake2b(json.dumps(names).encode(), digest_size=16).hexdigest()


class _Statements:
    """Implements `LedgerTransaction`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def read(self, sql: str, given: Sequence[Any] = ()) -> list[Any]:
        """See `LedgerTransaction`."""
        return list(self._connection.exec_driver_sql(_translate(sql), tuple(given)).fetchall())

    def change(self, sql: str, given: Sequence[Any] = ()) -> int:
        """See `LedgerTransaction`."""
        return self._connection.exec_driver_sql(_translate(sql), tuple(given)).rowcount

    def change_each(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """See `LedgerTransaction`."""
        if rows:
            self._connection.exec_driver_sql(_translate(sql), list(map(tuple, rows)))

    def find_cells(
        self, table: str, keys: Sequence[str], columns: Sequence[str], wanted: Collection[tuple[int, ...]]
    ) -> dict[tuple[int, ...], tuple[Any, ...]]:
        """See `LedgerTransaction`."""
        many = len(keys)
        rows = self.read(
            f"SELECT {', '.join(f't.{name}' for name in (*keys, *columns))} FROM "
            f"unnest({', '.join(['CAST(? AS bigint[])'] * many)}) k ({', '.join(keys)}) JOIN {table} t ON "
            + " AND ".join(f"t.{name} = k.{name}" for name in keys),
            [list(column) for column in zip(*wanted, strict=True)],
        )
        return {tuple(row[:many]): tuple(row[many:]) for row in rows}

    def write_cells(
        self, table: str, keys: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[float]]
    ) -> None:
        """See `LedgerTransaction`."""
        names = ", ".join((*keys, *columns))
        types = ["bigint[]" if isinstance(value, int) else "double precision[]" for value in rows[0]]
        self.change(
            f"INSERT INTO {table} ({names}) SELECT * FROM unnest({', '.join(f'CAST(? AS {one})' for one in types)}) "
            f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {', '.join(f'{one} = excluded.{one}' for one in columns)}",
            [list(column) for column in zip(*rows, strict=True)],
        )

    def find_names(self, table: NameTable, wanted: Collection[StoredNames]) -> dict[StoredNames, int]:
        """See `LedgerTransaction`."""
        keys = {_name_key(names): names for names in wanted}
        rows = self.read(f"SELECT key, id FROM {table.name} WHERE key = ANY(CAST(? AS text[]))", (list(keys),))
        return {keys[key]: number for key, number in rows}

    def add_names(self, table: NameTable, rows: Sequence[tuple[int, StoredNames]]) -> None:
        """See `LedgerTransaction`."""
        columns = ("id", *table.columns, "key", "crc", *(name for name, _ in table.others))
        others = tuple(value for _, value in table.others)
        self.change_each(
            f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            [
                (number, *names, _name_key(names), POSTGRESQL.compute_name_crc(number, names), *others)
                for number, names in rows
            ],
        )

    @contextmanager
    def part(self) -> Iterator[None]:
        """See `LedgerTransaction`."""
        try:
            with self._connection.begin_nested():
                yield
        except (SQLAlchemyError, *VALUE_ERRORS) as error:
            if not _is_of_part(error):
                raise
            is_damage = describe_fault(error).kind is FaultKind.CORRUPT and isinstance(error, DBAPIError)
            raise LedgerPartRefused(str(error), is_damage=is_damage) from error


class _Reader:
    """Implements `LedgerReader`."""

    dialect: LedgerDialect = POSTGRESQL

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, sql: str, given: Iterable[Any]) -> list[Any]:
        """See `LedgerReader`."""
        return list(self._connection.exec_driver_sql(_translate(sql), tuple(given)).fetchall())


class PostgresLedgerDatabase:
    """Implements `LedgerDatabase` in the term of a journal; made by `open_postgres_ledger`."""

    dialect: LedgerDialect = POSTGRESQL

    def __init__(self, engine: Engine, journal: PostgresJournal, mark: RevisionMark) -> None:
        self.path: StoreLocation = journal.path
        self.noted_revision = mark.noted
        self.healed = ""
        self._engine = engine
        self._journal = journal
        self._mark = mark
        self._connection: Connection | None = None
        # Whether a transaction may have been committed of which nobody was told.
        self._is_unsettled = False

    @contextmanager
    def transaction(self, *, is_long: bool = False) -> Iterator[LedgerTransaction]:
        """See `LedgerDatabase`."""
        is_begun = False
        try:
            self._journal.check_files()
            if self._connection is None:
                self._connection = self._engine.connect()
            with begin_bounded(self._connection):
                self._journal.hold_own_term(self._connection, is_exclusive=self._is_unsettled)
                is_begun = True
                if is_long:
                    _allow_pauses(self._connection)
                yield _Statements(self._connection)
        except (JournalFenced, JournalError) as error:
            problem = error.problem.removeprefix(f"journal {self.path}: ")
            raise LedgerError(self.path, problem, error.remedy) from error
        except (*_ERRORS, *VALUE_ERRORS) as error:
            raise self._on_error(error, is_begun=is_begun) from error
        self._is_unsettled = False

    def _on_error(self, error: Exception, *, is_begun: bool) -> LedgerError:
        """Takes the consequences of an error within a transaction; returns the error of the ledger."""
        if _is_of_part(error):
            return LedgerRefused(self.path, str(error), "see docs/how-to/runbooks/EelgridLedgerFailing.md")
        fault = describe_fault(error)
        is_lost = fault.kind is FaultKind.LOST
        if is_lost and self._connection is not None:
            discard(self._connection)
            self._connection = None
        if isinstance(error, UnreplicatedCommit) or (is_lost and is_begun):
            self._is_unsettled = True
            return LedgerInDoubt(self.path, fault.problem, fault.remedy)
        return LedgerError(self.path, fault.problem, fault.remedy)

    @contextmanager
    def snapshot(self) -> Iterator[LedgerReader]:
        """See `LedgerDatabase`."""
        try:
            with read_snapshot(self._engine) as connection:
                _allow_pauses(connection)
                yield _Reader(connection)
        except SQLAlchemyError as error:
            fault = describe_fault(error)
            raise LedgerError(self.path, fault.problem, fault.remedy) from error

    def note_revision(self, revision: int) -> None:
        """See `LedgerDatabase`."""
        self._mark.save_revision(revision)

    def measure_bytes(self, read: LedgerReader) -> int:
        """See `LedgerDatabase`: by rows, as a table does not become smaller when rows go."""
        ((rows, holders),) = read(
            "SELECT (SELECT coalesce(sum(many), 0) FROM hourly_check) + (SELECT coalesce(sum(many), 0) FROM daily_check), "
            "(SELECT count(*) FROM holders)",
            (),
        )
        return int(rows) * _ROW_BYTES + int(holders) * _HOLDER_BYTES

    def mend_indexes(self) -> None:
        """See `LedgerDatabase`."""
        with self.transaction() as transaction:
            transaction.change("REINDEX INDEX holders_workload")

    def close(self) -> None:
        """See `LedgerDatabase`."""
        if self._connection is not None:
            with suppress(SQLAlchemyError):
                self._connection.close()
            self._connection = None
        self._engine.dispose()
        self._mark.close()


def open_postgres_ledger(journal: PostgresJournal, folder: Path) -> PostgresLedgerDatabase:
    """Opens the ledger that is in the same database as a journal; the number of its last transaction is noted in `folder`."""
    engine = make_engine(journal.url, connections_most=_CONNECTIONS_MOST, search_path=SCHEMA)
    event.listen(engine, "connect", _load_whole_numbers)
    return PostgresLedgerDatabase(engine, journal, RevisionMark(folder / MARK_NAME))


def _allow_pauses(connection: Connection) -> None:
    """Gives a transaction minutes, also for what its reader does between its statements."""
    lengthen_statements(connection)
    milliseconds = int(LONG_STATEMENT_S * 1000)
    connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds}")


def _load_whole_numbers(connection: Any, _record: Any) -> None:
    connection.adapters.register_loader("numeric", _WholeLoader)


def _is_of_part(error: BaseException) -> bool:
    """Whether it is what was to be written, or rows that it meets, and not the server."""
    if isinstance(error, VALUE_ERRORS):
        return True
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    return state.startswith((*_OF_PART, "XX001", "XX002"))
