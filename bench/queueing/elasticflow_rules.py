"""ElasticFlow by the rules of its published simulator: who is admitted, who gets idle GPUs, what a decision costs.

Owns events and decisions (Gu et al., ASPLOS 2023, scheduler.py). Plans are those of `elasticflow_plans`.
A decision is made when jobs arrive or end or a plan changes, but at most once in a slot; what falls into a slot is
decided at its end.

1. All jobs are planned in the order of deadlines. If one cannot meet its deadline, be it new or a running one that is
   late by what decisions cost, all jobs that arrived are declined.
2. Idle GPUs go, one level at a time, to the job without GPUs, else to the one whose plan's GPU-seconds grow most for a
   GPU; after each, all other plans are laid anew.
3. Every job with GPUs stands still for some seconds (`DecisionCosts`), which plans do not know, nor the moment at which
   a job counts as done.
"""

import math
from dataclasses import dataclass, field

from bench.queueing.elastic_jobs import LEVELS, DecisionCosts, ElasticJob
from bench.queueing.elasticflow_plans import GpuPlan, PlannedWork, Steps, plan_work, shift_profile


@dataclass(eq=False)
class _Progress:
    """An admitted job, its plan, and its GPUs since the last decision."""

    job: ElasticJob
    left: float = field(init=False)
    plan: GpuPlan = field(init=False)
    most: int = field(init=False)
    gpus: int = 0
    lost_s: float = 0.0
    event_s: float = 0.0  # its end is looked at then
    gain: float = -math.inf

    def __post_init__(self) -> None:
        self.left = self.job.iterations
        self.most = min(LEVELS[self.job.useful[-1]], self.job.profiled_gpus)

    @property
    def work(self) -> PlannedWork:
        """What is left to plan."""
        return PlannedWork(self.left, self.job.deadline_s, self.job.rates, self.most)

    @property
    def next_gpus(self) -> int:
        """The next level, or the present one if there is none."""
        return min(max(1, 2 * self.gpus), max(self.most, self.gpus))

    @property
    def rate(self) -> float:
        """Iterations a second."""
        return self.job.rate_of(self.gpus)


class ElasticFlowSimulation:
    """Jobs on a number of GPUs."""

    def __init__(self, jobs: list[ElasticJob], gpus: int, slot_s: float) -> None:
        self._jobs = sorted(jobs, key=lambda job: job.submit_s)
        self._gpus, self._slot_s = gpus, slot_s
        self._active: list[_Progress] = []
        self._changes_s: set[float] = set()  # when a plan changes
        self._costs = DecisionCosts(gpus, slot_s)
        self._free = Steps((0.0,), (gpus,))  # by the present plans
        self._now_s = self._jobs[0].submit_s
        self._arrivals_s: set[float] = set()  # to come
        self.met: set[int] = set()
        self.admitted = 0

    def run(self) -> float:
        """Returns the share of jobs that meet their deadline."""
        waiting, before_s = list(self._jobs), self._now_s
        while True:
            self._advance(self._now_s - before_s)
            arrived = [job for job in waiting if job.submit_s <= self._now_s]
            waiting = waiting[len(arrived) :]
            self._arrivals_s = {job.submit_s for job in waiting}
            self._changes_s = {at_s for at_s in self._changes_s if at_s > self._now_s}
            self._decide(arrived)
            events = sorted(self._list_events())
            if not events:
                return len(self.met) / len(self._jobs)
            before_s = self._now_s
            is_alone = len(events) == 1 or events[0] - before_s > self._slot_s
            self._now_s = events[0] if is_alone else before_s + self._slot_s

    def _advance(self, span_s: float) -> None:
        """Counts what was done since the last decision, and ends the jobs whose event has come."""
        kept = []
        for progress in self._active:
            is_over = progress.event_s <= self._now_s
            if progress.gpus:
                run_s = span_s - max(self._now_s - progress.plan.done_s, 0.0)
                run_s = run_s - progress.lost_s if run_s >= progress.lost_s else 0.0
                is_over |= progress.left <= run_s * progress.rate
                progress.left = max(progress.left - run_s * progress.rate, 1e-9)
            if not progress.gpus or not is_over:
                kept.append(progress)
            elif progress.plan.done_s <= progress.job.deadline_s:
                self.met.add(progress.job.index)
        self._active = kept

    def _decide(self, arrived: list[ElasticJob]) -> None:
        """Admits or declines what arrived, lays plans, and gives idle GPUs away."""
        candidates = [*self._active, *map(_Progress, arrived)]
        if not arrived or not self._plan_all(candidates):
            candidates = list(self._active)
            self._plan_all(candidates)
        self.admitted += len(candidates) - len(self._active)
        self._active = sorted(candidates, key=lambda one: one.job.deadline_s)
        for progress in self._active:
            progress.gpus = progress.plan.steps.gpus[0]
            self._move_event(progress, progress.plan.end_s)
        self._share_idle()
        self._active.sort(key=lambda one: -one.gpus)
        change_s = min((at_s for one in self._active for at_s in one.plan.steps.times_s[1:2]), default=math.inf)
        if change_s < min(self._list_events(), default=math.inf):
            self._changes_s.add(change_s)
        self._charge()

    def _plan_all(self, candidates: list[_Progress]) -> bool:
        """Plans jobs in the order of deadlines; returns whether each meets its own."""
        self._free, is_met = Steps((self._now_s,), (self._gpus,)), True
        for progress in sorted(candidates, key=lambda one: one.job.deadline_s):
            progress.plan = plan_work(self._free, progress.work, self._slot_s)
            self._free = shift_profile(self._free, progress.plan, -1)
            is_met &= progress.plan.done_s <= progress.job.deadline_s
        return is_met

    def _share_idle(self) -> None:
        """Gives idle GPUs away, a level at a time."""
        idle = self._gpus - sum(progress.gpus for progress in self._active)
        if not idle:
            return
        for progress in self._active:
            progress.gain = self._weigh_next_level(progress, idle)
        while True:
            # Ties keep their order, which decides who is on which GPUs; a job at its last level keeps its gain.
            self._active.sort(key=lambda one: -one.gain)
            chosen = next((one for one in self._active if 0 < one.next_gpus - one.gpus <= idle), None)
            if chosen is None:
                return
            wider = self._plan_wider(chosen)
            idle -= chosen.next_gpus - chosen.gpus
            self._free = shift_profile(shift_profile(self._free, chosen.plan, 1), wider, -1)
            chosen.gpus, chosen.plan = chosen.next_gpus, wider
            self._move_event(chosen, chosen.plan.end_s)
            for progress in self._active:
                if progress.next_gpus > progress.gpus:
                    progress.gain = self._weigh_next_level(progress, idle)

    def _weigh_next_level(self, progress: _Progress, idle: int) -> float:
        """Returns by how much a plan's GPU-seconds grow for a GPU of the next level; without end if it has none."""
        more = progress.next_gpus - progress.gpus
        if not 0 < more <= idle:
            return -math.inf
        return (self._plan_wider(progress).gpu_s - progress.plan.gpu_s) / more if progress.gpus else math.inf

    def _plan_wider(self, progress: _Progress) -> GpuPlan:
        """Plans a job with its next level of GPUs at once, in what the plans of all others leave."""
        others = shift_profile(self._free, progress.plan, 1)
        return plan_work(others, progress.work, self._slot_s, progress.next_gpus)

    def _charge(self) -> None:
        """Counts what the decision costs each job with GPUs."""
        for progress, lost_s in zip(self._active, self._costs.charge([one.gpus for one in self._active]), strict=True):
            progress.lost_s = lost_s
            if progress.gpus:
                self._move_event(progress, progress.plan.end_s + lost_s)

    def _list_events(self) -> set[float]:
        """The moments at which something happens by the present plans."""
        return {progress.event_s for progress in self._active} | self._changes_s | self._arrivals_s

    def _move_event(self, progress: _Progress, at_s: float) -> None:
        """Moves the end of a job; a change of plans that was due at its old end is forgotten with it, as published."""
        before_s, progress.event_s = progress.event_s, at_s
        if before_s in self._changes_s - self._arrivals_s and all(one.event_s != before_s for one in self._active):
            self._changes_s.remove(before_s)
