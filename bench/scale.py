"""Cost of a decision by the size of the fleet: `python -m bench.scale --out DIR`.

Owns the construction of the fleet and the clock. Uses the engine through its kernels.

A fleet of a given number of GPUs is the repeated openb node list, cut where it has
enough. It is filled to 80 % of its GPUs by tasks drawn from the trace; each task
then draws the time of its departure, so arrivals and departures keep that load. After
every kind of task has arrived at least once (`settling` steps, not timed), each
arrival is timed in the compiled loop, with its commit. Departures are timed separately:
they rescore nothing, the following arrivals do. `scan` is the same engine, which
discards its index before each decision and evaluates every state again: the
difference is the gain of the index, in the same run on the same fleet. `tended` does
idle work before each decision until no kind has anything left, as the controller does
between calls, timed separately: the total cost is higher. Beside them a loop of constant
work is timed by the same clock: its 99th percentile is the machine's part of a tail.
"""
# ruff: noqa: PLR0917 (numba takes arguments by position)

import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from bench.kernel_clock import THREAD, WALL, now_ns
from bench.openb.traces import csv_folder, load_trace
from bench.runner import Options, benchmark, data_option
from bench.tables import write_csv
from eelgrid_controller.replay.openb_protocol import TraceArrays
from eelgrid_kernels.argmin_index import place_task, work_ahead
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.candidates import AHEAD_MOST, BEHIND_LEAST
from eelgrid_kernels.compilation import kernel
from eelgrid_kernels.node_states import shift_task
from eelgrid_kernels.opportunity_prices import update_prices
from eelgrid_kernels.simulation import build_empty_engine

_SIZES = (1_000, 6_212, 30_000, 100_000, 512_000, 1_000_000)
_FILL = 0.8
_WAYS = ("settling", "index", "tended", "scan")
_WAYS_TENDED, _WAYS_SCAN = 2, 3
_CLOCKS = {"wall": WALL, "thread": THREAD}


class Columns(NamedTuple):
    """A fleet, as eelgrid_kernels.simulation takes it."""

    cpu_milli: Ints
    memory_mib: Ints
    gpu_count: Ints
    model: Ints
    idle_w: Floats
    busy_w: Floats


class Row(NamedTuple):
    """One line of the CSV."""

    gpus: int
    nodes: int
    policy: str
    way: str
    states: int
    allocated_pct: float
    decisions: int
    p50_us: float
    p90_us: float
    p99_us: float
    most_us: float
    departure_p50_us: float
    departure_p99_us: float
    idle_mean_us: float
    spin_p50_us: float
    spin_p99_us: float
    resident_mib: float


def grown(trace: TraceArrays, gpus: int) -> Columns:
    """The node list over and over, until there are so many GPUs."""
    counts = trace.fleet.gpu_count
    rounds = -(-gpus // int(counts.sum()))
    most = int(np.searchsorted(np.cumsum(np.tile(counts, rounds)), gpus)) + 1
    return Columns(*(np.tile(column, rounds)[:most] for column in trace.fleet))


@kernel
def _fill(run: Any, order: Ints, held: Ints, slots: Ints, most: int) -> tuple[int, int]:
    """Place tasks until so many milli-GPU are asked for; returns how many were placed and how many drawn."""
    count, asked, at = 0, 0, 0
    while asked < most and at < order.shape[0]:
        kind = order[at]
        at += 1
        node = place_task(run, kind, 0)
        if node >= 0:
            held[count, 0], held[count, 1] = node, kind
            slots[count] = run.taken
            count += 1
            asked += run.kinds[kind].gpu_count * run.kinds[kind].gpu_milli
    return count, at


@kernel
def _churn(
    run: Any, order: Ints, leavers: Ints, held: Ints, slots: Ints, count: int, times: Ints, clock: int, way: int
) -> int:
    """One task leaves, one arrives, at each step; nanoseconds of both and of idle work between into times (A, 3)."""
    scratch = np.zeros(2, np.int64)
    for step in range(order.shape[0]):
        victim, kind = leavers[step] % count, order[step]
        begun = now_ns(clock, scratch)
        shift_task(run, held[victim, 0], held[victim, 1], slots[victim], 1)
        times[step, 1] = now_ns(clock, scratch) - begun
        if way == _WAYS_TENDED:
            begun = now_ns(clock, scratch)
            update_prices(run)
            turn = np.int64(0)
            while turn >= 0:
                turn = work_ahead(run, turn, BEHIND_LEAST, AHEAD_MOST)
            times[step, 2] = now_ns(clock, scratch) - begun
        elif way == _WAYS_SCAN:
            run.kinds[kind].read = -1
        begun = now_ns(clock, scratch)
        update_prices(run)
        node = place_task(run, kind, 0)
        times[step, 0] = now_ns(clock, scratch) - begun
        if node >= 0:
            held[victim, 0], held[victim, 1] = node, kind
            slots[victim] = run.taken
        else:
            count -= 1
            held[victim], slots[victim] = held[count], slots[count]
    return count


@kernel
def _spin(times: Ints, steps: int, clock: int) -> int:
    """Nanoseconds of the same arithmetic, over and over, into times (A,)."""
    scratch, value = np.zeros(2, np.int64), 1
    for i in range(times.shape[0]):
        begun = now_ns(clock, scratch)
        for _ in range(steps):
            value = (value * 1103515245 + 12345) & 0x7FFFFFFF
        times[i] = now_ns(clock, scratch) - begun
    return value


def spin_percentiles_us(typical_us: float, count: int, clock: int) -> tuple[float, float]:
    """Median and 99th percentile of a loop whose work is constant and takes about so long."""
    times = np.zeros(1000, np.int64)
    _spin(times[:1], 1, clock)  # compiles
    _spin(times, 10_000, clock)
    steps = max(1, int(10_000 * typical_us * 1e3 / max(1.0, float(np.median(times)))))
    times = np.zeros(count, np.int64)
    _spin(times, steps, clock)
    half, most = np.percentile(times / 1e3, (50, 99))
    return float(half), float(most)


def measured(trace: TraceArrays, gpus: int, name: str, steps: tuple[int, int, int], clock: int) -> list[Row]:
    """Both ways on a fleet of that size; steps: to settle, to time, to time by scanning."""
    fleet, how, bits = grown(trace, gpus), find_policy(name), np.random.PCG64(gpus)
    nodes = len(fleet.gpu_count)
    run = build_empty_engine(fleet, trace.specs, trace.typical, np.arange(nodes), how)

    def drawn(count: int) -> Ints:
        return trace.task_spec[(bits.random_raw(count) % np.uint64(len(trace.task_spec))).astype(np.int64)]

    capacity = int(fleet.gpu_count.sum()) * 1000
    most = 4 * int(fleet.gpu_count.sum()) + 1000
    held, slots = np.zeros((most, 2), np.int64), np.full((most, run.taken.shape[0]), -1, np.int64)
    count, _ = _fill(run.table, drawn(most), held, slots, int(_FILL * capacity))
    rows = []
    for code, (way, number) in enumerate(zip(_WAYS, (steps[0], steps[1], steps[1], steps[2]), strict=True)):
        # Every kind once and then the trace, so that none is met for the first time while the clock runs.
        order = np.concatenate((np.arange(len(run.kinds)), drawn(number))) if way == "settling" else drawn(number)
        times = np.zeros((len(order), 3), np.int64)
        leavers = (bits.random_raw(len(order)) >> np.uint64(11)).astype(np.int64)
        count = _churn(run.table, order, leavers, held, slots, count, times, clock, code)
        if way == "settling":
            continue
        asked = run.kinds[held[:count, 1]]
        micro = np.percentile(times / 1e3, (50, 90, 99, 100), axis=0)
        states = int((run.states["root"] >= 0).sum())
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append(
            Row(
                int(fleet.gpu_count.sum()),
                nodes,
                name,
                way,
                states,
                100.0 * float((asked["gpu_count"] * asked["gpu_milli"]).sum()) / capacity,
                len(order),
                *micro[:, 0],
                micro[0, 1],
                micro[2, 1],
                float(times[:, 2].mean() / 1e3),
                *spin_percentiles_us(float(micro[0, 0]), len(order), clock),
                resident,
            )
        )
    return rows


def plot(rows: list[Row], path: Path) -> None:
    """Median and 99th percentile of a decision against the GPUs of the fleet, with and without the index."""
    from bench.plotting import draw_figure  # a second to import

    with draw_figure(path, size=(7, 4.5)) as (axes,):
        for way, colour in (("index", "tab:blue"), ("tended", "tab:green"), ("scan", "tab:gray")):
            mine = [row for row in rows if row.way == way]
            for quantile, style in (("p50_us", "-o"), ("p99_us", "--s")):
                values = [getattr(row, quantile) for row in mine]
                axes.plot([row.gpus for row in mine], values, style, color=colour, label=f"{way}, {quantile[:3]}")
        axes.axhline(1000.0, color="tab:red", linewidth=0.8, label="1 ms")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="GPUs of the fleet",
            ylabel="µs a decision",
            title="A decision with its commit, fleet 80 % full, tasks come and go",
        )
        axes.legend()


@benchmark(out="bench-out/scale")
@data_option()
@click.option("--trace", default="default", help="task list to draw from")
@click.option("--policy", default="eelgrid", help="one of the engine's policies")
@click.option("--sizes", default=",".join(map(str, _SIZES)), help="GPUs, separated by commas")
@click.option("--steps", default="20000,20000,100", help="to settle, to time, to time by scanning")
@click.option(
    "--clock",
    type=click.Choice(_CLOCKS),
    default="wall",
    help="thread: CPU time, for a shared machine",
)
def main(options: Options) -> None:
    """Measure, print, write."""
    trace = load_trace(csv_folder(options.data), options.trace)
    settle, timed, scanned = map(int, options.steps.split(","))
    measured(trace, 100, options.policy, (1, 1, 1), _CLOCKS[options.clock])  # compiles
    rows: list[Row] = []
    for gpus in map(int, options.sizes.split(",")):
        begun = time.monotonic()
        for row in measured(trace, gpus, options.policy, (settle, timed, scanned), _CLOCKS[options.clock]):
            rows.append(row)
            print(
                f"{row.gpus:>9} GPUs {row.states:>7} states {row.way:<6} p50 {row.p50_us:9.1f} p90 "
                f"{row.p90_us:9.1f} p99 {row.p99_us:9.1f} µs, departure p99 {row.departure_p99_us:.1f} µs, "
                f"idle {row.idle_mean_us:.0f} µs, spin p50 {row.spin_p50_us:.1f} p99 {row.spin_p99_us:.1f} µs, {row.resident_mib:.0f} MiB, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
        cells = ([f"{value:.2f}" if isinstance(value, float) else value for value in row] for row in rows)
        write_csv(options.out / "scale.csv", Row._fields, cells)
    plot(rows, options.out / "scale.png")


if __name__ == "__main__":
    sys.exit(main())
