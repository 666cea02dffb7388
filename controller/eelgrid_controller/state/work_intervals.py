"""Work intervals: how much useful work (tokens, requests, steps) a workload did between two moments.

Owns how intervals are joined and spread over hours. The objectives loop produces them and the energy ledger divides
joules by them; must know neither.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

_HOUR_S = 3600

REQUEST, TOKEN, WORK = "request", "token", "work"
# Scrapes and cycles of the objectives loop use different clocks.
_SNAP_S = 20.0
_GAP_S_MOST = 400 * 24 * 3600.0
# Entries of one interval: two days by the hour; a longer interval has entries of several hours, each counted in its
# first.
_HOURS_MOST = 48


class WorkInterval(NamedTuple):
    """Units of work done between two moments, in seconds of Unix time."""

    workload: str
    unit: str
    amount: float
    begin_s: float
    end_s: float
    is_whole: bool = True  # False: `amount` is a lower bound


class WorkEntry(NamedTuple):
    """Work to add to one hour of a workload; `until_s` is the end of the interval from which it came."""

    hour_s: int
    workload: str
    unit: str
    amount: float
    counted_s: float
    missed_s: float
    until_s: float


def join_increment(worked: WorkInterval, until_s: float | None) -> WorkInterval:
    """Moves the begin of an interval to the end of the previous one if they differ by no more than clock skew."""
    begin_s = min(worked.begin_s, worked.end_s)
    if until_s is not None and abs(begin_s - until_s) <= _SNAP_S:
        begin_s = until_s
    return worked._replace(begin_s=max(begin_s, until_s or begin_s), end_s=max(worked.end_s, until_s or begin_s))


def spread_work(worked: WorkInterval, until_s: float | None) -> list[WorkEntry]:
    """Spreads an interval over hours; `until_s` is the end of the previous one of this workload and unit, None if none.

    The time between the two was missed. An end after this interval comes from a clock that was set back since, so
    that nothing is known about the time between. A non-finite amount counts as zero.
    """
    if not all(map(math.isfinite, (worked.amount, worked.begin_s, worked.end_s))):
        return []
    if until_s is not None and until_s > worked.end_s + _SNAP_S:
        until_s = None
    worked = join_increment(worked, until_s)
    found = []
    if until_s is not None and worked.begin_s > until_s:
        begin_s = max(until_s, worked.begin_s - _GAP_S_MOST)
        found += [_entry(worked, hour_s, 0.0, 0.0, seconds) for hour_s, seconds in _hours(begin_s, worked.begin_s)]
    length_s = worked.end_s - worked.begin_s
    for hour_s, seconds in _hours(worked.begin_s, worked.end_s):
        amount = worked.amount * (seconds / length_s if length_s else 1.0)
        counted_s, missed_s = (seconds, 0.0) if worked.is_whole else (0.0, seconds)
        found.append(_entry(worked, hour_s, amount, counted_s, missed_s))
    return found


def _entry(worked: WorkInterval, hour_s: int, amount: float, counted_s: float, missed_s: float) -> WorkEntry:
    return WorkEntry(hour_s, worked.workload, worked.unit, amount, counted_s, missed_s, worked.end_s)


def _hours(begin_s: float, end_s: float) -> Iterable[tuple[int, float]]:
    """Yields the hours of an interval with the seconds in each; an empty interval is in one hour."""
    hour_s = int(begin_s // _HOUR_S) * _HOUR_S
    step_s = _HOUR_S * max(1, math.ceil((end_s - hour_s) / (_HOUR_S * _HOURS_MOST)))
    yield hour_s, min(end_s, hour_s + step_s) - begin_s
    while (hour_s := hour_s + step_s) < end_s:
        yield hour_s, min(end_s, hour_s + step_s) - hour_s
