"""The device and control ports over AMD's binding: what holds for every vendor, and what AMD means by it."""

import pytest
from tests.simulated_amdsmi import SimulatedAmdSmi

from eelgrid_agent.devices.amd.device import AmdControl, AmdDevice
from eelgrid_agent.devices.port import (
    FAST_READINGS,
    SLOW_READINGS,
    GpuLostError,
    Missing,
    NoPermission,
    NotSupported,
    OutOfRange,
    RawReadings,
)
from eelgrid_agent.simulation.spec import GpuLoad
from eelgrid_protos.messages import READING_RANGES, AbsenceReason, AccessLevel, Reading

SECOND = 1_000_000_000
NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)


class Rig:
    def __init__(self, gpus: int = 4, **options: object) -> None:
        self.clock = [5 * SECOND]
        self.smi = SimulatedAmdSmi(gpus, monotonic_ns=lambda: self.clock[0], **options)
        self.device = AmdDevice(self.smi, user_id=lambda: 0)
        self.control = AmdControl(self.device)

    def uuid(self, index: int) -> str:
        return self.smi.uuid(index)

    def read(self, index: int) -> RawReadings:
        return self.device.read(self.uuid(index))

    def advance(self, seconds: float) -> None:
        self.clock[0] += int(seconds * SECOND)

    def lose(self, index: int) -> None:
        self.smi.devices[index].lose(self.clock[0])

    def restore(self, index: int) -> None:
        self.smi.devices[index].restore(self.clock[0])


@pytest.fixture(params=["7.0", "6.3"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(old=request.param == "6.3")


def assert_well_formed(look: RawReadings) -> None:
    assert set(look.values) == set(FAST_READINGS) - {Reading.ENERGY_J}
    for reading, value in [*look.values.items(), (Reading.ENERGY_J, look.energy_counter_j)]:
        if not isinstance(value, Missing):
            assert READING_RANGES[reading].low <= value <= READING_RANGES[reading].high


def test_a_device_that_is_passed_over_is_not_asked():
    asked = []
    rig = Rig(stall=lambda: asked.append("stall"))
    rig.smi.devices[1].hang()
    device = AmdDevice(rig.smi, visit=lambda place: place != 1)
    assert [gpu.index for gpu in device.gpus()] == [0, 2, 3]
    assert asked == []


def test_a_slow_look_holds_every_slow_reading_and_no_sentinel(rig):
    slow = rig.device.read_slow(rig.uuid(0))
    assert set(slow) == set(SLOW_READINGS)
    numbers = {reading: value for reading, value in slow.items() if not isinstance(value, Missing)}
    assert numbers == {
        Reading.POWER_LIMIT_REQUESTED_W: 750.0,
        Reading.MEMORY_TEMPERATURE_C: numbers[Reading.MEMORY_TEMPERATURE_C],
        Reading.ECC_CORRECTED_VOLATILE: 3.0,
        Reading.ECC_UNCORRECTED_VOLATILE: 0.0,
        Reading.REMAPPED_ROWS_UNCORRECTABLE: 1.0,
        Reading.ROW_REMAP_PENDING: 0.0,
        Reading.ROW_REMAP_FAILED: 0.0,
        Reading.PCIE_LINK_GENERATION: 5.0,
        Reading.PCIE_LINK_WIDTH: 16.0,
        Reading.NVLINK_ACTIVE_LINKS: 7.0,
        Reading.NVLINK_SENT_BYTES: 14e6,
        Reading.NVLINK_RECEIVED_BYTES: 7e6,
        Reading.PROCESSES: 0.0,
    }
    assert slow[Reading.PCIE_REPLAYS] == NOT_SUPPORTED, "the largest number of its width is no count"


def test_a_power_limit_that_holds_the_clock_down_shows_as_a_reason_from_the_second_look_on(rig):
    mask = Reading.EVENT_REASONS_MASK
    assert rig.read(0).values[mask] == Missing(AbsenceReason.NOT_SAMPLED)
    assert rig.read(0).values[mask] == 0.0
    rig.smi.set_load(0, GpuLoad(utilization_ratio=1.0))
    rig.control.set_power_limit(rig.uuid(0), 400.0)
    rig.advance(1.0)
    look = rig.read(0)
    assert look.values[mask] == 4.0
    assert (look.values[Reading.POWER_W], look.values[Reading.POWER_LIMIT_W]) == (400.0, 400.0)
    assert look.values[Reading.SM_CLOCK_MHZ] < 2100.0
    rig.control.set_power_limit(rig.uuid(0), 750.0)
    rig.advance(1.0)
    assert rig.read(0).values[mask] == 0.0


def test_limits_and_clocks_are_set_and_read_back_and_kept_within_the_part(rig):
    control, uuid = rig.control, rig.uuid(0)
    rig.smi.set_load(0, GpuLoad(utilization_ratio=1.0))
    control.set_power_limit(uuid, 512.25)
    settings = control.power_settings(uuid)
    assert (settings.requested_w, settings.enforced_w, settings.default_w) == (512.25, 512.25, 750.0)
    assert (settings.min_w, settings.max_w) == (0.0, 750.0)
    with pytest.raises(OutOfRange, match="750"):
        control.set_power_limit(uuid, 751.0)
    control.set_power_limit(uuid, 750.0)
    control.lock_sm_clocks(uuid, 500, 1000)
    assert control.power_settings(uuid).sm_clock_mhz == 1000
    control.lock_sm_clocks(uuid, 1200, 1500)
    for low, high in ((1000, 2101), (1500, 1200)):
        with pytest.raises(OutOfRange):
            control.lock_sm_clocks(uuid, low, high)
    with pytest.raises(OutOfRange):
        control.lock_sm_clocks(uuid, 1, 1500)
    control.unlock_sm_clocks(uuid)
    assert control.power_settings(uuid).sm_clock_mhz == 2100


def test_who_is_not_root_reads_and_changes_nothing():
    rig = Rig(root=False)
    device = AmdDevice(rig.smi, user_id=lambda: 1000)
    assert device.access() is AccessLevel.READ_ONLY
    assert rig.device.access() is AccessLevel.ROOT
    with pytest.raises(NoPermission, match="root"):
        AmdControl(device).set_power_limit(rig.uuid(0), 400.0)
    assert_well_formed(device.read(rig.uuid(0)))


def test_mig_is_refused_whatever_is_asked(rig):
    control, uuid = rig.control, rig.uuid(0)
    for change in (
        lambda: control.mig_geometry(uuid),
        lambda: control.set_mig_mode(uuid, enabled=True),
        lambda: control.create_gpu_instance(uuid, 19, 0),
        lambda: control.destroy_gpu_instance(uuid, 1),
        lambda: control.create_compute_instance(uuid, 1, 0),
        lambda: control.destroy_compute_instance(uuid, 1, 0),
        lambda: control.set_power_profile(uuid, 2),
    ):
        with pytest.raises(NotSupported, match="whole devices"):
            change()
    assert rig.device.read_instances(uuid) == ()


def test_a_change_of_a_lost_device_says_so(rig):
    rig.device.gpus()
    rig.lose(0)
    with pytest.raises(GpuLostError):
        rig.control.set_power_limit(rig.uuid(0), 400.0)


@pytest.mark.parametrize(("mode", "parts"), [("SPX", 1), ("DPX", 2), ("TPX", 3), ("QPX", 4), ("CPX", 8)])
def test_a_partitioned_device_is_one_board_with_one_power(mode, parts):
    rig = Rig(2, mode=mode)
    assert [(gpu.index, gpu.pci_bus_id) for gpu in rig.device.gpus()] == [(0, "0000:10:00.0"), (parts, "0000:11:00.0")]
    assert rig.read(1).values[Reading.POWER_W] == 140.0


def test_processes_and_topology(rig):
    rig.smi.processes[0] = [(12, 2**30), (7, 2**20), (12, 2**30)]
    found = rig.device.processes(rig.uuid(0))
    assert [(process.pid, process.memory_bytes) for process in found] == [(7, 2**20), (12, 2**30)]
    links = rig.device.topology()
    assert len(links) == 6
    assert {(link.ancestor, link.nvlinks) for link in links} == {(40, 1)}
    assert rig.device.take_events() == ()


def test_a_binding_that_lacks_a_function_lacks_the_reading():
    class Older(SimulatedAmdSmi):
        @property
        def amdsmi_get_gpu_xgmi_link_status(self):
            raise AttributeError

    device = AmdDevice(Older(1, monotonic_ns=lambda: SECOND))
    (gpu,) = device.gpus()
    assert device.read_slow(gpu.uuid)[Reading.NVLINK_ACTIVE_LINKS] == NOT_SUPPORTED
