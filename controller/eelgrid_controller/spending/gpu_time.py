"""GPU time of one spending limit: how long how many GPUs were held in a period.

Owns the sum. Must not know who asks, nor which events there are.

Theory. What is held changes with events of the journal alone, so the integral of held GPUs over
the journal's times is exact, the same after a restart and in every replay. It is a whole number:
thousandths of GPUs times nanoseconds. A share of a GPU counts as that share, a MIG slice as its
share of the GPU's compute slices, whoever else is on the GPU.

Times are those of the journal, whose order is that of its numbers: a clock may have been wrong for
a while. A time in another period ends this one's sum, and what it was is kept: a time that goes
back to the period before goes on with it. Within a period a time that goes back counts nothing
twice from then on, and takes nothing back.

A limit that is set in the middle of a period is told of what began before from the workloads that
are still known: `add`.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from eelgrid_controller.spending.periods import Stretch, stretch_at
from eelgrid_protos.messages import SpendingPeriod, Workload, WorkloadPhase
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

__all__ = ["GpuTime", "held_milli"]

_NS = 10**9
# Of the sum, in a GPU-second.
_SECOND = GPU_MILLI_WHOLE * _NS


def held_milli(workload: Workload) -> int:
    """Thousandths of GPUs that a workload holds, or held when it ended."""
    if workload.phase is WorkloadPhase.PENDING:
        return 0
    request = workload.spec.request
    whole = request.gpu_count * request.gpu_milli
    return sum(whole if item.gpu_instance is None else item.gpu_instance.gpu_milli for item in workload.placements)


class PeriodSum(NamedTuple):
    """GPU time of a period up to a moment."""

    stretch: Stretch
    at_ns: int
    total: int


@dataclass(slots=True)
class GpuTime:
    """The sum of the period that `at_ns` is in; what is held now is on top of it."""

    period: SpendingPeriod
    utc_offset_minutes: int
    stretch: Stretch
    at_ns: int
    total: int = 0
    held: dict[str, int] = field(default_factory=dict)  # milli, by workload
    held_sum: int = 0
    before: PeriodSum | None = None  # of the period that the times were in before

    @classmethod
    def begun(cls, period: SpendingPeriod, utc_offset_minutes: int, now_ns: int) -> Self:
        """Nothing held, nothing spent."""
        return cls(period, utc_offset_minutes, stretch_at(period, now_ns // _NS, utc_offset_minutes), now_ns)

    def add(self, workload: Workload) -> None:
        """Counts what a workload has held until now, with the replicas that it has or had at its end."""
        milli = held_milli(workload)
        if not milli:
            return
        end_ns = workload.ended_ns or self.at_ns
        self.total += milli * max(0, min(end_ns, self.at_ns) - max(workload.placed_ns, self.stretch.begin_s * _NS))
        if workload.phase is WorkloadPhase.PLACED:
            self.hold(workload.workload_id, milli)

    def hold(self, workload_id: str, milli: int) -> None:
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
                stretch = stretch_at(self.period, now_ns // _NS, self.utc_offset_minutes)
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
        before = PeriodSum(Stretch(rest[0], rest[1]), rest[2], rest[3]) if rest else None
        return cls(period, offset, Stretch(begin_s, end_s), at_ns, total, before=before)


def _is_in(stretch: Stretch, at_ns: int) -> bool:
    return stretch.begin_s * _NS <= at_ns < stretch.end_s * _NS
