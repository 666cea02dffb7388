"""Power settings on a device: each rule of the guard, carried out on the fake and on the simulated node."""

from dataclasses import replace

import pytest
from bench.fault_world import Crash, CrashPoints
from tests.fakes.power_device import FakeMachine, FakePart
from tests.power_rig import Rig, fake, plan_of, setting, settled, simulated

from eelgrid_agent.devices.port import PowerSettings
from eelgrid_agent.enforce.guard.events import WriteCause, WriteJournal
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import ApplyStatus, Assignment, NodeEventKind, PlanApplied

APPLIED, REFUSED = ApplyStatus.APPLIED, ApplyStatus.REFUSED
UNDER_WAY = ApplyStatus.UNSPECIFIED


@pytest.fixture(params=[fake, simulated], ids=["fake", "simulated"])
def rig(request):
    return Rig(request.param())


def test_a_setting_is_applied_when_it_was_read_back_and_put_back_when_the_lease_is_over(rig):
    one, other, *_ = rig.machine.uuids
    answer = rig.offer(plan_of(setting(one, 350.0, sm_clock_min_mhz=600, sm_clock_max_mhz=1400)))
    assert (answer.status, answer.results[0].subject) == (UNDER_WAY, one)
    rig.cycle(8)
    assert rig.machine.shown(one) == (350.0, (600, 1395), None)
    assert rig.machine.shown(other) == rig.found[other]
    answer = rig.guard.pop_answer()
    assert (answer.status, answer.results[0].power_limit_w) == (APPLIED, 350.0)
    assert decode_message(PlanApplied, encode_message(answer)) == answer
    assert rig.guard.pop_answer() is None
    rig.cycle(60)
    assert {uuid: rig.machine.shown(uuid) for uuid in rig.machine.uuids} == rig.found
    assert rig.journal.records == ()
    assert rig.status(one) == (REFUSED, "lease")
    assert rig.kinds() == [NodeEventKind.LEASE_EXPIRED, NodeEventKind.SETTING_RESTORED]


def test_the_limit_of_a_job_that_started_at_it_stays_when_the_lease_is_over(rig):
    """Nobody else keeps the budget of its rack; the agent has the lower limits, and the controller may be away."""
    one, other, *_ = rig.machine.uuids
    plan = plan_of(setting(one, 350.0, sm_clock_min_mhz=600, sm_clock_max_mhz=1400), setting(other, 350.0))
    job = Assignment(workload_id="w", replica=0, gpu_uuids=(one,), gpu_milli=1000, limit_before_start=True)
    rig.offer(replace(plan, assignments=(job,)))
    rig.cycle(8)
    rig.cycle(60)
    assert (rig.limit_w(one), rig.limit_w(other)) == (350.0, 700.0)
    assert rig.machine.shown(one)[1] == rig.found[one][1]
    assert (rig.status(one), rig.status(other)) == ((APPLIED, ""), (REFUSED, "lease"))
    (expired,) = [event for event in rig.events if event.kind is NodeEventKind.LEASE_EXPIRED]
    assert "1 settings dropped, power limits of 1 GPUs kept for a budget" in expired.detail
    # The next plan decides.
    rig.offer(plan_of(epoch=2))
    rig.cycle(20)
    assert rig.machine.shown(one) == rig.found[one]


def test_nothing_is_written_before_the_journal_holds_what_was_there(rig):
    one = rig.machine.uuids[0]
    rig.offer(plan_of(setting(one, 650.0)))
    rig.machine.crashes.arm(2)  # the journal is on the disk, the write is not made
    with pytest.raises(Crash):
        rig.cycle()
    (record,) = rig.journal.records
    assert (record.gpu_uuid, record.found_w, record.limits_w) == (one, 700.0, (650.0,))
    assert record.origin == rig.machine.origin()
    assert rig.limit_w(one) == 700.0


def test_a_plan_that_observes_puts_back_what_the_plan_before_set(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 400.0))[0]
    answer = rig.offer(plan_of(setting(one, 400.0), enforce=False))
    assert [result.status for result in answer.results] == [ApplyStatus.OBSERVED]
    rig.cycle(2)
    assert rig.machine.shown(one) == rig.found[one]


def test_a_limit_outside_the_constraints_is_clamped_and_reported(rig):
    one, other, *_ = settled(rig, setting(rig.machine.uuids[0], 40.0), setting(rig.machine.uuids[1], 5000.0))
    assert (rig.limit_w(one), rig.limit_w(other)) == (200.0, 700.0)
    details = [result.detail for result in rig.guard.applied.results]
    assert sorted(detail.split(";")[0] for detail in details) == [
        "constraints: 40 W requested, the devices accept 200 W",
        "constraints: 5000 W requested, the devices accept 700 W",
    ]


def test_a_limit_goes_by_steps_and_a_small_difference_is_none(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 370.0))[0]
    assert rig.written(one) == [600.0, 500.0, 400.0, 370.0]
    rig.offer(plan_of(setting(one, 372.0)))
    rig.cycle(3)
    assert len(rig.written(one)) == 4
    rig.offer(plan_of(setting(one, 373.5)))
    rig.cycle(3)
    assert rig.written(one)[4:] == [373.5]


def test_work_that_waits_for_a_limit_gets_it_however_near_the_one_before_is(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 352.0))[0]
    work = Assignment(workload_id="w", replica=0, gpu_uuids=(one,), gpu_milli=1000, limit_before_start=True)
    rig.offer(plan_of(setting(one, 350.0), assignments=(work,)))
    rig.cycle(3)
    assert rig.limit_w(one) == 350.0
    # A lower one than it may have is no reason to write.
    rig.offer(plan_of(setting(one, 352.0), assignments=(work,)))
    rig.cycle(3)
    assert rig.limit_w(one) == 350.0


def test_a_lock_that_differs_by_a_step_is_no_difference(rig):
    one = settled(rig, setting(rig.machine.uuids[0], sm_clock_min_mhz=600, sm_clock_max_mhz=1400))[0]
    before = len(rig.commands)
    rig.offer(plan_of(setting(one, sm_clock_min_mhz=610, sm_clock_max_mhz=1410)))
    rig.cycle(2)
    assert len(rig.commands) == before
    rig.offer(plan_of(setting(one, sm_clock_min_mhz=600, sm_clock_max_mhz=1500)))
    rig.cycle(2)
    assert rig.machine.shown(one)[1] == (600, 1500)


def test_a_gang_gets_the_lowest_limit_asked_for_any_of_it(rig):
    a, b, c, d = rig.machine.uuids
    settled(rig, setting(a, 500.0), setting(b, 300.0), setting(d, 600.0), gangs=((a, c), (c, b)))
    assert [rig.limit_w(uuid) for uuid in (a, b, c, d)] == [300.0, 300.0, 300.0, 600.0]
    assert rig.status(c) == (APPLIED, "")
    # Up by less than the hysteresis nobody moves, though only one member was set before; down everyone does.
    for asked_w, limit_w in ((302.0, 300.0), (298.0, 298.0), (300.0, 298.0)):
        rig.offer(plan_of(setting(c, asked_w), gangs=((a, b, c),)))
        rig.cycle(5)
        assert [rig.limit_w(uuid) for uuid in (a, b, c, d)] == [limit_w] * 3 + [700.0]


def test_a_gang_whose_members_have_no_common_limit_is_refused():
    parts = {"GPU-0": FakePart(), "GPU-1": FakePart(default_w=150.0, min_w=100.0, max_w=150.0)}
    rig = Rig(FakeMachine(parts, CrashPoints()))
    settled(rig, setting("GPU-0", 120.0), gangs=(("GPU-0", "GPU-1"),))
    assert rig.status("GPU-0") == rig.status("GPU-1") == (REFUSED, "gang")
    assert [part.writes for part in parts.values()] == [[], []]


def test_a_change_by_somebody_else_is_repaired_and_at_last_given_up(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 400.0, sm_clock_min_mhz=600, sm_clock_max_mhz=1500))[0]
    for _ in range(3):
        rig.machine.set_behind(one, 450.0)
        rig.cycle(2)
        assert rig.limit_w(one) == 400.0
    rig.machine.set_behind(one, 450.0)
    rig.cycle(30)
    # The lock was ours and goes, the limit is theirs and stays.
    assert rig.machine.shown(one) == (450.0, None, None)
    assert rig.status(one) == (REFUSED, "drift")
    assert rig.kinds().count(NodeEventKind.ENFORCEMENT_SUSPENDED) == 1
    assert rig.guard.repairs_total == {"limit": 3}
    assert rig.journal.records == ()
    rig.offer(plan_of(setting(one, 300.0)))
    rig.cycle(3)
    assert rig.limit_w(one) == 450.0
    # Taken off the plan and put on it again, it is wanted anew.
    rig.offer(plan_of())
    rig.offer(plan_of(setting(one, 300.0)))
    rig.cycle(3)
    assert rig.limit_w(one) == 300.0


def test_repairs_are_allowed_again_after_the_window(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 400.0), lease_s=10_000.0)[0]
    for _ in range(8):
        rig.machine.set_behind(one, 450.0)
        rig.cycle(2)
        rig.cycle(seconds=300.0)
    assert rig.limit_w(one) == 400.0
    assert NodeEventKind.ENFORCEMENT_SUSPENDED not in rig.kinds()


def test_a_reload_is_no_drift_and_everything_is_set_again(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 500.0, sm_clock_min_mhz=600, sm_clock_max_mhz=1500))[0]
    for _ in range(6):
        rig.machine.reload()
        rig.cycle(4)
        assert rig.machine.shown(one) == (500.0, (600, 1500), None)
    assert not rig.guard.repairs_total
    (record,) = rig.journal.records
    assert record.origin == rig.machine.origin()
    rig.cycle(80)
    assert rig.machine.shown(one) == rig.found[one]


def test_a_driver_that_only_its_energy_counter_betrays_is_a_reload_too(rig):
    one = rig.machine.uuids[0]
    rig.machine.load(one, 400.0)
    settled(rig, setting(one, 500.0, sm_clock_min_mhz=600, sm_clock_max_mhz=1500))
    rig.machine.reload()
    rig.machine.loads -= 1  # whoever tells driver loads apart noticed nothing
    rig.cycle(4)
    assert rig.machine.shown(one) == (500.0, (600, 1500), None)
    assert not rig.guard.repairs_total


def test_a_lock_that_is_gone_shows_in_the_clock_and_is_repaired():
    rig = Rig(fake())
    settled(rig, setting("GPU-0", sm_clock_min_mhz=600, sm_clock_max_mhz=1500))
    rig.machine.parts["GPU-0"].lock = None
    rig.cycle(5)
    assert rig.machine.shown("GPU-0")[1] == (600, 1500)
    assert rig.guard.repairs_total == {"clocks": 1}


def test_a_cap_from_outside_the_host_is_reported_once_and_not_fought(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 500.0))[0]
    written = len(rig.commands)
    rig.machine.cap(one, 350.0)
    rig.cycle(20)
    assert len(rig.commands) == written
    assert [event.kind for event in rig.events] == [NodeEventKind.SETTING_DRIFT]
    assert "350 W are enforced where 500 W are requested" in rig.events[0].detail
    assert rig.status(one) == (APPLIED, "")
    rig.cycle(60)
    assert rig.machine.shown(one) == rig.found[one]


def test_without_permission_it_is_refused_by_name_and_not_tried_for_ever(rig):
    rig.machine.forbid()
    one = rig.machine.uuids[0]
    settled(rig, setting(one, 500.0))
    assert rig.status(one) == (REFUSED, "no-permission")
    assert len(rig.written(one)) == 1
    rig.machine.forbid(is_forbidden=False)
    rig.cycle(60)
    assert (rig.machine.shown(one), rig.journal.records) == (rig.found[one], ())


def test_a_part_that_locks_no_clocks_and_one_that_reports_no_limits():
    parts = {"GPU-0": FakePart(can_lock=False), "GPU-1": FakePart(min_w=None, max_w=None)}
    rig = Rig(FakeMachine(parts, CrashPoints()))
    settled(rig, setting("GPU-0", 500.0, sm_clock_min_mhz=600, sm_clock_max_mhz=900), setting("GPU-1", 500.0))
    assert rig.status("GPU-0") == rig.status("GPU-1") == (REFUSED, "not-supported")
    assert rig.limit_w("GPU-0") == 500.0
    assert parts["GPU-1"].writes == []
    rig.cycle(60)
    assert rig.limit_w("GPU-0") == 700.0


def test_a_power_profile_is_set_and_the_one_before_comes_back():
    parts = {"GPU-0": FakePart(profiles=(0, 1, 7), profile=None), "GPU-1": FakePart()}
    machine = FakeMachine(parts, CrashPoints())
    parts["GPU-0"].profile = 1
    rig = Rig(machine)
    settled(rig, setting("GPU-0", power_profile=7), setting("GPU-1", power_profile=7))
    assert parts["GPU-0"].profile == 7
    assert rig.status("GPU-0") == (APPLIED, "")
    assert rig.status("GPU-1") == (REFUSED, "not-supported")
    rig.cycle(60)
    assert parts["GPU-0"].profile == 1
    assert parts["GPU-1"].writes == []


def test_a_blackwell_part_takes_a_profile_on_the_simulated_node():
    rig = Rig(simulated(1, "b200"))
    one = settled(rig, setting(rig.machine.uuids[0], 800.0, power_profile=6))[0]
    assert (rig.machine.shown(one)[0], rig.machine.shown(one)[2]) == (800.0, 6)
    rig.cycle(60)
    assert rig.machine.shown(one) == rig.found[one]


def test_commands_say_why_and_one_journal_covers_a_cycle():
    rig = Rig(fake(3))
    rig.offer(plan_of(*(setting(uuid, 650.0) for uuid in rig.machine.uuids)))
    rig.cycle()
    journal, *writes = rig.commands
    assert isinstance(journal, WriteJournal)
    assert len(journal.records) == 3
    assert [write.cause for write in writes] == [WriteCause.PLAN] * 3
    assert isinstance(rig.machine.power_settings("GPU-0"), PowerSettings)
    assert rig.journal.stores == 1
