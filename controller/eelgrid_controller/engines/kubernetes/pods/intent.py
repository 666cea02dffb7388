"""What the people of a managed pod want: its workload spec, or a refusal with the remedy; and whose the pod is.

The spec comes from containers, annotations and owners. Only the kind is inferred, and from the owner alone: Deployments
serve, Kubeflow jobs train, what completes is batch.

A pod is the gate's if our scheduling gate holds it, if it names our scheduler, or if it carries a plan that was written
for it. A waiting pod whose intent cannot be read is a unit of its own, so that its users are notified.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eelgrid_controller.engines.kubernetes.model import annotations, well_known
from eelgrid_controller.engines.kubernetes.model.inference_service import ServiceIndex, replica_spec
from eelgrid_controller.engines.kubernetes.model.node_affinity import trait_name
from eelgrid_controller.engines.kubernetes.model.objects import Pod, is_claimant
from eelgrid_controller.engines.kubernetes.model.pod_group import (
    KUBEFLOW_REPLICA_FIELDS,
    GangMembership,
    IntentRefusal,
    ObjectRef,
    OwnerTemplates,
    membership_of,
    unit_name,
    unit_of,
)
from eelgrid_controller.engines.kubernetes.model.quantities import AnnotationUnreadable, non_gpu_devices
from eelgrid_controller.engines.kubernetes.model.queue_labels import NO_QUEUE_LABELS, QueueLabels
from eelgrid_controller.engines.kubernetes.model.selectors import NO_RELATIONS, parse_constraint
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN, RESOURCE_GPU, RESOURCE_MIG_PREFIX
from eelgrid_controller.engines.kubernetes.pods.gate_events import GatePodView
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import (
    CLAIM_WORKLOAD_PREFIX,
    PodPlan,
    pinned_node,
    plan_for_pod,
    reserved_uid,
    unpin_spec,
)
from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.messages import (
    Locality,
    MetricsSource,
    Mobility,
    ResourceRequest,
    ServicePromise,
    TrainingPromise,
    WorkloadKind,
    WorkloadSpec,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE
from eelgrid_protos.schema import check_message

MAX_PRIORITY = 1_000_000
_SERVING = frozenset({"Deployment", "LeaderWorkerSet", "StatefulSet"})
_TRAINING = frozenset({*KUBEFLOW_REPLICA_FIELDS, "TrainJob"})
# Whoever controls a pod of these makes it anew after an eviction.
_REQUEUING = frozenset({*KUBEFLOW_REPLICA_FIELDS, "Job", "ReplicaSet", "ReplicationController", "StatefulSet"})
_POD_IP = "{pod_ip}"
# Where a field of the spec comes from; the longest beginning counts.
_FIELDS = {
    "gpu_preference": well_known.ANNOTATION_PREFERRED_GPU_MODELS,
    "gpu_preference.worth_w": well_known.ANNOTATION_PREFERRED_GPU_WORTH,
    "model_data": well_known.ANNOTATION_MODEL_DATA,
    "model_data.worth_w": well_known.ANNOTATION_MODEL_DATA_WORTH,
    "priority": well_known.ANNOTATION_PRIORITY,
    "queue": well_known.KUEUE_QUEUE,
    "replicas": well_known.ANNOTATION_GROUP_SIZE,
    "request": "spec.containers.resources",
    "request.gpu_models": well_known.ANNOTATION_GPU_MODELS,
    "service": well_known.ANNOTATION_OBJECTIVE,
    "service.metrics": well_known.ANNOTATION_METRICS,
    "service.output_tokens": well_known.ANNOTATION_OUTPUT_TOKENS,
    "service.profile": well_known.ANNOTATION_PROFILE,
    "service.rate_hz": well_known.ANNOTATION_RATE,
    "training": well_known.ANNOTATION_SLOWDOWN,
    "training.deadline_ns": well_known.ANNOTATION_DEADLINE,
    "training.metrics": well_known.ANNOTATION_METRICS,
    "training.profile": well_known.ANNOTATION_PROFILE,
    "training.work": well_known.ANNOTATION_WORK,
    "training.work_unit": well_known.ANNOTATION_WORK_UNIT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadIntent:
    """What a pod's people want.

    `unit` is the workload's id and `spec` is of all its `size` replicas: pods of one unit have equal specs, or disagree.
    """

    unit: str
    size: int
    spec: WorkloadSpec
    waits_for: tuple[str, ...] = ()  # gates of others: ours stays after theirs


def parse_intent(
    pod: Pod, holders: OwnerTemplates, queues: QueueLabels = NO_QUEUE_LABELS
) -> WorkloadIntent | IntentRefusal:
    """The workload that the pod's users ask for, or why it cannot be placed."""
    is_released = False
    try:
        is_released = annotations.schedules_on_error(pod.annotations)
        annotations.check_names(pod.annotations)
        found = _intent(pod, holders, queues)
    except AnnotationUnreadable as error:
        found = IntentRefusal(error.field, error.fault, error.remedy)
    if isinstance(found, IntentRefusal) and found.needs is None and is_released and not pod.is_bound_by_us:
        return found._replace(is_released=True)
    return found


def _intent(pod: Pod, holders: OwnerTemplates, queues: QueueLabels) -> WorkloadIntent | IntentRefusal:
    if pod.is_bound_by_us and not pod.node_name and (unbindable := _refuse_binding(pod)) is not None:
        return unbindable
    said = annotations.parse_kind(pod.annotations)
    member = membership_of(pod, holders, is_training=said is WorkloadKind.TRAINING_JOB)
    if isinstance(member, IntentRefusal):
        return member
    queue, request = queues.find_queue(pod, holders), _request(pod)
    for part in (queue, request):
        if isinstance(part, IntentRefusal):
            return part
    assert not isinstance(queue, IntentRefusal)
    assert not isinstance(request, IntentRefusal)
    kind = said or _kind(member)
    source = annotations.parse_metrics_source(pod.annotations)
    # The contract knows {node} and {replica}; an address is filled in once there is one.
    is_later = source is not None and _POD_IP in source.url
    kept = None if is_later else source
    service, training = _service(pod, kind, member.size, kept), _training(pod, kind, kept)
    for promise in (service, training):
        if isinstance(promise, IntentRefusal):
            return promise
    assert not isinstance(service, IntentRefusal)
    assert not isinstance(training, IntentRefusal)
    grace_s = annotations.parse_duration_s(pod.annotations, well_known.ANNOTATION_CHECKPOINT_GRACE)
    asked = annotations.parse_priority(pod.annotations)
    spec = WorkloadSpec(
        name=member.owner_name if member.size > 1 and member.owner_name else pod.name,
        request=request,
        kind=kind,
        replicas=member.size,
        namespace=pod.namespace,
        queue=queue,
        user=annotations.user_of(pod.annotations, pod.labels),
        priority=max(-MAX_PRIORITY, min(pod.priority, MAX_PRIORITY)) if asked is None else asked,
        locality=Locality.PACK if member.size > 1 else Locality.UNSPECIFIED,
        # Whoever moves places knows nothing of other pods and of volumes.
        mobility=_mobility(member, grace_s) if pod.relations == NO_RELATIONS else Mobility.FIXED,
        service=service,
        training=training,
        required_traits=(trait_name(pod.constraint),),
        never_preempts=pod.never_preempts,
        evicted_by_engine=_is_requeued(pod),
        gpu_preference=annotations.parse_gpu_preference(pod.annotations),
        model_data=annotations.parse_model_data(pod.annotations),
    )
    try:
        check_message(spec)
    except InvalidMessage as error:
        return _refuse_intent(error.violations[0])
    try:
        if source is not None:
            check_message(replace(source, url=source.url.replace(_POD_IP, "192.0.2.1")))
    except InvalidMessage as error:
        broken = error.violations[0]
        return IntentRefusal(well_known.ANNOTATION_METRICS, f"{broken.field} {broken.problem}", broken.remedy)
    return WorkloadIntent(
        unit=member.unit,
        size=member.size,
        spec=_with_owner_label(spec, member),
        waits_for=tuple(gate for gate in pod.gates if gate != well_known.GATE),
    )


def _refuse_binding(pod: Pod) -> IntentRefusal | None:
    """Why a pod that names our scheduler cannot be bound by it."""
    remedy = "leave schedulerName out, and Eelgrid plans the pod by its gate, and kube-scheduler binds it"
    if pod.is_gated:
        return IntentRefusal("spec.schedulerName", f"names Eelgrid beside its gate {well_known.GATE}", remedy)
    if pod.unsupported:
        fault = f"names Eelgrid, which cannot judge {pod.unsupported}"
        return IntentRefusal("spec.schedulerName", fault, remedy)
    if pod.group:
        return IntentRefusal("spec.schedulerName", "names Eelgrid, which does not bind PodGroups", remedy)
    return None


def _with_owner_label(spec: WorkloadSpec, member: GangMembership) -> WorkloadSpec:
    # After the check, which is slow over labels: these are ours, of names that the API server has checked.
    return (
        replace(spec, labels={"owner": f"{member.owner_kind}/{member.owner_name}"[:253]}) if member.owner_kind else spec
    )


def _request(pod: Pod) -> ResourceRequest | IntentRefusal:
    for name, _ in pod.requested.extended:
        if name.startswith(well_known.RESOURCE_MIG_PREFIX):
            return IntentRefusal(
                f"resources[{name}]",
                "requests a MIG slice, and this mode places whole GPUs",
                f"start the controller with --kubernetes-abilities slices, or ask for {well_known.RESOURCE_GPU}: 1",
            )
        if name == well_known.RESOURCE_GPU_SHARED:
            return IntentRefusal(
                f"resources[{name}]",
                "is a share of a GPU, and whole GPUs are placed",
                f"ask for {well_known.RESOURCE_GPU}",
            )
    gpus = sum(pod.requested.count(name) for name in well_known.RESOURCES_GPU)
    if pod.claims and not gpus:
        return IntentRefusal(
            f"spec.resourceClaims[{pod.claims[0].name}]",
            "requests devices by claim, and this mode reads resource requests",
            f"run mode dra on its nodes, or ask for {well_known.RESOURCE_GPU}",
        )
    return ResourceRequest(
        cpu_milli=pod.requested.cpu_milli,
        memory_bytes=pod.requested.memory_bytes,
        gpu_count=gpus,
        gpu_milli=GPU_MILLI_WHOLE if gpus else 0,
        gpu_models=annotations.parse_gpu_models(pod.annotations),
    )


def _kind(member: GangMembership) -> WorkloadKind:
    if member.owner_kind in _SERVING:
        return WorkloadKind.INFERENCE_SERVICE
    return WorkloadKind.TRAINING_JOB if member.owner_kind in _TRAINING else WorkloadKind.BATCH_JOB


def _mobility(member: GangMembership, grace_s: float | None) -> Mobility:
    """How the owner lets a pod go: a Deployment makes another before, a StatefulSet after, a job only if it saves."""
    if member.size == 1 and member.owner_kind == "Deployment":
        return Mobility.MOVABLE
    is_restarted = member.owner_kind in _SERVING or (member.owner_kind != "" and grace_s is not None)
    return Mobility.RESTARTABLE if is_restarted else Mobility.FIXED


def _is_requeued(pod: Pod) -> bool:
    """Whether a pod comes back after an eviction; one without a controller never does, whatever its people say."""
    said = annotations.parse_preemptible(pod.annotations)
    if pod.owner is None:
        return False
    return pod.owner.kind in _REQUEUING if said is None else said


def _service(
    pod: Pod, kind: WorkloadKind, size: int, source: MetricsSource | None
) -> ServicePromise | IntentRefusal | None:
    wanted = annotations.parse_objectives(pod.annotations)
    rate_hz = annotations.parse_rate_hz(pod.annotations)
    tokens = annotations.parse_number(pod.annotations, well_known.ANNOTATION_OUTPUT_TOKENS)
    if not wanted:
        alone = [well_known.ANNOTATION_RATE] * (rate_hz is not None) + [well_known.ANNOTATION_OUTPUT_TOKENS] * (
            tokens is not None
        )
        if alone:
            example = f"write {well_known.ANNOTATION_OBJECTIVE}: p95 response 200ms, or leave it out"
            return IntentRefusal(alone[0], "has no effect without an objective", example)
        return None
    if kind is not WorkloadKind.INFERENCE_SERVICE:
        return IntentRefusal(
            well_known.ANNOTATION_OBJECTIVE,
            f"applies to inference services, and this is a {_words(kind)}",
            f"write {well_known.ANNOTATION_KIND}: inference-service, or leave it out",
        )
    profile = pod.annotations.get(well_known.ANNOTATION_PROFILE, "")
    if not profile:
        remedy = "name the profile that says how fast it is; `eelctl profile list` shows them"
        return IntentRefusal(well_known.ANNOTATION_PROFILE, "is missing beside an objective", remedy)
    return ServicePromise(
        profile=profile,
        objectives=wanted,
        rate_hz=rate_hz or 0.0,
        replicas_least=size,
        replicas_most=size,
        metrics=source,
        output_tokens=tokens or 0.0,
    )


def _training(pod: Pod, kind: WorkloadKind, source: MetricsSource | None) -> TrainingPromise | IntentRefusal | None:
    slowdown = annotations.parse_fraction(pod.annotations, well_known.ANNOTATION_SLOWDOWN)
    deadline_ns = annotations.parse_deadline_ns(pod.annotations, pod.created_s)
    work = annotations.parse_number(pod.annotations, well_known.ANNOTATION_WORK)
    given = [
        key
        for key, value in (
            (well_known.ANNOTATION_SLOWDOWN, slowdown),
            (well_known.ANNOTATION_DEADLINE, deadline_ns),
            (well_known.ANNOTATION_WORK, work),
        )
        if value is not None
    ]
    if not given:
        return None
    if kind is not WorkloadKind.TRAINING_JOB:
        return IntentRefusal(
            given[0],
            f"applies to training jobs, and this is a {_words(kind)}",
            f"write {well_known.ANNOTATION_KIND}: training-job, or leave it out",
        )
    if (deadline_ns is None) != (work is None):
        missing = well_known.ANNOTATION_WORK if work is None else well_known.ANNOTATION_DEADLINE
        return IntentRefusal(
            missing, f"is missing beside {given[-1]}", "a deadline needs the amount of work that is due by then"
        )
    return TrainingPromise(
        profile=pod.annotations.get(well_known.ANNOTATION_PROFILE, ""),
        slowdown_most=slowdown,
        deadline_ns=deadline_ns or 0,
        work=work or 0.0,
        work_unit=pod.annotations.get(well_known.ANNOTATION_WORK_UNIT, ""),
        metrics=source if source is not None and source.work_counter else None,
    )


def _words(kind: WorkloadKind) -> str:
    return kind.name.lower().replace("_", " ")


def _refuse_intent(broken: Violation) -> IntentRefusal:
    path = broken.field
    origin = max((field for field in _FIELDS if _begins(path, field)), key=len, default="")
    if not origin:
        return IntentRefusal(path or "metadata", broken.problem, broken.remedy)
    rest = path[len(origin) :].lstrip(".")
    return IntentRefusal(_FIELDS[origin], f"{rest} {broken.problem}" if rest else broken.problem, broken.remedy)


def _begins(path: str, field: str) -> bool:
    return path == field or path.startswith((f"{field}.", f"{field}["))


SLICE_UNIT_PREFIX = "slice-"


def requested_slices(pod: Pod) -> tuple[tuple[str, int], ...]:
    """How many slices by resource."""
    return tuple(pair for pair in pod.requested.extended if pair[0].startswith(RESOURCE_MIG_PREFIX))


def requests_slices(pod: Pod) -> bool:
    """Whether it asks for slices and for no whole GPU."""
    return bool(requested_slices(pod)) and len(requested_slices(pod)) == len(pod.requested.extended)


def parse_slice_intent(
    pod: Pod, holders: OwnerTemplates, queues: QueueLabels = NO_QUEUE_LABELS
) -> WorkloadIntent | IntentRefusal:
    """What its people want beside the slices, or why that cannot be had."""
    # To everything but the amounts, a pod with a slice is as one with a GPU.
    found = parse_intent(replace(pod, requested=pod.requested._replace(extended=((RESOURCE_GPU, 1),))), holders, queues)
    if isinstance(found, WorkloadIntent) and found.size > 1:
        return IntentRefusal(
            "resources",
            f"requests slices in a gang of {found.size}, and slices are placed pod by pod",
            "remove the gang, or request whole GPUs",
        )
    return found


def view_pod(
    pod: Pod,
    found: Mapping[str, Any],
    holders: OwnerTemplates,
    services: ServiceIndex | None = None,
    *,
    queues: QueueLabels = NO_QUEUE_LABELS,
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
        intent = parse_intent(replace(pod, constraint=bare), holders, queues)
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
    if not pod.awaits_placement and plan is None:
        return GatePodView(pod), None
    if plan is not None and plan.workload.startswith(CLAIM_WORKLOAD_PREFIX) and not pod.is_gated:
        # Its claim holds it there.
        return GatePodView(pod, pinned=plan.node_name), None
    if leaves_claims and is_claimant(pod) and not pod.is_bound_by_us:
        return GatePodView(pod), None
    pinned = pinned_node(found)
    if plan is not None and plan.workload.startswith(SLICE_UNIT_PREFIX):
        return GatePodView(pod, pinned=pinned), None
    if leaves_slices and pod.is_gated and requests_slices(pod):
        needed = parse_slice_intent(pod, holders, queues)
        return GatePodView(pod, pinned=pinned), needed.needs if isinstance(needed, IntentRefusal) else None
    if plan is not None and not pod.awaits_placement:
        # What its people want was read when it waited; how many its gang is, others of it say.
        unit = _planned_unit(pod, plan)
        sight = GatePodView(pod, unit, 1 if unit.startswith("pod-") else 2, pinned=pinned, plan=plan)
        return _recalled(sight, pod, holders, queues) if recalls else (sight, None)
    intent = parse_intent(pod, holders, queues)
    if isinstance(intent, WorkloadIntent):
        unit = _unit_of(pod, intent, plan)
        spec = intent.spec if pod.awaits_placement else None
        sight = GatePodView(pod, unit, intent.size, spec, waits_for=intent.waits_for, pinned=pinned, plan=plan)
        return sight, None
    unit = f"pod-{pod.uid}"
    return GatePodView(
        pod, unit, refused=str(intent), is_released=intent.is_released, pinned=pinned, plan=plan
    ), intent.needs


def _planned_unit(pod: Pod, plan: PodPlan) -> str:
    """The unit of a pod that stands by its plan, which anybody may have written: never one of another namespace.

    A gang is named after its namespace, or as other units are by the uid of an object, which only its own people know. A pod
    that came in another's stead has that one's unit. Where a service is no more, its pods stand alone.
    """
    unit = unit_of(plan.workload)
    is_known = unit.startswith(("pod-", f"gang-{pod.namespace}/")) or (unit.startswith("gang-") and "/" not in unit)
    return unit if is_known and unit == unit_name(unit) else f"pod-{pod.uid}"


def _unit_of(pod: Pod, intent: WorkloadIntent, plan: PodPlan | None) -> str:
    """The unit of a pod that waits; that of its plan where it was asked for at its admission and not answered in time."""
    is_alone = intent.unit == f"pod-{pod.uid}"
    asked = unit_of(plan.workload) if plan is not None and is_alone else ""
    return asked if reserved_uid(asked) else unit_name(intent.unit)


def _recalled(
    sight: GatePodView, pod: Pod, holders: OwnerTemplates, queues: QueueLabels
) -> tuple[GatePodView, ObjectRef | None]:
    intent = parse_intent(pod, holders, queues)
    if isinstance(intent, WorkloadIntent):
        return sight._replace(size=intent.size, spec=intent.spec), None
    return sight, intent.needs
