"""All runs of a comparison: every policy on every trace with every seed, on several processes.

Owns the work list, the clock around each decision and the gathering. Must not
know policies beyond what eelgrid_kernels.baselines says of them, nor what a file or
a table looks like.

Theory: the clock is read inside the compiled loop, before and after each
decision with its commit, so that what is timed is the kernel and not Python;
reading it costs some 30 ns. What a controller does between decisions (new quotes,
kinds of task weighed by them) is idle work: timed apart, and told in runs.csv.
Runs share the machine, as decisions in production do. Bounds take longer than
runs, so that they are computed for the first seeds only, and compared with the
means over just those.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from joblib import Parallel, delayed

from bench.kernel_clock import WALL, now_ns
from bench.openb import bounds as relaxations
from bench.openb.joint import Course, record_course
from bench.openb.measure import Bounds
from eelgrid_controller.replay.openb_protocol import TraceArrays, arrival_order, node_order
from eelgrid_controller.replay.policy_comparison import find_replayed_policy
from eelgrid_controller.replay.run_statistics import ArrivalCurves, compute_curves, empty_power_w
from eelgrid_kernels.argmin_index import apply_log_ahead, place_arrivals
from eelgrid_kernels.arrays import Ints
from eelgrid_kernels.baselines import PlacementPolicy
from eelgrid_kernels.compilation import kernel
from eelgrid_kernels.opportunity_prices import update_prices
from eelgrid_kernels.simulation import build_empty_engine, build_empty_outcomes

__all__ = ["BOUND_X", "BoundJob", "BoundResult", "Job", "Result", "bound", "everything", "run"]

BOUND_X = tuple(tenth / 10 for tenth in range(1, 9))
_TENDED = 2  # kinds that are weighed by new prices between two decisions


class Job(NamedTuple):
    """One run to make."""

    trace: TraceArrays
    policy: str
    seed: int


class BoundJob(NamedTuple):
    """The bounds of one order of arrivals."""

    trace: TraceArrays
    seed: int


class Result(NamedTuple):
    """What is kept of a run."""

    trace: str
    policy: str
    seed: int
    curves: ArrivalCurves
    course: Course
    placed: int
    decision_ns: Ints  # (A,)
    idle_ns: Ints  # (A,) of the work between decisions
    run_s: float


class BoundResult(NamedTuple):
    """The bounds of one order of arrivals."""

    trace: str
    seed: int
    bounds: Bounds


@kernel
def _timed(scene: Any, order: Ints, course: Any, decision_ns: Ints, idle_ns: Ints) -> None:
    """The whole course; times of each decision and of the idle work before it into decision_ns and idle_ns (A,)."""
    # The bare number would be a type of its own, for which the kernels are compiled once more.
    scratch, kinds, turn = np.zeros(2, np.int64), scene.kinds.shape[0], np.int64(0)
    for i in range(order.shape[0]):
        begun = now_ns(WALL, scratch)
        update_prices(scene)
        tended = looked = 0
        while tended < _TENDED and looked < kinds:
            if scene.kinds[turn].loose > 0.0:
                apply_log_ahead(scene, turn, 0)
                tended += 1
            turn = (turn + 1) % kinds
            looked += 1
        ready = now_ns(WALL, scratch)
        place_arrivals(scene, order, course, i, i + 1)
        decision_ns[i], idle_ns[i] = now_ns(WALL, scratch) - ready, ready - begun


def run(job: Job) -> Result:
    """Makes one run."""
    trace = job.trace
    how: PlacementPolicy = find_replayed_policy(job.policy)
    order = arrival_order(trace, job.seed)
    scene = build_empty_engine(trace.fleet, trace.specs, trace.typical, node_order(trace, job.seed), how)
    course = build_empty_outcomes(len(order))
    decision_ns, idle_ns = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    table = scene.table
    _timed(table, order[:0], course, decision_ns[:0], idle_ns[:0])  # compiles, once a process
    begun = time.perf_counter()
    _timed(table, order, course, decision_ns, idle_ns)
    run_s = time.perf_counter() - begun
    empty_w = empty_power_w(trace.fleet)
    mine = compute_curves(course, trace.fleet.gpu_milli, empty_w)
    held, placed = record_course(trace, order, course, empty_w), int(course.placed.sum())
    return Result(trace.name, job.policy, job.seed, mine, held, placed, decision_ns, idle_ns, run_s)


def bound(job: BoundJob) -> BoundResult:
    """Computes the bounds of the tasks that have arrived at each load."""
    trace, order = job.trace, arrival_order(job.trace, job.seed)
    arrived = np.cumsum(trace.task_milli[order])
    relaxation = relaxations.Relaxation(relaxations.shapes_of(trace.fleet), trace.specs)

    def counts(x: float) -> Ints:
        """(S,) tasks of each class among those whose GPU demand is at most x of capacity."""
        first = int(np.searchsorted(arrived, round(x * trace.fleet.gpu_milli), side="right"))
        return np.bincount(order[:first], minlength=len(trace.specs.cpu_milli)).astype(np.int64)

    power_w = np.array([relaxation.power_w(counts(x)) for x in BOUND_X])
    allocated_1 = relaxation.allocated_milli(counts(1.0)) / trace.fleet.gpu_milli
    return BoundResult(trace.name, job.seed, Bounds(np.array(BOUND_X), power_w, allocated_1))


def _do(job: Job | BoundJob) -> Result | BoundResult:
    return run(job) if isinstance(job, Job) else bound(job)


def everything(
    jobs: Sequence[Job | BoundJob], processes: int, tell: Callable[[int, int], None]
) -> tuple[list[Result], list[BoundResult]]:
    """Does all jobs, telling after each, and gives what came of them, by trace, policy and seed."""
    results: list[Result] = []
    bounded: list[BoundResult] = []
    work = Parallel(n_jobs=min(processes, len(jobs)) or 1, return_as="generator_unordered")
    for done, outcome in enumerate(work(delayed(_do)(job) for job in jobs), start=1):
        if isinstance(outcome, Result):
            results.append(outcome)
        else:
            bounded.append(outcome)
        tell(done, len(jobs))
    # Sums of floats depend on their order, so that it must not depend on who was first.
    return sorted(results, key=lambda r: (r.trace, r.policy, r.seed)), sorted(bounded, key=lambda r: r[:2])
