"""Simulated devices with one way to them: what the contract suites of the device port stand on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.port import FAST_READINGS, DevicePort, Missing, RawReadings
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_library import installed_library
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, MigSlice, NodeSpec
from eelgrid_protos.messages import READING_RANGES, AbsenceReason, Reading

SECOND = 1_000_000_000
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
# Before instant power; with wide process entries; after them; the long-lived one; the newest.
BRANCHES = ("470.256.02", "535.54.03", "535.161.07", "580.95.05", "595.58.03")
WAYS = ("direct", "nvml")


@dataclass
class Rig:
    """Simulated devices, a clock that the test moves, and one way to them."""

    node: SimulatedNode
    clock: list[int]
    device: DevicePort = field(init=False)

    def uuid(self, index: int) -> str:
        return self.node.devices[index].uuid

    def read(self, index: int) -> RawReadings:
        return self.device.read(self.uuid(index))

    def slow(self, index: int) -> dict[Reading, float | Missing]:
        return dict(self.device.read_slow(self.uuid(index)))

    def load(self, index: int, utilization: float, memory: int = 0, **more: float) -> None:
        self.node.set_load(self.uuid(index), GpuLoad(utilization_ratio=utilization, memory_bytes=memory, **more))

    def advance(self, seconds: float) -> None:
        self.clock[0] += int(seconds * SECOND)


def make_node(
    clock: list[int], *gpus: GpuSpec, driver_version: str = "580.95.05", stall: object = lambda: None
) -> SimulatedNode:
    spec = NodeSpec(
        node_name="node-0", cpu_milli=96_000, memory_bytes=2**39, gpus=gpus or DEVICES, driver_version=driver_version
    )
    return SimulatedNode(spec, monotonic_ns=lambda: clock[0], seed=7, stall=stall)


def nvml_over(node: SimulatedNode) -> NvmlDevice:
    """The NVML adapter, with the simulation's clock and rights; the library is to be installed."""
    return NvmlDevice(monotonic_ns=node.monotonic_ns, rights=lambda: node.operations.rights)


@contextmanager
def open_rig(way: str, *gpus: GpuSpec, driver_version: str = "580.95.05") -> Iterator[Rig]:
    """One way to simulated devices; nothing stays open."""
    clock = [5 * SECOND]
    node = make_node(clock, *gpus, driver_version=driver_version)
    rig = Rig(node, clock)
    if way == "direct":
        rig.device = node
        yield rig
        node.close()
        return
    with installed_library(node):
        rig.device = nvml_over(node)
        try:
            yield rig
        finally:
            rig.device.close()


def assert_well_formed(look: RawReadings) -> None:
    assert set(look.values) == set(FAST_READINGS) - {Reading.ENERGY_J}
    assert_in_range({**look.values, Reading.ENERGY_J: look.energy_counter_j})


def assert_in_range(values: dict[Reading, float | Missing]) -> None:
    for reading, value in values.items():
        if not isinstance(value, Missing):
            assert type(value) is float
            assert READING_RANGES[reading].low <= value <= READING_RANGES[reading].high


def throughout(look: RawReadings, reason: AbsenceReason) -> bool:
    silent = {look.energy_counter_j, *look.values.values()} == {Missing(reason)}
    return silent and len(look.values) == len(FAST_READINGS) - 1
