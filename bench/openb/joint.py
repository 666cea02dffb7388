"""Every policy beside the joint LP: least mean watts of a course without migration that refuses no more than it did.

Owns the loads and what a policy held at each. Must not know the LP (bench.openb.bounds) or what a table looks like.

Theory: `gap_power_pct` is of each load alone and says nothing of who refused work. Here one LP decides all loads: at
each it holds at least the GPU of the policy, and at least the CPU of its tasks without GPU, of what has arrived. A task
stays where it was placed (Relaxation.course_power_w). At x = 1 there is no weight, only what the policy allocated:
saving and allocation are bounded at once. All policies of a seed are bounded by one relaxation, with all its cuts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from joblib import Parallel, delayed

from bench.openb.bounds import Held, Relaxation, shapes_of
from eelgrid_controller.replay.openb_protocol import TraceArrays, arrival_order
from eelgrid_kernels.arrays import ArrivalOutcomes, Floats, Ints

# The mean is over all but the last, where only what is allocated counts: those of the mean saving.
COURSE_X = (*(tenth / 10 for tenth in range(1, 9)), 1.0)


class Course(NamedTuple):
    """What a policy drew and held when the last task before each of COURSE_X had arrived."""

    power_w: Floats  # (L,)
    held: tuple[Held, ...]  # L of them

    @property
    def mean_w(self) -> float:
        """What the bound is compared with."""
        return float(self.power_w[:-1].mean())


class JointJob(NamedTuple):
    """The courses of all policies over one order of arrivals."""

    trace: TraceArrays
    seed: int
    courses: tuple[tuple[str, Course], ...]


class JointGap(NamedTuple):
    """How far one policy is from the bound with one order of arrivals."""

    trace: str
    policy: str
    seed: int
    power_w: float
    power_w_least: float

    @property
    def gap_pct(self) -> float:
        """Watts over the bound, in per cent of the bound."""
        return 100.0 * (self.power_w / self.power_w_least - 1.0)


def _arrived(trace: TraceArrays, order: Ints) -> list[int]:
    """How many tasks have arrived at each of COURSE_X."""
    arrived = np.cumsum(trace.task_milli[order])
    capacity = trace.fleet.gpu_milli
    return [int(np.searchsorted(arrived, round(x * capacity), side="right")) for x in COURSE_X]


def record_course(trace: TraceArrays, order: Ints, steps: ArrivalOutcomes, empty_w: float) -> Course:
    """The course of a run."""
    specs = trace.specs
    cpu_only = np.where(steps.placed & (specs.gpu_count[order] == 0), specs.cpu_milli[order], 0)
    gpu_milli, cpu_milli = np.append(0, steps.allocated_milli), np.append(0, np.cumsum(cpu_only))
    after = _arrived(trace, order)
    held = tuple(Held(float(gpu_milli[tasks]), float(cpu_milli[tasks])) for tasks in after)
    return Course(np.append(empty_w, steps.power_w)[after], held)


def _bound(job: JointJob) -> list[JointGap]:
    trace, order = job.trace, arrival_order(job.trace, job.seed)
    classes = len(trace.specs.cpu_milli)
    counts = np.array([np.bincount(order[:tasks], minlength=classes) for tasks in _arrived(trace, order)])
    weights = np.append(np.full(len(COURSE_X) - 1, 1.0 / (len(COURSE_X) - 1)), 0.0)
    relaxation = Relaxation(shapes_of(trace.fleet), trace.specs)
    return [
        JointGap(trace.name, policy, job.seed, course.mean_w, relaxation.course_power_w(counts, course.held, weights))
        for policy, course in job.courses
    ]


def bound_jointly(jobs: Sequence[JointJob], processes: int, tell: Callable[[int, int], None]) -> list[JointGap]:
    """All gaps, telling after each order of arrivals; by trace, policy and seed."""
    found: list[JointGap] = []
    work = Parallel(n_jobs=min(processes, len(jobs)) or 1, return_as="generator_unordered")
    for done, gaps in enumerate(work(delayed(_bound)(job) for job in jobs), start=1):
        found += gaps
        tell(done, len(jobs))
    return sorted(found)
