"""Tables of the comparisons: a CSV, and the same in columns for who reads along.

Owns how rows are laid out. Must not know what they say.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["aligned", "write_csv"]


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A header and a line a row; replaces the file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """Text in columns; the first `words` columns are words, the others numbers."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *lines)
    )
