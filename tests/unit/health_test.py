"""Announced errors and failing memory, as events and counts."""

import pytest

from eelgrid_agent.devices.port import DeviceEvent, DeviceEventKind, FabricState, GpuProcess, Missing, ProcessKind
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


class Fabric:
    """Looks at one device of an NVSwitch system, a second apart."""

    def __init__(self) -> None:
        self.health, self.now_ns = HealthMonitor(), 0

    def look(self, state: float | Missing, *pids: int, kind: ProcessKind = ProcessKind.COMPUTE) -> list[str]:
        self.now_ns += 10**9
        found = self.health.on_extended_readings(
            {"GPU-1": {Reading.FABRIC_STATE: state}},
            {"GPU-1": tuple(GpuProcess(pid=pid, kind=kind) for pid in pids)},
            wall_ns=self.now_ns,
        )
        assert all(event.kind is NodeEventKind.HEALTH for event in found)
        return [event.detail for event in found]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (FabricState.NOT_STARTED, "has not started"),
        (FabricState.IN_PROGRESS, "is in progress"),
        (FabricState.FAILED, "has failed"),
    ],
)
def test_a_device_that_is_not_registered_with_its_fabric_takes_no_work_until_it_is(
    state: FabricState, words: str
) -> None:
    fabric = Fabric()
    (told,) = fabric.look(float(state))
    assert told == (
        f"its registration with the NVSwitch fabric {words}, and CUDA fails with error 802 until it is completed: see "
        "systemctl status nvidia-fabricmanager"
    )
    assert fabric.health.cordons() == {"GPU-1": told}
    assert fabric.look(float(state)) == []
    assert fabric.look(3.0) == ["over: it is registered with its NVSwitch fabric"]
    assert fabric.health.cordons() == {}
    assert fabric.look(3.0) == []


def test_a_device_without_a_fabric_or_with_one_that_stands_says_nothing() -> None:
    for state in (Missing(AbsenceReason.NOT_SUPPORTED), 3.0, 77.0):
        fabric = Fabric()
        assert fabric.look(state) == []
        assert fabric.health.cordons() == {}
        assert fabric.health.find_fault("GPU-1", since_ns=0) == ""


def test_what_failed_on_a_device_without_a_fabric_did_not_fail_by_itself() -> None:
    fabric = Fabric()
    fabric.look(3.0)
    fabric.look(2.0)
    fabric.look(3.0)
    fault = "it was not registered with its NVSwitch fabric"
    at_once = Fabric()
    at_once.look(2.0)
    # It started, and failed, before the next look.
    assert at_once.health.find_fault("GPU-1", since_ns=1_500_000_000) == fault
    assert [fabric.health.find_fault("GPU-1", since_ns=second * 10**9) for second in (1, 2, 3)] == [fault, fault, ""]


def test_a_process_that_computes_without_a_fabric_shows_that_none_is_needed() -> None:
    """What computed before the state was seen says nothing: its context is older."""
    fabric = Fabric()
    fabric.look(2.0, 7)
    fabric.look(2.0, 7)
    fabric.look(2.0, 7, 8, kind=ProcessKind.GRAPHICS)
    assert fabric.health.cordons()
    fabric.look(2.0, 7, 9)
    assert fabric.health.cordons() == {}
    assert fabric.health.find_fault("GPU-1", since_ns=0) == ""


def test_an_operator_may_say_that_no_fabric_is_needed() -> None:
    fabric = Fabric()
    fabric.health.needs_fabric = False
    fabric.look(2.0)
    assert fabric.health.cordons() == {}
    assert fabric.health.find_fault("GPU-1", since_ns=0) == ""
