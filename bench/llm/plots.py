"""Pictures: energy of every policy against the bound, how gaps of services are spread, and one service over the hour.

Owns how they are drawn. Must not know where the numbers come from.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bench.llm.runs import Outcome
from bench.plotting import draw_figure

__all__ = ["draw_course", "draw_fleet", "draw_gaps"]


def draw_fleet(path: Path, found: Sequence[Outcome], policies: Sequence[str]) -> None:
    """Energy of the pool above the LP's in per cent, a group of bars an objective, a panel a rate."""
    rates = list(dict.fromkeys(run.rate for run in found))
    objectives = list(dict.fromkeys(run.objective_ms for run in found))
    with draw_figure(path, 1, len(rates), size=(6.5 * len(rates), 4.5), grid="y") as panels:
        for axes, rate in zip(panels, rates, strict=True):
            for number, policy in enumerate(policies):
                gaps = [
                    next((run.gap_pct for run in found if run[3:6] == (rate, objective, policy)), np.nan)
                    for objective in objectives
                ]
                width = 0.8 / len(policies)
                axes.bar(np.arange(len(objectives)) + number * width, gaps, width, color=f"C{number}", label=policy)
            axes.axhline(3.0, color="k", linestyle=":", linewidth=0.8)
            axes.set_yscale("log")
            axes.set_xticks(np.arange(len(objectives)) + 0.4, [f"{objective:g} ms" for objective in objectives])
            axes.set_title(f"energy of the pool, % above the LP bound, {rate:g}x")
        panels[0].legend()


def draw_gaps(path: Path, runs: Iterable[Outcome], policy: str) -> None:
    """Gaps of single services above idle, and of the bound of whole instances, as shares of services."""
    groups: dict[tuple[float, float], list[Outcome]] = {}
    for run in runs:
        if run.policy == policy:
            groups.setdefault((run.rate, run.objective_ms), []).append(run)
    with draw_figure(path, size=(7, 4.5)) as (axes,):
        for number, ((rate, objective), group) in enumerate(groups.items()):
            shares = (np.arange(len(group)) + 1) / len(group)
            mine = np.sort([run.gap_above_idle_pct for run in group])
            whole = np.sort([100.0 * (run.whole_j / run.bound_j - 1.0) for run in group])
            axes.plot(mine.clip(0.1), shares, color=f"C{number}", label=f"{rate:g}x, {objective:g} ms")
            axes.plot(whole.clip(0.1), shares, ":", color=f"C{number}", linewidth=1.0)
        axes.set_xscale("log")
        axes.set_xlabel("energy above idle, % over the LP (dotted: the bound of whole instances)")
        axes.set_ylabel("share of services")
        axes.legend()


def draw_course(path: Path, demand_hz: Sequence[float], runs: Sequence[Outcome]) -> None:
    """Watts of one service over the windows, and what was asked for and could be given."""
    with draw_figure(path, 2, 1, size=(8, 6), sharex=True) as (watts, tokens):
        for number, run in enumerate(runs):
            if run.course is not None:
                watts.step(range(len(demand_hz)), run.course.power_w / 1e3, color=f"C{number}", label=run.policy)
                tokens.step(range(len(demand_hz)), run.course.throughput_hz / 1e3, color=f"C{number}", linewidth=0.8)
        tokens.step(range(len(demand_hz)), np.asarray(demand_hz) / 1e3, color="k", label="asked for")
        watts.set_ylabel("kW of what serves")
        watts.set_yscale("log")
        tokens.set_ylabel("thousand tokens a second")
        tokens.set_xlabel("minute")
        first = runs[0]
        watts.set_title(f"{first.model}, {first.task}, {first.rate:g}x, {first.objective_ms:g} ms")
        watts.legend()
        tokens.legend()
