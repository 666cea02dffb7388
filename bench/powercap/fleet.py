"""Fleets of mixed GPUs with training jobs on them, and budgets of watts above.

Owns how a fleet is drawn from a seed. Must not know who divides the watts.

Nodes of eight GPUs of one model; each is filled with jobs of 1, 2, 4 or 8 GPUs,
drawn from all measured (workload, batch) of that model. Some gangs of 8 run as 4
and 4 on two nodes of the same model. Racks of four nodes. `level` is the cluster's
budget as a share of what all largest limits charge. In a tree, racks, nodes and
two feeds (nodes in turn) have budgets as well, drawn at random from well below
the level to above need, never below the least limits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.powercap.zeus import Data
from eelgrid_controller.objectives.power.budgets import BudgetTree, PowerBudgetNode
from eelgrid_controller.objectives.power.limit_allocation import AllocationJob, BudgetShare
from eelgrid_controller.objectives.power.power_model import BestEffort, LimitPoint, PowerCurve, TrainingPromise

__all__ = ["Fleet", "draw", "with_level"]

GPUS, RACK_NODES = 8, 4
_LIMITS_LEAST = 5
_SPLIT = 0.3  # of the gangs of 8
_FREE = BestEffort(0.0)


class Fleet(NamedTuple):
    """Jobs, their nodes, and the budgets above."""

    jobs: tuple[AllocationJob, ...]
    budgets: BudgetTree
    least_w: float  # that all jobs together are charged at least
    most_w: float


def _gang(curve: PowerCurve, gpus: int) -> PowerCurve:
    """The curve of a data-parallel gang: each GPU as the one that was measured."""
    points = tuple(LimitPoint(at.limit_w, at.time_s, at.power_w * gpus) for at in curve.points)
    return PowerCurve(curve.workload, curve.gpu_model, gpus, points)


def _fill(models: Sequence[str], rng: np.random.Generator) -> list[tuple[str, list[tuple[int, int]]]]:
    """(model, [(node, GPUs)]) of every job, until all nodes are full."""
    free = dict.fromkeys(range(len(models)), GPUS)
    gangs: list[tuple[str, list[tuple[int, int]]]] = []
    for node, model in enumerate(models):
        while free[node]:
            gpus = min(free[node], int(rng.choice([1, 2, 4, 8], p=[0.3, 0.3, 0.25, 0.15])))
            mates = [other for other in range(node + 1, len(models)) if models[other] == model and free[other] >= 4]
            if gpus == GPUS and mates and rng.random() < _SPLIT:
                free[node] -= 4
                free[mates[0]] -= 4
                gangs.append((model, [(node, 4), (mates[0], 4)]))
            else:
                free[node] -= gpus
                gangs.append((model, [(node, gpus)]))
    return gangs


def _budgets(nodes: int, level: float, totals: dict[str, tuple[float, float]], rng: np.random.Generator) -> BudgetTree:
    """Budgets between the least and the most that each is charged; `totals` has both by name."""

    def between(name: str, low: float, high: float) -> float:
        least, most = totals.get(name, (0.0, 0.0))
        return max(least, float(rng.uniform(low, high)) * most)

    rows = [PowerBudgetNode("cluster", level * totals["cluster"][1])]
    racks = -(-nodes // RACK_NODES)
    rows += [
        PowerBudgetNode(f"rack{rack}", between(f"rack{rack}", level - 0.1, level + 0.2), "cluster")
        for rack in range(racks)
    ]
    rows += [
        PowerBudgetNode(f"node{node}", between(f"node{node}", level - 0.15, level + 0.35), f"rack{node // RACK_NODES}")
        for node in range(nodes)
    ]
    rows += [PowerBudgetNode(f"feed{feed}", between(f"feed{feed}", level - 0.05, level + 0.1)) for feed in (0, 1)]
    return BudgetTree(rows)


def draw(
    data: Data, seed: int, level: float, *, nodes: int = 64, tree: bool = False, promise: TrainingPromise = _FREE
) -> Fleet:
    """A fleet from a seed; the same jobs for every level."""
    rng = np.random.default_rng(seed)
    names = tuple(data.curves)
    models = [names[int(rng.integers(len(names)))] for _ in range(nodes)]
    jobs: list[AllocationJob] = []
    totals: dict[str, tuple[float, float]] = {}
    for model, places in _fill(models, rng):
        measured = [curve for curve in data.curves[model].values() if len(curve.points) >= _LIMITS_LEAST]
        gpus = sum(count for _, count in places)
        curve = _gang(measured[int(rng.integers(len(measured)))], gpus)
        low, high = (curve.charge_w(limit) / gpus for limit in (curve.limits_w[0], curve.limits_w[-1]))
        shares = []
        for node, count in places:
            chain = ("cluster", f"rack{node // RACK_NODES}", f"node{node}", f"feed{node % 2}")
            for name in chain:
                least, most = totals.get(name, (0.0, 0.0))
                totals[name] = (least + count * low, most + count * high)
            shares.append(BudgetShare((f"node{node}", f"feed{node % 2}") if tree else ("cluster",), count))
        jobs.append(AllocationJob(f"job{len(jobs)}", curve, tuple(shares), promise=promise))
    budgets = (
        _budgets(nodes, level, totals, rng)
        if tree
        else BudgetTree([PowerBudgetNode("cluster", level * totals["cluster"][1])])
    )
    return Fleet(tuple(jobs), budgets, *totals["cluster"])


def with_level(fleet: Fleet, level: float) -> BudgetTree:
    """The same budgets with the cluster's at another level."""
    return BudgetTree(
        [
            PowerBudgetNode("cluster", level * fleet.most_w) if budget.name == "cluster" else budget
            for budget in fleet.budgets.all
        ]
    )
