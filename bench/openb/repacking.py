"""What a fleet would take if everything could be moved at each arrival: python -m bench.openb.repacking --data DIR.

Owns the course of that ideal and its table. Must not know policies beyond the two that are shown beside it.

Theory: `gap_alloc_pp` compares a policy with the best choice among all tasks that arrive, which refuses what wastes most.
A policy may not choose: what fits is placed. Here an arrival is refused only if no arrangement of it and of everything
held would fit, by the LP of bench.openb.bounds, whose nodes are pooled by shape: nothing is known of what is to come, but
moving costs nothing. A fleet from which nothing leaves never takes a class again that it refused once, nor any class that
asks for at least as much of everything. So the course is a few searches for the next refusal.

Until its first refusal this is a bound: no policy takes all that has arrived for longer, whatever it knows. What it
allocates at x = 1 is not one: who packs badly enough to have no room for what wastes most may end with more GPU. It is
what packing alone can give.
"""

import statistics
import sys
from typing import NamedTuple

import click
import numpy as np
import numpy.typing as npt
from joblib import Parallel, delayed

from bench.openb.bounds import Relaxation, shapes_of
from bench.openb.mix_comparison import read_pools
from bench.openb.mixes import SEEDS_APART, draw_mix
from bench.openb.policies import OURS, REFERENCE, choose_names
from bench.openb.traces import load_trace, trace_names
from bench.runner import (
    Options,
    Progress,
    Unusable,
    benchmark,
    data_option,
    processes_option,
    seeds_option,
)
from bench.tables import format_table, write_csv
from eelgrid_controller.replay.csv_reader import TraceError
from eelgrid_controller.replay.openb_protocol import SEEDS, TaskSpecs, TraceArrays, arrival_order, node_order
from eelgrid_kernels.arrays import Ints
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.simulation import build_empty_engine, simulate_arrivals

STRIDE = 32  # arrivals; once classes are closed, there is room for a few


class Taken(NamedTuple):
    """What a fleet took of one order of arrivals until x = 1."""

    first_refused: float  # x of the first arrival that was refused, 1 where none was
    allocated_pct: float  # of all GPU
    cpu_only_pct: float  # of the CPU that tasks without GPU asked for, 100 where none did


class Row(NamedTuple):
    """The ideal beside FGD and ours with one order of arrivals."""

    trace: str
    seed: int
    ideal: Taken
    reference: Taken
    ours: Taken


def asks_no_less(specs: TaskSpecs) -> npt.NDArray[np.bool_]:
    """(S, S) whether wherever a task of the row's class fits, one of the column's does."""
    more = np.ones((len(specs.cpu_milli),) * 2, np.bool_)
    for column in (specs.cpu_milli, specs.memory_mib, specs.gpu_count, specs.gpu_milli):
        more &= column[:, None] >= column[None, :]
    models = ((specs.allows[:, None, :] == 0) | (specs.allows[None, :, :] != 0)).all(axis=2)
    more &= models | (specs.gpu_count == 0)[None, :]
    return more


def take_arrivals(trace: TraceArrays, order: Ints) -> npt.NDArray[np.bool_]:
    """(A,) which arrivals the ideal takes."""
    more, relaxation = asks_no_less(trace.specs), Relaxation(shapes_of(trace.fleet), trace.specs)
    classes, arrivals = len(trace.task_milli), len(order)
    closed, held = np.zeros(classes, np.bool_), np.zeros(classes, np.int64)
    taken = np.zeros(arrivals, np.bool_)

    def hold(begin: int, end: int) -> Ints:
        coming = order[begin:end]
        return held + np.bincount(coming[~closed[coming]], minlength=classes)

    begin = 0
    while begin < arrivals:
        fewest, most, stride = begin, arrivals, STRIDE if closed.any() else arrivals
        while fewest < most:  # up to the last arrival with which all of the open classes can be held
            end = min(most, fewest + stride)
            if relaxation.can_hold(hold(begin, end)):
                fewest, stride = end, 2 * stride
            else:
                most, stride = end - 1, max(1, (end - fewest) // 2)
        held, first = hold(begin, fewest), not closed.any()
        taken[begin:fewest] = ~closed[order[begin:fewest]]
        if fewest < arrivals:
            closed |= more[:, order[fewest]]
        if first:
            _close_classes(relaxation, held, closed, order[fewest:], more)
        begin = fewest + 1
    return taken


def _close_classes(
    relaxation: Relaxation, held: Ints, closed: npt.NDArray[np.bool_], coming: Ints, more: npt.NDArray[np.bool_]
) -> None:
    """Closes the classes of coming tasks of which not one fits any more, in place; those that ask for least are tried first."""
    kinds = np.unique(coming)
    for kind in kinds[np.argsort(-more[:, kinds].sum(axis=0), kind="stable")].tolist():
        if not closed[kind]:
            held[kind] += 1
            if not relaxation.can_hold(held):
                closed |= more[:, kind]
            held[kind] -= 1


def sum_taken(trace: TraceArrays, order: Ints, taken: npt.NDArray[np.bool_]) -> Taken:
    """The figures of arrivals (A,) of which some were taken (A,)."""
    gpu_milli, capacity = trace.task_milli[order], trace.fleet.gpu_milli
    cpu_milli = np.where(trace.specs.gpu_count[order] == 0, trace.specs.cpu_milli[order], 0)
    first = 1.0 if taken.all() else float(gpu_milli[: int(np.argmin(taken)) + 1].sum() / capacity)
    cpu_only = 100.0 * cpu_milli[taken].sum() / cpu_milli.sum() if cpu_milli.any() else 100.0
    return Taken(first, float(100.0 * gpu_milli[taken].sum() / capacity), float(cpu_only))


def compare(trace: TraceArrays, seed: int) -> Row:
    """One order of arrivals until they ask for the fleet's GPU."""
    order = arrival_order(trace, seed)
    order = order[: int(np.searchsorted(np.cumsum(trace.task_milli[order]), trace.fleet.gpu_milli, side="right"))]

    def play(policy: str) -> Taken:
        rank = node_order(trace, seed)
        run = build_empty_engine(trace.fleet, trace.specs, trace.typical, rank, find_policy(policy))
        return sum_taken(trace, order, simulate_arrivals(run, order).placed)

    return Row(trace.name, seed, sum_taken(trace, order, take_arrivals(trace, order)), play(REFERENCE), play(OURS))


def _cells(row: Row) -> dict[str, object]:
    told = {"ideal": row.ideal, "fgd": row.reference, "ours": row.ours}
    return {
        "trace": row.trace,
        "seed": row.seed,
        **{f"alloc_{who}": f"{taken.allocated_pct:.2f}" for who, taken in told.items()},
        **{f"first_{who}": f"{taken.first_refused:.4f}" for who, taken in told.items()},
        **{f"cpu_only_{who}": f"{taken.cpu_only_pct:.2f}" for who, taken in told.items()},
    }


def summarize(rows: list[Row]) -> str:
    """Mean distance of ours and of FGD from the ideal by trace, with their deviation over orders of arrival."""
    lines = []
    for name in dict.fromkeys(row.trace for row in rows):
        mine = [row for row in rows if row.trace == name]
        below = [[row.ideal.allocated_pct - who(row).allocated_pct for row in mine] for who in (_ours, _reference)]
        spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in below]
        lines.append(
            f"{name}: {statistics.fmean(row.ideal.allocated_pct for row in mine):.2f} % could be allocated; below it "
            f"ours {statistics.fmean(below[0]):.2f} points (deviation {spread[0]:.2f}), "
            f"FGD {statistics.fmean(below[1]):.2f} ({spread[1]:.2f})"
        )
    return "\n".join(lines)


def _ours(row: Row) -> Taken:
    return row.ours


def _reference(row: Row) -> Taken:
    return row.reference


def _list_jobs(options: Options) -> list[tuple[TraceArrays, int]]:
    """The traces, or the mixes, each with its first orders of arrival."""
    if not options.mixes:
        names = choose_names(options.traces, trace_names(options.data))
        seeds = range(SEEDS[0], SEEDS[0] + options.seeds)
        return [(load_trace(options.data, name), seed) for name in names for seed in seeds]
    nodes, pools = read_pools(options.data)
    if not all(number.strip().isdecimal() for number in options.mixes.split(",")):
        raise Unusable(f"{options.mixes!r} is no list of numbers of mixes")
    numbers = sorted({int(number) for number in options.mixes.split(",")})
    drawn = [(draw_mix(nodes, pools, options.seed, number), SEEDS_APART * options.seed + number) for number in numbers]
    return [(trace, first + i) for trace, first in drawn for i in range(options.seeds)]


@benchmark(out="bench-out/openb", refused=(TraceError, OSError))
@data_option()
@click.option("--traces", default="all", help="suffixes of the task lists, with commas")
@click.option("--mixes", default="", help="numbers of mixes to draw in place of the traces, with commas")
@click.option("--seed", default=1, help="of the mixes")
@seeds_option(1, f"how many, from {SEEDS[0]} up; of a mix, those that bench.openb takes")
@processes_option
def main(options: Options) -> int:
    """Plays each order of arrivals; 2 if what was asked for is not there."""
    if options.seeds < 1 or options.processes < 1 or options.seed < 0:
        raise Unusable("take at least one seed and process, and mixes by a seed that is not negative")
    jobs = _list_jobs(options)
    rows: list[Row] = []
    progress = Progress("orders of arrival")
    work = Parallel(n_jobs=min(options.processes, len(jobs)), return_as="generator")
    for row in work(delayed(compare)(*job) for job in jobs):
        rows.append(row)
        write_csv(options.out / "repacking.csv", None, map(_cells, rows))  # what is done stays
        progress.show(len(rows), len(jobs))
    print(format_table(None, map(_cells, rows), words=1))
    print(f"\n{summarize(rows)}\nwritten to {options.out / 'repacking.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
