"""The energy ledger: what windows add is written, rows that are too old go, and questions are answered.

Owns what is in each transaction, on whatever database (database.py). There is one writer, so a row is read, added to and
written back, together with what that changes in the check of its hour and place, and is kept as it was written for the
next window that adds to it (schema.py). `ExporterMarks` records what
exporters have confirmed, and which hours changed since. Must not know SQL that only one database understands.

A transaction whose end was not learnt (`LedgerInDoubt`) may have been committed, and added twice it would be counted
twice: `settle` finds out by the number of the last transaction, which only this process can have raised.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from eelgrid_controller.energy.ledger import (
    DAY_S,
    ChangedHours,
    EnergyHolder,
    ExportClaim,
    Exporter,
    LedgerAnswer,
    LedgerEntry,
    LedgerQuery,
    MeasuredEnergy,
    NamespaceSum,
    NamespaceSums,
    advance_mark,
    namespace_label,
    retention_cutoff_s,
    settled_s,
)
from eelgrid_controller.energy.store.database import (
    HOLDERS,
    PLACES,
    WORKS,
    LedgerDatabase,
    LedgerInDoubt,
    LedgerPartRefused,
    LedgerTransaction,
    NameTable,
    StoredNames,
)
from eelgrid_controller.energy.store.query_execution import LedgerUnreadable, answer_queries
from eelgrid_controller.energy.store.schema import (
    CELL_KINDS,
    DAMAGED_MOST,
    MEASURED,
    NO_DAMAGE,
    SPANS,
    SPENT,
    WORKED,
    CellKey,
    CellKind,
    Damage,
    KeptCells,
    LedgerPiece,
    check_amounts,
    crc_of,
    damaged_parts,
    pieces_of,
    sql_add_check,
    sum_cells,
)
from eelgrid_controller.energy.store.sqlite_database import FILE_NAME, is_filled, open_sqlite_ledger
from eelgrid_controller.errors import LedgerError, LedgerMoved, StoreLocation
from eelgrid_controller.runtime.stores import sqlite_folder
from eelgrid_controller.state.journal import Journal
from eelgrid_controller.state.measurements import WorkEntry
from eelgrid_protos.faults import NotFound


class ExporterMarks:
    """Of one ledger; every method that changes something is given the transaction that it is in."""

    def __init__(self) -> None:
        # As of the last `load`; replaced whole, so that another thread may look at it.
        self.exporters: Mapping[str, Exporter] = {}

    def load(self, read: Callable[[str, tuple[()]], list[Any]]) -> None:
        """Take up what is on the disk."""
        rows = read(
            "SELECT e.name, e.since, e.until, count(c.hour), min(c.hour), max(c.hour), min(c.at) FROM exporters e "
            "LEFT JOIN changes c ON c.exporter = e.name GROUP BY e.name, e.since, e.until",
            (),
        )
        self.exporters = {
            name: Exporter(name, since_s, until_s, ChangedHours(hours, *changed) if hours else None)
            for name, since_s, until_s, hours, *changed in rows
        }

    def record_changed_hours(
        self, transaction: LedgerTransaction, hours: Collection[int], *, revision: int, now_s: int
    ) -> bool:
        """The transaction of this number adds to these hours; whether any exporter had one of them."""
        transaction.change_each(
            "INSERT INTO hours (hour, revision) VALUES (?, ?) ON CONFLICT (hour) DO UPDATE SET revision = excluded.revision",
            [(hour, revision) for hour in hours],
        )
        stale = [
            (one.name, hour, now_s)
            for one in self.exporters.values()
            for hour in hours
            if one.since_s <= hour < one.until_s
        ]
        transaction.change_each(
            "INSERT INTO changes (exporter, hour, at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", stale
        )
        return bool(stale)

    def confirm(self, transaction: LedgerTransaction, export: ExportClaim, *, now_s: int) -> None:
        """Moves a mark; raises FailedPrecondition and ResourceExhausted."""
        ((revision,),) = transaction.read("SELECT revision FROM ledger")
        ends_s = [until_s for (until_s,) in transaction.read("SELECT until FROM windows")]
        after = advance_mark(
            self.exporters.get(export.name),
            export,
            settled_s=settled_s(ends_s, now_s),
            revision=revision,
            others=len(self.exporters),
        )
        transaction.change(
            "INSERT INTO exporters (name, since, until) VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE "
            "SET since = excluded.since, until = excluded.until",
            (after.name, after.since_s, after.until_s),
        )
        hours = (export.begin_s, export.end_s)
        transaction.change(
            "DELETE FROM changes WHERE exporter = ? AND hour >= ? AND hour < ? AND hour NOT IN "
            "(SELECT hour FROM hours WHERE revision > ?)",
            (export.name, *hours, export.revision),
        )
        newer = transaction.read(
            "SELECT hour FROM hours WHERE hour >= ? AND hour < ? AND revision > ?", (*hours, export.revision)
        )
        transaction.change_each(
            "INSERT INTO changes (exporter, hour, at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            [(export.name, hour, now_s) for (hour,) in newer],
        )

    def remove(self, transaction: LedgerTransaction, name: str) -> None:
        """Forgets an exporter; raises NotFound."""
        if name not in self.exporters:
            known = ", ".join(sorted(self.exporters)) or "there is none"
            raise NotFound(f"no exporter {name}; known: {known}")
        transaction.change("DELETE FROM exporters WHERE name = ?", (name,))
        transaction.change("DELETE FROM changes WHERE exporter = ?", (name,))


HOURS_KEPT_S = 400 * DAY_S
DAYS_KEPT_S = 5 * 366 * DAY_S
_FORGOTTEN_ONCE = 5_000
_NAMES_KNOWN_MOST = 100_000
_Named = TypeVar("_Named")
_DAMAGED = "check the disk, and restore a backup or move the file away (docs/how-to/runbooks/EelgridLedgerFailing.md)"
# Times from clocks of nodes: how far ahead of the one behind which at most two nodes are, rows may count as old.
_WITNESSES = 3
_WITNESSED_S = 30 * DAY_S


class LastWindow(NamedTuple):
    """The last window of a node that is in the ledger: its number, and where it ends in seconds of Unix time."""

    node_name: str
    incarnation: int
    number: int
    until_s: float


@dataclass(slots=True)
class NodeEntries:
    """What one node's windows add."""

    entries: list[LedgerEntry] = field(default_factory=list)
    measured: list[MeasuredEnergy] = field(default_factory=list)
    newest: LastWindow | None = None


class WriteOutcome(NamedTuple):
    """Nodes whose parts are not in the ledger, and why: what is in them cannot be written, or their rows are damaged."""

    refused: dict[str, str]
    failed: dict[str, str]


class _Doubt(NamedTuple):
    """A write whose end was not learnt: the number that it has if it is there, and what its caller would be told."""

    revision: int
    outcome: WriteOutcome


def open_ledger(folder: Path) -> "LedgerStore":
    """Opens the ledger of a data folder, made where there is none. Raises LedgerError."""
    return LedgerStore(open_sqlite_ledger(folder))


def open_ledger_with(journal: Journal, url: str, data: Path) -> "LedgerStore":
    """Opens the ledger where the journal is that was opened with this URL, "" for SQLite in `data`. Raises LedgerError.

    Raises it, too, where that one is empty and `data` has a ledger that was not moved: joules would be in two places.
    """
    folder = sqlite_folder(url) if url else data
    if folder is not None:
        store = open_ledger(folder)
    else:
        from eelgrid_controller.energy.store.postgres_database import open_postgres_ledger
        from eelgrid_controller.runtime.postgresql.journal import PostgresJournal

        assert isinstance(journal, PostgresJournal)
        store = LedgerStore(open_postgres_ledger(journal, data))
    if folder != data and not store.revision and is_filled(data):
        store.close()
        raise LedgerError(
            store.path,
            f"it is empty, and {data / FILE_NAME} is not",
            f"stop the controller and say: eelctl admin migrate --ledger-only sqlite:///{data.absolute()} "
            f"{store.path if folder is None else f'sqlite:///{folder.absolute()}'}; or move that file away",
        )
    return store


class LedgerStore:
    """The ledger in a database, of which it is the only writer."""

    def __init__(self, database: LedgerDatabase) -> None:
        """Raises LedgerError, and closes the database then."""
        self.database = database
        self.path = database.path
        self.healed = database.healed
        # What the last look at each stretch did not find as it was written; replaced whole, as other threads look at it.
        self.damage = NO_DAMAGE
        self.index_is_damaged = False
        self.revision = 0  # of the last transaction that is on disk
        self.marks = ExporterMarks()
        # Of what is on the disk; another thread may read it, since it is never changed.
        self.namespaces = NamespaceSums({})
        # What was acknowledged and is not there any more, in words.
        self.losses: tuple[str, ...] = ()
        # By table; forgotten with every transaction that may leave them otherwise than they are on disk.
        self._kept = {
            f"{table}{kind.suffix}": KeptCells(kind, span_s) for table, span_s in SPANS for kind in CELL_KINDS
        }
        # By what has the names; several may have the same.
        self._ids: dict[NameTable, dict[Any, int]] = {PLACES: {}, HOLDERS: {}, WORKS: {}}
        self._is_stale = False  # what is in memory, after a transaction in doubt
        self._doubt: _Doubt | None = None
        self._scrub_s = -1  # the day that was scrubbed last
        try:
            with self._transaction() as transaction:
                ((moved,),) = transaction.read("SELECT moved FROM ledger")
                _check_moved(self.path, moved)
                # Records of nodes and counters of namespaces that were damaged, and are gone.
                self.dropped = _drop_damaged(transaction)
                self._load(transaction)
        except BaseException:
            database.close()
            raise
        lost = database.noted_revision - self.revision
        if lost > 0:
            self.losses = (
                f"{lost} committed transactions are missing: its log was damaged, or an older copy was restored",
            )
        database.note_revision(self.revision)

    def _load(self, transaction: LedgerTransaction) -> None:
        """Takes up what is on the disk."""
        ((self.revision,),) = transaction.read("SELECT revision FROM ledger")
        rows = transaction.read("SELECT name, spent, own, shown FROM namespaces")
        self.namespaces = NamespaceSums(
            {name: NamespaceSum(spent, own, bool(shown)) for name, spent, own, shown in rows}
        )
        self.marks.load(transaction.read)
        self._forget_ids()

    @contextmanager
    def _transaction(self, *, is_long: bool = False, keeps_rows: bool = False) -> Iterator[LedgerTransaction]:
        """See `LedgerDatabase.transaction`; begins with what is on the disk where that was in doubt.

        `keeps_rows` is for one that changes rows of hours and days by `_add_cells` alone.
        """
        if not keeps_rows:
            self._forget_rows()
        try:
            with self.database.transaction(is_long=is_long) as transaction:
                if self._is_stale:
                    self._load(transaction)
                yield transaction
        except LedgerInDoubt:
            self._is_stale = True
            raise
        self._is_stale = False

    def last_windows(self) -> dict[str, tuple[int, int]]:
        """Incarnation and number of the last window of each node. Raises LedgerError."""
        rows = self._read("SELECT node, incarnation, number FROM windows")
        return {node: (int(incarnation), number) for node, incarnation, number in rows}

    def last_window_ends(self) -> dict[str, float]:
        """Where the last window of each node ends, by the node's clock. Raises LedgerError."""
        return dict(map(tuple, self._read("SELECT node, until FROM windows")))

    def recent_holders(self, most: int) -> list[EnergyHolder]:
        """The newest holder of each of the newest workloads, oldest first. Raises LedgerError."""
        rows = self._read(
            f"SELECT {', '.join(HOLDERS.columns)} FROM holders WHERE id IN "
            "(SELECT max(id) FROM holders WHERE workload <> '' AND title <> '' GROUP BY workload) "
            "ORDER BY id DESC LIMIT ?",
            (most,),
        )
        return [EnergyHolder._make((*row[:7], tuple(sorted(json.loads(row[7]).items())))) for row in reversed(rows)]

    def last_work_ends(self) -> dict[tuple[str, str], float]:
        """The end of the newest increment by workload and unit. Raises LedgerError."""
        return {(name, unit): until_s for name, unit, until_s in self._read("SELECT workload, unit, until FROM works")}

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

        Raises LedgerError; LedgerRefused where the disk is well and something in it cannot be written; LedgerInDoubt, and
        then `settle` must be called before anything else is added.
        """
        part = _Part(list(entries), list(measured), list(windows), list(worked))
        with self._writing(WriteOutcome({}, {}), part.hours, now_s=now_s) as (transaction, added):
            added.namespaces = self._add(transaction, part, added.namespaces)

    def add_each(
        self, parts: Mapping[str, NodeEntries], worked: Iterable[WorkEntry] = (), *, now_s: int
    ) -> WriteOutcome:
        """The same for each node by itself: one whose part cannot be written leaves the others'. Raises LedgerError."""
        outcome = WriteOutcome({}, {})
        named = {
            name: _Part(part.entries, part.measured, [] if part.newest is None else [part.newest], [])
            for name, part in parts.items()
        }
        named[""] = _Part([], [], [], list(worked))
        hours = {hour for part in named.values() for hour in part.hours}
        with self._writing(outcome, hours, now_s=now_s) as (transaction, added):
            for name, part in named.items():
                try:
                    with transaction.part():
                        namespaces = self._add(transaction, part, added.namespaces)
                except LedgerPartRefused as error:
                    (outcome.failed if error.is_damage else outcome.refused)[name] = str(error)
                    self._forget_ids()
                    self._forget_rows()
                else:
                    added.namespaces = namespaces
        return outcome

    @contextmanager
    def _writing(
        self, outcome: WriteOutcome, hours: Collection[int], *, now_s: int
    ) -> Iterator[tuple[LedgerTransaction, "_Added"]]:
        """A transaction that has the next number; afterwards what is in memory is as on the disk."""
        assert self._doubt is None, "a write is in doubt"
        revision, added = self.revision + 1, _Added(self.namespaces)
        try:
            with self._transaction(keeps_rows=True) as transaction:
                revision = self.revision + 1
                added.namespaces = self.namespaces
                self._take_number(transaction, revision)
                yield transaction, added
                is_behind = self.marks.record_changed_hours(transaction, hours, revision=revision, now_s=now_s)
        except LedgerInDoubt:
            self._doubt = _Doubt(revision, outcome)
            self._forget_ids()
            self._forget_rows()
            raise
        except BaseException:
            # What was given an id in there has none, and no row has what was added.
            self._forget_ids()
            self._forget_rows()
            raise
        self.revision, self.namespaces = revision, added.namespaces
        self.database.note_revision(revision)
        if is_behind:
            self._read_marks()

    @contextmanager
    def replace_all(self, revision: int) -> Iterator[LedgerTransaction]:
        """A transaction in which an empty ledger is filled with a copy of another, whose last number it takes."""
        with self._transaction(is_long=True) as transaction:
            yield transaction
            self._take_number(transaction, revision)
        self._read_all()

    def mark_moved(self, target: str) -> None:
        """Says where the ledger goes on; nobody opens this one again. Raises LedgerError."""
        with self._transaction() as transaction:
            transaction.change("UPDATE ledger SET moved = ?", (target,))

    def _read_all(self) -> None:
        with self._transaction() as transaction:
            self._load(transaction)
        self.database.note_revision(self.revision)

    def _take_number(self, transaction: LedgerTransaction, revision: int) -> None:
        """Gives a transaction its number; a second writer would find it taken."""
        if transaction.change("UPDATE ledger SET revision = ? WHERE revision = ?", (revision, self.revision)) != 1:
            raise LedgerError(self.path, "somebody else wrote to it", "stop whatever else writes to this database")

    @property
    def is_in_doubt(self) -> bool:
        """Whether a write may be on disk or not, so that `settle` is to be called."""
        return self._doubt is not None

    def settle(self) -> WriteOutcome | None:
        """Finds out whether the write in doubt is on the disk: what became of it then, else None. Raises LedgerError."""
        assert self._doubt is not None, "no write is in doubt"
        with self._transaction():
            is_there, outcome = self.revision == self._doubt.revision, self._doubt.outcome
        self._doubt = None
        self.database.note_revision(self.revision)
        return outcome if is_there else None

    def _add(self, transaction: LedgerTransaction, part: "_Part", namespaces: NamespaceSums) -> NamespaceSums:
        """Adds a part within a transaction; returns the counters then."""
        checks: _Checks = {}
        self._add_spent(transaction, part, checks)
        after = self._add_to_namespaces(transaction, part.entries, namespaces)
        self._add_work(transaction, part.worked, checks)
        for table, changed in checks.items():
            transaction.change_each(sql_add_check(table), [(*key, *check) for key, check in changed.items()])
        rows = [(one.node_name, str(one.incarnation), one.number, float(one.until_s)) for one in part.windows]
        transaction.change_each(
            "INSERT INTO windows (node, incarnation, number, until, crc) VALUES (?, ?, ?, ?, ?) ON CONFLICT (node) DO UPDATE "
            "SET incarnation = excluded.incarnation, number = excluded.number, until = excluded.until, crc = excluded.crc",
            [(*row, crc_of(0, *row[:3])) for row in rows],
        )
        return after

    def confirm(self, export: ExportClaim, *, now_s: int) -> None:
        """Somebody has these rows elsewhere; raises FailedPrecondition, ResourceExhausted and LedgerError."""
        with self._transaction() as transaction:
            self.marks.confirm(transaction, export, now_s=now_s)
        self._read_marks()

    def remove_exporter(self, name: str) -> None:
        """His rows go by their age again; raises NotFound and LedgerError."""
        with self._transaction() as transaction:
            self.marks.remove(transaction, name)
        self._read_marks()

    def _read_marks(self) -> None:
        with self.database.snapshot() as read:
            self.marks.load(read)

    def settled_s(self, now_s: int) -> int:
        """Until when hours are settled (`ledger.settled_s`); raises LedgerError."""
        return settled_s([until_s for (until_s,) in self._read("SELECT until FROM windows")], now_s)

    def begun_s(self) -> int | None:
        """The oldest hour that is known by itself, None without any; raises LedgerError."""
        ((first_s,),) = self._read("SELECT min(at) FROM hourly")
        return None if first_s is None else int(first_s)

    def _add_spent(self, transaction: LedgerTransaction, part: "_Part", checks: "_Checks") -> None:
        places = (one.place for many in (part.entries, part.measured) for one in many)
        holder_ids = self._resolve_ids(transaction, HOLDERS, (one.holder for one in part.entries), _holder_names)
        place_ids = self._resolve_ids(transaction, PLACES, places, _plain_text)
        spent = [((one.hour_s, place_ids[one.place], holder_ids[one.holder]), one.spent) for one in part.entries]
        drawn = [
            ((one.hour_s, place_ids[one.place]), (one.total_mj, one.uncertainty_mj, one.uncounted_s))
            for one in part.measured
        ]
        self._add_cells(transaction, SPENT, spent, checks)
        self._add_cells(transaction, MEASURED, drawn, checks)

    def _add_cells(
        self,
        transaction: LedgerTransaction,
        kind: CellKind,
        more: Sequence[tuple[CellKey, Sequence[float]]],
        checks: "_Checks",
    ) -> None:
        """Adds amounts to the rows of hours and days, and what that changes to `checks`, by table."""
        if not more:
            return
        check_amounts(kind, [amounts for _, amounts in more])
        if self.damage:
            # Somebody may be about to put right what is on disk.
            self._forget_rows()
        for table, span_s in SPANS:
            added = sum_cells(more, span_s)
            more = list(added.items())
            name = f"{table}{kind.suffix}"
            merged = self._kept[name].add(added, partial(transaction.find_cells, name, kind.keys, kind.amounts))
            transaction.write_cells(name, kind.keys, kind.amounts, merged.rows)
            known = checks.setdefault(table, {})
            for part, (many, digest) in merged.checks.items():
                before = known.get(part, (0, 0))
                known[part] = before[0] + many, before[1] + digest

    def _add_to_namespaces(
        self, transaction: LedgerTransaction, entries: Iterable[LedgerEntry], namespaces: NamespaceSums
    ) -> NamespaceSums:
        spent_mj: Counter[str] = Counter()
        for one in entries:
            spent_mj[_plain_label(one.holder.kind, one.holder.namespace)] += one.spent.energy_mj
        after, changed = namespaces.plus(spent_mj)
        rows = [(name, one.spent_mj, one.own_mj, int(one.is_shown)) for name, one in changed.items()]
        transaction.change_each(
            "INSERT INTO namespaces (name, spent, own, shown, crc) VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "spent = excluded.spent, own = excluded.own, shown = excluded.shown, crc = excluded.crc",
            [(*row, crc_of(0, *row)) for row in rows],
        )
        return after

    def _add_work(self, transaction: LedgerTransaction, worked: Sequence[WorkEntry], checks: "_Checks") -> None:
        names = [(one.workload, one.unit) for one in worked]
        ids = self._resolve_ids(transaction, WORKS, names, _plain_text)
        untils_s = {ids[name]: float(one.until_s) for name, one in zip(names, worked, strict=True)}
        transaction.change_each(
            "UPDATE works SET until = ? WHERE id = ?", [(until_s, number) for number, until_s in untils_s.items()]
        )
        rows = [
            ((one.hour_s, ids[name]), (one.amount, one.counted_s, one.missed_s))
            for name, one in zip(names, worked, strict=True)
        ]
        self._add_cells(transaction, WORKED, rows, checks)

    def _resolve_ids(
        self,
        transaction: LedgerTransaction,
        table: NameTable,
        wanted: Iterable[_Named],
        names_of: Callable[[_Named], StoredNames],
    ) -> Mapping[_Named, int]:
        """Ids of what has names, among others; names that are new are given ids in the order in which they came."""
        known, distinct = self._ids[table], dict.fromkeys(wanted)
        if missing := [one for one in distinct if one not in known]:
            if len(known) > _NAMES_KNOWN_MOST:
                known.clear()
                missing = list(distinct)
            names = {one: names_of(one) for one in missing}
            asked = dict.fromkeys(names.values())
            stored = dict(transaction.find_names(table, asked))
            if new := [one for one in asked if one not in stored]:
                ((last,),) = transaction.read(f"SELECT coalesce(max(id), 0) FROM {table.name}")
                rows = list(enumerate(new, last + 1))
                transaction.add_names(table, rows)
                stored.update({one: number for number, one in rows})
            known.update({one: stored[its] for one, its in names.items()})
        return known

    def _forget_rows(self) -> None:
        for kept in self._kept.values():
            kept.forget()

    def _forget_ids(self) -> None:
        for known in self._ids.values():
            known.clear()

    def prune_rows(self, *, now_s: int) -> int:
        """Lets go of some rows that are too old, and of holders without rows; how many rows went. Raises LedgerError."""
        gone = 0
        untils_s = [one.until_s for one in self.marks.exporters.values()]
        with self._transaction() as transaction:
            changed = [hour for (hour,) in transaction.read("SELECT DISTINCT hour FROM changes")]
            for (table, span_s), kept_s in zip(SPANS, (HOURS_KEPT_S, DAYS_KEPT_S), strict=True):
                kept = {hour // span_s * span_s for hour in changed}
                before_s, done = retention_cutoff_s(now_s, kept_s, span_s, untils_s), 0
                for at_s in _old_times(transaction, table, before_s):
                    if at_s not in kept and done < _FORGOTTEN_ONCE:
                        done += _forget_span(transaction, table, at_s)
                gone += done
                if table == "daily" and 0 < done < _FORGOTTEN_ONCE:
                    self._forget_holders(transaction)
            transaction.change(
                "DELETE FROM works WHERE id IN (SELECT id FROM works WHERE until < ? EXCEPT SELECT work FROM daily_work)",
                (now_s - DAYS_KEPT_S,),
            )
            transaction.change("DELETE FROM hours WHERE hour < ?", (now_s - DAYS_KEPT_S,))
        self._ids[WORKS].clear()
        return gone

    def witnessed_s(self, now_s: int) -> int:
        """The time to forget by: not far after the newest windows of three nodes, whatever our clock says.

        A clock that is years ahead would let everything go. Raises LedgerError.
        """
        ends_s = sorted(self.last_window_ends().values(), reverse=True)[:_WITNESSES]
        return int(min(now_s, ends_s[-1] + _WITNESSED_S)) if ends_s else now_s

    def _forget_holders(self, transaction: LedgerTransaction) -> None:
        """Days are kept longest, so who has none has no hours."""
        transaction.change("DELETE FROM holders WHERE id IN (SELECT id FROM holders EXCEPT SELECT holder FROM daily)")
        self._ids[HOLDERS].clear()

    def used_bytes(self) -> int:
        """What its rows need, without what is free. Raises LedgerError."""
        with self.database.snapshot() as read:
            return self.database.measure_bytes(read)

    def shrink(self, *, now_s: int, bytes_most: int) -> int:
        """Lets go of one hour or one day, whoever has it, where the file is larger than that; how many rows went.

        Of the hours and the days it is those whose oldest has used up most of the time that it is kept, so that both
        become shorter alike; an hour leaves before its day. Raises LedgerError.
        """
        if self.used_bytes() <= bytes_most:
            return 0
        with self._transaction() as transaction:
            oldest = {table: transaction.read(f"SELECT min(at) FROM {table}")[0][0] for table, _ in SPANS}
            hour_s, day_s = oldest["hourly"], oldest["daily"]
            if day_s is None:
                return 0
            is_day = hour_s is None or (
                day_s + DAY_S <= hour_s and (now_s - day_s) * HOURS_KEPT_S > (now_s - hour_s) * DAYS_KEPT_S
            )
            table, at_s = ("daily", day_s) if is_day else ("hourly", hour_s)
            gone = sum(_forget_span(transaction, table, one) for one in _old_times(transaction, table, at_s + 1))
            if is_day:
                self._forget_holders(transaction)
        return gone

    def query(self, asked: LedgerQuery) -> LedgerAnswer:
        """The answer, all of it of one moment, whatever is written meanwhile; raises LedgerError."""
        (answer,) = self.query_all((asked,))
        return answer

    def query_all(self, asked: Sequence[LedgerQuery]) -> list[LedgerAnswer]:
        """The same for questions of one stretch with the same filters, which costs less than each alone."""
        try:
            with self.database.snapshot() as read:
                ((revision,),) = read("SELECT revision FROM ledger", ())
                found, damage = answer_queries(read, asked)
        except LedgerUnreadable as error:
            self.index_is_damaged = error.can_mend
            raise LedgerError(self.path, str(error), "ask again" if error.can_mend else _DAMAGED) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise LedgerError(self.path, f"a row cannot be read: {error}", _DAMAGED) from error
        self._note_damage(damage, {piece for one in asked for piece in pieces_of(one)})
        return [replace(one, revision=revision, damaged=one.damaged + self.losses) for one in found]

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
        with self.database.snapshot() as read:
            ((first_s,),) = read("SELECT min(at) FROM daily WHERE at > ?", (self._scrub_s,))
            self._scrub_s = -1 if first_s is None else first_s
            if first_s is None:
                return
            pieces = [(table, first_s, first_s + DAY_S) for table, _ in SPANS]
            found = damaged_parts(read, pieces)
        self._note_damage(self.damage._replace(parts=tuple(found)), pieces)

    def mend_indexes(self) -> None:
        """Makes indexes anew from their tables. Raises LedgerError."""
        self.database.mend_indexes()
        self.index_is_damaged = False

    def _read(self, sql: str, given: Iterable[Any] = ()) -> list[Any]:
        with self.database.snapshot() as read:
            return read(sql, given)

    def close(self) -> None:
        """Lets go of the database."""
        self.database.close()


@dataclass(frozen=True, slots=True)
class _Part:
    """What is added together."""

    entries: list[LedgerEntry]
    measured: list[MeasuredEnergy]
    windows: list[LastWindow]
    worked: list[WorkEntry]

    @property
    def hours(self) -> set[int]:
        """Hours that it adds to."""
        return {one.hour_s for many in (self.entries, self.measured, self.worked) for one in many}


# What is added to checks: by table, by time and place, rows and their checksums.
_Checks = dict[str, dict[tuple[int, int], tuple[int, int]]]


@dataclass(slots=True)
class _Added:
    """What is in memory once a transaction is on disk."""

    namespaces: NamespaceSums


def _check_moved(path: StoreLocation, target: str) -> None:
    if target:
        raise LedgerMoved(path, target)


def _plain(text: str) -> str:
    """A text as every database takes it: PostgreSQL's hold any character but this one."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


@lru_cache(maxsize=_NAMES_KNOWN_MOST)
def _plain_label(kind: str, namespace: str) -> str:
    return _plain(namespace_label(kind, namespace))


def _plain_text(texts: tuple[str, ...]) -> StoredNames:
    return tuple(map(_plain, texts))


def _holder_names(holder: EnergyHolder) -> StoredNames:
    labels = {_plain(name): _plain(value) for name, value in holder.labels}
    return (*_plain_text(holder[:-1]), json.dumps(labels))


def _drop_damaged(transaction: LedgerTransaction) -> int:
    """Lets go of records of nodes and counters that are not as they were written; how many."""
    dropped = 0
    for table, columns in (("windows", "node, incarnation, number"), ("namespaces", "name, spent, own, shown")):
        rows = transaction.read(f"SELECT crc, {columns} FROM {table}")
        bad = [(row[1],) for row in rows if row[0] != crc_of(0, *row[1:])]
        transaction.change_each(f"DELETE FROM {table} WHERE {columns.partition(',')[0]} = ?", bad)
        dropped += len(bad)
    return dropped


def _old_times(transaction: LedgerTransaction, table: str, before_s: int) -> list[int]:
    """Some of the hours or days before then that have rows, oldest first."""
    tables = (*(f"{table}{kind.suffix}" for kind in CELL_KINDS), f"{table}_check")
    times = " UNION ".join(f"SELECT at FROM {name} WHERE at < ?" for name in tables)
    sql = f"SELECT at FROM ({times}) r ORDER BY at LIMIT {_FORGOTTEN_ONCE}"
    return [at_s for (at_s,) in transaction.read(sql, (before_s,) * len(tables))]


def _forget_span(transaction: LedgerTransaction, table: str, at_s: int) -> int:
    """Lets go of all rows of an hour or a day, and of their checks; how many rows."""
    transaction.change(f"DELETE FROM {table}_check WHERE at = ?", (at_s,))
    return sum(transaction.change(f"DELETE FROM {table}{kind.suffix} WHERE at = ?", (at_s,)) for kind in CELL_KINDS)
