"""The newest power of all nodes as arrays: kept up to date batch by batch, read whole by summaries and scrapes.

Owns the arrays and which nodes are fresh. Must not know batches or clocks (times are arguments).

Theory. A batch changes one node, a summary reads all of them; so what a batch says is written into
arrays, and sums are numpy's. A row is a node, in the order in which nodes were first seen. A cell is
a node's watts of one model: nearly all nodes have one. A node keeps its cells for itself when its
models change, so it has as many as it ever had models at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NewestPower", "Readings"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_LEAST = 64


class Readings(NamedTuple):
    """One moment. Ages are those of nodes (N,), NaN before the first tick; the rest is of fresh cells (C,)."""

    names: Sequence[str]
    models: Sequence[str]
    age_s: Floats
    row: Ints
    model: Ints
    power_w: Floats
    # Devices with a reading, one at least.
    gpus: Ints


class NewestPower:
    """Rows of nodes that are no more have no name and no readings, until another node gets them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._free: list[int] = []
        self._models: list[str] = []
        self._model_ids: dict[str, int] = {}
        self._received_s = np.full(_LEAST, np.nan)
        self._time_ns = np.zeros(_LEAST, np.int64)
        self._cells = 0
        self._row = np.zeros(_LEAST, np.int64)
        self._model = np.zeros(_LEAST, np.int64)
        self._power_w = np.zeros(_LEAST)
        self._gpus = np.zeros(_LEAST, np.int64)
        # By row: the cell of each model, and cells without one.
        self._at: list[dict[str, int]] = []
        self._spare: list[list[int]] = []

    def add(self, name: str) -> int:
        """A node without readings; its row."""
        if self._free:
            row = self._free.pop()
            self._names[row] = name
            return row
        row = len(self._names)
        self._names.append(name)
        self._at.append({})
        self._spare.append([])
        if row == len(self._time_ns):
            self._received_s = np.concatenate([self._received_s, np.full(row, np.nan)])
            self._time_ns = np.concatenate([self._time_ns, np.zeros(row, np.int64)])
        return row

    def put(self, row: int, power: Sequence[tuple[str, float, int]], *, received_s: float, time_ns: int) -> None:
        """What came of a node, in the place of what came before: (model, watts, devices read), each model once."""
        self._received_s[row], self._time_ns[row] = received_s, time_ns
        at = self._at[row]
        if len(at) != len(power) or any(model not in at for model, _, _ in power):
            self._release(row)
        for model, power_w, gpus in power:
            cell = at[model] if model in at else self._cell(row, model)
            self._power_w[cell], self._gpus[cell] = power_w, gpus

    def remove(self, row: int) -> None:
        """A node is no more; its row is the next new node's."""
        self.clear(row)
        self._names[row] = ""
        self._free.append(row)

    def clear(self, row: int) -> None:
        """What came of a node has lost its meaning: it is as before the first tick."""
        self._received_s[row] = np.nan
        self._release(row)

    def readings(self, *, now_s: float, now_ns: int, fresh_s: float) -> Readings:
        """Ages as Telemetry.age_s has them, and the cells of nodes that are no older than `fresh_s`."""
        nodes, cells = len(self._names), self._cells
        ages_s = now_s - self._received_s[:nodes]
        np.maximum(ages_s, (now_ns - self._time_ns[:nodes]) / 1e9, out=ages_s)
        np.maximum(ages_s, 0.0, out=ages_s)
        kept = np.nonzero((ages_s <= fresh_s)[self._row[:cells]] & (self._gpus[:cells] > 0))[0]
        return Readings(
            names=self._names, models=self._models, age_s=ages_s, row=self._row[kept], model=self._model[kept],
            power_w=self._power_w[kept], gpus=self._gpus[kept],
        )  # fmt: skip

    def _release(self, row: int) -> None:
        at = self._at[row]
        for cell in at.values():
            self._gpus[cell] = 0
        self._spare[row] += at.values()
        at.clear()

    def _cell(self, row: int, model: str) -> int:
        cell = self._spare[row].pop() if self._spare[row] else self._new_cell()
        self._row[cell] = row
        self._model[cell] = self._model_ids.setdefault(model, len(self._models))
        if self._model[cell] == len(self._models):
            self._models.append(model)
        self._at[row][model] = cell
        return cell

    def _new_cell(self) -> int:
        cell = self._cells
        if cell == len(self._gpus):
            self._row, self._model, self._gpus = (
                np.concatenate([one, np.zeros(cell, np.int64)]) for one in (self._row, self._model, self._gpus)
            )
            self._power_w = np.concatenate([self._power_w, np.zeros(cell)])
        self._cells += 1
        return cell
