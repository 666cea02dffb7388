"""The energy ledger's values: windows and their entries by owner, place and hour, sums by namespace, queries and exporters.

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

Plausibility. A node reports its own devices, so its claim is bounded by what they can have drawn. In one window no
board draws more than its maximum power, with room for a counter that answers late (`LATE_S`). Over all windows of a
node no board draws more than its maximum power over the elapsed time: `ClaimAllowance` is that time, and each window
takes from it what its busiest board needs at full power. So overlapping or repeated windows gain nothing. Times are
the node's own and may be wrong: a window that is far from now is counted in the hour in which it arrived.

Apportionment. Power within a window is taken as constant. Energy goes to hours by the length of each, as whole
millijoules: the k-th hour gets the rounded sum of the first k less that of the first k - 1, so that the hours add up
to the window exactly. Shares are cut one by one. Beyond `PIECES_MOST` several hours are one piece, which counts in
its first hour. Money is the integral of the price over the same interval, with the carbon intensity and PUE of the
time; joules stay those of the devices, since PUE is the building's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple, TypeVar

from eelgrid_controller.objectives.power.tariffs import EnergyTariff
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, ResourceExhausted
from eelgrid_protos.messages import EnergyOwner, EnergyPart, EnergyWindow, OwnerKind, WorkloadSpec

HOUR_S = 3600
_LABELS_MOST = 16
# The label of a holder that names the job of a Ray cluster, as workloads that stand for such jobs have it, too.
RAY_JOB_LABEL = "ray/job"
_Value = TypeVar("_Value")


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


def label_ray_job(labels: tuple[tuple[str, str], ...], owner: EnergyOwner) -> tuple[tuple[str, str], ...]:
    """Labels of a holder with the Ray job that an agent saw inside it, whose joules are a part of the holder's."""
    if not owner.ray_job:
        return labels
    return tuple(sorted({**dict(labels), RAY_JOB_LABEL: owner.ray_job}.items()))


def resolve_holder(owner: EnergyOwner, spec: WorkloadSpec | None) -> EnergyHolder:
    """The holder for an owner as an agent names it; `spec` is of the workload that it names, where that is known."""
    name = owner.pod or owner.container or owner.unit
    if owner.kind is OwnerKind.SLURM:
        name = f"{owner.job}.{owner.step}" if owner.step else owner.job
    elif owner.kind is OwnerKind.RAY:
        name = owner.ray_job
    kind = owner.kind.name.lower()
    if spec is None:
        return EnergyHolder(
            kind, owner.namespace, name, owner.workload, "", owner.user, labels=label_ray_job((), owner)
        )
    return EnergyHolder(
        kind=kind,
        namespace=owner.namespace or spec.namespace,
        name=name,
        workload=owner.workload,
        title=spec.name,
        user=owner.user or spec.user or spec.labels.get("user", ""),
        queue=spec.queue,
        labels=label_ray_job(tuple(sorted(spec.labels.items()))[:_LABELS_MOST], owner),
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


# What SQLite keeps as an integer.
NUMBER_MOST = 2**63 - 1
# Of a board that the catalogue does not know: the largest module limit known is 2,900 W.
BOARD_W_MOST = 5_000.0
# Counters are some per cent off, and boards exceed their limit for moments.
MARGIN = 1.5
# A device that answered nothing for so long and then does tells the energy of all that time in one window.
LATE_S = 3600.0
# An agent without a controller keeps its hours apart for a month, and then joins them: a quarter is late enough.
PAST_S_MOST = 92 * 86_400.0
# Clocks of nodes that are not synchronised differ by minutes.
AHEAD_S_MOST = 3600.0
# Hours times shares that a window is cut into: some 30 ms of the event loop. Beyond, the pieces are longer than an hour.
PIECES_MOST = 16_384
# Pieces that a node may send at once and then each second. Eight GPUs with 56 slices make some 350 a minute; what was
# kept over a day comes at once.
_PIECES_AT_ONCE = 200_000.0
_PIECES_HZ = 4_000.0


class WindowVerdict(NamedTuple):
    """Why a window is refused, "" where it is not; whether its times can be; and what its busiest board needs."""

    reason: str
    is_placed: bool = True
    board_s: float = 0.0


@dataclass(slots=True)
class ClaimAllowance:
    """What one node may still claim: seconds of its boards at full power, and pieces; as of a monotonic time."""

    at_s: float
    board_s: float = PAST_S_MOST
    pieces: float = _PIECES_AT_ONCE

    def advance(self, now_s: float) -> None:
        """Time has passed."""
        passed_s = max(0.0, now_s - self.at_s)
        self.at_s = max(self.at_s, now_s)
        self.board_s = min(PAST_S_MOST, self.board_s + passed_s)
        self.pieces = min(_PIECES_AT_ONCE, self.pieces + _PIECES_HZ * passed_s)


def judge_window(
    window: EnergyWindow, watts: Mapping[str, float], allowance: ClaimAllowance, *, now_s: float
) -> WindowVerdict:
    """Whether a window can be; `watts` are the greatest of boards by UUID, `now_s` is Unix time."""
    begin_s, end_s = window.begin_ns / 1e9, window.end_ns / 1e9
    is_placed = begin_s >= now_s - PAST_S_MOST and end_s <= now_s + AHEAD_S_MOST
    if window.number > NUMBER_MOST:
        return WindowVerdict(f"number {window.number} is above {NUMBER_MOST}")
    if len({device.gpu_uuid for device in window.devices}) < len(window.devices):
        return WindowVerdict("a device is named twice")
    board_s = 0.0
    # By its own times, twice: a window's first share is of the moments before it begins.
    longest_s = LATE_S + 2.0 * min(end_s - begin_s, PAST_S_MOST)
    for device in window.devices:
        full_w = MARGIN * watts.get(device.gpu_uuid, BOARD_W_MOST)
        most_mj = 1000.0 * full_w * longest_s
        for what, energy_mj in (("energy", device.total_mj), ("uncertainty", device.uncertainty_mj)):
            if energy_mj > most_mj:
                return WindowVerdict(
                    f"device {device.gpu_uuid} has {what} of {energy_mj / 1000.0:.6g} J in {end_s - begin_s:.6g} s, "
                    f"at {full_w:g} W it can have {most_mj / 1000.0:.6g} J"
                )
        if device.uncounted_s > PAST_S_MOST:
            return WindowVerdict(f"device {device.gpu_uuid} has {device.uncounted_s:.6g} s that nobody measured")
        board_s = max(board_s, device.total_mj / (1000.0 * full_w))
    if board_s > allowance.board_s + LATE_S:
        return WindowVerdict(
            f"its devices would have needed {board_s:.6g} s at full power, and {allowance.board_s:.6g} s have passed "
            "since their last windows"
        )
    return WindowVerdict("", is_placed, board_s)


# Where a part stands in `Spent`; one of a newer agent that is not known is at work.
_COLUMNS = {EnergyPart.BARE_IDLE: 0, EnergyPart.CONTEXT_IDLE: 1}
_ACTIVE = 2


class WindowSpread:
    """What one window adds to the ledger."""

    __slots__ = ("entries", "measured")

    def __init__(self, entries: list[LedgerEntry], measured: list[MeasuredEnergy]) -> None:
        self.entries = entries
        self.measured = measured


def spread_window(
    window: EnergyWindow,
    places: Mapping[str, LedgerPlace],
    holder_of: Callable[[EnergyOwner], EnergyHolder],
    tariff: EnergyTariff | None,
    *,
    came_s: float | None = None,
) -> WindowSpread:
    """Entries of a window of one node; `places` by GPU UUID, for each of its devices.

    With `came_s` all of it belongs to the hour of that time, whatever the window's own times are.
    """
    hours = _hours(window) if came_s is None else [(came_s, came_s)]
    cuts, starts_s = _fractions(hours), [_hour_of(begin_s) for begin_s, _ in hours]
    prices = [_price(tariff, begin_s, end_s) for begin_s, end_s in hours]
    # Equal ones have one number: a sum's key is three small numbers instead of texts.
    place_of, there = _number_distinct([places[device.gpu_uuid] for device in window.devices])
    holder_of_owner, holders = _number_distinct([holder_of(owner) for owner in window.owners])
    parts_mj: dict[tuple[int, int, int], list[int]] = {}  # by numbers of hour, place and holder
    is_within = len(hours) == 1
    for share in window.shares:
        place, holder = place_of[share.device], holder_of_owner[share.owner]
        for hour, energy_mj in enumerate((share.energy_mj,) if is_within else _cut(share.energy_mj, cuts)):
            if energy_mj:
                parts = parts_mj.get((hour, place, holder))
                if parts is None:
                    parts = parts_mj[hour, place, holder] = [0, 0, 0]
                parts[_COLUMNS.get(share.part, _ACTIVE)] += energy_mj
    entries, drawn = list[LedgerEntry](), dict[tuple[int, int], int]()
    for (hour, place, holder), (bare_mj, context_mj, active_mj) in parts_mj.items():
        energy_mj = bare_mj + context_mj + active_mj
        energy_j = energy_mj / 1000.0
        cost, carbon_g = prices[hour]
        spent = LedgerAmount(bare_mj, context_mj, active_mj, cost * energy_j, carbon_g * energy_j)
        entries.append(LedgerEntry(starts_s[hour], there[place], holders[holder], spent))
        drawn[starts_s[hour], place] = drawn.get((starts_s[hour], place), 0) + energy_mj
    # By hour and place; totals are sums of shares as they were cut, so that each hour adds up, too.
    doubts: dict[tuple[int, int], list[float]] = {}
    for device, place in zip(window.devices, place_of, strict=True):
        for hour, uncertainty_mj in enumerate(_cut(device.uncertainty_mj, cuts)):
            doubt = doubts.setdefault((starts_s[hour], place), [0, 0.0])
            doubt[0] += uncertainty_mj
            doubt[1] += device.uncounted_s * (cuts[hour + 1] - cuts[hour])
    measured = [
        MeasuredEnergy(hour_s, there[place], drawn.get((hour_s, place), 0), int(uncertainty_mj), uncounted_s)
        for (hour_s, place), (uncertainty_mj, uncounted_s) in doubts.items()
    ]
    return WindowSpread(entries, measured)


def _number_distinct(values: Sequence[_Value]) -> tuple[list[int], list[_Value]]:
    """The number of each value, the same for equal ones, and the distinct values by number."""
    numbers = dict[_Value, int]()
    return [numbers.setdefault(value, len(numbers)) for value in values], list(numbers)


def _hour_of(at_s: float) -> int:
    return int(at_s // HOUR_S) * HOUR_S


def count_pieces(window: EnergyWindow) -> int:
    """How many pieces a window is cut into by time and share."""
    rows = max(1, len(window.shares), len(window.devices))
    return min(_hours_within(window), max(1, PIECES_MOST // rows)) * rows


def _hours_within(window: EnergyWindow) -> int:
    """How many hours a window touches."""
    hour_ns = HOUR_S * 10**9
    return max(1, -(-window.end_ns // hour_ns) - window.begin_ns // hour_ns)


def _hours(window: EnergyWindow) -> list[tuple[float, float]]:
    """The window cut at whole hours, each piece within one; at fewer of them where the pieces would be too many."""
    begin_s, end_s = window.begin_ns / 1e9, window.end_ns / 1e9
    hours, rows = _hours_within(window), max(1, len(window.shares), len(window.devices))
    step_s = HOUR_S * -(-hours // max(1, PIECES_MOST // rows))
    first = _hour_of(begin_s) + step_s
    if end_s <= first:
        return [(begin_s, end_s)]
    marks = [first + step_s * step for step in range(math.ceil((end_s - first) / step_s))]
    return [(low, high) for low, high in pairwise([begin_s, *marks, end_s]) if high > low]


def _fractions(hours: list[tuple[float, float]]) -> list[float]:
    """Where each piece begins and ends, as a share of all; rises from 0 to 1."""
    begin_s, length_s = hours[0][0], hours[-1][1] - hours[0][0]
    if length_s <= 0.0:
        return [0.0, 1.0]
    return [0.0, *((high - begin_s) / length_s for _, high in hours[:-1]), 1.0]


def _cut(total: int, cuts: list[float]) -> list[int]:
    marks = [0, *(round(total * cut) for cut in cuts[1:-1]), total]
    return [high - low for low, high in pairwise(marks)]


def _price(tariff: EnergyTariff | None, begin_s: float, end_s: float) -> tuple[float, float]:
    """Money and grams of carbon for a joule at a GPU, in the mean of a stretch."""
    if tariff is None:
        return 0.0, 0.0
    grams = EnergyTariff(price=tariff.carbon, pue=tariff.pue, begins_s=tariff.begins_s)
    return _mean(tariff, begin_s, end_s), _mean(grams, begin_s, end_s)


def _mean(tariff: EnergyTariff, begin_s: float, end_s: float) -> float:
    slices = tariff.price_slices(begin_s, end_s - begin_s) if end_s > begin_s else ()
    if len(slices) < 2:
        return tariff.price_at(0.5 * (begin_s + end_s))
    return math.fsum(one.price * one.seconds for one in slices) / (end_s - begin_s)
