"""Simulated GPUs: one core per device, read directly or through the real NVML binding.

Time is an argument: the simulation has no clock and no randomness. Imported only by --simulate and tests.
"""
