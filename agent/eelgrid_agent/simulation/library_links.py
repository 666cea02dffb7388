"""The symbols of the simulated library about nearness: PCIe ancestors, NVLinks and their ends, the fabric."""

from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, behind, put
from eelgrid_agent.simulation.library_identity import write_pci
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.wiring import SWITCH, ancestor, link_end

__all__ = ["link_symbols"]

_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
_MISMATCH = int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
# An NVSwitch has a PCI address too; this one is no GPU's.
_SWITCH_BUS_ID = b"00000000:F0:00.0"


def link_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    """All of them, by name."""

    def common_ancestor(gpu: SimGpu, other: Any, ref: Any) -> int:
        target = handles.target_of(other)
        if target is None or target.instance is not None or target.gpu is gpu:
            return _INVALID
        return target.trouble(node) or put(ref, ancestor(gpu, target.gpu))

    def no_link(gpu: SimGpu) -> int:
        """What is said of a link past the last one."""
        return _INVALID if node.sensors(gpu).traits.links else _NOT_SUPPORTED

    def state(gpu: SimGpu, link: int, ref: Any) -> int:
        up = node.sensors(gpu).link_up(link)
        return no_link(gpu) if up is None else put(ref, int(up))

    def remote_type(gpu: SimGpu, link: int, ref: Any) -> int:
        end = link_end(gpu, link, node.devices)
        if end is None:
            return no_link(gpu)
        kinds = (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
        return put(ref, int(kinds[end == SWITCH]))

    def remote_pci(gpu: SimGpu, link: int, ref: Any) -> int:
        end = link_end(gpu, link, node.devices)
        if isinstance(end, SimGpu):
            return write_pci(end, behind(ref))
        if end is None:
            return no_link(gpu)
        behind(ref).busId = _SWITCH_BUS_ID
        return 0

    def fabric(gpu: SimGpu, ref: Any) -> int:
        info, sensors = behind(ref), node.sensors(gpu)
        if info.version != pynvml.nvmlGpuFabricInfo_v2:
            return _MISMATCH
        if not sensors.traits.fabric:
            return _NOT_SUPPORTED
        info.state = sensors.fabric_state() or int(pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)
        return 0

    return {
        "nvmlDeviceGetTopologyCommonAncestor": handles.on_device(common_ancestor),
        "nvmlDeviceGetNvLinkState": handles.on_device(state),
        "nvmlDeviceGetNvLinkRemoteDeviceType": handles.on_device(remote_type),
        "nvmlDeviceGetNvLinkRemotePciInfo_v2": handles.on_device(remote_pci),
        "nvmlDeviceGetGpuFabricInfoV": handles.on_device(fabric),
    }
