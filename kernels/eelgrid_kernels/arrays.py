"""The arrays that kernels take and fill, by name, shape, dtype and unit.

Owns types alone: numba's cache goes by their fields, so they may live apart
from the functions. Constants that kernels use stay beside the kernels.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Ints", "Mix", "Nodes", "Task"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Nodes(NamedTuple):
    """Capacity and what is free; a GPU that is absent has model -1 and nothing free."""

    available: NDArray[np.bool_]  # (N,) takes new tasks
    cpu_capacity: Ints  # (N,) milli-CPU
    cpu_free: Ints  # (N,) milli-CPU, >= 0
    memory_free: Ints  # (N,) bytes, >= 0
    gpu_state: NDArray[np.uint8]  # (N, G) GPU_ABSENT, GPU_PLACEABLE or GPU_PARTITIONED
    gpu_model: Ints  # (N, G) code 0..M-1
    gpu_free: Ints  # (N, G) milli-GPU 0..1000
    gpu_idle_w: Floats  # (N, G)
    gpu_busy_w: Floats  # (N, G)
    rank: Ints  # (N,) order among equals


class Mix(NamedTuple):
    """The tasks that are expected: class t has the share weight[t] / total."""

    cpu_milli: Ints  # (C,)
    gpu_count: Ints  # (C,) 0 asks for no GPU
    gpu_milli: Ints  # (C,) of each GPU, 1000 where gpu_count > 1
    allows: Ints  # (M, C) 1 if the class may use the model, else 0; M >= 1
    weight: Ints  # (C,)
    total: int  # sum of weight, at least 1


class Task(NamedTuple):
    """What one replica asks for."""

    cpu_milli: int
    memory_bytes: int
    gpu_count: int
    gpu_milli: int
