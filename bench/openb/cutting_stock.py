"""What a share of a GPU is worth when GPUs are cut into shares: the prices of the cutting-stock LP.

Owns the LP and its pricing problem. Must not know nodes, models or watts.

Theory (Gilmore and Gomory, Operations Research 9, 1961): least sum of x_p such
that sum_p a_sp x_p >= count_s, over the patterns p, the multisets of sizes with
sum_s a_sp size_s <= 1000. Its dual values w satisfy sum_s a_sp w_s <= 1 for every
pattern, so whatever shares one GPU holds, their prices sum to at most 1, and
sum_s w_s count_s GPUs at least are needed. Patterns are generated: the next one
is the dearest at the present prices, an unbounded knapsack. However early one
stops, prices divided by the value of the dearest pattern are prices.
"""

import math

import numpy as np
from scipy.optimize import linprog

from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.node_cost import GPU_WHOLE_MILLI

# A pattern must be worth this much more than its GPU to enter; what is left is divided out.
GAIN_LEAST = 1e-9
PATTERNS_MOST = 500
PRICE_STEP = 1e-6
HIGHS_OPTIMAL = 0


def dearest_pattern(sizes: Ints, values: Floats) -> tuple[float, Ints]:
    """Worth and counts (K,) of the dearest multiset of sizes (K,) milli-GPU that fits one GPU."""
    unit = math.gcd(GPU_WHOLE_MILLI, *sizes.tolist())
    steps = sizes // unit
    room = GPU_WHOLE_MILLI // unit
    best = np.zeros(room + 1)
    taken = np.full(room + 1, -1, np.int64)
    for filled in range(1, room + 1):
        best[filled] = best[filled - 1]
        fits = np.flatnonzero(steps <= filled)
        if fits.size:
            worth = best[filled - steps[fits]] + values[fits]
            dearest = int(np.argmax(worth))
            if worth[dearest] > best[filled]:
                best[filled], taken[filled] = worth[dearest], fits[dearest]
    pattern = np.zeros(sizes.shape[0], np.int64)
    filled = room
    while filled > 0:
        if taken[filled] < 0:
            filled -= 1
            continue
        pattern[taken[filled]] += 1
        filled -= int(steps[taken[filled]])
    return float(best[room]), pattern


class SharePrices:
    """Prices in GPUs of distinct sizes (K,) in 1 ... 1000 milli-GPU; patterns found once serve all counts to come."""

    def __init__(self, sizes: Ints) -> None:
        self._sizes = sizes
        self._patterns: list[Ints] = list(np.diag(GPU_WHOLE_MILLI // sizes))

    def best(self, counts: Floats) -> Floats:
        """The prices (K,) that ask for the most GPUs for counts (K,)."""
        if self._sizes.size == 0:
            return np.zeros(0)
        for _ in range(PATTERNS_MOST):
            held = np.array(self._patterns, np.float64)
            solved = linprog(np.ones(held.shape[0]), A_ub=-held.T, b_ub=-counts, method="highs")
            if solved.status != HIGHS_OPTIMAL:
                raise RuntimeError(f"the cutting-stock LP of {self._sizes.size} sizes: {solved.message}")
            prices = np.maximum(0.0, -solved.ineqlin.marginals)
            worth, pattern = dearest_pattern(self._sizes, prices)
            if worth <= 1.0 + GAIN_LEAST:
                break
            self._patterns.append(pattern)
        # Rounded down they are prices still, and the LPs that they enter keep coefficients of one scale.
        return np.floor(prices / max(1.0, worth) / PRICE_STEP) * PRICE_STEP
