"""How many series a metric can have at most, whatever runs on the node.

Owns the bounds of labels. Must not know how a page is rendered.

Theory. A metric has its labels' values for each of its subjects, and every one of these is
bounded: subjects by the contract (GPUS_PER_NODE_MOST and the like), labels by sets that are known
beforehand. What comes and goes with the work (owners, XIDs) is bounded by whoever keeps it.
"""

import math
from collections.abc import Mapping

from eelgrid_agent.attribution.anomalies import SUBJECTS_MOST, AnomalyKind
from eelgrid_agent.device import INSTANCE_READINGS
from eelgrid_agent.health import XIDS_KEPT_MOST
from eelgrid_agent.metrics.frame import CALL_BOUNDS_S, SHARES_MOST
from eelgrid_agent.metrics.metric import Kind, Metric, Scope
from eelgrid_agent.refusal import Rule
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, INSTANCES_PER_GPU_MOST, Reading

__all__ = ["label_values", "series_most"]

_COMPUTE_INSTANCES_MOST = 8
_SUBJECTS: Mapping[Scope, int] = {
    Scope.GPU: GPUS_PER_NODE_MOST,
    Scope.INSTANCE: GPUS_PER_NODE_MOST * INSTANCES_PER_GPU_MOST,
    Scope.COMPUTE: GPUS_PER_NODE_MOST * INSTANCES_PER_GPU_MOST * _COMPUTE_INSTANCES_MOST,
}
# Bounds of whole metrics: of what comes and goes with the work.
_KEPT: Mapping[str, int] = {
    "eelgrid_workload_gpu_energy_joules_total": SHARES_MOST,
    "eelgrid_gpu_idle_since_timestamp_seconds": SUBJECTS_MOST,
    "eelgrid_gpu_xid_errors_total": XIDS_KEPT_MOST,
    "eelgrid_gpu_xid_last_timestamp_seconds": XIDS_KEPT_MOST,
}
# Labels whose values are one of these, whatever the metric.
_VALUES: Mapping[str, tuple[str, ...]] = {
    "anomaly": tuple(one.value for one in AnomalyKind),
    "rule": tuple(one.value for one in Rule),
}
# Kinds of look, calls of the device port, kinds of settings that are repaired, why energy has no owner.
_VALUES_MOST: Mapping[str, int] = {
    "look": 4, "call": 32, "setting": 8, "reason": 3, **{label: len(found) for label, found in _VALUES.items()},
}  # fmt: skip


def label_values(metric: Metric) -> Mapping[str, tuple[str, ...]]:
    """All values of those of its labels that are closed sets; a matcher of an alert or a dashboard names one of these."""
    coded = metric.states or metric.bits
    if coded:
        return {metric.labels[-1]: (*(name for _, name in coded), "other")}
    told = [source.labels for source in metric.sources if source.labels]
    if told:
        return {label: tuple(dict.fromkeys(row[at] for row in told)) for at, label in enumerate(metric.labels)}
    return {label: _VALUES[label] for label in metric.labels if label in _VALUES}


def series_most(metric: Metric) -> int:
    """The most series of one node, buckets and sums included; KeyError for a label without a bound."""
    if metric.name in _KEPT:
        return _KEPT[metric.name]
    coded = metric.states or metric.bits
    if coded:
        values = len(coded) + 1
    elif any(source.labels for source in metric.sources):
        values = len(metric.sources)
    elif "reading" in metric.labels:  # absent for one reason at a time
        values = len(INSTANCE_READINGS) if metric.scope is Scope.INSTANCE else len(Reading)
    else:
        values = math.prod(_VALUES_MOST[label] for label in metric.labels)
    series = _SUBJECTS.get(metric.scope, 1) * values
    return series * (len(CALL_BOUNDS_S) + 3) if metric.kind is Kind.HISTOGRAM else series
