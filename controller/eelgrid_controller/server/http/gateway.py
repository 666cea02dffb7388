"""The HTTP API: operators' calls that change nothing as JSON over HTTP, for programs without gRPC.

Each request becomes a call of the handlers that gRPC has, with their roles, audit, limits and rules, and its answer
becomes JSON; `transcoding` knows how. Errors are `google.rpc.Status` in JSON, with the HTTP status that gRPC's mapping
gives. Must not know what a call means. Streams are left to gRPC.
"""

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn
from urllib.parse import quote

import grpc
from aiohttp import web

from eelgrid_controller.server.http.application import EndpointSettings, HttpEndpoint, check_exposure
from eelgrid_controller.server.http.live_server import TlsContexts, build_tls_contexts, supervise_connections
from eelgrid_controller.server.http.openapi import OPENAPI_PATH, build_openapi
from eelgrid_controller.server.http.transcoding import (
    HttpBinding,
    answer_json,
    encode_request,
    encode_status,
    find_bindings,
    read_bindings,
    service_descriptor,
    status_json,
)
from eelgrid_protos import __version__
from eelgrid_protos.certificate import PEM_PROPERTY
from eelgrid_protos.faults import DETAILS_KEY, Fault
from eelgrid_protos.rpc import OPERATOR_SERVICE, REQUEST_BYTES_MOST, Context, abort_call
from eelgrid_protos.sockets import names_loopback
from eelgrid_protos.transport import TlsFiles

# A unary call of gRPC: the encoded request and the call's context to the encoded answer.
UnaryCall = Callable[[bytes, Context], Awaitable[bytes]]

# As google/rpc/code.proto maps them.
HTTP_STATUS: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DATA_LOSS: 500,
}
# From the request's head to the answer; a search for moves takes 12 s at a thousand nodes.
_ANSWER_WITHIN_S = 30.0
# Of an answer in protobuf; its JSON is four to five times as long and takes 0.5 s of a processor per megabyte (measured).
_ANSWER_BYTES_MOST = 4 * 1024 * 1024
# JSON is made in threads, whose work takes the interpreter from the event loop in turns.
_CONVERSIONS_AT_ONCE_MOST = 2
# Of what a client wrote, in an error.
_SHOWN_MOST = 200
_SUPERVISED_AS = "http_api"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
_SETTINGS = EndpointSettings(
    flag="--http-api",
    name="the HTTP API",
    example="127.0.0.1:8444",
    # Each path has its own.
    methods=None,
    body_bytes_most=REQUEST_BYTES_MOST,
    first_request_s=10.0,
    silent_connections_most=128,
    keepalive_s=75.0,
    requests_at_once_most=64,
    send_s=30.0,
    exposed_remedy="listen on loopback, give certificates, or say --insecure",
)


class CallAborted(Exception):
    """A handler ended its call with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, status: bytes) -> None:
        super().__init__(code.name)
        self.code = code
        # An encoded google.rpc.Status.
        self.status = status


class HttpCallContext:
    """What handlers of gRPC read of a call: who makes it and how it ended, for one that came by HTTP."""

    def __init__(self, request: web.Request) -> None:
        self._code: grpc.StatusCode | None = None
        secured = request.get_extra_info("ssl_object")
        der: bytes | None = None if secured is None else secured.getpeercert(binary_form=True)
        self._identity = {} if der is None else {PEM_PROPERTY: (ssl.DER_cert_to_PEM_cert(der).encode(),)}
        host, port, *_ = request.get_extra_info("peername") or ("", 0)
        self._peer = f"ipv6:{quote(f'[{host}]', safe='')}:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def peer(self) -> str:
        """The client's address, as gRPC writes it."""
        return self._peer

    def auth_context(self) -> Mapping[str, tuple[bytes, ...]]:
        """The client's certificate, if it has one."""
        return self._identity

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Nothing: headers of HTTP are not metadata."""
        return ()

    def code(self) -> grpc.StatusCode | None:
        """The status that ended the call; None for OK."""
        return self._code

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        """Ends the call; raises CallAborted."""
        self._code = code
        raise CallAborted(code, dict(trailing_metadata).get(DETAILS_KEY) or encode_status(code, details))


class HttpGateway:
    """Serves the annotated calls of OperatorService; `find_call` returns the handler of a call by its path in gRPC."""

    def __init__(
        self,
        find_call: Callable[[str], UnaryCall],
        *,
        tls: TlsFiles | None,
        insecure: bool,
        now_ns: Callable[[], int],
        log: logging.Logger,
        answer_within_s: float = _ANSWER_WITHIN_S,
        answer_bytes_most: int = _ANSWER_BYTES_MOST,
    ) -> None:
        self._find_call = find_call
        self._tls = tls
        self._insecure = insecure
        self._now_ns = now_ns
        self._log = log
        self._answer_within_s = answer_within_s
        self._answer_bytes_most = answer_bytes_most
        self._bindings = read_bindings(service_descriptor(OPERATOR_SERVICE.name))
        self._converting = asyncio.Semaphore(_CONVERSIONS_AT_ONCE_MOST)
        self._openapi = b""
        self._endpoint: HttpEndpoint | None = None
        self._supervising: asyncio.Task[None] | None = None

    async def start(self, address: str) -> int:
        """Listens and returns the port; raises ControllerConfigError."""
        contexts: TlsContexts | None = None
        only_local = False
        if self._tls is None:
            only_local = check_exposure(_SETTINGS, address, insecure=self._insecure, log=self._log)
        else:
            contexts = build_tls_contexts(self._tls, self._log, name=_SUPERVISED_AS)
        self._endpoint = HttpEndpoint(
            _SETTINGS,
            (),
            # With TLS the certificate says that the name is ours.
            allows_host=names_loopback if only_local else None,
            host_refusal="ask by the address of this machine, such as 127.0.0.1",
            refuse=_refuse,
            middleware=self._serve,
            headers=_HEADERS,
        )
        port = await self._endpoint.start(address, None if contexts is None else contexts.listening)
        self._supervising = asyncio.create_task(
            supervise_connections(
                self._endpoint.server,
                contexts,
                now_s=lambda: self._now_ns() / 1e9,
                log=self._log,
                name=_SUPERVISED_AS,
            )
        )
        return port

    async def stop(self) -> None:
        """Closes the listening socket and connections."""
        if self._supervising is not None:
            self._supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervising
        if self._endpoint is not None:
            await self._endpoint.stop()

    @web.middleware
    async def _serve(self, request: web.Request, handler: Any) -> web.Response:  # noqa: ARG002  # aiohttp names it
        """Answers every request; paths are matched here, because only the quoted path tells a slash in an id."""
        path, _, query = request.raw_path.partition("?")
        if path == OPENAPI_PATH:
            return self._send_openapi() if request.method == "GET" else _refuse_method(path, ["GET"])
        found = find_bindings(self._bindings, path)
        if not found:
            words = f"no call has the path {path[:_SHOWN_MOST]}; GET {OPENAPI_PATH} lists all paths"
            return _send_error(grpc.StatusCode.NOT_FOUND, words)
        if request.method not in found:
            return _refuse_method(path, sorted(found))
        binding, variables = found[request.method]
        try:
            async with asyncio.timeout(self._answer_within_s):
                return _send_json(200, await self._call(binding, variables, query, request))
        except TimeoutError:
            words = f"{binding.method.name} took over {self._answer_within_s:g} s; ask for less, or use gRPC"
            return _send_error(grpc.StatusCode.DEADLINE_EXCEEDED, words)
        except web.HTTPRequestEntityTooLarge:
            words = f"the body is longer than {REQUEST_BYTES_MOST} bytes; ask for less, or use gRPC"
            return _send_error(grpc.StatusCode.RESOURCE_EXHAUSTED, words, http_status=413)
        except CallAborted as ended:
            return _send_json(HTTP_STATUS.get(ended.code, 500), status_json(ended.status))
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001  # every failure becomes a status
            self._log.exception("call=%s fault=internal", binding.method.name)
            return _send_error(grpc.StatusCode.INTERNAL, "a fault in the server; its log has the details")

    async def _call(
        self, binding: HttpBinding, variables: Mapping[str, str], query: str, request: web.Request
    ) -> bytes:
        """Makes a call; raises CallAborted, and what reading the body raises."""
        method = binding.method
        context: Any = HttpCallContext(request)
        body = await _read_body(binding, request, context)
        call = self._find_call(f"/{method.containing_service.full_name}/{method.name}")
        try:
            data = await self._convert(encode_request, binding, variables, query, body)
        except Fault as fault:
            await abort_call(context, fault, method.name)
        answer = await call(data, context)
        if len(answer) > self._answer_bytes_most:
            words = f"the answer has {len(answer)} bytes, over {self._answer_bytes_most}; give a page_size or filters, or use gRPC"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        return await self._convert(answer_json, method, answer)

    async def _convert(self, convert: Callable[..., bytes], *arguments: object) -> bytes:
        async with self._converting:
            return await asyncio.to_thread(convert, *arguments)

    def _send_openapi(self) -> web.Response:
        if not self._openapi:
            self._openapi = json.dumps(build_openapi(self._bindings, version=__version__), indent=1).encode() + b"\n"
        return _send_json(200, self._openapi)


async def _read_body(binding: HttpBinding, request: web.Request, context: HttpCallContext) -> bytes:
    """Reads the body of a call that has one; raises CallAborted unless it is JSON."""
    if not binding.has_body:
        return b""
    # Pages of other sites may send any other type without asking.
    if request.content_type != "application/json":
        words = f"the body is of the type {request.content_type[:_SHOWN_MOST]}; send Content-Type: application/json"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, words)
    return await request.read()


def _refuse_method(path: str, allowed: list[str]) -> web.Response:
    words = f"{path[:_SHOWN_MOST]} takes {' and '.join(allowed)} only"
    response = _send_error(grpc.StatusCode.UNIMPLEMENTED, words, http_status=405)
    response.headers["Allow"] = ", ".join(allowed)
    return response


def _refuse(http_status: int, words: str) -> web.Response:
    """Answers a request that the endpoint refuses."""
    code = grpc.StatusCode.UNAVAILABLE if http_status == 503 else grpc.StatusCode.INVALID_ARGUMENT
    return _send_error(code, words, http_status=http_status)


def _send_error(code: grpc.StatusCode, words: str, *, http_status: int | None = None) -> web.Response:
    return _send_json(http_status or HTTP_STATUS[code], status_json(encode_status(code, words)))


def _send_json(http_status: int, body: bytes) -> web.Response:
    return web.Response(status=http_status, body=body, content_type="application/json", charset="utf-8")
