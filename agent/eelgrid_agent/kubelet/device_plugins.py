"""Device plugins of the node: one gRPC server for each resource, registered with the kubelet.

Theory (registration). A kubelet that starts anew clears its folder of sockets and makes its own again, so
ours that is gone, or another inode of its own, means that every resource has to be
registered once more. A resource whose last device is gone is offered as empty, which the
kubelet takes for zero; its plugin serves on, so that a layout that comes back needs no
registration. Registering twice is harmless. What cannot be registered is tried again with a
wait that doubles, within a bound; pods that hold devices know nothing of all this.

Theory (one plugin). The kubelet opens one stream for the devices and is sent all of them after each
change. It asks Allocate without a word of whose pod it is, and runs what it is given; so
what is not offered, or not healthy now, is refused there, and the pod fails with our reason
instead of starting without its device.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio

from eelgrid_agent.kubelet.plugin_devices import (
    NodeDevices,
    build_offers,
    choose_devices,
    gpu_index_by_device,
    memory_slices_by_device,
    planned_device_sets,
)
from eelgrid_agent.kubelet.pod_resources import PodResourcesClient
from eelgrid_agent.node.config import AgentConfig
from eelgrid_agent.node.node import AgentNode
from eelgrid_protos.device_plugin_api import (
    PLUGIN_SERVICE,
    REGISTER_PATH,
    ContainerAllocation,
    OfferedDevice,
    PreferredAllocationRequest,
    encode_allocate_response,
    encode_device_list,
    encode_empty,
    encode_plugin_options,
    encode_preferred_response,
    encode_register_request,
    parse_allocate_request,
    parse_preferred_request,
)
from eelgrid_protos.errors import ContractError

_LOG = logging.getLogger("eelgrid.agent")
_Context = grpc.aio.ServicerContext[bytes, bytes]


class ResourcePlugin:
    """A server for one resource; `offer` whenever its devices change."""

    def __init__(
        self,
        resource: str,
        socket: Path,
        *,
        prefer: Callable[[PreferredAllocationRequest], tuple[str, ...]],
        give: Callable[[tuple[str, ...]], ContainerAllocation],
    ) -> None:
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
    def is_serving(self) -> bool:
        """Whether its socket is there: a kubelet that starts anew takes all sockets away."""
        return self._server is not None and self.socket.exists()

    def update_devices(self, devices: tuple[OfferedDevice, ...]) -> bool:
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
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list_and_watch),
            "GetPreferredAllocation": unary(self._get_preferred_allocation),
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
        return encode_plugin_options()

    async def _nothing(self, request: bytes, context: _Context) -> bytes:  # noqa: ARG002
        return encode_empty()

    async def _list_and_watch(self, request: bytes, context: _Context) -> AsyncIterator[bytes]:  # noqa: ARG002
        while True:
            changed = self._changed
            yield encode_device_list(self._devices)
            await changed.wait()

    async def _get_preferred_allocation(self, request: bytes, context: _Context) -> bytes:
        try:
            return encode_preferred_response([self._prefer(asked) for asked in parse_preferred_request(request)])
        except ContractError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _allocate(self, request: bytes, context: _Context) -> bytes:
        healthy = {one.device_id for one in self._devices if one.is_healthy}
        try:
            asked = parse_allocate_request(request)
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
        return encode_allocate_response([self._give(ids) for ids in asked])


_KUBELET = "kubelet.sock"
_Call = Callable[..., "grpc.aio.UnaryUnaryCall[bytes, bytes]"]
# Of the path of a UNIX socket; the kernel takes no longer one.
_SOCKET_BYTES_MOST = 107


class PluginTimes(NamedTuple):
    """How often the kubelet is looked at, how long a call may take, and the longest wait after a failure."""

    look_s: float = 1.0
    deadline_s: float = 5.0
    backoff_most_s: float = 30.0


def allocate_by_environment(ids: tuple[str, ...]) -> ContainerAllocation:
    """For NVIDIA's container runtime as the default runtime: it mounts what this variable names."""
    return ContainerAllocation(environment={"NVIDIA_VISIBLE_DEVICES": ",".join(ids)})


def allocate_by_cdi(ids: tuple[str, ...]) -> ContainerAllocation:
    """For runtimes that know CDI: the names that `nvidia-ctk cdi generate` writes for UUIDs."""
    return ContainerAllocation(cdi_devices=tuple(f"nvidia.com/gpu={one}" for one in ids))


class DevicePlugins:
    """Serves what `offers` says, asked again at each look; `node` is what a preference looks at."""

    def __init__(
        self,
        folder: Path,
        *,
        offers: Callable[[], Mapping[str, tuple[OfferedDevice, ...]]],
        node: Callable[[], NodeDevices],
        give: Callable[[tuple[str, ...]], ContainerAllocation],
        times: PluginTimes | None = None,
    ) -> None:
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
                failures = 0 if await self.reconcile_plugins() else failures + 1
                wait_s = self._times.look_s * 2.0 ** min(failures, 8)
                await asyncio.sleep(min(wait_s, max(self._times.look_s, self._times.backoff_most_s)))
        finally:
            for plugin in self.plugins.values():
                await plugin.stop()

    async def reconcile_plugins(self) -> bool:
        """Tells the kubelet what has changed; False where it could not be told, and `problem` says why."""
        offers = self._offers()
        for resource in offers.keys() | self.plugins.keys():
            plugin = self.plugins.get(resource) or self._made(resource)
            if plugin.update_devices(offers.get(resource, ())):
                _LOG.info("event=devices_offered resource=%s devices=%d", resource, len(plugin.devices))
        kubelet = _identity(self._folder / _KUBELET)
        if kubelet is None:
            return self._log_failure(
                f"{self._folder / _KUBELET} is not there; the kubelet is starting, or the folder is not mounted"
            )
        is_new, self._kubelet = kubelet != self._kubelet, kubelet
        for plugin in self.plugins.values():
            if is_new or not plugin.is_serving:
                try:
                    await plugin.start()
                    await self._register(plugin)
                except (grpc.aio.AioRpcError, OSError, RuntimeError) as error:
                    self._kubelet = None
                    await plugin.stop()
                    return self._log_failure(f"{plugin.resource} could not be registered: {_describe_error(error)}")
        self.problem = ""
        return True

    def _made(self, resource: str) -> ResourcePlugin:
        socket = self._folder / f"eelgrid-{resource.rpartition('/')[2]}.sock"
        if len(str(socket).encode()) > _SOCKET_BYTES_MOST:
            socket = self._folder / f"eelgrid-{len(self.plugins)}.sock"
        plugin = ResourcePlugin(resource, socket, prefer=self._choose_devices, give=self._give)
        self.plugins[resource] = plugin
        return plugin

    def _choose_devices(self, asked: PreferredAllocationRequest) -> tuple[str, ...]:
        return choose_devices(asked, self._node())

    async def _register(self, plugin: ResourcePlugin) -> None:
        # gRPC tells UNIX peers apart by an authority that the kubelet's server must accept.
        options = [("grpc.default_authority", "localhost"), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(f"unix:{self._folder / _KUBELET}", options=options) as channel:
            call: _Call = channel.unary_unary(REGISTER_PATH)
            await call(encode_register_request(plugin.resource, plugin.socket.name), timeout=self._times.deadline_s)
        self.registrations_total += 1
        _LOG.info("event=registered resource=%s socket=%s", plugin.resource, plugin.socket.name)

    def _log_failure(self, problem: str) -> bool:
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


def _describe_error(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} ({error.details() or 'no reason given'})"
    return str(error)


def build_device_plugins(
    config: AgentConfig, node: AgentNode, kubelet: PodResourcesClient, *, given: Callable[[], None]
) -> DevicePlugins:
    """Offers what the inventory has, and prefers what the plan in force says; `given` hears of each allocation."""
    answer = allocate_by_cdi if config.device_plugin == "cdi" else allocate_by_environment

    def give(ids: tuple[str, ...]) -> ContainerAllocation:
        given()
        kubelet.refresh_soon()
        return answer(ids)

    def look() -> NodeDevices:
        plan, held = node.guard.plan, kubelet.containers or ()
        return NodeDevices(
            index_of=gpu_index_by_device(node.inventory.gpus),
            links=node.inventory.links,
            wanted=() if plan is None else planned_device_sets(plan.assignments),
            held=frozenset(device for container in held for _, device in container.devices),
            slices=memory_slices_by_device(node.inventory.gpus),
        )

    return DevicePlugins(
        config.device_plugins_folder,
        offers=lambda: build_offers(node.inventory.gpus, config.device_domain),
        node=look,
        give=give,
    )
