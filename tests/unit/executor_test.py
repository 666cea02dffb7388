"""The MIG executor over a small device: what is made, kept, repaired, given up, and what a crash leaves of it."""

from dataclasses import replace

import pytest
from bench.mig_device import Fault
from bench.node_crashes import check_crashes, check_simulated_crashes
from tests.mig_rig import FOUR, G3, G4, OFF, ONE, SEVEN, THREE, applied, asked, kinds, refused, rig_with, standing

from eelgrid_agent.devices.port import DeviceTimeout, NoPermission
from eelgrid_agent.enforce.mig.layout import InvalidLayout
from eelgrid_agent.enforce.mig.partitioner import TransitionRefused
from eelgrid_agent.enforce.mig.runner import TransitionLimits
from eelgrid_agent.state_files import StateUnwritable
from eelgrid_protos.messages import ApplyStatus, GpuLayout, NodeEventKind, WantedInstance


def test_a_layout_is_made_read_back_and_reported():
    rig = rig_with(ONE, THREE)
    result = rig.executor.apply_layout(asked(rig, FOUR, THREE))
    assert applied(result)
    assert result.detail == "read back: 4g.40gb@0, 3g.40gb@4"
    assert standing(rig) == {FOUR, THREE}
    (event,) = rig.executor.drain_events()
    assert (event.kind, event.gpu_uuid) == (NodeEventKind.LAYOUT_CHANGED, "GPU-0")
    assert rig.executor.drain_events() == ()
    assert applied(rig.executor.apply_layout(asked(rig, FOUR, THREE)))
    assert rig.executor.check_layouts() == ()
    assert kinds(rig) == []


def test_the_intent_is_on_the_disk_before_the_first_step_and_gone_after_the_last():
    rig = rig_with()
    rig.hook.names.clear()
    rig.executor.apply_layout(asked(rig, THREE))
    assert rig.hook.names[:4] == ["before store", "after store", "before store", "after store"]
    assert rig.hook.names[4] == "before create_gpu_instance"
    assert rig.hook.names[-1] == "after store"
    (record,) = rig.journal.records
    assert record.intent is None
    assert [part.place for part in record.target.parts] == [(G3, 4)]


def test_where_processes_cannot_be_listed_every_instance_counts_as_in_use():
    rig = rig_with(ONE)
    rig.device.lists_processes = False
    assert refused(rig.executor.apply_layout(asked(rig, THREE)), "busy")
    assert applied(rig.executor.apply_layout(asked(rig, ONE, (G3, 4, (0, 1)))))


def test_a_user_without_the_right_is_told_so_and_nothing_is_left_behind():
    rig = rig_with(ONE)
    rig.device.faults = [Fault("create_gpu_instance", NoPermission("needs mig/config; run as root"))]
    assert refused(rig.executor.apply_layout(asked(rig, THREE)), "no-permission")
    assert standing(rig) == {ONE}


def test_a_layout_that_cannot_stand_is_refused_by_the_rule_of_geometry():
    rig = rig_with()
    instances = (WantedInstance(profile="3g", start=1),)
    result = rig.executor.apply_layout(GpuLayout(gpu_uuid="GPU-0", mig_enabled=True, instances=instances))
    assert refused(result, "geometry")
    assert "instances[0]" in result.detail
    with pytest.raises(InvalidLayout):
        rig.executor.plan_layout(GpuLayout(gpu_uuid="GPU-0", mig_enabled=True, instances=instances))


def test_drift_is_repaired_a_bounded_number_of_times_then_given_up_and_reported_once():
    rig = rig_with()
    rig.executor.apply_layout(asked(rig, THREE))
    rig.executor.drain_events()
    for _ in range(TransitionLimits().repairs_most):
        rig.device.remove(2)
        assert [applied(result) for result in rig.executor.check_layouts()] == [True]
        told = kinds(rig)
        assert told == [NodeEventKind.SETTING_DRIFT, NodeEventKind.LAYOUT_CHANGED, NodeEventKind.SETTING_RESTORED]
    rig.device.remove(2)
    (result,) = rig.executor.check_layouts()
    assert (result.status, result.rule) == (ApplyStatus.FAILED, "drift")
    assert kinds(rig) == [NodeEventKind.ENFORCEMENT_SUSPENDED]
    rig.start_agent()
    assert rig.executor.recover() == ()
    assert (kinds(rig), rig.device.held) == ([], {})
    assert applied(rig.executor.apply_layout(asked(rig, THREE)))


def test_repairs_are_forgiven_once_the_layout_stood_long_enough():
    rig = rig_with()
    rig.executor.apply_layout(asked(rig, THREE))
    rig.device.remove(2)
    rig.executor.check_layouts()
    rig.executor.check_layouts()
    assert rig.executor.record("GPU-0").repairs == 1
    rig.device.sleep(TransitionLimits().steady_s)
    rig.executor.check_layouts()
    assert rig.executor.record("GPU-0").repairs == 0


def test_drift_that_cannot_be_repaired_is_reported_once_and_costs_no_repair():
    rig = rig_with()
    rig.executor.apply_layout(asked(rig, THREE))
    rig.device.remove(2)
    rig.device.stand(*SEVEN, foreign=True)
    assert [refused(result, "foreign") for result in rig.executor.check_layouts()] == [True]
    assert rig.executor.check_layouts() == ()
    assert rig.executor.record("GPU-0").repairs == 0
    assert rig.device.violations == []


def test_a_lost_device_is_left_alone_and_its_change_is_finished_when_it_returns():
    rig = rig_with()
    rig.device.faults = [Fault("create_compute_instance", DeviceTimeout("no answer"))]
    rig.executor.apply_layout(asked(rig, THREE))
    rig.device.lost = True
    assert rig.executor.check_layouts() == ()
    assert refused(rig.executor.apply_layout(asked(rig, THREE)), "lost")
    rig.device.lost = False
    assert [applied(result) for result in rig.executor.check_layouts()] == [True]
    assert standing(rig) == {THREE}


def test_compute_instances_that_lie_awkwardly_are_all_made_again():
    """Ones at 0 and 2 leave two slices and no room for a two; no call tells where they lie."""
    rig = rig_with((G4, 0, (0, 0, 0)))
    del rig.device.held[1].compute[1]
    assert applied(rig.executor.apply_layout(asked(rig, (G4, 0, (1, 0, 0)))))
    assert standing(rig) == {(G4, 0, (1, 0, 0))}


def test_nothing_is_changed_where_the_journal_cannot_be_written():
    rig = rig_with(ONE)

    def moment(name):
        raise StateUnwritable("no space left; make room")

    rig.journal.hook = moment
    rig.hook.names.clear()
    result = rig.executor.apply_layout(asked(rig, THREE))
    assert (result.status, result.rule) == (ApplyStatus.FAILED, "journal")
    assert rig.hook.names == []
    assert standing(rig) == {ONE}


def test_an_unknown_gpu_is_an_answer_and_a_part_without_mig_is_at_peace_with_mig_off():
    rig = rig_with(mig_enabled=False)
    result = rig.executor.apply_layout(replace(OFF, gpu_uuid="GPU-9"))
    assert (result.subject, result.status) == ("GPU-9", ApplyStatus.FAILED)
    assert applied(rig.executor.apply_layout(OFF))
    rig.device.lost = True
    with pytest.raises(TransitionRefused):
        rig.executor.plan_layout(OFF)


@pytest.mark.parametrize("check", [check_crashes, check_simulated_crashes])
def test_crash_at_every_moment_of_some_transitions(check):
    """The benchmark runs thousands."""
    tally = check(seed=0, count=8)
    assert (tally.failures, tally.first) == (0, [])
    assert tally.cases > 80


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_crashes, check_simulated_crashes])
def test_crash_at_every_moment_of_many_transitions(check):
    tally = check(seed=10_000, count=1000)
    assert (tally.failures, tally.first) == (0, [])
