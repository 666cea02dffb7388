"""Handles of the simulated library, and how its functions write to the caller.

A handle is a number in the place of a pointer. The table says what it stands
for; the state of the device says whether it is still good. Handles are issued
once for each thing they stand for, so the table does not grow with calls.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import Health, SimGpu
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_protos.messages import ComputeInstance, GpuInstance

__all__ = ["Handles", "Symbol", "Target", "behind", "fill", "point", "put"]

Symbol = Callable[..., Any]

# Looks like an address and is none: the first page is never mapped, nor is what lies this high.
_FIRST = 0x7F00_0000_0000_0000
_STEP = 0x100


@dataclass(frozen=True, slots=True)
class Target:
    """What a handle stands for: a device in one of its lives, or a part of it."""

    gpu: SimGpu
    generation: int
    instance: GpuInstance | None = None
    compute: ComputeInstance | None = None
    mig_device: bool = False

    def trouble(self, node: SimulatedNode) -> int:
        """The code that every call with this handle returns, or 0."""
        gpu = self.gpu
        if gpu.health is Health.LOST or gpu.generation != self.generation:
            return int(pynvml.NVML_ERROR_GPU_IS_LOST)
        if gpu.health is Health.HUNG:
            node.stall()
            return int(pynvml.NVML_ERROR_TIMEOUT)
        return 0


class Handles:
    """The table of one library, and its count of sessions."""

    def __init__(self, node: SimulatedNode) -> None:
        self.sessions = 0
        self._node = node
        self._targets: dict[int, Target] = {}
        self._addresses: dict[tuple[Any, ...], int] = {}

    def session(self) -> int:
        """The code that every call returns that needs no device, or 0."""
        if self.sessions == 0:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        return 0 if self._node.driver_loaded else int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def issue_device(self, gpu: SimGpu, ref: Any) -> int:
        """Gives out a device's handle, if the device answers."""
        target = Target(gpu, gpu.generation)
        return target.trouble(self._node) or self.issue(target, behind(ref))

    def issue(self, target: Target, pointer: Any) -> int:
        """Writes the handle of a target into a pointer."""
        key = (
            target.gpu.identity.index,
            target.generation,
            target.instance and target.instance.id,
            target.compute and target.compute.id,
            target.mig_device,
        )
        address = self._addresses.get(key)
        if address is None:
            address = _FIRST + _STEP * len(self._addresses)
            self._addresses[key] = address
            self._targets[address] = target
        point(pointer, address)
        return 0

    def on(self, function: Callable[..., int]) -> Symbol:
        """A C symbol out of a function of a target: the handle is looked up and the device asked whether it answers."""
        targets, node, session = self._targets, self._node, self.session

        @wraps(function)
        def symbol(handle: Any, *arguments: Any) -> int:
            if code := session():
                return code
            target = targets.get(ctypes.cast(handle, ctypes.c_void_p).value or 0)
            if target is None:
                return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return target.trouble(node) or function(target, *arguments)

        return symbol

    def on_device(self, function: Callable[..., int]) -> Symbol:
        """A C symbol out of a function of a device: instance handles are refused."""

        @wraps(function)
        def whole(target: Target, *arguments: Any) -> int:
            if target.instance is not None:
                return int(pynvml.NVML_ERROR_NOT_SUPPORTED if target.mig_device else pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return function(target.gpu, *arguments)

        return self.on(whole)


def behind(ref: Any) -> Any:
    """What the caller passed by reference, or the array that it passed as it is."""
    return getattr(ref, "_obj", ref)


def put(ref: Any, value: int | None) -> int:
    """Writes a number where the caller wants it; None is what the device does not support."""
    if value is None:
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    behind(ref).value = value
    return 0


def fill(buffer: Any, length: Any, text: str) -> int:
    """Writes text into the caller's buffer."""
    raw = text.encode()
    if len(raw) >= length.value:
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    buffer.value = raw
    return 0


def point(pointer: Any, address: int) -> None:
    """Writes a handle into a pointer without following it."""
    ctypes.c_void_p.from_buffer(pointer).value = address
