"""Output of commands: aligned columns, JSON or YAML on stdout, and progress bars on stderr.

Escapes text that came from elsewhere. Columns are plain text separated by two spaces, so that awk and grep work on them;
printing them loads no library. A list is one JSON array and a single object is one JSON object, in the plain form of the
contract; a watch prints one object per line. Lists are sorted and filtered by the texts of their columns; on a terminal
long texts are shortened so that no row wraps. Progress is a bar on a terminal and an occasional line elsewhere; work that
takes under two seconds prints nothing to a pipe. rich and yaml are imported inside the functions that need them.
"""

import json
import os
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import click

from eelgrid_controller.cli.connection import CliSettings, UsageMismatch, change_setting
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.safe_text import escape_json, escape_text, escape_text_line

_LINE_EVERY_S = 2.0


class ProgressBar:
    """Shows progress from its construction on; `verb` names the activity, `done_verb` the result."""

    def __init__(self, verb: str, done_verb: str, total: int) -> None:
        self._live: Any = None
        self._done_verb, self._total = done_verb, total
        self._printed_s = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._live = Bar(
                TextColumn(verb),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR"))),
            )
            self._task = self._live.add_task(verb, total=total, note="")
            self._live.start()

    def __call__(self, done: int, note: str = "") -> None:
        """Reports that `done` of the total are done."""
        if self._live:
            self._live.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._printed_s >= _LINE_EVERY_S:
            self._printed_s = time.monotonic()
            click.echo(f"{done}/{self._total} {self._done_verb}{note and ', '}{note}", err=True)

    def stop(self) -> None:
        """Ends the bar and restores the terminal."""
        if self._live:
            self._live.stop()


_Row = TypeVar("_Row")


# Without slots: Column[Row](...) of a frozen class with them fails on Python 3.11, where typing notes the Row on it.
@dataclass(frozen=True)
class TableColumn(Generic[_Row]):
    """One column: its title, the text of a cell, and whether it is shown only with `-o wide`."""

    title: str
    cell: Callable[[_Row], str]
    right: bool = False
    wide: bool = False
    colour: Callable[[_Row], str | None] | None = None
    # Minimum width, for a watch, which prints rows before it knows the widest.
    width: int = 0


def use_colour() -> bool:
    """Returns whether stdout is a terminal whose user has not turned colour off."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def display_width(text: str) -> int:
    """Counts the terminal columns of a text: East Asian wide characters take two, combining characters none (UAX 11)."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.category(letter) in {"Mn", "Me", "Cf"}
        else 2
        if unicodedata.east_asian_width(letter) in "WF"
        else 1
        for letter in text
    )


def terminal_width() -> int | None:
    """Returns the columns of the terminal, None if stdout is none: a file or a pipe takes any width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def shorten_text(text: str, width: int) -> str:
    """Cuts a text to so many terminal columns; an ellipsis stands for what is cut."""
    if display_width(text) <= width:
        return text
    kept = ""
    for letter in text:
        if display_width(kept + letter) > width - 1:
            break
        kept += letter
    return f"{kept}…" if width else ""


# A column of text is not shortened below this, except where the table does not fit otherwise.
_TEXT_LEAST = 8
_GAP = 2


def _fit_widths(columns: Sequence[TableColumn[Any]], widths: list[int], width: int) -> list[int]:
    """Narrows the widest columns of text, not numbers, until a row fits; what still does not fit is cut at the end."""
    found = list(widths)
    texts = [index for index, column in enumerate(columns) if not column.right]
    over = sum(found) + _GAP * (len(found) - 1) - width
    while over > 0 and texts:
        widest = max(texts, key=lambda index: found[index])
        if found[widest] <= _TEXT_LEAST:
            break
        found[widest] -= 1
        over -= 1
    return found


def _pad(text: str, width: int, *, right: bool) -> str:
    blanks = " " * (width - display_width(text))
    return blanks + text if right else text + blanks


def text_table(
    columns: Sequence[TableColumn[Any]],
    rows: Sequence[Any],
    *,
    headers: bool = True,
    colour: bool = False,
    steady: bool = False,
    width: int | None = None,
) -> list[str]:
    """Formats the lines of a table, of at most `width` terminal columns.

    `steady` uses the columns' minimum widths, for rows that arrive one by one.
    """
    cells = [[escape_text(column.cell(row)) or "-" for column in columns] for row in rows]
    widths = [
        max(
            [
                column.width if steady else 0,
                len(column.title) if headers else 0,
                *(display_width(line[index]) for line in cells),
            ]
        )
        for index, column in enumerate(columns)
    ]
    if width is not None:
        widths = _fit_widths(columns, widths, width)
    lines = []
    if headers:
        lines.append(_join_cells(columns, [column.title for column in columns], widths, width, None))
    for row, line in zip(rows, cells, strict=True):
        tints = [column.colour(row) if colour and column.colour else None for column in columns]
        lines.append(_join_cells(columns, line, widths, width, tints))
    return lines


def _join_cells(
    columns: Sequence[TableColumn[Any]],
    texts: Sequence[str],
    widths: Sequence[int],
    most: int | None,
    tints: Sequence[str | None] | None,
) -> str:
    """Joins the cells of one row, shortened to the widths of their columns and cut at `most`."""
    parts, used = [], 0
    for index, (column, text, width) in enumerate(zip(columns, texts, widths, strict=True)):
        room = width if most is None else min(width, most - used)
        if room <= 0:
            break
        padded = _pad(shorten_text(text, room), room, right=column.right)
        tint = tints[index] if tints else None
        parts.append(click.style(padded, fg=tint) if tint else padded)
        used += width + _GAP
    return (" " * _GAP).join(parts).rstrip()


def echo(line: str, *, err: bool = False) -> None:
    """Prints a line for people, with names escaped so that they cannot control the terminal."""
    click.echo(escape_text_line(line), err=err)


def visible_columns(settings: CliSettings, columns: Sequence[TableColumn[_Row]]) -> list[TableColumn[_Row]]:
    """Returns the columns that the chosen format shows: all with `wide`."""
    return [column for column in columns if settings.output == "wide" or not column.wide]


_Command = TypeVar("_Command", bound=Callable[..., Any])


def list_options(command: _Command) -> _Command:
    """Adds --sort and --filter to a command that prints a list."""
    for option in (
        click.option(
            "--filter",
            "filters",
            multiple=True,
            metavar="COLUMN=TEXT",
            expose_value=False,
            callback=change_setting,
            help="Only rows whose COLUMN contains TEXT; repeatable, all must hold.",
        ),
        click.option(
            "--sort",
            metavar="COLUMN",
            default=None,
            expose_value=False,
            callback=change_setting,
            help="Sort by COLUMN; with a minus before it, the largest first.",
        ),
    ):
        command = option(command)
    return command


_AMOUNT = re.compile(r"([+-]?\d[\d,]*(?:\.\d+)?)\s*([^\s\d/]*)(?:/.*)?")
_UNITS: dict[str, float] = {
    "": 1.0,
    "%": 1.0,
    "W": 1.0,
    "kW": 1e3,
    "MW": 1e6,
    "J": 1.0,
    "kJ": 1e3,
    "kWh": 3.6e6,
    "MWh": 3.6e9,
    "°C": 1.0,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
    "B": 1.0,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}


def _sort_key(text: str) -> tuple[int, float, list[str | int]]:
    """Orders amounts by their value and unit before texts, and the numbers in texts by value: node-2 before node-10."""
    amount = _AMOUNT.fullmatch(text)
    if amount and amount[2] in _UNITS:
        return 0, float(amount[1].replace(",", "")) * _UNITS[amount[2]], []
    return 1, 0.0, [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text.casefold())]


def _find_column(columns: Sequence[TableColumn[_Row]], title: str, option: str) -> TableColumn[_Row]:
    wanted = title.strip().casefold().replace("_", " ")
    for column in columns:
        if column.title.casefold() == wanted:
            return column
    raise UsageMismatch(
        f"{option}: there is no column {title!r}", f"choose one of {', '.join(column.title for column in columns)}"
    )


def arrange_rows(
    settings: CliSettings, columns: Sequence[TableColumn[_Row]], rows: Iterable[_Row], *, limit: int | None = None
) -> list[_Row]:
    """Filters and sorts rows as --filter and --sort say, then cuts them; rows without a value come last."""
    wanted = []
    for text in settings.filters:
        title, equals, part = text.partition("=")
        if not equals:
            raise UsageMismatch(f"--filter {text!r} is no filter", "write COLUMN=TEXT, for example --filter user=ada")
        wanted.append((_find_column(columns, title, "--filter"), part.casefold()))
    found = [row for row in rows if all(part in column.cell(row).casefold() for column, part in wanted)]
    if settings.sort:
        column = _find_column(columns, settings.sort.removeprefix("-"), "--sort")
        known = [row for row in found if column.cell(row) not in {"", "-"}]
        absent = [row for row in found if column.cell(row) in {"", "-"}]
        known.sort(key=lambda row: _sort_key(column.cell(row)), reverse=settings.sort.startswith("-"))
        found = known + absent
    return found[:limit]


def print_list(
    settings: CliSettings,
    columns: Sequence[TableColumn[_Row]],
    rows: Iterable[_Row],
    *,
    empty: str,
    limit: int | None = None,
) -> None:
    """Prints a list in the chosen format, arranged; prints `empty` to stderr instead of an empty table."""
    every = arrange_rows(settings, columns, rows, limit=limit)
    if settings.output in {"json", "yaml"}:
        print_plain(settings, [to_plain(row) for row in every], ())
    elif every:
        shown = visible_columns(settings, columns)
        lines = text_table(shown, every, headers=settings.headers, colour=use_colour(), width=terminal_width())
        click.echo("\n".join(lines))
    else:
        click.echo(empty, err=True)


def print_document(settings: CliSettings, thing: object, lines: Iterable[str]) -> None:
    """Prints one message: its plain form, or the lines for people."""
    if settings.output in {"json", "yaml"}:
        print_plain(settings, to_plain(thing), ())
    else:
        print_plain(settings, None, lines)


def print_plain(settings: CliSettings, plain: Any, lines: Iterable[str]) -> None:
    """Prints plain values, or the lines for people."""
    if settings.output == "json":
        click.echo(escape_json(json.dumps(plain, indent=2, ensure_ascii=False)))
    elif settings.output == "yaml":
        _yaml(plain)
    else:
        for line in lines:
            echo(line)


def print_stream(settings: CliSettings, columns: Sequence[TableColumn[_Row]], rows: Iterable[_Row]) -> None:
    """Prints messages as they arrive, each on its own line."""
    shown, headers = visible_columns(settings, columns), settings.headers
    for row in rows:
        if settings.output == "json":
            click.echo(escape_json(json.dumps(to_plain(row), ensure_ascii=False)))
        elif settings.output == "yaml":
            click.echo("---")
            _yaml(to_plain(row))
        else:
            for line in text_table(shown, [row], colour=use_colour(), steady=True)[0 if headers else 1 :]:
                click.echo(line)
            headers = False


def _yaml(plain: Any) -> None:
    import yaml

    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    if escape_text_line(text) != text:
        # Quoted and escaped by the library, so that it is still the same document.
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=False)
    click.echo(text, nl=False)
