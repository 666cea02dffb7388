"""The ledger writer: what is taken, written, acknowledged and summed up, with a disk that fails on the way."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.builders.energy import BEGIN_NS, SECOND_NS, SPEC, LedgerSite, build_window

from eelgrid_controller.clock import Clock
from eelgrid_controller.energy.ledger import ExportClaim, resolve_holder
from eelgrid_controller.energy.store import ledger_writer
from eelgrid_controller.energy.store.ledger_store import LedgerStore, open_ledger
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_controller.errors import LedgerError
from eelgrid_controller.state.measurements import WorkInterval
from eelgrid_protos.faults import FailedPrecondition, NotFound, Unavailable
from eelgrid_protos.messages import EnergyOwner, OwnerKind


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ledger_writer, "_BATCH_S", 0.005)
    monkeypatch.setattr(ledger_writer, "_AGAIN_S", 0.02)


class Disk:
    """Makes the store's `add` fail or wait, as asked."""

    def __init__(self, monkeypatch):
        self.fails = 0
        self.wait_s = 0.0
        real = LedgerStore.add

        def add(store, *what, **when):
            if self.wait_s:
                import time

                time.sleep(self.wait_s)
            if self.fails:
                self.fails -= 1
                raise LedgerError(store.path, "database or disk is full", "make room")
            real(store, *what, **when)

        monkeypatch.setattr(LedgerStore, "add", add)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


async def test_what_is_written_is_acknowledged_and_summed_up_by_namespace(tmp_path):
    async with LedgerSite(tmp_path) as site:
        assert (site.writer.newest_ns, dict(site.writer.joules_by_namespace())) == (None, {})
        for number, owner in ((1, 0), (2, 1), (3, 2)):
            site.take(build_window(number, 1_000 * number, owner=owner))
        await site.until(lambda: site.acknowledged)
        expected = {"ml": 1.0, "(unallocated)": 2.0, "(none)": 3.0}
        assert site.acknowledged == [("n1", 3)]
        assert dict(site.writer.joules_by_namespace()) == expected
        assert site.writer.newest_ns == BEGIN_NS + 180 * SECOND_NS
        assert (await site.total()).measured_mj == 6_000
    async with LedgerSite(tmp_path) as again:
        assert dict(again.writer.joules_by_namespace()) == expected


async def test_a_disk_that_is_full_loses_nothing(tmp_path, disk):
    disk.fails = 3
    async with LedgerSite(tmp_path) as site:
        for number in range(1, 6):
            site.take(build_window(number))
            await asyncio.sleep(0.01)
        await site.until(lambda: site.acknowledged and site.acknowledged[-1] == ("n1", 5))
        assert site.writer.failures == 3
        assert site.writer.fault == ""
        assert (await site.total()).measured_mj == 5_000
        assert site.writer.joules_by_namespace() == {"ml": 5.0}


async def test_a_folder_that_cannot_be_opened_is_tried_again(tmp_path):
    (tmp_path / "energy.sqlite3").mkdir()
    async with LedgerSite(tmp_path) as site:
        site.take(build_window(1))
        assert (site.writer.dropped, bool(site.writer.fault)) == (1, True)
        (tmp_path / "energy.sqlite3").rmdir()
        await site.until(lambda: site.writer._store is not None)
        site.take(build_window(2))  # its acknowledgement would cover the first
        assert site.writer.dropped == 2
        for number in (1, 2):
            site.take(build_window(number))
        await site.until(lambda: site.acknowledged == [("n1", 2)])
        assert (await site.total()).measured_mj == 2_000


async def test_after_a_window_that_found_no_room_its_node_begins_again_and_others_go_on(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(ledger_writer, "_WAITING_MOST", 2)
    async with LedgerSite(tmp_path) as site:
        site.take(build_window(1))
        site.take(build_window(2))
        site.take(build_window(3))  # no room
        await site.until(lambda: site.acknowledged == [("n1", 2)])
        site.take(build_window(4))
        assert site.writer.dropped == 2
        site.take(build_window(1), node="n2")
        # Two that were not acknowledged became one on the agent.
        merged = build_window(4, 2_000)
        site.take(merged)
        await site.until(lambda: len(site.acknowledged) == 3)
        assert (await site.total()).measured_mj == 5_000
        site.take(build_window(5))
        await site.until(lambda: site.acknowledged[-1] == ("n1", 5))


async def test_a_window_that_comes_again_adds_nothing_and_is_acknowledged_when_it_is_on_disk(tmp_path, disk):
    disk.fails = 1
    async with LedgerSite(tmp_path) as site:
        site.take(build_window(1))
        site.take(build_window(1))
        assert (site.writer.again, site.acknowledged) == (1, [])
        await site.until(lambda: site.acknowledged)
        site.take(build_window(1))
        assert site.acknowledged[-1] == ("n1", 1)
        site.take(build_window(1, incarnation=2))  # another run of the agent, whose state was lost
        await site.until(lambda: site.writer.joules_by_namespace() == {"ml": 2.0})
    async with LedgerSite(tmp_path) as again:
        again.take(build_window(1, incarnation=2))
        assert (again.writer.again, again.acknowledged) == (1, [("n1", 1)])


async def test_a_stop_while_the_disk_works_writes_all_in_order_or_nothing(tmp_path, disk):
    disk.wait_s, disk.fails = 0.1, 1
    async with LedgerSite(tmp_path) as site:
        site.take(build_window(1))
        await site.until(lambda: site.writer._writing.windows)
        site.take(build_window(2))
    # The first write failed under the stop; the last one had both.
    assert site.acknowledged == [("n1", 2)]
    store = open_ledger(tmp_path)
    assert store.last_windows() == {"n1": (1, 2)}
    assert store.namespaces.counters_mj() == {"ml": 2_000}
    store.close()


async def test_energy_that_no_device_can_have_spent_is_refused_once(tmp_path):
    async with LedgerSite(tmp_path) as site:
        site.take(build_window(1, 2**63))
        site.take(build_window(2))
        await site.until(lambda: site.acknowledged == [("n1", 2)])
        assert (site.writer.refused, site.writer.failures) == (1, 0)
        assert (await site.total()).measured_mj == 1_000


async def test_names_of_workloads_outlive_the_core_that_knew_them(tmp_path):
    async with LedgerSite(tmp_path) as site:
        site.take(build_window(1))
        await site.until(lambda: site.acknowledged)
    async with LedgerSite(tmp_path, workloads={}) as later:
        later.take(build_window(2))
        await later.until(lambda: later.acknowledged)
        (group,) = (await later.total("title", "user", "queue", "label:team")).groups
        assert (group.values, group.spent.energy_mj) == (("chat", "ann", "q1", "a"), 2_000)


RAYLET = EnergyOwner(kind=OwnerKind.WORKLOAD, workload="w-1")
JOBS = (replace(RAYLET, ray_job="01000000"), replace(RAYLET, ray_job="02000000"))


async def test_jobs_of_ray_are_told_apart_within_the_workload_that_they_run_in(tmp_path):
    windows = [(1_000, 0), (5_000, 1), (2_000, 2), (4_000, 1)]
    async with LedgerSite(tmp_path) as site:
        for number, (energy_mj, owner) in enumerate(windows):
            site.take(replace(build_window(number + 1, energy_mj, owner=owner), owners=(RAYLET, *JOBS)))
        # Work is of the whole workload: it is not told by its jobs of Ray.
        site.writer.add_work([WorkInterval("w-1", "step", 3.0, BEGIN_NS / SECOND_NS, BEGIN_NS / SECOND_NS + 30.0)])
        await site.until(lambda: site.acknowledged == [("n1", len(windows))])

        async def by(*keys):
            return {group.values: group for group in (await site.total(*keys)).groups}

        jobs = await by("queue", "label:ray/job")
        found = {values: group.spent.energy_mj for values, group in jobs.items()}
        assert found == {("q1", ""): 1_000, ("q1", "01000000"): 9_000, ("q1", "02000000"): 2_000}
        assert not any(group.done for group in jobs.values())
        whole = await by("queue")
        # The queue is charged once for all of it.
        assert whole["q1",].spent.energy_mj == 12_000
        assert whole["q1",].done[0].energy_mj == 12_000


async def test_a_job_of_ray_does_not_pass_to_what_its_workload_spends_later(tmp_path):
    """The names of a workload that has ended are those of its newest row, but for the job of Ray in it."""
    known = {"w-1": SimpleNamespace(spec=SPEC)}
    async with LedgerSite(tmp_path, workloads=known) as site:
        site.take(replace(build_window(1, 1_000, owner=1), owners=(RAYLET, *JOBS)))
        await site.until(lambda: site.acknowledged)
        known.clear()
        site.take(replace(build_window(2, 1_000, owner=0), owners=(RAYLET, *JOBS)))
        await site.until(lambda: site.acknowledged[-1] == ("n1", 2))
    async with LedgerSite(tmp_path, workloads={}) as later:
        for number, owner in ((3, 0), (4, 2)):
            later.take(replace(build_window(number, 1_000, owner=owner), owners=(RAYLET, *JOBS)))
        await later.until(lambda: later.acknowledged[-1:] == [("n1", 4)])
        groups = (await later.total("title", "queue", "label:team", "label:ray/job")).groups
        assert {group.values[-1]: group.spent.energy_mj for group in groups} == {
            "": 2_000, "01000000": 1_000, "02000000": 1_000,
        }  # fmt: skip
        assert {group.values[:-1] for group in groups} == {("chat", "q1", "a")}


async def test_a_pod_that_nobody_submitted_has_the_user_that_it_says(tmp_path):
    owners = (
        EnergyOwner(kind=OwnerKind.POD, namespace="web", pod="p-1"),
        EnergyOwner(kind=OwnerKind.POD, namespace="web", pod="p-2"),
        EnergyOwner(kind=OwnerKind.POD, namespace="ml", pod="p-3", workload="w-1"),
    )
    async with LedgerSite(tmp_path) as site:
        site.writer.user_of_pod = lambda namespace, pod: {("web", "p-1"): "eve", ("ml", "p-3"): "bob"}.get(
            (namespace, pod), ""
        )
        for number in range(3):
            site.take(replace(build_window(number + 1, owner=number), owners=owners))
        await site.until(lambda: site.acknowledged == [("n1", 3)])
        found = {group.values for group in (await site.total("name", "user")).groups}
        # Who submitted it goes before.
        assert found == {("p-1", "eve"), ("p-2", ""), ("p-3", "ann")}


@pytest.mark.parametrize(
    ("told", "user", "labels", "charged"),
    [
        ("eve", "ann", {}, "eve"),
        ("", "ann", {"user": "bob"}, "ann"),
        ("", "", {"user": "bob"}, "bob"),
        ("", "", {}, ""),
    ],
)
def test_whoever_submitted_is_charged_unless_the_node_knows_who_runs_it(told, user, labels, charged):
    owner = EnergyOwner(kind=OwnerKind.WORKLOAD, workload="w-1", user=told)
    assert resolve_holder(owner, replace(SPEC, user=user, labels=labels)).user == charged


async def test_work_is_reported_beside_the_joules_of_those_who_tell_it(tmp_path):
    begin_s = BEGIN_NS / SECOND_NS
    async with LedgerSite(tmp_path) as site:
        site.take(build_window(1, 6_000))
        site.take(build_window(2, 4_000, owner=2))
        site.writer.add_work([WorkInterval("w-1", "request", 12.0, begin_s, begin_s + 30.0)])
        site.writer.add_work([WorkInterval("w-1", "request", 8.0, begin_s + 31.0, begin_s + 60.0)])
        await site.until(lambda: site.acknowledged)
        (group,) = (await site.total("namespace", "title")).groups[:1]
        (done,) = group.done
        assert group.values == ("ml", "chat")
        assert (done.unit, done.amount, done.counted_s, done.missed_s, done.energy_mj) == (
            "request",
            20.0,
            60.0,
            0.0,
            6_000,
        )
        # What a GPU was used for is not told by node: a workload may be on several.
        assert not any(group.done for group in (await site.total("node")).groups)
    async with LedgerSite(tmp_path) as later:
        # Two minutes without a controller: how much was done in them is not known.
        later.writer.add_work([WorkInterval("w-1", "request", 5.0, begin_s + 180.0, begin_s + 200.0)])
        await later.until(lambda: not later.writer._batch.worked and not later.writer._writing.worked)
        (done,) = next(group.done for group in (await later.total("title")).groups if group.done)
        assert (done.amount, done.counted_s, done.missed_s) == (25.0, 80.0, 120.0)


async def test_an_exporter_is_known_after_a_restart_and_a_ledger_that_is_not_open_says_so(tmp_path):
    hour_s = BEGIN_NS // SECOND_NS
    async with LedgerSite(tmp_path) as site:
        site.take(build_window(1))
        await site.until(lambda: site.acknowledged)
        settled_s = await site.writer.settled_s()
        assert settled_s % 3600 == 0
        # A clock ahead by years holds nobody back, and its hours are not over.
        with pytest.raises(FailedPrecondition):
            await site.writer.confirm(ExportClaim("archive", hour_s, hour_s + 3600, 1))
        mark = await site.writer.confirm(ExportClaim("archive", settled_s - 7200, settled_s, 1))
        assert site.writer.exporters == {"archive": mark}
    async with LedgerSite(tmp_path) as again:
        assert again.writer.exporters == {"archive": mark}
        await again.writer.remove_exporter("archive")
        assert again.writer.exporters == {}
        with pytest.raises(NotFound, match="no exporter archive"):
            await again.writer.remove_exporter("archive")
    shut = LedgerWriter(lambda: None, core=lambda: None, clock=Clock(), log=logging.getLogger("test"), bytes_most=1)
    assert shut.exporters == {}
    with pytest.raises(Unavailable, match="being opened"):
        await shut.settled_s()


async def test_a_ledger_beyond_its_size_lets_go_and_says_so(tmp_path):
    async with LedgerSite(tmp_path) as site:
        for number in range(1, 6):
            site.take(build_window(number))
        await site.until(lambda: site.acknowledged and site.acknowledged[-1] == ("n1", 5))
        await site.writer._prune_store()
        assert site.writer.forgotten == {"age": 0, "size": 0}
        site.writer.bytes_most = 1
        await site.writer._prune_store()
        # The hour and the day: of the holder and of what was measured.
        assert site.writer.forgotten == {"age": 0, "size": 4}
        assert (await site.total()).measured_mj == 0
        assert site.writer.joules_by_namespace() == {"ml": 5.0}
