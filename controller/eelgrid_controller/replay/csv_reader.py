"""CSV files whose cells know their position, so that every error names file, line, column and remedy.

The whole file is read before anything is used, and the first bad cell rejects it: a trace that silently lost a row
gives numbers that nobody can compare.

TraceError                  the trace, or the place it was looked for, is at fault
├── TraceMissing            no file there, or it cannot be read
├── TraceTooLarge           more bytes or rows than this program takes
└── TraceMalformed          a line or column that is not of the format
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eelgrid_protos.quantities import MIB

FILE_BYTES_MOST = 256 * MIB
_NAME_LONGEST = 128
_DECIMAL = re.compile(r"\d{1,15}(\.\d{1,9})?", re.ASCII)


class TraceError(ValueError):
    """A trace that cannot be used; the message names the place and the remedy."""

    def __init__(self, place: str, problem: str, remedy: str) -> None:
        self.place, self.problem, self.remedy = place, problem, remedy
        super().__init__(f"{place}: {problem}; {remedy}")

    def __reduce__(self) -> tuple[type["TraceError"], tuple[str, str, str]]:
        """So that it comes whole out of another process."""
        return type(self), (self.place, self.problem, self.remedy)


class TraceMissing(TraceError):
    """No trace where one was looked for."""


class TraceTooLarge(TraceError):
    """A trace beyond the bounds of this program."""


class TraceMalformed(TraceError):
    """A line or column that is not of the format."""


@dataclass(frozen=True, slots=True)
class CsvLine:
    """One record with its place in the file."""

    path: Path
    number: int
    cells: Mapping[str, str]

    def cell_error(self, column: str, problem: str, remedy: str) -> TraceMalformed:
        """The error that names this cell."""
        return TraceMalformed(f"{self.path}, line {self.number}, column {column}", problem, remedy)

    def text(self, column: str) -> str:
        """The cell without blanks around it, empty where the file lacks the column."""
        return self.cells.get(column, "").strip()

    def whole(self, column: str, most: int) -> int:
        """A whole number from 0 on."""
        text = self.text(column)
        # isascii: str.isdigit() alone lets through digits that int() refuses.
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise self.cell_error(column, f"holds {text!r}, not a whole number", f"write a number from 0 to {most}")
        number = int(text)
        if number > most:
            raise self.cell_error(column, f"holds {number}, more than {most}", "check the unit in the column's name")
        return number

    def decimal(self, column: str, most: float) -> float:
        """A number from 0 on, with a point or without."""
        text = self.text(column)
        if not _DECIMAL.fullmatch(text):
            remedy = f"write a number from 0 to {most:g}, such as 12 or 0.5"
            raise self.cell_error(column, f"holds {text!r}, not a number", remedy)
        number = float(text)
        if number > most:
            raise self.cell_error(column, f"holds {text}, more than {most:g}", "check the unit in the column's name")
        return number

    def name(self, column: str) -> str:
        """A name."""
        text = self.text(column)
        if not text or len(text) > _NAME_LONGEST:
            raise self.cell_error(column, "is empty or too long", f"write a name of 1 to {_NAME_LONGEST} characters")
        return text


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > FILE_BYTES_MOST:
            raise TraceTooLarge(str(path), f"has over {FILE_BYTES_MOST >> 20} MiB", "give a shorter trace")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceMissing(str(path), error.strerror or "cannot be read", "check the path and its rights") from None
    except UnicodeDecodeError as error:
        raise TraceMalformed(f"{path}, byte {error.start}", "is not UTF-8", "save the file as UTF-8 CSV") from None


def _titles(reader: Iterator[list[str]]) -> list[str]:
    return [column.strip() for column in next(reader, [])]


def read_header(path: Path) -> tuple[str, ...]:
    """The titles of a file's columns."""
    try:
        return tuple(_titles(csv.reader(_text(path).splitlines()[:1], strict=True)))
    except csv.Error as error:
        raise TraceMalformed(f"{path}, line 1", f"is no CSV ({error})", "quote the cell") from None


def _check_titles(path: Path, titles: list[str], columns: tuple[str, ...], others: tuple[str, ...] | None) -> None:
    missing = [column for column in columns if column not in titles]
    if missing:
        place = f"{path}, line 1, column {missing[0]}"
        raise TraceMalformed(place, "is missing", f"begin the file with {','.join(columns)}")
    repeated = next((title for index, title in enumerate(titles) if title in titles[:index]), None)
    if others is not None and repeated is not None:
        raise TraceMalformed(f"{path}, line 1, column {repeated}", "is there twice", "remove one of the two")
    unknown = [title for title in titles if others is not None and title not in columns + others]
    if unknown:
        place = f"{path}, line 1, column {unknown[0]!r}"
        raise TraceMalformed(place, "is unknown", f"remove it, or write one of {', '.join(columns + (others or ()))}")


def read_lines(
    path: Path, columns: tuple[str, ...], rows_most: int, *, others: tuple[str, ...] | None = None
) -> Iterator[CsvLine]:
    """Every record of a file that has the columns; bounded in bytes and rows.

    With `others`, a column that is in neither list is an error, so that a misspelt one is not passed over.
    """
    reader = csv.reader(_text(path).splitlines(), strict=True)
    try:
        titles = _titles(reader)
        _check_titles(path, titles, columns, others)
        for count, cells in enumerate(filter(None, reader), start=1):
            if count > rows_most:
                raise TraceTooLarge(f"{path}, line {reader.line_num}", f"is past {rows_most} rows", "split the file")
            if len(cells) != len(titles):
                place = f"{path}, line {reader.line_num}, column {titles[min(len(cells), len(titles) - 1)]}"
                raise TraceMalformed(place, f"{len(cells)} cells under {len(titles)} columns", "write a cell a column")
            yield CsvLine(path, reader.line_num, dict(zip(titles, cells, strict=True)))
    except csv.Error as error:
        raise TraceMalformed(f"{path}, line {reader.line_num}", f"is no CSV ({error})", "quote the cell") from None


def require_unique(records: Iterable[CsvLine], column: str) -> Iterator[CsvLine]:
    """The same lines; a name that comes twice would make one submission swallow another."""
    seen: dict[str, int] = {}
    for line in records:
        name = line.text(column)
        if name in seen:
            raise line.cell_error(column, f"repeats {name!r} of line {seen[name]}", "give each row its own name")
        seen[name] = line.number
        yield line
    if not seen:
        raise TraceMalformed("the trace", "has no row", "give a list with at least one row")
