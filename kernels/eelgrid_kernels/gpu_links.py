"""GPU subsets by interconnect: the best linked GPUs of a node whose removal hurts the rest least.

A choice S of K among the F fitting GPUs is worth, compared in this order:

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

from eelgrid_kernels.arrays import Ints, Nodes
from eelgrid_kernels.compilation import kernel

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
    worst = np.full(size, _BOUNDLESS, np.int64)
    total = np.zeros(size, np.int64)
    taken = np.zeros(size, np.bool_)
    newest = seed
    for k in range(places.shape[0]):
        places[k] = newest
        taken[newest] = True
        best = -1
        for place in range(size):
            if taken[place]:
                continue
            link = links[fitting[place], fitting[newest]]
            worst[place] = min(worst[place], link)
            total[place] += link
            if best < 0 or worst[place] > worst[best] or (worst[place] == worst[best] and total[place] > total[best]):
                best = place
        newest = best
    places.sort()


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
    places = np.arange(count)
    best = places.copy()
    worth = _worth(links, fitting, best)
    exact = _subsets(size, count) <= SUBSETS_MOST
    if exact:
        while _advance(places, size):
            found = _worth(links, fitting, places)
            if found > worth:
                worth = found
                best[:] = places
    else:
        for seed in range(size):
            _grow(links, fitting, seed, places)
            found = _worth(links, fitting, places)
            if found > worth or (found == worth and _lower(places, best)):
                worth = found
                best[:] = places
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
