"""Parts of a front: its records on disk, the totals of clusters, and the options of its program."""

import asyncio
import sqlite3
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tests.builders.cluster import build_request

from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.federation.__main__ import main, parse_clusters
from eelgrid_controller.federation.dispatch import Copy, CopyPhase, Dispatch, StoredRecord
from eelgrid_controller.federation.record_store import RecordStore, StoreFault
from eelgrid_controller.federation.totals import add_energy, add_summaries
from eelgrid_protos.messages import (
    EnergyGroup,
    EnergySpent,
    EnergyWork,
    ModelSummary,
    QueryEnergyRequest,
    QueryEnergyResponse,
    ReasonCount,
    Summary,
    Workload,
    WorkloadPhase,
)


def dispatch(key="w-x", *, phase=CopyPhase.HELD, **changes):
    copies = (Copy(cluster="a", phase=phase, problem="why"), Copy(cluster="b", phase=CopyPhase.ENDED, started=True))
    fields = {"chosen": "a", "decision": ("one", "two"), "owner": "alice", "submitted_ns": 7, "copies": copies}
    return Dispatch(workload_id=key, request=build_request(key, gpus=2), **(fields | changes))


async def test_records_are_read_back_as_they_were_written(tmp_path):
    store = RecordStore(tmp_path)
    assert await store.open() == []
    latest = Workload(workload_id="w-x", spec=build_request().spec, phase=WorkloadPhase.PENDING, submitted_ns=5)
    first = dispatch(moving_to="b", may_hold=True, held_by="alice")
    await store.write(first, None)
    await store.write(replace(first, is_cancelled=True), latest)
    await store.write(dispatch("w-y", has_failed=True, chosen=""), None)
    await store.close()
    again = RecordStore(tmp_path)
    found = await again.open()
    await again.close()
    assert {one.dispatch.workload_id: one for one in found} == {
        "w-x": StoredRecord(replace(first, is_cancelled=True), latest),
        "w-y": StoredRecord(dispatch("w-y", has_failed=True, chosen=""), None),
    }


async def test_a_second_front_is_refused_the_records_of_the_first(tmp_path):
    store = RecordStore(tmp_path)
    await store.open()
    await store.write(dispatch(), None)
    with pytest.raises(ControllerConfigError, match="end the other front"):
        await RecordStore(tmp_path).open()
    await store.close()
    again = RecordStore(tmp_path)
    assert len(await again.open()) == 1
    await again.close()


async def test_of_settled_records_the_newest_are_kept_and_of_others_all(tmp_path):
    store = RecordStore(tmp_path, settled_most=10)
    await store.open()
    for number in range(50):
        await store.write(dispatch(f"live-{number}"), None)
        await store.write(dispatch(f"done-{number}", phase=CopyPhase.ENDED), None)
    await store.close()
    again = RecordStore(tmp_path)
    kept = [one.dispatch.workload_id for one in await again.open()]
    await again.close()
    assert sorted(kept) == sorted([f"live-{n}" for n in range(50)] + [f"done-{n}" for n in range(40, 50)])


async def test_a_file_of_a_newer_version_is_refused(tmp_path):
    store = RecordStore(tmp_path)
    await store.open()
    await store.close()
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(ControllerConfigError, match="newer version"):
        await RecordStore(tmp_path).open()


async def test_a_write_that_fails_is_told(tmp_path):
    store = RecordStore(tmp_path)
    await store.open()
    await store._run(lambda: store._connection.execute("DROP TABLE dispatch"))
    with pytest.raises(StoreFault, match="no such table"):
        await store.write(dispatch(), None)
    await store.close()


def test_totals_of_clusters_add_up():
    one = Summary(
        time_ns=1,
        nodes_ready=2,
        gpus=8,
        pending=1,
        measured_power_w=100.0,
        decision_p99_s=0.01,
        pending_reasons=(ReasonCount(reason="quota", workloads=1),),
        models=(ModelSummary(model="A100", gpus=8, allocated_gpu_milli=1000, measured_power_w=100.0),),
    )
    both = add_summaries([one, replace(one, decision_p99_s=0.02)], now_ns=9)
    assert (both.nodes_ready, both.gpus, both.pending, both.measured_power_w) == (4, 16, 2, 200.0)
    assert both.decision_p99_s == 0.02
    assert both.pending_reasons == (ReasonCount(reason="quota", workloads=2),)
    assert both.models == (ModelSummary(model="A100", gpus=16, allocated_gpu_milli=2000, measured_power_w=200.0),)
    assert add_summaries([], now_ns=9) == Summary(time_ns=9)


NONE = EnergySpent()


def energy(**groups):
    rows = tuple(
        EnergyGroup(
            values=(name,),
            spent=EnergySpent(active_mj=mj, cost=mj / 10),
            work=(EnergyWork(unit="samples", amount=10.0, energy_per_unit_j=mj / 1e4),),
        )
        for name, mj in groups.items()
    )
    total = sum(groups.values())
    return QueryEnergyResponse(
        begin_ns=1, end_ns=9, groups=rows, left_out=NONE, unallocated=NONE, unattributed=NONE, measured_mj=total
    )


def test_energy_of_clusters_is_one_row_for_the_same_values_and_names_who_is_missing():
    request = QueryEnergyRequest(begin_ns=1, end_ns=9, group_by=("user",))
    found = add_energy(request, {"b": energy(alice=100, bob=50), "a": energy(alice=300)}, {"c": "no answer in time"})
    assert [(one.values, one.spent.active_mj, one.spent.cost) for one in found.groups] == [
        (("alice",), 400, 40.0),
        (("bob",), 50, 5.0),
    ]
    assert found.groups[0].work == (EnergyWork(unit="samples", amount=20.0, energy_per_unit_j=(0.1 + 0.3) / 20.0),)
    assert found.measured_mj == 450
    assert found.damaged == ("c is missing: no answer in time",)


def test_rows_beyond_the_number_asked_for_are_added_to_those_left_out():
    request = QueryEnergyRequest(begin_ns=1, end_ns=9, group_by=("user",), rows_most=1)
    found = add_energy(request, {"a": energy(alice=100, bob=50, carol=10)}, {})
    assert [one.values for one in found.groups] == [("alice",)]
    assert (found.left_out.active_mj, found.left_out_groups) == (60, 2)


def test_clusters_are_named_once_and_with_addresses():
    assert parse_clusters(("a=h:1,i:2", "b-1=j:3")) == {"a": ("h:1", "i:2"), "b-1": ("j:3",)}
    for wrong in (("a",), ("=h:1",), ("a=h:1", "a=i:2"), ("a b=h:1",), ("a=",), ()):
        with pytest.raises(ControllerConfigError):
            parse_clusters(wrong)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--cluster", "a"), "write NAME=HOST:PORT"),
        (("--cluster", "a=east.example:7443"), "--insecure"),
        (("--cluster", "a=127.0.0.1:1", "--listen", "0.0.0.0:1"), "--insecure"),
        (("--cluster", "a=127.0.0.1:1", "--tls-key", "key.pem"), "belong together"),
        (("--cluster", "a=127.0.0.1:1", "--grant", "root=CN:x"), "begins with no role"),
    ],
)
def test_options_that_cannot_be_used_end_with_two_and_say_why(words, told, tmp_path):
    done = CliRunner().invoke(main, [*words, "--data", str(tmp_path)])
    assert done.exit_code == 2
    assert told in done.output


async def test_writes_that_come_at_once_are_all_on_disk_when_they_return(tmp_path):
    store = RecordStore(tmp_path)
    await store.open()
    await asyncio.gather(*(store.write(dispatch(f"w-{number}"), None) for number in range(700)))
    await store.close()
    again = RecordStore(tmp_path)
    assert len(await again.open()) == 700
    await again.close()
