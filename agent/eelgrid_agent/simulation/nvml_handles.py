"""Handles of the simulated NVML library, and how its functions write to the caller."""

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu, SimHealth
from eelgrid_agent.simulation.mig import DriverRefusal, DriverRefused, SimCompute, SimInstance
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_protos.values import dataclass

CSymbol = Callable[..., Any]

# Looks like an address and is none: the first page is never mapped, nor is what lies this high.
_FIRST = 0x7F00_0000_0000_0000
_STEP = 0x100
# Dead handles are kept up to here; a full node has some 16 devices with 7 instances.
_TARGETS_MOST = 4096


@dataclass(frozen=True, slots=True)
class HandleTarget:
    """What a handle refers to: a device in one of its lives, or a part of it."""

    gpu: SimGpu
    generation: int
    instance: SimInstance | None = None
    compute: SimCompute | None = None
    mig_device: bool = False

    @property
    def is_destroyed(self) -> bool:
        """Whether the instance was destroyed; another one in its place has another handle."""
        return not (self.instance is None or self.instance.alive) or not (self.compute is None or self.compute.alive)

    def error_code(self, node: SimulatedNode) -> int:
        """The code that every call with this handle returns, or 0."""
        gpu = self.gpu
        if gpu.health is SimHealth.LOST or gpu.generation != self.generation:
            return int(pynvml.NVML_ERROR_GPU_IS_LOST)
        if gpu.health is SimHealth.HUNG:
            node.stall()
            return int(pynvml.NVML_ERROR_TIMEOUT)
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT) if self.is_destroyed else 0


class HandleTable:
    """The table of one library, and its count of sessions.

    `held` are the devices that this session has used: its program is a client
    of them until the session ends.
    """

    def __init__(self, node: SimulatedNode) -> None:
        self.sessions = 0
        self.held: set[str] = set()
        self._node = node
        self._issued = 0
        self._targets: dict[int, HandleTarget] = {}
        self._addresses: dict[tuple[Any, ...], int] = {}

    def session_code(self) -> int:
        """The code that every call returns that needs no device, or 0."""
        if self.sessions == 0:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        return 0 if self._node.driver_loaded else int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def end_session(self) -> int:
        """Closes one session; with the last one the program is no longer a client."""
        if self.sessions == 0:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        self.sessions -= 1
        if self.sessions == 0:
            self.held.clear()
        return 0

    def get_target(self, handle: Any) -> HandleTarget | None:
        """Returns what a handle refers to."""
        return self._targets.get(get_address(handle))

    def issue_device(self, gpu: SimGpu, ref: Any) -> int:
        """Gives out a device's handle, if the device answers."""
        target = HandleTarget(gpu, gpu.generation)
        return target.error_code(self._node) or self.issue_handle(target, dereference_argument(ref))

    def issue_handle(self, target: HandleTarget, pointer: Any) -> int:
        """Writes the handle of a target into a pointer."""
        key = (target.gpu.uuid, target.generation, target.instance, target.compute, target.mig_device)
        address = self._addresses.get(key)
        if address is None:
            self._bury()
            address = _FIRST + _STEP * self._issued
            self._issued += 1
            self._addresses[key] = address
            self._targets[address] = target
        write_handle(pointer, address)
        return 0

    def _bury(self) -> None:
        """Forgets the handles of destroyed instances when there are many; they are refused as unknown ones are."""
        if len(self._addresses) < _TARGETS_MOST:
            return
        for key, address in list(self._addresses.items()):
            if self._targets[address].is_destroyed:
                del self._addresses[key], self._targets[address]

    def wrap_target(self, function: Callable[..., int], *, holds: bool = True) -> CSymbol:
        """A C symbol out of a function of a target: the handle is looked up and the device asked whether it answers.

        With `holds`, who called it is a client of the device from then on.
        """
        targets, node, session = self.get_target, self._node, self.session_code

        @wraps(function)
        def symbol(handle: Any, *arguments: Any) -> int:
            if code := session():
                return code
            target = targets(handle)
            if target is None:
                return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            if node.operations.pause is not None:
                node.operations.pause(symbol.__name__)
            if holds:
                self.held.add(target.gpu.identity.uuid)
            return target.error_code(node) or function(target, *arguments)

        return symbol

    def wrap_device(self, function: Callable[..., int], *, holds: bool = True) -> CSymbol:
        """A C symbol out of a function of a device: instance handles are refused."""

        @wraps(function)
        def whole(target: HandleTarget, *arguments: Any) -> int:
            if target.instance is not None:
                return int(pynvml.NVML_ERROR_NOT_SUPPORTED if target.mig_device else pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return function(target.gpu, *arguments)

        return self.wrap_target(whole, holds=holds)

    def wrap_number(self, ask: Callable[[SimGpu], int | None]) -> CSymbol:
        """A C symbol that writes one number of a device; None is what the device does not support."""
        return self.wrap_device(lambda gpu, ref: write_number(ref, ask(gpu)))


_CODES = {
    DriverRefusal.NOT_SUPPORTED: int(pynvml.NVML_ERROR_NOT_SUPPORTED),
    DriverRefusal.NO_PERMISSION: int(pynvml.NVML_ERROR_NO_PERMISSION),
    DriverRefusal.IN_USE: int(pynvml.NVML_ERROR_IN_USE),
    DriverRefusal.NO_ROOM: int(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES),
    DriverRefusal.NOT_FOUND: int(pynvml.NVML_ERROR_NOT_FOUND),
    DriverRefusal.INVALID: int(pynvml.NVML_ERROR_INVALID_ARGUMENT),
}


def translate_refusals(function: Callable[..., int]) -> Callable[..., int]:
    """A function that returns NVML's code where the device refuses."""

    @wraps(function)
    def coded(*arguments: Any) -> int:
        try:
            return function(*arguments)
        except DriverRefused as refused:
            return _CODES[refused.why]

    return coded


def get_address(handle: Any) -> int:
    """The number in the place of a pointer."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def dereference_argument(ref: Any) -> Any:
    """Returns what the caller passed by reference, or an array as it was passed."""
    return getattr(ref, "_obj", ref)


def write_number(ref: Any, value: int | None) -> int:
    """Writes a number where the caller wants it; None is what the device does not support."""
    if value is None:
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    dereference_argument(ref).value = value
    return 0


def write_text(buffer: Any, length: Any, text: str) -> int:
    """Writes text into the caller's buffer."""
    raw = text.encode()
    if len(raw) >= length.value:
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    buffer.value = raw
    return 0


def write_handle(pointer: Any, address: int) -> None:
    """Writes a handle into a pointer without following it."""
    ctypes.c_void_p.from_buffer(pointer).value = address
