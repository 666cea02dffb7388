"""Suspended Jobs, PyTorchJobs, JobSets and TrainJobs: the size that fits each best, and the one patch each gets.

Jobs and PyTorchJobs may be resized while suspended (KEP-5440, KEP-3715); for JobSets and TrainJobs a size is only
recommended. The JSON patch carries uid and resource version; request, record, Kueue's gate and `suspend` change
together.

The size is the request that costs the job the fewest joules while its promise holds. A size s on GPU model m does
T(s, m) units of work a second at P(s, m) watts, so E(s, m) = P(s, m) / T(s, m) joules a unit. A size is admissible if on
every model T_low(s, m) (1 + slowdown) >= T_high(asked, m) and T_low(s, m) >= work / time left. Of these the size of the
least rho(s) = max over m of E_high(s, m) / E_low(asked, m) is chosen, and only if rho < 1 - SAVINGS_MARGIN.

Sources: kubernetes pkg/registry/batch/job/strategy.go; JobSet and Kubeflow webhooks; RFC 6902; KEP-6915 of Kueue.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model import annotations, well_known
from eelgrid_controller.engines.kubernetes.model.node_inventory import product_of
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode
from eelgrid_controller.engines.kubernetes.model.quantities import (
    AnnotationUnreadable,
    KubernetesUnreadable,
    non_gpu_devices,
    parse_count,
    pod_requests,
)
from eelgrid_controller.engines.kubernetes.model.selectors import NodeConstraint, parse_constraint
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.catalogue.products import model_name
from eelgrid_protos.messages import Inventory

SAVINGS_MARGIN = 0.02  # of the energy: less is within what two runs of one job differ by
_HAIR = 1e-9  # of a speed, for rounding


class JobSize(NamedTuple):
    """What a job asks for."""

    pods: int
    gpus: int  # of one pod; slices where a profile is named
    mig_profile: str = ""

    @property
    def description(self) -> str:
        """The size in words."""
        each = f"{self.gpus} x {self.mig_profile}" if self.mig_profile else f"{self.gpus} GPU"
        return each if self.pods == 1 else f"{self.pods} pods of {each}"


class SizeMeasurement(NamedTuple):
    """How a profile runs on so many GPUs or slices; the ends of 90 % intervals, alike where it was measured."""

    gpu_model: str
    mig_profile: str
    gpus: int  # of all that run together
    throughput_low_hz: float
    throughput_high_hz: float
    power_low_w: float
    power_high_w: float
    basis: str = "measured"


class _Run(NamedTuple):
    """One size on one model."""

    low_hz: float
    high_hz: float
    energy_low_j: float  # of a unit of work
    energy_high_j: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingProblem:
    """A job that has not started."""

    asked: JobSize
    # Sizes that its people allow, each with the models of the nodes that could hold it; what it asks for among them.
    sizes: Mapping[JobSize, Sequence[str]]
    is_together: bool = False  # its pods are one run
    slowdown_most: float | None = None
    need_hz: float | None = None  # work over the time left; inf where there is none
    known: Sequence[SizeMeasurement] = ()


class SizeChoice(NamedTuple):
    """The size to take, which may be the one that was asked for."""

    size: JobSize
    ratio: float  # energy of the same work over that of what was asked, at the worst end on the worst model
    speed: float  # likewise, at the slowest
    energy_j: Mapping[str, tuple[float, float]]  # by model: of a unit of work as asked and as chosen
    bases: tuple[str, ...]
    why: str


class SizeUnknown(NamedTuple):
    """Nothing can be chosen."""

    why: str
    remedy: str = ""


def choose_size(question: SizingProblem) -> SizeChoice | SizeUnknown:
    """The size of the fewest joules that keeps the promise, or why none can be named."""
    models = question.sizes.get(question.asked, ())
    if not models:
        why = f"no node that it may come to has {question.asked.description} of a known model"
        return SizeUnknown(
            why, "look at its node selector and tolerations, and at the labels nvidia.com/gpu.product of nodes"
        )
    asked: dict[str, _Run] = {}
    for model in models:
        run = _run(question, question.asked, model)
        if isinstance(run, str):
            return SizeUnknown(
                f"what it asks for, {question.asked.description}, {run} on {model or 'a GPU of no known model'}",
                _MEASURE,
            )
        asked[model] = run
    best, refused = question.asked, dict[str, int]()
    best_key = _key(question, question.asked, 1.0)
    for size in question.sizes:
        if size == question.asked:
            continue
        found = _ratio(question, size, asked)
        if isinstance(found, str):
            refused[found] = refused.get(found, 0) + 1
            continue
        key = _key(question, size, found)
        if found < 1.0 - SAVINGS_MARGIN and key < best_key:
            best, best_key = size, key
    if best == question.asked:
        return _kept(question, asked, refused)
    return _choice(question, best, asked, best_key[0])


_MEASURE = "measure it there (eelctl profile import), or name fewer models by eelgrid.io/gpu-models"


def _key(question: SizingProblem, size: JobSize, ratio: float) -> tuple[float, int, int, str]:
    """The order of sizes: joules first, then who changes least and holds least."""
    return ratio, abs(size.pods - question.asked.pods), size.pods * size.gpus, size.mig_profile


def _ratio(question: SizingProblem, size: JobSize, asked: Mapping[str, _Run]) -> float | str:
    """The worst energy of a size over that of what was asked; or why it is not admissible."""
    slowdown = question.slowdown_most
    if slowdown is None and question.need_hz is None:
        slowdown = 0.0
    worst = 0.0
    for model in question.sizes[size]:
        before, run = _before(asked, model), _run(question, size, model)
        if isinstance(run, str):
            return run
        if slowdown is not None and run.low_hz * (1.0 + slowdown) < before.high_hz * (1.0 - _HAIR):
            return "may become slower than it is allowed to"
        if question.need_hz is not None and run.low_hz < question.need_hz * (1.0 - _HAIR):
            return "may miss its deadline"
        worst = max(worst, run.energy_high_j / before.energy_low_j)
    return worst or "no node can hold"


def _before(asked: Mapping[str, _Run], model: str) -> _Run:
    """What is compared with on a model: the same there, or the best anywhere if it could not have come there."""
    if model in asked:
        return asked[model]
    runs = list(asked.values())
    return _Run(
        max(run.low_hz for run in runs),
        max(run.high_hz for run in runs),
        min(run.energy_low_j for run in runs),
        min(run.energy_high_j for run in runs),
        runs[0].basis,
    )


def _run(question: SizingProblem, size: JobSize, model: str) -> _Run | str:
    """How a size runs on a model, the fastest of what is known; or why that is not known."""
    gpus, share = (size.pods * size.gpus, 1) if question.is_together else (size.gpus, size.pods)
    found = [
        one
        for one in question.known
        if one.gpu_model == model and one.mig_profile == size.mig_profile and one.gpus == gpus
    ]
    fit = [one for one in found if one.throughput_low_hz > 0.0 and one.power_low_w > 0.0]
    if not fit:
        return "was measured without watts" if found else "was measured nowhere"
    one = max(fit, key=lambda known: (known.throughput_low_hz, -known.power_high_w))
    return _Run(
        share * one.throughput_low_hz,
        share * one.throughput_high_hz,
        one.power_low_w / one.throughput_high_hz,
        one.power_high_w / one.throughput_low_hz,
        one.basis,
    )


def _kept(question: SizingProblem, asked: Mapping[str, _Run], refused: Mapping[str, int]) -> SizeChoice | SizeUnknown:
    """What is asked for stays; why."""
    others = sum(size != question.asked for size in question.sizes)
    if not others:
        return SizeUnknown("no other size is allowed that a node there could hold", "allow more by eelgrid.io/gpus")
    if sum(count for why, count in refused.items() if why.startswith("was ")) == others:
        why = "no other size that is allowed was measured with watts on every model that it may come to"
        return SizeUnknown(why, _MEASURE)
    reasons = [f"{count} {why}" for why, count in sorted(refused.items())]
    fewer = others - sum(refused.values())
    if fewer:
        reasons.insert(0, f"{fewer} would not save {100 * SAVINGS_MARGIN:g} % for certain")
    return _choice(question, question.asked, asked, 1.0, f"of {others} other sizes {', '.join(reasons)}")


def _choice(
    question: SizingProblem, size: JobSize, asked: Mapping[str, _Run], ratio: float, why: str = ""
) -> SizeChoice:
    energies, speeds, bases = dict[str, tuple[float, float]](), list[float](), set[str]()
    for model in question.sizes[size]:
        before, after = _before(asked, model), _run(question, size, model)
        assert not isinstance(after, str), "what is chosen is known"
        energies[model] = (_middle(before), _middle(after))
        speeds.append(after.low_hz / before.high_hz)
        bases |= {before.basis, after.basis}
    speed = 1.0 if size == question.asked else min(speeds)
    if not why:
        saved, left = 100.0 * (1.0 - ratio), 100.0 * speed
        why = f"{saved:.0f} % fewer joules for the same work, at {left:.0f} % of the speed, at the worst"
    return SizeChoice(size, ratio, speed, energies, tuple(sorted(bases)), why)


def _middle(run: _Run) -> float:
    return math.sqrt(run.energy_low_j * run.energy_high_j)


RESIZABLE_KINDS = ("Job", "PyTorchJob")  # that let resources be changed while suspended
_MODES = ("true", "recommend")
_RAN_AT = 3  # the generation of a job that was let go and suspended again, at least
_ENDED = frozenset({"Complete", "Failed", "FailureTarget", "SuccessCriteriaMet", "Succeeded", "Completed", "Running"})
_COUNTERS = ("active", "ready", "succeeded", "failed", "terminating")


class JobTemplatePart(NamedTuple):
    """Pods of one template."""

    path: tuple[str, ...]  # where in the object the template is
    pods: int
    container: int  # which of its containers asks for GPUs; -1 where none does
    gpus: int  # of one pod
    where: tuple[str, ...]  # of its container: requests, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendedJob:
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
        return well_known.KUEUE_OUR_GATE in self.gates


class SizeConstraints(NamedTuple):
    """The sizes that its users allow, and the promise to keep."""

    profile: str
    asked: JobSize
    is_together: bool
    gpus: tuple[int, ...]  # of one pod
    pods: tuple[int, ...]
    slices: tuple[str, ...]
    models: tuple[str, ...]  # empty: any
    slowdown_most: float | None
    need_hz: float | None
    constraint: NodeConstraint
    parts: tuple[JobTemplatePart, ...]  # those that ask for GPUs


def parse_suspended_job(kind: str, found: Mapping[str, Any]) -> SuspendedJob | None:
    """The job in an object of the API, or None if it neither asks for this nor waits for us."""
    metadata = found["metadata"]
    notes = metadata.get("annotations") or {}
    mode = notes.get(well_known.ANNOTATION_RIGHT_SIZE)
    gates = tuple(filter(None, (part.strip() for part in notes.get(well_known.KUEUE_GATED_BY, "").split(","))))
    is_ours = mode is not None or well_known.KUEUE_OUR_GATE in gates
    if not is_ours or (metadata.get("labels") or {}).get(well_known.LABEL_MANAGED) != well_known.MANAGED:
        return None
    return SuspendedJob(
        uid=metadata["uid"],
        kind=kind,
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        version=metadata["resourceVersion"],
        mode=mode or "",
        is_suspended=_is_suspended(kind, found.get("spec") or {}),
        ran=_ran(found),
        queue=(metadata.get("labels") or {}).get(well_known.KUEUE_QUEUE, ""),
        gates=gates,
        starts=notes.get(well_known.ANNOTATION_UNSUSPEND) == "true",
        record=notes.get(well_known.ANNOTATION_RIGHT_SIZED, ""),
    )


def parse_size_constraints(kind: str, found: Mapping[str, Any], *, now_s: float) -> SizeConstraints:
    """What the people of a job allow; raises KubernetesUnreadable with the field and the remedy. `now_s` since 1970."""
    parts = tuple(_parts(kind, found))
    asking = tuple(part for part in parts if part.gpus)
    if not asking:
        raise KubernetesUnreadable("spec", f"asks for no {well_known.RESOURCE_GPU}", "leave the annotation out")
    if len({part.gpus for part in asking}) > 1:
        raise KubernetesUnreadable("spec", "has pods that ask for different numbers of GPUs", "size them by hand")
    template = _template(kind, found, asking[0].path)
    below = (template.get("metadata") or {}).get("annotations") or {}
    notes = {**below, **found["metadata"]["annotations"]}
    annotations.check_names(notes)
    annotations.parse_choice(notes, well_known.ANNOTATION_RIGHT_SIZE, _MODES)
    profile = notes.get(well_known.ANNOTATION_PROFILE, "")
    if not profile:
        raise AnnotationUnreadable(
            well_known.ANNOTATION_PROFILE, "is missing", "name the profile that it was measured under"
        )
    asked = JobSize(sum(part.pods for part in asking), asking[0].gpus)
    if asked.pods < 1:
        raise KubernetesUnreadable("spec", "has no pods", "give it one or more")
    gpus = annotations.parse_counts(notes, well_known.ANNOTATION_GPUS)
    slices, pods = annotations.parse_mig_profiles(notes), annotations.parse_counts(notes, well_known.ANNOTATION_WORKERS)
    if not (gpus or slices or pods):
        raise AnnotationUnreadable(well_known.ANNOTATION_GPUS, "is missing", "say how many GPUs will do, such as 1-8")
    if pods and not (kind == "Job" and _is_elastic(found)):
        remedy = "make it an Indexed Job of as many completions as parallelism, without a PodGroup"
        raise AnnotationUnreadable(well_known.ANNOTATION_WORKERS, "asks for another number of pods", remedy)
    if slices and (asked.gpus != 1 or _is_gated(template)):
        problem = "is for pods of one GPU that mode gate does not place"
        raise AnnotationUnreadable(
            well_known.ANNOTATION_SLICES, problem, f"leave it out, or {well_known.LABEL_MANAGED} of the pods"
        )
    return SizeConstraints(
        profile,
        asked,
        is_together=kind != "Job" or _is_gang(found, below),
        gpus=gpus or (asked.gpus,),
        pods=pods or (asked.pods,),
        slices=slices,
        models=annotations.parse_gpu_models(notes),
        slowdown_most=annotations.parse_fraction(notes, well_known.ANNOTATION_SLOWDOWN),
        need_hz=_need_hz(notes, now_s),
        constraint=parse_constraint(template["spec"], non_gpu_devices(pod_requests(template["spec"]))),
        parts=asking,
    )


def _need_hz(notes: Mapping[str, str], now_s: float) -> float | None:
    """The speed that a deadline needs; a duration begins when the pods are made, which is now at the earliest."""
    deadline_ns = annotations.parse_deadline_ns(notes, now_s)
    work = annotations.parse_number(notes, well_known.ANNOTATION_WORK)
    if (deadline_ns is None) != (work is None):
        missing = well_known.ANNOTATION_WORK if work is None else well_known.ANNOTATION_DEADLINE
        raise AnnotationUnreadable(missing, "is missing", "a deadline needs the amount of work that is due by then")
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


def _parts(kind: str, found: Mapping[str, Any]) -> Iterator[JobTemplatePart]:
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


def _part(found: Mapping[str, Any], path: tuple[str, ...], pods: int) -> JobTemplatePart:
    asking = []
    spec = _at(found, path)["spec"]
    for index, container in enumerate(spec.get("containers") or ()):
        resources = container.get("resources") or {}
        where = tuple(part for part in ("limits", "requests") if well_known.RESOURCE_GPU in (resources.get(part) or {}))
        if where:
            count = parse_count(resources[where[0]][well_known.RESOURCE_GPU], f"resources.{where[0]}")
            asking.append(JobTemplatePart(path, pods, index, count, where))
    if len(asking) > 1:
        raise KubernetesUnreadable(".".join(path), "has several containers that ask for GPUs", "size them by hand")
    if spec.get("resourceClaims"):
        raise KubernetesUnreadable(
            ".".join(path), "asks for devices by claim, which stay as they are", "size them by hand"
        )
    return asking[0] if asking else JobTemplatePart(path, pods, -1, 0, ())


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
    return bool((template.get("metadata") or {}).get("labels", {}).get(well_known.LABEL_MANAGED) == well_known.MANAGED)


def _is_indexed_whole(found: Mapping[str, Any]) -> bool:
    spec = found["spec"]
    return bool(spec.get("completionMode") == "Indexed" and spec.get("completions") == spec.get("parallelism", 1))


def _is_gang(found: Mapping[str, Any], notes: Mapping[str, str]) -> bool:
    """Whether the pods of a Job are one run, as the gate places them: by what the pods themselves will say."""
    return notes.get(well_known.ANNOTATION_KIND) == "training-job" and _is_indexed_whole(found)


def _is_elastic(found: Mapping[str, Any]) -> bool:
    return _is_indexed_whole(found) and not found["spec"]["template"]["spec"].get("schedulingGroup")


_LONGEST = 1_000  # of a reason
PatchOperations = list[dict[str, Any]]


def resource_name_of(size: JobSize) -> str:
    """The resource that a size asks for."""
    return f"{well_known.RESOURCE_MIG_PREFIX}{size.mig_profile}" if size.mig_profile else well_known.RESOURCE_GPU


def record_text(
    uid: str, outcome: str, why: str, *, asked: JobSize | None = None, choice: SizeChoice | None = None
) -> str:
    """What was done to a job, for people and for us: `changed`, `kept` or `recommended`."""
    record: dict[str, Any] = {"job": uid, "outcome": outcome, "why": why[:_LONGEST]}
    if asked is not None:
        record["before"] = _size(asked)
    if choice is not None and choice.size != asked:
        record |= {"after": _size(choice.size), "energy": round(choice.ratio, 4), "speed": round(choice.speed, 4)}
    if choice is not None:
        record["joules"] = {
            model: [float(f"{one:.4g}") for one in pair] for model, pair in sorted(choice.energy_j.items())
        }
        record["basis"] = ", ".join(choice.bases)
    return json.dumps(record, separators=(",", ":"))


def is_recorded(job: SuspendedJob) -> bool:
    """Whether this very job was dealt with: a record that was copied along with a manifest is of another."""
    return bool(recorded_outcome(job))


def recorded_outcome(job: SuspendedJob) -> str:
    """What was done to this very job: `changed`, `kept`, `recommended`; empty where nothing was."""
    if not job.record:
        return ""
    try:
        found = json.loads(job.record)
    except (ValueError, RecursionError):
        return ""
    is_its = isinstance(found, Mapping) and found.get("job") == job.uid
    return str(found.get("outcome", "")) if is_its else ""


def right_sizing_patch(
    job: SuspendedJob, record: str, *, wish: SizeConstraints | None, size: JobSize | None, starts: bool
) -> PatchOperations:
    """The patch: the record, the request where a size is given, our gate's removal, and the start where it is ours."""
    made = [*_same(job), _add(("metadata", "annotations", well_known.ANNOTATION_RIGHT_SIZED), record), *_ungated(job)]
    if size is not None:
        assert wish is not None, "a size comes of a wish"
        for part in wish.parts:
            made += _request(part, wish.asked, size)
        if size.pods != wish.asked.pods:
            made += [_replace(("spec", field), size.pods) for field in ("parallelism", "completions")]
    if starts:
        where = ("spec", "runPolicy", "suspend") if job.kind == "PyTorchJob" else ("spec", "suspend")
        made.append(_replace(where, False))
    return made


def kueue_gate_patch(job: SuspendedJob) -> PatchOperations:
    """The patch that takes our gate away and changes nothing else."""
    return [*_same(job), *_ungated(job)]


def _same(job: SuspendedJob) -> PatchOperations:
    metadata = (("uid", job.uid), ("resourceVersion", job.version))
    return [_replace(("metadata", field), value) for field, value in metadata]


def _ungated(job: SuspendedJob) -> PatchOperations:
    if not job.is_gated:
        return []
    path = ("metadata", "annotations", well_known.KUEUE_GATED_BY)
    left = [gate for gate in job.gates if gate != well_known.KUEUE_OUR_GATE]
    return [_replace(path, ",".join(left)) if left else {"op": "remove", "path": _pointer(path)}]


def _request(part: JobTemplatePart, asked: JobSize, size: JobSize) -> PatchOperations:
    made: PatchOperations = []
    before, after = resource_name_of(asked), resource_name_of(size)
    for field in part.where:
        path = (*part.path, "spec", "containers", str(part.container), "resources", field)
        if before != after:
            made.append({"op": "remove", "path": _pointer((*path, before))})
        made.append(_add((*path, after), str(size.gpus)))
    return made


def _size(size: JobSize) -> dict[str, Any]:
    return {"pods": size.pods, "resource": resource_name_of(size), "count": size.gpus}


def _add(path: Iterable[str], value: object) -> dict[str, Any]:
    return {"op": "add", "path": _pointer(path), "value": value}


def _replace(path: Iterable[str], value: object) -> dict[str, Any]:
    return {"op": "replace", "path": _pointer(path), "value": value}


def _pointer(path: Iterable[str]) -> str:
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)


def profiles_of(found: Mapping[str, Any]) -> set[str]:
    """What a job, or a template in it, names as its profile."""
    spec = found.get("spec") or {}
    parts: list[Any] = [spec.get("template"), *(spec.get("pytorchReplicaSpecs") or {}).values()]
    templates = [found, *(part.get("template", part) if part else {} for part in parts)]
    templates += [
        ((one.get("template") or {}).get("spec") or {}).get("template") or {}
        for one in spec.get("replicatedJobs") or ()
    ]
    notes = [(one.get("metadata") or {}).get("annotations") or {} for one in templates]
    return {note[well_known.ANNOTATION_PROFILE] for note in notes if well_known.ANNOTATION_PROFILE in note}


class CandidateNode(NamedTuple):
    """A node that a job may come to."""

    node: KubeNode
    gpu_model: str  # empty where it is not known
    gpus: int  # whole ones


def candidate_node_of(node: KubeNode, inventory: Inventory | None) -> CandidateNode:
    """A node as a place for jobs; `inventory` is what the core knows of it."""
    models = {gpu.model for gpu in inventory.gpus} if inventory is not None else set()
    count = len(inventory.gpus) if inventory is not None else node.allocatable.count(well_known.RESOURCE_GPU)
    if not models:
        product, label = product_of(node), node.labels.get(well_known.NODE_GPU_PRODUCT, "")
        models = {product.model if product else model_name(well_known.plain_product(label))} if label else set()
        count = min(count, node.allocatable.count(well_known.RESOURCE_GPU))
    return CandidateNode(node, models.pop() if len(models) == 1 else "", count)


_BETWEEN_MOST = 16


def measured_sizes(points: Iterable[Point]) -> tuple[SizeMeasurement, ...]:
    """What these points say of a job; without watts one says only that it ran."""
    found = []
    for point in points:
        how = point.configuration
        if how.power_limit_w is not None or how.clock_mhz is not None or how.processes != 1:
            continue
        power_w, speed_hz = point.power_w or 0.0, point.throughput_hz
        found.append(SizeMeasurement(how.gpu_model, how.mig_profile, how.gpus, speed_hz, speed_hz, power_w, power_w))
    return tuple(found)


def unmeasured_gpu_counts(known: Iterable[SizeMeasurement], gpu_model: str) -> tuple[int, ...]:
    """Numbers of GPUs that were not measured on a model, after the largest that was; empty where there are none.

    Only such as lie between two that were: below the least nobody knows whether it fits into the memory.
    """
    measured = {
        one.gpus for one in known if one.gpu_model == gpu_model and not one.mig_profile and one.power_low_w > 0.0
    }
    if len(measured) < 2:
        return ()
    least, most = min(measured), max(measured)
    missing = [gpus for gpus in range(least + 1, most) if gpus not in measured]
    return (most, *missing[:_BETWEEN_MOST]) if missing else ()
