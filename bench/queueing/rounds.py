"""Dynamic jobs in rounds of 120 s: a simulation of Shockwave's setting, in which batch sizes change while a job runs.

Owns jobs, rounds and fairness. Every job keeps its GPUs for a round; one that did not run in the round before loses the
first 20 s (checkpoint and resume), its very first start excepted, as in the published schedules. A job's time follows
its epochs: each has the time that its batch size takes alone. Must not know how jobs are chosen.

Finish-time fairness of a job is its JCT over its time alone times the contention, the GPUs that all jobs together ask
for over those there are (120 jobs on 32 GPUs: 3.75); above 1.05 a job counts as treated unfairly (Zheng et al., NSDI
2023, aggregate_result.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bench.queueing.gangs import Numbers

ROUND_S = 120.0
RESTART_S = 20.0
GPUS = 32
UNFAIR_ABOVE = 1.05


@dataclass(frozen=True)
class DynamicJobs:
    """Jobs by index, in the order of arrival; `epochs_s` is the time of each epoch alone, in seconds."""

    arrival_s: Numbers
    gpus: np.ndarray[tuple[int], np.dtype[np.int64]]
    epochs_s: tuple[Numbers, ...]

    @cached_property
    def epoch_ends_s(self) -> tuple[Numbers, ...]:
        """When each epoch ends, in the time of a job alone."""
        return tuple(np.cumsum(one) for one in self.epochs_s)

    @cached_property
    def alone_s(self) -> Numbers:
        """The time of each job alone on its GPUs."""
        return np.array([float(one[-1]) for one in self.epoch_ends_s])

    @property
    def contention(self) -> float:
        """Jobs to a GPU, as the publication counts, at least 1."""
        return max(1.0, len(self.gpus) / GPUS)

    def bound_makespan_s(self) -> float:
        """Returns what no schedule of these jobs can undercut."""
        return max(float((self.alone_s * self.gpus).sum()) / GPUS, float((self.arrival_s + self.alone_s).max()))


@dataclass(frozen=True)
class RoundsRun:
    """When each job ended, and its finish-time fairness."""

    end_s: Numbers
    jct_s: Numbers
    ftf: Numbers

    def figures(self) -> dict[str, float]:
        """The figures of the publication."""
        return {
            "makespan_s": float(self.end_s.max()),
            "avg_jct_s": float(self.jct_s.mean()),
            "worst_ftf": float(self.ftf.max()),
            "unfair_pct": 100.0 * float((self.ftf > UNFAIR_ABOVE).mean()),
        }


def describe_run(jobs: DynamicJobs, end_s: Numbers) -> RoundsRun:
    """Returns what follows from the ends."""
    jct_s = end_s - jobs.arrival_s
    return RoundsRun(end_s, jct_s, jct_s / (jobs.alone_s * jobs.contention))


@dataclass
class RoundState:
    """What a policy may look at when a round begins."""

    jobs: DynamicJobs
    round: int
    now_s: float
    active: list[int]  # arrived and not ended, by index
    done_s: Numbers  # of each job's time alone
    ran_before: np.ndarray[tuple[int], np.dtype[np.bool_]]  # in the round before
    rounds_run: Numbers


Choose = Callable[[RoundState], Sequence[int]]


def simulate_rounds(jobs: DynamicJobs, choose: Choose) -> RoundsRun:
    """Plays rounds until all jobs have ended; `choose` ranks the active jobs, and what does not fit is skipped."""
    count, alone_s = len(jobs.gpus), jobs.alone_s
    state = RoundState(jobs, 0, 0.0, [], np.zeros(count), np.zeros(count, dtype=bool), np.zeros(count))
    end_s = np.full(count, np.inf)
    while not np.isfinite(end_s).all():
        state.now_s = state.round * ROUND_S
        state.active = [job for job in range(count) if jobs.arrival_s[job] <= state.now_s and end_s[job] == np.inf]
        free, chosen = GPUS, list[int]()
        for job in choose(state):
            if jobs.gpus[job] <= free:
                free -= int(jobs.gpus[job])
                chosen.append(job)
        _run_round(state, chosen, alone_s, end_s)
        state.round += 1
    return describe_run(jobs, end_s)


def _run_round(state: RoundState, chosen: Sequence[int], alone_s: Numbers, end_s: Numbers) -> None:
    ran = np.zeros(len(alone_s), dtype=bool)
    for job in chosen:
        lost_s = 0.0 if state.ran_before[job] or not state.rounds_run[job] else RESTART_S
        left_s = float(alone_s[job] - state.done_s[job])
        if left_s <= ROUND_S - lost_s + 1e-9:
            end_s[job] = state.now_s + lost_s + left_s
        state.done_s[job] += min(left_s, ROUND_S - lost_s)
        state.rounds_run[job] += 1
        ran[job] = True
    state.ran_before = ran


def replay_schedule(jobs: DynamicJobs, rounds_of: Sequence[Sequence[int]]) -> RoundsRun:
    """Plays a published schedule: the rounds that each job ran in. What is left after the last runs on from there."""
    count, alone_s = len(jobs.gpus), jobs.alone_s
    end_s = np.empty(count)
    for job in range(count):
        left_s, before, end = float(alone_s[job]), -1, np.inf
        for number in rounds_of[job]:
            lost_s = RESTART_S if 0 <= before != number - 1 else 0.0
            if left_s <= ROUND_S - lost_s + 1e-9:
                end = number * ROUND_S + lost_s + left_s
                break
            left_s -= ROUND_S - lost_s
            before = number
        end_s[job] = end if end < np.inf else (before + 1) * ROUND_S + left_s
    return describe_run(jobs, end_s)
