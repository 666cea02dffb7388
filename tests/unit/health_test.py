"""Announced errors and failing memory, as events and counts."""

import pytest

from eelgrid_agent.devices.port import DeviceEvent, DeviceEventKind, Missing
from eelgrid_agent.node.inventory import HealthMonitor
from eelgrid_protos.messages import AbsenceReason, NodeEventKind, Reading

XID = DeviceEventKind.XID


def test_an_xid_is_reported_counted_and_dated() -> None:
    health = HealthMonitor()
    for wall_ns in (5, 9):
        (event,) = health.on_device_events((DeviceEvent(kind=XID, gpu_uuid="GPU-1", code=79),), wall_ns=wall_ns)
        assert (event.kind, event.gpu_uuid, event.time_ns) == (NodeEventKind.XID, "GPU-1", wall_ns)
        assert event.detail == "XID 79: an error of device, driver or bus"
    assert (health.xids, health.xid_last_ns) == ({("GPU-1", 79): 2}, {("GPU-1", 79): 9})


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109])
def test_an_applications_error_is_reported_as_one(code: int) -> None:
    (event,) = HealthMonitor().on_device_events(
        (DeviceEvent(kind=XID, gpu_uuid="GPU-1", code=code, gpu_instance_id=3),), wall_ns=1
    )
    assert event.detail == f"XID {code} in GPU instance 3: an application's error"


def test_the_kinds_of_codes_kept_are_bounded() -> None:
    health = HealthMonitor()
    health.on_device_events(
        tuple(DeviceEvent(kind=XID, gpu_uuid="GPU-1", code=code) for code in range(2000)), wall_ns=1
    )
    assert len(health.xids) == 512


def test_counts_are_reported_when_they_rise_and_states_when_they_change() -> None:
    health = HealthMonitor()

    def look(**values: float) -> list[str]:
        found = health.on_extended_readings(
            {"GPU-1": {Reading[name]: value for name, value in values.items()}}, wall_ns=1
        )
        assert all(event.kind is NodeEventKind.HEALTH for event in found)
        return [event.detail for event in found]

    assert look(ECC_UNCORRECTED_VOLATILE=7, ROW_REMAP_PENDING=0, RECOVERY_ACTION=0) == []
    assert look(ECC_UNCORRECTED_VOLATILE=9) == ["2 new uncorrectable memory errors, 9 in all"]
    assert look(ECC_UNCORRECTED_VOLATILE=0) == []  # the driver was reloaded
    assert look(ROW_REMAP_PENDING=1) == ["memory rows wait to be remapped; reset the GPU when it is free"]
    assert look(ROW_REMAP_PENDING=1) == []
    assert look(ROW_REMAP_PENDING=0) == ["over: memory rows wait to be remapped"]
    assert look(RECOVERY_ACTION=4) == ["the driver requests: drain the node, then reset the GPU"]
    assert health.cordons() == {"GPU-1": "the driver requests: drain the node, then reset the GPU"}
    assert look(RECOVERY_ACTION=9) == ["the driver requests recovery action 9"]
    assert look(RECOVERY_ACTION=0) == ["the driver no longer requests recovery"]
    assert health.cordons() == {}


def test_a_state_that_stands_at_the_first_look_is_reported_and_an_absent_reading_is_not() -> None:
    health = HealthMonitor()
    (event,) = health.on_extended_readings({"GPU-1": {Reading.ROW_REMAP_FAILED: 1.0}}, wall_ns=1)
    assert "replace the GPU" in event.detail
    absent = Missing(AbsenceReason.NOT_SUPPORTED)
    assert health.on_extended_readings({"GPU-1": {Reading.ROW_REMAP_FAILED: absent}}, wall_ns=2) == ()


def test_a_device_that_hangs_is_reported_and_takes_no_work_until_it_answers() -> None:
    health = HealthMonitor()
    hangs, answers = (
        (DeviceEvent(kind=kind, gpu_uuid="GPU-1"),) for kind in (DeviceEventKind.HUNG, DeviceEventKind.ANSWERS)
    )
    (event,) = health.on_device_events(hangs, wall_ns=7)
    assert (event.kind, event.gpu_uuid, event.time_ns) == (NodeEventKind.GPU_HUNG, "GPU-1", 7)
    assert health.cordons() == {"GPU-1": event.detail}
    assert "reboot the node" in event.detail
    (event,) = health.on_device_events(answers, wall_ns=8)
    assert (event.kind, event.detail) == (NodeEventKind.HEALTH, "over: the device answers again")
    assert health.cordons() == {}
