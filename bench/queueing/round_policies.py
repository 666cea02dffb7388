"""Who runs in a round: Gavel's mechanism with four peers' shares, and ours, by laxity.

Owns the rules. Peers compute shares of time after an arrival or an end, but at most every 1,000 s, then give each round
to the jobs with the largest share over the time received since. A job that came after the last computation takes its
turn with the least, and the GPUs it is given stay idle, as published. Ours needs no solver: a job is due when its
finish-time fairness would reach a goal, or when all work could be done, whichever is earlier, and the job with the
least laxity (time until due less the rest of its run time) goes first. Must not look at epochs that have not begun,
unless told that it knows them.

Theory: an interior-point solver that has many optimal shares to choose from returns the analytic centre of the set of
optima (Boyd and Vandenberghe, section 11), so that the published shares come out without the solver. Least laxity
first is optimal on one processor and meets deadlines that shortest-remaining orders miss; the common due date in the
end is what keeps long jobs running, and so the makespan short (longest remaining time first).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from bench.queueing.dynamic_jobs import JobProgress
from bench.queueing.gangs import Numbers
from bench.queueing.rounds import GPUS, ROUND_S, RoundState, fit_jobs

# Computes a share of time for each active job.
Shares = Callable[[RoundState], Sequence[float]]
_LEAST_BETWEEN_S = 1000.0
# What a job counts as received when shares are new, so that the first rounds do not decide alone.
_RECEIVED_AT_FIRST_S = ROUND_S / 2.0


@dataclass
class _Account:
    """What a job received since shares were computed, and what it was owed before."""

    share: float | None = None
    received_s: float = _RECEIVED_AT_FIRST_S
    owed_s: float = 0.0


class SharesInRounds:
    """Gavel's mechanism: the largest share over the time received since shares were computed goes first."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._accounts: dict[int, _Account] = {}
        self._ran: list[JobProgress] = []
        self._computed_s = 0.0
        self._is_stale = False

    def __call__(self, state: RoundState) -> list[JobProgress]:
        """Returns the jobs that run."""
        for progress in self._ran:
            self._accounts[progress.job.index].received_s += progress.last_run_s
        known = {progress.job.index: progress for progress in state.active}
        self._is_stale |= known.keys() != self._accounts.keys()
        self._accounts = {index: self._accounts.get(index, _Account()) for index in known}
        if self._is_stale and (state.now_s - self._computed_s >= _LEAST_BETWEEN_S or not self._computed_s):
            self._compute(state)
        ranked = sorted(state.active, key=self._key, reverse=True)
        self._ran = [one for one in fit_jobs(ranked) if self._accounts[one.job.index].share is not None]
        return self._ran

    def _key(self, progress: JobProgress) -> tuple[float, float, float]:
        account = self._accounts[progress.job.index]
        share = account.share or 0.0
        return share / account.received_s, account.owed_s, share

    def _compute(self, state: RoundState) -> None:
        since_s = state.now_s - self._computed_s
        for progress, share in zip(state.active, self._shares(state), strict=True):
            account = self._accounts[progress.job.index]
            account.owed_s += (account.share or 0.0) * since_s - (account.received_s - _RECEIVED_AT_FIRST_S)
            account.share, account.received_s = share, _RECEIVED_AT_FIRST_S
        self._computed_s, self._is_stale = state.now_s, False


def centre_shares(least: Numbers, gpus: Numbers, weight: float = 1.0) -> Numbers:
    """Returns the analytic centre of the shares x with least <= x <= 1 and sum(gpus x) <= GPUS.

    It maximises weight sum(log(x - least)) + sum(log(1 - x)) + log(GPUS - sum(gpus x)), by bisection on the price of a
    GPU, which is one over those left.
    """
    shares, is_free = np.minimum(least, 1.0), least < 1.0 - 1e-7
    spare = GPUS - float((gpus * shares).sum())
    if spare <= 1e-6 or not is_free.any():
        return shares
    floor, needs = shares[is_free], gpus[is_free]

    def at_price(price: float) -> Numbers:
        # The root of weight / (x - floor) - 1 / (1 - x) = needs price that lies between floor and 1.
        cost, width = needs * price, 1.0 - floor
        middle = weight + 1.0 + cost * width
        return np.asarray(2.0 * weight * width / (middle + np.sqrt(middle**2 - 4.0 * weight * cost * width)) + floor)

    cheap, dear = 1e-9, 1e9
    for _ in range(100):
        price = (cheap * dear) ** 0.5
        left = spare - float((needs * (at_price(price) - floor)).sum())
        cheap, dear = (price, dear) if left <= 0.0 or price * left < 1.0 else (cheap, price)
    shares[is_free] = at_price(dear)
    return shares


def share_max_min(state: RoundState) -> Sequence[float]:
    """Gavel: shares whose least GPU-time is largest."""
    gpus = _list_gpus(state)
    least = min(float(gpus.min()), GPUS / len(gpus))
    return centre_shares(least / gpus, gpus).tolist()


def share_equally(state: RoundState) -> Sequence[float]:
    """Gandiva-fair: the same share for each, however many GPUs it takes."""
    return [min(1.0, GPUS / len(state.active))] * len(state.active)


class ShareFinishTimes:
    """Themis: shares that minimise the largest ratio of the finish time to that with an equal part of the GPUs.

    Steps are counted as they are, so that a change of the batch size counts as work done or undone, as published.
    """

    def __init__(self) -> None:
        self._alone_s: dict[int, float] = {}
        self._before: dict[int, tuple[int, float]] = {}

    def __call__(self, state: RoundState) -> Sequence[float]:
        """Returns the shares of the active jobs."""
        gpus, left_s = _list_gpus(state), np.array([one.left_s for one in state.active])
        age_s = np.array([state.now_s - one.job.arrival_s for one in state.active])
        parts = np.minimum(1.0, GPUS / len(gpus) / gpus)
        alone_s = left_s / parts
        for place, progress in enumerate(state.active):
            index = progress.job.index
            if index in self._before:
                left_before, rate_before = self._before[index]
                spent_s = (left_before - progress.left_steps) / rate_before
                self._alone_s[index] = self._alone_s.get(index, 0.0) + spent_s
            alone_s[place] += self._alone_s.get(index, 0.0)
        self._before = {
            one.job.index: (one.left_steps, one.rate * part)
            for one, part in zip(state.active, parts.tolist(), strict=True)
        }
        return centre_shares(_least_for_ratio(age_s, left_s, alone_s, gpus), gpus, weight=2.0).tolist()


def _least_for_ratio(age_s: Numbers, left_s: Numbers, alone_s: Numbers, gpus: Numbers) -> Numbers:
    """The shares that just reach the least ratio (age + left / share) / alone which all jobs can have."""

    def at_ratio(ratio: float) -> Numbers:
        return left_s / np.maximum(ratio * alone_s - age_s, left_s)

    low = high = float(((age_s + left_s) / alone_s).max())
    while float((gpus * at_ratio(high)).sum()) > GPUS:
        low, high = high, 2.0 * high
    for _ in range(60 if high > low else 0):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if float((gpus * at_ratio(middle)).sum()) > GPUS else (low, middle)
    return np.asarray(at_ratio(high))


class AssignToQueues:
    """AlloX: the assignment of the oldest jobs to places in the GPUs' queues with the least sum of finish times.

    Whoever is first in a queue has its GPUs whole until it ends; the others are assigned anew each time.
    """

    _PART = 0.2  # of the waiting jobs is looked at, or one for each GPU

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}

    def __call__(self, state: RoundState) -> Sequence[float]:
        """Returns the shares of the active jobs."""
        shares = {one.job.index: self._shares.get(one.job.index, 0.0) for one in state.active}
        waiting = [one for one in state.active if shares[one.job.index] != 1.0]
        queues = GPUS - (len(state.active) - len(waiting))
        looked_at = waiting[: max(int(self._PART * len(waiting)), queues)]
        if looked_at and queues:
            left_s = np.array([[one.left_s] for one in looked_at])
            age_s = np.array([[state.now_s - one.job.arrival_s] for one in looked_at])
            places = np.repeat(np.arange(1, len(looked_at) + 1), queues)
            chosen = linear_sum_assignment(left_s * places + age_s)
            last = dict[int, tuple[int, JobProgress]]()
            for row, column in zip(*chosen, strict=True):
                place, queue = divmod(int(column), queues)
                # The last place of a queue runs first.
                if queue not in last or place > last[queue][0]:
                    last[queue] = place, looked_at[row]
            for _, one in last.values():
                shares[one.job.index] = 1.0 / one.job.gpus
        self._shares = shares
        return list(shares.values())


def _list_gpus(state: RoundState) -> Numbers:
    return np.array([float(one.job.gpus) for one in state.active])


class LeastLaxity:
    """Ours: the least laxity first, to finish-time fairness `goal` and to the time by which all work could be done.

    `knows` lets it see the epochs to come, as Shockwave's own predictor nearly does; without, the present batch size
    stays. `stretch` is how much later than the bound of what is known now all work is due; `stay_rounds` is how much
    laxity a job that ran in the round before is credited with, so that restarts stay few.
    """

    def __init__(self, *, knows: bool, goal: float = 0.9, stretch: float = 1.2, stay_rounds: float = 3.0) -> None:
        self._knows = knows
        self._goal, self._stretch, self._stay_s = goal, stretch, stay_rounds * ROUND_S

    def __call__(self, state: RoundState) -> list[JobProgress]:
        """Returns the jobs that run."""
        gpus = _list_gpus(state)
        left_s = np.array([one.planned_left_s if self._knows else one.left_s for one in state.active])
        arrival_s = np.array([one.job.arrival_s for one in state.active])
        run_s = np.array([one.run_s for one in state.active])
        ran_before = np.array([one.job.index in state.ran_before for one in state.active])
        whole_s = max(float((left_s * gpus).sum()) / GPUS, float(left_s.max()))
        due_s = arrival_s + self._goal * state.contention * (run_s + left_s)
        due_s = np.minimum(due_s, state.now_s + self._stretch * whole_s)
        laxity_s = due_s - state.now_s - left_s - self._stay_s * ran_before
        return fit_jobs([state.active[place] for place in np.argsort(laxity_s, kind="stable").tolist()])
