"""One look at one unit: whether what the core holds fits what its pods are.

Owns the answer and what follows: to submit, to let go, to pin, or to say what is missing.
Must not know events; time is an argument.

Theory. A pod is pinned only where the core holds a place for it on a node that is there and
open, and in a gang only when every place has its pod: all are pinned in one round. Where a
pod stands elsewhere than its place says, the place is let go, never the pod, unless it is
being moved (gangs.py): then the place is kept for whoever comes in its stead. A pin that may
have arrived keeps its place until it is known what became of it (pinning.py says what else
keeps a pod from its place).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from eelgrid_controller.kubernetes.adopting import adopting
from eelgrid_controller.kubernetes.constraints import trait
from eelgrid_controller.kubernetes.elastic import look_elastic
from eelgrid_controller.kubernetes.flights import Flights, Lane
from eelgrid_controller.kubernetes.gangs import Member, Stand, Unit
from eelgrid_controller.kubernetes.gate_events import Instruction, Place, Submit
from eelgrid_controller.kubernetes.names import RESOURCE_GPU
from eelgrid_controller.kubernetes.others import Others
from eelgrid_controller.kubernetes.pinning import Agreement, Obstacle, agreement, fence, obstacle, rewrite
from eelgrid_controller.kubernetes.unit_specs import unit_spec
from eelgrid_controller.kubernetes.unit_steps import judge, leave, let_go, others_gates, pin, strip, tell, tell_gates
from eelgrid_protos.messages import SubmitWorkloadRequest, WorkloadSpec

__all__ = ["COLLIDED_S", "look"]

COLLIDED_S = 1.0  # until a unit asks again whose place collided, once more for each time in a row
_COLLISIONS_MOST = 15
_BLOCKED_S = 10.0  # for a plan in the way to change; it takes one write, if that may be made at all


def look(unit: Unit, others: Others, flights: Flights, epoch: int | None, at_s: float) -> list[Instruction]:
    """What is to be done for a unit now; without an epoch nothing is asked for and nothing written."""
    if unit.elastic is not None:
        return look_elastic(unit, unit.elastic, others, epoch, at_s)
    match unit.stand:
        case Stand.ASKED | Stand.LEAVING:
            return []
        case Stand.PLACED:
            return _placed(unit, others, flights, epoch, at_s)
        case Stand.WAITING:
            waits = {member.uid for member in unit.waiting if not member.denied}
            return [] if waits == set(unit.slots.values()) and not unit.is_stale else let_go(unit)
    if epoch is None or at_s < unit.retry_s:
        return []
    return _unasked(unit, others, epoch) if unit.waiting else adopting(unit, others, at_s)


def _unasked(unit: Unit, others: Others, epoch: int) -> list[Instruction]:
    waiting = unit.waiting
    if any(member.denied for member in waiting):
        return []
    for member in waiting:
        if member.sight.is_released:
            return [] if member.is_patching else [strip(member, epoch)]
    present = len(unit.present)
    if present < unit.size:
        return [tell(waiting[0], f"waits for its gang: {present} of {unit.size} members are here")]
    for member in waiting:
        if others_gates(member):
            return [tell_gates(member)]
    for member in waiting:
        if member.sight.spec is None:
            return [tell(member, f"not placed: {member.sight.refused}", is_warning=True)]
    pods = [member.sight.pod for member in waiting]
    if others.rules.is_reading(pods):
        return []
    if left := others.rules.left(pods):
        return leave(waiting, left, epoch)
    asked = unit.ask()
    judge(unit, asked, others.rules)
    return [Submit(SubmitWorkloadRequest(workload_id=unit.workload_id, spec=_spec(asked)))]


def _placed(unit: Unit, others: Others, flights: Flights, epoch: int | None, at_s: float) -> list[Instruction]:
    unit.settle()
    standing = {replica: unit.members.get(unit.slots.get(replica, "")) for replica in unit.places}
    found = [(replica, member) for replica, member in standing.items() if member is not None and not member.is_over]
    waits, going = False, dict[str, int]()
    is_lost = (not found and not unit.moving) or unit.is_stale
    for replica, member in found:
        place = unit.places[replica]
        is_lost = is_lost or not _fits(member, place, others)
        if member.is_waiting and member.sent is None:
            stands_there = obstacle(member, place, others, beside=going.get(place.node_name, 0))
            going[place.node_name] = going.get(place.node_name, 0) + len(place.devices)
            is_lost = is_lost or _has_collided(unit, stands_there, at_s)
            waits = waits or stands_there is Obstacle.WAITS
    if is_lost:
        return _give_up(unit, [member for _, member in found], epoch)
    if epoch is None:
        return []
    told = _rewritten(unit, found, others, epoch)
    if waits:
        unit.retry_s = at_s + COLLIDED_S
        return told
    # Who was let go first may be done before the last one is: the gang has begun, and waits for nobody.
    done = sum(member is not None and member.has_succeeded for member in standing.values())
    return told + _pinned(unit, found, done, flights, _Now(epoch, at_s))


class _Now(NamedTuple):
    """The term in which this one leads, and the time."""

    epoch: int
    at_s: float


def _pinned(
    unit: Unit, found: Sequence[tuple[int, Member]], done: int, flights: Flights, now: _Now
) -> list[Instruction]:
    """All members that wait go to their places, if every one is there; `done` members have been there already."""
    waiting = [(replica, member) for replica, member in found if member.is_waiting]
    present = sum(not member.sight.pod.is_going for _, member in found) + done
    if waiting and present < len(unit.places):
        missing = len(unit.places) - present
        return [tell(waiting[0][1], f"placed, and waits for its gang: {missing} of {unit.size} members lack")]
    going = [(replica, member) for replica, member in waiting if not member.is_patching]
    for_devices = [
        (member, Lane(unit.places[replica].node_name, RESOURCE_GPU))
        for replica, member in going
        if unit.places[replica].devices
    ]
    if not flights.may_go(unit.name, (lane for _, lane in for_devices)):
        return []
    for member, lane in for_devices:
        flights.begun(unit.name, member.uid, member.sight.key, lane, now.at_s)
    unit.collisions, unit.blocked_s = 0, None
    told: list[Instruction] = [pin(unit, replica, member, now.epoch) for replica, member in going]
    held = set(unit.slots.values())
    extra = [member for member in unit.waiting if member.uid not in held]
    text = f"not placed: its gang has {len(unit.places)} members already"
    return [*told, *(tell(member, text, is_warning=True) for member in extra)]


def _has_collided(unit: Unit, found: Obstacle, at_s: float) -> bool:
    """Whether a place is to be given up for what stands there; what is about to change is waited for, not for ever."""
    if found is Obstacle.WAITS and unit.blocked_s is None:
        unit.blocked_s = at_s
    is_over = unit.blocked_s is not None and at_s - unit.blocked_s >= _BLOCKED_S
    if found is Obstacle.TAKEN or (found is Obstacle.WAITS and is_over):
        # At once for the first time: the core hears of what is there before it is asked.
        unit.retry_s = at_s + COLLIDED_S * min(unit.collisions, _COLLISIONS_MOST)
        unit.collisions, unit.blocked_s = unit.collisions + 1, None
        return True
    return False


def _give_up(unit: Unit, members: Iterable[Member], epoch: int | None) -> list[Instruction]:
    """Let the unit go, unless a pin of it may have arrived: then that is found out first."""
    sent = [member for member in members if member.is_waiting and member.sent is not None]
    if not sent:
        return let_go(unit)
    if epoch is None:
        return []
    return [fence(member, epoch) for member in sent if not member.is_patching and not member.is_noting]


def _rewritten(unit: Unit, found: Iterable[tuple[int, Member]], others: Others, epoch: int) -> list[Instruction]:
    """Plans of pods that stand which do not say what the core holds for them."""
    told: list[Instruction] = []
    for replica, member in found:
        plan, place = member.sight.plan, unit.places[replica]
        if plan is None or member.is_waiting or member.is_noting:
            continue
        if agreement(member, place, others) is Agreement.PLAN_IS_OLD:
            told.append(rewrite(member, plan, place, epoch))
    return told


def _fits(member: Member, place: Place, others: Others) -> bool:
    if not member.is_waiting:
        is_there = member.target == place.node_name
        return is_there and agreement(member, place, others) is not Agreement.PLACE_IS_OLD
    return (
        not member.denied
        and others.is_open(place.node_name)
        and others.rules.permits(member.sight.pod, place.node_name)
    )


def _spec(members: Iterable[Member]) -> WorkloadSpec:
    found = list(members)
    specs = [member.sight.spec for member in found if member.sight.spec is not None]
    return unit_spec(specs, {trait(member.sight.pod.constraint) for member in found})
