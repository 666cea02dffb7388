"""A small fleet that steering drives in tests: GPUs that take limits, jobs that run at them, answers that come late.

What is drawn and promised is counted here, by code that shares nothing with steering.
"""

from dataclasses import dataclass, field

import numpy as np

from eelgrid_controller.objectives.control_cycle import ObjectiveController
from eelgrid_controller.objectives.power.budget_allocation import solve_allocation
from eelgrid_controller.objectives.power.budgets import BudgetTree, Holding, PowerBudgetNode
from eelgrid_controller.objectives.power.control_events import (
    AllocationSolved,
    BudgetsSet,
    ControlTick,
    JobMeasured,
    JobStarted,
    LimitConfirmed,
    LimitFailed,
    NodeLeaseExpired,
    NodeReachable,
    NodeUnreachable,
    SetPowerLimit,
    SolveAllocation,
    WorkloadEnded,
)
from eelgrid_controller.objectives.power.estimates import MeasurementWindow
from eelgrid_controller.objectives.power.power_model import MaxSlowdown

__all__ = ["LIMITS_W", "Fleet", "law", "tree"]

LIMITS_W = (100.0, 150.0, 200.0, 250.0, 300.0)
WINDOW_S = 10.0
PROMISE = MaxSlowdown(0.1)


def law(limit_w, draw_w=280.0):
    """Seconds a unit of work, and watts of each GPU: it draws what it is allowed, and slows as that is missed."""
    power_w = min(limit_w, draw_w)
    return 0.1 * (1.0 + 0.6 * ((draw_w / power_w) ** 0.6 - 1.0)), power_w


def tree(nodes, node_w, cluster_w):
    """A cluster over nodes."""
    return BudgetTree(
        [PowerBudgetNode("cluster", cluster_w), *(PowerBudgetNode(node, node_w, "cluster") for node in nodes)]
    )


@dataclass
class Placed:
    """A job on its nodes."""

    began: JobStarted
    draw_w: float
    limits: dict[str, float]  # what the GPUs have, by holding
    maybe: dict[str, list[float]] = field(default_factory=dict)  # what nobody has read since, by holding
    work: float = 0.0
    time_s: float = 0.0
    energy_j: float = 0.0


class Fleet:
    """Nodes with GPUs under steering."""

    def __init__(self, steering=None, seed=0, scatter=0.0):
        self.steering = steering or ObjectiveController()
        self.rng = np.random.default_rng(seed)
        self.scatter = scatter
        self.now_s = 0.0
        self.jobs, self.asked, self.lost, self.said, self.told = {}, [], set(), [], []
        self.divisions = []  # that were asked for and are not answered
        self.latest = {}  # limit that was last said of each job
        self.watts = {}  # budgets' room, by name
        self.budgets = None
        self.worst_w = 0.0  # that an answer of steering lifted what may be drawn above a budget
        self.refuse = lambda _: False
        self.rounded = lambda limit_w: limit_w  # what a driver makes of a limit

    def tell(self, event):
        before = self.drawn_most()
        made = self.steering.handle_event(event)
        self.said += made
        self.latest |= {one.job: one.limit_w for one in made if isinstance(one, SetPowerLimit)}
        self.told.append(event)
        self.asked += [one for one in made if isinstance(one, SetPowerLimit)]
        self.divisions += [one for one in made if isinstance(one, SolveAllocation)]
        for name, watts in self.drawn_most().items():  # what lay above a budget before is not the answer's doing
            self.worst_w = max(self.worst_w, watts - max(self.watts[name], before[name]))
        return made

    def begin(
        self, name, nodes, gpus=2, promise=PROMISE, draw_w=280.0, held_w=(), restored_w=None, limits_w=LIMITS_W, **more
    ):
        holdings = tuple(Holding(f"{name}/{node}", node, gpus, (node,), restored_w) for node in nodes)
        began = JobStarted(self.now_s, name, promise, limits_w, holdings, held_w=held_w, **more)
        limits = dict(zip([one.name for one in holdings], held_w or (max(limits_w),) * len(holdings), strict=True))
        self.jobs[name] = Placed(began, draw_w, limits)
        return self.tell(began)

    def end(self, name):
        self.jobs.pop(name)
        self.asked = [one for one in self.asked if one.job != name]
        return self.tell(WorkloadEnded(self.now_s, name))

    def budget(self, budgets):
        self.budgets = budgets
        self.watts = {one.name: one.limit_w - one.other_w for one in budgets.all}
        return self.tell(BudgetsSet(self.now_s, budgets))

    def drawn_most(self):
        """The most that each budget may be drawn from now.

        GPUs have their limit, or any that is on its way to them, or the last that was said of their job: whoever carries
        out may set a job's limit as one.
        """
        parents = {one.name: one.parent for one in self.budgets.all} if self.budgets else {}
        drawn = dict.fromkeys(self.watts, 0.0)
        for name, job in self.jobs.items():
            newest = [self.latest[name]] if any(one.job == name for one in self.asked) else []
            for holding in job.began.holdings:
                coming = [one.limit_w for one in self.asked if one.holding == holding.name]
                watts = holding.gpus * max(
                    [job.limits[holding.name], *coming, *newest, *job.maybe.get(holding.name, [])]
                )
                at = holding.budgets[0] if holding.budgets[0] in parents else None
                while at is not None:
                    drawn[at] += watts
                    at = parents[at]
        return drawn

    def answer(self, place=0):
        """One command comes to its end; GPUs of a lost node never hear of it."""
        one = self.asked.pop(place)
        if one.node in self.lost or one.job not in self.jobs:
            return []
        if self.refuse(one):
            self.jobs[one.job].maybe[one.holding] = [one.limit_w]
            return self.tell(LimitFailed(self.now_s, one.number, self.jobs[one.job].limits[one.holding]))
        read_w = self.jobs[one.job].limits[one.holding] = self.rounded(one.limit_w)
        self.jobs[one.job].maybe.pop(one.holding, None)
        return self.tell(LimitConfirmed(self.now_s, one.number, read_w))

    def answer_all(self):
        for _ in range(10_000):
            if not self.asked:
                return
            self.answer()
        raise AssertionError("commands never end")

    def quiet(self):
        """Nothing is asked any more."""
        self.answer_all()
        while self.divisions:
            self.divide()
            self.answer_all()

    def divide(self, place=0):
        """A division that was asked for is answered, perhaps long after."""
        one = self.divisions.pop(place)
        return self.tell(AllocationSolved(self.now_s, one.number, solve_allocation(one.problem)))

    def window(self, name, seconds=WINDOW_S):
        """A job runs for a window at what it has; the slowest GPU paces the gang."""
        job = self.jobs[name]
        limit_w = min(job.limits.values())
        time_s, power_w = law(limit_w, job.draw_w)
        gpus = sum(one.gpus for one in job.began.holdings)
        work = seconds / time_s
        job.work, job.time_s = job.work + work, job.time_s + seconds
        job.energy_j += gpus * power_w * seconds
        slow, warm = 1.0 + self.scatter * self.rng.standard_normal(2)
        seen = MeasurementWindow(limit_w, work / slow, seconds, gpus * power_w * seconds * warm)
        return self.tell(JobMeasured(self.now_s, name, seen))

    def run(self, windows, *, answered=True):
        """Everything runs for so many windows, answers at once."""
        for _ in range(windows):
            if answered:
                self.quiet()
            self.now_s += WINDOW_S
            for name in list(self.jobs):
                if not any(one.node in self.lost for one in self.jobs[name].began.holdings):
                    self.window(name)
            self.tell(ControlTick(self.now_s))
        if answered:
            self.quiet()

    def lose(self, node, *, heard=False):
        """What is under way there may have been `heard` before the node fell silent."""
        self.lost.add(node)
        for one in [one for one in self.asked if one.node == node]:
            self.asked.remove(one)
            self.jobs[one.job].maybe.setdefault(one.holding, []).append(one.limit_w)
            if heard:
                self.jobs[one.job].limits[one.holding] = one.limit_w
        return self.tell(NodeUnreachable(self.now_s, node))

    def lease_ends(self, node):
        for job in self.jobs.values():
            for holding in job.began.holdings:
                if holding.node == node and holding.restored_w is not None:
                    job.limits[holding.name] = holding.restored_w / holding.gpus
        return self.tell(NodeLeaseExpired(self.now_s, node))

    def back(self, node):
        self.lost.discard(node)
        limits = {
            name: limit_w
            for job in self.jobs.values()
            for name, limit_w in job.limits.items()
            if name.endswith(f"/{node}")
        }
        for job in self.jobs.values():
            job.maybe = {name: may for name, may in job.maybe.items() if not name.endswith(f"/{node}")}
        return self.tell(NodeReachable(self.now_s, node, limits))

    def job(self, name):
        return next(one for one in self.steering.controller_status().jobs if one.name == name)

    def slowdown(self, name):
        job = self.jobs[name]
        return job.time_s / (job.work * law(LIMITS_W[-1], job.draw_w)[0]) - 1.0
