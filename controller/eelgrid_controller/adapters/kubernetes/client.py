"""The port over HTTP: the way from verbs to requests, and from answers to values.

Owns paths, queries and bodies of the verbs. Must not know connections (`exchange.py`), nor
what is in an object beyond its metadata.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from eelgrid_controller.adapters.kubernetes import discovery
from eelgrid_controller.adapters.kubernetes.errors import AnswerUnreadable, error_of
from eelgrid_controller.adapters.kubernetes.exchange import Asked, Bounds, Exchange, object_of
from eelgrid_controller.adapters.kubernetes.kubeconfig import Access
from eelgrid_controller.adapters.kubernetes.port import (
    PAGE,
    Body,
    Change,
    Listing,
    Object,
    PatchKind,
    Propagation,
    Served,
    Told,
)
from eelgrid_controller.adapters.kubernetes.resources import PODS, Resource

__all__ = ["HttpCluster"]

_DEFAULTS = Bounds()
# Of a server that cannot, the whole object will do.
_BRIEF = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"


class HttpCluster:
    """The port `Cluster` over HTTP; made inside a running event loop."""

    def __init__(self, access: Access, *, bounds: Bounds = _DEFAULTS, agent: str = "eelgrid-controller") -> None:
        """`agent` is how the API server's audit log names us."""
        self.exchange = Exchange(access, bounds, agent)

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Let go of all connections."""
        await self.exchange.close()

    async def get(self, resource: Resource, name: str, *, namespace: str = "", subresource: str = "") -> Object:
        """See `Cluster`."""
        return await self.exchange.call(Asked("GET", resource.path(namespace, name, subresource)))

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
        """See `Cluster`."""
        path = resource.path(namespace)
        asked = {"labelSelector": labels, "fieldSelector": fields, "resourceVersion": resource_version}
        items: list[Object] = []
        while True:
            # A page that continues another is of that one's version, which the server keeps in the token.
            query = {**asked, "resourceVersion": "" if after else resource_version, "continue": after}
            query["limit"] = str(limit or PAGE)
            page = await self.exchange.call(Asked("GET", path, query))
            metadata = page.get("metadata") or {}
            items += page.get("items") or ()
            after = metadata.get("continue") or ""
            if not after or limit is not None:
                return Listing(items, str(metadata.get("resourceVersion", "")), after)

    async def watch(
        self,
        resource: Resource,
        *,
        resource_version: str,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        timeout_s: float = 300.0,
    ) -> AsyncGenerator[Change, None]:
        """See `Cluster`."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "labelSelector": labels,
            "fieldSelector": fields,
            "timeoutSeconds": str(max(1, round(timeout_s))),
        }
        asked = Asked("GET", resource.path(namespace), query)
        async with aclosing(self.exchange.lines(asked, timeout_s)) as lines:
            async for line in lines:
                yield _change(line, asked.what)

    async def create(self, resource: Resource, body: Body, *, namespace: str = "") -> Object:
        """See `Cluster`."""
        namespace = namespace or body.get("metadata", {}).get("namespace", "")
        return await self.exchange.call(Asked("POST", resource.path(namespace), body=_typed(resource, body)))

    async def replace(self, resource: Resource, body: Body, *, subresource: str = "") -> Object:
        """See `Cluster`."""
        metadata = body["metadata"]
        path = resource.path(metadata.get("namespace", ""), metadata["name"], subresource)
        return await self.exchange.call(Asked("PUT", path, body=_typed(resource, body)))

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
        """See `Cluster`."""
        query = {"fieldManager": manager}
        if kind is PatchKind.APPLY:
            query["force"] = "true" if is_forced else "false"
            assert isinstance(body, Mapping)
            body = _typed(resource, {**body, "metadata": {**body.get("metadata", {}), "name": name}})
        path = resource.path(namespace, name, subresource)
        accept = _BRIEF if is_brief else "application/json"
        return await self.exchange.call(Asked("PATCH", path, query, body, kind.value, accept))

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
        """See `Cluster`."""
        options = _options(uid, resource_version, grace_s) | {"propagationPolicy": propagation.value}
        await self.exchange.call(Asked("DELETE", resource.path(namespace, name), body=options))

    async def evict(
        self, name: str, *, namespace: str, uid: str = "", grace_s: int | None = None, is_dry: bool = False
    ) -> None:
        """See `Cluster`."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": _options(uid, "", grace_s) | ({"dryRun": ["All"]} if is_dry else {}),
        }
        await self.exchange.call(Asked("POST", PODS.path(namespace, name, "eviction"), body=body))

    async def bind(self, name: str, *, namespace: str, node: str, uid: str = "") -> None:
        """See `Cluster`."""
        metadata = {"name": name, "namespace": namespace} | ({"uid": uid} if uid else {})
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        await self.exchange.call(Asked("POST", PODS.path(namespace, name, "binding"), body=body))

    async def discover(self) -> Served:
        """See `Cluster`."""
        return await discovery.served(lambda path, accept: self.exchange.call(Asked("GET", path, accept=accept)))


def _typed(resource: Resource, body: Body) -> Body:
    """The body with its kind and version, which a list leaves out."""
    return {"apiVersion": resource.api_version, "kind": resource.kind, **body}


def _options(uid: str, resource_version: str, grace_s: int | None) -> dict[str, Any]:
    """DeleteOptions."""
    options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
    preconditions = {"uid": uid, "resourceVersion": resource_version}
    if found := {name: value for name, value in preconditions.items() if value}:
        options["preconditions"] = found
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    return options


def _change(line: bytes, what: str) -> Change:
    """One event of a watch; an ERROR is raised."""
    event = object_of(line, what)
    found = event.get("object")
    if not isinstance(found, dict):
        raise AnswerUnreadable(f"{what}: an event without an object", "see whether the address is an API server's")
    if event.get("type") == "ERROR":
        raise error_of(int(found.get("code") or 500), found, what)
    try:
        return Change(Told(str(event.get("type"))), found)
    except ValueError:
        raise AnswerUnreadable(f"{what}: an event of an unknown type", "use a newer Eelgrid") from None
