"""How a ledger of an earlier version becomes one of this version, in place and in one transaction.

Owns the steps, and what is done about rows that no ledger of this version would have taken. Must not know how rows are
written or asked.

Theory. Until format 4 a window was believed up to 10^12 J for each device, whatever its length, and sums were added
without a bound: a few such windows spoil a namespace's counter and every sum over their hours, and the next one is an
error of SQLite. Such rows go, before there are checksums that would confirm them. Days are made anew from the hours that
are left, measured totals from the entries that are left, and counters lose what went.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from eelgrid_controller.adapters.energy_checks import CHECKS_BUILT, CRC_FUNCTION, TRIGGERS, sql_crc
from eelgrid_controller.adapters.energy_tables import APPLICATION_ID, FORMAT_VERSION, SPANS, UPGRADES
from eelgrid_controller.energy_ledger.asking import DAY_S
from eelgrid_controller.energy_ledger.entries import namespace_of

__all__ = ["Healed", "add_functions", "unchecked", "upgrade"]

# Format of the first ledger with checksums.
_CHECKED = 5
# 10^12 J in an hour, or in a day, of one holder at one place: ten thousand boards at full power.
_POISON_MJ = 10**15
_AMOUNTS = ("bare", "context", "active")


class Healed(NamedTuple):
    """Rows that went, and the joules that they had."""

    rows: int = 0
    energy_j: float = 0.0


def add_functions(connection: sqlite3.Connection) -> None:
    """Gives a connection the functions that the ledger's SQL calls."""
    connection.create_function(CRC_FUNCTION, -1, sql_crc, deterministic=True)


def upgrade(connection: sqlite3.Connection, version: int) -> Healed:
    """Brings a ledger of an earlier version (0 for a new file) to this one. Raises sqlite3.Error, and changes nothing then."""
    healed = Healed()
    connection.execute("BEGIN IMMEDIATE")
    try:
        for number, script in enumerate(UPGRADES[version:], version + 1):
            if number == _CHECKED and version:
                healed = _heal(connection)
            for statement in _statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return healed


@contextmanager
def unchecked(connection: sqlite3.Connection) -> Iterator[None]:
    """Rows may be written as they are meanwhile; checksums of all rows are made anew at the end."""
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    yield
    add_functions(connection)
    for statement in _statements(CHECKS_BUILT + TRIGGERS):
        connection.execute(statement)


def _statements(script: str) -> list[str]:
    """Of a script, each whole; a trigger has semicolons within."""
    found, begun = [], ""
    for piece in script.split(";"):
        begun += piece + ";"
        if sqlite3.complete_statement(begun):
            if begun.strip(" \n;"):
                found.append(begun)
            begun = ""
    return found


def _poisoned(*columns: str) -> str:
    return " OR ".join(f"typeof({name}) <> 'integer' OR {name} > {_POISON_MJ} OR {name} < 0" for name in columns)


def _heal(connection: sqlite3.Connection) -> Healed:
    """Lets go of rows that no boards can have drawn; see the module."""
    gone_mj: Counter[tuple[int, int]] = Counter()  # by holder and day, of the days' rows
    rows, energy_j = 0, 0.0
    for table, span_s in SPANS:
        poisoned = connection.execute(
            f"SELECT at, place, holder, bare, context, active FROM {table} WHERE {_poisoned(*_AMOUNTS)}"
        ).fetchall()
        for at_s, place, holder, *amounts in poisoned:
            key = (at_s, place, holder)
            connection.execute(f"DELETE FROM {table} WHERE (at, place, holder) = (?, ?, ?)", key)
            rows += 1
            if span_s != DAY_S:
                continue
            connection.execute(
                "INSERT INTO daily SELECT ?, place, holder, sum(bare), sum(context), sum(active), sum(cost), sum(carbon) "
                "FROM hourly WHERE at >= ? AND at < ? AND place = ? AND holder = ? GROUP BY place, holder",
                (at_s, at_s, at_s + DAY_S, place, holder),
            )
            left = connection.execute(
                "SELECT bare + context + active FROM daily WHERE (at, place, holder) = (?, ?, ?)", key
            ).fetchone()
            went_mj = int(sum(one for one in amounts if isinstance(one, int | float))) - (left[0] if left else 0)
            gone_mj[holder, at_s] += went_mj
            energy_j += went_mj / 1000.0
        touched = {(at_s, place) for at_s, place, *_ in poisoned}
        touched.update(
            connection.execute(f"SELECT at, place FROM {table}_measured WHERE {_poisoned('total', 'uncertainty')}")
        )
        for cell in touched:
            ((total_mj,),) = connection.execute(
                f"SELECT coalesce(sum(bare + context + active), 0) FROM {table} WHERE (at, place) = (?, ?)", cell
            ).fetchall()
            connection.execute(
                f"UPDATE {table}_measured SET total = ?, uncertainty = "
                f"CASE WHEN {_poisoned('uncertainty')} THEN ? ELSE uncertainty END WHERE (at, place) = (?, ?)",
                (total_mj, total_mj, *cell),
            )
    _heal_counters(connection, gone_mj)
    return Healed(rows, energy_j)


def _heal_counters(connection: sqlite3.Connection, gone_mj: Counter[tuple[int, int]]) -> None:
    names = {}
    for holder, _ in gone_mj:
        found = connection.execute("SELECT kind, namespace FROM holders WHERE id = ?", (holder,)).fetchone()
        if found is not None:
            names[holder] = namespace_of(*found)
    by_name: Counter[str] = Counter()
    for (holder, _), energy_mj in gone_mj.items():
        by_name[names.get(holder, "")] += energy_mj
    for name, energy_mj in by_name.items():
        found = connection.execute("SELECT spent, own FROM namespaces WHERE name = ?", (name,)).fetchone()
        if found is not None:
            connection.execute(
                "UPDATE namespaces SET spent = ?, own = ? WHERE name = ?",
                (*(max(0, int(one) - energy_mj) for one in found), name),
            )
