"""Demand: the typical mix of tasks, learned from what was submitted.

Owns the counts by class and the mix that fragmentation is measured against.
Both are part of the state: a function of the submissions alone, in order, so
that a replay learns the same. Knows nothing of nodes.

Theory: the mix is the most frequent classes that cover 95 % of tasks, as in FGD
(Weng et al., USENIX ATC'23, section 4). It is drawn anew when the number of
tasks has grown by a twentieth: often enough to follow the demand, rarely enough
that the fragmentation of every node is computed anew only about 14 times for
each doubling.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from eelgrid_protos.messages import ResourceRequest

__all__ = ["CLASSES_KEPT_MOST", "MIX_CLASSES_MOST", "Demand", "TaskClass", "class_of"]

MIX_CLASSES_MOST = 64
# Distinct classes counted; beyond it the rarer half is forgotten.
CLASSES_KEPT_MOST = 4096
# Shares in per cent and growth in parts, so that all arithmetic is whole.
_COVERED_PERCENT = 95
_GROWTH_PARTS = 20


class TaskClass(NamedTuple):
    """Tasks that fragmentation cannot tell apart."""

    cpu_milli: int
    gpu_count: int
    gpu_milli: int
    gpu_models: tuple[str, ...]


def class_of(request: ResourceRequest) -> TaskClass:
    """The class of a request; the order of its models is of no account."""
    models = request.gpu_models
    return TaskClass(
        request.cpu_milli, request.gpu_count, request.gpu_milli, tuple(sorted(set(models))) if models else ()
    )


class Demand:
    """Counts of tasks by class, and the mix in force."""

    __slots__ = ("counts", "mix", "refresh_at", "tasks")

    def __init__(self) -> None:
        self.counts: dict[TaskClass, int] = {}
        self.tasks = 0
        self.refresh_at = 1
        self.mix: tuple[tuple[TaskClass, int], ...] = ()

    def observe(self, request: ResourceRequest, replicas: int) -> None:
        """Counts each replica as one task."""
        task = class_of(request)
        self.counts[task] = self.counts.get(task, 0) + replicas
        self.tasks += replicas
        if len(self.counts) > CLASSES_KEPT_MOST:
            self.counts = dict(self._ranked()[: CLASSES_KEPT_MOST // 2])
        if self.tasks >= self.refresh_at:
            self.mix = self._typical()
            self.refresh_at = self.tasks + max(1, self.tasks // _GROWTH_PARTS)

    def copy(self) -> Self:
        """Demand that grows apart from this one."""
        twin = type(self)()
        twin.counts, twin.mix = self.counts.copy(), self.mix
        twin.tasks, twin.refresh_at = self.tasks, self.refresh_at
        return twin

    def _ranked(self) -> list[tuple[TaskClass, int]]:
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))

    def _typical(self) -> tuple[tuple[TaskClass, int], ...]:
        wanted = _COVERED_PERCENT * sum(self.counts.values())
        covered = 0
        typical = []
        for task, count in self._ranked()[:MIX_CLASSES_MOST]:
            typical.append((task, count))
            covered += count
            if 100 * covered >= wanted:
                break
        return tuple(typical)

    def dump(self) -> dict[str, Any]:
        """The plain shape, for a checkpoint."""
        return {
            "tasks": self.tasks,
            "refresh_at": self.refresh_at,
            "counts": [[*task[:3], list(task.gpu_models), count] for task, count in self.counts.items()],
            "mix": [[*task[:3], list(task.gpu_models), count] for task, count in self.mix],
        }

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """The demand in a checkpoint."""
        demand = cls()
        demand.tasks = plain["tasks"]
        demand.refresh_at = plain["refresh_at"]
        demand.counts = dict(map(_counted, plain["counts"]))
        demand.mix = tuple(map(_counted, plain["mix"]))
        return demand


def _counted(row: Sequence[Any]) -> tuple[TaskClass, int]:
    cpu_milli, gpu_count, gpu_milli, models, count = row
    return TaskClass(cpu_milli, gpu_count, gpu_milli, tuple(models)), count
