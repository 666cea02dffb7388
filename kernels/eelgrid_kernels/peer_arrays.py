"""The arrays of one policy's run over a course of arrivals, by name, shape, dtype and unit.

Owns types alone, as eelgrid_kernels.arrays does. Must not know what a policy does with them.

    N  nodes, and rows for states     S  specs: CPU, memory, GPUs, models
    K  kinds: specs but for memory    C  classes of the typical mix
    G  GPUs of the widest node        A  arrivals      H  hash buckets      T  tags, at most 62
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.arrays import Floats, Ints, Mix

__all__ = ["Capacity", "Course", "Kinds", "Members", "Run", "Scores", "States"]


class Capacity(NamedTuple):
    """What each node is, and its place in the order of ties."""

    cpu_milli: Ints  # (N,)
    gpu_count: Ints  # (N,)
    model: Ints  # (N,) -1 for none
    idle_w: Floats  # (N,) of one GPU
    busy_w: Floats  # (N,)
    rank: Ints  # (N,)
    shape: Ints  # (N,) equal where all of the above but rank is


class Kinds(NamedTuple):
    """The tasks that differ in a score; memory filters only."""

    cpu_milli: Ints  # (K,)
    gpu_count: Ints  # (K,)
    gpu_milli: Ints  # (K,)
    allows: Ints  # (K, M)
    tag: Ints  # (K,) the kind of GPU task that it is to GPU_CLUSTERING, -1 without GPU
    of_spec: Ints  # (S,) the kind of each spec
    memory_mib: Ints  # (S,)


class Members(NamedTuple):
    """Where each node is, changed in place."""

    state: Ints  # (N,)
    after: Ints  # (N,) the next node of the same state, -1 at the end
    memory_free: Ints  # (N,) MiB
    held: Ints  # (N, T) tasks of each tag, GPU_CLUSTERING alone


class States(NamedTuple):
    """States that nodes are in, changed in place; a free row has head -1."""

    head: Ints  # (N,) its node of lowest rank
    version: Ints  # (N,) how often the row was taken
    cpu_free: Ints  # (N,)
    gpu_free: Ints  # (N, G)
    gpu_total: Ints  # (N,) sum of gpu_free
    tags: Ints  # (N,) bits of the tags held, GPU_CLUSTERING alone
    closed: Ints  # (N,) 1 if its nodes take no new tasks
    usable: Ints  # (N, C) GPUs that the class can use
    waste: Ints  # (N, C) free milli-GPU that it cannot
    fragments: Ints  # (N,) F times mix.total
    chain: Ints  # (N,) next row of the same bucket
    bucket: Ints  # (H,) first row, -1 for none
    spare: Ints  # (N,) rows given back
    counts: Ints  # (2,) rows ever used, rows in spare


class Scores(NamedTuple):
    """What was found for a kind of task in a state, good while seen equals the state's version."""

    seen: Ints  # (K, N)
    scaled: Floats  # (K, N)
    plain: Floats  # (K, N)
    slot: Ints  # (K, N) GPU, IN_ORDER or NOWHERE


class Run(NamedTuple):
    """One policy on one fleet, changed in place by decide."""

    capacity: Capacity
    kinds: Kinds
    mix: Mix
    members: Members
    states: States
    scores: Scores
    fitting: Ints  # (2, N) scratch: states that fit and their node of lowest rank with the memory
    gpu: Ints  # (G,) scratch
    kept: Ints  # (G,) scratch
    taken: Ints  # (G,) GPUs of the task placed last, -1 beyond the last
    power_w: Floats  # (1,) of the fleet
    policy: int
    tagged: bool  # whether what a node holds matters
    weights: Floats  # (3,)
    blend: Floats  # (2,) weights of scaled and plain
    seed: int  # of RANDOM


class Course(NamedTuple):
    """What became of each arrival, with the sums after it."""

    placed: NDArray[np.bool_]  # (A,)
    power_w: Floats  # (A,) of the whole fleet
    arrived_milli: Ints  # (A,)
    allocated_milli: Ints  # (A,)
    node: Ints  # (A,) -1 where refused
