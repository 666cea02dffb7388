"""Execution of energy queries: queries with the same period and filters are answered in one pass over the rows."""

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from eelgrid_controller.energy.ledger import TIME_KEYS, GroupWork, LedgerAmount, LedgerAnswer, LedgerGroup, LedgerQuery
from eelgrid_controller.energy.store.database import HOLDERS, PLACES, WORKS, LedgerReader, SumOverflow
from eelgrid_controller.energy.store.schema import (
    DAMAGED_MOST,
    NO_DAMAGE,
    PLACED,
    Damage,
    DamagedPart,
    columns_of,
    damaged_names,
    damaged_parts,
    filters_of,
    has_every_index,
    is_of_workloads,
    pieces_of,
    place_filters_of,
    spans_of,
    work_query,
)

Values: TypeAlias = tuple[str, ...]
# Amount, counted and missed seconds by group and unit.
WorkTotals: TypeAlias = dict[Values, dict[str, list[float]]]
_SUMS = "sum(bare), sum(context), sum(active), coalesce(sum(cost), 0.0), coalesce(sum(carbon), 0.0)"
_INNER_SUMS = (
    "sum(bare) AS bare, sum(context) AS context, sum(active) AS active, sum(cost) AS cost, sum(carbon) AS carbon"
)
_NOBODY = "CASE WHEN h.kind IN ('unallocated', 'unattributed') THEN h.kind ELSE '' END"


# Above it a sum of columns is taken in Python's integers.
_SUM_MJ_MOST = 2.0**62
# Parts that are told one by one.
_TOLD_MOST = 20


class LedgerUnreadable(Exception):
    """Too much of a ledger is damaged; or an index is, which can be made anew (`can_mend`)."""

    def __init__(self, what: str, *, can_mend: bool = False) -> None:
        self.can_mend = can_mend
        super().__init__(what)


def answer_queries(read: LedgerReader, asked: Sequence[LedgerQuery]) -> tuple[list[LedgerAnswer], Damage]:
    """Answers in the order of the questions, which share their stretch and their filters, and what they leave out.

    Raises Unreadable.
    """
    damage = _damage(read, asked)
    words = describe_damage(read, damage)
    return [replace(one, damaged=words) for one in _answers(read, asked, damage)], damage


def _damage(read: LedgerReader, asked: Sequence[LedgerQuery]) -> Damage:
    """What the questions must not use."""
    by_pieces = {pieces_of(one): one for one in asked}
    parts = damaged_parts(read, dict.fromkeys(piece for pieces in by_pieces for piece in pieces))
    if len(parts) > DAMAGED_MOST:
        raise LedgerUnreadable(f"more than {DAMAGED_MOST} hours of nodes do not agree with their checksums")
    damage, holders, works = Damage(parts=tuple(parts)), set[int](), set[int]()
    for one in by_pieces.values():
        rows, bounds = spans_of(one, "", damage)
        holders.update(damaged_names(read, HOLDERS, f"SELECT DISTINCT holder AS id FROM ({rows}) r", bounds))
        if any(map(is_of_workloads, asked)):
            rows, bounds = spans_of(one, "_work", damage)
            works.update(damaged_names(read, WORKS, f"SELECT DISTINCT work AS id FROM ({rows}) r", bounds))
    # A place that is not there any more is found by the rows that name it.
    places = damaged_names(read, PLACES, "SELECT id FROM places", ())
    for one in by_pieces.values():
        rows, bounds = spans_of(one, "_measured", damage)
        places += damaged_names(read, PLACES, f"SELECT DISTINCT place AS id FROM ({rows}) r", bounds)
    damage = damage._replace(
        holders=tuple(sorted(holders)), places=tuple(sorted(set(places))), works=tuple(sorted(works))
    )
    if max(map(len, damage)) > DAMAGED_MOST:
        raise LedgerUnreadable(f"more than {DAMAGED_MOST} names do not agree with their checksums")
    has_work = read.dialect.checks_indexes and any(map(is_of_workloads, asked))
    for one in by_pieces.values() if has_work else ():
        (rows, bounds), (work, _) = spans_of(one, "", damage), spans_of(one, "_work", damage)
        is_told = read(f"SELECT 1 FROM ({work}) r LIMIT 1", bounds)
        if is_told and not has_every_index(read, rows, f"SELECT work FROM ({work})", (*bounds, *bounds)):
            raise LedgerUnreadable("an index of names does not agree with its table", can_mend=True)
    return damage


def describe_damage(read: LedgerReader, damage: Damage) -> tuple[str, ...]:
    """What is left out of an answer, for people."""
    nodes = dict(read("SELECT id, node FROM places", ())) if damage.parts else {}
    words = [_part_words(part, nodes) for part in damage.parts[:_TOLD_MOST]]
    if len(damage.parts) > _TOLD_MOST:
        words.append(f"{len(damage.parts) - _TOLD_MOST} hours or days of nodes more")
    for name, ids in (("owners", damage.holders), ("nodes", damage.places), ("workloads that tell work", damage.works)):
        if ids:
            words.append(f"all of {len(ids)} {name} whose names are damaged")
    return tuple(words)


def _part_words(part: DamagedPart, nodes: Mapping[int, str]) -> str:
    span = "the day" if part.table == "daily" else "the hour"
    try:
        moment = datetime.fromtimestamp(part.at_s, UTC).strftime(
            "%Y-%m-%d" if part.table == "daily" else "%Y-%m-%d %H:%M"
        )
    except (OverflowError, ValueError, OSError, TypeError):
        moment = str(part.at_s)
    whose = f"node {nodes[part.place]}" if part.place in nodes else "work" if not part.place else f"place {part.place}"
    return f"{span} {moment} UTC of {whose}"


def _answers(read: LedgerReader, asked: Sequence[LedgerQuery], damage: Damage) -> list[LedgerAnswer]:
    found: dict[LedgerQuery, LedgerAnswer] = {}
    passes: dict[Values, list[LedgerQuery]] = {}
    for one in asked:
        passes.setdefault(tuple(name for name in TIME_KEYS if name in one.group_by), []).append(one)
    for many in passes.values():
        names, worked = _join_group_keys(many), _read_work_totals(read, many, damage)
        # Of the same rows: hours go before days.
        (measured,) = _read_measured(read, many[0], damage)
        rows = _rows(read, replace(many[0], group_by=names), damage, has_work=any(worked), is_last=len(many) == 1)
        for one, done in zip(many, worked, strict=True):
            found[one] = _Tally(one, names, done).build_answer(rows, measured)
    return [found[one] for one in asked]


class _Rows(NamedTuple):
    """What holders spent, row by row: of which nobody, the units in which work is told, names, and sums by column."""

    kinds: list[str]
    units: list[str]
    values: list[Values]
    parts_mj: npt.NDArray[Any]  # (rows, 3)
    money: npt.NDArray[np.float64]  # (rows, 2)

    def spent(self, chosen: npt.NDArray[Any]) -> LedgerAmount:
        """The sum of some rows."""
        parts_mj, money = self.parts_mj[chosen].sum(axis=0).tolist(), self.money[chosen].sum(axis=0).tolist()
        return LedgerAmount(*parts_mj, *money)


class _Sums(NamedTuple):
    """Of groups: rows of `parts_mj` and `money` in the order of `names`."""

    names: list[Values]
    parts_mj: npt.NDArray[Any]
    money: npt.NDArray[np.float64]


class _Tally:
    """Sums for one question, from rows that have values for `names`."""

    def __init__(self, asked: LedgerQuery, names: Sequence[str], worked: WorkTotals) -> None:
        self.asked = asked
        self._pick = _pick_columns(names, asked.group_by)
        self._worked = worked
        # Names that only an owner has.
        self._owned = [name not in (*PLACED, *TIME_KEYS, "kind") for name in asked.group_by]

    def build_answer(self, rows: _Rows, measured: tuple[int, int, float]) -> LedgerAnswer:
        keys = self._keys(rows)
        kinds = np.array(rows.kinds, dtype=object)
        is_shown = np.ones(len(keys), dtype=bool) if self.asked.with_nobody else kinds == ""
        sums = _group_rows(keys, rows, np.flatnonzero(is_shown))
        energy_mj, most = sums.parts_mj.sum(axis=1), self.asked.rows_most
        by_size = np.argsort(-energy_mj, kind="stable")
        chosen, others = (by_size[:most], by_size[most:]) if self.asked.group_by else (by_size, by_size[:0])
        names = [sums.names[at] for at in chosen.tolist()]
        telling_mj = self._telling(keys, rows, set(names))
        groups = [
            LedgerGroup(
                sums.names[at],
                LedgerAmount(*sums.parts_mj[at].tolist(), *sums.money[at].tolist()),
                self._done(sums.names[at], telling_mj),
            )
            for at in chosen.tolist()
        ]
        timed = [place for place, name in enumerate(self.asked.group_by) if name in TIME_KEYS]
        groups.sort(key=lambda one: (*(int(one.values[place]) for place in timed), -one.spent.energy_mj, one.values))
        unallocated, unattributed = (
            rows.spent(np.flatnonzero(~is_shown & (kinds == kind))) for kind in ("unallocated", "unattributed")
        )
        measured_mj, uncertainty_mj, uncounted_s = measured
        return LedgerAnswer(
            asked=self.asked,
            groups=tuple(groups),
            left_out=LedgerAmount(
                *sums.parts_mj[others].sum(axis=0).tolist(), *sums.money[others].sum(axis=0).tolist()
            ),
            left_out_rows=len(others),
            unallocated=unallocated,
            unattributed=unattributed,
            measured_mj=measured_mj,
            uncertainty_mj=uncertainty_mj,
            uncounted_s=uncounted_s,
        )

    def _keys(self, rows: _Rows) -> list[Values]:
        keys = list(map(self._pick, rows.values))
        if self.asked.with_nobody:
            for at, kind in enumerate(rows.kinds):
                if kind:
                    named = zip(keys[at], self._owned, strict=True)
                    keys[at] = tuple(f"({kind})" if is_owned else value for value, is_owned in named)
        return keys

    def _telling(self, keys: list[Values], rows: _Rows, chosen: Collection[Values]) -> Counter[tuple[Values, str]]:
        """Joules of workloads that tell how much they work, by group and unit."""
        found: Counter[tuple[Values, str]] = Counter()
        if self._worked:
            energy_mj = rows.parts_mj.sum(axis=1).tolist()
            for at, units in enumerate(rows.units):
                if units and keys[at] in chosen and not rows.kinds[at]:
                    for unit in units.split("\n"):
                        found[keys[at], unit] += energy_mj[at]
        return found

    def _done(self, values: Values, telling_mj: Counter[tuple[Values, str]]) -> tuple[GroupWork, ...]:
        units = self._worked.get(values, {})
        return tuple(
            GroupWork(unit, kept[0], kept[1], kept[2], telling_mj[values, unit]) for unit, kept in sorted(units.items())
        )


def _group_rows(keys: list[Values], rows: _Rows, chosen: npt.NDArray[np.intp]) -> _Sums:
    """Sums of rows with the same key; joules as integers, so none is lost."""
    index: dict[Values, int] = {}
    codes = np.array([index.setdefault(keys[at], len(index)) for at in chosen.tolist()], dtype=np.intp)
    if not len(codes):
        return _Sums([], np.zeros((0, 3), dtype=np.int64), np.zeros((0, 2)))
    order = np.argsort(codes, kind="stable")
    begins = np.flatnonzero(np.diff(codes[order], prepend=-1))
    taken = chosen[order]
    return _Sums(
        list(index),
        np.add.reduceat(rows.parts_mj[taken], begins, axis=0),
        np.add.reduceat(rows.money[taken], begins, axis=0),
    )


def _pick_columns(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Values], Values]:
    """Some values of a row, in the order of those that are wanted."""
    places = [names.index(name) for name in wanted]
    if places == list(range(len(names))):
        return lambda values: values
    if len(places) > 1:
        pick: Callable[[Values], Values] = operator.itemgetter(*places)
        return pick
    # As slices, which are tuples already.
    only = slice(places[0], places[0] + 1) if places else slice(0)
    return lambda values: values[only]


def _join_group_keys(asked: Iterable[LedgerQuery]) -> Values:
    return tuple(dict.fromkeys(name for one in asked for name in one.group_by))


def _rows(
    read: LedgerReader, asked: LedgerQuery, damage: Damage = NO_DAMAGE, *, has_work: bool, is_last: bool
) -> _Rows:
    """Sums by whatever is asked for; one pass for all of them.

    Where they are summed up further anyway, names need not be compared here: sums by holder and place will do.
    """
    where, given = filters_of(asked, read.dialect)
    columns, named = columns_of(asked, read.dialect)
    table, bounds = spans_of(asked, "", damage)
    is_timed = any(name in TIME_KEYS for name in asked.group_by)
    is_placed = any(name in PLACED for name in (*asked.group_by, *(name for name, _ in asked.filters)))
    # First by number, which halves what is looked up by name; of single days there is little to sum up.
    keys = "place, holder" if is_placed else "holder"
    joined = (
        f"FROM ({table}) e" if is_timed else f"FROM (SELECT {keys}, {_INNER_SUMS} FROM ({table}) r GROUP BY {keys}) e"
    )
    joined += " JOIN holders h ON h.id = e.holder"
    if is_placed:
        joined += " JOIN places p ON p.id = e.place"
    units, work_bounds = "''", tuple[int, ...]()
    if has_work:
        rows, work_bounds = spans_of(asked, "_work", damage)
        units = "coalesce(w.units, '')"
        joined += (
            f" LEFT JOIN (SELECT t.id AS holder, {read.dialect.join_lines('w.unit')} AS units FROM works w JOIN holders t "
            "ON t.workload = w.workload AND t.workload <> '' "
            f"WHERE w.id IN (SELECT work FROM ({rows}) r) GROUP BY t.id) w ON w.holder = e.holder"
        )
    sums, grouped = "bare, context, active, cost, carbon", ""
    if is_timed or is_last:
        sums, grouped = _SUMS, f"GROUP BY {', '.join(str(1 + place) for place in range(len(columns) + 2))}"
    found = _read_sums(
        read,
        f"SELECT {', '.join([_NOBODY, units, *columns])}, {sums} {joined} {where} {grouped}",
        (*named, *bounds, *work_bounds, *given),
    )
    many = 2 + len(columns)
    return _Rows(
        kinds=[row[0] for row in found],
        units=[row[1] for row in found],
        values=[tuple(map(str, row[2:many])) for row in found] if is_timed else [row[2:many] for row in found],
        parts_mj=_whole([row[many : many + 3] for row in found]),
        money=np.array([row[many + 3 :] for row in found], dtype=np.float64).reshape(-1, 2),
    )


def _read_sums(read: LedgerReader, sql: str, given: Iterable[Any]) -> list[Any]:
    """Rows with sums; as floats where an integer of the database would overflow."""
    given = tuple(given)
    try:
        return read(sql, given)
    except SumOverflow:
        return read(sql.replace("sum(", "total("), given)


def _whole(rows: Sequence[Sequence[float]]) -> npt.NDArray[Any]:
    """Amounts in three columns, as integers that no sum over all rows overflows."""
    rough = np.array(rows, dtype=np.float64).reshape(-1, 3)
    if np.abs(rough).sum() < _SUM_MJ_MOST:
        return np.array(rows, dtype=np.int64).reshape(-1, 3)
    exact = np.empty(rough.shape, dtype=object)
    for at, row in enumerate(rows):
        exact[at] = [int(value) for value in row]
    return exact


def _read_work_totals(read: LedgerReader, asked: Sequence[LedgerQuery], damage: Damage) -> list[WorkTotals]:
    """What was done by group, for each question; empty where nobody told, or where it cuts workloads apart."""
    whole = [one for one in asked if is_of_workloads(one)]
    names = _join_group_keys(whole)
    rows = read(*work_query(replace(whole[0], group_by=names), read.dialect, damage)) if whole else []
    many = len(names)
    found: list[WorkTotals] = []
    for one in asked:
        sums: WorkTotals = {}
        if rows and is_of_workloads(one):
            pick, is_timed = _pick_columns(names, one.group_by), any(name in TIME_KEYS for name in one.group_by)
            for row in rows:
                key = pick(row[:many])
                kept = sums.setdefault(tuple(map(str, key)) if is_timed else key, {}).setdefault(row[many], [0.0] * 3)
                kept[0] += row[many + 1]
                kept[1] += row[many + 2]
                kept[2] += row[many + 3]
        found.append(sums)
    return found


def _read_measured(read: LedgerReader, asked: LedgerQuery, damage: Damage) -> list[tuple[int, int, float]]:
    where, given = place_filters_of(asked)
    table, bounds = spans_of(asked, "_measured", damage)
    ((total_mj, uncertainty_mj, uncounted_s),) = _read_sums(
        read,
        f"SELECT coalesce(sum(total), 0), coalesce(sum(uncertainty), 0), coalesce(sum(uncounted), 0.0) FROM ({table}) e "
        f"JOIN places p ON p.id = e.place {where}",
        (*bounds, *given),
    )
    return [(int(total_mj), int(uncertainty_mj), uncounted_s)]
