"""Pictures of E4: what each policy saves beside the oracle, and throughput under a budget beside the bound.

Owns how figures are drawn. Must not know where they come from.
"""

from collections.abc import Sequence
from pathlib import Path

from bench.plotting import draw_figure
from bench.powercap.report import ClusterRow, Row

__all__ = ["draw_cluster", "draw_savings"]

_SHOWN = ("cap80", "zeus_epoch", "zeus_jit", "eelgrid", "eelgrid_second_run", "eelgrid_relatives")


def draw_savings(path: Path, rows: Sequence[Row]) -> None:
    """Bars by workload, a panel a GPU model; hatched where a promise was broken."""
    models = list(dict.fromkeys(row.model for row in rows))
    with draw_figure(path, len(models), 1, size=(10, 2.6 * len(models)), grid="y") as panels:
        for panel, model in zip(panels, models, strict=True):
            mine = [row for row in rows if row.model == model]
            workloads = list(dict.fromkeys(row.workload for row in mine))
            width = 0.85 / len(_SHOWN)
            for place, policy in enumerate(_SHOWN):
                for row in (one for one in mine if one.policy == policy):
                    kept, all_seeds = row.promise_kept.split("/")
                    x = workloads.index(row.workload) + width * (place - (len(_SHOWN) - 1) / 2)
                    label = policy if row.workload == workloads[0] else None
                    panel.bar(
                        x,
                        row.drawn_pct,
                        width,
                        color=f"C{place}",
                        label=label,
                        hatch=None if kept == all_seeds else "//",
                        edgecolor="white",
                    )
            for index, workload in enumerate(workloads):
                one = next(row for row in mine if row.workload == workload)
                panel.hlines(one.oracle_pct, index - 0.45, index + 0.45, "k", linewidth=1.2)
                panel.hlines(one.in_turn_bound_pct, index - 0.45, index + 0.45, "k", linestyles=":", linewidth=1.2)
            panel.set_xticks(range(len(workloads)), workloads)
            panel.set_ylabel("energy saved, %")
            panel.set_title(
                f"{model}: within 5 % slowdown; line: oracle, dots: two limits in turn, hatched: promise broken",
                fontsize=9,
            )
            panel.set_ylim(-3, 25)
        panels[0].legend(ncols=3)


def draw_cluster(path: Path, rows: Sequence[ClusterRow]) -> None:
    """Throughput kept over the budget, a panel for one budget and for a tree."""
    kinds = list(dict.fromkeys(row.budgets for row in rows))
    with draw_figure(path, 1, len(kinds), size=(6 * len(kinds), 4.5)) as panels:
        for panel, kind in zip(panels, kinds, strict=True):
            mine = [row for row in rows if row.budgets == kind]
            for place, policy in enumerate(dict.fromkeys(row.policy for row in mine)):
                group = [row for row in mine if row.policy == policy]
                panel.plot(
                    [row.level_pct for row in group],
                    [row.throughput_pct for row in group],
                    "o-",
                    color=f"C{place}",
                    label=policy,
                )
            first = [row for row in mine if row.policy == mine[0].policy]
            panel.plot([row.level_pct for row in first], [row.bound_pct for row in first], "k:", label="bound (LP)")
            panel.set_title(kind)
            panel.set_xlabel("cluster budget, % of all largest limits")
            panel.set_ylabel("throughput kept, % of the largest limits'")
        panels[0].legend()
