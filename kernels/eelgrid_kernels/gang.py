"""Gangs: how many replicas each node takes, and which linked GPUs of a node one replica takes.

Replicas are divided so that watts and distances together cost least.

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

GPUs of one node are chosen so that their removal hurts the rest least. A choice S
of K among the F fitting GPUs is worth, compared in this order:

    worst(S)   the smallest link between two of S, the bottleneck of a collective
    total(S)   the sum of all links within S
    total(R)   the sum of all links within what is left, R = F - S

and of equal choices the one with the lower slots. total(S) and total(R) are the
aggregated and the preserved bandwidth of MAPA (Ranganathan et al., SC 2021);
worst(S) comes first because a ring or tree runs at the pace of its slowest link.

The choice is exact where there are no more than SUBSETS_MOST subsets, which
holds for every K of up to 12 GPUs. Beyond that a choice is grown from each GPU
by the same order, and the best of the grown ones is taken.
"""

import numpy as np

from eelgrid_kernels.arrays import EngineArrays, Floats, Ints, Nodes
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
    for replicas in range(most + 1, split.shape[0]):
        split[replicas] = 0
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
def _clear(table: Floats) -> None:
    """A table (R+1,) of a group that holds no replica yet, in place."""
    for replicas in range(table.shape[0]):
        table[replicas] = np.inf
    table[0] = 0.0


@kernel
def divide_replicas(costs: Floats, groups: Ints, price: Floats, counts: Ints) -> float:
    """The replicas of each node into counts (N,), in place; returns the least cost, infinite where R do not fit.

    costs (N, S+1) in watts: what c replicas cost on a node, infinite beyond its room, 0 for none. groups (N, L):
    the codes of a node's zone, switch, rack, outermost first; nodes of one group stand together. price (R+1,) in
    watts, 0 for no replica. Of equal divisions the earlier nodes take more.
    """
    count, levels = groups.shape
    replicas, size = price.shape[0] - 1, costs.shape[1] - 1
    tables = np.empty((levels + 1, replicas + 1))
    held, wanted, ends = np.empty(levels + 1, np.int64), np.empty(levels + 1, np.int64), np.empty(count, np.int64)
    for level in range(levels + 1):
        _clear(tables[level])
        held[level] = wanted[level] = 0
    merges = count
    for node in range(count):
        ends[node] = _level_that_ends(groups, node)
        merges += levels - ends[node]
    splits = np.empty((merges, replicas + 1), np.int64)
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
            _clear(tables[level])
            held[level] = 0
    # Backwards: what each group was given, then each node in it.
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


# C(12, 6) = 924 subsets of 12 GPUs; each costs about 0.1 us for each pair in it.
SUBSETS_MOST = 1024
_BOUNDLESS = 2**62


@kernel
def _subsets(size: int, count: int) -> int:
    """How many subsets there are, counted no further than SUBSETS_MOST + 1."""
    found = 1
    for taken in range(min(count, size - count)):
        found = found * (size - taken) // (taken + 1)
        if found > SUBSETS_MOST:
            return SUBSETS_MOST + 1
    return found


@kernel
def _worth(links: Ints, fitting: Ints, places: Ints) -> tuple[int, int, int]:
    """Worst link, total and what remains, but for a constant; places (K,) point into fitting (F,)."""
    worst, total, degrees = _BOUNDLESS, 0, 0
    for k in range(places.shape[0]):
        one = fitting[places[k]]
        for other in fitting:
            if other != one:
                degrees += links[one, other]
        for j in range(k):
            link = links[one, fitting[places[j]]]
            worst = min(worst, link)
            total += link
    # Each link within S is in two degrees of S: total(R) = total(F) - degrees + total(S).
    return worst, total, total - degrees


@kernel
def _advance(places: Ints, size: int) -> bool:
    """The next subset in the order of its slots, in place; False after the last."""
    count = places.shape[0]
    k = count - 1
    while k >= 0 and places[k] == size - count + k:
        k -= 1
    if k < 0:
        return False
    places[k] += 1
    for j in range(k + 1, count):
        places[j] = places[j - 1] + 1
    return True


@kernel
def _grow(links: Ints, fitting: Ints, seed: int, places: Ints) -> None:
    """A choice grown from one GPU, in place: each step takes the best linked one, then the least linked to the rest."""
    size = fitting.shape[0]
    worst, total, taken = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    for place in range(size):
        worst[place], total[place], taken[place] = _BOUNDLESS, 0, 0
    newest = seed
    for k in range(places.shape[0]):
        places[k] = newest
        taken[newest] = 1
        best = -1
        for place in range(size):
            if taken[place] != 0:
                continue
            link = links[fitting[place], fitting[newest]]
            worst[place] = min(worst[place], link)
            total[place] += link
            if best < 0 or worst[place] > worst[best] or (worst[place] == worst[best] and total[place] > total[best]):
                best = place
        newest = best
    for k in range(1, places.shape[0]):
        place, at = places[k], k
        while at > 0 and places[at - 1] > place:
            places[at] = places[at - 1]
            at -= 1
        places[at] = place


@kernel
def _copy(places: Ints, into: Ints) -> None:
    """Copies places (K,) into another array, in place."""
    # Not into[:] = places: for the message where shapes differ, numba would compile all that makes texts of tuples.
    for k in range(places.shape[0]):
        into[k] = places[k]


@kernel
def _lower(one: Ints, other: Ints) -> bool:
    """Whether the slots of one come before those of the other."""
    for k in range(one.shape[0]):
        if one[k] != other[k]:
            return bool(one[k] < other[k])
    return False


@kernel
def _chain(links: Ints, chosen: Ints) -> None:
    """Puts each GPU next to the one that it is best linked to, from the lowest slot on, in place."""
    for k in range(1, chosen.shape[0] - 1):
        best = k
        for j in range(k + 1, chosen.shape[0]):
            if links[chosen[k - 1], chosen[j]] > links[chosen[k - 1], chosen[best]]:
                best = j
        found = chosen[best]
        # The others keep their order.
        for j in range(best, k, -1):
            chosen[j] = chosen[j - 1]
        chosen[k] = found


@kernel
def choose_linked_gpus(links: Ints, fitting: Ints, chosen: Ints) -> bool:
    """Puts the best linked K of the fitting GPUs into chosen (K,), in place; True where the choice is exact.

    links (G, G) holds bandwidths, whole, symmetric, at least 0; fitting (F,) slots in rising order, F >= K.
    Neighbours in chosen are near each other: ranks of a job are mostly numbered in the order given.
    """
    size, count = fitting.shape[0], chosen.shape[0]
    places, best = np.empty(count, np.int64), np.empty(count, np.int64)
    for k in range(count):
        places[k] = best[k] = k
    worth = _worth(links, fitting, best)
    exact = _subsets(size, count) <= SUBSETS_MOST
    if exact:
        while _advance(places, size):
            found = _worth(links, fitting, places)
            if found > worth:
                worth = found
                _copy(places, best)
    else:
        for seed in range(size):
            _grow(links, fitting, seed, places)
            found = _worth(links, fitting, places)
            if found > worth or (found == worth and _lower(places, best)):
                worth = found
                _copy(places, best)
    for k in range(count):
        chosen[k] = fitting[best[k]]
    _chain(links, chosen)
    return bool(exact)


@kernel
def _alike(nodes: Nodes, node: int, one: int, other: int) -> bool:
    """Whether two GPUs of a node differ in nothing that a cost knows."""
    return bool(
        nodes.gpu_state[node, one] == nodes.gpu_state[node, other]
        and nodes.gpu_free[node, one] == nodes.gpu_free[node, other]
        and nodes.gpu_model[node, one] == nodes.gpu_model[node, other]
        and nodes.gpu_idle_w[node, one] == nodes.gpu_idle_w[node, other]
        and nodes.gpu_busy_w[node, one] == nodes.gpu_busy_w[node, other]
    )


@kernel
def exchange_gpus(nodes: Nodes, node: int, links: Ints, slots: Ints) -> None:
    """Exchanges the GPUs of a task on one node, slots (K,) in place, for as many alike and better linked ones.

    Alike GPUs are taken in any choice at the same cost; where the K differ, they stay as they are. links (G', G')
    is of the node's own GPUs, G' <= G.
    """
    fitting = np.empty(links.shape[0], np.int64)
    found = 0
    for slot in slots:
        if not _alike(nodes, node, slots[0], slot):
            return
    for slot in range(links.shape[0]):
        if _alike(nodes, node, slots[0], slot):
            fitting[found] = slot
            found += 1
    choose_linked_gpus(links, fitting[:found], slots)
