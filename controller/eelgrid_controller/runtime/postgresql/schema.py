"""Tables of a controller's stores on PostgreSQL, and their versions.

Owns the tables as SQLAlchemy knows them; `migrations` has the steps by which alembic brings a database to them, and a test
compares the two. All are logged tables: what an unlogged one holds is gone after a crash of the server. Must not know
what is in a row.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.exc import IntegrityError, ProgrammingError

from eelgrid_controller.errors import JournalTooNew
from eelgrid_controller.runtime.postgresql.connections import SCHEMA, lengthen_statements

metadata = MetaData(schema=SCHEMA)


def _only_row() -> Column[int]:
    """The key of a table of one row, which is never deleted: a counter that begins anew would fence nobody."""
    return Column("id", SmallInteger, CheckConstraint("id = 1"), primary_key=True, autoincrement=False)


meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))
# Who leads; every write of the leader holds this row. Apart from the lease, so that renewals never wait for writers.
term = Table(
    "term",
    metadata,
    _only_row(),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("address", Text, nullable=False),
    # Of the server's log when the term began: rises when a standby is promoted.
    Column("timeline", Integer, nullable=False),
)
# Until when nobody else may try; by the server's clock.
lease = Table(
    "lease",
    metadata,
    _only_row(),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
)
# Numbered by the writer, not by a sequence: those leave gaps, and commit out of order.
journal = Table(
    "journal",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("crc32", BigInteger, nullable=False),
)
checkpoints = Table(
    "checkpoints",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("digest", Text, nullable=False),
    Column("crc32", BigInteger, nullable=False),
)
audit = Table(
    "audit",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("time_ns", BigInteger, nullable=False),
    Column("user_name", Text, nullable=False),
    Column("call", Text, nullable=False),
    Column("denied", SmallInteger, nullable=False),
    Column("body", Text, nullable=False),
    Column("crc32", BigInteger, nullable=False),
    Index("audit_time", "time_ns"),
)
# A second process that creates the same tables at the same moment is waited for, and then there is nothing to do.
_ATTEMPTS = 3
_MIGRATIONS = Path(__file__).parent / "migrations"


def upgrade_schema(engine: Engine, location: str) -> None:
    """Brings the database to this version; a new one gets all tables. Raises JournalTooNew and SQLAlchemyError."""
    for attempt in range(_ATTEMPTS):
        try:
            _upgrade(engine, location)
        except (ProgrammingError, IntegrityError):
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def _upgrade(engine: Engine, location: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    with engine.begin() as connection:
        current = MigrationContext.configure(connection, opts={"version_table_schema": SCHEMA}).get_current_revision()
        if current == scripts.get_current_head():
            return
        if current is not None and current not in {one.revision for one in scripts.walk_revisions()}:
            raise JournalTooNew(
                location,
                f"its schema is version {current}, this controller knows up to {scripts.get_current_head()}",
                "run the version that wrote it, or a newer one",
            )
        lengthen_statements(connection)
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
