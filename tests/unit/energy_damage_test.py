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
from tests.builders.ledger import BEGIN_S, HOURS, QUESTIONS, asked, book, figures

from eelgrid_controller.energy.ledger import (
    EnergyHolder,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
)
from eelgrid_controller.energy.store.ledger_store import open_ledger
from eelgrid_controller.energy.store.sqlite_database import FILE_NAME, FORMAT_VERSION
from eelgrid_controller.errors import LedgerError

FORMAT_4 = Path(__file__).with_name("energy_format_4.sql")


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
        assert store.healed.startswith("rows=2 joules=7.3e+13 ")
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
        assert again.healed == ""
        assert again.query(asked("hour", hours=30)).damaged == ()
