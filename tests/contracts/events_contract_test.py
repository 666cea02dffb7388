"""What a driver announces and refuses, both ways over the same devices: events, rights, silence, a closed port."""

import pytest
from tests.device_rig import A100, H100, P100, T4, V100, Rig, open_rig
from tests.driver_latency import make_call_latency

from eelgrid_agent.devices.port import (
    DeviceEvent,
    DeviceEventKind,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    Missing,
    UnknownGpu,
)
from eelgrid_agent.simulation.spec import GpuSpec
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Reading

NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)
NOT_SAMPLED = Missing(AbsenceReason.NOT_SAMPLED)


def test_announcements_are_taken_once_and_from_the_first_call_on(rig: Rig) -> None:
    faults, h100, a100 = rig.node.faults, rig.uuid(H100), rig.uuid(A100)
    faults.announce_xid(h100, 13)
    assert rig.device.take_events() == ()
    faults.announce_xid(h100, 79)
    faults.announce_xid(a100, 94, 2)
    faults.announce(h100, DeviceEventKind.ECC_DOUBLE_BIT, 0)
    faults.announce(h100, DeviceEventKind.RECOVERY_ACTION, 1)
    wanted = [
        DeviceEvent(kind=DeviceEventKind.XID, gpu_uuid=h100, code=79),
        DeviceEvent(kind=DeviceEventKind.XID, gpu_uuid=a100, code=94, gpu_instance_id=2),
        DeviceEvent(kind=DeviceEventKind.ECC_DOUBLE_BIT, gpu_uuid=h100),
    ]
    if rig.node.spec.driver_branch >= 570:
        wanted.append(DeviceEvent(kind=DeviceEventKind.RECOVERY_ACTION, gpu_uuid=h100, code=1))
    assert list(rig.device.take_events()) == wanted
    assert rig.device.take_events() == ()


def test_what_a_lost_device_announced_survives_a_new_session(rig: Rig) -> None:
    rig.device.take_events()
    rig.node.faults.announce_xid(rig.uuid(H100), 79)
    rig.node.faults.lose_gpu(rig.uuid(H100))
    rig.read(H100)
    rig.device.gpus()
    assert [event.code for event in rig.device.take_events()] == [79]
    rig.node.faults.announce_xid(rig.uuid(T4), 31)
    assert [event.code for event in rig.device.take_events()] == [31]


def test_a_changed_layout_is_announced(way: str) -> None:
    with open_rig(way, GpuSpec(product="h100-sxm5-80gb", mig=())) as rig:
        rig.device.take_events()
        rig.node.create_gpu_instance(rig.uuid(0), 9, 4)
        (event,) = rig.device.take_events()
        assert (event.kind, event.gpu_instance_id) == (DeviceEventKind.MIG_CHANGED, 2)


def test_access_is_what_the_driver_gives(rig: Rig) -> None:
    assert rig.device.access() is AccessLevel.ROOT
    for level in (AccessLevel.MIG_CONFIG, AccessLevel.MIG_MONITOR, AccessLevel.READ_ONLY):
        rig.node.faults.set_rights(level)
        assert rig.device.access() is level


def test_a_silent_device_reads_missing_slowly_and_is_an_error_where_there_is_no_absence(rig: Rig) -> None:
    uuid = rig.uuid(V100)
    rig.device.gpus()
    for befall, reason, error in (
        (rig.node.faults.hang_gpu, AbsenceReason.TIMED_OUT, DeviceTimeout),
        (rig.node.faults.lose_gpu, AbsenceReason.GPU_LOST, GpuLostError),
    ):
        befall(uuid)
        assert set(rig.slow(V100).values()) == {Missing(reason)}
        with pytest.raises(error, match=uuid):
            rig.device.processes(uuid)
        with pytest.raises(error, match=uuid):
            rig.device.read_instances(uuid)
        rig.node.faults.restore_gpu(uuid)
        assert rig.device.processes(uuid) == ()
        assert rig.slow(V100)[Reading.PCIE_LINK_WIDTH] == 16.0


def test_calls_take_as_long_as_the_driver_was_measured_to_take(rig: Rig) -> None:
    uuid = rig.uuid(A100)
    rig.device.gpus()
    took_s = {}
    rig.node.faults.slow_calls(make_call_latency(rig.advance, scale=2.0))
    for ask in (rig.device.read, rig.device.processes, rig.device.read_instances):
        begin_ns = rig.clock[0]
        ask(uuid)
        took_s[ask.__name__] = (rig.clock[0] - begin_ns) / 1e9
    rig.node.faults.slow_calls(None)
    begin_ns = rig.clock[0]
    rig.device.read(uuid)
    assert rig.clock[0] == begin_ns
    # Sensors in a millisecond or two, process lists in several, a walk over instances in tenths of a second.
    assert 2e-4 < took_s["read"] < 5e-3 < 0.017 < took_s["processes"] < 0.05 < 0.09 < took_s["read_instances"] < 2.0


def test_an_unknown_device_or_no_driver_is_reported_by_every_method(rig: Rig) -> None:
    for ask in (rig.device.read_slow, rig.device.read_instances, rig.device.processes):
        with pytest.raises(UnknownGpu, match="GPU-0000"):
            ask("GPU-0000")
    rig.node.faults.unload_driver()
    for ask in (rig.device.access, rig.device.topology, rig.device.take_events):
        with pytest.raises(DriverUnavailable, match="load it"):
            ask()
    for ask in (rig.device.read_instances, rig.device.processes):
        with pytest.raises(DriverUnavailable, match="load it"):
            ask(rig.uuid(P100))
    assert set(rig.slow(P100).values()) == {Missing(AbsenceReason.GPU_LOST)}


def test_a_closed_port_opens_again_and_begins_again(rig: Rig) -> None:
    rig.load(H100, 1.0)
    rig.slow(H100)
    rig.device.processes(rig.uuid(H100))
    rig.device.take_events()
    rig.device.close()
    rig.node.faults.announce_xid(rig.uuid(H100), 13)
    rig.advance(1.0)
    assert rig.slow(H100)[Reading.SM_ACTIVITY_RATIO] in (NOT_SAMPLED, NOT_SUPPORTED)
    assert [process.sm_ratio for process in rig.device.processes(rig.uuid(H100))] == [None]
    assert rig.device.take_events() == ()
