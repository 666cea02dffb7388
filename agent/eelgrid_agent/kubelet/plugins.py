"""All resources of this node at its kubelet: made known, kept up to date, made known again.

Owns the plugins and when the kubelet is told of them. Must not know which devices a name
stands for (offers.py) or which are preferred (choice.py).

Theory. A kubelet that starts anew clears its folder of sockets and makes its own again, so
ours that is gone, or another inode of its own, means that every resource has to be
registered once more. A resource whose last device is gone is offered as empty, which the
kubelet takes for zero; its plugin serves on, so that a layout that comes back needs no
registration. Registering twice is harmless. What cannot be registered is tried again with a
wait that doubles, within a bound; pods that hold devices know nothing of all this.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio

from eelgrid_agent.kubelet.choice import Node, preferred
from eelgrid_agent.kubelet.plugin import ResourcePlugin
from eelgrid_protos.device_plugin import REGISTER_PATH, Asked, Given, OfferedDevice, register_message

__all__ = ["DevicePlugins", "PluginTimes", "given_by_cdi", "given_by_environment"]

_LOG = logging.getLogger("eelgrid.agent")
_KUBELET = "kubelet.sock"
_Call = Callable[..., "grpc.aio.UnaryUnaryCall[bytes, bytes]"]
# Of the path of a UNIX socket; the kernel takes no longer one.
_SOCKET_BYTES_MOST = 107


class PluginTimes(NamedTuple):
    """How often the kubelet is looked at, how long a call may take, and the longest wait after a failure."""

    look_s: float = 1.0
    deadline_s: float = 5.0
    backoff_most_s: float = 30.0


def given_by_environment(ids: tuple[str, ...]) -> Given:
    """For NVIDIA's container runtime as the default runtime: it mounts what this variable names."""
    return Given(environment={"NVIDIA_VISIBLE_DEVICES": ",".join(ids)})


def given_by_cdi(ids: tuple[str, ...]) -> Given:
    """For runtimes that know CDI: the names that `nvidia-ctk cdi generate` writes for UUIDs."""
    return Given(cdi_devices=tuple(f"nvidia.com/gpu={one}" for one in ids))


class DevicePlugins:
    """Serves what `offers` says, asked again at each look; `node` is what a preference looks at."""

    def __init__(
        self, folder: Path, *, offers: Callable[[], Mapping[str, tuple[OfferedDevice, ...]]],
        node: Callable[[], Node], give: Callable[[tuple[str, ...]], Given], times: PluginTimes | None = None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._offers = offers
        self._node = node
        self._give = give
        self._times = times or PluginTimes()
        self._kubelet: tuple[int, int] | None = None  # of its socket: inode and time of change
        self.plugins: dict[str, ResourcePlugin] = {}
        self.registrations_total = 0
        self.problem = "not registered yet"

    async def run(self) -> None:
        """Serve until cancelled."""
        failures = 0
        try:
            while True:
                failures = 0 if await self.look() else failures + 1
                wait_s = self._times.look_s * 2.0 ** min(failures, 8)
                await asyncio.sleep(min(wait_s, max(self._times.look_s, self._times.backoff_most_s)))
        finally:
            for plugin in self.plugins.values():
                await plugin.stop()

    async def look(self) -> bool:
        """Tells the kubelet what has changed; False where it could not be told, and `problem` says why."""
        offers = self._offers()
        for resource in offers.keys() | self.plugins.keys():
            plugin = self.plugins.get(resource) or self._made(resource)
            if plugin.offer(offers.get(resource, ())):
                _LOG.info("event=devices_offered resource=%s devices=%d", resource, len(plugin.devices))
        kubelet = _identity(self._folder / _KUBELET)
        if kubelet is None:
            return self._failed(
                f"{self._folder / _KUBELET} is not there; the kubelet is starting, or the folder is not mounted"
            )
        is_new, self._kubelet = kubelet != self._kubelet, kubelet
        for plugin in self.plugins.values():
            if is_new or not plugin.serves:
                try:
                    await plugin.start()
                    await self._register(plugin)
                except (grpc.aio.AioRpcError, OSError, RuntimeError) as error:
                    self._kubelet = None
                    await plugin.stop()
                    return self._failed(f"{plugin.resource} could not be registered: {_said(error)}")
        self.problem = ""
        return True

    def _made(self, resource: str) -> ResourcePlugin:
        socket = self._folder / f"eelgrid-{resource.rpartition('/')[2]}.sock"
        if len(str(socket).encode()) > _SOCKET_BYTES_MOST:
            socket = self._folder / f"eelgrid-{len(self.plugins)}.sock"
        plugin = ResourcePlugin(resource, socket, prefer=self._preferred, give=self._give)
        self.plugins[resource] = plugin
        return plugin

    def _preferred(self, asked: Asked) -> tuple[str, ...]:
        return preferred(asked, self._node())

    async def _register(self, plugin: ResourcePlugin) -> None:
        # gRPC tells UNIX peers apart by an authority that the kubelet's server must accept.
        options = [("grpc.default_authority", "localhost"), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(f"unix:{self._folder / _KUBELET}", options=options) as channel:
            call: _Call = channel.unary_unary(REGISTER_PATH)
            await call(register_message(plugin.resource, plugin.socket.name), timeout=self._times.deadline_s)
        self.registrations_total += 1
        _LOG.info("event=registered resource=%s socket=%s", plugin.resource, plugin.socket.name)

    def _failed(self, problem: str) -> bool:
        if problem != self.problem:
            _LOG.warning("event=not_registered reason=%r", problem)
        self.problem = problem
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _said(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} ({error.details() or 'no reason given'})"
    return str(error)
