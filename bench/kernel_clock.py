"""A clock for compiled code, so that the kernel is timed and not Python; a reading takes about 30 ns.

Owns the system call. Must not know what is timed. Kernels that call it are kept for the next process and do not notice
an edit of this file: start with another NUMBA_CACHE_DIR after one.
"""

import ctypes

from numba import config, njit, types

from eelgrid_kernels.arrays import Ints

__all__ = ["THREAD", "WALL", "now_ns"]

WALL, THREAD = 1, 3  # CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID
# By its name and not by its address, so that code which reads a clock can be kept for the next process.
_clock = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.voidptr))
if config.DISABLE_JIT:
    _clock = ctypes.CDLL(None).clock_gettime
    _clock.argtypes, _clock.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_int


@njit
def now_ns(which: int, scratch: Ints) -> int:
    """Nanoseconds of a clock; scratch (2,) takes its seconds and nanoseconds."""
    _clock(which, scratch.ctypes)
    return int(scratch[0] * 1_000_000_000 + scratch[1])
