"""Ours beside FGD and the best mix of PWR on drawn mixes: what `bench.openb --mixes N --seed S` runs and tells.

Owns which policies run, what is compared and the two targets. Must not know how a
mix is drawn (bench.openb.mixes) or how a run is made (bench.openb.runs).

Theory: every policy has one setting for all mixes, but the peer that ours is compared with is the PWR mix that
saves most for each allocated GPU on that very mix, so that the peer is tuned after the fact and ours is not. FGD
is what savings are measured against, as everywhere. Arrivals have seeds of their own: 1000 S + i and those after it for mix i of seed S.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.openb.measure import Figures, figures, mean_curves
from bench.openb.mixes import BASE, NAMING, SEEDS_APART, Proportions, TaskPools, build_pools, draw_mix, draw_proportions
from bench.openb.policies import OURS, REFERENCE
from bench.openb.runs import Job, everything
from bench.openb.traces import csv_folder
from bench.runner import Options, Progress, report_promise
from bench.tables import format_table, write_csv
from eelgrid_controller.replay.openb import NODE_LIST, TraceNode, read_nodes, read_tasks, task_list_name
from eelgrid_kernels.baselines import policy_names

PWR_MIXES = tuple(name for name in policy_names() if name.startswith("pwr"))
BELOW_FGD_PP_MOST = 0.1


class MixRow(NamedTuple):
    """One mix; allocation at x = 1 in per cent of the fleet's GPU, savings in per cent of FGD's watts."""

    number: int
    proportions: Proportions
    fgd_alloc_pct: float
    pwr: str  # the PWR mix that saves most for each allocated GPU
    pwr_alloc_pct: float
    pwr_per_gpu_pct: float
    alloc_pct: float
    saving_pct: float
    per_gpu_pct: float
    p99_us: float  # of ours

    @property
    def over_fgd_pp(self) -> float:
        """Allocation beside FGD's."""
        return self.alloc_pct - self.fgd_alloc_pct

    @property
    def over_pwr_pp(self) -> float:
        """Saving per allocated GPU beside the best PWR mix's."""
        return self.per_gpu_pct - self.pwr_per_gpu_pct


def _tell_nothing(done: int, total: int) -> None:
    """The progress is of mixes."""


def _judge(number: int, proportions: Proportions, found: dict[str, Figures], p99_us: float) -> MixRow:
    best = max(PWR_MIXES, key=lambda name: found[name].saving_per_gpu_pct)
    ours = found[OURS]
    return MixRow(
        number,
        proportions,
        found[REFERENCE].alloc_100_pct,
        best,
        found[best].alloc_100_pct,
        found[best].saving_per_gpu_pct,
        ours.alloc_100_pct,
        ours.saving_mean_pct,
        ours.saving_per_gpu_pct,
        p99_us,
    )


def run_mix(nodes: tuple[TraceNode, ...], pools: TaskPools, number: int, options: Options) -> MixRow:
    """One mix under every policy, means over its orders of arrival."""
    proportions = draw_proportions(options.seed, number)
    trace = draw_mix(nodes, pools, options.seed, number)
    first = SEEDS_APART * options.seed + number
    jobs = [Job(trace, policy, first + i) for policy in (REFERENCE, *PWR_MIXES, OURS) for i in range(options.seeds)]
    runs, _ = everything(jobs, options.processes, _tell_nothing)
    curves = {
        name: mean_curves([run.curves for run in runs if run.policy == name]) for name in {j.policy for j in jobs}
    }
    gpus = trace.fleet.gpu_milli // 1000
    found = {name: figures(mine, curves[REFERENCE], gpus) for name, mine in curves.items()}
    decisions = sorted(ns for run in runs if run.policy == OURS for ns in run.decision_ns.tolist())
    return _judge(number, proportions, found, decisions[len(decisions) * 99 // 100] / 1e3)


def _cells(row: MixRow, digits: int) -> dict[str, object]:
    return {
        "mix": row.number,
        **{name: f"{value:.{digits - 1}f}" for name, value in row.proportions._asdict().items()},
        "pwr": row.pwr,
        "fgd_alloc": f"{row.fgd_alloc_pct:.{digits}f}",
        "pwr_alloc": f"{row.pwr_alloc_pct:.{digits}f}",
        "alloc": f"{row.alloc_pct:.{digits}f}",
        "over_fgd": f"{row.over_fgd_pp:+.{digits}f}",
        "saving": f"{row.saving_pct:.{digits}f}",
        "pwr_per_gpu": f"{row.pwr_per_gpu_pct:.{digits}f}",
        "per_gpu": f"{row.per_gpu_pct:.{digits}f}",
        "over_pwr": f"{row.over_pwr_pp:+.{digits}f}",
        "p99_us": f"{row.p99_us:.1f}",
    }


def summarize(rows: Sequence[MixRow]) -> str:
    """Means, worst cases and how many mixes miss each target."""
    lines = []
    for what, values, least in (
        ("allocation over FGD's, points", [row.over_fgd_pp for row in rows], -BELOW_FGD_PP_MOST),
        ("saving per allocated GPU over the best PWR mix's, points", [row.over_pwr_pp for row in rows], 0.0),
    ):
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        missed = sum(value < least for value in values)
        lines.append(
            f"{what}: mean {statistics.fmean(values):+.2f}, deviation {spread:.2f}, worst {min(values):+.2f}, "
            f"best {max(values):+.2f}; below {least:g} on {missed} of {len(values)} mixes"
        )
    return "\n".join(lines)


def read_pools(data: Path) -> tuple[tuple[TraceNode, ...], TaskPools]:
    """The nodes of a folder, and the tasks there that mixes are drawn from."""
    place = csv_folder(data)
    pools = build_pools(*(read_tasks(place / task_list_name(name)) for name in (BASE, NAMING)))
    return read_nodes(place / NODE_LIST), pools


def compare_mixes(options: Options) -> int:
    """Draws the mixes, runs them and writes mixes.csv; returns the exit status, 1 where a target was missed."""
    nodes, pools = read_pools(options.data)
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    progress, rows = Progress("mixes"), []
    for number in range(options.mixes):
        rows.append(run_mix(nodes, pools, number, options))
        write_csv(out / "mixes.csv", None, (_cells(row, 3) for row in rows))  # what is done stays if the rest does not
        progress.show(number + 1, options.mixes)
    print(format_table(None, (_cells(row, 2) for row in rows), words=0))
    print(f"\n{summarize(rows)}\nwritten to {out / 'mixes.csv'}")
    kept = all(row.over_fgd_pp >= -BELOW_FGD_PP_MOST and row.over_pwr_pp >= 0.0 for row in rows)
    what = f"on every mix at most {BELOW_FGD_PP_MOST:g} points below FGD's allocation and no saving below the best PWR mix's"
    return report_promise(what, kept=kept)
