"""Device plugins of the node: offered devices, preferred allocation, and one gRPC server for each resource.

A kubelet that restarts clears its socket folder, so a missing socket of the agent, or another inode of the kubelet's,
means that every resource has to be registered again; registering twice is harmless, and a registration that fails is
retried with a doubling, bounded wait. A resource whose last device is gone is offered as empty, and its plugin stays,
so a layout that returns needs no registration. The kubelet opens one stream of devices per resource and receives all
devices after each change. Allocate does not say which pod it is for; devices that are not offered or not healthy are
refused there, and the pod fails with the reason instead of starting without its device. What is given is leased first
(enforce/device_leases.py); what another engine of the node has leased is offered as unhealthy, and refused if it is asked for.

A GPU without MIG is one device of `nvidia.com/gpu`. A partitioned GPU offers each GPU instance whose single compute
instance covers all of it, under the name of its profile, as NVIDIA's plugin does with the strategy `mixed`:
`nvidia.com/mig-1g.10gb`, with `+` written as `.`. An instance with several compute instances is not offered. A GPU
between two modes offers nothing. A device that is lost or cordoned is offered as unhealthy: pods that hold it keep
running, and no other pod gets it. Ids are the driver's UUIDs, as in PodResources and NVML.

The preferred allocation is asked for by number and free devices, without a pod. The plan says which replica was placed
on which devices, so a set of that size whose devices are all free and unheld is taken: the controller admits one pod at
a time per node and resource, and two pods in flight have sets of one size, so either may have either. Without a plan
whole GPUs are taken as near to each other as possible: by active NVLinks between pairs, then by the nearest common
ancestor. Slices are chosen one by one as the controller chooses them (`mig_slices.py` there): on the fullest GPU in
use, else on one that has room for most of the request.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import grpc
import grpc.aio

from eelgrid_agent.enforce.device_leases import KUBELET_HOLDER, DeviceLeases
from eelgrid_agent.enforce.lease_table import LeaseRefused
from eelgrid_agent.kubelet.pod_resources import PodResourcesClient
from eelgrid_agent.node.config import AgentConfig
from eelgrid_agent.node.node import AgentNode
from eelgrid_protos.errors import ContractError
from eelgrid_protos.kubelet_api import (
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
from eelgrid_protos.messages import Assignment, Gpu, GpuInstance, GpuLink

# Beyond so many sets of devices they are taken one by one, each the nearest to those before.
_SETS_MOST = 20_000
# Farther than any ancestor that NVML names.
_FAR = 60


class NodeDevices(NamedTuple):
    """What the choice looks at."""

    index_of: Mapping[str, int]  # GPU of each device
    links: Sequence[GpuLink] = ()
    wanted: Sequence[frozenset[str]] = ()  # by the plan, the oldest first
    held: frozenset[str] = frozenset()  # by pods, as the kubelet says
    slices: Mapping[str, int] = MappingProxyType({})  # memory slices of each device that is one


def planned_device_sets(assignments: Iterable[Assignment]) -> tuple[frozenset[str], ...]:
    """The devices of each replica that the plan holds here."""
    return tuple(frozenset(item.gpu_uuids) for item in assignments if item.gpu_uuids)


def choose_devices(asked: PreferredAllocationRequest, node: NodeDevices) -> tuple[str, ...]:
    """So many devices as were asked for, those that must be among them first; fewer where so many are not free."""
    must = tuple(dict.fromkeys(asked.must))
    free = [one for one in dict.fromkeys(asked.available) if one not in must]
    count = asked.size - len(must)
    if count <= 0 or len(free) <= count:
        return (*must, *free[: max(0, count)])
    open_ = frozenset((*must, *free))
    node = node._replace(held=node.held - open_)
    for wanted in node.wanted:
        if len(wanted) == asked.size and wanted <= open_ and wanted.issuperset(must):
            return (*must, *sorted(wanted.difference(must)))
    spoken_for = frozenset[str]().union(*(wanted for wanted in node.wanted if not wanted & node.held))
    rest = [one for one in free if one not in spoken_for]
    rest = rest if len(rest) >= count else free
    if all(one in node.slices for one in rest):
        return (*must, *_fullest(must, rest, count, node))
    return (*must, *_near(must, rest, count, node))


def _fullest(must: Sequence[str], free: Sequence[str], count: int, node: NodeDevices) -> tuple[str, ...]:
    """Slices on GPUs in use first, the fullest of them; of equals the first by GPU and start."""
    among = frozenset(free)
    left = [one for one in node.slices if one in among]
    used: dict[int, int] = {}
    for one in (*node.held, *must):
        if one in node.index_of:
            used[node.index_of[one]] = used.get(node.index_of[one], 0) + node.slices.get(one, 0)
    chosen: list[str] = []
    while len(chosen) < count:
        room = Counter(node.index_of[one] for one in left)
        wanted = count - len(chosen)

        def order(one: str, room: Counter[int] = room, wanted: int = wanted) -> tuple[bool, int, int, int]:
            index = node.index_of[one]
            is_asleep = index not in used
            return is_asleep, -min(room[index], wanted) if is_asleep else 0, -used.get(index, 0), index

        best = min(left, key=order)
        chosen.append(best)
        left.remove(best)
        index = node.index_of[best]
        used[index] = used.get(index, 0) + node.slices[best]
    return tuple(chosen)


def _near(must: Sequence[str], free: Sequence[str], count: int, node: NodeDevices) -> tuple[str, ...]:
    near = _nearness(node.links)
    used = {node.index_of.get(one) for one in node.held}

    def apart(devices: Sequence[str]) -> tuple[int, int, tuple[int, ...]]:
        indexes = [node.index_of.get(one, -1) for one in devices]
        distance = sum(
            near.get(frozenset(pair), 0 if pair[0] == pair[1] else _FAR) for pair in combinations(indexes, 2)
        )
        opened = sum(index not in used for index in set(indexes))
        return distance, opened, tuple(sorted(indexes))

    if _sets(len(free), count) <= _SETS_MOST:
        return min(combinations(free, count), key=lambda some: apart((*must, *some)))
    chosen: list[str] = []
    for _ in range(count):
        left = [one for one in free if one not in chosen]
        chosen.append(min(left, key=lambda one: apart((*must, *chosen, one))))
    return tuple(chosen)


def _nearness(links: Iterable[GpuLink]) -> dict[frozenset[int], int]:
    """Less is nearer: a pair with NVLinks is below zero, the more the lower."""
    return {frozenset((link.one, link.other)): -100 * link.nvlinks if link.nvlinks else link.ancestor for link in links}


def _sets(count: int, size: int) -> int:
    """How many sets there are, or the bound and one more."""
    total = 1
    for number in range(size):
        total = total * (count - number) // (number + 1)
        if total > _SETS_MOST:
            return _SETS_MOST + 1
    return total


def whole_gpu_resource(domain: str) -> str:
    """The name of whole GPUs."""
    return f"{domain}/gpu"


def mig_profile_resource(domain: str, profile: str) -> str:
    """The name of slices of one profile."""
    return f"{domain}/mig-{profile.replace('+', '.')}"


def build_offers(
    gpus: Iterable[Gpu], domain: str, is_leased: Callable[[str], bool] = lambda _: False
) -> dict[str, tuple[OfferedDevice, ...]]:
    """The devices by resource name, in order of GPU index and start; `is_leased` says what another engine holds."""
    found: dict[str, list[OfferedDevice]] = {}
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        is_healthy = not (gpu.lost or gpu.cordon)
        if gpu.mig_pending:
            continue
        if not gpu.mig_enabled:
            is_free = is_healthy and not is_leased(gpu.uuid)
            found.setdefault(whole_gpu_resource(domain), []).append(_device(gpu.uuid, gpu, is_healthy=is_free))
            continue
        for instance in sorted(gpu.gpu_instances, key=lambda one: one.start):
            uuid = _whole_instance(instance)
            if uuid:
                devices = found.setdefault(mig_profile_resource(domain, instance.profile), [])
                devices.append(_device(uuid, gpu, is_healthy=is_healthy and not is_leased(uuid)))
    return {name: tuple(devices) for name, devices in found.items()}


def gpu_index_by_device(gpus: Iterable[Gpu]) -> Mapping[str, int]:
    """The index of the GPU that each device is on, by the device's id."""
    found: dict[str, int] = {}
    for gpu in gpus:
        found[gpu.uuid] = gpu.index
        found.update({uuid: gpu.index for one in gpu.gpu_instances if (uuid := _whole_instance(one))})
    return found


def memory_slices_by_device(gpus: Iterable[Gpu]) -> Mapping[str, int]:
    """How many memory slices each slice has, by the device's id; in order of GPU index and start."""
    return {
        uuid: one.size
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        for one in sorted(gpu.gpu_instances, key=lambda one: one.start)
        if (uuid := _whole_instance(one))
    }


def _whole_instance(instance: GpuInstance) -> str:
    """The UUID of the compute instance that is the whole of a GPU instance; empty where there is none."""
    parts = instance.compute_instances
    return parts[0].uuid if len(parts) == 1 else ""


def _device(uuid: str, gpu: Gpu, *, is_healthy: bool) -> OfferedDevice:
    return OfferedDevice(device_id=uuid, is_healthy=is_healthy, numa_node=gpu.numa_node)


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
        lease: Callable[[Sequence[str]], object] = list,
    ) -> None:
        """`lease` is called with all devices before they are given, and raises LeaseRefused."""
        self._lease = lease
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
        """The offered devices."""
        return self._devices

    @property
    def is_serving(self) -> bool:
        """Whether its socket exists: a kubelet that restarts removes all sockets."""
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
        """Starts to serve, replacing an earlier server."""
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
                f"{strange[0]} is gone or unhealthy since the last update to the kubelet; recreate the pod",
            )
        try:
            self._lease([one for ids in asked for one in ids])
        except LeaseRefused as refused:
            self.refused_total += 1
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused))
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
    """Serves the result of `offers`, which is called at each look; `node` is the state that preferences use."""

    def __init__(
        self,
        folder: Path,
        *,
        offers: Callable[[], Mapping[str, tuple[OfferedDevice, ...]]],
        node: Callable[[], NodeDevices],
        give: Callable[[tuple[str, ...]], ContainerAllocation],
        lease: Callable[[Sequence[str]], object] = list,
        times: PluginTimes | None = None,
    ) -> None:
        self._lease = lease
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
        """Sends changes to the kubelet; False where that failed, and `problem` says why."""
        offers = self._offers()
        for resource in offers.keys() | self.plugins.keys():
            plugin = self.plugins.get(resource) or self._made(resource)
            if plugin.update_devices(offers.get(resource, ())):
                _LOG.info("event=devices_offered resource=%s devices=%d", resource, len(plugin.devices))
        kubelet = _identity(self._folder / _KUBELET)
        if kubelet is None:
            return self._log_failure(
                f"{self._folder / _KUBELET} does not exist; the kubelet is starting, or the folder is not mounted"
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
        plugin = ResourcePlugin(resource, socket, prefer=self._choose_devices, give=self._give, lease=self._lease)
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
    config: AgentConfig,
    node: AgentNode,
    kubelet: PodResourcesClient,
    leases: DeviceLeases,
    *,
    given: Callable[[], None],
) -> DevicePlugins:
    """Builds plugins that offer the inventory and prefer the devices of the plan.

    `given` is called for each allocation.
    """
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
        offers=lambda: build_offers(
            node.inventory.gpus,
            config.device_domain,
            lambda uuid: leases.find_conflict(KUBELET_HOLDER, uuid) is not None,
        ),
        node=look,
        give=give,
        lease=lambda ids: leases.take(KUBELET_HOLDER, ids),
    )
