"""The tables of the energy ledger, and how a question becomes SQL over them.

Owns the schema and its versions, and the pieces of queries. Must not know connections.

Theory. One row for each hour, place and holder, and one for each day. Questions take whole
days from the days' rows and the rest from the hours'. What a workload has worked is kept by
workload: its group is that of the newest holder that names it, so that it is in one group and
not in two where one pod of it came before the controller knew the workload.
"""

import json

from eelgrid_controller.adapters.energy_checks import CHECK_SCHEMA, CHECKS_BUILT, NOTHING, TRIGGERS, Damage, Piece
from eelgrid_controller.energy_ledger.asking import DAY_S, TIMES, Asked
from eelgrid_controller.energy_ledger.entries import HOUR_S

__all__ = [
    "APPLICATION_ID", "CELL_MJ_MOST", "FORMAT_VERSION", "PLACED", "SPANS", "UPGRADES", "columns_of", "filters_of",
    "is_of_workloads", "pieces_of", "place_filters_of", "spans_of", "work_query",
]  # fmt: skip

APPLICATION_ID = 0x45656C45  # "EelE"
SPANS = (("hourly", HOUR_S), ("daily", DAY_S))
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
    "kind": "h.kind", "namespace": "h.namespace", "name": "h.name", "workload": "h.workload", "title": "h.title",
    "user": "h.user", "queue": "h.queue", "node": "p.node", "pool": "p.pool", "gpu_model": "p.gpu_model",
    "hour": "e.at", "day": f"e.at / {DAY_S} * {DAY_S}",
}  # fmt: skip
# What is asked of places.
PLACED = ("node", "pool", "gpu_model")
# By these a workload is in one group, whole; by others its joules are cut and its work is not.
_OF_WORKLOADS = {"namespace", "workload", "title", "queue", "hour", "day"}


def pieces_of(asked: Asked) -> tuple[Piece, ...]:
    """Rows of the stretch: whole days from the days' rows unless hours are asked for."""
    first, last = -(-asked.begin_s // DAY_S) * DAY_S, asked.end_s // DAY_S * DAY_S
    if "hour" in asked.group_by or last <= first:
        return (("hourly", asked.begin_s, asked.end_s),)
    edges = ((asked.begin_s, first), (last, asked.end_s))
    return (("daily", first, last), *(("hourly", low, high) for low, high in edges if high > low))


def spans_of(asked: Asked, suffix: str = "", damage: Damage = NOTHING) -> tuple[str, tuple[int, ...]]:
    """The query of these rows without those that are damaged, and the values of its marks."""
    pieces = pieces_of(asked)
    return (
        " UNION ALL ".join(
            f"SELECT * FROM {table}{suffix} WHERE at >= ? AND at < ?{damage.kept(table, suffix)}"
            for table, _, _ in pieces
        ),
        tuple(bound for _, low, high in pieces for bound in (low, high)),
    )


def _column(name: str) -> tuple[str, tuple[str, ...]]:
    if name.startswith("label:"):
        # As a JSON string, which is also how a path quotes a key.
        return "coalesce(json_extract(h.labels, ?), '')", (f"$.{json.dumps(name.removeprefix('label:'))}",)
    return _COLUMNS[name], ()


def columns_of(asked: Asked) -> tuple[list[str], tuple[str, ...]]:
    """What is grouped by, and the values of its marks."""
    found = [_column(name) for name in asked.group_by]
    return [column for column, _ in found], tuple(value for _, given in found for value in given)


def filters_of(asked: Asked) -> tuple[str, tuple[str, ...]]:
    """The WHERE clause, and the values of its marks."""
    clauses, given = ["1"], list[str]()
    for name, value in asked.filters:
        column, named = _column(name)
        clauses.append(f"{column} = ?")
        given += [*named, value]
    return f"WHERE {' AND '.join(clauses)}", tuple(given)


def place_filters_of(asked: Asked) -> tuple[str, tuple[str, ...]]:
    """The same of places alone."""
    places = tuple((name, value) for name, value in asked.filters if name in PLACED)
    return "WHERE 1" + "".join(f" AND {_COLUMNS[name]} = ?" for name, _ in places), tuple(value for _, value in places)


def is_of_workloads(asked: Asked) -> bool:
    """Whether workloads are whole in the groups of a question, so that their work can be told."""
    names = (*asked.group_by, *(name for name, _ in asked.filters))
    return bool(asked.group_by) and all(name in _OF_WORKLOADS or name.startswith("label:") for name in names)


def work_query(asked: Asked, damage: Damage = NOTHING) -> tuple[str, tuple[str | int, ...]]:
    """Groups, unit, amount, counted and missed seconds, of a question in whose groups workloads are whole."""
    columns, named = columns_of(asked)
    where, given = filters_of(asked)
    rows, bounds = spans_of(asked, "_work", damage)
    grouped = ", ".join(str(1 + place) for place in range(len(columns) + 1))
    if not any(name in TIMES for name in asked.group_by):
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
