"""Right-sizes suspended jobs before they start: one patch in the life of each job, whatever the outcome.

Where nothing is known the request stays and the record says why. No job waits longer than `patience_s` for a
prediction. A server that refuses the resize gets the record alone, as a recommendation. Measured points count if they
were taken at the default limit, with free clocks, alone on their GPUs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from eelgrid_controller.engines.kubernetes.jobs.right_sizing import (
    JobSize,
    SizeChoice,
    SizeMeasurement,
    SizeUnknown,
    SizingProblem,
    choose_size,
)
from eelgrid_controller.engines.kubernetes.jobs.suspended_job import (
    RESIZABLE_KINDS,
    PatchOperations,
    SizeConstraints,
    SuspendedJob,
    is_recorded,
    kueue_gate_patch,
    parse_size_constraints,
    parse_suspended_job,
    record_text,
    recorded_outcome,
    resource_name_of,
    right_sizing_patch,
)
from eelgrid_controller.engines.kubernetes.model import well_known
from eelgrid_controller.engines.kubernetes.model.node_inventory import product_of
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.pods.gate_events import WriteFailure
from eelgrid_controller.engines.kubernetes.scheduling.node_affinity import satisfies_constraint
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.catalogue.products import model_name
from eelgrid_protos.messages import Inventory

_SIZES_MOST = 4096
_AGAIN_S = {WriteFailure.CONFLICT: 1.0, WriteFailure.STALE: 1.0, WriteFailure.BUSY: 5.0, WriteFailure.FORBIDDEN: 30.0}
_AGAIN_MOST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RightSizingSettings:
    """How long and how many."""

    patience_s: float = 60.0  # that a prediction is waited for
    writes_most: int = 64  # in one round


class CandidateNode(NamedTuple):
    """A node that a job may come to."""

    node: KubeNode
    gpu_model: str  # empty where it is not known
    gpus: int  # whole ones


class RightSizingInputs(NamedTuple):
    """What is known besides the jobs."""

    now_s: float  # since 1970
    sites: tuple[CandidateNode, ...] = ()
    known: Mapping[str, tuple[SizeMeasurement, ...]] = {}  # by profile
    coming: frozenset[str] = frozenset()  # profiles of which a prediction is on its way


class SuspendedJobUpdated(NamedTuple):
    """A job as it is now."""

    kind: str
    found: Mapping[str, Any]


class SuspendedJobDeleted(NamedTuple):
    """A job that is no more."""

    uid: str


class JobPatched(NamedTuple):
    """A patch was made."""

    uid: str


class JobPatchFailed(NamedTuple):
    """A patch was not made."""

    uid: str
    failure: WriteFailure
    text: str = ""


class PatchJob(NamedTuple):
    """Patch a job."""

    job: SuspendedJob
    operations: PatchOperations
    outcome: str  # changed, kept, recommended, released
    why: str


class RecordJobEvent(NamedTuple):
    """Say something to its people."""

    job: SuspendedJob
    outcome: str
    text: str
    is_warning: bool = False


RightSizingEvent: TypeAlias = SuspendedJobUpdated | SuspendedJobDeleted | JobPatched | JobPatchFailed
RightSizingInstruction: TypeAlias = PatchJob | RecordJobEvent


@dataclass(slots=True)
class _Job:
    """One job that asks."""

    asked: SuspendedJob
    found: Mapping[str, Any]
    again_s: float = 0.0
    failures: int = 0
    refused: str = ""  # why the server did not take another request
    under_way: PatchJob | None = None
    is_settled: bool = False
    is_told: bool = field(default=False)  # of a failure


class JobRightSizer:
    """All jobs that ask to be right-sized."""

    def __init__(self, settings: RightSizingSettings | None = None) -> None:
        self.outcomes: dict[str, int] = {}
        self._settings = settings or RightSizingSettings()
        self._jobs: dict[str, _Job] = {}
        self._coming: dict[str, float] = {}  # since when a profile's prediction is waited for

    def __len__(self) -> int:
        return len(self._jobs)

    def is_waiting(self, at_s: float) -> bool:
        """Whether anybody waits for a round now."""
        return any(_is_due(job, at_s) for job in self._jobs.values())

    def is_wasteful(self, uid: str) -> bool:
        """Whether a job runs although fewer joules were recommended."""
        job = self._jobs.get(uid)
        return job is not None and recorded_outcome(job.asked) == "recommended"

    def pending_profiles(self) -> frozenset[str]:
        """Profiles of jobs that wait, of which something should be known."""
        found = set()
        for job in self._jobs.values():
            if not job.is_settled and job.asked.is_suspended:
                found |= _profiles(job.found)
        return frozenset(found)

    def on_events(
        self, events: Iterable[RightSizingEvent], ground: RightSizingInputs, at_s: float, *, leads: bool
    ) -> list[RightSizingInstruction]:
        """What follows from what happened; writes only from who `leads`."""
        told: list[RightSizingInstruction] = []
        for event in events:
            match event:
                case SuspendedJobUpdated():
                    self._on_job_updated(event)
                case SuspendedJobDeleted(uid):
                    self._jobs.pop(uid, None)
                case JobPatched(uid):
                    told += self._written(uid)
                case JobPatchFailed():
                    told += self._not_written(event, at_s)
        if leads:
            self._coming = {profile: self._coming.get(profile, at_s) for profile in ground.coming}
            writes = 0
            for job in self._jobs.values():
                if writes >= self._settings.writes_most:
                    break
                made = self._plan_patch(job, ground, at_s)
                if made is not None:
                    job.under_way = made
                    told.append(made)
                    writes += 1
        return told

    def _on_job_updated(self, event: SuspendedJobUpdated) -> None:
        asked = parse_suspended_job(event.kind, event.found)
        if asked is None:
            self._jobs.pop(event.found["metadata"]["uid"], None)
            return
        job = self._jobs.get(asked.uid)
        if job is None:
            self._jobs[asked.uid] = _Job(asked, event.found)
            return
        job.asked, job.found = asked, event.found
        job.is_settled = False

    def _written(self, uid: str) -> list[RightSizingInstruction]:
        job = self._jobs.get(uid)
        if job is None or job.under_way is None:
            return []
        made, job.under_way = job.under_way, None
        job.is_settled = True  # until it is seen again, without the record
        job.failures = 0
        self.outcomes[made.outcome] = self.outcomes.get(made.outcome, 0) + 1
        return [RecordJobEvent(made.job, made.outcome, made.why)] if made.outcome != "released" else []

    def _not_written(self, event: JobPatchFailed, at_s: float) -> list[RightSizingInstruction]:
        job = self._jobs.get(event.uid)
        if job is None or job.under_way is None:
            return []
        made, job.under_way = job.under_way, None
        if event.failure is WriteFailure.GONE:
            del self._jobs[event.uid]
            return []
        if event.failure is WriteFailure.INVALID and made.outcome == "changed" and not job.refused:
            job.refused = event.text or "the API server refused it"
            return []
        wait_s = _AGAIN_S.get(event.failure, 60.0)
        if event.failure not in (WriteFailure.CONFLICT, WriteFailure.STALE):
            wait_s = min(_AGAIN_MOST_S, wait_s * 2.0 ** min(job.failures, 10))
            job.failures += 1
        job.again_s = at_s + wait_s
        if event.failure in (WriteFailure.INVALID, WriteFailure.FORBIDDEN) and not job.is_told:
            job.is_told = True
            return [RecordJobEvent(made.job, "failed", f"cannot be patched: {event.text}", is_warning=True)]
        return []

    def _plan_patch(self, job: _Job, ground: RightSizingInputs, at_s: float) -> PatchJob | None:
        """The write that a job needs now."""
        asked = job.asked
        if not _is_due(job, at_s):
            return None
        if not asked.mode or not asked.is_suspended or asked.ran or is_recorded(asked):
            if asked.is_suspended and asked.is_gated:
                return PatchJob(asked, kueue_gate_patch(asked), "released", asked.ran or "it was dealt with")
            job.is_settled = True
            return None
        wish: SizeConstraints | None = None
        answer: SizeChoice | SizeUnknown
        try:
            wish = parse_size_constraints(asked.kind, job.found, now_s=ground.now_s)
        except KubernetesUnreadable as error:
            answer = SizeUnknown(str(error))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # One object that no API server should give must not keep all others from their turn.
            answer = SizeUnknown(f"cannot be read: {error!r}"[:300], "compare it with the API's reference")
        else:
            if self._is_to_come(wish, ground, at_s):
                return None
            answer = choose_size(_question(wish, ground))
        return _write(job, wish, answer)

    def _is_to_come(self, wish: SizeConstraints, ground: RightSizingInputs, at_s: float) -> bool:
        """Whether a number that its people allow is being predicted, and that for not too long."""
        since_s = self._coming.get(wish.profile)
        if since_s is None or at_s - since_s >= self._settings.patience_s:
            return False
        known = {one.gpus for one in ground.known.get(wish.profile, ()) if not one.mig_profile}
        pods = wish.pods if wish.is_together else (1,)
        return any(count * gpus not in known for count in pods for gpus in wish.gpus)


def _is_due(job: _Job, at_s: float) -> bool:
    return not job.is_settled and job.under_way is None and at_s >= job.again_s


def _write(job: _Job, wish: SizeConstraints | None, answer: SizeChoice | SizeUnknown) -> PatchJob:
    asked = job.asked
    starts = asked.starts and not asked.queue
    if isinstance(answer, SizeUnknown):
        why = f"{answer.why}; {answer.remedy}" if answer.remedy else answer.why
        before = wish.asked if wish is not None else None
        record = record_text(asked.uid, "kept", why, asked=before)
        return PatchJob(
            asked,
            right_sizing_patch(asked, record, wish=None, size=None, starts=starts),
            "kept",
            f"kept as it is: {why}",
        )
    assert wish is not None, "a choice comes of a wish"
    if answer.size == wish.asked:
        record = record_text(asked.uid, "kept", answer.why, asked=wish.asked, choice=answer)
        operations = right_sizing_patch(asked, record, wish=None, size=None, starts=starts)
        return PatchJob(asked, operations, "kept", f"kept as it is: {answer.why}")
    words = f"{_words(wish.asked)} to {_words(answer.size)}: {answer.why}"
    hindrance = _hindrance(job)
    if hindrance:
        record = record_text(asked.uid, "recommended", f"{answer.why}; {hindrance}", asked=wish.asked, choice=answer)
        operations = right_sizing_patch(asked, record, wish=None, size=None, starts=starts)
        return PatchJob(asked, operations, "recommended", f"recommended, and not changed since {hindrance}: {words}")
    record = record_text(asked.uid, "changed", answer.why, asked=wish.asked, choice=answer)
    operations = right_sizing_patch(asked, record, wish=wish, size=answer.size, starts=starts)
    return PatchJob(asked, operations, "changed", f"changed from {words}")


def _hindrance(job: _Job) -> str:
    """Why a size is recommended only."""
    asked = job.asked
    if asked.mode == "recommend":
        return "it asks for no more"
    if asked.kind not in RESIZABLE_KINDS:
        return f"the requests of a {asked.kind} are fixed"
    if asked.queue and not asked.is_gated:
        return (
            f"Kueue may start it at any moment; make it with {well_known.KUEUE_GATED_BY}: {well_known.KUEUE_OUR_GATE}"
        )
    if job.refused:
        return f"the API server refused it (before 1.36 requests are fixed): {job.refused[:300]}"
    return ""


def _question(wish: SizeConstraints, ground: RightSizingInputs) -> SizingProblem:
    """The sizes that its people allow and some node holds."""
    constraint = wish.constraint
    sites = [
        site
        for site in ground.sites
        # A cordon goes; the job may start after that.
        if satisfies_constraint(
            constraint, replace(site.node, is_unschedulable=False) if site.node.is_unschedulable else site.node
        )
        and (not wish.models or site.gpu_model in wish.models)
    ]
    wanted = [JobSize(pods, gpus) for pods in wish.pods for gpus in wish.gpus]
    wanted += [JobSize(pods, 1, profile) for pods in wish.pods for profile in wish.slices]
    sizes: dict[JobSize, tuple[str, ...]] = {}
    for size in dict.fromkeys([wish.asked, *wanted[:_SIZES_MOST]]):
        models = {site.gpu_model for site in sites if _holds(site, size)}
        if models or size == wish.asked:
            sizes[size] = tuple(sorted(models))
    return SizingProblem(
        asked=wish.asked,
        sizes=sizes,
        is_together=wish.is_together,
        slowdown_most=wish.slowdown_most,
        need_hz=wish.need_hz,
        known=ground.known.get(wish.profile, ()),
    )


def _holds(site: CandidateNode, size: JobSize) -> bool:
    """Whether an empty node would hold one of its pods."""
    if size.mig_profile:
        return site.node.allocatable.count(resource_name_of(size)) >= size.gpus
    return site.gpus >= size.gpus


def _words(size: JobSize) -> str:
    each = f"{resource_name_of(size)}: {size.gpus}"
    return each if size.pods == 1 else f"{size.pods} pods of {each}"


def _profiles(found: Mapping[str, Any]) -> set[str]:
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


def candidate_node_of(node: KubeNode, inventory: Inventory | None) -> CandidateNode:
    """A node as a place for jobs; `inventory` is what the core knows of it."""
    models = {gpu.model for gpu in inventory.gpus} if inventory is not None else set()
    count = len(inventory.gpus) if inventory is not None else node.allocatable.count(well_known.RESOURCE_GPU)
    if not models:
        product, label = product_of(node), node.labels.get(well_known.NODE_GPU_PRODUCT, "")
        models = {product.model if product else model_name(well_known.plain_product(label))} if label else set()
        count = min(count, node.allocatable.count(well_known.RESOURCE_GPU))
    return CandidateNode(node, models.pop() if len(models) == 1 else "", count)
