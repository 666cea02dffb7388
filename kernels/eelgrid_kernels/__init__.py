"""The arithmetic: arrays in, arrays out; numpy and numba only; no objects, no time, no logs.

Owns the inner loops of decisions. Must not know what a workload is, where an
array came from or what becomes of a result.

Symbols of every kernel:

    N  nodes                    G  GPU slots of the widest node, at most 64
    C  classes of the mix       M  GPU models, coded 0..M-1
    K  candidates kept          P  constraints, in the order of CONSTRAINTS
    R  replicas of a workload   L  levels of the network: zone, switch, rack

Counts and amounts are int64, so that sums are exact and independent of order;
watts are float64 in watts. An array named in a docstring as changed in place
belongs to the caller; every other array is only read. Iterations are bounded
by the shapes. Every kernel is compiled by eelgrid_kernels.compilation, whose cache
goes by all sources together.
"""

from eelgrid_kernels.arrays import Mix, Nodes, Task
from eelgrid_kernels.baselines import find_policy, policy_names
from eelgrid_kernels.candidates import CandidateIndex, NodeCandidate
from eelgrid_kernels.cost_terms import CPU_PACKAGE_FULL_W, CPU_PACKAGE_IDLE_W, TERMS
from eelgrid_kernels.engine_setup import sort_bit
from eelgrid_kernels.gang import choose_linked_gpus, divide_replicas, exchange_gpus
from eelgrid_kernels.node_cost import (
    CANDIDATES_MOST,
    CLASSES_MOST,
    CONSTRAINTS,
    FITS,
    GPU_ABSENT,
    GPU_PARTITIONED,
    GPU_PLACEABLE,
    GPU_SLOTS_MOST,
    GPU_WHOLE_MILLI,
    cluster_power,
    count_verdicts,
    node_fragmentation,
    node_power,
    refresh_fragmentation,
    replica_room,
)
from eelgrid_kernels.warmup import warm_kernels

__all__ = [
    "CANDIDATES_MOST",
    "CLASSES_MOST",
    "CONSTRAINTS",
    "CPU_PACKAGE_FULL_W",
    "CPU_PACKAGE_IDLE_W",
    "FITS",
    "GPU_ABSENT",
    "GPU_PARTITIONED",
    "GPU_PLACEABLE",
    "GPU_SLOTS_MOST",
    "GPU_WHOLE_MILLI",
    "TERMS",
    "CandidateIndex",
    "Mix",
    "NodeCandidate",
    "Nodes",
    "Task",
    "choose_linked_gpus",
    "cluster_power",
    "count_verdicts",
    "divide_replicas",
    "exchange_gpus",
    "find_policy",
    "node_fragmentation",
    "node_power",
    "policy_names",
    "refresh_fragmentation",
    "replica_room",
    "sort_bit",
    "warm_kernels",
]
