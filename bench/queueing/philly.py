"""Philly's busiest 15 days on 512 GPUs with a quota for each virtual cluster: FIFO, EASY, Kueue's rules and ours.

Owns reading DATA/philly and the rows of this set. Nothing is published for this table alone; the pool is our choice, so
that work waits: what the 15 days from 2017-10-10 submit would keep 586 GPUs busy, part of it later. A virtual cluster's nominal quota is its part of the GPU-hours that
were submitted before. EASY knows the true run times, which is the most that it can be given; ours knows what has ended.

`eelgrid today` is what the product has: quotas, share and past use, no backfill and no preemption. The rows with
`backfill` and `reclaim` play the rules that it is to have.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from bench.queueing.summary import SetResult, SummaryRow, draw_bars
from bench.queueing.virtual_clusters import QueueOrder, TenantJob, TenantRules, TenantRun, TenantSimulation
from bench.runner import Progress

BEGIN, DAYS, GPUS = "2017-10-10", 15, 512
_LEAST_QUOTA = 8
RULES = {
    "FIFO": TenantRules(QueueOrder.SUBMISSION, quotas=False, blocks=True),
    "EASY, true run times": TenantRules(QueueOrder.SUBMISSION, quotas=False, backfill=True, knows_run_times=True),
    "Kueue: fair sharing, reclaim": TenantRules(QueueOrder.SHARE, reclaim_after_s=0.0),
    "eelgrid today": TenantRules(QueueOrder.SHARE_AND_PAST),
    "eelgrid with backfill": TenantRules(QueueOrder.SHARE_AND_PAST, backfill=True),
    "eelgrid with reclaim after 10 min": TenantRules(QueueOrder.SHARE_AND_PAST, reclaim_after_s=600.0),
}


def read_jobs(folder: Path, days: int = DAYS) -> tuple[list[TenantJob], dict[str, int]]:
    """Reads the jobs of the days, and each virtual cluster's nominal quota."""
    table = pd.read_csv(folder / "philly.csv", parse_dates=["timestamp"])
    begin = pd.Timestamp(BEGIN)
    before = table[table.timestamp < begin].groupby("cluster").gpu_time.sum()
    within = (table.timestamp >= begin) & (table.timestamp < begin + pd.Timedelta(days=days))
    chosen = table[within].sort_values("timestamp", kind="stable")
    names = sorted(chosen.cluster.unique())
    parts = before.reindex(names).fillna(0.0)
    spare = GPUS - _LEAST_QUOTA * len(names)
    nominal = {name: _LEAST_QUOTA + int(spare * parts[name] / parts.sum()) for name in names}
    seconds = (chosen.timestamp - begin).dt.total_seconds()
    jobs = [
        TenantJob(submit_s, max(run_s, 1.0), gpus, queue)
        for submit_s, run_s, gpus, queue in zip(
            seconds.tolist(), chosen.duration.tolist(), chosen.num_gpus.tolist(), chosen.cluster.tolist(), strict=True
        )
    ]
    return jobs, nominal


def describe_run(policy: str, jobs: list[TenantJob], run: TenantRun) -> list[SummaryRow]:
    """Returns the figures of a run."""
    waits_s, span_s = np.array(run.waits_s), max(job.submit_s for job in jobs) - jobs[0].submit_s
    large = np.array([job.gpus >= 8 for job in jobs])
    figures = {
        "wait_mean_s": float(waits_s.mean()),
        "wait_p99_s": float(np.quantile(waits_s, 0.99)),
        "wait_mean_8_gpus_s": float(waits_s[large].mean()) if large.any() else 0.0,
        "utilisation": run.used_gpu_s / (GPUS * span_s),
        "preemptions": float(run.preemptions),
        "lost_gpu_h": run.lost_gpu_s / 3600.0,
        "makespan_s": max(run.ends_s),
    }
    bounds = {"utilisation": 1.0, "makespan_s": max(job.submit_s + job.run_s for job in jobs)}
    return [SummaryRow("philly", policy, metric, value, None, bounds.get(metric)) for metric, value in figures.items()]


def run_set(folder: Path, *, quick: bool) -> SetResult:
    """Runs the set; quick takes the first day."""
    jobs, nominal = read_jobs(folder, 1 if quick else DAYS)
    rows, progress = list[SummaryRow](), Progress("policies on Philly")
    for done, (policy, rules) in enumerate(RULES.items(), 1):
        rows += describe_run(policy, jobs, TenantSimulation(jobs, GPUS, nominal, rules).run())
        progress.show(done, len(RULES), policy)
    by = {(row.policy, row.metric): row.ours or 0.0 for row in rows}
    targets = []
    for metric in ("wait_mean_s", "lost_gpu_h"):
        theirs, ours = by["Kueue: fair sharing, reclaim", metric], by["eelgrid with reclaim after 10 min", metric]
        targets.append(
            (f"{metric} with reclaim {ours:,.0f} at most that of Kueue's rules {theirs:,.0f}", ours <= theirs)
        )
    return SetResult(tuple(rows), tuple(targets))


def draw(path: Path, result: SetResult) -> None:
    """Draws waiting, utilisation and what preemption costs."""
    from bench.plotting import draw_figure  # a second to import

    rows = result.rows
    titles = {
        "wait_mean_s": "mean wait, s",
        "wait_mean_8_gpus_s": "mean wait of jobs of 8 GPUs and more, s",
        "utilisation": "part of the pool in use until the last submission",
        "lost_gpu_h": "work lost to preemption, GPU-h",
    }
    with draw_figure(path, 2, 2, size=(14, 7), grid="x") as panels:
        for panel, (metric, title) in zip(panels, titles.items(), strict=True):
            shown = [row for row in rows if row.metric == metric]
            draw_bars(panel, [row.policy for row in shown], [row.ours for row in shown], [None] * len(shown))
            panel.set_title(title)
