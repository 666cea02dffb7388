"""A ledger whose file is damaged says so, or is right; ledgers of earlier versions become whole ones.

EELGRID_LEDGER_FLIPS=50 flips so many times forty bits, each time others.
"""

import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from eelgrid_controller.energy.ledger import (
    EnergyHolder,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
    MeasuredEnergy,
    parse_query,
)
from eelgrid_controller.energy.store.ledger_store import FILE_NAME, LastWindow, NodeEntries, open_ledger
from eelgrid_controller.energy.store.schema import FORMAT_VERSION, TRIGGERS
from eelgrid_controller.errors import LedgerError
from eelgrid_controller.state.measurements import WorkInterval, spread_work

SECOND_NS = 10**9
BEGIN_S = 1_799_971_200  # a midnight
HOURS = 60
FORMAT_4 = Path(__file__).with_name("energy_format_4.sql")
PLACES = [LedgerPlace(f"node-{number}", "train", "h100-sxm5-80gb") for number in range(3)]
HOLDERS = [
    EnergyHolder("workload", f"team-{number}", "", f"w-{number}", f"job-{number}", "ann", "q", (("team", str(number)),))
    for number in range(5)
] + [EnergyHolder("unallocated")]
QUESTIONS = [(), ("namespace",), ("title", "node"), ("hour",), ("day", "queue"), ("label:team",)]


def book(store, hour):
    at_s = BEGIN_S + 3600 * hour
    entries = [
        LedgerEntry(
            at_s, place, holder, LedgerAmount(10**6 + hour, 10**5 + index, 10**7 * (index + 1) + 17 * hour, 0.25, 1.5)
        )
        for place in PLACES
        for index, holder in enumerate(HOLDERS)
    ]
    totals = [sum(one.spent.energy_mj for one in entries if one.place == place) for place in PLACES]
    measured = [
        MeasuredEnergy(at_s, place, total, total // 20, 1.5) for place, total in zip(PLACES, totals, strict=True)
    ]
    newest = [LastWindow(place.node_name, 7, hour + 1, at_s + 3600.0) for place in PLACES]
    work = spread_work(WorkInterval("w-1", "step", 12.5 + hour, at_s, at_s + 600.0), None)
    store.add(entries, measured, newest, work, now_s=at_s + 3600)


def asked(*group_by, hours=HOURS, rows_most=1000):
    return parse_query(
        begin_ns=BEGIN_S * SECOND_NS,
        end_ns=(BEGIN_S + 3600 * hours) * SECOND_NS,
        group_by=group_by,
        filters={},
        rows_most=rows_most,
    )


def figures(answer):
    """Everything that an answer adds up; money to a millionth, which is less than a price has digits."""

    def spent(found):
        return (*found[:3], round(found.cost, 6), round(found.carbon_g, 6))

    return (
        [(group.values, spent(group.spent), group.done) for group in answer.groups],
        spent(answer.left_out),
        spent(answer.unallocated),
        spent(answer.unattributed),
        answer.measured_mj,
        answer.uncertainty_mj,
        round(answer.uncounted_s, 6),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A ledger of sixty hours, and what it answers."""
    folder = tmp_path_factory.mktemp("whole")
    with closing(open_ledger(folder)) as store:
        for hour in range(HOURS):
            book(store, hour)
        truth = [figures(store.query(asked(*by))) for by in QUESTIONS]
    return folder / FILE_NAME, truth


def said(folder):
    """What a ledger answers to each question; None where it says that it cannot."""
    try:
        with closing(open_ledger(folder)) as store:
            found = []
            for by in QUESTIONS:
                try:
                    answer = store.query(asked(*by))
                except LedgerError:
                    found.append(None)
                else:
                    found.append((figures(answer), answer.damaged))
            return found
    except LedgerError:
        return [None] * len(QUESTIONS)


@pytest.mark.parametrize("seed", range(int(os.environ.get("EELGRID_LEDGER_FLIPS", "3"))))
def test_a_bit_that_flips_anywhere_gives_an_error_or_the_right_sum(tmp_path, whole, seed):
    path, truth = whole
    rng = random.Random(seed)
    raw = path.read_bytes()
    told = 0
    for turn in range(40):
        folder = tmp_path / str(turn)
        folder.mkdir()
        damaged = bytearray(raw)
        place = rng.randrange(len(raw) * 8)
        damaged[place // 8] ^= 1 << place % 8
        (folder / FILE_NAME).write_bytes(damaged)
        for by, found, right in zip(QUESTIONS, said(folder), truth, strict=True):
            if found is None or found[1]:
                told += 1
            else:
                assert found[0] == right, f"bit {place} by {by}: a wrong sum, and nothing was said"
        shutil.rmtree(folder)
    assert told, "some flips are in rows, and are told"


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("UPDATE daily SET active = active + 1 WHERE at = {day} AND place = 1 AND holder = 1", "the day 2027-01-15"),
        (
            "UPDATE hourly SET cost = cost + 0.001 WHERE at = {hour} AND place = 2 AND holder = 1",
            "the hour 2027-01-17 03:00",
        ),
        ("DELETE FROM daily WHERE at = {day} AND place = 3 AND holder = 2", "node node-2"),
        ("UPDATE daily SET holder = 99 WHERE at = {day} AND place = 1 AND holder = 1", "node node-0"),
        ("UPDATE daily_measured SET total = total - 1 WHERE at = {day} AND place = 1", "node node-0"),
        ("UPDATE daily_work SET amount = amount * 2 WHERE at = {day}", "of work"),
        ("UPDATE daily_check SET digest = digest + 1 WHERE at = {day} AND place = 1", "node node-0"),
        ("UPDATE holders SET namespace = 'team-9' WHERE id = 1", "1 owners whose names are damaged"),
        ("UPDATE places SET node = 'other' WHERE id = 1", "1 nodes whose names are damaged"),
        ("UPDATE works SET unit = 'image'", "1 workloads that tell work"),
    ],
)
def test_what_does_not_agree_is_left_out_and_reported_and_the_rest_is_there(tmp_path, whole, sql, words):
    path, truth = whole
    shutil.copy(path, tmp_path / FILE_NAME)
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as raw:
        # As a disk does it: no trigger hears of it.
        for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            raw.execute(f"DROP TRIGGER {name}")
        assert raw.execute(sql.format(day=BEGIN_S, hour=BEGIN_S + 3600 * 51)).rowcount
    with closing(open_ledger(tmp_path)) as store:
        answer = store.query(asked("title", "namespace"))
        assert len(answer.damaged) == 1
        assert words in answer.damaged[0]
        whole_mj = truth[1][4]
        assert 0 < answer.owned.energy_mj <= whole_mj
        assert sum(map(len, store.damage)) == 1
        # What is not of that stretch is as it was.
        begin_s = BEGIN_S + 86_400
        other = store.query(
            parse_query(
                begin_ns=begin_s * SECOND_NS,
                end_ns=(begin_s + 86_400) * SECOND_NS,
                group_by=(),
                filters={},
                rows_most=1,
            )
        )
        if "UPDATE holders" not in sql and "UPDATE places" not in sql and "UPDATE works" not in sql:
            assert (other.damaged, other.total.energy_mj) == ((), other.measured_mj)
            assert other.measured_mj == sum(
                sum(one)
                for hour in range(24, 48)
                for place in PLACES
                for one in [[10**6 + hour + 10**5 + index + 10**7 * (index + 1) + 17 * hour for index in range(6)]]
            )


def test_an_hour_that_is_added_to_after_it_was_damaged_stays_found(tmp_path):
    with closing(open_ledger(tmp_path)) as store:
        book(store, 0)
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as raw:
            raw.execute("DROP TRIGGER hourly_updated")
            raw.execute("UPDATE hourly SET active = active + 1 WHERE place = 1 AND holder = 1")
            raw.commit()
        assert store.query(asked("hour")).damaged
    with closing(open_ledger(tmp_path)) as store:
        store._connection.execute(next(iter_triggers("hourly_updated")))
        book(store, 0)
        assert store.query(asked("hour")).damaged


def iter_triggers(name):
    for piece in TRIGGERS.split("CREATE TRIGGER "):
        if piece.startswith(name):
            yield f"CREATE TRIGGER {piece}"


def test_an_index_that_lacks_a_holder_is_found_and_made_again(tmp_path, whole):
    path, truth = whole
    shutil.copy(path, tmp_path / FILE_NAME)
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as raw:
        ((sql,),) = raw.execute("SELECT sql FROM sqlite_master WHERE name = 'holders_workload'").fetchall()
        raw.execute("DROP INDEX holders_workload")
        raw.execute(f"{sql} AND id <> (SELECT 2)".replace("(SELECT 2)", "2"))
        raw.execute("PRAGMA writable_schema = 1")
        raw.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'holders_workload'", (sql,))
    with closing(open_ledger(tmp_path)) as store:
        with pytest.raises(LedgerError, match="index"):
            store.query(asked("title", "namespace"))
        assert store.index_is_damaged
        store.mend_indexes()
        answer = store.query(asked("namespace"))
        assert (figures(answer), answer.damaged) == (truth[1], ())


def test_damage_is_found_before_anybody_asks(tmp_path, whole):
    path, _ = whole
    shutil.copy(path, tmp_path / FILE_NAME)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as raw:
        raw.execute("DROP TRIGGER hourly_updated")
        raw.execute("UPDATE hourly SET active = 0 WHERE place = 1 AND at = ?", (BEGIN_S + 86_400,))
        raw.commit()
    with closing(open_ledger(tmp_path)) as store:
        store.scrub()
        assert not store.damage
        store.scrub()
        (part,) = store.damage.parts
        assert (part.table, part.at_s, part.place) == ("hourly", BEGIN_S + 86_400, 1)
        for _ in range(5):  # round and round
            store.scrub()
        assert store.damage.parts == (part,)


def test_rows_that_leave_take_their_checks_along(tmp_path):
    with closing(open_ledger(tmp_path)) as store:
        for hour in range(4):
            book(store, hour)
        while store.prune_rows(now_s=BEGIN_S + 3000 * 86_400):
            pass
        for table in ("hourly", "daily"):
            assert store._read(f"SELECT count(*) FROM {table}_check", ()) == [(0,)]


def test_records_of_nodes_and_counters_that_are_damaged_are_dropped(tmp_path, whole):
    path, _ = whole
    shutil.copy(path, tmp_path / FILE_NAME)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as raw:
        raw.execute("UPDATE windows SET number = number + 1024 WHERE node = 'node-1'")
        raw.execute("UPDATE namespaces SET spent = spent + 4096 WHERE name = 'team-1'")
        raw.commit()
    with closing(open_ledger(tmp_path)) as store:
        assert store.dropped == 2
        assert set(store.last_windows()) == {"node-0", "node-2"}
        assert "team-1" not in store.namespaces.sums


def test_a_node_whose_rows_are_damaged_stops_no_other(tmp_path):
    with closing(open_ledger(tmp_path)) as store:
        book(store, 0)
        entry = LedgerEntry(BEGIN_S, PLACES[0], HOLDERS[0], LedgerAmount(active_mj=5))
        bad = NodeEntries([entry._replace(holder=EnergyHolder("pod", "\ud800"))], [], LastWindow("bad", 1, 1, 0.0))
        good = NodeEntries([entry], [MeasuredEnergy(BEGIN_S, PLACES[0], 5, 0, 0.0)], LastWindow("good", 1, 1, 0.0))
        before_mj = store.query(asked()).measured_mj
        outcome = store.add_each({"bad": bad, "good": good}, now_s=BEGIN_S)
        assert (list(outcome.refused), outcome.failed) == (["bad"], {})
        assert store.query(asked()).measured_mj == before_mj + 5
        assert {"good"} == set(store.last_windows()) - {place.node_name for place in PLACES}
        assert store.query(asked("namespace")).damaged == ()


@pytest.mark.parametrize("damage", ["none", "bits", "gone"])
def test_a_log_that_a_kill_left_and_the_disk_damaged_is_whole_or_said_to_be_lost(tmp_path, damage):
    killed = tmp_path / "killed"
    with closing(open_ledger(tmp_path)) as store:
        for hour in range(4):
            book(store, hour)
        truth = figures(store.query(asked("namespace")))
        killed.mkdir()
        for path in tmp_path.glob("energy.*"):
            shutil.copy(path, killed / path.name)
    log = killed / f"{FILE_NAME}-wal"
    raw = bytearray(log.read_bytes())
    if damage == "gone":
        log.unlink()
    elif damage == "bits":
        raw[len(raw) // 2] ^= 4
        log.write_bytes(raw)
    try:
        with closing(open_ledger(killed)) as store:
            answer = store.query(asked("namespace"))
            if damage == "none":
                assert (figures(answer), answer.damaged) == (truth, ())
            else:
                assert any("transactions" in words for words in answer.damaged)
        with closing(open_ledger(killed)) as again:  # told once: then it is known, and the sums begin from there
            assert again.losses == ()
    except LedgerError:
        assert damage == "gone"


def test_a_ledger_without_its_mark_opens(tmp_path, whole):
    shutil.copy(whole[0], tmp_path / FILE_NAME)
    (tmp_path / "energy.revision").write_text("no number")
    with closing(open_ledger(tmp_path)) as store:
        assert store.losses == ()


def old_ledger(folder):
    with closing(sqlite3.connect(folder / FILE_NAME)) as raw:
        raw.executescript(FORMAT_4.read_text())


def test_a_ledger_of_format_4_opens_whole_and_without_what_was_never_spent(tmp_path):
    old_ledger(tmp_path)
    with closing(open_ledger(tmp_path)) as store:
        assert store._read("PRAGMA user_version", ()) == [(FORMAT_VERSION,)]
        # Of the hour and of the day.
        assert store.healed.rows == 2
        assert store.healed.energy_j == 73 * 10**12
        for by in ((), ("namespace",), ("hour",), ("day",), ("title", "node")):
            answer = store.query(asked(*by, hours=30))
            assert answer.damaged == ()
            assert answer.total.energy_mj == answer.measured_mj
            assert answer.measured_mj == 2 * sum(3 * (1000 + 200 + 30_000 + 10 * hour) + 3 for hour in range(30))
        (done,) = next(group.done for group in store.query(asked("title", hours=30)).groups if group.done)
        assert (done.unit, done.amount) == ("request", 30 * 12.5)
        assert store.namespaces.counters_mj()["victim"] == 0
        assert store.last_windows() == {"n1": (7, 30), "n2": (7, 172)}
        assert set(store.marks.exporters) == {"archive"}
        # And it goes on: the next honest window of the victim was an error for ever.
        store.add(
            [
                LedgerEntry(
                    BEGIN_S,
                    LedgerPlace("n2", "serve", "a100-sxm4-80gb"),
                    EnergyHolder("pod", "victim", "p-x"),
                    LedgerAmount(active_mj=7),
                )
            ],
            [],
            [],
            now_s=BEGIN_S,
        )
        assert store.namespaces.counters_mj()["victim"] == 7
    with closing(open_ledger(tmp_path)) as again:
        assert again.healed.rows == 0
        assert again.query(asked("hour", hours=30)).damaged == ()
