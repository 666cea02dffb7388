"""The dear half of the device port, both ways over the same devices, on several products and driver branches."""

import pytest
from tests.device_rig import A30, A100, B200, DEVICES, H100, T4, V100, Rig, assert_in_range, open_rig

from eelgrid_agent.devices.port import INSTANCE_READINGS, SLOW_READINGS, GpuProcess, Missing, NoPermission, ProcessKind
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, MigSlice
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Reading

NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)
NOT_SAMPLED = Missing(AbsenceReason.NOT_SAMPLED)
MIB = 2**20


def branch_of(rig: Rig) -> int:
    return rig.node.spec.driver_branch


# Slow readings


def test_a_slow_look_holds_every_reading_in_its_range(rig: Rig) -> None:
    for index in range(len(DEVICES)):
        rig.load(index, 0.7, 2**30)
    for _ in range(2):
        for index in range(len(DEVICES)):
            values = rig.slow(index)
            assert set(values) == set(SLOW_READINGS)
            assert_in_range(values)
        rig.advance(5.0)


def test_each_product_says_what_its_generation_has_and_nothing_else(rig: Rig) -> None:
    branch = branch_of(rig)
    has = {
        Reading.MEMORY_TEMPERATURE_C: {V100, A100, A30, H100, B200},
        Reading.MEMORY_RESERVED_BYTES: set(range(len(DEVICES))) if branch >= 510 else set(),
        Reading.MEMORY_POWER_W: {H100, B200} if branch >= 525 else set(),
        Reading.MODULE_POWER_W: set(),
        # Not told of the whole while there are instances, as on the A100 and the A30; the B200 has none yet.
        Reading.ECC_CORRECTED_VOLATILE: set(range(len(DEVICES))) - {A100, A30},
        Reading.ECC_CORRECTED_AGGREGATE: set(range(len(DEVICES))),
        Reading.REMAPPED_ROWS_CORRECTABLE: {H100, B200, 7},
        Reading.RECOVERY_ACTION: set(range(len(DEVICES))) if branch >= 570 else set(),
        Reading.NVLINK_SENT_BYTES: {V100, A100, H100, B200},
        Reading.NVLINK_ERRORS: {V100, A100, H100, *({B200} if branch >= 550 else ())},
        Reading.FABRIC_STATE: set(),
    }
    looks = [rig.slow(index) for index in range(len(DEVICES))]
    for reading, devices in has.items():
        told = {index for index, values in enumerate(looks) if not isinstance(values[reading], Missing)}
        assert (reading, told) == (reading, devices)
        assert all(looks[index][reading] == NOT_SUPPORTED for index in set(range(len(DEVICES))) - devices)


def test_limits_links_and_states_are_read_in_their_units(rig: Rig) -> None:
    rig.node.limit_power(rig.uuid(H100), 500.0)
    rig.node.faults.cap_power(rig.uuid(H100), 350.0)
    values = rig.slow(H100)
    assert values[Reading.POWER_LIMIT_REQUESTED_W] == 500.0
    assert rig.read(H100).values[Reading.POWER_LIMIT_W] == 350.0
    assert (values[Reading.PCIE_LINK_GENERATION], values[Reading.PCIE_LINK_WIDTH]) == (5.0, 16.0)
    # A T4 without work sleeps, and its link with it.
    asleep = rig.slow(T4)
    assert (asleep[Reading.PERFORMANCE_STATE], asleep[Reading.PCIE_LINK_GENERATION]) == (8.0, 1.0)
    rig.load(T4, 0.5)
    awake = rig.slow(T4)
    assert (awake[Reading.PERFORMANCE_STATE], awake[Reading.PCIE_LINK_GENERATION]) == (0.0, 3.0)


def test_errors_rows_and_advice_are_counted_and_volatile_ones_start_again_with_the_driver(rig: Rig) -> None:
    wear = rig.node.devices[H100].wear
    wear.ecc_corrected, wear.ecc_uncorrected, wear.remap_pending, wear.pcie_replays = 7, 2, True, 5
    wear.recovery_action = 1
    before = rig.slow(H100)
    rig.node.faults.reload_driver()
    rig.device.gpus()
    after = rig.slow(H100)
    advised = branch_of(rig) >= 570
    for values, volatile, pending, rows, replays, advice in (
        (before, (7.0, 2.0), 1.0, 0.0, 5.0, 1.0),
        (after, (0.0, 0.0), 0.0, 1.0, 0.0, 0.0),
    ):
        assert (values[Reading.ECC_CORRECTED_VOLATILE], values[Reading.ECC_UNCORRECTED_VOLATILE]) == volatile
        assert (values[Reading.ECC_CORRECTED_AGGREGATE], values[Reading.ECC_UNCORRECTED_AGGREGATE]) == (7.0, 2.0)
        assert (values[Reading.ROW_REMAP_PENDING], values[Reading.REMAPPED_ROWS_UNCORRECTABLE]) == (pending, rows)
        assert values[Reading.PCIE_REPLAYS] == replays
        assert values[Reading.RECOVERY_ACTION] == (advice if advised else NOT_SUPPORTED)


def test_average_power_is_read_where_a_part_averages(rig: Rig) -> None:
    rig.advance(5.0)
    rig.load(H100, 1.0)
    rig.advance(0.5)
    average = rig.read(H100).values[Reading.POWER_AVERAGE_W]
    assert rig.read(A100).values[Reading.POWER_AVERAGE_W] == NOT_SUPPORTED
    if branch_of(rig) < 525:
        assert average == NOT_SUPPORTED
        return
    # Half of the last second was idle.
    assert 300.0 < average < 500.0 < rig.read(H100).values[Reading.POWER_W]


# Activity


def test_activity_is_of_the_time_since_the_look_before(rig: Rig) -> None:
    first = rig.slow(H100)
    rig.load(H100, 0.8, memory_bound_ratio=0.5)
    rig.advance(1.0)
    rig.load(H100, 0.0)
    rig.advance(1.0)
    second = rig.slow(H100)
    assert rig.slow(T4)[Reading.SM_ACTIVITY_RATIO] == NOT_SUPPORTED
    if branch_of(rig) < 525:
        assert first[Reading.SM_ACTIVITY_RATIO] == second[Reading.SM_ACTIVITY_RATIO] == NOT_SUPPORTED
        return
    assert first[Reading.SM_ACTIVITY_RATIO] == first[Reading.PCIE_SENT_BYTES_PER_S] == NOT_SAMPLED
    assert second[Reading.SM_ACTIVITY_RATIO] == pytest.approx(0.4)
    assert second[Reading.GRAPHICS_ACTIVITY_RATIO] == pytest.approx(0.4)
    assert second[Reading.MEMORY_ACTIVITY_RATIO] == pytest.approx(0.2)
    assert second[Reading.PCIE_RECEIVED_BYTES_PER_S] == pytest.approx(0.4 * 1500 * MIB)


def test_two_looks_too_near_say_nothing_and_lose_nothing(rig: Rig) -> None:
    rig.load(H100, 1.0)
    rig.slow(H100)
    rig.advance(0.05)
    if branch_of(rig) < 525:
        # Such drivers sample no counters.
        assert rig.slow(H100)[Reading.SM_ACTIVITY_RATIO] == NOT_SUPPORTED
        return
    assert rig.slow(H100)[Reading.SM_ACTIVITY_RATIO] == NOT_SAMPLED
    rig.load(H100, 0.0)
    rig.advance(0.05)
    # The span is that of both together.
    assert rig.slow(H100)[Reading.SM_ACTIVITY_RATIO] == pytest.approx(0.5)


# Known failure 20: utilization under MIG is unavailable, and not an idle device.


def test_under_mig_utilization_is_unavailable_and_never_zero(rig: Rig) -> None:
    for index in (A100, B200):
        rig.load(index, 0.9)
        rig.advance(2.0)
        values = rig.read(index).values
        assert values[Reading.UTILIZATION_RATIO] == values[Reading.MEMORY_UTILIZATION_RATIO] == NOT_SUPPORTED
    # On Ampere nothing tells of an instance's activity.
    for _ in range(2):
        for part in rig.device.read_instances(rig.uuid(A100)):
            assert {part.values[reading] for reading in INSTANCE_READINGS[1:]} == {NOT_SUPPORTED}
        rig.advance(1.0)


def test_instances_tell_their_own_memory_and_activity(way: str) -> None:
    layout = (
        MigSlice(profile="3g", start=4),
        MigSlice(profile="1g", start=0),
        MigSlice(profile="1g", start=1, compute_slices=()),
    )
    with open_rig(way, GpuSpec(product="h100-sxm5-80gb", mig=layout)) as rig:
        uuid = rig.uuid(0)
        assert [part.gpu_instance_id for part in rig.device.read_instances(uuid)] == [2, 7, 8]
        rig.node.set_instance_load(uuid, 2, GpuLoad(utilization_ratio=0.6, memory_bytes=5 * 2**30))
        rig.advance(1.0)
        busy, idle, bare = rig.device.read_instances(uuid)
        assert set(busy.values) == set(INSTANCE_READINGS)
        assert busy.values[Reading.MEMORY_USED_BYTES] == 5 * 2**30 + 44 * MIB
        assert idle.values[Reading.MEMORY_USED_BYTES] == 11 * MIB
        # An instance that no process could open has no handle to ask for its memory.
        assert bare.values[Reading.MEMORY_USED_BYTES] == NOT_SUPPORTED
        activity = [part.values[Reading.SM_ACTIVITY_RATIO] for part in (busy, idle, bare)]
        assert activity == [pytest.approx(0.6), 0.0, 0.0]
        # The device's own counters weigh the instance by its compute slices.
        rig.slow(0)
        rig.advance(1.0)
        assert rig.slow(0)[Reading.SM_ACTIVITY_RATIO] == pytest.approx(0.6 * 3 / 7)


def test_an_instance_made_again_starts_again(way: str) -> None:
    with open_rig(way, GpuSpec(product="h100-sxm5-80gb", mig=(MigSlice(profile="3g", start=4),))) as rig:
        uuid = rig.uuid(0)
        rig.device.read_instances(uuid)
        rig.node.destroy_compute_instance(uuid, 2, 0)
        rig.node.destroy_gpu_instance(uuid, 2)
        rig.advance(1.0)
        assert rig.device.read_instances(uuid) == ()
        rig.node.create_gpu_instance(uuid, 9, 4)
        (part,) = rig.device.read_instances(uuid)
        assert part.values[Reading.SM_ACTIVITY_RATIO] == NOT_SAMPLED
        assert part.values[Reading.MEMORY_USED_BYTES] == NOT_SUPPORTED


# Processes


def test_processes_are_listed_with_memory_and_share_of_time(rig: Rig) -> None:
    uuid = rig.uuid(H100)
    assert rig.device.processes(uuid) == ()
    rig.load(H100, 0.5, 6 * 2**30)
    rig.node.start_process(uuid, GpuProcess(pid=41, kind=ProcessKind.COMPUTE, memory_bytes=2**30, sm_ratio=0.3))
    rig.node.start_process(uuid, GpuProcess(pid=7, kind=ProcessKind.GRAPHICS))
    first = rig.device.processes(uuid)
    assert [(process.pid, process.kind, process.memory_bytes, process.sm_ratio) for process in first] == [
        (7, ProcessKind.GRAPHICS, 3 * 2**30, None),
        (41, ProcessKind.COMPUTE, 2**30, None),
    ]
    assert all((process.gpu_instance_id, process.compute_instance_id) == (None, None) for process in first)
    # What the first look is given may be of long ago; shares are told from the second on.
    rig.advance(1.0)
    assert [process.sm_ratio for process in rig.device.processes(uuid)] == [0.25, 0.3]
    assert [process.sm_ratio for process in rig.device.processes(uuid)] == [None, None]
    assert rig.slow(H100)[Reading.PROCESSES] == 2.0
    rig.node.end_process(uuid, 41)
    assert [process.pid for process in rig.device.processes(uuid)] == [7]


def test_many_processes_are_told_apart_whatever_the_layout_of_entries(rig: Rig) -> None:
    """Drivers of early 535 write 32 bytes an entry and others 24: read wrongly, pids come out of other fields."""
    uuid = rig.uuid(T4)
    wanted = {1000 + number: 2**20 * (number + 1) for number in range(9)}
    for pid, memory_bytes in wanted.items():
        rig.node.start_process(uuid, GpuProcess(pid=pid, kind=ProcessKind.COMPUTE, memory_bytes=memory_bytes))
    assert {process.pid: process.memory_bytes for process in rig.device.processes(uuid)} == wanted


def test_processes_of_instances_name_them_and_need_the_right_to_see_them(rig: Rig) -> None:
    uuid = rig.uuid(A100)
    process = GpuProcess(pid=9, kind=ProcessKind.COMPUTE, memory_bytes=5, gpu_instance_id=2, compute_instance_id=1)
    rig.node.start_process(uuid, process)
    for _ in range(2):
        assert rig.device.processes(uuid) == (process,)
        rig.advance(1.0)
    rig.node.faults.set_rights(AccessLevel.READ_ONLY)
    with pytest.raises(NoPermission, match=uuid):
        rig.device.processes(uuid)
    assert rig.slow(A100)[Reading.PROCESSES] == Missing(AbsenceReason.NO_PERMISSION)
    assert rig.device.processes(rig.uuid(H100)) == ()
