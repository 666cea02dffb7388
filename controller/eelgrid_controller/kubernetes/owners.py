"""Whose pod it is, and with which others it stands or falls.

Owns the rule of who is a gang. Must not know how the objects above pods are read (`holders.py`),
nor what a pod wants (`intent.py`).

Theory. A pod names its controller; labels of JobSet, LeaderWorkerSet, Kubeflow and Ray name
what is above that. How many pods belong together stands on the object above, which is looked
up by name: a lookup that has not been made yet is `needs` of a refusal, one that found
nothing is None among the holders. In this order, the first that says so decides:

    eelgrid.io/group and eelgrid.io/group-size      the people's own word
    spec.schedulingGroup with a gang policy          minCount of the PodGroup
    LeaderWorkerSet                                  one group of it: leader and workers
    JobSet, and TrainJob over it                     every pod of it at once
    PyTorchJob and the other Kubeflow jobs           every replica
    Kueue's pod group                                its total count, unless it serves
    an Indexed Job of kind training-job              parallelism, where completions are as many

Anything else is a pod alone: of a Deployment, a StatefulSet, a plain Job, a RayCluster. Parts
of a gang that ask for the same (master and workers of one template) are one unit; parts that
ask for something else are units of their own. Parts that start one after another (LeaderReady,
InOrder, dependsOn) are never one unit: the second would wait for the first for ever.

Sources: names.py lists the files.
"""

from hashlib import sha256
from typing import NamedTuple

from eelgrid_controller.kubernetes import names
from eelgrid_controller.kubernetes.amounts import NONE
from eelgrid_controller.kubernetes.holders import KUBEFLOW, Holders, Part, Ref
from eelgrid_controller.kubernetes.selectors import NOTHING
from eelgrid_controller.kubernetes.views import Pod

__all__ = ["Membership", "Refused", "membership_of"]

REPLICAS_MOST = 10_000
_UNIT_LONGEST = 128


class Refused(NamedTuple):
    """Why there is no intent: the field at fault, what is wrong, what to do.

    `is_released` asks to let the pod go to the default scheduler; else it stays gated with the reason. `needs` names an
    object that has to be looked up first: then nobody is at fault, and the pod is asked about again.
    """

    field: str
    problem: str
    remedy: str
    is_released: bool = False
    needs: Ref | None = None

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"


class Membership(NamedTuple):
    """What a pod stands or falls with: `size` pods of one `unit`, placed together; it alone if the size is 1."""

    unit: str
    size: int
    owner_kind: str = ""
    owner_name: str = ""
    part: str = ""
    rank: int | None = None


def membership_of(pod: Pod, holders: Holders, *, is_training: bool = False) -> Membership | Refused:
    """What the pod stands or falls with, or why that cannot be said."""
    owner = pod.owner
    if pod.is_static or (owner is not None and owner.kind in ("DaemonSet", "Node")):
        return Refused(
            "metadata.ownerReferences",
            "a DaemonSet or a kubelet has chosen the pod's node already",
            f"leave {names.LABEL_MANAGED} off such pods",
            is_released=True,
        )
    for rule in (_own_word, _pod_group, _leader_worker, _job_set, _kubeflow, _kueue_group):
        found = rule(pod, holders)
        if found is not None:
            return _bounded(found)
    found = _indexed_job(pod, holders) if is_training else None
    return _bounded(found) if found is not None else _alone(pod)


def _bounded(found: Membership | Refused) -> Membership | Refused:
    if isinstance(found, Refused) or found.size <= REPLICAS_MOST:
        return found
    return Refused("metadata", f"is one of a gang of {found.size} pods", f"gangs have {REPLICAS_MOST} at most")


def _alone(pod: Pod) -> Membership:
    owner = pod.owner
    kind, name = (owner.kind, owner.name) if owner else ("", "")
    if kind == "ReplicaSet":
        # It is called after its Deployment and a hash, and the Deployment is what people know.
        kind, name = "Deployment", name.rpartition("-")[0] or name
    part = pod.labels.get(names.RAY_GROUP, "")
    return Membership(f"pod-{pod.uid}", 1, kind, name, part, _index(pod))


def _own_word(pod: Pod, _: Holders) -> Membership | Refused | None:
    group, size = (pod.annotations.get(key) for key in (names.ANNOTATION_GROUP, names.ANNOTATION_GROUP_SIZE))
    if group is None and size is None:
        return None
    if not group:
        return Refused(names.ANNOTATION_GROUP, "is missing beside the group's size", "name the group, such as train-7")
    count = _positive(size)
    if count is None:
        return Refused(
            names.ANNOTATION_GROUP_SIZE,
            f"is {size!r}" if size else "is missing",
            'give the pods of the group, such as "4"',
        )
    owner = pod.owner
    return Membership(_unit(f"{pod.namespace}/{group}"), count, owner.kind if owner else "", group, "", _index(pod))


def _pod_group(pod: Pod, holders: Holders) -> Membership | Refused | None:
    if not pod.group or "/" in pod.group:
        return None
    ref = Ref("scheduling.k8s.io", "PodGroup", pod.namespace, pod.group)
    if ref not in holders:
        return _looking(ref)
    holder = holders[ref]
    if holder is None or holder.least is None:
        return None
    return Membership(_unit(holder.uid), holder.least, "PodGroup", pod.group, "", _index(pod))


def _leader_worker(pod: Pod, holders: Holders) -> Membership | Refused | None:
    name = pod.labels.get(names.LWS_NAME)
    if name is None:
        return None
    ref = Ref("leaderworkerset.x-k8s.io", "LeaderWorkerSet", pod.namespace, name)
    if ref not in holders:
        return _looking(ref)
    holder = holders[ref]
    size = _positive(pod.annotations.get(names.LWS_SIZE))
    if size is None:
        return Refused(names.LWS_SIZE, "is missing or no number", f"set {names.ANNOTATION_GROUP_SIZE} instead")
    index = _whole(pod.labels.get(names.LWS_WORKER_INDEX))
    part = "leader" if index == 0 else "worker"
    group = f"{holder.uid if holder else pod.namespace + '/' + name}-{pod.labels.get(names.LWS_GROUP_INDEX, '0')}"
    # A group that is rebuilt in a rolling update has the size that its pods say, not the set's newest.
    parts: tuple[Part, ...] = (Part("leader", 1, *_NOTHING_SAID), Part("worker", size - 1, *_NOTHING_SAID))
    if holder is not None and holder.parts:
        counts = {"leader": 1, "worker": size - 1}
        parts = tuple(one._replace(pods=counts[one.name]) for one in (*holder.parts, *parts)[:2])
    return _of_parts(group, parts, part, is_staged=holder is not None and holder.is_staged)._replace(
        owner_kind="LeaderWorkerSet", owner_name=name, rank=index
    )


def _job_set(pod: Pod, holders: Holders) -> Membership | Refused | None:
    name = pod.labels.get(names.JOBSET_NAME)
    if name is None:
        return None
    ref = Ref("jobset.x-k8s.io", "JobSet", pod.namespace, name)
    if ref not in holders:
        return _looking(ref)
    holder = holders[ref]
    if holder is None:
        return _unseen(ref)
    above = holder.owner
    kind, shown = (above.kind, above.name) if above is not None and above.kind == "TrainJob" else ("JobSet", name)
    part = pod.labels.get(names.JOBSET_PART, "")
    # Attempts of a set are told apart: the pods of the last one hold their places until they are gone.
    attempt = pod.labels.get(names.JOBSET_ATTEMPT, "0")
    group = holder.uid if attempt == "0" else f"{holder.uid}-r{attempt}"
    found = _of_parts(group, holder.parts, part, is_staged=holder.is_staged)
    index = _whole(pod.labels.get(names.JOBSET_JOB_INDEX)) if found.size > 1 else None
    return found._replace(owner_kind=kind, owner_name=shown, rank=index)


def _kubeflow(pod: Pod, holders: Holders) -> Membership | Refused | None:
    owner = pod.owner
    if owner is None or owner.group != "kubeflow.org" or owner.kind not in KUBEFLOW:
        return None
    ref = Ref("kubeflow.org", owner.kind, pod.namespace, owner.name)
    if ref not in holders:
        return _looking(ref)
    holder = holders[ref]
    if holder is None or holder.uid != owner.uid:
        return _unseen(ref)
    part = pod.labels.get(names.KUBEFLOW_PART) or pod.labels.get(names.KUBEFLOW_ROLE, "")
    found = _of_parts(holder.uid, holder.parts, part.lower(), is_staged=holder.is_staged)
    return found._replace(
        owner_kind=owner.kind, owner_name=owner.name, rank=_whole(pod.labels.get(names.KUBEFLOW_INDEX))
    )


def _kueue_group(pod: Pod, _: Holders) -> Membership | Refused | None:
    name = pod.labels.get(names.KUEUE_GROUP)
    if name is None or pod.annotations.get(names.KUEUE_SERVING) == "true":
        return None
    size = _positive(pod.annotations.get(names.KUEUE_TOTAL))
    if size is None:
        return Refused(names.KUEUE_TOTAL, "is missing or no number", 'give the pods of the group, such as "4"')
    index = _whole(pod.labels.get(names.KUEUE_INDEX))
    return Membership(_unit(f"{pod.namespace}/{name}"), size, "PodGroup", name, "", index)


def _indexed_job(pod: Pod, holders: Holders) -> Membership | Refused | None:
    owner, index = pod.owner, _index(pod)
    if owner is None or owner.kind != "Job" or index is None:
        return None
    ref = Ref("batch", "Job", pod.namespace, owner.name)
    if ref not in holders:
        return _looking(ref)
    holder = holders[ref]
    if holder is None or holder.uid != owner.uid:
        return _unseen(ref)
    size = holder.parts[0].pods if holder.parts else 1
    if size == 1:
        return None
    return Membership(_unit(holder.uid), size, "Job", owner.name, "", index)


_NOTHING_SAID = (NONE, NOTHING)


def _of_parts(group: str, parts: tuple[Part, ...], name: str, *, is_staged: bool) -> Membership:
    """The unit of a part: all parts that ask for the same, unless parts start one after another."""
    own = next((part for part in parts if part.name == name), None)
    if own is None:
        return Membership(_unit(f"{group}-{name}" if name else group), 1, part=name)
    alike = [part for part in parts if (part.requested, part.constraint) == (own.requested, own.constraint)]
    if is_staged:
        alike = [own]
    unit = group if len(alike) == len(parts) else f"{group}-{alike[0].name}"
    return Membership(_unit(unit), sum(part.pods for part in alike), part=name)


def _unit(text: str) -> str:
    unit = f"gang-{text}"
    return unit if len(unit) <= _UNIT_LONGEST else f"gang-{sha256(text.encode()).hexdigest()[:32]}"


def _looking(ref: Ref) -> Refused:
    return Refused("metadata.ownerReferences", f"{ref} is not known yet", "it is looked up", needs=ref)


def _unseen(ref: Ref) -> Refused:
    return Refused(
        "metadata.ownerReferences",
        f"how many pods belong together stands on {ref}, which cannot be read",
        f"grant get and watch on it, or set {names.ANNOTATION_GROUP} and {names.ANNOTATION_GROUP_SIZE}",
    )


def _index(pod: Pod) -> int | None:
    for key in (names.JOB_INDEX, names.STATEFUL_INDEX, names.KUEUE_INDEX):
        if key in pod.labels or key in pod.annotations:
            return _whole(pod.labels.get(key, pod.annotations.get(key)))
    return None


def _whole(text: str | None) -> int | None:
    return int(text) if text and len(text) < 10 and text.isascii() and text.isdigit() else None


def _positive(text: str | None) -> int | None:
    found = _whole(text)
    return found or None
