"""What stands beside a policy in the table and is not of arrivals alone: moves, and energy with departures.

Owns how each is measured for one trace. Must not know tables.

Theory. With migration: the controller's core places a trace, and when each load has arrived, moves of at most a part
of the running tasks are recommended, each time from a fleet in which nothing was moved before. What they save is told
in points of FGD's watts at that load, net of nothing: the cost of a restart decides what is moved, not what is told.
With departures: real arrivals and durations on a fleet small enough to be busy (bench.openb.times), energy over idle.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.moves.scenes import fill_cluster
from bench.openb.times import compare_times
from bench.openb.traces import csv_folder
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.replay.openb import read_tasks, task_list_name
from eelgrid_controller.replay.openb_protocol import TraceArrays
from eelgrid_controller.replay.run_statistics import ArrivalCurves, value_at
from eelgrid_protos.messages import MoveGoal, RecommendMovesRequest

MOVE_X = (0.2, 0.4, 0.6, 0.8)


class Moved(NamedTuple):
    """Means over loads and seeds."""

    seeds: int
    moves: float  # for one load
    gain_pct: float  # of the watts of the reference


class Timed(NamedTuple):
    """Energy over idle with departures, and what of the reference's is saved."""

    seeds: int
    energy_kwh: float
    saving_pct: float


def measure_moves(trace: TraceArrays, seeds: range, ratio: float, reference: ArrivalCurves) -> Moved:
    """Moves of at most that part of the running tasks, at every load of MOVE_X."""
    moves, gains = [], []
    for seed in seeds:
        for load, core in fill_cluster(trace, seed, MOVE_X):
            found = recommend_moves(
                build_migration_problem(
                    core.survey_moves(RecommendMovesRequest(goal=MoveGoal.POWER, moves_ratio=ratio))
                )
            )
            moves.append(found.moving)
            saved_w = found.before.power_w - found.after.power_w
            gains.append(100.0 * saved_w / value_at(reference.power_w, load))
    return Moved(len(seeds), statistics.fmean(moves), statistics.fmean(gains))


def measure_times(
    data: Path, name: str, fleet: int, policies: Sequence[str], *, seeds: range, processes: int
) -> dict[str, Timed]:
    """Energy by policy, the first of which is the reference; empty for a list without times."""
    folder = csv_folder(data)
    if any(task.arrival_s is None for task in read_tasks(folder / task_list_name(name))):
        return {}
    rows = compare_times(folder, name, fleet, policies, seeds=seeds, processes=processes)
    return {row.policy: Timed(row.seeds, row.energy_over_idle_kwh, row.saving_over_idle_pct) for row in rows}
