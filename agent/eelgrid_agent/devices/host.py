"""Host port: CPU, memory, disks, network and RAPL energy of the machine that holds the GPUs.

Linux shows one RAPL folder for each zone, `intel-rapl:0` for a package and `intel-rapl:0:1` for a part of it, also on
AMD. Packages are summed for the CPU, zones named dram for memory; psys and the parts core and uncore overlap others and
would be counted twice. A counter wraps at its own `max_energy_range_uj`, within minutes on a busy machine: a fall is
one wrap, so it has to be read more often than that (60 s at 4 kW). Since 2020 only root may read it (CVE-2020-8694).
"""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import psutil

from eelgrid_agent.devices.port import Missing, ReadingValue
from eelgrid_agent.devices.sampler import SLOW_HOST_READINGS
from eelgrid_protos.messages import AbsenceReason, Reading

_MICRO = 1e-6
_ZONES_MOST = 64


class _Counter:
    """One zone's joules since it was first read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
        self._last_uj: int | None = None
        self._total_uj = 0

    def read_j(self) -> float:
        """Raises OSError, ValueError."""
        now_uj = int(self._path.read_text(encoding="ascii"))
        if self._last_uj is not None:
            rise_uj = now_uj - self._last_uj
            self._total_uj += rise_uj if rise_uj >= 0 else rise_uj + self._range_uj + 1
        self._last_uj = now_uj
        return self._total_uj * _MICRO


class RaplEnergy:
    """The machine's zones; `root` is where the kernel shows them."""

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        self._packages: list[_Counter] = []
        self._memories: list[_Counter] = []
        for folder in sorted(root.glob("intel-rapl:*"))[:_ZONES_MOST]:
            try:
                name = (folder / "name").read_text(encoding="ascii").strip()
                counters = {"package": self._packages, "dram": self._memories}.get(name.partition("-")[0])
                if counters is not None:
                    counters.append(_Counter(folder))
            except (OSError, ValueError):
                # A zone that cannot be described cannot be summed.
                continue

    def cpu_j(self) -> ReadingValue:
        """Joules of all packages since the first look."""
        return _sum_j(self._packages)

    def memory_j(self) -> ReadingValue:
        """Joules of all memory zones since the first look."""
        return _sum_j(self._memories)


def _sum_j(counters: list[_Counter]) -> ReadingValue:
    if not counters:
        return Missing(AbsenceReason.NOT_SUPPORTED)
    try:
        return sum([counter.read_j() for counter in counters])
    except PermissionError:
        return Missing(AbsenceReason.NO_PERMISSION)
    except (OSError, ValueError):
        return Missing(AbsenceReason.NOT_SAMPLED)


_NOT_YET = Missing(AbsenceReason.NOT_SAMPLED)
_NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)
# A package of 16 cores, 32 vCPU, idles at 15 W and works at 120 W (Lettich et al., arXiv 2412.17484).
_PACKAGE_MILLI, _PACKAGE_IDLE_W, _PACKAGE_BUSY_W = 32_000, 15.0, 120.0
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class Host(Protocol):
    """One machine."""

    @property
    def cpu_milli(self) -> int:
        """Its CPUs, in thousandths."""

    @property
    def memory_bytes(self) -> int:
        """Its memory."""

    @property
    def boot_id(self) -> str:
        """Changes when the machine boots; empty where unknown."""

    def read(self) -> Mapping[Reading, ReadingValue]:
        """One quick look: CPU and memory in use."""

    def read_slow(self) -> Mapping[Reading, ReadingValue]:
        """Counters of energy, disks and network."""


class MachineHost:
    """The machine we run on."""

    def __init__(self, energy: RaplEnergy | None = None) -> None:
        self._energy = RaplEnergy() if energy is None else energy
        self.cpu_milli = 1000 * (os.cpu_count() or 1)
        self.memory_bytes = psutil.virtual_memory().total
        self.boot_id = read_boot_id()
        self._first = True
        psutil.cpu_percent(interval=None)

    @staticmethod
    def name() -> str:
        """The name that the machine gives itself."""
        return socket.gethostname()

    def read(self) -> Mapping[Reading, ReadingValue]:
        """CPU use since the look before; the first look has nothing to compare with."""
        ratio = psutil.cpu_percent(interval=None) / 100.0
        first, self._first = self._first, False
        memory = psutil.virtual_memory()
        return {
            Reading.HOST_CPU_UTILIZATION_RATIO: _NOT_YET if first else min(1.0, ratio),
            Reading.HOST_MEMORY_USED_BYTES: float(memory.total - memory.available),
        }

    def read_slow(self) -> Mapping[Reading, ReadingValue]:
        """RAPL, and psutil's sums over physical disks and over interfaces but the loopback."""
        disk = psutil.disk_io_counters(nowrap=False)
        cards = psutil.net_io_counters(pernic=True, nowrap=False)
        outside = [counters for name, counters in cards.items() if name != "lo"]
        return {
            Reading.HOST_CPU_ENERGY_J: self._energy.cpu_j(),
            Reading.HOST_MEMORY_ENERGY_J: self._energy.memory_j(),
            Reading.HOST_DISK_READ_BYTES: _NOT_SUPPORTED if disk is None else float(disk.read_bytes),
            Reading.HOST_DISK_WRITTEN_BYTES: _NOT_SUPPORTED if disk is None else float(disk.write_bytes),
            Reading.HOST_NETWORK_RECEIVED_BYTES: float(sum(counters.bytes_recv for counters in outside)),
            Reading.HOST_NETWORK_SENT_BYTES: float(sum(counters.bytes_sent for counters in outside)),
        }


def read_boot_id(path: Path = BOOT_ID_FILE) -> str:
    """Reads the kernel's id of this boot; empty where there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class SimulatedHost:
    """A host whose load is that of the engine, and whose CPU packages draw power accordingly."""

    def __init__(
        self, *, cpu_milli: int, memory_bytes: int, load: Callable[[], tuple[int, int]], monotonic_ns: Callable[[], int]
    ) -> None:
        self.cpu_milli = cpu_milli
        self.memory_bytes = memory_bytes
        self.boot_id = ""
        self._load = load
        self._monotonic_ns = monotonic_ns
        self._energy_j = 0.0
        self._read_ns = monotonic_ns()

    def read(self) -> Mapping[Reading, ReadingValue]:
        """The share that is asked for, never above the whole."""
        cpu_milli, memory_bytes = self._load()
        return {
            Reading.HOST_CPU_UTILIZATION_RATIO: min(1.0, cpu_milli / self.cpu_milli) if self.cpu_milli else 0.0,
            Reading.HOST_MEMORY_USED_BYTES: float(min(memory_bytes, self.memory_bytes)),
        }

    def read_slow(self) -> Mapping[Reading, ReadingValue]:
        """CPU energy at the load of now since the look before; there are no disks and no network."""
        now_ns = self._monotonic_ns()
        working_milli = min(self._load()[0], self.cpu_milli)
        packages = -(-self.cpu_milli // _PACKAGE_MILLI)
        busy = -(-working_milli // _PACKAGE_MILLI)
        power_w = busy * _PACKAGE_BUSY_W + (packages - busy) * _PACKAGE_IDLE_W
        self._energy_j += power_w * max(0, now_ns - self._read_ns) / 1e9
        self._read_ns = now_ns
        absent = dict.fromkeys(SLOW_HOST_READINGS, _NOT_SUPPORTED)
        return {**absent, Reading.HOST_CPU_ENERGY_J: self._energy_j}
