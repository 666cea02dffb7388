"""Messages of nodes: inventory and node events as frozen values, mirrored by node.proto."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST, INSTANCES_PER_GPU_MOST
from eelgrid_protos.quantities import (
    BoardWatts,
    Bytes,
    Count,
    CpuMilli,
    Identifier,
    Label,
    Many,
    MigProfile,
    Name,
    Nanoseconds,
    OpenEnum,
    OptionalIdentifier,
    Sentence,
    Uint32,
)


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


# Region, zone, hall, spine, leaf, rack, and two more.
TOPOLOGY_PARTS_MOST = 8
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The hardware and software of one node."""

    node_name: Name
    cpu_milli: CpuMilli
    memory_bytes: Bytes
    generation: Uint32 = 1
    agent_version: Label = ""
    boot_id: Label = ""
    driver_version: Label = ""
    pool: Label = ""
    labels: Annotated[Mapping[Label, Label], Many(64)] = field(default_factory=dict)
    gpus: Annotated[tuple[Gpu, ...], Many(GPUS_PER_NODE_MOST)] = ()
    simulated: bool = False
    access: AccessLevel = AccessLevel.UNSPECIFIED
    links: Annotated[tuple[GpuLink, ...], Many(GPU_LINKS_MOST)] = ()
    # Outermost first, such as zone, spine, rack.
    topology: Annotated[tuple[Name, ...], Many(TOPOLOGY_PARTS_MOST)] = ()

    def violations(self) -> Iterator[Violation]:
        """Checks that UUIDs and indexes of devices are distinct."""
        for attribute in ("uuid", "index"):
            if len({getattr(gpu, attribute) for gpu in self.gpus}) < len(self.gpus):
                yield Violation("gpus", f"two devices share one {attribute}", "list each device once")


class NodeEventKind(OpenEnum):
    """What happened to a node or a device."""

    UNSPECIFIED = 0
    GPU_LOST = 1
    GPU_RETURNED = 2
    COUNTER_RESET = 3
    CLOCK_STEP = 4
    SAMPLES_DROPPED = 5
    LEASE_EXPIRED = 6
    XID = 7
    HEALTH = 8
    SETTING_DRIFT = 9
    ENFORCEMENT_SUSPENDED = 10
    SETTING_RESTORED = 11
    LAYOUT_CHANGED = 12
    GPU_HUNG = 13
    GPU_QUARANTINED = 14
    GPU_IDLE_HELD = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """An event that the agent reports to the controller at once."""

    kind: NodeEventKind
    time_ns: Nanoseconds
    gpu_uuid: Label = ""
    detail: Sentence = ""
