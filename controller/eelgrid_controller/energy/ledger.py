"""The energy ledger's values: entries by owner, place and hour, sums by namespace, queries, answers and exporters.

Energy that must add up is whole millijoules; money and carbon are floats, since a price is one. Work (requests, tokens,
units of jobs) is kept as increments, each with its interval, since a total says nothing after its counter restarted.
Seconds that nobody observed (a replica first seen after it had served, a counter that began anew) are reported as
missed: amounts never exceed what was done, so joules per unit are exact only where nothing was missed, and an upper
bound otherwise.

Namespaces. Counters by namespace never fall: a namespace with a counter of its own keeps it, and all others are counted
under `OTHER_NAMESPACES`. A namespace replaces the one that spent least when it has spent twice as much, so places change
a few dozen times over the orders of magnitude in between, not at each flush. Rates add up to everything that is booked.

Queries. Every answer adds up: the groups shown, those left out, and what has no owner make the total; the devices'
measured energy of the same hours stands beside it and is the same number without filters.

Exporters. An exporter confirms hours as of a revision of the ledger, which rises with each transaction. Its mark is the
end of an unbroken interval and only moves forward. Two things could make a mark wrong:

- Hours that are not over everywhere. Nodes report their windows in order, so an hour is settled when each node's newest
  window ends after it; a node that has been silent for `SILENT_S` no longer holds the others back. Later hours are
  refused.
- Hours that change afterwards, since such a node comes back with its spool, or its clock was wrong, or since the export
  was read before another transaction. They are recorded by hour, kept like unexported hours, and reported until the
  exporter confirms a newer revision of them. The mark itself does not go back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, ResourceExhausted
from eelgrid_protos.messages import EnergyOwner, OwnerKind, WorkloadSpec

HOUR_S = 3600
_LABELS_MOST = 16


class LedgerPlace(NamedTuple):
    """Devices of one model on one node."""

    node_name: str
    pool: str
    gpu_model: str


def namespace_label(kind: str, namespace: str) -> str:
    """Under which name a holder's joules are summed by namespace; no namespace is written with parentheses."""
    if kind in ("unallocated", "unattributed"):
        return f"({kind})"
    return namespace or "(none)"


class EnergyHolder(NamedTuple):
    """Who is charged; what is unknown is empty. `kind` is OwnerKind's, by lower-case name."""

    kind: str
    namespace: str = ""
    name: str = ""  # the pod, the job with its step, the container, the unit
    workload: str = ""  # id of ours
    title: str = ""  # how its people call that workload
    user: str = ""
    queue: str = ""
    labels: tuple[tuple[str, str], ...] = ()


class LedgerAmount(NamedTuple):
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

    def plus(self, other: "LedgerAmount") -> "LedgerAmount":
        """Both."""
        return LedgerAmount(
            self.bare_mj + other.bare_mj,
            self.context_mj + other.context_mj,
            self.active_mj + other.active_mj,
            self.cost + other.cost,
            self.carbon_g + other.carbon_g,
        )


class LedgerEntry(NamedTuple):
    """What one holder spent at one place, to be added to what the hour has; hours begin at whole hours of Unix time."""

    hour_s: int
    place: LedgerPlace
    holder: EnergyHolder
    spent: LedgerAmount


class MeasuredEnergy(NamedTuple):
    """What the devices of one place drew in one hour, whoever it was for; to be added, as entries are."""

    hour_s: int
    place: LedgerPlace
    total_mj: int
    uncertainty_mj: int
    uncounted_s: float


def resolve_holder(owner: EnergyOwner, spec: WorkloadSpec | None) -> EnergyHolder:
    """The holder for an owner as an agent names it; `spec` is of the workload that it names, where that is known."""
    name = owner.pod or owner.container or owner.unit
    if owner.kind is OwnerKind.SLURM:
        name = f"{owner.job}.{owner.step}" if owner.step else owner.job
    elif owner.kind is OwnerKind.RAY:
        name = owner.ray_job
    kind = owner.kind.name.lower()
    if spec is None:
        return EnergyHolder(kind, owner.namespace, name, owner.workload, "", owner.user)
    return EnergyHolder(
        kind=kind,
        namespace=owner.namespace or spec.namespace,
        name=name,
        workload=owner.workload,
        title=spec.name,
        user=owner.user or spec.user or spec.labels.get("user", ""),
        queue=spec.queue,
        labels=tuple(sorted(spec.labels.items()))[:_LABELS_MOST],
    )


NAMESPACES_MOST = 100
OTHER_NAMESPACES = "other"
_KNOWN_MOST = 10_000
# 4.6 x 10^15 J, of a million boards a lifetime: a counter stays there, so that it is always an integer of SQLite.
_SUM_MJ_MOST = 2**62


class NamespaceSum(NamedTuple):
    """Millijoules that a namespace has spent, those that its own counter had, and whether it has one now."""

    spent_mj: int = 0
    own_mj: int = 0
    is_shown: bool = False


class NamespaceSums:
    """All sums of a ledger; does not change."""

    def __init__(self, sums: Mapping[str, NamespaceSum], *, most: int = NAMESPACES_MOST) -> None:
        self.sums = sums
        self._most = most

    def plus(self, spent_mj: Mapping[str, int]) -> tuple["NamespaceSums", dict[str, NamespaceSum]]:
        """These sums with more millijoules by namespace, and those that changed."""
        after, changed = dict(self.sums), dict[str, NamespaceSum]()
        for name in sorted(spent_mj):
            # A namespace beyond those that can be known is OTHER, as one of that name is.
            key = name if name in after or len(after) < _KNOWN_MOST else OTHER_NAMESPACES
            known = after.get(key, NamespaceSum())
            own_mj = known.own_mj + spent_mj[name] if known.is_shown else known.own_mj
            after[key] = changed[key] = NamespaceSum(
                min(known.spent_mj + spent_mj[name], _SUM_MJ_MOST), min(own_mj, _SUM_MJ_MOST), known.is_shown
            )
        shown = {name for name, one in after.items() if one.is_shown}
        least = ""
        for name in sorted(changed.keys() - shown - {OTHER_NAMESPACES}):
            one = after[name]
            if len(shown) >= self._most:
                least = least or min(shown, key=lambda other: (after[other].spent_mj, other))
                if one.spent_mj < 2 * max(1, after[least].spent_mj):
                    continue
                after[least] = changed[least] = after[least]._replace(is_shown=False)
                shown.remove(least)
                least = ""
            # From this time on, with what comes now.
            now_mj = one.spent_mj - self.sums.get(name, NamespaceSum()).spent_mj
            after[name] = changed[name] = one._replace(own_mj=min(one.own_mj + now_mj, _SUM_MJ_MOST), is_shown=True)
            shown.add(name)
        return NamespaceSums(after, most=self._most), changed

    def counters_mj(self) -> dict[str, int]:
        """Millijoules by the name that they are counted under; OTHER only where anything is."""
        found = {name: one.own_mj for name, one in self.sums.items() if one.is_shown}
        other_mj = sum(one.spent_mj - one.own_mj for one in self.sums.values())
        return found | ({OTHER_NAMESPACES: other_mj} if other_mj else {})


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
        broken.append(Violation("end_ns", f"is {end_ns}, not after begin_ns", "give an end after the beginning"))
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
        raise InvalidArgument("the query is not valid", tuple(broken))
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
        raise InvalidArgument("the query is not valid", (broken,))
    return [
        parse_query(begin_ns=begin_ns, end_ns=end_ns, group_by=group_by, filters=filters, rows_most=rows_most)
        for group_by, rows_most in groupings
    ]


EXPORTERS_MOST = 8
# After an hour: what the controller itself tells of work done comes by then.
SETTLING_S = 600
SILENT_S = 24 * 3600


class ChangedHours(NamedTuple):
    """Hours that changed after they were confirmed: how many, the first and the last of them, and when the first did."""

    hours: int
    first_s: int
    last_s: int
    at_s: int


class Exporter(NamedTuple):
    """Has everything from `since_s` to `until_s`, but for what changed."""

    name: str
    since_s: int
    until_s: int
    changed: ChangedHours | None = None

    def lag_s(self, now_s: float) -> float:
        """For how long there has been something that he does not have."""
        return max(0.0, now_s - self.until_s, now_s - self.changed.at_s if self.changed else 0.0)


class ExportClaim(NamedTuple):
    """What an exporter says that he has: these hours, as they stood at a revision."""

    name: str
    begin_s: int
    end_s: int
    revision: int


def parse_export(*, name: str, begin_ns: int, end_ns: int, revision: int) -> ExportClaim:
    """The whole hours within a stretch; raises InvalidArgument."""
    begin_s, end_s = -(-begin_ns // (10**9 * HOUR_S)) * HOUR_S, end_ns // 10**9 // HOUR_S * HOUR_S
    if not name:
        raise InvalidArgument("an export has no exporter", (Violation("name", "is empty", "name the exporter"),))
    if end_s <= begin_s:
        broken = Violation("end_ns", f"is {end_ns}, and no whole hour is between it and begin_ns", "give whole hours")
        raise InvalidArgument("an export has no hours", (broken,))
    return ExportClaim(name, begin_s, end_s, revision)


def settled_s(ends_s: Iterable[float], now_s: float) -> int:
    """Until when hours are settled; `ends_s` are ends of the newest windows of nodes."""
    held_s = min((end_s for end_s in ends_s if end_s >= now_s - SILENT_S), default=now_s)
    return int(min(held_s, now_s - SETTLING_S) // HOUR_S) * HOUR_S


def advance_mark(
    before: Exporter | None, export: ExportClaim, *, settled_s: int, revision: int, others: int
) -> Exporter:
    """The mark after an export is confirmed; `revision` is the ledger's. Raises FailedPrecondition, ResourceExhausted."""
    if export.revision > revision:
        broken = Violation("revision", f"is {export.revision}, the ledger is at {revision}", "export again")
        raise FailedPrecondition(
            "the export is of another ledger, or of a ledger that was restored from a backup", (broken,)
        )
    if export.end_s > settled_s:
        broken = Violation(
            "end_ns",
            f"is {_text(export.end_s)}, and hours are settled until {_text(settled_s)}",
            "confirm until then, and the rest once all nodes have reported",
        )
        raise FailedPrecondition("not all nodes have reported their energy until then", (broken,))
    if before is None:
        if others >= EXPORTERS_MOST:
            raise ResourceExhausted(
                f"{others} exporters have marks; remove one that is no longer used (`eelctl exporters remove NAME`)"
            )
        return Exporter(export.name, export.begin_s, export.end_s)
    if export.begin_s > before.until_s:
        broken = Violation(
            "begin_ns",
            f"is {_text(export.begin_s)}, and {export.name} has rows until {_text(before.until_s)}",
            "export the hours between, too, or remove the exporter and start again",
        )
        raise FailedPrecondition("there would be a gap", (broken,))
    since_s = min(before.since_s, export.begin_s) if export.end_s >= before.since_s else before.since_s
    return before._replace(since_s=since_s, until_s=max(before.until_s, export.end_s))


def retention_cutoff_s(now_s: int, kept_s: int, span_s: int, untils_s: Iterable[int]) -> int:
    """Rows of `span_s` that begin before it may go by their age: each is old, and all who export have all of it."""
    return min([now_s - kept_s, *(until_s - span_s + 1 for until_s in untils_s)])


def _text(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
