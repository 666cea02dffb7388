"""Rounds of 120 s on 32 GPUs: Shockwave's simulator, in which whoever is chosen keeps its GPUs for a round.

Owns rounds and fairness. A job does as many whole steps as a round holds; the next round begins when the last of its
jobs is through, so rounds are a little shorter than 120 s, and much shorter when all are at their end. A job that did
not run in the round before loses 20 s (checkpoint and resume), its first start included, but not in the first round of
all, nor where it needs less than 115 s to its end. Must not know how jobs are chosen, nor what changes a
batch size.

Finish-time fairness of a job is its JCT over its time alone times the contention, the GPUs that all jobs together ask
for over those there are (120 jobs on 32 GPUs: 3.75); above 1.05 a job counts as treated unfairly (Zheng et al., NSDI
2023, aggregate_result.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.queueing.dynamic_jobs import DynamicJob, JobProgress
from bench.queueing.gangs import Numbers

ROUND_S = 120.0
RESTART_S = 20.0
# A restart is not charged to a job that runs no longer than this in the round: it is at its end.
_SHORT_RUN_S = ROUND_S - 5.0
GPUS = 32
UNFAIR_ABOVE = 1.05


def compute_contention(jobs: Sequence[DynamicJob]) -> float:
    """Returns the jobs to a GPU, as the publication counts, at least 1."""
    return max(1.0, len(jobs) / GPUS)


def bound_makespan_s(jobs: Sequence[DynamicJob]) -> float:
    """Returns what no schedule can undercut if batch sizes follow their plan."""
    work_s = sum(job.alone_s * job.gpus for job in jobs) / GPUS
    return max(work_s, *(job.arrival_s + job.alone_s for job in jobs))


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


@dataclass
class RoundState:
    """What a policy may look at when a round begins."""

    round: int
    now_s: float
    contention: float
    active: list[JobProgress]  # arrived and not ended, in the order of arrival
    ran_before: set[int]  # by index, in the round before


# Returns the jobs that run, which must fit together.
Choose = Callable[[RoundState], list[JobProgress]]


def fit_jobs(ranked: Sequence[JobProgress]) -> list[JobProgress]:
    """Returns the jobs that get GPUs, the first first; what does not fit is skipped."""
    free, chosen = GPUS, list[JobProgress]()
    for progress in ranked:
        if progress.job.gpus <= free:
            free -= progress.job.gpus
            chosen.append(progress)
    return chosen


class RoundSimulation:
    """Jobs, in the order of arrival, under a policy."""

    def __init__(self, jobs: Sequence[DynamicJob], choose: Choose) -> None:
        self._jobs, self._choose = jobs, choose
        self._waiting = list(jobs)
        self._state = RoundState(0, jobs[0].arrival_s, compute_contention(jobs), [], set())
        self._end_s = np.full(len(jobs), np.inf)

    def run(self) -> RoundsRun:
        """Plays rounds until all jobs have ended. Raises ValueError if none runs that could, or they do not fit."""
        state = self._state
        while self._waiting or state.active:
            while self._waiting and self._waiting[0].arrival_s <= state.now_s:
                state.active.append(JobProgress(self._waiting.pop(0)))
            chosen = self._choose(state) if state.active else []
            if sum(progress.job.gpus for progress in chosen) > GPUS:
                raise ValueError(f"the jobs chosen for round {state.round} need more than {GPUS} GPUs")
            if chosen:
                self._run_round(chosen)
            elif self._waiting:
                state.now_s = max(state.now_s, self._waiting[0].arrival_s)
            else:
                raise ValueError(f"no job runs in round {state.round}, and {len(state.active)} have not ended")
            state.ran_before = {progress.job.index for progress in chosen}
            state.round += 1
        arrival_s = np.array([job.arrival_s for job in self._jobs])
        alone_s = np.array([job.alone_s for job in self._jobs])
        jct_s = self._end_s - arrival_s
        return RoundsRun(self._end_s, jct_s, jct_s / (alone_s * compute_contention(self._jobs)))

    def _run_round(self, chosen: list[JobProgress]) -> None:
        state, begin_s = self._state, self._state.now_s
        for progress in chosen:
            steps = min(int(progress.rate * ROUND_S), progress.left_steps)
            end_s = max(begin_s + steps / progress.rate, begin_s)
            run_s = end_s - begin_s
            if state.round and progress.job.index not in state.ran_before and run_s > _SHORT_RUN_S:
                steps = int(steps * ((run_s - RESTART_S) / run_s))
                run_s -= RESTART_S
            state.now_s = max(state.now_s, end_s)
            if progress.end_round(steps, run_s):
                self._end_s[progress.job.index] = end_s
        state.active = [progress for progress in state.active if self._end_s[progress.job.index] == np.inf]
        for progress in state.active:
            progress.request_batch_size()


def replay_schedule(jobs: Sequence[DynamicJob], rounds_of: Sequence[Sequence[int]]) -> RoundsRun:
    """Plays a published schedule: the rounds that each job ran in. Raises ValueError if jobs do not end by it."""
    planned = [set(rounds) for rounds in rounds_of]

    def choose(state: RoundState) -> list[JobProgress]:
        return [progress for progress in state.active if state.round in planned[progress.job.index]]

    return RoundSimulation(jobs, choose).run()
