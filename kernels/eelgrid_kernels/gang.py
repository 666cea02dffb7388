"""How many replicas of one workload each node takes, so that watts and distances together cost least.

    cost = sum_n costs[n, c_n] + sum_n price[c_n] + sum_levels sum_groups price[c_group],   sum_n c_n = R

c_n replicas go to node n, c_group to all nodes of one rack, one switch, one
zone: groups are nested, so the cost is one of a tree. What a vertex with r
replicas costs at best is price[r] plus the best division of r among its
children, a min-plus convolution, one child after the other (the tree knapsack:
Johnson and Niemi, Mathematics of Operations Research 8, 1983). The result is
exact for whatever price: W for each vertex that is used packs a gang, W r (r - 1) / 2
spreads it.

Work: each convolution takes at most R times the replicas that its child can
hold, so all of them R x room x (levels + 1) steps, where room is how many
replicas fit at all, on each node no more than R.
"""

import numpy as np

from eelgrid_kernels.arrays import EngineArrays, Floats, Ints
from eelgrid_kernels.baselines import choose_gpus, compute_exact_cost
from eelgrid_kernels.compilation import kernel
from eelgrid_kernels.cost_terms import fill_state_terms


@kernel
def compute_replica_costs(trial: EngineArrays, kind: int, moment: int, costs: Floats) -> int:
    """What 0, 1, 2 ... equal tasks cost on a node of each state into costs (len(states), S+1), in place.

    Infinite beyond the room, memory left aside; returns how many any of them holds. trial is the run with a copy of
    the states that are asked for, on which task after task is weighed and taken as in a decision; moment numbers the
    decisions of RANDOM.
    """
    most, asked = 0, trial.kinds[kind]
    for row in range(costs.shape[0]):
        costs[row] = np.inf
        costs[row, 0] = 0.0
        for tasks in range(1, costs.shape[1]):
            cost = compute_exact_cost(trial, kind, row)[0]
            if cost == np.inf:
                break
            costs[row, tasks] = costs[row, tasks - 1] + cost
            most = max(most, tasks)
            choose_gpus(trial, kind, row, moment)
            trial.states[row].cpu_free -= asked.cpu_milli
            for slot in trial.taken:
                if slot >= 0:
                    trial.gpu_free[row, slot] -= asked.gpu_milli
            fill_state_terms(trial, row)
    return most


@kernel
def _merge(into: Floats, held: int, child: Floats, size: int, split: Ints) -> int:
    """Makes into (R+1,) the best of sharing r replicas with a child, in place; returns how many it can hold now.

    held and size are the most replicas that into and child can hold; split (R+1,) takes the child's share.
    """
    most = min(into.shape[0] - 1, held + size)
    for replicas in range(most, -1, -1):
        best, share = np.inf, 0
        for given in range(max(0, replicas - held), min(size, replicas) + 1):
            cost = into[replicas - given] + child[given]
            if cost < best:
                best, share = cost, given
        into[replicas] = best
        split[replicas] = share
    return int(most)


@kernel
def _level_that_ends(groups: Ints, node: int) -> int:
    """The outermost level whose group ends with this node; L where none ends."""
    levels = groups.shape[1]
    if node == groups.shape[0] - 1:
        return 0
    for level in range(levels):
        if groups[node, level] != groups[node + 1, level]:
            return level
    return int(levels)


@kernel
def divide_replicas(costs: Floats, groups: Ints, price: Floats, counts: Ints) -> float:
    """The replicas of each node into counts (N,), in place; returns the least cost, infinite where R do not fit.

    costs (N, S+1) in watts: what c replicas cost on a node, infinite beyond its room, 0 for none. groups (N, L):
    the codes of a node's zone, switch, rack, outermost first; nodes of one group stand together. price (R+1,) in
    watts, 0 for no replica. Of equal divisions the earlier nodes take more.
    """
    count, levels = groups.shape
    replicas, size = price.shape[0] - 1, costs.shape[1] - 1
    tables = np.full((levels + 1, replicas + 1), np.inf)
    tables[:, 0] = 0.0
    held = np.zeros(levels + 1, np.int64)
    ends = np.empty(count, np.int64)
    merges = count
    for node in range(count):
        ends[node] = _level_that_ends(groups, node)
        merges += levels - ends[node]
    splits = np.zeros((merges, replicas + 1), np.int64)
    leaf = np.empty(size + 1)
    merge = 0
    for node in range(count):
        room = 0
        for taken in range(min(size, replicas) + 1):
            if costs[node, taken] < np.inf:
                leaf[taken] = costs[node, taken] + price[taken]
                room = taken
        held[levels] = _merge(tables[levels], int(held[levels]), leaf, room, splits[merge])
        merge += 1
        for level in range(levels, ends[node], -1):
            for taken in range(held[level] + 1):
                tables[level, taken] += price[taken]
            held[level - 1] = _merge(
                tables[level - 1], int(held[level - 1]), tables[level], int(held[level]), splits[merge]
            )
            merge += 1
            tables[level, :] = np.inf
            tables[level, 0] = 0.0
            held[level] = 0
    # Backwards: what each group was given, then each node in it.
    wanted = np.zeros(levels + 1, np.int64)
    wanted[0] = replicas if held[0] == replicas else 0
    for node in range(count - 1, -1, -1):
        for level in range(ends[node] + 1, levels + 1):
            merge -= 1
            wanted[level] = splits[merge, wanted[level - 1]]
            wanted[level - 1] -= wanted[level]
        merge -= 1
        counts[node] = splits[merge, wanted[levels]]
        wanted[levels] -= counts[node]
    return float(tables[0, replicas])
