"""Simulated GPUs: one core per device, read directly or through the real NVML binding.

Time is an argument: the simulation has no clock and no randomness. Imported only by --simulate and tests.
"""

from eelgrid_agent.simulation.gpu import LoadBehavior, SimGpu, SimHealth
from eelgrid_agent.simulation.mig import DriverRefusal
from eelgrid_agent.simulation.node import FaultInjector, SimulatedNode
from eelgrid_agent.simulation.node_files import FaultFile, FaultFileError
from eelgrid_agent.simulation.operations import DriverAnnouncement, OperationKind
from eelgrid_agent.simulation.spec import FleetFileError, GpuLoad, GpuSpec, MigSlice, NodeSpec, SpecError, load_fleet

__all__ = [
    "DriverAnnouncement",
    "DriverRefusal",
    "FaultFile",
    "FaultFileError",
    "FaultInjector",
    "FleetFileError",
    "GpuLoad",
    "GpuSpec",
    "LoadBehavior",
    "MigSlice",
    "NodeSpec",
    "OperationKind",
    "SimGpu",
    "SimHealth",
    "SimulatedNode",
    "SpecError",
    "load_fleet",
]
