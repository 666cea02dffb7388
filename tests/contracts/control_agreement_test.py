"""Both ways to change devices, step for step over random histories, and the simulated library by itself.

Whatever is asked and whatever befalls the nodes, both ways give the same
answers and leave the same devices.
"""

import gc
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control_rig import A30, A100, B200, BRANCHES, DEVICES, G1, G3, H100, make
from tests.device_rig import SECOND

from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.port import ControlPort, DeviceError, NotSupported
from eelgrid_agent.simulation.mig import DriverRefusal
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_library import installed_library
from eelgrid_agent.simulation.operations import OperationKind
from eelgrid_protos.messages import AccessLevel

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data"))

PROFILES = st.sampled_from([0, 5, 6, 9, 14, 15, 19, 20, 21, 35])
INDICES = st.integers(0, len(DEVICES) - 1)
IDS = st.integers(0, 14)
ASKED = st.one_of(
    st.tuples(st.just("power_settings"), INDICES),
    st.tuples(st.just("set_power_limit"), INDICES, st.floats(-1.0, 1200.0)),
    st.tuples(st.just("lock_sm_clocks"), INDICES, st.integers(-1, 2100), st.integers(-1, 2100)),
    st.tuples(st.just("unlock_sm_clocks"), INDICES),
    st.tuples(st.just("set_power_profile"), INDICES, st.none() | st.integers(0, 16)),
    st.tuples(st.just("mig_geometry"), INDICES),
    st.tuples(st.just("set_mig_mode"), INDICES, st.booleans()),
    st.tuples(st.just("create_gpu_instance"), INDICES, PROFILES, st.integers(0, 8)),
    st.tuples(st.just("destroy_gpu_instance"), INDICES, IDS),
    st.tuples(st.just("create_compute_instance"), INDICES, IDS, st.integers(0, 8)),
    st.tuples(st.just("destroy_compute_instance"), INDICES, IDS, st.integers(0, 6)),
)
BEFALLS = st.one_of(
    st.tuples(
        st.sampled_from(
            [
                "lose_gpu",
                "restore_gpu",
                "hang_gpu",
                "reset_gpu",
                "refuse_instance_once",
                "fail_compute_once",
                "add_foreign_client",
                "remove_foreign_client",
            ]
        ),
        INDICES,
    ),
    st.tuples(st.just("start_process"), INDICES, st.integers(1, 3), IDS, st.integers(0, 2)),
    st.tuples(st.just("end_process"), INDICES, st.integers(1, 3)),
    st.tuples(st.just("cap_power"), INDICES, st.none() | st.floats(1.0, 900.0)),
    st.tuples(st.just("refuse"), INDICES, st.sampled_from(OperationKind), st.sampled_from(DriverRefusal)),
    st.tuples(st.just("let_mode_reset"), INDICES, st.booleans()),
    st.tuples(st.sampled_from(["unload_driver", "load_driver", "reload_driver", "reboot_node"])),
    st.tuples(st.just("take_rights"), st.sampled_from(AccessLevel)),
)
STEPS = st.lists(st.tuples(st.just("ask"), ASKED) | st.tuples(st.just("befall"), BEFALLS), max_size=30)


def ask(control: ControlPort, uuids: list[str], step: tuple) -> object:
    name, index, *arguments = step
    try:
        if name == "set_mig_mode":
            return control.set_mig_mode(uuids[index], enabled=arguments[0])
        return getattr(control, name)(uuids[index], *arguments)
    except DeviceError as error:
        return type(error)


def befall(node: SimulatedNode, uuids: list[str], step: tuple) -> None:
    faults = node.faults
    match step:
        case ("take_rights", level):
            faults.set_rights(level)
        case (name,):
            getattr(faults, name)()
        case ("let_mode_reset", index, works):
            faults.allow_mode_reset(uuids[index], works=works)
        case ("refuse", index, act, why):
            faults.refuse_next(uuids[index], act, why)
        case (name, index, *arguments):
            getattr(faults, name)(uuids[index], *arguments)


def state(node: SimulatedNode) -> list[object]:
    return [
        (gpu.identity, gpu.limit_mw, gpu.enforced_mw, gpu.locked_mhz, gpu.profiles, gpu.power_mw, gpu.sm_clock_mhz)
        for gpu in node.devices
    ]


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, branch=st.sampled_from(BRANCHES))
def test_both_ways_answer_alike_whatever_happens(steps: list[tuple], branch: str) -> None:
    clock = [5 * SECOND]
    direct, beneath = make(clock, branch), make(clock, branch)
    uuids = [gpu.identity.uuid for gpu in direct.devices]
    with installed_library(beneath):
        device = NvmlDevice()
        control = NvmlControl(device)
        for kind, step in steps:
            clock[0] += SECOND
            if kind == "befall":
                befall(direct, uuids, step)
                befall(beneath, uuids, step)
            else:
                assert ask(control, uuids, step) == ask(direct, uuids, step), step
            assert state(beneath) == state(direct), step
        device.close()


# The library and the adapter by themselves


@pytest.fixture
def library() -> Iterator[SimulatedNode]:
    node = make([5 * SECOND])
    with installed_library(node):
        pynvml.nvmlInit()
        yield node
        pynvml.nvmlShutdown()


def test_the_second_power_setter_hides_that_it_was_refused(library: SimulatedNode) -> None:
    library.faults.set_rights(AccessLevel.READ_ONLY)
    handle = pynvml.nvmlDeviceGetHandleByIndex(H100)
    assert pynvml.nvmlDeviceSetPowerManagementLimit_v2(handle, pynvml.NVML_POWER_SCOPE_GPU, 300_000) == 0
    assert library.devices[H100].limit_mw == 700_000
    with pytest.raises(pynvml.NVMLError_NoPermission):
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, 300_000)


def test_a_place_by_value_is_no_pointer_and_a_dead_handle_stays_dead(library: SimulatedNode) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(B200)
    place = pynvml.c_nvmlGpuInstancePlacement_t(start=4, size=4)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, G3, place)
    first = pynvml.nvmlDeviceCreateGpuInstance(handle, G3)
    span = pynvml.nvmlGpuInstanceGetInfo(first).placement
    pynvml.nvmlGpuInstanceDestroy(first)
    second = pynvml.nvmlDeviceCreateGpuInstance(handle, G3)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlGpuInstanceGetInfo(first)
    info = pynvml.nvmlGpuInstanceGetInfo(second)
    assert (info.placement.start, info.placement.size) == (span.start, span.size)
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, G3) == 1
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, G1) == 3
    del first
    gc.collect()


def test_success_of_a_mode_change_says_nothing(library: SimulatedNode) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(A30)
    assert pynvml.nvmlDeviceSetMigMode(handle, 1) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert pynvml.nvmlDeviceGetMigMode(handle) == [0, 1]
    pynvml.nvmlDeviceSetMigMode(handle, 0)
    library.faults.allow_mode_reset(library.devices[A30].identity.uuid, works=True)
    # This session reads the device and so is its client.
    pynvml.nvmlDeviceGetPowerUsage(handle)
    assert pynvml.nvmlDeviceSetMigMode(handle, 1) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(handle) == [0, 1]


@pytest.mark.parametrize("branch", ["450.80.02", "460.73.01", *BRANCHES])
def test_a_branch_has_the_symbols_of_its_time(branch: str) -> None:
    with installed_library(make([0], branch)):
        names = {name for name in vars(pynvml.nvmlLib) if name.startswith("nvml")}
    number = int(branch.split(".", maxsplit=1)[0])
    since = {
        "nvmlDeviceSetMigMode": 450,
        "nvmlDeviceCreateGpuInstanceWithPlacement": 460,
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2": 470,
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement": 525,
        "nvmlDeviceSetPowerManagementLimit_v2": 535,
        "nvmlDeviceWorkloadPowerProfileSetRequestedProfiles": 570,
        "nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1": 590,
    }
    assert {name for name in since if name in names} == {name for name, first in since.items() if first <= number}


@pytest.mark.parametrize("branch", [450, 460, 470, 495, 510, 525, 535, 550, 570, 580, 590, 615])
def test_symbols_are_as_old_as_the_published_table_says(branch: int) -> None:
    path = DATA / "nvml_api.json"
    if not path.exists():
        pytest.skip(f"{path} is not here; set EELGRID_DATA to the folder of published data")
    functions = json.loads(path.read_text("utf-8"))["functions"]
    since = {row["name"]: int(row["first_pynvml_version_seen"].split(".")[1]) for row in functions}
    with installed_library(make([0], f"{branch}.999")):
        names = {name for name in vars(pynvml.nvmlLib) if name.startswith("nvml")}
    assert {name for name in names if since.get(name, 0) > branch} == set()
    # Only what the table has not is unknown to it: the second lists of processes, and the mark of wide entries.
    assert {name for name in names if name not in since} <= {
        "nvmlDeviceGetComputeRunningProcesses_v2",
        "nvmlDeviceGetGraphicsRunningProcesses_v2",
        "nvmlDeviceGetConfComputeMemSizeInfo",
    }


def test_a_driver_that_reports_no_places_is_helped_out_by_the_catalogue() -> None:
    node = make([5 * SECOND], "460.73.01")
    uuid = node.devices[A100].uuid
    with installed_library(node):
        device = NvmlDevice()
        control = NvmlControl(device)
        assert control.mig_geometry(uuid) == node.mig_geometry(uuid)
        assert control.create_gpu_instance(uuid, G1, 0) == 7
        with pytest.raises(NotSupported):
            control.create_gpu_instance(uuid, 77, 0)
        device.close()
    assert [(held.id, held.profile_id, held.start) for held in node.gpus()[A100].gpu_instances] == [
        (2, G3, 4),
        (7, G1, 0),
        (8, G1, 1),
    ]


def test_a_part_that_the_catalogue_lacks_is_described_by_its_driver() -> None:
    node = make([5 * SECOND])
    gpu = node.devices[B200]
    expected = gpu.mig.geometry
    gpu.identity  # noqa: B018 - the layout is taken over before the name is changed
    gpu._identity = replace(gpu.identity, product="NVIDIA X900")
    with installed_library(node):
        device = NvmlDevice()
        geometry = NvmlControl(device).mig_geometry(gpu.identity.uuid)
        device.close()
    assert (geometry.key, geometry.memory_slices, geometry.compute_slices) == ("NVIDIA X900", 8, 7)
    assert set(geometry.profiles) == set(expected.profiles)
    for key, profile in geometry.profiles.items():
        like = expected.profiles[key]
        assert (profile.id, profile.name, profile.starts, profile.most) == (like.id, like.name, like.starts, like.most)
        assert profile.whole.compute_slices == profile.compute_slices
