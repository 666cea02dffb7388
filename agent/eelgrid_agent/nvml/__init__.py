"""The devices of this machine, through NVML: everything that reads, one collector a file.

`NvmlDevice` is the device port. `session` holds the one session and its
handles, `ways` how a reading is had when drivers and parts differ; each other
file knows one corner of NVML and nothing of the others.
"""

from eelgrid_agent.nvml.device import NvmlDevice

__all__ = ["NvmlDevice"]
