"""Reconciles one unit: compares what the core holds with what its pods are, and returns what is to be done.

Gangs are pinned in one round when every place has its pod; pods of services are pinned one by one, and a place
outlives its pod. Pods that already run are adopted where they are, with the devices of their plans.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.model.inference_service import ServiceMode
from eelgrid_controller.engines.kubernetes.model.node_affinity import trait_name
from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import attempt_of, unit_of
from eelgrid_controller.engines.kubernetes.model.selectors import NodeConstraint
from eelgrid_controller.engines.kubernetes.model.well_known import RESOURCE_GPU
from eelgrid_controller.engines.kubernetes.pods.device_consistency import (
    PinObstacle,
    PlanAgreement,
    compare_plan,
    fence_pod,
    find_obstacle,
    rewrite_plan,
)
from eelgrid_controller.engines.kubernetes.pods.external_usage import ExternalUsageTracker
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    AdoptUnit,
    GateInstruction,
    ReplicaPlace,
    RereadPod,
    ScaleUnit,
    SubmitUnit,
)
from eelgrid_controller.engines.kubernetes.pods.inflight import DeviceLane, InflightPods
from eelgrid_controller.engines.kubernetes.pods.placement_unit import (
    PlacementPhase,
    PlacementUnit,
    ServiceUnitState,
    UnitMember,
    foreign_gates,
    leave_to_scheduler,
    merge_member_specs,
    pin_member,
    record_event,
    register_members,
    release_unit,
    report_foreign_gates,
    ungate_member,
)
from eelgrid_controller.state import engine_reports
from eelgrid_controller.state.engine_reports import Adoption, RunningReplica
from eelgrid_protos.messages import SubmitWorkloadRequest, WorkloadSpec

UNREPORTED_GRACE_S = 2.0  # until nodes are asked about again that the core was not told of


def plan_adoption(unit: PlacementUnit, others: ExternalUsageTracker, at_s: float) -> list[GateInstruction]:
    """What is to be asked for a unit that stands and that the core holds nothing of; nothing for all others."""
    unit.stand = PlacementPhase.UNKNOWN  # what was refused is asked for again, if it still stands
    members = _bound_members(unit)
    if not members:
        return []
    unread = [member for member in members if member.spec is None]
    if unread:
        told: list[GateInstruction] = [RereadPod(one.uid, one.sight.key) for one in unread if not one.is_recalled]
        for member in unread:
            member.is_recalled = True
        return told
    if len(members) != max(member.size for member in members):
        return []
    if not all(others.is_reported(member.sight.pod.node_name) for member in members):
        unit.stand, unit.retry_s = PlacementPhase.REFUSED, at_s + UNREPORTED_GRACE_S
        return []
    plans = [member.sight.plan for member in members if member.sight.plan is not None]
    unit.attempt = max(unit.attempt, *(attempt_of(plan.workload) for plan in plans))
    ordered = _number_members(members)
    unit.slots = {replica: member.uid for replica, member in enumerate(ordered)}
    unit.stand = PlacementPhase.ASKED
    spec = merge_member_specs(
        [member.spec for member in ordered if member.spec is not None],
        {trait_name(remove_node_pin(member.sight.pod.constraint)) for member in ordered},
    )
    adoption = Adoption(standing=tuple(external_usage_of(member, others, spec.request.gpu_count) for member in ordered))
    return [AdoptUnit(SubmitWorkloadRequest(workload_id=unit.workload_id, spec=spec), adoption)]


def external_usage_of(member: UnitMember, others: ExternalUsageTracker, gpu_count: int) -> RunningReplica:
    """Where a member is, with the devices of its plan, and what it counts for among others.

    Where a replica has more GPUs than the pod asks for, any that are free come to those of the plan.
    """
    pod, devices = member.sight.pod, others.planned.planned_devices_of(member.uid)
    return RunningReplica(
        node_name=member.target_node,
        gpu_indexes=devices,
        is_exact=bool(devices) and len(devices) == gpu_count,
        counted=engine_reports.ExternalUsage(
            cpu_milli=pod.requested.cpu_milli,
            memory_bytes=pod.requested.memory_bytes,
            gpu_count=pod.requested.count(RESOURCE_GPU),
            gpu_indexes=devices,
        ),
    )


def remove_node_pin(constraint: NodeConstraint) -> NodeConstraint:
    """The demands of a pod without the one node that it was pinned to."""
    if constraint.terms is None:
        return constraint
    terms = {term._replace(fields=()) for term in constraint.terms}
    # A term of the pin alone demands nothing else; beside others that any node may meet, so does the whole.
    kept = None if any(not term.labels for term in terms) else tuple(sorted(terms))
    return constraint._replace(terms=kept)


def _bound_members(unit: PlacementUnit) -> list[UnitMember]:
    """All members, where every one of them is bound as it was planned; none where not."""
    members = [member for member in unit.members.values() if not member.is_over]
    for member in members:
        pod, plan = member.sight.pod, member.sight.plan
        if plan is None or plan.profile or unit_of(plan.workload) != unit.name:
            return []
        if not pod.node_name or pod.is_deleting or plan.node_name != pod.node_name:
            return []
    return members


def _number_members(members: Sequence[UnitMember]) -> list[UnitMember]:
    """By the replicas of their plans; replicas of the core have no gaps, so who comes later moves up."""
    return sorted(members, key=lambda one: (one.sight.plan.replica if one.sight.plan else 0, one.sight.key, one.uid))


VACANT_S = 60.0  # for which a place waits for its pod, and a pod without one for its end
RETRY_S = 10.0  # between two tries for more


def reconcile_service_unit(
    unit: PlacementUnit, elastic: ServiceUnitState, others: ExternalUsageTracker, epoch: int | None, at_s: float
) -> list[GateInstruction]:
    """What is to be done for a service now; without an epoch nothing is asked for and nothing written."""
    elastic.is_restless = False
    match unit.stand:
        case PlacementPhase.ASKED | PlacementPhase.LEAVING:
            return []
        case PlacementPhase.PLACED:
            return _reconcile_placed_service(unit, elastic, others, epoch, at_s)
        case PlacementPhase.WAITING:
            is_waited_for = unit.waiting_members and not _adoptable_members(unit, _newest(unit))
            return [] if is_waited_for or epoch is None else release_unit(unit)
    if epoch is None or (unit.stand is PlacementPhase.REFUSED and at_s < unit.retry_s):
        return []
    return _reconcile_new_service(unit, elastic, others, epoch, at_s)


def _reconcile_new_service(
    unit: PlacementUnit, elastic: ServiceUnitState, others: ExternalUsageTracker, epoch: int, at_s: float
) -> list[GateInstruction]:
    told = _strips(unit, epoch)
    spec = _newest(unit)
    if spec is None or elastic.service is None:
        return told
    standing = _adoptable_members(unit, spec)
    if standing:
        known = [member for member in standing if others.is_reported(member.target_node)]
        if not known:
            unit.stand, unit.retry_s = PlacementPhase.REFUSED, at_s + UNREPORTED_GRACE_S
            return told
        unit.stand, unit.slots = PlacementPhase.ASKED, {}
        return [*told, _adopt(unit, spec, others, known)]
    ready, waits = _ready(unit)
    if not ready:
        return [*told, *waits]
    pods = [member.sight.pod for member in ready]
    if others.rules.is_reading(pods):
        return told
    if left := others.rules.unsupported_reason(pods):
        return [*told, *leave_to_scheduler(unit, ready, left, epoch, at_s)]
    register_members(unit, ready[:1], others.rules)
    unit.slots, unit.stand = {0: ready[0].uid}, PlacementPhase.ASKED
    return [*told, SubmitUnit(SubmitWorkloadRequest(workload_id=unit.workload_id, spec=spec))]


def _reconcile_placed_service(
    unit: PlacementUnit, elastic: ServiceUnitState, others: ExternalUsageTracker, epoch: int | None, at_s: float
) -> list[GateInstruction]:
    unit.settle_places()
    if epoch is None or elastic.spec is None:
        return []
    if elastic.service is None and not unit.members:
        return release_unit(unit)
    spec = _newest(unit)
    # A pin that may have arrived keeps its place until that is known.
    is_sent = any(member.sent is not None for member in unit.waiting_members)
    if spec is not None and spec != elastic.spec and not elastic.is_asked and not is_sent:
        return release_unit(unit)
    told = _strips(unit, epoch)
    released = [*_unfit(unit, others), *_disagreeing(unit, others)]
    told += _pins(unit, others, epoch)
    _note_vacant(unit, elastic, at_s)
    elastic.is_restless = bool(elastic.vacant or elastic.let_go) or len(unit.waiting_members) > 0
    if elastic.is_asked:
        return told
    standing = _newcomers(unit, elastic, others) if at_s >= elastic.again_s else []
    released = list(dict.fromkeys([*released, *_overdue(unit, elastic, at_s, newcomers=len(standing))]))
    if len(released) >= len(unit.places) and not standing:
        return [*told, *release_unit(unit)]
    if released or standing:
        elastic.is_asked, elastic.again_s = True, at_s + RETRY_S
        return [*told, _adopt(unit, elastic.spec, others, standing, released)]
    return [*told, *_grow(unit, elastic, others, at_s)]


def _newest(unit: PlacementUnit) -> WorkloadSpec | None:
    """What the youngest pod asks for."""
    found = [member for member in unit.members.values() if member.sight.spec is not None and not member.is_over]
    newest = max(found, key=lambda one: (one.sight.pod.created_s or 0.0, one.sight.key.name), default=None)
    return None if newest is None else newest.sight.spec


def _adoptable_members(unit: PlacementUnit, spec: WorkloadSpec | None) -> list[UnitMember]:
    """Pods that run or are pinned, stay, and hold no more than a replica of this spec; by name."""
    found = [
        member
        for member in unit.members.values()
        if member.target_node
        and not (member.is_over or member.denied or member.sight.pod.is_deleting)
        and member.fits_into(spec)
    ]
    return sorted(found, key=lambda member: (member.sight.key, member.uid))


def _ready(unit: PlacementUnit) -> tuple[list[UnitMember], list[GateInstruction]]:
    """Those that wait for us alone; what is told of the first that waits for others, too."""
    ready = [member for member in unit.waiting_members if not member.denied and not foreign_gates(member)]
    if ready or not unit.waiting_members:
        return ready, []
    first = unit.waiting_members[0]
    return [], [report_foreign_gates(first)] if foreign_gates(first) else []


def _strips(unit: PlacementUnit, epoch: int) -> list[GateInstruction]:
    return [
        ungate_member(member, epoch)
        for member in unit.waiting_members
        if member.sight.is_released and not member.is_patching
    ]


def _adopt(
    unit: PlacementUnit,
    spec: WorkloadSpec,
    others: ExternalUsageTracker,
    standing: list[UnitMember],
    released: Iterable[int] = (),
) -> AdoptUnit:
    adoption = Adoption(
        standing=tuple(external_usage_of(member, others, spec.request.gpu_count) for member in standing),
        first=1 + max(unit.places, default=-1) if unit.stand is PlacementPhase.PLACED else 0,
        released=tuple(released),
        in_parts=True,
    )
    return AdoptUnit(SubmitWorkloadRequest(workload_id=unit.workload_id, spec=spec), adoption)


def _unfit(unit: PlacementUnit, others: ExternalUsageTracker) -> list[int]:
    """Places that their waiting pods cannot take: the node closed, or does not meet their demands."""
    found = []
    for replica, uid in list(unit.slots.items()):
        member, place = unit.members.get(uid), unit.places.get(replica)
        if member is None or place is None or not member.is_waiting or member.is_patching or member.sent is not None:
            continue
        is_fit = others.is_open(place.node_name, uid=uid) and others.rules.permits_node(
            member.sight.pod, place.node_name
        )
        if member.denied or not is_fit or find_obstacle(member, place, others) is PinObstacle.TAKEN:
            del unit.slots[replica]
            found.append(replica)
    return found


def _disagreeing(unit: PlacementUnit, others: ExternalUsageTracker) -> list[int]:
    """Places of pods that stand, and that have other devices by a plan which the core did not follow yet."""
    found = []
    for replica, uid in list(unit.slots.items()):
        member, place = unit.members.get(uid), unit.places.get(replica)
        if member is None or place is None or member.is_waiting or member.target_node != place.node_name:
            continue
        if compare_plan(member, place, others) is PlanAgreement.PLACE_IS_OLD:
            del unit.slots[replica]
            found.append(replica)
    return found


def _pins(unit: PlacementUnit, others: ExternalUsageTracker, epoch: int) -> list[GateInstruction]:
    """Pods that go to their places, and plans that do not say what the core holds."""
    told: list[GateInstruction] = []
    going: dict[str, list[Pod]] = {}
    for replica, uid in unit.slots.items():
        member, place = unit.members.get(uid), unit.places.get(replica)
        if member is None or place is None:
            continue
        plan = member.sight.plan
        if member.is_waiting and not member.is_patching and not foreign_gates(member):
            beside = going.setdefault(place.node_name, [])
            if member.sent is not None or find_obstacle(member, place, others, beside=beside) is PinObstacle.NONE:
                told.append(pin_member(unit, replica, member, epoch))
                beside.append(member.sight.pod)
            continue
        is_there = plan is not None and member.target_node == place.node_name and not member.is_noting
        if plan is not None and is_there and compare_plan(member, place, others) is PlanAgreement.PLAN_IS_OLD:
            told.append(rewrite_plan(member, plan, place, epoch))
    return told


def _note_vacant(unit: PlacementUnit, elastic: ServiceUnitState, at_s: float) -> None:
    vacant = [replica for replica in sorted(unit.places) if replica not in unit.slots]
    elastic.vacant = {replica: elastic.vacant.get(replica, at_s) for replica in vacant}
    since = {uid: at_s if since_s is None else since_s for uid, since_s in elastic.let_go.items()}
    elastic.let_go = {uid: since_s for uid, since_s in since.items() if at_s - since_s < VACANT_S}


def _newcomers(unit: PlacementUnit, elastic: ServiceUnitState, others: ExternalUsageTracker) -> list[UnitMember]:
    """Pods that run and never had a place here."""
    held = {*unit.slots.values(), *elastic.let_go}
    found = [] if elastic.service is None else _adoptable_members(unit, elastic.spec)
    return [member for member in found if member.uid not in held and others.is_reported(member.target_node)]


def _overdue(unit: PlacementUnit, elastic: ServiceUnitState, at_s: float, *, newcomers: int) -> list[int]:
    """Places that waited for long enough; a pod that runs without a place stands for one that a place waits for."""
    service, spare = elastic.service, newcomers
    wanted = None if service is None else service.wanted
    released = [replica for replica, since_s in elastic.vacant.items() if at_s - since_s >= VACANT_S]
    if service is not None and wanted is not None and len(unit.present_members) <= wanted:
        # The rollover is over: what was for its time alone goes at once.
        beyond = len(unit.places) - service.most if service.mode is ServiceMode.ENFORCE else 0
        spare = max(spare, elastic.extra, beyond)
    return released + [replica for replica in elastic.vacant if replica not in released][:spare]


def _grow(
    unit: PlacementUnit, elastic: ServiceUnitState, others: ExternalUsageTracker, at_s: float
) -> list[GateInstruction]:
    service = elastic.service
    held = {*unit.slots.values(), *elastic.let_go}
    without = [member for member in _ready(unit)[0] if member.uid not in held]
    if service is None or not without or at_s < elastic.again_s:
        return []
    elastic.again_s = at_s + RETRY_S
    replicas = min(len(unit.places) + len(without), service.max_places)
    if replicas <= len(unit.places):
        text = f"not placed: the service {service.name} allows {service.most} replicas, and {service.surge} beside them"
        return [record_event(without[0], text)]
    elastic.is_asked = elastic.is_growing = True
    register_members(unit, without[:1], others.rules)
    return [
        ScaleUnit(unit.workload_id, replicas),
        record_event(
            without[-1], f"waits: the service {service.name} has {len(unit.places)} places, and asks for {replicas}"
        ),
    ]


COLLISION_RETRY_S = 1.0  # until a unit asks again whose place collided, once more for each time in a row
_COLLISIONS_MOST = 15
_BLOCKED_S = 10.0  # for a plan in the way to change; it takes one write, if that may be made at all


def reconcile_unit(
    unit: PlacementUnit, others: ExternalUsageTracker, flights: InflightPods, epoch: int | None, at_s: float
) -> list[GateInstruction]:
    """What is to be done for a unit now; without an epoch nothing is asked for and nothing written."""
    if unit.elastic is not None:
        return reconcile_service_unit(unit, unit.elastic, others, epoch, at_s)
    match unit.stand:
        case PlacementPhase.ASKED | PlacementPhase.LEAVING:
            return []
        case PlacementPhase.PLACED:
            return _reconcile_placed_unit(unit, others, flights, epoch, at_s)
        case PlacementPhase.WAITING:
            waits = {member.uid for member in unit.waiting_members if not member.denied}
            return [] if waits == set(unit.slots.values()) and not unit.is_stale else release_unit(unit)
    if epoch is None or at_s < unit.retry_s:
        return []
    return _reconcile_new_unit(unit, others, epoch, at_s) if unit.waiting_members else plan_adoption(unit, others, at_s)


def _reconcile_new_unit(
    unit: PlacementUnit, others: ExternalUsageTracker, epoch: int, at_s: float
) -> list[GateInstruction]:
    waiting = unit.waiting_members
    if any(member.denied for member in waiting):
        return []
    for member in waiting:
        if member.sight.is_released:
            return [] if member.is_patching else [ungate_member(member, epoch)]
    if not unit.is_complete:
        return [
            record_event(
                waiting[0], f"waits for its gang: {len(unit.present_members)} of {unit.size} members are present"
            )
        ]
    for member in waiting:
        if foreign_gates(member):
            return [report_foreign_gates(member)]
    for member in waiting:
        if member.sight.spec is None:
            return [record_event(member, f"not placed: {member.sight.refused}", is_warning=True)]
    pods = [member.sight.pod for member in waiting]
    if others.rules.is_reading(pods):
        return []
    if left := others.rules.unsupported_reason(pods):
        return leave_to_scheduler(unit, waiting, left, epoch, at_s)
    asked = unit.assign_replicas()
    register_members(unit, asked, others.rules)
    return [SubmitUnit(SubmitWorkloadRequest(workload_id=unit.workload_id, spec=_spec(asked)))]


def _reconcile_placed_unit(
    unit: PlacementUnit, others: ExternalUsageTracker, flights: InflightPods, epoch: int | None, at_s: float
) -> list[GateInstruction]:
    if unit.is_preempted:
        return _leave_places(unit, epoch)
    unit.settle_places()
    standing = {replica: unit.members.get(unit.slots.get(replica, "")) for replica in unit.places}
    found = [(replica, member) for replica, member in standing.items() if member is not None and not member.is_over]
    waits, going = False, dict[str, list[Pod]]()
    is_lost = (not found and not unit.moving) or unit.is_stale
    for replica, member in found:
        place = unit.places[replica]
        is_lost = is_lost or not _fits(member, place, others)
        if member.is_waiting and member.sent is None:
            stands_there = find_obstacle(member, place, others, beside=going.get(place.node_name, ()))
            going.setdefault(place.node_name, []).append(member.sight.pod)
            is_lost = is_lost or _has_collided(unit, stands_there, at_s)
            waits = waits or stands_there is PinObstacle.WAITS
    if is_lost:
        return _give_up(unit, [member for _, member in found], epoch)
    if epoch is None:
        return []
    told = _rewritten(unit, found, others, epoch)
    if waits:
        unit.retry_s = at_s + COLLISION_RETRY_S
        return told
    # Who was let go first may be done before the last one is: the gang has begun, and waits for nobody.
    done = sum(member is not None and member.has_succeeded for member in standing.values())
    return told + _pin_members(unit, found, done, flights, _Now(epoch, at_s))


def _leave_places(unit: PlacementUnit, epoch: int | None) -> list[GateInstruction]:
    """A unit that makes room: its places are let go when none of its pods is there, or may be on its way."""
    if any(not member.is_waiting for member in unit.active_members):
        return []
    return _give_up(unit, unit.active_members, epoch)


class _Now(NamedTuple):
    """The term in which this one leads, and the time."""

    epoch: int
    at_s: float


def _pin_members(
    unit: PlacementUnit, found: Sequence[tuple[int, UnitMember]], done: int, flights: InflightPods, now: _Now
) -> list[GateInstruction]:
    """All members that wait go to their places, if every one is there; `done` members have been there already."""
    waiting = [(replica, member) for replica, member in found if member.is_waiting]
    present = sum(not member.sight.pod.is_deleting for _, member in found) + done
    if waiting and present < len(unit.places):
        missing = len(unit.places) - present
        return [
            record_event(waiting[0][1], f"placed, and waits for its gang: {missing} of {unit.size} members are missing")
        ]
    going = [(replica, member) for replica, member in waiting if not member.is_patching]
    for_devices = [
        (member, DeviceLane(unit.places[replica].node_name, RESOURCE_GPU))
        for replica, member in going
        if unit.places[replica].devices
    ]
    if not flights.can_start(unit.name, (lane for _, lane in for_devices)):
        return []
    for member, lane in for_devices:
        flights.record_start(unit.name, member.uid, member.sight.key, lane, now.at_s)
    unit.collisions, unit.blocked_s = 0, None
    told: list[GateInstruction] = [pin_member(unit, replica, member, now.epoch) for replica, member in going]
    held = set(unit.slots.values())
    extra = [member for member in unit.waiting_members if member.uid not in held]
    text = f"not placed: its gang has {len(unit.places)} members already"
    return [*told, *(record_event(member, text, is_warning=True) for member in extra)]


def _has_collided(unit: PlacementUnit, found: PinObstacle, at_s: float) -> bool:
    """Whether a place is to be given up for what stands there; what is about to change is waited for, not for ever."""
    if found is PinObstacle.WAITS and unit.blocked_s is None:
        unit.blocked_s = at_s
    is_over = unit.blocked_s is not None and at_s - unit.blocked_s >= _BLOCKED_S
    if found is PinObstacle.TAKEN or (found is PinObstacle.WAITS and is_over):
        # At once for the first time: the core hears of what is there before it is asked.
        unit.retry_s = at_s + COLLISION_RETRY_S * min(unit.collisions, _COLLISIONS_MOST)
        unit.collisions, unit.blocked_s = unit.collisions + 1, None
        return True
    return False


def _give_up(unit: PlacementUnit, members: Iterable[UnitMember], epoch: int | None) -> list[GateInstruction]:
    """Let the unit go, unless a pin of it may have arrived: then that is found out first."""
    sent = [member for member in members if member.is_waiting and member.sent is not None]
    if not sent:
        return release_unit(unit)
    if epoch is None:
        return []
    return [fence_pod(member, epoch) for member in sent if not member.is_patching and not member.is_noting]


def _rewritten(
    unit: PlacementUnit, found: Iterable[tuple[int, UnitMember]], others: ExternalUsageTracker, epoch: int
) -> list[GateInstruction]:
    """Plans of pods that stand which do not say what the core holds for them."""
    told: list[GateInstruction] = []
    for replica, member in found:
        plan, place = member.sight.plan, unit.places[replica]
        if plan is None or member.is_waiting or member.is_noting:
            continue
        if compare_plan(member, place, others) is PlanAgreement.PLAN_IS_OLD:
            told.append(rewrite_plan(member, plan, place, epoch))
    return told


def _fits(member: UnitMember, place: ReplicaPlace, others: ExternalUsageTracker) -> bool:
    if not member.is_waiting:
        is_there = member.target_node == place.node_name
        return is_there and compare_plan(member, place, others) is not PlanAgreement.PLACE_IS_OLD
    return (
        not member.denied
        and others.is_open(place.node_name, uid=member.uid)
        and others.rules.permits_node(member.sight.pod, place.node_name)
    )


def _spec(members: Iterable[UnitMember]) -> WorkloadSpec:
    found = list(members)
    specs = [member.sight.spec for member in found if member.sight.spec is not None]
    return merge_member_specs(specs, {trait_name(member.sight.pod.constraint) for member in found})
