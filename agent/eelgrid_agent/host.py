"""The host port: CPU, memory, disks and network of the machine that holds the GPUs.

Owns how the host's size, boot and load are read. Must not know GPUs.
"""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import psutil

from eelgrid_agent.device import Missing, Value
from eelgrid_agent.host_energy import PackageEnergy
from eelgrid_agent.slow import SLOW_HOST_READINGS
from eelgrid_protos.messages import AbsenceReason, Reading

__all__ = ["Host", "MachineHost", "SimulatedHost"]

_NOT_YET = Missing(AbsenceReason.NOT_SAMPLED)
_NOT_SUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)
# A package of 16 cores, 32 vCPU, idles at 15 W and works at 120 W (Lettich et al., arXiv 2412.17484).
_PACKAGE_MILLI, _PACKAGE_IDLE_W, _PACKAGE_BUSY_W = 32_000, 15.0, 120.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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

    def read(self) -> Mapping[Reading, Value]:
        """One quick look: CPU and memory in use."""

    def read_slow(self) -> Mapping[Reading, Value]:
        """Counters of energy, disks and network."""


class MachineHost:
    """The machine we run on."""

    def __init__(self, energy: PackageEnergy | None = None) -> None:
        self._energy = PackageEnergy() if energy is None else energy
        self.cpu_milli = 1000 * (os.cpu_count() or 1)
        self.memory_bytes = psutil.virtual_memory().total
        self.boot_id = _boot_id()
        self._first = True
        psutil.cpu_percent(interval=None)

    @staticmethod
    def name() -> str:
        """The name that the machine gives itself."""
        return socket.gethostname()

    def read(self) -> Mapping[Reading, Value]:
        """CPU use since the look before; the first look has nothing to compare with."""
        ratio = psutil.cpu_percent(interval=None) / 100.0
        first, self._first = self._first, False
        memory = psutil.virtual_memory()
        return {
            Reading.HOST_CPU_UTILIZATION_RATIO: _NOT_YET if first else min(1.0, ratio),
            Reading.HOST_MEMORY_USED_BYTES: float(memory.total - memory.available),
        }

    def read_slow(self) -> Mapping[Reading, Value]:
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


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class SimulatedHost:
    """A host whose load is what the engine holds, and whose CPU packages draw what the load makes them."""

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

    def read(self) -> Mapping[Reading, Value]:
        """The share that is asked for, never above the whole."""
        cpu_milli, memory_bytes = self._load()
        return {
            Reading.HOST_CPU_UTILIZATION_RATIO: min(1.0, cpu_milli / self.cpu_milli) if self.cpu_milli else 0.0,
            Reading.HOST_MEMORY_USED_BYTES: float(min(memory_bytes, self.memory_bytes)),
        }

    def read_slow(self) -> Mapping[Reading, Value]:
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
