"""The two ports over every vendor's library: the very same promises, whoever made the device."""

from collections.abc import Iterator

import pytest
from tests.device_rig import assert_in_range, assert_well_formed, throughout
from tests.vendor_rig import WAYS, VendorRig, open_vendor

from eelgrid_agent.devices.port import (
    FAST_READINGS,
    SLOW_READINGS,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    Missing,
    OutOfRange,
    UnknownGpu,
)
from eelgrid_agent.simulation.spec import GpuLoad
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import AbsenceReason, Inventory, Reading


@pytest.fixture(params=WAYS)
def rig(request: pytest.FixtureRequest) -> Iterator[VendorRig]:
    with open_vendor(request.param) as rig:
        yield rig


def test_devices_are_listed_by_index_and_the_listing_crosses_the_wire(rig: VendorRig) -> None:
    gpus, part = rig.device.gpus(), rig.part
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert tuple(gpu.uuid for gpu in gpus) == rig.uuids
    assert len({gpu.pci_bus_id for gpu in gpus}) == 4
    assert {gpu.numa_node for gpu in gpus} == {0}
    assert {(gpu.product, gpu.model) for gpu in gpus} == {(part.product, part.model)}
    assert gpus[0].memory_bytes // 2**30 in (part.memory_gib, part.memory_gib - 1)
    limits = (gpus[0].power_limit_min_w, gpus[0].power_limit_default_w, gpus[0].power_limit_max_w)
    assert limits == part.limits_w
    assert not any(gpu.mig_enabled or gpu.gpu_instances for gpu in gpus)
    assert rig.device.driver_version() == part.driver
    inventory = Inventory(node_name="node-0", cpu_milli=1, memory_bytes=1, gpus=gpus)
    assert decode_message(Inventory, encode_message(inventory)) == inventory


def test_a_look_holds_every_reading_and_follows_the_load(rig: VendorRig) -> None:
    idle = rig.read(0)
    rig.put_load(0, GpuLoad(utilization_ratio=0.5, memory_bytes=3 * 2**30))
    rig.advance(5.0)
    busy, part = rig.read(0), rig.part
    for look in (idle, busy):
        assert_well_formed(look)
    half_w = (part.idle_w + part.busy_w) / 2
    assert idle.values[Reading.POWER_W] == pytest.approx(part.idle_w)
    assert busy.values[Reading.POWER_W] == pytest.approx(half_w, abs=0.001)
    assert (idle.values[Reading.UTILIZATION_RATIO], busy.values[Reading.UTILIZATION_RATIO]) == (0.0, 0.5)
    assert busy.values[Reading.MEMORY_USED_BYTES] >= 3 * 2**30
    assert (idle.values[Reading.SM_CLOCK_MHZ], busy.values[Reading.SM_CLOCK_MHZ]) == part.clocks_mhz
    assert busy.values[Reading.POWER_LIMIT_W] == part.limits_w[1]
    assert busy.values[Reading.TEMPERATURE_C] > idle.values[Reading.TEMPERATURE_C] > 20.0
    assert busy.energy_counter_j - idle.energy_counter_j == pytest.approx(5.0 * half_w, abs=0.01)


def test_slow_looks_hold_every_reading_in_its_range(rig: VendorRig) -> None:
    slow = rig.device.read_slow(rig.uuids[0])
    assert set(slow) == set(SLOW_READINGS)
    assert_in_range(dict(slow))
    assert slow[Reading.POWER_LIMIT_REQUESTED_W] == rig.part.limits_w[1]
    assert rig.device.read_instances(rig.uuids[0]) == ()


def test_a_lost_device_is_silent_stays_listed_and_comes_back_with_its_counter_at_zero(rig: VendorRig) -> None:
    before = rig.device.gpus()
    rig.advance(100.0)
    assert rig.read(1).energy_counter_j == pytest.approx(100.0 * rig.part.idle_w, abs=0.1)
    rig.lose(1)
    for _ in range(2):
        assert throughout(rig.read(1), AbsenceReason.GPU_LOST)
        assert not throughout(rig.read(2), AbsenceReason.GPU_LOST)
        assert rig.device.gpus() == before
    assert set(rig.device.read_slow(rig.uuids[1]).values()) == {Missing(AbsenceReason.GPU_LOST)}
    with pytest.raises(GpuLostError):
        rig.control.set_power_limit(rig.uuids[1], 400.0)
    rig.restore(1)
    rig.advance(1.0)
    assert rig.read(1).energy_counter_j == pytest.approx(rig.part.idle_w, abs=0.1)
    assert rig.device.gpus() == before


def test_a_device_that_never_answered_is_not_listed(rig: VendorRig) -> None:
    rig.lose(3)
    assert rig.uuids[3] not in {gpu.uuid for gpu in rig.device.gpus()}
    with pytest.raises(UnknownGpu, match=rig.uuids[3]):
        rig.read(3)
    rig.restore(3)
    assert len(rig.device.gpus()) == 4


def test_a_hung_device_times_out_alone_and_loses_nothing(rig: VendorRig) -> None:
    before = rig.device.gpus()
    rig.hang(2)
    rig.advance(10.0)
    assert throughout(rig.read(2), AbsenceReason.TIMED_OUT)
    assert not throughout(rig.read(1), AbsenceReason.TIMED_OUT)
    assert rig.device.gpus() == before
    with pytest.raises(DeviceTimeout):
        rig.control.set_power_limit(rig.uuids[2], 400.0)
    rig.restore(2)
    assert rig.read(2).energy_counter_j == pytest.approx(10.0 * rig.part.idle_w, abs=0.1)


def test_without_a_driver_there_is_nothing_and_with_it_all_is_back(rig: VendorRig) -> None:
    before = rig.device.gpus()
    rig.set_driver(False)
    assert throughout(rig.read(0), AbsenceReason.GPU_LOST)
    with pytest.raises(DriverUnavailable, match=f"modprobe {rig.part.module}"):
        rig.device.gpus()
    with pytest.raises(DriverUnavailable):
        rig.device.driver_version()
    assert throughout(rig.read(0), AbsenceReason.GPU_LOST)
    rig.set_driver(True)
    assert isinstance(rig.read(0).energy_counter_j, float)
    assert rig.device.gpus() == before
    assert rig.device.driver_version() == rig.part.driver


def test_an_unknown_device_is_an_error_that_names_it(rig: VendorRig) -> None:
    for ask in (rig.device.read, rig.device.read_slow, rig.device.read_instances, rig.device.processes):
        with pytest.raises(UnknownGpu, match="GPU-0000"):
            ask("GPU-0000")
    for change in (rig.control.power_settings, rig.control.unlock_sm_clocks, rig.control.mig_geometry):
        with pytest.raises(UnknownGpu, match="GPU-0000"):
            change("GPU-0000")


def test_a_closed_port_opens_again_and_holds_no_session(rig: VendorRig) -> None:
    before = rig.device.gpus()
    assert rig.holds_session()
    rig.device.close()
    rig.device.close()
    assert not rig.holds_session()
    assert_well_formed(rig.read(3))
    assert rig.device.gpus() == before
    assert rig.holds_session()


def test_a_device_that_is_passed_over_is_not_listed(rig: VendorRig) -> None:
    visited = []

    def visit(place: int) -> bool:
        visited.append(place)
        return place != 1

    device = rig.visited(visit)
    assert [gpu.index for gpu in device.gpus()] == [0, 2, 3]
    assert visited == [0, 1, 2, 3]
    device.close()


def test_limits_and_clocks_are_set_read_back_and_kept_within_the_part(rig: VendorRig) -> None:
    control, uuid = rig.control, rig.uuids[0]
    rig.put_load(0, GpuLoad(utilization_ratio=1.0))
    control.set_power_limit(uuid, 512.25)
    settings = control.power_settings(uuid)
    assert (settings.requested_w, settings.enforced_w) == (512.25, 512.25)
    assert (settings.min_w, settings.default_w, settings.max_w) == rig.part.limits_w
    rig.advance(1.0)
    look = rig.read(0)
    assert (look.values[Reading.POWER_W], look.values[Reading.POWER_LIMIT_W]) == (
        pytest.approx(512.25, abs=1.0),
        512.25,
    )
    with pytest.raises(OutOfRange):
        control.set_power_limit(uuid, rig.part.limits_w[2] + 1.0)
    control.set_power_limit(uuid, rig.part.limits_w[1])
    control.lock_sm_clocks(uuid, 495, 990)
    rig.advance(1.0)
    assert rig.read(0).values[Reading.SM_CLOCK_MHZ] == 990.0
    with pytest.raises(OutOfRange):
        control.lock_sm_clocks(uuid, 1500, 1200)
    control.unlock_sm_clocks(uuid)
    rig.advance(1.0)
    assert rig.read(0).values[Reading.SM_CLOCK_MHZ] == rig.part.clocks_mhz[1]


def test_the_capped_clock_shows_as_its_reason(rig: VendorRig) -> None:
    rig.read(0)
    rig.put_load(0, GpuLoad(utilization_ratio=1.0))
    rig.control.set_power_limit(rig.uuids[0], 400.0)
    rig.advance(1.0)
    assert int(rig.read(0).values[Reading.EVENT_REASONS_MASK]) & 0x4
    assert Reading.EVENT_REASONS_MASK in FAST_READINGS


def test_every_pair_of_devices_is_linked_once(rig: VendorRig) -> None:
    links = rig.device.topology()
    assert {frozenset((link.one, link.other)) for link in links} == {
        frozenset((one, other)) for one in rig.uuids for other in rig.uuids if one != other
    }
    assert len(links) == 6
