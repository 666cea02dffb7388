"""The outbox: shares by the plan alone, what was spent while no agent ran, and the node's stream of windows."""

import asyncio
import itertools
import threading
from array import array
from dataclasses import replace

import pytest
from tests.builders.agent import ManualClock, build_devices, build_energy_share, build_slurm_owner, build_tick
from tests.waiting import wait_until

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.devices.sampler import GPU_READINGS
from eelgrid_agent.energy import node_energy
from eelgrid_agent.energy.attributor import Attribution
from eelgrid_agent.energy.node_energy import ENERGY_OUTBOX, load_outbox_state, write_periodically
from eelgrid_agent.energy.windows import EnergyOutbox, EnergyWindowQueue, OutboxState
from eelgrid_agent.state_files import StateFile
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import AbsenceReason, Assignment, EnergyPart, Reading
from eelgrid_protos.messages import OwnerKind as WireKind

BEGIN_NS = 1_800_000_000 * 10**9
SECOND_NS = 10**9
_ENERGY = GPU_READINGS.index(Reading.ENERGY_J)


def tick(at_s, *joules):
    """A tick at which each device has spent so much since the agent began; None where that cannot be said."""
    count = len(joules)
    values = array("d", [0.0] * (len(GPU_READINGS) * count))
    absences = []
    for column, value in enumerate(joules):
        if value is None:
            absences.append((_ENERGY * count + column, AbsenceReason.NOT_SAMPLED))
        else:
            values[_ENERGY * count + column] = value
    return build_tick(BEGIN_NS + int(at_s * SECOND_NS), gpus=count, values=values, absences=absences)


def looks(*counters_j):
    return [(f"g{index}", RawReadings(energy_counter_j=value, values={})) for index, value in enumerate(counters_j)]


def works(workload, gpu, milli=1000):
    return Assignment(workload_id=workload, replica=0, gpu_uuids=(gpu,), gpu_milli=milli)


def charged(outbox):
    found = {}
    for window in outbox.windows.closed:
        for share in window.shares:
            owner = window.owners[share.owner]
            key = (window.devices[share.device].gpu_uuid, owner.workload or owner.job or owner.kind.name)
            found[key] = found.get(key, 0) + share.energy_mj
    return found


def test_by_the_plan_energy_goes_to_who_was_assigned_while_it_was_spent():
    outbox = EnergyOutbox(OutboxState(incarnation=1), by_plan=True)
    both = looks(0.0, 0.0)
    first = (works("w1", "g0"),)
    second = (works("w2", "g0", 400), works("w3", "g0", 350), works("w2", "g1", 400))
    outbox.on_tick(tick(0, 0.0, 0.0), both, None)
    outbox.on_tick(tick(5, 10.0, 4.0), both, first)  # until now nobody was assigned
    outbox.on_tick(tick(20, 100.0, 9.0), both, first)
    outbox.on_tick(tick(30, 210.0, 14.0), both, second)  # until now the first
    outbox.on_tick(tick(50, None, 20.0), both, second)
    outbox.on_tick(tick(90, 410.0, 34.0), both, second)  # the next minute
    outbox.close()
    assert charged(outbox) == {
        ("g0", "UNALLOCATED"): 10_000 + 50_000,
        ("g0", "w1"): 200_000,
        ("g0", "w2"): 80_000,
        ("g0", "w3"): 70_000,
        ("g1", "UNALLOCATED"): 4_000 + 10_000 + 12_000,
        ("g1", "w2"): 8_000,
    }
    nobody = [
        share
        for window in outbox.windows.closed
        for share in window.shares
        if window.owners[share.owner].kind is WireKind.UNALLOCATED
    ]
    assert {share.part for share in nobody} == {EnergyPart.BARE_IDLE}


def sum_parts(outbox, workload):
    """Millijoules of a workload by part, and of all devices."""
    found, total = {}, 0
    for window in outbox.windows.closed:
        total += sum(device.total_mj for device in window.devices)
        for share in window.shares:
            if window.owners[share.owner].workload == workload:
                found[share.part] = found.get(share.part, 0) + share.energy_mj
    return found, total


def test_by_the_plan_bare_idle_power_goes_first_as_where_processes_are_seen():
    outbox = EnergyOutbox(OutboxState(incarnation=1), by_plan=True)
    (gpu,) = build_devices(ManualClock()).gpus()
    idle_w = load_catalogue().products[gpu.catalogue_key].idle_w
    outbox.update_inventory([replace(gpu, uuid="g0"), replace(gpu, uuid="g1")])
    plan = (works("w1", "g0"), works("w2", "g1", 400))
    outbox.on_tick(tick(0, 0.0, 0.0), looks(0.0, 0.0), plan)
    # The first works, the second draws less than its part should.
    outbox.on_tick(tick(70, 14_000.0, 100.0), looks(0.0, 0.0), plan)
    outbox.close()
    bare_mj = round(70_000 * idle_w)
    found, total_mj = sum_parts(outbox, "w1")
    assert found == {EnergyPart.BARE_IDLE: bare_mj, EnergyPart.ACTIVE: 14_000_000 - bare_mj}
    assert sum_parts(outbox, "w2")[0] == {EnergyPart.BARE_IDLE: 40_000}
    assert total_mj == 14_100_000


def test_by_the_plan_a_clock_that_is_set_adds_no_idle_time():
    outbox = EnergyOutbox(OutboxState(incarnation=1), by_plan=True)
    (gpu,) = build_devices(ManualClock()).gpus()
    outbox.update_inventory([replace(gpu, uuid="g0")])
    plan = (works("w1", "g0"),)
    outbox.update_clock(wall_ns=BEGIN_NS, monotonic_ns=0)
    outbox.on_tick(tick(0, 0.0), looks(0.0), plan)
    outbox.update_clock(wall_ns=BEGIN_NS + 3_610 * SECOND_NS, monotonic_ns=10 * SECOND_NS)
    outbox.on_tick(tick(3_610, 3_000.0), looks(0.0), plan)
    outbox.close()
    idle_w = load_catalogue().products[gpu.catalogue_key].idle_w
    assert sum_parts(outbox, "w1")[0][EnergyPart.BARE_IDLE] == round(10_000 * idle_w)


def test_by_the_plan_totals_are_looked_at_when_the_plan_or_the_minute_changes():
    outbox = EnergyOutbox(OutboxState(incarnation=1), by_plan=True)
    same = (works("w1", "g0"),)
    for second in range(120):
        outbox.on_tick(tick(second, 100.0 * second), looks(0.0), same)
    assert [window.end_ns - window.begin_ns for window in outbox.windows.closed] == [60 * SECOND_NS]


def attribution(**spent_mj):
    owner = build_slurm_owner("7")
    shares = {uuid: (build_energy_share(owner, value),) for uuid, value in spent_mj.items()}
    return Attribution(shares=shares, accounts={}, nobody={}, estimates={}, anomalies=())


def run_of(kept, boot, counter_j, at_s):
    """A run of the agent that looks once and ends."""
    outbox = EnergyOutbox(kept, boot=boot)
    outbox.on_tick(tick(at_s, 0.0), looks(counter_j), None)
    outbox.charge_attribution(attribution(g0=1_000), at_ns=BEGIN_NS + at_s * SECOND_NS)
    outbox.close()
    return outbox


def test_what_was_counted_while_no_agent_ran_is_charged_to_nobody():
    first = run_of(OutboxState(incarnation=3), "boot-1", 5_000.0, 0)
    second = run_of(first.state(), "boot-1", 5_750.5, 600)
    assert charged(second) == {("g0", "7"): 2_000, ("g0", "UNATTRIBUTED"): 750_500}
    assert second.windows.incarnation == 3
    last = second.windows.closed[-2]
    assert (last.begin_ns, last.end_ns) == (BEGIN_NS, BEGIN_NS + 600 * SECOND_NS)


def test_what_this_run_counts_before_its_first_look_is_not_charged_twice():
    kept = run_of(OutboxState(incarnation=3), "boot-1", 5_000.0, 0).state()
    outbox = EnergyOutbox(kept, boot="boot-1")
    for second in range(5):
        outbox.on_tick(tick(600 + second, 100.0 * second), looks(5_750.0 + 100.0 * second), None)
    outbox.charge_attribution(attribution(g0=400_000), at_ns=BEGIN_NS + 604 * SECOND_NS)
    outbox.close()
    assert charged(outbox) == {("g0", "7"): 401_000, ("g0", "UNATTRIBUTED"): 750_000}


@pytest.mark.parametrize(
    ("boot", "counter_j", "why"),
    [
        ("boot-2", 5_750.0, "another boot"),
        ("boot-1", 4_999.0, "the counter fell"),
        ("boot-1", 5_000.0 + 601 * 5_000.0, "more than any device draws"),
        ("boot-1", Missing(AbsenceReason.NOT_SUPPORTED), "no counter"),
    ],
)
def test_a_counter_that_is_another_one_reports_nothing_of_the_gap(boot, counter_j, why):
    first = run_of(OutboxState(incarnation=3), "boot-1", 5_000.0, 0)
    second = run_of(first.state(), boot, counter_j, 600)
    assert charged(second) == {("g0", "7"): 2_000}, why


def test_windows_that_the_controller_may_have_are_never_merged_into_later_ones():
    share = attribution(g0=1_000).shares["g0"]
    windows = EnergyWindowQueue(1, many=4, most=6)
    for minute in range(12):
        windows.charge({"g0": share}, at_ns=BEGIN_NS + minute * 60 * SECOND_NS)
        windows.close_window()
        if minute == 1:
            sent = (windows.next_window(), windows.next_window())
    # No acknowledgement came: everything goes again, and the first two are as they were.
    assert windows.closed[:2] == sent
    assert len(windows.closed) == 4
    assert sum(device.total_mj for window in windows.closed for device in window.devices) == 12_000
    later = EnergyWindowQueue(1, many=4, most=6, kept=windows.closed, number=windows.number)
    for minute in range(12, 24):
        later.charge({"g0": share}, at_ns=BEGIN_NS + minute * 60 * SECOND_NS)
        later.close_window()
    assert later.closed[:4] == windows.closed


BOOT_NS = 400 * SECOND_NS  # of 1970, where a machine without a clock begins
YEARS_NS = BEGIN_NS - BOOT_NS


def look(outbox, at_s, *, wall_ns, **spent_mj):
    """A tick and what the attributor found, `at_s` seconds after the boot."""
    outbox.update_clock(wall_ns=wall_ns, monotonic_ns=int(at_s * SECOND_NS))
    outbox.charge_attribution(attribution(**spent_mj), at_ns=outbox.wall_ns(monotonic_ns=int(at_s * SECOND_NS)))


def spans(windows):
    return [((one.begin_ns - BEGIN_NS) / SECOND_NS, (one.end_ns - BEGIN_NS) / SECOND_NS) for one in windows]


def test_a_machine_that_boots_in_1970_reports_sane_windows_when_its_clock_is_right():
    outbox = EnergyOutbox(OutboxState(incarnation=1), boot="b")
    for at_s in range(0, 200, 5):
        look(outbox, at_s, wall_ns=BOOT_NS + at_s * SECOND_NS, g0=1_000)
    assert len(outbox.windows.closed) == 3
    assert all(one.end_ns < 1000 * SECOND_NS for one in outbox.windows.closed)
    for at_s in range(200, 400, 5):
        look(outbox, at_s, wall_ns=BEGIN_NS + at_s * SECOND_NS, g0=1_000)
    outbox.close()
    windows = outbox.windows.closed
    # As if the clock had been right from the beginning: nothing is in 1970, and no window spans the step.
    assert all(0.0 <= begin_s <= end_s <= 400.0 and end_s - begin_s <= 65.0 for begin_s, end_s in spans(windows))
    assert all(one.end_ns <= after.begin_ns for one, after in itertools.pairwise(windows))
    assert sum(device.total_mj for one in windows for device in one.devices) == 80 * 1_000


def test_a_clock_that_is_ten_years_ahead_for_a_moment_leaves_no_trace_in_windows():
    decade_ns = 3_650 * 86_400 * SECOND_NS
    outbox = EnergyOutbox(OutboxState(incarnation=1), boot="b")
    for at_s in range(0, 300, 5):
        ahead_ns = decade_ns if 100 <= at_s < 105 else -decade_ns * 6 if 200 <= at_s < 210 else 0
        look(outbox, at_s, wall_ns=max(0, BEGIN_NS + at_s * SECOND_NS + ahead_ns), g0=1_000)
    outbox.close()
    assert all(
        0.0 <= begin_s <= end_s <= 300.0 and end_s - begin_s <= 65.0 for begin_s, end_s in spans(outbox.windows.closed)
    )
    assert sum(device.total_mj for one in outbox.windows.closed for device in one.devices) == 60 * 1_000


def test_windows_of_the_run_before_move_with_the_clock_of_the_same_boot_alone(tmp_path):
    first = EnergyOutbox(OutboxState(incarnation=1), boot="b")
    for at_s in range(0, 130, 5):
        look(first, at_s, wall_ns=BOOT_NS + at_s * SECOND_NS, g0=1_000)
    first.close()
    file = StateFile(tmp_path / "windows.json", ENERGY_OUTBOX)
    file.store(first.state())
    kept = load_outbox_state(file, draw_incarnation=lambda: 9)
    assert kept == first.state()
    # The clock was set right while no agent ran.
    again = EnergyOutbox(kept, boot="b")
    look(again, 300, wall_ns=BEGIN_NS + 300 * SECOND_NS, g0=1_000)
    assert spans(again.windows.closed)[0] == (0.0, 20.0)
    # After another boot nobody knows how long ago it was.
    other = EnergyOutbox(kept, boot="c")
    look(other, 10, wall_ns=BOOT_NS + 10 * SECOND_NS, g0=1_000)
    look(other, 20, wall_ns=BEGIN_NS + 20 * SECOND_NS, g0=1_000)
    other.close()
    assert other.windows.closed[:-1] == first.windows.closed
    assert spans(other.windows.closed)[-1] == (10.0, 20.0)


def test_a_file_of_before_clocks_were_kept_is_read(tmp_path):
    path = tmp_path / "windows.json"
    StateFile(path, ENERGY_OUTBOX).store(OutboxState(incarnation=3, boot="b"))
    path.write_text(path.read_text().replace('"offset_ns":null,', ""))
    assert "offset_ns" not in path.read_text()
    assert load_outbox_state(StateFile(path, ENERGY_OUTBOX), draw_incarnation=lambda: 9) == OutboxState(
        incarnation=3, boot="b"
    )


def test_windows_that_were_kept_with_a_clock_ahead_hold_up_none_that_come():
    ahead = EnergyWindowQueue(1)
    ahead.charge({"g0": attribution(g0=1).shares["g0"]}, at_ns=BEGIN_NS + YEARS_NS)
    ahead.close_window()
    windows = EnergyWindowQueue(1, kept=ahead.closed, number=ahead.number)
    windows.charge({"g0": attribution(g0=1).shares["g0"]}, at_ns=BEGIN_NS)
    windows.charge({"g0": attribution(g0=1).shares["g0"]}, at_ns=BEGIN_NS + 30 * SECOND_NS)
    windows.close_window()
    assert spans(windows.closed)[-1] == (0.0, 30.0)


def test_an_agent_that_stops_while_windows_are_written_writes_the_last_ones_after_that(monkeypatch):
    monkeypatch.setattr(node_energy, "_EVERY_S", 0.001)
    outbox, disk, log = EnergyOutbox(OutboxState(incarnation=5)), threading.Event(), []

    class SlowStore:
        def store(self, state):
            log.append(("begun", state.number))
            disk.wait(10.0)
            log.append(("written", state.number))

    async def scene():
        writing = asyncio.create_task(write_periodically(outbox, SlowStore()))
        await asyncio.sleep(0)
        for number in range(2):
            outbox.windows.charge({"g0": ()}, at_ns=BEGIN_NS + 30 * number * SECOND_NS)
            if not number:
                outbox.windows.close_window()
        await wait_until(lambda: log)
        writing.cancel()
        asyncio.get_running_loop().call_later(0.05, disk.set)
        await asyncio.wait((writing,))

    asyncio.run(scene())
    assert log == [("begun", 1), ("written", 1), ("begun", 2), ("written", 2)]
