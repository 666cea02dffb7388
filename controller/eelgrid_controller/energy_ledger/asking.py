"""What can be asked of the ledger: a stretch of time, whose, and grouped by what.

Owns the question, the answer and their bounds. Must not know how the answer is found.

Theory. Whatever is asked, the answer adds up: the groups that are shown, those that there was
no room for, and what belongs to nobody are the total; and beside it stands what the devices
measured in the same hours, which is the same number as long as no filter was given.
"""

from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.energy_ledger.entries import HOUR_S
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument

__all__ = ["DAY_S", "GROUPS", "Answer", "Asked", "Done", "Group", "Spent", "asked_of"]

DAY_S = 24 * HOUR_S
# What entries can be grouped and filtered by; labels of workloads as label:KEY.
GROUPS = (
    "kind", "namespace", "name", "workload", "title", "user", "queue", "node", "pool", "gpu_model", "hour", "day",
)  # fmt: skip
_TIMES = ("hour", "day")
_GROUPS_MOST = 4
_FILTERS_MOST = 16
_ROWS_MOST = 10_000
_SPAN_S_MOST = 5 * 366 * DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whole hours from `begin_s` on, before `end_s`; the largest groups first, `rows_most` of them."""

    begin_s: int
    end_s: int
    group_by: tuple[str, ...] = ()
    filters: tuple[tuple[str, str], ...] = ()
    rows_most: int = 1000


class Spent(NamedTuple):
    """Millijoules by part, money and grams of carbon."""

    bare_mj: int = 0
    context_mj: int = 0
    active_mj: int = 0
    cost: float = 0.0
    carbon_g: float = 0.0

    @property
    def energy_mj(self) -> int:
        """All parts."""
        return self.bare_mj + self.context_mj + self.active_mj

    def plus(self, other: "Spent") -> "Spent":
        """Both."""
        return Spent(
            self.bare_mj + other.bare_mj, self.context_mj + other.context_mj, self.active_mj + other.active_mj,
            self.cost + other.cost, self.carbon_g + other.carbon_g,
        )  # fmt: skip


class Done(NamedTuple):
    """Work beside the joules of those in a group that tell of it; where seconds were missed, at least so much."""

    unit: str
    amount: float
    counted_s: float
    missed_s: float
    energy_mj: int = 0


class Group(NamedTuple):
    """One row: its values in the order of `group_by`; hours and days in seconds of Unix time."""

    values: tuple[str, ...]
    spent: Spent
    done: tuple[Done, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`groups` and `left_out` are of owners; they, `unallocated` and `unattributed` are all there is."""

    asked: Asked
    groups: tuple[Group, ...]
    left_out: Spent
    left_out_rows: int
    unallocated: Spent
    unattributed: Spent
    measured_mj: int
    uncertainty_mj: int
    uncounted_s: float

    @property
    def owned(self) -> Spent:
        """What owners were charged."""
        total = self.left_out
        for group in self.groups:
            total = total.plus(group.spent)
        return total

    @property
    def total(self) -> Spent:
        """Everything."""
        return self.owned.plus(self.unallocated).plus(self.unattributed)


def asked_of(
    *, begin_ns: int, end_ns: int, group_by: tuple[str, ...], filters: dict[str, str], rows_most: int
) -> Asked:  # fmt: skip
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
            is_known = name in GROUPS or (name.startswith("label:") and len(name) > len("label:"))
            if not is_known or (field == "filters" and name in _TIMES):
                known = ", ".join(one for one in GROUPS if field == "group_by" or one not in _TIMES)
                broken.append(Violation(field, f"names {name!r}", f"give some of {known}, label:KEY"))
    if not 1 <= rows_most <= _ROWS_MOST:
        broken.append(Violation("rows_most", f"is {rows_most}", f"give 1 to {_ROWS_MOST}"))
    if broken:
        raise InvalidArgument("the ledger cannot be asked that", tuple(broken))
    return Asked(
        begin_s=begin_s, end_s=end_s, group_by=group_by, filters=tuple(sorted(filters.items())), rows_most=rows_most
    )
