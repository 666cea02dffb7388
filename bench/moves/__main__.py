"""Moves on openb traces: python -m bench.moves --data DIR --trace default --out DIR.

Owns the command: the trace is placed by the controller's own core, moves are
recommended for several budgets and executed on a copy, and what they gain in
watts and in room, how many watts any moves could save (the product's bound, and bounds.py), and how long they take, is
written to moves.csv, a table and moves.png. Times are of the processor: `held` is what the controller's loop waits for,
the copy of one moment; the problem is built and searched in another thread.

Two scenes for each load x (GPU asked for by what runs, over capacity):

placed   tasks have arrived up to x, and none has left
thinned  tasks have arrived up to 1.0, then random ones have left, down to x
"""

import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
from joblib import Parallel, delayed

from bench.moves.bounds import bound_fleet_w
from bench.moves.power_budgets import measure_power_budgets
from bench.moves.scenes import copy_fleet, fill_cluster
from bench.moves.waits import measure_waits
from bench.openb.bounds import Relaxation, shapes_of
from bench.openb.traces import load_trace
from bench.processes import spread
from bench.runner import Options, benchmark, data_option, processes_option, seeds_option
from bench.tables import format_table, write_csv
from eelgrid_controller.core.core import Core
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.replay.openb_protocol import SEEDS, TraceArrays, arrival_order
from eelgrid_protos.messages import MOVES_RATIO, MoveGoal, RecommendMovesRequest

LOADS = (0.5, 0.8, 1.0)
_BUDGETS_LOAD = 0.8
BUDGETS = (0.01, 0.05, 0.10)


class Row(NamedTuple):
    """One recommendation."""

    trace: str
    seed: int
    scene: str
    load: float
    budget_pct: float
    running: int
    moved: int
    moved_gpu: float
    power_before_kw: float
    saved_w: float
    saved_pct: float
    most_by_moves_w: float
    most_by_fleet_w: float
    net_gain_w: float
    typical_before: int
    typical_after: int
    block_before: float
    block_after: float
    gpu8_before: int
    gpu8_after: int
    held_ms: float
    built_ms: float
    search_s: float


def _scenes(trace: TraceArrays, seed: int) -> Iterator[tuple[str, float, Core]]:
    """The cluster at each load, first as it fills, then as it empties."""
    for load_, core in fill_cluster(trace, seed, LOADS):
        yield "placed", load_, core
    filled_ns = len(arrival_order(trace, seed)) + 3
    leaving = list(core.state.workloads)
    random.Random(seed).shuffle(leaving)
    for load_ in sorted(LOADS[:-1], reverse=True):
        while sum(record.allocated_gpu_milli for record in core.state.nodes.values()) > load_ * trace.fleet.gpu_milli:
            for _ in range(25):
                core.cancel(leaving.pop(), now_ns=filled_ns)
        yield "thinned", load_, core


def _rows(trace: TraceArrays, seed: int, goal: MoveGoal) -> list[Row]:
    rows = []
    relaxation = Relaxation(shapes_of(trace.fleet), trace.specs)
    for scene, load_, core in _scenes(trace, seed):
        least_w = None
        for budget in BUDGETS:
            asked = RecommendMovesRequest(goal=goal, moves_ratio=budget)
            begun_s = [time.thread_time()]
            survey = core.survey_moves(asked)
            begun_s.append(time.thread_time())
            problem = build_migration_problem(survey)
            begun_s.append(time.thread_time())
            found = recommend_moves(problem)
            begun_s.append(time.thread_time())
            held_s, built_s, took_s = (end - begin for begin, end in pairwise(begun_s))
            least_w = bound_fleet_w(problem, trace, relaxation) if least_w is None else least_w
            before, after = found.before, found.after
            saved_w = before.power_w - after.power_w
            rows.append(
                Row(
                    trace.name,
                    seed,
                    scene,
                    load_,
                    100 * budget,
                    found.running,
                    found.moving,
                    found.moving_gpu_milli / 1000,
                    before.power_w / 1e3,
                    saved_w,
                    100 * saved_w / before.power_w,
                    found.saved_most_w or 0.0,
                    before.power_w - least_w,
                    found.gain_w,
                    before.typical_tasks,
                    after.typical_tasks,
                    before.block_gpus,
                    after.block_gpus,
                    before.largest[0].tasks,
                    after.largest[0].tasks,
                    1e3 * held_s,
                    1e3 * built_s,
                    took_s,
                )
            )
            print(f"seed {seed} {scene} x={load_} budget {budget:.0%}: {saved_w:,.0f} W", file=sys.stderr, flush=True)
    return rows


def _means(rows: Sequence[Row]) -> list[Row]:
    """Over the seeds; the seed of a mean is how many there were."""
    groups: dict[tuple[str, float, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.scene, row.load, row.budget_pct), []).append(row)
    return [
        Row(
            same[0].trace,
            len(same),
            *key,
            *(sum(values) / len(same) for values in zip(*(r[5:] for r in same), strict=True)),
        )
        for key, same in groups.items()
    ]


def _table(means: Sequence[Row]) -> str:
    return format_table(
        None,
        [
            {
                "scene": r.scene,
                "x": f"{r.load:.1f}",
                "budget": f"{r.budget_pct:.0f} %",
                "running": f"{r.running:.0f}",
                "moved": f"{r.moved:.0f}",
                "GPUs": f"{r.moved_gpu:.1f}",
                "before": f"{r.power_before_kw:.1f} kW",
                "saved": f"{r.saved_w:.0f} W",
                "saved %": f"{r.saved_pct:.2f}",
                "most by moves": f"{r.most_by_moves_w / 1e3:.1f} kW",
                "by the fleet": f"{r.most_by_fleet_w / 1e3:.1f} kW",
                "typical tasks fit": f"{r.typical_before:.0f} {r.typical_after - r.typical_before:+.0f}",
                "GPUs in blocks": f"{r.block_before:.0f} {r.block_after - r.block_before:+.0f}",
                "largest fit": f"{r.gpu8_before:.0f} {r.gpu8_after - r.gpu8_before:+.0f}",
                "loop held": f"{r.held_ms:.1f} ms",
                "built": f"{r.built_ms:.0f} ms",
                "search": f"{r.search_s:.1f} s",
            }
            for r in means
        ],
        words=1,
    )


def _draw(path: Path, means: Sequence[Row]) -> None:
    from bench.plotting import draw_figure  # a second to import

    with draw_figure(path, columns=2, size=(11, 4.5)) as (watts, room):
        for index, (scene, load_) in enumerate(dict.fromkeys((row.scene, row.load) for row in means)):
            same = [row for row in means if (row.scene, row.load) == (scene, load_)]
            style = {
                "label": f"{scene}, x = {load_}",
                "color": f"C{index}",
                "linestyle": "-" if scene == "placed" else "--",
            }
            budgets = [0.0, *(row.budget_pct for row in same)]
            watts.plot(budgets, [0.0, *(row.saved_pct for row in same)], marker="o", **style)
            room.plot(budgets, [0.0, *(row.typical_after - row.typical_before for row in same)], marker="o", **style)
        watts.set(title="watts saved", ylabel="% of the cluster's modelled power")
        room.set(title="acceptable future work", ylabel="more typical tasks that fit")
        for axes in (watts, room):
            axes.set_xlabel("budget, % of the running tasks")
        watts.legend()


def _print_waits(trace: TraceArrays, rounds: int) -> None:
    """Of the thinned fleet at the lowest load, with the usual budget."""
    *_, (_, _, core) = _scenes(trace, SEEDS[0])
    asked = RecommendMovesRequest(moves_ratio=MOVES_RATIO)
    recommend_moves(build_migration_problem(core.survey_moves(asked)))  # compiles
    running = sum(len(found.placements) for found in core.state.workloads.values())
    print(f"{len(core.state.nodes):,} nodes, {running:,} tasks; longest wait of the loop in a search, ms:")
    for kind, waits in measure_waits(core, asked, rounds).items():
        print(f"  {kind:18} {spread(waits)}")


def _print_power_budgets(trace: TraceArrays) -> None:
    """Of the scenes at a load of 0.8, with the usual budget of moves."""
    for scene, load_, core in _scenes(trace, SEEDS[0]):
        if load_ != _BUDGETS_LOAD:
            continue
        for row in measure_power_budgets(core, RecommendMovesRequest(moves_ratio=MOVES_RATIO)):
            print(
                f"{scene}, x = {load_}, budget {row.budgets:12} saved {row.saved_w:>8,.0f} W by {row.moved} moves in "
                f"{row.search_s:.1f} s; of the best without budgets {row.filtered_w:>8,.0f} W by {row.filtered_moved}",
                flush=True,
            )


@benchmark(out="bench-out/moves")
@data_option()
@click.option("--trace", default="default")
@click.option("--goal", type=click.Choice([goal.name.lower() for goal in MoveGoal if goal]), default="balanced")
@seeds_option(2)
@processes_option
@click.option("--copies", default=1, help="the fleet and its tasks so many times side by side")
@click.option("--waits", default=0, help="only how long the controller's loop waits, in so many rounds")
@click.option("--power-budgets", is_flag=True, help="only what power budgets that leave nothing leave of the moves")
def main(options: Options) -> int:
    """Runs the bench."""
    trace = copy_fleet(load_trace(options.data, options.trace), options.copies)
    if options.waits:
        _print_waits(trace, options.waits)
        return 0
    if options.power_budgets:
        _print_power_budgets(trace)
        return 0
    work = Parallel(n_jobs=max(1, min(options.processes, options.seeds)))
    rows = [
        row
        for found in work(
            delayed(_rows)(trace, seed, MoveGoal[options.goal.upper()]) for seed in SEEDS[: options.seeds]
        )
        for row in found
    ]
    write_csv(options.out / "moves.csv", Row._fields, rows)
    means = _means(rows)
    _draw(options.out / "moves.png", means)
    print(f"{_table(means)}\n\nwritten to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
