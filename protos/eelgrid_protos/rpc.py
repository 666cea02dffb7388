"""RPC: the table of every method, and the server handlers and clients made from it.

Owns how messages enter and leave gRPC: handlers receive bytes and decode them here, so that a message that breaks the
contract is answered with INVALID_ARGUMENT and its field violations, and never reaches the implementation. Before
that, `admit` may refuse the call, for every call alike. An answer of ours that breaks the contract is sent without
the elements that do, and they are counted: one bad element never costs the others. Must not know what a call means,
nor who may call it. There are no generated stubs: a service is data.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from eelgrid_protos import codec, messages, stale_reads
from eelgrid_protos.errors import ContractError, Violation
from eelgrid_protos.faults import (
    DETAILS_KEY,
    Fault,
    Internal,
    ResourceExhausted,
    fault_from,
    fault_of_contract,
    status_details,
)
from eelgrid_protos.schema import omit_broken
from eelgrid_protos.stale_reads import Staleness, parse_staleness
from eelgrid_protos.values import dataclass

# The stubs' ServicerContext is generic over messages, which are bytes here.
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
# Called before a call's first message is read, with the call's path; raises the Fault that the caller gets.
Admit: TypeAlias = Callable[[str, Context], None]
# Called when elements were left out of an answer: the call's name, how many, and the first reasons.
Omitted: TypeAlias = Callable[[str, int, tuple[Violation, ...]], None]
# Called when a call has ended, before its answer is sent: its path, its request if it was read, and the fault if any.
Settled: TypeAlias = Callable[[str, Context, object | None, BaseException | None], Awaitable[None]]
# Called with how stale an answer is, None for one of the leader; whoever passes it allows a follower to answer.
OnStaleness: TypeAlias = Callable[[Staleness | None], None]


_LOG = logging.getLogger("eelgrid.rpc")
_FIRST_WITHIN_S = 2.0
# Bound of a request, unless its call needs more. The longest spec that its rules allow has some 100 kB; a what-if that
# drains 10,000 nodes by names of 60 characters 620 kB.
REQUEST_BYTES_MOST = 1024 * 1024
CONNECT_BYTES_MOST = 4 * 1024 * 1024
_REQUEST_BYTES_MOST: Mapping[str, int] = {
    # 100,000 budgets at 40 bytes each.
    "UpdatePolicy": 8 * 1024 * 1024,
    "ImagineBudgets": 8 * 1024 * 1024,
    # One message of an agent: a minute's ticks of 64 GPUs in 448 slices with every reading are 2.2 MB.
    "Connect": CONNECT_BYTES_MOST,
    # A frame of telemetry, or agents' messages.
    "Forward": 8 * 1024 * 1024,
    # A jobspec or R of Flux: characters of at most four bytes.
    "ScheduleFlux": 4 * 1024 * 1024,
    "AdviseFlux": 4 * 1024 * 1024,
}


@dataclass(frozen=True, slots=True)
class RpcMethod:
    """One method of a service."""

    name: str
    request_streaming: bool = False
    response_streaming: bool = False
    # Of each message that the client sends; checked on both sides, before it is parsed.
    request_bytes_most: int = REQUEST_BYTES_MOST

    @property
    def request(self) -> type:
        """The class of each message that the client sends."""
        return cast("type", getattr(messages, f"{self.name}Request"))

    @property
    def response(self) -> type:
        """The class of each message that the server sends."""
        return cast("type", getattr(messages, f"{self.name}Response"))

    @property
    def attribute(self) -> str:
        """The method's name in Python: get_summary for GetSummary."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()

    @property
    def may_be_stale(self) -> bool:
        """Whether a follower answers it, if the caller allows that."""
        return self.name in stale_reads.CALLS


@dataclass(frozen=True, slots=True)
class RpcService:
    """A service and its methods."""

    name: str
    methods: tuple[RpcMethod, ...]

    def path(self, method: RpcMethod) -> str:
        """Returns the path of a method in gRPC."""
        return f"/{self.name}/{method.name}"


def _service(name: str, unary: str, streams: Mapping[str, tuple[bool, bool]] | None = None) -> RpcService:
    kinds = dict.fromkeys(unary.split(), (False, False)) | dict(streams or {})
    return RpcService(
        f"eelgrid.v1.{name}",
        tuple(
            RpcMethod(call, *kind, request_bytes_most=_REQUEST_BYTES_MOST.get(call, REQUEST_BYTES_MOST))
            for call, kind in kinds.items()
        ),
    )


AGENT_SERVICE = _service("AgentService", "", {"Connect": (True, True)})
INGEST_SERVICE = _service("IngestService", "", {"Forward": (True, True)})
NODE_SERVICE = _service("NodeService", "GetInventory GetSamples GetNodePlan GetNodeEnergy")
FLUX_SERVICE = _service("FluxService", "AdviseFlux ListFluxSpans", {"ScheduleFlux": (True, True)})
FEDERATION_SERVICE = _service("FederationService", "ListClusters GetDispatch")
OPERATOR_SERVICE = _service(
    "OperatorService",
    "WhoAmI GetSummary GetOverview ListNodes ListGpus SubmitWorkload GetWorkload ListWorkloads CancelWorkload "
    "ExplainWorkload ListPlans GetPolicy UpdatePolicy ListInterference ListQueues MoveToQueue HoldWorkload ReleaseWorkload RequeueWorkload WhatIf PlanCapacity StartShadow "
    "GetShadow StopShadow RecommendMoves ApplyMoves ScaleWorkload RecordPoints ListPoints ReportProgress ListPromises "
    "ImagineBudgets RecommendPartitions ApplyPartitions ListPartitions QueryEnergy ListSpending "
    "QueryEnergyReport ConfirmEnergyExport ListEnergyExporters RemoveEnergyExporter "
    "ReconcileNode RemoveNode CordonNode UncordonNode DrainNode ListAuditEntries",
    {
        "WatchSummary": (False, True),
        "WatchWorkloads": (False, True),
        "ReadLogs": (False, True),
        "Attach": (True, True),
        "ExportDecision": (False, True),
    },
)


def request_bytes_most() -> int:
    """Returns the bound of the longest request of any method: a server need not receive anything longer."""
    services = (AGENT_SERVICE, INGEST_SERVICE, NODE_SERVICE, OPERATOR_SERVICE, FLUX_SERVICE, FEDERATION_SERVICE)
    return max(method.request_bytes_most for service in services for method in service.methods)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message that is encoded already: a listing encodes its elements while it counts their bytes.

    `omitted` elements were left out of it; `reasons` are the first of their violations.
    """

    data: bytes
    omitted: int = 0
    reasons: tuple[Violation, ...] = ()


def note_omitted(method: str, count: int, reasons: tuple[Violation, ...]) -> None:
    """Logs omitted elements of an answer; busy servers pass `build_handler` a rate-limited function instead."""
    _LOG.error("call=%s omitted=%d reason=%r", method, count, str(reasons[0]) if reasons else "")


async def abort_call(context: Context, error: Exception, method: str) -> None:
    """Aborts a call with the status of the fault that an error represents; always raises."""
    if isinstance(error, ContractError):
        fault: Fault = fault_of_contract(error)
    elif isinstance(error, Fault):
        fault = error
    else:
        _LOG.exception("call=%s fault=internal", method)
        fault = Internal("a fault in the server; its log has the details")
    await context.abort(fault.code, fault.message, ((DETAILS_KEY, status_details(fault)),))


def _encode_answer(message: Any, method: str, omitted: Omitted) -> bytes:
    """Encodes an answer without those of its elements that break the contract; raises if nothing of it remains."""
    if isinstance(message, Encoded):
        if message.omitted:
            omitted(method, message.omitted, message.reasons)
        return message.data
    try:
        data = codec.encode_message(message)
    except ContractError as error:
        # A bug of the server, not of the caller.
        salvaged = omit_broken(message)
        omitted(method, salvaged.omitted, salvaged.reasons)
        if salvaged.message is None:
            raise RuntimeError(f"{method} made an answer that breaks the contract: {error}") from error
        data = codec.encode_message(_counting(salvaged.message, salvaged.omitted))
    if len(data) > codec.MESSAGE_BYTES_MOST:
        raise ResourceExhausted(
            f"the answer to {method} has {len(data)} bytes, and {codec.MESSAGE_BYTES_MOST} can be sent; ask for less at once"
        )
    return data


def _counting(answer: Any, count: int) -> Any:
    """Returns the answer with the number of omitted elements, if it has a field for that."""
    is_told = any(entry.name == "omitted" for entry in fields(answer))
    return replace(answer, omitted=answer.omitted + count) if is_told else answer


def _encode_element(message: Any, method: str, omitted: Omitted) -> bytes | None:
    """Encodes one message of a stream; None if nothing of it remains: the stream continues without it."""
    try:
        return _encode_answer(message, method, omitted)
    except RuntimeError:
        return None


@dataclass(frozen=True, slots=True)
class _Around:
    """Hooks that run around every call of a server."""

    admit: Admit
    omitted: Omitted
    settled: Settled


def _request(method: RpcMethod, data: bytes) -> Any:
    """Decodes a request; raises ContractError."""
    return codec.decode_message(method.request, data, bytes_most=method.request_bytes_most, is_counted=True)


def _unary(method: RpcMethod, call: Callable[..., Any], path: str, around: _Around) -> Any:
    async def serve(data: bytes, context: Context) -> bytes:
        request: object | None = None
        try:
            around.admit(path, context)
            request = _request(method, data)
            answer = await call(request, context)
            await around.settled(path, context, request, None)
            return _encode_answer(answer, method.name, around.omitted)
        except asyncio.CancelledError as error:
            # Its caller went away; what it asked for may have been done.
            await around.settled(path, context, request, error)
            raise
        except Exception as error:  # every failure becomes a status
            await around.settled(path, context, request, error)
            await abort_call(context, error, method.name)
            raise AssertionError("abort raises") from error

    return grpc.unary_unary_rpc_method_handler(serve)


def _server_stream(method: RpcMethod, call: Callable[..., Any], path: str, around: _Around) -> Any:
    async def serve(data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            around.admit(path, context)
            async for message in call(_request(method, data), context):
                answer = _encode_element(message, method.name, around.omitted)
                if answer is not None:
                    yield answer
        except Exception as error:  # noqa: BLE001  # every failure becomes a status
            await around.settled(path, context, None, error)
            await abort_call(context, error, method.name)

    return grpc.unary_stream_rpc_method_handler(serve)


async def _decode_stream(method: RpcMethod, stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in stream:
        yield _request(method, data)


async def _admit_stream(admit: Admit, path: str, context: Context, stream: AsyncIterator[bytes]) -> None:
    """Raises the fault of a refusal once the client's first message has arrived, unread."""
    try:
        admit(path, context)
    except Fault:
        # A client of grpc.aio whose first write is in progress when the stream ends gets an "Internal error from Core"
        # instead of the reason (seen in 2 of 150 refusals).
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_WITHIN_S):
                await anext(aiter(stream), None)
        raise


def _as_is(_method: RpcMethod, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    return stream


def _two_way(
    method: RpcMethod,
    call: Callable[..., Any],
    path: str,
    around: _Around,
    decode: Callable[[RpcMethod, AsyncIterator[bytes]], AsyncIterator[Any]] = _decode_stream,
) -> Any:
    async def serve(stream: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            await _admit_stream(around.admit, path, context, stream)
            async for message in call(decode(method, stream), context):
                answer = _encode_element(message, method.name, around.omitted)
                if answer is not None:
                    yield answer
        except Exception as error:  # noqa: BLE001  # every failure becomes a status
            await around.settled(path, context, None, error)
            await abort_call(context, error, method.name)

    return grpc.stream_stream_rpc_method_handler(serve)


def admit_everybody(_path: str, _context: Context) -> None:
    """Admits every call that the transport accepted."""


async def ignore_outcome(_path: str, _context: Context, _request: object | None, _error: BaseException | None) -> None:
    """Ignores how calls end."""


def build_handler(
    service: RpcService,
    *implementations: object,
    admit: Admit = admit_everybody,
    omitted: Omitted = note_omitted,
    settled: Settled = ignore_outcome,
) -> grpc.GenericRpcHandler:
    """Builds a handler for grpc.aio servers; each call is a snake_case method of one of `implementations`."""
    handlers = {}
    around = _Around(admit, omitted, settled)
    for method in service.methods:
        (call,) = (found for one in implementations if (found := getattr(one, method.attribute, None)) is not None)
        build = _two_way if method.request_streaming else _server_stream if method.response_streaming else _unary
        handlers[method.name] = build(method, call, service.path(method), around)
    return grpc.method_handlers_generic_handler(service.name, handlers)


def build_encoded_handler(
    service: RpcService, implementation: object, *, admit: Admit, settled: Settled = ignore_outcome
) -> grpc.GenericRpcHandler:
    """Builds a handler of two-way calls whose implementation gets requests as bytes, and yields Encoded."""
    around = _Around(admit, note_omitted, settled)
    handlers = {
        method.name: _two_way(method, getattr(implementation, method.attribute), service.path(method), around, _as_is)
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.name, handlers)


def _encode_sized(method: RpcMethod, request: object) -> bytes:
    """Encodes a request that is not; raises ContractError if no server would accept it."""
    data = request.data if isinstance(request, Encoded) else codec.encode_message(request)
    codec.check_size(method.request.__name__, data, method.request_bytes_most)
    return data


def _blocking_call(service: RpcService, method: RpcMethod, channel: grpc.Channel) -> Callable[..., Any]:
    def read(data: bytes) -> Any:
        return codec.decode_message(method.response, data)

    # Requests are encoded before the call: gRPC's own serializer hook hides the reason of a failure.
    def write(request: object) -> bytes:
        return _encode_sized(method, request)

    if not method.response_streaming:
        unary_raw: Any = channel.unary_unary(service.path(method), None, read)

        def unary(request: object, timeout: float | None = None, on_staleness: OnStaleness | None = None) -> Any:
            metadata = None if on_staleness is None else stale_reads.REQUEST_METADATA
            try:
                answer, done = unary_raw.with_call(write(request), timeout=timeout, metadata=metadata)
            except grpc.RpcError as error:
                raise fault_from(error) from None
            if on_staleness is not None:
                on_staleness(parse_staleness(done.trailing_metadata()))
            return answer

        return unary

    kind: Any = channel.stream_stream if method.request_streaming else channel.unary_stream
    stream_raw = kind(service.path(method), None, read)

    def stream(request: Any, timeout: float | None = None) -> Iterator[Any]:
        # gRPC takes a stream of requests in a thread of its own.
        call = stream_raw(map(write, request) if method.request_streaming else write(request), timeout=timeout)
        try:
            yield from call
        except grpc.RpcError as error:
            raise fault_from(error) from None
        finally:
            call.cancel()

    return stream


def _async_call(service: RpcService, method: RpcMethod, channel: grpc.aio.Channel) -> Callable[..., Any]:
    def read(data: bytes) -> Any:
        return codec.decode_message(method.response, data)

    def write(request: object) -> bytes:
        return _encode_sized(method, request)

    if not method.response_streaming:
        unary_raw: Any = channel.unary_unary(service.path(method), None, read)

        async def unary(request: object, timeout: float | None = None, on_staleness: OnStaleness | None = None) -> Any:
            metadata = None if on_staleness is None else stale_reads.REQUEST_METADATA
            call = unary_raw(_encode_sized(method, request), timeout=timeout, metadata=metadata)
            try:
                answer = await call
            except grpc.RpcError as error:
                raise fault_from(error) from None
            if on_staleness is not None:
                on_staleness(parse_staleness(await call.trailing_metadata()))
            return answer

        return unary

    kind: Any = channel.stream_stream if method.request_streaming else channel.unary_stream
    stream_raw = kind(service.path(method), write if method.request_streaming else None, read)

    async def stream(request: Any, timeout: float | None = None) -> AsyncIterator[Any]:
        call = stream_raw(request if method.request_streaming else _encode_sized(method, request), timeout=timeout)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise fault_from(error) from None
        finally:
            call.cancel()

    return stream


def build_client(service: RpcService, channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """Builds a client of a service; its calls have snake_case names, and block or are async as the channel is."""
    build: Callable[..., Callable[..., Any]] = _async_call if isinstance(channel, grpc.aio.Channel) else _blocking_call
    return SimpleNamespace(**{method.attribute: build(service, method, channel) for method in service.methods})
