"""AMD devices behind the device port, through AMD's `amdsmi` binding (the extra `amd`).

`AmdDevice` reads, `AmdControl` changes, `binding()` imports the binding when it
is asked for; `simulated` has a stand-in for the binding over simulated devices.
Every call of the binding was taken from its Python sources of release 7.0.2
and checked against its documentation of ROCm 6.3; where the two differ, both
are understood, and the place says so.
"""

from eelgrid_agent.amd.control import AmdControl
from eelgrid_agent.amd.device import AmdDevice
from eelgrid_agent.amd.session import binding

__all__ = ["AmdControl", "AmdDevice", "binding"]
