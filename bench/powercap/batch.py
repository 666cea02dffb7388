"""Zeus's own question: the batch size and the power limit together, to the target.

Owns that table. Must not know policies of limits alone. Energy to accuracy of a
(batch, limit) is the median epochs that the batch needs times the energy of an
epoch; it is compared with the baseline batch at the largest limit. All of it is
read off the tables: it is what an oracle gets, and no claim of ours.

Published: "improves the energy efficiency of DNN training by 15.3 % to 75.8 %"
(abstract of Zeus, NSDI'23), over recurring jobs on a V100, time weighing half.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from bench.powercap.single import SLOWDOWN
from bench.powercap.zeus import BASELINES, Data, Run
from eelgrid_controller.objectives.power.power_model import LimitPoint

__all__ = ["Together", "together"]


class Together(NamedTuple):
    """Energy to the target saved by an oracle, as a share of the baseline's."""

    model: str
    workload: str
    limit_alone: float  # within the slowdown
    batch_alone: float  # at the largest limit, any time
    both: float  # any time
    both_within: float  # within the slowdown of the time to the target
    batch: int  # of `both_within`
    limit_w: float


def together(data: Data, runs: Sequence[Run]) -> list[Together]:
    """One for each baseline run."""
    targets = {baseline.workload: baseline.target for baseline in BASELINES}
    found = []
    for run in runs:
        options: list[tuple[int, float, LimitPoint]] = []
        for key, curve in data.curves[run.model].items():
            epochs = data.epochs.get((key.workload, key.batch, targets[run.key.workload]))
            if key.workload == run.key.workload and key.optimizer == run.key.optimizer and epochs:
                options += [(key.batch, statistics.median(epochs), at) for at in curve.points]
        base = run.curve.largest
        energy_j, time_s = run.epochs * base.energy_j, run.epochs * base.time_s
        in_time = [one for one in options if one[1] * one[2].time_s <= (1.0 + SLOWDOWN) * time_s]
        best = min(in_time, key=lambda one: one[1] * one[2].energy_j)

        def saved(chosen: list[tuple[int, float, LimitPoint]], energy_j: float = energy_j) -> float:
            return 1.0 - min(epochs * at.energy_j for _, epochs, at in chosen) / energy_j

        found.append(
            Together(
                run.model,
                run.key.workload,
                saved([one for one in in_time if one[0] == run.key.batch]),
                saved([one for one in options if one[2].limit_w == base.limit_w]),
                saved(options),
                saved(in_time),
                best[0],
                best[2].limit_w,
            )
        )
    return found
