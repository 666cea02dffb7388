"""Policies times seeds, and what their differences come to.

Owns which policies there are and how a run is made. Must not know physics.

    ours       steering with the Core at `energy`
    blind      the same without a thought of watts: the Core at `performance`, no limit lowered
    static     constant replicas for the day's peak, default limits, best fit
    hpa-each   Kubernetes' autoscaler with a target for each service (targets.csv), default limits, best fit
    hpa        the same at 70 % for all services
    hpa-strict the same at STRICT, with which it breaks about as few windows as any target
    cap        hpa, and all training at the best fixed share of its limits that keeps the promises
    zeus       hpa, and Zeus for each job

Beside them, where they are asked for by name, `at-once`, ours without waiting for watts,
and the front: `hpa-N`, the autoscaler at N per cent, and `ours-N`, ours with N per cent of
the rate as the band within which nothing is taken away.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from joblib import Parallel, delayed
from scipy.stats import t as student

from bench.loop.accounts import Outcome
from bench.loop.baselines import Baseline, Hpa, Peak, Zeus, best_cap, least_static, under_cap
from bench.loop.ours import AtOnce, Blind, Ours
from bench.loop.scene import Scene, Size, make
from bench.loop.targets import load_targets
from bench.loop.world import Driver, World

__all__ = ["COMPARED", "POLICIES", "Difference", "Run", "carried_out", "differences", "everything", "mean_interval"]

STRICT = 0.55
CONFIDENCE = 0.95

POLICIES: dict[str, Callable[[Scene], Driver]] = {
    "ours": lambda _: Ours(),
    "blind": lambda _: Blind(),
    "static": lambda scene: Baseline(Peak(least_static(scene))),
    "hpa-each": lambda scene: Baseline(Hpa(scene, load_targets())),
    "hpa": lambda scene: Baseline(Hpa(scene)),
    "hpa-strict": lambda scene: Baseline(Hpa(scene, STRICT)),
    "cap": lambda scene: Baseline(Hpa(scene), opening=under_cap(best_cap(scene))),
    "zeus": lambda scene: Baseline(Hpa(scene), Zeus()),
}
COMPARED = tuple(POLICIES)


def _hpa(target: float) -> Callable[[Scene], Driver]:
    return lambda scene: Baseline(Hpa(scene, target))


def _ours(band: float) -> Callable[[Scene], Driver]:
    return lambda _: Ours(band=band)


FRONT = {f"hpa-{target}": _hpa(target / 100.0) for target in (50, 55, 60, 65, 70, 75, 80, 85)}
FRONT |= {f"ours-{band}": _ours(band / 100.0) for band in (0, 15, 30, 50)}
POLICIES |= {"at-once": lambda _: AtOnce()} | FRONT


class Run(NamedTuple):
    """One policy on one seed."""

    policy: str
    seed: int
    outcome: Outcome


class Difference(NamedTuple):
    """What a policy has more than ours, of the same seeds, in per cent of ours; mean and half its interval."""

    policy: str
    energy_pct: float
    energy_half: float
    money_pct: float
    money_half: float
    seeds: int


_scene = lru_cache(maxsize=1)(make)  # the policies of a seed are played one after another


def carried_out(data: Path, policy: str, seed: int, size: Size) -> Run:
    """One day."""
    scene = _scene(data, seed, size)
    return Run(policy, seed, World(scene, POLICIES[policy](scene)).run())


def everything(
    data: Path,
    policies: Sequence[str],
    seeds: Sequence[int],
    size: Size,
    *,
    processes: int,
    tell: Callable[[Sequence[Run], int], None],
) -> list[Run]:
    """All runs, seeds outermost; after each, `tell` gets those that are done and how many there will be."""
    work = [(policy, seed) for seed in seeds for policy in policies]
    made = (delayed(carried_out)(data, policy, seed, size) for policy, seed in work)
    found: list[Run] = []
    for run in Parallel(processes, return_as="generator")(made):
        found.append(run)
        tell(found, len(work))
    return found


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the confidence interval of Student's t; infinite of one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    half = float(student.ppf((1.0 + CONFIDENCE) / 2.0, len(values) - 1)) * statistics.stdev(values)
    return mean, half / math.sqrt(len(values))


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Paired by seed; every policy but ours."""
    ours = {run.seed: run.outcome for run in runs if run.policy == "ours"}
    found = []
    for policy in dict.fromkeys(run.policy for run in runs):
        pairs = [(run.outcome, ours[run.seed]) for run in runs if run.policy == policy and run.seed in ours]
        if policy == "ours" or not pairs:
            continue
        energy = mean_interval([100.0 * (one.energy_j / other.energy_j - 1.0) for one, other in pairs])
        money = mean_interval([100.0 * (one.money / other.money - 1.0) for one, other in pairs])
        found.append(Difference(policy, *energy, *money, len(pairs)))
    return found
