"""HTTP: the way from a request to a verb, and from a record to an answer.

Owns paths, tokens, content types and what troubles a test put into force. Must not know rules.
"""

import asyncio
import contextlib

import msgspec
from aiohttp import web

from tests.fakes.kubernetes import reading
from tests.fakes.kubernetes.faults import Fault, bad_request, no_such_path, unauthorized, unsupported_media
from tests.fakes.kubernetes.store import encode

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_AGGREGATED = "as=APIGroupDiscoveryList"
_PARTS_THAT_ARE_MADE = {"binding", "eviction"}


class Target:
    """What a path names."""

    def __init__(self, api, path):
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            self.group, (self.version, *rest) = "", parts[1:]
        else:
            self.group, self.version, *rest = parts[1:]
        self.namespace = ""
        if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in {"status", "finalize"}:
            self.namespace, rest = rest[1], rest[2:]
        self.kind = api.catalogue.find(self.group, self.version, rest[0])
        self.name = rest[1] if len(rest) > 1 else ""
        self.part = rest[2] if len(rest) > 2 else ""
        if self.kind is None or len(rest) > 3:
            raise no_such_path()
        if self.part and self.part not in self.kind.parts and not (self.part == "status" and self.kind.has_status):
            raise no_such_path()
        if self.kind.is_namespaced and self.name and not self.namespace:
            raise no_such_path()

    @property
    def head(self):
        """What stands before an object's own bytes."""
        api_version = self.kind.api_version(self.version)
        return f'{{"kind":"{self.kind.kind}","apiVersion":"{api_version}",'.encode()


class Server:
    """Answers requests; what is stored is the api's."""

    def __init__(self, api, knobs):
        self.api = api
        self.knobs = knobs
        self.requests = []  # (verb, path) in the order in which they came
        self.watches = set()  # transports of watches that run

    async def handle(self, request):
        """Any request."""
        path = request.path
        troubles = ()
        try:
            body = await request.read()
            token = self._token(request)
            verb = self._verb(request)
            self.requests.append((verb, path))
            troubles = self.knobs.meet(verb, path)
            for trouble in troubles:
                await self._befall(trouble, request)
            answer = await self._answer(request, verb, token, body)
        except Fault as fault:
            answer = _json(fault.status, fault.code, fault.headers)
        for trouble in troubles:
            if trouble.what == "lose":
                _abort(request)
            if trouble.what == "late":
                await asyncio.sleep(trouble.delay_s)
        return answer

    @staticmethod
    async def _befall(trouble, request):
        match trouble.what:
            case "slow":
                await asyncio.sleep(trouble.delay_s)
            case "refuse":
                raise trouble.fault()
            case "hang":
                await asyncio.sleep(3600.0)
            case "cut":
                _abort(request)

    def _token(self, request):
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self.api.access.users:
            raise unauthorized()
        return token

    def _verb(self, request):
        if request.method != "GET":
            return _VERBS[request.method]
        if request.query.get("watch") in {"1", "true"}:
            return "watch"
        path = request.path.rstrip("/")
        return "get" if _is_discovery(path) or Target(self.api, path).name else "list"

    async def _answer(self, request, verb, token, body):
        path = request.path.rstrip("/")
        if path == "/version":
            return _json(self.api.catalogue.version())
        if path in {"/healthz", "/readyz", "/livez"}:
            return web.Response(text="ok")
        if _is_discovery(path):
            return self._discovery(request, path)
        target = Target(self.api, path)
        self.api.access.check(token, verb, target.kind, target.part, target.namespace, target.name)
        match verb:
            case "get":
                record = self.api.get(target.kind, target.namespace, target.name)
                return _scale(record) if target.part == "scale" else _one(target, record)
            case "list":
                return reading.listed(self.api, target, request.query)
            case "watch":
                return await reading.Watch(self, request, target).run()
        return self._written(target, verb, request, token, _parsed(body))

    def _discovery(self, request, path):
        if path in {"/api", "/apis"} and self.knobs.aggregated and _AGGREGATED in request.headers.get("Accept", ""):
            return _json(self.api.catalogue.aggregated(path == "/api"))
        told = self.api.catalogue.plain(path)
        if told is None:
            raise no_such_path()
        return _json(told)

    def _written(self, target, verb, request, token, body):
        kind, namespace, name, part = target.kind, target.namespace, target.name, target.part
        manager = request.query.get("fieldManager") or "unknown"
        match verb:
            case "create" if part == "binding":
                self.api.bind(kind, namespace, name, body)
                return _json(
                    {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}, 201
                )
            case "create" if part == "eviction":
                self.api.evict(kind, namespace, name, body)
                return _json(
                    {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}, 201
                )
            case "create" if not name:
                if not isinstance(body, dict):
                    raise bad_request("the body is no object")
                return _one(target, self.api.create(kind, namespace, body), 201)
            case "update" if name and part not in _PARTS_THAT_ARE_MADE:
                record = self.api.replace(kind, namespace, name, part, body, token, manager)
            case "patch" if name and part not in _PARTS_THAT_ARE_MADE:
                of = request.headers.get("Content-Type", "").partition(";")[0]
                is_forced = request.query.get("force") == "true"
                record = self.api.patch(kind, namespace, name, part, body, of, token, manager, is_forced)
            case "delete" if name and not part:
                record = self.api.delete(kind, namespace, name, body)
            case _:
                raise Fault(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        return _scale(record) if part == "scale" else _one(target, record)


def _is_discovery(path):
    return not path.startswith(("/api", "/apis")) or path.count("/") < (3 if path.startswith("/api/") else 4)


def _parsed(body):
    if not body:
        return None
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        raise unsupported_media("the body is no JSON") from None


def _json(told, code=200, headers=None):
    return web.Response(body=encode(told), status=code, headers=headers, content_type="application/json")


def _one(target, record, code=200):
    return web.Response(body=target.head + record.text[1:], status=code, content_type="application/json")


def _scale(record):
    its, found = record.object["metadata"], record.object
    metadata = {key: its[key] for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")}
    spec = {"replicas": found["spec"].get("replicas", 1)}
    status = {"replicas": (found.get("status") or {}).get("replicas", 0)}
    return _json(
        {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status}
    )


def _abort(request):
    """Cut the connection: no answer, nor the end of one."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError


@contextlib.asynccontextmanager
async def listening(server, port, host="127.0.0.1"):
    """The server on a port of its own; gives the port."""
    runner = web.ServerRunner(
        web.Server(server.handle, handler_cancellation=True), handle_signals=False, shutdown_timeout=0.1
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port, reuse_address=True)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        for transport in list(server.watches):
            transport.abort()
        await runner.cleanup()
