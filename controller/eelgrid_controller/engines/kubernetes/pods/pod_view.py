"""Classifies a pod for the gate: whether it is the gate's, and the unit that it belongs to.

A pod is the gate's if our scheduling gate holds it or it carries a plan that was written for it. A gated pod whose
intent cannot be read is a unit of its own, so that its users are notified.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eelgrid_controller.engines.kubernetes.model.inference_service import (
    SERVICE_UNIT_PREFIX,
    ServiceIndex,
    replica_spec,
)
from eelgrid_controller.engines.kubernetes.model.objects import Pod, is_claimant
from eelgrid_controller.engines.kubernetes.model.owners import IntentRefusal, ObjectRef, OwnerTemplates
from eelgrid_controller.engines.kubernetes.model.quantities import non_gpu_devices
from eelgrid_controller.engines.kubernetes.model.selectors import parse_constraint
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN
from eelgrid_controller.engines.kubernetes.pods.gate_events import GatePodView
from eelgrid_controller.engines.kubernetes.pods.intent import WorkloadIntent, parse_intent
from eelgrid_controller.engines.kubernetes.pods.mig_slices import SLICE_UNIT_PREFIX, parse_slice_intent, requests_slices
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import (
    CLAIM_WORKLOAD_PREFIX,
    pinned_node,
    plan_for_pod,
    unit_name,
    unit_of,
    unpin_spec,
)


def view_pod(
    pod: Pod,
    found: Mapping[str, Any],
    holders: OwnerTemplates,
    services: ServiceIndex | None = None,
    *,
    recalls: bool = False,
    leaves_slices: bool = False,
    leaves_claims: bool = False,
) -> tuple[GatePodView, ObjectRef | None]:
    """What the gate makes of a pod, and the object that has to be looked up first; `found` is the pod's JSON.

    `recalls` reads again what the people of a pod want that is not gated any more. Where it `leaves_slices`, pods that
    ask for them are placed by somebody else, and are others to it. With `leaves_claims`, so are those
    that get their devices by claims: mode dra places them.
    """
    plan = plan_for_pod(pod.uid, pod.annotations.get(ANNOTATION_PLAN, ""))
    service = None if services is None or pod.is_terminal else services.service_of_pod(pod)
    if service is not None:
        pinned = pinned_node(found) if plan is not None else ""
        # Our own pin is no demand of its people: pods are alike before it and after it.
        bare = (
            parse_constraint(unpin_spec(found["spec"], pinned), non_gpu_devices(pod.requested))
            if pinned
            else pod.constraint
        )
        intent = parse_intent(replace(pod, constraint=bare), holders)
        if isinstance(intent, WorkloadIntent) and intent.size == 1:
            # Whether it came through our gate or not: all pods of its target are replicas of the service.
            return GatePodView(
                pod,
                service.unit_name,
                1,
                replica_spec(service, intent.spec),
                waits_for=intent.waits_for,
                pinned=pinned,
                plan=plan,
            ), None
    if not pod.is_gated and plan is None:
        return GatePodView(pod), None
    if plan is not None and plan.workload.startswith(CLAIM_WORKLOAD_PREFIX) and not pod.is_gated:
        # Its claim holds it there.
        return GatePodView(pod, pinned=plan.node_name), None
    if leaves_claims and is_claimant(pod):
        return GatePodView(pod), None
    pinned = pinned_node(found)
    if plan is not None and plan.workload.startswith(SLICE_UNIT_PREFIX):
        return GatePodView(pod, pinned=pinned), None
    if leaves_slices and pod.is_gated and requests_slices(pod):
        needed = parse_slice_intent(pod, holders)
        return GatePodView(pod, pinned=pinned), needed.needs if isinstance(needed, IntentRefusal) else None
    if plan is not None and not pod.is_gated:
        # What its people want was read when it waited; how many its gang is, others of it say.
        unit = unit_of(plan.workload)
        if unit.startswith(SERVICE_UNIT_PREFIX):
            unit = f"pod-{pod.uid}"  # its service is no more
        sight = GatePodView(pod, unit, 1 if unit.startswith("pod-") else 2, pinned=pinned, plan=plan)
        return _with_intent(sight, pod, holders) if recalls else (sight, None)
    intent = parse_intent(pod, holders)
    if isinstance(intent, WorkloadIntent):
        unit = unit_name(intent.unit)
        spec = intent.spec if pod.is_gated else None
        sight = GatePodView(
            pod, unit, intent.size, spec, waits_for=intent.waits_for, profile=intent.profile, pinned=pinned, plan=plan
        )
        return sight, None
    unit = f"pod-{pod.uid}"
    return GatePodView(
        pod, unit, refused=str(intent), is_released=intent.is_released, pinned=pinned, plan=plan
    ), intent.needs


def _with_intent(sight: GatePodView, pod: Pod, holders: OwnerTemplates) -> tuple[GatePodView, ObjectRef | None]:
    intent = parse_intent(pod, holders)
    if isinstance(intent, WorkloadIntent):
        return sight._replace(size=intent.size, spec=intent.spec), None
    return sight, intent.needs
