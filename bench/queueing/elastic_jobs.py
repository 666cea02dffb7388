"""Elastic jobs with deadlines: admission by a plan of the least GPUs, and what is idle to whom it helps most.

Owns the simulation of ElasticFlow's setting (Gu et al., ASPLOS 2023): a job may run on 1, 2, 4 .. 64 GPUs at a measured
rate; GPUs change hands at the ends of slots; a job that is admitted but late counts as missed. What a decision costs is that
of the published simulator. Must not know where the jobs come from.

Which numbers of GPUs are worth it, and which are enough, is asked of the product (queueing/elastic_shares.py). A plan
gives every admitted job, in some order, the least constant number of GPUs (less where fewer are free) with which it meets
its deadline in what the jobs before it left free. Ours tries several orders before it declines, since the order decides
and any plan is a proof. ElasticFlow's own plans and decisions are in `elasticflow_rules`.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from eelgrid_controller.queueing.elastic_shares import ScalingCurve, make_curve

SLOT_S = 60.0
LEVELS = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class ElasticJob:
    """A job and how far it is; `rates` are iterations a second by level, 0 where it cannot run."""

    index: int
    submit_s: float
    deadline_s: float
    iterations: float
    rates: tuple[float, ...]
    profiled_gpus: int = LEVELS[-1]  # the most that the published simulator gives it
    curve: ScalingCurve = field(init=False)
    useful: tuple[int, ...] = field(init=False)  # levels of the curve by number, each faster than all below
    fitting: tuple[int, ...] = field(init=False)  # by free GPUs, the largest useful level; -1 for none
    left: float = field(init=False)
    gpus: int = 0

    def __post_init__(self) -> None:
        self.left = self.iterations
        curve = make_curve({LEVELS[level]: rate for level, rate in enumerate(self.rates) if rate})
        assert curve is not None, "a job runs on some number of GPUs"
        self.curve = curve
        self.useful = found = tuple(map(LEVELS.index, curve.workers))
        self.fitting = tuple(
            max((level for level in found if LEVELS[level] <= free), default=-1) for free in range(LEVELS[-1] + 1)
        )

    @property
    def levels(self) -> list[int]:
        """All levels at which the job can run, faster or not."""
        return [level for level, rate in enumerate(self.rates) if rate]

    def rate_of(self, gpus: int) -> float:
        """Iterations a second on a number of GPUs that is a level, or 0."""
        return self.rates[gpus.bit_length() - 1] if gpus else 0.0


class PlanOrder(Enum):
    """In which order a plan serves jobs."""

    DEADLINE = "deadline"
    LAXITY = "laxity"  # time to the deadline less the shortest run time
    NEWEST_LAST = "newest last"


class FreeProfile:
    """The GPUs that are free over time: constant from each moment to the next, the last without end."""

    def __init__(self, now_s: float, gpus: int, slot_s: float = SLOT_S) -> None:
        self.times_s, self.free = [now_s], [gpus]
        self._slot_s = slot_s

    def cut(self, at_s: float) -> int:
        """Makes a moment begin a piece; returns the piece."""
        place = bisect_left(self.times_s, at_s)
        if place == len(self.times_s) or self.times_s[place] != at_s:
            self.times_s.insert(place, at_s)
            self.free.insert(place, self.free[place - 1])
        return place

    def reserve(self, job: ElasticJob) -> int | None:
        """Takes the least GPUs with which the job meets its deadline; returns those of now, None if it cannot."""
        due_s, begin_s = job.deadline_s, self.times_s[0]
        until = bisect_left(self.times_s, due_s)
        edges_s = [*self.times_s[:until], due_s]
        # The others are too slow even if the job is alone.
        for most in job.curve.list_sufficient(job.left, due_s - begin_s):
            left, takes = job.left, list[int]()
            for piece in range(until):
                take = job.fitting[min(self.free[piece], most)]
                takes.append(take)
                if take < 0:
                    continue
                rate, start_s = job.rates[take], edges_s[piece]
                if left <= rate * (edges_s[piece + 1] - start_s) + 1e-6:
                    # GPUs are free again at the end of the slot.
                    self._take(takes, -(-(start_s + left / rate) // self._slot_s) * self._slot_s)
                    return LEVELS[takes[0]] if takes[0] >= 0 else 0
                left -= rate * (edges_s[piece + 1] - start_s)
        return None

    def _take(self, takes: list[int], end_s: float) -> None:
        last = len(takes) - 1
        if end_s > self.times_s[last]:
            stop = self.cut(end_s)
            # The slot's end may lie beyond the next moments, after the deadline.
            takes = takes + [takes[last]] * (stop - len(takes))
        for piece, take in enumerate(takes):
            if take >= 0:
                self.free[piece] -= min(LEVELS[take], self.free[piece])


@dataclass
class ElasticPlan:
    """A plan: in which order jobs were served, what is left free, the GPUs of each job now, and who cannot be planned."""

    sequence: list[ElasticJob]
    profile: FreeProfile
    gpus: dict[int, int]
    failed: list[ElasticJob]


def plan_jobs(sequence: list[ElasticJob], now_s: float, gpus: int, slot_s: float = SLOT_S) -> ElasticPlan:
    """Plans jobs one after the other."""
    plan = ElasticPlan(sequence, FreeProfile(now_s, gpus, slot_s), {}, [])
    for job in sequence:
        now = plan.profile.reserve(job) if job.deadline_s > now_s else None
        if now is None:
            plan.failed.append(job)
        else:
            plan.gpus[job.index] = now
    return plan


def sort_jobs(jobs: Iterable[ElasticJob], order: PlanOrder) -> list[ElasticJob]:
    """Returns the jobs in an order."""
    return sorted(jobs, key=lambda job: _order_key(job, order))


def _order_key(job: ElasticJob, order: PlanOrder) -> tuple[float, float]:
    if order is PlanOrder.LAXITY:
        return job.deadline_s - job.left / max(job.rates), job.deadline_s
    if order is PlanOrder.NEWEST_LAST:
        return job.submit_s, job.deadline_s
    return job.deadline_s, job.submit_s


def share_idle(jobs: Iterable[ElasticJob], gpus: dict[int, int], total: int) -> None:
    """Gives idle GPUs, level by level, to the job that shortens its rest most for a GPU."""
    free = total - sum(gpus.values())
    waiting = list[tuple[float, int, int, ElasticJob]]()

    def offer(job: ElasticJob) -> None:
        now = gpus[job.index]
        level = next((one for one in job.useful if LEVELS[one] > now), None)
        if level is not None:
            gain = (job.rates[level] - job.rate_of(now)) / job.left / (LEVELS[level] - now)
            heapq.heappush(waiting, (-gain, job.index, LEVELS[level], job))

    for job in jobs:
        if job.index in gpus:
            offer(job)
    while waiting and free:
        _, index, level, job = heapq.heappop(waiting)
        if level - gpus[index] <= free:
            free -= level - gpus[index]
            gpus[index] = level
            offer(job)


# Seconds that a job stands still, on 256 GPUs or more and on fewer: at each decision, and when groups are forgotten.
_DECISION_S, _DECISION_LARGE_S = 2.0, 7.0
_FORGOTTEN_S, _FORGOTTEN_LARGE_S = 27.0, 47.0
_NEW_LEVEL_S = 2.0  # for each level of a group of GPUs that no job held
_LARGE_GPUS = 256


class DecisionCosts:
    """What a decision costs the jobs that run after it, by the published simulator (utils.py, log.py).

    Every job with GPUs stands still for some seconds: more where its GPUs, counted from the largest job on, were not
    held by a job of that size before, and much more once in as many decisions as a slot has seconds, when these groups
    of GPUs are forgotten.
    """

    def __init__(self, gpus: int, slot_s: float) -> None:
        is_large = gpus >= _LARGE_GPUS
        self._decision_s = _DECISION_LARGE_S if is_large else _DECISION_S
        self._forgotten_s = _FORGOTTEN_LARGE_S if is_large else _FORGOTTEN_S
        self._slot_s = slot_s
        self._groups: set[tuple[int, int]] = set()  # first GPU and size
        self._decisions = 0

    def charge(self, sizes: Iterable[int]) -> list[float]:
        """Returns the seconds that each job loses, by its GPUs, the largest first."""
        first, lost_s, groups = 0, list[float](), list[tuple[int, int]]()
        forgets = self._decisions > 0 and self._decisions % self._slot_s == 0
        self._decisions += 1
        for size in sizes:
            new_s = self._forgotten_s * forgets + _NEW_LEVEL_S * size.bit_length()
            is_known = not size or (first, size) in self._groups
            lost_s.append((self._decision_s if size else 0.0) + (0.0 if is_known else new_s))
            groups.append((first, size))
            first += size
        self._groups = set() if forgets else self._groups.union(groups)
        return lost_s


class ElasticSimulation:
    """Jobs on a number of GPUs, admitted where a plan in one of some orders succeeds.

    Without an order all jobs are admitted, and each gets all GPUs that it can run on, by deadline (EDF); as published,
    decisions then cost nothing.
    """

    def __init__(
        self, jobs: list[ElasticJob], gpus: int, orders: tuple[PlanOrder, ...], slot_s: float = SLOT_S
    ) -> None:
        self._jobs = sorted(jobs, key=lambda job: (job.submit_s, job.index))
        self._gpus, self._orders, self._slot_s = gpus, orders, slot_s
        self._costs = DecisionCosts(gpus, slot_s)
        self._active: list[ElasticJob] = []
        self._lost_s: dict[int, float] = {}
        self._sequence: list[ElasticJob] = []
        self.met: set[int] = set()
        self.admitted = 0
        self._now_s = 0.0

    def run(self) -> float:
        """Returns the share of jobs that meet their deadline."""
        place, count = 0, len(self._jobs)
        while place < count or self._active:
            next_s = self._jobs[place].submit_s if place < count else np.inf
            for job in self._active:
                if job.gpus:
                    next_s = min(next_s, self._end_s(job))
            if next_s == np.inf:
                break
            slot_s = max(-(-next_s // self._slot_s) * self._slot_s, self._now_s + self._slot_s)
            self._advance(slot_s)
            begin = place
            while place < count and self._jobs[place].submit_s <= slot_s:
                place += 1
            self._decide(self._jobs[begin:place])
        return len(self.met) / count

    def _end_s(self, job: ElasticJob) -> float:
        return self._now_s + self._lost_s.get(job.index, 0.0) + job.left / job.rate_of(job.gpus)

    def _advance(self, slot_s: float) -> None:
        kept = []
        for job in self._active:
            if job.gpus and self._end_s(job) <= slot_s + 1e-6:
                if self._end_s(job) <= job.deadline_s:
                    self.met.add(job.index)
                continue
            if job.gpus:
                run_s = max(slot_s - self._now_s - self._lost_s.get(job.index, 0.0), 0.0)
                job.left -= job.rate_of(job.gpus) * run_s
            kept.append(job)
        self._active, self._now_s = kept, slot_s

    def _decide(self, arrived: list[ElasticJob]) -> None:
        """Admits or declines what arrived, and assigns GPUs."""
        if not self._orders:
            self._active += arrived
            self.admitted += len(arrived)
            self._assign(self._serve_deadlines())
            return
        plan = self._find_plan(self._active, [self._sequence])
        for job in arrived:
            plan = self._admit(plan, job)
        # What is late runs on idle GPUs only.
        gpus = plan.gpus | {job.index: 0 for job in plan.failed}
        self._sequence = plan.sequence
        share_idle(self._active, gpus, self._gpus)
        self._assign(gpus)

    def _admit(self, plan: ElasticPlan, job: ElasticJob) -> ElasticPlan:
        """Returns the plan with a job if there is one, else as it is."""
        now = plan.profile.reserve(job) if job.deadline_s > self._now_s else None
        if now is not None:  # fits into what the others leave
            plan.gpus[job.index] = now
            plan.sequence = [*plan.sequence, job]
        else:
            found = self._find_plan([*self._active, job], [])
            if len(found.failed) > len(plan.failed):
                return plan
            plan = found
        self._active.append(job)
        self.admitted += 1
        return plan

    def _find_plan(self, jobs: list[ElasticJob], sequences: list[list[ElasticJob]]) -> ElasticPlan:
        """Returns the first plan without a failure, by known sequences and then by order; else that with the fewest."""
        best: ElasticPlan | None = None
        kept = {job.index for job in jobs}
        for sequence in sequences:
            best = self._plan([job for job in sequence if job.index in kept])
            if not best.failed:
                return best
        for order in self._orders:
            plan = self._plan(sort_jobs(jobs, order))
            if best is None or len(plan.failed) < len(best.failed):
                best = plan
            if not best.failed:
                break
        return best or self._plan([])

    def _plan(self, sequence: list[ElasticJob]) -> ElasticPlan:
        return plan_jobs(sequence, self._now_s, self._gpus, self._slot_s)

    def _serve_deadlines(self) -> dict[int, int]:
        """EDF without admission: each job gets all GPUs that it can run on, the next the rest."""
        free, gpus = self._gpus, dict[int, int]()
        for job in sort_jobs(self._active, PlanOrder.DEADLINE):
            gpus[job.index] = max((LEVELS[level] for level in job.levels if LEVELS[level] <= free), default=0)
            free -= gpus[job.index]
        return gpus

    def _assign(self, gpus: dict[int, int]) -> None:
        for job in self._active:
            job.gpus = gpus[job.index]
        running = sorted((job for job in self._active if job.gpus), key=lambda job: -job.gpus)
        lost_s = self._costs.charge([job.gpus for job in running]) if self._orders else [0.0] * len(running)
        self._lost_s = {job.index: lost for job, lost in zip(running, lost_s, strict=True)}
