"""Schema of the energy ledger: tables, SQL of queries, row checksums, and upgrades from earlier versions.

Upgrades run in place and in one transaction; rows whose checksums differ are left out of answers.
"""

import json
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from eelgrid_controller.energy.ledger import DAY_S, HOUR_S, TIME_KEYS, LedgerQuery, namespace_label
from eelgrid_protos.messages import DEFAULT_POOL

Read: TypeAlias = Callable[[str, Iterable[Any]], list[Any]]
# A table of hours or of days, and the times from which and before which.
LedgerPiece: TypeAlias = tuple[str, int, int]

# So many parts are left out of an answer; a ledger with more of them is not to be read at all.
DAMAGED_MOST = 500
CRC_FUNCTION = "row_crc"
SPANS = (("hourly", HOUR_S), ("daily", DAY_S))
# A prime below 2^31, so that products stay below 2^62, and any factor below it.
_PRIME = 2**31 - 1
_FACTOR = 1_000_000_007
# Work has no place: ids of places begin at 1.
_OF_WORK = 0
# Tables of names, and the columns that their CRCs are of.
NAME_TABLES = {
    # The first is a number.
    "places": "id, node, pool, gpu_model",
    "holders": "id, kind, namespace, name, workload, title, user, queue, labels",
    "works": "id, workload, unit",
    "windows": "0, node, incarnation, CAST(number AS TEXT)",
    "namespaces": "0, name, CAST(spent AS TEXT), CAST(own AS TEXT), CAST(shown AS TEXT)",
}


class DamagedPart(NamedTuple):
    """Rows of one hour or day (`table`) at one place, or the work of all, that do not agree with their check."""

    table: str
    at_s: int
    place: int


class Damage(NamedTuple):
    """What must be left out of an answer: parts, and holders and places whose names cannot be trusted."""

    parts: tuple[DamagedPart, ...] = ()
    holders: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    works: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return any(self)

    def where_clause(self, table: str, suffix: str) -> str:
        """What a WHERE clause over these rows must say, too."""
        parts = [part for part in self.parts if part.table == table]
        if suffix == "_work":
            hours = {part.at_s for part in parts if part.place == _OF_WORK}
            return _without("at", hours) + _without("work", self.works)
        keys = {f"({part.at_s}, {part.place})" for part in parts if part.place != _OF_WORK}
        text = f" AND (at, place) NOT IN (VALUES {', '.join(sorted(keys))})" if keys else ""
        return text + _without("place", self.places) + (_without("holder", self.holders) if not suffix else "")


NO_DAMAGE = Damage()


def _without(column: str, values: Iterable[int]) -> str:
    listed = ", ".join(map(str, sorted(values)))
    return f" AND {column} NOT IN ({listed})" if listed else ""


def crc_of(number: int, *texts: object) -> int:
    """The checksum of a row of names with its id, or 0 where it has none."""
    return zlib.crc32("\x1f".join(map(str, texts)).encode(), number & 0xFFFFFFFF)


def sql_crc(number: int, *texts: str) -> int:
    """The same as a function of SQL; called for each name that an answer uses."""
    try:
        return zlib.crc32("\x1f".join(texts).encode(), number & 0xFFFFFFFF)
    except (TypeError, ValueError):
        return -1  # no text where one was written


def crc_columns(table: str) -> str:
    """The checksum that a row of names must have."""
    return f"{CRC_FUNCTION}({NAME_TABLES[table]})"


def _split(column: str) -> tuple[str, str]:
    """A number with a fraction as two whole ones, so that no bit of it that matters is left out."""
    whole = f"CAST({column} AS INTEGER)"
    return whole, f"CAST(({column} - {whole}) * 9007199254740992.0 AS INTEGER)"


def _scaled_column(column: str) -> str:
    """The same of one that stays below 10^8, to 10^-11: its parts beside are not looked at."""
    return f"CAST({column} * 68719476736.0 AS INTEGER)"


def _polynomial(*values: str) -> str:
    text = "17"
    for value in values:
        text = f"(({text}) * {_FACTOR} + {value} % {_PRIME}) % {_PRIME}"
    return text


def _checksum(suffix: str, row: str = "") -> str:
    """Of a row of `table{suffix}`; `row` is `new.` or `old.` in a trigger."""
    if suffix == "_measured":
        whole = f"({row}total * 3 + {row}uncertainty * 5)"
        return _polynomial(f"({row}at * 1048573 + {row}place)", whole, *_split(f"{row}uncounted"))
    if suffix == "_work":
        parts = [part for name in ("amount", "counted", "missed") for part in _split(f"{row}{name}")]
        return _polynomial(f"({row}at * 1048573 + {row}work)", *parts)
    key = f"({row}at * 1048573 + {row}place * 131071 + {row}holder)"
    whole = f"({row}bare * 3 + {row}context * 5 + {row}active * 7)"
    return _polynomial(key, whole, _scaled_column(f"{row}cost"), _scaled_column(f"{row}carbon"))


def _place_column(suffix: str, row: str = "") -> str:
    return str(_OF_WORK) if suffix == "_work" else f"{row}place"


_SUFFIXES = ("", "_measured", "_work")
CHECK_SCHEMA = "".join(
    f"""
CREATE TABLE {table}_check (
  at INTEGER NOT NULL, place INTEGER NOT NULL, many INTEGER NOT NULL, digest INTEGER NOT NULL, PRIMARY KEY (at, place)
) WITHOUT ROWID;
"""
    for table, _ in SPANS
) + "".join(f"ALTER TABLE {table} ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;\n" for table in NAME_TABLES)


def _triggers(table: str, suffix: str) -> str:
    name, check = f"{table}{suffix}", f"{table}_check"
    new, old = _checksum(suffix, "new."), _checksum(suffix, "old.")
    of_old = f"WHERE at = old.at AND place = {_place_column(suffix, 'old.')}"
    return f"""
CREATE TRIGGER {name}_inserted AFTER INSERT ON {name} BEGIN
  INSERT INTO {check} VALUES (new.at, {_place_column(suffix, "new.")}, 1, {new})
  ON CONFLICT DO UPDATE SET many = many + 1, digest = (digest + excluded.digest) % {_PRIME};
END;
CREATE TRIGGER {name}_updated AFTER UPDATE ON {name} BEGIN
  UPDATE {check} SET digest = (digest + {new} - ({old})) % {_PRIME} {of_old};
END;
CREATE TRIGGER {name}_deleted AFTER DELETE ON {name} BEGIN
  UPDATE {check} SET many = many - 1, digest = (digest - ({old})) % {_PRIME} {of_old};
  DELETE FROM {check} {of_old} AND many = 0;
END;
"""


TRIGGERS = "".join(_triggers(table, suffix) for table, _ in SPANS for suffix in _SUFFIXES)


def _sums(table: str, suffix: str, where: str) -> str:
    place = _place_column(suffix)
    keys = "at" if suffix == "_work" else "at, place"
    return (
        f"SELECT at, {place} AS place, count(*) AS many, sum({_checksum(suffix)}) AS digest FROM {table}{suffix} "
        f"{where} GROUP BY {keys}"
    )


# Of all rows as they are, believed: for files of before there were checks.
CHECKS_BUILT = "".join(
    f"DELETE FROM {table}_check; INSERT INTO {table}_check "
    f"SELECT at, place, sum(many), sum(digest % {_PRIME}) % {_PRIME} FROM "
    f"({' UNION ALL '.join(_sums(table, suffix, '') for suffix in _SUFFIXES)}) GROUP BY at, place;\n"
    for table, _ in SPANS
) + "".join(f"UPDATE {table} SET crc = {crc_columns(table)};\n" for table in NAME_TABLES)


def damaged_parts(read: Read, pieces: Iterable[LedgerPiece]) -> list[DamagedPart]:
    """Parts of these pieces whose rows do not agree with their check."""
    found = []
    for table, low, high in pieces:
        where = "WHERE at >= ? AND at < ?"
        sums = [_sums(table, suffix, where) for suffix in _SUFFIXES]
        sums.append(f"SELECT at, place, -many, -digest FROM {table}_check {where}")
        rows = read(
            f"SELECT at, place FROM ({' UNION ALL '.join(sums)}) GROUP BY at, place "
            f"HAVING sum(many) <> 0 OR sum(digest % {_PRIME}) % {_PRIME} <> 0 LIMIT {DAMAGED_MOST + 1}",
            (low, high) * len(sums),
        )
        found += [DamagedPart(table, at_s, place) for at_s, place in rows]
    return found


def damaged_names(read: Read, table: str, ids: str, given: Iterable[Any]) -> list[int]:
    """Of the rows of `table` whose ids the query `ids` selects, those that are not there or not as they were written."""
    crc = f"{CRC_FUNCTION}({', '.join(f'h.{name}' for name in NAME_TABLES[table].split(', '))})"
    rows = read(
        f"SELECT e.id FROM ({ids}) e LEFT JOIN {table} h ON h.id = e.id "
        f"WHERE h.id IS NULL OR h.crc <> {crc} LIMIT {DAMAGED_MOST + 1}",
        given,
    )
    return [found for (found,) in rows]


def has_every_index(read: Read, rows: str, works: str, given: Iterable[Any]) -> bool:
    """Whether each holder of `rows` that tells work is found by its workload, as work finds its holder."""
    # Holders by their ids: the index in question must not be what finds them.
    return not read(
        "SELECT 1 FROM holders h NOT INDEXED WHERE h.workload IN (SELECT workload FROM works WHERE id IN "
        f"({works})) AND h.id IN (SELECT holder FROM ({rows})) AND h.workload <> '' AND NOT EXISTS (SELECT 1 FROM "
        "holders i INDEXED BY holders_workload WHERE i.workload = h.workload AND i.workload <> '' AND i.id = h.id) LIMIT 1",
        given,
    )


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
# What no hour of a holder at a place can have: 128 boards of 7.5 kW would need a year for it. Sums of two stay integers.
CELL_MJ_MOST = 2**55
# What each version adds to the one before; a new file gets all of it.
UPGRADES = (_SPENT, _WORK, _NAMESPACES, _EXPORTS, CHECK_SCHEMA + CHECKS_BUILT + TRIGGERS)
FORMAT_VERSION = len(UPGRADES)
_COLUMNS = {
    "kind": "h.kind",
    "namespace": "h.namespace",
    "name": "h.name",
    "workload": "h.workload",
    "title": "h.title",
    "user": "h.user",
    "queue": "h.queue",
    "node": "p.node",
    "pool": f"CASE p.pool WHEN '' THEN '{DEFAULT_POOL}' ELSE p.pool END",
    "gpu_model": "p.gpu_model",
    "hour": "e.at",
    "day": f"e.at / {DAY_S} * {DAY_S}",
}
# What is asked of places.
PLACED = ("node", "pool", "gpu_model")
# By these a workload is in one group, whole; by others its joules are cut and its work is not.
_OF_WORKLOADS = {"namespace", "workload", "title", "queue", "hour", "day"}


def pieces_of(asked: LedgerQuery) -> tuple[LedgerPiece, ...]:
    """Rows of the stretch: whole days from the days' rows unless hours are asked for."""
    first, last = -(-asked.begin_s // DAY_S) * DAY_S, asked.end_s // DAY_S * DAY_S
    if "hour" in asked.group_by or last <= first:
        return (("hourly", asked.begin_s, asked.end_s),)
    edges = ((asked.begin_s, first), (last, asked.end_s))
    return (("daily", first, last), *(("hourly", low, high) for low, high in edges if high > low))


def spans_of(asked: LedgerQuery, suffix: str = "", damage: Damage = NO_DAMAGE) -> tuple[str, tuple[int, ...]]:
    """The query of these rows without those that are damaged, and the values of its marks."""
    pieces = pieces_of(asked)
    return (
        " UNION ALL ".join(
            f"SELECT * FROM {table}{suffix} WHERE at >= ? AND at < ?{damage.where_clause(table, suffix)}"
            for table, _, _ in pieces
        ),
        tuple(bound for _, low, high in pieces for bound in (low, high)),
    )


def _column(name: str) -> tuple[str, tuple[str, ...]]:
    if name.startswith("label:"):
        # As a JSON string, which is also how a path quotes a key.
        return "coalesce(json_extract(h.labels, ?), '')", (f"$.{json.dumps(name.removeprefix('label:'))}",)
    return _COLUMNS[name], ()


def columns_of(asked: LedgerQuery) -> tuple[list[str], tuple[str, ...]]:
    """What is grouped by, and the values of its marks."""
    found = [_column(name) for name in asked.group_by]
    return [column for column, _ in found], tuple(value for _, given in found for value in given)


def filters_of(asked: LedgerQuery) -> tuple[str, tuple[str, ...]]:
    """The WHERE clause, and the values of its marks."""
    clauses, given = ["1"], list[str]()
    for name, value in asked.filters:
        column, named = _column(name)
        clauses.append(f"{column} = ?")
        given += [*named, value]
    return f"WHERE {' AND '.join(clauses)}", tuple(given)


def place_filters_of(asked: LedgerQuery) -> tuple[str, tuple[str, ...]]:
    """The same of places alone."""
    places = tuple((name, value) for name, value in asked.filters if name in PLACED)
    return "WHERE 1" + "".join(f" AND {_COLUMNS[name]} = ?" for name, _ in places), tuple(value for _, value in places)


def is_of_workloads(asked: LedgerQuery) -> bool:
    """Whether workloads are whole in the groups of a question, so that their work can be told."""
    names = (*asked.group_by, *(name for name, _ in asked.filters))
    return bool(asked.group_by) and all(name in _OF_WORKLOADS or name.startswith("label:") for name in names)


def work_query(asked: LedgerQuery, damage: Damage = NO_DAMAGE) -> tuple[str, tuple[str | int, ...]]:
    """Groups, unit, amount, counted and missed seconds, of a question in whose groups workloads are whole."""
    columns, named = columns_of(asked)
    where, given = filters_of(asked)
    rows, bounds = spans_of(asked, "_work", damage)
    grouped = ", ".join(str(1 + place) for place in range(len(columns) + 1))
    if not any(name in TIME_KEYS for name in asked.group_by):
        # First by number, as of joules.
        rows = (
            "SELECT work, sum(amount) AS amount, sum(counted) AS counted, sum(missed) AS missed "
            f"FROM ({rows}) GROUP BY work"
        )
    query = (
        f"SELECT {', '.join(columns)}, w.unit, sum(e.amount), sum(e.counted), sum(e.missed) FROM ({rows}) e "
        "JOIN works w ON w.id = e.work JOIN holders h ON h.id = "
        "(SELECT max(id) FROM holders WHERE workload = w.workload AND workload <> '') "
        f"{where} GROUP BY {grouped}"
    )
    return query, (*named, *bounds, *given)


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
    connection.create_function(CRC_FUNCTION, -1, sql_crc, deterministic=True)


def upgrade_schema(connection: sqlite3.Connection, version: int) -> RepairedRows:
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
    """Of a script, each whole; a trigger has semicolons within."""
    found, begun = [], ""
    for piece in script.split(";"):
        begun += piece + ";"
        if sqlite3.complete_statement(begun):
            if begun.strip(" \n;"):
                found.append(begun)
            begun = ""
    return found


def _poison_condition(*columns: str) -> str:
    return " OR ".join(f"typeof({name}) <> 'integer' OR {name} > {_POISON_MJ} OR {name} < 0" for name in columns)


def _heal(connection: sqlite3.Connection) -> RepairedRows:
    """Lets go of rows that no boards can have drawn; see the module."""
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
