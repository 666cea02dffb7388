"""Runs every policy with every seed on a trace, in parallel processes or on a Ray cluster; tables and plots of the results.

The same runs give the same results, in the same order, on any number of processes. A seed draws the order of nodes
among equals and, where they are drawn, the failures; in the mode of arrivals also the order of the tasks. Every policy
meets the same of each.

Results are tables in files, CSV, or Parquet where pyarrow is, and a picture where matplotlib is. Units stand in the
names of columns; energy leaves SI here, as kWh. A table is written aside and renamed, so that a reader never sees half
of it. Lines of a picture are means over seeds; whiskers span the smallest to the largest seed.
"""

import csv
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eelgrid_controller.errors import import_library
from eelgrid_controller.placement.planner import DEFAULT_PLACEMENT_POLICY, make_prices
from eelgrid_controller.replay.openb_protocol import TraceArrays, arrival_order, node_order
from eelgrid_controller.replay.run_statistics import (
    GRID,
    JOULES_PER_KWH,
    ArrivalCurves,
    RunSeries,
    RunSummary,
    TariffSteps,
    compute_curves,
    compute_series,
    empty_power_w,
    mean_curves,
    saving_mean_pct,
    saving_share,
    summarize_run,
    value_at,
)
from eelgrid_controller.replay.simulation import ArrivalSchedule, Outage, draw_outages, simulate_policy
from eelgrid_kernels.arrays import Floats
from eelgrid_kernels.baselines import PlacementPolicy, find_policy
from eelgrid_kernels.simulation import SimulatedFleet, build_empty_engine, simulate_arrivals
from eelgrid_protos.messages import OBJECTIVES
from eelgrid_protos.safe_text import escape_csv_cell

# Ours with the weights of an objective; without one it has those of `balanced`.
OBJECTIVE_POLICIES = {f"{DEFAULT_PLACEMENT_POLICY}-{name}": name for name in OBJECTIVES if name != "balanced"}
SERIES_POINTS = 500  # means over time that are kept of a run: finer than a picture shows


class RunBackend(Enum):
    """Who makes the runs."""

    PROCESSES = "processes"
    RAY = "ray"


class RandomFailures(NamedTuple):
    """How nodes fail where failures are drawn."""

    mtbf_s: float
    mttr_s: float


class ArrivalScenario(NamedTuple):
    """The published protocol: tasks in an order drawn by the seed, 1.3 times capacity, and none ever leaves."""

    trace: TraceArrays


class TimedScenario(NamedTuple):
    """Tasks come and go at their times."""

    trace: TraceArrays
    schedule: ArrivalSchedule
    end_s: float
    failures: tuple[Outage, ...] | RandomFailures
    prices: TariffSteps | None
    pue: float


class PolicyRun(NamedTuple):
    """One run to make."""

    how: ArrivalScenario | TimedScenario
    policy: str
    seed: int


class TimedRunResult(NamedTuple):
    """What is kept of a run with times."""

    policy: str
    seed: int
    summary: RunSummary
    series: RunSeries


class ArrivalRunResult(NamedTuple):
    """What is kept of a run of arrivals."""

    policy: str
    seed: int
    tasks: int
    placed: int
    curves: ArrivalCurves


RunResult = TimedRunResult | ArrivalRunResult


def find_replayed_policy(name: str) -> PlacementPolicy:
    """A policy by its name; eelgrid has the weights of the objective `balanced`, eelgrid-energy and the like those of another.

    Raises ValueError, with the names that there are, for any other.
    """
    objective = OBJECTIVE_POLICIES.get(name)
    if objective is None:
        try:
            return find_policy(name)
        except ValueError as unknown:
            raise ValueError(f"{unknown}, or {', '.join(OBJECTIVE_POLICIES)}") from None
    weights = np.array(make_prices(OBJECTIVES[objective]), np.float64)
    return find_policy(DEFAULT_PLACEMENT_POLICY)._replace(name=name, weights=weights)


def list_runs(how: ArrivalScenario | TimedScenario, policies: Iterable[str], seeds: Iterable[int]) -> list[PolicyRun]:
    """Every policy with every seed."""
    every = tuple(seeds)
    return [PolicyRun(how, name, seed) for name in policies for seed in every]


def _arrive(how: ArrivalScenario, name: str, seed: int) -> ArrivalRunResult:
    trace, chosen = how.trace, find_replayed_policy(name)
    rank = node_order(trace, seed)
    order = arrival_order(trace, seed)
    empty = build_empty_engine(trace.fleet, trace.specs, trace.typical, rank, chosen)
    ran = simulate_arrivals(empty, order)
    mine = compute_curves(ran, trace.fleet.gpu_milli, empty_power_w(trace.fleet))
    return ArrivalRunResult(name, seed, len(order), int(ran.placed.sum()), mine)


def _outages(how: TimedScenario, seed: int) -> Sequence[Outage]:
    match how.failures:
        case RandomFailures(mtbf_s, mttr_s):
            nodes, begin_s = len(how.trace.fleet.model), how.schedule.begin_s
            return draw_outages(nodes, begin_s, how.end_s, mtbf_s=mtbf_s, mttr_s=mttr_s, seed=seed)
        case given:
            return given


def _live(how: TimedScenario, name: str, seed: int) -> TimedRunResult:
    trace, chosen = how.trace, find_replayed_policy(name)
    rank = node_order(trace, seed)
    fleet = SimulatedFleet(trace.fleet, trace.specs, trace.typical, rank, chosen)
    outages = _outages(how, seed)
    outcome = simulate_policy(trace, how.schedule, fleet, outages, how.end_s)
    return TimedRunResult(
        name, seed, summarize_run(outcome, how.prices, how.pue), compute_series(outcome, SERIES_POINTS)
    )


def execute_run(job: PolicyRun) -> RunResult:
    """Makes one run."""
    match job.how:
        case ArrivalScenario():
            return _arrive(job.how, job.policy, job.seed)
        case TimedScenario():
            return _live(job.how, job.policy, job.seed)


def _quietly() -> None:
    """For a worker: what it has to say comes back as a result or an error; its trace when it is ended helps nobody."""
    sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # as long as the process


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Holds an interrupt back; processes that begin meanwhile never get one.

    A terminal sends it to the whole group, and a worker would answer with its trace. They are ended by their parent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_numbered(index: int, job: PolicyRun) -> tuple[int, RunResult]:
    return index, execute_run(job)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a callback of the pool failed for another reason than that the pool has ended.

    An interrupt ends it while workers still answer; where a worker died, the run's own result says so.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], RuntimeError)


def _backend(joblib: Any, backend: RunBackend) -> AbstractContextManager[Any]:
    """The context in which joblib hands out runs."""
    if backend is RunBackend.PROCESSES:
        logging.getLogger("concurrent.futures").addFilter(_is_news)
        processes: AbstractContextManager[Any] = joblib.parallel_config(backend="loky", initializer=_quietly)
        return processes
    import_library("ray.util.joblib", "--backend ray", "'ray[default]'").register_ray()
    context: AbstractContextManager[Any] = joblib.parallel_config(backend="ray")
    return context


def execute_runs(
    wanted: Sequence[PolicyRun], backend: RunBackend, processes: int | None, tell: Callable[[int], None]
) -> list[RunResult]:
    """Makes all runs, telling how many are done after each; the results are in the order of the jobs.

    Without a number of processes it is one for each CPU that this process may use, or all of the Ray cluster.
    """
    joblib = import_library("joblib", "running policies in parallel", "'eelgrid[replay]'")
    results: dict[int, RunResult] = {}
    # Ray's backend cannot give results one by one.
    way = "generator_unordered" if backend is RunBackend.PROCESSES else "list"
    count = processes or (joblib.cpu_count() if backend is RunBackend.PROCESSES else -1)
    with _backend(joblib, backend):
        work = joblib.Parallel(n_jobs=min(count, len(wanted)), return_as=way)
        # Ray's list is made within the call, so it has to hear of interrupts.
        with _defer_interrupt() if backend is RunBackend.PROCESSES else nullcontext():
            begun = work(joblib.delayed(_run_numbered)(index, job) for index, job in enumerate(wanted))
        for index, result in begun:
            results[index] = result
            tell(len(results))
    return [results[index] for index in range(len(wanted))]


TableCell = str | int | float


class TableFormat(Enum):
    """The files to write."""

    CSV = "csv"
    PARQUET = "parquet"


class ResultTable(NamedTuple):
    """Rows under titles."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]


def _table(name: str, rows: Iterable[dict[str, TableCell]]) -> ResultTable:
    every = list(rows)
    return ResultTable(name, tuple(every[0]), tuple(tuple(row.values()) for row in every))


def _times_row(trace: str, run: TimedRunResult) -> dict[str, TableCell]:
    sums = run.summary
    gpu_h = sums.gpu_s / 3600.0
    energy_kwh = sums.energy_j / JOULES_PER_KWH
    return {
        "trace": trace,
        "policy": run.policy,
        "seed": run.seed,
        "span_h": sums.span_s / 3600.0,
        "energy_kwh": energy_kwh,
        "energy_over_idle_kwh": sums.energy_over_idle_j / JOULES_PER_KWH,
        "kwh_per_gpu_h": energy_kwh / gpu_h if gpu_h else 0.0,
        "cost": sums.cost,
        "carbon_kg": sums.carbon_kg,
        "wait_mean_s": sums.wait_mean_s,
        "wait_p95_s": sums.wait_p95_s,
        "gpus_allocated_mean": sums.gpus_mean,
        "gpus_allocated_peak": sums.gpus_peak,
        "gpu_h": gpu_h,
        "lost_gpu_h": sums.lost_gpu_s / 3600.0,
        "tasks": sums.tasks,
        "finished": sums.finished,
        "running": sums.running,
        "waiting": sums.waiting,
        "refused": sums.refused,
        "restarts": sums.restarts,
    }


def times_summary(trace: str, runs: Sequence[TimedRunResult]) -> ResultTable:
    """A row for each run."""
    return _table("summary", (_times_row(trace, run) for run in runs))


def times_series(runs: Sequence[TimedRunResult]) -> ResultTable:
    """A row for each stretch of each run; each value is its mean over the stretch."""
    columns = ("policy", "seed", "from_s", "power_w", "gpus_allocated", "waiting", "running", "nodes_away")
    rows = (
        (run.policy, run.seed, *values)
        for run in runs
        for values in zip(*(column.tolist() for column in run.series), strict=True)
    )
    return ResultTable("series", columns, tuple(rows))


def _arrivals_row(trace: str, run: ArrivalRunResult, reference: str, saved_pct: float) -> dict[str, TableCell]:
    allocated_1 = value_at(run.curves.allocated, 1.0)
    return {
        "trace": trace,
        "policy": run.policy,
        "seed": run.seed,
        "reference": reference,
        "saving_mean_pct": saved_pct,
        "grar_1": allocated_1 / value_at(run.curves.arrived, 1.0),
        "alloc_100_pct": 100.0 * allocated_1,
        "alloc_130_pct": 100.0 * float(run.curves.allocated[-1]),
        "power_half_w": value_at(run.curves.power_w, 0.5),
        "power_full_w": value_at(run.curves.power_w, 1.0),
        "tasks": run.tasks,
        "placed": run.placed,
        "refused": run.tasks - run.placed,
    }


def arrivals_summary(trace: str, runs: Sequence[ArrivalRunResult]) -> ResultTable:
    """A row for each run; watts are saved against the mean of the first policy's runs."""
    reference = runs[0].policy
    theirs = mean_curves([run.curves for run in runs if run.policy == reference])
    return _table(
        "summary", (_arrivals_row(trace, run, reference, saving_mean_pct(run.curves, theirs)) for run in runs)
    )


def arrivals_series(runs: Sequence[ArrivalRunResult]) -> ResultTable:
    """A row for each load of each run."""
    columns = ("policy", "seed", "arrived_share", "power_w", "allocated_share")
    rows = (
        (run.policy, run.seed, float(x), float(power_w), float(share))
        for run in runs
        for x, power_w, share in zip(GRID, run.curves.power_w, run.curves.allocated, strict=True)
    )
    return ResultTable("series", columns, tuple(rows))


def _write_csv(path: Path, table: ResultTable) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(table.columns)
        out.writerows(
            [f"{cell:.10g}" if isinstance(cell, float) else escape_csv_cell(cell) for cell in row] for row in table.rows
        )


def _parquet_writer() -> Callable[[Path, ResultTable], None]:
    arrow: Any = import_library("pyarrow", "--format parquet", "'eelgrid[parquet]', or take --format csv")
    parquet: Any = import_library("pyarrow.parquet", "--format parquet", "'eelgrid[parquet]', or take --format csv")

    def write(path: Path, table: ResultTable) -> None:
        columns = zip(*table.rows, strict=True) if table.rows else ((),) * len(table.columns)
        parquet.write_table(arrow.table(dict(zip(table.columns, map(list, columns), strict=True))), path)

    return write


def table_writer(wanted: TableFormat) -> Callable[[Path, ResultTable], Path]:
    """What writes a table into a folder and gives the file; raises LibraryMissing, before any work is done."""
    write = _write_csv if wanted is TableFormat.CSV else _parquet_writer()

    def into(folder: Path, table: ResultTable) -> Path:
        path = folder / f"{table.name}.{wanted.value}"
        aside = path.with_suffix(".part")
        write(aside, table)
        return aside.replace(path)

    return into


_PICTURES_FROM = "'eelgrid[replay]'"
_DENSE_FROM = 0.7  # below it, every policy allocates all that arrives
_LINES = ("-", "--", "-.", ":")
_ABREAST = 12  # more bars than that have no room for a label across
_DAY_S = 86_400.0


def load_pyplot() -> Any:
    """The library that draws, without a screen; raises LibraryMissing."""
    import_library("matplotlib", "drawing pictures", _PICTURES_FROM).use("Agg")
    return import_library("matplotlib.pyplot", "drawing pictures", _PICTURES_FROM)


def _styles(names: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    return {
        name: {"color": f"C{index % 10}", "linestyle": _LINES[index // 10 % len(_LINES)]}
        for index, name in enumerate(names)
    }


def _dress(axes: Any, title: str, below: str, beside: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    axes.grid(alpha=0.3)


class _Bars(NamedTuple):
    """A bar for each policy: values over seeds, and what is written on it."""

    label: str
    values: Sequence[Floats]
    written: Callable[[int, float], str]


def _bars(axes: Any, names: Sequence[str], groups: Sequence[_Bars]) -> None:
    """Bars side by side for each name; each is the mean of its values over seeds."""
    width, crowded = 0.8 / len(groups), len(names) * len(groups) > _ABREAST
    colours = [style["color"] for style in _styles(names).values()]
    for index, (label, values, written) in enumerate(groups):
        means = np.array([value.mean() for value in values])
        reach = np.array([(value.mean() - value.min(), value.max() - value.mean()) for value in values]).T
        places = np.arange(len(names)) + (index - (len(groups) - 1) / 2) * width
        shade = 1.0 - 0.5 * index / max(1, len(groups) - 1)
        drawn = axes.bar(
            places, means, width, yerr=reach, capsize=3, label=label, color=colours, alpha=shade, error_kw={"lw": 0.8}
        )
        labels = [written(place, mean) for place, mean in enumerate(means)]
        if crowded:
            labels = [label.replace("\n", " ") for label in labels]
        axes.bar_label(drawn, labels, fontsize=7, padding=2, rotation=90 if crowded else 0)
    axes.set_xticks(np.arange(len(names)), names, rotation=90 if crowded else 0, fontsize=8)
    axes.margins(y=0.5 if crowded else 0.15)
    axes.set_ylim(bottom=0.0)


def _hours(_: int, mean_h: float) -> str:
    return f"{mean_h:,.3f}".rstrip("0").rstrip(".")


def plot_times(path: Path, trace: str, runs: Sequence[TimedRunResult]) -> None:
    """Power and allocation over time, energy and waiting by policy."""
    plt = load_pyplot()
    names = list(dict.fromkeys(run.policy for run in runs))
    styles = _styles(names)
    figure, ((power, gpus), (energy, waiting)) = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    of = {name: [run for run in runs if run.policy == name] for name in names}
    for name, mine in of.items():
        days = (mine[0].series.from_s - mine[0].series.from_s[:1]) / _DAY_S
        for axes, values in (
            (power, [run.series.power_w / 1e3 for run in mine]),
            (gpus, [run.series.gpus_allocated for run in mine]),
        ):
            axes.step(days, np.mean(values, axis=0), where="post", label=name, linewidth=1.2, **styles[name])
    _dress(power, f"{trace}: power of the machines", "days since the first arrival", "kW")
    _dress(gpus, "GPUs allocated", "days since the first arrival", "GPUs")
    power.legend(fontsize=8, ncols=2)

    def column(value: Any) -> list[Floats]:
        return [np.array([value(run.summary) for run in of[name]]) for name in names]

    whole_kwh = column(lambda sums: sums.energy_j / JOULES_PER_KWH)
    over_kwh = column(lambda sums: sums.energy_over_idle_j / JOULES_PER_KWH)
    written = _Bars("", over_kwh, lambda place, mean: f"{mean:,.0f}\nof {whole_kwh[place].mean():,.0f}")
    _bars(energy, names, [written])
    _dress(energy, "energy over what idle machines draw, of the energy in all", "", "kWh")
    mean_h = column(lambda sums: sums.wait_mean_s / 3600.0)
    late_h = column(lambda sums: sums.wait_p95_s / 3600.0)
    hours = [
        _Bars("mean", mean_h, _hours),
        _Bars("p95", late_h, _hours),
    ]
    _bars(waiting, names, hours)
    nobody = not any(value.any() for value in (*mean_h, *late_h))
    if nobody:
        waiting.set_ylim(0.0, 1.0)
    _dress(waiting, "no task ever waited" if nobody else "waiting: mean, and 95th percentile (lighter)", "", "hours")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_arrivals(path: Path, trace: str, runs: Sequence[ArrivalRunResult]) -> None:
    """Power, saving and allocation over what has arrived; saving against GRAR."""
    plt = load_pyplot()
    names = list(dict.fromkeys(run.policy for run in runs))
    styles = _styles(names)
    mean: dict[str, ArrivalCurves] = {n: mean_curves([run.curves for run in runs if run.policy == n]) for n in names}
    figure, ((power, saved), (allocated, points)) = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for name, mine in mean.items():
        share_pct = 100 * saving_share(mine, mean[names[0]])
        power.plot(GRID, mine.power_w / 1e3, label=name, linewidth=1.3, **styles[name])
        saved.plot(GRID, share_pct, linewidth=1.3, **styles[name])
        allocated.plot(GRID, 100 * mine.allocated, linewidth=1.3, **styles[name])
        saved_pct = saving_mean_pct(mine, mean[names[0]])
        grar = value_at(mine.allocated, 1.0) / value_at(mine.arrived, 1.0)
        points.plot(grar, saved_pct, "o", color=styles[name]["color"])
        points.annotate(name, (grar, saved_pct), xytext=(5, 4), textcoords="offset points", fontsize=8)
    _dress(power, f"{trace}: modelled power", "arrived GPU / capacity", "kW")
    _dress(saved, f"saving against {names[0]}", "arrived GPU / capacity", "%")
    _dress(allocated, "GPU allocated", "arrived GPU / capacity", "% of capacity")
    _dress(points, "up and to the right is better", "GRAR at 1.0", f"mean saving against {names[0]}, 0.1 to 0.8, %")
    for axes in (power, saved):
        axes.set_xlim(0.0, 1.0)
    allocated.set_xlim(_DENSE_FROM, 1.3)
    allocated.set_ylim(100 * _DENSE_FROM, 100)
    points.margins(0.15)
    power.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)
