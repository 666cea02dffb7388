"""PodResources client, and the reporter that sends what pods hold to the controller.

Theory. The kubelet answers a hundred calls a second for all askers together
and refuses more, so one list every few seconds is asked for and kept. A
refused or failed call changes nothing until the last answer is too old; then
nothing is known, which is not the same as nothing being allocated. Where there
is no socket this is no node of Kubernetes: it is looked for again now and then,
and no channel is opened. After a failure the wait doubles, within a bound. Who has
just given devices away asks it to hurry: the next few answers come soon.

Theory (reporting). Allocate carries no word of whose pod it is, so nobody knows which pod has which
device until PodResources says so; the controller lets the next pod go when it has heard. So
after each Allocate the kubelet is asked within a second, and what it says is told even if it
reads as before: a pod of the same name may have the same device again. Otherwise only a
change is told. Ids are the driver's UUIDs; a replica of a shared device is told as the
device. While the kubelet does not answer nothing is told, which is not the same as nothing
being held.

Theory (leases). What the kubelet lists is leased to it beside other engines of the node, also what another plugin than ours
gave. A device that it lists no more is free, once that was said for long enough: between Allocate and the pod's admission
a device is in no list.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc
import grpc.aio

from eelgrid_agent.energy.allocations import DeviceReference, find_device, map_pod_allocations
from eelgrid_agent.enforce.device_leases import KUBELET_HOLDER, DeviceLeases
from eelgrid_agent.enforce.lease_table import LeaseDevice, find_place_device
from eelgrid_protos.errors import ContractError
from eelgrid_protos.kubelet_api import (
    ANSWER_BYTES_MOST,
    LIST_PATH,
    ContainerDevices,
    encode_list_request,
    parse_containers,
)
from eelgrid_protos.messages import PODS_WITH_DEVICES_MOST, Gpu, HeldDevices, PodDevices
from eelgrid_protos.values import dataclass

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
# A path in the name of a UNIX socket; the kernel takes no longer one.
_SOCKET_BYTES_MOST = 107
_Call = Callable[..., "grpc.aio.UnaryUnaryCall[bytes, bytes]"]


class PodResourcesError(Exception):
    """The kubelet could not be asked; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResourcesLimits:
    """Bounds of asking."""

    interval_s: float = 10.0
    # After an allocation, until what was given is seen.
    hurry_s: float = 0.5
    hurries: int = 4
    backoff_most_s: float = 60.0
    deadline_s: float = 5.0
    # An answer stands for so long: several refusals in a row, or a kubelet that starts anew.
    stands_s: float = 90.0


class PodResourcesClient:
    """The kubelet of this node."""

    def __init__(
        self, socket: Path = SOCKET, *, clock_s: Callable[[], float], limits: PodResourcesLimits | None = None
    ) -> None:
        if len(str(socket).encode()) > _SOCKET_BYTES_MOST:
            raise PodResourcesError(
                f"{socket}: a socket's path has at most {_SOCKET_BYTES_MOST} bytes; mount it nearer"
            )
        self._socket = socket
        self._clock_s = clock_s
        self._limits = limits or PodResourcesLimits()
        self._channel: grpc.aio.Channel | None = None
        self._containers: tuple[ContainerDevices, ...] | None = None
        self._answered_s = 0.0
        self._hurries = 0
        self._hurried = asyncio.Event()
        # Whoever is told of each answer puts itself here.
        self.heard: Callable[[tuple[ContainerDevices, ...]], None] = _nothing
        self.problem = "not asked yet"
        self.answers_total = 0
        self.failures_total = 0

    @property
    def containers(self) -> tuple[ContainerDevices, ...] | None:
        """The containers that hold devices; None while that is unknown."""
        if self._containers is None or self._clock_s() - self._answered_s > self._limits.stands_s:
            return None
        return self._containers

    async def run(self) -> None:
        """Asks until cancelled."""
        failures = 0
        try:
            while True:
                failures = 0 if await self.refresh() else failures + 1
                wait_s = self._limits.interval_s * 2.0 ** min(failures, 16)
                await self._wait_or_hurry(min(wait_s, max(self._limits.interval_s, self._limits.backoff_most_s)))
        finally:
            await self.close()

    def refresh_soon(self) -> None:
        """Ask soon, and a few times: something was given just now."""
        self._hurries = self._limits.hurries
        self._hurried.set()

    async def _wait_or_hurry(self, wait_s: float) -> None:
        if self._hurries == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._hurried.wait()
        self._hurried.clear()
        if self._hurries:
            self._hurries -= 1
            await asyncio.sleep(min(wait_s, self._limits.hurry_s))

    async def refresh(self) -> bool:
        """Reads once; False when the last answer stays in use, and `problem` says why."""
        try:
            containers = parse_containers(await self._call())
        except (PodResourcesError, ContractError) as error:
            self.failures_total += 1
            self.problem = str(error)
            return False
        self._containers, self._answered_s = containers, self._clock_s()
        self.answers_total += 1
        self.problem = ""
        self.heard(containers)
        return True

    async def close(self) -> None:
        """Closes the channel; it is opened again when needed."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _call(self) -> bytes:
        if not _is_socket(self._socket):
            raise PodResourcesError(
                f"{self._socket} is not a socket; mount the kubelet's pod-resources folder writable"
            )
        if self._channel is None:
            # gRPC tells UNIX peers apart by an authority that the kubelet's server must accept.
            options = [
                ("grpc.max_receive_message_length", ANSWER_BYTES_MOST),
                ("grpc.default_authority", "localhost"),
                ("grpc.enable_retries", 0),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", int(1000 * self._limits.interval_s)),
            ]
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=options)
        call: _Call = self._channel.unary_unary(LIST_PATH)
        try:
            answer: bytes = await call(encode_list_request(), timeout=self._limits.deadline_s)
        except grpc.aio.AioRpcError as error:
            raise PodResourcesError(_describe_error(error, self._socket)) from None
        return answer


def _describe_error(error: grpc.aio.AioRpcError, socket: Path) -> str:
    code = error.code()
    remedies = {
        grpc.StatusCode.RESOURCE_EXHAUSTED: "it limits the calls of all askers together; asking again later",
        grpc.StatusCode.UNAVAILABLE: (
            "the kubelet is starting, or permission is missing; run as root with the folder mounted writable"
        ),
        grpc.StatusCode.UNIMPLEMENTED: "it is too old for PodResources v1; use Kubernetes 1.20 or newer",
        grpc.StatusCode.DEADLINE_EXCEEDED: "it is overloaded; asking again later",
    }
    reason = error.details() or "no reason given"
    return f"the kubelet at {socket} answered {code.name} ({reason}); {remedies.get(code, 'see its log')}"


def _is_socket(path: Path) -> bool:
    """A folder that may not be entered holds no socket for us."""
    try:
        return path.is_socket()
    except OSError:
        return False


def _nothing(_containers: tuple[ContainerDevices, ...]) -> None:
    """Nobody listens yet."""


_NAME_MOST = 253


def build_held_devices(containers: Iterable[ContainerDevices], gpus: Iterable[Gpu], *, steers: bool) -> HeldDevices:
    """What each pod holds of these GPUs, in order of names; ids of other devices are passed over."""
    devices = tuple(gpus)
    by_place = {DeviceReference(gpu.uuid): gpu.uuid for gpu in devices}
    for gpu in devices:
        for instance in gpu.gpu_instances:
            parts = instance.compute_instances
            if parts and parts[0].uuid:
                by_place[DeviceReference(gpu.uuid, instance.id)] = parts[0].uuid
    found: dict[tuple[str, str], set[str]] = {}
    for one in containers:
        places = (find_device(device_id, devices) for _, device_id in one.devices)
        uuids = {by_place[place] for place in places if place in by_place}
        if uuids and len(one.namespace) <= _NAME_MOST and len(one.pod) <= _NAME_MOST:
            found.setdefault((one.namespace, one.pod), set()).update(uuids)
    pods = tuple(
        PodDevices(namespace=namespace, pod=pod, device_uuids=tuple(sorted(uuids)))
        for (namespace, pod), uuids in sorted(found.items())[:PODS_WITH_DEVICES_MOST]
    )
    return HeldDevices(steers=steers, pods=pods)


class AllocationReporter:
    """Reports each answer of the kubelet that differs from the last report, or that follows an allocation."""

    def __init__(
        self, *, gpus: Callable[[], tuple[Gpu, ...]], tell: Callable[[HeldDevices], None], steers: bool
    ) -> None:
        self._gpus = gpus
        self._tell = tell
        self._steers = steers
        self._told: HeldDevices | None = None
        self._is_due = False

    def on_allocated(self) -> None:
        """Records an allocation to a container: the next answer of the kubelet is reported even if it is equal."""
        self._is_due = True

    def on_containers(self, containers: Iterable[ContainerDevices]) -> None:
        """The kubelet has answered."""
        found = build_held_devices(containers, self._gpus(), steers=self._steers)
        if found != self._told or self._is_due:
            self._told, self._is_due = found, False
            self._tell(found)


# A device that the kubelet does not list is free after so many answers, and so many seconds.
_ABSENT_ANSWERS = 3
_ABSENT_S = 30.0


class PodLeases:
    """Keeps the leases of the kubelet equal to what it lists."""

    def __init__(
        self, leases: DeviceLeases, *, gpus: Callable[[], tuple[Gpu, ...]], clock_s: Callable[[], float]
    ) -> None:
        self._leases, self._gpus, self._clock_s = leases, gpus, clock_s
        # By serial: in how many answers it was absent, and since when.
        self._absent: dict[int, tuple[int, float]] = {}

    def on_containers(self, containers: Iterable[ContainerDevices]) -> None:
        """The kubelet has answered."""
        gpus, listed = self._gpus(), set[LeaseDevice]()
        for one in map_pod_allocations(containers, gpus):
            device = find_place_device(one.place.gpu_uuid, one.place.gpu_instance_id, gpus)
            if device is not None and device not in listed:
                listed.add(device)
                self._leases.adopt(KUBELET_HOLDER, (device,), note=f"pod {one.owner.namespace}/{one.owner.pod}")
        absent = [
            lease.serial
            for lease in self._leases.table.leases
            if lease.holder == KUBELET_HOLDER and lease.device not in listed
        ]
        now_s = self._clock_s()
        seen = {serial: self._absent.get(serial, (0, now_s)) for serial in absent}
        self._absent = {serial: (count + 1, since_s) for serial, (count, since_s) in seen.items()}
        self._leases.reclaim(
            [
                serial
                for serial, (count, since_s) in self._absent.items()
                if count >= _ABSENT_ANSWERS and now_s - since_s >= _ABSENT_S
            ]
        )
