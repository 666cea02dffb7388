"""No row that an exporter does not have is lost, and what he has is the ledger: against a twin that keeps everything."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests import postgres_rig
from tests.builders.stores import postgres_ledger, sqlite_ledger

from eelgrid_controller.energy.ledger import (
    DAY_S,
    EXPORTERS_MOST,
    HOUR_S,
    SILENT_S,
    EnergyHolder,
    ExportClaim,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
    MeasuredEnergy,
    parse_query,
)
from eelgrid_controller.energy.store.ledger_store import LastWindow, open_ledger
from eelgrid_protos.faults import FailedPrecondition, NotFound, ResourceExhausted

BEGIN_S = 1_799_971_200  # a midnight
PLACES = [LedgerPlace("n1", "p", "H100"), LedgerPlace("n2", "p", "H100")]
HOLDERS = [EnergyHolder("pod", "ml", "a"), EnergyHolder("pod", "web", "b"), EnergyHolder("unallocated")]
NAMES = ["archive", "billing"]
# Each commit waits for the disk, of which there are thousands here.
MEMORY = Path("/dev/shm")
# As ledger.py has it.
SPAN_S_MOST = 5 * 366 * DAY_S
# Rows go by age after 400 days and five years; so far does a jump of the clock go, and so late may a window be.
JUMPS_S = [HOUR_S // 3, HOUR_S, 5 * HOUR_S, 3 * DAY_S, 300 * DAY_S, 900 * DAY_S]
LATE_HOURS = 9_000


def key(row):
    return row.values[0], row.values[1], row.values[2]


class Ledger(RuleBasedStateMachine):
    """Joules by hour, namespace and node; `had` is what each exporter has joined, an hour of a later export for one before."""

    made_ledger = staticmethod(sqlite_ledger)

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.ledger, self.stack = None, ExitStack()
        self.begin()
        self.now_s = BEGIN_S
        self.truth = {}
        self.had = {}
        self.excused = {}  # hours that had no rows any more when somebody became an exporter
        self.marks = {}
        self.read = []  # exports that are not confirmed
        self.told_s = {}
        self.number = 0

    def begin(self):
        if self.ledger is None:
            self.ledger = self.stack.enter_context(self.made_ledger(Path(self.folder.name)))
        self.store = self.ledger.open()

    @initialize()
    def somebody_exports(self):
        for hour in range(3):
            self.now_s = BEGIN_S + hour * HOUR_S
            self._book(self.now_s, hour % 2, 0, 1000 + hour)
        self.now_s += 2 * HOUR_S
        self._export(NAMES[0], BEGIN_S, self.now_s)
        self.confirm(0)

    def _book(self, at_s, place, holder, energy_mj):
        hour_s = at_s // HOUR_S * HOUR_S
        node = PLACES[place].node_name
        self.number += 1
        self.told_s[node] = at_s
        self.store.add(
            [LedgerEntry(hour_s, PLACES[place], HOLDERS[holder], LedgerAmount(active_mj=energy_mj))],
            [MeasuredEnergy(hour_s, PLACES[place], energy_mj, 0, 0.0)],
            [LastWindow(node, 1, self.number, float(at_s))],
            now_s=self.now_s,
        )
        named = HOLDERS[holder].namespace or f"({HOLDERS[holder].kind})"
        rows = self.truth.setdefault(hour_s, {})
        rows[named, node] = rows.get((named, node), 0) + energy_mj

    @rule(place=st.integers(0, 1), holder=st.integers(0, 2), energy_mj=st.integers(1, 10**9))
    def book(self, place, holder, energy_mj):
        self._book(self.now_s, place, holder, energy_mj)

    @rule(late_h=st.one_of(st.integers(0, 30), st.integers(0, LATE_HOURS)), place=st.integers(0, 1))
    def book_late(self, late_h, place):
        """An agent that was away tells of the past; what rows of that hour are gone for their age cannot change any more."""
        at_s = max(BEGIN_S, self.now_s - late_h * HOUR_S)
        self._book(at_s, place, 1, 7)

    @rule(jump_s=st.sampled_from(JUMPS_S))
    def wait(self, jump_s):
        self.now_s += jump_s
        self.forget()

    @rule()
    def forget(self):
        while self.store.prune_rows(now_s=self.now_s):
            pass

    @rule()
    def restart(self):
        self.store.close()
        self.begin()

    def _hours(self, begin_s, end_s):
        """Rows of the ledger as eelctl exports them."""
        asked = parse_query(
            begin_ns=begin_s * 10**9,
            end_ns=end_s * 10**9,
            group_by=("hour", "namespace", "node"),
            filters={},
            rows_most=10_000,
            with_nobody=True,
        )
        answer = self.store.query(asked)
        assert not answer.left_out_rows
        assert answer.owned.energy_mj == answer.total.energy_mj
        found = {}
        for group in answer.groups:
            hour, named, node = group.values
            found.setdefault(int(hour), {})[named, node] = group.spent.energy_mj
        return found, answer.revision

    @rule(
        name=st.sampled_from(NAMES),
        ahead_h=st.integers(-40, 3),
        length_h=st.one_of(st.integers(1, 60), st.just(20_000)),
    )
    def export(self, name, ahead_h, length_h):
        """From somewhere about the mark, or about now where there is none."""
        mark = self.store.marks.exporters.get(name)
        begin_s = max(BEGIN_S, (mark.until_s if mark else self.now_s // HOUR_S * HOUR_S) + ahead_h * HOUR_S)
        self._export(name, begin_s, begin_s + length_h * HOUR_S)

    @rule(name=st.sampled_from(NAMES))
    def export_what_is_new(self, name):
        """As a job does it that runs now and then."""
        if name in self.store.marks.exporters:
            self._export(name, self.store.marks.exporters[name].until_s, self.now_s)

    @precondition(lambda self: any(one.changed for one in self.store.marks.exporters.values()))
    @rule()
    def export_what_changed(self):
        for one in self.store.marks.exporters.values():
            if one.changed:
                self._export(one.name, one.changed.first_s, one.changed.last_s + HOUR_S)

    def _export(self, name, begin_s, end_s):
        settled_s = self.store.settled_s(self.now_s)
        # A question is of five years at the most; who lacks more exports them one after the other.
        end_s = min(end_s, settled_s, begin_s + SPAN_S_MOST)
        if end_s > begin_s:
            rows, revision = self._hours(begin_s, end_s)
            self.read.append((ExportClaim(name, begin_s, end_s, revision), rows))

    @precondition(lambda self: self.read)
    @rule(place=st.integers(0, 3))
    def confirm(self, place):
        export, rows = self.read.pop(min(place, len(self.read) - 1))
        mark = self.store.marks.exporters.get(export.name)
        # A node may have come back since it was read, and is not as far.
        is_early = export.end_s > self.store.settled_s(self.now_s)
        if is_early or (mark is not None and export.begin_s > mark.until_s):
            with pytest.raises(FailedPrecondition, match="not all nodes" if is_early else "gap"):
                self.store.confirm(export, now_s=self.now_s)
            return
        self.store.confirm(export, now_s=self.now_s)
        since_s = self.store.marks.exporters[export.name].since_s
        new = [at_s for at_s in self.truth if since_s <= at_s and (mark is None or at_s < mark.since_s)]
        self.excused.setdefault(export.name, set()).update(at_s for at_s in new if at_s not in self._kept("hourly"))
        # Rows of an hour replace those of an export before; an hour that is gone for its age has none.
        self.had.setdefault(export.name, {}).update(rows)

    @rule(name=st.sampled_from(NAMES))
    def confirm_too_much(self, name):
        """What is not over, and what another ledger said."""
        settled_s = self.store.settled_s(self.now_s)
        _, revision = self._hours(BEGIN_S, BEGIN_S + HOUR_S)
        for export, field in (
            (ExportClaim(name, settled_s, settled_s + HOUR_S, revision), "end_ns"),
            (ExportClaim(name, settled_s - HOUR_S, settled_s, revision + 1), "revision"),
        ):
            with pytest.raises(FailedPrecondition) as refused:
                self.store.confirm(export, now_s=self.now_s)
            assert [one.field for one in refused.value.violations] == [field]

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name):
        if name not in self.store.marks.exporters:
            with pytest.raises(NotFound):
                self.store.remove_exporter(name)
            return
        self.store.remove_exporter(name)
        self.had.pop(name, None)
        self.excused.pop(name, None)
        self.marks.pop(name, None)
        self.read = [one for one in self.read if one[0].name != name]

    @invariant()
    def what_is_settled_was_told_by_all_who_were_heard(self):
        settled_s = self.store.settled_s(self.now_s)
        assert settled_s <= self.now_s
        assert all(at_s >= settled_s for at_s in self.told_s.values() if at_s >= self.now_s - SILENT_S)

    @invariant()
    def an_exporter_has_the_ledger_and_the_rest_is_there(self):
        changed = self._changed()
        for name, mark in self.store.marks.exporters.items():
            before = self.marks.get(name)
            assert before is None or (mark.until_s >= before.until_s and mark.since_s <= before.since_s)
            self.marks[name] = mark
            assert (mark.changed.hours if mark.changed else 0) == len(changed.get(name, ()))
            joined, missing = self.had[name], []
            for hour, rows in self.truth.items():
                if hour in self.excused[name]:
                    continue
                if mark.since_s <= hour < mark.until_s and hour not in changed.get(name, ()):
                    assert joined.get(hour, {}) == rows
                elif hour >= mark.since_s:
                    missing.append(hour)
            self._are_there(missing)

    def _changed(self):
        found = {}
        for name, hour in self.store._read("SELECT exporter, hour FROM changes"):
            found.setdefault(name, set()).add(hour)
        return found

    def _kept(self, table):
        return dict(self.store._read(f"SELECT at, sum(bare + context + active) FROM {table} GROUP BY at"))

    def _are_there(self, hours):
        for table, span_s in (("hourly", HOUR_S), ("daily", DAY_S)):
            kept = self._kept(table)
            wanted = {hour // span_s * span_s for hour in hours}
            for at_s in wanted:
                told_mj = sum(
                    sum(rows.values()) for hour, rows in self.truth.items() if hour // span_s * span_s == at_s
                )
                assert kept[at_s] == told_mj

    def teardown(self):
        self.store.close()
        self.stack.close()
        self.folder.cleanup()


class PostgresLedger(Ledger):
    """The same on PostgreSQL."""

    made_ledger = staticmethod(postgres_ledger)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestPostgresLedger = postgres_rig.needs_server(PostgresLedger.TestCase)
TestPostgresLedger.settings = settings(max_examples=5, stateful_step_count=30, deadline=None)


def test_there_are_only_so_many_exporters(tmp_path):
    store = open_ledger(tmp_path)
    for number in range(EXPORTERS_MOST):
        store.confirm(ExportClaim(f"e-{number}", BEGIN_S, BEGIN_S + HOUR_S, 0), now_s=BEGIN_S + DAY_S)
    with pytest.raises(ResourceExhausted, match="eelctl exporters remove"):
        store.confirm(ExportClaim("one-more", BEGIN_S, BEGIN_S + HOUR_S, 0), now_s=BEGIN_S + DAY_S)
    store.confirm(ExportClaim("e-3", BEGIN_S, BEGIN_S + 2 * HOUR_S, 0), now_s=BEGIN_S + DAY_S)
    store.remove_exporter("e-3")
    store.confirm(ExportClaim("one-more", BEGIN_S, BEGIN_S + HOUR_S, 0), now_s=BEGIN_S + DAY_S)
    assert len(store.marks.exporters) == EXPORTERS_MOST
    store.close()
