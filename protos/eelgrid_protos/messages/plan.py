"""What the controller wants of a node, and what the node did: mirrored by plan.proto."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.open_enum import OpenEnum
from eelgrid_protos.quantities import (
    Bytes,
    Count,
    CpuMilli,
    GpuMilli,
    Identifier,
    Many,
    Megahertz,
    Name,
    Seconds,
    Sentence,
    Uint64,
    Watts,
)  # fmt: skip

__all__ = ["ApplyResult", "ApplyStatus", "Assignment", "GpuSetting", "NodePlan", "PlanApplied"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One replica of a workload on devices of this node."""

    workload_id: Identifier
    replica: Count
    gpu_uuids: Annotated[tuple[Identifier, ...], Many(64)] = ()
    gpu_milli: GpuMilli = 0
    cpu_milli: CpuMilli = 0
    memory_bytes: Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSetting:
    """Limits wanted on one device; None asks for nothing."""

    gpu_uuid: Identifier
    power_limit_w: Watts | None = None
    sm_clock_min_mhz: Megahertz | None = None
    sm_clock_max_mhz: Megahertz | None = None

    def violations(self) -> Iterator[Violation]:
        """Clocks are locked as a pair, low before high."""
        low, high = self.sm_clock_min_mhz, self.sm_clock_max_mhz
        if (low is None) != (high is None) or (low is not None and high is not None and low > high):
            yield Violation("sm_clock_min_mhz", "is no range with sm_clock_max_mhz", "give both, low before high")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The whole of what a node should hold; it replaces the plan before it."""

    node_name: Name
    epoch: Uint64
    lease_s: Seconds
    enforce: bool = False
    assignments: Annotated[tuple[Assignment, ...], Many(4096)] = ()
    gpu_settings: Annotated[tuple[GpuSetting, ...], Many(64)] = ()


class ApplyStatus(OpenEnum):
    """What became of one item of a plan."""

    UNSPECIFIED = 0
    APPLIED = 1
    OBSERVED = 2
    REFUSED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """One item that was not plainly applied, or a setting with the value read back."""

    subject: Identifier
    status: ApplyStatus
    detail: Sentence = ""
    power_limit_w: Watts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanApplied:
    """The node's answer to a plan."""

    epoch: Uint64
    status: ApplyStatus
    results: Annotated[tuple[ApplyResult, ...], Many(8192)] = ()
