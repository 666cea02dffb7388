"""An answer of the ledger is of one moment, whatever is written while it is made."""

import pytest

from eelgrid_controller.energy.ledger import (
    EnergyHolder,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
    MeasuredEnergy,
    parse_query,
)
from eelgrid_controller.energy.store.ledger_store import open_ledger

PLACE = LedgerPlace("n", "p", "m")


@pytest.mark.parametrize("table", ["JOIN holders", "hourly_measured", "hourly_work"])
def test_what_is_written_while_a_question_is_answered_is_in_all_of_the_answer_or_in_none(tmp_path, table):
    store = open_ledger(tmp_path)

    def write(energy_mj):
        entry = LedgerEntry(0, PLACE, EnergyHolder("pod", "ml"), LedgerAmount(active_mj=energy_mj))
        store.add([entry], [MeasuredEnergy(0, PLACE, energy_mj, 0, 0.0)], [], now_s=0)

    write(1000)
    written = []

    def between(statement):
        # Another connection commits just before this part of the question.
        if not written and table in statement:
            written.append(statement)
            write(500)

    store._reader.set_trace_callback(between)
    asked = parse_query(begin_ns=0, end_ns=3600 * 10**9, group_by=("namespace",), filters={}, rows_most=5)
    answer = store.query(asked)
    assert written
    assert answer.total.energy_mj == answer.measured_mj
    store._reader.set_trace_callback(None)
    assert store.query(asked).measured_mj == 1500
    store.close()


def test_a_place_without_a_pool_is_in_the_default_pool(tmp_path):
    store = open_ledger(tmp_path)
    entries = [
        LedgerEntry(0, LedgerPlace(node, pool, "m"), EnergyHolder("pod", "a"), LedgerAmount(active_mj=amount))
        for node, pool, amount in (("n1", "", 5), ("n2", "default", 7), ("n3", "p", 11))
    ]
    store.add(entries, [], [], now_s=0)
    whole = {"begin_ns": 0, "end_ns": 3600 * 10**9, "rows_most": 10}
    groups = store.query(parse_query(**whole, group_by=("pool",), filters={})).groups
    assert {group.values: group.spent.energy_mj for group in groups} == {("default",): 12, ("p",): 11}
    assert store.query(parse_query(**whole, group_by=(), filters={"pool": "default"})).total.energy_mj == 12
    store.close()
