"""The NVML adapter where the direct way has no equal: permissions, old drivers, odd values, the C interface itself."""

import ctypes

import pynvml
import pytest

from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.port import DriverUnavailable, Missing
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_library import install_library, installed_library, uninstall_library
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, MigSlice, NodeSpec
from eelgrid_protos.messages import AbsenceReason, Reading

SECOND = 1_000_000_000


def make_node(*gpus: GpuSpec, driver_version: str = "580.95.05", clock: list[int] | None = None) -> SimulatedNode:
    spec = NodeSpec(node_name="n", cpu_milli=1000, memory_bytes=2**30, gpus=gpus, driver_version=driver_version)
    clock = clock or [SECOND]
    return SimulatedNode(spec, monotonic_ns=lambda: clock[0], seed=1)


MIG = GpuSpec(
    product="a100-sxm4-40gb",
    mig=(
        MigSlice(profile="3g", start=4, compute_slices=(1, 2)),
        MigSlice(profile="1g+me", start=0),
        MigSlice(profile="1g", start=1, compute_slices=()),
    ),
)


def test_without_the_right_to_walk_instances_those_with_a_handle_are_still_seen() -> None:
    node = make_node(MIG)
    with installed_library(node, privileged=False):
        device = NvmlDevice()
        (gpu,) = device.gpus()
        device.close()
    seen = [(gi.id, gi.profile_id, gi.profile, gi.start, gi.size) for gi in gpu.gpu_instances]
    assert seen == [(2, 9, "3g.20gb", 4, 4), (7, 20, "1g.5gb+me", 0, 1)]
    known = {gi.id: [ci.uuid for ci in gi.compute_instances] for gi in node.gpus()[0].gpu_instances}
    assert {gi.id: [ci.uuid for ci in gi.compute_instances] for gi in gpu.gpu_instances} == {2: known[2], 7: known[7]}


def test_a_driver_that_prints_no_profile_names_gets_the_catalogues() -> None:
    node = make_node(MIG, driver_version="470.256.02")
    with installed_library(node):
        assert not hasattr(pynvml.nvmlLib, "nvmlDeviceGetGpuInstanceProfileInfoV")
        device = NvmlDevice()
        assert device.gpus() == node.gpus()
        device.close()


@pytest.mark.parametrize(("version", "averaged"), [("470.256.02", True), ("535.161.07", False)])
def test_power_is_the_instant_field_where_the_driver_has_it(version: str, averaged: bool) -> None:
    clock = [SECOND]
    node = make_node(GpuSpec(product="h100-sxm5-80gb"), driver_version=version, clock=clock)
    uuid = node.gpus()[0].uuid
    clock[0] = 10 * SECOND
    node.set_load(uuid, GpuLoad(utilization_ratio=1.0))
    clock[0] = 10 * SECOND + SECOND // 2
    with installed_library(node):
        device = NvmlDevice()
        power_w = device.read(uuid).values[Reading.POWER_W]
        device.close()
    assert (power_w < 500.0) == averaged
    assert power_w == 700.0 or averaged


def test_workloads_names_for_products_can_be_given() -> None:
    with installed_library(make_node(GpuSpec(product="t4"), GpuSpec(product="a30"))):
        device = NvmlDevice(models={"Tesla T4": "inference"})
        assert [gpu.model for gpu in device.gpus()] == ["inference", "A30"]
        device.close()


def test_a_part_that_the_catalogue_lacks_is_listed_without_a_key() -> None:
    with installed_library(make_node(GpuSpec(product="t4"))):
        real = pynvml.nvmlLib.nvmlDeviceGetName

        def renamed(handle: object, buffer: object, length: object) -> int:
            assert real(handle, buffer, length) == 0
            buffer.value = b"NVIDIA Z9 Ultra (Rev 2)"
            return 0

        pynvml.nvmlLib.nvmlDeviceGetName = renamed
        device = NvmlDevice()
        (gpu,) = device.gpus()
        assert (gpu.product, gpu.model, gpu.catalogue_key) == ("NVIDIA Z9 Ultra (Rev 2)", "Z9-Ultra-Rev-2", "")
        device.close()


@pytest.mark.parametrize(
    ("symbol", "code", "reading", "reason"),
    [
        ("nvmlDeviceGetClockInfo", pynvml.NVML_ERROR_NO_PERMISSION, Reading.SM_CLOCK_MHZ, AbsenceReason.NO_PERMISSION),
        ("nvmlDeviceGetClockInfo", pynvml.NVML_ERROR_UNKNOWN, Reading.MEMORY_CLOCK_MHZ, AbsenceReason.NOT_SAMPLED),
        (
            "nvmlDeviceGetEnforcedPowerLimit",
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            Reading.POWER_LIMIT_W,
            AbsenceReason.NOT_SUPPORTED,
        ),
        (
            "nvmlDeviceGetUtilizationRates",
            pynvml.NVML_ERROR_NO_DATA,
            Reading.UTILIZATION_RATIO,
            AbsenceReason.NOT_SAMPLED,
        ),
    ],
)
def test_one_failing_call_is_one_absence(symbol: str, code: int, reading: Reading, reason: AbsenceReason) -> None:
    node = make_node(GpuSpec(product="t4"))
    with installed_library(node):
        setattr(pynvml.nvmlLib, symbol, lambda *_: code)
        device = NvmlDevice()
        look = device.read(device.gpus()[0].uuid)
        assert look.values[reading] == Missing(reason)
        assert isinstance(look.values[Reading.POWER_W], float)
        device.close()


def test_a_sentinel_is_implausible_and_no_number() -> None:
    node = make_node(GpuSpec(product="t4"))
    with installed_library(node):

        def sentinel(_handle: object, _kind: object, ref: object) -> int:
            ref._obj.value = 0xFFFF_FFFF
            return 0

        pynvml.nvmlLib.nvmlDeviceGetClockInfo = sentinel
        device = NvmlDevice()
        look = device.read(device.gpus()[0].uuid)
        assert look.values[Reading.SM_CLOCK_MHZ] == Missing(AbsenceReason.IMPLAUSIBLE)
        device.close()


def test_a_driver_without_the_energy_symbol_is_asked_once() -> None:
    node = make_node(GpuSpec(product="t4"))
    with installed_library(node):
        energy = pynvml.nvmlLib.nvmlDeviceGetTotalEnergyConsumption
        del pynvml.nvmlLib.nvmlDeviceGetTotalEnergyConsumption
        device = NvmlDevice()
        uuid = device.gpus()[0].uuid
        assert device.read(uuid).energy_counter_j == Missing(AbsenceReason.NOT_SUPPORTED)
        # Were it asked again, it would be found now.
        pynvml.nvmlLib.nvmlDeviceGetTotalEnergyConsumption = energy
        assert device.read(uuid).energy_counter_j == Missing(AbsenceReason.NOT_SUPPORTED)
        device.close()
        # Another session may be another driver's.
        assert device.read(uuid).energy_counter_j == 0.0
        device.close()


def test_every_session_is_ended() -> None:
    node = make_node(GpuSpec(product="t4"), GpuSpec(product="a30"))
    with installed_library(node):
        device = NvmlDevice()
        uuid = device.gpus()[0].uuid
        node.faults.lose_gpu(uuid)
        for _ in range(3):
            device.read(uuid)
            device.gpus()
        node.faults.restore_gpu(uuid)
        node.faults.unload_driver()
        with pytest.raises(DriverUnavailable):
            device.gpus()
        node.faults.load_driver()
        device.gpus()
        assert pynvml._nvmlLib_refcount == 1
        device.close()
        assert pynvml._nvmlLib_refcount == 0
    assert pynvml.nvmlLib is None


# The C interface


def test_a_library_is_not_put_under_an_open_session() -> None:
    node = make_node(GpuSpec(product="t4"))
    with installed_library(node):
        pynvml.nvmlInit()
        with pytest.raises(RuntimeError, match="close it"):
            install_library(node)
        pynvml.nvmlShutdown()
    uninstall_library()


def test_calls_need_a_session_a_live_handle_and_the_right_struct() -> None:
    node = make_node(GpuSpec(product="t4"), MIG)
    with installed_library(node):
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()
        pynvml.nvmlInit()
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetHandleByIndex(2)
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetHandleByUUID("GPU-0")
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetUUID(pynvml.c_nvmlDevice_t())
        t4 = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
            pynvml.nvmlDeviceGetMemoryInfo(t4, version=0x0100_0028)
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetFanSpeed(t4)
        memory = pynvml.nvmlDeviceGetMemoryInfo(t4, version=pynvml.nvmlMemory_v2)
        assert memory.total == memory.free + memory.used + memory.reserved
        assert pynvml.nvmlDeviceGetPciInfo(t4).bus == 0x10
        node.faults.lose_gpu(node.devices[0].identity.uuid)
        node.faults.restore_gpu(node.devices[0].identity.uuid)
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            pynvml.nvmlDeviceGetUUID(t4)
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)) == node.devices[0].identity.uuid
        pynvml.nvmlShutdown()


def test_fields_answer_one_by_one() -> None:
    node = make_node(GpuSpec(product="a100-sxm4-40gb"), GpuSpec(product="h100-sxm5-80gb"))
    with installed_library(node):
        pynvml.nvmlInit()
        codes = [
            [value.nvmlReturn for value in pynvml.nvmlDeviceGetFieldValues(handle, [185, 186, (186, 2), 83, 190, 9999])]
            for handle in map(pynvml.nvmlDeviceGetHandleByIndex, range(2))
        ]
        missing, invalid = pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT
        # GA100 has no averaged sensor; the power of the memory alone (scope 2) is an H100's and not an A100's.
        assert codes == [[missing, 0, missing, 0, 0, invalid], [0, 0, 0, 0, 0, invalid]]
        pynvml.nvmlShutdown()


def test_mig_handles_and_placements_answer_as_the_driver_does() -> None:
    node = make_node(MIG, GpuSpec(product="t4"))
    with installed_library(node):
        pynvml.nvmlInit()
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetMaxMigDeviceCount(parent) == 7
        names = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, i)) for i in range(3)]
        assert [name.partition("MIG ")[2] for name in names] == ["1c.3g.20gb", "2c.3g.20gb", "1g.5gb+me"]
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, 3)
        child = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, 1)
        assert pynvml.nvmlDeviceIsMigDeviceHandle(child).value == 1
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetPowerUsage(child)
        back = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(child)
        assert pynvml.nvmlDeviceGetUUID(back) == node.devices[0].identity.uuid
        found, count = (pynvml.c_nvmlGpuInstancePlacement_t * 8)(), ctypes.c_uint()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(parent, 14, found, ctypes.byref(count))
        assert [(place.start, place.size) for place in found[: count.value]] == [(0, 2), (2, 2), (4, 2)]
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(1))
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetGpuInstanceProfileInfo(parent, 18)
        pynvml.nvmlShutdown()
