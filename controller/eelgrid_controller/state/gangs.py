"""Gangs of several parts: which live workloads are parts of which gang, and whether the gang has started.

A part is a workload with its own request; those of one namespace, owner and gang name are one gang, with the number of parts
that each of them states. `JobGangs` follows from the workloads, but for the number of parts that have ended, which a
checkpoint holds. Changed through `ClusterState.apply` only. Must not know when a gang may start (queueing.job_conditions), nor
where (core.gang_starts).

Theory. A gang is a tree of two levels of minimum sets: the replicas of a part all start or none, and its first parts by
submission, as many as are required, all start or none. So a gang is bound, its parts start together, while none of them runs
and none has run to its end; after that each part is a workload of its own. Running work that makes room for other work counts
as waiting, so that a gang that was preempted starts together again. A part that is cancelled before the start leaves the gang,
which another part may then complete.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from eelgrid_controller.state.journal import JournalSanitizer
from eelgrid_protos.messages import GangPart, Workload, WorkloadPhase

# Namespace, owner and name.
GangKey = tuple[str, str, str]


def get_gang_key(workload: Workload) -> GangKey | None:
    """Returns the gang of a workload; None if it is no part of one."""
    spec = workload.spec
    return None if spec.gang is None else (spec.namespace, workload.owner, spec.gang.name)


@dataclass(slots=True)
class JobGang:
    """One gang: what its parts state of it, those that wait or run by submission, and how many have ended since it started."""

    part: GangPart
    live: dict[str, None] = field(default_factory=dict)
    ended: int = 0

    @property
    def missing(self) -> int:
        """How many parts were not submitted yet."""
        return max(0, self.part.parts - len(self.live) - self.ended)

    def list_required(self) -> list[str]:
        """Lists the parts that must start together, of a gang that has not started."""
        return list(self.live)[: self.part.required_parts]

    def is_bound(self, workloads: Mapping[str, Workload]) -> bool:
        """Returns whether its parts start together: none runs, and none has ended since it started."""
        return not self.ended and not any(_runs(workloads[key]) for key in self.live)


def _runs(workload: Workload) -> bool:
    return workload.phase is WorkloadPhase.PLACED and not workload.preempted_for


class JobGangs:
    """The gangs of which a part waits or runs."""

    def __init__(self, gangs: dict[GangKey, JobGang] | None = None) -> None:
        self._gangs = gangs or {}

    def find(self, workload: Workload) -> JobGang | None:
        """Returns the gang of a workload; None if it is no part of one, or if the gang has no live part."""
        key = get_gang_key(workload)
        return None if key is None else self._gangs.get(key)

    def get(self, key: GangKey) -> JobGang | None:
        """Returns a gang; None without a live part."""
        return self._gangs.get(key)

    def find_bound(self, workload: Workload, workloads: Mapping[str, Workload]) -> JobGang | None:
        """Returns the gang with whose other parts a workload starts together; None if it starts on its own."""
        gang = self.find(workload)
        return gang if gang is not None and gang.is_bound(workloads) else None

    def add(self, workload: Workload) -> None:
        """Adds a live workload, if it is a part; those of one gang by submission."""
        key = get_gang_key(workload)
        if key is not None and workload.spec.gang is not None:
            gang = self._gangs.setdefault(key, JobGang(workload.spec.gang))
            gang.live[workload.workload_id] = None

    def note_end(self, workload: Workload, workloads: Mapping[str, Workload]) -> None:
        """Removes a part that ends; it is counted unless it never started with its gang."""
        key = get_gang_key(workload)
        gang = None if key is None else self._gangs.get(key)
        if key is None or gang is None or workload.workload_id not in gang.live:
            return
        gang.ended += workload.phase is WorkloadPhase.PLACED or not gang.is_bound(workloads)
        del gang.live[workload.workload_id]
        if not gang.live:
            del self._gangs[key]

    def copy(self) -> Self:
        """Returns an independent copy."""
        return type(self)({key: JobGang(one.part, one.live.copy(), one.ended) for key, one in self._gangs.items()})

    def dump(self) -> list[Any]:
        """Dumps what does not follow from the live workloads: by a live part, how many parts of its gang have ended."""
        return sorted([min(gang.live), gang.ended] for gang in self._gangs.values() if gang.ended)

    def load(self, plain: Iterable[Any], workloads: Mapping[str, Workload], healer: JournalSanitizer) -> None:
        """Loads what `dump` has dumped, after all live workloads were added."""
        for key, ended in plain:
            gang = self.find(workloads[healer.identifier(key)])
            if gang is not None:
                gang.ended = ended
