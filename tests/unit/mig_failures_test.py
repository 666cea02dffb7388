"""Every way in which a change of MIG layout goes wrong on real nodes, and what the executor makes of it.

A test carries the number of its failure mode in the list of known enforcement pitfalls (f01 to f17 and f26; f12 is
where instances are placed, f03 and f04 also how the machine is read).
"""

import threading

import pytest
from bench.mig_device import Fault
from bench.node_crashes import Rig
from tests.mig_rig import (
    A100,
    FOUR,
    G1,
    G2,
    G3,
    G4,
    H100,
    OFF,
    ONE,
    SEVEN,
    THREE,
    TWO,
    applied,
    asked,
    kinds,
    refused,
    rig_with,
    standing,
)

from eelgrid_agent.devices.port import DeviceInUse, DeviceTimeout, InsufficientResources, NoPermission
from eelgrid_agent.enforce.mig.host import MachineResetInfo, find_reset_obstacle
from eelgrid_agent.enforce.mig.journal import TransitionPhase
from eelgrid_agent.enforce.mig.mig_service import LayoutReconciler
from eelgrid_agent.enforce.mig.partitioner import CreateGpuInstance
from eelgrid_agent.enforce.mig.runner import TransitionLimits
from eelgrid_protos.messages import ApplyStatus, NodeEventKind


def test_f01_mode_success_that_is_only_pending_places_nothing_until_it_is_in_force():
    rig = rig_with(geometry=A100, mig_enabled=False)
    assert refused(rig.executor.apply_layout(asked(rig, THREE)), "pending")
    for _ in range(3):
        assert rig.executor.check_layouts() == ()
    assert refused(rig.executor.apply_layout(asked(rig, THREE)), "pending")
    assert rig.device.held == {}
    rig.device.reset()
    (result,) = rig.executor.check_layouts()
    assert applied(result)
    assert standing(rig) == {THREE}


def test_f01_a_pending_mode_is_taken_back_when_it_is_wanted_no_more():
    rig = rig_with(geometry=A100, mig_enabled=False)
    rig.executor.apply_layout(asked(rig, THREE))
    assert applied(rig.executor.apply_layout(OFF))
    assert not rig.device.mig_pending
    assert rig.executor.record("GPU-0").intent is None


def test_f02_a_mode_change_that_a_client_blocks_is_tried_a_bounded_time_and_rolled_back():
    rig = rig_with(mig_enabled=False)
    rig.device.faults = [Fault("set_mig_mode", DeviceInUse("in use by another client"))] * 100
    result = rig.executor.apply_layout(asked(rig, THREE))
    assert refused(result, "in-use")
    assert "in use by another client" in result.detail
    assert 100 - len(rig.device.faults) == 1 + len(TransitionLimits().pauses_s)
    assert not rig.device.mig_enabled
    assert not rig.device.mig_pending
    assert rig.device.now_s < 10.0
    assert rig.executor.record("GPU-0").intent is None


def test_f02_processes_on_the_device_are_named_and_the_mode_is_not_touched():
    rig = rig_with(mig_enabled=False)
    rig.device.users[4711] = (None, None)
    rig.hook.names.clear()
    result = rig.executor.apply_layout(asked(rig, THREE))
    assert refused(result, "busy")
    assert "4711" in result.detail
    assert "before set_mig_mode" not in rig.hook.names


@pytest.mark.parametrize(
    "machine", [MachineResetInfo(display_users=2), MachineResetInfo(virtual=True)], ids=["f03-display", "f04-cloud"]
)
def test_f03_f04_a_machine_that_cannot_reset_keeps_the_mode_found_and_says_why(machine):
    rig = Rig.of(A100, mig_enabled=False)
    rig.executor = LayoutReconciler(
        rig.device,
        rig.device,
        rig.journal,
        boot_id=lambda: "boot-1",
        sleep=rig.device.sleep,
        monotonic_s=lambda: 0.0,
        wall_ns=lambda: 0,
        obstacle=lambda geometry: find_reset_obstacle(geometry, machine),
    )
    rig.executor.recover()
    rig.hook.names.clear()
    result = rig.executor.apply_layout(asked(rig, THREE))
    assert refused(result, "mode")
    assert "reset" in result.detail
    assert "before set_mig_mode" not in rig.hook.names
    assert find_reset_obstacle(H100, machine) == ""


def test_f05_a_change_that_times_out_midway_is_finished_when_the_device_answers_again():
    rig = rig_with(ONE)
    rig.device.faults = [Fault("create_gpu_instance", DeviceTimeout("no answer in time"))]
    result = rig.executor.apply_layout(asked(rig, THREE))
    assert (result.status, result.rule) == (ApplyStatus.FAILED, "device")
    assert rig.executor.record("GPU-0").intent.phase is TransitionPhase.FORWARD
    rig.start_agent()
    (result,) = rig.executor.recover()
    assert applied(result)
    assert standing(rig) == {THREE}


@pytest.mark.parametrize("geometry", [A100, H100], ids=["f06", "f07-the-mode-is-forgotten-too"])
def test_f06_f07_instances_lost_at_reboot_are_made_again_and_old_leases_are_stale(geometry):
    rig = rig_with(geometry=geometry)
    rig.executor.apply_layout(asked(rig, THREE, ONE))
    before = rig.generations()
    rig.reboot()
    rig.start_agent()
    rig.executor.drain_events()
    (result,) = rig.executor.recover()
    assert applied(result)
    assert standing(rig) == {THREE, ONE}
    assert NodeEventKind.SETTING_RESTORED in kinds(rig)
    after = rig.generations()
    assert after.keys() == before.keys()
    assert all(after[uuid][1] > before[uuid][1] for uuid in after)
    assert rig.executor.record("GPU-0").repairs == 0


def test_f06_what_was_released_is_not_made_again_after_a_reboot():
    rig = rig_with()
    rig.executor.apply_layout(asked(rig, THREE))
    rig.executor.release_device("GPU-0")
    rig.reboot()
    rig.start_agent()
    assert rig.executor.recover() == ()
    assert rig.device.held == {}


def test_f06_a_driver_reload_within_one_boot_is_the_same():
    rig = rig_with()
    rig.executor.apply_layout(asked(rig, THREE))
    before = rig.generations()
    rig.device.reset()
    rig.device.stand(*THREE)
    rig.executor.on_device_reset("GPU-0")
    assert rig.executor.check_layouts() == ()
    ((uuid, (_, generation)),) = rig.generations().items()
    assert generation > before[uuid][1]


def test_f08_an_instance_whose_compute_instance_failed_is_taken_away_again():
    rig = rig_with(ONE)
    rig.device.faults = [Fault("create_compute_instance", InsufficientResources("no"))] * 2
    result = rig.executor.apply_layout(asked(rig, ONE, THREE))
    assert refused(result, "capacity")
    assert standing(rig) == {ONE}


def test_f08_an_orphan_of_ours_is_found_by_walking_and_somebody_elses_is_left():
    rig = rig_with(ONE)
    rig.device.stand(G2, 2, (), foreign=True)
    barred = Fault("destroy_gpu_instance", NoPermission("not now"))
    rig.device.faults = [
        *[Fault("create_compute_instance", InsufficientResources("no"))] * 2,
        *[barred] * 2,
    ]
    rig.executor.apply_layout(asked(rig, ONE, THREE))
    assert (G3, 4, ()) in standing(rig)
    rig.executor.release_device("GPU-0")
    rig.start_agent()
    rig.executor.recover()
    assert standing(rig) == {ONE, (G2, 2, ())}
    assert rig.device.violations == []


def test_f09_an_instance_that_is_in_use_for_a_while_after_its_compute_instance_went_is_waited_for():
    rig = rig_with(THREE)
    rig.device.faults = [Fault("destroy_gpu_instance", DeviceInUse("in use"))] * 4
    assert applied(rig.executor.apply_layout(asked(rig, FOUR)))
    assert 0.3 < rig.device.now_s < 10.0
    assert standing(rig) == {FOUR}


def test_f09_one_that_stays_in_use_is_given_back_what_it_had():
    rig = rig_with(THREE)
    rig.device.faults = [Fault("destroy_gpu_instance", DeviceInUse("in use"))] * 8
    assert refused(rig.executor.apply_layout(asked(rig, FOUR)), "in-use")
    assert standing(rig) == {THREE}


def test_f10_no_room_where_our_map_shows_some_is_read_and_planned_again_once():
    rig = rig_with(ONE)
    full = Fault("create_gpu_instance", InsufficientResources("insufficient resources"))
    rig.device.faults = [full]
    assert applied(rig.executor.apply_layout(asked(rig, THREE)))
    rig.device.faults = [full] * 2
    result = rig.executor.apply_layout(asked(rig, FOUR))
    assert refused(result, "capacity")
    assert standing(rig) == {THREE}


def test_f10_a_place_that_somebody_took_meanwhile_is_seen_on_our_own_map():
    rig = rig_with()
    taken = []

    def moment(name):
        if name == "after store" and not taken:
            taken.append(rig.device.stand(G4, 0, (3,), foreign=True))

    rig.journal.hook = moment
    rig.hook.names.clear()
    result = rig.executor.apply_layout(asked(rig, SEVEN))
    assert refused(result, "foreign")
    assert "before create_gpu_instance" not in rig.hook.names
    assert rig.device.violations == []


def test_f11_every_instance_is_made_at_an_explicit_place_largest_first():
    rig = rig_with()
    steps = rig.executor.plan_layout(asked(rig, (G1, 0, (0,)), (G1, 1, (0,)), (G2, 2, (1,)), THREE))
    made = [(step.profile_id, step.start) for step in steps if isinstance(step, CreateGpuInstance)]
    assert made == [(G3, 4), (G2, 2), (G1, 0), (G1, 1)]


def test_f13_a_foreign_instance_is_shown_left_and_subtracted():
    rig = rig_with(ONE)
    number = rig.device.stand(*THREE, foreign=True)
    assert rig.executor.observe_device("GPU-0").foreign == {number}
    assert applied(rig.executor.apply_layout(asked(rig, TWO)))
    assert standing(rig) == {TWO, THREE}
    assert refused(rig.executor.apply_layout(asked(rig, SEVEN)), "foreign")
    assert refused(rig.executor.apply_layout(OFF), "foreign")
    assert rig.device.violations == []
    rig.executor.adopt_instances("GPU-0")
    rig.device.foreign.clear()
    assert applied(rig.executor.apply_layout(asked(rig, SEVEN)))


def test_f13_what_stands_when_the_agent_first_sees_a_device_is_adopted():
    rig = rig_with(ONE, THREE)
    assert rig.executor.observe_device("GPU-0").foreign == frozenset()
    assert {generation for _, generation in rig.generations().values()} == {1}


def test_f14_a_layout_that_differs_in_one_instance_touches_that_one_only():
    rig = rig_with(ONE, TWO, THREE)
    rig.device.users[1] = (2, 0)
    before = rig.device.serials()
    assert applied(rig.executor.apply_layout(asked(rig, (G1, 1, (0,)), TWO, THREE)))
    after = rig.device.serials()
    assert {number for number in after if after[number] == before.get(number)} == {2, 4}


def test_f14_an_instance_in_use_refuses_what_would_touch_it():
    rig = rig_with(THREE)
    rig.device.users[1] = (2, 0)
    rig.hook.names.clear()
    assert refused(rig.executor.apply_layout(asked(rig, FOUR)), "busy")
    assert [name for name in rig.hook.names if "instance" in name] == []


def test_f14_a_process_that_came_between_plan_and_step_is_seen():
    rig = rig_with(ONE, THREE)

    def moment(name):
        if name == "after destroy_compute_instance":
            rig.device.users[1] = (7, 0)

    rig.device.hook = moment
    result = rig.executor.apply_layout(asked(rig, TWO))
    assert refused(result, "busy")
    assert standing(rig) == {ONE, THREE}
    assert rig.device.violations == []


def test_f15_a_client_that_lets_the_device_go_in_time_costs_a_wait():
    rig = rig_with(mig_enabled=False)
    rig.device.faults = [Fault("set_mig_mode", DeviceInUse("in use by another client"))] * 2
    assert applied(rig.executor.apply_layout(asked(rig, THREE)))


def test_f16_after_a_change_everything_is_listed_again():
    rig = rig_with(ONE)
    rig.executor.apply_layout(asked(rig, THREE))
    (gpu,) = rig.device.gpus()
    (instance,) = rig.executor.stamp_gpu(gpu).gpu_instances
    assert [(child.uuid, child.generation) for child in instance.compute_instances] == [("MIG-2-0", 1)]


def test_f17_nothing_is_created_before_what_was_destroyed_is_seen_gone():
    rig = rig_with(THREE)
    rig.device.lag_s = 1.0
    assert applied(rig.executor.apply_layout(asked(rig, (G2, 4, (1,)))))
    assert standing(rig) == {(G2, 4, (1,))}
    assert rig.device.now_s >= 1.0


def test_f17_two_changes_of_one_device_never_run_at_once():
    rig = rig_with()
    inside, go_on = threading.Event(), threading.Event()

    def moment(name):
        if name == "before create_gpu_instance":
            inside.set()
            assert go_on.wait(10)

    rig.device.hook = moment
    rig.executor = LayoutReconciler(
        rig.device,
        rig.device,
        rig.journal,
        boot_id=lambda: "boot-1",
        sleep=rig.device.sleep,
        monotonic_s=lambda: 0.0,
        wall_ns=lambda: 0,
        limits=TransitionLimits(serial_wait_s=0.05),
    )
    results = []
    first = threading.Thread(target=lambda: results.append(rig.executor.apply_layout(asked(rig, THREE))))
    first.start()
    assert inside.wait(10)
    assert refused(rig.executor.apply_layout(asked(rig, FOUR)), "serial")
    go_on.set()
    first.join(10)
    assert applied(results[0])


def test_f26_a_lease_on_an_instance_that_was_made_again_under_the_same_uuid_holds_nothing():
    rig = rig_with()
    rig.executor.apply_layout(asked(rig, THREE))
    ((uuid, (_, old)),) = rig.generations().items()
    rig.executor.hold_devices({uuid})
    assert rig.executor.observe_device("GPU-0").busy == {2}
    assert refused(rig.executor.apply_layout(asked(rig, FOUR)), "busy")
    rig.device.remove(2)
    assert [applied(result) for result in rig.executor.check_layouts()] == [True]
    ((same, (_, new)),) = rig.generations().items()
    assert (same, new > old) == (uuid, True)
    assert rig.executor.observe_device("GPU-0").busy == frozenset()
    assert applied(rig.executor.apply_layout(asked(rig, FOUR)))


def test_f26_a_lease_outlives_the_agent_until_others_are_held():
    rig = rig_with(ONE, THREE)
    rig.executor.hold_devices({"MIG-2-0"})
    rig.start_agent()
    rig.executor.recover()
    assert rig.executor.observe_device("GPU-0").busy == {2}
    assert refused(rig.executor.apply_layout(asked(rig, FOUR)), "busy")
    rig.executor.hold_devices({"MIG-7-0"})
    assert applied(rig.executor.apply_layout(asked(rig, ONE)))
    # No lease, but a process: that is looked at too.
    rig.executor.hold_devices(())
    rig.device.users[1] = (7, 0)
    assert refused(rig.executor.apply_layout(asked(rig, FOUR)), "busy")


def test_f26_a_lease_on_the_whole_gpu_keeps_its_mode_and_its_instances():
    rig = rig_with(mig_enabled=False)
    rig.executor.hold_devices({"GPU-0"})
    assert refused(rig.executor.apply_layout(asked(rig, THREE)), "busy")
    rig = rig_with(THREE)
    rig.executor.hold_devices({"GPU-0"})
    assert refused(rig.executor.apply_layout(asked(rig, FOUR)), "busy")
    rig.executor.hold_devices(())
    assert applied(rig.executor.apply_layout(asked(rig, FOUR)))
