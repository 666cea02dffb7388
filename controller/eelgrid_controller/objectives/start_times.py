"""Start times: how long replicas of services take from their place to their first page of metrics.

Apart for nodes that had the service's model data when a replica came, and for those that had to fetch it. Cycles and
rounds of pages give two bounds of each start: from when the place was seen to the last round without a page, and from
the cycle before to the first page. What a service states holds as long as the longest of its last starts may have taken
so long; otherwise the upper bound of that counts. What began before this process looked is not known. The journal keeps
what was measured (state.measurements), over restarts. Must not know how pages are read, nor what is planned with it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.objectives.observation import ClusterObservation, holds_model_data
from eelgrid_controller.state.measurements import MeasuredStart
from eelgrid_protos.messages import Placement, Workload

# Steps to which the longest start is rounded up, in seconds.
_STEPS_S = (5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 360.0, 480.0, 720.0, 960.0, 1440.0)
# A service that this process sees for the first time has just begun if it was placed so lately.
_FRESH_S = 30.0


class StartTime(NamedTuple):
    """How long the next replica of a service is expected to take until it serves."""

    seconds: float
    is_measured: bool


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
        self._measured: list[MeasuredStart] = []

    def collect_measured(self) -> tuple[MeasuredStart, ...]:
        """Returns the starts that were measured since the last time."""
        found, self._measured = tuple(self._measured), []
        return found

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
                    start = MeasuredStart(
                        workload_id=name,
                        had_model_data=replica.is_near,
                        least_s=replica.missed_s - replica.seen_s,
                        most_s=world.at_s - replica.before_s,
                    )
                    self._measured.append(start)
                replica.before_s = None

    def forget(self, name: str) -> None:
        """Forgets a service that has ended."""
        self._replicas.pop(name, None)
        self._seen_s.pop(name, None)


def is_divided(starts: Sequence[MeasuredStart]) -> bool:
    """Returns whether starts of a service were measured both with its model data and without."""
    return len({start.had_model_data for start in starts}) > 1


def find_start_time(starts: Sequence[MeasuredStart], stated_s: float, is_near: bool | None) -> StartTime:
    """Returns how long the next replica of a service is expected to take, by its measured starts.

    `is_near` says whether it will have the service's model data, None if that is not known.
    """
    if is_near is None:
        is_near = any(start.had_model_data for start in starts)
    # Whoever had to fetch the data took longer.
    took = [one for one in starts if one.had_model_data is is_near] or (list(starts) if is_near else [])
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
