"""Pictures of the MIG comparison.

Owns how they are drawn. Must not know how anything was planned.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot, which else looks for a screen

from matplotlib import pyplot as plt

from bench.mig.peers import PEERS
from bench.mig.report import published
from bench.mig.runs import Result
from bench.mig.tables import Scenario

__all__ = ["draw", "draw_random"]


def draw(path: Path, pairs: Sequence[tuple[Scenario, Result]]) -> None:
    """GPUs and compute slices of everybody, with what no plan can go below."""
    figure, both = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    names = [*reversed(PEERS), "published", "ours"]
    width = 0.8 / len(names)
    for place, (axes, what) in enumerate(zip(both, ("GPUs", "compute slices in use"), strict=True)):
        for number, name in enumerate(names):
            heights = [_height(scenario, one, name, place) for scenario, one in pairs]
            at = [index + (number - (len(names) - 1) / 2) * width for index in range(len(pairs))]
            axes.bar(at, heights, width, color=f"C{number}", label=name)
        for index, (_, one) in enumerate(pairs):
            if len(one.proofs) > place:
                ends = index - 0.45, index + 0.45
                label = "bound" if index == 0 else None
                axes.plot(ends, [one.proofs[place].bound] * 2, "k-", linewidth=1.0, label=label)
        axes.set_xticks(range(len(pairs)), [one.scenario for _, one in pairs])
        axes.set_ylabel(what)
        axes.grid(axis="y", alpha=0.3)
    both[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _height(scenario: Scenario, one: Result, name: str, place: int) -> float:
    if name == "published":
        known = published(scenario)
        return float(known[place]) if known else 0.0
    standing = one.ours if name == "ours" else one.peers[name]
    return float(standing[place])


def draw_random(path: Path, results: Sequence[Result]) -> None:
    """GPUs above the bound, over the bound."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    bound = [one.bound_gpus for one in results]
    for number, name in enumerate(reversed(PEERS)):
        axes.scatter(
            bound, [one.peers[name].gpus - one.bound_gpus for one in results], s=9, color=f"C{number}", label=name
        )
    ours = [one.ours.gpus - one.bound_gpus for one in results]
    axes.scatter(bound, ours, s=9, color=f"C{len(PEERS) + 1}", label="ours")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_xlabel("GPUs that no plan can go below")
    axes.set_ylabel("GPUs above that")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
