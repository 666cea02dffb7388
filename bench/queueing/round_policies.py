"""Who runs in a round: Gavel's mechanism for max-min shares and finish-time fairness, and ours, by laxity.

Owns the rules. Peers compute shares of time whenever a job arrives or ends, then give each round to the jobs with the
largest share over what they received since. Ours needs no solver: a job is due when its finish-time fairness would
reach a goal, or when all work could be done, whichever is earlier, and the job with the least laxity (time until due
less the rest of its run time) goes first. Must not look at epochs that have not begun, unless told that it knows them.

Theory: least laxity first is optimal on one processor and meets deadlines that shortest-remaining orders miss; the
common due date in the end is what keeps long jobs running, and so the makespan short (longest remaining time first).
"""

from collections.abc import Callable, Sequence

import numpy as np

from bench.queueing.gang_policies import minimise_ratio
from bench.queueing.gangs import Numbers
from bench.queueing.rounds import GPUS, ROUND_S, RoundState

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]
Shares = Callable[[RoundState, Indices], Numbers]


class SharesInRounds:
    """Gavel's mechanism: the largest share over the time received since shares were computed goes first."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._active: list[int] = []
        self._share: dict[int, float] = {}
        self._received: dict[int, int] = {}
        self._owed: dict[int, float] = {}
        self._rounds = 0

    def __call__(self, state: RoundState) -> Sequence[int]:
        """Ranks the active jobs."""
        self._rounds += 1
        for job in self._active:
            self._received[job] += int(state.ran_before[job])
        if state.active != self._active:
            self._reset(state)
        keys = {job: (self._urgency(job), self._owed.get(job, 0.0), self._share[job]) for job in state.active}
        return sorted(state.active, key=keys.__getitem__, reverse=True)

    def _urgency(self, job: int) -> float:
        received = self._received[job]
        return self._share[job] * (1e9 if not received else self._rounds / received)

    def _reset(self, state: RoundState) -> None:
        for job in self._active:
            self._owed[job] = self._owed.get(job, 0.0) + self._share[job] * self._rounds - self._received[job]
        jobs = np.array(state.active, dtype=np.int64)
        shares = self._shares(state, jobs) if len(jobs) else np.empty(0)
        self._active = list(state.active)
        self._share = dict(zip(state.active, shares.tolist(), strict=True))
        self._received = dict.fromkeys(state.active, 0)
        self._rounds = 0


def share_max_min(state: RoundState, jobs: Indices) -> Numbers:
    """Returns shares of time with equal GPU-seconds, as far as a job can use them."""
    gpus = state.jobs.gpus[jobs]
    low, high = 0.0, float(gpus.max())
    for _ in range(60):
        middle = 0.5 * (low + high)
        fits = float((gpus * np.minimum(1.0, middle / gpus)).sum()) <= GPUS
        low, high = (middle, high) if fits else (low, middle)
    return np.minimum(1.0, low / gpus)


class ShareFinishTimes:
    """Themis: shares that minimise the largest ratio of the finish time to that with an equal part of the GPUs."""

    def __init__(self) -> None:
        self._alone_s: dict[int, float] = {}
        self._before: dict[int, tuple[float, float]] = {}

    def __call__(self, state: RoundState, jobs: Indices) -> Numbers:
        """Returns the shares of the active jobs."""
        gpus, left_s = state.jobs.gpus[jobs], predict_rest_s(state, jobs)
        part = np.minimum(1.0, GPUS / len(jobs) / gpus)
        for job, one_part in zip(jobs.tolist(), part.tolist(), strict=True):
            done_s = float(state.done_s[job])
            if job in self._before:
                was_done_s, was_part = self._before[job]
                self._alone_s[job] = self._alone_s.get(job, 0.0) + (done_s - was_done_s) / was_part
            self._before[job] = done_s, one_part
        alone_s = np.array([self._alone_s.get(job, 0.0) for job in jobs.tolist()]) + left_s / part
        age_s = state.now_s - state.jobs.arrival_s[jobs]
        return minimise_ratio(age_s, np.maximum(left_s, 1.0), np.maximum(alone_s, 1.0), gpus, GPUS)


def predict_rest_s(state: RoundState, jobs: Indices) -> Numbers:
    """Returns the rest of run times if the batch size of the present epoch stays; the number of epochs is known."""
    found = np.empty(len(jobs))
    for place, job in enumerate(jobs.tolist()):
        epochs_s = state.jobs.epochs_s[job]
        ends_s = state.jobs.epoch_ends_s[job]
        done_s = float(state.done_s[job])
        now = min(int(np.searchsorted(ends_s, done_s + 1e-9, side="right")), len(epochs_s) - 1)
        found[place] = (ends_s[now] - done_s) + (len(epochs_s) - 1 - now) * epochs_s[now]
    return found


class LeastLaxity:
    """Ours: the least laxity first, to finish-time fairness `goal` and to the time by which all work could be done.

    `knows` lets it see the epochs to come, as Shockwave's own predictor nearly does; without, the present batch size
    stays. `stretch` is how much later than the bound of what is known now all work is due; `stay_rounds` is how much
    laxity a job that ran in the round before is credited with, so that restarts stay few.
    """

    def __init__(self, *, knows: bool, goal: float = 0.9, stretch: float = 1.2, stay_rounds: float = 3.0) -> None:
        self._knows = knows
        self._goal, self._stretch, self._stay_s = goal, stretch, stay_rounds * ROUND_S

    def __call__(self, state: RoundState) -> Sequence[int]:
        """Ranks the active jobs."""
        jobs = np.array(state.active, dtype=np.int64)
        if not len(jobs):
            return []
        gpus, done_s = state.jobs.gpus[jobs], state.done_s[jobs]
        left_s = state.jobs.alone_s[jobs] - done_s if self._knows else predict_rest_s(state, jobs)
        alone_s = done_s + left_s
        whole_s = max(float((left_s * gpus).sum()) / GPUS, float(left_s.max()))
        due_s = state.jobs.arrival_s[jobs] + self._goal * state.jobs.contention * alone_s
        due_s = np.minimum(due_s, state.now_s + self._stretch * whole_s)
        laxity_s = due_s - state.now_s - left_s - self._stay_s * state.ran_before[jobs]
        return [state.active[place] for place in np.argsort(laxity_s, kind="stable").tolist()]
