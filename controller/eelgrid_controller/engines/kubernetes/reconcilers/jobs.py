"""Job reconciler: right-sizes suspended jobs, and boosts Kueue Workloads that are costly to preempt.

The boost of a Workload's priority is bounded. With G GPUs and t seconds of work that would be lost,

    c = G t / (G t + HALF_COST_GPU_S)    p = min(1, t / left)    boost = max * floor(4 (1 - (1 - c)^(1 + p))) / 4

where `left` is what the promise can still bear. Only admitted Workloads are boosted. BOOST_HYSTERESIS keeps
the steps from flapping. A boost that somebody else set is left alone.

Source: KEP-7990 of Kueue.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

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
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, parse_node
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, pod_requests
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference
from eelgrid_controller.engines.kubernetes.model.well_known import LABEL_MANAGED, MANAGED
from eelgrid_controller.engines.kubernetes.pods.right_sizer import (
    CandidateNode,
    JobPatched,
    JobPatchFailed,
    JobRightSizer,
    PatchJob,
    RecordJobEvent,
    RightSizingEvent,
    RightSizingInputs,
    RightSizingInstruction,
    SuspendedJobDeleted,
    SuspendedJobUpdated,
    candidate_node_of,
    measured_sizes,
    unmeasured_gpu_counts,
)
from eelgrid_controller.engines.kubernetes.pods.suspended_job import SizeMeasurement
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.pod_writer import describe_failure
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import (
    CLUSTER_KEY,
    EventInbox,
    ParseCache,
    Reconciler,
    Result,
)
from eelgrid_controller.objectives.forecasts import NOT_LEARNED_REASON, ScaleQuestion
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
    text = (queue["metadata"].get("annotations") or {}).get(well_known.ANNOTATION_PREEMPTION_BOOST, "")
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
        self.written = 0
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
            else:
                self.written += 1
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
        before = int(has.ours) if has.ours is not None and has.ours.isdigit() else 0
        return boost_patch(workload, compute_boost(run, limit, before) if run is not None else 0)


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
                assert delta.old is not None
                self._inbox.put(SuspendedJobDeleted(delta.old["metadata"]["uid"]))
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
