"""The replicas of a placed workload as an event changes them.

Owns what a move and a scaling do to one workload, and what they may not do. Must not
know nodes: ledger.py says whether there is room.
"""

from dataclasses import replace

from eelgrid_controller.events import WorkloadMoved, WorkloadScaled
from eelgrid_controller.ledger import ContradictoryEvent
from eelgrid_protos.messages import Placement, Workload, WorkloadPhase

__all__ = ["moved", "scaled"]


def moved(workload: Workload | None, event: WorkloadMoved) -> tuple[Workload, list[Placement]]:
    """The workload and the places that it leaves; raises ContradictoryEvent."""
    moving = {placement.replica for placement in event.placements}
    before = [item for item in workload.placements if item.replica in moving] if workload else []
    if workload is None or not moving or len(before) != len(event.placements):
        raise ContradictoryEvent(f"workload {event.workload_id} has no such replicas placed")
    return _at(workload, before, event.placements), before


def scaled(workload: Workload | None, event: WorkloadScaled) -> tuple[Workload, list[Placement]]:
    """The workload and the places that it leaves; raises ContradictoryEvent."""
    if workload is None or workload.phase is not WorkloadPhase.PLACED:
        raise ContradictoryEvent(f"workload {event.workload_id} does not run")
    there, gone = {item.replica for item in workload.placements}, set(event.released)
    new = {item.replica for item in event.placements}
    if not there >= gone or there & new or len(gone) < len(event.released) or len(new) < len(event.placements):
        raise ContradictoryEvent(f"workload {event.workload_id} has other replicas than are taken or added")
    replicas = len(there) - len(gone) + len(new)
    if replicas < 1:
        raise ContradictoryEvent(f"workload {event.workload_id} would be left without replicas")
    before = [item for item in workload.placements if item.replica in gone]
    begun = workload.replicas_begun or workload.spec.replicas
    counted = replace(workload, spec=replace(workload.spec, replicas=replicas), replicas_begun=begun)
    return _at(counted, before, event.placements), before


def _at(workload: Workload, before: list[Placement], after: tuple[Placement, ...]) -> Workload:
    gone = {item.replica for item in before}
    stay = [item for item in workload.placements if item.replica not in gone]
    return replace(workload, placements=tuple(sorted([*stay, *after], key=lambda item: item.replica)))
