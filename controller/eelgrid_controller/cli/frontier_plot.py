"""The plot of `eelctl frontier`: energy against latency, with throughput as colour."""

from pathlib import Path
from typing import Any

from eelgrid_controller.errors import import_library
from eelgrid_controller.whatif.frontier.sweep import Frontier

_INSTALL = "'eelgrid[replay]'"
_BESIDE = {"performance": (8, 8), "balanced": (10, 12), "energy": (-4, -20)}


def load_pyplot() -> Any:
    """The library that draws, without a screen; raises LibraryMissing."""
    import_library("matplotlib", "--plot", _INSTALL).use("Agg")
    return import_library("matplotlib.pyplot", "--plot", _INSTALL)


def draw_frontier(path: Path, found: Frontier) -> None:
    """Joules per request over the objective; the line is what holds between two objectives."""
    plt = load_pyplot()
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    rows = [(row, row.plan) for row in found.rows if row.plan is not None]
    efficient = [(row, plan) for row, plan in rows if row.is_efficient]
    if short := [row.latency_s for row in found.rows if row.plan is None]:
        axes.axvspan(short[0], rows[0][0].latency_s if rows else short[-1], color="0.9", label="too few GPUs")
    axes.step(
        [row.latency_s for row, _ in rows],
        [plan.power_w / found.rate_hz for _, plan in rows],
        where="post",
        color="0.6",
        linewidth=1.0,
        zorder=1,
    )
    points = axes.scatter(
        [row.latency_s for row, _ in efficient],
        [plan.power_w / found.rate_hz for _, plan in efficient],
        c=[row.factor * found.rate_hz for row, _ in efficient],
        cmap="viridis",
        s=42,
        zorder=2,
    )
    for row, plan in rows:
        if row.mark:
            at = row.latency_s, plan.power_w / found.rate_hz
            offset = _BESIDE[row.mark.split(",")[-1]]
            axes.plot(*at, "o", markersize=12, markerfacecolor="none", markeredgecolor="crimson", zorder=3)
            axes.annotate(row.mark, at, xytext=offset, textcoords="offset points", fontsize=10, color="crimson")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(
        import_library("matplotlib.ticker", "--plot", _INSTALL).LogLocator(subs=(1.0, 2.0, 5.0))
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.margins(x=0.1, y=0.12)
    axes.set_xlabel("latency objective, s")
    axes.set_ylabel("energy of the fleet, J per request")
    axes.set_title(f"{found.rate_hz:g} requests a second; colour: the most that the fleet carries", fontsize=11)
    axes.grid(alpha=0.3, which="both")
    figure.colorbar(points, label="requests a second")
    if short:
        axes.legend(fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
