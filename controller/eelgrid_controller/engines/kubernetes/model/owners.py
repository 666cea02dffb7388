"""Owners of pods: what the objects above a pod say of its pods, part by part.

Parts are the templates of a JobSet, a LeaderWorkerSet, a Kubeflow job or an Indexed Job: how many pods each has at
once, and what each asks for.

Sources: batch/v1 Job, JobSet v1alpha2, LeaderWorkerSet v1, Kubeflow training operator v1, scheduling.k8s.io PodGroup.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.objects import OwnerReference, controller_of
from eelgrid_controller.engines.kubernetes.model.quantities import ResourceAmounts, pod_requests
from eelgrid_controller.engines.kubernetes.model.selectors import NodeConstraint, parse_constraint

# Where each of Kubeflow's jobs keeps its replicas.
KUBEFLOW_REPLICA_FIELDS = {
    "JAXJob": "jaxReplicaSpecs",
    "MPIJob": "mpiReplicaSpecs",
    "PaddleJob": "paddleReplicaSpecs",
    "PyTorchJob": "pytorchReplicaSpecs",
    "TFJob": "tfReplicaSpecs",
    "XGBoostJob": "xgbReplicaSpecs",
}


class ObjectRef(NamedTuple):
    """Reference to an object, with what a lookup needs."""

    group: str
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class OwnerPart(NamedTuple):
    """Pods of one template: how many at once, and what each asks for."""

    name: str
    pods: int
    requested: ResourceAmounts
    constraint: NodeConstraint


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerTemplate:
    """An object above pods, and how many it holds at once; no parts where it says nothing of that."""

    ref: ObjectRef
    uid: str
    owner: OwnerReference | None = None
    parts: tuple[OwnerPart, ...] = ()
    is_staged: bool = False  # its parts start one after another
    least: int | None = None  # of a PodGroup with a gang policy


# What lookups found; None where there is no such object, or where it may not be read.
OwnerTemplates = Mapping[ObjectRef, OwnerTemplate | None]


def parse_owner_template(ref: ObjectRef, found: Mapping[str, Any]) -> OwnerTemplate:
    """Parse what an owner object says of its pods."""
    spec = found.get("spec") or {}
    read = _PARTS.get(ref.kind)
    if ref.kind in KUBEFLOW_REPLICA_FIELDS:
        read = _kubeflow_parts
    policy = (spec.get("schedulingPolicy") or {}).get("gang") or {}
    return OwnerTemplate(
        ref=ref,
        uid=str((found.get("metadata") or {}).get("uid") or ""),
        owner=controller_of(found),
        parts=tuple(part for part in read(spec) if part.pods > 0) if read else (),
        is_staged=_is_staged(ref.kind, spec),
        least=int(policy["minCount"]) if ref.kind == "PodGroup" and policy.get("minCount") else None,
    )


def _template(name: str, count: int, template: Mapping[str, Any] | None) -> OwnerPart:
    spec = (template or {}).get("spec") or {}
    return OwnerPart(name, count, pod_requests(spec), parse_constraint(spec))


def _at_once(job: Mapping[str, Any]) -> int:
    """How many pods of a Job there are at once."""
    parallelism = job.get("parallelism")
    parallelism = 1 if parallelism is None else int(parallelism)
    completions = job.get("completions")
    return parallelism if completions is None else min(parallelism, int(completions))


def _job_parts(spec: Mapping[str, Any]) -> Iterator[OwnerPart]:
    # Completions that come in waves are no gang: the second wave waits for the first.
    is_gang = spec.get("completionMode") == "Indexed" and spec.get("completions") == spec.get("parallelism")
    yield _template("", _at_once(spec) if is_gang else 1, spec.get("template"))


def _job_set_parts(spec: Mapping[str, Any]) -> Iterator[OwnerPart]:
    for one in spec.get("replicatedJobs") or ():
        job = (one.get("template") or {}).get("spec") or {}
        replicas = one.get("replicas")
        count = (1 if replicas is None else int(replicas)) * _at_once(job)
        yield _template(str(one.get("name") or ""), count, job.get("template"))


def _leader_worker_parts(spec: Mapping[str, Any]) -> Iterator[OwnerPart]:
    both = spec.get("leaderWorkerTemplate") or {}
    worker, size = both.get("workerTemplate"), int(both.get("size") or 1)
    yield _template("leader", 1, both.get("leaderTemplate") or worker)
    yield _template("worker", size - 1, worker)


def _kubeflow_parts(spec: Mapping[str, Any]) -> Iterator[OwnerPart]:
    for field in KUBEFLOW_REPLICA_FIELDS.values():
        for name, one in (spec.get(field) or {}).items():
            # The launcher of an MPI job comes when its workers run.
            if field == "mpiReplicaSpecs" and name == "Launcher":
                continue
            replicas = one.get("replicas")
            yield _template(name.lower(), 1 if replicas is None else int(replicas), one.get("template"))


_PARTS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[OwnerPart]]] = {
    "Job": _job_parts,
    "JobSet": _job_set_parts,
    "LeaderWorkerSet": _leader_worker_parts,
}


def _is_staged(kind: str, spec: Mapping[str, Any]) -> bool:
    if kind == "LeaderWorkerSet":
        return spec.get("startupPolicy") == "LeaderReady"
    if kind == "JobSet":
        order = (spec.get("startupPolicy") or {}).get("startupPolicyOrder")
        return order == "InOrder" or any(one.get("dependsOn") for one in spec.get("replicatedJobs") or ())
    return False
