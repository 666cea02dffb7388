"""Energy against latency of LLM serving: python -m bench.llm --data DIR --out DIR.

Owns the command. Every model and task that ML.ENERGY measured with an inter-token
latency serves the Azure 2023 traces at 1x and 10x, within 20, 50 and 100 ms at p95, from
a pool of H100 and B200. Writes summary.csv (columns in report.py), penalties.csv and
pictures. The data has no time to first token and no sweep of clocks or power limits:
neither is part of any number here.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.llm import report
from bench.llm.data import GPU_MODELS, TRACES, Missing, Service, demands, own_trace, services
from bench.llm.policies import POLICIES
from bench.llm.runs import Job, Outcome, everything, fleets, penalties
from eelgrid_protos.catalogue.loader import load_catalogue

_START_S = 30.0  # at the least measured watts: a start of a minute or two is bound by CPU and disk (arXiv 2606.07362)
_PICTURED = "meta-llama/Llama-3.1-70B-Instruct"


class Unusable(ValueError):
    """What was asked for cannot be done; the message says what can."""


def _numbers(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise Unusable(f"{text!r} is no list of numbers") from None
    if not found or min(found) <= 0.0:
        raise Unusable(f"{text!r}: write numbers above 0, with commas")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.llm", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("EELGRID_DATA", "../shared/data")))
    parser.add_argument("--out", type=Path, default=Path("bench-out/llm"))
    parser.add_argument("--rates", default="1,10", help="multiples of the traces, with commas")
    parser.add_argument("--objectives-ms", default="20,50,100", help="of the p95 inter-token latency, with commas")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--models", default="", help="only models with this in their name")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--windows", type=int, default=0, help="only the first of each trace; 0 for all")
    parser.add_argument("--start-seconds", type=float, default=_START_S, help="at the least measured watts")
    parser.add_argument("--unused", choices=("idle", "off"), default="idle", help="what GPUs that serve nothing draw")
    parser.add_argument(
        "--part-load",
        choices=("measured", "proportional"),
        default="measured",
        help="below its least measured watts an instance may not go, or may idle within a window",
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-plots", action="store_true")
    return parser


def _asked(text: str, known: Sequence[str]) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in found if part not in known]
    if unknown or not found:
        raise Unusable(f"{', '.join(unknown) or 'nothing'}: take some of {', '.join(known)}")
    return found


def _named(part: str, every: Sequence[Service]) -> list[Service]:
    found = [service for service in every if part.lower() in service.model.lower()]
    if not found:
        raise Unusable(f"no model has {part!r} in its name")
    return found


def _jobs(options: argparse.Namespace, some: Sequence[Service]) -> list[Job]:
    products = load_catalogue().products
    idle_w = {model: products[model].idle_w if options.unused == "idle" else 0.0 for model in GPU_MODELS.values()}
    traces = {trace: demands(options.data, trace) for trace in _asked(options.traces, TRACES)}
    if options.windows < 0 or options.start_seconds < 0.0 or options.processes < 1:
        raise Unusable("no negative numbers, and at least one process")
    return [
        Job(
            service,
            trace,
            rate,
            objective_ms / 1e3,
            rate * demand_hz[: options.windows or None],
            options.start_seconds,
            idle_w,
            options.part_load == "proportional",
        )
        for rate in _numbers(options.rates)
        for objective_ms in _numbers(options.objectives_ms)
        for trace, demand_hz in traces.items()
        for service in some
    ]


def _tell(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{total}\033[K", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total or done % 100 == 0:
        print(f"{done}/{total}", file=sys.stderr, flush=True)


def _draw(options: argparse.Namespace, jobs: Sequence[Job], runs: Sequence[Outcome], sums: Sequence[Outcome]) -> None:
    from bench.llm import plots  # a second to import

    policies = _asked(options.policies, tuple(POLICIES))
    own = [run for run in sums if run.trace == "own"]
    if own:
        plots.draw_fleet(options.out / "fleet.png", own, policies)
        of_kind = [run for run in runs if run.trace == own_trace(Service(run.task, run.model, ()))]
        plots.draw_gaps(options.out / "gaps.png", of_kind, policies[0])
    for job in jobs:
        if job.service.model == _PICTURED and job.trace == "conv" and job.rate == jobs[-1].rate:
            shown = [
                run
                for run in runs
                if run[:5] == (job.service.task, job.service.model, job.trace, job.rate, 1e3 * job.objective_s)
            ]
            if shown:
                name = f"course_{shown[0].objective_ms:g}ms.png"
                plots.draw_course(options.out / name, list(job.demand_hz), shown)


def _promises(sums: Sequence[Outcome]) -> str:
    """What was to be shown, and whether it was."""
    lines = []
    for run in sums:
        if run.policy == "eelgrid" and run.trace == "own":
            near = "within" if run.gap_pct <= report.NEAR_PCT else "NOT within"
            broken = run.violated - run.bound_violated
            lines.append(
                f"{run.rate:g}x, {run.objective_ms:g} ms: {near} 3 % of the LP ({run.gap_pct:.2f} %;"
                f" {run.gap_above_idle_pct:.2f} % with idle watts left out), {broken} windows violated beyond the bound's"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    options = _parser().parse_args(arguments)
    try:
        every, read = services(options.data)
        some = _named(options.models, every)
        policies = _asked(options.policies, tuple(POLICIES))
        jobs = _jobs(options, some)
        options.out.mkdir(parents=True, exist_ok=True)
    except (Missing, Unusable, OSError) as error:
        print(f"bench.llm: {error}", file=sys.stderr)
        return 2
    print(
        f"{read} configurations, {sum(len(s.points) for s in every)} with inter-token latency, of {len(every)} services"
    )
    runs = everything(jobs, policies, options.processes, _tell)
    sums = fleets(runs)
    costs = penalties(every, sorted({job.objective_s for job in jobs}))
    report.write_summary(options.out / "summary.csv", [*sums, *runs])
    report.write_penalties(options.out / "penalties.csv", costs)
    print(f"{report.penalty_table(costs)}\n\n{report.fleet_table(sums)}\n")
    print(f"single services, {policies[0]}:\n{report.service_table(runs, policies[0])}\n\n{_promises(sums)}")
    if not options.no_plots:
        _draw(options, jobs, runs, sums)
    print(f"\nwritten to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
