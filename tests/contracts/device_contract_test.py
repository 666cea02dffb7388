"""The device port: the fleet's direct way, the NVML adapter over the simulated library, and a real GPU if there is one.

The first two stand over the very same devices and must say the same at the
same moment, whatever befell them.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_agent.device import Device, DriverUnavailable, Missing, RawReadings, UnknownGpu
from eelgrid_agent.nvml import NvmlDevice
from eelgrid_agent.simulation import GpuLoad, GpuSpec, MigSlice, NodeSpec, SimulatedNode
from eelgrid_agent.simulation.library import installed
from eelgrid_protos.codec import decode, encode
from eelgrid_protos.messages import READING_RANGES, AbsenceReason, Inventory, Reading

SECOND = 1_000_000_000
GPU_READINGS = {reading for reading in Reading if 0 < reading < Reading.HOST_CPU_UTILIZATION_RATIO}
LAYOUT = (
    MigSlice(profile="3g", start=4, compute_slices=(1, 2)),
    MigSlice(profile="1g.5gb", start=0),
    MigSlice(profile="1g", start=1, compute_slices=()),
    MigSlice(profile="2g.10gb", start=2, compute_slices=(1,)),
)
DEVICES = (
    GpuSpec(product="t4"),
    GpuSpec(product="p100-pcie-16gb"),
    GpuSpec(product="v100-sxm2-32gb", sensor_gain=0.954, sensor_offset_w=-1.18),
    GpuSpec(product="a100-sxm4-40gb", mig=LAYOUT),
    GpuSpec(product="a30", mig=(MigSlice(profile="2g", start=2), MigSlice(profile="1g", start=0))),
    GpuSpec(product="h100-sxm5-80gb"),
    GpuSpec(product="b200", mig=()),
    GpuSpec(product="openb-g2"),
)
T4, P100, V100, A100, A30, H100, B200, G2 = range(len(DEVICES))


@dataclass
class Rig:
    """Simulated devices, a clock that the test moves, and one way to them."""

    node: SimulatedNode
    clock: list[int]
    device: Device = field(init=False)

    def uuid(self, index: int) -> str:
        return self.node.devices[index].identity.uuid

    def read(self, index: int) -> RawReadings:
        return self.device.read(self.uuid(index))

    def advance(self, seconds: float) -> None:
        self.clock[0] += int(seconds * SECOND)


def make_node(clock: list[int], *, driver_version: str = "580.95.05") -> SimulatedNode:
    spec = NodeSpec(
        node_name="node-0", cpu_milli=96_000, memory_bytes=2**39, gpus=DEVICES, driver_version=driver_version
    )
    return SimulatedNode(spec, monotonic_ns=lambda: clock[0], seed=7)


@pytest.fixture(params=["direct", "nvml", "nvml-470", "direct-470"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    clock = [5 * SECOND]
    way, _, branch = request.param.partition("-")
    node = make_node(clock, driver_version="470.256.02" if branch else "580.95.05")
    rig = Rig(node, clock)
    with ExitStack() as stack:
        if way == "nvml":
            stack.enter_context(installed(node))
            rig.device = NvmlDevice()
        else:
            rig.device = node
        stack.callback(rig.device.close)
        yield rig


def assert_well_formed(look: RawReadings) -> None:
    assert set(look.values) == GPU_READINGS - {Reading.ENERGY_J}
    for reading, value in [*look.values.items(), (Reading.ENERGY_J, look.energy_counter_j)]:
        if not isinstance(value, Missing):
            assert READING_RANGES[reading].low <= value <= READING_RANGES[reading].high


def throughout(look: RawReadings, reason: AbsenceReason) -> bool:
    return {look.energy_counter_j, *look.values.values()} == {Missing(reason)} and len(look.values) == 8


def test_devices_are_listed_by_index_with_what_the_product_is(rig: Rig) -> None:
    gpus = rig.device.gpus()
    assert [gpu.index for gpu in gpus] == list(range(len(DEVICES)))
    assert [gpu.catalogue_key for gpu in gpus] == [spec.product for spec in DEVICES]
    assert [gpu.model for gpu in gpus] == [
        "T4", "P100-PCIE-16GB", "V100-SXM2-32GB", "A100-SXM4-40GB", "A30", "H100-80GB-HBM3", "B200", "G2",
    ]  # fmt: skip
    t4, h100 = gpus[T4], gpus[H100]
    assert (t4.product, t4.memory_bytes) == ("Tesla T4", 15360 * 2**20)
    assert (t4.power_limit_min_w, t4.power_limit_default_w, t4.power_limit_max_w) == (60.0, 70.0, 70.0)
    assert (h100.power_limit_min_w, h100.power_limit_default_w, h100.power_limit_max_w) == (200.0, 700.0, 700.0)
    assert (t4.mig_capable, h100.mig_capable, h100.mig_enabled, gpus[B200].mig_enabled) == (False, True, False, True)
    assert len({gpu.uuid for gpu in gpus}) == len({gpu.pci_bus_id for gpu in gpus}) == len(gpus)


def test_the_mig_layout_is_the_drivers_numbering(rig: Rig) -> None:
    gpus = rig.device.gpus()
    a100 = [(gi.id, gi.profile_id, gi.profile, gi.start, gi.size) for gi in gpus[A100].gpu_instances]
    assert a100 == [
        (2, 9, "3g.20gb", 4, 4), (4, 14, "2g.10gb", 2, 2), (7, 19, "1g.5gb", 0, 1), (8, 19, "1g.5gb", 1, 1),
    ]  # fmt: skip
    compute = {gi.id: [(ci.id, ci.profile_id) for ci in gi.compute_instances] for gi in gpus[A100].gpu_instances}
    assert compute == {2: [(0, 0), (1, 1)], 4: [(0, 0)], 7: [(0, 0)], 8: []}
    assert [(gi.id, gi.profile_id, gi.start) for gi in gpus[A30].gpu_instances] == [(2, 5, 2), (3, 14, 0)]
    uuids = [ci.uuid for gpu in gpus for gi in gpu.gpu_instances for ci in gi.compute_instances]
    assert len(set(uuids)) == 6
    assert all(uuid.startswith("MIG-") for uuid in uuids)


def test_the_listing_crosses_the_wire(rig: Rig) -> None:
    inventory = Inventory(node_name="node-0", cpu_milli=1, memory_bytes=1, gpus=rig.device.gpus())
    assert decode(Inventory, encode(inventory)) == inventory


def test_a_look_holds_every_reading_and_follows_the_load(rig: Rig) -> None:
    idle = rig.read(H100)
    rig.node.set_load(rig.uuid(H100), GpuLoad(utilization_ratio=0.5, memory_bytes=3 * 2**30))
    rig.advance(5.0)
    busy = rig.read(H100)
    assert_well_formed(idle)
    assert_well_formed(busy)
    assert idle.values[Reading.POWER_W] == pytest.approx(69.05)
    assert busy.values[Reading.POWER_W] == pytest.approx((69.05 + 700.0) / 2, abs=0.001)
    assert busy.values[Reading.UTILIZATION_RATIO] == 0.5
    assert busy.values[Reading.MEMORY_USED_BYTES] >= 3 * 2**30
    assert (idle.values[Reading.SM_CLOCK_MHZ], busy.values[Reading.SM_CLOCK_MHZ]) == (345.0, 1980.0)
    assert busy.values[Reading.POWER_LIMIT_W] == 700.0
    assert (idle.values[Reading.EVENT_REASONS_MASK], busy.values[Reading.EVENT_REASONS_MASK]) == (1.0, 0.0)
    assert busy.values[Reading.TEMPERATURE_C] > idle.values[Reading.TEMPERATURE_C]
    assert busy.energy_counter_j - idle.energy_counter_j == pytest.approx(5.0 * (69.05 + 700.0) / 2, abs=0.01)


def test_what_a_part_does_not_measure_is_not_supported(rig: Rig) -> None:
    missing = Missing(AbsenceReason.NOT_SUPPORTED)
    assert rig.read(P100).energy_counter_j == missing
    for index in (T4, V100, A100, A30, H100, B200, G2):
        assert isinstance(rig.read(index).energy_counter_j, float)
    for index in range(len(DEVICES)):
        mig = DEVICES[index].mig is not None
        assert (rig.read(index).values[Reading.UTILIZATION_RATIO] == missing) == mig
        assert_well_formed(rig.read(index))


def test_a_lost_device_is_silent_stays_listed_and_comes_back_with_its_counter_at_zero(rig: Rig) -> None:
    before = rig.device.gpus()
    rig.advance(100.0)
    assert rig.read(T4).energy_counter_j == pytest.approx(3350.0)
    rig.node.faults.lose(rig.uuid(T4))
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    assert rig.device.gpus() == before
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    assert not throughout(rig.read(V100), AbsenceReason.GPU_LOST)
    rig.node.faults.restore(rig.uuid(T4))
    rig.advance(1.0)
    assert rig.read(T4).energy_counter_j == pytest.approx(33.5)
    assert rig.device.gpus() == before


def test_a_device_that_came_back_is_read_without_being_listed_anew(rig: Rig) -> None:
    rig.read(T4)
    rig.node.faults.lose(rig.uuid(T4))
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    rig.node.faults.restore(rig.uuid(T4))
    assert rig.read(T4).energy_counter_j == 0.0
    # Gone and back between two looks: the first look may still find it dead, no later one does.
    rig.node.faults.lose(rig.uuid(T4))
    rig.node.faults.restore(rig.uuid(T4))
    rig.read(T4)
    assert rig.read(T4).energy_counter_j == 0.0


def test_a_device_that_never_answered_is_not_listed(rig: Rig) -> None:
    rig.node.faults.lose(rig.uuid(V100))
    assert rig.uuid(V100) not in {gpu.uuid for gpu in rig.device.gpus()}
    with pytest.raises(UnknownGpu, match=rig.uuid(V100)):
        rig.read(V100)
    rig.node.faults.restore(rig.uuid(V100))
    assert len(rig.device.gpus()) == len(DEVICES)


def test_a_hung_device_times_out_and_loses_nothing(rig: Rig) -> None:
    before = rig.device.gpus()
    rig.node.set_load(rig.uuid(V100), GpuLoad(utilization_ratio=1.0))
    rig.node.faults.hang(rig.uuid(V100))
    rig.advance(10.0)
    assert throughout(rig.read(V100), AbsenceReason.TIMED_OUT)
    assert rig.device.gpus() == before
    rig.node.faults.restore(rig.uuid(V100))
    assert rig.read(V100).energy_counter_j == pytest.approx(3000.0)


def test_the_energy_counter_falls_when_it_is_reset(rig: Rig) -> None:
    rig.advance(10.0)
    rig.node.faults.reset_counter(rig.uuid(H100))
    rig.advance(1.0)
    assert rig.read(H100).energy_counter_j == pytest.approx(69.05)


def test_without_a_driver_there_is_nothing_and_with_it_all_is_back(rig: Rig) -> None:
    before = rig.device.gpus()
    rig.node.faults.unload_driver()
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    with pytest.raises(DriverUnavailable, match="load it"):
        rig.device.gpus()
    with pytest.raises(DriverUnavailable):
        rig.device.driver_version()
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    rig.node.faults.load_driver()
    assert isinstance(rig.read(T4).energy_counter_j, float)
    assert rig.device.gpus() == before
    assert rig.device.driver_version() == rig.node.spec.driver_version


def test_an_unknown_device_is_an_error_that_names_it(rig: Rig) -> None:
    with pytest.raises(UnknownGpu, match="GPU-0000"):
        rig.device.read("GPU-0000")


def test_a_closed_port_opens_again(rig: Rig) -> None:
    before = rig.device.gpus()
    rig.device.close()
    rig.device.close()
    assert_well_formed(rig.read(G2))
    assert rig.device.gpus() == before


FAULTS = ("lose", "restore", "hang", "reset_counter")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), st.floats(0.0, 3.0)),
        st.tuples(st.just("load"), st.integers(0, len(DEVICES) - 1), st.floats(0.0, 1.0), st.integers(0, 2**38)),
        st.tuples(st.sampled_from(FAULTS), st.integers(0, len(DEVICES) - 1)),
        st.tuples(st.just("limit"), st.sampled_from([T4, H100]), st.floats(0.0, 1.0)),
        st.tuples(st.sampled_from(["gpus", "unload_driver", "load_driver"])),
    ),
    max_size=25,
)


def _step(node: SimulatedNode, clock: list[int], step: tuple) -> None:
    match step:
        case ("advance", seconds):
            clock[0] += int(seconds * SECOND)
        case ("load", index, utilization, memory):
            uuid = node.devices[index].identity.uuid
            node.set_load(uuid, GpuLoad(utilization_ratio=utilization, memory_bytes=memory))
        case ("limit", index, share):
            product = node.devices[index].product
            low, high = product.power_min_w, product.power_max_w
            node.limit_power(node.devices[index].identity.uuid, low + share * (high - low))
        case (("unload_driver" | "load_driver") as name,):
            getattr(node.faults, name)()
        case (name, index):
            getattr(node.faults, name)(node.devices[index].identity.uuid)


def _listing(device: Device) -> object:
    try:
        return device.gpus()
    except DriverUnavailable:
        return None


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, branch=st.sampled_from(["470.256.02", "535.161.07", "580.95.05"]))
def test_both_ways_say_the_same_whatever_happens(steps: list[tuple], branch: str) -> None:
    clock = [5 * SECOND]
    node = make_node(clock, driver_version=branch)
    with installed(node):
        nvml = NvmlDevice()
        assert nvml.gpus() == node.gpus()
        for step in steps:
            if step == ("gpus",):
                assert _listing(nvml) == _listing(node)
            else:
                _step(node, clock, step)
            for gpu in node.devices:
                assert nvml.read(gpu.identity.uuid) == node.read(gpu.identity.uuid)
        nvml.close()


@pytest.mark.gpu
def test_a_real_gpu_keeps_the_contract() -> None:
    device = NvmlDevice()
    try:
        gpus = device.gpus()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA GPU here: {error}")
    try:
        assert gpus
        assert device.driver_version()
        inventory = Inventory(node_name="here", cpu_milli=1, memory_bytes=1, gpus=gpus)
        assert decode(Inventory, encode(inventory)) == inventory
        for gpu in gpus:
            looks = [device.read(gpu.uuid) for _ in range(20)]
            for look in looks:
                assert_well_formed(look)
                assert not isinstance(look.values[Reading.POWER_W], Missing)
            counters = [look.energy_counter_j for look in looks if not isinstance(look.energy_counter_j, Missing)]
            assert counters == sorted(counters)
        with pytest.raises(UnknownGpu):
            device.read("GPU-0000")
    finally:
        device.close()
