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
