"""Pods and nodes as small frozen values.

Missing and null fields have their defaults; an object without a name or uid raises KubernetesUnreadable. A hundred
thousand pods are held at once: unused annotations are dropped, recurring strings are shared. What follows from a
pod's spec alone is cached for the last few specs (`PodShapeCache`); the cache never changes a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from sys import intern
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.quantities import (
    NO_AMOUNTS,
    KubernetesUnreadable,
    ResourceAmounts,
    non_gpu_devices,
    parse_amounts,
    parse_count,
    pod_requests,
)
from eelgrid_controller.engines.kubernetes.model.scheduler_support import UNSUPPORTED_FIELD
from eelgrid_controller.engines.kubernetes.model.selectors import (
    NO_CONSTRAINT,
    NO_RELATIONS,
    NodeConstraint,
    PodRelations,
    Taint,
    parse_constraint,
    parse_relations,
    parse_taints,
)
from eelgrid_controller.engines.kubernetes.model.well_known import (
    CONDITION_PLACEMENT,
    GATE,
    RESOURCES_GPU,
    SCHEDULER,
    is_kept_annotation,
)

_TERMINAL = ("Succeeded", "Failed")
_MIRROR = "kubernetes.io/config.mirror"
_SHAPING_SPEC = (
    "affinity",
    "nodeSelector",
    "tolerations",
    "containers",
    "initContainers",
    "overhead",
    "resources",
    "resourceClaims",
    "schedulingGroup",
    "workloadRef",
    "topologySpreadConstraints",
    "volumes",
)
_SHAPING_STATUS = (
    "containerStatuses",
    "initContainerStatuses",
    "resources",
    "allocatedResources",
    "resourceClaimStatuses",
)
_SHAPES_MOST = 16


class OwnerReference(NamedTuple):
    """The controller of an object: the one owner reference that says so."""

    api_version: str
    kind: str
    name: str
    uid: str

    @property
    def group(self) -> str:
        """The API group, empty for the core: versions come and go, groups stay."""
        return self.api_version.rpartition("/")[0]


class PodClaim(NamedTuple):
    """A DRA claim of a pod; `claim_name` is empty until a claim of the template has been made."""

    name: str
    claim_name: str = ""
    template_name: str = ""


class PlacementCondition(NamedTuple):
    """The condition names.CONDITION_PLACEMENT of a pod."""

    is_true: bool
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod; texts that are not set are empty, times are None."""

    uid: str
    namespace: str
    name: str
    resource_version: str = ""
    created_s: float | None = None  # since 1970
    deleted_s: float | None = None  # when it is to be gone; set as soon as somebody deletes it
    labels: Mapping[str, str]
    annotations: Mapping[str, str]  # of names.KEPT_DOMAINS alone
    owner: OwnerReference | None = None
    gates: tuple[str, ...] = ()
    node_name: str = ""  # where it is bound
    scheduler_name: str = ""
    nominated_node: str = ""  # where its scheduler makes room for it
    unsupported: str = ""  # the field that no scheduler of ours can judge, in pods that name ours
    priority: int = 0
    never_preempts: bool = False  # by its PriorityClass, or its own spec
    phase: str = ""  # Pending, Running, Succeeded, Failed, Unknown
    reason: str = ""  # of a failure, such as UnexpectedAdmissionError
    unscheduled: str = ""  # why it is not bound: SchedulingGated, Unschedulable, SchedulerError; empty once it is
    unscheduled_message: str = ""
    is_ready: bool = False
    is_static: bool = False  # a kubelet's own, of which the API holds but a mirror
    pod_ip: str = ""
    requested: ResourceAmounts = NO_AMOUNTS
    claims: tuple[PodClaim, ...] = ()
    group: str = ""  # the PodGroup it is scheduled with
    constraint: NodeConstraint = NO_CONSTRAINT
    relations: PodRelations = NO_RELATIONS
    placement: PlacementCondition | None = None  # our condition, as it stands in the status

    @property
    def is_gated(self) -> bool:
        """Whether it has our scheduling gate; `gates` may name others, too."""
        return GATE in self.gates

    @property
    def is_bound_by_us(self) -> bool:
        """Whether it names our scheduler: nobody else binds it."""
        return self.scheduler_name == SCHEDULER

    @property
    def awaits_placement(self) -> bool:
        """Whether it waits for Eelgrid, behind our gate or for our scheduler."""
        return self.is_gated or (self.is_bound_by_us and not self.node_name and not self.is_terminal)

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended and holds nothing any more."""
        return self.phase in _TERMINAL

    @property
    def is_deleting(self) -> bool:
        """Whether it is being deleted."""
        return self.deleted_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeNode:
    """A node; all its labels are kept, since selectors may name any."""

    name: str
    uid: str
    resource_version: str = ""
    labels: Mapping[str, str]
    taints: tuple[Taint, ...] = ()
    is_unschedulable: bool = False  # cordoned
    is_ready: bool = False
    unready: str = ""  # why it is not, in the kubelet's words
    is_going: bool = False
    allocatable: ResourceAmounts = NO_AMOUNTS
    capacity: ResourceAmounts = NO_AMOUNTS
    pods_most: int | None = None
    boot_id: str = ""

    def is_equivalent(self, other: "KubeNode") -> bool:
        """Whether two sights of a node differ in nothing that bears on what goes there."""
        return (
            self.labels == other.labels
            and self.taints == other.taints
            and self.is_unschedulable == other.is_unschedulable
            and self.is_ready == other.is_ready
            and self.is_going == other.is_going
            and self.allocatable == other.allocatable
            and self.uid == other.uid
        )


class _Shape(NamedTuple):
    """What follows from a pod's spec, and from its status where that bears on what it holds."""

    requested: ResourceAmounts
    claims: tuple[PodClaim, ...]
    group: str
    constraint: NodeConstraint
    relations: PodRelations


class PodShapeCache:
    """The last few shapes; what they were read from must not be changed afterwards."""

    def __init__(self) -> None:
        self._recent: list[tuple[tuple[Any, ...], _Shape]] = []

    def shape_of(self, spec: Mapping[str, Any], status: Mapping[str, Any]) -> _Shape:
        """The shape of a pod; raises KubernetesUnreadable."""
        resizing = [one for one in status.get("conditions") or () if one.get("type") == "PodResizePending"]
        parts = (*map(spec.get, _SHAPING_SPEC), *map(status.get, _SHAPING_STATUS), resizing)
        for known, shape in self._recent:
            if known == parts:
                return shape
        found = _shape(spec, status)
        self._recent.insert(0, (parts, found))
        del self._recent[_SHAPES_MOST:]
        return found


def _shape(spec: Mapping[str, Any], status: Mapping[str, Any]) -> _Shape:
    requested = pod_requests(spec, status)
    return _Shape(
        requested,
        _claims(spec, status),
        _group(spec),
        parse_constraint(spec, non_gpu_devices(requested)),
        parse_relations(spec),
    )


def parse_pod(found: Mapping[str, Any], shapes: PodShapeCache | None = None) -> Pod:
    """The pod in an object of the API, with what is remembered of others like it; raises KubernetesUnreadable."""
    metadata, spec, status = (_mapping(found, part) for part in ("metadata", "spec", "status"))
    conditions = {one.get("type"): one for one in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    shape = _shape(spec, status) if shapes is None else shapes.shape_of(spec, status)
    is_bound = scheduled.get("status") == "True" or bool(spec.get("nodeName"))
    return Pod(
        uid=_required_text(metadata, "uid"),
        namespace=intern(_text(metadata, "namespace")),
        name=_required_text(metadata, "name"),
        resource_version=_text(metadata, "resourceVersion"),
        created_s=_time_s(metadata, "creationTimestamp"),
        deleted_s=_time_s(metadata, "deletionTimestamp"),
        labels={intern(key): intern(str(value)) for key, value in (metadata.get("labels") or {}).items()},
        annotations=_kept(metadata.get("annotations")),
        owner=controller_of(found),
        gates=tuple(intern(_text(gate, "name")) for gate in spec.get("schedulingGates") or ()),
        node_name=intern(_text(spec, "nodeName")),
        scheduler_name=intern(_text(spec, "schedulerName")),
        nominated_node=intern(_text(status, "nominatedNodeName")),
        unsupported=_text(spec, UNSUPPORTED_FIELD),
        priority=int(spec.get("priority") or 0),
        never_preempts=_text(spec, "preemptionPolicy") == "Never",
        phase=intern(_text(status, "phase")),
        reason=intern(_text(status, "reason")),
        unscheduled="" if is_bound else intern(_text(scheduled, "reason")),
        unscheduled_message="" if is_bound else intern(_text(scheduled, "message")),
        is_ready=(conditions.get("Ready") or {}).get("status") == "True",
        is_static=_MIRROR in (metadata.get("annotations") or {}),
        pod_ip=_text(status, "podIP"),
        requested=shape.requested,
        claims=shape.claims,
        group=shape.group,
        constraint=shape.constraint,
        relations=shape.relations,
        placement=_placement(conditions.get(CONDITION_PLACEMENT)),
    )


def parse_node(found: Mapping[str, Any]) -> KubeNode:
    """The node in an object of the API; raises KubernetesUnreadable."""
    metadata, spec, status = (_mapping(found, part) for part in ("metadata", "spec", "status"))
    ready: Mapping[str, Any] = next((one for one in status.get("conditions") or () if one.get("type") == "Ready"), {})
    is_ready = ready.get("status") == "True"
    allocatable, capacity = (_mapping(status, part) for part in ("allocatable", "capacity"))
    return KubeNode(
        name=_required_text(metadata, "name"),
        uid=_required_text(metadata, "uid"),
        resource_version=_text(metadata, "resourceVersion"),
        labels={intern(key): intern(str(value)) for key, value in (metadata.get("labels") or {}).items()},
        taints=parse_taints(spec),
        is_unschedulable=bool(spec.get("unschedulable")),
        is_ready=is_ready,
        unready=""
        if is_ready
        else (_text(ready, "message") or _text(ready, "reason") or "its kubelet has not reported"),
        is_going=metadata.get("deletionTimestamp") is not None,
        allocatable=parse_amounts(allocatable, "status.allocatable"),
        capacity=parse_amounts(capacity, "status.capacity"),
        pods_most=None if "pods" not in allocatable else parse_count(allocatable["pods"], "status.allocatable.pods"),
        boot_id=_text(_mapping(status, "nodeInfo"), "bootID"),
    )


def controller_of(found: Mapping[str, Any]) -> OwnerReference | None:
    """The controller of an object of any kind; other owners have no say."""
    for one in _mapping(found, "metadata").get("ownerReferences") or ():
        if one.get("controller"):
            return OwnerReference(
                intern(_text(one, "apiVersion")),
                intern(_text(one, "kind")),
                intern(_text(one, "name")),
                intern(_text(one, "uid")),
            )
    return None


def _claims(spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[PodClaim, ...]:
    made = {one.get("name"): _text(one, "resourceClaimName") for one in status.get("resourceClaimStatuses") or ()}
    return tuple(
        PodClaim(
            _text(one, "name"),
            _text(one, "resourceClaimName") or made.get(one.get("name"), ""),
            _text(one, "resourceClaimTemplateName"),
        )
        for one in spec.get("resourceClaims") or ()
    )


def _group(spec: Mapping[str, Any]) -> str:
    """The PodGroup: by name since 1.36, by its place in a Workload before."""
    named = _mapping(spec, "schedulingGroup")
    if named:
        return intern(_text(named, "podGroupName"))
    before = _mapping(spec, "workloadRef")
    return intern("/".join(filter(None, (_text(before, key) for key in ("name", "podGroup", "podGroupReplicaKey")))))


def _placement(found: Mapping[str, Any] | None) -> PlacementCondition | None:
    if found is None:
        return None
    return PlacementCondition(found.get("status") == "True", _text(found, "reason"), _text(found, "message"))


def _kept(found: Mapping[str, Any] | None) -> Mapping[str, str]:
    return {intern(key): intern(str(value)) for key, value in (found or {}).items() if is_kept_annotation(key)}


def _mapping(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise KubernetesUnreadable(key, "is no object", "give what the API server gave")
    return value


def _text(found: Mapping[str, Any], key: str) -> str:
    return str(found.get(key) or "")


def _required_text(metadata: Mapping[str, Any], key: str) -> str:
    value = _text(metadata, key)
    if not value:
        raise KubernetesUnreadable(f"metadata.{key}", "is missing", "give an object that the API server has accepted")
    return value


def _time_s(metadata: Mapping[str, Any], key: str) -> float | None:
    text = _text(metadata, key)
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        raise KubernetesUnreadable(
            f"metadata.{key}", f"{text[:40]!r} is no time", "write such as 2026-11-22T04:30:00Z"
        ) from None


def is_claimant(pod: Pod) -> bool:
    """Whether a pod gets its devices by claims alone: then mode dra places it, and mode gate leaves it be."""
    return bool(pod.claims) and not any(pod.requested.count(name) for name in RESOURCES_GPU)
