"""Spending limits: keys, the workloads they cover, text formats and the bounds of their periods.

A limit is one of a subject (a namespace, a user, a queue, a label with one value), a quantity and a period; there is
one of each. A workload belongs to a subject by its specification, as the energy ledger charges it: its user is `user`,
else its label `user`.

The energy ledger has whole hours of UTC, so a period begins at the last of these before local midnight: where the
offset from UTC is no whole number of hours, up to 59 minutes early.
"""

from datetime import date, timedelta
from typing import NamedTuple

from eelgrid_protos.messages import (
    EnforcementMode,
    SpendingLimit,
    SpendingPeriod,
    SpendingQuantity,
    SpendingScope,
    WorkloadSpec,
)

WARN_RATIO = 0.8


class QuantityUnit(NamedTuple):
    """How people write a quantity: its name in commands and in sentences, and what one of it is in SI units."""

    name: str
    words: str
    size: float


QUANTITY_UNITS = {
    SpendingQuantity.GPU_TIME: QuantityUnit("gpu-hours", "GPU-hours", 3600.0),
    SpendingQuantity.ENERGY: QuantityUnit("kwh", "kWh", 3.6e6),
    SpendingQuantity.MONEY: QuantityUnit("money", "money", 1.0),
    SpendingQuantity.CARBON: QuantityUnit("co2-kg", "kg of CO2", 1000.0),
}


class SpendingDimension(NamedTuple):
    """What subjects of one sort are told apart by; `label` is the key of a label."""

    scope: SpendingScope
    label: str = ""

    @property
    def group(self) -> str:
        """The energy ledger's name for it."""
        return f"label:{self.label}" if self.scope is SpendingScope.LABEL else self.scope.name.lower()


class SpendingKey(NamedTuple):
    """What there is one limit of."""

    dimension: SpendingDimension
    name: str
    quantity: SpendingQuantity
    period: SpendingPeriod


def spending_dimension(limit: SpendingLimit) -> SpendingDimension:
    """By what its subject is told apart."""
    return SpendingDimension(limit.scope, limit.label)


def spending_key(limit: SpendingLimit) -> SpendingKey:
    """What there is but one limit of."""
    return SpendingKey(spending_dimension(limit), limit.name, limit.quantity, limit.period)


def subject_name(spec: WorkloadSpec, dimension: SpendingDimension) -> str:
    """The subject that a workload belongs to; empty for none."""
    match dimension.scope:
        case SpendingScope.NAMESPACE:
            return spec.namespace
        case SpendingScope.USER:
            return spec.user or spec.labels.get("user", "")
        case SpendingScope.QUEUE:
            return spec.queue
        case _:
            return spec.labels.get(dimension.label, "")


def warn_ratio_of(limit: SpendingLimit) -> float:
    """The share at which it counts as nearly spent."""
    return WARN_RATIO if limit.warn_ratio is None else limit.warn_ratio


def format_subject(limit: SpendingLimit) -> str:
    """The subject as commands have it: `namespace=research`, `label:team=vision`."""
    return f"{spending_dimension(limit).group}={limit.name}"


def describe_subject(limit: SpendingLimit) -> str:
    """The same in a sentence."""
    return f"label {limit.label}={limit.name}" if limit.label else f"{limit.scope.name.lower()} {limit.name}"


def format_amount(quantity: SpendingQuantity, amount: float) -> str:
    """An amount as people write it: whole numbers from a hundred on, three digits below."""
    shown = amount / QUANTITY_UNITS[quantity].size
    return f"{shown:,.0f}" if shown >= 100.0 else f"{shown:.3g}"


def describe_unit(quantity: SpendingQuantity, currency: str) -> str:
    """The unit in a sentence."""
    is_money = quantity is SpendingQuantity.MONEY
    return currency or "money" if is_money else QUANTITY_UNITS[quantity].words


def limit_name(limit: SpendingLimit) -> str:
    """The limit without its amount, as metrics name it."""
    return f"{format_subject(limit)} {QUANTITY_UNITS[limit.quantity].name} per {limit.period.name.lower()}"


def format_limit(limit: SpendingLimit, most: float | None = None) -> str:
    """The limit as `eelctl policy set --spend` takes it, with another amount where one is given."""
    amount = QUANTITY_UNITS[limit.quantity]
    shown = (limit.most if most is None else most) / amount.size
    options = ", observe" if limit.mode is EnforcementMode.OBSERVE else ""
    if limit.warn_ratio is not None:
        options += f", warn at {100.0 * limit.warn_ratio:.6g}%"
    return f"{format_subject(limit)} {amount.name}={shown:.12g} per {limit.period.name.lower()}{options}"


_DAY_S = 86_400
_HOUR_S = 3600
_EPOCH = date(1970, 1, 1)


class PeriodBounds(NamedTuple):
    """From a whole hour of Unix time to another, in seconds."""

    begin_s: int
    end_s: int


def period_bounds_at(period: SpendingPeriod, at_s: float, utc_offset_minutes: int) -> PeriodBounds:
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
    return PeriodBounds((first - _EPOCH).days * _DAY_S - offset_s, (after - _EPOCH).days * _DAY_S - offset_s)


def _offset_s(utc_offset_minutes: int) -> int:
    """Rounded up to whole hours, so that midnight comes no later than on the wall."""
    return -(-utc_offset_minutes // 60) * _HOUR_S


def _local(at_s: float, utc_offset_minutes: int) -> tuple[date, int]:
    """The day and its minute."""
    minutes = int(at_s // 60) + utc_offset_minutes
    return _EPOCH + timedelta(days=minutes // (24 * 60)), minutes % (24 * 60)


def describe_period(period: SpendingPeriod, stretch: PeriodBounds, utc_offset_minutes: int) -> str:
    """The period in a sentence: November, the week of 16 November, 22 November."""
    # A few hours into it, whatever the offset: its begin may be the evening before by the wall's clock.
    day, _ = _local(stretch.begin_s + _HOUR_S, utc_offset_minutes)
    if period is SpendingPeriod.MONTH:
        return f"{day:%B}"
    return f"{'the week of ' if period is SpendingPeriod.WEEK else ''}{day.day} {day:%B}"


def describe_moment(at_s: float, utc_offset_minutes: int) -> str:
    """A moment by the wall's clock: 1 December 00:00."""
    day, minute = _local(at_s, utc_offset_minutes)
    return f"{day.day} {day:%B} {minute // 60:02}:{minute % 60:02}"
