"""DRA driver: kubelet registration, publication of ResourceSlices, and the prepare and unprepare calls.

The kubelet finds the registration socket in its folder by itself, also after a restart, asks there for the path of the
other socket and reports the result; the agent serves both, and serves again where a socket is gone. Slices are
published once the kubelet knows the driver, since no pod could be prepared before. They stay when the agent ends,
because it usually returns within seconds. A claim is read from the API server before the driver thread is used, so a
slow API server delays no change of a layout, and a prepared claim needs no API server at all.

All slices of a pool carry one generation, and readers use only the highest complete one; so any change rewrites all
slices under the next number, and a change that was interrupted leaves no half-written pool in use. The objects at the
server are read each time, because a kubelet that restarts removes the slices of drivers that are late; on a conflict
with another writer they are read again.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from eelgrid_agent.devices.port import ControlPort, DevicePort
from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.kubelet.claim_preparation import (
    CdiFolder,
    ClaimJournal,
    ClaimPreparer,
    ClaimUnpreparable,
    LayoutDevices,
)
from eelgrid_agent.kubelet.kube_client import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiNotFound,
    KubeApiClient,
    find_api_address,
)
from eelgrid_agent.kubelet.resource_slices import DRA_DRIVER, GpuConditionTracker, build_resource_slices
from eelgrid_agent.node.config import AgentConfig
from eelgrid_agent.node.loop import DriverThread
from eelgrid_agent.node.node import AgentNode
from eelgrid_agent.state_files import StateFileError
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.errors import ContractError
from eelgrid_protos.kubelet_api import (
    DRA_SERVICE,
    REGISTRATION_SERVICE,
    ClaimReference,
    PreparedDevice,
    encode_plugin_info,
    encode_prepared_claims,
    encode_registration_response,
    encode_unprepared_claims,
    parse_claims,
    parse_registration_status,
)

SLICES_PATH = "/apis/resource.k8s.io/v1/resourceslices"
_ROUNDS = 3
_SLICES_MOST = "500"
# What the API server adds by itself.
_ADDED = ("timeAdded",)

# The objects of a generation, for the node of this uid.
BuildSlices = Callable[[int, str], Sequence[dict[str, Any]]]


class ResourceSlicePublisher:
    """The slices of one node."""

    def __init__(self, api: KubeApiClient, node_name: str) -> None:
        self._api = api
        self._node_name = node_name
        self._owner_uid: str | None = None
        self.writes_total = 0

    def publish_slices(self, draw: BuildSlices) -> int:
        """Brings the API server to the result of `draw`; returns how many objects were written. Raises ApiError."""
        for attempt in range(_ROUNDS):
            try:
                written = self._publish(draw)
            except (ApiConflict, ApiNotFound):
                if attempt + 1 == _ROUNDS:
                    raise
            else:
                self.writes_total += written
                return written
        raise AssertionError("the last round returns or raises")

    def withdraw_slices(self) -> int:
        """Takes all slices of this node away; how many there were. Raises ApiError."""
        return self.publish_slices(lambda _, __: ())

    def _publish(self, draw: BuildSlices) -> int:
        standing = {str(one["metadata"]["name"]): one for one in self._list_slices()}
        generation = max((int(one["spec"]["pool"]["generation"]) for one in standing.values()), default=0)
        owner = self._owner()
        wanted = {one["metadata"]["name"]: one for one in draw(max(1, generation), owner)}
        if wanted.keys() == standing.keys() and all(_is_like(standing[name], one) for name, one in wanted.items()):
            return 0
        if standing:
            wanted = {one["metadata"]["name"]: one for one in draw(generation + 1, owner)}
        for name, one in wanted.items():
            if name in standing:
                version = standing[name]["metadata"]["resourceVersion"]
                metadata = {**one["metadata"], "resourceVersion": version}
                self._api.replace(f"{SLICES_PATH}/{name}", {**one, "metadata": metadata})
            else:
                self._api.create(SLICES_PATH, one)
        surplus = standing.keys() - wanted.keys()
        for name in sorted(surplus):
            self._api.delete(f"{SLICES_PATH}/{name}")
        return len(wanted) + len(surplus)

    def _list_slices(self) -> list[dict[str, Any]]:
        selector = f"spec.driver={DRA_DRIVER},spec.nodeName={self._node_name}"
        found = self._api.get(SLICES_PATH, fieldSelector=selector, limit=_SLICES_MOST)
        return list(found.get("items", ()))

    def _owner(self) -> str:
        """The node's uid; empty where we may not read it: then slices outlive a node that is deleted."""
        if self._owner_uid is None:
            try:
                node = self._api.get(f"/api/v1/nodes/{self._node_name}")
            except ApiForbidden:
                self._owner_uid = ""
            else:
                self._owner_uid = str(node["metadata"]["uid"])
        return self._owner_uid


def _is_like(standing: dict[str, Any], wanted: dict[str, Any]) -> bool:
    owners = [one.get("uid") for one in standing["metadata"].get("ownerReferences", ())]
    asked = [one["uid"] for one in wanted["metadata"].get("ownerReferences", ())]
    return owners == asked and bool(_bare(standing["spec"]) == _bare(wanted["spec"]))


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(one) for key, one in value.items() if key not in _ADDED}
    if isinstance(value, list):
        return [_bare(one) for one in value]
    return value


_LOG = logging.getLogger("eelgrid.agent")
_Context = grpc.aio.ServicerContext[bytes, bytes]
# Of the path of a UNIX socket; the kernel takes no longer one.
_SOCKET_BYTES_MOST = 107
_WAIT_S = 0.1


class SocketPathTooLong(Exception):
    """The kubelet's folder lies too deep for a socket in it."""


class DraTimes(NamedTuple):
    """Intervals of checking sockets and devices, of comparing slices, and the longest wait after a failure."""

    look_s: float = 1.0
    publish_s: float = 30.0
    backoff_most_s: float = 60.0


class DriverThreads(NamedTuple):
    """The threads for blocking work: each runs one function at a time, in order."""

    devices: Callable[[Callable[[], Any]], Awaitable[Any]]
    claims: Callable[[Callable[[], Any]], Awaitable[Any]]
    slices: Callable[[Callable[[], Any]], Awaitable[Any]]


class DraDriver:
    """Serves in the kubelet's `folder`; `read` fetches a ResourceClaim, `look` returns how to draw the current slices.

    Nothing is served or changed before `is_recovered` reports that the layouts were recovered.
    """

    def __init__(
        self,
        folder: Path,
        readying: ClaimPreparer,
        publisher: ResourceSlicePublisher,
        *,
        read: Callable[[str, str], Mapping[str, Any]],
        look: Callable[[], BuildSlices],
        threads: DriverThreads,
        is_recovered: Callable[[], bool] = lambda: True,
        times: DraTimes | None = None,
    ) -> None:
        self.socket = folder / "plugins" / DRA_DRIVER / "dra.sock"
        self.registration = folder / "plugins_registry" / f"{DRA_DRIVER}-reg.sock"
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

    @property
    def is_restored(self) -> bool:
        """Whether the claims that stand were leased since the start."""
        return self._readying.is_restored

    async def run(self) -> None:
        """Serve until cancelled."""
        # It becomes so on a thread that knows no event loop.
        while not self._is_recovered():  # noqa: ASYNC110
            await asyncio.sleep(_WAIT_S)
        await self._threads.devices(self._readying.restore_leases)
        publishing = asyncio.create_task(self._keep_published())
        try:
            while True:
                await self._observe_devices()
                await asyncio.sleep(self._times.look_s)
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            await self.stop()

    async def start(self) -> None:
        """Starts to serve, replacing an earlier server."""
        await self.stop()
        server = grpc.aio.server()
        unary = grpc.unary_unary_rpc_method_handler
        services: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = {
            DRA_SERVICE: {
                "NodePrepareResources": unary(self._prepare),
                "NodeUnprepareResources": unary(self._unprepare),
            },
            REGISTRATION_SERVICE: {
                "GetInfo": unary(self._get_info),
                "NotifyRegistrationStatus": unary(self._on_registration),
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
        """Stops serving; prepared claims stay prepared."""
        server, self._server = self._server, None
        with contextlib.suppress(OSError):
            self.registration.unlink(missing_ok=True)
        if server is not None:
            await server.stop(None)

    async def _observe_devices(self) -> None:
        if self._server is not None and self.socket.exists() and self.registration.exists():
            return
        try:
            await self.start()
        except (OSError, RuntimeError) as error:
            await self.stop()
            self._log_failure(
                f"nothing can be served in {self.registration.parent}: {error}; mount the kubelet's folder"
            )

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
                await self._threads.devices(self._readying.collect_leftovers)
            wait_s = min(self._times.look_s * 2.0 ** min(failures, 8), self._times.backoff_most_s)
            await asyncio.sleep(wait_s)
            since_s, tidied_s = since_s + wait_s, tidied_s + wait_s

    async def _publish(self, draw: BuildSlices, drawn: Sequence[dict[str, Any]]) -> bool:
        try:
            written = await self._threads.slices(lambda: self._publisher.publish_slices(draw))
        except ApiError as error:
            self._published = None
            self._log_failure(f"slices could not be published: {error}")
            return False
        if written:
            _LOG.info("event=slices_published objects=%d", written)
        self._published = drawn
        self.problem = ""
        return True

    def _log_failure(self, problem: str) -> None:
        if problem != self.problem:
            _LOG.warning("event=dra_failed reason=%r", problem)
        self.problem = problem

    # The kubelet's calls

    async def _get_info(self, request: bytes, context: _Context) -> bytes:  # noqa: ARG002
        return encode_plugin_info(DRA_DRIVER, str(self.socket))

    async def _on_registration(self, request: bytes, context: _Context) -> bytes:
        try:
            told = parse_registration_status(request)
        except ContractError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if told.is_registered:
            _LOG.info("event=dra_registered driver=%s", DRA_DRIVER)
            # A kubelet that started anew may have taken our slices away.
            self._published = None
            self._registered.set()
        else:
            self._log_failure(f"the kubelet rejected the driver: {told.error}")
        return encode_registration_response()

    async def _prepare(self, request: bytes, context: _Context) -> bytes:
        outcomes: dict[str, tuple[PreparedDevice, ...] | str] = {}
        for asked in await self._parse_claims(request, context):
            try:
                outcomes[asked.uid] = await self._prepare_claim(asked)
                self.ready_total += 1
            except (ClaimUnpreparable, StateFileError, ApiError) as error:
                self.refused_total += 1
                outcomes[asked.uid] = f"claim {asked.namespace}/{asked.name}: {error}"
                _LOG.warning("event=claim_refused claim=%s/%s reason=%r", asked.namespace, asked.name, str(error))
        return encode_prepared_claims(outcomes)

    async def _unprepare(self, request: bytes, context: _Context) -> bytes:
        outcomes: dict[str, str] = {}
        for asked in await self._parse_claims(request, context):
            outcomes[asked.uid] = ""
            try:
                await self._threads.devices(lambda asked=asked: self._readying.unprepare_claim(asked))  # type: ignore[misc]
            except ClaimUnpreparable as error:
                outcomes[asked.uid] = f"claim {asked.namespace}/{asked.name}: {error}"
        return encode_unprepared_claims(outcomes)

    @staticmethod
    async def _parse_claims(request: bytes, context: _Context) -> tuple[ClaimReference, ...]:
        try:
            return parse_claims(request)
        except ContractError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _prepare_claim(self, asked: ClaimReference) -> tuple[PreparedDevice, ...]:
        known = await self._threads.devices(self._readying.prepared_claims)
        claim = None
        if asked.uid not in known:
            claim = await self._threads.claims(lambda: self._read(asked.namespace, asked.name))
        devices: tuple[PreparedDevice, ...] = await self._threads.devices(
            lambda: self._readying.prepare_claim(asked, claim)
        )
        return devices


CLAIMS_FILE = "claims.json"


def run_on_thread(thread: DriverThread) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
    """Runs functions on a thread, in order."""
    return lambda work: asyncio.wrap_future(thread.call(work))


def build_dra_driver(
    config: AgentConfig,
    node: AgentNode,
    device: DevicePort,
    control: ControlPort,
    layouts: MigService,
    *,
    slow_driver: DriverThread,
    directory: Path | None,
    cannot_change: str,
    leases: DeviceLeases | None = None,
) -> DraDriver:
    """Builds the driver; raises ApiUnreachable where the address of the API server is unknown, and SocketPathTooLong.

    Claims are stored in `directory`; without one, and where something forbids it, no device is changed.
    """
    address = find_api_address(config.api_server, config.api_credentials, os.environ)
    catalogue, conditions = load_catalogue(), GpuConditionTracker()
    name = config.kubernetes_node or node.inventory.node_name

    def changed() -> None:
        # What befell is told from the event loop's next look; here only what stands is read anew.
        node.survey_due = True

    readying = ClaimPreparer(
        name,
        LayoutDevices(device, control, layouts),
        ClaimJournal(None if directory is None else directory / CLAIMS_FILE),
        catalogue,
        cannot_change=cannot_change,
        cdi=None if config.cdi_folder is None else CdiFolder(config.cdi_folder),
        changed=changed,
        leases=leases,
    )
    reading = KubeApiClient(address, sleep=time.sleep)

    def read(namespace: str, claim: str) -> Mapping[str, Any]:
        return reading.get(f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{claim}")

    def look() -> BuildSlices:
        found = conditions.observe(dict(node.quick), time.monotonic())
        gpus = node.inventory.gpus

        def draw(generation: int, owner_uid: str) -> Sequence[dict[str, Any]]:
            return build_resource_slices(
                name,
                gpus,
                catalogue,
                conditions=found,
                is_changeable=not cannot_change,
                generation=generation,
                owner_uid=owner_uid,
            )

        return draw

    return DraDriver(
        config.kubelet_folder,
        readying,
        ResourceSlicePublisher(KubeApiClient(address, sleep=time.sleep), name),
        read=read,
        look=look,
        is_recovered=lambda: layouts.is_recovered,
        threads=DriverThreads(
            devices=run_on_thread(slow_driver),
            claims=run_on_thread(DriverThread()),
            slices=run_on_thread(DriverThread()),
        ),
    )
