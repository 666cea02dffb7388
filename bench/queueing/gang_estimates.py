"""Our orders of gangs for what is known of run times: the remaining time, an estimate with an error, or nothing.

Owns three rules, all of which decide at events and not in rounds:
- known: the set of jobs that fits and ends work fastest, by the true remaining times;
- estimated: the same by expected remaining times, given an estimate whose error is log-normal and that the job has
  not ended yet;
- unknown: the largest Gittins index for GPU-seconds attained. The distribution is learned while it runs: in each octave
  of attained service, ends over GPU-seconds of all jobs so far, running ones included, so that censoring does not bias
  it. Must not read a job's true work.

Theory: with the hazard h constant within an octave, the index of a job at the age a is the largest over ages b > a of
P(end before b) / E[service until b], both given a (Gittins 1989; Tiresias uses a distribution given in advance).
"""

from math import inf

import numpy as np
from scipy.special import ndtr

from bench.queueing.gangs import GangPolicy, GangSimulation, Numbers

_CANDIDATES = 80  # of the knapsack, which is the more exact the more there are
# Octaves of GPU-seconds; the first goes to 2,048, below which it costs more to change the order than it gains.
_OCTAVES = 30
_EDGES = 1024.0 * 2.0 ** np.arange(1, _OCTAVES + 1)
_LENGTHS = np.diff(_EDGES, prepend=0.0)
# A prior of a declining hazard: so many ends in each octave, as if half of the jobs that reach it ended there.
_PRIOR_ENDS = 0.5


class FastestEnds(GangPolicy):
    """Runs the set of jobs that ends work fastest: the largest sum of 1 / remaining time that fits.

    Where the remaining time is known the set is the optimum of a knapsack over the GPUs of the cluster among the jobs
    with the least remaining GPU-seconds. With estimates it is the greedy one, by the least expected GPU-seconds: an
    optimum over wrong values was worse than that on Muri's first simulator trace.
    """

    def __init__(self, estimates_s: Numbers | None = None, spread: float = 0.0) -> None:
        super().__init__()
        self._estimates_s, self._spread = estimates_s, spread

    def rank(self, simulation: GangSimulation) -> list[int]:
        """Returns the jobs of the set, the largest first, then the others by remaining GPU-seconds."""
        order, trace = np.array(self.order, dtype=np.int64), simulation.trace
        if self._estimates_s is None:
            rest_s = simulation.remaining[order] * trace.iteration_s[order]
        else:
            rest_s = expected_rest_s(self._estimates_s[order], simulation.attained_s[order], self._spread)
        ranked = np.argsort(rest_s * trace.gpus[order], kind="stable")
        self.order = [self.order[place] for place in ranked.tolist()]
        if self._estimates_s is not None:
            return self.order
        gpus, rates = trace.gpus[order[ranked]], 1.0 / np.maximum(rest_s[ranked[:_CANDIDATES]], 1.0)
        chosen = choose_set(gpus[:_CANDIDATES].tolist(), rates, simulation.nodes * simulation.gpus_per_node)
        first = sorted(chosen, key=lambda place: -int(gpus[place]))
        others = sorted(set(range(len(gpus))).difference(chosen))
        return [self.order[place] for place in first + others]


def choose_set(gpus: list[int], values: Numbers, total: int) -> list[int]:
    """Returns the places of the set with the largest sum of values whose GPUs are at most the total."""
    best = np.zeros(total + 1)
    takes = np.zeros((len(gpus), total + 1), dtype=bool)
    for place, (size, value) in enumerate(zip(gpus, values.tolist(), strict=True)):
        if size > total:
            continue
        with_it = best[: total + 1 - size] + value
        takes[place, size:] = with_it > best[size:]
        best[size:] = np.maximum(best[size:], with_it)
    chosen, left = [], total
    for place in range(len(gpus) - 1, -1, -1):
        if takes[place, left]:
            chosen.append(place)
            left -= gpus[place]
    return chosen[::-1]


def expected_rest_s(estimate_s: Numbers, attained_s: Numbers, spread: float) -> Numbers:
    """Returns E[S - a | S > a] of log-normal run times whose medians are the estimates."""
    if not spread:
        return estimate_s - attained_s
    middle, age = np.log(estimate_s), np.log(np.maximum(attained_s, 1e-9))
    survival = ndtr((middle - age) / spread)
    above = np.exp(middle + 0.5 * spread**2) * ndtr((middle + spread**2 - age) / spread)
    # Far beyond the estimate both vanish: there the rest is about the age times spread^2 / log(age / estimate).
    far_s = attained_s * spread**2 / np.maximum(age - middle, spread**2)
    rest_s: Numbers = np.where(survival > 1e-12, above / np.maximum(survival, 1e-300) - attained_s, far_s)
    return rest_s


class LearnedIndex(GangPolicy):
    """The largest Gittins index first, learned from what has ended and what has run so far."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: list[int] = []
        self._ends = np.full(_OCTAVES, _PRIOR_ENDS)
        # What a prior job attains in each octave: half of its length in the mean.
        self._service = _PRIOR_ENDS * _LENGTHS
        self._finished_service = np.zeros(_OCTAVES)

    def finish(self, job: int) -> None:
        """A job ends, from which the next decision learns."""
        super().finish(job)
        self._ended.append(job)

    def rank(self, simulation: GangSimulation) -> list[int]:
        """Ranks by the index; ties, as within an octave, stay in the last order, with what runs in front."""
        gpus = simulation.trace.gpus
        for job in self._ended:
            attained = np.array([simulation.attained_s[job] * gpus[job]])
            self._ends[_octaves(attained)] += 1.0
            self._finished_service += _spread_service(attained)
        self._ended.clear()
        if not self.order:
            return []
        order = np.array(self.order)
        attained = simulation.attained_s[order] * gpus[order]
        service = self._service + self._finished_service + _spread_service(attained)
        index = gittins_indices(self._ends / service)[_octaves(attained)]
        ranked = np.lexsort((~simulation.is_running[order], -index))
        self.order = [self.order[place] for place in ranked.tolist()]
        return self.order

    def next_change_s(self, simulation: GangSimulation) -> float:
        """Returns when the first running job enters the next octave."""
        running = np.flatnonzero(simulation.is_running)
        if not len(running):
            return inf
        gpus = simulation.trace.gpus[running]
        attained = simulation.attained_s[running] * gpus
        left = np.maximum(_EDGES[_octaves(attained)] - attained, 1e-3)
        return float(simulation.now_s + (left / gpus).min() + 1e-6)


def _octaves(attained: Numbers) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.searchsorted(_EDGES, attained, side="right")
    return np.minimum(found, _OCTAVES - 1)


def _spread_service(attained: Numbers) -> Numbers:
    """Returns what was attained in each octave, summed over jobs."""
    return np.diff(np.minimum(attained[:, None], _EDGES).sum(axis=0), prepend=0.0)


def gittins_indices(hazard: Numbers) -> Numbers:
    """Returns the index at the begin of each octave, for a hazard that is constant within each."""
    count = len(hazard)
    reached = np.concatenate(([0.0], np.cumsum(hazard * _LENGTHS[:count])))
    # By begin and octave: the share that is left at the octave's begin, and at its end.
    is_later = np.arange(count)[:, None] <= np.arange(count)
    left = np.where(is_later, np.exp(-np.maximum(reached[:-1] - reached[:-1, None], 0.0)), 0.0)
    still = np.where(is_later, np.exp(-np.maximum(reached[1:] - reached[:-1, None], 0.0)), 0.0)
    service = np.cumsum((left - still) / hazard, axis=1)
    found: Numbers = np.where(is_later, (1.0 - still) / np.maximum(service, 1e-300), 0.0).max(axis=1)
    return found
