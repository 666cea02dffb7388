"""Files of energy's rows for other programs: CSV and Parquet, whole on the disk or not there.

Owns the formats and how a file comes to its name. Must not know what was asked.
"""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from eelgrid_protos.safe_text import csv_cell

__all__ = ["filed", "flat", "is_durable", "parquet_library", "write_csv", "write_parquet"]


def flat(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for files: work in columns of its own for each unit that any of them tells; None where one does not."""
    units = sorted({one["unit"] for row in rows for one in row["work"]})
    found = []
    for row in rows:
        told = {one["unit"]: one for one in row["work"]}
        found.append(
            {name: value for name, value in row.items() if name != "work"}
            | {
                f"{unit}_{name}": told[unit][name] if unit in told else None
                for unit in units
                for name in ("amount", "energy_per_unit_j", "missed_s")
            }
        )
    return found


def _columns(rows: Sequence[dict[str, Any]], by: Sequence[str]) -> list[str]:
    return list(rows[0]) if rows else [*by, "energy_j", "idle_j", "active_j", "cost", "carbon_g"]


def write_csv(path: Path, rows: Sequence[dict[str, Any]], by: Sequence[str]) -> None:
    """Writes rows with a line of titles."""
    rows = flat(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _columns(rows, by))
        writer.writerow({name: csv_cell(name) for name in writer.fieldnames})
        writer.writerows([{name: csv_cell(value) for name, value in row.items()} for row in rows])


def parquet_library() -> tuple[Any, Any]:
    """The library of Arrow and of Parquet; asked for before anything else, since it may not be there."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise click.UsageError("--parquet needs pyarrow: pip install 'eelgrid[parquet]', or write --csv") from None
    return pa, parquet


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], by: Sequence[str]) -> None:
    """Writes rows in columns of text and of 64-bit floats."""
    arrow, parquet = parquet_library()
    rows = flat(rows)
    names = _columns(rows, by)
    # Said, not guessed from the values, of which there may be none.
    kinds = arrow.schema([(name, arrow.string() if name in by else arrow.float64()) for name in names])
    parquet.write_table(arrow.table({name: [row[name] for row in rows] for name in names}, schema=kinds), path)


def filed(
    option: str, path: Path | None, write: Callable[..., None], document: dict[str, Any], by: Sequence[str]
) -> None:
    """Writes the groups with `write`, where a path was given; the file is whole and on the disk on return."""
    if path is None:
        return
    try:
        if is_durable(path):
            with _replacing(path.resolve()) as draft:
                write(draft, document["groups"], by)
        else:
            write(path, document["groups"], by)
    except OSError as error:
        raise click.UsageError(
            f"{option}: {path}: {error.strerror or error}; name a file that can be written"
        ) from None


def is_durable(path: Path) -> bool:
    """Whether there is, or will be, a file of that name: not a pipe nor a device, which nothing can replace."""
    return path.is_file() or not path.exists()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path beside, whose file takes the name in the end, when it is on the disk; else it goes."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
