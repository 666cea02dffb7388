"""Pictures of the closed loop: a day, and energy with promises side by side.

Owns drawing. Must not compute results.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.loop.accounts import JOULES_PER_KWH
from bench.loop.runs import Run
from bench.plotting import draw_figure

__all__ = ["draw_day", "draw_front", "draw_policies"]

_DAY = ("ours", "hpa", "static")
_COLOURS = {
    "ours": "#c0392b",
    "blind": "#e59866",
    "static": "#7f8c8d",
    "hpa": "#2471a3",
    "hpa-strict": "#5dade2",
    "cap": "#1e8449",
    "zeus": "#7d3c98",
}


def draw_day(path: Path, runs: Sequence[Run]) -> None:
    """Watts, replicas and limits over the day of the first seed."""
    shown = [run for run in runs if run.seed == runs[0].seed and run.policy in _DAY]
    with draw_figure(path, 4, 1, size=(9, 10), sharex=True) as axes:
        for run in shown:
            trace, colour = run.outcome.trace, _COLOURS[run.policy]
            values = (trace.services_w / 1e3, trace.training_w / 1e3, trace.replicas, 100.0 * trace.limit_share)
            for axis, value in zip(axes, values, strict=True):
                axis.plot(trace.at_h, value, label=run.policy, color=colour, linewidth=1.2)
        for axis, text in zip(
            axes,
            ("GPUs for services, kW", "GPUs for training, kW", "replicas that serve", "mean limit of jobs, %"),
            strict=True,
        ):
            axis.set_ylabel(text)
            if not text.startswith("mean"):
                axis.set_ylim(bottom=0.0)
        axes[0].legend(loc="upper left")
        axes[-1].set_xlabel("hour of the day")


def draw_policies(path: Path, runs: Sequence[Run]) -> None:
    """Energy against ours of the same seed over violated windows, a dot a seed and a mark for the mean."""
    with draw_figure(path, size=(8, 5)) as (axis,):
        ours = {run.seed: run.outcome.energy_j for run in runs if run.policy == "ours"}
        for policy in dict.fromkeys(run.policy for run in runs):
            mine = [run for run in runs if run.policy == policy and run.seed in ours]
            if not mine:
                continue
            energy = np.array([100.0 * run.outcome.energy_j / ours[run.seed] for run in mine])
            broken = np.array([100.0 * run.outcome.violated / run.outcome.windows for run in mine])
            colour = _COLOURS.get(policy, "black")
            axis.scatter(broken, energy, s=14, alpha=0.5, color=colour)
            axis.scatter([broken.mean()], [energy.mean()], s=90, marker="D", color=colour, label=policy)
        axis.set_xlabel("windows of services violated, %")
        axis.set_ylabel("energy of the day, % of ours")
        axis.legend()


def draw_front(path: Path, runs: Sequence[Run]) -> None:
    """Energy of the GPUs for services over violated windows, means of seeds: the autoscaler's targets, and our bands."""
    with draw_figure(path, size=(8, 5)) as (axis,):
        for family, colour in (("ours", _COLOURS["ours"]), ("hpa", _COLOURS["hpa"])):
            found = []
            for policy in dict.fromkeys(run.policy for run in runs if run.policy.split("-")[0] == family):
                mine = [run.outcome for run in runs if run.policy == policy]
                broken = 100.0 * sum(one.violated for one in mine) / sum(one.windows for one in mine)
                found.append((float(np.mean([one.services_j for one in mine])) / JOULES_PER_KWH, broken, policy))
            found.sort()
            axis.plot([row[1] for row in found], [row[0] for row in found], marker="o", color=colour, label=family)
            for energy_kwh, broken, policy in found:
                axis.annotate(policy, (broken, energy_kwh), textcoords="offset points", xytext=(6, 4), fontsize=8)
        axis.set_xscale("symlog", linthresh=0.01)
        axis.set_xlabel("windows of services violated, %")
        axis.set_ylabel("energy of the GPUs for services, kWh a day")
        axis.legend()
