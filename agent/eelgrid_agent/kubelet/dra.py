"""The node's DRA driver at its kubelet: made known, its slices published, claims made ready when the kubelet asks.

Owns the two sockets, their calls and when something is published. Must not know how a claim is
made ready (readying.py) nor what is in a slice (slices.py).

Theory. The kubelet finds the registration socket in its folder by itself, also after it started
anew, asks there for the path of the other one and says what it made of it; so nothing is done but
to serve, and to serve again where a socket is gone. Slices are published once the kubelet knows
the driver: before that no pod could be made ready. They stay when the agent ends, since it starts
again within seconds; a kubelet that waits in vain for its driver takes them away. The claim is
read before the driver's thread is asked, so that an API server that is slow holds up no change of a
layout, and one that is ready needs no API server at all. Each claim has an answer of its own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from eelgrid_agent.kubelet.api_server import ApiError
from eelgrid_agent.kubelet.claim_journal import ClaimsUnkept
from eelgrid_agent.kubelet.claims import ClaimRefused
from eelgrid_agent.kubelet.publishing import Draw, Publisher
from eelgrid_agent.kubelet.readying import Readying
from eelgrid_agent.kubelet.slices import DRIVER
from eelgrid_protos.errors import ContractError
from eelgrid_protos.resource_claims import (
    DRA_SERVICE,
    REGISTRATION_SERVICE,
    ClaimAsked,
    PreparedDevice,
    claims_asked,
    info_message,
    nothing_message,
    prepared_message,
    registered_from,
    unprepared_message,
)

__all__ = ["DraPlugin", "DraTimes", "SocketPathTooLong", "Threads"]

_LOG = logging.getLogger("eelgrid.agent")
_Context = grpc.aio.ServicerContext[bytes, bytes]
# Of the path of a UNIX socket; the kernel takes no longer one.
_SOCKET_BYTES_MOST = 107
_WAIT_S = 0.1


class SocketPathTooLong(Exception):
    """The kubelet's folder lies too deep for a socket in it."""


class DraTimes(NamedTuple):
    """How often sockets and devices are looked at, slices compared with the server's, and the longest wait after a failure."""

    look_s: float = 1.0
    publish_s: float = 30.0
    backoff_most_s: float = 60.0


class Threads(NamedTuple):
    """Where blocking work goes: each runs one function at a time, in order."""

    devices: Callable[[Callable[[], Any]], Awaitable[Any]]
    claims: Callable[[Callable[[], Any]], Awaitable[Any]]
    slices: Callable[[Callable[[], Any]], Awaitable[Any]]


class DraPlugin:
    """Serves in the kubelet's `folder`; `read` gets a ResourceClaim, `look` how to draw the slices of this moment.

    Nothing is served or changed before `is_recovered` says that the layouts were looked at.
    """

    def __init__(
        self, folder: Path, readying: Readying, publisher: Publisher, *,
        read: Callable[[str, str], Mapping[str, Any]], look: Callable[[], Draw], threads: Threads,
        is_recovered: Callable[[], bool] = lambda: True, times: DraTimes | None = None,
    ) -> None:  # fmt: skip
        self.socket = folder / "plugins" / DRIVER / "dra.sock"
        self.registration = folder / "plugins_registry" / f"{DRIVER}-reg.sock"
        longest = max(len(str(path).encode()) for path in (self.socket, self.registration))
        if longest > _SOCKET_BYTES_MOST:
            raise SocketPathTooLong(
                f"--kubelet-folder {folder} makes a socket path of {longest} bytes, and {_SOCKET_BYTES_MOST} are the most; "
                "give a shorter path"
            )
        self._readying = readying
        self._publisher = publisher
        self._read = read
        self._draw_now = look
        self._is_recovered = is_recovered
        self._threads = threads
        self._times = times or DraTimes()
        self._server: grpc.aio.Server | None = None
        self._registered = asyncio.Event()
        self._published: Sequence[dict[str, Any]] | None = None
        self.problem = "the kubelet has not registered the driver yet"
        self.ready_total = 0
        self.refused_total = 0

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet took the driver."""
        return self._registered.is_set()

    async def run(self) -> None:
        """Serve until cancelled."""
        # It becomes so on a thread that knows no event loop.
        while not self._is_recovered():  # noqa: ASYNC110
            await asyncio.sleep(_WAIT_S)
        await self._threads.devices(self._readying.start)
        publishing = asyncio.create_task(self._keep_published())
        try:
            while True:
                await self._look()
                await asyncio.sleep(self._times.look_s)
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            await self.stop()

    async def start(self) -> None:
        """Serve, in the stead of whatever was served before."""
        await self.stop()
        server = grpc.aio.server()
        unary = grpc.unary_unary_rpc_method_handler
        services: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = {
            DRA_SERVICE: {
                "NodePrepareResources": unary(self._prepare),
                "NodeUnprepareResources": unary(self._unprepare),
            },
            REGISTRATION_SERVICE: {
                "GetInfo": unary(self._info),
                "NotifyRegistrationStatus": unary(self._notified),
            },
        }
        for name, handlers in services.items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        # The kubelet looks at the folder: whatever is there must answer already.
        for path in (self.socket, self.registration):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            path.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Serve no more; what is ready stays so."""
        server, self._server = self._server, None
        with contextlib.suppress(OSError):
            self.registration.unlink(missing_ok=True)
        if server is not None:
            await server.stop(None)

    async def _look(self) -> None:
        if self._server is not None and self.socket.exists() and self.registration.exists():
            return
        try:
            await self.start()
        except (OSError, RuntimeError) as error:
            await self.stop()
            self._failed(f"nothing can be served in {self.registration.parent}: {error}; mount the kubelet's folder")

    # Slices

    async def _keep_published(self) -> None:
        failures, since_s, tidied_s = 0, self._times.publish_s, 0.0
        await self._registered.wait()
        while True:
            draw = self._draw_now()
            drawn = draw(0, "")
            if drawn != self._published or since_s >= self._times.publish_s:
                failures = 0 if await self._publish(draw, drawn) else failures + 1
                since_s = 0.0
            if tidied_s >= self._times.publish_s:
                tidied_s = 0.0
                await self._threads.devices(self._readying.tidy)
            wait_s = min(self._times.look_s * 2.0 ** min(failures, 8), self._times.backoff_most_s)
            await asyncio.sleep(wait_s)
            since_s, tidied_s = since_s + wait_s, tidied_s + wait_s

    async def _publish(self, draw: Draw, drawn: Sequence[dict[str, Any]]) -> bool:
        try:
            written = await self._threads.slices(lambda: self._publisher.publish(draw))
        except ApiError as error:
            self._published = None
            self._failed(f"slices could not be published: {error}")
            return False
        if written:
            _LOG.info("event=slices_published objects=%d", written)
        self._published = drawn
        self.problem = ""
        return True

    def _failed(self, problem: str) -> None:
        if problem != self.problem:
            _LOG.warning("event=dra_failed reason=%r", problem)
        self.problem = problem

    # The kubelet's calls

    async def _info(self, request: bytes, context: _Context) -> bytes:  # noqa: ARG002
        return info_message(DRIVER, str(self.socket))

    async def _notified(self, request: bytes, context: _Context) -> bytes:
        try:
            told = registered_from(request)
        except ContractError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if told.is_registered:
            _LOG.info("event=dra_registered driver=%s", DRIVER)
            # A kubelet that started anew may have taken our slices away.
            self._published = None
            self._registered.set()
        else:
            self._failed(f"the kubelet does not take the driver: {told.error}")
        return nothing_message()

    async def _prepare(self, request: bytes, context: _Context) -> bytes:
        outcomes: dict[str, tuple[PreparedDevice, ...] | str] = {}
        for asked in await self._asked(request, context):
            try:
                outcomes[asked.uid] = await self._made_ready(asked)
                self.ready_total += 1
            except (ClaimRefused, ClaimsUnkept, ApiError) as error:
                self.refused_total += 1
                outcomes[asked.uid] = f"claim {asked.namespace}/{asked.name}: {error}"
                _LOG.warning("event=claim_refused claim=%s/%s reason=%r", asked.namespace, asked.name, str(error))
        return prepared_message(outcomes)

    async def _unprepare(self, request: bytes, context: _Context) -> bytes:
        outcomes: dict[str, str] = {}
        for asked in await self._asked(request, context):
            outcomes[asked.uid] = ""
            try:
                await self._threads.devices(lambda asked=asked: self._readying.undo(asked))  # type: ignore[misc]
            except ClaimRefused as error:
                outcomes[asked.uid] = f"claim {asked.namespace}/{asked.name}: {error}"
        return unprepared_message(outcomes)

    @staticmethod
    async def _asked(request: bytes, context: _Context) -> tuple[ClaimAsked, ...]:
        try:
            return claims_asked(request)
        except ContractError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _made_ready(self, asked: ClaimAsked) -> tuple[PreparedDevice, ...]:
        known = await self._threads.devices(self._readying.claims)
        claim = None
        if asked.uid not in known:
            claim = await self._threads.claims(lambda: self._read(asked.namespace, asked.name))
        devices: tuple[PreparedDevice, ...] = await self._threads.devices(lambda: self._readying.ready(asked, claim))
        return devices
