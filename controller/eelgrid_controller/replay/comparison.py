"""Many runs of a trace, one for each policy and seed, on the processes of this machine or of a Ray cluster.

Owns what one run is made of and that all are made. Must not know where a trace
came from, files or screens. The same jobs give the same results, in the same
order, on any number of processes.

Theory: what a seed draws is the order of nodes among equals and, where they are
drawn, the failures; in the mode of arrivals also the order of the tasks. Every
policy meets the same of each.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_controller.replay.accounts import Series, Summary, Tariff, account, series
from eelgrid_controller.replay.curves import Curves, curves, empty_power_w
from eelgrid_controller.replay.libraries import library
from eelgrid_controller.replay.protocol import Trace, arrivals, node_order
from eelgrid_controller.replay.schedule import Outage, Schedule, drawn_outages
from eelgrid_controller.replay.simulation import simulate
from eelgrid_kernels import course
from eelgrid_kernels.fleet import Fleet
from eelgrid_kernels.policies import policy

__all__ = [
    "STRETCHES", "Arrivals", "ArrivalsResult", "Backend", "Breakdowns", "Job", "Result", "Times", "TimesResult",
    "everything", "jobs", "play",
]  # fmt: skip

STRETCHES = 500  # means over time that are kept of a run: finer than a picture shows


class Backend(Enum):
    """Who makes the runs."""

    PROCESSES = "processes"
    RAY = "ray"


class Breakdowns(NamedTuple):
    """How nodes fail where failures are drawn."""

    mtbf_s: float
    mttr_s: float


class Arrivals(NamedTuple):
    """The published protocol: tasks in an order drawn by the seed, 1.3 times capacity, and none ever leaves."""

    trace: Trace


class Times(NamedTuple):
    """Tasks come and go at their times."""

    trace: Trace
    schedule: Schedule
    end_s: float
    failures: tuple[Outage, ...] | Breakdowns
    prices: Tariff | None
    pue: float


class Job(NamedTuple):
    """One run to make."""

    how: Arrivals | Times
    policy: str
    seed: int


class TimesResult(NamedTuple):
    """What is kept of a run with times."""

    policy: str
    seed: int
    summary: Summary
    series: Series


class ArrivalsResult(NamedTuple):
    """What is kept of a run of arrivals."""

    policy: str
    seed: int
    tasks: int
    placed: int
    curves: Curves


Result = TimesResult | ArrivalsResult


def jobs(how: Arrivals | Times, policies: Iterable[str], seeds: Iterable[int]) -> list[Job]:
    """Every policy with every seed."""
    every = tuple(seeds)
    return [Job(how, name, seed) for name in policies for seed in every]


def _arrive(how: Arrivals, name: str, seed: int) -> ArrivalsResult:
    trace, chosen = how.trace, policy(name)
    rank = node_order(trace, seed)
    order = arrivals(trace, seed)
    ran = course.run(trace.fleet, trace.specs, trace.typical, order, rank, chosen.code, chosen.weights)
    mine = curves(ran, trace.fleet.gpu_milli, empty_power_w(trace.fleet))
    return ArrivalsResult(name, seed, len(order), int(ran.placed.sum()), mine)


def _outages(how: Times, seed: int) -> Sequence[Outage]:
    match how.failures:
        case Breakdowns(mtbf_s, mttr_s):
            nodes, begin_s = len(how.trace.fleet.model), how.schedule.begin_s
            return drawn_outages(nodes, begin_s, how.end_s, mtbf_s=mtbf_s, mttr_s=mttr_s, seed=seed)
        case given:
            return given


def _live(how: Times, name: str, seed: int) -> TimesResult:
    trace, chosen = how.trace, policy(name)
    rank = node_order(trace, seed)
    fleet = Fleet(trace.fleet, trace.specs, trace.typical, rank, chosen.code, chosen.weights)
    outages = _outages(how, seed)
    outcome = simulate(trace, how.schedule, fleet, outages, how.end_s)
    return TimesResult(name, seed, account(outcome, how.prices, how.pue), series(outcome, STRETCHES))


def play(job: Job) -> Result:
    """Makes one run."""
    match job.how:
        case Arrivals():
            return _arrive(job.how, job.policy, job.seed)
        case Times():
            return _live(job.how, job.policy, job.seed)


def _quietly() -> None:
    """For a worker: what it has to say comes back as a result or an error; its trace when it is ended helps nobody."""
    sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # as long as the process


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds an interrupt back; processes that begin meanwhile never get one.

    A terminal sends it to the whole group, and a worker would answer with its trace. They are ended by their parent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _numbered(index: int, job: Job) -> tuple[int, Result]:
    return index, play(job)


def _backend(joblib: Any, backend: Backend) -> AbstractContextManager[Any]:
    """The context in which joblib hands out runs."""
    if backend is Backend.PROCESSES:
        processes: AbstractContextManager[Any] = joblib.parallel_config(backend="loky", initializer=_quietly)
        return processes
    library("ray.util.joblib", "--backend ray", "'ray[default]'").register_ray()
    context: AbstractContextManager[Any] = joblib.parallel_config(backend="ray")
    return context


def everything(
    wanted: Sequence[Job], backend: Backend, processes: int | None, tell: Callable[[int], None]
) -> list[Result]:
    """Makes all runs, telling how many are done after each; the results are in the order of the jobs.

    Without a number of processes it is one for each CPU that this process may use, or all of the Ray cluster.
    """
    joblib = library("joblib", "running policies in parallel", "'eelgrid[replay]'")
    results: dict[int, Result] = {}
    # Ray's backend cannot give results one by one.
    way = "generator_unordered" if backend is Backend.PROCESSES else "list"
    count = processes or (joblib.cpu_count() if backend is Backend.PROCESSES else -1)
    with _backend(joblib, backend):
        work = joblib.Parallel(n_jobs=min(count, len(wanted)), return_as=way)
        # Ray's list is made within the call, so it has to hear of interrupts.
        with _uninterrupted() if backend is Backend.PROCESSES else nullcontext():
            begun = work(joblib.delayed(_numbered)(index, job) for index, job in enumerate(wanted))
        for index, result in begun:
            results[index] = result
            tell(len(results))
    return [results[index] for index in range(len(wanted))]
