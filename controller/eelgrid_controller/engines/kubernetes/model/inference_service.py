"""InferenceService objects: parsing, validation, and the index by scale target.

All pods of a target are replicas of one workload, `service-<uid>`. Of two services with one target the older has it.

Source: deploy/helm/eelgrid/files/crds/inferenceservices.yaml.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model import annotations, well_known
from eelgrid_controller.engines.kubernetes.model.objects import OwnerReference, Pod
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, parse_nanos
from eelgrid_protos.errors import InvalidMessage
from eelgrid_protos.messages import (
    LatencyMetric,
    LatencyObjective,
    LoadMetric,
    LoadTarget,
    MetricsServer,
    MetricsSource,
    Mobility,
    ServicePromise,
    WorkloadKind,
    WorkloadSpec,
)
from eelgrid_protos.schema import check_message

SERVICE_UNIT_PREFIX = "service-"
MAX_SERVICE_REPLICAS = 10_000
WHOLE_GPU = "Whole"
# As objects spell them.
LATENCY_METRICS = {
    "Response": LatencyMetric.RESPONSE,
    "FirstToken": LatencyMetric.FIRST_TOKEN,
    "InterToken": LatencyMetric.INTER_TOKEN,
}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m)")
LOAD_METRICS = {
    "Requests": LoadMetric.REQUESTS,
    "Tokens": LoadMetric.TOKENS,
    "InFlight": LoadMetric.IN_FLIGHT,
}
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0}


class ServiceMode(StrEnum):
    """Whether anything is changed on account of a service."""

    RECOMMEND = "Recommend"
    ENFORCE = "Enforce"


class ScaleTarget(NamedTuple):
    """The scale target of a service, in the service's namespace."""

    namespace: str
    kind: str  # Deployment or StatefulSet
    name: str

    def __str__(self) -> str:
        """`namespace/name`."""
        return f"{self.kind} {self.name}"


class ServiceMetricsPages(NamedTuple):
    """Where each pod tells its own metrics."""

    scheme: str
    port: int
    path: str


class ServiceRejection(NamedTuple):
    """Why an InferenceService is not obeyed: a reason for its condition, the field, what is wrong, what to do."""

    reason: str
    field: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        """The rejection in one sentence."""
        return f"{self.field}: {self.problem}; {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService:
    """An InferenceService object, parsed.

    `wanted` and `surge` are of its target: replicas that it asks for (None while there is no target), and how many may
    come beside them while it is rolled over.
    """

    uid: str
    namespace: str
    name: str
    generation: int
    target: ScaleTarget
    promise: ServicePromise
    mode: ServiceMode = ServiceMode.RECOMMEND
    least: int = 1
    most: int = 16
    gpu_models: tuple[str, ...] = ()
    pages: ServiceMetricsPages | None = None
    created: str = ""
    wanted: int | None = None
    surge: int = 0

    @property
    def unit_name(self) -> str:
        """The name of its unit."""
        return f"{SERVICE_UNIT_PREFIX}{self.uid}"

    @property
    def max_places(self) -> int:
        """How many pods may have a place: in mode Recommend as many as others want."""
        return self.most + self.surge if self.mode is ServiceMode.ENFORCE else MAX_SERVICE_REPLICAS

    @property
    def matching_key(self) -> tuple[object, ...]:
        """What a pod is judged by: as long as it is the same, no pod need be looked at again."""
        return (self.uid, self.target, self.promise, self.gpu_models)


def parse_service(found: Mapping[str, Any]) -> InferenceService | ServiceRejection:
    """Parse an InferenceService; what its schema allows and Eelgrid cannot honour is a ServiceRejection."""
    metadata, spec = found["metadata"], found.get("spec") or {}
    mode, bounds = spec.get("mode") or ServiceMode.RECOMMEND, spec.get("replicas") or {}
    models: tuple[str, ...] = ()
    aim, slices = spec.get("targetRef") or {}, spec.get("slices") or {}
    allowed = slices.get("allowed") or ()
    if allowed and WHOLE_GPU not in allowed:
        return ServiceRejection(
            "SlicesNotServed",
            "spec.slices.allowed",
            "allows MIG slices alone, and this mode places whole GPUs",
            f"add {WHOLE_GPU}, or serve slices by mode device-plugin or dra",
        )
    try:
        if slices.get("gpuModels"):
            models = annotations.parse_gpu_models({well_known.ANNOTATION_GPU_MODELS: ",".join(slices["gpuModels"])})
        promise = _promise(found, spec)
        check_message(promise)
        service = InferenceService(
            uid=str(metadata["uid"]),
            namespace=str(metadata["namespace"]),
            name=str(metadata["name"]),
            generation=int(metadata.get("generation") or 0),
            target=ScaleTarget(str(metadata["namespace"]), str(aim["kind"]), str(aim["name"])),
            promise=promise,
            mode=ServiceMode(mode),
            least=int(bounds.get("least") or 1),
            most=int(bounds.get("most") or 16),
            gpu_models=models,
            pages=_pages(spec.get("metrics")),
            created=str(metadata.get("creationTimestamp") or ""),
        )
    except InvalidMessage as error:
        broken = error.violations[0]
        return ServiceRejection("PromiseNotKept", _field(broken.field), broken.problem, broken.remedy)
    except KubernetesUnreadable as error:
        return ServiceRejection("Unreadable", error.field, error.fault, error.remedy)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        return ServiceRejection(
            "Unreadable", "spec", f"cannot be read ({error})", "compare it with the CRD that is installed"
        )
    if service.most < service.least:
        return ServiceRejection("Unreadable", "spec.replicas", "has less most than least", "give least <= most")
    return service


def _promise(found: Mapping[str, Any], spec: Mapping[str, Any]) -> ServicePromise:
    metadata = found["metadata"]
    objectives = tuple(
        LatencyObjective(
            metric=LATENCY_METRICS[one["metric"]],
            latency_s=_duration_s(str(one["atMost"])),
            quantile=int(one["percentile"]) / 100.0,
        )
        for one in spec.get("objectives") or ()
    )
    start_s = annotations.parse_duration_s(metadata.get("annotations") or {}, well_known.ANNOTATION_START)
    metrics = spec.get("metrics")
    rate, load = spec.get("requestsPerSecond"), spec.get("loadTarget")
    # Without a profile it is learned under a name of its own.
    own = "" if load else f"{metadata['namespace']}.{metadata['name']}"
    return ServicePromise(
        profile=str(spec.get("profile") or own),
        objectives=objectives,
        load_target=None
        if not load
        else LoadTarget(
            metric=LOAD_METRICS[load["metric"]],
            per_replica=parse_nanos(load["perReplica"], "spec.loadTarget.perReplica") / 1e9,
        ),
        rate_hz=0.0 if rate is None else parse_nanos(rate, "spec.requestsPerSecond") / 1e9,
        # The number is the target's and the steering's, not the core's.
        replicas_least=1,
        replicas_most=MAX_SERVICE_REPLICAS,
        start_s=60.0 if start_s is None else start_s,
        output_tokens=float(spec.get("outputTokens") or 0),
        metrics=None
        if not metrics
        else MetricsSource(
            server=MetricsServer[str(metrics["server"]).upper()],
            # Of each pod: addresses are told to the steering as pods come and go.
            url=f"{metrics.get('scheme') or 'http'}://{{replica}}.{metadata['name']}.{metadata['namespace']}"
            f":{metrics['port']}{metrics.get('path') or '/metrics'}",
            latency_histogram=str(metrics.get("latencyHistogram") or ""),
            waiting_gauge=str(metrics.get("waitingGauge") or ""),
        ),
    )


def _pages(metrics: Mapping[str, Any] | None) -> ServiceMetricsPages | None:
    if not metrics:
        return None
    return ServiceMetricsPages(metrics.get("scheme") or "http", int(metrics["port"]), metrics.get("path") or "/metrics")


def metrics_url(pages: ServiceMetricsPages, pod_ip: str) -> str:
    """Where a pod's metrics are; IPv6 addresses in brackets."""
    host = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
    return f"{pages.scheme}://{host}:{pages.port}{pages.path}"


def _duration_s(text: str) -> float:
    parts = _DURATION.findall(text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        raise KubernetesUnreadable("spec.objectives", f"holds {text[:40]!r}", "write such as 50ms or 1.5s")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _field(field: str) -> str:
    shown = {
        "objectives": "spec.objectives",
        "output_tokens": "spec.outputTokens",
        "rate_hz": "spec.requestsPerSecond",
        "load_target": "spec.loadTarget",
        "load_target.metric": "spec.loadTarget.metric",
        "load_target.per_replica": "spec.loadTarget.perReplica",
        "metrics.latency_histogram": "spec.metrics.latencyHistogram",
        "metrics.waiting_gauge": "spec.metrics.waitingGauge",
    }
    return shown.get(field.partition("[")[0], f"spec.{field}")


def replica_spec(service: InferenceService, spec: WorkloadSpec) -> WorkloadSpec:
    """The workload spec of one replica: the requests of a pod, and the objectives of the service."""
    request = replace(spec.request, gpu_models=service.gpu_models) if service.gpu_models else spec.request
    return replace(
        spec,
        name=service.name,
        request=request,
        kind=WorkloadKind.INFERENCE_SERVICE,
        replicas=1,
        mobility=Mobility.MOVABLE if service.target.kind == "Deployment" else Mobility.RESTARTABLE,
        service=service.promise,
        training=None,
        # The service's own bounds say how many there are.
        evicted_by_engine=False,
        labels={"owner": f"InferenceService/{service.name}"[:253]},
    )


def scale_target_of(namespace: str, owner: OwnerReference | None) -> ScaleTarget | None:
    """The Deployment or StatefulSet of a pod; a ReplicaSet is called after its Deployment and a hash."""
    if owner is None or owner.group != "apps":
        return None
    if owner.kind == "ReplicaSet":
        name = owner.name.rpartition("-")[0]
        return ScaleTarget(namespace, "Deployment", name) if name else None
    return ScaleTarget(namespace, owner.kind, owner.name) if owner.kind == "StatefulSet" else None


class ServiceIndex:
    """Index of services by their scale targets."""

    def __init__(self) -> None:
        self._by_target: dict[ScaleTarget, InferenceService] = {}
        self._rivals: dict[str, InferenceService] = {}

    @property
    def services(self) -> Iterable[InferenceService]:
        """Each service that has its target."""
        return self._by_target.values()

    def replace_services(self, found: Iterable[InferenceService]) -> frozenset[ScaleTarget]:
        """From now on these; the targets whose pods are to be judged again."""
        before = self._by_target
        self._by_target, self._rivals = {}, {}
        for service in sorted(found, key=lambda one: (one.created, one.uid)):
            if service.target in self._by_target:
                self._rivals[service.uid] = self._by_target[service.target]
            else:
                self._by_target[service.target] = service
        changed = before.keys() ^ self._by_target.keys()
        both = before.keys() & self._by_target.keys()
        return frozenset(
            changed | {one for one in both if before[one].matching_key != self._by_target[one].matching_key}
        )

    def find_rival(self, uid: str) -> InferenceService | None:
        """The older service that has the target of this one."""
        return self._rivals.get(uid)

    def service_of_pod(self, pod: Pod) -> InferenceService | None:
        """The service that a pod is a replica of."""
        target = scale_target_of(pod.namespace, pod.owner) if self._by_target else None
        return None if target is None else self._by_target.get(target)
