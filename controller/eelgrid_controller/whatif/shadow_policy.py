"""Shadow policy: a second policy that follows the cluster's events on a copy and decides for itself.

Owns the copy and the comparison. Must not know how events reach it. What the cluster decided (placed, deferred,
its policy) is not followed; what happened to it (work, nodes and devices came and went) is.

Theory: with the weights in force a shadow decides as the cluster does, so that every difference is the
policy's. A cluster that cut a round of tries short continues it between other calls, and the shadow at once:
then, and only then, the order of trying may differ, too.
"""

from collections import deque
from collections.abc import Callable, Mapping

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    Event,
    GpuLost,
    GpuReturned,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeReconciled,
    NodesRemoved,
    PolicyChanged,
    SpendingJudged,
    WorkloadCancelled,
    WorkloadSubmitted,
)
from eelgrid_controller.whatif.comparison import compare_placements, compute_cluster_figures
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import ClusterFigures, Policy, ShadowReport, SubmitWorkloadRequest, Workload

# Workloads that are compared, the newest.
_COMPARED_MOST = 100_000
_DIFFERENCES_MOST = 100
# A round is some hundred tries; what is left is gone on with after the next event.
_ROUNDS_MOST = 16


class ShadowPolicy:
    """One policy beside the one in force, on a copy that is handed over."""

    def __init__(
        self, state: ClusterState, policy: Policy, make_core: Callable[[ClusterState], Core], *, now_ns: int
    ) -> None:
        self._began = (now_ns, state.revision)
        self._policy = policy
        state.apply(PolicyChanged(time_ns=now_ns, policy=policy))
        self.core = make_core(state)
        self._since: deque[str] = deque(maxlen=_COMPARED_MOST)
        self._events = 0

    def follow_event(self, event: Event) -> None:
        """Takes in what happened, and decides what there is to decide."""
        self._events += 1
        try:
            self._follow(event)
        except Fault:
            # What the cluster took and the shadow cannot: it was refused here, and shows as not placed.
            return
        for _ in range(_ROUNDS_MOST):
            if not self.core.has_backlog:
                return
            self.core.retry(now_ns=event.time_ns)

    def _follow(self, event: Event) -> None:
        core, now_ns = self.core, event.time_ns
        match event:
            case WorkloadSubmitted(workload_id=key, spec=spec):
                self._since.append(key)
                core.submit(SubmitWorkloadRequest(spec=spec, workload_id=key), now_ns=now_ns)
            case WorkloadCancelled(workload_id=key):
                core.cancel(key, now_ns=now_ns)
            case NodeJoined(inventory=inventory, plan_epoch=epoch):
                core.register_node(inventory, now_ns=now_ns, plan_epoch=epoch)
            case NodeHeard(node_name=name) | NodeReconciled(node_name=name):
                core.register_node(core.state.nodes[name].inventory, now_ns=now_ns)
            case NodeLost(node_name=name):
                core.mark_node_lost(name, now_ns=now_ns)
            case NodesRemoved(node_names=names):
                # Work of its own may stand there, which the cluster's did not.
                for name in names:
                    core.mark_node_lost(name, now_ns=now_ns)
            case GpuLost(node_name=name, gpu_uuid=uuid):
                core.mark_gpu_lost(name, uuid, now_ns=now_ns)
            case GpuReturned(node_name=name, gpu_uuid=uuid):
                core.mark_gpu_returned(name, uuid, now_ns=now_ns)
            case SpendingJudged(over=over):
                # What is spent is the cluster's, not what the shadow would spend.
                core.set_exhausted_spending(over, now_ns=now_ns)
            case _:
                return

    def build_report(self, live: ClusterFigures, workloads: Mapping[str, Workload], revision: int) -> ShadowReport:
        """The cluster at `revision` beside this."""
        counts, different = compare_placements(workloads, self.core.state, reversed(self._since), _DIFFERENCES_MOST)
        started_ns, started_revision = self._began
        return ShadowReport(
            objective=self._policy.objective,
            weights=self._policy.weights,
            started_ns=started_ns,
            started_revision=started_revision,
            revision=revision,
            events=self._events,
            live=live,
            shadow=compute_cluster_figures(self.core),
            differences=different,
            **counts,
        )
