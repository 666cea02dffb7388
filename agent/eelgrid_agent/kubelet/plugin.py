"""One resource of this node, served to the kubelet on a socket of its own.

Owns the socket and the calls of the device plugin API. Must not decide which devices there
are nor which are preferred: both are asked of its owner.

Theory. The kubelet opens one stream for the devices and is sent all of them after each
change. It asks Allocate without a word of whose pod it is, and runs what it is given; so
what is not offered, or not healthy now, is refused there, and the pod fails with our reason
instead of starting without its device.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio

from eelgrid_protos.device_plugin import (
    PLUGIN_SERVICE,
    Asked,
    Given,
    OfferedDevice,
    allocate_answer,
    allocate_asked,
    devices_message,
    empty_message,
    options_message,
    preferred_answer,
    preferred_asked,
)
from eelgrid_protos.errors import ContractError

__all__ = ["ResourcePlugin"]

_LOG = logging.getLogger("eelgrid.agent")
_Context = grpc.aio.ServicerContext[bytes, bytes]


class ResourcePlugin:
    """A server for one resource; `offer` whenever its devices change."""

    def __init__(
        self, resource: str, socket: Path, *, prefer: Callable[[Asked], tuple[str, ...]],
        give: Callable[[tuple[str, ...]], Given],
    ) -> None:  # fmt: skip
        self.resource = resource
        self.socket = socket
        self.given_total = 0
        self.refused_total = 0
        self._prefer = prefer
        self._give = give
        self._devices: tuple[OfferedDevice, ...] = ()
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def devices(self) -> tuple[OfferedDevice, ...]:
        """What is offered."""
        return self._devices

    @property
    def serves(self) -> bool:
        """Whether its socket is there: a kubelet that starts anew takes all sockets away."""
        return self._server is not None and self.socket.exists()

    def offer(self, devices: tuple[OfferedDevice, ...]) -> bool:
        """These devices from now on; whether they are others than before."""
        if devices == self._devices:
            return False
        self._devices = devices
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return True

    async def start(self) -> None:
        """Serve, in the stead of whatever was served before."""
        await self.stop()
        self.socket.unlink(missing_ok=True)
        server = grpc.aio.server()
        unary = grpc.unary_unary_rpc_method_handler
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "GetDevicePluginOptions": unary(self._options),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._watch),
            "GetPreferredAllocation": unary(self._preferred),
            "Allocate": unary(self._allocate),
            "PreStartContainer": unary(self._nothing),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PLUGIN_SERVICE, handlers),))
        server.add_insecure_port(f"unix:{self.socket}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Serve no more; pods that hold devices run on."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        with contextlib.suppress(OSError):
            self.socket.unlink(missing_ok=True)

    async def _options(self, request: bytes, context: _Context) -> bytes:  # noqa: ARG002
        return options_message()

    async def _nothing(self, request: bytes, context: _Context) -> bytes:  # noqa: ARG002
        return empty_message()

    async def _watch(self, request: bytes, context: _Context) -> AsyncIterator[bytes]:  # noqa: ARG002
        while True:
            changed = self._changed
            yield devices_message(self._devices)
            await changed.wait()

    async def _preferred(self, request: bytes, context: _Context) -> bytes:
        try:
            return preferred_answer([self._prefer(asked) for asked in preferred_asked(request)])
        except ContractError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _allocate(self, request: bytes, context: _Context) -> bytes:
        healthy = {one.device_id for one in self._devices if one.is_healthy}
        try:
            asked = allocate_asked(request)
        except ContractError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        strange = sorted({one for ids in asked for one in ids} - healthy)
        if strange:
            self.refused_total += 1
            _LOG.warning("event=device_refused resource=%s devices=%s", self.resource, ",".join(strange))
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{strange[0]} is gone or unhealthy since the kubelet was told; the pod has to be made anew",
            )
        self.given_total += len(asked)
        _LOG.info("event=devices_given resource=%s devices=%s", self.resource, ";".join(map(",".join, asked)))
        return allocate_answer([self._give(ids) for ids in asked])
