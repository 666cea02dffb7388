"""Answers of the energy ledger: questions of one stretch and with the same filters, answered in one pass over the rows.

Owns how rows become groups, and what is left out. Must not know connections: it is given a way to read.

Theory. What takes time is to sum up rows and to look up names, and that is the same for every question about a stretch.
So rows are summed up once, by all the names that any question groups by, and each question sums those up further; one
question alone is the same with nothing left to do. Hours and days are the exception, as they multiply what there is to
look at: questions with them have passes of their own. Sums of joules are of integers, so the way does not matter.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from eelgrid_controller.adapters.energy_tables import (
    PLACED,
    columns_of,
    filters_of,
    is_of_workloads,
    place_filters_of,
    spans_of,
    work_query,
)
from eelgrid_controller.energy_ledger.asking import TIMES, Answer, Asked, Done, Group
from eelgrid_controller.energy_ledger.entries import Spent

__all__ = ["Read", "answers"]

Read: TypeAlias = Callable[[str, Iterable[Any]], list[Any]]
Values: TypeAlias = tuple[str, ...]
_SUMS = "sum(bare), sum(context), sum(active), total(cost), total(carbon)"
_INNER_SUMS = (
    "sum(bare) AS bare, sum(context) AS context, sum(active) AS active, sum(cost) AS cost, sum(carbon) AS carbon"
)
_NOBODY = "CASE WHEN h.kind IN ('unallocated', 'unattributed') THEN h.kind ELSE '' END"


def answers(read: Read, asked: Sequence[Asked]) -> list[Answer]:
    """Answers in the order of the questions, which share their stretch and their filters."""
    ((measured_mj, uncertainty_mj, uncounted_s),) = _measured(read, asked[0])
    found: dict[Asked, Answer] = {}
    passes: dict[Values, list[Asked]] = {}
    for one in asked:
        passes.setdefault(tuple(name for name in TIMES if name in one.group_by), []).append(one)
    for many in passes.values():
        for tally in _tallied(read, many):
            found[tally.asked] = tally.answer(measured_mj, uncertainty_mj, uncounted_s)
    return [found[one] for one in asked]


class _Row(NamedTuple):
    """What one group of the finest kind spent; `kind` says which nobody, `units` those in which it tells its work."""

    kind: str
    units: str
    values: Values
    sums: tuple[Any, ...]


class _Tally:
    """Sums for one question, from rows that are grouped by `names`."""

    def __init__(self, asked: Asked, names: Sequence[str], worked: dict[Values, tuple[Done, ...]]) -> None:
        self.asked = asked
        self._pick = _picked(names, asked.group_by)
        # Names that only an owner has.
        self._owned = [name not in (*PLACED, *TIMES, "kind") for name in asked.group_by]
        self._worked = worked
        self._spent: dict[Values, list[Any]] = {}
        self._nobody: dict[str, list[Any]] = {}
        # Of workloads that tell how much they work.
        self._telling_mj: dict[tuple[Values, str], int] = {}

    def add(self, rows: Iterable[_Row]) -> None:
        spent, pick, is_told = self._spent, self._pick, bool(self._worked)
        for kind, units, values, sums in rows:
            key = pick(values)
            if kind and not self.asked.with_nobody:
                _added(self._nobody, kind, sums)
                continue
            if kind:
                key = tuple(
                    f"({kind})" if is_owned else value for value, is_owned in zip(key, self._owned, strict=True)
                )
            _added(spent, key, sums)
            if units and is_told:
                for unit in units.split("\n"):
                    self._telling_mj[key, unit] = self._telling_mj.get((key, unit), 0) + sum(sums[:3])

    def answer(self, measured_mj: int, uncertainty_mj: int, uncounted_s: float) -> Answer:
        spent = {values: Spent(*sums) for values, sums in self._spent.items()}
        group_by, rows_most = self.asked.group_by, self.asked.rows_most
        chosen = set(spent)
        if group_by and len(spent) > rows_most:
            chosen = set(sorted(spent, key=lambda values: -spent[values].energy_mj)[:rows_most])
        others = [one for values, one in spent.items() if values not in chosen]
        timed = [place for place, name in enumerate(group_by) if name in TIMES]
        groups = sorted(
            chosen, key=lambda values: (*(int(values[place]) for place in timed), -spent[values].energy_mj, values)
        )
        return Answer(
            asked=self.asked, groups=tuple(Group(values, spent[values], self._done(values)) for values in groups),
            left_out=Spent(*map(sum, zip(*others, strict=True))) if others else Spent(), left_out_rows=len(others),
            unallocated=Spent(*self._nobody.get("unallocated", ())),
            unattributed=Spent(*self._nobody.get("unattributed", ())), measured_mj=measured_mj,
            uncertainty_mj=uncertainty_mj, uncounted_s=uncounted_s,
        )  # fmt: skip

    def _done(self, values: Values) -> tuple[Done, ...]:
        telling = self._telling_mj
        return tuple(
            done._replace(energy_mj=telling.get((values, done.unit), 0)) for done in self._worked.get(values, ())
        )


def _added(found: dict[Any, list[Any]], key: Any, sums: Sequence[Any]) -> None:
    """In place: there are a hundred thousand of them."""
    kept = found.get(key)
    if kept is None:
        found[key] = list(sums)
        return
    kept[0] += sums[0]
    kept[1] += sums[1]
    kept[2] += sums[2]
    kept[3] += sums[3]
    kept[4] += sums[4]


def _picked(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Values], Values]:
    """Some values of a row, in the order of those that are wanted."""
    places = [names.index(name) for name in wanted]
    if places == list(range(len(names))):
        return lambda values: values
    if len(places) > 1:
        pick: Callable[[Values], Values] = operator.itemgetter(*places)
        return pick
    return lambda values: tuple(values[place] for place in places)


def _tallied(read: Read, asked: Sequence[Asked]) -> list[_Tally]:
    """One pass for questions that group by the same times."""
    names = _joined(asked)
    worked = _worked(read, asked)
    tallies = [_Tally(one, names, done) for one, done in zip(asked, worked, strict=True)]
    rows = list(_rows(read, replace(asked[0], group_by=names), has_work=any(worked)))
    for tally in tallies:
        tally.add(rows)
    return tallies


def _joined(asked: Iterable[Asked]) -> Values:
    return tuple(dict.fromkeys(name for one in asked for name in one.group_by))


def _rows(read: Read, asked: Asked, *, has_work: bool) -> Iterator[_Row]:
    """Sums by whatever is asked for; one pass for all of them."""
    where, given = filters_of(asked)
    columns, named = columns_of(asked)
    table, bounds = spans_of(asked)
    is_timed = any(name in TIMES for name in asked.group_by)
    is_placed = any(name in PLACED for name in (*asked.group_by, *(name for name, _ in asked.filters)))
    # First by number, which halves what is looked up by name; of single days there is little to sum up.
    keys = "place, holder" if is_placed else "holder"
    joined = (
        f"FROM ({table}) e" if is_timed else f"FROM (SELECT {keys}, {_INNER_SUMS} FROM ({table}) GROUP BY {keys}) e"
    )
    joined += " JOIN holders h ON h.id = e.holder"
    if is_placed:
        joined += " JOIN places p ON p.id = e.place"
    units, work_bounds = "''", tuple[int, ...]()
    if has_work:
        rows, work_bounds = spans_of(asked, "_work")
        units = "coalesce(w.units, '')"
        joined += (
            " LEFT JOIN (SELECT t.id AS holder, group_concat(w.unit, char(10)) AS units FROM works w JOIN holders t "
            "ON t.workload = w.workload AND t.workload <> '' "
            f"WHERE w.id IN (SELECT work FROM ({rows})) GROUP BY t.id) w ON w.holder = e.holder"
        )
    grouped = ", ".join(str(1 + place) for place in range(len(columns) + 2))
    found = read(
        f"SELECT {', '.join([_NOBODY, units, *columns])}, {_SUMS} {joined} {where} GROUP BY {grouped}",
        (*named, *bounds, *work_bounds, *given),
    )
    many = 2 + len(columns)
    if is_timed:
        return (_Row(row[0], row[1], tuple(map(str, row[2:many])), row[many:]) for row in found)
    return (_Row(row[0], row[1], row[2:many], row[many:]) for row in found)


def _worked(read: Read, asked: Sequence[Asked]) -> list[dict[Values, tuple[Done, ...]]]:
    """What was done by group, for each question; empty where nobody told, or where it cuts workloads apart."""
    whole = [one for one in asked if is_of_workloads(one)]
    names = _joined(whole)
    rows = read(*work_query(replace(whole[0], group_by=names))) if whole else []
    found: list[dict[Values, tuple[Done, ...]]] = []
    for one in asked:
        sums: dict[Values, dict[str, list[float]]] = {}
        pick = _picked(names, one.group_by) if rows and is_of_workloads(one) else None
        for *values, unit, amount, counted_s, missed_s in rows if pick is not None else ():
            assert pick is not None
            kept = sums.setdefault(pick(tuple(map(str, values))), {}).setdefault(unit, [0.0, 0.0, 0.0])
            kept[0] += amount
            kept[1] += counted_s
            kept[2] += missed_s
        found.append(
            {
                values: tuple(Done(unit, kept[0], kept[1], kept[2]) for unit, kept in sorted(units.items()))
                for values, units in sums.items()
            }
        )
    return found


def _measured(read: Read, asked: Asked) -> list[tuple[int, int, float]]:
    where, given = place_filters_of(asked)
    table, bounds = spans_of(asked, "_measured")
    return read(
        f"SELECT coalesce(sum(total), 0), coalesce(sum(uncertainty), 0), total(uncounted) FROM ({table}) e "
        f"JOIN places p ON p.id = e.place {where}",
        (*bounds, *given),
    )
