"""Plots of a policy comparison: one of runs with times, one of runs of arrivals.

Lines are means over seeds; whiskers span the smallest to the largest seed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eelgrid_controller.errors import import_library
from eelgrid_controller.replay.policy_comparison import ArrivalRunResult, TimedRunResult
from eelgrid_controller.replay.run_statistics import (
    GRID,
    JOULES_PER_KWH,
    ArrivalCurves,
    mean_curves,
    saving_mean_pct,
    saving_share,
    value_at,
)
from eelgrid_kernels.arrays import Floats

_INSTALL = "'eelgrid[replay]'"
_DENSE_FROM = 0.7  # below it, every policy allocates all that arrives
_LINES = ("-", "--", "-.", ":")
_ABREAST = 12  # more bars than that have no room for a label across
_DAY_S = 86_400.0


def load_pyplot() -> Any:
    """The library that draws, without a screen; raises LibraryMissing."""
    import_library("matplotlib", "drawing pictures", _INSTALL).use("Agg")
    return import_library("matplotlib.pyplot", "drawing pictures", _INSTALL)


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
