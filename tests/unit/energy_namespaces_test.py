"""Counters by namespace: bounded, never falling, the same after a restart, and kept when the rows have gone."""

import sqlite3

import pytest

from eelgrid_controller.energy.ledger import (
    OTHER_NAMESPACES,
    EnergyHolder,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
    MeasuredEnergy,
    NamespaceSums,
)
from eelgrid_controller.energy.store.ledger_store import open_ledger
from eelgrid_controller.energy.store.sqlite_database import APPLICATION_ID, FILE_NAME, UPGRADES

PLACE = LedgerPlace("n", "p", "m")
SPENT = [("a", 10), ("b", 20), ("c", 5), ("c", 4), ("c", 200), ("a", 1), ("a", 500), (OTHER_NAMESPACES, 3)]


def entry(namespace, energy_mj, kind="pod"):
    return LedgerEntry(0, PLACE, EnergyHolder(kind, namespace), LedgerAmount(active_mj=energy_mj))


def test_namespaces_beyond_the_bound_are_other_and_no_counter_ever_falls():
    sums, before = NamespaceSums({}, most=2), {}
    for namespace, energy_mj in SPENT:
        sums, _ = sums.plus({namespace: energy_mj})
        now = sums.counters_mj()
        assert len(now) <= 3
        assert all(mj >= before[name] for name, mj in now.items() if name in before)
        before = now
    # c took the place of a, then a that of b, and went on from where it was.
    assert before == {"c": 200, "a": 510, OTHER_NAMESPACES: 5 + 4 + 1 + 3}
    assert sum(one.spent_mj for one in sums.sums.values()) == sum(mj for _, mj in SPENT)


def test_what_changed_makes_the_same_sums():
    sums, kept = NamespaceSums({}, most=2), {}
    for namespace, energy_mj in SPENT:
        sums, changed = sums.plus({namespace: energy_mj})
        kept |= changed
        assert kept == sums.sums


def test_names_are_bounded_too():
    sums, _ = NamespaceSums({}).plus({f"n{number}": 1 for number in range(10_050)})
    assert len(sums.sums) == 10_001
    assert sum(one.spent_mj for one in sums.sums.values()) == 10_050
    assert len(sums.counters_mj()) == 101


def test_counters_go_on_when_the_ledger_is_opened_again_and_when_its_rows_have_gone(tmp_path):
    store = open_ledger(tmp_path)
    store.add([entry("a", 1500), entry("a", 500), entry("", 250), entry("", 100, "unallocated")], [], [], now_s=0)
    store.add([entry("b", 1000)], [], [], now_s=0)
    told = store.namespaces.counters_mj()
    assert told == {"a": 2000, "b": 1000, "(none)": 250, "(unallocated)": 100}
    store.close()
    again = open_ledger(tmp_path)
    assert again.namespaces.counters_mj() == told
    while again.prune_rows(now_s=10**10):
        pass
    again.close()
    last = open_ledger(tmp_path)
    assert last.namespaces.counters_mj() == told
    last.close()


def test_what_was_not_written_is_not_counted(tmp_path):
    store = open_ledger(tmp_path)
    store.add([entry("a", 5)], [], [], now_s=0)
    with pytest.raises(Exception, match="too large"):
        store.add([entry("a", 7)], [MeasuredEnergy(0, PLACE, 2**70, 0, 0.0)], [], now_s=0)
    store.add([entry("a", 1)], [], [], now_s=0)
    assert store.namespaces.counters_mj() == {"a": 6}
    store.close()


def test_a_ledger_of_before_begins_with_what_it_has(tmp_path):
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.executescript("".join(UPGRADES[:2]))
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute("PRAGMA user_version=2")
    connection.executemany(
        "INSERT INTO holders VALUES (?, ?, ?, '', '', '', '', '', ?)",
        [(1, "unallocated", "", "{}"), (2, "pod", "ml", "1"), (3, "pod", "ml", "2"), (4, "slurm", "", "{}")],
    )
    connection.executemany(
        "INSERT INTO daily VALUES (?, 1, ?, 1, 2, 3, 0.0, 0.0)", [(day, 1 + day % 4) for day in range(8)]
    )
    connection.commit()
    connection.close()
    store = open_ledger(tmp_path)
    assert store.namespaces.counters_mj() == {"ml": 24, "(unallocated)": 12, "(none)": 12}
    store.close()
