"""The device port: what the agent asks of a node's GPUs, and how that fails.

Adapters (nvml.py, simulation/) translate; they never decide. Readings are in
the unit of their name; a reading that cannot be had is Missing with a reason,
so that nobody can add it to a number.

DeviceError                  the device or its driver is at fault
├── DriverUnavailable        no driver, or it cannot be opened: the node has no GPUs for now
├── GpuLost                  this device answers nothing any more
└── UnknownGpu               no device has this UUID
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from eelgrid_protos.messages import AbsenceReason, Gpu, Reading

__all__ = ["Device", "DeviceError", "DriverUnavailable", "GpuLost", "Missing", "RawReadings", "UnknownGpu", "Value"]


class DeviceError(Exception):
    """The device or its driver is at fault; the message says what to do."""


class DriverUnavailable(DeviceError):
    """No driver, or it cannot be opened."""


class GpuLost(DeviceError):
    """The device answers nothing any more."""


class UnknownGpu(DeviceError):
    """No device has this UUID."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A reading that could not be had."""

    reason: AbsenceReason


Value = float | Missing


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReadings:
    """One look at one device.

    `energy_counter_j` is the device's own counter, which falls to zero with the
    driver; the sampler turns it into the reading ENERGY_J, which never falls.
    `values` holds every other GPU reading and always has all of them.
    """

    energy_counter_j: Value
    values: Mapping[Reading, Value]


class Device(Protocol):
    """A node's GPUs."""

    def driver_version(self) -> str:
        """The driver's version; raises DriverUnavailable."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Identity, limits and MIG layout of every device, by index; raises DriverUnavailable."""

    def read(self, uuid: str) -> RawReadings:
        """One look at one device; raises UnknownGpu. A lost device reads Missing(GPU_LOST) throughout."""

    def close(self) -> None:
        """Lets the driver go; the port can be used again afterwards."""
