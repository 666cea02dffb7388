"""Spending limits and their state: GPU time by limit, which limits are exceeded, and which work waits for one.

A limit is one of a subject (a namespace, a user, a queue, a label with one value), a quantity and a period; there is
one of each. A workload belongs to a subject by its specification, as the energy ledger charges it: its user is `user`,
else its label `user`. The energy ledger has whole hours of UTC, so a period begins at the last of these before local
midnight: where the offset from UTC is not a whole number of hours, up to 59 minutes early.

GPU time is the integral of held GPUs over the journal's times: whole thousandths of GPUs times nanoseconds, the same
after a restart and in every replay. A share of a GPU counts as that share, a MIG slice as its share of the GPU's
compute slices. Journal times may go back after a clock change: a time in another period ends this period's sum, which
is kept for a return; within a period a time that goes back counts nothing twice. A limit that is set in the middle of
a period is charged with the workloads that are still known.

Energy, money and carbon come from the ledger, which is not part of the journal, so exceeded limits arrive as an event,
`SpendingJudged`, with the figures they were judged by: when a limit becomes exceeded or no longer is, and for each
hundredth beyond. A raised limit counts from the policy event on; a lowered one from the next evaluation.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import Annotated, Any, NamedTuple, Self

from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.messages import (
    EnforcementMode,
    Policy,
    SpendingLimit,
    SpendingPeriod,
    SpendingQuantity,
    SpendingScope,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, Nanoseconds, Range, Uint64

WARN_RATIO = 0.8


class QuantityUnit(NamedTuple):
    """A quantity for people: its name in commands and in sentences, and the size of one unit in SI units."""

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
    """A kind of subject; `label` is the key of a label."""

    scope: SpendingScope
    label: str = ""

    @property
    def group(self) -> str:
        """The energy ledger's name for it."""
        return f"label:{self.label}" if self.scope is SpendingScope.LABEL else self.scope.name.lower()


class SpendingKey(NamedTuple):
    """Key of a limit: there is one limit per key."""

    dimension: SpendingDimension
    name: str
    quantity: SpendingQuantity
    period: SpendingPeriod


def spending_dimension(limit: SpendingLimit) -> SpendingDimension:
    """Returns the kind of subject of a limit."""
    return SpendingDimension(limit.scope, limit.label)


def spending_key(limit: SpendingLimit) -> SpendingKey:
    """Returns the key of a limit."""
    return SpendingKey(spending_dimension(limit), limit.name, limit.quantity, limit.period)


def subject_name(spec: WorkloadSpec, dimension: SpendingDimension) -> str:
    """Returns the subject that a workload belongs to; empty for none."""
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
    """Returns the share at which a limit counts as nearly spent."""
    return WARN_RATIO if limit.warn_ratio is None else limit.warn_ratio


def format_subject(limit: SpendingLimit) -> str:
    """Formats the subject as commands do: `namespace=research`, `label:team=vision`."""
    return f"{spending_dimension(limit).group}={limit.name}"


def describe_subject(limit: SpendingLimit) -> str:
    """Formats the subject for a sentence."""
    return f"label {limit.label}={limit.name}" if limit.label else f"{limit.scope.name.lower()} {limit.name}"


def format_amount(quantity: SpendingQuantity, amount: float) -> str:
    """Formats an amount: whole numbers from 100, three digits below."""
    shown = amount / QUANTITY_UNITS[quantity].size
    return f"{shown:,.0f}" if shown >= 100.0 else f"{shown:.3g}"


def describe_unit(quantity: SpendingQuantity, currency: str) -> str:
    """Formats the unit for a sentence."""
    is_money = quantity is SpendingQuantity.MONEY
    return currency or "money" if is_money else QUANTITY_UNITS[quantity].words


def limit_name(limit: SpendingLimit) -> str:
    """Formats a limit without its amount, as metrics name it."""
    return f"{format_subject(limit)} {QUANTITY_UNITS[limit.quantity].name} per {limit.period.name.lower()}"


def format_limit(limit: SpendingLimit, most: float | None = None) -> str:
    """Formats a limit as `eelctl policy set --spend` takes it, with another amount if one is given."""
    amount = QUANTITY_UNITS[limit.quantity]
    shown = (limit.most if most is None else most) / amount.size
    options = ", observe" if limit.mode is EnforcementMode.OBSERVE else ", stop" if limit.stops else ""
    if limit.warn_ratio is not None:
        options += f", warn at {100.0 * limit.warn_ratio:.6g}%"
    return f"{format_subject(limit)} {amount.name}={shown:.12g} per {limit.period.name.lower()}{options}"


_DAY_S = 86_400
_HOUR_S = 3600
_EPOCH = date(1970, 1, 1)


class PeriodBounds(NamedTuple):
    """Begin and end of a period: whole hours of Unix time, in seconds."""

    begin_s: int
    end_s: int


def period_bounds_at(period: SpendingPeriod, at_s: float, utc_offset_minutes: int) -> PeriodBounds:
    """Returns the period that contains a Unix time."""
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


def day_bounds(at_ns: int, utc_offset_minutes: int) -> PeriodBounds:
    """Returns the day that contains a time, in nanoseconds since 1970: what is called today."""
    return period_bounds_at(SpendingPeriod.DAY, at_ns // _NS, utc_offset_minutes)


def _offset_s(utc_offset_minutes: int) -> int:
    """Rounded up to whole hours, so that midnight comes no later than on the wall."""
    return -(-utc_offset_minutes // 60) * _HOUR_S


def _local(at_s: float, utc_offset_minutes: int) -> tuple[date, int]:
    """The day and its minute."""
    minutes = int(at_s // 60) + utc_offset_minutes
    return _EPOCH + timedelta(days=minutes // (24 * 60)), minutes % (24 * 60)


def describe_period(period: SpendingPeriod, stretch: PeriodBounds, utc_offset_minutes: int) -> str:
    """Formats a period for a sentence: November, the week of 16 November, 22 November."""
    # A few hours into it, whatever the offset: its begin may be the evening before by the wall's clock.
    day, _ = _local(stretch.begin_s + _HOUR_S, utc_offset_minutes)
    if period is SpendingPeriod.MONTH:
        return f"{day:%B}"
    return f"{'the week of ' if period is SpendingPeriod.WEEK else ''}{day.day} {day:%B}"


def describe_moment(at_s: float, utc_offset_minutes: int) -> str:
    """Formats a moment in local time: 1 December 00:00."""
    day, minute = _local(at_s, utc_offset_minutes)
    return f"{day.day} {day:%B} {minute // 60:02}:{minute % 60:02}"


_NS = 10**9
# Of the sum, in a GPU-second.
_SECOND = GPU_MILLI_WHOLE * _NS


# What a workload is charged with under a policy, or was when it ended, in thousandths of GPUs.
CountHeld = Callable[[Policy, Workload], int]


class PeriodSum(NamedTuple):
    """GPU time of a period up to a moment."""

    stretch: PeriodBounds
    at_ns: int
    total: int


@dataclass(slots=True)
class GpuTime:
    """GPU time of the period that `at_ns` is in, and what is held now."""

    period: SpendingPeriod
    utc_offset_minutes: int
    stretch: PeriodBounds
    at_ns: int
    total: int = 0
    held: dict[str, int] = field(default_factory=dict)  # milli, by workload
    held_sum: int = 0
    before: PeriodSum | None = None  # of the period that the times were in before

    @classmethod
    def start_period(cls, period: SpendingPeriod, utc_offset_minutes: int, now_ns: int) -> Self:
        """Creates a sum with nothing held and nothing spent."""
        return cls(period, utc_offset_minutes, period_bounds_at(period, now_ns // _NS, utc_offset_minutes), now_ns)

    def add(self, workload: Workload, milli: int) -> None:
        """Counts what a workload has held until now, with the replicas that it has, or had at its end."""
        if not milli:
            return
        end_ns = workload.ended_ns or self.at_ns
        self.total += milli * max(0, min(end_ns, self.at_ns) - max(workload.placed_ns, self.stretch.begin_s * _NS))
        if workload.phase is WorkloadPhase.PLACED:
            self.set_held(workload.workload_id, milli)

    def set_held(self, workload_id: str, milli: int) -> None:
        """Sets what a workload holds at the time of the sum."""
        self.held_sum += milli - self.held.pop(workload_id, 0)
        if milli:
            self.held[workload_id] = milli

    def advance(self, now_ns: int) -> None:
        """Advances the sum to a moment."""
        found, is_other = self._until(now_ns)
        if is_other:
            self.before = PeriodSum(self.stretch, self.at_ns, self.total)
        self.stretch, self.at_ns, self.total = found

    def _until(self, now_ns: int) -> tuple[PeriodSum, bool]:
        """Returns the sum at a moment, and whether that is in another period."""
        known = PeriodSum(self.stretch, self.at_ns, self.total)
        is_other = not _is_in(known.stretch, now_ns)
        if is_other:
            if self.before is not None and _is_in(self.before.stretch, now_ns):
                known = self.before
            else:
                stretch = period_bounds_at(self.period, now_ns // _NS, self.utc_offset_minutes)
                known = PeriodSum(stretch, stretch.begin_s * _NS, 0)
        passed_ns = max(0, now_ns - known.at_ns)
        return PeriodSum(known.stretch, now_ns, known.total + self.held_sum * passed_ns), is_other

    def spent_s(self, now_ns: int) -> float:
        """Returns the GPU-seconds from the begin of the period until the moment."""
        return self._until(now_ns)[0].total / _SECOND

    @property
    def held_gpus(self) -> float:
        """GPUs that are held now."""
        return self.held_sum / GPU_MILLI_WHOLE

    def copy(self) -> Self:
        """Returns an independent copy."""
        return replace(self, held=self.held.copy())

    def dump(self) -> list[Any]:
        """Dumps what cannot be derived, for a checkpoint; what is held follows from the placements."""
        before = [] if self.before is None else [*self.before.stretch, *self.before[1:]]
        return [self.utc_offset_minutes, *self.stretch, self.at_ns, self.total, *before]

    @classmethod
    def load(cls, period: SpendingPeriod, plain: list[Any]) -> Self:
        """Loads a sum from a checkpoint, with nothing held yet."""
        offset, begin_s, end_s, at_ns, total, *rest = plain
        before = PeriodSum(PeriodBounds(rest[0], rest[1]), rest[2], rest[3]) if rest else None
        return cls(period, offset, PeriodBounds(begin_s, end_s), at_ns, total, before=before)


def _is_in(stretch: PeriodBounds, at_ns: int) -> bool:
    return stretch.begin_s * _NS <= at_ns < stretch.end_s * _NS


@dataclass(frozen=True, slots=True, kw_only=True)
class OverspentLimit:
    """An exceeded limit: the spent amount, its period, and since when it is known."""

    limit: SpendingLimit
    spent: Annotated[float, Range(0.0, 1e24)]
    begin_s: Uint64
    end_s: Uint64
    since_ns: Nanoseconds


def utc_offset_minutes_of(policy: Policy) -> int:
    """Returns the UTC offset, in minutes, by which periods begin."""
    return 0 if policy.prices is None else policy.prices.utc_offset_minutes


class SpendingState:
    """The part of the state that tracks spending; changed by events only."""

    def __init__(self, count_held: CountHeld) -> None:
        self._count_held, self._policy = count_held, Policy()
        self.over: tuple[OverspentLimit, ...] = ()
        self._gpu_times: dict[SpendingKey, GpuTime] = {}
        # Who waits: by the value of each dimension.
        self._holding: dict[SpendingDimension, dict[str, OverspentLimit]] = {}

    def blocking_limit(self, spec: WorkloadSpec) -> OverspentLimit | None:
        """Returns the exceeded limit that a pending workload waits for, if any; work without GPUs spends nothing."""
        for dimension, values in self._holding.items() if spec.request.gpu_count else ():
            found = values.get(subject_name(spec, dimension))
            if found is not None:
                return found
        return None

    @property
    def stopping(self) -> frozenset[SpendingKey]:
        """The exceeded limits by which running jobs are stopped."""
        return frozenset(spending_key(one.limit) for one in self.over if one.limit.stops)

    def find_stopping_limit(self, spec: WorkloadSpec) -> OverspentLimit | None:
        """Returns the exceeded limit by which a running job is stopped, if any; work without GPUs spends nothing."""
        for one in self.over if spec.request.gpu_count else ():
            dimension, name, *_ = spending_key(one.limit)
            if one.limit.stops and subject_name(spec, dimension) == name:
                return one
        return None

    def spent_gpu_s(self, key: SpendingKey, now_ns: int) -> float:
        """Returns the GPU-seconds of the period that contains the moment."""
        return self._gpu_times[key].spent_s(now_ns)

    def held_gpus(self, key: SpendingKey) -> float:
        """Returns the GPUs that a limit's workloads hold."""
        return self._gpu_times[key].held_gpus

    def set_overspent(self, over: tuple[OverspentLimit, ...]) -> None:
        """Sets which limits are exceeded."""
        self.over = over
        self._holding = {}
        for one in over:
            if one.limit.mode is EnforcementMode.ENFORCE:
                dimension, name, *_ = spending_key(one.limit)
                self._holding.setdefault(dimension, {}).setdefault(name, one)

    def update_held(self, workload_ids: Iterable[str], workloads: Mapping[str, Workload], now_ns: int) -> None:
        """Updates what workloads hold; those that no longer exist hold nothing."""
        for workload_id in workload_ids if self._gpu_times else ():
            workload = workloads.get(workload_id)
            is_placed = workload is not None and workload.phase is WorkloadPhase.PLACED
            for (dimension, name, *_), gpu_time in self._gpu_times.items():
                if workload is not None and is_placed and subject_name(workload.spec, dimension) == name:
                    gpu_time.advance(now_ns)
                    gpu_time.set_held(workload_id, self._count_held(self._policy, workload))
                elif workload_id in gpu_time.held:
                    gpu_time.advance(now_ns)
                    gpu_time.set_held(workload_id, 0)

    def set_limits(self, policy: Policy, workloads: Mapping[str, Workload], now_ns: int) -> None:
        """Puts other limits, another UTC offset or other limits on interference in force."""
        self._policy, offset = policy, utc_offset_minutes_of(policy)
        limits = {spending_key(one): one for one in policy.spending}
        before, self._gpu_times = self._gpu_times, {}
        for key in limits:
            if key.quantity is not SpendingQuantity.GPU_TIME:
                continue
            known = before.get(key)
            is_so = known is not None and known.utc_offset_minutes == offset
            self._gpu_times[key] = known if known is not None and is_so else self._since(key, offset, workloads, now_ns)
        for gpu_time in self._gpu_times.values():
            for workload_id, milli in [*gpu_time.held.items()]:
                # Other limits on interference may close GPUs to others, or open them.
                charged = self._count_held(policy, workloads[workload_id])
                if charged != milli:
                    gpu_time.advance(now_ns)
                    gpu_time.set_held(workload_id, charged)
        self.set_overspent(
            tuple(
                replace(one, limit=limits[spending_key(one.limit)])
                for one in self.over
                if spending_key(one.limit) in limits and one.spent >= limits[spending_key(one.limit)].most
            )
        )

    def _since(
        self, key: SpendingKey, utc_offset_minutes: int, workloads: Mapping[str, Workload], now_ns: int
    ) -> GpuTime:
        """Returns the GPU time of the period under way, as far as its workloads are still known."""
        made = GpuTime.start_period(key.period, utc_offset_minutes, now_ns)
        for workload in workloads.values():
            if subject_name(workload.spec, key.dimension) == key.name:
                made.add(workload, self._count_held(self._policy, workload))
        return made

    def copy(self) -> Self:
        """Returns an independent copy."""
        twin: Self = copy(self)
        twin._gpu_times = {key: one.copy() for key, one in self._gpu_times.items()}
        return twin

    def dump(self) -> dict[str, Any]:
        """Dumps plain values for a checkpoint; GPU times in the order of the policy's limits."""
        return {
            "over": [to_plain(one) for one in self.over],
            "gpu_times": [one.dump() for one in self._gpu_times.values()],
        }

    @classmethod
    def load(
        cls, plain: Mapping[str, Any], policy: Policy, workloads: Mapping[str, Workload], count_held: CountHeld
    ) -> Self:
        """Loads this part from a checkpoint."""
        found = cls(count_held)
        found._policy = policy
        keys = [spending_key(one) for one in policy.spending if one.quantity is SpendingQuantity.GPU_TIME]
        for key, row in zip(keys, plain.get("gpu_times", ()), strict=True):
            found._gpu_times[key] = GpuTime.load(key.period, row)
        for workload in workloads.values():
            if workload.phase is WorkloadPhase.PLACED:
                for (dimension, name, *_), gpu_time in found._gpu_times.items():
                    if subject_name(workload.spec, dimension) == name:
                        gpu_time.set_held(workload.workload_id, count_held(policy, workload))
        found.set_overspent(tuple(from_plain(OverspentLimit, row, trusted=True) for row in plain.get("over", ())))
        return found


# Of the limit: what is spent beyond is told anew in such steps.
_STEP = 0.01


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """A limit at a moment; `spent` is None if unknown."""

    limit: SpendingLimit
    stretch: PeriodBounds
    spent: float | None

    @property
    def ratio(self) -> float | None:
        """The spent share of the limit; None if unknown."""
        return None if self.spent is None else self.spent / self.limit.most

    @property
    def is_over(self) -> bool:
        """Whether the limit is exceeded."""
        return self.spent is not None and self.spent >= self.limit.most


def limit_statuses(
    policy: Policy, spending: SpendingState, told: Mapping[tuple[SpendingKey, PeriodBounds], float], now_ns: int
) -> tuple[LimitStatus, ...]:
    """Returns the status of every limit of the policy; `told` has the energy ledger's figures by limit and period."""
    offset = utc_offset_minutes_of(policy)
    found = []
    for limit in policy.spending:
        key, stretch = spending_key(limit), period_bounds_at(limit.period, now_ns // _NS, offset)
        is_held = limit.quantity is SpendingQuantity.GPU_TIME
        found.append(
            LimitStatus(limit, stretch, spending.spent_gpu_s(key, now_ns) if is_held else told.get((key, stretch)))
        )
    return tuple(found)


def judge_limits(
    policy: Policy, spending: SpendingState, told: Mapping[tuple[SpendingKey, PeriodBounds], float], now_ns: int
) -> tuple[OverspentLimit, ...]:
    """Returns the exceeded limits; if a figure is unknown, a limit stays exceeded until its period ends.

    Equal to what is known already unless there is something to tell.
    """
    known = {spending_key(one.limit): one for one in spending.over}
    over = []
    for one in limit_statuses(policy, spending, told, now_ns):
        before = known.get(spending_key(one.limit))
        if before is not None and before.begin_s != one.stretch.begin_s:
            before = None
        if one.spent is None and before is not None:
            over.append(before)
        elif one.spent is not None and one.is_over:
            if before is not None and one.spent < before.spent + _STEP * one.limit.most:
                over.append(before)
            else:
                since_ns = now_ns if before is None else before.since_ns
                over.append(
                    OverspentLimit(
                        limit=one.limit,
                        spent=one.spent,
                        begin_s=one.stretch.begin_s,
                        end_s=one.stretch.end_s,
                        since_ns=since_ns,
                    )
                )
    return tuple(over)


def spending_reason(over: OverspentLimit) -> str:
    """Formats why work waits: the constraint, a colon and a sentence without numbers."""
    limit = over.limit
    what = describe_unit(limit.quantity, "")
    return PendingConstraint.SPENDING.describe(
        subject=describe_subject(limit), unit=what, period=limit.period.name.lower()
    )


def spending_remedy(over: OverspentLimit, policy: Policy) -> str:
    """Describes by how much a limit is exceeded, until when, and what would help."""
    limit, offset = over.limit, utc_offset_minutes_of(policy)
    currency = "" if policy.prices is None else policy.prices.currency
    spent, most = (format_amount(limit.quantity, amount) for amount in (over.spent, limit.most))
    stretch = PeriodBounds(over.begin_s, over.end_s)
    return (
        f"{describe_subject(limit)} has spent {spent} of {most} {describe_unit(limit.quantity, currency)} of "
        f"{describe_period(limit.period, stretch, offset)}; it goes on {describe_moment(over.end_s, offset)}, or when "
        f"the limit is raised: eelctl policy set --spend '{format_limit(limit, _raise_limit(max(over.spent, limit.most), QUANTITY_UNITS[limit.quantity].size))}'."
    )


def _raise_limit(amount: float, size: float) -> float:
    """A quarter more, on two digits of units of that size."""
    wanted = 1.25 * amount / size
    step = 10.0 ** (math.floor(math.log10(wanted)) - 1)
    return math.ceil(wanted / step - 1e-9) * step * size
