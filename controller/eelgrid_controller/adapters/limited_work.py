"""Which nodes have work under a power limit, without a look at all work.

Owns the ids of limited work and when they are collected anew. Must not change what it reads.

Theory. A limit comes and goes by one event of its own, and goes with its work; so the ids follow what is committed,
and only their placements are looked at. Another core (after a fault, the state is read from the journal anew) has a
state that nobody told of: then all work is looked at, once.
"""

from collections.abc import Iterable

from eelgrid_controller.core import Core
from eelgrid_controller.events import Event, WorkloadCancelled, WorkloadLimited
from eelgrid_protos.messages import WorkloadPhase

__all__ = ["LimitedWork"]


class LimitedWork:
    """Follows one controller's commits; asked at moments when all that was applied is committed."""

    def __init__(self) -> None:
        self._core: Core | None = None
        self._ids: set[str] = set()

    def committed(self, events: Iterable[Event]) -> None:
        """Takes in what one commit made true."""
        for event in events:
            match event:
                case WorkloadLimited(workload_id=key, power_limit_w=limit_w) if limit_w is not None:
                    self._ids.add(key)
                case WorkloadLimited(workload_id=key) | WorkloadCancelled(workload_id=key):
                    self._ids.discard(key)
                case _:
                    pass

    def nodes(self, core: Core) -> frozenset[str]:
        """The names of nodes on which any work is under a limit."""
        workloads = core.state.workloads
        if core is not self._core:
            self._core = core
            self._ids = {
                key
                for key, one in workloads.items()
                if one.power_limit_w is not None and one.phase is WorkloadPhase.PLACED
            }
        return frozenset(place.node_name for key in self._ids for place in workloads[key].placements)
