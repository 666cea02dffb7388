"""What the child opens, by name: one function for each vendor, and one for simulated devices.

Each takes a text argument and the `visit` that the adapter calls before a
listing asks a device: False passes it over. It raises DriverUnavailable where
the vendor's library is not there. Adapters are imported only when asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FACTORIES", "Factory", "Opened", "Visit"]

Visit = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Opened:
    """A driver's devices; `control` makes the other port when it is first needed: most agents only read."""

    device: Any
    control: Callable[[], Any]


Factory = Callable[[str, Visit], Opened]


def _nvml(_argument: str, visit: Visit) -> Opened:
    from eelgrid_agent.nvml import NvmlDevice

    device = NvmlDevice(visit=visit)

    def control() -> Any:
        from eelgrid_agent.nvml.control import NvmlControl

        return NvmlControl(device)

    return Opened(device, control)


def _amd(_argument: str, visit: Visit) -> Opened:
    from eelgrid_agent.amd import AmdControl, AmdDevice, binding

    device = AmdDevice(binding(), visit=visit)
    return Opened(device, lambda: AmdControl(device))


def _simulated(argument: str, visit: Visit) -> Opened:
    from eelgrid_agent.worker.simulated import SceneDevice

    device = SceneDevice(Path(argument), visit)
    return Opened(device, device.control)


FACTORIES: Mapping[str, Factory] = {"nvml": _nvml, "amd": _amd, "simulated": _simulated}
