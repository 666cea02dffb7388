"""What the state knows of spending: GPU time by limit, and which limits are spent.

Owns both. Must not know how joules and money are counted, nor what follows for work that waits.

Theory. GPU time follows from the journal's other events (gpu_time.py). Joules, money and carbon are
the energy ledger's, which is no part of the journal; so which limits are spent comes as an event,
`SpendingJudged`, with the figures that it was judged by. It is told when a limit comes to be
spent or is so no more, and while it is, for each hundredth of it that is spent beyond: a limit
is told of a few times in a period, not at each look. Where the policy raises a limit above what
was told, it is not spent from that event on; a lowered one waits for the next look.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from eelgrid_controller.spending.gpu_time import GpuTime, held_milli
from eelgrid_controller.spending.limits import Dimension, Key, key_of, value_of
from eelgrid_protos.messages import (
    EnforcementMode,
    Policy,
    SpendingLimit,
    SpendingQuantity,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.plain import from_plain, to_plain
from eelgrid_protos.quantities import Nanoseconds, Range, Uint64

__all__ = ["Overspent", "Spending", "utc_offset_minutes_of"]

_NS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Overspent:
    """A limit that is spent, by this figure of the period that begins and ends then; since when that is known."""

    limit: SpendingLimit
    spent: Annotated[float, Range(0.0, 1e24)]
    begin_s: Uint64
    end_s: Uint64
    since_ns: Nanoseconds


def utc_offset_minutes_of(policy: Policy) -> int:
    """Of the local time by which periods begin."""
    return 0 if policy.prices is None else policy.prices.utc_offset_minutes


class Spending:
    """A part of the state: changed by events alone."""

    def __init__(self) -> None:
        self.over: tuple[Overspent, ...] = ()
        self._gpu_times: dict[Key, GpuTime] = {}
        # Who waits: by the value of each dimension.
        self._holding: dict[Dimension, dict[str, Overspent]] = {}

    def holds(self, spec: WorkloadSpec) -> Overspent | None:
        """The spent limit for which such a workload waits, if it has not begun; what needs no GPU spends nothing."""
        for dimension, values in self._holding.items() if spec.request.gpu_count else ():
            found = values.get(value_of(spec, dimension))
            if found is not None:
                return found
        return None

    def spent_gpu_s(self, key: Key, now_ns: int) -> float:
        """GPU-seconds of the period that the moment is in."""
        return self._gpu_times[key].spent_s(now_ns)

    def held_gpus(self, key: Key) -> float:
        """GPUs that a limit's work holds."""
        return self._gpu_times[key].held_gpus

    def judged(self, over: tuple[Overspent, ...]) -> None:
        """These limits are spent, and no others."""
        self.over = over
        self._holding = {}
        for one in over:
            if one.limit.mode is EnforcementMode.ENFORCE:
                dimension, name, *_ = key_of(one.limit)
                self._holding.setdefault(dimension, {}).setdefault(name, one)

    def changed(self, workload_ids: Iterable[str], workloads: Mapping[str, Workload], now_ns: int) -> None:
        """These workloads hold more or less from now on; those that are not there any more hold nothing."""
        for workload_id in workload_ids if self._gpu_times else ():
            workload = workloads.get(workload_id)
            is_placed = workload is not None and workload.phase is WorkloadPhase.PLACED
            for (dimension, name, *_), gpu_time in self._gpu_times.items():
                if workload is not None and is_placed and value_of(workload.spec, dimension) == name:
                    gpu_time.advance(now_ns)
                    gpu_time.hold(workload_id, held_milli(workload))
                elif workload_id in gpu_time.held:
                    gpu_time.advance(now_ns)
                    gpu_time.hold(workload_id, 0)

    def limited(self, policy: Policy, workloads: Mapping[str, Workload], now_ns: int) -> None:
        """Other limits are in force, or another local time."""
        offset = utc_offset_minutes_of(policy)
        limits = {key_of(one): one for one in policy.spending}
        before, self._gpu_times = self._gpu_times, {}
        for key in limits:
            if key.quantity is not SpendingQuantity.GPU_TIME:
                continue
            known = before.get(key)
            is_so = known is not None and known.utc_offset_minutes == offset
            self._gpu_times[key] = known if known is not None and is_so else _since(key, offset, workloads, now_ns)
        self.judged(
            tuple(
                replace(one, limit=limits[key_of(one.limit)])
                for one in self.over
                if key_of(one.limit) in limits and one.spent >= limits[key_of(one.limit)].most
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
        keys = [key_of(one) for one in policy.spending if one.quantity is SpendingQuantity.GPU_TIME]
        for key, row in zip(keys, plain.get("gpu_times", ()), strict=True):
            found._gpu_times[key] = GpuTime.load(key.period, row)
        for workload in workloads.values():
            if workload.phase is WorkloadPhase.PLACED:
                for (dimension, name, *_), gpu_time in found._gpu_times.items():
                    if value_of(workload.spec, dimension) == name:
                        gpu_time.hold(workload.workload_id, held_milli(workload))
        found.judged(tuple(from_plain(Overspent, row, trusted=True) for row in plain.get("over", ())))
        return found


def _since(key: Key, utc_offset_minutes: int, workloads: Mapping[str, Workload], now_ns: int) -> GpuTime:
    """The GPU time of the period under way, as far as its workloads are still known."""
    made = GpuTime.begun(key.period, utc_offset_minutes, now_ns)
    for workload in workloads.values():
        if value_of(workload.spec, key.dimension) == key.name:
            made.add(workload)
    return made
