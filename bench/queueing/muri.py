"""Muri's 400 jobs on 64 GPUs, and its simulator's traces: peers recomputed, then ours without rounds.

Owns reading DATA/muri and the rows of this set. Peers first: SRTF, SRSF and Tiresias on the testbed's rules (decisions
every 360 s, each job's measured service) and on the simulator's rules, where the published averages come out digit by
digit, and Themis, whose published values depend on what a solver returned and are only approached. Then ours on the
testbed's jobs with the service that SRSF's run measured, and with the published overhead at every start on top. The
policies of ours were chosen on trace1; cluster_trace and trace2 are what they are judged on.

Bound of the average: the mean busy times of one machine as fast as the cluster, by the least original service first,
plus half of each run time (Goemans 1997); preemption, packing and knowledge cannot undercut it.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from bench.queueing.gang_estimates import FastestEnds, LearnedIndex
from bench.queueing.gang_policies import FinishTimeFairness, LeastAttained, ShortestRemaining
from bench.queueing.gangs import GangPolicy, GangRun, GangSimulation, GangTrace, Numbers, RestartCost
from bench.queueing.summary import SetResult, SummaryRow, draw_bars
from bench.runner import Progress

ROUND_S = 360.0
_GPUS = 64
_UNKNOWN_OVERHEAD_S = 10.0
# What interference adds to an iteration in their simulator.
_SIMULATED_SLOWDOWN = 1.015
_SPREADS = (0.3, 0.7, 1.5)
_AGREEMENT = 0.05


def read_trace(folder: Path, name: str, *, slowdown: float = 1.0) -> GangTrace:
    """Reads a trace; `traceN_pr` is traceN with all jobs submitted at 0."""
    table = pd.read_csv(folder / f"{name.removesuffix('_pr')}.csv")
    if name.endswith("_pr"):
        table["submit_time"] = 0
    table = table.sort_values("submit_time", kind="stable")
    overheads = pd.read_csv(folder / "overheads.csv").set_index(["num_gpu", "model"])["overhead_s"].to_dict()
    restart_s = [overheads.get(key, _UNKNOWN_OVERHEAD_S) for key in zip(table.num_gpu, table.model_name, strict=True)]
    return GangTrace(
        name,
        table.job_id.to_numpy(),
        table.num_gpu.to_numpy(),
        table.submit_time.to_numpy() / 1000,
        table.iterations.to_numpy(dtype=float),
        table.iteration_time.to_numpy() * slowdown / 1000,
        np.array(restart_s, dtype=float),
        tuple(table.model_name),
    )


def use_measured_service(trace: GangTrace, results: pd.DataFrame, policy: str) -> GangTrace:
    """Returns the trace with the time that each job ran in a policy's run on the testbed."""
    service_s = results[results.policy == policy].set_index("job_id").service_s.loc[trace.job_ids].to_numpy()
    return replace(trace, iteration_s=service_s / trace.iterations)


def bound_average_jct_s(trace: GangTrace, gpus: int = _GPUS) -> float:
    """Returns what no schedule's average JCT can undercut."""
    run_s = trace.iterations * trace.iteration_s
    size_s = run_s * trace.gpus / gpus  # on the whole cluster
    left_s, busy_s = size_s.copy(), np.zeros(len(size_s))
    waiting: list[tuple[float, int]] = []
    now_s, arrived, count = 0.0, 0, len(size_s)
    while waiting or arrived < count:
        if not waiting:
            now_s = max(now_s, float(trace.submit_s[arrived]))
        while arrived < count and trace.submit_s[arrived] <= now_s:
            heapq.heappush(waiting, (float(size_s[arrived]), arrived))
            arrived += 1
        job = waiting[0][1]
        end_s = now_s + float(left_s[job])
        until_s = min(end_s, float(trace.submit_s[arrived])) if arrived < count else end_s
        busy_s[job] += (until_s - now_s) * 0.5 * (until_s + now_s)
        left_s[job] -= until_s - now_s
        if until_s == end_s:
            heapq.heappop(waiting)
        now_s = until_s
    return float((busy_s / size_s + 0.5 * run_s - trace.submit_s).mean())


def _describe(
    names: tuple[str, str], run: GangRun, published: dict[str, float] | None, bounds: tuple[float, float]
) -> list[SummaryRow]:
    set_name, policy = names
    theirs = published or {}
    values = {"avg_jct_s": run.average_jct_s, "makespan_s": run.makespan_s, "p99_jct_s": run.p99_jct_s}
    found: list[float | None] = [bounds[0], bounds[1], None]
    return [
        SummaryRow(set_name, policy, metric, value, theirs.get(metric), bound)
        for (metric, value), bound in zip(values.items(), found, strict=True)
    ]


def _peers(*, counts_only: bool, round_s: float) -> dict[str, Callable[[], GangPolicy]]:
    return {
        "srtf": lambda: ShortestRemaining(by_gpus=False),
        "srsf": lambda: ShortestRemaining(by_gpus=True),
        "tiresias": lambda: LeastAttained(counts_only=counts_only),
        "themis": lambda: FinishTimeFairness(round_s),
    }


def run_testbed(folder: Path) -> Iterator[SummaryRow]:
    """Peers by the testbed's rules."""
    trace = read_trace(folder, "cluster_trace")
    results = pd.read_csv(folder / "results_testbed.csv")
    published = pd.read_csv(folder / "summary_testbed.csv").set_index("policy").to_dict("index")
    for name, make in _peers(counts_only=False, round_s=ROUND_S).items():
        measured = use_measured_service(trace, results, name)
        bounds = bound_average_jct_s(measured), measured.gpu_seconds / _GPUS
        run = GangSimulation(measured, make(), round_s=ROUND_S).run()
        yield from _describe(("muri testbed", name), run, published[name], bounds)


def run_simulator(folder: Path, names: tuple[str, ...], *, themis: bool) -> Iterator[SummaryRow]:
    """Peers by the simulator's rules, and ours by the same ones."""
    published = pd.read_csv(folder / "published_sim.csv").set_index(["trace", "policy"]).to_dict("index")
    for name in names:
        trace = read_trace(folder, name, slowdown=_SIMULATED_SLOWDOWN)
        bounds = bound_average_jct_s(trace), trace.gpu_seconds / _GPUS
        makes = _peers(counts_only=True, round_s=0.0)
        if not themis or name.endswith("_pr"):
            makes.pop("themis")
        for policy, make in {**makes, "eelgrid known": FastestEnds, "eelgrid unknown": LearnedIndex}.items():
            run = GangSimulation(trace, make(), restart=RestartCost.EVERY_EVENT).run()
            yield from _describe((f"muri {name}", policy), run, published.get((name, policy)), bounds)


def run_ours(folder: Path, seeds: int) -> Iterator[SummaryRow]:
    """Ours, and the strongest peers without rounds, on the testbed's jobs; a start costs its published overhead."""
    trace = use_measured_service(
        read_trace(folder, "cluster_trace"), pd.read_csv(folder / "results_testbed.csv"), "srsf"
    )
    bounds = bound_average_jct_s(trace), trace.gpu_seconds / _GPUS
    makes: dict[str, Callable[[], GangPolicy]] = {
        "srsf without rounds": lambda: ShortestRemaining(by_gpus=True),
        "tiresias without rounds": lambda: LeastAttained(counts_only=False),
        "eelgrid known": FastestEnds,
        "eelgrid unknown": LearnedIndex,
    }
    for name, make in makes.items():
        run = GangSimulation(trace, make(), restart=RestartCost.ON_START).run()
        yield from _describe(("muri testbed", name), run, None, bounds)
    for spread in _SPREADS:
        runs = []
        for seed in range(seeds):
            estimates_s = _draw_estimates(trace, spread, seed)
            simulation = GangSimulation(trace, FastestEnds(estimates_s, spread), restart=RestartCost.ON_START)
            runs.append(simulation.run())
        for metric in ("average_jct_s", "makespan_s", "p99_jct_s"):
            mean = float(np.mean([getattr(run, metric) for run in runs]))
            short = metric.replace("average", "avg")
            bound = {"average_jct_s": bounds[0], "makespan_s": bounds[1]}.get(metric)
            yield SummaryRow("muri testbed", f"eelgrid estimates {spread}", short, mean, None, bound, seeds)


def _draw_estimates(trace: GangTrace, spread: float, seed: int) -> Numbers:
    """Run times with a log-normal error of this standard deviation of the logarithm."""
    errors = np.random.default_rng(seed).normal(0.0, spread, len(trace.gpus))
    return trace.iterations * trace.iteration_s * np.exp(errors)


def run_set(folder: Path, *, quick: bool) -> SetResult:
    """Runs the set; quick leaves out the large traces, Themis on traces, and seeds beyond two."""
    rows, progress = list[SummaryRow](), Progress("runs of Muri's set")
    traces = ("trace1",) if quick else ("trace1", "trace1_pr", "trace2", "trace2_pr")
    total = 3 * (4 + 4 + len(_SPREADS) + len(traces) * 5 + (0 if quick else 2))
    for part in (
        run_testbed(folder),
        run_ours(folder, 2 if quick else 10),
        run_simulator(folder, traces, themis=not quick),
    ):
        for row in part:
            rows.append(row)
            progress.show(len(rows), total)
    return SetResult(tuple(rows), _judge(rows))


def _judge(rows: list[SummaryRow]) -> tuple[tuple[str, bool], ...]:
    averages = [row for row in rows if row.metric == "avg_jct_s"]
    twins = [row for row in averages if row.published is not None and row.ours is not None]
    targets = []
    for policy in ("srtf", "srsf", "tiresias", "themis"):
        errors = [
            abs(row.ours / row.published - 1.0)
            for row in twins
            if row.policy == policy
            and row.ours
            and row.published
            # Its shares on the simulator's traces are what a numerical solver left undecided; they are in the table.
            and (policy != "themis" or row.set_name == "muri testbed")
        ]
        worst = max(errors, default=0.0)
        targets.append(
            (f"{policy}: worst error of an average JCT {worst:.2g}, at most {_AGREEMENT}", worst <= _AGREEMENT)
        )
    testbed = {row.policy: row for row in averages if row.set_name == "muri testbed"}
    best = testbed["srsf without rounds"].ours or 0.0
    ours = testbed["eelgrid known"].ours or 0.0
    targets.append((f"known: average JCT {ours:,.0f} s below that of SRSF without rounds {best:,.0f} s", ours < best))
    unknown, queues = testbed["eelgrid unknown"].ours or 0.0, testbed["tiresias without rounds"].ours or 0.0
    targets.append(
        (
            f"unknown: average JCT {unknown:,.0f} s below that of Tiresias without rounds {queues:,.0f} s",
            unknown < queues,
        )
    )
    return tuple(targets)


def draw(path: Path, result: SetResult) -> None:
    """Draws the testbed's averages and makespans, with their bounds, and the averages on the simulator's traces."""
    from bench.plotting import draw_figure  # a second to import

    rows = result.rows
    testbed = [row for row in rows if row.set_name == "muri testbed"]
    others = [row for row in rows if row.set_name != "muri testbed" and row.metric == "avg_jct_s"]
    with draw_figure(path, 1, 3, size=(16, 6), grid="x") as panels:
        for panel, metric, title in zip(
            panels, ("avg_jct_s", "makespan_s"), ("average JCT, s", "makespan, s"), strict=False
        ):
            shown = [row for row in testbed if row.metric == metric]
            draw_bars(
                panel, [row.policy for row in shown], [row.ours for row in shown], [row.published for row in shown]
            )
            panel.axvline(max(row.bound or 0.0 for row in shown), color="tab:red", linestyle="--", label="bound")
            panel.set_title(f"testbed: {title}")
            panel.legend()
        labels = [f"{row.set_name.removeprefix('muri ')}: {row.policy}" for row in others]
        draw_bars(panels[2], labels, [row.ours for row in others], [row.published for row in others])
        panels[2].tick_params(axis="y", labelsize=7)
        panels[2].set_xscale("log")
        panels[2].set_title("simulator: average JCT, s")
