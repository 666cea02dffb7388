"""Pictures of a comparison in the manner of the papers.

Owns how curves are drawn. Must not know where they come from. One picture a
trace: watts, saving against the reference, watts per allocated GPU and
allocation, all over what has arrived; and one with every policy as a point,
saving against GRAR.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.axes import Axes

from bench.openb.measure import Bounds
from bench.openb.report import Row
from bench.plotting import draw_figure
from eelgrid_controller.replay.run_statistics import GRID, ArrivalCurves, saving_share
from eelgrid_kernels.arrays import Floats

__all__ = ["draw_points", "draw_trace"]

_DENSE_FROM = 0.7  # below it, every policy allocates all that arrives
_LINES = ("-", "--", "-.", ":")
_MARKS = "osD^v<>pXP*h"


def _line(axes: Axes, index: int, policy: str, values: Floats) -> None:
    axes.plot(GRID, values, _LINES[index // 10 % len(_LINES)], color=f"C{index % 10}", label=policy, linewidth=1.3)


def _dress(axes: Axes, title: str, unit: str, first: float, last: float) -> None:
    axes.set_title(title)
    axes.set_xlabel("arrived GPU / capacity")
    axes.set_ylabel(unit)
    axes.set_xlim(first, last)


def draw_trace(
    path: Path,
    trace: str,
    policies: Mapping[str, ArrivalCurves],
    *,
    reference: ArrivalCurves,
    bounds: Bounds | None,
    gpus: int,
) -> None:
    """Four panels for one trace."""
    with draw_figure(path, 2, 2, size=(12, 8)) as (power, saved, dense, allocated):
        busy = slice(int(_DENSE_FROM * 200), None)
        for index, (policy, mine) in enumerate(policies.items()):
            _line(power, index, policy, mine.power_w / 1e3)
            _line(saved, index, policy, 100 * saving_share(mine, reference))
            _line(allocated, index, policy, 100 * mine.allocated)
            color, style = f"C{index % 10}", _LINES[index // 10 % len(_LINES)]
            held = gpus * mine.allocated[busy]
            dense.plot(GRID[busy], mine.power_w[busy] / held.clip(min=1e-9), style, color=color, linewidth=1.3)
        if bounds is not None:
            power.plot(bounds.x, bounds.power_w / 1e3, "k.-", linewidth=0.8, label="lower bound")
            allocated.plot([1.0], [100 * bounds.allocated_1], "k_", markersize=14, label="upper bound")
        _dress(power, f"{trace}: modelled power (EOPC)", "kW", 0.0, 1.0)
        _dress(saved, "saving against FGD", "%", 0.0, 1.0)
        _dress(dense, "watts per allocated GPU", "W", _DENSE_FROM, 1.0)
        _dress(allocated, "GPU allocated", "% of capacity", _DENSE_FROM, 1.3)
        allocated.set_ylim(100 * _DENSE_FROM, 100)
        power.legend(ncols=2)


def draw_points(path: Path, rows: Iterable[Row]) -> None:
    """Saving against GRAR: a colour a policy, a mark a trace; up and to the right is better."""
    with draw_figure(path, size=(9, 6.5)) as (axes,):
        rows = list(rows)
        policies = list(dict.fromkeys(row.policy for row in rows))
        traces = list(dict.fromkeys(row.trace for row in rows))
        for row in rows:
            index = policies.index(row.policy)
            axes.scatter(
                row.figures.grar_1,
                row.figures.saving_mean_pct,
                color=f"C{index % 10}",
                marker=_MARKS[traces.index(row.trace) % len(_MARKS)],
                facecolors=None if index < 10 else "none",
            )
        for index, policy in enumerate(policies):
            axes.scatter([], [], color=f"C{index % 10}", facecolors=None if index < 10 else "none", label=policy)
        for index, trace in enumerate(traces):
            axes.scatter([], [], color="k", marker=_MARKS[index % len(_MARKS)], label=trace)
        axes.set_xlabel("GRAR at x = 1")
        axes.set_ylabel("mean saving against FGD over x = 0.1 ... 0.8, %")
        axes.legend(ncols=2)
