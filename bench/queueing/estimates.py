"""What run-time estimates by group are worth: the published rows of PAI's simulator, no run of ours.

Owns reading DATA/pai/published.csv. The trace itself is not to be had, so these are the figures of alibaba/clusterdata's
simulator alone: 20,000 jobs on 6,500 GPUs, shortest estimated job first, with the estimate the mean of jobs of the same
user, group, or group and GPU model. `gain_kept` is the part of the gain in waiting, from FIFO to the true durations,
that an estimate keeps.
"""

from pathlib import Path

import pandas as pd

from bench.queueing.summary import SetResult, SummaryRow, draw_bars


def run_set(folder: Path, *, quick: bool) -> SetResult:
    """Reads the rows; nothing is run."""
    del quick
    table = pd.read_csv(folder / "published.csv").set_index("policy")
    worst_s, best_s = float(table.avg_wait_s["FIFO"]), float(table.avg_wait_s["SJF"])
    rows = list[SummaryRow]()
    for policy, row in table.iterrows():
        name = f"{policy}, {row.estimator}"
        rows.append(SummaryRow("pai", name, "avg_jct_s", None, float(row.avg_jct_s)))
        rows.append(SummaryRow("pai", name, "avg_wait_s", None, float(row.avg_wait_s), best_s))
        kept = (worst_s - float(row.avg_wait_s)) / (worst_s - best_s)
        rows.append(SummaryRow("pai", name, "gain_kept", None, kept, 1.0))
    return SetResult(tuple(rows))


def draw(path: Path, result: SetResult) -> None:
    """Draws the average wait and the part of the gain that is kept."""
    from bench.plotting import draw_figure  # a second to import

    rows = result.rows
    titles = {"avg_wait_s": "average wait, s", "gain_kept": "part of the gain over FIFO that is kept"}
    with draw_figure(path, 1, 2, size=(13, 4), grid="x") as panels:
        for panel, (metric, title) in zip(panels, titles.items(), strict=True):
            shown = [row for row in rows if row.metric == metric]
            draw_bars(panel, [row.policy for row in shown], [None] * len(shown), [row.published for row in shown])
            panel.set_title(f"PAI, published: {title}")
