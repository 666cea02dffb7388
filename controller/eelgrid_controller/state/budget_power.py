"""The measured power of each budget: the one source of what the GPUs below it draw now, and how many of them are read.

`BudgetMeter` sums the fresh readings of `Telemetry` below the cluster's, the racks' and the nodes' budgets; commands, the
page and checks all show its figures. Must not know what is claimed of a budget.

Theory: a budget counts every GPU below it once, whether or not anything is steered there. Readings are kept by node, so a
budget is a list of nodes; the lists are made anew only when the policy or the nodes change.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import BudgetHierarchy
from eelgrid_controller.state.telemetry import PowerReadings
from eelgrid_protos.messages import Inventory, Policy


class BudgetPower(NamedTuple):
    """The draw of the GPUs below a budget; `measured_w` is None where none of them is read."""

    measured_w: float | None
    measured_gpus: int
    gpus: int


NO_BUDGET_POWER = BudgetPower(None, 0, 0)


class BudgetMeter:
    """Measures the budgets of a policy, by their keys."""

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self._inventories: list[Inventory] = []
        self._names: list[str] = []
        self._keys: tuple[str, ...] = ()
        self._gpus = np.zeros(0, np.int64)
        # A pair for each node and each budget above it: the budget's place, and the node's row of readings.
        self._budget = self._row = np.zeros(0, np.int64)

    def measure(
        self, policy: Policy, nodes: Mapping[str, NodeRecord], readings: PowerReadings
    ) -> dict[str, BudgetPower]:
        """Returns the power of every budget of the policy, by its key."""
        if not policy.budgets:
            return {}
        self._index(policy, nodes, readings)
        rows = len(readings.names)
        power_w = np.bincount(readings.row, readings.power_w, rows)[self._row]
        read = np.bincount(readings.row, readings.gpus, rows)[self._row]
        most = len(self._keys)
        sums = zip(
            self._keys,
            np.bincount(self._budget, power_w, most).tolist(),
            np.bincount(self._budget, read, most).tolist(),
            self._gpus.tolist(),
            strict=True,
        )
        return {key: BudgetPower(watts if count else None, int(count), int(gpus)) for key, watts, count, gpus in sums}

    def _index(self, policy: Policy, nodes: Mapping[str, NodeRecord], readings: PowerReadings) -> None:
        inventories = [record.inventory for record in nodes.values()]
        # Lists compare by identity first, so this is quick while nothing changes.
        if policy is self._policy and inventories == self._inventories and readings.names == self._names:
            return
        self._policy, self._inventories, self._names = policy, inventories, list(readings.names)
        places = BudgetHierarchy(policy)
        self._keys = tuple(places.limits_w)
        numbers = {key: number for number, key in enumerate(self._keys)}
        rows = {name: row for row, name in enumerate(readings.names)}
        gpus = np.zeros(len(self._keys), np.int64)
        pairs: list[tuple[int, int]] = []
        for inventory in inventories:
            row = rows.get(inventory.node_name)
            for key in places.budgets_above(inventory):
                gpus[numbers[key]] += len(inventory.gpus)
                if row is not None:
                    pairs.append((numbers[key], row))
        self._gpus = gpus
        self._budget, self._row = np.array(pairs, np.int64).reshape(-1, 2).T
