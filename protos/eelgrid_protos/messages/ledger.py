"""Messages of the energy ledger: queries, reports, exporters and spending status."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from eelgrid_protos.messages.policy import SPENDING_LIMITS_MOST, SpendingLimit
from eelgrid_protos.quantities import Count, Identifier, Label, Many, Nanoseconds, Range, Sentence, Text, Uint32, Uint64

_ROWS_MOST = 10_000
_QUESTIONS_MOST = 8
_Money = Annotated[float, Range(-1e15, 1e15)]
_Grams = Annotated[float, Range(-1e15, 1e15, "g")]
_Amount = Annotated[float, Range(0.0, 1e300)]
# Seconds of many devices or workloads over years.
_Sum = Annotated[float, Range(0.0, 1e15, "s")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySpent:
    """Millijoules of devices by part, their price and their carbon dioxide emissions."""

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
