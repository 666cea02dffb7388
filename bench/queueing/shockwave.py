"""Shockwave's 120 dynamic jobs on 32 GPUs: published schedules played again, then ours without a commercial solver.

Owns reading DATA/shockwave and the rows of this set. First the model is checked: the rounds that each of seven published
schedules gave each job are played by the rules of `rounds`, and must come out at the published figures. Then the
decisions of four peers are taken again (`decides` in the name), and ours. The parameters of ours were chosen on three
traces with the same arrivals and the jobs in another order (seeds 0 to 2), the published order is what it is judged on.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from bench.queueing.dynamic_jobs import LARGEST_BATCH, BatchRule, DynamicJob
from bench.queueing.round_policies import (
    AssignToQueues,
    LeastLaxity,
    ShareFinishTimes,
    SharesInRounds,
    share_equally,
    share_max_min,
)
from bench.queueing.rounds import Choose, RoundSimulation, RoundsRun, bound_makespan_s, replay_schedule
from bench.queueing.summary import SetResult, SummaryRow, draw_bars
from bench.runner import Progress

_AGREEMENT = 0.02
WORST_FTF_MOST, UNFAIR_PCT_MOST, MAKESPAN_S_MOST = 2.0, 5.0, 24_500.0
_SEEDS = 20
PLAYED = ("allox", "themis_ftf", "gandiva_fair", "gavel_max_min", "max_throughput", "ossp_makespan", "shockwave")
_BATCH_SIZES = sorted({largest >> halvings for largest in LARGEST_BATCH.values() for halvings in range(5)})
_PUBLISHED = {
    "avg_jct_s": "avg_jct_s",
    "makespan_s": "makespan_s",
    "worst_ftf": "worst_ftf",
    "unfair_pct": "unfair_pct_1_05",
}


def read_jobs(folder: Path) -> list[DynamicJob]:
    """Reads the jobs with the plan of their epochs, and their rates by batch size."""
    epochs = pd.read_csv(folder / "job_epochs.csv").sort_values(["job_id", "first_epoch"])
    rates = json.loads((folder / "tacc_throughputs.json").read_text())["v100"]
    found = list[DynamicJob]()
    for row in pd.read_csv(folder / "trace.csv").itertuples():
        plan = epochs[epochs.job_id == row.job_id]
        counts = plan.last_epoch - plan.first_epoch + 1
        # The plan of the last epoch has the first batch size again, which the rule does not follow.
        planned = np.maximum.accumulate(np.repeat(plan.batch_size.to_numpy(), counts))
        by_size = {size: rates.get(f"('{row.model} (batch size {size})', {row.num_gpus})") for size in _BATCH_SIZES}
        found.append(
            DynamicJob(
                index=row.job_id,
                arrival_s=float(row.arrival_s),
                gpus=int(row.num_gpus),
                model=row.model,
                rule=BatchRule(row.mode),
                batch_size=int(row.batch_size),
                steps=int(row.total_steps),
                samples=int(row.samples_per_epoch),
                epochs_s=np.repeat(plan.epoch_s.to_numpy(), counts),
                planned=tuple(planned.tolist()),
                rates={size: float(entry["null"]) for size, entry in by_size.items() if entry is not None},
            )
        )
    return found


def read_schedule(folder: Path, policy: str, jobs: int) -> list[list[int]]:
    """Reads the rounds that each job ran in under a policy."""
    table = pd.read_csv(folder / "schedule_runs.csv")
    rounds: list[list[int]] = [[] for _ in range(jobs)]
    for row in table[table.policy == policy].sort_values("first_round").itertuples():
        rounds[row.job_id].extend(range(row.first_round, row.first_round + row.rounds))
    return rounds


def shuffle_jobs(jobs: list[DynamicJob], seed: int) -> list[DynamicJob]:
    """Returns the jobs in another order, at the same moments of arrival."""
    order = np.random.default_rng(seed).permutation(len(jobs)).tolist()
    return [replace(jobs[job], index=place, arrival_s=jobs[place].arrival_s) for place, job in enumerate(order)]


def _rows(
    policy: str, run: RoundsRun, jobs: list[DynamicJob], published: "dict[str, float] | None" = None
) -> list[SummaryRow]:
    bounds = {"makespan_s": bound_makespan_s(jobs)}
    return [
        SummaryRow("shockwave", policy, metric, value, (published or {}).get(_PUBLISHED[metric]), bounds.get(metric))
        for metric, value in run.figures().items()
    ]


def run_set(folder: Path, *, quick: bool) -> SetResult:
    """Runs the set; quick leaves out the shuffled traces."""
    jobs = read_jobs(folder)
    table = pd.read_csv(folder / "summary.csv")
    published = table[table.source == "canonical"].set_index("policy").to_dict("index")
    rows = list[SummaryRow]()
    for policy in PLAYED:
        run = replay_schedule(jobs, read_schedule(folder, policy, len(jobs)))
        rows += _rows(f"{policy} played again", run, jobs, published[policy])
    decided: dict[str, tuple[Choose, str]] = {
        "gavel_max_min decides": (SharesInRounds(share_max_min), "gavel_max_min"),
        "gandiva_fair decides": (SharesInRounds(share_equally), "gandiva_fair"),
        "themis_ftf decides": (SharesInRounds(ShareFinishTimes()), "themis_ftf"),
        "allox decides": (SharesInRounds(AssignToQueues()), "allox"),
    }
    for name, (choose, policy) in decided.items():
        rows += _rows(name, RoundSimulation(jobs, choose).run(), jobs, published[policy])
    ours: dict[str, Choose] = {
        "eelgrid, epochs to come known": LeastLaxity(knows=True),
        "eelgrid, batch size stays": LeastLaxity(knows=False),
    }
    for name, choose in ours.items():
        rows += _rows(name, RoundSimulation(jobs, choose).run(), jobs)
    if not quick:
        rows += _shuffled_rows(jobs)
    return SetResult(tuple(rows), _judge(rows))


def _shuffled_rows(jobs: list[DynamicJob]) -> list[SummaryRow]:
    """The mean over traces that nothing was chosen on."""
    progress, runs = Progress("shuffled traces"), list[dict[str, float]]()
    for seed in range(100, 100 + _SEEDS):
        runs.append(RoundSimulation(shuffle_jobs(jobs, seed), LeastLaxity(knows=False)).run().figures())
        progress.show(len(runs), _SEEDS)
    return [
        SummaryRow(
            "shockwave shuffled",
            "eelgrid, batch size stays",
            metric,
            float(np.mean([run[metric] for run in runs])),
            seeds=_SEEDS,
        )
        for metric in runs[0]
    ]


def _judge(rows: list[SummaryRow]) -> tuple[tuple[str, bool], ...]:
    targets = []
    for ending, played in (("again", "schedules played again"), ("decides", "decisions taken again")):
        for metric in ("avg_jct_s", "makespan_s"):
            errors = {
                row.policy: abs(row.ours / row.published - 1.0)
                for row in rows
                if row.metric == metric and row.policy.endswith(ending) and row.ours and row.published
            }
            worst = max(errors, key=errors.__getitem__)
            what = f"{played}: {metric} within {_AGREEMENT:.0%}, worst {errors[worst]:.2%} ({worst})"
            targets.append((what, errors[worst] <= _AGREEMENT))
    for name in ("eelgrid, epochs to come known", "eelgrid, batch size stays"):
        found = {row.metric: row.ours or 0.0 for row in rows if row.policy == name and row.set_name == "shockwave"}
        what = (
            f"{name}: worst FTF {found['worst_ftf']:.3f} <= {WORST_FTF_MOST}, unfair {found['unfair_pct']:.1f} <= "
            f"{UNFAIR_PCT_MOST} %, makespan {found['makespan_s']:,.0f} <= {MAKESPAN_S_MOST:,.0f} s"
        )
        is_met = (
            found["worst_ftf"] <= WORST_FTF_MOST
            and found["unfair_pct"] <= UNFAIR_PCT_MOST
            and found["makespan_s"] <= MAKESPAN_S_MOST
        )
        targets.append((what, is_met))
    return tuple(targets)


def draw(path: Path, result: SetResult) -> None:
    """Draws makespan, average JCT, the worst finish-time fairness and the share of unfair jobs."""
    from bench.plotting import draw_figure  # a second to import

    rows = result.rows
    metrics = {
        "makespan_s": "makespan, s",
        "avg_jct_s": "average JCT, s",
        "worst_ftf": "worst finish-time fairness",
        "unfair_pct": "unfair jobs, %",
    }
    limits = {"makespan_s": MAKESPAN_S_MOST, "worst_ftf": WORST_FTF_MOST, "unfair_pct": UNFAIR_PCT_MOST}
    with draw_figure(path, 2, 2, size=(14, 9), grid="x") as panels:
        for panel, (metric, title) in zip(panels, metrics.items(), strict=True):
            shown = [row for row in rows if row.metric == metric and row.set_name == "shockwave"]
            draw_bars(
                panel, [row.policy for row in shown], [row.ours for row in shown], [row.published for row in shown]
            )
            if metric in limits:
                panel.axvline(limits[metric], color="tab:orange", linestyle=":", label="target")
            if shown[0].bound is not None:
                panel.axvline(shown[0].bound, color="tab:red", linestyle="--", label="bound")
            panel.set_title(title)
            panel.tick_params(axis="y", labelsize=8)
            panel.legend()
