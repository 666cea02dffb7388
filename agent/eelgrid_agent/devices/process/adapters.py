"""Adapters that the driver process can open, by name: nvml, amd and simulated.

Each factory takes a text argument and the `visit` callback that a listing calls before it asks a device. Adapters
are imported on demand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eelgrid_agent.devices.port import VisitCallback


@dataclass(frozen=True, slots=True)
class OpenedDriver:
    """A driver's devices; `control` makes the other port when it is first needed: most agents only read."""

    device: Any
    control: Callable[[], Any]


DriverFactory = Callable[[str, VisitCallback], OpenedDriver]


def _nvml(_argument: str, visit: VisitCallback) -> OpenedDriver:
    from eelgrid_agent.devices.nvml.device import NvmlDevice

    device = NvmlDevice(visit=visit)

    def control() -> Any:
        from eelgrid_agent.devices.nvml.control import NvmlControl

        return NvmlControl(device)

    return OpenedDriver(device, control)


def _amd(_argument: str, visit: VisitCallback) -> OpenedDriver:
    from eelgrid_agent.devices.amd.device import AmdControl, AmdDevice
    from eelgrid_agent.devices.amd.session import load_binding

    device = AmdDevice(load_binding(), visit=visit)
    return OpenedDriver(device, lambda: AmdControl(device))


def _open_simulated(argument: str, visit: VisitCallback) -> OpenedDriver:
    from eelgrid_agent.simulation.child_device import SimulatedChildDevice

    device = SimulatedChildDevice(Path(argument), visit)
    return OpenedDriver(device, device.control)


DRIVER_FACTORIES: Mapping[str, DriverFactory] = {"nvml": _nvml, "amd": _amd, "simulated": _open_simulated}
