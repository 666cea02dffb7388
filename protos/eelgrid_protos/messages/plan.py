"""Node plans: the desired state of a node, and the result of applying it; mirrored by plan.proto."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.reading import INSTANCES_PER_GPU_MOST
from eelgrid_protos.quantities import (
    GPU_MILLI_WHOLE,
    Bytes,
    Count,
    CpuMilli,
    GpuMilli,
    Identifier,
    Label,
    Many,
    Megahertz,
    MigProfile,
    Name,
    OpenEnum,
    Range,
    RequiredMigProfile,
    Seconds,
    Sentence,
    Uint32,
    Uint64,
    Watts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The slice that a replica uses, chosen by the partition planner; an empty profile is the whole GPU."""

    profile: MigProfile = ""
    start: Count = 0
    batch: Uint32 = 1
    processes: Uint32 = 1
    label: Label = ""
    gpu_milli: GpuMilli = GPU_MILLI_WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One replica of a workload on devices of this node."""

    workload_id: Identifier
    replica: Count
    gpu_uuids: Annotated[tuple[Identifier, ...], Many(64)] = ()
    gpu_milli: GpuMilli = 0
    cpu_milli: CpuMilli = 0
    memory_bytes: Bytes = 0
    gpu_instance: Slice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSetting:
    """Desired limits of one device; None sets no limit."""

    gpu_uuid: Identifier
    power_limit_w: Watts | None = None
    sm_clock_min_mhz: Megahertz | None = None
    sm_clock_max_mhz: Megahertz | None = None
    power_profile: Annotated[int, Range(0, 255)] | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that clocks are locked as a pair, low before high."""
        low, high = self.sm_clock_min_mhz, self.sm_clock_max_mhz
        if (low is None) != (high is None) or (low is not None and high is not None and low > high):
            yield Violation("sm_clock_min_mhz", "is no range with sm_clock_max_mhz", "give both, low before high")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedInstance:
    """One GPU instance of a layout; no compute slices means one compute instance over all of it."""

    profile: RequiredMigProfile
    start: Count
    compute_slices: Annotated[tuple[Count, ...], Many(8)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayout:
    """The complete MIG layout desired for one device."""

    gpu_uuid: Identifier
    mig_enabled: bool = False
    instances: Annotated[tuple[WantedInstance, ...], Many(INSTANCES_PER_GPU_MOST)] = ()

    def violations(self) -> Iterator[Violation]:
        """Checks that only MIG mode has instances."""
        if self.instances and not self.mig_enabled:
            yield Violation("instances", "are wanted with MIG off", "set mig_enabled, or ask for no instances")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The complete desired state of a node; it replaces the previous plan."""

    node_name: Name
    epoch: Uint64
    lease_s: Seconds
    enforce: bool = False
    assignments: Annotated[tuple[Assignment, ...], Many(4096)] = ()
    gpu_settings: Annotated[tuple[GpuSetting, ...], Many(64)] = ()
    gpu_layouts: Annotated[tuple[GpuLayout, ...], Many(64)] = ()
    power_budget_w: Watts | None = None


class ApplyStatus(OpenEnum):
    """Result of one item of a plan."""

    UNSPECIFIED = 0
    APPLIED = 1
    OBSERVED = 2
    REFUSED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """One item that was not applied normally, or a setting with the value read back."""

    subject: Identifier
    status: ApplyStatus
    detail: Sentence = ""
    power_limit_w: Watts | None = None
    rule: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanApplied:
    """The result of a plan on its node."""

    epoch: Uint64
    status: ApplyStatus
    results: Annotated[tuple[ApplyResult, ...], Many(8192)] = ()
