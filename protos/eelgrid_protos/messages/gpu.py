"""Messages of devices: GPUs, MIG slices, leases and links, as nodes report them (node.proto)."""

from collections.abc import Iterator
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST, INSTANCES_PER_GPU_MOST
from eelgrid_protos.quantities import (
    BoardWatts,
    Bytes,
    Count,
    Identifier,
    Label,
    Many,
    MigProfile,
    Name,
    Nanoseconds,
    OpenEnum,
    OptionalIdentifier,
    Uint32,
)
from eelgrid_protos.values import dataclass


class AccessLevel(OpenEnum):
    """How much the driver permits the agent."""

    UNSPECIFIED = 0
    READ_ONLY = 1
    MIG_MONITOR = 2
    MIG_CONFIG = 3
    ROOT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstance:
    """The part of a GPU instance that a process opens, on its compute slices [start, start + size).

    `start` is None if the driver does not report it.
    """

    id: Uint32
    profile_id: Uint32 = 0
    # The name by which a plan refers to the device that a process opens.
    uuid: OptionalIdentifier = ""
    generation: Uint32 = 0
    start: Count | None = None
    size: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstance:
    """One MIG slice as read back, on memory slices [start, start + size)."""

    id: Uint32
    profile_id: Uint32
    profile: MigProfile
    start: Count
    size: Count
    compute_instances: Annotated[tuple[ComputeInstance, ...], Many(8)] = ()


# Seven slices with some owners of shares each.
LEASES_PER_GPU_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLease:
    """What an engine beside the controller, such as Slurm, holds: a GPU, or a slice; `owner` is a job of it, or the like.

    `device_uuid` is empty for a slice that is about to be created; `unknown` says why it is not known whether the owner
    still exists, and is empty if it is.
    """

    device_uuid: OptionalIdentifier = ""
    engine: Label
    owner: Label
    since_ns: Nanoseconds = 0
    unknown: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device; `model` is the name that workloads request."""

    uuid: Identifier
    index: Count
    product: Label
    model: Name
    pci_bus_id: Label = ""
    catalogue_key: Label = ""
    memory_bytes: Bytes = 0
    power_limit_default_w: BoardWatts | None = None
    power_limit_min_w: BoardWatts | None = None
    power_limit_max_w: BoardWatts | None = None
    mig_capable: bool = False
    mig_enabled: bool = False
    mig_pending: bool = False
    gpu_instances: Annotated[tuple[GpuInstance, ...], Many(INSTANCES_PER_GPU_MOST)] = ()
    lost: bool = False
    cordon: Label = ""
    # None if the driver names no NUMA node, or several.
    numa_node: Count | None = None
    # Of engines other than the controller's own.
    leases: Annotated[tuple[DeviceLease, ...], Many(LEASES_PER_GPU_MOST)] = ()


# Every pair of a node's devices.
GPU_LINKS_MOST = GPUS_PER_NODE_MOST * (GPUS_PER_NODE_MOST - 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLink:
    """Proximity of two devices, by index: NVML's nearest common ancestor (0 board .. 50 machine) and active NVLinks."""

    one: Count
    other: Count
    ancestor: Count = 0
    nvlinks: Count = 0

    def violations(self) -> Iterator[Violation]:
        """Checks that the two devices differ."""
        if self.one == self.other:
            yield Violation("other", f"{self.other} is the device itself", "list each pair of devices once")
