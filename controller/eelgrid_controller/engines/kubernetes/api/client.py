"""HTTP client of the Kubernetes API: implements the port.

Translates verbs to requests, discovers served resources, and keeps one bounded pool of connections.
"""

import asyncio
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import msgspec
from yarl import URL

from eelgrid_controller.engines.kubernetes.api.errors import (
    AnswerUnreadable,
    ClusterError,
    ClusterUnreachable,
    ObjectNotFound,
    ServerFault,
    error_of,
)
from eelgrid_controller.engines.kubernetes.api.kubeconfig import ClusterAccess, ClusterCredentials
from eelgrid_controller.engines.kubernetes.api.port import (
    PAGE_SIZE,
    PODS,
    Body,
    Object,
    ObjectList,
    PatchKind,
    PropagationPolicy,
    Resource,
    ServedResources,
    WatchEvent,
    WatchEventType,
)

_JSON = "application/json"
_AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_GROUPS_MOST = 500


async def discover_resources(get: Callable[[str, str], Awaitable[dict[str, Any]]]) -> ServedResources:
    """Discover the kinds that a server offers; `get` takes a path and an Accept header."""
    accept = f"{_AGGREGATED},{_JSON}"
    version, core, groups = await asyncio.gather(get("/version", _JSON), get("/api", accept), get("/apis", accept))
    found: set[tuple[str, str, str]] = set()
    asked: list[tuple[str, str, str]] = []
    for told in (core, groups):
        if told.get("kind") == "APIGroupDiscoveryList":
            found.update(_aggregated_resources(told))
        elif told.get("kind") == "APIVersions":
            asked += [("", one, f"/api/{one}") for one in told.get("versions") or ()]
        else:
            for group in (told.get("groups") or ())[:_GROUPS_MOST]:
                name = group["name"]
                asked += [(name, one["version"], f"/apis/{name}/{one['version']}") for one in group["versions"]]
    for group, one, path in asked:
        try:
            listed = await get(path, _JSON)
        except (ObjectNotFound, ServerFault):
            continue
        found.update((group, one, kind["name"]) for kind in listed.get("resources") or ())
    return ServedResources(_number(version, "major"), _number(version, "minor"), frozenset(found))


def _aggregated_resources(told: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for group in (told.get("items") or ())[:_GROUPS_MOST]:
        name = group["metadata"].get("name", "")
        for version in group.get("versions") or ():
            for resource in version.get("resources") or ():
                plural = resource["resource"]
                yield name, version["version"], plural
                for part in resource.get("subresources") or ():
                    yield name, version["version"], f"{plural}/{part['subresource']}"


def _number(version: Mapping[str, Any], part: str) -> int:
    """A part of the version; some vendors write the minor as `29+`."""
    digits = re.match(r"\d+", str(version.get(part, "")))
    if digits is None:
        raise AnswerUnreadable(f"/version has no {part}", "see whether the address is an API server's")
    return int(digits[0])


_NOTHING: Mapping[str, str] = {}
_GRACE_S = 15.0  # for a watch to be ended by its server after the time that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of time and size of calls."""

    request_s: float = 10.0  # whole, from its turn to the last byte; a page of 500 pods needs 0.1 s
    connect_s: float = 3.0
    at_once: int = 32
    watches: int = 64
    answer_bytes: int = 64 * 1024 * 1024
    event_bytes: int = 8 * 1024 * 1024  # etcd's limit is 1.5 MB for an object
    pause_s: float = 0.02  # between two looks at a watch


class ApiRequest(NamedTuple):
    """A request; empty values of the query are left out."""

    method: str
    path: str
    query: Mapping[str, str] = _NOTHING
    body: Body | Sequence[Body] | None = None
    content_type: str = _JSON
    accept: str = _JSON

    @property
    def description(self) -> str:
        """The request in messages."""
        return f"{'watch' if 'watch' in self.query else self.method.lower()} {self.path}"


class HttpTransport:
    """Asks one API server; made inside a running event loop."""

    def __init__(self, access: ClusterAccess, bounds: RequestLimits, agent: str) -> None:
        """`agent` is how the API server's audit log names us."""
        self.bounds = bounds
        self.requests = 0  # since the start
        self._server = access.server
        self._server_name = access.server_name
        self._credentials = ClusterCredentials(access, monotonic_s=time.monotonic, now_s=time.time)
        self._turns = asyncio.Semaphore(bounds.at_once)
        self._watches = asyncio.Semaphore(bounds.watches)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=bounds.connect_s)
        self._session = aiohttp.ClientSession(
            # Turns bound the connections.
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket, keepalive_timeout=60.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": agent, "Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Let go of all connections."""
        await self._session.close()

    async def call(self, asked: ApiRequest) -> dict[str, Any]:
        """Send a request and return the JSON object of its answer; raises the ClusterError that the answer is."""
        try:
            async with self._turns, asyncio.timeout(self.bounds.request_s), await self._send_request(asked) as answer:
                told = await self._bytes(answer, asked)
                if answer.status >= 400:
                    raise _cluster_error(answer, told, asked)
        except TimeoutError as error:
            raise _unreachable(error, asked) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(error, asked) from None
        return parse_object(told, asked.description)

    async def stream_lines(self, asked: ApiRequest, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """The lines of an answer as they come, until the server ends it, or a little after the timeout."""
        clock = asyncio.get_running_loop()
        until_s = clock.time() + timeout_s + _GRACE_S
        try:
            async with self._watches:
                async with asyncio.timeout(self.bounds.request_s):
                    answer = await self._send_request(asked)
                try:
                    if answer.status >= 400:
                        raise _cluster_error(answer, await self._bytes(answer, asked), asked)
                    rest = b""
                    while True:
                        # The time limit stands around each read and never around the caller, who runs at `yield`.
                        async with asyncio.timeout_at(until_s):
                            piece = await answer.content.readany()
                        if not piece:  # a line that breaks off at the end is dropped
                            return
                        *whole, rest = (rest + piece).split(b"\n")
                        for line in whole:
                            if line:
                                yield line
                        if len(rest) > self.bounds.event_bytes:
                            raise _too_large(asked, self.bounds.event_bytes)
                        await self._pause(answer)
                finally:
                    answer.close()
        except TimeoutError as error:
            if clock.time() < until_s:
                raise _unreachable(error, asked) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(error, asked) from None

    async def _send_request(self, asked: ApiRequest) -> aiohttp.ClientResponse:
        """The head of an answer, its body unread; refused credentials are renewed once."""
        if self._session.closed:
            raise ClusterUnreachable(f"{asked.description}: the client is closed", is_sent=False)
        data = None if asked.body is None else msgspec.json.encode(asked.body)
        url = URL(self._server + asked.path, encoded=True)
        if query := {name: value for name, value in asked.query.items() if value}:
            url = url.with_query(query)
        for attempt in (1, 2):
            headers, tls = await self._credentials.current()
            headers["Accept"] = asked.accept
            if data is not None:
                headers["Content-Type"] = asked.content_type
            self.requests += 1
            answer = await self._session.request(
                asked.method,
                url,
                data=data,
                headers=headers,
                ssl=True if tls is None else tls,
                server_hostname=self._server_name,
                allow_redirects=False,
                timeout=self._timeout,
            )
            if answer.status != 401 or attempt == 2 or not self._credentials.renew():
                break
            answer.release()
        return answer

    async def _pause(self, answer: aiohttp.ClientResponse) -> None:
        """Leave what comes to the kernel for a moment."""
        transport = None if answer.connection is None else answer.connection.transport
        if transport is None or transport.is_closing():  # all of it has come
            return
        transport.pause_reading()
        await asyncio.sleep(self.bounds.pause_s)
        if not transport.is_closing():
            transport.resume_reading()

    async def _bytes(self, answer: aiohttp.ClientResponse, asked: ApiRequest) -> bytes:
        """The body of an answer, in bounds."""
        most = self.bounds.answer_bytes
        pieces, size = [], 0
        async for piece in answer.content.iter_any():
            size += len(piece)
            if size > most:
                answer.close()
                raise _too_large(asked, most)
            pieces.append(piece)
        return b"".join(pieces)


def _socket(info: Any) -> socket.socket:
    """A socket that finds out within half a minute that its other end has gone."""
    made = socket.socket(info[0], info[1], info[2])
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:  # not everywhere
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def parse_object(told: bytes, what: str) -> dict[str, Any]:
    """The JSON object that these bytes are; AnswerUnreadable."""
    try:
        found = msgspec.json.decode(told)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        raise AnswerUnreadable(f"{what}: the answer is no JSON object", "see whether the address is an API server's")
    return found


def _unreachable(error: Exception, asked: ApiRequest) -> ClusterUnreachable:
    """No answer; it was certainly not sent where there was no connection."""
    why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    is_sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return ClusterUnreachable(f"{asked.description}: {why}", is_sent=is_sent)


def _cluster_error(answer: aiohttp.ClientResponse, told: bytes, asked: ApiRequest) -> ClusterError:
    """The error that an answer is; its body need not be a Status."""
    try:
        status = parse_object(told, asked.description)
    except AnswerUnreadable:
        status = {}
    return error_of(answer.status, status, asked.description, answer.headers.get("Retry-After"))


def _too_large(asked: ApiRequest, most: int) -> AnswerUnreadable:
    return AnswerUnreadable(
        f"{asked.description}: over {most} bytes", "ask for fewer objects with a limit or a selector"
    )


_DEFAULTS = RequestLimits()
# Of a server that cannot, the whole object will do.
_BRIEF = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"


class HttpClusterClient:
    """The port `Cluster` over HTTP; made inside a running event loop."""

    def __init__(
        self, access: ClusterAccess, *, bounds: RequestLimits = _DEFAULTS, agent: str = "eelgrid-controller"
    ) -> None:
        """`agent` is how the API server's audit log names us."""
        self.exchange = HttpTransport(access, bounds, agent)

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Let go of all connections."""
        await self.exchange.close()

    async def get(self, resource: Resource, name: str, *, namespace: str = "", subresource: str = "") -> Object:
        """See `ClusterClient`."""
        return await self.exchange.call(ApiRequest("GET", resource.path(namespace, name, subresource)))

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
        """See `ClusterClient`."""
        path = resource.path(namespace)
        asked = {"labelSelector": labels, "fieldSelector": fields, "resourceVersion": resource_version}
        items: list[Object] = []
        while True:
            # A page that continues another is of that one's version, which the server keeps in the token.
            query = {**asked, "resourceVersion": "" if after else resource_version, "continue": after}
            query["limit"] = str(limit or PAGE_SIZE)
            page = await self.exchange.call(ApiRequest("GET", path, query))
            metadata = page.get("metadata") or {}
            items += page.get("items") or ()
            after = metadata.get("continue") or ""
            if not after or limit is not None:
                return ObjectList(items, str(metadata.get("resourceVersion", "")), after)

    async def watch_changes(
        self,
        resource: Resource,
        *,
        resource_version: str,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        timeout_s: float = 300.0,
    ) -> AsyncGenerator[WatchEvent, None]:
        """See `ClusterClient`."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "labelSelector": labels,
            "fieldSelector": fields,
            "timeoutSeconds": str(max(1, round(timeout_s))),
        }
        asked = ApiRequest("GET", resource.path(namespace), query)
        async with aclosing(self.exchange.stream_lines(asked, timeout_s)) as lines:
            async for line in lines:
                yield _change(line, asked.description)

    async def create(self, resource: Resource, body: Body, *, namespace: str = "") -> Object:
        """See `ClusterClient`."""
        namespace = namespace or body.get("metadata", {}).get("namespace", "")
        return await self.exchange.call(ApiRequest("POST", resource.path(namespace), body=_with_type(resource, body)))

    async def replace(self, resource: Resource, body: Body, *, subresource: str = "") -> Object:
        """See `ClusterClient`."""
        metadata = body["metadata"]
        path = resource.path(metadata.get("namespace", ""), metadata["name"], subresource)
        return await self.exchange.call(ApiRequest("PUT", path, body=_with_type(resource, body)))

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
        """See `ClusterClient`."""
        query = {"fieldManager": manager}
        if kind is PatchKind.APPLY:
            query["force"] = "true" if is_forced else "false"
            assert isinstance(body, Mapping)
            body = _with_type(resource, {**body, "metadata": {**body.get("metadata", {}), "name": name}})
        path = resource.path(namespace, name, subresource)
        accept = _BRIEF if is_brief else "application/json"
        return await self.exchange.call(ApiRequest("PATCH", path, query, body, kind.value, accept))

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
        """See `ClusterClient`."""
        options = _options(uid, resource_version, grace_s) | {"propagationPolicy": propagation.value}
        await self.exchange.call(ApiRequest("DELETE", resource.path(namespace, name), body=options))

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
        """See `ClusterClient`."""
        head = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": resource_version}
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {**head, "annotations": dict(annotations)},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node_name},
        }
        await self.exchange.call(ApiRequest("POST", PODS.path(namespace, name, "binding"), body=body))

    async def evict(
        self, name: str, *, namespace: str, uid: str = "", grace_s: int | None = None, is_dry: bool = False
    ) -> None:
        """See `ClusterClient`."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": _options(uid, "", grace_s) | ({"dryRun": ["All"]} if is_dry else {}),
        }
        await self.exchange.call(ApiRequest("POST", PODS.path(namespace, name, "eviction"), body=body))

    async def discover(self) -> ServedResources:
        """See `ClusterClient`."""
        return await discover_resources(lambda path, accept: self.exchange.call(ApiRequest("GET", path, accept=accept)))


def _with_type(resource: Resource, body: Body) -> Body:
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


def _change(line: bytes, what: str) -> WatchEvent:
    """One event of a watch; an ERROR is raised."""
    event = parse_object(line, what)
    found = event.get("object")
    if not isinstance(found, dict):
        raise AnswerUnreadable(f"{what}: an event without an object", "see whether the address is an API server's")
    if event.get("type") == "ERROR":
        raise error_of(int(found.get("code") or 500), found, what)
    try:
        return WatchEvent(WatchEventType(str(event.get("type"))), found)
    except ValueError:
        raise AnswerUnreadable(f"{what}: an event of an unknown type", "use a newer Eelgrid") from None
