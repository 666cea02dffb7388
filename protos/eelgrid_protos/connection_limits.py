"""Connection limits of a gRPC server: per-peer call accounts and termination of abusive connections.

Owns the accounts of peers, the limits of each, and the termination of connections. Must not know what a call means
nor which role may make it: that is decided by `admit`, which runs later.

Theory. gRPC bounds the calls in progress on one connection (`transport.server_options`), but not per peer, so that a
peer with more connections gets more. Here every peer has an account: by certificate, or by address without one. An
account has a bounded number of calls and watches at once, so that no client displaces those of another. Calls that
are refused, or reset as soon as they are made, are strikes in a leaky bucket: it never overflows for a faulty client,
at once for a flood, and then the connection is ended, since each refusal costs us more than it costs the flood.

A connection outlives the handshake that admitted it. So once a second these connections are ended: those whose
certificate has expired, all of them when a certificate was removed from the authority's file (peers that are still
trusted reconnect at once), those on which a message has waited too long for its reader, and, when descriptors run
short, those without a call.
"""

import asyncio
import contextlib
import inspect
import logging
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from eelgrid_protos.certificate import PEM_PROPERTY, CertificateUnreadable, read_certificate
from eelgrid_protos.faults import Fault, ResourceExhausted
from eelgrid_protos.log_lines import RateLimitedLog
from eelgrid_protos.rpc import Context, abort_call
from eelgrid_protos.sockets import PeerAddress, count_descriptors, end_accepted, list_accepted, parse_peer

_CALL, _WATCH, _TWO_WAY = "call", "watch", "two_way"
# What `parse_peer` returns for a Unix socket, which has no port to identify it.
_NOWHERE: PeerAddress = ("", 0)
_LOOK_S = 1.0
# Accounts, and connections, that are remembered without a call in progress.
_REMEMBERED_MOST = 8192
_SAID_EVERY_S = 10.0
# Share of our descriptors above which connections without a call are ended.
_CROWDED_RATIO = 0.75
# The handshake and the first call take at most this long, so a connection older than this without a call is idle.
_IDLE_S = 5.0
_ENDING_S = 5.0
# More calls per check that are reset before their handler begins are a flood; to identify its peer, handlers begin
# before the request arrives for this long, which costs each call a little more.
_VANISHED_MOST = 100
_WARY_S = 30.0
# A context's code is an integer in some kinds of calls.
_STRIKES = frozenset(
    code
    for status in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
    for code in (status, status.value[0])
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """Limits of one account, or of one connection."""

    # Concurrent calls of one account; a program that submits in parallel uses some tens.
    calls_most: int = 256
    # Concurrent watches of one account: a person has a few, a dashboard service some more, and all of them fit on one
    # connection and leave room for calls.
    watches_most: int = 48
    # Capacity of the bucket of strikes, and its leak per second: an agent that has no role yet makes one in 15 s.
    strikes_most: float = 100.0
    strikes_per_s: float = 10.0
    # A reset is a strike if its call was younger than this: an expired deadline is no flood.
    reset_within_s: float = 1.0
    # How long a message may wait for its reader: keep-alive detects dead peers within 40 s, this those that stall.
    unread_s: float = 60.0


class _Bucket:
    """Leaky bucket of strikes."""

    __slots__ = ("_filled_s", "_level")

    def __init__(self) -> None:
        self._level = self._filled_s = 0.0

    def add(self, now_s: float, *, most: float, per_s: float) -> bool:
        """Adds a strike; returns False if the bucket is full."""
        self._level = min(most, max(0.0, self._level - (now_s - self._filled_s) * per_s)) + 1.0
        self._filled_s = now_s
        return self._level <= most


@dataclass(slots=True, eq=False)
class _Account:
    """One principal: a certificate, or an address without one."""

    key: bytes | str
    name: str
    ends_s: float
    open: int = 0
    calls: int = 0
    watches: int = 0
    bucket: _Bucket = field(default_factory=_Bucket)


@dataclass(slots=True, eq=False)
class _Connection:
    key: PeerAddress
    account: _Account
    open: int = 0
    # When it was ended; calls in progress at that time still end normally.
    ended_s: float = float("inf")
    bucket: _Bucket = field(default_factory=_Bucket)


_One = TypeVar("_One", _Account, _Connection)


class _Table(Generic[_One]):
    """Remembers peers with calls in progress and the newest of the others, so that a flood displaces only idle ones."""

    def __init__(self) -> None:
        self._busy: dict[Any, _One] = {}
        self._idle: OrderedDict[Any, _One] = OrderedDict()

    def find_peer(self, key: Any) -> _One | None:
        return self._busy.get(key) or self._idle.get(key)

    def update_peer(self, one: _One) -> None:
        """Updates the table after a peer's `open` changed."""
        if one.open:
            self._idle.pop(one.key, None)
            self._busy[one.key] = one
            return
        if self._busy.get(one.key) is one:
            del self._busy[one.key]
        self._idle[one.key] = one
        self._idle.move_to_end(one.key)
        if len(self._idle) > _REMEMBERED_MOST:
            self._idle.popitem(last=False)


class _Entry:
    """One call in progress; a context manager around its handler."""

    __slots__ = ("began_s", "connection", "context", "guard", "kind", "writing_s")

    def __init__(self, guard: "PeerGuard", kind: str, context: Context, connection: _Connection) -> None:
        self.guard, self.kind, self.context, self.connection = guard, kind, context, connection
        self.began_s = time.monotonic()
        # Since when a message has waited for its reader.
        self.writing_s = float("inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.guard.end_call(
            self, is_cancelled=kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit))
        )


class PeerGuard:
    """Guards one server by accounts. `families` of metrics are made of `refused` and `ended`, by reason."""

    def __init__(
        self, limits: PeerLimits | None = None, *, log: logging.Logger, now_s: Callable[[], float] = time.time
    ) -> None:
        """Creates a guard; `now_s` returns seconds since 1970, for the expiry of certificates."""
        self.limits = limits or PeerLimits()
        self.refused: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self._log = log
        self._now_s = now_s
        self._port = 0
        self._lost_authority: Callable[[], bool] = lambda: False
        self._accounts: _Table[_Account] = _Table()
        self._connections: _Table[_Connection] = _Table()
        self._entries: set[_Entry] = set()
        self._condemned: dict[PeerAddress, str] = {}
        self._seen_s: dict[PeerAddress, float] = {}
        # Handlers looked up, and those begun: a call that is reset before its request arrives begins none.
        self.found = self._begun = 0
        self.is_wary = False
        self._wary_until_s = 0.0
        self._limited_log = RateLimitedLog(log, time.monotonic)
        self._looks = 0
        self._wake = asyncio.Event()

    def attach_port(self, port: int, lost_authority: Callable[[], bool] | None = None) -> None:
        """Sets the server's port; `lost_authority` reports, once each, certificates removed from the authority's file."""
        self._port = port
        if lost_authority is not None:
            self._lost_authority = lost_authority

    def wrap_handlers(self, *handlers: grpc.GenericRpcHandler) -> "GuardedHandlers":
        """Returns the handlers behind this guard, with an answer for unknown methods."""
        return GuardedHandlers(self, handlers)

    # Calls

    def begin_call(self, kind: str, context: Context) -> _Entry:
        """Counts the begin of a call; raises ResourceExhausted."""
        connection = self._connection(context)
        account, limits, why = connection.account, self.limits, ""
        if kind == _WATCH and account.watches >= limits.watches_most:
            why = f"{limits.watches_most} watches of yours are open; end some, or list instead"
        elif kind == _CALL and account.calls >= limits.calls_most:
            why = f"{limits.calls_most} calls of yours are under way; wait for some of them"
        if why:
            self._begun += 1
            self.refused[kind] += 1
            self._strike(connection)
            raise ResourceExhausted(why)
        self._begun += 1
        entry = _Entry(self, kind, context, connection)
        self._count(entry, 1)
        self._entries.add(entry)
        return entry

    def end_call(self, entry: _Entry, *, is_cancelled: bool) -> None:
        """Counts the end of a call; a reset or a refusal is a strike."""
        self._entries.discard(entry)
        self._count(entry, -1)
        is_reset = is_cancelled and time.monotonic() - entry.began_s < self.limits.reset_within_s
        if is_reset or entry.context.code() in _STRIKES:
            self._strike(entry.connection)

    def on_call_reset(self, entry: _Entry) -> None:
        """Counts a call that was reset before its request arrived."""
        self._strike(entry.connection)

    def _count(self, entry: _Entry, by: int) -> None:
        connection, account = entry.connection, entry.connection.account
        connection.open += by
        account.open += by
        # Agents' streams are limited by node, once their Hello is known; a connection bounds its streams anyway.
        account.watches += by * (entry.kind == _WATCH)
        account.calls += by * (entry.kind == _CALL)
        self._connections.update_peer(connection)
        self._accounts.update_peer(account)

    def _connection(self, context: Context) -> _Connection:
        peer = parse_peer(context.peer())
        (pem, *_) = context.auth_context().get(PEM_PROPERTY) or (b"",)
        key = pem or peer[0]
        account = self._accounts.find_peer(key)
        if account is None:
            account = _account_of(key, pem, peer)
            self._accounts.update_peer(account)
        connection = self._connections.find_peer(peer)
        is_over = connection is not None and time.monotonic() - connection.ended_s > _ENDING_S
        if connection is None or connection.account is not account or is_over:
            # A new connection, or a reused port.
            connection = _Connection(peer, account)
        return connection

    def _strike(self, connection: _Connection) -> None:
        limits, account, now_s = self.limits, connection.account, time.monotonic()
        self._connections.update_peer(connection)
        # Without a certificate an address may be shared by a site: each of its connections has a bucket of its own.
        bucket = account.bucket if account.name else connection.bucket
        is_full = not bucket.add(now_s, most=limits.strikes_most, per_s=limits.strikes_per_s)
        if is_full and self._condemn(connection, "flood"):
            self._limited_log.warn(
                ("flood",),
                _SAID_EVERY_S,
                "peer=%s certificate=%r action=disconnected reason=flood",
                connection.key[0],
                account.name,
            )

    # Connections

    def _condemn(self, connection: _Connection, reason: str) -> bool:
        if connection.key == _NOWHERE or connection.ended_s != float("inf"):
            return False
        connection.ended_s = time.monotonic()
        self._end_soon(connection.key, reason)
        return True

    def _end_soon(self, peer: PeerAddress, reason: str) -> None:
        self._condemned[peer] = reason
        self._wake.set()

    async def run(self) -> None:
        """Ends connections until cancelled."""
        looked_s = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                self._looks += 1
                if time.monotonic() - looked_s >= _LOOK_S:
                    looked_s = time.monotonic()
                    await self._watch_peers(looked_s)
                if self._condemned:
                    condemned, self._condemned = self._condemned, {}
                    await asyncio.to_thread(end_accepted, self._port, condemned.__contains__)
                    self.ended.update(condemned.values())
            except Exception:  # noqa: BLE001  # the guard must outlive a fault in one check
                self._log.exception("guard=failed")

    async def _watch_peers(self, now_s: float) -> None:
        if self.found - self._begun > _VANISHED_MOST:
            self._wary_until_s = now_s + _WARY_S
        self.found = self._begun = 0
        self.is_wary = now_s < self._wary_until_s
        wall_s = self._now_s()
        for entry in self._entries:
            if entry.connection.account.ends_s <= wall_s:
                self._condemn(entry.connection, "expired")
            elif now_s - entry.writing_s >= self.limits.unread_s:
                self._condemn(entry.connection, "unread")
        if await asyncio.to_thread(self._lost_authority):
            ended = await asyncio.to_thread(end_accepted, self._port, lambda _: True)
            self.ended["authority"] += ended
            self._log.warning(
                "connections=%d action=disconnected reason=a certificate left the authority's file", ended
            )
        await self._relieve(now_s)

    async def _relieve(self, now_s: float) -> None:
        """Ends connections without a call when descriptors run short, since no new peer could connect then."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if count_descriptors() < _CROWDED_RATIO * most:
            self._seen_s.clear()
            return
        busy = {entry.connection.key for entry in self._entries}
        here = await asyncio.to_thread(list_accepted, self._port)
        self._seen_s = {peer: self._seen_s.get(peer, now_s) for peer in here if peer not in busy}
        idle = [peer for peer, since_s in self._seen_s.items() if now_s - since_s >= _IDLE_S]
        for peer in idle:
            self._end_soon(peer, "idle")
        self._limited_log.warn(
            ("crowded",),
            _SAID_EVERY_S,
            "connections=%d idle=%d action=disconnect_idle reason=descriptors",
            len(here),
            len(idle),
        )


def _account_of(key: bytes | str, pem: bytes, peer: PeerAddress) -> _Account:
    if not pem:
        return _Account(key, "", float("inf"))
    try:
        certificate = read_certificate(pem.decode("ascii"))
    except (CertificateUnreadable, UnicodeDecodeError):
        # Roles refuse it; here it has an account like any other.
        return _Account(key, f"unreadable, from {peer[0]}", float("inf"))
    return _Account(key, certificate.display_name or "(no name)", certificate.ends_s)


async def _unknown(_requests: object, context: Context) -> AsyncIterator[bytes]:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    yield b""


class GuardedHandlers(grpc.GenericRpcHandler):
    """Handlers behind a guard; also accepted by generated code as a server to register with."""

    def __init__(self, guard: PeerGuard, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._guard = guard
        self._handlers = list(handlers)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Adds handlers of a generated registration."""
        self._handlers.extend(handlers)

    def replace_handlers(self, gone: Sequence[grpc.GenericRpcHandler], come: Sequence[grpc.GenericRpcHandler]) -> None:
        """Serves the new handlers instead of others, from the next call on."""
        self._handlers = [*come, *(one for one in self._handlers if one not in gone)]

    def add_registered_method_handlers(self, _service: str, _handlers: object) -> None:
        """Ignores the same handlers in their second form, which gRPC would look up before ours."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Returns the guarded handler of a call by its path."""
        for one in self._handlers:
            found = one.service(handler_call_details)
            if found is not None:
                return self._wrap_handler(found)
        return self._wrap_handler(grpc.stream_stream_rpc_method_handler(_unknown))

    def find_call(self, path: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """Returns the guarded handler of a unary call by its path, for a server of another protocol.

        Its context has to have `peer`, `auth_context`, `code` and `abort`. Raises LookupError for other paths.
        """
        details: Any = SimpleNamespace(method=path, invocation_metadata=())
        found = next((found for one in self._handlers if (found := one.service(details)) is not None), None)
        if found is None or found.unary_unary is None:
            raise LookupError(path)
        inner = _around_call(self._guard, _CALL, found.unary_unary)

        async def call(request: bytes, context: Context) -> bytes:
            self._guard.found += 1
            answer: bytes = await inner(request, context)
            return answer

        return call

    def _wrap_handler(self, handler: Any) -> Any:
        two_way, watch = handler.request_streaming, handler.response_streaming
        kind = _TWO_WAY if two_way else _WATCH if watch else _CALL
        name = f"{'stream' if two_way else 'unary'}_{'stream' if watch else 'unary'}"
        inner = getattr(handler, name)
        self._guard.found += 1
        if not two_way and self._guard.is_wary:
            answer = _read_first(self._guard, kind, inner, handler.request_deserializer)
            return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)
        make = getattr(grpc, f"{name}_rpc_method_handler")
        wrap = _around_stream if inspect.isasyncgenfunction(inner) else _around_call
        return make(wrap(self._guard, kind, inner), handler.request_deserializer, handler.response_serializer)


def _around_call(guard: PeerGuard, kind: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> Any:
        with await _enter_call(guard, kind, context):
            return await inner(request, context)

    return call


def _around_stream(guard: PeerGuard, kind: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        with await _enter_call(guard, kind, context) as entry:
            async with contextlib.aclosing(inner(request, context)) as messages:
                async for message in messages:
                    entry.writing_s = time.monotonic()
                    yield message
                    entry.writing_s = float("inf")

    return stream


def _read_first(guard: PeerGuard, kind: str, inner: Callable[..., Any], decode: Any) -> Callable[..., Any]:
    """Wraps a unary-request handler so that its call is counted before its request arrives."""

    async def stream(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        with await _enter_call(guard, kind, context) as entry:
            request = await anext(aiter(requests), None)
            if request is None:
                guard.on_call_reset(entry)
                return
            message = request if decode is None else decode(request)
            if not inspect.isasyncgenfunction(inner):
                # No handler here writes to its context itself, as the health service's watch does.
                answer = await inner(message, context)
                if answer is not None:
                    yield answer
                return
            async with contextlib.aclosing(inner(message, context)) as messages:
                async for one in messages:
                    entry.writing_s = time.monotonic()
                    yield one
                    entry.writing_s = float("inf")

    return stream


async def _enter_call(guard: PeerGuard, kind: str, context: Context) -> _Entry:
    try:
        return guard.begin_call(kind, context)
    except Fault as fault:
        await abort_call(context, fault, kind)
        raise AssertionError("abort raises") from fault
