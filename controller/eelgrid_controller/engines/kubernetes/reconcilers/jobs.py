"""Jobs: right-sizes suspended ones, and boosts Kueue Workloads that are costly to preempt.

A suspended job is right-sized before it starts: one patch in its life, whatever the outcome. Where nothing is known
the request stays and the record says why. No job waits longer than `patience_s` for a prediction. A server that
refuses the resize gets the record alone, as a recommendation. Measured points count if they were taken at the default
limit, with free clocks, alone on their GPUs.

The boost of a Workload's priority is bounded. With G GPUs and t seconds of work that would be lost,

    c = G t / (G t + HALF_COST_GPU_S)    p = min(1, t / left)    boost = max * floor(4 (1 - (1 - c)^(1 + p))) / 4

where `left` is what the promise can still bear. Only admitted Workloads are boosted. BOOST_HYSTERESIS keeps
the steps from flapping. A boost that somebody else set is left alone.

Source: KEP-7990 of Kueue.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError
from eelgrid_controller.engines.kubernetes.api.informer import Delta, drop_managed_fields
from eelgrid_controller.engines.kubernetes.api.port import (
    CLUSTER_QUEUES,
    JOB_SETS,
    JOBS,
    KUEUE_WORKLOADS,
    PYTORCH_JOBS,
    TRAIN_JOBS,
    Object,
    ObjectKey,
    PatchKind,
    Resource,
    ServedResources,
)
from eelgrid_controller.engines.kubernetes.model import annotations, well_known
from eelgrid_controller.engines.kubernetes.model.node_affinity import satisfies_constraint
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, parse_node
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, pod_requests
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference
from eelgrid_controller.engines.kubernetes.model.well_known import LABEL_MANAGED, MANAGED
from eelgrid_controller.engines.kubernetes.pods.gate_events import WriteFailure
from eelgrid_controller.engines.kubernetes.pods.suspended_job import (
    RESIZABLE_KINDS,
    CandidateNode,
    JobSize,
    PatchOperations,
    SizeChoice,
    SizeConstraints,
    SizeMeasurement,
    SizeUnknown,
    SizingProblem,
    SuspendedJob,
    candidate_node_of,
    choose_size,
    is_recorded,
    kueue_gate_patch,
    measured_sizes,
    parse_size_constraints,
    parse_suspended_job,
    profiles_of,
    record_text,
    recorded_outcome,
    resource_name_of,
    right_sizing_patch,
    unmeasured_gpu_counts,
)
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import (
    CLUSTER_KEY,
    EventInbox,
    ParseCache,
    Reconciler,
    Result,
)
from eelgrid_controller.engines.kubernetes.reconcilers.writers import describe_failure
from eelgrid_controller.objectives.forecasts import NOT_LEARNED_REASON, ScaleQuestion
from eelgrid_protos.catalogue import GpuNameError, resolve_gpu_models
from eelgrid_protos.messages import Inventory

HALF_COST_GPU_S = 8 * 3600.0  # GPU seconds: half of the boost for an hour of a node of eight
BOOST_STEPS = 4
BOOST_HYSTERESIS = 0.05
MAX_BOOST = 1_000_000
_SLOWDOWN_OF_LEAST_S = 3600.0  # a slowdown is borne over an hour at least


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptibleWorkload:
    """A workload as its interruption would find it."""

    gpus: int
    ran_s: float
    grace_s: float | None = None  # that it takes to save itself; None: all is lost
    deadline_left_s: float | None = None
    slowdown_most: float | None = None
    is_wasteful: bool = False


class WorkloadBoost(NamedTuple):
    """A Workload's boosts: the one in force, and the one that we wrote; None where there is none."""

    present: str | None
    ours: str | None

    @property
    def is_foreign(self) -> bool:
        """Whether another writer set it, or changed ours."""
        return self.present is not None and self.present != self.ours


def compute_boost(run: InterruptibleWorkload, most: int, before: int = 0) -> int:
    """The boost, from 0 to `most`; `before` is the one that it has, at which it stays near a step's edge."""
    if run.is_wasteful or most <= 0:
        return 0
    lost_s = max(0.0, run.ran_s if run.grace_s is None else min(run.grace_s, run.ran_s))
    cost = run.gpus * lost_s / (run.gpus * lost_s + HALF_COST_GPU_S)
    share = 1.0 - (1.0 - cost) ** (1.0 + _pressure(run, lost_s))
    step = int(share * BOOST_STEPS)
    held = round(before * BOOST_STEPS / most)
    if abs(step - held) == 1:
        # Near the edge between the two it stays as it is.
        edge = max(step, held) / BOOST_STEPS
        if abs(share - edge) < BOOST_HYSTERESIS:
            step = held
    return most * min(step, BOOST_STEPS) // BOOST_STEPS


def _pressure(run: InterruptibleWorkload, lost_s: float) -> float:
    """How much of what its promise can bear the interruption would use up, 0 to 1."""
    bears = [left_s for left_s in (run.deadline_left_s,) if left_s is not None]
    if run.slowdown_most is not None:
        bears.append(run.slowdown_most * max(run.ran_s, _SLOWDOWN_OF_LEAST_S))
    left_s = min(bears, default=None)
    if left_s is None or lost_s <= 0.0:
        return 0.0
    return 1.0 if left_s <= lost_s else lost_s / left_s


def max_boost_of(queue: Mapping[str, Any]) -> int:
    """The largest boost in a ClusterQueue; 0 without the annotation, or with one that says nothing."""
    return read_boost((queue["metadata"].get("annotations") or {}).get(well_known.ANNOTATION_PREEMPTION_BOOST, ""))


def read_boost(text: str) -> int:
    """A boost as it is written, at most the largest; 0 for what is none, as people may write there, too."""
    return min(MAX_BOOST, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def parse_boost(workload: Mapping[str, Any]) -> WorkloadBoost:
    """The boosts that a Workload has."""
    notes = workload["metadata"].get("annotations") or {}
    return WorkloadBoost(notes.get(well_known.KUEUE_PRIORITY_BOOST), notes.get(well_known.ANNOTATION_PREEMPTION_BOOST))


def parse_interruptible(
    workload: Mapping[str, Any], *, now_s: float, is_wasteful: bool = False
) -> InterruptibleWorkload | None:
    """A Workload that runs and opted in; None for all others. Raises KubernetesUnreadable."""
    status = workload.get("status") or {}
    since = {one.get("type"): one for one in status.get("conditions") or () if one.get("status") == "True"}
    admitted = since.get("Admitted")
    if admitted is None or "Finished" in since or "Evicted" in since:
        return None
    gpus, notes, is_managed = 0, dict[str, str](), False
    for part in (workload.get("spec") or {}).get("podSets") or ():
        metadata = part["template"].get("metadata") or {}
        is_managed |= (metadata.get("labels") or {}).get(well_known.LABEL_MANAGED) == well_known.MANAGED
        notes |= metadata.get("annotations") or {}
        amounts = pod_requests(part["template"]["spec"])
        gpus += int(part.get("count", 1)) * sum(amounts.count(name) for name in well_known.RESOURCES_GPU)
    if not is_managed:
        return None
    try:
        start_s = datetime.fromisoformat(str(admitted.get("lastTransitionTime"))).timestamp()
    except ValueError:
        raise KubernetesUnreadable("status.conditions", "has no time", "give what the API server gave") from None
    deadline_ns = annotations.parse_deadline_ns(notes, start_s)
    return InterruptibleWorkload(
        gpus=gpus,
        ran_s=max(0.0, now_s - start_s),
        grace_s=annotations.parse_duration_s(notes, well_known.ANNOTATION_CHECKPOINT_GRACE),
        deadline_left_s=None if deadline_ns is None else max(0.0, deadline_ns / 1e9 - now_s),
        slowdown_most=annotations.parse_fraction(notes, well_known.ANNOTATION_SLOWDOWN),
        is_wasteful=is_wasteful,
    )


def boost_patch(workload: Mapping[str, Any], value: int) -> dict[str, Any] | None:
    """The merge patch that gives a Workload this boost, 0 for none; None where it has it, or another's."""
    has = parse_boost(workload)
    wanted = str(value) if value else None
    if has.is_foreign or (has.present == wanted and has.ours == wanted):
        return None
    metadata = workload["metadata"]
    notes = {well_known.KUEUE_PRIORITY_BOOST: wanted, well_known.ANNOTATION_PREEMPTION_BOOST: wanted}
    return {"metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"], "annotations": notes}}


KUEUE_VERSIONS = ("v1beta2", "v1beta1")
_MOST = 50_000
_EVERY_S = 15.0
_LOOK_S = 1.0  # whether any queue asks for it
_WRITES_MOST = 64  # in one turn


class PreemptionBoostReconciler(Reconciler[str]):
    """Keeps the priority boost annotation of Kueue Workloads at what their preemption would cost."""

    def __init__(
        self,
        around: ReconcilerContext,
        served: ServedResources,
        *,
        wasteful: Callable[[str], bool],
        every_s: float = _EVERY_S,
    ) -> None:
        """`wasteful` says of the uid of a Workload's owner whether it wastes."""
        super().__init__(around, "boosts")
        self._queues = served.find_served(CLUSTER_QUEUES, KUEUE_VERSIONS)
        self._workloads = served.find_served(KUEUE_WORKLOADS, KUEUE_VERSIONS)
        self._wasteful = wasteful
        self._every_s = every_s

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Read queues; Workloads only once a queue asks for boosts, and nothing where Kueue is not served."""
        if self._queues is None or self._workloads is None:
            return
        queues = self.make_informer(self._queues, keep=drop_managed_fields, max_objects=_MOST)
        group.create_task(queues.run())
        await queues.wait_synced()
        while not any(map(max_boost_of, queues.objects.values())):  # noqa: ASYNC110  # a cheap look at a few objects
            await asyncio.sleep(_LOOK_S)
        workloads = self.make_informer(self._workloads, keep=drop_managed_fields, max_objects=_MOST)
        group.create_task(workloads.run())
        await workloads.wait_synced()
        self._known = queues, workloads
        self.queue.add(CLUSTER_KEY)

    async def reconcile(self, _: str) -> Result | None:
        """Write the boosts that differ, a bounded number in one turn."""
        queues, workloads = self._known
        resource, writes = workloads.resource, 0
        most = {key.name: max_boost_of(one) for key, one in queues.objects.items()}
        for workload in list(workloads.objects.values()):
            if self.term() is None or writes >= _WRITES_MOST:
                break
            body = self._plan_patch(workload, most)
            if body is None:
                continue
            writes += 1
            metadata = workload["metadata"]
            try:
                await self.cluster.patch(resource, metadata["name"], body, namespace=metadata["namespace"])
            except ClusterError as error:
                self.failures += 1
                self.log.info("workload=%s boosted=no error=%s", metadata["name"], error)
        return Result(self._every_s)

    def _plan_patch(self, workload: Object, most: Mapping[str, int]) -> dict[str, Any] | None:
        """The patch that a Workload needs."""
        admission = (workload.get("status") or {}).get("admission") or {}
        limit = most.get(str(admission.get("clusterQueue", "")), 0)
        has = parse_boost(workload)
        if not limit and has.ours is None:
            return None
        owners = workload["metadata"].get("ownerReferences") or ()
        is_wasteful = any(self._wasteful(owner["uid"]) for owner in owners)
        try:
            run = parse_interruptible(workload, now_s=self.clock.now_ns() / 1e9, is_wasteful=is_wasteful)
        except KubernetesUnreadable as error:
            self.log.debug("workload=%s read=no error=%s", workload["metadata"]["name"], error)
            return None
        before = read_boost(has.ours or "")
        return boost_patch(workload, compute_boost(run, limit, before) if run is not None else 0)


_SIZES_MOST = 4096
_AGAIN_S = {WriteFailure.CONFLICT: 1.0, WriteFailure.STALE: 1.0, WriteFailure.BUSY: 5.0, WriteFailure.FORBIDDEN: 30.0}
_AGAIN_MOST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RightSizingSettings:
    """How long and how many."""

    patience_s: float = 60.0  # that a prediction is waited for
    writes_most: int = 64  # in one round


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
    """A job was deleted."""

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
    """Record an Event about a job."""

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
                found |= profiles_of(job.found)
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
    """The sizes that its users allow and some node can hold."""
    constraint = wish.constraint
    wanted_models = _models_of(wish, ground)
    sites = [
        site
        for site in ground.sites
        # A cordon goes; the job may start after that.
        if satisfies_constraint(
            constraint, replace(site.node, is_unschedulable=False) if site.node.is_unschedulable else site.node
        )
        and (not wish.models or site.gpu_model in wanted_models)
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


def _models_of(wish: SizeConstraints, ground: RightSizingInputs) -> frozenset[str]:
    """The GPU models that will do, by the names that the nodes have; none for a name that fits several."""
    try:
        reported = {site.gpu_model for site in ground.sites if site.gpu_model}
        return frozenset(resolve_gpu_models(wish.models, "models", reported=sorted(reported), keeps_unknown=True))
    except GpuNameError:
        return frozenset(wish.models)


def _holds(site: CandidateNode, size: JobSize) -> bool:
    """Whether an empty node would hold one of its pods."""
    if size.mig_profile:
        return site.node.allocatable.count(resource_name_of(size)) >= size.gpus
    return site.gpus >= size.gpus


def _words(size: JobSize) -> str:
    each = f"{resource_name_of(size)}: {size.gpus}"
    return each if size.pods == 1 else f"{size.pods} pods of {each}"


_JOBS_MOST = 50_000
_ROUND_S = 0.5
_RESOURCES = {one.kind: one for one in (JOBS, PYTORCH_JOBS, JOB_SETS, TRAIN_JOBS)}
_REASONS = {"changed": "EelgridRightSized", "failed": "EelgridProblem"}


class JobReconciler(Reconciler[str]):
    """Sets the number of workers of suspended jobs to what fits the cluster and their profile."""

    def __init__(self, around: ReconcilerContext, *, round_s: float = _ROUND_S) -> None:
        super().__init__(around, "jobs")
        self._around = around
        self._round_s = round_s
        self._inbox: EventInbox[RightSizingEvent] = EventInbox(lambda: self.queue.add(CLUSTER_KEY))
        self._nodes: ParseCache[ObjectKey, KubeNode] = ParseCache(parse_node)
        self.reset()

    def reset(self) -> None:
        """Forget jobs; the next run begins from lists."""
        self.machine = JobRightSizer()
        self._inbox.drain()
        self._served: dict[str, Resource] = {}

    def is_ready(self) -> bool:
        """Also while another leads: the machine follows jobs, and nothing is written."""
        return self.is_started

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Watch the kinds of jobs that the server knows."""
        served = await self.cluster.discover()
        self._served = {kind: one for kind, one in _RESOURCES.items() if one is JOBS or served.has(one)}
        for kind, one in self._served.items():
            informer = self.make_informer(
                one, keep=drop_managed_fields, max_objects=_JOBS_MOST, labels=f"{LABEL_MANAGED}={MANAGED}"
            )
            informer.add_listener(partial(self._deltas, kind))
            group.create_task(informer.run())
        group.create_task(PreemptionBoostReconciler(self._around, served, wasteful=self.machine.is_wasteful).run())
        self.queue.add(CLUSTER_KEY)

    def _deltas(self, kind: str, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.new is None:
                self._inbox.put(SuspendedJobDeleted(delta.uid))
            else:
                self._inbox.put(SuspendedJobUpdated(kind, delta.new))

    async def reconcile(self, _: str) -> Result | None:
        """Follow what became of jobs and, while this one leads, decide about those that wait."""
        term = self.term()
        at_s = self.clock.monotonic_s()
        self._carry_out(self.machine.on_events(self._inbox.drain(), RightSizingInputs(0.0), at_s, leads=False), None)
        # An engine that began anew has no nodes for a while, which does not mean that there are none.
        if term is not None and self._around.engine.nodes.is_synced and self.machine.is_waiting(at_s):
            ground = await self._ground()
            self._carry_out(self.machine.on_events((), ground, at_s, leads=True), term.epoch)
        # Time is an event, too: waits and deadlines.
        return Result(self._round_s if len(self.machine) else self._round_s * 4.0)

    async def _ground(self) -> RightSizingInputs:
        """Nodes and points of this moment."""
        wanted = self.machine.pending_profiles()

        def look(core: Core) -> tuple[dict[str, Inventory], dict[str, tuple[SizeMeasurement, ...]]]:
            points = core.state.points
            known = {profile: measured_sizes(points[profile]) for profile in wanted if profile in points}
            return {name: record.inventory for name, record in core.state.nodes.items()}, known

        inventories, known = await self._around.loop.read(look)
        sites = tuple(self._sites(inventories))
        coming = set()
        for profile, models in ((profile, {site.gpu_model for site in sites}) for profile in known):
            for model in sorted(models):
                foreseen = self._foreseen(profile, model, known[profile])
                if foreseen is None:
                    coming.add(profile)
                else:
                    known[profile] += foreseen
        return RightSizingInputs(self.clock.now_ns() / 1e9, sites, known, frozenset(coming))

    def _foreseen(
        self, profile: str, model: str, known: tuple[SizeMeasurement, ...]
    ) -> tuple[SizeMeasurement, ...] | None:
        """Predictions between what was measured; None while they are being made."""
        counts = unmeasured_gpu_counts(known, model)
        if self._around.foresees is None or not counts:
            return ()
        found = self._around.foresees(ScaleQuestion(profile, model, counts))
        if found is None or found.why_none == NOT_LEARNED_REASON:
            return None
        basis = f"predicted from {found.learned_from} configurations"
        return tuple(
            SizeMeasurement(model, "", one.gpus, *one.throughput_hz, *one.power_w, basis) for one in found.counts
        )

    def _sites(self, inventories: dict[str, Inventory]) -> list[CandidateNode]:
        nodes = self._around.engine.nodes.objects
        self._nodes.retain(nodes.keys())
        read = ((key.name, self._nodes.get(key, one)) for key, one in nodes.items())
        return [candidate_node_of(node, inventories.get(name)) for name, node in read if node is not None]

    # Writes

    def _carry_out(self, told: Sequence[RightSizingInstruction], epoch: int | None) -> None:
        for one in told:
            match one:
                case RecordJobEvent() if self.term() is not None:
                    self._record(one)
                case PatchJob() if epoch is not None:
                    self.tasks.start_task(self._patch(one, epoch))

    async def _patch(self, asked: PatchJob, epoch: int) -> None:
        job = asked.job
        resource = self._served[job.kind]
        try:
            await self.write(
                lambda: self.cluster.patch(
                    resource, job.name, asked.operations, PatchKind.JSON, namespace=job.namespace
                ),
                epoch=epoch,
            )
        except ClusterError as error:
            self.failures += 1
            self.log.info("job=%s/%s patched=no outcome=%s error=%s", job.namespace, job.name, asked.outcome, error)
            self._inbox.put(JobPatchFailed(job.uid, describe_failure(error), str(error)))
            return
        self.log.info("job=%s/%s outcome=%s reason=%s", job.namespace, job.name, asked.outcome, asked.why)
        self._inbox.put(JobPatched(job.uid))

    def _record(self, told: RecordJobEvent) -> None:
        """An Event on the job; one that is lost is lost: the record says the same."""
        job = told.job
        self.events.record(
            EventReference(self._served[job.kind].api_version, job.kind, job.namespace, job.name, job.uid),
            told.text,
            is_warning=told.is_warning,
            reason=_REASONS.get(told.outcome, "EelgridNotRightSized"),
            action="RightSizing",
        )
