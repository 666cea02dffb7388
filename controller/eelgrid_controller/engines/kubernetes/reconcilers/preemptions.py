"""Preempted pods: which units the core has told to make room, and how they are asked to go.

A victim is evicted as one that moves, without a place that is kept: announced, then asked within the disruption budgets, a
gang whole (`reconcilers.moves` carries it out). The gate lets go the places when the last pod has gone, and with that the
core's workload has ended; its owner makes new pods, which wait as new work. Must not know who was chosen, nor why.

A victim runs on if nobody waits for its place any more before a pod of it was asked to go, or if it cannot be evicted.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.kubernetes.model.pod_group import unit_of
from eelgrid_controller.engines.kubernetes.pods.migration import MoveMethod, MoveOrder, MovingPod, checkpoint_grace_s
from eelgrid_controller.engines.kubernetes.pods.placement_unit import PlacementUnit, UnitMember
from eelgrid_protos.messages import Workload

# Until what could not be evicted may be a victim again.
REFUSED_AGAIN_S = 600.0


class RunningOnUnit(NamedTuple):
    """A victim that runs on: why, and for how long it is none again."""

    workload_id: str
    unit: str
    why: str
    again_s: float


def list_preemptions(core: Core, units: Mapping[str, PlacementUnit]) -> list[MoveOrder | RunningOnUnit]:
    """Returns the evictions that are due, of units whole, and the victims that run on."""
    return list(_find_preemptions(core, units))


def _find_preemptions(core: Core, units: Mapping[str, PlacementUnit]) -> Iterator[MoveOrder | RunningOnUnit]:
    for workload in core.list_evictions():
        unit = units.get(unit_of(workload.workload_id))
        if unit is None or unit.workload_id != workload.workload_id or not unit.is_preempted:
            continue
        members = [one for one in unit.active_members if one.target_node]
        has_begun = len(members) < len(workload.placements) or any(one.pod.is_deleting for one in members)
        if core.state.nominations.find_by_victim(workload.workload_id) is None and not has_begun:
            yield RunningOnUnit(workload.workload_id, unit.name, "nobody waits for its place any more", 0.0)
            continue
        staying = [one for one in members if not one.pod.is_deleting]
        if staying and any(one.pod.owner is None for one in staying):
            why = "a pod of it has no controller that makes it anew"
            yield RunningOnUnit(workload.workload_id, unit.name, why, REFUSED_AGAIN_S)
        elif staying:
            yield _make_order(workload, unit, staying)


def _make_order(workload: Workload, unit: PlacementUnit, staying: Sequence[UnitMember]) -> MoveOrder:
    pod = staying[0].pod
    assert pod.owner is not None
    return MoveOrder(
        unit=unit.name,
        workload="",
        manner=MoveMethod.EVICT,
        goes=tuple(
            MovingPod(one.uid, one.sight.key, unit.replica_of(one.uid) or 0, one.target_node) for one in staying
        ),
        owner_kind=pod.owner.kind,
        owner_name=pod.owner.name,
        owner_uid=pod.owner.uid,
        grace_s=max(checkpoint_grace_s(one.pod.annotations) for one in staying),
        cause=f"it makes room for {workload.preempted_for}",
        is_preemption=True,
    )
