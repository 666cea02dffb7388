"""Moves an energy ledger from one database to another: all of it or nothing, and only if both hold the same rows.

Owns the order: everything is copied in one transaction of the target, which is committed only where the digest of what is
there is that of the source; the source is marked afterwards, so that no controller goes on from it. Checks of hours and days
are copied as they are, so what was damaged stays found. Names whose checksums are wrong are left out, and the rows that
they belong to stay left out of answers. Must not know which databases they are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

from eelgrid_controller.energy.ledger import DAY_S
from eelgrid_controller.energy.store.database import HOLDERS, PLACES, WORKS, LedgerReader, LedgerTransaction, NameTable
from eelgrid_controller.energy.store.ledger_store import LedgerStore
from eelgrid_controller.energy.store.schema import CELL_KINDS, CELL_MJ_MOST, SPANS, CellKind, damaged_names
from eelgrid_controller.errors import LedgerError

_COPIED_ONCE = 10_000
Rows: TypeAlias = list[tuple[Any, ...]]
Read: TypeAlias = Callable[[str, Sequence[Any]], list[Any]]
# Tables with few rows, and their keys.
_RECORDS = {
    "windows": ("node", "incarnation, number, until, crc"),
    "namespaces": ("name", "spent, own, shown, crc"),
    "hours": ("hour", "revision"),
    "exporters": ("name", "since, until"),
    "changes": ("exporter, hour", "at"),
}
_NAMES = (PLACES, HOLDERS, WORKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedLedger:
    """What was moved, and the digest of it in both databases."""

    source: str
    target: str
    revision: int
    rows: int
    # Names that were damaged, which are left out.
    names_damaged: int
    digest: str

    def as_plain(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


@dataclass(slots=True)
class _Digest:
    """Sums up rows in the order in which they are read."""

    rows: int = 0
    _hash: Any = field(default_factory=lambda: blake2b(digest_size=16))

    def add(self, table: str, rows: Rows) -> None:
        """Adds some rows of a table."""
        self.rows += len(rows)
        self._hash.update(repr((table, rows)).encode("utf-8", "surrogatepass"))

    def hexdigest(self) -> str:
        """Of everything that was added."""
        return str(self._hash.hexdigest())


def copy_ledger(source: LedgerStore, target: LedgerStore) -> MovedLedger:
    """Copies a ledger into an empty one, or finds that this was done before; both stay open. Raises LedgerError."""
    if target.revision:
        known, damaged = _read_source(source)
        with target.database.snapshot() as there:
            found = _sum_up(there)
        if found.hexdigest() != known.hexdigest():
            raise LedgerError(target.path, "it holds a ledger already", "name an empty one")
    else:
        with target.replace_all(source.revision) as transaction:
            known, damaged = _read_source(source, transaction)
            found = _sum_up(transaction.read)
            if found.hexdigest() != known.hexdigest():
                raise LedgerError(
                    target.path,
                    f"the copy has other rows ({found.hexdigest()}) than {source.path} ({known.hexdigest()})",
                    f"nothing was changed in {source.path}: go on with it, and report this",
                )
    return MovedLedger(
        source=str(source.path),
        target=str(target.path),
        revision=target.revision,
        rows=known.rows,
        names_damaged=damaged,
        digest=known.hexdigest(),
    )


def _read_source(source: LedgerStore, into: LedgerTransaction | None = None) -> tuple[_Digest, int]:
    """Reads all rows, and writes them where that is wanted; returns their digest, and how many names are damaged.

    The snapshot ends with it: what follows takes long, and a server ends transactions that are idle.
    """
    known = _Digest()
    with source.database.snapshot() as read:
        bad = {table.name: frozenset(_damaged(read, table)) for table in _NAMES}
        for table, rows in _everything(read, bad):
            known.add(table, rows)
            if into is not None:
                _write(into, table, rows)
    return known, sum(map(len, bad.values()))


def _damaged(read: LedgerReader, table: NameTable) -> list[int]:
    return damaged_names(read, table, f"SELECT id FROM {table.name}", ())


def _sum_up(read: Read) -> _Digest:
    """The digest of a copy, in which every name is good or a placeholder."""
    found = _Digest()
    for table, rows in _everything(read, {}):
        found.add(table, rows)
    return found


def _everything(read: Read, bad: dict[str, frozenset[int]]) -> Iterator[tuple[str, Rows]]:
    """All rows in an order that is the same in each database, some at a time."""
    for names in _NAMES:
        others = "".join(f", {name}" for name, _ in names.others)
        found = read(f"SELECT id, {', '.join(names.columns)}{others} FROM {names.name} ORDER BY id", ())
        end, damaged = 1 + len(names.columns), bad.get(names.name, frozenset())
        yield names.name, [_placeholder(row, end) if row[0] in damaged else tuple(row) for row in found]
    for table, (keys, columns) in _RECORDS.items():
        yield table, sorted(map(tuple, read(f"SELECT {keys}, {columns} FROM {table}", ())))
    for span, _ in SPANS:
        for kind in CELL_KINDS:
            yield from _cells(read, f"{span}{kind.suffix}", kind)
        yield from _cells(read, f"{span}_check", None)


def _placeholder(row: Sequence[Any], end: int) -> tuple[Any, ...]:
    """A name that cannot be trusted: its id is taken, and it agrees with no checksum."""
    return (row[0], f"(damaged {row[0]})", *[""] * (end - 2), *row[end:])


def _cells(read: Read, table: str, kind: CellKind | None) -> Iterator[tuple[str, Rows]]:
    """Rows of hours, days or their checks, a day at a time, without those that hold no amounts any more."""
    keys, amounts = (("at", "place"), ("many", "digest")) if kind is None else (kind.keys, kind.amounts)
    whole = 2 if kind is None else kind.whole
    days = read(f"SELECT DISTINCT at / {DAY_S} * {DAY_S} AS day FROM {table} ORDER BY day", ())
    for (day_s,) in days:
        found = read(
            f"SELECT {', '.join((*keys, *amounts))} FROM {table} WHERE at >= ? AND at < ? ORDER BY {', '.join(keys)}",
            (day_s, day_s + DAY_S),
        )
        least = -CELL_MJ_MOST if kind is None else 0
        rows = [tuple(row) for row in found if _is_whole(row[len(keys) :], whole, least)]
        for begin in range(0, len(rows), _COPIED_ONCE):
            yield table, rows[begin : begin + _COPIED_ONCE]


def _is_whole(amounts: Sequence[Any], whole: int, least: int) -> bool:
    return all(isinstance(one, int) and least <= one <= CELL_MJ_MOST for one in amounts[:whole]) and all(
        isinstance(one, float) for one in amounts[whole:]
    )


def _write(transaction: LedgerTransaction, table: str, rows: Rows) -> None:
    if not rows:
        return
    for names in _NAMES:
        if names.name == table:
            end = 1 + len(names.columns)
            transaction.add_names(names, [(row[0], row[1:end]) for row in rows])
            for at, (column, _) in enumerate(names.others, end):
                transaction.change_each(f"UPDATE {table} SET {column} = ? WHERE id = ?", [(r[at], r[0]) for r in rows])
            lost = [(row[0],) for row in rows if row[1] == f"(damaged {row[0]})"]
            transaction.change_each(f"UPDATE {table} SET crc = -1 WHERE id = ?", lost)
            return
    if table in _RECORDS:
        columns = ", ".join(_RECORDS[table])
        marks = ", ".join("?" * len(rows[0]))
        transaction.change_each(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)
        return
    kind = next((one for one in CELL_KINDS if table in {f"{span}{one.suffix}" for span, _ in SPANS}), None)
    keys, amounts = (("at", "place"), ("many", "digest")) if kind is None else (kind.keys, kind.amounts)
    transaction.write_cells(table, keys, amounts, rows)
