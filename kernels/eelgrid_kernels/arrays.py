"""Arrays of the kernels: cluster, placement engine and move search, by name, shape, dtype and unit.

    N  nodes                          R  rows for states, as many as nodes
    P  shapes of nodes                F  families: sets of models found in one node
    G  GPU slots of the widest node   K  kinds of task
    M  models, at most 62             Q  groups of the mix in a family, at most
    L  levels of CPU of the mix       B  blocks of 64 rows
    A  arrivals                       J  terms of the cost

Things of one sort are one table with a row each, not an array per field: a row is
a line or two of the processor's cache, and a compiled function is handed a few
tables instead of sixty arrays (handing them over took ten times as long as what
was done with them). Large tables are zeros that nobody has touched: the system
lends their pages when they are first written.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class TermPrices(NamedTuple):
    """What a goal pays for each term of a node's cost."""

    power: float  # watts per watt
    fragmentation_w: float  # watts per fragmented GPU
    stranding_w: float  # watts per stranded GPU
    block_w: float  # watts that a free GPU of a block is worth


class ReplicaRequests(NamedTuple):
    """What replicas ask for, by kind."""

    cpu_milli: Ints  # (R,)
    memory_bytes: Ints  # (R,)
    gpu_count: Ints  # (R,)
    gpu_milli: Ints  # (R,) of each GPU
    allows: Ints  # (R, M) 1 where the model may be used


class MovableUnits(NamedTuple):
    """What runs, and how it may move."""

    kind: Ints  # (U,)
    first: Ints  # (U + 1,) unit u has the replicas first[u] to first[u + 1] - 1
    home: Ints  # (U,) node on which all of its replicas stand
    manner: NDArray[np.uint8]  # (U,) STAYS, OVERLAPS or RELEASES
    restart_w: Floats  # (U,) what moving it costs, in watts-equivalent
    slots: Ints  # (I, W) GPUs of each replica at home, -1 beyond the last


class ChurnLimits(NamedTuple):
    """The churn budget, and how dear it is held."""

    replicas: int  # that may move
    gpu_milli: int  # that may move
    thrift: float  # 0 takes the chain of the largest gain first, 1 that of the largest gain for its share of the budget
    deep: bool  # whether chains for which another unit makes room are weighed from the beginning, or only in the end
    ejections: int  # of such chains, the most that are weighed in one search


class MoveNodes(NamedTuple):
    """The nodes while work comes and goes on them; mix, prices and requests are only read, the rest changes."""

    nodes: Nodes  # what is free changes
    mix: Mix
    prices: TermPrices
    requests: ReplicaRequests
    cost_w: Floats  # (N,) present potential of each node
    board_w: Floats  # (R, N) what the potential gains by one more of the kind, inf where it does not fit
    stamp: Ints  # (N,) when the node was last touched: at the present clock, its column of the board is stale
    clock: Ints  # (2,) the present moment; touches since the trail began
    trail: Ints  # (L,) nodes touched, in order; L is enough for every replica to come and go twice
    trail_w: Floats  # (L,) what they cost before
    slots: Ints  # (2, W) scratch


class MoveSearch(NamedTuple):
    """A search under way; units, limits, at and listed are only read, the rest changes."""

    units: MovableUnits
    limits: ChurnLimits
    at: Ints  # (N + 1,) node n is home to listed[at[n]] to listed[at[n + 1] - 1]
    listed: Ints  # (U,) units by home
    spent: Ints  # (3,) replicas and milli-GPU moved for good; ejections weighed
    moved: NDArray[np.bool_]  # (U,)
    to_node: Ints  # (I,)
    to_slots: Ints  # (I, W)
    queue: Ints  # (Q,) units of the chain under way; Q is the most that one node is home to, at least 1
    worth: Floats  # (N,) the best chain of each node: net watts by the share of the budget that it takes
    chain: Ints  # (N, 2) that chain and how much of it


Shorts = NDArray[np.int32]
Flags = NDArray[np.uint8]

# nodes (N, 9): where each node is. The nodes of a state are a search tree by rank.
STATE = 0  # row of states, -1 for none
NODE_SHAPE = 1
RANK = 2  # order among equals
MEMORY = 3  # free, in any unit that the kinds share
LEFT, RIGHT = 4, 5  # nodes of lower and of higher rank in the same state, -1 for none
MOST = 6  # free memory of the node that has most of those below, itself among them
LEAST = 7  # of the node that has least of those below
SIZE = 8  # nodes below, itself among them
NODE_COLUMNS = 9

# states (R, 13 + 2 G + 2 Q): a free row has root -1.
ROOT = 0  # of the tree of its nodes
BORN = 1  # entry of the log that made it
TOUCHED = 2  # last entry of the log that names it
CHAIN = 3  # next row of the same bucket
SHAPE = 4
CPU = 5  # free, milli
TAGS = 6  # bits of the sorts of GPU task held, for GPU_CLUSTERING
CLOSED = 7  # 1 if its nodes take no new tasks
TOTAL = 8  # free milli-GPU
SERVED = 9  # of it, what the expected tasks can use, weighted
OPTIONS = 10  # slots that differ
MOST_FREE = 11  # milli-GPU of the slot that has most
GAIN = 12  # G of the look-ahead, weighted, by the offers in force
GPU = 13  # (G,) free milli of each slot, 0 where a slot takes no task
# then (G,) the first slot of each that differ, (Q,) GPUs that a group can use, (Q,) milli free on those

# shapes (P, 4 + G): what nodes are when empty.
CAPACITY = 0  # milli-CPU
MODELS = 1  # bits
FAMILY = 2
WIDTH = 3  # GPUs that take tasks
MODEL = 4  # (G,) -1 for a slot that takes no task

# kinds (K, 7): tasks that may come; two that differ in anything are two kinds.
ASKED_CPU, ASKED_MEMORY, ASKED_GPUS, ASKED_MILLI = range(4)  # the last of each GPU
ASKED_MODELS = 4  # bits of those that it may use
TAG = 5  # the sort of GPU task, -1 without GPU
READ = 6  # entry of the log up to which the kind has read
NEVER = -1  # nothing is known yet
# How well a cost is known: as a bound from below by prices of before, by those in force, or itself.
LOOSE, BOUNDED, EXACT = 0, 1, 2
KIND_COLUMNS = 7

# groups (F, 3 + M, Q): classes of the mix that nodes of a family tell apart by their CPU at most.
GROUPS = 0  # how many there are, in [f, 0, 0]
GROUP_COUNT, GROUP_MILLI, GROUP_ALLOWS = 1, 2, 3

# classes (3, C): the mix class by class. CPU in milli; GPUs; milli that must be free on a GPU in use to do without
# waking one: 0 without GPU, more than there is for several.
CLASS_CPU, CLASS_GPUS, CLASS_BESIDE = 0, 1, 2

# captive (4, ...): [0] sets of models, as bits, [1] the sets that classes may use, [2] milli-GPU that those ask for,
# each from column 1 on, with how many there are, or their sum, in column 0; [3] the weight of each class from column 0.

# The whole numbers of a run are facts of shape (9,).
ROWS, SPARE, ENTRIES = 0, 1, 2  # rows of states ever used, rows given back, entries of the log so far
WEIGHT = 3  # of all classes of the mix
SEED = 4  # of RANDOM
HORIZON = 5  # tasks that offers look ahead to
SHIFTS = 6  # tasks that came or left since offers were quoted, -1 before the first quote
SCARCE = 7  # bits of the models that others will need
CAPACITY_MILLI = 8  # of all GPUs

# The rates of shape (3, J + 1) turn terms into a cost.
SCALE, WEIGHTS = 0, 1  # what divides a term, and its weight then; the first two weights are those of a mix
GIVEN = 2  # the weights as given, and last that of stranding in a full fleet


class EngineArrays(NamedTuple):
    """One policy on one fleet, changed in place by what is done on it."""

    nodes: Ints  # (N, 9)
    states: Ints  # (R, 13 + 2 G + 2 Q)
    shapes: Ints  # (P, 4 + G)
    added_w: Floats  # (P, G) of a GPU that goes from idle to busy
    kinds: Ints  # (K, 7)
    groups: Ints  # (F, 3 + M, Q)
    weight: Ints  # (F, L, Q) of a group's classes that a level of CPU serves
    levels: Ints  # (2, ...) sizes of CPU in the mix, ascending; the level that whole vCPUs reach, for a quick start
    classes: Floats  # (3, C) the mix class by class
    wanted: Floats  # (M + 1, C) weight of a class where nodes of a model can serve it; last for nodes without GPU
    offers: Floats  # (C,) whole watts that a class costs elsewhere
    relief: Floats  # (3, M + 1, L) how much a look-ahead may rise at most, by level of CPU
    captive: Ints  # (4, ...) whose tasks can use which models alone
    rates: Floats  # (3, J + 1)
    facts: Ints  # (9,)
    held: Ints  # (N, T) tasks of each sort, GPU_CLUSTERING alone
    bucket: Ints  # (power of two,) first row, -1 for none
    spare: Ints  # (R,) rows given back
    log: Ints  # (power of two,) rows that changed, the last ones, round and round
    cost: Floats  # (K, R) lowest best, infinite where it does not fit
    known: Flags  # (K, R) how well cost is known
    loose: Floats  # (K,) by how much new prices may have lowered the costs of a kind since it was last asked for
    rank: Shorts  # (K, R) of the first node with the memory
    scaled: Floats  # (K, R) what is scaled, of mixes alone
    top: Shorts  # (K, B) best row of each block
    top_cost: Floats  # (K, B)
    gpu: Ints  # (G,) scratch: the GPUs of a node that changes its state
    taken: Ints  # (G,) GPUs of the task placed last, -1 beyond the last
    power_w: Floats  # (1,) of the fleet
    policy: int


class ArrivalOutcomes(NamedTuple):
    """What became of each arrival, with the sums after it."""

    placed: NDArray[np.bool_]  # (A,)
    power_w: Floats  # (A,) of the whole fleet
    arrived_milli: Ints  # (A,)
    allocated_milli: Ints  # (A,)
    node: Ints  # (A,) -1 where refused
