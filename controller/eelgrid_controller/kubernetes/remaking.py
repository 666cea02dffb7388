"""Making anew what cannot be scheduled where it was pinned: a pod alone, or its whole gang.

Owns who is deleted then, and what people are told. Must not know who waits for how long; the
watchdog does.
"""

from collections.abc import Iterator

from eelgrid_controller.kubernetes.gangs import Member, Unit
from eelgrid_controller.kubernetes.gate_events import Recreate, Tell
from eelgrid_controller.kubernetes.watchdog import Watchdog

__all__ = ["made_anew"]


def made_anew(
    unit: Unit, member: Member, watchdog: Watchdog, epoch: int, *, waited_s: float, at_s: float
) -> Iterator[Recreate | Tell]:
    """A pinned pod cannot be scheduled: it and its gang are made anew, or people hear of it."""
    gang = unit.alive if unit.size > 1 else [member]
    pod = member.sight.pod
    why = f"pinned to {member.sight.pinned}, where kube-scheduler cannot put it: {pod.unscheduled_message}"
    if any(one.sight.pod.owner is None for one in gang):
        watchdog.again(member.uid, at_s)
        yield Tell(member.uid, member.sight.key, f"{why}; delete it and create it again", is_warning=True)
        return
    owner = unit.name if unit.size > 1 else pod.owner.uid if pod.owner is not None else ""
    if not watchdog.may_recreate(owner, waited_s, at_s):
        return
    watchdog.recreated(owner, waited_s, at_s)
    unit.spoiled(member, why)
    for one in gang:
        watchdog.again(one.uid, at_s)
        if not one.sight.pod.is_going and not one.is_waiting:
            yield Tell(one.uid, one.sight.key, f"made anew: {why}", is_warning=True)
            # Of this version alone: one that has been bound meanwhile runs.
            yield Recreate(one.uid, one.sight.key, epoch, why, one.sight.pod.resource_version)
