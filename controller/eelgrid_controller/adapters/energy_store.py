"""The energy ledger in one SQLite file.

Owns what is written together, what is kept for how long, and answers. Must not know agents or
prices: it is given entries. The tables are energy_tables.py's.

Theory. Rows are written together with the number of the window that they came from: so a
window that comes again adds nothing, and one that is acknowledged is on the disk whole. Sums
are of integers. A thousand GPUs in 125 nodes, each held by a dozen owners an hour, make some
13 million rows of hours a year, of 40 bytes each. Hours leave after `HOURS_KEPT_S`, days after
`DAYS_KEPT_S`, and a holder when the last row that names it has left.

Calls come from one thread at a time; `ask` has a connection of its own and may come from another.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eelgrid_controller.adapters.energy_tables import (
    APPLICATION_ID,
    FORMAT_VERSION,
    PLACED,
    SPANS,
    UPGRADES,
    columns_of,
    filters_of,
    place_filters_of,
    spans_of,
    work_query,
)
from eelgrid_controller.energy_ledger.asking import DAY_S, Answer, Asked, Done, Group, Spent
from eelgrid_controller.energy_ledger.entries import Entry, Holder, Measured, Place, namespace_of
from eelgrid_controller.energy_ledger.namespaces import NamespaceSum, NamespaceSums
from eelgrid_controller.energy_ledger.working import WorkEntry
from eelgrid_controller.errors import LedgerError

__all__ = ["DAYS_KEPT_S", "HOURS_KEPT_S", "EnergyStore", "open_energy"]

FILE_NAME = "energy.sqlite3"
HOURS_KEPT_S = 400 * DAY_S
DAYS_KEPT_S = 5 * 366 * DAY_S
_FORGOTTEN_ONCE = 5_000
_DISK = "check the disk and the rights of its folder"
_SUMS = "sum(bare), sum(context), sum(active), total(cost), total(carbon)"
_INNER_SUMS = (
    "sum(bare) AS bare, sum(context) AS context, sum(active) AS active, sum(cost) AS cost, sum(carbon) AS carbon"
)
_NOBODY = "CASE WHEN h.kind IN ('unallocated', 'unattributed') THEN h.kind ELSE '' END"


def open_energy(folder: Path) -> "EnergyStore":
    """The ledger of a data folder, made where there is none. Raises LedgerError."""
    path = folder / FILE_NAME
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION_ID:
            raise LedgerError(path, "is another program's file", "move it away")
        if version > FORMAT_VERSION:
            raise LedgerError(path, f"has format {version}, this version knows {FORMAT_VERSION}", "use a newer Eelgrid")
        if version < FORMAT_VERSION:
            connection.executescript(
                f"BEGIN; {''.join(UPGRADES[version:])} PRAGMA application_id={APPLICATION_ID}; "
                f"PRAGMA user_version={FORMAT_VERSION}; COMMIT;"
            )
        reader = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False, timeout=10.0)
        return EnergyStore(path, connection, reader)
    except sqlite3.Error as error:
        raise LedgerError(path, str(error), _DISK) from error


class EnergyStore:
    """See the module; made by `open_energy`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._reader = reader
        self._places: dict[Place, int] = {}
        self._holders: dict[Holder, int] = {}
        self.namespaces = self._sums()  # of what is on the disk; another thread may read it, since it is never changed

    def newest(self) -> dict[str, tuple[int, int]]:
        """Incarnation and number of the last window of each node. Raises LedgerError."""
        rows = self._read("SELECT node, incarnation, number FROM windows", ())
        return {node: (int(incarnation), number) for node, incarnation, number in rows}

    def _sums(self) -> NamespaceSums:
        rows = self._read("SELECT name, spent, own, shown FROM namespaces", ())
        return NamespaceSums({name: NamespaceSum(spent, own, bool(shown)) for name, spent, own, shown in rows})

    def known(self, most: int) -> list[Holder]:
        """The newest holder of each of the newest workloads, oldest first. Raises LedgerError."""
        rows = self._read(
            "SELECT kind, namespace, name, workload, title, user, queue, labels FROM holders WHERE id IN "
            "(SELECT max(id) FROM holders WHERE workload <> '' AND title <> '' GROUP BY workload) "
            "ORDER BY id DESC LIMIT ?",
            (most,),
        )
        return [Holder._make((*row[:7], tuple(sorted(json.loads(row[7]).items())))) for row in reversed(rows)]

    def worked_until(self) -> dict[tuple[str, str], float]:
        """The end of the newest increment by workload and unit. Raises LedgerError."""
        return {
            (name, unit): until_s for name, unit, until_s in self._read("SELECT workload, unit, until FROM works", ())
        }

    def add(
        self, entries: Iterable[Entry], measured: Iterable[Measured], windows: Iterable[tuple[str, int, int]],
        worked: Iterable[WorkEntry] = (),
    ) -> None:  # fmt: skip
        """All or nothing, and on the disk on return; `windows` are the nodes' newest. Raises LedgerError."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                entries = list(entries)
                self._add_spent(entries, measured)
                namespaces = self._add_to_namespaces(entries)
                self._add_work(worked)
                connection.executemany(
                    "INSERT INTO windows VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET incarnation = excluded.incarnation, "
                    "number = excluded.number",
                    [(node, str(incarnation), number) for node, incarnation, number in windows],
                )
                connection.execute("COMMIT")
                self.namespaces = namespaces
            except BaseException:
                # What was given an id in there has none.
                self._places.clear()
                self._holders.clear()
                # A full disk may have ended the transaction already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OverflowError) as error:
            raise LedgerError(self.path, str(error), _DISK) from error

    def _add_spent(self, entries: Iterable[Entry], measured: Iterable[Measured]) -> None:
        connection = self._connection
        spent = [
            (one.hour_s, self._place(one.place), self._holder(one.holder), one.booked.bare_mj, one.booked.context_mj,
             one.booked.active_mj, one.booked.cost, one.booked.carbon_g)
            for one in entries
        ]  # fmt: skip
        drawn = [
            (one.hour_s, self._place(one.place), one.total_mj, one.uncertainty_mj, one.uncounted_s) for one in measured
        ]
        for table, span_s in SPANS:
            connection.executemany(
                f"INSERT INTO {table} VALUES (? / {span_s} * {span_s}, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "bare = bare + excluded.bare, context = context + excluded.context, "
                "active = active + excluded.active, cost = cost + excluded.cost, carbon = carbon + excluded.carbon",
                spent,
            )
            connection.executemany(
                f"INSERT INTO {table}_measured VALUES (? / {span_s} * {span_s}, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "total = total + excluded.total, uncertainty = uncertainty + excluded.uncertainty, "
                "uncounted = uncounted + excluded.uncounted",
                drawn,
            )

    def _add_to_namespaces(self, entries: Iterable[Entry]) -> NamespaceSums:
        spent_mj: Counter[str] = Counter()
        for one in entries:
            spent_mj[namespace_of(one.holder.kind, one.holder.namespace)] += one.booked.energy_mj
        after, changed = self.namespaces.plus(spent_mj)
        self._connection.executemany(
            "INSERT INTO namespaces VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET spent = excluded.spent, "
            "own = excluded.own, shown = excluded.shown",
            [(name, *one) for name, one in changed.items()],
        )
        return after

    def _add_work(self, worked: Iterable[WorkEntry]) -> None:
        rows = []
        for one in worked:
            (work,) = self._connection.execute(
                "INSERT INTO works (workload, unit, until) VALUES (?, ?, ?) ON CONFLICT DO UPDATE "
                "SET until = max(until, excluded.until) RETURNING id",
                (one.workload, one.unit, one.until_s),
            ).fetchone()
            rows.append((one.hour_s, work, one.amount, one.counted_s, one.missed_s))
        for table, span_s in SPANS:
            self._connection.executemany(
                f"INSERT INTO {table}_work VALUES (? / {span_s} * {span_s}, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "amount = amount + excluded.amount, counted = counted + excluded.counted, missed = missed + excluded.missed",
                rows,
            )

    def _place(self, place: Place) -> int:
        return self._id(self._places, place, "places", place)

    def _holder(self, holder: Holder) -> int:
        return self._id(self._holders, holder, "holders", (*holder[:-1], json.dumps(dict(holder.labels))))

    def _id(self, known: dict[Any, int], key: Any, table: str, values: tuple[str, ...]) -> int:
        found = known.get(key)
        if found is None:
            if len(known) > 100_000:
                known.clear()
            names = (
                "node, pool, gpu_model"
                if table == "places"
                else ("kind, namespace, name, workload, title, user, queue, labels")
            )
            marks = ", ".join("?" * len(values))
            # A no-op update, so that the row's id comes back whether it is new or not.
            first = names.split(", ", 1)[0]
            (found,) = self._connection.execute(
                f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT DO UPDATE SET {first} = {first} "
                "RETURNING id",
                values,
            ).fetchone()
            known[key] = found
        assert isinstance(found, int)
        return found

    def forget(self, *, now_s: int) -> int:
        """Lets go of some rows that are too old, and of holders without rows; how many rows went. Raises LedgerError."""
        gone, connection = 0, self._connection
        try:
            for (table, _), kept_s in zip(SPANS, (HOURS_KEPT_S, DAYS_KEPT_S), strict=True):
                for name, keys in (
                    (table, "at, place, holder"), (f"{table}_measured", "at, place"), (f"{table}_work", "at, work"),
                ):  # fmt: skip
                    done = connection.execute(
                        f"DELETE FROM {name} WHERE ({keys}) IN (SELECT {keys} FROM {name} WHERE at < ? "
                        f"LIMIT {_FORGOTTEN_ONCE})",
                        (now_s - kept_s,),
                    ).rowcount
                    gone += done
                    if name == "daily" and 0 < done < _FORGOTTEN_ONCE:
                        # The last of a day: days are kept longest, so who has none has no hours.
                        connection.execute("DELETE FROM holders WHERE id NOT IN (SELECT holder FROM daily)")
                        self._holders.clear()
            connection.execute(
                "DELETE FROM works WHERE until < ? AND id NOT IN (SELECT work FROM daily_work)", (now_s - DAYS_KEPT_S,)
            )
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DISK) from error
        return gone

    def ask(self, asked: Asked) -> Answer:
        """The answer, all of it of one moment, whatever is written meanwhile; raises LedgerError."""
        self._read("BEGIN", ())
        try:
            return self._answer(asked)
        finally:
            # A fault of the disk may have ended the transaction already.
            if self._reader.in_transaction:
                self._read("ROLLBACK", ())

    def _answer(self, asked: Asked) -> Answer:
        worked = self._worked(asked)
        nobody = dict.fromkeys(("unallocated", "unattributed"), Spent())
        spent: dict[tuple[str, ...], Spent] = {}
        telling_mj: dict[tuple[tuple[str, ...], str], int] = {}  # of workloads that tell how much they work
        for kind, units, values, one in self._rows(asked, has_work=bool(worked)):
            if kind:
                nobody[kind] = nobody[kind].plus(one)
                continue
            spent[values] = spent[values].plus(one) if values in spent else one
            for unit in units.split("\n") if units else ():
                telling_mj[values, unit] = telling_mj.get((values, unit), 0) + one.energy_mj
        chosen = set(spent)
        if asked.group_by and len(spent) > asked.rows_most:
            chosen = set(sorted(spent, key=lambda values: -sum(spent[values][:3]))[: asked.rows_most])
        others = [one for values, one in spent.items() if values not in chosen]
        left_out = Spent(*map(sum, zip(*others, strict=True))) if others else Spent()
        timed = [place for place, name in enumerate(asked.group_by) if name in ("hour", "day")]
        groups = [
            Group(
                values, spent[values],
                tuple(done._replace(energy_mj=telling_mj.get((values, done.unit), 0)) for done in worked.get(values, ())),
            )
            for values in sorted(
                chosen, key=lambda values: (*(int(values[place]) for place in timed), -spent[values].energy_mj, values)
            )
        ]  # fmt: skip
        ((measured_mj, uncertainty_mj, uncounted_s),) = self._measured(asked)
        return Answer(
            asked=asked, groups=tuple(groups), left_out=left_out, left_out_rows=len(spent) - len(chosen),
            unallocated=nobody["unallocated"], unattributed=nobody["unattributed"], measured_mj=measured_mj,
            uncertainty_mj=uncertainty_mj, uncounted_s=uncounted_s,
        )  # fmt: skip

    def _rows(self, asked: Asked, *, has_work: bool) -> Iterable[tuple[str, str, tuple[str, ...], Spent]]:
        """Who of nobody it is, units that are told, the group, and what was spent; one pass for all of them."""
        where, given = filters_of(asked)
        columns, named = columns_of(asked)
        table, bounds = spans_of(asked)
        is_timed = any(name in ("hour", "day") for name in asked.group_by)
        is_placed = any(name in PLACED for name in (*asked.group_by, *(name for name, _ in asked.filters)))
        # First by number, which halves what is looked up by name; of single days there is little to sum up.
        keys = "place, holder" if is_placed else "holder"
        joined = (
            f"FROM ({table}) e" if is_timed else f"FROM (SELECT {keys}, {_INNER_SUMS} FROM ({table}) GROUP BY {keys}) e"
        )
        joined += " JOIN holders h ON h.id = e.holder"
        if is_placed:
            joined += " JOIN places p ON p.id = e.place"
        units, work_bounds = "''", tuple[int, ...]()
        if has_work:
            rows, work_bounds = spans_of(asked, "_work")
            units = "coalesce(w.units, '')"
            joined += (
                " LEFT JOIN (SELECT t.id AS holder, group_concat(w.unit, char(10)) AS units FROM works w JOIN holders t "
                "ON t.workload = w.workload AND t.workload <> '' "
                f"WHERE w.id IN (SELECT work FROM ({rows})) GROUP BY t.id) w ON w.holder = e.holder"
            )
        grouped = ", ".join(str(1 + place) for place in range(len(columns) + 2))
        found = self._read(
            f"SELECT {', '.join([_NOBODY, units, *columns])}, {_SUMS} {joined} {where} GROUP BY {grouped}",
            (*named, *bounds, *work_bounds, *given),
        )
        many = 2 + len(columns)
        return ((row[0], row[1], tuple(map(str, row[2:many])), Spent(*row[many:])) for row in found)

    def _worked(self, asked: Asked) -> dict[tuple[str, ...], tuple[Done, ...]]:
        """What was done by group; empty where nobody told, or where the question cuts workloads apart."""
        query = work_query(asked)
        found: dict[tuple[str, ...], tuple[Done, ...]] = {}
        for row in () if query is None else self._read(*query):
            *values, unit, amount, counted_s, missed_s = row
            key = tuple(map(str, values))
            found[key] = (*found.get(key, ()), Done(unit, amount, counted_s, missed_s))
        return found

    def _measured(self, asked: Asked) -> list[tuple[int, int, float]]:
        where, given = place_filters_of(asked)
        table, bounds = spans_of(asked, "_measured")
        return self._read(
            f"SELECT coalesce(sum(total), 0), coalesce(sum(uncertainty), 0), total(uncounted) FROM ({table}) e "
            f"JOIN places p ON p.id = e.place {where}",
            (*bounds, *given),
        )

    def _read(self, sql: str, given: Iterable[Any]) -> list[Any]:
        try:
            return self._reader.execute(sql, tuple(given)).fetchall()
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DISK) from error

    def close(self) -> None:
        """Lets go of the file."""
        self._reader.close()
        self._connection.close()
