"""Job dependencies: which live workloads depend on which others.

Derived from the workloads: `ClusterState` keeps an ended workload, beyond the number that it keeps otherwise, for as long
as a live one depends on it, so that how it ended is known until that is no longer asked. Must not know what a dependency
means for the start of a workload (queueing.job_conditions).
"""

from collections.abc import Iterable
from typing import Self

from eelgrid_protos.messages import Workload


class DependentWorkloads:
    """The live workloads that depend on each workload, in order of their submission."""

    def __init__(self, children: dict[str, dict[str, None]] | None = None) -> None:
        self._children = children or {}

    def add(self, workload: Workload) -> None:
        """Adds a live workload."""
        for parent in list_parents(workload):
            self._children.setdefault(parent, {})[workload.workload_id] = None

    def discard(self, workload: Workload) -> list[str]:
        """Removes a workload that ends; returns those on which nothing live depends any more."""
        left = []
        for parent in list_parents(workload):
            children = self._children.get(parent)
            if children is not None and workload.workload_id in children:
                del children[workload.workload_id]
                if not children:
                    del self._children[parent]
                    left.append(parent)
        return left

    def list_children(self, workload_id: str) -> Iterable[str]:
        """Lists the live workloads that depend on one."""
        return tuple(self._children.get(workload_id, ()))

    def __contains__(self, workload_id: object) -> bool:
        return workload_id in self._children

    def copy(self) -> Self:
        """Returns an independent copy."""
        return type(self)({parent: children.copy() for parent, children in self._children.items()})


def list_parents(workload: Workload) -> Iterable[str]:
    """Lists the workloads that one depends on."""
    schedule = workload.spec.schedule
    return () if schedule is None else tuple(one.workload_id for one in schedule.after)
