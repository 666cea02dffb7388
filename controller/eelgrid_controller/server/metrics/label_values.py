"""Closed sets of label values of the controller's metrics."""

from collections.abc import Mapping

from eelgrid_controller.energy.savings import BEST_FIT, BOTH, EELGRID
from eelgrid_controller.engines.kubernetes.pods.gate_events import WriteFailure
from eelgrid_controller.objectives.status import AttainmentVerdict
from eelgrid_controller.server.metrics.catalogue import PENDING_REASONS, PLAN_CHANGES
from eelgrid_controller.server.metrics.kubernetes_metrics import WAIT_REASONS

_VERDICTS = tuple(one.value for one in AttainmentVerdict)
# By metric and label.
LABEL_VALUES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("eelgrid_nodes", "state"): ("ready", "lost"),
    ("eelgrid_workloads", "phase"): ("pending", "placed", "cancelled"),
    ("eelgrid_pending_workloads", "reason"): PENDING_REASONS,
    ("eelgrid_plan_changes_total", "change"): PLAN_CHANGES,
    ("eelgrid_saved_power_watts", "part"): ("placement", "limits"),
    ("eelgrid_compared_power_watts", "plan"): (BEST_FIT, EELGRID),
    ("eelgrid_compared_energy_joules_total", "plan"): (BEST_FIT, EELGRID),
    ("eelgrid_compared_replicas", "plan"): (BOTH, EELGRID, BEST_FIT),
    ("eelgrid_compared_gpus", "plan"): (BOTH, EELGRID, BEST_FIT),
    ("eelgrid_ledger_windows_total", "result"): ("taken", "again", "dropped", "refused", "unplaced"),
    ("eelgrid_ledger_forgotten_rows_total", "reason"): ("age", "size"),
    ("eelgrid_ended_connections_total", "reason"): ("flood", "expired", "authority", "unread", "idle"),
    ("eelgrid_traces_total", "result"): ("finished", "cancelled", "given_up"),
    ("eelgrid_spans_total", "result"): ("exported", "failed", "dropped"),
    ("eelgrid_promise_windows_total", "verdict"): _VERDICTS,
    ("eelgrid_service_windows_total", "verdict"): _VERDICTS,
    ("eelgrid_service_replicas", "state"): ("wanted", "serving"),
    ("eelgrid_kubernetes_pods_waiting", "reason"): WAIT_REASONS,
    ("eelgrid_kubernetes_writes_total", "result"): ("pinned", "opened", *(one.name.lower() for one in WriteFailure)),
}
