"""Start times: how long replicas of services take from their place to their first page of metrics.

Apart for nodes that had the service's model data when a replica came, and for those that had to fetch it. Cycles and
rounds of pages give two bounds of each start: from when the place was seen to the last round without a page, and from
the cycle before to the first page. What a service states holds as long as the longest of its last starts may have taken
so long; otherwise the upper bound of that counts. What began before this process looked is not known. Must not know how
pages are read, nor what is planned with it.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.objectives.observation import ClusterObservation, holds_model_data
from eelgrid_protos.messages import Placement, Workload

# Starts of each kind that are remembered, of which the longest counts, and steps to which it is rounded up, in seconds.
_STARTS_MOST = 4
_STEPS_S = (5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 360.0, 480.0, 720.0, 960.0, 1440.0)
# A service that this process sees for the first time has just begun if it was placed so lately.
_FRESH_S = 30.0


class StartTime(NamedTuple):
    """How long the next replica of a service is expected to take until it serves."""

    seconds: float
    is_measured: bool


class _Bounds(NamedTuple):
    least_s: float
    most_s: float


@dataclass(slots=True)
class _Replica:
    """One replica at its place, until it serves; `before_s` is None if it is not known when it began."""

    place: Placement
    before_s: float | None
    seen_s: float
    missed_s: float
    is_near: bool


class StartTimes:
    """The starts of all services; times are those of the control cycle."""

    def __init__(self) -> None:
        self._replicas: dict[str, dict[int, _Replica]] = {}
        self._seen_s: dict[str, float] = {}
        # By service and whether the model data were there.
        self._took: dict[tuple[str, bool], deque[_Bounds]] = {}

    def observe_places(self, name: str, workload: Workload, world: ClusterObservation) -> None:
        """Takes the places of a service's replicas in this cycle."""
        known, now_s = self._replicas.get(name, {}), world.at_s
        before_s, self._seen_s[name] = self._seen_s.get(name), now_s
        placed_s = workload.placed_ns / 1e9
        if before_s is None and 0.0 <= now_s - placed_s <= _FRESH_S:
            before_s = placed_s
        self._replicas[name] = {
            place.replica: found
            if (found := known.get(place.replica)) is not None and found.place == place
            else _Replica(place, before_s, now_s, now_s, is_near=_is_near(workload, place, world))
            for place in workload.placements
        }

    def observe_pages(
        self, name: str, answered: Collection[int], grown: frozenset[int], world: ClusterObservation
    ) -> None:
        """Takes which replicas answered a round; those that have `grown` did not begin when they got their place."""
        for number, replica in self._replicas.get(name, {}).items():
            if number not in answered:
                replica.missed_s = world.at_s
            elif replica.before_s is not None:
                if number not in grown:
                    took = _Bounds(replica.missed_s - replica.seen_s, world.at_s - replica.before_s)
                    self._took.setdefault((name, replica.is_near), deque(maxlen=_STARTS_MOST)).append(took)
                replica.before_s = None

    def forget(self, name: str) -> None:
        """Forgets a service that has ended."""
        self._replicas.pop(name, None)
        self._seen_s.pop(name, None)
        for is_near in (False, True):
            self._took.pop((name, is_near), None)

    def is_divided(self, name: str) -> bool:
        """Returns whether starts of a service were seen both with its model data and without."""
        return (name, False) in self._took and (name, True) in self._took

    def find(self, name: str, stated_s: float, near: Mapping[str, bool]) -> StartTime:
        """Returns how long the next replica of a service is expected to take; `near` says of services if it has its data."""
        is_near = near.get(name, (name, True) in self._took)
        # Whoever had to fetch the data took longer.
        took = self._took.get((name, is_near)) or (self._took.get((name, False)) if is_near else None)
        if not took:
            return StartTime(stated_s, is_measured=False)
        least_s, most_s = max(one.least_s for one in took), max(one.most_s for one in took)
        if least_s <= stated_s <= most_s:
            return StartTime(stated_s, is_measured=True)
        return StartTime(next((step_s for step_s in _STEPS_S if most_s <= step_s), most_s), is_measured=True)


def _is_near(workload: Workload, place: Placement, world: ClusterObservation) -> bool:
    """Returns whether a replica's node has what it loads; False for a workload that names nothing."""
    node = world.nodes.get(place.node_name)
    return node is not None and holds_model_data(workload.spec, node.inventory)
