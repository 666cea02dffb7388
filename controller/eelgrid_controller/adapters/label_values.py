"""The values that labels of the controller's metrics can have, where they are a closed set.

Owns which alerts, recorded series and dashboards may ask for a value of: each names one of these, or a value that only
the cluster knows (a pool, a model, a workload). Must not know where numbers come from.

Theory. A matcher with a value that nobody tells is no error to Prometheus: the alert just never fires. So the sets
stand here, made of the enumerations that the tellers themselves use; `tests/unit/label_values_test.py` holds rules,
dashboards and runbooks against them, and them against pages that are served.
"""

from collections.abc import Mapping

from eelgrid_controller.adapters.described import PENDING_REASONS, PLAN_CHANGES
from eelgrid_controller.adapters.kubernetes.counts import WAITS
from eelgrid_controller.kubernetes.gate_events import Failure
from eelgrid_controller.savings.account import BEST_FIT, BOTH, EELGRID
from eelgrid_controller.steward.counts import Verdict

__all__ = ["LABEL_VALUES"]

_VERDICTS = tuple(one.value for one in Verdict)
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
    ("eelgrid_kubernetes_pods_waiting", "reason"): WAITS,
    ("eelgrid_kubernetes_writes_total", "result"): ("pinned", "opened", *(one.name.lower() for one in Failure)),
}
