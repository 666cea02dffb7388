"""Marks of exporters: what they keep, what moves them and what does not, and what the bound on the size lets go."""

from contextlib import closing

import pytest
from tests.builders.stores import LEDGER_STORES

from eelgrid_controller.energy.ledger import (
    DAY_S,
    HOUR_S,
    ChangedHours,
    EnergyHolder,
    ExportClaim,
    Exporter,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
    MeasuredEnergy,
    advance_mark,
    parse_export,
    parse_query,
    settled_s,
)
from eelgrid_controller.energy.store.ledger_store import DAYS_KEPT_S, HOURS_KEPT_S, LastWindow
from eelgrid_controller.state.measurements import WorkInterval, spread_work
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument

BEGIN_S = 1_799_971_200  # a midnight
PLACE = LedgerPlace("n1", "p", "H100")


@pytest.fixture(params=LEDGER_STORES)
def ledger(request, tmp_path):
    with request.param(tmp_path) as found:
        yield found


@pytest.fixture
def store(ledger):
    with closing(ledger.open()) as store:
        yield store


def book(store, hour, energy_mj=1000, *, holder="a", now_s=None):
    """An hour of one node, counted from the first."""
    at_s = BEGIN_S + hour * HOUR_S
    store.add(
        [LedgerEntry(at_s, PLACE, EnergyHolder("pod", "ml", holder), LedgerAmount(active_mj=energy_mj))],
        [MeasuredEnergy(at_s, PLACE, energy_mj, 0, 0.0)],
        [LastWindow("n1", 1, hour + 1, at_s + HOUR_S)],
        now_s=now_s or at_s,
    )


def export(store, begin, end, *, name="archive", now_s=None):
    """Hours as they are now, confirmed at once."""
    done = ExportClaim(name, BEGIN_S + begin * HOUR_S, BEGIN_S + end * HOUR_S, revision(store))
    store.confirm(done, now_s=now_s or BEGIN_S + 400 * DAY_S)


def revision(store):
    asked = parse_query(begin_ns=0, end_ns=HOUR_S * 10**9, group_by=(), filters={}, rows_most=1)
    return store.query(asked).revision


def forget(store, age_s):
    while store.prune_rows(now_s=BEGIN_S + age_s):
        pass


def kept(store, table):
    """Hours since the first, of which there are rows."""
    return [(at_s - BEGIN_S) // HOUR_S for (at_s,) in store._read(f"SELECT DISTINCT at FROM {table} ORDER BY at")]


def test_rows_that_an_exporter_does_not_have_stay_whatever_their_age(store):
    for hour in range(0, 72, 6):
        book(store, hour)
    export(store, 0, 30)
    forget(store, 10 * DAYS_KEPT_S)
    assert kept(store, "hourly") == [30, 36, 42, 48, 54, 60, 66]
    # The day of which he has a part stays as well.
    assert kept(store, "daily") == [24, 48]
    assert kept(store, "hourly_measured") == kept(store, "hourly")
    export(store, 30, 72)
    forget(store, 10 * DAYS_KEPT_S)
    assert kept(store, "hourly") == kept(store, "daily") == kept(store, "daily_measured") == []


def test_without_an_exporter_rows_go_by_age(store):
    for hour in range(0, 72, 6):
        book(store, hour)
    export(store, 0, 6)
    store.remove_exporter("archive")
    forget(store, HOURS_KEPT_S + 30 * HOUR_S)
    assert kept(store, "hourly") == [30, 36, 42, 48, 54, 60, 66]
    assert kept(store, "daily") == [0, 24, 48]
    forget(store, DAYS_KEPT_S + 2 * DAY_S)
    assert kept(store, "daily") == [48]


def test_the_one_who_is_furthest_behind_decides(store):
    for hour in range(4):
        book(store, hour)
    export(store, 0, 4)
    export(store, 0, 1, name="billing")
    forget(store, 10 * DAYS_KEPT_S)
    assert kept(store, "hourly") == [1, 2, 3]


@pytest.mark.parametrize("late", [0, 5, 29])
def test_an_hour_that_changes_after_it_was_confirmed_stays_and_is_reported_until_it_is_exported_again(store, late):
    for hour in range(48):
        book(store, hour)
    export(store, 0, 48)
    later_s = BEGIN_S + 40 * DAY_S
    book(store, late, 7, now_s=later_s)
    (mark,) = store.marks.exporters.values()
    late_s = BEGIN_S + late * HOUR_S
    assert mark == Exporter("archive", BEGIN_S, BEGIN_S + 48 * HOUR_S, ChangedHours(1, late_s, late_s, later_s))
    assert mark.lag_s(later_s + 60.0) == later_s + 60.0 - mark.until_s
    assert mark._replace(until_s=later_s + 50).lag_s(later_s + 60.0) == 60.0
    forget(store, 10 * DAYS_KEPT_S)
    assert kept(store, "hourly") == [late]
    assert kept(store, "daily") == [late // 24 * 24]
    export(store, late, late + 1)
    (mark,) = store.marks.exporters.values()
    assert (mark.changed, mark.until_s) == (None, BEGIN_S + 48 * HOUR_S)
    forget(store, 10 * DAYS_KEPT_S)
    assert kept(store, "hourly") == kept(store, "daily") == []


def test_what_changed_between_reading_and_confirming_is_reported(store):
    book(store, 0)
    book(store, 1)
    read = revision(store)
    book(store, 1, 5)
    store.confirm(ExportClaim("archive", BEGIN_S, BEGIN_S + 2 * HOUR_S, read), now_s=BEGIN_S + DAY_S)
    assert store.marks.exporters["archive"].changed == ChangedHours(
        1, BEGIN_S + HOUR_S, BEGIN_S + HOUR_S, BEGIN_S + DAY_S
    )


def test_work_that_is_reported_late_changes_an_hour_as_joules_do(store):
    book(store, 0)
    export(store, 0, 1)
    store.add(
        [], [], [], spread_work(WorkInterval("w", "step", 5.0, BEGIN_S + 60.0, BEGIN_S + 120.0), None), now_s=BEGIN_S
    )
    assert store.marks.exporters["archive"].changed.first_s == BEGIN_S


def test_hours_before_the_first_export_are_nobody_s_business(store):
    book(store, 10)
    export(store, 10, 11)
    book(store, 3)
    assert store.marks.exporters["archive"].changed is None
    # He takes what is before, too: from then on it is.
    export(store, 0, 10)
    book(store, 3)
    assert store.marks.exporters["archive"].changed.hours == 1
    assert store.marks.exporters["archive"].since_s == BEGIN_S


def test_marks_survive_a_restart(ledger):
    with closing(ledger.open()) as store:
        book(store, 0)
        export(store, 0, 1)
        book(store, 0, 5)
        before = dict(store.marks.exporters)
    with closing(ledger.open()) as again:
        assert again.marks.exporters == before


def test_a_file_that_is_too_large_lets_go_of_the_oldest_whoever_has_it(store):
    for hour in range(0, 24 * 90, 3):
        book(store, hour, holder=f"pod-{hour}-" + 200 * "x")
    export(store, 0, 3)
    most, last_s = store.used_bytes() // 2, BEGIN_S + 90 * DAY_S
    assert store.shrink(now_s=last_s, bytes_most=store.used_bytes()) == 0
    gone = 0
    while found := store.shrink(now_s=last_s, bytes_most=most):
        gone += found
    assert gone
    assert store.used_bytes() <= most
    hours, days = kept(store, "hourly"), kept(store, "daily")
    assert hours == list(range(hours[0], 24 * 90, 3))
    assert days == list(range(days[0], 24 * 90, 24))
    # An hour leaves before its day, and names that nobody has left, too.
    assert days[0] <= hours[0]
    ((names,),) = store._read("SELECT count(*) FROM holders")
    assert names == len(range(days[0], 24 * 90, 3))
    while store.shrink(now_s=last_s, bytes_most=0):
        pass
    assert kept(store, "hourly") == kept(store, "daily") == []


@pytest.mark.parametrize(
    ("ends_h", "now_h", "settled_h"),
    [
        ([], 10.5, 10),
        ([], 10.1, 9),  # minutes after the hour, some may be under way
        ([10.4, 10.3], 10.5, 10),
        ([10.4, 8.9], 10.5, 8),
        ([10.4, 8.0], 10.5, 8),
        ([40.0, 15.9], 40.0, 39),  # silent for a day
        ([40.0, 16.0], 40.0, 16),
        ([99.0], 40.5, 40),  # a clock ahead
    ],
)
def test_an_hour_is_settled_when_all_who_were_heard_have_told_it(ends_h, now_h, settled_h):
    ends_s = [BEGIN_S + hours * HOUR_S for hours in ends_h]
    assert (settled_s(ends_s, BEGIN_S + now_h * HOUR_S) - BEGIN_S) / HOUR_S == settled_h


@pytest.mark.parametrize(
    ("begin", "end", "revision", "field"),
    [(0, 6, 9, "end_ns"), (4, 5, 9, "begin_ns"), (0, 1, 10, "revision")],
)
def test_a_mark_that_would_be_a_lie_is_refused_and_stays(begin, end, revision, field):
    mark = Exporter("archive", 0, 3 * HOUR_S)
    with pytest.raises(FailedPrecondition) as refused:
        advance_mark(
            mark,
            ExportClaim("archive", begin * HOUR_S, end * HOUR_S, revision),
            settled_s=5 * HOUR_S,
            revision=9,
            others=1,
        )
    (broken,) = refused.value.violations
    assert broken.field == field
    assert broken.remedy


def test_a_mark_moves_only_forward():
    mark = Exporter("archive", 2 * HOUR_S, 9 * HOUR_S)
    for begin, end, expected in ((3, 4, (2, 9)), (3, 12, (2, 12)), (0, 1, (2, 9)), (0, 2, (0, 9)), (9, 10, (2, 10))):
        after = advance_mark(
            mark, ExportClaim("archive", begin * HOUR_S, end * HOUR_S, 0), settled_s=99 * HOUR_S, revision=0, others=1
        )
        assert (after.since_s // HOUR_S, after.until_s // HOUR_S) == expected


@pytest.mark.parametrize(("begin_ns", "end_ns"), [(5, 5), (0, HOUR_S * 10**9 - 1), (1, HOUR_S * 10**9)])
def test_an_export_without_a_whole_hour_is_refused(begin_ns, end_ns):
    with pytest.raises(InvalidArgument, match="no whole hour"):
        parse_export(name="archive", begin_ns=begin_ns, end_ns=end_ns, revision=0)


def test_of_a_stretch_the_whole_hours_are_confirmed():
    found = parse_export(name="archive", begin_ns=1, end_ns=3 * HOUR_S * 10**9 - 1, revision=4)
    assert found == ExportClaim("archive", HOUR_S, 2 * HOUR_S, 4)
