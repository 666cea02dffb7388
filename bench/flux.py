"""Flux with its own scheduler sched-simple against Flux scheduled by a controller: jobs a second, submission to start.

A real broker of four ranks on this machine (tests/flux_rig.py), new for each round, with the rounds of both in turn: the same
jobs are submitted by one program, and not executed but mocked by Flux's own test executor for the time that is asked for. First
some jobs one after another on an idle instance, then all at once. Every moment is that of an event in the job's own log
(RFC 21): submit, alloc, start, finish, clean.

Target: at least 0.9 of the jobs a second of sched-simple, as the median of the rounds' ratios. On two cores it is out of reach for
jobs of 10 ms: one thread of a broker takes 4 ms of a job and all of them 14, and the controller's thread 6 beside them.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tests.flux_rig import GPUS, HOSTS, RealBroker, build_jobspec, find_flux
from tests.waiting import poll_until

from bench.processes import cpu_s, free_port, running, spread
from bench.runner import Options, Progress, Unusable, benchmark, report_promise
from bench.tables import write_csv

_RATIO_LEAST = 0.9
_START_S, _ROUND_S = 120.0, 1800.0
_EVENTS = ("submit", "alloc", "start", "finish", "clean")
# Runs in Flux's own Python: submits jobs, at once or each when the one before is over, and prints the events of each.
_SUBMIT = """
import flux, flux.job, json, sys
asked = json.load(sys.stdin)
handle, text = flux.Flux(), json.dumps(asked["jobspec"])
def follow(job):
    moments = {}
    for event in flux.job.event_watch(handle, job):
        moments.setdefault(event.name, event.timestamp)
    print(json.dumps(moments), flush=True)
if asked["at_once"]:
    waiting = [flux.job.submit_async(handle, text) for _ in range(asked["jobs"])]
    for job in [one.get_id() for one in waiting]:
        follow(job)
else:
    for _ in range(asked["jobs"]):
        follow(flux.job.submit(handle, text))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FluxRound:
    """One round: of each job by its events, when they were, in seconds since 1970."""

    is_ours: bool
    singles: tuple[dict[str, float], ...]
    many: tuple[dict[str, float], ...]
    controller_cpu_s: float = 0.0

    def __post_init__(self) -> None:
        for job in (*self.singles, *self.many):
            assert job.keys() >= set(_EVENTS), f"a job has not run: {job}"

    @property
    def rate_hz(self) -> float:
        """Jobs a second of those that were submitted at once, from the first submission to the last end."""
        begun, ended = (choose(job[name] for job in self.many) for choose, name in ((min, "submit"), (max, "clean")))
        return len(self.many) / (ended - begun)

    def list_starts(self) -> list[float]:
        """Returns seconds from submission to allocation of those that ran one after another."""
        return [job["alloc"] - job["submit"] for job in self.singles]


@contextmanager
def _schedule(broker: RealBroker, folder: Path) -> Iterator[Any]:
    """A controller and our module in place of sched-simple."""
    address = f"127.0.0.1:{free_port()}"
    arguments = ["--listen", address, "--metrics", "127.0.0.1:0", "--data", str(folder / "data"), "--flux"]
    log = folder / "controller.log"
    with running("eelgrid_controller", arguments, log) as process:
        poll_until(lambda: "serving listen=" in log.read_text(), "the controller serves", within_s=_START_S)
        broker.load(f"controller={address}")
        yield process


def _submit(broker: RealBroker, jobspec: dict[str, Any], jobs: int, *, at_once: bool) -> tuple[dict[str, float], ...]:
    asked = json.dumps({"jobspec": jobspec, "jobs": jobs, "at_once": at_once})
    lines = broker.run("python", "-c", _SUBMIT, stdin=asked, within_s=_ROUND_S).splitlines()
    return tuple(json.loads(line) for line in lines)


def _submit_all(options: Options, broker: RealBroker, controller: Any) -> FluxRound:
    jobspec = build_jobspec(slots=1, cores=1, gpus=options.gpus)
    jobspec["attributes"]["system"]["exec"]["test"]["run_duration"] = f"{options.seconds:g}s"
    # The first shows that whoever schedules is there.
    singles = _submit(broker, jobspec, 1 + options.singles, at_once=False)[1:]
    before_s = 0.0 if controller is None else cpu_s(controller)
    many = _submit(broker, jobspec, options.jobs, at_once=True)
    used_s = 0.0 if controller is None else cpu_s(controller) - before_s
    return FluxRound(is_ours=controller is not None, singles=singles, many=many, controller_cpu_s=used_s)


def _run_round(options: Options, flux: str, folder: Path, *, is_ours: bool) -> FluxRound:
    broker = RealBroker(flux)
    try:
        if not is_ours:
            return _submit_all(options, broker, None)
        with _schedule(broker, folder) as controller:
            return _submit_all(options, broker, controller)
    finally:
        broker.close()


def _report(rounds: list[FluxRound], ratios: list[float]) -> None:
    for is_ours, name in ((False, "sched-simple"), (True, "Eelgrid")):
        mine = [one for one in rounds if one.is_ours == is_ours]
        starts = [span for one in mine for span in one.list_starts()]
        print(f"{name}: {spread([one.rate_hz for one in mine])} jobs/s; submission to start {spread(starts)} s")
    costs = [1e3 * one.controller_cpu_s / len(one.many) for one in rounds if one.is_ours]
    print(f"the controller uses {spread(costs)} ms of processor time a job")
    print(f"jobs a second, Eelgrid by sched-simple: {spread(ratios)}")


@benchmark()
@click.option("--jobs", type=click.IntRange(1, 20_000), default=200, help="Jobs that are submitted at once.")
@click.option("--singles", type=click.IntRange(1, 1000), default=10, help="Jobs one after another before.")
@click.option("--rounds", type=click.IntRange(1, 50), default=3, help="Rounds of each, in turn.")
@click.option("--gpus", type=click.IntRange(0, GPUS), default=1, help=f"GPUs of a job; there are {len(HOSTS) * GPUS}.")
@click.option("--seconds", type=click.FloatRange(0.001, 3600.0), default=0.01, help="For how long a job runs.")
def main(options: Options) -> int:
    """Runs the rounds in turn, writes them and compares."""
    flux = find_flux()
    if flux is None:
        raise Unusable("no flux with flux.scheduler and grpc here; name one by EELGRID_FLUX")
    rounds, progress = list[FluxRound](), Progress("rounds")
    for number in range(2 * options.rounds):
        # Each goes first in every second pair.
        is_ours = number % 4 in (1, 2)
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(_run_round(options, flux, Path(folder), is_ours=is_ours))
        progress.show(number + 1, 2 * options.rounds, f"{rounds[-1].rate_hz:.1f} jobs/s")
    pairs = [sorted(rounds[n : n + 2], key=lambda one: one.is_ours) for n in range(0, len(rounds), 2)]
    ratios = [ours.rate_hz / simple.rate_hz for simple, ours in pairs]
    _report(rounds, ratios)
    rows = [
        (n, "eelgrid" if one.is_ours else "sched-simple", kind, job, *(moments[name] for name in _EVENTS))
        for n, one in enumerate(rounds)
        for kind, jobs in (("single", one.singles), ("many", one.many))
        for job, moments in enumerate(jobs)
    ]
    write_csv(options.out / "jobs.csv", ("round", "scheduler", "kind", "job", *_EVENTS), rows)
    kept = statistics.median(ratios) >= _RATIO_LEAST
    return report_promise(f"{_RATIO_LEAST:g} of the jobs a second of sched-simple", kept=kept)


if __name__ == "__main__":
    raise SystemExit(main())
