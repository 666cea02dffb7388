"""What a pod's people want of Eelgrid: from the pod, its annotations and its owners to a workload's spec.

Owns the way from a managed pod to an intent, or to a refusal that names the field and the
remedy. Must not know gates, plans or places.

Theory. What a pod asks for stands in its containers; what it is promised, in annotations; who
goes with it, on its owners. Nothing is guessed but the kind, and that by the owner alone: what
a Deployment holds serves, what Kubeflow holds trains, what ends is a batch job. A promise is
to what is placed: one pod, or one gang. Deployments scale their pods themselves, so a promise
of one pod has one replica at least and at most.
"""

from dataclasses import dataclass, replace

from eelgrid_controller.kubernetes import annotations, names
from eelgrid_controller.kubernetes.constraints import trait
from eelgrid_controller.kubernetes.errors import AnnotationUnreadable
from eelgrid_controller.kubernetes.holders import KUBEFLOW, Holders
from eelgrid_controller.kubernetes.owners import Membership, Refused, membership_of
from eelgrid_controller.kubernetes.selectors import UNRELATED
from eelgrid_controller.kubernetes.views import Pod
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
from eelgrid_protos.schema import check

__all__ = ["Intent", "Refused", "intent_of", "metrics_at"]

PRIORITY_MOST = 1_000_000
_SERVING = frozenset({"Deployment", "LeaderWorkerSet", "StatefulSet"})
_TRAINING = frozenset({*KUBEFLOW, "TrainJob"})
_POD_IP = "{pod_ip}"
# Where a field of the spec comes from; the longest beginning counts.
_FIELDS = {
    "priority": names.ANNOTATION_PRIORITY,
    "queue": names.KUEUE_QUEUE,
    "replicas": names.ANNOTATION_GROUP_SIZE,
    "request": "spec.containers.resources",
    "request.gpu_models": names.ANNOTATION_GPU_MODELS,
    "service": names.ANNOTATION_OBJECTIVE,
    "service.metrics": names.ANNOTATION_METRICS,
    "service.output_tokens": names.ANNOTATION_OUTPUT_TOKENS,
    "service.profile": names.ANNOTATION_PROFILE,
    "service.rate_hz": names.ANNOTATION_RATE,
    "training": names.ANNOTATION_SLOWDOWN,
    "training.deadline_ns": names.ANNOTATION_DEADLINE,
    "training.metrics": names.ANNOTATION_METRICS,
    "training.profile": names.ANNOTATION_PROFILE,
    "training.work": names.ANNOTATION_WORK,
    "training.work_unit": names.ANNOTATION_WORK_UNIT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What a pod's people want.

    `unit` is the workload's id and `spec` is of all its `size` replicas: pods of one unit have equal specs, or disagree.
    """

    unit: str
    size: int
    spec: WorkloadSpec
    traits: tuple[str, ...] = ()
    owner_kind: str = ""  # as people know it: Deployment, not ReplicaSet
    owner_name: str = ""
    part: str = ""  # of its gang: master, worker, leader, a replicated job
    rank: int | None = None  # among its like, where labels say so
    waits_for: tuple[str, ...] = ()  # gates of others: ours stays after theirs
    metrics: MetricsSource | None = None  # with {pod_ip} in its URL until the pod has an address
    profile: str = ""
    unjudged: tuple[str, ...] = ()  # rules that kube-scheduler alone looks at


def intent_of(pod: Pod, holders: Holders) -> Intent | Refused:
    """What the pod's people want, or why that cannot be kept."""
    is_released = False
    try:
        is_released = annotations.on_error(pod.annotations)
        annotations.check_names(pod.annotations)
        found = _intent(pod, holders)
    except AnnotationUnreadable as error:
        found = Refused(error.field, error.fault, error.remedy)
    if isinstance(found, Refused) and found.needs is None and is_released:
        return found._replace(is_released=True)
    return found


def metrics_at(source: MetricsSource, pod_ip: str) -> MetricsSource:
    """The source with the pod's address put in; IPv6 addresses in brackets."""
    address = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
    return replace(source, url=source.url.replace(_POD_IP, address))


def _intent(pod: Pod, holders: Holders) -> Intent | Refused:
    said = annotations.kind(pod.annotations)
    member = membership_of(pod, holders, is_training=said is WorkloadKind.TRAINING_JOB)
    if isinstance(member, Refused):
        return member
    request = _request(pod)
    if isinstance(request, Refused):
        return request
    kind = said or _kind(member)
    source = annotations.metrics(pod.annotations)
    # The contract knows {node} and {replica}; an address is filled in once there is one.
    is_later = source is not None and _POD_IP in source.url
    kept = None if is_later else source
    service, training = _service(pod, kind, member.size, kept), _training(pod, kind, kept)
    for promise in (service, training):
        if isinstance(promise, Refused):
            return promise
    assert not isinstance(service, Refused)
    assert not isinstance(training, Refused)
    grace_s = annotations.duration_s(pod.annotations, names.ANNOTATION_CHECKPOINT_GRACE)
    asked = annotations.priority(pod.annotations)
    traits = (trait(pod.constraint),)
    spec = WorkloadSpec(
        name=member.owner_name if member.size > 1 and member.owner_name else pod.name,
        request=request,
        kind=kind,
        replicas=member.size,
        namespace=pod.namespace,
        queue=pod.labels.get(names.KUEUE_QUEUE) or pod.labels.get(names.KUEUE_LOCAL_QUEUE, ""),
        user=annotations.user_of(pod.annotations, pod.labels),
        priority=max(-PRIORITY_MOST, min(pod.priority, PRIORITY_MOST)) if asked is None else asked,
        locality=Locality.PACK if member.size > 1 else Locality.UNSPECIFIED,
        # Whoever moves places knows nothing of other pods and of volumes.
        mobility=_mobility(member, grace_s) if pod.relations == UNRELATED else Mobility.FIXED,
        service=service,
        training=training,
        required_traits=traits,
    )
    try:
        check(spec)
    except InvalidMessage as error:
        return _refused(error.violations[0])
    try:
        if source is not None:
            check(metrics_at(source, "192.0.2.1"))
    except InvalidMessage as error:
        broken = error.violations[0]
        return Refused(names.ANNOTATION_METRICS, f"{broken.field} {broken.problem}", broken.remedy)
    return Intent(
        unit=member.unit,
        size=member.size,
        spec=_labelled(spec, member),
        traits=traits,
        owner_kind=member.owner_kind,
        owner_name=member.owner_name,
        part=member.part,
        rank=member.rank,
        waits_for=tuple(gate for gate in pod.gates if gate != names.GATE),
        metrics=source,
        profile=pod.annotations.get(names.ANNOTATION_PROFILE, ""),
        unjudged=pod.unjudged,
    )


def _labelled(spec: WorkloadSpec, member: Membership) -> WorkloadSpec:
    # After the check, which is slow over labels: these are ours, of names that the API server has checked.
    return (
        replace(spec, labels={"owner": f"{member.owner_kind}/{member.owner_name}"[:253]}) if member.owner_kind else spec
    )


def _request(pod: Pod) -> ResourceRequest | Refused:
    for name, _ in pod.requested.extended:
        if name.startswith(names.RESOURCE_MIG_PREFIX):
            return Refused(
                f"resources[{name}]",
                "names a MIG slice, and this mode places whole GPUs",
                f"start the controller with --kubernetes-abilities slices, or ask for {names.RESOURCE_GPU}: 1",
            )
        if name == names.RESOURCE_GPU_SHARED:
            return Refused(
                f"resources[{name}]", "is a ticket to a GPU that others share", f"ask for {names.RESOURCE_GPU}"
            )
    gpus = sum(pod.requested.count(name) for name in names.RESOURCES_GPU)
    if pod.claims and not gpus:
        return Refused(
            f"spec.resourceClaims[{pod.claims[0].name}]",
            "asks for devices by claim, and this mode reads requests",
            f"run mode dra on its nodes, or ask for {names.RESOURCE_GPU}",
        )
    return ResourceRequest(
        cpu_milli=pod.requested.cpu_milli,
        memory_bytes=pod.requested.memory_bytes,
        gpu_count=gpus,
        gpu_milli=GPU_MILLI_WHOLE if gpus else 0,
        gpu_models=annotations.gpu_models(pod.annotations),
    )


def _kind(member: Membership) -> WorkloadKind:
    if member.owner_kind in _SERVING:
        return WorkloadKind.INFERENCE_SERVICE
    return WorkloadKind.TRAINING_JOB if member.owner_kind in _TRAINING else WorkloadKind.BATCH_JOB


def _mobility(member: Membership, grace_s: float | None) -> Mobility:
    """How the owner lets a pod go: a Deployment makes another before, a StatefulSet after, a job only if it saves."""
    if member.size == 1 and member.owner_kind == "Deployment":
        return Mobility.MOVABLE
    is_restarted = member.owner_kind in _SERVING or (member.owner_kind != "" and grace_s is not None)
    return Mobility.RESTARTABLE if is_restarted else Mobility.FIXED


def _service(pod: Pod, kind: WorkloadKind, size: int, source: MetricsSource | None) -> ServicePromise | Refused | None:
    wanted = annotations.objectives(pod.annotations)
    rate_hz = annotations.rate_hz(pod.annotations)
    tokens = annotations.number(pod.annotations, names.ANNOTATION_OUTPUT_TOKENS)
    if not wanted:
        alone = [names.ANNOTATION_RATE] * (rate_hz is not None) + [names.ANNOTATION_OUTPUT_TOKENS] * (
            tokens is not None
        )
        if alone:
            example = f"write {names.ANNOTATION_OBJECTIVE}: p95 response 200ms, or leave it out"
            return Refused(alone[0], "says nothing without an objective", example)
        return None
    if kind is not WorkloadKind.INFERENCE_SERVICE:
        return Refused(
            names.ANNOTATION_OBJECTIVE,
            f"is a promise to services, and this is a {_words(kind)}",
            f"write {names.ANNOTATION_KIND}: inference-service, or leave it out",
        )
    profile = pod.annotations.get(names.ANNOTATION_PROFILE, "")
    if not profile:
        remedy = "name the profile that says how fast it is; `eelctl profile list` shows them"
        return Refused(names.ANNOTATION_PROFILE, "is missing beside an objective", remedy)
    return ServicePromise(
        profile=profile,
        objectives=wanted,
        rate_hz=rate_hz or 0.0,
        replicas_least=size,
        replicas_most=size,
        metrics=source,
        output_tokens=tokens or 0.0,
    )


def _training(pod: Pod, kind: WorkloadKind, source: MetricsSource | None) -> TrainingPromise | Refused | None:
    slowdown = annotations.fraction(pod.annotations, names.ANNOTATION_SLOWDOWN)
    deadline_ns = annotations.deadline_ns(pod.annotations, pod.created_s)
    work = annotations.number(pod.annotations, names.ANNOTATION_WORK)
    given = [
        key
        for key, value in (
            (names.ANNOTATION_SLOWDOWN, slowdown),
            (names.ANNOTATION_DEADLINE, deadline_ns),
            (names.ANNOTATION_WORK, work),
        )
        if value is not None
    ]
    if not given:
        return None
    if kind is not WorkloadKind.TRAINING_JOB:
        return Refused(
            given[0],
            f"is a promise to training jobs, and this is a {_words(kind)}",
            f"write {names.ANNOTATION_KIND}: training-job, or leave it out",
        )
    if (deadline_ns is None) != (work is None):
        missing = names.ANNOTATION_WORK if work is None else names.ANNOTATION_DEADLINE
        return Refused(missing, f"is missing beside {given[-1]}", "a deadline is kept by the work there is until then")
    return TrainingPromise(
        profile=pod.annotations.get(names.ANNOTATION_PROFILE, ""),
        slowdown_most=slowdown,
        deadline_ns=deadline_ns or 0,
        work=work or 0.0,
        work_unit=pod.annotations.get(names.ANNOTATION_WORK_UNIT, ""),
        metrics=source if source is not None and source.work_counter else None,
    )


def _words(kind: WorkloadKind) -> str:
    return kind.name.lower().replace("_", " ")


def _refused(broken: Violation) -> Refused:
    path = broken.field
    origin = max((field for field in _FIELDS if _begins(path, field)), key=len, default="")
    if not origin:
        return Refused(path or "metadata", broken.problem, broken.remedy)
    rest = path[len(origin) :].lstrip(".")
    return Refused(_FIELDS[origin], f"{rest} {broken.problem}" if rest else broken.problem, broken.remedy)


def _begins(path: str, field: str) -> bool:
    return path == field or path.startswith((f"{field}.", f"{field}["))
