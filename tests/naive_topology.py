"""Slow, obvious twins of eelgrid_kernels.gang: every choice there is, each worth said in plain sums."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import inf

Matrix = Sequence[Sequence[int]]


def within(links: Matrix, slots: Sequence[int]) -> list[int]:
    """All links between two of these GPUs."""
    return [links[one][other] for one, other in combinations(slots, 2)]


def worth(links: Matrix, fitting: Sequence[int], slots: Sequence[int]) -> tuple[float, int, int]:
    """Worst link, sum of links, sum of the links that are left."""
    left = [slot for slot in fitting if slot not in slots]
    return min(within(links, slots), default=inf), sum(within(links, slots)), sum(within(links, left))


def best_linked(links: Matrix, fitting: Sequence[int], count: int) -> tuple[int, ...]:
    """The best subset of that size; of equals the one with the lower slots."""
    subsets = list(combinations(fitting, count))
    most = max(worth(links, fitting, subset) for subset in subsets)
    return next(subset for subset in subsets if worth(links, fitting, subset) == most)


def divisions(room: Sequence[int], replicas: int) -> Iterator[tuple[int, ...]]:
    """All ways to share replicas among nodes with that much room."""
    for counts in product(*(range(min(most, replicas) + 1) for most in room)):
        if sum(counts) == replicas:
            yield counts


def places(paths: Sequence[tuple[str, ...]], counts: Sequence[int]) -> list[int]:
    """How many replicas each node, rack, switch and zone holds that holds any."""
    held = [count for count in counts if count]
    for level in range(max(map(len, paths), default=0)):
        for prefix in {path[: level + 1] for path in paths}:
            total = sum(count for path, count in zip(paths, counts, strict=True) if path[: level + 1] == prefix)
            held += [total] if total else []
    return held


def least_division(
    costs: Sequence[Sequence[float]], paths: Sequence[tuple[str, ...]], price: Sequence[float]
) -> tuple[float, tuple[int, ...]]:
    """The least cost of sharing all replicas, and a division that has it; costs[n] ends with the node's room."""
    best: tuple[float, tuple[int, ...]] = (inf, ())
    for counts in divisions([len(row) - 1 for row in costs], len(price) - 1):
        total = sum(row[count] for row, count in zip(costs, counts, strict=True))
        total += sum(price[held] for held in places(paths, counts))
        best = min(best, (total, counts), key=lambda found: found[0])
    return best
