"""The energy ledger in one SQLite file.

`ExporterMarks` records what exporters have confirmed, and which hours changed since.
"""

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_controller.energy.ledger import (
    DAY_S,
    ChangedHours,
    EnergyHolder,
    ExportClaim,
    Exporter,
    LedgerAnswer,
    LedgerEntry,
    LedgerPlace,
    LedgerQuery,
    MeasuredEnergy,
    NamespaceSum,
    NamespaceSums,
    advance_mark,
    namespace_label,
    retention_cutoff_s,
    settled_s,
)
from eelgrid_controller.energy.store.query_execution import LedgerUnreadable, SumOverflow, answer_queries
from eelgrid_controller.energy.store.schema import (
    APPLICATION_ID,
    CELL_MJ_MOST,
    DAMAGED_MOST,
    FORMAT_VERSION,
    NO_DAMAGE,
    SPANS,
    Damage,
    LedgerPiece,
    RepairedRows,
    crc_columns,
    crc_of,
    damaged_parts,
    pieces_of,
    register_sql_functions,
    upgrade_schema,
)
from eelgrid_controller.errors import LedgerError, LedgerRefused
from eelgrid_controller.state.measurements import WorkEntry
from eelgrid_protos.faults import NotFound


class ExporterMarks:
    """Of one ledger; every method that changes something is called within a transaction of `connection`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        # As of the last `read`; replaced whole, so that another thread may look at it.
        self.exporters: Mapping[str, Exporter] = {}
        self.revision = 0  # of the last transaction, also of one that is not committed yet
        self.load()

    def load(self) -> None:
        """Take up what is on the disk."""
        ((self.revision,),) = self._connection.execute("SELECT revision FROM ledger").fetchall()
        rows = self._connection.execute(
            "SELECT e.name, e.since, e.until, count(c.hour), min(c.hour), max(c.hour), min(c.at) FROM exporters e "
            "LEFT JOIN changes c ON c.exporter = e.name GROUP BY e.name"
        )
        self.exporters = {
            name: Exporter(name, since_s, until_s, ChangedHours(hours, *changed) if hours else None)
            for name, since_s, until_s, hours, *changed in rows
        }

    def record_changed_hours(self, hours: Collection[int], *, now_s: int) -> bool:
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

    def confirm(self, export: ExportClaim, *, now_s: int) -> None:
        """Moves a mark; raises FailedPrecondition and ResourceExhausted."""
        connection = self._connection
        ((revision,),) = connection.execute("SELECT revision FROM ledger").fetchall()
        ends_s = [until_s for (until_s,) in connection.execute("SELECT until FROM windows")]
        after = advance_mark(
            self.exporters.get(export.name),
            export,
            settled_s=settled_s(ends_s, now_s),
            revision=revision,
            others=len(self.exporters),
        )
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

    def forget_hours(self, before_s: int) -> None:
        """Lets go of the numbers of hours that have no rows any more."""
        self._connection.execute("DELETE FROM hours WHERE hour < ?", (before_s,))


FILE_NAME = "energy.sqlite3"
MARK_NAME = "energy.revision"
HOURS_KEPT_S = 400 * DAY_S
DAYS_KEPT_S = 5 * 366 * DAY_S
_FORGOTTEN_ONCE = 5_000
_DISK = "check the disk and the rights of its folder"
_DAMAGED = "check the disk, and restore a backup or move the file away (docs/how-to/runbooks/EelgridLedgerFailing.md)"
# What Python says of a value that SQLite cannot take: too large, no text in UTF-8, of no known type.
_OF_VALUES = (OverflowError, ValueError, TypeError)
# Times from clocks of nodes: how far ahead of the one behind which at most two nodes are, rows may count as old.
_WITNESSES = 3
_WITNESSED_S = 30 * DAY_S


class LastWindow(NamedTuple):
    """The last window of a node that is in the ledger: its number, and where it ends in seconds of Unix time."""

    node_name: str
    incarnation: int
    number: int
    until_s: float


class RevisionMark:
    """The number of the last transaction, in a file of its own.

    SQLite checks its log when a killed process left one, and what follows a damaged frame was never there, without a
    word. The mark is written after each commit and not waited for: after a loss of power it may be older than the ledger,
    never newer.
    """

    def __init__(self, path: Path) -> None:
        self.noted = 0  # what is in it; 0 where there is none, or none that can be read
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
            number, _, check = os.pread(self._file, 64, 0).decode("ascii", "replace").strip().partition(" ")
            if check == str(crc_of(0, number)):
                self.noted = int(number)
        except (OSError, ValueError):
            self._file = None

    def save_revision(self, revision: int) -> None:
        """Writes it down, where that can be done: a ledger without its mark is as good."""
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, f"{revision} {crc_of(0, revision)}".ljust(48).encode() + b"\n", 0)

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(slots=True)
class NodeEntries:
    """What one node's windows add."""

    entries: list[LedgerEntry] = field(default_factory=list)
    measured: list[MeasuredEnergy] = field(default_factory=list)
    newest: LastWindow | None = None


class WriteOutcome(NamedTuple):
    """Nodes whose parts are not in the ledger, and why: what is in them cannot be written, or their rows are damaged."""

    refused: Mapping[str, str]
    failed: Mapping[str, str]


def open_ledger(folder: Path) -> "LedgerStore":
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
        register_sql_functions(connection)
        healed = upgrade_schema(connection, version) if version < FORMAT_VERSION else RepairedRows()
        reader = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False, timeout=10.0)
        register_sql_functions(reader)
        return LedgerStore(path, connection, reader, healed=healed)
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise LedgerError(path, str(error), _DISK) from error


class LedgerStore:
    """See the module; made by `open_ledger`."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, reader: sqlite3.Connection, *, healed: RepairedRows
    ) -> None:
        self.path = path
        self.healed = healed
        # What the last look at each stretch did not find as it was written; replaced whole, as other threads look at it.
        self.damage = NO_DAMAGE
        self.index_is_damaged = False
        self._connection = connection
        self._reader = reader
        self._places: dict[LedgerPlace, int] = {}
        self._holders: dict[EnergyHolder, int] = {}
        self._mark = RevisionMark(path.with_name(MARK_NAME))
        # What was acknowledged and is not there any more, in words.
        self.losses: tuple[str, ...] = ()
        self._scrub_s = -1  # the day that was scrubbed last
        # Records of nodes and counters of namespaces that were damaged, and are gone.
        self.dropped = self._drop_damaged("windows") + self._drop_damaged("namespaces")
        self.marks = ExporterMarks(connection)
        lost = self._mark.noted - self.marks.revision
        if lost > 0:
            self.losses = (
                f"{lost} committed transactions are missing: its log was damaged, or an older copy was restored",
            )
        self._mark.save_revision(self.marks.revision)
        self.namespaces = self._sums()  # of what is on the disk; another thread may read it, since it is never changed

    def _drop_damaged(self, table: str) -> int:
        """Lets go of rows that are not as they were written; how many."""
        return self._connection.execute(f"DELETE FROM {table} WHERE crc <> {crc_columns(table)}").rowcount

    def last_windows(self) -> dict[str, tuple[int, int]]:
        """Incarnation and number of the last window of each node. Raises LedgerError."""
        rows = self._read("SELECT node, incarnation, number FROM windows", ())
        return {node: (int(incarnation), number) for node, incarnation, number in rows}

    def last_window_ends(self) -> dict[str, float]:
        """Where the last window of each node ends, by the node's clock. Raises LedgerError."""
        return dict(self._read("SELECT node, until FROM windows", ()))

    def _sums(self) -> NamespaceSums:
        rows = self._read("SELECT name, spent, own, shown FROM namespaces", ())
        return NamespaceSums({name: NamespaceSum(spent, own, bool(shown)) for name, spent, own, shown in rows})

    def recent_holders(self, most: int) -> list[EnergyHolder]:
        """The newest holder of each of the newest workloads, oldest first. Raises LedgerError."""
        rows = self._read(
            "SELECT kind, namespace, name, workload, title, user, queue, labels FROM holders WHERE id IN "
            "(SELECT max(id) FROM holders WHERE workload <> '' AND title <> '' GROUP BY workload) "
            "ORDER BY id DESC LIMIT ?",
            (most,),
        )
        return [EnergyHolder._make((*row[:7], tuple(sorted(json.loads(row[7]).items())))) for row in reversed(rows)]

    def last_work_ends(self) -> dict[tuple[str, str], float]:
        """The end of the newest increment by workload and unit. Raises LedgerError."""
        return {
            (name, unit): until_s for name, unit, until_s in self._read("SELECT workload, unit, until FROM works", ())
        }

    def add(
        self,
        entries: Iterable[LedgerEntry],
        measured: Iterable[MeasuredEnergy],
        windows: Iterable[LastWindow],
        worked: Iterable[WorkEntry] = (),
        *,
        now_s: int,
    ) -> None:
        """All or nothing, and on the disk on return; `windows` are the nodes' newest.

        Raises LedgerError; LedgerRefused where the disk is well and something in it cannot be written.
        """
        try:
            with self._transaction():
                part = (list(entries), list(measured), list(windows), list(worked))
                added = self._add(*part, namespaces=self.namespaces, now_s=now_s)
        except BaseException:
            # What was given an id in there has none.
            self._places.clear()
            self._holders.clear()
            raise
        self._after_commit(*added)

    def add_each(
        self, parts: Mapping[str, NodeEntries], worked: Iterable[WorkEntry] = (), *, now_s: int
    ) -> WriteOutcome:
        """The same for each node by itself: one whose part cannot be written leaves the others'. Raises LedgerError."""
        refused, failed = dict[str, str](), dict[str, str]()
        namespaces, is_behind = self.namespaces, False
        named: list[tuple[str, NodeEntries, list[WorkEntry]]] = [(name, part, []) for name, part in parts.items()]
        named.append(("", NodeEntries(), list(worked)))
        try:
            with self._transaction():
                for name, part, work in named:
                    self._connection.execute("SAVEPOINT part")
                    try:
                        newest = [] if part.newest is None else [part.newest]
                        namespaces, is_one = self._add(
                            part.entries, part.measured, newest, work, namespaces=namespaces, now_s=now_s
                        )
                    except (sqlite3.Error, *_OF_VALUES) as error:
                        if not _is_of_part(error):
                            raise
                        (failed if _is_damage(error) else refused)[name] = str(error)
                        self._connection.execute("ROLLBACK TO part")
                        self._places.clear()
                        self._holders.clear()
                    else:
                        is_behind = is_behind or is_one
                    self._connection.execute("RELEASE part")
        except BaseException:
            self._places.clear()
            self._holders.clear()
            raise
        self._after_commit(namespaces, is_behind)
        return WriteOutcome(refused, failed)

    def _add(
        self,
        entries: list[LedgerEntry],
        measured: list[MeasuredEnergy],
        windows: list[LastWindow],
        worked: list[WorkEntry],
        *,
        namespaces: NamespaceSums,
        now_s: int,
    ) -> tuple[NamespaceSums, bool]:
        """Within a transaction: counters then, and whether an exporter had one of the hours."""
        self._add_spent(entries, measured)
        after = self._add_to_namespaces(entries, namespaces)
        self._add_work(worked)
        rows = [(one.node_name, str(one.incarnation), one.number, one.until_s) for one in windows]
        self._connection.executemany(
            "INSERT INTO windows (node, incarnation, number, until, crc) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "incarnation = excluded.incarnation, number = excluded.number, until = excluded.until, crc = excluded.crc",
            [(*row, crc_of(0, *row[:3])) for row in rows],
        )
        hours = {one.hour_s for many in (entries, measured, worked) for one in many}
        return after, self.marks.record_changed_hours(hours, now_s=now_s)

    def _after_commit(self, namespaces: NamespaceSums, is_behind: bool) -> None:
        """A transaction is on the disk."""
        self._mark.save_revision(self.marks.revision)
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
        except (sqlite3.Error, *_OF_VALUES) as error:
            if _is_of_part(error):
                raise LedgerRefused(self.path, str(error), _DAMAGED) from error
            raise LedgerError(self.path, str(error), _DISK) from error

    def confirm(self, export: ExportClaim, *, now_s: int) -> None:
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
            self.marks.load()
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DISK) from error

    def settled_s(self, now_s: int) -> int:
        """Until when hours are settled (`ledger.settled_s`); raises LedgerError."""
        return settled_s([until_s for (until_s,) in self._read("SELECT until FROM windows", ())], now_s)

    def begun_s(self) -> int | None:
        """The oldest hour that is known by itself, None without any; raises LedgerError."""
        ((first_s,),) = self._read("SELECT min(at) FROM hourly", ())
        return None if first_s is None else int(first_s)

    def _add_spent(self, entries: Iterable[LedgerEntry], measured: Iterable[MeasuredEnergy]) -> None:
        connection = self._connection
        spent = [
            (
                one.hour_s,
                self._place_id(one.place),
                self._holder(one.holder),
                one.spent.bare_mj,
                one.spent.context_mj,
                one.spent.active_mj,
                one.spent.cost,
                one.spent.carbon_g,
            )
            for one in entries
        ]
        drawn = [
            (one.hour_s, self._place_id(one.place), one.total_mj, one.uncertainty_mj, one.uncounted_s)
            for one in measured
        ]
        amount = f"min(?, {CELL_MJ_MOST})"
        for table, span_s in SPANS:
            at = f"? / {span_s} * {span_s}"
            connection.executemany(
                f"INSERT INTO {table} VALUES ({at}, ?, ?, {amount}, {amount}, {amount}, ?, ?) ON CONFLICT DO UPDATE SET "
                f"{_more('bare', 'context', 'active')}, cost = cost + excluded.cost, carbon = carbon + excluded.carbon",
                spent,
            )
            connection.executemany(
                f"INSERT INTO {table}_measured VALUES ({at}, ?, {amount}, {amount}, ?) ON CONFLICT DO UPDATE SET "
                f"{_more('total', 'uncertainty')}, uncounted = uncounted + excluded.uncounted",
                drawn,
            )

    def _add_to_namespaces(self, entries: Iterable[LedgerEntry], namespaces: NamespaceSums) -> NamespaceSums:
        spent_mj: Counter[str] = Counter()
        for one in entries:
            spent_mj[namespace_label(one.holder.kind, one.holder.namespace)] += one.spent.energy_mj
        after, changed = namespaces.plus(spent_mj)
        rows = [(name, one.spent_mj, one.own_mj, int(one.is_shown)) for name, one in changed.items()]
        self._connection.executemany(
            "INSERT INTO namespaces (name, spent, own, shown, crc) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "spent = excluded.spent, own = excluded.own, shown = excluded.shown, crc = excluded.crc",
            [(*row, crc_of(0, *row)) for row in rows],
        )
        return after

    def _add_work(self, worked: Iterable[WorkEntry]) -> None:
        rows = []
        for one in worked:
            (work,) = self._connection.execute(
                "INSERT INTO works (workload, unit, until) VALUES (?, ?, ?) ON CONFLICT DO UPDATE "
                "SET until = excluded.until RETURNING id",
                (one.workload, one.unit, one.until_s),
            ).fetchone()
            self._connection.execute(
                "UPDATE works SET crc = ? WHERE id = ? AND crc = 0", (crc_of(work, one.workload, one.unit), work)
            )
            rows.append((one.hour_s, work, one.amount, one.counted_s, one.missed_s))
        for table, span_s in SPANS:
            self._connection.executemany(
                f"INSERT INTO {table}_work VALUES (? / {span_s} * {span_s}, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "amount = amount + excluded.amount, counted = counted + excluded.counted, missed = missed + excluded.missed",
                rows,
            )

    def _place_id(self, place: LedgerPlace) -> int:
        return self._id(self._places, place, "places", place)

    def _holder(self, holder: EnergyHolder) -> int:
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
            self._connection.execute(
                f"UPDATE {table} SET crc = ? WHERE id = ? AND crc = 0", (crc_of(found, *values), found)
            )
            known[key] = found
        assert isinstance(found, int)
        return found

    def prune_rows(self, *, now_s: int) -> int:
        """Lets go of some rows that are too old, and of holders without rows; how many rows went. Raises LedgerError."""
        gone, connection = 0, self._connection
        untils_s = [one.until_s for one in self.marks.exporters.values()]
        try:
            for (table, span_s), kept_s in zip(SPANS, (HOURS_KEPT_S, DAYS_KEPT_S), strict=True):
                before_s = retention_cutoff_s(now_s, kept_s, span_s, untils_s)
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
            self.marks.forget_hours(now_s - DAYS_KEPT_S)
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DISK) from error
        return gone

    def witnessed_s(self, now_s: int) -> int:
        """The time to forget by: not far after the newest windows of three nodes, whatever our clock says.

        A clock that is years ahead would let everything go. Raises LedgerError.
        """
        ends_s = sorted(self.last_window_ends().values(), reverse=True)[:_WITNESSES]
        return int(min(now_s, ends_s[-1] + _WITNESSED_S)) if ends_s else now_s

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

    def query(self, asked: LedgerQuery) -> LedgerAnswer:
        """The answer, all of it of one moment, whatever is written meanwhile; raises LedgerError."""
        (answer,) = self.query_all((asked,))
        return answer

    def query_all(self, asked: Sequence[LedgerQuery]) -> list[LedgerAnswer]:
        """The same for questions of one stretch with the same filters, which costs less than each alone."""
        try:
            self._read("BEGIN", ())
            try:
                ((revision,),) = self._read("SELECT revision FROM ledger", ())
                found, damage = answer_queries(self._read, asked)
                self._note_damage(damage, {piece for one in asked for piece in pieces_of(one)})
                return [replace(one, revision=revision, damaged=one.damaged + self.losses) for one in found]
            finally:
                # A fault of the disk may have ended the transaction already.
                if self._reader.in_transaction:
                    self._read("ROLLBACK", ())
        except LedgerUnreadable as error:
            self.index_is_damaged = error.can_mend
            raise LedgerError(self.path, str(error), "ask again" if error.can_mend else _DAMAGED) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise LedgerError(self.path, f"a row cannot be read: {error}", _DAMAGED) from error

    def _note_damage(self, damage: Damage, pieces: Iterable[LedgerPiece]) -> None:
        """Takes what a look at these pieces found in the place of what was known of them."""
        pieces = set(pieces)
        known = {
            part
            for part in self.damage.parts
            if not any(part.table == table and low <= part.at_s < high for table, low, high in pieces)
        }
        self.damage = damage._replace(parts=tuple(sorted(known.union(damage.parts))[:DAMAGED_MOST]))

    def scrub(self) -> None:
        """Compares the next day's rows with their checksums, so that damage is known before anybody asks for it.

        Raises LedgerError.
        """
        ((first_s,),) = self._read("SELECT min(at) FROM daily WHERE at > ?", (self._scrub_s,))
        self._scrub_s = -1 if first_s is None else first_s
        if first_s is not None:
            pieces = [(table, first_s, first_s + DAY_S) for table, _ in SPANS]
            self._note_damage(self.damage._replace(parts=tuple(damaged_parts(self._read, pieces))), pieces)

    def mend_indexes(self) -> None:
        """Makes indexes anew from their tables. Raises LedgerError."""
        try:
            self._connection.execute("REINDEX")
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), _DAMAGED) from error
        self.index_is_damaged = False

    def _read(self, sql: str, given: Iterable[Any]) -> list[Any]:
        try:
            return self._reader.execute(sql, tuple(given)).fetchall()
        except sqlite3.Error as error:
            if "integer overflow" in str(error):
                raise SumOverflow from error
            raise LedgerError(self.path, str(error), _DAMAGED if _is_damage(error) else _DISK) from error

    def close(self) -> None:
        """Lets go of the file."""
        self._reader.close()
        self._connection.close()
        self._mark.close()


def _parts(table: str) -> tuple[tuple[str, str], ...]:
    """Tables of hours or of days, and their keys."""
    return (
        (table, "at, place, holder"),
        (f"{table}_measured", "at, place"),
        (f"{table}_work", "at, work"),
    )


def _more(*columns: str) -> str:
    """What an upsert adds to amounts, which stay integers."""
    return ", ".join(f"{name} = min({name} + excluded.{name}, {CELL_MJ_MOST})" for name in columns)


def _is_damage(error: Exception) -> bool:
    """Whether the file is not as SQLite wrote it."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _is_of_part(error: Exception) -> bool:
    """Whether it is what was to be written, or rows that it meets, and not the disk."""
    kinds = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
    return isinstance(error, (*_OF_VALUES, *kinds)) or _is_damage(error)
