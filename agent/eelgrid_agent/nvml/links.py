"""NVLink and nearness: counters over all links of a device, and where links end.

Links are walked from 0 until one does not answer, since no call tells their
number on every part. Counters come in one call for all links. Ids of error
counters changed with Blackwell: the older totals are asked first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml

from eelgrid_agent.device import GpuLink
from eelgrid_agent.nvml.fields import Field, field_id, field_values
from eelgrid_agent.nvml.session import SILENT, ask, reason_of
from eelgrid_agent.nvml.ways import Source, Way
from eelgrid_protos.messages import Gpu, Reading

__all__ = ["link_sources", "topology"]

_LINKS_MOST = int(pynvml.NVML_NVLINK_MAX_LINKS)
_KIB = 1024.0
_OLD_ERRORS = (
    Field.NVLINK_CRC_FLIT_ERRORS, Field.NVLINK_CRC_DATA_ERRORS, Field.NVLINK_REPLAY_ERRORS,
    Field.NVLINK_RECOVERY_ERRORS,
)  # fmt: skip
_NEW_ERRORS = (
    Field.NVLINK_MALFORMED, Field.NVLINK_OVERRUNS, Field.NVLINK_RECEIVE_ERRORS, Field.NVLINK_INTEGRITY_ERRORS,
)  # fmt: skip


def link_sources(branch: int) -> tuple[Source, ...]:
    """How the NVLink readings are had from this driver branch."""
    sent, received = field_id(Field.NVLINK_SENT_KIB, branch), field_id(Field.NVLINK_RECEIVED_KIB, branch)
    moved = () if sent is None or received is None else (_traffic(sent, received),)
    new = [number for number in (field_id(name, branch) for name in _NEW_ERRORS) if number is not None]
    old = [number for number in (field_id(name, branch) for name in _OLD_ERRORS) if number is not None]
    return (
        Source((Reading.NVLINK_SENT_BYTES, Reading.NVLINK_RECEIVED_BYTES), moved),
        Source((Reading.NVLINK_ACTIVE_LINKS,), (_active_links,)),
        Source((Reading.NVLINK_ERRORS,), (_error_totals(old), *((_error_counts(new),) if new else ()))),
    )


def _traffic(sent: int, received: int) -> Way:
    def walk(handle: Any) -> tuple[float, float]:
        asked = [(number, link) for link in range(_LINKS_MOST) for number in (sent, received)]
        values = field_values(handle, asked)
        totals, links = [0, 0], 0
        for pair in zip(values[::2], values[1::2], strict=True):
            if pair[0] is None or pair[1] is None:
                break
            totals, links = [totals[0] + pair[0], totals[1] + pair[1]], links + 1
        if not links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return totals[0] * _KIB, totals[1] * _KIB

    return walk


def _active_links(handle: Any) -> tuple[float]:
    active = 0
    for link in range(_LINKS_MOST):
        state = ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            if link == 0:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            break
        active += bool(state)
    return (float(active),)


def _error_totals(numbers: Sequence[int]) -> Way:
    def total(handle: Any) -> tuple[float]:
        return (_sum(field_values(handle, [(number, 0) for number in numbers])),)

    return total


def _error_counts(numbers: Sequence[int]) -> Way:
    def count(handle: Any) -> tuple[float]:
        asked = [(number, link) for link in range(_LINKS_MOST) for number in numbers]
        return (_sum(field_values(handle, asked)),)

    return count


def _sum(values: Sequence[int | None]) -> float:
    known = [value for value in values if value is not None]
    if not known:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return float(sum(known))


@dataclass(slots=True)
class _Ends:
    """How many active links of a device end at a switch, and at each other device by PCI address."""

    switches: int = 0
    devices: dict[str, int] = field(default_factory=dict)


def topology(gpus: Sequence[Gpu], handles: Mapping[str, Any]) -> tuple[GpuLink, ...]:
    """Every pair of the devices that answer, once, in the order given."""
    ends: dict[str, _Ends] = {}
    for gpu in gpus:
        try:
            if gpu.uuid in handles:
                ends[gpu.uuid] = _ends(handles[gpu.uuid])
        except pynvml.NVMLError:
            # A silent device has no neighbours.
            continue
    answering = [gpu for gpu in gpus if gpu.uuid in ends]
    links = []
    for place, one in enumerate(answering):
        for other in answering[place + 1 :]:
            try:
                level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[one.uuid], handles[other.uuid])
            except pynvml.NVMLError:
                # The driver does not tell, or one of the two fell silent.
                continue
            mine, yours = ends[one.uuid], ends[other.uuid]
            between = mine.devices.get(_address(other.pci_bus_id), 0) or min(mine.switches, yours.switches)
            links.append(GpuLink(one=one.uuid, other=other.uuid, ancestor=int(level), nvlinks=between))
    return tuple(links)


def _ends(handle: Any) -> _Ends:
    """Where the active links end; raises NVMLError when the device is silent."""
    found = _Ends()
    for link in range(_LINKS_MOST):
        state = ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break
        if not state:
            continue
        if ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            found.switches += 1
            continue
        try:
            address = _address(str(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        except pynvml.NVMLError as error:
            if reason_of(error) in SILENT:
                raise
            continue
        found.devices[address] = found.devices.get(address, 0) + 1
    return found


def _address(bus_id: str) -> str:
    """A PCI address without its domain's leading zeros, which not every call writes."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0') or '0'}:{rest}"
