"""The cluster at a glance: counts, the queue with its reasons, and power against each budget.

Owns what of it is shown, and how much at most. Must not know frames, clocks or GPUs one by one.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.budget_places import BudgetPlaces
from eelgrid_controller.page.fleet import Fleet
from eelgrid_controller.state import ClusterState
from eelgrid_protos.messages import NodeState, Policy, WorkloadPhase

__all__ = ["BUDGETS_MOST", "QUEUE_MOST", "Budgets", "counts", "queue"]

QUEUE_MOST = 200
REASONS_MOST = 64
BUDGETS_MOST = 50


def counts(state: ClusterState) -> dict[str, int]:
    """How many there are of what."""
    phases = state.phases
    lost = sum(record.state is NodeState.LOST for record in state.nodes.values())
    return {
        "revision": state.revision,
        "nodes": len(state.nodes),
        "nodes_lost": lost,
        "placed": phases[WorkloadPhase.PLACED],
        "pending": phases[WorkloadPhase.PENDING],
    }


def queue(state: ClusterState) -> dict[str, Any]:
    """Waiting work in the order in which it is tried, the first of it; and how much waits for which reason."""
    reasons: Counter[str] = Counter()
    rows: list[list[Any]] = []
    for workload_id in state.pending:
        workload = state.workloads[workload_id]
        reasons[workload.reason] += 1
        if len(rows) < QUEUE_MOST:
            spec = workload.spec
            rows.append(
                [
                    workload_id, spec.name, spec.namespace, spec.priority, spec.replicas, spec.request.gpu_count,
                    spec.request.gpu_milli, workload.submitted_ns // 1_000_000, workload.reason,
                ]
            )  # fmt: skip
    return {"rows": rows, "reasons": [list(pair) for pair in reasons.most_common(REASONS_MOST)]}


class Budgets:
    """Measured power of each budget; the places of budgets are found anew only when policy or fleet change."""

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self._era = 0
        self._limits_w: Mapping[str, float] = {}
        self._cells: dict[str, NDArray[np.int64]] = {}

    def rows(self, state: ClusterState, fleet: Fleet) -> list[list[Any]]:
        """[name, limit in W, measured W, GPUs with a reading, GPUs], the fullest first; the cluster's before all."""
        if self._policy is not state.policy or self._era != fleet.era:
            self._find(state, fleet)
        power_w = fleet.power_w
        found: list[tuple[str, float, int, int, int]] = []
        for name, cells in self._cells.items():
            read = power_w[cells]
            known = read >= 0
            found.append((name, self._limits_w[name], int(read[known].sum()), int(known.sum()), len(cells)))
        found.sort(key=lambda row: (row[0] != "cluster", -row[2] / max(row[1], 1.0), row[0]))
        return [list(row) for row in found[:BUDGETS_MOST]]

    def _find(self, state: ClusterState, fleet: Fleet) -> None:
        self._policy, self._era = state.policy, fleet.era
        places = BudgetPlaces(state.policy)
        self._limits_w = places.limits_w
        cells: dict[str, list[int]] = {name: [] for name in places.limits_w}
        for name, record in state.nodes.items() if cells else ():
            span = fleet.span(name)
            for key in places.above(record.inventory):
                cells[key].extend(range(span.start, span.stop))
        self._cells = {name: np.array(found, np.int64) for name, found in cells.items()}
