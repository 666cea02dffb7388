"""From a pod of the API to what the gate makes of it.

Owns which pods are the gate's, and the name of the unit that each is of. Must not know what
becomes of them.

A pod is the gate's if our gate holds it, or if it carries a plan of ours that was written for it
(a plan of another pod, in YAML that was applied again, says nothing); the label that
opts in is read by the policy that puts the gate there. So a pod that came while that policy
was away is nobody's, and is scheduled as if Eelgrid were not there. A pod that is gated and
that nobody can read an intent from stays a unit of its own, so that its people hear of it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eelgrid_controller.kubernetes.amounts import uncounted
from eelgrid_controller.kubernetes.gate_events import Sight
from eelgrid_controller.kubernetes.holders import Holders, Ref
from eelgrid_controller.kubernetes.intent import Intent, Refused, intent_of
from eelgrid_controller.kubernetes.names import ANNOTATION_PLAN
from eelgrid_controller.kubernetes.patches import pinned_node, unpinned
from eelgrid_controller.kubernetes.plans import CLAIMED, plan_for, unit_name, unit_of
from eelgrid_controller.kubernetes.selectors import constraint_of
from eelgrid_controller.kubernetes.serving import UNIT_PREFIX, Services, spec_of
from eelgrid_controller.kubernetes.slice_pods import SLICE_UNIT, asks_for_slices, slice_intent
from eelgrid_controller.kubernetes.views import Pod, is_claimant

__all__ = ["sight_of"]


def sight_of(
    pod: Pod,
    found: Mapping[str, Any],
    holders: Holders,
    services: Services | None = None,
    *,
    recalls: bool = False,
    leaves_slices: bool = False,
    leaves_claims: bool = False,
) -> tuple[Sight, Ref | None]:
    """What the gate makes of a pod, and the object that has to be looked up first; `found` is the pod's JSON.

    `recalls` reads again what the people of a pod want that is not gated any more. Where it `leaves_slices`, pods that
    ask for them are placed by somebody else, and are others to it. With `leaves_claims`, so are those
    that get their devices by claims: mode dra places them.
    """
    plan = plan_for(pod.uid, pod.annotations.get(ANNOTATION_PLAN, ""))
    service = None if services is None or pod.is_terminal else services.of(pod)
    if service is not None:
        pinned = pinned_node(found) if plan is not None else ""
        # Our own pin is no demand of its people: pods are alike before it and after it.
        bare = constraint_of(unpinned(found["spec"], pinned), uncounted(pod.requested)) if pinned else pod.constraint
        intent = intent_of(replace(pod, constraint=bare), holders)
        if isinstance(intent, Intent) and intent.size == 1:
            # Whether it came through our gate or not: all pods of its target are replicas of the service.
            return Sight(
                pod,
                service.unit,
                1,
                spec_of(service, intent.spec),
                waits_for=intent.waits_for,
                pinned=pinned,
                plan=plan,
            ), None
    if not pod.is_gated and plan is None:
        return Sight(pod), None
    if plan is not None and plan.workload.startswith(CLAIMED) and not pod.is_gated:
        # Its claim holds it there.
        return Sight(pod, pinned=plan.node_name), None
    if leaves_claims and is_claimant(pod):
        return Sight(pod), None
    pinned = pinned_node(found)
    if plan is not None and plan.workload.startswith(SLICE_UNIT):
        return Sight(pod, pinned=pinned), None
    if leaves_slices and pod.is_gated and asks_for_slices(pod):
        needed = slice_intent(pod, holders)
        return Sight(pod, pinned=pinned), needed.needs if isinstance(needed, Refused) else None
    if plan is not None and not pod.is_gated:
        # What its people want was read when it waited; how many its gang is, others of it say.
        unit = unit_of(plan.workload)
        if unit.startswith(UNIT_PREFIX):
            unit = f"pod-{pod.uid}"  # its service is no more
        sight = Sight(pod, unit, 1 if unit.startswith("pod-") else 2, pinned=pinned, plan=plan)
        return _recalled(sight, pod, holders) if recalls else (sight, None)
    intent = intent_of(pod, holders)
    if isinstance(intent, Intent):
        unit = unit_name(intent.unit)
        spec = intent.spec if pod.is_gated else None
        sight = Sight(
            pod, unit, intent.size, spec, waits_for=intent.waits_for, profile=intent.profile, pinned=pinned, plan=plan
        )
        return sight, None
    unit = f"pod-{pod.uid}"
    return Sight(pod, unit, refused=str(intent), is_released=intent.is_released, pinned=pinned, plan=plan), intent.needs


def _recalled(sight: Sight, pod: Pod, holders: Holders) -> tuple[Sight, Ref | None]:
    intent = intent_of(pod, holders)
    if isinstance(intent, Intent):
        return sight._replace(size=intent.size, spec=intent.spec), None
    return sight, intent.needs
