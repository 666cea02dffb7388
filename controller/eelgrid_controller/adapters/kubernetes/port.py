"""The port: what Eelgrid asks of a Kubernetes cluster, in a dozen verbs over plain JSON objects.

Owns the verbs and the values that they take and give. Must not know how they are carried
out; `client.py` speaks HTTP, the tests' fake holds everything in memory behind the same HTTP.

Theory. An object is a dictionary as the server gave it. Reads give it whole; writes are
bounded by what the writer knows: `replace` needs the resource version that was read, `patch`
may carry `metadata.resourceVersion` (then 409 if the object has changed since), `delete`
takes uid and resource version. Objects inside a list carry neither `kind` nor `apiVersion`.
Every call ends in a bounded time with a value or with one of the errors of `errors.py`.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, NamedTuple, Protocol

from eelgrid_controller.adapters.kubernetes.resources import Resource

__all__ = [
    "PAGE",
    "Body",
    "Change",
    "Cluster",
    "Key",
    "Listing",
    "Object",
    "PatchKind",
    "Propagation",
    "Served",
    "Told",
    "key_of",
    "uid_of",
    "version_of",
]

Object = dict[str, Any]
Body = Mapping[str, Any]

# Objects in one page of a list: what API servers answer in well under a second.
PAGE = 500


class Key(NamedTuple):
    """The name of an object within its kind; the namespace is empty for kinds that have none."""

    namespace: str
    name: str


def key_of(found: Body) -> Key:
    """The key of an object."""
    metadata = found["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])


def uid_of(found: Body) -> str:
    """The uid of an object: another object of the same name has another."""
    return str(found["metadata"]["uid"])


def version_of(found: Body) -> str:
    """The resource version of an object: an opaque word that changes with each write."""
    return str(found["metadata"]["resourceVersion"])


class Told(StrEnum):
    """What a watch tells."""

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


class Propagation(StrEnum):
    """What becomes of the objects that a deleted one owns."""

    BACKGROUND = "Background"
    FOREGROUND = "Foreground"
    ORPHAN = "Orphan"


class Change(NamedTuple):
    """One event of a watch."""

    told: Told
    object: Object


class Listing(NamedTuple):
    """Objects of one kind, and the resource version from which a watch goes on."""

    items: list[Object]
    resource_version: str
    after: str = ""  # where the next page begins; empty at the last


@dataclass(frozen=True, slots=True)
class Served:
    """What a server offers: its version, and which kinds in which versions."""

    major: int
    minor: int
    plurals: frozenset[tuple[str, str, str]]  # group, version, plural; parts of objects as `pods/eviction`

    def has(self, resource: Resource, subresource: str = "") -> bool:
        """Whether the kind is served in just this version."""
        plural = f"{resource.plural}/{subresource}" if subresource else resource.plural
        return (resource.group, resource.version, plural) in self.plurals

    def find(self, resource: Resource, versions: Iterable[str]) -> Resource | None:
        """The kind in the first of these versions that is served, or None."""
        return next((found for found in map(resource.at, versions) if self.has(found)), None)


class Cluster(Protocol):
    """A Kubernetes API. A namespace is needed for kinds that live in one, and is ignored for others."""

    async def get(self, resource: Resource, name: str, *, namespace: str = "", subresource: str = "") -> Object:
        """One object; NotFound."""

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
    ) -> Listing:
        """All objects, page by page, or with a limit one page of them; Expired if a page is asked for too late.

        `labels` and `fields` are selectors as kubectl takes them. `resource_version` "0" lets the server answer from
        its cache, however old that is; empty means the newest.
        """

    def watch(
        self,
        resource: Resource,
        *,
        resource_version: str,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        timeout_s: float = 300.0,
    ) -> AsyncGenerator[Change, None]:
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
        propagation: Propagation = Propagation.BACKGROUND,
        grace_s: int | None = None,
    ) -> None:
        """Delete an object; Conflict if it is not the one of this uid and resource version, where they are given."""

    async def evict(
        self, name: str, *, namespace: str, uid: str = "", grace_s: int | None = None, is_dry: bool = False
    ) -> None:
        """Ask a pod to go as its PodDisruptionBudgets allow, or whether it might; BudgetForbids."""

    async def bind(self, name: str, *, namespace: str, node: str, uid: str = "") -> None:
        """Put a pod onto a node without any check of the room there; Conflict if it is gated or bound."""

    async def discover(self) -> Served:
        """What the server is and which kinds it serves."""

    async def close(self) -> None:
        """Let go of all connections; running calls and watches end with Unreachable."""
