"""The guard: what this node lets a plan do to it, as a state machine without clock, disk or device.

`Guard` takes plans and what befalls the devices, and orders what is to be done;
the shell in `eelgrid_agent.power` carries the orders out and reports back.
"""

from eelgrid_agent.guard.plan import Guard, Verdict
from eelgrid_agent.guard.rules import GuardLimits, LocalPolicy

__all__ = ["Guard", "GuardLimits", "LocalPolicy", "Verdict"]
