"""Whose a node's joules are: frozen values, mirrored by energy.proto.

Joules that must add up are whole millijoules; what is only an estimate is in
joules. How they are counted and divided: docs/energy.md.
"""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.open_enum import OpenEnum
from eelgrid_protos.quantities import Identifier, Joules, Label, Many, Nanoseconds, Seconds, Uint32, Uint64

__all__ = [
    "AnomalyKind", "AttributionConfidence", "AttributionMethod", "DeviceEnergy", "EnergyAnomaly", "EnergyEstimate",
    "EnergyMethod", "EnergyOwner", "EnergyPart", "EnergyStatus", "OwnedEnergy", "OwnerKind", "UnownedEnergy",
    "UnownedReason",
]  # fmt: skip

# One row for each reason, and room for those of newer versions.
_UNOWNED_MOST = 16


class OwnerKind(OpenEnum):
    """What an owner is."""

    UNSPECIFIED = 0
    POD = 1
    SLURM = 2
    WORKLOAD = 3
    CONTAINER = 4
    RAY = 5
    UNIT = 6
    USER = 7
    PROCESS = 8
    UNALLOCATED = 9
    UNATTRIBUTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyOwner:
    """One owner; what is unknown, or does not apply to its kind, is empty."""

    kind: OwnerKind
    namespace: Label = ""
    pod: Label = ""
    container: Label = ""
    pod_uid: Label = ""
    container_id: Label = ""
    job: Label = ""
    step: Label = ""
    workload: Label = ""
    user: Label = ""
    unit: Label = ""
    ray_job: Label = ""
    pid: Uint32 = 0


class EnergyPart(OpenEnum):
    """What joules were spent on."""

    UNSPECIFIED = 0
    BARE_IDLE = 1
    CONTEXT_IDLE = 2
    ACTIVE = 3


class AttributionMethod(OpenEnum):
    """How an owner's part was found."""

    UNSPECIFIED = 0
    EXCLUSIVE = 1
    MIG_ACTIVITY = 2
    MIG_SLICE = 3
    PROCESS_SM = 4
    EQUAL_SHARE = 5
    UNATTRIBUTED = 6


class AttributionConfidence(OpenEnum):
    """How far an owner's part may be trusted."""

    UNSPECIFIED = 0
    LOW = 1
    MEDIUM = 2
    HIGH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedEnergy:
    """What one owner, or one process of it, is charged on one place; None is the whole device."""

    gpu_uuid: Identifier
    gpu_instance_id: Uint32 | None = None
    owner: EnergyOwner
    part: EnergyPart
    method: AttributionMethod
    confidence: AttributionConfidence
    energy_mj: Uint64 = 0


class UnownedReason(OpenEnum):
    """Why joules are in no account of an owner."""

    UNSPECIFIED = 0
    UNALLOCATED = 1
    UNATTRIBUTED = 2
    ENDED = 3
    OTHER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UnownedEnergy:
    """What no owner is charged, for one reason."""

    reason: UnownedReason
    energy_mj: Uint64 = 0


class EnergyMethod(OpenEnum):
    """How a device's energy was had."""

    UNSPECIFIED = 0
    COUNTER = 1
    INTEGRATED = 2
    MIXED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyEstimate:
    """energy_j, give or take uncertainty_j, over `seconds`; `uncounted_s` of them are in neither."""

    energy_j: Joules
    uncertainty_j: Joules
    method: EnergyMethod
    seconds: Seconds = 0.0
    uncounted_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnergy:
    """One device since the agent began: its owners' rows and what nobody owns add up to `total_mj`.

    `estimate` is None for a device that is gone or was never measured.
    """

    gpu_uuid: Identifier
    total_mj: Uint64 = 0
    unowned: Annotated[tuple[UnownedEnergy, ...], Many(_UNOWNED_MOST)] = ()
    recent_s: Seconds = 0.0
    estimate: EnergyEstimate | None = None


class AnomalyKind(OpenEnum):
    """What is wrong between who holds a device and who uses it."""

    UNSPECIFIED = 0
    HELD_IDLE = 1
    IDLE_CONTEXT = 2
    PROCESS_WITHOUT_ALLOCATION = 3
    ALLOCATION_WITHOUT_PROCESS = 4
    STALLED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyAnomaly:
    """One that has lasted long enough to be told, and lasts."""

    kind: AnomalyKind
    gpu_uuid: Identifier
    gpu_instance_id: Uint32 | None = None
    owner: EnergyOwner
    since_ns: Nanoseconds = 0
    lasted_s: Seconds = 0.0
    wasted_mj: Uint64 = 0


class EnergyStatus(OpenEnum):
    """Whether a node's joules are divided among owners."""

    UNSPECIFIED = 0
    KNOWN = 1
    NOT_YET = 2
    NOT_KEPT = 3
