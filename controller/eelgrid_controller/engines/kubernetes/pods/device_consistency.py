"""Compares devices that plans name, pods hold and the core placed, and says how to correct them.

Before a pod is pinned its place is checked against all plans on the node. What a kubelet reports a pod to hold is
the truth, and the plan follows: replicas are pointed at the devices that they hold, all in one step, so that two that
got each other's swap.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_FENCE, ANNOTATION_PLAN, RESOURCE_GPU
from eelgrid_controller.engines.kubernetes.pods.external_usage import ExternalUsageTracker, PlannedPod
from eelgrid_controller.engines.kubernetes.pods.gate_events import AnnotatePod, ReplicaPlace
from eelgrid_controller.engines.kubernetes.pods.placement_unit import UnitMember
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan, format_plan
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST

ReplicaKey = tuple[str, int]


class ReplicaDevices(NamedTuple):
    """A replica on the node: its planned devices, what its pod holds (None: not seen), and whether a kubelet gives them."""

    planned: frozenset[str]
    held: frozenset[str] | None = None
    is_given: bool = True


class DeviceRepair(NamedTuple):
    """The devices that replicas are to be pointed at, all at once, and why others cannot be."""

    pointed: Mapping[ReplicaKey, tuple[str, ...]]
    hopeless: Mapping[ReplicaKey, str]


def plan_repair(
    standing: Mapping[ReplicaKey, ReplicaDevices], strangers: Iterable[str], devices: Sequence[str]
) -> DeviceRepair:
    """What to do on a node; `strangers` are devices that pods of others hold, `devices` all whole ones, in order."""
    seen = {key: one.held for key, one in standing.items() if one.held and one.is_given}
    hopeless: dict[ReplicaKey, str] = {}
    wrong: dict[ReplicaKey, frozenset[str]] = {}
    foreign = frozenset(strangers)
    for key, held in sorted(seen.items()):
        planned = standing[key].planned
        others = [one for other, one in seen.items() if other != key]
        if held == planned or any(held & one for one in others) or held & foreign or not held <= set(devices):
            continue
        if len(held) != len(planned):
            hopeless[key] = f"it holds {len(held)} devices and was planned on {len(planned)}"
        else:
            wrong[key] = held
    _drop_collisions(standing, wrong, hopeless)
    pointed = {key: tuple(sorted(held)) for key, held in wrong.items()}
    taken = foreign.union(*seen.values(), *wrong.values()) if seen else foreign
    for key, found in _planned_anew(standing, wrong, taken, devices).items():
        if found is None:
            hopeless[key] = "others hold them, and no others are free"
        else:
            pointed[key] = found
    # Whoever was to make room and cannot keeps its plan: what needs that room cannot be told so either.
    while True:
        kept = {uuid for key in hopeless for uuid in standing[key].planned}
        refused = [key for key, uuids in pointed.items() if kept.intersection(uuids)]
        if not refused:
            return DeviceRepair(pointed, hopeless)
        for key in refused:
            del pointed[key]
            hopeless[key] = "it holds some that are planned for another, which can have no others"


def _drop_collisions(
    standing: Mapping[ReplicaKey, ReplicaDevices],
    wrong: dict[ReplicaKey, frozenset[str]],
    hopeless: dict[ReplicaKey, str],
) -> None:
    """What is held by work that no kubelet gives devices to, or stays with a pod that cannot be put right."""
    while True:
        fixed = {
            uuid: key
            for key, one in standing.items()
            if not one.is_given or key in hopeless or (one.held and key not in wrong)
            for uuid in one.planned
        }
        colliding = {
            key: next(uuid for uuid in sorted(held) if uuid in fixed)
            for key, held in wrong.items()
            if held & fixed.keys()
        }
        if not colliding:
            return
        for key, uuid in colliding.items():
            del wrong[key]
            hopeless[key] = f"it holds {uuid}, which {fixed[uuid][0]} is planned on and keeps"


def _planned_anew(
    standing: Mapping[ReplicaKey, ReplicaDevices],
    wrong: Mapping[ReplicaKey, frozenset[str]],
    taken: frozenset[str],
    devices: Sequence[str],
) -> dict[ReplicaKey, tuple[str, ...] | None]:
    """Replicas that were not seen yet and whose planned devices are somebody's; None where there are no others."""
    unseen = {key: one.planned for key, one in standing.items() if one.is_given and not one.held and one.planned}
    displaced = {key: planned for key, planned in sorted(unseen.items()) if planned & taken}
    kept = [planned for key, planned in unseen.items() if key not in displaced]
    fixed = [one.planned for one in standing.values() if not one.is_given]
    used = set(taken).union(*kept, *fixed)
    for key, one in standing.items():
        if one.held and key not in wrong:
            used |= one.planned
    found: dict[ReplicaKey, tuple[str, ...] | None] = {}
    for key, planned in displaced.items():
        own = [uuid for uuid in devices if uuid in planned and uuid not in used]
        rest = [uuid for uuid in devices if uuid not in planned and uuid not in used]
        chosen = [*own, *rest][: len(planned)]
        if len(chosen) < len(planned):
            found[key] = None
            used |= planned
        else:
            found[key] = tuple(sorted(chosen))
            used.update(chosen)
    return found


class PinObstacle(Enum):
    """Why a waiting pod cannot be pinned to its place."""

    NONE = auto()
    WAITS = auto()  # a plan names its devices, and one of plan and core is about to follow the other
    TAKEN = auto()  # its devices, or all GPUs of the node, are others'


class PlanAgreement(Enum):
    """What a standing pod's plan and the core's place say of each other."""

    SAME = auto()
    PLAN_IS_OLD = auto()  # the core's place is right
    PLACE_IS_OLD = auto()  # the plan is right


def find_obstacle(
    member: UnitMember, place: ReplicaPlace, others: ExternalUsageTracker, *, beside: Sequence[Pod] = ()
) -> PinObstacle:
    """What the API server's pods say against a pod's place; those `beside` it go there in the same round.

    Nobody checks a binding of ours, so all amounts are checked before it; a pinned pod's are left to kube-scheduler.
    """
    pod = member.sight.pod
    if pod.is_bound_by_us and not others.has_room(pod, place.node_name, beside):
        return PinObstacle.TAKEN
    count = pod.requested.count(RESOURCE_GPU)
    if not count:
        return PinObstacle.NONE
    rival = others.planned.find_rival(place.node_name, place.devices, member.uid)
    if rival is not None:
        return PinObstacle.WAITS if rival.is_moving else PinObstacle.TAKEN
    room = others.free_gpus(place.node_name, without=member.uid)
    return (
        PinObstacle.NONE
        if room >= count + sum(one.requested.count(RESOURCE_GPU) for one in beside)
        else PinObstacle.TAKEN
    )


def planned_pod(member: UnitMember, held: ReplicaPlace | None) -> PlannedPod | None:
    """What a pod holds, or may hold by what was sent; `held` is its place where the core counts it there."""
    pod, sent = member.sight.pod, member.sent
    node_name = member.target_node or (sent.node_name if sent is not None else "")
    count = pod.requested.count(RESOURCE_GPU)
    if not node_name:
        return None
    if not count:
        return planned_amounts(pod, node_name)
    devices, epoch = _planned_devices(member, node_name), 0 if member.sight.plan is None else member.sight.plan.epoch
    if not member.target_node and sent is not None:
        devices = member.devices_of(sent)
    known = held.devices if held is not None else ()
    is_held = bool(devices) and set(known).issuperset(devices)
    is_moving = bool(devices) and bool(known) and not is_held
    return PlannedPod(node_name, count, devices, epoch, is_held, is_moving, pod.requested)


def planned_amounts(pod: Pod, node_name: str) -> PlannedPod:
    """What a pod requests on a node, whichever devices it holds there."""
    return PlannedPod(node_name, pod.requested.count(RESOURCE_GPU), requested=pod.requested)


def compare_plan(member: UnitMember, place: ReplicaPlace, others: ExternalUsageTracker) -> PlanAgreement:
    """Which of the two is right for a pod that stands on its place's node; what agrees is noted."""
    plan = member.sight.plan
    if not place.devices or place.profile or plan is None or not plan.devices or plan.node_name != place.node_name:
        return PlanAgreement.SAME
    own = _planned_devices(member, place.node_name)
    if own and set(place.devices).issuperset(own):
        member.agreed = tuple(sorted(own))
        return PlanAgreement.SAME
    named = others.planned.planned_devices_of(member.uid)
    if named and named != member.agreed:
        return PlanAgreement.PLACE_IS_OLD
    return PlanAgreement.PLAN_IS_OLD


def rewrite_plan(member: UnitMember, plan: PodPlan, place: ReplicaPlace, epoch: int) -> AnnotatePod:
    """The plan of a pod that stands, with the devices that the core holds for it."""
    member.is_noting = True
    text = format_plan(plan._replace(devices=member.devices_of(place)))
    version = member.sight.pod.resource_version
    return AnnotatePod(member.uid, member.sight.key, version, epoch, {ANNOTATION_PLAN: text})


def fence_pod(member: UnitMember, epoch: int) -> AnnotatePod:
    """A change of a pod that waits, after which nothing can be written against the version that it had before."""
    member.is_noting = True
    version = member.sight.pod.resource_version
    return AnnotatePod(member.uid, member.sight.key, version, epoch, {ANNOTATION_FENCE: f"{epoch}/{version}"})


def _planned_devices(member: UnitMember, node_name: str) -> tuple[int, ...]:
    """The devices of a pod's plan, if they can be those that it holds on a node: no more than it asks for."""
    plan, count = member.sight.plan, member.sight.pod.requested.count(RESOURCE_GPU)
    if plan is None or plan.profile or plan.node_name != node_name:
        return ()
    devices = plan.devices[:count]
    is_whole = len(devices) == len(set(devices)) == count and all(0 <= one < GPUS_PER_NODE_MOST for one in devices)
    return devices if is_whole else ()
