"""What befalls power enforcement: disks, devices and drivers that fail, crashes, stops and restarts."""

import pytest
from tests.power_rig import Rig, fake, plan_of, setting, settled, simulated

from eelgrid_agent.enforce.guard.events import SetDeviceLimit, UnlockClocks
from eelgrid_agent.enforce.rules import LocalPolicy
from eelgrid_protos.messages import ApplyStatus, NodeEventKind

APPLIED, REFUSED, FAILED = ApplyStatus.APPLIED, ApplyStatus.REFUSED, ApplyStatus.FAILED


@pytest.fixture(params=[fake, simulated], ids=["fake", "simulated"])
def rig(request):
    return Rig(request.param())


def test_a_full_disk_means_that_nothing_is_changed(rig):
    rig.journal.is_full = True
    one = rig.machine.uuids[0]
    settled(rig, setting(one, 500.0))
    assert rig.machine.shown(one) == rig.found[one]
    assert rig.status(one) == (FAILED, "journal")
    rig.journal.is_full = False
    rig.guard.renew_lease(rig.machine.now_ns)
    rig.cycle(40)
    assert (rig.limit_w(one), rig.status(one)) == (500.0, (APPLIED, ""))


def test_a_hung_device_degrades_alone_and_gets_its_setting_when_it_answers(rig):
    one, other, *_ = rig.machine.uuids
    rig.machine.hang(one)
    settled(rig, setting(one, 500.0), setting(other, 600.0))
    assert rig.status(one) == (FAILED, "device")
    assert rig.status(other) == (APPLIED, "")
    rig.machine.restore(one)
    rig.cycle(3)
    assert (rig.limit_w(one), rig.status(one)) == (500.0, (APPLIED, ""))


def test_a_device_that_flaps_is_quarantined_for_longer_each_time(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 500.0), lease_s=100_000.0)[0]

    def flap():
        for _ in range(3):
            rig.machine.lose(one)
            rig.cycle()
            rig.machine.restore(one)
            rig.cycle(4)

    flap()
    assert rig.limit_w(one) == 700.0
    assert rig.status(one) == (REFUSED, "quarantine")
    rig.cycle(seconds=290.0)
    assert rig.limit_w(one) == 700.0
    rig.cycle(4, seconds=10.0)
    assert (rig.limit_w(one), rig.status(one)) == (500.0, (APPLIED, ""))
    flap()
    rig.cycle(4, seconds=100.0)
    assert rig.limit_w(one) == 700.0
    rig.cycle(4, seconds=100.0)
    assert rig.limit_w(one) == 500.0
    spans = [event.detail.split(" for ")[1] for event in rig.events if event.kind is NodeEventKind.GPU_QUARANTINED]
    assert [span.split(" ")[0] for span in spans] == ["300", "600"]


def test_a_restore_that_fails_is_tried_again_and_kept_for_the_next_start(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 500.0))[0]
    rig.machine.forbid()
    rig.cycle(400)
    assert rig.limit_w(one) == 500.0
    assert rig.kinds().count(NodeEventKind.ENFORCEMENT_SUSPENDED) == 1
    assert len(rig.journal.records) == 1
    rig.machine.forbid(is_forbidden=False)
    rig.crash()
    assert (rig.machine.shown(one), rig.journal.records) == (rig.found[one], ())


def test_a_clean_stop_puts_everything_back_at_once_from_the_journal(rig):
    one, other, *_ = settled(
        rig,
        setting(rig.machine.uuids[0], 500.0, sm_clock_min_mhz=600, sm_clock_max_mhz=900),
        setting(rig.machine.uuids[1], 300.0),
    )
    rig.machine.set_behind(other, 333.0)
    rig.stop()
    assert rig.machine.shown(one) == rig.found[one]
    assert rig.limit_w(other) == 333.0
    assert rig.journal.records == ()


def test_the_guard_s_own_stop_orders_the_same_and_nothing_afterwards(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 500.0))[0]
    rig.carry_out(rig.guard.stop())
    assert rig.machine.shown(one) == rig.found[one]
    rig.cycle(3)
    assert rig.machine.shown(one) == rig.found[one]
    assert rig.journal.records == ()


def test_after_a_crash_a_device_that_shows_another_value_is_left_alone_and_reported(rig):
    one, other, *_ = settled(rig, setting(rig.machine.uuids[0], 500.0), setting(rig.machine.uuids[1], 500.0))
    rig.machine.set_behind(one, 444.0)
    rig.crash()
    assert (rig.limit_w(one), rig.limit_w(other)) == (444.0, 700.0)
    assert NodeEventKind.SETTING_DRIFT in rig.kinds()
    assert "set by another program, left alone" in next(e.detail for e in rig.events if e.gpu_uuid == one)
    assert rig.journal.records == ()


@pytest.mark.parametrize("befalls", ["reload", "reboot"])
def test_after_a_reload_or_a_reboot_there_is_nothing_to_put_back(rig, befalls):
    one = settled(rig, setting(rig.machine.uuids[0], 500.0))[0]
    getattr(rig.machine, befalls)()
    rig.machine.set_behind(one, 500.0)  # the machine's own start-up script happens to set the same
    before = len(rig.commands)
    rig.crash()
    assert rig.limit_w(one) == 500.0
    assert not [c for c in rig.commands[before:] if isinstance(c, SetDeviceLimit | UnlockClocks)]
    assert rig.journal.records == ()


def test_a_device_that_is_silent_at_the_start_is_put_back_when_it_answers(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 500.0, sm_clock_min_mhz=600, sm_clock_max_mhz=900))[0]
    rig.machine.hang(one)
    rig.crash()
    rig.cycle(100)
    assert len(rig.journal.records) == 1
    rig.machine.restore(one)
    rig.cycle(3)
    assert (rig.machine.shown(one), rig.journal.records) == (rig.found[one], ())


def test_a_write_that_timed_out_and_was_made_is_known_for_ours():
    rig = Rig(fake(1))
    part = rig.machine.parts["GPU-0"]
    settled(rig, setting("GPU-0", 650.0))
    rig.offer(plan_of(setting("GPU-0", 600.0)))
    commands = _tick(rig)
    part.limit_w = 600.0
    part.is_hung = True
    rig.carry_out(commands)
    part.is_hung = False
    rig.cycle(3)
    assert (rig.status("GPU-0"), rig.events) == ((APPLIED, ""), [])
    rig.cycle(60)
    assert rig.limit_w("GPU-0") == 700.0


def test_a_stop_puts_back_what_a_batch_under_way_may_have_changed(rig):
    one = rig.machine.uuids[0]
    rig.offer(plan_of(setting(one, 650.0, sm_clock_min_mhz=600, sm_clock_max_mhz=900)))
    under_way = _tick(rig)
    last = rig.guard.stop()
    rig.carry_out((*under_way, *last))
    rig.carry_out(())
    assert (rig.machine.shown(one), rig.journal.records) == (rig.found[one], ())


def test_what_could_not_be_journalled_was_not_found_either(rig):
    one = rig.machine.uuids[0]
    rig.journal.is_full = True
    settled(rig, setting(one, 500.0))
    rig.machine.set_behind(one, 640.0)
    rig.journal.is_full = False
    rig.guard.renew_lease(rig.machine.now_ns)
    rig.cycle(40)
    assert rig.limit_w(one) == 500.0
    rig.cycle(60)
    assert rig.limit_w(one) == 640.0


def _tick(rig):
    kept = rig.carry_out
    commands = ()

    def keep(given):
        nonlocal commands
        commands = given
        return ()

    rig.carry_out = keep
    rig.cycle()
    rig.carry_out = kept
    return commands


def test_a_journal_that_could_not_be_emptied_is_emptied_when_the_disk_has_room(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 600.0))[0]
    rig.journal.is_full = True
    rig.offer(plan_of())
    rig.cycle(4)
    assert (rig.machine.shown(one), len(rig.journal.records)) == (rig.found[one], 1)
    assert rig.guard.has_work
    rig.journal.is_full = False
    rig.cycle()
    assert rig.journal.records == ()
    assert not rig.guard.has_work


def test_so_it_is_at_a_stop(rig):
    settled(rig, setting(rig.machine.uuids[0], 600.0))
    rig.journal.is_full = True
    rig.offer(plan_of())
    rig.cycle(2)
    rig.journal.is_full = False
    rig.carry_out(rig.guard.stop())
    assert rig.journal.records == ()


def test_a_restore_is_tried_for_as_long_as_it_takes(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 500.0))[0]
    rig.machine.forbid()
    rig.cycle(400)
    assert rig.limit_w(one) == 500.0
    rig.machine.forbid(is_forbidden=False)
    rig.cycle(61)
    assert (rig.machine.shown(one), rig.journal.records) == (rig.found[one], ())


def test_a_reset_that_leaves_our_limit_because_it_is_the_default_too_is_known_by_the_energy_counter(rig):
    one = rig.machine.uuids[0]
    rig.machine.set_behind(one, 450.0)
    rig.machine.load(one, 300.0)
    settled(rig, setting(one, 700.0))
    assert rig.limit_w(one) == 700.0
    rig.machine.lose(one)
    rig.cycle()
    rig.machine.restore(one)
    rig.cycle(60)
    assert (rig.limit_w(one), rig.journal.records) == (700.0, ())


def test_a_profile_that_cannot_be_read_any_more_is_neither_drift_nor_forgotten():
    rig = Rig(simulated(1, "b200"))
    one = settled(rig, setting(rig.machine.uuids[0], power_profile=5))[0]
    rig.machine.forbid()
    rig.cycle(80)
    assert (rig.machine.shown(one)[2], len(rig.journal.records)) == (5, 1)
    assert not rig.guard.repairs_total
    rig.machine.forbid(is_forbidden=False)
    rig.cycle(61)
    assert (rig.machine.shown(one), rig.journal.records) == (rig.found[one], ())


def test_a_budget_does_not_wait_once_the_disk_has_room():
    rig = Rig(fake(2), local=LocalPolicy(power_budget_w=800.0, enforce=True))
    rig.journal.is_full = True
    for uuid in rig.machine.uuids:
        rig.machine.load(uuid, 700.0)
    rig.cycle(200)
    assert rig.machine.true_power_w() == 1400.0
    rig.journal.is_full = False
    rig.cycle()
    assert rig.machine.true_power_w() <= 800.0
