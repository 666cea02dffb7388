"""Kubelet device plugin API v1beta1: encoding and parsing of its messages.

Owns the only contact with its generated code, the paths of its calls and the bounds of what
is read. Must not know sockets, nor which device is to be preferred.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from eelgrid_protos.errors import MalformedMessage, Violation
from eelgrid_protos.wire import device_plugin_pb2 as wire

DEVICE_PLUGIN_VERSION = "v1beta1"
REGISTER_PATH = "/v1beta1.Registration/Register"
PLUGIN_SERVICE = "v1beta1.DevicePlugin"
# A kubelet asks for one pod at a time; a pod has at most a few hundred containers, a node a few hundred devices.
_CONTAINERS_MOST = 1024
_IDS_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedDevice:
    """One device that pods may be given; `numa_node` is None where nobody knows it."""

    device_id: str
    is_healthy: bool = True
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferredAllocationRequest:
    """So many of the available devices are wanted for one container, those of `must` among them."""

    available: tuple[str, ...]
    must: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerAllocation:
    """What a container is started with."""

    environment: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def encode_empty() -> bytes:
    """Requests and answers without any field."""
    return b""


def encode_register_request(resource: str, endpoint: str) -> bytes:
    """Makes a plugin known; `endpoint` is its socket's name within the kubelet's folder."""
    return wire.RegisterRequest(
        version=DEVICE_PLUGIN_VERSION, endpoint=endpoint, resource_name=resource, options=_options()
    ).SerializeToString()


def encode_plugin_options() -> bytes:
    """What the plugin wants to be asked."""
    return _options().SerializeToString()


def encode_device_list(devices: Iterable[OfferedDevice]) -> bytes:
    """All devices of a resource, in the stead of those that were told before."""
    answer = wire.ListAndWatchResponse()
    for one in devices:
        device = answer.devices.add(id=one.device_id, health="Healthy" if one.is_healthy else "Unhealthy")
        if one.numa_node is not None:
            device.topology.nodes.add(id=one.numa_node)
    return answer.SerializeToString()


def parse_preferred_request(data: bytes) -> tuple[PreferredAllocationRequest, ...]:
    """The containers of a GetPreferredAllocation call; raises MalformedMessage."""
    request = wire.PreferredAllocationRequest()
    _parse(request, data)
    asked = tuple(
        PreferredAllocationRequest(
            available=tuple(one.available_device_ids),
            must=tuple(one.must_include_device_ids),
            size=one.allocation_size,
        )
        for one in request.container_requests
    )
    _bound(len(asked), (len(one.available) for one in asked))
    return asked


def encode_preferred_response(chosen: Iterable[Iterable[str]]) -> bytes:
    """Device ids by container, in the order in which they were asked for."""
    answer = wire.PreferredAllocationResponse()
    for ids in chosen:
        answer.container_responses.add(device_ids=ids)
    return answer.SerializeToString()


def parse_allocate_request(data: bytes) -> tuple[tuple[str, ...], ...]:
    """The device ids of each container of an Allocate call; raises MalformedMessage."""
    request = wire.AllocateRequest()
    _parse(request, data)
    asked = tuple(tuple(one.device_ids) for one in request.container_requests)
    _bound(len(asked), map(len, asked))
    return asked


def encode_allocate_response(given: Iterable[ContainerAllocation]) -> bytes:
    """What each container is started with, in the order in which they were asked for."""
    answer = wire.AllocateResponse()
    for one in given:
        container = answer.container_responses.add(envs=one.environment, annotations=one.annotations)
        for name in one.cdi_devices:
            container.cdi_devices.add(name=name)
    return answer.SerializeToString()


def _options() -> wire.DevicePluginOptions:
    return wire.DevicePluginOptions(get_preferred_allocation_available=True)


def _parse(request: wire.PreferredAllocationRequest | wire.AllocateRequest, data: bytes) -> None:
    try:
        request.ParseFromString(data)
    except DecodeError as error:
        raise _malformed("", f"the bytes are no message ({error})") from error


def _bound(containers: int, counts: Iterable[int]) -> None:
    if containers > _CONTAINERS_MOST or max(counts, default=0) > _IDS_MOST:
        raise _malformed(
            "container_requests", f"asks for more than {_CONTAINERS_MOST} containers or {_IDS_MOST} devices"
        )


def _malformed(field_: str, problem: str) -> MalformedMessage:
    return MalformedMessage("DevicePlugin", (Violation(field_, problem, "check that the caller is the kubelet"),))
