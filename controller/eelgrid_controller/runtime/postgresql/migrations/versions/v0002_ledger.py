"""The energy ledger."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_SCHEMA = "eelgrid"
_AMOUNT_MOST = 2**55


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _key(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)


def _amount(name: str) -> sa.Column[int]:
    within = sa.CheckConstraint(f"{name} BETWEEN 0 AND {_AMOUNT_MOST}")
    return sa.Column(name, sa.BigInteger, within, nullable=False)


def _double(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=False)


def _words(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), nullable=False)


def _word_key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), primary_key=True)


def _unique(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), nullable=False, unique=True)


def upgrade() -> None:
    """Creates the tables, and the row that is never deleted."""
    only = sa.Column("id", sa.SmallInteger, sa.CheckConstraint("id = 1"), primary_key=True, autoincrement=False)
    op.create_table("ledger", only, _number("revision"), _words("moved"), schema=_SCHEMA)
    op.execute("INSERT INTO eelgrid.ledger VALUES (1, 0, '')")
    for span in ("hourly", "daily"):
        _create_cells(span)
    _create_names("places", ("node", "pool", "gpu_model"))
    _create_names("holders", ("kind", "namespace", "name", "workload", "title", "user", "queue", "labels"))
    _create_names("works", ("workload", "unit"), _double("until"))
    filled = sa.text("workload <> ''")
    op.create_index("holders_workload", "holders", ["workload", "id"], postgresql_where=filled, schema=_SCHEMA)
    window = (_word_key("node"), _words("incarnation"), _number("number"), _double("until"), _number("crc"))
    op.create_table("windows", *window, schema=_SCHEMA)
    counters = map(_number, ("spent", "own", "shown", "crc"))
    op.create_table("namespaces", _word_key("name"), *counters, schema=_SCHEMA)
    op.create_table("hours", _key("hour"), _number("revision"), schema=_SCHEMA)
    op.create_table("exporters", _word_key("name"), _number("since"), _number("until"), schema=_SCHEMA)
    op.create_table("changes", _word_key("exporter"), _key("hour"), _number("at"), schema=_SCHEMA)


def _create_cells(span: str) -> None:
    parts: list[sa.Column[Any]] = [*map(_amount, ("bare", "context", "active")), *map(_double, ("cost", "carbon"))]
    whole: list[sa.Column[Any]] = [*map(_amount, ("total", "uncertainty")), _double("uncounted")]
    done = map(_double, ("amount", "counted", "missed"))
    columns: dict[str, tuple[sa.Column[Any], ...]] = {
        span: (_key("place"), _key("holder"), *parts),
        f"{span}_measured": (_key("place"), *whole),
        f"{span}_work": (_key("work"), *done),
        f"{span}_check": (_key("place"), _number("many"), _number("digest")),
    }
    for name, added in columns.items():
        op.create_table(name, _key("at"), *added, schema=_SCHEMA, postgresql_with={"fillfactor": "80"})


def _create_names(name: str, columns: tuple[str, ...], *others: sa.Column[float]) -> None:
    op.create_table(name, _key("id"), *map(_words, columns), *others, _unique("key"), _number("crc"), schema=_SCHEMA)
