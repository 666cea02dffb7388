"""AMD devices behind the device port, through AMD's `amdsmi` binding (the extra `amd`).

Calls follow the Python sources of release 7.0.2 and the documentation of ROCm 6.3; where they differ, both work.
"""

from eelgrid_agent.devices.amd.device import AmdControl, AmdDevice
from eelgrid_agent.devices.amd.session import load_binding

__all__ = ["AmdControl", "AmdDevice", "load_binding"]
