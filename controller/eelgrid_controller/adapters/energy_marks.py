"""Marks of exporters beside the ledger's rows: revisions, hours that changed, and who has what.

Owns the tables of marks. Must not know the rows; transactions are the store's (`energy_store.py`).

Theory. Each transaction has a number, the revision, and each hour that of the last one that touched it. So what an
exporter confirms can be compared with what the hours were when he read them. Hours that change below a mark are listed
for each exporter, and a row of theirs stays until they are confirmed anew. Eight exporters and the hours of five years
bound the tables.
"""

import sqlite3
from collections.abc import Collection, Mapping

from eelgrid_controller.energy_ledger.exporting import Changed, Export, Exporter, marked, settled_s
from eelgrid_protos.faults import NotFound

__all__ = ["Marks"]


class Marks:
    """Of one ledger; every method that changes something is called within a transaction of `connection`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        # As of the last `read`; replaced whole, so that another thread may look at it.
        self.exporters: Mapping[str, Exporter] = {}
        self.revision = 0  # of the last transaction, also of one that is not committed yet
        self.read()

    def read(self) -> None:
        """Take up what is on the disk."""
        ((self.revision,),) = self._connection.execute("SELECT revision FROM ledger").fetchall()
        rows = self._connection.execute(
            "SELECT e.name, e.since, e.until, count(c.hour), min(c.hour), max(c.hour), min(c.at) FROM exporters e "
            "LEFT JOIN changes c ON c.exporter = e.name GROUP BY e.name"
        )
        self.exporters = {
            name: Exporter(name, since_s, until_s, Changed(hours, *changed) if hours else None)
            for name, since_s, until_s, hours, *changed in rows
        }

    def touched(self, hours: Collection[int], *, now_s: int) -> bool:
        """A transaction adds to these hours; whether any exporter had one of them."""
        connection = self._connection
        ((revision,),) = connection.execute("UPDATE ledger SET revision = revision + 1 RETURNING revision").fetchall()
        self.revision = revision
        connection.executemany(
            "INSERT INTO hours VALUES (?, ?) ON CONFLICT DO UPDATE SET revision = excluded.revision",
            [(hour, revision) for hour in hours],
        )
        stale = [
            (one.name, hour, now_s)
            for one in self.exporters.values()
            for hour in hours
            if one.since_s <= hour < one.until_s
        ]
        connection.executemany("INSERT INTO changes VALUES (?, ?, ?) ON CONFLICT DO NOTHING", stale)
        return bool(stale)

    def confirm(self, export: Export, *, now_s: int) -> None:
        """Moves a mark; raises FailedPrecondition and ResourceExhausted."""
        connection = self._connection
        ((revision,),) = connection.execute("SELECT revision FROM ledger").fetchall()
        ends_s = [until_s for (until_s,) in connection.execute("SELECT until FROM windows")]
        after = marked(
            self.exporters.get(export.name), export, settled_s=settled_s(ends_s, now_s), revision=revision,
            others=len(self.exporters),
        )  # fmt: skip
        connection.execute(
            "INSERT INTO exporters VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET since = excluded.since, "
            "until = excluded.until",
            (after.name, after.since_s, after.until_s),
        )
        span = (export.name, export.begin_s, export.end_s)
        connection.execute(
            "DELETE FROM changes WHERE exporter = ? AND hour >= ? AND hour < ? AND hour NOT IN "
            "(SELECT hour FROM hours WHERE revision > ?)",
            (*span, export.revision),
        )
        connection.execute(
            "INSERT INTO changes SELECT ?, hour, ? FROM hours WHERE hour >= ? AND hour < ? AND revision > ? "
            "ON CONFLICT DO NOTHING",
            (export.name, now_s, export.begin_s, export.end_s, export.revision),
        )

    def remove(self, name: str) -> None:
        """Forgets an exporter; raises NotFound."""
        if name not in self.exporters:
            known = ", ".join(sorted(self.exporters)) or "there is none"
            raise NotFound(f"no exporter {name}; known: {known}")
        self._connection.execute("DELETE FROM exporters WHERE name = ?", (name,))
        self._connection.execute("DELETE FROM changes WHERE exporter = ?", (name,))

    def forget(self, before_s: int) -> None:
        """Lets go of the numbers of hours that have no rows any more."""
        self._connection.execute("DELETE FROM hours WHERE hour < ?", (before_s,))
