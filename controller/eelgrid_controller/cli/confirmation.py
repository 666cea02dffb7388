"""The question before a change that ends running work or changes several things at once.

On a terminal the command asks on stderr; without one it is refused unless --yes is given, since nobody can answer. Must
not know what is changed.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from eelgrid_controller.cli.connection import RequestRefused
from eelgrid_controller.cli.output import echo

_NAMES_SHOWN = 5

_Command = TypeVar("_Command", bound=Callable[..., Any])


def yes_option(command: _Command) -> _Command:
    """Adds --yes to a command that asks before it changes something."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask; needed without a terminal.")(command)


def is_interactive() -> bool:
    """Returns whether somebody can be asked."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def list_names(names: Sequence[str]) -> str:
    """Joins names, the first few in full: `a, b, c, d, e and 7 more`."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def confirm_change(
    what: str, *, yes: bool, effects: Sequence[str] = (), remedy: str = "look before you answer y"
) -> None:
    """Asks `<what>? [y/N]` after a line for each effect; raises RequestRefused where the answer is not yes."""
    if yes:
        return
    if not is_interactive():
        raise RequestRefused(
            f"{what} needs a confirmation, and there is no terminal to ask on; nothing was changed"
            + "".join(f"; {effect}" for effect in effects),
            "add --yes",
        )
    for effect in effects:
        echo(effect, err=True)
    echo(f"{what}? [y/N] ", err=True, newline=False)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise RequestRefused("not confirmed; nothing was changed", remedy)
