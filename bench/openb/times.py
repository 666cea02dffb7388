"""Placement policies at the real times of openb traces, in kWh: python -m bench.openb.times --data DIR --out DIR.

Owns the command; the runs are eelctl replay's. Writes times.csv: a row for each
trace, fleet and policy, means over seeds. The trace asks for 14 GPUs in the mean
and 66 at most, of the 6,212 that its fleet has, so that nearly all energy there
is of idle machines: besides all of it, smaller fleets are tried, of nodes taken
evenly over the list. What placement decides is the energy over idle.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from bench.openb.policies import REFERENCE, chosen_policies
from bench.openb.traces import csv_folder
from bench.runner import Options, Progress, Unusable, benchmark, data_option, seeds_option
from bench.tables import format_table, write_csv
from eelgrid_controller.replay.csv_reader import TraceError
from eelgrid_controller.replay.openb import NODE_LIST, read_nodes, read_tasks, task_list_name
from eelgrid_controller.replay.openb_protocol import SEEDS, build_trace
from eelgrid_controller.replay.policy_comparison import (
    RunBackend,
    TimedRunResult,
    TimedScenario,
    execute_runs,
    list_runs,
)
from eelgrid_controller.replay.run_statistics import JOULES_PER_KWH
from eelgrid_controller.replay.simulation import build_schedule
from eelgrid_controller.replay.trace_loading import sample_nodes_evenly


class Row(NamedTuple):
    """Means over seeds; savings are against FGD's."""

    trace: str
    nodes: int
    gpus: int
    policy: str
    seeds: int
    energy_kwh: float
    saving_pct: float
    energy_over_idle_kwh: float
    saving_over_idle_pct: float
    wait_mean_s: float
    wait_p95_s: float
    unfinished: float
    refused: float


def _saved_pct(mine: float, reference: float) -> float:
    return 100.0 * (reference - mine) / reference if reference else 0.0


def _mean(runs: Sequence[TimedRunResult], value: str) -> float:
    return statistics.fmean(getattr(run.summary, value) for run in runs)


def compare_times(
    folder: Path, name: str, fleet: int, names: Sequence[str], *, seeds: range, processes: int | None
) -> list[Row]:
    """Every policy on one trace and a fleet of so many of the nodes; raises TraceMalformed for a list without times."""
    tasks = read_tasks(folder / task_list_name(name))
    trace = build_trace(name, sample_nodes_evenly(read_nodes(folder / NODE_LIST), fleet), tasks)
    plan = build_schedule(trace, tasks)
    how = TimedScenario(trace, plan, plan.end_s, (), None, 1.0)
    done = execute_runs(list_runs(how, names, seeds), RunBackend.PROCESSES, processes, lambda _: None)
    runs = {name: [run for run in done if isinstance(run, TimedRunResult) and run.policy == name] for name in names}
    reference = runs[REFERENCE]
    return [
        Row(
            trace=trace.name,
            nodes=len(trace.fleet.model),
            gpus=trace.fleet.gpu_milli // 1000,
            policy=name,
            seeds=len(mine),
            energy_kwh=_mean(mine, "energy_j") / JOULES_PER_KWH,
            saving_pct=_saved_pct(_mean(mine, "energy_j"), _mean(reference, "energy_j")),
            energy_over_idle_kwh=_mean(mine, "energy_over_idle_j") / JOULES_PER_KWH,
            saving_over_idle_pct=_saved_pct(_mean(mine, "energy_over_idle_j"), _mean(reference, "energy_over_idle_j")),
            wait_mean_s=_mean(mine, "wait_mean_s"),
            wait_p95_s=_mean(mine, "wait_p95_s"),
            unfinished=_mean(mine, "running") + _mean(mine, "waiting"),
            refused=_mean(mine, "refused"),
        )
        for name, mine in runs.items()
    ]


def _cells(row: Row) -> dict[str, str]:
    return {
        "trace": row.trace,
        "nodes": f"{row.nodes:,}",
        "GPUs": f"{row.gpus:,}",
        "policy": row.policy,
        "kWh": f"{row.energy_kwh:,.0f}",
        "saved %": f"{row.saving_pct:.2f}",
        "over idle": f"{row.energy_over_idle_kwh:,.0f}",
        "of it saved %": f"{row.saving_over_idle_pct:.1f}",
        "wait s": f"{row.wait_mean_s:.1f}",
        "unfinished": f"{row.unfinished:.1f}",
        "refused": f"{row.refused:.1f}",
    }


@benchmark(out="bench-out/openb", refused=(TraceError, ValueError, OSError))
@data_option()
@click.option("--traces", default="default", help="suffixes of the task lists, with commas")
@click.option("--policies", default="fgd,pwr,pwr200,bestfit,eelgrid", help="names of policies, with commas")
@click.option("--fleets", default="1213,60,15", help="numbers of nodes, with commas")
@seeds_option(4, f"how many, from {SEEDS[0]} up")
@click.option("--processes", type=int)
def main(options: Options) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    names = tuple(dict.fromkeys((REFERENCE, *chosen_policies(options.policies))))
    fleets = [int(text) for text in options.fleets.split(",")]
    if min(fleets) < 1 or options.seeds < 1:
        raise Unusable("take at least one node and one seed")
    folder = csv_folder(options.data)
    rows: list[Row] = []
    progress = Progress("policies")
    for trace in options.traces.split(","):
        for fleet in fleets:
            seeds = range(SEEDS[0], SEEDS[0] + options.seeds)
            rows += compare_times(folder, trace, fleet, names, seeds=seeds, processes=options.processes)
            progress.show(len(rows), len(options.traces.split(",")) * len(fleets) * len(names))
    cells = ([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    write_csv(options.out / "times.csv", Row._fields, cells)
    print(format_table(None, map(_cells, rows), words=1))
    print(f"\nwritten to {options.out / 'times.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
