"""Pod groups: which pods are placed together, and the state that any placement of them needs.

`membership_of` says whose a pod is. The first that applies decides: eelgrid.io/group, a PodGroup's minCount,
LeaderWorkerSet, JobSet or TrainJob, Kubeflow jobs, Kueue's pod group, an Indexed Job of kind training-job; any other
pod is a group of its own. Parts of a gang with different requests, and parts that start one after another, are separate
groups. An owner that has not been looked up yet is reported as `needs`; None in the table means that it was looked up
and not found.

`PodGroup` holds the members that are known: the gate (scheduling gates), the claim allocator (DRA) and the placement of
MIG slices each add to it and to `GroupMember` what they keep of theirs.

`OwnerTemplate` is what an object above pods says of them, part by part: a part is a template of a JobSet, a
LeaderWorkerSet, a Kubeflow job or an Indexed Job, with how many pods it has at once, and what each asks for.

Sources: batch/v1 Job, JobSet v1alpha2, LeaderWorkerSet v1, Kubeflow training operator v1, scheduling.k8s.io PodGroup.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Generic, NamedTuple, TypeVar

from eelgrid_controller.engines.kubernetes.model import well_known
from eelgrid_controller.engines.kubernetes.model.objects import OwnerReference, Pod, controller_of
from eelgrid_controller.engines.kubernetes.model.quantities import NO_AMOUNTS, ResourceAmounts, pod_requests
from eelgrid_controller.engines.kubernetes.model.selectors import NO_CONSTRAINT, NodeConstraint, parse_constraint

# Where each of Kubeflow's jobs keeps its replicas.
KUBEFLOW_REPLICA_FIELDS = {
    "JAXJob": "jaxReplicaSpecs",
    "MPIJob": "mpiReplicaSpecs",
    "PaddleJob": "paddleReplicaSpecs",
    "PyTorchJob": "pytorchReplicaSpecs",
    "TFJob": "tfReplicaSpecs",
    "XGBoostJob": "xgbReplicaSpecs",
}


class ObjectRef(NamedTuple):
    """Reference to an object, with what a lookup needs."""

    group: str
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class OwnerPart(NamedTuple):
    """Pods of one template: how many at once, and what each asks for."""

    name: str
    pods: int
    requested: ResourceAmounts
    constraint: NodeConstraint


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerTemplate:
    """An object above pods, and how many it holds at once; no parts where it says nothing of that."""

    uid: str
    owner: OwnerReference | None = None
    parts: tuple[OwnerPart, ...] = ()
    is_staged: bool = False  # its parts start one after another
    least: int | None = None  # of a PodGroup with a gang policy
    queue: str = ""  # by its label


# What lookups found; None where there is no such object, or where it may not be read.
OwnerTemplates = Mapping[ObjectRef, OwnerTemplate | None]


def parse_owner_template(ref: ObjectRef, found: Mapping[str, Any]) -> OwnerTemplate:
    """Parse what an owner object says of its pods."""
    spec = found.get("spec") or {}
    read = _PARTS.get(ref.kind)
    if ref.kind in KUBEFLOW_REPLICA_FIELDS:
        read = _kubeflow_parts
    policy = (spec.get("schedulingPolicy") or {}).get("gang") or {}
    return OwnerTemplate(
        uid=str((found.get("metadata") or {}).get("uid") or ""),
        owner=controller_of(found),
        parts=tuple(part for part in read(spec) if part.pods > 0) if read else (),
        is_staged=_is_staged(ref.kind, spec),
        queue=str(((found.get("metadata") or {}).get("labels") or {}).get(well_known.KUEUE_QUEUE) or ""),
        least=int(policy["minCount"]) if ref.kind == "PodGroup" and policy.get("minCount") else None,
    )


def _template(name: str, count: int, template: Mapping[str, Any] | None) -> OwnerPart:
    spec = (template or {}).get("spec") or {}
    return OwnerPart(name, count, pod_requests(spec), parse_constraint(spec))


def _at_once(job: Mapping[str, Any]) -> int:
    """How many pods of a Job there are at once."""
    parallelism = job.get("parallelism")
    parallelism = 1 if parallelism is None else int(parallelism)
    completions = job.get("completions")
    return parallelism if completions is None else min(parallelism, int(completions))


def _job_parts(spec: Mapping[str, Any]) -> Iterator[OwnerPart]:
    # Completions that come in waves are no gang: the second wave waits for the first.
    is_gang = spec.get("completionMode") == "Indexed" and spec.get("completions") == spec.get("parallelism")
    yield _template("", _at_once(spec) if is_gang else 1, spec.get("template"))


def _job_set_parts(spec: Mapping[str, Any]) -> Iterator[OwnerPart]:
    for one in spec.get("replicatedJobs") or ():
        job = (one.get("template") or {}).get("spec") or {}
        replicas = one.get("replicas")
        count = (1 if replicas is None else int(replicas)) * _at_once(job)
        yield _template(str(one.get("name") or ""), count, job.get("template"))


def _leader_worker_parts(spec: Mapping[str, Any]) -> Iterator[OwnerPart]:
    both = spec.get("leaderWorkerTemplate") or {}
    worker, size = both.get("workerTemplate"), int(both.get("size") or 1)
    yield _template("leader", 1, both.get("leaderTemplate") or worker)
    yield _template("worker", size - 1, worker)


def _kubeflow_parts(spec: Mapping[str, Any]) -> Iterator[OwnerPart]:
    for replicas_field in KUBEFLOW_REPLICA_FIELDS.values():
        for name, one in (spec.get(replicas_field) or {}).items():
            # The launcher of an MPI job comes when its workers run.
            if replicas_field == "mpiReplicaSpecs" and name == "Launcher":
                continue
            replicas = one.get("replicas")
            yield _template(name.lower(), 1 if replicas is None else int(replicas), one.get("template"))


_PARTS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[OwnerPart]]] = {
    "Job": _job_parts,
    "JobSet": _job_set_parts,
    "LeaderWorkerSet": _leader_worker_parts,
}


def _is_staged(kind: str, spec: Mapping[str, Any]) -> bool:
    if kind == "LeaderWorkerSet":
        return spec.get("startupPolicy") == "LeaderReady"
    if kind == "JobSet":
        order = (spec.get("startupPolicy") or {}).get("startupPolicyOrder")
        return order == "InOrder" or any(one.get("dependsOn") for one in spec.get("replicatedJobs") or ())
    return False


MAX_GANG_SIZE = 10_000
_UNIT_LONGEST = 128


class IntentRefusal(NamedTuple):
    """Why there is no intent: the field at fault, what is wrong, what to do.

    `is_released` asks to let the pod go to the default scheduler; else it stays gated with the reason. `needs` names an
    object that has to be looked up first: then nobody is at fault, and the pod is asked about again.
    """

    field: str
    problem: str
    remedy: str
    is_released: bool = False
    needs: ObjectRef | None = None

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"


class GangMembership(NamedTuple):
    """The group of a pod: `size` pods of one `unit` are placed together or not at all; 1 for a pod that is placed alone."""

    unit: str
    size: int
    owner_kind: str = ""
    owner_name: str = ""


def membership_of(pod: Pod, holders: OwnerTemplates, *, is_training: bool = False) -> GangMembership | IntentRefusal:
    """Determine the group of a pod, or why that is not possible."""
    owner = pod.owner
    if pod.is_static or (owner is not None and owner.kind in ("DaemonSet", "Node")):
        return IntentRefusal(
            "metadata.ownerReferences",
            "a DaemonSet or a kubelet has chosen the pod's node already",
            f"leave {well_known.LABEL_MANAGED} off such pods",
            is_released=True,
        )
    for rule in (_own_word, _pod_group, _leader_worker, _job_set, _kubeflow, _kueue_group):
        found = rule(pod, holders)
        if found is not None:
            return _bounded(found)
    found = _indexed_job(pod, holders) if is_training else None
    return _bounded(found) if found is not None else _alone(pod)


def _bounded(found: GangMembership | IntentRefusal) -> GangMembership | IntentRefusal:
    if isinstance(found, IntentRefusal) or found.size <= MAX_GANG_SIZE:
        return found
    return IntentRefusal("metadata", f"is one of a gang of {found.size} pods", f"gangs have {MAX_GANG_SIZE} at most")


def _alone(pod: Pod) -> GangMembership:
    owner = pod.owner
    kind, name = (owner.kind, owner.name) if owner else ("", "")
    if kind == "ReplicaSet":
        # It is called after its Deployment and a hash, and the Deployment is what people know.
        kind, name = "Deployment", name.rpartition("-")[0] or name
    return GangMembership(f"pod-{pod.uid}", 1, kind, name)


def _own_word(pod: Pod, _: OwnerTemplates) -> GangMembership | IntentRefusal | None:
    group, size = (pod.annotations.get(key) for key in (well_known.ANNOTATION_GROUP, well_known.ANNOTATION_GROUP_SIZE))
    if group is None and size is None:
        return None
    if not group:
        return IntentRefusal(
            well_known.ANNOTATION_GROUP, "is missing beside the group's size", "name the group, such as train-7"
        )
    count = _positive(size)
    if count is None:
        return IntentRefusal(
            well_known.ANNOTATION_GROUP_SIZE,
            f"is {size!r}" if size else "is missing",
            'give the pods of the group, such as "4"',
        )
    owner = pod.owner
    return GangMembership(_unit(f"{pod.namespace}/{group}"), count, owner.kind if owner else "", group)


def _pod_group(pod: Pod, holders: OwnerTemplates) -> GangMembership | IntentRefusal | None:
    if not pod.group or "/" in pod.group:
        return None
    ref = ObjectRef("scheduling.k8s.io", "PodGroup", pod.namespace, pod.group)
    if ref not in holders:
        return request_lookup(ref)
    holder = holders[ref]
    if holder is None or holder.least is None:
        return None
    return GangMembership(_unit(holder.uid), holder.least, "PodGroup", pod.group)


def _leader_worker(pod: Pod, holders: OwnerTemplates) -> GangMembership | IntentRefusal | None:
    name = pod.labels.get(well_known.LWS_NAME)
    if name is None:
        return None
    ref = ObjectRef("leaderworkerset.x-k8s.io", "LeaderWorkerSet", pod.namespace, name)
    if ref not in holders:
        return request_lookup(ref)
    holder = holders[ref]
    size = _positive(pod.annotations.get(well_known.LWS_SIZE))
    if size is None:
        return IntentRefusal(
            well_known.LWS_SIZE, "is missing or no number", f"set {well_known.ANNOTATION_GROUP_SIZE} instead"
        )
    part = "leader" if _whole(pod.labels.get(well_known.LWS_WORKER_INDEX)) == 0 else "worker"
    group = f"{holder.uid if holder else pod.namespace + '/' + name}-{pod.labels.get(well_known.LWS_GROUP_INDEX, '0')}"
    # A group that is rebuilt in a rolling update has the size that its pods say, not the set's newest.
    parts: tuple[OwnerPart, ...] = (
        OwnerPart("leader", 1, *_NOTHING_SAID),
        OwnerPart("worker", size - 1, *_NOTHING_SAID),
    )
    if holder is not None and holder.parts:
        counts = {"leader": 1, "worker": size - 1}
        parts = tuple(one._replace(pods=counts[one.name]) for one in (*holder.parts, *parts)[:2])
    return _of_parts(group, parts, part, is_staged=holder is not None and holder.is_staged)._replace(
        owner_kind="LeaderWorkerSet", owner_name=name
    )


def _job_set(pod: Pod, holders: OwnerTemplates) -> GangMembership | IntentRefusal | None:
    name = pod.labels.get(well_known.JOBSET_NAME)
    if name is None:
        return None
    ref = ObjectRef("jobset.x-k8s.io", "JobSet", pod.namespace, name)
    if ref not in holders:
        return request_lookup(ref)
    holder = holders[ref]
    if holder is None:
        return _unseen(ref)
    above = holder.owner
    kind, shown = (above.kind, above.name) if above is not None and above.kind == "TrainJob" else ("JobSet", name)
    part = pod.labels.get(well_known.JOBSET_PART, "")
    # Attempts of a set are told apart: the pods of the last one hold their places until they are gone.
    attempt = pod.labels.get(well_known.JOBSET_ATTEMPT, "0")
    group = holder.uid if attempt == "0" else f"{holder.uid}-r{attempt}"
    found = _of_parts(group, holder.parts, part, is_staged=holder.is_staged)
    return found._replace(owner_kind=kind, owner_name=shown)


def _kubeflow(pod: Pod, holders: OwnerTemplates) -> GangMembership | IntentRefusal | None:
    owner = pod.owner
    if owner is None or owner.group != "kubeflow.org" or owner.kind not in KUBEFLOW_REPLICA_FIELDS:
        return None
    ref = ObjectRef("kubeflow.org", owner.kind, pod.namespace, owner.name)
    if ref not in holders:
        return request_lookup(ref)
    holder = holders[ref]
    if holder is None or holder.uid != owner.uid:
        return _unseen(ref)
    part = pod.labels.get(well_known.KUBEFLOW_PART) or pod.labels.get(well_known.KUBEFLOW_ROLE, "")
    found = _of_parts(holder.uid, holder.parts, part.lower(), is_staged=holder.is_staged)
    return found._replace(owner_kind=owner.kind, owner_name=owner.name)


def _kueue_group(pod: Pod, _: OwnerTemplates) -> GangMembership | IntentRefusal | None:
    name = pod.labels.get(well_known.KUEUE_GROUP)
    if name is None or pod.annotations.get(well_known.KUEUE_SERVING) == "true":
        return None
    size = _positive(pod.annotations.get(well_known.KUEUE_TOTAL))
    if size is None:
        return IntentRefusal(
            well_known.KUEUE_TOTAL, "is missing or no number", 'give the pods of the group, such as "4"'
        )
    return GangMembership(_unit(f"{pod.namespace}/{name}"), size, "PodGroup", name)


def _indexed_job(pod: Pod, holders: OwnerTemplates) -> GangMembership | IntentRefusal | None:
    owner = pod.owner
    if owner is None or owner.kind != "Job" or _index(pod) is None:
        return None
    ref = ObjectRef("batch", "Job", pod.namespace, owner.name)
    if ref not in holders:
        return request_lookup(ref)
    holder = holders[ref]
    if holder is None or holder.uid != owner.uid:
        return _unseen(ref)
    size = holder.parts[0].pods if holder.parts else 1
    if size == 1:
        return None
    return GangMembership(_unit(holder.uid), size, "Job", owner.name)


_NOTHING_SAID = (NO_AMOUNTS, NO_CONSTRAINT)


def _of_parts(group: str, parts: tuple[OwnerPart, ...], name: str, *, is_staged: bool) -> GangMembership:
    """The unit of a part: all parts that ask for the same, unless parts start one after another."""
    own = next((part for part in parts if part.name == name), None)
    if own is None:
        return GangMembership(_unit(f"{group}-{name}" if name else group), 1)
    alike = [part for part in parts if (part.requested, part.constraint) == (own.requested, own.constraint)]
    if is_staged:
        alike = [own]
    unit = group if len(alike) == len(parts) else f"{group}-{alike[0].name}"
    return GangMembership(_unit(unit), sum(part.pods for part in alike))


def _unit(text: str) -> str:
    unit = f"gang-{text}"
    return unit if len(unit) <= _UNIT_LONGEST else f"gang-{sha256(text.encode()).hexdigest()[:32]}"


def request_lookup(ref: ObjectRef) -> IntentRefusal:
    """Says that an object has to be looked up first."""
    return IntentRefusal("metadata.ownerReferences", f"{ref} is not known yet", "it is looked up", needs=ref)


def _unseen(ref: ObjectRef) -> IntentRefusal:
    return IntentRefusal(
        "metadata.ownerReferences",
        f"how many pods belong together stands on {ref}, which cannot be read",
        f"grant get and watch on it, or set {well_known.ANNOTATION_GROUP} and {well_known.ANNOTATION_GROUP_SIZE}",
    )


def _index(pod: Pod) -> int | None:
    for key in (well_known.JOB_INDEX, well_known.STATEFUL_INDEX, well_known.KUEUE_INDEX):
        if key in pod.labels or key in pod.annotations:
            return _whole(pod.labels.get(key, pod.annotations.get(key)))
    return None


def _whole(text: str | None) -> int | None:
    return int(text) if text and len(text) < 10 and text.isascii() and text.isdigit() else None


def _positive(text: str | None) -> int | None:
    found = _whole(text)
    return found or None


# Between a group's key and the number of an attempt to place it, in the id by which the core knows it.
_ATTEMPT_MARK = "//"
_KEY_LONGEST = 118  # what an id may have, less the attempt
_KEY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?")  # which ids the core takes


def unit_name(text: str) -> str:
    """A unit's name that an attempt can be added to; what is too long, no id, or has the mark itself is hashed."""
    if len(text) <= _KEY_LONGEST and _ATTEMPT_MARK not in text and _KEY.fullmatch(text):
        return text
    return f"{text.partition('-')[0]}-{sha256(text.encode(errors='replace')).hexdigest()[:32]}"


def workload_id(unit: str, attempt: int) -> str:
    """The id in the core of an attempt to place a group."""
    return unit if attempt <= 1 else f"{unit}{_ATTEMPT_MARK}{attempt}"


def unit_of(workload: str) -> str:
    """The unit of a workload's id."""
    head, dot, tail = workload.rpartition(_ATTEMPT_MARK)
    return head if dot and _positive(tail) else workload


def attempt_of(workload: str) -> int:
    """The attempt of a workload's id."""
    _, dot, tail = workload.rpartition(_ATTEMPT_MARK)
    return (_positive(tail) or 1) if dot else 1


def group_key(pod: Pod, membership: GangMembership | IntentRefusal) -> str:
    """The key of a pod's group; a pod of which it cannot be said whose it is, is a group of its own."""
    return unit_name(membership.unit) if isinstance(membership, GangMembership) else f"pod-{pod.uid}"


class PodKey(NamedTuple):
    """A pod by namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def is_pod_over(pod: Pod) -> bool:
    """Whether a pod has ended, or is about to be gone without having been anywhere."""
    return pod.is_terminal or (pod.is_deleting and not pod.node_name)


def find_target_node(pod: Pod, pinned: str) -> str:
    """The node that a pod is on or, pinned there, can only go to; empty while it waits for us, is free or over."""
    if pod.is_terminal or (pod.awaits_placement and not is_pod_over(pod)):
        return ""
    return pod.node_name or pinned


class GroupMember:
    """Base of a group's members; a subclass gives `pod`, and `min_members` and `pinned` where it knows them."""

    __slots__ = ()

    @property
    def pod(self) -> Pod:
        """The pod as it is known."""
        raise NotImplementedError

    @property
    def min_members(self) -> int:
        """How many members its group is to have, as this pod says."""
        return 1

    @property
    def pinned(self) -> str:
        """The one node that its affinity allows; empty for any."""
        return ""

    @property
    def uid(self) -> str:
        """The pod's uid."""
        return self.pod.uid

    @property
    def key(self) -> PodKey:
        """Its namespace and name."""
        return PodKey(self.pod.namespace, self.pod.name)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is about to be gone without having been anywhere."""
        return is_pod_over(self.pod)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for us to place it."""
        return not self.is_over and self.pod.awaits_placement

    @property
    def target_node(self) -> str:
        """The node that it is on or can only go to; empty while it waits, is free or over."""
        return find_target_node(self.pod, self.pinned)


MemberT = TypeVar("MemberT", bound=GroupMember)


@dataclass(slots=True)
class PodGroup(Generic[MemberT]):
    """Pods that are placed together or not at all; `name` is the group's key, `members` are by uid."""

    name: str
    members: dict[str, MemberT] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The minimum: how many members it is to have before any is placed."""
        return max((member.min_members for member in self.members.values()), default=1)

    @property
    def active_members(self) -> list[MemberT]:
        """Members that have not ended."""
        return [member for member in self.members.values() if not member.is_over]

    @property
    def present_members(self) -> list[MemberT]:
        """Members that have not ended and are not about to."""
        return [member for member in self.active_members if not member.pod.is_deleting]

    @property
    def is_complete(self) -> bool:
        """Whether as many members are present as are to be."""
        return len(self.present_members) >= self.size
