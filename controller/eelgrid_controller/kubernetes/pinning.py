"""Whether what the core decided for a pod may be written, and whether what is written is what the core holds.

Owns the comparison of the core's places with the API server's pods. Must not know events, or what
follows; looking.py and elastic.py do.

Theory. The core decides from what it was told, which may be late, or of another leader's time. The
pods are the truth: before a pod is pinned its place is held against what the plans of all other pods
name on that node and against how many GPUs the node has for them, and a place that collides is given
up. Where a pod stands and its plan names other devices than the core holds for it, one of the two
changed last. If the core and the plan agreed before and the plan is as it was, the core was corrected
(its node says what the pod holds), and the plan is written anew. Otherwise another leader wrote the
plan, and the core's place is given up and taken over from the plan. A plan that collides with one
that comes before it says nothing, and is written anew from the core's place.
"""

from enum import Enum, auto

from eelgrid_controller.kubernetes.gangs import Member
from eelgrid_controller.kubernetes.gate_events import Annotate, Place
from eelgrid_controller.kubernetes.names import ANNOTATION_FENCE, ANNOTATION_PLAN, RESOURCE_GPU
from eelgrid_controller.kubernetes.others import Others
from eelgrid_controller.kubernetes.planned_devices import PlannedPod
from eelgrid_controller.kubernetes.plans import Plan, plan_text

__all__ = ["Agreement", "Obstacle", "agreement", "fence", "obstacle", "planned_pod", "rewrite"]


class Obstacle(Enum):
    """What stands between a pod that waits and its place."""

    NONE = auto()
    WAITS = auto()  # a plan names its devices, and one of plan and core is about to follow the other
    TAKEN = auto()  # its devices, or all GPUs of the node, are others'


class Agreement(Enum):
    """What a standing pod's plan and the core's place say of each other."""

    SAME = auto()
    PLAN_IS_OLD = auto()  # the core's place is right
    PLACE_IS_OLD = auto()  # the plan is right


def obstacle(member: Member, place: Place, others: Others, *, beside: int = 0) -> Obstacle:
    """What the API server's pods say against pinning a pod to its place; `beside` GPUs go there in the same round."""
    count = member.sight.pod.requested.count(RESOURCE_GPU)
    if not count:
        return Obstacle.NONE
    rival = others.planned.rival(place.node_name, place.devices, member.uid)
    if rival is not None:
        return Obstacle.WAITS if rival.is_moving else Obstacle.TAKEN
    room = others.gpu_room(place.node_name, without=member.uid)
    return Obstacle.NONE if room >= count + beside else Obstacle.TAKEN


def planned_pod(member: Member, held: Place | None) -> PlannedPod | None:
    """What a pod holds, or may hold by what was sent; `held` is its place where the core counts it there."""
    pod, sent = member.sight.pod, member.sent
    node_name = member.target or (sent.node_name if sent is not None else "")
    count = pod.requested.count(RESOURCE_GPU)
    if not node_name or not count:
        return None
    devices, epoch = _named(member, node_name), 0 if member.sight.plan is None else member.sight.plan.epoch
    if not member.target and sent is not None:
        devices = member.devices_of(sent)
    known = held.devices if held is not None else ()
    is_held = bool(devices) and set(known).issuperset(devices)
    is_moving = bool(devices) and bool(known) and not is_held
    return PlannedPod(node_name, count, devices, epoch, is_held, is_moving)


def agreement(member: Member, place: Place, others: Others) -> Agreement:
    """Which of the two is right for a pod that stands on its place's node; what agrees is noted."""
    plan = member.sight.plan
    if not place.devices or place.profile or plan is None or not plan.devices or plan.node_name != place.node_name:
        return Agreement.SAME
    own = _named(member, place.node_name)
    if own and set(place.devices).issuperset(own):
        member.agreed = tuple(sorted(own))
        return Agreement.SAME
    named = others.planned.named(member.uid)
    if named and named != member.agreed:
        return Agreement.PLACE_IS_OLD
    return Agreement.PLAN_IS_OLD


def rewrite(member: Member, plan: Plan, place: Place, epoch: int) -> Annotate:
    """The plan of a pod that stands, with the devices that the core holds for it."""
    member.is_noting = True
    text = plan_text(plan._replace(devices=member.devices_of(place)))
    version = member.sight.pod.resource_version
    return Annotate(member.uid, member.sight.key, version, epoch, {ANNOTATION_PLAN: text})


def fence(member: Member, epoch: int) -> Annotate:
    """A change of a pod that waits, after which nothing can be written against the version that it had before."""
    member.is_noting = True
    version = member.sight.pod.resource_version
    return Annotate(member.uid, member.sight.key, version, epoch, {ANNOTATION_FENCE: f"{epoch}/{version}"})


def _named(member: Member, node_name: str) -> tuple[int, ...]:
    """The devices of a pod's plan, if they can be those that it holds on a node: no more than it asks for."""
    plan, count = member.sight.plan, member.sight.pod.requested.count(RESOURCE_GPU)
    if plan is None or plan.profile or plan.node_name != node_name:
        return ()
    devices = plan.devices[:count]
    is_whole = len(devices) == len(set(devices)) == count and min(devices, default=0) >= 0
    return devices if is_whole else ()
