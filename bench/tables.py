"""Tables of results: a CSV file, and the same in columns on the terminal.

Owns the layout of rows, with pandas. Must not know their meaning: a row has its cells in the order of the columns, or
by name, formatted by the caller, who knows their units.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

Row = Sequence[object] | Mapping[str, object]


def write_csv(path: Path, columns: Sequence[str] | None, rows: Iterable[Row]) -> None:
    """Writes a header and a line a row, and replaces the file; None is an empty cell.

    Without columns each row is a mapping, and the first one's keys are the columns.
    """
    listed = list(rows)
    if columns is None:
        columns = [*listed[0]] if listed and isinstance(listed[0], Mapping) else []
    # As objects, each number is written as it is: no column of integers becomes one of floats for a missing cell.
    frame = pd.DataFrame([_cells(row, columns) for row in listed], columns=columns, dtype=object)
    frame.to_csv(path, index=False, lineterminator="\n")


def format_table(header: Sequence[str] | None, rows: Iterable[Row], words: int) -> str:
    """Lays cells out in columns; the first `words` columns are words, the others numbers.

    Without a header each row is a mapping, and the first one's keys are the header.
    """
    listed = list(rows)
    if header is None:
        header = [*listed[0]] if listed and isinstance(listed[0], Mapping) else []
    if not header:
        return ""
    frame = pd.DataFrame([list(header), *(_cells(row, header) for row in listed)]).astype(str)
    for place in range(len(header)):
        if place < words:
            frame[place] = frame[place].str.ljust(int(frame[place].str.len().max()))
        if place:  # two spaces between columns
            frame[place] = " " + frame[place]
    text = frame.to_string(index=False, header=False)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _cells(row: Row, columns: Sequence[str]) -> list[object]:
    return [row[name] for name in columns] if isinstance(row, Mapping) else list(row)
