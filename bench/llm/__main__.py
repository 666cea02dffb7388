"""Energy against latency of LLM serving: python -m bench.llm --data DIR --out DIR.

Owns the command. Every model and task that ML.ENERGY measured with an inter-token
latency serves the Azure 2023 traces at 1x and 10x, within 20, 50 and 100 ms at p95, from
a pool of H100 and B200. Writes summary.csv (columns in report.py), penalties.csv and
pictures. The data has no time to first token and no sweep of clocks or power limits:
neither is part of any number here.
"""

import sys
from collections.abc import Sequence

import click

from bench.llm import report
from bench.llm.data import GPU_MODELS, TRACES, Missing, Service, demands, own_trace, services
from bench.llm.policies import POLICIES
from bench.llm.runs import Job, Outcome, everything, fleets, penalties
from bench.runner import (
    Options,
    Progress,
    Unusable,
    benchmark,
    data_option,
    plots_option,
    processes_option,
    split_names,
    split_numbers,
)
from eelgrid_protos.catalogue.loader import load_catalogue

_START_S = 30.0  # at the least measured watts: a start of a minute or two is bound by CPU and disk (arXiv 2606.07362)
_PICTURED = "meta-llama/Llama-3.1-70B-Instruct"


def _named(part: str, every: Sequence[Service]) -> list[Service]:
    found = [service for service in every if part.lower() in service.model.lower()]
    if not found:
        raise Unusable(f"no model has {part!r} in its name")
    return found


def _jobs(options: Options, some: Sequence[Service]) -> list[Job]:
    products = load_catalogue().products
    idle_w = {model: products[model].idle_w if options.unused == "idle" else 0.0 for model in GPU_MODELS.values()}
    traces = {trace: demands(options.data, trace) for trace in split_names(options.traces, TRACES)}
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
        for rate in split_numbers(options.rates)
        for objective_ms in split_numbers(options.objectives_ms)
        for trace, demand_hz in traces.items()
        for service in some
    ]


def _draw(options: Options, jobs: Sequence[Job], runs: Sequence[Outcome], sums: Sequence[Outcome]) -> None:
    from bench.llm import plots  # a second to import

    policies = split_names(options.policies, tuple(POLICIES))
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


@benchmark(out="bench-out/llm", refused=(Missing, OSError))
@data_option()
@click.option("--rates", default="1,10", help="multiples of the traces, with commas")
@click.option("--objectives-ms", default="20,50,100", help="of the p95 inter-token latency, with commas")
@click.option("--traces", default=",".join(TRACES))
@click.option("--models", default="", help="only models with this in their name")
@click.option("--policies", default=",".join(POLICIES))
@click.option("--windows", default=0, help="only the first of each trace; 0 for all")
@click.option("--start-seconds", default=_START_S, help="at the least measured watts")
@click.option(
    "--unused",
    type=click.Choice(("idle", "off")),
    default="idle",
    help="what GPUs that serve nothing draw",
)
@click.option(
    "--part-load",
    type=click.Choice(("measured", "proportional")),
    default="measured",
    help="below its least measured watts an instance may not go, or may idle within a window",
)
@processes_option
@plots_option
def main(options: Options) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    every, read = services(options.data)
    some = _named(options.models, every)
    policies = split_names(options.policies, tuple(POLICIES))
    jobs = _jobs(options, some)
    print(
        f"{read} configurations, {sum(len(s.points) for s in every)} with inter-token latency, of {len(every)} services"
    )
    runs = everything(jobs, policies, options.processes, Progress("services").show)
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
