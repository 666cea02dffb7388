"""Spending state: GPU time by limit, which limits are exceeded, and which work waits for one.

GPU time is the integral of held GPUs over the journal's times: whole thousandths of GPUs times nanoseconds, the same
after a restart and in every replay. A share of a GPU counts as that share, a MIG slice as its share of the GPU's
compute slices. Journal times may go back after a clock change: a time in another period ends this period's sum, which
is kept for a return; within a period a time that goes back counts nothing twice. A limit that is set in the middle of
a period is charged with the workloads that are still known.

Energy, money and carbon are the ledger's, which is not part of the journal, so exceeded limits arrive as an event,
`SpendingJudged`, with the figures they were judged by: when a limit becomes exceeded or no longer is, and for each
hundredth beyond. A raised limit counts from the policy event on; a lowered one from the next evaluation.
"""

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, Self

from eelgrid_controller.state.spending_limits import (
    QUANTITY_UNITS,
    PeriodBounds,
    SpendingDimension,
    SpendingKey,
    describe_moment,
    describe_period,
    describe_subject,
    describe_unit,
    format_amount,
    format_limit,
    period_bounds_at,
    spending_key,
    subject_name,
    warn_ratio_of,
)
from eelgrid_protos.messages import (
    EnforcementMode,
    Policy,
    SpendingLimit,
    SpendingPeriod,
    SpendingQuantity,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, Nanoseconds, Range, Uint64

_NS = 10**9
# Of the sum, in a GPU-second.
_SECOND = GPU_MILLI_WHOLE * _NS


def held_gpu_milli(workload: Workload) -> int:
    """Thousandths of GPUs that a workload holds, or held when it ended."""
    if workload.phase is WorkloadPhase.PENDING:
        return 0
    request = workload.spec.request
    whole = request.gpu_count * request.gpu_milli
    return sum(whole if item.gpu_instance is None else item.gpu_instance.gpu_milli for item in workload.placements)


class PeriodSum(NamedTuple):
    """GPU time of a period up to a moment."""

    stretch: PeriodBounds
    at_ns: int
    total: int


@dataclass(slots=True)
class GpuTime:
    """The sum of the period that `at_ns` is in; what is held now is on top of it."""

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
        """Nothing held, nothing spent."""
        return cls(period, utc_offset_minutes, period_bounds_at(period, now_ns // _NS, utc_offset_minutes), now_ns)

    def add(self, workload: Workload) -> None:
        """Counts what a workload has held until now, with the replicas that it has or had at its end."""
        milli = held_gpu_milli(workload)
        if not milli:
            return
        end_ns = workload.ended_ns or self.at_ns
        self.total += milli * max(0, min(end_ns, self.at_ns) - max(workload.placed_ns, self.stretch.begin_s * _NS))
        if workload.phase is WorkloadPhase.PLACED:
            self.set_held(workload.workload_id, milli)

    def set_held(self, workload_id: str, milli: int) -> None:
        """A workload holds so much at the time of the sum."""
        self.held_sum += milli - self.held.pop(workload_id, 0)
        if milli:
            self.held[workload_id] = milli

    def advance(self, now_ns: int) -> None:
        """Sums up to this moment."""
        found, is_other = self._until(now_ns)
        if is_other:
            self.before = PeriodSum(self.stretch, self.at_ns, self.total)
        self.stretch, self.at_ns, self.total = found

    def _until(self, now_ns: int) -> tuple[PeriodSum, bool]:
        """The sum at a moment of the period that it is in, and whether that is another than this one."""
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
        """GPU-seconds of the period that the moment is in, until then."""
        return self._until(now_ns)[0].total / _SECOND

    @property
    def held_gpus(self) -> float:
        """What is held now."""
        return self.held_sum / GPU_MILLI_WHOLE

    def copy(self) -> Self:
        """A sum that goes on apart from this one."""
        return replace(self, held=self.held.copy())

    def dump(self) -> list[Any]:
        """What cannot be derived, for a checkpoint; what is held follows from the placements."""
        before = [] if self.before is None else [*self.before.stretch, *self.before[1:]]
        return [self.utc_offset_minutes, *self.stretch, self.at_ns, self.total, *before]

    @classmethod
    def load(cls, period: SpendingPeriod, plain: list[Any]) -> Self:
        """The sum in a checkpoint, with nothing held yet."""
        offset, begin_s, end_s, at_ns, total, *rest = plain
        before = PeriodSum(PeriodBounds(rest[0], rest[1]), rest[2], rest[3]) if rest else None
        return cls(period, offset, PeriodBounds(begin_s, end_s), at_ns, total, before=before)


def _is_in(stretch: PeriodBounds, at_ns: int) -> bool:
    return stretch.begin_s * _NS <= at_ns < stretch.end_s * _NS


@dataclass(frozen=True, slots=True, kw_only=True)
class OverspentLimit:
    """A limit that is spent, by this figure of the period that begins and ends then; since when that is known."""

    limit: SpendingLimit
    spent: Annotated[float, Range(0.0, 1e24)]
    begin_s: Uint64
    end_s: Uint64
    since_ns: Nanoseconds


def utc_offset_minutes_of(policy: Policy) -> int:
    """Of the local time by which periods begin."""
    return 0 if policy.prices is None else policy.prices.utc_offset_minutes


class SpendingState:
    """A part of the state: changed by events alone."""

    def __init__(self) -> None:
        self.over: tuple[OverspentLimit, ...] = ()
        self._gpu_times: dict[SpendingKey, GpuTime] = {}
        # Who waits: by the value of each dimension.
        self._holding: dict[SpendingDimension, dict[str, OverspentLimit]] = {}

    def blocking_limit(self, spec: WorkloadSpec) -> OverspentLimit | None:
        """The spent limit for which such a workload waits, if it has not begun; what needs no GPU spends nothing."""
        for dimension, values in self._holding.items() if spec.request.gpu_count else ():
            found = values.get(subject_name(spec, dimension))
            if found is not None:
                return found
        return None

    def spent_gpu_s(self, key: SpendingKey, now_ns: int) -> float:
        """GPU-seconds of the period that the moment is in."""
        return self._gpu_times[key].spent_s(now_ns)

    def held_gpus(self, key: SpendingKey) -> float:
        """GPUs that a limit's work holds."""
        return self._gpu_times[key].held_gpus

    def set_overspent(self, over: tuple[OverspentLimit, ...]) -> None:
        """These limits are spent, and no others."""
        self.over = over
        self._holding = {}
        for one in over:
            if one.limit.mode is EnforcementMode.ENFORCE:
                dimension, name, *_ = spending_key(one.limit)
                self._holding.setdefault(dimension, {}).setdefault(name, one)

    def update_held(self, workload_ids: Iterable[str], workloads: Mapping[str, Workload], now_ns: int) -> None:
        """These workloads hold more or less from now on; those that are not there any more hold nothing."""
        for workload_id in workload_ids if self._gpu_times else ():
            workload = workloads.get(workload_id)
            is_placed = workload is not None and workload.phase is WorkloadPhase.PLACED
            for (dimension, name, *_), gpu_time in self._gpu_times.items():
                if workload is not None and is_placed and subject_name(workload.spec, dimension) == name:
                    gpu_time.advance(now_ns)
                    gpu_time.set_held(workload_id, held_gpu_milli(workload))
                elif workload_id in gpu_time.held:
                    gpu_time.advance(now_ns)
                    gpu_time.set_held(workload_id, 0)

    def set_limits(self, policy: Policy, workloads: Mapping[str, Workload], now_ns: int) -> None:
        """Other limits are in force, or another local time."""
        offset = utc_offset_minutes_of(policy)
        limits = {spending_key(one): one for one in policy.spending}
        before, self._gpu_times = self._gpu_times, {}
        for key in limits:
            if key.quantity is not SpendingQuantity.GPU_TIME:
                continue
            known = before.get(key)
            is_so = known is not None and known.utc_offset_minutes == offset
            self._gpu_times[key] = known if known is not None and is_so else _since(key, offset, workloads, now_ns)
        self.set_overspent(
            tuple(
                replace(one, limit=limits[spending_key(one.limit)])
                for one in self.over
                if spending_key(one.limit) in limits and one.spent >= limits[spending_key(one.limit)].most
            )
        )

    def copy(self) -> Self:
        """A part of a state that goes on apart from this one."""
        twin: Self = copy(self)
        twin._gpu_times = {key: one.copy() for key, one in self._gpu_times.items()}
        return twin

    def dump(self) -> dict[str, Any]:
        """The plain shape, for a checkpoint; GPU times in the order of the policy's limits."""
        return {
            "over": [to_plain(one) for one in self.over],
            "gpu_times": [one.dump() for one in self._gpu_times.values()],
        }

    @classmethod
    def load(cls, plain: Mapping[str, Any], policy: Policy, workloads: Mapping[str, Workload]) -> Self:
        """The part in a checkpoint."""
        found = cls()
        keys = [spending_key(one) for one in policy.spending if one.quantity is SpendingQuantity.GPU_TIME]
        for key, row in zip(keys, plain.get("gpu_times", ()), strict=True):
            found._gpu_times[key] = GpuTime.load(key.period, row)
        for workload in workloads.values():
            if workload.phase is WorkloadPhase.PLACED:
                for (dimension, name, *_), gpu_time in found._gpu_times.items():
                    if subject_name(workload.spec, dimension) == name:
                        gpu_time.set_held(workload.workload_id, held_gpu_milli(workload))
        found.set_overspent(tuple(from_plain(OverspentLimit, row, trusted=True) for row in plain.get("over", ())))
        return found


def _since(key: SpendingKey, utc_offset_minutes: int, workloads: Mapping[str, Workload], now_ns: int) -> GpuTime:
    """The GPU time of the period under way, as far as its workloads are still known."""
    made = GpuTime.start_period(key.period, utc_offset_minutes, now_ns)
    for workload in workloads.values():
        if subject_name(workload.spec, key.dimension) == key.name:
            made.add(workload)
    return made


# Of the limit: what is spent beyond is told anew in such steps.
_STEP = 0.01


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """A limit at a moment; `spent` is None where nobody can say."""

    limit: SpendingLimit
    stretch: PeriodBounds
    spent: float | None

    @property
    def ratio(self) -> float | None:
        """The share that is spent."""
        return None if self.spent is None else self.spent / self.limit.most

    @property
    def is_over(self) -> bool:
        """Whether it is spent."""
        return self.spent is not None and self.spent >= self.limit.most

    @property
    def is_near(self) -> bool:
        """Whether it is nearly spent."""
        return self.ratio is not None and not self.is_over and self.ratio >= warn_ratio_of(self.limit)


def limit_statuses(
    policy: Policy, spending: SpendingState, told: Mapping[tuple[SpendingKey, PeriodBounds], float], now_ns: int
) -> tuple[LimitStatus, ...]:
    """Every limit of the policy in force; `told` is what the energy ledger says by limit and period."""
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
    """The limits that are spent now; where nobody can say, those that were and whose period goes on.

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
    """Why work waits: the constraint, a colon and a sentence without numbers."""
    limit = over.limit
    what = describe_unit(limit.quantity, "")
    return f"spending: {describe_subject(limit)} has spent its {what} of the {limit.period.name.lower()}"


def spending_remedy(over: OverspentLimit, policy: Policy) -> str:
    """By how much, until when, and what would help."""
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
