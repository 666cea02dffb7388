"""Expected starts: when work that is only tried, by a dry run, would start if it were submitted now.

`StartEstimator` decides nothing and promises nothing. Must not know who asks, nor what an answer is compared with.

Theory. The search of reserved starts (core.start_search) gives the earliest time at which the work fits, by the expected ends of
what runs and beside every start that is reserved. Of the work that waits before it, easy backfill reserves one start only; the
others count by their work: GPU seconds, by the same run times, over the GPUs of the cluster. That is when they would be done if they
divided all GPUs without gaps, so the estimate is early where they leave gaps, and late where they fit beside others. Work whose run
time nobody knows counts as an hour. None is given where no end is known that lets the work start, or where it waits for something else
than capacity.
"""

from collections.abc import Sequence
from dataclasses import replace

from eelgrid_controller.core.backfill import BACKFILL_REASON, BackfillPlanner
from eelgrid_controller.core.deadlines import get_promise
from eelgrid_controller.placement.explanations import preview_workload
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.queueing.runtime_estimates import NEVER_NS, estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event
from eelgrid_protos.messages import NodeState, Workload
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# Waiting work whose run times are looked up; the rest counts as these do on average.
_AHEAD_MOST = 500
_UNKNOWN_RUN_S = 3600.0
_NS = 10**9


class StartEstimator:
    """Estimates starts on one state."""

    def __init__(self, state: ClusterState, backfill: BackfillPlanner) -> None:
        self._state, self._backfill = state, backfill

    def preview(
        self, waiting: Workload, decision: PlacementDecision, promised: Sequence[Event], now_ns: int
    ) -> Workload:
        """Returns the workload as it would be accepted now, with what is promised to it, or else when it may be expected to start."""
        preview = preview_workload(waiting.workload_id, waiting.spec, decision, now_ns)
        promise = get_promise(promised)
        return replace(
            preview,
            owner=waiting.owner,
            held_by=waiting.held_by,
            promise=promise,
            share=waiting.share,
            expected_start_ns=self.estimate_ns(waiting, decision, now_ns) if promise is None else promise.start_ns,
        )

    def estimate_ns(self, waiting: Workload, decision: PlacementDecision, now_ns: int) -> int:
        """Returns when new work is expected to start, by what was decided of it; 0 if nobody knows."""
        if decision.placements:
            return now_ns
        if decision.hold is not None or decision.withheld not in ("", BACKFILL_REASON):
            return 0
        found = self._backfill.search_admission(waiting, now_ns)
        if found is None:
            return 0
        return min(NEVER_NS, max(found.start_ns, now_ns) + int(_NS * self._compute_backlog_s(waiting)))

    def _compute_backlog_s(self, waiting: Workload) -> float:
        """Returns for how long the work that goes first, and has no reserved start, keeps all GPUs busy."""
        state = self._state
        gpus = sum(len(one.inventory.gpus) for one in state.nodes.values() if one.state is NodeState.READY)
        counted, gpu_s = 0, 0.0
        for key in state.pending:
            one = state.workloads[key]
            if counted >= _AHEAD_MOST or one.spec.priority < waiting.spec.priority:
                break
            counted += 1
            # A start that is reserved, the search has counted; what is parked is behind something else than capacity.
            if one.promise is not None or state.pending.is_parked(key):
                continue
            estimate, request = estimate_runtime(one, state), one.spec.request
            run_s = _UNKNOWN_RUN_S if estimate is None else estimate.expected_s
            gpu_s += run_s * one.spec.replicas * request.gpu_count * request.gpu_milli / GPU_MILLI_WHOLE
        if not gpus or not counted:
            return 0.0
        ahead = len(state.pending) if counted >= _AHEAD_MOST else counted
        return gpu_s * ahead / counted / gpus
