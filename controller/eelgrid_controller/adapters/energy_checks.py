"""Checksums of the energy ledger's rows: how they are made, kept, and compared when rows are read.

Owns the checksum of a row, the triggers that keep sums of them, and the search for rows that do not agree. Must not
know connections, nor what is made of rows: it is given a way to read.

Theory. SQLite trusts its file. A bit that flipped on the disk is another number, or a subtree of rows that is not found
any more, and neither is an error to it. So each hour and place has a second record, its check: how many rows it has, and
the sum of their checksums modulo a prime. Triggers keep it, by the difference of a row before and after. A row that was
damaged before it is added to stays found, since the difference does not mend what was lost. Before an answer is made the
rows of its stretch are summed up again and compared: a changed, missing or additional row is found but for one case in
two thousand million, and a single bit always. What does not agree is left out of the answer and told in it.

The checksum of a row is a polynomial of its key and its amounts, in SQL alone, since a function of Python for each row
would cost more than the answer. Names are texts, which SQL cannot sum: each has a CRC beside it, written with it and
compared for those names that an answer uses.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from eelgrid_controller.energy_ledger.asking import DAY_S
from eelgrid_controller.energy_ledger.entries import HOUR_S

__all__ = [
    "CHECKS_BUILT", "CHECK_SCHEMA", "CRC_FUNCTION", "DAMAGED_MOST", "NAMES", "NOTHING", "TRIGGERS", "Damage", "Part", "Piece",
    "crc_of", "damaged_names", "damaged_parts", "has_every_index",
]  # fmt: skip

Read: TypeAlias = Callable[[str, Iterable[Any]], list[Any]]
# A table of hours or of days, and the times from which and before which.
Piece: TypeAlias = tuple[str, int, int]

# So many parts are left out of an answer; a ledger with more of them is not to be read at all.
DAMAGED_MOST = 500
CRC_FUNCTION = "row_crc"
_SPANS = (("hourly", HOUR_S), ("daily", DAY_S))
# A prime below 2^31, so that products stay below 2^62, and any factor below it.
_PRIME = 2**31 - 1
_FACTOR = 1_000_000_007
# Work has no place: ids of places begin at 1.
_OF_WORK = 0
# Tables of names, and the columns that their CRCs are of.
NAMES = {
    "places": "id, node, pool, gpu_model",
    "holders": "id, kind, namespace, name, workload, title, user, queue, labels",
    "works": "id, workload, unit",
    "windows": "node, incarnation, number",
    "namespaces": "name, spent, own, shown",
}


class Part(NamedTuple):
    """Rows of one hour or day (`table`) at one place, or the work of all, that do not agree with their check."""

    table: str
    at_s: int
    place: int


class Damage(NamedTuple):
    """What must be left out of an answer: parts, and holders and places whose names cannot be trusted."""

    parts: tuple[Part, ...] = ()
    holders: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    works: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return any(self)

    def kept(self, table: str, suffix: str) -> str:
        """What a WHERE clause over these rows must say, too."""
        parts = [part for part in self.parts if part.table == table]
        if suffix == "_work":
            hours = {part.at_s for part in parts if part.place == _OF_WORK}
            return _without("at", hours) + _without("work", self.works)
        keys = {f"({part.at_s}, {part.place})" for part in parts if part.place != _OF_WORK}
        text = f" AND (at, place) NOT IN (VALUES {', '.join(sorted(keys))})" if keys else ""
        return text + _without("place", self.places) + (_without("holder", self.holders) if not suffix else "")


NOTHING = Damage()


def _without(column: str, values: Iterable[int]) -> str:
    listed = ", ".join(map(str, sorted(values)))
    return f" AND {column} NOT IN ({listed})" if listed else ""


def crc_of(values: Iterable[object]) -> int:
    """The checksum of names; also as a function of SQL."""
    return zlib.crc32("\x1f".join(map(str, values)).encode("utf-8", "replace"))


def _real(column: str) -> tuple[str, str]:
    """A number with a fraction as two whole ones, so that no bit of it that matters is left out."""
    whole = f"CAST({column} AS INTEGER)"
    return whole, f"CAST(({column} - {whole}) * 9007199254740992.0 AS INTEGER)"


def _polynomial(*values: str) -> str:
    text = "17"
    for value in values:
        text = f"(({text}) * {_FACTOR} + {value} % {_PRIME}) % {_PRIME}"
    return text


def _checksum(suffix: str, row: str = "") -> str:
    """Of a row of `table{suffix}`; `row` is `new.` or `old.` in a trigger."""
    at, place = f"{row}at", f"{row}place"
    if suffix == "_measured":
        return _polynomial(at, place, f"{row}total", f"{row}uncertainty", *_real(f"{row}uncounted"))
    if suffix == "_work":
        reals = [part for name in ("amount", "counted", "missed") for part in _real(f"{row}{name}")]
        return _polynomial(at, f"{row}work", *reals)
    amounts = (f"{row}bare", f"{row}context", f"{row}active")
    return _polynomial(at, place, f"{row}holder", *amounts, *_real(f"{row}cost"), *_real(f"{row}carbon"))


def _place(suffix: str, row: str = "") -> str:
    return str(_OF_WORK) if suffix == "_work" else f"{row}place"


_SUFFIXES = ("", "_measured", "_work")
CHECK_SCHEMA = "".join(
    f"""
CREATE TABLE {table}_check (
  at INTEGER NOT NULL, place INTEGER NOT NULL, many INTEGER NOT NULL, digest INTEGER NOT NULL, PRIMARY KEY (at, place)
) WITHOUT ROWID;
"""
    for table, _ in _SPANS
) + "".join(f"ALTER TABLE {table} ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;\n" for table in NAMES)


def _triggers(table: str, suffix: str) -> str:
    name, check = f"{table}{suffix}", f"{table}_check"
    new, old = _checksum(suffix, "new."), _checksum(suffix, "old.")
    of_old = f"WHERE at = old.at AND place = {_place(suffix, 'old.')}"
    return f"""
CREATE TRIGGER {name}_inserted AFTER INSERT ON {name} BEGIN
  INSERT INTO {check} VALUES (new.at, {_place(suffix, "new.")}, 1, {new})
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


TRIGGERS = "".join(_triggers(table, suffix) for table, _ in _SPANS for suffix in _SUFFIXES)


def _sums(table: str, suffix: str, where: str) -> str:
    place = _place(suffix)
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
    for table, _ in _SPANS
) + "".join(f"UPDATE {table} SET crc = {CRC_FUNCTION}({columns});\n" for table, columns in NAMES.items())


def damaged_parts(read: Read, pieces: Iterable[Piece]) -> list[Part]:
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
        found += [Part(table, at_s, place) for at_s, place in rows]
    return found


def damaged_names(read: Read, table: str, ids: str, given: Iterable[Any]) -> list[int]:
    """Of the rows of `table` whose ids the query `ids` selects, those that are not there or not as they were written."""
    columns = ", ".join(f"h.{name}" for name in NAMES[table].split(", "))
    rows = read(
        f"SELECT e.id FROM ({ids}) e LEFT JOIN {table} h ON h.id = e.id "
        f"WHERE h.id IS NULL OR h.crc <> {CRC_FUNCTION}({columns}) LIMIT {DAMAGED_MOST + 1}",
        given,
    )
    return [found for (found,) in rows]


def has_every_index(read: Read, ids: str, given: Iterable[Any]) -> bool:
    """Whether each of these holders that names a workload is found by it, as work finds its holder."""
    return not read(
        f"SELECT 1 FROM ({ids}) e JOIN holders h ON h.id = e.id WHERE h.workload <> '' AND NOT EXISTS (SELECT 1 FROM "
        "holders i INDEXED BY holders_workload WHERE i.workload = h.workload AND i.workload <> '' AND i.id = h.id) LIMIT 1",
        given,
    )
