"""Every MIG part of the catalogue, simulated and read back through the real binding; each driver branch with its own numbers.

Where the published file of profiles is at hand (EELGRID_DATA), the simulated
library answers by it.
"""

import json
import os
from pathlib import Path

import pynvml
import pytest
from tests.device_rig import SECOND, make_node, nvml_over

from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.simulation.nvml_library import installed_library
from eelgrid_agent.simulation.part_traits import adapt_geometry, get_profile_id_end
from eelgrid_agent.simulation.spec import GpuSpec
from eelgrid_protos.catalogue.loader import load_catalogue

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
CATALOGUE = load_catalogue()
# One product of each part; a driver that knows all of their profiles.
PRODUCTS = {product.mig.key: product for product in reversed(CATALOGUE.products.values()) if product.mig}
NEWEST = "615.10.01"
# First binding release with the number, as nvidia-ml-py numbers GPU instance profiles.
ENDS = {"450.80.02": 6, "470.256.02": 8, "535.161.07": 10, "570.133.20": 13, "580.95.05": 17, "615.10.01": 18}


@pytest.mark.parametrize("part", sorted(CATALOGUE.geometries))
def test_every_profile_of_every_part_stands_wherever_it_may_and_reads_back(part: str) -> None:
    """Each place of each profile, made and undone through the binding, is what the direct way lists."""
    node = make_node([5 * SECOND], GpuSpec(product=PRODUCTS[part].key, mig=()), driver_version=NEWEST)
    uuid, geometry = node.devices[0].uuid, CATALOGUE.geometries[part]
    with installed_library(node):
        device = nvml_over(node)
        control = NvmlControl(device)
        assert control.mig_geometry(uuid) == geometry
        for profile in geometry.profiles.values():
            for start in profile.starts:
                number = control.create_gpu_instance(uuid, profile.id, start)
                assert number == geometry.gi_id(start, profile.size)
                control.create_compute_instance(uuid, number, profile.whole.id)
                (gpu,) = device.gpus()
                (held,) = gpu.gpu_instances
                assert (held.profile_id, held.profile, held.start, held.size) == (
                    profile.id,
                    profile.name,
                    start,
                    profile.size,
                )
                (child,) = held.compute_instances
                assert (child.start, child.size) == (0, profile.compute_slices)
                assert (gpu,) == node.gpus()
                control.destroy_compute_instance(uuid, number, child.id)
                control.destroy_gpu_instance(uuid, number)
        device.close()


@pytest.mark.parametrize("part", sorted(CATALOGUE.geometries))
def test_the_uuids_of_a_part_are_the_same_in_every_life(part: str) -> None:
    lives = []
    for _ in range(2):
        node = make_node([5 * SECOND], GpuSpec(product=PRODUCTS[part].key, mig=()), driver_version=NEWEST)
        uuid = node.devices[0].uuid
        for profile in list(CATALOGUE.geometries[part].profiles.values()):
            number = node.create_gpu_instance(uuid, profile.id, profile.starts[-1])
            node.create_compute_instance(uuid, number, profile.whole.id)
            lives.append((profile.id, node.gpus()[0].gpu_instances[0].compute_instances[0].uuid))
            node.faults.destroy_foreign_instance(uuid, number)
    assert lives[: len(lives) // 2] == lives[len(lives) // 2 :]
    assert all(uuid.startswith("MIG-") for _, uuid in lives)


@pytest.mark.parametrize("part", sorted(CATALOGUE.geometries))
def test_the_library_answers_by_the_published_profiles(part: str) -> None:
    path = DATA / "mig" / "profiles.json"
    if not path.exists():
        pytest.skip(f"{path} is not here; set EELGRID_DATA to the folder of published data")
    published = next(row for row in json.loads(path.read_text("utf-8"))["gpus"] if row["key"] == part)
    by_enum = {row["enum"]: row for row in published["profiles"]}
    with installed_library(make_node([0], GpuSpec(product=PRODUCTS[part].key, mig=()), driver_version=NEWEST)):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            if enum not in by_enum:
                with pytest.raises(pynvml.NVMLError_NotSupported):
                    pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=2)
                continue
            row, info = by_enum[enum], pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=2)
            assert (info.id, info.name, info.sliceCount, info.instanceCount) == (
                row["id"],
                row["name"],
                row["compute_slices"],
                row["max_instances"],
            )
            assert info.memorySizeMB == (row["memory_mib"] or 0)
            found, count = (pynvml.c_nvmlGpuInstancePlacement_t * 8)(), pynvml.c_uint()
            pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, row["id"], found, pynvml.byref(count))
            assert [[place.start, place.size] for place in found[: count.value]] == row["placements"]
        pynvml.nvmlShutdown()


@pytest.mark.parametrize(("version", "end"), ENDS.items())
def test_an_older_driver_numbers_fewer_profiles_and_a_newer_binding_survives_it(version: str, end: int) -> None:
    node = make_node([0], GpuSpec(product="a100-sxm4-40gb", mig=()), driver_version=version)
    uuid = node.devices[0].uuid
    with installed_library(node):
        device = nvml_over(node)
        geometry = NvmlControl(device).mig_geometry(uuid)
        assert {profile.enum for profile in geometry.profiles.values()} == {
            profile.enum for profile in CATALOGUE.geometries["a100-40gb"].profiles.values() if profile.enum < end
        }
        handle = device.handle(uuid)
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, end, version=1)
        device.close()
    assert get_profile_id_end(node.spec.driver_branch) == end


def test_names_are_the_drivers_and_profiles_are_matched_by_id() -> None:
    """Known failure 18: one part, printed otherwise by an earlier driver."""
    printed = []
    for version in ("570.133.20", "580.95.05"):
        node = make_node([0], GpuSpec(product="gb200", mig=()), driver_version=version)
        uuid = node.devices[0].uuid
        with installed_library(node):
            device = nvml_over(node)
            control = NvmlControl(device)
            profile = control.mig_geometry(uuid).profile_by_id(0)
            assert profile.key == "7g"
            control.create_gpu_instance(uuid, 0, 0)
            (gpu,) = device.gpus()
            assert (gpu,) == node.gpus()
            printed.append((profile.name, gpu.gpu_instances[0].profile))
            device.close()
    assert printed == [("7g.189gb", "7g.189gb"), ("7g.186gb", "7g.186gb")]
    whole = CATALOGUE.geometries["gb200-186gb"]
    assert adapt_geometry(whole, 615) is whole
