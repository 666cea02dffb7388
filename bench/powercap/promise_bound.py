"""Bounds what any search may save that keeps its promises, by a change of measure.

Owns the bound; noise_bounds prints it. Must not know policies. The argument (Lai and Robbins 1985; Kaufmann, Cappe
and Garivier 2016) holds for rules that adapt, use several limits and stop measuring when they like.

A rule is told each limit's energy and time, except the time at the largest limit, which a promise is relative to. Let
that limit be faster by a share d than it is. Only windows at the largest limit can tell; each makes about d^2 / (2 s^2)
nats, s being the relative scatter of its time per unit of work, which is all that a rule sees of it. A run breaks its
promise if the largest limit is that much faster and its other work is not done sooner than the promise is good for.
A rule that breaks promises in a share a of runs at most, whatever the job, may therefore run so with probability p only
if kl(p, a), the divergence of two coins, is no more than the nats of all windows at the largest limit, in the mean. They
save nothing, and the other runs have less time to spend on savings. The rule chooses p, and its limits in both cases,
for the most saving: a linear program for each p. Each d gives a bound, of which the least counts.

Work at a limit that alone would break the promise counts as in bench.powercap: as no more than the oracle's saving.
"""

import math

import numpy as np
from scipy.optimize import linprog

from bench.powercap.single import SLOWDOWN, Noise, ceiling, window_count, window_scatter
from bench.powercap.zeus import Run

__all__ = ["RISKS", "bound_saving"]

RISKS = (1 / 40, 1 / 500)  # shares of runs that may break their promise
_FASTER = np.geomspace(0.005, 0.045, 9)
_OFTEN = np.linspace(1.0, 0.0, 21)  # how often a run takes more time than it may if the largest limit is faster


def _coin_divergence(one: float, other: float) -> float:
    """Divergence of two coins, in nats; 0 where the first is no more likely."""
    if one <= other:
        return 0.0
    rest = (1.0 - one) * math.log((1.0 - one) / (1.0 - other)) if one < 1.0 else 0.0
    return one * math.log(one / other) + rest


def _window_divergence(faster: float, scatter: float) -> float:
    """Nats of one window: of a normal time from one whose mean and scatter are smaller by this share."""
    left = 1.0 - faster
    return math.log(left) + (scatter**2 + faster**2) / (2.0 * scatter**2 * left**2) - 0.5


def _most_saving(run: Run, least: float, often: float, faster: float) -> float:
    """Most saving with this share of work at the largest limit at least, in the mean of both cases; -inf for none.

    In the first case, `often`, any saving up to the oracle's is granted; in the second, time is short.
    """
    base, oracle = run.curve.largest, ceiling(run.curve).oracle
    slower = np.array([at.time_s / base.time_s - 1.0 for at in run.curve.points])
    saved = np.minimum(oracle, [1.0 - at.energy_j / base.energy_j for at in run.curve.points])
    slower[-1] = -faster  # points rise: the largest limit, where work takes less time if it is faster
    nothing, once = np.zeros(len(saved)), np.ones(len(saved))
    reference = nothing.copy()
    reference[-1] = 1.0
    rows = [
        np.concatenate([nothing, slower]),
        -np.concatenate([often * reference, (1.0 - often) * reference]),
    ]
    found = linprog(
        -np.concatenate([often * saved, (1.0 - often) * saved]),
        A_ub=np.array(rows),
        b_ub=[(1.0 + SLOWDOWN) * (1.0 - faster) - 1.0, -least],
        A_eq=np.array([np.concatenate([once, nothing]), np.concatenate([nothing, once])]),
        b_eq=[1.0, 1.0],
        bounds=(0.0, 1.0),
    )
    return -float(found.fun) if found.status == 0 else -math.inf


def bound_saving(run: Run, noise: Noise, risk: float) -> float:
    """Most that a rule saves in the mean that breaks a promise in this share of runs at most, whatever the job."""
    scatter, windows = window_scatter(run, noise)[0], window_count(run)
    best = ceiling(run.curve).oracle
    for faster in _FASTER.tolist():
        nats = windows * _window_divergence(faster, scatter)
        most = -math.inf
        for often in _OFTEN.tolist():
            least = _coin_divergence(often, risk) / nats
            if least > 1.0:
                continue
            most = max(most, _most_saving(run, least, often, faster))
            if most >= best:
                break
        best = min(best, most)
    return best
