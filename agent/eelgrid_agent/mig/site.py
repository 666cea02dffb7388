"""What the command works on: this machine's devices, or a simulated node whose devices outlive the program.

Owns how they are opened, which directory their journal and lock are in, which
board each is, and what the machine around them can do. Both kinds go through the real NVML binding, so that what
an operator tries on a simulated node is what runs on a real one. Knows no
layout.

SiteError                    there is nothing to work on: a flag or a file is wrong
└── NoSuchNode               the fleet file has no node of this name, or several and none was named
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from eelgrid_agent.device import Control, Device
from eelgrid_agent.mig.capability_nodes import CapabilityNodes
from eelgrid_agent.mig.machine import Machine, obstacle, read_machine
from eelgrid_agent.mig.names import PciId
from eelgrid_agent.state_directory import default_directory
from eelgrid_protos.catalogue import MigGeometry
from eelgrid_protos.messages import Gpu

__all__ = ["LAYOUTS_FILE", "NoSuchNode", "Site", "SiteError", "boot_of", "opened", "sysfs_board"]

_NVIDIA = 0x10DE
_DEVICES_FILE = "devices.json"
LAYOUTS_FILE = "mig.json"
_SYSFS = Path("/sys/bus/pci/devices")


class SiteError(Exception):
    """There is nothing to work on; the message names the flag and the remedy."""


class NoSuchNode(SiteError):
    """The fleet file has no node of this name, or several and none was named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One node's devices; `keep` is called after every change, for devices that do not keep it themselves.

    `open_nodes` makes what containers need to open the instances of a device, and says what it could not make.
    """

    name: str
    device: Device
    control: Control
    board: Callable[[Gpu], PciId | None]
    boot_id: str
    directory: Path
    machine: Machine = field(default_factory=Machine)
    simulated: bool = False
    keep: Callable[[], None] = lambda: None
    open_nodes: Callable[[Gpu], str] = lambda _: ""

    @property
    def journal(self) -> Path:
        """The executor's journal, which the agent and the command share."""
        return self.directory / LAYOUTS_FILE

    def obstacle(self, geometry: MigGeometry) -> str:
        """Why this machine cannot change the MIG mode of a part, or nothing."""
        return obstacle(geometry, self.machine)


def boot_of(boot_id: str, driver_start: str) -> str:
    """What MIG instances live as long as: a boot of the machine, and in it a load of the driver; never empty."""
    return f"{boot_id}/{driver_start}" if boot_id or driver_start else "unknown"


@contextmanager
def opened(*, simulate: Path | None, node: str, seed: int, state: Path | None) -> Iterator[Site]:
    """The node's devices for as long as the block runs; raises SiteError and what fleet files raise."""
    if simulate is not None:
        with _simulated(simulate, node, seed, state) as site:
            yield site
        return
    if node:
        raise SiteError("--node: is for --simulate; a real node is the one that this runs on")
    from eelgrid_agent.host import MachineHost
    from eelgrid_agent.nvml import NvmlDevice
    from eelgrid_agent.nvml.control import NvmlControl
    from eelgrid_agent.power import machine_origin

    device, origin = NvmlDevice(), machine_origin()
    try:
        yield Site(
            name=MachineHost.name(), device=device, control=NvmlControl(device), board=sysfs_board,
            boot_id=boot_of(origin.boot_id, origin.driver_start), machine=read_machine(),
            directory=state or default_directory(os.environ, root=os.geteuid() == 0),
            open_nodes=CapabilityNodes().make,
        )  # fmt: skip
    finally:
        device.close()


@contextmanager
def _simulated(file: Path, name: str, seed: int, state: Path | None) -> Iterator[Site]:
    from eelgrid_agent.nvml import NvmlDevice
    from eelgrid_agent.nvml.control import NvmlControl
    from eelgrid_agent.simulation import SimulatedNode, library, load_fleet
    from eelgrid_agent.simulation.boards import DEVICE_IDS
    from eelgrid_agent.simulation.state_file import keep, resume, without_layouts

    specs = load_fleet(file)
    chosen = [spec for spec in specs if name in ("", spec.node_name)]
    if len(chosen) != 1:
        names = ", ".join(spec.node_name for spec in specs[:12]) + (", …" if len(specs) > 12 else "")
        problem = f"{file} has no node {name!r}" if name else f"{file} has {len(specs)} nodes"
        raise NoSuchNode(f"--node: {problem}; name one of: {names}")
    (spec,) = chosen
    directory = (state or file.with_name(file.name + ".state")) / spec.node_name
    path = directory / _DEVICES_FILE
    before = path.exists()
    simulation = SimulatedNode(without_layouts(spec) if before else spec, monotonic_ns=time.monotonic_ns, seed=seed)
    if before:
        resume(simulation, path)

    def board(gpu: Gpu) -> PciId | None:
        number = DEVICE_IDS.get(gpu.catalogue_key)
        return None if number is None else PciId(number, _NVIDIA)

    with library.installed(simulation):
        # The rights are those on the simulated node, not ours on this machine.
        device = NvmlDevice(rights=simulation.access)
        try:
            yield Site(
                name=spec.node_name, device=device, control=NvmlControl(device), board=board, boot_id="simulated",
                directory=directory, simulated=True, keep=lambda: keep(simulation, path),
            )  # fmt: skip
        finally:
            device.close()


def sysfs_board(gpu: Gpu, root: Path = _SYSFS) -> PciId | None:
    """What the kernel says of a device's board; None where it does not say."""
    domain, _, rest = gpu.pci_bus_id.lower().partition(":")
    if not rest:
        return None
    # NVML writes eight digits of the domain, the kernel four or more.
    folder = root / f"{domain.lstrip('0').rjust(4, '0')}:{rest}"
    try:
        numbers = [
            int((folder / name).read_text("ascii"), 16)
            for name in ("device", "vendor", "subsystem_device", "subsystem_vendor")
        ]
    except (OSError, ValueError):
        return None
    return PciId(numbers[0], numbers[1], (numbers[2], numbers[3]))
