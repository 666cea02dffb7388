"""Kubelet PodResources API v1: parsing of containers and the device ids that they hold.

Owns the only contact with its generated code, the paths of its calls and the
bounds of an answer. Must not know sockets, nor what a device id means. What is
malformed or too large is refused as a whole: half an answer would make devices
look free.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from eelgrid_protos.errors import MalformedMessage, Violation
from eelgrid_protos.wire import pod_resources_pb2 as wire

LIST_PATH = "/v1.PodResourcesLister/List"
ALLOCATABLE_PATH = "/v1.PodResourcesLister/GetAllocatableResources"

# 1,000 pods with eight devices each are some 600 kB.
ANSWER_BYTES_MOST = 4 * 1024 * 1024
# The kubelet runs 110 pods by default and some hundreds where it is tuned.
_CONTAINERS_MOST = 8192
_IDS_MOST = 4096
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
    """What one container holds: (resource, device id) pairs of device plugins, and claimed devices."""

    namespace: str
    pod: str
    container: str
    devices: tuple[tuple[str, str], ...] = ()
    claimed: tuple[ClaimedDevice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatableDevices:
    """What the kubelet could give to containers: (resource, device id) pairs."""

    devices: tuple[tuple[str, str], ...] = ()


def encode_list_request() -> bytes:
    """Both calls ask without parameters."""
    return wire.ListPodResourcesRequest().SerializeToString()


def parse_containers(data: bytes) -> tuple[ContainerDevices, ...]:
    """The containers of a List answer that hold any device; raises MalformedMessage."""
    answer = wire.ListPodResourcesResponse()
    _parse(answer, data)
    found: list[ContainerDevices] = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            devices = _devices(container.devices)
            claimed = _parse_claimed(container.dynamic_resources)
            if not devices and not claimed:
                continue
            if len(found) == _CONTAINERS_MOST:
                raise _malformed("pod_resources", f"holds more than {_CONTAINERS_MOST} containers with devices")
            found.append(
                ContainerDevices(
                    namespace=pod.namespace, pod=pod.name, container=container.name, devices=devices, claimed=claimed
                )
            )
    return tuple(found)


def parse_allocatable(data: bytes) -> AllocatableDevices:
    """The devices of a GetAllocatableResources answer; raises MalformedMessage."""
    answer = wire.AllocatableResourcesResponse()
    _parse(answer, data)
    return AllocatableDevices(devices=_devices(answer.devices))


def _parse(answer: wire.ListPodResourcesResponse | wire.AllocatableResourcesResponse, data: bytes) -> None:
    if len(data) > ANSWER_BYTES_MOST:
        raise _malformed("", f"the answer has {len(data)} bytes and at most {ANSWER_BYTES_MOST} are read")
    try:
        answer.ParseFromString(data)
    except DecodeError as error:
        raise _malformed("", f"the bytes are no message ({error})") from error


def _devices(entries: Iterable[wire.ContainerDevices]) -> tuple[tuple[str, str], ...]:
    pairs = [(entry.resource_name, device_id) for entry in entries for device_id in entry.device_ids]
    _bound(len(pairs), (text for pair in pairs for text in pair))
    return tuple(pairs)


def _parse_claimed(entries: Iterable[wire.DynamicResource]) -> tuple[ClaimedDevice, ...]:
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
    _bound(len(found), (claimed.device for claimed in found))
    return tuple(found)


def _bound(count: int, texts: Iterable[str]) -> None:
    if count > _IDS_MOST:
        raise _malformed("devices", f"one container holds {count} and at most {_IDS_MOST} are read")
    if any(len(text) > _ID_LENGTH_MOST for text in texts):
        raise _malformed("device_ids", f"an id has more than {_ID_LENGTH_MOST} characters")


def _malformed(field: str, problem: str) -> MalformedMessage:
    remedy = "check that the socket is the kubelet's"
    return MalformedMessage("PodResources", (Violation(field, problem, remedy),))
