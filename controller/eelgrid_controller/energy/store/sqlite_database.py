"""The energy ledger's database as a SQLite file: its schema, upgrades from earlier versions, transactions and faults.

Upgrades run in place and in one transaction. Beside the file stands the number of the last transaction. Must not know what
rows mean, but for the upgrade of versions that accepted what no boards can have drawn.
"""

import json
import sqlite3
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_controller.energy.ledger import DAY_S, namespace_label
from eelgrid_controller.energy.store.database import (
    CRC_MASK,
    HOLDERS,
    PLACES,
    VALUE_ERRORS,
    WORKS,
    LedgerDialect,
    LedgerPartRefused,
    LedgerReader,
    LedgerTransaction,
    NameTable,
    RevisionMark,
    StoredNames,
    SumOverflow,
)
from eelgrid_controller.energy.store.schema import SPANS, crc_of, sql_checks
from eelgrid_controller.errors import LedgerError, LedgerRefused, StoreLocation

FILE_NAME = "energy.sqlite3"
MARK_NAME = "energy.revision"
_CRC_FUNCTION = "row_crc"
_DISK = "check the disk and the rights of its folder"
_DAMAGED = "check the disk, and restore a backup or move the file away (docs/how-to/runbooks/EelgridLedgerFailing.md)"
# Rows that one statement finds by their keys.
_FOUND_ONCE = 64


def _sql_crc(number: int, *texts: str) -> int:
    """`crc_of` as a function of SQL; called for each name that an answer uses."""
    try:
        return zlib.crc32("\x1f".join(texts).encode(), number & CRC_MASK)
    except (TypeError, ValueError):
        return -1  # no text where one was written


class SqliteDialect:
    """Implements `LedgerDialect`."""

    checks_indexes = True

    def truncate(self, number: str) -> str:
        """See `LedgerDialect`."""
        return f"CAST({number} AS INTEGER)"

    def join_lines(self, column: str) -> str:
        """See `LedgerDialect`."""
        return f"group_concat({column}, char(10))"

    def label(self, key: str) -> tuple[str, str]:
        """See `LedgerDialect`."""
        # As a JSON string, which is also how a path quotes a key.
        return "coalesce(json_extract(h.labels, ?), '')", f"$.{json.dumps(key)}"

    def name_crc(self, columns: Sequence[str]) -> str:
        """See `LedgerDialect`."""
        return f"{_CRC_FUNCTION}({', '.join(columns)})"

    def compute_name_crc(self, number: int, names: StoredNames) -> int:
        """See `LedgerDialect`."""
        return crc_of(number, *names)


SQLITE = SqliteDialect()

APPLICATION_ID = 0x45656C45  # "EelE"
_SPENT = (
    "".join(
        f"""
CREATE TABLE {table} (
  at INTEGER NOT NULL, place INTEGER NOT NULL, holder INTEGER NOT NULL, bare INTEGER NOT NULL,
  context INTEGER NOT NULL, active INTEGER NOT NULL, cost REAL NOT NULL, carbon REAL NOT NULL,
  PRIMARY KEY (at, place, holder)
) WITHOUT ROWID;
CREATE TABLE {table}_measured (
  at INTEGER NOT NULL, place INTEGER NOT NULL, total INTEGER NOT NULL, uncertainty INTEGER NOT NULL,
  uncounted REAL NOT NULL, PRIMARY KEY (at, place)
) WITHOUT ROWID;
"""
        for table, _ in SPANS
    )
    + """
CREATE TABLE places (id INTEGER PRIMARY KEY, node TEXT, pool TEXT, gpu_model TEXT, UNIQUE (node, pool, gpu_model));
CREATE TABLE holders (
  id INTEGER PRIMARY KEY, kind TEXT, namespace TEXT, name TEXT, workload TEXT, title TEXT, user TEXT, queue TEXT,
  labels TEXT, UNIQUE (kind, namespace, name, workload, title, user, queue, labels)
);
CREATE TABLE windows (node TEXT PRIMARY KEY, incarnation TEXT NOT NULL, number INTEGER NOT NULL) WITHOUT ROWID;
"""
)
_WORK = (
    "".join(
        f"""
CREATE TABLE {table}_work (
  at INTEGER NOT NULL, work INTEGER NOT NULL, amount REAL NOT NULL, counted REAL NOT NULL, missed REAL NOT NULL,
  PRIMARY KEY (at, work)
) WITHOUT ROWID;
"""
        for table, _ in SPANS
    )
    + """
CREATE TABLE works (
  id INTEGER PRIMARY KEY, workload TEXT NOT NULL, unit TEXT NOT NULL, until REAL NOT NULL, UNIQUE (workload, unit)
);
CREATE INDEX holders_workload ON holders (workload, id) WHERE workload <> '';
"""
)
# Counters by namespace outlive the rows that they were summed from, so they are kept, not summed anew.
_NAMESPACES = """
CREATE TABLE namespaces (
  name TEXT PRIMARY KEY, spent INTEGER NOT NULL, own INTEGER NOT NULL, shown INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO namespaces SELECT name, sum(mj), 0, 0 FROM (
  SELECT CASE WHEN h.kind IN ('unallocated', 'unattributed') THEN '(' || h.kind || ')' WHEN h.namespace = '' THEN '(none)'
  ELSE h.namespace END AS name, e.mj AS mj FROM
  (SELECT holder, sum(bare + context + active) AS mj FROM daily GROUP BY holder) e JOIN holders h ON h.id = e.holder
) GROUP BY name;
UPDATE namespaces SET own = spent, shown = 1
WHERE name IN (SELECT name FROM namespaces WHERE name <> 'other' ORDER BY spent DESC LIMIT 100);
"""
# Who takes rows elsewhere: the number of the last transaction of all and of each hour, and hours below a mark that changed.
_EXPORTS = """
ALTER TABLE windows ADD COLUMN until REAL NOT NULL DEFAULT 0;
CREATE TABLE ledger (revision INTEGER NOT NULL);
INSERT INTO ledger VALUES (0);
CREATE TABLE hours (hour INTEGER PRIMARY KEY, revision INTEGER NOT NULL);
CREATE TABLE exporters (name TEXT PRIMARY KEY, since INTEGER NOT NULL, until INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE changes (
  exporter TEXT NOT NULL, hour INTEGER NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (exporter, hour)
) WITHOUT ROWID;
"""
_CRC_COLUMNS = {
    # The first is a number.
    **{table.name: ", ".join(("id", *table.columns)) for table in (PLACES, HOLDERS, WORKS)},
    "windows": "0, node, incarnation, CAST(number AS TEXT)",
    "namespaces": "0, name, CAST(spent AS TEXT), CAST(own AS TEXT), CAST(shown AS TEXT)",
}
_CHECKS = "".join(
    f"""
CREATE TABLE {table}_check (
  at INTEGER NOT NULL, place INTEGER NOT NULL, many INTEGER NOT NULL, digest INTEGER NOT NULL, PRIMARY KEY (at, place)
) WITHOUT ROWID;
"""
    for table, _ in SPANS
) + "".join(f"ALTER TABLE {table} ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;\n" for table in _CRC_COLUMNS)
# Of all rows as they are, believed: for files of before there were checks.
CHECKS_BUILT = "".join(
    f"DELETE FROM {table}_check; INSERT INTO {table}_check {sql_checks(table, SQLITE)};\n" for table, _ in SPANS
) + "".join(f"UPDATE {table} SET crc = {_CRC_FUNCTION}({columns});\n" for table, columns in _CRC_COLUMNS.items())
# Checks were kept by triggers, which believed whoever changed a row; and where the ledger went when it was moved.
_UNTRIGGERED = "ALTER TABLE ledger ADD COLUMN moved TEXT NOT NULL DEFAULT '';\n" + "".join(
    f"DROP TRIGGER IF EXISTS {table}{suffix}_{event};\n"
    for table, _ in SPANS
    for suffix in ("", "_measured", "_work")
    for event in ("inserted", "updated", "deleted")
)
# What each version adds to the one before; a new file gets all of it.
UPGRADES = (_SPENT, _WORK, _NAMESPACES, _EXPORTS, _CHECKS + CHECKS_BUILT, _UNTRIGGERED)
FORMAT_VERSION = len(UPGRADES)
# Format of the first ledger with checksums.
_CHECKED = 5
# 10^12 J in an hour, or in a day, of one holder at one place: ten thousand boards at full power.
_POISON_MJ = 10**15
_AMOUNTS = ("bare", "context", "active")


class RepairedRows(NamedTuple):
    """Rows that went, and the joules that they had."""

    rows: int = 0
    energy_j: float = 0.0


def register_sql_functions(connection: sqlite3.Connection) -> None:
    """Gives a connection the functions that the ledger's SQL calls."""
    connection.create_function(_CRC_FUNCTION, -1, _sql_crc, deterministic=True)


def _upgrade_schema(connection: sqlite3.Connection, version: int) -> RepairedRows:
    """Brings a ledger of an earlier version (0 for a new file) to this one. Raises sqlite3.Error, and changes nothing then."""
    healed = RepairedRows()
    connection.execute("BEGIN IMMEDIATE")
    try:
        for number, script in enumerate(UPGRADES[version:], version + 1):
            if number == _CHECKED and version:
                healed = _heal(connection)
            for statement in _statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return healed


def _statements(script: str) -> list[str]:
    return [statement for statement in script.split(";") if statement.strip()]


def _poison_condition(*columns: str) -> str:
    return " OR ".join(f"typeof({name}) <> 'integer' OR {name} > {_POISON_MJ} OR {name} < 0" for name in columns)


def _heal(connection: sqlite3.Connection) -> RepairedRows:
    """Lets go of rows that no boards can have drawn, which versions before had."""
    gone_mj: Counter[tuple[int, int]] = Counter()  # by holder and day, of the days' rows
    rows, energy_j = 0, 0.0
    for table, span_s in SPANS:
        poisoned = connection.execute(
            f"SELECT at, place, holder, bare, context, active FROM {table} WHERE {_poison_condition(*_AMOUNTS)}"
        ).fetchall()
        for at_s, place, holder, *amounts in poisoned:
            key = (at_s, place, holder)
            connection.execute(f"DELETE FROM {table} WHERE (at, place, holder) = (?, ?, ?)", key)
            rows += 1
            if span_s != DAY_S:
                continue
            connection.execute(
                "INSERT INTO daily SELECT ?, place, holder, sum(bare), sum(context), sum(active), sum(cost), sum(carbon) "
                "FROM hourly WHERE at >= ? AND at < ? AND place = ? AND holder = ? GROUP BY place, holder",
                (at_s, at_s, at_s + DAY_S, place, holder),
            )
            left = connection.execute(
                "SELECT bare + context + active FROM daily WHERE (at, place, holder) = (?, ?, ?)", key
            ).fetchone()
            went_mj = int(sum(one for one in amounts if isinstance(one, int | float))) - (left[0] if left else 0)
            gone_mj[holder, at_s] += went_mj
            energy_j += went_mj / 1000.0
        touched = {(at_s, place) for at_s, place, *_ in poisoned}
        touched.update(
            connection.execute(
                f"SELECT at, place FROM {table}_measured WHERE {_poison_condition('total', 'uncertainty')}"
            )
        )
        for hour in touched:
            ((total_mj,),) = connection.execute(
                f"SELECT coalesce(sum(bare + context + active), 0) FROM {table} WHERE (at, place) = (?, ?)", hour
            ).fetchall()
            connection.execute(
                f"UPDATE {table}_measured SET total = ?, uncertainty = "
                f"CASE WHEN {_poison_condition('uncertainty')} THEN ? ELSE uncertainty END WHERE (at, place) = (?, ?)",
                (total_mj, total_mj, *hour),
            )
    _heal_counters(connection, gone_mj)
    return RepairedRows(rows, energy_j)


def _heal_counters(connection: sqlite3.Connection, gone_mj: Counter[tuple[int, int]]) -> None:
    names = {}
    for holder, _ in gone_mj:
        found = connection.execute("SELECT kind, namespace FROM holders WHERE id = ?", (holder,)).fetchone()
        if found is not None:
            names[holder] = namespace_label(*found)
    by_name: Counter[str] = Counter()
    for (holder, _), energy_mj in gone_mj.items():
        by_name[names.get(holder, "")] += energy_mj
    for name, energy_mj in by_name.items():
        found = connection.execute("SELECT spent, own FROM namespaces WHERE name = ?", (name,)).fetchone()
        if found is not None:
            connection.execute(
                "UPDATE namespaces SET spent = ?, own = ? WHERE name = ?",
                (*(max(0, int(one) - energy_mj) for one in found), name),
            )


class _Statements:
    """Implements `LedgerTransaction`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def read(self, sql: str, given: Sequence[Any] = ()) -> list[Any]:
        """See `LedgerTransaction`."""
        return self._connection.execute(sql, given).fetchall()

    def change(self, sql: str, given: Sequence[Any] = ()) -> int:
        """See `LedgerTransaction`."""
        return self._connection.execute(sql, given).rowcount

    def change_each(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """See `LedgerTransaction`."""
        self._connection.executemany(sql, rows)

    def find_cells(
        self, table: str, keys: Sequence[str], columns: Sequence[str], wanted: Collection[tuple[int, ...]]
    ) -> dict[tuple[int, ...], tuple[Any, ...]]:
        """See `LedgerTransaction`."""
        # Of fixed length, so that each is compiled once; what is missing in the last finds nothing.
        many, found = len(keys), dict[tuple[int, ...], tuple[Any, ...]]()
        marks = ", ".join([f"({', '.join('?' * many)})"] * _FOUND_ONCE)
        sql = (
            f"WITH k ({', '.join(keys)}) AS (VALUES {marks}) SELECT {', '.join(f't.{one}' for one in (*keys, *columns))} "
            f"FROM k CROSS JOIN {table} t ON {' AND '.join(f't.{one} = k.{one}' for one in keys)}"
        )
        flat: list[int | None] = [value for key in wanted for value in key]
        for begin in range(0, len(flat), many * _FOUND_ONCE):
            part = flat[begin : begin + many * _FOUND_ONCE]
            part += [None] * (many * _FOUND_ONCE - len(part))
            for row in self._connection.execute(sql, part):
                found[row[:many]] = row[many:]
        return found

    def write_cells(
        self, table: str, keys: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[float]]
    ) -> None:
        """See `LedgerTransaction`."""
        # These are all columns, so that this replaces a row as an upsert does, in four fifths of its time (measured).
        names = (*keys, *columns)
        self._connection.executemany(
            f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})", rows
        )

    def find_names(self, table: NameTable, wanted: Collection[StoredNames]) -> dict[StoredNames, int]:
        """See `LedgerTransaction`."""
        sql = f"SELECT id FROM {table.name} WHERE {' AND '.join(f'{name} = ?' for name in table.columns)}"
        found = {names: self._connection.execute(sql, names).fetchone() for names in wanted}
        return {names: row[0] for names, row in found.items() if row is not None}

    def add_names(self, table: NameTable, rows: Sequence[tuple[int, StoredNames]]) -> None:
        """See `LedgerTransaction`."""
        columns = ("id", *table.columns, "crc", *(name for name, _ in table.others))
        others = tuple(value for _, value in table.others)
        self._connection.executemany(
            f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            [(number, *names, SQLITE.compute_name_crc(number, names), *others) for number, names in rows],
        )

    @contextmanager
    def part(self) -> Iterator[None]:
        """See `LedgerTransaction`."""
        execute = self._connection.execute
        execute("SAVEPOINT part")
        try:
            yield
        except (sqlite3.Error, *VALUE_ERRORS) as error:
            if not _is_of_part(error):
                raise
            execute("ROLLBACK TO part")
            raise LedgerPartRefused(str(error), is_damage=_is_damage(error)) from error
        finally:
            if self._connection.in_transaction:
                execute("RELEASE part")


class SqliteLedgerDatabase:
    """Implements `LedgerDatabase`; made by `open_sqlite_ledger`."""

    dialect: LedgerDialect = SQLITE

    def __init__(self, path: Path, connection: sqlite3.Connection, *, healed: RepairedRows) -> None:
        self.path: StoreLocation = path
        self._file = path
        self.healed = (
            f"rows={healed.rows} joules={healed.energy_j:.6g} reason=more energy than the devices can have drawn"
            if healed.rows
            else ""
        )
        self._connection = connection
        self._mark = RevisionMark(path.with_name(MARK_NAME))
        self.noted_revision = self._mark.noted

    @contextmanager
    def transaction(self, *, is_long: bool = False) -> Iterator[LedgerTransaction]:  # noqa: ARG002  # there are no limits
        """See `LedgerDatabase`."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield _Statements(connection)
                connection.execute("COMMIT")
            except BaseException:
                # A full disk may have ended the transaction already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, *VALUE_ERRORS) as error:
            if _is_of_part(error):
                raise LedgerRefused(self.path, str(error), _DAMAGED) from error
            raise LedgerError(self.path, str(error), _DISK) from error

    @contextmanager
    def snapshot(self) -> Iterator[LedgerReader]:
        """See `LedgerDatabase`."""
        # One of its own, so that any thread may read while others do.
        try:
            uri = f"{self._file.absolute().as_uri()}?mode=ro"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10.0)
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DISK) from error
        with closing(connection):
            register_sql_functions(connection)
            read = _Reader(connection, self._file)
            read("BEGIN", ())
            yield read

    def note_revision(self, revision: int) -> None:
        """See `LedgerDatabase`."""
        self._mark.save_revision(revision)

    def measure_bytes(self, read: LedgerReader) -> int:
        """See `LedgerDatabase`."""
        pages, free, size = (read(f"PRAGMA {name}", ())[0][0] for name in ("page_count", "freelist_count", "page_size"))
        return int((pages - free) * size)

    def mend_indexes(self) -> None:
        """See `LedgerDatabase`."""
        try:
            self._connection.execute("REINDEX")
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DAMAGED) from error

    def close(self) -> None:
        """See `LedgerDatabase`."""
        self._connection.close()
        self._mark.close()


class _Reader:
    """Implements `LedgerReader`."""

    dialect: LedgerDialect = SQLITE

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    def __call__(self, sql: str, given: Iterable[Any]) -> list[Any]:
        """See `LedgerReader`."""
        try:
            return self._connection.execute(sql, tuple(given)).fetchall()
        except sqlite3.Error as error:
            if "integer overflow" in str(error):
                raise SumOverflow from error
            raise LedgerError(self._path, str(error), _DAMAGED if _is_damage(error) else _DISK) from error


def is_filled(folder: Path) -> bool:
    """Whether a folder has a ledger that goes on there. Raises LedgerError."""
    path = folder / FILE_NAME
    if not path.exists():
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0)) as connection:
            ((version,),) = connection.execute("PRAGMA user_version").fetchall()
            if version < FORMAT_VERSION:
                return bool(version)
            ((revision, moved),) = connection.execute("SELECT revision, moved FROM ledger").fetchall()
            return bool(revision) and not moved
    except sqlite3.Error as error:
        raise LedgerError(path, str(error), _DISK) from error


def open_sqlite_ledger(folder: Path) -> SqliteLedgerDatabase:
    """Opens the ledger of a folder, made where there is none. Raises LedgerError."""
    path = folder / FILE_NAME
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION_ID:
            raise LedgerError(path, "is another program's file", "move it away")
        if version > FORMAT_VERSION:
            raise LedgerError(path, f"has format {version}, this version knows {FORMAT_VERSION}", "use a newer Eelgrid")
        register_sql_functions(connection)
        healed = _upgrade_schema(connection, version) if version < FORMAT_VERSION else RepairedRows()
        return SqliteLedgerDatabase(path, connection, healed=healed)
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise LedgerError(path, str(error), _DISK) from error


def _is_damage(error: Exception) -> bool:
    """Whether the file is not as SQLite wrote it."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _is_of_part(error: Exception) -> bool:
    """Whether it is what was to be written, or rows that it meets, and not the disk."""
    kinds = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
    return isinstance(error, (*VALUE_ERRORS, *kinds)) or _is_damage(error)
