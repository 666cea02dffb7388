"""From a pod of the API to what the gate makes of it.

Owns which pods are the gate's, and the name of the unit that each is of. Must not know what
becomes of them.

A pod is the gate's if our gate holds it, or if it carries a plan of ours; the label that
opts in is read by the policy that puts the gate there. So a pod that came while that policy
was away is nobody's, and is scheduled as if Eelgrid were not there. A pod that is gated and
that nobody can read an intent from stays a unit of its own, so that its people hear of it.
"""

from collections.abc import Mapping
from typing import Any

from eelgrid_controller.kubernetes.gate_events import Sight
from eelgrid_controller.kubernetes.holders import Holders, Ref
from eelgrid_controller.kubernetes.intent import Intent, intent_of
from eelgrid_controller.kubernetes.names import ANNOTATION_PLAN
from eelgrid_controller.kubernetes.patches import pinned_node
from eelgrid_controller.kubernetes.plans import plan_of, unit_name, unit_of
from eelgrid_controller.kubernetes.views import Pod

__all__ = ["sight_of"]


def sight_of(pod: Pod, found: Mapping[str, Any], holders: Holders) -> tuple[Sight, Ref | None]:
    """What the gate makes of a pod, and the object that has to be looked up first; `found` is the pod's JSON."""
    plan = plan_of(pod.annotations.get(ANNOTATION_PLAN, ""))
    if not pod.is_gated and plan is None:
        return Sight(pod), None
    pinned = pinned_node(found)
    if plan is not None and not pod.is_gated:
        # What its people want was read when it waited; how many its gang is, others of it say.
        unit = unit_of(plan.workload)
        return Sight(pod, unit, 1 if unit.startswith("pod-") else 2, pinned=pinned, plan=plan), None
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
