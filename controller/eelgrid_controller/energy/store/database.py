"""What the energy ledger needs of a database: transactions, snapshots, and the few words that SQL has several of.

The ledger's statements are written once, with `?` where a value goes; `LedgerDialect` has what cannot be said alike. Must
not know what a row means.
"""

import os
import zlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from eelgrid_controller.errors import LedgerError, StoreLocation

# Names as they are stored, in the order of the table's columns.
StoredNames = tuple[str, ...]
CRC_MASK = 0xFFFFFFFF
# What Python says of a value that a database cannot take: too large, no text that it can be, of no known type.
VALUE_ERRORS = (OverflowError, ValueError, TypeError)


class NameTable(NamedTuple):
    """A table of names with ids that the ledger gives out, and what other columns of a new row have."""

    name: str
    columns: tuple[str, ...]
    others: tuple[tuple[str, float], ...] = ()


PLACES = NameTable("places", ("node", "pool", "gpu_model"))
HOLDERS = NameTable("holders", ("kind", "namespace", "name", "workload", "title", '"user"', "queue", "labels"))
WORKS = NameTable("works", ("workload", "unit"), (("until", 0.0),))


class RevisionMark:
    """The number of the last transaction, in a file of its own.

    SQLite checks its log when a killed process left one, and what follows a damaged frame was never there, without a
    word; a server may be restored from an older copy, or a standby promoted without its last transactions. The mark is written after each commit and not waited for: after a loss of power it may be older than the ledger,
    never newer.
    """

    def __init__(self, path: Path) -> None:
        self.noted = 0  # what is in it; 0 where there is none, or none that can be read
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
            number, _, check = os.pread(self._file, 64, 0).decode("ascii", "replace").strip().partition(" ")
            if check == str(_crc(number)):
                self.noted = int(number)
        except (OSError, ValueError):
            self._file = None

    def save_revision(self, revision: int) -> None:
        """Writes it down, where that can be done: a ledger without its mark is as good."""
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, f"{revision} {_crc(str(revision))}".ljust(48).encode() + b"\n", 0)

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())


class LedgerPartRefused(Exception):
    """A part of a transaction was undone: it cannot be stored, or (`is_damage`) meets rows that cannot be read."""

    def __init__(self, what: str, *, is_damage: bool) -> None:
        self.is_damage = is_damage
        super().__init__(what)


class LedgerInDoubt(LedgerError):
    """A transaction may have been committed or not: the connection broke, or a standby did not confirm it."""


class SumOverflow(Exception):
    """A sum of integers is too large for the database."""


class LedgerDialect(Protocol):
    """What differs between databases in the SQL of the ledger."""

    # Whether an index may disagree with its table unnoticed, and can be compared with it.
    checks_indexes: bool

    def truncate(self, number: str) -> str:
        """A double as a whole number towards zero, at the ends of 64 bits where it is beyond them."""

    def join_lines(self, column: str) -> str:
        """Texts of a group, one a line."""

    def label(self, key: str) -> tuple[str, str]:
        """A label of a holder `h`, "" where it has none, with one mark; and the value of that mark."""

    def name_crc(self, columns: Sequence[str]) -> str:
        """The checksum of an id and names, given as columns, as `compute_name_crc` computes it."""

    def compute_name_crc(self, number: int, names: StoredNames) -> int:
        """The checksum of a row of names."""


class LedgerReader(Protocol):
    """Reads within one snapshot; raises LedgerError, and SumOverflow for a sum that is too large for the database."""

    dialect: LedgerDialect

    def __call__(self, sql: str, given: Iterable[Any]) -> list[Any]:
        """The rows of a query."""


class LedgerTransaction(Protocol):
    """Statements of one transaction; errors of the database pass through it, and `LedgerDatabase` translates them."""

    def read(self, sql: str, given: Sequence[Any] = ()) -> list[Any]:
        """The rows of a query, or those that a statement returns."""

    def change(self, sql: str, given: Sequence[Any] = ()) -> int:
        """Runs a statement; returns how many rows it changed."""

    def change_each(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Runs a statement for each row of values."""

    def find_cells(
        self, table: str, keys: Sequence[str], columns: Sequence[str], wanted: Collection[tuple[int, ...]]
    ) -> dict[tuple[int, ...], tuple[Any, ...]]:
        """Columns of the rows that are there, by their keys."""

    def write_cells(
        self, table: str, keys: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[float]]
    ) -> None:
        """Writes rows of keys and other columns, of which whole numbers are int, in the place of those with these keys."""

    def find_names(self, table: NameTable, wanted: Collection[StoredNames]) -> dict[StoredNames, int]:
        """Ids of the names that are there."""

    def add_names(self, table: NameTable, rows: Sequence[tuple[int, StoredNames]]) -> None:
        """Adds names with ids and checksums."""

    def part(self) -> AbstractContextManager[None]:
        """What can be undone by itself; raises LedgerPartRefused then."""


class LedgerDatabase(Protocol):
    """A database with the tables of one ledger."""

    path: StoreLocation
    dialect: LedgerDialect
    # What was wrong with a ledger of an earlier version and is gone, in words.
    healed: str
    # The last transaction that was noted beside the database, 0 without such a note.
    noted_revision: int

    def transaction(self, *, is_long: bool = False) -> AbstractContextManager[LedgerTransaction]:
        """All of it or nothing, on disk on return; a long one may take minutes, and pause.

        Raises LedgerError; LedgerRefused where the database is well and something in it cannot be stored; LedgerInDoubt
        where nobody knows whether it was committed. The next transaction begins when that is certain.
        """

    def snapshot(self) -> AbstractContextManager[LedgerReader]:
        """Reads as of one moment, whatever is written meanwhile; any thread may."""

    def note_revision(self, revision: int) -> None:
        """Notes the number of the last transaction beside the database, where that can be done."""

    def measure_bytes(self, read: LedgerReader) -> int:
        """What the rows need, without what is free."""

    def mend_indexes(self) -> None:
        """Makes indexes anew from their tables. Raises LedgerError."""

    def close(self) -> None:
        """Lets go of the database."""
