"""Queries of the energy ledger and their answers: an interval, filters, grouping, and the bounds of a query.

Theory. Every answer adds up: the groups shown, those left out, and what has no owner make the total; the
devices' measured energy of the same hours stands beside it and is the same number without filters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.energy.ledger import HOUR_S, LedgerAmount
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument

DAY_S = 24 * HOUR_S
# What entries can be grouped and filtered by; labels of workloads as label:KEY.
GROUP_KEYS = (
    "kind",
    "namespace",
    "name",
    "workload",
    "title",
    "user",
    "queue",
    "node",
    "pool",
    "gpu_model",
    "hour",
    "day",
)
TIME_KEYS = ("hour", "day")
_GROUPS_MOST = 4
_FILTERS_MOST = 16
_ROWS_MOST = 10_000
_SPAN_S_MOST = 5 * 366 * DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerQuery:
    """Whole hours from `begin_s` on, before `end_s`; the largest groups first, `rows_most` of them."""

    begin_s: int
    end_s: int
    group_by: tuple[str, ...] = ()
    filters: tuple[tuple[str, str], ...] = ()
    rows_most: int = 1000
    # Whether what nobody held, and what nobody known used, are groups like those of owners.
    with_nobody: bool = False


class GroupWork(NamedTuple):
    """Work beside the joules of those in a group that tell of it; where seconds were missed, at least so much."""

    unit: str
    amount: float
    counted_s: float
    missed_s: float
    energy_mj: int = 0


class LedgerGroup(NamedTuple):
    """One row: its values in the order of `group_by`; hours and days in seconds of Unix time."""

    values: tuple[str, ...]
    spent: LedgerAmount
    done: tuple[GroupWork, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnswer:
    """`groups` and `left_out` are of owners; they, `unallocated` and `unattributed` are all there is.

    Where nobody's are groups, too, the two are 0. `revision` is of the state of the ledger that was asked.
    """

    asked: LedgerQuery
    groups: tuple[LedgerGroup, ...]
    left_out: LedgerAmount
    left_out_rows: int
    unallocated: LedgerAmount
    unattributed: LedgerAmount
    measured_mj: int
    uncertainty_mj: int
    uncounted_s: float
    revision: int = 0
    # What of the stretch is damaged on the disk, in words; it is in no sum.
    damaged: tuple[str, ...] = ()

    @property
    def owned(self) -> LedgerAmount:
        """What owners were charged."""
        total = self.left_out
        for group in self.groups:
            total = total.plus(group.spent)
        return total

    @property
    def total(self) -> LedgerAmount:
        """Everything."""
        return self.owned.plus(self.unallocated).plus(self.unattributed)


def parse_query(
    *,
    begin_ns: int,
    end_ns: int,
    group_by: tuple[str, ...],
    filters: dict[str, str],
    rows_most: int,
    with_nobody: bool = False,
) -> LedgerQuery:
    """The question, its times widened to whole hours; raises InvalidArgument."""
    begin_s = begin_ns // 10**9 // HOUR_S * HOUR_S
    end_s = -(-end_ns // (10**9 * HOUR_S)) * HOUR_S
    broken = []
    if end_ns <= begin_ns:
        broken.append(Violation("end_ns", f"is {end_ns}, not after begin_ns", "ask for a stretch of time"))
    elif end_s - begin_s > _SPAN_S_MOST:
        broken.append(Violation("begin_ns", "is more than five years before end_ns", "ask for less"))
    if len(group_by) > _GROUPS_MOST:
        broken.append(Violation("group_by", f"has {len(group_by)} names", f"give at most {_GROUPS_MOST}"))
    if len(filters) > _FILTERS_MOST:
        broken.append(Violation("filters", f"has {len(filters)} names", f"give at most {_FILTERS_MOST}"))
    for field, names in (("group_by", group_by), ("filters", tuple(filters))):
        for name in names:
            is_known = name in GROUP_KEYS or (name.startswith("label:") and len(name) > len("label:"))
            if not is_known or (field == "filters" and name in TIME_KEYS):
                known = ", ".join(one for one in GROUP_KEYS if field == "group_by" or one not in TIME_KEYS)
                broken.append(Violation(field, f"names {name!r}", f"give some of {known}, label:KEY"))
    if not 1 <= rows_most <= _ROWS_MOST:
        broken.append(Violation("rows_most", f"is {rows_most}", f"give 1 to {_ROWS_MOST}"))
    if broken:
        raise InvalidArgument("the ledger cannot be asked that", tuple(broken))
    return LedgerQuery(
        begin_s=begin_s,
        end_s=end_s,
        group_by=group_by,
        filters=tuple(sorted(filters.items())),
        rows_most=rows_most,
        with_nobody=with_nobody,
    )


def parse_queries(
    *, begin_ns: int, end_ns: int, groupings: Sequence[tuple[tuple[str, ...], int]], filters: dict[str, str]
) -> list[LedgerQuery]:
    """Questions of one stretch, by what they group by and how many rows are shown; raises InvalidArgument."""
    if not groupings:
        raise InvalidArgument("a report asks nothing", (Violation("groupings", "is empty", "give one at least"),))
    rows = sum(rows_most for _, rows_most in groupings)
    if rows > _ROWS_MOST:
        broken = Violation("rows_most", f"is {rows} in all", f"give at most {_ROWS_MOST} together")
        raise InvalidArgument("the ledger cannot be asked that", (broken,))
    return [
        parse_query(begin_ns=begin_ns, end_ns=end_ns, group_by=group_by, filters=filters, rows_most=rows_most)
        for group_by, rows_most in groupings
    ]
