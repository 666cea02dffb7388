"""Simulated devices with one way to change them: what the contract suites of the control port stand on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.port import ControlPort
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_library import installed_library
from eelgrid_agent.simulation.spec import GpuSpec, MigSlice
from eelgrid_protos.messages import Gpu
from tests.device_rig import SECOND, make_node

LAYOUT = (MigSlice(profile="3g", start=4, compute_slices=(1, 2)), MigSlice(profile="1g", start=1, compute_slices=()))
DEVICES = (
    GpuSpec(product="t4"),
    GpuSpec(product="p100-pcie-16gb"),
    GpuSpec(product="a100-sxm4-40gb", mig=LAYOUT),
    GpuSpec(product="a30"),
    GpuSpec(product="h100-sxm5-80gb"),
    GpuSpec(product="b200", mig=()),
)
T4, P100, A100, A30, H100, B200 = range(len(DEVICES))
BRANCHES = ("470.256.02", "535.161.07", "580.95.05", "595.58.03")
WAYS = tuple(f"{way} {branch}" for way in ("direct", "nvml") for branch in BRANCHES)
# Profile ids of the parts with seven compute slices.
G1, G2, G3, G4 = 19, 14, 9, 5


@dataclass
class Rig:
    """A node, a clock that the test moves, and one way to change it."""

    node: SimulatedNode
    clock: list[int]
    control: ControlPort
    branch: int

    def uuid(self, index: int) -> str:
        return self.node.devices[index].uuid

    def gpu(self, index: int) -> Gpu:
        return self.node.devices[index].identity

    def spans(self, index: int) -> list[tuple[int, int, int]]:
        return [(held.id, held.profile_id, held.start) for held in self.gpu(index).gpu_instances]


def make(clock: list[int], branch: str = "580.95.05") -> SimulatedNode:
    return make_node(clock, *DEVICES, driver_version=branch)


@contextmanager
def open_rig(case: str) -> Iterator[Rig]:
    """One way to change simulated devices, such as "nvml 580.95.05"; nothing stays open."""
    clock = [5 * SECOND]
    way, branch = case.split()
    node = make(clock, branch)
    with ExitStack() as stack:
        control: ControlPort = node
        if way == "nvml":
            stack.enter_context(installed_library(node))
            device = NvmlDevice()
            stack.callback(device.close)
            device.gpus()
            control = NvmlControl(device)
        yield Rig(node, clock, control, node.spec.driver_branch)
