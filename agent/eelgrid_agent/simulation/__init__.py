"""Simulated GPUs: one core per device, read directly by a fleet or through the real NVML binding.

`SimulatedNode` is a node's devices behind the device port. `library` puts the
same node under the binding as a C library would stand there, so that the NVML
adapter runs unchanged; it is imported by whoever wants it, since it needs the
binding. Time is an argument: the simulation has no clock and no randomness of
its own.
"""

from eelgrid_agent.simulation.fault_file import FaultFile, FaultFileError
from eelgrid_agent.simulation.faults import Faults
from eelgrid_agent.simulation.fleet_file import FleetFileError, load_fleet
from eelgrid_agent.simulation.gpu import Conduct, Health, SimGpu
from eelgrid_agent.simulation.mig import Refusal
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.operations import Act, Announcement
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, MigSlice, NodeSpec, SpecError

__all__ = [
    "Act", "Announcement", "Conduct", "FaultFile", "FaultFileError", "Faults", "FleetFileError", "GpuLoad", "GpuSpec", "Health", "MigSlice", "NodeSpec",
    "Refusal", "SimGpu", "SimulatedNode", "SpecError", "load_fleet",
]  # fmt: skip
