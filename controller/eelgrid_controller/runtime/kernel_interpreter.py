"""Kernels as functions of Python's, until their machine code is there: slower some hundred times, and equal to the bit.

Owns the change to machine code. A call that began interpreted stays so to its end, with every kernel that it calls: with
the types of Python's numbers these would be compiled anew. Calls that begin after the change run machine code. Must not
know where machine code comes from.
"""

import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from eelgrid_kernels.compilation import Kernel, route_calls


def _unbox(value: Any) -> Any:
    """A result as machine code gives it: numbers of Python's."""
    if isinstance(value, np.generic):
        return value.item()
    return tuple(map(_unbox, value)) if type(value) is tuple else value


class KernelInterpreter:
    """Runs kernels interpreted, in whatever thread they are called, from `start` to `stop`."""

    def __init__(self, kernels: Collection[Kernel]) -> None:
        """These `kernels` are interpreted, with whatever they call; others are compiled when they are called."""
        self._kernels = frozenset(kernels)
        self._is_on = False
        # Calls that are under way, without those of kernels by kernels.
        self._calls = 0
        self._lock = threading.Lock()
        self._thread = threading.local()

    def start(self) -> None:
        """Interprets calls from now on."""
        self._is_on = True
        route_calls(self._run)

    def stop(self) -> None:
        """Interprets no further calls; those under way go on as they began."""
        with self._lock:
            self._is_on = False
            self._release_route()

    def replace_by_machine_code(self, load: Callable[[], object]) -> None:
        """Stops once `load` has loaded machine code by calls of its own, or has failed."""
        self._thread.runs_machine_code = True
        try:
            load()
        finally:
            self._thread.runs_machine_code = False
            self.stop()

    def _release_route(self) -> None:
        if not self._is_on and not self._calls:
            route_calls(None)

    def _run(self, kernel: Kernel, args: tuple[Any, ...]) -> Any:
        thread = self._thread
        if getattr(thread, "is_inside", False):
            return kernel.function(*args)
        if kernel not in self._kernels or getattr(thread, "runs_machine_code", False) or not self._enter():
            return kernel.run_entry(args)
        try:
            # Machine code does not warn of a hash that wraps around.
            with np.errstate(all="ignore"):
                return _unbox(kernel.function(*args))
        finally:
            self._leave()

    def _enter(self) -> bool:
        """Counts a call; False where machine code has come since it was routed here."""
        with self._lock:
            self._calls += self._is_on
            self._thread.is_inside = self._is_on
            return self._is_on

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            self._thread.is_inside = False
            self._release_route()
