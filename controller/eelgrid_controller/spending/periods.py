"""When a spending period begins and ends, by the calendar of a place.

Owns days, weeks from Monday, and months. Must not know what is spent in them.

Theory. The energy ledger has whole hours of UTC, so a period begins at the last of these before
local midnight: where the offset from UTC is no whole number of hours, up to 59 minutes early.
"""

from datetime import date, timedelta
from typing import NamedTuple

from eelgrid_protos.messages import SpendingPeriod

__all__ = ["Stretch", "moment_words", "stretch_at", "stretch_words"]

_DAY_S = 86_400
_HOUR_S = 3600
_EPOCH = date(1970, 1, 1)


class Stretch(NamedTuple):
    """From a whole hour of Unix time to another, in seconds."""

    begin_s: int
    end_s: int


def stretch_at(period: SpendingPeriod, at_s: float, utc_offset_minutes: int) -> Stretch:
    """The period that a time of 1970 or later is in."""
    offset_s = _offset_s(utc_offset_minutes)
    day = _EPOCH + timedelta(days=(at_s + offset_s) // _DAY_S)
    if period is SpendingPeriod.MONTH:
        first = day.replace(day=1)
        after = (first + timedelta(days=31)).replace(day=1)
    elif period is SpendingPeriod.WEEK:
        first = day - timedelta(days=day.weekday())
        after = first + timedelta(days=7)
    else:
        first, after = day, day + timedelta(days=1)
    return Stretch((first - _EPOCH).days * _DAY_S - offset_s, (after - _EPOCH).days * _DAY_S - offset_s)


def _offset_s(utc_offset_minutes: int) -> int:
    """Rounded up to whole hours, so that midnight comes no later than on the wall."""
    return -(-utc_offset_minutes // 60) * _HOUR_S


def _local(at_s: float, utc_offset_minutes: int) -> tuple[date, int]:
    """The day and its minute."""
    minutes = int(at_s // 60) + utc_offset_minutes
    return _EPOCH + timedelta(days=minutes // (24 * 60)), minutes % (24 * 60)


def stretch_words(period: SpendingPeriod, stretch: Stretch, utc_offset_minutes: int) -> str:
    """The period in a sentence: November, the week of 16 November, 22 November."""
    # A few hours into it, whatever the offset: its begin may be the evening before by the wall's clock.
    day, _ = _local(stretch.begin_s + _HOUR_S, utc_offset_minutes)
    if period is SpendingPeriod.MONTH:
        return f"{day:%B}"
    return f"{'the week of ' if period is SpendingPeriod.WEEK else ''}{day.day} {day:%B}"


def moment_words(at_s: float, utc_offset_minutes: int) -> str:
    """A moment by the wall's clock: 1 December 00:00."""
    day, minute = _local(at_s, utc_offset_minutes)
    return f"{day.day} {day:%B} {minute // 60:02}:{minute % 60:02}"
