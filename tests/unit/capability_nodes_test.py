"""Device nodes of MIG instances below a root of our own, with a program that makes them, or does not."""

from dataclasses import replace

import pytest
from tests.mig_rig import ONE, THREE, applied, asked, rig_with

from eelgrid_agent.enforce.mig.host import CapabilityNodes, run_program
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance, NodeEventKind

INSTANCE = GpuInstance(
    id=2, profile_id=9, profile="3g.20gb", start=4, size=4, compute_instances=(ComputeInstance(id=0),)
)
# The first of the listing, and the driver's third: two orders.
GPU = Gpu(
    uuid="GPU-1",
    index=0,
    product="A100",
    model="a100",
    pci_bus_id="00000000:3B:00.0",
    mig_capable=True,
    mig_enabled=True,
    gpu_instances=(INSTANCE,),
)
BELOW = "/proc/driver/nvidia/capabilities/gpu3/mig/gi2"


@pytest.fixture
def root(tmp_path):
    def write(name, text):
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("/proc/driver/nvidia/gpus/0000:3b:00.0/information", "Model: \t\t NVIDIA A100\nDevice Minor: \t 3\n")
    write(f"{BELOW}/access", "DeviceFileMinor: 30\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    write(f"{BELOW}/ci0/access", "DeviceFileMinor: 31\nDeviceFileMode: 292\n")
    (tmp_path / "dev/nvidia-caps").mkdir(parents=True)
    return tmp_path


def test_f16_nodes_that_are_missing_after_a_change_are_made_and_looked_for_again(root):
    calls = []

    def modprobe(words):
        calls.append(list(words))
        for number in (30, 31):
            (root / f"dev/nvidia-caps/nvidia-cap{number}").touch()
        return ""

    nodes = CapabilityNodes(root, modprobe)
    assert [node.device for node in nodes.find_missing(GPU)] == [
        "/dev/nvidia-caps/nvidia-cap30",
        "/dev/nvidia-caps/nvidia-cap31",
    ]
    assert nodes.create_missing(GPU) == ""
    assert calls == [["nvidia-modprobe", "-f", f"{BELOW}/access", "-f", f"{BELOW}/ci0/access"]]
    assert nodes.create_missing(GPU) == ""
    assert len(calls) == 1, "what is there is not made again"


def test_f16_only_what_is_missing_is_made(root):
    calls = []
    (root / "dev/nvidia-caps/nvidia-cap30").touch()
    problem = CapabilityNodes(root, lambda words: calls.append(list(words)) or "").create_missing(GPU)
    assert calls == [["nvidia-modprobe", "-f", f"{BELOW}/ci0/access"]]
    assert problem == (
        "containers cannot open /dev/nvidia-caps/nvidia-cap31: nvidia-modprobe reports that it made them; run "
        f"`nvidia-modprobe -f {BELOW}/ci0/access` as root"
    )


def test_f16_a_program_that_fails_is_reported_with_what_it_says(root):
    problem = CapabilityNodes(root, lambda _: "nvidia-modprobe failed with 1 (no rights)").create_missing(GPU)
    assert "containers cannot open /dev/nvidia-caps/nvidia-cap30, /dev/nvidia-caps/nvidia-cap31" in problem
    assert "nvidia-modprobe failed with 1 (no rights)" in problem


def test_f21_a_device_is_found_by_its_bus_address_whatever_its_index(root):
    nodes = CapabilityNodes(root, lambda _: "")
    assert nodes.find_missing(replace(GPU, index=7)) == nodes.find_missing(GPU) != ()


def test_where_the_driver_reports_nothing_nothing_is_missing(root):
    nodes = CapabilityNodes(root, lambda _: "must not be called")
    assert nodes.create_missing(replace(GPU, pci_bus_id="00000000:99:00.0")) == ""
    assert nodes.create_missing(replace(GPU, pci_bus_id="")) == ""
    (root / f"{BELOW}/access".lstrip("/")).write_text("DeviceFileMinor: many\n")
    assert [node.capability for node in nodes.find_missing(GPU)] == [f"{BELOW}/ci0/access"]


def test_a_program_is_run_and_its_end_is_reported(tmp_path):
    assert run_program(["true"]) == ""
    assert run_program(["sh", "-c", "echo no rights >&2; exit 3"]) == "sh failed with 3 (no rights)"
    assert run_program(["false"]) == "false failed with 1 (no output)"
    missing = str(tmp_path / "nvidia-modprobe")
    assert run_program([missing]) == f"{missing} is not installed; it comes with the NVIDIA driver"
    assert "cannot be run" in run_program([str(tmp_path)])


def test_f16_the_agent_makes_nodes_after_each_change_and_reports_what_it_could_not_make():
    rig = rig_with(ONE)
    asked_for = []

    def open_nodes(gpu):
        asked_for.append([instance.start for instance in gpu.gpu_instances])
        return "containers cannot open /dev/nvidia-caps/nvidia-cap30"

    service = MigService(
        rig.device,
        rig.device,
        rig.journal,
        boot_id=lambda: "boot-1",
        sleep=rig.device.sleep,
        monotonic_s=lambda: 0.0,
        wall_ns=lambda: 1,
        open_nodes=open_nodes,
    )
    assert service.check_layouts() == ()
    assert asked_for == []
    assert applied(service.apply_layout(asked(rig, THREE)))
    assert asked_for == [[4]]
    (told,) = [event for event in service.drain_events() if event.kind is NodeEventKind.HEALTH]
    assert told.detail == "MIG: containers cannot open /dev/nvidia-caps/nvidia-cap30"
    rig.device.remove(2)
    assert [applied(result) for result in service.check_layouts()] == [True]
    assert asked_for == [[4], [4]]
