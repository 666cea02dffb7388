"""What the core decides with: the arrays of the state, the planner, and what budgets of watts leave.

Owns the search within budgets. Must not know events, or what follows from a decision.

Theory. A search knows no watts; what it found is checked. Where a budget would be passed,
all nodes below it are closed, with those below budgets that could not even take the least,
and the search is made again, a few times. So work may wait for watts although a gang that
lay across two racks in another way would fit: that is on the safe side. A search with
closed nodes has an engine of its own, made for it, which takes milliseconds in a large
fleet; `searches` counts them, and who tries much work heeds it.
"""

from dataclasses import replace

import numpy as np

from eelgrid_controller.allowance import Allowance, Lack
from eelgrid_controller.model import PowerModel
from eelgrid_controller.planner import Decision, Planner
from eelgrid_controller.quotes import Quotes
from eelgrid_controller.snapshot import Mirror, Snapshot
from eelgrid_controller.state import ClusterState
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import Removal, WorkloadSpec
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

__all__ = ["Chooser"]

_SEARCHES_MOST = 8


class Chooser:
    """Decides on the state as it is; `refresh` after each change."""

    def __init__(self, state: ClusterState, catalogue: Catalogue) -> None:
        self.planner = Planner()
        self.mirror = Mirror(state, PowerModel(catalogue).gpu)
        self.allowance = Allowance(state, catalogue)
        self.searches = 0  # with closed nodes, ever
        self._state = state
        self._within = Planner()

    def snapshot(self) -> Snapshot:
        """The cluster as arrays, read-only, until the next change."""
        return self.mirror.snapshot()

    def refresh(self, touched: frozenset[str]) -> None:
        """These nodes, or the policy, have changed."""
        self.mirror.refresh(touched)
        self.allowance.refresh(touched)

    def quotes(self) -> Quotes | None:
        """New quotes where they are due."""
        policy = self._state.policy
        return self.planner.quotes(self.snapshot(), policy.weights, policy.placement, self._state.market.shifts)

    def decide(self, spec: WorkloadSpec, quotes: Quotes | None = None) -> Decision:
        """Where a workload goes, by quotes that are about to be in force, within all budgets."""
        snapshot = self.snapshot()
        if quotes is not None:
            snapshot = replace(snapshot, quotes=quotes)
        policy = self._state.policy
        decision = self.planner.decide(snapshot, spec, policy.weights, policy.placement)
        if not decision.placements or not self.allowance.binds or not spec.request.gpu_count:
            return decision
        lacks = self.allowance.lacks(decision.placements)
        return self._elsewhere(snapshot, spec, decision, lacks) if lacks else decision

    def _elsewhere(self, snapshot: Snapshot, spec: WorkloadSpec, decision: Decision, lacks: list[Lack]) -> Decision:
        """The same with nodes closed that have no watts left; or the decision that none is left."""
        request, first = spec.request, lacks[0]
        is_whole = request.gpu_milli == GPU_MILLI_WHOLE
        closed = self.allowance.closed(request.gpu_count, request.gpu_models) if is_whole else set[str]()
        room = _room(spec.replicas, lacks)
        policy = self._state.policy
        count = 0
        for _ in range(_SEARCHES_MOST):
            closed |= {lack.budget for lack in lacks}
            is_open = np.array([closed.isdisjoint(self.allowance.above(name)) for name in snapshot.names], np.bool_)
            count = int((snapshot.nodes.available & ~is_open).sum())
            if not is_open.any():
                break
            self.searches += 1
            found = self._within.decide(snapshot.with_open(is_open), spec, policy.weights, policy.placement)
            if not found.placements:
                break
            lacks = self.allowance.lacks(found.placements)
            if not lacks:
                return replace(found, closed=frozenset(closed))
        removals = (Removal(constraint="budget", nodes=count),)
        return replace(decision, placements=(), room=room, lack=first, removals=removals, closed=frozenset(closed))


def _room(replicas: int, lacks: list[Lack]) -> int:
    """About how many replicas the budgets would let stand where they were found; fewer than asked."""
    over = max(lack.replicas - int(max(0.0, lack.left_w) // (lack.more_w / lack.replicas)) for lack in lacks)
    return max(0, replicas - max(1, over))
