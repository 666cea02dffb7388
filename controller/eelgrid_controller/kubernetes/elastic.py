"""One look at the pods of one service: which have a place, which wait for one, which places wait for pods.

Owns the answer and what follows: to ask for more places, to have the core take over what runs
already, to let places go, to pin. Must not know how many replicas there should be: that is the
steering's and, on the API server, `serving_scale.py`'s.

Theory. A service is no gang: each pod is pinned as soon as it has a place, and a place outlives
its pod. For each look these are compared, in this order:

    pods that run without a place    the core takes them over where they are, and lets a place without a pod go for
                                     each; not those whose place it took, unless nobody made them go for VACANT_S
    places without a pod             are the next pod's that comes; after VACANT_S they are let go
    pods that wait without a place   the core is asked for more, up to what the service allows

While a target is rolled over there are more pods than it asks for: their places are extra, and
go as soon as the old pods have gone. A pod without a place counts as what others hold. One
command is under way at a time; whatever becomes of it, the next look goes by what is there.
What a replica asks for is read from the youngest pod; where that is another than the core
knows, the service begins anew there, and everything that runs is taken over again, but for pods
that hold more than that: they stay what others hold.
"""

from collections.abc import Iterable

from eelgrid_controller.kubernetes.adopting import UNTOLD_S, stands
from eelgrid_controller.kubernetes.gangs import Elastic, Member, Stand, Unit
from eelgrid_controller.kubernetes.gate_events import (
    Adopt,
    Grow,
    Instruction,
    Submit,
)
from eelgrid_controller.kubernetes.others import Others
from eelgrid_controller.kubernetes.pinning import Agreement, Obstacle, agreement, obstacle, rewrite
from eelgrid_controller.kubernetes.serving import Mode
from eelgrid_controller.kubernetes.unit_steps import judge, leave, let_go, others_gates, pin, strip, tell, tell_gates
from eelgrid_controller.occupancy import Adoption
from eelgrid_protos.messages import SubmitWorkloadRequest, WorkloadSpec

__all__ = ["AGAIN_S", "VACANT_S", "look_elastic"]

VACANT_S = 60.0  # for which a place waits for its pod, and a pod without one for its end
AGAIN_S = 10.0  # between two tries for more


def look_elastic(unit: Unit, elastic: Elastic, others: Others, epoch: int | None, at_s: float) -> list[Instruction]:
    """What is to be done for a service now; without an epoch nothing is asked for and nothing written."""
    elastic.is_restless = False
    match unit.stand:
        case Stand.ASKED | Stand.LEAVING:
            return []
        case Stand.PLACED:
            return _placed(unit, elastic, others, epoch, at_s)
        case Stand.WAITING:
            is_waited_for = unit.waiting and not _standing(unit, _newest(unit))
            return [] if is_waited_for or epoch is None else let_go(unit)
    if epoch is None or (unit.stand is Stand.REFUSED and at_s < unit.retry_s):
        return []
    return _unasked(unit, elastic, others, epoch, at_s)


def _unasked(unit: Unit, elastic: Elastic, others: Others, epoch: int, at_s: float) -> list[Instruction]:
    told = _strips(unit, epoch)
    spec = _newest(unit)
    if spec is None or elastic.service is None:
        return told
    standing = _standing(unit, spec)
    if standing:
        known = [member for member in standing if others.knows(member.target)]
        if not known:
            unit.stand, unit.retry_s = Stand.REFUSED, at_s + UNTOLD_S
            return told
        unit.stand, unit.slots = Stand.ASKED, {}
        return [*told, _adopt(unit, spec, others, known)]
    ready, waits = _ready(unit)
    if not ready:
        return [*told, *waits]
    pods = [member.sight.pod for member in ready]
    if others.rules.is_reading(pods):
        return told
    if left := others.rules.left(pods):
        return [*told, *leave(ready, left, epoch)]
    judge(unit, ready[:1], others.rules)
    unit.slots, unit.stand = {0: ready[0].uid}, Stand.ASKED
    return [*told, Submit(SubmitWorkloadRequest(workload_id=unit.workload_id, spec=spec))]


def _placed(unit: Unit, elastic: Elastic, others: Others, epoch: int | None, at_s: float) -> list[Instruction]:
    unit.settle()
    if epoch is None or elastic.spec is None:
        return []
    if elastic.service is None and not unit.members:
        return let_go(unit)
    spec = _newest(unit)
    # A pin that may have arrived keeps its place until that is known.
    is_sent = any(member.sent is not None for member in unit.waiting)
    if spec is not None and spec != elastic.spec and not elastic.is_asked and not is_sent:
        return let_go(unit)
    told = _strips(unit, epoch)
    released = [*_unfit(unit, others), *_disagreeing(unit, others)]
    told += _pins(unit, others, epoch)
    _note_vacant(unit, elastic, at_s)
    elastic.is_restless = bool(elastic.vacant or elastic.let_go) or len(unit.waiting) > 0
    if elastic.is_asked:
        return told
    standing = _newcomers(unit, elastic, others) if at_s >= elastic.again_s else []
    released = list(dict.fromkeys([*released, *_overdue(unit, elastic, at_s, newcomers=len(standing))]))
    if len(released) >= len(unit.places) and not standing:
        return [*told, *let_go(unit)]
    if released or standing:
        elastic.is_asked, elastic.again_s = True, at_s + AGAIN_S
        return [*told, _adopt(unit, elastic.spec, others, standing, released)]
    return [*told, *_grow(unit, elastic, others, at_s)]


def _newest(unit: Unit) -> WorkloadSpec | None:
    """What the youngest pod asks for."""
    found = [member for member in unit.members.values() if member.sight.spec is not None and not member.is_over]
    newest = max(found, key=lambda one: (one.sight.pod.created_s or 0.0, one.sight.key.name), default=None)
    return None if newest is None else newest.sight.spec


def _standing(unit: Unit, spec: WorkloadSpec | None) -> list[Member]:
    """Pods that run or are pinned, stay, and hold no more than a replica of this spec; by name."""
    found = [
        member
        for member in unit.members.values()
        if member.target
        and not (member.is_over or member.denied or member.sight.pod.is_going)
        and member.fits_into(spec)
    ]
    return sorted(found, key=lambda member: (member.sight.key, member.uid))


def _ready(unit: Unit) -> tuple[list[Member], list[Instruction]]:
    """Those that wait for us alone; what is told of the first that waits for others, too."""
    ready = [member for member in unit.waiting if not member.denied and not others_gates(member)]
    if ready or not unit.waiting:
        return ready, []
    first = unit.waiting[0]
    return [], [tell_gates(first)] if others_gates(first) else []


def _strips(unit: Unit, epoch: int) -> list[Instruction]:
    return [strip(member, epoch) for member in unit.waiting if member.sight.is_released and not member.is_patching]


def _adopt(
    unit: Unit, spec: WorkloadSpec, others: Others, standing: list[Member], released: Iterable[int] = ()
) -> Adopt:
    adoption = Adoption(
        standing=tuple(stands(member, others, spec.request.gpu_count) for member in standing),
        first=1 + max(unit.places, default=-1) if unit.stand is Stand.PLACED else 0,
        released=tuple(released),
        in_parts=True,
    )
    return Adopt(SubmitWorkloadRequest(workload_id=unit.workload_id, spec=spec), adoption)


def _unfit(unit: Unit, others: Others) -> list[int]:
    """Places that their waiting pods cannot take: the node closed, or does not meet their demands."""
    found = []
    for replica, uid in list(unit.slots.items()):
        member, place = unit.members.get(uid), unit.places.get(replica)
        if member is None or place is None or not member.is_waiting or member.is_patching or member.sent is not None:
            continue
        is_fit = others.is_open(place.node_name) and others.rules.permits(member.sight.pod, place.node_name)
        if member.denied or not is_fit or obstacle(member, place, others) is Obstacle.TAKEN:
            del unit.slots[replica]
            found.append(replica)
    return found


def _disagreeing(unit: Unit, others: Others) -> list[int]:
    """Places of pods that stand, and that have other devices by a plan which the core did not follow yet."""
    found = []
    for replica, uid in list(unit.slots.items()):
        member, place = unit.members.get(uid), unit.places.get(replica)
        if member is None or place is None or member.is_waiting or member.target != place.node_name:
            continue
        if agreement(member, place, others) is Agreement.PLACE_IS_OLD:
            del unit.slots[replica]
            found.append(replica)
    return found


def _pins(unit: Unit, others: Others, epoch: int) -> list[Instruction]:
    """Pods that go to their places, and plans that do not say what the core holds."""
    told: list[Instruction] = []
    going: dict[str, int] = {}
    for replica, uid in unit.slots.items():
        member, place = unit.members.get(uid), unit.places.get(replica)
        if member is None or place is None:
            continue
        plan = member.sight.plan
        if member.is_waiting and not member.is_patching and not others_gates(member):
            beside = going.get(place.node_name, 0)
            if member.sent is not None or obstacle(member, place, others, beside=beside) is Obstacle.NONE:
                told.append(pin(unit, replica, member, epoch))
                going[place.node_name] = beside + len(place.devices)
            continue
        is_there = plan is not None and member.target == place.node_name and not member.is_noting
        if plan is not None and is_there and agreement(member, place, others) is Agreement.PLAN_IS_OLD:
            told.append(rewrite(member, plan, place, epoch))
    return told


def _note_vacant(unit: Unit, elastic: Elastic, at_s: float) -> None:
    vacant = [replica for replica in sorted(unit.places) if replica not in unit.slots]
    elastic.vacant = {replica: elastic.vacant.get(replica, at_s) for replica in vacant}
    since = {uid: at_s if since_s is None else since_s for uid, since_s in elastic.let_go.items()}
    elastic.let_go = {uid: since_s for uid, since_s in since.items() if at_s - since_s < VACANT_S}


def _newcomers(unit: Unit, elastic: Elastic, others: Others) -> list[Member]:
    """Pods that run and never had a place here."""
    held = {*unit.slots.values(), *elastic.let_go}
    found = [] if elastic.service is None else _standing(unit, elastic.spec)
    return [member for member in found if member.uid not in held and others.knows(member.target)]


def _overdue(unit: Unit, elastic: Elastic, at_s: float, *, newcomers: int) -> list[int]:
    """Places that waited for long enough; a pod that runs without a place stands for one that a place waits for."""
    service, spare = elastic.service, newcomers
    wanted = None if service is None else service.wanted
    released = [replica for replica, since_s in elastic.vacant.items() if at_s - since_s >= VACANT_S]
    if service is not None and wanted is not None and len(unit.present) <= wanted:
        # The rollover is over: what was for its time alone goes at once.
        beyond = len(unit.places) - service.most if service.mode is Mode.ENFORCE else 0
        spare = max(spare, elastic.extra, beyond)
    return released + [replica for replica in elastic.vacant if replica not in released][:spare]


def _grow(unit: Unit, elastic: Elastic, others: Others, at_s: float) -> list[Instruction]:
    service = elastic.service
    held = {*unit.slots.values(), *elastic.let_go}
    without = [member for member in _ready(unit)[0] if member.uid not in held]
    if service is None or not without or at_s < elastic.again_s:
        return []
    elastic.again_s = at_s + AGAIN_S
    replicas = min(len(unit.places) + len(without), service.allowed)
    if replicas <= len(unit.places):
        text = f"not placed: the service {service.name} allows {service.most} replicas, and {service.surge} beside them"
        return [tell(without[0], text)]
    elastic.is_asked = elastic.is_growing = True
    judge(unit, without[:1], others.rules)
    return [
        Grow(unit.workload_id, replicas),
        tell(without[-1], f"waits: the service {service.name} has {len(unit.places)} places, and asks for {replicas}"),
    ]
