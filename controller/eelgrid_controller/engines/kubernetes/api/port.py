"""Port to a Kubernetes API: a dozen verbs over plain JSON objects.

Also the resources that Eelgrid uses: group, version, plural and scope.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote


class Resource(NamedTuple):
    """A kind of object, by the place where the API serves it."""

    group: str  # empty for the core group
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def title(self) -> str:
        """How messages and permissions name it: `pods`, `jobs.batch`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Where on the server the kind, an object or a part of an object is; an empty namespace means all of them."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace and self.is_namespaced:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name:
            parts.append(quote(name, safe=":"))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)

    def at(self, version: str) -> "Resource":
        """The same kind in another version."""
        return self._replace(version=version)


NODES = Resource("", "v1", "nodes", "Node", is_namespaced=False)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
PODS = Resource("", "v1", "pods", "Pod")
PERSISTENT_VOLUME_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
PERSISTENT_VOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", is_namespaced=False)
STORAGE_CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", is_namespaced=False)
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
JOBS = Resource("batch", "v1", "jobs", "Job")
POD_DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
HORIZONTAL_POD_AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
# v1alpha1 in 1.35, v1alpha2 in 1.36, v1beta1 in 1.37; served only where its feature gates are on.
POD_GROUPS = Resource("scheduling.k8s.io", "v1alpha2", "podgroups", "PodGroup")
RESOURCE_CLAIMS = Resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim")
RESOURCE_SLICES = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", is_namespaced=False)
DEVICE_CLASSES = Resource("resource.k8s.io", "v1", "deviceclasses", "DeviceClass", is_namespaced=False)


# Workloads of others, recognised where they are served.
JOB_SETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
LEADER_WORKER_SETS = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
TRAIN_JOBS = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob")
PYTORCH_JOBS = Resource("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob")
KUEUE_WORKLOADS = Resource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")
LOCAL_QUEUES = Resource("kueue.x-k8s.io", "v1beta1", "localqueues", "LocalQueue")
CLUSTER_QUEUES = Resource("kueue.x-k8s.io", "v1beta1", "clusterqueues", "ClusterQueue", is_namespaced=False)

# Our own kinds.
INFERENCE_SERVICES = Resource("eelgrid.io", "v1alpha1", "inferenceservices", "InferenceService")
POWER_POLICIES = Resource("eelgrid.io", "v1alpha1", "powerpolicies", "PowerPolicy", is_namespaced=False)


Object = dict[str, Any]
Body = Mapping[str, Any]

# Objects in one page of a list: what API servers answer in well under a second.
PAGE_SIZE = 500


class ObjectKey(NamedTuple):
    """The name of an object within its kind; the namespace is empty for kinds that have none."""

    namespace: str
    name: str


def key_of(found: Body) -> ObjectKey:
    """The key of an object."""
    metadata = found["metadata"]
    return ObjectKey(metadata.get("namespace", ""), metadata["name"])


def uid_of(found: Body) -> str:
    """The uid of an object: another object of the same name has another."""
    return str(found["metadata"]["uid"])


def version_of(found: Body) -> str:
    """The resource version of an object: an opaque word that changes with each write."""
    return str(found["metadata"]["resourceVersion"])


class WatchEventType(StrEnum):
    """Type of a watch event."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"  # nothing changed up to the resource version of its otherwise empty object


class PatchKind(Enum):
    """How a patch is written; the value is its content type."""

    MERGE = "application/merge-patch+json"  # RFC 7396: null deletes, lists are replaced whole
    JSON = "application/json-patch+json"  # RFC 6902: a list of operations, `test` among them
    STRATEGIC = "application/strategic-merge-patch+json"  # lists are merged by key; not for custom resources
    APPLY = "application/apply-patch+yaml"  # server-side apply; needs a field manager, creates if absent


class PropagationPolicy(StrEnum):
    """What happens to the dependents of a deleted object."""

    BACKGROUND = "Background"
    FOREGROUND = "Foreground"
    ORPHAN = "Orphan"


class WatchEvent(NamedTuple):
    """An event of a watch."""

    told: WatchEventType
    object: Object


class ObjectList(NamedTuple):
    """Objects of one kind, and the resource version from which a watch goes on."""

    items: list[Object]
    resource_version: str
    after: str = ""  # where the next page begins; empty at the last


@dataclass(frozen=True, slots=True)
class ServedResources:
    """The version of a server, and the kinds that it serves in which versions."""

    major: int
    minor: int
    plurals: frozenset[tuple[str, str, str]]  # group, version, plural; parts of objects as `pods/eviction`

    def has(self, resource: Resource, subresource: str = "") -> bool:
        """Whether the kind is served in just this version."""
        plural = f"{resource.plural}/{subresource}" if subresource else resource.plural
        return (resource.group, resource.version, plural) in self.plurals

    def find_served(self, resource: Resource, versions: Iterable[str]) -> Resource | None:
        """The kind in the first of these versions that is served, or None."""
        return next((found for found in map(resource.at, versions) if self.has(found)), None)


class ClusterClient(Protocol):
    """A Kubernetes API. A namespace is needed for kinds that live in one, and is ignored for others."""

    async def get(self, resource: Resource, name: str, *, namespace: str = "", subresource: str = "") -> Object:
        """Read an object; raises ObjectNotFound."""

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        limit: int | None = None,
        after: str = "",
        resource_version: str = "",
    ) -> ObjectList:
        """All objects, page by page, or with a limit one page of them; Expired if a page is asked for too late.

        `labels` and `fields` are selectors as kubectl takes them. `resource_version` "0" lets the server answer from
        its cache, however old that is; empty means the newest.
        """

    def watch_changes(
        self,
        resource: Resource,
        *,
        resource_version: str,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        timeout_s: float = 300.0,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Every change after a resource version, with bookmarks; ends when the server ends it, after `timeout_s` at most.

        Expired if the version is too old. A connection that breaks is Unreachable. Whatever came before is valid.
        Close it (`contextlib.aclosing`) where you leave it early.
        """

    async def create(self, resource: Resource, body: Body, *, namespace: str = "") -> Object:
        """Make an object; AlreadyExists. The namespace may stand in the body."""

    async def replace(self, resource: Resource, body: Body, *, subresource: str = "") -> Object:
        """Write an object whole; Conflict if its resource version, where the body has one, is not the newest."""

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: Body | Sequence[Body],
        kind: PatchKind = PatchKind.MERGE,
        *,
        namespace: str = "",
        subresource: str = "",
        manager: str = "",
        is_forced: bool = False,
        is_brief: bool = False,
    ) -> Object:
        """Change parts of an object. `manager` and `is_forced` (take over fields of others) belong to APPLY.

        Where `is_brief`, only the metadata of the answer is asked for: half of a pod need not be written and read.
        """

    async def delete(
        self,
        resource: Resource,
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        resource_version: str = "",
        propagation: PropagationPolicy = PropagationPolicy.BACKGROUND,
        grace_s: int | None = None,
    ) -> None:
        """Delete an object; Conflict if it is not the one of this uid and resource version, where they are given."""

    async def bind(
        self,
        name: str,
        *,
        namespace: str,
        node_name: str,
        uid: str,
        resource_version: str,
        annotations: Mapping[str, str],
    ) -> None:
        """Bind a pod to a node and write these annotations; Conflict where it is another pod, another version or bound.

        Nobody checks whether the node exists, or has room.
        """

    async def evict(
        self, name: str, *, namespace: str, uid: str = "", grace_s: int | None = None, is_dry: bool = False
    ) -> None:
        """Ask a pod to go as its PodDisruptionBudgets allow, or whether it might; BudgetForbids."""

    async def discover(self) -> ServedResources:
        """Discover the server's version and the kinds that it serves."""

    async def close(self) -> None:
        """Let go of all connections; running calls and watches end with Unreachable."""
