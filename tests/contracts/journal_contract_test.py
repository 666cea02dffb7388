"""The contract of a journal with its audit log, the same suite for each database that holds one.

SQLite's own dangers (files, locks, damaged pages) are in tests/unit/store_test.py, PostgreSQL's (terms, lost connections) in
tests/unit/postgres_journal_test.py.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from tests.builders.stores import JOURNAL_STORES

from eelgrid_controller.errors import JournalCorrupt
from eelgrid_controller.runtime.audit_log import AuditFilter
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, JournalHistory
from eelgrid_protos.messages import AuditEntry


def entries(*names):
    return [JournalEntry("node_lost", {"time_ns": 1, "node_name": name}) for name in names]


def names_in(journal, after=0):
    return [entry.body["node_name"] for _, entry in journal.entries_after(after)]


def audited(*users, code="OK"):
    return [
        AuditEntry(time_ns=10 * number, user=user, call="CancelWorkload", code=code, peer="", reason="")
        for number, user in enumerate(users, 1)
    ]


@pytest.fixture(params=JOURNAL_STORES)
def store(request, tmp_path):
    with request.param(tmp_path) as found:
        yield found


@pytest.fixture
def filled(store):
    with closing(store.open()) as journal:
        journal.append(entries("a", "b"))
        journal.write_checkpoint(Checkpoint(2, {"nodes": ["a", "b"]}, "digest-2"))
        journal.append(entries("c", "d", "e"))
    return store


def test_a_new_journal_is_empty_and_has_the_name_that_it_is_given(store):
    with closing(store.open(new_cluster_id="mine")) as journal:
        assert journal.cluster_id == "mine"
        assert journal.last_seq == 0
        assert journal.newest_checkpoint() is None
        assert list(journal.entries_after(0)) == []
        assert journal.read_history() == JournalHistory(None, ())
        assert journal.lost is None
    with closing(store.open(new_cluster_id="another")) as journal:
        assert journal.cluster_id == "mine"


def test_what_was_appended_comes_back_in_order_after_reopening(filled):
    with closing(filled.open()) as journal:
        assert journal.last_seq == 5
        assert journal.newest_checkpoint() == Checkpoint(2, {"nodes": ["a", "b"]}, "digest-2")
        assert list(journal.entries_after(2)) == list(enumerate(entries("c", "d", "e"), 3))
        assert journal.append(entries("f")) == 6
        assert names_in(journal) == ["a", "b", "c", "d", "e", "f"]


def test_texts_come_back_to_the_letter(store):
    body = {
        "text": "zero \0, quote ' \" \\, é, 🐟, line\nend",
        "large": 2**62,
        "small": 1e-300,
        "none": None,
        "list": [[]],
    }
    with closing(store.open()) as journal:
        journal.append([JournalEntry("odd", body)])
    with closing(store.open()) as journal:
        assert [entry.body for _, entry in journal.entries_after(0)] == [body]


def test_what_json_cannot_hold_is_refused_and_nothing_is_written(filled):
    with closing(filled.open()) as journal:
        for value in (float("nan"), "\ud800"):
            with pytest.raises(ValueError):  # json's and str's own
                journal.append([*entries("f"), JournalEntry("odd", {"value": value})])
        assert journal.append(entries("g")) == 6
        assert names_in(journal, 5) == ["g"]


def test_numbers_go_on_after_every_entry_was_pruned(store):
    with closing(store.open(retained=0)) as journal:
        for seq in (1, 2, 3):
            journal.append(entries(f"n{seq}"))
            journal.write_checkpoint(Checkpoint(seq, {}, ""))
    with closing(store.open(retained=0)) as journal:
        assert journal.last_seq == 3
        assert journal.append(entries("n4")) == 4
        assert names_in(journal, 3) == ["n4"]


def test_pruning_keeps_two_checkpoints_all_entries_since_the_older_and_the_recent_past(store):
    with closing(store.open(retained=4)) as journal:
        for seq in range(1, 11):
            journal.append(entries(f"n{seq}"))
            if seq in (3, 8, 9):
                journal.write_checkpoint(Checkpoint(seq, {"at": seq}, ""))
        # The older checkpoint is at 8, but the last four of then nine entries stay.
        assert [seq for seq, _ in journal.entries_after(5)] == [6, 7, 8, 9, 10]
        with pytest.raises(JournalCorrupt, match="entries 1 to 5 are missing"):
            list(journal.entries_after(0))
        history = journal.read_history()
    assert history.checkpoint == Checkpoint(8, {"at": 8}, "")
    assert [seq for seq, _ in history.entries] == [9, 10]


def test_a_history_that_was_never_pruned_begins_with_the_first_entry(filled):
    with closing(filled.open()) as journal:
        history = journal.read_history()
        assert history.checkpoint is None
        assert [seq for seq, _ in history.entries] == [1, 2, 3, 4, 5]


def test_a_checkpoint_at_the_same_entry_takes_the_place_of_the_one_before(filled):
    with closing(filled.open()) as journal:
        journal.write_checkpoint(Checkpoint(5, {"first": 1}, "one"))
        journal.write_checkpoint(Checkpoint(5, {"second": 2}, "two"))
        assert journal.newest_checkpoint() == Checkpoint(5, {"second": 2}, "two")


def test_a_damaged_entry_is_named_with_what_is_still_good_and_the_remedy(filled):
    filled.damage_entry(4)
    with closing(filled.open()) as journal, pytest.raises(JournalCorrupt) as caught:
        names_in(journal, 2)
    assert caught.value.seq == 4
    assert "the checkpoint at entry 2 and the entries up to 3 are good" in str(caught.value)
    assert f"{filled.entries_table} WHERE seq>=4" in str(caught.value)


@pytest.mark.parametrize(("gone", "seq"), [((4,), 4), ((3, 4), 3)])
def test_a_missing_entry_is_never_passed_over(filled, gone, seq):
    for number in gone:
        filled.delete_entry(number)
    with closing(filled.open()) as journal, pytest.raises(JournalCorrupt, match="missing") as caught:
        names_in(journal, 2)
    assert caught.value.seq == seq


def test_a_damaged_checkpoint_is_never_used(filled):
    filled.damage_checkpoint(2)
    with (
        closing(filled.open()) as journal,
        pytest.raises(JournalCorrupt, match="the beginning and the entries") as caught,
    ):
        journal.newest_checkpoint()
    assert caught.value.seq == 2


def test_counters_say_what_was_written(store):
    with closing(store.open()) as journal:
        journal.append(entries("a", "b"))
        journal.append(entries("c"))
        journal.write_checkpoint(Checkpoint(3, {"x": 1}, "d"))
        counters = journal.counters
    assert (counters.commits, counters.entries, counters.checkpoints) == (2, 3, 1)
    assert counters.bytes_written > 0
    assert counters.checkpoint_bytes > 0


def test_a_probe_writes_and_leaves_nothing(filled):
    with closing(filled.open()) as journal:
        journal.probe()
        journal.check_files()
        assert journal.append(entries("f")) == 6
        assert names_in(journal, 4) == ["e", "f"]


def test_other_threads_read_whole_batches_while_it_is_written(store):
    def read(journal):
        history = journal.read_history()
        return [seq for seq, _ in history.entries]

    with closing(store.open()) as journal, ThreadPoolExecutor(2) as readers:
        found = []
        for _ in range(30):
            reading = readers.submit(read, journal)
            journal.append(entries("a", "b", "c"))
            found.append(reading.result())
    assert all(numbers == list(range(1, len(numbers) + 1)) and len(numbers) % 3 == 0 for numbers in found)


def test_the_audit_log_is_written_with_the_entries_and_read_by_filter_and_page(store):
    with closing(store.open()) as journal:
        journal.append(entries("a"), audited("ann", "bob", "ann"))
        journal.append([], audited("eve", code="PERMISSION_DENIED"))
        page = journal.read_audit_page(AuditFilter(), size=3)
        assert [one.user for one in page.entries] == ["eve", "ann", "bob"]
        assert (page.total, page.damaged) == (4, 0)
        rest = journal.read_audit_page(AuditFilter(), size=3, before=page.next_before)
        assert [(one.number, one.user) for one in rest.entries] == [(1, "ann")]
        assert rest.next_before == 0
        assert journal.read_audit_page(AuditFilter(user="ann", since_ns=20), size=9).total == 1
        assert [one.user for one in journal.read_audit_page(AuditFilter(denied=True), size=9).entries] == ["eve"]
        assert journal.read_audit_page(AuditFilter(call="Nothing"), size=9).entries == ()
    with closing(store.open()) as journal:
        journal.append([], audited("joe"))
        assert [one.number for one in journal.read_audit_page(AuditFilter(), size=2).entries] == [5, 4]


def test_the_audit_log_is_bounded(store):
    with closing(store.open()) as journal:
        journal.audit_table.rows_most = 20
        for number in range(100):
            journal.append([], audited(f"user-{number}"))
        page = journal.read_audit_page(AuditFilter(), size=1000)
    assert page.total <= 20
    assert page.entries[0].user == "user-99"
    assert [one.number for one in page.entries] == list(range(100, 100 - page.total, -1))


def test_a_journal_without_an_audit_log_has_an_empty_page(store):
    with closing(store.open()) as journal:
        page = journal.read_audit_page(AuditFilter(), size=5)
    assert (page.entries, page.total) == ((), 0)
