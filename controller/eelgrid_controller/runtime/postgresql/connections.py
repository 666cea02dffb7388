"""How PostgreSQL is reached: addresses, time limits, keep-alives, and what its errors mean.

Owns the settings of every connection. A server that has vanished is noticed within seconds, and each statement ends at a
limit, because whoever waits here holds up a scheduler. Must not know tables, or who leads.

A connection through a pooler that gives each transaction another backend (PgBouncer's transaction mode) would lose the
session's limits without a word, so the first connection checks that they hold.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from eelgrid_controller.errors import ControllerConfigError

SCHEMA = "eelgrid"
# By which a server's list of connections names ours.
APPLICATION = "eelgrid-controller"
# A commit on a healthy server takes milliseconds; this bounds one that waits for a lock or a standby.
STATEMENT_S = 5.0
LOCK_S = 3.0
# For what reads or writes a whole state.
LONG_STATEMENT_S = 120.0
# libpq's: a server that does not answer is given up after about ten seconds, not after hours.
_CONNECTION_SETTINGS = {
    "application_name": APPLICATION,
    "client_encoding": "utf8",
    "connect_timeout": 3,
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    # Of several hosts in the URL, the one that takes writes.
    "target_session_attrs": "read-write",
}
_CONNECTIONS_MOST = 4
_UNREPLICATED = "synchronous replication"


class FaultKind(Enum):
    """What went wrong, as far as anybody can do something about it."""

    LOST = "the connection broke or could not be made"
    FULL = "there is no room"
    CORRUPT = "stored data is damaged"
    CONFLICT = "somebody else wrote the same row"
    OTHER = "the server refused"


@dataclass(frozen=True, slots=True)
class DatabaseFault:
    """An error of a database, with what to do about it."""

    kind: FaultKind
    problem: str
    remedy: str


class UnreplicatedCommit(Exception):
    """A commit was confirmed by the server, but its synchronous standby does not have it."""


# By SQLSTATE, or its class of two characters: https://www.postgresql.org/docs/current/errcodes-appendix.html
_FAULTS = {
    "08": (FaultKind.LOST, "check that the server runs and can be reached; work resumes by itself"),
    "57P": (FaultKind.LOST, "check that the server runs and can be reached; work resumes by itself"),
    "23505": (FaultKind.CONFLICT, "stop whatever else writes to this database"),
    "25006": (FaultKind.OTHER, "the server takes no writes: name its primary, or all hosts, in the URL"),
    "28": (FaultKind.OTHER, "check user and password (PGPASSFILE) and the server's pg_hba.conf"),
    "3D000": (FaultKind.OTHER, "create the database, owned by this user"),
    "42501": (FaultKind.OTHER, f"let this user own the database, or grant it all rights on schema {SCHEMA}"),
    "42P01": (FaultKind.CORRUPT, "tables are missing: restore a backup"),
    "53100": (FaultKind.FULL, "free space on the server's disk; work resumes by itself"),
    "53300": (FaultKind.LOST, "raise the server's max_connections"),
    "55P03": (FaultKind.OTHER, "something holds a lock for long: look at pg_locks"),
    "57014": (FaultKind.OTHER, "the server is slow: check its load and its disk"),
    "XX001": (FaultKind.CORRUPT, "restore a backup; the server's log says more"),
    "XX002": (FaultKind.CORRUPT, "rebuild the server's indexes (REINDEX), or restore a backup"),
}


# What refuses a connection has no SQLSTATE in libpq, only words; of servers that speak English.
_REFUSALS = {
    "session is read-only": "25006",
    "authentication failed": "28",
    "no pg_hba.conf entry": "28",
    "does not exist": "3D000",
}


def describe_fault(error: BaseException) -> DatabaseFault:
    """Says what an error means. A statement without a server's answer counts as a lost connection."""
    if isinstance(error, PoolExhausted):
        return DatabaseFault(FaultKind.OTHER, "all connections are busy", "the server is slow: check its load")
    if isinstance(error, UnreplicatedCommit):
        return DatabaseFault(
            FaultKind.OTHER, str(error), "check the standby; synchronous_standby_names names who must have a commit"
        )
    cause = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(cause, "sqlstate", None) or ""
    problem = " ".join(str(cause).split())[:300] or type(cause).__name__
    if "startup parameter" in problem:
        return DatabaseFault(
            FaultKind.OTHER, problem, "connect to the server itself, or to a pooler in session mode that passes options"
        )
    for prefix in (state, state[:3], state[:2]):
        if prefix in _FAULTS:
            kind, remedy = _FAULTS[prefix]
            return DatabaseFault(kind, problem, remedy)
    refusal = next((state for words, state in _REFUSALS.items() if words in problem), "08")
    is_lost = not state or (isinstance(error, DBAPIError) and error.connection_invalidated)
    if is_lost:
        return DatabaseFault(FaultKind.LOST, problem, _FAULTS[refusal][1])
    return DatabaseFault(FaultKind.OTHER, problem, "the server's log says more")


def parse_url(url: str) -> URL:
    """Parses the URL of a PostgreSQL database; raises ControllerConfigError."""
    try:
        found = make_url(url)
    except ArgumentError:
        raise ControllerConfigError(
            "--database is no URL", "write postgresql://USER@HOST/DATABASE; a password belongs into PGPASSFILE"
        ) from None
    if found.drivername not in {"postgresql", "postgresql+psycopg"}:
        raise ControllerConfigError(
            f"--database begins with {found.drivername}://", "write postgresql://USER@HOST/DATABASE"
        )
    return found.set(drivername="postgresql+psycopg")


def locate(url: URL) -> str:
    """Returns the address for messages: without password and settings."""
    hosts = url.query.get("host", ())
    named = URL.create(
        "postgresql", url.username, None, url.host, url.port, url.database, {"host": hosts} if hosts else {}
    )
    address: str = named.render_as_string()
    return address


def make_engine(
    url: URL,
    *,
    statement_s: float = STATEMENT_S,
    connections_most: int = _CONNECTIONS_MOST,
    is_local: bool = False,
    is_autocommit: bool = False,
    search_path: str = "",
) -> Engine:
    """Makes an engine whose every connection has our limits; connects to nothing yet. What the URL sets wins.

    Commits that are `is_local` wait for no standby. With `is_autocommit` each statement is a transaction: a process that
    is stopped after it holds no lock. `search_path` is the schema of tables that are named without one.
    """
    given = dict(url.query)
    limits = {
        "statement_timeout": f"{int(statement_s * 1000)}ms",
        "lock_timeout": f"{int(min(LOCK_S, statement_s) * 1000)}ms",
        # A process that was stopped within a transaction must not hold its locks for ever.
        "idle_in_transaction_session_timeout": f"{int(statement_s * 1000)}ms",
        "default_transaction_isolation": "read\\ committed",
        "timezone": "UTC",
    }
    if is_local:
        limits["synchronous_commit"] = "local"
    if search_path:
        limits["search_path"] = search_path
    options = " ".join(f"-c {name}={value}" for name, value in limits.items())
    settings: dict[str, Any] = {name: value for name, value in _CONNECTION_SETTINGS.items() if name not in given}
    settings["options"] = f"{given['options']} {options}" if "options" in given else options
    engine = create_engine(
        url.difference_update_query(("options",)),
        connect_args=settings,
        pool_size=connections_most,
        max_overflow=0,
        pool_timeout=statement_s,
        pool_pre_ping=True,
        **({"isolation_level": "AUTOCOMMIT"} if is_autocommit else {}),
    )
    event.listen(engine, "connect", _watch_notices)
    return engine


def _watch_notices(connection: Any, _record: Any) -> None:
    """Remembers a commit that the server gave up replicating, which it reports as a warning only."""
    unreplicated: list[str] = []

    def on_notice(notice: Any) -> None:
        if _UNREPLICATED in (notice.message_primary or ""):
            unreplicated.append(notice.message_primary)

    connection.add_notice_handler(on_notice)
    connection.eelgrid_unreplicated = unreplicated


@contextmanager
def begin_bounded(connection: Connection, *, seconds: float = STATEMENT_S) -> Iterator[None]:
    """A transaction whose commit does not wait for its synchronous standby for longer than that.

    The server's statement_timeout does not cover this wait, so it is ended by a request to cancel it; the server then
    reports the commit as done, with a warning. Raises SQLAlchemyError, and UnreplicatedCommit after the commit.
    """
    driver: Any = connection.connection.dbapi_connection
    guard = threading.Timer(seconds, _cancel, (driver,))
    guard.daemon = True
    try:
        with connection.begin():
            yield
            guard.start()
    finally:
        guard.cancel()
    found: list[str] = driver.eelgrid_unreplicated
    if found:
        found.clear()
        raise UnreplicatedCommit("the commit waited too long for its synchronous standby")


def _cancel(driver: Any) -> None:
    # Where even this cannot be sent, keep-alives end the connection.
    with suppress(Exception):
        driver.cancel_safe(timeout=LOCK_S)


def check_session(connection: Connection, *, statement_s: float = STATEMENT_S) -> None:
    """Checks that the session has our limits and can hold any text; raises ControllerConfigError."""
    limit, encoding = connection.execute(
        text(
            "SELECT extract(epoch FROM current_setting('statement_timeout')::interval), current_setting('server_encoding')"
        )
    ).one()
    if float(limit) != statement_s:
        raise ControllerConfigError(
            "--database leads to a pooler that drops the settings of a session",
            "connect to the server itself, or to a pooler in session mode that passes options",
        )
    if encoding != "UTF8":
        raise ControllerConfigError(
            f"--database has the encoding {encoding}", "create it with: createdb --encoding UTF8 --template template0"
        )


def lengthen_statements(connection: Connection, seconds: float = LONG_STATEMENT_S) -> None:
    """Gives the statements of this transaction more time."""
    connection.execute(text(f"SET LOCAL statement_timeout = {int(seconds * 1000)}"))


@contextmanager
def read_snapshot(engine: Engine) -> Iterator[Connection]:
    """A read-only transaction that sees one moment, with time for long reads. Raises SQLAlchemyError."""
    with engine.connect() as plain:
        connection = plain.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        with connection.begin():
            lengthen_statements(connection)
            yield connection


def discard(connection: Connection) -> None:
    """Closes a connection whose server may still be at work for it, without giving it back."""
    with suppress(SQLAlchemyError):
        connection.invalidate()
        connection.close()
