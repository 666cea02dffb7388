"""The kubelet's APIs: encoding and parsing of device plugin, DRA plugin and PodResources messages.

Device plugin v1beta1, DRA v1 with plugin registration, and PodResources v1. Owns the only contact with their
generated code, the paths of their calls and the bounds of what is read; knows no sockets. A message that is malformed
or too large is refused as a whole with MalformedMessage: half an answer would make devices look free.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field

from google.protobuf.message import DecodeError, Message

from eelgrid_protos.errors import MalformedMessage, Violation
from eelgrid_protos.values import dataclass
from eelgrid_protos.wire import device_plugin_pb2, dra_pb2, pod_resources_pb2
from eelgrid_protos.wire import plugin_registration_pb2 as registration

_DEVICE_PLUGIN, _DRA_PLUGIN, _POD_RESOURCES = "DevicePlugin", "DRAPlugin", "PodResources"

# Device plugins: https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/

DEVICE_PLUGIN_VERSION = "v1beta1"
REGISTER_PATH = "/v1beta1.Registration/Register"
PLUGIN_SERVICE = "v1beta1.DevicePlugin"
# A kubelet asks for one pod at a time; a pod has at most a few hundred containers, a node a few hundred devices.
_REQUEST_CONTAINERS_MOST = 1024
_DEVICES_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedDevice:
    """A device that pods may be given; `numa_node` is None if unknown."""

    device_id: str
    is_healthy: bool = True
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferredAllocationRequest:
    """Asks which `size` of the available devices to prefer for one container, including all of `must`."""

    available: tuple[str, ...]
    must: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerAllocation:
    """Environment, annotations and CDI devices that a container is started with."""

    environment: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def encode_empty() -> bytes:
    """Encodes a request or answer without fields."""
    return b""


def encode_register_request(resource: str, endpoint: str) -> bytes:
    """Encodes a plugin's registration; `endpoint` is the name of its socket in the kubelet's directory."""
    return device_plugin_pb2.RegisterRequest(
        version=DEVICE_PLUGIN_VERSION, endpoint=endpoint, resource_name=resource, options=_options()
    ).SerializeToString()


def encode_plugin_options() -> bytes:
    """Encodes the plugin's options: it wants to be asked for preferred allocations."""
    return _options().SerializeToString()


def encode_device_list(devices: Iterable[OfferedDevice]) -> bytes:
    """Encodes the full list of devices of a resource, which replaces the previous one."""
    answer = device_plugin_pb2.ListAndWatchResponse()
    for one in devices:
        device = answer.devices.add(id=one.device_id, health="Healthy" if one.is_healthy else "Unhealthy")
        if one.numa_node is not None:
            device.topology.nodes.add(id=one.numa_node)
    return answer.SerializeToString()


def parse_preferred_request(data: bytes) -> tuple[PreferredAllocationRequest, ...]:
    """Parses the containers of a GetPreferredAllocation call; raises MalformedMessage."""
    request = device_plugin_pb2.PreferredAllocationRequest()
    _parse(request, data, _DEVICE_PLUGIN)
    asked = tuple(
        PreferredAllocationRequest(
            available=tuple(one.available_device_ids), must=tuple(one.must_include_device_ids), size=one.allocation_size
        )
        for one in request.container_requests
    )
    _check_request_size(len(asked), (len(one.available) for one in asked))
    return asked


def encode_preferred_response(chosen: Iterable[Iterable[str]]) -> bytes:
    """Encodes device ids by container, in the order of the request."""
    answer = device_plugin_pb2.PreferredAllocationResponse()
    for ids in chosen:
        answer.container_responses.add(device_ids=ids)
    return answer.SerializeToString()


def parse_allocate_request(data: bytes) -> tuple[tuple[str, ...], ...]:
    """Parses the device ids of each container of an Allocate call; raises MalformedMessage."""
    request = device_plugin_pb2.AllocateRequest()
    _parse(request, data, _DEVICE_PLUGIN)
    asked = tuple(tuple(one.device_ids) for one in request.container_requests)
    _check_request_size(len(asked), map(len, asked))
    return asked


def encode_allocate_response(given: Iterable[ContainerAllocation]) -> bytes:
    """Encodes what each container is started with, in the order of the request."""
    answer = device_plugin_pb2.AllocateResponse()
    for one in given:
        container = answer.container_responses.add(envs=one.environment, annotations=one.annotations)
        for name in one.cdi_devices:
            container.cdi_devices.add(name=name)
    return answer.SerializeToString()


def _options() -> device_plugin_pb2.DevicePluginOptions:
    return device_plugin_pb2.DevicePluginOptions(get_preferred_allocation_available=True)


def _check_request_size(containers: int, counts: Iterable[int]) -> None:
    if containers > _REQUEST_CONTAINERS_MOST or max(counts, default=0) > _DEVICES_MOST:
        raise _refused(
            _DEVICE_PLUGIN,
            "container_requests",
            f"asks for more than {_REQUEST_CONTAINERS_MOST} containers or {_DEVICES_MOST} devices",
        )


# Plugins of dynamic resource allocation.

DRA_SERVICE = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
REGISTRATION_SERVICE = "pluginregistration.Registration"
_VERSIONS = ("v1.DRAPlugin",)
# A pod has at most a few dozen claims, and the kubelet asks for one pod at a time.
_CLAIMS_MOST = 1024
_ERROR_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimReference:
    """Names of a claim; the uid distinguishes it from another of the same name."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """A device that is ready for these requests of a claim."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationStatus:
    """Result of the plugin's registration; `error` is set if the kubelet refused it."""

    is_registered: bool
    error: str = ""


def encode_plugin_info(driver: str, endpoint: str) -> bytes:
    """Encodes a plugin's description; `endpoint` is the path of its service's socket."""
    return registration.PluginInfo(
        type=_DRA_PLUGIN, name=driver, endpoint=endpoint, supported_versions=_VERSIONS
    ).SerializeToString()


def parse_registration_status(data: bytes) -> RegistrationStatus:
    """Parses the kubelet's result of a registration; raises MalformedMessage."""
    told = registration.RegistrationStatus()
    _parse(told, data, _DRA_PLUGIN)
    return RegistrationStatus(is_registered=told.plugin_registered, error=told.error)


def encode_registration_response() -> bytes:
    """Encodes an answer without fields."""
    return b""


def parse_claims(data: bytes) -> tuple[ClaimReference, ...]:
    """Parses the claims of a prepare or unprepare call; raises MalformedMessage."""
    request = dra_pb2.ClaimsRequest()
    _parse(request, data, _DRA_PLUGIN)
    if len(request.claims) > _CLAIMS_MOST:
        raise _refused(_DRA_PLUGIN, "claims", f"are {len(request.claims)}, more than {_CLAIMS_MOST}")
    return tuple(ClaimReference(namespace=one.namespace, name=one.name, uid=one.uid) for one in request.claims)


def encode_prepared_claims(claims: Mapping[str, tuple[PreparedDevice, ...] | str]) -> bytes:
    """Encodes, by uid, the devices of a claim, or why it is not ready."""
    answer = dra_pb2.PrepareResponse()
    for uid, outcome in claims.items():
        claim = answer.claims[uid]
        if isinstance(outcome, str):
            claim.error = outcome[:_ERROR_MOST]
            continue
        for one in outcome:
            claim.devices.add(
                request_names=one.requests, pool_name=one.pool, device_name=one.device, cdi_device_ids=one.cdi_ids
            )
    return answer.SerializeToString()


def encode_unprepared_claims(claims: Mapping[str, str]) -> bytes:
    """Encodes, by uid, why a claim was not unprepared; empty if it was."""
    answer = dra_pb2.UnprepareResponse()
    for uid, error in claims.items():
        answer.claims[uid].error = error[:_ERROR_MOST]
    return answer.SerializeToString()


# What containers hold.

LIST_PATH = "/v1.PodResourcesLister/List"

# 1,000 pods with eight devices each are some 600 kB.
ANSWER_BYTES_MOST = 4 * 1024 * 1024
# The kubelet runs 110 pods by default and some hundreds where it is tuned.
_CONTAINERS_MOST = 8192
_ID_LENGTH_MOST = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedDevice:
    """A device that a container holds through a ResourceClaim (DRA)."""

    claim_namespace: str
    claim: str
    driver: str
    pool: str
    device: str
    share_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerDevices:
    """Devices of one container: (resource, device id) pairs of device plugins, and claimed devices."""

    namespace: str
    pod: str
    container: str
    devices: tuple[tuple[str, str], ...] = ()
    claimed: tuple[ClaimedDevice, ...] = ()


def encode_list_request() -> bytes:
    """Encodes the request of List, which has no fields."""
    return pod_resources_pb2.ListPodResourcesRequest().SerializeToString()


def parse_containers(data: bytes) -> tuple[ContainerDevices, ...]:
    """Parses the containers of a List answer that hold any device; raises MalformedMessage."""
    answer = pod_resources_pb2.ListPodResourcesResponse()
    if len(data) > ANSWER_BYTES_MOST:
        raise _refused(_POD_RESOURCES, "", f"the answer has {len(data)} bytes and at most {ANSWER_BYTES_MOST} are read")
    _parse(answer, data, _POD_RESOURCES)
    found: list[ContainerDevices] = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            devices = _devices(container.devices)
            claimed = _claimed(container.dynamic_resources)
            if not devices and not claimed:
                continue
            if len(found) == _CONTAINERS_MOST:
                raise _refused(
                    _POD_RESOURCES, "pod_resources", f"holds more than {_CONTAINERS_MOST} containers with devices"
                )
            found.append(
                ContainerDevices(
                    namespace=pod.namespace, pod=pod.name, container=container.name, devices=devices, claimed=claimed
                )
            )
    return tuple(found)


def _devices(entries: Iterable[pod_resources_pb2.ContainerDevices]) -> tuple[tuple[str, str], ...]:
    pairs = [(entry.resource_name, device_id) for entry in entries for device_id in entry.device_ids]
    _check_devices(len(pairs), (text for pair in pairs for text in pair))
    return tuple(pairs)


def _claimed(entries: Iterable[pod_resources_pb2.DynamicResource]) -> tuple[ClaimedDevice, ...]:
    found = [
        ClaimedDevice(
            claim_namespace=entry.claim_namespace,
            claim=entry.claim_name,
            driver=resource.driver_name,
            pool=resource.pool_name,
            device=resource.device_name,
            share_id=resource.share_id,
        )
        for entry in entries
        for resource in entry.claim_resources
    ]
    _check_devices(len(found), (claimed.device for claimed in found))
    return tuple(found)


def _check_devices(count: int, texts: Iterable[str]) -> None:
    if count > _DEVICES_MOST:
        raise _refused(_POD_RESOURCES, "devices", f"one container holds {count} and at most {_DEVICES_MOST} are read")
    if any(len(text) > _ID_LENGTH_MOST for text in texts):
        raise _refused(_POD_RESOURCES, "device_ids", f"an id has more than {_ID_LENGTH_MOST} characters")


# For all three.

_REMEDIES = {
    _DEVICE_PLUGIN: "check that the caller is the kubelet",
    _DRA_PLUGIN: "check that the caller is the kubelet",
    _POD_RESOURCES: "check that the socket is the kubelet's",
}


def _parse(message: Message, data: bytes, api: str) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise _refused(api, "", f"the bytes are no message ({error})") from error


def _refused(api: str, field: str, problem: str) -> MalformedMessage:
    return MalformedMessage(api, (Violation(field, problem, _REMEDIES[api]),))
