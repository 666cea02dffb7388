"""Every vendor's devices behind the two ports, with one set of words for what befalls them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pynvml

from eelgrid_agent.devices.amd.device import AmdControl, AmdDevice
from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.port import ControlPort, DevicePort, RawReadings
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_library import installed_library
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec
from tests.device_rig import SECOND, make_node, nvml_over
from tests.simulated_amdsmi import SimulatedAmdSmi

WAYS = ("nvml 470.256.02", "nvml 580.95.05", "amdsmi 7.0", "amdsmi 6.3")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the four devices of a rig are."""

    product: str
    model: str
    memory_gib: int
    limits_w: tuple[float, float, float]
    idle_w: float
    busy_w: float
    clocks_mhz: tuple[float, float]
    driver: str
    module: str


@dataclass(kw_only=True)
class VendorRig:
    part: Part
    clock: list[int]
    device: DevicePort
    control: ControlPort
    devices: tuple[SimGpu, ...]
    uuids: tuple[str, ...]
    # What happens beneath the adapter.
    put_load: Callable[[int, GpuLoad], None]
    set_driver: Callable[[bool], None]
    holds_session: Callable[[], bool]
    # A second port over the same devices, which is told before a listing asks one.
    visited: Callable[[Callable[[int], bool]], DevicePort]

    def read(self, index: int) -> RawReadings:
        return self.device.read(self.uuids[index])

    def advance(self, seconds: float) -> None:
        self.clock[0] += int(seconds * SECOND)

    def lose(self, index: int) -> None:
        self.devices[index].lose(self.clock[0])

    def restore(self, index: int) -> None:
        self.devices[index].restore(self.clock[0])

    def hang(self, index: int) -> None:
        self.devices[index].hang()


@contextmanager
def open_vendor(way: str) -> Iterator[VendorRig]:
    """Four devices of one vendor; nothing stays open."""
    library, version = way.split()
    clock = [5 * SECOND]
    if library == "amdsmi":
        yield _amd(clock, old=version == "6.3")
        return
    node = make_node(clock, *[GpuSpec(product="h100-sxm5-80gb")] * 4, driver_version=version)
    with installed_library(node):
        rig = _nvml(node, clock, version)
        try:
            yield rig
        finally:
            rig.device.close()


def _nvml(node: SimulatedNode, clock: list[int], version: str) -> VendorRig:
    device = nvml_over(node)
    uuids = tuple(gpu.uuid for gpu in node.devices)
    return VendorRig(
        part=Part(
            product="NVIDIA H100 80GB HBM3",
            model="H100-80GB-HBM3",
            memory_gib=80,
            limits_w=(200.0, 700.0, 700.0),
            idle_w=69.05,
            busy_w=700.0,
            clocks_mhz=(345.0, 1980.0),
            driver=version,
            module="nvidia",
        ),
        clock=clock,
        device=device,
        control=NvmlControl(device),
        devices=node.devices,
        uuids=uuids,
        put_load=lambda index, load: node.set_load(uuids[index], load),
        set_driver=lambda there: node.faults.load_driver() if there else node.faults.unload_driver(),
        holds_session=_nvml_is_open,
        visited=lambda visit: NvmlDevice(visit=visit),
    )


def _nvml_is_open() -> bool:
    try:
        pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError_Uninitialized:
        return False
    return True


def _amd(clock: list[int], *, old: bool) -> VendorRig:
    smi = SimulatedAmdSmi(4, monotonic_ns=lambda: clock[0], old=old)
    device = AmdDevice(smi, user_id=lambda: 0)

    def set_driver(there: bool) -> None:
        smi.driver_loaded = there

    return VendorRig(
        part=Part(
            product="AMD Instinct MI300X OAM",
            model="MI300X",
            memory_gib=192,
            limits_w=(0.0, 750.0, 750.0),
            idle_w=140.0,
            busy_w=750.0,
            clocks_mhz=(132.0, 2100.0),
            driver="6.12.12",
            module="amdgpu",
        ),
        clock=clock,
        device=device,
        control=AmdControl(device),
        devices=smi.devices,
        uuids=tuple(smi.uuid(index) for index in range(4)),
        put_load=smi.set_load,
        set_driver=set_driver,
        holds_session=lambda: smi.sessions > 0,
        visited=lambda visit: AmdDevice(smi, visit=visit),
    )
