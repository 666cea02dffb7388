"""Changes through the driver's worker: they are never repeated, and a lost answer is told as one."""

import threading
import time

import pytest
from tests.waiting import poll_until
from tests.worker_rig import LIMITS, LONG_S, Rig, rigs_in

from eelgrid_agent.devices.port import (
    ControlPort,
    DeviceEvent,
    DeviceEventKind,
    DeviceInUse,
    DeviceTimeout,
    InsufficientResources,
    OutcomeUnknown,
    OutOfRange,
    UnknownInstance,
)
from eelgrid_agent.devices.process.protocol import PORT_CALLS
from eelgrid_agent.devices.process.remote_device import RemoteDevice
from eelgrid_agent.devices.process.watchdog import WatchdogLimits
from eelgrid_agent.enforce.mig.journal import MIG_JOURNAL
from eelgrid_agent.enforce.mig.mig_service import LayoutReconciler
from eelgrid_agent.state_files import StateFile
from eelgrid_protos.messages import ApplyStatus, GpuLayout, WantedInstance

G1, G3 = 19, 9
# A probe that never comes due in a test.
SELDOM = WatchdogLimits(probe_first_s=60.0, probe_most_s=60.0)


@pytest.fixture
def rig_of(tmp_path):
    with rigs_in(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """A child that nobody harms."""
    rig = Rig(tmp_path_factory.mktemp("steady") / "scene", 2)
    yield rig
    assert rig.remote.starts_total == 1
    rig.remote.close()


def test_limits_are_set_and_read_back_in_the_child(steady):
    uuid = steady.uuids[0]
    steady.remote.set_power_limit(uuid, 450.0)
    steady.remote.lock_sm_clocks(uuid, 600, 1200)
    settings = steady.remote.power_settings(uuid)
    assert (settings.requested_w, settings.sm_clock_mhz) == (450.0, 1200)
    with pytest.raises(OutOfRange):
        steady.remote.set_power_limit(uuid, 9000.0)
    steady.remote.unlock_sm_clocks(uuid)
    steady.remote.set_power_limit(uuid, 700.0)
    assert steady.remote.power_settings(uuid).requested_w == 700.0


def test_instances_live_in_the_child_and_its_refusals_cross(steady):
    remote, uuid = steady.remote, steady.uuids[1]
    remote.set_mig_mode(uuid, enabled=True)
    instance = remote.create_gpu_instance(uuid, G3, 4)
    compute = remote.create_compute_instance(uuid, instance, 2)
    (found,) = next(gpu for gpu in remote.gpus() if gpu.uuid == uuid).gpu_instances
    assert (found.id, found.profile_id, found.start) == (instance, G3, 4)
    assert [child.id for child in found.compute_instances] == [compute]
    assert [look.gpu_instance_id for look in remote.read_instances(uuid)] == [instance]
    with pytest.raises(InsufficientResources):
        remote.create_gpu_instance(uuid, G3, 4)
    with pytest.raises(DeviceInUse):
        remote.destroy_gpu_instance(uuid, instance)
    with pytest.raises(UnknownInstance):
        remote.destroy_compute_instance(uuid, instance, 7)
    remote.destroy_compute_instance(uuid, instance, compute)
    remote.destroy_gpu_instance(uuid, instance)
    remote.set_mig_mode(uuid, enabled=False)


def test_every_change_is_marked_as_one_and_nothing_else_is():
    changes = {name for name in dir(ControlPort) if not name.startswith("_")} - {"power_settings", "mig_geometry"}
    assert {name for name, call in PORT_CALLS.items() if call.changes} == changes


def test_a_change_whose_answer_is_lost_is_reported_as_such_and_not_repeated(rig_of, tmp_path):
    rig = rig_of(2, scene={"state": str(tmp_path / "state.json")}, limits=LIMITS)
    remote, uuid = rig.remote, rig.uuids[1]
    remote.set_mig_mode(uuid, enabled=True)
    rig.say(mute="create_gpu_instance")
    with pytest.raises(OutcomeUnknown, match=r"create_gpu_instance on GPU-.* did not come back in time.*read it back"):
        remote.create_gpu_instance(uuid, G3, 4)
    rig.say()
    poll_until(lambda: rig.silent() == [])
    (found,) = next(gpu for gpu in remote.gpus() if gpu.uuid == uuid).gpu_instances
    assert (found.profile_id, found.start) == (G3, 4), "made once, though nobody heard of it"
    rig.say(mute="destroy_gpu_instance", stall="abort")
    with pytest.raises(OutcomeUnknown, match="ended the driver's worker"):
        remote.destroy_gpu_instance(uuid, found.id)


def test_a_change_on_a_device_that_hangs_already_never_begins_and_says_so(rig_of):
    rig = rig_of(2, limits=SELDOM)
    rig.hang(0)
    assert rig.silent() == [0]
    with pytest.raises(DeviceTimeout) as caught:
        rig.remote.set_power_limit(rig.uuids[0], 450.0)
    assert type(caught.value) is DeviceTimeout
    rig.remote.set_power_limit(rig.uuids[1], 450.0)
    assert rig.remote.power_settings(rig.uuids[1]).requested_w == 450.0


def test_a_change_that_nobody_waits_for_any_longer_may_take_hold_yet(rig_of):
    rig = rig_of(2, scene={"stall": 0.3})
    rig.hang(1, stall=0.3)
    change = ("set_power_limit", rig.uuids[1], 450.0)
    read = ("read", rig.uuids[0])
    unknown, unread = rig.remote.call_batch([change, read], 0.05)
    assert type(unknown) is OutcomeUnknown
    assert type(unread) is DeviceTimeout
    assert "under way" in str(unknown)
    assert rig.silent() == [1], "the driver says itself that it timed out"
    assert rig.remote.starts_total == 1


def test_changes_after_one_that_hangs_are_asked_of_the_next_child_and_those_before_it_stand(rig_of, tmp_path):
    rig = rig_of(3, scene={"state": str(tmp_path / "state.json")}, limits=SELDOM)
    rig.hang(1)
    before, lost, after = rig.remote.call_batch([("set_power_limit", uuid, 450.0) for uuid in rig.uuids], LONG_S)
    assert (before, after) == (None, None)
    assert type(lost) is OutcomeUnknown
    assert rig.remote.power_settings(rig.uuids[2]).requested_w == 450.0


def test_a_hang_and_its_end_are_reported_once_also_when_it_is_over_before_anybody_asks(rig_of):
    rig = rig_of(2)
    uuid = rig.uuids[1]
    began = DeviceEvent(kind=DeviceEventKind.HUNG, gpu_uuid=uuid)
    ended = DeviceEvent(kind=DeviceEventKind.ANSWERS, gpu_uuid=uuid)
    rig.hang(1)
    rig.silent()
    assert rig.remote.read_extended(rig.uuids).events == (began,)
    assert rig.remote.take_events() == ()
    rig.say()
    poll_until(lambda: rig.silent() == [])
    assert rig.remote.take_events() == (ended,)
    rig.hang(1)
    rig.silent()
    rig.say()
    poll_until(lambda: rig.silent() == [])
    assert rig.remote.take_events() == (began, ended)


def test_a_mode_change_is_alone_with_the_driver(rig_of):
    rig = rig_of(2, limits=WatchdogLimits(probe_first_s=0.0, probe_most_s=60.0))
    rig.hang(1)
    rig.silent()
    rig.remote.topology()
    assert len(rig.remote.children) == 2, "a probe stands beside it"
    hangs = rig.remote.hangs_total
    rig.remote.set_mig_mode(rig.uuids[0], enabled=True)
    assert len(rig.remote.children) == 1
    assert rig.remote.hangs_total == hangs, "it was called off and hung nothing"


def test_a_layout_is_reached_though_the_answer_to_a_step_was_lost(rig_of, tmp_path):
    rig = rig_of(1, scene={"state": str(tmp_path / "state.json"), "load": 0.0})
    executor = LayoutReconciler(
        rig.remote,
        rig.remote,
        StateFile(tmp_path / "mig.json", MIG_JOURNAL),
        boot_id=lambda: "boot-1",
        sleep=time.sleep,
        monotonic_s=time.monotonic,
        wall_ns=time.time_ns,
    )
    executor.recover()
    rig.say(mute="create_gpu_instance")
    wanted = (WantedInstance(profile="3g.40gb", start=4), WantedInstance(profile="1g.10gb", start=0))
    asked = GpuLayout(gpu_uuid=rig.uuids[0], mig_enabled=True, instances=wanted)
    first = executor.apply_layout(asked)
    assert first.status is not ApplyStatus.APPLIED
    rig.say()

    def settled() -> bool:
        rig.silent()
        executor.check_layouts()
        return executor.record(rig.uuids[0]).intent is None

    poll_until(settled)
    assert executor.apply_layout(asked).status is ApplyStatus.APPLIED
    (gpu,) = rig.remote.gpus()
    assert sorted((part.profile_id, part.start) for part in gpu.gpu_instances) == [(G3, 4), (G1, 0)]


def test_looks_and_changes_from_two_threads_do_not_meet(steady):
    failures, rounds = [], range(40)

    def change() -> None:
        for number in rounds:
            steady.remote.set_power_limit(steady.uuids[0], 400.0 + number)
            if steady.remote.power_settings(steady.uuids[0]).requested_w != 400.0 + number:
                failures.append(number)

    changer = threading.Thread(target=change)
    changer.start()
    for _ in rounds:
        assert steady.silent() == []
    changer.join()
    assert failures == []


def test_a_vendor_without_its_library_has_no_devices_and_the_child_stands():
    remote = RemoteDevice("amd", limits=LIMITS)
    try:
        for _ in range(2):
            (answer,) = remote.call_batch([("gpus",)], LONG_S)
            assert type(answer).__name__ == "DriverUnavailable"
            assert "amd-smi-lib" in str(answer)
        assert (remote.starts_total, remote.hangs_total) == (1, 0)
    finally:
        remote.close()
