"""Queue labels: which queue the people of a pod name, in Kueue's words.

The first that is set decides: the label of the pod (`kueue.x-k8s.io/queue-name`, or that which Kueue puts on the pods of its
Jobs), then that of its controller and of the controllers above it, as far as these are jobs: people set it on a Job or a
JobSet, which do not hand it on. A name stands for the ClusterQueue of the LocalQueue of that name in the pod's namespace,
where there is one. Must not know which queues are declared, nor how owners are looked up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import (
    KUBEFLOW_REPLICA_FIELDS,
    IntentRefusal,
    ObjectRef,
    OwnerTemplates,
    request_lookup,
)
from eelgrid_controller.engines.kubernetes.model.well_known import KUEUE_LOCAL_QUEUE, KUEUE_QUEUE

# A Job of a JobSet has one above it.
_OWNERS_MOST = 3
_JOBS = frozenset(
    {("batch", "Job"), ("jobset.x-k8s.io", "JobSet"), *(("kubeflow.org", kind) for kind in KUBEFLOW_REPLICA_FIELDS)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLabels:
    """What counts beside the labels of a pod."""

    reads_owners: bool = False
    # The ClusterQueue of a LocalQueue, by namespace and name.
    cluster_queues: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def find_queue(self, pod: Pod, holders: OwnerTemplates) -> str | IntentRefusal:
        """The queue of a pod, empty for none; or which owner has to be looked up first."""
        name = pod.labels.get(KUEUE_QUEUE) or pod.labels.get(KUEUE_LOCAL_QUEUE, "")
        found = name if name or not self.reads_owners else _of_owners(pod, holders)
        return found if isinstance(found, IntentRefusal) else self.cluster_queues.get((pod.namespace, found), found)


NO_QUEUE_LABELS = QueueLabels()


def _of_owners(pod: Pod, holders: OwnerTemplates) -> str | IntentRefusal:
    owner = pod.owner
    for _ in range(_OWNERS_MOST):
        if owner is None or (owner.group, owner.kind) not in _JOBS:
            return ""
        ref = ObjectRef(owner.group, owner.kind, pod.namespace, owner.name)
        if ref not in holders:
            return request_lookup(ref)
        holder = holders[ref]
        if holder is None or holder.uid != owner.uid:
            return ""
        if holder.queue:
            return holder.queue
        owner = holder.owner
    return ""


def parse_local_queue(found: Mapping[str, Any]) -> str:
    """The ClusterQueue that a LocalQueue stands for; empty where it says none."""
    return str((found.get("spec") or {}).get("clusterQueue") or "")
