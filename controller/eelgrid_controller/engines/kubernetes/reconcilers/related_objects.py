"""Objects related to pods: owners, namespaces, volumes, storage classes and users.

Each kind is held only while pods need it, pruned to the fields that are read.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from eelgrid_controller.engines.kubernetes.api.errors import Forbidden, NotServed, ObjectNotFound, call_until_done
from eelgrid_controller.engines.kubernetes.api.informer import Delta, Informer
from eelgrid_controller.engines.kubernetes.api.port import (
    JOB_SETS,
    JOBS,
    LEADER_WORKER_SETS,
    LOCAL_QUEUES,
    NAMESPACES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    POD_GROUPS,
    PYTORCH_JOBS,
    STORAGE_CLASSES,
    Object,
    ObjectKey,
    Resource,
    ServedResources,
)
from eelgrid_controller.engines.kubernetes.model.annotations import user_of
from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import (
    KUBEFLOW_REPLICA_FIELDS,
    ObjectRef,
    OwnerTemplate,
    PodKey,
    parse_owner_template,
)
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.queue_labels import parse_local_queue
from eelgrid_controller.engines.kubernetes.model.scheduler_support import UNSUPPORTED_FIELD, find_unsupported_field
from eelgrid_controller.engines.kubernetes.model.well_known import SCHEDULER, is_kept_annotation
from eelgrid_controller.engines.kubernetes.pods import eligibility
from eelgrid_controller.engines.kubernetes.pods.gate_events import GateEvent, RelatedSynced, RelatedUpdated
from eelgrid_controller.engines.kubernetes.pods.topology_constraints import (
    CLAIM_ANNOTATIONS,
    ZONE_LABELS,
    needs_namespaces,
    parse_storage_class,
    parse_volume,
    parse_volume_claim,
)
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import Reconciler

_AGE_S = 60.0
_AGAIN_S = 2.0
_MOST = 20_000
_VERSIONS = ("v1", "v1beta2", "v1beta1", "v1alpha3", "v1alpha2", "v1alpha1")
_KINDS = {
    ("batch", "Job"): JOBS,
    ("jobset.x-k8s.io", "JobSet"): JOB_SETS,
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): LEADER_WORKER_SETS,
    ("scheduling.k8s.io", "PodGroup"): POD_GROUPS,
    **{
        ("kubeflow.org", kind): PYTORCH_JOBS._replace(plural=f"{kind.lower()}s", kind=kind)
        for kind in KUBEFLOW_REPLICA_FIELDS
    },
}


class OwnerLookups:
    """Looks up the owners of pods; `found` holds what is known."""

    def __init__(
        self,
        reconciler: Reconciler[str],
        *,
        pods: Callable[[], Mapping[ObjectKey, Object]],
        done: Callable[[ObjectKey, Object], None],
    ) -> None:
        """`done` is called for each of the `pods` that waited for an object, once that has been looked up."""
        self.found: dict[ObjectRef, OwnerTemplate | None] = {}
        self._reconciler = reconciler
        self._pods = pods
        self._done = done
        self._waiting: dict[ObjectRef, dict[ObjectKey, None]] = {}  # pods by the object that they need
        self._until_s: dict[ObjectRef, float] = {}
        self._under_way: set[ObjectRef] = set()
        self._served: ServedResources | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a pod waits for an object."""
        return bool(self._waiting)

    def wait_for(self, ref: ObjectRef, key: ObjectKey) -> None:
        """Look up an object that a pod needs; `done` is called for the pod when it is known."""
        self._waiting.setdefault(ref, {})[key] = None
        self._reconciler.tasks.start_task(self.find_owner(ref))

    def expire_entries(self) -> None:
        """Let go of what is too old; the next pod asks again."""
        now_s = self._reconciler.clock.monotonic_s()
        for ref in [ref for ref, until_s in self._until_s.items() if until_s <= now_s]:
            self.found.pop(ref, None)
            del self._until_s[ref]

    async def find_owner(self, ref: ObjectRef) -> None:
        """Find an object, unless that is under way."""
        if ref in self._under_way or ref in self.found:
            return

        def on_failure(error: Exception) -> None:
            self._reconciler.log.warning("object=%s read=no error=%s action=retry", ref, error)

        self._under_way.add(ref)
        try:
            holder = await call_until_done(partial(self._get, ref), wait_s=_AGAIN_S, on_failure=on_failure)
        finally:
            self._under_way.discard(ref)
        if len(self.found) >= _MOST:
            oldest = next(iter(self.found))
            self.found.pop(oldest)
            self._until_s.pop(oldest, None)
        self.found[ref] = holder
        self._until_s[ref] = self._reconciler.clock.monotonic_s() + _AGE_S
        for key in self._waiting.pop(ref, {}):
            if (pod := self._pods().get(key)) is not None:
                self._done(key, pod)

    async def _get(self, ref: ObjectRef) -> OwnerTemplate | None:
        kind = await self._kind(ref)
        if kind is None:
            return None
        try:
            found = await self._reconciler.cluster.get(kind, ref.name, namespace=ref.namespace)
            return parse_owner_template(ref, found)
        except ObjectNotFound:
            return None
        except (KubernetesUnreadable, AttributeError, KeyError, TypeError, ValueError) as error:
            # Schemas of operators take more than the API server does; its pods say that it cannot be read.
            self._reconciler.log.warning("object=%s read=no error=%r", ref, error)
            return None

    async def _kind(self, ref: ObjectRef) -> Resource | None:
        known = _KINDS.get((ref.group, ref.kind))
        if known is None:
            return None
        if self._served is None or self._served.find_served(known, _VERSIONS) is None:
            self._served = await self._reconciler.cluster.discover()
        return self._served.find_served(known, _VERSIONS)


_SERVED_AGAIN_S = 30.0
_KNOWN_WITHIN_S = 10.0


class LocalQueues:
    """Which ClusterQueue each LocalQueue stands for, where Kueue's kinds are installed; read once it is needed."""

    def __init__(
        self, reconciler: Reconciler[str], *, is_needed: Callable[[], bool], changed: Callable[[], None]
    ) -> None:
        self.found: dict[tuple[str, str], str] = {}
        self._reconciler = reconciler
        self._is_needed = is_needed
        self._changed = changed
        self._known = asyncio.Event()

    async def run(self) -> None:
        """Watch them until cancelled."""
        while not self._is_needed():  # noqa: ASYNC110  # a cheap look at the policy
            await asyncio.sleep(_LOOKED_AT_EVERY_S)
        kind: Resource | None = None
        while kind is None:
            served = await call_until_done(self._reconciler.cluster.discover, wait_s=_AGAIN_S, on_failure=self._failed)
            kind = served.find_served(LOCAL_QUEUES, _VERSIONS)
            if kind is None:
                self._known.set()
                await asyncio.sleep(_SERVED_AGAIN_S)
        informer = self._reconciler.make_informer(kind, keep=prune_local_queue, max_objects=_MOST)
        informer.add_listener(self._on_deltas)
        async with asyncio.TaskGroup() as group:
            group.create_task(informer.run())
            await informer.wait_synced()
            self._known.set()

    async def wait_known(self) -> None:
        """Wait until they are known, or that there are none, if they are needed; not for ever: they may not be readable."""
        if self._is_needed():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._known.wait(), _KNOWN_WITHIN_S)

    def _failed(self, error: Exception) -> None:
        self._reconciler.log.warning("kinds=unknown error=%s action=retry", error)

    def _on_deltas(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            key = delta.key.namespace, delta.key.name
            if delta.new is None:
                self.found.pop(key, None)
            else:
                self.found[key] = parse_local_queue(delta.new)
        self._changed()


_PODS_MOST = 50_000
_LONGEST = 253


class PodUsers:
    """Of one cluster; `heard` is told of every change of its pods."""

    def __init__(self, *, most: int = _PODS_MOST) -> None:
        self._most = most
        self._users: OrderedDict[ObjectKey, str] = OrderedDict()

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        """Take what pods say now; a pod that is gone stays known."""
        for delta in deltas:
            if delta.new is None:
                continue
            metadata = delta.new["metadata"]
            user = user_of(metadata.get("annotations") or {}, metadata.get("labels") or {})
            # What a label of the ledger could not be is nobody's name.
            if user and len(user) <= _LONGEST and user.isprintable():
                self._users[delta.key] = user
                self._users.move_to_end(delta.key)
                if len(self._users) > self._most:
                    self._users.popitem(last=False)
            else:
                self._users.pop(delta.key, None)

    def user_of(self, namespace: str, pod: str) -> str:
        """The user of a pod; empty where it says none, or is not known."""
        return self._users.get(ObjectKey(namespace, pod), "")


_METADATA = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "ownerReferences")
_POD_SPEC = (
    "schedulingGates",
    "affinity",
    "nodeSelector",
    "tolerations",
    "nodeName",
    "schedulerName",
    "priority",
    "preemptionPolicy",
    "overhead",
    "resources",
    "resourceClaims",
    "schedulingGroup",
    "workloadRef",
    "topologySpreadConstraints",
)
_POD_STATUS = (
    "phase",
    "reason",
    "conditions",
    "podIP",
    "nominatedNodeName",
    "resourceClaimStatuses",
    "resources",
    "allocatedResources",
)
_STATUSES = ("containerStatuses", "initContainerStatuses")
_MIRROR = "kubernetes.io/config.mirror"


def prune_pod(found: Object) -> Object:
    """A pod with what `view_pod` and `ungating_patch` read."""
    metadata, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    kept = _some(spec, _POD_SPEC)
    if spec.get("schedulerName") == SCHEDULER and (unsupported := find_unsupported_field(spec)):
        kept[UNSUPPORTED_FIELD] = unsupported
    for part in ("containers", "initContainers"):
        if spec.get(part):
            kept[part] = [_some(one, ("name", "resources", "restartPolicy")) for one in spec[part]]
    if spec.get("volumes"):
        kept["volumes"] = [
            {"name": one.get("name", ""), "persistentVolumeClaim": one["persistentVolumeClaim"]}
            if "persistentVolumeClaim" in one
            else {"name": one.get("name", ""), "ephemeral": {}}
            for one in spec["volumes"]
            if "persistentVolumeClaim" in one or "ephemeral" in one
        ]
    told = _some(status, _POD_STATUS)
    for part in _STATUSES:
        if status.get(part):
            told[part] = [_some(one, ("name", "resources", "allocatedResources")) for one in status[part]]
    labels = metadata.get("labels") or {}
    annotations = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if is_kept_annotation(key) or key == _MIRROR
    }
    head = _some(metadata, _METADATA) | {"labels": labels, "annotations": annotations}
    return {"metadata": head, "spec": kept, "status": told}


def prune_node(found: Object) -> Object:
    """A node with what `views.node_of` reads."""
    metadata, status = found["metadata"], found.get("status") or {}
    told = _some(status, ("allocatable", "capacity"))
    told["conditions"] = [one for one in status.get("conditions") or () if one.get("type") == "Ready"]
    told["nodeInfo"] = _some(status.get("nodeInfo") or {}, ("bootID",))
    return {
        "metadata": _some(metadata, (*_METADATA, "labels", "annotations")),
        "spec": _some(found.get("spec") or {}, ("taints", "unschedulable")),
        "status": told,
    }


def prune_local_queue(found: Object) -> Object:
    """A LocalQueue with what `parse_local_queue` reads."""
    return {"metadata": _some(found["metadata"], _METADATA), "spec": _some(found.get("spec") or {}, ("clusterQueue",))}


def prune_namespace(found: Object) -> Object:
    """A namespace with the labels that namespaceSelectors look at."""
    return {"metadata": _some(found["metadata"], (*_METADATA, "labels"))}


def prune_volume_claim(found: Object) -> Object:
    """A PersistentVolumeClaim with what `parse_volume_claim` reads."""
    metadata, annotations = found["metadata"], found["metadata"].get("annotations") or {}
    head = _some(metadata, _METADATA) | {"annotations": _some(annotations, CLAIM_ANNOTATIONS)}
    return {"metadata": head, "spec": _some(found.get("spec") or {}, ("volumeName", "storageClassName"))}


def prune_volume(found: Object) -> Object:
    """A PersistentVolume with what `parse_volume` reads."""
    metadata, labels = found["metadata"], found["metadata"].get("labels") or {}
    head = _some(metadata, _METADATA) | {"labels": _some(labels, ZONE_LABELS)}
    return {"metadata": head, "spec": _some(found.get("spec") or {}, ("nodeAffinity",))}


def prune_storage_class(found: Object) -> Object:
    """A StorageClass with what `parse_storage_class` reads."""
    kept = _some(found, ("provisioner", "volumeBindingMode", "allowedTopologies"))
    return {"metadata": _some(found["metadata"], _METADATA), **kept}


def _some(found: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: found[key] for key in keys if key in found}


# Objects of one kind that are held: pruned to some 500 bytes, a hundred MB at the most.
RELATED_MOST = 200_000
_LOOKED_AT_EVERY_S = 0.2


def _labels_of(found: Mapping[str, Any]) -> dict[str, str]:
    return dict(found["metadata"].get("labels") or {})


_RELATED_KINDS: Mapping[str, Sequence[tuple[Resource, Callable[[Object], Object], Callable[[Object], Any]]]] = {
    eligibility.NAMESPACES: ((NAMESPACES, prune_namespace, _labels_of),),
    eligibility.VOLUMES: (
        (PERSISTENT_VOLUME_CLAIMS, prune_volume_claim, parse_volume_claim),
        (PERSISTENT_VOLUMES, prune_volume, parse_volume),
        (STORAGE_CLASSES, prune_storage_class, parse_storage_class),
    ),
}


class RelatedObjects:
    """Informers of what pods are judged by, each begun when it is first needed."""

    def __init__(self, reconciler: Reconciler[str], *, feed: Callable[[GateEvent], None]) -> None:
        self._reconciler = reconciler
        self._feed = feed
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        self._begun: set[str] = set()

    def require_for(self, pod: Pod) -> None:
        """A gated pod is going to be judged."""
        if pod.relations.claims:
            self._require_kind(eligibility.VOLUMES)
        if needs_namespaces(pod):
            self._require_kind(eligibility.NAMESPACES)

    def _require_kind(self, kind: str) -> None:
        if kind not in self._begun:
            self._begun.add(kind)
            self._wanted.put_nowait(kind)

    async def run(self) -> None:
        """Watch what is needed until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                kind = await self._wanted.get()
                informers = [self._informer(*one) for one in _RELATED_KINDS[kind]]
                for informer in informers:
                    group.create_task(informer.run())
                group.create_task(self._report(kind, informers))

    def _informer(
        self, resource: Resource, keep: Callable[[Object], Object], read: Callable[[Object], Any]
    ) -> Informer:
        def told(deltas: Sequence[Delta]) -> None:
            for delta in deltas:
                value = None if delta.new is None else read(delta.new)
                self._feed(RelatedUpdated(resource.plural, PodKey(*delta.key), value))

        informer = self._reconciler.make_informer(resource, keep=keep, max_objects=RELATED_MOST)
        informer.add_listener(told)
        return informer

    async def _report(self, kind: str, informers: Sequence[Informer]) -> None:
        """Tell whether all of a kind are known, each time that changes."""
        told: bool | None = None
        while told is not True:
            if all(one.is_synced for one in informers):
                now: bool | None = True
            elif any(not one.is_synced and isinstance(one.last_error, Forbidden | NotServed) for one in informers):
                now = False
            else:
                now = None
            if now is not None and now is not told:
                told = now
                self._reconciler.log.info("kubernetes=%s readable=%s", kind, "yes" if now else "no")
                self._feed(RelatedSynced(kind, now))
            await asyncio.sleep(_LOOKED_AT_EVERY_S)
