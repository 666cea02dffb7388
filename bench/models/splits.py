"""What is held out: configurations of known workloads, whole workloads, workloads on another GPU model.

Owns the choice of rows by seed. Must not know models.

    configuration F   a share F of all (workload, configuration) pairs; what is read twice goes as one. Seeds are folds:
                      so many of them as 1 / F (1 / (1 - F) above a half) hold out (keep) every pair once, so that
                      what is judged does not hang on which pairs a seed happens to draw
    workload K        whole groups of workloads, in folds; K configurations of each workload are given back
    gpu               one GPU model of a third of the workloads that were measured on two or more; the others
                      of the family were measured on it
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.models.tables import Cell, DataSet

FOLDS_MOST = 6  # more groups than that are left out several at a time
GIVEN = (0, 1, 3)


class Split(NamedTuple):
    """Rows of a data set."""

    name: str
    learned: tuple[Cell, ...]  # what models are fitted on
    told: tuple[Cell, ...]  # what they are told after that, without being fitted again
    asked: tuple[Cell, ...]


def _key(cell: Cell) -> tuple[str, str]:
    return cell.point.workload, repr(cell.point.configuration)


def by_configuration(cells: Sequence[Cell], share: float, seed: int) -> Split:
    """One fold; the share is rounded to 1 / k, or to 1 - 1 / k above a half."""
    folds = max(2, round(1.0 / min(share, 1.0 - share)))
    shuffle, fold = divmod(seed, folds)
    keys = sorted({_key(cell) for cell in cells})
    order = np.random.default_rng(shuffle).permutation(len(keys))
    part = {keys[index] for index in order[fold::folds]}

    def out(cell: Cell) -> bool:
        return (_key(cell) in part) == (share <= 0.5)

    learned = tuple(cell for cell in cells if not out(cell))
    return Split(f"configuration {share:g}", learned, (), tuple(cell for cell in cells if out(cell)))


def by_workload(data_set: DataSet, seed: int) -> list[Split]:
    """Every group is left out once; for each fold one split for every number given back."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(sorted({cell.group for cell in data_set.cells}))
    found = []
    for fold in np.array_split(groups, min(FOLDS_MOST, len(groups))):
        left_out = set(fold.tolist())
        learned = tuple(cell for cell in data_set.cells if cell.group not in left_out)
        rest = [cell for cell in data_set.cells if cell.group in left_out]
        rest = [rest[index] for index in rng.permutation(len(rest))]
        ranks: dict[str, int] = {}
        ranked = []
        for cell in rest:
            rank = ranks.get(cell.point.workload, 0)
            ranks[cell.point.workload] = rank + 1
            ranked.append((rank, cell))
        asked = tuple(cell for rank, cell in ranked if rank >= max(GIVEN))  # the same for every number given back
        if asked:
            found += [
                Split(f"workload {given}", learned, tuple(cell for rank, cell in ranked if rank < given), asked)
                for given in GIVEN
            ]
    return found


def by_gpu(data_set: DataSet, seed: int) -> list[Split]:
    """Workloads on a GPU model where the others were measured and they were not."""
    models: dict[str, set[str]] = {}
    for cell in data_set.cells:
        models.setdefault(cell.point.workload, set()).add(cell.point.configuration.gpu_model)
    rng = np.random.default_rng(seed)
    found = []
    for model in sorted(set().union(*models.values())):
        many = sorted(name for name, on in models.items() if model in on and len(on) > 1)
        for part in np.array_split(rng.permutation(many), 3):
            left_out = set(part.tolist())

            def out(cell: Cell, model: str = model, left_out: set[str] = left_out) -> bool:
                return cell.point.workload in left_out and cell.point.configuration.gpu_model == model

            asked = tuple(cell for cell in data_set.cells if out(cell))
            if asked:
                learned = tuple(cell for cell in data_set.cells if not out(cell))
                found.append(Split("gpu", learned, (), asked))
    return found
