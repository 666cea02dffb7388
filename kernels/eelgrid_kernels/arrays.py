"""Arrays of the kernels: cluster, placement engine and move search, by name, shape, dtype and unit.

    N  nodes                          R  rows for states, as many as nodes
    P  shapes of nodes                F  families: sets of models found in one node
    G  GPU slots of the widest node   K  kinds of task
    M  models, at most 62             Q  groups of the mix in a family, at most
    L  levels of CPU of the mix       B  blocks of 64 rows
    A  arrivals                       J  terms of the cost
    C  classes of the mix             D  sets of models that classes may use, and their unions

Things of one sort are one array of records (a structured dtype), not an array per
field: a record is a line or two of the processor's cache. What depends on the
fleet's width has an array of its own, since a record's size is known when a kernel
is compiled. Large arrays are zeros that nobody has touched: the system lends their
pages when they are first written. Kernels hand tuples of many arrays to each other
as tables (eelgrid_kernels.array_tables).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.array_tables import ArrayTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Shorts = NDArray[np.int32]
Flags = NDArray[np.uint8]
Records = NDArray[np.void]


def record_dtype(*fields: tuple[str, Any] | tuple[str, Any, tuple[int]]) -> np.dtype[np.void]:
    """A record that reads the same compiled and interpreted: `records[i].field`; `records["field"]` is a column."""
    hidden = {name for name, *_ in fields} & set(dir(np.record))
    if hidden:
        raise ValueError(f"fields hidden by attributes of numpy's records: {sorted(hidden)}")
    return np.dtype((np.record, np.dtype(list(fields), align=True)))


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


class _TermPrices(NamedTuple):
    power: float  # watts per watt
    fragmentation_w: float  # watts per fragmented GPU
    stranding_w: float  # watts per stranded GPU
    block_w: float  # watts that a free GPU of a block is worth


class TermPrices(_TermPrices, ArrayTable):
    """What a goal pays for each term of a node's cost."""


class _ChurnLimits(NamedTuple):
    replicas: int  # that may move
    gpu_milli: int  # that may move
    thrift: float  # 0 takes the chain of the largest gain first, 1 that of the largest gain for its share of the budget
    ejections: int  # of such chains, the most that are weighed in one search
    tries: int  # moves that a search of every sequence may try


class ChurnLimits(_ChurnLimits, ArrayTable):
    """The churn budget, and how dear it is held."""


# A node on which moves are tried. Nodes are in the order of rank: of equals the first is taken.
MOVE_NODE = record_dtype(
    ("cpu_capacity", np.int64),  # milli
    ("cpu_free", np.int64),
    ("memory_free", np.int64),  # bytes
    ("family", np.int64),  # row of the groups and of the feed: what models its GPUs are of
    ("available", np.int64),  # 1 if it takes new tasks
    ("rise_mw", np.int64),  # the most that an idle GPU of it draws more once it is allocated
    ("stamp", np.int64),  # when it was last touched: at the present clock, its column of the board is stale
    ("cost_w", np.float64),  # present potential
)

# A GPU slot of such a node.
MOVE_GPU = record_dtype(
    ("state", np.int64),  # GPU_ABSENT, GPU_PLACEABLE or GPU_PARTITIONED
    ("model", np.int64),
    ("free", np.int64),  # milli
    ("idle_w", np.float64),
    ("busy_w", np.float64),
    ("rise_mw", np.int64),  # that power budgets count more once it is allocated
    ("fall_mw", np.int64),  # that they count less once those have left who hold it at first
)

# What a replica of a kind asks for.
REQUEST = record_dtype(
    ("cpu_milli", np.int64),
    ("memory_bytes", np.int64),
    ("gpu_count", np.int64),
    ("gpu_milli", np.int64),  # of each GPU
    ("models", np.int64),  # that may be used, as bits
)

# What moves at once: replicas of one kind on one node.
MOVE_UNIT = record_dtype(
    ("kind", np.int64),
    ("first", np.int64),  # it has the replicas first to end - 1
    ("end", np.int64),
    ("home", np.int64),  # node on which all of them are
    ("manner", np.int64),  # STAYS, OVERLAPS or RELEASES
    ("moved", np.int64),  # 1 once it has moved for good
    ("restart_w", np.float64),  # what moving it costs, in watts-equivalent
)

# The best chain of a node.
CHAIN = record_dtype(
    ("first", np.int64),  # the node is home to the units listed[first] to listed[end - 1]
    ("end", np.int64),
    ("chain", np.int64),
    ("units", np.int64),  # that it moves
    ("worth", np.float64),  # net watts by the share of the budget that it takes, -inf where nothing gains
)

# A node that was touched, and what it cost before.
TRAIL = record_dtype(("node", np.int64), ("cost_w", np.float64))

# The time of a search.
CLOCK = record_dtype(
    ("now", np.int64),
    ("touches", np.int64),  # since the trail began
    ("marked", np.int64),  # nodes touched at the present time
)

# How far a search came.
PROGRESS = record_dtype(
    ("replicas", np.int64),  # moved for good
    ("gpu_milli", np.int64),
    ("ejections", np.int64),  # weighed
    ("steps", np.int64),  # of the log
    ("queued", np.int64),  # units in the queue
    ("tried", np.int64),  # moves of the search of every sequence
    ("gain_w", np.float64),  # the most that it found
)

# A replica that a search of every sequence has placed, or is about to.
FRAME = record_dtype(
    ("unit", np.int64),
    ("replica", np.int64),
    ("node", np.int64),
    ("gpus", np.int64),  # as bits, -1 before the first choice on the node
    ("touches", np.int64),  # of the trail, before the unit moved
    ("replicas", np.int64),  # moved before the unit
    ("gpu_milli", np.int64),
    ("gain_w", np.float64),  # before the unit
)


# Terms of the cost, in the order of TERMS; stranding has a second weight, that in a full fleet.
POWER, FRAGMENTATION, STRANDING, LOOKAHEAD, SCARCITY, UNUSED, STRANDING_WHEN_FULL = range(7)
WEIGHTS = STRANDING_WHEN_FULL + 1
# How well a cost is known: as a bound from below by prices of before, by those in force, or itself.
LOOSE, BOUNDED, EXACT = 0, 1, 2
NEVER = -1  # Kind.read where nothing is known yet
# Places for several GPUs where the mix fills all nodes.
ENOUGH_BLOCKS, SCARCE_BLOCKS, NO_SPARE_BLOCKS = 0, 1, 2


# Where a node is. The nodes of a state are a search tree by rank.
NODE = record_dtype(
    ("state", np.int64),  # row of states, -1 for none
    ("shape_row", np.int64),
    ("rank", np.int64),  # order among equals
    ("memory", np.int64),  # free, in any unit that the kinds share
    ("left", np.int64),  # node of lower ranks in the same state, -1 for none
    ("right", np.int64),  # of higher ranks
    ("most_memory", np.int64),  # free memory of the node that has most of those below, itself among them
    ("least_memory", np.int64),  # of the node that has least of those below
    ("tree_size", np.int64),  # nodes below, itself among them
)

# What nodes of equal shape have free; a row that is given back has the root -1.
STATE = record_dtype(
    ("root", np.int64),  # of the tree of its nodes
    ("born", np.int64),  # entry of the log that made it
    ("touched", np.int64),  # last entry of the log that names it
    ("next_row", np.int64),  # of the same bucket
    ("shape_row", np.int64),
    ("cpu_free", np.int64),  # milli
    ("tags", np.int64),  # bits of the sorts of GPU task held, for GPU_CLUSTERING
    ("closed", np.int64),  # 1 if its nodes take no new tasks
    ("total_free", np.int64),  # milli-GPU
    ("served", np.int64),  # of it, what the expected tasks can use, weighted
    ("options", np.int64),  # slots that differ
    ("most_free", np.int64),  # milli-GPU of the slot that has most
    ("gain", np.int64),  # G of the look-ahead, weighted, by the offers in force
    ("stranded", np.int64),  # GPU that the free CPU does not feed, in the unit of the term
    ("idle", np.int64),  # GPUs
    ("unused_mw", np.int64),  # watts of what is free on GPUs in use, in thousandths
)

# What a group of the mix can use in a state.
USABLE = record_dtype(("gpus", np.int64), ("milli", np.int64))

# What nodes are when empty.
SHAPE = record_dtype(
    ("cpu_capacity", np.int64),  # milli
    ("models", np.int64),  # bits
    ("family", np.int64),
    ("width", np.int64),  # GPUs that take tasks
)

# Tasks that may come; two that differ in anything are two kinds.
KIND = record_dtype(
    ("cpu_milli", np.int64),
    ("memory", np.int64),
    ("gpu_count", np.int64),
    ("gpu_milli", np.int64),  # of each GPU
    ("models", np.int64),  # bits of those that it may use
    ("tag", np.int64),  # the sort of GPU task, -1 without GPU
    ("read", np.int64),  # entry of the log up to which the kind has read
    ("loose", np.float64),  # by how much new prices may have lowered its costs since it was last asked for
)

# How much a look-ahead may rise at most, summed over the classes that a level of CPU serves.
RELIEF = record_dtype(
    ("package_w", np.float64),  # by each package that wakes
    ("sharing", np.float64),  # weight of the classes that ask for a share of a GPU
    ("sharing_w", np.float64),  # and what they cost elsewhere
)

# Whose tasks can use which models alone.
CAPTIVE = record_dtype(
    ("union", np.int64),  # sets of models, as bits: those of `models` and what they are together
    ("models", np.int64),  # the sets that classes may use
    ("milli", np.int64),  # milli-GPU that those classes ask for
)

# The single numbers of a run.
SCALARS = record_dtype(
    ("rows", np.int64),  # of states ever used
    ("spare_rows", np.int64),  # given back
    ("log_entries", np.int64),  # so far
    ("mix_weight", np.int64),  # of all classes of the mix
    ("seed", np.int64),  # of RANDOM
    ("horizon", np.int64),  # tasks that offers look ahead to
    ("shifts", np.int64),  # tasks that came or left since offers were quoted, -1 before the first quote
    ("came_milli", np.int64),  # milli-GPU of tasks that came lately; what is older counts less
    ("left_milli", np.int64),  # of those that left
    ("scarce_models", np.int64),  # bits of those that others will need
    ("capacity_milli", np.int64),  # of all GPUs
    ("cpu_capacity", np.int64),  # milli, of all nodes
    ("block_scarcity", np.int64),  # of places for several GPUs: one of those above
    ("cpu_scarce", np.int64),  # 1 where the mix asks for much more CPU than the nodes have
    ("priced_blocks", np.int64),  # 1 where places for several GPUs count
    ("part_permille", np.int64),  # what a place that is almost there counts of a whole one
    ("captive_unions", np.int64),  # how many of `captive` are such
    ("captive_sets", np.int64),
    ("captive_milli", np.int64),  # the sum of what they ask for
    ("stale_states", np.int64),  # 1 where the states are of the mix before
    ("policy", np.int64),
    ("power_w", np.float64),  # of the fleet
    ("scale", np.float64, (WEIGHTS,)),  # what divides a term
    ("weights", np.float64, (WEIGHTS,)),  # of a term now; the first two are those of a mix
    ("given_weights", np.float64, (WEIGHTS,)),  # as the policy has them
)


class _GroupArrays(NamedTuple):
    group_count: Ints  # (F,) how many there are
    gpu_count: Ints  # (F, Q)
    gpu_milli: Ints  # (F, Q)
    allows: Ints  # (F, M, Q) 1 where the model may be used
    weight: Ints  # (F, L, Q) of a group's classes that a level of CPU serves
    cpu_sizes: Ints  # sizes of CPU in the mix, ascending, and beyond the last the largest number
    quick_level: Ints  # the level that whole vCPUs reach, for a quick start


class GroupArrays(_GroupArrays, ArrayTable):
    """Classes of the mix that nodes of a family tell apart by their CPU at most."""


class _FeedArrays(NamedTuple):
    gpu: Ints  # (F, C) share of the demand for GPU, FEED_SHARE in all
    cpu: Ints  # (F, C) of it what a milli-CPU feeds, in thousandths of a milli-GPU
    block_gpus: Ints  # (F, C) GPUs of each class that asks for several and may use all models of the family
    block_cpu: Ints  # (F, C) milli
    block_class: Ints  # (F, C) its number in the mix
    block_worth: Ints  # (F, C) of a place for one of them: its GPUs by its share of the demand
    block_price: Ints  # (F, C) what it counts in stranding now: its worth, in thousandths


class FeedArrays(_FeedArrays, ArrayTable):
    """The GPU classes of the mix as nodes of a family feed them; those that need most CPU for a GPU first, 0 beyond the last."""


class _ClassArrays(NamedTuple):
    cpu_milli: Floats  # (C,)
    gpus: Floats  # (C,)
    beside_milli: Floats  # (C,) that must be free on a GPU in use to wake none: 0 without GPU, too many for several
    wanted: Floats  # (M + 1, C) weight where nodes of a model can serve it; last for nodes without GPU
    offers: Floats  # (C,) watts that a class costs elsewhere


class ClassArrays(_ClassArrays, ArrayTable):
    """The mix class by class; whole numbers in floats, so that sums are exact in any order."""


class BudgetArrays(NamedTuple):
    """Power budgets above nodes: what each leaves, and what GPUs below draw, in milliwatts."""

    left_mw: Ints  # (B,) negative where a budget is exceeded
    above: Ints  # (N, L) budgets above each node, -1 for none
    rise_mw: Ints  # (N, G) that an idle GPU draws more once it is allocated
    fall_mw: Ints  # (N, G) that a GPU draws less once those have left who hold it at first


class _MoveNodes(NamedTuple):
    nodes: Records  # (N,) MOVE_NODE
    gpus: Records  # (N, G) MOVE_GPU
    requests: Records  # (R,) REQUEST
    prices: TermPrices
    groups: GroupArrays
    feed: FeedArrays
    mix_weight: int  # of all classes of the mix
    fragmentation_scale: float  # what F is divided by
    board_w: Floats  # (R, N) what the potential gains by one more of the kind, inf where it does not fit
    least_w: Floats  # (R, B) the least of each block of the board
    awake_w: Floats  # (R, N) as the board, where no idle GPU may be allocated; (R, 0) without power budgets
    budgets: Ints  # (N, L) power budgets above each node, -1 for none
    left_mw: Ints  # (P,) what each power budget leaves
    clock: Records  # (1,) CLOCK
    trail: Records  # (L,) TRAIL, in order; L is enough for every replica to come and go twice
    marked: Ints  # (N,) nodes touched at the present time, each once
    slots: Ints  # (2, W) scratch


class MoveNodes(_MoveNodes, ArrayTable):
    """The nodes while work comes and goes on them; requests, prices, groups and feed are only read, the rest changes."""


class _MoveSearch(NamedTuple):
    units: Records  # (U,) MOVE_UNIT
    limits: ChurnLimits
    chains: Records  # (N,) CHAIN
    listed: Ints  # (U,) units by home
    progress: Records  # (1,) PROGRESS
    slots: Ints  # (I, W) GPUs of each replica at home, -1 beyond the last
    to_node: Ints  # (I,)
    to_slots: Ints  # (I, W)
    queue: Ints  # (2, Q) units of the chain under way, and of the one before; Q is the most on one node, at least 1
    seen: Ints  # (G + Q,) chains of the node that were weighed already, as bits of their units
    touched: Ints  # (N,) nodes that the chain moved last has touched
    log: Ints  # (U,) units moved for good, in order
    frames: Records  # (I,) FRAME, those of a search of every sequence
    best: Ints  # (I, 2 + W) rows of the best sequence so far: unit, node and GPUs of each replica


class MoveSearch(_MoveSearch, ArrayTable):
    """A search under way; limits, listed and slots are only read, the rest changes."""


class _CostIndex(NamedTuple):
    cost: Floats  # (K, R) lowest best, infinite where it does not fit
    known: Flags  # (K, R) how well cost is known
    rank: Shorts  # (K, R) of the first node with the memory
    scaled: Floats  # (K, R) what is scaled, of mixes alone
    top: Shorts  # (K, B) best row of each block
    top_cost: Floats  # (K, B)


class CostIndex(_CostIndex, ArrayTable):
    """What is kept of each kind of task: its cost in each state and the best of each block of states."""


class _EngineArrays(NamedTuple):
    nodes: Records  # (N,) NODE
    states: Records  # (R,) STATE
    gpu_free: Ints  # (R, G) milli of each slot of a state, 0 where a slot takes no task
    distinct_slots: Ints  # (R, G) the first slot of each that differ, as many as the state has options
    usable: Records  # (R, Q) USABLE
    shapes: Records  # (P,) SHAPE
    slot_model: Ints  # (P, G) -1 for a slot that takes no task
    added_w: Floats  # (P, G) of a GPU that goes from idle to busy
    kinds: Records  # (K,) KIND
    groups: GroupArrays
    classes: ClassArrays
    feed: FeedArrays
    class_weight: Ints  # (C,)
    relief: Records  # (M + 1, L) RELIEF
    captive: Records  # (D,) CAPTIVE
    scalars: Records  # (1,) SCALARS
    held: Ints  # (N, T) tasks of each sort, GPU_CLUSTERING alone
    bucket: Ints  # (power of two,) first row, -1 for none
    spare: Ints  # (R,) rows given back
    log: Ints  # (power of two,) rows that changed, the last ones, round and round
    cost_index: CostIndex
    gpu: Ints  # (G,) scratch: the GPUs of a node that changes its state
    taken: Ints  # (G,) GPUs of the task placed last, -1 beyond the last


class EngineArrays(_EngineArrays, ArrayTable):
    """One policy on one fleet, changed in place by what is done on it."""


class ArrivalOutcomes(NamedTuple):
    """What became of each arrival, with the sums after it."""

    placed: NDArray[np.bool_]  # (A,)
    power_w: Floats  # (A,) of the whole fleet
    arrived_milli: Ints  # (A,)
    allocated_milli: Ints  # (A,)
    node: Ints  # (A,) -1 where refused
