"""What the noise of windows costs rules that know more than a search: python -m bench.powercap.noise_bounds --data DIR --out DIR.

Owns these rules. Must not know policies.

`certified` is told every limit's time and energy, except how long the best limit takes compared
with the largest, which it measures in a part of the run that is chosen for the least loss. It may
break the promise in one of forty such runs. What it loses is the price of keeping a promise that
can only be measured; it bounds no rule that uses several limits in turn.

`identified` bounds every rule for a job whose limits differ only by scatter (movielens). It is told
the noise and the values that the limits take, but not which limit takes which: each limit's is drawn
from those of the table. The bound is the Lagrangian relaxation over limits (Whittle 1988): windows
are bought at a price, each limit's best use of them is a dynamic program over the mean of its
windows, and the least bound over prices holds for any rule with so many windows.

`any` bounds every rule that breaks promises seldom (promise_bound.py); for movielens it is `identified`.

`informed` is `any` of the smallest risk, but for movielens what a rule attains that is told what `identified` is, and
how long the job lasts. It is no bound: it shows how much of the bound a good rule leaves.
"""

import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.ndimage import map_coordinates

from bench.powercap import report
from bench.powercap.__main__ import SENSITIVITY
from bench.powercap.promise_bound import RISKS, bound_saving
from bench.powercap.single import SLOWDOWN, Noise, ceiling, window_count, window_scatter
from bench.powercap.zeus import MODELS, NotThere, Run, baseline_runs, load
from bench.runner import Options, benchmark, data_option

__all__ = ["certified_saving", "identified_saving", "informed_saving", "main"]

_CERTIFIED, _INFORMED = "certified", "informed"
RISK_ERRORS = 1.96  # one of forty, on one side
_SHARES = 400
_PRICES = 9
_GRID = 31  # means of windows, on each axis
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(3)
_INFORMED_JOBS = 2000
_WIDTHS = (0.0, 0.5, 1.0, 1.5, 2.0)
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


def play_informed(run: Run, noise: Noise, width: float, seed: int) -> tuple[float, float]:
    """Mean saving and its standard error of an index rule that knows what `identified` does and the job's length.

    Each window is run at the limit with the largest mean reward plus `width` standard deviations, which shrink with the
    root of what is left of the run: by the exact posterior over the values that a limit may have.
    """
    rng, base, oracle = np.random.default_rng(seed), run.curve.largest, ceiling(run.curve).oracle
    values = np.log([(at.time_s / base.time_s, at.power_w / base.power_w) for at in run.curve.points[:-1]])
    rewards = np.append(np.minimum(oracle, 1.0 - np.exp(values.sum(1))), 0.0)  # the last: the largest limit, known
    values, windows = values / np.array(window_scatter(run, noise)), round(window_count(run))
    limits, jobs = len(values), np.arange(_INFORMED_JOBS)
    truth = rng.integers(limits, size=(_INFORMED_JOBS, limits))
    likely, saved = np.zeros((_INFORMED_JOBS, limits, limits)), np.zeros(_INFORMED_JOBS)
    for window in range(windows):
        belief = np.exp(likely - likely.max(-1, keepdims=True))
        belief /= belief.sum(-1, keepdims=True)
        mean = belief @ rewards[:-1]
        scatter = np.sqrt(np.maximum(0.0, belief @ rewards[:-1] ** 2 - mean**2))
        index = mean + width * (1.0 - window / windows) ** 0.5 * scatter
        chosen = np.where(index.max(1) > 0.0, index.argmax(1), limits)
        known = chosen == limits
        place = np.minimum(chosen, limits - 1)
        kind = truth[jobs, place]
        saved += np.where(known, 0.0, rewards[kind])
        seen = values[kind] + rng.standard_normal((_INFORMED_JOBS, 2))
        gained = -0.5 * ((seen[:, None, :] - values) ** 2).sum(-1)
        likely[jobs, place] += np.where(known[:, None], 0.0, gained)
    saved /= windows
    return float(saved.mean()), float(saved.std() / _INFORMED_JOBS**0.5)


def informed_saving(run: Run, noise: Noise) -> float:
    """What the best width of `play_informed` saves on jobs of its own: attainable with that knowledge, unlike a bound."""
    best = max(_WIDTHS, key=lambda width: play_informed(run, noise, width, seed=0)[0])
    return play_informed(run, noise, best, seed=1)[0]


class Bound(NamedTuple):
    """What a rule saves under one noise, in per cent of the energy at the largest limit."""

    noise: str
    model: str
    workload: str
    rule: str
    saving_pct: float
    best_pct: float  # with the best limit known


def _bounds(run: Run, name: str, noise: Noise) -> list[Bound]:
    """Each rule's; for movielens the one that holds for it in place of each, and what is attainable in place of the last."""
    most, best = {f"any, 1 of {round(1 / risk)}": risk for risk in RISKS}, ceiling(run.curve).oracle
    if run.key.workload == _SCATTERED:
        saving, best = identified_saving(run, noise)
        found = dict.fromkeys((_CERTIFIED, *most), saving) | {_INFORMED: informed_saving(run, noise)}
    else:
        found = {_CERTIFIED: certified_saving(run, noise)}
        found |= {rule: bound_saving(run, noise, risk) for rule, risk in most.items()}
        found[_INFORMED] = found[list(most)[-1]]
    return [Bound(name, run.model, run.key.workload, rule, 100.0 * one, 100.0 * best) for rule, one in found.items()]


@benchmark(out="bench-out/powercap", refused=(NotThere, OSError))
@data_option()
def main(options: Options) -> int:
    """Writes noise_bounds.csv; 2 if the data is not there."""
    runs = baseline_runs(load(options.data))
    noises = {name: noise for name, noise in SENSITIVITY.items() if noise.time > 0.0}
    found = [one for name, noise in noises.items() for run in runs for one in _bounds(run, name, noise)]
    report.write(options.out / "noise_bounds.csv", found)
    for name in noises:
        for model in MODELS:
            shares = []
            for rule in dict.fromkeys(one.rule for one in found):
                mine = [one for one in found if (one.noise, one.model, one.rule) == (name, model, rule)]
                share = sum(one.saving_pct for one in mine) / max(1e-9, sum(one.best_pct for one in mine))
                shares.append(f"{rule} {100.0 * share:.1f}")
            print(f"{name}, {model}, % of the oracle: {'; '.join(shares)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
