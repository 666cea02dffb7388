"""NVIDIA devices behind the device port, through NVML. `NvmlDevice` is the reader."""

from eelgrid_agent.devices.nvml.device import NvmlDevice

__all__ = ["NvmlDevice"]
