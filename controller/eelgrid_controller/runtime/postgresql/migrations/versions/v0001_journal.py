"""Leadership, journal, checkpoints and audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SCHEMA = "eelgrid"


def _only_row() -> sa.Column[int]:
    return sa.Column("id", sa.SmallInteger, sa.CheckConstraint("id = 1"), primary_key=True, autoincrement=False)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _key(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)


def _words(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def upgrade() -> None:
    """Creates the tables, and the two rows that are never deleted."""
    op.create_table("meta", sa.Column("key", sa.Text, primary_key=True), _words("value"), schema=_SCHEMA)
    op.create_table(
        "term",
        _only_row(),
        _number("epoch"),
        _words("holder"),
        _words("address"),
        sa.Column("timeline", sa.Integer, nullable=False),
        schema=_SCHEMA,
    )
    op.create_table(
        "lease",
        _only_row(),
        _number("epoch"),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        schema=_SCHEMA,
    )
    op.execute("INSERT INTO eelgrid.term VALUES (1, 0, '', '', 0)")
    op.execute("INSERT INTO eelgrid.lease VALUES (1, 0, '-infinity')")
    op.create_table(
        "journal", _key("seq"), _number("epoch"), _words("kind"), _words("body"), _number("crc32"), schema=_SCHEMA
    )
    op.create_table(
        "checkpoints",
        _key("seq"),
        _number("epoch"),
        sa.Column("body", sa.LargeBinary, nullable=False),
        _words("digest"),
        _number("crc32"),
        schema=_SCHEMA,
    )
    op.create_table(
        "audit",
        _key("number"),
        _number("time_ns"),
        _words("user_name"),
        _words("call"),
        sa.Column("denied", sa.SmallInteger, nullable=False),
        _words("body"),
        _number("crc32"),
        schema=_SCHEMA,
    )
    op.create_index("audit_time", "audit", ["time_ns"], schema=_SCHEMA)
