"""What physics knows of direction: never slower in a larger slice, nor at a higher limit.

Owns the monotone projection. Must not know quantities or units.

Theory: of all sequences that never decrease, the nearest to the predictions in the sum of
squares weighted by their certainty is found by pooling adjacent violators; it moves what is
uncertain and leaves what was measured. On a lattice of slices and limits it is done along the
limits of each slice, then along the slices with one weight a slice. The second pass keeps the
order of the first, because the projection with equal weights keeps order: if every value of
one column is at most that of the next, so is every projected value. The same argument keeps
lower ends below middles below upper ends, where all three are projected with the same weights.

Source: Barlow, Bartholomew, Bremner and Brunk, "Statistical Inference under Order Restrictions",
1972, chapter 1 (pool adjacent violators; theorem 1.6 on the order of solutions).
"""

import numpy as np

from eelgrid_kernels.arrays import Floats

__all__ = ["isotonic", "ordered"]


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The nearest sequence that never decreases; (K,) values, (K,) positive weights."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while pools and pools[-1][0] > mean:
            below, other, count = pools.pop()
            mean = (mean * total + below * other) / (total + other)
            total, length = total + other, length + count
        pools.append((mean, total, length))
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])


def ordered(values: Floats, weights: Floats, direction: int) -> Floats:
    """(S, L) values that never go against `direction` along either axis: 1 rises, -1 falls.

    weights: (S, L), positive.
    """
    rising = direction * values
    along = np.stack([isotonic(row, weight) for row, weight in zip(rising, weights, strict=True)])
    slice_weights = weights.mean(axis=1)
    across = np.stack([isotonic(column, slice_weights) for column in along.T], axis=1)
    return np.asarray(direction * across)
