"""Output of commands: aligned columns, JSON or YAML on stdout, and progress bars on stderr.

Escapes text that came from elsewhere. Columns are plain text separated by two spaces, so that awk and grep work on them;
printing them loads no library. On a terminal that can show it, a bar stands beside shares of a whole. A list is one JSON array and a single object is one JSON object, in the plain form of the
contract; a watch prints one object per line. Lists are sorted and filtered by the texts of their columns; on a terminal
long texts are shortened so that no row wraps. Progress is a bar on a terminal and an occasional line elsewhere; work that
takes under two seconds prints nothing to a pipe. rich and yaml are imported inside the functions that need them.
"""

import json
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import click

from eelgrid_controller.cli.connection import CliSettings, UsageMismatch, add_options, change_setting
from eelgrid_controller.formatting import format_powers
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
    # The texts of all cells together, which have one unit; without it each row's own.
    texts: Callable[[Sequence[_Row]], list[str]] | None = None
    # The share that a bar beside the text shows, None for no bar.
    share: Callable[[_Row], float | None] | None = None


def power_column(
    title: str, power_w: Callable[[_Row], float | None], *, wide: bool = False, width: int = 0
) -> TableColumn[_Row]:
    """Makes a column of watts, all in the unit of the largest; a watch, which does not know it, has watts."""

    def cell(row: _Row) -> str:
        value_w = power_w(row)
        return "-" if value_w is None else f"{value_w:,.1f} W"

    return TableColumn(
        title,
        cell,
        right=True,
        wide=wide,
        width=width,
        texts=lambda rows: format_powers([power_w(row) for row in rows]),
    )


def use_colour() -> bool:
    """Returns whether stdout is a terminal whose user has not turned colour off."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def use_bars() -> bool:
    """Returns whether stdout is a terminal that shows block characters, whose user wants more than plain text."""
    return use_colour() and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


_BAR_CELLS = 6


def format_bar(share: float, cells: int = _BAR_CELLS) -> str:
    """Draws a share as a bar of so many cells, with a resolution of an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")).ljust(cells, "·")


def share_of(part: float | None, whole: float | None) -> float | None:
    """Returns the share of a whole; None where either is unknown, or there is no whole."""
    return None if part is None or not whole else part / whole


def share_colour(share: float | None) -> str | None:
    """Returns the colour of what must not exceed its whole: green, yellow from nine tenths on, red beyond."""
    return None if share is None else "red" if share > 1.0 else "yellow" if share >= 0.9 else "green"


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
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns


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


def _is_narrow(texts: Iterable[str]) -> bool:
    """Returns whether each letter of the texts takes one terminal column, as most do: then no letter is looked at."""
    return "".join(texts).isascii()


def _pad_column(texts: Sequence[str], width: int, *, right: bool) -> list[str]:
    """Shortens the texts of a column to so many terminal columns, and fills them up to as many."""
    if _is_narrow(texts):
        short = [text if len(text) <= width else shorten_text(text, width) for text in texts]
        return [text.rjust(width) for text in short] if right else [text.ljust(width) for text in short]
    short = [shorten_text(text, width) for text in texts]
    blanks = [" " * (width - display_width(text)) for text in short]
    return [blank + text if right else text + blank for text, blank in zip(short, blanks, strict=True)]


def text_table(
    columns: Sequence[TableColumn[Any]],
    rows: Sequence[Any],
    *,
    headers: bool = True,
    colour: bool = False,
    bars: bool = False,
    steady: bool = False,
    width: int | None = None,
) -> list[str]:
    """Formats the lines of a table, of at most `width` terminal columns.

    Bars are left out where a row would not fit with them. `steady` uses the columns' minimum widths, for rows that
    arrive one by one.
    """
    cells = [
        [
            escape_text(text) or "-"
            for text in (map(column.cell, rows) if steady or column.texts is None else column.texts(rows))
        ]
        for column in columns
    ]
    if bars:
        drawn = _add_bars(columns, rows, cells)
        widths = _column_widths(columns, drawn, headers=headers, steady=steady)
        if width is None or sum(widths) + _GAP * (len(widths) - 1) <= width:
            cells = drawn
    widths = _column_widths(columns, cells, headers=headers, steady=steady)
    if width is not None:
        widths = _fit_widths(columns, widths, width)
    return _join_columns(columns, rows, cells, widths, width, headers=headers, colour=colour)


def _add_bars(columns: Sequence[TableColumn[Any]], rows: Sequence[Any], cells: Sequence[list[str]]) -> list[list[str]]:
    """Returns the cells of each column with bars; in a column that has any, a cell without one gets blanks of its width."""
    found = []
    for column, texts in zip(columns, cells, strict=True):
        shares = [column.share(row) for row in rows] if column.share else []
        if all(share is None for share in shares):
            found.append(texts)
            continue
        bars = (" " * (_BAR_CELLS + 1) if share is None else f" {format_bar(share)}" for share in shares)
        found.append([text + bar for text, bar in zip(texts, bars, strict=True)])
    return found


def _column_widths(
    columns: Sequence[TableColumn[Any]], cells: Sequence[Sequence[str]], *, headers: bool, steady: bool
) -> list[int]:
    return [
        max(
            [
                column.width if steady else 0,
                len(column.title) if headers else 0,
                *map(len if _is_narrow(texts) else display_width, texts),
            ]
        )
        for column, texts in zip(columns, cells, strict=True)
    ]


def _join_columns(
    columns: Sequence[TableColumn[Any]],
    rows: Sequence[Any],
    cells: Sequence[list[str]],
    widths: Sequence[int],
    most: int | None,
    *,
    headers: bool,
    colour: bool,
) -> list[str]:
    """Joins the cells of each row, shortened to the widths of their columns and cut at `most`."""
    parts, used = [], 0
    for column, texts, width in zip(columns, cells, widths, strict=True):
        room = width if most is None else min(width, most - used)
        if room <= 0:
            break
        padded = _pad_column([column.title, *texts] if headers else texts, room, right=column.right)
        if colour and column.colour:
            tints = [None, *map(column.colour, rows)] if headers else map(column.colour, rows)
            padded = [click.style(text, fg=tint) if tint else text for text, tint in zip(padded, tints, strict=True)]
        parts.append(padded)
        used += width + _GAP
    lines = zip(*parts, strict=True) if parts else [()] * (len(rows) + headers)
    return [(" " * _GAP).join(line).rstrip() for line in lines]


def echo(line: str, *, err: bool = False, newline: bool = True) -> None:
    """Prints a line for people, with names escaped so that they cannot control the terminal."""
    click.echo(escape_text_line(line), err=err, nl=newline)


def visible_columns(settings: CliSettings, columns: Sequence[TableColumn[_Row]]) -> list[TableColumn[_Row]]:
    """Returns the columns that the chosen format shows: all with `wide`."""
    return [column for column in columns if settings.output == "wide" or not column.wide]


def table_lines(settings: CliSettings, columns: Sequence[TableColumn[_Row]], rows: Sequence[_Row]) -> list[str]:
    """Formats a table as the settings and the terminal have it."""
    return text_table(
        visible_columns(settings, columns),
        rows,
        headers=settings.headers,
        colour=use_colour(),
        bars=use_bars(),
        width=terminal_width(),
    )


_Command = TypeVar("_Command", bound=Callable[..., Any])


def list_options(*columns: TableColumn[Any]) -> Callable[[_Command], _Command]:
    """Adds --sort and --filter to a command that prints a list; shells complete the names of the columns."""
    titles = list(dict.fromkeys(column.title.casefold().replace(" ", "_") for column in columns if column.title))

    def complete_sort(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        return [title for title in titles if title.startswith(typed.casefold())]

    def complete_filter(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        return [f"{title}=" for title in titles if title.startswith(typed.casefold())]

    return add_options(
        click.option(
            "--sort",
            metavar="COLUMN",
            default=None,
            expose_value=False,
            callback=change_setting,
            shell_complete=complete_sort,
            # Shells complete a word that begins with a minus as an option: no column after it.
            help="Sort by COLUMN; with a minus before it, as in --sort=-power, the largest first.",
        ),
        click.option(
            "--filter",
            "filters",
            multiple=True,
            metavar="COLUMN=TEXT",
            expose_value=False,
            callback=change_setting,
            shell_complete=complete_filter,
            help="Only rows whose COLUMN contains TEXT; repeatable, all must hold.",
        ),
    )


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


def _has_title(column: TableColumn[Any], title: str) -> bool:
    return column.title.casefold().replace("_", " ") == title.strip().casefold().replace("_", " ")


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """What --filter and --sort say: parts that columns must contain, and the column to sort by."""

    filters: tuple[tuple[str, str], ...]
    sort: str
    descends: bool


def _read_arrangement(settings: CliSettings, tables: Sequence[Sequence[TableColumn[Any]]]) -> _Arrangement:
    """Reads --filter and --sort; raises UsageMismatch for a column that no table has."""
    columns = [column for table in tables for column in table]
    filters = []
    for text in settings.filters:
        title, equals, part = text.partition("=")
        if not equals:
            raise UsageMismatch(f"--filter {text!r} is no filter", "write COLUMN=TEXT, for example --filter user=ada")
        filters.append((title, part.casefold()))
    sort = settings.sort.removeprefix("-")
    named = [(title, "--filter") for title, _ in filters] + ([(sort, "--sort")] if settings.sort else [])
    for title, option in named:
        if not any(_has_title(column, title) for column in columns):
            known = dict.fromkeys(column.title for column in columns if column.title.strip())
            raise UsageMismatch(f"{option}: there is no column {title!r}", f"choose one of {', '.join(known)}")
    return _Arrangement(tuple(filters), sort, settings.sort.startswith("-"))


def _arrange(wanted: _Arrangement, columns: Sequence[TableColumn[_Row]], rows: Iterable[_Row]) -> list[_Row]:
    found = list(rows)
    for title, part in wanted.filters:
        column = next((one for one in columns if _has_title(one, title)), None)
        found = [row for row in found if part in column.cell(row).casefold()] if column else []
    by = next((one for one in columns if _has_title(one, wanted.sort)), None) if wanted.sort else None
    if by is not None:
        known = [row for row in found if by.cell(row) not in {"", "-"}]
        absent = [row for row in found if by.cell(row) in {"", "-"}]
        known.sort(key=lambda row: _sort_key(by.cell(row)), reverse=wanted.descends)
        found = known + absent
    return found


def arrange_rows(
    settings: CliSettings, columns: Sequence[TableColumn[_Row]], rows: Iterable[_Row], *, limit: int | None = None
) -> list[_Row]:
    """Filters and sorts rows as --filter and --sort say, then cuts them; rows without a value come last."""
    return _arrange(_read_arrangement(settings, [columns]), columns, rows)[:limit]


def arrange_tables(
    settings: CliSettings, *tables: tuple[Sequence[TableColumn[Any]], Sequence[Any]]
) -> list[tuple[Any, ...]]:
    """Does the same with several tables: one without a filter's column has no rows left, one without --sort's stays."""
    wanted = _read_arrangement(settings, [columns for columns, _ in tables])
    return [tuple(_arrange(wanted, columns, rows)) for columns, rows in tables]


def print_list(
    settings: CliSettings,
    columns: Sequence[TableColumn[_Row]],
    rows: Iterable[_Row],
    *,
    empty: str,
    limit: int | None = None,
    plain: Callable[[_Row], Any] = to_plain,
) -> None:
    """Prints a list in the chosen format, arranged; prints `empty` to stderr instead of an empty table.

    `plain` returns what a document has of a row: by default the row itself.
    """
    every = arrange_rows(settings, columns, rows, limit=limit)
    if settings.output in {"json", "yaml"}:
        print_plain(settings, [plain(row) for row in every], ())
    elif every:
        click.echo("\n".join(table_lines(settings, columns, every)))
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
