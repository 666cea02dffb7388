"""Output of commands: aligned columns, JSON or YAML on stdout, and progress bars on stderr.

Escapes text that came from elsewhere. Columns are plain text separated by two spaces, so that awk and grep work on them;
printing them loads no library. A list is one JSON array and a single object is one JSON object, in the plain form of the
contract; a watch prints one object per line. Progress is a bar on a terminal and an occasional line elsewhere; work that
takes under two seconds prints nothing to a pipe. rich and yaml are imported inside the functions that need them.
"""

import json
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import click

from eelgrid_controller.cli.connection import CliSettings
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
) -> list[str]:
    """Formats the lines of a table; `steady` uses the columns' minimum widths, for rows that arrive one by one."""
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
    lines = []
    if headers:
        titles = (_pad(c.title, w, right=c.right) for c, w in zip(columns, widths, strict=True))
        lines.append("  ".join(titles).rstrip())
    for row, line in zip(rows, cells, strict=True):
        parts = []
        for column, text, width in zip(columns, line, widths, strict=True):
            padded = _pad(text, width, right=column.right)
            tint = column.colour(row) if colour and column.colour else None
            parts.append(click.style(padded, fg=tint) if tint else padded)
        lines.append("  ".join(parts).rstrip())
    return lines


def echo(line: str, *, err: bool = False) -> None:
    """Prints a line for people, with names escaped so that they cannot control the terminal."""
    click.echo(escape_text_line(line), err=err)


def visible_columns(settings: CliSettings, columns: Sequence[TableColumn[_Row]]) -> list[TableColumn[_Row]]:
    """Returns the columns that the chosen format shows: all with `wide`."""
    return [column for column in columns if settings.output == "wide" or not column.wide]


def print_list(
    settings: CliSettings, columns: Sequence[TableColumn[_Row]], rows: Iterable[_Row], *, empty: str
) -> None:
    """Prints a list in the chosen format; prints `empty` to stderr instead of an empty table."""
    every = list(rows)
    if settings.output in {"json", "yaml"}:
        print_plain(settings, [to_plain(row) for row in every], ())
    elif every:
        lines = text_table(visible_columns(settings, columns), every, headers=settings.headers, colour=use_colour())
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
