"""eelctl admin: work on a controller's own files and databases, on the machine that has them; no controller is called.

Must not know how a journal is stored.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from eelgrid_controller.cli.confirmation import confirm_change, yes_option
from eelgrid_controller.cli.connection import CliError, CliSettings, NameNotFound, UsageMismatch, output_option
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
@yes_option
@output_option
@click.pass_obj
def migrate(settings: CliSettings, source: str, target: str, *, yes: bool) -> None:
    """Move a journal, with its checkpoints and its audit log, from one database to another.

    FROM and TO are URLs as of `eelgrid-controller --database`: sqlite:///FOLDER or postgresql://USER@HOST/DATABASE. TO is
    empty. Everything is copied in one transaction and read back; only if both lead to the same state, FROM is marked, so
    that no controller goes on from it. The controller must be stopped; jobs and agents are not disturbed.
    """
    # The kernels load slowly, and only this command needs them.
    from eelgrid_controller.runtime.store_migration import copy_journal, move_journal
    from eelgrid_controller.runtime.stores import is_filled, open_store

    with _translated(), contextlib.ExitStack() as stack:
        if not is_filled(source):
            raise NameNotFound(
                f"FROM: there is no journal in {source}", "name the folder of --data, as sqlite:///FOLDER"
            )
        # Locks of folders are those of --data; a database has none of its own.
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eelctl-")))
        begun = open_store(source, scratch / "source", new_cluster_id="", address="eelctl admin migrate", wait_s=0.0)
        stack.callback(begun.close)
        copy, damaged = copy_journal(begun)
        confirm_change(
            f"move {copy.last_seq:,} entries of cluster {copy.cluster_id} from {begun.path} to {target}", yes=yes
        )
        ended = open_store(
            target,
            scratch / "target",
            new_cluster_id=copy.cluster_id,
            address="eelctl admin migrate",
            above=copy.epoch,
            wait_s=0.0,
        )
        stack.callback(ended.close)
        moved = move_journal(begun, ended, copy, damaged=damaged)
    lines = (
        f"moved    cluster {moved.cluster_id} from {moved.source} to {moved.target}",
        f"entries  {moved.entries:,} up to {moved.last_seq:,}, {moved.checkpoints} checkpoints",
        f"audit    {moved.audit_entries:,} entries"
        + (f", {moved.audit_damaged:,} damaged" if moved.audit_damaged else ""),
        f"digest   {moved.digest}, the same on both sides",
        f"next     eelgrid-controller --database {moved.target}; energy ledger and settings stay in --data",
    )
    print_plain(settings, moved.as_plain(), lines)
