"""Placement policies at the real times of openb traces, in kWh: python -m bench.openb.times --data DIR --out DIR.

Owns the command; the runs are eelctl replay's. Writes times.csv: a row for each
trace, fleet and policy, means over seeds. The trace asks for 14 GPUs in the mean
and 66 at most, of the 6,212 that its fleet has, so that nearly all energy there
is of idle machines: besides all of it, smaller fleets are tried, of nodes taken
evenly over the list. What placement decides is the energy over idle.
"""

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.openb.__main__ import REFERENCE, Unusable, chosen_policies
from eelgrid_controller.replay.csv_reader import TraceError
from eelgrid_controller.replay.openb import read_nodes, read_tasks
from eelgrid_controller.replay.openb_protocol import SEEDS, build_trace, csv_folder
from eelgrid_controller.replay.openb_source import NODE_LIST, task_list_name
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.openb.times", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("EELGRID_DATA", "../shared/data")))
    parser.add_argument("--traces", default="default", help="suffixes of the task lists, with commas")
    parser.add_argument("--policies", default="fgd,pwr,pwr200,bestfit,eelgrid", help="names of policies, with commas")
    parser.add_argument("--fleets", default="1213,60,15", help="numbers of nodes, with commas")
    parser.add_argument("--seeds", type=int, default=4, help=f"how many, from {SEEDS[0]} up")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--out", type=Path, default=Path("bench-out/openb"))
    return parser


def _saved_pct(mine: float, reference: float) -> float:
    return 100.0 * (reference - mine) / reference if reference else 0.0


def _mean(runs: Sequence[TimedRunResult], value: str) -> float:
    return statistics.fmean(getattr(run.summary, value) for run in runs)


def _rows(how: TimedScenario, names: Sequence[str], seeds: range, processes: int | None) -> list[Row]:
    """Every policy on one trace and fleet."""
    done = execute_runs(list_runs(how, names, seeds), RunBackend.PROCESSES, processes, lambda _: None)
    runs = {name: [run for run in done if isinstance(run, TimedRunResult) and run.policy == name] for name in names}
    reference = runs[REFERENCE]
    trace = how.trace
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


def _line(row: Row) -> str:
    return (
        f"{row.trace:12} {row.nodes:5,} {row.gpus:6,} {row.policy:13} {row.energy_kwh:10,.0f} {row.saving_pct:7.2f} "
        f"{row.energy_over_idle_kwh:10,.0f} {row.saving_over_idle_pct:7.1f} {row.wait_mean_s:9.1f} "
        f"{row.unfinished:10.1f} {row.refused:7.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    options = _parser().parse_args(arguments)
    try:
        names = tuple(dict.fromkeys((REFERENCE, *chosen_policies(options.policies))))
        fleets = [int(text) for text in options.fleets.split(",")]
        if min(fleets) < 1 or options.seeds < 1:
            raise Unusable("take at least one node and one seed")
        folder = csv_folder(options.data)
        nodes = read_nodes(folder / NODE_LIST)
        print(
            "trace        nodes   GPUs policy               kWh saved %  over idle saved %    wait s unfinished refused"
        )
        rows: list[Row] = []
        for trace in options.traces.split(","):
            tasks = read_tasks(folder / task_list_name(trace))
            for fleet in fleets:
                built = build_trace(trace, sample_nodes_evenly(nodes, fleet), tasks)
                plan = build_schedule(built, tasks)
                how = TimedScenario(built, plan, plan.end_s, (), None, 1.0)
                found = _rows(how, names, range(SEEDS[0], SEEDS[0] + options.seeds), options.processes)
                print("\n".join(map(_line, found)), flush=True)
                rows += found
        options.out.mkdir(parents=True, exist_ok=True)
    except (TraceError, ValueError, OSError) as error:
        print(f"bench.openb.times: {error}", file=sys.stderr)
        return 2
    with (options.out / "times.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(Row._fields)
        out.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    print(f"\nwritten to {options.out / 'times.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
