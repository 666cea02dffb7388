"""Pictures of the MIG comparison.

Owns how they are drawn. Must not know how anything was planned.
"""

from collections.abc import Sequence
from pathlib import Path

from bench.mig.peers import PEERS
from bench.mig.report import published
from bench.mig.runs import Result
from bench.mig.tables import Scenario
from bench.plotting import draw_figure

__all__ = ["draw", "draw_random"]


def draw(path: Path, pairs: Sequence[tuple[Scenario, Result]]) -> None:
    """GPUs and compute slices of everybody, with what no plan can go below."""
    with draw_figure(path, 1, 2, size=(12, 4.5), grid="y") as both:
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
        both[0].legend()


def _height(scenario: Scenario, one: Result, name: str, place: int) -> float:
    if name == "published":
        known = published(scenario)
        return float(known[place]) if known else 0.0
    standing = one.ours if name == "ours" else one.peers[name]
    return float(standing[place])


def draw_random(path: Path, results: Sequence[Result]) -> None:
    """GPUs above the bound, over the bound."""
    with draw_figure(path, size=(7, 4.5)) as (axes,):
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
        axes.legend()
