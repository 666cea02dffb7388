"""Rows of the energy ledger in any database: what they are, their checksums, and the SQL of questions.

Checksums are computed by the writer, from the row that it read and the row that it writes, and never by the database: what
anybody else changes, a disk or a person, does not agree with them. The writer keeps the rows that it adds to each minute
(`KeptCells`), and reads the others. Each hour, and each day, of one place has a check: how
many rows it has, and the sum of their checksums, to which each write adds what is new less what it read. So a row that was
changed behind our back stays found, however often it is added to afterwards. A question sums up the checksums of the rows
that it uses in SQL, in its own snapshot, and leaves out the parts that do not agree.

Must not know how a database is opened, or what a window is.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import add, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from eelgrid_controller.energy.ledger import DAY_S, HOUR_S, RAY_JOB_LABEL, TIME_KEYS, LedgerQuery
from eelgrid_controller.energy.store.database import CRC_MASK, LedgerDialect, LedgerReader, NameTable
from eelgrid_protos.messages import DEFAULT_POOL

# A table of hours or of days, and the times from which and before which.
LedgerPiece: TypeAlias = tuple[str, int, int]
CellKey: TypeAlias = tuple[int, ...]
Amounts: TypeAlias = Sequence[float]

# So many parts are left out of an answer; a ledger with more of them is not to be read at all.
DAMAGED_MOST = 500
SPANS = (("hourly", HOUR_S), ("daily", DAY_S))
# A prime below 2^31, so that products stay below 2^62, and any factor below it.
_PRIME = 2**31 - 1
_FACTOR = 1_000_000_007
_FRACTION = 2.0**53
# Whole numbers below this are exact as doubles, too.
_EXACT_MOST = 2.0**53
_SCALE = 2.0**36
_INTEGER_MOST = 2**63 - 1
# Rows that are kept of one table, some 400 bytes each: two hours of ten thousand nodes.
_KEPT_ROWS_LEAST, _KEPT_ROWS_MOST = 1_000, 300_000
# Work has no place: ids of places begin at 1.
_OF_WORK = 0


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


class CellKind(NamedTuple):
    """Rows of hours and days that amounts are added to: the end of their tables' names, keys and amounts, whole ones first."""

    suffix: str
    keys: tuple[str, ...]
    amounts: tuple[str, ...]
    whole: int


SPENT = CellKind("", ("at", "place", "holder"), ("bare", "context", "active", "cost", "carbon"), 3)
MEASURED = CellKind("_measured", ("at", "place"), ("total", "uncertainty", "uncounted"), 2)
WORKED = CellKind("_work", ("at", "work"), ("amount", "counted", "missed"), 0)
CELL_KINDS = (SPENT, MEASURED, WORKED)
# What no hour of a holder at a place can have: 128 boards of 7.5 kW would need a year for it. Sums of two stay integers.
CELL_MJ_MOST = 2**55


def crc_of(number: int, *texts: object) -> int:
    """The CRC-32 of a record with its number, or 0 where it has none."""
    return zlib.crc32("\x1f".join(map(str, texts)).encode(), number & CRC_MASK)


def sum_cells(more: Iterable[tuple[CellKey, Amounts]], span_s: int) -> dict[CellKey, Amounts]:
    """Sums amounts by key, with times cut to whole spans."""
    sums: dict[CellKey, Amounts] = {}
    for key, amounts in more:
        past_s = key[0] % span_s
        cut = (key[0] - past_s, *key[1:]) if past_s else key
        known = sums.setdefault(cut, amounts)
        if known is not amounts:
            sums[cut] = list(map(add, known, amounts))
    return sums


def check_amounts(kind: CellKind, amounts: Sequence[Amounts]) -> None:
    """Raises OverflowError and ValueError for what no row can have."""
    found = np.array(amounts, dtype=np.float64)
    if not np.isfinite(found).all():
        raise ValueError("an amount is no number")
    whole = found[:, : kind.whole]
    if (whole < 0.0).any() or (whole >= 2.0**63).any():
        raise OverflowError("an amount is too large, or negative")


class MergedCells(NamedTuple):
    """Rows as they are to be written, and what that adds to checks, by time and place: rows, and their checksums."""

    rows: list[tuple[float, ...]]
    checks: dict[tuple[int, int], tuple[int, int]]


class KeptCells:
    """Rows of one table as they are on disk, of the newest hours or days, so that what adds to them need not read them.

    Each has its amounts and its checksum, by column. Whoever keeps them says when they may not be as on disk any more.
    """

    def __init__(self, kind: CellKind, span_s: int) -> None:
        self._kind, self._span_s = kind, span_s
        self._forget()

    def _forget(self) -> None:
        self._rows: dict[CellKey, int] = {}
        self._whole = np.zeros((self._kind.whole, 0), np.int64)
        self._doubles = np.zeros((len(self._kind.amounts) - self._kind.whole, 0))
        self._checksums = np.zeros(0, np.int64)
        self._newest_s = 0
        self._rows_before = 0  # when old ones last went

    def forget(self) -> None:
        """Reads all rows anew when they are added to."""
        if self._rows:
            self._forget()

    def add(
        self, added: Mapping[CellKey, Amounts], find: Callable[[Collection[CellKey]], Mapping[CellKey, Sequence[Any]]]
    ) -> MergedCells:
        """Adds amounts to rows, of which `find` reads those that are not kept; beyond the most that an hour can have they are cut off.

        The rows are kept as they are then, so forget them unless they come to be on disk.
        """
        kind, keys = self._kind, list(added)
        self._make_room(keys)
        missing = [key for key in keys if key not in self._rows]
        stored = find(missing) if missing else {}
        self._append(missing, stored)
        new = {key for key in missing if key not in stored}
        at = np.array([self._rows[key] for key in keys])
        more_whole, more = _split_amounts(kind, list(added.values()))
        whole, doubles = np.minimum(self._whole[:, at] + more_whole, CELL_MJ_MOST), self._doubles[:, at] + more
        before, after = self._checksums[at], compute_checksums(kind, keys, whole, doubles)
        self._whole[:, at], self._doubles[:, at], self._checksums[at] = whole, doubles, after
        checks: dict[tuple[int, int], tuple[int, int]] = {}
        for key, was, now in zip(keys, before.tolist(), after.tolist(), strict=True):
            part = key[0], _OF_WORK if kind is WORKED else key[1]
            many, digest = checks.get(part, (0, 0))
            checks[part] = (many + 1, digest + now) if key in new else (many, digest + now - was)
        rows = [
            (*key, *first, *last) for key, first, last in zip(keys, whole.T.tolist(), doubles.T.tolist(), strict=True)
        ]
        return MergedCells(rows, checks)

    def _append(self, keys: Sequence[CellKey], stored: Mapping[CellKey, Sequence[Any]]) -> None:
        """Keeps rows as they were read; those that are not stored have nothing yet."""
        if not keys:
            return
        none = (0,) * len(self._kind.amounts)
        known = [stored.get(key, none) for key in keys]
        if not set(map(type, chain.from_iterable(known))) <= {int, float}:
            known = [_readable_amounts(row) for row in known]
        whole, doubles = _split_amounts(self._kind, known)
        doubles = np.where(np.isfinite(doubles), doubles, 0.0)
        self._checksums = np.concatenate((self._checksums, compute_checksums(self._kind, keys, whole, doubles)))
        self._whole = np.concatenate((self._whole, whole), axis=1)
        self._doubles = np.concatenate((self._doubles, doubles), axis=1)
        self._rows.update(zip(keys, range(len(self._rows), len(self._rows) + len(keys)), strict=True))

    def _make_room(self, keys: Sequence[CellKey]) -> None:
        """Lets go of what is older than the newest hour or day and the one before, when there is much of it."""
        self._newest_s = max(self._newest_s, *map(itemgetter(0), keys))
        if len(self._rows) <= 2 * self._rows_before + _KEPT_ROWS_LEAST:
            return
        left = [(key, row) for key, row in self._rows.items() if key[0] >= self._newest_s - self._span_s]
        if len(left) > _KEPT_ROWS_MOST:
            self._forget()
            return
        rows = np.array([row for _, row in left], np.int64)
        self._whole, self._doubles = self._whole[:, rows], self._doubles[:, rows]
        self._checksums = self._checksums[rows]
        self._rows = {key: row for row, (key, _) in enumerate(left)}
        self._rows_before = len(left)


def _readable_amounts(stored: Sequence[object]) -> list[float]:
    """Amounts of a stored row; one that is no number any more is 0, and the row agrees with its check neither way."""
    return [one if isinstance(one, int | float) else 0.0 for one in stored]


def _split_amounts(kind: CellKind, rows: Sequence[Amounts]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Whole amounts and doubles, each by column."""
    both = np.array(rows, dtype=np.float64).reshape(len(rows), len(kind.amounts))
    if (np.abs(both[:, : kind.whole]) < _EXACT_MOST).all():
        return both[:, : kind.whole].astype(np.int64).T, both[:, kind.whole :].T
    try:
        whole = np.array([row[: kind.whole] for row in rows], dtype=np.int64)
    except OverflowError:
        # Sums of a batch, or what was damaged.
        whole = np.array([[min(int(one), CELL_MJ_MOST) for one in row[: kind.whole]] for row in rows], dtype=np.int64)
    whole = np.minimum(whole.reshape(len(rows), kind.whole), CELL_MJ_MOST)
    return whole.T, both[:, kind.whole :].T


def compute_checksums(
    kind: CellKind, keys: Sequence[CellKey], whole: npt.NDArray[np.int64], doubles: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """The checksums of rows, whose amounts are given by column: the same numbers as `sql_checksum` finds."""
    key = np.array(keys, dtype=np.int64).T
    if kind is SPENT:
        first = key[0] * 1048573 + key[1] * 131071 + key[2]
        total = whole[0] * 3 + whole[1] * 5 + whole[2] * 7
        return _fold(first, total, *(_truncate(one * _SCALE) for one in doubles))
    first = key[0] * 1048573 + key[1]
    if kind is MEASURED:
        return _fold(first, whole[0] * 3 + whole[1] * 5, *_split(doubles[0]))
    return _fold(first, *(part for one in doubles for part in _split(one)))


def _fold(*values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Remainders are those of a division towards zero, as SQL has them."""
    found = np.full_like(values[0], 17)
    for value in values:
        found = np.fmod(found * _FACTOR + np.fmod(value, _PRIME), _PRIME)
    return found


def _truncate(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    within = np.clip(values, -(2.0**63), np.nextafter(2.0**63, 0.0)).astype(np.int64)
    return np.where(values >= 2.0**63, _INTEGER_MOST, within)


def _split(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Numbers with fractions as two whole ones each, so that no bit of them that matters is left out."""
    whole = _truncate(values)
    return whole, _truncate((values - whole) * _FRACTION)


def _sql_split(column: str, dialect: LedgerDialect) -> tuple[str, str]:
    whole = dialect.truncate(column)
    return whole, dialect.truncate(f"(({column} - {whole}) * {_FRACTION})")


def _sql_fold(*values: str) -> str:
    text = "CAST(17 AS BIGINT)"
    for value in values:
        text = f"(({text}) * {_FACTOR} + {value} % {_PRIME}) % {_PRIME}"
    return text


def sql_checksum(kind: CellKind, dialect: LedgerDialect) -> str:
    """The checksum of a row in SQL; of money to 10^-11 where it is below 10^8, its parts beside are not looked at."""
    if kind is SPENT:
        key, total = "(at * 1048573 + place * 131071 + holder)", "(bare * 3 + context * 5 + active * 7)"
        return _sql_fold(key, total, *(dialect.truncate(f"({name} * {_SCALE})") for name in ("cost", "carbon")))
    if kind is MEASURED:
        total = "(total * 3 + uncertainty * 5)"
        return _sql_fold("(at * 1048573 + place)", total, *_sql_split("uncounted", dialect))
    parts = [part for name in kind.amounts for part in _sql_split(name, dialect)]
    return _sql_fold("(at * 1048573 + work)", *parts)


def _sums(table: str, kind: CellKind, where: str, dialect: LedgerDialect) -> str:
    place, keys = (str(_OF_WORK), "at") if kind is WORKED else ("place", "at, place")
    return (
        f"SELECT at, {place} AS place, count(*) AS many, sum({sql_checksum(kind, dialect)}) AS digest "
        f"FROM {table}{kind.suffix} {where} GROUP BY {keys}"
    )


def sql_checks(table: str, dialect: LedgerDialect) -> str:
    """A query of the checks that the rows of a table should have, as they are."""
    sums = " UNION ALL ".join(_sums(table, kind, "", dialect) for kind in CELL_KINDS)
    return f"SELECT at, place, sum(many), sum(digest % {_PRIME}) % {_PRIME} FROM ({sums}) r GROUP BY at, place"


def sql_add_check(table: str) -> str:
    """Adds rows and checksums to the check of a time and place; the digest stays below the prime."""
    return (
        f"INSERT INTO {table}_check (at, place, many, digest) VALUES (?, ?, ?, ?) ON CONFLICT (at, place) DO UPDATE "
        f"SET many = {table}_check.many + excluded.many, digest = ({table}_check.digest + excluded.digest) % {_PRIME}"
    )


def damaged_parts(read: LedgerReader, pieces: Iterable[LedgerPiece]) -> list[DamagedPart]:
    """Parts of these pieces whose rows do not agree with their check."""
    found = []
    for table, low, high in pieces:
        where = "WHERE at >= ? AND at < ?"
        sums = [_sums(table, kind, where, read.dialect) for kind in CELL_KINDS]
        sums.append(f"SELECT at, place, -many, -digest FROM {table}_check {where}")
        rows = read(
            f"SELECT at, place FROM ({' UNION ALL '.join(sums)}) r GROUP BY at, place "
            f"HAVING sum(many) <> 0 OR sum(digest % {_PRIME}) % {_PRIME} <> 0 LIMIT {DAMAGED_MOST + 1}",
            (low, high) * len(sums),
        )
        found += sorted(DamagedPart(table, at_s, place) for at_s, place in rows)
    return found


def damaged_names(read: LedgerReader, table: NameTable, ids: str, given: Iterable[Any]) -> list[int]:
    """Of the rows of `table` whose ids the query `ids` selects, those that are not there or not as they were written."""
    crc = read.dialect.name_crc([f"h.{name}" for name in ("id", *table.columns)])
    rows = read(
        f"SELECT e.id FROM ({ids}) e LEFT JOIN {table.name} h ON h.id = e.id "
        f"WHERE h.id IS NULL OR h.crc <> {crc} LIMIT {DAMAGED_MOST + 1}",
        given,
    )
    return [found for (found,) in rows]


def has_every_index(read: LedgerReader, rows: str, works: str, given: Iterable[Any]) -> bool:
    """Whether each holder of `rows` that tells work is found by its workload, as work finds its holder."""
    # Holders by their ids: the index in question must not be what finds them.
    return not read(
        "SELECT 1 FROM holders h NOT INDEXED WHERE h.workload IN (SELECT workload FROM works WHERE id IN "
        f"({works})) AND h.id IN (SELECT holder FROM ({rows})) AND h.workload <> '' AND NOT EXISTS (SELECT 1 FROM "
        "holders i INDEXED BY holders_workload WHERE i.workload = h.workload AND i.workload <> '' AND i.id = h.id) LIMIT 1",
        given,
    )


_COLUMNS = {
    "kind": "h.kind",
    "namespace": "h.namespace",
    "name": "h.name",
    "workload": "h.workload",
    "title": "h.title",
    "user": 'h."user"',
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


def _column(name: str, dialect: LedgerDialect) -> tuple[str, tuple[str, ...]]:
    if name.startswith("label:"):
        column, value = dialect.label(name.removeprefix("label:"))
        return column, (value,)
    return _COLUMNS[name], ()


def columns_of(asked: LedgerQuery, dialect: LedgerDialect) -> tuple[list[str], tuple[str, ...]]:
    """What is grouped by, and the values of its marks."""
    found = [_column(name, dialect) for name in asked.group_by]
    return [column for column, _ in found], tuple(value for _, given in found for value in given)


def filters_of(asked: LedgerQuery, dialect: LedgerDialect) -> tuple[str, tuple[str, ...]]:
    """The WHERE clause, and the values of its marks."""
    clauses, given = ["1 = 1"], list[str]()
    for name, value in asked.filters:
        column, named = _column(name, dialect)
        clauses.append(f"{column} = ?")
        given += [*named, value]
    return f"WHERE {' AND '.join(clauses)}", tuple(given)


def place_filters_of(asked: LedgerQuery) -> tuple[str, tuple[str, ...]]:
    """The same of places alone."""
    places = tuple((name, value) for name, value in asked.filters if name in PLACED)
    return "WHERE 1 = 1" + "".join(f" AND {_COLUMNS[name]} = ?" for name, _ in places), tuple(
        value for _, value in places
    )


def is_of_workloads(asked: LedgerQuery) -> bool:
    """Whether workloads are whole in the groups of a question, so that their work can be told."""
    names = (*asked.group_by, *(name for name, _ in asked.filters))
    of_ray = f"label:{RAY_JOB_LABEL}"  # a part of a workload
    return bool(asked.group_by) and all(
        name in _OF_WORKLOADS or (name.startswith("label:") and name != of_ray) for name in names
    )


def work_query(
    asked: LedgerQuery, dialect: LedgerDialect, damage: Damage = NO_DAMAGE
) -> tuple[str, tuple[str | int, ...]]:
    """Groups, unit, amount, counted and missed seconds, of a question in whose groups workloads are whole."""
    columns, named = columns_of(asked, dialect)
    where, given = filters_of(asked, dialect)
    rows, bounds = spans_of(asked, "_work", damage)
    grouped = ", ".join(str(1 + place) for place in range(len(columns) + 1))
    if not any(name in TIME_KEYS for name in asked.group_by):
        # First by number, as of joules.
        rows = (
            "SELECT work, sum(amount) AS amount, sum(counted) AS counted, sum(missed) AS missed "
            f"FROM ({rows}) r GROUP BY work"
        )
    query = (
        f"SELECT {', '.join(columns)}, w.unit, sum(e.amount), sum(e.counted), sum(e.missed) FROM ({rows}) e "
        "JOIN works w ON w.id = e.work JOIN holders h ON h.id = "
        "(SELECT max(id) FROM holders WHERE workload = w.workload AND workload <> '') "
        f"{where} GROUP BY {grouped}"
    )
    return query, (*named, *bounds, *given)
