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
    "crc_columns", "crc_of", "damaged_names", "damaged_parts", "has_every_index", "sql_crc",
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
    # The first is a number.
    "places": "id, node, pool, gpu_model",
    "holders": "id, kind, namespace, name, workload, title, user, queue, labels",
    "works": "id, workload, unit",
    "windows": "0, node, incarnation, CAST(number AS TEXT)",
    "namespaces": "0, name, CAST(spent AS TEXT), CAST(own AS TEXT), CAST(shown AS TEXT)",
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
    return f"{CRC_FUNCTION}({NAMES[table]})"


def _split(column: str) -> tuple[str, str]:
    """A number with a fraction as two whole ones, so that no bit of it that matters is left out."""
    whole = f"CAST({column} AS INTEGER)"
    return whole, f"CAST(({column} - {whole}) * 9007199254740992.0 AS INTEGER)"


def _scaled(column: str) -> str:
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
    return _polynomial(key, whole, _scaled(f"{row}cost"), _scaled(f"{row}carbon"))


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
) + "".join(f"UPDATE {table} SET crc = {crc_columns(table)};\n" for table in NAMES)


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
    crc = f"{CRC_FUNCTION}({', '.join(f'h.{name}' for name in NAMES[table].split(', '))})"
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
