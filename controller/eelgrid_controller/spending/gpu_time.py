"""GPU time of one spending limit: how long how many GPUs were held in a period.

Owns the sum. Must not know who asks, nor which events there are.

Theory. What is held changes with events of the journal alone, so the integral of held GPUs over
the journal's times is exact, the same after a restart and in every replay. It is a whole number:
thousandths of GPUs times nanoseconds. A share of a GPU counts as that share, a MIG slice as its
share of the GPU's compute slices, whoever else is on the GPU.

A limit that is set in the middle of a period is told of what began before from the workloads that
are still known: `add`.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self

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
        """Sums up to this moment; one of before changes nothing."""
        self.total, self.stretch = self._until(now_ns)
        self.at_ns = max(self.at_ns, now_ns)

    def _until(self, now_ns: int) -> tuple[int, Stretch]:
        """The sum of the period at a moment, and that period."""
        now_ns = max(now_ns, self.at_ns)
        if now_ns < self.stretch.end_s * _NS:
            return self.total + self.held_sum * (now_ns - self.at_ns), self.stretch
        stretch = stretch_at(self.period, now_ns // _NS, self.utc_offset_minutes)
        return self.held_sum * (now_ns - stretch.begin_s * _NS), stretch

    def spent_s(self, now_ns: int) -> float:
        """GPU-seconds of the period that the moment is in, until then."""
        return self._until(now_ns)[0] / _SECOND

    @property
    def held_gpus(self) -> float:
        """What is held now."""
        return self.held_sum / GPU_MILLI_WHOLE

    def copy(self) -> Self:
        """A sum that goes on apart from this one."""
        return replace(self, held=self.held.copy())

    def dump(self) -> list[Any]:
        """What cannot be derived, for a checkpoint; what is held follows from the placements."""
        return [self.utc_offset_minutes, *self.stretch, self.at_ns, self.total]

    @classmethod
    def load(cls, period: SpendingPeriod, plain: list[Any]) -> Self:
        """The sum in a checkpoint, with nothing held yet."""
        offset, begin_s, end_s, at_ns, total = plain
        return cls(period, offset, Stretch(begin_s, end_s), at_ns, total)
