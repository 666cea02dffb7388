"""Node tree: a treap of the nodes of one state, ordered by rank and searchable by free memory.

Owns insertion, removal and two questions: the first node past a rank with enough
memory, and how many have it. Must not know what a state is.

Theory: a treap (Aragon and Seidel, FOCS 1989): a search tree by rank and a heap
by a number drawn from the node's number, so that its shape depends on its nodes
alone and its depth is logarithmic, whoever came first. Each node keeps how many
are below it and the most and the least of their memory, so that a search skips
what is too small and a count what is all alike.
"""

from eelgrid_kernels.arrays import Records
from eelgrid_kernels.compilation import inlined_kernel, lean_kernel


@lean_kernel
def random_draw(seed: int, moment: int, thing: int) -> int:
    """A number that looks random, from three; 32 bits in 64, so that no product overflows."""
    value = seed
    for part in (moment, thing):
        value ^= part
        for _ in range(2):
            value = ((value ^ (value >> 15)) * 0x2545F491) & 0xFFFFFFFF
            value = ((value ^ (value >> 13)) * 0x3C6EF35F) & 0xFFFFFFFF
        value ^= value >> 16
    return int(value)


@inlined_kernel
def _above(one: int, other: int) -> bool:
    mine, theirs = random_draw(0, 1, one), random_draw(0, 1, other)
    return mine > theirs or (mine == theirs and one > other)


@inlined_kernel
def _sum_up(nodes: Records, node: int) -> None:
    root = nodes[node]
    most = least = root.memory
    size = 1
    for child in (root.left, root.right):
        if child >= 0:
            below = nodes[child]
            most, least = max(most, below.most_memory), min(least, below.least_memory)
            size += below.tree_size
    root.most_memory, root.least_memory, root.tree_size = most, least, size


@lean_kernel
def _split(nodes: Records, root: int, rank: int) -> tuple[int, int]:
    """The trees of the nodes below that rank and of the others."""
    if root < 0:
        return -1, -1
    if nodes[root].rank < rank:
        lower, upper = _split(nodes, nodes[root].right, rank)
        nodes[root].right = lower
        _sum_up(nodes, root)
        return root, upper
    lower, upper = _split(nodes, nodes[root].left, rank)
    nodes[root].left = upper
    _sum_up(nodes, root)
    return lower, root


@lean_kernel
def _join(nodes: Records, lower: int, upper: int) -> int:
    """One tree of two, all ranks of the first below those of the second."""
    if lower < 0:
        return upper
    if upper < 0:
        return lower
    if _above(lower, upper):
        nodes[lower].right = _join(nodes, nodes[lower].right, upper)
        _sum_up(nodes, lower)
        return lower
    nodes[upper].left = _join(nodes, lower, nodes[upper].left)
    _sum_up(nodes, upper)
    return upper


@lean_kernel
def insert_node(nodes: Records, root: int, node: int) -> int:
    """The root of a tree to which a node was added."""
    if root < 0 or _above(node, root):
        nodes[node].left, nodes[node].right = _split(nodes, root, nodes[node].rank)
        _sum_up(nodes, node)
        return node
    if nodes[node].rank < nodes[root].rank:
        nodes[root].left = insert_node(nodes, nodes[root].left, node)
    else:
        nodes[root].right = insert_node(nodes, nodes[root].right, node)
    _sum_up(nodes, root)
    return root


@lean_kernel
def remove_node(nodes: Records, root: int, node: int) -> int:
    """The root of a tree from which a node was taken, -1 if it was the last."""
    if root == node:
        return _join(nodes, nodes[node].left, nodes[node].right)
    if nodes[node].rank < nodes[root].rank:
        nodes[root].left = remove_node(nodes, nodes[root].left, node)
    else:
        nodes[root].right = remove_node(nodes, nodes[root].right, node)
    _sum_up(nodes, root)
    return root


@lean_kernel
def first_roomy(nodes: Records, root: int, memory: int, past: int) -> int:
    """The node of lowest rank above `past` that has the memory, or -1."""
    if root < 0 or nodes[root].most_memory < memory:
        return -1
    if nodes[root].rank > past:
        found = first_roomy(nodes, nodes[root].left, memory, past)
        if found >= 0:
            return found
        if nodes[root].memory >= memory:
            return root
    return first_roomy(nodes, nodes[root].right, memory, past)


@lean_kernel
def count_roomy(nodes: Records, root: int, memory: int) -> int:
    """How many nodes have the memory."""
    if root < 0 or nodes[root].most_memory < memory:
        return 0
    if nodes[root].least_memory >= memory:
        return int(nodes[root].tree_size)
    mine = 1 if nodes[root].memory >= memory else 0
    return mine + count_roomy(nodes, nodes[root].left, memory) + count_roomy(nodes, nodes[root].right, memory)
