"""The energy ledger in one SQLite file.

Owns what is written together, what is kept for how long, and answers. Must not know agents or
prices: it is given entries. The tables are energy_tables.py's.

Theory. Rows are written together with the number of the window that they came from: so a
window that comes again adds nothing, and one that is acknowledged is on the disk whole. Sums
are of integers. A thousand GPUs in 125 nodes, each held by a dozen owners an hour, make some
13 million rows of hours a year, of 40 bytes each. Hours leave after `HOURS_KEPT_S`, days after
`DAYS_KEPT_S`, and a holder when the last row that names it has left; whatever an exporter does
not have yet (`energy_marks.py`) stays. Only the bound on the file's size lets go of that, too.

Calls come from one thread at a time; `ask` has a connection of its own and may come from another.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_controller.adapters.energy_answers import answers
from eelgrid_controller.adapters.energy_marks import Marks
from eelgrid_controller.adapters.energy_tables import APPLICATION_ID, FORMAT_VERSION, SPANS, UPGRADES
from eelgrid_controller.energy_ledger.asking import DAY_S, Answer, Asked
from eelgrid_controller.energy_ledger.entries import Entry, Holder, Measured, Place, namespace_of
from eelgrid_controller.energy_ledger.exporting import Export, kept_before, settled_s
from eelgrid_controller.energy_ledger.namespaces import NamespaceSum, NamespaceSums
from eelgrid_controller.energy_ledger.working import WorkEntry
from eelgrid_controller.errors import LedgerError

__all__ = ["DAYS_KEPT_S", "HOURS_KEPT_S", "EnergyStore", "Newest", "open_energy"]

FILE_NAME = "energy.sqlite3"
HOURS_KEPT_S = 400 * DAY_S
DAYS_KEPT_S = 5 * 366 * DAY_S
_FORGOTTEN_ONCE = 5_000
_DISK = "check the disk and the rights of its folder"


class Newest(NamedTuple):
    """The last window of a node that is in the ledger: its number, and where it ends in seconds of Unix time."""

    node_name: str
    incarnation: int
    number: int
    until_s: float


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
        self.marks = Marks(connection)
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
        self, entries: Iterable[Entry], measured: Iterable[Measured], windows: Iterable[Newest],
        worked: Iterable[WorkEntry] = (), *, now_s: int,
    ) -> None:  # fmt: skip
        """All or nothing, and on the disk on return; `windows` are the nodes' newest. Raises LedgerError."""
        entries, measured, worked = list(entries), list(measured), list(worked)
        hours = {one.hour_s for many in (entries, measured, worked) for one in many}
        try:
            with self._transaction():
                self._add_spent(entries, measured)
                namespaces = self._add_to_namespaces(entries)
                self._add_work(worked)
                self._connection.executemany(
                    "INSERT INTO windows VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET incarnation = excluded.incarnation, "
                    "number = excluded.number, until = excluded.until",
                    [(one.node_name, str(one.incarnation), one.number, one.until_s) for one in windows],
                )
                is_behind = self.marks.touched(hours, now_s=now_s)
        except BaseException:
            # What was given an id in there has none.
            self._places.clear()
            self._holders.clear()
            raise
        self.namespaces = namespaces
        if is_behind:
            self._read_marks()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing; raises LedgerError."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                connection.execute("COMMIT")
            except BaseException:
                # A full disk may have ended the transaction already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OverflowError) as error:
            raise LedgerError(self.path, str(error), _DISK) from error

    def confirm(self, export: Export, *, now_s: int) -> None:
        """Somebody has these rows elsewhere; raises FailedPrecondition, ResourceExhausted and LedgerError."""
        with self._transaction():
            self.marks.confirm(export, now_s=now_s)
        self._read_marks()

    def remove_exporter(self, name: str) -> None:
        """His rows go by their age again; raises NotFound and LedgerError."""
        with self._transaction():
            self.marks.remove(name)
        self._read_marks()

    def _read_marks(self) -> None:
        try:
            self.marks.read()
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DISK) from error

    def settled_s(self, now_s: int) -> int:
        """Until when hours are settled (`exporting.py`); raises LedgerError."""
        return settled_s([until_s for (until_s,) in self._read("SELECT until FROM windows", ())], now_s)

    def begun_s(self) -> int | None:
        """The oldest hour that is known by itself, None without any; raises LedgerError."""
        ((first_s,),) = self._read("SELECT min(at) FROM hourly", ())
        return None if first_s is None else int(first_s)

    def _add_spent(self, entries: Iterable[Entry], measured: Iterable[Measured]) -> None:
        connection = self._connection
        spent = [
            (one.hour_s, self._place(one.place), self._holder(one.holder), one.spent.bare_mj, one.spent.context_mj,
             one.spent.active_mj, one.spent.cost, one.spent.carbon_g)
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
            spent_mj[namespace_of(one.holder.kind, one.holder.namespace)] += one.spent.energy_mj
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
        untils_s = [one.until_s for one in self.marks.exporters.values()]
        try:
            for (table, span_s), kept_s in zip(SPANS, (HOURS_KEPT_S, DAYS_KEPT_S), strict=True):
                before_s = kept_before(now_s, kept_s, span_s, untils_s)
                for name, keys in _parts(table):
                    done = connection.execute(
                        f"DELETE FROM {name} WHERE ({keys}) IN (SELECT {keys} FROM {name} WHERE at < ? "
                        f"AND at NOT IN (SELECT hour / {span_s} * {span_s} FROM changes) LIMIT {_FORGOTTEN_ONCE})",
                        (before_s,),
                    ).rowcount
                    gone += done
                    if name == "daily" and 0 < done < _FORGOTTEN_ONCE:
                        self._forget_holders()
            connection.execute(
                "DELETE FROM works WHERE until < ? AND id NOT IN (SELECT work FROM daily_work)", (now_s - DAYS_KEPT_S,)
            )
            self.marks.forget(now_s - DAYS_KEPT_S)
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DISK) from error
        return gone

    def _forget_holders(self) -> None:
        """Days are kept longest, so who has none has no hours."""
        self._connection.execute("DELETE FROM holders WHERE id NOT IN (SELECT holder FROM daily)")
        self._holders.clear()

    def used_bytes(self) -> int:
        """Of the file, without pages that are free. Raises LedgerError."""
        try:
            pages, free, size = (
                self._connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DISK) from error
        return int((pages - free) * size)

    def shrink(self, *, now_s: int, bytes_most: int) -> int:
        """Lets go of one hour or one day, whoever has it, where the file is larger than that; how many rows went.

        Of the hours and the days it is those whose oldest has used up most of the time that it is kept, so that both
        become shorter alike; an hour leaves before its day. Raises LedgerError.
        """
        if self.used_bytes() <= bytes_most:
            return 0
        with self._transaction():
            oldest = {
                table: self._connection.execute(f"SELECT min(at) FROM {table}").fetchone()[0] for table, _ in SPANS
            }
            hour_s, day_s = oldest["hourly"], oldest["daily"]
            if day_s is None:
                return 0
            is_day = hour_s is None or (
                day_s + DAY_S <= hour_s and (now_s - day_s) * HOURS_KEPT_S > (now_s - hour_s) * DAYS_KEPT_S
            )
            table, at_s = ("daily", day_s) if is_day else ("hourly", hour_s)
            gone = sum(
                self._connection.execute(f"DELETE FROM {name} WHERE at <= ?", (at_s,)).rowcount
                for name, _ in _parts(table)
            )
            if is_day:
                self._forget_holders()
        return gone

    def ask(self, asked: Asked) -> Answer:
        """The answer, all of it of one moment, whatever is written meanwhile; raises LedgerError."""
        (answer,) = self.ask_all((asked,))
        return answer

    def ask_all(self, asked: Sequence[Asked]) -> list[Answer]:
        """The same for questions of one stretch with the same filters, which costs less than each alone."""
        self._read("BEGIN", ())
        try:
            ((revision,),) = self._read("SELECT revision FROM ledger", ())
            return [replace(one, revision=revision) for one in answers(self._read, asked)]
        finally:
            # A fault of the disk may have ended the transaction already.
            if self._reader.in_transaction:
                self._read("ROLLBACK", ())

    def _read(self, sql: str, given: Iterable[Any]) -> list[Any]:
        try:
            return self._reader.execute(sql, tuple(given)).fetchall()
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DISK) from error

    def close(self) -> None:
        """Lets go of the file."""
        self._reader.close()
        self._connection.close()


def _parts(table: str) -> tuple[tuple[str, str], ...]:
    """Tables of hours or of days, and their keys."""
    return (
        (table, "at, place, holder"), (f"{table}_measured", "at, place"), (f"{table}_work", "at, work"),
    )  # fmt: skip
