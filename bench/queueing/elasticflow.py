"""Deadlines on ElasticFlow's traces: EDF and ElasticFlow played again, then ours.

Owns reading DATA/elasticflow and the rows of this set. Of the ten clusters' files those of 01, 02, 03, 05, 07 and 09 are
here, with Philly's 876 jobs and the two of 195; the others appear in no row. Gandiva, Tiresias, Themis, Chronus and
Pollux are quoted, not played. ElasticFlow is played by its simulator's rules on the three small traces; on a cluster
a run takes too long, since plans are laid anew for all jobs after each level of GPUs that is given away, and there its
published share is all there is to compare with. Ours admits one by one and tries several orders; what a decision costs
is the same for both.

A twin is compared with what the published simulator gives where we ran it (SIMULATED), else with what is printed. What
is printed for Philly comes out of no version of the simulator, and figure 6b was measured on real GPUs.

Bound: the share of jobs that would meet their deadline if each were alone, at its best number of GPUs.
"""

from pathlib import Path

import pandas as pd

from bench.queueing.elastic_jobs import LEVELS, ElasticJob, ElasticSimulation, PlanOrder
from bench.queueing.elasticflow_rules import ElasticFlowSimulation
from bench.queueing.summary import SetResult, SummaryRow, draw_bars
from bench.runner import Progress, Unusable

# By trace: the figure it is published in, its GPUs, their model, and the length of a slot in seconds.
TRACES = {
    "fig8a_t4": ("8a", 64, "T4", 60.0),
    "testbed195": ("6b", 128, "A100", 240.0),
    "philly_876": ("8b", 256, "A100", 60.0),
    "cluster01": ("8b", 512, "A100", 60.0),
    "cluster05": ("8b", 512, "A100", 60.0),
    "cluster03": ("8b", 512, "A100", 60.0),
    "cluster02": ("8b", 512, "A100", 60.0),
    "cluster09": ("8b", 1024, "A100", 60.0),
    "cluster07": ("8b", 1024, "A100", 60.0),
}
# The published simulator gives these models no more, though they are faster on more.
_PROFILED_GPUS = {"bert": 16, "ncf": 1}
_QUICK = ("fig8a_t4", "testbed195", "philly_876")
# Shares of deadlines met that the published simulator gives (commit 04a0109, run without a change).
SIMULATED = {
    ("fig8a_t4", "EDF"): 23 / 195,
    ("fig8a_t4", "ElasticFlow"): 142 / 195,
    ("testbed195", "ElasticFlow"): 146 / 195,
    ("philly_876", "EDF"): 382 / 876,
    ("philly_876", "ElasticFlow"): 797 / 876,
    ("cluster01", "EDF"): 298 / 1595,
    ("cluster05", "EDF"): 1468 / 3629,
}
_POLICIES = ("EDF", "ElasticFlow", "eelgrid")
_ORDERS = (PlanOrder.DEADLINE, PlanOrder.LAXITY, PlanOrder.NEWEST_LAST)
_AGREEMENT = 0.02


def read_trace(folder: Path, name: str) -> list[ElasticJob]:
    """Reads the jobs of a trace, with the rates of their model and batch size."""
    table = pd.read_csv(folder / "throughputs.csv").fillna(0.0)
    table = table[table.gpu == TRACES[name][2]]
    columns = [f"it_per_s_{level}" for level in LEVELS]
    rates = dict(
        zip(
            zip(table.model, table.global_batch_size, strict=True),
            (tuple(map(float, row)) for row in table[columns].to_numpy()),
            strict=True,
        )
    )
    jobs = pd.read_csv(folder / f"{name}.csv").itertuples()
    return [
        ElasticJob(
            row.job_id,
            float(row.submission_s),
            float(row.deadline_s),
            float(row.num_iteration),
            rates[row.model, row.global_batch_size],
            _PROFILED_GPUS.get(row.model, LEVELS[-1]),
        )
        for row in jobs
    ]


def build_simulation(folder: Path, name: str, policy: str) -> ElasticSimulation | ElasticFlowSimulation:
    """Returns the simulation of a trace under a policy: EDF, ElasticFlow or eelgrid."""
    jobs, (_, gpus, _, slot_s) = read_trace(folder, name), TRACES[name]
    if policy == "ElasticFlow":
        return ElasticFlowSimulation(jobs, gpus, slot_s)
    return ElasticSimulation(jobs, gpus, _ORDERS if policy == "eelgrid" else (), slot_s)


def bound_share(jobs: list[ElasticJob]) -> float:
    """Returns the share of jobs that meet their deadline alone, at their best number of GPUs."""
    return sum(job.submit_s + job.iterations / max(job.rates) <= job.deadline_s for job in jobs) / len(jobs)


def run_set(folder: Path, *, quick: bool) -> SetResult:
    """Runs the set; quick takes the three small traces."""
    names = [name for name in (_QUICK if quick else TRACES) if (folder / f"{name}.csv").exists()]
    if not names:
        raise Unusable(f"{folder} has none of {', '.join(TRACES)}")
    table = pd.read_csv(folder / "published.csv")
    table = table[table.metric == "deadline_satisfied"]
    rows, progress = list[SummaryRow](), Progress("runs of ElasticFlow's set")
    for name in names:
        figure = TRACES[name][0]
        published = table[(table.trace == name) & (table.figure == figure)].set_index("policy").value.to_dict()
        bound = bound_share(read_trace(folder, name))
        for policy in _POLICIES:
            is_played = policy != "ElasticFlow" or name in _QUICK
            share = build_simulation(folder, name, policy).run() if is_played else None
            rows.append(SummaryRow(f"elasticflow {name}", policy, "deadlines_met", share, published.get(policy), bound))
            progress.show(sum(row.policy in _POLICIES for row in rows), len(names) * len(_POLICIES), name)
        for policy, value in published.items():
            if policy not in _POLICIES:
                rows.append(SummaryRow(f"elasticflow {name}", policy, "deadlines_met", None, value, bound))
    return SetResult(tuple(rows), _judge(rows, names))


def _judge(rows: list[SummaryRow], names: list[str]) -> tuple[tuple[str, bool], ...]:
    targets = []
    for policy in ("EDF", "ElasticFlow"):
        errors = dict[str, float]()
        for row in rows:
            name = row.set_name.split()[1]
            expected = SIMULATED.get((name, policy), row.published)
            if row.policy == policy and row.ours is not None and expected is not None:
                errors[name] = abs(row.ours - expected)
        worst = max(errors, key=errors.__getitem__)
        close = sum(error <= _AGREEMENT for error in errors.values())
        what = (
            f"{policy} played again: within {_AGREEMENT} of the published simulator, or of the printed share, on {close} "
            f"of {len(errors)}, worst {errors[worst]:.3f} on {worst}"
        )
        targets.append((what, close == len(errors)))
    by = {(row.set_name, row.policy): row for row in rows}
    better = 0
    for name in names:
        theirs, ours = by[f"elasticflow {name}", "ElasticFlow"], by[f"elasticflow {name}", "eelgrid"]
        better += (ours.ours or 0.0) >= max(theirs.ours or 0.0, theirs.published or 0.0)
    what = f"ours at least ElasticFlow's, published and played again, on {better} of {len(names)} traces that are here"
    return (*targets, (what, better >= 0.8 * len(names)))


def draw(path: Path, result: SetResult) -> None:
    """Draws the share of deadlines that each policy meets, a panel for each trace."""
    from bench.plotting import draw_figure  # a second to import

    rows = result.rows
    names = list(dict.fromkeys(row.set_name for row in rows))
    lines = -(-len(names) // 3)
    with draw_figure(path, lines, 3, size=(15, 3.6 * lines), grid="x") as panels:
        for panel, name in zip(panels, names, strict=False):
            shown = [row for row in rows if row.set_name == name]
            draw_bars(
                panel, [row.policy for row in shown], [row.ours for row in shown], [row.published for row in shown]
            )
            panel.axvline(shown[0].bound or 1.0, color="tab:red", linestyle="--", label="bound")
            panel.set_xlim(0.0, 1.0)
            panel.set_title(f"{name.removeprefix('elasticflow ')}: share of deadlines met")
            panel.legend(loc="lower right")
        for panel in panels[len(names) :]:
            panel.set_axis_off()
