"""The host port: CPU and memory of the machine that holds the GPUs.

Owns how the host's size, boot and load are read. Must not know GPUs.
"""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import psutil

from eelgrid_agent.device import Missing, Value
from eelgrid_protos.messages import AbsenceReason, Reading

__all__ = ["Host", "MachineHost", "SimulatedHost"]

_NOT_YET = Missing(AbsenceReason.NOT_SAMPLED)
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
        """One look."""


class MachineHost:
    """The machine we run on."""

    def __init__(self) -> None:
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


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class SimulatedHost:
    """A host whose load is what the engine holds."""

    def __init__(self, *, cpu_milli: int, memory_bytes: int, load: Callable[[], tuple[int, int]]) -> None:
        self.cpu_milli = cpu_milli
        self.memory_bytes = memory_bytes
        self.boot_id = ""
        self._load = load

    def read(self) -> Mapping[Reading, Value]:
        """The share that is asked for, never above the whole."""
        cpu_milli, memory_bytes = self._load()
        return {
            Reading.HOST_CPU_UTILIZATION_RATIO: min(1.0, cpu_milli / self.cpu_milli) if self.cpu_milli else 0.0,
            Reading.HOST_MEMORY_USED_BYTES: float(min(memory_bytes, self.memory_bytes)),
        }
