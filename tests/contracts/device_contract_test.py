"""The device port: the fleet's direct way, the NVML adapter over the simulated library, and a real GPU if there is one.

The first two stand over the very same devices and must say the same at the
same moment, whatever befell them.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device_rig import (
    A30,
    A100,
    B200,
    DEVICES,
    G2,
    H100,
    P100,
    SECOND,
    T4,
    V100,
    Rig,
    assert_in_range,
    assert_well_formed,
    make_node,
    nvml_over,
    open_rig,
    throughout,
)

from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.devices.nvml.device import GPM_METRICS, NvmlDevice
from eelgrid_agent.devices.port import (
    INSTANCE_READINGS,
    SLOW_READINGS,
    DeviceError,
    DevicePort,
    DriverUnavailable,
    Missing,
    NoPermission,
    NotSupported,
    UnknownGpu,
)
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_library import installed_library
from eelgrid_agent.simulation.spec import GpuLoad
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Gpu, Inventory, Reading


@pytest.fixture(
    params=["direct 470.256.02", "nvml 470.256.02", "nvml 535.161.07", "direct 580.95.05", "nvml 580.95.05"]
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    way, branch = request.param.split()
    with open_rig(way, driver_version=branch) as rig:
        yield rig


def test_devices_are_listed_by_index_with_what_the_product_is(rig: Rig) -> None:
    gpus = rig.device.gpus()
    assert [gpu.index for gpu in gpus] == list(range(len(DEVICES)))
    assert [gpu.catalogue_key for gpu in gpus] == [spec.product for spec in DEVICES]
    assert [gpu.model for gpu in gpus] == [
        "T4",
        "P100-PCIE-16GB",
        "V100-SXM2-32GB",
        "A100-SXM4-40GB",
        "A30",
        "H100-80GB-HBM3",
        "B200",
        "G2",
    ]
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
    assert decode_message(Inventory, encode_message(inventory)) == inventory


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
    rig.node.faults.lose_gpu(rig.uuid(T4))
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    assert rig.device.gpus() == before
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    assert not throughout(rig.read(V100), AbsenceReason.GPU_LOST)
    rig.node.faults.restore_gpu(rig.uuid(T4))
    rig.advance(1.0)
    assert rig.read(T4).energy_counter_j == pytest.approx(33.5)
    assert rig.device.gpus() == before


def test_a_device_that_came_back_is_read_without_being_listed_again(rig: Rig) -> None:
    rig.read(T4)
    rig.node.faults.lose_gpu(rig.uuid(T4))
    assert throughout(rig.read(T4), AbsenceReason.GPU_LOST)
    rig.node.faults.restore_gpu(rig.uuid(T4))
    assert rig.read(T4).energy_counter_j == 0.0
    # Gone and back between two looks: the first look may still find it dead, no later one does.
    rig.node.faults.lose_gpu(rig.uuid(T4))
    rig.node.faults.restore_gpu(rig.uuid(T4))
    rig.read(T4)
    assert rig.read(T4).energy_counter_j == 0.0


def test_a_device_that_never_answered_is_not_listed(rig: Rig) -> None:
    rig.node.faults.lose_gpu(rig.uuid(V100))
    assert rig.uuid(V100) not in {gpu.uuid for gpu in rig.device.gpus()}
    with pytest.raises(UnknownGpu, match=rig.uuid(V100)):
        rig.read(V100)
    rig.node.faults.restore_gpu(rig.uuid(V100))
    assert len(rig.device.gpus()) == len(DEVICES)


def test_a_hung_device_times_out_and_loses_nothing(rig: Rig) -> None:
    before = rig.device.gpus()
    rig.node.set_load(rig.uuid(V100), GpuLoad(utilization_ratio=1.0))
    rig.node.faults.hang_gpu(rig.uuid(V100))
    rig.advance(10.0)
    assert throughout(rig.read(V100), AbsenceReason.TIMED_OUT)
    assert rig.device.gpus() == before
    rig.node.faults.restore_gpu(rig.uuid(V100))
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
    # Instances go with the driver; Ampere keeps the mode, Hopper and newer forget it as well. Nothing else changes.
    kept = {A100, A30}
    assert rig.device.gpus() == tuple(
        replace(gpu, mig_enabled=gpu.index in kept, mig_pending=False, gpu_instances=()) for gpu in before
    )
    assert rig.device.driver_version() == rig.node.spec.driver_version


def test_devices_are_told_apart_by_uuid_when_the_driver_counts_them_again(rig: Rig) -> None:
    """Known failure 21: indices change with a reset or a reboot."""
    before = {gpu.uuid: gpu for gpu in rig.device.gpus()}
    rig.load(H100, 1.0)
    rig.node.faults.lose_gpu(rig.uuid(T4))
    rig.node.faults.renumber_gpus()
    rig.advance(2.0)
    after = {gpu.uuid: gpu for gpu in rig.device.gpus()}
    last = len(DEVICES) - 1
    # The lost one keeps its place in the list, and makes room where another is counted there by now.
    assert {uuid: replace(gpu, index=before[uuid].index) for uuid, gpu in after.items()} == before
    answering = {uuid: gpu.index for uuid, gpu in after.items() if uuid != rig.uuid(T4)}
    assert answering == {uuid: last - before[uuid].index for uuid in answering}
    assert after[rig.uuid(T4)].index == last
    assert rig.read(H100).values[Reading.UTILIZATION_RATIO] == 1.0
    assert rig.read(G2).values[Reading.UTILIZATION_RATIO] == 0.0
    rig.node.faults.restore_gpu(rig.uuid(T4))
    assert [gpu.uuid for gpu in rig.device.gpus()] == [rig.uuid(index) for index in reversed(range(len(DEVICES)))]


def test_an_unknown_device_is_an_error_that_names_it(rig: Rig) -> None:
    with pytest.raises(UnknownGpu, match="GPU-0000"):
        rig.device.read("GPU-0000")


def test_a_closed_port_opens_again(rig: Rig) -> None:
    before = rig.device.gpus()
    rig.device.close()
    rig.device.close()
    assert_well_formed(rig.read(G2))
    assert rig.device.gpus() == before


FAULTS = ("lose_gpu", "restore_gpu", "hang_gpu", "reset_counter", "reset_gpu")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), st.floats(0.0, 3.0)),
        st.tuples(st.just("load"), st.integers(0, len(DEVICES) - 1), st.floats(0.0, 1.0), st.integers(0, 2**38)),
        st.tuples(st.sampled_from(FAULTS), st.integers(0, len(DEVICES) - 1)),
        st.tuples(st.just("limit"), st.sampled_from([T4, H100]), st.floats(0.0, 1.0)),
        st.tuples(st.sampled_from(["gpus", "unload_driver", "load_driver", "reboot_node", "renumber_gpus"])),
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
        case (name,):
            getattr(node.faults, name)()
        case (name, index):
            getattr(node.faults, name)(node.devices[index].identity.uuid)


def _said(ask: object, *arguments: object) -> object:
    """An answer, or the kind of error that came instead."""
    try:
        return ask(*arguments)
    except DeviceError as error:
        return type(error)


def _settled(values: dict[Reading, float | Missing]) -> dict[Reading, object]:
    """Without activity: which look was the first depends on when a session had to be opened anew."""
    return {reading: value for reading, value in values.items() if reading not in GPM_METRICS}


def _answers(device: DevicePort, uuid: str) -> list[object]:
    slow, parts = _said(device.read_slow, uuid), _said(device.read_instances, uuid)
    return [
        slow if isinstance(slow, type) else _settled(slow),
        parts if isinstance(parts, type) else [(part.gpu_instance_id, _settled(part.values)) for part in parts],
        _said(device.processes, uuid),
    ]


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, branch=st.sampled_from(["470.256.02", "535.54.03", "580.95.05"]), slow=st.sets(st.integers(0, 24)))
def test_both_ways_say_the_same_whatever_happens(steps: list[tuple], branch: str, slow: set[int]) -> None:
    clock = [5 * SECOND]
    node = make_node(clock, driver_version=branch)
    with installed_library(node):
        nvml = nvml_over(node)
        assert nvml.gpus() == node.gpus()
        for number, step in enumerate(steps):
            if step == ("gpus",):
                assert _said(nvml.gpus) == _said(node.gpus)
            else:
                _step(node, clock, step)
            if step[0] in ("reset_gpu", "reboot_node"):
                # Gone and back between two looks: through NVML the first look may still find it dead.
                for gpu in node.devices:
                    nvml.read(gpu.uuid)
            for gpu in node.devices:
                assert nvml.read(gpu.uuid) == node.read(gpu.uuid)
                if number in slow:
                    assert _answers(nvml, gpu.uuid) == _answers(node, gpu.uuid)
        assert _said(nvml.topology) == _said(node.topology)
        nvml.close()


@pytest.mark.gpu
def test_a_real_gpu_keeps_the_contract() -> None:
    """Reads and nothing else: no setting of a lent device is touched."""
    device = NvmlDevice()
    try:
        gpus = device.gpus()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA GPU here: {error}")
    try:
        assert gpus
        assert device.driver_version()
        assert device.access() is not AccessLevel.UNSPECIFIED
        inventory = Inventory(node_name="here", cpu_milli=1, memory_bytes=1, gpus=gpus)
        assert decode_message(Inventory, encode_message(inventory)) == inventory
        for gpu in gpus:
            looks = [device.read(gpu.uuid) for _ in range(20)]
            for look in looks:
                assert_well_formed(look)
                assert not isinstance(look.values[Reading.POWER_W], Missing)
            counters = [look.energy_counter_j for look in looks if not isinstance(look.energy_counter_j, Missing)]
            assert counters == sorted(counters)
            _read_dearly(device, gpu.uuid)
            _read_limits(NvmlControl(device), gpu)
        assert len(device.topology()) <= len(gpus) * (len(gpus) - 1) // 2
        assert device.take_events() == ()
        with pytest.raises(UnknownGpu):
            device.read("GPU-0000")
    finally:
        device.close()


def _read_limits(control: NvmlControl, gpu: Gpu) -> None:
    """What may be set, without setting anything."""
    found = control.power_settings(gpu.uuid)
    assert (found.min_w, found.default_w, found.max_w) == (
        gpu.power_limit_min_w,
        gpu.power_limit_default_w,
        gpu.power_limit_max_w,
    )
    assert found.requested_w is None or found.min_w is None or found.min_w <= found.requested_w <= found.max_w
    assert list(found.sm_clocks_mhz) == sorted(set(found.sm_clocks_mhz))
    if gpu.mig_capable:
        try:
            geometry = control.mig_geometry(gpu.uuid)
        except NotSupported:
            # A part whose driver tells of a mode and offers nothing, such as in a virtual machine.
            return
        assert {profile.id for profile in geometry.profiles.values()} >= {held.profile_id for held in gpu.gpu_instances}


def _read_dearly(device: NvmlDevice, uuid: str) -> None:
    """The dear readings of a real device, twice, far enough apart for its activity."""
    first = device.read_slow(uuid)
    device.read_instances(uuid)
    time.sleep(0.2)
    second = device.read_slow(uuid)
    for values in (first, second):
        assert set(values) == set(SLOW_READINGS)
        assert_in_range(dict(values))
    assert not isinstance(second[Reading.PCIE_LINK_WIDTH], Missing)
    for reading in GPM_METRICS:
        # Where the first look was only the first one, the second is a number.
        assert first[reading] != Missing(AbsenceReason.NOT_SAMPLED) or not isinstance(second[reading], Missing)
    for part in device.read_instances(uuid):
        assert set(part.values) == set(INSTANCE_READINGS)
        assert_in_range(dict(part.values))
    try:
        processes = device.processes(uuid)
    except (NoPermission, NotSupported):
        return
    assert all(0 < process.pid < 2**22 for process in processes)
