"""Shockwave's 120 dynamic jobs on 32 GPUs: published schedules played again, then ours without a commercial solver.

Owns reading DATA/shockwave and the rows of this set. First the model is checked: the rounds that each of seven published
schedules gave each job are played by the rules of `rounds`, and must come out at the published figures. Then the
decisions of two peers are taken again (`decides` in the name), and ours. The parameters of ours were chosen on three
traces with the same arrivals and the jobs in another order (seeds 0 to 2), the published order is what it is judged on.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from bench.queueing.round_policies import LeastLaxity, ShareFinishTimes, SharesInRounds, share_max_min
from bench.queueing.rounds import Choose, DynamicJobs, RoundsRun, replay_schedule, simulate_rounds
from bench.queueing.summary import SetResult, SummaryRow, draw_bars
from bench.runner import Progress

_AGREEMENT = 0.02
WORST_FTF_MOST, UNFAIR_PCT_MOST, MAKESPAN_S_MOST = 2.0, 5.0, 24_500.0
_SEEDS = 20
_PUBLISHED = {
    "avg_jct_s": "avg_jct_s",
    "makespan_s": "makespan_s",
    "worst_ftf": "worst_ftf",
    "unfair_pct": "unfair_pct_1_05",
}


def read_jobs(folder: Path) -> DynamicJobs:
    """Reads the jobs with the time of each of their epochs."""
    trace, epochs = pd.read_csv(folder / "trace.csv"), pd.read_csv(folder / "job_epochs.csv")
    found = [
        np.repeat(part.epoch_s.to_numpy(), (part.last_epoch - part.first_epoch + 1).to_numpy())
        for _, part in epochs.sort_values(["job_id", "first_epoch"]).groupby("job_id")
    ]
    return DynamicJobs(trace.arrival_s.to_numpy(), trace.num_gpus.to_numpy(), tuple(found))


def read_schedule(folder: Path, policy: str, jobs: int) -> list[list[int]]:
    """Reads the rounds that each job ran in under a policy."""
    table = pd.read_csv(folder / "schedule_runs.csv")
    rounds: list[list[int]] = [[] for _ in range(jobs)]
    for row in table[table.policy == policy].sort_values("first_round").itertuples():
        rounds[row.job_id].extend(range(row.first_round, row.first_round + row.rounds))
    return rounds


def shuffle_jobs(jobs: DynamicJobs, seed: int) -> DynamicJobs:
    """Returns the jobs in another order, at the same moments of arrival."""
    order = np.random.default_rng(seed).permutation(len(jobs.gpus)).tolist()
    return DynamicJobs(jobs.arrival_s, jobs.gpus[order], tuple(jobs.epochs_s[job] for job in order))


def _rows(
    policy: str, run: RoundsRun, jobs: DynamicJobs, published: "dict[str, float] | None" = None
) -> list[SummaryRow]:
    bounds = {"makespan_s": jobs.bound_makespan_s()}
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
    for policy in pd.read_csv(folder / "schedule_runs.csv").policy.unique():
        run = replay_schedule(jobs, read_schedule(folder, policy, len(jobs.gpus)))
        rows += _rows(f"{policy} played again", run, jobs, published[policy])
    decided: dict[str, tuple[Choose, str]] = {
        "gavel_max_min decides": (SharesInRounds(share_max_min), "gavel_max_min"),
        "themis_ftf decides": (SharesInRounds(ShareFinishTimes()), "themis_ftf"),
    }
    for name, (choose, policy) in decided.items():
        rows += _rows(name, simulate_rounds(jobs, choose), jobs, published[policy])
    ours: dict[str, Choose] = {
        "eelgrid, epochs to come known": LeastLaxity(knows=True),
        "eelgrid, batch size stays": LeastLaxity(knows=False),
    }
    for name, choose in ours.items():
        rows += _rows(name, simulate_rounds(jobs, choose), jobs)
    if not quick:
        rows += _shuffled_rows(jobs)
    return SetResult(tuple(rows), _judge(rows))


def _shuffled_rows(jobs: DynamicJobs) -> list[SummaryRow]:
    """The mean over traces that nothing was chosen on."""
    progress, runs = Progress("shuffled traces"), list[dict[str, float]]()
    for seed in range(100, 100 + _SEEDS):
        runs.append(simulate_rounds(shuffle_jobs(jobs, seed), LeastLaxity(knows=False)).figures())
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
    for metric in ("avg_jct_s", "makespan_s"):
        errors = {
            row.policy: abs(row.ours / row.published - 1.0)
            for row in rows
            if row.metric == metric and row.policy.endswith("again") and row.ours and row.published
        }
        worst = max(errors, key=errors.__getitem__)
        what = f"schedules played again: {metric} within {_AGREEMENT:.0%}, worst {errors[worst]:.1%} ({worst})"
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
