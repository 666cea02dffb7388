"""The host of MIG commands: this machine or a simulated node, its boards, reset obstacles and device nodes.

Both kinds go through the real NVML binding. A virtual machine or a display driver can block the reset that some
parts need for a mode change; it is then refused beforehand. Device nodes /dev/nvidia-caps/nvidia-capN are created
by nvidia-modprobe.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path

from eelgrid_agent.devices.host import read_boot_id
from eelgrid_agent.devices.port import ControlPort, DevicePort
from eelgrid_agent.enforce.device_leases import LEASES_FILE, DeviceLeases
from eelgrid_agent.enforce.lease_table import LEASE_JOURNAL
from eelgrid_agent.enforce.mig.layout import PciId
from eelgrid_agent.state_files import MemoryState, StateFile, default_state_directory
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance
from eelgrid_protos.values import dataclass

_PROGRAM = "nvidia-modprobe"
_TIMEOUT_S = 10.0
_CAPABILITY_NODES_BYTES_MOST = 64 * 1024
_MINOR = re.compile(r"^DeviceFileMinor:\s*([0-9]{1,9})\s*$", re.MULTILINE)
_GPU_MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,4})\s*$", re.MULTILINE)

# Runs a program; returns what went wrong, or nothing.
RunProgram = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class CapabilityNode:
    """One capability: the driver's file that describes it, and the device node that opens it."""

    capability: str
    device: str


def run_program(words: Sequence[str]) -> str:
    """Runs it without a shell; what went wrong, or nothing."""
    try:
        # No shell, and words of ours and of the driver only.
        done = subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except FileNotFoundError:
        return f"{words[0]} is not installed; it comes with the NVIDIA driver"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]} cannot be run ({error})"
    said = " ".join(done.stderr.decode(errors="replace").split())[:200]
    return "" if done.returncode == 0 else f"{words[0]} failed with {done.returncode} ({said or 'no output'})"


class CapabilityNodes:
    """The nodes of one machine."""

    def __init__(self, root: Path = Path("/"), call: RunProgram = run_program) -> None:
        self._root = root
        self._call = call

    def find_missing(self, gpu: Gpu) -> tuple[CapabilityNode, ...]:
        """Capability nodes that the instances of a device need and lack.

        Empty where the driver does not report them.
        """
        return tuple(node for node in self._required_nodes(gpu) if not (self._root / node.device.lstrip("/")).exists())

    def create_missing(self, gpu: Gpu) -> str:
        """Creates the missing capability nodes; returns what is still missing and why, or nothing."""
        missing = self.find_missing(gpu)
        if not missing:
            return ""
        words = [_PROGRAM, *(word for node in missing for word in ("-f", node.capability))]
        problem = self._call(words)
        left = self.find_missing(gpu)
        if not left:
            return ""
        names = ", ".join(node.device for node in left)
        why = problem or f"{_PROGRAM} reports that it made them"
        return f"containers cannot open {names}: {why}; run `{' '.join(words)}` as root"

    def list_device_nodes(
        self, gpu: Gpu, instance: GpuInstance | None = None, child: ComputeInstance | None = None
    ) -> tuple[str, ...]:
        """Returns the device nodes that open a GPU, or a compute instance of it: the GPU's, and one for each capability."""
        number = self._gpu_minor(gpu)
        device = f"/dev/nvidia{gpu.index if number is None else number}"
        if number is None or instance is None or child is None:
            return (device,)
        below = _capabilities(number, instance)
        paths = (f"{below}/access", f"{below}/ci{child.id}/access")
        return device, *(node.device for path in paths for node in self._node(path))

    def _required_nodes(self, gpu: Gpu) -> Iterator[CapabilityNode]:
        number = self._gpu_minor(gpu)
        if number is None:
            return
        for instance in gpu.gpu_instances:
            below = _capabilities(number, instance)
            yield from self._node(f"{below}/access")
            for child in instance.compute_instances:
                yield from self._node(f"{below}/ci{child.id}/access")

    def _node(self, capability: str) -> Iterator[CapabilityNode]:
        match = _MINOR.search(self._text(capability))
        if match is not None:
            yield CapabilityNode(capability, f"/dev/nvidia-caps/nvidia-cap{match[1]}")

    def _gpu_minor(self, gpu: Gpu) -> str | None:
        """By PCI address: index and minor are two orders, and both may change with a reset."""
        domain, _, rest = gpu.pci_bus_id.lower().partition(":")
        if not rest:
            return None
        # NVML writes eight digits of the domain, the driver's folder has four or more.
        folder = f"{domain.lstrip('0').rjust(4, '0')}:{rest}"
        match = _GPU_MINOR.search(self._text(f"/proc/driver/nvidia/gpus/{folder}/information"))
        return None if match is None else match[1]

    def _text(self, name: str) -> str:
        try:
            with (self._root / name.lstrip("/")).open("rb") as file:
                return file.read(_CAPABILITY_NODES_BYTES_MOST).decode(errors="replace")
        except OSError:
            return ""


def _capabilities(minor: str, instance: GpuInstance) -> str:
    return f"/proc/driver/nvidia/capabilities/gpu{minor}/mig/gi{instance.id}"


_DISPLAY_MODULE = "nvidia_drm"
_BYTES_MOST = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResetInfo:
    """What of the machine matters to a reset."""

    virtual: bool = False
    display_users: int = 0


def read_machine(root: Path = Path("/")) -> MachineResetInfo:
    """Reads reset obstacles from the kernel; what it does not report counts as no obstacle."""
    flags = next((line for line in _lines(root / "proc/cpuinfo") if line.startswith("flags")), "")
    users = [line.split()[2] for line in _lines(root / "proc/modules") if line.split()[:1] == [_DISPLAY_MODULE]]
    return MachineResetInfo(virtual="hypervisor" in flags.split(), display_users=int(users[0]) if users else 0)


def find_reset_obstacle(geometry: MigGeometry, machine: MachineResetInfo) -> str:
    """Why this machine cannot change the MIG mode of a part, or nothing."""
    if not geometry.reset_to_change_mode:
        return ""
    if machine.virtual:
        remedy = "change it with nvidia-smi -mig and reboot the virtual machine, or change it on the host"
        return f"this part needs a reset for it, which a virtual machine can seldom give; {remedy}"
    if machine.display_users:
        return (
            f"this part needs a reset for it, which {_DISPLAY_MODULE} in use prevents; stop the display and unload it"
        )
    return ""


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            return file.read(_BYTES_MOST).decode(errors="replace").splitlines()
    except OSError:
        return []


_NVIDIA = 0x10DE
_DEVICES_FILE = "devices.json"
LAYOUTS_FILE = "mig.json"
_SYSFS = Path("/sys/bus/pci/devices")


class MigHostError(Exception):
    """There is nothing to work on; the message names the flag and the remedy."""


class NoSuchNode(MigHostError):
    """The fleet file has no node of this name, or several and none was named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigHost:
    """One node's devices; `keep` is called after every change, for devices that do not store it themselves.

    `open_nodes` creates what containers need to open the instances of a device, and returns what it could not create.
    """

    name: str
    device: DevicePort
    control: ControlPort
    board: Callable[[Gpu], PciId | None]
    boot_id: str
    directory: Path
    machine: MachineResetInfo = field(default_factory=MachineResetInfo)
    simulated: bool = False
    keep: Callable[[], None] = lambda: None
    open_nodes: Callable[[Gpu], str] = lambda _: ""
    # Leases what jobs hold that the journal of leases does not name.
    adopt_leases: Callable[[DeviceLeases], None] = lambda _: None

    @property
    def journal_path(self) -> Path:
        """The executor's journal, which the agent and the command share."""
        return self.directory / LAYOUTS_FILE

    def read_leases(self) -> DeviceLeases:
        """What engines have, as journals and records say now; raises StateFileError. Nothing is written back."""
        table = StateFile(self.directory / LEASES_FILE, LEASE_JOURNAL).peek()
        leases = DeviceLeases(MemoryState(table), boot_id=read_boot_id(), wall_ns=time.time_ns)
        self.adopt_leases(leases)
        return leases

    def find_mode_obstacle(self, geometry: MigGeometry) -> str:
        """Why this machine cannot change the MIG mode of a part, or nothing."""
        return find_reset_obstacle(geometry, self.machine)


def make_boot_key(boot_id: str, driver_start: str) -> str:
    """What MIG instances live as long as: a boot of the machine, and in it a load of the driver; never empty."""
    return f"{boot_id}/{driver_start}" if boot_id or driver_start else "unknown"


@contextmanager
def open_mig_host(*, simulate: Path | None, node: str, seed: int, state: Path | None) -> Iterator[MigHost]:
    """The node's devices for as long as the block runs; raises MigHostError and what fleet files raise."""
    if simulate is not None:
        with _open_simulated(simulate, node, seed, state) as site:
            yield site
        return
    if node:
        raise MigHostError("--node: is for --simulate; a real node is the one that this runs on")
    from eelgrid_agent.devices.host import MachineHost
    from eelgrid_agent.devices.nvml.control import NvmlControl
    from eelgrid_agent.devices.nvml.device import NvmlDevice
    from eelgrid_agent.enforce.power import read_driver_origin

    device, origin = NvmlDevice(), read_driver_origin()
    try:
        yield MigHost(
            name=MachineHost.name(),
            device=device,
            control=NvmlControl(device),
            board=read_sysfs_board,
            boot_id=make_boot_key(origin.boot_id, origin.driver_start),
            machine=read_machine(),
            directory=state or default_state_directory(os.environ, root=os.geteuid() == 0),
            open_nodes=CapabilityNodes().create_missing,
        )
    finally:
        device.close()


@contextmanager
def _open_simulated(file: Path, name: str, seed: int, state: Path | None) -> Iterator[MigHost]:
    from eelgrid_agent.devices.nvml.control import NvmlControl
    from eelgrid_agent.devices.nvml.device import NvmlDevice
    from eelgrid_agent.simulation import nvml_library
    from eelgrid_agent.simulation.node import SimulatedNode
    from eelgrid_agent.simulation.node_files import drop_layouts, load_node_state, save_node_state
    from eelgrid_agent.simulation.spec import PCI_DEVICE_IDS, load_fleet

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
    simulation = SimulatedNode(drop_layouts(spec) if before else spec, monotonic_ns=time.monotonic_ns, seed=seed)
    if before:
        load_node_state(simulation, path)

    def board(gpu: Gpu) -> PciId | None:
        number = PCI_DEVICE_IDS.get(gpu.catalogue_key)
        return None if number is None else PciId(number, _NVIDIA)

    with nvml_library.installed_library(simulation):
        # The rights are those on the simulated node, not ours on this machine.
        device = NvmlDevice(rights=simulation.access)
        try:
            yield MigHost(
                name=spec.node_name,
                device=device,
                control=NvmlControl(device),
                board=board,
                boot_id="simulated",
                directory=directory,
                simulated=True,
                keep=lambda: save_node_state(simulation, path),
            )
        finally:
            device.close()


def read_sysfs_board(gpu: Gpu, root: Path = _SYSFS) -> PciId | None:
    """Reads the PCI id of a device's board from the kernel; None where it does not report one."""
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
