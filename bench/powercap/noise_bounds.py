"""What the noise of windows costs rules that know more than a search: python -m bench.powercap.noise_bounds --data DIR --out DIR.

Owns these two rules. Must not know policies.

`certified` is told every limit's time and energy, except how long the best limit takes compared
with the largest, which it measures in a part of the run that is chosen for the least loss. It may
break the promise in one of forty such runs. What it loses is the price of keeping a promise that
can only be measured; it bounds no rule that uses several limits in turn.

`identified` bounds every rule for a job whose limits differ only by scatter (movielens). It is told
the noise and the values that the limits take, but not which limit takes which: each limit's is drawn
from those of the table. The bound is the Lagrangian relaxation over limits (Whittle 1988): windows
are bought at a price, each limit's best use of them is a dynamic program over the mean of its
windows, and the least bound over prices holds for any rule with so many windows.
"""

import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.ndimage import map_coordinates

from bench.powercap import report
from bench.powercap.__main__ import SENSITIVITY
from bench.powercap.single import SLOWDOWN, Noise, ceiling, window_count, window_scatter
from bench.powercap.zeus import MODELS, NotThere, Run, baseline_runs, load
from bench.runner import Options, benchmark, data_option

__all__ = ["certified_saving", "identified_saving", "main"]

RISK_ERRORS = 1.96  # one of forty, on one side
_SHARES = 400
_PRICES = 9
_GRID = 31  # means of windows, on each axis
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(3)
_SCATTERED = "movielens-1m"
FloatArray = npt.NDArray[np.float64]


def certified_saving(run: Run, noise: Noise) -> float:
    """Energy saved by the rule that is told all but how the best limit's time compares with the largest's."""
    scatter, windows = window_scatter(run, noise)[0], window_count(run)
    base, oracle, best = run.curve.largest, ceiling(run.curve).oracle, 0.0
    share = np.linspace(1.0 / _SHARES, 1.0 - 2.0 / windows, _SHARES)  # of the work, at the lower limit
    for at in run.curve.points[:-1]:
        ratio = at.time_s / base.time_s
        error = scatter * ratio * np.sqrt(1.0 / ((1.0 - share) * windows) + 1.0 / (share * windows))
        kept = share[share * (ratio - 1.0 + RISK_ERRORS * error) <= SLOWDOWN]
        best = max(best, float(kept.max(initial=0.0)) * min(oracle, 1.0 - at.energy_j / base.energy_j))
    return best


def _play_limit(values: FloatArray, rewards: FloatArray, windows: int, price: float) -> float:
    """Most that one limit is worth: rewards of its windows less their price, stopped at any time.

    `values` (K, 2) in scatters of a window, `rewards` (K,); one row is true, each as likely.
    """
    nodes = np.array([(one, other) for one in _NODES for other in _NODES])
    weights = np.outer(_WEIGHTS, _WEIGHTS).ravel() / _WEIGHTS.sum() ** 2
    after: FloatArray | None = None
    low = step = np.zeros(2)
    for count in range(windows - 1, -1, -1):
        spread = 3.0 / np.sqrt(max(1, count))
        first, last = values.min(0) - spread, values.max(0) + spread
        axes = [np.linspace(first[axis], last[axis], _GRID) for axis in (0, 1)]
        means = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2) if count else np.zeros((1, 2))
        likely = -0.5 * count * ((means[:, None, :] - values) ** 2).sum(-1)
        belief = np.exp(likely - likely.max(1, keepdims=True))
        belief /= belief.sum(1, keepdims=True)
        worth = belief @ rewards - price
        if after is not None:
            next_means = (count * means[:, None, None, :] + values[:, None, :] + nodes) / (count + 1)
            places = (next_means - low) / step
            found = map_coordinates(after, [places[..., 0].ravel(), places[..., 1].ravel()], order=1, mode="nearest")
            worth = worth + (belief * (found.reshape(places.shape[:-1]) @ weights)).sum(1)
        worth = np.maximum(0.0, worth)
        after = worth.reshape(_GRID, _GRID) if count else worth
        low, step = first, (last - first) / (_GRID - 1)
    assert after is not None, "there is at least one window"
    return float(after[0])


def identified_saving(run: Run, noise: Noise) -> tuple[float, float]:
    """The bound for any rule, and the mean of the best limit's saving, over tables drawn from the values of this one."""
    base, oracle = run.curve.largest, ceiling(run.curve).oracle
    others = run.curve.points[:-1]
    values = np.log([(at.time_s / base.time_s, at.power_w / base.power_w) for at in others])
    rewards = np.minimum(oracle, 1.0 - np.exp(values.sum(1)))
    windows = round(window_count(run))
    in_scatters = values / np.array(window_scatter(run, noise))
    bound = min(
        price + len(others) * _play_limit(in_scatters, rewards, windows, price) / windows
        for price in np.linspace(0.0, oracle, _PRICES).tolist()
    )
    falling = np.sort(np.maximum(0.0, rewards))[::-1]
    ranks = np.arange(len(others) + 1) / len(others)
    best = float((((1.0 - ranks[:-1]) ** len(others) - (1.0 - ranks[1:]) ** len(others)) * falling).sum())
    return min(bound, best), best


class Bound(NamedTuple):
    """What a rule saves under one noise, in per cent of the energy at the largest limit."""

    noise: str
    model: str
    workload: str
    rule: str
    saving_pct: float
    best_pct: float  # with the best limit known


def _bounds(run: Run, name: str, noise: Noise) -> Bound:
    if run.key.workload == _SCATTERED:
        saving, best = identified_saving(run, noise)
        return Bound(name, run.model, run.key.workload, "identified", 100.0 * saving, 100.0 * best)
    saving, best = certified_saving(run, noise), ceiling(run.curve).oracle
    return Bound(name, run.model, run.key.workload, "certified", 100.0 * saving, 100.0 * best)


@benchmark(out="bench-out/powercap", refused=(NotThere, OSError))
@data_option()
def main(options: Options) -> int:
    """Writes noise_bounds.csv; 2 if the data is not there."""
    runs = baseline_runs(load(options.data))
    found = [_bounds(run, name, noise) for name, noise in SENSITIVITY.items() if noise.time > 0.0 for run in runs]
    report.write(options.out / "noise_bounds.csv", found)
    for name in dict.fromkeys(one.noise for one in found):
        for model in MODELS:
            mine = [one for one in found if (one.noise, one.model) == (name, model)]
            share = sum(one.saving_pct for one in mine) / max(1e-9, sum(one.best_pct for one in mine))
            scattered = [f"{one.saving_pct:.2f} of {one.best_pct:.2f}" for one in mine if one.rule == "identified"]
            print(f"{name}, {model}: {100.0 * share:.1f} % of the oracle; {_SCATTERED} {', '.join(scattered)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
