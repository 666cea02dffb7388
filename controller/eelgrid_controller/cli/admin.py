"""eelctl admin: work on a controller's own files and databases, on the machine that has them; no controller is called.

Must not know how a journal is stored.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from eelgrid_controller.cli.confirmation import yes_option
from eelgrid_controller.cli.connection import CliError, CliSettings, UsageMismatch, output_option
from eelgrid_controller.cli.output import print_plain
from eelgrid_controller.errors import ControllerConfigError, ControllerError


@click.group()
def admin() -> None:
    """Work on a controller's own databases; no controller may run on them."""


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ControllerConfigError as error:
        raise UsageMismatch(error.problem.replace("--database", "the URL"), error.remedy) from error
    except ControllerError as error:
        raise CliError(error.problem, error.remedy) from error


def _check_url(_context: click.Context, parameter: click.Parameter, url: str) -> str:
    """Refuses what names no database, without repeating it: it may hold a password."""
    from eelgrid_controller.runtime.stores import sqlite_folder

    try:
        sqlite_folder(url)
    except ControllerConfigError as error:
        problem = f"{parameter.metavar} is no URL of a database"
        raise click.BadParameter(f"{problem}; {error.remedy}", param_hint=f"'{parameter.metavar}'") from error
    return url


@admin.command()
@click.argument("source", metavar="FROM", callback=_check_url)
@click.argument("target", metavar="TO", callback=_check_url)
@click.option(
    "--ledger-only",
    is_flag=True,
    help="Move the energy ledger alone, to where the journal went before.",
)
@yes_option
@output_option
@click.pass_obj
def migrate(settings: CliSettings, source: str, target: str, *, ledger_only: bool, yes: bool) -> None:
    """Move a journal, with its checkpoints and its audit log, and the energy ledger from one database to another.

    FROM and TO are URLs as of `eelgrid-controller --database`: sqlite:///FOLDER or postgresql://USER@HOST/DATABASE. TO is
    empty. Each is copied in one transaction and read back; only if both hold the same, FROM is marked, so that no
    controller goes on from it. The controller must be stopped; jobs and agents are not disturbed.
    """
    # The kernels load slowly, and only this command needs them.
    from eelgrid_controller.cli.store_moves import StoreMove

    with _translated(), contextlib.ExitStack() as stack:
        # Locks of folders are those of --data; a database has none of its own.
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eelctl-")))
        move = StoreMove(source, target, scratch, stack)
        moved = move.move_ledger_alone(yes=yes) if ledger_only else move.move_all(yes=yes)
    print_plain(settings, moved.as_plain(), moved.lines)
