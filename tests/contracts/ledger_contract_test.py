"""The contract of an energy ledger, the same suite for each database that holds one.

SQLite's own dangers (bits that flip in the file, a lost log, earlier formats) are in tests/unit/energy_damage_test.py,
PostgreSQL's (terms, lost connections) in tests/unit/postgres_ledger_test.py; marks of exporters run over both in
tests/unit/energy_exports_test.py and tests/props/energy_exports_test.py.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from tests.builders.ledger import (
    BEGIN_S,
    HOLDERS,
    HOURS,
    PLACES,
    QUESTIONS,
    asked,
    book,
    book_all,
    build_hour,
    figures,
    watch_reads,
)
from tests.builders.stores import LEDGER_STORES

from eelgrid_controller.energy.ledger import (
    EnergyHolder,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
    MeasuredEnergy,
    parse_query,
)
from eelgrid_controller.energy.store import schema
from eelgrid_controller.energy.store.ledger_store import LastWindow, NodeEntries, open_ledger
from eelgrid_controller.energy.store.schema import CELL_MJ_MOST
from eelgrid_controller.errors import LedgerError, LedgerRefused
from eelgrid_controller.state.measurements import WorkInterval, spread_work

ENTRY = LedgerEntry(BEGIN_S, PLACES[0], HOLDERS[0], LedgerAmount(active_mj=5))
MEASURED = MeasuredEnergy(BEGIN_S, PLACES[0], 5, 0, 0.0)


@pytest.fixture(params=LEDGER_STORES)
def ledger(request, tmp_path):
    with request.param(tmp_path) as found:
        yield found


@pytest.fixture
def filled(ledger):
    """Sixty hours."""
    with closing(ledger.open()) as store:
        book_all(store)
    return ledger


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """What sixty hours answer, from SQLite."""
    with closing(open_ledger(tmp_path_factory.mktemp("truth"))) as store:
        for hour in range(HOURS):
            book(store, hour)
        return [figures(store.query(asked(*by))) for by in QUESTIONS]


def test_answers_are_the_same_in_every_database_and_after_reopening(filled, truth):
    with closing(filled.open()) as store:
        for by, right in zip(QUESTIONS, truth, strict=True):
            answer = store.query(asked(*by))
            assert (figures(answer), answer.damaged, answer.revision) == (right, (), 1)
            assert answer.total.energy_mj == answer.measured_mj
        together = store.query_all([asked(*by) for by in QUESTIONS])
        assert [figures(one) for one in together] == truth


def test_what_is_known_of_nodes_workloads_and_counters_survives_reopening(filled):
    with closing(filled.open()) as store:
        assert store.last_windows() == {place.node_name: (7, HOURS) for place in PLACES}
        assert set(store.last_window_ends().values()) == {BEGIN_S + 3600.0 * HOURS}
        assert store.recent_holders(100) == HOLDERS[:5]
        assert store.last_work_ends() == {("w-1", "step"): BEGIN_S + 3600.0 * (HOURS - 1) + 600.0}
        assert store.begun_s() == BEGIN_S
        counters = store.namespaces.counters_mj()
        assert set(counters) == {*(f"team-{number}" for number in range(5)), "(unallocated)"}
        assert sum(counters.values()) == store.query(asked()).measured_mj
        revision = store.revision
    with closing(filled.open()) as again:
        assert (again.revision, again.namespaces.counters_mj(), again.losses, again.dropped) == (
            revision,
            counters,
            (),
            0,
        )


def test_names_come_back_to_the_letter_whatever_is_in_them(ledger):
    odd = ("quote ' \" \\ % ? %s", "line\nend", "é 🐟", "x" * 5000, "$.a", "null")
    holders = [EnergyHolder("pod", "ml", name, "w", name, "u", "q", (("k", name), ("ke'y", "v"))) for name in odd]
    with closing(ledger.open()) as store:
        for _ in range(2):
            store.add([ENTRY._replace(holder=one) for one in holders], [], [], now_s=BEGIN_S)
        for by in ("name", "title", "label:k"):
            assert {group.values[0] for group in store.query(asked(by)).groups} == set(odd)
        one = {"begin_ns": BEGIN_S * 10**9, "end_ns": (BEGIN_S + 3600) * 10**9, "group_by": (), "rows_most": 5}
        for name in odd:
            assert store.query(parse_query(**one, filters={"label:k": name})).total.energy_mj == 10
            assert store.query(parse_query(**one, filters={"title": name, "user": "u"})).total.energy_mj == 10
        assert [group.values for group in store.query(asked("label:ke'y")).groups] == [("v",)]
        assert [group.values for group in store.query(asked("label:none")).groups] == [("",)]


def test_a_character_that_no_text_can_have_is_replaced(ledger):
    holder = EnergyHolder("pod", "m\0l", "a\0b", labels=(("k", "\0"),))
    with closing(ledger.open()) as store:
        for _ in range(2):
            store.add([ENTRY._replace(holder=holder)], [], [], now_s=BEGIN_S)
        (group,) = store.query(asked("name", "label:k", "namespace")).groups
        assert group.values == ("a\ufffdb", "\ufffd", "m\ufffdl")
        assert group.spent.energy_mj == 10
        assert store.namespaces.counters_mj() == {"m\ufffdl": 10}


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
        (
            "INSERT INTO daily (at, place, holder, bare, context, active, cost, carbon) VALUES ({day}, 1, 77, 1, 1, 1, 0, 0)",
            "node node-0",
        ),
        ("UPDATE daily_measured SET total = total - 1 WHERE at = {day} AND place = 1", "node node-0"),
        ("UPDATE daily_work SET amount = amount * 2 WHERE at = {day}", "of work"),
        ("UPDATE daily_check SET digest = digest + 1 WHERE at = {day} AND place = 1", "node node-0"),
        ("DELETE FROM daily_check WHERE at = {day} AND place = 1", "node node-0"),
        ("UPDATE holders SET namespace = 'team-9' WHERE id = 1", "1 owners whose names are damaged"),
        ("UPDATE places SET node = 'other' WHERE id = 1", "1 nodes whose names are damaged"),
        ("UPDATE works SET unit = 'image'", "1 workloads that tell work"),
    ],
)
def test_what_a_disk_or_a_person_changed_is_left_out_and_named_and_the_rest_is_there(filled, truth, sql, words):
    assert filled.run(sql.format(day=BEGIN_S, hour=BEGIN_S + 3600 * 51)) == 1
    with closing(filled.open()) as store:
        answer = store.query(asked("title", "namespace"))
        assert len(answer.damaged) == 1
        assert words in answer.damaged[0]
        assert 0 < answer.owned.energy_mj <= truth[1][4]
        assert sum(map(len, store.damage)) == 1
        # What is not of that stretch is as it was.
        other = store.query(asked(hours=24, begin_s=BEGIN_S + 86_400))
        if not any(f"UPDATE {table}" in sql for table in ("holders", "places", "works")):
            assert (other.damaged, other.total.energy_mj) == ((), other.measured_mj)
            assert other.measured_mj == 3 * sum(
                10**6 + hour + 10**5 + index + 10**7 * (index + 1) + 17 * hour
                for hour in range(24, 48)
                for index in range(6)
            )


def test_an_hour_that_is_added_to_after_it_was_changed_stays_found(ledger):
    with closing(ledger.open()) as store:
        book(store, 0)
        ledger.run("UPDATE hourly SET active = active + 1 WHERE place = 1 AND holder = 1")
        assert store.query(asked("hour")).damaged
        book(store, 0)
        assert store.query(asked("hour")).damaged
    with closing(ledger.open()) as store:
        book(store, 0)
        assert store.query(asked("hour")).damaged
        # Whoever puts it back has it whole again.
        ledger.run("UPDATE hourly SET active = active - 1 WHERE place = 1 AND holder = 1")
        assert store.query(asked("hour")).damaged == ()


def test_a_row_that_is_kept_is_not_read_again_and_written_as_it_should_be(ledger):
    with closing(ledger.open()) as store:
        book(store, 0)
        ledger.run("UPDATE hourly SET active = active + 1 WHERE place = 1 AND holder = 1")
        ledger.run("UPDATE daily_measured SET total = 0 WHERE place = 1")
        book(store, 0)
        found = store.query(asked("hour"))
    assert found.damaged == ()
    assert found.total.energy_mj == found.measured_mj == 2 * sum(one.total_mj for one in build_hour(0)[1])


@pytest.mark.parametrize("fails", ["before the end", "at the end"])
def test_what_a_failed_transaction_added_is_not_kept(ledger, monkeypatch, tmp_path_factory, fails):
    with closing(ledger.open()) as store, closing(open_ledger(tmp_path_factory.mktemp("twin"))) as twin:
        for one in (store, twin):
            book(one, 0)
        entries, *rest = build_hour(0)
        if fails == "before the end":
            entries.append(ENTRY._replace(hour_s=BEGIN_S + 1, spent=LedgerAmount(active_mj=2**63)))

        def fail(*_arguments, **_options):
            raise LedgerError("here", "the disk is full", "make room")

        with monkeypatch.context() as patched:
            if fails == "at the end":
                patched.setattr(store.marks, "record_changed_hours", fail)
            with pytest.raises(LedgerError):
                store.add(entries, *rest, now_s=0)
        for one in (store, twin):
            book(one, 0)
            book(one, 1)
        assert figures(store.query(asked("hour"))) == figures(twin.query(asked("hour")))
        assert store.query(asked("hour")).damaged == ()


def test_an_hour_that_was_let_go_begins_anew(ledger):
    with closing(ledger.open()) as store:
        book(store, 0)
        for _ in range(2):  # the hour, then its day
            assert store.shrink(now_s=BEGIN_S + 7200, bytes_most=0)
        book(store, 0)
        found = store.query(asked("hour"))
    assert found.damaged == ()
    assert found.total.energy_mj == found.measured_mj == sum(one.total_mj for one in build_hour(0)[1])


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_kept_add_up_as_those_that_are_read(ledger, monkeypatch, tmp_path_factory, seed):
    """Hours come in any order, some writes fail, old rows are let go of: as a ledger that is opened anew for each."""
    monkeypatch.setattr(schema, "_KEPT_ROWS_LEAST", 4)
    monkeypatch.setattr(schema, "_KEPT_ROWS_MOST", 60)
    values, twin = random.Random(seed), tmp_path_factory.mktemp("twin")
    with closing(ledger.open()) as store:
        for _ in range(40):
            hour = values.choice((20, 21, 22, 23, 24, values.randrange(48)))
            if values.random() < 0.2:
                bad = {"node-9": NodeEntries([ENTRY._replace(spent=LedgerAmount(active_mj=2**63))], [], None)}
                entries, measured, newest, _ = build_hour(hour)
                parts = {"node-0": NodeEntries(entries, measured, newest[0])}
                order = {**bad, **parts} if values.random() < 0.5 else {**parts, **bad}
                assert set(store.add_each(order, now_s=0).refused) == {"node-9"}
                with closing(open_ledger(twin)) as other:
                    other.add(entries, measured, newest[:1], now_s=0)
                continue
            book(store, hour)
            with closing(open_ledger(twin)) as other:
                book(other, hour)
        with closing(open_ledger(twin)) as other:
            for question in QUESTIONS:
                assert figures(store.query(asked(*question))) == figures(other.query(asked(*question)))
        assert store.query(asked("hour")).damaged == ()
        assert max(len(kept._rows) for kept in store._kept.values()) <= 150


def test_damage_is_found_before_anybody_asks(filled):
    assert filled.run(f"UPDATE hourly SET active = 0 WHERE place = 1 AND holder = 1 AND at = {BEGIN_S + 86_400}") == 1
    with closing(filled.open()) as store:
        store.scrub()
        assert not store.damage
        store.scrub()
        (part,) = store.damage.parts
        assert (part.table, part.at_s, part.place) == ("hourly", BEGIN_S + 86_400, 1)
        for _ in range(5):  # round and round
            store.scrub()
        assert store.damage.parts == (part,)


def test_records_of_nodes_and_counters_that_are_damaged_are_dropped(filled):
    filled.run("UPDATE windows SET number = number + 1024 WHERE node = 'node-1'")
    filled.run("UPDATE namespaces SET spent = spent + 4096 WHERE name = 'team-1'")
    with closing(filled.open()) as store:
        assert store.dropped == 2
        assert set(store.last_windows()) == {"node-0", "node-2"}
        assert "team-1" not in store.namespaces.sums


def test_rows_that_leave_take_their_checks_and_names_along_and_counters_stay(ledger):
    with closing(ledger.open()) as store:
        for hour in range(4):
            book(store, hour)
        told = store.namespaces.counters_mj()
        while store.prune_rows(now_s=BEGIN_S + 3000 * 86_400):
            pass
        for table in (
            "hourly",
            "hourly_check",
            "daily",
            "daily_measured",
            "daily_work",
            "daily_check",
            "holders",
            "works",
        ):
            assert store._read(f"SELECT count(*) FROM {table}") == [(0,)]
        book(store, 4)
        answer = store.query(asked("title"))
        assert (answer.damaged, answer.total.energy_mj) == ((), answer.measured_mj)
    with closing(ledger.open()) as again:
        assert all(again.namespaces.counters_mj()[name] > energy_mj for name, energy_mj in told.items())


@pytest.mark.parametrize(
    "bad",
    [
        ENTRY._replace(holder=EnergyHolder("pod", "\ud800")),
        ENTRY._replace(spent=LedgerAmount(active_mj=2**70)),
        ENTRY._replace(spent=LedgerAmount(active_mj=-1)),
        ENTRY._replace(spent=LedgerAmount(active_mj=1, cost=float("nan"))),
    ],
)
def test_what_cannot_be_stored_changes_nothing_and_stops_no_other_node(ledger, bad):
    with closing(ledger.open()) as store:
        book(store, 0)
        before = figures(store.query(asked("title"))), store.namespaces.counters_mj()
        with pytest.raises(LedgerRefused):
            store.add([ENTRY, bad], [MEASURED], [LastWindow("bad", 1, 1, 0.0)], now_s=BEGIN_S)
        assert (figures(store.query(asked("title"))), store.namespaces.counters_mj()) == before
        parts = {
            "bad": NodeEntries([bad], [], LastWindow("bad", 1, 1, 0.0)),
            "good": NodeEntries([ENTRY], [MEASURED], LastWindow("good", 1, 1, 0.0)),
        }
        outcome = store.add_each(parts, now_s=BEGIN_S)
        assert (list(outcome.refused), outcome.failed) == (["bad"], {})
        answer = store.query(asked("title"))
        assert answer.measured_mj == before[0][4] + 5
        assert (answer.damaged, answer.total.energy_mj) == ((), answer.measured_mj)
        assert {"good"} == set(store.last_windows()) - {place.node_name for place in PLACES}


def test_an_hour_holds_so_much_and_sums_beyond_64_bits_are_sums(ledger):
    hours = 600
    entries = [LedgerEntry(hour * 3600, PLACES[0], HOLDERS[0], LedgerAmount(active_mj=2**60)) for hour in range(hours)]
    measured = [MeasuredEnergy(one.hour_s, one.place, 2**60, 0, 0.0) for one in entries]
    with closing(ledger.open()) as store:
        for _ in range(2):
            store.add(entries, measured, [], now_s=0)
        whole = {"begin_ns": 0, "end_ns": hours * 3600 * 10**9, "filters": {}, "rows_most": 1}
        for by, many in (((), hours // 24), (("namespace",), hours // 24), (("hour",), hours)):
            answer = store.query(parse_query(**whole, group_by=by))
            assert answer.total.energy_mj == answer.measured_mj == pytest.approx(many * CELL_MJ_MOST)
        assert sum(store.namespaces.counters_mj().values()) <= 2**63 - 1


def test_a_second_writer_is_refused(ledger):
    with closing(ledger.open()) as store:
        book(store, 0)
        ledger.run("UPDATE ledger SET revision = revision + 1")
        with pytest.raises(LedgerError, match="somebody else wrote"):
            book(store, 1)
        assert store.query(asked(hours=1)).measured_mj == store.query(asked()).measured_mj


def test_a_ledger_that_went_back_in_time_says_so_once(ledger):
    with closing(ledger.open()) as store:
        for hour in range(3):
            book(store, hour)
    ledger.run("UPDATE ledger SET revision = 1")
    with closing(ledger.open()) as store:
        assert "2 committed transactions are missing" in store.query(asked()).damaged[0]
    with closing(ledger.open()) as store:
        assert store.query(asked()).damaged == ()


def test_a_ledger_that_was_moved_is_not_opened(ledger):
    ledger.open().close()
    ledger.run("UPDATE ledger SET moved = 'elsewhere'")
    with pytest.raises(LedgerError, match="it was moved to elsewhere"):
        ledger.open()


def test_the_size_is_bounded_by_letting_go_of_the_oldest(filled):
    with closing(filled.open()) as store:
        used, last_s = store.used_bytes(), BEGIN_S + 3600 * HOURS
        assert store.shrink(now_s=last_s, bytes_most=used) == 0
        gone = 0
        while found := store.shrink(now_s=last_s, bytes_most=used * 3 // 4):
            gone += found
        assert gone
        assert store.used_bytes() <= used * 3 // 4
        first_s = store.begun_s()
        answer = store.query(asked("hour", begin_s=first_s))
        assert (answer.damaged, answer.total.energy_mj) == ((), answer.measured_mj)
        assert first_s > BEGIN_S


@pytest.mark.parametrize("table", ["JOIN holders", "hourly_measured", "hourly_work"])
def test_what_is_written_while_a_question_is_answered_is_in_all_of_the_answer_or_in_none(ledger, table):
    with closing(ledger.open()) as store:

        def write(energy_mj):
            entry = LedgerEntry(0, PLACES[0], EnergyHolder("pod", "ml"), LedgerAmount(active_mj=energy_mj))
            store.add([entry], [MeasuredEnergy(0, PLACES[0], energy_mj, 0, 0.0)], [], now_s=0)

        write(1000)
        written = []

        def between(statement):
            # Another connection commits just before this part of the question.
            if not written and table in statement:
                written.append(statement)
                write(500)

        watch_reads(store, between)
        one = parse_query(begin_ns=0, end_ns=3600 * 10**9, group_by=("namespace",), filters={}, rows_most=5)
        answer = store.query(one)
        assert written
        assert answer.total.energy_mj == answer.measured_mj
        assert store.query(one).measured_mj == 1500


def test_other_threads_read_whole_transactions_while_it_is_written(ledger):
    with closing(ledger.open()) as store, ThreadPoolExecutor(2) as readers:
        found = []
        for hour in range(20):
            reading = [readers.submit(store.query, asked(*by)) for by in ((), ("hour",))]
            book(store, hour)
            found += [one.result() for one in reading]
    assert all(one.total.energy_mj == one.measured_mj and one.damaged == () for one in found)


def test_a_place_without_a_pool_is_in_the_default_pool(ledger):
    entries = [
        LedgerEntry(0, LedgerPlace(node, pool, "m"), EnergyHolder("pod", "a"), LedgerAmount(active_mj=amount))
        for node, pool, amount in (("n1", "", 5), ("n2", "default", 7), ("n3", "p", 11))
    ]
    with closing(ledger.open()) as store:
        store.add(entries, [], [], now_s=0)
        whole = {"begin_ns": 0, "end_ns": 3600 * 10**9, "rows_most": 10}
        groups = store.query(parse_query(**whole, group_by=("pool",), filters={})).groups
        assert {group.values: group.spent.energy_mj for group in groups} == {("default",): 12, ("p",): 11}
        assert store.query(parse_query(**whole, group_by=(), filters={"pool": "default"})).total.energy_mj == 12


def test_work_is_told_beside_the_joules_of_those_who_tell_it(ledger):
    with closing(ledger.open()) as store:
        for number, unit in enumerate(("step", "image", "step")):
            work = spread_work(WorkInterval(f"w-{number}", unit, 2.5 + number, BEGIN_S, BEGIN_S + 60.0), None)
            store.add([ENTRY._replace(holder=HOLDERS[number])], [], [], work, now_s=BEGIN_S)
        (group,) = store.query(asked("queue")).groups
        assert [(one.unit, one.amount, one.energy_mj) for one in group.done] == [("image", 3.5, 5), ("step", 7.0, 10)]
