"""Runs every policy with every seed on a trace, in parallel processes or on a Ray cluster.

The same runs give the same results, in the same order, on any number of processes. A seed draws the order of nodes
among equals and, where they are drawn, the failures; in the mode of arrivals also the order of the tasks. Every policy
meets the same of each.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_controller.errors import import_library
from eelgrid_controller.replay.openb_protocol import TraceArrays, arrival_order, node_order
from eelgrid_controller.replay.run_statistics import (
    ArrivalCurves,
    RunSeries,
    RunSummary,
    TariffSteps,
    compute_curves,
    compute_series,
    empty_power_w,
    summarize_run,
)
from eelgrid_controller.replay.simulation import ArrivalSchedule, Outage, draw_outages, simulate_policy
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.simulation import SimulatedFleet, build_empty_engine, simulate_arrivals

SERIES_POINTS = 500  # means over time that are kept of a run: finer than a picture shows


class RunBackend(Enum):
    """Who makes the runs."""

    PROCESSES = "processes"
    RAY = "ray"


class RandomFailures(NamedTuple):
    """How nodes fail where failures are drawn."""

    mtbf_s: float
    mttr_s: float


class ArrivalScenario(NamedTuple):
    """The published protocol: tasks in an order drawn by the seed, 1.3 times capacity, and none ever leaves."""

    trace: TraceArrays


class TimedScenario(NamedTuple):
    """Tasks come and go at their times."""

    trace: TraceArrays
    schedule: ArrivalSchedule
    end_s: float
    failures: tuple[Outage, ...] | RandomFailures
    prices: TariffSteps | None
    pue: float


class PolicyRun(NamedTuple):
    """One run to make."""

    how: ArrivalScenario | TimedScenario
    policy: str
    seed: int


class TimedRunResult(NamedTuple):
    """What is kept of a run with times."""

    policy: str
    seed: int
    summary: RunSummary
    series: RunSeries


class ArrivalRunResult(NamedTuple):
    """What is kept of a run of arrivals."""

    policy: str
    seed: int
    tasks: int
    placed: int
    curves: ArrivalCurves


RunResult = TimedRunResult | ArrivalRunResult


def list_runs(how: ArrivalScenario | TimedScenario, policies: Iterable[str], seeds: Iterable[int]) -> list[PolicyRun]:
    """Every policy with every seed."""
    every = tuple(seeds)
    return [PolicyRun(how, name, seed) for name in policies for seed in every]


def _arrive(how: ArrivalScenario, name: str, seed: int) -> ArrivalRunResult:
    trace, chosen = how.trace, find_policy(name)
    rank = node_order(trace, seed)
    order = arrival_order(trace, seed)
    empty = build_empty_engine(trace.fleet, trace.specs, trace.typical, rank, chosen)
    ran = simulate_arrivals(empty, order)
    mine = compute_curves(ran, trace.fleet.gpu_milli, empty_power_w(trace.fleet))
    return ArrivalRunResult(name, seed, len(order), int(ran.placed.sum()), mine)


def _outages(how: TimedScenario, seed: int) -> Sequence[Outage]:
    match how.failures:
        case RandomFailures(mtbf_s, mttr_s):
            nodes, begin_s = len(how.trace.fleet.model), how.schedule.begin_s
            return draw_outages(nodes, begin_s, how.end_s, mtbf_s=mtbf_s, mttr_s=mttr_s, seed=seed)
        case given:
            return given


def _live(how: TimedScenario, name: str, seed: int) -> TimedRunResult:
    trace, chosen = how.trace, find_policy(name)
    rank = node_order(trace, seed)
    fleet = SimulatedFleet(trace.fleet, trace.specs, trace.typical, rank, chosen)
    outages = _outages(how, seed)
    outcome = simulate_policy(trace, how.schedule, fleet, outages, how.end_s)
    return TimedRunResult(
        name, seed, summarize_run(outcome, how.prices, how.pue), compute_series(outcome, SERIES_POINTS)
    )


def execute_run(job: PolicyRun) -> RunResult:
    """Makes one run."""
    match job.how:
        case ArrivalScenario():
            return _arrive(job.how, job.policy, job.seed)
        case TimedScenario():
            return _live(job.how, job.policy, job.seed)


def _quietly() -> None:
    """For a worker: what it has to say comes back as a result or an error; its trace when it is ended helps nobody."""
    sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # as long as the process


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Holds an interrupt back; processes that begin meanwhile never get one.

    A terminal sends it to the whole group, and a worker would answer with its trace. They are ended by their parent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_numbered(index: int, job: PolicyRun) -> tuple[int, RunResult]:
    return index, execute_run(job)


def _backend(joblib: Any, backend: RunBackend) -> AbstractContextManager[Any]:
    """The context in which joblib hands out runs."""
    if backend is RunBackend.PROCESSES:
        processes: AbstractContextManager[Any] = joblib.parallel_config(backend="loky", initializer=_quietly)
        return processes
    import_library("ray.util.joblib", "--backend ray", "'ray[default]'").register_ray()
    context: AbstractContextManager[Any] = joblib.parallel_config(backend="ray")
    return context


def execute_runs(
    wanted: Sequence[PolicyRun], backend: RunBackend, processes: int | None, tell: Callable[[int], None]
) -> list[RunResult]:
    """Makes all runs, telling how many are done after each; the results are in the order of the jobs.

    Without a number of processes it is one for each CPU that this process may use, or all of the Ray cluster.
    """
    joblib = import_library("joblib", "running policies in parallel", "'eelgrid[replay]'")
    results: dict[int, RunResult] = {}
    # Ray's backend cannot give results one by one.
    way = "generator_unordered" if backend is RunBackend.PROCESSES else "list"
    count = processes or (joblib.cpu_count() if backend is RunBackend.PROCESSES else -1)
    with _backend(joblib, backend):
        work = joblib.Parallel(n_jobs=min(count, len(wanted)), return_as=way)
        # Ray's list is made within the call, so it has to hear of interrupts.
        with _defer_interrupt() if backend is RunBackend.PROCESSES else nullcontext():
            begun = work(joblib.delayed(_run_numbered)(index, job) for index, job in enumerate(wanted))
        for index, result in begun:
            results[index] = result
            tell(len(results))
    return [results[index] for index in range(len(wanted))]
