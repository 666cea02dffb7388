"""Tables of a controller's stores on PostgreSQL, and their versions.

Owns the tables as SQLAlchemy knows them, those of the energy ledger too, whose statements are written in SQL elsewhere; `migrations` has the steps by which alembic brings a database to them, and a test
compares the two. All are logged tables: what an unlogged one holds is gone after a crash of the server. Must not know
what is in a row.
"""

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Double,
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


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _key(name: str) -> Column[int]:
    return Column(name, BigInteger, primary_key=True, autoincrement=False)


def _amount(name: str) -> Column[int]:
    """Millijoules, of which no hour has more than 2^55: sums of a few of them are 64 bits, whatever somebody wrote."""
    return Column(name, BigInteger, CheckConstraint(f"{name} BETWEEN 0 AND {2**55}"), nullable=False)


def _double(name: str) -> Column[float]:
    return Column(name, Double, nullable=False)


def _words(name: str, *, is_key: bool = False) -> Column[str]:
    """A text in the order of its bytes, so that no upgrade of the machine's locale can spoil an index."""
    return Column(name, Text(collation="C"), primary_key=is_key, nullable=False)


def _add_cells(span: str) -> None:
    """Tables of hours or of days. Rows of the current one are updated each minute, which leaves indexes alone with room."""
    parts: list[Column[Any]] = [*map(_amount, ("bare", "context", "active")), *map(_double, ("cost", "carbon"))]
    whole: list[Column[Any]] = [*map(_amount, ("total", "uncertainty")), _double("uncounted")]
    done = map(_double, ("amount", "counted", "missed"))
    columns: dict[str, tuple[Column[Any], ...]] = {
        span: (_key("place"), _key("holder"), *parts),
        f"{span}_measured": (_key("place"), *whole),
        f"{span}_work": (_key("work"), *done),
        f"{span}_check": (_key("place"), _number("many"), _number("digest")),
    }
    for name, added in columns.items():
        Table(name, metadata, _key("at"), *added, postgresql_with={"fillfactor": "80"})


def _add_names(name: str, *columns: str, others: tuple[Column[float], ...] = ()) -> Table:
    """Names with an id; `key` is a hash of them, since they may be longer than an index takes."""
    key = Column("key", Text(collation="C"), nullable=False, unique=True)
    return Table(name, metadata, _key("id"), *map(_words, columns), *others, key, _number("crc"))


# The number of the last transaction, and where the ledger went when it was moved.
ledger = Table("ledger", metadata, _only_row(), _number("revision"), _words("moved"))
for _span in ("hourly", "daily"):
    _add_cells(_span)
_add_names("places", "node", "pool", "gpu_model")
_holders = _add_names("holders", "kind", "namespace", "name", "workload", "title", "user", "queue", "labels")
Index("holders_workload", _holders.c.workload, _holders.c.id, postgresql_where=_holders.c.workload != "")
_add_names("works", "workload", "unit", others=(_double("until"),))
Table(
    "windows",
    metadata,
    _words("node", is_key=True),
    _words("incarnation"),
    _number("number"),
    _double("until"),
    _number("crc"),
)
Table("namespaces", metadata, _words("name", is_key=True), *map(_number, ("spent", "own", "shown", "crc")))
Table("hours", metadata, _key("hour"), _number("revision"))
Table("exporters", metadata, _words("name", is_key=True), _number("since"), _number("until"))
Table("changes", metadata, _words("exporter", is_key=True), _key("hour"), _number("at"))
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
