"""The settings that every command shares, and the options that set them.

Owns the global options' values; knows nothing of calls. `-o` and `--no-headers`
are taken before and after the command's name, since people type both.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

DEFAULT_CONTROLLER = "127.0.0.1:7443"
OUTPUTS = ("table", "wide", "json", "yaml")

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class CliSettings:
    """How to reach the controller and how to print."""

    controller: str = DEFAULT_CONTROLLER
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_authority: Path | None = None
    insecure: bool = False
    timeout_s: float = 10.0
    output: str = "table"
    headers: bool = True
    # Where people see the live page; empty where nobody said.
    page: str = ""


def _change(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None and parameter.name is not None:
        context.obj = replace(context.obj, **{parameter.name: value})


def output_option(command: _Command) -> _Command:
    """Adds -o and --no-headers to a command that prints what it read."""
    for option in (
        click.option(
            "--no-headers",
            "headers",
            flag_value=False,
            default=None,
            type=bool,
            expose_value=False,
            callback=_change,
            help="Leave out the line of titles.",
        ),
        click.option(
            "-o",
            "--output",
            type=click.Choice(OUTPUTS),
            default=None,
            expose_value=False,
            callback=_change,
            help="How to print.",
        ),
    ):
        command = option(command)
    return command
