"""Which database holds a controller's journal: SQLite in a folder, or PostgreSQL, by one URL.

Owns the meaning of a URL and where each is opened. PostgreSQL's libraries are imported only for a URL of one. Must not know
what is stored.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eelgrid_controller.errors import ControllerConfigError, LibraryMissing, import_library
from eelgrid_controller.runtime.audit_log import AuditedJournal
from eelgrid_controller.runtime.sqlite_journal import FILE_NAME, hold_directory, open_journal
from eelgrid_controller.state.cluster_state import ClusterState

if TYPE_CHECKING:
    from eelgrid_controller.runtime.postgresql.standby import JournalStandby

_SQLITE = "sqlite:///"
_POSTGRESQL = ("postgresql://", "postgresql+psycopg://")


def sqlite_folder(url: str) -> Path | None:
    """Returns the folder that a URL names, sqlite:////an/absolute/path; None for PostgreSQL.

    Raises ControllerConfigError for any other URL.
    """
    if url.startswith(_POSTGRESQL):
        return None
    folder = url.removeprefix(_SQLITE)
    if folder == url or not folder or "?" in folder:
        # The URL itself may hold a password.
        raise ControllerConfigError(
            "--database names no database", f"write postgresql://USER@HOST/DATABASE, or {_SQLITE}FOLDER"
        )
    return Path(folder)


def is_filled(url: str) -> bool:
    """Returns whether a journal may be there: SQLite's file is, and a database is asked when it is opened.

    Raises ControllerConfigError.
    """
    folder = sqlite_folder(url)
    return folder is None or (folder / FILE_NAME).exists()


def open_store(
    url: str,
    data: Path,
    *,
    new_cluster_id: str,
    address: str = "",
    retained: int = 10_000,
    accepts_loss: bool = False,
    above: int = 0,
    wait_s: float | None = None,
) -> AuditedJournal:
    """Opens the journal that a URL names, an empty one for SQLite in `data`, and keeps every other controller out of it.

    PostgreSQL waits for the lease of another controller to end, for some seconds if `wait_s` does not say for how long;
    `address` is what those who find us leading are told, and the epoch will be higher than `above`. Raises ControllerConfigError and JournalError.
    """
    folder = sqlite_folder(url) if url else data
    if folder is not None:
        return open_journal(folder, new_cluster_id=new_cluster_id, retained=retained, accepts_loss=accepts_loss)
    _import_libraries()
    from eelgrid_controller.runtime.postgresql.connections import parse_url
    from eelgrid_controller.runtime.postgresql.journal import open_postgres_journal

    with contextlib.ExitStack() as held:
        # The folder has other files, of which the energy ledger is one.
        hold_directory(data, held)
        opened = open_postgres_journal(
            parse_url(url),
            new_cluster_id=new_cluster_id,
            address=address,
            retained=retained,
            above=above,
            wait_s=wait_s,
        )
        opened.on_close = held.pop_all().close
        return opened


def follow_store(
    url: str,
    data: Path,
    *,
    fresh_state: Callable[[], ClusterState],
    new_cluster_id: str,
    retained: int = 10_000,
    lease_s: float = 10.0,
) -> "JournalStandby | None":
    """Prepares to follow the journal that a URL names, and to lead; None for SQLite, whose folder has one owner.

    Raises ControllerConfigError and JournalError.
    """
    if not url or sqlite_folder(url) is not None:
        return None
    _import_libraries()
    from eelgrid_controller.runtime.postgresql.connections import parse_url
    from eelgrid_controller.runtime.postgresql.journal import prepare_candidate
    from eelgrid_controller.runtime.postgresql.leadership import LeaseTimes
    from eelgrid_controller.runtime.postgresql.standby import JournalStandby

    with contextlib.ExitStack() as held:
        hold_directory(data, held)
        candidate = prepare_candidate(
            parse_url(url), new_cluster_id=new_cluster_id, retained=retained, times=LeaseTimes.of_ttl(lease_s)
        )
        standby = JournalStandby(candidate, fresh_state)
        standby.on_close = held.pop_all().close
        return standby


def _import_libraries() -> None:
    try:
        for library in ("sqlalchemy", "psycopg", "alembic"):
            import_library(library, "--database postgresql://", "'eelgrid[postgresql]'")
    except LibraryMissing as error:
        raise ControllerConfigError(error.problem, error.remedy) from None
