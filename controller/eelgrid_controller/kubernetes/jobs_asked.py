"""A job that waits suspended, and what its people allow to be made of its request.

Owns the reading of suspended Jobs, PyTorchJobs, JobSets and TrainJobs. Must not know what is
chosen, nor how it is written.

Theory. A job is read only where it carries `eelgrid.io/right-size`. Whether it ever ran is
judged on the safe side: a Job's start time is taken back when it is suspended again, but each
change of its spec raises its generation, so one that was let go and suspended again has a
generation of 3 at least. A job that somebody edited twice before it started counts as one that
ran, and is left alone.

Which kinds let a request be changed while they are suspended, by their own validation:

    Job           resources of the template, since 1.36 (KEP-5440); parallelism always, completions of an
                  Indexed Job together with it (KEP-3715)
    PyTorchJob    its webhook compares no template with the one before; the operator makes pods anew on resume
    JobSet        labels, annotations, node selector, tolerations, gates of a template: no resources
    TrainJob      `spec.trainer` is immutable, and patches of the runtime have no resources

So of JobSets and TrainJobs a size is recommended and nothing is changed.

Sources: kubernetes pkg/registry/batch/job/strategy.go and pkg/apis/batch/validation; JobSet pkg/webhooks/jobset_webhook.go;
Kubeflow trainer pkg/apis/trainer/v1alpha1/trainjob_types.go; Kubeflow training operator v1.9 pkg/webhooks/pytorch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes import annotations, names
from eelgrid_controller.kubernetes.amounts import pod_amounts, uncounted
from eelgrid_controller.kubernetes.errors import AnnotationUnreadable, KubernetesUnreadable
from eelgrid_controller.kubernetes.quantities import count_of
from eelgrid_controller.kubernetes.right_sizing import Size
from eelgrid_controller.kubernetes.selectors import Constraint, constraint_of

__all__ = ["CHANGING", "KINDS", "Asked", "Part", "Wish", "asked_of", "wish_of"]

KINDS = ("Job", "PyTorchJob", "JobSet", "TrainJob")
CHANGING = ("Job", "PyTorchJob")  # that let resources be changed while suspended
_MODES = ("true", "recommend")
_RAN_AT = 3  # the generation of a job that was let go and suspended again, at least
_ENDED = frozenset({"Complete", "Failed", "FailureTarget", "SuccessCriteriaMet", "Succeeded", "Completed", "Running"})
_COUNTERS = ("active", "ready", "succeeded", "failed", "terminating")


class Part(NamedTuple):
    """Pods of one template."""

    path: tuple[str, ...]  # where in the object the template is
    pods: int
    container: int  # which of its containers asks for GPUs; -1 where none does
    gpus: int  # of one pod
    where: tuple[str, ...]  # of its container: requests, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A job that asks to be right-sized, as it is now."""

    uid: str
    kind: str
    namespace: str
    name: str
    version: str
    mode: str  # true, recommend; empty where it does not ask and Kueue waits for us all the same
    is_suspended: bool
    ran: str = ""  # why it counts as one that ran; empty where it never did
    queue: str = ""  # Kueue's
    gates: tuple[str, ...] = ()  # that hold Kueue's admission
    starts: bool = False  # its people want it let go by us
    record: str = ""  # what we wrote

    @property
    def is_gated(self) -> bool:
        """Whether Kueue waits for us."""
        return names.KUEUE_OUR_GATE in self.gates


class Wish(NamedTuple):
    """What its people allow, and what they promised themselves."""

    profile: str
    asked: Size
    is_together: bool
    gpus: tuple[int, ...]  # of one pod
    pods: tuple[int, ...]
    slices: tuple[str, ...]
    models: tuple[str, ...]  # empty: any
    slowdown_most: float | None
    need_hz: float | None
    constraint: Constraint
    parts: tuple[Part, ...]  # those that ask for GPUs


def asked_of(kind: str, found: Mapping[str, Any]) -> Asked | None:
    """The job in an object of the API, or None if it neither asks for this nor waits for us."""
    metadata = found["metadata"]
    notes = metadata.get("annotations") or {}
    mode = notes.get(names.ANNOTATION_RIGHT_SIZE)
    gates = tuple(filter(None, (part.strip() for part in notes.get(names.KUEUE_GATED_BY, "").split(","))))
    is_ours = mode is not None or names.KUEUE_OUR_GATE in gates
    if not is_ours or (metadata.get("labels") or {}).get(names.LABEL_MANAGED) != names.MANAGED:
        return None
    return Asked(
        uid=metadata["uid"],
        kind=kind,
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        version=metadata["resourceVersion"],
        mode=mode or "",
        is_suspended=_is_suspended(kind, found.get("spec") or {}),
        ran=_ran(found),
        queue=(metadata.get("labels") or {}).get(names.KUEUE_QUEUE, ""),
        gates=gates,
        starts=notes.get(names.ANNOTATION_UNSUSPEND) == "true",
        record=notes.get(names.ANNOTATION_RIGHT_SIZED, ""),
    )


def wish_of(kind: str, found: Mapping[str, Any], *, now_s: float) -> Wish:
    """What the people of a job allow; raises KubernetesUnreadable with the field and the remedy. `now_s` since 1970."""
    parts = tuple(_parts(kind, found))
    asking = tuple(part for part in parts if part.gpus)
    if not asking:
        raise KubernetesUnreadable("spec", f"asks for no {names.RESOURCE_GPU}", "leave the annotation out")
    if len({part.gpus for part in asking}) > 1:
        raise KubernetesUnreadable("spec", "has pods that ask for different numbers of GPUs", "size them by hand")
    template = _template(kind, found, asking[0].path)
    below = (template.get("metadata") or {}).get("annotations") or {}
    notes = {**below, **found["metadata"]["annotations"]}
    annotations.check_names(notes)
    annotations.word(notes, names.ANNOTATION_RIGHT_SIZE, _MODES)
    profile = notes.get(names.ANNOTATION_PROFILE, "")
    if not profile:
        raise AnnotationUnreadable(
            names.ANNOTATION_PROFILE, "is missing", "name the profile that it was measured under"
        )
    asked = Size(sum(part.pods for part in asking), asking[0].gpus)
    if asked.pods < 1:
        raise KubernetesUnreadable("spec", "has no pods", "give it one or more")
    gpus = annotations.counts(notes, names.ANNOTATION_GPUS)
    slices, pods = annotations.mig_profiles(notes), annotations.counts(notes, names.ANNOTATION_WORKERS)
    if not (gpus or slices or pods):
        raise AnnotationUnreadable(names.ANNOTATION_GPUS, "is missing", "say how many GPUs will do, such as 1-8")
    if pods and not (kind == "Job" and _is_elastic(found)):
        remedy = "make it an Indexed Job of as many completions as parallelism, without a PodGroup"
        raise AnnotationUnreadable(names.ANNOTATION_WORKERS, "asks for another number of pods", remedy)
    if slices and (asked.gpus != 1 or _is_gated(template)):
        problem = "is for pods of one GPU that mode gate does not place"
        raise AnnotationUnreadable(
            names.ANNOTATION_SLICES, problem, f"leave it out, or {names.LABEL_MANAGED} of the pods"
        )
    return Wish(
        profile,
        asked,
        is_together=kind != "Job" or _is_gang(found, below),
        gpus=gpus or (asked.gpus,),
        pods=pods or (asked.pods,),
        slices=slices,
        models=annotations.gpu_models(notes),
        slowdown_most=annotations.fraction(notes, names.ANNOTATION_SLOWDOWN),
        need_hz=_need_hz(notes, now_s),
        constraint=constraint_of(template["spec"], uncounted(pod_amounts(template["spec"]))),
        parts=asking,
    )


def _need_hz(notes: Mapping[str, str], now_s: float) -> float | None:
    """The speed that a deadline needs; a duration begins when the pods are made, which is now at the earliest."""
    deadline_ns = annotations.deadline_ns(notes, now_s)
    work = annotations.number(notes, names.ANNOTATION_WORK)
    if (deadline_ns is None) != (work is None):
        missing = names.ANNOTATION_WORK if work is None else names.ANNOTATION_DEADLINE
        raise AnnotationUnreadable(missing, "is missing", "a deadline is kept by the work there is until then")
    if deadline_ns is None or work is None:
        return None
    left_s = deadline_ns / 1e9 - now_s
    return work / left_s if left_s > 0.0 else float("inf")


def _is_suspended(kind: str, spec: Mapping[str, Any]) -> bool:
    policy = spec.get("runPolicy") or {} if kind == "PyTorchJob" else spec
    return policy.get("suspend") is True


def _ran(found: Mapping[str, Any]) -> str:
    status, metadata = found.get("status") or {}, found["metadata"]
    if status.get("startTime") or any(status.get(counter) for counter in _COUNTERS):
        return "it runs, or ran"
    for one in status.get("conditions") or ():
        is_true = one.get("status") == "True"
        if (one.get("type") in _ENDED and is_true) or (one.get("type") == "Suspended" and not is_true):
            return "it runs, or ran"
    if any(one.get("active") for one in (status.get("replicaStatuses") or {}).values()) or status.get("restarts"):
        return "it runs, or ran"
    if int(metadata.get("generation") or 0) >= _RAN_AT:
        return "its spec was changed twice or more, so it may have run"
    return ""


def _parts(kind: str, found: Mapping[str, Any]) -> Iterator[Part]:
    spec = found["spec"]
    if kind == "Job":
        yield _part(found, ("spec", "template"), int(spec.get("parallelism", 1)))
    elif kind == "PyTorchJob":
        for role, replicas in sorted((spec.get("pytorchReplicaSpecs") or {}).items()):
            yield _part(found, ("spec", "pytorchReplicaSpecs", role, "template"), int(replicas.get("replicas", 1)))
    elif kind == "JobSet":
        for index, job in enumerate(spec.get("replicatedJobs") or ()):
            pods = int(job.get("replicas", 1)) * int(job["template"]["spec"].get("parallelism", 1))
            yield _part(found, ("spec", "replicatedJobs", str(index), "template", "spec", "template"), pods)
    else:
        nodes = (spec.get("trainer") or {}).get("numNodes")
        if nodes is None:
            remedy = "write numNodes and resourcesPerNode"
            raise KubernetesUnreadable("spec.trainer.numNodes", "is missing, and its runtime is not read", remedy)
        yield _part(_train(found), ("spec", "template"), int(nodes))


def _part(found: Mapping[str, Any], path: tuple[str, ...], pods: int) -> Part:
    asking = []
    spec = _at(found, path)["spec"]
    for index, container in enumerate(spec.get("containers") or ()):
        resources = container.get("resources") or {}
        where = tuple(part for part in ("limits", "requests") if names.RESOURCE_GPU in (resources.get(part) or {}))
        if where:
            count = count_of(resources[where[0]][names.RESOURCE_GPU], f"resources.{where[0]}")
            asking.append(Part(path, pods, index, count, where))
    if len(asking) > 1:
        raise KubernetesUnreadable(".".join(path), "has several containers that ask for GPUs", "size them by hand")
    if spec.get("resourceClaims"):
        raise KubernetesUnreadable(
            ".".join(path), "asks for devices by claim, which stay as they are", "size them by hand"
        )
    return asking[0] if asking else Part(path, pods, -1, 0, ())


def _at(found: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    at: Any = found
    for part in path:
        at = at[int(part)] if isinstance(at, list) else at[part]
    assert isinstance(at, Mapping), "a template is an object"
    return at


def _train(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """A TrainJob as if its trainer were a template."""
    resources = (found["spec"].get("trainer") or {}).get("resourcesPerNode") or {}
    return {"spec": {"template": {"spec": {"containers": [{"name": "node", "resources": resources}]}}}}


def _template(kind: str, found: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    return _at(_train(found) if kind == "TrainJob" else found, path)


def _is_gated(template: Mapping[str, Any]) -> bool:
    return bool((template.get("metadata") or {}).get("labels", {}).get(names.LABEL_MANAGED) == names.MANAGED)


def _is_indexed_whole(found: Mapping[str, Any]) -> bool:
    spec = found["spec"]
    return bool(spec.get("completionMode") == "Indexed" and spec.get("completions") == spec.get("parallelism", 1))


def _is_gang(found: Mapping[str, Any], notes: Mapping[str, str]) -> bool:
    """Whether the pods of a Job are one run, as the gate places them: by what the pods themselves will say."""
    return notes.get(names.ANNOTATION_KIND) == "training-job" and _is_indexed_whole(found)


def _is_elastic(found: Mapping[str, Any]) -> bool:
    return _is_indexed_whole(found) and not found["spec"]["template"]["spec"].get("schedulingGroup")
