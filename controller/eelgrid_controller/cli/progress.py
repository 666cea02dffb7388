"""Progress of long work on stderr: a bar on a terminal, a line now and then where there is none.

Owns how it looks. Must not know what the work is. Work of under two seconds shows nothing in a pipe.
"""

import os
import sys
import time
from typing import Any

import click

__all__ = ["Progress"]

_LINE_EVERY_S = 2.0


class Progress:
    """Begins when it is made; `verb` is what is being done."""

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
        """So much of the total is done."""
        if self._live:
            self._live.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._printed_s >= _LINE_EVERY_S:
            self._printed_s = time.monotonic()
            click.echo(f"{done}/{self._total} {self._done_verb}{note and ', '}{note}", err=True)

    def stop(self) -> None:
        """Leaves the terminal as it was."""
        if self._live:
            self._live.stop()
