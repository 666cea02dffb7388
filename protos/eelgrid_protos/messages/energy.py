"""Energy messages: the energy of a node by owner (energy.proto), and the cluster's ledger of it (ledger.proto).

Joules that must add up are whole millijoules; estimates are in joules. How they are counted and divided:
docs/explanation/energy-attribution.md. Of the ledger there are queries, reports, exporters and spending status.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.policy import SPENDING_LIMITS_MOST, SpendingLimit
from eelgrid_protos.quantities import (
    Count,
    Identifier,
    Joules,
    Label,
    Many,
    Nanoseconds,
    OpenEnum,
    Range,
    Seconds,
    Sentence,
    Text,
    Uint32,
    Uint64,
)
from eelgrid_protos.values import dataclass

# One row for each reason, and spare rows for those of newer versions.
_UNOWNED_MOST = 16
# Per window: 8 GPUs in 56 slices with two methods and three parts have some 350 shares.
WINDOW_SHARES_MOST = 4096
WINDOW_OWNERS_MOST = 2048
_WINDOW_DEVICES_MOST = 128


class OwnerKind(OpenEnum):
    """Kind of an owner."""

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
    """One owner; fields that are unknown, or do not apply to its kind, are empty."""

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
    """Part of the energy: what joules were spent on."""

    UNSPECIFIED = 0
    BARE_IDLE = 1
    CONTEXT_IDLE = 2
    ACTIVE = 3


class AttributionMethod(OpenEnum):
    """How an owner's part was determined."""

    UNSPECIFIED = 0
    EXCLUSIVE = 1
    MIG_ACTIVITY = 2
    MIG_SLICE = 3
    PROCESS_SM = 4
    EQUAL_SHARE = 5
    UNATTRIBUTED = 6


class AttributionConfidence(OpenEnum):
    """How reliable an owner's part is."""

    UNSPECIFIED = 0
    LOW = 1
    MEDIUM = 2
    HIGH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedEnergy:
    """Energy charged to one owner, or one process of it, in one place; None is the whole device."""

    gpu_uuid: Identifier
    gpu_instance_id: Uint32 | None = None
    owner: EnergyOwner
    part: EnergyPart
    method: AttributionMethod
    confidence: AttributionConfidence
    energy_mj: Uint64 = 0


class UnownedReason(OpenEnum):
    """Why joules are charged to no owner."""

    UNSPECIFIED = 0
    UNALLOCATED = 1
    UNATTRIBUTED = 2
    ENDED = 3
    OTHER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UnownedEnergy:
    """Energy that is charged to no owner, for one reason."""

    reason: UnownedReason
    energy_mj: Uint64 = 0


class EnergyMethod(OpenEnum):
    """How a device's energy was measured."""

    UNSPECIFIED = 0
    COUNTER = 1
    INTEGRATED = 2
    MIXED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyEstimate:
    """energy_j plus or minus uncertainty_j, over `seconds`; neither covers `uncounted_s` of them."""

    energy_j: Joules
    uncertainty_j: Joules
    method: EnergyMethod
    seconds: Seconds = 0.0
    uncounted_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnergy:
    """One device since the agent started: its owners' rows and unowned energy add up to `total_mj`.

    `estimate` is None for a device that was removed or never measured.
    """

    gpu_uuid: Identifier
    total_mj: Uint64 = 0
    unowned: Annotated[tuple[UnownedEnergy, ...], Many(_UNOWNED_MOST)] = ()
    recent_s: Seconds = 0.0
    estimate: EnergyEstimate | None = None


class AnomalyKind(OpenEnum):
    """Kind of contradiction between the holder and the users of a device."""

    UNSPECIFIED = 0
    HELD_IDLE = 1
    IDLE_CONTEXT = 2
    PROCESS_WITHOUT_ALLOCATION = 3
    ALLOCATION_WITHOUT_PROCESS = 4
    STALLED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyAnomaly:
    """An anomaly that has lasted long enough to be reported, and persists."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDevice:
    """Energy of one device in a window, plus or minus `uncertainty_mj`; neither covers `uncounted_s`."""

    gpu_uuid: Identifier
    total_mj: Uint64 = 0
    uncertainty_mj: Uint64 = 0
    uncounted_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowShare:
    """What one owner is charged for one device; both by index. None is the whole device."""

    device: Uint32
    owner: Uint32
    gpu_instance_id: Uint32 | None = None
    part: EnergyPart
    method: AttributionMethod
    confidence: AttributionConfidence
    energy_mj: Uint64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyWindow:
    """Energy of a node's devices in an interval, by owner: a device's shares add up to its total."""

    incarnation: Uint64
    number: Uint64
    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    devices: Annotated[tuple[WindowDevice, ...], Many(_WINDOW_DEVICES_MOST)] = ()
    owners: Annotated[tuple[EnergyOwner, ...], Many(WINDOW_OWNERS_MOST)] = ()
    shares: Annotated[tuple[WindowShare, ...], Many(WINDOW_SHARES_MOST)] = ()

    def violations(self) -> Iterator[Violation]:
        """Checks that shares refer to existing entries and add up."""
        if self.end_ns < self.begin_ns:
            yield Violation("end_ns", f"is {self.end_ns}, before begin_ns", "end a window after its begin")
        left = [device.total_mj for device in self.devices]
        for index, share in enumerate(self.shares):
            if share.device >= len(left) or share.owner >= len(self.owners):
                yield Violation(f"shares[{index}]", "names a device or an owner that is not there", "name one by index")
                return
            left[share.device] -= share.energy_mj
        for index, rest in enumerate(left):
            if rest:
                yield Violation(f"devices[{index}].total_mj", f"is {rest} mJ off the sum of its shares", "add up")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyAcknowledgement:
    """Acknowledges every window of an incarnation up to and including the number; `refused` of them are in no sum."""

    incarnation: Uint64
    number: Uint64
    refused: Uint32 = 0
    refused_reason: Sentence = ""


_ROWS_MOST = 10_000
_QUESTIONS_MOST = 8
_Money = Annotated[float, Range(-1e15, 1e15)]
_Grams = Annotated[float, Range(-1e15, 1e15, "g")]
_Amount = Annotated[float, Range(0.0, 1e300)]
# Seconds of many devices or workloads over years.
_Sum = Annotated[float, Range(0.0, 1e15, "s")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySpent:
    """Millijoules of devices by part, their price and their carbon dioxide emissions.

    `cost` is 0 where no price was known when the energy was used, and `carbon_g` where no carbon intensity was: 0 beside
    energy is not known, not free.
    """

    bare_idle_mj: Uint64 = 0
    context_idle_mj: Uint64 = 0
    active_mj: Uint64 = 0
    cost: _Money = 0.0
    carbon_g: _Grams = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyWork:
    """Work done with the energy; if seconds were missed, a lower bound, and so an upper bound of joules per unit."""

    unit: Label
    amount: _Amount
    counted_s: _Sum = 0.0
    missed_s: _Sum = 0.0
    energy_per_unit_j: _Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyGroup:
    """One row; its values are in the order of the request's `group_by`."""

    values: Annotated[tuple[Label, ...], Many(4)] = ()
    spent: EnergySpent
    work: Annotated[tuple[EnergyWork, ...], Many(8)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryEnergyRequest:
    """Asks what was spent in the whole hours around an interval; `rows_most` of 0 means 1,000."""

    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    group_by: Annotated[tuple[Label, ...], Many(4)] = ()
    filters: Annotated[Mapping[Label, Label], Many(16)] = field(default_factory=dict)
    rows_most: Uint32 = 0
    with_nobody: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryEnergyResponse:
    """Answers a query; groups, left_out, unallocated and unattributed add up to everything that matches."""

    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    currency: Annotated[str, Text(8)] = "EUR"
    groups: Annotated[tuple[EnergyGroup, ...], Many(_ROWS_MOST)] = ()
    left_out: EnergySpent
    left_out_groups: Uint32 = 0
    unallocated: EnergySpent
    unattributed: EnergySpent
    measured_mj: Uint64 = 0
    uncertainty_mj: Uint64 = 0
    uncounted_s: _Sum = 0.0
    revision: Uint64 = 0
    damaged: Annotated[tuple[Sentence, ...], Many(64)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyGrouping:
    """One query of a report; `rows_most` of 0 means 1,000."""

    group_by: Annotated[tuple[Label, ...], Many(4)] = ()
    rows_most: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryEnergyReportRequest:
    """Several queries over one interval, with at most 10,000 rows together."""

    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    filters: Annotated[Mapping[Label, Label], Many(16)] = field(default_factory=dict)
    groupings: Annotated[tuple[EnergyGrouping, ...], Many(_QUESTIONS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryEnergyReportResponse:
    """An answer to each query in their order, all of the same moment."""

    answers: Annotated[tuple[QueryEnergyResponse, ...], Many(_QUESTIONS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyExporter:
    """An exporter has everything between two whole hours, except for `changed_hours` between the first and the last."""

    name: Identifier
    since_ns: Nanoseconds
    until_ns: Nanoseconds
    changed_hours: Uint32 = 0
    changed_first_ns: Nanoseconds = 0
    changed_last_ns: Nanoseconds = 0
    lag_s: _Sum = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmEnergyExportRequest:
    """Confirms which whole hours an exporter has stored elsewhere, as of which revision of the ledger."""

    name: Identifier
    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    revision: Uint64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmEnergyExportResponse:
    """The updated mark of the exporter."""

    exporter: EnergyExporter


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEnergyExportersRequest:
    """Asks for all exporters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEnergyExportersResponse:
    """Exporters by name, and the time up to which exports can be confirmed."""

    exporters: Annotated[tuple[EnergyExporter, ...], Many(64)] = ()
    settled_ns: Nanoseconds = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveEnergyExporterRequest:
    """Removes an exporter's mark: its rows expire by age again."""

    name: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveEnergyExporterResponse:
    """The mark is removed."""


_Spent = Annotated[float, Range(0.0, 1e24)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingStatus:
    """A limit and the amount spent in the current period; None if unknown."""

    limit: SpendingLimit
    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    spent: _Spent | None = None
    forecast: _Spent | None = None
    over_since_ns: Nanoseconds = 0
    waiting: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSpendingRequest:
    """Asks for all spending limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSpendingResponse:
    """Spending limits in the policy's order."""

    limits: Annotated[tuple[SpendingStatus, ...], Many(SPENDING_LIMITS_MOST)] = ()
    currency: Annotated[str, Text(8)] = ""
    utc_offset_minutes: Annotated[int, Range(-24 * 60, 24 * 60, "minutes")] = 0
